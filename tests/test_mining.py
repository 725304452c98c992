"""Hard negatives from a corpus, against the whole matrix of scores."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.cases import sample
from support.draws import Draw
from torch import Tensor

from benchmarks.peak import peak_memory
from itrloss import mine_hard_negatives
from itrloss.engine.relation import IGNORE_ID


class Problem(NamedTuple):
    """The arguments of `mine_hard_negatives`."""

    queries: Tensor
    corpus: Tensor
    query_ids: Tensor
    corpus_ids: Tensor


def problem(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return Problem(
        queries=sample(7, 6, dtype=dtype),
        corpus=sample(300, 6, seed=1, dtype=dtype),
        query_ids=torch.arange(7),
        corpus_ids=torch.randint(0, 12, (300,), generator=generator),
    )


def best(given, k, below=math.inf, normalize=True):
    """Return the highest scores and their columns, of equal ones the first.

    Ids may be sets of labels.
    """
    queries = given.queries
    corpus = given.corpus
    if normalize:
        queries = F.normalize(queries)
        corpus = F.normalize(corpus)
    scores = queries @ corpus.T
    left_out = scores >= torch.as_tensor(below, dtype=scores.dtype).reshape(-1, 1)
    of_queries, of_corpus = (
        [set(labels) - {IGNORE_ID} for labels in ids.view(len(ids), -1).tolist()]
        for ids in (given.query_ids, given.corpus_ids)
    )
    related = [[not own or not x or bool(own & x) for x in of_corpus] for own in of_queries]
    left_out |= torch.tensor(related)
    scores = F.pad(scores.masked_fill(left_out, -math.inf), (0, k), value=-math.inf)
    values, indices = scores.sort(dim=1, descending=True, stable=True)
    indices = indices.masked_fill(values == -math.inf, -1)
    return values[:, :k], indices[:, :k]


def check(found, wanted):
    values, indices = wanted
    torch.testing.assert_close(found.values, values)
    assert torch.equal(found.indices, indices)


LIMIT_OF_EACH = torch.linspace(-0.9, 0.9, 7, dtype=torch.float64)


@pytest.mark.parametrize("turn", range(4))
def test_negatives_are_those_of_the_whole_matrix(turn, monkeypatch):
    """Of scores that may tie, of ids or sets of labels of which some do not exist, with limits.

    Blocks may each beat those before, so that no score is ruled out by the best so far. Products
    and candidates may be of a share of the queries at a time.
    """
    for seed in range(40 * turn, 40 * turn + 40):
        draw = Draw("mining", seed)
        sizes = 7, draw.pick([1, 20, 130, 300, 700])
        ties = draw.chance(0.5)
        vectors = [
            draw.integers(3, n, 3).double() - 1 if ties else draw.normal(n, 6) for n in sizes
        ]
        labels = [(n, *draw.pick([(), (2,), (3,)])) for n in sizes]
        ids = [draw.marked(draw.integers(12, *shape), draw.pick([0.0, 0.3])) for shape in labels]
        k = draw.pick([1, 5, 20])
        normalize = not ties and draw.chance(0.5)
        below = draw.pick([None, 0.3, LIMIT_OF_EACH])
        block = draw.pick([7, 64, 100, 128, 8192])
        if draw.chance(0.3):
            queries, corpus = vectors
            queries[:, 0] = 100.0
            corpus[:, 0] = torch.linspace(-1, 1, len(corpus), dtype=torch.float64)
        monkeypatch.setattr("itrloss.mining._CROWD", draw.pick([4, 2**13]))
        monkeypatch.setattr("itrloss.mining._TILE", draw.pick([2000, 2**21]))
        given = Problem(*vectors, *ids)
        found = mine_hard_negatives(*given, k=k, block=block, normalize=normalize, below=below)
        check(found, best(given, k, math.inf if below is None else below, normalize))


@pytest.mark.parametrize(
    ("below", "of_second"),
    [(3, [2.0, 1.0]), (torch.tensor([3.0, 1.0]), [0.0, -math.inf])],
    ids=["one", "each"],
)
def test_a_score_equal_to_the_limit_is_left_out(below, of_second):
    corpus = torch.arange(6.0)[:, None]
    given = torch.ones(2, 1), corpus, [0, 5], range(6)
    found = mine_hard_negatives(*given, k=2, below=below, normalize=False, block=1)
    assert found.values.tolist() == [[2.0, 1.0], of_second]


def test_one_side_may_have_one_label_and_both_may_have_names():
    queries = torch.eye(2, 3)
    corpus = torch.eye(3)
    names = [["dog", "beach"], ["beach", "sea"]]
    found = mine_hard_negatives(queries, corpus, names, ["dog", "sea", "sky"], 3)
    assert found.indices.tolist() == [[1, 2, -1], [0, 2, -1]]
    with pytest.raises(TypeError, match="corpus_ids: expected strings with strings in query_ids"):
        mine_hard_negatives(queries, corpus, names, torch.arange(3), 3)


@pytest.mark.parametrize("as_sets", [False, True])
def test_padding_is_no_id_that_all_have_in_common(as_sets):
    """What does not exist on both sides is no match, and no sign of ids that are all the same."""
    x = sample(4, 6)
    ids = torch.tensor([0, 1, IGNORE_ID, IGNORE_ID])
    others = torch.tensor([7, 8, IGNORE_ID, IGNORE_ID])
    same = torch.tensor([5, 5, IGNORE_ID, IGNORE_ID])
    if as_sets:
        ids, others, same = [torch.stack([x, x], 1) for x in (ids, others, same)]
    with pytest.warns(UserWarning, match="they have no id in common"):
        mine_hard_negatives(x, x, ids, others, 2)
    with pytest.warns(UserWarning, match="all are the same"):
        mine_hard_negatives(x, x, same, same, 2)


def test_a_corpus_that_mostly_does_not_exist_is_warned_of():
    given = problem()
    ids = given.corpus_ids.masked_fill(torch.arange(300) % 3 > 0, IGNORE_ID)
    with pytest.warns(UserWarning, match="67% of the corpus has no id but NO_ID"):
        mine_hard_negatives(given.queries, given.corpus, given.query_ids, ids, 3)


def test_a_corpus_may_be_a_file(tmp_path):
    """Half precision is scored in float32."""
    given = problem(dtype=torch.float32)
    half = given._replace(queries=given.queries.half(), corpus=given.corpus.half())
    np.save(tmp_path / "corpus.npy", half.corpus.numpy())
    corpus = np.load(tmp_path / "corpus.npy", mmap_mode="r")
    done = []

    def progress(searched, size):
        done.append((searched, size))

    found = mine_hard_negatives(*half._replace(corpus=corpus), k=4, block=128, progress=progress)
    rounded = half._replace(queries=half.queries.float(), corpus=half.corpus.float())
    check(found, best(rounded, 4))
    assert done == [(128, 300), (256, 300), (300, 300)]


@pytest.mark.slow
def test_memory_is_bounded_for_a_corpus_in_ascending_order():
    queries = torch.ones(1000, 2)
    corpus = torch.linspace(-1, 1, 12_000)[:, None].expand(-1, 2)
    ids = torch.arange(1000), torch.full((12_000,), -1)
    found = []

    def mine():
        found.append(mine_hard_negatives(queries, corpus, *ids, k=3, normalize=False))

    megabytes = peak_memory(mine, queries.device)
    assert found[0].indices.eq(torch.tensor([11_999, 11_998, 11_997])).all()
    assert megabytes is None or megabytes < 200


def test_an_entry_that_is_no_number_is_found():
    corpus = torch.ones(1000, 8)
    corpus[777, 3] = math.nan
    with pytest.raises(
        ValueError, match=r"^corpus\[512:1000\]: .* 1 of 3904, the first in row 265 "
    ):
        mine_hard_negatives(torch.ones(5, 8), corpus, torch.arange(5), torch.arange(1000))


GIVEN = problem()
WRONG = [
    {"queries": GIVEN.queries * math.nan},
    {"corpus": GIVEN.corpus * math.inf},
    {"corpus": GIVEN.corpus[:, :3]},
    {"corpus": GIVEN.corpus.long()},
    {"query_ids": GIVEN.query_ids[:3]},
    {"corpus_ids": GIVEN.corpus_ids.float()},
    {"k": 0},
]


@pytest.mark.parametrize("changed", WRONG, ids=lambda changed: next(iter(changed)))
def test_wrong_input_is_named(changed):
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(changed))}.*: expected"):
        mine_hard_negatives(**{**GIVEN._asdict(), **changed})
