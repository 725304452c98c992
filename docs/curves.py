"""Pictures of what a loss does to one pair or one text, as curves."""

from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import itrloss

ALT = "Curves of the losses on this page"
NEGATIVES = 127


def robust(axes: Axes) -> None:
    """The gradient by a positive's score, of one image among negatives that score 0.1 ± 0.1."""
    share = torch.arange(0.5, NEGATIVES) / NEGATIVES
    negatives = 0.1 + 0.1 * torch.distributions.Normal(0.0, 1.0).icdf(share)
    positives = torch.linspace(-0.3, 1, 131)
    losses = {
        "InfoNCE": itrloss.InfoNCELoss(),
        "GCE, q = 0.3": itrloss.GeneralizedCrossEntropyLoss(0.07, q=0.3),
        "RINCE, q = 0.1": itrloss.RINCELoss(q=0.1),
        "RINCE, q = 0.5": itrloss.RINCELoss(q=0.5),
        "RINCE, q = 1": itrloss.RINCELoss(q=1.0),
        "RCL": itrloss.ComplementaryContrastiveLoss(0.07),
    }
    for name, loss in losses.items():
        scores = torch.cat(
            [positives[:, None], negatives.expand(len(positives), -1)], 1
        ).requires_grad_()
        loss.reduction = "none"
        rows, _ = loss(
            scores=scores,
            image_ids=torch.zeros(len(scores)).long(),
            text_ids=torch.arange(NEGATIVES + 1),
        )
        (gradient,) = torch.autograd.grad(rows.sum(), scores)
        pull = -gradient[:, 0]
        axes.plot(
            positives, pull / pull.max(), label=name, color="C5" if name == "InfoNCE" else None
        )
    axes.axvspan(0.0, 0.2, color="C5", alpha=0.2, linewidth=0)
    axes.text(0.1, 0.4, "negatives", ha="center", color="C5")
    axes.set(title="Pull on a positive pair", xlabel="its score", ylabel="pull, largest = 1")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))


def probabilistic(axes: Axes) -> None:
    """The variance of a text that is best for it, where several images are as near to it as the
    labelled one.
    """
    counts, totals, dim = range(1, 13), torch.linspace(0.01, 2, 400), 16
    mean = torch.eye(dim)[0]
    # one, of any variance
    texts = mean.expand(len(totals), dim), (totals / dim).log()[:, None].expand(-1, dim)
    given = torch.arange(60), torch.zeros(len(totals), dtype=torch.int64)
    for weight in (0.0, 0.1, 0.5):
        best = []
        loss = itrloss.PCMEPlusPlusLoss(pseudo_weight=weight, vib_weight=0.0, reduction="none")
        for k in counts:
            images = torch.eye(dim)[1:].repeat(4, 1)  # others, at a squared distance of 2
            images[:k] = mean + 0.3 * torch.eye(dim)[1]
            _, values = loss(images, texts[0], torch.full_like(images, -6.0), texts[1], *given)
            best.append(float(totals[values.argmin()]))
        axes.plot(counts, best, marker="o", label=f"α = {weight:g}")
    axes.set(
        title="Best variance of a text",
        xlabel="images as near as the labelled one, with it",
        ylabel="Σσ²",
    )
    axes.legend(loc="lower right")


CURVES: dict[str, Callable[[Axes], None]] = {"robust": robust, "probabilistic": probabilistic}


def figures(name: str) -> list[Figure]:
    """Return the picture of one page."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    CURVES[name](axes)
    return [figure]
