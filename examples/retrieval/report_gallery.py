"""The report's gallery: queries drawn by rank, with their first answers before and after
re-ranking.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from itrloss.metrics import QueryResults

from .data import Split
from .pictures import Images, open_picture

TOP = 5  # answers shown
SEED = 0  # for the draw of queries
MISSED = 20  # a query counts as missed if none of this many first answers is right
PIXELS = 192  # larger pictures are scaled down to this


@dataclass(frozen=True)
class Pick:
    """A query of the gallery, and the group it was drawn from."""

    group: str
    group_size: int
    query: int
    ranks: tuple[int, int]  # of the first right answer, before and after


def draw_queries(
    before: QueryResults, after: QueryResults, second: str = "Re-ranking"
) -> list[Pick]:
    """Draw up to six queries from five groups by rank, at random with a fixed seed."""
    old, new = before.best.numpy(), after.best.numpy()
    groups = [
        ("Right at once", (old == 1) & (new == 1), 2),
        (
            f"Nearly: right at rank 2 to {TOP}",
            (old > 1) & (old <= TOP) & (new > 1) & (new <= TOP),
            1,
        ),
        (f"Missed: nothing right in the first {MISSED}", (old > MISSED) & (new > MISSED), 1),
        (f"{second} brought the right answer to the top", (old > 1) & (new == 1), 1),
        (f"{second} took the right answer from the top", (old == 1) & (new > 1), 1),
    ]
    rng = np.random.default_rng(SEED)
    picks = []
    for name, members, most in groups:
        queries = np.flatnonzero(members)
        for query in rng.permutation(queries)[:most].tolist():
            picks.append(Pick(name, len(queries), query, (int(old[query]), int(new[query]))))
    return picks


def picture_of(split: Split, root: Path, split_name: str, image: int) -> Image.Image | None:
    """A raw image, or `pictures/{split}_{index:05d}.png`, in RGB; None if there is no such file."""
    if isinstance(split.features, Images):
        return open_picture(split.features.paths[image])
    file = root / "pictures" / f"{split_name}_{image:05d}.png"
    return open_picture(file) if file.is_file() else None


@dataclass(frozen=True)
class Gallery:
    """Cards of one split's queries, whose pictures :func:`picture_of` reads: before and after
    re-ranking, or with the names of two models.
    """

    split: Split
    root: Path
    split_name: str
    models: tuple[str, str] | None = None

    def samples(self, count: int) -> list[dict[str, Any]]:
        """The first pictures, each with its captions."""
        each = self.split.captions_per_image
        cards = []
        for image in range(count):
            captions = self.split.captions[image * each : (image + 1) * each]
            answers = [("Its captions", [{"text": caption} for caption in captions])]
            card = {"title": f"Picture {image}", "note": f"of the {self.split_name} split"}
            cards.append({**card, "query": self._picture(image), "answers": answers})
        return cards

    def cards(self, way: str, before: QueryResults, after: QueryResults) -> list[dict[str, Any]]:
        """Queries with their first answers, and those after re-ranking if it moved the first right
        one; those of two models always.
        """
        first, second = self.models or ("Cosine", "Re-ranked")
        kind = "picture" if way == "i2t" else "caption"
        cards = []
        for pick in draw_queries(before, after, self.models[1] if self.models else "Re-ranking"):
            drawn = f"drawn from {pick.group_size:,} such queries"
            if pick.group_size == 1:
                drawn = "the only one"
            old, new = pick.ranks
            if old == new and not self.models:
                lists = {f"Cosine: first right answer at rank {old:,}, and re-ranked too": before}
            else:
                lists = {
                    f"{first}: first right answer at rank {old:,}": before,
                    f"{second}: first right answer at rank {new:,}": after,
                }
            answers = []
            for title, results in lists.items():
                answers.append((title, self._answers(way, pick.query, results)))
            card = {
                "title": pick.group,
                "note": f"{drawn} among {len(before.top):,} {kind}s",
                "query": self._query(way, pick.query),
                "answers": answers,
            }
            cards.append(card)
        return cards

    def _query(self, way: str, query: int) -> dict[str, str]:
        if way == "i2t":
            return self._picture(query)
        return {"text": f"“{self.split.captions[query]}”"}

    def _answers(self, way: str, query: int, results: QueryResults) -> list[dict[str, Any]]:
        items = []
        for answer in results.top[query, :TOP].tolist():
            if way == "i2t":
                item = {"text": self.split.captions[answer]}
                image, text = query, answer
            else:
                item = self._picture(answer)
                image, text = answer, query
            right = bool(self.split.image_ids[image] == self.split.text_ids[text])
            items.append({**item, "right": right})
        return items

    def _picture(self, image: int) -> dict[str, str]:
        """Inline picture, or, if the file is missing, its number and first caption."""
        caption = self.split.captions[image * self.split.captions_per_image]
        picture = picture_of(self.split, self.root, self.split_name, image)
        if picture is None:
            return {"text": f"picture {image}, captioned “{caption}”"}
        picture.thumbnail((PIXELS, PIXELS))
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=88)
        source = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        return {"text": f"picture {image}: {caption}", "picture": source}
