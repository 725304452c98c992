"""Matrix products by either of PyTorch's libraries."""

from __future__ import annotations

import shutil

import pytest
import torch
from cases import embeddings, make_ids
from test_losses import make
from torch.utils._python_dispatch import TorchDispatchMode

import itrloss
from itrloss.engines import products

SHAPES = ((1, 1, 1), (3, 5, 7), (40, 3, 70), (70, 33, 2), (64, 200, 64), (5, 300, 200))  # rows, summands, columns


def layouts(n, m):
    """A matrix of ones' size, as it may lie in memory."""
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
            for got in (products.matmul(a, b), products.matmul(a, b, out=torch.empty(n, m)), sums - 1):
                assert got.is_contiguous()
                torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=2e-5)


class Asked(TorchDispatchMode):
    """The names of the operators that were called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def asks_onednn(a, b):
    with Asked() as asked:
        got = products.matmul(a, b)
    torch.testing.assert_close(got, a @ b, rtol=1e-5, atol=1e-4)
    return "_linear_pointwise" in asked.names


def test_what_onednn_is_asked_for(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "_shapes", set())
    large, small = torch.randn(200, 200), torch.randn(20, 20)
    assert asks_onednn(large, large)
    assert not asks_onednn(small, small)
    assert not asks_onednn(large.double(), large.double())
    assert not asks_onednn(torch.randn(8, 2048), torch.randn(2048, 256))  # bound by memory
    assert not asks_onednn(torch.randn(512, 16), torch.randn(16, 512))
    with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
        assert not asks_onednn(large, large)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: False)
    assert not asks_onednn(large, large)


def test_onednn_is_given_so_many_shapes_and_no_more(monkeypatch):
    """It keeps something for each."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(products, "_shapes", set())
    monkeypatch.setattr(products, "_SHAPES", 3)
    b = torch.randn(200, 200)
    asked = [asks_onednn(torch.randn(n, 200), b) for n in (100, 101, 102, 103, 104, 100, 102, 104)]
    assert asked == [True, True, True, False, False, True, True, False]


def test_a_gradient_is_never_lost(by_onednn):
    for needs in ((True, False), (False, True), (True, True)):
        a, b = (torch.randn(n, m, requires_grad=x) for n, m, x in ((5, 6, needs[0]), (6, 7, needs[1])))
        products.matmul(a, b).sum().backward()
        assert not needs[0] or torch.allclose(a.grad, b.sum(1).expand(5, 6))
        assert not needs[1] or torch.allclose(b.grad, a.sum(0)[:, None].expand(6, 7))


def test_gradients_and_scores_are_contiguous(by_onednn):
    v, w = (torch.randn(30, 20, requires_grad=True) for _ in range(2))
    make("infonce", engine="dense")(v, w).backward()
    assert v.grad.is_contiguous() and w.grad.is_contiguous()
    scores = itrloss.Similarity(torch.randn(200, 300).T, torch.randn(300, 200), engine="dense").scores()
    assert scores.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_type_is_no_matter(dtype, monkeypatch):
    monkeypatch.setattr(products, "_least_seconds", lambda *calls: [float(call().numel()) for call in calls])
    torch.set_default_dtype(dtype)
    try:
        assert products._measured.__wrapped__() is False
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_faster_library_is_measured_once(monkeypatch):
    measure = products._measured.__wrapped__
    for blas, onednn, faster in ((2.0, 1.0, True), (1.1, 1.0, False), (1.0, 2.0, False)):
        monkeypatch.setattr(products, "_least_seconds", lambda *_, x=(blas, onednn): x)
        assert measure() is faster
    with monkeypatch.context() as without:
        without.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        without.setattr(products, "_least_seconds", lambda *_: (2.0, 1.0))
        assert measure() is False
    state = torch.get_rng_state()
    products._measured.cache_clear()
    assert products.onednn_is_faster() is products.onednn_is_faster()
    assert products._measured.cache_info().misses == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_the_least_of_the_measured_times_counts(monkeypatch):
    ticks = iter([0.0, 5.0, 0.0, 1.0, 0.0, 2.0, 0.0, 4.0])
    monkeypatch.setattr(products.time, "perf_counter", lambda: next(ticks))
    assert products._least_seconds(lambda: torch.ones(1), lambda: torch.ones(1), repeats=2) == [2.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
def test_compiled_losses_ask_the_faster_library_too(engine, backend, by_onednn, monkeypatch):
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile's default backend needs a C++ compiler")
    made, linear = [], products._linear
    monkeypatch.setattr(products, "_linear", lambda *x: made.append(x) or linear(*x))
    torch._dynamo.reset()
    loss = make("dcl", engine=engine)
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for n, m in ((8, 11), (12, 9)):
        results = []
        for f in (loss, compiled):
            v, w = (x.requires_grad_() for x in embeddings(n, m, dtype=torch.float32))
            f(v, w, *make_ids("random", n, m)).backward()
            v.grad = w.grad = None
            made.clear()  # of compilation
            f(v, w, *make_ids("random", n, m)).backward()
            results.append((v.grad, w.grad, torch.tensor(len(made))))
        assert made
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
