"""Vectors: their lengths, their precision, and the gradient that goes back to them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..checks import host_may_read as host_may_read
from ..torch_versions import (
    get_autocast_dtype,
    is_autocast_available,
    is_autocast_enabled,
    is_compiling,
)

EPS = 1e-12  # a vector of at most this length counts as zero: its scores and its gradient are 0
CHUNK = 2**17  # elements of embeddings that a pass over them processes at once
ACCELERATOR_CHUNK = 2**23
# Elements up to which half-precision vectors have a gradient in float32 (64 MiB); the
# gradient of larger ones is rounded for each sum, for it would take twice their memory.
STAND_IN = 2**24
NO_CONTEXT = contextlib.nullcontext()

# ---------------------------------------------------------------------------------------- precision


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of scores and sums: float64 for float64, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def is_autocast_on(kind: str) -> bool:
    """Return whether autocast is on for a kind of device."""
    # PyTorch 2.11 cannot compile the question whether a kind has autocast.
    if kind not in ("cpu", "cuda") and not is_autocast_available(kind):
        return False
    return is_autocast_enabled(kind)


def full_precision(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast does not run products in half precision."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if is_autocast_on(kind) else NO_CONTEXT


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast gives to float32 vectors; None for others, or without it."""
    kind = x.device.type
    if x.dtype != torch.float32 or not is_autocast_on(kind):
        return None
    return get_autocast_dtype(kind)


def may_keep() -> bool:
    """Return whether tensors made now may be cached: autograd cannot save inference tensors."""
    # in this order, as the compiler refuses the second question
    return is_compiling() or not torch.is_inference_mode_enabled()


# ------------------------------------------------------------------------------------ unit vectors


def chunks(x: Tensor) -> list[slice]:
    """Return slices of the rows of (N, D) embeddings, for a pass whose temporaries stay small."""
    size = CHUNK if x.device.type == "cpu" else ACCELERATOR_CHUNK
    count, dim = x.shape
    step = max(1, size // max(1, dim))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def inverse_norms(x: Tensor) -> Tensor:
    """Return the (..., 1) inverse norms of vectors (..., D) in the compute dtype; 0 below 1e-12.

    Squares of lengths up to 1e18 do not overflow float32.
    """
    return inverses(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=compute_dtype(x)))


def inverses(norms: Tensor) -> Tensor:
    """Return the inverses of norms; 0 below 1e-12."""
    return torch.threshold(norms, EPS, math.inf).reciprocal()


def scaled(x: Tensor, inv: Tensor | None) -> Tensor:
    """Return vectors (..., D) in the compute dtype, times (..., 1) inverse norms unless None."""
    if inv is None:
        return x.to(compute_dtype(x))
    return x * inv  # promoted to the dtype of the norms


def plain_unit(x: Tensor, normalize: bool) -> Tensor:
    """Return the vectors (..., D) at unit length, by operators that autograd differentiates."""
    x = x.to(compute_dtype(x))
    return x * inverse_norms(x) if normalize else x


def normalized(x: Tensor, normalize: bool = True) -> Tensor:
    """Return the vectors (..., D) at unit length in the compute dtype, twice differentiable."""
    if not normalize:
        return x.to(compute_dtype(x))
    if is_compiling():
        return plain_unit(x, True)
    inv = inverse_norms(x.detach())
    return Normalize.apply(x, scaled(x.detach(), inv), inv)  # type: ignore[return-value]


class Normalize(torch.autograd.Function):
    """Unit vectors, whose backward reads and writes them half as often as autograd's would."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., D)
        unit: Tensor,  # (..., D) at unit length
        inv: Tensor,  # (..., 1) inverse norms
    ) -> Tensor:
        """Return ``unit`` (..., D), which was computed from ``x``."""
        ctx.save_for_backward(x, unit, inv)
        return unit

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of ``x`` (..., D), orthogonal to ``x``."""
        x, unit, inv = ctx.saved_tensors
        (grad,) = grads
        if torch.is_grad_enabled():  # create_graph=True
            unit = plain_unit(x, True)
            return torch.autograd.grad(unit, x, grad, create_graph=True)[0], None, None
        return project(grad, unit, inv).to(x.dtype), None, None


def project(
    grad: Tensor,  # (..., D) of unit vectors
    unit: Tensor,  # (..., D)
    inv: Tensor,  # (..., 1) inverse norms
) -> Tensor:
    """Return the gradient of vectors, ``(g - u <u, g>) / |x|`` with ``u = x / |x|``."""
    along = (unit * grad).sum(-1, keepdim=True)
    return torch.addcmul(grad, unit, along, value=-1).mul_(inv)


class RoundOnce(torch.autograd.Function):
    """A stand-in for half-precision vectors that takes their gradient in float32.

    Several sums over the same scores add up their gradients before they are rounded: large terms
    that cancel lose no digits. The stand-in has no storage of its own and is never read.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return a tensor in float32 of the shape of ``x``, which takes no memory."""
        ctx.dtype = x.dtype
        return torch.empty((), dtype=torch.float32, device=x.device).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient rounded to the dtype of ``x``."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph: second derivatives of half precision need engine='dense'"
            )
        return grads[0].to(ctx.dtype)


def savable(x: Tensor) -> Tensor:
    """Return a tensor that autograd can save; one that is passed in under no_grad has no gradient
    outside either.
    """
    if not torch.is_grad_enabled():
        x = x.detach()
    if not is_compiling() and x.is_inference():
        return x if torch.is_inference_mode_enabled() else x.clone()
    return x


def version_of(x: Tensor) -> int | None:
    """Return how often a tensor was modified in place; None if that is not known."""
    if is_compiling() or x.is_inference():
        return None
    return x._version


class Embeddings:
    """The vectors (N, D) of one side, and a bias of each; matrices that share this object share its
    lengths.
    """

    def __init__(
        self,
        x: Tensor,
        normalize: bool = True,
        bias: Tensor | None = None,  # (N,) added to the scores of a vector
        is_unit: bool = False,  # whether the vectors have unit length as they are
    ):
        x = savable(x)
        self.given = x  # as passed in
        self.target = x  # what gets the gradient
        self.x = x  # what is multiplied
        self.is_rounded = False  # whether that is in another dtype than what was passed in
        self.normalize = normalize
        self.is_unit = normalize or is_unit
        self.dtype = compute_dtype(x)
        self.bias: Tensor | None = None
        if bias is not None:
            self.bias = savable(bias).to(self.dtype)
        self.version = version_of(x)
        self._bias_version: int | None = None
        self.constant_bias: Tensor | None = None  # without a gradient
        if self.bias is not None:
            self._bias_version = version_of(self.bias)
            self.constant_bias = self.bias.detach()
        self._inverse_norms: Tensor | None = None
        self._unit: Tensor | None = None
        self._stand_in: Tensor | None = None

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def bias_changed(self) -> bool:
        """Whether the biases were modified in place."""
        if self.bias is None or self._bias_version is None:
            return False
        return self._bias_version != self.bias._version

    def rounded(self, dtype: torch.dtype) -> Embeddings:
        """Return the same vectors, multiplied in another dtype; their gradient is not rounded."""
        twin = Embeddings(self.given, self.normalize, self.bias, self.is_unit)
        if self.normalize and dtype == torch.float16:  # lengths may leave its range
            twin.target = twin.given * inverse_norms(twin.given.detach())
        twin.x = twin.target.detach().to(dtype)
        twin.is_rounded = True
        return twin

    def unit(self) -> Tensor:
        """Return the (N, D) vectors at unit length if ``normalize``, without a graph; cached."""
        if self._unit is not None:
            return self._unit
        unit = scaled(self.x.detach(), self.inverse_norms())
        if may_keep():
            self._unit = unit
        return unit

    def inverse_norms(self, find: Callable[[Tensor], Tensor] = inverse_norms) -> Tensor | None:
        """Return the (N, 1) inverse norms; None if the vectors are not normalised. Cached.

        ``find``: the function that finds them.
        """
        if not self.normalize:
            return None
        if self._inverse_norms is not None:
            return self._inverse_norms
        inv = find(self.x.detach())
        if may_keep():
            self._inverse_norms = inv
        return inv

    def gradient_target(self) -> Tensor:
        """Return what gets the gradient of sums: the vectors, or their stand-in in float32."""
        target = self.target
        if target.dtype == self.dtype or not target.requires_grad:
            return target
        if target.numel() > STAND_IN or not may_keep():  # in inference mode, nothing has a gradient
            return target
        if self._stand_in is None:
            with torch.enable_grad():  # even if first used under no_grad
                self._stand_in = RoundOnce.apply(target)
        return self._stand_in  # type: ignore[return-value]

    def detach(self) -> Embeddings:
        """Return the same embeddings without a gradient."""
        twin = Embeddings(self.given.detach(), self.normalize, self.constant_bias, self.is_unit)
        twin.target = self.target.detach()
        twin.x = self.x.detach()
        twin.is_rounded = self.is_rounded
        twin.version = self.version
        twin._bias_version = self._bias_version
        twin._inverse_norms = self._inverse_norms
        twin._unit = self._unit
        return twin

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # a copied tensor has its own version counter
        self.version = version_of(self.given)
        if self.bias is not None:
            self._bias_version = version_of(self.bias)
