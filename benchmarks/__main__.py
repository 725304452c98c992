"""The command line: ``python -m benchmarks``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from . import report, runner
from .cases import KINDS, LOSSES, SUITES, Case, check_shape, parse_shape
from .gpu import command as gpu
from .peers import PEERS
from .runner import VARIANTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the results; return the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["gpu"]:
        return gpu.main(words[1:])
    args = _parser().parse_args(words)
    try:
        _run(args)
    except (ImportError, MemoryError, OSError, ValueError) as error:
        return _refuse(error)
    except RuntimeError as error:  # PyTorch's out-of-memory errors, on any device
        if "memory" not in str(error):
            raise
        return _refuse(error)
    return 0


def _refuse(error: Exception) -> int:
    print(f"benchmarks: {(str(error) or type(error).__name__).splitlines()[0]}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    def listed(title: str, entries: Iterable[tuple[str, str]]) -> str:
        return title + "".join(f"\n  {name:32} {about}" for name, about in entries)

    peers = {
        name: f"another library's, for {', '.join(peer.losses)}" for name, peer in PEERS.items()
    }
    lists = (
        listed("suites:", ((name, suite.about) for name, suite in SUITES.items())),
        listed("variants:", {**VARIANTS, **peers}.items()),
        listed(
            "losses, and the numbers of their shapes:",
            ((name, KINDS[x.kind].axes) for name, x in LOSSES.items()),
        ),
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Forward and backward of losses, their variants interleaved in one process: "
        "medians and ratios. `gpu` as the first word: all about one CUDA device, see gpu --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n\n".join(lists),
    )
    add = parser.add_argument
    add(
        "--suites",
        nargs="+",
        metavar="SUITE",
        choices=SUITES,
        default=["quick"],
        help="default: quick",
    )
    add(
        "--losses",
        nargs="+",
        metavar="LOSS",
        choices=LOSSES,
        help="only these of a suite; any with --shapes",
    )
    add(
        "--shapes",
        nargs="+",
        metavar="NxMxD",
        help="instead of the suite's; 8192x512 is 8192x8192x512",
    )
    add(
        "--variants",
        nargs="+",
        metavar="VARIANT",
        choices=[*VARIANTS, *PEERS],
        help="instead of the suite's",
    )
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16", "float64"),
        help="default: the suite's",
    )
    add("--device", help="default: the suite's")
    add("--threads", type=int, help="PyTorch's threads on the CPU")
    add("--seconds", type=float, default=10, help="about how long to measure each case (10)")
    add(
        "--accuracy", action="store_true", help="also the error of pairs' gradients against float64"
    )
    add(
        "--out",
        type=Path,
        metavar="FILE.json",
        help="write the rows and a description of the machine",
    )
    add("--plot", type=Path, metavar="FILE.svg", help="draw the ratios (needs matplotlib)")
    return parser


def _run(args: argparse.Namespace) -> None:
    cases = _cases(args)
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"threads: expected at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    if args.out:
        report.check_path(args.out)
    if args.plot:
        report.check_plot(args.plot)
    machine = runner.machine(next(iter(cases)).device)
    rows: list[runner.Row] = []
    for number, (case, variants) in enumerate(cases.items(), 1):
        print(f"[{number}/{len(cases)}] {case} …", file=sys.stderr, flush=True)
        measured = runner.measure(case, variants, args.seconds, args.accuracy)
        rows += measured
        print(report.table(measured), "", sep="\n", flush=True)
        if args.out:  # after every case, so that an interrupted run keeps its results
            report.save(args.out, machine, rows)
    if args.plot:
        report.plot(args.plot, machine, rows)
    print(
        ", ".join(
            f"{key} {machine[key]}" for key in ("processor", "threads", "blas", "torch", "date")
        )
    )


def _cases(args: argparse.Namespace) -> dict[Case, tuple[str, ...]]:
    """Return each case and its variants, as selected by the arguments."""
    chosen: dict[Case, tuple[str, ...]] = {}
    for suite in (SUITES[name] for name in args.suites):
        losses = args.losses or dict.fromkeys(case.loss for case in suite.cases)
        cases = [case for case in suite.cases if case.loss in losses]
        if args.shapes:
            shapes = [
                (loss, parse_shape(text, LOSSES[loss].kind))
                for text in args.shapes
                for loss in losses
            ]
            cases = [replace(suite.cases[0], loss=loss, shape=shape) for loss, shape in shapes]
        for case in cases:
            dtype = getattr(torch, args.dtype) if args.dtype else case.dtype
            case = replace(case, dtype=dtype, device=args.device or case.device)
            check_shape(case)
            chosen[case] = tuple(
                dict.fromkeys((*chosen.get(case, ()), *(args.variants or suite.variants)))
            )
    missing = set(args.losses or ()) - {case.loss for case in chosen}
    if missing:
        raise ValueError(
            f"losses: these suites have no {', '.join(sorted(missing))}; pass --shapes too"
        )
    devices = sorted({case.device for case in chosen})
    if len(devices) > 1:
        raise ValueError(
            f"suites: expected those of one device, got {', '.join(devices)}; pass --device"
        )
    try:
        # .item() synchronises, which raises device errors
        torch.empty(1, device=devices[0]).add_(1).item()
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"device: {devices[0]!r} cannot be used here: {str(error).splitlines()[0]}"
        ) from error
    return chosen


if __name__ == "__main__":
    sys.exit(main())
