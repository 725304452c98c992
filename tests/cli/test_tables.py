"""The table that compares methods: what it says, and its forms as text, LaTeX and HTML."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import C, N, pairs, read_page, run, scores

from itrloss import Similarity, SuspiciousInputWarning
from itrloss.cli import tables
from itrloss.cli.comparison import (
    CALIBRATED,
    METHODS,
    TITLES,
    Entry,
    compare_models,
    compare_rerankers,
)
from itrloss.cli.report import models_page, page
from itrloss.cli.tables import TESTED, Row, Table, p_text
from itrloss.files import read_reranked
from itrloss.metrics import (
    Comparison,
    QueryResults,
    RetrievalResults,
    compare,
    compare_all,
    retrieval_results,
)
from itrloss.rerank import FastReranker

IDS = torch.arange(N), torch.arange(N * C) // C
BANKS = tuple(torch.from_numpy(x) for x in pairs(2))


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


def similarity(seed: int = 0) -> Similarity:
    return Similarity(*map(torch.from_numpy, pairs(seed)), *IDS)


def notes_of(table: Table, start: str) -> list[str]:
    return [note for note in table.notes if note.startswith(start)]


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
    ("p", "least", "wanted"),
    [
        (2 / 2001, 2 / 2001, "< 0.001"),
        (1e-9, 0.0, "< 0.001"),
        (0.0361, 0.0361, "≤ 0.037"),  # a bound is rounded up
        (0.036, 0.036, "≤ 0.036"),
        (0.0361, 0.001, "0.036"),
        (0.001, 0.0009, "0.001"),
        (1.0, 1.0, "1.000"),
    ],
)
def test_p_values_are_never_printed_as_zero(p, least, wanted):
    assert p_text(p, least) == wanted


def test_at_the_floor_of_few_samples_p_is_a_bound():
    worst, best = torch.full((30,), 20), torch.ones(30, dtype=torch.int64)
    models = {"a": made(worst, worst), "b": made(best, best)}
    for samples, wanted in ((99, "≤ 0.060"), (None, "< 0.001")):
        recalls, changes = compare_models(models, samples=samples).table().frames
        assert recalls.loc["b"].iloc[-1] == wanted
        assert changes.loc["b"].iloc[1::2].tolist() == [wanted, wanted]


def shown(change: Comparison, least: float) -> list[str]:
    """A change with its interval, and its p, as the table has them."""
    difference, low, high = (f"{x:+.1f}".replace("-0.0", "+0.0") for x in change[:3])
    return [f"{difference} ({low}, {high})", p_text(change.p_value, least)]


def test_the_table_has_the_figures_of_the_library_and_marks_the_best():
    models = {"base": of_seed(0), "a": of_seed(1), "b": of_seed(2)}
    recalls, changes = compare_models(models, transductive=["b"], samples=500).table().frames
    wanted = compare_all(models, baseline="base", figures=TESTED, samples=500)
    least = 6 * 2 / 501
    figures = [f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10)]
    assert list(recalls.index) == ["base", "a", "b†"]
    assert list(changes.index) == ["a", "b†"]
    for row, (name, results) in zip(tables.shown(recalls).values, models.items(), strict=True):
        texts = [f"{results.metrics()[figure]:.1f}" for figure in (*figures, "rsum")]
        texts += ["", ""] if name == "base" else shown(wanted[name]["rsum"], least)
        assert list(row) == texts
    for row, change in zip(changes.values, wanted.values(), strict=True):
        assert list(row) == shown(change["i2t_r1"], least) + shown(change["t2i_r1"], least)
    for (_, cells), (_, marks) in zip(
        tables.shown(recalls).items(), tables.best(recalls).items(), strict=True
    ):
        is_figure = cells.name[1] in ("RSUM", "R@1", "R@5", "R@10")
        highest = cells.astype(float) == cells.astype(float).max() if is_figure else [False] * 3
        assert list(marks) == list(highest)
    assert not tables.best(recalls.iloc[:1]).values.any()  # of one row
    changed = {name: Comparison(-0.04, -1.25, 0.04, 0.5) for name in TESTED}
    rows = [Row("a", PERFECT), Row("b", PERFECT, changed)]
    table = tables.comparison_table(rows, samples=9)
    assert table.frames[1].loc["b"].iloc[0] == "+0.0 (-1.2, +0.0)"


# --- notes ----------------------------------------------------------------------------------------


def test_the_notes_say_what_was_corrected_over_what():
    table = compare_models(dict.fromkeys("abc", PERFECT), samples=50).table()
    (note,) = table.notes  # no dagger, no warning
    assert "Holm's method over the 6 tests" in note
    assert "(50 samples)" in note


def test_a_warning_where_r_at_1_falls_though_rsum_rises():
    base = torch.tensor([1, 1, 20, 20, 20, 20])
    better = torch.tensor([1, 2, 2, 2, 20, 20])  # R@1 falls, R@5 and R@10 rise by two each
    worse = torch.tensor([1, 2, 20, 20, 20, 20])  # R@1 falls, and so does the RSUM
    models = {
        "base": made(base, base),
        "i": made(better, base),
        "t": made(base, better),
        "up": made(base.clamp(max=3), base),
        "down": made(worse, base),
        "same": made(base, base),
    }
    assert notes_of(compare_models(models, samples=50).table(), "Warning") == [
        "Warning: i: R@1 of image→text falls by 16.7, though RSUM rises by 50.0.",
        "Warning: t: R@1 of text→image falls by 16.7, though RSUM rises by 50.0.",
    ]
    changes = {name: Comparison(0.0, -1, 1, 1.0) for name in TESTED}
    changes["i2t_r1"] = Comparison(-0.004, -1, 1, 1.0)
    changes["rsum"] = Comparison(0.02, -1, 1, 1.0)
    table = tables.comparison_table([Row("a", PERFECT), Row("b", PERFECT, changes)], samples=9)
    assert table.notes[-1].endswith("falls by 0.004, though RSUM rises by 0.02.")


@pytest.mark.parametrize(
    ("method", "banks", "marked"),
    [
        ("csls", (None, None), ["csls†"]),
        ("csls", BANKS, ["csls†", "csls, bank"]),
        ("csls", (BANKS[0], None), ["csls†", "csls, bank (image→text)†"]),
        ("csls", (None, BANKS[1]), ["csls†", "csls, bank (text→image)†"]),
        ("qb-norm", BANKS, ["qb-norm, bank"]),
    ],
)
def test_methods_that_look_at_other_test_queries_get_a_dagger(method, banks, marked):
    table = compare_rerankers(similarity(), (method,), banks, samples=20).table(titles=False)
    assert list(table.frames[0].index) == ["no re-ranking", *marked]
    daggers = notes_of(table, "† looks at the other test queries")
    assert len(daggers) == any("†" in name for name in marked)


GUESS = "--image-ids, --text-ids: without them, 9 images and 198 texts are 22 consecutive texts"


# pytest shows what Python hides: matplotlib's calls of NumPy, in some versions of both
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "rerank s.npy --val s.npy --methods fast csls",
            [
                "--val: it has items of the test set",
                GUESS,
                "--val: --val-image-ids, --val-text-ids: without them, 9 images",
            ],
        ),
        ("compare s.npy s.npy --names a b", ["b: it has the same ranks as a", GUESS]),
    ],
)
def test_warnings_of_the_input_are_notes_in_all_formats(command, said, saved, capsys):
    np.save("s.npy", np.random.default_rng(0).random((9, 198)))
    options = ("--samples", 9, "--latex", "t.tex", "--report", "r.html")
    assert run(*command.split(), *options) == 0
    out, err = capsys.readouterr()
    assert err.count("\n") == len(said)
    page = read_page(Path("r.html").read_text(encoding="utf-8"))
    for text in (" ".join(out.split()), Path("t.tex").read_text(encoding="utf-8"), page):
        for warning in said:
            assert len(re.findall(f"Warning: {warning}", text)) == 1
            assert len(re.findall(f"^itrloss .*: {warning}", err, re.M)) == 1
    assert ("chosen on pairs of the test set." in " ".join(out.split())) == ("--val" in command)


def test_scores_that_are_no_cosines_are_said_once_of_all_methods(saved, capsys):
    np.save("s.npy", 100 * scores())
    of = "the scales of (.*) are for cosine similarities. Divide logits by"
    assert run("rerank", "s.npy", "--samples", 9, "--out", "o.npz") == 0
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert re.findall(of, line) == ["fast, inverted-softmax, dual-softmax, sinkhorn"]
    assert len(re.findall(of, " ".join(out.split()))) == 1
    assert run("rerank", "s.npy", "--i2t", 0.3, 0.3, "--methods", "fast", "csls") == 0
    assert not capsys.readouterr().err


def test_scales_that_were_chosen_without_the_bank_say_so():
    bank = torch.from_numpy(scores(2))
    sims = [Similarity.from_scores(torch.from_numpy(scores(i)), *IDS) for i in range(2)]
    table = compare_rerankers(sims[0], ("fast",), (bank, None), sims[1], samples=9).table()
    by_test, by_bank = notes_of(table, "Scales")
    assert ", chosen on held-out pairs." in by_test
    words = "held-out pairs without the bank, whose scores are of the test set's candidates."
    assert f", chosen on {words}" in by_bank


@pytest.mark.parametrize(
    ("i2t", "t2i", "ends"),
    [
        ((7, 57), (20, 20), ""),
        ((5, 57), (20, 5), "5 is the smallest."),
        ((7, 57), (20, 80), "80 is the largest."),
        ((5, 80), (5, 80), "5 is the smallest and 80 is the largest."),
    ],
)
def test_scales_at_an_end_of_those_tried_are_named(i2t, t2i, ends):
    entry = Entry(CALIBRATED, FastReranker(i2t, t2i), PERFECT, 0.0, chosen_on="held-out pairs")
    words = f" Of the values that were tried, {ends}" if ends else ""
    assert entry.scales.endswith(f", chosen on held-out pairs.{words}")


def test_scales_at_an_end_are_named_by_the_table_alone(recwarn):
    logits = [Similarity.from_scores(100 * torch.from_numpy(scores(i)), *IDS) for i in (0, 1)]
    found = compare_rerankers(logits[0], ("fast",), validation=logits[1], samples=9)
    assert "5 is the smallest" in found.table().notes[-1]
    assert not [w for w in recwarn if "of the values tried" in str(w.message)]


def test_only_pairs_beside_the_test_set_are_called_held_out():
    sim = similarity()
    with pytest.warns(SuspiciousInputWarning, match="^validation: it has items of the test set"):
        found = compare_rerankers(sim, ("fast",), validation=sim, samples=9)
    assert ", chosen on pairs of the test set." in found.table().notes[-1]


def test_every_method_has_a_title_without_a_code_name():
    assert set(METHODS) < set(TITLES)
    assert len(set(TITLES.values())) == len(TITLES)
    for title in TITLES.values():
        assert not re.search("[_<>()]|Reranker|itrloss", title)


def test_all_calibrated_methods_print_their_scales(saved, capsys):
    banks = ["--bank-images", "bank_images.npy", "--bank-texts", "bank_texts.npy"]
    val = ["--val", "val_images.npy", "val_texts.npy", "--methods", "fast", "--samples", 50]
    files = ["--latex", "t.tex", "--report", "r.html"]
    assert run("eval", "images.npy", "texts.npy", *val, *banks, *files) == 0
    halves = tuple(bank.half().float() for bank in BANKS)
    found = compare_rerankers(similarity(), ("fast",), halves, similarity(1), samples=9)
    chosen = {entry.label: entry.reranker for entry in found.entries if entry.name == CALIBRATED}
    assert list(chosen) == ["fast, calibrated", "fast, calibrated, bank"]
    report = read_page(Path("r.html").read_text(encoding="utf-8"))
    latex = in_unicode(Path("t.tex").read_text(encoding="utf-8"))
    out = " ".join(capsys.readouterr().out.split())
    for name, method in chosen.items():
        assert isinstance(method, FastReranker)
        i2t = "γ1 = {:g}, γ2 = {:g} (image→text)".format(*method.i2t)
        t2i = "λ1 = {:g}, λ2 = {:g} (text→image)".format(*method.t2i)
        assert f"Scales of {name}: {i2t}; {t2i}, chosen on held-out pairs." in out
        title = name.replace("fast", "Fast Re-ranking")
        for text in (report, latex):
            assert f"Scales of {title}: {i2t}; {t2i}, chosen" in text


# --- formats --------------------------------------------------------------------------------------


def test_rows_of_a_terminal_are_not_broken():
    models = {"base": of_seed(0), "模 model of a long name": of_seed(1)}
    table = compare_models(models, transductive=["base"], samples=20).table()
    wide = tables.text(table).split("\n")
    heads = wide[1]
    for name, figures in tables.shown(table.frames[0]).iterrows():
        line = next(line for line in wide if line.startswith(name))
        for cell, end in zip(figures[:7], re.finditer(r"R\S+", heads), strict=True):
            place = end.end() - name.count("模")  # which takes two columns
            assert line[place - len(cell) : place] == cell
    narrow = tables.text(table, 60).split("\n")
    assert max(map(len, narrow)) <= 60
    assert sorted(" ".join(wide).split()) != sorted(" ".join(narrow).split())  # names again
    assert set(" ".join(wide).split()) == set(" ".join(narrow).split()) - {"\\"}


COMMANDS = {
    r"\ensuremath{\to}": "→",
    r"\ensuremath{\le}": "≤",
    r"\ensuremath{^\dagger}": "†",
    r"\ensuremath{\gamma}": "γ",
    r"\ensuremath{\lambda}": "λ",
    r"\ensuremath{<}": "<",
    r"\ensuremath{>}": ">",
    r"\ensuremath{|}": "|",
    r"\textbackslash{}": "\\",
    r"\textasciitilde{}": "~",
    r"\textasciicircum{}": "^",
    "{[}": "[",
    "{*}": "*",
    **{"\\" + letter: letter for letter in "&%$#_{}"},
}
_COMMAND = re.compile("|".join(map(re.escape, COMMANDS)))


def in_unicode(latex: str) -> str:
    """Return text without the commands that stand for letters."""
    return _COMMAND.sub(lambda found: COMMANDS[found[0]], latex)


def read_latex(latex: str) -> list[list[list[str]]]:
    """Return the cells of each tabular, after a check that no letter is a command by mistake."""
    found = []
    tabular = r"\\begin{tabular}{(l r*)}\n\\toprule\n(.*?)\\bottomrule\n\\end{tabular}".replace(
        " ", ""
    )
    for columns, body in re.findall(tabular, latex, re.S):
        rows = []
        for line in body.replace("\\midrule\n", "").split(" \\\\\n")[:-1]:
            bare = re.sub(
                r"\\multicolumn{\d}{c}|\\textbf|\$[-+][\d.]+\$", "", _COMMAND.sub("", line)
            )
            assert not re.search(r"[\\$#%_^~\[*<>|]|[^ ]&|&[^ ]", bare), line
            assert bare.count("{") == bare.count("}")
            cells = re.split(r"(?<!\\)&", line)
            spans = [int(x) - 1 for x in re.findall(r"\\multicolumn{(\d)}", line)]
            assert len(cells) + sum(spans) == len(columns)
            rows.append([cell.strip() for cell in cells])
        found.append(rows)
    begun, ended = (re.findall(rf"\\{word}{{(\w+)}}", latex) for word in ("begin", "end"))
    assert begun == ended
    return found


def expect_latex(table: Table) -> None:
    """Check that the table in LaTeX is that of the text."""
    found = read_latex(tables.latex(table))
    for rows, frame in zip(found, table.frames, strict=True):
        heads = ["", *frame.columns.get_level_values(1)]
        texts, marks = tables.shown(frame), tables.best(frame)
        assert [in_unicode(cell) for cell in rows[1]] == heads
        for row, name, figures, best in zip(
            rows[2:], frame.index, texts.values, marks.values, strict=True
        ):
            one_line = "".join(x if x.isprintable() else " " for x in name)
            assert in_unicode(row[0]).strip() == one_line.strip()
            for cell, figure, is_best in zip(row[1:], figures, best, strict=True):
                bare = in_unicode(cell).replace("$", "")
                assert bare == (rf"\textbf{{{figure}}}" if is_best else figure)
                assert not re.search(r"(?<!\$)[-+]\d", cell)  # minus signs, not hyphens


@given(st.lists(st.text(min_size=1), min_size=2, max_size=3, unique=True))
@settings(deadline=None, max_examples=60)
def test_the_latex_table_is_that_of_the_text_by_any_name(names):
    models = {name: of_seed(i) for i, name in enumerate(names)}
    expect_latex(compare_models(models, transductive=names[:1], samples=50).table(ks=(1, 20)))


def test_letters_that_are_commands_are_escaped():
    """Names of models and methods have them."""
    name = "a_1 & 50% #2 {x} $y$ \\z ~^ [*]<>|→"
    models = {name: of_seed(0), "[b": of_seed(1)}
    table = compare_models(models, samples=5).table()
    expect_latex(table)
    latex = tables.latex(table)
    assert r"a\_1 \& 50\% \#2 \{x\} \$y\$ \textbackslash{}z \textasciitilde{}" in latex
    assert "\n{[}b &" in latex and "textbf" in latex


def expect(html: str, table: Table) -> None:
    """Check that a page has each row of the table, figure behind figure, and all notes."""
    text = bare(read_page(html))
    for frame in table.frames:
        assert bare("".join(frame.columns.get_level_values(1))) in text
        for name, figures in tables.shown(frame).iterrows():
            assert bare(f"{name}{''.join(figures).replace('-', '−')}") in text
    for note in table.notes:
        assert bare(note) in text
    frame = table.frames[0]
    best = tables.shown(frame).values[tables.best(frame).values]
    assert re.findall('<b class="strong">(.*?)</b>', html) == best.tolist()


def bare(text: str) -> str:
    return re.sub(r"\s", "", text)


def test_reports_have_the_same_tables():
    sim = similarity()
    found = compare_rerankers(sim, ("fast", "csls"), validation=similarity(1), samples=200)
    names = [[str(i) for i in range(size)] for size in sim.shape]
    table = found.table(ks=(1, 3), timed=True, notes=["Warning: <a>."])
    html = page(found, table, found.entries[1], "title", names)
    assert "skewness" in read_page(html)
    expect(html, table)
    models = {"<a>": of_seed(0), "b & c": of_seed(1)}
    compared = compare_models(models, transductive=["b & c"], samples=200)
    html = models_page(compared.rows, compared.table(), "title", "about")
    assert "Change of the RSUM, with its interval" in read_page(html)
    expect(html, compared.table())


# --- several models -------------------------------------------------------------------------------


def test_the_command_compares_models(saved, capsys):
    paths = ["run_1/sims.npy", "run_2/sims.npy", "other.npy"]
    for seed, path in enumerate(paths):
        Path(path).parent.mkdir(exist_ok=True)
        np.save(path, scores(seed))
    options = ("--latex", "t.tex", "--report", "r.html", "--metrics", "m.csv", "--samples", 300)
    assert run("compare", *paths, *options, "--transductive", "run_2/sims") == 0
    out = capsys.readouterr().out
    results = {"run_1/sims": of_seed(0), "run_2/sims": of_seed(1), "other": of_seed(2)}
    table = compare_models(results, transductive=["run_2/sims"], samples=300).table()
    assert out.startswith(f"{N} images, {N * C} texts (5 an image, one behind the other)\n")
    assert tables.text(table) in out and "run_2/sims†" in out
    assert "written: m.csv, t.tex, r.html" in out
    assert Path("t.tex").read_text(encoding="utf-8") == tables.latex(table)
    expect(Path("r.html").read_text(encoding="utf-8"), table)
    metrics = pd.read_csv("m.csv", index_col="method")
    assert list(metrics.index) == list(results)
    for name, own in results.items():
        assert metrics.loc[name].to_dict() == pytest.approx(own.metrics())

    ids = ("--image-ids", "i.npy", "--text-ids", "t.npy")
    options = ("--names", "base", "a", "b", "--ks", 2, 3, "--folds", 3, "--samples", 20)
    models = {name: of_seed(seed, folds=3) for seed, name in enumerate(("base", "a", "b"))}
    wanted = tables.text(compare_models(models, samples=20).table((2, 3)))
    assert run("compare", *paths, *ids, *options) == 0
    out = capsys.readouterr().out
    assert "by the ids given" in out and "in 3 parts" in out and wanted in out
    for path in paths:
        np.save(path, np.load(path).T)
    assert run("compare", *paths, "--transpose", *options) == 0
    assert wanted in capsys.readouterr().out


def test_re_ranked_scores_are_told_from_others(saved):
    np.savez("r.npz", scores())
    assert read_reranked("r.npz") is None
    assert read_reranked("sims.npy") is None
    np.savez("r.npz", i2t=scores(), t2i=scores(), transductive=np.array([True, True]))
    assert read_reranked("r.npz") is not None


@pytest.mark.parametrize(
    ("results", "options", "message"),
    [
        (["a"], {}, "results: expected at least two models, got 1"),
        (["a", "b"], {"transductive": ["c"]}, "transductive: expected 'a' or 'b'"),
        (["a", "b"], {"samples": 0}, "samples: expected at least 1, got 0"),
    ],
)
def test_the_library_refuses_the_same(results, options, message):
    with pytest.raises(ValueError, match=message):
        compare_models(dict.fromkeys(results, PERFECT), **options)
