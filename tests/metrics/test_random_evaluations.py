"""Random evaluations against loops: who matches, padding, graded relevance, exclusions, candidates,
ties, folds, re-rankers, engines and forms of the input, together.

What fails names its evaluation; ``Evaluation(seed)`` draws it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support import oracle_ranking, oracle_rerank
from support.cases import similarity
from support.draws import OF_IDS, Draw, draw_workings, drawn_batch
from support.oracle import Array, exists, match
from support.rerankers import (
    EVERY,
    OWN,
    Direction,
    as_scores,
    assert_same_scores,
    by_loops,
    method_of,
)

from itrloss import Related, Similarity
from itrloss.metrics import Judgements, retrieval_results
from itrloss.rerank import Reranker, TwoStageReranker

KS = (1, 5, 10, 2)
WAYS = ("i2t", "t2i")
SEEDS = 40  # of a test


def grid(n, m):
    """Numbers (n, m), all of them different."""
    return torch.sin(torch.arange(n)[:, None] * 17.0 + torch.arange(m) * 5.0).double()


Part = tuple[list[int], list[int]]  # images and texts

# Forms of a mask, and of grades.
FORMS = {
    "tensor": lambda x: x,
    "array": lambda x: x.numpy(),
    "pairs": lambda x: x.nonzero(as_tuple=True),
    "pairs in lists": lambda x: tuple(x.nonzero().T.tolist()),
    "texts of each image": lambda x: [row.nonzero()[:, 0].tolist() for row in x],
}
GRADED = {
    "tensor": lambda x: x.float(),
    "array": lambda x: x.numpy(),
    "judgements": lambda x: Judgements(*x.nonzero(as_tuple=True), x[x > 0]),
    "judgements and more": lambda x: Judgements(  # each twice, with the same mean, and zeros
        *torch.cat([(x >= 0).nonzero(), x.nonzero()]).T,
        torch.cat([x.flatten() + 1.0 * (x.flatten() > 0), x[x > 0] - 1.0]),
    ),
}


class Evaluation:
    """Drawn scores, what is asked of them, and what loops find."""

    def __init__(self, seed: int):
        draw = Draw("evaluation", seed)
        self.seed = seed
        self.draw = draw
        self.batch = drawn_batch(draw, [*OF_IDS, "labels"])
        if self.batch.kind == "numbers":  # metrics refuse those of no image
            self.batch = replace(self.batch, ids=(None, self.batch.ids[1] % self.batch.n))
        items, others = self.batch.items()
        self.there = [[i for i, x in enumerate(own) if exists(x)] for own in (items, others)]
        self.right = torch.tensor([[match(a, b) for b in others] for a in items])
        self.options: dict[str, Any] = {}
        self.reranker = draw.pick([None] * 4 + ["two stages", *EVERY])
        self.grades = self.right.long()
        self.excluded = torch.zeros_like(self.right)  # what is not ranked
        self.missed = torch.zeros_like(self.right)  # right, but no candidate
        if draw.chance(0.5):
            self._draw_rules()
        self.parts = self._drawn_parts()
        if min(len(own) for part in self.parts for own in part) < 2:  # needs a bank
            self.reranker = None
        self.ties = draw.pick(["pessimistic", "optimistic"])
        self.k = draw.pick([1, 3, 40])
        self._draw_scores()
        self._draw_bank()

    def _draw_rules(self) -> None:
        draw = self.draw
        shape = self.batch.n, self.batch.m
        if draw.chance(0.5):
            self.grades = (draw.integers(6, *shape) - 2).clamp_min(0)
            self.options["relevant"] = GRADED[draw.pick([*GRADED])](self.grades)
            if draw.chance(0.3):
                self.grades = self.grades.clamp_max(1)
                self.options["relevant"] = FORMS[draw.pick([*FORMS])](self.grades)
        if draw.chance(0.5):
            self.excluded = draw.integers(4, *shape) == 0
            self.options["exclude"] = FORMS[draw.pick([*FORMS])](self.excluded)
        if draw.chance(0.5):
            kept = draw.integers(4, *shape) > 0
            self.missed = ~self.excluded & ~kept & (self.grades > 0)
            self.excluded = self.excluded | ~kept
            self.options["candidates"] = FORMS[draw.pick([*FORMS])](kept)

    def _drawn_parts(self) -> list[Part]:
        """The folds, where texts have their images in one of them."""
        images, texts = self.there
        sizes = [size for size in range(1, len(images)) if len(images) % size == 0]
        if self.options or not sizes or self.draw.chance(0.5):
            return [(images, texts)]
        size = self.draw.pick(sizes)
        parts = []
        for start in range(0, len(images), size):
            own = images[start : start + size]
            parts.append((own, [j for j in texts if self.right[own, j].any()]))
        of_parts = [j for _, own in parts for j in own]
        if len(set(of_parts)) < len(of_parts) or any(not own for _, own in parts):
            return [(images, texts)]
        self.options["folds"] = len(parts)
        return parts

    def _draw_scores(self) -> None:
        """Draw embeddings of small integers, whose scores tie; re-ranked ones are rounded."""
        draw = self.draw
        images = draw.integers(3, self.batch.n, 3).double() - 1
        texts = draw.integers(3, self.batch.m, 3).double() - 1
        if self.reranker:
            images, texts = (
                torch.nn.functional.normalize(draw.normal(*x.shape)) for x in (images, texts)
            )
        self.embeddings = images, texts
        self.scores = [images @ texts.T] * 2
        self.has_two = not self.reranker and draw.chance(0.2)
        if self.has_two:
            self.scores[1] = draw.integers(4, self.batch.n, self.batch.m).double()

    def _draw_bank(self) -> None:
        """Draw embeddings that are no queries, which some methods need."""
        self.method: Reranker | None = None
        self.banks = [torch.empty(0, 3, dtype=torch.float64)] * 2
        self.has_bank = False
        if self.reranker == "two stages":
            self.method = TwoStageReranker(lambda i, t: grid(99, 99)[i, t], k=3)
        elif self.reranker:
            self.method = method_of(self.reranker)
            may_have = self.reranker not in OWN and self.draw.chance(0.5)
            self.has_bank = self.method.needs_bank or may_have
        if self.has_bank:
            self.banks = [
                torch.nn.functional.normalize(self.draw.normal(size, 3)) for size in (5, 6)
            ]

    def asked(self) -> tuple[Any, ...]:
        """The scores in a form that is drawn, and ids where these do not go in with them."""
        draw = self.draw
        form = draw.pick(["matrix", "scores", "dense", "tiled", "kept", "matches", "transposed"])
        if self.method is not None and self.method.needs_embeddings:
            form = draw.pick(["dense", "tiled", "kept", "matches", "transposed"])
        ids: Any = self.batch.ids
        args: tuple[Any, ...] = ()
        if form == "matrix" and ids[1] is not None:
            first, args = self.scores[0], ids
        elif form == "matches" or form == "matrix":
            first = Similarity(*self.embeddings, normalize=False, related=self._matches())
        elif form == "transposed" and (ids[0] is None) == (ids[1] is None):
            first = similarity(*self.embeddings[::-1], ids[::-1], "tiled", normalize=False).T
        else:
            engine = "dense" if form == "transposed" else form
            related = self._one_group() if draw.chance(0.3) else None
            first = similarity(*self.embeddings, ids, engine, normalize=False, related=related)
        if self.has_bank:
            self._fit(isinstance(first, Similarity) and first.embeddings is not None)
        return ((first, self.scores[1]) if self.has_two else first), *args

    def _fit(self, to_embeddings: bool) -> None:
        images, texts = self.embeddings
        bank_images, bank_texts = self.banks
        if to_embeddings:
            self.method.fit(bank_images, bank_texts)
        else:
            self.method.fit(bank_images @ texts.T, images @ bank_texts.T)

    def _one_group(self) -> Related:
        """Groups that leave out no pair: some items are open to all."""
        draw = self.draw
        sizes = self.batch.n, self.batch.m
        return Related(tuple(draw.marked(torch.zeros(size).long(), 0.2) for size in sizes))

    def _matches(self) -> Related:
        matches = self.right.double()
        images, texts = self.there
        exist = torch.zeros_like(self.right)
        exist[torch.tensor(images)[:, None], torch.tensor(texts)] = True
        return Related(matches=matches.masked_fill(~exist, torch.nan))

    def found(self) -> Any:
        options = {"ties": self.ties, "hubness_k": self.k} | self.options
        return retrieval_results(*self.asked(), reranker=self.method, **options)

    def reranked(self, side: int, part: Part) -> Array:
        """The new scores (queries, candidates) of a part by loops."""
        images, texts = (x[own] for x, own in zip(self.embeddings, part, strict=True))
        bank_images, bank_texts = self.banks
        scores = (images @ texts.T).numpy()
        of_images, of_texts = (bank_images @ texts.T).numpy(), (bank_texts @ images.T).numpy()
        between = (bank_images @ bank_texts.T).numpy()
        second = grid(99, 99).numpy()[np.ix_(*part)]
        gallery = (bank_texts @ texts.T).numpy()
        if side == 1:
            scores, of_images, between, second = scores.T, of_texts, between.T, second.T
            gallery = (bank_images @ images.T).numpy()
        if self.reranker == "two stages":
            return as_scores(oracle_rerank.two_stages(scores, second, 3, 1.0))
        references = of_images if self.has_bank else scores
        return by_loops(self.reranker, Direction(side, scores, references, gallery, between))

    def lists(self, side: int, part: Part) -> dict[int, list[int]]:
        """Each query's candidates in a part, best first."""
        queries, candidates = part[side], part[1 - side]
        own = np.ix_(*part)
        scores, grades, excluded = (
            x.numpy()[own] if side == 0 else x.numpy()[own].T
            for x in (self.scores[side], self.grades, self.excluded)
        )
        if self.reranker:
            scores = self.reranked(side, part)
        lists = {}
        for q, row in enumerate(scores):
            out = excluded[q].nonzero()[0].tolist()
            order = oracle_ranking.order(row.tolist(), grades[q].tolist(), out, self.ties)
            lists[queries[q]] = [candidates[c] for c in order]
        return lists

    def figures(self, side: int, part: Part) -> dict[str, float]:
        """The figures of one direction in a part; none without a right candidate."""
        grades = self.grades if side == 0 else self.grades.T
        lists = self.lists(side, part)
        missed = self.missed if side == 0 else self.missed.T
        ranked = {}
        for q, best in lists.items():
            last = [int(grades[q, c]) for c in part[1 - side] if missed[q, c]]
            last.sort(reverse=self.ties == "optimistic")
            wrong = [0] * (len(part[1 - side]) - len(best) - len(last))
            ranked[q] = [int(grades[q, c]) for c in best] + wrong + last
        answered = [q for q in ranked if any(ranked[q])]
        if not answered:
            return {}
        counts = dict.fromkeys(part[1 - side], 0)
        for q in answered:
            for c in lists[q][: self.k]:
                counts[c] += 1
        figures = dict(oracle_ranking.figures([ranked[q] for q in answered], KS))
        return figures | {"skewness": skewness([*counts.values()])}

    def all_figures(self) -> dict[str, float]:
        """The means over the parts."""
        of_parts = []
        for part in self.parts:
            found = {}
            for side, way in enumerate(WAYS):
                found |= {f"{way}_{name}": x for name, x in self.figures(side, part).items()}
            of_parts.append(found)
        means = {}
        for name in of_parts[0]:
            means[name] = math.fsum(found[name] for found in of_parts) / len(of_parts)
        means["rsum"] = math.fsum(means[f"{way}_r{k}"] for way in WAYS for k in (1, 5, 10))
        return means

    def can_be_answered(self) -> bool:
        """Whether there is a right candidate of each direction in each part, and enough images."""
        if not all(self.there) or self.batch.n == 1:
            return False
        return all(self.figures(side, part) for side in (0, 1) for part in self.parts)

    def __repr__(self) -> str:
        by = f"{self.reranker} with{'' if self.has_bank else 'out'} a bank"
        return f"Evaluation({self.seed}): {self.batch.kind}, {by}, {[*self.options]}"


def skewness(counts: Sequence[int]) -> float:
    mean = sum(counts) / len(counts)
    variance = math.fsum((c - mean) ** 2 for c in counts) / len(counts)
    third = math.fsum((c - mean) ** 3 for c in counts) / len(counts)
    return third / variance**1.5 if variance > 1e-12 else 0.0


def assert_reranked(case: Evaluation) -> None:
    """Compare the new scores of what exists with those of loops."""
    if case.reranker in (None, "two stages"):
        return
    first, *ids = case.asked()
    found = case.method.rerank(Similarity.from_scores(first, *ids) if ids else first)
    assert found.transductive == (not case.has_bank,) * 2
    images, texts = map(torch.tensor, case.there)
    for side, scores in enumerate((found.i2t, found.t2i)):
        assert not scores.isnan().any()
        of_existing = scores[images[:, None], texts]
        of_queries = of_existing if side == 0 else of_existing.T
        assert_same_scores(case.reranker, of_queries, case.reranked(side, tuple(case.there)))


@pytest.mark.parametrize("turn", range(12))
def test_random_evaluations_are_those_of_loops(turn, poisoned, monkeypatch):
    for seed in range(SEEDS * turn, SEEDS * (turn + 1)):
        case = Evaluation(seed)
        if not case.can_be_answered():
            continue
        about = f"{case}, {draw_workings(case.draw, monkeypatch)}"
        monkeypatch.setattr(Similarity.blocks, "__defaults__", (case.draw.pick([30, 2**22]),))
        monkeypatch.setattr("itrloss.rerank.base._AT_ONCE", case.draw.pick([10, 2**20]))
        monkeypatch.setattr("itrloss.engine.ranking.MANY", case.draw.pick([0, 32]))
        found = case.found()
        assert found.metrics(KS) == pytest.approx(case.all_figures(), abs=1e-9), about
        assert_reranked(case)
        for side, way in enumerate(WAYS):
            top = found.ways[way].top
            expected = torch.full_like(top, -1).tolist()
            for part in case.parts:
                for q, best in case.lists(side, part).items():
                    expected[q][: len(best[: case.k])] = best[: case.k]
            assert top.tolist() == expected, about
