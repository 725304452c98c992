"""The statistics of ``python -m benchmarks.judged``, on synthetic data."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.stored import assert_stored_numbers

from benchmarks import judged, linear
from benchmarks.judged import MEASURES, Measure, Relevance
from itrloss.metrics import Judgements, compare, retrieval_metrics, retrieval_results

N, C = 12, 2  # images, and captions of each
OWNER = torch.arange(N).repeat_interleave(C)
OWN = torch.arange(N)[:, None] == OWNER


class Data(NamedTuple):
    """Scores of both directions, and what is relevant."""

    scores: tuple[torch.Tensor, torch.Tensor]
    relevance: Relevance


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
    texts = pairs % N * C  # the first caption of each image is judged
    # The experts judge the first 40 pairs, the crowd the last 50.
    grades = torch.randint(3, 13, (40,), generator=generator).double() / 3
    shares = torch.randint(0, 4, (50,), generator=generator).double() / 3
    experts = Judgements(images[:40], texts[:40], grades)
    crowd = Judgements(images[30:], texts[30:], shares)
    return Data((i2t, t2i), Relevance(OWNER, experts, crowd))


# --- what is right --------------------------------------------------------------------------------


def values(data: Data) -> dict[str, float]:
    """All measures."""
    totals = data.relevance.sums(data.scores).sum(0)
    found = {}
    for name, measure in MEASURES.items():
        hits, queries = totals[measure.parts].T
        found[name] = measure.factor * float((100 * hits / queries).sum())
    return found


def test_measures_are_those_of_loops_over_pairs(data):
    """They are stored: loops over queries and candidates had the same sums."""
    found = {f"part {k}": x.tolist() for k, x in enumerate(data.relevance.sums(data.scores).sum(0))}
    found["other right pairs"] = data.relevance.others.nonzero().flatten().tolist()
    found |= {name: [value] for name, value in values(data).items()}
    assert_stored_numbers("judged", found)


def test_recalls_of_own_pairs_are_those_of_the_library(data):
    found, wanted = values(data), retrieval_metrics(data.scores)
    assert found["RSUM, own pairs"] == pytest.approx(wanted["rsum"])
    r1 = (wanted["i2t_r1"] + wanted["t2i_r1"]) / 2
    assert found["R@1, own pairs"] == pytest.approx(r1)


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
    every = (rsum_before, wanted.difference, wanted.low, wanted.high, 3 * wanted.p_value)
    for values, value in zip(found, every, strict=True):  # for two systems and their mean
        assert values.flatten().tolist() == pytest.approx([value] * 3, abs=1e-3)


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
