"""The conformance checks: our losses pass them, planted bugs do not."""

from __future__ import annotations

import copy
import pickle
import unittest
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import (
    planted,
    planted_gradients,
    planted_programs,
)
from support.cases import clip
from support.conforming import CALLS, LOSSES, conforming
from support.losses_registry import REGISTRY
from support.processes import forkserver
from support.versions import require

import itrloss
from itrloss import compat
from itrloss.testing import ConformanceError, check_loss, loss_checks
from itrloss.testing.registry import CHECKS

COMPILED = ["compiled", "compiled_as_one_graph"]
DIFFERENCES = ["gradcheck", "gradients_of_parameters", "uneven_upstream"]
PRECISION = [
    "float32_error",
    "bfloat16_error",
    "float16_error",
    "zero_vectors",
    "zero_vectors_in_half_precision",
]
# A loss of the registry that is not checked in all ways may still be compiled, and is rounded.
OTHERS = [name for name, entry in REGISTRY.items() if name not in LOSSES and entry.takes in CALLS]
ALSO_COMPILED = [name for name in OTHERS if "compiled" in REGISTRY[name].tables]


def passes(case, checks):
    """Check a loss of ours, which fails what it is expected to fail."""
    failures = {check: reason for check, reason in case.failures.items() if check in checks}
    check_loss(case.loss, only=checks, expected_failures=failures, **case.options)


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_our_losses_pass(name, part):
    checks = [x for x in CHECKS if x not in (*COMPILED, *DIFFERENCES)]
    passes(LOSSES[name], checks[part::3])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    "fast_mode",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["along a direction", "entry by entry"],
)
def test_gradients_of_our_losses_are_finite_differences(name, fast_mode, monkeypatch):
    """Along a random direction, five times as fast."""
    if fast_mode:
        quick = partial(torch.autograd.gradcheck, fast_mode=True)
        monkeypatch.setattr(torch.autograd, "gradcheck", quick)
    passes(LOSSES[name], DIFFERENCES)


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_of_our_losses_keep_their_precision(name):
    passes(conforming(name), PRECISION)


@pytest.mark.parametrize("name", [*LOSSES, *OTHERS])
def test_a_call_under_autocast_is_in_full_precision(name):
    """In autograd's own products it is not: their error is a hundred times as large."""
    case = LOSSES[name] if name in LOSSES else conforming(name)
    (check,) = loss_checks(case.loss, only=["autocast_error"], **case.options)
    batch = check.subject.batch(24, 30, d=64).to(torch.float32)
    wanted = check.subject.result(batch)
    with torch.autocast("cpu", torch.bfloat16):
        found = check.subject.result(batch)
    for key, exact in wanted.items():
        assert (found[key] - exact).norm() <= 2e-4 * exact.norm(), key


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOSSES, *ALSO_COMPILED])
def test_our_losses_compile(name):
    case = LOSSES[name] if name in LOSSES else conforming(name)
    # Tiles are visited outside of graphs. A graph without breaks is the same where breaks may be.
    tiled = any(getattr(part, "engine", None) == "tiled" for part in case.loss.modules())
    passes(case, ["compiled" if tiled else "compiled_as_one_graph"])


def test_all_losses_of_other_code_bases_are_here():
    """`test_completeness` says it of the library's."""
    published = set(compat.__all__) - {"adapt"} | {"HREMCriterion"}  # of an adapted loss
    assert published <= {type(case.loss).__name__ for case in LOSSES.values()}


@pytest.mark.slow
def test_gathered_losses_are_those_of_one_process():
    """The third is the one that bugs are planted in. An error of one is an error of the sum, which
    is compared.
    """
    losses = (
        itrloss.InfoNCELoss(learnable=True),
        itrloss.TripletLoss(reduction="mean"),
        planted.InfoNCE(),
    )
    report = check_loss(planted_programs.Together(losses), only=["several_processes"], processes=2)
    assert report.names("passed") == ["several_processes"]
    assert not any(p.is_shared() for p in losses[0].parameters())  # of which a copy was sent


@pytest.mark.slow
def test_an_error_in_a_process_is_reported():
    with pytest.raises(ConformanceError, match="ValueError: no loss of several processes"):
        check_loss(planted_programs.FailsTogether(), only=["several_processes"], processes=2)


# ------------------------------------------------------------------------------------- planted bugs

# A plain loss holds its scores; all bugs but those of memory do as well.
PLAIN = {"memory_grows_linearly": "scores are a matrix"}
CAUGHT = [name for name, bug in planted.BUGS.items() if bug.caught_by]


def test_all_but_two_bugs_are_caught():
    assert len(CAUGHT) == len(planted.BUGS) - 2 >= 40


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=[pytest.mark.slow] * ("processes" in planted.BUGS[x].options))
        for x in CAUGHT
    ],
)
def test_the_bug_is_caught(name, monkeypatch):
    monkeypatch.setattr("itrloss.testing.properties.spawn", forkserver())
    make, caught_by, options = planted.BUGS[name]
    if caught_by.startswith("compiled"):
        require("torch.compile", 2, 8)
    with pytest.raises(ConformanceError) as caught:
        check_loss(make(), only=[caught_by], **options)
    assert caught.value.report.names("failed") == [caught_by]


def formula(loss, *inputs):
    return planted.InfoNCE(loss.temperature, loss.reduction)(*inputs)


@pytest.mark.parametrize("make", [planted.InfoNCE, planted_gradients.Hard])
def test_a_right_loss_agrees_with_its_formula(make):
    reference = planted_gradients.hard if make is planted_gradients.Hard else formula
    report = check_loss(make(), only=["agrees_with_reference"], reference=reference)
    assert report.names("passed") == ["agrees_with_reference"]


UNNOTICED = [bug.make for bug in planted.BUGS.values() if not bug.caught_by]


@pytest.mark.parametrize("make", UNNOTICED)
def test_a_formula_tells_what_is_another_loss(make):
    loss = make()
    loss.temperature = 0.2  # at 0.1, it would be the right loss by chance
    with pytest.raises(ConformanceError, match=r"agrees_with_reference: .* item \['gradient of im"):
        check_loss(loss, only=["agrees_with_reference"], reference=formula)


@pytest.mark.slow
@pytest.mark.parametrize("make", [planted.InfoNCE, planted.WithBias, *UNNOTICED])
def test_without_the_bug_all_pass(make):
    """The losses that bugs are planted in; and the bugs that are not caught, so that the list of
    those is right.

    One of them shows that such a loss compiles, and that it holds its scores: the others are
    programs like it.
    """
    if make is planted.InfoNCE:
        check_loss(make(), expected_failures=PLAIN)
    else:
        check_loss(make(), only=[x for x in CHECKS if x not in (*COMPILED, *PLAIN)])


def test_what_bugs_of_state_are_planted_in_is_right():
    check_loss(planted_programs.Queue(), only=["state_dict_round_trip", "pickled"])


# ---------------------------------------------------------------------------------------- interface


def units(loss, images, texts):
    return loss(F.normalize(images, dim=1), F.normalize(texts, dim=1), 10.0)


FEW = ["order_of_pairs", "renamed_ids", "scaled_embeddings", "state_dict_round_trip"]


@pytest.mark.parametrize("check", loss_checks(itrloss.SigmoidLoss(), only=FEW), ids=str)
def test_checks_are_parameters_of_pytest(check):
    check()


def test_a_function_of_another_signature():
    report = check_loss(clip, call=units, ids=False, only=FEW)
    assert report.names("passed") == ["order_of_pairs", "scaled_embeddings"]
    assert {x.name: x.reason for x in report.outcomes if x.status == "skipped"} == {
        "renamed_ids": "it takes no ids (ids=False)",
        "state_dict_round_trip": "it is no nn.Module",
    }
    with pytest.raises(unittest.SkipTest, match="no ids"):
        loss_checks(clip, call=units, ids=False, only=["renamed_ids"])[0]()


def of_options(images, texts):
    """A loss whose options are attributes of the function."""
    scores = F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T / of_options.temperature
    labels = torch.arange(len(scores))
    rows, cols = (F.cross_entropy(x, labels, reduction="none") for x in (scores, scores.T))
    if of_options.reduction == "none":
        return rows, cols
    if of_options.reduction == "sum":
        return rows.sum() + cols.sum()
    return rows.mean() + cols.mean()


def test_checks_set_options_of_a_function_and_leave_it_as_it_was(monkeypatch):
    monkeypatch.setattr(of_options, "temperature", 0.1, raising=False)
    monkeypatch.setattr(of_options, "reduction", "mean", raising=False)
    only = ["low_temperature", "reductions_agree", "agrees_with_reference"]
    for check in loss_checks(of_options, ids=False, reference=formula_of_options, only=only):
        check()
        assert vars(of_options) == {"temperature": 0.1, "reduction": "mean"}


def formula_of_options(loss, images, texts):
    """It is right at the temperature of the test alone."""
    return planted.InfoNCE(0.1, loss.reduction)(images, texts)


class Tempered(torch.nn.Module):
    """Its temperature is a tensor: a parameter or a buffer."""

    def __init__(self, trained: bool, overflows: bool):
        super().__init__()
        self.overflows = overflows
        if trained:
            self.temperature = torch.nn.Parameter(torch.tensor(0.07))
        else:
            self.register_buffer("temperature", torch.tensor(0.07))

    def forward(self, images, texts):
        scores = F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T / self.temperature
        if self.overflows:
            return (scores.exp().sum(1).log() - scores.diagonal()).mean()
        return F.cross_entropy(scores, torch.arange(len(scores)))


@pytest.mark.parametrize("trained", [False, True])
def test_a_temperature_may_be_a_parameter_or_a_buffer(trained):
    loss = Tempered(trained, overflows=False)
    assert check_loss(loss, ids=False, only=["low_temperature"]).names("passed")
    assert loss.temperature == torch.tensor(0.07)
    with pytest.raises(ConformanceError, match=r"low_temperature: .* is not finite"):
        check_loss(Tempered(trained, overflows=True), ids=False, only=["low_temperature"])


def test_all_failures_are_listed():
    only = ["memory_grows_linearly", "swapped_sides", "rotation"]
    one_way = lambda images, texts: F.cross_entropy(images @ texts.T, torch.arange(len(images)))  # noqa: E731
    with pytest.raises(ConformanceError) as error:
        check_loss(one_way, ids=False, normalizes=False, only=only)
    first, *failures = str(error.value).splitlines()
    assert first == "<lambda>: 1 passed, 2 failed"
    assert {line.split()[1] for line in failures} == {"memory_grows_linearly:", "swapped_sides:"}
    assert error.value.report.names("passed") == ["rotation"]
    for twin in (pickle.loads(pickle.dumps(error.value)), copy.deepcopy(error.value)):
        assert (twin.report, str(twin)) == (error.value.report, str(error.value))


def test_the_report_is_a_table():
    report = check_loss(clip, call=units, ids=False, only=["rotation", "renamed_ids"])
    first, *rows = str(report).splitlines()
    assert first == "clip: 1 passed, 1 skipped"
    assert [row.split()[:2] for row in rows] == [["renamed_ids", "skipped"], ["rotation", "passed"]]


def test_an_expected_failure_is_checked():
    expected = {"memory_grows_linearly": "it holds the scores"}
    options: Any = {"call": units, "ids": False, "only": ["memory_grows_linearly", "rotation"]}
    report = check_loss(clip, expected_failures=expected, **options)
    assert report.names("expected failure") == ["memory_grows_linearly"]
    with pytest.raises(
        ConformanceError, match="rotation: passed, but was expected to fail: no reason"
    ):
        check_loss(clip, expected_failures=expected | {"rotation": "no reason"}, **options)


def test_the_loss_is_left_as_it_was():
    loss = itrloss.SigmoidLoss()
    before = [p.clone() for p in loss.parameters()]
    check_loss(
        loss,
        only=["gradients_of_parameters", "state_dict_round_trip", "repeated_calls", "gradcheck"],
    )
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype
        for a, b in zip(before, loss.parameters(), strict=True)
    )
    assert all(p.grad is None for p in loss.parameters())


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (
            ValueError,
            "only: expected 'result_is_a_number', .*, got 'gradchek'; did you mean 'gradcheck'",
            {"only": ["gradchek"]},
        ),
        (
            ValueError,
            "expected_failures: expected 'result_is_a_number', .*, got 'x'",
            {"expected_failures": {"x": ""}},
        ),
        (ValueError, "processes: expected at least 1, got 0", {"processes": 0}),
        (TypeError, "loss: expected a module or function, got float", {"loss": 1.0}),
        (TypeError, r"loss: .* got the class: pass TripletLoss", {"loss": itrloss.TripletLoss}),
        (TypeError, "call: expected a module or function, got str", {"call": "loss(x, y)"}),
        (
            TypeError,
            "reference: expected a module or function, got Tensor",
            {"reference": torch.ones(1)},
        ),
    ],
)
def test_wrong_arguments_are_named(error, message, options):
    with pytest.raises(error, match=message):
        check_loss(**{"loss": clip, **options})


def test_every_check_says_what_it_demands_and_there_are_many():
    assert len(CHECKS) >= 30
    for name, check in CHECKS.items():
        assert 5 <= len(check.about.split()) < 60, name
