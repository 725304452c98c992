"""The commands ``itrloss rerank``, ``itrloss eval`` and ``itrloss compare``."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor
from typer.main import get_command

from .. import __version__, files
from ..checks import IdsLike, one_of, require_finite
from ..checks import Names as Arguments
from ..checks.warnings import SuspiciousInputWarning, warn_of_guess
from ..files import Source
from ..metrics import Judgements, default_ids, fold_repeated, retrieval_results, save_trec
from ..metrics.labels import with_ids
from ..metrics.relevance import Rules
from ..similarity import Similarity
from .comparison import METHODS, Banks, compare_models, compare_rerankers
from .options import Compare, Evaluate, Options, Rerank, Reranking
from .tables import Entry, Names, SystemComparison, Table, latex, show

T = TypeVar("T")
Command = Rerank | Evaluate | Compare
_IDS = re.compile(r"(?<![\w/.-])(image|text)_ids(?![./-]?\w)")  # arguments, not parts of paths
_EXTRA = (
    "; several values of an option are separated by commas, as in --methods fast,csls; embeddings "
    "are for itrloss eval, scores of several models for itrloss compare"
)
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Losses and re-rankers for image-text retrieval.",
)
app.command(
    "rerank",
    epilog="""Examples:

itrloss rerank sims.npy

itrloss rerank sims.npy --methods fast,csls --val val_sims.npy --out reranked.npz

itrloss rerank sims.npy --text-ids captions.csv:image --text-names captions.txt --report page.html
""",
)(Rerank)
app.command(
    "eval",
    epilog="""Examples:

itrloss eval images.npy texts.npy

itrloss eval features.npz:images features.npz:texts --latex table.tex

itrloss eval images.npy texts.npy --bank-images others.npy --bank-texts captions.npy
""",
)(Evaluate)
app.command(
    "compare",
    epilog="""Examples:

itrloss compare base_sims.npy ours_sims.npy

itrloss compare base.npz ours.npz --names InfoNCE,DCL --ks 1,5,10,20 --latex table.tex

itrloss compare plain.npy reranked.npz third.npy --transductive third.npy --report page.html
""",
)(Compare)


def _show_version(is_asked: bool) -> None:
    """Print the version, and leave."""
    if is_asked:
        print(f"itrloss {__version__}")
        raise typer.Exit()


@app.callback()
def _all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    pass


_COMMAND = get_command(app)  # once, for all calls


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        # a terminal without Greek letters and arrows gets question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if arguments is None:  # a process of its own, which removes temporary files when it is ended
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        arguments = sys.argv[1:]
    try:
        _answer(arguments)
    except typer.TyperException as error:
        if error.format_message():  # not where the help is printed in place of an error
            hint = _EXTRA if "extra argument" in error.format_message() else ""
            _say(error.format_message() + hint)
            print("itrloss COMMAND --help explains all options", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads has read enough; nothing is flushed at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, TypeError, ValueError) as error:
        _say(error)
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    return 0


def _say(message: object) -> None:
    """Print a message for standard error."""
    print(f"itrloss: {_in_words_of_options(message)}", file=sys.stderr)


def _in_words_of_options(message: object) -> str:
    """Return a message of the library with options in place of arguments."""
    held_out = "val-" if str(message).startswith("--val:") else ""
    words = _IDS.sub(rf"--{held_out}\1-ids", str(message)).replace("validation:", "--val:")
    return words.replace("the transpose, scores.T", "--transpose")


# ----------------------------------------------------------------------------------------- commands


def _answer(arguments: Sequence[str]) -> None:
    """Run a command; typer prints help itself."""
    args = _COMMAND(arguments, prog_name="itrloss", standalone_mode=False)
    if isinstance(args, Compare):
        _compare(args, arguments)
    elif isinstance(args, (Rerank, Evaluate)):
        _rerank(args, arguments)


def _rerank(args: Rerank | Evaluate, arguments: Sequence[str]) -> None:
    """Compare re-rankers on the scores or embeddings of one model."""
    outputs = _outputs(args)
    ks = _numbers(args.ks)
    methods = args.methods.split(",")
    for method in methods:
        one_of("--methods", method, *METHODS)
    if args.folds > 1 and args.out is not None:
        raise ValueError("--out: expected --folds 1, as the file has the scores of all candidates")
    if args.report is None and (args.image_names or args.text_names):
        raise ValueError("--image-names, --text-names: expected --report, too")
    rules = _rules(args)
    inputs = [args.scores] if isinstance(args, Rerank) else [args.images, args.texts]
    files_read = ", ".join(map(str, inputs))
    with _shown_warnings() as warned:
        sim = _similarity(args, inputs, args.image_ids, args.text_ids, not args.relevant)
        validation = _validation(args)
        banks = _banks(args, sim)
        n, m = sim.shape
        names = _names(args.image_names, "image", n), _names(args.text_names, "text", m)
        about = f"{files_read}: {_about(args, sim)}"
        print(about, flush=True)
        comparison = compare_rerankers(
            sim, methods, banks, validation, _track, args.folds, rules, args.samples
        )
    comparison = replace(comparison, notes=[*comparison.notes, *warned])
    _print(comparison.table(ks, timed=True))
    if not outputs:
        return
    entry = _entry_to_write(comparison)
    facts = _facts(arguments, about)
    _write_results(args, entry, sim, facts)
    _write_table(args, comparison, f"Re-ranking of {files_read}", facts, entry, names)
    print(f"written ({entry.name}): {', '.join(map(str, outputs))}", flush=True)


def _compare(args: Compare, arguments: Sequence[str]) -> None:
    """Compare the scores of several models, which are read one after the other."""
    outputs = _outputs(args)
    names = [str(source) for source in args.scores]
    if args.names is not None:
        names = args.names.split(",")
    if not len(names) == len(set(names)) == len(args.scores):
        n = len(args.scores)
        raise ValueError(f"--names: expected a name of its own for each of {n} files, got {names}")
    transductive = [name for name in args.transductive.split(",") if name]
    ks = _numbers(args.ks)
    rules = _rules(args)
    results = {}
    about = ""
    with _shown_warnings() as warned:
        for name, source in zip(names, _track(args.scores), strict=True):
            with _naming(str(source)):
                sim, t2i, is_transductive = _model(args, source)
                scores = sim if t2i is None else (sim, t2i)
                results[name] = retrieval_results(scores, folds=args.folds, **rules)
            transductive += [name] * is_transductive
            about = _about(args, sim)
        comparison = compare_models(results, transductive=transductive, samples=args.samples)
    comparison = replace(comparison, notes=[*comparison.notes, *warned])
    print(about)
    _print(comparison.table(ks))
    title = f"Comparison of {', '.join(names)}"
    _write_table(args, comparison, title, _facts(arguments, about))
    if outputs:
        print(f"written: {', '.join(map(str, outputs))}", flush=True)


@contextlib.contextmanager
def _shown_warnings() -> Iterator[list[str]]:
    """Return a context that prints each warning of the input once, and their list, for tables."""
    notes: list[str] = []

    def show(message: object, *_: object, **__: object) -> None:
        """Print a warning that was not printed before."""
        note = f"Warning: {_in_words_of_options(message).removesuffix('.')}."
        if note not in notes:  # every method finds the same of the same scores
            notes.append(note)
            _say(message)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", SuspiciousInputWarning)
        warnings.showwarning = show
        yield notes


def _track(steps: Sequence[T]) -> Iterable[T]:
    """Return the steps one by one, with a bar and the time that is left on a terminal."""
    console = Console(stderr=True)
    return track(steps, "itrloss", console=console, transient=True, disable=not console.is_terminal)


def _print(table: Table) -> None:
    """Print a table, on a terminal in its width."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=100, color_system=None)
    show(table, console)
    console.file.flush()  # a closed pipe is noticed here


def _about(args: Options, sim: Similarity) -> str:
    """Return how many images and texts there are, and what says which of them match."""
    n, m = sim.shape
    pairing = f"{m // n} consecutive texts an image"
    if args.relevant:
        pairing = f"right by {args.relevant}"
    elif args.text_ids:
        pairing = "by the ids given"
    return f"{n} images, {m} texts ({pairing})"


def _facts(arguments: Sequence[str], about: str) -> dict[str, str]:
    """Return what was computed, and with what and when."""
    return {
        "data": about,
        "version": f"itrloss {__version__}",
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "command": files.printable(shlex.join(["itrloss", *arguments])),
    }


# -------------------------------------------------------------------------------------------- files


def _outputs(args: Command) -> list[Path]:
    """Return what is to be written, after a check that it can be, and that no file has two uses."""
    values = vars(args)
    read = [source for value in values.values() for source in _sources(value)]
    used = [os.path.realpath(source.path) for source in read]
    outputs = {name: path for name, path in values.items() if isinstance(path, Path)}
    for name, path in outputs.items():
        file = path
        if name == "trec" and path.exists():
            file = path / "i2t.run"
        files.check_writable(file)
        place = os.path.realpath(file)
        if place in used:
            raise ValueError(f"--{name} {path}: expected a file of its own for a result")
        used.append(place)
    if args.report is not None:
        importlib.import_module("matplotlib")
    return list(outputs.values())


def _sources(value: object) -> list[Source]:
    """Return the files to read that the value of an option names: one, several or none."""
    several = [value]
    if isinstance(value, (list, tuple)) and not isinstance(value, Source):
        several = list(value)
    return [each for each in several if isinstance(each, Source)]


def _numbers(text: str) -> list[int]:
    """Return the numbers of --ks."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"--ks: expected integers of at least 1, got {text!r}")
    return [int(word) for word in words]


def _matrix(args: Command, source: Source) -> Tensor:
    """Return the matrix in a file, with images as rows."""
    matrix = files.read_matrix(*source)
    require_finite(str(source), matrix)
    return matrix.T if args.transpose else matrix


def _similarity(
    args: Rerank | Evaluate,
    sources: Sequence[Source],
    image_ids: Source | None,
    text_ids: Source | None,
    by_ids: bool = True,
) -> Similarity:
    """Return the similarities of scores in a file, or of embeddings of images and of texts in two.

    ``by_ids``: the ids say which pairs are right.
    """
    names = [str(source) for source in sources]
    matrices = [_matrix(args, source) for source in sources]
    ids: tuple[IdsLike | None, IdsLike | None] = _ids(image_ids, text_ids)
    if len(matrices) == 1:
        return with_ids(names[0], matrices[0], *ids, by_ids)
    images, texts = matrices
    if sources[0] == sources[1]:
        raise ValueError(
            f"{names[0]}: expected images and texts, got one array for both; of a file with both, "
            "FILE:NAME takes one"
        )
    if text_ids is None and by_ids:
        images = fold_repeated(images)
        ids = default_ids(len(images), len(texts))
        warn_of_guess(len(images), len(texts))
    if images.dtype != texts.dtype:
        images = images.float()
        texts = texts.float()
    called = Arguments(names[0], names[1], "image_ids", "text_ids")
    return Similarity(images, texts, *ids, names=called)


def _validation(args: Rerank | Evaluate) -> Similarity | None:
    """Return the held-out pairs."""
    held_out = _sources(args.val)
    if held_out:
        with _naming("--val"):
            return _similarity(args, held_out, args.val_image_ids, args.val_text_ids)
    if args.val_image_ids or args.val_text_ids:
        raise ValueError("--val-image-ids, --val-text-ids: expected --val, too")
    return None


def _model(args: Compare, source: Source) -> tuple[Similarity, Tensor | None, bool]:
    """Return a model's scores, others for text→image if it has some, and whether they depend on the
    other test queries.
    """
    saved = files.read_reranked(source.path) if source.key is None else None
    matrix = _matrix(args, source) if saved is None else saved.i2t
    ids = _ids(args.image_ids, args.text_ids)
    sim = with_ids(str(source), matrix, *ids, args.relevant is None)
    if saved is None:
        return sim, None, False
    require_finite(str(source), saved.t2i)
    return sim, saved.t2i, saved.transductive


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Return a context whose errors name an option or a file."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if name in str(error):
            raise
        raise ValueError(f"{name}: {error}") from None


def _banks(args: Rerank | Evaluate, sim: Similarity) -> Banks:
    """Return the queries of another set."""
    sources = args.bank_images, args.bank_texts
    images, texts = [None if source is None else _matrix(args, source) for source in sources]
    if sim.embeddings is not None:
        return images, texts
    if args.folds > 1 and sources != (None, None):
        raise ValueError("--folds: expected 1 with banks of scores, which have all candidates")
    if texts is not None and not args.text_ids and not args.relevant:
        texts = fold_repeated(texts)  # as the rows of the scores are
    return images, texts


def _ids(
    image_ids: Source | None, text_ids: Source | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the ids in files."""
    if text_ids is None and image_ids is not None:
        raise ValueError("image_ids: expected text_ids, too")
    of_images = None if image_ids is None else files.read_ids(*image_ids)
    return of_images, None if text_ids is None else files.read_ids(*text_ids)


def _rules(args: Options) -> Rules:
    """Return the arguments of ``retrieval_results`` on who is right and who is ranked."""
    rules: Rules = {}
    for name in ("relevant", "exclude", "candidates"):
        source = getattr(args, name)
        if source is None:
            continue
        images, texts, *grades = files.read_pairs(*source).T
        if grades and name != "relevant":
            raise ValueError(f"{source}: expected an image and a text a line, got grades, too")
        rules[name] = images.long(), texts.long()
        if grades:
            rules[name] = Judgements(images.long(), texts.long(), *grades)
    return rules


def _names(source: Source | None, item: str, size: int) -> list[str]:
    """Return the names of images or of texts: the lines of a file, or by default their numbers."""
    if source is None:
        return [f"{item} {i}" for i in range(size)]
    lines = files.read_lines(source.path)
    if len(lines) != size:
        raise ValueError(f"{source}: expected a line for each {item}, {size}, got {len(lines)}")
    return lines


# ------------------------------------------------------------------------------------------ results


def _entry_to_write(comparison: SystemComparison) -> Entry:
    """Return the entry that is advised, or the last of the first method: by a bank, if so tried."""
    if comparison.advised is not None:
        return comparison.advised
    tried = comparison.entries[1:]
    if not tried:
        raise ValueError("--methods: all were left out, so that there is nothing to write")
    return [entry for entry in tried if entry.method == tried[0].method][-1]


def _write_results(
    args: Reranking, entry: Entry, sim: Similarity, facts: Mapping[str, str]
) -> None:
    """Write the results of an entry."""
    if args.trec is not None:
        save_trec(entry.results, args.trec)
    if args.out is not None:
        assert entry.reranker is not None
        scores = entry.reranker.rerank(sim)
        with files.written(args.out, "wb") as file:
            np.savez(
                file,
                i2t=scores.i2t.numpy(),
                t2i=scores.t2i.numpy(),
                transductive=np.array(scores.transductive),
            )
    if args.queries is not None:
        rows = entry.results.to_frame().assign(**facts)
        _write_text(args.queries, rows.to_csv(index=False))


def _write_table(
    args: Options,
    comparison: SystemComparison,
    title: str,
    facts: Mapping[str, str],
    chosen: Entry | None = None,
    names: Names = ((), ()),
) -> None:
    """Write the table of all entries in LaTeX, the page that it is in, and all metrics as CSV."""
    ks = _numbers(args.ks)
    table = comparison.table(ks)
    if args.report is not None:
        from .report import page

        _write_text(args.report, page(comparison, table, title, facts, chosen, names))
    if args.latex is not None:
        comments = "".join(f"% {name}: {' '.join(fact.split())}\n" for name, fact in facts.items())
        _write_text(args.latex, comments + latex(table))
    if args.metrics is not None:
        rows = []
        for entry in comparison.entries:
            rows.append({"method": entry.name, **entry.results.metrics(ks), **facts})
        _write_text(args.metrics, pd.DataFrame(rows).to_csv(index=False))


def _write_text(path: Path, text: str) -> None:
    """Write the text of a result."""
    with files.written(path) as file:
        file.write(text)
