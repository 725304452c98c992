"""Encode a split, score it, and measure recall before and after re-ranking."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from itrloss.metrics import retrieval_metrics
from itrloss.rerank import FastReranker, Reranker

from .data import Split, Tokenizer, pad
from .models import VSE

RECALLS = tuple(f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10))
FIGURES = (*RECALLS, "rsum")
IMAGES, TEXTS = 64, 512  # encoded at a time
SCORED = 500  # images whose similarities are computed at a time
READERS = 8  # threads that decode raw images


@torch.no_grad()
def encode(model: VSE, split: Split, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """Embed the images and the captions of a split for retrieval, on the model's device.

    The model is in evaluation mode meanwhile; its mode is restored afterwards.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    images = []
    with ThreadPoolExecutor(READERS) as readers:
        for rows in torch.arange(len(split.features)).split(IMAGES):
            regions = torch.stack(list(readers.map(split.regions, rows.tolist())))
            wholes = split.whole(rows.tolist())
            if wholes is not None:
                wholes = wholes.to(device)
            images.append(model.embed_images(regions.to(device), wholes))
    word_ids = [tokenizer.encode(caption) for caption in split.captions]
    lengths = torch.tensor([len(ids) for ids in word_ids])
    by_length = lengths.argsort(stable=True)  # for batches with little padding
    texts = []
    for rows in by_length.split(TEXTS):
        words, lengths = pad([word_ids[i] for i in rows.tolist()])
        texts.append(model.embed_texts(words.to(device), lengths))
    model.train(was_training)
    return torch.cat(images), torch.cat(texts)[by_length.argsort().to(device)]


def model_scores(model: VSE, split: Split, tokenizer: Tokenizer) -> Tensor:
    """Similarities of all images and all captions of a split: (n_images, n_captions), on the
    CPU.
    """
    return match(model, *encode(model, split, tokenizer))


@torch.no_grad()
def match(model: VSE, images: Tensor, texts: Tensor) -> Tensor:
    """Similarities of embeddings: (n_images, n_captions), on the CPU."""
    # of all images at once, sets would take several times the memory of the scores
    return torch.cat([model.similarity(rows, texts).cpu() for rows in images.split(SCORED)])


def recalls(
    scores: Tensor, split: Split, by: Reranker | None = None, folds: int = 1
) -> dict[str, float]:
    """Compute all figures of :func:`itrloss.metrics.retrieval_metrics`."""
    ids = split.image_ids, split.text_ids
    return retrieval_metrics(scores, *ids, reranker=by, folds=folds)


def reranker(parameters: Sequence[float]) -> FastReranker:
    """Build the Fast Re-ranking of a run's setting ``rerank``."""
    gamma_1, gamma_2, lambda_1, lambda_2 = parameters
    return FastReranker((gamma_1, gamma_2), (lambda_1, lambda_2))


def before_and_after(
    scores: Tensor, split: Split, by: Reranker, folds: int = 1
) -> dict[str, dict[str, float]]:
    """Recalls of the scores, and of the scores re-ranked with all queries of the split.

    With folds, which are equal parts of the images in their order with their captions, each part is
    a test set of its own, re-ranking included, and the recalls are means over the parts.
    """
    return {
        "before": recalls(scores, split, folds=folds),
        "after": recalls(scores, split, by, folds),
    }
