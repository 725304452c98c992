"""Relevance by human judgements instead of ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..checks import as_indices, as_integers, as_size, check_range, from_numpy, require_finite
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
        given = from_numpy(self.grades)
        dtype = given.dtype if given.is_floating_point() else torch.float64
        relevant = grades >= torch.tensor(grade, dtype=dtype, device=grades.device)
        if not bool(relevant.any()):
            raise ValueError(f"grade: no pair has a grade of {grade} or above")
        return images[relevant], texts[relevant]


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
    k = as_size("k", k)
    gains = grades - grades.amin()
    if not bool(gains.any()):
        raise ValueError("judgements: expected at least two different grades")
    values = sim.pair_scores(images.to(sim.device), texts.to(sim.device)).double().cpu()
    result: Any = kendalltau(values.numpy(), grades.numpy())  # nan if all scores are equal
    return Agreement(
        tau=float(np.nan_to_num(result.statistic)),
        i2t_ndcg=_ndcg(sim, images, texts, gains, k),
        t2i_ndcg=_ndcg(sim.T, texts, images, gains, k),
    )


def _ndcg(sim: Similarity, rows: Tensor, cols: Tensor, gains: Tensor, k: int) -> float:
    """Return the mean nDCG@k of the rows in percent, from the (P,) gains of the pairs."""
    best = sim.topk(min(k, sim.shape[1])).indices.cpu()  # (N, k)
    n, k = best.shape
    discounts = 1 / torch.arange(2, k + 2, device="cpu").double().log2()
    order = gains.argsort(descending=True)
    rows = rows[order]
    place = slots(rows)
    judged = torch.full(
        (n, int(place.amax()) + 1), -1, device="cpu"
    )  # each row's columns, best first
    judged[rows, place] = cols[order]
    gain = torch.zeros(judged.shape, dtype=torch.float64, device="cpu")
    gain[rows, place] = gains[order]
    dcg = torch.zeros(n, dtype=torch.float64, device="cpu")
    for discount, found in zip(discounts, best.T, strict=True):
        dcg += discount * torch.where(judged == found[:, None], gain, 0.0).sum(1)
    ideal = gain[:, :k] @ discounts[: gain.shape[1]]
    return 100 * float((dcg / ideal)[ideal > 0].mean())


def _averaged(
    judgements: Judgements, shape: tuple[int, int] = _ANY
) -> tuple[Tensor, Tensor, Tensor]:
    """Return checked images, texts and mean grades on the CPU, sorted, each pair once."""
    images, texts, grades = judgements
    images = as_integers("judgements.images", images)
    grades = from_numpy(grades)
    pairs, index = distinct_pairs("judgements", images, texts, shape)
    got = tuple(grades.shape) if isinstance(grades, Tensor) else type(grades).__name__
    if got != tuple(images.shape):
        raise ValueError(f"judgements.grades: expected shape {tuple(images.shape)}, got {got}")
    values = grades.detach().cpu().double()
    require_finite("judgements.grades", values[None])

    def reduced(how: str) -> Tensor:  # over the grades of a pair
        zeros = torch.zeros(pairs.shape[1], dtype=torch.float64, device="cpu")
        return zeros.scatter_reduce(0, index, values, how, include_self=False)

    # the mean of equal grades is exact
    mean = reduced("mean").clamp(reduced("amin"), reduced("amax"))
    return pairs[0], pairs[1], mean


def distinct_pairs(
    name: str, images: Tensor, texts: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the (2, P) distinct pairs, checked and sorted, and the index of each input pair there.

    Both are on the CPU.
    """
    images = as_integers(f"{name}.images", images)
    size = images.numel()
    if size == 0:
        raise ValueError(f"{name}.images: expected at least 1 index, got 0")
    n, m = shape
    cpu = torch.device("cpu")
    rows = as_indices(f"{name}.images", images, size, cpu)
    cols = as_indices(f"{name}.texts", texts, size, cpu)
    check_range(f"{name}.images", rows, n - 1)
    check_range(f"{name}.texts", cols, m - 1)
    numbers, index = torch.unique(rows * m + cols, return_inverse=True)
    return torch.stack([numbers // m, numbers % m]), index


def ranked_by_pairs(
    rows: Tensor, cols: Tensor, sim: Similarity, k: int, ties: str
) -> tuple[Tensor, TopK]:
    """Return ``sim.ranked(k, ties=ties)`` where the listed distinct pairs are the positives."""
    n, m = sim.shape
    slot = slots(rows)
    positives = torch.full((n, int(slot.amax()) + 1), -1, device=sim.device)  # columns; -1: none
    positives[rows, slot] = cols
    rank_parts: list[Tensor] = []
    best_values: list[Tensor] = []
    best_indices: list[Tensor] = []
    for part, scores in sim.blocks():
        values, indices = scores.topk(min(k, m))
        best_values.append(values)
        best_indices.append(indices)
        own = positives[part]
        thresholds = scores.gather(1, own.clamp_min(0)).masked_fill_(own < 0, torch.nan)
        row, place = (own >= 0).nonzero(as_tuple=True)
        scores[row, own[row, place]] = -torch.inf  # leaves the rivals
        rank_parts.append(ranks(thresholds, scores, ties == "optimistic"))
    return torch.cat(rank_parts), TopK(torch.cat(best_values), torch.cat(best_indices))
