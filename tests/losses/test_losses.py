"""Losses: equations against the loop oracle, call forms, invariants, extreme input, compilation."""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle
from support.cases import SHAPES, each, embeddings, make_ids, pairwise, upstream
from support.losses_registry import IN_LOOPS as LOSSES
from support.losses_registry import REGISTRY, public_losses
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import gradcheck

import itrloss
from itrloss import Similarity
from itrloss.checks import Choice, Number
from itrloss.engine.terms import identity

ENGINES = ("dense", "tiled")


OF_ANCHORS = [name for name, entry in LOSSES.items() if not entry.every_pair]


def make(name, **extra):
    return LOSSES[name].make(**extra)


def concrete(ids, n, m):
    """Ids in the oracle's form."""
    return [
        np.arange(size) if x is None else x.numpy() for x, size in zip(ids, (n, m), strict=True)
    ]


def test_every_public_loss_is_in_the_registry():
    public = public_losses()
    own = {"LateInteraction"}  # a loss that users put together
    assert {entry.public_name for entry in REGISTRY.values()} - own == public
    named = {name for name in itrloss.__all__ if name.endswith(("Loss", "Objective"))}
    assert named - {"PairLoss", "MemoryLoss"} <= public <= set(itrloss.__all__)


@pytest.mark.parametrize("name", [name for name, x in REGISTRY.items() if x.oracle is not None])
def test_every_oracle_takes_the_options_of_its_loss(name):
    entry = REGISTRY[name]
    options = entry.options if entry.oracle_options is None else entry.oracle_options
    inspect.signature(entry.oracle).bind_partial(**options, reduction="none")


@pytest.mark.parametrize(
    ("name", "shape", "engine", "reduced"),
    pairwise(
        name=LOSSES, shape=SHAPES, engine=["dense", "tiled", "scores"], reduced=["sum", "mean"]
    ),
)
def test_values_equal_the_loop_oracle(name, shape, engine, reduced, small_tiles, poisoned):
    n, m, kind = SHAPES[shape]
    ids, (v, w) = make_ids(kind, n, m), embeddings(n, m)
    S = oracle.cosine(v.numpy(), w.numpy())
    for reduction in ("none", reduced):
        wanted = LOSSES[name].expected(S, *concrete(ids, n, m), reduction=reduction)
        if engine == "scores":
            got = make(name, reduction=reduction)(
                scores=torch.from_numpy(S), image_ids=ids[0], text_ids=ids[1]
            )
        else:
            got = make(name, reduction=reduction, engine=engine)(v, w, *ids)
        if reduction == "none":
            for a, b in zip(got, wanted, strict=True):
                np.testing.assert_allclose(a.detach(), b, rtol=1e-6, atol=1e-8)
        else:
            assert got.dim() == 0
            np.testing.assert_allclose(got.item(), wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("name", "shape", "given_as"),
    pairwise(name=LOSSES, shape=SHAPES, given_as=["embeddings", "scores"]),
)
def test_gradients_of_tiles_equal_those_of_plain_pytorch_for_uneven_upstream(
    name, shape, given_as, small_tiles, poisoned
):
    n, m, kind = SHAPES[shape]
    ids, grads = make_ids(kind, n, m), upstream(n, m)
    results = []
    for engine in ENGINES:
        loss = make(name, reduction="none", engine=engine).double()
        v, w = (x.requires_grad_() for x in embeddings(n, m))
        if given_as == "scores":
            values = loss(scores=Similarity(v, w, *ids).scores(), image_ids=ids[0], text_ids=ids[1])
        else:
            values = loss(v, w, *ids)
        leaves = [v, w, *loss.parameters()]
        total = sum((x * g).sum() for x, g in zip(values, grads, strict=True))
        results.append((*values, *torch.autograd.grad(total, leaves)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("engine", ["dense", "tiled", "scores"])
@pytest.mark.parametrize("name", LOSSES)
def test_anchors_without_candidates_give_no_nan_on_the_way(name, engine):
    """Padding, an anchor without positives and one without negatives: autograd's detector is
    calm.
    """
    least = torch.iinfo(torch.int64).min
    for ids in ([0, 1, least, 3], [least] * 4, [5] * 4, [0, 1, 2, least]):
        v, w = (x.float().requires_grad_() for x in embeddings(4, 4))
        text_ids = torch.tensor([0, 7, *ids[2:]])
        with torch.autograd.set_detect_anomaly(True):
            if engine == "scores":
                scores = Similarity(v, w).scores()
                loss = make(name)(scores=scores, image_ids=torch.tensor(ids), text_ids=text_ids)
            else:
                loss = make(name, engine=engine)(v, w, torch.tensor(ids), text_ids)
            loss.backward()
        assert loss.isfinite() and v.grad.isfinite().all() and w.grad.isfinite().all()


@pytest.mark.parametrize("name", [name for name, x in LOSSES.items() if not x.detached])
def test_gradcheck_with_uneven_upstream(name):
    """Losses without detached weights, whose effect finite differences would include; see the next
    test.
    """
    n, m = 4, 6
    ids = make_ids("random", n, m, seed=3)
    loss = make(name, reduction="none", engine="dense").double()
    weights = upstream(n, m)

    def weighted(v, w, *_):
        return tuple(x * g for x, g in zip(loss(v, w, *ids), weights, strict=True))

    assert gradcheck(
        weighted, tuple(x.requires_grad_() for x in embeddings(n, m, d=4)), fast_mode=True
    )


def test_detached_diversity_is_a_constant_weight():
    v, w = (x.requires_grad_() for x in embeddings(6, 6))
    sim = Similarity(v, w)
    with torch.no_grad():
        d = [itrloss.functional.std_diversity(s) for s in (sim, sim.T)]
    scales = [10 / x for x in d]
    rows, cols = sim.both.split(sim.both.logsumexp(torch.cat(scales)))
    attraction = torch.log1p(sim.scores().diagonal())
    by_hand = sum(
        (0.1 * torch.nn.functional.softplus(z - 0.3 * a) - 0.1 * attraction).mean()
        for z, a in zip((rows, cols), scales, strict=True)
    )
    ours = itrloss.DiversityContrastiveLoss()(v, w)
    torch.testing.assert_close(ours, by_hand)
    for a, b in zip(
        torch.autograd.grad(ours, (v, w)), torch.autograd.grad(by_hand, (v, w)), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["std", "entropy"])
def test_diversity_equals_the_oracle_and_stays_in_bounds(name):
    ids, (v, w) = make_ids("random", 9, 14), embeddings(9, 14)
    S = oracle.cosine(v.numpy(), w.numpy())
    ours = {
        "std": itrloss.functional.std_diversity,
        "entropy": itrloss.functional.entropy_diversity,
    }[name]
    theirs = {"std": oracle.std_diversity, "entropy": oracle.entropy_diversity}[name]
    extra = {"temperature": 0.1} if name == "entropy" else {}
    for engine in ENGINES:
        sim = Similarity(v, w, *ids, engine=engine)
        rows, cols = ours(sim, 0.2, **extra), ours(sim.T, 0.2, **extra)
        np.testing.assert_allclose(rows, theirs(S, *concrete(ids, 9, 14), 0.2, **extra), rtol=1e-9)
        np.testing.assert_allclose(
            cols, theirs(S.T, *concrete(ids, 9, 14)[::-1], 0.2, **extra), rtol=1e-9
        )
        assert (rows > 0.5).all() and rows.max() == 1


# --------------------------------------------------------------------------------------- invariants

batches = st.tuples(
    st.integers(1, 9), st.integers(1, 9), st.integers(0, 10_000), st.sampled_from(ENGINES)
)
names = st.sampled_from(list(LOSSES))


def draw(n, m, seed):
    generator = torch.Generator().manual_seed(seed)
    v, w = (torch.randn(size, 5, generator=generator, dtype=torch.float64) for size in (n, m))
    ids = tuple(torch.randint(0, 4, (size,), generator=generator) for size in (n, m))
    return v, w, ids, generator


@given(names, batches)
@settings(max_examples=60, deadline=None)
def test_order_of_the_batch_does_not_matter(name, batch):
    n, m, seed, engine = batch
    v, w, ids, generator = draw(n, m, seed)
    loss = make(name, reduction="none", engine=engine)
    p, q = (torch.randperm(size, generator=generator) for size in (n, m))
    (rows, cols), (a, b) = loss(v, w, *ids), loss(v[p], w[q], ids[0][p], ids[1][q])
    torch.testing.assert_close(a, rows[p])
    torch.testing.assert_close(b, cols[q])


@given(names, batches)
@settings(max_examples=60, deadline=None)
def test_swapping_the_modalities_swaps_the_values(name, batch):
    n, m, seed, engine = batch
    v, w, ids, _ = draw(n, m, seed)
    loss = make(name, reduction="none", engine=engine)
    (rows, cols), (a, b) = loss(v, w, *ids), loss(w, v, *ids[::-1])
    torch.testing.assert_close(a, cols)
    torch.testing.assert_close(b, rows)


@given(names, batches)
@settings(max_examples=60, deadline=None)
def test_names_of_ids_do_not_matter(name, batch):
    n, m, seed, engine = batch
    v, w, ids, _ = draw(n, m, seed)
    loss = make(name, engine=engine)
    torch.testing.assert_close(loss(v, w, *ids), loss(v, w, *(1000 - 7 * x for x in ids)))


@given(names, batches)
@settings(max_examples=60, deadline=None)
def test_length_of_embeddings_does_not_matter(name, batch):
    n, m, seed, engine = batch
    v, w, ids, generator = draw(n, m, seed)
    loss = make(name, engine=engine)
    stretch = torch.rand(n, 1, generator=generator, dtype=torch.float64) + 0.1
    torch.testing.assert_close(loss(v, w, *ids), loss(v * stretch, w * 3, *ids))


@pytest.mark.parametrize("mining", ["hardest", "all"])
@given(st.integers(0, 10_000), st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=25, deadline=None)
def test_triplet_grows_with_the_margin_and_all_is_at_least_hardest(mining, seed, a, b):
    v, w, ids, _ = draw(6, 7, seed)
    low, high = (itrloss.TripletLoss(margin=x, mining=mining)(v, w, *ids) for x in sorted((a, b)))
    assert 0 <= low <= high + 1e-12
    assert (
        itrloss.TripletLoss(a, mining="all")(v, w, *ids)
        >= itrloss.TripletLoss(a)(v, w, *ids) - 1e-12
    )


@given(st.integers(0, 10_000), st.floats(0.01, 5))
@settings(max_examples=25, deadline=None)
def test_infonce_is_positive_and_falls_as_the_positive_rises(seed, temperature):
    v, w, _, _ = draw(6, 6, seed)
    loss = itrloss.InfoNCELoss(temperature)
    matrix = Similarity(v, w).scores()
    assert loss(scores=matrix) > 0
    assert loss(scores=matrix + 0.1 * torch.eye(6)) <= loss(scores=matrix)


@given(st.integers(0, 10_000), st.floats(-0.5, 0.9), st.floats(-0.5, 0.9))
@settings(max_examples=25, deadline=None)
def test_hal_and_dcl_fall_with_the_margin_and_keep_their_lower_bounds(seed, a, b):
    v, w, _, _ = draw(6, 6, seed)
    low, high = sorted((a, b))
    for make_loss, bound in (
        (lambda x: itrloss.HubnessAwareLoss(20, x), -math.log(2)),
        (lambda x: itrloss.DiversityContrastiveLoss(margin=x), -2 * 0.1 * math.log(2)),
    ):
        assert make_loss(high)(v, w) <= make_loss(low)(v, w) + 1e-12
        assert make_loss(high)(v, w) >= bound


@given(st.integers(0, 10_000), st.floats(0.02, 2), st.floats(0.02, 2))
@settings(max_examples=25, deadline=None)
def test_softer_negatives_weigh_more(seed, a, b):
    """``t log(1 + sum exp(x / t))`` does not decrease in t, because its derivative is an
    entropy.
    """
    v, w, ids, _ = draw(6, 7, seed)
    low, high = sorted((a, b))
    for make_loss in (
        lambda t: itrloss.HubnessAwareLoss(1 / t, 0.2, reduction="none"),
        lambda t: itrloss.DiversityContrastiveLoss(
            t, 0.2, diversity=None, positive_weight=1.0, reduction="none"
        ),
    ):
        for x, y in zip(make_loss(low)(v, w, *ids), make_loss(high)(v, w, *ids), strict=True):
            assert (x <= y + 1e-12).all()


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_a_copy_of_each_positive_changes_nothing_for_its_anchor(seed, n, m):
    v, w, ids, _ = draw(n, m, seed)
    copied = (ids[1] == ids[0][0]).nonzero().squeeze(1)
    more, more_ids = torch.cat([w, w[copied]]), torch.cat([ids[1], ids[1][copied]])
    for loss in (
        itrloss.InfoNCELoss(reduction="none"),
        itrloss.DiversityContrastiveLoss(diversity=None, reduction="none"),
    ):
        torch.testing.assert_close(loss(v, more, ids[0], more_ids)[0][0], loss(v, w, *ids)[0][0])
    hinge = itrloss.TripletLoss(reduction="none")
    torch.testing.assert_close(hinge(v, more, ids[0], more_ids)[0][0], 2 * hinge(v, w, *ids)[0][0])


@given(
    st.integers(0, 10_000),
    st.integers(1, 9),
    st.integers(1, 9),
    st.floats(0.01, 3),
    st.floats(0.001, 10),
)
@settings(max_examples=40, deadline=None)
def test_entropies_and_diversities_keep_their_bounds(seed, n, m, temperature, epsilon):
    v, w, ids, _ = draw(n, m, seed)
    sim = Similarity(v, w, *ids)
    entropy = sim.entropy(temperature)
    assert (entropy >= 0).all() and (entropy <= math.log2(m) + 1e-9).all()
    for scores in (
        itrloss.functional.std_diversity(sim, epsilon),
        itrloss.functional.entropy_diversity(sim, epsilon, temperature),
    ):
        assert (scores >= 0.5).all() and scores.max() == 1  # 1/2 is attained by rounding only


def test_entropy_temperature_reaches_the_diversity():
    v, w = embeddings(9, 9)
    sim = Similarity(v, w)
    d = [itrloss.functional.entropy_diversity(s, 0.1, 0.02) for s in (sim, sim.T)]
    attraction = torch.log1p(sim.scores().diagonal())
    lse = sim.both.split(sim.both.logsumexp(10 / torch.cat(d)))
    wanted = sum(
        (0.1 * torch.logaddexp(z - 3 / x, z * 0) - 0.1 * attraction).mean()
        for z, x in zip(lse, d, strict=True)
    )
    loss = itrloss.DiversityContrastiveLoss(diversity="entropy", entropy_temperature=0.02)
    torch.testing.assert_close(loss(v, w), wanted)
    assert abs(loss(v, w) - itrloss.DiversityContrastiveLoss(diversity="entropy")(v, w)) > 1e-4


def test_infonce_with_one_positive_is_cross_entropy():
    v, w = embeddings(8, 8)
    logits = Similarity(v, w).scores() / 0.07
    target = torch.arange(8)
    wanted = torch.nn.functional.cross_entropy(logits, target) + torch.nn.functional.cross_entropy(
        logits.T, target
    )
    torch.testing.assert_close(itrloss.InfoNCELoss()(v, w), wanted)


# ------------------------------------------------------------------------------------ extreme input


@pytest.mark.parametrize(
    ("name", "engine", "dtype"),
    pairwise(name=LOSSES, engine=ENGINES, dtype=[torch.float32, torch.bfloat16, torch.float16]),
)
def test_zero_vectors_and_duplicates_stay_finite(name, engine, dtype):
    v = torch.cat([torch.zeros(2, 8), torch.ones(3, 8), torch.eye(8)[:3]]).to(dtype)
    for ids in (
        (None, None),
        make_ids("random", 8, 8),
        make_ids("same", 8, 8),
        make_ids("disjoint", 8, 8),
    ):
        a, b = v.clone().requires_grad_(), v.flip(0).clone().requires_grad_()
        loss = make(name, engine=engine)(a, b, *ids)
        loss.backward()
        assert loss.isfinite() and loss.dtype == torch.float32
        assert a.grad.dtype == dtype and a.grad.isfinite().all() and b.grad.isfinite().all()
        assert (a.grad[:2] == 0).all()


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
def test_half_precision_gradients_beat_autocast(scale, dtype, engine):
    """The baseline is plain PyTorch with the same half-precision embeddings under autocast."""
    n, d = 64, 128
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(n, d, generator=generator).to(dtype)
    w = (v.float() + 1.5 * torch.randn(n, d, generator=generator)).to(dtype)
    for name, options in (
        ("infonce", {"temperature": 1 / scale}),
        ("hal", {"scale": scale}),
        ("dcl", {"temperature": 1 / scale}),
    ):

        def gradient(x, y, call):
            x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
            return torch.cat(torch.autograd.grad(call(x, y), (x, y))).double()

        exact = gradient(v.double(), w.double(), make(name, **options, engine="dense"))

        def autocast(x, y, name=name, options=options):
            with torch.autocast("cpu", dtype):
                scores = torch.nn.functional.normalize(x) @ torch.nn.functional.normalize(y).T
            return make(name, **options, engine="dense")(scores=scores)

        ours = (gradient(v, w, make(name, **options, engine=engine)) - exact).norm()
        plain = (gradient(v, w, autocast) - exact).norm()
        assert ours <= plain, (name, ours / exact.norm(), plain / exact.norm())


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_around_the_loss_changes_nothing(name):
    v, w = embeddings(16, 16, d=32, dtype=torch.float32)
    for engine in ENGINES:
        loss = make(name, engine=engine)
        wanted = loss(v, w)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(loss(v, w), wanted)


@pytest.mark.parametrize("name", OF_ANCHORS)
def test_anchors_without_positives_do_not_count(name):
    v, w = embeddings(5, 6)
    ids = torch.tensor([0, 1, 2, 3, 99]), torch.tensor([0, 1, 2, 3, 3, 98])
    rows, cols = make(name, reduction="none")(v, w, *ids)
    assert rows[4] == 0 and cols[5] == 0
    torch.testing.assert_close(
        make(name, reduction="mean")(v, w, *ids), rows[:4].mean() + cols[:5].mean()
    )
    torch.testing.assert_close(make(name, reduction="sum")(v, w, *ids), rows.sum() + cols.sum())


@pytest.mark.parametrize("name", OF_ANCHORS)
def test_batch_without_a_usable_anchor_gives_zero_with_a_zero_gradient(name):
    without_negatives = LOSSES[name].without_negatives
    kinds = ["disjoint"] if without_negatives else ["same", "disjoint"]
    for ids in (make_ids(kind, 4, 4) for kind in kinds):
        v, w = (x.requires_grad_() for x in embeddings(4, 4))
        loss = make(name, reduction="mean")(v, w, *ids)
        loss.backward()
        assert loss == 0 and (v.grad == 0).all() and (w.grad == 0).all()
    v, w = (x.requires_grad_() for x in embeddings(1, 1))
    loss = make(name)(v, w)
    loss.backward()
    assert loss.abs() < (1e-7 if without_negatives else 1e-30)
    # SDM's softmax of one candidate is 1 but for rounding
    assert v.grad.abs().max() <= (1e-13 if without_negatives else 0)


# ------------------------------------------------------------------------------ call forms, modules


@pytest.mark.parametrize("name", LOSSES)
def test_a_similarity_stands_for_the_embeddings(name):
    ids, (v, w) = make_ids("random", 6, 9), embeddings(6, 9)
    loss = make(name)
    sim = Similarity(v, w, *ids)
    torch.testing.assert_close(loss(sim), loss(v, w, *ids))
    torch.testing.assert_close(loss(sim.T), loss(w, v, *ids[::-1]))


@pytest.mark.parametrize("name", LOSSES)
def test_modules_can_be_copied_pickled_saved_and_printed(name):
    v, w = embeddings(6, 6)
    loss = make(name)
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(other(v, w), loss(v, w))
    fresh = make(name)
    fresh.load_state_dict(loss.state_dict())
    assert torch.equal(fresh(v, w), loss(v, w))
    assert type(loss).__name__ in repr(loss) and "=" in repr(loss)


def test_mining_can_be_switched_after_a_warm_up():
    v, w = embeddings(6, 6)
    loss = itrloss.TripletLoss(mining="all")
    warm = loss(v, w)
    loss.mining = "hardest"
    assert torch.equal(loss(v, w), itrloss.TripletLoss()(v, w)) and loss(v, w) < warm
    with pytest.raises(ValueError, match="mining"):
        loss.mining = "soft"
    loss.temperature = 0.1
    loss.mining = "all"
    with pytest.raises(ValueError, match="temperature: expected None beside mining='all'"):
        loss(torch.randn(3, 4), torch.randn(3, 4))


def test_learnable_temperature_learns():
    v, w = embeddings(8, 8)
    loss = itrloss.InfoNCELoss(0.5, learnable=True)
    assert math.isclose(loss.temperature.item(), 0.5, rel_tol=1e-6)
    optimiser = torch.optim.SGD(loss.parameters(), lr=0.1)
    before = loss(v, v + 0.1 * w)
    before.backward()
    optimiser.step()
    assert loss(v, v + 0.1 * w) < before and loss.temperature < 0.5


def test_a_loss_of_your_own():
    class Margin(itrloss.PairLoss):
        def compute(self, sim):
            return (sim.hardest_negatives().values - sim.sum_of_positives(identity)).relu().mean()

    v, w = embeddings(6, 6)
    for engine in ENGINES:
        S = Similarity(v, w).scores()
        by_hand = ((S - 9 * torch.eye(6)).amax(1) - S.diagonal()).relu().mean()
        torch.testing.assert_close(Margin(engine=engine)(v, w), by_hand)
    with pytest.raises(NotImplementedError, match=r"PairLoss must implement compute\(sim\)"):
        itrloss.PairLoss()(v, w)
    memory = itrloss.CoupledMemory(4, v.shape[1], dtype=v.dtype)
    with pytest.raises(NotImplementedError, match=r"MemoryLoss must implement compute\(sims\)"):
        itrloss.MemoryLoss()(v, w, v, w, memory)


def value_of(loss, sim):
    return sim.both.reduce(sim.both.logsumexp(), loss.reduction)


class Own(itrloss.PairLoss):
    """A loss of one's own, with options that are checked and one that may be anything."""

    shown = ("margin", "form", "anything", "reduction")
    margin = Number(above=0, at_most=1)
    form = Choice("a", "b")
    compute = value_of

    def __init__(self, margin=0.2, form="a", anything=None, **common):
        super().__init__(**common)
        self.margin = margin
        self.form = form
        self.anything = anything


@pytest.mark.parametrize("value", [None, 0.1, 3, (0.1, 0.2), torch.ones(3), abs, "text"])
def test_an_option_of_your_own_may_be_anything(value):
    loss = Own(anything=value)
    assert loss.anything is value and loss(*embeddings(4, 4)).isfinite()
    assert repr(loss).startswith("Own(margin=0.2, form='a', anything=")


OPTIONS_OF_YOUR_OWN = [
    ("margin", "0.1", TypeError, r"margin: expected a number, got '0\.1'"),
    ("margin", True, TypeError, "margin: expected a number, got True"),
    ("margin", 1.5, ValueError, "margin: expected a number above 0 and at most 1, got 1.5"),
    ("form", "c", ValueError, "form: expected 'a' or 'b', got 'c'"),
    ("reduction", "max", ValueError, "reduction: expected 'mean', 'sum' or 'none', got 'max'"),
    ("engine", "cuda", ValueError, "engine: expected 'auto', 'dense', 'tiled' or 'triton'"),
    ("gather", "ring", ValueError, "gather: expected True or False, got 'ring'"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), OPTIONS_OF_YOUR_OWN)
def test_options_are_checked_whenever_they_are_set(name, value, error, message):
    with pytest.raises(error, match=message):
        Own(**{name: value})
    loss = Own()
    before = getattr(loss, name)
    for refused in (value, nn.Parameter(torch.tensor([5.0]))):
        with pytest.raises((TypeError, ValueError), match=f"{name}: expected"):
            setattr(loss, name, refused)
    assert getattr(loss, name) == before and not [*loss.parameters()]


def test_options_that_a_loss_does_not_have_are_refused():
    for make_loss in (Own, itrloss.InfoNCELoss, itrloss.MemoryDiversityContrastiveLoss):
        with pytest.raises(TypeError, match="unexpected keyword argument 'schedule'; it has"):
            make_loss(schedule="ring")
        with pytest.raises(TypeError, match="'redaction'; did you mean 'reduction'"):
            make_loss(redaction="sum")


def test_an_option_that_was_not_set_is_named():
    class Forgetful(itrloss.PairLoss):
        margin = Number()

    with pytest.raises(AttributeError, match="margin"):
        _ = Forgetful().margin


def test_your_own_loss_may_have_modules_and_parameters():
    head = Own(anything=nn.Linear(2, 3))
    weight = Own(anything=nn.Parameter(torch.ones(3)))
    assert [*head.state_dict()] == ["anything.weight", "anything.bias"]
    assert [*weight.state_dict()] == ["anything"]
    for loss in (head, weight):
        assert copy.deepcopy(loss)(*embeddings(4, 4)).isfinite()
        assert "reduction='mean'" in repr(loss)


@pytest.mark.parametrize("base", ["TripletLoss", "HubnessAwareLoss", "DiversityContrastiveLoss"])
def test_a_loss_of_the_librarys_may_get_another_option(base):
    kind = getattr(itrloss, base)

    class Weighted(kind):
        shown = ("weight", *kind.shown)

        def __init__(self, weight=3.0, **options):
            super().__init__(**options)
            self.weight = weight

        def compute(self, sim):
            return self.weight * super().compute(sim)

    v, w = embeddings(6, 6)
    torch.testing.assert_close(Weighted(margin=0.4)(v, w), 3 * kind(margin=0.4)(v, w))
    assert "weight=3.0" in repr(Weighted())


LATER = [
    (itrloss.InfoNCELoss, "temperature", 0.2),
    (itrloss.SigmoidLoss, "scale", 5.0),
    (itrloss.SigmoidLoss, "bias", -3.0),
]


@pytest.mark.parametrize(("kind", "name", "value"), LATER)
@pytest.mark.parametrize("learnable", [False, True])
def test_what_is_learnt_may_be_set_later(kind, name, value, learnable):
    v, w = embeddings(6, 6)
    loss = kind(learnable=learnable)
    parameters = [*loss.parameters()]
    setattr(loss, name, value)
    fresh = kind(learnable=learnable, **{name: value})
    assert torch.equal(loss(v, w), fresh(v, w)) and repr(loss) == repr(fresh)
    assert all(x is y for x, y in zip(parameters, loss.parameters(), strict=True))
    with pytest.raises(TypeError, match=f"{name}: expected a number, got '1'"):
        setattr(loss, name, "1")
    with pytest.raises(AttributeError, match="learnable: cannot be changed"):
        loss.learnable = not learnable


def test_a_number_may_become_a_parameter_of_your_own():
    loss = itrloss.SigmoidLoss(learnable=False)
    loss.bias = nn.Parameter(torch.tensor([-3.0]))
    assert [*loss.state_dict()] == ["bias"]
    loss.bias = -2.0
    v, w = embeddings(6, 6)
    wanted = itrloss.SigmoidLoss(bias=-2.0, learnable=False)
    torch.testing.assert_close(loss(v, w), wanted(v, w))


@pytest.mark.parametrize("kind", [itrloss.InfoNCELoss, itrloss.SigmoidLoss])
def test_a_loss_that_shares_a_models_scale_is_learnable(kind):
    of_model = nn.Parameter(torch.tensor(2.0))
    loss = kind(learnable=False)
    assert "learnable=False" in repr(loss)
    loss.log_scale = of_model
    assert loss.learnable and "learnable=True" in repr(loss)
    v, w = embeddings(6, 6)
    loss(v, w).backward()
    assert of_model.grad != 0


def test_what_parameters_depend_on_is_fixed():
    loss = itrloss.PrototypeClassificationLoss(4, 3)
    for name in ("dim", "clusters"):
        with pytest.raises(AttributeError, match=f"{name}: cannot be changed"):
            setattr(loss, name, 7)


# -------------------------------------------------------------------------------------- compilation


# Each way through a loss once, and one by the default backend.
COMPILED = [
    *each(
        name=[name for name, entry in LOSSES.items() if "compiled" in entry.tables],
        engine=["dense", "tiled", "auto"],
        backend=["aot_eager"],
        kind=[None, "random", "shared"],
    ),
    ("dcl", "dense", "inductor", "random"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine", "backend", "kind"), COMPILED)
def test_compiles_without_graph_breaks(name, engine, backend, kind):
    n, m = (8, 11) if kind == "random" else (8, 8)
    # the same tensor for both sides
    ids = (torch.arange(8) % 5,) * 2 if kind == "shared" else make_ids(kind, n, m)
    loss = make(name, engine=engine)
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile's default backend needs a C++ compiler")
    torch._dynamo.reset()
    # Tiles are visited outside of graphs.
    compiled = torch.compile(loss, fullgraph=engine != "tiled", backend=backend)
    results = []
    for f in (loss, compiled):
        v, w = (x.requires_grad_() for x in embeddings(n, m, dtype=torch.float32))
        value = f(v, w, *ids)
        results.append((value, *torch.autograd.grad(value, (v, w))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine", "kind"),
    each(
        name=["infonce learnable", "triplet", "infonce"],
        engine=["tiled", "dense"],
        kind=["random", "random", None],
    ),
)
def test_compiles_for_validation_without_gradients(name, engine, kind):
    ids, (v, w) = make_ids(kind, 8, 8), embeddings(8, 8, dtype=torch.float32)
    loss = make(name, engine=engine)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(v, w, *ids)
        torch.testing.assert_close(compiled, loss(v, w, *ids))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine", "kind"),
    each(
        name=["infonce", "dcl", "triplet"],
        engine=["dense", "auto"],
        kind=["random", "random", None],
    ),
)
def test_one_recompilation_serves_all_batch_sizes(name, engine, kind):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(make(name, engine=engine), fullgraph=True, backend=backend)
    for n in (8, 12, 16, 20):
        v, w = (x.requires_grad_() for x in embeddings(n, n, dtype=torch.float32))
        compiled(v, w, *make_ids(kind, n, n)).backward()
    assert len(graphs) == 2


@itrloss.pair_term
def wave(scores, weight):
    return torch.sin(scores * weight)


class Wave(itrloss.PairLoss):
    """A loss of a user, with a term that autograd differentiates."""

    def compute(self, sim):
        anchors = self.anchors(sim)
        weight = anchors.logsumexp(3.0)
        values = anchors.sum(wave, weight) + anchors.mean_of_positives(wave, weight)
        return anchors.reduce(values, self.reduction)


@pytest.mark.parametrize(
    "loss",
    [
        Wave(engine="dense"),
        itrloss.InfoNCELoss(engine="dense", directions="text-image", hardness=3.0),
        itrloss.InfoNCELoss(engine="dense", learnable=True, max_scale=50.0),
    ],
    ids=["a term of a user", "one direction", "a limited scale"],
)
def test_compiles_as_one_graph(loss):
    v, w = embeddings(8, 8, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(v, w), loss(v, w))


@given(st.integers(0, 10**6), st.floats(0.1, 30), st.floats(-15, 15))
@settings(deadline=None, max_examples=40)
def test_sigmoid_loss_is_the_sum_over_all_pairs_by_hand(seed, scale, bias):
    v, w = embeddings(5, 7, seed=seed)
    ids = make_ids("random", 5, 7, seed)
    z = torch.where(ids[0][:, None] == ids[1], 1.0, -1.0)
    pairs = -torch.nn.functional.logsigmoid(z * (scale * Similarity(v, w, *ids).scores() + bias))
    for engine in ENGINES:
        loss = itrloss.SigmoidLoss(scale, bias, learnable=False, engine=engine, reduction="sum")
        torch.testing.assert_close(loss(v, w, *ids), pairs.sum())
        rows, cols = itrloss.SigmoidLoss(scale, bias, engine=engine, reduction="none")(v, w, *ids)
        torch.testing.assert_close(
            (rows.double(), cols.double()),
            (pairs.sum(1) / 2, pairs.sum(0) / 2),
            rtol=1e-5,
            atol=1e-5,
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_sigmoid_scale_and_bias_get_their_gradients(engine):
    v, w = embeddings(5, 7)
    ids = make_ids("random", 5, 7)

    def function(scale, bias):
        return itrloss.functional.sigmoid_loss(Similarity(v, w, *ids, engine=engine), scale, bias)

    assert gradcheck(
        function, [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (4.0, -2.0)]
    )
    module = itrloss.SigmoidLoss(engine=engine)
    module(v, w, *ids).backward()
    assert {name for name, p in module.named_parameters() if p.grad != 0} == {"log_scale", "bias"}


# ------------------------------------------------------------------- tensors without data, sharding


WITHOUT_DATA = pairwise(
    name=dict.fromkeys(["infonce", *(name for name, *_ in COMPILED)]),
    engine=ENGINES,
    ids=[(), (torch.arange(8), torch.arange(8) % 4)],
)


@pytest.mark.parametrize(
    ("name", "engine", "ids"),
    [
        (name, engine, () if LOSSES[name].lists_positives else ids)
        for name, engine, ids in WITHOUT_DATA
    ],
)
def test_a_dry_run_leaves_no_trace(name, engine, ids):
    """Estimators of memory and FLOPs use shapes only, on the meta device or with fake tensors."""
    v, w = embeddings(8, 8, dtype=torch.float32)
    loss = make(name, engine=engine)
    wanted = loss(v, w)
    moved = copy.deepcopy(loss).to("meta") if list(loss.parameters()) else loss
    moved(*(x.to("meta") for x in (v, w, *ids)))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x, y, *known = (mode.from_tensor(t) for t in (v, w, *ids))
        x.requires_grad_()
        value = loss(x, y, *known)
        value.backward()
        assert isinstance(value, FakeTensor) and x.grad.shape == x.shape
    loss.zero_grad()
    assert torch.equal(loss(v, w), wanted)


def test_no_parameter_is_without_a_dimension():
    """``fully_shard`` does not accept 0-dimensional parameters."""
    for loss in (itrloss.SigmoidLoss(), itrloss.InfoNCELoss(learnable=True)):
        assert list(loss.parameters()) and all(p.dim() > 0 for p in loss.parameters())
    assert itrloss.InfoNCELoss(learnable=True).temperature.dim() == 0


def test_a_positive_that_is_not_above_zero_may_be_left_unpulled():
    """USER's published form of HAL has log(1 + max(S, 0)) for positives."""
    scores = torch.tensor([[0.6, 0.1], [0.2, -0.4]], dtype=torch.float64, requires_grad=True)
    clamp, relu = (
        itrloss.HubnessAwareLoss(10.0, 0.1, positive=p, reduction="none") for p in ("clamp", "relu")
    )
    (a, _), (b, _) = clamp(scores=scores), relu(scores=scores)
    torch.testing.assert_close(
        b - a, 0.5 * torch.stack((0 * scores[0, 0], torch.log1p(scores[1, 1])))
    )
    (gradient,) = torch.autograd.grad(relu(scores=scores)[0].sum(), scores)
    assert gradient[1, 1] == 0 and gradient[0, 0] < 0


@pytest.mark.slow
def test_losses_are_sharded(tmp_path):
    """One process is enough for ``fully_shard`` to check the parameters."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        v, w = (x.float().requires_grad_() for x in embeddings(6, 6))
        for loss in (itrloss.SigmoidLoss(), itrloss.InfoNCELoss(learnable=True)):
            wanted = loss(v, w)
            fully_shard(loss, mesh=dist.init_device_mesh("cpu", (1,)))
            torch.testing.assert_close(loss(v, w), wanted)
    finally:
        dist.destroy_process_group()


def test_a_triplet_loss_resumes_with_the_negatives_that_counted():
    trained = itrloss.TripletLoss(mining="all")
    trained.mining = "hardest"
    resumed = itrloss.TripletLoss(mining="all")
    resumed.load_state_dict(trained.state_dict())
    assert resumed.mining == "hardest"
