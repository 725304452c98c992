"""Settings of a run: files, overrides, and what is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from support.transcripts import replay

from examples.retrieval import train
from examples.retrieval.config import Config, load_config
from examples.retrieval.objectives import LOSSES, build_loss

CONFIGS = Path(train.__file__).parent / "configs"


def test_overrides_win_over_the_file(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('loss = "dcl"\nlr = 1\n[loss_options]\nmargin = 0.3\nepsilon = 0.1\n')
    overrides = ["out=1", "seed=7", "loss_options.margin=0.2", "loss=dcl", "progress=false"]
    config = load_config(file, overrides)
    assert (config.out, config.seed, config.loss, config.progress) == ("1", 7, "dcl", False)
    assert config.loss_options == {"margin": 0.2, "epsilon": 0.1}
    assert type(config.lr) is float


def test_another_loss_drops_the_loss_options_of_the_file(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('loss = "dcl"\n[loss_options]\nmargin = 0.3\n')
    assert load_config(file, ["loss=hal"]).loss_options == {}
    assert load_config(file, ["loss=hal", "loss_options.scale=20"]).loss_options == {"scale": 20}


def test_the_default_loss_keeps_the_loss_options_of_a_file_without_loss(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("[loss_options]\ntemperature = 0.2\n")
    assert load_config(file, ["loss=infonce"]).loss_options == {"temperature": 0.2}
    assert load_config(file, ["loss=hal"]).loss_options == {}


def complaint(*overrides: str) -> str:
    """Return the error of settings, or of a loss with them."""
    try:
        build_loss(load_config(None, list(overrides)))
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_what_is_said_of_settings():
    replay("settings", settings=complaint)


def test_a_file_that_is_no_toml_is_named(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("loss = dcl")
    with pytest.raises(ValueError, match=r"a\.toml: "):
        load_config(file)


def test_a_wrong_setting_in_a_file_is_named_with_its_line(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('# seed = 2\nviews = "global"\n[scenes_sizes]\ntrain = 0.5\n')
    with pytest.raises(ValueError, match=r"^\S+a\.toml:3: scenes_sizes\.train = 0\.5: must be"):
        load_config(file)
    with pytest.raises(ValueError, match=r"^\S+a\.toml:2: views = 'global': must be"):
        load_config(file, ["scenes_sizes.train=5"])
    with pytest.raises(ValueError, match=r"^views = 'local': must be"):
        load_config(file, ["scenes_sizes.train=5", "views=local"])


def test_help_lists_all_settings(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    said = capsys.readouterr().out
    for field in fields(Config):
        assert f"\n  {field.name}=" in said
    assert "\n  epochs=15\n" in said


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_a_shipped_file_has_valid_settings(file):
    config = load_config(file)
    loss = build_loss(config)
    assert type(loss) is LOSSES[config.loss]
    for name, value in config.loss_options.items():
        if name == "clusters":
            assert len(loss.prototypes.centroids) == value
        else:  # an option of the loss, or of a part of it
            assert value in [getattr(part, name, None) for part in loss.modules()]


def test_loss_options_reach_the_loss_and_its_parts():
    assert build_loss(Config(loss_options={"engine": "dense"})).engine == "dense"
    coder = build_loss(Config(loss="coder", loss_options={"temperature": 0.2, "diversity": "none"}))
    assert coder.memory.temperature == 0.2
    assert coder.memory.diversity is None


def test_the_command_names_a_wrong_setting(capsys):
    with pytest.raises(SystemExit):
        train.main(["seed=1", "--config", str(CONFIGS / "scenes.toml"), "loss=softmax"])
    assert "loss = 'softmax'" in capsys.readouterr().err
