"""Running the checks on a loss: all of them into a report, or one by one under pytest."""

from __future__ import annotations

import textwrap
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args
from unittest import SkipTest, mock

import torch

from ..checks import as_size, one_of
from . import properties, transformations  # noqa: F401 — register the checks
from .registry import CHECKS
from .subject import Loss, Subject

Status = Literal["passed", "failed", "expected failure", "skipped"]


class Outcome(NamedTuple):
    """The result of a check. ``reason``: why it failed or was skipped; for an expected failure, the
    reason that the caller named.
    """

    name: str
    status: Status
    reason: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """The outcomes of all checks on one loss; ``str`` gives a table."""

    loss: str
    outcomes: tuple[Outcome, ...]

    def names(self, status: Status) -> list[str]:
        """Return the names of the checks with this outcome."""
        return [x.name for x in self.outcomes if x.status == status]

    @property
    def summary(self) -> str:
        """One line of numbers."""
        counts = Counter(x.status for x in self.outcomes)
        found = [f"{counts[status]} {status}" for status in get_args(Status) if counts[status]]
        return f"{self.loss}: {', '.join(found)}"

    def __str__(self) -> str:
        width = max((len(x.name) for x in self.outcomes), default=0)
        rows = [self.summary]
        for x in self.outcomes:
            row = f"{x.name:{width}}  {x.status:16}  {x.seconds:5.1f} s  {x.reason}"
            rows.append(row.rstrip())
        return "\n".join(rows)


class ConformanceError(AssertionError):
    """All checks that a loss failed; ``report`` has the others, too."""

    def __init__(self, report: Report):
        super().__init__(report)  # what a copy is made of
        self.report = report

    def __str__(self) -> str:
        failed = [f"- {x.name}: {x.reason}" for x in self.report.outcomes if x.status == "failed"]
        return "\n".join([self.report.summary, *failed])


@dataclass(frozen=True)
class LossCheck:
    """One check, bound to a loss: call it. ``str`` gives the check's name."""

    name: str
    subject: Subject
    expected: str | None  # why it should fail

    def __str__(self) -> str:
        return self.name

    def __call__(self) -> None:
        """Raise an AssertionError if the loss fails, or passes although a failure is expected;
        SkipTest if neither.

        pytest and unittest take a ``unittest.SkipTest`` for a skipped test.
        """
        outcome = self.run()
        if outcome.status == "skipped":
            raise SkipTest(outcome.reason)
        if outcome.status == "failed":
            raise AssertionError(f"{self.name}: {outcome.reason}")

    def run(self) -> Outcome:
        """Return the outcome."""
        start = time.perf_counter()
        status: Status = "passed"
        reason = ""
        check = CHECKS[self.name]
        try:
            for need in check.needs:
                self.subject.require(need)
            # of a function, whose copy is itself; a module is copied
            attributes = getattr(self.subject.loss, "__dict__", {})
            with on_the_cpu(), mock.patch.dict(attributes), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of losses about odd batches
                check.function(self.subject)
        except SkipTest as skip:
            status = "skipped"
            reason = str(skip)
        except AssertionError as error:
            status = "failed"
            reason = str(error)
        except Exception as error:  # a loss that cannot be called as the check does
            status = "failed"
            reason = f"{type(error).__name__}: {error}"
        if self.expected is not None and status == "failed":
            status = "expected failure"
            reason = self.expected
        elif self.expected is not None and status == "passed":
            status = "failed"
            reason = f"passed, but was expected to fail: {self.expected}"
        reason = textwrap.shorten(reason, 300, placeholder=" …")
        return Outcome(self.name, status, reason, time.perf_counter() - start)


def on_the_cpu() -> AbstractContextManager[object]:
    """Return a context in which tensors are made on the CPU, whatever the default device is."""
    # a context would get into compiled graphs
    if torch.empty(0).device.type == "cpu":
        return nullcontext()
    return torch.device("cpu")


def loss_checks(
    loss: Loss,
    *,
    call: Callable[..., object] | None = None,
    ids: bool = True,
    normalizes: bool = True,
    processes: int = 1,
    reference: Callable[..., object] | None = None,
    expected_failures: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> list[LossCheck]:
    """Return the checks, each a function without arguments with ``str`` as its name, for pytest.

    ``@pytest.mark.parametrize("check", loss_checks(loss), ids=str)`` makes a test of each; its body
    is ``check()``. It takes the arguments of :func:`check_loss`.
    """
    if isinstance(loss, type):
        name = loss.__name__
        raise TypeError(f"loss: expected a module or function, got the class: pass {name}(...)")
    for argument, function in (("loss", loss), ("call", call), ("reference", reference)):
        if not callable(function) and (function is not None or argument == "loss"):
            got = type(function).__name__
            raise TypeError(f"{argument}: expected a module or function, got {got}")
    processes = as_size("processes", processes)
    expected = dict(expected_failures or {})
    chosen = CHECKS.keys() if only is None else set(only)
    for argument, names in (("expected_failures", expected), ("only", chosen)):
        for name in names:
            one_of(argument, name, *CHECKS)
    subject = Subject(loss, call, ids, normalizes, processes, reference)
    return [LossCheck(name, subject, expected.get(name)) for name in CHECKS if name in chosen]


def check_loss(loss: Loss, **options: Any) -> Report:
    """Return the report of all checks on a contrastive loss, or raise an error that lists those
    that it fails.

    Copies of the loss are checked, on small batches on the CPU. See :doc:`testing` for the checks.

    Args:
        loss: a module or function ``loss(images, texts)`` or ``loss(images, texts, image_ids,
            text_ids)`` of (N, D) and (M, D) embeddings, and (N,) and (M,) integers of which equal
            ones match.
        call: ``call(loss, images, texts)``, or with ids ``call(loss, images, texts, image_ids,
            text_ids)``, for a loss with another signature.
        ids: whether the loss takes ids. False: image i matches text i alone, and checks with ids
            are skipped.
        normalizes: whether the loss, as it is called, is one of cosines. False: embeddings have
            unit length.
        processes: 2 or more: also compare a loss with the attribute ``gather`` in so many
            processes. They are spawned, so a script needs ``if __name__ == "__main__":``.
        reference: the formula in plain PyTorch: ``reference(loss, *inputs)`` is what
            ``loss(*inputs)`` should return.
        expected_failures: reasons by the names of checks. One that passes all the same counts as
            failed.
        only: names of checks; all others are left out.

    Returns:
        A :class:`Report`; ``print`` shows it as a table.

    Raises:
        ConformanceError: an AssertionError, if a check failed. Its ``report`` has all outcomes.
        ValueError: for a name that no check has.
    """
    checks = loss_checks(loss, **options)
    name = getattr(loss, "__name__", type(loss).__name__)  # modules have none of their own
    report = Report(name, tuple(check.run() for check in checks))
    if report.names("failed"):
        raise ConformanceError(report)
    return report
