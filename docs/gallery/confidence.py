"""Confidence intervals of recalls

Two models on the same 300 images with five captions each. Each model's own interval comes from
resampling images; the paired comparison draws the same images for both models each time, and is
far more precise about their difference.
"""

import matplotlib.pyplot as plt
import torch

import itrloss
from itrloss.metrics import compare, confidence_intervals, retrieval_results

torch.manual_seed(0)
images = torch.randn(300, 64)
noise, ids = torch.randn(1500, 64), torch.arange(300)
models = {}
for name, scale in {"model A": 2.5, "model B": 2.6}.items():
    texts = images.repeat_interleave(5, 0) + scale * noise
    sim = itrloss.Similarity(images, texts, ids, ids.repeat_interleave(5))
    models[name] = retrieval_results(sim)

names = ["t2i_r1", "t2i_r5", "t2i_r10"]
_, (left, right) = plt.subplots(1, 2)
for k, (model, results) in enumerate(models.items()):
    metrics, intervals = results.metrics(), confidence_intervals(results)
    for i, name in enumerate(names):
        low, high = intervals[name]
        left.plot([i + 0.2 * k - 0.1] * 2, [low, high], f"C{k}", lw=3)
        left.plot(i + 0.2 * k - 0.1, metrics[name], f"C{k}o", label=model if i == 0 else None)
left.set(ylabel="%, with 95 % intervals", xticks=range(3), xticklabels=["R@1", "R@5", "R@10"])
left.legend()
for i, name in enumerate(names):
    change = compare(models["model A"], models["model B"])[name]
    right.plot([i, i], [change.low, change.high], "C2", lw=3)
    right.plot(i, change.difference, "C2o")
    print(f"{name:8} {change.difference:+.1f} ({change.low:+.1f} to {change.high:+.1f})")
right.axhline(0, color="C5", ls=":")
right.set(ylabel="A less B, in points", xticks=range(3), xticklabels=["R@1", "R@5", "R@10"])
