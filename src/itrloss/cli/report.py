"""A comparison of re-rankers as one HTML page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from torch import Tensor

from ..metrics import QueryResults, skewness
from ..metrics.results import WAYS
from .charts import histograms, intervals
from .comparison import SystemComparison
from .pages import Block, number, render
from .tables import ARROWS, HUBS, TITLES, Entry, Table, best, shown

_LISTED = 10  # hubs, queries that gained, queries that lost
# images and texts
Names = tuple[Sequence[str], Sequence[str]]


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
    blocks: list[Block] = [{"facts": facts}, *_table_blocks(comparison, table)]
    if chosen is None:
        return render(title, blocks)
    first = comparison.entries[0].results
    after = chosen.results
    images, texts = names
    changed = [
        _Change("image", "text", images, texts, first.i2t, after.i2t).section(),
        _Change("text", "image", texts, images, first.t2i, after.t2i).section(),
    ]
    by = TITLES.get(chosen.name, chosen.name)
    if chosen.reranker is not None:
        by = f"{by}, hubs of {HUBS[chosen.hubs][0]},"
    hubs = [
        "A skewness of 0 means that no candidate is a hub. Compare a transductive method with "
        "others of its kind: with a bank, queries are independent.",
        _skewness(comparison),
    ]
    blocks.append({"title": "Hubs of all methods", "blocks": hubs})
    blocks.append({"title": f"What {by} changed", "blocks": changed})
    return render(title, blocks)


def hubness(
    before: QueryResults, after: QueryResults, names: Sequence[str], query: str, candidate: str
) -> tuple[str, str]:
    """Return a chart of the k-occurrences of two results, and its caption."""
    k = before.top.shape[1]
    counts = [before.occurrences.cpu(), after.occurrences.cpu()]
    chart = histograms(
        {name: x.numpy() for name, x in zip(names, counts, strict=True)},
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


def _table_blocks(comparison: SystemComparison, table: Table) -> list[Block]:
    """Return the frames of a table, its notes, and a chart of the changes of its rows."""
    blocks: list[Block] = []
    for frame in table.frames:
        cells = shown(frame).map(lambda text: escape(text.replace("-", "−")))
        cells = cells.where(~best(frame), '<b class="strong">' + cells + "</b>").rename(escape)
        blocks.append({"html": cells.to_html(escape=False, border=0)})
    blocks += [{"note": note} for note in table.notes]
    compared = comparison.entries[1:]
    if compared:
        values = {"rows": [entry.changes["rsum"][:3] for entry in compared]}
        label = "Change of the RSUM, with its interval"
        names = [entry.title + entry.dagger for entry in compared]
        chart = intervals(names, values, label, "change of the RSUM, in points", zero=True)
        blocks.append({"figures": [(chart, f"{label}.")]})
    return blocks


def _skewness(comparison: SystemComparison) -> Block:
    """Return the table of the skewness of k-occurrences of all methods."""
    rows = []
    for entry in comparison.entries:
        metrics = entry.results.metrics()
        rows.append(([entry.title], [number(metrics[f"{way}_skewness"], ".2f") for way in WAYS]))
    heads = [ARROWS[way] for way in WAYS]
    return {"table": rows, "columns": (["method"], heads), "groups": [("skewness", len(WAYS))]}


@dataclass
class _Change:
    """The results of one direction before and after re-ranking."""

    query: str
    candidate: str
    queries: Sequence[str]  # their names
    candidates: Sequence[str]
    before: QueryResults
    after: QueryResults

    def section(self) -> Block:
        """Return the section on hubs and queries."""
        matched = (self.before.best > 0).nonzero().squeeze(1)
        old = self.before.best[matched]  # ranks of the best right candidate
        new = self.after.best[matched]
        gain = old.double().log() - new.double().log()  # from 20 to 2 is more than from 200 to 182
        chart = hubness(self.before, self.after, ("before", "after"), self.query, self.candidate)
        blocks = [
            {"figures": [chart]},
            self.hubs(),
            f"{int((new < old).sum())} of {len(matched)} queries rank their right candidate "
            f"higher than before, {int((new > old).sum())} lower.",
            self.examples("gained most", matched, gain),
            self.examples("lost most", matched, -gain),
        ]
        return {"title": f"{self.query} → {self.candidate}", "blocks": blocks}

    def hubs(self) -> Block:
        """Return the table of the candidates that most queries had among their first."""
        before = self.before.occurrences
        after = self.after.occurrences
        rows = []
        for hub in before.sort(descending=True, stable=True).indices[:_LISTED].tolist():
            rows.append(([self.candidates[hub]], [f"{before[hub]:,}", f"{after[hub]:,}"]))
        return {"table": rows, "columns": (["greatest hubs before"], ["queries before", "after"])}

    def examples(self, title: str, matched: Tensor, gain: Tensor) -> Block:
        """Return the table of the queries with the greatest gains, if they are above 0.

        ``matched`` (Q,): the queries that have a right candidate; ``gain`` (Q,): what they gained.
        """
        order = gain.sort(descending=True, stable=True).indices[:_LISTED]
        rows = []
        for q in matched[order[gain[order] > 0]].tolist():
            names = [self.queries[q]]
            ranks = []
            for results in (self.before, self.after):
                names.append(self.candidates[int(results.top[q, 0])])
                ranks.append(f"{int(results.best[q]):,}")
            rows.append((names, ranks))
        heads = [title, "first candidate before", "first candidate after"]
        # nothing where there are no rows
        return {"table": rows, "columns": (heads, ["rank before", "after"])}
