"""Means and standard deviations from D x D numbers in place of all scores."""

from __future__ import annotations

import pytest
import torch
from support.cases import embeddings, make_ids, pairwise
from support.flops import Products
from support.reference import Reference

import itrloss
from itrloss import Anchors, Similarity
from itrloss.engine import moments
from itrloss.engine.inputs import Inputs, Side
from itrloss.engine.pairs import IGNORE_ID, Pairs
from itrloss.engine.question import Question
from itrloss.engine.terms import identity, square
from itrloss.memory import MemorySimilarity


@pytest.fixture
def by_numbers(monkeypatch):
    """Sums from D x D numbers at all sizes; whether they were asked for is checked afterwards."""
    asked = []
    original = moments.sums

    def seen(*args):
        asked.append(args)
        return original(*args)

    monkeypatch.setattr(moments, "has_gain", lambda *_: True)
    monkeypatch.setattr(moments, "sums", seen)
    yield
    assert asked


def kept(v, w, *ids, **options):
    """A similarity that holds its scores, although there are few."""
    sim = Similarity(v, w, *ids, engine="tiled", memory_budget=10**9, **options)
    sim._matrix.in_graph = False
    return sim


def weighted(mean, std):
    """A number that depends on all moments."""
    weights = torch.linspace(-1, 2, len(mean), dtype=mean.dtype)
    return (mean * weights).sum() + (std * weights.flip(0)).sum()


def moments_and_gradients(anchors, leaves):
    mean, std = anchors.mean_std()
    gradients = torch.autograd.grad(weighted(mean, std), leaves)
    return [x.double() for x in (mean, std, *gradients)]


VIEWS = {
    "rows": lambda sim: sim,
    "columns": lambda sim: sim.T,
    "both": lambda sim: sim.both,
}


@pytest.mark.parametrize(
    ("kind", "view", "make", "dtype"),
    pairwise(
        kind=[None, "random", "captions", "disjoint", "strided", "ignored"],
        view=VIEWS,
        make=["tiled", "kept"],
        dtype=[torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_moments_and_gradients_are_the_references(kind, view, make, dtype, by_numbers):
    n = 24
    m = n if kind is None else 2 * n
    v, w = embeddings(n, m, dtype=dtype)
    ids = make_ids("random" if kind == "ignored" else kind, n, m)
    if kind == "ignored":
        ids[0][3], ids[1][5] = IGNORE_ID, IGNORE_ID
    v = v.requires_grad_()
    w = w.requires_grad_()
    sim = kept(v, w, *ids) if make == "kept" else Similarity(v, w, *ids, engine="tiled")
    found = moments_and_gradients(VIEWS[view](sim), (v, w))
    x, y = (leaf.detach().double().requires_grad_() for leaf in (v, w))
    reference = Reference.of(x, y, ids)
    if kind == "ignored":
        ((scores, positive),) = reference.groups
        positive = positive.clone()
        positive[3] = True
        positive[:, 5] = True
        reference = Reference((scores, positive))
    reference = reference.T if view == "columns" else reference
    reference = reference.both if view == "both" else reference
    exact = moments_and_gradients(reference, (x, y))
    for a, b in zip(found[:2], exact[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    rough = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for a, b in zip(found[2:], exact[2:], strict=True):
        assert (a - b).norm() <= rough * b.norm()


def test_blocks_of_a_gallery_have_the_moments_of_the_whole(by_numbers):
    v, w = embeddings(9, 20, dtype=torch.float32)
    ids = torch.arange(9), torch.arange(20) % 9
    blocks = [
        Similarity(v, x, ids[0], i, engine="tiled")
        for x, i in zip(w.split(7), ids[1].split(7), strict=True)
    ]
    found = Anchors.pooled(*blocks).mean_std()
    exact = Reference.of(v.double(), w.double(), ids).mean_std()
    torch.testing.assert_close(found.mean.double(), exact.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.std.double(), exact.std, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("labelled", [False, True])
def test_a_memory_with_empty_places_has_the_moments_of_its_entries(labelled, by_numbers):
    v, w = embeddings(8, 8, dtype=torch.float32)
    v.requires_grad_()
    w.requires_grad_()
    memory = itrloss.CoupledMemory(20, 6)
    keys = embeddings(13, 13, seed=3, dtype=torch.float32)
    ids = torch.arange(8) if labelled else None
    memory.enqueue(*keys, torch.arange(13) % 10 if labelled else None)
    sims = MemorySimilarity.of(v, w, v, w, memory, ids, ids, engine="tiled")
    found = moments_and_gradients(sims.memory, (v, w))
    x, y = (leaf.detach().double().requires_grad_() for leaf in (v, w))
    own_ids = torch.arange(8) if labelled else -torch.arange(8) - 1
    known = memory.ids[:13]
    first = Reference.of(x, memory.texts[:13].double(), (own_ids, known))
    second = Reference.of(y, memory.images[:13].double(), (own_ids, known))
    exact = moments_and_gradients(Reference(*first.groups, *second.groups), (x, y))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------- precision


def around(direction, count, distance, seed=0):
    """Unit vectors (count, D) about so far from one direction."""
    generator = torch.Generator().manual_seed(seed)
    away = torch.randn(count, len(direction), generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(direction + distance * away / len(direction) ** 0.5)


def hostile(case):
    """Rows, columns and ids in float64 that cost sums of squares their digits."""
    direction = torch.nn.functional.normalize(torch.ones(16, dtype=torch.float64), dim=0)
    rows = around(direction, 8, 0.3, seed=1)
    ids = torch.arange(8)
    if case == "candidates almost equal":
        return rows, around(direction, 4000, 1e-5), (ids, torch.arange(4000) + 8)
    if case == "candidates equal":
        return rows, direction.expand(4000, -1).clone(), (ids, torch.arange(4000) + 8)
    if case == "mean near 1":
        return around(direction, 8, 0.01), around(direction, 4000, 0.01), (ids, ids.new_ones(4000))
    if case == "one candidate":
        return rows, rows[:1], (ids, ids[:1] + 8)
    if case == "many candidates":
        return rows, around(direction, 2**20, 0.5), (ids, torch.arange(2**20) + 8)
    if case == "scores all alike":  # the candidates differ, but not along the rows
        away = around(direction, 4000, 1.0)
        away = away - (away @ direction)[:, None] * direction
        cols = torch.nn.functional.normalize(direction + torch.nn.functional.normalize(away))
        return direction.expand(8, -1).clone(), cols, (ids, torch.arange(4000) + 8)
    if case == "positives far above":
        cols = torch.cat([around(-direction, 400, 1e-3), around(direction, 60, 1e-3)])
        return rows, cols, (torch.zeros(8, dtype=torch.int64), (torch.arange(460) < 400).long())
    assert case == "few negatives"
    cols = torch.cat([around(direction, 60, 0.5), around(direction, 3, 1e-3)])
    return rows, cols, (torch.zeros(8, dtype=torch.int64), (torch.arange(63) >= 60).long())


HOSTILE = [
    "candidates almost equal",
    "candidates equal",
    "mean near 1",
    "one candidate",
    "many candidates",
    "scores all alike",
    "positives far above",
    "few negatives",
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] if case == "many candidates" else [])
        for case in HOSTILE
    ],
)
def test_as_precise_as_a_pass_over_the_scores(case, monkeypatch):
    rows, cols, ids = hostile(case)
    exact = Reference.of(rows, cols, ids).mean_std()
    errors = []
    for way in (True, False):
        monkeypatch.setattr(moments, "has_gain", lambda *_, way=way: way)
        found = Similarity(rows.float(), cols.float(), *ids, engine="tiled").mean_std()
        errors.append([(a.double() - b).abs().max() for a, b in zip(found, exact, strict=True)])
    for by_numbers, by_pass in zip(*errors, strict=True):
        assert by_numbers <= by_pass + 1.2e-7


def test_no_negatives_leave_no_rounding(by_numbers):
    v, w = embeddings(12, 30, dtype=torch.float32)
    v.requires_grad_()
    ids = torch.arange(12) // 6, torch.zeros(30, dtype=torch.int64)
    mean, std = Similarity(v, w, *ids, engine="tiled").mean_std()
    assert mean[:6].eq(0).all()
    assert torch.allclose(std[:6], torch.tensor(1e-6))
    (gradient,) = torch.autograd.grad(mean.sum() + std.sum(), v)
    assert gradient[:6].eq(0).all()
    assert gradient[6:].abs().sum() > 0


# ---------------------------------------------------------------------------------- work and memory


def multiplied(anchors):
    with Products() as products:
        anchors.mean_std()
    return products.flops // 2


def test_many_scores_are_not_multiplied_out():
    n, m, d = 300, 500, 8
    v, w = embeddings(n, m, d, dtype=torch.float32)
    ids = torch.arange(n), torch.arange(m)
    sim = Similarity(v, w, *ids, engine="tiled")
    assert multiplied(sim.both) == 2 * (n + m) * d * d
    assert multiplied(sim) == (n + m) * d * d


def test_scores_that_are_at_hand_are_used():
    """Of large dimensions; a pass multiplies nothing then."""
    sim = kept(*embeddings(64, 64, 128, dtype=torch.float32))
    sim.logsumexp(1.0)
    assert multiplied(sim.both) == 0


def question_of(n, m, ids=(None, None)):
    pairs = Pairs((n, m), ids, torch.device("cpu"))
    return Question(pairs, (0,), (identity, square))


def test_a_product_of_scores_counts_unless_they_are_held():
    assert moments.has_gain(question_of(1000, 1000), 200, False)
    assert not moments.has_gain(question_of(1000, 1000), 200, True)


def test_many_positives_are_not_taken_out():
    n, m, d = 300, 500, 8
    v, w = embeddings(n, m, d, dtype=torch.float32)
    for ids in (
        (torch.arange(n) % 2, torch.arange(m) % 2),  # 250 positives of an anchor, half of all
        (torch.arange(n) * 0, (torch.arange(m) >= 100).long()),  # 100
    ):
        assert multiplied(Similarity(v, w, *ids, engine="tiled")) == n * m * d
    few = torch.zeros(8, dtype=torch.int64), torch.arange(15) // 10  # ten of fifteen
    assert not moments.answers(question_of(8, 15, few))


def test_sums_without_negatives_are_exactly_zero():
    v, w = embeddings(6, 9, dtype=torch.float32)
    ids = torch.tensor([0, 1, 0, IGNORE_ID, 0, 1]), torch.zeros(9, dtype=torch.int64)
    sides = [Side(None, None, x, None) for x in (v, w)]
    found = moments.sums(question_of(6, 9, ids), Inputs(*sides, None))
    assert found[:, [0, 2, 3, 4]].eq(0).all()
    assert found[:, [1, 5]].ne(0).all()


@pytest.mark.parametrize("bias", [False, True])
def test_double_precision_and_biases_visit_the_scores(bias):
    n, d = 300, 4
    v, w = embeddings(n, n, d, dtype=torch.float32 if bias else torch.float64)
    biases = (torch.rand(n), None) if bias else None
    sim = Similarity(v, w, engine="tiled", bias=biases)
    assert multiplied(sim.both) == n * n * d


def test_nothing_is_saved_but_the_embeddings(by_numbers):
    v, w = (x.requires_grad_() for x in embeddings(200, 300, 4, dtype=torch.float32))
    seen = {}

    def pack(x):
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    ids = torch.arange(200), torch.arange(300)
    sim = Similarity(v, w, *ids, engine="tiled")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        sim.both.mean_std()
    for x in (v, w):
        seen.pop(x.untyped_storage().data_ptr())
    # inverse norms, shifts, ids, pairs and some numbers of each anchor
    assert sum(seen.values()) <= 30 * 8 * (200 + 300)


def test_second_derivatives(by_numbers):
    v, w = embeddings(7, 7, dtype=torch.float32)
    found = []
    for make in (kept, Reference.of):
        dtype = torch.float32 if make is kept else torch.float64
        x, y = (leaf.to(dtype).requires_grad_() for leaf in (v, w))
        total = weighted(*(make(x, y).both).mean_std())
        (first,) = torch.autograd.grad(total, x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (x, y)))
    for a, b in zip(*found, strict=True):
        assert (a.double() - b).norm() <= 1e-4 * b.norm()
