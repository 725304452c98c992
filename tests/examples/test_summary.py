"""The table of means over seeds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from examples.retrieval import summary


def write(run: Path, rsum: float, loss: str = "hal", **config) -> Path:
    run.mkdir(parents=True)
    figures = dict.fromkeys(summary.FIGURES, 10.0)
    metrics = {"dev": {"before": {**figures, "rsum": rsum}, "after": {**figures, "rsum": rsum + 5}}}
    settings = {
        "loss": loss,
        "loss_options": {"scale": 20.0},
        "seed": 0,
        "out": str(run),
        "lr": 1e-3,
        **config,
    }
    (run / "config.json").write_text(json.dumps(settings))
    (run / "metrics.json").write_text(json.dumps(metrics))
    return run


def rows_of(*runs: Path) -> dict[tuple[str, str], list[str]]:
    header, *rows = summary.table(summary.group([summary.load(run, "dev") for run in runs]))
    assert header[-1] == "rsum"
    return {(row[0], row[2]): row for row in rows}


def test_seeds_are_averaged_and_losses_kept_apart(tmp_path: Path):
    runs = [write(tmp_path / str(x), x, seed=seed) for seed, x in enumerate((90.0, 100.0, 110.0))]
    rows = rows_of(*runs, write(tmp_path / "dcl", 70.0, loss="dcl"))
    assert rows["hal scale=20.0", "no"][1:] == ["3", "no", *["10.0 ± 0.0"] * 6, "100.0 ± 10.0"]
    assert rows["hal scale=20.0", "yes"][-1] == "105.0 ± 10.0"
    assert rows["dcl scale=20.0", "no"][-1] == "70.0"


def test_another_setting_is_another_line(tmp_path: Path):
    rows = rows_of(write(tmp_path / "a", 90.0), write(tmp_path / "b", 100.0, lr=2e-3))
    assert {name for name, _ in rows} == {"hal scale=20.0 lr=0.001", "hal scale=20.0 lr=0.002"}


@pytest.mark.parametrize(
    ("name", "missing"), [("nothing", "config.json"), ("unfinished", "metrics.json")]
)
def test_an_unfinished_run_is_named(
    tmp_path: Path, name: str, missing: str, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["summary", str(tmp_path / name)])
    with pytest.raises(SystemExit, match=rf"{name}.*{missing}"):
        summary.main()


def test_the_command_prints_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(sys, "argv", ["summary", str(write(tmp_path / "a", 90.0))])
    summary.main()
    out = capsys.readouterr().out.splitlines()
    assert len(out) == 3 and out[1].endswith("90.0") and out[2].endswith("95.0")
    monkeypatch.setattr(sys, "argv", ["summary", str(tmp_path / "a"), "--split", "test"])
    with pytest.raises(SystemExit, match="only on dev"):
        summary.main()
