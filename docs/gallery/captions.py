"""Five captions per image

Equal ids match. With ids the five captions of an image are all pulled towards it; with a diagonal
of 40 copied images and 40 captions, as in much public code, an image's other four captions are
pushed away.
"""

import matplotlib.pyplot as plt
import torch

import itrloss

torch.manual_seed(0)
images = torch.randn(8, 32)
texts = images.repeat_interleave(5, 0) + 1.5 * torch.randn(40, 32)
ids = {"image_ids": torch.arange(8), "text_ids": torch.arange(8).repeat_interleave(5)}
scores = itrloss.Similarity(images, texts, *ids.values()).scores()
criterion = itrloss.InfoNCELoss(temperature=0.1)

with_ids = scores.clone().requires_grad_()
criterion(scores=with_ids, **ids).backward()

copied = scores.repeat_interleave(5, 0).requires_grad_()
criterion(scores=copied).backward()  # without ids row i matches column i alone
summed = copied.grad.view(8, 5, 40).sum(1)

gradients = {"with ids": with_ids.grad, "copies and a diagonal": summed}
figure, axes = plt.subplots(2, 1, sharex=True, figsize=(6.4, 4.2))
for ax, (title, gradient) in zip(axes, gradients.items(), strict=True):
    top = gradient.abs().max()
    drawn = ax.imshow(gradient, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
    ax.set(title=title, ylabel="image")
    figure.colorbar(drawn, ax=ax, label="∂L / ∂S")
    own = gradient[ids["text_ids"], torch.arange(40)]
    print(f"{title:22} {(own > 0).sum()} of 40 captions are pushed from their own image")
axes[1].set(xlabel="caption")
