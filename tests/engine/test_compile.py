"""Questions within torch.compile."""

from __future__ import annotations

import pytest
import torch
from support.answers import ANSWERS, parameters
from support.cases import VIEWS, case, embeddings, finite, pairwise
from support.versions import reset_compiler

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
