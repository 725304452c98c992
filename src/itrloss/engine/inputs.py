"""The inputs of a score matrix, and the tiles that they are multiplied to.

    S_ij = <u_i, v_j> + b_i + c_j

for rows u and columns v at unit length, unless they are taken as they are, and biases b and c.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .products import matmul
from .relation import Places
from .vectors import compute_dtype, scaled

# Number of scores in a tile, and its least width. On a CPU, a tile and its scratch fit into the
# last-level cache and are still large enough for full-speed products. From 2^18 to 2^22 the size
# hardly matters: 5 % at 2048 x 2048 x 512 on one thread of an EPYC (pytest benchmarks/test_micro.py
# --benchmark-enable -k tile_size).
TILE = {"cpu": (2**20, 2048)}
ACCELERATOR_TILE = (2**24, 8192)
# Tiles of scores that are kept are larger by this factor, as no product has to fit in with them:
# half the visits, and 332 operators in place of 516 for M-DCL at 512 x 16384 x 512 on the CPU
# (counted as in benchmarks/launches.py), in the same time.
KEPT_FACTOR = 2


class Side(NamedTuple):
    """The vectors of the rows, or of the columns, without a gradient."""

    x: Tensor | None  # (N, D) as passed in; None where they are held at unit length
    inv: Tensor | None  # (N, 1) inverse norms; None: the vectors are taken as they are
    unit: Tensor | None  # (N, D) at unit length, where they are held
    bias: Tensor | None  # (N,) added to the scores of the vector

    def vectors(self, part: slice) -> Tensor:
        """Return some of the vectors in the compute dtype, at unit length if normalised: (r, D)."""
        if self.unit is not None:
            return self.unit[part]
        assert self.x is not None
        return scaled(self.x[part], taken(self.inv, part))

    def all_vectors(self) -> Tensor:
        """Return all vectors in the compute dtype, at unit length if normalised: (N, D)."""
        if self.unit is not None:
            return self.unit
        assert self.x is not None
        return scaled(self.x, self.inv)

    @property
    def like(self) -> Tensor:
        """The (N, D) vectors as they are held, for their shape and device."""
        held = self.x if self.unit is None else self.unit
        assert held is not None
        return held


NO_SIDE = Side(None, None, None, None)


def taken(x: Tensor | None, which: Tensor | slice | None) -> Any:
    """Return some entries of a tensor; None of no tensor, and all of them without an index."""
    if x is None or which is None:
        return x
    if isinstance(which, Tensor):
        return x.index_select(0, which)
    return x[which]


NUMBER_OF_TENSORS = 9  # of inputs


class Inputs(NamedTuple):
    """The numbers of a score matrix (N, M): embeddings, or scores."""

    rows: Side
    cols: Side
    scores: Tensor | None  # (N, M): precomputed, or kept once they were computed

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors, or None in their places."""
        return [*self.rows, *self.cols, self.scores]

    @staticmethod
    def of_tensors(x: Sequence[Tensor | None]) -> Inputs:
        """Return the inputs with tensors as :meth:`tensors` has them."""
        return Inputs(Side(*x[:4]), Side(*x[4:8]), x[8])

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (N, M) of the matrix."""
        if self.scores is not None:
            return self.scores.shape[0], self.scores.shape[1]
        return self.rows.like.shape[0], self.cols.like.shape[0]

    def sides(self, side: int) -> tuple[Side, Side]:
        """Return the vectors of a side, and of the other one."""
        if side == 0:
            return self.rows, self.cols
        return self.cols, self.rows

    @property
    def like(self) -> Tensor:
        """A tensor of the matrix's device."""
        return self.rows.like if self.scores is None else self.scores

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of scores and sums."""
        return compute_dtype(self.like)


NO_INPUTS = Inputs(NO_SIDE, NO_SIDE, None)


class Tile(NamedTuple):
    """A part of a score matrix."""

    places: Places
    scores: Tensor  # (r, c), not to be written to
    other: Tensor | None = None  # (r, c) the scores of a guide or a teacher, if there is one


def tiles(inputs: Inputs, guide: Inputs | None = None) -> Iterable[Tile]:
    """Return tiles that cover every score once, with the tiles of a guide.

    Tiles that are multiplied share their memory: each is valid until the next.
    """
    n, m = inputs.shape
    if n == 0 or m == 0:
        return ()
    scores = inputs.scores
    height, width = tile_shape(n, m, inputs.like.device.type, scores is not None)
    rows = even_chunks(n, height)
    places = []
    for c in even_chunks(m, width):
        for r in rows:
            places.append((r, c))
    if guide is None and scores is not None:
        return [Tile(place, scores[place]) for place in places]
    return tiles_at(places, inputs, guide)


def tiles_at(places: Sequence[Places], inputs: Inputs, guide: Inputs | None) -> Iterator[Tile]:
    """Yield the tiles of a matrix, and of a guide, at some places."""
    own = scores_of_tiles(inputs, places)
    others = None if guide is None else scores_of_tiles(guide, places)
    for place, scores in zip(places, own, strict=True):
        other = None if others is None else next(others).to(scores.dtype)
        yield Tile(place, scores, other)


def scores_of_tiles(inputs: Inputs, places: Sequence[Places]) -> Iterator[Tensor]:
    """Yield the (r, c) scores of tiles."""
    if inputs.scores is not None:
        for place in places:
            yield inputs.scores[place]
        return
    rows = inputs.rows
    cols = inputs.cols
    r, c = places[0]
    size = (r.stop - r.start + 1) * (c.stop - c.start + 1)  # of the largest
    space = torch.empty(size, dtype=inputs.dtype, device=inputs.like.device)
    known: slice | None = None
    right = space  # of the first block's columns, below
    # Columns change in the outer loop: their wide block is normalised once, the narrow blocks of
    # rows again for each of them.
    for r, c in places:
        if c != known:
            right = cols.vectors(c)
            known = c
        left = rows.vectors(r)
        out = space[: len(left) * len(right)].view(len(left), len(right))
        product = matmul(left, right.T, out=out)
        yield add_bias_(product, rows.bias, cols.bias, (r, c))


def add_bias_(
    scores: Tensor,  # (r, c)
    row_bias: Tensor | None,  # (N,)
    col_bias: Tensor | None,  # (M,)
    places: Places,
) -> Tensor:
    """Add biases to a tile, and return it."""
    r, c = places
    if row_bias is not None:
        scores.add_(row_bias[r, None])
    if col_bias is not None:
        scores.add_(col_bias[c])
    return scores


def whole_scores(rows: Side, cols: Side) -> Tensor:
    """Return all scores (N, M) of embeddings."""
    scores = matmul(rows.all_vectors(), cols.all_vectors().T)
    everything = slice(None)
    return add_bias_(scores, rows.bias, cols.bias, (everything, everything))


def tile_shape(n: int, m: int, device: str, is_kept: bool = False) -> tuple[int, int]:
    """Return the numbers of rows and of columns of a tile, whose scores may be kept.

    Of kept scores, it has whole rows, which are next to each other in memory, if these fit.
    """
    numel, least_width = TILE.get(device, ACCELERATOR_TILE)
    if is_kept:
        numel *= KEPT_FACTOR
        least_width = numel
    width = min(m, max(least_width, numel // n))
    height = min(n, max(1, numel // width))
    return height, width


def even_chunks(size: int, step: int) -> list[slice]:
    """Return slices of at most ``step`` entries, as equal as possible.

    A product with few columns may round differently from one with many: copies of an embedding
    would no longer tie.
    """
    count = -(-size // step)
    chunks = []
    for i in range(count):
        chunks.append(slice(size * i // count, size * (i + 1) // count))
    return chunks
