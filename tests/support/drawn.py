"""Small data sets of raw images, and a tiny BERT, for the tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 40),
    "blue": (30, 40, 220),
    "white": (240, 240, 240),
}
SIZES = {"train": 12, "restval": 4, "val": 8, "test": 8}
PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "##s",
    "left",
    "right",
    "then",
    *COLOURS,
]


def draw(path: Path, left: str, right: str) -> None:
    """Picture of two colours, side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.empty((40, 48, 3), np.uint8)
    pixels[:, :24], pixels[:, 24:] = COLOURS[left], COLOURS[right]
    Image.fromarray(pixels).save(path)


def karpathy(root: Path, per_image: int = 5) -> Path:
    """Data set with Karpathy's JSON as for MSCOCO, with more captions for some images than for
    others.
    """
    rng, images = np.random.default_rng(0), []
    for split, count in SIZES.items():
        folder = "train2014" if split == "train" else "val2014"
        for i in range(count):
            left, right = rng.choice(list(COLOURS), 2)
            said = [
                f"left {left} right {right}",
                f"{left} then {right}",
                f"a {right} right",
                f"{left}s left",
                "a\n left",
            ]
            file = f"{split}_{i}.png"
            draw(root / folder / file, left, right)
            sentences = [
                {"raw": text, "tokens": text.split()} for text in (said * 2)[: per_image + i % 2]
            ]
            images.append(
                {"filepath": folder, "filename": file, "split": split, "sentences": sentences}
            )
    (root / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    return root


def cub(root: Path) -> Path:
    """Data set like CUB: four classes of three images with ten captions, each class in one list of
    classes.
    """
    for kind, (colour, name) in enumerate(
        zip(COLOURS, ("train", "train", "val", "test"), strict=True)
    ):
        folder = f"{kind:03}.{colour}"
        for i in range(3):
            draw(root / "images" / folder / f"{colour}_{i}.jpg", colour, list(COLOURS)[i])
            text = root / "text_c10" / folder / f"{colour}_{i}.txt"
            text.parent.mkdir(parents=True, exist_ok=True)
            text.write_text("".join(f"{colour} then {list(COLOURS)[i]} {c}\n" for c in range(10)))
        for file in (f"{name}classes.txt", *(["trainvalclasses.txt"] if name != "test" else [])):
            with open(root / file, "a") as lines:
                lines.write(folder + "\n")
    return root


def tiny_bert(root: Path) -> Path:
    """Checkpoint of a BERT with random weights and its own vocabulary."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = BertConfig(
        vocab_size=len(PIECES),
        hidden_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    BertModel(sizes).save_pretrained(root)
    (root / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    return root
