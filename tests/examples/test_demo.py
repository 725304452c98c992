"""The demo's settings, and a short one."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from examples.retrieval import demo


def test_demo_runs_differ_in_the_loss_only(tmp_path):
    configs = [asdict(demo.demo_config(loss, tmp_path)) for loss in demo.LOSSES]
    assert [config["loss"] for config in configs] == ["triplet", "infonce", "hal", "dcl"]
    for config in configs:
        differing = {name for name in config if config[name] != configs[0][name]}
        assert differing <= {"loss", "loss_options", "warmup_epochs", "out"}


@pytest.mark.slow
def test_quick_demo_runs_to_the_end(tmp_path, capsys):
    demo.main(["--out", str(tmp_path), "--quick"])
    said = capsys.readouterr().out
    page = (tmp_path / "report.html").read_text()
    for loss in demo.LOSSES:
        assert f"{loss}: RSUM" in said
        assert loss in page
    assert f"{tmp_path / 'report.html'} is the report" in said
    assert "data:image/jpeg" in page
