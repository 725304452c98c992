"""The registry of benchmarks: losses, their baselines and inputs, and the suites of cases."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import itrloss

from . import eager


@dataclass(frozen=True)
class Case:
    """A loss, forward and backward, on inputs of one shape, type and device.

    Args:
        loss: a key of ``LOSSES``.
        shape: three numbers: images, texts and dimension; batch, memory entries and dimension;
            batch, heads and dimension; or batch, clusters and dimension, as ``KINDS`` says.
    """

    loss: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def kind(self) -> str:
        """A key of ``KINDS``."""
        return LOSSES[self.loss].kind

    @property
    def torch_device(self) -> torch.device:
        """The device."""
        return torch.device(self.device)

    def fields(self) -> dict[str, Any]:
        """Return the case's columns in a row of results."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"loss": self.loss, "shape": list(self.shape), "dtype": dtype, "device": self.device}

    def __str__(self) -> str:
        dtype = "" if self.dtype == torch.float32 else f" {str(self.dtype).removeprefix('torch.')}"
        return f"{self.loss} {'x'.join(map(str, self.shape))}{dtype}"


class Problem(NamedTuple):
    """The tensors of a case, and the functions that are called with them."""

    leaves: tuple[Tensor, ...]  # the embeddings, which require gradients
    arguments: tuple[Any, ...]  # arguments of our module, after the leaves
    plain_arguments: tuple[Any, ...]  # arguments of the eager function, after the leaves
    matmul_bound: Callable[[], None]  # only the matrix products of a dense loss and its gradient
    flops: int  # FLOPs of these products

    @property
    def trained(self) -> list[Tensor]:
        """All tensors that require gradients."""
        return [*self.leaves, *(x for x in self.plain_arguments if x.requires_grad)]


class Loss(NamedTuple):
    """Our module, the same loss in eager PyTorch with the same options, and the kind of its
    inputs.
    """

    ours: Callable[..., nn.Module]
    plain: Callable[..., Tensor]
    kind: str = "pairs"


def _dcl(diversity: str | None) -> Loss:
    ours = partial(itrloss.DiversityContrastiveLoss, diversity=diversity)  # type: ignore[arg-type]
    return Loss(ours, partial(eager.dcl, diversity=diversity))


LOSSES: dict[str, Loss] = {
    "dcl std": _dcl("std"),
    "dcl entropy": _dcl("entropy"),
    "dcl implicit": _dcl(None),
    "hal": Loss(itrloss.HubnessAwareLoss, eager.hal),
    "infonce": Loss(itrloss.InfoNCELoss, eager.infonce),
    "sigmoid": Loss(partial(itrloss.SigmoidLoss, learnable=False), eager.sigmoid),
    "triplet hardest": Loss(itrloss.TripletLoss, eager.triplet),
    "triplet all": Loss(
        partial(itrloss.TripletLoss, mining="all"), partial(eager.triplet, mining="all")
    ),
    "mdcl": Loss(itrloss.MemoryDiversityContrastiveLoss, eager.memory_dcl, "memory"),
    "uto": Loss(itrloss.UnifiedTrainingObjective, eager.uto, "memory"),
    "variance aware": Loss(itrloss.VarianceAwareLoss, eager.variance_aware, "sets"),
    "pgc": Loss(itrloss.PrototypeClassificationLoss, eager.prototype_classification, "prototypes"),
}


# ------------------------------------------------------------------------------------------- inputs


DIRECTIONS = 100  # these dimensions carry most of the embeddings' variance
_BLOCK = 2**28  # scores of matmul_bound in memory at a time


def embeddings(size: int, dim: int, seed: int = 0, per_image: int = 1) -> tuple[Tensor, Tensor]:
    """Return (N, D) images and (N per_image, D) texts: cosines of 0.2 for positives, 0 ± 0.1 for
    negatives.
    """
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(DIRECTIONS, dim, generator=generator) / 10
    v = torch.randn(size, DIRECTIONS, generator=generator)
    w = v.repeat_interleave(per_image, 0) + 5 * torch.randn(
        size * per_image, DIRECTIONS, generator=generator
    )
    noise = (torch.randn(len(x), dim, generator=generator) for x in (v, w))
    images, texts = (
        x @ mix / x.norm(dim=1, keepdim=True) * 10 + 0.1 * n
        for x, n in zip((v, w), noise, strict=True)
    )
    return images, texts


def _products(a: Tensor, b: Tensor, sides: int = 2) -> Callable[[], None]:
    """Return a function that computes ``a bᵀ`` in blocks of rows, and the gradient's products for a
    and (2 sides) b.
    """
    step = min(len(a), max(1, _BLOCK // len(b)))
    space = a.new_empty(step, len(b))

    def run() -> None:
        for part in a.split(step):
            scores = torch.mm(part, b.T, out=space[: len(part)])
            torch.mm(scores, b)
            if sides == 2:
                torch.mm(scores.T, part)

    return run


def _pairs(case: Case, n: int, m: int, dim: int) -> Problem:
    v, w = (x.to(case.device, case.dtype) for x in embeddings(n, dim, per_image=m // n))
    ids = (
        ()
        if n == m
        else (torch.arange(n, device=v.device), torch.arange(m, device=v.device) // (m // n))
    )
    return Problem((v, w), ids, ids, _products(v, w), 6 * n * m * dim)


def _memory(case: Case, n: int, entries: int, dim: int) -> Problem:
    v, w, v_keys, w_keys, images, texts = (
        x.to(case.device, case.dtype)
        for x in (
            *embeddings(n, dim),
            *embeddings(n, dim, seed=1),
            *embeddings(entries, dim, seed=2),
        )
    )
    memory = itrloss.CoupledMemory(entries, dim).to(case.device, case.dtype)
    memory.enqueue(images, texts, torch.arange(entries, device=v.device))
    # half in the memory
    ids = torch.randperm(2 * entries, generator=torch.Generator().manual_seed(0))[:n].to(v.device)
    by_images, by_texts = _products(v, memory.texts, sides=1), _products(w, memory.images, sides=1)

    def both() -> None:
        by_images()
        by_texts()

    plain_arguments = (v_keys, w_keys, memory.images, memory.texts, ids, memory.ids)
    return Problem(
        (v, w), (v_keys, w_keys, memory, ids, ids), plain_arguments, both, 8 * n * entries * dim
    )


def _sets(case: Case, n: int, heads: int, dim: int) -> Problem:
    images = torch.stack([embeddings(n, dim, seed)[0] for seed in range(heads)], 1).to(
        case.device, case.dtype
    )
    texts = embeddings(n, dim)[1].to(case.device, case.dtype)
    return Problem(
        (images, texts), (), (), _products(images.flatten(0, 1), texts), 6 * heads * n * n * dim
    )


def _prototypes(case: Case, n: int, clusters: int, dim: int) -> Problem:
    v, w = (x.to(case.device, case.dtype) for x in embeddings(n, dim))
    generator = torch.Generator().manual_seed(0)
    weight = ((torch.rand(clusters, dim, generator=generator) * 2 - 1) / dim**0.5).to(case.device)
    weight = weight.double() if case.dtype == torch.float64 else weight
    ids = torch.randint(0, clusters, (n,), generator=generator).to(v.device)
    both = torch.cat([v, w])
    bound = _products(both, weight.to(case.dtype))
    return Problem((v, w), (ids,), (nn.Parameter(weight), ids), bound, 12 * n * clusters * dim)


class Kind(NamedTuple):
    """What the three numbers of a shape mean, how many vectors the inputs have, and the function
    that makes them.
    """

    axes: str
    vectors: Callable[[int, int], int]
    make: Callable[..., Problem]


KINDS: dict[str, Kind] = {
    "pairs": Kind("images x texts x dim", lambda n, m: n + m, _pairs),
    "memory": Kind("batch x entries x dim", lambda n, entries: 4 * n + 2 * entries, _memory),
    "sets": Kind("batch x heads x dim", lambda n, heads: n * (heads + 1), _sets),
    "prototypes": Kind("batch x clusters x dim", lambda n, clusters: 2 * n + clusters, _prototypes),
}


def check_shape(case: Case) -> None:
    """Raise a ValueError if the loss cannot have this shape, or the inputs do not fit into this
    machine's memory.
    """
    n, m, dim = case.shape
    if case.kind == "pairs" and m % n:
        raise ValueError(
            f"shape: expected a whole number of texts per image, got {m} texts of {n} images"
        )
    if case.kind == "memory" and n > 2 * m:
        raise ValueError(
            f"shape: expected a batch of at most twice the memory's entries, got {n} and {m}"
        )
    if case.kind == "sets" and n < 3:
        raise ValueError(
            f"shape: expected at least 3 images, for a variance of their negatives, got {n}"
        )
    size, memory = 4 * KINDS[case.kind].vectors(n, m) * (dim + DIRECTIONS), _memory_of_machine()
    if 2 * size > memory:  # generating them needs twice the memory
        raise ValueError(
            f"shape: the inputs of {case} take {size / 1e9:.3g} GB, and the machine has "
            f"{memory / 1e9:.3g}"
        )


def _memory_of_machine() -> float:
    """Return the bytes of memory, infinity if the system does not report it."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return math.inf
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def problem(case: Case) -> Problem:
    """Return the inputs of a case, which are the same in every run."""
    check_shape(case)
    made = KINDS[case.kind].make(case, *case.shape)
    return made._replace(leaves=tuple(x.detach().requires_grad_() for x in made.leaves))


def module(case: Case, problem: Problem, engine: str = "auto") -> nn.Module:
    """Return our loss; the weights of PGC are those that the eager function gets."""
    make = LOSSES[case.loss].ours
    if case.kind != "prototypes":
        return make(engine=engine)
    made = make(case.shape[2], case.shape[1], engine=engine)
    made.weight = problem.plain_arguments[0]
    return made


def parse_shape(text: str, kind: str) -> tuple[int, ...]:
    """Return the three numbers of ``"1024x5120x512"``, or of ``"8192x512"`` with as many texts as
    images.
    """
    try:
        numbers = tuple(int(x) for x in text.split("x"))
    except ValueError:
        numbers = ()
    if kind == "pairs" and len(numbers) == 2:
        numbers = (numbers[0], *numbers)
    if len(numbers) != 3 or not all(1 <= x < 2**31 for x in numbers):
        raise ValueError(f"shape: expected {KINDS[kind].axes}, as in 128x4096x1024, got {text!r}")
    return numbers


# ------------------------------------------------------------------------------------------- suites


class Suite(NamedTuple):
    """Cases, and the variants that each is measured with."""

    about: str
    cases: tuple[Case, ...]
    variants: tuple[str, ...]  # keys of runner.VARIANTS and of peers.PEERS


def _cases(
    kind: str, shapes: Sequence[tuple[int, ...]], losses: Sequence[str] = (), **more: Any
) -> tuple[Case, ...]:
    names = losses or [name for name, loss in LOSSES.items() if loss.kind == kind]
    return tuple(Case(name, shape, **more) for shape in shapes for name in names)


_ALL = ("ours", "eager", "matmul_bound", "ours compiled", "eager compiled")
_CUDA = {"dtype": torch.bfloat16, "device": "cuda"}
SUITES: dict[str, Suite] = {
    "quick": Suite(
        "seconds: three losses, two sizes",
        _cases(
            "pairs", [(n, n, 256) for n in (128, 1024)], ["infonce", "dcl std", "triplet hardest"]
        ),
        ("ours", "eager", "matmul_bound"),
    ),
    "losses": Suite(
        "every loss of pairs, 1024 dimensions",
        _cases("pairs", [(n, n, 1024) for n in (128, 512, 2048, 8192)]),
        _ALL,
    ),
    "memory": Suite(
        "the losses with a memory",
        _cases("memory", [(128, 4096, 1024), (512, 16384, 512), (1024, 65536, 256)]),
        (*_ALL, "peers"),
    ),
    "more": Suite(
        "sets of embeddings, and classification by prototypes",
        _cases("sets", [(128, 6, 1024), (512, 6, 1024)])
        + _cases("prototypes", [(128, 20000, 1024)]),
        _ALL,
    ),
    "peers": Suite(
        "symmetric InfoNCE and SigLIP, compared with other libraries, 512 dimensions",
        _cases("pairs", [(n, n, 512) for n in (1024, 4096, 8192)], ["infonce", "sigmoid"])
        + _cases("pairs", [(1024, 5120, 512)], ["infonce"]),
        (*_ALL, "ours tiled", "peers"),
    ),
    "large": Suite(
        "InfoNCE where the matrix takes a gigabyte",
        _cases("pairs", [(16384, 16384, 512)], ["infonce"]),
        ("ours", "eager", "matmul_bound", "open_clip", "linear_cross_entropy chunked"),
    ),
    "cuda": Suite(
        "the Triton engine, bfloat16: every loss of pairs, M-DCL, large InfoNCE of one caption "
        "an image and of four",
        _cases(
            "pairs",
            [(n, m, d) for d in (512, 1024) for n, m in ((32768, 32768), (16384, 65536))],
            ["infonce"],
            **_CUDA,
        )
        + _cases("pairs", [(4096, 4096, 1024)], **_CUDA)
        + _cases("memory", [(128, 4096, 1024), (4096, 65536, 1024)], **_CUDA),
        (*_ALL, "ours graphed", "ours dense", "ours triton", "ours tiled", "peers"),
    ),
    "huge": Suite(
        "InfoNCE of 262144 pairs on a CUDA device, bfloat16: a matrix of 128 GiB, which is never "
        "stored",
        _cases("pairs", [(262144, 262144, 512)], ["infonce"], **_CUDA),
        ("ours triton", "matmul_bound"),
    ),
}
