"""The generated data set. Captions are stored next to their scenes; when they were, all were found
true by a parser of these sentences.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from support.stored import assert_stored

from examples.retrieval import scenes as module
from examples.retrieval.scenes import (
    DIM,
    REGIONS,
    Scene,
    SceneObject,
    captions,
    generate_scenes,
    region_features,
    render,
    write_scenes,
)

SMALL = {"train": 12, "dev": 6, "test": 5}


@pytest.fixture(scope="module")
def described() -> list[tuple[Scene, list[str]]]:
    """Scenes of two splits and seeds with their captions."""
    return [
        (scene, captions(scene, np.random.default_rng((seed, i))))
        for split, seed in (("test", 0), ("train", 5))
        for i, scene in enumerate(generate_scenes(split, 175, seed))
    ]


def _content(root: Path, *, only: str = "") -> dict[Path, bytes]:
    files = [file for file in root.rglob(f"{only}*") if file.is_file()]
    return {file.relative_to(root): file.read_bytes() for file in files}


def test_same_seed_gives_the_same_files_whatever_the_hash_seed(tmp_path):
    write_scenes(tmp_path / "a", SMALL, seed=3)
    program = f"from examples.retrieval.scenes import *; write_scenes({str(tmp_path / 'b')!r}, "
    command = [sys.executable, "-c", f"{program}{SMALL}, seed=3)"]
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": path}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    write_scenes(tmp_path / "c", SMALL, seed=0)
    a, b, c = (_content(tmp_path / name) for name in "abc")
    assert len(a) == 2 * 3 + 2 + 6 + 5 + 1
    assert a == b
    assert all(a[name] != c[name] for name in a)


def test_a_split_does_not_depend_on_the_sizes_of_the_others(tmp_path):
    write_scenes(tmp_path / "a", SMALL)
    write_scenes(tmp_path / "b", {"train": 3, "dev": 9, "test": 5})
    assert _content(tmp_path / "a", only="test") == _content(tmp_path / "b", only="test")
    for split in ("train", "dev"):
        a, b = (np.load(tmp_path / name / f"{split}_ims.npy") for name in "ab")
        shared = min(len(a), len(b))
        assert np.array_equal(a[:shared], b[:shared])


def test_layout_is_the_precomputed_one(tmp_path):
    write_scenes(tmp_path, SMALL)
    for split, n in SMALL.items():
        features = np.load(tmp_path / f"{split}_ims.npy")
        assert features.shape == (n, REGIONS, DIM) == (n, 12, 208)
        assert features.dtype == np.float16
        assert np.isfinite(features).all()
        lines = (tmp_path / f"{split}_caps.txt").read_text().splitlines()
        assert len(lines) == 5 * n
        assert all(lines)
        pictures = sorted((tmp_path / "pictures").glob(f"{split}_*.png"))
        expected = [] if split == "train" else [f"{split}_{i:05d}.png" for i in range(n)]
        assert [picture.name for picture in pictures] == expected
    for i, scene in enumerate(generate_scenes("dev", SMALL["dev"])):
        with Image.open(tmp_path / "pictures" / f"dev_{i:05d}.png") as picture:
            assert picture.size == (96, 96)
            assert picture.tobytes() == render(scene).tobytes()


def test_features_are_standardised_on_training_scenes(tmp_path):
    write_scenes(tmp_path, {"train": 200, "dev": 1, "test": 1})
    flat = np.load(tmp_path / "train_ims.npy").astype(np.float64).reshape(-1, DIM)
    np.testing.assert_allclose(flat.mean(0), 0, atol=2e-3)
    np.testing.assert_allclose(flat.std(0), 1, atol=2e-3)


def test_features_read_pixels_and_not_labels():
    scene = generate_scenes("dev", 4)[3]
    image = render(scene)
    others = [SceneObject("star", "red", item.size, item.x, item.y) for item in scene.objects]
    relabelled = Scene("paper", tuple(others), family=99)

    def features_of(image: Image.Image, scene: Scene) -> np.ndarray:
        return region_features(image, scene, np.random.default_rng(1))

    features = features_of(image, scene)
    assert features.shape == (REGIONS, DIM)
    assert features.dtype == np.float32
    assert np.array_equal(features, features_of(image, relabelled))
    repainted = features_of(Image.new("RGB", image.size, "green"), scene)
    assert np.abs(features[:, :-5] - repainted[:, :-5]).max(1).min() > 0.05
    assert np.array_equal(features[:, -5:], repainted[:, -5:])


def test_order_of_regions_carries_no_information():
    scene = generate_scenes("dev", 1)[0]
    image = render(scene)
    areas = np.stack(
        [region_features(image, scene, np.random.default_rng(i))[:, -1] for i in range(200)]
    )
    whole = np.bincount((areas == 1).argmax(1), minlength=REGIONS)  # the box of the whole image
    assert (areas == 1).sum() == 200
    assert 5 <= whole.min() <= whole.max() <= 35  # about 200 / 12 each


def test_captions_are_distinct_even_where_objects_look_alike():
    stars = tuple(SceneObject("star", "red", "small", x, 0.2) for x in (0.2, 0.5, 0.8))
    for i in range(2840, 2900):  # seed 2880 draws the same words twice
        assert len(set(captions(Scene("sea", stars, 0), np.random.default_rng(i)))) == 5


def test_captions_are_those_that_were_read(described):
    """The first ones in words, and a sum of all.

    Each is five different sentences; scenes of a family differ in one attribute, and those of two
    splits in more.
    """
    lines = []
    for scene, texts in described[::9]:
        things = [f"{x.size} {x.colour} {x.shape} {x.column}{x.row}" for x in scene.objects]
        lines += [f"{scene.background}: {', '.join(things)}", *texts, ""]
    every = "".join(text for _, texts in described for text in texts)
    lines.append(hashlib.sha256(every.encode()).hexdigest())
    assert_stored("captions", "\n".join(lines) + "\n")


def test_different_scenes_have_different_pictures():
    scenes = generate_scenes("test", 150)
    assert len(set(scenes)) == 150
    assert len({render(scene).tobytes() for scene in scenes}) == 150
    assert all(render(scene).tobytes() == render(scene).tobytes() for scene in scenes[:3])


def test_a_second_call_writes_nothing_and_another_one_starts_over(tmp_path, monkeypatch):
    assert write_scenes(tmp_path, SMALL)
    before = _content(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module, "generate_scenes", lambda *_: pytest.fail("generated again"))
        assert not write_scenes(tmp_path, SMALL)
        assert not write_scenes(str(tmp_path), dict(reversed(SMALL.items())))
    assert write_scenes(tmp_path, {**SMALL, "dev": 2}, seed=3)
    assert len(list(tmp_path.rglob("dev_*.png"))) == 2
    assert write_scenes(tmp_path, SMALL)
    assert _content(tmp_path) == before


def test_an_interrupted_data_set_is_written_again(tmp_path, monkeypatch):
    root = tmp_path / "scenes"
    write_scenes(root, SMALL, seed=3)
    save = np.save

    def stop_late(file, array):
        if file.name == "test_ims.npy":
            raise KeyboardInterrupt
        save(file, array)

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", stop_late)
        with pytest.raises(KeyboardInterrupt):
            write_scenes(root, SMALL)
    # although every file exists, one of them was written with another seed
    assert write_scenes(root, SMALL)
    write_scenes(tmp_path / "fresh", SMALL)
    assert _content(root) == _content(tmp_path / "fresh")
    assert not write_scenes(root, SMALL)


def test_another_data_set_is_not_overwritten(tmp_path):
    np.save(tmp_path / "train_ims.npy", np.zeros((2, 3, 4)))
    with pytest.raises(FileExistsError, match="root"):
        write_scenes(tmp_path, SMALL)
    assert np.load(tmp_path / "train_ims.npy").shape == (2, 3, 4)


@pytest.mark.parametrize(
    "sizes",
    [
        {"train": 0, "dev": 1, "test": 1},
        {"train": 4, "dev": 1},
        {"train": 4, "dev": 1, "test": 1, "val": 1},
    ],
)
def test_wrong_sizes_are_named(tmp_path, sizes):
    with pytest.raises(ValueError, match="sizes: expected at least one scene"):
        write_scenes(tmp_path / "new", sizes)
    assert not (tmp_path / "new").exists()
