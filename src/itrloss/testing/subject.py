"""The loss under test: copies of it, batches for it, and its values and gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import SkipTest

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

    @property
    def embeddings(self) -> tuple[Tensor, Tensor]:
        """Images and texts."""
        return self.images, self.texts

    @property
    def ids(self) -> tuple[Tensor, Tensor]:
        """The ids of images and texts; their numbers, if there are none."""
        if self.image_ids is None or self.text_ids is None:
            return torch.arange(len(self.images)), torch.arange(len(self.texts))
        return self.image_ids, self.text_ids

    def of(self, images: Tensor, texts: Tensor) -> Batch:
        """Return the batch with other embeddings, and the same ids."""
        return self._replace(images=images, texts=texts)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with a function of its images and of its texts, and the same ids."""
        return self.of(function(self.images), function(self.texts))

    def to(self, dtype: torch.dtype) -> Batch:
        """Return the batch with embeddings of another dtype."""
        return self.map(lambda x: x.to(dtype))

    def leaves(self) -> Batch:
        """Return the batch with copies of the embeddings that require gradients."""
        return self.map(lambda x: x.detach().clone().requires_grad_())

    def take(self, rows: Tensor | slice, cols: Tensor | slice) -> Batch:
        """Return the batch of these images and texts."""
        image_ids, text_ids = self.ids
        return Batch(self.images[rows], self.texts[cols], image_ids[rows], text_ids[cols])

    def swapped(self) -> Batch:
        """Return the batch with images and texts in each other's place."""
        return Batch(self.texts, self.images, self.text_ids, self.image_ids)

    def with_ids(self, image_ids: Tensor | None, text_ids: Tensor | None) -> Batch:
        """Return the batch with other ids."""
        return self._replace(image_ids=image_ids, text_ids=text_ids)


class Result(NamedTuple):
    """A value and its gradients, with respect to images, texts and the loss's parameters."""

    value: Tensor
    images: Tensor
    texts: Tensor
    parameters: tuple[Tensor, ...]

    @property
    def embeddings(self) -> tuple[Tensor, Tensor]:
        """The gradients of images and texts."""
        return self.images, self.texts

    @property
    def gradients(self) -> list[Tensor]:
        """All gradients."""
        return [self.images, self.texts, *self.parameters]


def tensors(output: Any) -> list[Tensor]:
    """Return all floating-point tensors in what a loss returned."""
    found = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    assert found, f"expected a floating-point tensor, got {type(output).__name__}"
    return found


def total(output: Any) -> Tensor:
    """Return the 0-dim sum of all floating-point tensors in what a loss returned."""
    parts = tensors(output)
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
    reference: Callable[..., Any] | None = None

    def require(self, feature: str) -> None:
        """Raise a SkipTest that says why, if a check that needs a feature does not apply."""
        both_calls = self.ids and self.call is None
        lengths = "it depends on the embeddings' lengths (normalizes=False)"
        known = {
            "ids": (self.ids, "it takes no ids (ids=False)"),
            "pairing": (not self.ids or self.call is None, "call= always gets ids"),
            "default ids": (both_calls, "it is not called both with ids and without"),
            "normalizes": (self.normalizes, lengths),
            "module": (isinstance(self.loss, nn.Module), "it is no nn.Module"),
            "parameters": (bool(trained(self.loss)), "it has no parameters"),
            "processes": (self.processes > 1, "asked for with processes=2"),
            "reference": (self.reference is not None, "there is no formula (reference=)"),
        }
        if feature in known:
            holds, reason = known[feature]
        else:
            holds = hasattr(self.loss, feature)
            reason = f"it has no attribute {feature!r}"
        if not holds:
            raise SkipTest(reason)

    def fresh(self, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
        """Return a copy of the loss, with parameters of a dtype, and with attributes set."""
        loss = copy.deepcopy(self.loss)
        if isinstance(loss, nn.Module):
            loss = loss.to(dtype)
        for name, option in options.items():
            setattr(loss, name, option)
        return loss

    def batch(
        self,
        n: int = 9,
        m: int = 14,
        d: int = 8,
        *,
        classes: int | None = None,
        seed: int = 0,
        one: bool = False,
    ) -> Batch:
        """Return a float64 batch of n images and m texts in which positives resemble each other a
        little.

        The ids are random classes, or with ``one``, and for a loss without ids, there are n pairs.
        """
        generator = torch.Generator().manual_seed(seed)
        if one or not self.ids:
            m = n
            classes = n
            ids = [torch.arange(n), torch.arange(n)]
        else:
            if classes is None:
                classes = max(3, n // 3)
            ids = [torch.randint(classes, (size,), generator=generator) for size in (n, m)]
        centres = normal((classes, d), generator)
        images = centres[ids[0]] + normal((n, d), generator)
        texts = centres[ids[1]] + normal((m, d), generator)
        if self.normalizes:
            images = images * _lengths(images, generator)
            texts = texts * _lengths(texts, generator)
        else:
            images = nn.functional.normalize(images, dim=1)
            texts = nn.functional.normalize(texts, dim=1)
        if not self.ids:
            return Batch(images, texts)
        return Batch(images, texts, *ids)

    def axes(self, n: int) -> Batch:
        """Return a float64 batch of n pairs along the axes, whose cosines are 1 and 0 however
        products round.
        """
        units = torch.eye(8, dtype=torch.float64)[torch.arange(n) % 8]
        return self.batch(n, one=True).of(units, units.clone())

    def _fresh_for(self, batch: Batch) -> Any:
        """Return a copy of the loss, of float64 for a float64 batch, else of float32."""
        return self.fresh(torch.promote_types(batch.images.dtype, torch.float32))

    def output(self, batch: Batch, loss: Any = None) -> Any:
        """Return what a loss returns for a batch; by default, a fresh copy."""
        if loss is None:
            loss = self._fresh_for(batch)
        inputs = batch.embeddings
        if self.ids and batch.image_ids is not None:
            inputs = batch
        if self.call is None:
            return loss(*inputs)
        return self.call(loss, *inputs)

    def value(self, batch: Batch, loss: Any = None) -> Tensor:
        """Return the 0-dim value, see :meth:`output`."""
        return total(self.output(batch, loss))

    def result(self, batch: Batch, loss: Any = None) -> Result:
        """Return the value and its gradients; by default, of a fresh copy of the loss."""
        if loss is None:
            loss = self._fresh_for(batch)
        leaves = batch.leaves()
        return result_of(self.value(leaves, loss), leaves, loss)

    def same_after(
        self, what: str, leaves: Batch, changed: Batch, rtol: float = 1e-7, atol: float = 1e-9
    ) -> None:
        """Raise an AssertionError unless a batch that was made of another one's leaves has the same
        value, and the same gradients with respect to these leaves.
        """
        loss = self._fresh_for(leaves)
        got = result_of(self.value(changed, loss), leaves, loss)
        same(what, got, self.result(leaves), rtol, atol)

    def finite(self, what: str, batch: Batch, loss: Any = None) -> Result:
        """Return the result; raise an AssertionError unless value and gradients are finite."""
        result = self.result(batch, loss)
        names = ["value", "gradient of images", "gradient of texts"]
        names += ["gradient of a parameter"] * len(result.parameters)
        for name, x in zip(names, [result.value, *result.gradients], strict=True):
            assert bool(x.isfinite().all()), f"{what}: the {name} is not finite"
        return result

    def steps(self, loss: Any, optimizer: Any, batches: Iterable[Batch]) -> list[Tensor]:
        """Return the values of a training step on each batch."""
        values = []
        for batch in batches:
            value = self.value(batch, loss)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            values.append(value.detach())
        return values


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return a float64 tensor of normally distributed numbers."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _lengths(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return (N, 1) factors that give normally distributed (N, D) rows lengths of 0.5 to 2."""
    uniform = torch.rand(len(x), 1, generator=generator, dtype=torch.float64)
    return (0.5 + 1.5 * uniform) / math.sqrt(x.shape[1])


def trained(loss: Any) -> list[Tensor]:
    """Return the parameters of a loss that require a gradient."""
    if not isinstance(loss, nn.Module):
        return []
    return [p for p in loss.parameters() if p.requires_grad]


def result_of(value: Tensor, leaves: Batch, loss: Any, keep: bool = False) -> Result:
    """Return a value and its gradients; with ``keep`` its graph remains."""
    assert value.requires_grad, "the value has no gradient"
    images, texts, *parameters = torch.autograd.grad(
        value,
        [*leaves.embeddings, *trained(loss)],
        allow_unused=True,
        materialize_grads=True,
        retain_graph=keep,
    )
    return Result(value.detach(), images, texts, tuple(parameters))


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


def identical(what: str, got: Any, expected: Any) -> None:
    """Raise an AssertionError unless two results, or tensors, are equal bit for bit."""
    same(what, got, expected, rtol=0, atol=0)
