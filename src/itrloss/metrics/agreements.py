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
from .retrieval import retrieval_results


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
    relevant = Judgements(images, texts, gains)
    gained = retrieval_results(sim, relevant=relevant).metrics((k,))
    return Agreement(
        float(np.nan_to_num(tau)),
        i2t_ndcg=gained[f"i2t_ndcg_at_{k}"],
        t2i_ndcg=gained[f"t2i_ndcg_at_{k}"],
    )
