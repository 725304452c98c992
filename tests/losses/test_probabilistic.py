"""PCME++ against loops over pairs, written from the paper's formulas; options, hostile input,
processes.
"""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from support.cases import SHAPES, embeddings, make_ids, pairwise, sample, upstream
from support.processes import run
from support.reference import matches, unit

import itrloss
from itrloss import PCMEPlusPlusLoss

OPTIONS = {
    "defaults": {},
    "all terms": {"scale": 1.5, "shift": 2.0, "pseudo_weight": 0.7, "vib_weight": 0.3},
    "lengths": {
        "scale": 0.25,
        "shift": 1.0,
        "pseudo_weight": 0.4,
        "vib_weight": 0.2,
        "normalize": False,
    },
    "matching alone": {"scale": 2.0, "shift": 4.0, "pseudo_weight": 0.0, "vib_weight": 0.0},
}


def distributions(n, m, d=6, dtype=torch.float64):
    """Means of any length, and log-variances about -2."""
    logs = (0.5 * x - 2 for x in embeddings(n, m, d, seed=7, dtype=dtype))
    return [*embeddings(n, m, d, dtype=dtype), *(x.clamp(-6, 1) for x in logs)]


def loops(inputs, ids, scale=5.0, shift=5.0, pseudo_weight=0.1, vib_weight=1e-4, normalize=True):
    """The values of each image and text."""
    means = [unit(x) if normalize else x for x in inputs[:2]]
    variances = [x.exp() for x in inputs[2:]]
    n, m = len(means[0]), len(means[1])
    positive = matches(ids, n, m)
    distance = [
        [
            ((x - y) ** 2).sum() + s.sum() + t.sum()
            for y, t in zip(means[1], variances[1], strict=True)
        ]
        for x, s in zip(means[0], variances[0], strict=True)
    ]
    distance = torch.stack([torch.stack(row) for row in distance])
    sides = []
    for d, mask, mean, log in (
        (distance, positive, means[0], inputs[2]),
        (distance.T, positive.T, means[1], inputs[3]),
    ):
        values = []
        for i in range(len(d)):
            own = [float(x.detach()) for x, p in zip(d[i], mask[i], strict=True) if p]
            value = d.new_zeros(())
            for x, p in zip(d[i], mask[i], strict=True):
                match, miss = (
                    -torch.log(torch.sigmoid(z)) for z in (shift - scale * x, scale * x - shift)
                )
                near = bool(p) or (len(own) > 0 and float(x.detach()) <= sum(own) / len(own))
                value = value + (match if p else miss) + pseudo_weight * (match if near else miss)
            kl = sum(
                0.5 * (u**2 + torch.exp(s) - s - 1) for u, s in zip(mean[i], log[i], strict=True)
            ) / len(log[i])
            values.append(value / len(d[i]) + vib_weight * kl)
        sides.append(torch.stack(values))
    return sides


@pytest.mark.parametrize(
    ("name", "shape", "engine"), pairwise(name=OPTIONS, shape=SHAPES, engine=["dense", "tiled"])
)
def test_values_and_gradients_equal_loops_over_pairs(name, shape, engine, small_tiles, poisoned):
    n, m, kind = SHAPES[shape]
    ids, weights = make_ids(kind, n, m), upstream(n, m)
    results = []
    for ours in (True, False):
        inputs = [x.requires_grad_() for x in distributions(n, m)]
        if ours:
            values = PCMEPlusPlusLoss(**OPTIONS[name], reduction="none", engine=engine)(
                *inputs, *ids
            )
        else:
            values = loops(inputs, ids, **OPTIONS[name])
        total = sum((x * g).sum() for x, g in zip(values, weights, strict=True))
        results.append((*values, *torch.autograd.grad(total, inputs)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_reductions_count_all_anchors():
    ids, inputs = make_ids("random", 5, 8), distributions(5, 8)
    rows, cols = loops(inputs, ids)
    torch.testing.assert_close(PCMEPlusPlusLoss()(*inputs, *ids), rows.mean() + cols.mean())
    torch.testing.assert_close(
        PCMEPlusPlusLoss(reduction="sum")(*inputs, *ids), rows.sum() + cols.sum()
    )


def test_the_mean_is_that_of_the_authors_code_for_one_text_per_image():
    """Binary cross-entropy over all pairs, twice; with the pseudo-positives once in each
    direction.
    """
    v, w, s, t = distributions(9, 9)
    x, y = unit(v), unit(w)
    logits = 5 - 5 * (torch.cdist(x, y) ** 2 + s.exp().sum(1)[:, None] + t.exp().sum(1))
    bce, eye = (
        torch.nn.functional.binary_cross_entropy_with_logits,
        torch.eye(9, dtype=torch.float64),
    )
    wanted = 2 * bce(logits, eye)
    for z in (logits, logits.T):
        wanted = wanted + 0.1 * bce(z, (z >= z.diagonal()[:, None]).double())
    for mean, log in ((x, s), (y, t)):
        wanted = wanted - 1e-4 * 0.5 * (1 + log - mean**2 - log.exp()).mean()
    assert (logits > logits.diagonal()[:, None]).any()
    torch.testing.assert_close(PCMEPlusPlusLoss()(v, w, s, t), wanted)


def test_scale_and_shift_get_their_gradients():
    ids, inputs = make_ids("random", 5, 8), distributions(5, 8)
    a, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (1.5, 2.0))
    rows, cols = loops(inputs, ids, a, b)
    wanted = torch.autograd.grad(rows.mean() + cols.mean(), (a, b))
    for engine in ("dense", "tiled"):
        loss = PCMEPlusPlusLoss(1.5, 2.0, engine=engine).double()
        loss(*inputs, *ids).backward()
        torch.testing.assert_close(
            (loss.scale.grad, loss.shift.grad), tuple(x.view(1) for x in wanted)
        )
    assert [name for name, _ in loss.named_parameters()] == ["scale", "shift"]
    assert not list(PCMEPlusPlusLoss(learnable=False).parameters())


def test_a_copy_of_the_own_text_is_a_pseudo_positive():
    """Its distance may differ in rounding, as it comes from another product."""
    v, w, s, t = distributions(40, 40, d=33, dtype=torch.float32)
    w, t = torch.cat([w, w]), torch.cat([t, t])
    # the copies have no label
    twins = torch.arange(40), torch.cat([torch.arange(40), torch.full((40,), -1)])
    one = PCMEPlusPlusLoss(pseudo_weight=1.0, vib_weight=0.0, reduction="none")
    rows, _ = one(v, w, s, t, *twins)
    both, _ = loops([x.double() for x in (v, w, s, t)], twins, pseudo_weight=1.0, vib_weight=0.0)
    torch.testing.assert_close(rows, both.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [2, 5, 9])
def test_a_text_that_fits_several_images_is_best_with_a_larger_variance(k):
    """Its probabilities add up to its one label: each is 1 / k, where ``a d = b + log(k - 1)``."""
    mean = torch.eye(4, dtype=torch.float64)[:1]
    total = ((5 + math.log(k - 1)) / 5 - 0.2) / 4  # the images have 0.2 of it
    images, logs = mean.expand(k, 4), torch.full((k, 4), math.log(0.05), dtype=torch.float64)
    log = torch.full((1, 4), math.log(total), dtype=torch.float64, requires_grad=True)
    loss = PCMEPlusPlusLoss(pseudo_weight=0.0, vib_weight=0.0, reduction="none")
    _, values = loss(images, mean, logs, log, torch.arange(k), torch.zeros(1, dtype=torch.int64))
    (gradient,) = torch.autograd.grad(values.sum(), log)
    assert gradient.abs().max() < 1e-9
    (elsewhere,) = torch.autograd.grad(
        loss(images, mean, logs, log - 0.1, *(torch.arange(k), torch.zeros(1).long()))[1], log
    )
    assert elsewhere.max() < -1e-3


def test_similarity_ranks_by_the_distance():
    ids, inputs = make_ids("random", 5, 8), distributions(5, 8)
    sim = PCMEPlusPlusLoss().similarity(*inputs, *ids)
    x, y = unit(inputs[0]), unit(inputs[1])
    wanted = torch.cdist(x, y) ** 2 + inputs[2].exp().sum(1)[:, None] + inputs[3].exp().sum(1)
    torch.testing.assert_close(-sim.scores(), wanted)
    assert itrloss.metrics.retrieval_metrics(sim)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hostile_input_stays_finite(dtype, engine):
    v = torch.cat([torch.zeros(2, 8), torch.ones(3, 8), 1e4 * torch.eye(8)[:3]]).to(dtype)
    for low in (-60.0, 0.0, 10.0):  # variances up to 2e4, whose sums are far beyond half precision
        for ids in (
            (None, None),
            *(make_ids(kind, 8, 8) for kind in ("random", "same", "disjoint")),
        ):
            inputs = [
                x.clone().requires_grad_()
                for x in (v, v.flip(0), torch.full_like(v, low), torch.zeros_like(v))
            ]
            value = PCMEPlusPlusLoss(engine=engine)(*inputs, *ids)
            value.backward()
            assert value.isfinite() and value.dtype == torch.float32
            assert all(x.grad.dtype == dtype and x.grad.isfinite().all() for x in inputs)


def test_half_precision_is_computed_in_float32():
    ids, inputs = make_ids("random", 5, 8), [x.bfloat16() for x in distributions(5, 8)]
    loss = PCMEPlusPlusLoss()
    found = loss(*inputs, *ids)
    torch.testing.assert_close(
        found, loss(*(x.float() for x in inputs), *ids), rtol=1e-6, atol=1e-6
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loss(*inputs, *ids), found)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "kind"), [("dense", "random"), ("tiled", None)])
def test_compiles_as_one_graph(engine, kind):
    n, m = (8, 11) if kind else (8, 8)
    loss, ids = PCMEPlusPlusLoss(1.0, 3.0, engine=engine), make_ids(kind, n, m)
    torch._dynamo.reset()
    results = []
    compiled = torch.compile(loss, fullgraph=engine != "tiled", backend="aot_eager")
    for f in (loss, compiled):
        inputs = [x.requires_grad_() for x in distributions(n, m, dtype=torch.float32)]
        value = f(*inputs, *ids)
        results.append((value, *torch.autograd.grad(value, inputs)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def in_a_process(rank: int):
    found = []
    for options in OPTIONS.values():
        for reduction in ("mean", "sum"):
            loss = PCMEPlusPlusLoss(
                **options, reduction=reduction, gather=True, engine="tiled"
            ).double()
            inputs, ids = part(rank)
            value = loss(*(x.requires_grad_() for x in inputs), *ids)
            value.backward()
            found.append(
                [value.detach(), loss.scale.grad, loss.shift.grad, *(x.grad for x in inputs)]
            )
    return found


def part(rank):
    """Batches of different sizes, of which one is empty."""
    cuts = [(slice(0, 4), slice(0, 7)), (slice(4, 9), slice(7, 9)), (slice(9, 9), slice(9, 11))][
        rank
    ]
    (v, w, s, t), ids = distributions(9, 11), make_ids("random", 9, 11)
    inputs = [v[cuts[0]], w[cuts[1]], s[cuts[0]], t[cuts[1]]]
    return [x.clone() for x in inputs], [x[cut] for x, cut in zip(ids, cuts, strict=True)]


def test_processes_share_a_batch(tmp_path):
    cases = [(options, reduction) for options in OPTIONS.values() for reduction in ("mean", "sum")]
    found = run(in_a_process, tmp_path, world=3)
    for (options, reduction), parts in zip(cases, zip(*found, strict=True), strict=True):
        loss, inputs = (
            PCMEPlusPlusLoss(**options, reduction=reduction).double(),
            distributions(9, 11),
        )
        value = loss(*(x.requires_grad_() for x in inputs), *make_ids("random", 9, 11))
        value.backward()
        for own in parts:
            torch.testing.assert_close(own[:3], [value.detach(), loss.scale.grad, loss.shift.grad])
        for k, x in enumerate(inputs, 3):  # the mean over processes is that of one
            torch.testing.assert_close(
                torch.cat([own[k] for own in parts]) / 3, x.grad, rtol=1e-9, atol=1e-12
            )


def test_it_is_a_module_like_the_others():
    inputs, loss = distributions(6, 6, dtype=torch.float32), PCMEPlusPlusLoss(2.0, telemetry=True)
    for other in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert torch.equal(other(*inputs), loss(*inputs))
    fresh = PCMEPlusPlusLoss()
    fresh.load_state_dict(loss.state_dict())
    assert torch.equal(fresh(*inputs), loss(*inputs))
    assert math.isfinite(loss.telemetry["gap"])
    assert repr(loss).startswith(
        "PCMEPlusPlusLoss(scale=2.0, shift=5.0, learnable=True, pseudo_weight=0.1, vib_weight"
    )


def test_input_errors_name_the_argument():
    v, w, s, t = distributions(4, 6)
    ids, loss = (torch.arange(4), torch.arange(6)), PCMEPlusPlusLoss(check_finite=True)
    for call, error, words in (
        (
            lambda: loss(v, w[:, :3], s, t, *ids),
            ValueError,
            "texts_mean: expected embeddings of dimension 6",
        ),
        (
            lambda: loss(v, w, s[:3], t, *ids),
            ValueError,
            r"images_log_variance: expected shape \(4, 6\) like images_mean",
        ),
        (lambda: loss(v, w, s, t.float(), *ids), TypeError, "texts_log_variance: expected float64"),
        (
            lambda: loss(v, w, s, t[:, 0], *ids),
            ValueError,
            r"texts_log_variance: expected shape \(B, D\)",
        ),
        (lambda: loss(v, w, s, t / 0, *ids), ValueError, "texts_log_variance: expected finite"),
        (lambda: loss(v, w, s, t), ValueError, "image_ids, text_ids: needed for"),
        (lambda: PCMEPlusPlusLoss(0.0), ValueError, "scale: expected a number above 0"),
        (
            lambda: PCMEPlusPlusLoss(pseudo_weight=-1),
            ValueError,
            "pseudo_weight: expected a number of at least 0",
        ),
        (lambda: PCMEPlusPlusLoss(reduction="x"), ValueError, "reduction: expected"),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("log_variance", [2.0, 4.0, 6.0])
def test_wide_distributions_keep_the_order_of_their_means(log_variance):
    """The variances add 256 e^6 = 1e5 to each distance, of which float32 has about 1e-2."""
    things = sample(300, 256)
    images = things + 2.2 * sample(300, 256, seed=1)
    texts = things + 2.2 * sample(300, 256, seed=2)
    ranks = []
    for dtype in (torch.float32, torch.float64):
        variances = torch.full((300, 256), log_variance, dtype=dtype)
        sim = PCMEPlusPlusLoss().similarity(images.to(dtype), texts.to(dtype), variances, variances)
        ranks.append(torch.cat([sim.ranks(), sim.T.ranks()]))
    assert (ranks[0] != ranks[1]).double().mean() <= 0.005
