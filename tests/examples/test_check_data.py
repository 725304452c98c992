"""Output of ``check_data`` for complete, partial and broken directories."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from support import drawn
from support.stored import assert_stored

from examples.retrieval.check_data import Report, main

SUSPICIOUS = np.ones((4, 4, 8), np.float32)
SUSPICIOUS[1] = 0
SUSPICIOUS[2, 0, 0] = np.nan

# A kind of directory, and files that are other ones, or, with None, not there.
CASES = {
    "features": ("features", {}),
    "features without a test split": ("features", {"test_ims.npy": None}),
    "features without captions": ("features", {"dev_caps.txt": None}),
    "features that do not fit": (
        "features",
        {
            "dev_caps.txt": "a dog\n" * 14,
            "train_global.npy": None,
            "test_ims.npy": np.ones((2, 4, 5), np.float16),
        },
    ),
    "features of other dimensions": (
        "features",
        {"test_ims.npy": np.ones((2, 4, 5), np.float16)},
    ),
    "global features that a split lacks": ("features", {"dev_global.npy": None}),
    "features and captions that cannot be meant": (
        "features",
        {"train_ims.npy": SUSPICIOUS, "train_caps.txt": "a dog runs\n" * 19 + "...\n"},
    ),
    "pictures": ("photos", {}),
    "pictures that are missing or broken": (
        "photos",
        {"images/train2014/train_3.png": None, "images/val2014/val_0.png": "no picture"},
    ),
    "pictures of VSE-infinity": ("mapping", {}),
    "pictures of VSE-infinity without numbers": ("mapping", {"precomp/dev_ids.txt": None}),
    "birds": ("birds", {}),
    "birds without a list": ("birds", {"trainvalclasses.txt": None}),
}


@pytest.fixture
def folders(tmp_path, photos):
    """Return a copy of a kind of directory, with some files changed."""

    def make(name, kind, files):
        root = tmp_path / name
        if kind == "photos":
            shutil.copytree(photos, root)
        elif kind == "mapping":
            drawn.mapping(root)
        else:
            root.mkdir()
        if kind == "features":
            drawn.features(root, {"train": 4, "dev": 3, "test": 2})
        elif kind == "birds":
            drawn.cub(root)
        for file, content in files.items():
            if content is None:
                (root / file).unlink()
            elif isinstance(content, str):
                (root / file).write_text(content)
            else:
                np.save(root / file, content)
        return root

    return make


def test_what_is_said_of_directories(folders, tmp_path):
    parts = []
    for name, (kind, files) in CASES.items():
        root = folders(name, kind, files)
        report = Report(root)
        text = "\n".join(report.lines)
        assert len(text.split("\n")) <= 24  # fits on one screen
        parts += [f"# {name}: ready {report.ready}", text.replace(str(root), "DATA"), ""]
    assert_stored("check_data", "\n".join(parts))
    nowhere = Report(tmp_path / "nowhere")
    assert nowhere.lines == [str(tmp_path / "nowhere"), "  MISSING: no such directory"]
    assert not nowhere.ready


def test_the_command_tells_by_its_status(folders, capsys):
    for name, status in (("features", 0), ("features without captions", 1)):
        root = folders(name, *CASES[name])
        with pytest.raises(SystemExit) as ended:
            main([str(root)])
        assert ended.value.code == status
        assert capsys.readouterr().out.startswith(f"{root}\n  train  4 images: ")
