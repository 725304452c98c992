"""A loss of your own

Any elementwise function of the scores can be summed over each anchor's negatives or positives: the
engine loops over tiles, autograd computes the derivative. Here the loss of a negative is the square
of its excess over the positive's score less 0.4. Training separates positives from negatives.
"""

import matplotlib.pyplot as plt
import torch

import itrloss


@itrloss.pair_term
def squared_hinge(scores, threshold):  # parameters have one value for each anchor
    return (scores - threshold).relu().square()


@itrloss.pair_term
def itself(scores):
    return scores


class SquaredHingeLoss(itrloss.PairLoss):
    def compute(self, sim):
        anchors = self.anchors(sim)  # the images, then the texts
        positive = anchors.mean_of_positives(itself)
        return anchors.reduce(anchors.sum(squared_hinge, positive - 0.4), self.reduction)


torch.manual_seed(0)
images = torch.randn(300, 24)
texts = (images + 1.5 * torch.randn(300, 24)).requires_grad_()
criterion, optimizer = SquaredHingeLoss(), torch.optim.Adam([texts], lr=0.02)
for step in range(101):
    if step in (0, 100):
        scores = itrloss.Similarity(images, texts).scores().detach()
        look = {"range": (-1, 1), "density": True, "histtype": "step", "ls": ":-"[step > 0]}
        off = ~torch.eye(300, dtype=torch.bool)
        plt.hist(scores.diagonal(), 60, color="C0", label=f"positives, step {step}", **look)
        plt.hist(scores[off], 60, color="C1", label=f"negatives, step {step}", **look)
    loss = criterion(images, texts)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
plt.gca().set(xlabel="cosine similarity", ylabel="density")
plt.legend(loc="upper left")
