"""Further cases of the kinds of faults that were once found: where else the same root cause could
strike. A section for each kind.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import io
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.processes import both
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import itrloss
from itrloss import Similarity, SuspiciousInputWarning, compat, files, functional, metrics, rerank
from itrloss.cli import main

D = 8
TESTED = "dense", "tiled"
SOURCE = Path(itrloss.__file__).parent


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def unit(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return nn.functional.normalize(sample(*shape, seed=seed, dtype=dtype), dim=-1)


def settings(**options: Any) -> argparse.Namespace:
    """The settings of public code bases, as their criteria take them."""
    defaults = {
        "margin": 0.2,
        "max_violation": False,
        "measure": "cosine",
        "mask_repeat": False,
        "local_alpha": 30.0,
        "local_ep": 0.3,
        "mu": 30.0,
        "gama": 0.3,
        "num_embeds": 2,
    }
    return argparse.Namespace(**{**defaults, **options})


# ------------------------------------------------------------------------------------------------
# Terms live in one global table under their bare name, and get internal buffers


@pytest.fixture
def matrices(request) -> list[Similarity]:
    """Given scores and embeddings, with captions and one to one."""
    ids = torch.arange(7), torch.arange(9) % 7
    engine = request.param
    return [
        Similarity.from_scores(sample(7, 9).tanh(), *ids, engine=engine),
        Similarity(sample(7, D), sample(9, D, seed=1), *ids, engine=engine),
        Similarity(sample(7, D), sample(7, D, seed=1), engine=engine),
    ]


@itrloss.pair_term
def overwrites_its_parameter(scores, weight):
    return weight.mul_(2) * scores


@itrloss.pair_term
def overwrites_a_guide(scores, guide):
    return guide.mul_(3) * scores


ASKED: dict[str, Callable[[Similarity, Tensor], Tensor]] = {
    "negatives": lambda sim, w: sim.sum(overwrites_its_parameter, w),
    "all": lambda sim, w: sim.sum(overwrites_its_parameter, w, over="all"),
    "positives": lambda sim, w: sim.sum_of_positives(overwrites_its_parameter, w),
    "weighted": lambda sim, w: sim.weighted_sum(overwrites_its_parameter, w),
}


@pytest.mark.parametrize("matrices", TESTED, indirect=True)
@pytest.mark.parametrize("name", ASKED)
def test_a_term_may_overwrite_its_parameters(name, matrices, small_tiles):
    for sim in matrices:
        weight = sample(7, seed=2)
        before = weight.clone()
        first = ASKED[name](sim, weight)
        assert torch.equal(weight, before)
        plain = {"negatives": "negatives", "all": "all", "weighted": "negatives"}
        if name == "positives":
            wanted = 2 * before * sim.sum_of_positives(itrloss.terms.identity)
        else:
            wanted = 2 * before * sim.sum(itrloss.terms.identity, over=plain[name])  # type: ignore
        wanted = wanted.sum() if name == "weighted" else wanted
        torch.testing.assert_close(first, wanted)


@pytest.mark.parametrize("engine", TESTED)
def test_a_term_may_overwrite_the_scores_of_a_guide(engine, small_tiles):
    scores, judge = sample(25, 30).tanh(), sample(25, 30, seed=1)
    ids = torch.arange(25), torch.arange(30)
    sim = Similarity.from_scores(scores, *ids, engine=engine)
    guide = Similarity.from_scores(judge.clone(), *ids, engine=engine)
    found = sim.sum(overwrites_a_guide, guide=guide, over="all")
    assert torch.equal(guide.scores(), judge)
    torch.testing.assert_close(found, (3 * judge * scores).sum(1))


@pytest.mark.parametrize("matrices", TESTED, indirect=True)
@pytest.mark.parametrize("name", ["positive_scores", "positive_counts", "negative_counts"])
def test_answers_belong_to_the_caller(name, matrices):
    def ask(sim: Similarity) -> Tensor:
        answer = getattr(sim, name)
        return answer() if callable(answer) else answer

    for sim in matrices:
        first = ask(sim)
        before = first.clone()
        first.zero_()
        assert torch.equal(ask(sim), before)


@pytest.mark.parametrize("matrices", TESTED, indirect=True)
def test_a_function_of_pairs_may_work_in_place(matrices):
    def value(scores, of_row, of_col):
        return scores.exp_() + of_row.mul_(2) + of_col.mul_(3)

    for sim in matrices:
        values = sample(sim.shape[0], seed=3), sample(sim.shape[1], seed=4)
        before = [x.clone() for x in values]
        first = sim.mean_of_pairs(value, *values)
        assert torch.equal(first, sim.mean_of_pairs(value, *values))
        if sim.one_to_one:
            assert all(map(torch.equal, values, before))


def test_a_scorer_may_overwrite_the_numbers_of_its_pairs():
    def scorer(images, texts):
        images.zero_()
        texts.zero_()
        return torch.zeros(len(images))

    scores = torch.rand(20, 30, generator=torch.Generator().manual_seed(0))
    best = rerank.TwoStageReranker(scorer, k=5).topk(scores, 5).i2t.indices
    assert torch.equal(best.sort(1).values, scores.topk(5).indices.sort(1).values)


class Zeroing(rerank.Reranker):
    """A method whose rule overwrites the scores it gets."""

    def rule(self, direction):
        return lambda scores, rows: scores.zero_()


RERANKERS: dict[str, Callable[[], rerank.Reranker]] = {
    name: getattr(rerank, name)
    for name in rerank.__all__
    if isinstance(getattr(rerank, name), type)
    and issubclass(getattr(rerank, name), rerank.Reranker)
    and name not in ("Reranker", "TwoStageReranker")
}


@pytest.mark.parametrize("name", [*RERANKERS, "Zeroing"])
def test_a_reranker_leaves_scores_and_banks_as_they_are(name):
    method = {**RERANKERS, "Zeroing": Zeroing}[name]()
    if method.needs_embeddings:
        pytest.skip("it takes no scores")
    scores = torch.rand(30, 20, generator=torch.Generator().manual_seed(0)).T
    banks = torch.rand(11, 30), torch.rand(20, 11)
    before = [x.clone() for x in (scores, *banks)]
    if method.takes_bank:
        method.fit(*banks)
    method.rerank(scores)
    method.topk(scores, 3)
    assert all(map(torch.equal, (scores, *banks), before))


# ------------------------------------------------------------------------------------------------
# State holds what is no tensor, or not everything

NUMBERS = [np.float16(20), np.float32(20), np.float64(20), np.int64(20), Fraction(20)]
NUMBERED: dict[str, Callable[[Any], rerank.Reranker]] = {
    "InvertedSoftmax": lambda x: rerank.InvertedSoftmax(x),
    "FastReranker": lambda x: rerank.FastReranker((x, x), [x, x]),  # type: ignore[arg-type]
    "DualSoftmax": lambda x: rerank.DualSoftmax(x),
    "QueryBankNorm": lambda x: rerank.QueryBankNorm(x, np.int32(2)),
    "DualBankNorm": lambda x: rerank.DualBankNorm(x, x),
    "Sinkhorn": lambda x: rerank.Sinkhorn(x, np.int8(3)),
    "NearestNeighborNorm": lambda x: rerank.NearestNeighborNorm(x),
    "MultiFactorReranker": lambda x: rerank.MultiFactorReranker(share_weight=x),
    "KReciprocalReranker": lambda x: rerank.KReciprocalReranker(weight=x / 40),
}


@pytest.mark.parametrize("name", NUMBERED)
def test_a_state_of_a_reranker_holds_plain_numbers(name):
    for number in NUMBERS:
        method = NUMBERED[name](number)
        file = io.BytesIO()
        torch.save(method.state_dict(), file)
        file.seek(0)
        other = RERANKERS[name]().load_state_dict(torch.load(file, weights_only=True))
        assert repr(other) == repr(method) and "np." not in repr(method)


SWITCHED: dict[str, Callable[[], Any]] = {
    "VSE++": compat.VSEPPLoss,
    "VSE-infinity": compat.VSEInfinityLoss,
    "SGRAF": compat.SGRAFLoss,
    "CHAN": compat.CHANLoss,
    "HREM": lambda: compat.HREMLoss(settings()),
    "PVSE": lambda: compat.PVSELoss(settings()),
    "any loss": lambda: compat.adapt(itrloss.TripletLoss(mining="all"), "vsepp"),
}


@pytest.mark.parametrize("name", SWITCHED)
def test_a_criterion_goes_on_with_the_negatives_it_was_switched_to(name):
    criterion, resumed = SWITCHED[name](), SWITCHED[name]()
    criterion.max_violation_on()
    state = criterion.state_dict()
    assert all(isinstance(x, Tensor) for x in state.values())
    resumed.load_state_dict(state)
    assert resumed.max_violation
    resumed.max_violation_off()
    resumed.load_state_dict({})  # of a version without it
    assert not resumed.max_violation


@pytest.mark.parametrize("name", SWITCHED)
def test_states_of_criteria_can_be_averaged_and_copied(name):
    model = nn.ModuleList([nn.Linear(2, 2), SWITCHED[name]()])
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    for _ in range(2):
        average.update_parameters(model)
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()


# ------------------------------------------------------------------------------------------------
# Precision is left to the surroundings


@pytest.fixture(params=["autocast", "bfloat16", "float16", "float64", "deterministic", "medium"])
def surroundings(request) -> Iterator[str]:
    """What a program may set for itself."""
    dtype = torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    name = request.param
    if name == "deterministic":
        torch.use_deterministic_algorithms(True)
    elif name == "medium":
        torch.set_float32_matmul_precision("medium")
    elif name != "autocast":
        torch.set_default_dtype(getattr(torch, name))
    rounds = torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast")
    with rounds:
        yield name
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(precision)
    torch.set_default_dtype(dtype)


SETS = sample(12, 3, D, seed=5)
IMAGES, TEXTS = sample(12, D), sample(12, D, seed=1)
SIM = Similarity(IMAGES, TEXTS)
REGIONS = sample(4, 6, 5, D, seed=6)
CLOSE = 1e-6


def running_means() -> Tensor:
    gate = itrloss.DynamicGate(D, 3, momentum=0.01)
    gate.weight.copy_(IMAGES[:3])
    for regions in REGIONS:
        gate(regions)
    return gate.centre


def clusters() -> Tensor:
    means = itrloss.OnlineKMeans(4, D)
    means.update(IMAGES)
    means.update(TEXTS)
    return means.centroids


def set_scores(aggregation: Any) -> Callable[[], Tensor]:
    return lambda: functional.set_similarity(SETS, SETS.flip(0), aggregation)


def regularised() -> Tensor:
    weights = {"mmd_weight": 0.1, "div_weight": 0.1, "num_embeds": 3}
    sets = nn.functional.normalize(SETS, dim=2)
    return compat.PVSELoss(settings(**weights))(sets, sets.flip(0), SETS, SETS)[0]


ROUNDED: dict[str, Callable[[], Tensor]] = {
    "the best of sets": set_scores("max"),
    "the mean of sets": set_scores("mean"),
    "late interaction": set_scores("smooth_max_sum"),
    "running means": running_means,
    "k-means": clusters,
    "mining": lambda: itrloss.mine_hard_negatives(IMAGES, TEXTS, range(12), range(12), 3).values,
    "telemetry": lambda: torch.stack(
        [x.double() for x in itrloss.describe(Similarity(IMAGES, TEXTS)).values()]
    ),
    "orthogonal heads": lambda: functional.dynamic_orthogonal_loss(SETS, slack=0.0),
    "own negatives": lambda: itrloss.InfoNCELoss()(
        unit(12, D), unit(12, D, seed=1), negatives=SETS
    ),
    "PVSE's regularisers": regularised,
    "order embeddings": lambda: compat.VSEPPLoss(0.2, "order")(IMAGES.abs(), TEXTS.abs()),
    "k-reciprocal": lambda: rerank.KReciprocalReranker().rerank(Similarity(IMAGES, TEXTS)).i2t,
    "Sinkhorn": lambda: rerank.Sinkhorn().rerank(Similarity(IMAGES, TEXTS)).i2t,
}
EXACT = {name: make() for name, make in ROUNDED.items() if name != "own negatives"}


@pytest.mark.parametrize("name", EXACT)
def test_the_surroundings_change_nothing(name, surroundings):
    found = ROUNDED[name]().double()
    wanted = EXACT[name].double()
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


LEARNT: dict[str, Callable[[], Any]] = {
    "InfoNCE": lambda: itrloss.InfoNCELoss(learnable=True),
    "SigLIP": itrloss.SigmoidLoss,
    "Matryoshka": lambda: itrloss.Matryoshka(itrloss.InfoNCELoss(learnable=True), (4, 8)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LEARNT)
def test_a_learnt_scale_in_half_precision_is_not_rounded_again(name, dtype):
    loss = LEARNT[name]().to(dtype)
    exact = copy.deepcopy(loss).float()
    values = [criterion(IMAGES, TEXTS) for criterion in (loss, exact)]
    torch.testing.assert_close(*values, rtol=CLOSE, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_running_means_of_a_half_precision_model_move(dtype):
    gate = itrloss.DynamicGate(D, 4, momentum=0.001)
    gate(REGIONS[0])
    half = copy.deepcopy(gate).to(dtype)
    for _ in range(50):
        gate(REGIONS[1] + 1)
        half(REGIONS[1] + 1)
    assert half.centre.dtype == half.on_rate.dtype == torch.float32
    torch.testing.assert_close(half.centre, gate.centre, rtol=0.02, atol=0.002)


# ------------------------------------------------------------------------------------------------
# An order is squeezed into one float32


def noisy_pairs(n: int = 60, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Float64 embeddings of images, and two captions each; far from the origin they are crowded."""
    base = sample(n, 32, dtype=torch.float64)
    images = offset + base + 0.9 * sample(n, 32, seed=1, dtype=torch.float64)
    texts = offset + base.repeat_interleave(2, 0)
    return images, texts + 1.2 * sample(2 * n, 32, seed=2, dtype=torch.float64)


def ranks_of(
    scores: Any, reranker: rerank.Reranker | None, ids: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    results = metrics.retrieval_results(scores, *(ids or ()), reranker=reranker)
    return torch.cat([results.i2t.ranks.flatten(), results.t2i.ranks.flatten()]).double()


def share_of_others(found: Tensor, exact: Tensor) -> float:
    return float((found != exact).double().mean())


CROWDED: dict[str, Callable[[], rerank.Reranker]] = {
    "Fast, small scales": lambda: rerank.FastReranker((0.01, 0.01), (0.01, 0.01)),
    "inverted softmax, tiny scale": lambda: rerank.InvertedSoftmax(0.001),
    "inverted softmax, large scale": lambda: rerank.InvertedSoftmax(1000.0),
    "k-reciprocal": rerank.KReciprocalReranker,
    "Sinkhorn, small scale": lambda: rerank.Sinkhorn(0.01),
    "mutual proximity": rerank.MutualProximity,
}


@pytest.mark.parametrize("name", CROWDED)
def test_crowded_embeddings_keep_their_order(name):
    images, texts = noisy_pairs(offset=30.0)  # cosines differ by thousandths
    ids = torch.arange(60), torch.arange(120) // 2
    rounded = images.float(), texts.float()
    exact = [x.double() for x in rounded]
    method = CROWDED[name]()
    found = [ranks_of(Similarity(*pair, *ids), method) for pair in (rounded, exact)]
    assert share_of_others(*found) <= 0.01


SHIFTED: dict[str, Callable[[], rerank.Reranker]] = {
    "CSLS": rerank.CSLS,
    "NNN": rerank.NearestNeighborNorm,
    "inverted softmax": rerank.InvertedSoftmax,
    "multi-factor": rerank.MultiFactorReranker,
    "reciprocal": rerank.ReciprocalReranker,
}


@pytest.mark.parametrize("shift", [1000.0, -1000.0])
@pytest.mark.parametrize("name", SHIFTED)
def test_scores_far_from_zero_keep_their_order(name, shift):
    images, texts = noisy_pairs()
    ids = torch.arange(60), torch.arange(120) // 2
    cosines = nn.functional.normalize(images) @ nn.functional.normalize(texts).T
    scores = (cosines + shift).float()
    method = SHIFTED[name]()
    assert torch.equal(ranks_of(scores, method, ids), ranks_of(scores.double(), method, ids))


@pytest.mark.parametrize("log_variance", [2.0, 4.0, 6.0])
def test_wide_distributions_keep_the_order_of_their_means(log_variance):
    base = sample(300, 256, dtype=torch.float64)
    means = [base + 2.2 * sample(300, 256, seed=seed, dtype=torch.float64) for seed in (1, 2)]
    loss = itrloss.PCMEPlusPlusLoss()
    found = []
    for dtype in (torch.float32, torch.float64):
        variances = [torch.full((300, 256), log_variance, dtype=dtype)] * 2
        sim = loss.similarity(*(x.float().to(dtype) for x in means), *variances)
        found.append(ranks_of(sim, None))
    assert share_of_others(*found) <= 0.005


@pytest.mark.parametrize("side", [0, 1])
def test_a_large_bias_keeps_the_order_of_scores(side):
    images, texts = noisy_pairs()
    biases: list[Tensor | None] = [None, None]
    biases[side] = torch.full((60, 120)[side : side + 1], 1e5)
    ids = torch.arange(60), torch.arange(120) // 2
    plain = Similarity(images.float(), texts.float(), *ids)
    moved = Similarity(images.float(), texts.float(), *ids, bias=(biases[0], biases[1]))
    assert torch.equal(ranks_of(moved, None), ranks_of(plain, None))
    assert torch.equal(moved.topk(5).indices, plain.topk(5).indices)


# ------------------------------------------------------------------------------------------------
# Encodings leak

LARGE = np.array([2**63 + i for i in range(12)], dtype=np.uint64)
NUMBERED_FROM_2_63: dict[str, Callable[[], Any]] = {
    "own negatives": lambda: itrloss.InfoNCELoss()(
        IMAGES,
        TEXTS,
        range(12),
        range(12),
        negatives=SETS,
        negative_ids=LARGE[:, None].repeat(3, 1),
    ),
    "HREM": lambda: compat.HREMLoss(settings(mask_repeat=True))(IMAGES, TEXTS, LARGE),
    "HAL's bank": lambda: compat.HALLoss(settings())(IMAGES, TEXTS, IMAGES, TEXTS, LARGE, LARGE),
    "mining": lambda: itrloss.mine_hard_negatives(IMAGES, TEXTS, LARGE, LARGE, 3),
    "a memory": lambda: itrloss.CoupledMemory(20, D).enqueue(IMAGES, TEXTS, LARGE),
    "a list": lambda: itrloss.InfoNCELoss()(IMAGES, TEXTS, LARGE.tolist(), LARGE.tolist()),
}


@pytest.mark.parametrize("name", NUMBERED_FROM_2_63)
def test_ids_beyond_int64_are_refused(name):
    with pytest.raises(ValueError, match=r"expected ids below 2\*\*63, got larger ones"):
        NUMBERED_FROM_2_63[name]()


def test_both_of_numpys_types_of_64_bits_are_ids():
    small = np.arange(12) // 2
    wanted = itrloss.InfoNCELoss()(IMAGES, TEXTS, small, small)
    for kind in (np.ulonglong, np.longlong, np.uint64, np.uintc):
        ids = small.astype(kind)
        assert torch.equal(itrloss.InfoNCELoss()(IMAGES, TEXTS, ids, ids), wanted)


MISSING = {
    "blank lines.txt": "a\n\nb\n\nc\n",
    "empty names.csv": 'id\na\n""\nb\n""\n',
    "nan.csv": "id\n3.0\nnan\n4.0\nnan\n",
    "empty numbers.csv": "id,x\n3,a\n,b\n4,c\n,d\n",
    "null.json": json.dumps(["a", None, "b", None]),
    "empty strings.json": json.dumps(["a", "", "b", ""]),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_ids_do_not_match_each_other(name, tmp_path):
    path = tmp_path / name
    path.write_text(MISSING[name])
    with pytest.raises(ValueError, match=name):
        files.read_ids(path, "id" if "," in MISSING[name] and name.endswith("csv") else None)


def test_no_candidate_of_a_fold_is_none_of_the_whole():
    """Texts that do not exist leave a fold short of candidates: -1, and none of its texts."""
    images = torch.tensor([0, 1, 2, itrloss.NO_ID])
    texts = torch.tensor([0, 0, 1, 1, 2, 2, itrloss.NO_ID, itrloss.NO_ID])
    results = metrics.retrieval_results(sample(4, 8).tanh(), images, texts, folds=2, hubness_k=4)
    assert sorted(results.i2t.top[0].tolist()) == [0, 1, 2, 3]
    assert sorted(results.i2t.top[2].tolist()) == [-1, -1, 4, 5]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_what_a_mask_leaves_out_may_be_anything(value):
    regions = sample(5, 3, D)
    mask = torch.tensor([[1, 1, 0]] * 5)
    gates = [itrloss.DynamicGate(D, 4) for _ in range(2)]
    gates[1].load_state_dict(gates[0].state_dict())
    padded = regions.clone()
    padded[:, 2] = value
    found = gates[0](padded, mask), gates[1](regions[:, :2])
    torch.testing.assert_close(*found)
    torch.testing.assert_close(gates[0].centre, gates[1].centre)


# ------------------------------------------------------------------------------------------------
# Suspicious data passes without a word


def said(function: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **options)
    return [str(x.message) for x in caught if x.category is SuspiciousInputWarning]


def pairs(n: int = 40) -> tuple[Tensor, Tensor]:
    images = sample(n, 16)
    return images, images + 0.3 * sample(n, 16, seed=1)


PAIRS = pairs()
ALL = torch.arange(40)
ELSEWHERE = ALL + 1000
COSINES = nn.functional.normalize(PAIRS[0]) @ nn.functional.normalize(PAIRS[1]).T
HEADS = torch.stack([PAIRS[0], PAIRS[0].flip(1)], 1)
SQUARE = unit(16, 16, seed=7)  # embeddings, as many as dimensions

SUSPICIOUS: dict[str, tuple[Callable[[], Any], str]] = {
    "ids in common, of heads": (
        lambda: itrloss.VarianceAwareLoss()(HEADS, PAIRS[1], ALL, ELSEWHERE),
        "no image has a matching text",
    ),
    "ids in common, of DVSE": (
        lambda: itrloss.DVSEObjective()(HEADS, PAIRS[1], HEADS, None, ALL, ELSEWHERE),
        "no image has a matching text",
    ),
    "long embeddings that are not normalised": (
        lambda: itrloss.InfoNCELoss(normalize=False)(*(10 * x for x in PAIRS)),
        "scores above 5, as of logits",
    ),
    "long embeddings of VSE++": (
        lambda: compat.VSEPPLoss(0.2)(*(10 * x for x in PAIRS)),
        "scores above 5, as of logits",
    ),
    "logits of SGRAF": (lambda: compat.SGRAFLoss(0.2)(100 * COSINES), "scores above 5, as of"),
    "logits of CHAN": (lambda: compat.CHANLoss()(100 * COSINES), "scores above 5, as of logits"),
    "embeddings for SGRAF's scores": (lambda: compat.SGRAFLoss(0.2)(SQUARE), "has length 1"),
    "a teacher's logits": (
        lambda: itrloss.DistillationLoss()(*PAIRS, 100 * COSINES),
        "teacher: scores above 5",
    ),
    "a teacher's embeddings": (
        lambda: itrloss.DistillationLoss()(SQUARE, SQUARE.flip(1), SQUARE),
        "each row has length 1",
    ),
    "a guide's logits": (
        lambda: itrloss.InfoNCELoss(margin=0.1)(
            *PAIRS, guide=Similarity.from_scores(100 * COSINES)
        ),
        "guide: scores above 5",
    ),
    "negatives that match": (
        lambda: itrloss.InfoNCELoss()(*PAIRS, negatives=PAIRS[1].clone()),
        "negatives: 40 of them are texts of the batch",
    ),
    "own negatives that match": (
        lambda: itrloss.InfoNCELoss()(*PAIRS, negatives=PAIRS[1][:, None].clone()),
        "negatives: 40 of them are texts of the batch",
    ),
    "embeddings of zeros": (
        lambda: itrloss.InfoNCELoss()(0 * PAIRS[0], PAIRS[1]),
        "images: all embeddings are zero",
    ),
    "empty sets": (
        lambda: functional.set_similarity(HEADS, HEADS, image_mask=torch.zeros(40, 2).bool()),
        "all sets are empty",
    ),
    "right answers that are mined": (
        lambda: itrloss.mine_hard_negatives(*PAIRS, ALL, ELSEWHERE, 3),
        "they have no id in common",
    ),
    "one id for all that is mined": (
        lambda: itrloss.mine_hard_negatives(*PAIRS, 0 * ALL, 0 * ALL, 3),
        "there are no negatives",
    ),
    "test queries as a bank": (
        lambda: rerank.CSLS().fit(*PAIRS).topk(Similarity(*PAIRS), 3),
        "the bank has images of the test set",
    ),
    "test scores as a bank": (
        lambda: rerank.CSLS().fit(texts=COSINES).rerank(COSINES),
        "texts: the bank has texts of the test set",
    ),
}


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_suspicious_data_is_noticed(name):
    function, message = SUSPICIOUS[name]
    found = said(function)
    assert any(message in text for text in found), found


UNSUSPICIOUS: dict[str, Callable[[], Any]] = {
    "heads": lambda: itrloss.VarianceAwareLoss()(HEADS, PAIRS[1], ALL, ALL),
    "unit vectors": lambda: itrloss.InfoNCELoss(normalize=False)(unit(40, 16), unit(40, 16)),
    "long embeddings and wide margins": lambda: compat.VSEPPLoss(20)(*(10 * x for x in PAIRS)),
    "order embeddings": lambda: compat.VSEPPLoss(0.05, "order")(*(9 * x.abs() for x in PAIRS)),
    "cosines of a code base": lambda: compat.SGRAFLoss(0.2)(COSINES),
    "a teacher's cosines": lambda: itrloss.DistillationLoss()(*PAIRS, COSINES),
    "a teacher's logits in their units": lambda: itrloss.DistillationLoss(teacher_temperature=1.0)(
        *PAIRS, 100 * COSINES
    ),
    "other negatives": lambda: itrloss.InfoNCELoss()(*PAIRS, negatives=sample(9, 16, seed=3)),
    "negatives with ids": lambda: itrloss.InfoNCELoss()(
        *PAIRS, ALL, ALL, negatives=PAIRS[1], negative_ids=ALL
    ),
    "texts of others as own negatives": lambda: itrloss.InfoNCELoss()(
        *PAIRS, negatives=PAIRS[1].roll(1, 0)[:, None]
    ),
    "some empty sets": lambda: functional.set_similarity(
        HEADS, HEADS, image_lengths=[0] + [2] * 39
    ),
    "a corpus with few right answers": lambda: itrloss.mine_hard_negatives(
        *PAIRS, ALL, [0] + [99] * 39, 3
    ),
    "a bank of others": lambda: (
        rerank.CSLS().fit(sample(40, 16, seed=8), sample(40, 16, seed=9)).rerank(Similarity(*PAIRS))
    ),
}


@pytest.mark.parametrize("name", UNSUSPICIOUS)
def test_right_data_is_taken_without_a_word(name):
    assert not said(UNSUSPICIOUS[name])


def test_one_matrix_for_two_models_is_noticed(tmp_path, capsys):
    for name in ("base.npy", "ours.npy"):
        np.save(tmp_path / name, COSINES.numpy())
    paths = [str(tmp_path / name) for name in ("base.npy", "ours.npy")]
    assert main(["compare", *paths, "--samples", "50"]) == 0
    assert "ours: it has the same ranks as base" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------
# Tensors without a device


@pytest.fixture
def other_device() -> Iterator[None]:
    """A default device on which nothing lies: each tensor that is made there is an error."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


MEMORY = itrloss.CoupledMemory(20, D)
MEMORY.enqueue(IMAGES, TEXTS)
GATE = itrloss.DynamicGate(D, 3)
MEANS = itrloss.OnlineKMeans(4, D)
MEANS.update(IMAGES)
NETWORKS = nn.Linear(D, D), nn.Linear(D, D)
ENCODER = itrloss.MomentumEncoder(NETWORKS[0])
BATCHES = metrics.RetrievalMetrics()
RESULTS = metrics.retrieval_results(SIM)
CLASSIFIER = itrloss.PrototypeClassificationLoss(D, 4)
OBJECTIVE = itrloss.CODERObjective(D, 3)
LOSS_WITH_MEMORY = itrloss.UnifiedTrainingObjective()
BANKS = sample(9, D, seed=31), sample(9, D, seed=32)
JUDGED = metrics.Judgements(torch.arange(6), torch.arange(6), torch.arange(6.0) % 3 + 1)
CODE_BASE = settings(margin=2.0, num_embeds=3, mmd_weight=0.1, div_weight=0.1)


def updated() -> Any:
    BATCHES.reset()
    BATCHES.update(IMAGES, TEXTS, range(12), range(12))
    return BATCHES.compute()


PLACED: dict[str, Callable[[], Any]] = {
    "a memory's first dimensions": lambda: MEMORY.first_dimensions(4),
    "USER's queues": lambda: compat.adapt(LOSS_WITH_MEMORY, "user").moco_forward(
        IMAGES, TEXTS, TEXTS, IMAGES, BANKS[0].T, BANKS[1].T
    ),
    "HAL without a bank": lambda: compat.adapt(LOSS_WITH_MEMORY, "hal")(IMAGES, TEXTS),
    "HAL's bank": lambda: compat.adapt(LOSS_WITH_MEMORY, "hal")(
        IMAGES, TEXTS, *BANKS, range(20, 29), range(12)
    ),
    "enqueue": lambda: MEMORY.enqueue(IMAGES, TEXTS),
    "a gate": lambda: GATE(REGIONS[0], torch.ones(6, 5, device="cpu")),
    "k-means": lambda: (MEANS.update(IMAGES), MEANS.fit(IMAGES), MEANS.predict(TEXTS)),
    "momentum": lambda: ENCODER.update(NETWORKS[0]),
    "gradient cache": lambda: itrloss.grad_cache_step(
        itrloss.InfoNCELoss(), NETWORKS, [IMAGES, TEXTS], 5
    ),
    "batches": updated,
    "prototypes": lambda: CLASSIFIER(IMAGES, TEXTS, [0] * 12),
    "CODER": lambda: OBJECTIVE(IMAGES, TEXTS, IMAGES, TEXTS, MEMORY, IMAGES, TEXTS)[0],
    "judgements": lambda: metrics.retrieval_metrics(SIM, relevant=JUDGED),
    "candidates": lambda: metrics.retrieval_metrics(
        IMAGES @ TEXTS.T, range(12), range(12), candidates=[list(range(12))] * 12
    ),
    "a sparse matrix": lambda: metrics.retrieval_metrics(SIM, relevant=torch.eye(12, device="cpu")),
    "banks": lambda: rerank.DualBankNorm().fit(*BANKS).rerank(SIM),
    "calibration": lambda: rerank.FastReranker().calibrate(SIM, scales=(5, 20)),
    "own negatives": lambda: itrloss.InfoNCELoss(image_image=True)(
        IMAGES, TEXTS, range(12), range(12), negatives=SETS, negative_ids=[[1, 2, 3]] * 12
    ),
    "PVSE": lambda: compat.PVSELoss(CODE_BASE)(SETS, SETS, SETS, SETS),
    "mining": lambda: itrloss.mine_hard_negatives(IMAGES, TEXTS, range(12), range(12), 3),
    "checks of a loss": lambda: itrloss.testing.check_loss(
        itrloss.InfoNCELoss(), only=["gradcheck", "order_of_pairs", "float32_error"]
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_default_device_does_not_matter_there_either(name, other_device):
    import itrloss.testing  # noqa: F401

    PLACED[name]()


# ------------------------------------------------------------------------------------------------
# Narrow input


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two)
    if isinstance(one, (tuple, list)):
        return all(map(same, one, two))
    return one == two


def scored(**options: Any) -> Any:
    return metrics.retrieval_metrics((IMAGES @ TEXTS.T).tanh(), **options)


def twice(x: Any) -> tuple[Any, Any]:
    return x, x


SPARSE = (sample(12, 12, seed=4) > 0.5).numpy()


def scipy_matrix(kind: str) -> Any:
    sparse = pytest.importorskip("scipy.sparse")
    return getattr(sparse, kind)(SPARSE.astype(float))


def frame(x: Any) -> Any:
    return pytest.importorskip("pandas").DataFrame(x)


WIDER: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "hardness from a list": (
        lambda: itrloss.InfoNCELoss(hardness=[0, 5])(IMAGES, TEXTS),  # type: ignore[arg-type]
        lambda: itrloss.InfoNCELoss(hardness=(0.0, 5.0))(IMAGES, TEXTS),
    ),
    "hardness of float16": (
        lambda: itrloss.InfoNCELoss(hardness=np.float16(9))(IMAGES, TEXTS),
        lambda: itrloss.InfoNCELoss(hardness=9.0)(IMAGES, TEXTS),
    ),
    "a fraction as temperature": (
        lambda: itrloss.SupConLoss(Fraction(1, 8))(IMAGES, TEXTS),  # type: ignore[arg-type]
        lambda: itrloss.SupConLoss(0.125)(IMAGES, TEXTS),
    ),
    "scales from an array": (
        lambda: rerank.FastReranker(np.array([9, 8]), [8, 17]).topk(SIM, 3),  # type: ignore
        lambda: rerank.FastReranker((9, 8), (8, 17)).topk(SIM, 3),
    ),
    "a budget from NumPy": (
        lambda: Similarity(IMAGES, TEXTS, memory_budget=np.int64(0)).logsumexp(3.0),  # type: ignore
        lambda: Similarity(IMAGES, TEXTS, memory_budget=0).logsumexp(3.0),
    ),
    "biases from NumPy": (
        lambda: Similarity(IMAGES, TEXTS, bias=[np.ones(12), None]).scores(),  # type: ignore
        lambda: Similarity(IMAGES, TEXTS, bias=(torch.ones(12), None)).scores(),
    ),
    "K from an array": (
        lambda: scored(ks=np.array([1, 3])),
        lambda: scored(ks=(1, 3)),
    ),
    "weights from a tensor": (
        lambda: itrloss.Matryoshka(itrloss.InfoNCELoss(), (4, 8), torch.tensor([1.0, 2.0]))(
            IMAGES, TEXTS
        ),
        lambda: itrloss.Matryoshka(itrloss.InfoNCELoss(), (4, 8), (1, 2))(IMAGES, TEXTS),
    ),
    "a table of pandas": (
        lambda: metrics.retrieval_metrics(frame(COSINES.numpy())),
        lambda: metrics.retrieval_metrics(COSINES),
    ),
    "a list of two matrices": (
        lambda: metrics.retrieval_metrics([COSINES, COSINES]),  # type: ignore[arg-type]
        lambda: metrics.retrieval_metrics((COSINES, COSINES)),
    ),
    "byte strings, as of HDF5": (
        lambda: itrloss.InfoNCELoss()(IMAGES, TEXTS, *twice(np.array([b"x", b"y", b"z"] * 4))),
        lambda: itrloss.InfoNCELoss()(IMAGES, TEXTS, *twice(["x", "y", "z"] * 4)),
    ),
    "right pairs from SciPy": (
        lambda: scored(relevant=scipy_matrix("csr_array")),
        lambda: scored(relevant=torch.from_numpy(SPARSE).double()),
    ),
    "excluded pairs from SciPy": (
        lambda: scored(exclude=scipy_matrix("coo_matrix")),
        lambda: scored(exclude=SPARSE),
    ),
    "excluded pairs as integers": (
        lambda: scored(exclude=SPARSE.astype(int)),
        lambda: scored(exclude=SPARSE),
    ),
    "right texts in lists": (
        lambda: scored(relevant=[[i, (i + 1) % 12] for i in range(12)]),
        lambda: scored(relevant=torch.eye(12) + torch.eye(12).roll(1, 1)),
    ),
    "judgements in lists": (
        lambda: metrics.Judgements([0, 1], [1, 0], [0.5, 1.0]).at_least(0.7),  # type: ignore
        lambda: metrics.Judgements(
            *torch.tensor([[0, 1], [1, 0]]), torch.tensor([0.5, 1.0])
        ).at_least(0.7),
    ),
    "a mask in lists": (
        lambda: functional.set_similarity(SETS, SETS, image_mask=[[1, 1, 0]] * 12),  # type: ignore
        lambda: functional.set_similarity(SETS, SETS, image_lengths=torch.full((12,), 2)),
    ),
    "sets from NumPy": (
        lambda: functional.set_similarity(SETS.numpy(), SETS.numpy()),  # type: ignore[arg-type]
        lambda: functional.set_similarity(SETS, SETS),
    ),
    "limits from NumPy": (
        lambda: itrloss.mine_hard_negatives(
            IMAGES,
            TEXTS,
            range(12),
            range(12),
            3,
            below=np.full(12, 0.3),  # type: ignore
        ),
        lambda: itrloss.mine_hard_negatives(IMAGES, TEXTS, range(12), range(12), 3, below=0.3),
    ),
    "a guide from NumPy": (
        lambda: itrloss.InfoNCELoss(margin=0.1)(IMAGES, TEXTS, guide=(SETS[:, 0].numpy(),) * 2),  # type: ignore
        lambda: itrloss.InfoNCELoss(margin=0.1)(IMAGES, TEXTS, guide=(SETS[:, 0],) * 2),
    ),
    "a teacher from NumPy": (
        lambda: itrloss.DistillationLoss()(IMAGES, TEXTS, SETS[:, 0, :].numpy() @ np.eye(8, 12)),
        lambda: itrloss.DistillationLoss()(
            IMAGES, TEXTS, SETS[:, 0, :].double() @ torch.eye(8, 12).double()
        ),
    ),
    "settings in a dictionary": (
        lambda: compat.HALLoss(vars(settings()))(IMAGES, TEXTS),
        lambda: compat.HALLoss(settings())(IMAGES, TEXTS),
    ),
    "logits in a column": (
        lambda: rerank.TwoStageReranker(lambda i, t: (i * t % 5.0)[:, None], k=3).topk(SIM, 3),
        lambda: rerank.TwoStageReranker(lambda i, t: i * t % 5.0, k=3).topk(SIM, 3),
    ),
    "logits from NumPy": (
        lambda: rerank.TwoStageReranker(lambda i, t: (i * t % 5.0).numpy(), k=3).topk(SIM, 3),  # type: ignore
        lambda: rerank.TwoStageReranker(lambda i, t: i * t % 5.0, k=3).topk(SIM, 3),
    ),
}


@pytest.mark.parametrize("name", WIDER)
def test_input_may_have_a_further_form(name):
    given, plain = WIDER[name]
    assert same(given(), plain())


def test_arrays_go_where_nothing_is_trained():
    memories = [itrloss.CoupledMemory(20, D) for _ in range(2)]
    memories[0].enqueue(IMAGES.numpy(), TEXTS.numpy())  # type: ignore[arg-type]
    memories[1].enqueue(IMAGES, TEXTS)
    assert torch.equal(memories[0].images, memories[1].images)
    means = [itrloss.OnlineKMeans(3, D) for _ in range(2)]
    assert torch.equal(means[0].fit(IMAGES.numpy()), means[1].fit(IMAGES))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------
# Checked at construction only

SET_LATER: dict[str, tuple[Callable[[], Any], str, Any]] = {
    "a scale of a re-ranker": (rerank.InvertedSoftmax, "scale", -5.0),
    "scales of Fast": (rerank.FastReranker, "i2t", (0.0, 25.0)),
    "k of CSLS": (rerank.CSLS, "k", 0),
    "a weight of k-reciprocal": (rerank.KReciprocalReranker, "weight", 2.0),
    "steps of Sinkhorn": (rerank.Sinkhorn, "iterations", 1.5),
    "patience of k-means": (lambda: itrloss.OnlineKMeans(3, D), "patience", -1),
    "an engine of k-means": (lambda: itrloss.OnlineKMeans(3, D), "engine", "fast"),
    "a count of k-means": (lambda: itrloss.OnlineKMeans(3, D), "max_count", 0),
    "a margin of VSE++": (compat.VSEPPLoss, "margin", "0.2"),
    "a scale of HAL": (lambda: compat.HALLoss(settings()), "scale", -30.0),
    "k of HAL": (lambda: compat.HALLoss(settings()), "k", 0),
    "a margin of USER": (lambda: compat.USERLoss(settings()), "margin", None),
    "telemetry": (itrloss.InfoNCELoss, "telemetry", "all"),
}


@pytest.mark.parametrize("name", SET_LATER)
def test_an_option_that_is_set_later_is_checked(name):
    make, option, value = SET_LATER[name]
    module = make()
    before = getattr(module, option)
    with pytest.raises((TypeError, ValueError), match=option):
        setattr(module, option, value)
    assert getattr(module, option) == before


@pytest.mark.parametrize("option", ["size", "dim"])
def test_a_memory_keeps_its_size(option):
    with pytest.raises(AttributeError, match=f"{option}: cannot be changed"):
        setattr(itrloss.CoupledMemory(4, 3), option, 9)


def with_reduction(module: Any, part: str, reduction: str) -> Any:
    for name in filter(None, part.split(".")):
        inner = getattr(module, name)
        if name == part.split(".")[-1]:
            inner.reduction = reduction
    return module


COMPOSED: dict[str, tuple[str, str, Callable[[], Any], Callable[[Any], Any]]] = {
    "DVSE": (
        "variance_aware",
        "sum",
        itrloss.DVSEObjective,
        lambda loss: loss(SETS, TEXTS, SETS),
    ),
    "DVSE's orthogonal part": (
        "orthogonal",
        "none",
        itrloss.DVSEObjective,
        lambda loss: loss(SETS, TEXTS, SETS),
    ),
    "CODER": (
        "concept",
        "none",
        lambda: itrloss.CODERObjective(D, 3),
        lambda loss: loss(IMAGES, TEXTS, IMAGES, TEXTS, MEMORY, IMAGES, TEXTS),
    ),
    "a code base's criterion": (
        "loss",
        "none",
        lambda: compat.adapt(itrloss.TripletLoss(), "vsepp"),
        lambda loss: loss(IMAGES, TEXTS),
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_a_part_of_a_total_may_not_be_given_another_reduction(name):
    part, reduction, make, call = COMPOSED[name]
    with pytest.raises(ValueError, match="reduction"):
        call(with_reduction(make(), part, reduction))


def test_telemetry_may_be_switched_on_and_off_later():
    loss = itrloss.InfoNCELoss()
    loss(IMAGES, TEXTS)
    assert loss.telemetry == {}
    loss.telemetry = True
    loss(IMAGES, TEXTS)
    assert "positive" in loss.telemetry
    loss.telemetry = False
    loss(IMAGES, TEXTS)
    assert loss.telemetry == {}


@pytest.mark.parametrize("option", [{"ties": "worst"}, {"folds": 0}, {"reranker": rerank.CSLS}])
def test_options_of_a_metric_are_checked_before_the_last_batch(option):
    with pytest.raises((TypeError, ValueError), match=next(iter(option))):
        metrics.RetrievalMetrics(**option)


# ------------------------------------------------------------------------------------------------
# Small parts fail though the whole is fine


def test_a_batch_without_images_is_no_first_batch_of_a_gate():
    gates = [itrloss.DynamicGate(D, 3) for _ in range(2)]
    gates[1].load_state_dict(gates[0].state_dict())
    gates[0](sample(0, 5, D))
    gates[0](torch.full((2, 5, D), math.nan))
    for gate in gates:
        gate(REGIONS[0])
    assert torch.equal(gates[0].centre, gates[1].centre)


def test_a_memory_takes_no_keys():
    memory = itrloss.CoupledMemory(9, D)
    memory.enqueue(IMAGES[:4], TEXTS[:4], range(4))
    memory.enqueue(IMAGES[:0], TEXTS[:0], [])
    memory.enqueue(IMAGES[4:5], TEXTS[4:5], [7])
    assert len(memory) == 5


def test_clusters_of_no_points():
    means = itrloss.OnlineKMeans(3, D)
    assert means.update(IMAGES[:0]).shape == (0,)
    means.update(IMAGES)
    before = means.centroids.clone()
    assert means.update(IMAGES[:0]).shape == means.predict(IMAGES[:0]).shape == (0,)
    assert torch.equal(means.centroids, before)


def test_batches_without_a_match_or_without_rows_belong_to_the_whole():
    metric = metrics.RetrievalMetrics()
    assert metric(IMAGES[:6], TEXTS[:6], range(6), range(6)) is not None
    assert metric(IMAGES[6:7], TEXTS[7:8], [6], [7]) is None
    assert metric(IMAGES[:0], TEXTS[:0], [], []) is None
    metric.update(IMAGES[7:8], TEXTS[6:7], [7], [6])
    wanted = metrics.retrieval_metrics(Similarity(IMAGES[:8], TEXTS[:8]))
    assert float(metric.compute()["rsum"]) == pytest.approx(wanted["rsum"])


@pytest.mark.parametrize("size", [9, 13, 12, 4])
def test_a_last_chunk_of_one_row_goes_through_batch_norm(size):
    encoders = [nn.Sequential(nn.Linear(D, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    inputs = [sample(size, D), sample(size, D, seed=1)]
    value = itrloss.grad_cache_step(itrloss.InfoNCELoss(), encoders, inputs, 4)
    assert value.isfinite()


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_a_scorer_may_squeeze_its_last_batch(batch_size):
    def scorer(images, texts):
        logits = (images * 7 + texts).double()[:, None] % 5
        return logits.squeeze()

    found = rerank.TwoStageReranker(scorer, k=5, batch_size=batch_size).topk(SIM, 5)
    whole = rerank.TwoStageReranker(scorer, k=5).topk(SIM, 5)
    assert same(tuple(found.i2t), tuple(whole.i2t))


ONE_PAIR: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "HAL's bank of one": lambda v, w: compat.HALLoss(settings())(v, w, v, w, [1], [0]),
    "a bank without others": lambda v, w: compat.HALLoss(settings())(v, w, v, w, [0], [0]),
    "PVSE": lambda v, w: compat.PVSELoss(settings(mmd_weight=0.1, div_weight=0.1))(
        *[torch.stack([x, x.flip(1)], 1) for x in (v, w, v, w)]
    )[0],
    "prototypes": lambda v, w: itrloss.PrototypeClassificationLoss(D, 1)(v, w, [0]),
    "heads": lambda v, w: itrloss.VarianceAwareLoss(telemetry=True)(v[:, None], w),
    "tokens": lambda v, w: itrloss.InfoNCELoss(telemetry=True)(
        scores=functional.set_similarity(v[:, None], w[:, None], "max_sum")
    ),
    "distributions": lambda v, w: itrloss.PCMEPlusPlusLoss(telemetry=True)(v, w, v, w),
    "an empty memory": lambda v, w: itrloss.UnifiedTrainingObjective(telemetry=True)(
        v, w, v.detach(), w.detach(), itrloss.CoupledMemory(3, D)
    ),
    "no negative that exists": lambda v, w: itrloss.InfoNCELoss()(
        v, w, [0], [0], negatives=v[:, None], negative_ids=[[itrloss.NO_ID]]
    ),
    "one dimension": lambda v, w: itrloss.Matryoshka(itrloss.InfoNCELoss(), (1,))(v, w),
}


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
@pytest.mark.parametrize("name", ONE_PAIR)
def test_one_pair_has_a_finite_loss_and_gradient(name):
    v, w = (x[:1].clone().requires_grad_() for x in (IMAGES, TEXTS))
    value = ONE_PAIR[name](v, w)
    value.backward()
    assert value.isfinite()
    assert all(x.grad is None or bool(x.grad.isfinite().all()) for x in (v, w))


# ------------------------------------------------------------------------------------------------
# Saved tensors are read twice

LABELS = torch.arange(12) // 2
WIDE = [x.double() for x in (IMAGES, TEXTS, SETS)]
LARGE_MEMORY = itrloss.CoupledMemory(9, D, dtype=torch.float64)
LARGE_MEMORY.enqueue(WIDE[0][:9], WIDE[1][:9], LABELS[:9])


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


def of_sets(x: Tensor) -> Tensor:
    return x[:, None] + WIDE[2]


SAVED: dict[str, Callable[[str, Tensor, Tensor], Tensor]] = {
    "M-DCL": lambda engine, v, w: itrloss.MemoryDiversityContrastiveLoss(engine=engine)(
        v, w, WIDE[0], WIDE[1], LARGE_MEMORY, LABELS, LABELS
    ),
    "UTO": lambda engine, v, w: itrloss.UnifiedTrainingObjective(engine=engine)(
        v, w, WIDE[0], WIDE[1], LARGE_MEMORY, LABELS, LABELS
    ),
    "late interaction": lambda engine, v, w: itrloss.InfoNCELoss(engine=engine)(
        scores=functional.set_similarity(of_sets(v), of_sets(w), "smooth_max_sum", 3.0)
    ),
    "heads": lambda engine, v, w: itrloss.VarianceAwareLoss(engine=engine)(
        of_sets(v), w, LABELS, LABELS
    ),
    "PCME++": lambda engine, v, w: itrloss.PCMEPlusPlusLoss(learnable=False, engine=engine)(
        v, w, v / 10, w / 10, LABELS, LABELS
    ),
    "Matryoshka": lambda engine, v, w: itrloss.Matryoshka(
        itrloss.InfoNCELoss(engine=engine), (4, 8)
    )(v, w, LABELS, LABELS),
    "further negatives": lambda engine, v, w: itrloss.InfoNCELoss(engine=engine, hardness=3.0)(
        v, w, LABELS, LABELS, negatives=v.flip(0) * w
    ),
    "a guide": lambda engine, v, w: itrloss.InfoNCELoss(engine=engine, margin=0.1)(
        v, w, LABELS, LABELS, guide=(WIDE[1], WIDE[0])
    ),
    "one denominator": lambda engine, v, w: itrloss.InfoNCELoss(
        engine=engine, joint=True, image_image=True, text_text=True
    )(v, w, LABELS, LABELS),
    "a teacher": lambda engine, v, w: itrloss.DistillationLoss(engine=engine)(
        v, w, Similarity(WIDE[1], WIDE[0])
    ),
    "biases": lambda engine, v, w: itrloss.TripletLoss()(
        Similarity(v, w, LABELS, LABELS, bias=(v.sum(1), w.sum(1)), engine=engine)  # type: ignore
    ),
    "a term of a user": lambda engine, v, w: Wave(engine=engine)(v, w, LABELS, LABELS),
    "a code base": lambda engine, v, w: compat.VSEPPLoss(2)(v, w),
}


def gradients(function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    v, w = (x.clone().requires_grad_() for x in WIDE[:2])
    value = function(v, w)
    value.backward()
    assert v.grad is not None and w.grad is not None
    return [value.detach(), v.grad, w.grad]


class ReadOnce:
    """Hooks that refuse to give a saved tensor back a second time."""

    def __init__(self):
        self.read: set[int] = set()
        self.count = 0

    def pack(self, x: Tensor) -> tuple[int, Tensor]:
        self.count += 1
        return self.count, x

    def unpack(self, packed: tuple[int, Tensor]) -> Tensor:
        number, x = packed
        assert number not in self.read, "a saved tensor is read twice"
        self.read.add(number)
        return x


@pytest.mark.parametrize("engine", TESTED)
@pytest.mark.parametrize("name", SAVED)
def test_saved_tensors_are_read_once(name, engine):
    def plain(v, w):
        return SAVED[name](engine, v, w)

    def read_once(v, w):
        hooks = ReadOnce()
        with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            return plain(v, w)

    def offloaded(v, w):
        with torch.autograd.graph.save_on_cpu():
            return plain(v, w)

    wanted = gradients(plain)
    for run in (
        read_once,
        offloaded,
        lambda v, w: checkpoint(plain, v, w, use_reentrant=False),
        lambda v, w: checkpoint(plain, v, w, use_reentrant=False, early_stop=False),
    ):
        for found, exact in zip(gradients(run), wanted, strict=True):
            torch.testing.assert_close(found, exact)


FIRST_CALLS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor, Tensor], Tensor]]] = {
    "a learnt scale of given scores": (
        lambda: itrloss.InfoNCELoss(learnable=True).double(),
        lambda loss, v, w: loss(scores=v @ w.T),
    ),
    "SigLIP": (lambda: itrloss.SigmoidLoss().double(), lambda loss, v, w: loss(v, w)),
    "inner products": (
        lambda: itrloss.InfoNCELoss(normalize=False),
        lambda loss, v, w: loss(v, w),
    ),
    "further negatives": (
        itrloss.InfoNCELoss,
        lambda loss, v, w: loss(v, w, negatives=v.flip(0) * w),
    ),
    "a teacher": (
        itrloss.DistillationLoss,
        lambda loss, v, w: loss(v, w, WIDE[0] @ WIDE[1].T),
    ),
    "heads": (
        itrloss.VarianceAwareLoss,
        lambda loss, v, w: loss(of_sets(v), w),
    ),
    "a code base": (lambda: compat.VSEPPLoss(0.2), lambda loss, v, w: loss(v, w)),
}


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
@pytest.mark.parametrize("name", FIRST_CALLS)
def test_a_look_at_the_first_batch_saves_no_tensors(name):
    """The second pass of a checkpoint does not look again, and has to save as many."""
    make, call = FIRST_CALLS[name]
    plain, checked = make(), make()
    wanted = gradients(lambda v, w: call(plain, v, w))
    found = gradients(
        lambda v, w: checkpoint(lambda x, y: call(checked, x, y), v, w, use_reentrant=False)
    )
    for one, two in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, two)


# ------------------------------------------------------------------------------------------------
# What must agree between processes is not compared


def own(rank: int, seed: int = 0, rows: int = 4) -> Tensor:
    return sample(rows, 5, seed=10 * rank + seed).requires_grad_()


def filled(module: Any, name: str, value: float) -> Any:
    with torch.no_grad():
        getattr(module, name).fill_(value)
    return module


def seeded(rank: int, make: Callable[[], Any]) -> Any:
    torch.manual_seed(rank)
    return make()


def evaluated_objective(rank: int) -> Any:
    torch.manual_seed(0)
    objective = itrloss.CODERObjective(5, 3, gather=True).eval()
    if rank == 1:  # as if one process had loaded a checkpoint
        other = itrloss.CODERObjective(5, 3)
        other.prototypes.fit(own(0).detach())
        objective.prototypes.load_state_dict(other.prototypes.state_dict())
    keys = [own(rank, 5).detach(), own(rank, 6).detach()]
    memory = itrloss.CoupledMemory(9, 5)
    return objective(own(rank), own(rank, 1), *keys, memory, own(rank, 2), own(rank, 3))


def clustered(rank: int) -> Any:
    means = itrloss.OnlineKMeans(3, 5)
    if rank == 1:
        means.fit(own(0, rows=6).detach())
    return means.update(own(rank).detach())


def enqueued(rank: int) -> Any:
    memory = itrloss.CoupledMemory(9, 5)
    if rank == 1:
        memory.enqueue_alone(own(0).detach(), own(1).detach())
    return memory.enqueue(own(rank).detach(), own(rank, 1).detach())


def batches_of(rank: int, **options: Any) -> Any:
    metric = metrics.RetrievalMetrics(**options)
    metric.update(own(rank).detach(), own(rank, 1).detach())
    return metric.compute()


def metric_with_ids_in_one(rank: int) -> Any:
    metric = metrics.RetrievalMetrics()
    ids: Any = ([0, 1, 2, 3],) * 2 if rank else ()
    metric.update(own(rank).detach(), own(rank, 1).detach(), *ids)
    return metric.compute()


def metric_without_batches(rank: int) -> Any:
    metric = metrics.RetrievalMetrics()
    if rank:
        metric.update(own(rank).detach(), own(rank, 1).detach())
    return metric.compute()


def ranked(rank: int, **options: Any) -> Any:
    sim = Similarity(own(rank).detach(), own(rank, 1).detach())
    return metrics.retrieval_metrics(sim, gather=True, **options)


def under_autocast(rank: int) -> Any:
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 1):
        return itrloss.InfoNCELoss(gather=True)(own(rank), own(rank, 1))


HEADS_OF = lambda rank: sample(4, 3, 5, seed=rank)  # noqa: E731
NAMES = list("abcd")
DIFFERENT: dict[str, Callable[[int], Any]] = {
    "a learnt temperature": lambda rank: filled(
        itrloss.InfoNCELoss(learnable=True, gather=True), "log_scale", 3.0 + rank
    )(own(rank), own(rank, 1)),
    "a learnt bias": lambda rank: filled(itrloss.SigmoidLoss(gather=True), "bias", -5.0 - rank)(
        own(rank), own(rank, 1)
    ),
    "a learnt scale of distances": lambda rank: filled(
        itrloss.PCMEPlusPlusLoss(gather=True), "scale", 5.0 + rank
    )(own(rank), own(rank, 1), own(rank, 2), own(rank, 3)),
    "a classifier": lambda rank: seeded(
        rank, lambda: itrloss.PrototypeClassificationLoss(5, 4, gather=True)
    )(own(rank), own(rank, 1), torch.zeros(4, dtype=torch.int64)),
    "a gate of one": lambda rank: itrloss.DynamicOrthogonalLoss(0.0, gather=True)(
        HEADS_OF(rank), torch.ones(4, 3) if rank else None
    ),
    "a random projection": lambda rank: seeded(rank, lambda: itrloss.DynamicGate(5, 3))(
        HEADS_OF(rank)
    ),
    "prototypes of one": evaluated_objective,
    "centroids": clustered,
    "entries of a memory": enqueued,
    "ids of a metric": metric_with_ids_in_one,
    "options of a metric": lambda rank: batches_of(rank, normalize=rank == 1),
    "a re-ranker of a metric": lambda rank: batches_of(
        rank, reranker=rerank.CSLS() if rank else None
    ),
    "a metric without batches": metric_without_batches,
    "ids of a ranking": lambda rank: ranked(
        rank, **({"image_ids": NAMES, "text_ids": NAMES} if rank else {})
    ),
    "a wrong k": lambda rank: ranked(rank, hubness_k=rank),
    "folds": lambda rank: ranked(rank, folds=1 + rank),
    "a scale of open_clip": lambda rank: compat.ClipLoss(world_size=2)(
        own(rank), own(rank, 1), torch.tensor(10.0 + rank)
    ),
    "a bias of open_clip": lambda rank: compat.SigLipLoss(world_size=2)(
        own(rank), own(rank, 1), torch.tensor(10.0), torch.tensor(-10.0) if rank else None
    ),
    "ids that are names": lambda rank: itrloss.InfoNCELoss(gather=True)(
        own(rank), own(rank, 1), *twice(NAMES if rank else list(range(4)))
    ),
    "autocast": under_autocast,
}


def counted_alone(rank: int) -> list[float]:
    """One process calls the loss once more by itself; the check of the 50th call is for both."""
    loss = itrloss.TripletLoss(gather=True)
    if rank == 1:
        loss.gather = False
        loss(own(rank), own(rank, 1))
        loss.gather = True
    return [float(loss(own(rank), own(rank, 1))) for _ in range(51)]


def differing(rank: int) -> dict[str, str]:
    found = {}
    for name, function in DIFFERENT.items():
        try:
            function(rank)
            found[name] = "nothing was said"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["calls of one process"] = str(counted_alone(rank)[-1])
    # the processes still do the same
    found["last"] = str(
        float(dist.get_world_size()) + float(itrloss.InfoNCELoss(gather=True)(own(0), own(1)))
    )
    return found


@pytest.fixture(scope="module")
def disagreeing(tmp_path_factory) -> list[dict[str, str]]:
    return both(differing, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", DIFFERENT)
def test_processes_that_differ_all_raise_an_error(name, disagreeing):
    for found in disagreeing:
        assert found[name].startswith(("ValueError", "TypeError")), found[name]


def test_processes_check_for_a_collapse_in_the_same_call(disagreeing):
    first, second = (found["calls of one process"] for found in disagreeing)
    assert first == second and math.isfinite(float(first))
    assert disagreeing[0]["last"] == disagreeing[1]["last"]


# ------------------------------------------------------------------------------------------------
# The declared minimum is not run


def declared(name: str) -> str:
    """The minimum version of a requirement in pyproject.toml."""
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    (line,) = [x for x in text.splitlines() if x.strip().startswith(f'"{name}>=')][:1]
    return line.split(">=")[1].split('"')[0].split(",")[0]


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path, ast.parse(path.read_text(), feature_version=(3, 10))


def dotted(node: ast.AST) -> str | None:
    """Return the name that an attribute of a module is read by; None for other expressions."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def test_the_source_is_python_3_10():
    assert len(list(parsed())) > 50  # a SyntaxError otherwise


def words(text: str) -> set[str]:
    return set(text.split())


# Everything of PyTorch that the source reads by name; all of it is in PyTorch 2.8. Look there
# before you add a name: what is newer goes to LATER, with what the source takes without it.
IN_TORCH = words(
    """
    F.embedding_bag F.normalize F.pad F.softplus dist.ReduceOp.MAX dist.all_gather_into_tensor
    dist.all_gather_object dist.all_reduce dist.barrier dist.destroy_process_group
    dist.distributed_c10d._get_default_store dist.get_backend_config dist.get_process_group_ranks
    dist.get_rank dist.get_world_size dist.init_process_group dist.is_available dist.is_initialized
    dist.reduce_scatter_tensor nn.Module nn.Parameter nn.functional.normalize torch.Generator
    torch.OutOfMemoryError torch.Tensor torch._C._len_torch_dispatch_stack torch.__version__
    torch._dynamo.graph_break torch._subclasses.FakeTensor torch.accelerator.current_accelerator
    torch.add torch.addcmul torch.addmm torch.allclose torch.amax torch.amp.is_autocast_available
    torch.arange torch.as_tensor torch.autocast torch.autograd.Function torch.autograd.backward
    torch.autograd.grad torch.autograd.gradcheck torch.autograd.graph.saved_tensors_hooks
    torch.backends.cpu.get_cpu_capability torch.backends.cuda.matmul torch.backends.mkldnn.enabled
    torch.backends.mkldnn.is_available torch.backends.mps.is_available torch.bfloat16
    torch.bincount torch.bool torch.cat torch.cdist torch.clear_autocast_cache torch.compile
    torch.compiler.is_compiling torch.compiler.reset torch.contiguous_format torch.cuda.device_of
    torch.cuda.get_device_capability torch.cuda.get_device_properties torch.cuda.get_rng_state_all
    torch.cuda.is_available torch.cuda.is_current_stream_capturing torch.cuda.is_initialized
    torch.cuda.set_rng_state_all torch.device torch.distributed.get_rank
    torch.distributed.tensor.DTensor torch.distributed.tensor.distribute_tensor torch.div
    torch.dtype torch.einsum torch.empty torch.empty_like torch.enable_grad torch.equal torch.exp
    torch.exp_ torch.eye torch.finfo torch.float16 torch.float32 torch.float64 torch.from_numpy
    torch.frombuffer torch.full torch.full_like torch.func.functional_call torch.ge
    torch.get_autocast_dtype torch.get_default_device torch.get_default_dtype torch.get_rng_state
    torch.gt torch.iinfo torch.inf torch.inference_mode torch.int16 torch.int32 torch.int64
    torch.int8 torch.is_autocast_enabled torch.is_grad_enabled torch.is_inference_mode_enabled
    torch.isclose torch.isin torch.lerp torch.linalg.qr torch.linalg.vector_norm torch.linspace
    torch.load torch.logaddexp torch.matmul torch.maximum torch.mean torch.minimum torch.mm
    torch.mps.get_rng_state torch.mps.set_rng_state torch.multiprocessing.spawn.spawn torch.mv
    torch.nan torch.ne torch.nn.Module torch.nn.functional.normalize torch.nn.functional.pad
    torch.nn.utils.rnn.pad_sequence torch.no_grad torch.ones torch.ones_like
    torch.ops.mkldnn._linear_pointwise.default torch.optim.Adam torch.optim.Optimizer
    torch.optim.SGD torch.promote_types torch.rand torch.randint torch.randn torch.randperm
    torch.repeat_interleave torch.save torch.searchsorted torch.set_default_dtype
    torch.set_grad_enabled torch.set_num_threads torch.set_rng_state torch.sigmoid_ torch.sort
    torch.sparse_coo torch.sparse_coo_tensor torch.special.log_ndtr torch.stack torch.strided
    torch.sub torch.sum
    torch.take_along_dim torch.tensor torch.tensordot torch.testing.assert_close torch.threshold
    torch.triu_indices torch.uint64 torch.uint8 torch.unique torch.utils._pytree.tree_flatten
    torch.utils._pytree.tree_leaves torch.utils._pytree.tree_map torch.utils._pytree.tree_map_only
    torch.utils._pytree.tree_unflatten torch.var_mean torch.version.hip torch.where torch.zeros
    torch.zeros_like
    """
)
LATER = {
    "dist.all_gather_single": "dist.all_gather_into_tensor",
    "dist.reduce_scatter_single": "dist.reduce_scatter_tensor",
}
# Names of later versions than the declared minimum of Python and of NumPy.
NOT_IN_PYTHON = words(
    """
    itertools.batched datetime.UTC contextlib.chdir typing.Self typing.override typing.assert_never
    typing.Never typing.Unpack typing.TypeVarTuple enum.StrEnum asyncio.TaskGroup math.sumprod
    operator.call pathlib.Path.walk
    """
)
NOT_IN_NUMPY = words(
    """
    np.bool np.long np.ulong np.astype np.concat np.permute_dims np.isdtype np.unique_values
    np.matrix_transpose np.vecdot np.strings np.trapezoid np.cumulative_sum np.exceptions
    np.unstack np.pow np.acos np.bitwise_count
    """
)


def read_names(tree: ast.Module) -> set[str]:
    """Return the names of modules' attributes that a module reads or imports, the longest alone."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(dotted(node) or "")
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {x for x in names if not any(y.startswith(f"{x}.") for y in names)}


def test_the_declared_minimum_is_the_one_looked_at():
    assert declared("torch") == "2.8" and declared("numpy") == "1.24"


def test_nothing_newer_than_the_declared_torch_is_read():
    for path, tree in parsed():
        torch_names = {
            x for x in read_names(tree) if x.split(".")[0] in ("torch", "F", "dist", "nn")
        }
        leaves = {
            x
            for x in torch_names - LATER.keys()
            if not any(y.startswith(f"{x}.") for y in IN_TORCH)
        }
        assert leaves <= IN_TORCH, path
        for name in torch_names & LATER.keys():
            attribute = name.rpartition(".")[2]
            text = path.read_text()
            assert f'hasattr(dist, "{attribute}")' in text and LATER[name] in torch_names, name


def test_all_of_it_is_there():
    """A name that is misspelt in the list above would be looked for in vain."""
    for module in ("torch.distributed.tensor", "torch.multiprocessing.spawn", "torch.nn.utils.rnn"):
        importlib.import_module(module)
    start = {"torch": torch, "F": nn.functional, "dist": dist, "nn": nn}
    for name in IN_TORCH:
        place, _, last = name.rpartition(".")
        if place in sys.modules:
            assert hasattr(sys.modules[place], last), name
            continue
        first, *parts = name.split(".")
        found: Any = start[first]
        for part in parts:
            found = getattr(found, part)


@pytest.mark.parametrize("newer", ["NOT_IN_PYTHON", "NOT_IN_NUMPY"])
def test_nothing_newer_than_the_declared_python_and_numpy_is_read(newer):
    for path, tree in parsed():
        assert not read_names(tree) & globals()[newer], path


def test_what_the_compiler_of_torch_2_8_cannot_trace_is_not_in_losses():
    """A ``defaultdict`` was it, in the answers of all losses."""
    traced = [
        "losses",
        "compat",
        "engine/dense.py",
        "engine/terms.py",
        "anchors.py",
        "functional.py",
    ]
    for path, tree in parsed():
        place = path.relative_to(SOURCE).as_posix()
        if place.startswith(tuple(traced)):
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            assert not names & {"defaultdict", "ChainMap", "OrderedDict", "Counter", "deque"}, path


def test_no_check_of_a_type_has_a_union():
    """The compiler of PyTorch 2.8 traces a tuple of types, and not ``A | B``, which it calls a
    sourceless object.
    """
    for path, tree in parsed():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                assert not isinstance(node.args[1], ast.BinOp), f"{path}:{node.lineno}"


COMPILED: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
    "RINCE": itrloss.RINCELoss,
    "RCL": itrloss.ComplementaryContrastiveLoss,
    "MIL-NCE": itrloss.MILNCELoss,
    "filtered": lambda: itrloss.InfoNCELoss(margin=0.1, relative=True),
    "of one direction": lambda: itrloss.InfoNCELoss(directions="text-image", hardness=3.0),
    "multi-similarity": itrloss.MultiSimilarityLoss,
    "VSE++": lambda: compat.VSEPPLoss(2, max_violation=True),
    "USER": lambda: compat.USERLoss(settings()),
    "a term of a user": Wave,
    "a learnt scale": lambda: itrloss.InfoNCELoss(learnable=True, max_scale=50.0),
}


@pytest.mark.parametrize("name", COMPILED)
def test_further_losses_are_one_graph(name):
    loss = COMPILED[name]()
    if isinstance(loss, itrloss.PairLoss):
        loss.engine = "dense"
    torch._dynamo.reset()
    graph = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(graph(IMAGES, TEXTS), loss(IMAGES, TEXTS))
