"""The commands ``itrloss rerank``, ``itrloss eval`` and ``itrloss compare``."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, TypeVar

import numpy as np
import pandas as pd
import torch
import typer
from rich.console import Console
from rich.progress import track
from torch import Tensor

from .. import __version__, files
from ..checks import EMBEDDINGS, Names, did_you_mean, one_of, require_finite
from ..checks.warnings import SuspiciousInputWarning, UnfitScalesWarning, warn_of_guess
from ..files import Source, as_source
from ..metrics import (
    Judgements,
    coco_protocol,
    default_ids,
    fold_repeated,
    retrieval_results,
    save_trec,
)
from ..metrics.labels import unrelated_ids, with_ids
from ..metrics.protocols import check_coco
from ..metrics.relevance import Rules, folds_of
from ..rerank import FastReranker
from ..similarity import Similarity
from . import options as o
from .comparison import (
    CALIBRATED,
    PLAIN,
    SystemComparison,
    compare_models,
    compare_rerankers,
    protocol_table,
)
from .pages import check as check_report
from .report import page
from .tables import HUBS, Entry, Table, latex, show

# Arguments of the library, which the command line has as options; not as parts of a path.
_ARGUMENTS = re.compile(
    r"(?<![\w/.-])((?:val_)?(?:image|text)_ids|(?:folds|validation)(?=:))(?![./-]?\w)"
)
T = TypeVar("T")
_INPUTS = ("scores", "images", "texts")  # which are no options
_FAST = FastReranker()
app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Losses and re-rankers for image-text retrieval.",
)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        # a terminal without Greek letters and arrows gets question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if arguments is None:  # a process of its own, which removes temporary files when it is ended
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        arguments = sys.argv[1:]
    command = shlex.join(["itrloss", *arguments])
    try:
        status = app(arguments, prog_name="itrloss", standalone_mode=False, obj=command)
    except typer.TyperException as error:
        if error.format_message():  # not where the help is printed in place of an error
            context = getattr(error, "ctx", None)
            _say(f"{error.format_message()}{_commas(error)}")
            print(
                f"{context.command_path if context else 'itrloss'} --help explains all options",
                file=sys.stderr,
            )
        return 2
    except FileNotFoundError as error:
        _say(f"{error.filename}: there is no such file{_near(error.filename)}")
        return 2
    except (ImportError, OSError, ValueError) as error:
        _say(error)
        return 2
    if status == 130:
        _say("interrupted")
    return status or 0


# ----------------------------------------------------------------------------------------- messages


def _say(message: object) -> None:
    """Print a message for standard error, with options in place of arguments."""
    print(f"itrloss: {_in_words_of_options(message)}", file=sys.stderr)


def _commas(error: typer.TyperException) -> str:
    """Return a hint at commas for an argument too many; empty for other errors."""
    if "extra argument" not in error.format_message():
        return ""
    return (
        "; several values of an option are separated by commas, as in --methods fast,csls; "
        "embeddings are for itrloss eval, scores of several models for itrloss compare"
    )


@contextlib.contextmanager
def _shown_warnings() -> Iterator[list[str]]:
    """Return a context that prints each warning once, and the list of those of the input, for
    tables.
    """
    printed = set()
    notes = []

    def show(message: object, category: type[Warning], *_: object, **__: object) -> None:
        """Print a warning that was not printed before."""
        if str(message) in printed:  # every method finds the same of the same scores
            return
        printed.add(str(message))
        _say(message)
        if issubclass(category, SuspiciousInputWarning):
            notes.append(f"Warning: {_in_words_of_options(message).removesuffix('.')}.")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("ignore", UnfitScalesWarning)
        warnings.showwarning = show
        yield notes


def _in_words_of_options(message: object) -> str:
    """Return a message of the library with options in place of arguments."""
    return _ARGUMENTS.sub(lambda argument: _option(argument[0]), str(message))


def _option(argument: str) -> str:
    """Return the option that stands for an argument of the library."""
    return "--val" if argument == "validation" else "--" + argument.replace("_", "-")


def _near(path: str | bytes) -> str:
    """Return a hint at the file that was probably meant, of those in a missing one's folder."""
    missing = Path(os.fsdecode(path))
    folder = missing.parent
    if not folder.is_dir():
        return f"; there is no directory {folder}"
    return did_you_mean(missing.name, os.listdir(folder))


# ----------------------------------------------------------------------------------------- commands


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


@app.command(
    epilog="""Examples:

itrloss rerank sims.npy

itrloss rerank sims.npy --methods fast,csls --val val_sims.npy --out reranked.npz

itrloss rerank sims.npy --text-ids captions.csv:image --text-names captions.txt --report page.html
"""
)
def rerank(  # noqa: PLR0913 - the options
    context: typer.Context,
    scores: o.Array,
    transpose: o.Transpose = False,
    image_ids: o.ImageIds = None,
    text_ids: o.TextIds = None,
    relevant: o.Relevant = None,
    exclude: o.Exclude = None,
    candidates: o.Candidates = None,
    folds: o.Folds = 1,
    val: o.Scores = None,
    val_image_ids: o.ValImageIds = None,
    val_text_ids: o.ValTextIds = None,
    bank_images: o.BankImages = None,
    bank_texts: o.BankTexts = None,
    methods: o.MethodNames = o.ALL_METHODS,
    i2t: o.Scales = _FAST.i2t,
    t2i: o.Scales = _FAST.t2i,
    protocol: o.Protocol = None,
    ks: o.Ks = o.ALL_KS,
    samples: o.Samples = None,
    metrics: o.Metrics = None,
    latex: o.Latex = None,
    report: o.Report = None,
    write: o.WriteOf = None,
    out: o.Out = None,
    rankings: o.Rankings = None,
    queries: o.Queries = None,
    trec: o.Trec = None,
    top: o.Top = 10,
    image_names: o.ImageNames = None,
    text_names: o.TextNames = None,
) -> None:
    """Re-rank a saved matrix of scores (n_images, n_texts) by every method."""
    _run(context, [scores], [val] if val else [])


@app.command(
    "eval",
    epilog="""Examples:

itrloss eval images.npy texts.npy

itrloss eval features.npz:images features.npz:texts --latex table.tex

itrloss eval images.npy texts.npy --bank-images others.npy --bank-texts captions.npy
""",
)
def evaluate(  # noqa: PLR0913 - the options
    context: typer.Context,
    images: o.Images,
    texts: o.Texts,
    image_ids: o.ImageIds = None,
    text_ids: o.TextIds = None,
    relevant: o.Relevant = None,
    exclude: o.Exclude = None,
    candidates: o.Candidates = None,
    folds: o.Folds = 1,
    val: o.Pair = None,
    val_image_ids: o.ValImageIds = None,
    val_text_ids: o.ValTextIds = None,
    bank_images: o.BankImages = None,
    bank_texts: o.BankTexts = None,
    methods: o.MethodNames = o.ALL_METHODS,
    i2t: o.Scales = _FAST.i2t,
    t2i: o.Scales = _FAST.t2i,
    protocol: o.Protocol = None,
    ks: o.Ks = o.ALL_KS,
    samples: o.Samples = None,
    metrics: o.Metrics = None,
    latex: o.Latex = None,
    report: o.Report = None,
    write: o.WriteOf = None,
    out: o.Out = None,
    rankings: o.Rankings = None,
    queries: o.Queries = None,
    trec: o.Trec = None,
    top: o.Top = 10,
    image_names: o.ImageNames = None,
    text_names: o.TextNames = None,
) -> None:
    """Re-rank saved embeddings (n_images, D), (n_texts, D) by every method."""
    context.params["transpose"] = False
    _run(context, [images, texts], [as_source(path) for path in val or ()])


@app.command(
    epilog="""Examples:

itrloss compare base_sims.npy ours_sims.npy

itrloss compare base.npz ours.npz --names InfoNCE,DCL --ks 1,5,10,20 --latex table.tex

itrloss compare plain.npy reranked.npz third.npy --transductive third --report page.html
"""
)
def compare(  # noqa: PLR0913 - the options
    context: typer.Context,
    scores: o.Arrays,
    transpose: o.Transpose = False,
    image_ids: o.ImageIds = None,
    text_ids: o.TextIds = None,
    relevant: o.Relevant = None,
    exclude: o.Exclude = None,
    candidates: o.Candidates = None,
    folds: o.Folds = 1,
    names: o.Names = None,
    transductive: o.Transductive = "",
    ks: o.Ks = o.ALL_KS,
    samples: o.Samples = None,
    metrics: o.Metrics = None,
    latex: o.Latex = None,
    report: o.Report = None,
) -> None:
    """Compare the saved scores of several models with those of the first."""
    _run_models(context, scores)


def _run(context: typer.Context, sources: list[Source], val: list[Source]) -> None:
    """Compare re-rankers on the scores or embeddings of one model."""
    args = SimpleNamespace(**context.params)
    outputs = _outputs(args, [*sources, *val])
    _check_choice(args)
    rules = _rules(args)
    with _shown_warnings() as warned:
        sim = _similarity(args, sources, _matrices(args, sources))
        validation = _validation(args, val)
        banks = (_bank(args, sim, 0), _bank(args, sim, 1))
        _check_folds(args, sim, banks)
        if args.protocol:
            check_coco(sim.shape)
        if args.report:
            check_report()
        n, m = sim.shape
        names = (_names(args.image_names, "image", n), _names(args.text_names, "text", m))
        about = f"{', '.join(map(str, sources))}: {_about(args, sim)}"
        print(about, flush=True)
        comparison = compare_rerankers(
            sim,
            args.methods,
            banks,
            validation,
            FastReranker(args.i2t, args.t2i),
            _track,
            args.folds,
            rules,
            args.samples,
        )
    _print(comparison.table(args.ks, titles=False, timed=True, notes=warned))
    if not args.protocol and not outputs:
        return
    entry = _entry(args, comparison)
    if args.protocol:
        _print_protocol(comparison, entry)
    facts = _facts(context, about)
    _write_results(args, comparison, entry, facts)
    table = comparison.table(args.ks, notes=warned)
    title = f"Re-ranking of {', '.join(map(str, sources))}"
    html = partial(page, comparison, table, title, facts, entry, names)
    _write_table(args, comparison, table, html, facts)
    if outputs:
        of = f", hubs of {HUBS[entry.hubs][0]}" if entry.hubs else ""
        print(f"written ({entry.name}{of}): {', '.join(map(str, outputs))}", flush=True)


def _run_models(context: typer.Context, sources: list[Source]) -> None:
    """Compare the scores of several models, which are read one after the other."""
    args = SimpleNamespace(**context.params)
    outputs = _outputs(args, sources)
    names = _model_names(args, sources)
    marked = [name for name in args.transductive.split(",") if name]
    for name in marked:
        one_of("--transductive", name, *names)
    rules = _rules(args)
    if args.report:
        check_report()
    results = {}
    about = ""
    shape = None
    with _shown_warnings() as warned:
        for name, source in zip(names, _track(sources), strict=True):
            scores, transductive = _model_scores(args, source)
            sim = scores[0] if isinstance(scores, tuple) else scores
            if shape is None:
                shape = sim.shape
                about = _about(args, sim)
                _check_folds(args, sim, ())
            if sim.shape != shape:
                raise ValueError(
                    f"{source}: expected shape {shape} like {sources[0]}, got {sim.shape}"
                )
            results[name] = retrieval_results(scores, folds=args.folds, **rules)
            if transductive:
                marked.append(name)
        comparison = compare_models(results, transductive=marked, samples=args.samples)
    table = comparison.table(args.ks, notes=warned)
    print(about)
    _print(table)
    facts = _facts(context, about)
    html = partial(page, comparison, table, f"Comparison of {', '.join(names)}", facts)
    _write_table(args, comparison, table, html, facts)
    if outputs:
        print(f"written: {', '.join(map(str, outputs))}", flush=True)


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


def _facts(context: typer.Context, about: str) -> dict[str, str]:
    """Return what was computed, and with what and when."""
    options = []
    for name, value in sorted(context.params.items()):
        if value not in (None, False, "") and name not in _INPUTS:
            separator = "," if isinstance(value, list) else " "
            words = value if type(value) in (list, tuple) else [value]
            options.append(f"{_option(name)} {separator.join(map(str, words))}")
    facts = {
        "data": about,
        "version": f"itrloss {__version__}",
        "date": datetime.now().astimezone().isoformat(" ", "seconds"),
        "command": context.obj,
        "options": "; ".join(options),
    }
    return {name: _readable(fact) for name, fact in facts.items()}


def _readable(text: str) -> str:
    """Return a text with a question mark for each byte of a file name that is no UTF-8."""
    return text.encode("utf-8", "replace").decode()


def _model_scores(
    args: SimpleNamespace, source: Source
) -> tuple[Similarity | tuple[Similarity, Tensor], bool]:
    """Return the scores in a file, of both directions if they are re-ranked, and whether they
    depend on the other test queries, as far as the file says.
    """
    saved = files.read_reranked(source.path) if source.key is None else None
    if saved is None:
        return _similarity(args, [source], _matrices(args, [source])), False
    for matrix in (saved.i2t, saved.t2i):
        require_finite(str(source), matrix)
    return (_similarity(args, [source], [saved.i2t]), saved.t2i), saved.transductive


def _model_names(args: SimpleNamespace, sources: list[Source]) -> list[str]:
    """Return the names of the models: those given, or the files' without what all have."""
    if len(sources) < 2:
        raise ValueError(f"{sources[0]}: expected at least two files to compare, got one")
    names = args.names.split(",") if args.names else _short_names(sources)
    if len(names) != len(sources):
        raise ValueError(
            f"--names: expected one for each of the {len(sources)} files, got {len(names)}"
        )
    for name in names:
        if names.count(name) > 1 or not name.strip():
            raise ValueError(f"--names: expected different names, got {name!r} in {names}")
    return names


def _short_names(sources: Sequence[Source]) -> list[str]:
    """Return the files' names without suffixes and without the folders that all are in."""
    paths = [source.path.absolute().with_suffix("") for source in sources]
    folder = os.path.commonpath([path.parent for path in paths])
    names = [_readable(path.relative_to(folder).as_posix()) for path in paths]
    if len(set(names)) < len(names):  # where only suffixes differ, or arrays in a file
        return [str(source) for source in sources]
    return names


def _about(args: SimpleNamespace, sim: Similarity) -> str:
    """Return how many images and texts there are, and what says which of them match."""
    n, m = sim.shape
    pairing = f"{m // n} consecutive texts an image"
    if args.relevant:
        pairing = f"right by {args.relevant}"
    elif args.text_ids:
        pairing = "by the ids given"
    parts = f", in {args.folds} parts" if args.folds != 1 else ""
    return f"{n} images, {m} texts ({pairing}){parts}"


# ------------------------------------------------------------------------------------------- checks


def _outputs(args: SimpleNamespace, sources: list[Source]) -> list[Path]:
    """Return what is to be written, after a check that no file has two uses."""
    uses = {}
    outputs = []
    for name, value in vars(args).items():
        if isinstance(value, Source):
            uses[os.path.realpath(value.path)] = _option(name)
    uses |= {os.path.realpath(source.path): "the input" for source in sources}
    for name, path in vars(args).items():
        if isinstance(path, Path):
            place = os.path.realpath(path / "i2t.run" if name == "trec" else path)
            if place in uses:
                raise ValueError(
                    f"{path}: expected a file of its own for a result, got that of {uses[place]}"
                )
            uses[place] = _option(name)
            outputs.append(path)
    return outputs


def _check_choice(args: SimpleNamespace) -> None:
    """Raise a ValueError for a method of --write that is not tried, or for names of queries that
    are not shown.
    """
    for name in ("image_names", "text_names"):
        if vars(args)[name] is not None and args.report is None:
            raise ValueError(f"{_option(name)}: expected --report, too")
    if args.write is not None:
        calibrated = [CALIBRATED] if args.val else []
        one_of("--write", args.write, PLAIN, *args.methods, *calibrated)


def _check_folds(args: SimpleNamespace, sim: Similarity, banks: Sequence[Tensor | None]) -> None:
    """Raise a ValueError for folds that do not go with the input or with other options."""
    n, m = sim.shape
    if args.folds == 1:
        return
    if args.folds == n:
        raise ValueError(f"--folds: {n} are parts of one image, where there is nothing to re-rank")
    if getattr(args, "out", None) or getattr(args, "rankings", None):
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


def _matrices(args: SimpleNamespace, sources: Sequence[Source]) -> list[Tensor]:
    """Return the matrices in files, with images as rows."""
    matrices = []
    for source in sources:
        matrix = files.read_matrix(*source)
        require_finite(str(source), matrix)
        matrices.append(matrix.T if args.transpose else matrix)
    return matrices


def _ids(
    args: SimpleNamespace, val: str, are_right: bool, shape: Sequence[int]
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Return the ids of images and of texts out of files; None for no files.

    ``val`` is ``"val_"`` for those of held-out pairs. ``are_right``: they say which pairs are.
    ``shape`` is the number of images and of texts. Without ids of images these have their numbers.
    """
    sources = [getattr(args, f"{val}{side}_ids") for side in ("image", "text")]
    if sources == [None, None]:
        return None, None
    if sources[1] is None:
        raise ValueError("image_ids: expected text_ids, too")
    text_ids = files.read_ids(*sources[1])
    image_ids = np.arange(shape[0]) if sources[0] is None else files.read_ids(*sources[0])
    if image_ids.dtype.kind != text_ids.dtype.kind:  # names, of which one side's are numbers
        image_ids, text_ids = image_ids.astype(str), text_ids.astype(str)
    if are_right and not np.isin(image_ids, text_ids).any():
        raise ValueError(
            "image_ids, text_ids: no id of an image equals one of a text, such as "
            f"{image_ids[0]!s} and {text_ids[0]!s}"
        )
    for side, ids, size, source in zip(
        ("image", "text"), (image_ids, text_ids), shape, sources, strict=True
    ):
        if len(ids) == size + 1 and ids.dtype.kind == "U":
            way = f", or write {source}:{ids[0]}" if source.path.suffix.lower() == ".csv" else ""
            raise ValueError(
                f"{side}_ids: expected {size} ids, got {len(ids)}; if the first of {source}, "
                f"{ids[0]!s}, is a header, remove it{way}"
            )
    return image_ids, text_ids


def _rules(args: SimpleNamespace) -> Rules:
    """Return the arguments of ``retrieval_results`` on who is right and who is ranked."""
    rules: Rules = {}
    for name in ("relevant", "exclude", "candidates"):
        source = getattr(args, name)
        if source is None:
            continue
        if getattr(args, "protocol", None):
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


def _similarity(
    args: SimpleNamespace, sources: Sequence[Source], matrices: list[Tensor], val: str = ""
) -> Similarity:
    """Return the similarities of scores, or of embeddings of images and of texts; errors name the
    files that they are from.
    """
    by_ids = bool(val) or args.relevant is None
    shape = matrices[0].shape if len(sources) == 1 else [len(matrix) for matrix in matrices]
    image_ids, text_ids = _ids(args, val, by_ids, shape)
    if len(sources) == 1:
        (source,) = sources
        if image_ids is None and by_ids:
            _check_orientation(source, matrices[0], args.transpose)
        try:
            return with_ids(str(source), matrices[0], image_ids, text_ids, by_ids)
        except ValueError as error:
            raise ValueError(f"{source}: {str(error).removeprefix(f'{source}: ')}") from None
    images, texts = matrices
    one, other = sources
    if one.key == other.key and one.path.samefile(other.path):
        raise ValueError(
            f"{one}: expected images and texts, got one array for both; of a file with both, "
            "FILE:NAME takes one"
        )
    if image_ids is None and by_ids:
        images = fold_repeated(images)
        image_ids, text_ids = default_ids(len(images), len(texts))
        warn_of_guess(len(images), len(texts))
    elif image_ids is None:
        image_ids, text_ids = unrelated_ids(len(images), len(texts))
    if (images.dtype == torch.float64) != (texts.dtype == torch.float64):
        images = images.float()
        texts = texts.float()
    names = Names(str(one), str(other), "image_ids", "text_ids")
    return Similarity(images, texts, image_ids, text_ids, names=names)


def _check_orientation(source: Source, scores: Tensor, transpose: bool) -> None:
    """Raise a ValueError for scores without ids that seem to have texts as rows."""
    n, m = scores.shape
    if n <= m or n % m:
        return
    what = "it has"
    how = "pass --transpose, or image_ids and text_ids"
    if transpose:
        what = "with --transpose it has"
        how = "leave --transpose out"
    raise ValueError(
        f"{source}: expected images as rows; {what} {n} rows and {m} columns, as if texts were: "
        f"{how}; {EMBEDDINGS}"
    )


def _validation(args: SimpleNamespace, sources: list[Source]) -> Similarity | None:
    """Return the held-out pairs; errors and warnings name their options."""
    with _of_held_out_pairs():
        if sources:
            return _similarity(args, sources, _matrices(args, sources), "val_")
        if args.val_image_ids or args.val_text_ids:
            raise ValueError("image_ids, text_ids: expected --val, too")
    return None


@contextlib.contextmanager
def _of_held_out_pairs() -> Iterator[None]:
    """Return a context in which errors and warnings name held-out pairs and their ids."""
    show = warnings.showwarning

    def renamed(message: object) -> str:
        """Return a message on ids as one on those of held-out pairs."""
        return re.sub(r"\b(image|text)_ids", r"val_\g<0>", str(message))

    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *rest: show(f"--val: {renamed(message)}", *rest)
        try:
            yield
        except ValueError as error:
            raise ValueError(renamed(error)) from None


def _bank(args: SimpleNamespace, sim: Similarity, side: int) -> Tensor | None:
    """Return the bank of images (side 0) or texts (1), checked before anything is computed."""
    source = args.bank_texts if side else args.bank_images
    if source is None:
        if sim.shape[side] == 1:
            one = "text" if side else "image"
            raise ValueError(
                f"a single {one} is compared with no other, so that re-ranking cannot rank for it: "
                f"--bank-{one}s has others"
            )
        return None
    (bank,) = _matrices(args, [source])
    if sim.embeddings is None and side:  # more columns of the matrix, whose rows are images
        if args.image_ids is None and args.relevant is None:
            bank = fold_repeated(bank)
        size, expected, got = sim.shape[0], "({}, B)", bank.shape[0]
    else:
        size = sim.shape[1] if sim.embeddings is None else sim.embeddings[0].shape[1]
        expected, got = "(B, {})", bank.shape[1]
    if got != size:
        raise ValueError(
            f"{source}: expected {expected.format(size)}, got shape {tuple(bank.shape)}"
        )
    return bank


def _names(source: Source | None, item: str, size: int) -> list[str]:
    """Return the names of images or of texts: the lines of a file, or by default their numbers."""
    if source is None:
        return [f"{item} {i}" for i in range(size)]
    lines = files.read_lines(source.path)
    if len(lines) != size:
        raise ValueError(
            f"{source}: expected a line for each of the {size} {item}s, got {len(lines)}"
        )
    return lines


# ------------------------------------------------------------------------------------------ results


def _entry(args: SimpleNamespace, comparison: SystemComparison) -> Entry:
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


def _print_protocol(comparison: SystemComparison, chosen: Entry) -> None:
    """Print the figures of MSCOCO's protocols without and with the chosen re-ranker."""
    entries = [comparison.entries[0]]
    if chosen.reranker is not None:
        entries.append(chosen)
    assert comparison.sim is not None
    for entry in entries:
        print(f"\n{entry.name}")
        _print(protocol_table(coco_protocol(comparison.sim, reranker=entry.reranker)))


def _write_results(
    args: SimpleNamespace, comparison: SystemComparison, entry: Entry, facts: Mapping[str, str]
) -> None:
    """Write the results of an entry."""
    sim = comparison.sim
    assert sim is not None
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
            np.savez(file, i2t=i2t.numpy(), t2i=t2i.numpy(), transductive=np.array(flags))
    if args.queries:
        _write_csv(args.queries, entry.results.to_frame(), facts)


def _write_table(
    args: SimpleNamespace,
    comparison: SystemComparison,
    table: Table,
    html: Callable[[], str],
    facts: Mapping[str, str],
) -> None:
    """Write the table of all entries in LaTeX, the page that it is in, and all metrics as CSV."""
    if args.latex:
        comments = "".join(f"% {name}: {' '.join(fact.split())}\n" for name, fact in facts.items())
        with files.written(args.latex) as file:
            file.write(comments + latex(table))
    if args.report:
        with files.written(args.report) as file:
            file.write(html())
    if args.metrics:
        rows = []
        for entry in comparison.entries:
            columns = {"method": entry.name, "hubs": entry.hubs}
            rows.append(columns | entry.results.metrics(args.ks))
        _write_csv(args.metrics, pd.DataFrame(rows), facts)


def _write_csv(path: Path, rows: pd.DataFrame, facts: Mapping[str, str]) -> None:
    """Write rows, behind each of them what they were computed with and when."""
    with files.written(path) as file:
        rows.assign(**facts).to_csv(file, index=False)
