"""Self-contained HTML pages without scripts, for the command line and the example trainer.

A page is a list of blocks for the template ``page.html``, which escapes all text:

- a string: a paragraph; ``{"note": text}``: a paragraph in small print; ``{"facts": {name:
  text}}``: a definition list;
- ``{"title": text, "blocks": [...]}``: a section;
- ``{"table": rows, "columns": row, "groups": [(title, columns)]}``: a row is (texts, figures), two
  lists of cells. A cell is a string, or ``{"text": ...}`` with ``below`` (small lines), ``rows``
  (its row span), and ``strong``;
- ``{"html": text}``: a table as pandas writes it, which is not escaped again;
- ``{"figures": [(chart, caption)], "width": rem}``: side by side where each has at least this
  width;
- ``{"cards": [{"title", "note", "query", "answers": [(title, items)]}]}``: queries with their
  answers, each ``{"text": ...}`` with ``picture``, a data URI, and ``right``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

Block = str | Mapping[str, object]


def render(title: str, blocks: Sequence[Block]) -> str:
    """Return an HTML page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True
    )
    return environment.get_template("page.html").render(title=title, blocks=blocks)


def number(value: float, form: str = ",.1f") -> str:
    """Return the formatted value with a typographic minus sign; a rounded zero has no sign."""
    text = f"{value:{form}}".replace("-", "−")
    return text if text.strip("−+0.") else text.lstrip("−")
