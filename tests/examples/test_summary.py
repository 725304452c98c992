"""The table of means over seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.stored import assert_stored

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


def test_seeds_are_averaged_and_other_losses_and_settings_kept_apart(tmp_path, capsys):
    values = (90.0, 100.0, 110.0)
    runs = [write(tmp_path / f"hal_{s}", x, seed=s) for s, x in enumerate(values)]
    runs += runs[:1]  # a directory counts once
    runs.append(write(tmp_path / "dcl_0", 70.0, loss="dcl"))
    runs.append(write(tmp_path / "faster", 80.0, lr=2e-3))
    summary.main(runs)
    assert_stored("summary", capsys.readouterr().out)


def test_runs_of_other_test_splits_are_kept_apart(tmp_path, capsys):
    splits = ("test", "testall")
    runs = [write(tmp_path / name, 90.0, seed=s, test_split=name) for s, name in enumerate(splits)]
    summary.main(runs)
    said = capsys.readouterr().out
    assert all(name in said for name in splits)
    assert "±" not in said


def test_an_unfinished_run_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"nothing: no finished run, config\.json is missing"):
        summary.main([str(tmp_path / "nothing")])


def test_a_split_that_was_not_measured_is_named(tmp_path):
    run = write(tmp_path / "a", 90.0)
    with pytest.raises(SystemExit, match="has no metrics on test, only on dev"):
        summary.main([run, "--split", "test"])
