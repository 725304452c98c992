"""Pictures of what a loss does to a small similarity matrix: the gradient by every score."""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import itrloss
from itrloss import Anchors, Similarity, functional
from itrloss.engine.relation import IGNORE_ID
from itrloss.memory import MemorySimilarity

IDS = torch.tensor([0, 1, 2, 2, 4, 5, 6, 7])  # images 2 and 3 are the same picture
MEMORY_IDS = torch.tensor([11, 12, 13, 5, 14, 15, 16, 17, IGNORE_ID, IGNORE_ID])
CLUSTERS = torch.tensor([0, 0, 1, 1, 2, 3, 4, 4])

ALT = "Gradient of the loss by every similarity"
LEGEND = (
    "The gradient of the loss by every score, whose value is the number in its cell. What is red "
    "is pushed apart, what is blue pulled together; positive pairs have a box."
)


def similarities(seed: int = 0) -> Tensor:
    """Return (8, 8) scores: two hard negatives, a text near to all images, an image equally near to
    its negatives.
    """
    scores = 0.1 + 0.2 * torch.rand(8, 8, generator=torch.Generator().manual_seed(seed))
    scores[:, 6] += 0.22  # a hub
    scores[7] = 0.27 + 0.02 * scores[7]  # all its negatives are alike
    scores[[0, 4], [1, 5]] = torch.tensor([0.55, 0.52])  # the second is above its positive
    scores.diagonal().copy_(torch.tensor([0.7, 0.6, 0.65, 0.6, 0.45, 0.72, 0.62, 0.4]))
    scores[[2, 3], [3, 2]] = torch.tensor([0.5, 0.55])
    return scores


def memory_scores(seed: int) -> Tensor:
    """Return (8, 10) scores with a memory: one entry is near to all, the last two are not filled
    yet.
    """
    scores = 0.1 + 0.25 * torch.rand(8, 10, generator=torch.Generator().manual_seed(seed))
    scores[:, 6] += 0.22
    scores[[1, 4], [2, 0]] = torch.tensor([0.58, 0.5])
    scores[5, 3] = 0.66  # another caption of image 5
    scores[:, 8:] = 0.0
    return scores


def _of_scores(criterion: itrloss.PairLoss) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    def draw():
        scores = similarities().requires_grad_()
        criterion(scores=scores, image_ids=IDS, text_ids=IDS).backward()
        return scores, IDS, IDS

    return draw


def _of_memory(loss: Callable) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    def draw():
        scores, others = memory_scores(1).requires_grad_(), memory_scores(2)
        batch, keys = (Similarity.from_scores(similarities(), IDS, IDS) for _ in range(2))
        memory = (Similarity.from_scores(x, IDS, MEMORY_IDS) for x in (scores, others))
        both = batch.both, keys.both, Anchors.together(*memory)
        loss(MemorySimilarity(batch, *both, directions="both")).backward()
        return scores, IDS, MEMORY_IDS

    return draw


def _of_head(head: int) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    def draw():
        spread = similarities(2)
        narrow = 0.35 + 0.3 * (spread - 0.35)  # this head tells texts less well apart
        heads = [spread.requires_grad_(), narrow.detach().requires_grad_()]
        functional.variance_aware_loss(
            [Similarity.from_scores(x, IDS, IDS) for x in heads]
        ).backward()
        return heads[head], IDS, IDS

    return draw


def _of_classes() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 5, generator=generator)
    logits[torch.arange(8), CLUSTERS] += 1.5
    logits[4] = torch.tensor([0.1, 2.5, 0.4, 0.2, 0.3])  # taken for class 1
    logits.requires_grad_()
    texts = logits.detach().clone()
    functional.prototype_classification_loss(logits, texts, torch.eye(5), CLUSTERS).backward()
    return logits, CLUSTERS, torch.arange(5)


PANELS = {
    "dcl": {
        "DCL": _of_scores(itrloss.DiversityContrastiveLoss()),
        "diversity=None": _of_scores(itrloss.DiversityContrastiveLoss(diversity=None)),
    },
    "hal": {
        "HAL": _of_scores(itrloss.HubnessAwareLoss()),
        "scale=20, margin=0.3": _of_scores(itrloss.HubnessAwareLoss(scale=20.0, margin=0.3)),
    },
    "infonce": {
        "temperature=0.07": _of_scores(itrloss.InfoNCELoss()),
        "temperature=0.3": _of_scores(itrloss.InfoNCELoss(temperature=0.3)),
    },
    "robust": {
        "GCE": _of_scores(itrloss.GeneralizedCrossEntropyLoss()),
        "RINCE": _of_scores(itrloss.RINCELoss()),
        "RCL": _of_scores(itrloss.ComplementaryContrastiveLoss()),
    },
    "sigmoid": {
        "scale=10, bias=-10": _of_scores(itrloss.SigmoidLoss(learnable=False)),
        "scale=20, bias=-10": _of_scores(itrloss.SigmoidLoss(scale=20.0, learnable=False)),
    },
    "triplet": {
        'mining="hardest"': _of_scores(itrloss.TripletLoss()),
        'mining="all"': _of_scores(itrloss.TripletLoss(mining="all")),
    },
    "memory": {
        "M-DCL": _of_memory(functional.memory_diversity_contrastive_loss),
        "UTO": _of_memory(functional.unified_training_objective),
    },
    "variance_aware": {
        "a head that spreads its scores": _of_head(0),
        "a head that does not": _of_head(1),
    },
    "prototypes": {"PGC": _of_classes},
}


def figure(
    title: str, scores: Tensor, row_ids: Tensor, col_ids: Tensor, rows: str, cols: str
) -> Figure:
    """Return the picture of ``scores.grad``, with the scores as numbers and a box around every
    positive.
    """
    gradient, (n, m) = scores.grad, scores.shape
    assert gradient is not None
    top = gradient.abs().max()
    fig, ax = plt.subplots(figsize=(4.6, 0.42 * n + 0.9))
    image = ax.imshow(gradient, cmap="RdBu_r", vmin=-top, vmax=top)
    for i in range(n):
        for j in range(m):
            if col_ids[j] == IGNORE_ID:
                continue
            strong = abs(gradient[i, j]) > 0.6 * top
            number = f"{scores[i, j].round(decimals=2) + 0.0:.2f}".replace("0.", ".")
            ax.text(
                j,
                i,
                number,
                ha="center",
                va="center",
                size=8,
                color="white" if strong else "#222222",
            )
            if row_ids[i] == col_ids[j]:
                ax.add_patch(
                    Rectangle((j - 0.47, i - 0.47), 0.94, 0.94, fill=False, color="#222222", lw=1.6)
                )
    ax.set(title=title, xlabel=cols, ylabel=rows, xticks=range(m), yticks=range(n))
    ax.set_xticklabels(["–" if x == IGNORE_ID else int(x) for x in col_ids])
    ax.set_yticklabels([int(x) for x in row_ids])
    ax.tick_params(length=0)
    bar = fig.colorbar(image, ax=ax, label="∂L / ∂S", fraction=0.05)
    bar.formatter.set_powerlimits((-2, 2))
    return fig


def figures(name: str) -> list[Figure]:
    """Return the pictures of one loss."""
    rows, cols = (
        ("prototype of the pair", "prototype")
        if name == "prototypes"
        else ("id of the image", "id of the text")
    )
    cols = "id of the text in the memory" if name == "memory" else cols
    return [figure(title, *panel(), rows, cols) for title, panel in PANELS[name].items()]
