"""Calls of the command line, its input, and a parser of its reports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from html.parser import HTMLParser

import numpy as np
import pytest

from itrloss.cli import main
from support import transcripts

N, C, D = 12, 5, 8
FAST = "rerank", "sims.npy", "--methods", "fast"


def pairs(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of images and of five captions per image, with hubs."""
    generator = np.random.default_rng(seed)
    images = generator.normal(size=(N, D))
    texts = (
        images.repeat(C, 0) + 1.2 * generator.normal(size=(N * C, D)) + generator.random((N * C, 1))
    )
    return images.astype(np.float32), texts.astype(np.float32)


def scores(seed: int = 0) -> np.ndarray:
    images, texts = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in pairs(seed))
    return images @ texts.T


def run(*arguments: object) -> int:
    return main([str(x) for x in arguments])


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the error of a command that fails: one line, and perhaps where options are explained
    or what was noticed before.
    """
    capsys.readouterr()
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") <= 2, said
    return said


def replay(name: str, **programs: Callable[..., str]) -> None:
    """Compare what the commands of a transcript print; others may show what they wrote."""
    transcripts.replay(name, itrloss=partial(transcripts.printed, main), **programs)


def read_page(html: str) -> str:
    """Return the text of a page whose elements are all closed."""
    parser = Page()
    parser.feed(html)
    assert parser.open == []
    return parser.text


class Page(HTMLParser):
    """Parser of a page's text; it checks that elements are closed in the right order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in ("meta", "img"):
            self.open.append(tag)
        for name, value in attrs:  # the page loads nothing
            if name in ("src", "srcset", "href", "action"):
                assert value.startswith("data:image/jpeg;base64,"), value

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
