"""PCME++ against loops over pairs, written from the paper's formulas; options, hostile input,
processes.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.cases import SHAPES, embeddings, make_ids, pairwise, sample, upstream
from support.processes import run
from support.reference import matches, unit

import itrloss
from itrloss import PCMEPlusPlusLoss

ENGINES = ("dense", "tiled")
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
    logs = [(0.5 * x - 2).clamp(-6, 1) for x in embeddings(n, m, d, seed=7, dtype=dtype)]
    return [*embeddings(n, m, d, dtype=dtype), *logs]


def distances(images, texts, images_log, texts_log):
    """The expected squared distances (N, M) of two samples, pair by pair."""
    rows = []
    for x, s in zip(images, images_log.exp(), strict=True):
        pairs = zip(texts, texts_log.exp(), strict=True)
        rows.append(torch.stack([((x - y) ** 2).sum() + s.sum() + t.sum() for y, t in pairs]))
    return torch.stack(rows)


def of_anchor(distance, positive, scale, shift, pseudo_weight):
    """The mean over candidates of the binary cross-entropies, with pseudo-positives: those as near
    as the positives on average.
    """
    match = -F.logsigmoid(shift - scale * distance)
    miss = -F.logsigmoid(scale * distance - shift)
    near = positive
    if positive.any():
        near = positive | (distance <= distance[positive].mean())
    values = torch.where(positive, match, miss) + pseudo_weight * torch.where(near, match, miss)
    return values.mean()


def divergence(mean, log):
    """The divergence of each distribution from the standard normal one, per dimension."""
    return 0.5 * (mean**2 + log.exp() - log - 1).mean(1)


def loops(inputs, ids, scale=5.0, shift=5.0, pseudo_weight=0.1, vib_weight=1e-4, normalize=True):
    """The values of each image and text."""
    images, texts, images_log, texts_log = inputs
    if normalize:
        images = unit(images)
        texts = unit(texts)
    distance = distances(images, texts, images_log, texts_log)
    positive = matches(ids, len(images), len(texts))
    sides = []
    for d, mask, mean, log in (
        (distance, positive, images, images_log),
        (distance.T, positive.T, texts, texts_log),
    ):
        anchors = zip(d, mask, strict=True)
        values = [of_anchor(x, own, scale, shift, pseudo_weight) for x, own in anchors]
        sides.append(torch.stack(values) + vib_weight * divergence(mean, log))
    return sides


def outcome(call, n, m):
    """Values of images and texts, and gradients of a sum with a weight for each."""
    inputs = [x.requires_grad_() for x in distributions(n, m)]
    rows, cols = call(inputs)
    of_rows, of_cols = upstream(n, m)
    total = of_rows @ rows + of_cols @ cols
    return [rows, cols, *torch.autograd.grad(total, inputs)]


@pytest.mark.parametrize(
    ("name", "shape", "engine"), pairwise(name=OPTIONS, shape=SHAPES, engine=ENGINES)
)
def test_values_and_gradients_equal_loops_over_pairs(name, shape, engine, small_tiles, poisoned):
    n, m, kind = SHAPES[shape]
    ids = make_ids(kind, n, m)
    loss = PCMEPlusPlusLoss(**OPTIONS[name], reduction="none", engine=engine)
    found = outcome(lambda inputs: loss(*inputs, *ids), n, m)
    wanted = outcome(lambda inputs: loops(inputs, ids, **OPTIONS[name]), n, m)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


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
    x = unit(v)
    y = unit(w)
    distance = torch.cdist(x, y) ** 2 + s.exp().sum(1)[:, None] + t.exp().sum(1)
    logits = 5 - 5 * distance
    cross_entropy = F.binary_cross_entropy_with_logits
    wanted = 2 * cross_entropy(logits, torch.eye(9, dtype=torch.float64))
    for z in (logits, logits.T):
        near = z >= z.diagonal()[:, None]
        assert near.sum() > 9
        wanted = wanted + 0.1 * cross_entropy(z, near.double())
    wanted = wanted + 1e-4 * (divergence(x, s).mean() + divergence(y, t).mean())
    torch.testing.assert_close(PCMEPlusPlusLoss()(v, w, s, t), wanted)


def test_scale_and_shift_get_their_gradients():
    ids, inputs = make_ids("random", 5, 8), distributions(5, 8)
    a, b = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (1.5, 2.0))
    rows, cols = loops(inputs, ids, a, b)
    wanted = torch.autograd.grad(rows.mean() + cols.mean(), (a, b))
    for engine in ENGINES:
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
    _, values = loss(
        images, mean, logs, log - 0.1, torch.arange(k), torch.zeros(1, dtype=torch.int64)
    )
    (elsewhere,) = torch.autograd.grad(values.sum(), log)
    assert elsewhere.max() < -1e-3


def test_similarity_ranks_by_the_distance():
    ids, inputs = make_ids("random", 5, 8), distributions(5, 8)
    sim = PCMEPlusPlusLoss().similarity(*inputs, *ids)
    x, y = unit(inputs[0]), unit(inputs[1])
    wanted = torch.cdist(x, y) ** 2 + inputs[2].exp().sum(1)[:, None] + inputs[3].exp().sum(1)
    torch.testing.assert_close(-sim.scores(), wanted)
    assert itrloss.metrics.retrieval_metrics(sim)


@pytest.mark.parametrize("kind", [None, "random", "same", "disjoint"])
# variances up to 2e4, whose sums are far beyond half precision
@pytest.mark.parametrize("log_variance", [-60.0, 0.0, 10.0])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hostile_input_stays_finite(dtype, engine, log_variance, kind):
    v = torch.cat([torch.zeros(2, 8), torch.ones(3, 8), 1e4 * torch.eye(8)[:3]])
    given = v, v.flip(0), torch.full_like(v, log_variance), torch.zeros_like(v)
    inputs = [x.to(dtype).requires_grad_() for x in given]
    value = PCMEPlusPlusLoss(engine=engine)(*inputs, *make_ids(kind, 8, 8))
    assert value.isfinite()
    assert value.dtype == torch.float32
    for gradient in torch.autograd.grad(value, inputs):
        assert gradient.isfinite().all()


# ---------------------------------------------------------------------------------------- processes

CASES = [(options, reduction) for options in OPTIONS.values() for reduction in ("mean", "sum")]
# of images and of texts, for three processes, of which one has no images
PARTS = [(slice(0, 4), slice(0, 7)), (slice(4, 9), slice(7, 9)), (slice(9, 9), slice(9, 11))]
WHOLE = slice(9), slice(11)


def of_all_cases(rank: int | None) -> list[list[torch.Tensor]]:
    """The value and all gradients of a process's part in each case; of the whole for None."""
    rows, cols = WHOLE if rank is None else PARTS[rank]
    found = []
    for options, reduction in CASES:
        common = {"reduction": reduction, "gather": rank is not None}
        loss = PCMEPlusPlusLoss(**options, **common, engine="tiled").double()
        v, w, s, t = distributions(9, 11)
        inputs = [x.clone().requires_grad_() for x in (v[rows], w[cols], s[rows], t[cols])]
        image_ids, text_ids = make_ids("random", 9, 11)
        value = loss(*inputs, image_ids[rows], text_ids[cols])
        leaves = [loss.scale, loss.shift, *inputs]
        found.append([value.detach(), *torch.autograd.grad(value, leaves)])
    return found


def test_processes_share_a_batch(tmp_path):
    processes = run(of_all_cases, tmp_path, world=3)
    for k, (value, scale, shift, *wanted) in enumerate(of_all_cases(None)):
        parts = [found[k] for found in processes]
        for part in parts:
            torch.testing.assert_close(part[:3], [value, scale, shift])
        # the mean over processes is that of one
        gradients = [torch.cat(x) / 3 for x in list(zip(*parts, strict=True))[3:]]
        torch.testing.assert_close(gradients, wanted, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------------- errors


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
