"""Re-rank a saved matrix

A model's scores for 200 images with five captions each, saved in a file, are re-ranked in six
ways. None uses labels; all use the test queries together. RSUM is the sum of six recalls, 600 at
best.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import itrloss
from itrloss import rerank

torch.manual_seed(0)
images = torch.randn(200, 64) + 1.0
texts = images.repeat_interleave(5, 0) + 2.5 * torch.randn(1000, 64) + 2.0 * torch.rand(1000, 1)
ids = torch.arange(200), torch.arange(200).repeat_interleave(5)
np.save("sims.npy", itrloss.Similarity(images, texts, *ids).scores())  # (images, captions)

scores = torch.from_numpy(np.load("sims.npy"))
rsum = {"no re-ranking": itrloss.metrics.retrieval_metrics(scores)["rsum"]}
for method in (
    rerank.MutualProximity,
    rerank.NearestNeighborNorm,
    rerank.CSLS,
    rerank.FastReranker,
    rerank.DualSoftmax,
    rerank.Sinkhorn,
):
    i2t, t2i = method().rerank(scores)
    rsum[method.__name__] = itrloss.metrics.retrieval_metrics((i2t, t2i))["rsum"]

names = sorted(rsum, key=rsum.get)
colors = ["C5" if name == "no re-ranking" else "C0" for name in names]
bars = plt.barh(names, [rsum[name] for name in names], color=colors)
plt.bar_label(bars, fmt="%.0f", padding=3)
plt.xlim(min(rsum.values()) - 20, max(rsum.values()) + 15)
plt.xlabel("RSUM")
