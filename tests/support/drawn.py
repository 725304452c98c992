"""Small data sets, tiny pre-trained networks, and a few steps, for the tests of the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from examples.retrieval.train import Trainer

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

# settings of short runs
TINY = [
    "dim=8",
    "word_dim=8",
    "epochs=1",
    "batch_size=32",
    "lr=1e-2",
    "min_count=1",
    "concepts=10",
    "memory=32",
    "threads=1",
    "tensorboard=false",
    "progress=false",
]

DRY = dict.fromkeys(("feature_dropout", "whole_dropout", "word_dropout", "embedding_dropout"), 0.0)


def draw(path: Path, left: str, right: str) -> None:
    """Picture of two colours, side by side."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.empty((40, 48, 3), np.uint8)
    pixels[:, :24], pixels[:, 24:] = COLOURS[left], COLOURS[right]
    Image.fromarray(pixels).save(path)


def features(root: Path, sizes: dict[str, int]) -> Path:
    """Data set of four regions an image, whose components the words of its captions name, and of
    global features.
    """
    rng = np.random.default_rng(0)
    meanings = rng.normal(size=(20, 8))
    for split, n in sizes.items():
        things = rng.integers(len(meanings), size=(n, 4))
        regions = meanings[things] + 0.1 * rng.normal(size=(n, 4, 8))
        np.save(root / f"{split}_ims.npy", regions.astype(np.float16))
        np.save(root / f"{split}_global.npy", rng.uniform(size=(n, 7)).astype(np.float16))
        captions: list[str] = []
        for image in things:
            own = 0
            while own < 5:
                named = rng.permutation(image)[: rng.integers(2, 5)]
                caption = " ".join(f"word{i}" for i in named)
                if caption not in captions:  # equal ones would rank by rounding
                    captions.append(caption)
                    own += 1
        (root / f"{split}_caps.txt").write_text("\n".join(captions) + "\n")
    return root


def karpathy(root: Path, per_image: int = 5) -> Path:
    """Data set with Karpathy's JSON as for MSCOCO, with more captions for some images than for
    others.
    """
    rng = np.random.default_rng(0)
    images = []
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
            draw(root / "images" / folder / file, left, right)
            sentences = [{"raw": text} for text in (said * 2)[: per_image + i % 2]]
            images.append(
                {"filepath": folder, "filename": file, "split": split, "sentences": sentences}
            )
    (root / "dataset_coco.json").write_text(json.dumps({"images": images, "dataset": "coco"}))
    return root


def mapping(root: Path) -> Path:
    """Data set in VSE-infinity's directory. Numbers of training images are there once a caption,
    others once.
    """
    files = {}
    (root / "precomp").mkdir(parents=True)
    for split, colours in {"train": "red green blue", "dev": "white red", "test": "blue"}.items():
        numbers, captions = [], []
        for colour in colours.split():
            number = str(70 + len(files))
            files[number] = f"{split}_{colour}.png"
            draw(root / "flickr30k-images" / files[number], colour, "white")
            numbers += [number] * (5 if split == "train" else 1)
            captions += [f"{colour} beside white, {c}" for c in range(5)]
        (root / "precomp" / f"{split}_ids.txt").write_text("\n".join(numbers) + "\n")
        (root / "precomp" / f"{split}_caps.txt").write_text("\n".join(captions) + "\n")
    (root / "id_mapping.json").write_text(json.dumps(files))
    return root


def cub(root: Path) -> Path:
    """Data set like CUB: four classes of three images with ten captions. The last class is the test
    split, the first image of each other class is for development.
    """
    colours = list(COLOURS)
    classes = [f"{number:03}.{colour}" for number, colour in enumerate(colours)]
    for kind, colour in zip(classes, colours, strict=True):
        for i in range(3):
            draw(root / "images" / kind / f"{colour}_{i}.jpg", colour, colours[i])
            text = root / "text_c10" / kind / f"{colour}_{i}.txt"
            text.parent.mkdir(parents=True, exist_ok=True)
            text.write_text("".join(f"{colour} then {colours[i]} {c}\n" for c in range(10)))
    (root / "trainvalclasses.txt").write_text("\n".join(classes[:3]))
    (root / "testclasses.txt").write_text(classes[3])
    seen = [f"{kind}/{kind[4:]}_0.jpg" for kind in classes[:3]]
    (root / "seen_test_images.txt").write_text("\n".join(seen))
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


def tiny_resnet(root: Path) -> Path:
    """Checkpoint of a ResNet with random weights and statistics."""
    from transformers import ResNetConfig, ResNetModel

    torch.manual_seed(1)
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 8, 12, 16], "depths": [1, 1, 1, 1]}
    network = ResNetModel(ResNetConfig(layer_type="basic", **sizes))
    for name, statistics in network.named_buffers():
        if name.endswith("running_var"):
            statistics.uniform_(0.5, 1.5)
        elif name.endswith("running_mean"):
            statistics.uniform_(-0.1, 0.1)
    network.save_pretrained(root)
    return root


def tiny_clip(root: Path) -> Path:
    """CLIP with random weights, for pictures of 32 pixels in four patches."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = CLIPConfig(
        projection_dim=6,
        text_config={**sizes, "vocab_size": 20, "projection_dim": 6},
        vision_config={**sizes, "image_size": 32, "patch_size": 16, "projection_dim": 6},
    )
    CLIPModel(config).save_pretrained(root)
    return root


def take_steps(trainer: Trainer, steps: int) -> set[str]:
    """Train for some steps, after the warm-up; return the names of parameters that did not move."""
    begun = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.objective.begin_epoch(1)
    trainer.model.train()
    batches = trainer.batches.epoch(0)
    for _ in range(steps):
        trainer.train_step(next(batches))
    return {name for name, p in trainer.model.named_parameters() if torch.equal(p, begun[name])}
