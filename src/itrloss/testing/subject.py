"""The loss under test: copies of it, batches for it, and its values and gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Batch(NamedTuple):
    """Images (N, D) and texts (M, D); ids (N,) and (M,) that are equal for positives, or None for
    both: i matches i.
    """

    images: Tensor
    texts: Tensor
    image_ids: Tensor | None = None
    text_ids: Tensor | None = None

    def to(self, dtype: torch.dtype) -> Batch:
        return self._replace(images=self.images.to(dtype), texts=self.texts.to(dtype))

    def of(self, images: Tensor, texts: Tensor) -> Batch:
        """Return the batch with other embeddings, and the same ids."""
        return self._replace(images=images, texts=texts)

    def leaves(self) -> Batch:
        """Return the batch with copies of the embeddings that require gradients."""
        return self.of(
            self.images.detach().clone().requires_grad_(),
            self.texts.detach().clone().requires_grad_(),
        )

    def take(self, rows: Tensor, cols: Tensor) -> Batch:
        """Return the batch of these images and texts."""
        ids = [x if x is None else x[k] for x, k in zip(self[2:], (rows, cols), strict=True)]
        return Batch(self.images[rows], self.texts[cols], *ids)

    def swapped(self) -> Batch:
        return Batch(self.texts, self.images, self.text_ids, self.image_ids)

    def with_ids(self, image_ids: Tensor | None, text_ids: Tensor | None) -> Batch:
        return self._replace(image_ids=image_ids, text_ids=text_ids)


class Result(NamedTuple):
    """A value and its gradients, with respect to images, texts and the loss's parameters."""

    value: Tensor
    images: Tensor
    texts: Tensor
    parameters: tuple[Tensor, ...]


def total(value: Any) -> Tensor:
    """Return the 0-dim sum of all floating-point tensors in what a loss returned."""
    parts = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.is_floating_point()]
    assert parts, f"expected a floating-point tensor, got {type(value).__name__}"
    return sum((x.sum() for x in parts[1:]), parts[0].sum())


@dataclass(frozen=True)
class Subject:
    """A loss, and what is known of it, see :func:`itrloss.testing.check_loss`. Checks change copies
    of it only.
    """

    loss: Callable[..., Any]
    call: Callable[..., Any] | None = None
    ids: bool = True
    normalizes: bool = True
    processes: int = 1

    def lacks(self, feature: str) -> str:
        """Return why a check that needs a feature does not apply, or an empty text."""
        module = isinstance(self.loss, nn.Module)
        reasons = {
            "ids": (self.ids, "it takes no ids (ids=False)"),
            "pairing": (not self.ids or self.call is None, "call= always gets ids"),
            "default ids": (
                self.ids and self.call is None,
                "it is not called both with ids and without",
            ),
            "normalizes": (
                self.normalizes,
                "it depends on the embeddings' lengths (normalizes=False)",
            ),
            "module": (module, "it is no nn.Module"),
            "parameters": (
                module and any(p.requires_grad for p in self.loss.parameters()),
                "it has no parameters",
            ),
            "processes": (self.processes > 1, "asked for with processes=2"),
        }
        holds, reason = reasons.get(
            feature, (hasattr(self.loss, feature), f"it has no attribute {feature!r}")
        )
        return "" if holds else reason

    def fresh(self, dtype: torch.dtype | None = None, **options: Any) -> Any:
        """Return a copy of the loss, its parameters of a dtype, with attributes set."""
        loss = copy.deepcopy(self.loss)
        if dtype is not None and isinstance(loss, nn.Module):
            loss = loss.to(dtype)
        for name, option in options.items():
            setattr(loss, name, option)
        return loss

    def batch(
        self,
        n: int,
        m: int | None = None,
        d: int = 8,
        *,
        classes: int | None = None,
        seed: int = 0,
        one: bool = False,
    ) -> Batch:
        """Return a float64 batch in which positives resemble each other a little.

        The ids are random classes, or with ``one``, and for a loss without ids, there are n pairs.
        """
        generator = torch.Generator().manual_seed(seed)
        sample = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
        one = one or not self.ids
        m, classes = (
            (n, n)
            if one
            else (n if m is None else m, max(3, n // 3) if classes is None else classes)
        )
        ids = [
            torch.arange(n) if one else torch.randint(classes, (size,), generator=generator)
            for size in (n, m)
        ]
        centres = sample(classes, d)
        images, texts = (centres[x] + sample(len(x), d) for x in ids)
        if self.normalizes:
            images, texts = (
                x
                * (0.5 + 1.5 * torch.rand(len(x), 1, generator=generator, dtype=torch.float64))
                / math.sqrt(d)
                for x in (images, texts)
            )
        else:
            images, texts = (nn.functional.normalize(x, dim=1) for x in (images, texts))
        return Batch(images, texts, *(ids if self.ids else (None, None)))

    def axes(self, n: int) -> Batch:
        """Return a float64 batch of n pairs along the axes, whose cosines are 1 and 0 however
        products round.
        """
        units = torch.eye(8, dtype=torch.float64)[torch.arange(n) % 8]
        return self.batch(n, one=True).of(units, units.clone())

    def _fresh_for(self, batch: Batch) -> Any:
        return self.fresh(torch.float64 if batch.images.dtype == torch.float64 else None)

    def output(self, batch: Batch, loss: Any = None) -> Any:
        """Return what a loss returns for a batch; by default, a fresh copy, of float64 for a
        float64 batch.
        """
        loss = self._fresh_for(batch) if loss is None else loss
        inputs = batch if self.ids and batch.image_ids is not None else batch[:2]
        return loss(*inputs) if self.call is None else self.call(loss, *inputs)

    def value(self, batch: Batch, loss: Any = None) -> Tensor:
        """Return the 0-dim value, see :meth:`output`."""
        return total(self.output(batch, loss))

    def result(self, batch: Batch, loss: Any = None, weight: float = 1.0) -> Result:
        """Return the value and the gradients of ``weight`` times the value."""
        loss, leaves = self._fresh_for(batch) if loss is None else loss, batch.leaves()
        value = self.value(leaves, loss)
        return Result(value.detach(), *gradients(value * weight, *leaves[:2], loss))


def trained(loss: Any) -> list[Tensor]:
    """Return the parameters of a loss that require a gradient."""
    return [p for p in loss.parameters() if p.requires_grad] if isinstance(loss, nn.Module) else []


def gradients(
    value: Tensor, images: Tensor, texts: Tensor, loss: Any, **options: Any
) -> tuple[Any, ...]:
    """Return the gradients of a value: images, texts, and a tuple of those of the loss's
    parameters.
    """
    assert value.requires_grad, "the value has no gradient"
    leaves = [images, texts, *trained(loss)]
    own = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True, **options)
    return own[0], own[1], own[2:]


def same(what: str, got: Any, expected: Any, rtol: float = 1e-7, atol: float = 1e-9) -> None:
    """Raise an AssertionError unless two results, or tensors, are equal up to rounding."""
    torch.testing.assert_close(
        tree_leaves(got),
        tree_leaves(expected),
        rtol=rtol,
        atol=atol,
        check_dtype=False,
        msg=lambda m: f"{what}: {m}",
    )


def finite(what: str, result: Result) -> None:
    """Raise an AssertionError unless a value and its gradients are finite."""
    for name, x in (
        ("value", result.value),
        ("gradient of images", result.images),
        ("of texts", result.texts),
    ):
        assert bool(x.isfinite().all()), f"{what}: the {name} is not finite"
    assert all(bool(x.isfinite().all()) for x in result.parameters), (
        f"{what}: a parameter's gradient is not finite"
    )
