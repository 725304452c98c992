"""Which images and texts exist, and which of them match: the only module of metrics and re-rankers
that reads it from a similarity.

Ids are one way to say who matches; sets of labels, groups and matrices are others, which
``Similarity.ids`` knows nothing of. An entry with :data:`itrloss.NO_ID` does not exist: it is no
query, no candidate and no reference. What is ranked is always a :class:`Part` in which all exist.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..checks import IdsLike
from ..similarity import NO_ID, Similarity


class Part(NamedTuple):
    """Some images and texts of a similarity: those that exist, or those of a fold."""

    sim: Similarity  # (n, m) of these alone
    rows: Tensor  # (n,) their indices in the whole, ascending
    cols: Tensor  # (m,)
    shape: tuple[int, int]  # (N, M) of the whole

    @property
    def T(self) -> Part:
        """The same with the columns as rows."""
        n, m = self.shape
        return Part(self.sim.T, self.cols, self.rows, (m, n))

    def among_all(self, x: Tensor, width: int, fill: float) -> Tensor:
        """Return (N, width) with the rows of x (n, k) in their places; the rest is ``fill``."""
        whole = x.new_full((self.shape[0], width), fill)
        whole[self.rows, : x.shape[1]] = x
        return whole


def existing_part(sim: Similarity) -> Part:
    """Return the rows and columns that exist."""
    return part_of(sim, *existing(sim))


def part_of(sim: Similarity, rows: Tensor, cols: Tensor) -> Part:
    """Return some rows (n,) and columns (m,), with :func:`query_ids` if these are not all."""
    shape = sim.shape
    if (len(rows), len(cols)) != shape:
        image_ids, text_ids = query_ids(sim)
        sim = selected(sim, rows, cols, (image_ids[rows], text_ids[cols]))
    return Part(sim, rows, cols, shape)


def selected(
    sim: Similarity, rows: Tensor, cols: Tensor, ids: tuple[IdsLike | None, IdsLike | None]
) -> Similarity:
    """Return the similarities of some rows (n,) and columns (m,), with ids of these."""
    if sim.given_scores is not None:
        return Similarity.from_scores(sim.given_scores[rows][:, cols], *ids)
    assert sim.embeddings is not None
    images, texts = sim.embeddings
    image_bias, text_bias = sim.bias or (None, None)
    bias = (
        None if image_bias is None else image_bias[rows],
        None if text_bias is None else text_bias[cols],
    )
    engine = sim.engine_for_others
    return Similarity(
        images[rows], texts[cols], *ids, normalize=sim.normalizes, engine=engine, bias=bias
    )


def rows_of(sim: Similarity) -> Tensor:
    """Return what the rows are made of: their embeddings (N, D), or their scores (N, M)."""
    if sim.embeddings is not None:
        return sim.embeddings[0]
    assert sim.given_scores is not None
    return sim.given_scores


def existing(sim: Similarity) -> tuple[Tensor, Tensor]:
    """Return the (n,) and (m,) indices of the rows and columns that exist."""
    relation = sim.pairs
    side = sim.side
    indices = []
    for matrix_side, size in zip((side, 1 - side), sim.shape, strict=True):
        exists = relation.exists(matrix_side)
        every = torch.arange(size, device=sim.device)
        indices.append(every if exists is None else every[exists])
    rows, cols = indices
    return rows, cols


def right_pairs(sim: Similarity) -> tuple[Tensor, Tensor]:
    """Return the (P,) rows and (P,) columns of the pairs that match."""
    rows, cols = sim.pairs.listed
    return (cols, rows) if sim.side else (rows, cols)


def all_others_are_wrong(sim: Similarity) -> bool:
    """Return whether each pair of entries that exist is positive or negative.

    With groups, or nan in ``matches``, some pairs are neither.
    """
    if has_plain_ids(sim):
        return True
    rows, cols = existing(sim)
    counts = sim.positive_counts + sim.negative_counts
    return bool((counts[rows] == len(cols)).all())


def query_ids(sim: Similarity) -> tuple[Tensor, Tensor]:
    """Return (N,) and (M,) int64 numbers that say which images and texts belong together, to be
    drawn together and to name queries; :data:`itrloss.NO_ID` for what does not exist.

    They are the ids where there are some. Otherwise images have their index and texts that of the
    first image that they match, or N and more if they match none. Where nothing says who matches,
    they are consecutive texts of an image if each has as many.
    """
    n, m = sim.shape
    rows = torch.arange(n, device=sim.device)
    cols = torch.arange(m, device=sim.device)
    image_ids, text_ids = sim.ids
    if has_plain_ids(sim):  # ids of one side alone are numbers of the other
        return rows if image_ids is None else image_ids, cols if text_ids is None else text_ids
    if not sim.pairs.is_known:
        return rows, cols // (m // n) if m % n == 0 else n + cols
    images, texts = right_pairs(sim)
    of_texts = (n + cols).scatter_reduce(0, texts, images, "amin")
    image_places, text_places = existing(sim)
    image_ids = torch.full_like(rows, NO_ID)
    image_ids[image_places] = image_places
    text_ids = torch.full_like(cols, NO_ID)
    text_ids[text_places] = of_texts[text_places]
    return image_ids, text_ids


def has_plain_ids(sim: Similarity) -> bool:
    """Return whether equal ids, or places if there are none, say who matches, and nothing else."""
    return sim.one_to_one or any(ids is not None for ids in sim.ids)
