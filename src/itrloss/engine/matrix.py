"""A similarity matrix: its inputs, its engine, and what is cached of it between questions."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..checks import one_of
from . import reduce
from .exchange import Share
from .pairs import Pairs
from .products import matmul
from .scores import (
    Embeddings,
    Scores,
    even_chunks,
    full_precision,
    inverse_norms,
    may_keep,
    tile_shape,
)

ENGINES = "dense", "tiled", "triton"
MEMORY_BUDGET = 256 * 2**20  # bytes of scores that "auto" caches (8192 x 8192 in float32)
# Number of scores up to which "auto" takes plain PyTorch: on the CPU, where calls cost more than
# passes over such a matrix, and on an accelerator, where kernel launches do.
SMALL = {"cpu": 2**16}
ACCELERATOR_SMALL = 2**20


def choose_engine(engine: str, numel: int, budget: int, x: Tensor) -> str:
    """Return the engine for ``numel`` scores of embeddings like ``x``: the one that is named, or
    that ``"auto"`` takes.

    Raises:
        ImportError, TypeError, ValueError: for ``"triton"`` if it is not installed, for float64, or
            on the CPU.
    """
    if engine == "auto":
        small = SMALL.get(x.device.type, ACCELERATOR_SMALL)
        # the compiler fuses what plain PyTorch does with a matrix
        if torch.compiler.is_compiling():
            small = budget // torch.promote_types(x.dtype, torch.float32).itemsize
        if numel <= small:
            return "dense"
        if (
            x.device.type != "cuda"
            or x.dtype == torch.float64
            or importlib.util.find_spec("triton") is None
        ):
            return "tiled"
        from .triton import works

        return "triton" if works(x.device, x.dtype) else "tiled"
    one_of("engine", engine, "auto", *ENGINES)
    if engine == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ImportError(
                "engine='triton' needs Triton, which comes with PyTorch for CUDA: pip install triton"
            )
        if x.dtype == torch.float64:
            raise TypeError("engine: 'triton' computes in float32, and the embeddings are float64")
        if x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                "engine: 'triton' needs an accelerator (or TRITON_INTERPRET=1), got embeddings on the CPU"
            )
    return engine


def check_unchanged(matrices: Iterable[Matrix]) -> None:
    """Raise an error if embeddings or scores were modified in place: cached results would not match
    later ones.
    """
    if torch.compiler.is_compiling():
        return
    for m in matrices:
        for x in m.embeddings:
            if x is not None and x.version is not None and x.version != x.x._version:
                what = "scores were" if m.cols is None else "embeddings were"
                raise RuntimeError(
                    f"the {what} modified in place after this Similarity was made; make another one"
                )


class Matrix:
    """A score matrix (N, M), of embeddings or precomputed. All views of it share this object."""

    def __init__(
        self, rows: Embeddings, cols: Embeddings | None, pairs: Pairs, engine: str, budget: int
    ):
        """``cols`` None: the rows are (N, M) scores. ``budget``: bytes of scores that may be
        cached.
        """
        self.embeddings, self.pairs, self.shape, self.engine = (
            (rows, cols),
            pairs,
            pairs.shape,
            engine,
        )
        self.rows, self.cols = rows.x, None if cols is None else cols.x  # as passed in
        self.dtype, self.device = rows.dtype, rows.x.device
        #: Whether scores certainly lie in [-1, 1].
        self.bounded = cols is not None and rows.normalize and cols.normalize
        # Where scores are cached, so are unit vectors; elsewhere nothing of the embeddings' size is
        # held.
        self.keeps = engine == "dense" or (
            engine == "tiled" and math.prod(self.shape) * self.dtype.itemsize <= budget
        )
        self._scores: Tensor | None = None  # (N, M), differentiable if dense
        self.summed = False  # whether a sum put all scores into the autograd graph
        # (P,), where they were computed along with a sum
        self._positive_scores: Tensor | None = None
        self.share: Share | None = None  # of a sharded batch
        self.biased = False  # whether a bias is part of the embeddings
        self.backend: Any = None  # what answers in place of the engine's

    def detach(self) -> Matrix:
        """Return the same scores without a gradient. Cached scores are shared; they are computed if
        not yet there.
        """
        rows, cols = self.embeddings
        formed = self.scores() if self.keeps else self._scores
        twin = type(self)(
            rows.detach(), None if cols is None else cols.detach(), self.pairs, self.engine, 0
        )
        twin.bounded, twin.keeps, twin.share = self.bounded, self.keeps, self.share
        twin.biased = self.biased
        twin._scores = None if formed is None else formed.detach()
        return twin

    # --------------------------------------------------------------------------------------- scores

    def scores(self, keep: bool | None = None) -> Tensor:
        """Return the (N, M) scores, not to be modified or handed out as they may be cached;
        differentiable if dense.
        """
        if self._scores is not None:
            return self._scores
        (rows, cols), keep = self.embeddings, may_keep() if keep is None else keep
        # With their graph, even if first used under no_grad; a tiled engine carries the gradient
        # itself.
        with (
            full_precision(rows.x),
            torch.set_grad_enabled(keep and (cols is None or self.engine == "dense")),
        ):
            if cols is None:
                scores = rows.x.to(self.dtype)
            elif self.engine == "dense":
                scores = rows.unit() @ cols.unit().T
            else:
                scores = matmul(rows.unit(), cols.unit().T)
        if keep and (self.keeps or cols is None):
            self._scores = scores
        return scores

    def as_dense(self) -> Matrix:
        """Return the same matrix on the dense engine, where scores have their gradient."""
        return self if self.engine == "dense" else Matrix(*self.embeddings, self.pairs, "dense", 0)

    def source(self, form: bool = False) -> Scores:
        """Return the inputs of a pass; with ``form``, scores that are to be cached are computed
        now.

        That saves one product in backward and in each later pass: 0.81 of the time of HAL at 1024 x
        1024 x 512 (``pytest benchmarks/test_micro.py --benchmark-enable -k kept_scores``).
        """
        (rows, cols), ids = self.embeddings, self.pairs.ids
        if cols is None:
            return Scores(self.scores(), None, None, None, *ids)
        if self.keeps and may_keep() and not torch.compiler.is_compiling():
            units, kept = (
                (rows.unit().detach(), cols.unit().detach()),
                self.scores() if form else self._scores,
            )
            return Scores(
                rows.x,
                cols.x,
                rows.inv,
                cols.inv,
                *ids,
                None if kept is None else kept.detach(),
                *units,
            )
        inv = [inverse_norms(side.x.detach()) if side.normalize else None for side in (rows, cols)]
        return Scores(rows.x, cols.x, inv[0], inv[1], *ids)

    def blocks(self, side: int, size: int | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of a side's anchors, each with a copy of its scores (B, C), at most ``size``
        of them.
        """
        check_unchanged([self])
        n, m = self.shape[side], self.shape[1 - side]
        source = Scores(self.scores()) if self.engine == "dense" else self.source(form=self.keeps)
        rows, width = tile_shape(n, m, self.device.type)
        # at least a tile: half-precision embeddings are converted anew for each block
        if size is None:
            size = max(rows * width, min(128 * m, 2**26))
        for part in even_chunks(n, max(1, size // m)):
            if source.matrix is not None:
                block = (source.matrix.detach().T if side else source.matrix.detach())[part]
                yield part, block.clone(memory_format=torch.contiguous_format)
                continue
            y, inv = source.vectors(1 - side)
            with full_precision(self.rows), torch.no_grad():
                left = source.unit(side, part)
                block = left.new_empty(len(left), m)
                for c in even_chunks(m, width):
                    block[:, c] = matmul(left, y[c].to(left.dtype).T)
                block = block if inv is None else block.mul_(inv)
            yield part, block

    def pair_scores(self, i: Tensor | None, j: Tensor | None) -> Tensor:
        """Return the differentiable (P,) scores of rows ``i`` with columns ``j``; None stands for
        row, or column, p.
        """
        rows, cols = self.embeddings
        if cols is None or (
            self.engine == "dense" and (self.summed or (i is not None and len(i) > sum(self.shape)))
        ):
            scores = self.scores() if self._scores is None else self._scores
            if i is None and j is None:
                return scores.diagonal()
            all_rows, all_cols = (torch.arange(size, device=self.device) for size in self.shape)
            return scores[all_rows if i is None else i, all_cols if j is None else j]
        # Unless copies for many pairs are larger, scoring them alone saves a loss of pairs two
        # products in backward: 0.80 of the time at 128 x 128 x 1024 (pytest
        # benchmarks/test_micro.py --benchmark-enable -k pairs_alone).
        if self.engine == "dense" or torch.compiler.is_compiling():
            left, right = (
                x.unit() if k is None else x.unit().index_select(0, k)
                for x, k in ((rows, i), (cols, j))
            )
            return (left * right).sum(1)
        return reduce.PairProducts.apply((i, j), *self.source())

    def positive_scores(self) -> Tensor:
        """Return the (P,) scores of the positive pairs in the order of ``pairs.listed``,
        differentiable.
        """
        check_unchanged([self])
        if self._positive_scores is not None:
            return self._positive_scores
        return self.pair_scores(*((None, None) if self.pairs.one_to_one else self.pairs.listed))
