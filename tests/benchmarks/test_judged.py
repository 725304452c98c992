"""The statistics of ``python -m benchmarks.judged``, on synthetic data."""

import itertools
import json
import math

import pytest
import torch

from benchmarks import judged, linear
from benchmarks.judged import MEASURES, Measure, Relevance
from itrloss.metrics import Judgements, compare, retrieval_metrics, retrieval_results

N, C = 12, 2  # images, captions of each


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    owner = torch.arange(N).repeat_interleave(C)
    i2t, t2i = (
        torch.randn(N, N * C, generator=generator) + 2 * (torch.arange(N)[:, None] == owner)
        for _ in "12"
    )
    # the first caption of each image is judged
    pairs = torch.randperm(N * N, generator=generator)[:80]
    images, texts = pairs // N, pairs % N * C
    experts = Judgements(
        images[:40], texts[:40], torch.randint(3, 13, (40,), generator=generator).double() / 3
    )
    crowd = Judgements(
        images[30:], texts[30:], torch.randint(0, 4, (50,), generator=generator).double() / 3
    )
    return (i2t, t2i), owner, experts, crowd


def value(sums, name):
    totals = sums.sum(0)[MEASURES[name].parts]
    return MEASURES[name].factor * float((100 * totals[:, 0] / totals[:, 1]).sum())


def test_relevance_and_recalls(data):
    scores, owner, experts, crowd = data
    relevance = Relevance(owner, experts, crowd)
    expert_of = {(i, t): g for i, t, g in zip(*(x.tolist() for x in experts), strict=True)}
    crowd_of = {(i, t): g for i, t, g in zip(*(x.tolist() for x in crowd), strict=True)}
    every = list(itertools.product(range(N), range(0, N * C, C)))
    right = {
        x
        for x in every
        if expert_of.get(x, 0) >= 3 or (x not in expert_of and crowd_of.get(x, 0) > 0.5)
    }
    assert {(int(i), int(relevance.texts[t])) for i, t in relevance.others.nonzero()} == {
        (i, t) for i, t in right if i != t // C
    }
    sums = relevance.sums(scores)
    plain = retrieval_metrics(scores)
    assert value(sums, "RSUM, own pairs") == pytest.approx(plain["rsum"])
    assert value(sums, "R@1, own pairs") == pytest.approx((plain["i2t_r1"] + plain["t2i_r1"]) / 2)
    listed = sorted(right | {(i, C * i) for i in range(N)})
    pairs = torch.tensor([i for i, _ in listed]), torch.tensor([t // C for _, t in listed])
    few = retrieval_metrics((scores[0][:, ::C], scores[1][:, ::C]), relevant=pairs)
    assert value(sums, "RSUM, judged pairs") == pytest.approx(few["rsum"])
    hits = []  # best other candidate of each image
    for i in range(N):
        wanted = [t for t in range(0, N * C, C) if (i, t) in right and t // C != i]
        if wanted:
            best = max(
                (t for t in range(0, N * C, C) if t // C != i), key=lambda t: float(scores[0][i, t])
            )
            hits.append(best in wanted)
    part = sums.sum(0)[18]
    assert part.tolist() == [sum(hits), len(hits)]


def test_order_and_gain_of_judged_candidates(data):
    scores, owner, experts, crowd = data
    sums = Relevance(owner, experts, crowd).sums(scores)
    pairs = list(zip(*(x.tolist() for x in experts), strict=True))
    for side, s in enumerate(scores):
        right = total = 0
        for a, b in itertools.permutations([x for x in pairs if x[0] != x[1] // C], 2):
            if a[side] == b[side] and a[2] > b[2]:
                right, total = right + float(s[a[0], a[1]] > s[b[0], b[1]]), total + 1
        assert sums[:, 24 + side].sum(0).tolist() == [right, total]
        found = []
        for query in {x[side] for x in pairs}:
            own = sorted(
                (x for x in pairs if x[side] == query), key=lambda x: -float(s[x[0], x[1]])
            )
            dcg, ideal = (
                sum((x[2] - 1) / math.log2(rank + 2) for rank, x in enumerate(order[:10]))
                for order in (own, sorted(own, key=lambda x: -x[2]))
            )
            found += [dcg / ideal] if ideal else []
        assert sums[:, 28 + side].sum(0).tolist() == pytest.approx([sum(found), len(found)])


def test_hubs_and_relevance(data):
    relevance = Relevance(*data[1:])
    generic = torch.zeros(N, N * C)  # scores that favour what is right for many
    generic[:, ::C] = relevance.others.sum(0).float()
    noise = torch.rand(N, N * C, generator=torch.Generator().manual_seed(0))
    captions, pictures = relevance.hubs(generic + 1e-3 * noise)
    assert captions > 0.3 and abs(pictures) <= 1


def test_intervals_are_those_of_the_library(data):
    scores, owner, *judgements = data
    relevance = Relevance(owner, *judgements)
    better = tuple(x + (torch.arange(N)[:, None] == owner) for x in scores)
    sums = torch.stack([torch.stack([relevance.sums(x) for x in (scores, better)])] * 2)
    found = judged.gains(sums, [MEASURES["RSUM, own pairs"]], samples=500)
    library = compare(retrieval_results(better), retrieval_results(scores), samples=500)["rsum"]
    # two systems and their mean
    assert found.before.shape == (3, 1) and found.gain.shape == (3, 1, 1)
    assert float(found.before[0]) == pytest.approx(retrieval_metrics(scores)["rsum"])
    for x, expected in zip(found[1:4], library[:3], strict=True):
        assert x.flatten().tolist() == pytest.approx([expected] * 3, abs=1e-3)
    assert found.p.flatten().tolist() == pytest.approx([3 * library.p_value] * 3)


def test_the_mean_of_all_systems():
    generator = torch.Generator().manual_seed(0)
    sums = torch.stack(
        [torch.rand(3, 4, 9, 2, 2, generator=generator), torch.ones(3, 4, 9, 2, 2)], -1
    ).mean(-1)
    found = judged.gains(sums, [Measure(slice(0, 2)), Measure(slice(1, 2), 0.5)], samples=7)
    torch.testing.assert_close(found.gain[-1], found.gain[:-1].mean(0))
    assert found.gain.shape == (4, 3, 2) and bool((found.low <= found.high).all())


def test_holm():
    assert judged.holm(torch.tensor([[0.01, 0.04], [0.03, 0.5]])).tolist() == [
        [pytest.approx(0.04), pytest.approx(0.09)],
        [pytest.approx(0.09), 0.5],
    ]


def test_a_folder_from_judgements_to_results(tmp_path, monkeypatch):
    folder = tmp_path / "flickr8k"
    folder.mkdir()
    names = [f"{i}.jpg" for i in range(3)]
    (folder / "test_images.txt").write_text("\n".join(names))
    (folder / "ExpertAnnotations.txt").write_text(
        "0.jpg\t1.jpg#2\t1\t2\t3\n2.jpg\tmissing.jpg#0\t1\t1\t1\n"
    )
    (folder / "CrowdFlowerAnnotations.txt").write_text("1.jpg\t2.jpg#4\t0.25\t1\t3\n")
    experts, crowd = judged.read_judgements(folder)
    assert [x.tolist() for x in experts] == [[0], [7], [2.0]] and [x.tolist() for x in crowd] == [
        [1],
        [14],
        [0.25],
    ]


def test_linear_models_learn(tmp_path):
    import numpy as np

    things = ["dog", "cat", "boy", "car"]
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        kinds = np.arange(160) % 4
        np.save(
            tmp_path / f"{split}_global.npy",
            (rng.random((160, 6)) + 3 * np.eye(6)[kinds]).astype(np.float16),
        )
        lines = [
            f"A {things[k]} number {'x' * rng.integers(1, 4)}." for k in kinds for _ in range(5)
        ]
        (tmp_path / f"{split}_caps.txt").write_text("\n".join(lines))
    data = linear.Data(tmp_path, ("train", "test"))
    for hidden in (False, True):
        model = linear.trained(
            data, linear.LOSSES["InfoNCE, τ = 0.1"][0](), hidden, seed=0, epochs=10
        )
        v, w = linear.embedded(data, model, "test")
        right = (v @ w.T).argmax(1) // 5 % 4 == torch.arange(160) % 4
        assert v.shape == (160, linear.DIM) and right.double().mean() > 0.9
    assert json.dumps(list(linear.LOSSES))
