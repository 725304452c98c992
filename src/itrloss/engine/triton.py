"""The answers on a GPU: Triton kernels around cuBLAS products.

Half-precision embeddings are multiplied by the kernels themselves, with float32 accumulation, and
their scores never leave the chip; others by cuBLAS, panel by panel. The backward pass writes the
gradient of a panel's inner products, which cuBLAS multiplies into float32 sums of the embeddings'
gradients. Nothing synchronises with the device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import kernels, terms, tiled
from .inputs import Inputs, Places, Side
from .pair_scores import ListedPairs
from .pairs import IGNORE_ID, Pairs
from .question import LARGE_SCALE, Question, Value, has_each
from .tiled import Gradients, Needs
from .vectors import inverse_norms


class TileConfig(NamedTuple):
    """The tile of scores of a program, see :class:`itrloss.engine.kernels.Config`."""

    block_m: int
    block_n: int
    block_k: int
    parts: int
    num_warps: int
    num_stages: int
    registers: int | None = None  # upper limit for each thread, on Hopper


# For products: large tiles where there is one for every multiprocessor, else small ones. Hopper's
# kernels take 114 to 190 registers; with 128, two programs of 8 warps share a multiprocessor, and
# one multiplies while the other adds up. Other kernels, and all on other GPUs, would spill up to
# 1.5 KB, and are not limited (python tests/gpu_compiler.py 90).
PRODUCT_TILES = TileConfig(128, 128, 64, 4, 8, 3, 128), TileConfig(64, 64, 64, 1, 4, 3)
MANY = 2**21  # scores from which there are enough large tiles
READING_TILE = TileConfig(64, 64, 64, 1, 4, 3)  # for scores that are loaded: memory-bound
BLOCK_ROWS = 4096  # rows of a block: products of so many have enough tiles for all multiprocessors
BLOCK = 2**28  # scores of a block at most; sums of its tiles, until they are added up, take 40 MiB
PANEL = 2**26  # bytes of scores, or of their gradient, that are written at once
# Bytes of float32 sums of one side's gradient that may be held; beyond, scores are visited twice.
HELD = 2**27

# The interpreter cannot multiply bfloat16, and rounds to it towards zero: it computes in float32.
INTERPRETED = not isinstance(kernels.sums_kernel, triton.JITFunction)


def has_kernel(question: Question) -> bool:
    """Return whether the terms have kernels; a teacher's scores are not loaded by any."""
    return question.terms in kernels.FORMS and not question.teaches


def sums(question: Question, inputs: Inputs) -> Tensor:
    """Return the sums of a question: (A,) of one term, (K, A) of several."""
    found = _sums(question, inputs, kernels.FORMS[question.terms], maximum=False)
    return found[0] if len(question.terms) == 1 else found


def highest(question: Question, inputs: Inputs) -> Tensor:
    """Return the highest of the scores (A,) that count, times the scale; -inf without any."""
    return _sums(question, inputs, (kernels.identity, None), maximum=True)[0]


def _sums(question: Question, inputs: Inputs, forms: tuple[Any, Any], maximum: bool) -> Tensor:
    """Return the sums or maxima (K, A) of all anchors."""
    run = Pass(question, inputs, forms)
    total = AnchorSums(run, len(question.terms), question.sides, maximum)
    size = run.panel if run.multiplies_in_panels else BLOCK
    with torch.cuda.device_of(inputs.like):
        for places in run.blocks(size):
            products = run.products(places)
            partials = total.partials(places)
            flags = {"WIDTH": len(question.terms), "MAXIMUM": maximum}
            run.launch(kernels.sums_kernel, places, products, partials, flags)
            total.add(places, partials)
    return total.sums


# ------------------------------------------------------------------------------------- the gradient

# Writes the gradient of a block's inner products to a panel, if there is one.
Write = Callable[[Places, Tensor | None, Tensor | None], None]


def gradients(
    question: Question,
    inputs: Inputs,
    grad: Tensor,  # of the sums, (A,) or (K, A)
    needs: Needs,
    listed: ListedPairs | None,
) -> Gradients:
    """Return the gradients of what a question was asked of, from the gradient of its sums."""
    run = Pass(question, inputs, kernels.FORMS[question.terms])
    grad = grad.view(len(question.terms), -1)
    upstream = kernels.Upstream(grad, grad.stride(0), grad.stride(1))
    of_values = None
    if needs.scale or needs.shift:
        # A plane for each slot of the shift, then one for the scale. If one evaluation serves both
        # sides, they are summed by row alone.
        sides = question.sides[:1] if run.shared else question.sides
        of_values = AnchorSums(run, question.slots + 1, sides, maximum=False)

    def write(places: Places, products: Tensor | None, panel: Tensor | None) -> None:
        partials: tuple[Tensor | None, Tensor | None] = (None, None)
        if of_values is not None:
            partials = of_values.partials(places)
        flags = {
            "WIDTH": len(question.terms),
            "GRAD_SCALE": needs.scale,
            "GRAD_SHIFT": needs.shift,
        }
        arguments = upstream, *partials, panel_of(panel)
        run.launch(kernels.gradient_kernel, places, products, arguments, flags)
        if of_values is not None:
            of_values.add(places, partials)

    rows = cols = scores = None
    with torch.cuda.device_of(inputs.like):
        if run.matrix is not None:
            scores = score_gradient(run, needs, write, listed)
        else:
            rows, cols = embedding_gradients(run, needs, write, listed)
    return Gradients(
        rows=rows,
        cols=cols,
        row_bias=None,
        col_bias=None,
        scores=scores,
        scale=value_gradient(question.scale, of_values, slice(-1, None), needs.scale),
        shift=value_gradient(question.shift, of_values, slice(0, -1), needs.shift),
        params=(),
    )


def value_gradient(
    value: Value | None, of_values: AnchorSums | None, planes: slice, needed: bool
) -> Tensor | None:
    """Return the gradient of a scale or a shift from the sums over each anchor's candidates."""
    if not needed or of_values is None or not isinstance(value, Tensor):
        return None
    found = of_values.sums[planes]
    if not has_each(value):
        found = found.sum(-1, keepdim=True)
    return found.reshape(value.shape)


def score_gradient(run: Pass, needs: Needs, write: Write, listed: ListedPairs | None) -> Any:
    """Return the gradient (N, M) of scores that were given."""
    assert run.matrix is not None
    out = run.matrix.new_empty(run.shape) if needs.scores else None
    for rows in spans(run.shape[0], BLOCK_ROWS):
        part = None if out is None else out[rows]
        write((rows, slice(0, run.shape[1])), run.matrix[rows], part)
    if out is not None and listed is not None:
        listed.add_to_(out)
    return out


def embedding_gradients(
    run: Pass, needs: Needs, write: Write, listed: ListedPairs | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of rows and columns, from products with gradients of panels of scores.

    Each panel of the outer side visits all of the inner side, so that its sums are complete before
    the next panel. Sums of the inner side are held to the end, or computed by a second visit with
    the sides swapped.
    """
    sides = run.inputs.rows, run.inputs.cols
    outs: list[Tensor | None] = [None, None]
    for side, needed in enumerate((needs.rows, needs.cols)):
        if needed:
            like = sides[side].like
            outs[side] = like.new_empty(like.shape, dtype=needs.dtypes[side])
    pairs = [listed_of(run, side, listed) for side in (0, 1)]
    steps = BLOCK_ROWS, whole_tiles(run.panel // BLOCK_ROWS)
    for outer, holds in visits(outs):
        inner = 1 - outer
        held = zeros(outs[inner], slice(None)) if holds else None
        for o in spans(run.shape[outer], steps[outer]):
            total = zeros(outs[outer], o)
            for i in spans(run.shape[inner], steps[inner]):
                places = (i, o) if outer else (o, i)
                products = run.products(places)
                # Products may be overwritten: a tile is loaded before it is stored.
                panel = products
                if panel is None:
                    panel = run.buffer(1, places, run.panel_dtype)
                write(places, products, None if total is None else panel)
                if total is not None:
                    outer_first = panel.T if outer else panel
                    add_product_(total, outer_first, sides[inner].like[i])
                    if held is not None:
                        add_product_(held[i], outer_first.T, sides[outer].like[o])
            _project(run, outer, total, o.start, pairs[outer], outs[outer])
        _project(run, inner, held, 0, pairs[inner], outs[inner])
    return outs[0], outs[1]


def zeros(out: Tensor | None, part: slice) -> Tensor | None:
    """Return float32 zeros like ``out[part]``, in place if the gradient ``out`` is float32."""
    if out is None:
        return None
    if out.dtype == torch.float32:
        return out[part].zero_()
    return torch.zeros_like(out[part], dtype=torch.float32)


def visits(outs: Sequence[Tensor | None]) -> list[tuple[int, bool]]:
    """Return the outer side of each visit of the scores, and whether the inner side's sums are held.

    The inner side is the smaller one.
    """
    rows, cols = outs
    if rows is None or cols is None:
        return [(int(rows is None), False)]
    inner = int(cols.numel() <= rows.numel())
    smaller = min(rows.numel(), cols.numel())
    if outs[inner].dtype == torch.float32 or smaller * 4 <= HELD:  # type: ignore[union-attr]
        return [(1 - inner, True)]
    return [(0, False), (1, False)]


# --------------------------------------------------------------------------------- a pass' launches


class Pass:
    """The inputs of a pass in the form that kernels take, prepared once for all of its launches."""

    def __init__(self, question: Question, inputs: Inputs, forms: tuple[Any, Any]):
        self.question = question
        self.inputs = inputs
        self.forms = forms
        self.shape = question.pairs.shape
        self.device = inputs.like.device
        self.matrix = None if inputs.scores is None else inputs.scores.contiguous()
        self.fused = self.matrix is None and fused(inputs)
        self.workspace: dict[int, Tensor] = {}
        self.tile = READING_TILE
        if self.fused:
            self.tile = PRODUCT_TILES[0 if math.prod(self.shape) >= MANY else -1]
        dtype = inputs.like.dtype
        narrow = self.fused and dtype == torch.bfloat16 and not INTERPRETED
        # float16's range is too small for gradients: see `add_product_`.
        self.panel_dtype = torch.bfloat16 if narrow else torch.float32
        copied = 2 if dtype == torch.float16 else 0  # bytes per score of the copy for the product
        self.panel = PANEL // (self.panel_dtype.itemsize + copied)  # number of scores
        self.shared = not any(has_each(x) for x in question.values)
        self.first_col = self.shape[0] if 0 in question.sides else 0
        self.kernel_inputs = self._kernel_inputs()
        self.kernel_values = self._kernel_values()

    @property
    def multiplies_in_panels(self) -> bool:
        """Whether cuBLAS multiplies the embeddings, panel by panel."""
        return self.matrix is None and not self.fused

    def _kernel_inputs(self) -> kernels.Inputs:
        """Return the embeddings, their lengths and ids."""
        row_ids, col_ids = [None if x is None else x.contiguous() for x in self.question.pairs.ids]
        row_inv = flat_inv(self.inputs.rows)
        col_inv = flat_inv(self.inputs.cols)
        if not self.fused:
            return kernels.Inputs(None, None, 0, 0, 0, row_inv, col_inv, row_ids, col_ids)
        rows = aligned(self.inputs.rows.like, self.tile.block_k)
        cols = aligned(self.inputs.cols.like, self.tile.block_k)
        return kernels.Inputs(
            rows,
            cols,
            rows.stride(0),
            cols.stride(0),
            rows.shape[1],
            row_inv,
            col_inv,
            row_ids,
            col_ids,
        )

    def _kernel_values(self) -> kernels.Values:
        """Return the scale, the shift and the limits, as tensors."""
        question = self.question
        scale = self._as_tensor(question.scale)
        shift = question.shift
        if self.shift_first and shift is not None:
            shift = shift / question.scale
        shift = self._as_tensor(shift)
        below = self._as_tensor(question.below)
        above = self._as_tensor(question.above)
        slot_stride = 0
        if shift is not None and shift.dim() == 2:
            slot_stride = shift.stride(0)
        return kernels.Values(
            scale,
            shift,
            below,
            above,
            step_of(scale),
            step_of(shift),
            step_of(below),
            step_of(above),
            question.slots,
            slot_stride,
        )

    @property
    def shift_first(self) -> bool:
        """Whether ``z = scale (S + shift / scale)``: a S - a b would cancel digits for a large a."""
        scale = self.question.scale
        return isinstance(scale, float) and abs(scale) > LARGE_SCALE

    def _as_tensor(self, x: Value | None) -> Tensor | None:
        """Return a value as a tensor of one or of all anchors."""
        if x is None or isinstance(x, Tensor):
            return x
        return torch.full((1,), x, dtype=torch.float32, device=self.device)

    def blocks(self, scores: int) -> Iterator[Places]:
        """Yield the rows and columns of blocks of at most so many scores."""
        n, m = self.shape
        rows = min(BLOCK_ROWS, whole_tiles(n + 127))
        for r in spans(n, rows):
            for c in spans(m, whole_tiles(scores // rows)):
                yield r, c

    def products(self, places: Places) -> Tensor | None:
        """Return a block's (r, c) float32 inner products, or scores; None where kernels multiply."""
        if self.matrix is not None:
            return self.matrix[places]
        if self.fused:
            return None
        r, c = places
        rows = self.inputs.rows.like[r].float()
        cols = self.inputs.cols.like[c].float()
        return torch.mm(rows, cols.T, out=self.buffer(0, places, torch.float32))

    def buffer(self, which: int, places: Places, dtype: torch.dtype) -> Tensor:
        """Return an (r, c) part of a workspace.

        Rows begin at multiples of 64 entries, aligned for fast products.
        """
        r, c = [part.stop - part.start for part in places]
        stride = -(-c // 64) * 64
        space = self.workspace.get(which)
        if space is None or space.numel() < r * stride:
            space = torch.empty(r * stride, dtype=dtype, device=self.device)
            self.workspace[which] = space
        return space[: r * stride].view(r, stride)[:, :c]

    def grid(self, places: Places) -> tuple[int, int]:
        """Return the numbers of tiles of a block along its rows and along its columns."""
        rows, cols = places
        high = -(-(rows.stop - rows.start) // self.tile.block_m)
        wide = -(-(cols.stop - cols.start) // self.tile.block_n)
        return high, wide

    def launch(
        self,
        kernel: Any,
        places: Places,
        products: Tensor | None,
        arguments: Sequence[Any],
        flags: dict[str, Any],
    ) -> None:
        """Run a program for each tile of a block."""
        rows, cols = places
        tile = self.tile
        block = kernels.Block(
            rows.start, cols.start, rows.stop - rows.start, cols.stop - cols.start, self.first_col
        )
        form, second = self.forms
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        of_values = flags.get("GRAD_SCALE", False) or flags.get("GRAD_SHIFT", False)
        if tile.registers is not None and not of_values and _is_hopper(self.device):
            options["maxnreg"] = tile.registers
        config = self._config(flags)
        panel = panel_of(products)
        if self.matrix is not None and products is not None:
            panel = panel._replace(width=block.size_n)  # beyond it are other columns' scores
        high, wide = self.grid(places)
        kernel[(high * wide,)](
            self.kernel_inputs,
            panel,
            *block,
            self.kernel_values,
            *arguments,
            FORM=form,
            SECOND=second,
            C=config,
            **options,
        )

    def _config(self, flags: dict[str, Any]) -> kernels.Config:
        """Return the compile-time constants of a launch."""
        question = self.question
        return kernels.Config(
            BLOCK_M=self.tile.block_m,
            BLOCK_N=self.tile.block_n,
            BLOCK_K=self.tile.block_k,
            PARTS=self.tile.parts,
            OVER=question.over,
            IDS=question.pairs.ids[0] is not None,
            SHARED=self.shared,
            ROWS=0 in question.sides,
            COLS=1 in question.sides,
            WIDTH=flags["WIDTH"],
            BASE_2=self.forms[0] is kernels.exponential,
            SHIFT_FIRST=self.shift_first,
            MAXIMUM=flags.get("MAXIMUM", False),
            GRAD_SCALE=flags.get("GRAD_SCALE", False),
            GRAD_SHIFT=flags.get("GRAD_SHIFT", False),
        )


def fused(inputs: Inputs) -> bool:
    """Return whether kernels multiply the embeddings themselves."""
    rows, cols = inputs.rows.like, inputs.cols.like
    return rows.dtype == cols.dtype != torch.float32


def panel_of(x: Tensor | None) -> kernels.Panel:
    """Return a buffer (r, c) as kernels take it."""
    if x is None:
        return kernels.Panel(None, 0, 0)
    return kernels.Panel(x, x.stride(0), x.stride(0))


def flat_inv(side: Side) -> Tensor | None:
    """Return the (N,) inverse norms of a side."""
    return None if side.inv is None else side.inv.flatten()


def step_of(x: Tensor | None) -> int:
    """Return the stride from an anchor's value to the next; 0 for one value."""
    return 0 if x is None or x.shape[-1] == 1 else x.stride(-1)


def spans(size: int, step: int) -> list[slice]:
    """Return slices of at most ``step`` entries."""
    return [slice(start, min(size, start + step)) for start in range(0, size, step)]


def whole_tiles(size: int) -> int:
    """Return ``size`` rounded down to whole tiles of any config.

    Products then round alike wherever a block begins.
    """
    return max(size // 128 * 128, 128)


def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def aligned(x: Tensor, step: int) -> Tensor:
    """Return embeddings that can be loaded in whole steps, 16 bytes at a time.

    Zero padding changes no product.
    """
    x = x.float() if INTERPRETED else x
    whole_steps = x.shape[1] % step == 0
    starts_aligned = x.stride(0) % 16 == 0 and x.data_ptr() % 16 == 0
    if whole_steps and x.stride(1) == 1 and starts_aligned:
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[1] % step)).contiguous()


class AnchorSums:
    """The (K, A) sums of all anchors, added up in the order of the tiles: deterministic."""

    def __init__(self, run: Pass, width: int, sides: Sequence[int], maximum: bool):
        self.run = run
        self.sides = sides
        self.maximum = maximum
        size = sum(run.shape[side] for side in sides)
        self.sums = torch.empty(width, size, dtype=torch.float32, device=run.device)
        if 0 in run.shape:  # there is no tile
            self.sums.fill_(-math.inf if maximum else 0.0)

    def partials(self, places: Places) -> tuple[Tensor | None, Tensor | None]:
        """Return buffers for the sums of a block's tiles.

        Their shapes are (K, column parts, r) and (K, row parts, c).
        """
        high, wide = self.run.grid(places)
        rows, cols = places
        width = len(self.sums)
        of_rows = of_cols = None
        if 0 in self.sides:
            parts = wide * self.run.tile.parts
            of_rows = self.sums.new_empty(width, parts, rows.stop - rows.start)
        if 1 in self.sides:
            of_cols = self.sums.new_empty(width, high, cols.stop - cols.start)
        return of_rows, of_cols

    def add(self, places: Places, partials: tuple[Tensor | None, Tensor | None]) -> None:
        """Add the sums of a block's tiles; the first block of an anchor overwrites."""
        rows, cols = places
        of_rows, of_cols = partials
        first_col = self.run.first_col
        if of_rows is not None:
            self._add(self.sums[:, rows], of_rows, first=cols.start == 0)
        if of_cols is not None:
            anchors = slice(first_col + cols.start, first_col + cols.stop)
            self._add(self.sums[:, anchors], of_cols, first=rows.start == 0)

    def _add(self, total: Tensor, partial: Tensor, first: bool) -> None:
        reduced = torch.amax if self.maximum else torch.sum
        joined = torch.maximum if self.maximum else torch.add
        if first:
            reduced(partial, 1, out=total)
        else:
            joined(total, reduced(partial, 1), out=total)


def listed_of(run: Pass, side: int, listed: ListedPairs | None) -> kernels.Listed:
    """Return listed pairs as `project_kernel` takes them, sorted by the vectors of a side."""
    if listed is None:
        return kernels.Listed(None, None, None, None, None, None, None)
    own, other = listed.rows, listed.cols
    partners = run.inputs.cols
    if side == 1:
        own, other = other, own
        partners = run.inputs.rows
    vectors = contiguous_vectors(partners.like)
    start = order = None
    if own is not None:
        own, order = torch.sort(own, stable=True)
        start = torch.searchsorted(own, torch.arange(run.shape[side] + 1, device=own.device))
    return kernels.Listed(
        listed.grad.contiguous(),
        start,
        order,
        other,
        vectors,
        vectors.stride(0),
        flat_inv(partners),
    )


def _project(
    run: Pass,
    side: int,
    total: Tensor | None,  # (r, D) sums over panels
    begin: int,  # the first vector that they are of
    listed: kernels.Listed,
    out: Tensor | None,  # (N, D)
) -> None:
    """Write the gradients of a side's vectors, from sums over panels and from listed pairs."""
    if total is None or len(total) == 0:
        return
    own = run.inputs.cols if side else run.inputs.rows
    x = contiguous_vectors(own.like)
    dim = x.shape[1]
    arguments = x, x.stride(0), dim, flat_inv(own), begin, total, listed, out
    kernels.project_kernel[(len(total),)](*arguments, BLOCK_D=triton.next_power_of_2(dim))


def contiguous_vectors(x: Tensor) -> Tensor:
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
    half = torch.empty_like(panel, dtype=torch.float16)
    torch.mul(panel, scale, out=half)
    part = torch.zeros_like(total)
    _addmm(part, half, other)
    total.add_(part.div_(scale))


def _addmm(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b``, accumulated in float32, to float32 sums."""
    if a.dtype == torch.float32 or not a.is_cuda:
        total.addmm_(a.float(), b.float())
        return
    # A model may have allowed float16 accumulation for its own products; here it would overflow.
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_accumulation
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
    """Return whether this engine agrees with the tiled one on an example, tried once.

    If not, a warning says why. While a CUDA graph is captured nothing is tried: untested means
    False, with a warning.
    """
    if (device, dtype) in _results:
        return _results[device, dtype]
    error = "is not tried while a CUDA graph is captured"
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        # A thread has no modes, hooks and tracers of the caller.
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
    """Return what is wrong, or "".

    The example has as many large tiles as the largest GPUs have multiprocessors.
    """
    is_nvidia = device.type == "cuda" and not torch.version.hip
    if is_nvidia and torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0"
    question, inputs, grad = example(device, dtype, n, m, d)
    needs = Needs(True, True, False, False, scale=True)
    try:
        ours = [sums(question, inputs), *gradients(question, inputs, grad, needs, None)]
        theirs = [
            tiled.sums(question, inputs, None),
            *tiled.gradients(question, inputs, None, grad, needs),
        ]
    except Exception as error:  # from the compiler, the driver, or an operation that the GPU lacks
        return f"fails: {type(error).__name__}: {error}"
    for found, wanted in zip(ours, theirs, strict=True):
        if not isinstance(found, Tensor) or not isinstance(wanted, Tensor):
            continue
        # Half precision rounds by less than a percent.
        if not (found.float() - wanted.float()).norm() <= 0.02 * wanted.float().norm():
            return "finds something else than the tiled one"
    return ""


def example(
    device: torch.device, dtype: torch.dtype, n: int, m: int, d: int
) -> tuple[Question, Inputs, Tensor]:
    """Return a question, its inputs, and a gradient of its sums."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, d, dtype=torch.float64, device="cpu", generator=generator)
    noise = torch.randn(m, d, dtype=torch.float64, device="cpu", generator=generator)
    rows = x[:n].to(device, dtype)
    cols = (x + noise).to(device, dtype)
    row_ids = (torch.arange(n, device="cpu") % 97).to(device)
    col_ids = (torch.arange(m, device="cpu") % 97).to(device)
    row_ids[0] = IGNORE_ID
    inputs = Inputs(
        Side(rows, inverse_norms(rows), None, None),
        Side(cols, inverse_norms(cols), None, None),
        None,
    )
    question = Question(
        Pairs((n, m), (row_ids, col_ids), device),
        (0, 1),
        (terms.exponential,),
        scale=torch.full((1,), 20.0, device=device),
        shift=torch.full((1,), -5.0, device=device),
    )
    return question, inputs, torch.linspace(1e-5, 3e-5, n + m, device=device)
