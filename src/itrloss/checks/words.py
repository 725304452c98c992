"""Queries and documents, as retrieval of texts calls what images and texts are here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from .values import unknown_keyword

P = ParamSpec("P")
R = TypeVar("R")
# How names begin, and how ours do.
_BEGINNINGS = {
    "queries": "images",
    "documents": "texts",
    "query_": "image_",
    "document_": "text_",
}


def own_name(word: str) -> str:
    """Return the name of an argument of queries or documents here: ``image_ids`` for
    ``query_ids``; another one as it is.
    """
    for theirs, ours in _BEGINNINGS.items():
        if word.startswith(theirs):
            return word.replace(theirs, ours, 1)
    return word


def in_own_words(
    function: Callable[..., object], words: Mapping[str, object], **own: object
) -> dict[str, Any]:
    """Return the arguments ``own`` of a method, with those ``words`` in their places that call
    images queries, or texts documents.

    Raises:
        TypeError: for words of something else, and for an argument that is there by both names.
    """
    name = f"{type(function.__self__).__name__}.{function.__name__}"  # type: ignore[attr-defined]
    for word, x in words.items():
        ours = own_name(word)
        if ours == word or ours not in own:
            names = [x for x in inspect.signature(function).parameters if x != "words"]
            raise unknown_keyword(name, word, names)
        if own[ours] is not None:
            raise TypeError(f"{name}: expected either {word} or {ours}, got both")
        own[ours] = x
    return own


def takes_queries(function: Callable[P, R]) -> Callable[P, R]:
    """Have a function take its arguments of images and texts also by the names of queries and
    documents.

    It is one call more, so that losses have :func:`in_own_words`.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function with its own names."""
        renamed = {own_name(word): x for word, x in kwargs.items()}
        if len(renamed) < len(kwargs):
            raise TypeError(f"{function.__qualname__}: got an argument by two names")
        return function(*args, **renamed)  # type: ignore[arg-type]

    return call
