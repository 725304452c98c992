"""A Sphinx extension: below each table of figures with their ±, the same as a chart.

A table with a column "difference" becomes one of our differences and the printed ones; one with
cells "1.5 (-0.2 to 3.2)", one of its columns of RSUM; one with columns "0 %", "20 %" and so on, one
of RSUM by the share of wrong pairs; any other with a column "RSUM", one of RSUM before and after
re-ranking, which has a column or rows of its own.
"""

import math
import re

from docutils import nodes

from itrloss.cli.charts import intervals

PAGES = ("results", "ablations")
SPREAD = "RSUM, mean ± standard deviation over seeds"
NUMBER = re.compile(r"([+-]?[\d.]+)(?: ± ([\d.]+))?")
ENDS = re.compile(r"([+-]?[\d.]+) \(([+-]?[\d.]+) to ([+-]?[\d.]+)\)")


def interval(text):
    """Return (value, low, high) of "1.5 ± 0.2" or "1.5 (1.3 to 1.7)".

    Without ± the value three times, and NaN for what is no number.
    """
    ends = ENDS.fullmatch(text.replace("−", "-"))
    if ends:
        return tuple(float(x) for x in ends.groups())
    match = NUMBER.fullmatch(text.replace("−", "-"))
    value, half = (float(match[1]), float(match[2] or 0)) if match else (math.nan, math.nan)
    return value, value - half, value + half


def drawn(table, label):
    """Return the chart of a table as SVG, or None where it has no intervals."""
    head, *rows = [
        [entry.astext() for entry in row.findall(nodes.entry)] for row in table.findall(nodes.row)
    ]
    if "difference" in head:
        rows = [row for row in rows if row[head.index("difference")]]
        names = [f"{row[0]}: {row[1]}" for row in rows]
        groups = {"ours, with 95 % intervals": "difference", "printed": "printed"}
        groups = {
            group: [interval(row[head.index(title)]) for row in rows]
            for group, title in groups.items()
        }
        return intervals(names, groups, label, "difference of RSUM to the row in bold", zero=True)
    if "0 %" in head:
        rows = [row for row in rows if row[0]]
        columns = [i for i, title in enumerate(head) if re.fullmatch(r"\d+ %", title)]
        groups = {f"{head[i]} wrong": [interval(row[i]) for row in rows] for i in columns}
        return intervals([row[0] for row in rows], groups, label, SPREAD)
    given = {
        head[i]: [row[i] for row in rows]
        for i in range(1, len(head))
        if head[i].startswith("RSUM, ") and ENDS.fullmatch(rows[0][i].replace("−", "-"))
    }
    groups = {
        title.removeprefix("RSUM, "): [interval(x) for x in cells] for title, cells in given.items()
    }
    if groups:
        return intervals(
            [row[0] for row in rows], groups, label, "gain of RSUM, with 95 % intervals", zero=True
        )
    if "RSUM" not in head or not any("±" in cell for row in rows for cell in row):
        return None
    before, after, column = (
        [row for row in rows if row[0]],
        [row for row in rows if not row[0]],
        head.index("RSUM"),
    )
    after = [row[column] for row in after] or [row[head.index("re-ranked")] for row in rows]
    groups = {
        "no re-ranking": [interval(row[column]) for row in before],
        "re-ranked": [interval(x) for x in after],
    }
    return intervals([row[0] for row in before], groups, label, SPREAD)


def add_charts(app, doctree):
    """Draw the tables of the pages that have results."""
    if app.env.docname not in PAGES:
        return
    for number, table in enumerate(list(doctree.findall(nodes.table)), 1):
        chart = drawn(table, f"Table {number} of this page as a chart")
        if chart is not None:
            raw = nodes.raw("", chart, format="html")
            table.parent.insert(table.parent.index(table) + 1, raw)


def setup(app):
    """Register the extension."""
    app.connect("doctree-read", add_charts)
    return {"parallel_read_safe": True}
