"""Data sets of raw images: Karpathy's JSON and CUB Captions. Pictures are loaded lazily.

* Karpathy's splits of Flickr30K (and of Flickr8k): dataset_flickr30k.json, images/ or
  flickr30k-images/
* those of MSCOCO, whose `restval` joins the training set: dataset_coco.json, train2014/ and
  val2014/, or both in images/
* CUB with the ten captions an image of Reed et al.: text_c10/<class>/<image>.txt,
  images/<class>/<image>.jpg

CUB comes with lists of classes, trainclasses.txt, valclasses.txt and testclasses.txt, with 100, 50
and 50 classes. If PCME's seen_test_images.txt exists, its images are the development set, and the
other images of the classes in trainvalclasses.txt (150 in the split of Xian et al.) are the
training set. A caption of CUB matches every image of its class.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

READERS = 8  # threads that decode and scale; Pillow lets them run at the same time
IMAGE_FOLDERS = (
    "images",
    "flickr30k-images",
    "Flicker8k_Dataset",
    "CUB_200_2011/images",
    ".",
)  # first come, first served
KARPATHY = {"train": ("train", "restval"), "dev": ("val",), "test": ("test",)}


@dataclass(frozen=True)
class Listed:
    """An image of a data set: its path and captions; its pixels are not read yet."""

    path: Path
    captions: list[str]
    kind: str = ""  # its class, if images of a class match one another's captions


class Images:
    """Raw images, loaded lazily, in place of an array of features.

    For evaluation, a picture is scaled to a square. For training, it is first cropped to 0.6 to 1
    of its height and width at a random position, and flipped with probability 0.5, as in
    VSE-infinity.
    """

    def __init__(self, paths: list[Path], size: int) -> None:
        self.paths = paths
        self.size = size

    def __len__(self) -> int:
        return len(self.paths)

    def read(
        self, rows: np.ndarray | slice, rngs: Sequence[np.random.Generator] | None = None
    ) -> Tensor:
        """Load the selected pictures, (B, 3, size, size) float32 in [0, 1]; augmented if each has a
        generator.
        """
        paths = [self.paths[i] for i in np.arange(len(self))[rows]]
        with ThreadPoolExecutor(READERS) as pool:
            return torch.stack(list(pool.map(self._one, paths, rngs or [None] * len(paths))))

    def _one(self, path: Path, rng: np.random.Generator | None) -> Tensor:
        from PIL import Image, UnidentifiedImageError  # only raw images need it

        try:
            with Image.open(path) as file:
                picture = file.convert("RGB")
        except (OSError, UnidentifiedImageError) as error:
            raise ValueError(f"{path}: no image that can be read ({error})") from error
        box = None if rng is None else random_box(rng, *picture.size)
        square = picture.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        values = np.asarray(square, dtype=np.float32).transpose(2, 0, 1) / 255
        mirrored = rng is not None and rng.random() < 0.5
        return torch.from_numpy(values[:, :, ::-1].copy() if mirrored else values)


def random_box(
    rng: np.random.Generator, width: int, height: int
) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a random crop with 0.6 to 1 of a picture's sides."""
    side = rng.uniform(0.6, 1.0)
    left, top = rng.uniform(0.0, 1.0 - side, 2)
    return left * width, top * height, (left + side) * width, (top + side) * height


def layout(root: str | Path) -> str:
    """Recognise the layout of a directory: "karpathy", "cub", or "features", that of SCAN and
    VSE-infinity.
    """
    root = Path(root)
    if list(root.glob("*_ims.npy")):
        return "features"
    if list(root.glob("dataset*.json")):
        return "karpathy"
    return "cub" if (root / "text_c10").is_dir() else "features"


def listed_images(root: str | Path, name: str) -> list[Listed]:
    """List the images of the split `name` ("train", "dev", "test") with equally many captions each.

    Each image keeps as many of its first captions as the image with the fewest has: five of
    MSCOCO's five to seven.
    """
    root = Path(root)
    if name not in KARPATHY:
        raise ValueError(f"{root}: split {name!r}: must be one of {', '.join(KARPATHY)}")
    images = list(karpathy(root, name) if layout(root) == "karpathy" else cub(root, name))
    if not images:
        raise ValueError(f"{root}: no image of the split {name!r}")
    fewest = min(images, key=lambda image: len(image.captions))
    if not fewest.captions:
        raise ValueError(f"{fewest.path}: has no caption")
    return [
        Listed(image.path, image.captions[: len(fewest.captions)], image.kind) for image in images
    ]


def karpathy(root: Path, name: str) -> Iterable[Listed]:
    """List the images of a split of Karpathy's JSON, in its order."""
    files = sorted(root.glob("dataset*.json"))
    if len(files) != 1:
        raise ValueError(f"{root}: {', '.join(file.name for file in files)}: must be one file")
    try:
        entries = json.loads(files[0].read_text(encoding="utf-8"))["images"]
        chosen = [entry for entry in entries if entry["split"] in KARPATHY[name]]
        inner = [Path(entry.get("filepath", ""), entry["filename"]) for entry in chosen]
        captions = [
            [" ".join(sentence["raw"].split()) for sentence in entry["sentences"]]
            for entry in chosen
        ]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{files[0]}: must have images with filename, split and sentences with raw ({error})"
        ) from error
    folder = image_folder(root, inner[:1])
    for path, own in zip(inner, captions, strict=True):
        yield Listed(folder / path, own)


def cub(root: Path, name: str) -> Iterable[Listed]:
    """List the images of a split of CUB Captions, sorted by class and name."""
    held_out = (
        _lines(root / "seen_test_images.txt") if (root / "seen_test_images.txt").exists() else None
    )
    names = {"train": "trainclasses.txt", "dev": "valclasses.txt", "test": "testclasses.txt"}
    if held_out is not None:
        names |= {"train": "trainvalclasses.txt", "dev": "trainvalclasses.txt"}
    texts = [
        text
        for kind in _lines(root / names[name])
        for text in sorted((root / "text_c10" / kind).glob("*.txt"))
    ]
    inner = [Path(text.parent.name, text.stem + ".jpg") for text in texts]
    folder = image_folder(root, inner[:1])
    seen = {str(Path(line)) for line in held_out or ()}
    for text, path in zip(texts, inner, strict=True):
        if held_out is None or name == "test" or (str(path) in seen) == (name == "dev"):
            yield Listed(folder / path, _lines(text), path.parent.name)


def image_folder(root: Path, inner: list[Path]) -> Path:
    """Folder of the images: the first known one that holds this image, or else the one where it
    should be.
    """
    folders = [root / name for name in IMAGE_FOLDERS]
    return next(
        (folder for folder in folders if inner and (folder / inner[0]).exists()), folders[0]
    )


def _lines(path: Path) -> list[str]:
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    return [
        line.strip()
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n")
        if line.strip()
    ]
