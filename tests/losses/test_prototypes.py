"""Classification by prototypes, CODER's loss of concepts, and its classifier.

`check_loss` has what holds of every loss, `test_objectives` the objective around it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from support.cases import sample
from torch import Tensor

from itrloss import PrototypeClassificationLoss
from itrloss.functional import prototype_classification_loss


class Concepts(NamedTuple):
    """The arguments of the loss."""

    images: Tensor
    texts: Tensor
    weight: Tensor
    ids: Tensor

    def to(self, dtype: torch.dtype) -> Concepts:
        return Concepts(*(x.to(dtype) for x in self[:3]), self.ids)


def concepts(pairs, clusters, dim):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, clusters, (pairs,), generator=generator)
    vectors = [
        sample(size, dim, seed=seed, dtype=torch.float64)
        for seed, size in enumerate((pairs, pairs, clusters))
    ]
    return Concepts(*vectors, ids)


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_the_loss_is_never_negative_in_float32(engine, scale):
    given = concepts(128, 500, 64)
    given.images[:60] = given.weight[given.ids[:60]]  # easy ones, whose loss is almost 0
    given = given._replace(images=scale * given.images, texts=scale * given.texts)
    single = given.to(torch.float32)
    found = prototype_classification_loss(*single, "none", engine)
    wanted = prototype_classification_loss(*single.to(torch.float64), "none", "dense")
    for values, exact in zip(found, wanted, strict=True):
        assert (values >= 0).all()
        torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=2e-6)


def test_a_common_offset_of_the_prototypes_changes_nothing():
    given = concepts(6, 5, 4)
    moved = given._replace(weight=given.weight + 1.5)
    torch.testing.assert_close(
        prototype_classification_loss(*moved), prototype_classification_loss(*given)
    )


# ----------------------------------------------------------------------------------- half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_concepts_in_half_precision_are_classified_in_float32(dtype):
    given = concepts(6, 10, 8)
    module = PrototypeClassificationLoss(8, 10)
    images = given.images.to(dtype).requires_grad_()
    texts = given.texts.to(dtype)
    value = module(images, texts, given.ids)
    assert value.dtype == torch.float32
    wanted = prototype_classification_loss(
        images.double(), texts.double(), module.weight.double(), given.ids
    )
    torch.testing.assert_close(value.double(), wanted, rtol=1e-5, atol=1e-6)
    value.backward()
    assert images.grad.dtype == dtype
    assert module.weight.grad.dtype == torch.float32


def test_types_of_the_two_sides_may_differ():
    given = concepts(5, 7, 64).to(torch.float32)
    half = given._replace(images=given.images.bfloat16())
    rounded = half._replace(images=half.images.float())
    torch.testing.assert_close(
        prototype_classification_loss(*half), prototype_classification_loss(*rounded)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("active", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype, active):
    given = concepts(6, 10, 8)
    module = PrototypeClassificationLoss(8, 10)
    if dtype == torch.float64:
        module.double()
    images = given.images.to(dtype).requires_grad_()
    texts = given.texts.to(dtype)
    wanted = module(images, texts, given.ids)
    with torch.autocast("cpu", active):
        value = module(images, texts, given.ids)
    assert torch.equal(value, wanted)
    (gradient,) = torch.autograd.grad(value, images)
    assert gradient.dtype == dtype
    assert gradient.isfinite().all()


# -------------------------------------------------------------------------------------------- reset


def classifier():
    torch.manual_seed(0)
    return PrototypeClassificationLoss(6, 5)


CENTROIDS = torch.nn.functional.normalize(sample(5, 6, seed=7))
RESEEDED = torch.tensor([False, True, False, False, True])


def test_reset_gives_reseeded_rows_their_centroid_and_leaves_the_others():
    module = classifier()
    before = module.weight.detach().clone()
    module.reset(RESEEDED, CENTROIDS)
    assert torch.equal(module.weight[~RESEEDED], before[~RESEEDED])
    torch.testing.assert_close(module.weight[RESEEDED], CENTROIDS[RESEEDED] / 3**0.5)


def test_reset_of_no_row_leaves_a_graph_alone():
    module = classifier()
    given = concepts(4, 5, 6).to(torch.float32)
    value = module(given.images, given.texts, given.ids)
    module.reset(torch.zeros(5, dtype=torch.bool), CENTROIDS)
    value.backward()
    assert module.weight.grad.any()


def test_reset_clears_the_gradients_of_reseeded_rows():
    module = classifier()
    given = concepts(4, 5, 6).to(torch.float32)
    module(given.images, given.texts, given.ids).backward()
    before = module.weight.grad.clone()
    module.reset(RESEEDED, CENTROIDS)
    assert not module.weight.grad[RESEEDED].any()
    assert torch.equal(module.weight.grad[~RESEEDED], before[~RESEEDED])


@pytest.mark.parametrize(
    ("reseeded", "centroids", "error", "message"),
    [
        (RESEEDED.float(), CENTROIDS, ValueError, "reseeded: expected a boolean"),
        (RESEEDED, CENTROIDS[:, :3], ValueError, "centroids: expected shape"),
        (None, CENTROIDS, TypeError, "reseeded: expected a tensor"),
    ],
)
def test_wrong_arguments_of_reset_are_named(reseeded, centroids, error, message):
    with pytest.raises(error, match=message):
        classifier().reset(reseeded, centroids)


# ------------------------------------------------------------------------------------- wrong input

GIVEN = concepts(4, 5, 3)
WRONG = {
    "fewer texts": (
        {"texts": GIVEN.texts[:3]},
        ValueError,
        r"text_concepts: expected shape \(4, 3\), got \(3, 3\)",
    ),
    "types": (
        {"texts": GIVEN.texts.float()},
        TypeError,
        "text_concepts: expected the dtype of weight",
    ),
    "integers": (
        {"images": GIVEN.images.long()},
        TypeError,
        "image_concepts: expected a floating-point",
    ),
    "a list": ({"images": [1]}, TypeError, "image_concepts: expected a floating-point"),
    "large ids": (
        {"ids": GIVEN.ids + 2},
        ValueError,
        "prototype_ids: expected integers from 0 to 4",
    ),
    "negative ids": (
        {"ids": GIVEN.ids - 5},
        ValueError,
        "prototype_ids: expected integers from 0 to 4",
    ),
    "ids of another type": (
        {"ids": GIVEN.ids.double()},
        TypeError,
        "prototype_ids: expected an integer tensor",
    ),
    "dimensions": (
        {"weight": GIVEN.weight[:, :2]},
        ValueError,
        "image_concepts: expected embeddings of dimension 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(name):
    changed, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        prototype_classification_loss(*GIVEN._replace(**changed))


def test_a_wrong_reduction_is_named():
    with pytest.raises(ValueError, match="reduction"):
        prototype_classification_loss(*GIVEN, "max")


def test_nan_is_named_on_request():
    module = PrototypeClassificationLoss(3, 5, check_finite=True)
    with pytest.raises(ValueError, match="image_concepts"):
        module(GIVEN.images * math.nan, GIVEN.texts, GIVEN.ids)


@pytest.mark.parametrize(
    ("dim", "clusters", "error", "message"),
    [(3, 0, ValueError, "clusters"), (3.5, 5, TypeError, "dim: expected an integer")],
)
def test_wrong_options_are_named(dim, clusters, error, message):
    with pytest.raises(error, match=message):
        PrototypeClassificationLoss(dim, clusters)
