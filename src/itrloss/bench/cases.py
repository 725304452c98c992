"""The registry of what is measured: losses, what they are compared with, their inputs, and the suites of cases."""

from __future__ import annotations

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
        loss: a name of ``itrloss.bench.cases.LOSSES``.
        shape: three numbers: images, texts and dimension; batch, memory entries and dimension; batch, heads and
            dimension; or batch, clusters and dimension, as ``KINDS`` says.
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
    def where(self) -> torch.device:
        """The device."""
        return torch.device(self.device)

    def named(self) -> dict[str, Any]:
        """As it stands in the rows of results."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"loss": self.loss, "shape": list(self.shape), "dtype": dtype, "device": self.device}

    def __str__(self) -> str:
        kind = "" if self.dtype == torch.float32 else f" {str(self.dtype).removeprefix('torch.')}"
        return f"{self.loss} {'x'.join(map(str, self.shape))}{kind}"


class Problem(NamedTuple):
    """The tensors of a case, and what is called with them."""

    leaves: tuple[Tensor, ...]  # the embeddings, which get a gradient
    given: tuple[Any, ...]  # to our module, after the leaves
    given_plain: tuple[Any, ...]  # to the eager function, after the leaves
    products: Callable[[], None]  # matrix products of a dense loss and its gradient, and nothing else: the floor
    flops: int  # of these

    @property
    def trained(self) -> list[Tensor]:
        """All that gets a gradient."""
        parameters = [p for x in self.given if isinstance(x, nn.Module) for p in x.parameters()]
        others = [x for x in self.given_plain if isinstance(x, Tensor) and x.requires_grad]
        return [*self.leaves, *parameters, *others]


class Loss(NamedTuple):
    """Our module, the same in eager PyTorch with the same options, and the kind of its inputs."""

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
    "triplet all": Loss(partial(itrloss.TripletLoss, mining="all"), partial(eager.triplet, mining="all")),
    "mdcl": Loss(itrloss.MemoryDiversityContrastiveLoss, eager.memory_dcl, "memory"),
    "uto": Loss(itrloss.UnifiedTrainingObjective, eager.uto, "memory"),
    "variance aware": Loss(itrloss.VarianceAwareLoss, eager.variance_aware, "sets"),
    "pgc": Loss(itrloss.PrototypeClassificationLoss, eager.prototype_classification, "prototypes"),
}


# ---------------------------------------------------------------------------------------------------- inputs


def embeddings(size: int, dim: int, seed: int = 0, per_image: int = 1) -> tuple[Tensor, Tensor]:
    """Images and texts as a model in training gives them: cosines of 0.2 for positives, 0 ± 0.1 for negatives."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(100, dim, generator=generator) / 10  # a hundred directions carry most of the variance
    v = torch.randn(size, 100, generator=generator)
    w = v.repeat_interleave(per_image, 0) + 5 * torch.randn(size * per_image, 100, generator=generator)
    noise = (torch.randn(len(x), dim, generator=generator) for x in (v, w))
    made = [x @ mix / x.norm(dim=1, keepdim=True) * 10 + 0.1 * n for x, n in zip((v, w), noise, strict=True)]
    return made[0], made[1]


_PANEL = 2**28  # scores of the floor's products that exist at once


def _product(a: Tensor, b: Tensor, backward: int) -> Callable[[], None]:
    """``a bᵀ`` and, of its gradient, that of a and (2) that of b; row by row where it would be too large."""
    step = min(len(a), max(1, _PANEL // len(b)))
    space = a.new_empty(step, len(b))

    def run() -> None:
        """Make the products."""
        for part in a.split(step):
            scores = torch.mm(part, b.T, out=space[: len(part)])
            torch.mm(scores, b)
            if backward == 2:
                torch.mm(scores.T, part)

    return run


def _pairs(case: Case, n: int, m: int, dim: int) -> Problem:
    if m % n:
        raise ValueError(f"shape: expected a whole number of texts per image, got {m} texts of {n} images")
    v, w = (x.to(case.device, case.dtype) for x in embeddings(n, dim, per_image=m // n))
    ids = () if n == m else (torch.arange(n, device=v.device), torch.arange(m, device=v.device) // (m // n))
    return Problem((v, w), ids, ids, _product(v, w, 2), 6 * n * m * dim)


def _memory(case: Case, n: int, entries: int, dim: int) -> Problem:
    if n > 2 * entries:
        raise ValueError(f"shape: expected a batch of at most twice the memory's entries, got {n} and {entries}")
    v, w, v_keys, w_keys, images, texts = (
        x.to(case.device, case.dtype)
        for x in (*embeddings(n, dim), *embeddings(n, dim, seed=1), *embeddings(entries, dim, seed=2))
    )
    memory = itrloss.CoupledMemory(entries, dim).to(case.device, case.dtype)
    memory.enqueue(images, texts, torch.arange(entries, device=v.device))
    ids = torch.randperm(2 * entries, generator=torch.Generator().manual_seed(0))[:n].to(v.device)  # half are in it
    one, other = _product(v, memory.texts, 1), _product(w, memory.images, 1)

    def products() -> None:
        one()
        other()

    given_plain = (v_keys, w_keys, memory.images, memory.texts, ids, memory.ids)
    return Problem((v, w), (v_keys, w_keys, memory, ids, ids), given_plain, products, 8 * n * entries * dim)


def _sets(case: Case, n: int, heads: int, dim: int) -> Problem:
    if n < 3:
        raise ValueError(f"shape: expected at least 3 images, for a variance of their negatives, got {n}")
    images = torch.stack([embeddings(n, dim, seed)[0] for seed in range(heads)], 1).to(case.device, case.dtype)
    texts = embeddings(n, dim)[1].to(case.device, case.dtype)
    return Problem((images, texts), (), (), _product(images.flatten(0, 1), texts, 2), 6 * heads * n * n * dim)


def _prototypes(case: Case, n: int, clusters: int, dim: int) -> Problem:
    v, w = (x.to(case.device, case.dtype) for x in embeddings(n, dim))
    generator = torch.Generator().manual_seed(0)
    weight = ((torch.rand(clusters, dim, generator=generator) * 2 - 1) / dim**0.5).to(case.device)
    weight = weight.double() if case.dtype == torch.float64 else weight
    ids = torch.randint(0, clusters, (n,), generator=generator).to(v.device)
    both = torch.cat([v, w])
    products = _product(both, weight.to(case.dtype).detach(), 2)
    weight = nn.Parameter(weight)
    return Problem((v, w), (ids,), (weight, ids), products, 12 * n * clusters * dim)


# kind -> what the numbers of a shape are, and what makes the inputs
KINDS: dict[str, tuple[str, Callable[..., Problem]]] = {
    "pairs": ("images x texts x dim", _pairs),
    "memory": ("batch x entries x dim", _memory),
    "sets": ("batch x heads x dim", _sets),
    "prototypes": ("batch x clusters x dim", _prototypes),
}


def problem(case: Case) -> Problem:
    """The inputs of a case; the same numbers every time."""
    made = KINDS[case.kind][1](case, *case.shape)
    return made._replace(leaves=tuple(x.clone().requires_grad_() for x in made.leaves))


def module(case: Case, given: Sequence[Any], engine: str = "auto") -> nn.Module:
    """Our loss; PGC with the weights that the eager function gets."""
    make = LOSSES[case.loss].ours
    if case.kind != "prototypes":
        return make(engine=engine)
    made = make(case.shape[2], case.shape[1], engine=engine)
    made.weight = given[0]
    return made


def parse_shape(text: str, kind: str) -> tuple[int, ...]:
    """``"8192x512"`` (as many texts as images) or ``"1024x5120x512"``."""
    try:
        numbers = tuple(int(x) for x in text.split("x"))
    except ValueError:
        numbers = ()
    if kind == "pairs" and len(numbers) == 2:
        numbers = (numbers[0], *numbers)
    if len(numbers) != 3 or min(numbers) < 1:
        raise ValueError(f"shape: expected {KINDS[kind][0]}, as in 128x4096x1024, got {text!r}")
    return numbers


# ---------------------------------------------------------------------------------------------------- suites


class Suite(NamedTuple):
    """Cases that are measured alike."""

    about: str
    cases: tuple[Case, ...]
    variants: tuple[str, ...]  # see runner.VARIANTS and peers.PEERS


def _of(kind: str, shapes: Sequence[tuple[int, ...]], losses: Sequence[str] = (), **more: Any) -> tuple[Case, ...]:
    names = losses or [name for name, loss in LOSSES.items() if loss.kind == kind]
    return tuple(Case(name, shape, **more) for shape in shapes for name in names)


_ALL = ("ours", "eager", "floor", "ours compiled", "eager compiled")
_CUDA = {"dtype": torch.bfloat16, "device": "cuda"}
SUITES: dict[str, Suite] = {
    "quick": Suite(
        "seconds: three losses, two sizes",
        _of("pairs", [(n, n, 256) for n in (128, 1024)], ["infonce", "dcl std", "triplet hardest"]),
        ("ours", "eager", "floor"),
    ),
    "losses": Suite(
        "every loss of pairs, 1024 dimensions",
        _of("pairs", [(n, n, 1024) for n in (128, 512, 2048, 8192)]),
        _ALL,
    ),
    "memory": Suite(
        "the losses with a memory",
        _of("memory", [(128, 4096, 1024), (512, 16384, 512), (1024, 65536, 256)]),
        (*_ALL, "peers"),
    ),
    "more": Suite(
        "sets of embeddings, and classification by prototypes",
        _of("sets", [(128, 6, 1024), (512, 6, 1024)]) + _of("prototypes", [(128, 20000, 1024)]),
        _ALL,
    ),
    "peers": Suite(
        "symmetric InfoNCE and SigLIP beside other libraries, 512 dimensions",
        _of("pairs", [(n, n, 512) for n in (1024, 4096, 8192)], ["infonce", "sigmoid"])
        + _of("pairs", [(1024, 5120, 512)], ["infonce"]),
        (*_ALL, "ours tiled", "peers"),
    ),
    "large": Suite(
        "InfoNCE where the matrix takes a gigabyte",
        _of("pairs", [(16384, 16384, 512)], ["infonce"]),
        ("ours", "eager", "floor", "open_clip", "linear_cross_entropy chunked"),
    ),
    "cuda": Suite(
        "the Triton engine, bfloat16: every loss of pairs, M-DCL, large InfoNCE of one caption an image and of four",
        _of(
            "pairs", [(n, m, d) for d in (512, 1024) for n, m in ((32768, 32768), (16384, 65536))], ["infonce"], **_CUDA
        )
        + _of("pairs", [(4096, 4096, 1024)], **_CUDA)
        + _of("memory", [(128, 4096, 1024), (4096, 65536, 1024)], **_CUDA),
        (*_ALL, "ours graphed", "ours dense", "ours triton", "ours tiled", "peers"),
    ),
    "huge": Suite(
        "InfoNCE of 262144 pairs on a CUDA device, bfloat16: a matrix of 128 GiB that never exists",
        _of("pairs", [(262144, 262144, 512)], ["infonce"], **_CUDA),
        ("ours triton", "floor"),
    ),
}
