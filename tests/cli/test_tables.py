"""The table that compares methods: what it says, and its forms as text, LaTeX and HTML."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from support.command_line import scores
from support.stored import assert_stored

from itrloss.cli import tables
from itrloss.cli.comparison import compare_models
from itrloss.cli.tables import TESTED, Entry, p_text
from itrloss.files import read_reranked
from itrloss.metrics import (
    Comparison,
    QueryResults,
    RetrievalResults,
    compare,
    retrieval_results,
)


def made(i2t: object, t2i: object) -> RetrievalResults:
    """Results of as many images as texts, of ranks of the only right candidate."""
    sides = []
    for ranks in (i2t, t2i):
        of_queries = torch.as_tensor(ranks)[:, None]
        ids = torch.arange(len(of_queries))
        sides.append(QueryResults(ids, of_queries, torch.zeros_like(of_queries), len(ids)))
    return RetrievalResults(*sides)


PERFECT = made([1] * 5, [1] * 5)


def of_seed(seed: int, **options: int) -> RetrievalResults:
    return retrieval_results(torch.from_numpy(scores(seed)), **options)


# --- figures and p-values -------------------------------------------------------------------------


def test_recalls_that_cancel_out_are_no_difference():
    """One query goes from 20 to 1, three go to 8: the RSUM is the same in every sample that has one
    of the former for three of the latter.
    """
    base = torch.full((7,), 20)
    gained, lost = base.clone(), base.clone()
    gained[0] = 1  # R@1, R@5 and R@10
    lost[1:4] = 8  # R@10 three times
    found = compare(made(gained, base), made(lost, base), samples=3000)["rsum"]
    draws = torch.randint(7, (3000, 7), generator=torch.Generator().manual_seed(0))
    differences = 3 * (draws == 0).sum(1) - ((draws >= 1) & (draws <= 3)).sum(1)
    assert int((differences == 0).sum()) > 300
    tail = min(int((differences <= 0).sum()), int((differences >= 0).sum()))
    assert found.p_value == min(1.0, 2 * (tail + 1) / 3001)


@pytest.mark.parametrize("systems", [1, 4, 12])
def test_by_default_p_can_fall_below_a_thousandth(systems):
    samples = tables.samples_for(systems)
    tests = len(TESTED) * systems
    assert 2 * tests / (samples + 1) < 0.001 < 2 * tests / (samples / 1.01)


@pytest.mark.parametrize(
    ("p", "wanted"),
    [(1e-9, "<0.001"), (0.00099, "<0.001"), (0.001, "0.001"), (0.0361, "0.036"), (1.0, "1.000")],
)
def test_p_values_are_never_printed_as_zero(p, wanted):
    assert p_text(p) == wanted


def test_tables_are_those_that_were_read():
    """Of few and of many samples, where R@1 falls though RSUM rises, of hostile names, of changes
    that are nearly 0; as text of any width and of 60 letters, and in LaTeX.
    """
    worst, best = torch.full((30,), 20), torch.ones(30, dtype=torch.int64)
    ends = {"a": made(worst, worst), "b": made(best, best)}
    base = torch.tensor([1, 1, 20, 20, 20, 20])
    better = torch.tensor([1, 2, 2, 2, 20, 20])  # R@1 falls, R@5 and R@10 rise by two each
    worse = torch.tensor([1, 2, 20, 20, 20, 20])  # R@1 falls, and so does the RSUM
    falls = {
        "base": made(base, base),
        "i": made(better, base),
        "t": made(base, better),
        "up": made(base.clamp(max=3), base),
        "down": made(worse, base),
        "same": made(base, base),
    }
    ascii_letters = "".join(map(chr, range(32, 127)))
    letters = {ascii_letters: of_seed(0), "模 é≤→†γλ": of_seed(1), "[b": of_seed(2)}
    changes = dict.fromkeys(TESTED, Comparison(-0.04, -1.25, 0.04, 0.5))
    amounts = {"t2i_r1": Comparison(-0.004, -1, 1, 1.0), "rsum": Comparison(0.02, -1, 1, 1.0)}
    rows = [Entry("a", PERFECT)]
    rows.append(Entry("b", PERFECT, changes=changes))
    rows.append(Entry("c", PERFECT, changes=changes | amounts))
    text = ""
    for table in (
        compare_models(ends, samples=99).table(),
        compare_models(ends).table(),
        compare_models(falls, samples=50).table(),
        compare_models(letters, transductive=[ascii_letters], samples=50).table(ks=(1, 20)),
        tables.SystemComparison(rows, 9).table(),
    ):
        text += f"{tables.text(table)}\n{tables.text(table, 60)}\n{tables.latex(table)}\n"
    assert_stored("tables", re.sub(" +$", "", text, flags=re.M))


def test_the_best_of_each_column_is_bold():
    table = tables.frame(
        ["a<b", "c"], [{("", "x"): 1.04, ("", "y"): "9"}, {("", "x"): 1.0, ("", "y"): "8"}]
    )
    html = tables.styled(table, "html", "font-weight: bold").set_uuid("t").to_html()
    assert "#T_t_row0_col0, #T_t_row1_col0 {" in html and "a&lt;b" in html  # equal as printed
    latex = tables.latex(tables.Table([table]))
    assert latex.count(r"\textbf{1.0}") == 2 and "9" in latex and r"\textbf{9" not in latex
    assert "textbf" not in tables.latex(tables.Table([table[:1]]))


def test_re_ranked_scores_are_told_from_others(saved):
    np.savez("r.npz", scores())
    assert read_reranked("r.npz") is None
    assert read_reranked("sims.npy") is None
    np.savez("r.npz", i2t=scores(), t2i=scores(), transductive=np.array([True, True]))
    assert read_reranked("r.npz") is not None


@pytest.mark.parametrize(
    ("results", "options", "message"),
    [
        (["a"], {}, r"results: expected at least two models \(.+\), got 1"),
        (["a", "b"], {"transductive": ["c"]}, "transductive: expected 'a' or 'b'"),
        (["a", "b"], {"samples": 0}, "samples: expected at least 1, got 0"),
    ],
)
def test_the_library_refuses_the_same(results, options, message):
    with pytest.raises(ValueError, match=message):
        compare_models(dict.fromkeys(results, PERFECT), **options)
