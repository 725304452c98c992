"""Says in one screen what is in a data directory, what is missing, and where it belongs.

    python -m examples.retrieval.check_data path/to/features

Exits with 1 if something that training needs is missing or wrong.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from .data import Vocabulary, load_split, tokenize

SAMPLE = 200  # images of a split whose features are looked at
SPLITS = {
    "train": "to train on",
    "dev": "to choose the checkpoint by",
    "test": "for final_test=true",
}

LAYOUT = """\
  a split is {split}_ims.npy, (n, regions, d), floating point, and {split}_caps.txt, one caption a line, five lines in a
  row for each image, or one; and {split}_global.npy, (n, d), if there is one."""


def check(root: str | Path, min_count: int = 2) -> tuple[list[str], bool]:
    """Lines to print, and whether there is all that training needs."""
    root, lines, ready = Path(root), [str(root)], True
    if not root.is_dir():
        return [*lines, "  no such directory"], False
    found = {}
    for name, purpose in SPLITS.items():
        files = [f"{name}_ims.npy", f"{name}_caps.txt"]
        missing = [file for file in files if not (root / file).exists()]
        needed = name != "test"
        if missing:
            lines.append(f"  {name:6} {'MISSING' if needed else 'not there'}: {', '.join(missing)} ({purpose})")
            ready &= not needed
            continue
        try:
            found[name] = split = load_split(root, name)
        except ValueError as error:
            lines.append(f"  {name:6} WRONG: {error}")
            ready &= not needed
            continue
        images, regions, dim = split.features.shape
        words = [len(tokenize(caption)) for caption in split.captions]
        per_image = f"{split.captions_per_image} an image" if split.captions_per_image > 1 else "one an image"
        whole = f", whole pictures: {split.wholes.shape[1]}" if split.wholes is not None else ""
        lines.append(f"  {name:6} {images} images: {regions} regions x {dim} {split.features.dtype}{whole}")
        lines.append(
            f"         {len(words)} captions, {per_image}, of {np.mean(words):.1f} words (at most {max(words)})"
        )
        odd = [f"{words.count(0)} captions without a word"] if 0 in words else []
        sample = np.asarray(split.features[:: max(1, images // SAMPLE)], dtype=np.float32)
        odd += ["nan or infinite features"] if not np.isfinite(sample).all() else []
        odd += ["images whose features are all 0"] if not np.abs(sample).max((1, 2)).all() else []
        lines += [f"         LOOK AT: {what}" for what in odd]
    if len({split.features.shape[2] for split in found.values()}) > 1:
        lines.append("  WRONG: the splits' features have different dimensions")
        ready = False
    if len({split.wholes is None for split in found.values()}) > 1:
        without = [f"{name}_global.npy" for name, split in found.items() if split.wholes is None]
        lines.append(f"  MISSING: {', '.join(without)}, for views=regions+whole and enhancement=cge")
    if "train" in found:
        vocabulary = Vocabulary.from_captions(found["train"].captions, min_count)
        lines.append(f"  words  {len(vocabulary) - 2} that occur {min_count} times or more in the training captions")
    if ready:
        lines.append(f"  ready: python -m examples.retrieval.train data={root} out=runs/mine")
    else:
        lines.append(
            "  a split is {split}_ims.npy, (n, regions, d), floating point, and {split}_caps.txt, one caption a line:"
        )
        lines.append("  five lines in a row for each image, or one; and {split}_global.npy, (n, d), if there is one.")
    return lines, ready


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Say what is in a data directory and what is missing.")
    parser.add_argument("data")
    parser.add_argument("--min-count", type=int, default=2)
    given = parser.parse_args(arguments)
    lines, ready = check(given.data, given.min_count)
    print("\n".join(lines))
    raise SystemExit(0 if ready else 1)


if __name__ == "__main__":
    main()
