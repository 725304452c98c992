"""Gains of re-rankers under judged relevance: systems trained on Flickr8k, with bootstraps over
images.

    python -m benchmarks.judged DATA OUT

DATA has the folder ``flickr8k`` (features and captions of the splits, expert and crowd judgements
of its test split) and, optionally, ``cca`` (embeddings of a closed-form model). OUT gets the
embeddings of each system, which another call reads instead of training again, and ``judged.json``.
Re-rankers have their default parameters; nothing is tuned.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from itrloss import Similarity
from itrloss.metrics import Judgements, retrieval_results
from itrloss.rerank import (
    CSLS,
    DualSoftmax,
    FastReranker,
    MutualProximity,
    QueryBankNorm,
    Reranker,
)

from . import linear, report, runner

SAMPLES, CHUNK = 100_000, 1000  # bootstrap samples, and how many are drawn at once
# relevant: experts' mean grade of at least 3 of 4; else, more than half of the crowd
GRADE, SHARE = 3.0, 0.5
RERANKERS: dict[str, type[Reranker]] = {
    "Fast Re-ranking": FastReranker,
    "QB-Norm": QueryBankNorm,
    "CSLS": CSLS,
    "dual softmax": DualSoftmax,
    "mutual proximity": MutualProximity,
}
MEAN = "mean of all"
Pair = tuple[Tensor, Tensor]  # scores of image→text and of text→image; images or queries, and texts


class Measure(NamedTuple):
    """A sum of ratios in percent, times a factor."""

    parts: slice  # of the numerators and denominators of :meth:`Relevance.sums`
    factor: float = 1.0


_RECALLS = ("own pairs", "own pairs, judged captions", "judged pairs", "judged pairs of others")
MEASURES = {
    **{f"RSUM, {name}": Measure(slice(6 * i, 6 * i + 6)) for i, name in enumerate(_RECALLS)},
    **{f"R@1, {name}": Measure(slice(6 * i, 6 * i + 6, 3), 0.5) for i, name in enumerate(_RECALLS)},
    "order, experts": Measure(slice(24, 26), 0.5),
    "order, crowd": Measure(slice(26, 28), 0.5),
    "nDCG@10, experts": Measure(slice(28, 30), 0.5),
}


# --------------------------------------------------------------------------------------- judgements


def read_judgements(folder: Path) -> tuple[Judgements, Judgements]:
    """Return the experts' mean grades, 1 to 4, and the crowd's shares of yes; captions are 5 image
    + number.
    """
    images = {
        name: i
        for i, name in enumerate((folder / "test_images.txt").read_text(encoding="utf-8").split())
    }
    splits = []
    for file, grade in (("Expert", lambda x: sum(x[:3]) / 3), ("CrowdFlower", lambda x: x[0])):
        rows = []
        for line in (folder / f"{file}Annotations.txt").read_text(encoding="utf-8").splitlines():
            image, caption, *numbers = line.split()
            name, _, number = caption.partition("#")
            if image in images and name in images:
                rows.append(
                    (
                        images[image],
                        5 * images[name] + int(number),
                        grade([float(x) for x in numbers]),
                    )
                )
        i, t, g = zip(*rows, strict=True)
        splits.append(
            Judgements(torch.tensor(i), torch.tensor(t), torch.tensor(g, dtype=torch.float64))
        )
    return splits[0], splits[1]


class Relevance:
    """Which pairs are relevant: by their own image, and by judgements, which compare captions that
    were judged only.

    Args:
        owner: (M,) the image that each text was written for.
        experts, crowd: judgements.
    """

    def __init__(self, owner: Tensor, experts: Judgements, crowd: Judgements):
        self.owner = owner
        self.texts = torch.cat([experts.texts, crowd.texts]).unique()  # (T,) texts that were judged
        self.judged_owner = owner[self.texts]
        shape = int(owner.max()) + 1, len(self.texts)
        self.own = torch.arange(shape[0])[:, None] == self.judged_owner  # (N, T)
        self.grades, shares = (
            torch.full(shape, torch.nan, dtype=torch.float64),
            torch.full(shape, torch.nan),
        )
        for matrix, judged in ((self.grades, experts), (shares, crowd)):
            at = judged.images, torch.searchsorted(self.texts, judged.texts)
            matrix[at] = judged.grades.to(matrix.dtype)
        by_crowd = self.grades.isnan() & (shares > SHARE)
        self.others = ((self.grades >= GRADE) | by_crowd) & ~self.own
        self.ordered = [_ordered(x.masked_fill(self.own, torch.nan)) for x in (self.grades, shares)]

    def sums(self, scores: Pair) -> Tensor:
        """Return the (N, 30, 2) numerators and denominators of all parts, summed over the queries
        of an image.
        """
        i2t, t2i = scores
        judged = i2t[:, self.texts], t2i[:, self.texts]
        others = tuple(x.masked_fill(self.own, float(x.min()) - 1) for x in judged)
        own = self.owner, torch.arange(len(self.owner))
        return torch.cat(
            [
                recalls(scores, own, self.owner),
                recalls(judged, _pairs(self.own), self.judged_owner),
                recalls(judged, _pairs(self.own | self.others), self.judged_owner),
                recalls((others[0], others[1]), _pairs(self.others), self.judged_owner),
                *(self._orders(judged, ordered) for ordered in self.ordered),
                self._gains(judged),
            ],
            1,
        )

    def hubs(self, scores: Tensor) -> list[float]:
        """Return Spearman's correlation of 10-occurrences and numbers of other right queries:
        captions, pictures.
        """
        from scipy.stats import spearmanr

        correlations, judged = [], scores[:, self.texts]
        for s, right in ((judged, self.others), (judged.T, self.others.T)):
            often = s.topk(min(10, s.shape[1]), 1).indices.flatten().bincount(minlength=s.shape[1])
            result: Any = spearmanr(often.numpy(), right.sum(0).numpy())
            correlations.append(round(float(result.statistic), 3))
        return correlations

    def _orders(self, scores: Pair, ordered: tuple[Tensor, Tensor]) -> Tensor:
        """Return (N, 2, 2): how many pairs of candidates with different judgements are in the order
        of these.
        """
        parts = []
        sides = (scores[0], None), (scores[1].T, self.judged_owner)
        for (s, owner), (query, better, worse) in zip(sides, ordered, strict=True):
            a, b = s[query, better], s[query, worse]
            right = (a > b).double() + 0.5 * (a == b)
            parts.append(
                _by_image(
                    torch.stack([right, torch.ones_like(right)], 1), query, owner, len(scores[0])
                )
            )
        return torch.stack(parts, 1)

    def _gains(self, scores: Pair) -> Tensor:
        """Return (N, 2, 2): normalised discounted gains of the candidates that experts judged, and
        1 per query.
        """
        parts = []
        for s, g, owner in (
            (scores[0], self.grades, None),
            (scores[1].T, self.grades.T, self.judged_owner),
        ):
            gains, discount = (g - 1).nan_to_num(0.0), 1 / torch.arange(2, 12).double().log2()
            best = s.masked_fill(g.isnan(), -torch.inf).topk(10).indices
            ideal = gains.topk(10).values @ discount
            query = (ideal > 0).nonzero().squeeze(1)
            ratios = (gains.gather(1, best) @ discount)[query] / ideal[query]
            parts.append(
                _by_image(
                    torch.stack([ratios, torch.ones_like(ratios)], 1), query, owner, len(scores[0])
                )
            )
        return torch.stack(parts, 1)


def recalls(scores: Pair, relevant: Pair, owner: Tensor) -> Tensor:
    """Return (N, 6, 2): hits among the first 1, 5 and 10, and queries, image→text and then
    text→image.
    """
    results, parts = retrieval_results(scores, relevant=relevant), []
    for queries, image in ((results.i2t, None), (results.t2i, owner)):
        answered = (queries.positives > 0).double()
        found = torch.stack([queries.per_query()[f"r{k}"] for k in (1, 5, 10)], 1)
        hits = torch.stack([found, answered[:, None].expand(-1, 3)], 2)
        parts.append(
            _by_image(hits.flatten(1), torch.arange(len(hits)), image, len(scores[0])).view(
                -1, 3, 2
            )
        )
    return torch.cat(parts, 1)


def _pairs(mask: Tensor) -> Pair:
    images, texts = mask.nonzero(as_tuple=True)
    return images, texts


def _by_image(values: Tensor, query: Tensor, owner: Tensor | None, images: int) -> Tensor:
    """Return the (images, C) sums of the (P, C) values of queries, which are images or texts with
    an owner.
    """
    which = query if owner is None else owner[query]
    return torch.zeros(images, values.shape[1], dtype=torch.float64).index_add_(0, which, values)


def _ordered(grades: Tensor) -> tuple[Tensor, Tensor]:
    """Return (3, P) for each direction: a query and two of its candidates, of which the first has a
    higher grade.
    """

    def of(rows: Tensor) -> Tensor:
        ordered = []
        for query, row in enumerate(rows):
            judged = (~row.isnan()).nonzero().squeeze(1)
            better, worse = (row[judged][:, None] > row[judged]).nonzero(as_tuple=True)
            ordered.append(
                torch.stack([torch.full_like(better, query), judged[better], judged[worse]])
            )
        return torch.cat(ordered, 1)

    return of(grades), of(grades.T)


# --------------------------------------------------------------------------------------- statistics


class Gains(NamedTuple):
    """Differences to no re-ranking, (systems + 1, re-rankers, measures) each; the last system is
    the mean of all.
    """

    before: Tensor  # without re-ranking: (systems + 1, measures)
    gain: Tensor
    low: Tensor  # ends of the 95 % intervals
    high: Tensor
    p: Tensor  # two-sided, corrected by Holm's method over all of them


def gains(
    sums: Tensor, measures: Sequence[Measure], samples: int = SAMPLES, seed: int = 0
) -> Gains:
    """Return the gains of re-rankers from (systems, 1 + re-rankers, images, parts, 2) sums; the
    first has none.

    Each bootstrap sample draws the same images for all of them, with their captions as queries.
    """
    n, generator = sums.shape[2], torch.Generator().manual_seed(seed)
    flat = sums.transpose(0, 2).reshape(n, -1).double()  # (images, re-rankers, systems, parts, 2)
    shape = (-1, sums.shape[1], sums.shape[0], *sums.shape[3:])

    # (S, images) -> (S, systems + 1, 1 + re-rankers, measures)
    def values(times: Tensor) -> Tensor:
        totals = (times @ flat).view(shape).transpose(1, 2)
        ratios = 100 * totals[..., 0] / totals[..., 1]
        means = torch.stack([m.factor * ratios[..., m.parts].sum(-1) for m in measures], -1)
        return torch.cat([means, means.mean(1, keepdim=True)], 1)

    exact, drawn = values(torch.ones(1, n, dtype=torch.float64))[0], []
    for start in range(0, samples, CHUNK):
        draws = torch.randint(n, (min(CHUNK, samples - start), n), generator=generator)
        times = torch.stack([x.bincount(minlength=n) for x in draws]).double()
        means = values(times)
        drawn.append((means[:, :, 1:] - means[:, :, :1]).float())
    differences = torch.cat(drawn)
    tail = torch.minimum((differences <= 0).sum(0), (differences >= 0).sum(0))
    low, high = torch.from_numpy(np.quantile(differences.numpy(), [0.025, 0.975], axis=0))
    p = holm((2 * (tail + 1).double() / (samples + 1)).clamp_max(1.0))
    return Gains(exact[:, 0], exact[:, 1:] - exact[:, :1], low, high, p)


def holm(p: Tensor) -> Tensor:
    """Return p-values of any shape corrected by Holm's method: the chance of any error among them
    is at most p.
    """
    ordered, order = p.flatten().sort()
    factors = torch.arange(len(order), 0, -1)
    corrected = (ordered * factors).clamp_max(1.0).cummax(0).values
    return torch.empty_like(corrected).index_copy_(0, order, corrected).view(p.shape)


# ------------------------------------------------------------------------------------------ systems


def systems(data: Path, out: Path) -> Iterator[tuple[str, dict[str, Pair]]]:
    """Yield the name of each system and its embeddings of images and texts by split, "train" and
    "test".
    """
    loaded = None
    for name, (loss, hidden) in linear.LOSSES.items():
        path = out / f"{name.replace('/', ' ')}.pt"
        if not path.exists():
            loaded = loaded or linear.Data(data / "flickr8k", ("train", "test"))
            model = linear.trained(loaded, loss(), hidden, seed=0)
            torch.save(
                {split: linear.embedded(loaded, model, split) for split in ("train", "test")}, path
            )
        yield name, torch.load(path)
    if (data / "cca").exists():
        load = (
            torch.from_numpy(np.load(data / "cca" / f"{s}_{x}_emb.npy"))
            for s in ("train", "test")
            for x in ("image", "text")
        )
        arrays = [x.float() for x in load]
        yield "CCA", {"train": (arrays[0], arrays[1]), "test": (arrays[2], arrays[3])}


def reranked(embeddings: Mapping[str, Pair]) -> Iterator[Pair]:
    """Yield the scores without re-ranking, and those of each re-ranker; banks are of the training
    split.
    """
    sim = Similarity(
        *embeddings["test"], torch.arange(1000), torch.arange(1000).repeat_interleave(5)
    )
    yield sim.scores(), sim.scores()
    for kind in RERANKERS.values():
        reranker = kind()
        i2t, t2i = (reranker.fit(*embeddings["train"]) if reranker.needs_bank else reranker).rerank(
            sim
        )
        yield i2t, t2i


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, re-rank, print and write the results; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    relevance = Relevance(
        torch.arange(1000).repeat_interleave(5), *read_judgements(args.data / "flickr8k")
    )
    names, sums, hubs = [], [], []
    for name, embeddings in systems(args.data, args.out):
        print(name, flush=True)
        names.append(name)
        scores = list(reranked(embeddings))
        sums.append(torch.stack([relevance.sums(pair) for pair in scores]))
        hubs.append({"system": name, "hubs and relevance": relevance.hubs(scores[0][0])})
    all_gains = gains(torch.stack(sums), list(MEASURES.values()))
    report.save(args.out / "judged.json", runner.machine("cpu"), [*rows(names, all_gains), *hubs])
    return 0


def rows(names: Sequence[str], all_gains: Gains) -> Iterator[dict[str, Any]]:
    """Yield a row for each system and re-ranker: for each measure, before, gain, ends of its
    interval, corrected p.
    """
    for i, system in enumerate([*names, MEAN]):
        for j, reranker in enumerate(RERANKERS):
            row: dict[str, Any] = {"system": system, "reranker": reranker}
            for k, measure in enumerate(MEASURES):
                numbers = [all_gains.before[i, k], *(x[i, j, k] for x in all_gains[1:4])]
                row[measure] = [
                    *(round(float(x), 2) for x in numbers),
                    float(f"{float(all_gains.p[i, j, k]):.2g}"),
                ]
            yield row


if __name__ == "__main__":
    sys.exit(main())
