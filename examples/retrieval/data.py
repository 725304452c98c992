"""The SCAN / VSE-infinity layout of pre-computed features, its vocabulary, and resumable batches.

A data set is a directory with `{split}_ims.npy`, (n, regions, d), and `{split}_caps.txt`, one caption a line; five
lines in a row describe one image (`image = line // 5`), or one line each where there are as many lines as images.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PAD, UNKNOWN = "<pad>", "<unk>"  # ids 0 and 1


@dataclass(frozen=True)
class Split:
    """One split of a data set."""

    features: np.ndarray  # (n, regions, d), memory-mapped: only what a batch takes is read
    captions: list[str]
    captions_per_image: int

    @property
    def image_ids(self) -> Tensor:
        return torch.arange(len(self.features))

    @property
    def text_ids(self) -> Tensor:
        return torch.arange(len(self.captions)) // self.captions_per_image


def load_split(root: str | Path, name: str) -> Split:
    """Read the split `name` ("train", "dev", "test") under `root`; ValueError names both files where they disagree."""
    features_path, captions_path = Path(root, f"{name}_ims.npy"), Path(root, f"{name}_caps.txt")
    features = np.load(features_path, mmap_mode="r")
    # Only "\n" ends a caption: str.splitlines would also break at form feeds and Unicode separators inside one.
    lines = captions_path.read_text(encoding="utf-8").split("\n")
    captions = lines[:-1] if lines[-1] == "" else lines
    if features.ndim != 3 or features.dtype.kind != "f" or not len(features):
        raise ValueError(f"{features_path}: {features.dtype} {features.shape}, must be a float array (n, regions, d)")
    if len(captions) not in (len(features), 5 * len(features)):
        raise ValueError(
            f"{captions_path} has {len(captions)} captions and {features_path} has {len(features)} images: "
            "there must be five captions an image, or one"
        )
    return Split(features, captions, len(captions) // len(features))


def tokenize(caption: str) -> list[str]:
    """Lower-case words and numbers; punctuation goes."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)?", caption.lower())


class Vocabulary:
    """Words and their ids; id 0 pads, id 1 is every word that is not listed."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._ids = {word: i for i, word in enumerate(self.words)}

    @classmethod
    def from_captions(cls, captions: Sequence[str], min_count: int) -> Vocabulary:
        """All words that occur at least `min_count` times, the most frequent first."""
        counts = Counter(word for caption in captions for word in tokenize(caption))
        frequent = [word for word, count in counts.items() if count >= min_count]
        return cls([PAD, UNKNOWN, *sorted(frequent, key=lambda word: (-counts[word], word))])

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, caption: str) -> list[int]:
        """Word ids of a caption; an empty one is a single unknown word, so that every text has a length."""
        return [self._ids.get(word, 1) for word in tokenize(caption)] or [1]

    def idf(self, captions: Sequence[str]) -> Tensor:
        """log(captions / captions with the word), (len(self),) float32, scaled to 1 on average over running text."""
        document = torch.zeros(len(self), dtype=torch.float64)
        running = torch.zeros(len(self), dtype=torch.float64)
        for ids in map(self.encode, captions):
            document[list(set(ids))] += 1
            running += torch.bincount(torch.tensor(ids), minlength=len(self))
        idf = torch.log(len(captions) / document.clamp(min=1))
        return (idf / (idf * running).sum().clamp(min=1e-12) * running.sum()).float()


def pad(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-pad with 0: -> (B, L) int64 and the lengths (B,) int64."""
    lengths = torch.tensor([len(s) for s in sequences])
    padded = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return padded, lengths


def regions(features: np.ndarray, rows: np.ndarray | slice) -> Tensor:
    """The chosen images of a memory-mapped array, as a float32 tensor (B, R, d)."""
    return torch.from_numpy(np.asarray(features[rows], dtype=np.float32))


def feature_statistics(features: np.ndarray, chunk: int = 1024) -> tuple[Tensor, Tensor]:
    """Mean of each feature over all regions, (d,) float32, and one standard deviation for all features, 0-dim.

    One deviation, not one a feature: where some features vary little (the low principal axes, a rare channel), a
    deviation of their own would blow their noise up to the size of the signal. Two passes in float64 over chunks, so
    the memory-mapped array is never in memory as a whole.
    """
    chunks = [slice(i, i + chunk) for i in range(0, len(features), chunk)]
    mean = sum(np.asarray(features[c], dtype=np.float64).sum((0, 1)) for c in chunks) / features[:, :, 0].size
    variance = sum(np.square(np.asarray(features[c], dtype=np.float64) - mean).sum() for c in chunks) / features.size
    return torch.from_numpy(mean).float(), torch.tensor(variance or 1.0).sqrt().float()


@dataclass(frozen=True)
class Batch:
    """B images and M = B * captions_per_image captions; equal ids say which belong together."""

    regions: Tensor  # (B, R, d) float32
    words: Tensor  # (M, L) int64, padded with 0
    lengths: Tensor  # (M,) int64
    image_ids: Tensor  # (B,) int64
    text_ids: Tensor  # (M,) int64


class Batches:
    """The batches of each epoch, a pure function of (seed, epoch, step): a run can go on from any step.

    A sample is one image with `captions_per_image` of its captions, and an epoch shows every caption once. With one
    caption a sample (the VSE default) a batch may hold the same image twice, so the ids travel with the batch: the
    other caption of an image is then a positive, not a negative. The incomplete last batch is left out; the order
    is new every epoch, so nothing is left out for good.
    """

    def __init__(
        self, split: Split, vocabulary: Vocabulary, batch_size: int, captions_per_image: int, seed: int
    ) -> None:
        if captions_per_image not in (1, split.captions_per_image):
            raise ValueError(
                f"captions_per_image = {captions_per_image}: must be 1 or {split.captions_per_image}, all of an image"
            )
        self.split = split
        self.word_ids = [vocabulary.encode(caption) for caption in split.captions]
        self.captions_per_image = captions_per_image
        self.samples = len(split.captions) // captions_per_image
        self.batch_size = min(batch_size, self.samples)
        self.seed = seed

    def __len__(self) -> int:
        return self.samples // self.batch_size

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, from `first_step` on."""
        order = np.random.default_rng([self.seed, epoch]).permutation(self.samples)
        for step in range(first_step, len(self)):
            yield self._batch(order[step * self.batch_size : (step + 1) * self.batch_size])

    def _batch(self, samples: np.ndarray) -> Batch:
        captions = (samples[:, None] * self.captions_per_image + np.arange(self.captions_per_image)).ravel()
        images = samples * self.captions_per_image // self.split.captions_per_image
        words, lengths = pad([self.word_ids[i] for i in captions])
        return Batch(
            regions(self.split.features, images),
            words,
            lengths,
            torch.from_numpy(images),
            torch.from_numpy(captions // self.split.captions_per_image),
        )
