"""CLIP's features of raw images, by a tiny CLIP with random weights."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import drawn

from examples.retrieval.clip_features import MEAN, STD, main, pixels
from examples.retrieval.data import load_split
from examples.retrieval.train import Trainer


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(drawn.tiny_clip(tmp_path_factory.mktemp("clip")))


@pytest.fixture
def folder(photos: Path, tmp_path: Path) -> Path:
    """A copy to which features may be added."""
    shutil.copytree(photos, tmp_path / "photos")
    return tmp_path / "photos"


def test_features_are_those_of_clip(clip, folder):
    from transformers import CLIPModel

    main([str(folder), "--model", clip])
    split = load_split(folder, "dev")
    assert split.wholes is not None
    assert split.wholes.shape == (len(split.features), 6)
    picture = Image.open(split.features.paths[3])
    square = pixels(picture, 32)
    with torch.no_grad():
        expected = CLIPModel.from_pretrained(clip).eval().get_image_features(square[None])
    expected = getattr(expected, "pooler_output", expected)
    np.testing.assert_allclose(split.wholes[3], expected[0].numpy(), atol=1e-3)


def test_pictures_are_cut_to_their_centre_and_normalised():
    picture = Image.new("RGB", (60, 30), (255, 0, 0))
    picture.paste((0, 0, 255), (15, 0, 45, 30))  # its central square
    found = pixels(picture, 8)
    assert found.shape == (3, 8, 8)
    blue = (torch.tensor([0.0, 0.0, 1.0]) - MEAN) / STD
    torch.testing.assert_close(found[:, 4, 4], blue)
    torch.testing.assert_close(found[:, 2:6, 1:7], blue[:, None, None].expand(3, 4, 6))


def test_spatial_features_are_the_projected_positions_and_are_read_as_their_mean(clip, folder):
    from transformers import CLIPVisionModelWithProjection

    main([str(folder), "--model", clip, "--spatial"])
    stored = np.load(folder / "dev_global.npy")
    split = load_split(folder, "dev")
    assert stored.shape == (len(split.features), 4, 6)  # 32 pixels, patches of 16
    np.testing.assert_allclose(split.wholes, stored.astype(np.float32).mean(1), atol=1e-6)
    model = CLIPVisionModelWithProjection.from_pretrained(clip).eval()
    square = pixels(Image.open(split.features.paths[0]), 32)
    with torch.no_grad():
        states = model.vision_model(square[None]).last_hidden_state[0]
        whole = model(square[None]).image_embeds[0]
        each = model.visual_projection(model.vision_model.post_layernorm(states))
    torch.testing.assert_close(each[0], whole)  # the first position is the whole's
    np.testing.assert_allclose(stored[0], each[1:].numpy(), atol=1e-3)


def test_a_run_has_them_for_its_enhancement(config, clip, folder, resnet, tmp_path):
    main([str(folder), "--model", clip])
    settings = {"backbone": resnet, "enhancement": "cge", "batch_size": 8}
    config = replace(config, data=str(folder), **settings)
    trainer = Trainer(config)
    batch = next(trainer.batches.epoch(0))
    assert batch.wholes is not None and batch.wholes.shape == (8, 6)
    assert np.isfinite(trainer.train_step(batch))
    (folder / "train_global.npy").unlink()
    with pytest.raises(ValueError, match=r"cge.: needs \S+train_global\.npy"):
        Trainer(replace(config, out=str(tmp_path / "other")))


def test_what_is_no_clip_or_has_no_pictures_is_named(clip, bert, data, folder, capsys):
    for words, said in (
        ([str(folder), "--model", bert], "model = "),
        ([str(folder), "--model", "./nowhere"], "must be a CLIP with weights"),
        ([str(data), "--model", clip], "must be a directory of raw images"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert said in capsys.readouterr().err
