"""Data, model and optimiser, for a new run or from a checkpoint."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from itrloss.distributed import world_size

from .backbones import Backbone, BertEncoder, WordPieces, network_sizes
from .concepts import find_concepts, normalized_graph, read_concepts
from .config import Config, make_config
from .data import (
    Split,
    Vocabulary,
    begin_with,
    feature_statistics,
    features_directory,
    load_split,
    whole_statistics,
    word_vectors,
)
from .encoders import ImageEncoder, TextEncoder
from .models import CODER, VSE, build_model, views
from .pictures import Images

Words = Vocabulary | WordPieces


def is_first() -> bool:
    """Whether this process is the only one, or the one that writes files."""
    return world_size() == 1 or dist.get_rank() == 0


def data_directory(config: Config) -> Path:
    """Return the data set's directory; the scenes are generated first if they do not exist yet."""
    if config.data != "scenes":
        return Path(config.data)
    from .scenes import write_scenes

    root = Path(config.data_root or Path(config.out).parent / "data")
    if is_first():
        write_scenes(root, sizes=config.scenes_sizes, seed=0)
    if world_size() > 1:
        dist.barrier()
    return root


def check_fit(config: Config, root: Path, train: Split) -> None:
    """Check data and settings for errors that would otherwise occur after an epoch, or go
    unnoticed.
    """
    is_raw = isinstance(train.features, Images)
    if is_raw != bool(config.backbone):
        expected = "the name of one, for the raw images" if is_raw else "empty for the features"
        also = ""
        if is_raw and list(root.glob("precomp/*_ims.npy")):
            also = f"; its features are read with data={root / 'precomp'}"
        raise ValueError(f"backbone = {config.backbone!r}: must be {expected} of {root}{also}")
    needs_wholes = ""
    if "whole" in config.views:
        needs_wholes = f"views = {config.views!r}"
    elif config.enhancement == "cge":
        needs_wholes = "enhancement = 'cge'"
    for name in ("train", "dev", config.test_split)[: 3 if config.final_test else 2]:
        split = load_split(root, name, config.image_size)
        if name == config.test_split and len(split.features) % config.test_folds:
            raise ValueError(
                f"test_folds = {config.test_folds}: must divide the {len(split.features)} images "
                f"of {name} in {root}"
            )
        if needs_wholes and split.wholes is None:
            raise ValueError(
                f"{needs_wholes}: needs {features_directory(root)}/{name}_global.npy, "
                "the features of whole pictures"
            )
        _check_dim(root, name, "ims", split.features, train.features)
        _check_dim(root, name, "global", split.wholes, train.wholes)


def _check_dim(root: Path, name: str, kind: str, features: Any, of_training: Any) -> None:
    """Raise a ValueError if arrays of two splits have different numbers of features."""
    if isinstance(features, np.ndarray) and isinstance(of_training, np.ndarray):
        dim, expected = features.shape[-1], of_training.shape[-1]
        if dim != expected:
            raise ValueError(
                f"{root}/{name}_{kind}.npy: {dim} features, must be {expected} as in "
                f"train_{kind}.npy"
            )


# -------------------------------------------------------------------------------------------- model


def words_of(config: Config, train: Split) -> Words:
    """Read the word pieces of a BERT or SCAN's vocabulary, or build that of the training
    captions.
    """
    if config.bert:
        return WordPieces.of_checkpoint(config.bert)
    if config.vocabulary:
        return Vocabulary.of_scan(config.vocabulary)
    return Vocabulary.from_captions(train.captions, config.min_count)


def sizes_of(config: Config, train: Split) -> dict[str, Any]:
    """The sizes of a model's inputs, for :func:`build`."""
    return {
        "region_dim": 0 if isinstance(train.features, Images) else train.features.shape[2],
        "whole_dim": 0 if train.wholes is None else train.wholes.shape[1],
        "network": network_sizes(config.backbone) if config.backbone else None,
    }


def build(config: Config, sizes: dict[str, Any], words: Words) -> VSE:
    """Build a model with random weights."""
    vocabulary = words if isinstance(words, WordPieces) else len(words)
    return build_model(config, words=vocabulary, **sizes)


def new_model(config: Config, train: Split, sizes: dict[str, Any], words: Words) -> VSE:
    """Build the untrained model, with pre-trained weights and with the statistics that it needs of
    the training data.
    """
    model = build(config, sizes, words)
    vectors = word_vectors(config.word_vectors) if config.word_vectors else {}
    for view in views(model):
        if isinstance(view.image.backbone, Backbone):
            view.image.backbone.load_weights(config.backbone)
        if isinstance(view.text, BertEncoder):
            view.text.load_weights(config.bert)
        if isinstance(words, Vocabulary) and isinstance(view.text, TextEncoder):
            view.text.idf.copy_(words.idf(train.captions))
            begin_with(view.text.embedding.weight, words.words, vectors)
        if isinstance(view, CODER):
            _choose_concepts(view, config, train, vectors)
    _standardise([view.image for view in views(model)], config, train)
    return model


def _standardise(encoders: list[ImageEncoder], config: Config, train: Split) -> None:
    """Give image encoders the statistics of the training features."""
    if config.standardise and not isinstance(train.features, Images):
        mean, std = feature_statistics(train.features)
        for image in encoders:
            image.mean.copy_(mean)
            image.std.copy_(std)
    if train.wholes is not None:
        mean, std = whole_statistics(train.wholes)
        for image in encoders:
            image.whole_mean.copy_(mean)
            image.whole_std.copy_(std)


def _choose_concepts(
    model: CODER, config: Config, train: Split, vectors: dict[str, np.ndarray]
) -> None:
    if config.concept_file:
        concepts = read_concepts(config.concept_file, train.captions)
        number = len(concepts.words)
        if number != config.concepts:
            raise ValueError(f"concepts = {config.concepts}: must be {number} as in concept_file")
    else:
        concepts = find_concepts(train.captions, config.concepts)
    if is_first():
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        concepts.save(out / "concepts.json")
    model.branch.graph.copy_(normalized_graph(concepts.graph(config.concept_threshold)))
    begin_with(model.branch.vectors, concepts.words, vectors)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU; ValueError if the file is damaged.

    A checkpoint is a zip archive with a CRC-32 of each entry, which torch.load does not check.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is None:
            return torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    raise ValueError(f"{path} is damaged: the checksum of its {damaged} is wrong")


def load_model(path: str | Path) -> tuple[VSE, Words, Config]:
    """Rebuild the model of a checkpoint (best.pt or last.pt), in evaluation mode, on the CPU."""
    state = read_checkpoint(path)
    config = make_config(state["config"])
    stored = state["vocabulary"]
    words = WordPieces(**stored) if config.bert else Vocabulary(stored)
    model = build(config, state["sizes"], words)
    model.load_state_dict(state["model"])
    return model.eval(), words, config


# ---------------------------------------------------------------------------------------- optimiser


def build_optimizer(model: nn.Module, objective: nn.Module, config: Config) -> torch.optim.AdamW:
    """Build AdamW; weight decay applies to the model's matrices only, not to biases, normalisation
    and losses. Pre-trained parts have their own learning rates.
    """
    factors = {".text.bert.": config.bert_lr_factor, ".image.backbone.": config.backbone_lr_factor}
    # by learning rate and weight decay
    groups: dict[tuple[float, float], list[nn.Parameter]] = {
        (config.lr, config.weight_decay): [],
        (config.lr, 0.0): [],
    }
    for name, p in model.named_parameters():
        lr = config.lr
        for part, factor in factors.items():
            if part in f".{name}":  # of any view of the model
                lr *= factor
        decay = config.weight_decay if p.ndim > 1 else 0.0
        groups.setdefault((lr, decay), []).append(p)
    groups[config.lr, 0.0] += [p for p in objective.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [{"params": own, "lr": lr, "weight_decay": decay} for (lr, decay), own in groups.items()]
    )
