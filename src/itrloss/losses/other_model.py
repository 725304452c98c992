"""Checks of another model's scores or embeddings: those of a guide, and of a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checks import Names, as_similarity, from_numpy, require_finite
from ..engine.inputs import even_chunks
from ..engine.relation import AT_ONCE, Relation, are_sets
from ..engine.vectors import compute_dtype, host_may_read
from ..similarity import Similarity
from .base import SimilarityLoss


def as_tensors(model: Any) -> Any:
    """Return another model's input as tensors without a gradient, several as a list."""
    if isinstance(model, (tuple, list)):
        return [as_tensors(x) for x in model]
    x = from_numpy(model)
    return x.detach() if isinstance(x, Tensor) else x


def check_embeddings_of(name: str, model: object, has_negatives: bool) -> None:
    """Raise an error unless another model has embeddings of all candidates."""
    expected = "(images, texts, negatives)" if has_negatives else "(images, texts)"
    if not isinstance(model, Sequence) or not all(isinstance(x, Tensor) for x in model):
        expected = f"expected a Similarity or embeddings {expected}"
        hint = as_similarity(name, model)
        raise TypeError(f"{name}: {expected}, got {type(model).__name__}{hint}")
    if len(model) != 2 + has_negatives:
        raise ValueError(f"{name}: expected embeddings {expected}, got {len(model)} tensors")


def check_rows(names: Names, images: Tensor, texts: Tensor, sim: Similarity) -> None:
    """Raise an error unless another model has embeddings of as many images and texts as there are
    in this process.
    """
    sizes = {"images": sim.shape[0], "texts": sim.T.shape[0]}
    for name, x, side in zip(names[:2], (images, texts), sizes, strict=True):
        if x.shape[:1] != (sizes[side],):
            expected = f"as many rows as there are {side}, {sizes[side]}"
            raise ValueError(f"{name}: expected {expected}, got shape {tuple(x.shape)}")
        if x.device != sim.device:
            raise ValueError(f"{name}: expected device {sim.device}, got {x.device}")


def check_finite(name: str, model: Similarity) -> None:
    """Raise a ValueError for scores or embeddings that are nan or infinite. Synchronises."""
    if model.embeddings is None:
        assert model.given_scores is not None
        require_finite(name, model.given_scores)
        return
    for k, x in enumerate(model.embeddings):
        require_finite(f"{name}[{k}]", x)


def zero_or_nan(model: Similarity | Sequence[Tensor]) -> Tensor:
    """Return (): 0, or nan if an embedding of a model is nan or infinite, or a score nan."""
    if isinstance(model, Similarity) and model.embeddings is None:
        assert model.given_scores is not None
        is_nan = model.given_scores.detach().isnan().any()
        return torch.zeros((), device=model.device).masked_fill(is_nan, torch.nan)
    tensors = model.embeddings if isinstance(model, Similarity) else model
    assert tensors is not None
    totals = [x.detach().sum(dtype=compute_dtype(x)) for x in tensors]
    return torch.stack(totals).sum() * 0


def described_model(
    name: str, other: Similarity, images: Tensor, texts: Tensor | None, loss: SimilarityLoss
) -> str:
    """Return what another model's similarity is, in words.

    Raise an error unless that of a shared batch is of this process's images and texts.
    """
    if loss.check_finite:
        check_finite(name, other)
    if not loss.sharded:
        return name
    if other.share is None:
        expected = "expected a Similarity.sharded in a job of several processes"
        raise TypeError(f"{name}: {expected}, got {type(other).__name__}")
    sizes = len(images), 0 if texts is None else len(texts)
    got = other.shape[0], other.T.shape[0]
    if got != sizes:
        raise ValueError(f"{name}: expected {sizes} images and texts of this process, got {got}")
    return f"{name} of {other.totals} images and texts"


def has_relation(sim: Similarity) -> bool:
    """Return whether sets of labels, groups or a matrix say who matches, and not ids alone."""
    return not sim.pairs.others_are_negatives or are_sets(sim.pairs.ids)


def has_ids_of(sim: Similarity, other: Similarity) -> bool:
    """Return whether two similarities have the same ids; on an accelerator, whether both have
    any.
    """
    ids = zip(sim.ids, other.ids, strict=True)
    if sim.share is not None:  # the ids of all processes, so that all raise the error
        ids = zip(sim.all_ids, other.all_ids, strict=True)
    for own, others in ids:
        if own is None or others is None:
            if own is not others:
                return False
        elif host_may_read(own) and host_may_read(others) and not torch.equal(own, others):
            return False
    return True


def has_matches_of(sim: Similarity, other: Similarity) -> bool:
    """Return whether the same pairs match in two similarities, with the same weights."""
    own = sim.pairs
    others = other.pairs
    if not (own.listable and others.listable):
        return True
    places = torch.stack(own.listed)
    weights = own.listed_weights().float()
    if not torch.equal(places, torch.stack(others.listed)):
        return False
    return torch.equal(weights, others.listed_weights().float())


def has_candidates_of(sim: Similarity, other: Similarity) -> bool:
    """Return whether the same pairs are positives or negatives in two similarities.

    Of a shared batch, those of this process's images. On an accelerator they are not compared.
    """
    n, m = sim.pairs.shape
    for rows in even_chunks(n, max(1, AT_ONCE // max(1, m))):
        own, others = [candidates_of(x.pairs, rows) for x in (sim, other)]
        if not host_may_read(own) or not host_may_read(others):
            return True
        if not torch.equal(own, others):
            return False
    return True


def candidates_of(pairs: Relation, rows: slice) -> Tensor:
    """Return the (r, M) bool mask of the pairs of some rows that are positives or negatives."""
    excluded = pairs.excluded("all", rows)
    if excluded is None:
        shape = rows.stop - rows.start, pairs.shape[1]
        return torch.ones(shape, dtype=torch.bool, device=pairs.device)
    return ~excluded
