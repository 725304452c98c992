"""The options of the commands: fields of dataclasses, which typer takes for commands.

``--help`` shows them in groups. Annotations are no strings here, which typer would evaluate again
for each command and each call.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from ..files import Source, as_source
from .comparison import METHODS

_TEST = "The test set"
_HELD_OUT = "Held-out pairs and banks"
_TABLE = "The table"
_ONE = "The results of the method to take, or of the first"


def _option(group: str, metavar: str, about: str, **more: Any):
    """Return the settings of an option; ``more`` are typer's."""
    return typer.Option(metavar=metavar, rich_help_panel=group, help=about, **more)


def _file(group: str, about: str, metavar: str = "FILE"):
    """Return the settings of a file to read."""
    return _option(group, metavar, about, parser=as_source)


def _array(metavar: str):
    """Return the settings of a file that a command is about."""
    about = "a file, or FILE:NAME for one of its arrays"
    return typer.Argument(parser=as_source, metavar=metavar, help=about)


_ALL = ",".join(METHODS)
_WHICH = f"separated by commas; default: all, which are {', '.join(METHODS)}"
_TRANSPOSE = typer.Option("--transpose", rich_help_panel=_TEST, help="rows are texts")
Read = Source | None
Write = Path | None


@dataclass(kw_only=True)
class Options:
    """The options of all commands."""

    image_ids: Annotated[Read, _file(_TEST, "ids of images, equal where a text matches")] = None
    text_ids: Annotated[
        Read, _file(_TEST, "ids of texts; alone, they are the numbers of the images")
    ] = None
    relevant: Annotated[
        Read, _file(_TEST, "right pairs in place of ids: image, text and perhaps grade")
    ] = None
    exclude: Annotated[Read, _file(_TEST, "pairs that are not ranked")] = None
    candidates: Annotated[
        Read, _file(_TEST, "the only pairs that are ranked; other right ones are missed")
    ] = None
    folds: Annotated[int, _option(_TEST, "N", "parts of images; 5: MSCOCO's 5-fold 1K", min=1)] = 1
    ks: Annotated[str, _option(_TABLE, "K,…", "of R@K, recall@K and nDCG@K")] = "1,5,10"
    samples: Annotated[
        int | None, _option(_TABLE, "N", "bootstrap, for all tests; default: 2000 a test", min=1)
    ] = None
    metrics: Annotated[Write, _option(_TABLE, "FILE.csv", "all metrics of all rows")] = None
    latex: Annotated[Write, _option(_TABLE, "FILE.tex", "the table in LaTeX")] = None
    report: Annotated[Write, _option(_TABLE, "FILE.html", "a page with table and charts")] = None


@dataclass(kw_only=True)
class Reranking(Options):
    """The options of re-ranking."""

    val_image_ids: Annotated[Read, _file(_HELD_OUT, "ids of the images of --val")] = None
    val_text_ids: Annotated[Read, _file(_HELD_OUT, "ids of the texts of --val")] = None
    bank_images: Annotated[Read, _file(_HELD_OUT, "other images, or scores (B, n_texts)")] = None
    bank_texts: Annotated[Read, _file(_HELD_OUT, "other texts, or scores (n_images, B)")] = None
    methods: Annotated[str, _option("Methods", "NAME,…", _WHICH, show_default=False)] = _ALL
    out: Annotated[Write, _option(_ONE, "FILE.npz", "its scores i2t and t2i")] = None
    queries: Annotated[Write, _option(_ONE, "FILE.csv", "rank and precision of each query")] = None
    trec: Annotated[Write, _option(_ONE, "FOLDER", "its ten best as run and qrels files")] = None
    image_names: Annotated[Read, _file(_ONE, "a line an image, for the report")] = None
    text_names: Annotated[Read, _file(_ONE, "a line a text, for the report: the captions")] = None


@dataclass(kw_only=True)
class Rerank(Reranking):
    """Re-rank a saved matrix of scores (n_images, n_texts) by every method."""

    scores: Annotated[Source, _array("SCORES")]
    transpose: Annotated[bool, _TRANSPOSE] = False
    val: Annotated[Read, _file(_HELD_OUT, "held-out scores, to choose the method")] = None


@dataclass(kw_only=True)
class Evaluate(Reranking):
    """Re-rank saved embeddings (n_images, D), (n_texts, D) by every method."""

    transpose: ClassVar[bool] = False
    images: Annotated[Source, _array("IMAGES")]
    texts: Annotated[Source, _array("TEXTS")]
    val: Annotated[
        tuple[Source, Source] | None,
        _file(_HELD_OUT, "held-out embeddings, to choose the method", "IMAGES TEXTS"),
    ] = None


@dataclass(kw_only=True)
class Compare(Options):
    """Compare the saved scores of several models with those of the first."""

    scores: Annotated[list[Source], _array("SCORES...")]
    transpose: Annotated[bool, _TRANSPOSE] = False
    names: Annotated[str | None, _option(_TABLE, "NAME,…", "of the models")] = None
    transductive: Annotated[
        str, _option(_TABLE, "NAME,…", "models that look at other test queries")
    ] = ""
