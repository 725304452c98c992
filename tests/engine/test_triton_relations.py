"""Groups, sets of labels and matrices of matches on the Triton engine."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from support import losses_registry
from support.cases import embeddings, pairwise, slow_but_one_of_each
from support.on_triton import (
    ASKED_TERMS,
    DEVICE,
    HALF,
    OF_KERNELS,
    assert_close,
    assert_near,
    moved,
)
from support.reference import formula, unit

import itrloss
from itrloss import NO_ID, Related
from itrloss.engine import terms, tiled
from itrloss.engine import triton as engine
from itrloss.engine.inputs import Inputs, Side
from itrloss.engine.question import Question
from itrloss.related import relation_of as made

pytestmark = OF_KERNELS
NAMES = itrloss.checks.ROWS_AND_COLUMNS
RELATIONS = (
    "same group",
    "other group",
    "no group in common",
    "one label",
    "sets",
    "matches",
)


def drawn(seed, high, *shape):
    """Integers from 0 on, below a number."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator)


def relation_of(kind, n, m):
    """Ids and a Related of a kind. Some entries do not exist, some are open to all groups."""
    if kind == "sets":
        return label_sets(n, m), None
    if "matches" in kind:
        matches = drawn(1, 3, n, m).float()
        unjudged = drawn(2, 3, n, m) == 0
        matches[unjudged] = torch.nan
        return (None, None), Related(matches=matches)
    row_ids = drawn(1, 4, n)
    col_ids = drawn(2, 4, m)
    row_ids[-1] = NO_ID
    col_ids[1 % m] = NO_ID
    if kind == "one label":
        return (row_ids[:, None], col_ids[:, None]), None
    rule = "other" if kind == "other group" else "same"
    return (row_ids, col_ids), Related(groups_of(kind, n, m), rule)


def label_sets(n, m):
    """Up to two labels of rows, and three of columns."""
    row_labels = drawn(1, 9, n, 2)
    col_labels = drawn(2, 9, m, 3)
    has_one = drawn(3, 2, n) == 0
    row_labels[has_one, 1] = NO_ID
    row_labels[0] = NO_ID
    col_labels[-1] = NO_ID
    return row_labels, col_labels


def groups_of(kind, n, m):
    """Groups of rows and of columns."""
    row_groups = drawn(3, 3, n)
    col_groups = drawn(4, 3, m)
    if kind == "no group in common":
        return row_groups, col_groups + 10
    row_groups[0] = NO_ID
    col_groups[-1] = NO_ID
    return row_groups, col_groups


def state(i, j, ids, related):
    """Whether pair i, j is positive, negative or None, from the meaning of the input alone."""
    if related is not None and related.matches is not None:
        value = related.matches[i, j].item()
        if math.isnan(value):
            return None
        return "positive" if value > 0 else "negative"
    row_ids, col_ids = ids
    own = {*row_ids[i].reshape(-1).tolist()} - {NO_ID}
    other = {*col_ids[j].reshape(-1).tolist()} - {NO_ID}
    if not own or not other:
        return None
    if own & other:
        return "positive"
    if related is None:
        return "negative"
    row_groups, col_groups = related.groups
    own_group = row_groups[i].item()
    other_group = col_groups[j].item()
    is_open = NO_ID in (own_group, other_group)
    follows_the_rule = (own_group == other_group) == (related.rule == "same")
    return "negative" if is_open or follows_the_rule else None


COUNTED = {
    "negatives": ["negative"],
    "positives": ["positive"],
    "all": ["negative", "positive"],
}


def included(kind, n, m, over):
    """The (N, M) bool mask of the pairs of a sum."""
    ids, related = relation_of(kind, n, m)
    mask = torch.zeros(n, m, dtype=torch.bool)
    for i in range(n):
        for j in range(m):
            mask[i, j] = state(i, j, ids, related) in COUNTED[over]
    return mask


def on_device(kind, n, m):
    """The pairs of a relation where kernels run."""
    ids, related = relation_of(kind, n, m)
    if related is not None:
        groups = tuple(moved(*related.groups))
        related = related._replace(groups=groups, matches=moved(related.matches)[0])
    return made((n, m), tuple(moved(*ids)), related, DEVICE, NAMES)


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
    function = formula(term)
    sums = []
    begin = 0
    for side in sides:
        own = scores.T if side else scores
        counted = mask.T if side else mask
        anchors = slice(begin, begin + len(own)) if len(scale) > 1 else slice(0, 1)
        begin += len(own)
        z = scale[anchors, None] * own + shift[anchors, None]
        values = function(z).expand_as(own)
        sums.append(values.masked_fill(~counted, 0.0).sum(1))
    return torch.cat(sums)


class Asked(NamedTuple):
    """A sum over related pairs in float64, and what it is computed from."""

    v: torch.Tensor
    w: torch.Tensor
    scores: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    sums: torch.Tensor

    def gradients(self, by_vectors):
        """By vectors or scores, scale and shift, for `upstream`."""
        inputs = [self.v, self.w] if by_vectors else [self.scores]
        leaves = [*inputs, self.scale, self.shift]
        return torch.autograd.grad(self.sums, leaves, self.upstream())

    def upstream(self):
        grad = torch.linspace(-1, 2, self.sums.numel(), dtype=torch.float64)
        return grad.view_as(self.sums)


def asked_in_double(kind, over, shape, key, shared, sides):
    """Sums by plain PyTorch, of which z = scale S + shift has both signs."""
    term, _ = ASKED_TERMS[key]
    size = 1 if shared else sum(shape[side] for side in sides)
    largest = 0.7 if "log1p" in key else 1.5  # log(1 + z) is steep near -1
    scale = torch.linspace(largest, 0.3, size, dtype=torch.float64, requires_grad=True)
    shift = torch.linspace(0.1, -0.1, size, dtype=torch.float64, requires_grad=True)
    v, w = (unit(x).requires_grad_() for x in embeddings(*shape))
    scores = v @ w.T
    mask = included(kind, *shape, over)
    sums = summed(term, over, scores, mask, sides, scale, shift)
    return Asked(v, w, scores, scale, shift, sums[None])


@pytest.mark.parametrize(
    ("kind", "over", "shape", "key", "shared", "sides", "form"),
    slow_but_one_of_each(
        ALL, lambda kind, over, shape, *others: None if 1 in shape else (kind, over)
    ),
)
@pytest.mark.usefixtures("few_tiles", "poisoned")
def test_terms_over_related_pairs(kind, over, shape, key, shared, sides, form, monkeypatch):
    """Sums, and gradients by vectors or scores, scale and shift, next to plain PyTorch in float64.

    Kernels find pairs by an id and a group of each entry, and others by a mask. z = scale S + shift
    has both signs.
    """
    by_vectors = form == "multiplied"
    monkeypatch.setattr(engine, "fused", lambda rows, cols: by_vectors)
    asked = asked_in_double(kind, over, shape, key, shared, sides)
    wanted = [asked.sums, *asked.gradients(by_vectors)]

    term, _ = ASKED_TERMS[key]
    scale = on_engine(asked.scale).requires_grad_()
    shift = on_engine(asked.shift).requires_grad_()
    question = Question(on_device(kind, *shape), sides, term, over, scale, shift)
    inputs = inputs_on_engine(asked, by_vectors)
    sums = engine.sums(question, inputs)
    needs = tiled.Needs(by_vectors, by_vectors, False, False, not by_vectors, True, True)
    grad = on_engine(asked.upstream()).view_as(sums)
    gradients = engine.gradients(question, inputs, grad, needs, None)
    needed = [x for x in gradients if isinstance(x, torch.Tensor)]
    assert_close([sums.view_as(asked.sums), *needed], wanted, 2e-4, 2e-5)


def on_engine(x):
    """The same in float32, where kernels run."""
    return x.detach().float().to(DEVICE)


def inputs_on_engine(asked, by_vectors):
    """The vectors, or the scores."""
    if by_vectors:
        rows = Side(on_engine(asked.v), None, None, None)
        cols = Side(on_engine(asked.w), None, None, None)
        return Inputs(rows, cols, None)
    none = Side(None, None, None, None)
    return Inputs(none, none, on_engine(asked.scores))


@pytest.mark.parametrize("kind", RELATIONS)
def test_highest_scores_of_related_pairs(kind, multiplying, few_tiles, poisoned):
    n, m = 19, 37
    v, w = (unit(x) for x in embeddings(n, m))
    excluded = ~included(kind, n, m, "negatives")
    scores = (v @ w.T).masked_fill(excluded, -torch.inf)
    wanted = 2.0 * torch.cat([scores.amax(1), scores.amax(0)])
    rows = Side(on_engine(v), None, None, None)
    cols = Side(on_engine(w), None, None, None)
    inputs = Inputs(rows, cols, None)
    question = Question(on_device(kind, n, m), (0, 1), terms.identity, scale=2.0)
    found = engine.highest(question, inputs)
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=1e-5, atol=1e-6)


def loss_input(kind, n, m):
    """A relation as losses take it, and the rule of its groups."""
    ids, related = relation_of(kind, n, m)
    related = Related() if related is None else related
    given = moved(*ids, *related.groups, related.matches)
    names = ("image_ids", "text_ids", "image_groups", "text_groups", "matches")
    by_name = zip(names, given, strict=True)
    found = {name: x for name, x in by_name if x is not None}
    return found, related.rule


RELATED_LOSSES = losses_registry.where(lambda entry: entry.takes == "pairs" and entry.oracle)


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
    monkeypatch.setattr("itrloss.engine.relation.FEW", few)
    matches = 0.7 * drawn(1, 3, 19, 22).double()
    unjudged = drawn(2, 4, 19, 22) == 0
    matches[unjudged] = torch.nan

    def outcome(engine_name, dtype, device):
        leaves = [x.to(device, dtype).requires_grad_() for x in embeddings(19, 22, 8)]
        loss = RELATED_LOSSES[name].make(engine=engine_name).to(device)
        value = loss(*leaves, matches=matches.to(device))
        gradients = torch.autograd.grad(value, leaves)
        return [value.detach(), *gradients]

    found = outcome("triton", torch.float32, DEVICE)
    wanted = outcome("dense", torch.float64, "cpu")
    assert_close(found, wanted, 1e-3, 1e-5)


def test_masks_are_for_what_ids_and_groups_do_not_say():
    masked = [kind for kind in RELATIONS if engine.compared(on_device(kind, 5, 7)).mask]
    assert masked == ["sets", "matches"]


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
