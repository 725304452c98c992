"""The autograd functions of the engine: the scores of small matrices, and sums over any matrix.

The gradient of sums is in closed form: :func:`itrloss.engine.tiled.gradients`, or Triton's. As one
node, the sums and the positives add their gradients to the same tensors, so that backward holds one
gradient of all embeddings less at a time: 34 MB of 105 for InfoNCE at 8192 x 8192 x 512 (``pytest
tests/engine/test_costs.py -k memory``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import dense, tiled
from .inputs import NO_INPUTS, NUMBER_OF_TENSORS, Inputs, Side, whole_scores
from .pair_scores import Index, ListedPairs, pair_scores
from .products import add_matmul_, matmul
from .question import Question, Value, is_trained
from .relation import weighted_sums
from .tiled import Gradients, Needs
from .vectors import EPS, compute_dtype, full_precision, may_keep, plain_unit

# ----------------------------------------------------------------------- the scores of a small step


#: Where a small matrix has its rows, among the vectors that are trained, and its columns, among all
#: vectors of a step; NO_COLUMNS if they are a memory's.
Place = tuple[slice, slice]
# Not None: code that compares a slice with it is compiled again for each batch size.
NO_COLUMNS = slice(0, 0)


class Layout(NamedTuple):
    """The vectors of a step, (T, D) that are trained and then constants, and its small matrices."""

    trained: int  # T
    normalize: bool
    places: tuple[Place, ...]

    def columns(self, k: int, unit: Tensor, memories: Sequence[Tensor | None]) -> Tensor:
        """Return the columns (M, D) of a matrix."""
        memory = memories[k]
        if memory is not None:
            return memory.to(unit.dtype)
        _, cols = self.places[k]
        return unit[cols]


class StepScores(torch.autograd.Function):
    """All vectors of a step at unit length, and the scores of its small matrices.

    One node, with one buffer for all gradients: large terms that cancel are added up in float32
    before they are rounded, and are taken back to the embeddings at once. With a node for each side
    and each matrix, M-DCL at 32 x 256 x 256 takes 1.3 times as many launches (``python -m
    benchmarks.launches``).
    """

    @staticmethod
    def forward(
        ctx: Any,
        layout: Layout,
        memories: Sequence[Tensor | None],  # (M, D) of each matrix
        *vectors: Tensor,  # (N, D) each
    ) -> tuple[Tensor, ...]:
        """Return the unit vectors (V, D), and the scores (N, M) of each matrix."""
        with full_precision(vectors[0]):
            unit = torch.cat(vectors).to(compute_dtype(vectors[0]))
            norms: Tensor | None = None
            if layout.normalize:
                lengths = torch.linalg.vector_norm(unit, 2, 1, True)
                norms = torch.threshold(lengths, EPS, math.inf)
                unit.div_(norms)
            scores = []
            for k, (rows, _) in enumerate(layout.places):
                columns = layout.columns(k, unit, memories)
                scores.append(matmul(unit[rows], columns.T))
        ctx.set_materialize_grads(False)
        trained: list[Tensor | None] = []
        ctx.sizes = []
        for x, needs_gradient in zip(vectors, ctx.needs_input_grad[2:], strict=True):
            trained.append(x if needs_gradient else None)
            ctx.sizes.append(x.shape[0])
        ctx.save_for_backward(unit, norms, *memories, *trained)
        ctx.layout = layout
        return unit, *scores

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Return the gradients of the vectors from those of the unit vectors and of the scores."""
        grad, *of_scores = grads
        layout: Layout = ctx.layout
        needed = ctx.needs_input_grad[2:]
        if grads == (None,) * len(grads):
            return None, None, *(None,) * len(needed)
        unit, norms, *rest = saved_tensors(ctx)
        memories = rest[: len(layout.places)]
        vectors = rest[len(layout.places) :]
        sizes = ctx.sizes
        if torch.is_grad_enabled():  # create_graph=True
            parts = unit.split(sizes)
            known = [
                y.detach() if x is None else plain_unit(x, layout.normalize)
                for x, y in zip(vectors, parts, strict=True)
            ]
            outputs = scores_of_units(layout, memories, known)
            return None, None, *second_gradients(outputs, (grad, *of_scores), vectors)
        with full_precision(unit):
            total = gradient_of_units(
                layout, unit, memories, grad, of_scores, starts_of(sizes, needed)
            )
            trained = unit[: layout.trained]
            if norms is not None:
                along = (trained * total).sum(1, keepdim=True)
                total.addcmul_(trained, along, value=-1).div_(norms[: layout.trained])
        of_vectors: list[Tensor | None] = []
        first = 0
        for x, size in zip(vectors, sizes, strict=True):
            part = total[first : first + size]
            of_vectors.append(None if x is None else part.to(x.dtype))
            first += size
        return None, None, *of_vectors


def starts_of(sizes: Sequence[int], needed: Sequence[bool]) -> set[int]:
    """Return where the vectors begin, among all of a step, that get a gradient."""
    starts = set()
    first = 0
    for size, is_needed in zip(sizes, needed, strict=True):
        if is_needed:
            starts.add(first)
        first += size
    return starts


def gradient_of_units(
    layout: Layout,
    unit: Tensor,  # (V, D)
    memories: Sequence[Tensor | None],
    grad: Tensor | None,  # (V, D)
    of_scores: Sequence[Tensor | None],  # (N, M) of each matrix
    starts: set[int],  # where vectors begin that get a gradient
) -> Tensor:
    """Return the gradient (T, D) of the unit vectors that are trained, a new tensor."""
    trained = unit[: layout.trained]
    total = torch.zeros_like(trained) if grad is None else grad[: layout.trained].clone()
    for k, ((rows, cols), g) in enumerate(zip(layout.places, of_scores, strict=True)):
        if g is None:
            continue
        if rows.start in starts:
            add_matmul_(total[rows], g, layout.columns(k, unit, memories))
        if memories[k] is None and cols.start in starts:
            add_matmul_(total[cols], g.T, unit[rows])
    return total


def step_scores(
    layout: Layout, memories: Sequence[Tensor | None], *vectors: Tensor
) -> tuple[Tensor, ...]:
    """Return what :class:`StepScores` does, in plain PyTorch: its specification."""
    return scores_of_units(layout, memories, [plain_unit(x, layout.normalize) for x in vectors])


def scores_of_units(
    layout: Layout, memories: Sequence[Tensor | None], units: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the unit vectors (V, D) of a step in one tensor, and the scores of its matrices."""
    unit = torch.cat(list(units))
    scores = []
    with full_precision(unit):
        for k, (rows, _) in enumerate(layout.places):
            scores.append(unit[rows] @ layout.columns(k, unit, memories).T)
    return unit, *scores


class Step:
    """The vectors of a step and its small matrices, whose scores are computed when one is asked."""

    def __init__(
        self, layout: Layout, memories: Sequence[Tensor | None], vectors: Sequence[Tensor]
    ):
        self.layout = layout
        self.memories = memories
        self.vectors = vectors
        self._known: tuple[Tensor, ...] | None = None
        self._vectors_alone: Step | None = None
        self._detached: Step | None = None

    def detach(self) -> Step:
        """Return the same step without a gradient, one for all of its matrices."""
        if not any([x.requires_grad for x in self.vectors]):
            return self
        if self._detached is None:
            vectors = [x.detach() for x in self.vectors]
            self._detached = Step(self.layout, self.memories, vectors)
            if self._known is not None:
                self._detached._known = tuple([x.detach() for x in self._known])
        return self._detached

    def unit(self) -> Tensor:
        """Return the unit vectors (V, D) with their graph; no matrix is multiplied for them."""
        if self._known is not None or not self.layout.places:
            return self.outputs()[0]
        if self._vectors_alone is None:
            self._vectors_alone = Step(self.layout._replace(places=()), (), self.vectors)
        return self._vectors_alone.outputs()[0]

    def outputs(self) -> tuple[Tensor, ...]:
        """Return the unit vectors (V, D), and the scores (N, M) of each matrix, with their graph.

        They have it even if they are first used under ``no_grad``.
        """
        if self._known is not None:
            return self._known
        keep = may_keep()
        with torch.set_grad_enabled(keep):
            outputs = self._computed()
        if keep:
            self._known = outputs
        return outputs

    def _computed(self) -> tuple[Tensor, ...]:
        """Return :meth:`outputs`, from one node or, when compiled, in plain PyTorch."""
        if torch.compiler.is_compiling():
            return step_scores(self.layout, self.memories, *self.vectors)
        return StepScores.apply(self.layout, self.memories, *self.vectors)  # type: ignore[return-value]


class StepPart(NamedTuple):
    """A small matrix of a step: its number, and where its vectors are among the unit vectors."""

    step: Step
    number: int | None  # None: its scores are no output of the step
    rows: slice
    cols: slice  # NO_COLUMNS: a memory's

    @property
    def of_memory(self) -> bool:
        """Whether the columns are a memory's."""
        return self.number is not None and self.step.memories[self.number] is not None

    def detach(self) -> StepPart:
        """Return the same part of a step without a gradient."""
        return self._replace(step=self.step.detach())

    def scores(self) -> Tensor:
        """Return the (N, M) scores with their graph."""
        unit, *scores = self.step.outputs()
        if self.number is not None:
            return scores[self.number]
        constant = unit.detach()  # a product with constants has the gradient of one side alone
        trained = self.step.layout.trained
        rows = unit if self.rows.start < trained else constant
        cols = unit if self.cols.start < trained else constant
        with full_precision(unit):
            return rows[self.rows] @ cols[self.cols].T

    def pairs(self, i: Index, j: Index, known: Tensor | None) -> Tensor:
        """Return the (P,) scores of rows i with columns j, with their graph; None: the diagonal.

        ``known``: these scores, if the matrix has them.
        """
        unit = self.step.unit()
        if i is None or j is None:
            return PairsOfUnits.apply(unit, self.rows, self.cols, known)  # type: ignore[return-value]
        places = i + self.rows.start, j + self.cols.start
        return PairsOfUnits.apply(unit, *places, known)  # type: ignore[return-value]


class PairsOfUnits(torch.autograd.Function):
    """The scores (P,) of pairs of unit vectors (V, D) of a step; their gradient forms no matrix."""

    @staticmethod
    def forward(
        ctx: Any, unit: Tensor, i: Tensor | slice, j: Tensor | slice, known: Tensor | None
    ) -> Tensor:
        """Return the products of the vectors at i and at j, (P,) indices or slices."""
        ctx.save_for_backward(unit, *[x if isinstance(x, Tensor) else None for x in (i, j)])
        ctx.slices = i, j
        if known is not None:
            return known.clone()
        with full_precision(unit):
            return torch.linalg.vecdot(unit[i], unit[j])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient (V, D) of the vectors."""
        (grad,) = grads
        unit, *index = saved_tensors(ctx)
        i, j = (x if y is None else y for x, y in zip(ctx.slices, index, strict=True))
        if torch.is_grad_enabled():  # create_graph=True
            scores = (unit[i] * unit[j]).sum(1)
            of_units = second_gradients([scores], [grad], [unit])[0]
            return of_units, None, None, None  # type: ignore[return-value]
        if isinstance(i, slice) or isinstance(j, slice):
            total = torch.zeros_like(unit)
            total[i].addcmul_(unit[j], grad[:, None])
            total[j].addcmul_(unit[i], grad[:, None])
            return total, None, None, None
        own = torch.cat([i, j])
        others = torch.cat([j, i])
        weights = torch.cat([grad, grad])
        return weighted_sums(unit, others, weights, own, len(unit)), None, None, None


# ------------------------------------------------------------------------- sums and scores of pairs


class Targets(NamedTuple):
    """What gets the gradient of embeddings and scores; None where there is nothing of the kind."""

    rows: Tensor | None = None  # (N, D)
    cols: Tensor | None = None  # (M, D)
    row_bias: Tensor | None = None  # (N,)
    col_bias: Tensor | None = None  # (M,)
    scores: Tensor | None = None  # (N, M)

    def any_trained(self) -> bool:
        """Return whether one of them gets a gradient."""
        return any([is_trained(x) for x in self])


class Request(NamedTuple):
    """A question of a matrix, or pairs whose scores are requested, or both."""

    question: Question | None
    inputs: Inputs
    guide: Inputs | None = None
    pairs: tuple[Index, Index] | None = None
    by_triton: bool = False
    keeps_slopes: bool = False  # of the only block

    def tensors(self) -> list[Tensor | None]:
        """Return all tensors of the request, which autograd is to save."""
        guide = NO_INPUTS if self.guide is None else self.guide
        tensors = [*self.inputs.tensors(), *guide.tensors(), *(self.pairs or (None, None))]
        if self.question is not None:
            for x in self.question.values:
                tensors.append(x if isinstance(x, Tensor) else None)
        return tensors

    def without_tensors(self) -> Request:
        """Return what is left of the request for :meth:`with_tensors`."""
        question = self.question
        if question is not None:
            plain: list[Value | None] = []
            for x in question.values:
                plain.append(None if isinstance(x, Tensor) else x)
            question = question.with_values(plain)
        guide = None if self.guide is None else NO_INPUTS
        pairs = None if self.pairs is None else (None, None)
        return Request(question, NO_INPUTS, guide, pairs, self.by_triton)

    def with_tensors(self, tensors: Sequence[Tensor | None]) -> Request:
        """Return the request again, with tensors as :meth:`tensors` has them."""
        question = self.question
        size = NUMBER_OF_TENSORS
        if question is not None:
            values: list[Value | None] = []
            for plain, tensor in zip(question.values, tensors[2 * size + 2 :], strict=True):
                values.append(plain if tensor is None else tensor)
            question = question.with_values(values)
        inputs = Inputs.of_tensors(tensors[:size])
        guide = None if self.guide is None else Inputs.of_tensors(tensors[size : 2 * size])
        i, j = tensors[2 * size : 2 * size + 2]
        return Request(
            question, inputs, guide, None if self.pairs is None else (i, j), self.by_triton
        )


class Answer(NamedTuple):
    """The sums (A,), the scores (P,) of pairs, and the slopes of the only block."""

    sums: Tensor | None = None
    pairs: Tensor | None = None
    slopes: Sequence[Tensor] = ()


def answer(request: Request) -> Answer:
    """Return what is requested, without a gradient."""
    inputs = request.inputs
    question = request.question
    with torch.no_grad(), full_precision(inputs.like):
        pairs = None if request.pairs is None else pair_scores(inputs, *request.pairs)
        if question is None:
            return Answer(pairs=pairs)
        if request.by_triton:
            from . import triton

            return Answer(triton.sums(question, inputs), pairs)
        if request.keeps_slopes:
            sums, slopes = tiled.sums_and_slopes(question, inputs)
            return Answer(sums, pairs, slopes)
        return Answer(tiled.sums(question, inputs, request.guide), pairs)


def ask(request: Request, targets: Targets) -> tuple[Tensor | None, Tensor | None]:
    """Return the sums (A,) and the scores (P,) of pairs, differentiable."""
    values: tuple[Value | None, ...] = ()
    if request.question is not None:
        values = request.question.values
    if not torch.is_grad_enabled():
        return answer(request._replace(keeps_slopes=False))[:2]
    if torch.compiler.is_compiling():
        if not any([is_trained(x) for x in (*targets, *values)]):
            return answer(request._replace(keeps_slopes=False))[:2]
        torch._dynamo.graph_break(
            "itrloss: tiles are visited outside of compiled graphs; "
            "fullgraph=True needs engine='dense'"
        )
    return Sums.apply(request, *targets, *values)  # type: ignore[return-value]


class Sums(torch.autograd.Function):
    """The sums (A,) and the scores (P,) of listed pairs; None for what is not requested."""

    @staticmethod
    def forward(
        ctx: Any,
        request: Request,
        rows: Tensor | None,
        cols: Tensor | None,
        row_bias: Tensor | None,
        col_bias: Tensor | None,
        scores: Tensor | None,
        *values: Value | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the sums (A,) and the scores (P,), from the request alone."""
        targets = rows, cols, row_bias, col_bias, scores
        sums, pairs, slopes = answer(request)
        ctx.save_for_backward(*targets, *slopes, *request.tensors())
        ctx.request = request.without_tensors()
        ctx.number_of_slopes = len(slopes)
        ctx.set_materialize_grads(False)  # a loss may use the sums alone, or the pairs alone
        return sums, pairs

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_sums: Tensor | None, grad_pairs: Tensor | None
    ) -> tuple[Any, ...]:
        """Return the gradient of each tensor that ``forward`` took, from the gradients of both."""
        if grad_sums is None and grad_pairs is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors = saved_tensors(ctx)
        targets = Targets(*tensors[:5])  # type: ignore[call-arg]
        stop = 5 + ctx.number_of_slopes
        slopes = tensors[5:stop]
        request: Request = ctx.request.with_tensors(tensors[stop:])
        if torch.is_grad_enabled():  # create_graph=True
            return None, *second_derivatives(request, targets, grad_sums, grad_pairs)
        needs = needs_of(request, targets, ctx.needs_input_grad)
        gradients = first_derivatives(request, needs, grad_sums, grad_pairs, slopes)
        return in_places(request, gradients)


def needs_of(request: Request, targets: Targets, needed: Sequence[bool]) -> Needs:
    """Return what a gradient is needed of, from the places of :meth:`Sums.forward`."""
    _, rows, cols, row_bias, col_bias, scores, *values = needed
    dtypes = torch.float32, torch.float32
    if targets.rows is not None and targets.cols is not None:
        dtypes = targets.rows.dtype, targets.cols.dtype
    if request.question is None:
        return Needs(rows, cols, row_bias, col_bias, scores, dtypes=dtypes)
    scale, shift, _, _, *params = values
    return Needs(rows, cols, row_bias, col_bias, scores, scale, shift, tuple(params), dtypes)


def in_places(request: Request, gradients: Gradients) -> tuple[Any, ...]:
    """Return gradients in the places of :meth:`Sums.forward`."""
    of_targets = gradients[:5]
    if request.question is None:
        return None, *of_targets
    return None, *of_targets, gradients.scale, gradients.shift, None, None, *gradients.params


def first_derivatives(
    request: Request,
    needs: Needs,
    grad_sums: Tensor | None,  # (A,)
    grad_pairs: Tensor | None,  # (P,)
    slopes: Sequence[Tensor] = (),
) -> Gradients:
    """Return the gradients from the gradients of the sums and of the pairs' scores."""
    question = request.question
    inputs = request.inputs
    listed = None
    if request.pairs is not None and grad_pairs is not None:
        listed = ListedPairs(*request.pairs, grad_pairs)
    with full_precision(inputs.like):
        if question is None or grad_sums is None:
            assert listed is not None
            return tiled.pair_gradients(inputs, needs, listed)
        if request.by_triton:
            from . import triton

            return triton.gradients(question, inputs, grad_sums, needs, listed)
        return tiled.gradients(question, inputs, request.guide, grad_sums, needs, listed, slopes)


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """Return what ``ctx`` saved; raise an error if one of the tensors was modified in place."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "embeddings, scores or a memory were modified in place before the backward pass of a "
            f"loss that needs them; enqueue a batch after its backward pass. PyTorch says: {error}"
        ) from error


# ------------------------------------------------------------------------------ second derivatives


def second_derivatives(
    request: Request, targets: Targets, grad_sums: Tensor | None, grad_pairs: Tensor | None
) -> list[Tensor | None]:
    """Return the gradients with a graph of their own, from plain PyTorch."""
    question = request.question
    pairs = request.pairs
    scores = plain_scores(request.inputs, targets)
    outputs: list[Tensor | None] = []
    values: tuple[Value | None, ...] = ()
    if question is not None:
        values = question.values
        other = None if request.guide is None else scores_of_guide(request.guide)
        outputs.append(None if grad_sums is None else dense.sums(question, scores, other))
    if pairs is not None:
        outputs.append(pairs_of(scores, *pairs))
    grads = [grad_sums] * (question is not None) + [grad_pairs] * (pairs is not None)
    return second_gradients(outputs, grads, [*targets, *values])


def scores_of_guide(guide: Inputs) -> Tensor:
    """Return the (N, M) scores of a guide, which may not hold them, without a gradient."""
    if guide.scores is not None:
        return guide.scores.detach()
    with torch.no_grad(), full_precision(guide.like):
        return whole_scores(guide.rows, guide.cols)


def second_gradients(
    outputs: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    places: Sequence[Value | None],
) -> list[Tensor | None]:
    """Return the gradients, with a graph of their own, of what is trained among ``places``."""
    trained = [x for x in places if is_trained(x)]
    known = [(y, g) for y, g in zip(outputs, grads, strict=True) if y is not None and g is not None]
    gradients = iter(
        torch.autograd.grad(
            [y for y, _ in known],
            trained,
            [g for _, g in known],
            create_graph=True,
            allow_unused=True,
        )
    )
    return [next(gradients) if is_trained(x) else None for x in places]


def plain_scores(inputs: Inputs, targets: Targets) -> Tensor:
    """Return the (N, M) scores with their graph, from what gets their gradient."""
    if targets.scores is not None:
        return targets.scores
    rows = plain_side(inputs.rows, targets.rows)
    cols = plain_side(inputs.cols, targets.cols)
    return plain_product(rows, cols, inputs.rows.bias, inputs.cols.bias)


def plain_side(side: Side, target: Tensor | None) -> Tensor:
    """Return a side's vectors at unit length, with their graph if they are trained."""
    if not is_trained(target):
        return side.all_vectors()
    if side.like.dtype != target.dtype:
        raise_second_derivative()
    return plain_unit(target, side.inv is not None)


def raise_second_derivative() -> NoReturn:
    """Raise the error of a gradient that is not to be differentiated."""
    raise RuntimeError(
        "create_graph: second derivatives need engine='dense', whose answers are plain PyTorch"
    )


def plain_product(
    rows: Tensor,  # (N, D) at unit length
    cols: Tensor,  # (M, D)
    row_bias: Tensor | None,  # (N,)
    col_bias: Tensor | None,  # (M,)
) -> Tensor:
    """Return the (N, M) scores of vectors, by operators that autograd differentiates."""
    with full_precision(rows):
        scores = rows @ cols.T
    return with_biases(scores, row_bias, col_bias)


def with_biases(scores: Tensor, row_bias: Tensor | None, col_bias: Tensor | None) -> Tensor:
    """Return scores (N, M) plus biases (N,) and (M,), differentiable."""
    if row_bias is not None:
        scores = scores + row_bias[:, None]
    if col_bias is not None:
        scores = scores + col_bias
    return scores


def pairs_of(scores: Tensor, i: Index, j: Index) -> Tensor:
    """Return the entries (P,) of scores (N, M) in rows i and columns j; None: the diagonal."""
    if i is None or j is None:
        return scores.diagonal()
    return scores[i, j]
