"""PCME++: images and texts as normal distributions, with a distance in closed form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..anchors import Anchors
from ..checks import (
    IdsLike,
    Learnt,
    Names,
    check_alike,
    check_embeddings,
    check_matrix,
    from_numpy,
    host_may_read,
    option,
    takes_queries,
)
from ..engine.question import Value
from ..engine.related import Related
from ..engine.vectors import normalized
from ..functional import Values
from ..similarity import Similarity
from ..terms import identity, pair_term, softplus
from .base import SimilarityLoss

_NAMES = Names("images_mean", "texts_mean", "image_ids", "text_ids")
# relative, by which float32 distances of copies of a text differ: 9e-7 of 1 + d at most
_ROUNDING = 2e-6


@pair_term
def logit(scores: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return ``a S + b``."""
    return scale * scores + shift


@pair_term
def gain_of_label(
    scores: Tensor, label: Tensor, scale: Tensor, shift: Tensor, limit: Tensor, best: Tensor
) -> Tensor:
    """Return ``(m' - m) (a S + b)`` above a limit: by how much a label m costs more than m'."""
    return (best - label) * (scale * scores + shift) * (scores > limit)


@pair_term
def if_best_label(scores: Tensor, label: Tensor, best: Tensor) -> Tensor:
    """Return S of a label that is m' at least, and 0 of others."""
    return scores * (label >= best)


class PCMEPlusPlusLoss(SimilarityLoss):
    r"""Matching loss of PCME++ (`Chun, ICLR 2024 <https://arxiv.org/abs/2305.18171>`__), of normal
    distributions.

    .. math::
        d_{ij} = \lVert \mu_i - \mu_j \rVert^2 + \sum_k \sigma_{ik}^2 + \sum_k \sigma_{jk}^2, \qquad
        \ell_{ij} = \begin{cases} -\log \operatorname{sigmoid}(b - a d_{ij}) & \text{positive} \\
        -\log \operatorname{sigmoid}(a d_{ij} - b) & \text{negative} \end{cases}

    .. math::
        L = L_m + \alpha L_p + \beta \operatorname{mean}_{i, k} \tfrac12 (\mu_{ik}^2 + \sigma_{ik}^2
        - \log \sigma_{ik}^2 - 1)

    An anchor's value in :math:`L_m` is the mean of ℓ over all its candidates. In :math:`L_p`,
    negatives that are as near as the anchor's positives are on average, or nearer, count as
    positives: the *pseudo-positives*. The last term is the divergence from a standard normal
    distribution. All are means over images plus means over texts. No pair is left out; see
    :doc:`losses/probabilistic`.

    The weights m of ``matches`` are soft labels: ℓ is m times that of a positive plus 1 - m times
    that of a negative. Pseudo-positives then are as near as the matches of an anchor's largest
    label are on average, and have this label.

    Args:
        scale: a, above 0.
        shift: b, of any sign.
        learnable: make them parameters; pass them to the optimiser then.
        pseudo_weight: α, at least 0.
        vib_weight: β, at least 0.
        normalize: scale the means to unit length, as the authors' encoders do.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.

    Relations:
        A :class:`SigmoidLoss` on distances of normal distributions, with pseudo-positives.

    Example:
        >>> import torch
        >>> import itrloss
        >>> images, texts = torch.randn(8, 16), torch.randn(8, 16)
        >>> log_variance = torch.full((8, 16), -6.0)
        >>> loss = itrloss.PCMEPlusPlusLoss()
        >>> loss(images, texts, log_variance, log_variance).shape
        torch.Size([])
    """

    scale: float | Tensor = option(default=5.0, above=0, learnt=Learnt("scale"))
    shift: float | Tensor = option(default=5.0, learnt=Learnt("shift"))
    learnable: bool = option(default=True, fixed=True)
    pseudo_weight: float = option(default=0.1, at_least=0)
    vib_weight: float = option(default=1e-4, at_least=0)
    normalize: bool = True

    @takes_queries
    def forward(
        self,
        images_mean: Tensor,
        texts_mean: Tensor,
        images_log_variance: Tensor,
        texts_log_variance: Tensor,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        *,
        matches: Tensor | None = None,
    ) -> Values:
        """Return the loss of normal distributions with independent dimensions.

        Args:
            images_mean, texts_mean: (N, D) and (M, D) means µ.
            images_log_variance, texts_log_variance: (N, D) and (M, D) log σ², at most 80.
            image_ids, text_ids: see :meth:`PairLoss.forward`.
            matches: (N, M) labels in [0, 1] in place of ids, as of mixed samples; nan: no pair.

        Returns:
            A 0-dim float32 tensor (float64 for float64 input), or per-anchor values with
            ``reduction="none"``.
        """
        distributions = images_mean, texts_mean, images_log_variance, texts_log_variance
        sim = self.similarity(*distributions, image_ids, text_ids, matches=matches)
        divergence = None
        if self.vib_weight != 0:
            divergence = self._divergence(sim, *distributions)
        return self._with_telemetry(self.compute(sim, divergence), sim)

    @takes_queries
    def similarity(
        self,
        images_mean: Tensor,
        texts_mean: Tensor,
        images_log_variance: Tensor,
        texts_log_variance: Tensor,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
        *,
        matches: Tensor | None = None,
    ) -> Similarity:
        """Return the :class:`Similarity` of -d, by which the model retrieves; arguments as in
        :meth:`forward`.
        """
        distributions = images_mean, texts_mean, images_log_variance, texts_log_variance
        labels = from_numpy(matches)

        def check() -> str:
            """Check the input; return what has to be the same in all processes."""
            self._check(*distributions)
            if isinstance(labels, Tensor) and host_may_read(labels):
                self._check_labels(labels)
            return self.described()

        self.agree(check)
        means = [normalized(x, self.normalize) for x in distributions[:2]]
        sums = [
            m.square().sum(1) + x.to(m.dtype).exp().sum(1)
            for m, x in zip(means, distributions[2:], strict=True)
        ]
        # -d = 2 <m, m'> - |m|^2 - |m'|^2 - ..., an inner product and a bias of each side
        rows, cols = (2**0.5 * m for m in means)
        bias = -sums[0], -sums[1]
        ids = image_ids, text_ids
        related = None if labels is None else Related(matches=labels)
        return self._between((rows, cols), ids, _NAMES, normalize=False, bias=bias, related=related)

    def compute(self, sim: Similarity, divergence: Tensor | None = None) -> Values:
        """Return the loss of the similarities -d; ``divergence``: (A,), of each anchor."""
        anchors = sim.both
        a = self.shared(self.scale)
        b = self.shared(self.shift)
        positives = anchors.positive_counts
        candidates = positives + anchors.negative_counts
        values = anchors.sum(softplus, scale=a, shift=b) + anchors.sum_of_positives(
            softplus, scale=-a, shift=-b
        )
        if anchors.has_weights:
            everywhere = values.new_full((), -torch.inf)
            options = a, b, everywhere, 1.0
            values = values + anchors.sum_of_positives(gain_of_label, *options, weights="parameter")
        if self.pseudo_weight:
            pseudo = values - self._gain_of_pseudo_positives(anchors, a, b)
            values = values + self.pseudo_weight * pseudo
        values = values / candidates.clamp_min(1)
        if divergence is not None:
            values = values + self.vib_weight * divergence
        return anchors.reduce(values, self.reduction, candidates > 0)

    def _gain_of_pseudo_positives(self, anchors: Anchors, a: Value, b: Value) -> Tensor:
        """Return (A,) by how much an anchor's sum is less if pseudo-positives count as positives.

        -log sigmoid(z) of one is -log sigmoid(-z) of the negative, minus z.
        """
        if not anchors.has_weights:
            limit = self._limit(anchors, anchors.mean_of_positives(identity))
            return anchors.sum(logit, a, b, above=limit)
        fixed = anchors.detach()
        best = anchors.largest_weights
        total = fixed.sum_of_positives(if_best_label, best, weights="parameter")
        number = fixed.sum_of_positives(
            if_best_label, best, scale=0.0, shift=1.0, weights="parameter"
        )
        limit = self._limit(anchors, total / number)  # of none for anchors without a match
        of_negatives = anchors.sum(logit, a, b, above=limit)
        options = a, b, limit, best
        of_matches = anchors.sum_of_positives(gain_of_label, *options, weights="parameter")
        return best * of_negatives + of_matches

    def _limit(self, anchors: Anchors, own: Tensor) -> Tensor:
        """Return (A,) the scores above which pairs are pseudo-positives, from those of matches."""
        lower = own.detach() - _ROUNDING * (1 + own.detach().abs())
        return torch.where(anchors.positive_counts > 0, lower, torch.inf)

    def _divergence(self, sim: Similarity, *distributions: Tensor) -> Tensor:
        """Return (A,) the mean over dimensions of the divergence of each distribution from the
        standard one.
        """
        parts = []
        for size, mean, x in zip(sim.both.sizes, distributions[:2], distributions[2:], strict=True):
            mean = normalized(mean, self.normalize)
            x = x.to(mean.dtype)
            part = 0.5 * (mean.square() + x.exp() - x - 1).mean(1)
            # of a sharded batch, which may be padded
            parts.append(F.pad(part, (0, size - len(part))))
        return torch.cat(parts)

    def _check_labels(self, labels: Tensor) -> None:
        """Raise an error for labels above 1."""
        above = labels[labels > 1]
        if len(above):
            raise ValueError(f"matches: expected labels from 0 to 1, got {above.amax():g}")

    def _check(self, images: Tensor, texts: Tensor, *log_variances: Tensor) -> None:
        """Raise an error unless the means are valid, and the variances have their shapes."""
        check_embeddings(images, texts, self.check_finite, _NAMES, empty=self.sharded)
        sides = _NAMES.rows, _NAMES.cols
        for side, mean, x in zip(sides, (images, texts), log_variances, strict=True):
            name = side.replace("mean", "log_variance")
            check_matrix(name, x, "(B, D)", self.check_finite, empty=self.sharded)
            if x.shape != mean.shape:
                raise ValueError(
                    f"{name}: expected shape {tuple(mean.shape)} like {side}, got {tuple(x.shape)}"
                )
            check_alike(name, x, side, mean)
