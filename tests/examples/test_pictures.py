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
from support.stored import assert_stored

from examples.retrieval.data import Batches, Split, Vocabulary, load_split
from examples.retrieval.evaluate import recalls
from examples.retrieval.pictures import Images, layout, listed_images, random_box


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    return drawn.cub(tmp_path)


def described(root: Path) -> list[str]:
    """What is read of a data set, but for pixels."""
    lines = [layout(root)]
    for name in ("train", "dev", "test"):
        split = load_split(root, name)
        files = [image.path.relative_to(root).as_posix() for image in listed_images(root, name)]
        lines.append(f"{name}: {split.captions_per_image} captions an image")
        captions = split.captions
        for k, (file, number) in enumerate(zip(files, split.image_ids.tolist(), strict=True)):
            own = slice(k * split.captions_per_image, (k + 1) * split.captions_per_image)
            numbers = sorted(set(split.text_ids[own].tolist()))
            lines.append(f"  {number} {file}, {numbers}: {' | '.join(captions[own])}")
    return lines


# --- lists of images ------------------------------------------------------------------------------


def test_data_sets_are_those_that_were_read(tmp_path, birds):
    """Images of restval join the training set, every image keeps as many captions as all have;
    captions of birds match every image of their class, the first of which are for development;
    numbers of images are there once, or once a caption.
    """
    lines = described(birds)
    for per_image in (1, 3):
        lines += described(drawn.karpathy(tmp_path / str(per_image), per_image))
    lines += described(drawn.mapping(tmp_path / "mapping"))
    assert_stored("data_sets", "\n".join(lines) + "\n")


def test_an_unknown_split_is_named(photos):
    with pytest.raises(ValueError, match="split 'val': must be one of train, dev, test, testall"):
        listed_images(photos, "val")


def test_vse_infinitys_files_that_do_not_fit_are_named(tmp_path):
    root = drawn.mapping(tmp_path)
    (root / "precomp" / "dev_ids.txt").write_text("73\n74\n75\n")
    with pytest.raises(ValueError, match=r"10 lines in dev_caps\.txt must be five .* which has 3"):
        load_split(root, "dev")
    (root / "precomp" / "dev_ids.txt").write_text("73\n99\n")
    with pytest.raises(ValueError, match=r"id_mapping\.json: has no file for 99 of dev_ids\.txt"):
        load_split(root, "dev")


def test_images_without_a_folder_are_found_below_images(tmp_path):
    drawn.draw(tmp_path / "images" / "1.png", "red", "blue")
    image = {"filename": "1.png", "split": "test", "sentences": [{"raw": "Red."}]}
    (tmp_path / "dataset_flickr30k.json").write_text(json.dumps({"images": [image]}))
    split = load_split(tmp_path, "test", image_size=8)
    assert split.regions(0).shape == (3, 8, 8)


def test_batches_of_birds_have_the_numbers_of_their_classes(birds):
    split = load_split(birds, "train")
    batches = Batches(split, Vocabulary.from_captions(split.captions, 1), 6, 10, seed=0)
    batch = next(batches.epoch(0))
    assert batch.image_ids.sort().values.tolist() == [0, 0, 1, 1, 2, 2]
    right = (split.image_ids[:, None] == split.text_ids).float()
    assert recalls(right, split)["i2t_r_precision"] == 100


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
