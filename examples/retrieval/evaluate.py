"""Encode a split, score it, and measure recall before and after re-ranking."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from itrloss.metrics import retrieval_metrics
from itrloss.rerank import FastReranker, Reranker

from .data import Encodes, Split, chosen, pad
from .models import VSE
from .pictures import Images

RECALLS = tuple(f"{way}_r{k}" for way in ("i2t", "t2i") for k in (1, 5, 10))
PICTURES = 64  # raw images encoded at a time


@torch.no_grad()
def encode(
    model: VSE, split: Split, vocabulary: Encodes, batch_size: int = 512
) -> tuple[Tensor, Tensor]:
    """Embed the images and the captions of a split for retrieval, on the model's device.

    The model is in evaluation mode meanwhile; its mode is restored afterwards.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    images = []
    step = min(batch_size, PICTURES) if isinstance(split.features, Images) else batch_size
    for i in range(0, len(split.features), step):
        rows = slice(i, i + step)
        wholes = None if split.wholes is None else chosen(split.wholes, rows).to(device)
        images.append(model.embed_images(chosen(split.features, rows).to(device), wholes))
    word_ids = [vocabulary.encode(caption) for caption in split.captions]
    # batches with little padding
    by_length = np.argsort([len(ids) for ids in word_ids], kind="stable")
    texts = []
    for i in range(0, len(word_ids), batch_size):
        words, lengths = pad([word_ids[j] for j in by_length[i : i + batch_size]])
        texts.append(model.embed_texts(words.to(device), lengths))
    model.train(was_training)
    unsorted = torch.from_numpy(np.argsort(by_length)).to(device)
    return torch.cat(images), torch.cat(texts)[unsorted]


@torch.no_grad()
def model_scores(model: VSE, split: Split, vocabulary: Encodes, batch_size: int = 512) -> Tensor:
    """Similarities of all images and all captions of a split: (n_images, n_captions), on the
    CPU.
    """
    return model.similarity(*encode(model, split, vocabulary, batch_size)).cpu()


def recalls(scores: Tensor, split: Split) -> dict[str, float]:
    """Compute all figures of :func:`itrloss.metrics.retrieval_metrics`."""
    return retrieval_metrics(scores, split.image_ids, split.text_ids)


def reranker(parameters: Sequence[float]) -> FastReranker:
    """Build the Fast Re-ranking of a run's setting ``rerank``."""
    gamma_1, gamma_2, lambda_1, lambda_2 = parameters
    return FastReranker((gamma_1, gamma_2), (lambda_1, lambda_2))


def before_and_after(scores: Tensor, split: Split, by: Reranker) -> dict[str, dict[str, float]]:
    """Recalls of the scores, and of the scores re-ranked with all queries of the split."""
    reranked = by.rerank(scores)
    after = retrieval_metrics(reranked, split.image_ids, split.text_ids)
    return {"before": recalls(scores, split), "after": after}
