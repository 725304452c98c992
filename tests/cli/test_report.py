"""The report of ``itrloss rerank``: the greatest hubs, and the queries that gained or lost most."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from support.command_line import FAST, C, N, read_page, run

from itrloss import rerank
from itrloss.cli import comparison
from itrloss.cli.report import page
from itrloss.metrics import QueryResults, RetrievalResults, compare


def entry(name: str, ranks: list[int], base: comparison.Entry | None) -> comparison.Entry:
    """A method with these ranks of right candidates in both directions; 0 or no rank where there
    is none.
    """
    ids = torch.arange(300)
    all_ranks = torch.tensor(ranks + [0] * (300 - len(ranks)))
    queries = QueryResults(ids, all_ranks[:, None], ids[:, None], 300)
    results = RetrievalResults(queries, queries)
    if base is None:
        return comparison.Entry(name, results)
    changes = compare(results, base.results, samples=9)
    return comparison.Entry(name, results, "csls", rerank.CSLS(), True, changes=changes)


def test_gains_are_ratios_and_only_answered_queries_count():
    """A change from 20 to 2 is larger than one from 200 to 100. The fourth query has no right
    candidate.
    """
    before = entry("before", [200, 20, 3, 0, 5], None)
    after = entry("after", [100, 2, 9, 0, 5], before)
    found = comparison.SystemComparison([before, after], 9)
    names = [[f"{letter}{i}" for i in range(300)] for letter in "IT"]
    text = read_page(page(found, found.table(), "title", {}, after, names))
    moved = "2 of 4 queries rank their right candidate higher than before, 1 lower."
    assert text.count(moved) == 2
    for name, section in zip("IT", text.split("Gained most")[1:], strict=True):
        gained, lost = section.split("Greatest hubs")[0].split("Lost most")
        assert re.findall(rf"{name}\d", gained) == [f"{name}1", f"{name}0"]
        assert re.findall(rf"{name}\d", lost) == [f"{name}2"]


def test_captions_wrap_beside_their_numbers(saved):
    """A row is as wide as the screen, so that no rank is out of sight. Lines are split at newlines
    only.
    """
    caption = "a dog that runs\u2028along the shore\x85 " * 5
    Path("captions.txt").write_text(f"{caption}\n" * (N * C), encoding="utf-8")
    names = ("--text-names", "captions.txt", "--report", "r.html")
    assert run("rerank", "sims.npy", "--methods", "csls", *names) == 0
    cells = re.findall(r"<(t[hd][^>]*)>(?:<div>)?a dog", Path("r.html").read_text("utf-8"))
    assert cells and set(cells) == {'th class="text" scope="row"'}


def test_without_the_extra_a_report_is_refused_before_the_work(saved, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(*FAST, "--report", "r.html") == 2
    out, err = capsys.readouterr()
    assert "matplotlib" in err and "pip install 'itrloss[cli,files,report]'" in err
    assert "RSUM" not in out
    assert run(*FAST) == 0
