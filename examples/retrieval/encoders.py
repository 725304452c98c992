"""The image and text encoders that all models share, both with GPO pooling, and USER's enhancements
of regions.

The embeddings are not normalised: the losses and metrics of itrloss compute the cosine themselves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from itrloss.distributed import gather, world_size

from .config import Config
from .data import compressed

MASKED = -10000.0
GROUP = 64  # captions that the text encoder processes at a time


def sinusoid(length: int, dim: int) -> Tensor:
    """Sinusoidal codes of the positions 0 .. length-1, float32 of shape (length, dim); dim must be
    even.
    """
    position = torch.arange(length, dtype=torch.float32)
    frequency = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angle = position[:, None] * frequency
    return rearrange([angle.sin(), angle.cos()], "two length half -> length (half two)")


def averaged_bigru(gru: nn.GRU, x: Tensor, lengths: Tensor) -> Tensor:
    """Run a bidirectional GRU over padded sequences and average its two directions.

    Packing makes the backward direction start at the last word, not in the padding, so padding has
    no effect.

    Args:
        x: (B, L, d) padded sequences.
        lengths: (B,) int64 **on the CPU**, each from 1 to L.

    Returns:
        (B, L, hidden), zero on the padding.
    """
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    hidden, _ = pad_packed_sequence(gru(packed)[0], batch_first=True, total_length=x.shape[1])
    forward, backward = hidden.chunk(2, dim=-1)
    return (forward + backward) / 2


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation over the batches of all processes; PyTorch's SyncBatchNorm runs on GPUs
    only.
    """

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or world_size() == 1:
            return super().forward(input)
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.momentum is not None
        own = torch.stack([input.float().sum(0), input.float().square().sum(0)])
        first, second = gather(own[None]).sum(0)  # differentiable
        count = len(input) * world_size()
        mean = first / count
        variance = (second / count - mean.square()).clamp_min(0.0)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / max(1, count - 1)), self.momentum)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        return (input - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


class SetDropout(nn.Module):
    """Dropout of the features of a set (B, L, d), independently per element or, if ``shared``, for
    all elements.

    Features that are dropped in some regions remain in the others, and pooling averages the noise
    away. Shared dropout removes a feature from the whole picture, which a few thousand training
    pictures need as regularisation.
    """

    def __init__(self, p: float, shared: bool) -> None:
        super().__init__()
        self.p = p
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        if not self.shared:
            return F.dropout(x, self.p, self.training)
        return x * F.dropout(torch.ones_like(x[:, :1]), self.p, self.training)


class GPO(nn.Module):
    """Generalized Pooling Operator (Chen et al., CVPR 2021): learnt weights for the sorted values
    of a set.

    Every dimension of the features is sorted in descending order over the set, and the k-th largest
    value gets the weight theta_k: (1, 0, 0, ...) is max pooling, (1/n, ..., 1/n) is mean pooling,
    and training finds weights in between. A small bidirectional GRU generates them from codes of
    the positions, for sets of any size.

    One linear layer makes weights of its states, as in the public code; ``as_printed``, a two-layer
    perceptron.
    """

    def __init__(
        self,
        position_dim: int = 32,
        hidden_dim: int = 32,
        temperature: float = 0.1,
        as_printed: bool = False,
    ) -> None:
        super().__init__()
        self.position_dim = position_dim
        self.temperature = temperature
        self.gru = nn.GRU(position_dim, hidden_dim, batch_first=True, bidirectional=True)
        self.score: nn.Module = nn.Linear(hidden_dim, 1, bias=False)
        if as_printed:
            hidden = nn.Linear(hidden_dim, hidden_dim)
            self.score = nn.Sequential(hidden, nn.ReLU(), nn.Linear(hidden_dim, 1))

    def weights(self, lengths: Tensor, size: int) -> Tensor:
        """The pooling weights of sets with these lengths, padded to `size`: (B,) int64 on the CPU
        -> (B, size).

        They depend on positions only, not on features: sets of equal length have equal weights. The
        GRU therefore runs once per *distinct* length: one for images, some twenty for captions,
        independent of the batch size.
        """
        distinct, which = torch.unique(lengths, return_inverse=True)
        device = next(self.parameters()).device
        codes = sinusoid(size, self.position_dim).to(device).expand(len(distinct), -1, -1)
        # (distinct, size)
        scores = self.score(averaged_bigru(self.gru, codes, distinct)).squeeze(-1)
        padding = torch.arange(size) >= distinct[:, None]
        scores = scores.masked_fill(padding.to(device), MASKED)
        return torch.softmax(scores / self.temperature, dim=1)[which.to(device)]

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Pool (B, L, d) features, of which the first lengths[b] are valid ((B,) int64 on the CPU),
        to (B, d).
        """
        size = features.shape[1]
        padding = (torch.arange(size) >= lengths[:, None]).to(features.device)
        # Masked positions sort last, where their weight is exactly 0. Sorting along contiguous
        # memory takes two thirds of the time on a CPU.
        masked = features.masked_fill(padding[:, :, None], MASKED)
        columns = rearrange(masked, "b l d -> b d l").contiguous()
        ranked = columns.sort(dim=2, descending=True).values
        # Despite their weight of 0, they enter the gradient of the weights, where MASKED would
        # overflow in float16.
        ranked = ranked.masked_fill(padding[:, None], 0.0)
        return torch.einsum("bdl,bl->bd", ranked, self.weights(lengths, size))


class SubEmbeddings(nn.Module):
    """Several embeddings of a set, one per attention head (PVSE, Song & Soleymani, CVPR 2019;
    DVSE).

    Each head attends to the elements of the set, and its output is added to the pooled embedding:
    ``pooled + tanh(linear(attention @ elements))``, where the second term is small at first. The
    papers have a sigmoid in place of tanh, whose values are largely the same for all heads, and a
    layer normalisation of the sum (``as_printed``).
    """

    def __init__(self, dim: int, heads: int, as_printed: bool = False) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.Linear(dim, dim // 2, bias=False), nn.Tanh(), nn.Linear(dim // 2, heads, bias=False)
        )
        self.linear = nn.Linear(dim, dim)
        self.activation: nn.Module = nn.Sigmoid() if as_printed else nn.Tanh()
        self.norm: nn.Module = nn.LayerNorm(dim) if as_printed else nn.Identity()
        nn.init.xavier_uniform_(self.linear.weight, gain=1.0 if as_printed else 0.1)
        nn.init.zeros_(self.linear.bias)

    def forward(self, elements: Tensor, pooled: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Sets and residuals, (B, heads, d), of elements (B, L, d) with lengths[b] valid ones, and
        pooled (B, d).
        """
        padding = (torch.arange(elements.shape[1]) >= lengths[:, None]).to(elements.device)
        weights = self.attention(elements).masked_fill(padding[:, :, None], MASKED).softmax(1)
        residuals = self.activation(self.linear(torch.einsum("blk,bld->bkd", weights, elements)))
        return self.norm(pooled[:, None] + residuals), residuals


def new_pool(config: Config) -> GPO:
    return GPO(as_printed="pooling" in config.as_printed)


def new_heads(config: Config, number: int) -> SubEmbeddings:
    return SubEmbeddings(config.dim, number, "heads" in config.as_printed)


class SelfGuidedEnhancement(nn.Module):
    """Self-guided enhancement of USER (Zhang et al., 2023, Eq. 1-7): regions get global context.

    The mean of the regions is the query of an attention over them. The weighted sum, normalised, is
    the global feature, which is added to each region in proportion to their similarity.
    """

    def __init__(self, config: Config, dim: int, whole_dim: int) -> None:
        super().__init__()
        self.as_printed = "enhancement" in config.as_printed
        self.dropout = nn.Dropout(config.enhancement_dropout)
        # kappa and nu; batch normalisation makes biases redundant.
        self.local = nn.Linear(dim, dim, bias=False)
        self.whole = nn.Linear(dim, dim, bias=False)
        self.local_norm = BatchNorm(dim)
        self.whole_norm = BatchNorm(dim)
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, regions: Tensor, wholes: Tensor | None = None) -> Tensor:
        """(B, R, d) -> (B, R, d)."""
        local = self.local_norm(self.local(regions).flatten(0, 1)).view_as(regions)
        whole = self.whole_norm(self.whole(regions.mean(1)))
        local = self.dropout(local.tanh())
        whole = self.dropout(whole.tanh())
        weights = self.score(local * whole[:, None]).softmax(1)  # (B, R, 1)
        whole = F.normalize((weights * regions).sum(1), dim=1)
        return add_global(regions, whole, self.as_printed)


class GuidedEnhancement(nn.Module):
    """CGE of USER (Eq. 8, 6, 7): the same with a given global feature of the picture, CLIP's in the
    paper.
    """

    def __init__(self, config: Config, dim: int, whole_dim: int) -> None:
        super().__init__()
        self.as_printed = "enhancement" in config.as_printed
        self.mlp = nn.Sequential(
            nn.LayerNorm(whole_dim),
            BatchNorm(whole_dim),
            nn.Linear(whole_dim, dim),
            nn.GELU(),
            BatchNorm(dim),
            nn.Linear(dim, dim),
        )

    def forward(self, regions: Tensor, wholes: Tensor | None) -> Tensor:
        """(B, R, d), (B, d') -> (B, R, d)."""
        assert wholes is not None
        return add_global(regions, self.mlp(wholes), self.as_printed)


def add_global(regions: Tensor, whole: Tensor, as_printed: bool = False) -> Tensor:
    """Add the global feature: ``x_i = v_i + a_i v_glo``, with ``a = softmax_i(v_glo . v_i)`` at
    unit length, or as printed without (USER).
    """
    attention = torch.einsum("brd,bd->br", regions, whole).softmax(1)
    if not as_printed:
        attention = F.normalize(attention, dim=1)
    return regions + attention[:, :, None] * whole[:, None]


ENHANCEMENTS = {"sge": SelfGuidedEnhancement, "cge": GuidedEnhancement}


class ImageEncoder(nn.Module):
    """Region features (B, R, region_dim) -> image embeddings (B, dim): standardise, enhance,
    project, pool.

    The view "whole" has the global feature of the picture (B, whole_dim) as its input instead,
    without pooling. With ``loss=dvse``, the outputs for regions are those of a
    :class:`SubEmbeddings`. With a ``backbone``, the inputs are raw images (B, 3, H, W), from which
    the backbone computes the regions.

    The projection is VSE-infinity's: one linear layer plus a two-layer residual MLP with batch
    normalisation.
    """

    mean: Tensor
    std: Tensor
    whole_mean: Tensor
    whole_std: Tensor

    def __init__(
        self,
        config: Config,
        region_dim: int,
        whole_dim: int = 0,
        view: str = "regions",
        backbone: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.whole = view == "whole"
        has_sets = config.loss == "dvse" and not self.whole
        heads = new_heads(config, config.heads) if has_sets else None
        self.backbone = backbone
        self.register_buffer("mean", torch.zeros(region_dim))
        self.register_buffer("std", torch.ones(()))
        self.register_buffer("whole_mean", torch.zeros(whole_dim))
        self.register_buffer("whole_std", torch.ones(whole_dim))
        dropout = config.whole_dropout if self.whole else config.feature_dropout
        self.dropout = SetDropout(dropout, config.shared_dropout)
        self.enhancement: nn.Module | None = None
        if config.enhancement and not self.whole:
            enhance = ENHANCEMENTS[config.enhancement]
            self.enhancement = enhance(config, region_dim, whole_dim)
        input_dim = whole_dim if self.whole else region_dim
        hidden_dim = config.dim // 2
        self.linear = nn.Linear(input_dim, config.dim)
        self.mlp = nn.Sequential(
            nn.Linear(input_dim, hidden_dim, bias=False),  # batch normalisation has a bias
            BatchNorm(hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, config.dim),
        )
        self.pool = None if self.whole else new_pool(config)
        self.heads = heads

    def elements(self, images: Tensor, wholes: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Standardised regions, or the global feature as the only one, (B, R, d); and the global
        features (B, d').
        """
        if wholes is not None and (self.whole or isinstance(self.enhancement, GuidedEnhancement)):
            wholes = (compressed(wholes) - self.whole_mean) / self.whole_std
        if self.whole:
            assert wholes is not None
            return wholes[:, None], wholes
        regions = images if self.backbone is None else self.backbone(images)
        return (regions - self.mean) / self.std, wholes

    def forward(self, images: Tensor, wholes: Tensor | None = None) -> Any:
        return self.embed(*self.elements(images, wholes))

    def embed(self, x: Tensor, wholes: Tensor | None) -> Any:
        """Embed the results of :meth:`elements`."""
        x = self.dropout(x)
        if self.enhancement is not None:
            x = self.enhancement(x, wholes)
        flat = x.flatten(0, 1)
        projected = (self.linear(flat) + self.mlp(flat)).unflatten(0, x.shape[:2])
        if self.pool is None:
            return projected.squeeze(1)
        lengths = torch.full((len(x),), x.shape[1])
        pooled = self.pool(projected, lengths)
        if self.heads is None:
            return pooled
        return self.heads(projected, pooled, lengths)


class TextPooling(nn.Module):
    """What all text encoders make of the states of words.

    Without a set, this is the text embedding. With one, for DVSE, it is a :class:`SubEmbeddings`
    of a single head; with ``loss=coder``, the embedding and the query of the concept branch, which
    a second pooling makes of the same words.
    """

    pool: GPO
    heads: SubEmbeddings | None
    query_pool: GPO | None

    def pooled(
        self, states: Tensor, lengths: Tensor, bag: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The outputs for states (B, L, dim); (B, dim) ``bag`` is added to what is pooled."""
        text = self.pool(states, lengths)
        if bag is not None:
            text = text + bag
        if self.heads is not None:
            return self.heads(states, text, lengths)
        if self.query_pool is None:
            return (text,)
        query = self.query_pool(states, lengths)
        return text, query if bag is None else query + bag


class TextEncoder(TextPooling):
    """Padded word ids (B, L) -> text embeddings (B, dim): embedding, BiGRU, pooling, plus a linear
    bag of words.

    The bag of words is a residual path: one linear layer on the mean of the idf-weighted word
    embeddings. On data sets of a few thousand pictures, most of a caption's information is which
    words it has. The linear path learns that within an epoch or two, so that the recurrent path can
    learn the effect of word order. idf suppresses words such as "a" and "the" in the mean.
    """

    idf: Tensor

    def __init__(self, config: Config, vocabulary_size: int, has_set: bool = False) -> None:
        super().__init__()
        heads = new_heads(config, 1) if has_set else None
        self.register_buffer("idf", torch.ones(vocabulary_size))
        self.embedding = nn.Embedding(vocabulary_size, config.word_dim, padding_idx=0)
        # The initialisation of VSE++: from PyTorch's unit variance, Adam would need thousands of
        # steps to recover.
        nn.init.uniform_(self.embedding.weight[1:], -0.1, 0.1)
        self.word_dropout = config.word_dropout
        self.dropout = SetDropout(config.embedding_dropout, config.shared_dropout)
        self.gru = nn.GRU(config.word_dim, config.dim, batch_first=True, bidirectional=True)
        self.pool = new_pool(config)
        self.heads = heads
        self.bag = nn.Linear(config.word_dim, config.dim) if config.bag_of_words else None
        self.query_pool = new_pool(config) if config.loss == "coder" else None

    def forward(self, words: Tensor, lengths: Tensor) -> Any:
        x = self.dropout(self.embedding(words))
        # dropout of whole words
        kept = F.dropout(torch.ones_like(x[:, :, :1]), self.word_dropout, self.training)
        x = x * kept
        if self.bag is None:
            return self.recurrent(x, lengths, None)
        # Padding has zero embeddings, so the sum over the padded length is the sum over the words.
        mean = torch.einsum("bld,bl->bd", x, self.idf[words]) / lengths.to(x.device)[:, None]
        return self.recurrent(x, lengths, self.bag(mean))

    def recurrent(self, x: Tensor, lengths: Tensor, bag: Tensor | None) -> Any:
        """BiGRU and pooling, (B, L, word_dim) -> (B, dim), for groups of captions of about the same
        length. The embedding of the bag of words, (B, dim), is added to the pooled one.

        Captions are padded to the longest of their group only, not of the batch. Small groups also
        limit a buffer as large as all tokens, which the backward pass of a packed GRU on a CPU
        fills at every time step.
        """
        order = lengths.argsort(stable=True)
        parts = []
        for rows in order.split(GROUP):
            own = lengths[rows]
            rows = rows.to(x.device)
            hidden = averaged_bigru(self.gru, x[rows, : int(own[-1])], own)
            parts.append(self.pooled(hidden, own, None if bag is None else bag[rows]))
        back = order.argsort().to(x.device)
        outputs = [torch.cat(part)[back] for part in zip(*parts, strict=True)]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
