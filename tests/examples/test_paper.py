"""The tables of the papers: valid rows, a grid without repeated or wrongly reused runs, intervals
and verdicts, and every command to its end.
"""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import drawn
from support.drawn import TINY
from support.stored import assert_stored

from examples.retrieval import paper_report, paper_runs
from examples.retrieval.config import Config
from examples.retrieval.data import load_split
from examples.retrieval.evaluate import RECALLS, before_and_after
from examples.retrieval.models import build_model
from examples.retrieval.objectives import build_loss
from examples.retrieval.paper import main
from examples.retrieval.paper_figures import DRAWN
from examples.retrieval.paper_report import (
    FAILS,
    HOLDS,
    MEASURED,
    UNKNOWN,
    Difference,
    paired,
    result_lines,
    verdict,
    write_report,
)
from examples.retrieval.paper_runs import Grid, measured, run, state
from examples.retrieval.paper_tables import PAPERS, Claim, Paper, Row, Sweep, Table, load_paper
from examples.retrieval.rerankers import METHODS, ReciprocalReranker
from examples.retrieval.train import train
from itrloss.rerank import FastReranker

SCENES = Path(paper_runs.__file__).parent / "configs" / "scenes.toml"
Figures = dict[str, dict[str, float]]


@pytest.fixture
def tiny(data: Path) -> list[str]:
    """Settings of short runs."""
    return [*TINY, f"data={data}"]


def small_paper(name: str = "") -> Paper:
    """Paper with two rows and a table of re-rankings, which needs no run of its own."""
    rows = {
        "triplet": Row("triplet loss", ["loss=triplet"]),
        "dcl": Row("full model"),
        "SCAN": Row("attention", cannot="another method"),
    }
    printed = {
        "Flickr30K": {"triplet": {"rsum": 500.0}, "dcl": {"rsum": 510.5}, "SCAN": {"rsum": 465.0}}
    }
    better = Claim("DCL is better", above=[("dcl", "triplet")])
    than_scan = Claim("and than SCAN", above=[("dcl", "SCAN")])
    losses = Table("losses", rows, "table", "dcl", printed, [better, than_scan], note="A note.")
    rows = {"plain": Row("not re-ranked"), "FR": Row("re-ranked", rerank=[25, 25, 20, 20])}
    helps = Claim("it helps", above=[("FR", "plain")])
    rerankings = Table("re-ranking", rows, "table", "plain", {}, [helps], reranks=True)
    return Paper("Small", ["loss=dcl", "loss_options.margin=0.25"], {"1": losses, "2": rerankings})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace all papers by the small one, and collect the directories that are trained in."""
    directories: list[str] = []

    def watched(config: Config) -> None:
        directories.append(config.out)
        train(config)

    monkeypatch.setattr(paper_runs, "load_paper", small_paper)
    monkeypatch.setattr(paper_runs, "train", watched)
    return directories


RECORDS = Path(__file__).parents[2] / "docs" / "papers"
# Baselines that are not the full model: that of CODER's table S3, other losses, other encoders.
OTHERS = ("none", "GPO (BERT)", "VSE∞", "BUTD")
# RSUMs that are not the sum of the six recalls as printed.
MISPRINTED = (427.2, 530.5)


# --- the tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [None, SCENES])
@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_is_a_run_that_can_be_built(paper, file, tmp_path):
    grid = Grid(paper, file, [*TINY, "data=somewhere"], out=tmp_path)
    configs = [config for config, _ in grid.runs().values()]
    assert len(configs) >= 9
    for config in configs:
        build_loss(config)
        build_model(config, 8, 20)


@pytest.mark.parametrize("paper", PAPERS)
def test_baselines_are_full_models(paper, tmp_path):
    grid = Grid(paper, out=tmp_path)
    full = grid.config(Row("full model"), 0)
    for table in grid.tables.values():
        if table.kind == "table" and table.baseline not in OTHERS:
            assert grid.config(table.rows[table.baseline], 0) == full
        for sweep in table.sweeps:
            if sweep.set.endswith("*") and not sweep.also:
                assert grid.config(table.rows[sweep.row(sweep.of)], 0) == full


@pytest.mark.parametrize("paper", PAPERS)
def test_tables_are_whole(paper):
    for table in load_paper(paper).tables.values():
        rows = table.rows
        assert table.kind == "table" or table.kind in DRAWN
        assert table.baseline in rows or table.kind not in MEASURED
        for claim in table.claims:
            assert {name for pair in claim.pairs for name in pair} <= rows.keys()
            assert bool(claim.above) != bool(claim.within)
            assert (claim.apart > 0) == bool(claim.within)
        for row in rows.values():
            if isinstance(row.rerank, str):
                assert row.rerank in METHODS or not row.rerank
            else:
                assert len(row.rerank) in (0, 4)
            assert table.reranks or not row.rerank
            assert {*row.mean_of} <= rows.keys()


@pytest.mark.parametrize("paper", PAPERS)
def test_printed_figures_are_whole(paper):
    for table in load_paper(paper).tables.values():
        for printed in table.printed.values():
            assert printed.keys() <= table.rows.keys()
            whole = {name for name, figures in printed.items() if {*RECALLS} <= figures.keys()}
            if whole:
                assert whole == {name for name, row in table.rows.items() if not row.mean_of}
            for name in whole:
                total = sum(printed[name][recall] for recall in RECALLS)
                off = 0.21 if printed[name]["rsum"] in MISPRINTED else 0.11
                assert printed[name]["rsum"] == pytest.approx(total, abs=off)


def test_a_sweep_is_rows_and_claims():
    sweep = Sweep("γ", "loss_options.scale*", [45, 90], 90, "USER", ["dim=4"], {"Flickr30K": 90})
    assert sweep.rows() == {
        "γ = 45, USER": Row("USER", ["loss_options.scale*=0.5", "dim=4"]),
        "γ = 90, USER": Row("USER", ["loss_options.scale*=1.0", "dim=4"]),
    }
    (claim,) = sweep.claims("i2t_r1")
    assert claim.pairs == [("γ = 90, USER", "γ = 45, USER")]
    assert (claim.figure, claim.says) == ("i2t_r1", "γ = 90, USER is best (on Flickr30K)")


def test_the_command_line_is_stronger_than_the_file_and_the_file_than_the_paper(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('loss = "coder"\nconcepts = 7\n[loss_options]\nclusters = 40\nmargin = 0.1\n')
    rows = load_paper("coder").tables["4"].rows
    grid = Grid("coder", file, ["loss_options.margin=0.2"], out=tmp_path)
    paper = {"batch_diversity_from": "both"}
    assert grid.config(rows["10000"], 0).loss_options == {"clusters": 40, "margin": 0.2, **paper}
    assert grid.config(rows["15000"], 0).loss_options == {"clusters": 60, "margin": 0.2, **paper}
    of_scenes = Grid("coder", out=tmp_path).config(rows["5000"], 0)
    assert of_scenes.loss_options == {"clusters": 100, **paper}


def test_options_of_the_full_models_loss_are_not_those_of_another(tmp_path):
    row = load_paper("coder").tables["2"].rows["1"]
    config = Grid("coder", common=["loss_options.margin=0.2"], out=tmp_path).config(row, 0)
    assert config.loss == "triplet"
    assert config.loss_options == {"reduction": "mean"}


def test_a_multiple_of_a_number_stays_what_it_was():
    config = Config(lr=0.5, memory=100, loss_options={"clusters": 5})
    assert paper_runs._times(config, "lr", "0.1").lr == pytest.approx(0.05)
    assert paper_runs._times(config, "memory", "0.003").memory == 1
    assert paper_runs._times(config, "loss_options.clusters", "1.5").loss_options["clusters"] == 8
    with pytest.raises(ValueError, match=r"loss_options\.margin: must be a number"):
        paper_runs._times(config, "loss_options.margin", "2")


# --- the grid -------------------------------------------------------------------------------------


def test_a_grid_runs_chosen_rows_only(tmp_path):
    common = ["bert=any/directory"]
    grid = Grid("coder", common=common, out=tmp_path, only=["1"], rows=["CODER (BERT)"])
    assert [rows for _, rows in grid.runs().values()] == [["1: CODER (BERT)"]]
    with pytest.raises(ValueError, match=r"--row: .*CODER \(BERT\), got 'CODER'"):
        replace(grid, rows=["CODER"])


def test_a_grid_runs_once_and_goes_on(tiny, tmp_path, trained):
    grid = Grid("coder", common=tiny, seeds=[0, 1], out=tmp_path)
    assert {state(config) for config, _ in grid.runs().values()} == {"to run"}
    run(grid)
    run(grid)
    assert len(trained) == len(set(trained)) == 4  # re-rankings use the full model's runs

    first = Path(trained[0])
    (first / "metrics.json").unlink()
    log = (first / "log.jsonl").read_text()
    assert state(grid.config(small_paper().tables["1"].rows["triplet"], 0)) == "interrupted"
    run(grid)
    assert trained[4:] == trained[:1]
    assert (first / "log.jsonl").read_text() == log  # nothing was trained again


def test_other_settings_are_other_runs(tiny, tmp_path, trained):
    run(Grid("coder", common=tiny, out=tmp_path, only=["2"]))
    assert len(trained) == 1

    def state_with(*settings: str) -> str:
        grid = Grid("coder", common=[*tiny, *settings], out=tmp_path)
        return state(grid.config(Row(""), 0))

    others = ("lr=2e-2", "loss_options.margin=0.1", f"data={tmp_path}", "epochs=2")
    for other in (*others, "test_split=testall", "test_folds=5"):
        assert state_with(other) == "to run"
    assert state_with("threads=2", "final_test=true") == "finished"


def test_a_row_that_diverges_does_not_end_the_grid(tiny, tmp_path, monkeypatch, capsys):
    def diverge(config: Config) -> None:
        raise FloatingPointError("epoch 1")

    monkeypatch.setattr(paper_runs, "load_paper", small_paper)
    monkeypatch.setattr(paper_runs, "train", diverge)
    run(Grid("coder", common=tiny, out=tmp_path))
    assert capsys.readouterr().out.count("diverged: epoch 1") == 2


def test_a_row_is_re_ranked_by_its_own_numbers(data, tmp_path):
    split = load_split(data, "dev")
    scores = torch.rand(20, 100, generator=torch.Generator().manual_seed(0))
    np.save(tmp_path / "dev_scores.npy", scores.numpy())
    config = Config(data=str(data), out=str(tmp_path))
    table = small_paper().tables["2"]
    seen = []
    for rerank, reranker in (
        ((25, 25, 20, 20), FastReranker()),
        ((9, 4, 3, 17), FastReranker((9, 4), (3, 17))),
        ("reciprocal", ReciprocalReranker()),
    ):
        found = paper_runs._of_row("dev", table, Row("", rerank=rerank), [config])
        assert found["after"].pop("seconds") > 0
        assert found == before_and_after(scores, split, reranker)
        assert found["after"] not in seen
        seen.append(found["after"])


def test_figures_are_those_of_the_runs(tiny, tmp_path, trained):
    grid = Grid("coder", common=tiny, seeds=[0, 1], out=tmp_path)
    assert "no runs" in write_report(grid)
    run(grid)
    ours = measured(grid, grid.tables["1"])
    assert ours["dcl"].keys() == {0, 1}
    assert ours["SCAN"] == {}
    reranked = measured(grid, grid.tables["2"])
    assert reranked["plain"][0]["after"] == ours["dcl"][0]["before"]
    # FR's settings are the defaults
    after = reranked["FR"][1]["after"]
    after.pop("seconds")
    assert after == pytest.approx(ours["dcl"][1]["after"])


def test_losses_are_judged_before_re_ranking_and_re_rankings_after_it(
    tmp_path, trained, monkeypatch
):
    def seeds(before: float, after: float) -> dict[int, Figures]:
        return {
            s: {"before": {"rsum": before + s}, "after": {"rsum": after + 1.1 * s}}
            for s in range(3)
        }

    found = {
        "triplet": seeds(100, 120),
        "dcl": seeds(110, 110),
        "SCAN": {},
        "plain": seeds(105, 100),
        "FR": seeds(100, 110),
    }
    monkeypatch.setattr(
        paper_report, "measured", lambda grid, table: {name: found[name] for name in table.rows}
    )
    text = write_report(Grid("coder", seeds=[0, 1, 2], out=tmp_path))
    assert (tmp_path / "report.md").read_text() == text
    assert_stored("paper_report", text)


# --- the command ----------------------------------------------------------------------------------


def test_the_command_lists_reports_or_runs(tmp_path, trained, tiny, capsys):
    # settings may stand anywhere, even after the seeds
    command = ["coder:1", "--out", str(tmp_path), "--seeds", "0", "1", *tiny]
    main([*command, "--dry-run"])
    out = capsys.readouterr().out
    assert out.count("to run") == 4
    assert "1: SCAN  cannot be run: another method" in out
    main([*command, "--report"])
    assert "no runs" in capsys.readouterr().out
    assert not trained
    main(command)
    out = capsys.readouterr().out
    assert "[4/4] dcl_" in out
    assert "dcl *" in out
    assert len(trained) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["coder", "loss=dcl"], "the grid itself decides loss"),
        (["coder:9"], "coder has 1, 2, 3, 4, S3, S2, fig3"),
        (["coder", "loss_options.nothing=1"], "nothing"),
        (["coder:3", "user:IV"], "expected tables of one of coder, user, dvse"),
        ([], "such as coder:3, got none"),
    ],
)
def test_the_command_names_wrong_words(words, message, capsys):
    with pytest.raises(SystemExit):
        main(["--dry-run", *words])
    assert message in capsys.readouterr().err


def test_the_command_lists_all_tables(capsys):
    main(["--list"])
    out = capsys.readouterr().out
    for paper in PAPERS:
        for number, table in load_paper(paper).tables.items():
            assert f"{paper}:{number} " in out
            assert table.title in out


# --- every table and figure -----------------------------------------------------------------------


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all commands find the runs that they share."""
    return tmp_path_factory.mktemp("papers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paper", "number"),
    [(paper, number) for paper in PAPERS for number in load_paper(paper).tables],
)
def test_every_command_runs_to_its_end(paper, number, scenes, capsys):
    sizes = [f"scenes_sizes.{split}={n}" for split, n in (("train", 40), ("dev", 12), ("test", 12))]
    main([f"{paper}:{number}", "--out", str(scenes), *TINY, *sizes, "decay_epochs=[]"])
    table = load_paper(paper).tables[number]
    out = capsys.readouterr().out
    assert table.title in out
    stem = scenes / f"{paper}_{number}"
    if table.kind == "results":
        assert stem.with_suffix(".html").read_text(encoding="utf-8").count("<img") > 5
        return
    with stem.with_suffix(".csv").open(encoding="utf-8") as file:
        lines = list(csv.reader(file))
    assert len(lines) > 1
    if table.kind in MEASURED:
        check_results(table, lines)
    if table.kind in DRAWN:
        pixels = np.asarray(Image.open(stem.with_suffix(".png")).convert("RGB"))
        assert pixels.std() > 10


def test_records_print_what_the_registry_does():
    """Those on the page of the papers' tables, which are as the command wrote them."""
    recorded = RECORDS / "recorded.csv"
    files = sorted({*RECORDS.iterdir()} - {recorded})
    with recorded.open(encoding="utf-8") as opened:
        assert {row["record"] for row in csv.DictReader(opened)} == {file.stem for file in files}
    for file in files:
        paper, number, *_ = file.stem.split("_")  # behind them the data
        table = load_paper(paper).tables[number]
        if file.suffix == ".csv":
            with file.open(encoding="utf-8") as opened:
                header, *lines = csv.reader(opened)
            expected = result_lines(table, {})
            of_printed = [line for line in lines if line[2].startswith("printed")]
            columns = [header.index(name, 2) for name in expected[0][2:]]
            assert [[line[i] for i in columns] for line in of_printed] == [
                line[2:] for line in expected if line[2].startswith("printed")
            ]
            assert {line[0] for line in lines if line[0]} == table.rows.keys()


def test_rows_say_what_they_lack(tmp_path, data, photos):
    def reasons(number: str, *common: str) -> list[str]:
        grid = Grid("dvse" if number == "I" else "user", common=common, out=tmp_path)
        return [grid.cannot(row) for row in grid.source.tables[number].rows.values()]

    raw, resnext = f"data={photos}", "backbone=a/resnext101"
    assert reasons("I", f"data={data}") == [
        "needs resnet-152 as backbone=…",
        "needs resnet-152 as backbone=…",
        "",
        "",
        "needs resnext as backbone=…",
        "needs resnext as backbone=…",
    ]
    no_regions = f"needs regions, and {photos} has raw images"
    for row, reason in zip(
        reasons("I", raw, "backbone=resnet-152")[::2],
        ("", no_regions, "needs resnext as backbone=…"),
        strict=True,
    ):
        assert row == reason
    assert reasons("I", raw, resnext, "bert=Any")[4:] == ["", ""]
    assert reasons("I", raw, resnext)[4:] == ["needs bert as bert=…"] * 2
    with_global = reasons("III", f"data={data}")
    assert with_global == ["", "", "", ""]
    assert reasons("III")[2] == "needs the global features of CLIP, {split}_global.npy"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "command"),
    [
        ("features", "user:III"),
        ("features", "coder:figS3"),
        ("raw", "dvse:fig11"),
        ("raw", "coder:figS1"),
        ("raw", "user:fig6"),
        ("cub", "dvse:III"),
        ("cub", "coder:figS3"),
    ],
)
def test_commands_run_on_other_forms_of_data(form, command, data, photos, resnet, tmp_path, capsys):
    root = {"features": data, "raw": photos}.get(form) or drawn.cub(tmp_path)
    settings = [] if form == "features" else [f"backbone={resnet}", "image_size=48"]
    options = ["--split", "test", "--out", str(tmp_path / "out"), f"data={root}"]
    main([command, *options, *TINY, "decay_epochs=[]", "concepts=3", *settings])
    assert "not drawn" not in capsys.readouterr().out.lower()
    stem = tmp_path / "out" / command.replace(":", "_")
    if command == "dvse:fig11":
        assert stem.with_suffix(".html").read_text(encoding="utf-8").count("<img") > 2
        return
    lines = stem.with_suffix(".csv").read_text(encoding="utf-8")
    assert len(lines.splitlines()) > 4
    assert "not run: needs" not in lines


def test_heat_maps_of_raw_images_are_of_the_cells_of_the_feature_map(photos, resnet, tmp_path):
    settings = [f"data={photos}", f"backbone={resnet}", "image_size=48", "heads=2"]
    main(["dvse:fig10", "--out", str(tmp_path), *TINY, "decay_epochs=[]", *settings])
    with (tmp_path / "dvse_fig10.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3 * 2 * 4  # images, heads, cells


def check_results(table: Table, lines: list[list[str]]) -> None:
    """Check that each row is printed, measured, or not run for a reason; of one, all figures."""
    header, *body = lines
    ours = 0
    name = ""
    for line in body:
        name = line[0] or name
        figures = dict(zip(header[3:], line[3:], strict=True))
        if line[2].startswith("ours"):
            ours += 1
            assert 0 < float(figures["RSUM"]) <= 600
        elif line[2].startswith("printed"):
            printed = table.printed[line[2].removeprefix("printed, ")][name]
            values = sorted(float(x) for x in figures.values() if x)
            assert values == pytest.approx(sorted(printed.values()))
        else:
            assert line[2].startswith("not run: ")
    assert ours >= 2


# --- intervals and verdicts -----------------------------------------------------------------------


def test_intervals_are_of_paired_differences():
    difference = paired({0: 11.0, 1: 22.0, 2: 33.0, 9: 0.0}, {2: 30.0, 1: 20.0, 0: 10.0, 8: 0.0})
    # values 1, 2 and 3
    assert difference == pytest.approx(Difference(2.0, 4.30265273 / math.sqrt(3), 3))
    assert str(difference) == "+2.0 ± 2.5"
    many = paired(dict(enumerate([1.0, -1.0] * 50)), dict.fromkeys(range(100), 0.0))
    assert many is not None
    assert many.half == pytest.approx(1.98421695 * math.sqrt(100 / 99) / 10)


def test_one_seed_has_no_interval():
    assert paired({4: 1.0}, {4: 3.0}) == Difference(-2.0, math.inf, 1)
    assert paired({4: 1.0}, {5: 3.0}) is None


def judged(claim: Claim, **rows: tuple[float, ...]) -> str:
    """The verdict on a claim for rows with these RSUMs over the seeds."""
    runs = {
        name: {seed: {"before": {"rsum": value}} for seed, value in enumerate(row)}
        for name, row in rows.items()
    }
    return verdict(claim, runs, "before")[0]


@pytest.mark.parametrize(
    ("apart", "a", "expected"),
    [
        (None, (105.0, 115.5, 124.5), HOLDS),
        (None, (95.0, 104.5, 115.5), FAILS),
        (None, (99.0, 111.0, 121.0), UNKNOWN),
        (None, (105.0,), UNKNOWN),  # one seed has no standard deviation
        (None, (), UNKNOWN),
        (3.0, (100.1, 110.0, 119.9), HOLDS),
        (0.1, (100.1, 110.0, 119.9), UNKNOWN),
        (3.0, (110.0, 120.1, 130.0), FAILS),
        # 1 ± 1.5
        (2.0, (100.4, 111.0, 121.6), UNKNOWN),
        (2.6, (100.4, 111.0, 121.6), HOLDS),
    ],
)
def test_a_claim_is_judged_by_the_whole_interval(apart, a, expected):
    """Of a difference, or of closeness, which has no order."""
    if apart is None:
        claims = [Claim("", above=["ab"])]
    else:
        claims = [Claim("", within=[pair], apart=apart) for pair in ("ab", "ba")]
    for claim in claims:
        assert judged(claim, a=a, b=(100.0, 110.0, 120.0)) == expected


@pytest.mark.parametrize(
    ("pairs", "expected"), [("ab da", HOLDS), ("ab cb", UNKNOWN), ("cb ba", FAILS)]
)
def test_all_pairs_of_a_claim_must_hold_and_one_refutes_it(pairs, expected):
    rows = {
        "a": (110.0, 120.1, 130.0),
        "b": (100.0, 110.0, 120.0),
        "c": (99.0, 111.0, 121.0),
        "d": (200.0, 210.1, 220.0),
    }
    assert judged(Claim("", above=pairs.split()), **rows) == expected


def test_a_claim_is_judged_by_its_own_figure():
    rows = {}
    for name, rsum, r1 in (("a", 400.0, 60.0), ("b", 420.0, 50.0)):
        rows[name] = {s: {"before": {"rsum": rsum + s, "i2t_r1": r1 + 1.1 * s}} for s in range(3)}
    found, differences = verdict(Claim("", above=["ab"], figure="i2t_r1"), rows, "before")
    assert found == HOLDS
    assert differences == [pytest.approx(Difference(10.0, 0.0, 3))]
    assert verdict(Claim("", above=["ab"]), rows, "before")[0] == FAILS
