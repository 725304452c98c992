"""Tutorial: train two towers, and re-rank

This tutorial goes from images and captions to the table of a paper: recalls in both directions,
before and after re-ranking. A tower is any module that returns an embedding. The towers here are
small and start from random weights. A pretrained model, such as CLIP, is fine-tuned with the same
loop: only the towers and their inputs change. The script is ``docs/tutorial.py``; it ran when this
page was built, in a few seconds on one core.
"""

# %%
# The data
# --------
#
# The repository draws scenes of coloured shapes, each with five captions. An image is 12 regions
# with 208 features each, as an object detector would give, and a caption becomes a row of word
# numbers, with 0 as padding. The first thousand scenes are for training, the rest for the test.

import re
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn

import itrloss
from examples.retrieval.scenes import write_scenes
from itrloss.cli import tables
from itrloss.cli.comparison import compare_rerankers

sizes = {"train": 1000, "dev": 1, "test": 200}
folder = Path(tempfile.mkdtemp())
write_scenes(folder, sizes)


def words_of(caption):
    return re.findall("[a-z]+", caption.lower())


def load(split):
    images = torch.from_numpy(np.load(folder / f"{split}_ims.npy")).float()
    return images, (folder / f"{split}_caps.txt").read_text().splitlines()


images, captions = load("train")
test_images, test_captions = load("test")
vocabulary = sorted({word for caption in captions for word in words_of(caption)})
number = {word: i for i, word in enumerate(vocabulary, 1)}


def numbered(captions, length=20):
    rows = torch.zeros(len(captions), length, dtype=torch.int64)
    for row, caption in zip(rows, captions, strict=True):
        found = [number.get(word, 0) for word in words_of(caption)][:length]
        row[: len(found)] = torch.tensor(found)
    return rows


texts, test_texts = numbered(captions), numbered(test_captions)
print(captions[0])
print(images.shape, texts.shape)

# %%
# The towers
# ----------
#
# The image tower embeds each region, and takes the mean and the maximum over regions. The text
# tower is a convolution of three words, of which it takes the mean and the maximum.

DIM = 128


class ImageTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.region = nn.Sequential(nn.Dropout(0.2), nn.Linear(208, DIM), nn.ReLU())
        self.head = nn.Linear(2 * DIM, DIM)

    def forward(self, regions):
        hidden = self.region(regions)
        return self.head(torch.cat([hidden.mean(1), hidden.amax(1)], 1))


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(len(number) + 1, DIM, padding_idx=0)
        self.neighbours = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.head = nn.Linear(2 * DIM, DIM)

    def forward(self, words):
        hidden = self.neighbours(self.words(words).transpose(1, 2)).relu()
        hidden = hidden * (words > 0)[:, None]
        return self.head(torch.cat([hidden.mean(2), hidden.amax(2)], 1))


torch.manual_seed(0)
image_tower = ImageTower()
text_tower = TextTower()

# %%
# The loss, and training
# ----------------------
#
# A batch has images with two of their captions each. The images' numbers are the ids: a caption
# matches its image, wherever it stands, and neither caption is a negative of the other's image. The
# temperature is learnt, so the loss has a parameter of its own, which goes into the optimiser.

criterion = itrloss.InfoNCELoss(learnable=True)
parameters = [
    *image_tower.parameters(),
    *text_tower.parameters(),
    *criterion.parameters(),
]
EPOCHS, BATCH, CAPTIONS = 12, 100, 2
steps = EPOCHS * len(images) // BATCH
optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)

for epoch in range(EPOCHS):
    for ids in torch.randperm(len(images)).split(BATCH):
        drawn = torch.stack([torch.randperm(5)[:CAPTIONS] for _ in ids])
        rows = (5 * ids[:, None] + drawn).flatten()  # image i has the captions 5i to 5i + 4
        loss = criterion(
            image_tower(images[ids]),
            text_tower(texts[rows]),
            image_ids=ids,
            text_ids=ids.repeat_interleave(CAPTIONS),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    if epoch % 3 == 2:
        print(f"epoch {epoch + 1:2}: loss {loss:.2f}, temperature {criterion.temperature:.3f}")

# %%
# The table
# ---------
#
# The test set is embedded once. ``Similarity`` takes the embeddings and the ids, as the loss does,
# and the table compares re-rankers on it, with intervals of the change and p-values.

with torch.no_grad():
    test_embeddings = image_tower.eval()(test_images), text_tower.eval()(test_texts)
test_ids = torch.arange(len(test_images))
sim = itrloss.Similarity(*test_embeddings, test_ids, test_ids.repeat_interleave(5))
result = compare_rerankers(sim, methods=("fast", "csls", "dual-softmax"))
print(tables.text(result.table()))
