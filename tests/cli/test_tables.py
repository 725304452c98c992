"""The table that compares methods: its statistics, and its forms as text, LaTeX and HTML."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.command_line import C, N, Page, pairs, refused, run, scores

from itrloss import Similarity, SuspiciousInputWarning, tables
from itrloss.comparison import (
    CALIBRATED,
    METHODS,
    TITLES,
    Entry,
    compare_models,
    compare_rerankers,
)
from itrloss.comparison.report import models_page, page
from itrloss.files import read_reranked
from itrloss.metrics import (
    Comparison,
    QueryResults,
    RetrievalResults,
    compare,
    compare_all,
    confidence_intervals,
    retrieval_results,
)
from itrloss.rerank import CSLS, FastReranker
from itrloss.tables import TESTED, Cell, Grid, Row, Table, p_text

ARROWS = ("image→text", "text→image")


def made(i2t: object, t2i: object) -> RetrievalResults:
    """Results of as many images as texts, of ranks of the only right candidate."""
    sides = []
    for ranks in (i2t, t2i):
        of_queries = torch.as_tensor(ranks)[:, None]
        ids = torch.arange(len(of_queries))
        best = torch.zeros_like(of_queries)
        sides.append(QueryResults(ids, of_queries, best, len(ids)))
    return RetrievalResults(*sides)


def perfect() -> RetrievalResults:
    """Results of a model that finds every right candidate."""
    return made([1] * 5, [1] * 5)


def of_seed(seed: int, **options: int) -> RetrievalResults:
    """Results of random scores."""
    given_scores = torch.from_numpy(scores(seed))
    return retrieval_results(given_scores, **options)


def read_page(html: str) -> str:
    """The text of a page whose elements are all closed."""
    parser = Page()
    parser.feed(html)
    assert parser.open == []
    return parser.text


def chance(generator: np.random.Generator, n: int, difficulty: np.ndarray) -> RetrievalResults:
    """A model whose ranks depend on how difficult an image is, and on chance."""
    luck = generator.exponential(6, size=(2, n))
    i2t, t2i = 1 + (difficulty + luck).astype(int)
    return made(i2t, t2i)


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_equal_models_differ_significantly_in_a_twentieth_of_cases():
    generator = np.random.default_rng(0)
    cases = 500
    significant = dict.fromkeys(TESTED, 0)
    for case in range(cases):
        difficulty = generator.exponential(3, size=150)
        first = chance(generator, 150, difficulty)
        second = chance(generator, 150, difficulty)
        found = compare(first, second, samples=400, seed=case)
        for name in TESTED:
            significant[name] += found[name].p_value < 0.05
    # 5 % of 500 with four standard deviations
    for name, count in significant.items():
        assert 0.011 * cases <= count <= 0.089 * cases, name


def test_one_of_several_equal_models_differs_in_at_most_a_twentieth_of_cases():
    generator = np.random.default_rng(1)
    cases = 200
    corrected = 0
    uncorrected = 0
    for _ in range(cases):
        difficulty = generator.exponential(3, size=100)
        models = {str(i): chance(generator, 100, difficulty) for i in range(5)}
        comparison = compare_models(models, samples=800)
        p_values = []
        for row in comparison.rows[1:]:
            p_values += [change.p_value for change in row.changes.values()]
        assert len(p_values) == 4 * len(TESTED)
        smallest = min(p_values)
        corrected += smallest < 0.05
        uncorrected += smallest < 0.05 * 12  # the smallest is 12 times what it was
    assert corrected <= 0.1 * cases < 0.15 * cases < uncorrected


def shares_of_images(model: RetrievalResults) -> np.ndarray:
    """The share of each image in the RSUM."""
    hits = [side.per_query()[f"r{k}"] for side in model.ways.values() for k in (1, 5, 10)]
    return 100 * torch.stack(hits).sum(0).numpy()


def expect_scipys(found: tuple[float, float], values: np.ndarray) -> None:
    """Check an interval of a mean by SciPy's bootstrap; both are random."""
    stats = pytest.importorskip("scipy.stats")
    options = {"method": "percentile", "n_resamples": 20_000, "vectorized": True}
    resampled = stats.bootstrap((values,), np.mean, random_state=0, **options)
    wanted = resampled.confidence_interval
    width = wanted.high - wanted.low
    assert found == pytest.approx((wanted.low, wanted.high), abs=0.05 * width)


def test_intervals_are_those_of_scipy():
    generator = np.random.default_rng(2)
    first = chance(generator, 120, generator.exponential(3, size=120))
    second = chance(generator, 120, generator.exponential(3, size=120))
    alone = confidence_intervals(first, samples=20_000)["rsum"]
    expect_scipys(alone, shares_of_images(first))
    differences = shares_of_images(first) - shares_of_images(second)
    change = compare(first, second, samples=20_000)["rsum"]
    assert change.difference == pytest.approx(float(differences.mean()))
    expect_scipys((change.low, change.high), differences)


def test_recalls_that_cancel_out_are_no_difference():
    """One query goes from 1 to 6, which loses R@1 and R@5; another goes from 11 to 1, a third one
    back to 11 from 6: the RSUM is the same in every sample that has them equally often.
    """
    size = 7
    base = torch.full((size,), 20)
    gained = base.clone()
    gained[0] = 1  # R@1, R@5 and R@10
    lost = base.clone()
    lost[1:4] = 8  # R@10 three times
    found = compare(made(gained, base), made(lost, base), samples=3000)["rsum"]
    # the same by whole numbers
    g = torch.Generator().manual_seed(0)
    draws = torch.randint(size, (3000, size), generator=g)
    times_gained = (draws == 0).sum(1)
    times_lost = ((draws >= 1) & (draws <= 3)).sum(1)
    differences = 3 * times_gained - times_lost
    not_above = int((differences <= 0).sum())
    not_below = int((differences >= 0).sum())
    equal = int((differences == 0).sum())
    assert equal > 300
    tail = min(not_above, not_below)
    assert found.p_value == min(1.0, 2 * (tail + 1) / 3001)


def test_figures_alone_have_the_values_of_all():
    generator = np.random.default_rng(3)
    systems = {}
    for name in ("0", "1", "2"):
        difficulty = generator.exponential(3, size=40)
        systems[name] = chance(generator, 40, difficulty)
    options = {"samples": 200, "seed": 4, "level": 0.8}
    found = compare_all(systems, baseline="1", figures=("t2i_mrr", "rsum"), **options)
    assert list(found) == ["0", "2"]
    for name, every in found.items():
        single = compare(systems[name], systems["1"], **options)
        for figure, change in every.items():
            assert change[:3] == pytest.approx(single[figure][:3])
    with pytest.raises(ValueError, match=r"figures.*i2t_r2"):
        compare_all(systems, baseline="1", figures=("i2t_r1",), ks=(2,))


@pytest.mark.parametrize("systems", [1, 4, 12])
def test_by_default_p_can_fall_below_a_thousandth(systems):
    tests = len(TESTED) * systems
    samples = tables.samples_for(systems)
    assert 2 * tests / (samples + 1) < 0.001 < 2 * tests / (samples / 1.01)


def test_p_values_are_never_printed_as_zero():
    assert p_text(2 / 2001, 2 / 2001) == "< 0.001"
    assert p_text(1e-9, 0.0) == "< 0.001"
    assert p_text(0.0361, 0.0361) == "≤ 0.037"  # a bound is rounded up
    assert p_text(0.036, 0.036) == "≤ 0.036"
    assert p_text(0.0361, 0.001) == "0.036"
    assert p_text(0.001, 0.0009) == "0.001"
    assert p_text(1.0, 1.0) == "1.000"


def test_differences_have_a_sign_and_no_negative_zero():
    change = Comparison(-0.04, -1.25, 0.04, 0.5)
    assert tables._change_cells(change, 0.001)[0].text == "+0.0 (-1.2, +0.0)"


def test_at_the_floor_of_few_samples_p_is_a_bound():
    worst = torch.full((30,), 20)
    best = torch.ones_like(worst)
    models = {"a": made(worst, worst), "b": made(best, best)}
    for samples, wanted in ((99, "≤ 0.060"), (None, "< 0.001")):
        recalls, changes = compare_models(models, samples=samples).table().grids
        _, of_recalls = recalls.rows[1]
        assert of_recalls[-1].text == wanted
        _, of_changes = changes.rows[0]
        p_values = [cell.text for cell in of_changes[1::2]]
        assert p_values == [wanted, wanted]


# --- what is in the table -------------------------------------------------------------------------


IDS = torch.arange(N), torch.arange(N * C) // C


def plain_similarity(seed: int = 0) -> Similarity:
    """The similarity of random images and texts."""
    images, texts = (torch.from_numpy(x) for x in pairs(seed))
    return Similarity(images, texts, *IDS)


def test_the_table_has_the_figures_of_the_library():
    models = {"base": of_seed(0), "a": of_seed(1), "b": of_seed(2)}
    comparison = compare_models(models, transductive=["b"], samples=500)
    recalls, changes = comparison.table().grids
    wanted = compare_all(models, baseline="base", figures=TESTED, samples=500)
    least = 6 * 2 / 501

    assert [name for name, _ in recalls.rows] == ["base", "a", "b†"]
    names = [f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10)]
    for (_, cells), (name, results) in zip(recalls.rows, models.items(), strict=True):
        metrics = results.metrics()
        texts = [f"{metrics[x]:.1f}" for x in (*names, "rsum")]
        texts += ["", ""] if name == "base" else shown(wanted[name]["rsum"], least)
        assert [cell.text for cell in cells] == texts

    assert [name for name, _ in changes.rows] == ["a", "b†"]
    for (_, cells), changed in zip(changes.rows, wanted.values(), strict=True):
        texts = shown(changed["i2t_r1"], least) + shown(changed["t2i_r1"], least)
        assert [cell.text for cell in cells] == texts


def test_the_best_of_a_column_are_marked():
    models = {"base": of_seed(0), "a": of_seed(1), "b": of_seed(2)}
    recalls, _ = compare_models(models, samples=20).table().grids
    for i in range(7):
        column = [cells[i] for _, cells in recalls.rows]
        highest = max(float(cell.text) for cell in column)
        for cell in column:
            assert cell.best == (float(cell.text) == highest)


def shown(change: Comparison, least: float) -> list[str]:
    """A change with its interval, and its p, as the table has them."""
    signed = [f"{x:+.1f}".replace("-0.0", "+0.0") for x in change[:3]]
    difference, low, high = signed
    return [f"{difference} ({low}, {high})", p_text(change.p_value, least)]


def test_the_notes_say_what_was_corrected_over_what():
    same = perfect()
    comparison = compare_models({"a": same, "b": same, "c": same}, samples=50)
    (note,) = comparison.table().notes  # no dagger, no warning
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
    table = compare_models(models, samples=50).table()
    warnings = [note for note in table.notes if note.startswith("Warning")]
    assert warnings == [
        "Warning: i: R@1 of image→text falls by 16.7, though RSUM rises by 50.0.",
        "Warning: t: R@1 of text→image falls by 16.7, though RSUM rises by 50.0.",
    ]
    assert "falls by 16.7" in tables.text(table)


def test_small_falls_are_not_printed_as_zero():
    changes = {
        "i2t_r1": Comparison(-0.004, -1, 1, 1.0),
        "t2i_r1": Comparison(0.0, -1, 1, 1.0),
        "rsum": Comparison(0.02, -1, 1, 1.0),
    }
    same = perfect()
    found = tables.comparison_table([Row("a", same), Row("b", same, changes)], samples=9)
    assert found.notes[-1].endswith("falls by 0.004, though RSUM rises by 0.02.")


def test_methods_that_look_at_other_test_queries_get_a_dagger():
    sim = plain_similarity()
    images, texts = (torch.from_numpy(x) for x in pairs(2))
    cases = (
        ((None, None), ["csls†"]),
        ((images, texts), ["csls†", "csls, bank"]),
        ((images, None), ["csls†", "csls, bank (image→text)†"]),
        ((None, texts), ["csls†", "csls, bank (text→image)†"]),
    )
    for banks, marked in cases:
        comparison = compare_rerankers(sim, ("csls",), banks, samples=20)
        found = comparison.table(titles=False)
        names = [name for name, _ in found.grids[0].rows]
        assert names == ["no re-ranking", *marked]
        about_daggers = "† looks at the other test queries"
        notes = [note for note in found.notes if note.startswith(about_daggers)]
        assert len(notes) == 1
    alone = compare_rerankers(sim, ("qb-norm",), (images, texts), samples=20)
    for note in alone.table().notes:
        assert "†" not in note


# pytest shows what Python hides: matplotlib's calls of NumPy, in some versions of both
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_warnings_of_the_input_are_notes_in_all_formats(tmp_path, capsys):
    path = tmp_path / "s.npy"
    latex, report = tmp_path / "t.tex", tmp_path / "r.html"
    np.save(path, np.random.default_rng(0).random((9, 198)))
    options = ("--methods", "fast", "csls", "--samples", 9, "--latex", latex, "--report", report)
    assert run("rerank", path, "--val", path, *options) == 0
    out, err = capsys.readouterr()
    of_validation = "--val: --val-image-ids, --val-text-ids: without them, 9 images"
    said = ["--val: it has items of the test set", GUESS, of_validation]
    expect_warnings(err, out, latex, report, said)
    assert "chosen on pairs of the test set." in " ".join(out.split())
    assert run("compare", path, path, "--names", "a", "b", *options[3:]) == 0
    out, err = capsys.readouterr()
    expect_warnings(err, out, latex, report, ["b: it has the same ranks as a", GUESS])


def test_scores_that_are_no_cosines_are_said_once_of_all_methods(tmp_path, capsys):
    path, out = tmp_path / "s.npy", tmp_path / "o.npz"
    np.save(path, 100 * scores())
    of = "the scales of (.*) are for cosine similarities. Divide logits by"
    assert run("rerank", path, "--samples", 9, "--out", out) == 0
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    (names,) = re.findall(of, line)
    assert names == "fast, inverted-softmax, dual-softmax, sinkhorn"
    assert len(re.findall(of, " ".join(said.out.split()))) == 1
    assert run("rerank", path, "--i2t", 0.3, 0.3, "--methods", "fast", "csls") == 0
    assert not capsys.readouterr().err


GUESS = "--image-ids, --text-ids: without them, 9 images and 198 texts are 22 consecutive texts"


def expect_warnings(err: str, out: str, latex: Path, report: Path, warnings: list[str]) -> None:
    """Check that each warning is said once, and is a note in text, LaTeX and HTML."""
    assert err.count("\n") == len(warnings)
    page = read_page(report.read_text(encoding="utf-8"))
    for text in (" ".join(out.split()), latex.read_text(encoding="utf-8"), page):
        for warning in warnings:
            assert len(re.findall(f"Warning: {warning}", text)) == 1
            assert len(re.findall(f"^itrloss .*: {warning}", err, re.M)) == 1


def test_scales_that_were_chosen_without_the_bank_say_so():
    bank = torch.from_numpy(scores(2))
    sims = [Similarity.from_scores(torch.from_numpy(scores(i)), *IDS) for i in range(2)]
    found = compare_rerankers(sims[0], ("fast",), (bank, None), sims[1], samples=9)
    notes = [note for note in found.table().notes if note.startswith("Scales")]
    wanted = (
        "held-out pairs.",
        "held-out pairs without the bank, whose scores are of the test set's candidates.",
    )
    for note, words in zip(notes, wanted, strict=True):
        assert f", chosen on {words}" in note


@pytest.mark.parametrize(
    ("i2t", "t2i", "wanted"),
    [
        ((7, 57), (20, 20), ""),
        ((5, 57), (20, 5), " Of the values that were tried, 5 is the smallest."),
        ((7, 57), (20, 80), " Of the values that were tried, 80 is the largest."),
        (
            (5, 80),
            (5, 80),
            " Of the values that were tried, 5 is the smallest and 80 is the largest.",
        ),
    ],
)
def test_scales_at_an_end_of_those_tried_are_named(i2t, t2i, wanted):
    entry = Entry(CALIBRATED, FastReranker(i2t, t2i), perfect(), 0.0, chosen_on="held-out pairs")
    assert entry.scales.endswith(f", chosen on held-out pairs.{wanted}")


def test_scales_at_an_end_of_those_tried_are_named_by_the_table_alone(recwarn):
    logits = [Similarity.from_scores(100 * torch.from_numpy(scores(i)), *IDS) for i in (0, 1)]
    found = compare_rerankers(logits[0], ("fast",), validation=logits[1], samples=9)
    assert "5 is the smallest" in found.table().notes[-1]
    assert not [w for w in recwarn if "of the values tried" in str(w.message)]


def test_only_pairs_beside_the_test_set_are_called_held_out():
    sim = plain_similarity()
    with pytest.warns(SuspiciousInputWarning, match="^validation: it has items of the test set"):
        found = compare_rerankers(sim, ("fast",), validation=sim, samples=9)
    assert ", chosen on pairs of the test set." in found.table().notes[-1]


def test_every_method_has_a_title_without_a_code_name():
    assert set(METHODS) < set(TITLES)
    assert len(set(TITLES.values())) == len(TITLES)
    for title in TITLES.values():
        assert not re.search("[_<>()]|Reranker|itrloss", title)


def save_pairs(folder: Path, prefix: str, seed: int) -> list[Path]:
    """Write random embeddings of images and of texts, and return their files."""
    images, texts = pairs(seed)
    image_file = folder / f"{prefix}images.npy"
    text_file = folder / f"{prefix}texts.npy"
    np.save(image_file, images)
    np.save(text_file, texts)
    return [image_file, text_file]


def scales_of(method: FastReranker) -> str:
    """The scales of a method as notes have them."""
    gamma_1, gamma_2 = method.i2t
    lambda_1, lambda_2 = method.t2i
    i2t = f"γ1 = {gamma_1:g}, γ2 = {gamma_2:g} (image→text)"
    t2i = f"λ1 = {lambda_1:g}, λ2 = {lambda_2:g} (text→image)"
    return f"{i2t}; {t2i}"


def in_latex(text: str) -> str:
    """The same with the commands of LaTeX for letters and arrows."""
    for letter, command in (("γ", "\\gamma"), ("λ", "\\lambda"), ("→", "\\to")):
        text = text.replace(letter, rf"\ensuremath{{{command}}}")
    return text


def test_all_calibrated_methods_print_their_scales(tmp_path: Path, capsys):
    test_files = save_pairs(tmp_path, "", 0)
    val_files = save_pairs(tmp_path, "val_", 1)
    bank_images, bank_texts = save_pairs(tmp_path, "bank_", 2)
    latex = tmp_path / "t.tex"
    report = tmp_path / "r.html"
    options = ["--val", *val_files, "--bank-images", bank_images, "--bank-texts", bank_texts]
    options += ["--methods", "fast", "--latex", latex, "--report", report, "--samples", 50]
    assert run("eval", *test_files, *options) == 0

    banks = tuple(torch.from_numpy(x) for x in pairs(2))
    found = compare_rerankers(plain_similarity(), ("fast",), banks, plain_similarity(1), samples=9)
    chosen = {entry.label: entry.reranker for entry in found.entries if entry.name == CALIBRATED}
    assert list(chosen) == ["fast, calibrated", "fast, calibrated, bank"]
    text = read_page(report.read_text(encoding="utf-8"))
    latex_text = latex.read_text(encoding="utf-8")
    out = " ".join(capsys.readouterr().out.split())
    for name, method in chosen.items():
        scales = scales_of(method)
        assert f"Scales of {name}: {scales}, chosen on held-out pairs." in out
        title = name.replace("fast", "Fast Re-ranking")
        assert f"Scales of {title}: {scales}, chosen" in text
        assert f"Scales of {title}: {in_latex(scales)}, chosen" in latex_text
    read_latex(latex_text)


# --- text -----------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.text("abc†→ 模é", min_size=1), st.text("0.19+-( )", max_size=24)),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.text("R@ →x", max_size=40), min_size=1, max_size=3),
)
def test_columns_stand_under_their_heads(rows, heads):
    """Cells end where the head of their column ends, and no two columns touch."""
    columns = [f"h{i}" for i in range(2 * len(heads))]
    lines = [(name, [Cell(text.strip() or "1")] * len(columns)) for name, text in rows]
    grid = Grid([(head.strip(), 2) for head in heads], columns, lines)
    _, named, *found = tables.text(Table([grid], ["a note"])).partition("\n\n")[0].split("\n")
    ends = [named.index(column) + len(column) for column in columns]
    for line, (_, cells) in zip(found, lines, strict=True):
        shown_line = "".join(x + "\0" * (len(x.encode("gb18030")) == 2 and x == "模") for x in line)
        for end, cell in zip(ends, cells, strict=True):
            assert shown_line[end - len(cell.text) : end] == cell.text
            assert shown_line[end - len(cell.text) - 1] == " "


def test_heads_of_groups_stand_over_their_columns():
    models = {"a": of_seed(0), "b": of_seed(1)}
    out = tables.text(compare_models(models, samples=20).table()).split("\n")
    ways, heads = out[:2]
    ends = [match.end() for match in re.finditer(r"R@10", heads)]
    assert [ways.index(way) + len(way) for way in ARROWS] == ends
    assert max(map(len, out)) <= 100 and all(line == line.rstrip() for line in out)


# --- LaTeX ----------------------------------------------------------------------------------------

# a command with its braces, an escaped letter, or a special letter
_TOKEN = re.compile(r"\\[a-zA-Z]+|\\.|[{}$&#%_^~]|[^\\{}$&#%_^~]+", re.S)
_COMMANDS = {"\\begin", "\\end", "\\toprule", "\\midrule", "\\bottomrule", "\\cmidrule", "\\\\"}
_COMMANDS |= {"\\multicolumn", "\\textbf", "\\par", "\\medskip", "\\footnotesize", "\\linewidth"}
_COMMANDS |= {"\\ensuremath", "\\to", "\\le", "\\dagger", "\\gamma", "\\lambda"}
_COMMANDS |= {"\\textbackslash", "\\textasciitilde", "\\textasciicircum"}
_COMMANDS |= {"\\" + letter for letter in "&%$#_{}"}


def read_latex(text: str) -> list[list[list[str]]]:
    """Return the rows of cells of each tabular, after a check of everything a compiler minds."""
    tokens = _TOKEN.findall(text)
    assert "".join(tokens) == text
    depth = 0  # of braces
    mathematics = False  # between dollars
    formula = None  # the depth of \\ensuremath
    for before, token in zip(["", *tokens], tokens, strict=False):
        depth += (token == "{") - (token == "}")
        assert depth >= 0
        if token == "{" and before == "\\ensuremath":
            formula = depth
        elif token == "}" and formula == depth + 1:
            formula = None
        mathematics ^= token == "$"
        outside = depth == 0 and not mathematics
        assert outside or token not in ("&", "\\\\")
        assert formula is not None or token != "^"
        assert token[0] != "\\" or token in _COMMANDS, token
        assert token not in ("#", "%", "_", "~")
    assert depth == 0 and not mathematics
    opened = []
    for kind, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if kind == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert not opened
    return [_read_tabular(*found) for found in re.findall(_TABULAR, text, re.S)]


_TABULAR = r"\\begin\{tabular\}\{(\w+)\}\n(.*?)\\end\{tabular\}"


def _read_tabular(columns: str, body: str) -> list[list[str]]:
    """Return the cells of each row; booktabs' rules are in their places, and rows of one length."""
    order = r"\\toprule\n.*\\\\\n(\\cmidrule\(lr\)\{\d+-\d+\} ?)+\n.*\\\\\n\\midrule\n(.*)"
    match = re.fullmatch(order + r"\\bottomrule\n", body, re.S)
    assert match is not None
    heads, _, lines = body.partition("\\midrule\n")
    rows = []
    for line in (heads + lines.replace("\\bottomrule\n", "")).split(" \\\\\n")[:-1]:
        assert not line.startswith(("[", "*"))  # options of the line's end
        cells = re.split(r"(?<!\\)&", line.rpartition("\n")[2])
        spans = [int(x) for x in re.findall(r"\\multicolumn\{(\d+)\}", line)]
        assert len(cells) + sum(spans) - len(spans) == len(columns)
        rows.append([cell.strip() for cell in cells])
    for first, last in re.findall(r"\\cmidrule\(lr\)\{(\d+)-(\d+)\}", body):
        assert 2 <= int(first) <= int(last) <= len(columns)
    return rows


def test_the_latex_table_is_that_of_the_text():
    sim = plain_similarity()
    found = compare_rerankers(sim, ("fast", "csls"), samples=200)
    table = found.table(ks=(1, 20))
    recalls, changes = read_latex(tables.latex(table))
    assert recalls[1] == ["", *("R@1", "R@20") * 2, "RSUM", r"change (95 \%)", "p"]
    for rows, grid in ((recalls[2:], table.grids[0]), (changes[2:], table.grids[1])):
        assert len(rows) == len(grid.rows)
        for (name, *cells), (wanted, figures) in zip(rows, grid.rows, strict=True):
            assert name == wanted.replace("†", r"\ensuremath{^\dagger}")
            for cell, figure in zip(cells, figures, strict=True):
                bare = cell.replace("$", "").replace(r"\ensuremath{<}", "<")
                assert bare == (rf"\textbf{{{figure.text}}}" if figure.best else figure.text)
                assert not re.search(r"(?<!\$)[-+]\d", cell)  # minus signs, not hyphens


@given(st.lists(st.text(min_size=1), min_size=2, max_size=3, unique=True))
@settings(deadline=None, max_examples=60)
def test_any_name_is_plain_text_in_latex(names):
    same = perfect()
    found = compare_models({name: same for name in names}, transductive=names[:1], samples=5)
    recalls, _ = read_latex(tables.latex(found.table()))
    assert len(recalls) == 2 + len(names)


def test_letters_that_are_commands_are_escaped():
    same = perfect()
    name = "a_1 & 50% #2 {x} $y$ \\z ~^ [*]"
    found = tables.latex(compare_models({name: same, "[b": same}, samples=5).table())
    recalls, _ = read_latex(found)
    backslash, tilde, caret = "\\textbackslash{}", "\\textasciitilde{}", "\\textasciicircum{}"
    wanted = rf"a\_1 \& 50\% \#2 \{{x\}} \$y\$ {backslash}z {tilde}{caret} {{[}}{{*}}]"
    assert recalls[2][0] + " & " + recalls[2][1] != wanted  # the cells are read apart
    assert wanted in found and "\n{[}b &" in found


# --- HTML -----------------------------------------------------------------------------------------


def test_the_report_has_the_same_table():
    sim = plain_similarity()
    found = compare_rerankers(sim, ("fast", "csls"), validation=plain_similarity(1), samples=200)
    names = [[str(i) for i in range(size)] for size in sim.shape]
    expect(read_page(page(found, found.entries[1], "title", names)), found.table(timed=True))


def test_models_have_a_report_of_their_own():
    models = {"<a>": of_seed(0), "b & c": of_seed(1)}
    found = compare_models(models, transductive=["b & c"], samples=200)
    text = read_page(models_page(found, "title", "about"))
    assert "Change of the RSUM by each model" in text
    expect(text, found.table())


def expect(text: str, table: Table) -> None:
    """Check that a page has each row of the table, figure behind figure, and all notes."""

    def bare(line: str) -> str:
        return re.sub(r"\s", "", line)

    text = bare(text)
    for grid in table.grids:
        assert bare("".join(grid.columns)) in text
        for name, cells in grid.rows:
            figures = [cell.text.replace("-", "−") for cell in cells]
            assert bare("".join([name, *figures])) in text
    for note in table.notes:
        assert bare(note) in text


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    paths = []
    for seed, name in enumerate(("run_1/sims", "run_2/sims", "other")):
        path = tmp_path / f"{name}.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, scores(seed))
        paths.append(path)
    return paths


def test_the_command_compares_models(models, tmp_path, capsys):
    latex, report, metrics = (tmp_path / name for name in ("t.tex", "r.html", "m.csv"))
    options = ("--latex", latex, "--report", report, "--metrics", metrics, "--samples", 300)
    assert run("compare", *models, *options, "--transductive", "run_2/sims") == 0
    out = capsys.readouterr().out
    results = {"run_1/sims": of_seed(0), "run_2/sims": of_seed(1), "other": of_seed(2)}
    comparison = compare_models(results, transductive=["run_2/sims"], samples=300)
    assert out.startswith(f"{N} images, {N * C} texts (5 an image, one behind the other)\n")
    assert tables.text(comparison.table()) in out and "run_2/sims†" in out
    assert f"written: {metrics}, {latex}, {report}" in out
    assert latex.read_text(encoding="utf-8") == tables.latex(comparison.table())
    expect(read_page(report.read_text(encoding="utf-8")), comparison.table())
    rows = metrics.read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["method", *results]
    assert float(rows[2].rpartition(",")[2]) == results["run_2/sims"].metrics()["rsum"]


def test_models_are_compared_with_names_ids_and_other_k(models, tmp_path, capsys):
    (tmp_path / "i.txt").write_text("\n".join(map(str, range(N))))
    (tmp_path / "t.txt").write_text("\n".join(str(i // C) for i in range(N * C)))
    ids = ("--image-ids", tmp_path / "i.txt", "--text-ids", tmp_path / "t.txt")
    options = ("--names", "base", "a", "b", "--ks", 2, 3, "--folds", 3, "--samples", 20)
    assert run("compare", *models, *ids, *options) == 0
    out = capsys.readouterr().out
    assert "by the ids given" in out and "in 3 parts" in out
    results = {name: of_seed(seed, folds=3) for seed, name in enumerate(("base", "a", "b"))}
    assert tables.text(compare_models(results, samples=20).table((2, 3))) in out
    for path in models:
        np.save(path, np.load(path).T)
    assert run("compare", *models, "--transpose", *options) == 0
    assert tables.text(compare_models(results, samples=20).table((2, 3))) in capsys.readouterr().out


@pytest.mark.parametrize("transposed", [False, True])
def test_re_ranked_scores_are_compared_in_both_directions(transposed, tmp_path, capsys):
    image_bank = np.random.default_rng(0).random((30, N * C))
    text_bank = np.random.default_rng(1).random((N, 40))
    for name, x in (("base", scores()), ("images", image_bank), ("texts", text_bank)):
        np.save(tmp_path / f"{name}.npy", x.T if transposed else x)
    of_images = ["--bank-images", tmp_path / "images.npy"]
    of_texts = ["--bank-texts", tmp_path / "texts.npy"]
    options = {
        "plain": ["--write", "no re-ranking"],
        "alone": [],
        "bank": [*of_images, *of_texts],
        "half": of_images,
    }
    base = tmp_path / "base.npy"
    transpose = ["--transpose"] * transposed
    for name, banks in options.items():
        command = ["rerank", base, *transpose, "--methods", "csls", "--samples", 9]
        assert run(*command, *banks, "--out", tmp_path / f"{name}.npz") == 0
    capsys.readouterr()
    files = [tmp_path / f"{name}.npz" for name in options]
    assert run("compare", base, *files, *transpose, "--samples", 40) == 0

    plain = torch.from_numpy(scores())
    images = torch.from_numpy(image_bank)
    texts = torch.from_numpy(text_bank)
    results = {
        "base": retrieval_results(plain),
        "plain": retrieval_results(plain),
        "alone": retrieval_results(plain, reranker=CSLS()),
        "bank": retrieval_results(plain, reranker=CSLS().fit(images, texts)),
        "half": retrieval_results(plain, reranker=CSLS().fit(images)),
    }
    wanted = compare_models(results, transductive=["alone", "half"], samples=40).table()
    assert tables.text(wanted) in capsys.readouterr().out


RE_RANKED = {"i2t": scores(), "t2i": scores(), "transductive": np.array([True, True])}


def save_npz(path: Path, arrays: dict) -> None:
    np.savez(path, **arrays)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"t2i": np.where(scores() > 0.5, np.nan, scores())}, "r.npz: expected finite"),
        ({"t2i": scores()[:5]}, "scores[1]: expected shape (12, 60), got (5, 60)"),
        (
            {"i2t": scores()[:5, :25], "t2i": scores()[:5, :25]},
            "expected shape (12, 60) like",
        ),
        ({"transductive": np.array([None])}, "r.npz: not a readable .npz file"),
    ],
)
def test_broken_re_ranked_scores_are_named(changed, message, models, tmp_path, capsys):
    path = tmp_path / "r.npz"
    save_npz(path, RE_RANKED | changed)
    assert message in refused(capsys, "compare", models[0], path, "--samples", 9)


def test_a_damaged_archive_of_re_ranked_scores_is_named(models, tmp_path, capsys):
    path = tmp_path / "r.npz"
    path.write_bytes(b"PK")
    said = refused(capsys, "compare", models[0], path)
    assert f"{path}: not a readable .npz file" in said


def test_re_ranked_scores_are_told_from_others(models, tmp_path):
    path = tmp_path / "r.npz"
    np.savez(path, scores())
    assert read_reranked(path) is None
    assert read_reranked(models[0]) is None
    save_npz(path, RE_RANKED)
    assert read_reranked(path) is not None


def test_a_name_chooses_one_direction_of_re_ranked_scores(tmp_path, capsys):
    for name in ("a", "b"):
        flags = np.array([True, True])
        np.savez(tmp_path / f"{name}.npz", i2t=scores(), t2i=scores(1), transductive=flags)
    files = [f"{tmp_path}/a.npz:i2t", f"{tmp_path}/b.npz:i2t"]
    assert run("compare", *files, "--samples", 9) == 0
    same = of_seed(0)
    wanted = compare_models({"a": same, "b": same}, samples=9).table()
    assert tables.text(wanted) in capsys.readouterr().out


A, B = "run_1/sims.npy", "run_2/sims.npy"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((A,), f"{A}: expected at least two files to compare, got one"),
        ((A, B, "--names", "x"), "--names: expected one for each of the 2 files, got 1"),
        ((A, B, "--names", "x", "x"), "--names: expected different names, got x more than once"),
        ((A, B, "--names", "x", "y\n"), "--names: expected printable names, got 'y\\n'"),
        ((A, B, "--names", "x", " "), "--names: expected printable names, got ' '"),
        ((A, A), "--names: expected different names"),
        ((A, B, "--transductive", "c"), "--transductive: expected"),
        ((A, "small.npy"), f"small.npy: expected shape (12, 60) like {A}, got (6, 30)"),
        ((A, B, "--samples", 0), "--samples: expected at least 1, got 0"),
        ((A, B, "--latex", A), "expected a file of its own"),
        ((A, B, "--folds", 5), "--folds: expected a divisor of the 12 images"),
        ((A, "none.npy"), "none.npy"),
    ],
)
def test_a_bad_argument_is_named(arguments, message, models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    np.save("small.npy", scores()[:6, :30])
    assert message in refused(capsys, "compare", *arguments)


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
        compare_models({name: perfect() for name in results}, **options)
