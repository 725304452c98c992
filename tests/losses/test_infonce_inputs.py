"""What InfoNCE and distillation make of relations that are no plain ids, and of wrong input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from itrloss import NO_ID, DistillationLoss, InfoNCELoss, Similarity

pytestmark = pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
N, K, D = 6, 3, 4


def vectors(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, D, generator=generator, dtype=torch.float64)


V, W = vectors(N), vectors(N, seed=1)
X, Y = vectors(N, seed=2), vectors(N, seed=3)  # by another model
SHARED, OWN = vectors(K, seed=4), vectors(N, K, seed=5)  # negatives
OF_GUIDE = {2: vectors(K, seed=6), 3: vectors(N, K, seed=7)}  # by their dimensions


def test_a_guide_turns_with_the_similarity():
    loss = InfoNCELoss(0.5, margin=0.0, reduction="none")
    scores = F.normalize(X) @ F.normalize(Y).T
    turned = Similarity(V, W).T
    wanted = loss(V, W, guide=(X, Y))[::-1]
    for guide in (scores.T, (Y, X)):
        torch.testing.assert_close(loss(turned, guide=guide), wanted)


# ------------------------------------------------------------------------------- input is checked


def with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[-2] = torch.nan
    return x


def overflown(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[-2] = torch.inf
    return x


OF_OWN = {"directions": "image-text", "in_batch": False}
# Options, negatives, a guide, and which part of it is wrong.
GUIDED: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "images": ({}, None, lambda bad: (bad(X), Y)),
    "texts": ({}, None, lambda bad: (X, bad(Y))),
    "images for own": (OF_OWN, OWN, lambda bad: (bad(X), Y, OF_GUIDE[3])),
    "own negatives": (OF_OWN, OWN, lambda bad: (X, Y, bad(OF_GUIDE[3]))),
    "shared negatives": ({}, SHARED, lambda bad: (X, Y, bad(OF_GUIDE[2]))),
    "texts among": ({"text_text": True}, SHARED, lambda bad: (X, bad(Y), OF_GUIDE[2])),
    "scores": ({}, None, lambda bad: with_nan(F.normalize(X) @ F.normalize(Y).T)),
}


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("bad", [with_nan, overflown])
@pytest.mark.parametrize("name", GUIDED)
def test_a_guide_of_nan_gives_nan_or_is_refused(name, bad, engine):
    """It would leave out nothing, or everything: a loss of 0 for ever."""
    options, negatives, guide = GUIDED[name]
    given: dict[str, Any] = {"guide": guide(bad)}
    if negatives is not None:
        given["negatives"] = negatives
    loss = InfoNCELoss(0.5, margin=0.1, engine=engine, **options)
    assert loss(V, W, **given).isnan()
    given["guide"] = guide(lambda x: x)
    if name != "scores":
        assert loss(V, W, **given).isfinite()
    given["guide"] = guide(bad)
    loss.check_finite = True
    with pytest.raises(ValueError, match=r"^guide(\[\d\])?: expected finite values"):
        loss(V, W, **given)


@pytest.mark.parametrize("margin", [None, 0.1])
@pytest.mark.parametrize("negatives", [SHARED, OWN], ids=["shared", "own"])
def test_negatives_of_nan_give_nan_but_for_padding(negatives, margin):
    loss = InfoNCELoss(0.5, margin=margin)
    bad = with_nan(negatives)
    assert loss(V, W, negatives=bad).isnan()
    ids = torch.full(bad.shape[:-1], 9)
    ids.view(-1)[-1] = NO_ID
    if negatives is OWN:
        assert loss(V, W, negatives=bad, negative_ids=ids).isfinite()


def test_a_guide_may_score_minus_infinity():
    """Such pairs count."""
    scores = F.normalize(X) @ F.normalize(Y).T
    lowest = scores.clone().fill_diagonal_(0.9)
    lowest[0, 1] = -torch.inf
    low = lowest.clone()
    low[0, 1] = -1.0
    loss = InfoNCELoss(0.5, margin=0.0)
    found, wanted = (loss(V, W, guide=x) for x in (lowest, low))
    torch.testing.assert_close(found, wanted)


TEACHERS = {
    "embeddings": lambda x: (x, Y),
    "scores": lambda x: x @ Y.T,
}


@pytest.mark.parametrize("form", TEACHERS)
def test_a_teacher_is_checked_in_all_its_forms(form):
    loss = DistillationLoss(check_finite=True)
    with pytest.raises(ValueError, match=r"^teacher(\[\d\])?: expected finite values"):
        loss(V, W, TEACHERS[form](with_nan(X)))


WORDS = ["a", "b", "c", "d", "e", "f"]
NUMBERS = torch.arange(N)


def test_strings_may_name_own_negatives():
    """In a list of lists as well as in an array."""
    loss = InfoNCELoss(0.5)
    numbers = torch.tensor([[0, 9, 2]] * N)
    wanted = loss(V, W, NUMBERS, NUMBERS, negatives=OWN, negative_ids=numbers)
    names = [["a", "x", "c"]] * N
    found = loss(V, W, WORDS, WORDS, negatives=OWN, negative_ids=names)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hardness", [0.0, 5.0])
def test_scores_in_half_precision_are_added_up_in_float32(dtype, hardness):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(32, 32, generator=generator).to(dtype)
    negatives = torch.rand(32, 64, generator=generator).to(dtype).requires_grad_()
    loss = InfoNCELoss(0.05, hardness=hardness, **OF_OWN)
    found = loss(scores=scores, negatives=negatives)
    wanted = loss(scores=scores.float(), negatives=negatives.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(found, negatives)
    assert gradient.isfinite().all()
