"""Means and standard deviations from D x D numbers in place of all scores."""

from __future__ import annotations

import pytest
import torch
from support.cases import embeddings, make_ids, pairwise
from support.flops import Products
from support.reference import Reference
from torch.nn.functional import normalize

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
    """The means, the standard deviations, and the gradients of a number of both."""
    mean, std = anchors.mean_std()
    gradients = torch.autograd.grad(weighted(mean, std), leaves)
    return [x.double() for x in (mean, std, *gradients)]


def in_double(*vectors):
    """Leaves in float64."""
    return [x.detach().double().requires_grad_() for x in vectors]


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
    row_ids, col_ids = make_ids("random" if kind == "ignored" else kind, n, m)
    if kind == "ignored":
        row_ids[3] = IGNORE_ID
        col_ids[5] = IGNORE_ID
    v = v.requires_grad_()
    w = w.requires_grad_()
    if make == "kept":
        sim = kept(v, w, row_ids, col_ids)
    else:
        sim = Similarity(v, w, row_ids, col_ids, engine="tiled")
    found_mean, found_std, *found = moments_and_gradients(VIEWS[view](sim), (v, w))

    x, y = in_double(v, w)
    reference = Reference.of(x, y, (row_ids, col_ids))
    if kind == "ignored":
        reference = without_negatives(reference, row=3, column=5)
    mean, std, *exact = moments_and_gradients(VIEWS[view](reference), (x, y))
    torch.testing.assert_close(found_mean, mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found_std, std, rtol=1e-5, atol=1e-6)
    rough = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for gradient, wanted in zip(found, exact, strict=True):
        assert (gradient - wanted).norm() <= rough * wanted.norm()


def without_negatives(reference, row, column):
    """The reference where a row and a column are no negatives of any."""
    ((scores, positive),) = reference.groups
    positive = positive.clone()
    positive[row] = True
    positive[:, column] = True
    return Reference((scores, positive))


def test_blocks_of_a_gallery_have_the_moments_of_the_whole(by_numbers):
    v, w = embeddings(9, 20, dtype=torch.float32)
    row_ids = torch.arange(9)
    col_ids = torch.arange(20) % 9
    blocks = []
    for texts, text_ids in zip(w.split(7), col_ids.split(7), strict=True):
        blocks.append(Similarity(v, texts, row_ids, text_ids, engine="tiled"))
    found = Anchors.pooled(*blocks).mean_std()
    reference = Reference.of(v.double(), w.double(), (row_ids, col_ids))
    exact = reference.mean_std()
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
    key_ids = torch.arange(13) % 10 if labelled else None
    memory.enqueue(*keys, key_ids)
    sims = MemorySimilarity.of(v, w, v, w, memory, ids, ids, engine="tiled")
    found = moments_and_gradients(sims.memory, (v, w))
    x, y = in_double(v, w)
    own_ids = torch.arange(8) if labelled else -torch.arange(8) - 1
    matches = (own_ids, memory.ids[:13])
    first = Reference.of(x, memory.texts[:13].double(), matches)
    second = Reference.of(y, memory.images[:13].double(), matches)
    together = Reference(*first.groups, *second.groups)
    exact = moments_and_gradients(together, (x, y))
    for got, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------- precision


def around(direction, count, distance, seed=0):
    """Unit vectors (count, D) about so far from one direction."""
    dim = len(direction)
    generator = torch.Generator().manual_seed(seed)
    away = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    return normalize(direction + distance * away / dim**0.5)


def hostile(case):
    """Rows, columns and ids in float64 that cost sums of squares their digits."""
    direction = normalize(torch.ones(16, dtype=torch.float64), dim=0)
    if case in ("positives far above", "few negatives"):
        return of_one_class(case, direction)
    rows = around(direction, 8, 0.3, seed=1)
    if case == "candidates almost equal":
        cols = around(direction, 4000, 1e-5)
    elif case == "candidates equal":
        cols = direction.expand(4000, -1).clone()
    elif case == "mean near 1":
        rows = around(direction, 8, 0.01)
        cols = around(direction, 4000, 0.01)
        return rows, cols, (torch.arange(8), torch.ones(4000, dtype=torch.int64))
    elif case == "one candidate":
        cols = rows[:1]
    elif case == "many candidates":
        cols = around(direction, 2**20, 0.5)
    else:
        assert case == "scores all alike"  # the candidates differ, but not along the rows
        rows = direction.expand(8, -1).clone()
        away = around(direction, 4000, 1.0)
        along = (away @ direction)[:, None] * direction
        cols = normalize(direction + normalize(away - along))
    only_negatives = (torch.arange(8), torch.arange(len(cols)) + 8)
    return rows, cols, only_negatives


def of_one_class(case, direction):
    """The same where all rows have id 0, as have most of the columns, or few."""
    rows = around(direction, 8, 0.3, seed=1)
    if case == "positives far above":
        cols = torch.cat([around(-direction, 400, 1e-3), around(direction, 60, 1e-3)])
        is_negative = torch.arange(460) < 400
    else:
        cols = torch.cat([around(direction, 60, 0.5), around(direction, 3, 1e-3)])
        is_negative = torch.arange(63) >= 60
    return rows, cols, (torch.zeros(8, dtype=torch.int64), is_negative.long())


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

    def largest_errors(has_gain):
        """Those of the means and of the standard deviations."""
        monkeypatch.setattr(moments, "has_gain", lambda *_: has_gain)
        found = Similarity(rows.float(), cols.float(), *ids, engine="tiled").mean_std()
        of_mean = (found.mean.double() - exact.mean).abs().max()
        of_std = (found.std.double() - exact.std).abs().max()
        return of_mean, of_std

    of_mean, of_std = largest_errors(has_gain=True)
    of_mean_by_a_pass, of_std_by_a_pass = largest_errors(has_gain=False)
    assert of_mean <= of_mean_by_a_pass + 1.2e-7
    assert of_std <= of_std_by_a_pass + 1.2e-7


def test_no_negatives_leave_no_rounding(by_numbers):
    v, w = embeddings(12, 30, dtype=torch.float32)
    v.requires_grad_()
    ids = (torch.arange(12) // 6, torch.zeros(30, dtype=torch.int64))
    sim = Similarity(v, w, *ids, engine="tiled")
    mean, std = sim.mean_std()
    assert mean[:6].eq(0).all()
    assert torch.allclose(std[:6], torch.tensor(1e-6))
    (gradient,) = torch.autograd.grad(mean.sum() + std.sum(), v)
    assert gradient[:6].eq(0).all()
    assert gradient[6:].abs().sum() > 0


# ---------------------------------------------------------------------------------- work and memory


def multiplied(anchors):
    """The number of multiplications that the moments take."""
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
    """The question for sums and sums of squares over the rows' negatives."""
    pairs = Pairs((n, m), ids, torch.device("cpu"))
    return Question(pairs, (0,), (identity, square))


def test_a_product_of_scores_counts_unless_they_are_held():
    assert moments.has_gain(question_of(1000, 1000), 200, False)
    assert not moments.has_gain(question_of(1000, 1000), 200, True)


def test_many_positives_are_not_taken_out():
    n, m, d = 300, 500, 8
    v, w = embeddings(n, m, d, dtype=torch.float32)
    half_of_all = (torch.arange(n) % 2, torch.arange(m) % 2)  # 250 positives of an anchor
    hundred = (torch.zeros(n).long(), (torch.arange(m) >= 100).long())
    for ids in (half_of_all, hundred):
        sim = Similarity(v, w, *ids, engine="tiled")
        assert multiplied(sim) == n * m * d
    ten_of_fifteen = (torch.zeros(8).long(), torch.arange(15) // 10)
    assert not moments.answers(question_of(8, 15, ten_of_fifteen))


def test_sums_without_negatives_are_exactly_zero():
    v, w = embeddings(6, 9, dtype=torch.float32)
    row_ids = torch.tensor([0, 1, 0, IGNORE_ID, 0, 1])
    col_ids = torch.zeros(9, dtype=torch.int64)
    question = question_of(6, 9, (row_ids, col_ids))
    rows = Side(None, None, v, None)
    cols = Side(None, None, w, None)
    found = moments.sums(question, Inputs(rows, cols, None))
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
        storage = x.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return x

    ids = (torch.arange(200), torch.arange(300))
    sim = Similarity(v, w, *ids, engine="tiled")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        sim.both.mean_std()
    for x in (v, w):
        seen.pop(x.untyped_storage().data_ptr())
    # inverse norms, shifts, ids, pairs and some numbers of each anchor
    assert sum(seen.values()) <= 30 * 8 * (200 + 300)


def test_second_derivatives(by_numbers):
    v, w = embeddings(7, 7, dtype=torch.float32)
    x, y = in_double(v, w)

    def second_derivatives(anchors, rows, cols):
        """The gradients of the squared gradient by the rows."""
        mean, std = anchors.mean_std()
        (first,) = torch.autograd.grad(weighted(mean, std), rows, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (rows, cols))

    v.requires_grad_()
    w.requires_grad_()
    found = second_derivatives(kept(v, w).both, v, w)
    exact = second_derivatives(Reference.of(x, y).both, x, y)
    for got, wanted in zip(found, exact, strict=True):
        assert (got.double() - wanted).norm() <= 1e-4 * wanted.norm()
