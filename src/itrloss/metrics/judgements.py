"""Relevance by human judgements instead of ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checks import as_ids, check_size, require_finite
from ..engine.pairs import slots
from ..engine.ranking import ranks
from ..similarity import Similarity, TopK
from .labels import with_ids

_ANY = (2**31, 2**31)  # a shape whose pairs can still be numbered


class Judgements(NamedTuple):
    """Human judgements of the relevance of image-text pairs: three 1-D tensors of the same length.

    A repeated pair has the mean of its grades.
    """

    images: Tensor  #: integers, row indices of the score matrix
    texts: Tensor  #: integers, column indices
    grades: Tensor  #: any numbers, higher is more relevant

    def at_least(self, grade: float) -> tuple[Tensor, Tensor]:
        """Return the (P,) images and (P,) texts of the pairs with this grade or a higher one."""
        images, texts, grades = _averaged(self)
        # 0.7 as float32 is less than 0.7: the limit is rounded as the grades are.
        dtype = self.grades.dtype if self.grades.is_floating_point() else torch.float64
        relevant = grades >= torch.tensor(grade, dtype=dtype)
        if not bool(relevant.any()):
            raise ValueError(f"grade: no pair has a grade of {grade} or above")
        return images[relevant], texts[relevant]


class Agreement(NamedTuple):
    """The agreement of scores with human grades."""

    # Kendall's tau-b over all judged pairs, 1 for the same order and -1 for the opposite
    tau: float
    i2t_ndcg: float  #: in percent
    t2i_ndcg: float  #: in percent


def agreement(scores: Tensor | Similarity, judgements: Judgements, *, k: int = 10) -> Agreement:
    r"""Return Kendall's τ-b of scores and grades, and the normalised discounted cumulative gain at
    k.

    .. math::
        \tau_b = \frac{P - Q}{\sqrt{(n_0 - n_1)(n_0 - n_2)}}, \qquad
        \mathrm{nDCG@}k = \frac{\sum_{l \le k} (g_l - g_{min}) / \log_2 (l + 1)}{\text{the same, best first}}

    Over pairs of judgements: P are concordant, Q discordant, n₁ tied in score, n₂ tied in grade, n₀
    is the number of all. :math:`g_l` is the grade of the candidate at rank l, or the lowest grade
    :math:`g_{min}` if it was not judged. Queries with no grade above the lowest do not count. Equal
    scores rank in no particular order.

    Args:
        scores: (n_images, n_texts), or a ``Similarity``.
        judgements: with at least two different grades.
        k: number of candidates per query in the gain.
    """
    try:
        from scipy.stats import kendalltau
    except ImportError:
        raise ImportError("agreement needs SciPy: pip install 'itrloss[metrics]'") from None
    sim = with_ids("scores", scores, None, None, by_ids=False).detach()
    images, texts, grades = _averaged(judgements, sim.shape)
    check_size("k", k)
    gains = grades - grades.amin()
    if not bool(gains.any()):
        raise ValueError("judgements: expected at least two different grades")
    values = sim.pair_scores(images.to(sim.device), texts.to(sim.device)).double().cpu()
    result: Any = kendalltau(values.numpy(), grades.numpy())  # nan if all scores are equal
    ndcg = _ndcg(sim, images, texts, gains, k), _ndcg(sim.T, texts, images, gains, k)
    return Agreement(float(np.nan_to_num(result.statistic)), *ndcg)


def _ndcg(sim: Similarity, rows: Tensor, cols: Tensor, gains: Tensor, k: int) -> float:
    """Return the mean nDCG@k of the rows in percent, from the gains of the pairs (rows, cols)."""
    best = sim.topk(min(k, sim.shape[1])).indices.cpu()
    discounts = 1 / torch.arange(2, best.shape[1] + 2).double().log2()
    rows, cols, gains = (x[gains.argsort(descending=True)] for x in (rows, cols, gains))
    place = slots(rows, len(best))
    judged = torch.full((len(best), int(place.amax()) + 1), -1)  # each row's columns, best first
    gain = torch.zeros(judged.shape, dtype=torch.float64)
    judged[rows, place], gain[rows, place] = cols, gains
    dcg = sum(
        w * torch.where(judged == x[:, None], gain, 0.0).sum(1)
        for w, x in zip(discounts, best.T, strict=True)
    )
    ideal = gain[:, : len(discounts)] @ discounts[: gain.shape[1]]
    return 100 * float((dcg / ideal)[ideal > 0].mean())


def _averaged(
    judgements: Judgements, shape: tuple[int, int] = _ANY
) -> tuple[Tensor, Tensor, Tensor]:
    """Return checked images, texts and mean grades on the CPU, sorted, each pair once."""
    images, texts, grades = judgements
    pairs, index = distinct_pairs("judgements", images, texts, shape)
    if not isinstance(grades, Tensor) or grades.shape != images.shape:
        got = tuple(grades.shape) if isinstance(grades, Tensor) else type(grades).__name__
        raise ValueError(f"judgements.grades: expected shape {tuple(images.shape)}, got {got}")
    values, zeros = grades.detach().cpu().double(), torch.zeros(pairs.shape[1], dtype=torch.float64)
    require_finite("judgements.grades", values[None])
    low, high, mean = (
        zeros.scatter_reduce(0, index, values, x, include_self=False)
        for x in ("amin", "amax", "mean")
    )
    return pairs[0], pairs[1], mean.clamp(low, high)  # the mean of equal grades is exact


def distinct_pairs(
    name: str, images: Tensor, texts: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the (2, P) checked pairs on the CPU, sorted, each once, and which of them each given
    pair is.
    """
    size = images.numel() if isinstance(images, Tensor) else 1
    if size == 0:
        raise ValueError(f"{name}.images: expected at least 1 index, got 0")
    parts = {f"{name}.images": images, f"{name}.texts": texts}
    rows, cols = pairs = [as_ids(part, x, size, torch.device("cpu")) for part, x in parts.items()]
    for part, x, limit in zip(parts, pairs, shape, strict=True):
        low, high = int(x.amin()), int(x.amax())
        if low < 0 or high >= limit:
            raise ValueError(f"{part}: expected indices from 0 to {limit - 1}, got {low} to {high}")
    numbers, index = torch.unique(rows * shape[1] + cols, return_inverse=True)
    return torch.stack([numbers // shape[1], numbers % shape[1]]), index


def ranked_by_pairs(
    rows: Tensor, cols: Tensor, sim: Similarity, k: int, ties: str
) -> tuple[Tensor, TopK]:
    """Return ``sim.ranked(k, ties=ties)`` with these distinct pairs as positives instead of those
    with equal ids.
    """
    slot = slots(rows, sim.shape[0])
    places = torch.full((sim.shape[0], int(slot.amax()) + 1), -1, device=sim.device)
    places[rows, slot] = cols
    parts, tops = [], []
    for part, scores in sim.blocks():
        tops.append(scores.topk(min(k, scores.shape[1])))
        own = places[part]
        thresholds = scores.gather(1, own.clamp_min(0)).masked_fill_(own < 0, torch.nan)
        row, slot = (own >= 0).nonzero(as_tuple=True)
        scores[row, own[row, slot]] = -torch.inf
        parts.append(ranks(thresholds, scores, ties == "optimistic"))
    return torch.cat(parts), TopK(*(torch.cat(x) for x in zip(*tops, strict=True)))
