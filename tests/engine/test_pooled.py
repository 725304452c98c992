"""Anchors of several matrices: pooled candidates, and anchors together."""

from __future__ import annotations

import pytest
import torch
from support.cases import ENGINES, case, embeddings, make_ids, similarity

from itrloss import Anchors, Similarity
from itrloss.engine import relation
from itrloss.engine.terms import identity


def parts(v, w, ids, engine, cuts):
    """Similarities of the rows to consecutive parts of the columns."""
    row_ids, col_ids = ids
    starts = [0, *cuts]
    ends = [*cuts, len(w)]
    found = []
    for start, end in zip(starts, ends, strict=True):
        own_ids = (row_ids, col_ids[start:end])
        found.append(similarity(v, w[start:end], own_ids, engine))
    return found


def pooled(v, w, ids, engine, cuts):
    """The rows, with their candidates in several matrices."""
    return Anchors.pooled(*parts(v, w, ids, engine, cuts))


@pytest.mark.parametrize("engine", ENGINES)
def test_cosines_beside_larger_scores_do_not_overflow(engine):
    """That cosines are within [-1, 1] holds for their matrix alone."""
    cosines = similarity(*embeddings(4, 4), (None, None), engine)
    chosen = engine if engine in ("dense", "tiled") else "auto"
    large = Similarity.from_scores(cosines.scores() * 1000, engine=chosen)
    wanted = torch.cat([cosines.logsumexp(1.0), large.logsumexp(1.0)])
    assert wanted.isfinite().all()
    anchors = Anchors.together(cosines, large)
    torch.testing.assert_close(anchors.logsumexp(1.0), wanted)


def test_hinges_of_pooled_anchors_that_cannot_be_listed_are_refused(monkeypatch):
    monkeypatch.setattr(relation.Relation, "listable", False)
    v, w, ids, _ = case("wide")
    anchors = pooled(v, w, ids, "tiled", (4,))
    assert not anchors.one_to_one
    with pytest.raises(ValueError, match=r"hinge_sum.*one matrix"):
        anchors.hinge_sum(0.1)


def test_pooled_matrices_have_as_many_anchors():
    v, w, ids, _ = case("wide")
    row_ids, col_ids = ids
    equal = parts(v, w[:15], (row_ids, col_ids[:15]), "tiled", (5, 10))
    of_both_sides = [part.both for part in equal]
    anchors = Anchors.pooled(*of_both_sides)
    assert anchors.sizes == [5, 5]
    transposed = similarity(w, v, (col_ids, row_ids), "tiled")
    with pytest.raises(ValueError, match="as many anchors"):
        Anchors.pooled(equal[0], transposed)


@pytest.mark.parametrize("engine", ENGINES)
def test_hardest_negatives_are_numbered_where_a_matrix_has_columns_and_then_pooled_rows(engine):
    v, w = embeddings(5, 7)
    _, x = embeddings(5, 4, seed=1)
    row_ids, col_ids = make_ids("disjoint", 5, 7)
    sim = similarity(v, w, (row_ids, col_ids), engine)
    mixed = similarity(v, x, (row_ids, col_ids[:4]), engine)
    rows = Anchors.pooled(mixed, sim)
    of_columns = sim.T.hardest_negatives().indices
    of_rows = rows.hardest_negatives().indices
    wanted = torch.cat([of_columns, of_rows])
    found = Anchors.together(sim.T, rows).hardest_negatives().indices
    assert torch.equal(found, wanted)
    assert int(found.max()) > 6


@pytest.mark.parametrize("engine", ENGINES)
def test_of_equal_negatives_of_pooled_matrices_the_first_is_the_hardest(engine):
    ids = make_ids("disjoint", 3, 4)
    sim = similarity(torch.ones(3, 2), torch.ones(4, 2), ids, engine)
    hardest = Anchors.pooled(sim, sim).hardest_negatives()
    assert hardest.indices.tolist() == [0, 0, 0]


def test_anchors_together_are_split_and_reduced():
    v, w, ids, _ = case("wide")
    rows = pooled(v, w, ids, "tiled", (4,))
    cols = similarity(v, w, ids, "tiled").T
    anchors = Anchors.together(rows, cols, rows)
    assert anchors.sizes == [5, 17, 5]
    values = torch.arange(27.0)
    valid = anchors.valid()
    assert 0 < valid.sum() < 27
    total = anchors.reduce(values, "sum")
    torch.testing.assert_close(total, values[valid].sum())
    unreduced = anchors.reduce(values, "none")
    assert [len(x) for x in unreduced] == [5, 17, 5]
    means = []
    for own, exists in zip(anchors.split(values), anchors.split(valid), strict=True):
        means.append(own[exists].mean())
    mean = anchors.reduce(values, "mean")
    torch.testing.assert_close(mean, sum(means))


def test_positives_of_matrices_of_which_one_cannot_be_listed(monkeypatch):
    """In a captured graph, positives are known without ids, but with ids they cannot be listed."""
    monkeypatch.setattr(relation.Relation, "listable", property(lambda self: self.ids[0] is None))
    monkeypatch.setattr(relation.Relation, "listed", property(lambda self: pytest.fail("listed")))
    v, w, ids, _ = case((6, 6, "random"))

    def both_kinds(engine):
        plain = similarity(v, w, (None, None), engine)
        labelled = similarity(v, w, ids, engine)
        return plain, labelled

    anchors = Anchors.together(*both_kinds("tiled"))
    found = anchors.sum_of_positives(identity)
    wanted = [sim.sum_of_positives(identity) for sim in both_kinds("reference")]
    torch.testing.assert_close(found, torch.cat(wanted))
