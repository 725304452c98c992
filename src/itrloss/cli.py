"""The command line: ``itrloss rerank``, ``itrloss eval`` and ``itrloss compare``."""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import __version__, files, tables
from .checks import EMBEDDINGS, Names, as_size, did_you_mean, one_of, require_finite
from .checks.warnings import (
    SuspiciousInputWarning,
    UnfitScalesWarning,
    warn_of_embeddings,
    warn_of_guess,
)
from .comparison import (
    CALIBRATED,
    METHODS,
    PLAIN,
    Entry,
    RerankerComparison,
    compare_models,
    compare_rerankers,
    protocol_table,
    table,
)
from .comparison.pages import check as check_report
from .comparison.report import models_page, page
from .files import Source, as_source
from .metrics import (
    Judgements,
    RetrievalResults,
    coco_protocol,
    default_ids,
    fold_repeated,
    retrieval_results,
    save_trec,
)
from .metrics.labels import unrelated_ids
from .metrics.protocols import check_coco
from .metrics.relevance import Rules, folds_of
from .metrics.results import RECALLS, as_ks
from .rerank import FastReranker
from .similarity import Similarity
from .tables import Table

# Options that are files to write, and their suffixes. The last is a folder.
_RESULTS = {
    "out": ".npz",
    "rankings": ".npz",
    "queries": ".csv",
    "metrics": ".csv",
    "latex": ".tex",
    "report": ".html",
    "trec": "",
}
# Options that say who is right, and who is ranked at all.
_RULES: tuple[Literal["relevant", "exclude", "candidates"], ...] = (
    "relevant",
    "exclude",
    "candidates",
)
# Arguments of the library, which the command line has as options; not as parts of a path.
_ARGUMENTS = re.compile(
    r"(?<![\w/.-])((?:val_)?(?:image|text)_ids|(?:folds|ks|validation)(?=:))(?![./-]?\w)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        # a terminal without Greek letters and arrows gets question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    args, others = _parser().parse_known_args(arguments)
    if others:
        refuse(args.parser, others)
    before = signal.getsignal(signal.SIGTERM)

    try:
        # outside the main thread, which alone may set handlers
        with contextlib.suppress(ValueError):
            # removes temporary files
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        with _shown_warnings(args):
            args.run(args)
        sys.stdout.flush()  # a closed pipe is noticed here, not at the interpreter's exit
    except FileNotFoundError as error:
        _say(args, f"{error.filename}: there is no such file{_near(error.filename)}")
        return 2
    except BrokenPipeError:
        # a reader such as head has read enough; the interpreter's last flush must not fail, too
        with contextlib.suppress(io.UnsupportedOperation):  # what is no file has none to be closed
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # what came after was not printed, and may not be written
    except (ImportError, OSError, ValueError) as error:
        _say(args, error)
        return 2
    except KeyboardInterrupt:
        _say(args, "interrupted")
        return 130
    finally:
        with contextlib.suppress(ValueError):
            # None: a handler in C, which cannot be set again
            signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
    return 0


# ------------------------------------------------------------------------------------------ options


def _say(args: argparse.Namespace, message: object) -> None:
    print(f"itrloss {args.command}: {_in_words_of_options(message)}", file=sys.stderr)


@contextlib.contextmanager
def _shown_warnings(args: argparse.Namespace) -> Iterator[None]:
    """Print each warning once, and keep those of the input in ``args.warnings``, for tables."""
    args.warnings = []
    shown = set()

    def show(message: object, category: type[Warning], *_: object, **__: object) -> None:
        """Print a warning that was not printed before."""
        if str(message) in shown:  # every method finds the same of the same scores
            return
        shown.add(str(message))
        _say(args, message)
        if issubclass(category, SuspiciousInputWarning):
            args.warnings.append(_in_words_of_options(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("ignore", UnfitScalesWarning)
        warnings.showwarning = show
        yield


def _in_words_of_options(message: object) -> str:
    """Return a message of the library with options in place of arguments."""
    return _ARGUMENTS.sub(lambda found: _option(found[0]), str(message))


def _option(argument: str) -> str:
    """Return the option that stands for an argument of the library."""
    return "--val" if argument == "validation" else "--" + argument.replace("_", "-")


def refuse(parser: argparse.ArgumentParser, others: Sequence[str]) -> None:
    """Exit with an error for arguments that a command does not have."""
    given = next((x for x in others if x.startswith("-")), "")
    options = [option for option in vars(parser)["_option_string_actions"] if option != "--help"]
    hint = did_you_mean(given.split("=")[0], options)
    if not given:
        hint = "; embeddings are for itrloss eval, scores of several models for itrloss compare"
    parser.error(f"unrecognized arguments: {' '.join(others)}{hint}")


def _near(path: str | bytes) -> str:
    """Return a hint at the file that was probably meant, of those in a missing one's folder."""
    missing = Path(os.fsdecode(path))
    folder = missing.parent
    if not folder.is_dir():
        return f"; there is no directory {folder}"
    return did_you_mean(missing.name, os.listdir(folder))


def _one_of(*allowed: str) -> Callable[[str], str]:
    """Return a type of argument that is one of some words."""

    def word(text: str) -> str:
        """Return an allowed word; raise an error for another."""
        if text in allowed:
            return text
        parts = text.replace(",", " ").split()
        hint = did_you_mean(text, allowed)
        if len(parts) > 1 and set(parts) <= set(allowed):
            hint = f"; separate them by blanks: {' '.join(parts)}"
        listed = ", ".join(allowed)
        raise argparse.ArgumentTypeError(f"expected one of {listed}, got {text!r}{hint}")

    return word


def _whole_number(text: str) -> int:
    """Return the integer in a text."""
    try:
        return int(text)
    except ValueError:
        parts = text.replace(",", " ").split()
        hint = f"; separate them by blanks: {' '.join(parts)}" if len(parts) > 1 else ""
        message = f"expected an integer, got {text!r}{hint}"
        raise argparse.ArgumentTypeError(message) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="itrloss", description="Losses and re-rankers for image-text retrieval."
    )
    parser.add_argument("--version", action="version", version=f"itrloss {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "Recalls of {} before and after re-ranking, by every method."
    scores = "a saved matrix of scores (n_images, n_texts)"
    rerank = commands.add_parser(
        "rerank", help=f"re-rank {scores}", description=about.format(scores)
    )
    _add_inputs(rerank, ["scores"])
    _add_banks(rerank, "scores (B, n_texts)", "scores (n_images, B)")
    embeddings = "saved embeddings (n_images, D), (n_texts, D)"
    evaluate = commands.add_parser(
        "eval", help=f"re-rank {embeddings}", description=about.format(embeddings)
    )
    evaluate.set_defaults(transpose=False)
    _add_inputs(evaluate, ["images", "texts"])
    _add_banks(evaluate, "embeddings", "embeddings")
    compare = commands.add_parser(
        "compare",
        help="compare the saved scores of several models",
        description="Recalls of several models on the same images and texts, and what changes from "
        "the first one, with intervals and corrected p-values.",
    )
    _add_models(compare)
    for command in (rerank, compare):
        command.add_argument(
            "--transpose", action="store_true", help="the matrices have texts as rows"
        )
    for command in (rerank, evaluate, compare):
        _add_test_set(command)
        _add_tables(command)
        command.set_defaults(run=_run, parser=command)
    for command in (rerank, evaluate):
        _add_methods(command)
        _add_results(command)
    # what only re-rankers have
    compare.set_defaults(run=_run_models, protocol=None, out=None, rankings=None)
    return parser


def _add_inputs(parser: argparse.ArgumentParser, names: Sequence[str]) -> None:
    what = (
        "*.npy, *.npz, *.pt, *.pkl; or what np.save made of a dictionary of arrays; FILE:NAME for "
        "one of several arrays in a file"
    )
    for name in names:
        parser.add_argument(name, type=as_source, help=what)
    parser.add_argument(
        "--val",
        type=as_source,
        nargs=len(names),
        metavar=tuple(name.upper() for name in names),
        help="the same of held-out pairs: calibrate Fast Re-ranking on them",
    )
    about = "of the {0}s of --val, as --{0}-ids are of the others"
    _add_input_files(
        parser,
        {"--val-image-ids": about.format("image"), "--val-text-ids": about.format("text")},
    )


def _add_banks(parser: argparse.ArgumentParser, images: str, texts: str) -> None:
    """Add the options of banks, whose files hold what ``images`` and ``texts`` say."""
    about = "other {}: look for hubs in their {}, not in the test queries"
    _add_input_files(
        parser,
        {
            "--bank-images": about.format("images", images),
            "--bank-texts": about.format("texts", texts),
        },
    )


def _add_test_set(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which pairs are right, and who is ranked."""
    _add_input_files(
        parser,
        {
            "--image-ids": "integers or names, equal where image and text match; a line each in "
            ".txt",
            "--text-ids": "default: as many consecutive texts an image as there are",
            "--relevant": "the right pairs, in place of ids: an image and a text a line, from 0, "
            "and perhaps a grade",
            "--exclude": "pairs that are not ranked",
            "--candidates": "the only pairs that are ranked",
        },
    )
    parser.add_argument(
        "--folds",
        type=_whole_number,
        default=1,
        metavar="N",
        help="retrieve within each Nth of the images; 5: MSCOCO's 5-fold 1K",
    )


def _add_input_files(parser: argparse.ArgumentParser, abouts: Mapping[str, str]) -> None:
    """Add options that are files to read, each with what it is about."""
    for option, about in abouts.items():
        parser.add_argument(option, type=as_source, metavar="FILE", help=about)


def _add_output_files(parser: argparse.ArgumentParser, abouts: Mapping[str, str]) -> None:
    """Add options that are files to write, by their names in ``_RESULTS``."""
    for name, about in abouts.items():
        suffix = _RESULTS[name]
        metavar = f"FILE{suffix}" if suffix else "FOLDER"
        parser.add_argument(f"--{name}", type=Path, metavar=metavar, help=about)


def _add_methods(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--methods",
        nargs="+",
        type=_one_of(*METHODS),
        default=tuple(METHODS),
        metavar="METHOD",
        help=", ".join(METHODS),
    )
    fast = FastReranker()
    about = "of Fast Re-ranking %(default)s"
    add("--i2t", type=float, nargs=2, default=fast.i2t, metavar=("γ1", "γ2"), help=about)
    add("--t2i", type=float, nargs=2, default=fast.t2i, metavar=("λ1", "λ2"), help=about)


def _add_models(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "scores",
        type=as_source,
        nargs="+",
        help="saved matrices (n_images, n_texts), the base first",
    )
    add("--names", nargs="+", metavar="NAME", help="of the models, in place of the files'")
    add(
        "--transductive",
        nargs="+",
        default=(),
        metavar="NAME",
        help="models whose scores depend on the other test queries: they get a dagger",
    )


def _add_tables(parser: argparse.ArgumentParser) -> None:
    """Add the options of the table of all methods."""
    add = parser.add_argument
    add(
        "--ks",
        type=_whole_number,
        nargs="+",
        default=RECALLS,
        metavar="K",
        help="of R@K, recall@K and nDCG@K (1 5 10)",
    )
    add(
        "--samples",
        type=_whole_number,
        metavar="N",
        help="of the bootstrap (2000 for each test, so that p can be below 0.001)",
    )
    _add_output_files(
        parser,
        {
            "metrics": "all metrics of all methods",
            "latex": "the table of all methods in LaTeX",
            "report": "a page with the table and charts",
        },
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    """Add the options of the results of one method."""
    add = parser.add_argument
    add(
        "--write",
        metavar="METHOD",
        help="whose results go into files; default: the first of --methods, calibrated by --val",
    )
    _add_output_files(
        parser,
        {
            "out": "its scores i2t and t2i, (n_images, n_texts)",
            "rankings": "its best candidates i2t (n_images, k) and t2i (n_texts, k)",
            "queries": "ranks and precisions of every query",
            "trec": "its --top best candidates, as run and qrels files; made if need be",
        },
    )
    add(
        "--top",
        type=_whole_number,
        default=10,
        metavar="K",
        help="how many for --rankings and --trec (10)",
    )
    add(
        "--protocol",
        type=_one_of("coco"),
        metavar="{coco}",
        help="MSCOCO's 1K, 5K, CxC and ECCV Caption, before and after re-ranking",
    )
    add("--image-names", type=Path, metavar="FILE.txt", help="a line an image, for the report")
    add(
        "--text-names",
        type=Path,
        metavar="FILE.txt",
        help="a line a text, for the report: the captions",
    )


# -------------------------------------------------------------------------------------- the command


def _run(args: argparse.Namespace) -> None:
    """Compare re-rankers on the scores or embeddings of one model."""
    outputs = _outputs(args)
    _check_choice(args)
    sources = [args.scores] if args.command == "rerank" else [args.images, args.texts]
    ids = _ids(args)
    rules = _rules(args)
    sim = _similarity(args, sources, ids)
    validation = _validation(args)
    banks = (_bank(args, sim, 0), _bank(args, sim, 1))
    if args.folds != 1:
        _check_folds(args, sim, banks)
    if args.protocol:
        check_coco(sim.shape)
    if args.report:
        check_report()
    n, m = sim.shape
    names = (_names(args.image_names, "image", n), _names(args.text_names, "text", m))
    title = ", ".join(map(str, sources)) + _parts(args)
    print(f"{title}: {_about(args, sim)}", flush=True)
    fast = FastReranker(tuple(args.i2t), tuple(args.t2i))
    comparison = compare_rerankers(
        sim, args.methods, banks, validation, fast, _show_progress, args.folds, rules, args.samples
    )
    _show_progress("")
    comparison = replace(comparison, warnings=tuple(args.warnings))
    print(table(comparison, args.ks))
    if args.protocol or outputs:
        _put_out(args, comparison, outputs, title, names)


def _put_out(
    args: argparse.Namespace,
    comparison: RerankerComparison,
    outputs: Sequence[Path],
    title: str,
    names: Sequence[Sequence[str]],  # of images and of texts
) -> None:
    """Print the figures of a protocol, and write all files."""
    entry = _entry(args, comparison)
    if args.protocol:
        _print_protocol(comparison, entry)
    _write_results(args, comparison, entry)
    systems = {(entry.name, entry.hubs): entry.results for entry in comparison.entries}
    _write_metrics(args, systems, ["method", "hubs"])
    _write_table(args, comparison.table(args.ks), partial(page, comparison, entry, title, names))
    if outputs:
        by = PLAIN if entry.name == PLAIN else f"{entry.name}, hubs of {entry.looks_at}"
        print(f"written ({by}): {', '.join(map(str, outputs))}")


def _run_models(args: argparse.Namespace) -> None:
    """Compare the scores of several models."""
    outputs = _outputs(args)
    names = _model_names(args)
    for name in args.transductive:
        one_of("--transductive", name, *names)
    ids = _ids(args)
    rules = _rules(args)
    if args.report:
        check_report()
    results, marked, about = _model_results(args, names, ids, rules)
    marked += args.transductive
    comparison = compare_models(results, transductive=marked, samples=args.samples)
    comparison = replace(comparison, warnings=tuple(args.warnings))
    table = comparison.table(args.ks)
    print(f"{about}\n{tables.text(table)}")
    _write_metrics(args, {(row.name,): row.results for row in comparison.rows}, ["method"])
    about += ". Recalls in percent."
    _write_table(args, table, partial(models_page, comparison, ", ".join(names), about))
    if outputs:
        print(f"written: {', '.join(map(str, outputs))}")


def _model_results(
    args: argparse.Namespace,
    names: Sequence[str],
    ids: _Ids,
    rules: Rules,
) -> tuple[dict[str, RetrievalResults], list[str], str]:
    """Return the results of each model by its name, the names of those whose files say that they
    are transductive, and what is compared, in words.

    The matrices are read one after the other.
    """
    results = {}
    marked = []
    about = ""
    first = None  # the shape of the first matrix
    for name, source in zip(names, args.scores, strict=True):
        _show_progress(f"{source} …")
        scores, transductive = _model_scores(args, source, ids)
        sim = scores[0] if isinstance(scores, tuple) else scores
        if first is None:
            first = sim.shape
            about = _about(args, sim) + _parts(args)
            if args.folds != 1:
                _check_folds(args, sim, ())
        if sim.shape != first:
            raise ValueError(
                f"{source}: expected shape {first} like {args.scores[0]}, got {sim.shape}"
            )
        results[name] = retrieval_results(scores, folds=args.folds, **rules)
        if transductive:
            marked.append(name)
    _show_progress("")
    return results, marked, about


def _model_scores(
    args: argparse.Namespace, source: Source, ids: _Ids
) -> tuple[Similarity | tuple[Similarity, Tensor], bool]:
    """Return the scores in a file, of both directions if they are re-ranked, and whether they
    depend on the other test queries, as far as the file says.
    """
    saved = files.read_reranked(source.path) if source.key is None else None
    if saved is None:
        return _similarity(args, [source], ids), False
    for matrix in (saved.i2t, saved.t2i):
        require_finite(str(source), matrix)
    i2t = _similarity_of(args, [source], [saved.i2t], ids)
    return (i2t, saved.t2i), saved.transductive


def _model_names(args: argparse.Namespace) -> list[str]:
    """Return the names of the models: those given, or the files' without what all have."""
    sources = args.scores
    if len(sources) < 2:
        raise ValueError(f"{sources[0]}: expected at least two files to compare, got one")
    names = args.names
    if names is None:
        names = _short_names(sources)
    if len(names) != len(sources):
        raise ValueError(
            f"--names: expected one for each of the {len(sources)} files, got {len(names)}"
        )
    for name in names:
        if not name.strip() or not name.isprintable():
            raise ValueError(f"--names: expected printable names, got {name!r}")
        if names.count(name) > 1:
            raise ValueError(f"--names: expected different names, got {name} more than once")
    return names


def _short_names(sources: Sequence[Source]) -> list[str]:
    """Return each file's name without its suffix, with the folders that tell it from the others."""
    parts = [source.path.with_suffix("").parts for source in sources]
    names = []
    for source, own in zip(sources, parts, strict=True):
        name = str(source)  # where only suffixes differ, or arrays in a file
        for depth in range(1, len(own) + 1):
            tail = own[-depth:]
            if [every[-depth:] for every in parts].count(tail) == 1:
                name = "/".join(tail)
                break
        names.append(name)
    return names


def _about(args: argparse.Namespace, sim: Similarity) -> str:
    """Return how many images and texts there are, and what says which of them match."""
    n, m = sim.shape
    pairing = f"{m // n} an image, one behind the other"
    if args.relevant:
        pairing = f"right by {args.relevant}"
    elif args.image_ids:
        pairing = "by the ids given"
    return f"{n} images, {m} texts ({pairing})"


def _parts(args: argparse.Namespace) -> str:
    """Return the words for retrieval within parts of the images; empty for all of them."""
    return f", in {args.folds} parts" if args.folds != 1 else ""


def _show_progress(text: str) -> None:
    """Replace the line of progress on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _print_protocol(comparison: RerankerComparison, chosen: Entry) -> None:
    """Print the figures of MSCOCO's protocols without and with the chosen re-ranker."""
    entries = [comparison.entries[0]]
    if chosen.reranker is not None:
        entries.append(chosen)
    for entry in entries:
        figures = coco_protocol(comparison.sim, reranker=entry.reranker)
        print(f"\n{entry.name}\n{protocol_table(figures)}")


# ------------------------------------------------------------------------------------------- checks


def _outputs(args: argparse.Namespace) -> list[Path]:
    """Return what is to be written, checked before anything is read or computed."""
    options = vars(args)
    outputs = {name: options[name] for name in _RESULTS if options.get(name) is not None}
    taken = _inputs_by_place(options)
    for name, path in outputs.items():
        if name == "trec":
            _check_folder(path)
            path = path / "i2t.run"
        else:
            _check_output(name, path)
        place = os.path.realpath(path)
        if place in taken:
            raise ValueError(
                f"{path}: expected a file of its own for a result, got that of {taken[place]}"
            )
        taken[place] = name
        _check_suffix(name, path)
    args.ks = as_ks(args.ks)
    if args.samples is not None:
        as_size("--samples", args.samples)
    return list(outputs.values())


def _check_choice(args: argparse.Namespace) -> None:
    """Raise a ValueError for a method of --write that is not tried, a wrong --top, or options
    that would be of no effect.
    """
    if args.val is not None and "fast" not in args.methods:
        raise ValueError("--val: expected fast among --methods, which is calibrated on it")
    for name in ("image_names", "text_names"):
        if vars(args)[name] is not None and args.report is None:
            raise ValueError(f"{_option(name)}: expected --report, too")
    if args.write is not None:
        calibrated = [CALIBRATED] if args.val and "fast" in args.methods else []
        one_of("--write", args.write, PLAIN, *args.methods, *calibrated)
    as_size("--top", args.top)


def _inputs_by_place(options: dict[str, object]) -> dict[str, str]:
    """Return the option of each file that is read, by the file's place."""
    places = {}
    for name, value in options.items():
        if name in _RESULTS:
            continue
        for path in value if isinstance(value, list) else [value]:  # --val may have two
            if isinstance(path, Source):
                path = path.path
            if isinstance(path, Path):
                places[os.path.realpath(path)] = name.replace("_", "-")
    return places


def _check_folder(path: Path) -> None:
    """Raise a ValueError unless files can be written into a folder, which is made if need be."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no directory {path.parent}")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: expected a directory to write into, got a file")


def _check_suffix(name: str, path: Path) -> None:
    """Raise a ValueError for a new file whose name says that it is of another format."""
    suffix = _RESULTS[name]
    is_device = path.exists() and not path.is_file()
    if suffix and path.suffix.lower() != suffix and not is_device:
        raise ValueError(f"--{name}: expected a file named *{suffix}, got {path}")


def _check_output(name: str, path: Path) -> None:
    """Raise a ValueError unless a file can be written there."""
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no directory {path.parent}")
    if path.is_dir():
        raise ValueError(f"{path}: expected a file to write, got a directory")
    # archives need to seek
    if name in ("out", "rankings") and path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a file to write, got a device or a pipe")


def _check_folds(args: argparse.Namespace, sim: Similarity, banks: Sequence[Tensor | None]) -> None:
    """Raise a ValueError for folds that do not go with the input or with other options."""
    n, m = sim.shape
    if args.folds == n:
        raise ValueError(f"--folds: {n} are parts of one image, where there is nothing to re-rank")
    if args.out or args.rankings:
        raise ValueError(
            "--folds: nothing is ranked among all candidates then, as --out and --rankings have it"
        )
    if sim.embeddings is None and any(bank is not None for bank in banks):
        raise ValueError(
            "--folds: banks of scores contain all candidates, those of a part are others"
        )
    texts = [fold.cols for fold in folds_of(sim, args.folds)]
    if not bool((torch.cat(texts).bincount(minlength=m) == 1).all()):
        raise ValueError("--folds: expected each text to have its images in one part")


# -------------------------------------------------------------------------------------------- input


def _matrix(source: Source, transpose: bool) -> Tensor:
    """Return the matrix in a file, with images as rows."""
    matrix = files.read_matrix(*source)
    require_finite(str(source), matrix)
    return matrix.T if transpose else matrix


class _Ids(NamedTuple):
    """The ids of images and of texts, from files or by default."""

    options: tuple[str, str]  # that name the files
    sources: Sequence[Source] = ()  # empty if there are none
    values: Sequence[Tensor] = ()
    are_right: bool = True  # whether they say which pairs are right


def _ids(args: argparse.Namespace, val: str = "") -> _Ids:
    """Return the ids in files: of held-out pairs if ``val`` is ``"val_"``."""
    names = f"{val}image_ids", f"{val}text_ids"
    images, texts = map(_option, names)
    sources = [getattr(args, name) for name in names]
    are_right = bool(val) or args.relevant is None
    if sources == [None, None]:
        return _Ids((images, texts), are_right=are_right)
    if None in sources:
        raise ValueError(f"{images}, {texts}: expected both or neither")
    values = [files.read_ids(*source) for source in sources]
    if are_right and not bool(torch.isin(*values).any()):
        first, other = (files.first_id(*source) for source in sources)
        raise ValueError(
            f"{images}, {texts}: no id of an image equals one of a text, such as {first!r} and "
            f"{other!r}"
        )
    return _Ids((images, texts), sources, values, are_right)


def _check_count(option: str, source: Source, ids: Tensor, size: int) -> None:
    """Raise a ValueError for ids that are one too many, if the first may be a header."""
    suffix = source.path.suffix.lower()
    if len(ids) != size + 1 or source.key is not None or suffix not in files.TEXTS:
        return
    first = files.first_id(*source)
    if first.isdecimal():
        return
    way = f"write {source.path}:{first}" if suffix == ".csv" else "remove it"
    raise ValueError(
        f"{option}: expected {size} ids, got {len(ids)}; if the first line of {source.path}, "
        f"{first!r}, is a header, {way}"
    )


def _rules(args: argparse.Namespace) -> Rules:
    """Return the arguments of ``retrieval_results`` on who is right and who is ranked."""
    rules: Rules = {}
    for name in _RULES:
        source = getattr(args, name)
        if source is None:
            continue
        if args.protocol:
            raise ValueError(f"--{name}: expected none with --protocol, which has its own pairs")
        pairs = files.read_pairs(*source)
        images = pairs[:, 0].long()
        texts = pairs[:, 1].long()
        rules[name] = images, texts
        if pairs.shape[1] == 3:
            if name != "relevant":
                raise ValueError(f"{source}: expected an image and a text a line, got grades, too")
            rules[name] = Judgements(images, texts, pairs[:, 2])
    return rules


def _similarity(args: argparse.Namespace, sources: Sequence[Source], ids: _Ids) -> Similarity:
    """Return the similarities of scores or of embeddings; errors name the files."""
    matrices = [_matrix(source, args.transpose) for source in sources]
    if len(sources) == 2:
        images, texts = sources
        if images.key == texts.key and images.path.samefile(texts.path):
            raise ValueError(
                f"{images}: expected images and texts, got one array for both; of a file with "
                "both, FILE:NAME takes one"
            )
    return _similarity_of(args, sources, matrices, ids)


def _similarity_of(
    args: argparse.Namespace,
    sources: Sequence[Source],
    matrices: list[Tensor],  # of these files
    ids: _Ids,
) -> Similarity:
    """Return the similarities of scores, or of embeddings of images and of texts."""
    by_scores = len(sources) == 1
    if not ids.values and ids.are_right:
        if by_scores:
            _check_orientation(sources[0], matrices[0], args.transpose, ids.options)
        matrices[0] = fold_repeated(matrices[0])
    n = len(matrices[0])
    m = matrices[0].shape[1] if by_scores else len(matrices[1])
    if ids.values:
        image_ids, text_ids = ids.values
        for option, source, values, size in zip(*ids[:3], (n, m), strict=True):
            _check_count(option, source, values, size)
    elif not ids.are_right:
        image_ids, text_ids = unrelated_ids(n, m)
    else:
        if m % n:
            raise ValueError(
                f"{', '.join(map(str, sources))}: {', '.join(ids.options)}: needed for {n} images "
                f"and {m} texts, which is not a whole number of texts per image (images are the "
                "rows)" + f"; {EMBEDDINGS}" * by_scores
            )
        warn_of_guess(n, m)
        image_ids, text_ids = default_ids(n, m)
    names = Names(str(sources[0]), str(sources[-1]), *ids.options)
    if by_scores:
        warn_of_embeddings(str(sources[0]), matrices[0])
        return Similarity.from_scores(matrices[0], image_ids, text_ids, names=names)
    images, texts = matrices
    if (images.dtype == torch.float64) != (texts.dtype == torch.float64):
        images = images.float()
        texts = texts.float()
    return Similarity(images, texts, image_ids, text_ids, names=names)


def _validation(args: argparse.Namespace) -> Similarity | None:
    """Return the held-out pairs; warnings name their options."""
    ids = _ids(args, "val_")
    if args.val is None:
        if ids.sources:
            raise ValueError(f"{', '.join(ids.options)}: expected --val, too")
        return None
    show = warnings.showwarning

    def show_of_val(
        message: Warning | str, category: type[Warning], file: str, line: int, *_: object
    ) -> None:
        """Show a warning of the validation pairs as one of ``--val``."""
        text = re.sub("(image|text)_ids", r"val_\g<0>", str(message))
        show(f"--val: {text}", category, file, line)

    with warnings.catch_warnings():
        warnings.showwarning = show_of_val
        return _similarity(args, args.val, ids)


def _check_orientation(
    source: Source, scores: Tensor, transpose: bool, options: Sequence[str]
) -> None:
    """Raise a ValueError for scores without ids that seem to have texts as rows."""
    n, m = scores.shape
    if n <= m or n % m:
        return
    if transpose:
        what = "with --transpose it has"
        how = "leave --transpose out"
    else:
        what = "it has"
        how = f"pass --transpose, or {' and '.join(options)}"
    raise ValueError(
        f"{source}: expected images as rows; {what} {n} rows and {m} columns, as if texts were: "
        f"{how}; {EMBEDDINGS}"
    )


def _bank(args: argparse.Namespace, sim: Similarity, side: int) -> Tensor | None:
    """Return the bank of images (side 0) or texts (1), checked before anything is worked out."""
    source = args.bank_texts if side else args.bank_images
    if source is None:
        if sim.shape[side] == 1:
            one = "text" if side else "image"
            raise ValueError(
                f"a single {one} is compared with no other, so that re-ranking cannot rank for it: "
                f"--bank-{one}s has others"
            )
        return None
    bank = _matrix(source, args.transpose)
    if sim.embeddings is None and side:  # more columns of the matrix, whose rows are images
        if args.image_ids is None and args.relevant is None:
            bank = fold_repeated(bank)
        n = sim.shape[0]
        expected = f"({n}, B)"
        fits = bank.shape[0] == n
    else:
        size = sim.shape[1] if sim.embeddings is None else sim.embeddings[0].shape[1]
        expected = f"(B, {size})"
        fits = bank.shape[1] == size
    if not fits:
        raise ValueError(f"{source}: expected {expected}, got shape {tuple(bank.shape)}")
    return bank


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


# ------------------------------------------------------------------------------------------ results


def _entry(args: argparse.Namespace, comparison: RerankerComparison) -> Entry:
    """Return the entry that is written: the one that --write names, or the first method's.

    The first method is the calibrated one if there is one. Of a method that was tried with and
    without a bank, it is the entry with a bank.
    """
    entries = {entry.name: entry for entry in comparison.entries}  # of equal names, the last
    name = args.write
    if name is None:
        if len(entries) == 1:
            raise ValueError("--methods: all were left out, so that there is nothing to write")
        name = list(entries)[1]
        if name == "fast" and CALIBRATED in entries:
            name = CALIBRATED
    if name not in entries:
        raise ValueError(f"--write: {name} {comparison.left_out[name]}")
    return entries[name]


def _write_results(args: argparse.Namespace, comparison: RerankerComparison, entry: Entry) -> None:
    """Write the results of an entry."""
    sim = comparison.sim
    if args.rankings or args.trec:
        best = retrieval_results(
            sim, reranker=entry.reranker, hubness_k=args.top, folds=args.folds, **comparison.rules
        )
        if args.rankings:
            with files.written(args.rankings, "wb") as file:
                np.savez(file, i2t=best.i2t.top.numpy(), t2i=best.t2i.top.numpy())
        if args.trec:
            save_trec(best, args.trec)
    if args.out:
        if entry.reranker is None:
            i2t = t2i = sim.scores()
            flags = (False, False)
        else:
            i2t, t2i = entry.reranker.rerank(sim)
            flags = entry.reranker.transductive
        with files.written(args.out, "wb") as file:
            transductive = np.array(flags)
            np.savez(file, i2t=i2t.numpy(), t2i=t2i.numpy(), transductive=transductive)
    if args.queries:
        with files.written(args.queries) as file:
            entry.results.write(file)


def _write_table(args: argparse.Namespace, table: Table, page: Callable[[], str]) -> None:
    """Write the table of all methods in LaTeX, and the page that it is in."""
    for path, text in ((args.latex, partial(tables.latex, table)), (args.report, page)):
        if path:
            with files.written(path) as file:
                file.write(text())


def _write_metrics(
    args: argparse.Namespace,
    systems: Mapping[tuple[str, ...], RetrievalResults],  # by the first columns
    heads: Sequence[str],  # of the first columns
) -> None:
    """Write all metrics of all methods as CSV."""
    if not args.metrics:
        return
    with files.written(args.metrics) as file:
        writer = csv.writer(file, lineterminator="\n")
        for number, (names, results) in enumerate(systems.items()):
            metrics = results.metrics(args.ks)
            if number == 0:
                writer.writerow([*heads, *metrics])
            writer.writerow([*names, *metrics.values()])
