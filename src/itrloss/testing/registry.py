"""The checks by name, in the order in which they run."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from .subject import Batch, Loss, Result, Subject, result_of, same

CheckFunction = Callable[[Subject], None]
Results = Iterator[Result]


class Check(NamedTuple):
    """A function that raises an AssertionError if a loss lacks the property in its docstring."""

    function: CheckFunction
    needs: tuple[str, ...]

    @property
    def about(self) -> str:
        """What a loss has to do, and why."""
        return inspect.getdoc(self.function) or ""


CHECKS: dict[str, Check] = {}


def check(*needs: str) -> Callable[[CheckFunction], CheckFunction]:
    """Return a decorator that registers a check under its function's name; ``needs``: see
    :meth:`Subject.require`.
    """

    def register(function: CheckFunction) -> CheckFunction:
        """Register a check; return it."""
        CHECKS[function.__name__] = Check(function, needs)
        return function

    return register


@dataclass(frozen=True)
class Trial:
    """A loss and a batch that a transformation is tried on."""

    subject: Subject
    loss: Any  # a copy of the subject's, with other parameters, that has computed another batch
    batch: Batch  # its embeddings require gradients

    def result(self, batch: Batch | None = None, loss: Loss | None = None) -> Result:
        """Return the value for a batch that was made of the trial's, and the gradients of the
        trial's embeddings; by default, of its own batch and loss.
        """
        chosen: Loss = self.loss if loss is None else loss
        value = self.subject.value(batch or self.batch, chosen)
        return result_of(value, self.batch, chosen)


def same_after(
    *needs: str, dtype: torch.dtype = torch.float64, **size: Any
) -> Callable[[Callable[[Trial], Results]], CheckFunction]:
    """Return a decorator that makes a check of a transformation: a function that yields results of
    a trial which have to equal the plain one.

    Args:
        needs: see :meth:`Subject.require`.
        dtype: of the loss and of the batch. In float32 results may differ by 1e-3.
        size: arguments of :meth:`Subject.batch`.
    """
    rtol = 1e-7 if dtype == torch.float64 else 1e-3

    def register(transformation: Callable[[Trial], Results]) -> CheckFunction:
        """Register a check; return it."""

        @functools.wraps(transformation)
        def run(subject: Subject) -> None:
            """Raise an AssertionError unless all results are the same."""
            loss = altered(subject.fresh(dtype))
            subject.value(subject.batch(**size, seed=1).to(dtype), loss)
            batch = subject.batch(**size).to(dtype).leaves()
            expected = Trial(subject, copy.deepcopy(loss), batch).result()
            for result in transformation(Trial(subject, loss, batch)):
                same(result, expected, rtol=rtol, atol=rtol / 100)

        return check(*needs)(run)

    return register


def altered(loss: Loss) -> Loss:
    """Return the loss with other parameters and floating-point buffers, if it has any."""
    if isinstance(loss, nn.Module):
        for x in (*loss.parameters(), *loss.buffers()):
            if x.is_floating_point():
                x.data.mul_(1.25).add_(0.05)
    return loss
