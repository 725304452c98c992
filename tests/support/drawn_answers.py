"""Answers and totals of anchors in random batches, on any engine or of the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from itrloss import Anchors
from itrloss.engine.terms import hinge, negative_log_likelihood, softplus
from support.answers import ANSWERS, TOTALS, gradients
from support.cases import plane, similarity
from support.draws import Batch, Draw, drawn_batch
from support.reference import Reference

# In addition to those of all tests: parameters that all anchors share, and planes of positives.
SHARED: dict[str, Callable[..., Any]] = {
    "logsumexp, shared": lambda a, p: a.logsumexp(p[:1]),
    "logsumexp shifted, shared": lambda a, p: a.logsumexp(40 * p[:1]),
    "softplus, shared": lambda a, p: a.sum(softplus, scale=p[:1], shift=-p[-1:]),
    "hinge, shared": lambda a, p: a.sum(hinge, p[:1] / 9),
    "plane, shared": lambda a, p: a.sum(plane, p[:1], -p[-1:]),
    "likelihood, shared": lambda a, p: a.sum_of_positives(negative_log_likelihood, p[:1], p[-1:]),
    "likelihood of negatives": lambda a, p: a.sum(negative_log_likelihood, p, 2 * p),
    "plane of positives": lambda a, p: a.sum_of_positives(plane, p, -p),
}
OF_TOTALS = {f"total: {name}": total for name, total in TOTALS.items()}
ASKED = {**ANSWERS, **SHARED, **OF_TOTALS}


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
    engine: str = "reference"

    def __post_init__(self) -> None:
        draw = Draw(self.name, self.seed)
        self.draw = draw
        self.batch = drawn_batch(draw)
        self.view = draw.pick([*VIEWS])
        if self.view == "pooled" and (self.batch.m < 2 or not self.can_be_cut):
            self.view = "twice"
        self.cut = self.batch.m // 2
        self.options: dict[str, Any] = {"normalize": draw.chance(0.8)}
        dim = draw.pick([1, 4, 6])
        scale = 1.0 if self.options["normalize"] else 0.3
        n, m = self.batch.n, self.batch.m
        self.vectors = [scale * draw.vectors(n, dim), scale * draw.vectors(m, dim)]
        self.bias = [0.2 * draw.normal(n), 0.2 * draw.normal(m)] if draw.chance(0.3) else []
        self.parameters = 2 + 4 * torch.rand(2 * n + m, generator=draw.generator).double()
        self.trained = [draw.chance(0.8) for _ in range(5)]
        self.grad = draw.normal(2 * n + m)

    @property
    def can_be_cut(self) -> bool:
        """Whether parts of the columns know who matches: not where row i matches column i."""
        return self.batch.kind != "pairs" and self.name not in OF_TOTALS

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
        leaves = [x.to(device, dtype, copy=True) for x in given]
        for x, trained in zip(leaves, self.trained, strict=False):
            x.requires_grad_(trained)
        v, w, *bias, p = leaves

        def make(cols: slice) -> Any:
            part: Batch = batch.part(slice(None), cols)
            options = dict(self.options, related=part.related)
            if bias:
                options["bias"] = (bias[0], bias[1][cols])
            return similarity(v, w[cols], part.ids, engine, **options)

        anchors = VIEWS[self.view](make, self)
        values = ASKED[self.name](anchors, p[: len(anchors)]).reshape(-1)
        trained = [x for x in leaves if x.requires_grad]
        grad = self.grad[: len(values)]
        return [values.detach(), *(gradients(values, trained, grad) if trained else [])]

    def __str__(self) -> str:
        trained = "".join("-+"[x] for x in self.trained)
        return (
            f"{self.name}, seed {self.seed}: {self.batch.kind} {self.batch.n} x {self.batch.m}, "
            f"{self.view}, {self.options}, biased {bool(self.bias)}, trained {trained}"
        )
