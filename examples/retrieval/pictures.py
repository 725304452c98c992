"""Data sets of raw images: Karpathy's JSON, VSE-infinity's and CUB Captions. Pictures are loaded
lazily.

* Karpathy's splits of Flickr30K (and of Flickr8k): dataset_flickr30k.json, and the pictures in
  images/
* those of MSCOCO, whose `restval` joins the training set: dataset_coco.json, and the pictures in
  images/train2014/ and images/val2014/
* VSE-infinity's: id_mapping.json, the file of each number; the numbers of a split's images and its
  captions in precomp/{split}_ids.txt and precomp/{split}_caps.txt; and the pictures in images/ or
  flickr30k-images/
* CUB with the ten captions an image of Reed et al.: text_c10/<class>/<image>.txt,
  images/<class>/<image>.jpg

CUB is split as by Xian et al. and PCME: trainvalclasses.txt lists 150 classes, of which the images
in seen_test_images.txt are the development set and the others the training set; testclasses.txt
lists 50. A caption of CUB matches every image of its class.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from itrloss.files import read_lines

from .config import must_be

# Karpathy's "test" has all 5000 test images of MSCOCO, which other files call "testall".
KARPATHY = {
    "train": ("train", "restval"),
    "dev": ("val",),
    "test": ("test",),
    "testall": ("test",),
}
MAPPING = "id_mapping.json"  # of VSE-infinity


@dataclass(frozen=True)
class Listed:
    """An image of a data set: its path and captions; its pixels are not read yet."""

    path: Path
    captions: list[str]
    kind: str = ""  # its class, if images of a class match one another's captions


@dataclass(frozen=True)
class Images:
    """Raw images, loaded lazily, in place of an array of features.

    For evaluation, a picture is scaled to a square. For training, it is first cropped to 0.6 to 1
    of its height and width at a random position, and flipped with probability 0.5, as in
    VSE-infinity.
    """

    paths: list[Path]
    size: int

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, rows: slice) -> Images:
        return Images(self.paths[rows], self.size)

    def read(self, index: int, seed: Sequence[int] | None = None) -> Tensor:
        """Load a picture, (3, size, size) float32 in [0, 1]; with a seed, cropped and flipped."""
        picture = open_picture(self.paths[index])
        box = None
        flipped = False
        if seed is not None:
            rng = np.random.default_rng(seed)
            box = random_box(rng, *picture.size)
            flipped = rng.random() < 0.5
        square = picture.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.array(square, dtype=np.float32)).permute(2, 0, 1) / 255
        return pixels.flip(2) if flipped else pixels


def open_picture(path: Path) -> Image.Image:
    """Load a picture of its own size, in RGB."""
    with must_be(str(path), "an image that can be read"), Image.open(path) as file:
        return file.convert("RGB")


def random_box(
    rng: np.random.Generator, width: int, height: int
) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a random crop with 0.6 to 1 of a picture's sides."""
    side = rng.uniform(0.6, 1.0)
    left, top = rng.uniform(0.0, 1.0 - side, 2)
    return left * width, top * height, (left + side) * width, (top + side) * height


def layout(root: Path) -> str:
    """Recognise the layout of a directory: "karpathy", "mapping" (VSE-infinity's, with pictures),
    "cub", or "features", that of SCAN and of VSE-infinity without pictures.
    """
    if list(root.glob("*_ims.npy")):
        return "features"
    if (root / MAPPING).exists() and mapped_pictures(root).is_dir():
        return "mapping"
    if list(root.glob("dataset*.json")):
        return "karpathy"
    return "cub" if (root / "text_c10").is_dir() else "features"


def listed_images(root: Path, name: str) -> list[Listed]:
    """List the images of the split `name` ("train", "dev", "test", "testall") with equally many
    captions each.

    Each image keeps as many of its first captions as the image with the fewest has: five of
    MSCOCO's five to seven.
    """
    if name not in KARPATHY:
        raise ValueError(f"{root}: split {name!r}: must be one of {', '.join(KARPATHY)}")
    read = {"karpathy": karpathy, "mapping": mapped}.get(layout(root), cub)
    images = read(root, name)
    if not images:
        raise ValueError(f"{root}: no image of the split {name!r}")
    fewest = min(images, key=lambda image: len(image.captions))
    if not fewest.captions:
        raise ValueError(f"{fewest.path}: has no caption")
    kept = len(fewest.captions)
    return [replace(image, captions=image.captions[:kept]) for image in images]


def karpathy(root: Path, name: str) -> list[Listed]:
    """List the images of a split of Karpathy's JSON, in its order."""
    files = sorted(root.glob("dataset*.json"))
    if len(files) != 1:
        raise ValueError(f"{root}: {', '.join(file.name for file in files)}: must be one file")
    images = []
    with must_be(str(files[0]), "JSON of images with filename, split and sentences with raw"):
        for entry in json.loads(files[0].read_text(encoding="utf-8"))["images"]:
            if entry["split"] in KARPATHY[name]:
                path = root / "images" / entry.get("filepath", "") / entry["filename"]
                captions = [" ".join(said["raw"].split()) for said in entry["sentences"]]
                images.append(Listed(path, captions))
    return images


def mapped_pictures(root: Path) -> Path:
    """The folder of the pictures in VSE-infinity's directory."""
    flickr30k = root / "flickr30k-images"
    return flickr30k if flickr30k.is_dir() else root / "images"


def mapped(root: Path, name: str) -> list[Listed]:
    """List the images of a split by VSE-infinity's id_mapping.json.

    The numbers in {name}_ids.txt are those of the images, or five times the same, one a caption.
    """
    numbers = _lines(root / "precomp" / f"{name}_ids.txt")
    captions = read_lines(root / "precomp" / f"{name}_caps.txt")
    if len(numbers) == len(captions):
        numbers = numbers[::5]
    if len(captions) != 5 * len(numbers):
        raise ValueError(
            f"{root}/precomp: {len(captions)} lines in {name}_caps.txt must be five for each image "
            f"in {name}_ids.txt, which has {len(numbers)}"
        )
    with must_be(str(root / MAPPING), "JSON of the files of numbers"):
        files = dict(json.loads((root / MAPPING).read_text(encoding="utf-8")))
    unknown = [number for number in numbers if number not in files]
    if unknown:
        raise ValueError(f"{root / MAPPING}: has no file for {unknown[0]} of {name}_ids.txt")
    folder = mapped_pictures(root)
    return [
        Listed(folder / files[number], captions[5 * i : 5 * i + 5])
        for i, number in enumerate(numbers)
    ]


def cub(root: Path, name: str) -> list[Listed]:
    """List the images of a split of CUB Captions, sorted by class and name."""
    is_test = name.startswith("test")
    classes = _lines(root / ("testclasses.txt" if is_test else "trainvalclasses.txt"))
    held_out = {Path(line) for line in _lines(root / "seen_test_images.txt")}
    images = []
    for kind in classes:
        for text in sorted((root / "text_c10" / kind).glob("*.txt")):
            path = Path(kind, f"{text.stem}.jpg")
            if is_test or (path in held_out) == (name == "dev"):
                images.append(Listed(root / "images" / path, _lines(text), kind))
    return images


def _lines(path: Path) -> list[str]:
    """Lines of a text file that are not empty."""
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    return [line.strip() for line in lines if line.strip()]
