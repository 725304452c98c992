"""CODER's losses: diversity-sensitive contrast in the batch or with a memory, and prototypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import functional
from ..checks import (
    CheckedModule,
    IdsLike,
    check_alike,
    check_matrix,
    is_sharded,
    option,
    takes_queries,
)
from ..distributed import padded
from ..engine.vectors import compute_dtype, host_may_read, normalized
from ..functional import Values
from ..kmeans import OnlineKMeans
from ..memory import CoupledMemory, MemorySimilarity, sharded_like
from ..similarity import Engine, Similarity
from .base import Loss, MemoryLoss, PairLoss, SimilarityLoss, existing


class DiversityOptions(SimilarityLoss):
    """The options of DCL and M-DCL."""

    temperature: float = option(default=0.1, above=0)
    margin: float = 0.3
    diversity: functional.Diversity = "std"
    epsilon: float = option(default=0.1, above=0)
    detach_diversity: bool = True
    positive_weight: functional.PositiveWeight = "paper"
    positive: functional.PositiveForm = "clamp"

    _: KW_ONLY
    entropy_temperature: float = option(default=1.0, above=0)

    def _options(self) -> dict[str, Any]:
        """Return the arguments of the function that computes the loss, named as the options."""
        options: dict[str, Any] = {"reduction": self.reduction}
        for name in DiversityOptions._own_options:
            options[name] = getattr(self, name)
        return options


class DiversityContrastiveLoss(DiversityOptions, PairLoss):
    r"""Diversity-sensitive contrastive loss, DCL (Wang et al., CODER, ECCV 2022, Eq. 4-5).

    .. math::
        \ell_i = \mu \log\Bigl(1 + \sum_{j \in neg(i)} e^{(S_{ij} - \gamma) / (\mu d_i)}\Bigr)
                 - w \operatorname{mean}_{p \in pos(i)} \log(1 + S_{ip})

    for images and for texts, with the anchor's diversity ``d_i``; see :doc:`losses/dcl`.

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

    Relations:
        Without diversity it is :class:`HubnessAwareLoss` at the scale 1 / μ, with another
        weight.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> dcl = itrloss.DiversityContrastiveLoss(diversity=None, positive_weight=0.5)
        >>> hal = itrloss.HubnessAwareLoss(scale=10, margin=0.3)
        >>> torch.allclose(dcl(images, texts), hal(images, texts))
        True
    """

    def compute(self, sim: Similarity) -> Values:
        """Return DCL (CODER Eq. 4-5)."""
        return functional.diversity_contrastive_loss(self.anchors(sim), **self._options())


class MemoryDiversityContrastiveLoss(DiversityOptions, MemoryLoss):
    r"""Memory-aided DCL, M-DCL (CODER Eq. 6): a batch against the keys of earlier batches.

    .. math::
        \ell_i = \mu \log\Bigl(1 + \sum_{q} e^{(S_{iq} - \gamma) / (\mu d_i)}\Bigr)
                 - w \operatorname{mean}_{p \in pos(i)} \log(1 + \cos(x_i, k_p)), \qquad
        d_i = \tfrac12 (d_i^{batch} + d_i^{memory})

    for images against the memory's texts and for texts against its images, over the entries q whose
    id differs from the anchor's and the batch's momentum keys k that have it. While the memory is
    empty the loss is 0; see :doc:`losses/memory`.

    Args:
        positive_from: ``"key"``, or ``"batch"`` to take positives from the batch instead of its
            keys; then they get a gradient.
        diversity_from: ``"both"`` for the mean of the two diversities, ``"batch"`` for the
            batch's diversity alone.
        negatives_from: ``"memory"``, or ``"batch"``: with ``positive_from="batch"`` DCL of the
            batch, whose diversity is of the memory, too (the first line of Eq. 6). Where the memory
            has no negative of an anchor, as an empty one, the diversity is the batch's.
        others: see :class:`DiversityContrastiveLoss` and :class:`MemoryLoss`.

    Relations:
        :class:`DiversityContrastiveLoss` whose candidates are keys. With an empty memory it is
        0.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> memory = itrloss.CoupledMemory(size=32, dim=16)
        >>> ids = torch.arange(8)
        >>> loss = itrloss.MemoryDiversityContrastiveLoss()
        >>> float(loss(images, texts, images, texts, memory, ids, ids))
        0.0
    """

    _: KW_ONLY
    positive_from: functional.PositiveFrom = "key"
    diversity_from: functional.DiversityFrom = "both"
    negatives_from: functional.NegativesFrom = "memory"

    def compute(self, sims: MemorySimilarity) -> Values:
        """Return M-DCL (CODER Eq. 6)."""
        return functional.memory_diversity_contrastive_loss(
            sims,
            positive_from=self.positive_from,
            diversity_from=self.diversity_from,
            negatives_from=self.negatives_from,
            **self._options(),
        )


class PrototypeClassificationLoss(Loss):
    r"""Prototype-guided classification, PGC (Wang et al., CODER, ECCV 2022, Eq. 7).

    .. math:: -\operatorname{mean}_b \log \operatorname{softmax}(P v_b)_{z_b}
              - \operatorname{mean}_b \log \operatorname{softmax}(P w_b)_{z_b}

    for the pairs b of a batch, with the concept embeddings v of the image and w of the text. One
    linear classifier P predicts the pair's prototype z, its cluster in an
    :class:`itrloss.OnlineKMeans`; see :doc:`losses/prototypes`.

    Args:
        dim: F of the concept embeddings.
        clusters: K, the number of prototypes.
        reduction, engine, check_finite, gather, process_group: see :class:`PairLoss`. ``"auto"``
            never holds (2 B, K) logits above 256 MiB.

    Attributes:
        weight: (clusters, dim) P, a parameter: pass it to the optimiser.

    Relations:
        Cross-entropy over prototypes, as a classifier has it; :class:`OnlineKMeans` gives the
        labels.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> loss = itrloss.PrototypeClassificationLoss(dim=16, clusters=10)
        >>> loss(images, texts, torch.arange(8)).shape
        torch.Size([])
    """

    learnt = ("weight",)

    dim: int = option(at_least=1, fixed=True)
    clusters: int = option(at_least=1, fixed=True)

    _: KW_ONLY
    engine: Engine = option(default="auto", local=True)
    check_finite: bool = option(default=False, local=True)

    def __post_init__(self) -> None:
        """Make the parameter."""
        super().__post_init__()
        self.weight = nn.Parameter(torch.empty(self.clusters, self.dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weight anew, as is needed after ``to_empty``."""
        self.weight.uniform_(-1, 1).div_(self.dim**0.5)

    def forward(
        self, image_concepts: Tensor, text_concepts: Tensor, prototype_ids: Tensor
    ) -> Values:
        """Return the loss, see :func:`itrloss.functional.prototype_classification_loss`."""
        return self._of_samples((image_concepts, text_concepts, prototype_ids), self._reduced)

    def _reduced(
        self, images: Tensor, texts: Tensor, ids: Tensor, reduction: functional.Reduction
    ) -> Values:
        """Return the loss of this process's samples."""
        for name, x in (("image_concepts", images), ("text_concepts", texts)):
            check_matrix(name, x, f"(B, {self.dim})", self.check_finite)
        weight = self.shared(self.weight).to(compute_dtype(images))
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
            expected = f"expected shape {(self.clusters, self.dim)}"
            raise ValueError(f"centroids: {expected}, got {tuple(centroids.shape)}")
        # on an accelerator the check would synchronise
        if host_may_read(self.weight) and not reseeded.any():
            return
        # the expected length of a row of uniform numbers
        fresh = centroids / 3**0.5
        mask = reseeded[:, None].expand_as(fresh)
        for weight in self._to_write("weight"):
            if is_sharded(weight):
                fresh, mask = [sharded_like(weight, x.contiguous()) for x in (fresh, mask)]
            weight.copy_(torch.where(mask, fresh.to(weight.dtype), weight))
            if weight.grad is not None:
                weight.grad.masked_fill_(mask, 0)


class CODERTerms(NamedTuple):
    """The terms of :class:`CODERObjective`, not weighted and without a gradient."""

    batch: Tensor
    memory: Tensor
    concept: Tensor
    prototype: Tensor


class CODERObjective(CheckedModule):
    r"""The training objective of CODER (Wang et al., ECCV 2022, Eq. 8).

    .. math:: L = 3\, L^I_{DCL} + L^I_{M\text{-}DCL} + 2\, L^C_{DCL} + L_{PGC}

    on instance embeddings (I) and concept embeddings (C) of the same pairs; see
    :doc:`losses/objectives`. In training mode a call moves the prototypes, and resets the
    classifier's rows of those that were reseeded. That modifies a parameter in place: run backward
    for each call before the next.

    Args:
        dim: of instance and concept embeddings.
        clusters: number of prototypes; in the paper 10 000 for Flickr30K and 20 000 for MSCOCO.
        batch_weight, memory_weight, concept_weight, prototype_weight: of the four terms. A term of
            weight 0 is not computed.
        max_count: see :class:`OnlineKMeans`.
        diversity_from: see :class:`MemoryDiversityContrastiveLoss`.
        batch_diversity_from: the same of the first term; ``"both"`` as printed below Eq. 6.
        options: of all diversity-sensitive losses, see :class:`DiversityContrastiveLoss`.

    Attributes:
        batch, memory, concept: the losses, whose options may be changed one by one.
        prototypes, classifier: :class:`OnlineKMeans`, and :class:`PrototypeClassificationLoss`,
            which has a parameter.

    Relations:
        The weighted sum of DCL, M-DCL, DCL of concepts and PGC.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> memory = itrloss.CoupledMemory(size=32, dim=16)
        >>> objective = itrloss.CODERObjective(dim=16, clusters=10)
        >>> keys = images, texts
        >>> loss, terms = objective(images, texts, *keys, memory, images, texts)
        >>> loss.shape
        torch.Size([])
    """

    batch_weight: float = option()
    memory_weight: float = option()
    concept_weight: float = option()
    prototype_weight: float = option()
    batch_diversity_from: functional.DiversityFrom = option(fixed=True)

    def __init__(  # noqa: PLR0913 - options by keyword
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
        batch_diversity_from: functional.DiversityFrom = "batch",
        **options: Any,
    ):
        super().__init__()
        self.batch_weight = batch_weight
        self.memory_weight = memory_weight
        self.concept_weight = concept_weight
        self.prototype_weight = prototype_weight
        self.batch_diversity_from = batch_diversity_from
        self.batch: DiversityContrastiveLoss | MemoryDiversityContrastiveLoss
        if batch_diversity_from == "batch":
            self.batch = DiversityContrastiveLoss(**options)
        else:
            self.batch = MemoryDiversityContrastiveLoss(
                positive_from="batch", negatives_from="batch", **options
            )
        self.concept = DiversityContrastiveLoss(**options)
        self.memory = MemoryDiversityContrastiveLoss(diversity_from=diversity_from, **options)
        self.prototypes = OnlineKMeans(clusters, dim, max_count=max_count)
        check_total(self.batch)
        self.classifier = PrototypeClassificationLoss(
            dim,
            clusters,
            reduction=self.batch.reduction,
            engine=self.batch.engine,
            check_finite=self.batch.check_finite,
            gather=self.batch.gather,
            process_group=self.batch.process_group,
        )

    @takes_queries
    def forward(  # noqa: PLR0913 - what the model returns, and ids
        self,
        images: Tensor,
        texts: Tensor,
        image_keys: Tensor,
        text_keys: Tensor,
        memory: CoupledMemory,
        image_concepts: Tensor,
        text_concepts: Tensor,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
    ) -> tuple[Tensor, CODERTerms]:
        """Return the total, a 0-dim tensor, and its terms. Row i of each input belongs to pair i.

        Args:
            images, texts: (B, dim) instance embeddings.
            image_keys, text_keys, memory, image_ids, text_ids: as in :meth:`MemoryLoss.forward`.
            image_concepts, text_concepts: (B, dim) concept embeddings.

        Pairs with :data:`itrloss.NO_ID` have no prototype, but in a compiled graph, whose sizes are
        fixed.
        """
        rows = {
            "images": images,
            "texts": texts,
            "image_concepts": image_concepts,
            "text_concepts": text_concepts,
        }
        exist: list[Tensor | None] = []  # which pairs do, if that is asked for

        def checked() -> str:
            """Check the input; return what has to be the same in all processes."""
            words = self._checked(rows)
            if self.prototype_weight:
                ids = {"image_ids": image_ids, "text_ids": text_ids}
                exist.append(existing(len(images), images.device, **ids))
            return words

        self.batch.agree(checked)
        zero = images.new_zeros((), dtype=compute_dtype(images))
        with_memory = images, texts, image_keys, text_keys, memory, image_ids, text_ids
        batch = zero
        if self.batch_weight and self.batch_diversity_from == "both":
            batch = self.batch(*with_memory)
        elif self.batch_weight:
            batch = self.batch(images, texts, image_ids, text_ids)
        against_memory = zero
        if self.memory_weight:
            against_memory = self.memory(*with_memory)
        concept = zero
        if self.concept_weight:
            concept = self.concept(image_concepts, text_concepts, image_ids, text_ids)
        prototype = zero
        # In evaluation mode there may be no prototypes yet.
        if self.prototype_weight and (self.training or len(self.prototypes)):
            prototype = self._prototype_term(list(rows.values()), exist[0], zero)
        total = (
            self.batch_weight * batch
            + self.memory_weight * against_memory
            + self.concept_weight * concept
            + self.prototype_weight * prototype
        )
        terms = batch, against_memory, concept, prototype
        return total, CODERTerms(*(term.detach() for term in terms))

    def _prototype_term(self, rows: Sequence[Tensor], exist: Tensor | None, zero: Tensor) -> Tensor:
        """Return the classification of pairs that exist by their prototypes; ``zero`` without."""
        if exist is not None:
            rows = [x[exist] for x in rows]
        images, texts, image_concepts, text_concepts = rows
        ids = self._prototypes_of(images, texts)
        if len(ids) or self.classifier.sharded:
            return self.classifier(image_concepts, text_concepts, ids)
        return zero

    def _checked(self, rows: Mapping[str, Tensor]) -> str:
        """Check the losses and the embeddings by name, which all are (B, dim); return what has to
        be the same in all processes.
        """
        for part in (self.batch, self.memory, self.concept, self.classifier):
            check_total(part)
        for name, x in rows.items():
            check_matrix(name, x, "(B, dim)", self.classifier.check_finite, empty=True)
            shape = len(rows["images"]), self.prototypes.dim
            if x.shape != shape:
                expected = f"expected shape {shape}, a row for each image"
                raise ValueError(f"{name}: {expected}, got {tuple(x.shape)}")
        of_images, of_texts = rows["image_concepts"], rows["text_concepts"]
        check_alike("text_concepts", of_texts, "image_concepts", of_images)
        known = ""
        if self.prototype_weight and not self.training:
            known = f", prototypes found before {len(self.prototypes) > 0}"
        return f"CODERObjective {self.extra_repr()}, training {self.training}{known}"

    @torch.no_grad()
    def _prototypes_of(self, images: Tensor, texts: Tensor) -> Tensor:
        """Return the (B,) prototypes of pairs, which move with them in training mode."""
        pairs = normalized(images) + normalized(texts)
        if not self.training:
            # a process of several may have none
            some = padded(pairs, max(1, len(pairs)))
            return self.prototypes.predict(some)[: len(pairs)]
        ids = self.prototypes.update(pairs, self.batch.process_group)
        self.classifier.reset(self.prototypes.reseeded, self.prototypes.centroids)
        return ids


def check_total(part: Loss) -> None:
    """Raise an error unless a loss may be part of a total; at each call, as options may be set."""
    if part.reduction == "none":
        raise ValueError("reduction: expected 'mean' or 'sum' for a total, got 'none'")
