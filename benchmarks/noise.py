"""Eight losses on Flickr8k with wrong training pairs: RSUM on the clean development split, by the
share of wrong pairs.

    python -m benchmarks.noise flickr8k benchmarks/results/noise.json

The folder has, for "train" and "dev", ``{split}_caps.txt`` (a caption a line, five of each picture
in turn) and ``{split}_global.npy`` (features of the whole pictures, at least 0). Wrong pairs: a
share of the training captions swap their pictures among themselves. The model is linear, on the
pictures' features and on bags of words. Every finished run is written; a second call goes on with
what is missing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import itrloss
from itrloss.metrics import RetrievalResults, retrieval_results
from itrloss.terms import identity

from . import report, runner

NOISE = (0.0, 0.2, 0.4, 0.6)
SEEDS = (0, 1, 2)
EPOCHS, BATCH, DIM = 10, 512, 256
CAPTIONS = 5  # of each picture


class FilteredInfoNCELoss(itrloss.PairLoss):
    """InfoNCE without the negatives that score far above the positive, see the page Recipes."""

    temperature: float = itrloss.option()
    margin: float = itrloss.option()

    def compute(self, sim: Any) -> Any:
        anchors = self.anchors(sim)
        scale = 1 / self.temperature
        own = anchors.mean_of_positives(identity)
        negatives = anchors.logsumexp(scale, below=own + self.margin)
        return anchors.reduce(F.softplus(negatives - scale * own), self.reduction)


# How each is made, and the learning rate.
LOSSES: dict[str, tuple[Callable[[], itrloss.PairLoss], float]] = {
    "InfoNCE": (lambda: itrloss.InfoNCELoss(0.1), 4e-3),
    "SigLIP": (itrloss.SigmoidLoss, 2e-3),
    "triplet": (lambda: itrloss.TripletLoss(0.4, "all", reduction="mean"), 4e-3),
    "HAL": (lambda: itrloss.HubnessAwareLoss(20.0, 0.3), 4e-3),
    "DCL": (lambda: itrloss.DiversityContrastiveLoss(positive_weight=2.0), 4e-3),
    "InfoNCE, filtered": (lambda: FilteredInfoNCELoss(0.1, 0.2), 4e-3),
    "RINCE": (lambda: itrloss.RINCELoss(0.1, 0.1, 0.025), 4e-3),
    "GCE": (lambda: itrloss.GeneralizedCrossEntropyLoss(0.1, 0.3), 2e-3),
}


class Split(NamedTuple):
    """(N, F) features of pictures, (M, L) words of captions, 0 for none, and (M, L) their
    weights.
    """

    pictures: Tensor
    words: Tensor
    weights: Tensor


def read(folder: Path, held_out: str = "dev") -> tuple[Split, Split, int]:
    """Return the training split and the one to evaluate on, and the number of words: those of three
    training captions.
    """
    captions = {
        split: [
            re.findall(r"[a-z0-9]+", line.lower()) for line in (folder / f"{split}_caps.txt").open()
        ]
        for split in ("train", held_out)
    }
    seen = Counter(word for caption in captions["train"] for word in set(caption))
    number = {word: i for i, word in enumerate((w for w in sorted(seen) if seen[w] >= 3), 1)}
    total = len(captions["train"])
    idf = torch.tensor([0.0, *(math.log(total / seen[word]) for word in number)])
    roots = {
        s: torch.from_numpy(np.load(folder / f"{s}_global.npy").astype(np.float32)).sqrt()
        for s in captions
    }
    centre, spread = roots["train"].mean(0), roots["train"].std(0).clamp_min(1e-3)
    splits = []
    for split, lists in captions.items():
        rows = [
            torch.tensor([number[word] for word in caption if word in number] or [0])
            for caption in lists
        ]
        words = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        splits.append(Split((roots[split] - centre) / spread, words, F.normalize(idf[words])))
    return splits[0], splits[1], 1 + len(number)


class Model(nn.Module):
    """One linear layer for each side."""

    def __init__(self, features: int, words: int) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(features, DIM), nn.EmbeddingBag(words, DIM, mode="sum")
        nn.init.normal_(self.text.weight, std=DIM**-0.5)

    def forward(self, pictures: Tensor, words: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        kept = words > 0
        starts = F.pad(kept.sum(1).cumsum(0), (1, -1))
        dropped = F.dropout(weights[kept], 0.3, self.training)
        if self.training:  # dropout of 0.5, whose mask takes F.dropout longer than the layer takes
            bits = torch.randint(
                0, 256, (len(pictures), -(-pictures.shape[1] // 8)), dtype=torch.uint8
            )
            mask = np.unpackbits(bits.numpy(), axis=1, count=pictures.shape[1])
            pictures = pictures * torch.from_numpy(2 * mask)
        return self.image(pictures), self.text(words[kept], starts, dropped)


def swapped(ids: Tensor, share: float, seed: int) -> Tensor:
    """Return the pictures' numbers where this share of the captions swap theirs among
    themselves.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(ids), generator=generator)[: round(share * len(ids))]
    ids = ids.clone()
    ids[chosen] = ids[chosen[torch.randperm(len(chosen), generator=generator)]]
    return ids


def fitted(
    split: Split,
    words: int,
    loss_of: Callable[[Model, Tensor], Tensor],
    parameters: Iterable[nn.Parameter],
    rate: float,
    seed: int,
    epochs: int,
) -> Iterator[Model]:
    """Yield the model after each epoch, for evaluation.

    ``loss_of(model, rows)`` is the loss of some captions, ``parameters`` are those of the loss.
    """
    torch.manual_seed(seed)
    model = Model(split.pictures.shape[1], words)
    optimizer = torch.optim.Adam([*model.parameters(), *parameters], rate, fused=True)
    steps = epochs * math.ceil(len(split.words) / BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: 0.5 + 0.5 * math.cos(math.pi * i / steps)
    )
    for _ in range(epochs):
        model.train()
        for rows in torch.randperm(len(split.words)).split(BATCH):
            value = loss_of(model, rows)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            schedule.step()
        yield model.eval()


@torch.no_grad()
def evaluated(model: Model, split: Split) -> RetrievalResults:
    """Return the results of a split, whose captions are of each picture in turn."""
    images, texts = model(*split)
    image_ids = torch.arange(len(images))
    text_ids = torch.arange(len(texts)) // CAPTIONS
    return retrieval_results(itrloss.Similarity(images, texts, image_ids, text_ids))


def train(
    data: tuple[Split, Split, int],
    loss: itrloss.PairLoss,
    rate: float,
    noise: float,
    seed: int,
    epochs: int,
) -> list[float]:
    """Return RSUM on the development split after each epoch."""
    split, dev, words = data
    ids = swapped(torch.arange(len(split.words)) // CAPTIONS, noise, seed)

    def loss_of(model: Model, rows: Tensor) -> Tensor:
        of_rows = ids[rows]
        embeddings = model(split.pictures[of_rows], split.words[rows], split.weights[rows])
        return loss(*embeddings, of_rows, of_rows)

    models = fitted(split, words, loss_of, loss.parameters(), rate, seed, epochs)
    return [round(evaluated(model, dev).metrics()["rsum"], 2) for model in models]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, write it and print RSUM after the last epoch; return the exit
    status.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--noise", nargs="+", type=float, default=NOISE)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    args = parser.parse_args(arguments)
    report.check_path(args.out)
    rows = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    done = {(row["seed"], row["noise"], row["loss"]) for row in rows}
    data = read(args.data)
    for seed, noise, name in itertools.product(args.seeds, args.noise, LOSSES):
        if (seed, noise, name) in done:
            continue
        make, rate = LOSSES[name]
        rsums = train(data, make(), rate, noise, seed, args.epochs)
        row = {"seed": seed, "noise": noise, "loss": name, "last": rsums[-1], "best": max(rsums)}
        row |= {
            "best_epoch": 1 + rsums.index(max(rsums)),
            "options": repr(make()),
            "rate": rate,
            "rsum": rsums,
        }
        rows.append(row)
        report.save(args.out, runner.machine("cpu"), rows)
    for name, noise in itertools.product(LOSSES, args.noise):
        print(
            f"{name:20}{noise:4.0%} ",
            *(row["last"] for row in rows if (row["loss"], row["noise"]) == (name, noise)),
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
