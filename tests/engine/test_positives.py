"""Positive pairs: how they are counted, listed or masked, and sums over them."""

from __future__ import annotations

import pytest
import torch
from support.answers import ANSWERS, assert_equal, evaluate
from support.cases import ENGINES, case, embeddings, pairwise

from itrloss import Similarity
from itrloss.engine import inputs, relation
from itrloss.engine.relation import IGNORE_ID

OF_POSITIVES = [
    "positives",
    "mean of positives",
    "positives and likelihood",
    "log1p",
    "log1p relu",
    "logsumexp of positives per anchor",
    "softplus of one number each",
    "std",
    "entropy",
]


@pytest.mark.parametrize(
    ("name", "engine", "kind", "biased"),
    pairwise(
        name=OF_POSITIVES,
        engine=ENGINES,
        kind=["random", "same", "ignored", "disjoint"],
        biased=[False, True],
    ),
)
def test_many_positives_are_not_listed(name, engine, kind, biased, monkeypatch):
    """Their plain scores are summed by class, and terms of them like those of negatives."""
    monkeypatch.setattr(relation, "FEW", -1)
    monkeypatch.setattr(relation.Relation, "listed", property(lambda self: pytest.fail("listed")))
    v, w, ids, grads = case((7, 12, "random" if kind == "ignored" else kind))
    reference = "reference"
    if kind == "ignored":  # for the reference, ignored entries would be negatives of the others
        ids[0][2] = IGNORE_ID
        ids[1][5:7] = IGNORE_ID
        reference = "dense"
    options = {}
    if biased and engine != "scores":
        options["bias"] = torch.linspace(-1, 1, 7).double(), torch.linspace(0.5, -1, 12).double()
    found = evaluate(ANSWERS[name], v, w, ids, engine, grads, **options)
    assert_equal(found, evaluate(ANSWERS[name], v, w, ids, reference, grads, **options))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["tiled", "kept"])
@pytest.mark.parametrize("kind", ["random", "captions", "same", "ignored"])
def test_masks_and_pair_lists_agree(engine, kind, monkeypatch):
    """Tiles with few pairs are masked by listing them, others by comparing ids; captured graphs
    never list.
    """
    monkeypatch.setitem(inputs.TILE, "cpu", (60, 10))
    v, w, ids, grads = case((10, 40, "captions" if kind == "ignored" else kind))
    if kind == "ignored":
        ids[0][3] = IGNORE_ID
        ids[1][ids[1] % 4 == 1] = IGNORE_ID
    for name, answer in ANSWERS.items():
        wanted = evaluate(answer, v, w, ids, engine, grads)
        with monkeypatch.context() as patch:
            patch.setattr(relation.Relation, "listable", False)
            assert_equal(evaluate(answer, v, w, ids, engine, grads), wanted, name)


@pytest.mark.parametrize("name", ["logsumexp", "logsumexp per anchor", "mean", "hardest"])
@pytest.mark.parametrize("ignored", [False, True])
def test_few_pairs_of_a_tile_are_masked_by_their_positions(ignored, name, monkeypatch):
    """Tiles differ in width; some pairs are at their edges."""
    monkeypatch.setitem(inputs.TILE, "cpu", (300, 40))
    v, w, _, grads = case((40, 100, "disjoint"))
    ids = torch.arange(40), torch.arange(100).roll(33)
    if ignored:
        ids[0][ids[0] % 9 == 3] = IGNORE_ID
        ids[1][ids[1] % 9 == 5] = IGNORE_ID
    wanted = evaluate(ANSWERS[name], v, w, ids, "dense", grads)
    assert_equal(evaluate(ANSWERS[name], v, w, ids, "tiled", grads), wanted)


def test_positives_and_negatives_are_counted():
    ids = torch.tensor([0, 0, 1, 5]), torch.tensor([0, 1, 1, 2, 0])
    sim = Similarity(*embeddings(4, 5), *ids)
    assert sim.positive_counts.tolist() == [2, 2, 2, 0]
    assert sim.T.positive_counts.tolist() == [2, 1, 1, 0, 2]
    assert sim.T.both.positive_counts.tolist() == [2, 1, 1, 0, 2, 2, 2, 2, 0]
    assert sim.negative_counts.tolist() == [3, 3, 3, 5]
    assert sim.both.negative_counts.tolist() == [3, 3, 3, 5, 2, 3, 3, 4, 2]
    assert len(sim) == 4
    assert len(sim.both) == 9


def test_row_ids_may_be_left_out():
    v, w = embeddings(3, 6)
    captions = torch.arange(3).repeat_interleave(2)
    full = Similarity(v, w, torch.arange(3), captions)
    short = Similarity(v, w, col_ids=captions)
    assert torch.equal(full.logsumexp(2.0), short.logsumexp(2.0))
    assert short.ids[0] is None
    assert torch.equal(short.ids[1], captions)
    assert short.T.ids[1] is None


def test_column_ids_may_not_be_left_out():
    """Ids of the rows alone may have been meant for both."""
    v, _ = embeddings(3, 3)
    with pytest.raises(ValueError, match="col_ids"):
        Similarity(v, v, torch.tensor([0, 0, 1]))


def test_ids_are_returned_as_they_were_given():
    """Even if they only mean that row i matches column i."""
    v, w = embeddings(4, 4)
    given = torch.tensor([7, 3, 9, 1])
    sim = Similarity(v, w, given, given)
    assert torch.equal(sim.ids[0], given)
    assert torch.equal(sim.T.ids[1], given)
    assert Similarity(v, w).ids == (None, None)


@pytest.mark.parametrize(
    ("row_ids", "col_ids", "one_to_one"),
    [
        ([7, 3, 9, 1], [7, 3, 9, 1], True),
        ([7, 3, 9, 1], [1, 9, 3, 7], False),
        ([1, 1, 2, 3], [1, 1, 2, 3], False),
        ([1, 2, 1, 3], [1, 2, 1, 3], False),
    ],
)
def test_one_to_one_is_row_i_with_column_i(row_ids, col_ids, one_to_one):
    sim = Similarity(*embeddings(4, 4), torch.tensor(row_ids), torch.tensor(col_ids))
    assert sim.one_to_one == one_to_one
