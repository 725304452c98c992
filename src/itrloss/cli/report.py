"""A comparison of re-rankers as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ..metrics import QueryResults, skewness
from .charts import histograms, intervals
from .pages import Block, number, render
from .tables import Entry, Names, SystemComparison, Table, styled

_LISTED = 10  # hubs, queries that gained, queries that lost


def page(
    comparison: SystemComparison,
    table: Table,
    title: str,
    facts: Mapping[str, str],
    chosen: Entry | None = None,
    names: Names = ((), ()),
) -> str:
    """Return an HTML page with a table and, of re-rankers, hubs and queries before and after
    ``chosen``, by the names of images and of texts.

    ``facts`` are what was computed, with what and when.
    """
    blocks: list[Block] = [{"facts": facts}]
    for frame in table.frames:
        style = styled(frame, "html", "font-weight: bold").set_uuid(f"table{len(blocks)}")
        blocks.append({"html": style.to_html(table_attributes='class="dataframe"')})
    blocks += [{"note": note} for note in (*table.notes, *table.hints)]
    compared = comparison.entries[1:]
    if compared:
        values = {"rows": [entry.changes["rsum"][:3] for entry in compared]}
        label = "Change of the RSUM, with its interval"
        titles = [entry.title for entry in compared]
        chart = intervals(titles, values, label, "change of the RSUM, in points", zero=True)
        blocks.append({"figures": [(chart, f"{label}.")]})
    if chosen is None:
        return render(title, blocks)
    first = comparison.entries[0].results
    images, texts = names
    changed = [
        _changes("image", "text", images, texts, first.i2t, chosen.results.i2t),
        _changes("text", "image", texts, images, first.t2i, chosen.results.t2i),
    ]
    blocks.append({"title": f"What {chosen.name} changed", "blocks": changed})
    return render(title, blocks)


def hubness(
    before: QueryResults, after: QueryResults, names: Sequence[str], query: str, candidate: str
) -> tuple[str, str]:
    """Return a chart of the k-occurrences of two results, and its caption."""
    k = before.top.shape[1]
    counts = [before.occurrences.cpu(), after.occurrences.cpu()]
    chart = histograms(
        dict(zip(names, [x.numpy() for x in counts], strict=True)),
        f"How often a {candidate} is among the first {k} of a {query}, {' and '.join(names)}",
        f"number of {query}s with it among their first {k}",
        f"number of {candidate}s (log scale)",
    )
    skews = " → ".join(number(float(skewness(x)), ".2f") for x in counts)
    most = " → ".join(f"{int(x.max()):,}" for x in counts)
    never = " → ".join(f"{int((x == 0).sum()):,}" for x in counts)
    return chart, (
        f"{candidate.capitalize()}s, retrieved by {len(before.top):,} {query}s. Skewness {skews}. "
        f"The most popular {candidate} is in {most} lists; {never} of {len(counts[0]):,} are in "
        "none."
    )


def _changes(
    query: str,
    candidate: str,
    queries: Sequence[str],
    candidates: Sequence[str],
    before: QueryResults,
    after: QueryResults,
) -> Block:
    """Return the section on one direction: its hubs, and the queries that gained or lost most.

    ``queries`` and ``candidates`` are their names.
    """
    named = np.array(candidates, dtype=object)
    columns = {
        "query": queries,
        "first candidate before": named[before.top[:, 0]],
        "first candidate after": named[after.top[:, 0]],
        "rank before": before.best,
        "rank after": after.best,
    }
    is_matched = before.best > 0
    frame = pd.DataFrame(columns).loc[is_matched.numpy()]
    old = frame["rank before"]
    new = frame["rank after"]
    counts = {"queries before": before.occurrences, "after": after.occurrences}
    hubs = pd.DataFrame({candidate: candidates, **counts}).nlargest(_LISTED, "queries before")
    blocks = [
        {"figures": [hubness(before, after, ("before", "after"), query, candidate)]},
        {"title": "Greatest hubs before", "blocks": [_table(hubs, 1)]},
        f"{(new < old).sum()} of {len(frame)} queries rank their right candidate "
        f"higher than before, {(new > old).sum()} lower.",
    ]
    # from 20 to 2 is more than from 200 to 182
    for title, ratio in {"Gained most": old / new, "Lost most": new / old}.items():
        places = ratio[ratio > 1].nlargest(_LISTED).index
        blocks.append({"title": title, "blocks": [_table(frame.loc[places], 3)]})
    return {"title": f"{query} → {candidate}", "blocks": blocks}


def _table(frame: pd.DataFrame, texts: int) -> Block:
    """Return a data frame as a table of a page, whose first columns are texts, which wrap."""
    columns = list(frame)
    rows = []
    for row in frame.astype(str).to_numpy().tolist():
        rows.append((row[:texts], row[texts:]))
    return {"table": rows, "columns": (columns[:texts], columns[texts:])}
