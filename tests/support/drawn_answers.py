"""Answers and totals of anchors in random batches, on any engine or of the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from itrloss import Anchors, Similarity, describe
from itrloss.engine.terms import hinge, negative_log_likelihood, softplus
from support.answers import ANSWERS, TOTALS, assert_equal, gradients
from support.cases import LAYOUTS, finite, plane, similarity
from support.draws import KINDS, Batch, Draw, drawn_batch, places_of_process
from support.reference import Reference
from support.versions import grad_or_zeros


def std_alone(anchors: Any) -> Tensor:
    """The standard deviations as constants, as in DCL, which are computed in another way."""
    with torch.no_grad():
        return anchors.mean_std().std


# In addition to those of all tests: parameters that all anchors share, planes of positives, whole
# numbers, and deviations without a gradient.
SHARED: dict[str, Callable[..., Any]] = {
    "logsumexp, shared": lambda a, p: a.logsumexp(p[:1]),
    "logsumexp shifted, shared": lambda a, p: a.logsumexp(40 * p[:1]),
    "softplus, shared": lambda a, p: a.sum(softplus, scale=p[:1], shift=-p[-1:]),
    "softplus, shared, of a negative scale": lambda a, p: a.sum(softplus, scale=-p[:1], shift=1.5),
    "softplus, shared, of scale 0": lambda a, p: a.sum(softplus, scale=p[:1] - p[:1].detach()),
    "hinge, shared": lambda a, p: a.sum(hinge, p[:1] / 9),
    "plane, shared": lambda a, p: a.sum(plane, p[:1], -p[-1:]),
    "likelihood, shared": lambda a, p: a.sum_of_positives(negative_log_likelihood, p[:1], p[-1:]),
    "likelihood of negatives": lambda a, p: a.sum(negative_log_likelihood, p, 2 * p),
    "plane of positives": lambda a, p: a.sum_of_positives(plane, p, -p),
    "std without a gradient": lambda a, p: p * std_alone(a),
    "index of the hardest": lambda a, p: a.hardest_negatives().indices.to(p),
    "number of positives": lambda a, p: a.positive_counts.to(p),
    "number of negatives": lambda a, p: a.negative_counts.to(p),
}
OF_TOTALS = {f"total: {name}": total for name, total in TOTALS.items()}
ASKED = {**ANSWERS, **SHARED, **OF_TOTALS}
# Answers for each anchor from its own parameter.
IN_PROCESSES = [name for name in ASKED if name not in OF_TOTALS and "shared" not in name]


def rows_pooled(make: Callable[..., Any], case: AnswerCase) -> Any:
    """The rows, whose candidates are in two matrices, and then the columns."""
    if case.engine == "reference":
        whole = make(slice(None))
        return Reference(*whole.groups, *whole.T.groups)
    parts = [make(slice(case.cut)), make(slice(case.cut, None))]
    return Anchors.together(Anchors.pooled(*parts), make(slice(None)).T)


def twice(make: Callable[..., Any], case: AnswerCase) -> Any:
    """The columns, and then the rows twice."""
    whole = make(slice(None))
    if case.engine == "reference":
        return Reference(*whole.T.groups, *whole.groups, *whole.groups)
    return Anchors.together(whole.T, whole, whole)


# How another answer is asked for before, whose results nobody uses.
MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}

VIEWS: dict[str, Callable[..., Any]] = {
    "rows": lambda make, case: make(slice(None)),
    "columns": lambda make, case: make(slice(None)).T,
    "both": lambda make, case: make(slice(None)).both,
    "pooled": rows_pooled,
    "twice": twice,
}


@dataclass
class AnswerCase:
    """A question, drawn for a name and a seed."""

    name: str
    seed: int
    in_processes: bool = False
    engine: str = "reference"

    def __post_init__(self) -> None:
        draw = Draw(self.name, self.seed)
        self.draw = draw
        # numbers are of a process's own rows
        kinds = [kind for kind in KINDS if not (self.in_processes and kind == "numbers")]
        kinds.append("one set")
        self.batch = drawn_batch(draw, kinds)
        self.view = draw.pick(["rows", "columns", "both"] if self.in_processes else [*VIEWS])
        if self.view == "pooled" and (self.batch.m < 2 or not self.can_be_cut):
            self.view = "twice"
        self.cut = self.batch.m // 2
        self.options: dict[str, Any] = {"normalize": draw.chance(0.8)}
        dim = draw.pick([1, 4, 6])
        if "index" in self.name:  # of scores that do not tie
            dim = 6
        scale = 1.0 if self.options["normalize"] else 0.3
        n, m = self.batch.n, self.batch.m
        self.vectors = [scale * draw.vectors(n, dim), scale * draw.vectors(m, dim)]
        self.bias = [0.2 * draw.normal(n), 0.2 * draw.normal(m)] if draw.chance(0.3) else []
        self.parameters = 2 + 4 * torch.rand(2 * n + m, generator=draw.generator).double()
        probability = draw.pick([0.9, 0.4])
        self.trained = [draw.chance(probability) for _ in range(5)]
        self.grad = draw.normal(2 * n + m)
        self.layouts = [draw.pick(LAYOUTS) for _ in range(2)]
        self.before = draw.pick(["", "", *ANSWERS])  # another answer, if any
        self.mode = draw.pick([*MODES])
        self.again = draw.chance(0.2)  # whether the graph is differentiated twice

    @property
    def can_be_cut(self) -> bool:
        """Whether parts of the columns know who matches: not where row i matches column i."""
        return self.batch.kind != "pairs" and self.name not in OF_TOTALS

    def similarity_of(self, engine: str, batch: Batch, leaves: list[Tensor], cols: slice) -> Any:
        """The similarity of some columns, which was asked another question before."""
        v, w, *bias, p = leaves
        part: Batch = batch.part(slice(None), cols)
        options = dict(self.options, related=part.related)
        if bias:
            options["bias"] = (bias[0], bias[1][cols])
        if engine == "reference":
            return Reference.of(v, w[cols], part.ids, **options)
        own, others = (layout(x) for layout, x in zip(self.layouts, (v, w[cols]), strict=True))
        sim = similarity(own, others, part.ids, engine, self.layouts[0], **options)
        if self.before:
            with MODES[self.mode]():
                sim.scores()
                ANSWERS[self.before](sim, p[: len(sim)].detach())
        return sim

    def outcome(
        self,
        engine: str,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> list[Tensor]:
        """Return the values, and the gradients of what is trained."""
        self.engine = engine
        batch = self.batch.to(device)
        given = [*self.vectors, *self.bias, self.parameters]
        # next to half types, parameters are float32
        types = [dtype] * (len(given) - 1) + [torch.promote_types(dtype, torch.float32)]
        leaves = [x.to(device, own, copy=True) for x, own in zip(given, types, strict=True)]
        for x, trained in zip(leaves, self.trained, strict=False):
            x.requires_grad_(trained)
        p = leaves[-1]
        make = partial(self.similarity_of, engine, batch, leaves)
        anchors = VIEWS[self.view](make, self)
        own = p[: len(anchors)]
        if engine != "reference" and self.before:
            with MODES[self.mode]():
                ANSWERS[self.before](anchors, own.detach())
        values = ASKED[self.name](anchors, own).reshape(-1)
        if engine != "reference":
            self.assert_detached(anchors, own.detach(), values.detach())
        trained = [x for x in leaves if x.requires_grad]
        if not trained:
            return [values.detach()]
        grad = self.grad[: len(values)]
        if self.again:
            gradients(values, trained, grad.roll(1), retain_graph=True)
        return [values.detach(), *gradients(values, trained, grad)]

    def part(self, rows: slice, cols: slice) -> AnswerCase:
        """Return what a process has that shares the batch."""
        part = copy.copy(self)
        part.batch = self.batch.of_process(rows, cols)
        places = (rows, cols, rows, cols)
        part.vectors = [x[k] for x, k in zip(self.vectors, places, strict=False)]
        part.bias = [x[k] for x, k in zip(self.bias, places, strict=False)]
        part.of_groups = [
            x[k] for x, k in zip(self.of_groups, self.places(rows, cols), strict=True)
        ]
        return part

    def of_process(self, rank: int) -> AnswerCase:
        """Return what one of two processes has."""
        draw = Draw(self.name, self.seed, "processes")
        return self.part(*places_of_process(draw, self.batch, rank))

    def places(self, rows: slice, cols: slice) -> list[slice]:
        """Return the places of the anchors of each group."""
        return {"rows": [rows], "columns": [cols], "both": [rows, cols]}[self.view]

    @cached_property
    def of_groups(self) -> list[Tensor]:
        """The parameters, and the upstream gradients, of the anchors of each group, (A, 2)."""
        whole = torch.stack([self.parameters, self.grad], 1)
        places = self.places(slice(self.batch.n), slice(self.batch.m))
        return [whole[place] for place in places]

    def shared(self, leaves: list[Tensor]) -> Similarity:
        v, w, *bias = leaves
        options = dict(self.options, related=self.batch.related, engine=self.engine)
        if bias:
            options["bias"] = tuple(bias)
        return Similarity.sharded(v, w, *self.batch.ids, **options)

    def at_hand(self) -> list[Tensor]:
        """Return what own rows and columns have where all candidates are at hand."""
        sim = self.shared([*self.vectors, *self.bias])
        found = []
        for view, size in ((sim, self.batch.n), (sim.T, len(self.vectors[1]))):
            local = view.local()
            for x in (view.scores(), local.positive_counts, local.negative_counts):
                found.append(x[:size])
        return found

    def figures(self) -> Tensor:
        """Return what telemetry says of the whole batch, but for counts of the best, which tie."""
        found = describe(self.shared([*self.vectors, *self.bias]))
        return torch.stack([x for name, x in found.items() if "hubness" not in name])

    def shared_outcome(self) -> list[Tensor]:
        """Return the values of own anchors of each group, and the gradients of what is given."""
        leaves = [x.clone().requires_grad_() for x in (*self.vectors, *self.bias)]
        sim = self.shared(leaves)
        anchors = VIEWS[self.view](lambda _: sim, self)
        own = [x[:, 0].clone().requires_grad_() for x in self.of_groups]
        # processes pad their anchors to the same number
        padded = [
            torch.cat([x, x.new_ones(size - len(x))])
            for x, size in zip(own, anchors.sizes, strict=True)
        ]
        values = finite(ASKED[self.name](anchors, torch.cat(padded)))
        every = torch.ones(len(anchors), dtype=torch.bool)
        of_groups = anchors.reduce(values, "none", every)
        leaves += own
        total: Any = 0.0
        for x, given in zip(of_groups, self.of_groups, strict=True):
            total = total + (x * given[:, 1]).sum()
        if not total.requires_grad:
            return [*of_groups]
        grads = grad_or_zeros(total, leaves)
        return [*(x.detach() for x in of_groups), *grads]

    def assert_detached(self, anchors: Any, p: Tensor, values: Tensor) -> None:
        """Check that detached anchors have the same answer, without gradient.

        With a gradient, a hardest negative is the product of its pair; without one, it is an entry
        of the tile.
        """
        found = ASKED[self.name](anchors.detach(), p).reshape(-1)
        assert not found.requires_grad
        tolerance = 1e-12 if values.dtype == torch.float64 else 1e-3
        assert_equal(found, values, f"{self}, detached", tolerance)

    def __str__(self) -> str:
        trained = "".join("-+"[x] for x in self.trained)
        return (
            f"{self.name}, seed {self.seed}: {self.batch.kind} {self.batch.n} x {self.batch.m}, "
            f"{self.view}, {self.options}, biased {bool(self.bias)}, trained {trained}, "
            f"{[x.__name__ for x in self.layouts]}, {self.mode} {self.before}, again {self.again}"
        )
