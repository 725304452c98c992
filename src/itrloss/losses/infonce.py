"""Forms of InfoNCE: over more directions, without likely false negatives, and against a teacher."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import functional
from ..anchors import Anchors
from ..checks import check_matrix, one_of
from ..engine.vectors import host_may_read
from ..similarity import Similarity
from ..terms import identity, negative_log_likelihood
from .base import PairLoss, above_zero


def _kind(other: Any) -> str:
    """Return what a teacher or guide is, in words: processes that differ in it would exchange
    different things.
    """
    shared = isinstance(other, Similarity) and other.exchange is not None
    return f"{type(other).__name__} of {'several processes' if shared else 'one process'}"


DIRECTIONS: tuple[str, ...] = "image-text", "text-image", "image-image", "text-text"


@dataclass(eq=False, repr=False)
class DirectionalInfoNCELoss(PairLoss):
    r"""InfoNCE over chosen directions, in one softmax or in one for each; jointly, GTE's improved
    contrastive loss.

    .. math::
        \ell_i = \log \sum_d Z^d_i - S_{ii} / \tau \quad \text{or} \quad
        \sum_d \bigl( \log Z^d_i - S_{ii} / \tau \bigr)

    For ``"image-text"``, Z is :math:`\sum_j e^{S_{ij}/\tau}`, and for ``"text-image"``
    :math:`\sum_j e^{S_{ji}/\tau}`. Those of ``"image-image"`` and ``"text-text"`` are sums over the
    other images, or texts, and have no positive (Li et al. 2023, https://arxiv.org/abs/2308.03281).
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

    temperature: float = above_zero(0.07)
    directions: Sequence[str] = DIRECTIONS
    joint: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("joint", self.joint, True, False)
        directions = self.directions
        for direction in (directions,) if isinstance(directions, str) else directions:
            one_of("directions", direction, *DIRECTIONS)
        if isinstance(directions, str):
            raise TypeError(f"directions: expected several names, got {directions!r}")
        if not set(DIRECTIONS[:2]) & set(directions) or len(set(directions)) < len(directions):
            raise ValueError(
                f"directions: expected each once, and one of {DIRECTIONS[:2]}, got {directions!r}"
            )
        self.directions = tuple(directions)

    def forward(  # type: ignore[override]
        self,
        images: Tensor,
        texts: Tensor,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> Any:
        """Return the loss of (N, D) images and as many texts.

        ``image_ids``, ``text_ids``: None, or both, (N,) integers that are equal for image i and
        text i.
        """
        ids = image_ids, text_ids
        if not all(isinstance(x, Tensor) for x in (images, texts)) or len(images) != len(texts):
            self._fail(ValueError("texts: expected a tensor, and one text for each image"))
        if (image_ids is None) != (text_ids is None):
            self._fail(ValueError("image_ids, text_ids: expected both or neither"))
        if all(isinstance(x, Tensor) and host_may_read(x) for x in ids) and not torch.equal(*ids):  # type: ignore
            self._fail(
                ValueError("text_ids: expected image_ids, as image i belongs to text i, got others")
            )
        sims = [
            self._similarity(x, y, own, others, None)
            for x, y, own, others in (
                (images, texts, image_ids, text_ids),
                (images, images, image_ids, image_ids),
                (texts, texts, text_ids, text_ids),
            )
        ]
        return self._value(*sims)

    def compute(self, sim: Similarity, images: Similarity, texts: Similarity) -> Any:  # type: ignore[override]
        anchors = dict(zip(DIRECTIONS, (sim, sim.T, images, texts), strict=True))
        across = [d for d in self.directions if d in DIRECTIONS[:2]]
        pairs = Anchors.together(*(anchors[d] for d in across))  # rows and columns in one pass
        norms = dict(zip(across, pairs.split(pairs.logsumexp(1 / self.temperature)), strict=True))
        norms |= {
            d: anchors[d].logsumexp(1 / self.temperature) for d in self.directions if d not in norms
        }
        if self.joint:
            return self._of_softmax(sim, list(norms.values()), len(across))
        sides = {d: sim if d.startswith("image") else sim.T for d in self.directions}
        values = [self._of_softmax(sides[d], [norms[d]], across.count(d)) for d in self.directions]
        return sum(values) if self.reduction != "none" else tuple(x for (x,) in values)

    def _of_softmax(self, own: Similarity, norms: Sequence[Tensor], several: int) -> Any:
        """Return the loss of one softmax, from the log-sum-exps of its negatives; ``several`` have
        the positive.
        """
        scale, norm = 1 / self.temperature, norms[0]
        if len(norms) > 1:
            # of -inf alone, the gradient would be nan
            norm = torch.stack([*norms]).clamp_min(-1e30).logsumexp(0)
        if several:
            log = math.log(several)
            values = own.mean_of_positives(negative_log_likelihood, norm - log, scale) + log
        else:
            values = norm - scale * own.mean_of_positives(identity)
        return own.reduce(values, self.reduction)


@dataclass(eq=False, repr=False)
class FilteredInfoNCELoss(PairLoss):
    r"""InfoNCE without negatives that score too high beside the positive, as they are probably
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

    temperature: float = above_zero(0.05)
    margin: float = 0.1
    relative: bool = False

    def forward(  # type: ignore[override]
        self,
        images: Tensor | Similarity | None = None,
        texts: Tensor | None = None,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
        *,
        scores: Tensor | None = None,
        guide: Similarity | None = None,
    ) -> Any:
        """Return the loss as :meth:`PairLoss.forward` does.

        ``guide``: a :class:`Similarity` with the same ids of the embeddings of the same images and
        texts by another model. In a job it is a :meth:`Similarity.sharded`.
        """
        sim = self._similarity(
            images, texts, image_ids, text_ids, scores, also_same=f"guide {_kind(guide)}"
        )
        if guide is not None:
            without_ids = [
                [x is None for x in s.ids]
                for s in (sim, functional._other_model("guide", guide, sim))
            ]
            if without_ids[0] != without_ids[1]:
                raise ValueError(
                    "guide: expected the ids of the loss, as its positives' scores are limits"
                )
        return self._value(sim, guide)

    def compute(self, sim: Similarity, guide: Similarity | None = None) -> Any:
        judge = (sim if guide is None else guide).both
        own = judge.mean_of_positives(identity)
        below = own + self.margin * (own.abs() if self.relative else 1)
        other = None if guide is None else judge
        return functional.info_nce_loss(
            sim, self.temperature, self.reduction, below=below, guide=other
        )


@dataclass(eq=False, repr=False)
class DistillationLoss(PairLoss):
    r"""Cross-entropy against the softmax of a teacher's scores, over both directions.

    .. math:: \ell_i = -\sum_j q_{ij} \log p_{ij}, \qquad p_i = \operatorname{softmax}_j(S_{ij} / \tau), \qquad
        q_i = \operatorname{softmax}_j(T_{ij} / \tau_t)

    over all candidates, whatever matches. It is the divergence KL(q | p) plus the entropy of q, a
    constant (Hinton et al. 2015, https://arxiv.org/abs/1503.02531). The teacher gets no gradient.
    See :doc:`methods/infonce`.

    Args:
        temperature: τ, in units of cosine similarity.
        teacher_temperature: :math:`\tau_t`, in units of the teacher's scores.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.
    """

    temperature: float = above_zero(0.07)
    teacher_temperature: float = above_zero(0.07)

    def forward(  # type: ignore[override]
        self,
        images: Tensor,
        texts: Tensor,
        teacher: Tensor | Similarity,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> Any:
        """Return the loss of (N, D) images and (M, D) texts.

        ``teacher``: (N, M) scores of another model, or a :class:`Similarity` of its embeddings, see
        :meth:`FilteredInfoNCELoss.forward`. Ids are as in :meth:`PairLoss.forward`; they are for ``telemetry`` alone.
        """
        if not self._sharded and image_ids is None is text_ids and len(images) != len(texts):
            image_ids, text_ids = (torch.arange(len(x), device=x.device) for x in (images, texts))
        if isinstance(teacher, Tensor) and self._sharded:
            self._fail(
                TypeError(
                    "teacher: expected a Similarity.sharded in a job of several processes, got a tensor"
                )
            )
        sim = self._similarity(
            images, texts, image_ids, text_ids, None, also_same=f"teacher {_kind(teacher)}"
        )
        if isinstance(teacher, Tensor):
            check_matrix("teacher", teacher, "(N, M)", self.check_finite)
            if teacher.shape != sim.shape:
                raise ValueError(f"teacher: expected shape {sim.shape}, got {tuple(teacher.shape)}")
            teacher = Similarity.from_scores(teacher, image_ids, text_ids)
        return self._value(sim, teacher)

    def compute(self, sim: Similarity, teacher: Similarity) -> Any:  # type: ignore[override]
        temperatures = self.temperature, self.teacher_temperature
        return functional.distillation_loss(sim, teacher, *temperatures, self.reduction)
