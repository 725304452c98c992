"""Data sets of raw images: images and captions of their splits, loading of pictures, output of
``check_data``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import drawn

from examples.retrieval.check_data import check
from examples.retrieval.config import Config
from examples.retrieval.data import Batches, Split, Vocabulary, load_split
from examples.retrieval.evaluate import recalls
from examples.retrieval.pictures import Images, layout, listed_images, random_box
from examples.retrieval.train import train


@pytest.fixture
def coco(tmp_path: Path) -> Path:
    return drawn.karpathy(tmp_path)


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    return drawn.cub(tmp_path)


def said(data: Path) -> tuple[str, bool]:
    lines, ready = check(data)
    assert len("\n".join(lines).split("\n")) <= 24  # fits on one screen
    return "\n".join(lines), ready


# --- Karpathy's JSON ------------------------------------------------------------------------------


def test_the_validation_images_that_are_left_join_the_training_set(coco: Path):
    names = {
        split: [image.path.name for image in listed_images(coco, split)]
        for split in ("train", "dev", "test")
    }
    assert names["train"] == [f"train_{i}.png" for i in range(12)] + [
        f"restval_{i}.png" for i in range(4)
    ]
    assert names["dev"] == [f"val_{i}.png" for i in range(8)] and names["test"] == [
        f"test_{i}.png" for i in range(8)
    ]
    with pytest.raises(ValueError, match="split 'val': must be one of train, dev, test"):
        listed_images(coco, "val")


@pytest.mark.parametrize("per_image", [1, 3, 5])
def test_every_image_keeps_as_many_captions_as_all_have(tmp_path: Path, per_image: int):
    root = drawn.karpathy(tmp_path, per_image)
    split = load_split(root, "train")
    entries = [
        e
        for e in json.loads((root / "dataset_coco.json").read_text())["images"]
        if "val" != e["split"] != "test"
    ]
    wanted = [" ".join(s["raw"].split()) for e in entries for s in e["sentences"][:per_image]]
    assert split.captions == wanted and split.captions_per_image == per_image
    assert any(len(e["sentences"]) > per_image for e in entries) and not any(
        "\n" in c for c in wanted
    )
    assert split.text_ids.tolist() == [i for i in range(16) for _ in range(per_image)]
    samples = Batches(split, Vocabulary.from_captions(split.captions, 1), 4, per_image, seed=0)
    assert next(samples.epoch(0)).words.shape[0] == 4 * per_image


@pytest.mark.parametrize("folder", ["images", "flickr30k-images", "."])
def test_images_are_found_in_their_usual_folders(tmp_path: Path, folder: str):
    drawn.draw(tmp_path / folder / "1.png", "red", "blue")
    image = {"filename": "1.png", "split": "test", "sentences": [{"raw": "Red."}]}
    (tmp_path / "dataset_flickr30k.json").write_text(json.dumps({"images": [image]}))
    split = load_split(tmp_path, "test", image_size=8)
    assert isinstance(split.features, Images) and split.features.read(slice(0, 1)).shape == (
        1,
        3,
        8,
        8,
    )


# --- CUB ------------------------------------------------------------------------------------------


def test_captions_of_birds_match_every_image_of_their_class(birds: Path):
    split = load_split(birds, "train")
    assert split.captions_per_image == 10 and len(split.captions) == 60 and len(split.features) == 6
    assert split.image_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert split.text_ids.tolist() == [0] * 30 + [1] * 30
    batches = Batches(split, Vocabulary.from_captions(split.captions, 1), 6, 10, seed=0)
    batch = next(batches.epoch(0))
    assert batch.image_ids.sort().values.tolist() == [0, 0, 0, 1, 1, 1]
    assert torch.equal(batch.text_ids, batch.image_ids.repeat_interleave(10))
    right = (split.image_ids[:, None] == split.text_ids).float()
    assert recalls(right, split)["i2t_r_precision"] == 100


def test_splits_of_birds_are_lists_of_classes_or_those_of_pcme(birds: Path):
    def names(split: str) -> list[str]:
        return [image.path.name for image in listed_images(birds, split)]

    assert names("train") == [f"{c}_{i}.jpg" for c in ("red", "green") for i in range(3)]
    assert names("dev") == [f"blue_{i}.jpg" for i in range(3)] and names("test") == [
        f"white_{i}.jpg" for i in range(3)
    ]
    (birds / "seen_test_images.txt").write_text("000.red/red_1.jpg\n002.blue/blue_0.jpg\n")
    assert names("dev") == ["red_1.jpg", "blue_0.jpg"] and names("test") == [
        f"white_{i}.jpg" for i in range(3)
    ]
    assert sorted(names("train") + names("dev")) == sorted(
        f"{c}_{i}.jpg" for c in ("red", "green", "blue") for i in range(3)
    )


def test_a_model_of_birds_trains(birds: Path, tmp_path: Path):
    config = Config(
        data=str(birds),
        out=str(tmp_path / "run"),
        dim=8,
        word_dim=8,
        epochs=1,
        batch_size=8,
        min_count=1,
        loss="uto",
        backbone="resnet18",
        image_size=32,
        memory=16,
        tensorboard=False,
        progress=False,
        final_test=True,
    )
    metrics = train(config)["metrics"]
    assert 0 <= metrics["test"]["before"]["t2i_r_precision"] <= 100
    assert train(replace(config, resume=True))["metrics"] == metrics


# --- pictures -------------------------------------------------------------------------------------


def test_pictures_are_scaled_for_evaluation_and_cut_and_mirrored_for_training(tmp_path: Path):
    drawn.draw(tmp_path / "a.png", "red", "blue")
    drawn.draw(tmp_path / "b.png", "white", "green")
    Image.new("L", (5, 9), 51).save(tmp_path / "grey.png")
    images = Images([tmp_path / name for name in ("a.png", "b.png", "grey.png")], 16)
    whole = images.read(slice(0, 2))
    assert whole.shape == (2, 3, 16, 16) and whole.dtype == torch.float32
    for picture, (left, right) in zip(whole, (("red", "blue"), ("white", "green")), strict=True):
        for column, colour in ((0, left), (-1, right)):
            wanted = torch.tensor(drawn.COLOURS[colour]) / 255
            torch.testing.assert_close(picture[:, 3, column], wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(images.read(np.array([2])), torch.full((1, 3, 16, 16), 0.2))

    def first_columns(seed: int) -> torch.Tensor:
        rngs = [np.random.default_rng([seed, i]) for i in range(40)]
        return images.read(np.zeros(40, np.int64), rngs)[:, 0, 8, 0]

    red = first_columns(0) > 0.5
    assert 8 < red.sum() < 32  # blue: flipped
    assert torch.equal(first_columns(0), first_columns(0)) and not torch.equal(
        first_columns(0), first_columns(1)
    )


def test_cuts_stay_in_the_picture():
    boxes = np.array([random_box(np.random.default_rng(i), 40, 20) for i in range(500)])
    width, height = (boxes[:, 2] - boxes[:, 0]) / 40, (boxes[:, 3] - boxes[:, 1]) / 20
    np.testing.assert_allclose(width, height)
    assert 0.6 <= width.min() < 0.62 and 0.98 < width.max() <= 1
    assert boxes.min() >= 0 and boxes[:, 2].max() <= 40 and boxes[:, 3].max() <= 20
    # Relative position of a crop: uniform, with vertical and horizontal positions independent.
    right, down = boxes[:, 0] / 40 / (1 - width), boxes[:, 1] / 20 / (1 - height)
    assert all(
        0.45 < place.mean() < 0.55 and place.min() < 0.05 and place.max() > 0.95
        for place in (right, down)
    )
    assert abs(np.corrcoef(right, down)[0, 1]) < 0.15


def test_several_processes_cut_a_sample_as_one_would(coco: Path):
    split = load_split(coco, "train", image_size=8)
    vocabulary = Vocabulary.from_captions(split.captions, 1)
    alone = next(Batches(split, vocabulary, 8, 1, seed=3).epoch(2))
    halves = [next(Batches(split, vocabulary, 4, 1, 3, rank, 2).epoch(2)) for rank in (0, 1)]
    assert torch.equal(alone.regions, torch.cat([half.regions for half in halves]))
    whole = [batch.regions for batch in Batches(split, vocabulary, 8, 1, seed=3).epoch(2)]
    rest = [
        batch.regions for batch in Batches(split, vocabulary, 8, 1, seed=3).epoch(2, first_step=6)
    ]
    assert len(rest) == 4 and all(
        map(torch.equal, rest, whole[6:])
    )  # a resumed run has the crops of the interrupted one
    another = next(Batches(split, vocabulary, 8, 1, seed=3).epoch(3))
    assert not torch.equal(alone.regions, another.regions)


def test_a_picture_is_cut_anew_in_every_epoch_and_by_every_seed(tmp_path: Path):
    # no two crops of it are equal
    noise = np.random.default_rng(0).integers(256, size=(40, 48, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    split = Split(Images([tmp_path / "noise.png"] * 6, 8), ["caption"] * 6, 1)

    def cut(seed: int, epoch: int) -> list[torch.Tensor]:
        """Crops in the order of the images, because the order of samples changes every epoch."""
        batch = next(
            Batches(split, Vocabulary.from_captions(split.captions, 1), 6, 1, seed).epoch(epoch)
        )
        return list(batch.regions[batch.image_ids.argsort()])

    first = cut(0, 0)
    assert all(map(torch.equal, first, cut(0, 0)))
    assert not any(map(torch.equal, first, cut(0, 1))) and not any(
        map(torch.equal, first, cut(1, 0))
    )
    assert not any(torch.equal(a, b) for a, b in combinations(first, 2))


def test_a_file_that_is_no_picture_is_named(tmp_path: Path):
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"broken\.jpg: no image that can be read"):
        Images([tmp_path / "broken.jpg"], 8).read(slice(0, 1))


# --- check_data -----------------------------------------------------------------------------------


def test_check_data_knows_whole_sets_of_raw_images(coco: Path):
    out, ready = said(coco)
    assert ready and layout(coco) == "karpathy"
    assert "train  16 raw images, the first " in out and "80 captions, 5 an image, of " in out
    assert f"data={coco} backbone=resnet50" in out


def test_check_data_knows_birds(birds: Path):
    out, ready = said(birds)
    assert ready and layout(birds) == "cub"
    assert (
        "train  6 raw images" in out
        and "60 captions, 10 an image, of 4.0 words (at most 4); 2 classes" in out
    )


def test_check_data_says_which_images_are_missing_and_where_they_belong(coco: Path):
    (coco / "train2014" / "train_3.png").unlink()
    (coco / "val2014" / "val_0.png").write_bytes(b"no picture")
    out, ready = said(coco)
    assert not ready and "MISSING: 1 of the images, the first " in out and "train_3.png" in out
    assert (
        "WRONG: " in out
        and "val_0.png: no image that can be read" in out
        and "in images/ (or flickr30k" in out
    )


def test_check_data_names_what_is_wrong_with_the_lists(tmp_path: Path):
    file = tmp_path / "dataset_flickr8k.json"
    for text, message in (
        ("{", "must have images with filename"),
        (
            '{"images": [{"split": "train"}]}',
            "must have images with filename, split and sentences with raw ('filename')",
        ),
        ('{"images": []}', "no image of the split 'train'"),
        (
            '{"images": [{"split": "train", "filename": "1.jpg", "sentences": []}]}',
            "1.jpg: has no caption",
        ),
    ):
        file.write_text(text)
        out, ready = said(tmp_path)
        assert not ready and message in out
    (tmp_path / "dataset_coco.json").write_text("{}")
    assert "dataset_coco.json, dataset_flickr8k.json: must be one file" in said(tmp_path)[0]


def test_check_data_asks_for_the_lists_of_birds(birds: Path):
    (birds / "valclasses.txt").unlink()
    out, ready = said(birds)
    assert not ready and "valclasses.txt: no such file" in out and "seen_test_images.txt" in out
