"""Mined hard negatives, the filter, hardness and groups on Flickr8k, alone and together, with and
without wrong training pairs.

    python -m benchmarks.negatives flickr8k OUT

The data, the linear model and the wrong pairs are those of ``benchmarks.noise``; the test split is
needed as well. Values of the options are chosen on the development split by RSUM, summed over the
shares of wrong pairs, with a seed that is used for nothing else. Every form is then trained with
each seed and evaluated on the test split. OUT gets the results of each training, which another call
reads instead of training again, and ``negatives.json``, whose tables are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import itrloss
from itrloss.metrics import QueryResults, RetrievalResults, compare

from . import noise, report, runner

SHARES = (0.0, 0.2)  # of wrong training pairs
SEEDS = (0, 1, 2)
SEARCH_SEED = 100
EPOCHS, RATE = 8, 4e-3
RANDOM = 50  # random candidates of each query, where they are not mined
STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # number of seeds -> its 97.5 % quantile


@dataclass(frozen=True)
class Options:
    """One training's options, plain InfoNCE by default."""

    temperature: float = 0.1
    margin: float | None = None
    hardness: float | tuple[float, float] = 0.0
    #: Of each query, one more negative a step, drawn from this many: the hardest ones, or any.
    negatives: int = 0
    mined: bool = True
    #: Mined negatives score below this share of the positive's score.
    below: float | None = None
    groups: Literal["same", "other"] | None = None
    clusters: int = 0  # of pictures, which are the groups

    def __str__(self) -> str:
        """Return the options that differ from the default, as they are written."""
        default = Options()
        words = []
        for name, value in vars(self).items():
            if value != getattr(default, name):
                words.append(f"{name}={value!r}")
        return ", ".join(words) or f"temperature={self.temperature}"


# ----------------------------------------------------------------------------------------- training


class Hard(NamedTuple):
    """Candidates that further negatives are drawn from, -1 for none."""

    pictures: Tensor  # (M, P) of each caption
    captions: Tensor  # (N, P) of each picture


def drawn(candidates: Tensor, rows: Tensor) -> Tensor:
    """Return the (B,) entry of each row that is drawn; -1 where a row has none."""
    lists = candidates[rows]
    counts = (lists >= 0).sum(1)  # those that exist come first
    places = (torch.rand(len(rows)) * counts).long()
    return lists.gather(1, places[:, None]).squeeze(1)


def random_candidates(captions: int, pictures: int) -> Hard:
    """Return random candidates, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    of_captions = torch.randint(pictures, (captions, RANDOM), generator=generator)
    of_pictures = torch.randint(captions, (pictures, RANDOM), generator=generator)
    return Hard(of_captions, of_pictures)


@torch.no_grad()
def mined(
    model: noise.Model, split: noise.Split, ids: Tensor, groups: Tensor, options: Options
) -> Hard:
    """Return the hardest negatives by a model's scores.

    Args:
        model: a trained one.
        split: the training split.
        ids: (M,) pictures of the captions.
        groups: (N,) groups of the pictures; what is in a query's own group is no negative of it.
        options: how many, and below which score.
    """
    images, texts = model(*split)
    below_of_texts = None
    below_of_images = None
    if options.below is not None:
        own = torch.cosine_similarity(images[ids], texts)
        below_of_texts = options.below * own
        sums = own.new_zeros(len(images)).index_add_(0, ids, own)
        below_of_images = options.below * sums / ids.bincount(minlength=len(images))
    count = options.negatives
    of_texts = itrloss.mine_hard_negatives(
        texts, images, groups[ids], groups, count, below=below_of_texts
    )
    of_images = itrloss.mine_hard_negatives(
        images, texts, groups, groups[ids], count, below=below_of_images
    )
    return Hard(of_texts.indices, of_images.indices)


class Loss:
    """The loss of captions and their pictures, by the captions' rows.

    Args:
        options: see :class:`Options`.
        split: the training split.
        ids: (M,) pictures of the captions.
        hard: candidates for further negatives, or None.
        groups: (N,) groups of the pictures, or None.
    """

    def __init__(
        self,
        options: Options,
        split: noise.Split,
        ids: Tensor,
        hard: Hard | None,
        groups: Tensor | None,
    ):
        # one direction a call: further negatives are of the anchors, here pictures, then captions
        self.one = itrloss.InfoNCELoss(
            options.temperature,
            margin=options.margin,
            hardness=options.hardness,
            groups=options.groups or "same",
            directions="image-text",
        )
        self.split = split
        self.ids = ids
        self.hard = hard
        self.groups = groups

    def __call__(self, model: noise.Model, rows: Tensor) -> Tensor:
        """Return the 0-dim loss of the (B,) captions."""
        split = self.split
        ids = self.ids[rows]
        related: dict[str, Tensor] = {}
        if self.groups is not None:
            related = {"image_groups": self.groups[ids], "text_groups": self.groups[ids]}
        if self.hard is None:
            v, w = model(split.pictures[ids], split.words[rows], split.weights[rows])
            return self.one(v, w, ids, ids, **related) + self.one(w, v, ids, ids, **related)
        size = len(rows)
        pictures = drawn(self.hard.pictures, rows)
        captions = drawn(self.hard.captions, ids)
        # where there is none, any stands for it, and is marked
        caption_ids = self.ids[captions].masked_fill(captions < 0, itrloss.NO_ID)
        picture_ids = pictures.masked_fill(pictures < 0, itrloss.NO_ID)
        all_pictures = torch.cat([ids, pictures])
        all_captions = torch.cat([rows, captions])
        v, w = model(
            split.pictures[all_pictures], split.words[all_captions], split.weights[all_captions]
        )
        of_pictures = {"negatives": w[size:], "negative_ids": caption_ids, **related}
        of_captions = {"negatives": v[size:], "negative_ids": picture_ids, **related}
        return self.one(v[:size], w[:size], ids, ids, **of_pictures) + self.one(
            w[:size], v[:size], ids, ids, **of_captions
        )


def clustered(pictures: Tensor, clusters: int) -> Tensor:
    """Return the (N,) clusters of pictures, by k-means on their features."""
    means = itrloss.OnlineKMeans(clusters, pictures.shape[1])
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        for rows in torch.randperm(len(pictures), generator=generator).split(2048):
            means.update(pictures[rows])
    return means.predict(pictures)


class Trainings:
    """Trainings on one data set, of which none is done twice.

    Args:
        folder: of the data.
        out: folder of the results.
    """

    def __init__(self, folder: Path, out: Path):
        self.train, dev, self.words = noise.read(folder)
        _, test, _ = noise.read(folder, "test")
        self.splits = {"dev": dev, "test": test}
        self.out = out
        self.miners: dict[tuple[float, float, int], noise.Model] = {}
        self.clusters: dict[int, Tensor] = {}

    def results(self, options: Options, share: float, seed: int, split: str) -> RetrievalResults:
        """Return the results of a training, from its file if there is one."""
        path = self.out / f"{split} {options} {share} {seed}.pt"
        if path.exists():
            return torch.load(path, weights_only=False)
        results = noise.evaluated(self.model(options, share, seed), self.splits[split])
        torch.save(results, path)
        print(f"{split}: {options}, {share:.0%}, seed {seed}:", _figures(results), flush=True)
        return results

    def model(self, options: Options, share: float, seed: int) -> noise.Model:
        """Return a trained model."""
        split = self.train
        ids = noise.swapped(torch.arange(len(split.words)) // noise.CAPTIONS, share, seed)
        groups = None
        if options.groups is not None:
            groups = self.groups(options.clusters)
        hard = None
        if options.negatives:
            hard = self.hard(options, share, seed, ids)
        loss = Loss(options, split, ids, hard, groups)
        *_, model = noise.fitted(split, self.words, loss, [], RATE, seed, EPOCHS)
        return model

    def hard(self, options: Options, share: float, seed: int, ids: Tensor) -> Hard:
        """Return the candidates for further negatives; mined by the plain model of the same pairs
        and seed.
        """
        pictures = len(self.train.pictures)
        if not options.mined:
            return random_candidates(len(ids), pictures)
        miner = options.temperature, share, seed
        if miner not in self.miners:
            plain = Options(temperature=options.temperature)
            self.miners[miner] = self.model(plain, share, seed)
        groups = torch.arange(pictures)
        if options.groups == "other":
            groups = self.groups(options.clusters)
        return mined(self.miners[miner], self.train, ids, groups, options)

    def groups(self, clusters: int) -> Tensor:
        """Return the (N,) groups of the training pictures."""
        if clusters not in self.clusters:
            self.clusters[clusters] = clustered(self.train.pictures, clusters)
        return self.clusters[clusters]


# ------------------------------------------------------------------------------------------ choices


class Search:
    """The choice of values on the development split."""

    def __init__(self, trainings: Trainings):
        self.trainings = trainings
        self.rows: list[dict[str, Any]] = []

    def best(self, form: str, candidates: Iterable[Options]) -> Options:
        """Return the options with the largest sum of RSUM over the shares of wrong pairs."""
        found: dict[Options, float] = {}
        for options in candidates:
            rsums = []
            for share in SHARES:
                results = self.trainings.results(options, share, SEARCH_SEED, "dev")
                rsums.append(round(results.metrics()["rsum"], 2))
            self.rows.append({"form": form, "split": "dev", "options": str(options), "rsum": rsums})
            found[options] = sum(rsums)
        return max(found, key=found.__getitem__)


def chosen(search: Search) -> dict[str, Options]:
    """Return the options of each form by name."""
    plain = search.best("plain", [Options(temperature=t) for t in (0.07, 0.1)])
    alone = chosen_alone(search, plain)
    alpha = alone["hardness"].hardness
    assert isinstance(alpha, float)
    sharper = round(1 / (1 / plain.temperature + alpha), 3)  # what hardness does to negatives
    forms = {"plain": plain, **alone, **chosen_together(search, alone)}
    forms["lower temperature"] = replace(plain, temperature=sharper)
    forms["random"] = replace(plain, negatives=RANDOM, mined=False)
    for form in ("plain", "hardness", "mined", "mined, hardness"):
        forms[f"{form} at 0.07"] = replace(forms[form], temperature=0.07)  # the library's default
    return forms


def chosen_alone(search: Search, plain: Options) -> dict[str, Options]:
    """Return the forms that add one thing to the plain one."""
    margins = (0.0, 0.1, 0.2)
    hardnesses = (2.0, 5.0)
    rules: tuple[tuple[Literal["same", "other"], int], ...]
    rules = (("other", 500), ("other", 2000), ("same", 20))
    pools = ((10, None), (50, None), (50, 0.95))
    candidates = {
        "filter": [replace(plain, margin=m) for m in margins],
        "hardness": [replace(plain, hardness=a) for a in hardnesses],
        "groups": [replace(plain, groups=rule, clusters=k) for rule, k in rules],
        "mined": [replace(plain, negatives=n, below=share) for n, share in pools],
    }
    return {form: search.best(form, options) for form, options in candidates.items()}


def chosen_together(search: Search, alone: dict[str, Options]) -> dict[str, Options]:
    """Return the forms that add something to mined negatives."""
    mined_ones = alone["mined"]
    margins = (0.0, 0.1, 0.2)
    hardnesses = (2.0, (0.0, 5.0))
    filtered = search.best("mined, filter", [replace(mined_ones, margin=m) for m in margins])
    weighted = search.best("mined, hardness", [replace(mined_ones, hardness=a) for a in hardnesses])
    groups = alone["groups"]
    every = replace(
        filtered, hardness=weighted.hardness, groups=groups.groups, clusters=groups.clusters
    )
    return {"mined, filter": filtered, "mined, hardness": weighted, "all": every}


# ------------------------------------------------------------------------------------------ results


def _figures(results: RetrievalResults) -> dict[str, float]:
    metrics = results.metrics()
    return {name: round(metrics[name], 2) for name in ("rsum", "i2t_r1", "t2i_r1")}


def joined(runs: Sequence[RetrievalResults]) -> RetrievalResults:
    """Return the results of several seeds as one, with the queries of all of them.

    Its metrics are the means over the seeds, and a bootstrap draws a picture with all its seeds.
    """

    def of(sides: Sequence[QueryResults]) -> QueryResults:
        ids = torch.cat([side.ids for side in sides])
        ranks = torch.cat([side.ranks for side in sides])
        top = torch.cat([side.top for side in sides])
        return QueryResults(ids, ranks, top, sides[0].candidates)

    return RetrievalResults(of([run.i2t for run in runs]), of([run.t2i for run in runs]))


def difference(
    runs: Sequence[RetrievalResults], others: Sequence[RetrievalResults]
) -> dict[str, list[float]]:
    """Return the mean difference of RSUM and its 95 % intervals.

    ``pictures``: of a bootstrap over test pictures, with these seeds. ``seeds``: of Student's t of
    the paired seeds, with these pictures.
    """
    comparison = compare(joined(runs), joined(others))["rsum"]
    paired = zip(runs, others, strict=True)
    each = torch.tensor([a.metrics()["rsum"] - b.metrics()["rsum"] for a, b in paired])
    half = STUDENT_T[len(each)] * float(each.std()) / math.sqrt(len(each))
    middle = comparison.difference
    return {
        "difference": [round(middle, 2)],
        "pictures": [round(comparison.low, 2), round(comparison.high, 2)],
        "seeds": [round(middle - half, 2), round(middle + half, 2)],
    }


BASELINES = {  # further differences than those to plain InfoNCE
    "hardness": ("lower temperature",),
    "mined": ("random",),
    "mined, filter": ("mined",),
    "mined, hardness": ("mined",),
    "all": ("mined",),
    "hardness at 0.07": ("plain at 0.07",),
    "mined at 0.07": ("plain at 0.07",),
    "mined, hardness at 0.07": ("plain at 0.07", "mined at 0.07"),
}


def final(trainings: Trainings, forms: dict[str, Options]) -> Iterator[dict[str, Any]]:
    """Yield a row of figures on the test split for each form and share of wrong pairs."""
    for share in SHARES:
        runs = {
            name: [trainings.results(options, share, seed, "test") for seed in SEEDS]
            for name, options in forms.items()
        }
        for name, options in forms.items():
            row: dict[str, Any] = {"form": name, "split": "test", "options": str(options)}
            row["noise"] = share
            figures = [_figures(run) for run in runs[name]]
            for key in figures[0]:
                row[key] = [figure[key] for figure in figures]
            for baseline in ("plain", *BASELINES.get(name, ())):
                if name != baseline:
                    row[f"to {baseline}"] = difference(runs[name], runs[baseline])
            yield row


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, write and print the results; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    trainings = Trainings(args.data, args.out)
    search = Search(trainings)
    forms = chosen(search)
    rows = [*search.rows, *final(trainings, forms)]
    report.save(args.out / "negatives.json", runner.machine("cpu"), rows)
    for row in rows:
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
