"""Hubs, before and after

How often is each of 1000 texts among the first ten that an image gets? Ten times on average, but
some texts appear for most images and some for none. Fast Re-ranking moves the hubs down, which also
lowers the skewness of these counts.
"""

import matplotlib.pyplot as plt
import torch

import itrloss
from itrloss.metrics import retrieval_results
from itrloss.rerank import FastReranker

torch.manual_seed(0)
images = torch.randn(1000, 64) + 0.8  # a shared component, of which some texts have more
texts = images + 2.0 * torch.randn(1000, 64) + 2.0 * torch.rand(1000, 1)
sim = itrloss.Similarity(images, texts)

bins = range(0, 90, 3)
for name, reranker in {"no re-ranking": None, "Fast Re-ranking": FastReranker()}.items():
    results = retrieval_results(sim, reranker=reranker)
    metrics, occurrences = results.metrics(), results.i2t.occurrences
    print(
        f"{name:16} R@1 {metrics['i2t_r1']:.1f}, skewness {metrics['i2t_skewness']:.2f},", end=" "
    )
    print(f"{int((occurrences == 0).sum())} texts never come up")
    plt.hist(occurrences.clamp_max(87), bins, alpha=0.6, label=name)
plt.gca().set(xlabel="images that have the text among their first ten", ylabel="texts")
plt.legend()
