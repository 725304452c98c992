"""Random batches over several processes, and the same in one."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import itrloss
from itrloss import Similarity
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
    sizes = [
        {"equal": 6, "one each": 1}.get(
            kind, random.Random(f"{seed} {rank}").randint(kind != "empty", 8)
        )
        for rank in range(world)
    ]
    if kind == "empty":
        sizes[seed % world] = 0
    sizes[-1] += not any(sizes)
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


def batch(config: dict[str, Any], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The inputs of each process."""
    generator = torch.Generator().manual_seed(config["seed"])
    sample = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    parts = []
    for n, m in config["sizes"]:
        of_sets = LOSSES[config["loss"]].takes in ("heads", "heads alone")
        sets = (n, HEADS, D) if of_sets else (n, D)
        part = {
            "images": sample(*sets),
            "texts": sample(m, D),
            "image_keys": sample(n, D),
            "text_keys": sample(m, D),
        }
        part = {name: x.to(dtype) for name, x in part.items()}
        high = 30 if config["ids"] == "rare" else 4
        part["image_ids"] = torch.randint(-1, high, (n,), generator=generator)
        part["text_ids"] = torch.randint(-1, high, (m,), generator=generator)
        if config["ids"] == "text numbers":  # -1 and those beyond the last match no image
            part["text_ids"] = torch.randint(-1, n + 1, (m,), generator=generator)
        if config["ids"] == "int8":
            part["image_ids"] = part["text_ids"] = torch.arange(n, dtype=torch.int8)
        part["prototype_ids"] = torch.randint(0, 7, (n,), generator=generator)
        parts.append(part)
    return parts


def joined(parts: list[dict[str, Tensor]], ids: str) -> dict[str, Tensor]:
    """The inputs of one process with the batches of all."""
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if ids == "text numbers":
        first, numbers = 0, []
        for part in parts:
            n, own = len(part["images"]), part["text_ids"]
            numbers.append(torch.where((own >= 0) & (own < n), own + first, -1))
            first += n
        whole["text_ids"] = torch.cat(numbers)
    if ids == "int8":  # ids are valid across processes
        whole["image_ids"], whole["text_ids"] = whole["image_ids"].long(), whole["text_ids"].long()
    return whole


def more_than_pairs(
    takes: str, inputs: dict[str, Tensor], ids: list[Any], gather: bool
) -> dict[str, Any]:
    """Return what a loss takes besides pairs: the keys are another model's embeddings."""
    if takes == "negatives":
        return {"negatives": inputs["text_keys"]}
    if takes not in ("guide", "teacher"):
        return {}
    kind: Any = Similarity.sharded if gather else Similarity
    keys = [inputs[name].requires_grad_() for name in ("image_keys", "text_keys")]
    return {takes: kind(*keys, *ids)}


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
    v, w = (inputs[name].clone().requires_grad_() for name in ("images", "texts"))
    ids = [inputs["image_ids"], inputs["text_ids"]]
    if config["ids"] in ("none", "text numbers"):
        ids = [None, None if config["ids"] == "none" else ids[1]]
    if entry.takes == "memory":
        value = criterion(v, w, inputs["image_keys"], inputs["text_keys"], memory, *ids)
    elif entry.takes == "heads alone":
        value = criterion(v)
    elif entry.takes == "prototypes":
        value = criterion(v, w, inputs["prototype_ids"])
    else:
        more = more_than_pairs(entry.takes, inputs, ids, bool(options.get("gather")))
        value = criterion(v, w, image_ids=ids[0], text_ids=ids[1], **more)
    values = value if isinstance(value, tuple) else (value,)
    total: Any = sum(
        (x * torch.linspace(1, 2, len(x), dtype=x.dtype).sum() if x.dim() else x).sum()
        for x in values
    )
    total.backward()
    grads = {
        "images": v.grad,
        "texts": w.grad,
        **{name: p.grad for name, p in module.named_parameters()},
    }
    return {
        "values": [x.detach() for x in values],
        "grads": {k: x for k, x in grads.items() if x is not None},
    }


def filled_memory(config: dict[str, Any], dtype: torch.dtype) -> itrloss.CoupledMemory:
    generator = torch.Generator().manual_seed(0)
    memory = itrloss.CoupledMemory(11, D, dtype=dtype)
    keys = torch.randn(2, 9, D, generator=generator, dtype=torch.float64).to(dtype)
    memory._labelled = config["ids"] != "none"
    from itrloss.engine.pairs import IGNORE_ID
    from itrloss.engine.vectors import normalized

    memory.images[:9], memory.texts[:9] = normalized(keys[0]), normalized(keys[1])
    memory.ids[:9] = torch.arange(9) % 4 if memory._labelled else torch.arange(9) + IGNORE_ID + 1
    return memory
