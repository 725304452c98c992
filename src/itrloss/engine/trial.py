"""Trials of the Triton engine: ``engine="auto"`` relies on kernels only if they agree with PyTorch.

A question is tried on an example of its own form, as a compiler may accept one kernel and reject
the next. What fails later, in the user's step, is computed by the tiled engine.
"""

from __future__ import annotations

import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import tiled, triton
from .inputs import NO_SIDE, Inputs, Side
from .pair_scores import Index, ListedPairs
from .pairs import IGNORE_ID, Over, Pairs
from .question import Attempt, Condition, Question, Value, has_each, is_trained
from .relations import Labels, RelatedPairs, Rule
from .terms import Term, identity
from .tiled import Gradients, Needs
from .vectors import inverse_norms

# What a value is: absent, a number of the host, one number of the device, or one for each anchor.
Kind = Literal["none", "number", "one", "each"]
Listing = Literal["none", "diagonal", "listed"]

# Rows and columns of an example: large tiles for all multiprocessors of the largest GPUs, or small
# ones.
LARGE_EXAMPLE = 2048, 2816
SMALL_EXAMPLE = 1024, 1088


class Form(NamedTuple):
    """What decides which kernels a question needs."""

    device: torch.device
    dtypes: tuple[torch.dtype, torch.dtype]  # of the rows and the columns, or of given scores
    dim: int  # D; 0 if the scores are given
    normalized: tuple[bool, bool]  # whether the rows, and the columns, have inverse norms
    large: bool  # whether there are many scores, and the tiles are large
    sides: tuple[int, ...]
    terms: tuple[Term, ...]  # none: the highest score is asked for
    over: Over
    ids: bool
    groups: Rule | None  # of pairs that may be negatives, in addition to ids
    mask: bool  # whether kernels read a mask in place of ids
    scale: Kind
    shift: Kind
    below: Kind
    above: Kind
    slots: int  # shifts: 1, 2 for some, or one more than are summed along with a panel
    attempt: Kind  # the shift of an attempt before; of maxima "one" if the device may skip them
    listed: Listing  # positive pairs whose scores come along
    gradients: Trained
    early: bool  # whether the gradient of vectors comes along with the sums
    weights: Kind  # of their total, if it is asked for in their place

    def __str__(self) -> str:
        """Describe the form in words."""
        answer = "maxima"
        if self.terms:
            answer = "sums of " + " and ".join(term.__name__ for term in self.terms)
        what = ["given scores"]
        if self.dim:
            what = [f"{self.dim} dimensions of {self.dtypes[0]} and {self.dtypes[1]}"]
        what.append("large tiles" if self.large else "small tiles")
        if self.ids:
            what.append("ids")
        if self.groups is not None:
            what.append(f"negatives of the {self.groups} group")
        if self.mask:
            what.append("a mask of pairs")
        if self.gradients.scale:
            what.append("a learnt scale")
        if self.below != "none" or self.above != "none":
            what.append("limits")
        return f"{answer} over {self.over} ({', '.join(what)}) on {self.device}"


class Trained(NamedTuple):
    """Which gradients are needed."""

    rows: torch.dtype | None = None  # the dtype of the gradient
    cols: torch.dtype | None = None
    scores: bool = False
    scale: bool = False
    shift: bool = False


def form_of(
    question: Question,
    inputs: Inputs,
    gradients: Trained,
    pairs: tuple[Index, Index] | None,  # whose scores come along
    early: bool = False,  # whether the gradient comes along with the sums
    weights: Tensor | None = None,  # of their total
) -> Form:
    """Return the form of a question of some inputs."""
    rows = inputs.rows
    cols = inputs.cols
    dtypes = inputs.dtype, inputs.dtype
    dim = 0
    if inputs.scores is None:
        dtypes = rows.like.dtype, cols.like.dtype
        dim = rows.like.shape[1]
    listed: Listing = "none"
    if pairs is not None:
        listed = "diagonal" if pairs[0] is None else "listed"
    compared = triton.compared(question.pairs)
    return Form(
        device=inputs.like.device,
        dtypes=dtypes,
        dim=dim,
        normalized=(rows.inv is not None, cols.inv is not None),
        large=math.prod(question.pairs.shape) >= triton.MANY,
        sides=question.sides,
        terms=question.terms,
        over=question.over,
        ids=compared.ids[0] is not None,
        groups=compared.rule,
        mask=compared.mask,
        scale=kind_of(question.scale),
        shift=kind_of(question.shift),
        below=kind_of(question.below),
        above=kind_of(question.above),
        slots=slots_of(question),
        attempt="none" if question.attempt is None else kind_of(question.attempt.shift),
        listed=listed,
        gradients=gradients,
        early=early,
        weights=kind_of(weights),
    )


def slots_of(question: Question) -> int:
    """Return a number of shifts that need the same kernels as a question's."""
    if question.slots > triton.SLOTS:
        return triton.SLOTS + 1
    return min(question.slots, 2)


def form_of_maximum(question: Question, inputs: Inputs) -> Form:
    """Return the form of the highest score that a question asks for."""
    form = form_of(question, inputs, Trained(), None)
    return form._replace(terms=(), attempt="none" if question.condition is None else "one")


def gradients_needed(
    question: Question,
    rows: Tensor | None,  # what gets the gradient of the rows, the columns, and given scores
    cols: Tensor | None,
    scores: Tensor | None,
) -> Trained:
    """Return which gradients backward will need."""
    if not torch.is_grad_enabled():
        return Trained()
    return Trained(
        rows=rows.dtype if is_trained(rows) else None,
        cols=cols.dtype if is_trained(cols) else None,
        scores=is_trained(scores),
        scale=is_trained(question.scale),
        shift=is_trained(question.shift),
    )


def kind_of(value: Value | None) -> Kind:
    """Return what a value of a question is to a kernel."""
    if value is None:
        return "none"
    if isinstance(value, Tensor):
        return "each" if has_each(value) else "one"
    return "number"


# ---------------------------------------------------------------------------------------- decisions

_results: dict[Form, bool] = {}


def works(form: Form) -> bool:
    """Return whether the engine agrees with the tiled one on an example of a form, tried once.

    If not, a warning says why. While a CUDA graph is captured nothing is tried: untested means
    False, with a warning.
    """
    if form in _results:
        return _results[form]
    error = "is not tried while a CUDA graph is captured"
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        # A thread has no modes, hooks and tracers of the caller.
        with ThreadPoolExecutor(1) as executor:
            error = executor.submit(error_of, form).result()
        if "OutOfMemoryError" not in error:  # there may be enough memory the next time
            _results[form] = not error
    if error:
        warn(form, error)
    return not error


def refuse(form: Form, strict: bool, error: Exception) -> None:
    """Note that the engine fails for a form, so that another one computes the answer.

    Raises:
        RuntimeError: if ``strict``: the user chose this engine.
        torch.OutOfMemoryError: if that is the error, which has nothing to do with the engine.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    said = f"{type(error).__name__}: {error}"
    if strict:
        raise RuntimeError(
            f"engine='triton' failed for {form}: {said}; engine='tiled' does without Triton"
        ) from error
    if _results.get(form) is not False:
        _results[form] = False
        warn(form, f"fails: {said}")


def warn(form: Form, error: str) -> None:
    """Warn that ``"auto"`` leaves Triton out for a form."""
    fallback = f"engine='auto' does without it for {form}"
    warnings.warn(f"itrloss: the Triton engine {error}; {fallback}", stacklevel=3)


# ----------------------------------------------------------------------------------------- a trial


def error_of(form: Form) -> str:
    """Return what is wrong with the results of an example, or ""."""
    try:
        question, inputs = example(form)
        theirs = tiled_results(form, question, inputs)
        ours = triton_results(form, question, inputs)
    except Exception as error:  # from the compiler, the driver, or an operation that the GPU lacks
        return f"fails: {type(error).__name__}: {error}"
    for result, expected in zip(ours, theirs, strict=True):
        if result is not None and expected is not None and not agree(result, expected):
            return "finds something else than the tiled one"
    return ""


def agree(result: Tensor, expected: Tensor) -> bool:
    """Return whether results agree; half precision rounds by less than a percent."""
    expected = expected.float()
    result = result.float()
    # The highest score of none is -inf.
    difference = torch.where(result == expected, 0.0, result - expected)
    size = torch.where(expected.isinf(), 0.0, expected).norm()
    return bool(difference.norm() <= 0.02 * size)


def triton_results(form: Form, question: Question, inputs: Inputs) -> list[Tensor | None]:
    """Return the sums, or maxima, and gradients that the kernels find."""
    if not form.terms:
        return [triton.highest(question, inputs)]
    listed = example_of_listed(form, inputs)
    needs = needs_of(form)
    if form.early:
        weights = None
        if form.weights != "none":
            weights = example_of_weights(form, question)
        sums, early = triton.sums_and_gradients(question, inputs, weights, needs)
        grad = gradient_of(sums) if weights is None else torch.ones_like(sums)
        gradients = triton.completed_gradients(question, inputs, early, grad, needs, listed)
        return in_order(sums, gradients)
    sums = triton.sums(question, inputs)
    if form.gradients == Trained():
        return [sums]
    gradients = triton.gradients(question, inputs, gradient_of(sums), needs, listed)
    return in_order(sums, gradients)


def tiled_results(form: Form, question: Question, inputs: Inputs) -> list[Tensor | None]:
    """Return the sums, or maxima, and gradients that the tiled engine finds."""
    if not form.terms:
        return [tiled.highest(question, inputs, None)]
    sums = tiled.sums(question, inputs, None)
    if form.gradients == Trained():
        return [sums]
    listed = example_of_listed(form, inputs)
    grad = gradient_of(sums)
    if form.weights != "none":
        grad = example_of_weights(form, question).expand_as(sums)
        sums = (sums * grad).sum()
    gradients = tiled.gradients(question, inputs, None, grad, needs_of(form), listed)
    return in_order(sums, gradients)


def in_order(sums: Tensor, gradients: Gradients) -> list[Tensor | None]:
    """Return sums, or a total, and gradients in the order in which they are compared."""
    of_inputs = [gradients.rows, gradients.cols, gradients.scores]
    return [sums, *of_inputs, gradients.scale, gradients.shift]


def gradient_of(sums: Tensor) -> Tensor:
    """Return a gradient of sums whose share in the results is about that of listed pairs."""
    steps = torch.linspace(0.01, 0.02, sums.numel(), device=sums.device).view_as(sums)
    return steps / (sums.abs().mean() + 1e-6)


def example_of_weights(form: Form, question: Question) -> Tensor:
    """Return the weights of a total, (1,) or (A,)."""
    weights = torch.linspace(0.01, 0.02, question.size, device=form.device) / question.size
    return weights if form.weights == "each" else weights[:1]


def needs_of(form: Form) -> Needs:
    """Return what a gradient of the example is needed of."""
    trained = form.gradients
    return Needs(
        rows=trained.rows is not None,
        cols=trained.cols is not None,
        row_bias=False,
        col_bias=False,
        scores=trained.scores,
        scale=trained.scale,
        shift=trained.shift,
        dtypes=(trained.rows or torch.float32, trained.cols or torch.float32),
    )


# -------------------------------------------------------------------------------------- an example


def example(form: Form) -> tuple[Question, Inputs]:
    """Return a question of a form, and its inputs."""
    n, m = LARGE_EXAMPLE if form.large else SMALL_EXAMPLE
    if not form.ids and not form.mask:  # row i matches column i
        m = n
    spread = 0.5  # about the standard deviation of the scores
    if form.dim:
        spread = form.dim**-0.5
    anchors = torch.ones(sum((n, m)[side] for side in form.sides), device=form.device)
    scale = example_of_value(form.scale, 20.0, anchors)
    shift = example_of_value(form.shift, -0.5, anchors)
    if form.slots > 1 and isinstance(shift, Tensor):
        shift = torch.stack([shift * (1 + slot) for slot in range(form.slots)])
    assert scale is not None
    attempt = None
    condition = None
    if form.attempt != "none" and form.terms:  # it failed, as its shift is another one
        attempted = example_of_value(form.attempt, -1.0, anchors)
        assert isinstance(attempted, Tensor)
        attempt = Attempt(attempted, torch.zeros_like(anchors))
    elif form.attempt != "none":
        condition = Condition(anchors[0] > 0, True)
    question = Question(
        example_of_pairs(form, n, m),
        form.sides,
        form.terms or (identity,),
        form.over,
        scale,
        shift,
        below=example_of_value(form.below, spread, anchors),
        above=example_of_value(form.above, -spread, anchors),
        attempt=attempt,
        condition=condition,
    )
    return question, example_of_inputs(form, n, m)


def example_of_value(kind: Kind, number: float, anchors: Tensor) -> Value | None:
    """Return a value of a kind that is about a number; ``anchors``: ones (A,)."""
    if kind == "none":
        return None
    if kind == "number":
        return number
    if kind == "one":
        return anchors[:1] * number
    return torch.linspace(0.9, 1.1, len(anchors), device=anchors.device) * number


def example_of_inputs(form: Form, n: int, m: int) -> Inputs:
    """Return embeddings of unit length, (n, D) and (m, D), or scores (n, m)."""
    generator = torch.Generator().manual_seed(0)
    if form.dim == 0:
        scores = torch.rand(n, m, generator=generator, device="cpu") * 2 - 1
        return Inputs(NO_SIDE, NO_SIDE, scores.to(form.device, form.dtypes[0]))
    x = torch.randn(n + m, form.dim, dtype=torch.float64, device="cpu", generator=generator)
    x = torch.nn.functional.normalize(x)
    sides: list[Side] = []
    for part, dtype, normalized in zip(x.split((n, m)), form.dtypes, form.normalized, strict=True):
        vectors = part.to(form.device, dtype)
        inv = inverse_norms(vectors) if normalized else None
        sides.append(Side(vectors, inv, None, None))
    return Inputs(sides[0], sides[1], None)


def example_of_pairs(form: Form, n: int, m: int) -> Pairs:
    """Return pairs by what the form has: ids, with or without groups, label sets, or nothing."""
    numbers = torch.arange(n + m, device=form.device)
    row_ids, col_ids = (numbers % 97).split((n, m))
    row_ids[0] = IGNORE_ID  # padding
    if form.mask:
        row_sets = torch.stack([row_ids, row_ids + 1], 1)
        return RelatedPairs(Labels(row_sets, col_ids[:, None]))
    if form.groups is not None:
        row_groups, col_groups = (numbers % 3).split((n, m))
        row_groups[1] = IGNORE_ID  # open to all
        groups = row_groups, col_groups
        return RelatedPairs(Labels(row_ids[:, None], col_ids[:, None], groups, form.groups))
    if form.ids:
        return Pairs((n, m), (row_ids, col_ids), form.device)
    return Pairs((n, m), (None, None), form.device)


def example_of_listed(form: Form, inputs: Inputs) -> ListedPairs | None:
    """Return pairs whose scores have a gradient of their own, if the form has any."""
    if form.listed == "none":
        return None
    n, m = inputs.shape
    grad = torch.linspace(-0.4, -0.2, n, device=form.device)  # 20, the scale, times a step
    if form.listed == "diagonal":
        return ListedPairs(None, None, grad)
    rows = torch.arange(n, device=form.device) // 2  # two pairs of a row
    cols = torch.arange(n, device=form.device) * 7 % m
    return ListedPairs(rows, cols, grad)
