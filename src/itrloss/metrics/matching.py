"""Which images and texts exist, and which of them match: asked of a similarity here, and nowhere
else in the metrics and re-rankers.

Ids are one way to say who matches; sets of labels, groups and matrices are others, which
``Similarity.ids`` knows nothing of. An entry with :data:`itrloss.NO_ID` does not exist: it is no
query, no candidate and no reference.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..checks import IdsLike
from ..similarity import NO_ID, Engine, Similarity

Masks = tuple[Tensor | None, Tensor | None]


def rows_of(sim: Similarity) -> Tensor:
    """Return what the rows are made of: their embeddings (N, D), or their scores (N, M)."""
    if sim.embeddings is not None:
        return sim.embeddings[0]
    assert sim.given_scores is not None
    return sim.given_scores


def existing(sim: Similarity) -> Masks:
    """Return the (N,) and (M,) bool masks of rows and columns that exist; None if all do."""
    rows, cols = [_where_some_are_missing(sim.pairs.exists(side)) for side in (0, 1)]
    return (cols, rows) if sim.side else (rows, cols)


def _where_some_are_missing(exists: Tensor | None) -> Tensor | None:
    return None if exists is None or bool(exists.all()) else exists


def places(sim: Similarity) -> tuple[Tensor, Tensor]:
    """Return the (n,) and (m,) indices of the rows and columns that exist."""
    rows, cols = [
        _numbers(size, sim) if mask is None else mask.nonzero().squeeze(1)
        for size, mask in zip(sim.shape, existing(sim), strict=True)
    ]
    return rows, cols


def right_pairs(sim: Similarity) -> tuple[Tensor, Tensor]:
    """Return the (P,) rows and (P,) columns of the pairs that match."""
    rows, cols = sim.pairs.listed
    return (cols, rows) if sim.side else (rows, cols)


def are_there(sim: Similarity, rows: Tensor, cols: Tensor) -> Tensor:
    """Return the (P,) bool: whether both entries of pairs, rows (P,) and columns (P,), exist."""
    there = torch.ones_like(rows, dtype=torch.bool)
    for mask, index in zip(existing(sim), (rows, cols), strict=True):
        if mask is not None:
            there &= mask[index]
    return there


def all_others_are_wrong(sim: Similarity) -> bool:
    """Return whether each pair of entries that exist is positive or negative.

    With groups, or nan in ``matches``, some pairs are neither.
    """
    if has_plain_ids(sim):
        return True
    rows, cols = existing(sim)
    size = sim.shape[1] if cols is None else int(cols.sum())
    counts = sim.positive_counts + sim.negative_counts
    if rows is not None:
        counts = counts[rows]
    return bool((counts == size).all())


def query_ids(sim: Similarity) -> tuple[Tensor, Tensor]:
    """Return (N,) and (M,) int64 numbers that say which images and texts belong together, to be
    drawn together and to name queries; :data:`itrloss.NO_ID` for what does not exist.

    They are the ids where there are some. Otherwise images have their index and texts that of the
    first image that they match, or N and more if they match none.
    """
    image_ids, text_ids = sim.ids
    n, m = sim.shape
    if has_plain_ids(sim):  # ids of one side alone are numbers of the other
        image_ids = _numbers(n, sim) if image_ids is None else image_ids
        text_ids = _numbers(m, sim) if text_ids is None else text_ids
        return image_ids, text_ids
    images, texts = right_pairs(sim)
    of_images = _numbers(n, sim)
    of_texts = (n + _numbers(m, sim)).scatter_reduce(0, texts, images, "amin")
    exists = existing(sim)
    return marked(of_images, exists[0]), marked(of_texts, exists[1])


def has_plain_ids(sim: Similarity) -> bool:
    """Return whether equal ids, or places if there are none, say who matches, and nothing else."""
    return sim.one_to_one or any(ids is not None for ids in sim.ids)


def with_plain_ids(sim: Similarity) -> Similarity:
    """Return the similarity with :func:`query_ids` in place of a relation that is no plain id.

    Ranking reads from them what exists; the right pairs are passed to it.
    """
    if has_plain_ids(sim):
        return sim
    return sim.relabelled(*query_ids(sim))


def _numbers(size: int, sim: Similarity) -> Tensor:
    return torch.arange(size, device=sim.device)


def marked(ids: Tensor, exists: Tensor | None) -> Tensor:
    """Return ids with NO_ID in place of those that do not exist."""
    return ids if exists is None else ids.masked_fill(~exists, NO_ID)


def part_of(
    sim: Similarity, rows: Tensor, cols: Tensor, ids: tuple[IdsLike | None, IdsLike | None]
) -> Similarity:
    """Return the similarities of some rows and columns.

    Args:
        sim: all similarities.
        rows: (n,) indices.
        cols: (m,) indices.
        ids: of these rows and columns.
    """
    if sim.given_scores is not None:
        return Similarity.from_scores(sim.given_scores[rows][:, cols], *ids)
    assert sim.embeddings is not None
    images, texts = sim.embeddings
    bias = None
    if sim.bias is not None:
        image_bias, text_bias = sim.bias
        bias = (
            None if image_bias is None else image_bias[rows],
            None if text_bias is None else text_bias[cols],
        )
    engine = cast(Engine, sim.engine)
    return Similarity(
        images[rows], texts[cols], *ids, normalize=sim.normalizes, engine=engine, bias=bias
    )


def existing_part(sim: Similarity) -> Similarity:
    """Return the similarities of the rows and columns that exist: the same object if all do."""
    if existing(sim) == (None, None):
        return sim
    rows, cols = places(sim)
    image_ids, text_ids = query_ids(sim)
    return part_of(sim, rows, cols, (image_ids[rows], text_ids[cols]))
