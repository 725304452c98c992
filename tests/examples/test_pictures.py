"""Data sets of raw images: images and captions of their splits, and loading of pictures."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support import drawn

from examples.retrieval.data import Batches, Split, Vocabulary, load_split
from examples.retrieval.evaluate import recalls
from examples.retrieval.pictures import Images, layout, listed_images, random_box


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    return drawn.cub(tmp_path)


def names(root: Path, split: str) -> list[str]:
    return [image.path.name for image in listed_images(root, split)]


# --- Karpathy's JSON ------------------------------------------------------------------------------


def test_images_of_restval_join_the_training_set(photos: Path):
    assert layout(photos) == "karpathy"
    train = [f"train_{i}.png" for i in range(12)]
    assert names(photos, "train") == train + [f"restval_{i}.png" for i in range(4)]
    assert names(photos, "dev") == [f"val_{i}.png" for i in range(8)]
    assert names(photos, "test") == [f"test_{i}.png" for i in range(8)]


def test_an_unknown_split_is_named(photos: Path):
    with pytest.raises(ValueError, match="split 'val': must be one of train, dev, test"):
        listed_images(photos, "val")


@pytest.mark.parametrize("per_image", [1, 3, 5])
def test_every_image_keeps_as_many_captions_as_all_have(tmp_path: Path, per_image: int):
    root = drawn.karpathy(tmp_path, per_image)
    split = load_split(root, "train")
    wanted = []
    for entry in json.loads((root / "dataset_coco.json").read_text())["images"]:
        if entry["split"] in ("train", "restval"):
            said = entry["sentences"][:per_image]
            wanted += [" ".join(sentence["raw"].split()) for sentence in said]
    assert split.captions == wanted
    assert split.captions_per_image == per_image
    assert split.text_ids.tolist() == [i for i in range(16) for _ in range(per_image)]


@pytest.mark.parametrize("folder", ["", "train2014"])
def test_images_are_found_below_images(tmp_path: Path, folder: str):
    drawn.draw(tmp_path / "images" / folder / "1.png", "red", "blue")
    image = {"filename": "1.png", "split": "test", "sentences": [{"raw": "Red."}]}
    if folder:
        image["filepath"] = folder
    (tmp_path / "dataset_flickr30k.json").write_text(json.dumps({"images": [image]}))
    assert load_split(tmp_path, "test", image_size=8).regions(0).shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must have images with filename"),
        ('{"images": [{"split": "train"}]}', r"sentences with raw \('filename'\)"),
        ('{"images": []}', "no image of the split 'train'"),
        (
            '{"images": [{"split": "train", "filename": "1.jpg", "sentences": []}]}',
            r"1\.jpg: has no caption",
        ),
    ],
)
def test_a_list_of_images_that_is_wrong_is_named(tmp_path: Path, text: str, message: str):
    (tmp_path / "dataset_flickr8k.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        listed_images(tmp_path, "train")


def test_two_lists_of_images_are_refused(tmp_path: Path):
    for name in ("dataset_a.json", "dataset_b.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"dataset_a\.json, dataset_b\.json: must be one file"):
        listed_images(tmp_path, "train")


# --- CUB ------------------------------------------------------------------------------------------


def test_captions_of_birds_match_every_image_of_their_class(birds: Path):
    split = load_split(birds, "train")
    assert split.captions_per_image == 10
    kinds = [0, 0, 1, 1, 2, 2]
    assert split.image_ids.tolist() == kinds
    assert split.text_ids.tolist() == [kind for kind in kinds for _ in range(10)]
    batches = Batches(split, Vocabulary.from_captions(split.captions, 1), 6, 10, seed=0)
    batch = next(batches.epoch(0))
    assert batch.image_ids.sort().values.tolist() == kinds
    right = (split.image_ids[:, None] == split.text_ids).float()
    assert recalls(right, split)["i2t_r_precision"] == 100


def test_images_of_birds_are_held_out_for_development(birds: Path):
    assert layout(birds) == "cub"
    assert names(birds, "dev") == [f"{kind}_0.jpg" for kind in ("red", "green", "blue")]
    assert names(birds, "test") == [f"white_{i}.jpg" for i in range(3)]
    wanted = [f"{kind}_{i}.jpg" for kind in ("red", "green", "blue") for i in (1, 2)]
    assert names(birds, "train") == wanted


# --- pictures -------------------------------------------------------------------------------------


def test_a_picture_is_scaled_for_evaluation(tmp_path: Path):
    drawn.draw(tmp_path / "a.png", "red", "blue")
    Image.new("L", (5, 9), 51).save(tmp_path / "grey.png")
    images = Images([tmp_path / "a.png", tmp_path / "grey.png"], 16)
    whole = images.read(0)
    assert whole.shape == (3, 16, 16)
    for column, colour in ((0, "red"), (-1, "blue")):
        wanted = torch.tensor(drawn.COLOURS[colour]) / 255
        torch.testing.assert_close(whole[:, 3, column], wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(images.read(1), torch.full((3, 16, 16), 0.2))


def test_a_picture_is_flipped_one_time_in_two_for_training(tmp_path: Path):
    drawn.draw(tmp_path / "a.png", "red", "blue")
    images = Images([tmp_path / "a.png"], 16)
    kept = [bool(images.read(0, [seed])[0, 8, 0] > 0.5) for seed in range(40)]
    assert 8 < sum(kept) < 32  # red on the left


def test_cuts_stay_in_the_picture():
    boxes = np.array([random_box(np.random.default_rng(i), 40, 20) for i in range(500)])
    width = (boxes[:, 2] - boxes[:, 0]) / 40
    height = (boxes[:, 3] - boxes[:, 1]) / 20
    np.testing.assert_allclose(width, height)
    assert 0.6 <= width.min() < 0.62
    assert 0.98 < width.max() <= 1
    assert boxes.min() >= 0
    assert boxes[:, 2].max() <= 40
    assert boxes[:, 3].max() <= 20
    # Relative position of a crop: uniform, with vertical and horizontal positions independent.
    right = boxes[:, 0] / 40 / (1 - width)
    down = boxes[:, 1] / 20 / (1 - height)
    for place in (right, down):
        assert 0.45 < place.mean() < 0.55
        assert place.min() < 0.05
        assert place.max() > 0.95
    assert abs(np.corrcoef(right, down)[0, 1]) < 0.15


def test_a_picture_is_cut_anew_in_every_epoch_and_by_every_seed(tmp_path: Path):
    # no two crops of it are equal
    noise = np.random.default_rng(0).integers(256, size=(40, 48, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    split = Split(Images([tmp_path / "noise.png"] * 6, 8), ["caption"] * 6, 1)

    def cut(seed: int, epoch: int) -> list[torch.Tensor]:
        """Crops in the order of the images, because the order of samples changes every epoch."""
        batches = Batches(split, Vocabulary.from_captions(split.captions, 1), 6, 1, seed)
        batch = next(batches.epoch(epoch))
        order = batch.image_ids.argsort()
        return list(batch.regions[order])

    first = cut(0, 0)
    assert all(map(torch.equal, first, cut(0, 0)))
    assert not any(map(torch.equal, first, cut(0, 1)))
    assert not any(map(torch.equal, first, cut(1, 0)))
    assert not any(torch.equal(a, b) for a, b in combinations(first, 2))


def test_a_resumed_epoch_and_several_processes_have_the_crops_of_one(photos: Path):
    split = load_split(photos, "train", image_size=8)
    words = Vocabulary.from_captions(split.captions, 1)
    whole = [batch.regions for batch in Batches(split, words, 8, 1, seed=3).epoch(2)]
    rest = [batch.regions for batch in Batches(split, words, 8, 1, seed=3).epoch(2, first_step=6)]
    assert len(rest) == 4
    assert all(map(torch.equal, rest, whole[6:]))
    halves = [next(Batches(split, words, 4, 1, 3, rank, 2).epoch(2)) for rank in (0, 1)]
    assert torch.equal(whole[0], torch.cat([half.regions for half in halves]))


def test_a_file_that_is_no_picture_is_named(tmp_path: Path):
    (tmp_path / "broken.jpg").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"broken\.jpg: no image that can be read"):
        Images([tmp_path / "broken.jpg"], 8).read(0)
