"""The inputs of a similarity matrix, its engine, and what is kept of it between questions."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import reduce
from .answers import ANSWERS
from .pairs import Pairs, listed_scores, pair_scores, with_norms
from .products import matmul
from .scores import Ids, Scores, compute_dtype, full_precision, host_may_read, normalized

ENGINES = ("dense", "tiled", "triton")
MEMORY_BUDGET = 256 * 2**20  # bytes of scores that "auto" keeps (8192 x 8192 in float32)
# Scores up to which "auto" takes plain PyTorch on the CPU, where calls cost more than passes over the matrix; and on an
# accelerator, where a launch does.
SMALL = {"cpu": 2**16}
_ACCELERATOR_SMALL = 2**20


def check_engine(engine: str) -> None:
    """Raise a ValueError for an unknown name."""
    if engine not in ("auto", *ENGINES):
        raise ValueError(f"engine: expected 'auto', 'dense', 'tiled' or 'triton', got {engine!r}")


def choose_engine(engine: str, numel: int, budget: int, x: Tensor) -> str:
    """Return the engine that ``"auto"`` stands for, for so many scores of embeddings like ``x``, or the one named.

    Raises:
        ImportError, TypeError, ValueError: Triton is named and not there, or for float64, or on the CPU.
    """
    check_engine(engine)
    if engine == "auto":
        small = SMALL.get(x.device.type, _ACCELERATOR_SMALL)
        if torch.compiler.is_compiling():  # the compiler fuses what plain PyTorch does with a matrix
            small = budget // compute_dtype(x).itemsize
        if numel <= small:
            return "dense"
        return "triton" if _triton_serves(x) else "tiled"
    if engine == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ImportError("engine='triton' needs Triton, which comes with PyTorch for CUDA: pip install triton")
        if x.dtype == torch.float64:
            raise TypeError("engine: 'triton' computes in float32, and the embeddings are float64")
        if x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError("engine: 'triton' needs an accelerator (or TRITON_INTERPRET=1), got embeddings on the CPU")
    return engine


def _triton_serves(x: Tensor) -> bool:
    if x.device.type != "cuda" or x.dtype == torch.float64 or importlib.util.find_spec("triton") is None:
        return False
    from .triton import works

    return works(x.device, x.dtype)


class Matrix:
    """A score matrix (N, M) of embeddings, or one that exists, as all views of it share it."""

    def __init__(
        self,
        rows: Tensor,  # (N, D), or (N, M) scores
        cols: Tensor | None,  # (M, D)
        ids: Ids,
        normalize: tuple[bool, bool],  # the rows, the columns
        engine: str,
        budget: int = MEMORY_BUDGET,
    ):
        if not torch.is_grad_enabled():  # what is made under no_grad has no gradient, whenever it is asked
            rows, cols = rows.detach(), None if cols is None else cols.detach()
        self.rows, self.cols, self.normalize, self.engine, self.budget = rows, cols, normalize, engine, budget
        self.shape = rows.shape[0], rows.shape[1] if cols is None else cols.shape[0]
        self.pairs = Pairs(self.shape, ids, rows.device)
        self._versions = self._current_versions()
        self._scores: Tensor | None = None  # dense: differentiable
        self._source: Scores | None = None  # tiled: with scores that are kept
        self.bounded = cols is not None and all(normalize)  # whether scores are known to lie in [-1, 1]

    def detach(self) -> Matrix:
        """Return the same scores without a gradient; what was formed, or is to be kept, is shared."""
        cols = None if self.cols is None else self.cols.detach()
        twin = Matrix(self.rows.detach(), cols, self.pairs.ids, self.normalize, self.engine, self.budget)
        twin.pairs, twin._versions, twin.bounded = self.pairs, self._versions, self.bounded
        if self.engine == "dense":
            twin._scores = self.scores().detach()
        else:
            self.keep()
            twin._source = self._source and self._source.detach()
        return twin

    # ------------------------------------------------------------------------------------------- scores

    def scores(self) -> Tensor:
        """Return the (N, M) scores, differentiable; not to be written to or handed out."""
        self.check_unchanged()
        if self._scores is not None:
            return self._scores
        if self.cols is None:
            return self.rows
        inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        with full_precision(self.rows), torch.set_grad_enabled(not inference):  # whoever asks first may not want one
            left, right = (
                normalized(x) if n else x.to(compute_dtype(x))
                for x, n in zip((self.rows, self.cols), self.normalize, strict=True)
            )
            scores = left @ right.T
        if self.engine == "dense" and not inference:
            self._scores = scores
        return scores

    def source(self) -> Scores:
        """Return what a pass needs, with the scores that are kept, if there are any."""
        self.check_unchanged()
        if self._source is not None:
            return self._source
        return with_norms(self.rows, self.cols, self.normalize)._replace(row_ids=self.pairs.ids[0], col_ids=self.pairs.ids[1])

    def keep(self) -> None:
        """Form the scores for further questions, and for backward passes, if they fit into the budget.

        One product less in each of them: 0.75 of the time of a loss at 2048 x 2048 x 1024.
        """
        fits = self.shape[0] * self.shape[1] * compute_dtype(self.rows).itemsize <= self.budget
        compiling = torch.compiler.is_compiling()
        if self._source is not None or not fits or self.cols is None or self.engine != "tiled" or compiling:
            return
        with torch.inference_mode(False), torch.no_grad():  # what is kept may be saved for a backward pass
            source = self.source().detach()
            with full_precision(self.rows):
                kept = matmul(source.unit_rows(slice(None)), source.unit_cols(slice(None)).T)
        self._source = source._replace(rows=self.rows, cols=self.cols, kept=kept)

    def pair_scores(self, i: Tensor, j: Tensor) -> Tensor:
        """Return the (P,) scores of rows ``i`` with columns ``j``, differentiable."""
        if self.engine == "dense":
            return self.scores()[i, j]
        self.check_unchanged()
        return pair_scores(with_norms(self.rows, self.cols, self.normalize), i, j)

    @functools.cached_property
    def positive_scores(self) -> Tensor:
        """(P,) scores of the positive pairs in the order of ``pairs.listed``, differentiable."""
        if self.engine == "dense":
            return self.scores().diagonal() if self.pairs.one_to_one else self.scores()[self.pairs.listed]
        self.check_unchanged()
        return listed_scores(with_norms(self.rows, self.cols, self.normalize), self.pairs)

    # ---------------------------------------------------------------------------------------- reduction

    def reduce(self, key: str, sides: Sequence[int], *params: Tensor, over: str = "negatives") -> Tensor:
        """Return (K, A): the sums of an answer over the candidates of each anchor of these sides."""
        if self.engine == "dense":
            return reduce.dense_sums(self.scores(), self.pairs, ANSWERS[key], over, tuple(sides), params)
        early = len(sides) == 1 and self.cols is not None and not self.cols.requires_grad
        if not (early and ANSWERS[key].exponential):
            self.keep()
        source = self.source()
        pairs = None if torch.compiler.is_compiling() else self.pairs
        args = key, over, tuple(sides), self.engine == "triton"
        tensors = (*source, *params)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            return reduce.Reduce.apply(pairs, *args, *tensors)
        return reduce.sums(list(source), list(params), *args, False, pairs=pairs)[0]

    # --------------------------------------------------------------------------------------------- state

    def _current_versions(self) -> list[int] | None:
        if torch.compiler.is_compiling():
            return None
        return [x._version for x in (self.rows, self.cols) if x is not None and not x.is_inference()]

    def check_unchanged(self) -> None:
        """Refuse embeddings that were written to: scores that are kept would not fit to later answers."""
        if not torch.compiler.is_compiling() and self._versions != self._current_versions():
            what = "scores were" if self.cols is None else "embeddings were"
            raise RuntimeError(f"the {what} modified in place after this Similarity was made; make another one")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._versions = self._current_versions()  # a copy counts its own

    @property
    def readable(self) -> bool:
        """Whether the host may look at values without synchronising."""
        return host_may_read(self.rows)
