"""The part of the report to look at: queries drawn by rank, with their first answers before and after re-ranking."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from itrloss import Similarity
from itrloss.rerank import FastReranker

from .data import Split

TOP = 5  # answers shown
SEED = 0  # of the draw of queries
MISSED = 20  # a query counts as missed without a right answer among so many
PIXELS = 192  # larger pictures are scaled down to this


@dataclass(frozen=True)
class Direction:
    """Queries in rows, candidates in columns, before and after re-ranking; higher scores are better."""

    before: Tensor  # (queries, candidates) float32
    after: Tensor
    query_ids: Tensor  # (queries,)
    candidate_ids: Tensor  # (candidates,); equal where query and candidate match

    @property
    def right(self) -> Tensor:
        """(queries, candidates) bool, whether they match."""
        return self.query_ids[:, None] == self.candidate_ids

    def ranks(self, scores: Tensor) -> np.ndarray:
        """(queries,) rank of the first right candidate, from 1; a wrong one with the same score is ahead of it."""
        return Similarity.from_scores(scores, self.query_ids, self.candidate_ids).ranks()[:, 0].numpy()

    def occurrences(self, scores: Tensor, k: int) -> np.ndarray:
        """(candidates,) how often a candidate is among the first k of a query."""
        top = scores.topk(min(k, scores.shape[1]), dim=1).indices
        return torch.bincount(top.flatten(), minlength=scores.shape[1]).numpy()


def both_directions(scores: Tensor, split: Split, by: FastReranker) -> dict[str, Direction]:
    """Images asking for captions ("i2t") and captions asking for images ("t2i"), from (n_images, n_captions) scores."""
    i2t, t2i = by.rerank(scores)
    images, texts = split.image_ids, split.text_ids
    return {"i2t": Direction(scores, i2t, images, texts), "t2i": Direction(scores.T, t2i.T, texts, images)}


@dataclass(frozen=True)
class Pick:
    """A query of the gallery, and the group it was drawn from."""

    group: str
    group_size: int
    query: int
    ranks: tuple[int, int]  # of the first right answer, before and after


def draw_queries(direction: Direction) -> list[Pick]:
    """Six queries of five groups by rank, at random with a fixed seed; a group without queries gives none."""
    before, after = direction.ranks(direction.before), direction.ranks(direction.after)
    groups = [
        ("Right at once", (before == 1) & (after == 1), 2),
        (f"Nearly: right at rank 2 to {TOP}", (before > 1) & (before <= TOP) & (after > 1) & (after <= TOP), 1),
        (f"Missed: nothing right in the first {MISSED}", (before > MISSED) & (after > MISSED), 1),
        ("Re-ranking brought the right answer to the top", (before > 1) & (after == 1), 1),
        ("Re-ranking took the right answer from the top", (before == 1) & (after > 1), 1),
    ]
    rng = np.random.default_rng(SEED)
    picks = []
    for name, members, wanted in groups:
        queries = np.flatnonzero(members)
        for query in rng.permutation(queries)[:wanted].tolist():
            picks.append(Pick(name, len(queries), query, (int(before[query]), int(after[query]))))
    return picks


class Gallery:
    """Renders the cards of one split; `root` may hold `pictures/{split}_{index:05d}.png`."""

    def __init__(self, split: Split, root: Path, split_name: str) -> None:
        self.split, self.root, self.split_name = split, root, split_name

    def cards(self, way: str, direction: Direction) -> str:
        cards = [self._card(way, direction, pick) for pick in draw_queries(direction)]
        return f'<div class="cards">{"".join(cards)}</div>'

    def _card(self, way: str, direction: Direction, pick: Pick) -> str:
        """A query with its first answers, and those after re-ranking where it moved the first right one."""
        queries = len(direction.query_ids)
        before, after = pick.ranks
        lists = []
        if before == after:
            heading = f"Cosine: first right answer at rank {before:,}, and re-ranked too"
            lists.append(self._answers(way, direction, pick.query, direction.before, heading))
        else:
            for scores, name, rank in ((direction.before, "Cosine", before), (direction.after, "Re-ranked", after)):
                heading = f"{name}: first right answer at rank {rank:,}"
                lists.append(self._answers(way, direction, pick.query, scores, heading))
        query = self._picture(pick.query) if way == "i2t" else f"“{escape(self.split.captions[pick.query])}”"
        kind = "picture" if way == "i2t" else "caption"
        among = "the only one among" if pick.group_size == 1 else f"drawn from {pick.group_size:,} such queries among"
        layout = "with-picture" if way == "i2t" and query.startswith("<img") else ""
        return (
            f'<article class="card"><header><h4>{pick.group}</h4>'
            f"<p>{among} {queries:,} {kind}s</p></header>"
            f'<div class="{layout}"><div class="ask">{query}</div><div>{"".join(lists)}</div></div></article>'
        )

    def _answers(self, way: str, direction: Direction, query: int, scores: Tensor, heading: str) -> str:
        found = scores[query].topk(min(TOP, scores.shape[1])).indices.tolist()
        items = []
        pictures = way == "t2i" and self._file(found[0]).is_file()
        for rank, answer in enumerate(found, 1):
            right = bool(direction.query_ids[query] == direction.candidate_ids[answer])
            mark = '<span class="check" aria-hidden="true">✓</span><span class="unseen"> right</span>' if right else ""
            if pictures:
                content = f"{self._picture(answer)}{rank}{mark}"
            elif way == "t2i":
                content = f"{self._picture(answer)}{mark}"
            else:
                content = f"{escape(self.split.captions[answer])}{mark}"
            items.append(f'<li{" class=right" if right else ""} data-rank="{rank}">{content}</li>')
        return (
            f'<div class="answers"><h5>{heading}</h5>'
            f'<ol class="{"pictures" if pictures else "texts"}">{"".join(items)}</ol></div>'
        )

    def _file(self, image: int) -> Path:
        return self.root / "pictures" / f"{self.split_name}_{image:05d}.png"

    def _picture(self, image: int) -> str:
        """An <img>, inlined; without a picture its number and first caption."""
        caption = escape(self.split.captions[image * self.split.captions_per_image])
        if not self._file(image).is_file():
            return f"picture {image}, captioned “{caption}”"
        with Image.open(self._file(image)) as opened:
            picture = opened.convert("RGB")
        picture.thumbnail((PIXELS, PIXELS))
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=88)
        source = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        size = f'width="{picture.width}" height="{picture.height}"'
        return f'<img src="{source}" {size} alt="picture {image}: {caption}">'
