"""The command line: ``itrloss bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from .bench import report, runner
from .bench.cases import KINDS, LOSSES, SUITES, Case, parse_shape
from .bench.peers import PEERS
from .bench.runner import VARIANTS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = argparse.ArgumentParser(prog="itrloss", description="Losses and re-rankers for image-text retrieval.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_bench(commands)
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except (ImportError, OSError, ValueError) as error:
        print(f"itrloss {args.command}: {error}", file=sys.stderr)
        return 2


def _add_bench(commands: Any) -> None:
    def listed(title: str, entries: dict[str, str]) -> str:
        return title + "".join(f"\n  {name:32} {about}" for name, about in entries.items())

    peers = {name: f"another library's, for {', '.join(peer.losses)}" for name, peer in PEERS.items()}
    parser = commands.add_parser(
        "bench",
        help="time losses beside plain PyTorch, other libraries and the bare matrix products",
        description="Forward and backward of losses, their variants interleaved in one process: medians and ratios.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n\n".join(
            (
                listed("suites:", {name: suite.about for name, suite in SUITES.items()}),
                listed("variants:", {**VARIANTS, **peers}),
                listed("losses, and the numbers of their shapes:", {n: KINDS[x.kind][0] for n, x in LOSSES.items()}),
            )
        ),
    )
    add = parser.add_argument
    add("suites", nargs="*", metavar="suite", help="by name (below); default: quick")
    add("--losses", nargs="+", metavar="LOSS", help="only these of a suite; with --shapes, any")
    add("--shapes", nargs="+", metavar="NxMxD", help="instead of the suite's; 8192x512 is 8192x8192x512")
    add("--variants", nargs="+", metavar="VARIANT", help="instead of the suite's")
    add("--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="default: the suite's")
    add("--device", help="default: the suite's")
    add("--threads", type=int, help="of PyTorch on the CPU")
    add("--seconds", type=float, default=10, help="about how long to measure each case (10)")
    add("--accuracy", action="store_true", help="also the error of pairs' gradients against float64")
    add("--out", type=Path, metavar="FILE.json", help="write the rows and the machine's name")
    add("--plot", type=Path, metavar="FILE.svg", help="draw the ratios (needs matplotlib)")
    parser.set_defaults(run=_bench)


def _bench(args: argparse.Namespace) -> int:
    cases = _cases(args)
    if args.threads is not None:
        if args.threads < 1:
            raise ValueError(f"threads: expected at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    if args.plot:
        report.check_plot(args.plot)
    device = cases[0][0].device
    about = runner.machine(device)
    rows: list[runner.Row] = []
    if args.out:
        report.save(args.out, about, rows)  # before anything is measured: it might not be possible
    for number, (case, variants) in enumerate(cases, 1):
        print(f"[{number}/{len(cases)}] {case} …", file=sys.stderr, flush=True)
        found = runner.measure(case, variants, args.seconds, args.accuracy)
        rows += found
        print(report.table(found), "", sep="\n", flush=True)
        if args.out:  # after every case: a long run that is cut off has left what it found
            report.save(args.out, about, rows)
    if args.plot:
        report.plot(args.plot, about, rows)
    print(", ".join(str(about[key]) for key in ("processor", "torch", "date")), f"{about['threads']} threads")
    return 0


def _cases(args: argparse.Namespace) -> list[tuple[Case, tuple[str, ...]]]:
    """Cases and their variants, as the arguments have it."""
    known = {"suites": SUITES, "losses": LOSSES, "variants": {**VARIANTS, **PEERS}}
    for option, names in known.items():
        for name in getattr(args, option) or ():
            if name not in names:
                raise ValueError(f"{option}: expected some of {', '.join(names)}; got {name!r}")
    chosen: dict[Case, tuple[str, ...]] = {}
    for suite in (SUITES[name] for name in args.suites or ["quick"]):
        losses = args.losses or dict.fromkeys(case.loss for case in suite.cases)
        cases = [case for case in suite.cases if case.loss in losses]
        if args.shapes:
            dtype, device = suite.cases[0].dtype, suite.cases[0].device
            shapes = [(loss, parse_shape(text, LOSSES[loss].kind)) for text in args.shapes for loss in losses]
            cases = [Case(loss, shape, dtype, device) for loss, shape in shapes]
        for case in cases:
            dtype = getattr(torch, args.dtype) if args.dtype else case.dtype
            case = replace(case, dtype=dtype, device=args.device or case.device)
            chosen[case] = tuple(dict.fromkeys((*chosen.get(case, ()), *(args.variants or suite.variants))))
    absent = set(args.losses or ()) - {case.loss for case in chosen}
    if absent:
        raise ValueError(f"losses: these suites have no {', '.join(sorted(absent))}; give --shapes too")
    devices = {case.device for case in chosen}
    if len(devices) > 1:
        raise ValueError(f"suites: expected those of one device, got {', '.join(sorted(devices))}; give --device")
    for device in devices:
        try:
            torch.empty(1, device=device).add_(1).item()  # waits on purpose: a device that cannot compute says so now
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            raise ValueError(f"device: {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return list(chosen.items())


if __name__ == "__main__":
    sys.exit(main())
