"""InfoNCE with random options that may stand together, and random batches for them."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from itrloss import InfoNCELoss
from support.draws import Draw, drawn_batch, places_of_process
from support.oracle_embedders import contrastive, items_of_negatives

KINDS = ["pairs", "ids", "padding", "numbers", "labels", "groups", "matches", "weights"]


class InfoNCECase:
    """A loss with a batch: ``inputs`` get gradients, ``call`` has what else is passed in."""

    def __init__(self, seed: int):
        self.seed = seed
        self.draw = Draw("infonce", seed)
        self.batch = drawn_batch(self.draw, KINDS)
        self.dim = self.draw.pick([2, 4])
        self.options = self.drawn_options()
        self.call = dict(self.batch.given)
        self.inputs: dict[str, Tensor] = {}
        self.draw_embeddings()
        self.draw_guide()

    def drawn_options(self) -> dict[str, Any]:
        pick, chance = self.draw.pick, self.draw.chance
        margin = pick([None, None, -0.3, -0.05, 0.0, 0.1, 0.5])
        options = {
            "temperature": pick([0.05, 0.2, 1.0]),
            "margin": margin,
            "relative": margin is not None and chance(0.4),
            "hardness": pick([0.0, 0.0, 3.0, 1e-20, 200.0, (0.0, 4.0), (2.0, 0.0), (1.0, 5.0)]),
            "normalize": chance(0.75),
            "reduction": pick(["mean", "sum", "none"]),
        }
        self.kind = pick(["plain", "sums", "joint", "own alone", "scores"])
        if self.kind == "own alone":
            return {**options, "directions": "image-text", "in_batch": False}
        if self.kind == "joint" or (self.kind == "scores" and chance(0.3)):
            options["joint"] = pick([True, "once"])
        else:
            options["directions"] = pick(["both", "image-text", "text-image"])
        if self.kind in ("sums", "joint"):
            options["image_image"] = chance(0.6)
            options["text_text"] = pick([False, True, True if margin is None else "unfiltered"])
        return options

    def draw_embeddings(self) -> None:
        draw = self.draw
        n, m = self.batch.n, self.batch.m
        has_negatives = self.kind == "own alone" or draw.chance(0.6)
        number = draw.pick([1, 2, 4])
        own = self.kind in ("own alone", "scores") or draw.chance(0.5)
        if self.options.get("directions") == "text-image":  # texts have shared ones, if any
            has_negatives = bool(self.options.get("text_text"))
            own = False
        ids = (n, number) if own else (number,)
        if self.kind == "scores":
            self.inputs["scores"] = draw.normal(n, m)
            shape = ids
        else:
            self.inputs["images"] = draw.normal(n, self.dim)
            self.inputs["texts"] = draw.normal(m, self.dim)
            shape = (*ids, self.dim)
        self.shape_of_ids = ids if has_negatives else None
        if not has_negatives:
            return
        self.inputs["negatives"] = draw.normal(*shape)
        if draw.chance(0.5):
            numbers = draw.marked(draw.integers(5, *ids), 0.2)
            self.call["negative_ids"] = draw.marked(numbers, 0.2, -1)

    def draw_guide(self) -> None:
        """Of other embeddings, of another length."""
        if self.options["margin"] is None or self.draw.chance(0.5):
            return
        guide = [self.draw.normal(self.batch.n, 3), self.draw.normal(self.batch.m, 3)]
        if self.shape_of_ids is not None:
            guide.append(self.draw.normal(*self.shape_of_ids, 3))
        self.call["guide"] = tuple(guide)

    @property
    def can_be_shared(self) -> bool:
        """Whether two processes may each have a part of the batch."""
        ids = self.shape_of_ids
        is_one = ids is not None and len(ids) == 1 and ids[0] == 1  # negative of everybody
        return self.kind != "scores" and self.batch.kind != "numbers" and not is_one

    @property
    def has_numbers(self) -> bool:
        """Whether ids of negatives are numbers of images, of a process's own ones."""
        return "negative_ids" in self.call and self.batch.ids[0] is None

    def places(self, rank: int) -> tuple[slice, slice, slice]:
        """Return which images, texts and negatives one of two processes has."""
        rows, cols = places_of_process(Draw(self.seed, "processes"), self.batch, rank)
        if self.shape_of_ids is not None and len(self.shape_of_ids) == 1:
            return rows, cols, slice(1) if rank == 0 else slice(1, None)
        return rows, cols, rows

    def in_whole(self) -> InfoNCECase:
        """Return the case of one process, where negatives match no images of another."""
        whole = copy.copy(self)
        if self.has_numbers:
            numbers = self.call["negative_ids"].clone()
            for rank in (0, 1):
                rows, _, further = self.places(rank)
                own = numbers[further]
                foreign = (own >= 0) & ((own < rows.start) | (own >= rows.stop))
                numbers[further] = own.masked_fill(foreign, -1)
            whole.call = {**self.call, "negative_ids": numbers}
        return whole

    def of_process(self, rank: int) -> InfoNCECase:
        """Return what one of two processes has."""
        part = copy.copy(self)
        rows, cols, further = self.places(rank)
        part.batch = self.batch.of_process(rows, cols)
        places = {"images": rows, "texts": cols, "negatives": further}
        part.inputs = {name: x[places[name]] for name, x in self.inputs.items()}
        part.call = dict(part.batch.given)
        if "negative_ids" in self.call:
            own = self.call["negative_ids"][further]
            part.call["negative_ids"] = own.where(own < 0, own - rows.start * self.has_numbers)
        if "guide" in self.call:
            guide = zip(self.call["guide"], (rows, cols, further), strict=False)
            part.call["guide"] = tuple(x[place] for x, place in guide)
        return part

    def loss(self, engine: Any, **options: Any) -> InfoNCELoss:
        """Return the module, whose temperature is learnt."""
        given = {**self.options, **options}
        return InfoNCELoss(learnable=True, engine=engine, groups=self.batch.rule, **given)

    def loops(self, inputs: list[Tensor], temperature: Tensor) -> tuple[Tensor, ...]:
        rows, cols = self.batch.items()
        ids = self.call.get("negative_ids")
        more = items_of_negatives(ids)
        if ids is not None and self.batch.matches is not None:
            more = ids.tolist()
        value = contrastive(
            **dict(zip(self.inputs, inputs, strict=True)),
            rows=rows,
            cols=cols,
            more=more,
            guide=self.call.get("guide"),
            **{**self.options, "temperature": temperature},
        )
        return value if isinstance(value, tuple) else (value,)

    def __str__(self) -> str:
        shapes = {name: tuple(x.shape) for name, x in self.inputs.items()}
        return f"seed {self.seed}: {self.batch.kind}, {shapes}, {[*self.call]}, {self.options}"
