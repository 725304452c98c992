"""Re-rankers that normalise a candidate's scores by its scores with reference queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..checks import option
from ..similarity import Similarity
from .base import Reranker
from .direction import AT_ONCE, Bias, Direction, Rule, against, log_sum_exp, reference_sums


class DualSoftmax(Reranker):
    """Dual softmax (CAMoE; Cheng et al., 2021).

    ``S_qc exp(scale S_qc) / sum_r exp(scale R_rc)``, ranked by its logarithm in float64, so that
    scores of any scale keep their order. Re-ranked scores are ``1 + log |x|`` for a positive value
    x, minus that for a negative one, and 0 for 0, where x is divided by the smallest of the query.

    Relations:
        :class:`InvertedSoftmax`, by which the scores are multiplied.

    Example:
        >>> import torch
        >>> from itrloss import rerank
        >>> scores = torch.rand(20, 30)
        >>> rerank.DualSoftmax().rerank(scores).i2t.shape
        torch.Size([20, 30])
    """

    cosine_options = ("scale",)

    scale: float = option(default=20.0, above=0)

    def rule(self, direction: Direction) -> Rule:
        """Return the rule that multiplies scores by their share of the softmax, in logarithms."""
        total = reference_sums(direction.candidates, self.scale)

        def in_logarithms(scores: Tensor, rows: slice) -> Tensor:
            """Return the products of a block's scores and their shares, in logarithms."""
            exact = scores.double()
            size = exact.abs().log_().add_(exact, alpha=self.scale).sub_(total)
            is_zero = exact == 0
            least = size.masked_fill(is_zero, torch.inf).amin(1, keepdim=True)
            return size.sub_(least).add_(1.0).mul_(exact.sign()).masked_fill_(is_zero, 0.0)

        return in_logarithms


class QueryBankNorm(Reranker):
    """QB-Norm with the dynamic inverted softmax (Bogolin et al., CVPR 2022); needs a bank of
    queries.

    ``scale S_qc - a_q log sum_r exp(scale R_rc)``, where a_q is 1 if the best candidate of q is a
    hub, among the ``k`` best of some query of the bank, and 0 otherwise. With the test queries as
    the bank all queries would be normalised, as in :class:`InvertedSoftmax`.

    Relations:
        :class:`InvertedSoftmax` for queries whose best candidate is a hub of the bank, no
        change for others.

    Example:
        >>> import torch
        >>> import itrloss
        >>> from itrloss import rerank
        >>> images, texts = torch.randn(20, 16), torch.randn(30, 16)
        >>> sim = itrloss.Similarity(images, texts)
        >>> bank = torch.randn(50, 16), torch.randn(50, 16)
        >>> rerank.QueryBankNorm().fit(*bank).rerank(sim).transductive
        (False, False)
    """

    needs_bank = True
    cosine_options = ("scale",)

    scale: float = option(default=20.0, above=0)
    k: int = option(default=1, at_least=1)

    def rule(self, direction: Direction) -> Rule:
        """Return the rule that lowers the candidates of queries whose best candidate is a hub."""
        penalty = reference_sums(direction.candidates, self.scale)
        best = direction.candidates.T.topk(min(self.k, direction.candidates.shape[0]))
        hubs = best.indices.unique()

        def penalise_hubs(scores: Tensor, rows: slice) -> Tensor:
            """Return a block's scores, lowered where the best candidate is a hub."""
            best_is_hub = torch.isin(scores.argmax(1), hubs)
            lowered = torch.where(best_is_hub[:, None], penalty, 0.0)
            return scores.double().mul_(self.scale).sub_(lowered)

        return penalise_hubs


class DualBankNorm(Reranker):
    """DBNorm in its static form, DualIS (Wang et al., EMNLP 2023); needs both banks and embeddings.

    ``(query_scale + gallery_scale) S_qc - log sum_r exp(query_scale R_rc) - log sum_g
    exp(gallery_scale G_gc)``, where G are the similarities of candidates with the bank of their own
    modality.

    Relations:
        :class:`InvertedSoftmax` with a second bank, of the candidates' own kind.

    Example:
        >>> import torch
        >>> import itrloss
        >>> from itrloss import rerank
        >>> images, texts = torch.randn(20, 16), torch.randn(30, 16)
        >>> sim = itrloss.Similarity(images, texts)
        >>> bank = torch.randn(50, 16), torch.randn(50, 16)
        >>> rerank.DualBankNorm().fit(*bank).rerank(sim).transductive
        (False, False)
    """

    needs_bank = True
    needs_embeddings = True
    cosine_options = ("query_scale", "gallery_scale")

    query_scale: float = option(default=1 / 1.99, above=0)
    gallery_scale: float = option(default=3.0, above=0)

    def rule(self, direction: Direction) -> Rule:
        """Return minus the log-sum-exps over both banks as each candidate's bias."""
        assert direction.gallery is not None
        gallery = against(direction.candidates, direction.gallery)
        of_queries = direction.candidates.logsumexp(self.query_scale)
        of_gallery = gallery.logsumexp(self.gallery_scale)
        return Bias(-of_queries - of_gallery, self.query_scale + self.gallery_scale)


class NearestNeighborNorm(Reranker):
    """Nearest neighbor normalization, NNN (Chowdhury et al., EMNLP 2024): ``S_qc - alpha mean
    top-k_r R_rc``.

    The mean is over the ``k`` reference queries with the highest scores, or over all of them if
    there are fewer.

    Relations:
        With ``alpha=0.5`` it ranks as :class:`CSLS` with the same k.

    Example:
        >>> import torch
        >>> from itrloss import rerank
        >>> scores = torch.rand(20, 30)
        >>> nnn = rerank.NearestNeighborNorm(alpha=0.5, k=10).rerank(scores)
        >>> csls = rerank.CSLS(k=10).rerank(scores)
        >>> torch.equal(nnn.i2t.argsort(1), csls.i2t.argsort(1))
        True
    """

    alpha: float = 0.75
    k: int = option(default=128, at_least=1)

    def rule(self, direction: Direction) -> Bias:
        """Return minus the mean of each candidate's highest scores, times alpha, as its bias."""
        highest = direction.candidates.topk(min(self.k, direction.candidates.shape[1])).values
        if direction.candidates.embeddings is None:
            highest = highest.double()  # given scores may be far larger than they differ
        return Bias(-self.alpha * highest.mean(1))


class CSLS(Reranker):
    """Cross-domain similarity local scaling (Conneau et al., ICLR 2018): ``2 S_qc - mean top-k_r
    R_rc``.

    The mean is as in :class:`NearestNeighborNorm`. CSLS' third term, the mean of the query's k best
    scores, is the same for all candidates and is left out.

    Relations:
        It ranks as :class:`NearestNeighborNorm` with ``alpha=0.5`` and the same k.

    Example:
        >>> import torch
        >>> from itrloss import rerank
        >>> scores = torch.rand(20, 30)
        >>> i2t, t2i = rerank.CSLS().rerank(scores)
        >>> i2t.shape, t2i.shape
        (torch.Size([20, 30]), torch.Size([20, 30]))
    """

    k: int = option(default=10, at_least=1)

    def rule(self, direction: Direction) -> Rule:
        """Return minus the mean of each candidate's highest scores as its bias."""
        return NearestNeighborNorm(1.0, self.k).rule(direction)._replace(factor=2.0)


class MutualProximity(Reranker):
    """Mutual proximity with independent normal distributions (Schnitzer et al., JMLR 2012).

    ``log Φ((S_qc - μ_q) / σ_q) + log Φ((S_qc - μ_c) / σ_c)``, the log probability that both are
    closer to each other than to a random third. μ and σ are the mean and standard deviation of the
    query's scores with all candidates, and of the candidate's with the reference queries.

    Relations:
        It standardises queries and candidates; :class:`CSLS` subtracts means of the nearest
        ones.

    Example:
        >>> import torch
        >>> from itrloss import rerank
        >>> scores = torch.rand(20, 30)
        >>> rerank.MutualProximity().rerank(scores).i2t.shape
        torch.Size([20, 30])
    """

    def rule(self, direction: Direction) -> Rule:
        """Return the rule that ranks by the log probability."""
        query_mean, query_std = _moments(direction.queries)
        mean, std = _moments(direction.candidates)

        def log_probability(scores: Tensor, rows: slice) -> Tensor:
            """Return the log probabilities of a block's scores."""
            exact = scores.double()
            candidate_term = torch.special.log_ndtr((exact - mean).div_(std))
            query_z = exact.sub_(query_mean[rows, None]).div_(query_std[rows, None])
            return torch.special.log_ndtr(query_z).add_(candidate_term)

        return log_probability


class Sinkhorn(Reranker):
    """Sinkhorn normalisation (Pan et al., 2025): ``scale S_qc + g_c``.

    From g = 0, ``iterations`` times ``f_r = -log |r| - log sum_c exp(scale R_rc + g_c)`` and then
    ``g_c = -log C - log sum_r exp(scale R_rc + f_r)``, each a pass over the scores. At convergence
    all C candidates have the same share of the reference queries. f and g are in float64.

    Relations:
        An :class:`InvertedSoftmax` whose reference queries are weighted, so that all count
        alike.

    Example:
        >>> import torch
        >>> from itrloss import rerank
        >>> scores = torch.rand(20, 30)
        >>> rerank.Sinkhorn().rerank(scores).i2t.shape
        torch.Size([20, 30])
    """

    cosine_options = ("scale",)

    scale: float = option(default=100.0, above=0)
    iterations: int = option(default=10, at_least=1)

    def rule(self, direction: Direction) -> Bias:
        """Return g, after the last iteration, as each candidate's bias."""
        candidates = direction.candidates
        c, r = candidates.shape
        g = torch.zeros(c, dtype=torch.float64, device=candidates.device)
        for _ in range(self.iterations):
            f = -math.log(r) - log_sum_exp(candidates.T, self.scale, g)
            g = -math.log(c) - log_sum_exp(candidates, self.scale, f)
        return Bias(g, self.scale)


class DualBankSinkhorn(Sinkhorn):
    """Dual bank Sinkhorn normalisation, DBSN (Pan et al., 2025); needs both banks and embeddings.

    This is :class:`Sinkhorn` with the candidates *and* the bank of their own modality as C. The
    bank's queries are then shared among their own matches too, not among the test candidates alone.

    Relations:
        :class:`Sinkhorn` with the gallery bank as further candidates.

    Example:
        >>> import torch
        >>> import itrloss
        >>> from itrloss import rerank
        >>> images, texts = torch.randn(20, 16), torch.randn(30, 16)
        >>> sim = itrloss.Similarity(images, texts)
        >>> bank = torch.randn(50, 16), torch.randn(50, 16)
        >>> rerank.DualBankSinkhorn().fit(*bank).rerank(sim).transductive
        (False, False)
    """

    needs_bank = True
    needs_embeddings = True

    def rule(self, direction: Direction) -> Bias:
        """Return g of the test candidates as their bias."""
        candidates = direction.candidates
        assert direction.gallery is not None and candidates.embeddings is not None
        items = against(candidates, candidates.embeddings[1], direction.gallery)
        bias, factor = super().rule(direction._replace(candidates=items))
        return Bias(bias[: candidates.shape[0]], factor)


def _moments(sim: Similarity) -> tuple[Tensor, Tensor]:
    """Return the (N,) float64 means and standard deviations of scores, of at least 1e-6."""
    means = torch.empty(sim.shape[0], dtype=torch.float64, device=sim.device)
    variances = torch.empty_like(means)
    for rows, block in sim.blocks(AT_ONCE):
        variances[rows], means[rows] = torch.var_mean(block.double(), 1, correction=0)
    return means, variances.clamp_min_(1e-12).sqrt_()
