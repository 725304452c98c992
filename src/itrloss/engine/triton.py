"""The answers on a GPU: Triton kernels around cuBLAS products.

Half-precision embeddings are multiplied by the kernels themselves, with float32 accumulation, and
their scores never leave the chip; others by cuBLAS, panel by panel. The backward pass writes the
gradient of a panel's inner products, which cuBLAS multiplies into float32 sums of the embeddings'
gradients. Nothing synchronises with the device.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..torch_versions import ADDMM_WIDENS
from . import kernels
from . import pair_scores as of_pairs
from .inputs import NO_SIDE, Inputs, Side
from .pair_scores import Index, ListedPairs
from .products import matmul
from .question import Question, Value, has_each, is_trained
from .relation import Ids, Places, Relation, Rule, are_sets
from .tiled import EarlyGradients, Gradients, Needs
from .vectors import NO_CONTEXT


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
# 1.5 KB, and are not limited (PYTHONPATH=tests python -m support.gpu_compiler 90).
PRODUCT_TILES = (
    TileConfig(128, 128, 64, parts=4, num_warps=8, num_stages=3, registers=128),
    TileConfig(64, 64, 64, parts=1, num_warps=4, num_stages=3),
)
MANY = 2**21  # scores from which there are enough large tiles
# For scores that are loaded: memory-bound.
READING_TILE = TileConfig(64, 64, 64, parts=1, num_warps=4, num_stages=3)
MOMENTS_AT_ONCE = 16  # anchors whose moments a program joins
BLOCK_ROWS = 4096  # rows of a block: products of so many have enough tiles for all multiprocessors
BLOCK = 2**28  # scores of a block at most; sums of its tiles, until they are added up, take 40 MiB
PANEL = 2**26  # bytes of scores, or of their gradient, that are written at once
HELD_SHARE = 64  # the part of a device's memory that float32 sums of gradients may take: 1/64
HELD_AT_LEAST = 2**27  # bytes of them on any device

# Kinds of devices that multiply half precision with float32 sums; "meta" counts as a GPU.
MULTIPLY_HALF = "cuda", "meta"

# The interpreter cannot multiply bfloat16, and rounds to it towards zero: it computes in float32.
INTERPRETED = not isinstance(kernels.sums_kernel, triton.JITFunction)


def has_kernel(question: Question) -> bool:
    """Return whether the term has kernels; a teacher's scores are not loaded by any."""
    return question.term in kernels.FORMS and not question.teaches


class Compared(NamedTuple):
    """What kernels find the pairs of a sum by."""

    ids: Ids  # (N,) and (M,)
    groups: Ids = (None, None)  # (N,) and (M,), in addition to ids
    rule: Rule | None = None  # of the groups
    mask: bool = False  # they read a mask, which PyTorch makes for each block


def compared(relation: Relation) -> Compared:
    """Return what kernels find pairs by: an id and a group of each entry, or else a mask."""
    has_no_ids = relation.ids[0] is None and not relation.one_to_one
    if has_no_ids or relation.one_set or are_sets(relation.ids):
        return Compared((None, None), mask=True)
    if relation.groups is None:
        return Compared(relation.ids)
    rows, cols = relation.groups
    return Compared(relation.ids, (rows.contiguous(), cols.contiguous()), relation.rule)


class Reduction(NamedTuple):
    """How values of candidates become one number, or several."""

    reduce: Callable[..., Tensor]
    join: Callable[..., Tensor]  # two such numbers to one
    empty: float  # without any candidate
    planes: int = 1  # how many numbers


SUM = Reduction(torch.sum, torch.add, 0.0)
MAXIMUM = Reduction(torch.amax, torch.maximum, -math.inf)
#: The number of scores, their mean, and their squared deviations; joined by a kernel of their own.
MOMENTS = Reduction(torch.sum, torch.add, 0.0, planes=3)


def sums(question: Question, inputs: Inputs) -> Tensor:
    """Return the sums (A,) of a question."""
    return reduced(Pass(question, inputs, kernels.FORMS[question.term]), SUM)[0]


def highest(question: Question, inputs: Inputs) -> Tensor:
    """Return the highest of the scores (A,) that count, times the scale; -inf without any."""
    return reduced(Pass(question, inputs, kernels.identity), MAXIMUM)[0]


def moments(question: Question, inputs: Inputs) -> Tensor:
    """Return the number of a question's candidates, the mean of their scores and the sum of their
    squares about it: (3, A).
    """
    return reduced(Pass(question, inputs, kernels.identity), MOMENTS)


def reduced(run: Pass, reduction: Reduction) -> Tensor:
    """Return the sums, maxima or moments (K, A) of all anchors."""
    config = run.config._replace(MAXIMUM=reduction is MAXIMUM, MOMENTS=reduction is MOMENTS)
    total = AnchorTotals(run, reduction.planes, run.question.sides, reduction)
    with torch.cuda.device_of(run.like):
        for places in run.blocks(reduction.planes):
            run.launch(kernels.sums_kernel, config, places, total)
    return total.values


# ------------------------------------------------------------------------------------- the gradient


def gradients(
    question: Question,
    inputs: Inputs,
    grad: Tensor,  # (A,) of the sums
    needs: Needs,
    listed: ListedPairs | None,
) -> Gradients:
    """Return the gradients of a question's inputs and values, from the gradient of its sums."""
    run = Pass(question, inputs, kernels.FORMS[question.term])
    kernel = GradientKernel(run, grad, needs)
    scores = None
    of_vectors: dict[int, Tensor] = {}
    with torch.cuda.device_of(run.like):
        if needs.rows or needs.cols:
            of_vectors = embedding_gradients(kernel, needs, listed)
        else:
            scores = score_gradient(kernel, needs, listed)
    return Gradients(
        rows=of_vectors.get(0),
        cols=of_vectors.get(1),
        scores=scores,
        scale=kernel.of_scale() if needs.scale else None,
        shift=kernel.of_shift() if needs.shift else None,
    )


class GradientKernel:
    """Writes the gradient of a block's inner products, and adds up the gradients of values."""

    def __init__(self, run: Pass, grad: Value, needs: Needs, with_total: bool = False):
        self.run = run
        self.grad = per_anchor(grad)
        #: The one scale of all scores, by which vectors' gradients are multiplied at the end.
        self.factor: kernels.PerAnchor | None = None
        #: The gradient of the factor: a part (N,) of each of a side's vectors.
        self.by_factor: Tensor | None = None
        if (needs.rows or needs.cols) and not has_each(run.question.scale):
            self.factor = run.kernel_values.scale
        self.config = run.config._replace(
            TIMES_SCALE=self.factor is None,
            GRAD_SCALE=needs.scale and self.factor is None,
            GRAD_SHIFT=needs.shift,
            TOTAL=with_total,
        )
        #: Sums of tiles: a plane for the shift, and one for the scale or of the term.
        self.planes = self.config.GRAD_SHIFT + (self.config.GRAD_SCALE or with_total)
        self.total: AnchorTotals | None = None
        if self.planes:
            # If one evaluation serves both sides, they are summed by row alone.
            sides = run.question.sides[:1] if run.config.SHARED else run.question.sides
            self.total = AnchorTotals(run, self.planes, sides, SUM)

    def write(self, places: Places, panel: kernels.Panel) -> None:
        """Write the gradient of a block's inner products to a panel, if there is one."""
        kernel = kernels.gradient_kernel
        self.run.launch(kernel, self.config, places, self.total, self.grad, panel)

    def of_scale(self) -> Tensor:
        """Return the gradient of the scale.

        Of one number for all it is summed where vectors are projected: the scores' gradient is
        ``P_ij scale``, and ``sum_ij P_ij S_ij = sum_i <x_i, total_i>``. `gradient_kernel` then has
        1,118 instructions after its products on sm_90 (``PYTHONPATH=tests python -m
        support.gpu_compiler 90``); with sums by anchor it had 1,654.
        """
        question = self.run.question
        if self.by_factor is not None:
            return of_value(question.scale, self.by_factor)
        assert self.total is not None
        return of_value(question.scale, self.total.values[-1])

    def of_shift(self) -> Tensor:
        """Return the gradient of the shift."""
        assert self.total is not None
        return of_value(self.run.question.shift, self.total.values[0])


def of_value(value: Value | None, parts: Tensor) -> Tensor:
    """Return the gradient of a scale or a shift from its parts (A,)."""
    assert isinstance(value, Tensor)
    if not has_each(value):
        parts = parts.sum(0, keepdim=True)
    return parts.reshape(value.shape)


def score_gradient(
    kernel: GradientKernel, needs: Needs, listed: ListedPairs | None
) -> Tensor | None:
    """Return the gradient (N, M) of scores that were passed in, if it is needed."""
    run = kernel.run
    out = None
    panel = kernels.Panel()
    if needs.scores:
        out = torch.empty(run.shape, dtype=torch.float32, device=run.device)
    for places in run.blocks(kernel.planes):
        if out is not None:
            panel = part_of(out, places)
        kernel.write(places, panel)
    if out is not None and listed is not None:
        listed.add_to_(out)
    return out


def embedding_gradients(
    kernel: GradientKernel, needs: Needs, listed: ListedPairs | None
) -> dict[int, Tensor]:
    """Return the gradients of the rows (0) and of the columns (1), if they are needed.

    They are products with gradients of panels of scores.
    """
    sides = vector_gradients(kernel.run.inputs, needs, kernel.factor, listed)
    kernel.by_factor = sides[0].by_factor
    for outer, *held in visits(sides):
        visit(kernel, outer, held)
    return {side.side: side.out for side in sides}


def vector_gradients(
    inputs: Inputs,
    needs: Needs,
    factor: kernels.PerAnchor | None,  # by which sums are multiplied at the end
    listed: ListedPairs | None,
    grad: kernels.PerAnchor | None = None,  # of anchors, by which they are, too
) -> list[VectorGradient]:
    """Return the gradients of the sides that need one; the first has the factor's, if needed."""
    vectors = vectors_of(inputs.rows), vectors_of(inputs.cols)
    found: list[VectorGradient] = []
    for side, needed in enumerate((needs.rows, needs.cols)):
        if needed:
            dtype = needs.dtypes[side]
            found.append(VectorGradient(vectors, side, dtype, factor, listed, grad))
    if needs.scale and factor is not None:
        found[0].by_factor = found[0].out.new_empty(len(found[0].out), dtype=torch.float32)
    return found


def visits(sides: list[VectorGradient]) -> list[list[VectorGradient]]:
    """Return the gradients that each visit of the scores completes.

    Sums of the smaller side are held to the end of a visit, unless they take too much memory. Then
    scores are visited twice, which is 10 in place of 8 multiples of NMD for InfoNCE of 65536 x
    65536 x 768 (pytest tests/engine/test_triton_costs.py -k products).
    """
    larger_first = sorted(sides, key=lambda side: -side.out.numel())
    smaller = larger_first[-1].out
    if smaller.dtype == torch.float32 or smaller.numel() * 4 <= held_bytes(smaller.device):
        return [larger_first]
    return [[side] for side in sides]


def held_bytes(device: torch.device) -> int:
    """Return how many bytes of float32 sums of gradients may be held."""
    return max(HELD_AT_LEAST, memory_of(device) // HELD_SHARE)


@functools.cache
def memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU's memory; 0 for other devices."""
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).total_memory


def visit(kernel: GradientKernel, outer: VectorGradient, held: list[VectorGradient]) -> None:
    """Complete the gradient of the outer side and, if it is held, of the inner side.

    Each panel of the outer side visits all of the inner side, so that its sums are complete before
    the next panel.
    """
    run = kernel.run
    steps = run.steps(run.panel_size)
    inner_side = 1 - outer.side
    for gradient in held:
        gradient.start(slice(0, run.shape[inner_side]))
    for o in spans(run.shape[outer.side], steps[outer.side]):
        outer.start(o)
        for i in spans(run.shape[inner_side], steps[inner_side]):
            places = (i, o) if outer.side else (o, i)
            add_panel(kernel, places, [outer, *held])
        outer.finish()
    for gradient in held:
        gradient.finish()


def add_panel(kernel: GradientKernel, places: Places, gradients: list[VectorGradient]) -> None:
    """Write the gradient of a block's inner products, and add its products with vectors."""
    run = kernel.run
    panel = run.panels.block(places)
    # It may hold the products, too: a tile is loaded before it is stored.
    kernel.write(places, padded(panel))
    unit: Tensor | None = None
    if run.halves is not None:
        half = run.halves.block(places)
        unit = round_to_half(panel, half)
        panel = half
    for gradient in gradients:
        gradient.add(places, panel, unit)


class VectorGradient:
    """The gradient of one side's vectors, in parts that are summed one after the other."""

    part: slice
    total: Tensor  # (r, D) float32 sums of the part

    def __init__(
        self,
        vectors: tuple[kernels.Vectors, kernels.Vectors],  # of both sides
        side: int,
        dtype: torch.dtype,  # of the gradient
        factor: kernels.PerAnchor | None,
        listed: ListedPairs | None,
        grad: kernels.PerAnchor | None,
    ):
        self.vectors = vectors[side]
        self.others = vectors[1 - side]
        assert self.vectors.x is not None and self.others.x is not None
        self.side = side
        self.factor = factor
        self.grad = grad
        self.by_factor: Tensor | None = None  # (N,), where this side has the factor's gradient
        self.partners = self.others.x  # (M, D)
        self.out = self.vectors.x.new_empty(self.vectors.x.shape, dtype=dtype)
        self.listed = kernels.Listed()
        if listed is not None:
            self.listed = sorted_by(side, listed, len(self.out))

    def start(self, part: slice) -> None:
        """Begin the sums of some of the vectors, in place if the gradient is float32."""
        self.part = part
        self.total = rows_of(self.out, part)
        if self.out.dtype != torch.float32:
            self.total = torch.empty_like(self.total, dtype=torch.float32)
        if len(self.partners) == 0:  # there is no product, the first of which overwrites
            self.total.zero_()

    def add(self, places: Places, panel: Tensor, unit: Tensor | None) -> None:
        """Add the product of a panel (r, c) of gradients, in a unit (), with partners' vectors."""
        own = places[self.side]
        others = places[1 - self.side]
        first = self.part.start
        total = rows_of(self.total, slice(own.start - first, own.stop - first))
        by_own = panel.T if self.side else panel
        add_product_(total, by_own, rows_of(self.partners, others), unit, others.start == 0)

    def finish(self) -> None:
        """Write the gradients of the part, from its sums and from listed pairs."""
        count, dim = self.total.shape
        launch_each(
            kernels.project_kernel,
            count,
            dim,
            self.vectors,
            self.others,
            kernels.Vectors(self.total, dim, None),
            self.part.start,
            self.factor,
            self.by_factor,
            self.grad,
            self.listed,
            self.out,
        )
        del self.total  # before the next sums take memory


def sorted_by(side: int, listed: ListedPairs, size: int) -> kernels.Listed:
    """Return listed pairs as `project_kernel` takes them, sorted by the vectors of a side."""
    index = listed.rows, listed.cols
    own = index[side]
    grad = listed.grad.contiguous()
    if own is None:
        return kernels.Listed(grad)
    own, order = torch.sort(own, stable=True)
    start = torch.searchsorted(own, torch.arange(size + 1, device=own.device))
    return kernels.Listed(grad, start, order, index[1 - side])


# ------------------------------------------------------------------- sums along with their gradient


def may_find_early(
    question: Question,
    like: Tensor,  # embeddings
    rows: Tensor | None,  # (N, D) what gets a gradient of the rows, and of the columns
    cols: Tensor | None,
    is_total: bool,
) -> bool:
    """Return whether sums, or their weighted total, may come with their gradient by vectors.

    It has to be multiplied later: that of a total by one number, and so by the scale, that of sums
    by a number for each anchor, which no candidate's gradient could be. Its float32 sums have to
    fit into the part of the memory that they may take, until the backward pass. Float16 has one
    unit for a panel (`round_to_half`), in which the exponentials of some anchors would vanish
    before they are divided by their sums.
    """
    if is_total:
        is_possible = not has_each(question.scale)
    else:
        others = rows if question.sides == (1,) else cols
        constants = question.scale, question.shift, others
        is_possible = len(question.sides) == 1 and like.dtype != torch.float16
        is_possible = is_possible and not any([is_trained(x) for x in constants])
    held = 0
    for x in (rows, cols):
        if is_trained(x):
            held += 4 * x.numel()
    return is_possible and 0 < held <= held_bytes(like.device)


def sums_and_gradients(
    question: Question,
    inputs: Inputs,
    weights: Value | None,  # of the sums in their total, one or (A,); None: there is no total
    needs: Needs,
) -> tuple[Tensor, EarlyGradients]:
    """Return the sums (A,), or their () weighted total, and what their gradients are made of.

    Scores are visited once: 6 multiples of NMD in products for 8 to 10 where the gradient is found
    in the backward pass, 4 for 6 where one side is trained (pytest
    tests/engine/test_triton_costs.py -k products).
    """
    run = Pass(question, inputs, kernels.FORMS[question.term])
    kernel = GradientKernel(run, 1.0 if weights is None else weights, needs, with_total=True)
    own_needs = needs._replace(scale=False, dtypes=(torch.float32, torch.float32))
    sides = vector_gradients(inputs, own_needs, None, None)
    for gradient in sides:
        gradient.start(slice(0, len(gradient.out)))
    with torch.cuda.device_of(run.like):
        for places in run.parts(run.panel_size):
            add_panel(kernel, places, sides)
    assert kernel.total is not None
    sums = {gradient.side: gradient.total for gradient in sides}
    shift = kernel.of_shift() if needs.shift else None
    found = kernel.total.values[-1]
    if weights is not None:
        found = found.sum()
    return found, EarlyGradients(sums.get(0), sums.get(1), shift)


def completed_gradients(
    question: Question,
    inputs: Inputs,
    early: EarlyGradients,
    grad: Tensor,  # (A,) of the sums, or () of their total
    needs: Needs,
    listed: ListedPairs | None,
) -> Gradients:
    """Return the gradients of a question's inputs and values, from the gradient of its sums."""
    factor = None if has_each(question.scale) else per_anchor(question.scale)
    # Of sums of anchors, their own vectors alone are trained.
    sides = vector_gradients(inputs, needs, factor, listed, per_anchor(grad))
    scale: Tensor | None = None
    for gradient in sides:
        sums = early.cols if gradient.side else early.rows
        assert sums is not None
        gradient.part = slice(0, len(sums))
        gradient.total = sums
        gradient.finish()
        if gradient.by_factor is not None:
            scale = of_value(question.scale, gradient.by_factor) * grad
    of_sides = {gradient.side: gradient.out for gradient in sides}
    return Gradients(
        rows=of_sides.get(0),
        cols=of_sides.get(1),
        scale=scale,
        shift=None if early.shift is None else early.shift * grad,
    )


# --------------------------------------------------------------------------------- a pass' launches


NOTHING_LOADED = kernels.Loaded(kernels.Panel())


class Pass:
    """A question of some inputs as kernels take it, prepared once for all launches."""

    def __init__(self, question: Question, inputs: Inputs, form: triton.JITFunction):
        self.question = question
        self.inputs = inputs
        self.form = form  # of the terms, see `kernels.FORMS`
        self.shape = question.relation.shape
        self.compared = compared(question.relation)
        #: Vectors or scores, for their dtype and device.
        self.like = inputs.like
        self.device = self.like.device
        self.matrix = None if inputs.scores is None else inputs.scores.contiguous()
        self.fused = self.matrix is None and fused(self.like, inputs.cols.like)
        self.tile = tile_config(self.shape, self.fused)
        #: The numbers of row 0 and of column 0 among the anchors.
        self.first_anchor = (0, self.shape[0] if 0 in question.sides else 0)
        dtype = self.like.dtype
        panel_dtype = torch.float32
        bytes_per_score = 4
        #: Float16 copies of panels, for products with float16 vectors.
        self.halves: Workspace | None = None
        if self.fused and dtype == torch.float16:
            self.halves = Workspace(torch.float16, self.device)
            bytes_per_score = 6
        elif self.fused and dtype == torch.bfloat16 and not INTERPRETED:
            panel_dtype = torch.bfloat16
            bytes_per_score = 2
        self.panels = Workspace(panel_dtype, self.device)
        self.panel_size = PANEL // bytes_per_score  # number of scores
        self.kernel_values = self._kernel_values()
        self.kernel_inputs = self._kernel_inputs()
        self.config = self._config()

    def _config(self) -> kernels.Config:
        """Return the compile-time constants of the launches."""
        question = self.question
        return kernels.Config(
            BLOCK_M=self.tile.block_m,
            BLOCK_N=self.tile.block_n,
            BLOCK_K=self.tile.block_k,
            PARTS=self.tile.parts,
            WHOLE_STEPS=self.kernel_inputs.dim % self.tile.block_k == 0,
            OVER=question.over,
            IDS=self.compared.ids[0] is not None,
            GROUPS=self.compared.rule,
            SHARED=question.is_shared,
            ROWS=0 in question.sides,
            COLS=1 in question.sides,
            BASE_2=self.form in (kernels.exponential, kernels.information),
        )

    def _kernel_inputs(self) -> kernels.Inputs:
        """Return the inverse norms, ids, groups and, if kernels multiply them, the embeddings."""
        found: list[kernels.Vectors] = []
        dim = 0
        sides = self.inputs.rows, self.inputs.cols
        for side, ids, groups in zip(sides, self.compared.ids, self.compared.groups, strict=True):
            x: Tensor | None = None
            stride = 0
            if self.fused:
                assert side.x is not None
                x = aligned(side.x)
                stride, dim = x.stride(0), x.shape[1]
            found.append(kernels.Vectors(x, stride, side.inv, ids, groups))
        return kernels.Inputs(found[0], found[1], dim)

    def _kernel_values(self) -> kernels.Values:
        """Return the scale, the shift and the limits."""
        question = self.question
        limits: list[kernels.PerAnchor | None] = []
        for value in (question.shift, question.below, question.above):
            limits.append(None if value is None else per_anchor(value))
        return kernels.Values(per_anchor(question.scale), *limits)

    def blocks(self, planes: int = 1) -> list[Places]:
        """Return the rows and columns of blocks, smaller ones for more planes of sums of tiles."""
        size = BLOCK // max(1, planes)
        multiplies = self.matrix is None and not self.fused  # by cuBLAS, panel by panel
        if multiplies or self.compared.mask:
            size = min(size, self.panel_size)
        return self.parts(size)

    def parts(self, size: int) -> list[Places]:
        """Return the rows and columns of parts of the matrix with ``size`` scores at most."""
        n, m = self.shape
        height, width = self.steps(size)
        return [(rows, cols) for rows in spans(n, height) for cols in spans(m, width)]

    def steps(self, size: int) -> tuple[int, int]:
        """Return the numbers of rows and of columns of parts with ``size`` scores at most."""
        height = min(BLOCK_ROWS, whole_tiles(self.shape[0] + 127))
        return height, whole_tiles(size // height)

    def loaded(self, places: Places) -> kernels.Loaded:
        """Return the panels of a block that kernels read."""
        if self.fused and not self.compared.mask:
            return NOTHING_LOADED
        products = self.products(places)
        if not self.compared.mask:
            return kernels.Loaded(products)
        excluded = self.question.relation.excluded(self.question.over, *places)
        if excluded is None:
            excluded = torch.zeros(sizes(places), dtype=torch.bool, device=self.device)
        mask = excluded.view(torch.uint8)
        return kernels.Loaded(products, kernels.Panel(mask, mask.stride(0), mask.shape[1]))

    def products(self, places: Places) -> kernels.Panel:
        """Return a block's (r, c) float32 inner products, or scores; none if kernels multiply."""
        if self.matrix is not None:
            return part_of(self.matrix, places)
        if self.fused:
            return kernels.Panel()
        rows, cols = places
        x = self.inputs.rows.like[rows].float()
        y = self.inputs.cols.like[cols].float()
        return padded(torch.mm(x, y.T, out=self.panels.block(places)))

    def launch(
        self,
        kernel: triton.JITFunction,
        config: kernels.Config,
        places: Places,
        total: AnchorTotals | None,  # to which the partial results of the kernel are added
        *more: object,  # further arguments of the kernel
    ) -> None:
        """Run a program for each tile of a block."""
        rows, cols = places
        size_m = rows.stop - rows.start
        size_n = cols.stop - cols.start
        tile = self.tile
        grid_m = -(-size_m // tile.block_m)
        grid_n = -(-size_n // tile.block_n)
        partials: Partials = (None, None)
        if total is not None:
            partials = total.partials((grid_n * tile.parts, grid_m), (size_m, size_n))
        kernel[(grid_m * grid_n,)](
            self.kernel_inputs,
            self.loaded(places),
            rows.start,
            cols.start,
            size_m,
            size_n,
            self.first_anchor[1],
            self.kernel_values,
            *partials,
            *more,
            FORM=self.form,
            C=config,
            **self._options(config),
        )
        if total is not None:
            total.add(places, partials)

    def _options(self, config: kernels.Config) -> dict[str, int]:
        """Return the compiler's options."""
        tile = self.tile
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        # Gradients that are summed by anchor, from both sides of a tile, would spill with a limit.
        sums_values = config.GRAD_SCALE or config.GRAD_SHIFT or config.TOTAL
        many = sums_values and not config.SHARED and config.ROWS and config.COLS
        if tile.registers is not None and not many and compute_capability(self.device) == 9:
            options["maxnreg"] = tile.registers
        return options


class Workspace:
    """Memory for blocks (r, c), the same for all. Its first block is the largest.

    Rows begin at multiples of 64 entries, aligned for fast products.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device
        self.space: Tensor | None = None

    def block(self, places: Places) -> Tensor:
        """Return the memory of a block (r, c)."""
        r, c = sizes(places)
        stride = -(-c // 64) * 64
        if self.space is None:
            self.space = torch.empty(r, stride, dtype=self.dtype, device=self.device)
        if self.space.shape == (r, c):
            return self.space
        return self.space.as_strided((r, c), (stride, 1))


#: The results of a block's tiles (K, parts, anchors), for its rows and for its columns.
Partials = tuple[Tensor | None, Tensor | None]


class AnchorTotals:
    """The (K, A) sums or maxima of all anchors, joined in the order of the tiles: deterministic."""

    def __init__(self, run: Pass, width: int, sides: Sequence[int], reduction: Reduction):
        self.run = run
        self.sides = sides
        self.reduction = reduction
        size = sum([run.shape[side] for side in sides])
        self.values = torch.empty(width, size, dtype=torch.float32, device=run.device)
        if reduction is MOMENTS or 0 in run.shape:  # in which there is no tile
            self.values.fill_(reduction.empty)

    def partials(self, parts: tuple[int, int], sizes: tuple[int, int]) -> Partials:
        """Return buffers for the results of a block's tiles, of so many parts and anchors."""
        found: list[Tensor | None] = [None, None]
        for side in self.sides:
            found[side] = self.values.new_empty(len(self.values), parts[side], sizes[side])
        return found[0], found[1]

    def add(self, places: Places, partials: Partials) -> None:
        """Add the results of a block's tiles; the first block of an anchor overwrites."""
        reduce, join, *_ = self.reduction
        for side in self.sides:
            partial = partials[side]
            assert partial is not None
            first = self.run.first_anchor[side]
            total = self.values
            if partial.shape[-1] < total.shape[1]:
                total = total[:, first + places[side].start : first + places[side].stop]
            if self.reduction is MOMENTS:
                join_moments(partial, total)
            elif places[1 - side].start == 0:
                reduce(partial, 1, out=total)
            else:
                join(total, reduce(partial, 1), out=total)


def join_moments(partial: Tensor, total: Tensor) -> None:
    """Join the moments (3, parts, r) of a block's tiles with those of the blocks before (3, r)."""
    _, parts, size = partial.shape
    kernels.join_moments_kernel[(-(-size // MOMENTS_AT_ONCE),)](
        partial,
        parts,
        size,
        total,
        total.stride(0),
        PARTS=64,  # type: ignore[arg-type]
        ANCHORS=MOMENTS_AT_ONCE,  # type: ignore[arg-type]
    )


def tile_config(shape: tuple[int, int], multiplies: bool) -> TileConfig:
    """Return the tiles of kernels that multiply embeddings, or that read scores (N, M)."""
    if not multiplies:
        return READING_TILE
    has_many = math.prod(shape) >= MANY
    return PRODUCT_TILES[0] if has_many else PRODUCT_TILES[-1]


def fused(rows: Tensor, cols: Tensor) -> bool:
    """Return whether kernels multiply embeddings like these themselves."""
    return rows.dtype == cols.dtype != torch.float32


def pair_scores(inputs: Inputs, i: Index, j: Index) -> Tensor:
    """Return the (P,) scores of rows i with columns j, as :func:`.pair_scores.pair_scores`.

    One launch in place of four, or of ten where pairs are listed (pytest
    tests/engine/test_triton_costs.py -k launches).
    """
    if inputs.scores is not None:
        return of_pairs.pair_scores(inputs, i, j)
    rows = vectors_of(inputs.rows)
    cols = vectors_of(inputs.cols)
    if i is not None and j is not None:
        i, j = i.contiguous(), j.contiguous()
    size, dim = inputs.like.shape
    count = size if i is None else len(i)
    scores = torch.empty(count, dtype=torch.float32, device=inputs.like.device)
    launch_each(kernels.pair_scores_kernel, count, dim, rows, cols, i, j, scores)
    return scores


def inverse_norms(x: Tensor) -> Tensor:
    """Return the (N, 1) inverse norms of vectors (N, D), as :func:`.vectors.inverse_norms`.

    One launch in place of three (pytest tests/engine/test_triton_costs.py -k launches).
    """
    count, dim = x.shape
    inv = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    vectors = vectors_of(NO_SIDE._replace(x=x))
    launch_each(kernels.inverse_norms_kernel, count, dim, vectors, inv)
    return inv


def launch_each(kernel: triton.JITFunction, count: int, dim: int, *given: object) -> None:
    """Run a program for each of so many vectors (dim,), or pairs of them."""
    if count == 0:
        return
    block = triton.next_power_of_2(dim)
    # With 4 warps, 16384 dimensions are 128 registers a vector, and spill.
    warps = min(32, max(4, block // 512))
    *_, out = given
    assert isinstance(out, Tensor)
    with torch.cuda.device_of(out):
        kernel[(count,)](*given, dim=dim, BLOCK_D=block, num_warps=warps)


def vectors_of(side: Side) -> kernels.Vectors:
    """Return a side's vectors, each of which is contiguous in memory."""
    x = side.x
    assert x is not None
    if x.stride(1) != 1:
        x = x.contiguous()
    return kernels.Vectors(x, x.stride(0), side.inv)


def per_anchor(value: Value) -> kernels.PerAnchor:
    """Return a number, or numbers (1,) or (A,), as kernels take them."""
    if not isinstance(value, Tensor):
        return kernels.PerAnchor(None, 0, float(value))
    return kernels.PerAnchor(value, value.stride(-1) if value.numel() > 1 else 0)


def part_of(matrix: Tensor, places: Places) -> kernels.Panel:
    """Return a part of a matrix; beyond its columns are others, which may not be accessed."""
    x = matrix[places]
    return kernels.Panel(x, x.stride(0), x.shape[1])


def padded(buffer: Tensor) -> kernels.Panel:
    """Return a buffer (r, c) whose rows may be accessed up to their stride."""
    return kernels.Panel(buffer, buffer.stride(0), buffer.stride(0))


def rows_of(x: Tensor, part: slice) -> Tensor:
    """Return some rows of a tensor (N, ...); all of them are no view."""
    return x if part.stop - part.start == len(x) else x[part]


def sizes(places: Places) -> tuple[int, int]:
    """Return the numbers of rows and columns of a block."""
    rows, cols = places
    return rows.stop - rows.start, cols.stop - cols.start


def spans(size: int, step: int) -> list[slice]:
    """Return slices of at most ``step`` entries."""
    return [slice(start, min(size, start + step)) for start in range(0, size, step)]


def whole_tiles(size: int) -> int:
    """Return ``size`` rounded down to whole tiles of any config.

    Products then round alike wherever a block begins.
    """
    return max(size // 128 * 128, 128)


@functools.cache
def compute_capability(device: torch.device) -> int:
    """Return the major number of an NVIDIA GPU's compute capability; 0 for other devices."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    return torch.cuda.get_device_capability(device)[0]


def aligned(x: Tensor) -> Tensor:
    """Return embeddings that can be loaded 16 bytes at a time.

    Dimensions that are no multiple of 8 are copied with zeros behind them, which change no product.
    """
    if INTERPRETED:
        x = x.float()
    whole_loads = x.shape[1] % 8 == 0
    starts_aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    if whole_loads and x.stride(1) == 1 and starts_aligned:
        return x
    return torch.nn.functional.pad(x, (0, -x.shape[1] % 8)).contiguous()


def round_to_half(panel: Tensor, out: Tensor) -> Tensor:
    """Write a float32 panel (r, c) in float16, in units of the result (): the largest one is 2^15.

    Gradients and exponentials can leave the range of float16, hence the unit. Entries down to 2^-29
    of the panel's largest one keep float16's 11 bits; the error of smaller ones is at most 2^-40
    of the largest. So a row has half precision relative to its own size, even if that is 2^-28 of
    the largest row's. What is not finite does not count, and stays what it is.

    One unit serves both products of a panel: that takes 18 bytes of memory traffic a score, where
    a unit for each row and product took 28; bfloat16 takes 6 (pytest
    tests/engine/test_triton_costs.py -k traffic).
    """
    of_rows = torch.linalg.vector_norm(panel, math.inf, 1)  # nan only in rows that have one
    largest = of_rows.nan_to_num_(0.0, posinf=0.0).amax()
    unit = largest.mul_(2.0**-15).clamp_min_(1e-30)
    torch.div(panel, unit, out=out)
    return unit


def add_product_(
    total: Tensor,  # (r, D) float32
    panel: Tensor,  # (r, c)
    other: Tensor,  # (c, D)
    unit: Tensor | None = None,  # () of the panel's entries
    is_first: bool = False,  # the product overwrites the sums
) -> None:
    """Add ``panel @ other``, times the unit, to float32 sums."""
    if other.dtype == torch.bfloat16:  # it has the range of float32
        panel = panel.to(other.dtype)
    if unit is None:
        _addmm(total, panel, other, 1 - is_first)
    elif is_first:
        torch.mul(_mm(panel, other), unit, out=total)
    else:
        total.addcmul_(_mm(panel, other), unit)


def _addmm(total: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """Write ``beta total + a @ b``, accumulated in float32, to float32 sums.

    With beta 0, whatever the sums are does not count.
    """
    if a.dtype == torch.float32 or a.device.type not in MULTIPLY_HALF:
        total.addmm_(a.float(), b.float(), beta=beta)
    elif ADDMM_WIDENS:
        with float32_accumulation(a.dtype):
            torch.addmm(total, a, b, beta=beta, out_dtype=torch.float32, out=total)
    elif beta:  # older addmm takes only a half-precision total
        total.add_(_mm(a, b))
    else:
        total.copy_(_mm(a, b))


def _mm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of half-precision matrices in float32."""
    if a.device.type not in MULTIPLY_HALF:
        return matmul(a.float(), b.float())
    with float32_accumulation(a.dtype):
        return torch.mm(a, b, out_dtype=torch.float32)


def float32_accumulation(dtype: torch.dtype) -> contextlib.AbstractContextManager[None]:
    """Return a context in which products of a dtype are accumulated in float32."""
    return float16_with_float32_sums() if dtype == torch.float16 else NO_CONTEXT


@contextlib.contextmanager
def float16_with_float32_sums() -> Iterator[None]:
    """Return a context in which float16 products are accumulated in float32.

    A model may have allowed float16 for its own products; here it would overflow.
    """
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_accumulation
    flags.allow_fp16_accumulation = False
    try:
        yield
    finally:
        flags.allow_fp16_accumulation = before
