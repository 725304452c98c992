"""Matrix products by both of PyTorch's libraries."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from support.losses_registry import IN_LOOPS as LOSSES
from support.versions import needs

import itrloss
from itrloss.engine import products

# rows, summands, columns
SHAPES = ((1, 1, 1), (3, 5, 7), (40, 3, 70), (70, 33, 2), (64, 200, 64), (5, 300, 200))


def layouts(n, m):
    """Random matrices of this shape in several memory layouts."""
    generator = torch.Generator().manual_seed(n * m)
    x = torch.randn(n, m, generator=generator)
    yield "rows", x
    yield "columns", x.T.contiguous().T
    yield "padded", torch.cat((x, x), 1)[:, :m]
    yield "strided", torch.stack((x, x), 2)[:, :, 0]
    yield "windows", x.flatten().repeat(2).unfold(0, m, 1)[:n]
    yield "expanded", x[:1].expand(n, m)


@pytest.mark.parametrize("library", ["by_blas", "by_onednn"])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_all_layouts(shape, library, request):
    request.getfixturevalue(library)
    n, k, m = shape
    for _, a in layouts(n, k):
        for _, b in layouts(k, m):
            wanted = a.double() @ b.double()
            sums = torch.ones(n, m)
            products.add_matmul_(sums, a, b)
            for got in (
                products.matmul(a, b),
                products.matmul(a, b, out=torch.empty(n, m)),
                sums - 1,
            ):
                assert got.is_contiguous()
                torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=2e-5)


def asks_onednn(a, b):
    with patch.object(products, "_onednn", wraps=products._onednn) as onednn:
        got = products.matmul(a, b)
    torch.testing.assert_close(got, a @ b, rtol=1e-4, atol=1e-4)
    return onednn.called


@pytest.mark.parametrize("shapes", [((3, 4), (4, 2)), ((2, 3, 4), (2, 4, 2))])
def test_a_products_gradients_are_differentiable(shapes):
    factors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(products.product, factors)
    assert torch.autograd.gradgradcheck(products.product, factors)


@needs("torch.ops.mkldnn._linear_pointwise", 2, 1)
def test_what_onednn_is_asked_for(monkeypatch):
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "_seen", set())
    large = torch.randn(200, 200)
    small = torch.randn(20, 20)
    assert asks_onednn(large, large)
    assert not asks_onednn(small, small)
    assert not asks_onednn(large.double(), large.double())
    assert not asks_onednn(torch.randn(8, 2048), torch.randn(2048, 256))  # bound by memory
    assert not asks_onednn(torch.randn(512, 8), torch.randn(8, 1024))
    assert asks_onednn(large.T, large)
    with monkeypatch.context() as disabled:
        disabled.setattr(torch.backends, "mkldnn", SimpleNamespace(enabled=False))
        assert not asks_onednn(large, large)
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)
    assert not asks_onednn(large, large)


def test_a_few_dimensions_of_embeddings_take_no_longer_than_a_copy_of_them(by_onednn, monkeypatch):
    """oneDNN has no fast product of strided matrices: it took 1.3 s in place of half a
    millisecond.
    """
    a = torch.randn(512, 768)
    b = torch.randn(2048, 768)

    def seconds(x, y):
        times = []
        for _ in range(3):
            start = time.perf_counter()
            products.matmul(x, y.T)
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(a[:, 64:128], b[:, 64:128]) < 20 * seconds(
        a[:, :64].contiguous(), b[:, :64].contiguous()
    )


@needs("torch.ops.mkldnn._linear_pointwise", 2, 1)
def test_onednn_is_given_so_many_shapes_and_no_more(monkeypatch):
    """oneDNN caches something for each shape."""
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "_seen", set())
    monkeypatch.setattr(products, "_SHAPES", 3)
    b = torch.randn(200, 200)
    asked = [asks_onednn(torch.randn(n, 200), b) for n in (100, 101, 102, 103, 104, 100, 102, 104)]
    assert asked == [True, True, True, False, False, True, True, False]


def test_gradients_and_scores_are_contiguous(by_onednn):
    v, w = (torch.randn(30, 20, requires_grad=True) for _ in range(2))
    LOSSES["infonce"].make(engine="dense")(v, w).backward()
    assert v.grad.is_contiguous()
    assert w.grad.is_contiguous()
    scores = itrloss.Similarity(
        torch.randn(200, 300).T, torch.randn(300, 200), engine="dense"
    ).scores()
    assert scores.is_contiguous()


@pytest.mark.parametrize(
    ("capability", "maker", "built", "wanted"),
    [
        ("AVX512", "AuthenticAMD", True, True),
        ("AVX512", "GenuineIntel", True, False),
        ("AVX2", "AuthenticAMD", True, False),
        ("AVX512", "AuthenticAMD", False, False),
    ],
)
def test_the_rule_goes_by_the_processor_and_by_no_clock(
    capability, maker, built, wanted, monkeypatch, tmp_path
):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nvendor_id : {maker}\n")
    monkeypatch.setattr(products, "Path", lambda _: cpuinfo)
    monkeypatch.setattr(products, "cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: built)
    rule = products.prefers_onednn.__wrapped__
    assert rule() is wanted
    cpuinfo.unlink()  # on another operating system
    assert rule() is False


def test_the_rule_is_looked_up_once_and_moves_no_random_number():
    state = torch.get_rng_state()
    products.prefers_onednn.cache_clear()
    assert products.prefers_onednn() is products.prefers_onednn()
    assert products.prefers_onednn.cache_info().misses == 1
    assert torch.equal(torch.get_rng_state(), state)
    source = Path(products.__file__).read_text()
    assert "perf_counter" not in source
    assert "import time" not in source
