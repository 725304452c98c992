"""A comparison of re-rankers as one HTML page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..comparison import Entry, RerankerComparison
from ..metrics import QueryResults, skewness
from ..metrics.results import RECALLS, WAYS
from . import Block, number, render
from .charts import histograms, intervals

_LISTED = 10  # hubs, queries that gained, queries that lost


def page(
    comparison: RerankerComparison, chosen: Entry, title: str, names: Sequence[Sequence[str]]
) -> str:
    """Return an HTML page, with hubs and queries before and after ``chosen``, and the names of
    images and of texts.
    """
    n, m = comparison.sim.shape
    about = (
        f"{n} images, {m} texts. Recalls in percent. Intervals: 95 % confidence intervals of the change of the RSUM "
        "(paired bootstrap over images). A skewness of 0 means that no candidate is a hub."
    )
    by = chosen.name if chosen.reranker is None else f"{chosen.name}, hubs of {chosen.looks_at},"
    changed = [_changed(comparison.entries[0], chosen, names, side) for side in (0, 1)]
    sections = {"All methods": _methods(comparison, chosen), f"What {by} changed": changed}
    return render(
        title, [about, *({"title": name, "blocks": blocks} for name, blocks in sections.items())]
    )


def hubness(
    before: QueryResults, after: QueryResults, names: Sequence[str], query: str, candidate: str
) -> tuple[str, str]:
    """Return a chart of the k-occurrences of two results, and its caption."""
    k, counts = before.top.shape[1], [results.occurrences.cpu() for results in (before, after)]
    label = f"How often a {candidate} is among the first {k} of a {query}, {' and '.join(names)}"
    chart = histograms(
        {name: x.numpy() for name, x in zip(names, counts, strict=True)},
        label,
        f"number of {query}s with it among their first {k}",
        f"number of {candidate}s (log scale)",
    )
    skews = " → ".join(number(float(skewness(x)), ".2f") for x in counts)
    most = " → ".join(f"{int(x.max()):,}" for x in counts)
    never = " → ".join(f"{int((x == 0).sum()):,}" for x in counts)
    return chart, (
        f"{candidate.capitalize()}s, retrieved by {len(before.top):,} {query}s. Skewness {skews}. The most popular "
        f"{candidate} is in {most} lists; {never} of {len(counts[0]):,} are in none."
    )


def _methods(comparison: RerankerComparison, chosen: Entry) -> list[Block]:
    rows, changes = [], {}
    for entry in comparison.entries:
        m, c = entry.results.metrics(), entry.change
        cells = [entry.name, entry.looks_at]
        cells += [
            number(m[name]) for name in (*(f"{way}_r{k}" for way in WAYS for k in RECALLS), "rsum")
        ]
        if entry.reranker is None:
            cells += ["", ""]
        else:
            cells += [
                number(c.difference, "+.1f"),
                f"{number(c.low, '+.1f')} to {number(c.high, '+.1f')}",
            ]
            changes[f"hubs of {entry.looks_at}", entry.name] = c.difference, c.low, c.high
        cells += [number(m[f"{way}_skewness"], ".2f") for way in WAYS] + [number(entry.seconds)]
        strong = [{"text": x, "strong": entry is chosen} for x in cells]
        rows.append((strong[:2], strong[2:]))
    kinds, methods = (
        (list(dict.fromkeys(names)) for names in zip(*changes, strict=True))
        if changes
        else ([], [])
    )
    label = "Change of the RSUM by each method, with its interval"
    values = {
        kind: [changes.get((kind, method), (math.nan,) * 3) for method in methods] for kind in kinds
    }
    chart = intervals(methods, values, label, "change of the RSUM, in points", zero=True)
    head = ["R@1", "R@5", "R@10"] * 2 + ["RSUM", "change", "interval", "i → t", "t → i", "seconds"]
    groups = [("image → text", 3), ("text → image", 3), ("", 3), ("skewness", 2), ("", 1)]
    return [
        {"table": rows, "columns": (["method", "hubs in"], head), "groups": groups},
        *({"note": f"{name} was left out: {why}."} for name, why in comparison.left_out.items()),
        {"figures": [(chart, f"{label}.")] if changes else []},
        "With hubs in the test queries, the result of a query depends on the other queries; compare it with results "
        "of the same kind. With a bank, queries are independent.",
    ]


def _changed(first: Entry, chosen: Entry, names: Sequence[Sequence[str]], side: int) -> Block:
    """Return the section on hubs and queries of one direction."""
    before, after = (getattr(x.results, WAYS[side]) for x in (first, chosen))
    query, candidate = ("text", "image") if side else ("image", "text")
    queries, candidates = names[side], names[1 - side]
    counts = before.occurrences, after.occurrences
    hubs = counts[0].sort(descending=True, stable=True).indices[:_LISTED].tolist()
    rows = [([candidates[hub]], [f"{int(x[hub]):,}" for x in counts]) for hub in hubs]
    answered = (before.best > 0).nonzero().squeeze(1)
    old, new = before.best[answered], after.best[answered]  # ranks of the best right candidate
    blocks: list[Block] = [
        {"figures": [hubness(before, after, ("before", "after"), query, candidate)]},
        {"table": rows, "columns": (["greatest hubs before"], ["queries before", "after"])},
        f"{int((new < old).sum())} of {len(answered)} queries rank their right candidate higher than before, "
        f"{int((new > old).sum())} lower.",
    ]
    gain = old.double().log() - new.double().log()  # from 20 to 2 is more than from 200 to 182
    heads = ["first candidate before", "first candidate after"], ["rank before", "after"]
    for title, gains in (("gained most", gain), ("lost most", -gain)):
        order = gains.sort(descending=True, stable=True).indices[:_LISTED]
        rows = []
        for i in order[gains[order] > 0].tolist():
            q = int(answered[i])
            firsts = [candidates[int(x.top[q, 0])] for x in (before, after)]
            rows.append(([queries[q], *firsts], [f"{int(x[i]):,}" for x in (old, new)]))
        # nothing where there are no rows
        blocks.append({"table": rows, "columns": ([title, *heads[0]], heads[1])})
    return {"title": f"{query} → {candidate}", "blocks": blocks}
