"""InfoNCE and its forms: over more directions, without likely false negatives, and against a
teacher.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import functional
from ..anchors import Anchors
from ..checks import (
    Choice,
    Fixed,
    IdsLike,
    Names,
    Number,
    as_id_numbers,
    check_embeddings,
    check_matrix,
    check_number,
    one_of,
)
from ..engine.vectors import host_may_read
from ..similarity import Similarity
from ..terms import identity, softplus
from .base import LEAST_LOG, PairLoss

ACROSS: tuple[str, ...] = "image-text", "text-image"  # which have the positives
DIRECTIONS: tuple[str, ...] = (*ACROSS, "image-image", "text-text")
_OF_NEGATIVES = Names("images", "negatives")


class InfoNCELoss(PairLoss):
    r"""InfoNCE in both directions, with any number of positives per anchor.

    .. math:: \ell_i = \operatorname{mean}_{p \in pos(i)} -\log
        \frac{e^{S_{ip}/\tau}}{e^{S_{ip}/\tau} + \sum_{j \in neg(i)} e^{S_{ij}/\tau}}

    The two directions are added, where CLIP averages them; see :doc:`methods/infonce`.

    Args:
        temperature: τ, in units of cosine similarity.
        learnable: make τ a parameter, held as ``log(1/τ)`` (``log_scale``) as in CLIP.
        hardness: α, at least 0; a negative counts ``exp(α S_ij)`` times, a weight without a
            gradient (LLaVE with 9, https://arxiv.org/abs/2503.04812; EmbeddingGemma with 5,
            https://arxiv.org/abs/2509.20354).
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.
    """

    shown = ("temperature", "learnable", "hardness", "reduction")
    learnable = Fixed[bool]()
    hardness = Number(at_least=0)

    def __init__(
        self,
        temperature: float = 0.07,
        learnable: bool = False,
        *,
        hardness: float = 0.0,
        **common: Any,
    ):
        super().__init__(**common)
        self.learnable = learnable
        # (1,): FSDP and the like do not shard 0-dim parameters.
        self.log_scale = nn.Parameter(torch.zeros(1)) if learnable else None
        self.temperature = temperature
        self.hardness = hardness

    @property
    def in_cosines(self) -> bool:
        """Whether the temperature is one for cosines."""
        return bool(self.temperature < 0.5)

    @property
    def temperature(self) -> float | Tensor:
        """τ: a number, or a 0-dim tensor that follows ``log_scale`` (1,). May be set later."""
        if self.log_scale is None:
            return self._temperature
        return (-self.log_scale).exp().squeeze()

    @temperature.setter
    def temperature(self, value: float) -> None:
        """Set τ, above 0; if it is learnable, in place."""
        check_number("temperature", value, positive=True)
        self._temperature = value
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give a learnable τ the value that was set last, as is needed after ``to_empty``."""
        if self.log_scale is not None:
            self.log_scale.fill_(-math.log(self._temperature))

    def forward(
        self,
        images: Tensor | Similarity | None = None,
        texts: Tensor | None = None,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        *,
        scores: Tensor | None = None,
        negatives: Tensor | None = None,
    ) -> Any:
        """Return the loss as :meth:`PairLoss.forward` does, with further negatives of the images.

        ``negatives``: (K, D) embeddings of texts that match no image, as in NegCLIP
        (https://arxiv.org/abs/2210.01936), or (N, K, D), for each image its own. They are no
        anchors, and in a job of several processes, (K, D).
        """

        def check() -> str:
            if negatives is None:
                return "without negatives"
            if not isinstance(images, Tensor):
                expected = "expected images beside them, not scores or a Similarity"
                raise ValueError(f"negatives: {expected}")
            self._check_negatives(images, negatives)
            return "with negatives"

        sim = self._similarity(images, texts, image_ids, text_ids, scores, check=check)
        if negatives is None:
            return self._with_telemetry(self.compute(sim), sim)
        assert isinstance(images, Tensor)
        if negatives.dim() == 3:
            unmatched = self._own_negatives(images, negatives)
        else:
            unmatched = self._unmatched(images, negatives)
        return self._with_telemetry(self.compute(sim, unmatched), sim)

    def _check_negatives(self, images: Tensor, negatives: Tensor) -> None:
        """Raise an error unless negatives are (K, D) or, in one process, (N, K, D)."""
        if not isinstance(negatives, Tensor) or negatives.dim() != 3:
            check_embeddings(images, negatives, False, _OF_NEGATIVES, empty=self.sharded)
            return
        expected = f"(K, D) or ({len(images)}, K, {images.shape[1]})"
        if self.sharded:
            expected = "(K, D)"
        n, k, dim = negatives.shape
        if self.sharded or k == 0 or (n, dim) != images.shape:
            raise ValueError(f"negatives: expected shape {expected}, got {tuple(negatives.shape)}")

    def _unmatched(self, images: Tensor, negatives: Tensor) -> Similarity:
        """Return the similarities of images (N, D) with texts (K, D) that match none."""
        image_ids = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        ids = torch.ones(len(negatives), dtype=torch.int64, device=images.device)
        return self._similarity(images, negatives, image_ids, ids, names=_OF_NEGATIVES)

    def _own_negatives(self, images: Tensor, negatives: Tensor) -> Similarity:
        """Return the similarities of images (N, D) with texts (N, K, D) of their own."""
        n, k, _ = negatives.shape
        every = self._unmatched(images, negatives.flatten(0, 1))
        own = torch.arange(n * k, device=images.device)
        scores = every.pair_scores(own // k, own).view(n, k)
        ids = own.new_zeros(n), own.new_ones(k)  # which match nothing
        return Similarity.from_scores(scores, *ids, engine=self.engine)

    def compute(self, sim: Similarity, unmatched: Anchors | None = None) -> Any:
        """Return InfoNCE; ``unmatched``: further negatives of the images, which are no anchors."""
        anchors: Anchors = sim
        positives = None
        if unmatched is not None:
            anchors = Anchors.together(Anchors.pooled(sim, unmatched), sim.T)
            positives = sim.both
        return functional.info_nce_loss(
            anchors,
            self.shared(self.temperature),
            self.reduction,
            hardness=self.hardness,
            positives=positives,
        )


class DirectionalInfoNCELoss(PairLoss):
    r"""InfoNCE over chosen directions, in one softmax or in one for each; jointly, GTE's improved
    contrastive loss.

    .. math::
        \ell_i = \log \sum_d Z^d_i - S_{ii} / \tau \quad \text{or} \quad
        \sum_d \bigl( \log Z^d_i - S_{ii} / \tau \bigr)

    For ``"image-text"``, Z is :math:`\sum_j e^{S_{ij}/\tau}`, and for ``"text-image"``
    :math:`\sum_j e^{S_{ji}/\tau}`. For ``"image-image"`` and ``"text-text"``, Z is the sum over the
    other images, or texts, and has no positive (Li et al. 2023, https://arxiv.org/abs/2308.03281).
    Image i belongs to text i; ids say what else matches and is no negative. See
    :doc:`methods/infonce`.

    Args:
        temperature: τ, in units of cosine similarity.
        directions: one or several of these four names.
        joint: one softmax over all directions, which gives one value for each pair.
        reduction: see :class:`PairLoss`; ``"none"`` gives a tuple of the values (N,) of each
            softmax.
        engine, check_finite, telemetry, gather, process_group: see there.
    """

    shown = ("temperature", "directions", "joint", "reduction")
    temperature = Number(above=0)
    joint = Choice(True, False)

    def __init__(
        self,
        temperature: float = 0.07,
        directions: Sequence[str] = DIRECTIONS,
        joint: bool = True,
        **common: Any,
    ):
        super().__init__(**common)
        self.temperature = temperature
        self.directions = directions
        self.joint = joint

    @property
    def directions(self) -> Sequence[str]:
        """The names of the directions. May be set later."""
        return self._directions

    @directions.setter
    def directions(self, names: Sequence[str]) -> None:
        """Set the directions: each once, and at least one between images and texts."""
        for name in [names] if isinstance(names, str) else names:
            one_of("directions", name, *DIRECTIONS)
        if isinstance(names, str):
            raise TypeError(f"directions: expected several names, got {names!r}")
        chosen = set(names)
        if chosen.isdisjoint(ACROSS) or len(chosen) < len(names):
            expected = f"expected each once, and one of {ACROSS}"
            raise ValueError(f"directions: {expected}, got {names!r}")
        self._directions = tuple(names)

    def forward(  # type: ignore[override]
        self,
        images: Tensor,
        texts: Tensor,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
    ) -> Any:
        """Return the loss of (N, D) images and as many texts.

        ``image_ids``, ``text_ids``: None, or both, (N,) integers that are equal for image i and
        text i.
        """

        def check() -> str:
            check_pairs(images, texts, image_ids, text_ids)
            return ""

        sim = self._similarity(images, texts, image_ids, text_ids, check=check)
        among_images = self._similarity(images, images, image_ids, image_ids)
        among_texts = self._similarity(texts, texts, text_ids, text_ids)
        return self._with_telemetry(self.compute(sim, among_images, among_texts), sim)

    def compute(  # type: ignore[override]
        self, sim: Similarity, images: Similarity, texts: Similarity
    ) -> Any:
        """Return the loss of images with texts, with images, and texts with texts."""
        anchors = dict(zip(DIRECTIONS, (sim, sim.T, images, texts), strict=True))
        scale = 1 / self.temperature
        across = [name for name in self.directions if name in ACROSS]
        pairs = Anchors.together(*(anchors[name] for name in across))  # in one pass
        norms = dict(zip(across, pairs.split(pairs.logsumexp(scale)), strict=True))
        for name in self.directions:
            if name not in norms:  # another batch, which processes share by itself
                norms[name] = anchors[name].logsumexp(scale)
        if self.joint:
            return self._of_softmax(sim, list(norms.values()), len(across))
        values = []
        for name in self.directions:
            own = sim if name.startswith("image") else sim.T
            values.append(self._of_softmax(own, [norms[name]], int(name in ACROSS)))
        return sum(values) if self.reduction != "none" else tuple(x for (x,) in values)

    def _of_softmax(self, own: Similarity, norms: Sequence[Tensor], several: int) -> Any:
        """Return the loss of one softmax, from the log-sum-exps of its negatives; ``several`` have
        the positive.
        """
        scale = 1 / self.temperature
        norm = norms[0]
        if len(norms) > 1:
            norm = torch.stack([*norms]).clamp_min(LEAST_LOG).logsumexp(0)
        if several:
            log = math.log(several)
            values = own.mean_of_positives(softplus, scale=-scale, shift=norm - log) + log
        else:
            values = norm - scale * own.mean_of_positives(identity)
        return own.reduce(values, self.reduction)


def check_pairs(images: Any, texts: Any, image_ids: Any, text_ids: Any) -> None:
    """Raise an error unless image i belongs to text i; on an accelerator, ids are not compared."""
    if not isinstance(images, Tensor) or not isinstance(texts, Tensor) or len(images) != len(texts):
        raise ValueError("texts: expected a tensor, and one text for each image")
    if (image_ids is None) != (text_ids is None):
        raise ValueError("image_ids, text_ids: expected both or neither")
    if image_ids is None:
        return
    image_ids = as_id_numbers("image_ids", image_ids)
    text_ids = as_id_numbers("text_ids", text_ids)
    if host_may_read(text_ids) and not torch.equal(image_ids, text_ids):
        expected = "expected image_ids, as image i belongs to text i"
        raise ValueError(f"text_ids: {expected}, got others")


def described_model(name: str, other: Any, images: Any, texts: Any) -> str:
    """Return what another model's part of a shared batch is, in words.

    Raise an error unless it is of this process's images and texts.
    """
    if not isinstance(other, Similarity) or other.share is None:
        expected = "expected a Similarity.sharded in a job of several processes"
        raise TypeError(f"{name}: {expected}, got {type(other).__name__}")
    sizes = len(images), len(texts)
    got = other.shape[0], other.T.shape[0]
    if got != sizes:
        raise ValueError(f"{name}: expected {sizes} images and texts of this process, got {got}")
    return f"{name} of {other.totals} images and texts"


def check_guide_ids(guide: Similarity, sim: Similarity) -> None:
    """Raise an error unless a guide has the ids of the loss; on an accelerator, if one has any."""
    ids = zip(sim.ids, guide.ids, strict=True)
    if sim.share is not None:  # the ids of all processes, so that all raise the error
        ids = zip(sim.all_ids, guide.all_ids, strict=True)
    for own, others in ids:
        same = (own is None) == (others is None)
        if own is not None and others is not None and host_may_read(own) and host_may_read(others):
            same = torch.equal(own, others)
        if not same:
            expected = "expected the ids of the loss, as its positives' scores are limits"
            raise ValueError(f"guide: {expected}")


class FilteredInfoNCELoss(PairLoss):
    r"""InfoNCE without negatives that score too high next to the positive, as they are probably
    matches without a label.

    .. math:: \ell_i = \operatorname{mean}_{p \in pos(i)} -\log \frac{e^{S_{ip}/\tau}}
        {e^{S_{ip}/\tau} + \sum_{j \in neg(i),\, G_{ij} < t_i} e^{S_{ij}/\tau}}, \qquad
        t_i = \bar G_{i+} + m \quad \text{or} \quad \bar G_{i+} + m |\bar G_{i+}|

    with the mean :math:`\bar G_{i+}` of the positives' scores. G is S itself, as in
    *Qwen3-Embedding* (Zhang et al. 2025, https://arxiv.org/abs/2506.05176, m = 0.1) and
    *NV-Retriever* (Moreira et al. 2024, https://arxiv.org/abs/2407.15831, m = -0.05, relative), or
    the scores of a guide, as in *GISTEmbed* (Solatorio 2024, https://arxiv.org/abs/2402.16829, m =
    0). See :doc:`methods/infonce`.

    Args:
        temperature: τ, in units of cosine similarity.
        margin: m.
        relative: in units of the positives' score.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.
    """

    shown = ("temperature", "margin", "relative", "reduction")
    temperature = Number(above=0)
    margin = Number()
    relative = Choice(True, False)

    def __init__(
        self,
        temperature: float = 0.05,
        margin: float = 0.1,
        relative: bool = False,
        **common: Any,
    ):
        super().__init__(**common)
        self.temperature = temperature
        self.margin = margin
        self.relative = relative

    @property
    def in_cosines(self) -> bool:
        """Whether the temperature is one for cosines."""
        return self.temperature < 0.5

    def forward(
        self,
        images: Tensor | Similarity | None = None,
        texts: Tensor | None = None,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        *,
        scores: Tensor | None = None,
        guide: Similarity | None = None,
    ) -> Any:
        """Return the loss as :meth:`PairLoss.forward` does.

        ``guide``: a :class:`Similarity` with the same ids of the embeddings of the same images and
        texts by another model. In a job it is a :meth:`Similarity.sharded`. The ids themselves are
        not compared on accelerators, as the host would wait.
        """

        def check() -> str:
            if guide is None:
                return "without a guide"
            return described_model("guide", guide, images, texts) if self.sharded else ""

        sim = self._similarity(images, texts, image_ids, text_ids, scores, check=check)
        if guide is not None:
            functional.check_other_model("guide", guide, sim)
            check_guide_ids(guide, sim)
        return self._with_telemetry(self.compute(sim, guide), sim)

    def compute(self, sim: Similarity, guide: Similarity | None = None) -> Any:
        """Return InfoNCE without the negatives that score above the positive plus a margin."""
        judge = sim.both if guide is None else guide.both
        own = judge.mean_of_positives(identity)
        margin = self.margin * own.abs() if self.relative else self.margin
        return functional.info_nce_loss(
            sim,
            self.temperature,
            self.reduction,
            below=own + margin,
            guide=None if guide is None else judge,
        )


class DistillationLoss(PairLoss):
    r"""Cross-entropy against the softmax of a teacher's scores, over both directions.

    .. math:: \ell_i = -\sum_j q_{ij} \log p_{ij}, \qquad
        p_i = \operatorname{softmax}_j(S_{ij} / \tau), \qquad
        q_i = \operatorname{softmax}_j(T_{ij} / \tau_t)

    over all candidates, whatever matches. It is the divergence KL(q | p) plus the entropy of q, a
    constant (Hinton et al. 2015, https://arxiv.org/abs/1503.02531). The teacher gets no gradient.
    See :doc:`methods/infonce`.

    Args:
        temperature: τ, in units of cosine similarity.
        teacher_temperature: :math:`\tau_t`, in units of the teacher's scores.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.
    """

    shown = ("temperature", "teacher_temperature", "reduction")
    temperature = Number(above=0)
    teacher_temperature = Number(above=0)

    def __init__(self, temperature: float = 0.07, teacher_temperature: float = 0.07, **common: Any):
        super().__init__(**common)
        self.temperature = temperature
        self.teacher_temperature = teacher_temperature

    @property
    def in_cosines(self) -> bool:
        """Whether the temperature is one for cosines."""
        return self.temperature < 0.5

    def forward(  # type: ignore[override]
        self,
        images: Tensor,
        texts: Tensor,
        teacher: Tensor | Similarity,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
    ) -> Any:
        """Return the loss of (N, D) images and (M, D) texts.

        ``teacher``: (N, M) scores of another model, or a :class:`Similarity` of its embeddings, see
        :meth:`FilteredInfoNCELoss.forward`. Ids are as in :meth:`PairLoss.forward`; they are for
        ``telemetry`` alone.
        """

        def check() -> str:
            return described_model("teacher", teacher, images, texts) if self.sharded else ""

        no_ids = image_ids is None and text_ids is None
        if no_ids and not self.sharded and len(images) != len(texts):
            image_ids = torch.arange(len(images), device=images.device)
            text_ids = torch.arange(len(texts), device=texts.device)
        sim = self._similarity(images, texts, image_ids, text_ids, check=check)
        if isinstance(teacher, Tensor):
            check_matrix("teacher", teacher, "(N, M)", self.check_finite)
            if teacher.shape != sim.shape:
                raise ValueError(f"teacher: expected shape {sim.shape}, got {tuple(teacher.shape)}")
            teacher = Similarity.from_scores(teacher, image_ids, text_ids)
        return self._with_telemetry(self.compute(sim, teacher), sim)

    def compute(  # type: ignore[override]
        self, sim: Similarity, teacher: Similarity
    ) -> Any:
        """Return the loss of the similarities of two models."""
        return functional.distillation_loss(
            sim, teacher, self.temperature, self.teacher_temperature, self.reduction
        )
