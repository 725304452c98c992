"""Data sets, their vocabulary, and resumable batches.

A data set of pre-computed features, in the layout of SCAN and VSE-infinity, is a directory with
`{split}_ims.npy`, (n, regions, d), and `{split}_caps.txt`, one caption per line. Five consecutive
lines describe one image (`image = line // 5`), or one line if there are as many lines as images.
If each image is there five times in a row, as in the files of VSE++, it is read once; and (n, d),
VSE++'s one vector an image, is read as one region.
Optionally, `{split}_global.npy`, (n, d'), holds one global feature per picture, or (n, positions,
d') several, of which the mean is read. Data sets of raw images are read by
:mod:`examples.retrieval.pictures`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from itrloss.files import read_lines

from .config import must_be
from .pictures import Images, layout, listed_images

PAD, UNKNOWN = "<pad>", "<unk>"  # ids 0 and 1
SPECIAL = (PAD, UNKNOWN, "<start>", "<end>")  # of SCAN's vocabulary


# ------------------------------------------------------------------------------------------- splits


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

    def first(self, count: int) -> Split:
        """The first images and their captions; all of them if ``count`` is 0."""
        if not count:
            return self
        features = self.features[:count]
        return Split(
            features,
            self.captions[: len(features) * self.captions_per_image],
            self.captions_per_image,
            None if self.wholes is None else self.wholes[:count],
            None if self.classes is None else self.classes[:count],
        )

    def regions(self, image: int, seed: Sequence[int] | None = None) -> Tensor:
        """The features of an image, float32 (regions, d).

        A raw image is (3, H, W); it is cropped and flipped at random if there is a seed.
        """
        if isinstance(self.features, Images):
            return self.features.read(image, seed)
        return torch.from_numpy(np.array(self.features[image], dtype=np.float32))

    def whole(self, images: int | Sequence[int]) -> Tensor | None:
        """The global feature of an image, float32 (d',), or of several; None if the data set has
        none.
        """
        if self.wholes is None:
            return None
        return torch.from_numpy(np.array(self.wholes[images], dtype=np.float32))


def load_split(root: str | Path, name: str, image_size: int = 256) -> Split:
    """Read the split `name` ("train", "dev", "test", "testall") under `root`.

    "testall" is the name that SCAN's files have for all 5000 test images of MSCOCO, of which its
    "test" is the first 1000. Karpathy's "test" has all of them, under both names. Raw images are
    scaled to squares of ``image_size``. If the number of captions does not fit the number of
    images, the ValueError names both files.
    """
    root = Path(root)
    if layout(root) == "features":
        return _precomputed(features_directory(root), name)
    listed = listed_images(root, name)
    captions = [caption for image in listed for caption in image.captions]
    kinds = sorted({image.kind for image in listed})
    classes = None
    if kinds != [""]:
        classes = torch.tensor([kinds.index(image.kind) for image in listed])
    pictures = Images([image.path for image in listed], image_size)
    wholes = _global_features(features_directory(root), name, len(listed))
    return Split(pictures, captions, len(listed[0].captions), wholes, classes)


def features_directory(root: Path) -> Path:
    """Return the directory of the features: VSE-infinity's files are in ``precomp/`` below."""
    below = root / "precomp"
    is_there = below.is_dir() and layout(root) in ("features", "mapping")
    return below if is_there and not list(root.glob("*_ims.npy")) else root


def _precomputed(root: Path, name: str) -> Split:
    features_path = root / f"{name}_ims.npy"
    captions_path = root / f"{name}_caps.txt"
    features = _array(features_path, "(n, regions, d)")
    captions = read_lines(captions_path)
    if features.ndim == 2:
        features = features[:, None]
    each = 5 if len(captions) == len(features) and repeats_images(features) else 1
    features = features[::each]
    n = len(features)
    if features.ndim != 3 or not n:
        found = f"{features.dtype} {features.shape}"
        raise ValueError(f"{features_path}: {found}, must be a float array (n, regions, d)")
    if len(captions) not in (n, 5 * n):
        raise ValueError(
            f"{captions_path} has {len(captions)} captions and {features_path} has {n} images: "
            "there must be five captions an image, or one"
        )
    return Split(features, captions, len(captions) // n, _global_features(root, name, n, each))


def _global_features(root: Path, name: str, n: int, each: int = 1) -> np.ndarray | None:
    """Read the global features of a split, (n, d'), where each picture is there ``each`` times;
    None without a file.
    """
    path = root / f"{name}_global.npy"
    if not path.exists():
        return None
    wholes = _array(path, f"({n}, d)")[::each]
    if wholes.ndim == 3:  # of positions
        wholes = wholes.mean(1, dtype=np.float32)
    if wholes.ndim != 2 or len(wholes) != n:
        found = f"{wholes.dtype} {wholes.shape}"
        raise ValueError(f"{path}: {found}, must be a float array ({n}, d)")
    return wholes


def _array(path: Path, shape: str) -> np.ndarray:
    """Map a file of floating-point numbers into memory."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    with must_be(str(path), f"a float array {shape}"):
        array = np.load(path, mmap_mode="r")
        if array.dtype.kind != "f" or array.ndim < 2:
            raise ValueError(f"{array.dtype} {array.shape}")
        return array


def repeats_images(features: np.ndarray, sample: int = 200) -> bool:
    """Whether each image is there five times in a row, once a caption, as in the files of VSE++.

    A sample of the images, evenly spaced, stands for all.
    """
    if not len(features) or len(features) % 5:
        return False
    starts = range(0, len(features), 5 * max(1, len(features) // (5 * sample)))
    return all((features[i : i + 5] == features[i]).all() for i in starts)


def feature_statistics(features: np.ndarray, chunk: int = 1024) -> tuple[Tensor, Tensor]:
    """Mean of each feature over all regions, (d,) float32, and one standard deviation for all
    features, 0-dim.

    There is one deviation for all features because some of them vary little (minor principal
    components, rare channels): dividing by a deviation of their own would scale their noise up to
    the size of the signal. Two float64 passes over chunks avoid loading the whole memory-mapped
    array.
    """
    parts = [features[start : start + chunk] for start in range(0, len(features), chunk)]
    n, regions, _ = features.shape
    mean: Any = sum(part.sum((0, 1), dtype=np.float64) for part in parts) / (n * regions)
    variance = sum(np.square(part - mean).sum() for part in parts) / features.size
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


# -------------------------------------------------------------------------------------------- words


def tokenize(caption: str) -> list[str]:
    """Split a caption into lower-case words and numbers, without punctuation."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)?", caption.lower())


class Tokenizer(Protocol):
    """What turns a caption into ids: a :class:`Vocabulary`, or the word pieces of a BERT."""

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

    @classmethod
    def of_scan(cls, path: str) -> Vocabulary:
        """Read the words of SCAN's vocabulary: JSON with the number of each in ``word2idx``."""
        wanted = "a vocabulary of SCAN: JSON with the numbers of words in word2idx"
        with must_be(f"vocabulary = {path!r}", wanted):
            numbers = json.loads(Path(path).read_text(encoding="utf-8"))["word2idx"]
            words = sorted(numbers, key=numbers.get)
        return cls([PAD, UNKNOWN, *(word for word in words if word not in SPECIAL)])

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


def word_vectors(path: str) -> dict[str, np.ndarray]:
    """Read float32 word vectors from a text file in GloVe's format; a blank line, and the first one
    of fastText's, with two sizes, have none.

    All vectors are as long as the first, so that what is before them is the word: some of GloVe's
    have spaces, such as ". . .".
    """
    vectors = {}
    size = 0  # numbers a line
    wanted = "a text file in GloVe's format, each line a word and as many numbers"
    with must_be(f"word_vectors = {path!r}", wanted), open(path, encoding="utf-8") as file:
        for number, line in enumerate(file):
            fields = line.rstrip().split(" ")
            is_header = number == 0 and len(fields) == 2
            if is_header:
                continue
            size = size or len(fields) - 1
            start = max(1, len(fields) - size)  # of the vector
            word = " ".join(fields[:start])
            if word:
                vectors[word] = np.array(fields[start:], dtype=np.float32)
        sizes = {len(vector) for vector in vectors.values()}
        if len(sizes) != 1 or 0 in sizes:
            raise ValueError(f"it has {sorted(sizes)} numbers a line")
    return vectors


def begin_with(weight: Tensor, words: Sequence[str], vectors: Mapping[str, np.ndarray]) -> int:
    """Overwrite the rows of words that have a vector, rescaled to the rows' mean length; return
    their number.
    """
    rows = [i for i, word in enumerate(words) if word in vectors]
    if not rows:
        return 0
    new = torch.from_numpy(np.stack([vectors[words[i]] for i in rows]))
    if new.shape[1] > weight.shape[1]:
        raise ValueError(
            f"word_dim = {weight.shape[1]}: must be at least {new.shape[1]}, as the word vectors "
            "have"
        )
    new *= weight[rows].norm(dim=1).mean() / new.norm(dim=1).mean()
    with torch.no_grad():
        weight[rows, : new.shape[1]] = new.to(weight)
    return len(rows)


def pad(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Right-pad with 0, to (B, L) int64, and return the lengths (B,) int64, too."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return pad_sequence([torch.tensor(s) for s in sequences], batch_first=True), lengths


# ------------------------------------------------------------------------------------------ batches


class Sample(NamedTuple):
    """An image with some of its captions."""

    regions: Tensor  # (R, d) float32; a raw image: (3, H, W)
    whole: Tensor | None  # (d',) float32
    captions: list[list[int]]  # ids of words
    image_id: Tensor  # 0-dim int64


@dataclass(frozen=True)
class Batch:
    """B images and M = B * captions_per_image captions; equal ids mark positive pairs."""

    regions: Tensor  # (B, R, d) float32; raw images: (B, 3, H, W)
    words: Tensor  # (M, L) int64, padded with 0
    lengths: Tensor  # (M,) int64, on the CPU
    wholes: Tensor | None  # (B, d') float32
    image_ids: Tensor  # (B,) int64
    text_ids: Tensor  # (M,) int64

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Batch:
        """Put samples together, each with the same number of captions."""
        words, lengths = pad([caption for sample in samples for caption in sample.captions])
        wholes = [sample.whole for sample in samples if sample.whole is not None]
        ids = torch.stack([sample.image_id for sample in samples])
        return cls(
            torch.stack([sample.regions for sample in samples]),
            words,
            lengths,
            torch.stack(wholes) if wholes else None,
            ids,
            ids.repeat_interleave(len(samples[0].captions)),
        )

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The inputs of a model."""
        return self.regions, self.words, self.lengths, self.wholes

    def to(self, device: str) -> Batch:
        return Batch(
            self.regions.to(device),
            self.words.to(device),
            self.lengths,
            None if self.wholes is None else self.wholes.to(device),
            self.image_ids.to(device),
            self.text_ids.to(device),
        )


class Samples(Dataset[Sample]):
    """The samples of one epoch, with the captions in the order in which the epoch shows them."""

    def __init__(self, batches: Batches, captions: np.ndarray, epoch: int) -> None:
        self.batches = batches
        self.captions = captions  # (images, captions of an image)
        self.epoch = epoch

    def __getitem__(self, index: int) -> Sample:
        split = self.batches.split
        count = self.batches.captions_per_image
        image, part = divmod(index, self.batches.samples_of_image)
        places = np.arange(part * count, (part + 1) * count) % split.captions_per_image
        seed = [self.batches.seed, self.epoch, 1 + index]
        return Sample(
            split.regions(image, seed),
            split.whole(image),
            [self.batches.word_ids[caption] for caption in self.captions[image, places]],
            self.batches.image_ids[image],
        )


@dataclass(eq=False)
class Batches:
    """The batches of each epoch, a pure function of (seed, epoch, step), so that a run can resume
    at any step.

    A sample is one image with `captions_per_image` of its captions, drawn anew every epoch. The
    samples of an epoch have every caption once, or some twice if their number is not divisible by
    `captions_per_image`. The incomplete last batch is dropped, so an epoch does not show all
    samples; as the order changes every epoch, none is dropped for good. Unless a sample has all
    captions (VSE's default is one), a batch may hold the same image twice. It therefore includes
    the ids, by which the image's other caption is a positive, not a negative. With several
    processes, each has ``batch_size`` samples per step; together they see the same samples as one
    process with the total batch size.
    """

    split: Split
    tokenizer: Tokenizer
    batch_size: int
    captions_per_image: int
    seed: int
    rank: int = 0
    world: int = 1
    workers: int = 0

    def __post_init__(self) -> None:
        split = self.split
        if self.captions_per_image > split.captions_per_image:
            raise ValueError(
                f"captions_per_image = {self.captions_per_image}: must be at most all "
                f"{split.captions_per_image} of an image"
            )
        self.image_ids = split.image_ids
        self.word_ids = [self.tokenizer.encode(caption) for caption in split.captions]
        self.samples_of_image = -(-split.captions_per_image // self.captions_per_image)
        self.samples = len(split.features) * self.samples_of_image
        self.batch_size = min(self.batch_size, self.samples // self.world)
        if not self.batch_size:
            raise ValueError(
                f"data: {self.samples} training samples are too few for {self.world} processes"
            )

    def __len__(self) -> int:
        return self.samples // (self.batch_size * self.world)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Load the batches of one epoch, starting at `first_step`."""
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(self.samples)
        captions = np.arange(len(self.split.captions)).reshape(len(self.split.features), -1)
        if self.captions_per_image > 1:
            captions = random.permuted(captions, axis=1)
        shown = order[: len(self) * self.world * self.batch_size]
        # of each step and process
        samples = shown.reshape(len(self), self.world, self.batch_size)
        loader: DataLoader[Any] = DataLoader(
            Samples(self, captions, epoch),
            batch_sampler=[step.tolist() for step in samples[first_step:, self.rank]],
            collate_fn=Batch.of,
            num_workers=self.workers,
            generator=torch.Generator(),  # or it would draw from the generator of dropout
        )
        return iter(loader)
