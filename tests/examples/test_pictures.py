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
    """The names of the images of a split."""
    return [image.path.name for image in listed_images(root, split)]


# --- Karpathy's JSON ------------------------------------------------------------------------------


def test_images_of_restval_join_the_training_set(photos):
    assert layout(photos) == "karpathy"
    train = [f"train_{i}.png" for i in range(12)]
    restval = [f"restval_{i}.png" for i in range(4)]
    assert names(photos, "train") == train + restval
    assert names(photos, "dev") == [f"val_{i}.png" for i in range(8)]
    assert names(photos, "test") == [f"test_{i}.png" for i in range(8)]


def test_an_unknown_split_is_named(photos):
    with pytest.raises(ValueError, match="split 'val': must be one of train, dev, test"):
        listed_images(photos, "val")


@pytest.mark.parametrize("per_image", [1, 3, 5])
def test_every_image_keeps_as_many_captions_as_all_have(tmp_path, per_image):
    root = drawn.karpathy(tmp_path, per_image)
    split = load_split(root, "train")
    listed = json.loads((root / "dataset_coco.json").read_text())
    wanted = []
    for entry in listed["images"]:
        if entry["split"] in ("train", "restval"):
            for sentence in entry["sentences"][:per_image]:
                words = sentence["raw"].split()
                wanted.append(" ".join(words))
    assert split.captions == wanted
    assert split.captions_per_image == per_image
    text_ids = torch.arange(16).repeat_interleave(per_image)
    assert split.text_ids.tolist() == text_ids.tolist()


@pytest.mark.parametrize("folder", ["", "train2014"])
def test_images_are_found_below_images(tmp_path, folder):
    drawn.draw(tmp_path / "images" / folder / "1.png", "red", "blue")
    image = {"filename": "1.png", "split": "test", "sentences": [{"raw": "Red."}]}
    if folder:
        image["filepath"] = folder
    (tmp_path / "dataset_flickr30k.json").write_text(json.dumps({"images": [image]}))
    split = load_split(tmp_path, "test", image_size=8)
    assert split.regions(0).shape == (3, 8, 8)


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
def test_a_list_of_images_that_is_wrong_is_named(tmp_path, text, message):
    (tmp_path / "dataset_flickr8k.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        listed_images(tmp_path, "train")


def test_two_lists_of_images_are_refused(tmp_path):
    for name in ("dataset_a.json", "dataset_b.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"dataset_a\.json, dataset_b\.json: must be one file"):
        listed_images(tmp_path, "train")


# --- CUB ------------------------------------------------------------------------------------------


def test_captions_of_birds_match_every_image_of_their_class(birds):
    split = load_split(birds, "train")
    assert split.captions_per_image == 10
    kinds = [0, 0, 1, 1, 2, 2]
    assert split.image_ids.tolist() == kinds
    kinds_of_captions = torch.tensor(kinds).repeat_interleave(10)
    assert split.text_ids.tolist() == kinds_of_captions.tolist()
    vocabulary = Vocabulary.from_captions(split.captions, 1)
    batches = Batches(split, vocabulary, 6, 10, seed=0)
    batch = next(batches.epoch(0))
    assert batch.image_ids.sort().values.tolist() == kinds
    right = (split.image_ids[:, None] == split.text_ids).float()
    figures = recalls(right, split)
    assert figures["i2t_r_precision"] == 100


def test_images_of_birds_are_held_out_for_development(birds):
    assert layout(birds) == "cub"
    assert names(birds, "dev") == [f"{kind}_0.jpg" for kind in ("red", "green", "blue")]
    assert names(birds, "test") == [f"white_{i}.jpg" for i in range(3)]
    wanted = [f"{kind}_{i}.jpg" for kind in ("red", "green", "blue") for i in (1, 2)]
    assert names(birds, "train") == wanted


# --- pictures -------------------------------------------------------------------------------------


def test_a_picture_is_scaled_for_evaluation(tmp_path):
    drawn.draw(tmp_path / "a.png", "red", "blue")
    Image.new("L", (5, 9), 51).save(tmp_path / "grey.png")
    images = Images([tmp_path / "a.png", tmp_path / "grey.png"], 16)
    whole = images.read(0)
    assert whole.shape == (3, 16, 16)
    for column, colour in ((0, "red"), (-1, "blue")):
        wanted = torch.tensor(drawn.COLOURS[colour]) / 255
        torch.testing.assert_close(whole[:, 3, column], wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(images.read(1), torch.full((3, 16, 16), 0.2))


def test_a_picture_is_flipped_one_time_in_two_for_training(tmp_path):
    drawn.draw(tmp_path / "a.png", "red", "blue")
    images = Images([tmp_path / "a.png"], 16)
    kept = 0
    for seed in range(40):
        picture = images.read(0, [seed])
        red_on_the_left = picture[0, 8, 0] > 0.5
        kept += bool(red_on_the_left)
    assert 8 < kept < 32


def test_cuts_stay_in_the_picture():
    boxes = np.array([random_box(np.random.default_rng(i), 40, 20) for i in range(500)])
    left, top, right, bottom = boxes.T
    width = (right - left) / 40
    height = (bottom - top) / 20
    np.testing.assert_allclose(width, height)
    assert 0.6 <= width.min() < 0.62
    assert 0.98 < width.max() <= 1
    assert boxes.min() >= 0
    assert right.max() <= 40
    assert bottom.max() <= 20
    # Relative position of a crop: uniform, with vertical and horizontal positions independent.
    across = left / 40 / (1 - width)
    down = top / 20 / (1 - height)
    for place in (across, down):
        assert 0.45 < place.mean() < 0.55
        assert place.min() < 0.05
        assert place.max() > 0.95
    correlation = np.corrcoef(across, down)[0, 1]
    assert abs(correlation) < 0.15


def test_a_picture_is_cut_anew_in_every_epoch_and_by_every_seed(tmp_path):
    # no two crops of it are equal
    noise = np.random.default_rng(0).integers(256, size=(40, 48, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    images = Images([tmp_path / "noise.png"] * 6, 8)
    split = Split(images, ["caption"] * 6, 1)
    vocabulary = Vocabulary.from_captions(split.captions, 1)

    def cut(seed: int, epoch: int) -> list[torch.Tensor]:
        """Crops in the order of the images, because the order of samples changes every epoch."""
        batches = Batches(split, vocabulary, 6, 1, seed)
        batch = next(batches.epoch(epoch))
        order = batch.image_ids.argsort()
        return list(batch.regions[order])

    first = cut(0, 0)
    assert all(map(torch.equal, first, cut(0, 0)))
    assert not any(map(torch.equal, first, cut(0, 1)))
    assert not any(map(torch.equal, first, cut(1, 0)))
    assert not any(torch.equal(a, b) for a, b in combinations(first, 2))


def test_a_resumed_epoch_and_several_processes_have_the_crops_of_one(photos):
    split = load_split(photos, "train", image_size=8)
    words = Vocabulary.from_captions(split.captions, 1)

    def crops(size: int, first_step: int = 0, rank: int = 0, world: int = 1) -> list[torch.Tensor]:
        """The crops of each batch of the third epoch."""
        batches = Batches(split, words, size, 1, 3, rank, world)
        return [batch.regions for batch in batches.epoch(2, first_step)]

    whole = crops(8)
    rest = crops(8, first_step=6)
    assert len(rest) == 4
    assert all(map(torch.equal, rest, whole[6:]))
    first_of_0 = crops(4, rank=0, world=2)[0]
    first_of_1 = crops(4, rank=1, world=2)[0]
    assert torch.equal(whole[0], torch.cat([first_of_0, first_of_1]))


def test_a_file_that_is_no_picture_is_named(tmp_path):
    path = tmp_path / "broken.jpg"
    path.write_bytes(b"no picture")
    images = Images([path], 8)
    with pytest.raises(ValueError, match=r"broken\.jpg: no image that can be read"):
        images.read(0)
