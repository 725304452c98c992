"""Which engine?

Small matrices use plain PyTorch, which makes the fewest calls; large ones are computed in tiles.
The grey line is the size at which ``auto`` switches on a CPU. Times are
those of the machine that built this page.
"""

import time

import matplotlib.pyplot as plt
import torch

import itrloss


def milliseconds(engine, n):
    images, texts = torch.randn(2, n, 64).requires_grad_()
    criterion, times = itrloss.DiversityContrastiveLoss(engine=engine), []
    for _ in range(5):
        start = time.perf_counter()
        criterion(images, texts).backward()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


sizes = [32, 64, 128, 256, 512, 1024]
for engine in ("dense", "tiled"):
    plt.loglog(sizes, [milliseconds(engine, n) for n in sizes], "o-", label=f'engine="{engine}"')
plt.axvline(256, color="C5", ls=":")
plt.xticks(sizes, sizes)
plt.minorticks_off()
plt.gca().set(xlabel="pairs in the batch", ylabel="DCL, forward and backward, ms")
plt.legend()
for n in (256, 257):
    print(n, itrloss.Similarity(torch.randn(n, 4), torch.randn(n, 4)).engine)
