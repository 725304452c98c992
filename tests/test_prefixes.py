"""Prefixes of embeddings, whose scores come out of one product, and Matryoshka around the losses."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import SHAPES, embeddings, finite, make_ids, upstream
from processes import run
from reference import Reference
from test_engines import ANSWERS, assert_equal, parameters
from test_operators import Products, extra_megabytes, saved_bytes
from torch import nn

import itrloss
from itrloss import Anchors, Similarity
from itrloss.engine.answers import identity

DIMS = 2, 3, 6
ENGINES = "dense", "tiled"


def reference(v, w, ids, dims=DIMS, **options):
    """The rows and the columns of a dense matrix for each prefix."""
    return Reference(*(g for d in dims for g in Reference.of(v[:, :d], w[:, :d], ids, **options).both.groups))


def outcome(anchors, answer, leaves, p, grads):
    """Values of anchors, and gradients of embeddings and parameters, without anchors that have no answer."""
    values = answer(anchors, p)
    grad = torch.cat(tuple(grads))[: len(values)].to(values)
    found = [None] * len(leaves)
    if values.requires_grad:
        found = torch.autograd.grad((finite(values) * grad).sum(), leaves, allow_unused=True)
    return [values.detach()], [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def per_prefix(n, m):
    """Parameters and upstream gradients, different for each anchor of each prefix."""
    p = torch.cat([parameters(n, m) * (1 + k / 10) for k in range(len(DIMS))])
    return p.clamp_max(6.0), [g for k in range(len(DIMS)) for g in upstream(n, m, seed=k)]


def compare(v, w, ids, name, view=lambda sim: sim.prefixes(DIMS), wanted=reference, engines=ENGINES, **options):
    """Compare an answer of prefixes on all engines with the reference's."""
    p, grads = per_prefix(len(v), len(w))
    results = []
    for engine in (*engines, None):
        leaves = [x.clone().requires_grad_() for x in (v, w, p)]
        anchors = (
            wanted(*leaves[:2], ids, **options)
            if engine is None
            else view(Similarity(*leaves[:2], *ids, engine=engine, **options))
        )
        results.append(outcome(anchors, ANSWERS[name], leaves, leaves[2][: len(anchors)], grads))
    for engine, found in zip(engines, results, strict=False):
        assert_equal(found, results[-1], msg=lambda text, engine=engine: f"{engine}: {text}")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_and_gradients_equal_the_reference(name, shape, small_tiles, poisoned):
    n, m, kind = SHAPES[shape]
    compare(*embeddings(n, m), make_ids(kind, n, m), name)


SOME = [
    "logsumexp per anchor", "logsumexp sharp", "std", "sharp entropy", "hardest", "hardest and positives", "log1p",
    "logsumexp below and above, of a guide", "plane of negatives", "softplus of negatives", "hinge sum",
]  # fmt: skip


@pytest.mark.parametrize("name", SOME)
def test_prefixes_may_be_zero_vectors(name, small_tiles, poisoned):
    """Of a vector that is not zero; such a prefix scores 0 and gets no gradient."""
    v, w = embeddings(6, 7)
    v[1, :2], v[2, :3], v[3], w[4, :2], w[5] = 0, 0, 0, 0, 0
    compare(v, w, make_ids("random", 6, 7), name)


@pytest.mark.parametrize("name", SOME)
def test_embeddings_that_are_not_normalised(name, small_tiles, poisoned):
    v, w = embeddings(5, 9)
    compare(v / 5, w / 5, make_ids("random", 5, 9), name, normalize=False)


@pytest.mark.parametrize("name", SOME)
def test_columns_first(name, small_tiles, poisoned):
    v, w = embeddings(5, 9)
    compare(
        *(v, w, make_ids("random", 5, 9), name),
        view=lambda sim: sim.T.prefixes(DIMS),
        wanted=lambda v, w, ids: reference(w, v, ids[::-1]),
    )


VIEWS = {
    "rows of one": lambda groups: groups[2],
    "columns of one": lambda groups: groups[1],
    "some, the longer first": lambda groups: Anchors.together(groups[4], groups[1], groups[0]),
    "one twice": lambda groups: Anchors.together(groups[2], groups[3], groups[2], groups[0]),
    "some without a gradient": lambda groups: Anchors.together(groups[2].detach(), groups[3], groups[1].detach()),
}
PLACES = [[2], [1], [4, 1, 0], [2, 3, 2, 0], [2, 3, 1]]


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("view", "places"), [*zip(VIEWS, PLACES, strict=True)])
def test_some_of_the_groups(name, view, places, small_tiles, poisoned):
    def wanted(v, w, ids):
        groups = reference(v, w, ids).groups
        still = (0, 2) if "without" in view else ()
        return Reference(*((groups[k][0].detach() if i in still else groups[k][0], groups[k][1])
                           for i, k in enumerate(places)))  # fmt: skip

    v, w = embeddings(9, 9)
    compare(v, w, make_ids("random", 9, 9), name, lambda sim: VIEWS[view](sim.prefixes(DIMS).groups()), wanted)


# ------------------------------------------------------------------------------------------------------- precision


def loss_and_gradients(v, w, engine, dims=DIMS, scale=10.0, positives=1.0, **options):
    """The sum of log-sum-exps, and of positives' scores, of all prefixes, and the gradients."""
    v, w = (x.clone().requires_grad_() for x in (v, w))
    anchors = Similarity(v, w, engine=engine, **options).prefixes(dims)
    value = (anchors.logsumexp(scale) - positives * anchors.sum_of_positives(identity)).sum()
    return value.detach(), *torch.autograd.grad(value, (v, w))


@pytest.mark.parametrize("engine", ENGINES)
def test_lengths_of_many_orders_of_magnitude(engine, small_tiles):
    v, w = (torch.nn.functional.normalize(x, dim=1).float() for x in embeddings(8, 8))
    wanted = loss_and_gradients(v, w, engine)
    sizes = torch.logspace(-10, 17, 8)[:, None]
    found = loss_and_gradients(v * sizes, w * sizes.flip(0), engine)
    torch.testing.assert_close(found[0], wanted[0])
    for x, y, size in zip(found[1:], wanted[1:], (sizes, sizes.flip(0)), strict=True):
        torch.testing.assert_close(x * size, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_short_prefixes_of_long_vectors(engine):
    """The first dimensions are 10^12 times as short as the whole."""
    v, w = embeddings(8, 8)
    for x in (v, w):
        x[:, :2] *= 1e-12
    wanted = loss_and_gradients(v, w, "dense")
    found = loss_and_gradients(v.float(), w.float(), engine)
    for x, y in zip(found, wanted, strict=True):
        scale = y.abs().amax(0) if y.dim() else y.abs()  # gradients of short prefixes are large
        assert ((x.double() - y).abs() / scale).max() < 1e-4


def test_prefixes_that_are_too_short_beside_the_whole_count_as_zero():
    """Their inner products would underflow in float32; the gradient must not become nan."""
    v, w = embeddings(8, 8)
    for x in (v, w):
        x[:4] *= 1e16
    short = [x.index_fill(1, torch.arange(2), 0.0) for x in (v[:4], w[:4])]
    zeroed = (torch.cat([x, y[4:]]) for x, y in zip(short, (v, w), strict=True))
    wanted = loss_and_gradients(next(zeroed), next(zeroed), "dense", positives=0.0)
    for x in (v, w):
        x[:4, :2] *= 1e-25
    found = loss_and_gradients(v.float(), w.float(), "tiled", positives=0.0)
    torch.testing.assert_close(found[0].double(), wanted[0], rtol=1e-5, atol=0)
    for x, y in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(x[:4, 2:].double() * 1e16, y[:4, 2:] * 1e16, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(x[4:].double(), y[4:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)])
def test_accuracy_beside_float64(dtype, tolerance):
    v, w = (x.to(dtype) for x in embeddings(300, 200, 64))
    options = {"row_ids": torch.arange(300) % 90, "col_ids": torch.arange(200) % 90, "dims": (8, 16, 40, 64)}
    wanted = loss_and_gradients(v.double(), w.double(), "dense", **options)
    found = loss_and_gradients(v, w, "tiled", **options)
    assert found[0].dtype == torch.float32 and found[1].dtype == dtype
    for x, y in zip(found, wanted, strict=True):
        assert (x.double() - y).norm() <= tolerance * y.norm()


# ------------------------------------------------------------------------------------- gradients, work and memory


def test_the_gradient_of_one_side_or_of_the_parameter_alone():
    v, w = embeddings(30, 20, 16)
    ids = {"row_ids": torch.arange(30) % 9, "col_ids": torch.arange(20) % 9}
    found = {}
    for needed in ((0, 1, 2), (0,), (1,), (2,)):
        leaves = [x.clone() for x in (v, w, torch.tensor(5.0, dtype=v.dtype))]
        for k in needed:
            leaves[k].requires_grad_()
        value = Similarity(*leaves[:2], **ids, engine="tiled").prefixes((4, 9, 16)).logsumexp(leaves[2]).sum()
        value.backward()
        for k in range(3):
            assert (leaves[k].grad is not None) == (k in needed)
            if k in needed:
                torch.testing.assert_close(leaves[k].grad, found.setdefault(k, leaves[k].grad))


@pytest.mark.parametrize("library", ["by_blas", "by_onednn"])
def test_products_are_those_of_the_longest_prefix(library, request, small_tiles):
    request.getfixturevalue(library)
    n, m, dims = 30, 30, (8, 20, 64, 150)
    for trained, backward in (((True, True), 3), ((True, False), 2), ((False, True), 2)):
        v, w = (x.float().requires_grad_(need) for x, need in zip(embeddings(n, m, 200), trained, strict=True))
        anchors = Similarity(v, w, engine="tiled").prefixes(dims)
        with Products() as forward:
            values = anchors.logsumexp(10.0)
        assert forward.flops == 2 * n * m * dims[-1]
        with Products() as both:
            values.sum().backward()
        assert both.flops == backward * 2 * n * m * dims[-1]


@pytest.mark.parametrize("ids", [None, "captions"])
def test_nothing_of_the_size_of_the_matrix_is_saved(ids):
    n, d = 512, 256
    m = n if ids is None else 2 * n
    v, w = (x.float().requires_grad_() for x in embeddings(n, m, d))
    loss = itrloss.Matryoshka(itrloss.InfoNCELoss(engine="tiled"), dims := (32, 64, 128, 256))
    numbers = saved_bytes(loss, v, w, make_ids(ids, n, m)) / 4
    assert numbers <= 12 * len(dims) * (n + m)  # of each anchor; a matrix has n m


@pytest.mark.slow
def test_memory_grows_with_n_and_not_with_its_square():
    loss = "Matryoshka(itrloss.InfoNCELoss(engine='tiled'), (8, 16, 24, 32, 64))"
    two, four = (extra_megabytes(loss, n, 64) for n in (4096, 8192))
    assert four < 120  # each of five matrices: 268 MB
    assert four - two < 40


def test_graphs_are_freed_without_the_garbage_collector():
    v, w = (x.requires_grad_() for x in embeddings(9, 9))
    gc.collect()
    gc.disable()
    try:
        for engine in ENGINES:
            for ask in (lambda sim: sim.both, lambda sim: sim.prefixes(DIMS)):
                x = v * 2
                alive = weakref.ref(x)
                sim = Similarity(x, w, engine=engine)
                anchors = ask(sim)
                loss = (anchors.logsumexp(5.0) + anchors.sum_of_positives(identity)).sum()
                loss.backward()
                del x, sim, anchors, loss
                assert alive() is None, engine
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", ENGINES)
def test_without_a_gradient(engine):
    v, w = (x.requires_grad_() for x in embeddings(9, 9))
    anchors = Similarity(v, w, engine=engine).prefixes(DIMS)
    wanted = anchors.logsumexp(5.0)
    assert wanted.requires_grad
    for other in (anchors.detach(), Similarity(v, w, engine=engine).detach().prefixes(DIMS)):
        values = other.logsumexp(5.0) + 0 * other.hardest_negatives().values
        assert not values.requires_grad
        torch.testing.assert_close(values, wanted.detach())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            values = Similarity(v, w, engine=engine).prefixes(DIMS).logsumexp(5.0)
        assert not values.requires_grad
        torch.testing.assert_close(values, wanted.detach())


def test_second_derivatives_are_right_or_refused():
    v, w = (x.requires_grad_() for x in embeddings(5, 5))
    for engine in ENGINES:
        value = Similarity(v, w, engine=engine).prefixes(DIMS).logsumexp(5.0).sum()
        if engine == "dense":
            (first,) = torch.autograd.grad(value, v, create_graph=True)
            assert torch.autograd.grad(first.square().sum(), v)[0].abs().sum() > 0
        else:
            with pytest.raises(RuntimeError, match=r"create_graph.*dense"):
                torch.autograd.grad(value, v, create_graph=True)


@pytest.mark.parametrize("engine", ENGINES)
def test_embeddings_modified_in_place(engine):
    v, w = embeddings(5, 5)
    sim = Similarity(v, w, engine=engine)
    anchors = sim.prefixes(DIMS)
    v.add_(1)
    for ask in (lambda: anchors.logsumexp(5.0), lambda: anchors.hardest_negatives(), lambda: sim.prefixes(DIMS)):
        with pytest.raises(RuntimeError, match="modified in place"):
            ask()


def test_saved_tensors_may_be_moved_and_backward_repeated():
    v, w = (x.requires_grad_() for x in embeddings(40, 40))
    grads = []
    for hooked in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone if hooked else lambda x: x, lambda x: x):
            value = Similarity(v, w, engine="tiled").prefixes(DIMS).logsumexp(5.0).sum()
        grads += [torch.autograd.grad(value, (v, w), retain_graph=True) for _ in range(2)]
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ids", [None, "random"])
def test_weights(reduction, ids):
    v, w = embeddings(9, 9)
    sim, weights = Similarity(v, w, *make_ids(ids, 9, 9)), (0.5, 0.0, 2.0)
    anchors = sim.prefixes(DIMS, weights)
    found = anchors.reduce(anchors.mean_std().mean, reduction)
    parts = [Similarity(v[:, :d], w[:, :d], *make_ids(ids, 9, 9)).both for d in DIMS]
    wanted = [x.reduce(x.mean_std().mean, reduction) for x in parts]
    if reduction == "none":
        torch.testing.assert_close(found, tuple(k * x for k, y in zip(weights, wanted, strict=True) for x in y))
    else:
        torch.testing.assert_close(found, sum(k * x for k, x in zip(weights, wanted, strict=True)))


def test_anchors_of_prefixes_are_copied_and_pickled():
    v, w = embeddings(9, 9)
    anchors = Similarity(v, w, engine="tiled").prefixes(DIMS, (1.0, 2.0, 3.0))
    other = pickle.loads(pickle.dumps(anchors))
    assert torch.equal(other.logsumexp(3.0), anchors.logsumexp(3.0)) and other.weights == anchors.weights


@pytest.mark.parametrize(
    ("dims", "weights", "message"),
    [
        ((3, 2), None, "dims: expected ascending numbers of at most 6"),
        ((2, 2), None, "dims: expected ascending"),
        ((2, 7), None, "dims: expected ascending numbers of at most 6"),
        ((), None, "dims: expected ascending"),
        ((0, 2), None, "dims"),
        ((2.0, 3), None, "dims"),
        ((True, 3), None, "dims"),
        ((2, 3), (1.0,), "weights: expected 2, one for each of dims, got 1"),
    ],
)
def test_wrong_dims_and_weights(dims, weights, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Similarity(*embeddings(5, 5)).prefixes(dims, weights)


def test_what_has_no_prefixes():
    v, w = embeddings(5, 5)
    bias = torch.ones(5, dtype=v.dtype), None
    biased = Similarity(v, w, bias=bias)
    for sim in (Similarity.from_scores(v @ w.T), biased, biased.T, biased.detach()):
        with pytest.raises(ValueError, match=r"prefixes: expected embeddings, without a bias"):
            sim.prefixes(DIMS)


# ------------------------------------------------------------------------------------------------------ Matryoshka

LOSSES = {
    "infonce": lambda **o: itrloss.InfoNCELoss(learnable=True, hardness=0.5, **o),
    "filtered": lambda **o: itrloss.FilteredInfoNCELoss(**o),
    "sigmoid": lambda **o: itrloss.SigmoidLoss(3.0, -1.0, **o),
    "triplet": lambda **o: itrloss.TripletLoss(margin=0.4, **o),
    "triplet all": lambda **o: itrloss.TripletLoss(margin=0.4, mining="all", **o),
    "hal": lambda **o: itrloss.HubnessAwareLoss(scale=8.0, **o),
    "dcl": lambda **o: itrloss.DiversityContrastiveLoss(**o),
    "dcl entropy": lambda **o: itrloss.DiversityContrastiveLoss(diversity="entropy", detach_diversity=False, **o),
    "supcon": lambda **o: itrloss.SupConLoss(**o),
    "supcon inside": lambda **o: itrloss.SupConLoss(inside=True, **o),
    "mil-nce": lambda **o: itrloss.MILNCELoss(**o),
    "multi-similarity": lambda **o: itrloss.MultiSimilarityLoss(epsilon=0.1, **o),
    "circle": lambda **o: itrloss.CircleLoss(scale=20.0, **o),
    "rince": lambda **o: itrloss.RINCELoss(0.2, **o),
    "complementary": lambda **o: itrloss.ComplementaryContrastiveLoss(0.2, **o),
}
UNSORTED, WEIGHTS = (6, 2, 3), (1.0, 0.5, 2.0)


def losses_and_gradients(criterion, v, w, ids):
    """The loss, a number or a tuple of values, and the gradients of embeddings and parameters."""
    v, w = (x.clone().requires_grad_() for x in (v, w))
    found = criterion(v, w, *ids)
    values = found if isinstance(found, tuple) else (found,)
    total: Any = sum((x * torch.linspace(1, 2, x.numel(), dtype=x.dtype)).sum() for x in values)
    return list(values), torch.autograd.grad(total, (v, w, *criterion.parameters()))


class Loop(nn.Module):
    """The definition: a loss of slices of the embeddings, for each number of dimensions."""

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def forward(self, v, w, *ids):
        parts = sorted(zip(UNSORTED, WEIGHTS, strict=True))
        found = [(k, self.loss(v[:, :d], w[:, :d], *ids)) for d, k in parts]
        return sum(k * x for k, x in found)


class LoopOfValues(Loop):
    """The same of the values of single anchors."""

    def forward(self, v, w, *ids):
        parts = sorted(zip(UNSORTED, WEIGHTS, strict=True))
        return tuple(k * x for d, k in parts for x in self.loss(v[:, :d], w[:, :d], *ids))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shape", ["primes", "five captions", "wide", "no negative", "one pair"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_prefixes_is_the_sum_over_slices(name, shape, engine, small_tiles, poisoned):
    n, m, kind = SHAPES[shape]
    (v, w), ids = embeddings(n, m), make_ids(kind, n, m)
    for reduction in ("mean", "sum", "none"):
        loop = LoopOfValues if reduction == "none" else Loop
        loss = LOSSES[name](engine=engine, reduction=reduction).double()
        found = losses_and_gradients(itrloss.Matryoshka(loss, UNSORTED, WEIGHTS), v, w, ids)
        wanted = losses_and_gradients(loop(LOSSES[name](engine="dense", reduction=reduction).double()), v, w, ids)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11, msg=lambda x, r=reduction: f"{r}: {x}")


@pytest.mark.parametrize(
    "loss",
    [
        itrloss.VarianceAwareLoss(),
        itrloss.DirectionalInfoNCELoss(),
        itrloss.DistillationLoss(),
        itrloss.PCMEPlusPlusLoss(),
        itrloss.MemoryDiversityContrastiveLoss(),
        itrloss.UnifiedTrainingObjective(),
        itrloss.DynamicOrthogonalLoss(),
        itrloss.PrototypeClassificationLoss(4, 3),
        itrloss.InfoNCELoss(telemetry=True),
        nn.MSELoss(),
        itrloss.InfoNCELoss,
        None,
    ],
    ids=str,
)
def test_losses_without_prefixes(loss):
    with pytest.raises(TypeError, match="loss: expected"):
        itrloss.Matryoshka(loss, (2, 3))


def test_options_and_inputs_of_matryoshka():
    loss = itrloss.InfoNCELoss(learnable=True)
    assert "dims=[2, 3, 6], weights=[0.5, 2.0, 1.0]" in repr(itrloss.Matryoshka(loss, UNSORTED, WEIGHTS))
    v, w = embeddings(5, 5, dtype=torch.float32)
    for dims, weights, message in (
        ((2, 7), None, "dims: expected ascending numbers of at most 6"),
        ((2, 2), None, "dims: expected ascending"),
        ((), None, "dims: expected ascending"),
        ((2, 3), (1.0,), "weights: expected 2"),
    ):
        with pytest.raises(ValueError, match=message):
            itrloss.Matryoshka(loss, dims, weights)(v, w)
    with pytest.raises(ValueError, match="images"):
        itrloss.Matryoshka(itrloss.InfoNCELoss(check_finite=True), (2, 3))(v * torch.nan, w)
    criterion = itrloss.Matryoshka(loss, (2, 6))
    other = itrloss.Matryoshka(itrloss.InfoNCELoss(0.5, learnable=True), (2, 6))
    other.load_state_dict(criterion.state_dict())
    assert list(criterion.state_dict()) == ["loss.log_scale"] and other(v, w) == criterion(v, w)
    loss.log_scale.data.fill_(0.0)  # type: ignore[union-attr]
    assert other(v, w) != criterion(v, w)
    assert pickle.loads(pickle.dumps(criterion))(v, w) == criterion(v, w)


@pytest.mark.parametrize("name", ["infonce", "dcl", "sigmoid", "triplet"])
def test_compiled(name):
    torch._dynamo.reset()
    v, w = embeddings(9, 9, dtype=torch.float32)
    for engine in ("auto", "tiled"):
        criterion = itrloss.Matryoshka(LOSSES[name](engine=engine), UNSORTED, WEIGHTS)
        compiled = torch.compile(criterion, fullgraph=True, backend="aot_eager")
        ids = make_ids("random", 9, 9)
        wanted, found = (losses_and_gradients(f, v, w, ids) for f in (criterion, compiled))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_sentence_transformers_agree(engine):
    """Their loss has one direction, and takes a model."""
    pytest.importorskip("sentence_transformers")
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss, MultipleNegativesRankingLoss

    class Model(nn.Module):
        def forward(self, features):
            return {"sentence_embedding": features["x"]}

        def get_embedding_dimension(self):
            return 6

    v, w = (x.requires_grad_() for x in embeddings(9, 9))
    model = Model()
    theirs = MatryoshkaLoss(model, MultipleNegativesRankingLoss(model), sorted(UNSORTED), sorted(WEIGHTS))  # type: ignore
    ours = itrloss.Matryoshka(
        itrloss.InfoNCELoss(1 / 20, engine=engine, reduction="none"), sorted(UNSORTED), sorted(WEIGHTS)
    )
    values = [theirs([{"x": v}, {"x": w}], torch.zeros(9)), sum(x.mean() for x in ours(v, w)[::2])]
    grads = [torch.autograd.grad(x, (v, w)) for x in values]
    torch.testing.assert_close(values[1], values[0])
    torch.testing.assert_close(grads[1], grads[0])


def gathered(rank: int | None, name: str) -> list[torch.Tensor]:
    """The loss of all processes' batches and this process's gradients; of one process with them for rank None."""
    (v, w), ids = embeddings(7, 9), (torch.arange(7) % 5, torch.arange(9) % 6)
    own = [(slice(7), slice(9)), (slice(3), slice(7)), (slice(3, 7), slice(7, 9))][0 if rank is None else rank + 1]
    found = []
    for engine in ENGINES:
        criterion = itrloss.Matryoshka(LOSSES[name](engine=engine, gather=rank is not None).double(), UNSORTED, WEIGHTS)
        leaves = [x[part].clone().requires_grad_() for x, part in zip((v, w), own, strict=True)]
        value = criterion(*leaves, *(x[part] for x, part in zip(ids, own, strict=True)))
        grads = torch.autograd.grad(value, (*leaves, *criterion.parameters()))
        found += [value.detach(), *grads]
    if rank is not None and name == "infonce":
        refuse_the_ring(v, w)
    return found


def refuse_the_ring(v: torch.Tensor, w: torch.Tensor) -> None:
    for schedule in ("ring", True):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=r"prefixes: expected.*'ring'"):
            patch.setattr("itrloss.similarity.choose_schedule", lambda numel: "ring")
            itrloss.Matryoshka(itrloss.InfoNCELoss(gather=schedule), (2, 3))(v, w[:7])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["infonce", "sigmoid", "triplet", "dcl entropy", "multi-similarity", "hal"])
def test_over_processes(tmp_path: Path, name: str):
    """Gradients of embeddings are averaged over the processes, as DDP does."""
    found, wanted = run(gathered, tmp_path, name), gathered(None, name)
    each = len(wanted) // len(ENGINES)
    for k, (x, *parts) in enumerate(zip(wanted, *found, strict=True)):
        if k % each in (1, 2):
            parts = [torch.cat(parts) / 2]
        torch.testing.assert_close(parts, [x] * len(parts), rtol=1e-9, atol=1e-12)
