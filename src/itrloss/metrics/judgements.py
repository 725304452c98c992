"""Relevance by human judgements instead of ids."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_size
from ..engine.pairs import slots
from ..engine.ranking import ranks
from ..similarity import Similarity, TopK
from .labels import with_ids


class Judgements(NamedTuple):
    """Human judgements of the relevance of image-text pairs: three 1-D tensors of the same length.

    A repeated pair has the mean of its grades.
    """

    images: Tensor  # integers, row indices of the score matrix
    texts: Tensor  # integers, column indices
    grades: Tensor  # any numbers, higher is more relevant

    def at_least(self, grade: float) -> tuple[Tensor, Tensor]:
        """Return the (P,) images and (P,) texts of the pairs with this grade or a higher one."""
        images, texts, grades = _averaged(self)
        dtype = self.grades.dtype  # 0.7 as float32 is less than 0.7: the limit is rounded as the grades are
        relevant = grades >= (float(torch.tensor(grade, dtype=dtype)) if dtype.is_floating_point else grade)
        if not bool(relevant.any()):
            raise ValueError(f"grade: no pair has a grade of {grade} or above")
        return images[relevant], texts[relevant]


class Agreement(NamedTuple):
    """The agreement of scores with human grades."""

    tau: float  # Kendall's tau-b over all judged pairs: 1 for the same order, -1 for the opposite
    i2t_ndcg: float  # in percent
    t2i_ndcg: float


def agreement(scores: Tensor | Similarity, judgements: Judgements, *, k: int = 10) -> Agreement:
    r"""Return Kendall's τ-b of scores and grades, and the normalised discounted cumulative gain at k.

    .. math::
        \tau_b = \frac{P - Q}{\sqrt{(n_0 - n_1)(n_0 - n_2)}}, \qquad
        \mathrm{nDCG@}k = \frac{\sum_{l \le k} (g_l - g_{min}) / \log_2 (l + 1)}{\text{the same, best first}}

    Over pairs of judgements: P are concordant, Q discordant, n₁ tied in score, n₂ tied in grade, n₀ is the number of
    all. :math:`g_l` is the grade of the candidate at rank l, or the lowest grade :math:`g_{min}` if it was not judged.
    Queries with no grade above the lowest do not count. Equal scores rank in no particular order.

    Args:
        scores: (n_images, n_texts), or a ``Similarity``.
        judgements: with at least two different grades.
        k: number of candidates per query in the gain.
    """
    sim = with_ids("scores", scores, None, None, by_ids=False).detach()
    images, texts, grades = _averaged(judgements)
    _check_pairs("judgements", images, texts, sim.shape)
    check_size("k", k)
    gains = grades - grades.amin()
    if not bool(gains.any()):
        raise ValueError("judgements: expected at least two different grades")
    values = sim.pair_scores(images.to(sim.device), texts.to(sim.device)).double().cpu()
    ndcg = [_ndcg(sim, images, texts, gains, k), _ndcg(sim.T, texts, images, gains, k)]
    return Agreement(_kendall(values, grades), *ndcg)


def _check_pairs(name: str, images: Tensor, texts: Tensor, shape: tuple[int, int] | None = None) -> None:
    """Raise an error unless these are 1-D integer tensors of the same length, and indices within ``shape``."""
    for side, (part, x) in enumerate((("images", images), ("texts", texts))):
        integers = isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if not integers or x.dim() != 1:
            raise TypeError(f"{name}.{part}: expected a 1-D tensor of integers, got {_describe(x)}")
        if len(x) == 0 or len(x) != len(images):
            raise ValueError(f"{name}.{part}: expected as many as images, at least 1, got {len(x)}")
        low, high = int(x.amin()), int(x.amax())
        if low < 0 or (shape is not None and high >= shape[side]):
            limits = "0 and above" if shape is None else f"0 to {shape[side] - 1}"
            raise ValueError(f"{name}.{part}: expected indices from {limits}, got {low} to {high}")


def _averaged(judgements: Judgements) -> tuple[Tensor, Tensor, Tensor]:
    """Return checked images, texts and mean grades on the CPU, sorted, each pair once."""
    images, texts, grades = judgements
    _check_pairs("judgements", images, texts)
    if not isinstance(grades, Tensor) or grades.shape != images.shape:
        raise ValueError(f"judgements.grades: expected shape {tuple(images.shape)}, got {_describe(grades)}")
    values = grades.detach().cpu().double()
    if not bool(values.isfinite().all()):
        raise ValueError("judgements.grades: expected finite numbers")
    images, texts = images.cpu().long(), texts.cpu().long()
    width = int(texts.amax()) + 1
    pairs, pair, count = torch.unique(images * width + texts, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(pairs), dtype=torch.float64)
    lowest, highest = (zeros.scatter_reduce(0, pair, values, x, include_self=False) for x in ("amin", "amax"))
    means = zeros.index_add(0, pair, values) / count
    return pairs // width, pairs % width, means.clamp(lowest, highest)  # the mean of equal grades is exact


def _describe(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def unique_pairs(pairs: tuple[Tensor, Tensor], shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the (P,) images and (P,) texts of the relevant pairs, checked, sorted, each pair once."""
    _check_pairs("relevant", *pairs, shape)
    images, texts = (x.to(device).long() for x in pairs)
    number = torch.unique(images * shape[1] + texts)
    return number // shape[1], number % shape[1]


def ranked_by_pairs(rows: Tensor, cols: Tensor, sim: Similarity, k: int, ties: str) -> tuple[Tensor, TopK]:
    """Return ``sim.ranked(k, ties=ties)`` with these distinct pairs as positives instead of those with equal ids."""
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


def _ndcg(sim: Similarity, rows: Tensor, cols: Tensor, gains: Tensor, k: int) -> float:
    """Return the mean nDCG@k of the rows in percent, from the gains of the pairs (rows, cols)."""
    n, m = sim.shape
    k = min(k, m)
    weights = 1 / torch.log2(torch.arange(2, k + 2, dtype=torch.float64))
    pairs, order = (rows * m + cols).sort()
    best = torch.arange(n)[:, None] * m + sim.topk(k).indices.cpu()
    index = torch.searchsorted(pairs, best).clamp_max(len(pairs) - 1)
    dcg = (torch.where(pairs[index] == best, gains[order][index], 0.0) * weights).sum(1)
    descending = gains.argsort(descending=True)
    row, place = rows[descending], slots(rows[descending], n)
    within = place < k
    ideal = torch.zeros(n, dtype=torch.float64)
    ideal.index_add_(0, row[within], gains[descending][within] * weights[place[within]])
    counted = ideal > 0
    return 100 * float((dcg[counted] / ideal[counted]).mean())


def _kendall(scores: Tensor, grades: Tensor) -> float:
    try:
        from scipy.stats import kendalltau
    except ImportError:
        raise ImportError("agreement needs SciPy: pip install 'itrloss[metrics]'") from None
    result: Any = kendalltau(scores.numpy(), grades.numpy())
    return 0.0 if math.isnan(result.statistic) else float(result.statistic)  # nan if all scores are equal
