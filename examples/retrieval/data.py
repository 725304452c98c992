"""Data sets, their vocabulary, and resumable batches.

A data set of pre-computed features, in the layout of SCAN and VSE-infinity, is a directory with
`{split}_ims.npy`, (n, regions, d), and `{split}_caps.txt`, one caption per line. Five consecutive
lines describe one image (`image = line // 5`), or one line if there are as many lines as images.
Optionally, `{split}_global.npy`, (n, d'), holds one global feature per picture. Data sets of raw
images are read by :mod:`examples.retrieval.pictures`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .pictures import Images, layout, listed_images

PAD, UNKNOWN = "<pad>", "<unk>"  # ids 0 and 1


@dataclass(frozen=True)
class Split:
    """One split of a data set."""

    # (n, regions, d), memory-mapped, so only a batch is read at a time; or raw images
    features: np.ndarray | Images
    captions: list[str]
    captions_per_image: int
    wholes: np.ndarray | None = None  # (n, d')
    classes: Tensor | None = None  # (n,) int64: images of a class match one another's captions

    @property
    def image_ids(self) -> Tensor:
        return torch.arange(len(self.features)) if self.classes is None else self.classes

    @property
    def text_ids(self) -> Tensor:
        return self.image_ids.repeat_interleave(self.captions_per_image)


def load_split(root: str | Path, name: str, image_size: int = 256) -> Split:
    """Read the split `name` ("train", "dev", "test") under `root`.

    Raw images are scaled to squares of ``image_size``. If the number of captions does not fit the
    number of images, the ValueError names both files.
    """
    if layout(root) != "features":
        listed = listed_images(root, name)
        captions = [caption for image in listed for caption in image.captions]
        numbers = {kind: i for i, kind in enumerate(sorted({image.kind for image in listed}))}
        classes = (
            torch.tensor([numbers[image.kind] for image in listed]) if "" not in numbers else None
        )
        pictures = Images([image.path for image in listed], image_size)
        return Split(pictures, captions, len(listed[0].captions), classes=classes)
    features_path, captions_path = Path(root, f"{name}_ims.npy"), Path(root, f"{name}_caps.txt")
    features = np.load(features_path, mmap_mode="r")
    # Only "\n" ends a caption: str.splitlines would also split at form feeds and Unicode separators
    # inside a caption.
    lines = captions_path.read_text(encoding="utf-8").split("\n")
    captions = lines[:-1] if lines[-1] == "" else lines
    if features.ndim != 3 or features.dtype.kind != "f" or not len(features):
        raise ValueError(
            f"{features_path}: {features.dtype} {features.shape}, must be a float array (n, "
            "regions, d)"
        )
    if len(captions) not in (len(features), 5 * len(features)):
        raise ValueError(
            f"{captions_path} has {len(captions)} captions and {features_path} has "
            f"{len(features)} images: there must be five captions an image, or one"
        )
    wholes_path = Path(root, f"{name}_global.npy")
    wholes = np.load(wholes_path, mmap_mode="r") if wholes_path.exists() else None
    if wholes is not None and (
        wholes.ndim != 2 or wholes.dtype.kind != "f" or len(wholes) != len(features)
    ):
        raise ValueError(
            f"{wholes_path}: {wholes.dtype} {wholes.shape}, must be a float array "
            f"({len(features)}, d)"
        )
    return Split(features, captions, len(captions) // len(features), wholes)


def tokenize(caption: str) -> list[str]:
    """Split a caption into lower-case words and numbers, without punctuation."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)?", caption.lower())


class Encodes(Protocol):
    """Interface of tokenisers that turn a caption into ids: a :class:`Vocabulary`, or the word
    pieces of a BERT.
    """

    def encode(self, caption: str) -> list[int]: ...


class Vocabulary:
    """Words and their ids; id 0 is padding, id 1 any word outside the vocabulary."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._ids = {word: i for i, word in enumerate(self.words)}

    @classmethod
    def from_captions(cls, captions: Sequence[str], min_count: int) -> Vocabulary:
        """Build the vocabulary of all words that occur at least `min_count` times, the most
        frequent first.
        """
        counts = Counter(word for caption in captions for word in tokenize(caption))
        frequent = [word for word, count in counts.items() if count >= min_count]
        return cls([PAD, UNKNOWN, *sorted(frequent, key=lambda word: (-counts[word], word))])

    def state(self) -> list[str]:
        """Return the constructor's argument, for checkpoints."""
        return self.words

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, caption: str) -> list[int]:
        """Word ids of a caption; an empty caption becomes one unknown word, so that no text has
        length 0.
        """
        return [self._ids.get(word, 1) for word in tokenize(caption)] or [1]

    def idf(self, captions: Sequence[str]) -> Tensor:
        """log(captions / captions with the word), (len(self),) float32, scaled to 1 on average over
        running text.
        """
        document = torch.zeros(len(self), dtype=torch.float64)
        running = torch.zeros(len(self), dtype=torch.float64)
        for ids in map(self.encode, captions):
            document[list(set(ids))] += 1
            running += torch.bincount(torch.tensor(ids), minlength=len(self))
        idf = torch.log(len(captions) / document.clamp(min=1))
        return (idf / (idf * running).sum().clamp(min=1e-12) * running.sum()).float()


def word_vectors(path: str | Path) -> dict[str, np.ndarray]:
    """Read float32 word vectors from GloVe's text format, or from an .npy file whose words are a
    list in a .json file.

    The .json file has the array's name, or is the only .json file in the folder.
    """
    path = Path(path)
    if path.suffix != ".npy":
        vectors = {}
        with open(path, encoding="utf-8") as file:
            for line in file:
                word, *values = line.rstrip().split(" ")
                vectors[word] = np.array(values, dtype=np.float32)
        return vectors
    beside = sorted(path.parent.glob("*.json"))
    named = path.with_suffix(".json")
    if not named.exists() and len(beside) != 1:
        raise ValueError(
            f"{path}: its words must be a list in {named.name}, or in the only .json file of the "
            "folder"
        )
    words = json.loads((named if named.exists() else beside[0]).read_text(encoding="utf-8"))
    array = np.load(path).astype(np.float32)
    if array.ndim != 2 or len(array) != len(words):
        raise ValueError(
            f"{path}: shape {array.shape}, must be ({len(words)}, d) for the words in "
            f"{beside[0].name}"
        )
    return dict(zip(words, array, strict=True))


def begin_with(weight: Tensor, words: Sequence[str], vectors: Mapping[str, np.ndarray]) -> int:
    """Overwrite the rows of words that have a vector, rescaled to the rows' mean length; return
    their number.
    """
    rows = [i for i, word in enumerate(words) if word in vectors]
    if rows:
        new = torch.from_numpy(np.stack([vectors[words[i]] for i in rows]))
        if new.shape[1] > weight.shape[1]:
            raise ValueError(
                f"word_dim = {weight.shape[1]}: must be at least {new.shape[1]}, as the word "
                "vectors have"
            )
        new *= weight[rows].norm(dim=1).mean() / new.norm(dim=1).mean()
        with torch.no_grad():
            weight[rows, : new.shape[1]] = new.to(weight)
    return len(rows)


def pad(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-pad with 0, to (B, L) int64, and return the lengths (B,) int64, too."""
    lengths = torch.tensor([len(s) for s in sequences])
    padded = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    return padded, lengths


def chosen(
    features: np.ndarray | Images,
    rows: np.ndarray | slice,
    rngs: Sequence[np.random.Generator] | None = None,
) -> Tensor:
    """Read the selected images of a memory-mapped array, or the raw images, as a float32 tensor.

    With ``rngs``, one generator per image, raw images are cropped and flipped at random, as for
    training.
    """
    if isinstance(features, Images):
        return features.read(rows, rngs)
    return torch.from_numpy(np.array(features[rows], dtype=np.float32))


def feature_statistics(features: np.ndarray, chunk: int = 1024) -> tuple[Tensor, Tensor]:
    """Mean of each feature over all regions, (d,) float32, and one standard deviation for all
    features, 0-dim.

    There is one deviation for all features because some of them vary little (minor principal
    components, rare channels): dividing by a deviation of their own would scale their noise up to
    the size of the signal. Two float64 passes over chunks avoid loading the whole memory-mapped
    array.
    """
    chunks = [slice(i, i + chunk) for i in range(0, len(features), chunk)]
    mean = (
        sum(np.asarray(features[c], dtype=np.float64).sum((0, 1)) for c in chunks)
        / features[:, :, 0].size
    )
    variance = (
        sum(np.square(np.asarray(features[c], dtype=np.float64) - mean).sum() for c in chunks)
        / features.size
    )
    return torch.from_numpy(mean).float(), torch.tensor(variance or 1.0).sqrt().float()


def whole_statistics(wholes: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each global feature, (d,) float32, after
    :func:`compressed`.
    """
    x = compressed(torch.from_numpy(np.array(wholes, dtype=np.float32)))
    return x.mean(0), x.std(0).clamp_min(1e-3)


def compressed(x: Tensor) -> Tensor:
    """Signed square root, because activations of a network have long tails."""
    return x.sign() * x.abs().sqrt()


@dataclass(frozen=True)
class Batch:
    """B images and M = B * captions_per_image captions; equal ids mark positive pairs."""

    regions: Tensor  # (B, R, d) float32; raw images: (B, 3, H, W)
    words: Tensor  # (M, L) int64, padded with 0
    lengths: Tensor  # (M,) int64
    image_ids: Tensor  # (B,) int64
    text_ids: Tensor  # (M,) int64
    wholes: Tensor | None = None  # (B, d') float32


class Batches:
    """The batches of each epoch, a pure function of (seed, epoch, step), so that a run can resume
    at any step.

    A sample is one image with `captions_per_image` of its captions, drawn anew every epoch. An
    epoch shows every caption once, or some twice if their number is not divisible by
    `captions_per_image`. Unless a sample has all captions (VSE's default is one), a batch may hold
    the same image twice. It therefore includes the ids, by which the image's other caption is a
    positive, not a negative. The incomplete last batch is dropped; as the order changes every
    epoch, no sample is dropped for good. With several processes, each has ``batch_size`` samples
    per step; together they see the same samples as one process with the total batch size.
    """

    def __init__(
        self,
        split: Split,
        vocabulary: Encodes,
        batch_size: int,
        captions_per_image: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if captions_per_image > split.captions_per_image:
            raise ValueError(
                f"captions_per_image = {captions_per_image}: must be at most all "
                f"{split.captions_per_image} of an image"
            )
        self.split = split
        self.image_ids = split.image_ids
        self.word_ids = [vocabulary.encode(caption) for caption in split.captions]
        self.captions_per_image = captions_per_image
        self.samples_of_image = -(-split.captions_per_image // captions_per_image)
        self.samples = len(split.features) * self.samples_of_image
        self.batch_size = min(batch_size, self.samples // world)
        if not self.batch_size:
            raise ValueError(
                f"data: {self.samples} training samples are too few for {world} processes"
            )
        self.seed, self.rank, self.world = seed, rank, world

    def __len__(self) -> int:
        return self.samples // (self.batch_size * self.world)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of one epoch, starting at `first_step`."""
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(self.samples)
        captions = np.arange(len(self.split.captions)).reshape(len(self.split.features), -1)
        if self.captions_per_image > 1:
            captions = random.permuted(captions, axis=1)
        with ThreadPoolExecutor(1) as reader:  # prefetch the next batch during the training step
            ahead = None
            for step in range(first_step, len(self)):
                start = (step * self.world + self.rank) * self.batch_size
                following = reader.submit(
                    self._batch, order[start : start + self.batch_size], captions, epoch
                )
                if ahead is not None:
                    yield ahead.result()
                ahead = following
            if ahead is not None:
                yield ahead.result()

    def _batch(self, samples: np.ndarray, captions: np.ndarray, epoch: int) -> Batch:
        images, part = np.divmod(samples, self.samples_of_image)
        place = part[:, None] * self.captions_per_image + np.arange(self.captions_per_image)
        shown = captions[images[:, None], place % self.split.captions_per_image].ravel()
        words, lengths = pad([self.word_ids[i] for i in shown])
        rngs = None
        # one per sample: crops do not depend on the number of processes
        if isinstance(self.split.features, Images):
            rngs = [
                np.random.default_rng([self.seed, epoch, 1 + int(sample)]) for sample in samples
            ]
        ids = self.image_ids[torch.from_numpy(images)]
        return Batch(
            chosen(self.split.features, images, rngs),
            words,
            lengths,
            ids,
            ids.repeat_interleave(self.captions_per_image),
            None if self.split.wholes is None else chosen(self.split.wholes, images),
        )
