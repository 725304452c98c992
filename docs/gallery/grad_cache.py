"""A large batch by chunks

Gradient caching encodes a batch chunk by chunk, twice, and has the gradients of the whole batch.
The picture shows the most that autograd keeps for the encoders at one time; the last point is the
batch in one piece.
"""

import matplotlib.pyplot as plt
import torch

import itrloss

torch.manual_seed(0)
Linear, Sequential = torch.nn.Linear, torch.nn.Sequential
towers = [Sequential(Linear(64, 512), torch.nn.ReLU(), Linear(512, 32)) for _ in range(2)]
parameters = [p for tower in towers for p in tower.parameters()]
inputs, criterion = torch.randn(2, 1024, 64), itrloss.InfoNCELoss()
kept = {"now": 0, "most": 0}


def count(module, args, output):  # bytes of the hidden layer, as long as its graph lives
    if output.requires_grad:
        size = output.nbytes
        kept["now"] += size
        kept["most"] = max(kept["most"], kept["now"])
        output.register_hook(lambda _: kept.update(now=kept["now"] - size))


for tower in towers:
    tower[1].register_forward_hook(count)
chunks, memory, gradients = [32, 64, 128, 256, 512, 1024], [], []
for chunk in chunks:
    kept.update(now=0, most=0)
    for p in parameters:
        p.grad = None
    itrloss.grad_cache_step(criterion, towers, tuple(inputs), chunk)
    gradients.append(torch.cat([p.grad.flatten() for p in parameters]))
    memory.append(kept["most"] / 2**20)
worst = max((g - gradients[-1]).abs().max() / gradients[-1].abs().max() for g in gradients)
print(f"gradients differ by {worst:.0e} of the largest at most")
plt.loglog(chunks, memory, "o-")
plt.xticks(chunks, chunks)
plt.minorticks_off()
plt.gca().set(xlabel="rows in a chunk", ylabel="hidden layers kept, MiB")
