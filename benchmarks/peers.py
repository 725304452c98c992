"""Other libraries' losses, called as in their documentation; each library is imported where it is
used.

PyTorch's own ``torch.nn.functional.linear_cross_entropy`` is among them; versions before 2.13 do
not have it.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import Case, Problem

TEMPERATURE = 0.07  # options of InfoNCELoss
SCALE, BIAS = 10.0, -10.0  # options of SigmoidLoss
INSTALL = "install itrloss with the extra 'bench'"  # where a package is missing
_MOST_BYTES = 8 * 2**30  # memory that a peer may take beyond its inputs


class Unavailable(Exception):
    """A peer cannot run a case here; the message has the reason."""


Make = Callable[[Case, Problem], Callable[..., Tensor]]


class Peer(NamedTuple):
    """``make`` returns a loss of the leaves whose gradient is that of ours, or raises
    :class:`Unavailable`.
    """

    losses: tuple[str, ...]
    make: Make
    # False: a different loss over equally many scores
    is_same: Callable[[Case], bool] = lambda case: True


def _module(name: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Unavailable(f"{package} cannot be imported: {INSTALL} ({error})") from error


def _open_clip() -> ModuleType:
    """Return the module of its losses only, because the package imports torchvision and timm."""
    name = "benchmarks._open_clip_loss"
    if name not in sys.modules:
        package = importlib.util.find_spec("open_clip")
        if package is None or not package.submodule_search_locations:
            raise Unavailable(f"open_clip_torch is not installed: {INSTALL}")
        path = Path(package.submodule_search_locations[0]) / "loss.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
    return sys.modules[name]


def _is_square(case: Case) -> bool:
    return case.shape[0] == case.shape[1]


def _one_to_one(case: Case) -> None:
    if not _is_square(case):
        raise Unavailable("knows one positive per anchor")


def _on_cuda(case: Case) -> None:
    if case.torch_device.type != "cuda":
        raise Unavailable("runs on CUDA only")


def _units(images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    return F.normalize(images, dim=1), F.normalize(texts, dim=1)


def _clip(case: Case, problem: Problem) -> Callable[..., Tensor]:
    _one_to_one(case)
    loss = _open_clip().ClipLoss(cache_labels=True)
    return lambda images, texts: 2 * loss(*_units(images, texts), 1 / TEMPERATURE)


def _siglip(case: Case, problem: Problem) -> Callable[..., Tensor]:
    _one_to_one(case)
    loss = _open_clip().SigLipLoss(cache_labels=True)
    return lambda images, texts: loss(*_units(images, texts), SCALE, BIAS)


def _siglip_kernel(case: Case, problem: Problem) -> Callable[..., Tensor]:
    _on_cuda(case)
    _one_to_one(case)
    if case.dtype == torch.float64:
        raise Unavailable("does not know float64")
    function = _module("siglip_kernel", "siglip-kernel").fused_siglip_loss
    log_scale, bias = (torch.tensor(x, device=case.device) for x in (math.log(SCALE), BIAS))

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        v, w = (x.to(case.dtype) for x in _units(images, texts))
        return function(v, w, log_scale, bias)

    return loss


def _twice(
    case: Case, cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Callable[..., Tensor]:
    """Return a symmetric loss, from a cross-entropy over a linear layer whose weight is the other
    side's embeddings.
    """
    _one_to_one(case)
    target = torch.arange(case.shape[0], device=case.device)

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        v, w = (x.to(case.dtype) for x in _units(images, texts))
        return cross_entropy(v / TEMPERATURE, w, target) + cross_entropy(w / TEMPERATURE, v, target)

    return loss


def _torch_linear(chunked: bool) -> Make:
    def make(case: Case, problem: Problem) -> Callable[..., Tensor]:
        if not hasattr(F, "linear_cross_entropy") or (
            chunked and not hasattr(torch.nn, "LinearCrossEntropyOptions")
        ):
            raise Unavailable(f"torch {torch.__version__} does not have it")
        function: Any = F.linear_cross_entropy
        options = {"options": torch.nn.LinearCrossEntropyOptions()} if chunked else {}
        return _twice(case, lambda x, weight, target: function(x, weight, target, **options))

    return make


def _cce(case: Case, problem: Problem) -> Callable[..., Tensor]:
    _on_cuda(case)
    if case.dtype not in (torch.bfloat16, torch.float16):
        raise Unavailable("knows half precision only")
    return _twice(case, _module("cut_cross_entropy", "cut-cross-entropy").linear_cross_entropy)


def _liger(case: Case, problem: Problem) -> Callable[..., Tensor]:
    _on_cuda(case)
    function = _module(
        "liger_kernel.transformers.functional", "liger-kernel"
    ).liger_fused_linear_cross_entropy
    return _twice(case, function)


def _inf_cl(case: Case, problem: Problem) -> Callable[..., Tensor]:
    _on_cuda(case)
    _one_to_one(case)
    if case.shape[2] % 256:
        raise Unavailable("needs a dimension that 256 divides")
    flash = _module("inf_cl", "inf-cl").cal_flash_loss

    def loss(images: Tensor, texts: Tensor) -> Tensor:
        v, w = (x.float() for x in _units(images, texts))  # it supports float32 only
        return flash(v, w, scale=1 / TEMPERATURE).mean() + flash(w, v, scale=1 / TEMPERATURE).mean()

    return loss


def _fits(size: int) -> None:
    if size > _MOST_BYTES:
        raise Unavailable(f"would allocate some {size / 1e9:.2g} GB")


def _metric_learning(name: str, bytes_of: Callable[[int, int], int]) -> Make:
    def make(case: Case, problem: Problem) -> Callable[..., Tensor]:
        n, m = case.shape[:2]
        _fits(bytes_of(n, m))
        loss = getattr(_module("pytorch_metric_learning.losses", "pytorch-metric-learning"), name)(
            TEMPERATURE
        )
        # Two tensors, because passing the same one twice would mean that the embeddings are
        # identical.
        rows, cols = problem.arguments or [torch.arange(n, device=case.device) for _ in range(2)]
        return lambda images, texts: (
            loss(images, rows, ref_emb=texts, ref_labels=cols)
            + loss(texts, cols, ref_emb=images, ref_labels=rows)
        )

    return make


def _xbm(case: Case, problem: Problem) -> Callable[..., Tensor]:
    losses = _module("pytorch_metric_learning.losses", "pytorch-metric-learning")
    n, entries, dim = case.shape
    _fits(96 * n * entries)
    _, _, memory, ids, _ = problem.arguments
    queues = []
    for keys in (memory.texts, memory.images):
        queue = losses.CrossBatchMemory(losses.SupConLoss(TEMPERATURE), dim, entries)
        queue.embedding_memory, queue.label_memory = keys.clone(), memory.ids.clone()
        queue.has_been_filled = True
        queues.append(queue)
    return lambda images, texts, *_: queues[0](images, ids) + queues[1](texts, ids)


_PML = "pytorch-metric-learning"
PEERS: dict[str, Peer] = {
    "open_clip": Peer(("infonce",), _clip),
    "open_clip siglip": Peer(("sigmoid",), _siglip),
    "siglip-kernel": Peer(("sigmoid",), _siglip_kernel),
    "linear_cross_entropy": Peer(("infonce",), _torch_linear(chunked=False)),
    "linear_cross_entropy chunked": Peer(("infonce",), _torch_linear(chunked=True)),
    "cut-cross-entropy": Peer(("infonce",), _cce),
    "liger-kernel": Peer(("infonce",), _liger),
    "inf-cl": Peer(("infonce",), _inf_cl),
    # NTXent forms all combinations of positive and negative pairs, SupCon the matrix; bytes as
    # measured.
    f"{_PML} ntxent": Peer(
        ("infonce",), _metric_learning("NTXentLoss", lambda n, m: 48 * m * n * m)
    ),
    # With several positives per anchor, SupCon's denominator includes all of them.
    f"{_PML} supcon": Peer(
        ("infonce",), _metric_learning("SupConLoss", lambda n, m: 96 * n * m), _is_square
    ),
    f"{_PML} xbm": Peer(("mdcl",), _xbm, lambda case: False),
}
