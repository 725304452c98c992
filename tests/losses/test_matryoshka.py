"""Matryoshka around the losses: the weighted sum over slices of the embeddings."""

from __future__ import annotations

import pytest
import torch
from support.cases import embeddings, make_ids
from torch import nn

import itrloss

UNSORTED = (6, 2, 3)
WEIGHTS = (1.0, 0.5, 2.0)


def of_slices(loss, v, w, *ids):
    """The weighted sum of a loss of each slice."""
    total = 0.0
    for d, weight in zip(UNSORTED, WEIGHTS, strict=True):
        value = loss(v[:, :d], w[:, :d], *ids)
        total = total + weight * value
    return total


@pytest.mark.parametrize(
    "loss",
    [
        itrloss.DiversityContrastiveLoss(),
        itrloss.SigmoidLoss(3.0, -1.0),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_parts_are_the_losses_of_slices(loss):
    v, w = embeddings(9, 11)
    ids = make_ids("random", 9, 11)
    criterion = itrloss.Matryoshka(loss, UNSORTED, WEIGHTS)
    wanted = of_slices(loss, v, w, *ids)
    torch.testing.assert_close(criterion(v, w, *ids), wanted)


def test_what_else_a_loss_takes_is_passed_on():
    v, w = embeddings(5, 5)
    teacher = torch.rand(5, 5, dtype=torch.float64)
    loss = itrloss.DistillationLoss()
    criterion = itrloss.Matryoshka(loss, (2, 6))
    found = criterion(v, w, teacher=teacher)
    short = loss(v[:, :2], w[:, :2], teacher)
    whole = loss(v, w, teacher)
    torch.testing.assert_close(found, short + whole)


def test_negatives_are_cut():
    v, w = embeddings(5, 5)
    negatives, _ = embeddings(3, 3)
    loss = itrloss.InfoNCELoss()
    criterion = itrloss.Matryoshka(loss, (2, 6))
    found = criterion(v, w, negatives=negatives)
    short = loss(v[:, :2], w[:, :2], negatives=negatives[:, :2])
    whole = loss(v, w, negatives=negatives)
    torch.testing.assert_close(found, short + whole)


@pytest.mark.parametrize("named", [False, True])
def test_keys_and_memories_are_cut(named):
    v, w = embeddings(5, 5)
    image_keys, text_keys = embeddings(5, 5, seed=1)
    loss = itrloss.MemoryDiversityContrastiveLoss()

    def memory_of(d):
        """A memory of the first dimensions of three pairs."""
        memory = itrloss.CoupledMemory(4, d, dtype=v.dtype)
        memory.enqueue(w[:3, :d], v[:3, :d])
        return memory

    criterion = itrloss.Matryoshka(loss, (2, 6))
    if named:
        keys = {"image_keys": image_keys, "text_keys": text_keys}
        found = criterion(v, w, **keys, memory=memory_of(6))
    else:
        found = criterion(v, w, image_keys, text_keys, memory_of(6))
    short = loss(v[:, :2], w[:, :2], image_keys[:, :2], text_keys[:, :2], memory_of(2))
    whole = loss(v, w, image_keys, text_keys, memory_of(6))
    torch.testing.assert_close(found, short + whole)


def test_of_a_loss_with_other_names_the_first_two_arguments_are_cut():
    class Own(nn.Module):
        def forward(self, a, b, *more):
            return (a * b).sum() + sum(more)

    v, w = embeddings(5, 5)
    criterion = itrloss.Matryoshka(Own(), (2, 6))
    found = criterion(v, w, 1.0, 2.0)
    short = (v * w)[:, :2].sum() + 3
    whole = (v * w).sum() + 3
    torch.testing.assert_close(found, short + whole)


def test_values_of_anchors_are_a_tuple_for_each_length():
    v, w = embeddings(4, 4)
    loss = itrloss.InfoNCELoss(reduction="none")
    criterion = itrloss.Matryoshka(loss, (6, 2), (1.0, 0.5))
    found = criterion(v, w)
    rows, cols = loss(v, w)
    short_rows, short_cols = loss(v[:, :2], w[:, :2])
    torch.testing.assert_close(found, (0.5 * short_rows, 0.5 * short_cols, rows, cols))
    loss.directions = "image-text"
    torch.testing.assert_close(criterion(v, w), (0.5 * short_rows, rows))


def test_log_variances_are_cut():
    given = *embeddings(4, 4), *embeddings(4, 4, seed=1)
    loss = itrloss.PCMEPlusPlusLoss()
    short = loss(*(x[:, :2] for x in given))
    found = itrloss.Matryoshka(loss, (2, 6))(*given)
    torch.testing.assert_close(found, short + loss(*given))


def test_a_prefix_may_be_a_zero_vector():
    """Of a vector that is not zero; such a prefix scores 0 and gets no gradient."""
    v, w = embeddings(4, 4)
    v[1, :2] = 0
    v.requires_grad_()
    criterion = itrloss.Matryoshka(itrloss.InfoNCELoss(), (2,))
    (grad,) = torch.autograd.grad(criterion(v, w), v)
    assert grad.isfinite().all()
    assert (grad[1] == 0).all()
    assert (grad[0] != 0).any()


def test_weights_may_be_a_tensor():
    v, w = embeddings(4, 4)
    loss = itrloss.InfoNCELoss()
    of_tensor = itrloss.Matryoshka(loss, (3, 6), torch.tensor([1.0, 2.0]))
    of_numbers = itrloss.Matryoshka(loss, (3, 6), (1, 2))
    assert torch.equal(of_tensor(v, w), of_numbers(v, w))


def test_a_loss_that_returns_more_than_tensors_is_refused():
    class WithFigures(nn.Module):
        def forward(self, images, texts):
            return (images * texts).sum(), {"figure": 1.0}

    message = r"^loss: expected it to return a tensor or a tuple of tensors, got dict in a tuple"
    with pytest.raises(TypeError, match=message):
        itrloss.Matryoshka(WithFigures(), (2, 6))(*embeddings(4, 4))


@pytest.mark.parametrize("side", [("images", "texts"), ("queries", "documents")])
def test_embeddings_go_by_the_names_that_the_loss_has(side):
    means = embeddings(4, 4)
    loss = itrloss.PCMEPlusPlusLoss()
    criterion = itrloss.Matryoshka(loss, (2, 6))
    named = {}
    for name, x in zip(side, means, strict=True):
        named |= {f"{name}_mean": x, f"{name}_log_variance": x - 3}
    places = [*means, *(x - 3 for x in means)]
    assert torch.equal(criterion(**named), criterion(*places))


def test_sets_go_by_the_name_that_the_loss_has():
    images, texts = embeddings(4, 4)
    sets = images[:, None].repeat(1, 2, 1)
    criterion = itrloss.Matryoshka(itrloss.VarianceAwareLoss(), (2, 6))
    assert torch.equal(criterion(image_sets=sets, texts=texts), criterion(sets, texts))
