"""A synthetic data set: small rendered scenes with five true captions each.

It allows training a retrieval model and inspecting its results without any downloaded data. A scene
is two to five coloured shapes in front of a background (`scene_drawing.py`). Each of its captions
(`scene_captions.py`) describes another aspect, so that no caption holds all information of the
picture. Two in five scenes come in families whose members differ from the first one in exactly one
attribute of one object: hard negatives, as in real collections.

Everything is determined by a seed. Each family, caption set and region set has its own random
stream, identified by (seed, split, stage, index), so a split does not depend on the sizes of the
others, and the first n scenes of a split do not depend on its size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from .scene_captions import captions
from .scene_drawing import BACKGROUNDS, CANVAS, COLOURS, render

T = TypeVar("T")

VERSION = 1  # increment it when the same seed gives different files
SPLITS = ("train", "dev", "test")
SIZES = {"train": 2000, "dev": 300, "test": 300}
REGIONS = 12  # regions per image, R
GRID = 8  # a region's pixels are resized to GRID x GRID
# pixels, mean, deviation, centre against border, edges, box geometry
DIM = 3 * GRID**2 + 3 + 3 + 3 + 2 + 5

SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond", "ring", "crescent")
# a large one has room for a small object in front of it
CONTAINERS = ("circle", "square", "diamond", "ring")
RADII = {"small": 0.08, "medium": 0.12, "large": 0.17}  # in canvas widths
CLASHES = {
    ("grass", "green"),
    ("sea", "blue"),
    ("sunset", "orange"),
    ("sand", "yellow"),
    ("paper", "white"),
}
THIRDS = (0.19, 0.5, 0.81)  # objects stand near the nine crossings of these columns and rows ...
# ... and this far from them at most, so that "left", "middle" and "top" are unambiguous
WANDER = 0.06
EDGE = 0.01  # between the circle around an object and the edge of the canvas, at least
GAP = 0.03  # between the circles around two objects that do not overlap

# repeated; 10 of 25 have siblings
FAMILY_SIZES = (1, 1, 1, 2, 1, 1, 1, 1, 3, 1, 1, 1, 2, 1, 1, 1, 1, 3, 1)
# number of training scenes whose statistics standardise the features, for any training size
CALIBRATION = 200


@dataclass(frozen=True)
class SceneObject:
    """A shape, colour and size (of SHAPES, COLOURS, RADII), its centre in canvas widths from the
    top left corner, and its turn in degrees (a few, for looks; no caption speaks of it)."""

    shape: str
    colour: str
    size: str
    x: float
    y: float
    turn: float = 0.0

    @property
    def radius(self) -> float:
        return RADII[self.size]

    @property
    def column(self) -> int:
        """0 left, 1 middle, 2 right."""
        return int(self.x * 3)

    @property
    def row(self) -> int:
        """0 top, 1 middle, 2 bottom."""
        return int(self.y * 3)

    def distance(self, other: SceneObject) -> float:
        return math.hypot(self.x - other.x, self.y - other.y)

    def contains(self, other: SceneObject) -> bool:
        """Whether the other object is entirely in front of this one (or in the hole of this
        ring).
        """
        roomy = self.shape in CONTAINERS and self.size == "large" and other.size == "small"
        return roomy and self.distance(other) < 0.03


@dataclass(frozen=True)
class Scene:
    """Objects from back to front, and a background; near-duplicates share the number `family`."""

    background: str
    objects: tuple[SceneObject, ...]
    family: int


# --- drawing scenes at random ---------------------------------------------------------------------


_SCENE, _CAPTIONS, _REGIONS = 1, 2, 3  # stages, for the names of random streams


def _stream(seed: int, split: str, stage: int, index: int) -> np.random.Generator:
    return np.random.default_rng((seed, SPLITS.index(split), stage, index))


def _pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.random() * len(options))]


def _propose_object(rng: np.random.Generator, cell: int, earlier: list[SceneObject]) -> SceneObject:
    """Random object near a crossing, sometimes with the colour or shape of an earlier one."""
    row, column = divmod(cell, 3)
    size = _pick(rng, tuple(RADII))
    x = _fitted(THIRDS[column] + rng.uniform(-WANDER, WANDER), size)
    y = _fitted(THIRDS[row] + rng.uniform(-WANDER, WANDER), size)
    colour = _pick(rng, tuple(COLOURS))
    shape = _pick(rng, SHAPES)
    if earlier and rng.random() < 0.3:
        same_colour = earlier[-1].colour, shape
        same_shape = colour, earlier[-1].shape
        colour, shape = _pick(rng, (same_colour, same_shape))
    return SceneObject(shape, colour, size, x, y, round(rng.uniform(-12, 12), 1))


def _fitted(centre: float, size: str) -> float:
    """Coordinate, moved so that an object of this size does not touch the edges."""
    edge = RADII[size] + EDGE
    return round(min(max(centre, edge), 1 - edge), 3)


def _propose_scene(rng: np.random.Generator, family: int) -> Scene:
    count = int(rng.choice((2, 3, 4, 5), p=(0.2, 0.3, 0.3, 0.2)))
    nested = count > 2 and rng.random() < 0.35
    objects: list[SceneObject] = []
    for cell in map(int, rng.permutation(9)[: count - nested]):
        objects.append(_propose_object(rng, cell, objects))
    if nested:
        x = _fitted(objects[0].x, "large")
        y = _fitted(objects[0].y, "large")
        objects[0] = replace(objects[0], shape=_pick(rng, CONTAINERS), size="large", x=x, y=y)
        objects.append(replace(_propose_object(rng, 4, []), size="small", x=x, y=y))
    return Scene(_pick(rng, tuple(BACKGROUNDS)), tuple(objects), family)


def _is_sound(scene: Scene) -> bool:
    """Whether all objects are visible: on the canvas, disjoint or nested, and distinct from what is
    behind them.
    """
    nests = 0
    for front, b in enumerate(scene.objects):
        if (scene.background, b.colour) in CLASHES:
            return False
        if (_fitted(b.x, b.size), _fitted(b.y, b.size)) != (b.x, b.y):
            return False
        for a in scene.objects[:front]:
            if a.contains(b):
                nests += 1
                if a.colour == b.colour:
                    return False
            elif a.distance(b) < a.radius + b.radius + GAP:
                return False
    return nests == 0 or (nests == 1 and len(scene.objects) > 2)


def _vary(scene: Scene, rng: np.random.Generator) -> Scene:
    """Copy of the scene with one object's colour, shape, size or position changed; it may be
    unsound.
    """
    which = int(rng.integers(len(scene.objects)))
    old = scene.objects[which]
    attribute = _pick(rng, ("colour", "shape", "size", "x", "y"))
    if attribute in ("x", "y"):
        new = replace(old, **{attribute: round(1 - getattr(old, attribute), 3)})
        if (new.column, new.row) == (old.column, old.row):
            return scene
    else:
        values = {"colour": tuple(COLOURS), "shape": SHAPES, "size": tuple(RADII)}[attribute]
        change: dict[str, Any] = {attribute: _pick(rng, values)}
        new = replace(old, **change)
    return replace(scene, objects=(*scene.objects[:which], new, *scene.objects[which + 1 :]))


def _families(split: str, seed: int) -> Iterator[list[Scene]]:
    family = 0
    while True:
        rng = _stream(seed, split, _SCENE, family)
        scene = _propose_scene(rng, family)
        while not _is_sound(scene):
            scene = _propose_scene(rng, family)
        members = [scene]
        while len(members) < FAMILY_SIZES[family % len(FAMILY_SIZES)]:
            sibling = _vary(scene, rng)
            if sibling not in members and _is_sound(sibling):
                members.append(sibling)
        yield members
        family += 1


def generate_scenes(split: str, n: int, seed: int = 0) -> list[Scene]:
    """Generate the first n scenes of a split ("train", "dev" or "test"), with members of a family
    next to each other.
    """
    scenes: list[Scene] = []
    for members in _families(split, seed):
        scenes += members
        if len(scenes) >= n:
            break
    return scenes[:n]


# --- regions, as from an object detector ----------------------------------------------------------

CONTEXT_BOXES = np.array((  # the whole, quarters, the centre, halves
    (0, 0, 1, 1), (0, 0, 0.5, 0.5), (0.5, 0, 1, 0.5), (0, 0.5, 0.5, 1), (0.5, 0.5, 1, 1),
    (0.25, 0.25, 0.75, 0.75), (0, 0, 0.5, 1), (0.5, 0, 1, 1), (0, 0, 1, 0.5), (0, 0.5, 1, 1),
))  # fmt: skip


def _boxes(scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Boxes of objects and context in random order, (REGIONS, 4): left, top, right, bottom in
    canvas widths.
    """
    centres = np.array([(item.x, item.y) for item in scene.objects])
    radii = np.array([(item.radius, item.radius) for item in scene.objects])
    centres = centres + radii * rng.uniform(-0.1, 0.1, centres.shape)
    radii = radii * rng.uniform(1.1, 1.3, radii.shape)
    boxes = np.clip(np.concatenate((centres - radii, centres + radii), 1), 0, 1)
    return rng.permutation(np.concatenate((boxes, CONTEXT_BOXES[: REGIONS - len(boxes)])))


def region_features(image: Image.Image, scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Features of each region's pixels and position, (REGIONS, DIM) float32, not standardised.

    The scene provides only the boxes; colours and shapes have to be recognised from the pixels.
    """
    boxes = _boxes(scene, rng)
    crops = np.stack([_crop(image, box) for box in boxes])  # (REGIONS, GRID, GRID, 3)
    inside = np.zeros((GRID, GRID), dtype=bool)
    inside[2:-2, 2:-2] = True
    centre = crops[:, inside].mean(1)
    border = crops[:, ~inside].mean(1)
    down = np.abs(np.diff(crops, axis=1)).mean((1, 2, 3))
    across = np.abs(np.diff(crops, axis=2)).mean((1, 2, 3))
    corner = boxes[:, :2]
    extent = boxes[:, 2:] - corner
    parts = (
        crops.reshape(REGIONS, -1),
        crops.mean((1, 2)),
        crops.std((1, 2)),
        centre - border,
        np.stack((down, across), 1),
        corner + extent / 2,
        extent,
        extent.prod(1, keepdims=True),
    )
    return np.concatenate(parts, 1).astype(np.float32)


def _crop(image: Image.Image, box: np.ndarray) -> np.ndarray:
    """The pixels of a box, (GRID, GRID, 3) float32 in [0, 1]."""
    left, top, right, bottom = (box * CANVAS).tolist()
    crop = image.resize((GRID, GRID), Image.Resampling.BILINEAR, box=(left, top, right, bottom))
    return np.asarray(crop, dtype=np.float32) / 255


@cache
def _calibration(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (DIM,) of the features of the first CALIBRATION training
    scenes.
    """
    features = []
    for i, scene in enumerate(generate_scenes("train", CALIBRATION, seed)):
        rng = _stream(seed, "train", _REGIONS, i)
        features.append(region_features(render(scene), scene, rng))
    flat = np.concatenate(features).astype(np.float64)
    return flat.mean(0), flat.std(0)


# --- files ----------------------------------------------------------------------------------------


def write_scenes(root: str | Path, sizes: Mapping[str, int] = SIZES, seed: int = 0) -> bool:
    """Write a data set in the pre-computed layout of SCAN and VSE∞; return whether anything was
    written.

    `{split}_ims.npy` is (n, 12, 208) float16, standardised by training statistics;
    `{split}_caps.txt` has one caption per line, five consecutive lines per image;
    `{split}_boxes.npy` (n, 12, 4) are the regions' boxes and `pictures/{split}_{index:05d}.png` the
    pictures of dev and test. `dataset.json` records the
    arguments: a call with the same arguments does nothing, one with others writes all files again.

    Raises ValueError unless each split has a size of at least 1, and FileExistsError if the folder
    holds a data set from elsewhere.
    """
    if set(sizes) != set(SPLITS) or min(sizes.values()) < 1:
        raise ValueError(
            f"sizes: expected at least one scene for each of {', '.join(SPLITS)}, got {sizes!r}"
        )
    root = Path(root)
    card = root / "dataset.json"
    described = {"generator": "scenes", "version": VERSION, "seed": seed, "sizes": dict(sizes)}
    earlier = json.loads(card.read_text()) if card.exists() else {}
    if earlier == {**described, "complete": True}:
        return False
    if any(root.glob("*_ims.npy")) and earlier.get("generator") != "scenes":
        raise FileExistsError(f"root holds another data set, which would be overwritten: {root}")
    (root / "pictures").mkdir(parents=True, exist_ok=True)
    _write_card(card, {**described, "complete": False})  # until the last file is written
    for stale in (root / "pictures").glob("*_?????.png"):
        stale.unlink()
    for split in SPLITS:
        _write_split(root, split, generate_scenes(split, sizes[split], seed), seed)
    _write_card(card, {**described, "complete": True})
    return True


def _write_card(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _write_split(root: Path, split: str, scenes: list[Scene], seed: int) -> None:
    mean, deviation = _calibration(seed)
    features = np.empty((len(scenes), REGIONS, DIM), dtype=np.float16)
    boxes = np.empty((len(scenes), REGIONS, 4), dtype=np.float32)
    lines: list[str] = []
    for i, scene in enumerate(scenes):
        image = render(scene)
        boxes[i] = _boxes(scene, _stream(seed, split, _REGIONS, i))  # those of the features
        lines += captions(scene, _stream(seed, split, _CAPTIONS, i))
        raw = region_features(image, scene, _stream(seed, split, _REGIONS, i))
        features[i] = (raw - mean) / deviation
        if split != "train":
            image.save(root / "pictures" / f"{split}_{i:05d}.png")
    np.save(root / f"{split}_ims.npy", features)
    if split != "train":
        np.save(root / f"{split}_boxes.npy", boxes)
    (root / f"{split}_caps.txt").write_text("\n".join(lines) + "\n")
