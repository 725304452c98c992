"""Online k-means: steps against loops, seeding, refitting, and points that are no numbers.

`losses/test_modules.py` has copies, compilation and several processes.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle_more
from support.cases import sample

import itrloss
from itrloss import OnlineKMeans

D = 6


def points(n, dim=D, seed=0):
    """Vectors of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(n, dim, generator=generator)
    return 4 * (0.1 + torch.rand(n, 1, generator=generator)) * directions


def trained(clusters, seed=0, batches=6, size=7, **options):
    means = OnlineKMeans(clusters, D, **options)
    for batch in range(batches):
        means.update(points(size, seed=seed * 100 + batch))
    return means


def mean_cosine(x, means):
    """The mean cosine of the points with their nearest centroid."""
    return oracle_more.kmeans_objective(x.numpy(), means.centroids[: len(means)].numpy())


def counted(ids, clusters):
    return torch.bincount(ids, minlength=clusters)


# -------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("size", [1, 3, 8, 40])  # fewer points than clusters, equally many, more
def test_a_step_equals_the_loop_oracle(size):
    means = trained(8, patience=1e6)
    assert len(means) == 8
    for batch in range(4):
        x = points(size, seed=1000 + batch)
        before = means.centroids.clone()
        wanted_ids, centroids, counts = oracle_more.spherical_kmeans_step(
            before.numpy(), means.counts.numpy(), x.numpy()
        )
        predicted = means.predict(x)
        ids = means.update(x)
        assert torch.equal(ids, predicted)
        assert torch.equal(ids, torch.from_numpy(wanted_ids))
        wanted = torch.from_numpy(centroids).float()
        torch.testing.assert_close(means.centroids, wanted, rtol=1e-5, atol=1e-6)
        assert means.counts.tolist() == counts.tolist()
        without_points = counted(ids, 8) == 0
        assert torch.equal(means.centroids[without_points], before[without_points])
        assert not means.reseeded.any()


def test_counts_are_capped_for_the_step_alone():
    free, capped = OnlineKMeans(1, 3), OnlineKMeans(1, 3, max_count=2.0)
    for means in (free, capped):
        for _ in range(10):
            means.update(torch.tensor([[1.0, 0, 0]]))
        means.update(torch.tensor([[0.0, 1, 0]]))
        assert means.counts[0] == 11
    torch.testing.assert_close(free.centroids[0], torch.tensor([10.0, 1, 0]) / 101**0.5)
    torch.testing.assert_close(capped.centroids[0], torch.tensor([2.0, 1, 0]) / 5**0.5)


@given(
    seed=st.integers(0, 10**6),
    clusters=st.integers(1, 12),
    size=st.integers(1, 30),
    max_count=st.sampled_from([None, 3.0]),
    patience=st.floats(0.1, 5),
)
@settings(deadline=None, max_examples=40)
def test_an_update_never_serves_its_batch_worse(seed, clusters, size, max_count, patience):
    means = trained(clusters, seed=seed, max_count=max_count, patience=patience)
    x = points(size, seed=seed + 1)
    before = mean_cosine(x, means)
    ids = means.update(x)
    with_own = (F.normalize(x) * means.centroids[ids]).sum(1).mean()
    assert with_own >= before - 1e-5
    assert mean_cosine(x, means) >= with_own - 1e-5
    lengths = means.centroids[: len(means)].norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))


def test_large_matrices_are_never_held(monkeypatch):
    """Scores of points and centroids are visited in tiles, whatever their size."""
    formed = []
    begin = itrloss.engine.matrix.Matrix.__init__

    def noted(matrix, *args, **options):
        begin(matrix, *args, **options)
        formed.append((matrix.engine, matrix.keeps_scores))

    means = trained(50, size=30)
    monkeypatch.setattr(itrloss.engine.matrix.Matrix, "__init__", noted)
    means.predict(points(64, seed=9))
    assert formed == [("tiled", False)]


def test_no_points_change_nothing():
    means = OnlineKMeans(3, D)
    none = points(0)
    assert means.update(none).shape == (0,)
    means.update(points(9))
    before = means.centroids.clone()
    assert means.update(none).shape == (0,)
    assert means.predict(none).shape == (0,)
    assert torch.equal(means.centroids, before)


# ------------------------------------------------------------------------------------------ seeding


def test_empty_clusters_are_seeded_in_their_order():
    means = OnlineKMeans(5, D)
    x = points(3)
    ids = means.update(x)
    assert sorted(ids.tolist()) == [0, 1, 2]
    torch.testing.assert_close(means.centroids[ids], F.normalize(x))
    assert means.reseeded.tolist() == [True, True, True, False, False]
    # two of these directions are known; the two others have lower similarities
    ids = means.update(torch.cat([2 * x[:1], -x[1:], 3 * x[2:]]))
    assert set(ids[1:3].tolist()) == {3, 4}
    assert means.reseeded.tolist() == [False, False, False, True, True]
    torch.testing.assert_close(means.centroids[ids[1:3]], F.normalize(-x[1:]))


def test_a_cluster_without_points_is_seeded_again():
    means = OnlineKMeans(2, 3, patience=2.0)
    means.update(torch.tensor([[1.0, 0, 0], [0, 1, 0]]))
    far = torch.tensor([[1.0, 0, 0.1], [1, 0, 0.9]])
    means.update(far)
    means.update(far)
    assert not means.reseeded.any()  # 4 points, which is still within its patience
    ids = means.update(far)
    assert means.reseeded.tolist() == [False, True]
    assert ids.tolist() == [0, 1]
    torch.testing.assert_close(means.centroids[1], F.normalize(far[1], dim=0))
    assert means.counts[1] == 1


def test_a_first_batch_larger_than_the_number_of_clusters_seeds_all():
    means = OnlineKMeans(3, D)
    x = points(50).requires_grad_()
    ids = means.update(x)
    assert means.reseeded.all()
    assert torch.equal(means.counts, counted(ids, 3))
    assert means.counts.all()
    assert not means.centroids.requires_grad
    assert torch.equal(x, points(50))


def test_known_points_need_no_new_clusters():
    means = OnlineKMeans(100, D)
    x = points(10)
    first = means.update(x)
    for _ in range(3):
        assert torch.equal(means.update(x), first)
    assert len(means) == 10
    assert torch.equal(means.predict(x), first)
    assert (means.counts[first] == 4).all()


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf])
@pytest.mark.parametrize("at", ["in front", "among them", "behind"])
@pytest.mark.parametrize(("clusters", "size"), [(4, 12), (40, 12), (12, 12)])
def test_points_that_are_zero_or_not_finite_leave_no_trace(bad, at, clusters, size):
    """Mixed precision skips the optimiser's step after an overflow, but a centroid would be
    corrupted for good. Counts decide on later steps, so they are compared, too.
    """
    means, clean = (OnlineKMeans(clusters, D, patience=1.0) for _ in range(2))
    good = torch.arange(size) + {"in front": 30, "among them": 0, "behind": 0}[at]
    if at == "among them":
        good = good * 3
    for step in range(8):
        centre = points(1, seed=step // 4) * 3  # the first cluster is left behind, and reseeded
        x = points(size, seed=step) + centre
        mixed = torch.zeros(size + 30, D)
        mixed[:, 2] = bad
        mixed[good] = x
        assert torch.equal(means.update(mixed)[good], clean.update(x))
        for name, buffer in clean.state_dict().items():
            assert torch.equal(means.state_dict()[name], buffer), name
    assert torch.equal(means.fit(mixed, 3)[good], clean.fit(x, 3))
    assert torch.equal(means.counts, clean.counts)
    assert torch.equal(means.centroids, clean.centroids)
    assert means.centroids.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zero_vectors_copies_and_opposites_stay_finite(dtype):
    means = OnlineKMeans(4, 3)
    means.update(torch.zeros(3, 3, dtype=dtype))
    assert len(means) == 0  # zero vectors do not seed clusters
    assert not means.centroids.any()
    means.update(torch.eye(3).to(dtype))
    means.update(torch.ones(3, 3, dtype=dtype))
    means.update(torch.tensor([[0.0, 0, 0], [1, 0, 0], [-1, 0, 0]], dtype=dtype))
    ids = means.update(torch.zeros(1, 3, dtype=dtype))
    assert 0 <= int(ids) < 4
    torch.testing.assert_close(means.centroids.norm(dim=1), torch.ones(4))


# ---------------------------------------------------------------------------------------- refitting


@given(seed=st.integers(0, 10**6), clusters=st.integers(1, 8), size=st.integers(1, 40))
@settings(deadline=None, max_examples=25)
def test_an_iteration_of_fit_never_serves_the_data_worse(seed, clusters, size):
    means = trained(clusters, seed=seed)
    x = points(size, seed=seed + 1)
    before = mean_cosine(x, means)
    for _ in range(3):
        ids = means.fit(x, iterations=1)
        after = mean_cosine(x, means)
        assert after >= before - 1e-5
        assert torch.equal(ids, means.predict(x))
        before = after


def test_fit_finds_separated_clusters():
    centres = torch.linalg.qr(sample(8, 8)).Q[:4]
    labels = torch.arange(200) % 4
    x = centres[labels] + 0.05 * sample(200, 8, seed=1)
    means = OnlineKMeans(4, 8)
    ids = means.fit(x)
    assert len(set(zip(labels.tolist(), ids.tolist(), strict=True))) == 4
    assert means.counts.tolist() == [50] * 4
    before = means.centroids.clone()
    assert torch.equal(means.fit(x), ids)
    torch.testing.assert_close(means.centroids, before)


@pytest.mark.parametrize("distinct", [3, 10])
def test_fit_to_fewer_points_than_clusters_settles(distinct):
    x = points(distinct).repeat(4, 1)
    means, early = OnlineKMeans(50, D), OnlineKMeans(50, D)
    ids = means.fit(x, iterations=100)
    assert torch.equal(early.fit(x, iterations=4), ids)
    assert torch.equal(early.centroids, means.centroids)
    assert len(ids.unique()) == distinct
    assert torch.equal(means.predict(x), ids)
    assert torch.equal(means.counts, counted(ids, 50))
    assert mean_cosine(x, means) > 1 - 1e-6


def test_fit_tells_all_that_was_reseeded():
    means = OnlineKMeans(6, D)
    x = points(30)
    means.fit(x, iterations=5)
    assert means.reseeded.all()  # in the first iteration
    means.fit(x, iterations=2)
    assert not means.reseeded.all()


# ------------------------------------------------------------------------------- states and options


def test_a_failed_load_changes_nothing():
    means = trained(10)
    before = copy.deepcopy(means.state_dict())
    with pytest.raises(RuntimeError, match=r"centroids: expected shape \(10, 6\), got \(10, 4\)"):
        means.load_state_dict(OnlineKMeans(10, 4).state_dict())
    assert all(torch.equal(x, before[name]) for name, x in means.state_dict().items())


@pytest.mark.parametrize("patience", [7e17, 1e30])
def test_a_patience_may_be_as_large_as_one_likes(patience):
    """It is a number of points, which would overflow an integer."""
    means = OnlineKMeans(8, D, patience=patience)
    assert means.update(points(6)).tolist() == [0, 1, 2, 3, 4, 5]
    assert len(means) == 6


# A call, and words of its message; `test_options.py` has options that are set later.
WRONG = [
    (lambda: OnlineKMeans(0, 2), "clusters: expected a number of at least 1"),
    (lambda: OnlineKMeans(3, 2, patience=0), "patience"),
    (lambda: OnlineKMeans(3, 2, max_count=-1), "max_count"),
    (lambda: OnlineKMeans(3, D).predict(points(2)), "no cluster has a point yet"),
    (lambda: OnlineKMeans(3, D).update(points(2, 5)), r"x: expected shape \(B, 6\), got \(2, 5\)"),
    (lambda: OnlineKMeans(3, D).update(points(2).long()), "x: expected a floating-point"),
    (lambda: OnlineKMeans(3, D).fit(points(2), iterations=0), "iterations"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_input_is_named(call, message):
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        call()
