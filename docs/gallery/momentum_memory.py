"""A small batch with a momentum memory

Batches of eight pairs have seven negatives per anchor. A memory of 1024 keys, from slowly moving
copies of the towers, adds many more: M-DCL in addition to DCL, as in CODER, or InfoNCE over both,
as in MoCo. This is a toy with one seed. InfoNCE without a memory has as much as DCL at τ = 0.5, and
far less at 0.1: the temperature matters more than M-DCL. :doc:`results` has real data.
"""

import matplotlib.pyplot as plt
import torch

import itrloss

to_pixels, to_words = torch.randn(2, 24, 80, generator=torch.Generator().manual_seed(0))


def draw(n):
    meaning = torch.randn(n, 24)
    return meaning @ to_pixels + 4 * torch.randn(n, 80), meaning @ to_words + 4 * torch.randn(n, 80)


def encode(towers, pairs):
    return [tower(x) for tower, x in zip(towers, pairs, strict=True)]


for name in ("DCL", "DCL and M-DCL", "MemoryInfoNCE"):
    torch.manual_seed(0)
    unseen, towers = draw(400), [torch.nn.Linear(80, 32), torch.nn.Linear(80, 32)]
    key_towers = [itrloss.MomentumEncoder(tower, momentum=0.98) for tower in towers]
    memory, recalls = itrloss.CoupledMemory(size=1024, dim=32), []
    dcl = itrloss.DiversityContrastiveLoss(positive_weight=1)
    mdcl = itrloss.MemoryDiversityContrastiveLoss(positive_weight=1)
    infonce = itrloss.MemoryInfoNCELoss(0.1)
    optimizer = torch.optim.Adam([p for tower in towers for p in tower.parameters()], lr=1e-3)
    for step in range(1, 201):
        batch = draw(8)
        for key_tower, tower in zip(key_towers, towers, strict=True):
            key_tower.update(tower)
        embeddings, keys = encode(towers, batch), encode(key_towers, batch)
        if name == "MemoryInfoNCE":
            loss = infonce(*embeddings, *keys, memory)
        elif name == "DCL":
            loss = dcl(*embeddings)
        else:
            loss = dcl(*embeddings) + mdcl(*embeddings, *keys, memory)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.enqueue(*keys)
        if step % 20 == 0:
            sim = itrloss.Similarity(*encode(towers, unseen)).detach()
            recalls.append((step, itrloss.metrics.retrieval_metrics(sim)["rsum"]))
    print(f"{name:13} RSUM {recalls[-1][1]:.1f}")
    plt.plot(*zip(*recalls, strict=True), "o-", label=name)
plt.gca().set(xlabel="step of eight pairs", ylabel="RSUM of 400 unseen pairs")
plt.legend()
