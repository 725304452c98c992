"""PCME++: images and texts as normal distributions, with a distance in closed form."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import (
    IdsLike,
    Learnt,
    Names,
    check_alike,
    check_embeddings,
    check_matrix,
    option,
)
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

    Args:
        scale: a, above 0.
        shift: b, of any sign.
        learnable: make them parameters; pass them to the optimiser then.
        pseudo_weight: α, at least 0.
        vib_weight: β, at least 0.
        normalize: scale the means to unit length, as the authors' encoders do.
        reduction, engine, check_finite, telemetry, gather, process_group: see :class:`PairLoss`.
    """

    scale: float | Tensor = option(default=5.0, above=0, learnt=Learnt("scale"))
    shift: float | Tensor = option(default=5.0, learnt=Learnt("shift"))
    learnable: bool = option(default=True, fixed=True)
    pseudo_weight: float = option(default=0.1, at_least=0)
    vib_weight: float = option(default=1e-4, at_least=0)
    normalize: bool = True

    def forward(
        self,
        images_mean: Tensor,
        texts_mean: Tensor,
        images_log_variance: Tensor,
        texts_log_variance: Tensor,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
    ) -> Values:
        """Return the loss of normal distributions with independent dimensions.

        Args:
            images_mean, texts_mean: (N, D) and (M, D) means µ.
            images_log_variance, texts_log_variance: (N, D) and (M, D) log σ², of any size.
            image_ids, text_ids: see :meth:`PairLoss.forward`.

        Returns:
            A 0-dim float32 tensor (float64 for float64 input), or per-anchor values with
            ``reduction="none"``.
        """
        distributions = images_mean, texts_mean, images_log_variance, texts_log_variance
        sim = self.similarity(*distributions, image_ids, text_ids)
        divergence = None
        if self.vib_weight != 0:
            divergence = self._divergence(sim, *distributions)
        return self._with_telemetry(self.compute(sim, divergence), sim)

    def similarity(
        self,
        images_mean: Tensor,
        texts_mean: Tensor,
        images_log_variance: Tensor,
        texts_log_variance: Tensor,
        image_ids: IdsLike | None = None,
        text_ids: IdsLike | None = None,
    ) -> Similarity:
        """Return the :class:`Similarity` of -d, by which the model retrieves; arguments as in
        :meth:`forward`.
        """
        distributions = images_mean, texts_mean, images_log_variance, texts_log_variance

        def check() -> str:
            """Check the input; return what has to be the same in all processes."""
            self._check(*distributions)
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
        return self._between((rows, cols), ids, _NAMES, normalize=False, bias=bias)

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
        if self.pseudo_weight:
            own = anchors.mean_of_positives(identity)
            limit = torch.where(positives > 0, own - _ROUNDING * (1 + own.abs()), torch.inf)
            # -log sigmoid(z) of a pseudo-positive is -log sigmoid(-z) of the negative, minus z
            pseudo = values - anchors.sum(logit, a, b, above=limit)
            values = values + self.pseudo_weight * pseudo
        values = values / candidates.clamp_min(1)
        values = values if divergence is None else values + self.vib_weight * divergence
        return anchors.reduce(values, self.reduction, candidates > 0)

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
