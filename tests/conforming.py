"""The losses of this library as `check_loss` takes them: how they are called, and the checks they
fail for a reason.

What a loss takes besides embeddings and ids, its `call` makes of them row by row, so that it is
permuted with them. The suite runs a part of the checks; `python tests/conforming.py [NAME ...]`
runs all of them, and prints the times.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import itrloss
from itrloss import compat
from itrloss.engine.vectors import normalized
from itrloss.testing import check_loss


class Case(NamedTuple):
    """A loss, the options of ``check_loss``, and the checks that it fails for a reason."""

    loss: Any
    options: Mapping[str, Any] = MappingProxyType({})
    failures: Mapping[str, str] = MappingProxyType({})


# Expected failures, with their reason.
NUMERICAL = "gradcheck", "finite_differences"
CONSTANT = dict.fromkeys(
    [*NUMERICAL, "uneven_upstream"], "weights that the gradient takes for constants"
)
NEGATIVES_ALONE = {
    "float32_error": "1 - p cancels where p is near 1, see the loss",
    "learns_classes": "it learns from negatives alone: an image that starts far from its positives stays there",
}
DENSE = {"memory_grows_linearly": "its scores, of a teacher or of sets, are a matrix"}
HELD = {"memory_grows_linearly": "scores of up to 256 MiB are held, as with engine='auto'"}
PREFIXES = {"rotation": "prefixes are of coordinates"}
OTHER_SCORES = {
    "learns_pairs": "models with this loss retrieve by other scores than inner products"
}
SETS = OTHER_SCORES | {"rotation": "its input is made of coordinates of the embeddings"}
CLASSES = {"learns_classes": OTHER_SCORES["learns_pairs"]}
TWO_KINDS = {"swapped_sides": "images and texts take different parts in it"}
FIXED = "its keys and its memory stay as they are"
MEMORY = dict.fromkeys(["rotation", "swapped_sides", "renamed_ids"], FIXED)
APART = dict.fromkeys(
    ["learns_pairs", "learns_classes"], "only the memory has negatives, so pairs are not parted"
)
PROTOTYPES = dict.fromkeys(["rotation", "swapped_sides", "order_of_pairs"], FIXED)
PROTOTYPES |= {"compiled_as_one_graph": "in evaluation mode it asks how many prototypes there are"}
BANK = dict.fromkeys(["rotation", "swapped_sides"], FIXED) | dict.fromkeys(
    NUMERICAL, CONSTANT["gradcheck"]
)
BANK |= {"learns_pairs": "the bank's weights fall as pairs are learnt"}
REGULARISED = dict.fromkeys(
    ["uneven_upstream", "reductions_agree"], 'its reduction is "mean" or "sum"'
)


def taught(loss, images, texts, image_ids, text_ids):
    return loss(images, texts, (image_ids[:, None] == text_ids).to(images.dtype))


def halves(x: Tensor) -> Tensor:
    """Return sets (N, 2, D / 2) of embeddings (N, D)."""
    return x.unflatten(1, (2, -1))


def of_sets(loss, images, texts, image_ids, text_ids):
    lengths = ((x[:, 0] > 0) + 1 for x in (images, texts))
    return loss(halves(images), halves(texts), *lengths, image_ids, text_ids)


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


def coder() -> nn.Module:
    loss = itrloss.CODERObjective(64, 3, detach_diversity=False, engine="tiled")
    loss.prototypes.update(TABLE[0].float())
    return loss.eval()


WEIGHTS = {"div_weight": 0.1, "mmd_weight": 0.1, "unif_weight": 0.1}
OPT = Namespace(
    local_alpha=8.0, local_ep=0.3, mb_k=5, mu=9.0, gama=0.3, margin=0.2, max_violation=False, mask_repeat=True,
    num_embeds=2, img_num_embeds=2, txt_num_embeds=2, temperature=4.0, **WEIGHTS,
)  # fmt: skip


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


LOSSES = {
    "triplet": Case(itrloss.TripletLoss()),
    "triplet all": Case(itrloss.TripletLoss(mining="all", reduction="mean")),
    "infonce": Case(itrloss.InfoNCELoss()),
    "infonce tiled": Case(itrloss.InfoNCELoss(engine="tiled")),
    "infonce learnable": Case(itrloss.InfoNCELoss(learnable=True)),
    "infonce hard": Case(itrloss.InfoNCELoss(hardness=5.0), {}, CONSTANT),
    "sigmoid": Case(itrloss.SigmoidLoss()),
    "hal": Case(itrloss.HubnessAwareLoss()),
    "dcl": Case(itrloss.DiversityContrastiveLoss(), {}, CONSTANT),
    "dcl entropy": Case(
        itrloss.DiversityContrastiveLoss(diversity="entropy", detach_diversity=False)
    ),
    "rince": Case(itrloss.RINCELoss()),
    "complementary": Case(itrloss.ComplementaryContrastiveLoss(), {}, NEGATIVES_ALONE),
    "supcon": Case(itrloss.SupConLoss()),
    "supcon inside": Case(itrloss.SupConLoss(inside=True)),
    "mil-nce": Case(itrloss.MILNCELoss()),
    "multi-similarity": Case(itrloss.MultiSimilarityLoss()),
    "multi-similarity mined": Case(itrloss.MultiSimilarityLoss(epsilon=0.1)),
    "circle": Case(itrloss.CircleLoss(), {}, CONSTANT),
    "filtered": Case(itrloss.FilteredInfoNCELoss()),
    "directional": Case(itrloss.DirectionalInfoNCELoss(), {"ids": False}),
    "directional one by one": Case(itrloss.DirectionalInfoNCELoss(joint=False), {"ids": False}),
    "distillation": Case(itrloss.DistillationLoss(), {"call": taught}, DENSE),
    "matryoshka": Case(
        itrloss.Matryoshka(itrloss.InfoNCELoss(engine="tiled"), (2, 4)), {}, PREFIXES
    ),
    "late interaction": Case(
        itrloss.LateInteractionLoss(0.1), {"call": of_sets}, DENSE | SETS | CLASSES | TWO_KINDS
    ),
    "variance aware": Case(itrloss.VarianceAwareLoss(), {"call": of_heads}, SETS | TWO_KINDS),
    "dvse": Case(itrloss.DVSEObjective(engine="tiled"), {"call": with_residuals}, SETS | TWO_KINDS),
    "pcme++": Case(
        itrloss.PCMEPlusPlusLoss(), {"call": of_normals, "normalizes": False}, SETS | CLASSES
    ),
    "m-dcl": Case(
        itrloss.MemoryDiversityContrastiveLoss(detach_diversity=False),
        {"call": with_memory},
        MEMORY | APART,
    ),
    "uto": Case(itrloss.UnifiedTrainingObjective(), {"call": with_memory}, MEMORY),
    "coder": Case(coder(), {"call": of_coder, "ids": False}, PROTOTYPES),
    "prototypes": Case(
        itrloss.PrototypeClassificationLoss(64, 3),
        {"call": of_prototypes, "ids": False, "normalizes": False},
        SETS,
    ),
    "vse++": published(compat.VSEPPLoss(0.2)),
    "vse++ order": published(compat.VSEPPLoss(0.2, "order"), failures=HELD | SETS | TWO_KINDS),
    "vse∞ hardest": published(compat.VSEInfinityLoss(margin=0.2, max_violation=True), failures={}),
    "adapted": published(compat.adapt(itrloss.InfoNCELoss(learnable=True), "hrem"), numbered),
    "scan": published(compat.SCANLoss(cosines, 0.2), scored),
    "sgraf": published(compat.SGRAFLoss(0.2), of_scores),
    "chan": published(compat.CHANLoss(), of_scores),
    "hrem": published(compat.HREMLoss(OPT), numbered),
    "published hal": published(compat.HALLoss(OPT)),
    "hal with a bank": published(compat.HALLoss(OPT), with_bank, HELD | BANK),
    "user": published(compat.USERLoss(OPT)),
    "user's queues": Case(compat.USERLoss(OPT), {"call": with_queues}, MEMORY | APART),
    "clip": published(compat.ClipLoss(), scaled),
    "siglip": published(compat.SigLipLoss(), scaled),
    "pvse": published(compat.PVSELoss(OPT), of_published_sets, HELD | SETS | REGULARISED),
    "dive": published(
        compat.DivELoss(2, 2, None, OPT, txt_per_img=1),
        of_published_sets,
        HELD | SETS | REGULARISED,
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
