"""Classification by prototypes, CODER's loss of concepts, and its classifier.

`check_loss` has what holds of every loss, `test_objectives` the objective around it.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support.cases import of_engines, sample
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
@of_engines
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


def test_types_of_the_two_sides_may_differ_and_the_classifier_is_not_rounded():
    given = concepts(5, 7, 64).to(torch.float32)
    module = PrototypeClassificationLoss(64, 7)
    half = given.images.bfloat16()
    found = module(half, given.texts, given.ids)
    torch.testing.assert_close(found, module(half.float(), given.texts, given.ids))


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
