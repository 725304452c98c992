"""The command line: ``itrloss rerank`` and ``itrloss eval``."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import files, report
from .checks import Names, check_size, one_of, require_finite
from .comparison import (
    CALIBRATED,
    METHODS,
    PLAIN,
    Entry,
    RerankerComparison,
    compare_rerankers,
    protocol_table,
    table,
)
from .metrics import (
    coco_protocol,
    default_ids,
    fold_repeated,
    latex_table,
    retrieval_results,
    save_trec,
)
from .metrics.labels import fold_parts
from .metrics.protocols import check_coco
from .report.comparison import page
from .rerank import FastReranker
from .similarity import Similarity

_RESULTS = ("out", "rankings", "queries", "latex", "report")  # options that are files to write
# Arguments of the library, which the command line has as options; not as parts of a path.
_ARGUMENTS = re.compile(r"(?<![\w/.-])(image_ids|text_ids|folds(?=:))(?![./-]?\w)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    for stream in (sys.stdout, sys.stderr):
        # a terminal without Greek letters and arrows gets question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    args, before = _parser().parse_args(arguments), signal.getsignal(signal.SIGTERM)

    def say(message: object) -> None:
        text = _ARGUMENTS.sub(lambda name: "--" + name[0].replace("_", "-"), str(message))
        print(f"itrloss {args.command}: {text}", file=sys.stderr)

    try:
        # outside the main thread, which alone may set handlers
        with contextlib.suppress(ValueError):
            # removes temporary files
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = lambda message, *_, **__: say(message)
            args.run(args)
    except (ImportError, OSError, ValueError) as error:
        say(error)
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    finally:
        with contextlib.suppress(ValueError):
            # None: a handler in C, which cannot be set again
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="itrloss", description="Losses and re-rankers for image-text retrieval."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    about = "Recalls of {} before and after re-ranking, by every method."
    scores, embeddings = (
        "a saved matrix of scores (n_images, n_texts)",
        "saved embeddings (n_images, D), (n_texts, D)",
    )
    rerank = commands.add_parser(
        "rerank", help=f"re-rank {scores}", description=about.format(scores)
    )
    rerank.add_argument("--transpose", action="store_true", help="the matrices have texts as rows")
    evaluate = commands.add_parser(
        "eval", help=f"re-rank {embeddings}", description=about.format(embeddings)
    )
    evaluate.set_defaults(transpose=False)
    for command, inputs in ((rerank, ("scores",)), (evaluate, ("images", "texts"))):
        command.set_defaults(inputs=inputs, run=_run)
        _add_arguments(command, inputs)
    return parser


def _add_arguments(parser: argparse.ArgumentParser, inputs: Sequence[str]) -> None:
    add = parser.add_argument
    for name in inputs:
        add(
            name,
            type=Path,
            help="*.npy, *.npz, *.pt, *.pkl; or what np.save made of a dictionary of arrays",
        )
    what = "the same of held-out pairs: calibrate Fast Re-ranking on them"
    add(
        "--val",
        type=Path,
        nargs=len(inputs),
        metavar=tuple(name.upper() for name in inputs),
        help=what,
    )
    bank = "other {}: look for hubs in their {}, not in the test queries"
    kinds = (
        ("embeddings",) * 2 if len(inputs) == 2 else ("scores (B, n_texts)", "scores (n_images, B)")
    )
    for name, kind in zip(("images", "texts"), kinds, strict=True):
        add(f"--bank-{name}", type=Path, metavar="FILE", help=bank.format(name, kind))
    add("--key", help="of the array in files with several (sims, or the only one)")
    what = "integers, equal where image and text match; a line each in .txt"
    add("--image-ids", type=Path, metavar="FILE", help=what)
    add(
        "--text-ids",
        type=Path,
        metavar="FILE",
        help="default: as many consecutive texts an image as there are",
    )
    add(
        "--methods",
        nargs="+",
        choices=METHODS,
        default=tuple(METHODS),
        metavar="METHOD",
        help=", ".join(METHODS),
    )
    for name, symbols in (("i2t", ("γ1", "γ2")), ("t2i", ("λ1", "λ2"))):
        default = getattr(FastReranker(), name)
        what = f"of Fast Re-ranking ({default[0]:g} {default[1]:g})"
        add(f"--{name}", type=float, nargs=2, default=default, metavar=symbols, help=what)
    what = "retrieve within each Nth of the images; 5: MSCOCO's 5-fold 1K"
    add("--folds", type=int, default=1, metavar="N", help=what)
    what = "whose results go into files; default: the first of --methods, calibrated by --val"
    add("--write", metavar="METHOD", help=what)
    add("--out", type=Path, metavar="FILE.npz", help="its scores i2t and t2i, (n_images, n_texts)")
    add(
        "--rankings",
        type=Path,
        metavar="FILE.npz",
        help="its best candidates i2t (n_images, k) and t2i (n_texts, k)",
    )
    add("--top", type=int, default=10, metavar="K", help="how many for --rankings and --trec (10)")
    add("--queries", type=Path, metavar="FILE.csv", help="ranks and precisions of every query")
    add(
        "--trec",
        type=Path,
        metavar="FOLDER",
        help="its --top best candidates, as run and qrels files",
    )
    add("--latex", type=Path, metavar="FILE.tex", help="recalls of all methods as a table")
    add(
        "--protocol",
        choices=["coco"],
        help="MSCOCO's 1K, 5K, CxC and ECCV Caption, before and after re-ranking",
    )
    add("--report", type=Path, metavar="FILE.html", help="a page on hubs, who gained and who lost")
    add("--image-names", type=Path, metavar="FILE.txt", help="a line an image, for the report")
    add(
        "--text-names",
        type=Path,
        metavar="FILE.txt",
        help="a line a text, for the report: the captions",
    )


def _run(args: argparse.Namespace) -> None:
    outputs = _outputs(args)
    if (args.image_ids is None) != (args.text_ids is None):
        raise ValueError("--image-ids, --text-ids: expected both or neither")
    ids = (
        None
        if args.image_ids is None
        else (files.read_ids(args.image_ids), files.read_ids(args.text_ids))
    )
    paths = [getattr(args, name) for name in args.inputs]
    sim = _similarity(args, paths, ids)
    validation = None if args.val is None else _similarity(args, args.val)
    banks = _bank(args, sim, 0), _bank(args, sim, 1)
    if args.folds != 1:
        _check_folds(args, sim, banks)
    if args.protocol:
        check_coco(sim.shape)
    if args.report:
        report.check()
    names = (
        _names(args.image_names, "image", sim.shape[0]),
        _names(args.text_names, "text", sim.shape[1]),
    )
    fast = FastReranker(tuple(args.i2t), tuple(args.t2i))
    n, m = sim.shape
    each = "by the ids given" if ids else f"{m // n} an image, one behind the other"
    title = ", ".join(map(str, paths)) + ("" if args.folds == 1 else f", in {args.folds} parts")
    print(f"{title}: {n} images, {m} texts ({each})", flush=True)

    def progress(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    comparison = compare_rerankers(sim, args.methods, banks, validation, fast, progress, args.folds)
    progress("")
    print(table(comparison))
    if not args.protocol and not outputs:
        return
    entry = _entry(args, comparison)
    if args.protocol:
        for x in (comparison.entries[0], entry) if entry.reranker else (entry,):
            print(f"\n{x.name}\n{protocol_table(coco_protocol(sim, reranker=x.reranker))}")
    if outputs:
        _write(args, comparison, entry, title, names)
        by = "no re-ranking" if entry.name == PLAIN else f"{entry.name}, hubs of {entry.looks_at}"
        print(f"written ({by}): {', '.join(map(str, outputs))}")


def _outputs(args: argparse.Namespace) -> list[Path]:
    """Return what is to be written, checked before anything is read or computed."""
    taken = {}
    for name, value in vars(args).items():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path) and name not in (*_RESULTS, "trec"):
                taken[os.path.realpath(path)] = name.replace("_", "-")
    outputs = {
        name: getattr(args, name) for name in (*_RESULTS, "trec") if getattr(args, name) is not None
    }
    for name, path in outputs.items():
        path = path / "i2t.run" if name == "trec" else path
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no directory {path.parent}")
        if path.is_dir():
            raise ValueError(f"{path}: expected a file to write, got a directory")
        # archives need to seek
        if name in ("out", "rankings") and path.exists() and not path.is_file():
            raise ValueError(f"{path}: expected a file to write, got a device or a pipe")
        place = os.path.realpath(path)
        if place in taken:
            raise ValueError(
                f"{path}: expected a file of its own for a result, got that of {taken[place]}"
            )
        taken[place] = name
    if args.write is not None:
        calibrated = [CALIBRATED] if args.val and "fast" in args.methods else []
        one_of("--write", args.write, PLAIN, *args.methods, *calibrated)
    check_size("--top", args.top)
    return list(outputs.values())


def _matrix(args: argparse.Namespace, path: Path) -> Tensor:
    matrix = files.read_matrix(path, args.key)
    require_finite(str(path), matrix)
    return matrix.T if args.transpose else matrix


def _similarity(
    args: argparse.Namespace, paths: list[Path], ids: tuple[Tensor, Tensor] | None = None
) -> Similarity:
    """Return the similarities of scores or of embeddings; errors name the files."""
    matrices, by_scores = [_matrix(args, path) for path in paths], len(paths) == 1
    if ids is None:
        n, m = matrices[0].shape
        if by_scores and n > m and n % m == 0:
            what = "with --transpose it has" if args.transpose else "it has"
            how = (
                "leave --transpose out"
                if args.transpose
                else "pass --transpose, or --image-ids and --text-ids"
            )
            got = f"{what} {n} rows and {m} columns, as if texts were"
            raise ValueError(f"{paths[0]}: expected images as rows; {got}: {how}")
        matrices[0] = fold_repeated(matrices[0])
        n, m = matrices[0].shape if by_scores else map(len, matrices)
        try:
            ids = default_ids(n, m)
        except ValueError as error:
            raise ValueError(f"{', '.join(map(str, paths))}: {error}") from None
    names = Names(str(paths[0]), str(paths[-1]), "--image-ids", "--text-ids")
    if by_scores:
        return Similarity.from_scores(matrices[0], *ids, names=names)
    if len({matrix.dtype == torch.float64 for matrix in matrices}) == 2:
        matrices = [matrix.float() for matrix in matrices]
    return Similarity(matrices[0], matrices[1], *ids, names=names)


def _bank(args: argparse.Namespace, sim: Similarity, side: int) -> Tensor | None:
    """Return the bank of images (side 0) or texts (1), checked before anything is worked out."""
    path, one = (args.bank_images, args.bank_texts)[side], ("image", "text")[side]
    if path is None:
        if sim.shape[side] == 1 and set(args.methods) - {"k-reciprocal"}:
            text = (
                f"a single {one} is compared with no other, so that re-ranking cannot rank for it"
            )
            raise ValueError(f"{text}: --bank-{one}s has others")
        return None
    bank, by_scores = _matrix(args, path), sim._inputs is None
    if by_scores and side == 1 and args.image_ids is None:
        bank = fold_repeated(bank)
    axis = 0 if by_scores and side == 1 else 1  # with images as rows
    size = sim.shape[1 - side] if sim._inputs is None else sim._inputs[0].shape[1]
    if bank.shape[axis] != size:
        axes = (f"({size}, B)", f"(B, {size})")[axis]
        raise ValueError(f"{path}: expected {axes}, got shape {tuple(bank.shape)}")
    return bank


def _check_folds(args: argparse.Namespace, sim: Similarity, banks: Sequence[Tensor | None]) -> None:
    n = sim.shape[0]
    if args.folds < 1:
        raise ValueError(f"--folds: expected a divisor of the {n} images, got {args.folds}")
    if args.folds == n:
        raise ValueError(f"--folds: {n} are parts of one image, where there is nothing to re-rank")
    if args.out or args.rankings:
        raise ValueError(
            "--folds: nothing is ranked among all candidates then, as --out and --rankings have it"
        )
    if sim._inputs is None and any(bank is not None for bank in banks):
        raise ValueError(
            "--folds: banks of scores contain all candidates, those of a part are others"
        )
    fold_parts(sim, args.folds, whole=True)  # for its errors


def _names(path: Path | None, item: str, size: int) -> list[str]:
    """Return the names of images or of texts: the lines of a file, or by default their numbers."""
    if path is None:
        return [f"{item} {i}" for i in range(size)]
    lines = files.read_lines(path)
    if len(lines) != size:
        raise ValueError(
            f"{path}: expected a line for each of the {size} {item}s, got {len(lines)}"
        )
    return lines


def _entry(args: argparse.Namespace, comparison: RerankerComparison) -> Entry:
    """What is written: that of --write, or the first method, calibrated if it was; by the bank if
    tried both ways.
    """
    name, names = args.write, [entry.name for entry in comparison.entries]
    if name is None:
        if len(names) == 1:
            raise ValueError("--methods: all were left out, so that there is nothing to write")
        name = CALIBRATED if names[1] == "fast" and CALIBRATED in names else names[1]
    if name not in names:
        raise ValueError(f"--write: {name} {comparison.left_out[name]}")
    return [entry for entry in comparison.entries if entry.name == name][-1]


def _write(
    args: argparse.Namespace,
    comparison: RerankerComparison,
    entry: Entry,
    title: str,
    names: Sequence[Sequence[str]],
) -> None:
    arrays, sim = {}, comparison.sim
    if args.out:
        arrays[args.out] = (
            (sim.scores(),) * 2 if entry.reranker is None else entry.reranker.rerank(sim)
        )
    if args.rankings or args.trec:
        best = retrieval_results(sim, reranker=entry.reranker, hubness_k=args.top, folds=args.folds)
        if args.rankings:
            arrays[args.rankings] = best.i2t.top, best.t2i.top
        if args.trec:
            save_trec(best, args.trec)
    for path, (i2t, t2i) in arrays.items():
        with files.written(path, "wb") as file:
            np.savez(file, i2t=i2t.numpy(), t2i=t2i.numpy())
    if args.queries:
        with files.written(args.queries) as file:
            entry.results.write(file)
    if args.latex:
        with files.written(args.latex) as file:
            file.write(
                latex_table({f"{x.name} {x.hubs}".strip(): x.results for x in comparison.entries})
            )
    if args.report:
        with files.written(args.report) as file:
            file.write(page(comparison, entry, title, names))
