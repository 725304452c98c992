"""RINCE and RCL against loops over pairs, written from the papers' formulas; limits, hostile input,
both engines.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.cases import ENGINES, SHAPES, embeddings, make_ids, pairwise, upstream
from support.losses_registry import where
from support.processes import both
from support.reference import matches, unit

import itrloss
from itrloss import ComplementaryContrastiveLoss, RINCELoss, Similarity


def rince_of_anchor(row, positive, temperature=0.07, q=0.5, lam=0.01):
    e = [torch.exp(s / temperature) for s in row]
    negatives = sum((x for x, p in zip(e, positive, strict=True) if not p), row.new_zeros(()))
    values = [
        -(x**q) / q + (lam * (x + negatives)) ** q / q
        for x, p in zip(e, positive, strict=True)
        if p
    ]
    return sum(values) / len(values)


def rcl_of_anchor(row, positive, temperature=0.05):
    e = [torch.exp(s / temperature) for s in row]
    return sum(
        -torch.log((1 - x / sum(e)).clamp_min(1e-6))
        for x, p in zip(e, positive, strict=True)
        if not p
    )


OF_ANCHORS = {RINCELoss: rince_of_anchor, ComplementaryContrastiveLoss: rcl_of_anchor}
LOSSES = where(lambda entry: entry.kind in OF_ANCHORS)


def dense(name, v, w, ids):
    """The values of each image and text; 0 for an anchor without a positive or without a
    negative.
    """
    entry = LOSSES[name]
    function = OF_ANCHORS[entry.kind]
    scores, positive = unit(v) @ unit(w).T, matches(ids, len(v), len(w))
    sides = []
    for s, mask in ((scores, positive), (scores.T, positive.T)):
        rows = zip(s, mask, strict=True)
        sides.append(
            [
                function(row, p, **entry.options) if p.any() and not p.all() else row.sum() * 0
                for row, p in rows
            ]
        )
    return [torch.stack(side) for side in sides]


@pytest.mark.parametrize(
    ("name", "shape", "engine"), pairwise(name=LOSSES, shape=SHAPES, engine=ENGINES)
)
def test_values_and_gradients_equal_loops_over_pairs(name, shape, engine, small_tiles, poisoned):
    n, m, kind = SHAPES[shape]
    ids, weights = make_ids(kind, n, m), upstream(n, m)
    make = LOSSES[name].make
    results = []
    for ours in (True, False):
        v, w = (x.requires_grad_() for x in embeddings(n, m))
        if not ours:
            values = dense(name, v, w, ids)
        elif engine == "scores":
            scores = Similarity(
                v, w, engine="dense", col_ids=torch.zeros(m, dtype=torch.int64)
            ).scores()
            values = make(reduction="none", engine="tiled")(
                scores=scores, image_ids=ids[0], text_ids=ids[1]
            )
        elif engine == "kept":
            sim = Similarity(v, w, *ids, engine="tiled", memory_budget=10**9)
            values = make(reduction="none")(sim)
        else:
            values = make(reduction="none", engine=engine)(v, w, *ids)
        total = sum((x * g).sum() for x, g in zip(values, weights, strict=True))
        results.append((*values, *torch.autograd.grad(total, (v, w))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LOSSES)
def test_reductions_leave_out_anchors_without_a_positive_or_a_negative(name):
    make = LOSSES[name].make
    v, w = embeddings(5, 6)
    ids = torch.tensor([0, 1, 2, 3, 99]), torch.tensor([0, 1, 2, 3, 3, 98])
    rows, cols = dense(name, v, w, ids)
    assert rows[4] == 0 and cols[5] == 0
    torch.testing.assert_close(make()(v, w, *ids), rows[:4].mean() + cols[:5].mean())
    torch.testing.assert_close(make(reduction="sum")(v, w, *ids), rows.sum() + cols.sum())


def test_rince_tends_to_infonce_for_small_q():
    """``((λ x)^q - y^q) / q`` tends to ``log(x / y) + log λ``, in each direction."""
    v, w = embeddings(9, 12)
    ids = make_ids("captions", 4, 12)[1] % 9
    rows = torch.arange(9)
    info = itrloss.InfoNCELoss(0.1, reduction="none")(v, w, rows, ids)
    for lam in (1.0, 0.01):
        loss = RINCELoss(0.1, 1e-7, lam, reduction="none")(v, w, rows, ids)
        for a, b in zip(loss, info, strict=True):
            torch.testing.assert_close(
                a, torch.where(b == 0, b, b + math.log(lam)), rtol=1e-5, atol=1e-5
            )


def test_rince_of_q_1_is_a_sum_of_exponentials():
    """``λ sum_j e^(s_j) - (1 - λ) e^(s+)``: the symmetric loss of Chuang et al., Eq. 7."""
    v, w = embeddings(7, 7)
    e = (5 * Similarity(v, w).scores()).exp()
    wanted = [0.1 * (e.sum(dim) - e.diagonal()) - 0.9 * e.diagonal() for dim in (1, 0)]
    torch.testing.assert_close(RINCELoss(0.2, 1.0, 0.1, reduction="none")(v, w), tuple(wanted))


def share_of_the_wrong_pair(make):
    """Share of the pull on positives that goes to the one pair that does not match."""
    scores = torch.full((8, 8), 0.1).fill_diagonal_(0.6)
    scores[3, 3] = 0.0
    scores.requires_grad_()
    make(scores=scores).backward()
    pull = -scores.grad.diagonal()
    return float(pull[3] / pull.sum())


def test_a_wrong_pair_pulls_less_than_with_infonce():
    plain = share_of_the_wrong_pair(itrloss.InfoNCELoss(0.1))
    assert plain > 0.7
    falling = [share_of_the_wrong_pair(RINCELoss(0.1, q)) for q in (0.1, 0.3, 0.5, 1.0)]
    assert falling == sorted(falling, reverse=True) and falling[0] < plain and falling[-1] < 0.01
    assert share_of_the_wrong_pair(ComplementaryContrastiveLoss(0.1)) < 0.2 < plain


def test_a_negative_that_has_all_of_the_probability_stays_finite():
    scores = torch.tensor([[-1.0, 1.0], [1.0, -1.0]])
    for temperature in (0.05, 1e-3, 1e-6):
        s = scores.clone().requires_grad_()
        value = ComplementaryContrastiveLoss(temperature)(scores=s)
        value.backward()
        torch.testing.assert_close(value.item(), -2 * math.log(1e-6))
        assert s.grad.isfinite().all()
    value = ComplementaryContrastiveLoss(1e-3)(scores=-scores)
    assert value == 0


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "loss",
    [
        RINCELoss(0.0072),
        RINCELoss(0.0144, q=1.0),
        RINCELoss(50.0),
        ComplementaryContrastiveLoss(1e-3),
    ],
    ids=str,
)
def test_hostile_input_stays_finite(loss, dtype, engine):
    v = torch.cat([torch.zeros(2, 8), torch.ones(3, 8), torch.eye(8)[:3], -torch.ones(2, 8)]).to(
        dtype
    )
    loss.engine = engine
    for ids in ((None, None), *(make_ids(kind, 10, 10) for kind in ("random", "same", "disjoint"))):
        a, b = v.clone().requires_grad_(), v.flip(0).clone().requires_grad_()
        value = loss(a, b, *ids)
        # gradients of e^(q / temperature)
        scaled = dtype == torch.float16 and isinstance(loss, RINCELoss)
        (value * math.exp(-loss.q / loss.temperature) if scaled else value).backward()
        assert value.isfinite() and value.dtype == torch.float32
        assert a.grad.dtype == dtype and a.grad.isfinite().all() and b.grad.isfinite().all()
        assert (a.grad[:2] == 0).all()


@pytest.mark.parametrize(
    "loss", [RINCELoss(), ComplementaryContrastiveLoss()], ids=["rince", "rcl"]
)
def test_scores_of_any_size_stay_finite(loss):
    for scores in (1e4 * torch.eye(4), -1e4 * torch.eye(4), torch.zeros(4, 4)):
        scores.requires_grad_()
        value = loss(scores=scores)
        value.backward()
        assert value.isfinite() and scores.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_float32_is_close_to_float64(name):
    make = LOSSES[name].make
    results = []
    for dtype in (torch.float32, torch.float64):
        v, w = (x.requires_grad_() for x in embeddings(64, 64, d=32, dtype=dtype))
        value = make()(v, w)
        results.append((value.double(), torch.autograd.grad(value, v)[0].double()))
    (found, gradient), (wanted, exact) = results
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert (gradient - exact).norm() < 1e-5 * exact.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"), [("rince", "dense"), ("complementary soft", "tiled"), ("rince", "tiled")]
)
def test_compiles_as_one_graph(name, engine):
    make = LOSSES[name].make
    loss, ids = make(engine=engine), make_ids("random", 8, 11)
    torch._dynamo.reset()
    results = []
    compiled = torch.compile(loss, fullgraph=engine != "tiled", backend="aot_eager")
    for f in (loss, compiled):
        v, w = (x.requires_grad_() for x in embeddings(8, 11, dtype=torch.float32))
        value = f(v, w, *ids)
        results.append((value, *torch.autograd.grad(value, (v, w))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def in_a_process(rank: int, size: int):
    """Values and gradients of this process's part of the batch, with all losses."""
    v, w = embeddings(size, size)
    ids, cut = torch.arange(size) % 5, size // 3  # batches of two sizes
    own = slice(0, cut) if rank == 0 else slice(cut, None)
    found = []
    for entry in LOSSES.values():
        x, y = (t[own].clone().requires_grad_() for t in (v, w))
        value = entry.make(gather=True)(x, y, ids[own], ids[own])
        found.append([value.detach(), *torch.autograd.grad(value, (x, y))])
    return found


def test_processes_share_a_batch(tmp_path):
    v, w = (x.requires_grad_() for x in embeddings(9, 9))
    ids = torch.arange(9) % 5
    for entry, parts in zip(
        LOSSES.values(), zip(*both(in_a_process, tmp_path, 9), strict=True), strict=True
    ):
        value = entry.make()(v, w, ids, ids)
        grads = torch.autograd.grad(value, (v, w))
        for part in parts:
            torch.testing.assert_close(part[0], value.detach())
        for k, grad in enumerate(grads, 1):  # the mean over processes is that of one
            torch.testing.assert_close(
                torch.cat([part[k] for part in parts]) / 2, grad, rtol=1e-9, atol=1e-12
            )


def test_options_are_checked_by_name():
    for call, words in (
        (lambda: RINCELoss(q=1.5), "q: expected a number above 0 and at most 1, got 1.5"),
        (lambda: RINCELoss(q=0.0), "q: expected a number above 0"),
        (lambda: RINCELoss(lam=2.0), "lam: expected a number above 0 and at most 1, got 2.0"),
        (lambda: RINCELoss(lam=0.0), "lam: expected a number above 0"),
        (lambda: RINCELoss(0.005), "temperature: expected at least q / 70 = 0.0071"),
        (lambda: ComplementaryContrastiveLoss(0.0), "temperature: expected a number above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    loss = RINCELoss()
    with pytest.raises(ValueError, match="q: expected a number above 0 and at most 1, got 2"):
        loss.q = 2
    assert loss.q == 0.5
    loss.temperature = 0.005  # q may follow
    with pytest.raises(ValueError, match="temperature: expected at least q / 70"):
        loss(torch.eye(4), torch.eye(4))
    loss = RINCELoss()
    assert repr(loss) == "RINCELoss(temperature=0.07, q=0.5, lam=0.01, reduction='mean')"


def test_wrong_pairs_that_are_nearly_certain_have_accurate_gradients():
    """Where 1 - p is 1e-4 or less, it is no difference of rounded numbers."""
    generator = torch.Generator().manual_seed(0)
    v, noise = (torch.randn(64, 32, generator=generator, dtype=torch.float64) for _ in range(2))
    w = v + 0.3 * noise
    w[:16] = w[:16].roll(1, 0)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        x = v.to(dtype).requires_grad_()
        ComplementaryContrastiveLoss(0.05)(x, w.to(dtype)).backward()
        gradients.append(x.grad.double())
    found, exact = gradients
    assert (found - exact).norm() < 0.01 * exact.norm()  # 0.04 from the log-sum-exp alone
