"""InfoNCE and distillation beyond what `test_random_cases` draws, which has all options next to
loops, in one process and in two.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cases import embeddings
from torch.autograd import gradcheck

import itrloss
from itrloss import Similarity, functional

of_engines = pytest.mark.parametrize("engine", ["dense", "tiled"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_temperature_in_half_precision_is_not_rounded_again(dtype):
    sim = Similarity(*embeddings(8, 8, dtype=torch.float32))
    temperature = torch.tensor(1 / 14.3, dtype=dtype)
    found = functional.info_nce_loss(sim, temperature)
    exact = functional.info_nce_loss(sim, temperature.float())
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-7)


@of_engines
def test_a_guide_gets_no_gradient_and_may_be_scores(engine):
    v, w, x, y = (x.requires_grad_() for x in (*embeddings(5, 5), *embeddings(5, 5, 9, seed=1)))
    criterion = itrloss.InfoNCELoss(0.1, margin=0.1, engine=engine)
    value = criterion(v, w, guide=(x, y))
    value.backward()
    assert v.grad.any()
    assert x.grad is None
    scores = Similarity(x, y, engine=engine).scores()
    torch.testing.assert_close(criterion(v, w, guide=scores), value)


@of_engines
def test_the_temperature_of_distillation_may_be_learnt(engine):
    sim, teacher = (Similarity(*embeddings(5, 5, seed=seed), engine=engine) for seed in (0, 1))

    def loss(temperature):
        return functional.distillation_loss(sim, teacher, temperature, 0.5)

    learnt = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(loss(learnt), loss(0.3))
    assert gradcheck(loss, learnt)


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
def test_one_pair_without_a_negative_that_exists_is_finite():
    v, w = (x.requires_grad_() for x in embeddings(1, 1))
    no_negative = {"negatives": v[:, None].detach(), "negative_ids": [[itrloss.NO_ID]]}
    value = itrloss.InfoNCELoss()(v, w, [0], [0], **no_negative)
    gradients = torch.autograd.grad(value, (v, w))
    assert all(x.isfinite().all() for x in (value, *gradients))


def test_ids_of_negatives_beyond_int64_are_refused():
    v, w = embeddings(3, 3)
    ids = np.array([[2**63, 2**63 + 1]] * 3, dtype=np.uint64)
    negatives = torch.stack([v, w], 1)
    with pytest.raises(ValueError, match=r"expected ids below 2\*\*63, got larger ones"):
        itrloss.InfoNCELoss()(v, w, range(3), range(3), negatives=negatives, negative_ids=ids)
