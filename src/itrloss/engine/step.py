"""The small matrices of a step, whose scores are in the graph, and the sums over them.

All vectors of a step go through one node of the graph, :class:`StepScores`, which multiplies them.
A sum over a small matrix is one node more, :class:`BlockSums`: the matrix is one block, whose
slopes are kept for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..torch_versions import is_compiling
from . import dense, tiled
from .pair_scores import Index, ListedPairs
from .products import add_matmul_, matmul, product, vecdot
from .question import Question, Value, is_trained, joined
from .relation import weighted_sums
from .vectors import EPS, compute_dtype, plain_unit

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
    #: Rows and as many columns, of whose scores only those of row p with column p are needed.
    diagonals: tuple[Place, ...] = ()

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
        """Return the unit vectors (V, D), the scores (N, M) of each matrix, and the diagonals."""
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
        for rows, cols in layout.diagonals:
            scores.append(vecdot(unit[rows], unit[cols]))
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
        grad, *of_outputs = grads
        layout: Layout = ctx.layout
        needed = ctx.needs_input_grad[2:]
        if all([x is None for x in grads]):
            return (None,) * len(ctx.needs_input_grad)
        unit, norms, *rest = saved_tensors(ctx)
        memories = rest[: len(layout.places)]
        vectors = rest[len(layout.places) :]
        sizes = ctx.sizes
        if torch.is_grad_enabled():  # create_graph=True
            parts = unit.split(sizes)
            places = aliases(vectors)
            known = [
                y.detach() if x is None else plain_unit(x, layout.normalize)
                for x, y in zip(places, parts, strict=True)
            ]
            outputs = scores_of_units(layout, memories, known)
            return None, None, *second_gradients(outputs, grads, places)
        total = gradient_of_units(
            layout, unit, memories, grad, of_outputs, starts_of(sizes, needed)
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
    of_outputs: Sequence[Tensor | None],  # (N, M) of each matrix, (N,) of each diagonal
    starts: set[int],  # where vectors begin that get a gradient
) -> Tensor:
    """Return the gradient (T, D) of the unit vectors that are trained, a new tensor."""
    trained = unit[: layout.trained]
    total = torch.zeros_like(trained) if grad is None else grad[: layout.trained].clone()
    count = len(layout.places)
    for k, ((rows, cols), g) in enumerate(zip(layout.places, of_outputs[:count], strict=True)):
        if g is None:
            continue
        if rows.start in starts:
            add_matmul_(total[rows], g, layout.columns(k, unit, memories))
        if memories[k] is None and cols.start in starts:
            add_matmul_(total[cols], g.T, unit[rows])
    for (rows, cols), g in zip(layout.diagonals, of_outputs[count:], strict=True):
        if g is None:
            continue
        if rows.start in starts:
            total[rows].addcmul_(unit[cols], g[:, None])
        if cols.start in starts:
            total[cols].addcmul_(unit[rows], g[:, None])
    return total


def step_scores(
    layout: Layout, memories: Sequence[Tensor | None], *vectors: Tensor
) -> tuple[Tensor, ...]:
    """Return what :class:`StepScores` does, in plain PyTorch: its specification."""
    return scores_of_units(layout, memories, [plain_unit(x, layout.normalize) for x in vectors])


def scores_of_units(
    layout: Layout, memories: Sequence[Tensor | None], units: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the unit vectors (V, D) of a step in one tensor, the scores of its matrices, and the
    diagonals.
    """
    unit = torch.cat(list(units))
    scores = []
    for k, (rows, _) in enumerate(layout.places):
        scores.append(product(unit[rows], layout.columns(k, unit, memories).T))
    for rows, cols in layout.diagonals:
        scores.append((unit[rows] * unit[cols]).sum(1))
    return unit, *scores


class Step:
    """The vectors of a step and its small matrices, whose scores are computed when first needed."""

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
        """Return the unit vectors (V, D), the scores (N, M) of each matrix, and the diagonals, with
        their graph if there is one now.
        """
        if self._known is not None:
            return self._known
        multiply: Any = step_scores if is_compiling() else StepScores.apply
        outputs = multiply(self.layout, self.memories, *self.vectors)
        if torch.is_grad_enabled():
            self._known = outputs
        return outputs


class StepPart(NamedTuple):
    """A small matrix of a step, and where its vectors are among the unit vectors."""

    step: Step
    #: Which of the step's matrices it is made of, one above the other; (): it is none of them.
    numbers: tuple[int, ...]
    rows: slice
    cols: slice  # NO_COLUMNS: a memory's
    diagonal: int | None = None  # the number of its diagonal, if that is an output of the step

    @property
    def of_memory(self) -> bool:
        """Whether the columns are a memory's."""
        return bool(self.numbers) and self.step.memories[self.numbers[0]] is not None

    def detach(self) -> StepPart:
        """Return the same part of a step without a gradient."""
        return self._replace(step=self.step.detach())

    def scores(self) -> Tensor:
        """Return the (N, M) scores with their graph."""
        outputs = self.step.outputs()
        if len(self.numbers) == 1:
            return outputs[1 + self.numbers[0]]
        if self.numbers:
            return joined([outputs[1 + number] for number in self.numbers])
        unit = outputs[0]
        constant = unit.detach()  # a product with constants has the gradient of one side alone
        trained = self.step.layout.trained
        rows = unit if self.rows.start < trained else constant
        cols = unit if self.cols.start < trained else constant
        return product(rows[self.rows], cols[self.cols].T)

    def pairs(self, i: Index, j: Index, known: Tensor | None) -> Tensor:
        """Return the (P,) scores of rows i with columns j, with their graph; None: the diagonal.

        ``known``: these scores, if the matrix has them.
        """
        if i is None and self.diagonal is not None:
            return self.step.outputs()[1 + len(self.step.layout.places) + self.diagonal]
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
        if isinstance(i, Tensor):
            ctx.save_for_backward(unit, i, j)
        else:
            ctx.save_for_backward(unit, None, None)
            ctx.slices = i, j
        if known is not None:
            return known.clone()
        return vecdot(unit[i], unit[j])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient (V, D) of the vectors."""
        (grad,) = grads
        unit, *index = saved_tensors(ctx)
        i, j = index
        if i is None:
            i, j = ctx.slices
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


# ------------------------------------------------------------------------------ sums over one block


class BlockSums(torch.autograd.Function):
    """The sums (A,) of a question of the scores (N, M) of one block, and the scores of pairs.

    The term's slopes are kept, so that the backward pass computes no score and no term again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        question: Question,
        pairs: tuple[Index, Index] | None,
        scores: Tensor,  # (N, M)
        *values: Value | None,  # scale, shift and limits of the question
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sums (A,) of the question, and the pairs' scores."""
        sums, slopes = tiled.sums_and_slopes(question, scores)
        i, j = pairs or (None, None)
        # The values are saved for a check alone: that nobody modifies them before backward.
        ctx.save_for_backward(scores, i, j, *slopes, *[x for x in values if isinstance(x, Tensor)])
        ctx.question = question
        ctx.set_materialize_grads(False)  # a loss may use the sums alone, or the pairs alone
        if pairs is None:
            return sums, None
        listed = pairs_of(scores, i, j)
        return sums, listed.clone() if i is None else listed

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_sums: Tensor | None, grad_pairs: Tensor | None
    ) -> tuple[Any, ...]:
        """Return the gradients of the scores and of the question's values."""
        _, _, _, needs_scale, needs_shift, *_ = ctx.needs_input_grad
        question: Question = ctx.question
        scores, i, j, *slopes = saved_tensors(ctx)
        if torch.is_grad_enabled():  # create_graph=True
            scores, *values = aliases((scores, *question.values))
            outputs = dense.sums(question.with_values(values), scores), pairs_of(scores, i, j)
            return (
                None,
                None,
                *second_gradients(outputs, (grad_sums, grad_pairs), (scores, *values)),
            )
        needed = needs_scale, needs_shift
        of_block = tiled.gradients_of_block(question, scores, slopes, grad_sums, needed)
        if grad_pairs is not None:
            ListedPairs(i, j, grad_pairs).add_to_(of_block.scores)
        return None, None, *of_block, None, None


# ------------------------------------------------------------------------------------------ helpers


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """Return what ``ctx`` saved; raise an error if one of the tensors was modified in place."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            "embeddings, scores or a memory were modified in place before the backward pass of a "
            "loss that needs them. Before PyTorch 2.1, that is also enqueueing before the backward "
            f"pass. PyTorch says: {error}"
        ) from error


def aliases(places: Sequence[Any]) -> list[Any]:
    """Return the places of a node's input, of which the trained ones are tensors of their own.

    Where one of them is computed from another, or is the same tensor, a gradient by the tensors
    themselves would count the way between them once more.
    """
    return [x.view_as(x) if is_trained(x) else x for x in places]


def second_gradients(
    outputs: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    places: Sequence[Value | None],
) -> list[Tensor | None]:
    """Return the gradients, with a graph of their own, of what is trained among ``places``, which
    are :func:`aliases`.
    """
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


def raise_second_derivative() -> NoReturn:
    """Raise the error of a gradient that is not to be differentiated."""
    raise RuntimeError(
        "create_graph: second derivatives need engine='dense', whose answers are plain PyTorch"
    )


def pairs_of(scores: Tensor, i: Index, j: Index) -> Tensor:
    """Return the entries (P,) of scores (N, M) in rows i and columns j; None: the diagonal."""
    if i is None or j is None:
        return scores.diagonal()
    return scores[i, j]
