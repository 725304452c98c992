"""Small cases for pytest-benchmark: ``pytest benchmarks --benchmark-enable``; without that, each
runs once.

The cases, their inputs and their variants are those of ``python -m benchmarks``.
"""

import pytest
import torch
import torch.nn.functional as F

import itrloss
from benchmarks.cases import LOSSES, Case, problem
from benchmarks.runner import step
from itrloss import Similarity, functional, pair_term
from itrloss.engine import inputs, products, ranking, relation, terms, vectors
from itrloss.engine.matrix import contiguous_copy

pytestmark = pytest.mark.slow

SHAPES = {
    "pairs": (128, 128, 256),
    "memory": (128, 1024, 256),
    "sets": (64, 4, 128),
    "prototypes": (64, 1024, 128),
}


@pytest.mark.parametrize("variant", ["ours", "eager", "matmul_bound"])
@pytest.mark.parametrize("loss", LOSSES)
def test_forward_and_backward(benchmark, loss, variant):
    case = Case(loss, SHAPES[LOSSES[loss].kind])
    inputs = problem(case)
    benchmark.group = str(case)
    benchmark(step(variant, case, inputs))
    if variant != "matmul_bound":
        assert all(torch.isfinite(x.grad).all() and x.grad.any() for x in inputs.leaves)


# ------------------------------------------------- gain of each performance mechanism of the engine


def pulled(n, d, **options):
    """A step of HAL on similarities with these options."""
    v, w = (torch.randn(n, d, requires_grad=True) for _ in range(2))
    return lambda: torch.autograd.grad(
        functional.hubness_aware_loss(Similarity(v, w, **options), 30.0), (v, w)
    )


@pytest.mark.parametrize("budget", [0, 10**9], ids=["formed again", "kept"])
def test_kept_scores(benchmark, budget):
    assert all(
        x.isfinite().all()
        for x in benchmark(pulled(1024, 512, engine="tiled", memory_budget=budget))
    )


@pytest.mark.parametrize("few", [64, 10**9], ids=["not listed", "listed"])
@pytest.mark.parametrize("loss", ["InfoNCELoss", "DiversityContrastiveLoss", "SupConLoss"])
def test_ten_classes(benchmark, loss, few, monkeypatch):
    """A step of 2048 pairs with 420 000 positives."""
    monkeypatch.setattr(relation, "FEW", few)
    v, w = (torch.randn(2048, 512, requires_grad=True) for _ in range(2))
    ids = torch.randint(10, (2, 2048))
    criterion = getattr(itrloss, loss)()
    found = benchmark(lambda: torch.autograd.grad(criterion(v, w, *ids), (v, w)))
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("way", ["label sets", "matches"])
def test_label_sets(benchmark, way):
    """Who matches of 1024 x 1024 sets of 16 labels."""
    labels = torch.randint(5000, (1024, 16))
    matches = relation.shares_label(labels, labels).float()
    by_labels = {"image_ids": labels, "text_ids": labels}
    who = by_labels if way == "label sets" else {"matches": matches}
    v, w = (torch.randn(1024, 128, requires_grad=True) for _ in range(2))
    criterion = itrloss.InfoNCELoss()
    found = benchmark(lambda: torch.autograd.grad(criterion(v, w, **who), (v, w)))
    assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("numel", [2**18, 2**20, 2**22])
def test_tile_size(benchmark, numel, monkeypatch):
    monkeypatch.setitem(inputs.TILE, "cpu", (numel, 2048))
    assert all(
        x.isfinite().all()
        for x in benchmark(pulled(2048, 512, engine="tiled", memory_budget=10**9))
    )


@pytest.mark.parametrize("library", ["blas", "onednn"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize(
    "shape", [(128, 1024, 4096), (2048, 1024, 2048), (2048, 512, 768)], ids=str
)
def test_product(benchmark, shape, transposed, library, monkeypatch):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch was built without oneDNN")
    monkeypatch.setattr(products, "prefers_onednn", lambda: library == "onednn")
    n, k, m = shape
    a, b = torch.randn(k, n).T if transposed else torch.randn(n, k), torch.randn(m, k).T
    torch.testing.assert_close(
        benchmark(lambda: products.matmul(a, b)), a @ b, rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norms(benchmark, dtype):
    x = torch.randn(128, 512)
    norms = benchmark(lambda: torch.linalg.vector_norm(x, dim=1, dtype=dtype))
    assert torch.allclose(norms.float() * vectors.inverse_norms(x).squeeze(1), torch.ones(128))


@pytest.mark.parametrize("way", [torch.max, ranking.argmax], ids=["PyTorch", "runs"])
@pytest.mark.parametrize("dim", [0, 1])
def test_argmax(benchmark, way, dim):
    x = torch.randn(1024, 1024)
    assert torch.equal(benchmark(lambda: way(x, dim))[0], x.amax(dim))


@pytest.mark.parametrize("way", ["ours", "sums of masks", "sorted"])
def test_ranks(benchmark, way):
    """Ranks of five positives of each anchor; as a test, of a few."""
    n, m = (256, 25000) if benchmark.enabled else (8, 250)
    rivals = torch.rand(n, m)
    thresholds = torch.rand(n, 5)
    columns = thresholds.unbind(1)
    if way == "ours":
        found = benchmark(lambda: ranking.ranks(thresholds, rivals, False)) - torch.arange(1, 6)
    elif way == "sums of masks":
        found = benchmark(lambda: [(rivals >= x[:, None]).sum(1) for x in columns])
        found = torch.stack(found, 1).sort(1).values
    else:
        found = m - benchmark(lambda: torch.searchsorted(rivals.sort(1).values, thresholds))
        found = found.sort(1).values
    expected = (rivals[:, None] >= thresholds[:, :, None]).sum(2)
    assert torch.equal(found, expected.sort(1).values)


@pytest.mark.parametrize("hand", [False, True], ids=["autograd", "by hand"])
def test_softplus_slopes(benchmark, hand):
    term = terms.softplus if hand else pair_term(F.softplus)
    z = 10 * torch.rand(512, 512) - 10
    if hand:
        slopes = benchmark(lambda: term.slope(z.clone()))
    else:
        (slopes,) = benchmark(lambda: term.gradients(z.clone(), [], torch.ones(512, 1)))
    torch.testing.assert_close(slopes, z.sigmoid())


@pytest.mark.parametrize("way", ["mask", "diagonal"])
def test_diagonal(benchmark, way):
    x = torch.randn(256, 256, requires_grad=True)
    mask = torch.eye(256, dtype=torch.bool)
    ends = torch.full((256,), -torch.inf)

    def once():
        z = 2 * x
        excluded = z.masked_fill(mask, -torch.inf) if way == "mask" else z.diagonal_scatter(ends)
        return torch.autograd.grad(excluded.exp().sum(), x)

    (slope,) = benchmark(once)
    torch.testing.assert_close(slope, (2 * (2 * x).exp()).masked_fill(mask, 0.0))


# --------------------------------------------------------------------------------- late interaction


def late_interaction(way, queries, documents):
    """(N, M) scores of sets of unit vectors: sums of maxima. ``product``: only the product, in
    blocks.
    """
    if way == "ours":
        return functional.set_similarity(queries, documents, "max_sum", normalize=False)
    if way == "product":
        block = queries
        for d in documents.split(2):
            for q in queries.split(16):
                block = products.matmul(q.flatten(0, 1), d.flatten(0, 1).T)
        return block
    return torch.einsum("nkd,mld->nkml", queries, documents).amax(3).sum(1)


@pytest.mark.parametrize("way", ["ours", "eager", "product"])
def test_late_interaction_step(benchmark, way):
    """Forward and backward of 64 sets of 32 vectors and 64 of 1024; as a test, of 20 sets each."""
    number = 64 if benchmark.enabled else 20  # two blocks of queries, ten of documents
    sets = [
        F.normalize(torch.randn(number, size, 128), dim=2).requires_grad_(way != "product")
        for size in (32, 1024)
    ]

    def step():
        scores = late_interaction(way, *sets)
        return [scores] if way == "product" else torch.autograd.grad(scores.sum(), sets)

    assert all(x.isfinite().all() for x in benchmark(step))


@pytest.mark.parametrize("way", ["ours", "eager", "maxsim_cpu"])
def test_late_interaction_scores(benchmark, way):
    """One query of 32 vectors against 1000 documents of 666; as a test, against 50."""
    number = 1000 if benchmark.enabled else 50
    query, documents = (F.normalize(torch.randn(size, 128), dim=-1) for size in (32, 666 * number))
    documents = documents.view(number, 666, 128)
    if way == "maxsim_cpu":
        package, arrays = pytest.importorskip(way), (query.numpy(), documents.numpy())
        scores = torch.from_numpy(benchmark(lambda: package.maxsim_scores(*arrays)))
    else:
        with torch.no_grad():
            scores = benchmark(lambda: late_interaction(way, query[None], documents)[0])
    torch.testing.assert_close(
        scores[:3], (documents[:3] @ query.T).amax(1).sum(1), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("way", ["ours", "PyTorch"])
def test_columns_of_scores(benchmark, way):
    """A copy of 200 columns of a matrix, as the rows of another; as a test, of a small one."""
    n, m = (5000, 25000) if benchmark.enabled else (50, 400)
    columns = torch.rand(n, m).T[:200]
    if way == "ours":
        copied = benchmark(lambda: contiguous_copy(columns, torch.float32))
    else:
        layout = torch.contiguous_format
        copied = benchmark(lambda: columns.to(torch.float32, copy=True, memory_format=layout))
    assert copied.is_contiguous() and torch.equal(copied, columns)
