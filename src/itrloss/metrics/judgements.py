"""Relevance as people graded it, in place of ids."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checks import check_size
from ..engine.pairs import slots
from ..engine.ranking import ranks
from ..similarity import Similarity, TopK
from .labels import labelled


class Judgements(NamedTuple):
    """Graded relevance of image-text pairs, as people judged it: three 1-D tensors of the same length.

    A pair that is there several times has the mean of its grades.
    """

    images: Tensor  # integers, rows of the score matrix
    texts: Tensor  # integers, columns of it
    grades: Tensor  # any numbers, higher is more relevant

    def at_least(self, grade: float) -> tuple[Tensor, Tensor]:
        """Return the images and texts of the pairs of this grade or a higher one."""
        images, texts, grades = averaged(self)
        kind = self.grades.dtype  # 0.7 as float32 is less than 0.7: the limit is rounded as the grades are
        right = grades >= (float(torch.tensor(grade, dtype=kind)) if kind.is_floating_point else grade)
        if not bool(right.any()):
            raise ValueError(f"grade: no pair has a grade of {grade} or above")
        return images[right], texts[right]


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
        judgements: at least two different grades.
        k: how many candidates of a query are looked at.
    """
    sim = labelled("scores", scores, None, None, by_ids=False).detach()
    images, texts, grades = averaged(judgements)
    check_pairs("judgements", images, texts, sim.shape)
    check_size("k", k)
    gains = grades - grades.amin()
    if not bool(gains.any()):
        raise ValueError("judgements: expected at least two different grades")
    values = sim.pair_scores(images.to(sim.device), texts.to(sim.device)).double().cpu()
    ndcg = [_ndcg(sim, images, texts, gains, k), _ndcg(sim.T, texts, images, gains, k)]
    return Agreement(_kendall(values, grades), *ndcg)


def check_pairs(name: str, images: Tensor, texts: Tensor, shape: tuple[int, int] | None = None) -> None:
    """Raise an error unless these are 1-D tensors of integers of the same length, and numbers within ``shape``."""
    for side, (which, x) in enumerate((("images", images), ("texts", texts))):
        integers = isinstance(x, Tensor) and not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if not integers or x.dim() != 1:
            raise TypeError(f"{name}.{which}: expected a 1-D tensor of integers, got {_seen(x)}")
        if len(x) == 0 or len(x) != len(images):
            raise ValueError(f"{name}.{which}: expected as many as there are images, above 0; got {len(x)}")
        if int(x.amin()) < 0 or (shape is not None and int(x.amax()) >= shape[side]):
            wanted = "0 and above" if shape is None else f"0 to {shape[side] - 1}"
            raise ValueError(f"{name}.{which}: expected numbers from {wanted}, got {int(x.amin())} to {int(x.amax())}")


def averaged(judgements: Judgements) -> tuple[Tensor, Tensor, Tensor]:
    """Checked, on the CPU, sorted; each pair once."""
    images, texts, grades = judgements
    check_pairs("judgements", images, texts)
    if not isinstance(grades, Tensor) or grades.shape != images.shape:
        raise ValueError(f"judgements.grades: expected a tensor of shape {tuple(images.shape)}, got {_seen(grades)}")
    values = grades.detach().cpu().double()
    if not bool(values.isfinite().all()):
        raise ValueError("judgements.grades: expected finite numbers")
    images, texts = images.cpu().long(), texts.cpu().long()
    width = int(texts.amax()) + 1
    pairs, which, count = torch.unique(images * width + texts, return_inverse=True, return_counts=True)
    none = torch.zeros(len(pairs), dtype=torch.float64)
    lowest, highest = (none.scatter_reduce(0, which, values, way, include_self=False) for way in ("amin", "amax"))
    means = none.index_add(0, which, values) / count
    return pairs // width, pairs % width, means.clamp(lowest, highest)  # that of equal grades is that very grade


def _seen(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


def listed(relevant: tuple[Tensor, Tensor], shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the images and texts of right pairs, checked, each pair once."""
    check_pairs("relevant", *relevant, shape)
    images, texts = (x.to(device).long() for x in relevant)
    pairs = torch.unique(images * shape[1] + texts)
    return pairs // shape[1], pairs % shape[1]


def ranked_by(rows: Tensor, cols: Tensor, sim: Similarity, k: int, ties: str) -> tuple[Tensor, TopK]:
    """Return what ``sim.ranked`` does, with these positive pairs, each once, in place of those with equal ids."""
    slot = slots(rows, sim.shape[0])
    places = torch.full((sim.shape[0], int(slot.amax()) + 1), -1, device=sim.device)
    places[rows, slot] = cols
    found, tops = [], []
    for part, scores in sim.blocks():
        tops.append(scores.topk(min(k, scores.shape[1])))
        own = places[part]
        thresholds = scores.gather(1, own.clamp_min(0)).masked_fill_(own < 0, torch.nan)
        row, slot = (own >= 0).nonzero(as_tuple=True)
        scores[row, own[row, slot]] = -torch.inf
        found.append(ranks(thresholds, scores, ties == "optimistic"))
    return torch.cat(found), TopK(*(torch.cat(x) for x in zip(*tops, strict=True)))


def _ndcg(sim: Similarity, rows: Tensor, cols: Tensor, gains: Tensor, k: int) -> float:
    n, m = sim.shape
    k = min(k, m)
    weights = 1 / torch.log2(torch.arange(2, k + 2, dtype=torch.float64))
    pairs, order = (rows * m + cols).sort()
    best = torch.arange(n)[:, None] * m + sim.topk(k).indices.cpu()
    where = torch.searchsorted(pairs, best).clamp_max(len(pairs) - 1)
    gained = torch.where(pairs[where] == best, gains[order][where], 0.0)
    best_first = gains.argsort(descending=True)
    row, place = rows[best_first], slots(rows[best_first], n)
    within = place < k
    ideal = torch.zeros(n, dtype=torch.float64)
    ideal.index_add_(0, row[within], gains[best_first][within] * weights[place[within]])
    counted = ideal > 0
    return 100 * float(((gained * weights).sum(1)[counted] / ideal[counted]).mean())


def _kendall(scores: Tensor, grades: Tensor) -> float:
    try:
        from scipy.stats import kendalltau
    except ImportError:
        raise ImportError("agreement needs SciPy: pip install 'itrloss[metrics]'") from None
    found: Any = kendalltau(scores.numpy(), grades.numpy())
    return 0.0 if math.isnan(found.statistic) else float(found.statistic)  # not a number if all scores are the same
