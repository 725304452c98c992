"""Report what a data directory contains, what is missing, and where it belongs.

    python -m examples.retrieval.check_data path/to/data

It recognises pre-computed features in the layout of SCAN, VSE++ and VSE-infinity, and raw images
with Karpathy's JSON, VSE-infinity's id_mapping.json or CUB's captions. The exit status is 1 if
something that training needs is missing, or something is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .data import Split, features_directory, load_split, tokenize
from .pictures import Images, layout

SAMPLE = 200  # number of images per split whose features or files are checked
SPLITS = {
    "train": "to train on",
    "dev": "to choose the checkpoint by",
    "test": "for final_test=true",
    "testall": "for test_split=testall",
}

LAYOUTS = {
    "features": """\
  a split is {split}_ims.npy, (n, regions, d), floating point, and {split}_caps.txt, one caption
  per line, with one or five consecutive lines per image; and optionally {split}_global.npy, (n, d).
  Or raw images: dataset_flickr30k.json or dataset_coco.json with images/; id_mapping.json with
  images/ or flickr30k-images/, of VSE-infinity; or text_c10/ and images/ of CUB.""",
    "karpathy": """\
  Karpathy's dataset_*.json names its images: they belong in images/, those of MSCOCO in its
  images/train2014/ and images/val2014/. Links are allowed.""",
    "mapping": """\
  VSE-infinity's id_mapping.json names its images: they belong in images/ or flickr30k-images/.
  precomp/ has {split}_ids.txt, the numbers of the images, and {split}_caps.txt, five captions an
  image, one per line. Features, if there are some, are read with data=DIR/precomp.""",
    "cub": """\
  CUB Captions: text_c10/<class>/<image>.txt, ten captions, one per line, and
  images/<class>/<image>.jpg; trainvalclasses.txt and testclasses.txt, one class per line; and
  seen_test_images.txt, the images of the former that are for development. Links are allowed.""",
}


class Report:
    """The lines to print."""

    def __init__(self, root: Path) -> None:
        self.lines = [str(root)]
        self.splits: dict[str, Split] = {}
        #: Whether everything that training needs is there, and nothing of it wrong.
        self.ready = root.is_dir()
        if not self.ready:
            self.lines.append("  MISSING: no such directory")
            return
        kind = layout(root)
        if kind == "features" and features_directory(root) != root:
            root = features_directory(root)
            self.lines.append("  VSE-infinity's directory: its precomp/ is read")
        if kind == "mapping":
            self.lines.append("  VSE-infinity's directory: its id_mapping.json and images are read")
        captions = root / "precomp" if kind == "mapping" else root
        for name in SPLITS:
            if name == "testall" and not (captions / "testall_caps.txt").exists():
                continue  # of MSCOCO only
            self.add_split(root, kind, name)
        self.compare_splits()
        if self.ready:
            more = "" if kind == "features" else " backbone=microsoft/resnet-50"
            command = f"python -m examples.retrieval.train data={root}{more} out=runs/mine"
            self.lines.append(f"  ready: {command}")
        else:
            self.lines.append(LAYOUTS[kind])

    def add_split(self, root: Path, kind: str, name: str) -> None:
        """Add the lines on a split."""
        is_needed = name in ("train", "dev")
        if kind == "features":
            files = (f"{name}_ims.npy", f"{name}_caps.txt")
            missing = [file for file in files if not (root / file).exists()]
            if missing:
                what = "MISSING" if is_needed else "not there"
                line = f"  {name:6} {what}: {', '.join(missing)} ({SPLITS[name]})"
                self.lines.append(line)
                self.ready &= not is_needed
                return
        try:
            split = load_split(root, name)
            if isinstance(split.features, Images):
                line = f"{len(split.features)} raw images, the first {split.features.paths[0]}"
                remarks = [*of_images(split.features)]
            else:
                line = of_features(split.features, split.wholes)
                line += as_in_file(root / f"{name}_ims.npy", split.features)
                remarks = [f"LOOK AT: {what}" for what in oddities(split.features)]
        except (OSError, ValueError) as error:
            self.lines.append(f"  {name:6} WRONG: {error}")
            self.ready &= not is_needed
            return
        self.splits[name] = split
        self.lines.append(f"  {name:6} {line}")
        for remark in [*of_captions(split), *remarks]:
            self.lines.append(f"         {remark}")
            self.ready &= not (is_needed and remark.startswith(("MISSING", "WRONG")))

    def compare_splits(self) -> None:
        """Add differences between splits: dimensions, and global features that only some have."""
        splits = self.splits.values()
        wholes = {name: split.wholes for name, split in self.splits.items()}
        for arrays in ([split.features for split in splits], wholes.values()):
            if len({x.shape[-1] for x in arrays if isinstance(x, np.ndarray)}) > 1:
                self.lines.append("  WRONG: the splits' features have different dimensions")
                self.ready = False
        without = [f"{name}_global.npy" for name, x in wholes.items() if x is None]
        if 0 < len(without) < len(wholes):
            needed = "needed for views=regions+whole and enhancement=cge"
            self.lines.append(f"  not there: {', '.join(without)}, {needed}")


def of_features(features: np.ndarray, wholes: np.ndarray | None) -> str:
    """Describe the features of a split."""
    images, regions, dim = features.shape
    whole = "" if wholes is None else f", whole pictures: {wholes.shape[1]}"
    return f"{images} images: {regions} regions x {dim} {features.dtype}{whole}"


def as_in_file(path: Path, features: np.ndarray) -> str:
    """How a file of VSE++ holds the features."""
    shape = np.load(path, mmap_mode="r").shape
    said = ""
    if len(shape) == 2:
        said += "; one vector an image, as in VSE++, read as its only region"
    if shape[0] != len(features):
        said += "; five times each in the file, as in VSE++, read once"
    return said


def oddities(features: np.ndarray) -> Iterator[str]:
    """What cannot be meant in a sample of the features."""
    step = max(1, len(features) // SAMPLE)
    sample = np.asarray(features[::step], dtype=np.float32)
    if not np.isfinite(sample).all():
        yield "nan or infinite features"
    if not np.abs(sample).max((1, 2)).all():
        yield "images whose features are all 0"


def of_images(images: Images) -> Iterator[str]:
    """What is wrong with raw images: all must exist, and a sample of them must be readable."""
    gone = [path for path in images.paths if not path.exists()]
    if gone:
        yield f"MISSING: {len(gone)} of the images, the first {gone[0]}"
        return
    try:
        for index in range(0, len(images), max(1, len(images) // SAMPLE)):
            images.read(index)
    except ValueError as error:
        yield f"WRONG: {error}"


def of_captions(split: Split) -> Iterator[str]:
    """Describe the captions of a split."""
    words = [len(tokenize(caption)) for caption in split.captions]
    number = split.captions_per_image if split.captions_per_image > 1 else "one"
    lengths = f"of {np.mean(words):.1f} words (at most {max(words)})"
    classes = "" if split.classes is None else f"; {len(split.classes.unique())} classes"
    yield f"{len(words)} captions, {number} an image, {lengths}{classes}"
    if 0 in words:
        yield f"LOOK AT: {words.count(0)} captions without a word"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Say what is in a data directory and what is missing."
    )
    parser.add_argument("data", type=Path)
    args = parser.parse_args(arguments)
    report = Report(args.data)
    print("\n".join(report.lines))
    raise SystemExit(0 if report.ready else 1)


if __name__ == "__main__":
    main()
