"""The settings of a run: one frozen dataclass, read from a TOML file and ``key=value``
overrides.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

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
    captions_per_image: int = 1  # captions of an image in one sample, from one to all (5) of them

    # loss
    loss: str = "infonce"
    # handed to the constructor of the loss
    loss_options: dict[str, Any] = field(default_factory=dict)
    warmup_epochs: int = 1  # triplet, pvse and dvse: epochs before they use the hardest negative
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
    concepts: int = 100  # loss = "coder": concepts in its concept branch
    # concepts i and j have an edge if at least this share of i's captions have j, too
    concept_threshold: float = 0.3
    # which tagger finds concepts: "rules", or "spacy" (which must be installed)
    tagger: str = "rules"
    # loss = "coder": weight of the concepts' cosine in retrieval; the rest: the instances'
    concept_share: float = 0.1
    heads: int = 4  # loss = "dvse": embeddings per image; "pvse": per image and per text
    # loss = "dvse": apply the orthogonal loss to the heads that an image's gate selects, or to all
    gate: bool = True
    # loss = "dvse": weight a head's hinges by the standard deviation of its scores
    variance_weights: bool = True
    word_dim: int = 200
    # initial word embeddings: GloVe's text file, or .npy with a list of words in a .json
    word_vectors: str = ""
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
    bert_weights: bool = True  # load its weights; false: initialise at random
    bert_lr_factor: float = 0.1  # factor of lr for the BERT's own parameters
    backbone: str = ""  # for raw images: resnet50, ... resnext101_32x8d, or timm/NAME
    backbone_weights: str = ""  # the file of its weights; empty: random initialisation
    backbone_lr_factor: float = 0.01  # factor of lr for the backbone's parameters
    # number of its first stages that are not trained: 1 is the stem, 5 all
    backbone_frozen: int = 0
    image_size: int = 256  # raw images are scaled to squares

    # optimisation
    epochs: int = 15
    batch_size: int = 256  # samples, of one image and captions_per_image captions each
    # samples that the encoders process at a time (GradCache); 0: the whole batch
    micro_batch: int = 0
    precision: str = "float32"  # of the encoders in training; "bfloat16" and "float16" by autocast
    lr: float = 1e-3
    lr_warmup_steps: int = 0
    # multiply lr by 0.1 after each of these epochs
    decay_epochs: list[int] = field(default_factory=list)
    weight_decay: float = 1e-2
    patience: int = 0  # stop after this number of epochs without a better RSUM on dev; 0: never
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
    tensorboard: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        settings = vars(self)
        for name in AT_LEAST_ONE:
            _require(settings[name] >= 1, name, settings[name], "at least 1")
        for name in NOT_NEGATIVE:
            _require(settings[name] >= 0, name, settings[name], "not negative")
        four = len(self.rerank) == 4 and all(x > 0 for x in self.rerank)
        _require(four, "rerank", self.rerank, "four numbers above 0")
        epochs = all(e >= 1 for e in self.decay_epochs)
        _require(epochs, "decay_epochs", self.decay_epochs, "numbers of at least 1")
        for name in BELOW_ONE:
            _require(0 <= settings[name] < 1, name, settings[name], "in [0, 1)")
        for name in AT_MOST_ONE:
            _require(0 <= settings[name] <= 1, name, settings[name], "in [0, 1]")
        several = self.captions_per_image > 1 or not self.caption_weight
        expected = "at least 2 for caption_weight"
        _require(several, "captions_per_image", self.captions_per_image, expected)
        _require_one_of("warmup", self.warmup, "triplet", "infonce")
        self._check_views()
        _require_one_of("tagger", self.tagger, "rules", "spacy")
        precisions = ("float32", "bfloat16", "float16")
        expected = ", ".join(map(repr, precisions))
        _require(self.precision in precisions, "precision", self.precision, expected)
        self._check_backbone()
        for name in ("lr", "clip"):
            _require(settings[name] > 0, name, settings[name], "positive")

    def _check_views(self) -> None:
        """Raise a ValueError for views that do not exist, or that the loss cannot have."""
        views = self.views.split("+")
        known = all(view in ("regions", "whole") for view in views)
        expected = "'regions', 'whole', or several of them, joined by '+'"
        _require(known, "views", self.views, expected)
        regions_alone = self.loss != "pvse" or "whole" not in views
        _require(regions_alone, "views", self.views, "of regions for loss = 'pvse'")
        heads = self.loss != "dvse" or "regions" in views
        expected = "'regions' too for loss = 'dvse', whose heads need a set"
        _require(heads, "views", self.views, expected)
        _require_one_of("enhancement", self.enhancement, "sge", "cge", "")
        seen = not self.enhancement or "regions" in self.views
        expected = f"empty for views = {self.views!r}: it is of regions"
        _require(seen, "enhancement", self.enhancement, expected)

    def _check_backbone(self) -> None:
        """Raise a ValueError for settings of a backbone where there is none."""
        stages = 0 <= self.backbone_frozen <= 5
        _require(stages, "backbone_frozen", self.backbone_frozen, "from 0 to 5")
        if self.backbone:
            return
        weights = self.backbone_weights
        _require(not weights, "backbone_weights", weights, "empty without a backbone")
        frozen = self.backbone_frozen
        _require(not frozen, "backbone_frozen", frozen, "0 without a backbone")


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
)
NOT_NEGATIVE = (
    "seed",
    "warmup_epochs",
    "caption_weight",
    "micro_batch",
    "lr_warmup_steps",
    "weight_decay",
    "patience",
    "threads",
    "save_steps",
    "bert_lr_factor",
    "backbone_lr_factor",
)
BELOW_ONE = ("feature_dropout", "whole_dropout", "word_dropout", "embedding_dropout")
AT_MOST_ONE = ("momentum", "concept_threshold", "concept_share")

# Settings that do not change results.
NO_EFFECT = {
    "data_root",
    "out",
    "resume",
    "threads",
    "save_steps",
    "final_test",
    "tensorboard",
    "progress",
}
# Settings that may differ when a run is resumed. The data may have moved, but must be the same.
RESUMABLE = NO_EFFECT | {"data", "epochs", "patience", "device", "rerank"}


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise ValueError(f"{name} = {value!r}: must be {expected}")


def _require_one_of(name: str, value: str, *allowed: str) -> None:
    *others, last = map(repr, allowed)
    _require(value in allowed, name, value, f"{', '.join(others)} or {last}")


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


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file (None: the defaults) and apply overrides: ``"seed=1"``,
    ``"loss_options.margin=0.2"``.

    The file's loss_options belong to the file's loss: an override with another loss drops them.
    """
    values: dict[str, Any] = {}
    if path is not None:
        with open(path, "rb") as file:
            try:
                values = tomllib.load(file)
            except tomllib.TOMLDecodeError as error:
                raise ValueError(f"{path}: {error}") from error
    types = get_type_hints(Config)
    overridden: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        name, dot, option = key.partition(".")
        if not equals:
            raise ValueError(f"override {override!r}: must read key=value")
        if dot and name in types:
            if not _is_table(types[name]):
                raise ValueError(
                    f"override {override!r}: {name} is not a table, so it takes no .{option}"
                )
            options.setdefault(name, {})[option] = _parse(text)
        else:
            overridden[key] = text if types.get(key) is str else _parse(text)
    if overridden.get("loss", values.get("loss")) != values.get("loss"):
        values.pop("loss_options", None)
    values |= overridden
    for name, table in options.items():
        values[name] = {**values.get(name, {}), **table}
    return make_config(values)


def _parse(text: str) -> Any:
    """Parse a value as TOML; values that are not TOML (``loss=dcl``) are strings."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _is_table(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is dict


def _is_list(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is list


def _as_type(name: str, value: Any, kind: Any) -> Any:
    if _is_table(kind):
        item = kind.__args__[1]
        if isinstance(value, Mapping):
            return {
                key: v if item is Any else _as_type(f"{name}.{key}", v, item)
                for key, v in value.items()
            }
    elif _is_list(kind):
        values = value if isinstance(value, list) else [value]  # decay_epochs=15 on a command line
        return [_as_type(f"{name}[{i}]", v, kind.__args__[0]) for i, v in enumerate(values)]
    elif kind is float and type(value) is int:
        return float(value)
    elif type(value) is kind:  # not isinstance, because bool is a subclass of int
        return value
    expected = "table" if _is_table(kind) else kind.__name__
    raise TypeError(f"{name} = {value!r}: must be of type {expected}, not {type(value).__name__}")
