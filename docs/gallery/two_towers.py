"""Two towers, trained with InfoNCE

Images and texts are noisy views of the same twelve numbers. Two linear towers learn to recover
these from the pairs of images and texts alone. Watch the recall of unseen pairs rise as the loss
falls.
"""

import matplotlib.pyplot as plt
import torch

import itrloss

torch.manual_seed(0)
to_pixels, to_words = torch.randn(12, 100), torch.randn(12, 60)


def draw(n):  # n images (n, 100) and their texts (n, 60)
    meaning = torch.randn(n, 12)
    images = meaning @ to_pixels + 4 * torch.randn(n, 100)
    texts = meaning @ to_words + 4 * torch.randn(n, 60)
    return images, texts


test_images, test_texts = draw(500)
image_tower, text_tower = torch.nn.Linear(100, 32), torch.nn.Linear(60, 32)
optimizer = torch.optim.Adam([*image_tower.parameters(), *text_tower.parameters()], lr=2e-3)
criterion = itrloss.InfoNCELoss()

losses, recalls = [], []
for step in range(1, 301):
    images, texts = draw(128)
    loss = criterion(image_tower(images), text_tower(texts))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        with torch.no_grad():
            sim = itrloss.Similarity(image_tower(test_images), text_tower(test_texts))
        recalls.append((step, itrloss.metrics.retrieval_metrics(sim)["i2t_r1"]))

for step, recall in (recalls[0], recalls[-1]):
    print(f"after {step:3} steps: R@1 {recall:.1f}")
_, (left, right) = plt.subplots(1, 2)
left.plot(losses)
left.set(xlabel="step", ylabel="InfoNCE")
right.plot(*zip(*recalls, strict=True), "o-")
right.set(xlabel="step", ylabel="R@1 of 500 unseen images, %")
