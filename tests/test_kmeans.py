"""Online k-means, and classification by its prototypes."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import oracle_more
from support.cases import pairwise
from torch.autograd import gradcheck

import itrloss
from itrloss import OnlineKMeans, PrototypeClassificationLoss, functional


def points(n, d=6, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, d, generator=generator) * torch.rand(n, 1, generator=generator).add(0.1) * 4
    ).to(dtype)


def trained(clusters, d=6, seed=0, batches=6, size=7, **options):
    means = OnlineKMeans(clusters, d, **options)
    for b in range(batches):
        means.update(points(size, d, seed * 100 + b))
    return means


def mean_cosine(x, means):
    return oracle_more.kmeans_objective(x.numpy(), means.centroids[: len(means)].numpy())


@pytest.mark.parametrize("size", [1, 3, 8, 40])  # fewer points than clusters, equally many, more
def test_step_equals_the_loop_oracle(size):
    means = trained(8, patience=1e6)
    assert len(means) == 8
    for b in range(4):
        x = points(size, seed=1000 + b)
        wanted_ids, centroids, counts = oracle_more.spherical_kmeans_step(
            means.centroids.numpy(), means.counts.numpy(), x.numpy()
        )
        predicted = means.predict(x)
        ids = means.update(x)
        assert torch.equal(ids, predicted) and torch.equal(ids, torch.from_numpy(wanted_ids))
        np.testing.assert_allclose(means.centroids.numpy(), centroids, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(means.counts.numpy(), counts)
        untouched = torch.ones(8, dtype=torch.bool).index_fill(0, ids, False)
        np.testing.assert_array_equal(
            means.centroids[untouched].numpy(), centroids[untouched].astype(np.float32)
        )
        assert not means.reseeded.any()


def test_empty_clusters_are_seeded_in_their_order():
    means, x = OnlineKMeans(5, 6), points(3)
    ids = means.update(x)
    assert sorted(ids.tolist()) == [0, 1, 2] and len(means) == 3
    torch.testing.assert_close(means.centroids[ids], torch.nn.functional.normalize(x))
    assert means.reseeded.tolist() == [True, True, True, False, False]
    # two directions are known; the two others have lower similarities
    more = torch.cat([x[:1] * 2, -x[1:], x[2:] * 3])
    ids = means.update(more)
    assert len(means) == 5 and set(ids[1:3].tolist()) == {3, 4}
    assert means.reseeded.tolist() == [False, False, False, True, True]
    torch.testing.assert_close(means.centroids[ids[1:3]], torch.nn.functional.normalize(-x[1:]))


def test_first_batch_larger_than_the_number_of_clusters():
    means, x = OnlineKMeans(3, 6), points(50)
    ids = means.update(x)
    assert len(means) == 3 and means.counts.sum() == 50 and set(ids.tolist()) == {0, 1, 2}
    assert means.reseeded.all()
    assert (means.counts == torch.bincount(ids, minlength=3)).all()


def test_cluster_without_points_is_seeded_again():
    means = OnlineKMeans(2, 3, patience=2.0)
    means.update(torch.tensor([[1.0, 0, 0], [0, 1, 0]]))
    far = torch.tensor([[1.0, 0, 0.1], [1, 0, 0.9]])
    means.update(far)
    means.update(far)
    assert not means.reseeded.any()  # 4 points, which is still within its patience
    ids = means.update(far)
    assert means.reseeded.tolist() == [False, True] and ids.tolist() == [0, 1]
    torch.testing.assert_close(means.centroids[1], far[1] / far[1].norm())
    assert means.counts[1] == 1


@given(
    st.integers(0, 10**6),
    st.integers(1, 12),
    st.integers(1, 30),
    st.sampled_from([None, 3.0]),
    st.floats(0.1, 5),
)
@settings(deadline=None, max_examples=40)
def test_an_update_never_serves_its_batch_worse(seed, clusters, size, max_count, patience):
    means = trained(clusters, seed=seed, max_count=max_count, patience=patience)
    x = points(size, seed=seed + 1)
    before = mean_cosine(x, means)
    ids = means.update(x)
    own = (torch.nn.functional.normalize(x) * means.centroids[ids]).sum(1).mean()
    assert own >= before - 1e-5
    assert mean_cosine(x, means) >= own - 1e-5
    lengths = means.centroids[: len(means)].norm(dim=1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 40))
@settings(deadline=None, max_examples=25)
def test_refitting_never_serves_the_data_worse(seed, clusters, size):
    means, x = trained(clusters, seed=seed), points(size, seed=seed + 1)
    before = mean_cosine(x, means)
    for _ in range(3):
        ids = means.fit(x, iterations=1)
        after = mean_cosine(x, means)
        assert after >= before - 1e-5
        assert torch.equal(ids, means.predict(x))
        before = after


def test_refit_finds_separated_clusters():
    generator = torch.Generator().manual_seed(0)
    centres = torch.linalg.qr(torch.randn(8, 8, generator=generator))[0][:4]
    labels = torch.arange(200) % 4
    x = centres[labels] + 0.05 * torch.randn(200, 8, generator=generator)
    means = OnlineKMeans(4, 8)
    ids = means.fit(x)
    assert all(len(ids[labels == k].unique()) == 1 for k in range(4)) and len(ids.unique()) == 4
    assert means.counts.tolist() == [50] * 4
    again = copy.deepcopy(means)
    assert torch.equal(again.fit(x), ids)
    torch.testing.assert_close(again.centroids, means.centroids)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
# in the first batch, which initialises the centroids, or later
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("clusters", [4, 40])
def test_points_that_are_not_finite_leave_no_trace(bad, at, clusters):
    """Mixed precision skips the optimiser's step after an overflow, but a centroid would be
    corrupted for good.
    """
    means, clean = OnlineKMeans(clusters, 6), OnlineKMeans(clusters, 6)
    for step in range(5):
        x = points(12, seed=step)
        if step == at:
            x[1] = 0
        y = x.clone()
        if step == at:
            y[1, 2] = bad
        assert torch.equal(means.update(y), clean.update(x))
    assert means.centroids.isfinite().all() and torch.equal(means.centroids, clean.centroids)


def test_known_points_need_no_new_clusters():
    means, x = OnlineKMeans(100, 6), points(10)
    first = means.update(x)
    for _ in range(3):
        assert torch.equal(means.update(x), first)
    assert len(means) == 10 and torch.equal(means.predict(x), first)
    assert (means.counts[first] == 4).all()


@pytest.mark.parametrize("distinct", [3, 10])
def test_refit_with_fewer_points_than_clusters_settles(distinct):
    means, soon, x = OnlineKMeans(50, 6), OnlineKMeans(50, 6), points(distinct).repeat(4, 1)
    ids = means.fit(x, iterations=100)
    assert torch.equal(ids, soon.fit(x, iterations=4)) and torch.equal(
        means.centroids, soon.centroids
    )
    assert len(ids.unique()) == distinct and torch.equal(ids, means.predict(x))
    assert torch.equal(means.counts, torch.bincount(ids, minlength=50))
    assert mean_cosine(x, means) > 1 - 1e-6


def test_refit_tells_all_that_was_reseeded():
    means = OnlineKMeans(6, 6)
    x = points(30)
    means.fit(x, iterations=5)
    assert means.reseeded.all()  # in the first iteration
    means.fit(x, iterations=2)
    assert not means.reseeded.all()


def test_a_failed_load_changes_nothing():
    means, other = trained(10), OnlineKMeans(10, 4)
    other.update(points(12, 4))
    before = copy.deepcopy(means.state_dict())
    with pytest.raises(RuntimeError, match=r"centroids: expected shape \(10, 6\), got \(10, 4\)"):
        means.load_state_dict(other.state_dict())
    assert all(torch.equal(x, before[name]) for name, x in means.state_dict().items())


def test_counts_are_capped_for_the_step_alone():
    free, capped = (OnlineKMeans(1, 3, max_count=m) for m in (None, 2.0))
    for means in (free, capped):
        for _ in range(10):
            means.update(torch.tensor([[1.0, 0, 0]]))
        means.update(torch.tensor([[0.0, 1, 0]]))
        assert means.counts[0] == 11
    torch.testing.assert_close(free.centroids[0], torch.tensor([10.0, 1, 0]) / 101**0.5)
    torch.testing.assert_close(capped.centroids[0], torch.tensor([2.0, 1, 0]) / 5**0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_zero_vectors_copies_and_opposites_stay_finite(dtype):
    means = OnlineKMeans(4, 3)
    means.update(torch.zeros(3, 3, dtype=dtype))
    assert len(means) == 0 and not means.centroids.any()  # zero vectors do not seed clusters
    means.update(torch.eye(3, dtype=dtype))
    means.update(torch.ones(3, 3, dtype=dtype))
    means.update(torch.tensor([[0.0, 0, 0], [1, 0, 0], [-1, 0, 0]], dtype=dtype))
    ids = means.update(torch.zeros(1, 3, dtype=dtype))
    assert means.centroids.isfinite().all() and 0 <= int(ids) < 4
    torch.testing.assert_close(means.centroids.norm(dim=1), torch.ones(4))


def test_large_matrices_are_never_held(monkeypatch):
    """The engine is chosen by the number of points and clusters; results are equal."""
    means = trained(50, size=30)
    x = points(64, seed=9)
    wanted = means.predict(x)
    seen = []
    begin = itrloss.engine.matrix.Matrix.__init__

    def noted(matrix, *args):
        begin(matrix, *args)
        seen.append((matrix.engine, matrix.keeps))

    monkeypatch.setattr(itrloss.engine.matrix.Matrix, "__init__", noted)
    assert torch.equal(means.predict(x), wanted) and seen == [("tiled", False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_type_is_no_matter(dtype):
    x = points(5, 4)
    wanted = trained(3, 4).centroids
    torch.set_default_dtype(dtype)
    try:
        means = OnlineKMeans(3, 4)
        means.update(x)
        assert means.centroids.isfinite().all() and len(means) == 3
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(trained(3, 4).centroids, wanted)


def test_resumed_updates_are_bit_equal():
    means = trained(5, batches=3, patience=0.5)
    other = OnlineKMeans(5, 6, patience=0.5)
    other.load_state_dict(means.state_dict())
    assert len(other) == len(means)
    for b in range(20):
        x = points(4, seed=50 + b)
        assert torch.equal(means.update(x), other.update(x))
    for name, value in means.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_no_gradient_and_no_change_of_the_input():
    means, x = OnlineKMeans(3, 6), points(5).requires_grad_()
    before = x.detach().clone()
    ids = means.update(x)
    assert not ids.requires_grad and not means.centroids.requires_grad and torch.equal(x, before)


def test_input_errors_of_the_means():
    means = OnlineKMeans(3, 6)
    for call, error, words in (
        (lambda: means.predict(points(2)), RuntimeError, "no cluster has a point yet"),
        (
            lambda: means.update(points(2, 5)),
            ValueError,
            r"x: expected shape \(B, 6\), got \(2, 5\)",
        ),
        (lambda: means.update(points(2).long()), TypeError, "x: expected a floating-point"),
        (lambda: means.fit(points(2), iterations=0), ValueError, "iterations"),
        (lambda: OnlineKMeans(0, 3), ValueError, "clusters: expected at least 1"),
        (lambda: OnlineKMeans(3, 2.5), TypeError, "dim: expected an integer"),
        (lambda: OnlineKMeans(3, 2, patience=0), ValueError, "patience"),
        (lambda: OnlineKMeans(3, 2, max_count=-1), ValueError, "max_count"),
        (lambda: OnlineKMeans(3, 2, engine="fast"), ValueError, "engine: expected 'auto'"),
    ):
        with pytest.raises(error, match=words):
            call()


# ----------------------------------------------------------------------------------- classification


def concepts(b, k, f, seed=0):
    generator = torch.Generator().manual_seed(seed)
    v, w = (torch.randn(b, f, generator=generator, dtype=torch.float64) for _ in range(2))
    return (
        v,
        w,
        torch.randn(k, f, generator=generator, dtype=torch.float64),
        torch.randint(0, k, (b,), generator=generator),
    )


@pytest.mark.parametrize(
    ("shape", "engine", "reduction"),
    pairwise(
        shape=[(1, 1, 3), (5, 7, 4), (9, 2, 6), (4, 8, 5)],
        engine=["dense", "tiled"],
        reduction=["mean", "sum", "none"],
    ),
)
def test_classification_equals_the_loop_oracle(shape, engine, reduction, small_tiles):
    v, w, weight, ids = concepts(*shape)
    found = functional.prototype_classification_loss(v, w, weight, ids, reduction, engine)
    wanted = oracle_more.prototype_classification(
        v.numpy(), w.numpy(), weight.numpy(), None, ids.numpy(), reduction
    )
    for a, b in zip(found, wanted, strict=True) if reduction == "none" else [(found, wanted)]:
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_classification_gradient(engine, small_tiles):
    v, w, weight, ids = concepts(4, 5, 3)
    up = torch.randn(2, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def value(*given):
        first, second = functional.prototype_classification_loss(*given, ids, "none", engine)
        return (first * up[0] + second * up[1]).sum()

    assert gradcheck(value, [x.requires_grad_() for x in (v, w, weight)])


@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 12))
@settings(deadline=None)
def test_what_holds_of_the_classification(seed, b, k):
    v, w, weight, ids = concepts(b, k, 5, seed)
    generator = torch.Generator().manual_seed(seed)
    loss = functional.prototype_classification_loss
    first, second = loss(v, w, weight, ids, "none")
    assert (first >= -1e-12).all() and (second >= -1e-12).all()
    torch.testing.assert_close(loss(w, v, weight, ids, "none"), (second, first))
    rows, names = torch.randperm(b, generator=generator), torch.randperm(k, generator=generator)
    torch.testing.assert_close(
        loss(v[rows], w[rows], weight, ids[rows], "none"), (first[rows], second[rows])
    )
    renamed = loss(v, w, weight[names], torch.argsort(names)[ids], "none")
    torch.testing.assert_close(renamed, (first, second))
    # common offset
    torch.testing.assert_close(
        loss(v, w, weight + 1.5 * torch.ones(5), ids, "none"), (first, second)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_concepts(dtype):
    v, w, _, ids = concepts(6, 10, 8)
    module = PrototypeClassificationLoss(8, 10)
    v, w = (x.to(dtype).requires_grad_() for x in (v, w))
    loss = module(v, w, ids)
    assert loss.dtype == torch.float32
    loss.backward()
    wanted = functional.prototype_classification_loss(
        v.double(), w.double(), module.weight.double(), ids
    )
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    assert v.grad.dtype == dtype and module.weight.grad.dtype == torch.float32


def test_reset_gives_reseeded_rows_their_centroid_and_leaves_the_others():
    torch.manual_seed(0)
    module, means = PrototypeClassificationLoss(6, 5), trained(5)
    before = module.weight.detach().clone()
    mask = torch.tensor([False, True, False, False, True])
    module.reset(mask, means.centroids)
    assert torch.equal(module.weight[~mask], before[~mask])
    torch.testing.assert_close(module.weight[mask].detach(), means.centroids[mask] / 3**0.5)
    with pytest.raises(ValueError, match="reseeded: expected a boolean"):
        module.reset(mask.float(), means.centroids)
    with pytest.raises(ValueError, match="centroids: expected shape"):
        module.reset(mask, means.centroids[:, :3])


def test_classification_input_errors():
    v, w, weight, ids = concepts(4, 5, 3)
    loss = functional.prototype_classification_loss
    for call, error, words in (
        (
            lambda: loss(v, w[:3], weight, ids),
            ValueError,
            r"text_concepts: expected shape \(4, 3\), got \(3, 3\)",
        ),
        (lambda: loss(v, w.float(), weight, ids), TypeError, "text_concepts: expected float64"),
        (
            lambda: loss(v.long(), w, weight, ids),
            TypeError,
            "image_concepts: expected a floating-point",
        ),
        (lambda: loss([1], w, weight, ids), TypeError, "image_concepts: expected a floating-point"),
        (
            lambda: loss(v, w, weight, ids + 2),
            ValueError,
            "prototype_ids: expected integers from 0 to 4",
        ),
        (
            lambda: loss(v, w, weight, ids - 5),
            ValueError,
            "prototype_ids: expected integers from 0 to 4",
        ),
        (
            lambda: loss(v, w, weight, ids.double()),
            TypeError,
            "prototype_ids: expected an integer tensor",
        ),
        (
            lambda: loss(v, w, weight[:, :2], ids),
            ValueError,
            "image_concepts: expected embeddings of dimension 2",
        ),
        (lambda: loss(v, w, weight, ids, "max"), ValueError, "reduction"),
        (lambda: PrototypeClassificationLoss(3, 0), ValueError, "clusters"),
        (lambda: PrototypeClassificationLoss(3.5, 5), TypeError, "dim: expected an integer"),
        (
            lambda: PrototypeClassificationLoss(3, 5).reset(None, weight),
            TypeError,
            "reseeded: expected a tensor",
        ),
        (
            lambda: PrototypeClassificationLoss(3, 5, check_finite=True)(v * torch.nan, w, ids),
            ValueError,
            "image_concepts",
        ),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_classification_is_never_negative_in_float32(engine, scale):
    v, w, weight, ids = concepts(128, 500, 64)
    v[:60] = weight[ids[:60]]  # easy samples, whose loss is almost 0
    given = [x.float() * (scale if at < 2 else 1) for at, x in enumerate((v, w, weight))]
    found = functional.prototype_classification_loss(*given, ids, "none", engine)
    wanted = functional.prototype_classification_loss(
        *(x.double() for x in given), ids, "none", "dense"
    )
    for a, b in zip(found, wanted, strict=True):
        assert (a >= 0).all()
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6)


def test_types_of_the_two_sides_may_differ():
    v, w, weight, ids = concepts(5, 7, 64)
    v, w, weight = v.to(torch.bfloat16), w.float(), weight.float()
    found = functional.prototype_classification_loss(v, w, weight, ids, "none")
    wanted = functional.prototype_classification_loss(v.float(), w, weight, ids, "none")
    torch.testing.assert_close(found, wanted)


def test_reset_leaves_a_graph_alone_where_nothing_was_reseeded_and_clears_gradients_elsewhere():
    v, w, _, ids = concepts(4, 5, 6)
    module, means = PrototypeClassificationLoss(6, 5), trained(5)
    v, w = v.float(), w.float()
    loss = module(v, w, ids)
    module.reset(torch.zeros(5, dtype=torch.bool), means.centroids)
    loss.backward()
    assert module.weight.grad.abs().sum() > 0
    mask = torch.tensor([True, False, False, True, False])
    before = module.weight.grad.clone()
    module.reset(mask, means.centroids)
    assert (module.weight.grad[mask] == 0).all() and torch.equal(
        module.weight.grad[~mask], before[~mask]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("active", [torch.bfloat16, torch.float16])
def test_autocast_of_either_type_leaves_the_classification_alone(dtype, active):
    v, w, _, ids = concepts(6, 10, 8)
    module = PrototypeClassificationLoss(8, 10)
    module = module.double() if dtype == torch.float64 else module
    v, w = (x.to(dtype).requires_grad_() for x in (v, w))
    wanted = module(v, w, ids)
    with torch.autocast("cpu", active):
        loss = module(v, w, ids)
    assert torch.equal(loss, wanted)
    loss.backward()
    assert v.grad.dtype == dtype and v.grad.isfinite().all()


def test_no_points_change_nothing():
    means, none = OnlineKMeans(3, 6), points(0)
    assert means.update(none).shape == (0,)
    means.update(points(9))
    before = means.centroids.clone()
    assert means.update(none).shape == (0,)
    assert means.predict(none).shape == (0,)
    assert torch.equal(means.centroids, before)


def test_arrays_are_clustered():
    x = points(9)
    found = OnlineKMeans(3, 6).fit(x.numpy())  # type: ignore[arg-type]
    assert torch.equal(found, OnlineKMeans(3, 6).fit(x))


@pytest.mark.parametrize(
    ("option", "value"), [("patience", -1), ("engine", "fast"), ("max_count", 0)]
)
def test_an_option_that_is_set_later_is_checked(option, value):
    means = OnlineKMeans(3, 6)
    before = getattr(means, option)
    with pytest.raises((TypeError, ValueError), match=option):
        setattr(means, option, value)
    assert getattr(means, option) == before
