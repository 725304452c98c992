"""The models: two encoders into one space, and what CODER and DVSE add to them.

Each is called with a batch and returns what its objective takes, and answers three questions in evaluation: the
embeddings of images, those of texts, and the similarity of the two.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import itrloss
from itrloss.functional import set_similarity

from .config import Config
from .encoders import ImageEncoder, SubEmbeddings, TextEncoder


class VSE(nn.Module):
    """A visual-semantic embedding: two encoders into one space."""

    def __init__(self, image: ImageEncoder, text: TextEncoder) -> None:
        super().__init__()
        self.image = image
        self.text = text

    def forward(self, regions: Tensor, words: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """(B, R, d) regions, (M, L) word ids, (M,) lengths -> image embeddings (B, dim), text embeddings (M, dim)."""
        return self.image(regions), self.text(words, lengths)

    def embed_images(self, regions: Tensor) -> Tensor:
        """(B, R, d) -> what images are retrieved by."""
        return self.image(regions)

    def embed_texts(self, words: Tensor, lengths: Tensor) -> Tensor:
        """(M, L), (M,) -> what texts are retrieved by."""
        return self.text(words, lengths)

    def similarity(self, images: Tensor, texts: Tensor) -> Tensor:
        """(N, M) of what the two methods above return."""
        ids = torch.arange(len(images)), torch.arange(len(texts))  # nobody asks which match
        return itrloss.Similarity(images, texts, *ids).scores()


class CODER(VSE):
    """An instance embedding and a concept embedding of everything (Wang et al., ECCV 2022).

    The concept branch asks a set of concept vectors, learnt and shared by images and texts: an instance embedding
    makes the query, and the concepts, weighted by their cosine with it, make the concept embedding. Retrieval goes by
    0.9 of the instances' cosine and 0.1 of the concepts', which is the cosine of the two embeddings in one vector.
    """

    share = 0.9  # of the instance similarity
    smoothness = 10.0  # of the attention to concepts

    def __init__(self, image: ImageEncoder, text: TextEncoder, dim: int, concepts: int) -> None:
        super().__init__(image, text)
        self.concepts = nn.Parameter(torch.randn(concepts, dim) / dim**0.5)
        self.queries = nn.ModuleDict({"image": nn.Linear(dim, dim), "text": nn.Linear(dim, dim)})

    def forward(self, regions: Tensor, words: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """Embeddings (B, dim) of images and of texts, and their concept embeddings (B, dim)."""
        images, texts = super().forward(regions, words, lengths)
        return images, texts, self.ask("image", images), self.ask("text", texts)

    def ask(self, side: str, instances: Tensor) -> Tensor:
        query = F.normalize(self.queries[side](instances), dim=1)
        weights = (self.smoothness * query @ F.normalize(self.concepts, dim=1).T).softmax(1)
        return weights @ self.concepts

    def embed_images(self, regions: Tensor) -> Tensor:
        return self._both("image", self.image(regions))

    def embed_texts(self, words: Tensor, lengths: Tensor) -> Tensor:
        return self._both("text", self.text(words, lengths))

    def _both(self, side: str, instances: Tensor) -> Tensor:
        parts = F.normalize(instances, dim=1), F.normalize(self.ask(side, instances), dim=1)
        return torch.cat([self.share**0.5 * parts[0], (1 - self.share) ** 0.5 * parts[1]], 1)


class DVSE(VSE):
    """Several embeddings of an image, one of a text (Wei et al., 2023); their similarity is that of the best head."""

    def __init__(self, image: ImageEncoder, text: TextEncoder, region_dim: int, heads: int) -> None:
        super().__init__(image, text)
        self.gate = itrloss.DynamicGate(region_dim, heads)

    def forward(self, regions: Tensor, words: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """Sets (B, K, dim) of images, texts (M, dim), residuals (B, K, dim), and the gate (B, K)."""
        sets, residuals = self.image(regions)
        return sets, self.text(words, lengths), residuals, self.gate(regions)

    def embed_images(self, regions: Tensor) -> Tensor:
        return self.image(regions)[0]

    def similarity(self, images: Tensor, texts: Tensor) -> Tensor:
        return set_similarity(images, texts, "max")


def build_model(config: Config, region_dim: int, vocabulary_size: int) -> VSE:
    """The model that goes with the settings' loss."""
    sets = config.loss == "dvse"
    image = ImageEncoder(
        region_dim,
        config.dim,
        config.feature_dropout,
        config.shared_dropout,
        SubEmbeddings(config.dim, config.heads) if sets else None,
    )
    text = TextEncoder(
        vocabulary_size,
        config.word_dim,
        config.dim,
        config.word_dropout,
        config.embedding_dropout,
        config.bag_of_words,
        config.shared_dropout,
        SubEmbeddings(config.dim, 1) if sets else None,
    )
    if sets:
        return DVSE(image, text, region_dim, config.heads)
    return CODER(image, text, config.dim, config.concepts) if config.loss == "coder" else VSE(image, text)
