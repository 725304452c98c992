"""The losses of the registry, and published ones, as `check_loss` takes them: how they are called,
and the checks they fail for a reason.

What a loss takes besides embeddings and ids, its `call` makes of them row by row, so that it is
permuted with them. The suite runs a part of the checks. All of them run, and print their times, by
`PYTHONPATH=tests python -m support.conforming [NAME ...]`.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import itrloss
from itrloss import compat
from itrloss.engine.vectors import normalized
from itrloss.testing import check_loss
from support.losses_registry import (
    CONSTANT,
    COORDINATES,
    FIXED,
    MEMORY,
    ONE_TO_ONE,
    REGISTRY,
    TWO_KINDS,
    table,
)


class Case(NamedTuple):
    """A loss, the options of ``check_loss``, and the checks that it fails for a reason."""

    loss: Any
    options: Mapping[str, Any] = MappingProxyType({})
    failures: Mapping[str, str] = MappingProxyType({})


# Failures of published losses only, with their reason.
HELD = {"memory_grows_linearly": "scores of up to 256 MiB are held, as with engine='auto'"}
BANK = dict.fromkeys(["rotation", "swapped_sides"], FIXED)
BANK["gradcheck"] = CONSTANT["gradcheck"]
REGULARISED = dict.fromkeys(
    ["uneven_upstream", "reductions_agree"], 'its reduction is "mean" or "sum"'
)


def taught(loss, images, texts, image_ids, text_ids):
    teacher = (image_ids[:, None] == text_ids).to(images.dtype)
    return loss(images, texts, teacher, image_ids, text_ids)


def halves(x: Tensor) -> Tensor:
    """Return sets (N, 2, D / 2) of embeddings (N, D)."""
    return x.unflatten(1, (2, -1))


def of_sets(loss, images, texts, image_ids, text_ids):
    lengths = ((x[:, 0] > 0) + 1 for x in (images, texts))
    return loss(halves(images), halves(texts), *lengths, image_ids, text_ids)


def with_negatives(loss, images, texts, *ids):
    """Each image has two further texts, which turn and are permuted with the batch."""
    units = normalized(images)
    further = [units - units.mean(0), units + normalized(texts).mean(0)]
    return loss(images, texts, *ids, negatives=torch.stack(further, 1))


def with_guide(loss, images, texts, *ids):
    of_images = normalized(images)
    of_texts = normalized(texts)
    guide = of_images - of_texts.mean(0), of_texts - of_images.mean(0)
    return loss(images, texts, *ids, guide=guide)


def of_heads(loss, images, texts, *ids):
    return loss(torch.stack([images, images.flip(1)], 1), texts, *ids)


def with_residuals(loss, images, texts, image_ids, text_ids):
    return of_heads(loss, images, texts, halves(images), None, image_ids, text_ids)[0]


def of_normals(loss, images, texts, image_ids, text_ids):
    return loss(images, texts, images, texts, image_ids, text_ids)


# Bfloat16 numbers, so that no type rounds them.
TABLE = torch.randn(3, 130, 64, generator=torch.Generator().manual_seed(5)).bfloat16().double()


def keys_of(ids: Tensor, like: Tensor) -> Tensor:
    return TABLE[0, ids % 101, : like.shape[1]].to(like.dtype)


def filled(dim: int, dtype: torch.dtype, ids: Tensor | None) -> itrloss.CoupledMemory:
    memory = itrloss.CoupledMemory(20, dim, dtype=dtype)
    memory.enqueue(*TABLE[1:, :20, :dim], ids)
    return memory


# The compiler takes no modules that are made in a call.
MEMORIES = {
    (dim, double, labelled): filled(dim, torch.float64 if double else torch.float32, ids)
    for dim in (4, 6, 8, 64)
    for double in (False, True)
    for labelled, ids in ((True, torch.arange(20) // 2), (False, None))
}


def memory_for(x: Tensor, labelled: bool = True) -> itrloss.CoupledMemory:
    return MEMORIES[x.shape[1], x.dtype == torch.float64, labelled]


def with_memory(loss, images, texts, *ids):
    return loss(images, texts, *(keys_of(x, images) for x in ids), memory_for(images), *ids)


def with_queues(loss, images, texts, *ids):
    queries, queues = (normalized(images), normalized(texts)), memory_for(images)
    keys = [normalized(keys_of(x, images)) for x in ids]  # of the other side: a pair has one id
    return loss.moco_forward(
        queries[0], keys[0], queries[1], keys[1], queues.images.T, queues.texts.T
    )


def with_bank(loss, images, texts):
    bank, number = memory_for(images), torch.arange(15, 15 + len(images))
    return loss(
        normalized(images), normalized(texts), bank.images, bank.texts, torch.arange(20), number
    )


def wide(x: Tensor, like: Tensor) -> Tensor:
    """Return embeddings with 64 dimensions if ``like`` has so many then."""
    return F.pad(x, (0, 64 - like.shape[1]))


def of_coder(loss, images, texts):
    images, texts = wide(images, images), wide(texts, images)
    keys = keys_of(torch.arange(len(images)), images)
    concepts = normalized(images), normalized(texts)
    return loss(images, texts, keys, keys, memory_for(images, False), *concepts)[0]


def of_prototypes(loss, images, texts):
    return loss(wide(images, images), wide(texts, images), (images + texts).argmax(1) % 3)


WEIGHTS = {"div_weight": 0.1, "mmd_weight": 0.1, "unif_weight": 0.1}
OPT = Namespace(
    local_alpha=8.0,
    local_ep=0.3,
    mb_k=5,
    mu=9.0,
    gama=0.3,
    margin=0.2,
    max_violation=False,
    mask_repeat=True,
    num_embeds=2,
    img_num_embeds=2,
    txt_num_embeds=2,
    temperature=4.0,
    **WEIGHTS,
)


def plainly(loss, images, texts, *more):
    """The published losses get embeddings that their models have normalised."""
    return loss(normalized(images), normalized(texts), *more)


def numbered(loss, images, texts):
    return plainly(loss, images, texts, torch.arange(len(images)))


def scaled(loss, images, texts):
    return plainly(loss, images, texts, 10.0, -5.0)


def of_scores(loss, images, texts):
    return loss(itrloss.Similarity(images, texts).scores())


def scored(loss, images, texts):
    return loss(images, texts, None)


def of_published_sets(loss, images, texts):
    sets = [normalized(halves(x)) for x in (images, texts)]
    return loss(*sets, *(x.flip(2) for x in sets))[0]


def cosines(images: Tensor, texts: Tensor, lengths: Any) -> Tensor:
    return itrloss.Similarity(images, texts).scores()


def published(
    loss: Any, call: Callable[..., Any] = plainly, failures: Mapping[str, str] = HELD
) -> Case:
    return Case(loss, {"ids": False, "call": call}, failures)


# How a loss of each kind of input is called with images, texts and their ids, if it takes any.
CALLS: dict[str, Mapping[str, Any]] = {
    "pairs": {},
    "negatives": {"call": with_negatives},
    "guide": {"call": with_guide},
    "teacher": {"call": taught},
    "tokens": {"call": of_sets},
    "heads": {"call": of_heads},
    "heads and residuals": {"call": with_residuals},
    "distributions": {"call": of_normals, "normalizes": False},
    "memory": {"call": with_memory},
    "coder": {"call": of_coder, "ids": False},
    "prototypes": {"call": of_prototypes, "ids": False, "normalizes": False},
}
# Options with which losses are checked, where they are not those of the registry.
TILED = {"engine": "tiled"}
OPTIONS: dict[str, Mapping[str, Any]] = {
    "triplet all": {"reduction": "mean"},
    "matryoshka": TILED,
    "dvse": TILED,
    "coder": {"clusters": 3, "detach_diversity": False, **TILED},
}


def conforming(name: str, **options: Any) -> Case:
    """Return a loss of the registry, for embeddings of 64 dimensions if it has to know them."""
    entry = REGISTRY[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)  # weights that are drawn
        loss = entry.make(64, **OPTIONS.get(name, {}), **options)
    if entry.takes == "coder":
        loss.prototypes.update(TABLE[0].float())
        loss.eval()
    how = dict(CALLS[entry.takes])
    if entry.ids == ONE_TO_ONE:
        how["ids"] = False
    failures = {**entry.failures, **CONSTANT} if entry.has_constants else entry.failures
    return Case(loss, how, failures)


LOSSES = {
    **{name: conforming(name) for name in table("conforming")},
    "infonce tiled": conforming("infonce", engine="tiled"),
    "vse++": published(compat.VSEPPLoss(0.2)),
    "vse++ order": published(
        compat.VSEPPLoss(0.2, "order"), failures=HELD | COORDINATES | TWO_KINDS
    ),
    "vse∞ hardest": published(compat.VSEInfinityLoss(margin=0.2, max_violation=True)),
    "adapted": published(compat.adapt(itrloss.InfoNCELoss(learnable=True), "hrem"), numbered),
    "scan": published(compat.SCANLoss(cosines, 0.2), scored),
    "sgraf": published(compat.SGRAFLoss(0.2), of_scores),
    "chan": published(compat.CHANLoss(), of_scores),
    "hrem": published(compat.HREMLoss(OPT), numbered),
    "published hal": published(compat.HALLoss(OPT)),
    "hal with a bank": published(compat.HALLoss(OPT), with_bank, HELD | BANK),
    "user": published(compat.USERLoss(OPT)),
    "user's queues": Case(compat.USERLoss(OPT), {"call": with_queues}, HELD | MEMORY),
    "clip": published(compat.ClipLoss(), scaled),
    "siglip": published(compat.SigLipLoss(), scaled),
    "pvse": published(compat.PVSELoss(OPT), of_published_sets, HELD | COORDINATES | REGULARISED),
    "dive": published(
        compat.DivELoss(2, 2, None, OPT, txt_per_img=1),
        of_published_sets,
        HELD | COORDINATES | REGULARISED,
    ),
}

if __name__ == "__main__":
    for name in sys.argv[1:] or LOSSES:
        loss, options, failures = LOSSES[name]
        report = check_loss(loss, expected_failures=failures, **options)
        print(
            f"{sum(x.seconds for x in report.outcomes):5.1f} s  {name}: {report.summary}",
            flush=True,
        )
