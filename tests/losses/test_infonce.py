"""InfoNCE and distillation beyond what `test_random_cases` draws, which has all options next to
loops, in one process and in two: guides, teachers and negatives that are not finite, limits, costs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.answers import assert_finite
from support.cases import embeddings, of_engines, sample
from support.embedders import one_way
from support.flops import Sizes
from support.versions import FlopCounterMode
from torch import Tensor
from torch.autograd import gradcheck

import itrloss
from itrloss import Similarity, functional


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


def test_one_pair_without_a_negative_that_exists_is_finite():
    v, w = (x.requires_grad_() for x in embeddings(1, 1))
    no_negative = {"negatives": v[:, None].detach(), "negative_ids": [[itrloss.NO_ID]]}
    value = itrloss.InfoNCELoss()(v, w, [0], [0], **no_negative)
    assert_finite(value, (v, w))


@pytest.mark.parametrize("shared", [True, False])
def test_an_image_whose_negatives_all_match_it_does_not_count(shared):
    v, w = torch.randn(2, 8), torch.randn(2, 8)
    loss = one_way(0.1, in_batch=False)
    if shared:
        further, ids = torch.randn(1, 8), [0]
        second = further[None]
    else:
        further, ids = torch.randn(2, 1, 8), [[0], [7]]
        second = further[1:]
    found = loss(v, w, negatives=further, negative_ids=ids)
    torch.testing.assert_close(found, loss(v[1:], w[1:], negatives=second))
    loss.reduction = "none"
    assert loss(v, w, negatives=further, negative_ids=ids)[0] == 0


def test_negatives_alone_multiply_nothing_else():
    """Without the batch's texts, nothing of its size (N, M) is computed."""
    n, k, d = 256, 2, 16
    v, w, z = (torch.randn(n, *size, d) for size in ((), (), (k,)))
    loss = one_way(0.1, in_batch=False)
    with FlopCounterMode(display=False) as counter:
        loss(v, w, negatives=z)
    assert counter.get_total_flops() <= 2 * n * (k + 1) * d


@of_engines
def test_options_that_are_left_out_cost_nothing(engine):
    """A plain InfoNCE launches what its function does."""
    v, w = (torch.randn(32, 16, requires_grad=True) for _ in range(2))
    loss = itrloss.InfoNCELoss(engine=engine)
    loss(v, w)  # which looks at the first batch
    with Sizes() as of_class:
        torch.autograd.grad(loss(v, w), (v, w))
    with Sizes() as of_function:
        value = itrloss.functional.info_nce_loss(Similarity(v, w, engine=engine))
        torch.autograd.grad(value, (v, w))
    assert of_class.sizes == of_function.sizes


@of_engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_copy_of_the_positive_is_no_negative_with_a_margin_of_zero(engine: Any, dtype: Any):
    """Whatever the rounding of two products of the same vectors."""
    loss = itrloss.InfoNCELoss(0.05, margin=0.0, directions="image-text", engine=engine)
    guided = itrloss.InfoNCELoss(0.05, margin=0.0, engine=engine)
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        image = torch.randn(1, 64, generator=draw, dtype=dtype)
        text = torch.randn(1, 64, generator=draw, dtype=dtype)
        assert loss(image, text.repeat(2, 1), [0], [0, 1]) == 0
        images, texts = (x.repeat(2, 1) for x in (image, text))
        guide = torch.randn(2, 2, 48, generator=draw, dtype=dtype)[:, :1].repeat(1, 2, 1)
        assert guided(images, texts, guide=tuple(guide)) == 0


N, K, D = 6, 3, 4


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return sample(*shape, D, seed=seed, dtype=torch.float64)


V, W = vectors(N), vectors(N, seed=1)
X, Y = vectors(N, seed=2), vectors(N, seed=3)  # by another model
SHARED, OWN = vectors(K, seed=4), vectors(N, K, seed=5)  # negatives
OF_GUIDE = {2: vectors(K, seed=6), 3: vectors(N, K, seed=7)}  # by their dimensions


def test_a_guide_turns_with_the_similarity():
    loss = itrloss.InfoNCELoss(0.5, margin=0.0, reduction="none")
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


@of_engines
@pytest.mark.parametrize("bad", [with_nan, overflown])
@pytest.mark.parametrize("name", GUIDED)
def test_a_guide_of_nan_gives_nan_or_is_refused(name, bad, engine):
    """It would leave out nothing, or everything: a loss of 0 for ever."""
    options, negatives, guide = GUIDED[name]
    given: dict[str, Any] = {"guide": guide(bad)}
    if negatives is not None:
        given["negatives"] = negatives
    loss = itrloss.InfoNCELoss(0.5, margin=0.1, engine=engine, **options)
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
    loss = itrloss.InfoNCELoss(0.5, margin=margin)
    bad = with_nan(negatives)
    assert loss(V, W, negatives=bad).isnan()
    ids = torch.full(bad.shape[:-1], 9)
    ids.view(-1)[-1] = itrloss.NO_ID
    if negatives is OWN:
        assert loss(V, W, negatives=bad, negative_ids=ids).isfinite()


def test_a_guide_may_score_minus_infinity():
    """Such pairs count."""
    scores = F.normalize(X) @ F.normalize(Y).T
    lowest = scores.clone().fill_diagonal_(0.9)
    lowest[0, 1] = -torch.inf
    low = lowest.clone()
    low[0, 1] = -1.0
    loss = itrloss.InfoNCELoss(0.5, margin=0.0)
    found, wanted = (loss(V, W, guide=x) for x in (lowest, low))
    torch.testing.assert_close(found, wanted)


TEACHERS = {
    "embeddings": lambda x: (x, Y),
    "scores": lambda x: x @ Y.T,
}


@pytest.mark.parametrize("form", TEACHERS)
def test_a_teacher_is_checked_in_all_its_forms(form):
    loss = itrloss.DistillationLoss(check_finite=True)
    with pytest.raises(ValueError, match=r"^teacher(\[\d\])?: expected finite values"):
        loss(V, W, TEACHERS[form](with_nan(X)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("hardness", [0.0, 5.0])
def test_scores_in_half_precision_are_added_up_in_float32(dtype, hardness):
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(32, 32, generator=generator).to(dtype)
    negatives = torch.rand(32, 64, generator=generator).to(dtype).requires_grad_()
    loss = itrloss.InfoNCELoss(0.05, hardness=hardness, **OF_OWN)
    found = loss(scores=scores, negatives=negatives)
    wanted = loss(scores=scores.float(), negatives=negatives.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert_finite(found, [negatives])


def test_distillation_needs_no_ids_where_a_sum_underflows():
    images = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.1]])
    texts = torch.tensor([[0.9, 0.1], [0.9, 0.3]])  # the last image is against both
    teacher = torch.zeros(3, 2)
    for engine in ("dense", "tiled"):
        loss = itrloss.DistillationLoss(0.01, engine=engine)
        torch.testing.assert_close(
            loss(images, texts, teacher), loss(images, texts, teacher, [0, 1, 2], [0, 1])
        )
