"""The command line: ``itrloss rerank`` and ``itrloss eval``."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import files, report
from .checks import Names, require_finite
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
from .metrics import coco_protocol, default_ids, fold_repeated, latex_table, retrieval_results, save_trec
from .metrics.labels import fold_parts
from .metrics.protocols import check_coco
from .report import comparison as comparison_report
from .rerank import FastReranker
from .similarity import Similarity


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without Greek letters and arrows gets question marks
            stream.reconfigure(errors="replace")
    parser = argparse.ArgumentParser(prog="itrloss", description="Losses and re-rankers for image-text retrieval.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_rerank(commands)
    _add_eval(commands)
    args = parser.parse_args(arguments)

    def say(text: str) -> None:
        print(f"itrloss {args.command}: {text}", file=sys.stderr)

    try:
        with _terminable(), warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = lambda message, *_, **__: say(_options(str(message)))
            return args.run(args)
    except (ImportError, OSError, ValueError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def _options(text: str) -> str:
    """Return a message of the library with its arguments called as the options are."""
    return text.replace("image_ids", "--image-ids").replace("text_ids", "--text-ids")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that temporary files are removed on the way out."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _add_rerank(commands: Any) -> None:
    about = "Recalls of a saved matrix of scores (n_images, n_texts) before and after re-ranking, by every method."
    parser = commands.add_parser("rerank", help="re-rank a saved matrix of scores", description=about)
    add = parser.add_argument
    add("scores", type=Path, help="*.npy, *.npz, *.pt, *.pkl; or what np.save made of {'npts': ..., 'sims': ...}")
    add("--val", type=Path, metavar="FILE", help="scores of held-out pairs: calibrate Fast Re-ranking on them")
    add("--transpose", action="store_true", help="the matrices have texts as rows")
    bank = "scores of other {} with the {}: look for hubs in them, not in the test queries"
    add("--bank-images", type=Path, metavar="FILE", help=bank.format("images (B, n_texts)", "test texts"))
    add("--bank-texts", type=Path, metavar="FILE", help=bank.format("texts (n_images, B)", "test images"))
    _add_shared(parser)
    parser.set_defaults(run=_rerank)


def _add_eval(commands: Any) -> None:
    about = "Recalls of saved embeddings (n_images, D) and (n_texts, D) before and after re-ranking, by every method."
    parser = commands.add_parser("eval", help="evaluate saved embeddings, and re-rank them", description=about)
    add = parser.add_argument
    add("images", type=Path, help="*.npy, *.npz, *.pt or *.pkl")
    add("texts", type=Path)
    add("--val", type=Path, nargs=2, metavar=("IMAGES", "TEXTS"), help="held-out pairs to calibrate Fast Re-ranking on")
    bank = "embeddings of other {}: look for hubs in their scores, not in those of the test queries"
    add("--bank-images", type=Path, metavar="FILE", help=bank.format("images"))
    add("--bank-texts", type=Path, metavar="FILE", help=bank.format("texts"))
    _add_shared(parser)
    parser.set_defaults(run=_eval)


def _add_shared(parser: Any) -> None:
    add = parser.add_argument
    add("--key", help="of the array in files with several (sims, or the only one)")
    add(
        "--image-ids", type=Path, metavar="FILE", help="integers, equal where image and text match; a line each in .txt"
    )
    add("--text-ids", type=Path, metavar="FILE", help="default: as many consecutive texts an image as there are")
    add("--methods", nargs="+", choices=METHODS, default=tuple(METHODS), metavar="METHOD", help=", ".join(METHODS))
    for name, symbols in (("i2t", "γ1 γ2"), ("t2i", "λ1 λ2")):
        default = tuple(getattr(FastReranker(), name))
        what = f"of Fast Re-ranking ({' '.join(f'{x:g}' for x in default)})"
        add(f"--{name}", type=float, nargs=2, default=default, metavar=tuple(symbols.split()), help=what)
    add(
        "--folds",
        type=int,
        default=1,
        metavar="N",
        help="retrieve within each Nth of the images; 5: MSCOCO's 5-fold 1K",
    )
    add("--memory", action="store_true", help="run every method once more, to see how much memory it takes")
    add(
        "--write",
        metavar="METHOD",
        help="whose results go into files; default: the first of --methods, calibrated by --val",
    )
    add("--out", type=Path, metavar="FILE.npz", help="its scores i2t and t2i, (n_images, n_texts)")
    add("--rankings", type=Path, metavar="FILE.npz", help="its best candidates i2t (n_images, k) and t2i (n_texts, k)")
    add("--top", type=int, default=10, metavar="K", help="how many for --rankings and --trec (10)")
    add("--queries", type=Path, metavar="FILE.csv", help="ranks and precisions of every query")
    add("--trec", type=Path, metavar="FOLDER", help="its --top best candidates, as run and qrels files")
    add("--latex", type=Path, metavar="FILE.tex", help="recalls of all methods as a table")
    add("--protocol", choices=["coco"], help="MSCOCO's 1K, 5K, CxC and ECCV Caption, before and after re-ranking")
    add("--report", type=Path, metavar="FILE.html", help="a page on hubs, who gained and who lost")
    add("--image-names", type=Path, metavar="FILE.txt", help="a line an image, for the report")
    add("--text-names", type=Path, metavar="FILE.txt", help="a line a text, for the report: the captions")


def _rerank(args: argparse.Namespace) -> int:
    def read(path: Path, by_convention: bool = False) -> Tensor:
        """Scores with images as rows."""
        matrix = files.read_matrix(path, args.key)
        matrix = matrix.T if args.transpose else matrix
        if by_convention:  # with ids, or as a bank, it may have any shape
            _check_images_as_rows(path, matrix, args.transpose)
        return matrix

    sim = _labelled(args, (args.scores,), read(args.scores, args.image_ids is None))
    validation = None if args.val is None else _similarity((args.val,), read(args.val, True))
    banks = [None if path is None else read(path) for path in (args.bank_images, args.bank_texts)]
    if banks[1] is not None and args.image_ids is None:  # with the images as rows
        banks[1] = fold_repeated(banks[1])
    return _compare(args, str(args.scores), sim, banks, validation)


def _eval(args: argparse.Namespace) -> int:
    def read(path: Path) -> Tensor:
        """Embeddings."""
        return files.read_matrix(path, args.key)

    sim = _labelled(args, (args.images, args.texts), read(args.images), read(args.texts))
    validation = None if args.val is None else _similarity(args.val, *map(read, args.val))
    banks = [None if path is None else read(path) for path in (args.bank_images, args.bank_texts)]
    return _compare(args, f"{args.images}, {args.texts}", sim, banks, validation)


def _check_images_as_rows(path: Path, matrix: Tensor, transposed: bool) -> None:
    n, m = matrix.shape
    if n > m and n % m == 0:
        what = "with --transpose it has" if transposed else "it has"
        how = "leave --transpose out" if transposed else "pass --transpose, or --image-ids and --text-ids"
        raise ValueError(f"{path}: expected images as rows; {what} {n} rows and {m} columns, as if texts were: {how}")


def _similarity(paths: Sequence[Path], *tensors: Tensor, ids: tuple[Tensor, Tensor] | None = None) -> Similarity:
    """Return the similarities of scores or of embeddings; errors name the files."""
    for path, x in zip(paths, tensors, strict=True):
        require_finite(str(path), x)
    named = [str(path) for path in paths]
    try:
        if ids is None:
            tensors = fold_repeated(tensors[0]), *tensors[1:]
            n, m = tensors[0].shape if len(tensors) == 1 else map(len, tensors)
            ids = default_ids(n, m)
        names = Names(named[0], named[-1], "--image-ids", "--text-ids")
        if len(tensors) == 1:
            return Similarity.from_scores(tensors[0], *ids, names=names)
        if (tensors[0].dtype == torch.float64) != (tensors[1].dtype == torch.float64):
            tensors = tensors[0].float(), tensors[1].float()
        return Similarity(tensors[0], tensors[1], *ids, names=names)
    except (TypeError, ValueError) as error:
        text = _options(str(error))
        raise ValueError(
            text if any(text.startswith(name) for name in named) else f"{', '.join(named)}: {text}"
        ) from None


def _labelled(args: argparse.Namespace, paths: Sequence[Path], *given: Tensor) -> Similarity:
    if (args.image_ids is None) != (args.text_ids is None):
        raise ValueError("--image-ids, --text-ids: expected both or neither")
    if args.image_ids is None:
        return _similarity(paths, *given)
    return _similarity(paths, *given, ids=(files.read_ids(args.image_ids), files.read_ids(args.text_ids)))


def _compare(
    args: argparse.Namespace,
    title: str,
    sim: Similarity,
    banks: Sequence[Tensor | None],
    validation: Similarity | None,
) -> int:
    outputs = _outputs(args)
    if args.folds != 1:
        _check_folds(args, sim, banks)
    if args.protocol:
        check_coco(sim.shape)
    if args.report:
        report.check()
    names = _names(args, sim)
    fast = FastReranker(tuple(args.i2t), tuple(args.t2i))
    images, texts = banks
    _check_banks(args, sim, banks)
    n, m = sim.shape
    each = "by the ids given" if args.image_ids else f"{m // n} an image, one behind the other"
    title += "" if args.folds == 1 else f", in {args.folds} parts"
    print(f"{title}: {n} images, {m} texts ({each})", flush=True)
    shown = sys.stderr.isatty()

    def progress(text: str) -> None:
        if shown:
            print(f"\r\033[K{text} …", end="", file=sys.stderr, flush=True)

    comparison = compare_rerankers(
        sim, args.methods, (images, texts), validation, fast, progress, args.memory, args.folds
    )
    if shown:
        print("\r\033[K", end="", file=sys.stderr)
    print(table(comparison))
    if args.protocol:
        entry = _entry(comparison, args.write)
        for each in (comparison.entries[0], entry) if entry.reranker else (entry,):
            print(f"\n{each.name}\n{protocol_table(coco_protocol(sim, reranker=each.reranker))}")
    if outputs or args.trec:
        _write(args, title, comparison, _entry(comparison, args.write), names)
    return 0


def _outputs(args: argparse.Namespace) -> list[Path]:
    """Return the files to write, checked before anything is computed."""
    outputs = [path for path in (args.out, args.rankings, args.queries, args.report, args.latex) if path is not None]
    for path in [*outputs, *([] if args.trec is None else [args.trec / "i2t.run"])]:
        if not path.parent.is_dir():
            raise ValueError(f"{path}: there is no directory {path.parent}")
        if path.is_dir():
            raise ValueError(f"{path}: expected a file to write, got a directory")
    places = [os.path.realpath(path) for path in outputs]
    if len(set(places)) < len(places):
        raise ValueError(f"expected a file of its own for each result, got {', '.join(map(str, outputs))}")
    inputs = {os.path.realpath(path): name for name, path in _inputs(args)}
    for path, place in zip(outputs, places, strict=True):
        if place in inputs:
            raise ValueError(f"{path}: expected a file of its own for a result, got that of {inputs[place]}")
    for path in (args.out, args.rankings):
        if path is not None and path.exists() and not path.is_file():
            raise ValueError(f"{path}: expected a file to write, got a device or a pipe")
    writable = [PLAIN, *args.methods]
    if args.val is not None and "fast" in args.methods:
        writable.append(CALIBRATED)
    if args.write is not None and args.write not in writable:
        raise ValueError(f"--write: expected one of {', '.join(writable)}; got {args.write!r}")
    if args.top < 1:
        raise ValueError(f"--top: expected at least 1, got {args.top}")
    return outputs


def _inputs(args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Yield the names of the options that are files to read, and these."""
    names = "scores", "images", "texts", "val", "bank_images", "bank_texts", "image_ids", "text_ids"
    for name in (*names, "image_names", "text_names"):
        value = getattr(args, name, None)
        for path in value if isinstance(value, list) else [value]:
            if path is not None:
                yield name.replace("_", "-"), path


def _check_folds(args: argparse.Namespace, sim: Similarity, banks: Sequence[Tensor | None]) -> None:
    n = sim.shape[0]
    if args.folds < 1 or n % args.folds:
        raise ValueError(f"--folds: expected a divisor of the {n} images, got {args.folds}")
    if args.folds == n:
        raise ValueError(f"--folds: {n} are parts of one image, where there is nothing to re-rank")
    if args.out or args.rankings:
        raise ValueError("--folds: nothing is ranked among all candidates then, as --out and --rankings have it")
    if sim._inputs is None and any(bank is not None for bank in banks):
        raise ValueError("--folds: banks of scores contain all candidates, those of a part are others")
    try:
        fold_parts(sim, args.folds, whole=True)
    except ValueError as error:
        raise ValueError(f"--{error}") from None


def _check_banks(args: argparse.Namespace, sim: Similarity, banks: Sequence[Tensor | None]) -> None:
    """Before anything is worked out, and by the names of the files."""
    cols = None if sim._inputs is None else sim._inputs[1]
    for side, (path, bank) in enumerate(zip((args.bank_images, args.bank_texts), banks, strict=True)):
        if bank is None:
            if sim.shape[side] == 1 and set(args.methods) - {"k-reciprocal"}:
                one = ("image", "text")[side]
                text = f"a single {one} is compared with no other, so that re-ranking cannot rank for it"
                raise ValueError(f"{text}: --bank-{one}s has others")
            continue
        require_finite(str(path), bank)
        n, m = sim.shape
        wanted = f"embeddings of dimension {cols.shape[1]}" if cols is not None else (f"(B, {m})", f"({n}, B)")[side]
        got, size = (bank.shape[1], cols.shape[1]) if cols is not None else (bank.shape[1 - side], (m, n)[side])
        if got != size:
            raise ValueError(f"{path}: expected {wanted}, got shape {tuple(bank.shape)}")


def _entry(comparison: RerankerComparison, name: str | None) -> Entry:
    """What is written: that of the name, or the first method, calibrated if it was; by the bank if tried both ways."""
    names = [entry.name for entry in comparison.entries]
    if name is None:
        if len(names) == 1:
            raise ValueError("--methods: all were left out, so that there is nothing to write")
        name = CALIBRATED if names[1] == "fast" and CALIBRATED in names else names[1]
    if name not in names:
        raise ValueError(f"--write: {name} {comparison.left_out[name]}")
    return [entry for entry in comparison.entries if entry.name == name][-1]


def _write(
    args: argparse.Namespace, title: str, comparison: RerankerComparison, entry: Entry, names: comparison_report.Names
) -> None:
    sim = comparison.sim
    if args.out:
        pair = (sim.scores(),) * 2 if entry.reranker is None else entry.reranker.rerank(sim)
        with files.written(args.out, "wb") as file:
            np.savez(file, i2t=pair[0].numpy(), t2i=pair[1].numpy())
    if args.rankings:
        if entry.reranker is None:
            tops = [view.topk(min(args.top, view.shape[1])) for view in (sim, sim.T)]
        else:
            tops = entry.reranker.topk(sim, args.top)
        with files.written(args.rankings, "wb") as file:
            np.savez(file, i2t=tops[0].indices.numpy(), t2i=tops[1].indices.numpy())
    if args.queries:
        with files.written(args.queries) as file:
            entry.results.write(file)
    if args.trec:
        save_trec(retrieval_results(sim, reranker=entry.reranker, hubness_k=args.top), args.trec)
    if args.latex:
        with files.written(args.latex) as file:
            file.write(latex_table({f"{x.name} {x.hubs}".strip(): x.results for x in comparison.entries}))
    if args.report:
        with files.written(args.report) as file:
            file.write(comparison_report.page(comparison, entry, title, names))
    by = "no re-ranking" if entry.name == PLAIN else f"{entry.name}, hubs of {entry.looks_at}"
    outputs = args.out, args.rankings, args.queries, args.trec, args.latex, args.report
    print(f"written ({by}): {', '.join(str(x) for x in outputs if x)}")


def _names(args: argparse.Namespace, sim: Similarity) -> comparison_report.Names:
    given = []
    for path, size, what in zip((args.image_names, args.text_names), sim.shape, ("images", "texts"), strict=True):
        lines = [] if path is None else files.read_lines(path)
        if path is not None and len(lines) != size:
            raise ValueError(f"{path}: expected a line for each of the {size} {what}, got {len(lines)}")
        given.append(lines)
    return comparison_report.Names(*given)


if __name__ == "__main__":
    sys.exit(main())
