"""Relevance as people graded it, in place of ids."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import check_size
from ..similarity import Similarity, TopK
from .labels import labelled


class Judgements(NamedTuple):
    """Graded relevance of image-text pairs, as people judged it: three 1-D tensors of the same length."""

    images: Tensor  # int64, rows of the score matrix
    texts: Tensor  # int64, columns of it
    grades: Tensor  # any numbers, higher is more relevant


class Agreement(NamedTuple):
    """How scores agree with grades."""

    tau: float  # Kendall's tau-b over all judged pairs: 1 the same order, -1 the opposite one
    i2t_ndcg: float  # in percent
    t2i_ndcg: float


def agreement(scores: Tensor | Similarity, judgements: Judgements, *, k: int = 10) -> Agreement:
    r"""Kendall's τ-b of scores and grades, and the normalised discounted cumulative gain at k.

    .. math::
        \tau_b = \frac{P - Q}{\sqrt{(n_0 - n_1)(n_0 - n_2)}}, \qquad
        \mathrm{nDCG@}k = \frac{\sum_{l \le k} (g_l - g_{min}) / \log_2 (l + 1)}{\text{the same, best first}}

    with the number of concordant pairs of judgements P and of discordant ones Q, of all pairs n₀, and of those tied in
    score n₁ or in grade n₂. :math:`g_l` is the grade of the candidate at rank l, or the lowest one if it was not
    judged; queries with nothing above the lowest grade do not count. Equal scores rank in no particular order.

    Args:
        scores: (n_images, n_texts), or a ``Similarity``.
        judgements: at least two different grades. A pair that is there several times has the mean of its grades.
        k: how many candidates of a query are looked at.
    """
    sim = labelled("scores", scores, *no_ids(scores)).detach()
    images, texts, grades = _averaged(judgements, sim.shape)
    check_size("k", k)
    gains = (grades - grades.amin()).double()
    if not bool(gains.any()):
        raise ValueError("judgements: expected at least two different grades")
    values = sim.pair_scores(images.to(sim.device), texts.to(sim.device)).double().cpu()
    ndcg = [_ndcg(sim, images, texts, gains, k), _ndcg(sim.T, texts, images, gains, k)]
    return Agreement(_kendall(values, grades), *ndcg)


def no_ids(scores: Tensor | Similarity) -> tuple[Tensor | None, Tensor | None]:
    """Judgements take the place of ids, so that any shape goes."""
    if isinstance(scores, Tensor) and scores.dim() == 2:
        images, texts = torch.arange(sum(scores.shape)).split(tuple(scores.shape))
        return images, texts
    return None, None


def fits_convention(scores: Tensor | Similarity) -> bool:
    matrix = isinstance(scores, Tensor) and scores.dim() == 2 and scores.numel()
    return not matrix or scores.shape[1] % scores.shape[0] == 0


def _averaged(judgements: Judgements, shape: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Checked, on the CPU; each pair once."""
    images, texts, grades = judgements
    for name, x, size in (("images", images, shape[0]), ("texts", texts, shape[1])):
        integers = isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if not integers or x.dim() != 1:
            raise TypeError(f"judgements.{name}: expected a 1-D tensor of integers, got {_seen(x)}")
        if len(x) == 0 or len(x) != len(images):
            raise ValueError(f"judgements.{name}: expected as many as there are images, above 0; got {len(x)}")
        if int(x.amin()) < 0 or int(x.amax()) >= size:
            got = f"{int(x.amin())} to {int(x.amax())}"
            raise ValueError(f"judgements.{name}: expected numbers from 0 to {size - 1}, got {got}")
    if not isinstance(grades, Tensor) or grades.shape != images.shape:
        raise ValueError(f"judgements.grades: expected a tensor of shape {tuple(images.shape)}, got {_seen(grades)}")
    if not bool(grades.double().isfinite().all()):
        raise ValueError("judgements.grades: expected finite numbers")
    images, texts, values = images.cpu().long(), texts.cpu().long(), grades.detach().cpu().double()
    pairs, which, count = torch.unique(images * shape[1] + texts, return_inverse=True, return_counts=True)
    none = torch.zeros(len(pairs), dtype=torch.float64)
    lowest, highest = (none.scatter_reduce(0, which, values, way, include_self=False) for way in ("amin", "amax"))
    means = none.index_add(0, which, values) / count
    return pairs // shape[1], pairs % shape[1], means.clamp(lowest, highest)  # that of equal grades is that very grade


def _seen(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def relevant_pairs(judgements: Judgements, relevant: float | None, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Images and texts of the pairs whose mean grade is ``relevant`` or more."""
    if relevant is None:
        raise ValueError("relevant: expected the lowest grade that counts as right, beside judgements; got None")
    images, texts, grades = _averaged(judgements, shape)
    kind = judgements.grades.dtype  # 0.7 as float32 is less than 0.7: the limit is rounded as the grades are
    right = grades >= (float(torch.tensor(relevant, dtype=kind)) if kind.is_floating_point else relevant)
    if not bool(right.any()):
        raise ValueError(f"relevant: no pair has a grade of {relevant} or above")
    return images[right], texts[right]


def judged(sim: Similarity, rows: Tensor, cols: Tensor, ties: str, k: int) -> tuple[Tensor, TopK]:
    """Ranks of listed right candidates as of ``Similarity.ranks``, and the k best."""
    order = rows.argsort(stable=True)
    rows, cols = rows[order].to(sim.device), cols[order].to(sim.device)
    count = torch.bincount(rows, minlength=sim.shape[0])
    width = int(count.amax())
    place = torch.arange(len(rows), device=rows.device) - (count.cumsum(0) - count)[rows]
    ranks, tops = [], []
    for part, scores in sim.blocks():
        tops.append(scores.topk(min(k, scores.shape[1])))
        mine = (rows >= part.start) & (rows < part.stop)
        row, col = rows[mine] - part.start, cols[mine]
        right = torch.full((len(scores), width), -torch.inf, dtype=scores.dtype, device=scores.device)
        right[row, place[mine]] = scores[row, col]
        right = right.sort(1, descending=True).values
        scores[row, col] = -torch.inf
        ahead = scores.shape[1] - torch.searchsorted(scores.sort(1).values, right, right=ties == "optimistic")
        found = ahead + torch.arange(1, width + 1, device=rows.device)
        ranks.append(torch.where(torch.arange(width, device=rows.device) < count[part, None], found, 0))
    return torch.cat(ranks), TopK(*(torch.cat(x) for x in zip(*tops, strict=True)))


def _ndcg(sim: Similarity, rows: Tensor, cols: Tensor, gains: Tensor, k: int) -> float:
    n, m = sim.shape
    k = min(k, m)
    pairs, order = (rows * m + cols).sort()
    gains = gains[order]
    asked = torch.arange(n)[:, None] * m + sim.topk(k).indices.cpu()
    where = torch.searchsorted(pairs, asked).clamp_max(len(pairs) - 1)
    found = torch.where(pairs[where] == asked, gains[where], 0.0)
    weights = 1 / torch.log2(torch.arange(2, k + 2, dtype=torch.float64))
    best_first = torch.argsort(gains, descending=True, stable=True)
    row = (pairs // m)[best_first]
    grouped = row.argsort(stable=True)
    row, ordered = row[grouped], gains[best_first][grouped]
    count = torch.bincount(row, minlength=n)
    place = torch.arange(len(row)) - (count.cumsum(0) - count)[row]
    within = place < k
    ideal = torch.zeros(n, dtype=torch.float64).index_add_(0, row[within], ordered[within] * weights[place[within]])
    counted = ideal > 0
    return 100 * float(((found * weights).sum(1)[counted] / ideal[counted]).mean())


def _kendall(scores: Tensor, grades: Tensor) -> float:
    """τ-b. In the order of grades, and of scores where these are equal, the discordant scores are those that fall."""
    n = len(scores)
    score, grade = (x.unique(return_inverse=True)[1] for x in (scores, grades))
    both = grade * n + score
    tied_score, tied_grade, tied_both = (_pairs(x.unique(return_counts=True)[1]) for x in (score, grade, both))
    total = n * (n - 1) // 2
    falling = _falling(score[both.argsort()])
    rising = total - tied_score - tied_grade + tied_both - falling
    scale = ((total - tied_score) * (total - tied_grade)) ** 0.5
    return (rising - falling) / scale if scale else 0.0


def _pairs(counts: Tensor) -> int:
    return int((counts * (counts - 1) // 2).sum())


def _falling(x: Tensor) -> int:
    """Pairs ``x_i > x_j``, i < j, of numbers from 0 to below ``len(x)``; counted between halves as in a merge sort."""
    n, width, found = len(x), 1, 0
    place = torch.arange(n)
    while width < n:
        block, later = place // (2 * width), place // width % 2 == 1
        keys = block * n + x
        earlier = keys[~later].sort().values
        not_above = torch.searchsorted(earlier, keys[later], right=True)
        found += int((torch.searchsorted(earlier, (block[later] + 1) * n) - not_above).sum())
        width *= 2
    return found
