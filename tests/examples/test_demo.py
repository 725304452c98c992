"""The demo's settings, and a short one."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from examples.retrieval import demo
from examples.retrieval.config import load_config
from examples.retrieval.demo import CONFIG


def test_demo_runs_differ_in_the_loss_only(tmp_path):
    """And USER in its model."""
    user, *configs = [asdict(demo.demo_config(loss, tmp_path)) for loss in demo.LOSSES]
    assert [config["loss"] for config in configs] == ["triplet", "infonce", "hal", "dcl"]
    about_the_loss = {"loss", "loss_options", "warmup_epochs", "out"}
    for config in configs:
        differing = {name for name in config if config[name] != configs[0][name]}
        assert differing <= about_the_loss
    shipped = load_config(CONFIG.with_name("user_scenes.toml"))
    for name in ("loss", "loss_options", "enhancement", "momentum"):
        assert user[name] == getattr(shipped, name)
    differing = {name for name in user if user[name] != configs[0][name]}
    assert differing == {*about_the_loss, "enhancement", "momentum"}


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
    assert "embeddings: 30 pictures of dev" in page
