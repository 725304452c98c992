"""All answers of anchors and all losses in random batches: the spine of the tests.

A case has a shape, who matches whom, options, an engine, sizes of tiles and lists, what is trained,
and how the input is passed. Its values and gradients in float64 are compared with the reference and
with loops, with another engine, and with two processes that share the batch. What fails names its
case; ``AnswerCase(name, seed)`` and ``LossCase(name, seed)`` draw it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support.answers import assert_equal
from support.cases import ENGINES
from support.drawn_answers import ASKED, IN_PROCESSES, AnswerCase
from support.drawn_infonce import InfoNCECase
from support.drawn_losses import LossCase, differentiated
from support.draws import draw_workings
from support.losses_registry import REGISTRY
from support.processes import run
from support.versions import grad_or_zeros
from torch import Tensor

from itrloss.engine import relation

DRAWS = 6  # of an answer or a loss in each test


@pytest.fixture
def draws(turn: int, pytestconfig: pytest.Config) -> Callable[[int], range]:
    """The seeds of a turn, ``draws(number)``: a third of them in ``--fast``."""
    share = 3 if pytestconfig.getoption("fast") else 1
    return lambda number: range(turn * number, turn * number + number // share)


@pytest.fixture
def nans_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A nan on the way of a backward pass is an error, which names no lines: they take time."""
    monkeypatch.setattr("torch.fx.traceback.format_stack", list, raising=False)
    with torch.autograd.set_detect_anomaly(True):
        yield


# ----------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", ASKED)
def test_answers_of_random_batches_are_those_of_the_reference(
    name, turn, draws, poisoned, monkeypatch
):
    for seed in draws(DRAWS):
        case = AnswerCase(name, seed)
        workings = draw_workings(case.draw, monkeypatch)
        wanted = case.outcome("reference")
        for engine in ENGINES:
            about = f"{case}, {workings}, {engine}"
            assert_equal(case.outcome(engine), wanted, about)


# ------------------------------------------------------------------------------------------ losses

LOSSES = [name for name, entry in REGISTRY.items() if entry.takes != "features"]  # a gate


def slope(grads: Iterable[Tensor], direction: list[Tensor]) -> float:
    return float(sum((g * d).sum() for g, d in zip(grads, direction, strict=False)))


@pytest.mark.parametrize("turn", range(6))
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("poisoned", "nans_found")
def test_losses_of_random_batches_are_those_of_loops(name, turn, draws, monkeypatch):
    for seed in draws(DRAWS):
        case = LossCase(name, seed)
        about = f"{case}, {draw_workings(case.draw, monkeypatch)}"
        found = case.outcome(case.engine, **case.switches)
        assert_equal(found, case.outcome("dense"), about, tolerance=1e-8)
        if not case.is_in_loops:
            continue
        wanted = case.loops(case.input)
        assert_equal(found[: len(wanted)], [*wanted], about, tolerance=1e-7)
        if case.has_differences:
            grads = found[len(wanted) :]
            size = sum(
                float((g * d).abs().sum()) for g, d in zip(grads, case.direction, strict=False)
            )
            error = abs(slope(grads, case.direction) - case.slope_of_loops())
            assert error <= 1e-5 * (size + 1), f"{about}: {error} of {size}"


@pytest.mark.parametrize("turn", range(2))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_in_lower_precision_are_those_of_the_rounded_input(
    name, dtype, turn, draws, monkeypatch
):
    for seed in draws(DRAWS // 2):
        case = LossCase(name, seed)
        case.form = "embeddings"
        case.common.pop("normalize", None)  # as inner products leave the range of some losses
        about = f"{case}, {dtype}, {draw_workings(case.draw, monkeypatch)}"
        rounded = case.rounded(dtype)
        exact = rounded.rounded(torch.float64).outcome("dense")
        found = rounded.outcome(case.engine)
        gradients = len(case.input)
        of_parameters = len([*case.loss("auto").parameters()])
        count = len(found) - gradients - of_parameters
        assert all(x.dtype == torch.float32 for x in found[:count]), about
        torch.testing.assert_close(
            [x.double() for x in found[:count]], exact[:count], rtol=1e-3, atol=1e-3, msg=about
        )
        for got, wanted in zip(found[count:], exact[count:], strict=True):
            assert (got - wanted).norm() <= 0.03 * wanted.norm() + 1e-3, about


# ----------------------------------------------------------------------------------------- InfoNCE


def weighted(values: Iterable[Tensor]) -> Tensor:
    """A total of values with a weight for each."""
    total = torch.zeros((), dtype=torch.float64)
    for value in values:
        total = total + value.reshape(-1) @ torch.linspace(-1, 2, value.numel(), dtype=value.dtype)
    return total


def values_and_gradients(values: Any, leaves: list[Tensor]) -> list[Tensor]:
    values = values if isinstance(values, tuple) else (values,)
    return differentiated(values, weighted(values), leaves)


@pytest.mark.parametrize("turn", range(20))
def test_infonce_with_random_options_is_that_of_loops(turn, draws, poisoned, monkeypatch):
    """With the gradient of the temperature."""
    for seed in draws(30):
        case = InfoNCECase(seed)
        loss = case.loss(case.draw.pick(["auto", "dense", "tiled"])).double()
        about = f"{case}, {loss.engine}, {draw_workings(case.draw, monkeypatch)}"
        inputs = [x.clone().requires_grad_() for x in case.inputs.values()]
        given = dict(zip(case.inputs, inputs, strict=True))
        found = values_and_gradients(loss(**given, **case.call), [*inputs, loss.log_scale])
        log_scale = loss.log_scale.detach().clone().requires_grad_()
        exact = case.loops(inputs, (-log_scale[0]).exp())
        wanted = values_and_gradients(exact, [*inputs, log_scale])
        assert_equal(found, wanted, about)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turn", range(2))
def test_infonce_with_random_options_in_lower_precision(turn, draws, dtype, monkeypatch):
    """Rounded input is the exact input of both; near a limit, rounding may decide who counts."""
    for seed in draws(30):
        case = InfoNCECase(seed)
        engine = case.draw.pick(["auto", "dense", "tiled"])
        about = f"{case}, {engine}, {draw_workings(case.draw, monkeypatch)}"
        call = dict(case.call)
        if "guide" in call:
            call["guide"] = tuple(x.to(dtype) for x in call["guide"])
        inputs = {name: x.to(dtype).requires_grad_() for name, x in case.inputs.items()}
        found = case.loss(engine, reduction="mean")(**inputs, **call)
        if "guide" in call:
            call["guide"] = tuple(x.double() for x in call["guide"])
        exact = {name: x.detach().double() for name, x in inputs.items()}
        wanted = case.loss("dense", reduction="mean").double()(**exact, **call)
        assert found.dtype == torch.float32, about
        assert_equal(found.double(), wanted, about, tolerance=5e-5)
        if found.requires_grad:
            for gradient in grad_or_zeros(found, [*inputs.values()]):
                assert gradient.isfinite().all(), about


# --------------------------------------------------------------------------------------- processes


def shared_cases(turn: int, dtype: torch.dtype) -> list[LossCase]:
    """A case of each loss whose batch several processes share."""
    cases = [LossCase(name, turn, in_processes=True) for name in LOSSES]
    return [case.in_whole().rounded(dtype) for case in cases if case.can_be_shared]


def losses_of_a_process(
    rank: int, turn: int, world: int, dtype: torch.dtype, lists: bool
) -> list[list[Tensor]]:
    if rank and not lists:  # the positives, as the first process does
        relation.FEW = -1
    cases = shared_cases(turn, dtype)
    return [case.of_process(rank, world).outcome(case.engine, gather=True) for case in cases]


def assert_shared(
    parts: tuple[list[Tensor], ...], whole: list[Tensor], leaves: int, values: int, about: str
) -> None:
    """Compare values, gradients of embeddings and those of parameters of all processes.

    Several values are of own anchors, and their total is a sum over processes; otherwise gradients
    are averaged over the processes, as DDP does.
    """
    of_each = whole[0].dim() > 0
    for k, wanted in enumerate(whole):
        of_processes = [part[k] for part in parts]
        found = of_processes[0]
        if k < values + leaves and (of_each or k >= values):
            found = torch.cat(of_processes)
        elif of_each:
            found = torch.stack(of_processes).sum(0)
        if values <= k < values + leaves and not of_each:
            found = found / len(parts)
        if wanted.dtype == torch.float64:
            assert_equal(found, wanted, f"{about}, {k}")
        else:
            assert (found - wanted).norm() <= 1e-4 * (wanted.norm() + 1), f"{about}, {k}"


# How many processes there are, and whether each lists its positives.
JOBS = [
    *((turn, 2, torch.float64, True) for turn in range(6)),
    *((turn, 3, torch.float64, True) for turn in range(6, 10)),
    (10, 2, torch.float64, False),
    (11, 2, torch.float32, True),
]
TURNS = [(turn,) for turn in range(6)]


def slow_but_first(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The cases of a test in processes, of which ``--fast`` has the first one."""
    slow = [pytest.param(*case, marks=pytest.mark.slow) for case in cases[1:]]
    return [cases[0], *slow]


@pytest.mark.parametrize(("turn", "world", "dtype", "lists"), slow_but_first(JOBS))
def test_processes_have_the_losses_of_one(turn, world, dtype, lists, tmp_path):
    found = run(losses_of_a_process, tmp_path, turn, world, dtype, lists, world=world)
    parts = zip(*found, strict=True)
    for case in shared_cases(turn, dtype):
        whole = case.outcome(case.engine)
        leaves = len(case.input)
        values = len(whole) - leaves - len([*case.loss("auto").parameters()])
        assert_shared(next(parts), whole, leaves, values, str(case))


def shared_options(turn: int) -> list[InfoNCECase]:
    cases = [InfoNCECase(seed) for seed in range(30 * turn, 30 * turn + 30)]
    return [case.in_whole() for case in cases if case.can_be_shared]


def shared_infonce(case: InfoNCECase, **options: Any) -> list[Tensor]:
    """The loss, and its gradients; the values of anchors are compared in `LossCase`."""
    loss = case.loss("auto", reduction="mean", **options).double()
    inputs = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}
    value = loss(**inputs, **case.call)
    return values_and_gradients(value, [*inputs.values(), loss.log_scale])


def infonce_of_a_process(rank: int, turn: int) -> list[list[Tensor]]:
    return [shared_infonce(case.of_process(rank), gather=True) for case in shared_options(turn)]


@pytest.mark.parametrize(("turn",), slow_but_first(TURNS))
def test_two_processes_have_infonce_of_one(turn, tmp_path):
    parts = zip(*run(infonce_of_a_process, tmp_path, turn), strict=True)
    for case in shared_options(turn):
        assert_shared(next(parts), shared_infonce(case), len(case.inputs), 1, str(case))


def shared_answers(turn: int) -> list[AnswerCase]:
    """Cases of every second answer of a batch that two processes share."""
    names = IN_PROCESSES[turn % 2 :: 2]
    cases = [AnswerCase(name, turn, in_processes=True) for name in names]
    for case in cases:
        case.engine = case.draw.pick(["auto", "dense", "tiled"])
    return cases


def answers_of_a_process(rank: int, turn: int) -> list[list[Tensor]]:
    cases = [case.of_process(rank) for case in shared_answers(turn)]
    return [[*case.shared_outcome(), *case.at_hand(), case.figures()] for case in cases]


@pytest.mark.parametrize(("turn",), slow_but_first(TURNS))
def test_two_processes_have_the_answers_of_one(turn, tmp_path):
    parts = run(answers_of_a_process, tmp_path, turn)
    for case, first, second in zip(shared_answers(turn), *parts, strict=True):
        *found, _ = (torch.cat(pair) for pair in zip(first, second, strict=True))
        about = f"{case}, {case.engine}"
        assert_equal(found, case.shared_outcome() + case.at_hand(), about)
        assert_equal([first[-1], second[-1]], [case.figures()] * 2, about)
