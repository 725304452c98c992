"""Another model's similarities of the same images and texts: those of a guide, and of a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..anchors import AnchorSide
from ..checks import Names, check_embeddings, check_matrix, from_numpy
from ..checks.warnings import warn_of_units, warn_of_vectors
from ..distributed import padded
from ..distributed.collectives import gather
from ..distributed.consensus import described
from ..distributed.parts import spread_columns
from ..engine.matrix import MEMORY_BUDGET, Matrix, choose_engine
from ..engine.vectors import Embeddings, compute_dtype
from ..similarity import Engine, Similarity
from .base import SimilarityLoss

OtherModel = Tensor | Sequence[Tensor]  # (N, M) scores, or embeddings (N, D) and (M, D)


def as_tensors(model: Any) -> Any:
    """Return another model's input as tensors without a gradient, several as a list."""
    if isinstance(model, (tuple, list)):
        return [as_tensors(x) for x in model]
    x = from_numpy(model)
    return x.detach() if isinstance(x, Tensor) else x


def check_kind(name: str, model: object, has_negatives: bool = False) -> None:
    """Raise an error unless another model has scores, or embeddings of all candidates."""
    if isinstance(model, Tensor):
        return
    expected = "(images, texts, negatives)" if has_negatives else "(images, texts)"
    if not isinstance(model, Sequence) or not all(isinstance(x, Tensor) for x in model):
        expected = f"expected (N, M) scores or embeddings {expected}"
        raise TypeError(f"{name}: {expected}, got {type(model).__name__}")
    if len(model) != 2 + has_negatives:
        raise ValueError(f"{name}: expected embeddings {expected}, got {len(model)} tensors")


def check_sizes(name: str, model: OtherModel, sim: Similarity, loss: SimilarityLoss) -> None:
    """Raise an error unless another model has scores or embeddings of this process's images and
    texts.
    """
    finite = loss.check_finite
    if isinstance(model, Tensor):
        check_matrix(name, model, "(N, M)", finite, empty=loss.sharded)
        if model.shape != sim.shape:
            raise ValueError(f"{name}: expected shape {sim.shape}, got {tuple(model.shape)}")
        if model.device != sim.device:
            raise ValueError(f"{name}: expected device {sim.device}, got {model.device}")
        return
    sizes = {"images": sim.shape[0], "texts": sim.T.shape[0]}
    names = Names(f"{name}[0]", f"{name}[1]", "image_ids", "text_ids")
    for place, x, side in zip(names[:2], model[:2], sizes, strict=True):
        if x.shape[:1] != (sizes[side],):
            expected = f"as many rows as there are {side}, {sizes[side]}"
            raise ValueError(f"{place}: expected {expected}, got shape {tuple(x.shape)}")
        if x.device != sim.device:
            raise ValueError(f"{place}: expected device {sim.device}, got {x.device}")
    check_embeddings(model[0], model[1], finite, names, empty=loss.sharded)


def similarity_of(
    name: str,
    model: OtherModel,
    sim: Similarity,
    loss: SimilarityLoss,
    in_cosines: bool,  # whether the loss takes the scores for cosines
) -> Similarity:
    """Return another model's similarities of the images and texts of ``sim``, with its relation.

    Wrong input is an error, of a shared batch in all processes. There is a warning for what is
    probably not what was meant.
    """

    def check() -> str:
        """Check the input; return what has to be the same in all processes."""
        check_sizes(name, model, sim, loss)
        parts = [model] if isinstance(model, Tensor) else model
        return f"{name} {[described(x) for x in parts]}"

    loss.agree(check)
    if isinstance(model, Tensor):
        matrix = matrix_of_scores(model, sim, loss.engine)
    else:
        matrix = matrix_of_embeddings(model, sim, loss.engine)
    other = Similarity.of_anchors(AnchorSide(matrix, sim.side, sim.share))
    if loss.is_to_look(other):
        with torch.no_grad():  # see `SimilarityLoss._look`
            warn_of_vectors(other)
            if in_cosines:
                warn_of_units(type(loss).__name__, other, f"{name}: scores")
    return other


def matrix_of_scores(scores: Tensor, sim: Similarity, engine: Engine) -> Matrix:
    """Return the matrix of other scores (N, M) of a similarity's images and texts."""
    if sim.side:
        scores = scores.T
    if sim.share is not None:
        scores = spread_columns(scores, sim.share.processes, 0.0)
    n, m = sim.pairs.shape
    chosen = choose_engine(engine, n * m, 8 * n * m, scores)  # they are held anyway
    return Matrix.of_scores(Embeddings(scores, False), sim.pairs, chosen)


def matrix_of_embeddings(model: Sequence[Tensor], sim: Similarity, engine: Engine) -> Matrix:
    """Return the matrix of another model's embeddings of a similarity's rows and columns."""
    rows, cols = model[1::-1] if sim.side else model[:2]
    if sim.share is not None:
        n, m = sim.share.processes.padded
        rows = padded(rows, n)
        cols = gather(padded(cols, m), sim.share.processes.group)
    budget = 0 if engine == "tiled" else MEMORY_BUDGET
    n, m = sim.pairs.shape
    return Matrix.of_embeddings(
        Embeddings(rows, True),
        Embeddings(cols, True),
        sim.pairs,
        choose_engine(engine, n * m, budget, rows),
        budget,
    )


def zero_or_nan(model: OtherModel) -> Tensor:
    """Return (): 0, or nan if an embedding of a model is nan or infinite, or a score nan."""
    if isinstance(model, Tensor):
        is_nan = model.isnan().any()
        return torch.zeros((), device=model.device).masked_fill(is_nan, torch.nan)
    totals = [x.sum(dtype=compute_dtype(x)) for x in model]
    return torch.stack(totals).sum() * 0
