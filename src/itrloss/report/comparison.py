"""A comparison of re-rankers as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..comparison import Entry, RerankerComparison
from ..metrics import QueryResults, skewness
from . import Block, number, render
from .charts import histograms, intervals

_LISTED = 10  # hubs, queries that gained, queries that lost


@dataclass(frozen=True)
class Names:
    """The names of images and texts on the page; by default their numbers."""

    images: Sequence[str] = ()
    texts: Sequence[str] = ()

    def of(self, side: int, index: int) -> str:
        """Return the name of the image (side 0) or text (1) with this number."""
        names = (self.images, self.texts)[side]
        return names[index] if names else f"{('image', 'text')[side]} {index}"


def page(comparison: RerankerComparison, chosen: Entry, title: str, names: Names = Names()) -> str:
    """Return the comparison as an HTML page; hubs and queries compare one entry with no re-ranking."""
    n, m = comparison.sim.shape
    about = (
        f"{n} images, {m} texts. Recalls in percent. Intervals: 95 % confidence intervals of the change of the RSUM "
        "(paired bootstrap over images). A skewness of 0 means that no candidate is a hub."
    )
    by = chosen.name if chosen.reranker is None else f"{chosen.name}, hubs of {chosen.looks_at},"
    changed: list[Block] = [_changed(comparison.entries[0], chosen, names, side) for side in (0, 1)]
    sections = {"All methods": _methods(comparison, chosen), f"What {by} changed": changed}
    return render(title, [about, *({"title": name, "blocks": blocks} for name, blocks in sections.items())])


def hubness(
    before: QueryResults, after: QueryResults, names: Sequence[str], query: str, candidate: str
) -> tuple[str, str]:
    """Return a chart of the k-occurrences of two results, and its caption."""
    k, counts = before.top.shape[1], [results.occurrences.cpu() for results in (before, after)]
    label = f"How often a {candidate} is among the first {k} of a {query}, {' and '.join(names)}"
    arrays = {name: x.numpy() for name, x in zip(names, counts, strict=True)}
    skews, most, never = (
        " → ".join(number(float(figure(x)), form) for x in counts)
        for figure, form in ((skewness, ".2f"), (lambda x: x.max(), ",.0f"), (lambda x: (x == 0).sum(), ",.0f"))
    )
    return histograms(
        arrays, label, f"number of {query}s with it among their first {k}", f"number of {candidate}s (log scale)"
    ), (
        f"{candidate.capitalize()}s, retrieved by {len(before.top):,} {query}s. Skewness {skews}. The most popular "
        f"{candidate} is in {most} lists; {never} of {len(counts[0]):,} are in none."
    )


def _methods(comparison: RerankerComparison, chosen: Entry) -> list[Block]:
    head = ["R@1", "R@5", "R@10"] * 2 + ["RSUM", "change", "interval", "i → t", "t → i", "seconds"]
    groups = [("image → text", 3), ("text → image", 3), ("", 3), ("skewness", 2), ("", 1)]
    rows = []
    for entry in comparison.entries:
        m, c = entry.results.metrics(), entry.change
        values = [number(m[f"{way}_r{k}"]) for way in ("i2t", "t2i") for k in (1, 5, 10)] + [number(m["rsum"])]
        change = [number(c.difference, "+.1f"), f"{number(c.low, '+.1f')} to {number(c.high, '+.1f')}"]
        values += ["", ""] if entry.reranker is None else change
        values += [number(m[f"{way}_skewness"], ".2f") for way in ("i2t", "t2i")] + [number(entry.seconds)]
        strong = entry is chosen
        names = [{"text": x, "strong": strong} for x in (entry.name, entry.looks_at)]
        rows.append((names, [{"text": x, "strong": strong} for x in values]))
    changes = {
        (entry.looks_at, entry.name): (entry.change.difference, entry.change.low, entry.change.high)
        for entry in comparison.entries[1:]
    }
    methods, references = (list(dict.fromkeys(key[i] for key in changes)) for i in (1, 0))
    nothing = (math.nan,) * 3
    chart = intervals(
        methods,
        {f"hubs of {kind}": [changes.get((kind, method), nothing) for method in methods] for kind in references},
        "Change of the RSUM by each method, with its interval",
        "change of the RSUM, in points",
        zero=True,
    )
    return [
        {"table": rows, "columns": (["method", "hubs in"], head), "groups": groups},
        *({"note": f"{name} was left out: {why}."} for name, why in comparison.left_out.items()),
        {"figures": [(chart, "The change of the RSUM by each method, with its interval.")] if changes else []},
        "With hubs in the test queries, the result of a query depends on the other queries; compare it with results "
        "of the same kind. With a bank, queries are independent.",
    ]


def _changed(first: Entry, chosen: Entry, names: Names, side: int) -> Block:
    """Return the section on hubs and queries of one direction."""
    before, after = ((x.results.i2t, x.results.t2i)[side] for x in (first, chosen))
    query, candidate = ("text", "image") if side else ("image", "text")
    counts = before.occurrences, after.occurrences
    hubs = counts[0].sort(descending=True, stable=True).indices[:_LISTED].tolist()
    rows = [([names.of(1 - side, hub)], [f"{int(x[hub]):,}" for x in counts]) for hub in hubs]
    answered = (before.best > 0).nonzero().squeeze(1)
    old, new = before.best[answered], after.best[answered]  # ranks of the best right candidate
    better, worse = int((new < old).sum()), int((new > old).sum())
    blocks: list[Block] = [
        {"figures": [hubness(before, after, ("before", "after"), query, candidate)]},
        {"table": rows, "columns": (["greatest hubs before"], ["queries before", "after"])},
        f"{better} of {len(answered)} queries rank their right candidate higher than before, {worse} lower.",
    ]
    gain = old.double().log() - new.double().log()  # from 20 to 2 is more than from 200 to 182
    for title, descending in (("gained most", True), ("lost most", False)):
        order = gain.sort(descending=descending, stable=True).indices[:_LISTED].tolist()
        rows = []
        for i in (i for i in order if old[i] != new[i]):
            q = int(answered[i])
            firsts = [names.of(1 - side, int(x.top[q, 0])) for x in (before, after)]
            rows.append(([names.of(side, q), *firsts], [f"{int(x[i]):,}" for x in (old, new)]))
        if rows:
            heads = [title, "first candidate before", "first candidate after"]
            blocks.append({"table": rows, "columns": (heads, ["rank before", "after"])})
    return {"title": f"{query} → {candidate}", "blocks": blocks}
