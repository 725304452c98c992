"""The options of the commands, in the groups in which ``--help`` shows them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, TypeVar

import typer

from ..checks import one_of
from ..files import Source, as_source, check_writable
from ..metrics.results import RECALLS
from .comparison import METHODS

T = TypeVar("T")

# ------------------------------------------------------------------------------------------- values


def _parser(convert: Callable[[str], T]) -> Callable[[str], T]:
    """Return a conversion whose errors the command line shows."""

    def parse(text: str) -> T:
        """Return the value of a text."""
        try:
            return convert(text)
        except (OSError, ValueError) as error:
            raise typer.BadParameter(str(error)) from None

    return parse


def _methods(text: str) -> list[str]:
    """Return names of methods."""
    names = text.split(",")
    for name in names:
        one_of("method", name, *METHODS)
    return names


def _numbers(text: str) -> list[int]:
    """Return positive integers."""
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"expected integers of at least 1, got {text!r}")
    return [int(word) for word in words]


def _output(text: str, suffix: str) -> Path:
    """Return a path, unless nothing can be written there or its suffix is another format's."""
    path = Path(text)
    is_device = path.exists() and not path.is_file() and not path.is_dir()
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no directory {path.parent}")
    if path.is_dir():
        raise ValueError(f"{path}: expected a file to write, got a directory")
    if is_device and suffix == ".npz":  # archives need to seek
        raise ValueError(f"{path}: expected a file to write, got a device or a pipe")
    if path.suffix.lower() != suffix and not is_device:
        raise ValueError(f"{path}: expected a file named *{suffix}")
    if not is_device:
        check_writable(path)
    return path


def _folder(text: str) -> Path:
    """Return the path of a folder, which is made if need be, unless it cannot be made."""
    path = Path(text)
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no directory {path.parent}")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: expected a directory to write into, got a file")
    check_writable(path / "i2t.run" if path.exists() else path)
    return path


# ------------------------------------------------------------------------------------------ options


def _option(group: str, convert: Callable[[str], object], metavar: str, about: str):
    """Return the settings of an option."""
    return typer.Option(parser=_parser(convert), metavar=metavar, help=about, rich_help_panel=group)


def _written(group: str, suffix: str, about: str):
    """Return the settings of a file to write."""
    return _option(group, partial(_output, suffix=suffix), f"FILE{suffix}", about)


_HELD_OUT = "Held-out pairs and banks"
_TEST = "The test set"
_METHODS = "Methods"
_TABLE = "The table"
_ONE = "The results of one method"


def _array(metavar: str):
    """Return the settings of the file that a command is about."""
    about = "a file, or FILE:NAME for one of its arrays"
    return typer.Argument(parser=as_source, metavar=metavar, help=about)


Array: TypeAlias = Annotated[Source, _array("SCORES")]
Images: TypeAlias = Annotated[Source, _array("IMAGES")]
Texts: TypeAlias = Annotated[Source, _array("TEXTS")]
Arrays: TypeAlias = Annotated[list[Source], _array("SCORES...")]
Read: TypeAlias = Source | None
Write: TypeAlias = Path | None
Words: TypeAlias = str | None

Transpose: TypeAlias = Annotated[
    bool, typer.Option("--transpose", rich_help_panel=_TEST, help="rows are texts")
]
ImageIds: TypeAlias = Annotated[
    Read, _option(_TEST, as_source, "FILE", "ids of images, equal where image and text match")
]
TextIds: TypeAlias = Annotated[
    Read,
    _option(_TEST, as_source, "FILE", "ids of texts; alone, they are the numbers of the images"),
]
Relevant: TypeAlias = Annotated[
    Read,
    _option(_TEST, as_source, "FILE", "right pairs in place of ids: image, text and perhaps grade"),
]
Exclude: TypeAlias = Annotated[Read, _option(_TEST, as_source, "FILE", "pairs that are not ranked")]
Candidates: TypeAlias = Annotated[
    Read, _option(_TEST, as_source, "FILE", "the only pairs that are ranked")
]
Folds: TypeAlias = Annotated[
    int,
    typer.Option(min=1, rich_help_panel=_TEST, help="parts of images; 5: MSCOCO's 5-fold 1K"),
]
Scores: TypeAlias = Annotated[
    Read, _option(_HELD_OUT, as_source, "FILE", "held-out scores, which calibrate fast")
]
Pair: TypeAlias = Annotated[
    tuple[str, str] | None,
    typer.Option(
        metavar="IMAGES TEXTS",
        rich_help_panel=_HELD_OUT,
        help="held-out embeddings, which calibrate fast",
    ),
]
ValImageIds: TypeAlias = Annotated[
    Read, _option(_HELD_OUT, as_source, "FILE", "ids of the images of --val")
]
ValTextIds: TypeAlias = Annotated[
    Read, _option(_HELD_OUT, as_source, "FILE", "ids of the texts of --val")
]
BankImages: TypeAlias = Annotated[
    Read, _option(_HELD_OUT, as_source, "FILE", "other images, or their scores (B, n_texts)")
]
BankTexts: TypeAlias = Annotated[
    Read, _option(_HELD_OUT, as_source, "FILE", "other texts, or their scores (n_images, B)")
]
MethodNames: TypeAlias = Annotated[
    str,
    typer.Option(
        parser=_parser(_methods),
        metavar="NAME,…",
        rich_help_panel=_METHODS,
        show_default=False,
        help=f"separated by commas; default: all, which are {', '.join(METHODS)}",
    ),
]
Scales: TypeAlias = Annotated[
    tuple[float, float],
    typer.Option(metavar="γ γ", rich_help_panel=_METHODS, help="scales of Fast Re-ranking"),
]
Protocol: TypeAlias = Annotated[
    Literal["coco"] | None,
    typer.Option(rich_help_panel=_METHODS, help="MSCOCO's 1K, 5K, CxC and ECCV Caption"),
]
Ks: TypeAlias = Annotated[
    str, _option(_TABLE, _numbers, "K,…", "of R@K, recall@K and nDCG@K, separated by commas")
]
Samples: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, rich_help_panel=_TABLE, help="of the bootstrap; default: 2000 a test"),
]
Metrics: TypeAlias = Annotated[Write, _written(_TABLE, ".csv", "all metrics of all rows")]
Latex: TypeAlias = Annotated[Write, _written(_TABLE, ".tex", "the table in LaTeX")]
Report: TypeAlias = Annotated[Write, _written(_TABLE, ".html", "a page with the table and charts")]
Names: TypeAlias = Annotated[
    Words, typer.Option(metavar="NAME,…", rich_help_panel=_TABLE, help="of the models")
]
Transductive: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="NAME,…", rich_help_panel=_TABLE, help="models that look at other test queries"
    ),
]
WriteOf: TypeAlias = Annotated[
    Words,
    typer.Option(
        "--write", metavar="NAME", rich_help_panel=_ONE, help="whose; default: the first method's"
    ),
]
Out: TypeAlias = Annotated[Write, _written(_ONE, ".npz", "its scores i2t, t2i (n_images, n_texts)")]
Rankings: TypeAlias = Annotated[Write, _written(_ONE, ".npz", "its --top best candidates")]
Queries: TypeAlias = Annotated[Write, _written(_ONE, ".csv", "ranks and precisions of each query")]
Trec: TypeAlias = Annotated[
    Write, _option(_ONE, _folder, "FOLDER", "its --top best candidates as run and qrels files")
]
Top: TypeAlias = Annotated[
    int, typer.Option(min=1, rich_help_panel=_ONE, help="how many for --rankings and --trec")
]
ImageNames: TypeAlias = Annotated[
    Read, _option(_ONE, as_source, "FILE", "a line an image, for the report")
]
TextNames: TypeAlias = Annotated[
    Read, _option(_ONE, as_source, "FILE", "a line a text, for the report: the captions")
]

ALL_METHODS = ",".join(METHODS)
ALL_KS = ",".join(map(str, RECALLS))
