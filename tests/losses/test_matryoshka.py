"""Matryoshka around the losses: the weighted sum over slices of the embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import embeddings, make_ids
from support.processes import run
from torch import nn

import itrloss

UNSORTED = (6, 2, 3)
WEIGHTS = (1.0, 0.5, 2.0)


def infonce(v, w, temperature=0.05):
    """InfoNCE in plain PyTorch."""
    scores = F.normalize(v, dim=1) @ F.normalize(w, dim=1).T / temperature
    own = torch.arange(len(v))
    return F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)


def of_slices(loss, v, w, *ids):
    """The weighted sum of a loss of each slice."""
    values = [loss(v[:, :d], w[:, :d], *ids) for d in UNSORTED]
    return sum(weight * value for weight, value in zip(WEIGHTS, values, strict=True))


def with_gradients(value, *leaves):
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_infonce_equals_plain_pytorch(engine, small_tiles, poisoned):
    v, w = (x.requires_grad_() for x in embeddings(9, 9))
    found = itrloss.Matryoshka(itrloss.InfoNCELoss(0.05, engine=engine), UNSORTED, WEIGHTS)(v, w)
    wanted = of_slices(infonce, v, w)
    torch.testing.assert_close(with_gradients(found, v, w), with_gradients(wanted, v, w))


@pytest.mark.parametrize(
    "loss",
    [
        itrloss.DiversityContrastiveLoss(),
        itrloss.TripletLoss(mining="all"),
        itrloss.SupConLoss(inside=True),
        itrloss.SigmoidLoss(3.0, -1.0),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_parts_are_the_losses_of_slices(loss):
    v, w = embeddings(9, 11)
    ids = make_ids("random", 9, 11)
    found = itrloss.Matryoshka(loss, UNSORTED, WEIGHTS)(v, w, *ids)
    torch.testing.assert_close(found, of_slices(loss, v, w, *ids))


def test_what_else_a_loss_takes_is_passed_on():
    v, w = embeddings(5, 5)
    teacher = torch.rand(5, 5, dtype=torch.float64)
    loss = itrloss.DistillationLoss()
    found = itrloss.Matryoshka(loss, (2, 6))(v, w, teacher=teacher)
    torch.testing.assert_close(found, loss(v[:, :2], w[:, :2], teacher) + loss(v, w, teacher))


def test_negatives_are_cut():
    (v, w), z = embeddings(5, 5), embeddings(3, 3)[0]
    loss = itrloss.InfoNCELoss()
    found = itrloss.Matryoshka(loss, (2, 6))(v, w, negatives=z)
    short = loss(v[:, :2], w[:, :2], negatives=z[:, :2])
    torch.testing.assert_close(found, short + loss(v, w, negatives=z))


@pytest.mark.parametrize("named", [False, True])
def test_keys_and_memories_are_cut(named):
    v, w, image_keys, text_keys = embeddings(5, 5) + embeddings(5, 5, seed=1)
    loss = itrloss.MemoryDiversityContrastiveLoss()
    memories = {d: itrloss.CoupledMemory(4, d, dtype=v.dtype) for d in (2, 6)}
    for d, memory in memories.items():
        memory.enqueue(w[:3, :d], v[:3, :d])
    if named:
        keys = {"image_keys": image_keys, "text_keys": text_keys, "memory": memories[6]}
        found = itrloss.Matryoshka(loss, (2, 6))(v, w, **keys)
    else:
        found = itrloss.Matryoshka(loss, (2, 6))(v, w, image_keys, text_keys, memories[6])
    wanted = 0.0
    for d, memory in memories.items():
        wanted += loss(v[:, :d], w[:, :d], image_keys[:, :d], text_keys[:, :d], memory)
    torch.testing.assert_close(found, wanted)


def test_of_a_loss_with_other_names_the_first_two_arguments_are_cut():
    class Own(nn.Module):
        def forward(self, a, b, *more):
            return (a * b).sum() + sum(more)

    v, w = embeddings(5, 5)
    found = itrloss.Matryoshka(Own(), (2, 6))(v, w, 1.0, 2.0)
    torch.testing.assert_close(found, (v * w)[:, :2].sum() + (v * w).sum() + 6)


def test_values_of_anchors_are_a_tuple_for_each_length():
    v, w = embeddings(4, 4)
    loss = itrloss.InfoNCELoss(reduction="none")
    found = itrloss.Matryoshka(loss, (6, 2), (1.0, 0.5))(v, w)
    rows, cols = loss(v[:, :2], w[:, :2])
    torch.testing.assert_close(found, (0.5 * rows, 0.5 * cols, *loss(v, w)))


def test_a_prefix_may_be_a_zero_vector():
    """Of a vector that is not zero; such a prefix scores 0 and gets no gradient."""
    v, w = embeddings(4, 4)
    v[1, :2] = 0
    v.requires_grad_()
    (grad,) = torch.autograd.grad(itrloss.Matryoshka(itrloss.InfoNCELoss(), (2,))(v, w), v)
    assert grad.isfinite().all()
    assert (grad[1] == 0).all()
    assert (grad[0] != 0).any()


@pytest.mark.parametrize(
    ("dims", "weights", "error"),
    [
        ((2, 7), None, "images: expected embeddings of at least 7 dimensions"),
        ((2, 2), None, "dims: expected numbers that differ"),
        ((), None, "dims: expected numbers that differ"),
        ((0, 2), None, "dims: expected"),
        ((2, 2.5), None, "dims: expected"),
        ((2, 3), (1.0,), "weights: expected 2"),
        ((2, 3), (1.0, "one"), "weights: expected"),
    ],
)
def test_wrong_dims_and_weights(dims, weights, error):
    with pytest.raises((TypeError, ValueError), match=error):
        itrloss.Matryoshka(itrloss.InfoNCELoss(), dims, weights)(*embeddings(5, 5))
    criterion = itrloss.Matryoshka(itrloss.InfoNCELoss(), (2, 3))
    criterion.dims = dims
    criterion.weights = weights or [1.0] * len(dims)
    with pytest.raises((TypeError, ValueError), match=error):
        criterion(*embeddings(5, 5))


def test_wrong_losses_and_inputs():
    v, w = embeddings(5, 5)
    for loss in (itrloss.InfoNCELoss, None):
        with pytest.raises(TypeError, match="loss: expected a module"):
            itrloss.Matryoshka(loss, (2, 3))  # type: ignore[arg-type]
    criterion = itrloss.Matryoshka(itrloss.InfoNCELoss(check_finite=True), (2, 3))
    with pytest.raises(ValueError, match="images"):
        criterion(v * torch.nan, w)
    with pytest.raises(ValueError, match="texts: expected embeddings of at least 3 dimensions"):
        criterion(v, w[:, :2])
    with pytest.raises(ValueError, match="images: expected embeddings"):
        criterion(itrloss.Similarity(v, w), w)


def test_sentence_transformers_agree():
    """Their loss has one direction, and takes a model."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import (
        MatryoshkaLoss,
        MultipleNegativesRankingLoss,
    )

    class Model(nn.Module):
        def forward(self, features):
            return {"sentence_embedding": features["x"]}

        def get_embedding_dimension(self):
            return 6

    v, w = (x.requires_grad_() for x in embeddings(9, 9))
    model: Any = Model()
    loss = MultipleNegativesRankingLoss(model)
    theirs = MatryoshkaLoss(model, loss, list(UNSORTED), list(WEIGHTS))
    ours = itrloss.InfoNCELoss(1 / 20, directions="image-text")
    found = itrloss.Matryoshka(ours, UNSORTED, WEIGHTS)(v, w)
    wanted = theirs([{"x": v}, {"x": w}], torch.zeros(9))
    torch.testing.assert_close(with_gradients(found, v, w), with_gradients(wanted, v, w))


def disagreeing(rank: int) -> list[str]:
    """The errors of all processes where one has other weights, or texts that are too short."""
    v, w = embeddings(7, 7)
    errors = []
    for weights, d in (((1.0, 1.0 + rank), 6), ((1.0, 1.0), 6 - rank)):
        with pytest.raises(ValueError) as caught:
            itrloss.Matryoshka(itrloss.InfoNCELoss(gather=True), (2, 6), weights)(v, w[:, :d])
        errors.append(str(caught.value))
    return errors


@pytest.mark.slow
def test_all_processes_raise_an_error_if_one_does(tmp_path: Path):
    for weights, dims in run(disagreeing, tmp_path):
        assert "weights=[1.0, 2.0]" in weights
        assert "texts: expected embeddings of at least 6 dimensions" in dims


def gathered(rank: int | None) -> list[torch.Tensor]:
    """The loss of all processes' batches and this process's gradients; of one process with them for
    rank None.
    """
    own = {None: slice(7), 0: slice(3), 1: slice(3, 7)}[rank]
    v, w = (x[own].clone().requires_grad_() for x in embeddings(7, 7))
    loss = itrloss.InfoNCELoss(engine="tiled", gather=rank is not None)
    return with_gradients(itrloss.Matryoshka(loss, UNSORTED, WEIGHTS)(v, w), v, w)


def test_over_processes(tmp_path: Path):
    """Gradients of embeddings are averaged over the processes, as DDP does."""
    first, second = run(gathered, tmp_path)
    value, *gradients = gathered(None)
    torch.testing.assert_close(first[0], value)
    torch.testing.assert_close(second[0], value)
    means = [torch.cat(parts) / 2 for parts in zip(first[1:], second[1:], strict=True)]
    torch.testing.assert_close(means, gradients, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
def test_one_pair_of_one_dimension_is_finite():
    v, w = (x.requires_grad_() for x in embeddings(1, 1))
    value = itrloss.Matryoshka(itrloss.InfoNCELoss(), (1,))(v, w)
    found = with_gradients(value, v, w)
    assert all(x.isfinite().all() for x in found)


def test_weights_may_be_a_tensor():
    v, w = embeddings(4, 4)
    found = itrloss.Matryoshka(itrloss.InfoNCELoss(), (3, 6), torch.tensor([1.0, 2.0]))(v, w)
    assert torch.equal(found, itrloss.Matryoshka(itrloss.InfoNCELoss(), (3, 6), (1, 2))(v, w))
