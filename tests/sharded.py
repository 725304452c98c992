"""Random batches over several processes, and the same in one."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import itrloss
from itrloss import Similarity

D, HEADS = 5, 3
PAIR = {
    "dcl": lambda **o: itrloss.DiversityContrastiveLoss(**o),
    "dcl attached": lambda **o: itrloss.DiversityContrastiveLoss(detach_diversity=False, **o),
    "dcl entropy": lambda **o: itrloss.DiversityContrastiveLoss(
        diversity="entropy", entropy_temperature=0.05, detach_diversity=False, **o
    ),
    "dcl implicit": lambda **o: itrloss.DiversityContrastiveLoss(
        diversity=None, temperature=0.01, **o
    ),
    "hal": lambda **o: itrloss.HubnessAwareLoss(**o),
    "hal soft": lambda **o: itrloss.HubnessAwareLoss(scale=8.0, positive="relu", **o),
    "infonce": lambda **o: itrloss.InfoNCELoss(learnable=True, **o),
    "infonce cold": lambda **o: itrloss.InfoNCELoss(temperature=0.004, **o),
    "sigmoid": lambda **o: itrloss.SigmoidLoss(**o),
    "rince": lambda **o: itrloss.RINCELoss(0.2, **o),
    "complementary": lambda **o: itrloss.ComplementaryContrastiveLoss(0.2, **o),
    "triplet": lambda **o: itrloss.TripletLoss(margin=0.5, **o),
    "triplet all": lambda **o: itrloss.TripletLoss(mining="all", margin=0.5, **o),
    "supcon": lambda **o: itrloss.SupConLoss(**o),
    "mil-nce": lambda **o: itrloss.MILNCELoss(**o),
    "multi-similarity": lambda **o: itrloss.MultiSimilarityLoss(epsilon=0.1, **o),
    "circle": lambda **o: itrloss.CircleLoss(**o),
    "infonce hard": lambda **o: itrloss.InfoNCELoss(learnable=True, hardness=9.0, **o),
    "infonce negatives": lambda **o: itrloss.InfoNCELoss(hardness=5.0, **o),
    "filtered": lambda **o: itrloss.FilteredInfoNCELoss(margin=-0.1, **o),
    "filtered by a guide": lambda **o: itrloss.FilteredInfoNCELoss(margin=0.05, relative=True, **o),
    "distillation": lambda **o: itrloss.DistillationLoss(**o),
    "directional": lambda **o: itrloss.DirectionalInfoNCELoss(**o),
    "directional one by one": lambda **o: itrloss.DirectionalInfoNCELoss(joint=False, **o),
}
MEMORY = {
    "mdcl": lambda **o: itrloss.MemoryDiversityContrastiveLoss(**o),
    "mdcl batch": lambda **o: itrloss.MemoryDiversityContrastiveLoss(
        positive_from="batch", diversity_from="batch", detach_diversity=False, **o
    ),
    "uto": lambda **o: itrloss.UnifiedTrainingObjective(**o),
}
SETS = {
    "variance aware": lambda **o: itrloss.VarianceAwareLoss(margin=0.5, **o),
    "variance aware, own sigma": lambda **o: itrloss.VarianceAwareLoss(
        margin=0.5, shared_sigma=False, **o
    ),
}
SAMPLES = {
    "pgc": lambda **o: itrloss.PrototypeClassificationLoss(D, 7, **o),
    "orthogonal": lambda **o: itrloss.DynamicOrthogonalLoss(slack=0.1, **o),
}
LOSSES = {**PAIR, **MEMORY, **SETS, **SAMPLES}
# the keys are another model's embeddings
GUIDED = {"filtered by a guide": "guide", "distillation": "teacher"}
ONE_TO_ONE = *SAMPLES, "directional", "directional one by one"


def configuration(seed: int, world: int) -> dict[str, Any]:
    """A loss with options, the sizes of all processes' batches, ids, and how it is computed."""
    turn, place = divmod(seed, len(LOSSES))
    name = list(LOSSES)[place]

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
    given = (
        ["none", "int8"]
        if name in ONE_TO_ONE
        else ["none", "across", "text numbers", "int8", "rare"]
    )
    ids = "none" if name in SAMPLES else pick(given, 2)
    if name in MEMORY and ids == "text numbers":
        ids = "across"
    texts = [n if ids in ("none", "int8") else 2 * n + (n > 2) for n in sizes]
    options: dict[str, Any] = {"reduction": pick(["mean", "sum", "none"], 3)}
    if name != "orthogonal":
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
        sets = (n, HEADS, D) if config["loss"] in SETS or config["loss"] == "orthogonal" else (n, D)
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


def outcome(
    config: dict[str, Any],
    inputs: dict[str, Tensor],
    memory: itrloss.CoupledMemory,
    compiled=False,
    **options: Any,
) -> dict[str, Any]:
    """The loss and its gradients, with respect to images, texts and the loss's parameters."""
    torch.manual_seed(1)
    dtype = inputs["images"].dtype
    module = LOSSES[config["loss"]](**config["options"], **options).to(dtype)
    criterion: Any = (
        torch.compile(module, fullgraph=module.engine != "tiled", backend="aot_eager")
        if compiled
        else module
    )
    v, w = (inputs[name].clone().requires_grad_() for name in ("images", "texts"))
    ids = [inputs["image_ids"], inputs["text_ids"]]
    if config["ids"] in ("none", "text numbers"):
        ids = [None, None if config["ids"] == "none" else ids[1]]
    if config["loss"] in MEMORY:
        value = criterion(v, w, inputs["image_keys"], inputs["text_keys"], memory, *ids)
    elif config["loss"] == "orthogonal":
        value = criterion(v)
    elif config["loss"] == "pgc":
        value = criterion(v, w, inputs["prototype_ids"])
    else:
        more: dict[str, Any] = (
            {"negatives": inputs["text_keys"]} if config["loss"] == "infonce negatives" else {}
        )
        if config["loss"] in GUIDED:
            kind: Any = Similarity.sharded if options.get("gather") else Similarity
            keys = (inputs[name].requires_grad_() for name in ("image_keys", "text_keys"))
            more = {GUIDED[config["loss"]]: kind(*keys, *ids)}
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
