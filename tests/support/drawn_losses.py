"""Losses of the registry with random input, as the library computes them and as loops do.

Loops return the values of all anchors, a tensor for each direction, which is differentiated by
differences: they hold for any relation. Weights that the gradient takes for constants are those of
the case's own input then.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import itrloss
from itrloss import NO_ID, Similarity
from support import oracle, oracle_embedders, oracle_more, oracle_pcme
from support.draws import KINDS, OF_IDS, Batch, Draw, drawn_batch, places_of_process
from support.losses_registry import ONE_TO_ONE, REGISTRY, Entry
from support.versions import grad_or_zeros

STEP = 1e-6  # of differences

BY_IDS = [*OF_IDS, "labels"]
# Options of losses that take no labels of one set.
OF_TWO_SIDES = {"joint", "image_image"}
# Relations of losses by what they take; others take all.
RELATIONS = {
    "memory": ["pairs", "ids", "padding", "same", "labels"],
    "coder": ["pairs", "ids", "same"],
    "heads": BY_IDS,
    "heads and residuals": BY_IDS,
    "heads alone": ["pairs"],
    "prototypes": ["pairs"],
    "distributions": [*BY_IDS, "matches", "weights"],
    "tokens": BY_IDS,
    "teacher": [*OF_IDS, "groups"],
    "negatives": [*BY_IDS, "groups"],
    "guide": [*KINDS, "weights"],
}


class LossCase:
    """A loss of the registry, its input and its options, drawn for a name and a seed."""

    dim = 4  # of embeddings

    def __init__(
        self, name: str, seed: int, in_processes: bool = False, batch: Batch | None = None
    ):
        draw = Draw(name, seed)
        self.draw = draw
        self.name = name
        self.seed = seed
        self.entry: Entry = REGISTRY[name]
        self.takes = self.entry.takes
        kinds = RELATIONS.get(self.takes, KINDS)
        if self.takes == "pairs" and name != "triplet all":  # whose pairs of pairs have no weight
            kinds = [*kinds, "weights"]
        if self.takes == "pairs" and not self.entry.options.keys() & OF_TWO_SIDES:
            kinds = [*kinds, "one set"]
        if self.entry.ids == ONE_TO_ONE:
            kinds = ["pairs"]
        if in_processes:  # whose numbers are of their own images
            kinds = [kind for kind in kinds if kind != "numbers"]
        self.batch: Batch = drawn_batch(draw, kinds) if batch is None else batch
        if self.batch.one_set:
            self.batch = replace(self.batch, views=draw.pick([1, 2]))
        self.engine = draw.pick(["auto", "dense", "tiled"])
        self.form = draw.pick(["embeddings", "embeddings", "scores", "similarity"])
        self.kind = type(self.entry.make(self.dim))
        taken = inspect.signature(self.kind).parameters
        self.common = self.drawn_options(taken)
        if in_processes and self.batch.views == 2 and self.common["reduction"] == "none":
            self.common["reduction"] = "sum"  # as values of all processes are in another order
        # They change no value in one process.
        switches = [x for x in ("gather", "telemetry", "check_finite") if x in taken]
        self.switches = {x: draw.chance(0.2) for x in switches}
        self.input = TAKES[self.takes].input(self)
        # a vector of length 0 has no derivative
        self.direction = [draw.normal(*x.shape) * x.any(-1, keepdim=True) for x in self.input]
        views = self.batch.views
        self.weights = [draw.normal(views * self.batch.n), draw.normal(views * self.batch.m)]

    def drawn_options(self, taken: Container[str]) -> dict[str, Any]:
        """Options that all losses of a kind have."""
        draw = self.draw
        found: dict[str, Any] = {"reduction": draw.pick(["mean", "sum", "none"])}
        if self.takes in ("coder", "heads and residuals"):
            found["reduction"] = "mean"
        has_one = bool(self.entry.options.keys() & {"joint", "directions"})
        if "directions" in taken and not (has_one or self.entry.every_pair) and draw.chance(0.4):
            found["directions"] = draw.pick(["image-text", "text-image"])
            if self.takes == "negatives":  # they are of images
                found["directions"] = "image-text"
            if self.takes == "memory" and found["reduction"] == "mean":
                found["reduction"] = "sum"
        if "normalize" in taken and self.takes != "distributions" and draw.chance(0.2):
            found["normalize"] = False
        if "groups" in taken and self.batch.kind == "groups":
            found["groups"] = self.batch.rule
        if "teacher_temperature" in taken:
            found["temperature"] = draw.pick([0.07, 1.0])
            found["teacher_temperature"] = draw.pick([0.07, 0.5])
        if self.takes == "coder":
            found["detach_diversity"] = False  # its gradient is that of differences
        if self.name == "matryoshka":
            return {"reduction": draw.pick(["mean", "sum"]), "groups": self.batch.rule}
        return found

    @property
    def normalizes(self) -> bool:
        return self.common.get("normalize", True)

    def loss(self, engine: str, **options: Any) -> Any:
        """Return the module, in float64."""
        if self.takes not in ("features", "heads alone"):
            options["engine"] = engine
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)  # weights that are drawn
            return self.entry.make(self.dim, **self.common, **options).double()

    def ours(self, loss: Any, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the values of the library."""
        value = TAKES[self.takes].ours(self, loss, leaves)
        return value if isinstance(value, tuple) else (value,)

    def outcome(
        self, engine: str, device: Any = "cpu", compiled: bool = False, **options: Any
    ) -> list[Tensor]:
        """Return values, and gradients of a total of them by the input and by parameters.

        Parameters are float32 next to half types.
        """
        dtype = torch.promote_types(self.input[0].dtype, torch.float32)
        loss = self.loss(engine, **options).to(device, dtype)
        called = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
        leaves = [x.to(device, copy=True).requires_grad_() for x in self.input]
        moved = copy.copy(self)
        moved.batch = self.batch.to(device)
        values = moved.ours(called, leaves)
        return differentiated(values, self.total(values), [*leaves, *loss.parameters()])

    @property
    def holds_weights(self) -> bool:
        """Whether loops take weights for constants; `InfoNCECase` has those of InfoNCE."""
        return self.entry.has_constants and not issubclass(self.kind, itrloss.InfoNCELoss)

    @property
    def has_differences(self) -> bool:
        """Whether the gradient is that of differences of the loops."""
        return self.holds_weights or not self.entry.has_constants

    @property
    def is_in_loops(self) -> bool:
        """Whether loops have the relation."""
        return self.batch.kind != "weights" or self.kind in WITH_WEIGHTS

    def loops(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        """Return the same from loops."""
        arrays = [x.detach() for x in leaves]
        values = TAKES[self.takes].loops(self, arrays)
        values = values if isinstance(values, tuple) else (values,)
        return tuple(torch.as_tensor(x, dtype=torch.float64) for x in values)

    def items(self, side: int) -> Any:
        return self.batch.items()[side]

    def of_directions(self, compute: Callable[[str], Any]) -> Any:
        """Return the reduced values of the directions that count, from ``compute(reduction)``."""
        reduction = self.common["reduction"]
        chosen = self.common.get("directions", "both")
        if self.batch.one_set:  # whose items are anchors once
            chosen = "image-text"
        if chosen == "both":
            return compute(reduction)
        side = ("image-text", "text-image").index(chosen)
        values = compute("none")[side]
        if reduction == "none":
            return values
        count = 1
        if reduction == "mean":
            count = max(1, self.number_of_anchors(side))
        return values.sum() / count

    def number_of_anchors(self, side: int) -> int:
        """How many anchors count in a mean."""
        own, others = self.items(side), self.items(1 - side)
        positives = [any(oracle.match(a, b) for b in others) for a in own]
        negatives = [any(oracle.differ(a, b) for b in others) for a in own]
        pairs = list(zip(positives, negatives, strict=True))
        if self.takes == "teacher":
            return sum(map(oracle.exists, own))
        if self.entry.every_pair:
            return sum(p or n for p, n in pairs)
        if self.entry.without_negatives:
            return sum(positives)
        return sum(p and n for p, n in pairs)

    def total(self, values: tuple[Tensor, ...]) -> Any:
        """A number of the values, with a weight for each."""
        if values[0].dim() == 0:
            return values[0]
        weights = self.weights
        if self.common.get("directions") == "text-image" and not self.batch.one_set:
            weights = weights[1:]
        total: Any = 0.0
        for value, weight in zip(values, weights, strict=False):
            total = total + (value * weight).sum()
        return total

    @property
    def can_be_shared(self) -> bool:
        """Whether two processes may each have a part of the batch."""
        own_negatives = self.takes != "negatives" or self.input[2].dim() == 3
        return self.takes not in ("coder", "heads and residuals") and own_negatives

    def in_whole(self) -> LossCase:
        """Return the case of one process, with a matrix of scores as input if that is its form."""
        whole = copy.copy(self)
        # With a matrix of matches, nobody says which columns are a process's own.
        may_be_scores = self.entry.oracle is not None and self.batch.matches is None
        if self.batch.views == 2:  # labels are those of one view
            may_be_scores = False
        if self.takes in ("pairs", "guide", "teacher"):
            whole.form = "embeddings"
        if self.form == "scores" and self.takes == "pairs" and may_be_scores:
            whole.input = [torch.from_numpy(scores_of(self, self.input))]
            whole.form = "matrix"
        return whole

    def of_process(self, rank: int, world: int = 2) -> LossCase:
        """Return what a process has."""
        draw = Draw(self.name, self.seed, "processes")
        return self.part(*places_of_process(draw, self.batch, rank, world))

    def part(self, rows: slice, cols: slice) -> LossCase:
        """Return what a process with some rows and columns has."""
        part = copy.copy(self)
        part.batch = self.batch.of_process(rows, cols)
        places = [rows if len(x) == self.batch.n else cols for x in self.input]
        places[:2] = [rows, cols][: len(places)]
        if self.takes == "distributions":
            places = [rows, cols, rows, cols]
        part.input = [x[place] for x, place in zip(self.input, places, strict=True)]
        if self.batch.views == 1:
            part.weights = [x[place] for x, place in zip(self.weights, (rows, cols), strict=True)]
        for name in ("classes", "teacher", "negative_ids", "gate"):  # of rows
            if getattr(self, name, None) is not None:
                setattr(part, name, getattr(self, name)[rows])
        for name in ("keys", "guide", "lengths"):
            if hasattr(self, name):
                of_rows, of_cols = getattr(self, name)
                setattr(part, name, (of_rows[rows], of_cols[cols]))
        return part

    def rounded(self, dtype: torch.dtype) -> LossCase:
        """Return the case with input of a dtype."""

        def convert(x: Any) -> Any:
            if isinstance(x, (list, tuple)):
                return type(x)(convert(part) for part in x)
            return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

        found = copy.copy(self)
        for name in ("input", "keys", "entries", "guide", "teacher", "gate", "points"):
            if hasattr(self, name):
                setattr(found, name, convert(getattr(self, name)))
        return found

    def slope_of_loops(self) -> float:
        """The derivative of the total along the direction, by differences."""
        ahead, behind = (
            self.total(
                self.loops([x + step * d for x, d in zip(self.input, self.direction, strict=True)])
            )
            for step in (STEP, -STEP)
        )
        return float(ahead - behind) / (2 * STEP)

    def __str__(self) -> str:
        batch = f"{self.batch.kind} {self.batch.n} x {self.batch.m}"
        return f"{self.name}, seed {self.seed}: {batch}, {self.engine}, {self.form}, {self.common}"


def differentiated(values: Iterable[Tensor], total: Any, leaves: list[Tensor]) -> list[Tensor]:
    """Return values, and the gradients of a total of them, 0 where no anchor counts."""
    found = [x.detach() for x in values]
    if not total.requires_grad:
        return [*found, *(torch.zeros_like(x) for x in leaves)]
    return [*found, *grad_or_zeros(total, leaves)]


# ------------------------------------------------------------------------------------------- pairs


def scaled(case: LossCase, size: int) -> Tensor:
    """Embeddings whose inner products are about as large as cosines."""
    return case.draw.vectors(size, case.dim) * (1.0 if case.normalizes else 0.2)


def pairs(case: LossCase) -> list[Tensor]:
    """Images and texts, or one or two views of the items of one set."""
    if case.batch.one_set:
        return [scaled(case, case.batch.n) for _ in range(case.batch.views)]
    return [scaled(case, case.batch.n), scaled(case, case.batch.m)]


def sides_of(case: LossCase, leaves: list[Tensor]) -> list[Tensor]:
    """Images and texts, or one set twice."""
    return [torch.cat(leaves)] * 2 if case.batch.one_set else leaves[:2]


def scores_of(case: LossCase, leaves: list[Tensor]) -> np.ndarray:
    v, w = sides_of(case, leaves)
    if case.normalizes:
        return oracle.cosine(v.numpy(), w.numpy())
    return (v @ w.T).numpy()


def of_pairs(case: LossCase, loss: Any, leaves: list[Tensor], **other: Any) -> Any:
    """Of embeddings, of a similarity or of scores, and what another model has."""
    batch = case.batch
    if case.form == "matrix":
        return loss(scores=leaves[0], **batch.given)
    needs_embeddings = case.takes == "pairs" and case.entry.oracle is None
    if needs_embeddings or case.form == "embeddings" or batch.views == 2:
        return loss(*leaves, **other, **batch.given)
    sim = Similarity(
        *sides_of(case, leaves),
        *batch.ids,
        engine=loss.engine,
        related=batch.related,
        normalize=case.normalizes,
    )
    if case.form == "similarity":
        return loss(sim, **other)
    return loss(scores=sim.scores(), **other, **batch.given)


def loops_of_pairs(case: LossCase, leaves: list[Tensor]) -> Any:
    if case.name == "matryoshka":
        return loops_of_prefixes(case, leaves)
    if case.entry.oracle is None:
        return in_general(case, leaves)
    scores = scores_of(case, leaves)
    options = {"held": scores_of(case, case.input)} if case.holds_weights else {}
    sides = case.batch.items()
    found = case.of_directions(
        lambda reduction: case.entry.expected(scores, *sides, reduction=reduction, **options)
    )
    # of two items of one set, each has all of the pair's loss, and not a half
    return 2 * found if case.batch.one_set and case.entry.every_pair else found


def loops_of_prefixes(case: LossCase, leaves: list[Tensor]) -> float:
    total = 0.0
    for dims in (2, 4):
        scores = scores_of(case, [x[:, :dims] for x in leaves])
        compute = partial(oracle_embedders.infonce, scores, *case.batch.items())
        total += case.of_directions(lambda reduction, compute=compute: compute(reduction=reduction))
    return total


# Losses whose loops have matches with weights.
WITH_WEIGHTS = (
    itrloss.DiversityContrastiveLoss,
    itrloss.HubnessAwareLoss,
    itrloss.InfoNCELoss,
    itrloss.PCMEPlusPlusLoss,
    itrloss.SDMLoss,
    itrloss.SigmoidLoss,
    itrloss.TripletLoss,
)


def in_general(case: LossCase, leaves: list[Tensor], **more: Any) -> Any:
    """InfoNCE by loops that take all that is passed in."""
    options = {**case.entry.options, **case.common}
    for name in ("learnable", "groups"):
        options.pop(name, None)
    rows, cols = case.batch.items()
    return oracle_embedders.contrastive(*leaves[:2], rows=rows, cols=cols, **options, **more)


# ------------------------------------------------------------------------- pairs, and more of them


def with_negatives(case: LossCase) -> list[Tensor]:
    own = case.draw.chance(0.5)
    number = case.draw.pick([1, 3])
    shape = (case.batch.n, number, case.dim) if own else (number, case.dim)
    case.negative_ids = None
    if case.draw.chance(0.5):
        ids = case.draw.integers(5, *shape[:-1])
        case.negative_ids = case.draw.marked(ids, 0.2)
    further = scaled(case, math.prod(shape[:-1])).reshape(shape)
    return [*pairs(case), further]


def of_negatives(case: LossCase, loss: Any, leaves: list[Tensor]) -> Any:
    v, w, negatives = leaves
    return loss(v, w, negatives=negatives, negative_ids=case.negative_ids, **case.batch.given)


def loops_of_negatives(case: LossCase, leaves: list[Tensor]) -> Any:
    more = oracle_embedders.items_of_negatives(case.negative_ids)
    return in_general(case, leaves, negatives=leaves[2], more=more)


def cosines(of_images: Tensor, of_texts: Tensor) -> Tensor:
    return F.normalize(of_images) @ F.normalize(of_texts).T


def with_guide(case: LossCase) -> list[Tensor]:
    case.guide = (case.draw.normal(case.batch.n, 3), case.draw.normal(case.batch.m, 3))
    return pairs(case)


def of_guide(case: LossCase, loss: Any, leaves: list[Tensor]) -> Any:
    guide: Any = case.guide
    if case.form == "scores":
        guide = cosines(*guide)
    return of_pairs(case, loss, leaves, guide=guide)


def loops_of_guide(case: LossCase, leaves: list[Tensor]) -> Any:
    return in_general(case, leaves, guide=case.guide)


def with_teacher(case: LossCase) -> list[Tensor]:
    with_guide(case)
    case.has_embeddings = case.form == "similarity"  # of the teacher
    case.teacher = case.draw.normal(case.batch.n, case.batch.m) / 4
    rows, cols = case.batch.items()
    for i, j in itertools.product(range(case.batch.n), range(case.batch.m)):
        if not (oracle.match(rows[i], cols[j]) or oracle.differ(rows[i], cols[j])):
            case.teacher[i, j] = 400.0  # counts for nothing
    if case.has_embeddings:
        case.teacher = cosines(*case.guide)
    return pairs(case)


def of_teacher(case: LossCase, loss: Any, leaves: list[Tensor]) -> Any:
    teacher = case.guide if case.has_embeddings else case.teacher
    return of_pairs(case, loss, leaves, teacher=teacher)


def loops_of_teacher(case: LossCase, leaves: list[Tensor]) -> Any:
    if case.name == "margin-mse":
        return loops_of_margins(case, leaves)
    return loops_of_distillation(case, leaves)


def loops_of_margins(case: LossCase, leaves: list[Tensor]) -> Any:
    """The squared errors of the margins between positives and negatives."""
    gaps = scores_of(case, leaves) - case.teacher.numpy()

    def value(positives: list[float], negatives: list[float]) -> float:
        errors = [(p - n) ** 2 for p in positives for n in negatives]
        return sum(errors) / len(errors)

    return case.of_directions(
        lambda reduction: oracle.of_anchors(gaps, *case.batch.items(), reduction, value)
    )


def loops_of_distillation(case: LossCase, leaves: list[Tensor]) -> Any:
    """The cross-entropy of two softmaxes, over all candidates: of groups, those that may meet."""
    temperature = case.common["temperature"]
    of_teacher = case.common["teacher_temperature"]
    scores = torch.from_numpy(scores_of(case, leaves))
    items = case.batch.items()
    found = []
    sides = ((scores, case.teacher, *items), (scores.T, case.teacher.T, *items[::-1]))
    for s, t, own, others in sides:
        values = torch.zeros(len(own), dtype=torch.float64)
        for i, item in enumerate(own):
            meet = [oracle.match(item, x) or oracle.differ(item, x) for x in others]
            if any(meet):
                q = (t[i, meet] / of_teacher).softmax(0)
                values[i] = -(q * (s[i, meet] / temperature).log_softmax(0)).sum()
        found.append(values)
    return reduced(case, *found)


def reduced(case: LossCase, rows: Tensor, cols: Tensor) -> Any:
    """Return what a loss makes of the values of all anchors."""

    def compute(reduction: str) -> Any:
        if reduction == "none":
            return rows, cols
        if reduction == "sum":
            return rows.sum() + cols.sum()
        counts = [max(1, case.number_of_anchors(side)) for side in (0, 1)]
        return rows.sum() / counts[0] + cols.sum() / counts[1]

    return case.of_directions(compute)


def with_variances(case: LossCase) -> list[Tensor]:
    if case.batch.kind == "weights":  # labels are 1 at most
        case.batch = replace(case.batch, matches=case.batch.matches / 2.5)
    logs = [(0.5 * case.draw.normal(size, case.dim) - 2) for size in (case.batch.n, case.batch.m)]
    return [*pairs(case), *logs]


def of_variances(case: LossCase, loss: Any, leaves: list[Tensor]) -> Any:
    return loss(*leaves, **case.batch.given)


def loops_of_variances(case: LossCase, leaves: list[Tensor]) -> Any:
    labels = case.batch.matches
    return reduced(
        case, *oracle_pcme.pcme(leaves, case.batch.ids, **case.entry.options, labels=labels)
    )


# ------------------------------------------------------------------------------------------ memory


def with_memory(case: LossCase) -> list[Tensor]:
    batch = case.batch
    draw = case.draw
    case.keys = [draw.vectors(batch.n, case.dim), draw.vectors(batch.m, case.dim)]
    entries = draw.pick([0, 1, 6, 12])
    case.entries = [draw.normal(entries, case.dim), draw.normal(entries, case.dim)]
    case.entry_ids = None if batch.kind == "pairs" else draw.integers(6, entries)
    if case.entry_ids is not None and draw.chance(0.3):
        case.entry_ids = draw.marked(case.entry_ids, 0.3)
    return [draw.vectors(batch.n, case.dim), draw.vectors(batch.m, case.dim)]


def memory_of(case: LossCase) -> itrloss.CoupledMemory:
    """The entries, and room for some more."""
    size = len(case.entries[0])
    dtype = torch.promote_types(case.keys[0].dtype, torch.float32)
    memory = itrloss.CoupledMemory(size + 3, case.dim, dtype=dtype)
    for part in (slice(size // 2), slice(size // 2, None)):
        ids = None if case.entry_ids is None else case.entry_ids[part]
        memory.enqueue_alone(*(x[part] for x in case.entries), ids)
    return memory


def of_memory(case: LossCase, loss: Any, leaves: list[Tensor]) -> Any:
    return loss(*leaves, *case.keys, memory_of(case), *case.batch.ids)


def loops_of_memory(case: LossCase, leaves: list[Tensor]) -> Any:
    banks = [x.numpy() for x in (*leaves, *case.keys, *case.entries)]
    ids = case.entry_ids
    size = len(case.entries[0])
    numbers = range(-size - 1, -1) if ids is None else ids.tolist()
    entries = [oracle.Item(frozenset({number} - {NO_ID})) for number in numbers]
    options = {"held": [x.numpy() for x in case.input]} if case.holds_weights else {}
    return case.of_directions(
        lambda reduction: case.entry.expected(
            *banks, *case.batch.items(), entries, reduction=reduction, **options
        )
    )


WEIGHTS = "batch_weight", "memory_weight", "concept_weight", "prototype_weight"


def with_concepts(case: LossCase) -> list[Tensor]:
    draw = case.draw
    case.batch = Batch("pairs", case.batch.n, case.batch.n)
    leaves = with_memory(case)
    case.points = draw.normal(12, case.dim)
    for name in WEIGHTS:
        case.common[name] = draw.pick([0.5, 1.0, 3.0])
    case.common["temperature"] = draw.pick([0.1, 0.2])
    case.common["batch_diversity_from"] = draw.pick(["batch", "both"])
    return [*leaves, draw.normal(case.batch.n, case.dim), draw.normal(case.batch.n, case.dim)]


def of_concepts(case: LossCase, loss: Any, leaves: list[Tensor]) -> Any:
    loss.eval()
    loss.prototypes.double().update(case.points)
    v, w, *concepts = leaves
    total, terms = loss(v, w, *case.keys, memory_of(case), *concepts)
    assert_sum(total, terms, [getattr(loss, name) for name in WEIGHTS])
    return total


def loops_of_concepts(case: LossCase, leaves: list[Tensor]) -> Any:
    loss = case.loss("dense")
    of_concepts(case, loss, leaves)
    v, w, *concepts = (x.numpy() for x in leaves)
    sides = case.batch.items()
    sums = F.normalize(leaves[0]) + F.normalize(leaves[1])
    clusters = loss.prototypes.predict(sums).numpy()
    numbers = range(-len(case.entries[0]) - 1, -1)
    entries = [oracle.Item(frozenset({number})) for number in numbers]
    banks = [x.numpy() for x in (*case.keys, *case.entries)]
    weight = loss.classifier.weight.detach().numpy()
    temperature = case.common["temperature"]
    against = partial(
        oracle_more.memory_dcl, v, w, *banks, *sides, entries, temperature=temperature
    )
    batch = oracle.dcl(oracle.cosine(v, w), *sides, temperature)
    if case.common["batch_diversity_from"] == "both":
        batch = against(positive_from="batch", negatives_from="batch")
    terms = [
        batch,
        against(),
        oracle.dcl(oracle.cosine(*concepts), *sides, temperature),
        oracle_more.prototype_classification(*concepts, weight, None, clusters),
    ]
    return sum(case.common[name] * x for name, x in zip(WEIGHTS, terms, strict=True))


# -------------------------------------------------------------------------------- sets and classes


def heads(case: LossCase, size: int, number: int = 3) -> Tensor:
    """Sets of vectors, none of length 0, whose scores would have no deviation."""
    vectors = case.draw.vectors(size * number, case.dim, zeros=False)
    return vectors.reshape(size, number, case.dim)


def with_heads(case: LossCase) -> list[Tensor]:
    case.common["margin"] = case.draw.pick([0.2, 0.7])
    case.common["detach_sigma"] = case.draw.chance(0.5)
    of_images = heads(case, case.batch.n, case.draw.pick([1, 3, 4]))
    return [of_images, heads(case, case.batch.m, 1)[:, 0]]


def of_heads(case: LossCase, loss: Any, leaves: list[Tensor]) -> Any:
    return loss(*leaves, *case.batch.ids)


def loops_of_heads(case: LossCase, leaves: list[Tensor]) -> Any:
    v, w = (x.numpy() for x in leaves)
    options = {**case.entry.options, **case.common}
    if options.pop("detach_sigma"):
        options["held"] = [x.numpy() for x in case.input]
    return oracle_more.variance_aware(v, w, *case.batch.items(), **options)


def with_heads_alone(case: LossCase) -> list[Tensor]:
    case.common["pair_reduction"] = case.draw.pick(["mean", "sum", "frobenius"])
    case.common["slack"] = case.draw.pick([0.0, 0.1, 0.4])
    case.common["normalize_residuals"] = case.draw.chance(0.7)
    n, number = case.batch.n, case.draw.pick([1, 2, 6])
    case.gate = None
    if case.draw.chance(0.7):  # of heads, or of dimensions
        case.gate = case.draw.integers(2, n, case.draw.pick([number, case.dim])).double()
    return [heads(case, n, number)]


def of_heads_alone(case: LossCase, loss: Any, leaves: list[Tensor]) -> Any:
    return loss(*leaves, case.gate)


def loops_of_heads_alone(case: LossCase, leaves: list[Tensor]) -> Any:
    gate = None if case.gate is None else case.gate.numpy()
    return oracle_more.dynamic_orthogonal(leaves[0].numpy(), gate, **case.common)


def with_residuals(case: LossCase) -> list[Tensor]:
    case.common["balance"] = case.draw.pick([0.6, 0.3])
    case.common["margin"] = case.draw.pick([0.2, 0.4])
    case.gate = case.draw.pick([None, case.draw.integers(2, case.batch.n, 3).double()])
    texts = heads(case, case.batch.m, 1)[:, 0]
    return [heads(case, case.batch.n), texts, heads(case, case.batch.n)]


def of_residuals(case: LossCase, loss: Any, leaves: list[Tensor]) -> Any:
    total, terms = loss(*leaves, case.gate, *case.batch.ids)
    assert_sum(total, terms, (loss.balance, 1 - loss.balance))
    return total


def assert_sum(total: Tensor, terms: Any, weights: Sequence[float]) -> None:
    """Check that a total is the sum of its terms, which have no gradient."""
    assert not any(x.requires_grad for x in terms)
    wanted = sum(weight * x for weight, x in zip(weights, terms, strict=True))
    torch.testing.assert_close(total.detach(), wanted)


def loops_of_residuals(case: LossCase, leaves: list[Tensor]) -> Any:
    v, w, residuals = (x.numpy() for x in leaves)
    there = [k for k, item in enumerate(case.items(0)) if oracle.exists(item)]
    residuals = residuals[there]
    gate = None if case.gate is None else case.gate.numpy()[there]
    balance, margin = case.common["balance"], case.common["margin"]
    total = balance * oracle_more.variance_aware(v, w, *case.batch.items(), margin)
    return total + (1 - balance) * oracle_more.dynamic_orthogonal(residuals, gate, 0.0)


def with_prototypes(case: LossCase) -> list[Tensor]:
    case.classes = case.draw.integers(10, case.batch.n)
    return pairs(case)


def of_prototypes(case: LossCase, loss: Any, leaves: list[Tensor]) -> Any:
    return loss(*leaves, case.classes)


def loops_of_prototypes(case: LossCase, leaves: list[Tensor]) -> Any:
    weight = case.loss("dense").weight.detach().numpy()
    v, w = (x.numpy() for x in leaves)
    classes = case.classes.numpy()
    return case.entry.expected(v, w, weight, None, classes, reduction=case.common["reduction"])


def with_tokens(case: LossCase) -> list[Tensor]:
    draw = case.draw
    lowest, highest = draw.pick([(0, 3), (1, 2), (3, 3)])
    case.lengths = [
        draw.integers(highest - lowest + 1, size) + lowest for size in (case.batch.n, case.batch.m)
    ]
    if case.name == "late interaction":
        case.common["aggregation"] = draw.pick(oracle_embedders.FORMS)
    return [heads(case, case.batch.n), heads(case, case.batch.m)]


def of_tokens(case: LossCase, loss: Any, leaves: list[Tensor]) -> Any:
    """A process's sets are as long as its longest one, which needs no lengths if all are."""
    sets: list[Tensor] = []
    lengths: list[Tensor | None] = []
    for x, own in zip(leaves, case.lengths, strict=True):
        longest = max([1, *own.tolist()])
        sets.append(x[:, :longest])
        lengths.append(None if (own == longest).all() else own)
    return loss(*sets, *lengths, *case.batch.ids)


def loops_of_tokens(case: LossCase, leaves: list[Tensor]) -> Any:
    options = {"aggregation": "max_sum", "alpha": 16.0, **case.entry.options, **case.common}
    masks = [oracle_embedders.mask_of_lengths(x.tolist(), 3) for x in case.lengths]
    scores = oracle_embedders.late_scores(
        *leaves,
        options["aggregation"],
        alpha=options["alpha"],
        image_mask=masks[0],
        text_mask=masks[1],
    )
    return case.of_directions(
        lambda reduction: oracle_embedders.infonce(
            scores, *case.batch.items(), options["temperature"], reduction=reduction
        )
    )


class Kind(NamedTuple):
    """How losses are drawn, called and computed in loops that take the same."""

    input: Callable[[LossCase], list[Tensor]]
    ours: Callable[[LossCase, Any, list[Tensor]], Any]
    loops: Callable[[LossCase, list[Tensor]], Any]


TAKES = {
    "pairs": Kind(pairs, of_pairs, loops_of_pairs),
    "negatives": Kind(with_negatives, of_negatives, loops_of_negatives),
    "guide": Kind(with_guide, of_guide, loops_of_guide),
    "teacher": Kind(with_teacher, of_teacher, loops_of_teacher),
    "distributions": Kind(with_variances, of_variances, loops_of_variances),
    "memory": Kind(with_memory, of_memory, loops_of_memory),
    "coder": Kind(with_concepts, of_concepts, loops_of_concepts),
    "heads": Kind(with_heads, of_heads, loops_of_heads),
    "heads alone": Kind(with_heads_alone, of_heads_alone, loops_of_heads_alone),
    "heads and residuals": Kind(with_residuals, of_residuals, loops_of_residuals),
    "prototypes": Kind(with_prototypes, of_prototypes, loops_of_prototypes),
    "tokens": Kind(with_tokens, of_tokens, loops_of_tokens),
}
