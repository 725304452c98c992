"""DVSE's losses on sets of sub-embeddings, and its objective."""

from __future__ import annotations

from dataclasses import KW_ONLY
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import functional
from ..anchors import AnchorSide
from ..checks import (
    IMAGES_AND_TEXTS,
    CheckedModule,
    IdsLike,
    KeepsDtypes,
    as_mask,
    as_size,
    check_embeddings,
    check_matrix,
    from_numpy,
    option,
    takes_queries,
)
from ..distributed import ProcessGroup, digest, gather_parts, world_size
from ..engine.matrix import MEMORY_BUDGET, Matrix, choose_engine, large_matrix
from ..engine.products import product
from ..engine.related import PassedIds
from ..engine.vectors import Embeddings, normalized
from ..functional import Values
from ..similarity import Similarity
from ..torch_versions import is_compiling
from .base import Loss, SimilarityLoss, existing
from .other_model import matrix_of_scores
from .telemetry import describe

_NAMES = IMAGES_AND_TEXTS._replace(rows="image_sets")


class VarianceAwareLoss(SimilarityLoss):
    r"""Variance-aware weighting loss (Wei et al., DVSE 2023, Eq. 8, 11) on sets of image
    embeddings.

    .. math::
        \sum_k \operatorname{mean}_{(i, p)} \Bigl[ \frac1{\sigma_{ikp}^2}
            \bigl[\alpha - S^k_{ip} + \max_{j \in neg(i)} S^k_{ij}\bigr]_+ + \log \sigma_{ikp}
            \Bigr]
        + \text{the same from the texts}, \qquad
        \sigma_{ikp} = 1 + \operatorname{Std}_{j \ne p} S^k_{ij}

    over the positive pairs (i, p), with the sample standard deviation of head k's scores of image i
    with all texts but the target p (Eq. 7). Think twice before you add it to DCL, see the warning
    in :doc:`losses/variance_aware`.

    Args:
        margin: α, in units of cosine similarity.
        detach_sigma: treat σ as a weight.
        shared_sigma: True, as printed: in the texts' direction, too, a pair's σ is taken over its
            image's scores. False: there it is taken over its text's scores, with all images but the
            pair's.
        reduction: see :func:`itrloss.functional.variance_aware_loss`.
        engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`. The telemetry
            shows each pair's best head, and forms the matrix. With several captions per image,
            an accelerator synchronises or, in a CUDA graph or compiled, forms the matrices.

    Relations:
        The sum of :class:`TripletLoss` of the hardest negative over all heads, weighted by σ.

    Example:
        >>> import torch
        >>> import itrloss
        >>> heads, texts = torch.randn(8, 4, 16), torch.randn(8, 16)
        >>> itrloss.VarianceAwareLoss()(heads, texts).shape
        torch.Size([])
    """

    margin: float = 0.2
    detach_sigma: bool = False
    shared_sigma: bool = True

    @takes_queries
    def forward(
        self,
        image_sets: Tensor,
        texts: Tensor,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
    ) -> Values:
        """Return the loss of sets of image embeddings (N, K, D) of any length; else see
        :meth:`PairLoss.forward`.
        """
        heads, frame = self._heads(image_sets, texts, (image_ids, text_ids))
        value = functional.variance_aware_loss(
            heads, self.margin, self.detach_sigma, self.shared_sigma, self.reduction
        )
        if is_compiling():
            return value
        if self.is_to_look(frame):
            self._look(value, frame)
        if self._observed:
            self.telemetry = self._described(heads, frame)
        return value

    def _heads(
        self, images: Tensor, texts: Tensor, ids: PassedIds
    ) -> tuple[list[Similarity], Similarity]:
        """Return the similarities of each head, and one of the first head from embeddings."""

        def check() -> str:
            """Check the input; return what has to be the same in all processes."""
            empty = self.sharded
            check_matrix("image_sets", images, "(N, K, D)", dims=3, empty=empty)
            elements = images.flatten(0, 1)
            check_embeddings(elements, texts, self.check_finite, _NAMES, empty=empty)
            return f"{images.shape[1]} heads, {self.described()}"

        self.agree(check)
        frame = self._between((images[:, 0], texts), ids, _NAMES)
        units = normalized(images.transpose(0, 1))  # (K, N, D)
        n = frame.pairs.shape[0]
        if n > units.shape[1]:  # padding of a batch that processes share
            units = F.pad(units, (0, 0, 0, n - units.shape[1]))
        matrices = head_matrices(units, frame, self.engine)
        heads = [Similarity.of_anchors(AnchorSide(x, 0, frame.share)) for x in matrices]
        return heads, frame

    @torch.no_grad()
    def _described(self, heads: list[Similarity], frame: Similarity) -> dict[str, Tensor]:
        """Return the figures of the best head of each pair, by which a model of sets retrieves."""
        scores = [sim.detach().scores() for sim in heads]
        best = reduce(torch.maximum, scores)
        matrix = matrix_of_scores(best, frame, "auto")
        of_best = Similarity.of_anchors(AnchorSide(matrix, 0, frame.share))
        return describe(of_best, self.margin)


def head_matrices(
    units: Tensor,  # (K, N, D) sub-embeddings at unit length
    frame: Similarity,  # of one head
    engine: str,
) -> list[Matrix]:
    """Return the score matrices of all heads with the texts of a similarity.

    Where scores are kept, they come from one product: 0.7 of the time at 512 images, 6 heads, 1024
    dimensions (python -m benchmarks --losses "variance aware" --shapes 512x6x1024 --variants ours
    "ours tiled").
    """
    texts = normalized(frame.vectors[1].target)  # (M, D)
    k, n, _ = units.shape
    numel = n * len(texts)
    chosen = choose_engine(engine, numel, MEMORY_BUDGET // k, units)
    fits = k * numel * units.element_size() <= MEMORY_BUDGET
    if chosen == "dense" or (engine == "auto" and chosen == "tiled" and fits):
        scores = product(units.flatten(0, 1), texts.T).view(k, n, len(texts))
        return [Matrix.of_scores(Embeddings(x, False), frame.pairs, chosen) for x in scores]
    shared = Embeddings(texts, False)
    heads = [Embeddings(x, False) for x in units]
    return [large_matrix(x, shared, frame.pairs, chosen, 0) for x in heads]


class DynamicOrthogonalLoss(Loss):
    r"""Dynamic orthogonal constraint (Wei et al., DVSE 2023, Eq. 4): an image's sub-embeddings
    should differ.

    .. math:: \Bigl[ \frac1{K (K - 1)} \sum_{i \ne j} |m_i m_j \langle u_i, u_j \rangle|
              - \beta \Bigr]_+

    for the normalised residuals u of an image's K heads and a gate m that selects which of them
    take part, see :class:`DynamicGate` and :doc:`losses/orthogonal`.

    Args:
        slack: β, the correlation that is tolerated.
        pair_reduction: ``"mean"`` over ordered pairs of heads; ``"sum"`` as printed, which grows
            with K (K - 1); or ``"frobenius"``, the root of the sum of squares, divided by K², which
            is always below the default slack.
        normalize_residuals: False takes the inner products of the residuals as they are, as
            printed.
        reduction: over the images: ``"mean"``, ``"sum"``, or ``"none"`` for (N,).
        gather, process_group: see :class:`PairLoss`.

    Relations:
        A penalty of heads that are alike, next to a loss of pairs; it needs no texts.

    Example:
        >>> import torch
        >>> import itrloss
        >>> heads = torch.eye(4).expand(8, 4, 4)  # orthogonal already
        >>> float(itrloss.DynamicOrthogonalLoss()(heads))
        0.0
    """

    slack: float = 0.4
    pair_reduction: functional.PairReduction = "mean"

    _: KW_ONLY
    normalize_residuals: bool = True

    def forward(self, residuals: Tensor, gate: Tensor | None = None) -> Values:
        """Return the loss, see :func:`itrloss.functional.dynamic_orthogonal_loss`."""

        def reduced(
            residuals: Tensor, gate: Tensor | None, reduction: functional.Reduction
        ) -> Tensor:
            """Return the loss of this process's samples."""
            return functional.dynamic_orthogonal_loss(
                residuals,
                gate,
                self.slack,
                self.pair_reduction,
                reduction,
                self.normalize_residuals,
            )

        return self._of_samples((residuals, gate), reduced)


class DynamicGate(KeepsDtypes, CheckedModule):
    r"""The gate that selects which heads of an image take part in the orthogonal constraint (DVSE
    Eq. 3).

    .. math:: m = \operatorname{round}(\sigma(\operatorname{pool}(W z) - c))

    for the features z of an image's regions, with a frozen random W, mean pooling, and the running
    mean c of the pooled values over training batches; see :doc:`losses/orthogonal`.

    Args:
        dim: of the region features.
        heads: K, their number.
        momentum: weight of a batch in the running means.

    Attributes:
        weight: (heads, dim) W; a buffer, not a parameter.
        centre: (heads,) c, float32: it keeps its dtype when the module is cast.
        on_rate: (heads,) running share of the images for which a head is on. A head that stays at 0
            or 1 is stuck.

    Relations:
        It chooses the heads of :class:`DynamicOrthogonalLoss`, and is no loss itself.

    Example:
        >>> import torch
        >>> import itrloss
        >>> gate = itrloss.DynamicGate(dim=16, heads=4)
        >>> gate(torch.randn(8, 36, 16)).shape
        torch.Size([8, 4])
    """

    momentum: float = option(above=0, at_most=1)
    weight: Tensor
    centre: Tensor
    on_rate: Tensor
    batches: Tensor

    def __init__(self, dim: int, heads: int, *, momentum: float = 0.1):
        super().__init__()
        dim = as_size("dim", dim)
        heads = as_size("heads", heads)
        self.momentum = momentum
        with torch.inference_mode(False):  # inference tensors could not be written to later
            # float32, whatever the default dtype is
            self.register_buffer("weight", torch.empty(heads, dim, dtype=torch.float32))
            self.register_buffer("centre", torch.empty(heads, dtype=torch.float32))
            self.register_buffer("on_rate", torch.empty(heads, dtype=torch.float32))
            self.register_buffer("batches", torch.tensor(0))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw W anew, and begin the running means again, as is needed after ``to_empty``."""
        self.weight.normal_().div_(self.weight.shape[1] ** 0.5)
        self.centre.zero_()
        self.on_rate.zero_()
        self.batches.zero_()

    @torch.no_grad()
    def forward(
        self, regions: Tensor, mask: Tensor | None = None, process_group: ProcessGroup = None
    ) -> Tensor:
        """Return the gates (N, heads), float32 zeros and ones without a gradient.

        In training mode, the running means are updated first, over all processes of the group.

        Args:
            regions: (N, R, dim) floating point.
            mask: (N, R), True or 1 for regions that exist. An image without any has all gates 0,
                and does not count in the running means.
        """
        if not self.training or world_size(process_group) == 1:
            own = every = self._projected(regions, mask)
        else:
            same = (
                f"{self.extra_repr()}, weight {digest(self.weight)}, centre {digest(self.centre)}"
            )
            (parts,) = gather_parts(lambda: [self._projected(regions, mask)], process_group, same)
            own, every = parts[torch.distributed.get_rank(process_group)], torch.cat(parts)
        if self.training:
            self._follow(self.centre, every)
            self._follow(self.on_rate, self._on(every) + 0 * every)  # nan where that is
            self.batches.add_(every.isfinite().all(1).any())  # not one without images
        return self._on(own)

    def _on(self, projected: Tensor) -> Tensor:
        """Return (N, heads), 1 for heads that are on and 0 for others."""
        return (projected > self.centre).float()  # round(sigmoid(x)) is 1 for x > 0

    def _projected(self, regions: Tensor, mask: Tensor | None) -> Tensor:
        """Return the pooled values (N, heads), nan for an image without regions."""
        dim = self.weight.shape[1]
        regions = from_numpy(regions)
        if not isinstance(regions, Tensor):
            raise TypeError(f"regions: expected a tensor, got {type(regions).__name__}")
        if regions.dim() != 3 or regions.shape[2] != dim:
            raise ValueError(f"regions: expected shape (N, R, {dim}), got {tuple(regions.shape)}")
        shape = tuple(regions.shape[:2])
        if mask is None:
            exists = torch.ones(shape, dtype=torch.float32, device=regions.device)
        else:
            mask = from_numpy(mask)
            is_float = isinstance(mask, Tensor) and mask.is_floating_point()
            exists = as_mask("mask", mask != 0 if is_float else mask, shape)
            exists = exists.to(regions.device).float()
        # what is not there may be anything, also nan
        existing = torch.where(exists[:, :, None] > 0, regions.float(), 0.0)
        pooled = existing.sum(1) / exists.sum(1, keepdim=True)  # pooling and projection commute
        return product(pooled, self.weight.float().T)

    def _follow(self, running: Tensor, values: Tensor) -> None:
        """Move a running mean (heads,) towards the mean of the finite ``values`` (N, heads): nan
        would stay for good.
        """
        finite = values.isfinite().all(1, keepdim=True)
        mean = torch.where(finite, values, 0.0).sum(0) / finite.sum().clamp_min(1)
        # the first batch has all of the weight; not by the default dtype, which may be a half one
        first = (self.batches == 0).to(running.dtype)
        share = torch.lerp(torch.full_like(first, self.momentum), torch.ones_like(first), first)
        running.lerp_(mean.to(running.dtype), share * finite.any())

    def extra_repr(self) -> str:
        """Return the dimension, the number of heads and the momentum, for ``repr``."""
        heads, dim = self.weight.shape
        return f"dim={dim}, heads={heads}, momentum={self.momentum}"


class DVSETerms(NamedTuple):
    """The terms of :class:`DVSEObjective`, without their weights and without a gradient."""

    variance_aware: Tensor
    orthogonal: Tensor


class DVSEObjective(CheckedModule):
    r"""The training objective of DVSE (Wei et al., 2023, Eq. 12).

    .. math:: L = \eta\, L_{var} + (1 - \eta)\, L_{dc}

    with :class:`VarianceAwareLoss` and :class:`DynamicOrthogonalLoss`.

    Args:
        balance: η in [0, 1].
        slack, pair_reduction, normalize_residuals: see :class:`DynamicOrthogonalLoss`.
        options: of :class:`VarianceAwareLoss`.

    Relations:
        :class:`VarianceAwareLoss` and :class:`DynamicOrthogonalLoss`, mixed by ``balance``.

    Example:
        >>> import torch
        >>> import itrloss
        >>> heads, texts = torch.randn(8, 4, 16), torch.randn(8, 16)
        >>> loss, terms = itrloss.DVSEObjective()(heads, texts, heads)
        >>> loss.shape
        torch.Size([])
    """

    balance: float = option(at_least=0, at_most=1)

    def __init__(
        self,
        balance: float = 0.6,
        *,
        slack: float = 0.4,
        pair_reduction: functional.PairReduction = "mean",
        normalize_residuals: bool = True,
        **options: Any,
    ):
        super().__init__()
        self.balance = balance
        self.variance_aware = VarianceAwareLoss(**options)
        self.orthogonal = DynamicOrthogonalLoss(
            slack,
            pair_reduction,
            normalize_residuals=normalize_residuals,
            gather=self.variance_aware.gather,
            process_group=self.variance_aware.process_group,
        )
        self._check_reductions()

    def _check_reductions(self) -> None:
        """Raise an error unless both losses are means; at each call, as options may be set."""
        for part in (self.variance_aware, self.orthogonal):
            if part.reduction != "mean":
                raise ValueError(f"reduction: expected 'mean' for a total, got {part.reduction!r}")

    @takes_queries
    def forward(
        self,
        image_sets: Tensor,
        texts: Tensor,
        residuals: Tensor,
        gate: Tensor | None = None,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
    ) -> tuple[Tensor, DVSETerms]:
        """Return the total, a 0-dim tensor, and its terms.

        Args:
            image_sets, texts, image_ids, text_ids: as in :meth:`VarianceAwareLoss.forward`.
            residuals: (N, K, D') what the heads add to the global feature, before its
                normalisation.
            gate: (N, K) of :class:`DynamicGate`; None: all heads are on.

        Images with :data:`itrloss.NO_ID` have no part in either term, but in a compiled graph,
        whose sizes are fixed, in the second one.
        """
        self.variance_aware.agree(partial(self._checked, image_sets, residuals, gate))
        variance = self.variance_aware(image_sets, texts, image_ids, text_ids)
        exist = existing(len(image_sets), image_sets.device, image_ids=image_ids)
        if exist is not None:
            residuals = residuals[exist]
            gate = gate[exist] if isinstance(gate, Tensor) else gate
        orthogonal = torch.zeros_like(variance)
        if len(residuals) or self.orthogonal.sharded:
            orthogonal = self.orthogonal(residuals, gate)
        total = self.balance * variance + (1 - self.balance) * orthogonal
        return total, DVSETerms(variance.detach(), orthogonal.detach())

    def _checked(self, image_sets: Tensor, residuals: Tensor, gate: Tensor | None) -> str:
        """Check the input; return what has to be the same in all processes."""
        self._check_reductions()
        inputs = {"image_sets": image_sets, "residuals": residuals}
        for name, x in inputs.items():
            check_matrix(name, x, "(N, K, D)", dims=3, empty=self.variance_aware.sharded)
        for name, x in (inputs | {"gate": gate}).items():
            if isinstance(x, Tensor) and x.shape[:1] != image_sets.shape[:1]:
                expected = f"a row for each of {len(image_sets)} images"
                raise ValueError(f"{name}: expected {expected}, got shape {tuple(x.shape)}")
        return f"DVSEObjective {self.extra_repr()}"
