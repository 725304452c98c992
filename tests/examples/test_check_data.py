"""Output of ``check_data`` for complete, partial and broken directories."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support import drawn

from examples.retrieval.check_data import Report, main


@pytest.fixture
def features(tmp_path: Path) -> Path:
    root = tmp_path / "features"
    root.mkdir()
    return drawn.features(root, {"train": 4, "dev": 3, "test": 2})


@pytest.fixture
def pictures(photos: Path, tmp_path: Path) -> Path:
    return shutil.copytree(photos, tmp_path / "pictures")


def said(data: Path) -> tuple[str, bool]:
    report = Report(data, min_count=2)
    text = "\n".join(report.lines)
    assert len(text.split("\n")) <= 24  # fits on one screen
    return text, report.ready


def test_a_whole_directory_is_ready(features, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(features)])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert "4 images: 4 regions x 8 float16, whole pictures: 7" in out
    assert "20 captions, 5 an image, of " in out
    assert "that occur 2 times or more" in out
    assert f"data={features} out=" in out
    assert "LOOK AT" not in out


def test_missing_files_are_named(features):
    (features / "test_ims.npy").unlink()
    out, ready = said(features)
    assert ready
    assert "not there: test_ims.npy (for final_test=true)" in out
    (features / "dev_caps.txt").unlink()
    out, ready = said(features)
    assert not ready
    assert "MISSING: dev_caps.txt (to choose the checkpoint by)" in out
    assert "{split}_ims.npy" in out


def test_a_missing_directory_is_named(tmp_path):
    nowhere = tmp_path / "nowhere"
    assert said(nowhere) == (f"{nowhere}\n  no such directory", False)


def test_wrong_files_are_named(features):
    (features / "dev_caps.txt").write_text("a dog\n" * 14)
    (features / "train_global.npy").unlink()
    np.save(features / "test_ims.npy", np.ones((2, 4, 5), np.float16))
    out, ready = said(features)
    assert not ready
    assert "dev    WRONG: " in out
    assert "14 captions" in out
    assert "MISSING: train_global.npy, for views=regions" in out
    assert "the splits' features have different dimensions" in out


def test_features_and_captions_that_cannot_be_meant_are_pointed_at(features):
    regions = np.ones((4, 4, 8), np.float32)
    regions[1] = 0
    regions[2, 0, 0] = np.nan
    np.save(features / "train_ims.npy", regions)
    (features / "train_caps.txt").write_text("a dog runs\n" * 19 + "...\n")
    out, ready = said(features)
    assert ready
    assert out.count("LOOK AT") == 3
    assert "1 captions without a word" in out
    assert "nan or infinite" in out
    assert "all 0" in out


def test_raw_images_are_ready(pictures):
    out, ready = said(pictures)
    assert ready
    assert "train  16 raw images, the first " in out
    assert "80 captions, 5 an image, of " in out
    assert f"data={pictures} backbone=microsoft/resnet-50" in out


def test_birds_are_ready(tmp_path):
    out, ready = said(drawn.cub(tmp_path))
    assert ready
    assert "train  6 raw images" in out
    assert "60 captions, 10 an image, of 4.0 words (at most 4); 3 classes" in out


def test_images_that_are_missing_or_broken_are_named(pictures):
    (pictures / "images" / "train2014" / "train_3.png").unlink()
    (pictures / "images" / "val2014" / "val_0.png").write_bytes(b"no picture")
    out, ready = said(pictures)
    assert not ready
    assert "MISSING: 1 of the images, the first " in out
    assert "train_3.png" in out
    assert "WRONG: " in out
    assert "val_0.png: no image that can be read" in out
    assert "they belong in images/" in out


def test_missing_lists_of_birds_are_named(tmp_path):
    birds = drawn.cub(tmp_path)
    (birds / "trainvalclasses.txt").unlink()
    out, ready = said(birds)
    assert not ready
    assert "trainvalclasses.txt: no such file" in out
    assert "seen_test_images.txt" in out
