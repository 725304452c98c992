"""The settings of a run: one frozen dataclass, read from a TOML file and ``key=value``
overrides.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found]

Share = Annotated[float, Field(ge=0, le=1)]
Dropout = Annotated[float, Field(ge=0, lt=1)]
# A single value may stand for a list: decay_epochs=15.
Listed = BeforeValidator(lambda x: x if isinstance(x, list) else [x])
Epochs = Annotated[list[PositiveInt], Listed]
Printed = Annotated[list[Literal["concepts", "enhancement", "heads", "pooling"]], Listed]
Four = Annotated[list[PositiveFloat], Field(min_length=4, max_length=4)]


@dataclass(
    frozen=True, config=ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)
)
class Config:
    """All settings of a run; ``config.json`` in the run directory holds them in full."""

    # data
    data: str = "scenes"
    """A directory of features or of raw images, or "scenes": the generated set."""
    data_root: str = ""
    """Where "scenes" is generated; empty: the folder `data` next to `out`."""
    scenes_sizes: dict[str, int] = field(
        default_factory=lambda: {"train": 2000, "dev": 300, "test": 300}
    )
    """Pictures of each split of the scenes."""
    min_count: PositiveInt = 2
    """Rarer training words become <unk>."""
    vocabulary: str = ""
    """The words of SCAN's vocabulary file, such as f30k_precomp_vocab.json, in their place."""
    dev_images: NonNegativeInt = 0
    """The first images of dev that choose the best checkpoint; 0: all."""
    captions_per_image: PositiveInt = 1
    """Captions of an image in one sample, from one to all (5) of them."""
    workers: NonNegativeInt = 0
    """Processes that read batches ahead, for raw images; 0: none."""

    # loss
    loss: str = "infonce"
    """triplet, infonce, sigmoid, gce, hal, dcl, mdcl, uto (USER), coder or dvse."""
    loss_options: dict[str, Any] = field(default_factory=dict)
    """Handed to the constructor of the loss: loss_options.margin=0.2."""
    warmup_epochs: NonNegativeInt = 1
    """triplet and dvse: epochs before they use the hardest negative."""
    warmup: Literal["triplet", "infonce"] = "triplet"
    """The loss of these epochs: "triplet", summed over all negatives, or "infonce"."""
    caption_weight: NonNegativeFloat = 0.0
    """Of an additional InfoNCE between two captions of an image."""
    momentum: Share = 0.995
    """Of the key encoders, for losses with a memory."""
    memory: PositiveInt = 2048
    """Pairs in the memory."""

    # model
    dim: PositiveInt = 256
    """Dimensions of the embeddings."""
    views: str = "regions"
    """Inputs of the image encoder: "regions", "whole" (the picture's global feature), or several,
    joined by "+". Each view has a separate model with its own loss; the similarity in retrieval
    is the mean of theirs."""
    enhancement: Literal["", "sge", "cge"] = ""
    """USER's enhancements of the regions."""
    enhancement_dropout: Dropout = 0.0
    """In both branches of enhancement=sge; 0.4 in USER's code."""
    standardise: bool = True
    """Standardise regions: the mean of each feature, one deviation for all. false: as they are."""
    as_printed: Printed = field(default_factory=list)
    """Parts of which the model has the printed form, not ours; see docs/systems."""
    concepts: PositiveInt = 100
    """loss=coder: concepts in its concept branch."""
    concept_file: str = ""
    """loss=coder: these concepts, not those that are found: CVSE's category_concepts.json, a list
    of words in JSON, or concepts.json of a run."""
    concept_threshold: Share = 0.3
    """Concepts i and j have an edge if at least this share of i's captions have j, too."""
    concept_share: Share = 0.1
    """loss=coder: weight of the concepts' cosine in retrieval; the rest: the instances'."""
    heads: PositiveInt = 4
    """loss=dvse: embeddings per image."""
    gate: bool = True
    """loss=dvse: apply the orthogonal loss to the heads that an image's gate selects, or to all."""
    variance_weights: bool = True
    """loss=dvse: weight a head's hinges by the standard deviation of its scores."""
    word_dim: PositiveInt = 200
    """Dimensions of word embeddings."""
    word_vectors: str = ""
    """Initial word embeddings: a text file in GloVe's format."""
    bag_of_words: bool = True
    """Add a linear path from the mean word embedding to the text embedding."""
    feature_dropout: Dropout = 0.4
    """Dropout probability of each region feature."""
    whole_dropout: Dropout = 0.5
    """Of each feature of a whole picture."""
    word_dropout: Dropout = 0.2
    """Of whole words."""
    word_masking: Literal["mask", "three ways"] = "mask"
    """bert: "mask" replaces these pieces by [MASK]; "three ways", as VSE-infinity's and USER's
    code, half of them, and a tenth by random pieces, and removes the others."""
    embedding_dropout: Dropout = 0.2
    """Of each entry of a word embedding."""
    shared_dropout: bool = False
    """Drop a feature in all regions of an image (words of a caption), not in each."""

    # pre-trained encoders
    bert: str = ""
    """Use this BERT, not words and a GRU: its directory, or the name of a downloaded one."""
    bert_lr_factor: NonNegativeFloat = 0.1
    """Factor of lr for the BERT's own parameters."""
    backbone: str = ""
    """For raw images: a network of transformers' AutoBackbone, by directory or name as well."""
    backbone_lr_factor: NonNegativeFloat = 0.01
    """Factor of lr for the backbone's parameters; 0: not trained."""
    image_size: PositiveInt = 256
    """Raw images are scaled to squares of this side."""

    # optimisation
    epochs: PositiveInt = 15
    batch_size: PositiveInt = 256
    """Samples, of one image and captions_per_image captions each."""
    micro_batch: NonNegativeInt = 0
    """Samples that the encoders process at a time (GradCache); 0: the whole batch."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the encoders in training; "bfloat16" and "float16" by autocast."""
    lr: PositiveFloat = 1e-3
    """Learning rate of AdamW."""
    decay_epochs: Epochs = field(default_factory=list)
    """Multiply lr by 0.1 after each of these epochs."""
    weight_decay: NonNegativeFloat = 1e-2
    """Of the model's matrices."""
    clip: PositiveFloat = 2.0
    """Maximum gradient norm."""
    seed: NonNegativeInt = 0
    threads: NonNegativeInt = 0
    """Number of PyTorch's threads; 0: unchanged."""
    device: str = "cpu"
    rerank: Four = field(default_factory=lambda: [25.0, 25.0, 20.0, 20.0])
    """Fast Re-ranking of the best checkpoint: gamma_1, gamma_2, lambda_1, lambda_2."""

    # the run directory
    out: str = "runs/infonce"
    """The run directory."""
    resume: bool = False
    """Continue from out/last.pt if it exists; false: replace the run."""
    save_steps: NonNegativeInt = 0
    """Write last.pt after this number of steps, too, not only after each epoch."""
    final_test: bool = False
    """Score the best checkpoint on the test split as well."""
    test_split: Literal["test", "testall"] = "test"
    """"testall": all 5000 test images of MSCOCO in SCAN's files."""
    test_folds: PositiveInt = 1
    """Also the mean over this number of equal parts of the test split; 5 for MSCOCO's "1K"."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    progress: bool = True
    """Show a bar on a terminal."""

    def __post_init__(self) -> None:
        """Raise a ValueError for settings that do not go together."""
        several = self.captions_per_image > 1 or not self.caption_weight
        self._require("captions_per_image", several, "at least 2 for caption_weight")
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


# The JSON schema of each setting, with its description.
SETTINGS: dict[str, dict[str, Any]] = TypeAdapter(Config).json_schema()["properties"]
# Settings that do not change results.
NO_EFFECT = {
    "data_root",
    "out",
    "resume",
    "threads",
    "workers",
    "save_steps",
    "final_test",
    "tensorboard",
    "progress",
}
# Settings that may differ when a run is resumed. The data may have moved, but must be the same.
RESUMABLE = NO_EFFECT | {"data", "epochs", "device", "rerank", "test_split", "test_folds"}


def make_config(values: Mapping[str, Any], places: Mapping[str, str] | None = None) -> Config:
    """Build a :class:`Config`; the ValueError of wrong settings names each of them, its place (by
    name, such as "a.toml:3: ") if that is known, its value, and what it must be.
    """
    try:
        return Config(**values)
    except ValidationError as error:
        said = map(_said, error.errors())
    # each begins with the name of a setting
    known = places or {}
    raise ValueError("\n".join(known.get(re.split(r"\W", text)[0], "") + text for text in said))


def _said(wrong: Any) -> str:
    """An error of pydantic's, in one line."""
    if not wrong["loc"]:  # of __post_init__
        return str(wrong["ctx"]["error"])
    name = ".".join(map(str, wrong["loc"]))
    if wrong["type"] == "unexpected_keyword_argument":
        closest = get_close_matches(name, SETTINGS, 1)
        advice = f"did you mean {closest[0]}?" if closest else "--help lists all"
        return f"{name} = {wrong['input']!r}: no such setting; {advice}"
    return f"{name} = {wrong['input']!r}: {wrong['msg'].replace('Input should', 'must')}"


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file (None: the defaults) and apply overrides: ``"seed=1"``,
    ``"loss_options.margin=0.2"``.

    The file's loss_options belong to the file's loss: an override with another loss drops them.
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    if path is not None:
        values = read_toml(path)
        places = _places(path)
    lines = dict(map(_line, overrides))  # the last one of each key
    changes = tomllib.loads("\n".join(lines.values()))
    loss_of_file = values.get("loss", Config.loss)
    if changes.get("loss", loss_of_file) != loss_of_file:
        values.pop("loss_options", None)
    for name, value in changes.items():
        earlier = values.get(name)
        if isinstance(earlier, dict) and isinstance(value, dict):
            value = {**earlier, **value}
        values[name] = value
    return make_config(values, {name: places[name] for name in places if name not in changes})


@contextmanager
def must_be(given: str, wanted: str) -> Iterator[None]:
    """A context to read a file in, whose ValueError says what was given and what it must be."""
    try:
        yield
    except (AttributeError, EOFError, KeyError, OSError, TypeError, ValueError) as error:
        raise ValueError(f"{given}: must be {wanted} ({error})") from error


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file; the ValueError of a wrong one names it."""
    with must_be(str(path), "a TOML file"), open(path, "rb") as file:
        return tomllib.load(file)


def _places(path: str | Path) -> dict[str, str]:
    """The first line of each setting or table in a TOML file, by name: "a.toml:3: "."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    places: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        places.setdefault(re.split(r"\W", line.strip(" ["))[0], f"{path}:{number}: ")
    return places


def _line(override: str) -> tuple[str, str]:
    """The key of an override, and it as TOML: its string need not be quoted (``loss=dcl``)."""
    key, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"override {override!r}: must read key=value")
    if Config.__annotations__.get(key) != "str":
        try:
            tomllib.loads(override)
            return key, override
        except tomllib.TOMLDecodeError:
            pass  # a string without quotes
    return key, f"{key}={json.dumps(text, ensure_ascii=False)}"


def all_settings() -> str:
    """All settings with their defaults, for ``--help``."""
    texts = []
    for name, value in asdict(Config()).items():
        text = f"{name}={json.dumps(value)}  {SETTINGS[name].get('description', '')}"
        texts.append(textwrap.fill(text, 79, initial_indent="  ", subsequent_indent="      "))
    return "settings and their defaults:\n" + "\n".join(texts)
