"""The ablation tables: valid rows, a grid without repeated or wrongly reused runs, intervals and
verdicts.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import itrloss
from examples.retrieval import ablate, ablate_report
from examples.retrieval.ablate import (
    PAPERS,
    Claim,
    Grid,
    Paper,
    Row,
    Table,
    load_paper,
    main,
    measured,
    run,
    state,
)
from examples.retrieval.ablate_report import (
    FAILS,
    HOLDS,
    UNKNOWN,
    Difference,
    paired,
    verdict,
    write_report,
)
from examples.retrieval.config import Config, make_config
from examples.retrieval.data import Split
from examples.retrieval.evaluate import RECALLS, before_and_after
from examples.retrieval.models import build_model
from examples.retrieval.objectives import Objective, build_loss
from examples.retrieval.train import train
from itrloss.comparison import METHODS
from itrloss.rerank import FastReranker, ReciprocalReranker

SCENES = Path(ablate.__file__).parent / "configs" / "scenes.toml"
TINY = (
    "dim=8",
    "word_dim=8",
    "epochs=1",
    "batch_size=32",
    "lr=1e-2",
    "min_count=1",
    "concepts=10",
    "memory=32",
    "threads=1",
    "tensorboard=false",
    "progress=false",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Data set of 40 + 20 images of 3 regions; the words of a caption identify the components of
    its regions.
    """
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    meanings = rng.normal(size=(12, 8))
    for split, n in {"train": 40, "dev": 20}.items():
        told = rng.integers(12, size=(n, 3))
        np.save(
            root / f"{split}_ims.npy",
            (meanings[told] + 0.1 * rng.normal(size=(n, 3, 8))).astype(np.float16),
        )
        lines = [
            " ".join(f"word{i}" for i in rng.permutation(words)) + "\n"
            for words in told
            for _ in range(5)
        ]
        (root / f"{split}_caps.txt").write_text("".join(lines))
    return root


def small_paper() -> Paper:
    """Paper with two rows and a table of re-rankings, which needs no run of its own."""
    rows = {
        "triplet": Row("triplet loss", ("loss=triplet",)),
        "dcl": Row("full model"),
        "SCAN": Row("attention", cannot="another method"),
    }
    printed = {
        "Flickr30K": {"triplet": {"rsum": 500.0}, "dcl": {"rsum": 510.5}, "SCAN": {"rsum": 465.0}}
    }
    claims = (
        Claim("DCL is better", above=(("dcl", "triplet"),)),
        Claim("and than SCAN", above=(("dcl", "SCAN"),)),
    )
    rerankings = {"plain": Row("not re-ranked"), "FR": Row("re-ranked", rerank=(25, 25, 20, 20))}
    tables = {
        "1": Table("losses", "dcl", rows, printed, claims, note="A note."),
        "2": Table(
            "re-ranking",
            "plain",
            rerankings,
            {},
            (Claim("it helps", above=(("FR", "plain"),)),),
            reranks=True,
        ),
    }
    return Paper("Small", ("loss=dcl", "loss_options.margin=0.25"), tables)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace all papers by the small one, and collect the directories that are trained in."""
    trained: list[str] = []
    monkeypatch.setattr(ablate, "load_paper", lambda name: small_paper())
    monkeypatch.setattr(ablate, "train", lambda config: (trained.append(config.out), train(config)))
    return trained


# --- the tables -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", [None, SCENES])
@pytest.mark.parametrize("paper", PAPERS)
def test_every_row_is_a_run_that_can_be_built(paper: str, file: Path | None, tmp_path: Path):
    grid = Grid(paper, file, (*TINY, "data=somewhere"), out=tmp_path)
    configs = [config for config, _ in grid.runs().values()]
    assert len(configs) >= 9
    for config in configs:
        build_loss(config)
        build_model(config, 8, 20)
    full = grid.config(Row("full model"), 0)
    for table in grid.tables.values():
        assert table.baseline == "none" or grid.config(table.rows[table.baseline], 0) == full


@pytest.mark.parametrize("paper", PAPERS)
def test_tables_are_whole(paper: str):
    for table in load_paper(paper).tables.values():
        rows = set(table.rows)
        assert table.baseline in rows
        assert not [
            name for printed in table.printed.values() for name in printed if name not in rows
        ]
        for claim in table.claims:
            assert {name for pair in claim.pairs for name in pair} <= rows
            assert bool(claim.above) != bool(claim.within) and (claim.apart > 0) == bool(
                claim.within
            )
        for row in table.rows.values():
            known = row.rerank in METHODS or len(row.rerank) in (0, 4)
            assert known if table.reranks else not row.rerank


@pytest.mark.parametrize("paper", ["coder", "user"])
def test_printed_recalls_sum_to_the_printed_rsum(paper: str):
    for table in load_paper(paper).tables.values():
        for printed in table.printed.values():
            assert printed.keys() == table.rows.keys()
            for row in printed.values():
                assert row["rsum"] == pytest.approx(
                    sum(row[recall] for recall in RECALLS), abs=0.11
                )


def test_the_command_line_is_stronger_than_the_file_and_the_file_than_the_paper(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text('loss = "coder"\nconcepts = 7\n[loss_options]\nclusters = 40\nmargin = 0.1\n')
    rows = load_paper("coder").tables["4"].rows
    grid = Grid("coder", file, ("loss_options.margin=0.2",), out=tmp_path)
    assert grid.config(rows["10000"], 0).loss_options == {"clusters": 40, "margin": 0.2}
    assert grid.config(rows["15000"], 0).loss_options == {"clusters": 60, "margin": 0.2}
    assert Grid("coder", out=tmp_path).config(rows["5000"], 0).loss_options == {"clusters": 100}
    triplet = grid.config(load_paper("coder").tables["2"].rows["1"], 0)
    assert (triplet.loss, triplet.loss_options, triplet.concepts) == (
        "triplet",
        {"reduction": "mean"},
        7,
    )


# --- settings of the rows -------------------------------------------------------------------------


def test_without_a_share_concepts_do_not_retrieve():
    torch.manual_seed(0)
    config = make_config(
        {"loss": "coder", "dim": 8, "word_dim": 8, "concepts": 10, "concept_share": 0}
    )
    model = build_model(config, 8, 20).eval()
    regions, words, lengths = (
        torch.randn(3, 4, 8),
        torch.randint(1, 20, (5, 6)),
        torch.full((5,), 6),
    )
    images, texts, *_ = model(regions, words, lengths)
    cosines = torch.cosine_similarity(images[:, None], texts, dim=2)
    found = model.similarity(model.embed_images(regions), model.embed_texts(words, lengths))
    torch.testing.assert_close(found, cosines)


def test_dvse_without_its_parts():
    torch.manual_seed(0)
    sets, texts, residuals = torch.randn(6, 3, 8), torch.randn(6, 8), torch.randn(6, 3, 8)
    gate, ids = torch.tensor([1.0, 1.0, 0.0]).expand(6, 3), torch.arange(6)

    def value(epoch: int = 5, balance: float = 1.0, **values) -> float:
        settings = {"loss": "dvse", "dim": 8, "word_dim": 8, "heads": 3, **values}
        config = make_config({**settings, "loss_options": {"balance": balance, "slack": 0.0}})
        objective = Objective(config, build_model(config, 8, 20))
        objective.begin_epoch(epoch)
        return objective([sets, texts, residuals, gate], ids, ids)[0].item() / 6

    def hinges(mining) -> torch.Tensor:
        loss = itrloss.TripletLoss(0.2, mining, reduction="mean")
        return torch.stack([loss(head, texts) for head in sets.unbind(1)])

    apart = itrloss.DynamicOrthogonalLoss(0.0)
    assert value(variance_weights=False) == pytest.approx(hinges("hardest").sum().item(), rel=1e-5)
    plain = 0.4 * hinges("hardest").sum() + 0.6 * apart(residuals)
    assert value(balance=0.4, variance_weights=False, gate=False) == pytest.approx(
        plain.item(), rel=1e-5
    )
    gated = 0.4 * hinges("hardest").sum() + 0.6 * apart(residuals, gate)
    assert value(balance=0.4, variance_weights=False) == pytest.approx(gated.item(), rel=1e-5)
    weighted = itrloss.DVSEObjective(0.4, slack=0.0)(sets, texts, residuals, None, ids, ids)[0]
    assert value(balance=0.4, gate=False) == pytest.approx(weighted.item(), rel=1e-5)
    # no orthogonal loss in the warm-up either
    assert value(0) == pytest.approx(hinges("all").mean().item(), rel=1e-5)


# --- the grid -------------------------------------------------------------------------------------


def test_a_grid_runs_once_goes_on_and_reports(data: Path, tmp_path: Path, small: list[str]):
    grid = Grid("coder", common=(*TINY, f"data={data}"), seeds=(0, 1), out=tmp_path)
    assert {state(config) for config, _ in grid.runs().values()} == {"to run"}
    assert "cannot be told" in write_report(grid)  # there are no runs yet
    run(grid)
    assert len(small) == len(set(small)) == 4  # re-rankings use the full model's runs
    run(grid)
    assert len(small) == 4

    (Path(small[0]) / "metrics.json").unlink()
    log = (Path(small[0]) / "log.jsonl").read_text()
    assert state(grid.config(small_paper().tables["1"].rows["triplet"], 0)) == "interrupted"
    run(grid)
    assert small[4:] == small[:1]
    assert (Path(small[0]) / "log.jsonl").read_text() == log  # nothing was trained again

    tables = grid.tables
    ours = measured(grid, tables["1"])
    assert set(ours["dcl"]) == {0, 1} and ours["SCAN"] == {}
    reranked = measured(grid, tables["2"])
    assert reranked["plain"][0]["after"] == ours["dcl"][0]["before"]
    # FR's settings are the defaults
    assert reranked["FR"][1]["after"] == pytest.approx(ours["dcl"][1]["after"])

    text = write_report(grid)
    assert (tmp_path / "report.md").read_text() == text
    for expected in (
        "Table 1: losses",
        "cannot be run: another method",
        "500.0",
        "-10.5",
        "A note.",
        "printed +10.5",
    ):
        assert expected in text
    report = json.loads((tmp_path / "report.json").read_text())
    row = report["tables"]["1"]["rows"]["triplet"]
    values = [
        ours["triplet"][seed]["before"]["rsum"] - ours["dcl"][seed]["before"]["rsum"]
        for seed in (0, 1)
    ]
    assert row["difference"]["before"]["mean"] == pytest.approx(sum(values) / 2)
    assert row["difference"]["before"]["half"] == pytest.approx(
        12.706 * abs(values[0] - values[1]) / 2
    )
    assert [claim["verdict"] for claim in report["tables"]["1"]["claims"]][1] == UNKNOWN


def test_a_row_is_re_ranked_by_its_own_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    split = Split(np.zeros((20, 1, 1)), ["caption"] * 100, 5)
    scores = rng.uniform(size=(20, 100)).astype(np.float32)
    np.save(tmp_path / "dev_scores.npy", scores)
    monkeypatch.setattr(ablate, "load_split", lambda *named: split)
    config = make_config({"data": "somewhere", "out": str(tmp_path)})
    given = before_and_after(torch.from_numpy(scores), split, FastReranker())
    for numbers in ((25, 25, 20, 20), (9, 4, 3, 17)):
        wanted = before_and_after(
            torch.from_numpy(scores), split, FastReranker(numbers[:2], numbers[2:])
        )
        assert ablate._reranked(config, Row("", rerank=numbers), given) == wanted
    reciprocal = before_and_after(torch.from_numpy(scores), split, ReciprocalReranker())
    assert ablate._reranked(config, Row("", rerank="reciprocal"), given) == reciprocal != wanted
    assert wanted["after"] != given["after"]


def test_rows_are_judged_by_what_their_table_is_about(
    tmp_path: Path, small: list[str], monkeypatch
):
    """Losses are compared before re-ranking, re-rankings after it."""

    def runs(before: float, after: float) -> dict[int, dict[str, dict[str, float]]]:
        return {
            s: {"before": {"rsum": before + s}, "after": {"rsum": after + 1.1 * s}}
            for s in range(3)
        }

    found = {
        "triplet": runs(100, 120),
        "dcl": runs(110, 110),
        "SCAN": {},
        "plain": runs(105, 100),
        "FR": runs(100, 110),
    }
    monkeypatch.setattr(
        ablate_report, "measured", lambda grid, table: {name: found[name] for name in table.rows}
    )
    write_report(Grid("coder", seeds=(0, 1, 2), out=tmp_path))
    tables = json.loads((tmp_path / "report.json").read_text())["tables"]
    verdicts = {
        number: [claim["verdict"] for claim in table["claims"]] for number, table in tables.items()
    }
    assert verdicts == {"1": [HOLDS, UNKNOWN], "2": [HOLDS]}
    means = [
        claim["differences"][0]["mean"]
        for table in tables.values()
        for claim in table["claims"][:1]
    ]
    assert means == pytest.approx([10, 10])


def test_other_settings_are_other_runs(data: Path, tmp_path: Path, small: list[str]):
    grid = Grid("coder", common=(*TINY, f"data={data}"), out=tmp_path, only=("2",))
    run(grid)
    assert len(small) == 1
    for other in (("lr=2e-2",), ("loss_options.margin=0.1",), (f"data={tmp_path}",), ("epochs=2",)):
        assert (
            state(Grid("coder", common=(*grid.common, *other), out=tmp_path).config(Row(""), 0))
            == "to run"
        )
    same = Grid("coder", common=(*grid.common, "threads=2", "final_test=true"), out=tmp_path)
    assert state(same.config(Row(""), 0)) == "finished"


def test_rows_that_differ_after_their_best_epochs_are_named(
    data: Path, tmp_path: Path, monkeypatch
):
    rows = {
        "early": Row("as it is"),
        "late": Row("would end later", ("patience=9",)),
        "other": Row("", ("lr=1e-3",)),
    }
    tables = {
        "1": Table("a", "early", rows, {}, ()),
        "2": Table("b", "early", {"early": rows["early"]}, {}, ()),
    }
    monkeypatch.setattr(ablate, "load_paper", lambda name: Paper("Alike", ("loss=dcl",), tables))
    grid = Grid("coder", common=(*TINY, f"data={data}"), out=tmp_path)
    run(grid)
    text = write_report(grid)
    assert "in rows early and late." in text and text.count("Other settings") == 1


def test_a_row_that_diverges_does_not_end_the_grid(data: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "load_paper", lambda name: small_paper())

    def diverge(config):
        raise FloatingPointError("epoch 1")

    monkeypatch.setattr(ablate, "train", diverge)
    run(Grid("coder", common=(*TINY, f"data={data}"), out=tmp_path))
    assert capsys.readouterr().out.count("diverged: epoch 1") == 2


def test_the_command(tmp_path: Path, small: list[str], data: Path, capsys: pytest.CaptureFixture):
    command = [
        "coder",
        "--out",
        str(tmp_path),
        "--seeds",
        "0",
        "1",
        f"data={data}",
        *TINY,
        "--tables",
        "1",
    ]
    main([*command, "--dry-run"])
    out = capsys.readouterr().out
    assert (
        out.count("to run") == 4 and "1: SCAN  cannot be run: another method" in out and not small
    )
    main([*command, "--report"])
    assert "no runs" in capsys.readouterr().out and not small
    main(command)
    out = capsys.readouterr().out
    assert "[4/4] dcl_" in out and "| **dcl**" in out and len(small) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss=dcl"], "the grid itself decides loss"),
        (["--tables", "9"], "coder has 2, 3, 4, S3, got '9'"),
        (["loss_options.nothing=1"], "nothing"),
    ],
)
def test_wrong_words_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        main(["coder", "--dry-run", *words])
    assert message in capsys.readouterr().err


# --- intervals and verdicts -----------------------------------------------------------------------


def test_intervals_are_of_paired_differences():
    difference = paired({0: 11.0, 1: 22.0, 2: 33.0, 9: 0.0}, {2: 30.0, 1: 20.0, 0: 10.0, 8: 0.0})
    # values 1, 2 and 3
    assert difference == pytest.approx(Difference(2.0, 4.303 / math.sqrt(3), 3))
    assert str(difference) == "+2.0 ± 2.5"
    assert paired({4: 1.0}, {4: 3.0}) == Difference(-2.0, math.inf, 1)
    assert paired({4: 1.0}, {5: 3.0}) is None
    many = paired(dict(enumerate([1.0, -1.0] * 50)), dict.fromkeys(range(100), 0.0))
    assert many is not None and many.half == pytest.approx(2.086 * math.sqrt(100 / 99) / 10)


def planted(*rows: tuple[float, ...]) -> dict[str, dict[int, dict[str, dict[str, float]]]]:
    """Rows "a", "b", ... with these RSUMs over the seeds."""
    return {
        name: {seed: {"before": {"rsum": value}} for seed, value in enumerate(row)}
        for name, row in zip("abcd", rows, strict=False)
    }


@pytest.mark.parametrize(
    ("a", "expected"),
    [
        ((105.0, 115.5, 124.5), HOLDS),
        ((95.0, 104.5, 115.5), FAILS),
        ((99.0, 111.0, 121.0), UNKNOWN),
        ((105.0,), UNKNOWN),  # one seed has no standard deviation
        ((), UNKNOWN),
    ],
)
def test_planted_differences_are_judged(a: tuple[float, ...], expected: str):
    rows = planted(a, (100.0, 110.0, 120.0))
    assert verdict(Claim("", above=(("a", "b"),)), rows, "before")[0] == expected


def test_a_claim_of_closeness_needs_the_whole_interval():
    rows = planted((100.1, 110.0, 119.9), (100.0, 110.0, 120.0), (110.0, 120.1, 130.0))
    assert verdict(Claim("", within=(("a", "b"),), apart=3.0), rows, "before")[0] == HOLDS
    assert verdict(Claim("", within=(("a", "b"),), apart=0.1), rows, "before")[0] == UNKNOWN
    assert verdict(Claim("", within=(("c", "b"),), apart=3.0), rows, "before")[0] == FAILS
    # 1 ± 1.5 and, in reverse order, -1 ± 1.5
    rows = planted((100.4, 111.0, 121.6), (100.0, 110.0, 120.0))
    for pair in (("a", "b"), ("b", "a")):
        assert verdict(Claim("", within=(pair,), apart=2.0), rows, "before")[0] == UNKNOWN
        assert verdict(Claim("", within=(pair,), apart=2.6), rows, "before")[0] == HOLDS


def test_a_claim_is_judged_by_its_own_figure():
    """The figure of a claim may contradict RSUM."""
    rows = {
        name: {
            seed: {"before": {"rsum": rsum + seed, "i2t_r1": r1 + 1.1 * seed}} for seed in range(3)
        }
        for name, rsum, r1 in (("a", 400.0, 60.0), ("b", 420.0, 50.0))
    }
    found, differences = verdict(Claim("", above=(("a", "b"),), figure="i2t_r1"), rows, "before")
    assert found == HOLDS and differences == [pytest.approx(Difference(10.0, 0.0, 3))]
    assert verdict(Claim("", above=(("a", "b"),)), rows, "before")[0] == FAILS


def test_all_pairs_of_a_claim_must_hold_and_one_refutes_it():
    rows = planted(
        (110.0, 120.1, 130.0), (100.0, 110.0, 120.0), (99.0, 111.0, 121.0), (200.0, 210.1, 220.0)
    )
    assert verdict(Claim("", above=(("a", "b"), ("d", "a"))), rows, "before")[0] == HOLDS
    assert verdict(Claim("", above=(("a", "b"), ("c", "b"))), rows, "before")[0] == UNKNOWN
    assert verdict(Claim("", above=(("c", "b"), ("b", "a"))), rows, "before")[0] == FAILS


def test_a_multiple_of_a_number_stays_what_it_was():
    config = Config(lr=0.5, memory=100, loss_options={"clusters": 5})
    assert ablate._times(config, "lr", "0.1").lr == pytest.approx(0.05)
    assert ablate._times(config, "memory", "0.003").memory == 1
    assert ablate._times(config, "loss_options.clusters", "1.5").loss_options["clusters"] == 8
    with pytest.raises(ValueError, match=r"loss_options\.margin: must be a number"):
        ablate._times(config, "loss_options.margin", "2")
