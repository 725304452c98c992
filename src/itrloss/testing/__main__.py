"""Check the losses on this machine: its CPU and its accelerator, by each engine, in each dtype.

Values and gradients of two batches are compared with those of plain PyTorch (engine="dense") in
float64 on the CPU. A row has the largest error of each, relative to the norm of what it is of.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import inspect
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import itrloss

from ..torch_versions import VERSION, current_accelerator

#: The largest error that is rounding.
LARGEST = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}
#: Images of a batch: the scores of few are kept, those of many are computed block by block.
SIZES = 40, 768
DIM = 64
#: Base classes, and the loss whose logits are those of a classifier.
OTHERS = "PairLoss", "MemoryLoss", "PrototypeClassificationLoss"
#: Arguments of losses that get a gradient.
TRAINED = "images", "texts", "images_mean", "texts_mean", "image_sets"


class Place(NamedTuple):
    """Where and how a loss is computed."""

    device: torch.device
    engine: str
    dtype: torch.dtype  # of embeddings

    def __str__(self) -> str:
        return f"{self.device.type} {self.engine} {str(self.dtype).removeprefix('torch.')}"


EXACT = Place(torch.device("cpu"), "dense", torch.float64)


def places() -> list[Place]:
    """Return the engines that this machine's devices have for each dtype."""
    found = []
    has_triton = VERSION >= (2, 8) and importlib.util.find_spec("triton") is not None
    for device in filter(None, (EXACT.device, current_accelerator())):
        for dtype in LARGEST:
            is_double = dtype == torch.float64
            if device.type == "mps" and is_double:
                continue
            engines = ["auto", "tiled"]
            if device.type == "cuda" and has_triton and not is_double:
                engines.append("triton")
            found += [Place(device, engine, dtype) for engine in engines]
    return found


def losses() -> Iterator[nn.Module]:
    """Yield the losses of similarities with their default options."""
    for name in itrloss.losses.__all__:
        kind = getattr(itrloss, name)
        if "engine" in inspect.signature(kind).parameters and name not in OTHERS:
            yield kind()


def batch(images: int) -> dict[str, Any]:
    """Return what losses take, by the names of their arguments: so many images, of which two match
    the same four texts.

    All numbers are float64, and bfloat16 has them, too.
    """
    generator = torch.Generator().manual_seed(images)
    texts = 2 * images
    entries = 4 * images  # of the memory

    def drawn(*shape: int) -> Tensor:
        """Return multiples of 1/16 up to 2."""
        return torch.randint(-32, 33, shape, generator=generator).double() / 16

    topics = drawn(texts // 4, DIM)
    image_ids = torch.arange(images) // 2
    text_ids = torch.arange(texts) // 4
    memory = itrloss.CoupledMemory(entries, DIM, dtype=torch.bfloat16)
    memory.enqueue(drawn(entries, DIM), drawn(entries, DIM), torch.arange(entries) // 2)
    given = {
        "images": topics[image_ids] + drawn(images, DIM),
        "texts": topics[text_ids] + drawn(texts, DIM),
        "image_ids": image_ids,
        "text_ids": text_ids,
        "image_keys": drawn(images, DIM),
        "text_keys": drawn(texts, DIM),
        "memory": memory,
        "teacher": drawn(images, texts) / 8,
        "images_log_variance": drawn(images, DIM) / 2 - 4,
        "texts_log_variance": drawn(texts, DIM) / 2 - 4,
        "image_sets": drawn(images, 4, DIM),
    }
    return {**given, "images_mean": given["images"], "texts_mean": given["texts"]}


def computed(loss: nn.Module, given: Mapping[str, Any], place: Place) -> dict[str, Tensor]:
    """Return the value of a loss and its gradients, in float64 on the CPU."""
    dtype = torch.promote_types(place.dtype, torch.float32)
    loss = copy.deepcopy(loss).to(place.device, dtype)
    loss.engine = place.engine  # type: ignore[assignment]
    inputs: dict[str, Any] = {}
    for name in inspect.signature(loss.forward).parameters:
        if name in given:
            x = copy.deepcopy(given[name]).to(place.device)
            if name == "memory":
                x = x.to(dtype)
            elif x.is_floating_point():
                x = x.to(place.dtype)
            inputs[name] = x
    trained = {name: inputs[name].requires_grad_() for name in TRAINED if name in inputs}
    trained |= dict(loss.named_parameters("loss"))
    value = loss(**inputs)
    gradients = torch.autograd.grad(value, [*trained.values()])
    found = {"value": value.detach(), **dict(zip(trained, gradients, strict=True))}
    return {name: x.cpu().double() for name, x in found.items()}


def error(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return the largest error of a value or a gradient, relative to its norm; nan of a nan."""
    errors = [(found[name] - x).norm() / x.norm() for name, x in exact.items()]
    return torch.stack(errors).amax().item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table of the errors; return 1 if one of them is no rounding, else 0."""
    argparse.ArgumentParser(
        prog="python -m itrloss.testing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)
    start = time.perf_counter()
    found = places()
    print(f"itrloss {itrloss.__version__}, PyTorch {torch.__version__}")
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
    for number, place in enumerate(found, 1):
        print(f"  {number} {place}, errors up to {LARGEST[place.dtype]:.0e}")
    print(f"{'':32}" + "".join([f"{number + 1:>9}" for number in range(len(found))]))
    batches = [batch(size) for size in SIZES]
    wrong = 0
    for loss in losses():
        exact = [computed(loss, given, EXACT) for given in batches]
        row = f"{type(loss).__name__:32}"
        for place in found:
            pairs = zip(batches, exact, strict=True)
            errors = [error(computed(loss, given, place), x) for given, x in pairs]
            largest = float(torch.tensor(errors).amax())  # nan, if one is
            is_right = largest <= LARGEST[place.dtype]  # nan is not
            wrong += not is_right
            row += f"{largest:9.0e}" if is_right else f"{largest:8.0e}!"
        print(row, flush=True)
    print(f"{wrong} errors are no rounding; {time.perf_counter() - start:.0f} s")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
