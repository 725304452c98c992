"""Groups, sets of labels and matrices of matches on the Triton engine."""

from __future__ import annotations

import math

import pytest
import torch
from support import losses_registry
from support.cases import each, embeddings, pairwise, slow_but_one_of_each
from support.on_triton import (
    ASKED_TERMS,
    DEVICE,
    HALF,
    OF_KERNELS,
    assert_close,
    assert_near,
    distance,
    moved,
)
from support.reference import formula, unit

import itrloss
from itrloss import NO_ID, Related
from itrloss.engine import terms, tiled
from itrloss.engine import triton as engine
from itrloss.engine.inputs import Inputs, Side
from itrloss.engine.question import Question
from itrloss.related import related_pairs

pytestmark = OF_KERNELS
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
    ids[0][-1] = NO_ID
    ids[1][1 % m] = NO_ID
    if kind == "one label":
        return (ids[0][:, None], ids[1][:, None]), None
    groups = drawn(3, 3, n), drawn(4, 3, m)
    groups[0][0] = NO_ID
    groups[1][-1] = NO_ID
    if kind == "no group in common":
        groups = drawn(3, 3, n), drawn(4, 3, m) + 10
    return ids, Related(groups, "other" if kind == "other group" else "same")


def state(i, j, ids, related):
    """Whether pair i, j is positive, negative or None, from the meaning of the input alone."""
    if related is not None and related.matches is not None:
        value = related.matches[i, j].item()
        if math.isnan(value):
            return None
        return "positive" if value > 0 else "negative"
    own = {*ids[0][i].reshape(-1).tolist()} - {NO_ID}
    other = {*ids[1][j].reshape(-1).tolist()} - {NO_ID}
    if not own or not other:
        return None
    if own & other:
        return "positive"
    if related is None:
        return "negative"
    groups = related.groups[0][i].item(), related.groups[1][j].item()
    same = groups[0] == groups[1]
    meet = NO_ID in groups or same == (related.rule == "same")
    return "negative" if meet else None


def included(kind, n, m, over):
    """The (N, M) bool mask of the pairs of a sum."""
    ids, related = relation_of(kind, n, m)
    if kind == "sparse matches":
        related = related._replace(matches=related.matches.to_dense())
    counted = {"negatives": ["negative"], "positives": ["positive"]}
    counted["all"] = ["negative", "positive"]
    states = [[state(i, j, ids, related) for j in range(m)] for i in range(n)]
    return torch.tensor([[x in counted[over] for x in row] for row in states]).view(n, m)


def on_device(kind, n, m):
    """The pairs of a relation where kernels run."""
    ids, related = relation_of(kind, n, m)
    if related is not None:
        groups = tuple(moved(*related.groups))
        related = related._replace(groups=groups, matches=moved(related.matches)[0])
    return related_pairs((n, m), tuple(moved(*ids)), related, DEVICE, NAMES)


# Rows and columns: several blocks on both axes with ragged ends, one row, and one column.
RELATED_SHAPES = [(19, 37), (1, 20), (18, 1), (33, 5)]


ALL = pairwise(
    kind=RELATIONS,
    over=["negatives", "all", "positives"],
    shape=RELATED_SHAPES,
    key=[*ASKED_TERMS],
    shared=[True, False],
    sides=[(0, 1), (0,), (1,)],
    form=["multiplied", "given"],
)


def summed(term, over, scores, mask, sides, scale, shift):
    """Sums of a term over the pairs of a mask, in plain PyTorch."""
    sums = []
    begin = 0
    for side in sides:
        own = scores.T if side else scores
        anchors = slice(begin, begin + len(own)) if len(scale) > 1 else slice(0, 1)
        begin += len(own)
        values = formula(term)(scale[anchors, None] * own + shift[anchors, None])
        included = mask.T if side else mask
        sums.append(values.expand_as(own).masked_fill(~included, 0.0).sum(1))
    return torch.cat(sums)


@pytest.mark.parametrize(
    ("kind", "over", "shape", "key", "shared", "sides", "form"),
    slow_but_one_of_each(
        ALL, lambda kind, over, shape, *others: None if 1 in shape else (kind, over)
    ),
)
@pytest.mark.usefixtures("few_tiles", "poisoned")
def test_terms_over_related_pairs(kind, over, shape, key, shared, sides, form, monkeypatch):
    """Sums, and gradients by vectors or scores, scale and shift, beside plain PyTorch in float64.

    Kernels find pairs by an id and a group of each entry, and others by a mask. z = scale S + shift
    has both signs.
    """
    by_vectors = form == "multiplied"
    monkeypatch.setattr(engine, "fused", lambda rows, cols: by_vectors)
    asked_terms, _ = ASKED_TERMS[key]
    size = 1 if shared else sum(shape[side] for side in sides)
    largest = 0.7 if "log1p" in key else 1.5  # log(1 + z) is steep near -1
    scale = torch.linspace(largest, 0.3, size, dtype=torch.float64, requires_grad=True)
    shift = torch.linspace(0.1, -0.1, size, dtype=torch.float64, requires_grad=True)
    v, w = (unit(x).requires_grad_() for x in embeddings(*shape))
    scores = v @ w.T
    mask = included(kind, *shape, over)
    of_terms = [summed(term, over, scores, mask, sides, scale, shift) for term in asked_terms]
    exact = torch.stack(of_terms)
    grad = torch.linspace(-1, 2, exact.numel(), dtype=torch.float64).view_as(exact)
    leaves = [v, w, scale, shift] if by_vectors else [scores, scale, shift]
    wanted = [exact, *torch.autograd.grad(exact, leaves, grad)]

    def on_engine(x):
        return x.detach().float().to(DEVICE)

    if by_vectors:
        sides_of_inputs = [Side(on_engine(x), None, None, None) for x in (v, w)]
        inputs = Inputs(*sides_of_inputs, None)
    else:
        none = Side(None, None, None, None)
        inputs = Inputs(none, none, on_engine(scores))
    a = on_engine(scale).requires_grad_()
    b = on_engine(shift).requires_grad_()
    question = Question(on_device(kind, *shape), sides, asked_terms, over, a, b)
    needs = tiled.Needs(by_vectors, by_vectors, False, False, not by_vectors, True, True)
    sums = engine.sums(question, inputs)
    given = on_engine(grad).view_as(sums)
    gradients = engine.gradients(question, inputs, given, needs, None)
    found = [sums.view_as(exact), *(x for x in gradients if isinstance(x, torch.Tensor))]
    assert_close(found, wanted, 2e-4, 2e-5)


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
    given = embeddings(19, 22, 8, dtype=dtype)
    who, rule = loss_input(kind, 19, 22)
    options = {"groups": rule} if rule == "other" else {}

    def outcome(engine_name, dtype, device):
        leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in given]
        loss = make(engine=engine_name, **options).to(device)
        value = loss(*leaves, **{name: x.to(device) for name, x in who.items()})
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    exact = outcome("dense", torch.float64, "cpu")
    tiles = outcome("tiled", dtype, DEVICE)
    found = outcome("triton", dtype, DEVICE)
    bound = {torch.float32: 2e-4, torch.bfloat16: 8e-3, torch.float16: 2e-3}[dtype]
    for got, other, wanted in zip(found, tiles, exact, strict=True):
        assert_near([got], [wanted], bound, 4 * distance(other, wanted) + 1e-6)


@pytest.mark.parametrize("dtype", HALF)
def test_a_complement_in_half_precision_is_that_of_float64(dtype, few_tiles):
    """The gradients of its two sums nearly cancel."""
    images, texts = embeddings(19, 22, 8, dtype=dtype)
    who, _ = loss_input("one label", 19, 22)

    def gradient(engine_name, dtype):
        leaf = images.to(DEVICE, dtype, copy=True).requires_grad_()
        loss = itrloss.ComplementaryContrastiveLoss(engine=engine_name)
        value = loss(leaf, texts.to(DEVICE, dtype), **who)
        return torch.autograd.grad(value, leaf)

    wanted = [x.cpu() for x in gradient("dense", torch.float64)]
    assert_near(gradient("triton", dtype), wanted, 4e-3)


@pytest.mark.parametrize("few", [0, 64])
@pytest.mark.parametrize("name", ["infonce", "dcl", "sigmoid mild"])
def test_weights_of_matches(name, few, few_tiles, poisoned, monkeypatch):
    """Positives are listed, or too many, and then their weights are a guide."""
    monkeypatch.setattr("itrloss.engine.pairs.FEW", few)
    matches = drawn(1, 3, 19, 22).double() * 0.7
    matches[drawn(2, 4, 19, 22) == 0] = torch.nan

    def outcome(engine_name, dtype, device):
        leaves = [x.to(device, dtype).requires_grad_() for x in embeddings(19, 22, 8)]
        loss = RELATED_LOSSES[name].make(engine=engine_name).to(device)
        value = loss(*leaves, matches=matches.to(device))
        return [value.detach(), *torch.autograd.grad(value, leaves)]

    found = outcome("triton", torch.float32, DEVICE)
    assert_close(found, outcome("dense", torch.float64, "cpu"), 1e-3, 1e-5)


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
    for gradient in torch.autograd.grad(value, (v, w)):
        assert gradient.isfinite().all()
