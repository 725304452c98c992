"""Output of ``check_data`` for complete, partial and broken directories."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.retrieval.check_data import check, main


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for split, n in {"train": 4, "dev": 3, "test": 2}.items():
        np.save(tmp_path / f"{split}_ims.npy", np.ones((n, 2, 6), np.float16))
        np.save(tmp_path / f"{split}_global.npy", np.ones((n, 7), np.float32))
        (tmp_path / f"{split}_caps.txt").write_text("a dog runs\n" * 5 * n)
    return tmp_path


def said(data: Path) -> tuple[str, bool]:
    lines, ready = check(data)
    return "\n".join(lines), ready


def test_a_whole_directory_is_ready(data: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main([str(data)])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert "4 images: 2 regions x 6 float16, whole pictures: 7" in out
    assert "20 captions, 5 an image, of 3.0 words (at most 3)" in out
    assert "3 that occur 2 times or more" in out and f"data={data}" in out and "LOOK AT" not in out


def test_what_is_missing_is_named(data: Path, tmp_path: Path):
    (data / "test_ims.npy").unlink()
    out, ready = said(data)
    assert ready and "not there: test_ims.npy (for final_test=true)" in out
    (data / "dev_caps.txt").unlink()
    out, ready = said(data)
    assert (
        not ready
        and "MISSING: dev_caps.txt (to choose the checkpoint by)" in out
        and "{split}_ims.npy" in out
    )
    assert said(data / "nowhere") == (f"{data / 'nowhere'}\n  no such directory", False)


def test_what_is_wrong_is_named(data: Path):
    (data / "dev_caps.txt").write_text("a dog\n" * 14)
    (data / "train_global.npy").unlink()
    np.save(data / "test_ims.npy", np.ones((2, 2, 5), np.float16))
    out, ready = said(data)
    assert not ready and "dev    WRONG: " in out and "14 captions" in out
    assert "MISSING: train_global.npy, for views=regions" in out
    assert "different dimensions" in out


def test_features_and_captions_that_cannot_be_meant_are_pointed_at(data: Path):
    features = np.ones((4, 2, 6), np.float32)
    features[1], features[2, 0, 0] = 0, np.nan
    np.save(data / "train_ims.npy", features)
    (data / "train_caps.txt").write_text("a dog runs\n" * 19 + "...\n")
    out, ready = said(data)
    assert ready and out.count("LOOK AT") == 3
    assert "1 captions without a word" in out and "nan or infinite" in out and "all 0" in out
