"""Steps that another program runs or looks at: a sanitizer, a profiler, the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from .losses import LOSSES
from .session import Session
from .speed import Step

ROOT = Path(__file__).parents[2]


def sanitizer(session: Session) -> None:
    """Run every loss on ragged sizes with ids, and on a given matrix: compute-sanitizer looks."""
    n, m, dim = session.pick((1500, 1421, 72), (10, 14, 16))
    for name in session.pick(list(LOSSES), ["siglip"]):
        if session.is_late(loss=name):
            return
        with session.attempt(loss=name):
            v, w = session.pair(n, m, dim)
            ids = torch.arange(n, device=v.device) % 50, torch.arange(m, device=v.device) % 60
            loss = LOSSES[name](engine="triton").to(session.device)
            loss(v, w, *ids).backward()
            scores = torch.randn(n, m, device=v.device, requires_grad=True)
            loss(scores=scores, image_ids=ids[0], text_ids=ids[1]).backward()
            session.synchronize()
            session.say(loss=name)


def one(session: Session) -> None:
    """Run one step, for a profiler around it."""
    n, dim = session.pick((32768, 512), (20, 16))
    loss = LOSSES["infonce learnable"](engine="triton").to(session.device)
    Step(loss, session.pair(n, n, dim))()
    session.synchronize()
    session.say(loss="infonce learnable", shape=[n, n, dim])


def tests(session: Session) -> None:
    """Run the tests of the Triton engine; in a dry run pytest tells its version."""
    files = sorted(ROOT.glob("tests/engine/test_triton_*.py"))
    production = ["-q", "-p", "no:cacheprovider", "-m", "not slow", *map(str, files)]
    if find_spec("xdist"):  # most of the time is compiling
        production += ["-n", str(min(16, os.cpu_count() or 1))]
    words = [sys.executable, "-m", "pytest", *session.pick(production, ["--version"])]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, flush=True)
    lines = done.stdout.strip().splitlines() or [""]
    session.say(rc=done.returncode, summary=lines[-1])
    if done.returncode != 0:
        raise RuntimeError(f"pytest ended with {done.returncode}")


STEPS = {"sanitizer": sanitizer, "ncu": one, "tests": tests}
