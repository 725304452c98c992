"""Memory by batch size

The tensors that autograd keeps between forward and backward, for InfoNCE in plain PyTorch and here.
The matrix of all similarities grows with the square of the batch; tile by tile, only the embeddings
and a few vectors are kept.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import itrloss


def plain(images, texts):
    logits = F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T / 0.07
    target = torch.arange(len(logits))
    return F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)


def kept(loss, n):  # MiB
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss(torch.randn(n, 128, requires_grad=True), torch.randn(n, 128, requires_grad=True))
    return sum(storages.values()) / 2**20


sizes = [256, 512, 1024, 2048, 4096]
losses = {"plain PyTorch": plain, 'engine="tiled"': itrloss.InfoNCELoss(engine="tiled")}
for name, loss in losses.items():
    memory = [kept(loss, n) for n in sizes]
    print(f"{name:15}", *(f"{x:7.1f}" for x in memory), "MiB")
    plt.loglog(sizes, memory, "o-", label=name)
plt.xticks(sizes, sizes, minor=False)
plt.minorticks_off()
plt.gca().set(xlabel="pairs in the batch", ylabel="kept for backward, MiB")
plt.legend()
