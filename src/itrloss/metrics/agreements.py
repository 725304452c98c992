"""The agreement of scores with human grades, without a threshold."""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np
from torch import Tensor

from ..checks import as_size
from ..similarity import Similarity
from .judgements import Judgements, grades_of_pairs
from .labels import with_ids
from .matching import are_there
from .relevance import Judged
from .results import ndcg


class Agreement(NamedTuple):
    """The agreement of scores with human grades."""

    #: Kendall's tau-b over all judged pairs, 1 for the same order and -1 for the opposite
    tau: float
    i2t_ndcg: float  #: in percent
    t2i_ndcg: float  #: in percent


def agreement(scores: Tensor | Similarity, judgements: Judgements, *, k: int = 10) -> Agreement:
    r"""Return Kendall's τ-b of scores and grades, and the normalised discounted cumulative gains.

    .. math::
        \tau_b = \frac{P - Q}{\sqrt{(n_0 - n_1)(n_0 - n_2)}}, \qquad
        \mathrm{nDCG@}k =
        \frac{\sum_{l \le k} (g_l - g_{min}) / \log_2 (l + 1)}{\text{the same, best first}}

    Of the n₀ pairs of judgements, P are concordant, Q are discordant, n₁ are tied in score and n₂
    in grade. :math:`g_l` is the grade of the candidate at rank l, or the lowest grade
    :math:`g_{min}` if it was not judged. Queries with no grade above the lowest do not count. Of
    candidates with equal scores, those of lower grades come first.

    Args:
        scores: (n_images, n_texts), or a ``Similarity``.
        judgements: with at least two different grades.
        k: number of candidates per query in the gain.
    """
    try:
        from scipy.stats import kendalltau
    except ImportError:
        raise ImportError(
            "agreement needs SciPy: install itrloss with the extra 'metrics'"
        ) from None
    sim = with_ids("scores", scores, None, None, by_ids=False)
    images, texts, grades = grades_of_pairs("judgements", judgements, sim.shape)
    there = are_there(sim, images.to(sim.device), texts.to(sim.device)).to(images.device)
    images = images[there]
    texts = texts[there]
    grades = grades[there]
    k = as_size("k", k)
    gains = grades - grades.amin()
    if not bool(gains.any()):
        raise ValueError("judgements: expected at least two different grades")
    values = sim.pair_scores(images.to(sim.device), texts.to(sim.device)).double().cpu()
    tau = cast(float, kendalltau(values.numpy(), grades.numpy())[0])  # nan if all scores are equal
    i2t, t2i = _ndcg(sim, images, texts, gains, k)
    return Agreement(float(np.nan_to_num(tau)), i2t_ndcg=i2t, t2i_ndcg=t2i)


def _ndcg(
    sim: Similarity, images: Tensor, texts: Tensor, gains: Tensor, k: int
) -> tuple[float, float]:
    """Return the mean nDCG@k of images and of texts in percent, from the (P,) gains of pairs."""
    device = sim.device
    graded = gains > 0
    of_images, of_texts, of_gains = [x[graded].to(device) for x in (images, texts, gains)]
    judged = Judged(sim.shape, of_images, of_texts, of_gains)
    means = []
    for queries, relevance in zip((sim, sim.T), judged.both(), strict=True):
        found = queries.ranked(0, relevance=relevance)
        assert found.grades is not None
        matched = found.ranks[:, 0] > 0
        values = ndcg(found.ranks[matched], found.grades[matched], k)
        means.append(100 * float(values.mean()))
    return means[0], means[1]
