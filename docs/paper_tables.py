"""A Sphinx extension: the tables and figures of the papers, from their registry and from records.

A record is what ``python -m examples.retrieval.paper`` wrote, in ``docs/papers``: a CSV file of
results, a PNG file of a figure. Results on Flickr8k have ``_flickr8k`` behind the table's name.
``docs/papers/recorded.csv`` has the commit and settings of each.
"""

import csv
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from records import csv_table

from examples.retrieval.paper_report import heading, result_lines
from examples.retrieval.paper_tables import PAPERS, TABLES, load_paper

RECORDS = Path(__file__).resolve().parent / "papers"
RECORDED = RECORDS / "recorded.csv"


class PaperTables(Directive):
    """``.. paper-tables::`` has a section for each paper, and in it one for each table and
    figure.
    """

    def run(self):
        lines = []
        for name in PAPERS:
            paper = load_paper(name)
            lines += [
                *title(paper.title, "-"),
                f"What it prints was measured with {paper.needs}: not run here.",
                "",
            ]
            for number, table in paper.tables.items():
                lines += section(name, number, table)
        environment = self.state.document.settings.env
        for file in (Path(__file__), TABLES, *sorted(RECORDS.iterdir())):
            environment.note_dependency(str(file))
        node = nodes.section()
        source = StringList(lines, source=__file__)
        self.state.nested_parse(source, self.content_offset, node, match_titles=True)
        return node.children


def title(text, mark):
    return ["", text, mark * len(text), ""]


def section(paper, number, table):
    """The lines of a table or figure: its command, what it needs, and all figures."""
    lines = title(f"{paper.upper()}, {heading(number)}: {table.title}", "~")
    lines += [f"``python -m examples.retrieval.paper {paper}:{number}``", ""]
    if table.note:
        lines += [table.note, ""]
    record = RECORDS / f"{paper}_{number}.csv"
    picture = record.with_suffix(".png")
    lines += recorded_lines(record.stem)
    if record.exists():
        lines += csv_table(plain(read(record)))
    elif table.printed:
        lines += csv_table(plain(result_lines(table, {})))
    flickr = record.with_stem(f"{record.stem}_flickr8k")
    if flickr.exists():
        lines += ["On Flickr8k:", "", *recorded_lines(flickr.stem)]
        lines += csv_table(plain(read(flickr)))
    if picture.exists():
        alternative = f"{heading(number)} of {paper.upper()}, on the scenes: {table.title}"
        lines += [f".. image:: papers/{picture.name}", f"   :alt: {alternative}", ""]
    if table.kind == "results":
        lines += ["The command writes a page of HTML, with pictures, which is not stored here.", ""]
    elif not (record.exists() or picture.exists()):
        needs = f"; the paper's own figures need {table.needs}" if table.needs else ""
        lines += [f"Not run here, not even on the scenes{needs}.", ""]
    return lines


def recorded_lines(name):
    """Say from which commit a record is, and with what settings; of no record, nothing."""
    with RECORDED.open(encoding="utf-8", newline="") as opened:
        known = {row["record"]: row for row in csv.DictReader(opened)}
    if name not in known:
        return []
    settings = known[name]["settings"]
    said = f", with ``{settings}``" if settings else ""
    return [f"Recorded at commit ``{known[name]['commit']}``{said}.", ""]


def read(file):
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.reader(opened))


def plain(table):
    """Return rows in which a row's name and what it is are one cell, which leaves room for the
    figures; a star in a name is no markup, and R@10 no address.
    """
    rows = [[": ".join(filter(None, (name, what))), *texts] for name, what, *texts in table]
    rows[0][1] = "figures"
    return [[text.replace("*", r"\*").replace("@", r"\@") for text in row] for row in rows]


def setup(app):
    """Register the extension."""
    app.add_directive("paper-tables", PaperTables)
    return {"parallel_read_safe": True}
