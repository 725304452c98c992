"""Fixtures of all tests: small tiles, poisoned buffers, and inputs that used to fail."""

from __future__ import annotations

import gc
import os
import zlib
from collections import Counter

import numpy as np
import pytest
import torch

# kernels run on the CPU, in Triton's interpreter; read at Triton's import
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from support.versions import HAS_TRITON, compile_, require, what_is_missing

from itrloss.engine import inputs, pair_scores, products

# Older versions compile no loss: what compiles one is skipped.
torch.compile = compile_

# Matrices are small, and the workers of pytest-xdist share the cores, so more threads would only
# compete.
torch.set_num_threads(1)

# The collector would visit all modules and tests again and again: 5 of 13 seconds of collection,
# and 3 in 39 of tests that compile (``pytest --collect-only``, with a callback in ``gc.callbacks``
# that adds up the time).
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
    gc.set_threshold(100_000)


# `--fast` runs so many cases of each test with parameters, and each loss, re-ranker or answer once.
FAST_CASES = 3


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    return (yield from skipped_where_something_is_missing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    return (yield from skipped_where_something_is_missing())


def skipped_where_something_is_missing():
    try:
        return (yield)
    except Exception as error:
        reason = what_is_missing(error)
        if reason:
            pytest.skip(reason)
        raise


def pytest_report_header():
    if not HAS_TRITON:
        return "tests/engine/test_triton_*.py and test_autocast.py are left out: no Triton 3.4"
    return None


def pytest_addoption(parser):
    parser.addoption(
        "--fast",
        action="store_true",
        help="leave out slow tests, and most cases of each test with parameters",
    )


def pytest_collection_modifyitems(config, items):
    # who names tests, with -k or file::test, wants all of their cases
    named = config.option.keyword or any("::" in argument for argument in config.args)
    if config.getoption("fast") and not named:
        chosen = fast_part(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = [item for item in items if item in chosen]
    # Begin with the longest test, so that no worker of pytest-xdist is left alone with it at the
    # end.
    items.sort(key=lambda item: item.name != "test_kernels_compile_for_gpus")


def fast_part(items):
    """Return the set of tests that `--fast` runs.

    The cases of a test are a random sample, the same in each run: neighbours in a grid of
    parameters differ in one parameter only. A parameter ``name`` is that of an entry of a registry,
    each of which has code of its own, as has each error, whose ``message`` is a parameter.
    """
    chosen = set()
    cases = Counter()
    named = set()
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        if item.get_closest_marker("slow") is not None:
            continue
        test, _, parameters = item.nodeid.partition("[")
        params = item.callspec.params if parameters else {}
        name = params.get("name", params.get("message"))
        is_first = name is not None and (test, name) not in named
        if is_first or cases[test] < FAST_CASES:
            cases[test] += 1
            named.add((test, name))
            chosen.add(item)
    return chosen


@pytest.fixture
def small_tiles(monkeypatch):
    """Many tiles even for small inputs, with ragged ends on both axes, and few pairs at once."""
    monkeypatch.setitem(inputs.TILE, "cpu", (20, 5))
    monkeypatch.setattr(pair_scores, "GATHERED", 20)


@pytest.fixture
def by_blas(monkeypatch):
    """Products as on machines where oneDNN is not the faster library."""
    monkeypatch.setattr(products, "prefers_onednn", lambda: False)


@pytest.fixture
def by_onednn(monkeypatch):
    """All float32 products by oneDNN, including small ones."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("PyTorch was built without oneDNN")
    require("torch.ops.mkldnn._linear_pointwise", 2, 1)
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "_SHAPES", 10**6)
    for limit in ("LARGE", "_THIN"):
        monkeypatch.setattr(products, limit, 1)


@pytest.fixture
def poisoned(monkeypatch):
    """``torch.empty`` filled with nan, so that tests detect entries that are never written."""

    def nan_filled(make):
        def made(*args, **kwargs):
            x = make(*args, **kwargs)
            return x.fill_(float("nan")) if x.is_floating_point() else x

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, nan_filled(getattr(owner, name)))


@pytest.fixture
def photographs(tmp_path):
    """A folder like Flickr8k's: features of pictures of things, and captions that name them."""
    words = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen")
    draw = np.random.default_rng(0)
    for split, size in (("train", 60), ("dev", 20), ("test", 20)):
        things = draw.random((size, len(words))) < 0.3
        features = things + 0.1 * draw.random(things.shape)
        np.save(tmp_path / f"{split}_global.npy", np.tile(features, 4).astype(np.float16))
        captions = []
        for row in things:
            named = [word for word, here in zip(words, row, strict=True) if here]
            captions += 5 * [" ".join(named) or "nothing"]
        (tmp_path / f"{split}_caps.txt").write_text("\n".join(captions) + "\n")
    return tmp_path
