"""DVSE's Fast Re-ranking."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..similarity import Similarity, TopK


class RerankBiases(NamedTuple):
    """What re-ranking adds to a score: ``texts`` (M,) when an image asks for texts, ``images`` (N,) the other way."""

    texts: Tensor
    images: Tensor


class FastReranker:
    r"""Fast Re-ranking (DVSE Eq. 13-15): a candidate that is similar to every query loses by it.

    With A (n_images, n_texts), worked out in log space so that nothing overflows:

    .. math::
        \text{image→text}\quad \gamma_2 A_{ij} - \log \sum_{i'} e^{\gamma_1 A_{i'j}}, \qquad
        \text{text→image}\quad \lambda_2 A_{ij} - \log \sum_{j'} e^{\lambda_1 A_{ij'}}

    It is *transductive*: the sum runs over all queries of the test set, so results depend on which queries are asked
    together, and with a single query it ranks nothing. No labels are used.

    Args:
        i2t: (γ1, γ2).
        t2i: (λ1, λ2). (The paper uses 25, 25 and 20, 20; on CUB 9, 8 and 8, 17.)
    """

    #: It looks at all test queries at once.
    transductive = True

    def __init__(self, i2t: tuple[float, float] = (25.0, 25.0), t2i: tuple[float, float] = (20.0, 20.0)):
        for name, pair in (("i2t", i2t), ("t2i", t2i)):
            if len(pair) != 2 or not all(x > 0 for x in pair):
                raise ValueError(f"{name}: expected two numbers above 0, got {pair!r}")
        self.i2t, self.t2i = i2t, t2i

    def rerank(self, scores: Tensor | Similarity) -> tuple[Tensor, Tensor]:
        """Re-ranked scores ``(image→text, text→image)``, both (n_images, n_texts), higher is better.

        The result is two full matrices. From embeddings too many for that, use :meth:`topk`, or
        ``retrieval_metrics(sim, reranker=self)``.
        """
        sim = as_similarity(scores)
        with torch.no_grad():
            text_lse, image_lse = self._log_sums(sim)
            matrix = sim.scores()
            return matrix * self.i2t[1] - text_lse, matrix * self.t2i[1] - image_lse[:, None]

    def topk(self, scores: Tensor | Similarity, k: int) -> tuple[TopK, TopK]:
        """The k best texts of each image and the k best images of each text, by re-ranked score.

        Returns:
            ``(image→text, text→image)``, each with ``values`` and ``indices`` of shape (queries, k). Memory is bounded
            by the tiled engine's workspace and the result.
        """
        sim = as_similarity(scores)
        n, m = sim.shape
        if not 1 <= k <= min(n, m):
            raise ValueError(f"k: expected a number from 1 to {min(n, m)}, got {k}")
        biases = self.biases(sim)
        i2t, t2i = sim.both.topk(k, biases.images, biases.texts)
        return TopK(i2t.values * self.i2t[1], i2t.indices), TopK(t2i.values * self.t2i[1], t2i.indices)

    def biases(self, scores: Tensor | Similarity) -> RerankBiases:
        """Re-ranking as an additive bias: image→text ranks by ``A_ij + texts_j``, text→image by ``A_ij + images_i``."""
        with torch.no_grad():
            texts, images = self._log_sums(as_similarity(scores))
        return RerankBiases(-texts / self.i2t[1], -images / self.t2i[1])

    def _log_sums(self, sim: Similarity) -> tuple[Tensor, Tensor]:
        """(M,) over the images and (N,) over the texts, out of one pass."""
        images, texts = sim.detach().both.logsumexp(self.t2i[0], self.i2t[0], over="all")
        return texts, images


def as_similarity(scores: Tensor | Similarity) -> Similarity:
    """Scores without ids: re-ranking never asks who matches whom."""
    if isinstance(scores, Similarity):
        return scores
    n, m = (scores.shape[0], scores.shape[1]) if isinstance(scores, Tensor) and scores.dim() == 2 else (1, 1)
    ids = (torch.arange(n), torch.arange(m))
    return Similarity.from_scores(scores, *ids, check_finite=True)
