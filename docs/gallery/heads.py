"""Several heads per image

Every image here has four meanings, and each caption is about one of them. One embedding has
to lie between its captions; with several heads, trained with the variance-aware loss of DVSE, a
head may stand near each.
"""

import matplotlib.pyplot as plt
import torch

import itrloss
from itrloss.functional import set_similarity

torch.manual_seed(0)
N, MEANINGS, DIM = 100, 4, 16
meanings = torch.randn(N, MEANINGS, DIM)
captions = meanings.flatten(0, 1) + 0.5 * torch.randn(N * MEANINGS, DIM)
ids, caption_ids = torch.arange(N), torch.arange(N).repeat_interleave(MEANINGS)

recalls = {}
for heads in (1, 2, 4, 8):
    images = torch.nn.Parameter(torch.randn(N, heads, DIM))
    criterion = itrloss.VarianceAwareLoss(detach_sigma=True)
    optimizer = torch.optim.Adam([images], lr=0.05)
    for _ in range(50):
        loss = criterion(images, captions, ids, caption_ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    scores = set_similarity(images.detach(), captions)
    recalls[heads] = itrloss.metrics.retrieval_metrics(scores, ids, caption_ids)["t2i_r1"]
    print(f"heads {heads}: R@1 {recalls[heads]:.1f}")
plt.bar(range(4), list(recalls.values()), tick_label=list(recalls))
plt.gca().set(xlabel="heads per image", ylabel="R@1, text to image, %")
