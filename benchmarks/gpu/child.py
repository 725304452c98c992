"""One step in a process of its own: ``python -m benchmarks.gpu.child STEP``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

from . import plan
from .session import Session

DEFAULT = 60.0  # seconds of a step that is run by hand


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a step; return 1 if one of its items failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=plan.all_steps())
    parser.add_argument("--until", type=float, help="when to begin nothing new, as of time.time()")
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--part")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args(arguments)
    seconds = DEFAULT if args.until is None else args.until - time.time()
    session = Session(args.step, args.dry, seconds, args.figures, args.part)
    run(session)
    # PyTorch's threads drop the last references of a backward pass after it has returned; if Python
    # ends meanwhile, the process aborts.
    time.sleep(0.2)
    return int(session.failed)


def run(session: Session) -> None:
    """Run the function of a step."""
    step = plan.all_steps()[session.step]
    module = importlib.import_module(f"benchmarks.gpu.{step.module}")
    tiles = toy_tiles() if session.dry else contextlib.nullcontext()
    with tiles, session.attempt():
        module.STEPS[step.name](session)


@contextlib.contextmanager
def toy_tiles() -> Iterator[None]:
    """Return a context in which small matrices have several tiles, blocks and panels."""
    from itrloss.engine import triton as engine

    toys = {
        "PRODUCT_TILES": (engine.TileConfig(16, 32, 16, 4, 4, 2),),
        "READING_TILE": engine.TileConfig(16, 16, 16, 1, 4, 2),
        "BLOCK": 2**11,
        "BLOCK_ROWS": 32,
        "PANEL": 2**13,
        "whole_tiles": lambda size: max(size // 32 * 32, 32),
    }
    with patch.multiple(engine, **toys):
        yield


if __name__ == "__main__":
    sys.exit(main())
