"""Pictures of how losses weigh one pair by its score, among other pairs of the same anchor that
stay as they are.
"""

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from torch import Tensor

import itrloss

ALT = "Gradient of losses by the score of one pair"
LOSSES = {
    "InfoNCE": itrloss.InfoNCELoss(0.1),
    "SupCon": itrloss.SupConLoss(),
    "MIL-NCE": itrloss.MILNCELoss(0.1),
    "multi-similarity": itrloss.MultiSimilarityLoss(),
    "circle": itrloss.CircleLoss(),
}
POSITIVE = 0.6  # the score of the anchor's other positive
NEGATIVES = [0.4, 0.3, 0.2, 0.2, 0.1, 0.1, 0.0, 0.0]
TEXT_IDS = torch.tensor([0, 0, *range(1, len(NEGATIVES) + 1)])
SCORES = torch.linspace(-0.2, 1, 121)

FORMS = {
    "plain": itrloss.InfoNCELoss(0.1),
    "hardness=9": itrloss.InfoNCELoss(0.1, hardness=9),
    "left out above the positive + 0.1": itrloss.InfoNCELoss(0.1, margin=0.1),
    "left out above 0.95 of the positive": itrloss.InfoNCELoss(0.1, margin=-0.05, relative=True),
}


def slopes(criterion: itrloss.PairLoss, score: Tensor, column: int) -> float:
    """Return the gradient of one image's loss by its score with a text; a text with a single image
    has no loss.
    """
    scores = torch.tensor([[POSITIVE, POSITIVE, *NEGATIVES]])
    scores[0, column] = score
    scores.requires_grad_()
    criterion(scores=scores, image_ids=torch.tensor([0]), text_ids=TEXT_IDS).backward()
    assert scores.grad is not None
    return float(scores.grad[0, column])


def panel(title: str, column: int, other: str) -> Figure:
    """Return the picture of each loss's gradient by one score, divided by its largest."""
    figure, axes = plt.subplots(figsize=(4.7, 3.3))
    sign = -1 if column < 2 else 1
    for name, criterion in LOSSES.items():
        curve = sign * torch.tensor([slopes(criterion, score, column) for score in SCORES])
        axes.plot(SCORES, curve / curve.abs().max(), label=name)
    axes.axhline(0, color=plt.rcParams["text.color"], linewidth=0.6)
    axes.axvline(POSITIVE, color=plt.rcParams["text.color"], linewidth=0.6, linestyle=":")
    axes.set(
        title=title,
        xlabel=f"its score; dotted: {other}",
        ylabel="weight, as a part of the loss's largest",
    )
    return figure


def forms() -> Figure:
    """Return the picture of a negative's share of the push in forms of InfoNCE, which is at most
    1.
    """
    figure, axes = plt.subplots(figsize=(6.4, 3.3))
    for (name, criterion), style in zip(FORMS.items(), ("-", "-", "--", ":"), strict=True):
        curve = [0.1 * slopes(criterion, score, 2) for score in SCORES]
        axes.plot(SCORES, curve, label=name, linestyle=style, linewidth=2)
    axes.axvline(POSITIVE, color=plt.rcParams["text.color"], linewidth=0.6, linestyle=":")
    axes.set(
        title="How strongly a negative is pushed",
        xlabel="its score; dotted: the positive",
        ylabel="weight",
    )
    axes.legend(fontsize=9, loc="upper left")
    return figure


def figures(name: str = "") -> list[Figure]:
    """Return the pictures of a positive and of a negative, or that of the forms of InfoNCE."""
    if name == "infonce":
        return [forms()]
    pulled = panel("How strongly a positive is pulled", 1, "the anchor's other positive")
    pushed = panel("How strongly a negative is pushed", 2, "the anchor's two positives")
    pulled.axes[0].legend(fontsize=9)
    return [pulled, pushed]
