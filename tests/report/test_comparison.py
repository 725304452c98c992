"""The report of ``itrloss rerank``: the greatest hubs, and the queries that gained or lost most."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import C, N, Page, run, scores

from itrloss import Similarity, comparison, rerank
from itrloss.comparison.report import page
from itrloss.metrics import QueryResults, RetrievalResults, compare, retrieval_results


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "sims.npy"
    np.save(path, scores())
    return path


def read(html: str) -> str:
    """The text of a page whose elements are all closed."""
    parser = Page()
    parser.feed(html)
    assert parser.open == []
    return parser.text


# Of these scales, more queries lose than gain.
SCALES = ("--i2t", 60, 25, "--t2i", 60, 20)
CHOSEN = rerank.FastReranker((60, 25), (60, 20))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """The text of the report of two methods."""
    folder = tmp_path_factory.mktemp("report")
    saved, report, names = folder / "sims.npy", folder / "report.html", folder / "captions.txt"
    np.save(saved, scores())
    names.write_text("\n".join(f"caption <b{i}> & co" for i in range(N * C)), encoding="utf-8")
    options = ("--methods", "fast", "sinkhorn", *SCALES, "--text-names", names)
    assert run("rerank", saved, *options, "--report", report) == 0
    return read(report.read_text(encoding="utf-8"))


def test_the_greatest_hub_is_named(text):
    ids = torch.arange(N), torch.arange(N * C) // C
    plain = Similarity.from_scores(torch.from_numpy(scores()), *ids)
    hub = plain.topk(10).indices.flatten().bincount().argmax()
    assert f"caption <b{hub}> & co" in text
    assert "image 3" in text


@pytest.mark.parametrize(
    "head", ["Sinkhorn", "greatest hubs before", "gained most", "lost most", "text→i"]
)
def test_the_report_has_all_parts(head, text):
    assert head in text


@pytest.mark.parametrize("way", ["i2t", "t2i"])
def test_queries_that_gain_and_lose_are_counted(way, text):
    plain = torch.from_numpy(scores())
    before = retrieval_results(plain).ways[way].best
    after = retrieval_results(plain, reranker=CHOSEN).ways[way].best
    higher = int((after < before).sum())
    lower = int((after > before).sum())
    moved = f"{higher} of {len(before)} queries rank their right candidate higher than before"
    assert f"{moved}, {lower} lower" in text


def test_the_image_that_gained_most_is_named(text):
    plain = torch.from_numpy(scores())
    before = retrieval_results(plain).i2t.best
    after = retrieval_results(plain, reranker=CHOSEN).i2t.best
    gained = int((before / after).argmax())
    heads = r"gained most\s*first candidate before\s*first candidate after\s*rank before\s*after\s*"
    assert re.search(rf"{heads}image {gained}\D", text)


def entry(name: str, ranks: list[int], base: comparison.Entry | None) -> comparison.Entry:
    """A method with these ranks of right candidates in both directions; 0 where there is none."""
    ids = torch.arange(len(ranks))
    queries = QueryResults(ids, torch.tensor(ranks)[:, None], ids[:, None], 300)
    results = RetrievalResults(queries, queries)
    if base is None:
        return comparison.Entry(name, None, results, 0.0, {})
    changes = compare(results, base.results, samples=9)
    return comparison.Entry(name, rerank.CSLS(), results, 0.0, changes)


def test_gains_are_ratios_and_only_answered_queries_count():
    """A change from 20 to 2 is larger than one from 200 to 100. The fourth query has no right
    candidate.
    """
    before = entry("before", [200, 20, 3, 0, 5], None)
    after = entry("after", [100, 2, 9, 0, 5], before)
    sim = Similarity.from_scores(torch.rand(5, 5))
    found = comparison.RerankerComparison(sim, [before, after], {})
    names = [[f"{letter}{i}" for i in range(300)] for letter in "IT"]
    text = read(page(found, after, "title", names))
    moved = "2 of 4 queries rank their right candidate higher than before, 1 lower."
    assert text.count(moved) == 2
    for name, section in zip("IT", text.split("gained most")[1:], strict=True):
        gained, lost = section.split("greatest hubs")[0].split("lost most")
        assert re.findall(rf"{name}\d", gained) == [f"{name}1", f"{name}0"]
        assert re.findall(rf"{name}\d", lost) == [f"{name}2"]


def test_names_of_texts_are_split_at_newlines_only(saved, tmp_path):
    names, report = tmp_path / "captions.txt", tmp_path / "report.html"
    names.write_text("a\u2028dog\x85\n" * (N * C), encoding="utf-8")
    assert run("rerank", saved, "--methods", "fast", "--text-names", names, "--report", report) == 0


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_without_the_extra_a_report_is_refused_before_the_work(
    missing, saved, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, missing, None)
    assert run("rerank", saved, "--methods", "fast", "--report", tmp_path / "report.html") == 2
    out, err = capsys.readouterr()
    assert f"{missing} is missing; install itrloss with the extra 'report'" in err
    assert "RSUM" not in out
    assert run("rerank", saved, "--methods", "fast") == 0
