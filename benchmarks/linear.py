"""Small models of images and captions, one per loss: a layer on features of the picture, a layer on
a bag of words.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import itrloss

DIM, BATCH, EPOCHS, RATE = 256, 512, 15, 2e-3
HIDDEN = 1024  # units of the models that are not linear

#: A new loss of each system, and whether its model has a hidden layer.
LOSSES: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "InfoNCE, τ = 0.05": (lambda: itrloss.InfoNCELoss(0.05), False),
    "InfoNCE, τ = 0.1": (lambda: itrloss.InfoNCELoss(0.1), False),
    "InfoNCE, τ = 0.2": (lambda: itrloss.InfoNCELoss(0.2), False),
    "InfoNCE, τ = 0.1, hidden layer": (lambda: itrloss.InfoNCELoss(0.1), True),
    "HAL, γ = 90, ε = 0.5": (lambda: itrloss.HubnessAwareLoss(90, 0.5), False),
    "HAL, γ = 20, ε = 0.1": (lambda: itrloss.HubnessAwareLoss(20, 0.1), False),
    "SigLIP": (itrloss.SigmoidLoss, False),
    "DCL": (itrloss.DiversityContrastiveLoss, False),
    "DCL, positive weight 1": (
        lambda: itrloss.DiversityContrastiveLoss(positive_weight=1.0),
        False,
    ),
    "triplet, hardest": (itrloss.TripletLoss, False),
    "triplet, all": (lambda: itrloss.TripletLoss(mining="all"), False),
}


def words(caption: str) -> list[str]:
    """Return the words of a caption in lower case."""
    return re.findall(r"[a-z]+", caption.lower())


class Data:
    """Standardised features of the pictures and words of the captions of the splits of a folder."""

    def __init__(self, folder: Path, splits: Sequence[str]):
        captions = {
            x: (folder / f"{x}_caps.txt").read_text(encoding="utf-8").splitlines() for x in splits
        }
        features = {
            x: torch.from_numpy(np.load(folder / f"{x}_global.npy")).float().sqrt() for x in splits
        }
        mean, std = features["train"].mean(0), features["train"].std(0).clamp_min(1e-6)
        occurrences = Counter(word for caption in captions["train"] for word in set(words(caption)))
        known = [word for word, count in occurrences.items() if count > 1]
        #: Logarithms of the inverse shares of training captions that have a word.
        self.idf = torch.tensor(
            [len(captions["train"]) / occurrences[word] for word in known]
        ).log()
        number = {word: i for i, word in enumerate(known)}
        self.images = {name: (x - mean) / std for name, x in features.items()}
        self.texts = {
            name: [
                torch.tensor(
                    sorted({number[w] for w in words(x) if w in number}), dtype=torch.int64
                )
                for x in texts
            ]
            for name, texts in captions.items()
        }


class Model(nn.Module):
    """Embeddings of pictures and of captions."""

    idf: Tensor

    def __init__(self, features: int, idf: Tensor, hidden: bool):
        super().__init__()
        self.register_buffer("idf", idf)
        width = HIDDEN if hidden else DIM
        self.pictures, self.words = (
            nn.Linear(features, width),
            nn.EmbeddingBag(len(idf), width, mode="sum"),
        )
        nn.init.normal_(self.words.weight, std=width**-0.5)
        self.after_pictures, self.after_words = (
            nn.Sequential(nn.ReLU(), nn.Dropout(0.3), nn.Linear(HIDDEN, DIM))
            if hidden
            else nn.Identity()
            for _ in range(2)
        )

    def forward(self, images: Tensor, texts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the (n, DIM) and (m, DIM) embeddings."""
        flat, starts = torch.cat(list(texts)), torch.tensor([0, *map(len, texts)]).cumsum(0)[:-1]
        weights = F.dropout(self.idf[flat], 0.3, self.training)
        v = self.pictures(F.dropout(images, 0.5, self.training))
        return self.after_pictures(v), self.after_words(
            self.words(flat, starts, per_sample_weights=weights)
        )


def trained(data: Data, loss: nn.Module, hidden: bool, seed: int, epochs: int = EPOCHS) -> Model:
    """Return a model after training with a loss; ``loss(images, texts, image_ids, text_ids)``."""
    torch.manual_seed(seed)
    images, texts = data.images["train"], data.texts["train"]
    model, per_image = Model(images.shape[1], data.idf, hidden), len(texts) // len(images)
    optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], RATE)
    steps = len(texts) // BATCH * epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, steps, pct_start=0.05)
    for _ in range(epochs):
        for rows in torch.randperm(len(texts))[: len(texts) // BATCH * BATCH].split(BATCH):
            ids = rows // per_image
            pictures, which = ids.unique(return_inverse=True)
            v, w = model(images[pictures], [texts[i] for i in rows.tolist()])
            optimizer.zero_grad()
            loss(v, w, pictures, pictures[which]).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


@torch.no_grad()
def embedded(data: Data, model: Model, split: str) -> tuple[Tensor, Tensor]:
    """Return the (n, DIM) and (m, DIM) embeddings of a split."""
    return model(data.images[split], data.texts[split])
