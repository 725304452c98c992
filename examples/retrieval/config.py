"""The settings of a run: one frozen dataclass, read from a TOML file and ``key=value``
overrides.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]


@dataclass(frozen=True)
class Config:
    """All settings of a run; ``config.json`` in the run directory holds them in full."""

    # data
    data: str = "scenes"  # a directory of features or of raw images, or "scenes": the generated set
    data_root: str = ""  # where "scenes" is generated; empty: the folder `data` next to `out`
    scenes_sizes: dict[str, int] = field(
        default_factory=lambda: {"train": 2000, "dev": 300, "test": 300}
    )
    min_count: int = 2  # rarer training words become <unk>
    # dev: the first images of it that choose the best checkpoint; 0: all
    dev_images: int = 0
    captions_per_image: int = 1  # captions of an image in one sample, from one to all (5) of them
    workers: int = 0  # processes that read batches ahead, for raw images; 0: none

    # loss
    loss: str = "infonce"
    # handed to the constructor of the loss
    loss_options: dict[str, Any] = field(default_factory=dict)
    warmup_epochs: int = 1  # triplet and dvse: epochs before they use the hardest negative
    # the loss of these epochs: "triplet", summed over all negatives, or "infonce"
    warmup: str = "triplet"
    caption_weight: float = 0.0  # of an additional InfoNCE between two captions of an image
    momentum: float = 0.995  # of the key encoders, for losses with a memory
    memory: int = 2048  # pairs in the memory

    # model
    dim: int = 256
    # Inputs of the image encoder: "regions", "whole" (the picture's global feature), or several,
    # joined by "+". Each view has a separate model with its own loss; the similarity in retrieval
    # is the mean of theirs.
    views: str = "regions"
    enhancement: str = ""  # "sge" or "cge": USER's enhancements of the regions
    # parts of which the model has the printed form, not ours: "concepts", "enhancement", "heads",
    # "pooling"; see docs/systems
    as_printed: list[str] = field(default_factory=list)
    concepts: int = 100  # loss = "coder": concepts in its concept branch
    # concepts i and j have an edge if at least this share of i's captions have j, too
    concept_threshold: float = 0.3
    # loss = "coder": weight of the concepts' cosine in retrieval; the rest: the instances'
    concept_share: float = 0.1
    heads: int = 4  # loss = "dvse": embeddings per image
    # loss = "dvse": apply the orthogonal loss to the heads that an image's gate selects, or to all
    gate: bool = True
    # loss = "dvse": weight a head's hinges by the standard deviation of its scores
    variance_weights: bool = True
    word_dim: int = 200
    word_vectors: str = ""  # initial word embeddings: a text file in GloVe's format
    # add a linear path from the mean word embedding to the text embedding
    bag_of_words: bool = True
    feature_dropout: float = 0.4  # dropout probability of each region feature
    whole_dropout: float = 0.5  # of each feature of a whole picture
    word_dropout: float = 0.2  # of whole words
    embedding_dropout: float = 0.2  # of each entry of a word embedding
    # drop a feature in all regions of an image (words of a caption), not in each
    shared_dropout: bool = False

    # pre-trained encoders
    # use this BERT, not words and a GRU: its directory, or the name of a downloaded one
    bert: str = ""
    bert_lr_factor: float = 0.1  # factor of lr for the BERT's own parameters
    # for raw images: a network of transformers' AutoBackbone, by directory or name as well
    backbone: str = ""
    backbone_lr_factor: float = 0.01  # factor of lr for the backbone's parameters; 0: not trained
    image_size: int = 256  # raw images are scaled to squares

    # optimisation
    epochs: int = 15
    batch_size: int = 256  # samples, of one image and captions_per_image captions each
    # samples that the encoders process at a time (GradCache); 0: the whole batch
    micro_batch: int = 0
    precision: str = "float32"  # of the encoders in training; "bfloat16" and "float16" by autocast
    lr: float = 1e-3
    # multiply lr by 0.1 after each of these epochs
    decay_epochs: list[int] = field(default_factory=list)
    weight_decay: float = 1e-2
    clip: float = 2.0  # maximum gradient norm
    seed: int = 0
    threads: int = 0  # number of PyTorch's threads; 0: unchanged
    device: str = "cpu"

    # Fast Re-ranking of the best checkpoint: gamma_1, gamma_2, lambda_1, lambda_2
    rerank: list[float] = field(default_factory=lambda: [25.0, 25.0, 20.0, 20.0])

    # the run directory
    out: str = "runs/infonce"
    resume: bool = False  # continue from out/last.pt if it exists; false: replace the run
    save_steps: int = 0  # write last.pt after this number of steps, too, not only after each epoch
    final_test: bool = False  # score the best checkpoint on the test split as well
    test_split: str = "test"  # or "testall": all 5000 test images of MSCOCO in SCAN's files
    # also the mean over this number of equal parts of the test split: 5 for MSCOCO's "1K"
    test_folds: int = 1
    tensorboard: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        for name in AT_LEAST_ONE:
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in NOT_NEGATIVE:
            self._require(name, getattr(self, name) >= 0, "not negative")
        for name in BELOW_ONE:
            self._require(name, 0 <= getattr(self, name) < 1, "in [0, 1)")
        for name in AT_MOST_ONE:
            self._require(name, 0 <= getattr(self, name) <= 1, "in [0, 1]")
        for name in ("lr", "clip"):
            self._require(name, getattr(self, name) > 0, "positive")
        numbers = self.rerank
        self._require("rerank", len(numbers) == 4 and min(numbers) > 0, "four numbers above 0")
        epochs = all(epoch >= 1 for epoch in self.decay_epochs)
        self._require("decay_epochs", epochs, "numbers of at least 1")
        several = self.captions_per_image > 1 or not self.caption_weight
        self._require("captions_per_image", several, "at least 2 for caption_weight")
        self._require_one_of("warmup", "triplet", "infonce")
        self._require_one_of("precision", "float32", "bfloat16", "float16")
        self._require_one_of("test_split", "test", "testall")
        self._require_one_of("enhancement", "sge", "cge", "")
        known = {*self.as_printed} <= {*PRINTED}
        self._require("as_printed", known, f"some of {', '.join(PRINTED)}")
        self._check_views()

    def _check_views(self) -> None:
        """Raise a ValueError for views that do not exist, or that the loss cannot have."""
        known = set(self.views.split("+")) <= {"regions", "whole"}
        self._require("views", known, "'regions', 'whole', or several of them, joined by '+'")
        if "regions" not in self.views:
            for_heads = "'regions' too for loss = 'dvse', whose heads need a set"
            self._require("views", self.loss != "dvse", for_heads)
            expected = f"empty for views = {self.views!r}: it is of regions"
            self._require("enhancement", not self.enhancement, expected)

    def _require(self, name: str, condition: bool, expected: str) -> None:
        if not condition:
            raise ValueError(f"{name} = {getattr(self, name)!r}: must be {expected}")

    def _require_one_of(self, name: str, *allowed: str) -> None:
        *others, last = map(repr, allowed)
        self._require(name, getattr(self, name) in allowed, f"{', '.join(others)} or {last}")


PRINTED = ("concepts", "enhancement", "heads", "pooling")
AT_LEAST_ONE = (
    "min_count",
    "captions_per_image",
    "dim",
    "word_dim",
    "epochs",
    "batch_size",
    "memory",
    "concepts",
    "heads",
    "image_size",
    "test_folds",
)
NOT_NEGATIVE = (
    "dev_images",
    "workers",
    "warmup_epochs",
    "caption_weight",
    "bert_lr_factor",
    "backbone_lr_factor",
    "micro_batch",
    "weight_decay",
    "seed",
    "threads",
    "save_steps",
)
BELOW_ONE = ("feature_dropout", "whole_dropout", "word_dropout", "embedding_dropout")
AT_MOST_ONE = ("momentum", "concept_threshold", "concept_share")

# Settings that do not change results.
NO_EFFECT = {
    "data_root",
    "out",
    "resume",
    "threads",
    "workers",
    "save_steps",
    "final_test",
    "test_split",
    "test_folds",
    "tensorboard",
    "progress",
}
# Settings that may differ when a run is resumed. The data may have moved, but must be the same.
RESUMABLE = NO_EFFECT | {"data", "epochs", "device", "rerank"}


def make_config(values: Mapping[str, Any]) -> Config:
    """Build a :class:`Config` from a mapping; errors name unknown keys and values of the wrong
    type.
    """
    types = get_type_hints(Config)
    checked = {}
    for name, value in values.items():
        if name not in types:
            raise ValueError(f"unknown setting {name!r}; the settings are {', '.join(types)}")
        checked[name] = _as_type(name, value, types[name])
    return Config(**checked)


def _as_type(name: str, value: Any, kind: Any) -> Any:
    """Return a value in the type of its setting; TypeError if it is of another type.

    A whole number may stand for a float, and a single value for a list (decay_epochs=15).
    """
    container = get_origin(kind)
    if container is list:
        values = value if isinstance(value, list) else [value]
        (item_kind,) = get_args(kind)
        return [_as_type(name, item, item_kind) for item in values]
    if container is dict and isinstance(value, Mapping):
        _, item_kind = get_args(kind)
        return {key: _as_type(f"{name}.{key}", item, item_kind) for key, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    if kind is Any or type(value) is kind:  # not isinstance, because bool is a subclass of int
        return value
    expected = (container or kind).__name__
    raise TypeError(f"{name} = {value!r}: must be of type {expected}, not {type(value).__name__}")


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file (None: the defaults) and apply overrides: ``"seed=1"``,
    ``"loss_options.margin=0.2"``.

    The file's loss_options belong to the file's loss: an override with another loss drops them.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = read_toml(path)
    types = get_type_hints(Config)
    single: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"override {override!r}: must read key=value")
        name, dot, option = key.partition(".")
        if dot:
            tables.setdefault(name, {})[option] = _parse(text)
        else:
            single[key] = text if types.get(key) is str else _parse(text)
    if "loss" in single and single["loss"] != values.get("loss"):
        values.pop("loss_options", None)
    values |= single
    for name, table in tables.items():
        earlier = values.get(name)
        values[name] = {**earlier, **table} if isinstance(earlier, dict) else table
    return make_config(values)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file; the ValueError of a wrong one names it."""
    with open(path, "rb") as file:
        try:
            return tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: {error}") from error


def _parse(text: str) -> Any:
    """Parse a value as TOML; values that are not TOML (``loss=dcl``) are strings."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
