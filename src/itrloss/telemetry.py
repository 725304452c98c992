"""What a training loop wants to see of a batch: detached figures of a similarity that a loss has used."""

from __future__ import annotations

import torch
from torch import Tensor

from .distributed import world_size
from .engines.terms import pair_term
from .functional import diversities
from .memory import MemorySimilarity
from .metrics.results import skewness
from .similarity import Similarity

__all__ = ["describe", "describe_memory"]


@pair_term
def below(scores: Tensor, threshold: Tensor) -> tuple[Tensor, ...]:
    """1 where ``S < threshold``, else 0; flat, so there is no gradient."""
    value = (scores < threshold).to(scores.dtype)
    return value, torch.zeros_like(value), torch.zeros_like(value)


@torch.no_grad()
def describe(sim: Similarity, margin: float = 0.0, hubness_k: int = 10) -> dict[str, Tensor]:
    """Figures of a batch, without a gradient and without waiting for an accelerator.

    Shares the dense engine's matrix with the loss; the tiled engine forms the product once for each of three questions.

    Args:
        sim: images as rows, texts as columns.
        margin: see ``active``, in units of the scores.
        hubness_k: k of the k-occurrences.

    Returns:
        0-dim tensors by name. ``positive``: mean score of the positive pairs. ``hardest_negative``: mean over the
        images and texts that have one. ``gap``: the mean of an anchor's positives minus its hardest negative, on
        average. ``active``: share of positive pairs, seen from both sides, that are not ahead of the hardest negative
        by ``margin``. ``hubness_i2t``, ``hubness_t2i``: skewness of the k-occurrences, 0 without hubs.
        ``diversity_min``: the lowest score of :func:`itrloss.functional.std_diversity`; the highest is 1.
    """
    sim = sim._detach_for_now()
    hardest, positives, counts = sim.both.hardest(), sim.both.positives(), sim.both.positive_counts
    close = sim.both.positives("below", (hardest[0].values + margin,), (hardest[1].values + margin,))
    pairs = counts[0].sum().clamp_min(1)
    found = {"positive": positives[0].sum() / pairs}
    values, gaps, active, anchors, seen = [], [], [], [], []
    for best, positive, count, near in zip(hardest, positives, counts, close, strict=True):
        rival = best.values != -torch.inf
        values.append(torch.where(rival, best.values, 0.0).sum())
        valid = rival & (count > 0)
        gaps.append(torch.where(valid, positive / count.clamp_min(1) - best.values, 0.0).sum())
        active.append(torch.where(valid, near, 0.0).sum())
        anchors.append(torch.stack([rival.sum(), valid.sum()]))
        seen.append((count * valid).sum())
    with_rival, valid = (anchors[0] + anchors[1]).clamp_min(1)
    found["hardest_negative"] = (values[0] + values[1]) / with_rival
    found["gap"] = (gaps[0] + gaps[1]) / valid
    found["active"] = (active[0] + active[1]) / (seen[0] + seen[1]).clamp_min(1)
    for name, top, size in zip(("i2t", "t2i"), sim.both.topk(hubness_k), sim.shape[::-1], strict=True):
        index = top.indices.flatten()
        occurrences = torch.zeros(size, dtype=torch.int64, device=index.device)
        found[f"hubness_{name}"] = skewness(occurrences.index_add_(0, index, torch.ones_like(index)))
    found["diversity_min"] = diversities(sim, "std", 0.1, 1.0).amin()
    return {name: value.to(sim.dtype) for name, value in found.items()}


@torch.no_grad()
def describe_memory(sims: MemorySimilarity) -> dict[str, Tensor]:
    """:func:`describe` of the batch, and of its memory: 0-dim tensors by name.

    ``memory_entries``: how many are valid. ``memory_age``: how many batches of this size ago an entry came in, on
    average, the last one being 1. ``memory_hardest``: mean of the anchors' highest-scoring negatives in the memory, 0
    while there is none.
    """
    found = describe(sims.batch)
    entries = sims.memory[0].shape[1]
    batch = sims.batch.shape[0] * world_size()
    found["memory_entries"] = found["gap"].new_full((), entries)
    found["memory_age"] = found["gap"].new_full((), (entries + batch) / 2 / batch if entries else 0.0)
    best = torch.cat([side._detach_for_now().hardest().values for side in sims.memory])
    rival = best != -torch.inf
    found["memory_hardest"] = torch.where(rival, best, 0.0).sum() / rival.sum().clamp_min(1)
    return found
