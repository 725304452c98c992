"""A Sphinx extension: the table of all losses is made of the pages in ``losses/``, and the
reference has an entry for each loss, so that a new one changes neither file.

``python docs/listing.py`` writes the table in Markdown to ``LOSSES.md``, for readers on a code
host.
"""

import re
from pathlib import Path

from checks import parsed
from docutils.parsers.rst import Directive
from torch import nn

import itrloss

DOCS = Path(__file__).resolve().parent
# A row as pages write it: the names, an empty line, and what they are, indented.
SUMMARY = re.compile(r"^\.\. summary:: (.+)\n\n((?: {3}.+\n)+)", re.M)


class Summary(Directive):
    """``.. summary:: NAMES`` on a page of ``losses/``: its content says what they are.

    It is a row of the table of all losses. The page itself shows nothing.
    """

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self):
        return []


class SummaryTable(Directive):
    """``.. summary-table:: TITLE`` has the rows of all pages' ``summary``, and its own content."""

    required_arguments = 1
    final_argument_whitespace = True
    has_content = True

    def run(self):
        lines = [
            f".. list-table:: {self.arguments[0]}",
            "   :header-rows: 1",
            "   :widths: 38 62",
            "",
            "   * - name",
            "     - what it is",
        ]
        environment = self.state.document.settings.env
        for path in loss_pages():
            environment.note_dependency(str(path))
        for path, names, text in summaries():
            lines.append(f"   * - :doc:`{names} <losses/{path.stem}>`")
            lines.append(f"     - {text}")
        lines += [f"   {line}" for line in self.content]
        return parsed(self, lines)


def loss_pages():
    """Return the pages of ``losses/`` in the order of the navigation, which lists some of them."""
    index = (DOCS / "index.rst").read_text(encoding="utf-8")
    first = re.findall(r"^   losses/(\w+)$", index, re.M)
    others = sorted({path.stem for path in DOCS.glob("losses/*.rst")} - set(first))
    return [DOCS / "losses" / f"{name}.rst" for name in [*first, *others]]


def summaries():
    """Yield the page, the names and the summary of each row of the table."""
    for path in loss_pages():
        for names, text in SUMMARY.findall(path.read_text(encoding="utf-8")):
            yield path, names, " ".join(text.split())


def markdown():
    """Return the table in Markdown."""
    lines = ["# Losses", ""]
    lines += ["Made of the pages in `docs/losses` by `python docs/listing.py`.", ""]
    lines += ["| name | what it is |", "|---|---|"]
    for path, names, text in summaries():
        plain = re.sub(r":\w+:`([^`<]+?)(?: <[^>]*>)?`", r"\1", text).replace("``", "`")
        lines.append(f"| [{names}](docs/losses/{path.name}) | {plain} |")
    return "\n".join(lines) + "\n"


class OtherLosses(Directive):
    """``.. other-losses::`` documents the public losses that no page ``api_…`` names."""

    def run(self):
        named = set()
        for path in DOCS.glob("api_*.rst"):
            page = path.read_text(encoding="utf-8")
            named.update(re.findall(r"^\.\. autoclass:: (\w+)", page, re.M))
        lines = []
        for name in itrloss.losses.__all__:
            kind = vars(itrloss.losses)[name]
            if name in named or not issubclass(kind, nn.Module):
                continue
            lines += [f".. autoclass:: itrloss.{name}"]
            if "forward" in vars(kind):
                lines += ["   :members: forward"]
            lines += [""]
        return parsed(self, lines)


def setup(app):
    """Register the extension."""
    app.add_directive("summary", Summary)
    app.add_directive("summary-table", SummaryTable)
    app.add_directive("other-losses", OtherLosses)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    (DOCS.parent / "LOSSES.md").write_text(markdown(), encoding="utf-8")
