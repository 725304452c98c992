"""PCME++: its parameters, hostile input and precision.

`test_random_cases` has its values next to loops, `test_their_lines` the authors' formula.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.answers import assert_finite
from support.cases import embeddings, make_ids, of_engines, sample
from support.oracle_pcme import distances, pcme
from support.reference import unit

import itrloss
from itrloss import PCMEPlusPlusLoss


def distributions(n, m, d=6, dtype=torch.float64):
    """Means of any length, and log-variances about -2."""
    logs = [(0.5 * x - 2).clamp(-6, 1) for x in embeddings(n, m, d, seed=7, dtype=dtype)]
    return [*embeddings(n, m, d, dtype=dtype), *logs]


def test_a_copy_of_the_own_text_is_a_pseudo_positive():
    """Its distance may differ in rounding, as it comes from another product."""
    v, w, s, t = distributions(40, 40, d=33, dtype=torch.float32)
    inputs = [v, torch.cat([w, w]), s, torch.cat([t, t])]
    image_ids = torch.arange(40)
    of_copies = torch.full((40,), -1)  # they have no label
    ids = (image_ids, torch.cat([image_ids, of_copies]))
    options = {"pseudo_weight": 1.0, "vib_weight": 0.0}
    loss = PCMEPlusPlusLoss(**options, reduction="none")
    found, _ = loss(*inputs, *ids)
    in_double = [x.double() for x in inputs]
    wanted, _ = pcme(in_double, ids, **options)
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [2, 5, 9])
def test_a_text_that_fits_several_images_is_best_with_a_larger_variance(k):
    """Its probabilities add up to its one label: each is 1 / k, where ``a d = b + log(k - 1)``."""
    mean = torch.eye(4, dtype=torch.float64)[:1]
    images = mean.expand(k, 4)
    images_log = torch.full((k, 4), math.log(0.05), dtype=torch.float64)
    image_ids = torch.arange(k)
    text_ids = torch.zeros(1, dtype=torch.int64)
    loss = PCMEPlusPlusLoss(pseudo_weight=0.0, vib_weight=0.0, reduction="none")

    def gradient(log_variance):
        """The gradient of the text's value by its log-variances."""
        log = torch.full((1, 4), log_variance, dtype=torch.float64, requires_grad=True)
        _, values = loss(images, mean, images_log, log, image_ids, text_ids)
        (found,) = torch.autograd.grad(values.sum(), log)
        return found

    best_distance = (5 + math.log(k - 1)) / 5
    variance = (best_distance - 0.2) / 4  # the images have 0.2 of it
    at_best = gradient(math.log(variance))
    assert at_best.abs().max() < 1e-9
    below = gradient(math.log(variance) - 0.1)
    assert below.max() < -1e-3


def test_similarity_ranks_by_the_distance():
    ids = make_ids("random", 5, 8)
    v, w, s, t = distributions(5, 8)
    sim = PCMEPlusPlusLoss().similarity(v, w, s, t, *ids)
    wanted = distances(unit(v), unit(w), s, t)
    torch.testing.assert_close(-sim.scores(), wanted)
    assert itrloss.metrics.retrieval_metrics(sim)


@pytest.mark.parametrize("kind", [None, "random", "same", "disjoint"])
# variances up to 2e4, whose sums are far beyond half precision
@pytest.mark.parametrize("log_variance", [-60.0, 0.0, 10.0])
@of_engines
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hostile_input_stays_finite(dtype, engine, log_variance, kind):
    large = 1e4 * torch.eye(8)[:3]
    v = torch.cat([torch.zeros(2, 8), torch.ones(3, 8), large])
    w = v.flip(0)
    v_log = torch.full_like(v, log_variance)
    w_log = torch.zeros_like(w)
    inputs = [x.to(dtype).requires_grad_() for x in (v, w, v_log, w_log)]
    loss = PCMEPlusPlusLoss(engine=engine)
    value = loss(*inputs, *make_ids(kind, 8, 8))
    assert value.dtype == torch.float32
    assert_finite(value, inputs)


@pytest.mark.parametrize("log_variance", [2.0, 4.0, 6.0])
def test_wide_distributions_keep_the_order_of_their_means(log_variance):
    """The variances add 256 e^6 = 1e5 to each distance, of which float32 has about 1e-2."""
    things = sample(300, 256)
    images = things + 2.2 * sample(300, 256, seed=1)
    texts = things + 2.2 * sample(300, 256, seed=2)
    ranks = []
    for dtype in (torch.float32, torch.float64):
        means = [images.to(dtype), texts.to(dtype)]
        variances = torch.full((300, 256), log_variance, dtype=dtype)
        sim = PCMEPlusPlusLoss().similarity(*means, variances, variances)
        ranks.append(torch.cat([sim.ranks(), sim.T.ranks()]))
    in_single, in_double = ranks
    different = in_single != in_double
    assert different.double().mean() <= 0.005
