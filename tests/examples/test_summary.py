"""The table of means over seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.retrieval import summary


def write(run: Path, rsum: float, **settings) -> str:
    """Write a finished run, whose RSUM re-ranking raises by 5; return its directory."""
    run.mkdir()
    before = dict.fromkeys(summary.FIGURES, 10.0) | {"rsum": rsum}
    after = before | {"rsum": rsum + 5}
    metrics = {"dev": {"before": before, "after": after}}
    config = {"loss": "hal", "seed": 0, "out": str(run), "lr": 1e-3, **settings}
    (run / "config.json").write_text(json.dumps(config))
    (run / "metrics.json").write_text(json.dumps(metrics))
    (run / "log.jsonl").write_text("")
    (run / "dev_scores.npy").touch()
    return str(run)


def lines_of(*runs: str, capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The words of each line below the head."""
    summary.main(runs)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "On the dev split."
    return [line.split() for line in lines[2:-2]]


def test_seeds_are_averaged_and_losses_kept_apart(tmp_path, capsys):
    values = (90.0, 100.0, 110.0)
    seeds = [write(tmp_path / f"hal_{s}", x, seed=s) for s, x in enumerate(values)]
    dcl = write(tmp_path / "dcl_0", 70.0, loss="dcl")
    lines = lines_of(*seeds, seeds[0], dcl, capsys=capsys)  # a directory counts once
    assert lines[0] == ["hal", "3", *["10.0", "±", "0.0"] * 6, "100.0", "±", "10.0"]
    assert lines[1] == ["re-ranked", *["10.0", "±", "0.0"] * 6, "105.0", "±", "10.0"]
    assert lines[2] == ["dcl_0", "1", *["10.0"] * 6, "70.0"]
    assert lines[3] == ["re-ranked", *["10.0"] * 6, "75.0"]


def test_another_setting_is_another_line(tmp_path, capsys):
    a = write(tmp_path / "a", 90.0)
    b = write(tmp_path / "b", 100.0, lr=2e-3)
    assert [line[0] for line in lines_of(a, b, capsys=capsys)[::2]] == ["a", "b"]


def test_an_unfinished_run_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"nothing: no finished run, config\.json is missing"):
        summary.main([str(tmp_path / "nothing")])


def test_a_split_that_was_not_measured_is_named(tmp_path):
    run = write(tmp_path / "a", 90.0)
    with pytest.raises(SystemExit, match="has no metrics on test, only on dev"):
        summary.main([run, "--split", "test"])
