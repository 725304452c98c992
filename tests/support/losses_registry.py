"""Every loss of the library once, with what tests have to know of it: all tables of losses in tests
are filters over ``REGISTRY``.

A loss of your own gets one entry, and a function that computes it in loops, as those of `oracle`
do. All tests of the tables then run on it. An entry whose loss takes another input than the kinds
of ``Takes`` needs a way to feed it in `conforming` and `drawn_losses` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

import itrloss
from itrloss.torch_versions import VERSION
from support import (
    oracle,
    oracle_embedders,
    oracle_more,
    oracle_robust,
    oracle_supervised,
)

Takes = Literal[
    "pairs",  # images, texts, and ids if there are any
    "negatives",  # pairs, and more texts that match no image
    "guide",  # pairs, and another model, whose scores decide which negatives count
    "teacher",  # pairs, and another model, whose scores they are to have
    "memory",  # pairs, their momentum keys, and a CoupledMemory
    "coder",  # the same, and the concepts of images and texts
    "heads",  # several embeddings of each image, and texts
    "heads and residuals",  # the same, and the residuals of the images' embeddings
    "heads alone",  # several embeddings of each image
    "tokens",  # sets of embeddings for images and texts, with their lengths
    "distributions",  # pairs, and the logarithms of their variances
    "prototypes",  # pairs, and the number of the prototype of each
    "features",  # feature vectors of each image, of which the loss is no loss: a gate
]


class LateInteraction(itrloss.InfoNCELoss):
    """InfoNCE of late interaction, as users put it together."""

    def __init__(self, aggregation: Any = "max_sum", alpha: float = 16.0, **options: Any):
        super().__init__(**options)
        self.aggregation = aggregation
        self.alpha = alpha

    def forward(  # type: ignore[override]
        self,
        images: Tensor,
        texts: Tensor,
        image_lengths: Tensor | None = None,
        text_lengths: Tensor | None = None,
        image_ids: Tensor | None = None,
        text_ids: Tensor | None = None,
    ) -> Any:
        scores = itrloss.functional.set_similarity(
            images,
            texts,
            self.aggregation,
            self.alpha,
            image_lengths=image_lengths,
            text_lengths=text_lengths,
            gather=self.gather,
            process_group=self.process_group,
        )
        return super().forward(scores=scores, image_ids=image_ids, text_ids=text_ids)


ANY_IDS = "any"
ONE_TO_ONE = "one to one"
ALL = frozenset({"compiled", "conforming"})
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Entry:
    """A loss with options.

    Args:
        kind: the class, or a function that makes the module.
        options: arguments of ``kind``.
        takes: its input.
        oracle: the loss in loops and in float64. For a loss of pairs, it takes a score matrix and
            the ids of images and texts; for one with a memory, the vectors and all ids. It takes
            ``reduction``, and ``options`` by name.
        oracle_options: options of the oracle, where they are not ``options``.
        ids: ``ANY_IDS``: images may have any number of positives; ``ONE_TO_ONE``: one each.
        sized: whether ``kind`` also takes the dimension of the embeddings.
        every_pair: whether every pair counts, so that anchors without positives do as well.
        without_negatives: whether anchors that match all candidates count as well.
        has_constants: whether its gradient takes weights for constants, so that it is none of
            finite differences; the oracle takes what these weights are of as ``held``.
        lists_positives: whether it lists the positive pairs, which the compiler and the device
            cannot do from ids.
        failures: further checks of ``check_loss`` that it fails, with reasons.
        tables: the tests that take seconds for each entry, and have this one: ``"compiled"``,
            ``"conforming"`` (`check_loss`). A new loss is in both. One that differs from another
            only in a number or in a function of single scores may be in none, and one that cannot
            be tested there, or is in tests of its own, says so.
    """

    kind: Callable[..., nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    _: KW_ONLY
    takes: Takes = "pairs"
    oracle: Callable[..., Any] | None = None
    oracle_options: Mapping[str, Any] | None = None
    ids: str = ANY_IDS
    sized: bool = False
    every_pair: bool = False
    without_negatives: bool = False
    has_constants: bool = False
    lists_positives: bool = False
    failures: Mapping[str, str] = field(default_factory=dict)
    tables: frozenset[str] = ALL

    def make(self, dim: int = 8, **common: Any) -> Any:
        """Return a new module, for embeddings of ``dim`` dimensions, with other options as well."""
        options = {**self.options, **common}
        if self.sized:
            options["dim"] = dim
        return self.kind(**options)

    def expected(self, *arrays: Any, **common: Any) -> Any:
        """Return what the oracle computes."""
        assert self.oracle is not None
        options = self.options if self.oracle_options is None else self.oracle_options
        return self.oracle(*arrays, **options, **common)

    @property
    def public_name(self) -> str:
        """The name of the class in ``itrloss``."""
        return type(self.make()).__name__


def matryoshka(**options: Any) -> nn.Module:
    """Return an InfoNCE of two prefixes; the inner loss is made anew each time."""
    return itrloss.Matryoshka(itrloss.InfoNCELoss(**options), (2, 4))


# Checks of ``check_loss`` that fail, with their reason.
CONSTANT = dict.fromkeys(
    ["gradcheck", "uneven_upstream"], "weights that the gradient takes for constants"
)
OF_IMAGES = {"swapped_sides": "images and texts are not treated alike"}
NEGATIVES_ALONE = {"float32_error": "1 - p cancels where p is near 1, see the loss"}
SHARP = {"float32_error": "its temperature multiplies the rounding of scores by 250"}
if VERSION < (2, 0):
    SHARP = {}  # whose products are rounded less
TINY = {
    "float32_error": "its scale multiplies the rounding of scores by 256",
    "float16_error": "a gradient of 1e-13 is below the range of float16",
}
DENSE = {"memory_grows_linearly": "its scores, of a teacher or of sets, are a matrix"}
PREFIXES = {"rotation": "prefixes are of coordinates"}
COORDINATES = {"rotation": "its input is made of coordinates of the embeddings"}
TWO_KINDS = {"swapped_sides": "images and texts take different parts in it"}
FIXED = "its keys and its memory stay as they are"
MEMORY = dict.fromkeys(["rotation", "swapped_sides", "renamed_ids"], FIXED)
APART = {"prefers_its_own_texts": "only the memory has negatives"}
PROTOTYPES = dict.fromkeys(["rotation", "swapped_sides", "order_of_pairs"], FIXED)
PROTOTYPES |= {"compiled_as_one_graph": "in evaluation mode it asks how many prototypes there are"}

TRIPLET = {"oracle": oracle.triplet}
INFONCE = {"oracle": oracle_embedders.infonce}
HARD = {**INFONCE, "has_constants": True}
SIGMOID = {"oracle": oracle_more.sigmoid, "every_pair": True}
HAL = {"oracle": oracle.hal}
DCL = {"oracle": oracle.dcl, "has_constants": True}
ATTACHED_DCL = {"oracle": oracle.dcl}
SUPCON = {"oracle": oracle_supervised.supcon}
MULTI_SIMILARITY = {"oracle": oracle_supervised.multi_similarity}
CIRCLE = {"oracle": oracle_supervised.circle, "has_constants": True}
RINCE = {"oracle": oracle_robust.rince}
GCE = {"oracle": oracle_robust.generalized}
COMPLEMENTARY = {"oracle": oracle_robust.complementary}
ATTACHED_MDCL: dict[str, Any] = {"takes": "memory", "oracle": oracle_more.memory_dcl}
MDCL = {**ATTACHED_MDCL, "has_constants": True}
UTO: dict[str, Any] = {"takes": "memory", "oracle": oracle_more.uto}
QUEUE: dict[str, Any] = {"takes": "memory", "oracle": oracle_more.memory_info_nce}
# Options that are all other than the defaults.
HEAVY = {
    "positive_weight": 0.5,
    "positive": "relu",
    "temperature": 0.2,
    "margin": 0.1,
    "epsilon": 0.3,
}

OF_PAIRS = {
    "triplet": Entry(itrloss.TripletLoss, **TRIPLET),
    "triplet all": Entry(
        itrloss.TripletLoss, {"mining": "all", "margin": 0.3}, lists_positives=True, **TRIPLET
    ),
    "triplet batch-hard": Entry(
        itrloss.TripletLoss, {"mining": "batch-hard", "margin": 0.3}, **TRIPLET
    ),
    "triplet batch-hard, soft": Entry(
        itrloss.TripletLoss,
        {"mining": "batch-hard", "margin": 0.0, "temperature": 0.2},
        tables=NONE,
        **TRIPLET,
    ),
    "triplet soft": Entry(itrloss.TripletLoss, {"temperature": 0.05, "margin": 0.0}, **TRIPLET),
    "infonce learnable": Entry(
        itrloss.InfoNCELoss,
        {"learnable": True, "temperature": 0.2},
        oracle_options={"temperature": 0.2},
        **INFONCE,
    ),
    "hard infonce learnable": Entry(
        itrloss.InfoNCELoss,
        {"hardness": 30.0, "learnable": True, "temperature": 0.2},
        oracle_options={"hardness": 30.0, "temperature": 0.2},
        tables=ALL - {"conforming"},
        **HARD,
    ),
    "sigmoid": Entry(itrloss.SigmoidLoss, **SIGMOID),
    "sigmoid mild": Entry(
        itrloss.SigmoidLoss,
        {"scale": 3.0, "bias": -1.0, "learnable": False},
        oracle_options={"scale": 3.0, "bias": -1.0},
        tables=ALL & {"compiled"},
        **SIGMOID,
    ),
    "hal": Entry(itrloss.HubnessAwareLoss, **HAL),
    "dcl entropy": Entry(
        itrloss.DiversityContrastiveLoss,
        {"diversity": "entropy", "entropy_temperature": 0.2},
        tables=ALL & {"compiled"},
        **DCL,
    ),
    "dcl implicit": Entry(
        itrloss.DiversityContrastiveLoss,
        {"diversity": None},
        tables=ALL & {"compiled"},
        **ATTACHED_DCL,
    ),
    "dcl through diversity": Entry(
        itrloss.DiversityContrastiveLoss,
        {"detach_diversity": False},
        oracle_options={},
        tables=ALL - {"conforming"},
        **ATTACHED_DCL,
    ),
    "supcon": Entry(itrloss.SupConLoss, **SUPCON),
    "supcon inside": Entry(
        itrloss.SupConLoss,
        {"inside": True, "temperature": 0.02},
        **SUPCON,
    ),
    "supcon smoothed": Entry(
        itrloss.SupConLoss, {"label_smoothing": 0.2}, tables=ALL - {"conforming"}, **SUPCON
    ),
    "supcon learnable": Entry(
        itrloss.SupConLoss,
        {"learnable": True, "temperature": 0.2},
        oracle_options={"temperature": 0.2},
        **SUPCON,
    ),
    "infonce smoothed": Entry(
        itrloss.InfoNCELoss, {"label_smoothing": 0.1, "temperature": 0.2}, **INFONCE
    ),
    "mil-nce joint": Entry(
        itrloss.MILNCELoss,
        {"joint": True, "temperature": 0.2},
        oracle=oracle_supervised.mil_nce,
        lists_positives=True,
        failures=OF_IMAGES,
    ),
    "mil-nce of the paper": Entry(
        itrloss.MILNCELoss,
        {"joint": "once"},
        oracle=oracle_supervised.mil_nce,
        lists_positives=True,
        failures=OF_IMAGES,
        tables=NONE,
    ),
    "infonce joint once": Entry(
        itrloss.InfoNCELoss,
        {"joint": "once", "image_image": True, "text_text": True},
        lists_positives=True,
        failures=OF_IMAGES,
        tables=NONE,
    ),
    "multi-similarity mined": Entry(
        itrloss.MultiSimilarityLoss,
        {"alpha": 5.0, "beta": 20.0, "base": 0.2, "epsilon": 0.1},
        **MULTI_SIMILARITY,
    ),
    "circle": Entry(itrloss.CircleLoss, **CIRCLE),
    "filtered below": Entry(
        itrloss.InfoNCELoss,
        {"margin": -0.05, "relative": True, "temperature": 0.01},
        tables=ALL - {"conforming"},
        **INFONCE,
    ),
    # the tests of the compiler take it as their example
    "infonce": Entry(itrloss.InfoNCELoss, tables=ALL & {"conforming"}, **INFONCE),
    "infonce sharp": Entry(itrloss.InfoNCELoss, {"temperature": 0.01}, tables=NONE, **INFONCE),
    "infonce cold": Entry(
        itrloss.InfoNCELoss,
        {"temperature": 0.004},
        failures=SHARP,
        tables=NONE,
        **INFONCE,
    ),
    "hard infonce": Entry(
        itrloss.InfoNCELoss, {"hardness": 9.0}, tables=ALL & {"conforming"}, **HARD
    ),
    "hal mild": Entry(itrloss.HubnessAwareLoss, {"scale": 10.0, "margin": 0.1}, tables=NONE, **HAL),
    "hal soft": Entry(
        itrloss.HubnessAwareLoss,
        {"scale": 8.0, "positive": "relu"},
        tables=NONE,
        **HAL,
    ),
    # it is compiled by the default backend
    "dcl": Entry(itrloss.DiversityContrastiveLoss, tables=ALL - {"compiled"}, **DCL),
    "dcl weighted relu": Entry(itrloss.DiversityContrastiveLoss, HEAVY, tables=NONE, **DCL),
    "dcl through entropy": Entry(
        itrloss.DiversityContrastiveLoss,
        {"detach_diversity": False, "diversity": "entropy"},
        oracle_options={"diversity": "entropy"},
        tables=ALL - {"compiled"},
        **ATTACHED_DCL,
    ),
    "dcl implicit cold": Entry(
        itrloss.DiversityContrastiveLoss,
        {"diversity": None, "temperature": 0.01},
        tables=NONE,
        **ATTACHED_DCL,
    ),
    # all of it is a part of "supcon inside"
    "mil-nce": Entry(
        itrloss.MILNCELoss, tables=ALL - {"compiled"}, oracle=oracle_supervised.mil_nce
    ),
    "sdm": Entry(
        itrloss.SDMLoss,
        {"temperature": 0.1},
        oracle=oracle_supervised.sdm,
        without_negatives=True,
    ),
    "mil-nce soft": Entry(
        itrloss.MILNCELoss,
        {"temperature": 0.3},
        tables=NONE,
        oracle=oracle_supervised.mil_nce,
    ),
    "sdm coarse": Entry(
        itrloss.SDMLoss,
        {"temperature": 0.1, "epsilon": 4e-8},
        oracle=oracle_supervised.sdm,
        without_negatives=True,
        tables=NONE,
    ),
    "multi-similarity": Entry(
        itrloss.MultiSimilarityLoss, tables=ALL - {"compiled"}, **MULTI_SIMILARITY
    ),
    "circle wide": Entry(
        itrloss.CircleLoss,
        {"margin": 0.25, "scale": 256.0},
        tables=NONE,
        **CIRCLE,
    ),
    "circle with the dip below the range of float32": Entry(
        itrloss.CircleLoss,
        {"margin": 0.7, "scale": 256.0},
        failures=TINY,
        tables=NONE,
        **CIRCLE,
    ),
    "filtered": Entry(
        itrloss.InfoNCELoss,
        {"temperature": 0.05, "margin": 0.1},
        tables=ALL - {"compiled"},
        **INFONCE,
    ),
    "rince": Entry(
        itrloss.RINCELoss,
        {"temperature": 0.2, "q": 0.3, "lam": 0.05},
        tables=ALL - {"compiled", "conforming"},
        **RINCE,
    ),
    "rince of the defaults": Entry(itrloss.RINCELoss, tables=ALL & {"conforming"}, **RINCE),
    "rince symmetric": Entry(
        itrloss.RINCELoss, {"temperature": 0.5, "q": 1.0, "lam": 1.0}, tables=NONE, **RINCE
    ),
    "gce": Entry(itrloss.GeneralizedCrossEntropyLoss, {"q": 0.3, "temperature": 0.2}, **GCE),
    "gce of the defaults": Entry(itrloss.GeneralizedCrossEntropyLoss, tables=NONE, **GCE),
    "decoupled": Entry(
        itrloss.DecoupledContrastiveLoss,
        {"temperature": 0.2},
        oracle=oracle_supervised.decoupled,
    ),
    "complementary": Entry(
        itrloss.ComplementaryContrastiveLoss,
        failures=NEGATIVES_ALONE,
        tables=ALL & {"conforming"},
        **COMPLEMENTARY,
    ),
    "complementary soft": Entry(
        itrloss.ComplementaryContrastiveLoss,
        {"temperature": 0.5},
        tables=NONE,
        **COMPLEMENTARY,
    ),
    "infonce joint": Entry(
        itrloss.InfoNCELoss,
        {"joint": True, "image_image": True, "text_text": True},
        lists_positives=True,
        failures=OF_IMAGES,
        tables=ALL - {"compiled"},
    ),
    "infonce among texts": Entry(
        itrloss.InfoNCELoss,
        {"image_image": True, "text_text": "unfiltered", "margin": 0.1},
        lists_positives=True,
        failures=OF_IMAGES,
        tables=ALL - {"compiled"},
    ),
    "infonce of images": Entry(
        itrloss.InfoNCELoss,
        {"directions": "image-text", "image_image": True, "hardness": 3.0},
        failures=OF_IMAGES,
        has_constants=True,
        tables=ALL - {"compiled"},
    ),
    "matryoshka": Entry(
        matryoshka,
        {"learnable": True},
        failures=PREFIXES,
        tables=ALL & {"conforming"},
    ),
}
OF_MORE_THAN_PAIRS = {
    "infonce negatives": Entry(
        itrloss.InfoNCELoss,
        {"hardness": 9.0},
        takes="negatives",
        failures=TWO_KINDS,
        has_constants=True,
    ),
    "filtered by a guide": Entry(
        itrloss.InfoNCELoss,
        {"margin": 0.05, "relative": True},
        takes="guide",
    ),
    "distillation": Entry(
        itrloss.DistillationLoss, takes="teacher", failures=DENSE, tables=ALL - {"compiled"}
    ),
    "margin-mse": Entry(
        itrloss.MarginMSELoss, takes="teacher", failures=DENSE, tables=ALL - {"compiled"}
    ),
    "pcme++": Entry(
        itrloss.PCMEPlusPlusLoss,
        {"scale": 0.5, "shift": 4.0},
        takes="distributions",
        every_pair=True,
        failures=COORDINATES,
        tables=ALL & {"conforming"},
    ),
}
OF_MEMORIES = {
    # it is compiled in test_memory_losses.py
    "mdcl": Entry(itrloss.MemoryDiversityContrastiveLoss, tables=NONE, **MDCL),
    "mdcl implicit": Entry(
        itrloss.MemoryDiversityContrastiveLoss, {"diversity": None}, tables=NONE, **ATTACHED_MDCL
    ),
    "mdcl entropy": Entry(
        itrloss.MemoryDiversityContrastiveLoss,
        {"diversity": "entropy", "entropy_temperature": 0.1},
        tables=NONE,
        **MDCL,
    ),
    "mdcl heavy": Entry(itrloss.MemoryDiversityContrastiveLoss, HEAVY, tables=NONE, **MDCL),
    "mdcl in batch": Entry(
        itrloss.MemoryDiversityContrastiveLoss,
        {"positive_from": "batch"},
        tables=NONE,
        **MDCL,
    ),
    "mdcl, diversity in batch": Entry(
        itrloss.MemoryDiversityContrastiveLoss,
        {"diversity_from": "batch"},
        tables=NONE,
        **MDCL,
    ),
    "mdcl of the batch": Entry(
        itrloss.MemoryDiversityContrastiveLoss,
        {"positive_from": "batch", "negatives_from": "batch"},
        tables=NONE,
        **MDCL,
    ),
    "mdcl through diversity": Entry(
        itrloss.MemoryDiversityContrastiveLoss,
        {"detach_diversity": False},
        oracle_options={},
        failures=MEMORY | APART,
        tables=ALL & {"conforming"},
        **ATTACHED_MDCL,
    ),
    "mdcl through entropy": Entry(
        itrloss.MemoryDiversityContrastiveLoss,
        {"diversity": "entropy", "entropy_temperature": 0.1, "detach_diversity": False},
        oracle_options={"diversity": "entropy", "entropy_temperature": 0.1},
        tables=NONE,
        **ATTACHED_MDCL,
    ),
    "mdcl through the batch": Entry(
        itrloss.MemoryDiversityContrastiveLoss,
        {"positive_from": "batch", "diversity_from": "batch", "detach_diversity": False},
        oracle_options={"positive_from": "batch", "diversity_from": "batch"},
        tables=NONE,
        **ATTACHED_MDCL,
    ),
    "albef": Entry(
        itrloss.MemoryInfoNCELoss,
        {"temperature": 0.2, "distillation": 0.4},
        failures=MEMORY,
        **QUEUE,
    ),
    "memory infonce": Entry(
        itrloss.MemoryInfoNCELoss,
        {"temperature": 0.1, "memory_positives": False},
        tables=NONE,
        **QUEUE,
    ),
    "moco": Entry(
        itrloss.MemoryInfoNCELoss,
        {"temperature": 0.2, "batch_negatives": False},
        tables=NONE,
        **QUEUE,
    ),
    "uto": Entry(itrloss.UnifiedTrainingObjective, failures=MEMORY, **UTO),
    "uto mild": Entry(
        itrloss.UnifiedTrainingObjective,
        {"scale": 10.0, "margin": 0.1, "batch_weight": 20.0},
        tables=NONE,
        **UTO,
    ),
    "uto relu": Entry(
        itrloss.UnifiedTrainingObjective,
        {"scale": 10.0, "positive": "relu"},
        tables=NONE,
        **UTO,
    ),
    "uto queues": Entry(
        itrloss.UnifiedTrainingObjective,
        {"scale": 10.0, "image_memory_weight": 0.0, "text_memory_weight": 0.5},
        tables=NONE,
        **UTO,
    ),
    "coder": Entry(
        itrloss.CODERObjective,
        {"clusters": 10},
        takes="coder",
        sized=True,
        failures=PROTOTYPES,
    ),
}
OF_SETS_AND_CLASSES = {
    "late interaction": Entry(
        LateInteraction,
        {"temperature": 0.1},
        takes="tokens",
        failures=DENSE | COORDINATES | TWO_KINDS,
    ),
    "late interaction smooth": Entry(
        LateInteraction,
        {"aggregation": "smooth_max_sum", "alpha": 8.0, "temperature": 0.5},
        takes="tokens",
        tables=ALL & {"compiled"},
    ),
    # it is compiled as a part of "dvse", and the prototypes as one of "coder"
    "variance aware": Entry(
        itrloss.VarianceAwareLoss,
        takes="heads",
        oracle=oracle_more.variance_aware,
        failures=COORDINATES | TWO_KINDS,
        tables=ALL - {"compiled"},
    ),
    "variance aware, own sigma": Entry(
        itrloss.VarianceAwareLoss,
        {"shared_sigma": False},
        takes="heads",
        tables=ALL - {"conforming"},
    ),
    "dvse": Entry(
        itrloss.DVSEObjective,
        {"slack": 0.0},
        takes="heads and residuals",
        failures=COORDINATES | TWO_KINDS,
    ),
    "orthogonal": Entry(
        itrloss.DynamicOrthogonalLoss,
        {"slack": 0.0},
        takes="heads alone",
        oracle=oracle_more.dynamic_orthogonal,
        tables=ALL - {"conforming"},
    ),
    "prototypes": Entry(
        itrloss.PrototypeClassificationLoss,
        {"clusters": 10},
        takes="prototypes",
        oracle=oracle_more.prototype_classification,
        oracle_options={},
        sized=True,
        failures=COORDINATES | {"prefers_its_own_texts": "it compares no pairs"},
        tables=ALL - {"compiled"},
    ),
    "gate": Entry(
        itrloss.DynamicGate,
        {"heads": 3},
        takes="features",
        sized=True,
        tables=ALL & {"compiled"},
    ),
}
REGISTRY: dict[str, Entry] = {
    **OF_PAIRS,
    **OF_MORE_THAN_PAIRS,
    **OF_MEMORIES,
    **OF_SETS_AND_CLASSES,
}


def public_losses() -> set[str]:
    """Return the names of all public modules of ``itrloss.losses``, without the bases of losses."""
    names = {*itrloss.__all__, *vars(itrloss.losses)} - {"PairLoss", "MemoryLoss"}
    found = set()
    for name in names:
        kind = vars(itrloss).get(name, vars(itrloss.losses).get(name))
        of_losses = getattr(kind, "__module__", "").startswith("itrloss.losses.")
        if of_losses and isinstance(kind, type) and issubclass(kind, nn.Module):
            found.add(name)
    return found


def where(holds: Callable[[Entry], bool]) -> dict[str, Entry]:
    """Return the entries for which a condition holds."""
    return {name: entry for name, entry in REGISTRY.items() if holds(entry)}


def table(name: str) -> dict[str, Entry]:
    """Return the entries of a table, see :class:`Entry`."""
    return where(lambda entry: name in entry.tables)


def select(*names: str) -> dict[str, Entry]:
    """Return the entries of these names."""
    return {name: REGISTRY[name] for name in names}


#: Losses of pairs with any ids that are compared with loops.
IN_LOOPS = where(
    lambda entry: entry.takes == "pairs" and entry.ids == ANY_IDS and entry.oracle is not None
)
