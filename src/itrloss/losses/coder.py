"""CODER's losses: diversity-sensitive contrast in the batch and against a memory, and prototypes."""

from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..checks import check_matrix, check_number, check_size
from ..engine.vectors import compute_dtype, host_may_read, normalized
from ..kmeans import OnlineKMeans
from ..memory import CoupledMemory, MemorySimilarity
from ..similarity import Engine, Similarity
from .base import Loss, MemoryLoss, PairLoss, SimilarityLoss, above_zero


@dataclass(eq=False, repr=False)
class DiversityOptions(SimilarityLoss):
    """The options of DCL and M-DCL."""

    temperature: float = above_zero(0.1)
    margin: float = 0.3
    diversity: functional.Diversity = "std"
    epsilon: float = above_zero(0.1)
    detach_diversity: bool = True
    positive_weight: functional.PositiveWeight = "paper"
    positive: functional.PositiveForm = "clamp"
    _: KW_ONLY
    entropy_temperature: float = above_zero(1.0)


@dataclass(eq=False, repr=False)
class DiversityContrastiveLoss(DiversityOptions, PairLoss):
    r"""Diversity-sensitive contrastive loss, DCL (Wang et al., CODER, ECCV 2022, Eq. 4-5).

    .. math::
        \ell_i = \mu \log\Bigl(1 + \sum_{j \in neg(i)} e^{(S_{ij} - \gamma) / (\mu d_i)}\Bigr)
                 - w \operatorname{mean}_{p \in pos(i)} \log(1 + S_{ip})

    for images and for texts, with the anchor's diversity ``d_i``; see :doc:`methods/dcl`.

    Args:
        temperature: μ.
        margin: γ, in units of cosine similarity.
        diversity: ``"std"`` (:func:`itrloss.functional.std_diversity`, Eq. 3), ``"entropy"``
            (:func:`itrloss.functional.entropy_diversity`), or None for the implicit form DCL_I with
            ``d = 1``.
        epsilon, entropy_temperature: ε and, of the entropy, the temperature of the diversity
            scores; above 0.
        detach_diversity: treat ``d`` as a weight; False sends gradients through it.
        positive_weight: ``"paper"`` for ``w = μ`` as printed, or ``w`` itself, per direction.
        positive: ``"clamp"`` keeps S above -1 + 1e-6 in ``log(1 + S)``; ``"relu"`` takes ``log(1 +
            max(S, 0))``, by which a positive that scores 0 or less gets no gradient.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.
    """

    def compute(self, sim: Similarity) -> Any:
        return functional.diversity_contrastive_loss(sim, **self._options(DiversityContrastiveLoss))


@dataclass(eq=False, repr=False)
class MemoryDiversityContrastiveLoss(DiversityOptions, MemoryLoss):
    r"""Memory-aided DCL, M-DCL (CODER Eq. 6): a batch against the keys of earlier batches.

    .. math::
        \ell_i = \mu \log\Bigl(1 + \sum_{q} e^{(S_{iq} - \gamma) / (\mu d_i)}\Bigr)
                 - w \operatorname{mean}_{p \in pos(i)} \log(1 + \cos(x_i, k_p)), \qquad
        d_i = \tfrac12 (d_i^{batch} + d_i^{memory})

    for images against the memory's texts and for texts against its images, over the entries q whose id differs from the
    anchor's and the batch's momentum keys k that have it. While the memory is empty the loss is 0; see
    :doc:`methods/memory`.

    Args:
        positive_from: ``"key"``, or ``"batch"`` to take positives from the batch instead of its
            keys; then they get a gradient.
        diversity_from: ``"both"`` for the mean of the two diversities, ``"batch"`` for that of the
            batch alone.
        others: see :class:`DiversityContrastiveLoss` and :class:`MemoryLoss`.
    """

    _: KW_ONLY
    positive_from: functional.PositiveFrom = "key"
    diversity_from: functional.DiversityFrom = "both"

    def compute(self, sims: MemorySimilarity) -> Any:
        return functional.memory_diversity_contrastive_loss(
            sims, **self._options(MemoryDiversityContrastiveLoss)
        )


@dataclass(eq=False, repr=False)
class PrototypeClassificationLoss(Loss):
    r"""Prototype-guided classification, PGC (Wang et al., CODER, ECCV 2022, Eq. 7).

    .. math:: -\operatorname{mean}_b \log \operatorname{softmax}(P v_b)_{z_b}
              - \operatorname{mean}_b \log \operatorname{softmax}(P w_b)_{z_b}

    for the pairs b of a batch, with the concept embeddings v of the image and w of the text. One
    linear classifier P predicts the pair's prototype z, its cluster in an
    :class:`itrloss.OnlineKMeans`; see :doc:`methods/prototypes`.

    Args:
        dim: F of the concept embeddings.
        clusters: K, the number of prototypes.
        reduction, engine, check_finite, gather, process_group: see :class:`PairLoss`. ``"auto"``
            never holds (2 B, K) logits above 256 MiB.

    Attributes:
        weight: (clusters, dim) P, a parameter: pass it to the optimiser.
    """

    dim: int
    clusters: int
    _: KW_ONLY
    engine: Engine = "auto"
    check_finite: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("dim", self.dim)
        check_size("clusters", self.clusters)
        self.weight = nn.Parameter(
            torch.empty(self.clusters, self.dim).uniform_(-1, 1) / self.dim**0.5
        )

    def forward(self, image_concepts: Tensor, text_concepts: Tensor, prototype_ids: Tensor) -> Any:
        """Return the loss, see :func:`itrloss.functional.prototype_classification_loss`."""
        return self._of_all(
            self._of_samples, (image_concepts, text_concepts, prototype_ids), self._reduced
        )

    def _reduced(
        self, images: Tensor, texts: Tensor, ids: Tensor, reduction: functional.Reduction
    ) -> Any:
        for name, x in (("image_concepts", images), ("text_concepts", texts)):
            check_matrix(name, x, f"(B, {self.dim})", self.check_finite)
        weight = self.weight.to(compute_dtype(images))
        return functional.prototype_classification_loss(
            images, texts, weight, ids, reduction, self.engine
        )

    @torch.no_grad()
    def reset(self, reseeded: Tensor, centroids: Tensor) -> None:
        """Reset the classifier's rows of reseeded clusters: what they learnt is about the clusters'
        former points.

        Such a row of P becomes the new centroid, scaled to the length that rows have at
        initialisation, and its gradient 0. The optimiser's state for it is left to decay. The
        parameter is modified in place: do not call this between a forward pass and its backward
        pass, which would raise an error.

        Args:
            reseeded: (clusters,) bool, :attr:`itrloss.OnlineKMeans.reseeded`.
            centroids: (clusters, dim) of unit length.
        """
        if not isinstance(reseeded, Tensor):
            raise TypeError(f"reseeded: expected a tensor, got {type(reseeded).__name__}")
        if reseeded.shape != (self.clusters,) or reseeded.dtype != torch.bool:
            got = f"{tuple(reseeded.shape)} {reseeded.dtype}"
            raise ValueError(
                f"reseeded: expected a boolean tensor of shape ({self.clusters},), got {got}"
            )
        check_matrix("centroids", centroids, f"({self.clusters}, {self.dim})")
        if centroids.shape != self.weight.shape:
            raise ValueError(
                f"centroids: expected shape {(self.clusters, self.dim)}, got {tuple(centroids.shape)}"
            )
        # on an accelerator the check would synchronise
        if host_may_read(self.weight) and not reseeded.any():
            return
        # the expected length of a row of uniform numbers
        fresh = centroids.to(self.weight.dtype) / 3**0.5
        self.weight.copy_(torch.where(reseeded[:, None], fresh, self.weight))
        if self.weight.grad is not None:
            self.weight.grad.masked_fill_(reseeded[:, None], 0)


class CODERTerms(NamedTuple):
    """The terms of :class:`CODERObjective`, not weighted and without a gradient."""

    batch: Tensor
    memory: Tensor
    concept: Tensor
    prototype: Tensor


class CODERObjective(nn.Module):
    r"""The training objective of CODER (Wang et al., ECCV 2022, Eq. 8).

    .. math:: L = 3\, L^I_{DCL} + L^I_{M\text{-}DCL} + 2\, L^C_{DCL} + L_{PGC}

    on instance embeddings (I) and concept embeddings (C) of the same pairs; see
    :doc:`methods/objectives`. In training mode a call moves the prototypes, and resets the
    classifier's rows of those that were reseeded. That modifies a parameter in place: run backward
    for each call before the next.

    Args:
        dim: of instance and concept embeddings.
        clusters: number of prototypes; in the paper 10 000 for Flickr30K and 20 000 for MSCOCO.
        batch_weight, memory_weight, concept_weight, prototype_weight: of the four terms. A term of
            weight 0 is not computed.
        max_count: see :class:`OnlineKMeans`.
        diversity_from: see :class:`MemoryDiversityContrastiveLoss`.
        options: of all diversity-sensitive losses, see :class:`DiversityContrastiveLoss`.

    Attributes:
        batch, memory, concept: the losses, whose options may be changed one by one.
        prototypes, classifier: :class:`OnlineKMeans`, and :class:`PrototypeClassificationLoss`,
            which has a parameter.
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
        diversity_from: functional.DiversityFrom = "both",
        **options: Any,
    ):
        super().__init__()
        if options.get("reduction", "mean") == "none":
            raise ValueError("reduction: expected 'mean' or 'sum' for a total, got 'none'")
        self.weights = CODERTerms(batch_weight, memory_weight, concept_weight, prototype_weight)  # type: ignore[arg-type]
        for name, weight in self.weights._asdict().items():
            check_number(f"{name}_weight", weight)
        self.batch, self.concept = (
            DiversityContrastiveLoss(**options),
            DiversityContrastiveLoss(**options),
        )
        self.memory = MemoryDiversityContrastiveLoss(diversity_from=diversity_from, **options)
        self.prototypes = OnlineKMeans(clusters, dim, max_count=max_count)
        names = "reduction", "engine", "check_finite", "gather", "process_group"
        common = {name: getattr(self.batch, name) for name in names}
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
        """Return the total, a 0-dim tensor, and its terms. Row i of each input belongs to pair i.

        Args:
            images, texts: (B, dim) instance embeddings.
            image_keys, text_keys, memory, image_ids, text_ids: as in :meth:`MemoryLoss.forward`.
            image_concepts, text_concepts: (B, dim) concept embeddings.
        """
        parts = {
            "images": images,
            "texts": texts,
            "image_concepts": image_concepts,
            "text_concepts": text_concepts,
        }

        def check() -> None:
            for name, x in parts.items():
                check_matrix(name, x, "(B, dim)", empty=True)
                shape = (len(images), self.prototypes.dim)
                if x.shape != shape:
                    raise ValueError(
                        f"{name}: expected shape {shape}, a row for each image, got {tuple(x.shape)}"
                    )

        self.batch._checked(check)
        zero = images.new_zeros((), dtype=compute_dtype(images))
        ids, keys, concepts = (
            (image_ids, text_ids),
            (image_keys, text_keys),
            (image_concepts, text_concepts),
        )
        # In evaluation mode there may be no prototypes yet.
        has_prototypes = self.weights.prototype and (self.training or len(self.prototypes))
        terms = CODERTerms(
            batch=self.batch(images, texts, *ids) if self.weights.batch else zero,
            memory=self.memory(images, texts, *keys, memory, *ids) if self.weights.memory else zero,
            concept=self.concept(*concepts, *ids) if self.weights.concept else zero,
            prototype=self.classifier(*concepts, self._prototypes_of(images, texts))
            if has_prototypes
            else zero,
        )
        total: Any = sum(weight * term for weight, term in zip(self.weights, terms, strict=True))
        return total, CODERTerms(*(x.detach() for x in terms))

    @torch.no_grad()
    def _prototypes_of(self, images: Tensor, texts: Tensor) -> Tensor:
        """Return the (B,) prototypes of pairs, which move with them in training mode."""
        pairs = normalized(images) + normalized(texts)
        if not self.training:
            return self.prototypes.predict(pairs)
        ids = self.prototypes.update(pairs, self.batch.process_group)
        self.classifier.reset(self.prototypes.reseeded, self.prototypes.centroids)
        return ids

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}_weight={weight}" for name, weight in self.weights._asdict().items()
        )
