"""The statistics of ``python -m benchmarks.judged``, on synthetic data."""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from benchmarks import judged, linear
from benchmarks.judged import MEASURES, Measure, Relevance
from itrloss.metrics import Judgements, compare, retrieval_metrics, retrieval_results

N, C = 12, 2  # images, and captions of each
OWNER = torch.arange(N).repeat_interleave(C)
OWN = torch.arange(N)[:, None] == OWNER
JUDGED_TEXTS = range(0, N * C, C)  # the first caption of each image is judged
PARTS = {"others, R@1": 18, "order, experts": 24, "nDCG@10, experts": 28}


class Data(NamedTuple):
    """Scores of both directions, judgements, and the same judgements as dictionaries of pairs."""

    scores: tuple[torch.Tensor, torch.Tensor]
    relevance: Relevance
    experts: dict[tuple[int, int], float]
    crowd: dict[tuple[int, int], float]

    def is_right(self, image: int, text: int) -> bool:
        """Experts decide, and where there are none, more than half of the crowd."""
        if (image, text) in self.experts:
            return self.experts[image, text] >= 3
        return self.crowd.get((image, text), 0) > 0.5


def by_pair(judgements: Judgements) -> dict[tuple[int, int], float]:
    """The grades, by image and text."""
    grades = {}
    for image, text, grade in zip(*judgements, strict=True):
        grades[int(image), int(text)] = float(grade)
    return grades


@pytest.fixture
def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    i2t = torch.randn(N, N * C, generator=generator) + 2 * OWN
    t2i = torch.randn(N, N * C, generator=generator) + 2 * OWN
    pairs = torch.randperm(N * N, generator=generator)[:80]
    images = pairs // N
    texts = pairs % N * C
    # The experts judge the first 40 pairs, the crowd the last 50.
    grades = torch.randint(3, 13, (40,), generator=generator).double() / 3
    shares = torch.randint(0, 4, (50,), generator=generator).double() / 3
    experts = Judgements(images[:40], texts[:40], grades)
    crowd = Judgements(images[30:], texts[30:], shares)
    relevance = Relevance(OWNER, experts, crowd)
    return Data((i2t, t2i), relevance, by_pair(experts), by_pair(crowd))


def value(data: Data, name: str) -> float:
    """A measure in percent."""
    measure = MEASURES[name]
    of_all_queries = data.relevance.sums(data.scores).sum(0)
    totals = of_all_queries[measure.parts]
    percentages = 100 * totals[:, 0] / totals[:, 1]
    return measure.factor * float(percentages.sum())


def part(data: Data, number: int) -> list[float]:
    """The numerator and the denominator of a part."""
    of_each_query = data.relevance.sums(data.scores)[:, number]
    return of_each_query.sum(0).tolist()


# --- what is right --------------------------------------------------------------------------------


def test_right_pairs_are_those_of_the_judgements(data):
    found = set()
    for image, number in data.relevance.others.nonzero().tolist():
        text = int(data.relevance.texts[number])
        found.add((image, text))
    wanted = set()
    for image, text in itertools.product(range(N), JUDGED_TEXTS):
        is_own = text // C == image
        if data.is_right(image, text) and not is_own:
            wanted.add((image, text))
    assert found == wanted


def test_recalls_of_own_pairs_are_those_of_the_library(data):
    plain = retrieval_metrics(data.scores)
    r1 = (plain["i2t_r1"] + plain["t2i_r1"]) / 2
    assert value(data, "RSUM, own pairs") == pytest.approx(plain["rsum"])
    assert value(data, "R@1, own pairs") == pytest.approx(r1)


def test_recalls_of_judged_pairs_are_those_of_the_library(data):
    right = torch.zeros(N, N, dtype=torch.bool)
    for image, text in itertools.product(range(N), JUDGED_TEXTS):
        owner = text // C
        right[image, owner] = data.is_right(image, text) or owner == image
    i2t, t2i = data.scores
    judged_scores = (i2t[:, ::C], t2i[:, ::C])
    pairs = right.nonzero(as_tuple=True)
    wanted = retrieval_metrics(judged_scores, relevant=pairs)
    assert value(data, "RSUM, judged pairs") == pytest.approx(wanted["rsum"])


def test_first_candidates_of_others_are_those_of_the_loops(data):
    hits = []
    for image in range(N):
        others = [text for text in JUDGED_TEXTS if text // C != image]
        right = [text for text in others if data.is_right(image, text)]
        if right:
            row = data.scores[0][image].tolist()
            first = max(others, key=row.__getitem__)
            hits.append(first in right)
    assert part(data, PARTS["others, R@1"]) == [sum(hits), len(hits)]


@pytest.mark.parametrize("side", [0, 1], ids=["i2t", "t2i"])
def test_the_order_of_judged_candidates_is_that_of_the_loops(side, data):
    scores = data.scores[side]
    others = [pair for pair in data.experts if pair[0] != pair[1] // C]
    right = 0
    total = 0
    for a, b in itertools.permutations(others, 2):
        of_one_query = a[side] == b[side]
        if of_one_query and data.experts[a] > data.experts[b]:
            right += bool(scores[a] > scores[b])
            total += 1
    assert part(data, PARTS["order, experts"] + side) == [right, total]


def gain(grades: list[float]) -> float:
    """The discounted gain of a list, best first."""
    total = 0.0
    for place, grade in enumerate(grades[:10], 1):
        total += (grade - 1) / math.log2(place + 1)
    return total


@pytest.mark.parametrize("side", [0, 1], ids=["i2t", "t2i"])
def test_the_gain_of_judged_candidates_is_that_of_the_loops(side, data):
    scores = data.scores[side]
    ratios = []
    for query in {pair[side] for pair in data.experts}:
        own = [pair for pair in data.experts if pair[side] == query]
        own.sort(key=lambda pair: -float(scores[pair]))
        grades = [data.experts[pair] for pair in own]
        ideal = gain(sorted(grades, reverse=True))
        if ideal > 0:
            ratios.append(gain(grades) / ideal)
    wanted = [sum(ratios), len(ratios)]
    assert part(data, PARTS["nDCG@10, experts"] + side) == pytest.approx(wanted)


def test_hubs_are_right_for_many_where_scores_favour_them(data):
    generator = torch.Generator().manual_seed(0)
    scores = 1e-3 * torch.rand(N, N * C, generator=generator)
    scores[:, ::C] += data.relevance.others.sum(0)
    captions, pictures = data.relevance.hubs(scores)
    assert captions > 0.3
    assert abs(pictures) <= 1


# --- gains of re-rankers --------------------------------------------------------------------------


def test_intervals_are_those_of_the_library(data):
    better = tuple(scores + OWN for scores in data.scores)
    system = torch.stack([data.relevance.sums(data.scores), data.relevance.sums(better)])
    sums = torch.stack([system, system])
    found = judged.gains(sums, [MEASURES["RSUM, own pairs"]], samples=500)
    before = retrieval_results(data.scores)
    after = retrieval_results(better)
    wanted = compare(after, before, samples=500)["rsum"]
    rsum_before = before.metrics()["rsum"]
    assert found.before.flatten().tolist() == of_all_systems(rsum_before)
    assert found.gain.flatten().tolist() == of_all_systems(wanted.difference, abs=1e-3)
    assert found.low.flatten().tolist() == of_all_systems(wanted.low, abs=1e-3)
    assert found.high.flatten().tolist() == of_all_systems(wanted.high, abs=1e-3)
    assert found.p.flatten().tolist() == of_all_systems(3 * wanted.p_value)


def of_all_systems(value: float, **tolerance: float) -> Any:
    """One value for two systems and their mean."""
    return pytest.approx([value] * 3, **tolerance)


def test_the_last_system_is_the_mean_of_all():
    generator = torch.Generator().manual_seed(0)
    sums = torch.ones(3, 4, 9, 2, 2)
    sums[..., 0] = torch.rand(3, 4, 9, 2, generator=generator)
    measures = [Measure(slice(0, 2)), Measure(slice(1, 2), 0.5)]
    found = judged.gains(sums, measures, samples=7)
    assert found.gain.shape == (4, 3, 2)
    mean = found.gain[:-1].mean(0)
    torch.testing.assert_close(found.gain[-1], mean)
    assert (found.low <= found.high).all()


def test_holms_correction_of_known_p_values():
    p_values = torch.tensor([[0.01, 0.04], [0.03, 0.5]])
    corrected = torch.tensor([[0.04, 0.09], [0.09, 0.5]])
    torch.testing.assert_close(judged.holm(p_values), corrected)


# --- files ----------------------------------------------------------------------------------------


def test_judgements_of_missing_images_are_left_out(tmp_path):
    (tmp_path / "test_images.txt").write_text("0.jpg\n1.jpg\n2.jpg")
    experts = "0.jpg\t1.jpg#2\t1\t2\t3\n2.jpg\tmissing.jpg#0\t1\t1\t1\n"
    (tmp_path / "ExpertAnnotations.txt").write_text(experts)
    (tmp_path / "CrowdFlowerAnnotations.txt").write_text("1.jpg\t2.jpg#4\t0.25\t1\t3\n")
    found = judged.read_judgements(tmp_path)
    assert [by_pair(judgements) for judgements in found] == [{(0, 7): 2.0}, {(1, 14): 0.25}]


@pytest.mark.parametrize("hidden", [False, True])
def test_linear_models_learn(hidden, tmp_path):
    things = ["dog", "cat", "boy", "car"]
    generator = np.random.default_rng(0)
    kinds = np.arange(160) % 4
    for split in ("train", "test"):
        features = generator.random((160, 6)) + 3 * np.eye(6)[kinds]
        np.save(tmp_path / f"{split}_global.npy", features.astype(np.float16))
        lines = []
        for kind in kinds.repeat(5):
            lines.append(f"A {things[kind]} number {'x' * generator.integers(1, 4)}.")
        (tmp_path / f"{split}_caps.txt").write_text("\n".join(lines))
    data = linear.Data(tmp_path, ("train", "test"))
    make, _ = linear.LOSSES["InfoNCE, τ = 0.1"]
    model = linear.trained(data, make(), hidden, seed=0, epochs=10)
    images, texts = linear.embedded(data, model, "test")
    assert images.shape == (160, linear.DIM)
    first = (images @ texts.T).argmax(1)
    right = first // 5 % 4 == torch.from_numpy(kinds)
    assert right.double().mean() > 0.9
