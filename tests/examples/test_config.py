"""Settings of a run: files, overrides, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("batchsize=3", ValueError, "unknown setting 'batchsize'"),
        ("seed=1.5", TypeError, "seed = 1.5.*int"),
        ("epochs=true", TypeError, "epochs = True.*int"),
        ("lr=fast", TypeError, "lr = 'fast'.*float"),
        ("lr.fast=1", TypeError, "lr = {'fast': 1}.*float"),
        ("loss_options=3", TypeError, "loss_options = 3.*dict"),
        ("scenes_sizes.train=many", TypeError, r"scenes_sizes\.train = 'many'.*int"),
        ("lr", ValueError, "key=value"),
        ("epochs=0", ValueError, "epochs = 0: must be at least 1"),
        ("decay_epochs=0", ValueError, r"decay_epochs = \[0\].*at least 1"),
        ("word_dropout=1.0", ValueError, r"word_dropout = 1.0: must be in \[0, 1\)"),
        ("momentum=2", ValueError, r"momentum = 2.0: must be in \[0, 1\]"),
        ("clip=-1", ValueError, "clip = -1.0.*positive"),
        ("micro_batch=-1", ValueError, "micro_batch = -1.*negative"),
        ("rerank=[1, 2, 3]", ValueError, r"rerank = \[1.0, 2.0, 3.0\].*four numbers"),
        ("warmup=hinge", ValueError, "warmup = 'hinge': must be 'triplet' or 'infonce'"),
        ("precision=int8", ValueError, "precision = 'int8': .* or 'float16'"),
        ("views=regions+global", ValueError, "views = 'regions.global'.*'whole'"),
        ("caption_weight=0.5", ValueError, "captions_per_image = 1: must be at least 2"),
    ],
)
def test_a_wrong_setting_is_named(override, error, message):
    with pytest.raises(error, match=message):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["enhancement=sge", "views=whole"], "enhancement = 'sge': must be empty for views"),
        (["loss=dvse", "views=whole"], "views = 'whole': must be 'regions' too for loss = 'dvse'"),
    ],
)
def test_settings_that_exclude_each_other_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(None, overrides)


def test_a_file_that_is_no_toml_is_named(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text("loss = dcl")
    with pytest.raises(ValueError, match=r"a\.toml: "):
        load_config(file)


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


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (Config(loss="softmax"), ValueError, "loss = 'softmax': .*triplet, infonce, .*dvse"),
        (Config(loss="triplet", loss_options={"scale": 0.1}), TypeError, "scale"),
        (Config(loss="coder", loss_options={"nothing": 1}), TypeError, "nothing"),
    ],
)
def test_an_unknown_loss_or_option_is_named(config, error, message):
    with pytest.raises(error, match=message):
        build_loss(config)


def test_loss_options_reach_the_loss_and_its_parts():
    assert build_loss(Config(loss_options={"engine": "dense"})).engine == "dense"
    coder = build_loss(Config(loss="coder", loss_options={"temperature": 0.2, "diversity": "none"}))
    assert coder.memory.temperature == 0.2
    assert coder.memory.diversity is None


def test_the_command_names_a_wrong_setting(capsys):
    with pytest.raises(SystemExit):
        train.main(["seed=1", "--config", str(CONFIGS / "scenes.toml"), "loss=softmax"])
    assert "loss = 'softmax'" in capsys.readouterr().err
