"""The loss under test: copies of it, batches for it, and its values and gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from unittest import SkipTest

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..torch_versions import VERSION

# A module, or a function. What is read of it is looked for first.
Loss = Callable[..., object]
# The "value" of a loss, the "gradient of images", "of texts" and of its parameters, "of loss.bias".
Result = dict[str, Tensor]


class Batch(NamedTuple):
    """Images (N, D) and texts (M, D), and their ids (N,) and (M,), which are equal for positives.
    A loss without ids gets the embeddings alone.
    """

    images: Tensor
    texts: Tensor
    image_ids: Tensor
    text_ids: Tensor

    def of(self, images: Tensor, texts: Tensor) -> Batch:
        """Return the batch with other embeddings, and the same ids."""
        return self._replace(images=images, texts=texts)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with a function of its images and of its texts, and the same ids."""
        return self.of(function(self.images), function(self.texts))

    def relabelled(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with a function of the ids of images and of those of texts."""
        image_ids = function(self.image_ids)
        return self._replace(image_ids=image_ids, text_ids=function(self.text_ids))

    def to(self, dtype: torch.dtype) -> Batch:
        """Return the batch with embeddings of another dtype."""
        return self.map(lambda x: x.to(dtype))

    def leaves(self) -> Batch:
        """Return the batch with copies of the embeddings that require gradients."""
        return self.map(lambda x: x.detach().clone().requires_grad_())

    def take(self, rows: Tensor | slice, cols: Tensor | slice) -> Batch:
        """Return the batch of these images and texts."""
        return Batch(self.images[rows], self.texts[cols], self.image_ids[rows], self.text_ids[cols])

    def swapped(self) -> Batch:
        """Return the batch with images and texts in each other's place."""
        return Batch(self.texts, self.images, self.text_ids, self.image_ids)


@dataclass(frozen=True)
class Subject:
    """A loss, and what is known of it, see :func:`itrloss.testing.check_loss`. Checks change copies
    of it only, and the attributes of a function, which are restored.
    """

    loss: Loss
    call: Callable[..., object] | None = None
    ids: bool = True
    normalizes: bool = True
    processes: int = 1
    reference: Callable[..., object] | None = None

    def require(self, feature: str) -> None:
        """Raise a SkipTest that says why, if a check that needs a feature does not apply."""
        lengths = "it depends on the embeddings' lengths (normalizes=False)"
        known = {
            "ids": (self.ids, "it takes no ids (ids=False)"),
            "pairing": (not self.ids or self.call is None, "call= always gets ids"),
            "normalizes": (self.normalizes, lengths),
            "module": (isinstance(self.loss, nn.Module), "it is no nn.Module"),
            "parameters": (bool(trained(self.loss)), "it has no parameters"),
            "processes": (self.processes > 1, "asked for with processes=2"),
            "compiler": (VERSION >= (2, 8), "compiled losses need PyTorch 2.8"),
            "reference": (self.reference is not None, "there is no formula (reference=)"),
        }
        of_attribute = (hasattr(self.loss, feature), f"it has no attribute {feature!r}")
        holds, reason = known.get(feature, of_attribute)
        if not holds:
            raise SkipTest(reason)

    def fresh(self, dtype: torch.dtype = torch.float64, **options: Any) -> Loss:
        """Return a copy of the loss, with parameters of a dtype, and with attributes set.

        A function is its own copy.
        """
        loss = copy.deepcopy(self.loss)
        held: dict[str, Tensor] = {}
        if isinstance(loss, nn.Module):
            held = loss.to(dtype).state_dict()
        for name, option in options.items():
            if name in held:  # a parameter or a buffer, which a module replaces by no number
                held[name].fill_(option)
            else:
                setattr(loss, name, option)
        return loss

    def batch(
        self, n: int = 9, m: int = 14, d: int = 8, *, pairs: bool = False, seed: int = 0
    ) -> Batch:
        """Return a float64 batch of n images and m texts in which positives resemble each other a
        little.

        The ids are random classes; with ``pairs``, and for a loss without ids, there are n pairs.
        """
        generator = torch.Generator().manual_seed(seed)
        if pairs or not self.ids:
            classes = n
            ids = [torch.arange(n), torch.arange(n)]
        else:
            classes = max(3, n // 3)
            ids = [torch.randint(classes, (size,), generator=generator) for size in (n, m)]
        normal = partial(torch.randn, generator=generator, dtype=torch.float64)
        centres = normal(classes, d)
        images, texts = (centres[x] + normal(len(x), d) for x in ids)
        batch = Batch(images, texts, *ids)
        if not self.normalizes:
            return batch.map(nn.functional.normalize)

        def scaled(x: Tensor) -> Tensor:
            """Return embeddings with lengths of about 0.5 to 2."""
            uniform = torch.rand(len(x), 1, generator=generator, dtype=x.dtype)
            return x * (0.5 + 1.5 * uniform) / math.sqrt(d)

        return batch.map(scaled)

    def output(self, batch: Batch, loss: Loss) -> object:
        """Return what a loss returns for a batch."""
        inputs = batch if self.ids else batch[:2]
        if self.call is None:
            return loss(*inputs)
        return self.call(loss, *inputs)

    def value(self, batch: Batch, loss: Loss) -> Tensor:
        """Return the 0-dim value, see :meth:`output`."""
        return total(self.output(batch, loss))

    def result(self, batch: Batch, loss: Loss | None = None) -> Result:
        """Return the value and its gradients; by default, of a copy of the loss."""
        if loss is None:
            loss = self.fresh(torch.promote_types(batch.images.dtype, torch.float32))
        leaves = batch.leaves()
        return result_of(self.value(leaves, loss), leaves, loss)


def tensors(output: object) -> list[Tensor]:
    """Return all floating-point tensors in what a loss returned."""
    found = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.is_floating_point()]
    assert found, f"expected a floating-point tensor, got {type(output).__name__}"
    return found


def total(output: object) -> Tensor:
    """Return the 0-dim sum of all floating-point tensors in what a loss returned."""
    return torch.stack([x.sum() for x in tensors(output)]).sum()


def trained(loss: Loss) -> dict[str, Tensor]:
    """Return the parameters of a loss that require a gradient, by name."""
    if not isinstance(loss, nn.Module):
        return {}
    return {name: p for name, p in loss.named_parameters("loss") if p.requires_grad}


def result_of(value: Tensor, leaves: Batch, loss: Loss, keep: bool = False) -> Result:
    """Return a value and its gradients; with ``keep`` its graph remains."""
    assert value.requires_grad, "the value has no gradient"
    inputs = {"images": leaves.images, "texts": leaves.texts, **trained(loss)}
    gradients = torch.autograd.grad(value, [*inputs.values()], retain_graph=keep, allow_unused=True)
    result = {"value": value.detach()}
    for (name, x), gradient in zip(inputs.items(), gradients, strict=True):
        result[f"gradient of {name}"] = torch.zeros_like(x) if gradient is None else gradient
    return result


#: Raise an AssertionError that names what differs, unless all is equal up to rounding.
same = partial(torch.testing.assert_close, rtol=1e-7, atol=1e-9, check_dtype=False)
