"""Questions within torch.compile."""

from __future__ import annotations

import pytest
import torch
from support.answers import ANSWERS, parameters
from support.cases import VIEWS, case, embeddings, finite, pairwise
from support.versions import needs, reset_compiler
from torch._subclasses.fake_tensor import FakeTensorMode

import itrloss
from itrloss import Similarity

COMPILED = [
    "logsumexp shifted",
    "logsumexp per anchor",
    "std",
    "entropy",
    "hardest",
    "likelihood",
    "hinge of negatives",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "engine", "kind", "view"),
    pairwise(
        names=[COMPILED[:4], COMPILED[4:]],
        engine=["dense", "tiled"],
        kind=[None, "random"],
        view=["both", "rows"],
    ),
)
def test_questions_compile(names, engine, kind, view):
    v, w, ids, _ = case((9, 9, kind))
    leaves = [v.requires_grad_(), w.requires_grad_()]

    def total(v, w):
        anchors = VIEWS[view](Similarity(v, w, *ids, engine=engine))
        p = parameters(9, 9)[: len(anchors)]
        return sum(finite(ANSWERS[name](anchors, p)).square().sum() for name in names)

    def outcome(function):
        value = function(*leaves)
        return value, *torch.autograd.grad(value, leaves)

    reset_compiler()
    # Tiles are visited outside of graphs; plain PyTorch is one graph.
    compiled = torch.compile(total, fullgraph=engine == "dense", backend="aot_eager")
    torch.testing.assert_close(outcome(compiled), outcome(total))


@pytest.mark.slow
def test_one_graph_is_refused_for_tiles():
    reset_compiler()

    @torch.compile(fullgraph=True, backend="eager")
    def total(v, w):
        return Similarity(v, w, engine="tiled").logsumexp(2.0).sum()

    with pytest.raises(torch._dynamo.exc.Unsupported, match="fullgraph=True needs engine='dense'"):
        total(*[x.requires_grad_() for x in embeddings(5, 5)])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_best_candidates_compile(engine):
    ids = torch.arange(5), torch.arange(7) % 5

    def best(v, w):
        sim = Similarity(v, w, *ids, engine=engine)
        return *sim.topk(3), *sim.T.topk(3), sim.T.topk(2).indices

    reset_compiler()
    compiled = torch.compile(best, fullgraph=True, backend="aot_eager")
    v, w = embeddings(5, 7)
    torch.testing.assert_close(compiled(v, w), best(v, w))


IDS = torch.arange(6) // 2
MATCHES = (IDS[:, None] == IDS).float()
# Losses that are made within a compiled function, as torch.nn.CrossEntropyLoss()(...) may be. One
# that learns makes a parameter, which the compiler refuses.
MADE_INSIDE = {
    "infonce": lambda v, w: itrloss.InfoNCELoss(0.05)(v, w),
    "triplet": lambda v, w: itrloss.TripletLoss(margin=0.3, mining="all")(v, w),
    "dcl": lambda v, w: itrloss.DiversityContrastiveLoss()(v, w),
    "sigmoid": lambda v, w: itrloss.SigmoidLoss(learnable=False)(v, w, matches=MATCHES),
    "supcon": lambda v, w: itrloss.SupConLoss()(v, w, IDS, IDS),
    "circle": lambda v, w: itrloss.CircleLoss()(scores=v @ w.T, matches=MATCHES > 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE_INSIDE)
def test_a_loss_is_made_within_a_compiled_function(name):
    v, w = embeddings(6, 6)
    reset_compiler()
    compiled = torch.compile(MADE_INSIDE[name], fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(v, w), MADE_INSIDE[name](v, w))


@needs("a search in fake tensors", 2, 4)
@pytest.mark.parametrize(
    "make",
    [
        itrloss.InfoNCELoss,
        itrloss.TripletLoss,
        itrloss.DiversityContrastiveLoss,
        itrloss.SupConLoss,
        itrloss.CircleLoss,
    ],
)
@pytest.mark.parametrize("kind", [torch.float32, torch.bool, torch.int64])
def test_matches_of_no_values_are_not_read(make, kind):
    """Estimators of memory call losses with fake tensors, which have shapes alone."""
    v, w = embeddings(6, 6)
    matches = MATCHES.to(kind)
    with FakeTensorMode() as mode:
        leaves = [mode.from_tensor(x).requires_grad_() for x in (v, w)]
        make()(*leaves, matches=mode.from_tensor(matches)).backward()
        assert [x.grad.shape for x in leaves] == [v.shape, w.shape]
    assert make()(v.to("meta"), w.to("meta"), matches=matches.to("meta")).is_meta
