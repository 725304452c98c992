"""Checkpoints of modules and re-rankers, and what is computed after they were loaded."""

from __future__ import annotations

from functools import partial
from typing import Any

from promised_inputs import Batch, choices
from promised_values import BANKS, MODULES, RERANKERS, STEPS, built, record

Saved = dict[str, tuple[Any, Any]]  # name -> its state, and what it computed next
FITTED = {name: cls for name, cls in RERANKERS.items() if name != "TwoStageReranker"}  # whose option is a function


def module(name: str, b: Batch) -> Any:
    """Return a module, with learnable parameters where it can have them, and a function that takes a step of it."""
    cls = MODULES[name]
    axes = choices(name, cls) | ({} if name in STEPS else choices(name, cls.forward))
    given = {key: x[0](b) if callable(x[0]) else x[0] for key, x in axes.items()}
    return built(cls, b, **given | ({"learnable": True} if "learnable" in given else {}))


def resumed(name: str, state: Any, b: Batch) -> Any:
    """Return what a new module or re-ranker computes after it loaded a state."""
    if name in FITTED:
        return tuple(FITTED[name]().load_state_dict(state).rerank(b.similarity().detach()))
    own, step = module(name, b)
    own.load_state_dict(state)
    return step(3), list(own.buffers())


def outcome(name: str, state: Any) -> Any:
    return record(f"{name} {'repeated' if name == 'CODERObjective' else 'captions'}", partial(resumed, name, state))


def states() -> dict[str, Any]:
    """Return the states of all that have one, after some steps, with options and parameters other than the default."""
    found: dict[str, Any] = {}
    for name in MODULES:
        b = Batch("repeated" if name == "CODERObjective" else "captions")
        own, step = module(name, b)
        for p in own.parameters():
            p.data += 0.01
        for i in range(3 if list(own.buffers()) else 0):
            step(i)
        found |= {name: own.state_dict()} if own.state_dict() else {}
    for name, cls in FITTED.items():
        reranker = cls(**{key: x[-1] for key, x in choices(name, cls).items()})
        found[name] = (reranker.fit(*BANKS) if cls.takes_bank else reranker).state_dict()
    return found
