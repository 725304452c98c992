"""Pages and their charts: complete, self-contained, escaped, and deterministic."""

from __future__ import annotations

import functools
import importlib
import re
import sys
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from support.stored import assert_stored

import itrloss.cli
from itrloss.cli.charts import COLOURS, histograms, intervals, svg
from itrloss.cli.pages import number, render

LINK = {"xlink": "http://www.w3.org/1999/xlink"}


def parsed(chart: str) -> ElementTree.Element:
    return ElementTree.fromstring(chart.replace("<svg ", f'<svg xmlns:xlink="{LINK["xlink"]}" ', 1))


def texts(chart: str) -> list[str]:
    return [x.text or "" for x in parsed(chart).iter("text")]


def lines(series: dict[str, list[float]], label: str, x: str, y: str) -> str:
    """A chart of lines over 1, 2, and so on."""

    def draw(axes):
        for name, values in series.items():
            places = range(1, len(values) + 1)
            axes.plot(places, values, color=COLOURS[0], marker="o", label=name)

    return svg(draw, label, x, y, (480, 300))


@functools.cache
def several() -> dict[str, str]:
    """One chart of each kind."""
    series = {"$a$ <1> & co": [3.0, 2.0, 2.5], **{f"run {i}": [float(i), 2.0] for i in range(7)}}
    counts = {"before": np.array([0, 0, 3]), "after": np.array([1, 1, 1])}
    groups = {
        "plain": [(1.0, 0.5, 2.5), (-3.0, -4.0, -2.0)],
        "re-ranked": [(2.0, 1.0, 3.0), (np.nan,) * 3],
    }
    return {
        "lines": lines(series, 'a "label" <1>', "epoch", "RSUM"),
        "histograms": histograms(counts, "hubs", "queries", "texts"),
        "intervals": intervals(
            ["csls", "fast"], groups, "changes", "change of RSUM, points", zero=True
        ),
    }


def test_charts_have_titles_and_a_legend_that_escapes_names():
    charts = several()
    assert {"epoch", "RSUM", "$a$ <1> & co", *(f"run {i}" for i in range(7))} <= set(
        texts(charts["lines"])
    )
    assert parsed(charts["lines"]).get("aria-label") == 'a "label" <1>'
    assert {"queries", "texts", "before", "after", "mean 1.0"} <= set(texts(charts["histograms"]))
    assert {"csls", "fast", "plain", "re-ranked", "change of RSUM, points"} <= set(
        texts(charts["intervals"])
    )
    alone = lines({"alone": [3.0]}, "one", "epoch", "loss")
    assert "alone" not in texts(alone) and "nan" not in alone


def test_long_names_stay_within_the_chart():
    names = [f"{i}" + "x" * 150 for i in range(3)]
    legend = lines({name: [1.0, 2.0] for name in names}, "a", "epoch", "RSUM")
    middle = lines({f"{i}" * 24: [1.0] for i in range(4)}, "b", "epoch", "RSUM")
    axis = intervals(names, {"models": [(1.0, 0.0, 2.0)] * 3}, "c", "change")
    for chart, most in ((legend, 52), (middle, 24), (axis, 28)):
        assert max(map(len, texts(chart))) == most
        width, height = map(float, parsed(chart).get("viewBox").split()[2:])
        for x, y in re.findall(r"translate\(([\d.-]+) ([\d.-]+)\)", chart):
            assert 0 <= float(x) <= width and 0 <= float(y) <= height
    for chart in legend, axis:
        assert "".join(x for x in texts(chart) if "xxx" in x).count("x") == 3 * 150


def test_lines_are_drawn_where_the_numbers_are():
    chart = lines({"a": [0.0, 50.0, 100.0]}, "a", "epoch", "y")
    markers = [use for use in re.findall("<use [^>]*>", chart) if COLOURS[0] in use]
    x, y = (
        np.array([float(re.search(rf' {name}="([\d.]+)"', use)[1]) for use in markers])
        for name in "xy"
    )
    assert np.diff(x) == pytest.approx(x[1] - x[0]) and x[1] > x[0]
    assert np.diff(y) == pytest.approx(y[1] - y[0]) and y[1] < y[0]


@pytest.mark.parametrize("width", [1, 30])
def test_bars_are_as_high_as_the_logarithms_of_their_counts(width: int):
    counts = np.repeat([0, width, 2 * width], [100, 10, 1])
    chart = histograms({"before": counts, "after": counts + 1}, "hubs", "x", "y")
    bars = re.findall(rf'd="([^"]*)" clip-path[^>]* style="fill: {COLOURS[-1]}', chart)
    corners = {float(y) for y in re.findall(r"[ML] [\d.]+ ([\d.]+)", " ".join(bars))}
    tops = sorted(corners)[:3]
    assert tops[1] - tops[0] == pytest.approx(tops[2] - tops[1], rel=1e-3) and tops[0] < tops[1]


def test_ids_of_charts_on_one_page_do_not_meet():
    charts = {**several()}
    charts["more"] = lines({"a": [3.0, 2.0, 2.5]}, "another label", "epoch", "RSUM")
    ids = [[x.get("id") for x in parsed(chart).iter() if x.get("id")] for chart in charts.values()]
    assert all(ids) and len({x for own in ids for x in own}) == sum(map(len, ids))
    for chart, own in zip(charts.values(), ids, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^")]+)', chart)) == set(own)


def test_charts_are_the_same_every_time_whatever_the_users_style(monkeypatch):
    first = several()
    monkeypatch.setitem(matplotlib.rcParams, "lines.linewidth", 9)
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    assert several.__wrapped__() == first
    assert not any(
        re.search(r"http|<style|<script|<metadata|\d\d:\d\d", chart) for chart in first.values()
    )


def test_charts_have_the_colour_of_the_page_and_leave_pyplot_alone(monkeypatch):
    assert all(
        "fill: currentColor" in chart and "#000" not in chart for chart in several().values()
    )
    # put back, as the next line's modules are
    monkeypatch.setattr(itrloss, "cli", itrloss.cli)
    for name in [
        name for name in sys.modules if re.match(r"matplotlib\.pyplot$|itrloss\.cli\b", name)
    ]:
        monkeypatch.delitem(sys.modules, name)
    again = importlib.import_module("itrloss.cli.charts")
    again.intervals(["a"], {"b": [(1.0, 0.0, 2.0)]}, "a", "x")
    assert again.intervals is not intervals and "matplotlib.pyplot" not in sys.modules


def luminance(colour: str) -> float:
    """Relative luminance as defined by WCAG."""
    x = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return float(
        np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]
    )


@pytest.mark.parametrize("colour", COLOURS)
def test_colours_are_told_from_light_and_dark_pages(colour: str):
    assert 1.05 / (luminance(colour) + 0.05) >= 3
    assert (luminance(colour) + 0.05) / (luminance("#15181b") + 0.05) >= 3


def test_pages_escape_text_and_keep_charts():
    chart = several()["lines"]
    answers = [("<answer>", [{"text": "<item>"}])]
    cell = {"text": "<cell>", "below": ["<below>"], "rows": 2, "strong": True}
    page = render(
        "<title>",
        [
            "<p&>",
            {"note": "<note>"},
            {"facts": {"<name>": "<fact>"}},
            {"title": "<section>", "blocks": [{"figures": [(chart, "<caption>")]}]},
            {
                "table": [([cell], [cell, "<figure>"])],
                "columns": (["<head>"], ["a", "b"]),
                "groups": [("<group>", 2)],
            },
            {
                "cards": [
                    {"title": "<card>", "note": "", "query": {"text": "<q>"}, "answers": answers}
                ]
            },
        ],
    )
    assert chart in page
    assert "prefers-color-scheme: dark" in page
    body = page[page.index("<body") :].replace(chart, "CHART")
    assert_stored("page", "\n".join(line.strip() for line in body.splitlines()))


def test_numbers_have_a_true_minus_sign_but_zero_has_none():
    assert [number(x) for x in (1234.56, -1.25, -0.04)] == ["1,234.6", "−1.2", "0.0"]
    assert [number(x, "+.2f") for x in (0.5, -0.5, -0.001)] == ["+0.50", "−0.50", "0.00"]
