"""Forms of InfoNCE, and distillation, beside plain PyTorch and sentence-transformers.

`test_losses` has the hardness and the filter beside loop oracles, `test_sharded` all forms over
processes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.cases import SHAPES, each, embeddings, make_ids, pairwise, upstream
from torch import Tensor, nn

import itrloss
from itrloss import Anchors, Similarity, functional
from itrloss.engine.pairs import IGNORE_ID

ENGINES = ("dense", "tiled")


def filtered(temperature=0.05, margin=0.1, relative=False, **options: Any) -> itrloss.InfoNCELoss:
    """InfoNCE without the negatives above a margin."""
    return itrloss.InfoNCELoss(temperature, margin=margin, relative=relative, **options)


# ------------------------------------------------------------------------------------ plain PyTorch


def cosines(v: Tensor, w: Tensor) -> Tensor:
    return F.normalize(v, dim=1) @ F.normalize(w, dim=1).T


def positives_of(v: Tensor, w: Tensor, ids: Any) -> Tensor:
    rows, cols = (
        torch.arange(len(x)) if i is None else i for i, x in zip(ids, (v, w), strict=True)
    )
    return rows[:, None] == cols


def info_nce(
    S: Tensor, positive: Tensor, scale: Any, hardness=0.0, left_out: Any = None, more: Any = None
) -> Tensor:
    """The value of each row of scores, 0 without a positive or a negative; ``more``: scores of
    further negatives.
    """
    values = []
    for i, (scores, own) in enumerate(zip(S, positive, strict=True)):
        negative = scores[~own] if left_out is None else scores[~own & ~left_out[i]]
        negative = negative if more is None else torch.cat([negative, more[i]])
        logits = scale * negative + hardness * negative.detach()
        terms = [torch.cat([scale * s[None], logits]).logsumexp(0) - scale * s for s in scores[own]]
        counts = own.any() and (not own.all() or more is not None)
        values.append(sum(terms) / len(terms) if counts else scores.sum() * 0)
    return torch.stack(values)


def too_high(G: Tensor, positive: Tensor, margin: float, relative: bool) -> Tensor:
    """Which pairs score as high as the mean of the row's positives and the margin, or higher."""
    own = (G * positive).sum(1, keepdim=True) / positive.sum(1, keepdim=True).clamp_min(1)
    return own + margin * (own.abs() if relative else 1) <= G


def with_gradients(call: Any, leaves: Any, grads: Any) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    values = call(*leaves)
    total = sum((value * g.to(value.dtype)).sum() for value, g in zip(values, grads, strict=False))
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [
        *values,
        *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)),
    ]


def compare(ours: Any, plain: Any, leaves: Any, grads: Any, tolerance: float = 1e-9) -> None:
    found, wanted = with_gradients(ours, leaves, grads), with_gradients(plain, leaves, grads)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def given(shape: str) -> tuple[Tensor, Tensor, Any, Any]:
    n, m, kind = SHAPES[shape]
    return *embeddings(n, m), make_ids(kind, n, m), upstream(n, m)


def others(n: int, m: int, d: int = 9) -> tuple[Tensor, Tensor]:
    """Embeddings by another model, of another dimension."""
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(size, d, generator=generator, dtype=torch.float64) for size in (n, m))  # type: ignore


# ------------------------------------------------------------------------------ hardness, negatives


@pytest.mark.parametrize(
    ("hardness", "shape", "engine"),
    pairwise(hardness=[0.0, 1e-20, 9.0, 200.0], shape=SHAPES, engine=ENGINES),
)
def test_weighted_negatives(hardness, shape, engine, small_tiles, poisoned):
    """With a learnable temperature, the gradient of which is that of the formula with the weight as
    a constant.
    """
    v, w, ids, grads = given(shape)

    def ours(x, y, scale):
        sim = Similarity(x, y, *ids, engine=engine)
        return functional.info_nce_loss(sim, 1 / scale, "none", hardness=hardness)

    def plain(x, y, scale):
        S, positive = cosines(x, y), positives_of(x, y, ids)
        return [info_nce(S, positive, scale, hardness), info_nce(S.T, positive.T, scale, hardness)]

    compare(ours, plain, (v, w, torch.tensor(14.0, dtype=v.dtype)), grads)


def test_weighted_negatives_count_within_the_limits_of_a_guide():
    scores, judged = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    sim, guide = (Similarity.from_scores(x) for x in (scores, judged))
    for judge, options in ((scores, {}), (judged, {"guide": guide.both})):
        left = scores.masked_fill((judge >= 0.5) & ~torch.eye(6, dtype=torch.bool), -math.inf)
        found = functional.info_nce_loss(sim, 0.5, hardness=3.0, below=0.5, **options)
        wanted = functional.info_nce_loss(Similarity.from_scores(left), 0.5, hardness=3.0)
        torch.testing.assert_close(found, wanted)


def test_the_learnable_temperature_of_the_class_has_the_gradient_of_the_constant_weight():
    v, w, ids, _ = given("wide")
    criterion = itrloss.InfoNCELoss(0.2, learnable=True, hardness=9.0).double()
    criterion(v, w, *ids).backward()
    log_scale = criterion.log_scale.detach().clone().requires_grad_()
    S, positive = cosines(v, w), positives_of(v, w, ids)
    loss = 0
    for scores, mask in ((S, positive), (S.T, positive.T)):
        loss = (
            loss
            + info_nce(scores, mask, log_scale.exp().squeeze(), 9.0).sum()
            / (mask.any(1) & ~mask.all(1)).sum()
        )
    loss.backward()
    torch.testing.assert_close(criterion.log_scale.grad, log_scale.grad, rtol=1e-9, atol=1e-9)
    assert log_scale.grad.abs() > 1e-3


@pytest.mark.parametrize(
    ("hardness", "of_each", "shape", "engine"),
    pairwise(hardness=[0.0, 5.0], of_each=[False, True], shape=SHAPES, engine=ENGINES),
)
def test_further_negatives(hardness, of_each, shape, engine, small_tiles, poisoned):
    """Those of all images, or of each; the texts are as before."""
    v, w, ids, grads = given(shape)
    generator = torch.Generator().manual_seed(3)
    size = (len(v), 4, v.shape[1]) if of_each else (6, v.shape[1])
    negatives = torch.randn(size, generator=generator, dtype=v.dtype)
    criterion = itrloss.InfoNCELoss(0.1, hardness=hardness, reduction="none", engine=engine)

    def plain(x, y, z):
        S, positive = cosines(x, y), positives_of(x, y, ids)
        more = (
            torch.einsum("nd,nkd->nk", F.normalize(x, dim=1), F.normalize(z, dim=2))
            if of_each
            else cosines(x, z)
        )
        return [
            info_nce(S, positive, 10.0, hardness, more=more),
            info_nce(S.T, positive.T, 10.0, hardness),
        ]

    compare(lambda x, y, z: criterion(x, y, *ids, negatives=z), plain, (v, w, negatives), grads)
    rows, cols = plain(v, w, negatives)
    positive = positives_of(v, w, ids)
    # of images, all have negatives
    counted = positive.any(1).sum(), (positive.any(0) & ~positive.all(0)).sum()
    mean = sum(x.sum() / n.clamp_min(1) for x, n in zip((rows, cols), counted, strict=True))
    criterion.reduction = "mean"
    torch.testing.assert_close(criterion(v, w, *ids, negatives=negatives), mean)
    criterion.reduction = "sum"
    torch.testing.assert_close(criterion(v, w, *ids, negatives=negatives), rows.sum() + cols.sum())


@pytest.mark.parametrize("engine", ENGINES)
def test_negatives_are_those_of_negclip_in_one_direction(engine):
    """One matrix of the images with all texts, whose targets are the own texts, and one of the
    texts with images.
    """
    v, w = embeddings(6, 6)
    negatives = embeddings(6, 6, seed=5)[0]
    rows = F.cross_entropy(cosines(v, torch.cat([w, negatives])) / 0.07, torch.arange(6))
    cols = F.cross_entropy(cosines(w, v) / 0.07, torch.arange(6))
    torch.testing.assert_close(
        itrloss.InfoNCELoss(engine=engine)(v, w, negatives=negatives), rows + cols
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(3,), (4, 2)])
def test_zero_vectors_among_negatives(size, dtype, engine):
    v, w, z = torch.ones(4, 8), torch.eye(8)[:4], torch.zeros(*size, 8)
    z[..., -1:, :] = 1
    z[0] = 0
    x, y, z = (a.to(dtype).requires_grad_() for a in (v, w, z))
    criterion = itrloss.InfoNCELoss(hardness=9.0, engine=engine)
    loss = criterion(x, y, negatives=z)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(criterion(x, y, negatives=z), loss)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.isfinite() and (z.grad[0] == 0).all()
    assert all(a.grad.isfinite().all() and a.grad.dtype == dtype for a in (x, y, z))
    exact = criterion(*(a.detach().double() for a in (x, y)), negatives=z.detach().double())
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------- left-out negatives


@pytest.mark.parametrize(
    ("guided", "limit", "shape", "engine"),
    pairwise(
        guided=[False, True],
        limit=[(0.1, False), (0.0, False), (-0.3, False), (-0.05, True)],
        shape=SHAPES,
        engine=ENGINES,
    ),
)
def test_negatives_above_the_positive_are_left_out(
    guided, limit, shape, engine, small_tiles, poisoned
):
    margin, relative = limit
    v, w, ids, grads = given(shape)
    x, y = others(len(v), len(w))
    x.requires_grad_()
    guide = Similarity(x, y, *ids, engine=engine) if guided else None
    criterion = filtered(0.1, margin, relative, reduction="none", engine=engine)

    def plain(v, w):
        S, positive = cosines(v, w), positives_of(v, w, ids)
        G = cosines(x, y).detach() if guided else S.detach()
        masks = too_high(G, positive, margin, relative), too_high(G.T, positive.T, margin, relative)
        return [
            info_nce(S, positive, 10.0, left_out=masks[0]),
            info_nce(S.T, positive.T, 10.0, left_out=masks[1]),
        ]

    compare(lambda v, w: criterion(v, w, *ids, guide=guide), plain, (v, w), grads)
    assert x.grad is None
    if guided:  # and as scores
        scores = Similarity.from_scores(cosines(x, y), *ids, engine=engine)
        compare(lambda v, w: criterion(Similarity(v, w, *ids), guide=scores), plain, (v, w), grads)


@pytest.mark.parametrize(("own", "other"), [("dense", "tiled"), ("tiled", "dense")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_guide_has_an_engine_and_a_dtype_of_its_own(own, other, dtype, small_tiles):
    v, w, ids, _ = given("five captions")
    x, y = (a.to(dtype) for a in others(len(v), len(w)))
    criterion = filtered(margin=0.0, engine=own)
    wanted = criterion(v, w, *ids, guide=Similarity(x.double(), y.double(), *ids))
    torch.testing.assert_close(
        criterion(v, w, *ids, guide=Similarity(x, y, *ids, engine=other)), wanted
    )
    teacher = itrloss.DistillationLoss(engine=own)
    wanted = teacher(v, w, Similarity(x.double(), y.double(), *ids), *ids)
    torch.testing.assert_close(
        teacher(v, w, Similarity(x, y, *ids, engine=other), *ids), wanted, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_an_anchor_whose_negatives_are_all_left_out_counts_with_0_and_has_no_gradient(engine):
    v, w = (x.requires_grad_() for x in embeddings(5, 5))
    loss = filtered(margin=-3.0, engine=engine)(v, w)
    loss.backward()
    assert loss == 0 and (v.grad == 0).all() and (w.grad == 0).all()
    scores = torch.tensor([[0.5, 0.9], [0.1, 0.2]], dtype=torch.float64)
    rows, _ = filtered(reduction="none", engine=engine)(scores=scores)
    assert rows[0] == 0 and rows[1] > 0
    sim = Similarity.from_scores(scores, engine=engine)
    for positives in (None, sim.both):  # also where positives are of other candidates
        mean = functional.info_nce_loss(
            sim, 0.05, below=sim.scores().diagonal().repeat(2) + 0.1, positives=positives
        )
        torch.testing.assert_close(mean, filtered()(scores=scores))


def test_scores_of_the_guide_that_are_equal_to_the_limit_are_left_out():
    scores, judged = torch.zeros(2, 2), torch.tensor([[1.0, 1.0], [0.0, 1.0]])
    rows, _ = filtered(margin=0.0, reduction="none")(
        scores=scores, guide=Similarity.from_scores(judged)
    )
    torch.testing.assert_close(rows, torch.tensor([0.0, 2.0]).log().clamp_min(0))


# ------------------------------------------------------------------------------------- distillation


def distilled(S: Tensor, T: Tensor, temperature: float, of_teacher: float) -> list[Tensor]:
    """The cross-entropies of rows and columns, with -sum q log p written out."""
    return [
        -((t / of_teacher).softmax(1) * (s / temperature).log_softmax(1)).sum(1)
        for s, t in ((S, T), (S.T, T.T))
    ]


@pytest.mark.parametrize(
    ("temperatures", "shape", "engine"),
    pairwise(temperatures=[(0.07, 0.07), (1.0, 0.01), (0.005, 3.0)], shape=SHAPES, engine=ENGINES),
)
def test_distillation(temperatures, shape, engine, small_tiles, poisoned):
    """From embeddings and from scores of a teacher, whatever the ids."""
    temperature, of_teacher = temperatures
    v, w, ids, grads = given(shape)
    x, y = others(len(v), len(w))
    criterion = itrloss.DistillationLoss(temperature, of_teacher, reduction="none", engine=engine)
    T = cosines(x, y).requires_grad_()
    known = make_ids("random", len(v), len(w))
    for teacher, own in (
        (Similarity(x, y, *ids, engine=engine), ids),
        (T, ids),
        (T, (None, None)),
        (T, known),
    ):
        compare(
            lambda v, w, teacher=teacher, own=own: criterion(v, w, teacher, *own),
            lambda v, w: distilled(cosines(v, w), T.detach(), temperature, of_teacher),
            (v, w),
            grads,
        )
    assert T.grad is None
    for reduction, wanted in (
        ("sum", [z.sum() for z in distilled(cosines(v, w), T, temperature, of_teacher)]),
        ("mean", [z.mean() for z in distilled(cosines(v, w), T, temperature, of_teacher)]),
    ):
        criterion.reduction = reduction
        torch.testing.assert_close(criterion(v, w, T), sum(wanted))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_temperature_of_distillation_may_be_learnt(engine):
    v, w, ids, grads = given("wide")
    T = 3 * cosines(*others(5, 17))

    def ours(x, y, temperature):
        teacher = Similarity.from_scores(T, *ids)
        return functional.distillation_loss(
            Similarity(x, y, *ids, engine=engine), teacher, temperature, 0.5, "none"
        )

    plain = lambda x, y, temperature: distilled(cosines(x, y), T, temperature, 0.5)  # noqa: E731
    compare(ours, plain, (v, w, torch.tensor(0.3, dtype=v.dtype)), grads)


@pytest.mark.parametrize("engine", ENGINES)
def test_padding_is_no_candidate_of_the_teacher_either(engine):
    """Neither a teacher's probability nor an overflow of its scores counts."""
    v, w = embeddings(5, 7)
    T = cosines(*others(5, 7))
    T[:, 5:] = 400.0
    ids = torch.arange(5), torch.tensor([0, 1, 2, 3, 4, IGNORE_ID, IGNORE_ID])
    criterion = itrloss.DistillationLoss(reduction="none", engine=engine)
    wanted = distilled(cosines(v, w[:5]), T[:, :5], 0.07, 0.07)
    for dtype in (torch.float64, torch.float32):
        x, y = (z.clone().to(dtype).requires_grad_() for z in (v, w))
        rows, cols = criterion(x, y, T.to(dtype), *ids)
        (rows.sum() + cols.sum()).backward()
        torch.testing.assert_close(rows.double(), wanted[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(cols[:5].double(), wanted[1], rtol=1e-4, atol=1e-4)
        assert (cols[5:] == 0).all() and x.grad.isfinite().all() and (y.grad[5:] == 0).all()
    whole = itrloss.DistillationLoss(engine=engine)(v, w, Similarity.from_scores(T, *ids), *ids)
    torch.testing.assert_close(whole, wanted[0].mean() + wanted[1].mean())


@pytest.mark.parametrize("engine", ENGINES)
def test_distillation_of_zero_vectors_and_half_precision(engine):
    v = torch.cat([torch.zeros(2, 8), torch.ones(3, 8), torch.eye(8)[:3]]).to(torch.bfloat16)
    a, b = v.clone().requires_grad_(), v.flip(0).clone().requires_grad_()
    for teacher in (
        Similarity(v, v, engine=engine),
        torch.full((8, 8), 1e4),
        torch.eye(8).to(torch.bfloat16),
    ):
        loss = itrloss.DistillationLoss(0.01, 0.01, engine=engine)(a, b, teacher)
        loss.backward()
        assert loss.dtype == torch.float32 and loss.isfinite()
        assert a.grad.isfinite().all() and b.grad.isfinite().all() and (a.grad[:2] == 0).all()


def test_a_student_like_its_teacher_has_the_entropy_and_no_gradient():
    v, w = (x.requires_grad_() for x in embeddings(6, 9))
    S = cosines(v, w).detach()
    loss = itrloss.DistillationLoss()(v, w, S)
    entropy = sum(
        torch.distributions.Categorical(logits=x / 0.07).entropy().mean() for x in (S, S.T)
    )
    torch.testing.assert_close(loss, entropy)
    assert all(x.abs().amax() < 1e-12 for x in torch.autograd.grad(loss, (v, w)))


# ------------------------------------------------------------------------------------------- errors


def forward(module: Any, *args: Any, **options: Any) -> Any:
    v, w = (x.float() for x in embeddings(4, 4))
    return lambda: module()(v, w, *args, **options)


FILTERED, DISTILLED, NEGATIVES = (
    partial(forward, x) for x in (filtered, itrloss.DistillationLoss, itrloss.InfoNCELoss)
)


def INFONCE(**options: Any) -> Any:
    return forward(partial(itrloss.InfoNCELoss, **options))


X = embeddings(3, 4, dtype=torch.float32)
Y = embeddings(4, 4, dtype=torch.float32)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda: itrloss.InfoNCELoss(hardness=-1),
            ValueError,
            "hardness: expected at least 0, got -1",
        ),
        (
            lambda: itrloss.InfoNCELoss(hardness="9"),
            TypeError,
            "hardness: expected a number, got '9'",
        ),  # type: ignore
        (
            lambda: itrloss.InfoNCELoss(hardness=float("nan")),
            ValueError,
            "hardness: expected a number in the range",
        ),
        (
            NEGATIVES(negatives=torch.randn(3, 7)),
            ValueError,
            "negatives: expected embeddings of dimension 6 like images",
        ),
        (NEGATIVES(negatives=[1.0]), TypeError, "negatives: expected a floating-point tensor"),
        (
            NEGATIVES(negatives=torch.randn(0, 6)),
            ValueError,
            r"negatives: expected shape \(M, D\), each at least 1",
        ),
        (
            NEGATIVES(negatives=torch.randn(3, 6).double()),
            TypeError,
            "negatives: expected float64 beside float64 images",
        ),
        (
            NEGATIVES(negatives=torch.randn(3, 2, 6)),
            ValueError,
            r"negatives: expected shape \(K, D\) or \(4, K, 6\)",
        ),
        (
            NEGATIVES(negatives=torch.randn(4, 0, 6)),
            ValueError,
            r"negatives: expected shape \(N, K, D\), each at least 1",
        ),
        (
            lambda: itrloss.InfoNCELoss()(Similarity(*Y), negatives=Y[0]),
            ValueError,
            "negatives: expected images beside them",
        ),
        (lambda: filtered(margin="0"), ValueError, "margin: expected None or a number"),  # type: ignore
        (
            lambda: filtered(0.0),
            ValueError,
            "temperature: expected a number above 0",
        ),
        (FILTERED(guide=torch.eye(4)), TypeError, "guide: expected a Similarity"),
        (
            FILTERED(guide=Similarity(*X, *map(torch.arange, (3, 4)))),
            ValueError,
            r"guide: .* a matrix of \(3, 4\) beside",
        ),
        (
            FILTERED(guide=Similarity(*Y, *[torch.arange(4)] * 2)),
            ValueError,
            "guide: expected the ids of the loss",
        ),
        (
            lambda: itrloss.DistillationLoss(0.1, -1.0),
            ValueError,
            "teacher_temperature: expected a number above 0",
        ),
        (
            DISTILLED(torch.eye(4)[:3]),
            ValueError,
            r"teacher: expected shape \(4, 4\), got \(3, 4\)",
        ),
        (DISTILLED(torch.zeros(4, 4, 2)), ValueError, r"teacher: expected shape \(N, M\)"),
        (
            DISTILLED(torch.eye(4).long()),
            TypeError,
            r"teacher: expected a floating-point tensor \(N, M\)",
        ),
        (DISTILLED(None), TypeError, "teacher: expected a Similarity"),
        (
            DISTILLED(Similarity(*X, *map(torch.arange, (3, 4)))),
            ValueError,
            r"teacher: .* a matrix of \(3, 4\) beside",
        ),
        (
            lambda: functional.distillation_loss(Similarity(*Y), Y),
            TypeError,
            "teacher: expected a Similarity",
        ),  # type: ignore
        (
            lambda: itrloss.InfoNCELoss(directions="all"),
            ValueError,
            "directions: expected 'both', 'image-text' or 'text-image', got 'all'",
        ),
        (
            lambda: itrloss.SigmoidLoss(directions="image-text"),
            ValueError,
            "directions: expected 'both'",
        ),
        (lambda: itrloss.InfoNCELoss(joint="yes"), ValueError, "joint: expected True or False"),  # type: ignore
        (
            lambda: itrloss.InfoNCELoss(hardness=(1.0, 2.0, 3.0)),  # type: ignore
            ValueError,
            "hardness: expected a number or a pair of numbers",
        ),
        (INFONCE(joint=True, directions="image-text"), ValueError, "joint: expected False, or dir"),
        (
            INFONCE(in_batch=False),
            ValueError,
            "in_batch: expected True, or directions='image-text'",
        ),
        (
            INFONCE(in_batch=False, directions="image-text"),
            ValueError,
            "in_batch: expected True, or negatives",
        ),
        (
            INFONCE(in_batch=False, directions="image-text", image_image=True),
            ValueError,
            "in_batch: expected True beside image_image",
        ),
        (INFONCE(relative=True), ValueError, "relative: expected a margin"),
        (INFONCE(text_text="unfiltered"), ValueError, "text_text: expected a margin beside"),
        (FILTERED(negative_ids=torch.arange(4)), ValueError, "negative_ids: expected None without"),
        (
            FILTERED(negatives=torch.randn(3, 6), negative_ids=torch.arange(4)),
            ValueError,
            r"negative_ids: expected shape \(3,\), got \(4,\)",
        ),
        (
            FILTERED(negatives=torch.randn(4, 2, 6), negative_ids=torch.arange(4)),
            ValueError,
            r"negative_ids: expected shape \(4, 2\), got \(4,\)",
        ),
        (
            FILTERED(negatives=torch.randn(3, 6), guide=Similarity(*Y)),
            ValueError,
            "guide: expected embeddings beside negatives",
        ),
        (
            FILTERED(negatives=torch.randn(3, 6), guide=Y),
            ValueError,
            r"guide: expected embeddings \(images, texts, negatives\), got 2 tensors",
        ),
        (
            lambda: itrloss.InfoNCELoss()(*Y, guide=Y),
            ValueError,
            "guide: expected None without a margin",
        ),
        (
            lambda: itrloss.InfoNCELoss(image_image=True)(scores=torch.eye(4)),
            ValueError,
            "image_image, text_text: expected False without embeddings",
        ),
        (
            lambda: itrloss.InfoNCELoss()(scores=torch.eye(4), negatives=torch.eye(3)),
            ValueError,
            "negatives: expected a row of scores for each of 4 images",
        ),
    ],
)
def test_errors(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


# ----------------------------------------------------------------------------- compiler, call forms


def calls(**options: Any) -> dict[str, Any]:
    v, w = embeddings(8, 8, dtype=torch.float32)
    x, y = (a.float() for a in others(8, 8))
    ids = torch.arange(8) % 5
    every = embeddings(24, 1, dtype=torch.float32)[0]
    return {
        "negatives": (
            itrloss.InfoNCELoss(hardness=9.0, **options),
            (v, w, ids, ids),
            {"negatives": x[:, :6]},
        ),
        "negatives of each": (
            itrloss.InfoNCELoss(**options),
            (v, w),
            {"negatives": every.view(8, 3, 6)},
        ),
        "guide": (
            filtered(**options),
            (v, w, ids, ids),
            {"guide": Similarity(x, y, ids, ids)},
        ),
        "teacher": (itrloss.DistillationLoss(**options), (v, w, x @ y.T / 9), {}),
        "joint": (
            itrloss.InfoNCELoss(joint=True, image_image=True, text_text=True, **options),
            (v, w, ids, ids),
            {},
        ),
        "among": (
            itrloss.InfoNCELoss(image_image=True, text_text=True, margin=0.1, **options),
            (v, w),
            {"negatives": x[:, :6], "guide": (x, y, x)},
        ),
        "own": (
            itrloss.InfoNCELoss(directions="image-text", in_batch=False, **options),
            (v, w),
            {"negatives": every.view(8, 3, 6)},
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), each(name=calls(), engine=ENGINES))
def test_compiles_without_graph_breaks(name, engine):
    criterion, (v, w, *args), options = calls(engine=engine)[name]
    torch._dynamo.reset()
    results = []
    compiled = torch.compile(criterion, fullgraph=engine != "tiled", backend="aot_eager")
    for f in (criterion, compiled):
        x, y = v.clone().requires_grad_(), w.clone().requires_grad_()
        value = f(x, y, *args, **options)
        results.append((value, *torch.autograd.grad(value, (x, y))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", calls())
def test_telemetry_gather_in_one_process_and_representation(name):
    wanted = None
    for extra in ({}, {"telemetry": True}, {"gather": True}, {"check_finite": True}):
        criterion, args, options = calls(**extra)[name]
        value = criterion(*args, **options)
        wanted = value if wanted is None else wanted
        torch.testing.assert_close(value, wanted)
        assert bool(criterion.telemetry) == ("telemetry" in extra) and "temperature=" in repr(
            criterion
        )
    v, w, *more = args
    bad = v.clone()
    bad[0, 0] = torch.nan
    with pytest.raises(ValueError, match="images: expected finite values"):
        criterion(bad, w, *more, **options)


# ---------------------------------------------------------------------------- sentence-transformers
# Their losses have one direction, from queries to documents. Its part of ours are the values of
# the images.

QUERY_TO_DOC = "query_to_doc"


def ranking(**options: Any) -> Any:
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(None, **options)  # type: ignore
    return lambda *columns: loss.compute_loss_from_embeddings(list(columns), None)  # type: ignore


def same(ours: Any, theirs: Any, leaves: Any) -> None:
    compare(lambda *x: [ours(*x)], lambda *x: [theirs(*x)], leaves, [torch.ones(())], 1e-8)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("directions", "options"),
    [
        ([], {"directions": "image-text"}),
        (["query_to_query"], {"directions": "image-text", "image_image": True}),
        (["doc_to_doc"], {"directions": "image-text", "text_text": True}),
        (["doc_to_query"], {"joint": True}),
        (
            ["doc_to_query", "query_to_query", "doc_to_doc"],
            {"joint": True, "image_image": True, "text_text": True},
        ),
    ],
)
def test_joint_sums_are_those_of_sentence_transformers(directions, options, engine, small_tiles):
    ours = itrloss.InfoNCELoss(0.05, engine=engine, **options)
    same(ours, ranking(directions=(QUERY_TO_DOC, *directions)), embeddings(9, 9))


def test_two_softmaxes_of_sentence_transformers_are_averaged_and_ours_added():
    theirs = ranking(directions=(QUERY_TO_DOC, "doc_to_query"), partition_mode="per_direction")
    same(itrloss.InfoNCELoss(0.05), lambda v, w: 2 * theirs(v, w), embeddings(9, 9))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("further", [0, 1, 3])
def test_hardness_is_that_of_sentence_transformers(further, engine, small_tiles):
    """Their hardness of all negatives, and those of a query are negatives of all."""
    ours = itrloss.InfoNCELoss(0.05, hardness=9.0, reduction="none", engine=engine)
    theirs = ranking(hardness_mode="all_negatives", hardness_strength=9.0)

    def rows(v, w, *negatives):
        return ours(v, w, negatives=torch.cat(negatives) if negatives else None)[0].mean()

    same(
        rows,
        theirs,
        (*embeddings(9, 9), *embeddings(9, 9, seed=1), *embeddings(9, 9, seed=2))[: 2 + further],
    )


class Model(nn.Module):
    """What their loss asks of a model, whose features are embeddings."""

    max_seq_length = 1

    def __init__(self, name: str):
        super().__init__()
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        self.name = name
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a"))
        )

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": features[self.name]}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("margin", "relative"), [(0.0, False), (0.1, False), (-0.1, False), (0.05, True)]
)
def test_the_guide_is_that_of_sentence_transformers(margin, relative, engine, small_tiles):
    """Their margin has the other sign. Their pairs of queries, and of documents, are left out."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import GISTEmbedLoss

    options: dict[str, Any] = {
        "margin": margin,
        "margin_strategy": "relative" if relative else "absolute",
    }
    models: Any = (Model("own"), Model("guide"))
    loss = GISTEmbedLoss(*models, 0.05, contrast_anchors=False, contrast_positives=False, **options)
    x, y = others(9, 9)
    y = x + y
    guide = Similarity(x, y, engine=engine)
    ours = filtered(0.05, -margin, relative, reduction="none", engine=engine)
    assert too_high(cosines(x, y), torch.eye(9).bool(), -margin, relative).sum() > 0

    def theirs(v, w):
        return loss([{"own": v, "guide": x}, {"own": w, "guide": y}], None)  # type: ignore

    same(lambda v, w: ours(v, w, guide=guide)[0].mean(), theirs, embeddings(9, 9))


@pytest.mark.parametrize("engine", ENGINES)
def test_distillation_is_that_of_sentence_transformers(engine):
    """Theirs is the divergence, without the teacher's entropy, times the square of the student's
    temperature.
    """
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import DistillKLDivLoss
    from sentence_transformers.util import pairwise_cos_sim

    loss = DistillKLDivLoss(
        None, pairwise_cos_sim, student_temperature=0.2, teacher_temperature=0.1
    )  # type: ignore
    T = cosines(*others(9, 11))
    entropy = torch.distributions.Categorical(logits=T / 0.1).entropy().mean()
    ours = itrloss.DistillationLoss(0.2, 0.1, reduction="none", engine=engine)

    def theirs(v, w):
        return loss.compute_loss_from_embeddings([v, *(text.expand_as(v) for text in w)], T)

    same(lambda v, w: 0.2**2 * (ours(v, w, T)[0].mean() - entropy), theirs, embeddings(9, 11))


def test_candidates_of_another_batch_pool_with_one_of_the_same_anchors_only():
    v, w = embeddings(4, 4)
    with pytest.raises(ValueError, match="anchors: expected as many anchors in each block"):
        Anchors.pooled(Similarity(v, w), Similarity(v[:3], w[:3]))


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
