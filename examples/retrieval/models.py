"""The models: two encoders into one space, and the extensions of CODER and DVSE.

In training, a model is called with a batch and returns the inputs of its objective. For evaluation
it has three methods: the embeddings of images, those of texts, and the similarity of the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import itrloss
from itrloss.functional import set_similarity

from .backbones import Backbone, BertEncoder, WordPieces
from .config import Config
from .encoders import ImageEncoder, TextEncoder, TextPooling


class VSE(nn.Module):
    """A visual-semantic embedding: two encoders into one space."""

    outputs = 2  # how many tensors it returns in training
    of_texts: tuple[int, ...] = (1,)  # which of them have one row per text

    # the settings are for the extensions below
    def __init__(self, config: Config, image: ImageEncoder, text: TextPooling) -> None:
        super().__init__()
        self.image = image
        self.text = text

    def forward(
        self, regions: Tensor, words: Tensor, lengths: Tensor, wholes: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Image embeddings (B, dim) and text embeddings (M, dim).

        Args:
            regions: (B, R, d) features, or raw images (B, 3, H, W).
            words, lengths: (M, L) ids of words or of word pieces, padded, and (M,) numbers of
                words.
            wholes: (B, d') features of the whole pictures, for encoders that use them.
        """
        return self.image(regions, wholes), self.text(words, lengths)

    def embed_images(self, regions: Tensor, wholes: Tensor | None = None) -> Tensor:
        """Embed images for retrieval, from (B, R, d) regions and (B, d') global features."""
        return self.image(regions, wholes)

    def embed_texts(self, words: Tensor, lengths: Tensor) -> Tensor:
        """Embed texts for retrieval, from (M, L) ids and (M,) lengths."""
        return self.text(words, lengths)

    def similarity(self, images: Tensor, texts: Tensor) -> Tensor:
        """Similarities (N, M) of images and texts, as embedded above; of a set of embeddings, that
        of the closest one.
        """
        if images.ndim == 3:
            return set_similarity(images, texts, "max")
        return F.normalize(images, dim=1) @ F.normalize(texts, dim=1).T

    def as_vectors(self, embeddings: Tensor) -> Tensor:
        """Unit vectors (N, d) of embeddings (N, d), whose cosine is the similarity."""
        return F.normalize(embeddings, dim=1)


class ConceptBranch(nn.Module):
    """Attention of a query to concepts: their sum, weighted by their similarity to the query (CODER
    Eq. 2).

    The concepts are learnable word vectors ``X``, mixed by one graph convolution: ``Y = rho(A X
    W)`` with the normalised graph A of :mod:`examples.retrieval.concepts` (supplement, Eq. 5). The
    paper does not specify rho. It is tanh here: a leaky ReLU puts all concepts into one orthant,
    where queries hardly distinguish them, and RSUM on the scenes falls by some 20 points.

    Queries and concepts are compared by their cosine, and ``Y`` is at unit length; ``as_printed``,
    by their inner product.
    """

    smoothness = 10.0  # inverse temperature of the attention to concepts

    graph: Tensor

    def __init__(self, dim: int, concepts: int, word_dim: int, as_printed: bool = False) -> None:
        super().__init__()
        self.as_printed = as_printed
        self.vectors = nn.Parameter(torch.randn(concepts, word_dim) / word_dim**0.5)
        self.register_buffer("graph", torch.eye(concepts))
        self.convolution = nn.Linear(word_dim, dim, bias=False)
        self.queries = nn.ModuleDict(
            {side: nn.Linear(dim, dim, bias=False) for side in ("image", "text")}
        )

    def concepts(self) -> Tensor:
        """Concepts ``Y``, (g, dim)."""
        return torch.tanh(self.graph @ self.convolution(self.vectors))

    def forward(self, side: str, queries: Tensor) -> Tensor:
        """Concept embeddings (B, dim) of the queries (B, dim) of ``side``, "image" or "text"."""
        concepts = self.concepts()
        queries = self.queries[side](queries)
        if not self.as_printed:
            concepts = F.normalize(concepts, dim=1)
            queries = F.normalize(queries, dim=1)
        return (self.smoothness * queries @ concepts.T).softmax(1) @ concepts


class CODER(VSE):
    """An instance embedding and a concept embedding of every image and text (Wang et al., ECCV
    2022).

    The query of an image is its instance embedding, as the two share their aggregator; that of a
    text is pooled from its words a second time. The similarity in retrieval is 0.9 of the
    instances' cosine plus 0.1 of the concepts' (``concept_share``), computed as one cosine of
    concatenated vectors.
    """

    outputs, of_texts = 4, (1, 3)

    def __init__(self, config: Config, image: ImageEncoder, text: TextPooling) -> None:
        super().__init__(config, image, text)
        printed = "concepts" in config.as_printed
        self.branch = ConceptBranch(config.dim, config.concepts, config.word_dim, printed)
        self.share = config.concept_share

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Embeddings (B, dim) of images and of texts, and their concept embeddings (B, dim)."""
        images, (texts, queries) = super().forward(*inputs)
        return images, texts, self.branch("image", images), self.branch("text", queries)

    def embed_images(self, regions: Tensor, wholes: Tensor | None = None) -> Tensor:
        images = self.image(regions, wholes)
        return self._both(images, self.branch("image", images))

    def embed_texts(self, words: Tensor, lengths: Tensor) -> Tensor:
        texts, queries = self.text(words, lengths)
        return self._both(texts, self.branch("text", queries))

    def _both(self, instances: Tensor, concepts: Tensor) -> Tensor:
        of_instances = (1 - self.share) ** 0.5 * F.normalize(instances, dim=1)
        of_concepts = self.share**0.5 * F.normalize(concepts, dim=1)
        return torch.cat([of_instances, of_concepts], 1)


class DVSE(VSE):
    """Several embeddings of an image, one of a text (Wei et al., 2023), and a gate on the
    image's.
    """

    outputs = 4

    def __init__(self, config: Config, image: ImageEncoder, text: TextPooling) -> None:
        super().__init__(config, image, text)
        self.gate = itrloss.DynamicGate(image.linear.in_features, config.heads)

    def forward(
        self, regions: Tensor, words: Tensor, lengths: Tensor, wholes: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Sets (B, K, dim) of images, texts (M, dim), residuals (B, K, dim), and the gate (B,
        K).
        """
        elements, wholes = self.image.elements(regions, wholes)
        sets, residuals = self.image.embed(elements, wholes)
        return sets, self.embed_texts(words, lengths), residuals, self.gate(elements)

    def embed_images(self, regions: Tensor, wholes: Tensor | None = None) -> Tensor:
        sets, _ = self.image(regions, wholes)
        return sets

    def embed_texts(self, words: Tensor, lengths: Tensor) -> Tensor:
        sets, _ = self.text(words, lengths)  # of one embedding
        return sets.squeeze(1)


class Views(VSE):
    """Models that each see a different view of an image, with separate text encoders and one loss
    each.

    The similarity in retrieval is the mean of theirs. A single model of all features learns to
    match the training pictures by the features that distinguish them most easily; with two models,
    each has to use its own features.
    """

    def __init__(self, models: Sequence[VSE]) -> None:
        nn.Module.__init__(self)
        self.models = nn.ModuleList(models)
        self.outputs = 0
        self.of_texts = ()
        for model in models:
            self.of_texts += tuple(self.outputs + place for place in model.of_texts)
            self.outputs += model.outputs

    def __iter__(self) -> Iterator[VSE]:
        return iter(self.models)  # type: ignore[arg-type]

    def forward(self, *inputs: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        """Concatenate what the models return into one tuple."""
        return tuple(x for model in self for x in model(*inputs))

    def embed_images(self, regions: Tensor, wholes: Tensor | None = None) -> Tensor:
        embeddings = [model.embed_images(regions, wholes) for model in self]
        sizes = [x.shape[1] for x in embeddings if x.ndim == 3]
        if sizes:  # repeat single embeddings to the size of the sets
            embeddings = [
                x if x.ndim == 3 else x[:, None].expand(-1, sizes[0], -1) for x in embeddings
            ]
        return torch.cat(embeddings, -1)

    def embed_texts(self, words: Tensor, lengths: Tensor) -> Tensor:
        return torch.cat([model.embed_texts(words, lengths) for model in self], -1)

    def as_vectors(self, embeddings: Tensor) -> Tensor:
        """Concatenate the models' unit vectors: the cosine of the whole is the mean of the models'
        cosines.
        """
        parts = embeddings.chunk(len(self.models), -1)
        vectors = [model.as_vectors(part) for model, part in zip(self, parts, strict=True)]
        return F.normalize(torch.cat(vectors, 1), dim=1)

    def similarity(self, images: Tensor, texts: Tensor) -> Tensor:
        images_of = images.chunk(len(self.models), -1)
        texts_of = texts.chunk(len(self.models), -1)
        scores = [
            model.similarity(*pair) for model, *pair in zip(self, images_of, texts_of, strict=True)
        ]
        return torch.stack(scores).mean(0)


def views(model: VSE) -> list[VSE]:
    """Return the models of all views; a model with one view is the only element."""
    return list(model) if isinstance(model, Views) else [model]


def build_model(
    config: Config,
    region_dim: int,
    words: int | WordPieces,
    whole_dim: int = 0,
    network: Mapping[str, Any] | None = None,
) -> VSE:
    """Build the model of the settings.

    Args:
        config: the settings.
        region_dim: dimension of the region features; a backbone replaces it by its own.
        words: the size of the vocabulary, or a BERT's word pieces.
        whole_dim: dimension of the pictures' global features, 0 without any.
        network: the settings of the backbone, for raw images.
    """
    models = []
    for view in config.views.split("+"):
        backbone = None
        dim = region_dim
        if network is not None and view == "regions":
            backbone = Backbone(network)
            dim = backbone.dim
        image = ImageEncoder(config, dim, whole_dim, view, backbone)
        models.append(build_view(config, image, words))
    return Views(models) if len(models) > 1 else models[0]


def build_view(config: Config, image: ImageEncoder, words: int | WordPieces) -> VSE:
    """Build the model of one view. A global feature is no set, so it has no heads."""
    has_sets = image.heads is not None
    text: TextPooling
    if isinstance(words, WordPieces):
        text = BertEncoder(config, words, has_sets)
    else:
        text = TextEncoder(config, words, has_sets)
    if has_sets:
        return DVSE(config, image, text)
    if config.loss == "coder":
        return CODER(config, image, text)
    return VSE(config, image, text)
