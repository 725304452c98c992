"""What a step of a slot works with: where it runs, how long it may, and where its figures go."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from ..cases import embeddings
from ..runner import graphed
from .record import Row, as_json

X = TypeVar("X")
BURST = 0.02  # seconds of calls between two synchronisations: waiting for one takes 20 microseconds


class Session:
    """One step in its process.

    Args:
        step: its name.
        dry: toy sizes on a CPU, in Triton's interpreter.
        seconds: after which it begins nothing new.
        figures: the file to which figures are written, a JSON object a line; None: they are kept.
        part: the name of the part of the step that this process runs; None: all of it.
    """

    def __init__(
        self,
        step: str,
        dry: bool,
        seconds: float,
        figures: Path | None = None,
        part: str | None = None,
    ):
        self.step = step
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.deadline = time.perf_counter() + seconds
        self.path = figures
        self.part = part
        self.figures: list[Row] = []
        self.failed = False
        self._pairs: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}

    def pick(self, production: X, toy: X) -> X:
        """Return the production sizes, or those of a dry run."""
        return toy if self.dry else production

    def say(self, **figure: object) -> None:
        """Write a figure, at once: a later crash does not lose it."""
        row: Row = {"step": self.step, **figure}
        self.figures.append(row)
        line = as_json(row)
        print(line, flush=True)
        if self.path is not None:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    @contextlib.contextmanager
    def attempt(self, **about: object) -> Iterator[None]:
        """Return a context in which an error becomes a figure, and the step goes on and fails."""
        try:
            yield
        except Exception as error:
            self.failed = True
            text = f"{type(error).__name__}: {str(error)[:400]}"
            self.say(**about, error=text, where=last_lines_of_traceback())
        with contextlib.suppress(Exception):
            self.free()

    def is_late(self, **about: object) -> bool:
        """Return whether there is no time for another item, and write what is not begun."""
        if time.perf_counter() < self.deadline:
            return False
        self.say(**about, stopped="no time")
        return True

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Give cached memory back, so that the next item finds all of it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def pair(
        self, n: int, m: int, dim: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[Tensor, Tensor]:
        """Return (N, D) images and (M, D) texts on the device, which require gradients.

        The last ones are kept: to draw 32768 x 1024 takes a second.
        """
        key = n, m, dim, dtype
        if key not in self._pairs:
            images, texts = embeddings(max(n, m), dim)
            made = images[:n].to(self.device, dtype), texts[:m].to(self.device, dtype)
            self._pairs = {key: made}
        v, w = self._pairs[key]
        return v.detach().requires_grad_(), w.detach().requires_grad_()

    def graph(self, run: Callable[[], None], trained: Sequence[Tensor]) -> Callable[[], None]:
        """Return a step as a CUDA graph; in a dry run the step itself."""
        if self.device.type != "cuda":
            return run
        return graphed(run, self.device, trained)

    def timed(self, run: Callable[[], object], seconds: float = 0.5) -> Row:
        """Return the median seconds of a call, and the host's until all of it is launched.

        Calls follow each other as in training; the device is waited for after a burst of them.
        """
        if self.dry:
            once, host = self._burst(run, 1)
            return {"seconds": once, "host seconds": host, "rounds": 1}
        run()
        once = self._burst(run, 1)[0]
        calls = max(1, math.ceil(BURST / max(once, 1e-6)))
        least = 5 if once * calls < 1 else 3
        rounds = max(least, min(50, int(seconds / (once * calls))))
        bursts = [self._burst(run, calls) for _ in range(rounds)]
        return {
            "seconds": float(f"{statistics.median(x[0] for x in bursts):.4g}"),
            "host seconds": float(f"{statistics.median(x[1] for x in bursts):.4g}"),
            "rounds": rounds * calls,
        }

    def _burst(self, run: Callable[[], object], calls: int) -> tuple[float, float]:
        """Return the seconds of a call, and the host's share, from several calls."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        launched = time.perf_counter()
        self.synchronize()
        return (time.perf_counter() - start) / calls, (launched - start) / calls


def gflops(flops: float, row: Row) -> int:
    """Return 10^9 FLOPs a second of a timed row."""
    return round(flops / row["seconds"] / 1e9)


def last_lines_of_traceback() -> list[str]:
    """Return where an error was raised, with paths from the checkout on, not of this machine."""
    text = traceback.format_exc().replace(f"{Path(__file__).parents[2]}/", "")
    return text.splitlines()[-6:]
