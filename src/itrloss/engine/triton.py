"""The reduction on a GPU: Triton kernels around cuBLAS products.

Half-precision embeddings are multiplied by the kernels themselves, with float32 accumulation, and
their scores never leave the chip; others by cuBLAS, panel by panel. The backward pass writes the
gradient of a panel's inner products, which cuBLAS multiplies into float32 sums of the embeddings'
gradients. Nothing synchronises with the device.
"""

from __future__ import annotations

import math
import warnings
from collections import namedtuple
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
from torch import Tensor

from . import kernels
from .answers import LIMITS
from .pairs import Pairs
from .reduce import Question, tiled_gradient, tiled_sums
from .scores import IGNORE_ID, Scores, inverse_norms

Place = tuple[slice, slice]  # rows and columns of a block
# (P,) rows and columns of listed pairs, or None: row p and column p; and the gradient of their
# scores
PairGrads = tuple[Tensor | None, Tensor | None, Tensor]


def _panel(x: Tensor | None) -> Any:
    return kernels.Panel(x, 0 if x is None else x.stride(0))


# The tile of scores of a program, see kernels.Config. ``registers``: upper limit for each thread,
# on Hopper.
TileConfig = namedtuple(
    "TileConfig", "block_m block_n block_k parts num_warps num_stages registers", defaults=[None]
)
# For products: large tiles where there is one for every multiprocessor, else small ones. Hopper's
# kernels take 114 to 190 registers; with 128, two programs of 8 warps share a multiprocessor, and
# one multiplies while the other adds up. Sums, and gradients of scores alone, spill at most 280
# bytes then, those of exp 48. Other kernels, and all on other GPUs, would spill up to 1.5 KB, and
# are not limited (python tests/gpu_compiler.py 90).
PRODUCT_TILES = TileConfig(128, 128, 64, 4, 8, 3, 128), TileConfig(64, 64, 64, 1, 4, 3)
MANY = 2**21  # scores
READING_TILE = TileConfig(64, 64, 64, 1, 4, 3)  # for scores that are loaded: memory-bound
BLOCK_ROWS = 4096  # rows of a block: products of so many have enough tiles for all multiprocessors
# scores of a block at most; the sums of its tiles, held until they are added up, take 40 MiB
BLOCK = 2**28
PANEL = 2**26  # bytes of scores, or of their gradient, that are written at once
# bytes of float32 sums of one side's gradient that may be held; beyond, scores are visited twice
HELD = 2**27

# The answers that have kernels, also within limits; others are summed tile by tile in PyTorch.
WITH_LIMITS = {
    name + limits: form for name, form in kernels.FORMS.items() for limits in ("", *LIMITS)
}

# The interpreter cannot multiply bfloat16, and rounds to it towards zero: it computes in float32.
INTERPRETED = not isinstance(kernels.sums_kernel, triton.JITFunction)


def sums(question: Question, early: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the (K, A) sums and, if ``early``, (N, D) directions and (A,) derivatives w.r.t. the
    scale: tiled_sums.
    """
    run, scores, answer = _Pass(question), question.scores, question.answer
    width = 2 if early else answer.width  # the exponentials, and their derivatives w.r.t. the scale
    total = _AnchorSums(run, width, question.sides, answer.maximum)
    direction = total.sums.new_zeros(scores.rows.shape if early else 0)
    with torch.cuda.device_of(scores.rows):
        for place in run.blocks(
            run.panel if early or not (run.fused or run.matrix is not None) else BLOCK
        ):
            products, partials = run.products(place), total.partials(place)
            panel = run.buffer(1, place, run.panel_dtype) if early else None
            flags = {"WIDTH": width, "MAXIMUM": answer.maximum, "GRAD_P": early}
            run.launch(kernels.sums_kernel, place, products, (*partials, _panel(panel)), flags)
            total.add(place, partials)
            if panel is not None and scores.cols is not None:
                add_product_(direction[place[0]], panel, scores.cols[place[1]])
    if early:  # cloned: an operator's results may not alias each other
        return total.sums[:1].clone(), direction, total.sums[1].clone()
    return total.sums, direction, torch.empty_like(direction)


def gradient(
    question: Question, grad: Tensor, needs: Sequence[bool], pair_grads: PairGrads | None = None
) -> list[Tensor]:
    """Return the gradients of rows, columns and parameters from ``grad`` (K, A); empty where it
    ``needs`` none.
    """
    run, upstream = _Pass(question), kernels.Upstream(grad, grad.stride(0), grad.stride(1))
    scores, sides, params = question.scores, question.sides, question.params
    # Sums of the gradients w.r.t. p, for each slot, then w.r.t. q: by row alone if one evaluation
    # serves both sides.
    param_sums = (
        _AnchorSums(run, run.slots + 1, sides[:1] if run.shared else sides)
        if any(needs[2:])
        else None
    )

    def write(place: Place, products: Tensor | None, panel: Tensor | None) -> None:
        grad_p, grad_q = (*needs[2:], False, False)[:2]
        partials = [None, None] if param_sums is None else param_sums.partials(place)
        flags = {"WIDTH": len(grad), "GRAD_P": grad_p, "GRAD_Q": grad_q}
        run.launch(
            kernels.gradient_kernel, place, products, (upstream, *partials, _panel(panel)), flags
        )
        if param_sums is not None:
            param_sums.add(place, partials)

    outs = [
        x.new_empty(x.shape) if x is not None and n else None
        for x, n in zip(scores[:2], needs[:2], strict=True)
    ]
    with torch.cuda.device_of(scores.rows):
        if run.matrix is not None:
            for rows in _spans(run.shape[0], BLOCK_ROWS):
                part = None if outs[0] is None else outs[0][rows]
                write((rows, slice(0, run.shape[1])), run.matrix[rows], part)
        else:
            _embedding_gradients(run, outs, write, pair_grads)
    planes = (
        () if param_sums is None else (param_sums.sums[: run.slots], param_sums.sums[run.slots :])
    )
    for x, (p, need) in enumerate(zip(params, needs[2:], strict=True)):
        outs.append(
            (planes[x].sum(-1) if p.shape[-1] == 1 else planes[x]).reshape(p.shape)
            if need
            else p.new_empty(0)
        )
    return [scores.rows.new_empty(0) if x is None else x for x in outs]


def _embedding_gradients(
    run: _Pass, outs: Sequence[Tensor | None], write: Any, pair_grads: PairGrads | None
) -> None:
    """Write the gradients of rows and columns into ``outs`` from products with the gradient of
    panels of scores.

    Each panel of the outer side visits all of the inner side, so that its sums are complete before
    the next panel. Those of the inner side are held to the end, or computed by a second visit with
    the sides swapped.
    """
    xs: Any = run.scores[:2]  # neither is None
    listed = [_listed(run.scores, side, pair_grads) for side in (0, 1)]
    shape = BLOCK_ROWS, _whole_tiles(run.panel // BLOCK_ROWS)
    for outer, holds in _visits(outs):
        inner = 1 - outer
        held = _zeros(outs[inner], slice(None)) if holds else None
        for o in _spans(len(xs[outer]), shape[outer]):
            total = _zeros(outs[outer], o)
            for i in _spans(len(xs[inner]), shape[inner]):
                place = (i, o) if outer else (o, i)
                # may be overwritten: a tile is loaded before it is stored
                products = run.products(place)
                panel = run.buffer(1, place, run.panel_dtype) if products is None else products
                write(place, products, None if total is None else panel)
                if total is not None:
                    add_product_(total, panel.T if outer else panel, xs[inner][i])
                    if held is not None:
                        add_product_(held[i], panel if outer else panel.T, xs[outer][o])
            _project(run.scores, outer, total, o.start, listed[outer], outs[outer])
        _project(run.scores, inner, held, 0, listed[inner], outs[inner])


def _zeros(out: Tensor | None, part: slice) -> Tensor | None:
    """Return float32 zeros like ``out[part]``, in place if the gradient ``out`` is float32."""
    if out is None:
        return None
    return (
        out[part].zero_()
        if out.dtype == torch.float32
        else torch.zeros_like(out[part], dtype=torch.float32)
    )


def _visits(outs: Sequence[Tensor | None]) -> list[tuple[int, bool]]:
    """Return the outer side of each visit of the scores, and whether the sums of the inner, smaller
    side are held.
    """
    rows, cols = outs
    if rows is None or cols is None:
        return [(int(rows is None), False)]
    inner = int(cols.numel() <= rows.numel())
    fit = cols.dtype == torch.float32 or min(rows.numel(), cols.numel()) * 4 <= HELD
    return [(1 - inner, True)] if fit else [(0, False), (1, False)]


# --------------------------------------------------------------------------------- a pass' launches


class _Pass:
    """The inputs of a pass in the form that kernels take, prepared once for all of its launches."""

    def __init__(self, question: Question):
        scores, key, sides, params = question.scores, question.key, question.sides, question.params
        self.form, self.scores, self.shape, self.device = (
            WITH_LIMITS[key],
            scores,
            scores.shape,
            scores.rows.device,
        )
        self.matrix = scores.rows.contiguous() if scores.cols is None else None
        self.fused, self.workspace = fused(scores), {}
        self.tile = (
            PRODUCT_TILES[0 if math.prod(self.shape) >= MANY else -1]
            if self.fused
            else READING_TILE
        )
        embeddings = None, None, 0, 0, 0
        if self.fused:
            rows, cols = (_aligned(x, self.tile.block_k) for x in scores[:2])
            embeddings = rows, cols, rows.stride(0), cols.stride(0), rows.shape[1]
        row_ids, col_ids = (None if x is None else x.contiguous() for x in scores[4:6])
        self.inputs = kernels.Inputs(*embeddings, *scores[2:4], row_ids, col_ids)
        narrow = self.fused and scores.rows.dtype == torch.bfloat16 and not INTERPRETED
        # float16's range is too small: add_product_
        self.panel_dtype = torch.bfloat16 if narrow else torch.float32
        # bytes per score of the copy for the product
        copied = 2 * (scores.rows.dtype == torch.float16)
        self.panel = PANEL // (self.panel_dtype.itemsize + copied)  # number of scores
        limited = key[len(key.rstrip("<>")) :]
        own = len(params) - len(limited)
        limits = dict(zip(limited, params[own:], strict=True))
        tensors = *(*params[:own], None, None)[:2], limits.get("<"), limits.get(">")
        p_step, q_step, *steps = (
            0 if x is None or x.shape[-1] == 1 else x.stride(-1) for x in tensors
        )
        p, q, *ends = tensors
        self.limits = kernels.Limits(*ends, *steps)
        self.slots, slot_stride = (
            (len(p), p.stride(0)) if p is not None and p.dim() == 2 else (1, 0)
        )
        self.params = kernels.Params(p, q, p_step, q_step, self.slots, slot_stride)
        self.first_col = self.shape[0] if 0 in sides else 0
        self.shared = all(x.shape[-1] == 1 for x in params)
        self.flags = {
            "OVER": question.over,
            "IDS": scores.row_ids is not None,
            "SHARED": self.shared,
        }
        self.flags |= {"ROWS": 0 in sides, "COLS": 1 in sides}

    def blocks(self, scores: int) -> Iterator[Place]:
        """Return an iterator over the rows and columns of blocks of at most so many scores."""
        n, m = self.shape
        rows = min(BLOCK_ROWS, _whole_tiles(n + 127))
        return ((r, c) for r in _spans(n, rows) for c in _spans(m, _whole_tiles(scores // rows)))

    def products(self, place: Place) -> Tensor | None:
        """Return the (r, c) float32 inner products, or precomputed scores, of a block; None where
        kernels multiply.
        """
        if self.fused or self.matrix is not None:
            return None if self.matrix is None else self.matrix[place]
        xs: Any = zip(self.scores[:2], place, strict=True)
        rows, cols = (x[part].float() for x, part in xs)
        return torch.mm(rows, cols.T, out=self.buffer(0, place, torch.float32))

    def buffer(self, which: int, place: Place, dtype: torch.dtype) -> Tensor:
        """Return an (r, c) part of a workspace; rows begin at multiples of 64 entries, aligned for
        fast products.
        """
        r, c = (part.stop - part.start for part in place)
        stride, space = -(-c // 64) * 64, self.workspace.get(which)
        if space is None or space.numel() < r * stride:
            space = self.workspace[which] = torch.empty(r * stride, dtype=dtype, device=self.device)
        return space[: r * stride].view(r, stride)[:, :c]

    def grid(self, place: Place) -> tuple[int, ...]:
        """Return the numbers of tiles of a block along its rows and along its columns."""
        return tuple(
            -(-(part.stop - part.start) // size)
            for part, size in zip(place, self.tile[:2], strict=True)
        )

    def launch(
        self, kernel: Any, place: Place, products: Tensor | None, args: Any, flags: Any
    ) -> None:
        """Run a program for each tile of a block."""
        (rows, cols), tile = place, self.tile
        block = kernels.Block(
            rows.start, cols.start, rows.stop - rows.start, cols.stop - cols.start, self.first_col
        )
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "FORM": self.form}
        param_grads = kernel is kernels.gradient_kernel and (flags["GRAD_P"] or flags["GRAD_Q"])
        if tile.registers is not None and not param_grads and _is_hopper(self.device):
            options["maxnreg"] = tile.registers
        inputs = self.inputs, _panel(products), *block, self.params, self.limits, *args
        kernel[(math.prod(self.grid(place)),)](
            *inputs, C=kernels.Config(*tile[:4], **(self.flags | flags)), **options
        )


def fused(scores: Scores) -> bool:
    """Return whether kernels multiply the embeddings themselves."""
    return scores.cols is not None and scores.rows.dtype == scores.cols.dtype != torch.float32


def _spans(size: int, step: int) -> list[slice]:
    return [slice(start, min(size, start + step)) for start in range(0, size, step)]


def _whole_tiles(size: int) -> int:
    """Return ``size`` rounded down to whole tiles of any config: products then round alike wherever
    a block begins.
    """
    return max(size // 128 * 128, 128)


def _is_hopper(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and not torch.version.hip
        and torch.cuda.get_device_capability(device)[0] == 9
    )


def _aligned(x: Any, step: int) -> Tensor:
    """Return embeddings that can be loaded in whole steps, 16 bytes at a time; zero padding changes
    no product.
    """
    x = x.float() if INTERPRETED else x
    if (
        x.shape[1] % step == 0
        and x.stride(1) == 1
        and x.stride(0) % 16 == 0
        and x.data_ptr() % 16 == 0
    ):
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[1] % step)).contiguous()


class _AnchorSums:
    """The (K, A) sums of all anchors, added up from those of tiles in the tiles' order:
    deterministic.
    """

    def __init__(self, run: _Pass, width: int, sides: Sequence[int], maximum: bool = False):
        self.run, self.sides, self.maximum = run, sides, maximum
        size = sum(run.shape[side] for side in sides)
        self.sums = torch.empty(width, size, dtype=torch.float32, device=run.device)
        if not all(run.shape):  # there is no tile
            self.sums.fill_(-math.inf if maximum else 0.0)

    def partials(self, place: Place) -> list[Tensor | None]:
        """Return buffers for the sums of a block's tiles: (K, column parts, r), (K, row parts, c)."""
        high, wide = self.run.grid(place)
        counts = wide * self.run.tile.parts, high
        shapes = [
            (len(self.sums), counts[side], part.stop - part.start)
            for side, part in enumerate(place)
        ]
        return [
            self.sums.new_empty(shape) if side in self.sides else None
            for side, shape in enumerate(shapes)
        ]

    def add(self, place: Place, partials: Sequence[Tensor | None]) -> None:
        """Add the sums of a block's tiles; the first block of an anchor overwrites."""
        reduce, combine = (torch.amax, torch.maximum) if self.maximum else (torch.sum, torch.add)
        for side, (part, new) in enumerate(zip(place, partials, strict=True)):
            if new is not None:
                total = self.sums[:, self.run.first_col * side :][:, part]
                if place[1 - side].start == 0:
                    reduce(new, 1, out=total)
                else:
                    combine(total, reduce(new, 1), out=total)


def _listed(scores: Scores, side: int, pairs: PairGrads | None) -> kernels.Listed:
    """Return the listed pairs as `project_kernel` takes them, sorted by the vectors of a side."""
    if pairs is None:
        return kernels.Listed(*[None] * 7)
    y, start, order = _contiguous_vectors(scores[1 - side]), None, None
    if (own := pairs[side]) is not None:
        own, order = torch.sort(own, stable=True)
        start = torch.searchsorted(own, torch.arange(scores.shape[side] + 1, device=own.device))
    return kernels.Listed(
        pairs[2].contiguous(), start, order, pairs[1 - side], y, y.stride(0), scores[3 - side]
    )


def _project(
    scores: Scores, side: int, total: Tensor | None, begin: int, listed: kernels.Listed, out: Any
) -> None:
    """Write the gradients of a side's vectors, from ``begin`` on, from sums over panels and from
    listed pairs.
    """
    if total is not None and len(total):
        x = _contiguous_vectors(scores[side])
        inputs = x, x.stride(0), x.shape[1], scores[2 + side], begin, total, listed, out
        kernels.project_kernel[(len(total),)](*inputs, BLOCK_D=triton.next_power_of_2(x.shape[1]))


def _contiguous_vectors(x: Any) -> Tensor:
    """Return embeddings, each of which is contiguous in memory."""
    return x if x.stride(1) == 1 else x.contiguous()


def add_product_(total: Tensor, panel: Tensor, other: Tensor) -> None:
    """Add ``panel @ other`` to float32 sums.

    For float16 embeddings the panel is float32, since gradients and exponentials can leave the
    range of float16. Here a power of two scales each row into that range. bfloat16 has the range of
    float32.
    """
    if panel.dtype == other.dtype or other.dtype != torch.float16:
        return _addmm(total, panel.to(other.dtype), other)
    largest = torch.linalg.vector_norm(panel, math.inf, 1, keepdim=True).clamp_(1e-30, 1e30)
    scale = (14 - largest.log2().ceil_()).exp2_()
    half, part = torch.empty_like(panel, dtype=torch.float16), torch.zeros_like(total)
    _addmm(part, torch.mul(panel, scale, out=half), other)
    total.add_(part.div_(scale))


def _addmm(total: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype == torch.float32 or not a.is_cuda:
        total.addmm_(a.float(), b.float())
        return
    # A model may have allowed float16 accumulation for its own products; here it would overflow.
    flags, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_fp16_accumulation
    flags.allow_fp16_accumulation = False
    try:
        if torch.__version__ >= "2.11":
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
        else:  # older addmm takes only a half-precision total
            total.add_(torch.mm(a, b, out_dtype=torch.float32))
    finally:
        flags.allow_fp16_accumulation = before


# ------------------------------------------------------------------------------------ does it work?

_results: dict[tuple[torch.device, torch.dtype], bool] = {}


@torch.compiler.assume_constant_result
def works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this engine agrees with the tiled one on an example, tried once per device and
    dtype.

    If not, a warning says why. While a CUDA graph is captured nothing is tried: untested means
    False, with a warning.
    """
    if (device, dtype) in _results:
        return _results[device, dtype]
    error = "is not tried while a CUDA graph is captured"
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        # a thread without modes, hooks and tracers of the caller
        with ThreadPoolExecutor(1) as executor:
            error = executor.submit(_error, device, dtype).result()
        if "OutOfMemoryError" not in error:  # there may be enough memory the next time
            _results[device, dtype] = not error
    if error:
        fallback = f"engine='auto' does without it for {dtype} on {device}"
        warnings.warn(f"itrloss: the Triton engine {error}; {fallback}", stacklevel=3)
    return not error


def _error(
    device: torch.device, dtype: torch.dtype, n: int = 2048, m: int = 2816, d: int = 80
) -> str:
    """Return what is wrong, or "". The example has as many large tiles as the largest GPUs have
    multiprocessors.
    """
    if (
        device.type == "cuda"
        and not torch.version.hip
        and torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return "needs a GPU of compute capability 8.0"
    generator = torch.Generator().manual_seed(0)
    x, noise = (
        torch.randn(m, d, dtype=torch.float64, device="cpu", generator=generator) for _ in range(2)
    )
    xs = [y.to(device, dtype) for y in (x[:n], x + noise)]
    ids = [(torch.arange(size) % 97).to(device) for size in (n, m)]
    ids[0][0] = IGNORE_ID
    scores, pairs = (
        Scores(*xs, *(inverse_norms(y) for y in xs), *ids),
        Pairs((n, m), (ids[0], ids[1]), device),
    )
    params = [torch.full((1,), y, device=device) for y in (20.0, 5.0)]
    grad, needs = torch.linspace(1e-5, 3e-5, n + m, device=device)[None], (True, True, True, False)
    results: list[list[Tensor]] = []
    questions = [
        Question(scores, pairs, "exp", "negatives", sides, params) for sides in ((0, 1), (0,))
    ]
    try:
        for forward, backward in ((sums, gradient), (tiled_sums, tiled_gradient)):
            values = [*forward(questions[0], False)[:1], *forward(questions[1], True)]
            results.append([*values, *backward(questions[0], grad, needs)[:3]])
    except Exception as error:  # from the compiler, the driver, or an operation that the GPU lacks
        return f"fails: {type(error).__name__}: {error}"
    # Half precision rounds by less than a percent.
    alike = [
        (a.float() - b.float()).norm() <= 0.02 * b.float().norm()
        for a, b in zip(*results, strict=True)
    ]
    return "" if all(alike) else "finds something else than the tiled one"
