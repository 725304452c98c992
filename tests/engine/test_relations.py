"""Sets of labels, groups and matrices of matches, next to the loops of `oracle_embedders`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.answers import assert_same_step
from support.cases import embeddings
from support.draws import RELATIONS, Draw
from support.flops import Sizes
from support.versions import needs, reset_compiler
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import itrloss
from itrloss import InfoNCELoss, Related, Similarity
from itrloss.engine import inputs, relation
from itrloss.engine.relation import Relation

ENGINES = ["dense", "tiled"]


def images_and_texts(n: int, m: int, dim: int) -> list[Tensor]:
    """Embeddings of both sides that get a gradient."""
    return [x.requires_grad_() for x in embeddings(n, m, dim)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", RELATIONS)
def test_relations_compile_as_one_graph(kind: str):
    reset_compiler()
    batch = RELATIONS[kind](Draw(kind), 9, 9)
    given = [x.detach() for x in images_and_texts(9, 9, 8)]
    who = batch.given
    for make in (InfoNCELoss, itrloss.DiversityContrastiveLoss):
        loss = make(engine="dense", groups=batch.rule)
        wanted = loss(*given, **who)
        compiled = torch.compile(loss, backend="eager", fullgraph=True)
        found = compiled(*given, **who)
        torch.testing.assert_close(found, wanted)


def test_groups_and_label_sets_need_no_matrix(monkeypatch):
    """The largest tensor of a step has few numbers for a batch of many tiles."""
    n = 512
    monkeypatch.setitem(inputs.TILE, "cpu", (2**14, 2**8))
    monkeypatch.setattr(relation, "AT_ONCE", 2**14)
    images = torch.randn(n, 8, requires_grad=True)
    texts = torch.randn(n, 8, requires_grad=True)
    groups = torch.arange(n) * 7 % 4
    label_sets = torch.arange(2 * n).view(n, 2) * 7 % (2 * n)
    relations = (
        {"image_groups": groups},
        {"image_ids": label_sets, "text_ids": label_sets},
    )
    loss = InfoNCELoss(engine="tiled")
    for who in relations:
        with Sizes() as results:
            loss(images, texts, **who).backward()
        assert max(results.sizes) <= n * n // 4


def test_a_weight_of_a_mean_alone_changes_nothing():
    """Weights of one positive of an anchor are a factor of one term, and divided by themselves."""
    given = images_and_texts(6, 6, 4)
    matches = torch.diag(torch.rand(6) + 0.5)
    for loss in (InfoNCELoss(), itrloss.SupConLoss(), itrloss.SDMLoss()):
        wanted = loss(*given)
        assert_same_step(loss(*given, matches=matches), wanted, tuple(given))


@pytest.mark.parametrize("kind", ["matches", "weights"])
@pytest.mark.parametrize("engine", ENGINES)
def test_matches_may_be_modified_before_the_backward_pass(kind: str, engine: Any):
    given = images_and_texts(6, 8, 4)
    matches = RELATIONS[kind](Draw(5), 6, 8).matches
    assert matches is not None
    loss = InfoNCELoss(engine=engine)
    unmodified = loss(*given, matches=matches)
    wanted = torch.autograd.grad(unmodified, given)
    value = loss(*given, matches=matches)
    matches.fill_(1.0)
    found = torch.autograd.grad(value, given)
    for got, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("side", [0, 1])
def test_a_relation_says_what_exists(side):
    missing = torch.tensor([False, True, False, True])
    ids = torch.arange(4).masked_fill(missing, itrloss.NO_ID)
    sets = torch.stack([ids, torch.full((4,), itrloss.NO_ID)], 1)
    matches = torch.eye(4)
    matches[missing] = torch.nan
    vectors, _ = embeddings(4, 4, 3)
    whole = torch.arange(4)
    found = []
    for given, every in ((ids, whole), (sets, whole[:, None].expand(4, 2))):
        sides = (every, given) if side else (given, every)
        found.append(Similarity(vectors, vectors, *sides).pairs)
    related = Related(matches=matches.T.contiguous() if side else matches)
    found.append(Similarity(vectors, vectors, related=related).pairs)
    for pairs in found:
        exists = pairs.exists(side)
        assert exists is not None
        assert torch.equal(exists, ~missing)
        other = pairs.exists(1 - side)
        assert other is None or bool(other.all())


FEW = embeddings(4, 4, 3)
IDS = torch.arange(4)
WRONG: dict[str, dict[str, Any]] = {
    r"matches: expected shape \(4, 4\), got \(3, 3\)": {"matches": torch.eye(3)},
    "matches: expected None with image_ids and text_ids": {
        "matches": torch.eye(4),
        "image_ids": IDS,
        "text_ids": IDS,
    },
    "matches: expected None with image_groups": {"matches": torch.eye(4), "image_groups": IDS},
    "matches: expected numbers above 0 for a match": {"matches": -torch.eye(4)},
    "matches: expected numbers .*, 0 for a negative": {"matches": torch.eye(4) / 0},
    "matches: expected a dense tensor": {"matches": torch.eye(4).to_sparse()},
    "image_groups: expected groups to go with text_groups": {"text_groups": IDS},
    r"image_groups: expected shape \(4,\), got \(3,\)": {"image_groups": IDS[:3]},
    r"image_ids: expected shape \(4, k\), got \(3, 2\)": {
        "image_ids": IDS[:3, None].repeat(1, 2),
        "text_ids": IDS,
    },
    "image_ids: .*a mask of the pairs that match goes in as matches": {
        "image_ids": torch.eye(4, dtype=torch.bool)
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_named(message: str):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        InfoNCELoss()(*FEW, **WRONG[message])


@pytest.mark.parametrize("engine", ENGINES)
def test_ids_of_one_side_are_sets_of_one_label(engine):
    """Also where pairs are too many for a mask, so that ids alone would be sorted."""
    generator = torch.Generator().manual_seed(0)
    rows, cols = torch.randn(2, 300, 4, generator=generator).unbind()
    ids = torch.randint(0, 200, (300,), generator=generator)
    sets = torch.stack([ids, ids.roll(1)], 1)
    loss = itrloss.InfoNCELoss(engine=engine)
    for of_rows, of_cols in ((ids, sets), (sets, ids)):
        whole = [x[:, None] if x.dim() == 1 else x for x in (of_rows, of_cols)]
        torch.testing.assert_close(loss(rows, cols, of_rows, of_cols), loss(rows, cols, *whole))


@needs("fake tensors of an accelerator that is not there", 2, 4)
def test_pairs_are_listed_where_the_host_may_wait(monkeypatch):
    ids = torch.arange(4)
    assert Relation((4, 4), (ids, ids.flip(0))).listable
    assert not Relation((4, 4), (ids.to("meta"), ids.to("meta"))).listable
    with FakeTensorMode():
        numbers = torch.arange(4, device="cuda"), torch.arange(4, device="cuda")
        pairs = Relation((4, 4), numbers, numbers[0].device)
        assert pairs.listable
        monkeypatch.setattr(relation, "is_recorded", lambda device: True)
        assert not pairs.listable
