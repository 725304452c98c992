"""Wrong input of losses, and options out of range, are named.

`test_messages` has what beginners do, `test_options` how options are checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import embeddings
from support.drawn_losses import LossCase
from support.losses_registry import REGISTRY

import itrloss
from itrloss import CODERObjective, CoupledMemory, InfoNCELoss, Similarity, functional
from itrloss.memory import MemorySimilarity

it: Any = itrloss
V, W = embeddings(4, 4, dtype=torch.float32)
X, Y = embeddings(3, 4, dtype=torch.float32)
IDS = torch.arange(4)
EYE = torch.eye(4)
OWN = torch.randn(4, 2, 6)  # negatives of each image
FEW = torch.randn(3, 6)  # negatives of all
SETS = torch.ones(4, 3, 6)
LOGS = V - 2, W - 2

WEIGHTED = Similarity(V, W, related=it.Related(matches=0.5 * EYE))

infonce: Any = InfoNCELoss()
filtered: Any = InfoNCELoss(0.05, margin=0.1)
distilling: Any = it.DistillationLoss()
variance_aware: Any = it.VarianceAwareLoss()
orthogonal: Any = it.DynamicOrthogonalLoss()
pcme: Any = it.PCMEPlusPlusLoss()
prototypes: Any = it.PrototypeClassificationLoss(6, 5)
one_way: Any = partial(InfoNCELoss, directions="image-text")
prefixes: Any = partial(it.Matryoshka, infonce)

# Options that are out of their range; `test_messages` has those of another type.
OPTIONS: list[tuple[Any, str, Any]] = [
    (InfoNCELoss, "hardness", math.nan),
    (InfoNCELoss, "hardness", (1.0, 2.0, 3.0)),
    (it.SigmoidLoss, "directions", "image-text"),
    (it.DistillationLoss, "teacher_temperature", -1.0),
    (it.SupConLoss, "temperature", 0.0),
    (it.SDMLoss, "epsilon", 0.0),
    (it.MultiSimilarityLoss, "beta", -1.0),
    (it.CircleLoss, "scale", 0),
    (it.CircleLoss, "margin", None),
    (it.RINCELoss, "q", 1.5),
    (it.RINCELoss, "q", 0.0),
    (it.RINCELoss, "lam", 2.0),
    (it.RINCELoss, "lam", 0.0),
    (it.ComplementaryContrastiveLoss, "temperature", 0.0),
    (it.PCMEPlusPlusLoss, "scale", 0.0),
    (it.PCMEPlusPlusLoss, "pseudo_weight", -1),
    (it.MemoryInfoNCELoss, "distillation", 1.5),
    (partial(it.DynamicGate, 3), "heads", 0),
    (partial(it.DynamicGate, 3, 2), "momentum", 3.0),
    (partial(it.PrototypeClassificationLoss, 3), "clusters", 0),
    (partial(it.PrototypeClassificationLoss, clusters=5), "dim", 3.5),
    (partial(CODERObjective, 5, 4), "reduction", "none"),
    (partial(CODERObjective, 5, 4), "temperature", 0),
    (it.DVSEObjective, "balance", 1.5),
    (it.DVSEObjective, "reduction", "sum"),
    (partial(CoupledMemory, dim=4), "size", 0),
    (partial(CoupledMemory, dim=4), "size", 2.5),
]


@pytest.mark.parametrize(("make", "name", "value"), OPTIONS)
def test_options_out_of_range_are_refused(make: Any, name: str, value: Any):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected "):
        make(**{name: value})


def filled(ids: Any = None) -> CoupledMemory:
    memory = CoupledMemory(9, 6)
    memory.enqueue(X, X, ids)
    return memory


def with_memory(*given: Any, memory: Any = None) -> Any:
    """A loss of embeddings, keys and ids next to a memory."""
    keys = given or (V,) * 4
    if memory is None:
        memory = filled()
    return it.UnifiedTrainingObjective()(*keys[:4], memory, *keys[4:])


def coder(place: int, x: Any, **options: Any) -> Any:
    """CODER's objective with another argument at a place."""
    given = [V, W, V, W, CoupledMemory(4, 6), V, W]
    given[place] = x
    return CODERObjective(6, 4, **options)(*given)


def reset(*given: Any) -> Any:
    return it.PrototypeClassificationLoss(6, 5).reset(*given)


def cut(value: Any, name: str) -> Any:
    """A loss of prefixes whose option is set later."""
    criterion = prefixes((2, 3))
    setattr(criterion, name, value)
    return criterion(V, W)


# A wrong call, and what its message begins with.
CALLS: list[tuple[Callable[[], Any], str]] = [
    # negatives
    (lambda: infonce(V, W, negatives=FEW[:, :5]), "negatives: expected embeddings of dimension"),
    (lambda: infonce(V, W, negatives=FEW[:0]), r"negatives: expected shape \(M, D\), each at"),
    (lambda: infonce(V, W, negatives=OWN[:, :0]), r"negatives: expected shape \(N, K, D\), each"),
    (lambda: infonce(V, W, negatives=OWN[:3]), r"negatives: expected shape \(K, D\) or \(4, K"),
    (lambda: infonce(V, W, negatives=FEW.double()), "negatives: expected the dtype of images"),
    (lambda: infonce(Similarity(V, W), negatives=V), "negatives: expected images with them"),
    (lambda: infonce(scores=EYE, negatives=EYE[:3]), "negatives: expected a row of scores for"),
    (lambda: infonce(V, W, negative_ids=IDS), "negative_ids: expected None without"),
    (
        lambda: infonce(V, W, negatives=FEW, negative_ids=IDS),
        r"negative_ids: expected shape \(3,\), got \(4,\)",
    ),
    (
        lambda: infonce(V, W, negatives=OWN, negative_ids=IDS),
        r"negative_ids: expected shape \(4, 2\), got \(4,\)",
    ),
    # options of InfoNCE that exclude each other
    (lambda: one_way(joint=True)(V, W), "joint: expected False, or directions"),
    (
        lambda: itrloss.MILNCELoss(joint="once", directions="image-text")(V, W),
        "joint: expected False, or directions='both'",
    ),
    (
        lambda: itrloss.SupConLoss(inside=True, label_smoothing=0.1)(V, W),
        "label_smoothing: .*inside",
    ),
    *[
        (
            lambda x=x: InfoNCELoss(label_smoothing=0.1, **x)(V, W),
            "label_smoothing: expected 0 with",
        )
        for x in ({"joint": True}, {"margin": 0.1}, {"image_image": True})
    ],
    (
        lambda: InfoNCELoss(label_smoothing=0.1)(V, W, negatives=FEW),
        "label_smoothing: expected 0 with joint, a margin or candidates outside the batch",
    ),
    (lambda: InfoNCELoss(in_batch=False)(V, W), "in_batch: expected True, or directions='image-t"),
    (lambda: one_way(in_batch=False)(V, W), "in_batch: expected True, or negatives"),
    (
        lambda: one_way(in_batch=False, image_image=True)(V, W, negatives=OWN),
        "in_batch: expected True with image_image",
    ),
    (lambda: InfoNCELoss(relative=True)(V, W), "relative: expected a margin"),
    (lambda: InfoNCELoss(text_text="unfiltered")(V, W), "text_text: expected a margin with"),
    (lambda: InfoNCELoss(image_image=True)(scores=EYE), "image_image, text_text: expected False"),
    (lambda: it.RINCELoss(0.005)(V, W), "temperature: expected at least q / 70 = 0.0071"),
    (
        lambda: it.MemoryInfoNCELoss(batch_negatives=False, distillation=0.4)(V, W, V, W, filled()),
        "distillation: expected 0 with batch_negatives=False",
    ),
    # guides and teachers
    (lambda: filtered(V, W, guide=EYE[:3]), r"guide: expected shape \(4, 4\), got \(3, 4\)"),
    (lambda: filtered(V, W, guide=Similarity(V, W)), "guide: expected .* scores or embeddings"),
    (lambda: filtered(V, W, negatives=FEW, guide=EYE), "guide: expected embeddings w"),
    (lambda: filtered(V, W, negatives=FEW, guide=(V, W)), r"guide: .*negatives\), got 2 tensors"),
    (lambda: infonce(V, W, guide=(V, W)), "guide: expected None without a margin"),
    (lambda: distilling(V, W, EYE[:3]), r"teacher: expected shape \(4, 4\), got \(3, 4\)"),
    (lambda: distilling(V, W, EYE[..., None]), r"teacher: expected shape \(N, M\)"),
    (lambda: it.MarginMSELoss()(V[:3], W, EYE[:3]), "image_ids, text_ids: needed for 3 images"),
    (
        lambda: it.MarginMSELoss().compute(WEIGHTED, Similarity(V, W)),
        "matches: expected 1 for all matches in MarginMSELoss",
    ),
    (
        lambda: functional.variance_aware_loss([WEIGHTED]),
        "matches: expected 1 for all matches in variance_aware_loss",
    ),
    (lambda: distilling(V, W, EYE.long()), r"teacher: expected a floating-point tensor \(N, M\)"),
    (
        lambda: functional.distillation_loss(Similarity(V, W), V),  # type: ignore[arg-type]
        "teacher: expected a Similarity",
    ),
    # sets and gates
    (lambda: variance_aware(V, W), r"image_sets: expected shape \(N, K, D\)"),
    (lambda: variance_aware(SETS.long(), W), r"image_sets: .* \(N, K, D\), got torch.int64"),
    (lambda: variance_aware(SETS, W[:, :3]), "texts: expected embeddings of dimension 6 like im"),
    (lambda: variance_aware(SETS, W[:2]), "image_ids, text_ids: needed for 4"),
    (lambda: variance_aware(SETS, W, IDS, IDS[:2]), "text_ids: expected shape"),
    (lambda: functional.variance_aware_loss([]), "heads: expected similarities"),
    (lambda: orthogonal(V), r"residuals: expected shape \(N, K, D\)"),
    (lambda: orthogonal(SETS, torch.ones(4, 5)), r"gate: expected shape \(4, 3\) or"),
    (lambda: it.DynamicGate(3, 2)(SETS), r"regions: expected shape \(N, R, 3\)"),
    (lambda: it.DynamicGate(6, 2)(SETS, EYE), r"mask: expected shape \(4, 3\)"),
    # distributions
    (lambda: pcme(V, W[:, :3], *LOGS), "texts_mean: expected embeddings of dimension 6"),
    (lambda: pcme(V, W, X, LOGS[1]), r"images_log_variance: .*\(4, 6\) like images_mean"),
    (lambda: pcme(V, W, LOGS[0], W.double()), "texts_log_variance: expected the dtype of texts"),
    (lambda: pcme(V, W, LOGS[0], W[:, 0]), r"texts_log_variance: expected shape \(B, D\)"),
    (lambda: pcme(V[:3], W, X, W), "image_ids, text_ids: needed for"),
    (lambda: pcme(V, W, *LOGS, matches=1.5 * EYE), "matches: expected labels from 0 to 1"),
    # memories
    (lambda: with_memory(memory=V), "memory: expected a CoupledMemory"),
    (lambda: with_memory(V, V, V[:2], V), "image_keys.* like images"),
    (lambda: with_memory(*[V[:, :4]] * 4), "memory: expected embeddings of dimension 4"),
    (lambda: with_memory(*[V.double()] * 4), "memory: expected the dtype of images"),
    (lambda: with_memory(*[V] * 4, IDS, IDS), "image_ids, text_ids: expected None"),
    (lambda: with_memory(memory=filled(IDS[:3])), "image_ids, text_ids: expected ids"),
    (lambda: with_memory(*[V] * 4, IDS, IDS[:2], memory=filled(IDS[:3])), "text_ids: expected sh"),
    (
        lambda: with_memory(*[V] * 4, None, IDS, memory=filled(IDS[:3])),
        "image_ids: expected ids for images and texts or for neither",
    ),
    (lambda: filled().enqueue(V[:, :4], V[:, :4]), r"image_keys: expected .*\(4, 6\)"),
    (lambda: filled().enqueue(V, V.long()), "text_keys: expected"),
    (lambda: filled(IDS[:3]).enqueue(V, W, IDS[:2]), r"ids: expected shape \(4,\)"),
    (lambda: filled(IDS[:3]).enqueue(V, W, torch.ones(4)), "ids: expected an integer"),
    *(
        (partial(function, Similarity(V, W)), r"sims: expected a MemorySimilarity .* got Similar")
        for function in (
            functional.memory_diversity_contrastive_loss,
            functional.unified_training_objective,
        )
    ),
    *(
        (
            lambda option=option: functional.memory_diversity_contrastive_loss(
                MemorySimilarity.of(V, W, V, W, CoupledMemory(4, 6)), **{option: "queue"}
            ),
            f"{option}: expected .* or 'batch', got 'queue'",
        )
        for option in ("positive_from", "diversity_from", "negatives_from")
    ),
    # prototypes
    (lambda: prototypes(V, W[:3], IDS), r"text_concepts: expected shape \(4, 6\), got \(3, 6\)"),
    (lambda: prototypes(V, W.double(), IDS), "text_concepts: expected the dtype of"),
    (lambda: prototypes(V.long(), W, IDS), "image_concepts: expected a floating-point"),
    (lambda: prototypes(V, W, IDS + 2), "prototype_ids: expected integers from 0 to 4"),
    (lambda: prototypes(V, W, IDS - 5), "prototype_ids: expected integers from 0 to 4"),
    (lambda: prototypes(V, W, IDS.double()), "prototype_ids: expected an integer tensor"),
    (lambda: prototypes(V[:, :2], W[:, :2], IDS), "image_concepts: expected embeddings of dimens"),
    (
        lambda: functional.prototype_classification_loss(V, W, V, IDS, "max"),  # type: ignore[arg-type]
        "reduction: expected",
    ),
    (lambda: reset(torch.ones(5), SETS[0]), "reseeded: expected a boolean"),
    (lambda: reset(torch.ones(5).bool(), SETS[0, :, :3]), "centroids: expected shape"),
    (lambda: reset(None, SETS[0]), "reseeded: expected a tensor"),
    # objectives
    (lambda: coder(1, X), r"texts: expected shape \(4, 6\)"),
    (lambda: coder(0, V[:, :5]), r"images: expected shape \(4, 6\)"),
    (lambda: coder(6, X), "text_concepts: expected shape"),
    (
        lambda: it.CODERObjective(6, 4, batch_diversity_from="memory"),  # type: ignore[arg-type]
        "batch_diversity_from: expected 'both' or 'batch', got 'memory'",
    ),
    # prefixes
    (lambda: prefixes((2, 7))(V, W), "images: expected embeddings of at least 7 dimensions"),
    (lambda: prefixes((2, 3))(V, W[:, :2]), "texts: expected embeddings of at least 3 dimensions"),
    (lambda: prefixes((2, 3))(Similarity(V, W), W), "images: expected embeddings"),
    (lambda: it.Matryoshka(InfoNCELoss, (2, 3)), "loss: expected a module"),
]
for dims in ((2, 2), (), (0, 2), (2, 2.5)):
    CALLS.append((partial(prefixes, dims), "dims: expected"))
for weights in ((1.0,), (1.0, "one")):
    CALLS += [
        (partial(prefixes, (2, 3), weights), "weights: expected"),
        (partial(cut, weights, "weights"), "weights: expected"),
    ]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_wrong_input_is_named(call: Callable[[], Any], message: str):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


UNCHECKED = "features", "tokens", "heads alone", "heads and residuals"


@pytest.mark.parametrize("name", [x for x, e in REGISTRY.items() if e.takes not in UNCHECKED])
def test_what_is_not_finite_is_named_if_asked(name: str):
    for seed, bad in ((0, math.nan), (1, math.inf), (2, math.nan)):
        case = LossCase(name, seed)
        case.form = "embeddings"
        others = getattr(case, case.takes, [])  # a guide's embeddings, or a teacher's scores
        for x in [*case.input, *([others] if case.takes == "teacher" else others)]:
            before = x.clone()
            x.view(-1)[-1] = bad
            with pytest.raises(ValueError, match=r"^[a-z_]+(\[\d\])?: expected finite values"):
                case.ours(case.loss("auto", check_finite=True), case.input)
            x.copy_(before)
