"""Which GPUs ``engine="auto"`` takes the Triton engine on: those with a committed record."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from support.versions import needs

from benchmarks.gpu import record
from itrloss.engine import devices
from itrloss.engine.matrix import choose_engine

pytest.importorskip("triton")
pytestmark = needs("engine='triton'", 2, 8)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
HOPPER = devices.platform_of("9.0", "2.11.0+cu130", "3.6.0")
MANY = 2**24  # scores, which "auto" does not hold
BUDGET = 2**20


class OnCuda:
    """Embeddings on a GPU that is not there."""

    device = torch.device("cuda:1")
    dtype = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    """A Hopper with PyTorch 2.11.0 and Triton 3.6.0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    monkeypatch.setattr("triton.__version__", "3.6.0")
    devices.advise.cache_clear()


def test_the_table_is_that_of_the_committed_records():
    passed = set()
    for path in RESULTS.glob("gpu*.json"):
        found = record.load(path)
        if found.correct and not found.dry:
            passed.add(devices.platform_of(found.capability, found.torch, found.triton))
    assert passed == devices.VERIFIED


def test_versions_are_compared_without_their_fixes():
    assert HOPPER == ("9.0", "2.11", "3.6")
    assert devices.platform_of("8.6", "2.8.1", "3.4.0+git1") == ("8.6", "2.8", "3.4")


def test_auto_takes_triton_where_a_record_passed(gpu, monkeypatch, recwarn):
    monkeypatch.setattr(devices, "VERIFIED", {HOPPER})
    assert choose_engine("auto", MANY, BUDGET, OnCuda()) == "triton"
    assert not recwarn


@pytest.mark.parametrize(
    "other",
    [
        set(),
        {HOPPER._replace(capability="10.0")},
        {HOPPER._replace(torch="2.12")},
        {HOPPER._replace(triton="3.7")},
    ],
)
def test_auto_takes_tiles_elsewhere_and_says_once_how_to_opt_in(other, gpu, monkeypatch):
    monkeypatch.setattr(devices, "VERIFIED", other)
    with pytest.warns(UserWarning, match="9.0, PyTorch 2.11, Triton 3.6.*engine='triton' takes"):
        assert choose_engine("auto", MANY, BUDGET, OnCuda()) == "tiled"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_engine("auto", MANY, BUDGET, OnCuda()) == "tiled"
        assert choose_engine("triton", MANY, BUDGET, OnCuda()) == "triton"


def test_nothing_is_said_where_triton_would_not_be_taken(gpu, monkeypatch, recwarn):
    monkeypatch.setattr(devices, "VERIFIED", {HOPPER})
    assert choose_engine("auto", 2**20, BUDGET, OnCuda()) == "tiled"  # few scores
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_engine("auto", MANY, BUDGET, OnCuda()) == "tiled"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_engine("auto", MANY, BUDGET, OnCuda()) == "tiled"
    assert not recwarn
