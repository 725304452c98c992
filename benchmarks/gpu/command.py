"""The command line: ``python -m benchmarks gpu``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from . import goals, plan, record, summary
from .plan import Step
from .record import Record, Row

ROOT = Path(__file__).parents[2]  # of the checkout
TOOK_TOO_LONG = 124  # exit status, as of timeout(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps, write and print the record; return 1 if a step failed."""
    args = parser().parse_args(arguments)
    slot = None if args.steps else args.slot
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        log = args.out / ("log_steps.txt" if slot is None else f"log_slot{slot}.txt")
        setup = Setup(args.out, log, Path(folder), args.dry, environment(Path(folder), args))
        seconds = args.seconds * (plan.DRY if args.dry else 1)
        steps = plan.chosen(args.steps) if args.steps else plan.SLOTS[args.slot]
        found = measured(slot, steps, setup, seconds)
    show(found, args.out / found.name)
    return 1 if found.failures() else 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    lines: list[str] = []
    for slot, steps in plan.SLOTS.items():
        lines.append(f"slot {slot}:")
        lines += [f"  {step.name:10} {step.seconds:4} s  {step.about}" for step in steps]
    made = argparse.ArgumentParser(
        prog="python -m benchmarks gpu",
        description="Ten minutes on one CUDA device: does the engine work, is it right, how fast.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(lines),
    )
    add = made.add_argument
    add("--slot", type=int, choices=plan.SLOTS, default=1, help="default: 1")
    add("--steps", nargs="+", metavar="STEP", choices=plan.all_steps(), help="only these, of any")
    add("--out", type=Path, default=Path("gpu"), metavar="FOLDER", help="default: gpu")
    add("--wheels", type=Path, metavar="FOLDER", help="wheels of other libraries, to be unpacked")
    add("--seconds", type=float, default=plan.TOTAL, help=f"of the slot ({plan.TOTAL})")
    add("--dry", action="store_true", help="toy sizes on a CPU, in Triton's interpreter")
    return made


class Setup(NamedTuple):
    """What all steps have in common."""

    out: Path  # the folder of the record
    log: Path  # the file that gets all output of the steps
    folder: Path  # for temporary files
    dry: bool
    environment: dict[str, str]


def environment(folder: Path, args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of the steps' processes."""
    paths = [str(ROOT / "src"), str(ROOT)]
    if args.wheels is not None:
        for wheel in sorted(args.wheels.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(folder / "wheels")
        paths.append(str(folder / "wheels"))
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    found = {
        # Empty caches, so that the time of compiling is that of a new user.
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
    }
    if args.dry:
        found |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    else:
        found.pop("TRITON_INTERPRET", None)
    return found


# ---------------------------------------------------------------------------------- steps in a slot


def measured(slot: int | None, steps: Sequence[Step], setup: Setup, seconds: float) -> Record:
    """Run the steps one after the other; write the record after each."""
    found = Record(slot, setup.dry)
    end = time.monotonic() + seconds - plan.RESERVE
    setup.log.write_text("")
    for step in steps:
        left = end - time.monotonic()
        row, figures = outcome(step, left, setup)
        found.steps.append(row)
        found.figures += figures
        if step.name == "machine":
            describe(found, figures)
        if step.name == "correct":
            found.correct = row.get("rc") == 0
        found.goals = goals.judged([] if setup.dry else found.figures)  # toys reach no goal
        record.save(found, setup.out / found.name)
        print(summary.step_line(row), flush=True)
    return found


def describe(found: Record, figures: list[Row]) -> None:
    """Put the description of the machine into the record."""
    if not figures:
        return
    about = figures[0]
    found.device = about.get("device", found.device)
    found.capability = about.get("capability")
    found.torch = about.get("torch")
    found.triton = about.get("triton")
    found.cuda = about.get("cuda")
    found.driver = about.get("driver")
    found.python = about.get("python")
    found.itrloss = about.get("itrloss")
    found.commit = about.get("commit")
    found.engine = about.get("engine")
    found.date = about.get("date")


def outcome(step: Step, left: float, setup: Setup) -> tuple[Row, list[Row]]:
    """Run a step, unless something is missing; return its row of the record and its figures."""
    row: Row = {"name": step.name}
    missing = lacks(step, setup.dry)
    if missing:
        return row | {"skipped": missing}, []
    if left < plan.LEAST:
        return row | {"skipped": "no time", "left": round(max(left, 0))}, []
    limit = round(min(step.seconds * (plan.DRY if setup.dry else 1), left))
    start = time.monotonic()
    codes, figures = run(step, limit, setup)
    failed = [code for code in codes if code != 0]
    rc = failed[0] if failed else 0
    return row | {"limit": limit, "rc": rc, "seconds": round(time.monotonic() - start, 1)}, figures


def lacks(step: Step, dry: bool) -> str:
    """Return what a step needs and is not here, or ""."""
    if step.needs and find_spec(step.needs) is None:
        return f"{step.needs} is not installed"
    if step.tool and not dry and shutil.which(step.tool[0]) is None:
        return f"{step.tool[0]} is not installed"
    return ""


def run(step: Step, limit: float, setup: Setup) -> tuple[list[int], list[Row]]:
    """Run a step's parts in processes at the same time; return exit statuses and figures."""
    files: list[Path] = []
    commands: list[list[str]] = []
    for number, part in enumerate(step.parts or (None,)):
        file = setup.folder / f"{step.name}{number}.jsonl"
        files.append(file)
        commands.append(command(step, part, limit, file, setup))
    end = time.monotonic() + limit
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        codes = list(pool.map(lambda x: status(x, end, setup), commands))
    figures: list[Row] = []
    for file in files:
        if file.exists():
            lines = file.read_text(encoding="utf-8").splitlines()
            figures += [json.loads(line) for line in lines if line.endswith("}")]
    return codes, figures


def command(step: Step, part: str | None, limit: float, figures: Path, setup: Setup) -> list[str]:
    """Return the command of a step, or of a part of it."""
    words = [sys.executable, "-m", "benchmarks.gpu.child", step.name]
    words += ["--until", str(time.time() + plan.SHARE * limit), "--figures", str(figures)]
    if part is not None:
        words += ["--part", part]
    if setup.dry:
        words.append("--dry")
    program = shutil.which(step.tool[0]) if step.tool else None
    if program is not None:
        options = [word.format(out=setup.out) for word in step.tool[1:]]
        words = [program, *options, *words]
    return words


def status(words: list[str], end: float, setup: Setup) -> int:
    """Return the exit status of a process; at the end it is killed, with its children."""
    with open(setup.log, "a", encoding="utf-8") as log:
        print("$", *words, file=log, flush=True)
        process = subprocess.Popen(
            words,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=setup.environment,
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            return process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return TOOK_TOO_LONG
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


# ------------------------------------------------------------------------------------------ results


def show(found: Record, path: Path) -> None:
    """Print the record, write it as text, and draw its throughput where matplotlib is there."""
    text = summary.text(found)
    path.with_suffix(".txt").write_text(text, encoding="utf-8")
    print(text)
    try:
        summary.plot(found, path.with_suffix(".svg"))
    except ImportError as error:
        print(error)
    for name in found.failures():
        print(f"FAILED  {name}")
    print(path)
