"""Checkpoints of modules, re-rankers and the example trainer, and what is computed after they were
loaded.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from promised_inputs import Batch, D, choices, numbers
from promised_values import BANKS, MODULES, RERANKERS, STEPS, built, record
from torch import Tensor

Saved = dict[str, tuple[Any, Any]]  # name -> its state, and what it computed next
TRAINER = "examples.retrieval"


def module(name: str, b: Batch) -> Any:
    """Return a module, with learnable parameters where it can have them, and a function that takes
    a step of it.
    """
    cls = MODULES[name]
    axes = choices(name, cls) | ({} if name in STEPS else choices(name, cls.forward))
    given = {key: x[0](b) if callable(x[0]) else x[0] for key, x in axes.items()}
    return built(cls, b, **given | ({"learnable": True} if "learnable" in given else {}))


def reranker(name: str, b: Batch, choice: int) -> Any:
    """Return a re-ranker with the first (0) or last (-1) values of its options."""
    cls = RERANKERS[name]
    values = {key: x[choice] for key, x in choices(name, cls).items()}
    return cls(**{key: x(b) if callable(x) else x for key, x in values.items()})


def resumed(name: str, state: Any, b: Batch) -> Any:
    """Return what a new module or re-ranker computes after it loaded a state."""
    if name == TRAINER:
        return evaluated(state)
    if name in RERANKERS:
        return tuple(reranker(name, b, 0).load_state_dict(state).rerank(b.similarity().detach()))
    own, step = module(name, b)
    own.load_state_dict(state)
    return step(3), list(own.buffers())


def outcome(name: str, state: Any) -> Any:
    return record(
        f"{name} {'repeated' if name == 'CODERObjective' else 'captions'}",
        partial(resumed, name, state),
    )


def states() -> dict[str, Any]:
    """Return the states of all that have one, after some steps, with options and parameters other
    than the default.
    """
    found: dict[str, Any] = {}
    for name in MODULES:
        b = Batch("repeated" if name == "CODERObjective" else "captions")
        own, step = module(name, b)
        for p in own.parameters():
            p.data += 0.01
        for i in range(3 if list(own.buffers()) else 0):
            step(i)
        found |= {name: own.state_dict()} if own.state_dict() else {}
    for name, cls in RERANKERS.items():
        own = reranker(name, Batch("captions"), -1)
        found[name] = (own.fit(*BANKS) if cls.takes_bank else own).state_dict()
    return found | {TRAINER: checkpoint()}


def checkpoint() -> dict[str, Any]:
    """Return what evaluation reads of a checkpoint of the trainer; its optimiser is for resuming,
    with one version.
    """
    from examples.retrieval.config import Config
    from examples.retrieval.train import Trainer

    with TemporaryDirectory() as folder:
        for split in ("train", "dev"):
            np.save(Path(folder, f"{split}_ims.npy"), numbers(71, 12, 4, D).numpy())
            captions = (f"word{i % 7} word{i % 5} word{i % 11}\n" for i in range(60))
            Path(folder, f"{split}_caps.txt").write_text("".join(captions))
        config = Config(
            data=folder,
            out=f"{folder}/run",
            dim=D,
            word_dim=4,
            min_count=1,
            batch_size=6,
            epochs=1,
            tensorboard=False,
            progress=False,
        )
        Trainer(config).run()
        state = torch.load(f"{folder}/run/last.pt", weights_only=True)
    state["config"] |= {"data": "data", "out": "run"}
    return {name: state[name] for name in ("config", "vocabulary", "sizes", "model")}


def evaluated(state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return embeddings of images and of texts by the model of a checkpoint, in float64."""
    from examples.retrieval.preparation import load_model

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with TemporaryDirectory() as folder:
            torch.save(state, f"{folder}/last.pt")
            model, vocabulary, _ = load_model(f"{folder}/last.pt")
        words, lengths = torch.arange(12).view(4, 3) % len(vocabulary), torch.tensor([3, 1, 2, 3])
        with torch.no_grad():
            return model.embed_images(numbers(72, 5, 4, D)), model.embed_texts(words, lengths)
    finally:
        torch.set_default_dtype(default)
