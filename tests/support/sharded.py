"""Random batches over several processes, and the same in one."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import itrloss
from itrloss import Similarity
from itrloss.engine.relation import IGNORE_ID
from itrloss.engine.vectors import normalized
from support.losses_registry import ONE_TO_ONE, table

D, HEADS = 5, 3
LOSSES = table("sharded")
# those of each sample for itself, which take no ids
SAMPLES = [name for name, x in LOSSES.items() if x.takes in ("heads alone", "prototypes")]


def configuration(seed: int, world: int) -> dict[str, Any]:
    """A loss with options, the sizes of all processes' batches, ids, and how it is computed."""
    turn, place = divmod(seed, len(LOSSES))
    name = list(LOSSES)[place]
    entry = LOSSES[name]

    def pick(choices: list[Any], stride: int) -> Any:
        """Of a loss, another one each turn, and not the same for all losses."""
        return choices[(turn + place // stride) % len(choices)]

    kind = pick(["equal", "unequal", "empty", "one each"], 1)
    sizes = sizes_of(kind, seed, world)
    # Without ids there is one text for each image; rows of ids may match anything.
    kinds_of_ids = ["none", "across", "text numbers", "int8", "rare"]
    if entry.ids == ONE_TO_ONE:
        kinds_of_ids = ["none", "int8"]
    ids = "none" if name in SAMPLES else pick(kinds_of_ids, 2)
    if entry.takes == "memory" and ids == "text numbers":
        ids = "across"
    texts = [n if ids in ("none", "int8") else 2 * n + (n > 2) for n in sizes]
    options: dict[str, Any] = {"reduction": pick(["mean", "sum", "none"], 3)}
    if entry.takes != "heads alone":
        options["engine"] = pick(["auto", "dense", "tiled"], 4)
    return {
        "loss": name,
        "sizes": list(zip(sizes, texts, strict=True)),
        "ids": ids,
        "options": options,
        "seed": seed,
    }


def sizes_of(kind: str, seed: int, world: int) -> list[int]:
    """The number of images of each process; there is at least one."""
    sizes = []
    for rank in range(world):
        generator = random.Random(f"{seed} {rank}")
        least = 0 if kind == "empty" else 1
        drawn = generator.randint(least, 8)
        sizes.append({"equal": 6, "one each": 1}.get(kind, drawn))
    if kind == "empty":
        sizes[seed % world] = 0
    if not any(sizes):
        sizes[-1] = 1
    return sizes


def batch(config: dict[str, Any], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The inputs of each process."""
    generator = torch.Generator().manual_seed(config["seed"])

    def sample(*shape: int) -> Tensor:
        numbers = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return numbers.to(dtype)

    def integers(low: int, high: int, size: int) -> Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    of_sets = LOSSES[config["loss"]].takes in ("heads", "heads alone")
    high = 30 if config["ids"] == "rare" else 4
    parts = []
    for n, m in config["sizes"]:
        part = {
            "images": sample(n, HEADS, D) if of_sets else sample(n, D),
            "texts": sample(m, D),
            "image_keys": sample(n, D),
            "text_keys": sample(m, D),
            "image_ids": integers(-1, high, n),
            "text_ids": integers(-1, high, m),
        }
        if config["ids"] == "text numbers":  # -1 and those beyond the last match no image
            part["text_ids"] = integers(-1, n + 1, m)
        if config["ids"] == "int8":
            part["image_ids"] = torch.arange(n, dtype=torch.int8)
            part["text_ids"] = torch.arange(n, dtype=torch.int8)
        part["prototype_ids"] = integers(0, 7, n)
        parts.append(part)
    return parts


def joined(parts: list[dict[str, Tensor]], ids: str) -> dict[str, Tensor]:
    """The inputs of one process with the batches of all."""
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if ids == "text numbers":
        first = 0
        numbers = []
        for part in parts:
            n = len(part["images"])
            own = part["text_ids"]
            exists = (own >= 0) & (own < n)
            numbers.append(torch.where(exists, own + first, -1))
            first += n
        whole["text_ids"] = torch.cat(numbers)
    if ids == "int8":  # ids are valid across processes
        whole["image_ids"] = whole["image_ids"].long()
        whole["text_ids"] = whole["text_ids"].long()
    return whole


def more_than_pairs(
    takes: str, inputs: dict[str, Tensor], ids: list[Any], gather: bool
) -> dict[str, Any]:
    """Return what a loss takes besides pairs: the keys are another model's embeddings."""
    if takes == "negatives":
        return {"negatives": inputs["text_keys"]}
    if takes not in ("guide", "teacher"):
        return {}
    image_keys = inputs["image_keys"].requires_grad_()
    text_keys = inputs["text_keys"].requires_grad_()
    make: Any = Similarity.sharded if gather else Similarity
    return {takes: make(image_keys, text_keys, *ids)}


def given_ids(config: dict[str, Any], inputs: dict[str, Tensor]) -> tuple[Any, Any]:
    """The ids that a loss is called with."""
    if config["ids"] == "none":
        return None, None
    if config["ids"] == "text numbers":
        return None, inputs["text_ids"]
    return inputs["image_ids"], inputs["text_ids"]


def weighted_total(values: tuple[Tensor, ...]) -> Any:
    """A number of the values of a loss; values of anchors are summed first."""
    total: Any = 0.0
    for x in values:
        weights = torch.linspace(1, 2, len(x), dtype=x.dtype).sum() if x.dim() else 1.0
        total = total + (x * weights).sum()
    return total


def outcome(
    config: dict[str, Any],
    inputs: dict[str, Tensor],
    memory: itrloss.CoupledMemory,
    compiled=False,
    **options: Any,
) -> dict[str, Any]:
    """The loss and its gradients, with respect to images, texts and the loss's parameters."""
    torch.manual_seed(1)
    entry = LOSSES[config["loss"]]
    module = entry.make(D, **config["options"], **options).to(inputs["images"].dtype)
    criterion: Any = module
    if compiled:
        criterion = torch.compile(module, fullgraph=module.engine != "tiled", backend="aot_eager")
    v = inputs["images"].clone().requires_grad_()
    w = inputs["texts"].clone().requires_grad_()
    image_ids, text_ids = given_ids(config, inputs)
    if entry.takes == "memory":
        keys = (inputs["image_keys"], inputs["text_keys"])
        value = criterion(v, w, *keys, memory, image_ids, text_ids)
    elif entry.takes == "heads alone":
        value = criterion(v)
    elif entry.takes == "prototypes":
        value = criterion(v, w, inputs["prototype_ids"])
    else:
        gather = bool(options.get("gather"))
        more = more_than_pairs(entry.takes, inputs, [image_ids, text_ids], gather)
        value = criterion(v, w, image_ids=image_ids, text_ids=text_ids, **more)
    values = value if isinstance(value, tuple) else (value,)
    weighted_total(values).backward()
    leaves = {"images": v, "texts": w, **dict(module.named_parameters())}
    grads = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    return {"values": [x.detach() for x in values], "grads": grads}


def filled_memory(config: dict[str, Any], dtype: torch.dtype) -> itrloss.CoupledMemory:
    """A memory with nine keys, of which some have the ids of a batch."""
    generator = torch.Generator().manual_seed(0)
    memory = itrloss.CoupledMemory(11, D, dtype=dtype)
    keys = torch.randn(2, 9, D, generator=generator, dtype=torch.float64)
    image_keys, text_keys = keys.to(dtype)
    memory._labelled = config["ids"] != "none"
    memory.images[:9] = normalized(image_keys)
    memory.texts[:9] = normalized(text_keys)
    numbers = torch.arange(9)
    memory.ids[:9] = numbers % 4 if memory._labelled else numbers + IGNORE_ID + 1
    return memory
