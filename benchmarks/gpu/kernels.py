"""Steps: each kernel alone, and what decides about tiles, panels and products."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from itrloss.engine import kernels as engine_kernels
from itrloss.engine import triton as engine
from itrloss.engine.inputs import Inputs, Side
from itrloss.engine.question import Question
from itrloss.engine.relation import Relation
from itrloss.engine.terms import Term, exponential, softplus
from itrloss.engine.tiled import Needs
from itrloss.engine.triton import TileConfig
from itrloss.engine.vectors import inverse_norms

from .losses import LOSSES
from .plan import PRODUCTION, TILES
from .session import Session, gflops
from .speed import HALF, Step, case_fields

FREQUENT = exponential, softplus  # of InfoNCE and DCL, and of SigLIP
SCALE = 10.0  # of scores, and -SCALE their shift: no exponential overflows


@dataclass(frozen=True)
class Asked:
    """What a kernel is asked for."""

    term: Term
    each: bool  # whether every anchor has a shift of its own, as with maxima
    trained: bool = False  # whether the scale gets a gradient, and SigLIP's bias

    def __str__(self) -> str:
        name = self.term.__name__
        if self.each:
            name += ", a shift each"
        if self.trained:
            name += ", learnt"
        return name

    def question(self, n: int, device: torch.device) -> Question:
        """Return the question of N x N scores."""
        sides = (0,) if self.term is softplus else (0, 1)  # as the losses ask
        shift = torch.full((n * len(sides) if self.each else 1,), -SCALE, device=device)
        scale = torch.full((1,), SCALE, device=device) if self.trained else SCALE
        pairs = Relation((n, n), (None, None), device)
        return Question(self.term, pairs, sides, scale=scale, shift=shift)


def alone(session: Session) -> None:
    """Time every form's kernels without the products and projections around them."""
    for dim in session.pick((512, 1024), (16,)):
        for asked in forms():
            if session.is_late(loss=asked, dim=dim):
                return
            both_kernels(session, asked, dim, PRODUCTION)


def forms() -> list[Asked]:
    """Return what kernels are asked for: every form, and what makes the frequent ones slower."""
    found = [Asked(term, each=False) for term in engine_kernels.FORMS]
    found.append(Asked(exponential, each=True))
    return found + [Asked(term, each=False, trained=True) for term in FREQUENT]


def both_kernels(session: Session, asked: Asked, dim: int, tiles: str, n: int = 32768) -> None:
    """Time the kernel of the sums, and that of the scores' gradient."""
    n, dim = session.pick((n, dim), (20, 16))
    v, w = (x.detach() for x in session.pair(n, n, dim))
    inputs = Inputs(side_of(v), side_of(w), None)
    question = asked.question(n, session.device)
    calls: dict[str, Callable[[], object]] = {
        "sums": partial(engine.sums, question, inputs),
        "scores' gradient": partial(write_gradient, question, inputs, asked.trained),
    }
    for kernel, call in calls.items():
        about = case_fields(f"{kernel}: {asked}", (n, n, dim)) | {"variant": tiles}
        with session.attempt(**about):
            try:
                row = session.timed(call, 0.1)
            except OutOfResources as reason:
                if tiles == PRODUCTION:
                    raise
                session.say(**about, skipped=str(reason))  # others need not fit on every GPU
                continue
            session.say(**about, gflops=gflops(2 * n * n * dim, row), **row)


def side_of(x: Tensor) -> Side:
    """Return one side of a matrix, of vectors (N, D)."""
    return Side(x, inverse_norms(x), None, None)


def write_gradient(question: Question, inputs: Inputs, trained: bool) -> None:
    """Write the gradients of all panels of scores, one over the other."""
    run = engine.Pass(question, inputs, engine_kernels.FORMS[question.term])
    grad = torch.full((question.size,), 1e-4, device=run.device)
    dtype = inputs.rows.like.dtype
    needs = Needs(
        rows=True,
        cols=True,
        row_bias=False,
        col_bias=False,
        scale=trained,
        shift=trained and question.term is softplus,  # that of exponentials is only for range
        dtypes=(dtype, dtype),
    )
    engine.visit(engine.GradientKernel(run, grad, needs), NoProducts(), [])  # type: ignore[arg-type]


class NoProducts:
    """Stands in for the gradient of vectors: panels are written, and not multiplied."""

    side = 0

    def start(self, part: slice) -> None:
        """Do nothing."""

    def add(self, places: tuple[slice, slice], panel: Tensor, unit: Tensor | None) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


# ------------------------------------------------------------------------------------------- tiles


def compile_ahead(session: Session) -> None:
    """Compile the kernels of the next steps, one tile in each process, and run them once."""
    assert session.part is not None
    asked_for = forms() if session.part == PRODUCTION else FREQUENT_FORMS
    with session.attempt(variant=session.part), tiled_by(session, session.part):
        for asked in asked_for:
            both_kernels(session, asked, 512, session.part, n=2048)


def tiles(session: Session) -> None:
    """Time the most frequent kernels with other tiles: 5 % faster decides for `PRODUCT_TILES`."""
    for dim in session.pick((512, 1024), (16,)):
        for tile in session.pick([PRODUCTION, *TILES], list(TILES)[:1]):
            if session.is_late(variant=tile, dim=dim):
                return
            with session.attempt(variant=tile), tiled_by(session, tile):
                for asked in FREQUENT_FORMS:
                    both_kernels(session, asked, dim, tile)


FREQUENT_FORMS = [Asked(exponential, each=False), Asked(softplus, each=False, trained=True)]


def tiled_by(session: Session, tile: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which kernels that multiply have a tile."""
    if tile == PRODUCTION:
        return contextlib.nullcontext()
    numbers: tuple[Any, ...] = session.pick(TILES[tile], (16, 16, 16, 4, 4, 3))
    return patch.object(engine, "PRODUCT_TILES", (TileConfig(*numbers),))


# ------------------------------------------------------------------------ panels and their products


def panels(session: Session) -> None:
    """Time a step with other panels of the backward pass: they decide `BLOCK_ROWS` and `PANEL`."""
    shapes = ((4096, 8192), (2048, 8192), (4096, 4096), (4096, 16384), (8192, 8192), (16384, 4096))
    for dim in session.pick((512, 1024), (16,)):
        n = session.pick(32768, 40)
        step = Step(LOSSES["infonce"](engine="triton"), session.pair(n, n, dim))
        for rows, cols in session.pick(shapes, ((32, 32),)):
            about = case_fields("infonce", (n, n, dim)) | {"variant": f"panel {rows}x{cols}"}
            if session.is_late(**about):
                return
            sizes: dict[str, Any] = {"BLOCK_ROWS": rows, "PANEL": 2 * rows * cols}
            with session.attempt(**about), patch.multiple(engine, **sizes):
                row = session.timed(step, 0.3)
                session.say(**about, gflops=gflops(6 * n * n * dim, row), **row)


def products(session: Session) -> None:
    """Time the two products of a panel of gradients with the embeddings, and how exact they are."""
    shapes = ((4096, 8192), (2048, 8192), (8192, 4096), (8192, 8192), (4096, 8191))
    for dim in session.pick((512, 1024), (16,)):
        for rows, cols in session.pick(shapes, ((32, 33),)):
            about = case_fields("products of a panel", (rows, cols, dim))
            if session.is_late(**about):
                return
            with session.attempt(**about):
                both_products(session, rows, cols, dim)


def both_products(session: Session, rows: int, cols: int, dim: int) -> None:
    """Time and compare ``panel @ columns`` and ``panel.T @ rows``, added to float32 sums."""
    device = session.device
    stride = -(-cols // 64) * 64  # as the engine's buffer is padded
    panel = torch.randn(rows, stride, device=device).to(HALF)[:, :cols]
    v = torch.randn(rows, dim, device=device).to(HALF)
    w = torch.randn(cols, dim, device=device).to(HALF)
    for name, a, b in (("of rows", panel, w), ("of columns", panel.T, v)):
        total = torch.zeros(len(a), dim, device=device)
        engine.add_product_(total, a, b)
        exact = a.double() @ b.double()
        error = float((total.double() - exact).norm() / exact.norm())
        row = session.timed(partial(engine.add_product_, total, a, b), 0.1)
        about = case_fields("products of a panel", (rows, cols, dim)) | {"variant": name}
        flops = 2 * rows * cols * dim
        session.say(**about, gflops=gflops(flops, row), **row, **{"gradient error": error})


STEPS = {
    "kernels": alone,
    "compile": compile_ahead,
    "tiles": tiles,
    "panels": panels,
    "products": products,
}
