"""Cyclic terms of CyCLIP

A regulariser is added to a loss as a number. CyCLIP (Goel et al., NeurIPS 2022,
https://arxiv.org/abs/2205.14459) wants the score of image i and text j to be that of image j and
text i, and the score of two images to be that of their texts. Its authors weigh both by 0.25.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import itrloss


def cyclic(images, texts, in_modal=0.25, cross_modal=0.25):
    x, y = F.normalize(images, dim=1), F.normalize(texts, dim=1)
    scores = x @ y.T
    crossed = (scores - scores.T).square().sum() / len(x)
    within = (x @ x.T - y @ y.T).square().sum() / len(x)
    return in_modal * within + cross_modal * crossed


criterion = itrloss.InfoNCELoss(0.07)
for weight, label in ((0, "InfoNCE"), (1, "with cyclic terms")):
    torch.manual_seed(0)
    things = torch.randn(128, 32)
    inputs = [things + 0.7 * torch.randn(128, 32) for _ in range(2)]
    towers = torch.nn.ModuleList([torch.nn.Linear(32, 16), torch.nn.Linear(32, 16)])
    optimizer = torch.optim.Adam(towers.parameters(), lr=0.01)
    for _ in range(100):
        images, texts = (tower(x) for tower, x in zip(towers, inputs, strict=True))
        loss = 0.5 * criterion(images, texts) + weight * cyclic(images, texts)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scores = itrloss.Similarity(images, texts).scores().detach()
    off = ~torch.eye(128, dtype=torch.bool)
    gap = (scores - scores.T)[off]
    print(f"{label}: |S_ij - S_ji| {gap.abs().mean():.3f} on average")
    plt.hist(gap, 60, range=(-1, 1), density=True, histtype="step", label=label)
plt.gca().set(xlabel="$S_{ij} - S_{ji}$", ylabel="density")
plt.legend(loc="upper left")
