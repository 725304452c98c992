"""InfoNCE on the scores of sets of token embeddings."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import functional
from ..checks import (
    IMAGES_AND_TEXTS,
    Choice,
    IdsLike,
    Number,
    NumberOr,
    check_matrix,
    require_finite,
)
from ..similarity import Similarity
from .base import SimilarityLoss


class LateInteractionLoss(SimilarityLoss):
    r"""InfoNCE on late-interaction scores of sets of token embeddings, as in ColBERT (Khattab &
    Zaharia, SIGIR 2020).

    .. math:: S_{ij} = \sum_{a \in A_i} \max_{b \in B_j} \cos(a, b)

    for the sets A of the images and B of the texts, with :class:`InfoNCELoss` of S / τ. A score is
    as large as a set of K elements allows, K at most; τ is in its units. See
    :doc:`methods/late_interaction`.

    Args:
        temperature: τ, above 0.
        alpha: None, or the sharpness α of ``log(sum_b exp(α cos(a, b))) / α`` in place of the
            maximum.
        normalize: scale elements to unit length first.
        reduction, engine, check_finite, telemetry: see :class:`PairLoss`. The engine computes
            InfoNCE on the (N, M) scores; the scores of elements are never held whole.
        gather: False, unless there is one process: sets are not exchanged between processes.
    """

    shown = ("temperature", "alpha", "normalize", "reduction")
    temperature = Number(above=0)
    alpha = NumberOr(None)
    normalize = Choice(True, False)

    def __init__(
        self,
        temperature: float = 1.0,
        alpha: float | None = None,
        normalize: bool = True,
        **common: Any,
    ):
        super().__init__(**common)
        self.temperature = temperature
        self.alpha = alpha
        self.normalize = normalize

    def forward(
        self,
        images: Tensor,
        texts: Tensor,
        image_lengths: Tensor | None = None,
        text_lengths: Tensor | None = None,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
    ) -> Any:
        """Return the loss of sets (N, K, D) and (M, L, D); see :meth:`PairLoss.forward`.

        Args:
            images, texts: sets of embeddings. The first are those whose elements are summed up,
                ColBERT's queries.
            image_lengths, text_lengths: (N,) and (M,) numbers of elements; what follows them is
                padding, of any value. An empty set scores 0.
            image_ids, text_ids: as in :meth:`PairLoss.forward`.
        """
        if self.sharded:
            expected = "expected False, as sets are not exchanged between processes"
            raise ValueError(f"gather: {expected}, got {self.gather!r}")
        for name, x in (("images", images), ("texts", texts)):
            check_matrix(name, x, "(N, K, D)", dims=3)
            if self.check_finite:
                require_finite(name, x.flatten(0, 1))
        scores = functional.set_similarity(
            images,
            texts,
            "max_sum" if self.alpha is None else "smooth_max_sum",
            1.0 if self.alpha is None else self.alpha,
            normalize=self.normalize,
            image_lengths=image_lengths,
            text_lengths=text_lengths,
        )
        sim = Similarity.from_scores(
            scores, image_ids, text_ids, engine=self.engine, names=IMAGES_AND_TEXTS
        )
        return self._with_telemetry(self.compute(sim), sim)

    def compute(self, sim: Similarity) -> Any:
        """Return InfoNCE on the (N, M) scores of the sets."""
        return functional.info_nce_loss(sim, self.temperature, self.reduction)
