"""The snippets of the documentation's pages that run with what a test has."""

import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^\.\. (?:testcode::|code-block:: python)\n\n((?: {3}.*\n|\n)+)", re.M)


def read(path: str | Path) -> str:
    """The text of a file of the project."""
    return (DOCS.parent / path).read_text("utf-8")


def snippet(page: str, text: str) -> str:
    """The one block of code of a page that has a text in it."""
    blocks = BLOCK.findall(read(f"docs/{page}"))
    (found,) = [block for block in blocks if text in block]
    return textwrap.dedent(found)
