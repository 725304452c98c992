"""DVSE's Fast Re-ranking."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..similarity import Similarity, TopK

T = TypeVar("T", Tensor, TopK)


class Reranked(tuple[T, T], Generic[T]):
    """The pair ``(image→text, text→image)``, which also says where it came from.

    Attributes:
        i2t, t2i: the two parts.
        transductive: (image→text, text→image), whether that part depends on which test queries were asked together;
            False where it came from a query bank.
    """

    transductive: tuple[bool, bool]

    def __new__(cls, i2t: T, t2i: T, transductive: tuple[bool, bool]) -> Reranked[T]:
        pair = super().__new__(cls, (i2t, t2i))
        pair.transductive = transductive
        return pair

    def __getnewargs__(self) -> tuple[T, T, tuple[bool, bool]]:  # for copy and pickle
        return self[0], self[1], self.transductive

    @property
    def i2t(self) -> T:
        """Of the images asking for texts."""
        return self[0]

    @property
    def t2i(self) -> T:
        """Of the texts asking for images."""
        return self[1]


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

    As published it is *transductive*: the sums run over all queries of the test set, so results depend on which
    queries are asked together, and a single query is refused. After :meth:`fit` they run over a bank of other
    queries, such as those of the training set, and every test query stands for itself. No labels are used.

    Args:
        i2t: (γ1, γ2).
        t2i: (λ1, λ2). (The paper uses 25, 25 and 20, 20; on CUB 9, 8 and 8, 17.)
    """

    def __init__(self, i2t: tuple[float, float] = (25.0, 25.0), t2i: tuple[float, float] = (20.0, 20.0)):
        for name, pair in (("i2t", i2t), ("t2i", t2i)):
            if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(x > 0 for x in pair):
                raise ValueError(f"{name}: expected two numbers above 0, got {pair!r}")
        self.i2t, self.t2i = i2t, t2i
        self._images: Tensor | None = None
        self._texts: Tensor | None = None

    @property
    def transductive(self) -> tuple[bool, bool]:
        """(image→text, text→image), whether the sums of that direction run over the test queries."""
        return self._images is None, self._texts is None

    def fit(self, images: Tensor | None = None, texts: Tensor | None = None) -> FastReranker:
        """Let the sums run over a bank of queries instead of the test queries.

        Args:
            images: bank of image→text, floating point. To re-rank a ``Similarity`` of embeddings, (B, D) image
                embeddings of the same model. To re-rank a matrix, the scores (B, n_texts) of the bank's images with
                the texts to be ranked.
            texts: bank of text→image: (B, D) text embeddings, or the scores (n_images, B) of the images to be ranked
                with the bank's texts.

        A direction whose bank is left out keeps to the test queries. Another call replaces both banks.

        Returns:
            This object.

        Raises:
            TypeError, ValueError: naming the argument; here, or when what is re-ranked turns out not to fit the bank.
        """
        for name, bank in (("images", images), ("texts", texts)):
            if bank is None:
                continue
            if isinstance(bank, Similarity):
                raise TypeError(f"{name}: expected a tensor of embeddings or scores, got a Similarity")
            try:
                as_similarity(bank)
            except (TypeError, ValueError) as error:
                raise type(error)(str(error).replace("scores:", f"{name}:", 1)) from None
        self._images, self._texts = (None if bank is None else bank.detach() for bank in (images, texts))
        return self

    def rerank(self, scores: Tensor | Similarity) -> Reranked[Tensor]:
        """Re-ranked scores ``(image→text, text→image)``, both (n_images, n_texts), higher is better.

        The result is two full matrices. From embeddings too many for that, use :meth:`topk`, or
        ``retrieval_metrics(sim, reranker=self)``.

        Raises:
            TypeError, ValueError: naming the argument; for nan and infinity; for a single query without a bank.
        """
        sim = as_similarity(scores)
        with torch.no_grad():
            text_lse, image_lse = self._log_sums(sim)
            matrix = sim.detach().scores()  # a tiled one would keep it
            i2t, t2i = matrix * self.i2t[1] - text_lse, matrix * self.t2i[1] - image_lse[:, None]
        return Reranked(i2t, t2i, self.transductive)

    def topk(self, scores: Tensor | Similarity, k: int) -> Reranked[TopK]:
        """The k best texts of each image and the k best images of each text, by re-ranked score.

        Returns:
            ``(image→text, text→image)``, each with ``values`` and ``indices`` of shape (queries, k); a direction with
            fewer than k candidates has them all. Memory is bounded by the tiled engine's workspace and the result.
        """
        sim = as_similarity(scores)
        biases = self.biases(sim)
        i2t, t2i = sim.both.topk(k, biases.images, biases.texts)
        i2t = TopK(i2t.values * self.i2t[1], i2t.indices)
        t2i = TopK(t2i.values * self.t2i[1], t2i.indices)
        return Reranked(i2t, t2i, self.transductive)

    def biases(self, scores: Tensor | Similarity) -> RerankBiases:
        """Re-ranking as an additive bias: image→text ranks by ``A_ij + texts_j``, text→image by ``A_ij + images_i``."""
        with torch.no_grad():
            texts, images = self._log_sums(as_similarity(scores))
        return RerankBiases(-texts / self.i2t[1], -images / self.t2i[1])

    def _log_sums(self, sim: Similarity) -> tuple[Tensor, Tensor]:
        """(M,) over the image queries and (N,) over the text queries."""
        queries = zip(("images", "texts"), self.transductive, sim.shape, strict=True)
        for name, transductive, number in queries:
            if transductive and number == 1:
                raise ValueError(
                    f"scores: a single query is compared with no other, so re-ranking cannot rank for it; "
                    f"fit({name}=...) a bank of queries first"
                )
        sim = sim.detach()
        if all(self.transductive):
            images, texts = sim.both.logsumexp(self.t2i[0], self.i2t[0], over="all")
        else:
            texts = _over_queries(sim.T, "images", self._images, self.i2t[0])
            images = _over_queries(sim, "texts", self._texts, self.t2i[0])
        for sums, gamma in ((texts, self.i2t[0]), (images, self.t2i[0])):
            if not bool(sums.isfinite().all()):
                raise ValueError(f"scores: too large to be multiplied by {gamma}")
        return texts, images


def _over_queries(candidates: Similarity, name: str, bank: Tensor | None, gamma: float) -> Tensor:
    """Log-sum of each candidate, a row here, over the queries of the bank, or over the columns without one."""
    if bank is not None:
        bank = bank.to(candidates.device, candidates.dtype)
        matrix = candidates._matrix
        if matrix.cols is None:
            bank = bank.T if name == "images" else bank
            got, wanted = bank.shape[0], candidates.shape[0]
            what = f"scores with the {wanted} candidates"
        else:
            got, wanted = bank.shape[1], matrix.cols.shape[1]
            what = f"embeddings of dimension {wanted}"
        if got != wanted:
            raise ValueError(f"{name}: expected {what}, got a bank of {got}")
        candidates = candidates._against(bank)
    return candidates.logsumexp(gamma, over="all")


def as_similarity(scores: Tensor | Similarity) -> Similarity:
    """Scores without ids: re-ranking never asks who matches whom."""
    if isinstance(scores, Similarity):
        scores.check_finite()
        return scores
    n, m = (scores.shape[0], scores.shape[1]) if isinstance(scores, Tensor) and scores.dim() == 2 else (1, 1)
    ids = (torch.arange(n), torch.arange(m))
    return Similarity.from_scores(scores, *ids, check_finite=True)
