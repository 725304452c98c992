"""Data, model and optimiser, for a new run or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from itrloss.distributed import world_size

from .backbones import WordPieces
from .concepts import find_concepts, normalized_graph
from .config import Config, make_config
from .data import (
    Split,
    Vocabulary,
    begin_with,
    feature_statistics,
    load_split,
    whole_statistics,
    word_vectors,
)
from .encoders import TextEncoder
from .models import CODER, VSE, build_model, load_pretrained, views
from .pictures import Images


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


def is_first() -> bool:
    """Whether this process is the only one, or the one that writes files."""
    return world_size() == 1 or dist.get_rank() == 0


def check_fit(config: Config, root: Path, train: Split, batch_size: int) -> None:
    """Check data and settings for errors that would otherwise occur after an epoch, or go
    unnoticed.
    """
    needs = "whole" in config.views or config.enhancement == "cge"
    for name in ("train", "dev", "test") if config.final_test else ("train", "dev"):
        split = load_split(root, name, config.image_size)
        if needs and split.wholes is None:
            what = f"views = {config.views!r}" if "whole" in config.views else "enhancement = 'cge'"
            raise ValueError(
                f"{what}: needs {root}/{name}_global.npy, the features of whole pictures"
            )
        for kind, own, expected in (
            ("ims", split.features, train.features),
            ("global", split.wholes, train.wholes),
        ):
            if (
                isinstance(own, np.ndarray)
                and isinstance(expected, np.ndarray)
                and own.shape[-1] != expected.shape[-1]
            ):
                dims = (
                    f"{own.shape[-1]} features, must be {expected.shape[-1]} as in train_{kind}.npy"
                )
                raise ValueError(f"{root}/{name}_{kind}.npy: {dims}")
    if isinstance(train.features, Images) != bool(config.backbone):
        raw = isinstance(train.features, Images)
        expected = (
            "the name of one, resnet50 for example, for the raw images"
            if raw
            else "empty for the features"
        )
        raise ValueError(f"backbone = {config.backbone!r}: must be {expected} of {root}")
    if config.micro_batch and (batch_size - 1) % config.micro_batch == 0:
        last = (
            f"must leave more than one of the {batch_size} samples for the last chunk's batch "
            "normalisation"
        )
        raise ValueError(f"micro_batch = {config.micro_batch}: {last}")


Sizes = tuple[int, int]  # dimensions of region features and of global features; 0 if there are none
Words = Vocabulary | WordPieces


def sizes_of(train: Split) -> Sizes:
    """Dimensions of region features and of global features; 0 if there are none."""
    images, wholes = train.features, train.wholes
    return 0 if isinstance(images, Images) else images.shape[
        2
    ], 0 if wholes is None else wholes.shape[1]


def new_model(config: Config, train: Split, vocabulary: Words) -> VSE:
    """Build the untrained model, with the statistics that it needs of the training data."""
    model = _built(config, sizes_of(train), vocabulary)
    load_pretrained(model, config)
    statistics = (
        None if isinstance(train.features, Images) else feature_statistics(train.features),
        None if train.wholes is None else whole_statistics(train.wholes),
    )
    vectors = word_vectors(config.word_vectors) if config.word_vectors else {}
    for view in views(model):
        image = view.image
        buffers = (image.mean, image.std), (image.whole_mean, image.whole_std)
        for own, measured in zip(buffers, statistics, strict=True):
            for buffer, value in zip(own, measured or own, strict=True):
                buffer.copy_(value)
        if isinstance(vocabulary, Vocabulary) and isinstance(view.text, TextEncoder):
            view.text.idf.copy_(vocabulary.idf(train.captions))
            begin_with(view.text.embedding.weight, vocabulary.words, vectors)
        if isinstance(view, CODER):
            _know_concepts(view, config, train, vectors)
    return model


def _know_concepts(
    model: CODER, config: Config, train: Split, vectors: dict[str, np.ndarray]
) -> None:
    concepts = find_concepts(train.captions, config.concepts, config.tagger)
    if is_first():
        out = Path(config.out)
        out.mkdir(parents=True, exist_ok=True)
        concepts.save(out / "concepts.json")
    model.branch.graph.copy_(normalized_graph(concepts.graph(config.concept_threshold)))
    begin_with(model.branch.vectors, concepts.words, vectors)


def _built(config: Config, sizes: Sizes, vocabulary: Words) -> VSE:
    words = vocabulary if isinstance(vocabulary, WordPieces) else len(vocabulary)
    return build_model(config, sizes[0], words, sizes[1])


def build_optimizer(model: nn.Module, objective: nn.Module, config: Config) -> torch.optim.AdamW:
    """Build AdamW; weight decay applies to the model's matrices only, not to biases, normalisation
    and losses.

    Pre-trained parts have their own learning rates: each parameter group has a ``factor`` of the
    common rate.
    """
    factors = {".text.bert.": config.bert_lr_factor, ".image.backbone.": config.backbone_lr_factor}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {
        (1.0, config.weight_decay): [],
        (1.0, 0.0): [],
    }
    for name, p in model.named_parameters():
        # of any view of the model
        factor = next((f for part, f in factors.items() if part in f".{name}"), 1.0)
        if p.requires_grad:
            groups.setdefault((factor, config.weight_decay if p.ndim > 1 else 0.0), []).append(p)
    groups[1.0, 0.0] += [p for p in objective.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": own, "weight_decay": decay, "factor": factor}
            for (factor, decay), own in groups.items()
        ],
        lr=config.lr,
    )


def load_model(path: str | Path) -> tuple[VSE, Words, Config]:
    """Rebuild the model of a checkpoint (best.pt or last.pt), in evaluation mode, on the CPU."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    config, stored = make_config(state["config"]), state["vocabulary"]
    vocabulary = WordPieces(**stored) if config.bert else Vocabulary(stored)
    model = _built(config, state["sizes"], vocabulary)
    model.load_state_dict(state["model"])
    return model.eval(), vocabulary, config
