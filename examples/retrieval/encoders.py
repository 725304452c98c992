"""The two encoders that all models share: regions and words, each pooled by GPO; and USER's enhancements of regions.

The embeddings that come out are not normalised: the losses and the metrics of itrloss take the cosine themselves.
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

from .data import compressed

MASKED = -10000.0
GROUP = 64  # captions that the text encoder runs at a time


def sinusoid(length: int, dim: int) -> Tensor:
    """Sine and cosine codes of the positions 0 .. length-1, float32 of shape (length, dim); dim must be even."""
    position = torch.arange(length, dtype=torch.float32)
    frequency = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angle = position[:, None] * frequency
    return rearrange([angle.sin(), angle.cos()], "two length half -> length (half two)")


def averaged_bigru(gru: nn.GRU, x: Tensor, lengths: Tensor) -> Tensor:
    """Run a bidirectional GRU over padded sequences and average its two directions.

    Packing keeps the backward direction from starting in the padding, so padding changes nothing.

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
    """Batch normalisation over the batch of all processes; torch's synchronised one runs on GPUs only."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or world_size() == 1:
            return super().forward(x)
        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        own = torch.stack([x.float().sum(0), x.float().square().sum(0)])
        first, second = gather(own[None]).sum(0)  # with a gradient
        count = len(x) * world_size()
        mean = first / count
        variance = (second / count - mean.square()).clamp_min(0.0)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / max(1, count - 1)), self.momentum)
            if self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
        return (x - mean) * (variance + self.eps).rsqrt() * self.weight + self.bias


class SetDropout(nn.Module):
    """Dropout of the features of a set (B, L, d): of each element by itself, or, shared, of the whole set at once.

    A feature that is dropped in some regions can be read off the others, and pooling averages the noise away; a
    feature that is gone from the whole picture is gone. On a few thousand pictures that is the regulariser needed.
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
    """Generalized Pooling Operator (Chen et al., CVPR 2021): learn how to weigh the sorted values of a set.

    Every dimension of the features is sorted in descending order over the set, and the k-th largest value gets the
    weight theta_k: (1, 0, 0, ...) is max pooling, (1/n, ..., 1/n) is mean pooling, and training finds what lies
    between. The weights come from a small bidirectional GRU over codes of the positions, so sets of any size
    share them.
    """

    def __init__(self, position_dim: int = 32, hidden_dim: int = 32, temperature: float = 0.1) -> None:
        super().__init__()
        self.position_dim = position_dim
        self.temperature = temperature
        self.gru = nn.GRU(position_dim, hidden_dim, batch_first=True, bidirectional=True)
        self.score = nn.Linear(hidden_dim, 1, bias=False)

    def weights(self, lengths: Tensor, size: int) -> Tensor:
        """The pooling weights of sets with these lengths, padded to `size`: (B,) int64 on the CPU -> (B, size).

        The generator sees positions only, never features: two sets of the same length have the same weights. So it
        runs once per *distinct* length (a single row for images, some twenty for captions, whatever the batch).
        """
        distinct, which = torch.unique(lengths, return_inverse=True)
        device = self.score.weight.device
        codes = sinusoid(size, self.position_dim).to(device).expand(len(distinct), -1, -1)
        scores = self.score(averaged_bigru(self.gru, codes, distinct)).squeeze(-1)  # (distinct, size)
        padding = torch.arange(size) >= distinct[:, None]
        scores = scores.masked_fill(padding.to(device), MASKED)
        return torch.softmax(scores / self.temperature, dim=1)[which.to(device)]

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Pool (B, L, d) features, of which the first lengths[b] count ((B,) int64 on the CPU), to (B, d)."""
        size = features.shape[1]
        padding = (torch.arange(size) >= lengths[:, None]).to(features.device)
        # Masked positions sort last, where their weight is exactly 0. Sorting goes along contiguous memory: on a CPU
        # that takes two thirds of the time.
        columns = rearrange(features.masked_fill(padding[:, :, None], MASKED), "b l d -> b d l").contiguous()
        ranked = columns.sort(dim=2, descending=True).values
        # Their weight of 0 does not keep them out of the weights' gradient, which in float16 they overflow.
        ranked = ranked.masked_fill(padding[:, None], 0.0)
        return torch.einsum("bdl,bl->bd", ranked, self.weights(lengths, size))


class SubEmbeddings(nn.Module):
    """Several embeddings of a set, one for each way to look at it (PVSE, Song & Soleymani, CVPR 2019; DVSE).

    Each head attends to the elements of the set in its own way; what it sees is added to the pooled embedding:
    ``pooled + tanh(linear(attention @ elements))``, little at first. The papers have a sigmoid there, whose values all
    heads share to the greater part, and a layer normalisation after it; with these the scenes are learnt more slowly,
    and with some seeds far more slowly.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.Linear(dim, dim // 2, bias=False), nn.Tanh(), nn.Linear(dim // 2, heads, bias=False)
        )
        self.linear = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.linear.weight, gain=0.1)
        nn.init.zeros_(self.linear.bias)

    def forward(self, elements: Tensor, pooled: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L, d) elements, of which lengths[b] count, and pooled (B, d) -> sets and residuals, (B, heads, d)."""
        padding = (torch.arange(elements.shape[1]) >= lengths[:, None]).to(elements.device)
        weights = self.attention(elements).masked_fill(padding[:, :, None], MASKED).softmax(1)
        residuals = torch.tanh(self.linear(torch.einsum("blk,bld->bkd", weights, elements)))
        return pooled[:, None] + residuals, residuals


class SelfGuidedEnhancement(nn.Module):
    """SGE of USER (Zhang et al., 2023, Eq. 1-7): regions are told what the picture as a whole shows.

    The mean of the regions asks them which ones matter; the sum weighted by their answers, at unit length, is the
    picture as a whole, and each region gets more of it the closer it is to it.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        # kappa and nu; the batch normalisation brings their biases.
        self.local, self.whole = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.local_norm, self.whole_norm = BatchNorm(dim), BatchNorm(dim)
        self.score = nn.Linear(dim, 1, bias=False)

    def forward(self, regions: Tensor, wholes: Tensor | None = None) -> Tensor:
        """(B, R, d) -> (B, R, d)."""
        local = rearrange(
            self.local_norm(rearrange(self.local(regions), "b r d -> (b r) d")), "(b r) d -> b r d", b=len(regions)
        )
        whole = self.whole_norm(self.whole(regions.mean(1)))
        weights = self.score(local.tanh() * whole.tanh()[:, None]).softmax(1)  # (B, R, 1)
        return told(regions, F.normalize((weights * regions).sum(1), dim=1))


class GuidedEnhancement(nn.Module):
    """CGE of USER (Eq. 8, 6, 7): the same with a feature of the whole picture from elsewhere, CLIP's in the paper."""

    def __init__(self, whole_dim: int, dim: int) -> None:
        super().__init__()
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
        return told(regions, self.mlp(wholes))


def told(regions: Tensor, whole: Tensor) -> Tensor:
    """``x_i = v_i + a_i v_glo``, ``a = softmax_i(v_glo . v_i)`` at unit length over the regions, as in USER's code."""
    attention = torch.einsum("brd,bd->br", regions, whole).softmax(1)
    return regions + F.normalize(attention, dim=1)[:, :, None] * whole[:, None]


class ImageEncoder(nn.Module):
    """Region features (B, R, region_dim) -> image embeddings (B, dim): standardise, enhance, project, pool.

    With ``whole``, it sees the feature of the whole picture (B, whole_dim) in their stead, and there is nothing to
    pool. With ``heads``, the answer is sets of embeddings: the last step is a :class:`SubEmbeddings`. With a
    ``backbone``, it takes raw images (B, 3, H, W), whose regions the backbone finds.

    The projection is that of VSE-infinity: one linear layer plus a two-layer residual MLP with batch normalisation.
    """

    mean: Tensor
    std: Tensor
    whole_mean: Tensor
    whole_std: Tensor

    def __init__(
        self,
        region_dim: int,
        dim: int,
        feature_dropout: float = 0.0,
        shared_dropout: bool = False,
        heads: SubEmbeddings | None = None,
        whole_dim: int = 0,
        whole: bool = False,
        enhancement: str = "",
        backbone: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.register_buffer("mean", torch.zeros(region_dim))
        self.register_buffer("std", torch.ones(()))
        self.register_buffer("whole_mean", torch.zeros(whole_dim))
        self.register_buffer("whole_std", torch.ones(whole_dim))
        self.whole = whole
        self.dropout = SetDropout(feature_dropout, shared_dropout)
        self.enhancement: nn.Module | None = None
        if enhancement == "sge" and not whole:
            self.enhancement = SelfGuidedEnhancement(region_dim)
        elif enhancement == "cge" and not whole:
            self.enhancement = GuidedEnhancement(whole_dim, region_dim)
        seen = whole_dim if whole else region_dim
        self.linear = nn.Linear(seen, dim)
        self.mlp = nn.Sequential(
            nn.Linear(seen, dim // 2, bias=False),  # the batch normalisation brings its own bias
            BatchNorm(dim // 2),
            nn.ReLU(),
            nn.Linear(dim // 2, dim),
        )
        self.pool = None if whole else GPO()
        self.heads = heads

    def elements(self, images: Tensor, wholes: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What is seen of the images, standardised, (B, R, d); and (B, d') the features of the whole pictures."""
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
        """The answer of :meth:`elements` -> embeddings."""
        x = self.dropout(x)
        if self.enhancement is not None:
            x = self.enhancement(x, wholes)
        flat = rearrange(x, "b r d -> (b r) d")
        projected = rearrange(self.linear(flat) + self.mlp(flat), "(b r) d -> b r d", b=len(x))
        if self.pool is None:
            return projected.squeeze(1)
        lengths = torch.full((len(x),), x.shape[1])
        pooled = self.pool(projected, lengths)
        return pooled if self.heads is None else self.heads(projected, pooled, lengths)


class TextEncoder(nn.Module):
    """Padded word ids (B, L) -> text embeddings (B, dim): embed, BiGRU, pool, and a linear bag of words beside it.

    The bag of words is a residual path: the mean of the idf-weighted word embeddings, through one linear layer. On a
    few thousand pictures most of what a caption tells is which words it has; the linear path learns that within an
    epoch or two and leaves the recurrent path to learn what word order adds. idf keeps "a" and "the" out of the mean.
    """

    idf: Tensor

    def __init__(
        self,
        vocabulary_size: int,
        word_dim: int,
        dim: int,
        word_dropout: float = 0.0,
        embedding_dropout: float = 0.0,
        bag_of_words: bool = True,
        shared_dropout: bool = False,
        heads: SubEmbeddings | None = None,
        asks: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("idf", torch.ones(vocabulary_size))
        self.embedding = nn.Embedding(vocabulary_size, word_dim, padding_idx=0)
        # As VSE++: PyTorch's unit variance would take thousands of Adam steps to forget.
        nn.init.uniform_(self.embedding.weight[1:], -0.1, 0.1)
        self.word_dropout = word_dropout
        self.dropout = SetDropout(embedding_dropout, shared_dropout)
        self.gru = nn.GRU(word_dim, dim, batch_first=True, bidirectional=True)
        self.pool = GPO()
        self.heads = heads
        self.bag = nn.Linear(word_dim, dim) if bag_of_words else None
        self.asking = GPO() if asks else None

    def forward(self, words: Tensor, lengths: Tensor) -> Any:
        x = self.dropout(self.embedding(words))
        kept = F.dropout(torch.ones_like(x[:, :, :1]), self.word_dropout, self.training)  # whole words
        x = x * kept
        if self.bag is None:
            return self.recurrent(x, lengths, None)
        # Padding embeds to zero, so the sum over the padded length is the sum over the words.
        mean = torch.einsum("bld,bl->bd", x, self.idf[words]) / lengths.to(x.device)[:, None]
        return self.recurrent(x, lengths, self.bag(mean))

    def recurrent(self, x: Tensor, lengths: Tensor, bag: Tensor | None) -> Any:
        """BiGRU and pooling, (B, L, word_dim) -> (B, dim), for groups of captions of about the same length.

        What comes from the bag of words, (B, dim), is added to what is pooled. With ``heads``, the answer is theirs.
        With ``asks``, a second aggregator pools the same words once more, and the answer is a pair.

        In a group no caption is padded to the longest of the batch. And the backward pass of a packed GRU on a CPU
        fills a buffer as large as all its tokens at every time step, which small groups keep small.
        """
        order = lengths.argsort(stable=True)
        parts = []
        for rows in order.split(GROUP):
            own = lengths[rows]
            hidden = averaged_bigru(self.gru, x[rows.to(x.device), : int(own[-1])], own)
            beside = 0 if bag is None else bag[rows.to(x.device)]
            text = self.pool(hidden, own) + beside
            if self.heads is not None:
                parts.append(self.heads(hidden, text, own))
            else:
                parts.append((text,) if self.asking is None else (text, self.asking(hidden, own) + beside))
        back = order.argsort().to(x.device)
        whole = [torch.cat(part)[back] for part in zip(*parts, strict=True)]
        return tuple(whole) if len(whole) > 1 else whole[0]
