"""What CODER and DVSE are trained with: the sums of their losses, as one module each."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._arguments import check_number
from ..cluster import OnlineKMeans
from ..engines.operators import inverse_norms
from ..engines.tiles import unit
from ..functional import DiversityFrom
from ..memory import CoupledMemory
from .diversity import DiversityContrastiveLoss, MemoryDiversityContrastiveLoss
from .prototypes import PrototypeClassificationLoss
from .sets import DynamicOrthogonalLoss, VarianceAwareLoss


class CODERTerms(NamedTuple):
    """The terms of :class:`CODERObjective`, without their weights and without a gradient."""

    batch: Tensor
    memory: Tensor
    concept: Tensor
    prototype: Tensor


class DVSETerms(NamedTuple):
    """The terms of :class:`DVSEObjective`, without their weights and without a gradient."""

    variance_aware: Tensor
    orthogonal: Tensor


class CODERObjective(nn.Module):
    r"""The training objective of CODER (Wang et al., ECCV 2022, Eq. 8).

    .. math:: L = 3\, L^I_{DCL} + L^I_{M\text{-}DCL} + 2\, L^C_{DCL} + L_{PGC}

    on instance embeddings (I) and concept embeddings (C) of the same pairs. The paper prints the third term as
    ``L(V, W) + L(W, V)`` of a loss that has both directions in it, hence the 2. The prototypes follow the sums
    of normalised instance embeddings: in training mode a call moves their centroids, and resets what the classifier
    learnt of a cluster that was reseeded. That writes to a parameter: each call wants its backward pass before the
    next.

    Args:
        dim: of instance and concept embeddings.
        clusters: number of prototypes: 10 000 for Flickr30K, 20 000 for MSCOCO, in the paper.
        batch_weight, memory_weight, concept_weight, prototype_weight: of the four terms. A term of weight 0 is not
            computed.
        max_count: of a cluster, see :class:`itrloss.OnlineKMeans`.
        diversity_from: of the memory's term, see :class:`itrloss.MemoryDiversityContrastiveLoss`.
        options: of all diversity-sensitive losses, see :class:`itrloss.DiversityContrastiveLoss`: ``temperature``,
            ``margin``, ``diversity``, …, ``engine``, ``check_finite``, ``gather``.

    Attributes:
        batch, memory, concept: the losses, whose options may be changed one by one.
        prototypes: :class:`itrloss.OnlineKMeans`.
        classifier: :class:`itrloss.PrototypeClassificationLoss`. It has a parameter: give this module's parameters
            to the optimiser, too.
    """

    def __init__(
        self,
        dim: int,
        clusters: int,
        *,
        batch_weight: float = 3.0,
        memory_weight: float = 1.0,
        concept_weight: float = 2.0,
        prototype_weight: float = 1.0,
        max_count: float | None = None,
        diversity_from: DiversityFrom = "both",
        **options: Any,
    ):
        super().__init__()
        if options.get("reduction", "mean") == "none":
            raise ValueError("reduction: expected 'mean' or 'sum' for a total, got 'none'")
        self.weights = CODERTerms(batch_weight, memory_weight, concept_weight, prototype_weight)  # type: ignore[arg-type]
        for name, weight in self.weights._asdict().items():
            check_number(f"{name}_weight", weight)
        self.batch, self.concept = DiversityContrastiveLoss(**options), DiversityContrastiveLoss(**options)
        self.memory = MemoryDiversityContrastiveLoss(diversity_from=diversity_from, **options)
        common = {name: options[name] for name in ("reduction", "engine", "check_finite") if name in options}
        self.prototypes = OnlineKMeans(clusters, dim, max_count=max_count)
        self.classifier = PrototypeClassificationLoss(dim, clusters, **common)

    def forward(
        self,
        images: Tensor,
        texts: Tensor,
        image_keys: Tensor,
        text_keys: Tensor,
        memory: CoupledMemory,
        image_concepts: Tensor,
        text_concepts: Tensor,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> tuple[Tensor, CODERTerms]:
        """The total and its terms. Row i of each input belongs to pair i.

        Args:
            images, texts: (B, dim) instance embeddings.
            image_keys, text_keys: (B, dim) the same by the momentum encoders.
            memory: keys of former batches. Put the batch in after the backward pass.
            image_concepts, text_concepts: (B, dim) concept embeddings.
            image_ids, text_ids: (B,) integers: further positives, or entries of the memory that are no negatives.

        Returns:
            The total, a 0-dim tensor, and a :class:`CODERTerms`.
        """
        wanted = (images.shape[0], self.prototypes.dim)
        parts = {"images": images, "texts": texts, "image_concepts": image_concepts, "text_concepts": text_concepts}
        for name, x in parts.items():
            if x.shape != wanted:
                raise ValueError(f"{name}: expected shape {wanted}, a row for each image, got {tuple(x.shape)}")
        zero = images.new_zeros((), dtype=torch.promote_types(images.dtype, torch.float32))
        batch = memory_term = concept = prototype = zero
        if self.weights.batch:
            batch = self.batch(images, texts, image_ids, text_ids)
        if self.weights.memory:
            memory_term = self.memory(images, texts, image_keys, text_keys, memory, image_ids, text_ids)
        if self.weights.concept:
            concept = self.concept(image_concepts, text_concepts, image_ids, text_ids)
        if self.weights.prototype:
            prototype = self._prototype(images, texts, image_concepts, text_concepts, zero)
        terms = CODERTerms(batch, memory_term, concept, prototype)
        return _total(self.weights, terms), CODERTerms(*(x.detach() for x in terms))

    def _prototype(self, images: Tensor, texts: Tensor, image_concepts: Tensor, text_concepts: Tensor, zero: Tensor):
        with torch.no_grad():
            v, w = (unit(x, inverse_norms(x)) for x in (images.detach(), texts.detach()))
        if self.training:
            ids = self.prototypes.update(v + w)
            self.classifier.reset(self.prototypes.reseeded, self.prototypes.centroids)
        elif len(self.prototypes):
            ids = self.prototypes.predict(v + w)
        else:
            return zero
        return self.classifier(image_concepts, text_concepts, ids)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return ", ".join(f"{name}_weight={weight}" for name, weight in self.weights._asdict().items())


class DVSEObjective(nn.Module):
    r"""The training objective of DVSE (Wei et al., 2023, Eq. 12).

    .. math:: L = \eta\, L_{var} + (1 - \eta)\, L_{dc}

    with the variance-aware weighting loss and the dynamic orthogonal loss.

    Args:
        balance: η in [0, 1].
        margin, detach_sigma, shared_sigma: see :class:`itrloss.VarianceAwareLoss`.
        slack, pair_reduction: see :class:`itrloss.DynamicOrthogonalLoss`.
        engine, check_finite, gather: see :class:`itrloss.PairLoss`.
    """

    def __init__(
        self,
        balance: float = 0.6,
        *,
        margin: float = 0.2,
        detach_sigma: bool = False,
        shared_sigma: bool = True,
        slack: float = 0.4,
        pair_reduction: Any = "mean",
        **common: Any,
    ):
        super().__init__()
        check_number("balance", balance)
        if not 0 <= balance <= 1:
            raise ValueError(f"balance: expected a number in [0, 1], got {balance}")
        if common.get("reduction", "mean") != "mean":
            raise ValueError(f"reduction: expected 'mean' for a total, got {common['reduction']!r}")
        self.balance = balance
        self.variance_aware = VarianceAwareLoss(margin, detach_sigma, shared_sigma, **common)
        self.orthogonal = DynamicOrthogonalLoss(slack, pair_reduction)

    def forward(
        self,
        image_sets: Tensor,
        texts: Tensor,
        residuals: Tensor,
        gate: Tensor | None = None,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> tuple[Tensor, DVSETerms]:
        """The total and its terms.

        Args:
            image_sets: (N, K, D) sub-embeddings of the images.
            texts: (M, D) embeddings.
            residuals: (N, K, D') what the heads add to the global feature, before its normalisation.
            gate: (N, K) of :class:`itrloss.DynamicGate`; None has all heads on.
            image_ids, text_ids: (N,) and (M,) integers, see :class:`itrloss.PairLoss`.

        Returns:
            The total, a 0-dim tensor, and a :class:`DVSETerms`.
        """
        terms = DVSETerms(self.variance_aware(image_sets, texts, image_ids, text_ids), self.orthogonal(residuals, gate))
        return _total((self.balance, 1 - self.balance), terms), DVSETerms(*(x.detach() for x in terms))

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"balance={self.balance}"


def _total(weights: Any, terms: Any) -> Tensor:
    total = 0.0
    for weight, term in zip(weights, terms, strict=True):
        total = total + weight * term
    assert isinstance(total, Tensor)
    return total
