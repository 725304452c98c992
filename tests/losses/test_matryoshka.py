"""Matryoshka around the losses: the weighted sum over slices of the embeddings."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.cases import embeddings, make_ids
from torch import nn

import itrloss

V, W = embeddings(5, 5)
KEYS = embeddings(5, 5, seed=1)
FURTHER, _ = embeddings(3, 3)
TEACHER = torch.rand(5, 5, dtype=torch.float64)


def first(d, *given):
    """The first dimensions of what a loss takes."""
    return [x[..., :d] for x in given]


@pytest.mark.parametrize(
    "loss",
    [itrloss.DiversityContrastiveLoss(), itrloss.SigmoidLoss(3.0, -1.0)],
    ids=lambda loss: type(loss).__name__,
)
def test_parts_are_the_losses_of_slices(loss):
    v, w = embeddings(9, 11)
    ids = make_ids("random", 9, 11)
    wanted = 0.0
    for d, weight in ((6, 1.0), (2, 0.5), (3, 2.0)):
        wanted = wanted + weight * loss(*first(d, v, w), *ids)
    criterion = itrloss.Matryoshka(loss, (6, 2, 3), (1.0, 0.5, 2.0))
    torch.testing.assert_close(criterion(v, w, *ids), wanted)


def memory_of(d):
    """A memory of the first dimensions of three pairs."""
    memory = itrloss.CoupledMemory(4, d, dtype=V.dtype)
    memory.enqueue(*first(d, W[:3], V[:3]))
    return memory


def of_memory(loss, d):
    return loss(*first(d, V, W, *KEYS), memory_of(d))


def of_named_memory(loss, d):
    image_keys, text_keys = first(d, *KEYS)
    memory = memory_of(d)
    return loss(*first(d, V, W), image_keys=image_keys, text_keys=text_keys, memory=memory)


def of_named_normals(loss, d, sides=("images", "texts")):
    named = {}
    for side, x in zip(sides, first(d, V, W), strict=True):
        named |= {f"{side}_mean": x, f"{side}_log_variance": x - 3}
    return loss(**named)


def of_named_sets(loss, d):
    images, texts = first(d, V, W)
    return loss(image_sets=images[:, None].repeat(1, 2, 1), texts=texts)


# Losses, and what they take of so many dimensions.
CALLS = {
    "a teacher, whole": (
        itrloss.DistillationLoss(),
        lambda loss, d: loss(*first(d, V, W), teacher=TEACHER),
    ),
    "negatives": (
        itrloss.InfoNCELoss(),
        lambda loss, d: loss(*first(d, V, W), negatives=FURTHER[:, :d]),
    ),
    "keys and a memory": (itrloss.MemoryDiversityContrastiveLoss(), of_memory),
    "these by name": (itrloss.MemoryDiversityContrastiveLoss(), of_named_memory),
    "log-variances": (itrloss.PCMEPlusPlusLoss(), lambda loss, d: loss(*first(d, V, W, *KEYS))),
    "means by name": (itrloss.PCMEPlusPlusLoss(), of_named_normals),
    "means of queries": (
        itrloss.PCMEPlusPlusLoss(),
        partial(of_named_normals, sides=("queries", "documents")),
    ),
    "sets by name": (itrloss.VarianceAwareLoss(), of_named_sets),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_has_dimensions_is_cut(name):
    loss, call = CALLS[name]
    found = call(itrloss.Matryoshka(loss, (2, 6)), 6)
    torch.testing.assert_close(found, call(loss, 2) + call(loss, 6), rtol=1e-12, atol=0)


def test_of_a_loss_with_other_names_the_first_two_arguments_are_cut():
    class Own(nn.Module):
        def forward(self, a, b, *more):
            return (a * b).sum() + sum(more)

    found = itrloss.Matryoshka(Own(), (2, 6))(V, W, 1.0, 2.0)
    short = (V * W)[:, :2].sum() + 3
    whole = (V * W).sum() + 3
    torch.testing.assert_close(found, short + whole)


def test_values_of_anchors_are_a_tuple_for_each_length():
    loss = itrloss.InfoNCELoss(reduction="none")
    criterion = itrloss.Matryoshka(loss, (6, 2), (1.0, 0.5))
    found = criterion(V, W)
    rows, cols = loss(V, W)
    short_rows, short_cols = loss(*first(2, V, W))
    torch.testing.assert_close(found, (0.5 * short_rows, 0.5 * short_cols, rows, cols))
    loss.directions = "image-text"
    torch.testing.assert_close(criterion(V, W), (0.5 * short_rows, rows))


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
    loss = itrloss.InfoNCELoss()
    of_tensor = itrloss.Matryoshka(loss, (3, 6), torch.tensor([1.0, 2.0]))
    of_numbers = itrloss.Matryoshka(loss, (3, 6), (1, 2))
    assert torch.equal(of_tensor(V, W), of_numbers(V, W))


def test_a_loss_that_returns_more_than_tensors_is_refused():
    class WithFigures(nn.Module):
        def forward(self, images, texts):
            return (images * texts).sum(), {"figure": 1.0}

    message = r"^loss: expected it to return a tensor or a tuple of tensors, got dict in a tuple"
    with pytest.raises(TypeError, match=message):
        itrloss.Matryoshka(WithFigures(), (2, 6))(V, W)
