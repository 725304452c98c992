"""The report of ``itrloss rerank``: the greatest hubs, and the queries that gained or lost most."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import C, N, read_page, run, scores

from itrloss import Similarity, rerank
from itrloss.cli import comparison
from itrloss.cli.report import page
from itrloss.metrics import QueryResults, RetrievalResults, compare, retrieval_results

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
    return read_page(report.read_text(encoding="utf-8"))


def test_the_greatest_hub_is_named(text):
    ids = torch.arange(N), torch.arange(N * C) // C
    plain = Similarity.from_scores(torch.from_numpy(scores()), *ids)
    hub = plain.topk(10).indices.flatten().bincount().argmax()
    assert f"caption <b{hub}> & co" in text
    assert "image 3" in text


def test_the_report_has_all_parts(text):
    for head in ("Sinkhorn", "greatest hubs before", "gained most", "lost most", "text→i"):
        assert head in text


def test_queries_that_gain_and_lose_are_counted(text):
    plain = torch.from_numpy(scores())
    before = retrieval_results(plain)
    after = retrieval_results(plain, reranker=CHOSEN)
    for way, side in before.ways.items():
        ranks = after.ways[way].best
        higher, lower = int((ranks < side.best).sum()), int((ranks > side.best).sum())
        moved = f"{higher} of {len(ranks)} queries rank their right candidate higher than before"
        assert f"{moved}, {lower} lower" in text
    gained = int((before.i2t.best / after.i2t.best).argmax())
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
    text = read_page(page(found, found.table(), after, "title", names))
    moved = "2 of 4 queries rank their right candidate higher than before, 1 lower."
    assert text.count(moved) == 2
    for name, section in zip("IT", text.split("gained most")[1:], strict=True):
        gained, lost = section.split("greatest hubs")[0].split("lost most")
        assert re.findall(rf"{name}\d", gained) == [f"{name}1", f"{name}0"]
        assert re.findall(rf"{name}\d", lost) == [f"{name}2"]


def test_names_of_texts_are_split_at_newlines_only(saved):
    Path("captions.txt").write_text("a\u2028dog\x85\n" * (N * C), encoding="utf-8")
    names = ("--text-names", "captions.txt", "--report", "r.html")
    assert run("rerank", "sims.npy", "--methods", "fast", *names) == 0


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_without_the_extra_a_report_is_refused_before_the_work(missing, saved, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    assert run("rerank", "sims.npy", "--methods", "fast", "--report", "r.html") == 2
    out, err = capsys.readouterr()
    assert f"{missing} is missing; install itrloss with the extra 'report'" in err
    assert "RSUM" not in out
    assert run("rerank", "sims.npy", "--methods", "fast") == 0
