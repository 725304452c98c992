"""The options of the commands."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn, TypedDict

from .. import __version__
from ..checks import did_you_mean
from ..files import as_source, check_writable
from ..metrics.results import RECALLS
from ..rerank import FastReranker
from .comparison import METHODS


class Settings(TypedDict, total=False):
    """What argparse is told of an argument."""

    type: Callable[[str], object]
    nargs: int | str
    default: object
    metavar: str | tuple[str, ...]
    action: str
    help: str


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    every = _Parser(prog="itrloss", description="Losses and re-rankers for image-text retrieval.")
    every.add_argument("--version", action="version", version=f"itrloss {__version__}")
    commands = every.add_subparsers(dest="command", required=True)
    for name, (about, examples) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # what a command may lack
        command.set_defaults(
            parser=command, transpose=False, protocol=None, out=None, rankings=None
        )
        for title, (names, options) in _OPTIONS.items():
            if name in names:
                group = command.add_argument_group(title)
                for option, settings in options.items():
                    group.add_argument(option, **settings)
    return every


class _Parser(argparse.ArgumentParser):
    """A parser that answers a mistake in two lines."""

    def error(self, message: str) -> NoReturn:
        """Exit with the message, and where the options are explained."""
        self.exit(2, f"{self.prog}: {message}\n{self.prog} --help explains all options\n")


# ------------------------------------------------------------------------------- types of arguments


def _one_of(*allowed: str) -> Callable[[str], str]:
    """Return a type of argument that is one of some words."""

    def word(text: str) -> str:
        """Return an allowed word; raise an error for another."""
        if text in allowed:
            return text
        hint = _separated(text) or did_you_mean(text, allowed)
        listed = ", ".join(allowed)
        raise argparse.ArgumentTypeError(f"expected one of {listed}, got {text!r}{hint}")

    return word


def _whole_number(text: str) -> int:
    """Return the positive integer in a text."""
    if not text.isdecimal() or int(text) == 0:
        message = f"expected an integer of at least 1, got {text!r}{_separated(text)}"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def _separated(text: str) -> str:
    """Return a hint at blanks for several words in one argument; empty for one word."""
    words = text.replace(",", " ").split()
    return f"; separate them by blanks: {' '.join(words)}" if len(words) > 1 else ""


def _output(text: str, suffix: str) -> Path:
    """Return a path, unless nothing can be written there or its suffix is another format's."""
    path = Path(text)
    is_device = path.exists() and not path.is_file() and not path.is_dir()
    wrong = ""
    if not path.parent.is_dir():
        wrong = f"there is no directory {path.parent}"
    elif path.is_dir():
        wrong = "expected a file to write, got a directory"
    elif is_device and suffix == ".npz":  # archives need to seek
        wrong = "expected a file to write, got a device or a pipe"
    elif path.suffix.lower() != suffix and not is_device:
        wrong = f"expected a file named *{suffix}"
    if wrong:
        raise argparse.ArgumentTypeError(f"{path}: {wrong}")
    if not is_device:
        try:
            check_writable(path)
        except OSError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return path


def _folder(text: str) -> Path:
    """Return the path of a folder, which is made if need be, unless it cannot be made."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no directory {path.parent}")
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: expected a directory to write into, got a file")
    return path


# ------------------------------------------------------------------------------------------- tables


def _read(about: str) -> Settings:
    """Return the settings of a file to read."""
    return {"type": as_source, "metavar": "FILE", "help": about}


def _written(suffix: str, about: str) -> Settings:
    """Return the settings of a file to write."""
    return {"type": partial(_output, suffix=suffix), "metavar": f"FILE{suffix}", "help": about}


def _count(metavar: str, about: str, default: int | None = None) -> Settings:
    """Return the settings of a whole number."""
    return {"type": _whole_number, "default": default, "metavar": metavar, "help": about}


def _names(about: str) -> Settings:
    """Return the settings of a list of names."""
    return {"nargs": "+", "metavar": "NAME", "help": about}


def _scales(default: tuple[float, float], names: tuple[str, str]) -> Settings:
    """Return the settings of two scales of Fast Re-ranking."""
    about = "of Fast Re-ranking %(default)s"
    return {"type": float, "nargs": 2, "default": default, "metavar": names, "help": about}


def _held_out(*names: str) -> dict[str, Settings]:
    """Return the option of held-out pairs, in as many files as those of the test set."""
    about = "the same of held-out pairs: calibrate Fast Re-ranking on them"
    return {"--val": {"type": as_source, "nargs": len(names), "metavar": names, "help": about}}


# each command, what it does, and examples
_COMMANDS = {
    "rerank": (
        "re-rank a saved matrix of scores (n_images, n_texts) by every method",
        """\
  itrloss rerank sims.npy
  itrloss rerank sims.npy --methods fast csls --val val_sims.npy --out reranked.npz
  itrloss rerank sims.npy --image-ids images.txt --text-ids captions.csv:image
  itrloss rerank sims.npy --text-names captions.txt --report page.html
""",
    ),
    "eval": (
        "re-rank saved embeddings (n_images, D), (n_texts, D) by every method",
        """\
  itrloss eval images.npy texts.npy
  itrloss eval features.npz:images features.npz:texts --latex table.tex
  itrloss eval images.npy texts.npy --bank-images others.npy --bank-texts captions.npy
""",
    ),
    "compare": (
        "compare the saved scores of several models with those of the first",
        """\
  itrloss compare base_sims.npy ours_sims.npy
  itrloss compare base.npz ours.npz --names InfoNCE DCL --ks 1 5 10 20 --latex table.tex
""",
    ),
}
_ARRAY: Settings = {"type": as_source, "help": "FILE, or FILE:NAME for one of its arrays"}
_FAST = FastReranker()
# groups of options: the commands that have them, and their settings
_OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Settings]]] = {
    "scores": (("rerank",), {"scores": _ARRAY, **_held_out("SCORES")}),
    "embeddings": (
        ("eval",),
        {"images": _ARRAY, "texts": _ARRAY, **_held_out("IMAGES", "TEXTS")},
    ),
    "models": (
        ("compare",),
        {
            "scores": {**_ARRAY, "nargs": "+"},
            "--names": _names("of the models, in place of the files'"),
            "--transductive": {
                **_names("models whose scores depend on the other test queries, for a dagger"),
                "default": (),
            },
        },
    ),
    "layout": (
        ("rerank", "compare"),
        {"--transpose": {"action": "store_true", "help": "the matrices have texts as rows"}},
    ),
    "held-out pairs and banks": (
        ("rerank", "eval"),
        {
            "--val-image-ids": _read("of the images of --val, as --image-ids are of the others"),
            "--val-text-ids": _read("of the texts of --val"),
            "--bank-images": _read(
                "other images: look for hubs in their embeddings (B, D), or in their scores "
                "(B, n_texts), not in the test queries"
            ),
            "--bank-texts": _read("other texts: their embeddings, or their scores (n_images, B)"),
        },
    ),
    "the test set": (
        ("rerank", "eval", "compare"),
        {
            "--image-ids": _read(
                "integers or names, equal where image and text match; a line each in .txt"
            ),
            "--text-ids": _read("default: as many consecutive texts an image as there are"),
            "--relevant": _read(
                "the right pairs, in place of ids: an image and a text a line, from 0, and perhaps "
                "a grade"
            ),
            "--exclude": _read("pairs that are not ranked"),
            "--candidates": _read("the only pairs that are ranked"),
            "--folds": _count(
                "N", "retrieve within each Nth of the images; 5: MSCOCO's 5-fold 1K", 1
            ),
        },
    ),
    "methods": (
        ("rerank", "eval"),
        {
            "--methods": {
                "nargs": "+",
                "type": _one_of(*METHODS),
                "default": tuple(METHODS),
                "metavar": "METHOD",
                "help": ", ".join(METHODS),
            },
            "--i2t": _scales(_FAST.i2t, ("γ1", "γ2")),
            "--t2i": _scales(_FAST.t2i, ("λ1", "λ2")),
            "--protocol": {
                "type": _one_of("coco"),
                "metavar": "{coco}",
                "help": "MSCOCO's 1K, 5K, CxC and ECCV Caption, before and after re-ranking",
            },
        },
    ),
    "the table": (
        ("rerank", "eval", "compare"),
        {
            "--ks": {
                **_count("K", "of R@K, recall@K and nDCG@K (1 5 10)"),
                "nargs": "+",
                "default": RECALLS,
            },
            "--samples": _count(
                "N", "of the bootstrap (2000 for each test, so that p can be below 0.001)"
            ),
            "--metrics": _written(".csv", "all metrics of all methods"),
            "--latex": _written(".tex", "the table of all methods in LaTeX"),
            "--report": _written(".html", "a page with the table and charts"),
        },
    ),
    "the results of one method": (
        ("rerank", "eval"),
        {
            "--write": {
                "metavar": "METHOD",
                "help": "whose results go into files; default: the first of --methods, calibrated "
                "by --val",
            },
            "--out": _written(".npz", "its scores i2t and t2i, (n_images, n_texts)"),
            "--rankings": _written(
                ".npz", "its best candidates i2t (n_images, k) and t2i (n_texts, k)"
            ),
            "--queries": _written(".csv", "ranks and precisions of every query"),
            "--trec": {
                "type": _folder,
                "metavar": "FOLDER",
                "help": "its --top best candidates, as run and qrels files; made if need be",
            },
            "--top": _count("K", "how many for --rankings and --trec (10)", 10),
            "--image-names": _read("a line an image, for the report"),
            "--text-names": _read("a line a text, for the report: the captions"),
        },
    ),
}
