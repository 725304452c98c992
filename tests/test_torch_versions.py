"""What older versions of PyTorch get in place of what they lack, and what is refused there.

The replacements are run on the PyTorch that is there, and compared with what it has.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.processes import run
from support.versions import needs
from torch import Tensor

import itrloss
from itrloss import torch_versions
from itrloss.checks import arrays, is_sharded


def as_on(version: str) -> ModuleType:
    """Return the module as it is on another version."""
    spec = importlib.util.spec_from_file_location("older", torch_versions.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", version)
        patch.setattr(Tensor, "_storage", torch_versions.untyped_storage, raising=False)
        spec.loader.exec_module(module)
    sys.modules["older"] = module  # where the compiler looks for it
    return module


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("1.13.0a0", (1, 13)),
        ("1.13.1+cu117", (1, 13)),
        pytest.param("2.10.0.dev20260101", (2, 10), marks=needs("its names", 2, 10)),
        pytest.param("2.13.0+cpu", (2, 13), marks=needs("its names", 2, 13)),
    ],
)
def test_versions_are_numbers(text: str, version: tuple[int, int]):
    assert version == as_on(text).VERSION


# What is PyTorch's own from a version on, and a replacement or left out before it.
FIRST = {
    (2, 0): lambda module: module.functional_call is torch.func.functional_call,
    (2, 1): lambda module: bool(module.cpu_capability()),
    (2, 4): lambda module: module.aminmax is torch.aminmax,
    (2, 6): lambda module: module.current_accelerator() == torch.device("mps"),
    (2, 8): lambda module: module.is_compiling is torch.compiler.is_compiling,
    (2, 9): lambda module: module.HAS_FP32_PRECISION,
    (2, 11): lambda module: module.ADDMM_WIDENS,
}
VERSIONS = [(1, 13), *[(2, minor) for minor in range(12)]]


@needs("the names of all", 2, 11)
def test_the_first_version_that_has_each_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    for version in VERSIONS:
        module = as_on(".".join([str(x) for x in (*version, 0)]))
        for first, is_own in FIRST.items():
            assert is_own(module) == (version >= first), (first, version)


@needs("the names of 2.5", 2, 5)
@pytest.mark.parametrize("available", [False, True])
def test_the_accelerator_of_older_versions_is_cuda(available: bool, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    expected = torch.device("cuda") if available else None
    assert as_on("2.5.1").current_accelerator() == expected


@needs("the names of 2.4", 2, 4)
@pytest.mark.parametrize(("version", "has_tensors"), [("2.3.1", False), ("2.4.0", True)])
def test_older_versions_exchange_lists_on_the_cpu(version: str, has_tensors: bool, monkeypatch):
    called = []
    names = ("all_gather", "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor")
    for name in names:
        call = functools.partial(lambda name, *args, **options: called.append((name, args)), name)
        monkeypatch.setattr(dist, name, call)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    for name in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.delattr(dist, name, raising=False)
    module = as_on(version)
    for device, takes_tensors in (("cpu", has_tensors), ("meta", True)):
        called.clear()
        result, x = torch.ones(2, 3, device=device)
        module.all_gather_single(result, x, group=None)
        module.reduce_scatter_single(result, x, group=None)
        assert [name for name, _ in called] == list(names[takes_tensors::2])
        if takes_tensors:
            assert all(args[0] is result and args[1] is x for _, args in called)


def test_the_version_that_is_needed_is_enough():
    torch_versions.require_version("this", *torch_versions.VERSION)
    major, minor = torch_versions.VERSION
    with pytest.raises(RuntimeError, match=rf"^this needs PyTorch {major}.{minor + 1} or newer"):
        torch_versions.require_version("this", major, minor + 1)


def test_a_compiled_loss_says_which_version_it_needs():
    message = "^torch.compile: a compiled loss needs PyTorch 2.8 or newer"
    with pytest.raises(RuntimeError, match=message):
        as_on("1.13.1").compiling_needs_torch_2_8()


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint64])
def test_arrays_without_a_sign_where_torch_knows_bytes_alone(kind: type, monkeypatch):
    monkeypatch.setattr(arrays, "UINT64", None)
    expected = torch.uint8 if kind is np.uint8 else torch.int64
    assert arrays.from_numpy(np.array([1, 2], kind)).dtype == expected


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_autocast_of_each_kind_of_device(enabled: bool):
    older = as_on("1.13.1")
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        for kind in ("cpu", "cuda"):
            assert older.is_autocast_available(kind)
            assert older.is_autocast_enabled(kind) == (enabled and kind == "cpu")
        assert older.get_autocast_dtype("cpu") == torch.bfloat16
    assert older.get_autocast_dtype("cuda") == torch.float16
    assert not older.is_autocast_available("abacus")


@pytest.mark.parametrize("numbers", [[0.5, -2.0, 3.0], [1.0, torch.nan, 2.0], [-torch.inf, 1.0]])
def test_extremes(numbers: list[float]):
    x = torch.tensor(numbers, dtype=torch.float16)
    found = torch.stack(as_on("1.13.1").aminmax(x))
    expected = torch.stack([x.float().amin(), x.float().amax()])
    torch.testing.assert_close(found.float(), expected, equal_nan=True)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_is_called_with_other_parameters():
    model = torch.nn.Linear(3, 2)
    other = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    x = torch.randn(4, 3)
    expected = x @ other["weight"].T + other["bias"]
    for version in ("1.13.1", torch.__version__):
        torch.testing.assert_close(as_on(version).functional_call(model, other, (x,)), expected)


def exchanged(rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Return what an older version and this one exchange."""
    found = []
    own = torch.arange(8).reshape(4, 2).to(dtype) + 10 * rank
    for module in (as_on("1.13.1"), torch_versions):
        whole = torch.empty(8, 2, dtype=dtype)
        module.all_gather_single(whole, own, group=None)
        part = torch.empty(2, 2, dtype=dtype)
        module.reduce_scatter_single(part, own, group=None)
        found += [whole, part, own.clone()]
        assert "cpu" in module.backends(dist.group.WORLD)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_processes_exchange_the_same(dtype: torch.dtype, tmp_path):
    parts = []
    for results in run(exchanged, tmp_path, dtype):
        for older, newer in zip(results[:3], results[3:], strict=True):
            assert torch.equal(older, newer)
        parts.append(results[1])
    own = torch.arange(8).reshape(4, 2).to(dtype)
    assert torch.equal(torch.cat(parts), 2 * own + 10)
    assert torch.equal(results[0], torch.cat([own, own + 10]))


def small_loss(older: ModuleType, x: Tensor) -> Tensor:
    return x + 1 if older.is_compiling() else x.exp().sum()


@pytest.mark.slow
@needs("torch.compile", 2, 4)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_older_compilers_are_refused(fullgraph: bool):
    older = as_on("2.7.1")
    x = torch.ones(3)
    assert small_loss(older, x) == x.exp().sum()
    compiled = torch.compile(lambda x: small_loss(older, x), backend="eager", fullgraph=fullgraph)
    with pytest.raises(Exception, match=r"needs PyTorch 2\.8|compiling_needs_torch_2_8"):
        compiled(x)
    assert small_loss(older, x) == x.exp().sum()


REFUSED = {
    r"^Graphed needs PyTorch 2\.8 or newer, got": lambda: itrloss.Graphed(itrloss.InfoNCELoss()),
    r"^a DTensor, as of FSDP2, needs PyTorch 2\.6": lambda: is_sharded(
        types.SimpleNamespace(device_mesh=None)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_needs_a_newer_version_says_so(message: str, monkeypatch):
    monkeypatch.setattr(torch_versions, "VERSION", (1, 13))
    with pytest.raises(RuntimeError, match=message):
        REFUSED[message]()


@pytest.mark.parametrize("version", [(2, 7), (2, 8), (2, 9)])
def test_kernels_need_a_version(version: tuple[int, int], monkeypatch):
    from itrloss.engine import devices, matrix

    old = version < (2, 8)
    monkeypatch.setattr(matrix, "VERSION", version)
    monkeypatch.setattr(devices, "VERSION", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ImportError if old else ValueError):
        itrloss.InfoNCELoss(engine="triton")(torch.ones(2, 3), torch.ones(2, 3))
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: asked.append(1) or (5, 0)
    )
    assert not devices.is_verified(torch.device("cuda"))
    assert len(asked) == (not old)


def test_the_engine_triton_says_so(monkeypatch):
    monkeypatch.setattr("itrloss.engine.matrix.VERSION", (2, 7))
    with pytest.raises(ImportError, match=r"^engine='triton' needs PyTorch 2\.8 or newer, and Tri"):
        itrloss.InfoNCELoss(engine="triton")(torch.ones(2, 3), torch.ones(2, 3))


def test_checks_of_compiled_losses_are_skipped(monkeypatch):
    from itrloss.testing import check_loss, subject

    monkeypatch.setattr(subject, "VERSION", (2, 7))
    report = check_loss(itrloss.InfoNCELoss(), only=["compiled", "compiled_as_one_graph"])
    assert report.names("skipped") == ["compiled", "compiled_as_one_graph"]
    assert all("2.8" in outcome.reason for outcome in report.outcomes)
