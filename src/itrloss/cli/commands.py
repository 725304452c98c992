"""The commands ``itrloss rerank``, ``itrloss eval`` and ``itrloss compare``."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import files
from ..checks import EMBEDDINGS, Names, did_you_mean, one_of, require_finite
from ..checks.warnings import (
    SuspiciousInputWarning,
    UnfitScalesWarning,
    warn_of_guess,
)
from ..files import Source
from ..metrics import (
    Judgements,
    RetrievalResults,
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
from . import tables
from .comparison import (
    CALIBRATED,
    PLAIN,
    Entry,
    RerankerComparison,
    compare_models,
    compare_rerankers,
    protocol_table,
)
from .options import parser
from .pages import check as check_report
from .report import models_page, page
from .tables import Table, require_pandas

# Arguments of the library, which the command line has as options; not as parts of a path.
_ARGUMENTS = re.compile(
    r"(?<![\w/.-])((?:val_)?(?:image|text)_ids|(?:folds|validation)(?=:))(?![./-]?\w)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    for stream in (sys.stdout, sys.stderr):
        # a terminal without Greek letters and arrows gets question marks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if arguments is None:  # a process of its own, which removes temporary files when it is ended
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args, others = parser().parse_known_args(arguments)
    if others:
        _refuse(args, others)
    try:
        with _shown_warnings(args):
            require_pandas()
            _RUN[args.command](args)
        sys.stdout.flush()  # a closed pipe is noticed here, not at the interpreter's exit
    except FileNotFoundError as error:
        _say(args, f"{error.filename}: there is no such file{_near(error.filename)}")
        return 2
    except BrokenPipeError:
        # a reader such as head has read enough; the interpreter's last flush must not fail, too
        with contextlib.suppress(io.UnsupportedOperation):  # a stream that is no file
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1  # what came after was not printed, and may not be written
    except (ImportError, OSError, ValueError) as error:
        _say(args, error)
        return 2
    except KeyboardInterrupt:
        _say(args, "interrupted")
        return 130
    return 0


# ----------------------------------------------------------------------------------------- messages


def _say(args: argparse.Namespace, message: object) -> None:
    """Print a message for standard error, with options in place of arguments."""
    print(f"itrloss {args.command}: {_in_words_of_options(message)}", file=sys.stderr)


@contextlib.contextmanager
def _shown_warnings(args: argparse.Namespace) -> Iterator[None]:
    """Return a context that prints each warning once, and keeps those of the input in
    ``args.warnings``, for tables.
    """
    args.warnings = []
    printed = set()

    def show(message: object, category: type[Warning], *_: object, **__: object) -> None:
        """Print a warning that was not printed before."""
        if str(message) in printed:  # every method finds the same of the same scores
            return
        printed.add(str(message))
        _say(args, message)
        if issubclass(category, SuspiciousInputWarning):
            args.warnings.append(f"Warning: {_in_words_of_options(message).removesuffix('.')}.")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("ignore", UnfitScalesWarning)
        warnings.showwarning = show
        yield


def _in_words_of_options(message: object) -> str:
    """Return a message of the library with options in place of arguments."""
    return _ARGUMENTS.sub(lambda argument: _option(argument[0]), str(message))


def _option(argument: str) -> str:
    """Return the option that stands for an argument of the library."""
    return "--val" if argument == "validation" else "--" + argument.replace("_", "-")


def _refuse(args: argparse.Namespace, others: Sequence[str]) -> None:
    """Exit with an error for arguments that a command does not have."""
    given = next((x for x in others if x.startswith("-")), "")
    hint = did_you_mean(given.split("=")[0], map(_option, vars(args)))
    if not given:
        hint = "; embeddings are for itrloss eval, scores of several models for itrloss compare"
    args.parser.error(f"unrecognized arguments: {' '.join(others)}{hint}")


def _near(path: str | bytes) -> str:
    """Return a hint at the file that was probably meant, of those in a missing one's folder."""
    missing = Path(os.fsdecode(path))
    folder = missing.parent
    if not folder.is_dir():
        return f"; there is no directory {folder}"
    return did_you_mean(missing.name, os.listdir(folder))


def _text(table: Table) -> str:
    """Return a table for standard output; on a terminal, in its width."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return tables.text(table, width)


def _show_progress(text: str) -> None:
    """Replace the line of progress on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------- commands


def _run(args: argparse.Namespace) -> None:
    """Compare re-rankers on the scores or embeddings of one model."""
    outputs = _outputs(args)
    _check_choice(args)
    sources = [args.scores] if args.command == "rerank" else [args.images, args.texts]
    rules = _rules(args)
    sim = _similarity(args, sources, _matrices(args, sources))
    validation = _validation(args)
    banks = (_bank(args, sim, 0), _bank(args, sim, 1))
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
    printed = comparison.table(args.ks, titles=False, timed=True, notes=args.warnings)
    print(_text(printed))
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
    table = comparison.table(args.ks, notes=args.warnings)
    systems = []
    for one in comparison.entries:
        systems.append(({"method": one.name, "hubs": one.hubs}, one.results))
    _write_table(args, table, partial(page, comparison, table, entry, title, names), systems)
    if outputs:
        by = PLAIN if entry.name == PLAIN else f"{entry.name}, hubs of {entry.looks_at}"
        print(f"written ({by}): {', '.join(map(str, outputs))}")


def _run_models(args: argparse.Namespace) -> None:
    """Compare the scores of several models, which are read one after the other."""
    outputs = _outputs(args)
    names = _model_names(args)
    for name in args.transductive:
        one_of("--transductive", name, *names)
    rules = _rules(args)
    if args.report:
        check_report()
    results = {}
    marked = [*args.transductive]
    about = ""
    shape = None
    for name, source in zip(names, args.scores, strict=True):
        _show_progress(f"{source} …")
        scores, transductive = _model_scores(args, source)
        sim = scores[0] if isinstance(scores, tuple) else scores
        if shape is None:
            shape = sim.shape
            about = _about(args, sim) + _parts(args)
            _check_folds(args, sim, ())
        if sim.shape != shape:
            raise ValueError(
                f"{source}: expected shape {shape} like {args.scores[0]}, got {sim.shape}"
            )
        results[name] = retrieval_results(scores, folds=args.folds, **rules)
        if transductive:
            marked.append(name)
    _show_progress("")
    comparison = compare_models(results, transductive=marked, samples=args.samples)
    table = comparison.table(args.ks, notes=args.warnings)
    print(f"{about}\n{_text(table)}")
    title = ", ".join(names)
    html = partial(models_page, comparison.rows, table, title, f"{about}. Recalls in percent.")
    _write_table(args, table, html, [({"method": name}, x) for name, x in results.items()])
    if outputs:
        print(f"written: {', '.join(map(str, outputs))}")


def _model_scores(
    args: argparse.Namespace, source: Source
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


def _model_names(args: argparse.Namespace) -> list[str]:
    """Return the names of the models: those given, or the files' without what all have."""
    sources = args.scores
    if len(sources) < 2:
        raise ValueError(f"{sources[0]}: expected at least two files to compare, got one")
    names = args.names or _short_names(sources)
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
    names = [path.relative_to(folder).as_posix() for path in paths]
    if len(set(names)) < len(names):  # where only suffixes differ, or arrays in a file
        return [str(source) for source in sources]
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


# ------------------------------------------------------------------------------------------- checks


def _outputs(args: argparse.Namespace) -> list[Path]:
    """Return what is to be written, after a check that no file has two uses."""
    uses = {}
    outputs = []
    for name, value in vars(args).items():
        for x in value if isinstance(value, list) else [value]:
            if isinstance(x, Source):
                uses[os.path.realpath(x.path)] = name.replace("_", "-")
    for name, path in vars(args).items():
        if isinstance(path, Path):
            place = os.path.realpath(path / "i2t.run" if name == "trec" else path)
            if place in uses:
                raise ValueError(
                    f"{path}: expected a file of its own for a result, got that of {uses[place]}"
                )
            uses[place] = name
            outputs.append(path)
    return outputs


def _check_choice(args: argparse.Namespace) -> None:
    """Raise a ValueError for a method of --write that is not tried, or for names of queries that
    are not shown.
    """
    for name in ("image_names", "text_names"):
        if vars(args)[name] is not None and args.report is None:
            raise ValueError(f"{_option(name)}: expected --report, too")
    if args.write is not None:
        calibrated = [CALIBRATED] if args.val else []
        one_of("--write", args.write, PLAIN, *args.methods, *calibrated)


def _check_folds(args: argparse.Namespace, sim: Similarity, banks: Sequence[Tensor | None]) -> None:
    """Raise a ValueError for folds that do not go with the input or with other options."""
    n, m = sim.shape
    if args.folds == 1:
        return
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


def _matrices(args: argparse.Namespace, sources: Sequence[Source]) -> list[Tensor]:
    """Return the matrices in files, with images as rows."""
    matrices = []
    for source in sources:
        matrix = files.read_matrix(*source)
        require_finite(str(source), matrix)
        matrices.append(matrix.T if args.transpose else matrix)
    return matrices


def _ids(
    args: argparse.Namespace, val: str, are_right: bool, shape: Sequence[int]
) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    """Return the ids of images and of texts out of files; None for no files.

    ``val`` is ``"val_"`` for those of held-out pairs. ``are_right``: they say which pairs are.
    ``shape`` is the number of images and of texts.
    """
    sources = [vars(args)[f"{val}{side}_ids"] for side in ("image", "text")]
    if sources == [None, None]:
        return None, None
    if None in sources:
        raise ValueError("image_ids, text_ids: expected both or neither")
    image_ids, text_ids = (files.read_ids(*source) for source in sources)
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


def _rules(args: argparse.Namespace) -> Rules:
    """Return the arguments of ``retrieval_results`` on who is right and who is ranked."""
    rules: Rules = {}
    for name in ("relevant", "exclude", "candidates"):
        source = vars(args)[name]
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


def _similarity(
    args: argparse.Namespace, sources: Sequence[Source], matrices: list[Tensor], val: str = ""
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


def _validation(args: argparse.Namespace) -> Similarity | None:
    """Return the held-out pairs; errors and warnings name their options."""
    with _of_held_out_pairs():
        if args.val is not None:
            return _similarity(args, args.val, _matrices(args, args.val), "val_")
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


def _bank(args: argparse.Namespace, sim: Similarity, side: int) -> Tensor | None:
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


def _print_protocol(comparison: RerankerComparison, chosen: Entry) -> None:
    """Print the figures of MSCOCO's protocols without and with the chosen re-ranker."""
    entries = [comparison.entries[0]]
    if chosen.reranker is not None:
        entries.append(chosen)
    for entry in entries:
        figures = coco_protocol(comparison.sim, reranker=entry.reranker)
        print(f"\n{entry.name}\n{protocol_table(figures)}")


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
            np.savez(file, i2t=i2t.numpy(), t2i=t2i.numpy(), transductive=np.array(flags))
    if args.queries:
        with files.written(args.queries) as file:
            entry.results.write(file)


def _write_table(
    args: argparse.Namespace,
    table: Table,
    page: Callable[[], str],
    systems: Iterable[tuple[Mapping[str, str], RetrievalResults]],  # the first columns, the results
) -> None:
    """Write the table of all methods in LaTeX, the page that it is in, and all metrics as CSV."""
    for path, text in ((args.latex, partial(tables.latex, table)), (args.report, page)):
        if path:
            with files.written(path) as file:
                file.write(text())
    if args.metrics:
        rows = [{**columns, **results.metrics(args.ks)} for columns, results in systems]
        with files.written(args.metrics) as file:
            require_pandas().DataFrame(rows).to_csv(file, index=False)


_RUN = {"rerank": _run, "eval": _run, "compare": _run_models}
