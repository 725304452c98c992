"""Checks of rounding and range: half precision, autocast, very long, very short and zero
embeddings.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from .registry import check
from .subject import Batch, Result, Subject

# With float32 scores losses of this library are at 0.12 to 0.38, with scores that are rounded to
# bfloat16 at 0.43 up.
_HALF = 0.4


def _distances(a: Result, b: Result) -> Tensor:
    """Return relative distances: of the values, and of the gradients in the Frobenius norm."""
    value = (a.value.double() - b.value.double()).abs() / b.value.double().abs().clamp_min(1e-3)
    first, second = (torch.cat([x.double().flatten() for x in r.embeddings]) for r in (a, b))
    size = second.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return torch.stack([value, (first - second).norm() / size])


def _rounding(subject: Subject, dtype: torch.dtype, times: float, autocast: bool = False) -> None:
    """Raise an AssertionError if an error is more than ``times`` the error of rounding the
    embeddings and the gradients.
    """
    errors = []  # of the value and of the gradients, for each seed
    plain = []
    for seed in range(3):
        batch = subject.batch(48, 60, d=64, seed=seed)
        rounded = batch.to(dtype)
        exact = subject.result(rounded.to(torch.float64))
        plain.append(_distances(exact, subject.result(batch)))
        if autocast:
            rounded = rounded.to(torch.float32)
        with torch.autocast("cpu", dtype, enabled=autocast):
            got = subject.result(rounded)
        for x, like in zip(got.embeddings, rounded.embeddings, strict=True):
            assert x.dtype == like.dtype, f"expected gradients of {like.dtype}, got {x.dtype}"
        errors.append(_distances(got, exact))
    largest = torch.stack(errors).amax(0)
    allowed = torch.stack(plain).amax(0) + torch.finfo(dtype).eps
    for name, error, rounding in zip(("value", "gradient"), largest, allowed, strict=True):
        message = f"relative error of the {name} {error:.2g}, of plain rounding {rounding:.2g}"
        assert error <= times * rounding, message


@check()
def float32_error(subject: Subject) -> None:
    """In float32 the error is at most twelve times the error of rounding the embeddings and
    the gradients.

    Scores are float32 here, and a temperature of 0.05 multiplies their rounding by 20. Cancellation
    is far worse.
    """
    _rounding(subject, torch.float32, 12)


@check()
def bfloat16_error(subject: Subject) -> None:
    """With bfloat16 embeddings the error is at most 0.4 times the error of rounding the embeddings
    and the gradients.

    Scores stay float32: rounded to bfloat16 and divided by a temperature of 0.01, they are
    multiples of 0.5.
    """
    _rounding(subject, torch.bfloat16, _HALF)


@check()
def float16_error(subject: Subject) -> None:
    """With float16 embeddings the error is at most 0.4 times the error of rounding the embeddings
    and the gradients.
    """
    _rounding(subject, torch.float16, _HALF)


@check()
def autocast_error(subject: Subject) -> None:
    """Under autocast to bfloat16 the error is at most 0.4 times the error of rounding the
    embeddings and the gradients.

    Autocast runs the product of float32 embeddings in bfloat16 unless the loss opts out.
    """
    _rounding(subject, torch.bfloat16, _HALF, autocast=True)


def _zeros_are_harmless(subject: Subject, dtype: torch.dtype, what: str) -> None:
    """Raise an AssertionError unless results with embeddings of zeros are finite."""
    batch = subject.batch(6, one=True)
    batch.images[1] = 0
    batch.texts[1:4] = 0
    subject.finite(what, batch.to(dtype))


@check()
def zero_vectors(subject: Subject) -> None:
    """Embeddings of zeros, as of an empty text, leave the value and its gradients finite."""
    _zeros_are_harmless(subject, torch.float32, "zero vectors")


@check()
def zero_vectors_in_half_precision(subject: Subject) -> None:
    """Embeddings of zeros are harmless in half precision: the 1e-12 that keeps a length above 0 is
    0 in float16.
    """
    for dtype in (torch.float16, torch.bfloat16):
        _zeros_are_harmless(subject, dtype, f"zero vectors in {dtype}")


def _of_length(subject: Subject, length: float) -> None:
    """Raise an AssertionError unless embeddings of a length have the same loss in float32."""
    leaves = subject.batch().to(torch.float32).leaves()
    scaled = leaves.map(lambda x: x * length)
    subject.same_after(f"embeddings of length {length:g}", leaves, scaled, rtol=1e-3, atol=1e-5)


@check("normalizes")
def long_embeddings(subject: Subject) -> None:
    """Embeddings of length 2^58 give the same loss in float32: their squares do not overflow."""
    _of_length(subject, 2.0**58)


@check("normalizes")
def short_embeddings(subject: Subject) -> None:
    """Embeddings of length 2^-30, 1e-9, give the same loss in float32, also where an eps keeps
    lengths above 0.

    With the usual 1e-12 of :func:`torch.nn.functional.normalize` they do.
    """
    _of_length(subject, 2.0**-30)


def _extreme(batch: Batch) -> list[Batch]:
    """Return pairs that are equal, pairs that are opposite, and embeddings that are all equal."""
    first = batch.images[:1].expand(len(batch.images), -1)
    return [
        batch.of(batch.images, batch.images),
        batch.of(batch.images, -batch.images),
        batch.of(first, first),
    ]


@check()
def extreme_scores(subject: Subject) -> None:
    """Pairs that are equal, opposite, or all alike leave the value and its gradients finite in
    float32.

    Cosines of 1 and -1 are the ends of logarithms, roots and arcs.
    """
    for pairs in (subject.batch(one=True), subject.axes(9)):
        for batch in _extreme(pairs.to(torch.float32)):
            subject.finite("scores of 1 or -1", batch)


@check("temperature")
def low_temperature(subject: Subject) -> None:
    """A temperature of 0.004 leaves the value and its gradients finite in float32, or is refused
    with a ValueError.

    An exponential of scores without their maximum overflows, and the logarithm of a softmax that is
    0 is -inf.
    """
    pairs = subject.batch(one=True).to(torch.float32)
    try:
        loss = subject.fresh(torch.float32, temperature=0.004)
        subject.value(pairs, copy.deepcopy(loss))
    except (AttributeError, ValueError):
        return  # refused when it is set or used, or a property that follows a parameter
    for batch in _extreme(pairs):
        subject.finite("temperature 0.004", batch, copy.deepcopy(loss))
