"""Report what a data directory contains, what is missing, and where it belongs.

    python -m examples.retrieval.check_data path/to/data

It recognises pre-computed features in the layout of SCAN and VSE-infinity, and raw images with
Karpathy's JSON or CUB's captions. The exit status is 1 if something that training needs is missing
or wrong.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from .data import Split, Vocabulary, load_split, tokenize
from .pictures import Images, layout

SAMPLE = 200  # number of images per split whose features or files are checked
SPLITS = {
    "train": "to train on",
    "dev": "to choose the checkpoint by",
    "test": "for final_test=true",
}

LAYOUTS = {
    "features": """\
  a split is {split}_ims.npy, (n, regions, d), floating point, and {split}_caps.txt, one caption
  per line, with one or five consecutive lines per image; and optionally {split}_global.npy, (n, d).
  Or raw images: dataset_flickr30k.json or dataset_coco.json with images/, or text_c10/ and images/
  of CUB.""",
    "karpathy": """\
  Karpathy's dataset_*.json names its images: they belong in images/ (or flickr30k-images/, or next
  to the JSON), those of MSCOCO in its train2014/ and val2014/. Links are allowed.""",
    "cub": """\
  CUB Captions: text_c10/<class>/<image>.txt, ten captions, one per line; images/<class>/<image>.jpg
  (or in CUB_200_2011/images/); trainclasses.txt, valclasses.txt and testclasses.txt, one class per
  line; or, for PCME's protocol, trainvalclasses.txt, testclasses.txt and seen_test_images.txt.
  Links are allowed.""",
}


def check(root: str | Path, min_count: int = 2) -> tuple[list[str], bool]:
    """Return the lines to print, and whether everything that training needs is there."""
    root, lines, ready = Path(root), [str(root)], True
    if not root.is_dir():
        return [*lines, "  no such directory"], False
    kind, splits = layout(root), {}
    for name, purpose in SPLITS.items():
        needed = name != "test"
        missing = [
            f
            for f in (f"{name}_ims.npy", f"{name}_caps.txt")
            if kind == "features" and not (root / f).exists()
        ]
        if missing:
            lines.append(
                f"  {name:6} {'MISSING' if needed else 'not there'}: {', '.join(missing)} "
                f"({purpose})"
            )
            ready &= not needed
            continue
        try:
            split = load_split(root, name)
            said, complete = (
                of_images(name, split.features)
                if isinstance(split.features, Images)
                else of_features(name, split.features, split.wholes)
            )
        except ValueError as error:
            lines.append(f"  {name:6} WRONG: {error}")
            ready &= not needed
            continue
        splits[name] = split
        ready &= complete or not needed
        lines += [said[0], of_captions(split), *said[1:]]
    between = disagreements(splits)
    ready &= not any(line.startswith("  WRONG") for line in between)
    lines += between
    if "train" in splits:
        vocabulary = Vocabulary.from_captions(splits["train"].captions, min_count)
        lines.append(
            f"  words  {len(vocabulary) - 2} that occur {min_count} times or more in the training "
            "captions"
        )
    if ready:
        more = "" if kind == "features" else " backbone=resnet50 backbone_weights=FILE"
        lines.append(f"  ready: python -m examples.retrieval.train data={root}{more} out=runs/mine")
    else:
        lines.append(LAYOUTS[kind])
    return lines, ready


def of_features(
    name: str, features: np.ndarray, wholes: np.ndarray | None
) -> tuple[list[str], bool]:
    """Describe a split's features, and return whether they can be trained on."""
    images, regions, dim = features.shape
    whole = f", whole pictures: {wholes.shape[1]}" if wholes is not None else ""
    sample = np.asarray(features[:: max(1, images // SAMPLE)], dtype=np.float32)
    odd = ["nan or infinite features"] if not np.isfinite(sample).all() else []
    odd += ["images whose features are all 0"] if not np.abs(sample).max((1, 2)).all() else []
    first = f"  {name:6} {images} images: {regions} regions x {dim} {features.dtype}{whole}"
    return [first, *(f"         LOOK AT: {what}" for what in odd)], True


def of_images(name: str, images: Images) -> tuple[list[str], bool]:
    """Describe a split's raw images: all must exist, and a sample of them must be readable."""
    lines = [f"  {name:6} {len(images)} raw images, the first {images.paths[0]}"]
    gone = [path for path in images.paths if not path.exists()]
    if gone:
        return [*lines, f"         MISSING: {len(gone)} of the images, the first {gone[0]}"], False
    try:
        for row in range(0, len(images), max(1, len(images) // SAMPLE)):
            images.read(slice(row, row + 1))
    except ValueError as error:
        return [*lines, f"         WRONG: {error}"], False
    return lines, True


def of_captions(split: Split) -> str:
    words = [len(tokenize(caption)) for caption in split.captions]
    per_image = (
        f"{split.captions_per_image} an image" if split.captions_per_image > 1 else "one an image"
    )
    classes = "" if split.classes is None else f"; {len(split.classes.unique())} classes"
    empty = f"\n         LOOK AT: {words.count(0)} captions without a word" if 0 in words else ""
    lengths = f"of {np.mean(words):.1f} words (at most {max(words)})"
    return f"         {len(words)} captions, {per_image}, {lengths}{classes}{empty}"


def disagreements(splits: dict[str, Split]) -> list[str]:
    """Differences between splits: dimensions, and global features that only some splits have."""
    lines = []
    if (
        len({s.features.shape[2] for s in splits.values() if not isinstance(s.features, Images)})
        > 1
    ):
        lines.append("  WRONG: the splits' features have different dimensions")
    if len({split.wholes.shape[1] for split in splits.values() if split.wholes is not None}) > 1:
        lines.append("  WRONG: the splits' features of whole pictures have different dimensions")
    if len({split.wholes is None for split in splits.values()}) > 1:
        without = [f"{name}_global.npy" for name, split in splits.items() if split.wholes is None]
        lines.append(
            f"  MISSING: {', '.join(without)}, for views=regions+whole and enhancement=cge"
        )
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Say what is in a data directory and what is missing."
    )
    parser.add_argument("data")
    parser.add_argument("--min-count", type=int, default=2)
    args = parser.parse_args(arguments)
    lines, ready = check(args.data, args.min_count)
    print("\n".join(lines))
    raise SystemExit(0 if ready else 1)


if __name__ == "__main__":
    main()
