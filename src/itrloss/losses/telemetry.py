"""What a training loop wants to see of a batch: detached figures of a similarity that a loss has
used.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..anchors import Anchors
from ..checks import as_size
from ..distributed import world_size
from ..functional import std_diversity
from ..memory import MemorySimilarity
from ..metrics.results import skewness
from ..similarity import Similarity
from ..terms import identity, pair_term

__all__ = ["describe", "describe_memory"]


@pair_term
def below(scores: Tensor, threshold: Tensor) -> Tensor:
    """Return 1 where ``S < threshold``, else 0; flat, so there is no gradient."""
    return (scores < threshold).to(scores.dtype)


@torch.no_grad()
def describe(sim: Similarity, margin: float = 0.0, hubness_k: int = 10) -> dict[str, Tensor]:
    """Return figures of a batch, 0-dim tensors by name, without a gradient and without waiting for
    an accelerator.

    ``positive`` is the mean score of the positive pairs. ``hardest_negative``: mean over the images
    and texts that have one. ``gap``: the mean of an anchor's positives minus its hardest negative,
    on average. ``active``: share of positive pairs, seen from both sides, that are not ahead of the
    hardest negative by ``margin``. ``hubness_i2t``, ``hubness_t2i``: skewness of the k-occurrences
    for k = ``hubness_k``, 0 without hubs; of one set, an item is among its own neighbours.
    ``diversity_min``: the lowest score of :func:`itrloss.functional.std_diversity`; the highest is
    1.

    Rows of ``sim`` are images. Scores that are kept are shared with the loss; where none are, the
    product is formed once for each of four questions.
    """
    if not isinstance(sim, Similarity):
        expected = "expected an itrloss.Similarity(images, texts)"
        raise TypeError(f"sim: {expected}, got {type(sim).__name__}")
    hubness_k = as_size("hubness_k", hubness_k)
    sim = sim.detach()
    both = sim.both
    hardest = both.hardest_negatives().values
    counts = both.positive_counts
    positive = both.sum_of_positives(identity)
    near = both.sum_of_positives(below, hardest + margin)
    rival = hardest != -torch.inf
    valid = rival & (counts > 0)
    gaps = positive / counts.clamp_min(1) - hardest
    figures = {
        "positive": _ratio(both, positive, counts),
        "hardest_negative": _ratio(both, hardest, rival),
        "gap": _ratio(both, gaps, valid),
        "active": _ratio(both, near, counts * valid),
    }
    exists = counts + both.negative_counts > 0  # padding does not
    of_rows, of_cols = both.split(exists)
    for name, view, own, other in (
        ("i2t", sim, of_rows, of_cols),
        ("t2i", sim.T, of_cols, of_rows),
    ):
        counts = both.total(_occurrences(view, own, hubness_k))
        figures[f"hubness_{name}"] = skewness(counts, both.total(other.sum()))
    diversity = std_diversity(both).masked_fill(~exists, 1.0)
    figures["diversity_min"] = -torch.stack(both.group_amax(-diversity)).amax()
    return {name: value.to(sim.dtype) for name, value in figures.items()}


@torch.no_grad()
def describe_memory(
    sims: MemorySimilarity, process_group: dist.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Return :func:`describe` of a batch and figures of its memory: 0-dim tensors by name.

    ``memory_entries``: how many are valid. ``memory_age``: how many batches of this size ago an
    entry came in, on average, the last one being 1. ``memory_hardest``: mean of the anchors'
    highest-scoring negatives in the memory, 0 while there is none. ``process_group``: the processes
    that share the memory; by default, all.
    """
    figures = describe(sims.batch)
    counts = sims.memory.positive_counts + sims.memory.negative_counts
    entries = torch.stack(sims.memory.group_amax(counts)).amax().to(figures["gap"].dtype)
    rows = sims.batch.positive_counts + sims.batch.negative_counts > 0
    batch = sims.batch.total(rows.sum())  # the memory takes in the images of all processes
    if sims.batch.share is None:
        batch = batch * world_size(process_group)
    figures["memory_entries"] = entries
    whole = torch.div(entries, batch, rounding_mode="floor")  # batches; the oldest is cut off
    age = (whole + 1) * (1 - whole * batch / entries / 2)
    figures["memory_age"] = torch.where(entries > 0, age, 0.0)
    hardest = sims.memory.hardest_negatives().values
    figures["memory_hardest"] = _ratio(sims.memory, hardest, hardest != -torch.inf)
    return figures


def _occurrences(sim: Similarity, exists: Tensor, k: int) -> Tensor:
    """Return the (M,) int64 numbers of rows that have a column among their k best.

    ``exists`` (N,): the rows that count.
    """
    n, m = sim.shape
    index = sim.topk(min(k, m)).indices
    counted = (index >= 0) & exists[:n, None]
    zeros = torch.zeros(m, dtype=torch.int64, device=index.device)
    return zeros.index_add_(0, index.clamp_min(0).flatten(), counted.long().flatten())


def _ratio(anchors: Anchors, x: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of values (A,) by the sum of counts (A,), or 0 for none; of a sharded batch,
    over all processes. Values with a count of 0 are left out.
    """
    counted = torch.where(counts > 0, x, 0.0)
    return anchors.total(counted.sum()) / anchors.total(counts.sum()).clamp_min(1)
