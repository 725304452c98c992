"""The Triton engine against the float64 reference of the tests: on a GPU if there is one, else in
its interpreter.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from support import losses_registry
from support.answers import ANSWERS, TOTALS, evaluate, evaluate_total, parameters
from support.cases import SHAPES, each, embeddings, finite, make_ids, pairwise, similarity, upstream
from support.interpreter import TILE, a_quick_interpreter  # noqa: F401 (a fixture)
from support.processes import both
from support.reference import formula, unit
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import itrloss
from itrloss import NO_ID, Related, Similarity
from itrloss.engine import terms, tiled, vectors
from itrloss.engine.inputs import Inputs, Side
from itrloss.engine.matrix import Matrix
from itrloss.engine.pairs import IGNORE_ID, Numbers, Pairs
from itrloss.engine.question import Question
from itrloss.engine.relations import Labels, RelatedPairs
from itrloss.engine.terms import pair_term
from itrloss.functional import info_nce_loss, sigmoid_loss, triplet_loss
from itrloss.related import related_pairs

pytest.importorskip("triton")
import triton
import triton.language as tl

from itrloss.engine import kernels, trial
from itrloss.engine import triton as engine

# Warnings come from masked lanes, whose results are not stored.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero|All-NaN slice) encountered:RuntimeWarning"
)
DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture
def multiplying(monkeypatch):
    """Let kernels multiply float32 embeddings, too, so that rounding hides no errors."""
    monkeypatch.setattr(engine, "fused", lambda rows, cols: True)


def moved(*given):
    return [None if x is None else x.to(DEVICE) for x in given]


def compare(name, shape, view=lambda s: s.both, on_scores=False, **options):
    """Compare errors with those of PyTorch in float32, dense in two orders of sums and in tiles.

    A single order may have no rounding error at all, as on some processors for the few negatives of
    "no positive".
    """
    n, m, kind = SHAPES[shape]
    ids, (v, w), grads = make_ids(kind, n, m), embeddings(n, m, dtype=torch.float32), upstream(n, m)
    question = ANSWERS[name]
    exact = evaluate(question, v.double(), w.double(), ids, "reference", grads, view, **options)
    dense = evaluate(question, v, w, ids, "dense", grads, view, **options)
    values, slopes = evaluate(question, v.flip(1), w.flip(1), ids, "dense", grads, view, **options)
    turned = values, [x.flip(1) if x.dim() == 2 else x for x in slopes]
    tiled = evaluate(question, v, w, ids, "tiled", grads, view, **options)

    def asked(a, p):
        return question(Similarity.from_scores(a.scores(), *moved(*ids), engine="triton"), p)

    given = *moved(v, w), moved(*ids)
    if on_scores:
        ours = evaluate(asked, *given, "dense", grads, view, **options)
    else:
        ours = evaluate(question, *given, "triton", grads, view, **options)
    for got, *others, wanted in zip(
        *((*x[0], *x[1]) for x in (ours, dense, turned, tiled, exact)), strict=True
    ):
        finite, got = wanted.isfinite(), got.cpu()
        assert torch.equal(got.isfinite(), finite)
        error, *noise = ((x.double() - wanted)[finite].norm() for x in (got, *others))
        assert error <= 4 * max(noise) + 2e-6 * wanted[finite].norm() + 1e-7


# Answers without a function here are computed by others, or not by the engine.
OTHERS = (
    "hardest",
    "log1p",
    "log1p relu",
    "likelihood",
    "hinge",
    "straight lines",
    "plane of negatives",
)
ASKED = [
    name
    for name in ANSWERS
    if "positives" not in name and name not in OTHERS and "alone" not in name
]
VIEWS = {"rows": lambda s: s, "columns": lambda s: s.T, "both": lambda s: s.both}


def all_answers_of_all_shapes():
    """Return cases that cover all pairs of values; one of each answer, by each kind of kernel, is
    not slow.
    """
    cases, seen = [], set()
    for name, shape, fused, view in pairwise(
        name=ASKED, shape=SHAPES, fused=[True, False], view=VIEWS
    ):
        quick = (name, fused) not in seen and SHAPES[shape][0] > 1
        seen |= {(name, fused)} if quick else set()
        cases.append(
            pytest.param(name, shape, fused, view, marks=[] if quick else pytest.mark.slow)
        )
    return cases


@pytest.mark.parametrize(("name", "shape", "fused", "view"), all_answers_of_all_shapes())
def test_all_answers_of_all_shapes(name, shape, fused, view, few_tiles, poisoned, monkeypatch):
    """Kernels that multiply, also float32 embeddings so that rounding hides no errors; and ones
    that read products.
    """
    monkeypatch.setattr(engine, "fused", lambda rows, cols: fused)
    compare(name, shape, VIEWS[view])


@pytest.mark.parametrize(
    "name", ["logsumexp per anchor", "std", "hinge sum", "softplus of negatives"]
)
def test_of_a_matrix_that_exists(name, few_tiles, poisoned):
    compare(name, "five captions", VIEWS["rows"], on_scores=True)


@pytest.mark.parametrize(("view", "on_scores"), [("rows", True), ("both", False)])
def test_many_positives_by_some_at_a_time(
    view, on_scores, multiplying, few_tiles, poisoned, monkeypatch
):
    """More shifts than are summed along with a panel: 5 of a row, in slices of 2 and one of 1."""
    monkeypatch.setattr(engine, "SLOTS", 2)
    compare("hinge sum", "five captions", VIEWS[view], on_scores=on_scores)


@pytest.mark.parametrize("trained", ["all", "scale", "shift"])
def test_gradients_of_many_shifts(trained, multiplying, few_tiles, poisoned, monkeypatch):
    """They are the same, and those of the scale and of the embeddings, however many at a time."""
    n, m = 7, 18
    inputs = Inputs(
        *[Side(x, None, None, None) for x in moved(*embeddings(n, m, dtype=torch.float32))], None
    )
    shift = torch.linspace(-2, 2, 5 * (n + m)).view(n + m, 5).T.contiguous().to(DEVICE)
    scale = torch.linspace(0.5, 1.5, n + m).to(DEVICE)
    pairs = Pairs((n, m), moved(*make_ids("random", n, m)), DEVICE)
    question = Question(pairs, (0, 1), (terms.softplus,), scale=scale, shift=shift)
    grad = torch.linspace(-1, 1, n + m).to(DEVICE)
    needs = tiled.Needs(
        *[trained == "all"] * 2, False, False, scale=trained != "shift", shift=trained != "scale"
    )
    found = []
    for some in (16, 5, 4, 1):
        monkeypatch.setattr(engine, "SLOTS", some)
        gradients = engine.gradients(question, inputs, grad, needs, None)
        found.append([x for x in gradients if isinstance(x, torch.Tensor)])
    assert len(found[0]) == {"all": 4}.get(trained, 1)
    for others in found[1:]:
        for got, wanted in zip(others, found[0], strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("normalize", [False])
def test_of_embeddings_as_they_are(normalize, multiplying, few_tiles, poisoned):
    compare("logsumexp", "primes", normalize=normalize)


# The terms of a question, and which of its values get a gradient.
ASKED_TERMS = {
    "exponential": ((terms.exponential,), {"scale": True}),
    "moments": ((terms.identity, terms.square), {"shift": True}),
    "entropy": ((terms.exponential, terms.information), {}),
    "excess": ((terms.excess,), {"shift": True}),
    "softplus": ((terms.softplus,), {"scale": True, "shift": True}),
    "square": ((terms.square,), {"scale": True, "shift": True}),
    "identity": ((terms.identity,), {"scale": True, "shift": True}),
    "log1p": ((terms.log1p_clamp,), {"scale": True}),
    "log1p relu": ((terms.log1p_relu,), {"shift": True}),
}


@pytest.mark.parametrize(
    ("key", "over", "shared", "sides"),
    each(
        key=[*ASKED_TERMS] * 6,
        over=["negatives", "all", "positives"],
        shared=[True, False],
        sides=[(0, 1), (0,), (0, 1), (1,), (0, 1)],
    ),
)
def test_functions_over_pairs_with_ignored_ids(
    key, over, shared, sides, multiplying, few_tiles, poisoned
):
    """Gradients by the values are included, compared with the tiled engine in float64."""
    n, m = 7, 18
    (v, w), (row_ids, col_ids) = embeddings(n, m), make_ids("random", n, m)
    row_ids[2], col_ids[5], col_ids[17] = IGNORE_ID, IGNORE_ID, IGNORE_ID
    anchors = sum((n, m)[side] for side in sides)
    asked_terms, trained = ASKED_TERMS[key]
    scale = torch.linspace(0.3, 2, 1 if shared else anchors).double()
    shift = scale / 2 - 1
    if key == "log1p":  # its slope is steep near -1, and 0 below
        scale = scale / 4
        shift = scale / 2
        shift[:2] = -5
    if key == "excess":  # slots, the last of which is unused
        scale = 1.0
        shift = torch.stack([1 - shift, 0.5 - shift, shift - torch.inf])
        shift = shift.expand(3, anchors)
    grad = torch.linspace(-1, 2, len(asked_terms) * anchors).double().view(-1, anchors)
    needs = tiled.Needs(True, True, False, False, **trained)
    found = []
    for dtype, device in ((torch.float64, "cpu"), (torch.float32, DEVICE)):
        x, y, g, b = (z.to(device, dtype) for z in (v, w, grad, shift))
        a = scale.to(device, dtype) if isinstance(scale, torch.Tensor) else scale
        ids = row_ids.to(device), col_ids.to(device)
        inv = [1 / z.norm(dim=1, keepdim=True) for z in (x, y)]
        inputs = Inputs(Side(x, inv[0], None, None), Side(y, inv[1], None, None), None)
        pairs = Pairs((n, m), ids, x.device)
        question = Question(pairs, sides, asked_terms, over, a, b)
        if dtype == torch.float64:
            answers = tiled.sums(question, inputs, None)
            gradients = tiled.gradients(question, inputs, None, g.squeeze(0), needs)
        else:
            answers = engine.sums(question, inputs)
            gradients = engine.gradients(question, inputs, g, needs, None)
        found.append([answers, *(z for z in gradients if isinstance(z, torch.Tensor))])
    assert len(found[0]) == 3 + len(trained)
    rtol = 1e-3 if key == "log1p" else 2e-4  # the logarithm of 1 - FLOOR, which rounds
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got.cpu().double(), wanted, rtol=rtol, atol=2e-5)


# Which sides have vectors that are trained, and how many bytes of sums may be held.
TRAINED = [((0, 1), 2**27), ((0, 1), 0), ((0,), 2**27), ((1,), 2**27), ((), 2**27)]


@pytest.mark.parametrize("scale", [0.0, -2.5, 40.0])
@pytest.mark.parametrize(("sides", "held"), TRAINED)
@pytest.mark.parametrize("one", [True, False], ids=["one scale", "one each"])
def test_the_gradient_of_a_scale(scale, sides, held, one, multiplying, few_tiles, monkeypatch):
    """It comes from the projected vectors where there are any, else from the scores.

    The shift is not 0, and some pairs are listed: neither belongs to the scale's gradient.
    """
    monkeypatch.setattr(engine, "held_bytes", lambda device: held)
    n, m = 11, 26
    given = [*embeddings(n, m), torch.full((1 if one else n + m,), scale).double()]
    given[0][4] = 0  # scores 0 with everything
    ids = torch.arange(n), torch.arange(m) // 2
    found = []
    for kind, dtype, device in (
        ("reference", torch.float64, "cpu"),
        ("triton", torch.float32, DEVICE),
    ):
        v, w, a = (x.to(device, dtype).clone() for x in given)
        leaves = [a, *((v, w)[side] for side in sides)]
        for leaf in leaves:
            leaf.requires_grad_()
        sim = similarity(v, w, moved(*ids) if kind == "triton" else ids, kind)
        values = sim.both.sum(terms.softplus, scale=a, shift=-1.5)
        values = values + sim.both.sum_of_positives(terms.softplus, scale=-2.0)
        weight = torch.linspace(-1, 2, n + m).to(values)
        found.append(torch.autograd.grad(values @ weight, leaves))
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_term_of_ones_own_takes_the_tiles_of_torch(few_tiles):
    @pair_term
    def cube(scores):
        return scores**3

    v, w = moved(*embeddings(5, 5, dtype=torch.float32))
    got = similarity(v, w, (None, None), "triton").both.sum(cube)
    torch.testing.assert_close(got, similarity(v, w, (None, None), "dense").both.sum(cube))


def test_positives_that_cannot_be_listed(monkeypatch, few_tiles):
    """As during the capture of a CUDA graph."""
    monkeypatch.setattr(Pairs, "listable", False)
    for shape in ("five captions", "square with duplicates"):
        n, m, kind = SHAPES[shape]
        (v, w), ids, grads = (
            moved(*embeddings(n, m, dtype=torch.float32)),
            moved(*make_ids(kind, n, m)),
            upstream(n, m),
        )
        for name in ("likelihood", "log1p", "hinge"):
            found = [
                evaluate(ANSWERS[name], v, w, ids, kind, moved(*grads))
                for kind in ("triton", "reference")
            ]
            for a, b in zip(*((*x[0], *x[1]) for x in found), strict=True):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "name", ["logsumexp below", "logsumexp between", "logsumexp above, over all", "sum between"]
)
@pytest.mark.parametrize("view", [lambda s: s, lambda s: s.both], ids=["rows", "both"])
def test_limits_have_kernels(name, view, few_tiles, poisoned, monkeypatch):
    used = []
    for name_of in ("sums", "gradients"):
        function = getattr(engine, name_of)
        monkeypatch.setattr(
            engine, name_of, lambda *args, function=function: used.append(1) or function(*args)
        )
    compare(name, "wide", view)
    assert len(used) == 2


@triton.jit
def log1p_kernel(u, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, kernels._log1p(tl.load(u + i)))


@triton.jit
def softplus_kernel(z, value, slope, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values, slopes = kernels.softplus(tl.load(z + i))
    tl.store(value + i, values[0])
    tl.store(slope + i, slopes[0])


def test_log1p_is_a_polynomial_that_is_accurate_to_float32():
    u = torch.cat([torch.linspace(0, 1, 2**16), torch.logspace(-38, 0, 2**16)])
    found = torch.empty_like(u, device=DEVICE)
    log1p_kernel[(32,)](u.to(DEVICE), found, BLOCK=4096)
    wanted = u.double().log1p()
    assert ((found.cpu().double() - wanted).abs() <= 2.7e-7 * wanted).all()


def test_softplus_and_its_slope_are_accurate_at_both_ends():
    z = torch.cat([torch.linspace(-80, 80, 8190), torch.tensor([-torch.inf, torch.inf])])
    found = torch.empty(2, len(z), device=DEVICE)
    softplus_kernel[(1,)](z.to(DEVICE), *found, BLOCK=len(z))
    exact = z.double()
    wanted = torch.stack([torch.nn.functional.softplus(exact, threshold=100), exact.sigmoid()])
    # An exponent is rounded to 2^-24 of its size, which is as much of the exponential.
    tolerance = wanted * (5e-7 + 2e-7 * exact.abs().clamp_max(80))
    assert torch.equal(found[0, -2:].cpu(), torch.tensor([0.0, torch.inf]))
    close = (found.cpu().double() - wanted).abs() <= tolerance
    assert close[:, :-2].all() and torch.equal(found[1, -2:].cpu(), torch.tensor([0.0, 1.0]))


def test_what_losses_ask_has_a_form():
    assert {asked for asked, _ in ASKED_TERMS.values()} == set(kernels.FORMS)


# -------------------------------------------------- groups, sets of labels, and matrices of matches

NAMES = itrloss.checks.ROWS_AND_COLUMNS
RELATIONS = (
    "same group",
    "other group",
    "no group in common",
    "one label",
    "sets",
    "matches",
    "sparse matches",
)


def drawn(seed, high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def relation_of(kind, n, m):
    """Ids and a Related of a kind. Some entries do not exist, some are open to all groups."""
    if kind == "sets":
        ids = drawn(1, 9, n, 2), drawn(2, 9, m, 3)
        ids[0][:, 1][drawn(3, 2, n) == 0] = NO_ID
        ids[0][0] = NO_ID
        ids[1][-1] = NO_ID
        return ids, None
    if "matches" in kind:
        matches = drawn(1, 3, n, m).float()
        matches[drawn(2, 3, n, m) == 0] = torch.nan
        return (None, None), Related(matches=matches.to_sparse() if "sparse" in kind else matches)
    ids = drawn(1, 4, n), drawn(2, 4, m)
    ids[0][-1] = ids[1][1 % m] = NO_ID
    if kind == "one label":
        return (ids[0][:, None], ids[1][:, None]), None
    groups = drawn(3, 3, n), drawn(4, 3, m)
    groups[0][0] = groups[1][-1] = NO_ID
    if kind == "no group in common":
        groups = drawn(3, 3, n), drawn(4, 3, m) + 10
    return ids, Related(groups, "other" if kind == "other group" else "same")


def state(i, j, ids, related):
    """Whether pair i, j is positive, negative or None, from the meaning of the input alone."""
    if related is not None and related.matches is not None:
        value = related.matches[i, j].item()  # nan is neither
        return "positive" if value > 0 else "negative" if value == 0 else None
    own, other = ({*x[k].reshape(-1).tolist()} - {NO_ID} for x, k in zip(ids, (i, j), strict=True))
    if not own or not other:
        return None
    if own & other:
        return "positive"
    if related is None:
        return "negative"
    a, b = (x[k].item() for x, k in zip(related.groups, (i, j), strict=True))
    meet = NO_ID in (a, b) or (a == b) == (related.rule == "same")
    return "negative" if meet else None


def included(kind, n, m, over):
    """The (N, M) bool mask of the pairs of a sum."""
    ids, related = relation_of(kind, n, m)
    if kind == "sparse matches":
        related = related._replace(matches=related.matches.to_dense())
    counted = {"all": ("positive", "negative")}.get(over, (over.removesuffix("s"),))
    states = [[state(i, j, ids, related) for j in range(m)] for i in range(n)]
    return torch.tensor([[x in counted for x in row] for row in states]).view(n, m)


def on_device(kind, n, m):
    """The pairs of a relation where kernels run."""
    ids, related = relation_of(kind, n, m)
    if related is not None:
        groups = tuple(moved(*related.groups))
        related = related._replace(groups=groups, matches=moved(related.matches)[0])
    return related_pairs((n, m), tuple(moved(*ids)), related, DEVICE, NAMES)


# Rows and columns: several blocks on both axes with ragged ends, one row, and one column.
RELATED_SHAPES = [(19, 37), (1, 20), (18, 1), (33, 5)]


def all_terms_over_related_pairs():
    """Cases that cover all pairs of values; one of each relation and kind of sum is not slow."""
    cases, seen = [], set()
    for kind, over, shape, *others in pairwise(
        kind=RELATIONS,
        over=["negatives", "all", "positives"],
        shape=RELATED_SHAPES,
        key=[*ASKED_TERMS],
        shared=[True, False],
        sides=[(0, 1), (0,), (1,)],
        form=["multiplied", "given"],
    ):
        quick = (kind, over) not in seen and 1 not in shape
        seen |= {(kind, over)} if quick else set()
        marks = [] if quick else [pytest.mark.slow]
        cases.append(pytest.param(kind, over, shape, *others, marks=marks))
    return cases


@pytest.mark.parametrize(
    ("kind", "over", "shape", "key", "shared", "sides", "form"), all_terms_over_related_pairs()
)
@pytest.mark.usefixtures("few_tiles", "poisoned")
def test_terms_over_related_pairs(kind, over, shape, key, shared, sides, form, monkeypatch):
    """Sums, and gradients by vectors or scores, scale and shift, beside plain PyTorch in float64.

    Kernels find pairs by an id and a group of each entry, and others by a mask.
    """
    monkeypatch.setattr(engine, "fused", lambda rows, cols: form == "multiplied")
    n, m = shape
    anchors = sum(shape[side] for side in sides)
    asked_terms, _ = ASKED_TERMS[key]
    scale = torch.linspace(0.3, 1.5, 1 if shared else anchors).double().requires_grad_()
    shift = (scale.detach() / 2 - (0 if "log1p" in key else 0.7)).requires_grad_()
    v, w = (unit(x).requires_grad_() for x in embeddings(n, m))
    scores = v @ w.T
    mask = included(kind, n, m, over)
    wanted = []
    for term in asked_terms:
        of_sides = []
        for side, a, b in zip(
            sides, *(split(x, sides, shape) for x in (scale, shift)), strict=True
        ):
            s = scores.T if side else scores
            values = formula(term)(a * s + b).expand_as(s)
            of_sides.append(values.masked_fill(~(mask.T if side else mask), 0.0).sum(1))
        wanted.append(torch.cat(of_sides))
    wanted = torch.stack(wanted)
    grad = torch.linspace(-1, 2, wanted.numel()).double().view_as(wanted)
    leaves = [v, w, scale, shift] if form == "multiplied" else [scores, scale, shift]
    gradients = torch.autograd.grad(wanted, leaves, grad)

    x, y, s, a, b, g = (moved(t.detach().float())[0] for t in (v, w, scores, scale, shift, grad))
    inputs = Inputs(*[Side(t, None, None, None) for t in (x, y)], None)
    if form == "given":
        inputs = Inputs(Side(None, None, None, None), Side(None, None, None, None), s)
    question = Question(
        on_device(kind, n, m), sides, asked_terms, over, a.requires_grad_(), b.requires_grad_()
    )
    by_vectors = form == "multiplied"
    needs = tiled.Needs(by_vectors, by_vectors, False, False, not by_vectors, True, True)
    sums = engine.sums(question, inputs)
    found = engine.gradients(question, inputs, g.view_as(sums), needs, None)
    got = [x for x in found if isinstance(x, torch.Tensor)]
    assert len(got) == len(leaves)
    for one, other in zip([sums, *got], [wanted, *gradients], strict=True):
        one = one.cpu().double().view_as(other)
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


def split(values, sides, shape):
    """Values of all anchors, or one number, as columns for each side."""
    if len(values) == 1:
        return [values] * len(sides)
    return [x[:, None] for x in values.split([shape[side] for side in sides])]


@pytest.mark.parametrize("kind", RELATIONS)
def test_highest_scores_of_related_pairs(kind, multiplying, few_tiles, poisoned):
    n, m = 19, 37
    v, w = (unit(x) for x in embeddings(n, m))
    excluded = ~included(kind, n, m, "negatives")
    scores = (v @ w.T).masked_fill(excluded, -torch.inf)
    wanted = 2.0 * torch.cat([scores.amax(1), scores.amax(0)])
    inputs = Inputs(*[Side(x, None, None, None) for x in moved(v.float(), w.float())], None)
    question = Question(on_device(kind, n, m), (0, 1), (terms.identity,), scale=2.0)
    found = engine.highest(question, inputs)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-5, atol=1e-6)


def loss_input(kind, n, m):
    """A relation as losses take it, and the rule of its groups."""
    ids, related = relation_of(kind, n, m)
    related = Related() if related is None else related
    given = moved(*ids, *related.groups, related.matches)
    names = "image_ids", "text_ids", "image_groups", "text_groups", "matches"
    found = {name: x for name, x in zip(names, given, strict=True) if x is not None}
    return found, related.rule


RELATED_LOSSES = losses_registry.where(lambda entry: entry.takes == "pairs" and entry.oracle)


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    each(
        name=RELATED_LOSSES,
        kind=[*RELATIONS],
        dtype=[torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float16],
    ),
)
def test_losses_of_related_pairs(name, kind, dtype, few_tiles, poisoned):
    """They are those of plain PyTorch in float64."""
    make = RELATED_LOSSES[name].make
    given = [x.to(dtype) for x in embeddings(19, 22, 8)]
    who, rule = loss_input(kind, 19, 22)
    options = {"groups": rule} if rule == "other" else {}
    found = []
    for engine_name, to, device in (
        ("dense", torch.float64, "cpu"),
        ("tiled", dtype, DEVICE),
        ("triton", dtype, DEVICE),
    ):
        leaves = [x.to(device, to, copy=True).requires_grad_() for x in given]
        value = make(engine=engine_name, **options)
        value = value.to(device)(*leaves, **{k: x.to(device) for k, x in who.items()})
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    bounds = {torch.float32: 2e-4, torch.bfloat16: 8e-3, torch.float16: 2e-3}
    for wanted, *others in zip(*found, strict=True):
        noise, error = ((x.cpu().double() - wanted).norm() for x in others)
        assert error <= 4 * noise + bounds[dtype] * wanted.norm() + 1e-6


@pytest.mark.parametrize("dtype", HALF)
def test_a_complement_in_half_precision_is_that_of_float64(dtype, few_tiles):
    """The gradients of its two sums nearly cancel."""
    images, texts = (x.to(dtype) for x in embeddings(19, 22, 8))
    who, _ = loss_input("one label", 19, 22)
    gradients = []
    for engine_name, to in (("dense", torch.float64), ("triton", dtype)):
        leaf = images.to(DEVICE, to, copy=True).requires_grad_()
        loss = itrloss.ComplementaryContrastiveLoss(engine=engine_name)
        value = loss(leaf, texts.to(DEVICE, to), **who)
        gradients.append(torch.autograd.grad(value, leaf)[0].double())
    wanted, found = gradients
    assert (found - wanted).norm() <= 4e-3 * wanted.norm()


@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize("name", ["infonce", "dcl", "sigmoid mild"])
def test_weights_of_matches(name, few, few_tiles, poisoned, monkeypatch):
    """Positives are listed, or too many, and then their weights are a guide."""
    monkeypatch.setattr("itrloss.engine.pairs.FEW", few)
    matches = drawn(1, 3, 19, 22).double() * 0.7
    matches[drawn(2, 4, 19, 22) == 0] = torch.nan
    given = embeddings(19, 22, 8)
    found = []
    for engine_name, dtype, device in (
        ("dense", torch.float64, "cpu"),
        ("triton", torch.float32, DEVICE),
    ):
        leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in given]
        loss = RELATED_LOSSES[name].make(engine=engine_name).to(device)
        value = loss(*leaves, matches=matches.to(device))
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-3, atol=1e-5)


def test_masks_are_for_what_ids_and_groups_do_not_say():
    masked = [kind for kind in RELATIONS if engine.compared(on_device(kind, 5, 7)).mask]
    assert masked == ["sets", "matches", "sparse matches"]


@pytest.mark.parametrize("kind", RELATIONS)
@pytest.mark.parametrize("on_scores", [False, True])
def test_nothing_of_related_pairs_is_left_to_tiles(kind, on_scores, few_tiles, monkeypatch):
    def refuse(*args):
        raise AssertionError("tiles of PyTorch")

    monkeypatch.setattr(tiled, "sums", refuse)
    monkeypatch.setattr(tiled, "gradients", refuse)
    v, w = (x.requires_grad_() for x in moved(*embeddings(19, 22, dtype=torch.float32)))
    who, rule = loss_input(kind, 19, 22)
    loss = itrloss.InfoNCELoss(groups=rule, engine="triton")
    value = loss(scores=v @ w.T / 100, **who) if on_scores else loss(v, w, **who)
    assert all(x.isfinite().all() for x in torch.autograd.grad(value, (v, w)))


# ------------------------------------------------- a log-sum-exp whose scale the host does not know


@pytest.fixture
def unread(monkeypatch, multiplying, few_tiles, poisoned):
    """Let the host read no numbers, as on an accelerator, where kernels multiply."""
    stop_reading(monkeypatch.setattr)


def stop_reading(replace):
    replace(itrloss.anchors, "host_may_read", lambda x: False)
    replace(Matrix, "host_may_read", lambda matrix: False)


OF_EXPONENTIALS = [name for name in ASKED if name.startswith("logsumexp") and "guide" not in name]


@pytest.mark.parametrize(
    ("name", "shape", "view", "normalize"),
    each(
        name=[*OF_EXPONENTIALS] * 3,
        shape=[shape for shape in SHAPES if SHAPES[shape][0] > 1],
        view=VIEWS,
        normalize=[True, True, False],
    ),
)
def test_scales_that_the_host_does_not_read(name, shape, view, normalize, unread):
    compare(name, shape, VIEWS[view], normalize=normalize)


def aligned_embeddings(kind, n, m, d=6):
    """Embeddings whose scores are usual ones, or all near -1 for one row, or for all."""
    v, w = embeddings(n, m, d)
    if kind == "usual":
        return v, w
    direction = v[0] / v[0].norm()
    w = w.norm(dim=1, keepdim=True) * (direction + 1e-3 * w)
    if kind == "one row far":
        return torch.cat([v[:-1], -2 * direction[None]]), w
    return v.norm(dim=1, keepdim=True) * (-direction + 1e-3 * v), w


KINDS = ["usual", "one row far", "all far"]


@pytest.mark.parametrize("scale", [0.0, 3.0, 60.0, 100.0, 150.0, 1e4, -100.0])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("learnt", "view"), [(True, "both"), (True, "rows"), (False, "columns")])
def test_scores_at_which_sums_vanish(scale, kind, learnt, view, unread):
    """The limits of float32 are those of the engine in plain PyTorch, which subtracts maxima."""
    n = m = 14
    given = [*aligned_embeddings(kind, n, m), torch.tensor([scale], dtype=torch.float64)]
    found = []
    for engine_name, dtype in (
        ("reference", torch.float64),
        ("dense", torch.float32),
        ("triton", torch.float32),
    ):
        device = DEVICE if engine_name == "triton" else "cpu"
        v, w, a = (x.to(device, dtype).requires_grad_() for x in given)
        anchors = VIEWS[view](similarity(v, w, (None, None), engine_name))
        values = anchors.logsumexp(a if learnt else scale)
        weight = torch.linspace(-1, 2, len(values)).to(values)
        leaves = (v, w, a) if learnt else (v, w)
        gradients = torch.autograd.grad(values @ weight, leaves)
        found.append([values.detach(), *gradients])
    for wanted, other, got in zip(*found, strict=True):
        error, noise = ((x.cpu().double() - wanted).norm() for x in (got, other))
        assert error <= 4 * noise + 2e-6 * wanted.norm() + 1e-6


@pytest.mark.parametrize("embedded", ["as they are", "in several blocks", "without negatives"])
@pytest.mark.parametrize("kind", KINDS)
def test_vanishing_sums_of_other_matrices(embedded, kind, unread):
    n, m = 8, 14
    given = aligned_embeddings(kind, n, m)
    ids = torch.arange(n), torch.arange(m) // 2
    if embedded == "without negatives":
        ids = torch.cat([torch.zeros(3), torch.arange(n - 3)]).long(), torch.zeros(m).long()
    normalize = embedded != "as they are"
    found = []
    for engine_name, dtype in (("reference", torch.float64), ("triton", torch.float32)):
        device = DEVICE if engine_name == "triton" else "cpu"
        v, w = (x.to(device, dtype).requires_grad_() for x in given)
        a = torch.tensor([100.0], device=device, dtype=dtype, requires_grad=True)
        places = tuple(x.to(device) for x in ids)
        if embedded == "in several blocks" and engine_name == "triton":
            blocks = [
                similarity(v, w[part], (places[0], places[1][part]), engine_name)
                for part in (slice(0, 5), slice(5, m))
            ]
            anchors = itrloss.Anchors.pooled(*blocks)
        else:
            anchors = similarity(v, w, places, engine_name, normalize=normalize)
        values = anchors.logsumexp(a)
        existing = values.isfinite()
        gradients = torch.autograd.grad(values[existing].sum(), (v, w, a))
        found.append([existing, values.detach().masked_fill(~existing, 0), *gradients])
    for wanted, got in zip(*found, strict=True):
        tolerance = 2e-4 * wanted.double().norm() + 1e-6  # scores near -1 have few digits left
        assert (got.cpu().double() - wanted.double()).norm() <= tolerance


def record_runs(replace):
    """Return a list to which the kernels are appended that compute anything."""
    launch, ran = engine.Pass.launch, []

    def launched(run, kernel, config, *args):
        flag = run.kernel_values.flag
        if flag is None or bool(flag) == config.RUNS_IF:
            what = "maxima" if config.MAXIMUM else kernel.__name__.removesuffix("_kernel")
            name = f"{what} of {'one' if config.SHARED else 'each'}"
            if name not in ran:
                ran.append(name)
        launch(run, kernel, config, *args)

    replace(engine.Pass, "launch", launched)
    return ran


USUALLY = ["sums of one", "gradient of one"]
FAILED = ["sums of one", "maxima of one", "sums of each", "gradient of each"]


@pytest.mark.parametrize(
    ("kind", "ids", "scale", "wanted"),
    [
        ("usual", (None, None), 100.0, USUALLY),
        ("one row far", (None, None), 100.0, FAILED),
        ("one row far", (None, None), 60.0, USUALLY),
        # A sum of no candidates is 0, too.
        ("usual", ([0] * 14, [0] * 13 + [1]), 60.0, USUALLY),
        ("usual", ([0] * 14, [0] * 14), 100.0, ["sums of one", "maxima of one", "gradient of one"]),
    ],
)
def test_needless_kernels_return_at_once(kind, ids, scale, wanted, unread, monkeypatch):
    """Usually one shift serves all anchors, in one evaluation for both sides."""
    ran = record_runs(monkeypatch.setattr)
    v, w = (x.float().to(DEVICE).requires_grad_() for x in aligned_embeddings(kind, 14, 14))
    a = torch.tensor([scale], device=DEVICE, requires_grad=True)
    places = [x if x is None else torch.tensor(x, device=DEVICE) for x in ids]
    Similarity(v, w, *places, engine="triton").both.logsumexp(a).sum().backward()
    assert ran == wanted


def test_a_bias_takes_the_tiles_of_torch(unread, monkeypatch):
    """Neither sums nor maxima of biased scores have kernels, whatever the scale."""
    ran = record_runs(monkeypatch.setattr)
    v, w, bias = (x.float().to(DEVICE) for x in (*embeddings(6, 6), torch.linspace(-1, 1, 6)))
    a = torch.tensor([100.0], device=DEVICE)
    found = []
    for engine_name in ("triton", "dense"):
        sim = Similarity(v, w, bias=(None, bias), engine=engine_name)
        found.append(sim.both.logsumexp(a))
    torch.testing.assert_close(*found)
    assert not ran


def test_the_bound_of_scores():
    v, w = torch.tensor([[3.0, 4.0], [1.0, 1.0]]), torch.tensor([[-6.0, -8.0], [0.0, 0.0]])
    for x, y, wanted in ((v, w, 50.0), (v, w[1:], 0.0)):
        sim = Similarity(x, y, torch.arange(len(x)), torch.arange(len(y)), normalize=False)
        assert sim._matrix.largest_score().tolist() == [wanted]
    assert Similarity(v, w)._matrix.largest_score().tolist() == [1.0]
    assert Similarity(v, w, bias=(None, torch.ones(2)))._matrix.largest_score() is None
    assert Similarity.from_scores(v)._matrix.largest_score() is None


def of_a_process(rank, kind, normalize):
    """Return the kernels that compute anything, and the values and gradients of a process."""
    stop_reading(setattr)
    engine.fused = lambda rows, cols: True
    engine.PRODUCT_TILES = (engine.TileConfig(*TILE, 4, 2),)
    ran = record_runs(setattr)
    parts = [x.float().chunk(2)[rank].requires_grad_() for x in aligned_embeddings(kind, 12, 12)]
    a = torch.tensor([100.0 if normalize else 0.35], requires_grad=True)
    sim = Similarity.sharded(*parts, engine="triton", normalize=normalize)
    values = sim.both.logsumexp(a)
    return ran, [values.detach(), *torch.autograd.grad(values.sum(), (*parts, a))]


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="processes share the CPU")
@pytest.mark.parametrize(
    ("kind", "normalize"), [("usual", True), ("usual", False), ("all far", True)]
)
def test_vanishing_sums_over_several_processes(kind, normalize, tmp_path):
    found = both(of_a_process, tmp_path, kind, normalize)
    v, w = (x.requires_grad_() for x in aligned_embeddings(kind, 12, 12))
    a = torch.tensor([100.0 if normalize else 0.35], dtype=torch.float64, requires_grad=True)
    wanted = similarity(v, w, (None, None), "reference", normalize=normalize).both.logsumexp(a)
    of_rows, of_cols = wanted.detach().split(12)
    gradients = torch.autograd.grad(wanted.sum(), (v, w, a))
    for rank, (ran, (values, by_v, by_w, _)) in enumerate(found):
        assert ran == (USUALLY if kind == "usual" else FAILED)
        part = slice(6 * rank, 6 * rank + 6)
        expected = torch.cat([of_rows[part], of_cols[part]]), gradients[0][part], gradients[1][part]
        for got, x in zip((values, by_v, by_w), expected, strict=True):
            assert (got.double() - x).norm() <= 2e-4 * x.norm() + 1e-6
    total = sum(x for _, (_, _, _, x) in found)
    torch.testing.assert_close(total.double(), gradients[2], rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------- sums along with their gradient

# Totals of one scale and a term that has kernels. Their gradients are found in the forward pass.
EARLY = [name for name in TOTALS if name not in ("scales of anchors", "of a user's term")]


@pytest.fixture
def early(monkeypatch):
    """Count the totals that come along with their gradient."""
    found = []
    total = engine.sums_and_gradients

    def counted(*args):
        found.append(args)
        return total(*args)

    monkeypatch.setattr(engine, "sums_and_gradients", counted)
    return found


def of_triton(total, v, w, ids, dtype, view=lambda s: s.both):
    """Return a total and its gradients on Triton, in float64, with float32 parameters."""
    p = parameters(len(v), len(w), torch.float32).to(DEVICE).requires_grad_()
    v, w = (x.to(DEVICE, dtype).requires_grad_() for x in (v, w))
    anchors = view(similarity(v, w, moved(*ids), "triton"))
    value = total(anchors, p[: len(anchors)])
    grads = torch.autograd.grad(1.5 * value, (v, w, p), allow_unused=True)
    assert [x.dtype for x in grads[:2]] == [dtype] * 2
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, (v, w, p), strict=True)]
    return [x.detach().cpu().double() for x in (value, *grads)]


def totals_of_all_shapes():
    """Return cases that cover all pairs of values; one of each total is not slow."""
    cases, seen = [], set()
    for case in pairwise(name=EARLY, shape=SHAPES, view=VIEWS, fused=[True, False]):
        name, shape, *_ = case
        quick = name not in seen and SHAPES[shape][0] > 1
        seen |= {name} if quick else set()
        cases.append(pytest.param(*case, marks=[] if quick else pytest.mark.slow))
    return cases


@pytest.mark.parametrize(("name", "shape", "view", "fused"), totals_of_all_shapes())
def test_totals_along_with_their_gradient(
    name, shape, view, fused, early, few_tiles, poisoned, monkeypatch
):
    monkeypatch.setattr(engine, "fused", lambda rows, cols: fused)
    n, m, kind = SHAPES[shape]
    (v, w), ids = embeddings(n, m), make_ids(kind, n, m)
    v[0] = 0  # scores 0 with everything, and gets a zero gradient
    wanted = evaluate_total(TOTALS[name], v, w, ids, "reference", VIEWS[view])
    found = of_triton(TOTALS[name], v, w, ids, torch.float32, VIEWS[view])
    assert early
    for got, exact in zip(found, [wanted[0][0][0], *wanted[1]], strict=True):
        assert (got - exact).norm() <= 3e-5 * exact.norm() + 2e-6


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    pairwise(name=EARLY, shape=["one row", "primes", "five captions"], dtype=HALF),
)
def test_totals_in_half_precision(name, shape, dtype, early, few_tiles, poisoned):
    """Of dimensions that are no multiple of a step."""
    n, m, kind = SHAPES[shape]
    ids = make_ids(kind, n, m)
    v, w = (x.to(dtype).double() for x in embeddings(n, m, 21))
    wanted = evaluate_total(TOTALS[name], v, w, ids, "reference")
    value, *grads, by_parameters = of_triton(TOTALS[name], v, w, ids, dtype)
    assert early
    torch.testing.assert_close(value, wanted[0][0][0], rtol=1e-4, atol=1e-4)
    for got, exact in zip(grads, wanted[1][:2], strict=True):
        rounding = (exact.to(dtype).double() - exact).norm()
        assert (got - exact).norm() <= 4 * rounding + 2e-3 * exact.norm() + 1e-6
    exact = wanted[1][2]
    assert (by_parameters - exact).norm() <= 5e-3 * exact.norm() + 1e-4


@pytest.mark.parametrize("name", ["mean of hinges", "sum of hinges"])
def test_totals_of_many_positives(name, early, multiplying, few_tiles, poisoned, monkeypatch):
    monkeypatch.setattr(engine, "SLOTS", 2)
    n, m, kind = SHAPES["five captions"]
    (v, w), ids = embeddings(n, m), make_ids(kind, n, m)
    wanted = evaluate_total(TOTALS[name], v, w, ids, "reference")
    found = of_triton(TOTALS[name], v, w, ids, torch.float32)
    assert early
    for got, exact in zip(found, [wanted[0][0][0], *wanted[1]], strict=True):
        assert (got - exact).norm() <= 3e-5 * exact.norm() + 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("dim", [17, 300])
def test_sums_of_classes(dtype, normalize, dim, poisoned):
    rows = torch.tensor([5, 3, 5, IGNORE_ID, 8, 3, 3, -7])
    cols = torch.tensor([3, 5, 9, IGNORE_ID, 3, -7] + [5] * 40, device=DEVICE)
    pairs = Pairs((len(rows), len(cols)), (rows.to(DEVICE), cols), DEVICE)
    x = torch.randn(len(cols), dim, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    x[2] = math.nan  # of no class
    side = Side(x, vectors.inverse_norms(x) if normalize else None, None, None)
    sums = engine.class_sums(side, pairs.members(1))
    number = pairs.classes(0).number
    for i, own in enumerate(rows.tolist()):
        if own == IGNORE_ID:
            continue
        found = sums[number[i]]
        unit = x[cols == own].double()
        if normalize:
            unit = torch.nn.functional.normalize(unit)
        assert torch.allclose(found.double(), unit.sum(0), rtol=1e-5, atol=1e-5)
    assert not sums[-1].any()  # the entries without a class


def test_a_total_with_ignored_ids(early, few_tiles, poisoned):
    v, w = embeddings(9, 20)
    ids = make_ids("random", 9, 20)
    total = TOTALS["and positives"]
    kept = [torch.arange(9) != 2, ~torch.isin(torch.arange(20), torch.tensor([5, 19]))]
    existing = ids[0][kept[0]], ids[1][kept[1]]
    wanted = evaluate_total(total, v[kept[0]], w[kept[1]], existing, "reference")
    ids[0][2] = ids[1][5] = ids[1][19] = IGNORE_ID
    value, by_rows, by_cols, by_parameters = of_triton(total, v, w, ids, torch.float32)
    assert early and not by_rows[2].any() and not by_cols[[5, 19]].any()
    torch.testing.assert_close(value, wanted[0][0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(by_rows[kept[0]], wanted[1][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(by_cols[kept[1]], wanted[1][1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(by_parameters.sum(), wanted[1][2].sum(), rtol=1e-4, atol=1e-5)


def siglip(v, w, scale=None):
    """Return SigLIP's loss by Triton."""
    scale = 10.0 if scale is None else scale
    return sigmoid_loss(Similarity(v, w, engine="triton"), scale, -3.0)


def trained(n=12, m=12, d=16, dtype=torch.float32):
    return [x.requires_grad_() for x in moved(*embeddings(n, m, d, dtype=dtype))]


@pytest.mark.parametrize("held", [2**27, 4 * 24 * 16, 4 * 24 * 16 - 1])
def test_sums_of_gradients_are_held_if_they_fit(held, early, few_tiles, monkeypatch):
    monkeypatch.setattr(engine, "held_bytes", lambda device: held)
    v, w = trained()
    found = torch.autograd.grad(siglip(v, w), (v, w))
    assert bool(early) == (held >= 4 * 24 * 16)
    exact = [x.detach().cpu().double().requires_grad_() for x in (v, w)]
    value = sigmoid_loss(Similarity(*exact, engine="dense"), 10.0, -3.0)
    for got, wanted in zip(found, torch.autograd.grad(value, exact), strict=True):
        torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-5, atol=1e-7)


def test_without_training_no_gradient_is_found(early, few_tiles):
    v, w = trained()
    with torch.no_grad():
        value = siglip(v, w)
    assert not early
    torch.testing.assert_close(siglip(v.detach(), w.detach()), value)
    sim = Similarity(v, w, engine="triton")
    with torch.no_grad():
        torch.testing.assert_close(sigmoid_loss(sim, 10.0, -3.0), value)
    assert not early
    scale = torch.tensor(10.0, requires_grad=True, device=DEVICE)
    siglip(v.detach(), w.detach(), scale).backward()
    assert not early and scale.grad is not None
    given = Similarity.from_scores(trained(d=12)[0], engine="triton")
    sigmoid_loss(given, 10.0, -3.0).backward()  # its gradient is a matrix
    assert not early


@pytest.mark.parametrize("name", [name for name in TOTALS if name not in EARLY])
def test_other_totals_have_their_gradient_later(name, early, few_tiles):
    v, w = embeddings(5, 5)
    wanted = evaluate_total(TOTALS[name], v, w, (None, None), "reference")
    found = of_triton(TOTALS[name], v, w, (None, None), torch.float32)
    assert not early
    for got, exact in zip(found, [wanted[0][0][0], *wanted[1]], strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", [0, 1])
def test_a_side_without_training_has_no_sums(which, early, few_tiles):
    given = trained()
    given[which].requires_grad_(False)
    siglip(*given).backward()
    _, _, _, needs = early[0]
    assert (needs.rows, needs.cols) == (which == 1, which == 0)
    assert given[which].grad is None and given[1 - which].grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_total_may_be_differentiated_again(dtype, early, few_tiles):
    """Twice with a graph that is kept, in checkpoints, with hooks, and in part."""
    v, w = trained(dtype=dtype)
    value = siglip(v, w)
    first = torch.autograd.grad(value, (v, w), retain_graph=True)
    second = torch.autograd.grad(3 * value, (v, w), retain_graph=True)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(3 * a, b, rtol=1e-2, atol=1e-3)
    assert len(early) == 1
    with pytest.raises(RuntimeError, match=r"create_graph.*dense"):
        torch.autograd.grad(value, v, create_graph=True)
    again = checkpoint(siglip, v, w, use_reentrant=False)
    with saved_tensors_hooks(torch.clone, lambda copy: copy):
        hooked = siglip(v, w)
    for other in (again, hooked):
        for a, b in zip(torch.autograd.grad(other, (v, w)), first, strict=True):
            assert torch.equal(a, b)


def test_parts_of_a_total_and_its_positives(early, few_tiles):
    """The total and the positives' scores come from one node, which may get one gradient only."""
    v, w = trained()
    exact = [x.detach().cpu().double().requires_grad_() for x in (v, w)]
    found = []
    for given, engine_name in (((v, w), "triton"), (exact, "dense")):
        sim = Similarity(*given, engine=engine_name)
        total = sim.weighted_sum(terms.softplus, scale=4.0)
        positives = sim.sum_of_positives(terms.square).sum()
        alone = [torch.autograd.grad(x, given, retain_graph=True) for x in (total, positives)]
        found.append([x for pair in alone for x in pair])
    assert len(early) == 1
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got.cpu().double(), wanted, rtol=1e-5, atol=1e-6)


# Sums of anchors that alone are trained, as beside a memory; their scales and shifts are given.
ONE_SIDED = {
    "one scale": lambda anchors, q: anchors.logsumexp(5.0),
    "scales of anchors": lambda anchors, q: anchors.logsumexp(q),
    "shifts of anchors": lambda anchors, q: anchors.sum(terms.softplus, scale=3.0, shift=-q),
    "over all": lambda anchors, q: anchors.sum(terms.square, scale=2.0, over="all"),
    "limits": lambda anchors, q: anchors.logsumexp(q, below=0.8, above=-0.3),
    "listed positives": lambda anchors, q: (
        anchors.logsumexp(5.0) - anchors.mean_of_positives(terms.identity)
    ),
}
# Others, whose gradients are found later.
NOT_ONE_SIDED = {
    "two terms": lambda anchors, q: anchors.std(),
    "a learnt scale": lambda anchors, q: anchors.logsumexp(q.requires_grad_(), at_most=9.0),
    "a learnt shift": lambda anchors, q: anchors.sum(terms.softplus, shift=q.requires_grad_()),
    "both sides": lambda anchors, q: anchors.both.logsumexp(5.0),
}


def of_one_side(answer, side, given, ids, engine_name):
    """Return sums and the gradient of the one side that is trained, found twice."""
    given[side].requires_grad_()
    sim = Similarity(*given, *ids, engine=engine_name)
    anchors = sim.T if side else sim
    q = torch.linspace(2, 6, len(anchors), dtype=sim.dtype, device=given[side].device)
    values = answer(anchors, q)
    grad = torch.linspace(-1, 2, len(values), dtype=values.dtype, device=values.device)
    torch.autograd.grad(values, given[side], 2 - grad, retain_graph=True)
    (by_own,) = torch.autograd.grad(values, given[side], grad)
    return values.detach().cpu().double(), by_own.cpu().double()


@pytest.mark.parametrize(
    ("name", "shape", "side", "fused"),
    pairwise(name=ONE_SIDED, shape=SHAPES, side=[0, 1], fused=[True, False]),
)
def test_sums_along_with_their_gradient(
    name, shape, side, fused, early, few_tiles, poisoned, monkeypatch
):
    monkeypatch.setattr(engine, "fused", lambda rows, cols: fused)
    n, m, kind = SHAPES[shape]
    ids = make_ids(kind, n, m)
    v, w = embeddings(n, m)
    v[0] = 0
    wanted = of_one_side(ONE_SIDED[name], side, [v.clone(), w.clone()], ids, "dense")
    given = moved(v.float(), w.float())
    found = of_one_side(ONE_SIDED[name], side, given, moved(*ids), "triton")
    assert len(early) == 1
    exists = wanted[0].isfinite()
    assert torch.equal(found[0].isfinite(), exists)
    torch.testing.assert_close(found[0][exists], wanted[0][exists], rtol=1e-4, atol=1e-5)
    assert (found[1] - wanted[1]).norm() <= 3e-5 * wanted[1].norm() + 2e-6


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ["one scale", "scales of anchors"])
def test_half_precision_sums_along_with_their_gradient(name, dtype, early, few_tiles, poisoned):
    """Float16 has no room for exponentials of several anchors: their sums divide them first."""
    ids = make_ids("random", 23, 41)
    v, w = (x.to(dtype) for x in embeddings(23, 41))
    wanted = of_one_side(ONE_SIDED[name], 0, [v.double(), w.double()], ids, "dense")
    found = of_one_side(ONE_SIDED[name], 0, moved(v, w), moved(*ids), "triton")
    assert len(early) == (dtype == torch.bfloat16)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert (found[1] - wanted[1]).norm() <= 2 * torch.finfo(dtype).eps * wanted[1].norm()


@pytest.mark.parametrize("name", NOT_ONE_SIDED)
def test_other_sums_have_their_gradient_later(name, early, few_tiles):
    v, w = embeddings(9, 9)
    wanted = of_one_side(NOT_ONE_SIDED[name], 0, [v.clone(), w.clone()], (None, None), "dense")
    given = moved(v.float(), w.float())
    found = of_one_side(NOT_ONE_SIDED[name], 0, given, (None, None), "triton")
    assert not early
    for got, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-3, atol=1e-4)


def test_sums_with_a_gradient_for_candidates_have_it_later(early, few_tiles):
    v, w = trained()
    Similarity(v, w.detach(), engine="triton").T.logsumexp(5.0).sum().backward()
    Similarity(v, w, engine="triton").logsumexp(5.0).sum().backward()
    assert not early and v.grad.any() and w.grad.any()


def test_embeddings_that_change_before_backward_are_refused(early, few_tiles):
    v, w = trained()
    value = siglip(v, w)
    with torch.no_grad():
        w.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_total_of_no_pairs(early):
    v = torch.zeros(0, 4, device=DEVICE, requires_grad=True)
    w = torch.ones(3, 4, device=DEVICE, requires_grad=True)
    scale = torch.ones(1, device=DEVICE, requires_grad=True)
    inputs = Inputs(Side(v, None, None, None), Side(w, None, None, None), None)
    question = Question(Pairs((0, 3), (None, None), DEVICE), (0,), (terms.softplus,), scale=scale)
    needs = tiled.Needs(True, True, False, False, scale=True)
    with torch.no_grad():
        value, sums = engine.sums_and_gradients(
            question, inputs, torch.ones(1, device=DEVICE), needs
        )
        grad = torch.ones((), device=DEVICE)
        found = engine.completed_gradients(question, inputs, sums, grad, needs, None)
    assert value == 0 and found.scale == 0 and not found.cols.any() and found.rows.shape == (0, 4)


# ----------------------------------------------------------------------------------- half precision


@pytest.mark.parametrize(
    ("name", "kind", "dtype", "held"),
    each(
        name=["logsumexp", "logsumexp per anchor", "logsumexp sharp", "std", "logsumexp over all"],
        kind=["random", None],
        dtype=[torch.bfloat16, torch.float16, torch.bfloat16],
        held=[2**27, 2**27, 0, 0],  # bytes of held sums: enough for one side, or none
    ),
)
def test_half_precision(name, kind, dtype, held, few_tiles, poisoned, monkeypatch):
    monkeypatch.setattr(engine, "held_bytes", lambda device: held)
    n, m = (18, 18) if kind is None else (12, 18)
    ids, (v, w), grads = make_ids(kind, n, m), embeddings(n, m, 20, dtype=dtype), upstream(n, m)
    wanted = evaluate(ANSWERS[name], v.double(), w.double(), ids, "reference", grads)
    v, w = moved(v, w)
    p = parameters(n, m, torch.float32).to(DEVICE)  # those of `evaluate` have half precision
    got = evaluate(lambda a, _: ANSWERS[name](a, p[: len(a)]), v, w, moved(*ids), "triton", grads)
    torch.testing.assert_close(got[0][0].cpu().double(), wanted[0][0], rtol=1e-4, atol=1e-4)
    for a, b in zip(got[1][:2], wanted[1][:2], strict=True):
        assert a.dtype == dtype
        rounding = (b.to(dtype).double() - b).norm()
        assert (a.cpu().double() - b).norm() <= 4 * rounding + 2e-3 * b.norm()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("scale", [3.0, 100.0])
def test_rows_of_a_memory_in_half_precision(dtype, scale, few_tiles, poisoned):
    """Exponentials are between e^-60 and e^60."""
    n, m, d = 9, 40, 16
    v, w = (torch.nn.functional.normalize(x, dim=1).to(dtype) for x in embeddings(n, m, d))
    w[3] = v[2]
    w[7] = -v[4]
    ids = torch.arange(n), torch.arange(m) + 2
    found = []
    for where, kind, given in ((DEVICE, "triton", dtype), ("cpu", "reference", torch.float64)):
        x = v.to(where, given).requires_grad_()
        value = similarity(x, w.to(where, given), tuple(i.to(where) for i in ids), kind).logsumexp(
            scale
        )
        (grad,) = torch.autograd.grad(value.sum(), x)
        found.append((value.detach().cpu().double(), grad.cpu().double()))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-4, atol=1e-4)
    error = (found[0][1] - found[1][1]).norm(dim=1)
    # of vectors of this length, which the projection cancels
    assert (error <= torch.finfo(dtype).eps * scale).all()


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("smallest", [2.0**-14, 2.0**-25])
def test_small_rows_of_a_panel_have_half_precision(side, smallest, few_tiles, poisoned):
    """A panel has one unit. Weights and exponentials, e^-1 to e, span 2^-28: a row that is so small
    still has half precision relative to its own size.
    """
    n, d = 16, 16  # one panel
    weights = torch.logspace(0, torch.tensor(smallest).log2(), n, base=2, dtype=torch.float64)
    given = [torch.nn.functional.normalize(x, dim=1).half() for x in embeddings(n, n, d)]
    needs = tiled.Needs(True, True, False, False, dtypes=(torch.float32, torch.float32))
    one_term = (terms.exponential,)
    found = []
    for dtype, device in ((torch.float64, "cpu"), (torch.float16, DEVICE)):
        sides = []
        for x in given:
            x = x.to(device, dtype)
            sides.append(Side(x, vectors.inverse_norms(x), None, None))
        inputs = Inputs(*sides, None)
        question = Question(Pairs((n, n), (None, None), inputs.like.device), (side,), one_term)
        grad = weights.to(device, vectors.compute_dtype(inputs.like))
        if dtype == torch.float64:
            gradients = tiled.gradients(question, inputs, None, grad, needs)
        else:
            gradients = engine.gradients(question, inputs, grad, needs, None)
        found.append([x.cpu().double() for x in gradients[:2]])
    for wanted, got in zip(*found, strict=True):
        error = (got - wanted).norm(dim=1)
        assert (error <= 2.0**-10 * wanted.norm(dim=1)).all()


@pytest.mark.parametrize("largest", [1e-20, 2.0**-24, 1.0, 3e4, 1e20])
def test_a_panel_in_float16_has_one_unit(largest):
    """Entries keep 11 bits down to 2^-29 of the largest, and smaller ones err by 2^-40 of it."""
    panel = largest * torch.logspace(0, -16, 3 * 64, base=10).view(3, 64)
    panel[:, ::2] *= -1
    half = torch.empty(3, 64, dtype=torch.float16, device=DEVICE)
    unit = engine.round_to_half(panel.to(DEVICE), half)
    assert unit.shape == () and half.isfinite().all()
    error = (half.double() * unit.double()).cpu() - panel
    assert (error.abs() <= 2.0**-11 * panel.abs() + 2.0**-40 * largest).all()
    assert half.abs().max() == 2.0**15
    normal = panel.abs() >= 2.0**-29 * largest
    assert normal.sum() > 90 and (error.abs() <= 2.0**-11 * 1.001 * panel.abs())[normal].all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_gives_a_panel_no_unit(bad):
    panel = torch.full((3, 64), 3.0, device=DEVICE)
    panel[1, 5] = bad
    half = torch.empty(3, 64, dtype=torch.float16, device=DEVICE)
    unit = engine.round_to_half(panel, half)
    assert unit == 3 * 2.0**-15
    assert half[[0, 2]].eq(2.0**15).all() and not half[1, 5].isfinite()


def test_a_panel_of_zeros():
    half = torch.empty(2, 64, dtype=torch.float16, device=DEVICE)
    unit = engine.round_to_half(torch.zeros(2, 64, device=DEVICE), half)
    assert unit > 0 and not half.any()


@pytest.mark.parametrize("upstream", [1e-4, 1.0, 1e4])
def test_no_gradient_leaves_the_range_of_float16(upstream, few_tiles):
    """float16 ends at 65504, and loses half of its digits at 10^-6, whatever the lengths of the
    embeddings.
    """
    n, d = 24, 16
    v, w = (torch.nn.functional.normalize(x, dim=1) for x in embeddings(n, n, d))
    v = (v * torch.logspace(-2, 2, n, dtype=v.dtype)[:, None]).half()
    w = (w * torch.logspace(3, -1, n, dtype=v.dtype)[:, None]).half()
    found = []
    for where, dtype, kind in (
        ("cpu", torch.float64, "reference"),
        (DEVICE, torch.float16, "triton"),
    ):
        a, b = (x.to(where, dtype).requires_grad_() for x in (v, w))
        value = similarity(a, b, (None, None), kind).both.logsumexp(5.0).sum() * upstream
        found.append([x.cpu().double() for x in torch.autograd.grad(value, (a, b))])
    for wanted, got in zip(*found, strict=True):
        size = wanted.norm(dim=1)
        stored = (size > 1e-3) & (wanted.abs().amax(1) < 6e4)  # the range of float16
        assert stored.any()
        assert ((got - wanted).norm(dim=1)[stored] <= 2e-3 * size[stored]).all()


def test_a_gradient_that_is_no_number_stays_with_its_anchor():
    v, w = (x.half().to(DEVICE).requires_grad_() for x in embeddings(9, 9, 16))
    grad = torch.ones(9, device=DEVICE)
    grad[4] = torch.nan
    (found,) = torch.autograd.grad(Similarity(v, w, engine="triton").logsumexp(10.0), v, grad)
    assert found.isfinite().all(1).tolist() == [i != 4 for i in range(9)]


def test_products_are_summed_in_float32_whatever_the_model_does():
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_accumulation
    try:
        flags.allow_fp16_accumulation = True
        total = torch.zeros(2, 3, device=DEVICE)
        panel = torch.full((2, 4), 2.0**15, device=DEVICE).half()
        other = torch.ones(4, 3, device=DEVICE).half()
        unit = torch.tensor(2.0**15, device=DEVICE)
        engine.add_product_(total, panel, other, unit)
        engine.add_product_(total, panel, other)
        assert flags.allow_fp16_accumulation
        torch.testing.assert_close(total, torch.full_like(total, 2.0**32 + 2.0**17))
    finally:
        flags.allow_fp16_accumulation = before


def test_inverse_norms():
    lengths = torch.tensor([0.0, 1e-13, 2e-12, 1e-6, 1.0, 1e6, 9e17])
    x = lengths[:, None] * torch.nn.functional.normalize(
        embeddings(7, 1, 40, dtype=torch.float32)[0], dim=1
    )
    wanted = torch.where(lengths > 1e-12, 1 / lengths, 0.0)
    for layout in (x, x.T.contiguous().T, x.repeat(1, 2)[:, :40]):
        torch.testing.assert_close(
            vectors.inverse_norms(layout.to(DEVICE)).squeeze(1).cpu(), wanted
        )
    assert vectors.inverse_norms(x[:0].to(DEVICE)).shape == (0, 1)
    half = embeddings(3, 1, 2000)[0].bfloat16()
    torch.testing.assert_close(
        vectors.inverse_norms(half.to(DEVICE)).squeeze(1).cpu(), 1 / half.float().norm(dim=1)
    )


@pytest.mark.parametrize("side", [0, 1])
def test_embeddings_as_they_lie(side, multiplying, few_tiles):
    given = moved(*embeddings(13, 13, 20, dtype=torch.float32))
    contiguous = [x[:, ::2].contiguous() for x in given]
    layouts = [contiguous[side], given[side][:, ::2], contiguous[side].T.contiguous().T]
    found = []
    for layout in layouts:
        leaves = list(contiguous)
        leaves[side] = layout
        leaves = [x.detach().requires_grad_() for x in leaves]
        value = Similarity(*leaves, engine="triton").both.logsumexp(5.0)
        found.append([value.detach(), *torch.autograd.grad(value.square().sum(), leaves)])
    for other in found[1:]:
        for got, wanted in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dim", [40, 48, 80])
@pytest.mark.parametrize("side", [0, 1])
def test_dimensions_end_within_a_step(dim, side, multiplying, few_tiles, poisoned, monkeypatch):
    """They are masked: what lies behind them counts for nothing."""
    tile = engine.PRODUCT_TILES[0]._replace(block_k=32)
    monkeypatch.setattr(engine, "PRODUCT_TILES", (tile,))
    given = embeddings(7, 9, dim, dtype=torch.float32)
    ids, grads = make_ids("random", 7, 9), upstream(7, 9)
    exact = [x.double() for x in given]
    wanted = evaluate(ANSWERS["logsumexp"], *exact, ids, "reference", grads)
    leaves = moved(*given)
    # Others lie behind the dimensions of one side. The other is not aligned, and copied.
    behind = torch.full((len(leaves[side]), 96), torch.nan, device=DEVICE)
    leaves[side] = behind[:, :dim].copy_(leaves[side])
    between = torch.zeros(len(leaves[1 - side]), dim + 3, device=DEVICE)
    leaves[1 - side] = between[:, 3:].copy_(leaves[1 - side])
    leaves = [x.detach().requires_grad_() for x in leaves]
    values = ANSWERS["logsumexp"](Similarity(*leaves, *moved(*ids), engine="triton").both, None)
    found = torch.autograd.grad(finite(values) @ torch.cat(grads).to(values), leaves)
    torch.testing.assert_close(values.detach().cpu().double(), wanted[0][0], rtol=1e-4, atol=1e-4)
    for got, grad in zip(found, wanted[1][:2], strict=True):
        assert (got.cpu().double() - grad).norm() <= 1e-5 * grad.norm()


@pytest.mark.parametrize("dim", [64, 80, 400, 528, 500, 1000])
def test_aligned_embeddings_are_not_copied(dim, monkeypatch):
    monkeypatch.setattr(engine, "INTERPRETED", False)
    x = torch.empty(100, dim, dtype=torch.bfloat16, device=DEVICE)
    found = engine.aligned(x)
    if dim % 8 == 0:
        assert found is x
    else:
        assert found.shape[1] % 8 == 0 and not found[:, dim:].any()


def test_a_part_of_longer_vectors_is_copied():
    """Its rows are aligned, but what lies behind them is not 0."""
    x = torch.ones(3, 24, device=DEVICE)[:, :20]
    found = engine.aligned(x)
    assert found.shape == (3, 24) and not found[:, 20:].any()


def test_planes_begin_at_multiples_of_16():
    """Others would have a kernel of their own, which is compiled in the middle of a training."""
    for size in (2048, 2043, 2):
        x = torch.arange(3.0 * size).view(3, size)
        given = engine.per_anchor(x, x.device)
        assert given.plane % 16 == 0 and torch.equal(given.x, x)


@triton.jit
def first_partials(out, plane, size, parts, pid):
    """Store where the results of a part of a plane begin."""
    axis = kernels.Axis(pid, parts, 0, 0, size, 0, 0, 0, 0, None)
    tl.store(out, kernels._first_partial(plane, axis, axis))


def test_places_of_results_are_beyond_32_bits():
    """A hinge of 2048 positives has as many planes of partial sums."""
    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    first_partials[(1,)](out, 2047, 4096, 2048, 2047)
    assert out.item() == (2047 * 2048 + 2047) * 4096 > 2**31


def test_the_same_bits_again():
    v, w = moved(*embeddings(20, 40, 16, dtype=torch.bfloat16))
    ids = moved(torch.arange(20), torch.arange(40) // 2)
    found = [
        evaluate(ANSWERS["logsumexp"], v, w, ids, "triton", moved(*upstream(20, 40)))
        for _ in range(2)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*([*x[0], *x[1]] for x in found), strict=True))


def test_no_rows_or_columns():
    for n, m in ((0, 3), (3, 0)):
        v, w = torch.zeros(n, 4, device=DEVICE), torch.zeros(m, 4, device=DEVICE)
        pairs = Pairs((n, m), (None, None), DEVICE)
        question = Question(pairs, (0, 1), (terms.exponential,))
        inputs = Inputs(Side(v, None, None, None), Side(w, None, None, None), None)
        assert engine.sums(question, inputs).tolist() == [0.0] * 3
        needs = tiled.Needs(True, True, False, False)
        grad = torch.ones(3, device=DEVICE)
        found = engine.gradients(question, inputs, grad, needs, None)[:2]
        assert [x.shape for x in found] == [v.shape, w.shape]
        assert not any(x.any() for x in found)


@pytest.mark.parametrize("m", [70, 133])
def test_blocks_of_given_scores_end_at_their_columns(m, monkeypatch, poisoned):
    """Nothing is read or written beyond, where the width is no multiple of a tile's."""
    monkeypatch.setattr(engine, "READING_TILE", engine.TileConfig(8, 8, 8, 1, 4, 2))
    monkeypatch.setattr(engine, "BLOCK", 64 * 64)
    monkeypatch.setattr(engine, "BLOCK_ROWS", 64)
    monkeypatch.setattr(engine, "whole_tiles", lambda size: 64)
    space = torch.full((5 * m + 200,), torch.nan, device=DEVICE)
    scores = space[: 5 * m].view(5, m)
    scores.copy_(torch.linspace(-1, 1, 5 * m).view(5, m))
    ids = moved(torch.arange(5), torch.arange(m) % 5)
    found = []
    for name in ("triton", "dense"):
        leaf = scores.detach().requires_grad_()
        value = Similarity.from_scores(leaf, *ids, engine=name).both.logsumexp(3.0)
        (grad,) = torch.autograd.grad(value.square().sum(), leaf)
        found.append((value.detach(), grad))
    torch.testing.assert_close(*found)


# ------------------------------------------------------------------------------------------- memory


class Peak(TorchDispatchMode):
    """Counter of the bytes of tensors alive at a time, besides given ones."""

    def __init__(self, *given):
        super().__init__()
        self.given, self.live, self.bytes = {x.untyped_storage()._cdata for x in given}, {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else (found,):
            if (
                isinstance(x, torch.Tensor)
                and (key := x.untyped_storage()._cdata) not in self.given
            ):
                self.live[key] = StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()
        self.live = {key: x for key, x in self.live.items() if not x[0].expired()}
        self.bytes = max(self.bytes, sum(size for _, size in self.live.values()))
        return found


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Run on the meta device, with tensors of real sizes without data, and kernels that do
    nothing.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(engine, "INTERPRETED", False)
    # cuBLAS needs no memory from PyTorch's allocator
    monkeypatch.setattr(engine, "_addmm", lambda total, a, b: None)
    monkeypatch.setattr(engine, "_mm", product_on_meta)
    monkeypatch.setattr(Pairs, "listable", True)
    monkeypatch.setattr(Pairs, "_numbers", lambda self: Numbers(max(self.shape), (1, 1)))
    monkeypatch.setattr(
        Pairs, "listed", property(lambda self: [meta(max(self.shape), dtype=torch.int64)] * 2)
    )


def product_on_meta(a, b):
    return meta(a.shape[0], b.shape[1], dtype=torch.float32)


def meta(*shape, dtype, **options):
    return torch.empty(shape, dtype=dtype, device="meta", **options)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is replaced")
@pytest.mark.parametrize(
    ("n", "m", "d", "dtype"),
    [
        (32768, 32768, 1024, torch.bfloat16),
        (32768, 32768, 1024, torch.float16),
        (32768, 32768, 512, torch.float32),
        (16384, 65536, 1024, torch.bfloat16),
        (262144, 262144, 512, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("with_ids", [True, False])
def test_memory_beside_inputs_and_gradients(n, m, d, dtype, with_ids, as_on_a_gpu):
    """At most 256 MiB: also with listed positives, whose gradient needs no second copy of all
    embeddings.
    """
    if n != m and not with_ids:
        return
    v, w = (meta(size, d, dtype=dtype, requires_grad=True) for size in (n, m))
    ids = [meta(size, dtype=torch.int64) for size in (n, m)] if with_ids else []
    with Peak(v, w, *ids) as peak:
        info_nce_loss(Similarity(v, w, *ids, engine="triton")).backward()
    gradients = sum(x.numel() * x.element_size() for x in (v, w))
    assert 0 < peak.bytes - gradients <= 256 * 2**20, (peak.bytes - gradients) / 2**20


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is replaced")
@pytest.mark.parametrize(
    ("slots", "m"), [(5, 8192), (16, 8192), (17, 8192), (64, 8192), (819, 8192), (40, 65536)]
)
@pytest.mark.parametrize("asked", ["sums", "a total"])
def test_memory_of_many_positives(asked, slots, m, as_on_a_gpu):
    """Sums of tiles take at most 256 MiB with the panel, however many positives an anchor has.

    The held float32 sums of the embeddings' gradients and the gradient of the shifts are outputs.
    """
    n, d = 8192, 512
    sides = [Side(meta(size, d, dtype=torch.bfloat16), None, None, None) for size in (n, m)]
    inputs = Inputs(*sides, None)
    shift = meta(slots, n + m, dtype=torch.float32)
    pairs = Pairs((n, m), (None, None), shift.device)
    question = Question(pairs, (0, 1), (terms.excess,), shift=shift)
    grad = meta(n + m, dtype=torch.float32)
    needs = tiled.Needs(True, True, False, False, shift=True)
    outputs = (n + m) * d * 4 + shift.nbytes
    if slots > engine.SLOTS:
        outputs *= 2  # until the gradients of the shifts are joined
    with Peak(shift, grad, *[side.x for side in sides]) as peak:
        if asked == "sums":
            engine.gradients(question, inputs, grad, needs, None)
        else:
            engine.sums_and_gradients(question, inputs, grad, needs)
    assert shift.nbytes < peak.bytes <= outputs + 256 * 2**20, peak.bytes / 2**20


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is replaced")
@pytest.mark.parametrize("answer", ["sums", "gradients"])
@pytest.mark.parametrize("groups", [True, False])
def test_memory_of_relations(groups, answer, as_on_a_gpu, monkeypatch):
    """Groups take no memory, and a mask is made for one block after the other."""
    n, d = 32768, 512
    sides = [Side(meta(n, d, dtype=torch.bfloat16), None, None, None) for _ in range(2)]
    labels = [meta(n, 1 if groups else 3, dtype=torch.int64) for _ in range(2)]
    own = [meta(n, dtype=torch.int64) for _ in range(2)] if groups else None
    pairs = RelatedPairs(Labels(*labels, own))
    question = Question(pairs, (0, 1), (terms.exponential,))
    grad = meta(2 * n, dtype=torch.float32)
    needs = tiled.Needs(True, True, False, False, dtypes=(torch.float32, torch.float32))
    masks = []
    excluded = RelatedPairs.excluded
    monkeypatch.setattr(RelatedPairs, "excluded", lambda *args: masks.append(1) or excluded(*args))
    with Peak(grad, *labels, *(own or []), *[side.x for side in sides]) as peak:
        if answer == "sums":
            engine.sums(question, Inputs(*sides, None))
        else:
            engine.gradients(question, Inputs(*sides, None), grad, needs, None)
    outputs = 2 * n * 4 if answer == "sums" else 2 * n * d * 4
    assert 0 < peak.bytes <= outputs + 256 * 2**20, (peak.bytes - outputs) / 2**20
    assert bool(masks) != groups


class Work:
    """Counter of the FLOPs of the products of kernels and of cuBLAS, on the meta device.

    ``panels`` counts the bytes of panels that they write and read.
    """

    def __init__(self):
        self.flops = self.panels = 0

    def launched(self, launch, *args, **options):
        """Count a kernel's products, if it multiplies: inner products of vectors of a block."""
        if "FORM" not in options:
            return
        if isinstance(args[-1], kernels.Panel) and args[-1].x is not None:
            self.panels += args[-1].x.nbytes
        inputs, _, _, _, size_m, size_n, *_ = args
        if options["C"].RUNS_IF is True:  # an attempt that failed, which is rare
            return
        if inputs.rows.x is not None:
            self.flops += 2 * size_m * size_n * inputs.dim

    def multiplied(self, total, a, b):
        """Count a product of cuBLAS."""
        self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        self.panels += a.nbytes


class Operators(TorchDispatchMode):
    """Counter of operators, and of the bytes of panels of scores that they read and write."""

    def __init__(self, is_panel):
        super().__init__()
        self.is_panel, self.count, self.bytes = is_panel, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        aliases = [x.alias_info for x in function._schema.returns]
        is_view = any(x is not None and not x.is_write for x in aliases)
        if not is_view and "empty" not in str(function):
            self.count += 1
            results = found if isinstance(found, tuple | list) else (found,)
            tensors = (*args, *(kwargs or {}).values(), *results)
            panels = {id(x): x for x in tensors if torch.is_tensor(x) and self.is_panel(x)}
            self.bytes += sum(x.nbytes for x in panels.values())
        return found


@pytest.fixture
def work(as_on_a_gpu, monkeypatch):
    """Count the products of steps on the meta device."""
    from triton.runtime import interpreter

    counter = Work()

    def launched(*args, **options):
        counter.launched(*args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(engine, "_addmm", counter.multiplied)

    def product(a, b):
        counter.multiplied(None, a, b)
        return product_on_meta(a, b)

    monkeypatch.setattr(engine, "_mm", product)
    return counter


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is replaced")
@pytest.mark.parametrize(("dtype", "wanted"), [(torch.bfloat16, 6), (torch.float16, 18)])
def test_traffic_and_operators_of_a_panel(dtype, wanted, work):
    """bfloat16: the kernel writes 2 bytes a score, and each product reads them. float16: it writes
    4, which the largest one takes to find and a copy to round, and products read 2 each.
    """
    n, d = 32768, 64
    v, w = (meta(n, d, dtype=dtype, requires_grad=True) for _ in range(2))
    rows = engine.BLOCK_ROWS
    with Operators(lambda x: x.dim() == 2 and len(x) == rows and x.shape[1] != d) as operators:
        itrloss.InfoNCELoss(engine="triton").to("meta")(v, w).backward()
    assert work.panels + operators.bytes == wanted * n * n
    assert work.flops == 8 * n * n * d
    panels = 32 if dtype == torch.bfloat16 else 104
    each_panel = 0 if dtype == torch.bfloat16 else 8  # rounding, and adding to two sums
    assert operators.count <= 120 + each_panel * panels


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is replaced")
@pytest.mark.parametrize(("memory", "wanted"), [(80e9, 8), (8e9, 10), (0, 10)])
@pytest.mark.parametrize("learnable", [True, False])
def test_products_of_a_large_batch(memory, wanted, learnable, work, monkeypatch):
    """Sums of one side's gradient are held where they take 1/64 of the memory: a visit less."""
    monkeypatch.setattr(engine, "memory_of", lambda device: int(memory))
    n, d = 65536, 768
    v, w = (meta(n, d, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    itrloss.InfoNCELoss(learnable=learnable, engine="triton").to("meta")(v, w).backward()
    assert work.flops == wanted * n * n * d


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is replaced")
@pytest.mark.parametrize(
    ("options", "dtype", "wanted"),
    [
        ({}, torch.bfloat16, 8),
        ({"learnable": True}, torch.bfloat16, 8),
        ({"temperature": 0.01}, torch.bfloat16, 8),
        ({"temperature": 0.005}, torch.bfloat16, 10),  # sums of so large a scale may vanish
        ({"learnable": True}, torch.float32, 10),  # cuBLAS cannot be told not to multiply
    ],
)
def test_products_of_a_log_sum_exp(options, dtype, wanted, work, monkeypatch):
    """No pass for the maxima, whether the host knows the scale or not."""
    monkeypatch.setattr(torch, "mm", lambda a, b, out: work.multiplied(out, a, b) or out)
    n, d = 32768, 512
    v, w = (meta(n, d, dtype=dtype, requires_grad=True) for _ in range(2))
    itrloss.InfoNCELoss(**options, engine="triton").to("meta")(v, w).backward()
    assert work.flops == wanted * n * n * d


LARGE = {
    "siglip": lambda sim: sigmoid_loss(sim, *(meta(1, dtype=torch.float32) for _ in range(2))),
    "siglip, learnt": lambda sim: sigmoid_loss(
        sim, *(meta(1, dtype=torch.float32, requires_grad=True) for _ in range(2)), "sum"
    ),
    "siglip, each": lambda sim: torch.cat(sigmoid_loss(sim, 10.0, -10.0, "none")).sum(),
    "triplet": lambda sim: triplet_loss(sim, mining="all"),
    "triplet, mean": lambda sim: triplet_loss(sim, mining="all", reduction="mean"),
}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is replaced")
@pytest.mark.parametrize("name", LARGE)
def test_products_of_totals(name, work, monkeypatch):
    """Multiples of NMD of a large batch: of both sides, one, with less memory, without training."""
    n, d = 65536, 768

    def products(memory, *trained):
        monkeypatch.setattr(engine, "memory_of", lambda device: int(memory))
        v, w = (meta(n, d, dtype=torch.bfloat16, requires_grad=x) for x in trained)
        work.flops = 0
        value = LARGE[name](Similarity(v, w, engine="triton"))
        forward = work.flops
        if any(trained):
            value.backward()
        return forward / (n * n * d), work.flops / (n * n * d)

    if name == "siglip, each":
        assert products(80e9, True, True) == (2, 8)
        return
    assert products(80e9, True, True) == (6, 6)
    assert products(80e9, True, False) == (4, 4)
    assert products(16e9, True, True) == (2, 8)
    assert products(8e9, True, True) == (2, 10)
    assert products(80e9, False, False)[0] == 2


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is replaced")
@pytest.mark.parametrize(
    ("memory", "at_most", "wanted"),
    [
        (80e9, 50.0, (4, 4)),
        (1e9, 50.0, (2, 6)),
        (80e9, None, (2, 6)),  # the first attempt may fail, and what it found with it
    ],
)
def test_products_beside_a_memory(memory, at_most, wanted, work, monkeypatch):
    """The gradient of anchors that alone are trained comes with their log-sum-exp."""
    monkeypatch.setattr(engine, "memory_of", lambda device: int(memory))
    n, m, d = 65536, 131072, 768
    v = meta(n, d, dtype=torch.bfloat16, requires_grad=True)
    ids = meta(n, dtype=torch.int64), meta(m, dtype=torch.int64)
    sim = Similarity(v, meta(m, d, dtype=torch.bfloat16), *ids, engine="triton")
    scale = meta(n, dtype=torch.float32)
    values = sim.logsumexp(scale, at_most=at_most)
    forward = work.flops
    values.sum().backward()
    assert (forward, work.flops) == tuple(x * n * m * d for x in wanted)


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is replaced")
@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        (itrloss.MemoryDiversityContrastiveLoss(engine="triton"), 6),  # 2 of them for its diversity
        (itrloss.UnifiedTrainingObjective(scale=50.0, engine="triton"), 4),
        (itrloss.UnifiedTrainingObjective(engine="triton"), 6),  # sums of its scale may vanish
    ],
)
def test_products_of_losses_with_a_memory(loss, wanted, work):
    """For each of both matrices with the memory; those with the batch and its keys are small."""
    n, m, d = 128, 2**20, 256
    given = [meta(n, d, dtype=torch.bfloat16, requires_grad=k < 2) for k in range(4)]
    memory = itrloss.CoupledMemory(m, d, dtype=torch.bfloat16).to("meta")
    loss.to("meta")(*given, memory).backward()
    assert wanted <= work.flops / (2 * n * m * d) <= wanted + 0.01


@pytest.mark.slow
@pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is replaced")
@pytest.mark.parametrize("dtype", HALF)
def test_memory_of_a_total(dtype, as_on_a_gpu, monkeypatch):
    """Held sums of both sides' gradients in float32, 402 MB here, and at most 256 MiB."""
    monkeypatch.setattr(engine, "memory_of", lambda device: int(80e9))
    n, d = 65536, 768
    v, w = (meta(n, d, dtype=dtype, requires_grad=True) for _ in range(2))
    with Peak(v, w) as peak:
        LARGE["siglip, learnt"](Similarity(v, w, engine="triton")).backward()
    gradients = 2 * n * d * v.element_size()
    assert 0 < peak.bytes - gradients - 2 * n * d * 4 <= 256 * 2**20


# -------------------------------------------------------------------------------- checks before use

# The form of InfoNCE with ids, of which the others differ in a few places.
ASKED_FORM = trial.Form(
    device=DEVICE,
    dtypes=(torch.bfloat16, torch.bfloat16),
    dim=24,
    normalized=(True, True),
    large=False,
    sides=(0, 1),
    terms=(terms.exponential,),
    over="negatives",
    ids=True,
    groups=None,
    mask=False,
    scale="number",
    shift="number",
    below="none",
    above="none",
    slots=1,
    attempt="none",
    listed="listed",
    gradients=trial.Trained(rows=torch.float32, cols=torch.bfloat16),
    early=False,
    weights="none",
)
FLOATS = {"dtypes": (torch.float32, torch.float32)}
LEARNT = trial.Trained(torch.float32, None, scale=True)
FROM_A_MEMORY = {
    "sides": (0,),
    "early": True,
    "gradients": trial.Trained(torch.bfloat16, None),
    "listed": "none",
}
FORMS = {
    "bfloat16": {},
    "float16": {"dtypes": (torch.float16, torch.float16)},
    "float32": FLOATS,
    "no ids": {"ids": False, "listed": "diagonal"},
    "groups": {"groups": "same"},
    "other groups, over all": {"groups": "other", "over": "all"},
    "maximum in a group": {"groups": "same", "terms": (), "gradients": trial.Trained()},
    "a mask": {"ids": False, "mask": True},
    "a mask of positives": {"ids": False, "mask": True, "over": "positives", "listed": "none"},
    "maximum by a mask": {
        "ids": False,
        "mask": True,
        "terms": (),
        "gradients": trial.Trained(),
    },
    "a mask of given scores": {
        **FLOATS,
        "ids": False,
        "mask": True,
        "dim": 0,
        "normalized": (False, False),
        "gradients": trial.Trained(scores=True),
    },
    "a memory": {"normalized": (True, False), "sides": (0,), "listed": "none"},
    "learnt": {"scale": "one", "shift": "each", "gradients": LEARNT},
    "attempted": {"scale": "one", "shift": "each", "attempt": "one", "gradients": LEARNT},
    "maximum after an attempt": {"terms": (), "gradients": trial.Trained(), "attempt": "one"},
    "limits": {"below": "number", "above": "each", "scale": "each"},
    "given": {
        **FLOATS,
        "dim": 0,
        "normalized": (False, False),
        "gradients": trial.Trained(scores=True),
    },
    "no gradient": {"gradients": trial.Trained()},
    "maximum": {"terms": (), "gradients": trial.Trained()},
    "softplus": {"terms": (terms.softplus,), "shift": "one", "scale": "one", "gradients": LEARNT},
    "excess": {"terms": (terms.excess,), "slots": 2, "shift": "each", "sides": (1,)},
    "many shifts": {
        "terms": (terms.excess,),
        "slots": 17,
        "shift": "each",
        "gradients": trial.Trained(torch.float32, torch.float32, shift=True),
    },
    "moments": {"terms": (terms.identity, terms.square), "over": "all"},
    "a total": {
        "terms": (terms.softplus,),
        "shift": "one",
        "scale": "one",
        "early": True,
        "weights": "one",
    },
    "a weighted total": {
        "terms": (terms.excess,),
        "early": True,
        "weights": "each",
        "listed": "none",
    },
    "early sums": {**FROM_A_MEMORY, "scale": "each"},
    "early sums of one scale": {**FROM_A_MEMORY, "listed": "listed"},
}
WEIGHTS = {"none": None, "one": torch.ones(1), "each": torch.ones(2)}


@pytest.fixture
def examples(monkeypatch, few_tiles):
    """Small examples that were not tried yet."""
    monkeypatch.setattr(trial, "_results", {})
    monkeypatch.setattr(trial, "LARGE_EXAMPLE", (40, 56))
    monkeypatch.setattr(trial, "SMALL_EXAMPLE", (20, 40))


def refused(*args, **kwargs):
    raise RuntimeError("no C compiler")


def about_triton(warned):
    return [w for w in warned if "Triton engine" in str(w.message)]


@pytest.mark.parametrize("name", FORMS)
def test_the_very_form_is_tried(name, examples, recwarn, monkeypatch):
    """What the engine is asked for in the trial is of the form, and the answers agree."""
    wanted = ASKED_FORM._replace(**FORMS[name])
    pairs = {"none": None, "diagonal": (None, None), "listed": (torch.zeros(1),) * 2}
    about = wanted.gradients, pairs[wanted.listed], wanted.early, WEIGHTS[wanted.weights]
    seen = set()

    def noted(answer, question, inputs, *rest):
        if answer is highest:
            form = trial.form_of_maximum(question, inputs)
            seen.add(form._replace(gradients=wanted.gradients, listed=wanted.listed))
        else:
            seen.add(trial.form_of(question, inputs, *about))
        return answer(question, inputs, *rest)

    highest = engine.highest
    for answer in (engine.sums, highest, engine.sums_and_gradients, engine.gradients):
        monkeypatch.setattr(engine, answer.__name__, functools.partial(noted, answer))
    assert trial.works(wanted)
    assert not about_triton(recwarn)
    assert seen == {wanted}
    assert list(trial._results) == [wanted]  # and nothing else is tried


def test_each_form_is_tried_once(examples, monkeypatch):
    tried = []
    monkeypatch.setattr(trial, "error_of", lambda form: tried.append(form) or "")
    v, w = embeddings(20, 20, dtype=torch.bfloat16)
    scale = torch.tensor([5.0], requires_grad=True)
    asked = [
        lambda sim: sim.sum(terms.excess),
        lambda sim: sim.sum(terms.excess, scale=3.0),
        lambda sim: sim.sum(terms.excess, scale=scale),
        lambda sim: sim.sum(terms.square),
        lambda sim: sim.both.sum(terms.square),
        lambda sim: sim.sum(terms.square, below=0.5),
    ]
    for _ in range(2):
        for question in asked:
            question(chosen_by_auto(v, w))
        asked[0](chosen_by_auto(v, w, *make_ids("random", 20, 20)))
        asked[0](chosen_by_auto(v[:, :5], w[:, :5]))
        asked[0](chosen_by_auto(v.float(), w.float()))
        asked[0](chosen_by_auto(v.clone().requires_grad_(), w))
    assert len(tried) == 9  # the second question differs from the first by a number alone
    assert len(set(tried)) == 9


def test_the_example_is_tried_out_of_sight_of_the_caller(examples, recwarn):
    modes = [torch.device("meta"), torch.inference_mode(), torch.no_grad(), FakeTensorMode()]
    modes += [torch.autocast(DEVICE.type, torch.bfloat16), saved_tensors_hooks(refused, refused)]
    for mode in modes:
        trial._results.clear()
        with mode:
            assert trial.works(ASKED_FORM._replace(**FLOATS))
    assert not about_triton(recwarn)


def full(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_full_memory_is_no_answer(examples, monkeypatch):
    monkeypatch.setattr(engine, "sums", full)
    with pytest.warns(UserWarning, match="OutOfMemoryError"):
        assert not trial.works(ASKED_FORM)
    assert not trial._results


def test_nothing_is_tried_while_a_graph_is_captured(examples, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(trial, "error_of", refused)
    with pytest.warns(UserWarning, match="not tried while a CUDA graph is captured"):
        assert not trial.works(ASKED_FORM)
    trial._results[ASKED_FORM] = True
    assert trial.works(ASKED_FORM)


@pytest.mark.parametrize(
    ("name", "broken", "why"),
    [
        ("add_product_", lambda *args: None, "finds something else than the tiled one"),
        ("contiguous_vectors", torch.zeros_like, "finds something else"),
        ("sorted_by", lambda *args: kernels.Listed(), "finds something else"),
        ("AnchorTotals", refused, "fails: RuntimeError: no C compiler"),
    ],
)
def test_what_does_not_work_is_left_alone(name, broken, why, examples, monkeypatch):
    monkeypatch.setattr(engine, name, broken)
    told = f"the Triton engine {why}.*does without it for sums of exponential over negatives .24 "
    with pytest.warns(UserWarning, match=told):
        assert not trial.works(ASKED_FORM)
    assert not trial.works(ASKED_FORM)  # and it is not tried again


# -------------------------------------------------------------------------------- errors in a step


def chosen_by_auto(v, w, *ids, **options):
    """Return a similarity whose engine is Triton, as if ``"auto"`` had chosen it."""
    sim = Similarity(*moved(v, w, *ids), engine="triton", **options)
    sim._matrix.strict = False
    return sim


class CompilationError(Exception):
    """As Triton's, which derives from Exception alone."""


def fails(at):
    """Return launches that fail from the one with the number ``at`` on."""
    launches = []

    def launch(*args, **kwargs):
        launches.append(args)
        if len(launches) > at:
            raise CompilationError("out of resource: shared memory")

    return launch


LOSSES_OF_SIMILARITIES = {
    "infonce": itrloss.InfoNCELoss(),
    "dcl": itrloss.DiversityContrastiveLoss(),
    "hal": itrloss.HubnessAwareLoss(),
    "sigmoid": itrloss.SigmoidLoss(),
    "triplet all": itrloss.TripletLoss(mining="all"),
    "triplet mean": itrloss.TripletLoss(mining="all", reduction="mean"),
}


@pytest.mark.parametrize("at", [0, 1, 2, 3, "the projection"])  # the first launches are forward's
@pytest.mark.parametrize("name", LOSSES_OF_SIMILARITIES)
def test_no_error_of_triton_surfaces_in_a_step_of_auto(name, at, examples, monkeypatch):
    """Value and gradients are then the tiled engine's, whatever fails, and a warning says it."""
    monkeypatch.setattr(trial, "error_of", lambda form: "")
    v, w = (x.to(torch.float32) for x in embeddings(20, 20))
    wanted, warned = step_of(name, Similarity, v, w, engine="tiled")
    assert not warned
    if at != "the projection":
        launches = launches_of(name, v, w)
        assert launches > 0
        at = min(at, launches - 1)  # a GPU's tiles are large, and launches few
    break_triton(at, monkeypatch)
    found, warned = step_of(name, chosen_by_auto, v, w)
    assert warned
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.cpu(), right, rtol=2e-5, atol=1e-6)


def launches_of(name, v, w):
    """Return how many kernels a step launches."""
    with mock.patch.object(
        engine.Pass, "launch", autospec=True, side_effect=engine.Pass.launch
    ) as launch:
        _, warned = step_of(name, chosen_by_auto, v, w)
    assert not warned
    return launch.call_count


def break_triton(at, monkeypatch):
    """Let launches from a number on fail, or the kernel that projects gradients."""
    if at == "the projection":
        monkeypatch.setattr(engine.VectorGradient, "finish", refused)
        return
    launch = fails(at)
    real = engine.Pass.launch

    def sometimes(run, *args):
        launch()
        real(run, *args)

    monkeypatch.setattr(engine.Pass, "launch", sometimes)


def step_of(name, similarity, v, w, **options):
    """Return a loss and its gradients, and the warnings about Triton."""
    x, y = (z.clone().requires_grad_() for z in (v, w))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loss = LOSSES_OF_SIMILARITIES[name](similarity(x, y, **options))
        loss.backward()
    return [loss.detach(), x.grad, y.grad], about_triton(warned)


def test_a_form_that_failed_in_a_step_is_not_tried_again(examples, monkeypatch):
    v, w = embeddings(20, 20, dtype=torch.float32)
    calls = []
    monkeypatch.setattr(trial, "error_of", lambda form: "")
    monkeypatch.setattr(engine, "sums", lambda *args: calls.append(args) or refused())
    with pytest.warns(UserWarning, match="fails: RuntimeError: no C compiler"):
        wanted = chosen_by_auto(v, w).sum(terms.square)
    again = chosen_by_auto(v, w).sum(terms.square)
    assert len(calls) == 1
    assert torch.equal(wanted, again)
    by_tiles = Similarity(v, w, engine="tiled").sum(terms.square)
    torch.testing.assert_close(wanted.cpu(), by_tiles)


def test_maxima_fall_back_too(examples, monkeypatch):
    v, w = moved(*embeddings(20, 20, dtype=torch.float32))
    question = Question(Pairs((20, 20), (None, None), v.device), (0, 1), (terms.identity,))
    monkeypatch.setattr(trial, "error_of", lambda form: "")
    monkeypatch.setattr(engine, "highest", refused)
    with pytest.warns(UserWarning, match="does without it for maxima over negatives"):
        found = chosen_by_auto(v, w)._matrix.highest(question)
    assert torch.equal(found, Similarity(v, w, engine="tiled")._matrix.highest(question))
    with pytest.raises(RuntimeError, match=r"failed for maxima.*no C compiler"):
        Similarity(v, w, engine="triton")._matrix.highest(question)


def test_a_full_memory_is_the_users_to_know(examples, monkeypatch):
    """Scripts look for a batch size that fits by this error; no other engine hides it."""
    monkeypatch.setattr(trial, "error_of", lambda form: "")
    monkeypatch.setattr(engine, "sums", full)
    v, w = embeddings(20, 20, dtype=torch.float32)
    with pytest.raises(torch.OutOfMemoryError):
        chosen_by_auto(v, w).sum(terms.square)


@pytest.mark.parametrize("part", ["sums", "gradients"])
def test_an_error_of_triton_by_name_names_the_form(part, examples, monkeypatch):
    v, w = (x.requires_grad_() for x in moved(*embeddings(20, 20, dtype=torch.float32)))
    monkeypatch.setattr(engine, part, refused)
    monkeypatch.setattr(trial, "error_of", refused)  # nothing is tried
    about = (
        r"engine='triton' failed for sums of square over negatives \(6 dimensions of torch.float32 "
        "and torch.float32, small tiles.*no C compiler; engine='tiled'"
    )
    with pytest.raises(RuntimeError, match=about) as raised:
        Similarity(v, w, engine="triton").sum(terms.square).sum().backward()
    assert "no C compiler" in str(raised.value.__cause__)


def test_the_compiler_does_not_look_into_the_example(examples, monkeypatch):
    """A similarity may be made outside of compiled code that asks it."""
    monkeypatch.setattr(trial, "error_of", refused)
    v, w = embeddings(20, 20, dtype=torch.float32)
    sim = chosen_by_auto(v, w)
    torch._dynamo.reset()
    compiled = torch.compile(lambda: sim.sum(terms.square), backend="eager")
    by_tiles = Similarity(v, w, engine="tiled").sum(terms.square)
    torch.testing.assert_close(compiled().cpu(), by_tiles)


def test_what_triton_cannot_do_is_refused(monkeypatch):
    v, w = embeddings(3, 3)
    with pytest.raises(TypeError, match="engine: 'triton' computes in float32"):
        Similarity(v, w, engine="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="engine: 'triton' needs an accelerator"):
        Similarity(v.float(), w.float(), engine="triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install triton"):
        Similarity(v.float(), w.float(), engine="triton")


# -------------------------------------------------------------------------------------- compilation


CAPABILITIES = 90, 80, 100


@pytest.mark.slow
def test_kernels_compile_for_gpus(tmp_path):
    """Nearly all values of a thread are in registers, and two programs fit on a multiprocessor."""
    found = compiled(tmp_path)
    assert {kernel["GPU"] for kernel in found} == set(CAPABILITIES)
    for kernel in found:
        assert kernel["REG"] and kernel["STACK"] <= 640 and not kernel["LOCAL"], kernel
        assert kernel["DYNAMIC"] <= 97 * 2**10, kernel
        assert not kernel["STACK"] or not kernel["name"].startswith("project_kernel"), kernel
        # Two terms, and gradients by each anchor's learnt scale, hold more, and may take all
        # registers. What is only launched to return at once may spill.
        of_one = "learnt" not in kernel["name"] or kernel["SHARED"]
        alone = "_kernel exponential {" in kernel["name"] and not kernel["RARE"]
        limited = alone and of_one
        siglip = "_kernel softplus {" in kernel["name"] and "'total': True" in kernel["name"]
        if kernel["GPU"] == 90 and (limited or siglip):
            # SigLIP's total with its gradient spills 112 bytes. An H100 runs it at 341 TFLOP/s all
            # the same, like InfoNCE's gradient (benchmarks/results/gpu_*_first.json).
            most = 112 if siglip else 64
            assert kernel["STACK"] <= most, kernel
            assert kernel["REG"] <= 128 or kernel["WARPS"] == 4, kernel
            # a logarithm and a division in place of the polynomial: 3,561
            if siglip and "sums_kernel" in kernel["name"] and "'ids': False" in kernel["name"]:
                assert kernel["AFTER"] <= 1700, kernel
        lean = alone and kernel["SHARED"] and not kernel["IDS"] and kernel["WARPS"] == 8
        if kernel["GPU"] <= 90 and lean and "'limits': 2" not in kernel["name"]:
            most = {"sums_kernel": 1400, "gradient_kernel": 1250}
            assert kernel["AFTER"] <= most[kernel["name"].split()[0]], kernel


def compiled(folder):
    """Return the kernels for the GPUs, two of which are compiled at a time."""
    tests = Path(__file__).parent.parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(tests), *sys.path]),
    }
    command = [sys.executable, str(tests / "support" / "gpu_compiler.py"), *map(str, CAPABILITIES)]
    # A process that crashes would be waited for without end.
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
