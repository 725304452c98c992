"""Our lines of the page *Their line, ours*, next to the projects' formulas in plain PyTorch."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pages import read
from support.versions import grad_or_zeros
from support.vse_trainers import hinge_sum
from torch import Tensor

import itrloss
from itrloss import compat
from itrloss.functional import set_similarity
from itrloss.metrics import retrieval_metrics
from itrloss.rerank import CSLS, NearestNeighborNorm

N, K, DIM, M = 6, 2, 8, 10
TAU = 0.1


def rows_of_page() -> dict[tuple[str, str], str]:
    """Our line of each project and line of theirs."""
    text = read("docs/their_lines.rst")
    table = text.split(".. list-table::")[1]
    rows = {}
    for block in re.split(r"^   \* - ", table, flags=re.M)[2:]:
        project, theirs, ours, *_ = (
            " ".join(x.split()) for x in re.split(r"^     -", block, flags=re.M)
        )
        (line,) = re.findall(r"``(.+?)``", ours)
        rows[project, theirs.replace("``", "")] = line
    return rows


ROWS = rows_of_page()


SHAPES = {
    **dict.fromkeys(["q", "d", "z1", "z2"], (N, DIM)),
    "n": (N, K, DIM),
    "Q": (N, 3, DIM),
    "D": (N, 4, DIM),
    "chunks": (N, 2, 3, DIM),
    "S": (N, N),
    "W": (N, N + M),
    "own": (N, 3 * N),
    **dict.fromkeys(["pos", "neg"], (N,)),
}
UNTRAINED = {"full": (N, 4 * N), "gold": (N,), "queue": (M, DIM), "T": (N, N), "M": (N, N + M)}


def tensors() -> SimpleNamespace:
    """The embeddings and scores that the lines take, by the page's names; those that get a gradient
    are leaves.
    """
    generator = torch.Generator().manual_seed(5)
    x = SimpleNamespace()
    for name, shape in (SHAPES | UNTRAINED).items():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        setattr(x, name, drawn.requires_grad_(name in SHAPES))
    x.flat = x.n.flatten(0, 1)
    x.full[:, -N:].fill_diagonal_(-math.inf)
    x.full.requires_grad_()
    x.mask = torch.rand(N, K, generator=generator) < 0.6
    share = torch.linspace(0.55, 1, N, dtype=torch.float64)[:, None]
    x.mixed = share * torch.eye(N) + (1 - share) * torch.eye(N).flip(0)
    return x


def inputs() -> SimpleNamespace:
    """All that the lines take."""
    x = tensors()
    x.N = N
    x.K = K
    x.ids = torch.tensor([0, 1, 0, 2, 3, 1])
    x.idx = x.ids
    x.idx_all = torch.cat([x.ids, torch.tensor([0, 3, 9, 8, 2, 1, 7, 7, 5, 4])])
    x.right = torch.tensor([3, 0, 15, 7, 7, 2])
    x.owner = torch.arange(N).repeat_interleave(3)
    x.first = torch.where(torch.arange(3 * N) % 3 == 0, x.owner, -1)
    x.pairs = (torch.tensor([0, 1, 1, 2, 3, 4, 5]), torch.tensor([0, 1, 3, 2, 3, 5, 0]))
    x.people = torch.tensor([0, 1, 0, 1, 1, 0])
    x.memory = itrloss.CoupledMemory(M, DIM, dtype=torch.float64)
    x.memory.enqueue(x.queue.flip(1), x.queue, x.idx_all[N:])
    x.α = 0.4
    x.ε = 0.1
    x.τ = TAU
    return x


NAMES: dict[str, Any] = {
    **{name: getattr(itrloss, name) for name in itrloss.losses.__all__},
    "One": partial(itrloss.InfoNCELoss, directions="query-document"),
    "Sup": partial(itrloss.SupConLoss, directions="query-document"),
    "Soft": partial(itrloss.DistillationLoss, directions="query-document"),
    "Similarity": itrloss.Similarity,
    "NO_ID": itrloss.NO_ID,
    "torch": torch,
    "compat": compat,
    "set_similarity": set_similarity,
    "retrieval_metrics": retrieval_metrics,
    "CSLS": CSLS,
    "NearestNeighborNorm": NearestNeighborNorm,
    "range": range,
}

# ---------------------------------------------------------------------------------------- formulas


def cos(x: Tensor, y: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T


def logits(x: SimpleNamespace) -> Tensor:
    """Of queries with documents."""
    return cos(x.q, x.d) / TAU


def diagonal(scores: Tensor) -> Tensor:
    """The cross-entropy of rows whose right column has their number."""
    return F.cross_entropy(scores, torch.arange(len(scores)))


def both(scores: Tensor) -> Tensor:
    return diagonal(scores) + diagonal(scores.T)


def soft(scores: Tensor, targets: Tensor) -> Tensor:
    return -(F.log_softmax(scores, 1) * targets).sum(1).mean()


def alike(rows: Tensor, cols: Tensor) -> Tensor:
    """Uniform labels over the columns of a row's id."""
    same = (rows[:, None] == cols).double()
    return same / same.sum(1, keepdim=True)


def of_own(x: SimpleNamespace, normalize: bool = True) -> Tensor:
    """Scores of each query with its document and its own hard negatives."""
    unit = partial(F.normalize, dim=-1) if normalize else (lambda y: y)
    candidates = torch.cat([x.d[:, None], x.n], 1)
    return (unit(x.q)[:, None] * unit(candidates)).sum(-1)


def shared(x: SimpleNamespace) -> Tensor:
    """Scores of queries with all documents and all hard negatives."""
    return cos(x.q, torch.cat([x.d, x.flat]))


def ita(x: SimpleNamespace) -> Tensor:
    return soft(x.W, x.α * x.M.softmax(1) + (1 - x.α) * alike(x.idx, x.idx_all))


def ita_of_features(x: SimpleNamespace) -> Tensor:
    labels = (1 - x.α) * alike(x.idx, x.idx_all)
    total = x.q.new_zeros(())
    keys = x.z1.detach(), x.z2.detach()
    queues = x.memory.images, x.memory.texts
    for own, side in ((x.q, 0), (x.d, 1)):
        candidates = torch.cat([keys[1 - side], queues[1 - side]])
        taught = (cos(keys[side], candidates) / TAU).softmax(1)
        total = total + soft(cos(own, candidates) / TAU, x.α * taught + labels)
    return total / 2


def of_itself(x: SimpleNamespace) -> Tensor:
    """Labels of ids, and those that the scores themselves are."""
    total = x.q.new_zeros(())
    scores = logits(x)
    for matrix in (scores, scores.T):
        taught = matrix.detach().softmax(1)
        total = total + soft(matrix, x.α * taught + (1 - x.α) * alike(x.ids, x.ids))
    return total / 2


def smoothed(scores: Tensor, ε: float) -> Tensor:
    """The mean over both sides of the cross-entropy with label smoothing."""
    numbers = torch.arange(len(scores))
    sides = [F.cross_entropy(x, numbers, label_smoothing=ε) for x in (scores, scores.T)]
    return torch.stack(sides).mean()


def smoothed_by_ids(scores: Tensor, ids: Tensor, ε: float) -> Tensor:
    labels = (1 - ε) * alike(ids, ids) + ε / N
    return (soft(scores, labels) + soft(scores.T, labels)) / 2


def mil_nce(scores: Tensor, owners: Tensor, times: int) -> Tensor:
    """MIL-NCE of videos with the texts of ``owners``, which are in the sum so many times."""
    values = []
    for i in range(N):
        own = scores[i, owners == i]
        of_others = scores[:, owners == i][torch.arange(N) != i]
        every = torch.cat([scores[i, owners != i], of_others.flatten(), *[own] * times])
        values.append(torch.logsumexp(every, 0) - torch.logsumexp(own, 0))
    return torch.stack(values).mean()


def full_contrast(x: SimpleNamespace) -> Tensor:
    apart = torch.zeros(N, N).fill_diagonal_(-math.inf)
    scores = [x.d @ x.q.T + apart, x.q @ x.q.T + apart, x.d @ x.d.T + apart]
    return diagonal(torch.cat([x.q @ x.d.T, *scores], 1))


def batch_hard(x: SimpleNamespace) -> Tensor:
    distance = (x.z1[:, None] - x.z1).square().sum(2).clamp(min=1e-12).sqrt()
    same = x.people[:, None] == x.people
    farthest = distance.masked_fill(~same, -math.inf).amax(1)
    nearest = distance.masked_fill(same, math.inf).amin(1)
    return F.margin_ranking_loss(nearest, farthest, torch.ones(N), margin=0.3)


ITSELF = torch.eye(2 * N).bool()


def of_both_views(z1: Tensor, z2: Tensor, tau: float) -> Tensor:
    """Scores of all views with all others."""
    z = torch.cat([z1, z2])
    return (cos(z, z) / tau).masked_fill(ITSELF, -math.inf)


def decoupled(x: SimpleNamespace) -> Tensor:
    scores = of_both_views(x.z1, x.z2, 0.1)
    pairs = ITSELF.roll(N, 1)
    return (scores.masked_fill(pairs, -math.inf).logsumexp(1) - scores[pairs]).mean()


def multi_chunk(x: SimpleNamespace) -> Tensor:
    scores = torch.einsum("nd,njld->njl", x.q, x.chunks).amax(2)
    return -F.log_softmax(scores, 1)[:, 0].mean()


def subtitles_and_captions(x: SimpleNamespace) -> Tensor:
    s, c = cos(x.q, x.z1) / TAU, cos(x.q, x.z2) / TAU
    total = diagonal(s.T) + diagonal(c.T)
    for own in (s, c):
        for i in range(N):
            others = [scores[i, j] for scores in (s, c) for j in range(N) if j != i]
            logits = torch.stack([own[i, i], *others])
            total = total + (torch.logsumexp(logits, 0) - own[i, i]) / N
    return total


def in_batch(x: SimpleNamespace) -> Tensor:
    values = []
    for i in range(N):
        own = x.own[i, 3 * i]
        others = x.own[i, (x.owner != i).nonzero()[:, 0]]
        values.append(torch.logsumexp(torch.cat([own[None], others]), 0) - own)
    return torch.stack(values).mean()


def max_sim(x: Tensor, y: Tensor) -> Tensor:
    """(A, B, L): the best cosine of each element of sets x (A, L, D) in sets y (B, K, D)."""
    return torch.einsum("ald,bkd->ablk", F.normalize(x, dim=-1), F.normalize(y, dim=-1)).amax(3)


def of_queries(x: SimpleNamespace) -> Tensor:
    """(N, N): the best cosine of a set's elements with each vector."""
    return max_sim(x.d[:, None], x.Q)[:, :, 0].T


def token_wise(x: SimpleNamespace) -> Tensor:
    scores = 0.5 * max_sim(x.Q, x.D).mean(2) + 0.5 * max_sim(x.D, x.Q).mean(2).T
    return 0.5 * both(scores / TAU)


def siglip(x: SimpleNamespace) -> Tensor:
    signs = 2 * torch.eye(N) - 1
    return -F.logsigmoid(signs * (10 * cos(x.q, x.d) - 5)).sum() / N


def sdm(scores: Tensor, ids: Tensor, epsilon: float) -> Tensor:
    labels = (alike(ids, ids) + epsilon).log()
    total = scores.new_zeros(())
    for matrix in (scores, scores.T):
        log_p = F.log_softmax(matrix, 1)
        total = total + (log_p.exp() * (log_p - labels)).sum(1).mean()
    return total


def simclr(z1: Tensor, z2: Tensor, tau: float) -> Tensor:
    return F.cross_entropy(of_both_views(z1, z2, tau), torch.arange(2 * N).roll(N))


def qwen3(x: SimpleNamespace) -> Tensor:
    """Queries leave out what is nearer than their document by 0.1, documents nothing."""
    own = cos(x.q, x.d).diagonal()
    every = torch.cat([shared(x), cos(x.q, x.q)], 1)
    of_documents = cos(x.d, torch.cat([x.d, x.flat]))
    values = []
    for i in range(N):
        near = every[i].detach() < own[i].detach() + 0.1
        near[i] = near[N + N * K + i] = False
        itself = torch.arange(N + N * K) == i
        logits = torch.cat([own[i, None], every[i][near], of_documents[i][~itself]]) / TAU
        values.append(torch.logsumexp(logits, 0) - logits[0])
    return torch.stack(values).mean()


def csls(x: SimpleNamespace) -> float:
    scores = 2 * cos(x.q, x.d) - cos(x.d, x.queue).topk(10).values.mean(1)
    best = scores.argmax(1).tolist()
    right = set(zip(*(side.tolist() for side in x.pairs), strict=True))
    return 100 * sum((i, j) in right for i, j in enumerate(best)) / N


def nnn(x: SimpleNamespace) -> Tensor:
    return cos(x.q, x.d) - x.α * cos(x.d, x.queue).topk(4).values.mean(1)


def masked(x: SimpleNamespace) -> Tensor:
    """In-batch documents, and a query's own negatives where the mask is True."""
    own = torch.einsum("nd,nkd->nk", F.normalize(x.q, dim=-1), F.normalize(x.n, dim=-1))
    return diagonal(torch.cat([cos(x.q, x.d), own.masked_fill(~x.mask, -math.inf)], 1) / TAU)


def pcmepp(x: SimpleNamespace) -> Tensor:
    u, w = F.normalize(x.q, dim=-1), F.normalize(x.d, dim=-1)
    distance = (u[:, None] - w).square().sum(2)
    distance = distance + x.z1.exp().sum(1)[:, None] + x.z2.exp().sum(1)
    total = 2 * F.binary_cross_entropy_with_logits(5 - 5 * distance, x.mixed)
    for z, label in ((5 - 5 * distance, x.mixed), (5 - 5 * distance.T, x.mixed.T)):
        best, place = label.max(1, keepdim=True)
        pseudo = torch.where(z.detach() >= z.detach().gather(1, place), best, label)
        total = total + 0.1 * F.binary_cross_entropy_with_logits(z, pseudo)
    for mean, log in ((u, x.z1), (w, x.z2)):
        total = total - 1e-4 * 0.5 * (1 + log - mean.square() - log.exp()).mean()
    return total


def supcon(x: SimpleNamespace) -> Tensor:
    labels = torch.cat([x.ids, x.ids])
    same = (labels[:, None] == labels) & ~ITSELF
    log_p = F.log_softmax(of_both_views(x.z1, x.z2, 0.1), 1).masked_fill(~same, 0.0)
    return -(log_p.sum(1) / same.sum(1)).mean()


def entropy(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(1).mean()


def kl(x: SimpleNamespace) -> Tensor:
    p = x.T[:, :2].softmax(1)
    divergence = F.kl_div(
        F.log_softmax(torch.stack([x.pos, x.neg], 1), 1), p, reduction="batchmean"
    )
    return divergence + entropy(p)


ZEROS = torch.zeros(N, dtype=torch.long)


def clip(x: SimpleNamespace) -> Tensor:
    return both(logits(x)) / 2


def of_logits(x: SimpleNamespace) -> Tensor:
    return both(x.S) / 2


def one_way(x: SimpleNamespace) -> Tensor:
    return diagonal(x.S)


def with_negatives(x: SimpleNamespace) -> Tensor:
    return diagonal(shared(x) / TAU)


def own_negatives(x: SimpleNamespace) -> Tensor:
    return F.cross_entropy(of_own(x) / TAU, ZEROS)


def inner_products(x: SimpleNamespace) -> Tensor:
    """Of queries with all documents and all hard negatives."""
    return x.q @ torch.cat([x.d, x.flat]).T


def scan(x: SimpleNamespace) -> Tensor:
    return hinge_sum(x.S, 0.2, True)


def of_views(x: SimpleNamespace) -> Tensor:
    return simclr(x.z1, x.z2, 0.1)


Formula = Callable[[SimpleNamespace], Any]
FORMULAS: dict[tuple[str, str], Formula] = {
    ("ALBEF", "loss_ita with idx and the queue"): ita_of_features,
    ("ALBEF", "loss_i2t of sim_i2t and its targets"): ita,
    ("ANCE", "NLL"): lambda x: F.cross_entropy(of_own(x, normalize=False), ZEROS),
    ("ANCE", "NLL_MultiChunk"): multi_chunk,
    ("BGE-m3", "distill_loss, kl_div"): lambda x: soft(x.S, x.T.softmax(1)),
    ("BLIP", "loss_ita with idx and the queue"): ita_of_features,
    ("Chinese-CLIP", "get_loss"): of_logits,
    ("CLAP", "ClipLoss"): clip,
    ("CLIP-ViP", "NCEContrastiveLoss, NCELearnableTempLoss"): lambda x: both(logits(x)),
    ("CLIP-ViP", "NCELearnableTempLoss_vsc"): subtitles_and_captions,
    ("CLIP-ViP", "NCELearnableTempDSLLoss"): lambda x: (
        diagonal(x.S * x.S.softmax(0)) + diagonal(x.S.T * x.S.softmax(1).T)
    ),
    ("CLIP-ViP", "MILNCEContrastiveLoss"): lambda x: mil_nce(
        cos(x.q, x.flat) / TAU, torch.arange(N).repeat_interleave(K), times=1
    ),
    ("CLIP4Cir", "crossentropy_criterion(logits, ground_truth)"): one_way,
    ("CLIP4Clip", "(CrossEn(S) + CrossEn(S.T)) / 2"): of_logits,
    ("ColBERT", "cross-entropy of nway scores"): lambda x: F.cross_entropy(x.W, ZEROS),
    ("ColBERT", "compute_ib_loss"): in_batch,
    ("colpali", "ColbertLoss"): lambda x: diagonal(max_sim(x.Q, x.D).sum(2) / 3 / TAU),
    ("colpali", "BiEncoderLoss"): lambda x: diagonal(logits(x)),
    ("contrastors", "clip_loss"): with_negatives,
    ("contriever", "InBatch"): lambda x: F.cross_entropy(
        x.q @ x.d.T / TAU, torch.arange(N), label_smoothing=x.ε
    ),
    ("contriever", "MoCo"): lambda x: F.cross_entropy(
        torch.cat([(x.q * x.d).sum(1, keepdim=True), x.q @ x.queue.T], 1) / TAU, ZEROS
    ),
    ("contriever", "MoCo with label smoothing"): lambda x: F.cross_entropy(
        x.W, ZEROS, label_smoothing=x.ε
    ),
    ("ConVIRT", "NTXentLoss with α = 0.75"): lambda x: (
        0.75 * diagonal(logits(x)) + 0.25 * diagonal(logits(x).T)
    ),
    ("CyCLIP", "get_loss, the contrast"): clip,
    ("deep-person-reid", "TripletLoss"): batch_hard,
    ("DPR", "BiEncoderNllLoss"): lambda x: diagonal(inner_products(x)),
    ("DRL", 'CrossEn of wti_interaction, "ti"'): token_wise,
    ("FG-CLIP", "hard_contrastive_loss"): own_negatives,
    ("FG-CLIP", "clip_loss, pairwise_contrastive_loss"): clip,
    ("FG-CLIP 2", "all_gather_siglip_loss_"): siglip,
    ("FlagEmbedding", "_compute_in_batch_neg_loss"): with_negatives,
    ("frozen-in-time", "NormSoftmaxLoss"): lambda x: both(x.S / TAU),
    ("frozen-in-time", "MaxMarginRankingLoss"): lambda x: (
        hinge_sum(x.S, 0.2, False) / (2 * N * (N - 1))
    ),
    ("GradCache", "SimpleContrastiveLoss"): lambda x: diagonal(inner_products(x)),
    ("hybrid_space", "TripletLoss"): lambda x: hinge_sum(cos(x.q, x.d), 0.2, True),
    ("IMRAM", "ContrastiveLoss(opt=opt, …)"): scan,
    ("IRRA", "compute_sdm"): lambda x: sdm(logits(x), x.ids, 1e-8),
    ("IRRA", "compute_itc"): clip,
    ("LAVIS BLIP-2", "loss_itc"): lambda x: smoothed(of_queries(x) / TAU, x.ε),
    ("LAVIS BLIP-2", "loss_itc with image_id"): lambda x: smoothed_by_ids(
        of_queries(x) / TAU, x.ids, x.ε
    ),
    ("lightly", "DCLLoss"): decoupled,
    ("lightly", "NTXentLoss"): lambda x: simclr(x.z1, x.z2, 0.5),
    ("lightly", "NTXentLoss with a memory bank"): lambda x: F.cross_entropy(
        torch.cat([cos(x.z1, x.z2).diagonal()[:, None], cos(x.z1, x.queue)], 1) / 0.5, ZEROS
    ),
    ("Long-CLIP", "forward, each of its two terms"): lambda x: smoothed(logits(x), x.ε),
    ("MedCLIP", "soft cross-entropy of label_sim"): lambda x: (
        (soft(x.S, x.T.softmax(1)) + soft(x.S.T, x.T.T.softmax(1))) / 2
    ),
    ("MIL-NCE", "MILNCELoss"): lambda x: mil_nce(
        x.q @ x.flat.T, torch.arange(N).repeat_interleave(K), times=2
    ),
    ("ms-swift", "InfonceLoss"): with_negatives,
    ("ms-swift", "InfonceLoss, Qwen3's switches"): qwen3,
    ("MUSE", 'get_word_translation_accuracy, "csls_knn_10"'): csls,
    ("NeMo Automodel", "InfoNCELoss with a mask"): masked,
    ("NNN", "NNNRetriever"): nnn,
    ("pcmepp", "ClosedFormSampledDistanceLoss"): pcmepp,
    ("pylate", "Contrastive"): lambda x: diagonal(max_sim(x.Q, x.D).sum(2) / TAU),
    ("RCAR", "ContrastiveLoss(opt=opt, …)"): scan,
    ("sentence-transformers", "MultipleNegativesRankingLoss"): with_negatives,
    ("sentence-transformers", "MarginMSELoss"): lambda x: F.mse_loss(x.pos - x.neg, x.gold),
    ("SigLIP 2 in transformers", "SiglipModel's loss"): siglip,
    ("SimCSE", "cl_forward"): lambda x: diagonal(cos(x.z1, x.z2) / TAU),
    ("SimCSE", "cl_forward with hard negatives"): lambda x: diagonal(
        cos(x.z1, torch.cat([x.z2, x.d])) / TAU
    ),
    ("SimLM", "the cross-entropy of its scores"): lambda x: F.cross_entropy(x.full, x.right),
    ("SimLM", "full_contrastive_loss of one passage a query"): full_contrast,
    ("SLIP", "CLIPLoss"): clip,
    ("SLIP", "SIMCLRLoss"): of_views,
    ("SPLADE", "PairwiseNLL"): lambda x: (
        -F.log_softmax(torch.stack([x.pos, x.neg], 1), 1)[:, 0].mean()
    ),
    ("SPLADE", "InBatchPairwiseNLL"): lambda x: diagonal(torch.cat([x.S, x.neg[:, None]], 1)),
    ("SPLADE", "DistilKLLoss"): kl,
    ("SPLADE", "DistilMarginMSE"): lambda x: F.mse_loss(x.pos - x.neg, x.T[:, 0] - x.T[:, 1]),
    ("SPRC", "loss_itc"): lambda x: diagonal(max_sim(x.q[:, None], x.D)[:, :, 0] / TAU),
    ("SupContrast", "SupConLoss"): supcon,
    ("TBPS-CLIP", "calc_contrastive"): of_itself,
    ("TBPS-CLIP", "R-ITC"): lambda x: sdm(x.S, x.ids, 1e-2) / 2,
    ("TBPS-CLIP", "compute_simclr_loss"): of_views,
    ("tevatron", "EncoderModel, the cross-entropy"): lambda x: diagonal(inner_products(x) / TAU),
    ("UniVL", "CrossEn"): one_way,
    ("UniVL", "MILNCELoss"): lambda x: mil_nce(x.S, torch.arange(N), times=1),
    ("UniVL", "MaxMarginRankingLoss"): lambda x: (
        (0.2 + x.S - x.S.diagonal()[:, None]).relu() + (0.2 + x.S - x.S.diagonal()).relu()
    ).mean(),
    ("VLM2Vec", "SimpleContrastiveLoss"): with_negatives,
    ("VLM2Vec", "InExampleContrastiveLoss"): own_negatives,
    ("VSRN", "ContrastiveLoss"): lambda x: hinge_sum(x.q @ x.d.T, 0.2, True),
    ("X-Pool", "CLIPLoss"): of_logits,
    ("X-VLM", "get_contrastive_loss"): clip,
    ("X-VLM", "get_contrastive_loss with idx"): lambda x: smoothed_by_ids(logits(x), x.ids, 0.0),
}


def without_commit(project: str) -> str:
    return re.sub(r" [0-9a-f]{7}$", "", project)


def test_each_line_of_the_page_has_a_formula():
    assert {(without_commit(project), theirs) for project, theirs in ROWS} == FORMULAS.keys()
    names = [project.lower() for project, _ in ROWS]
    assert names == sorted(names)


MAKERS = "Loss", "One", "Sup", "Soft"


def changed_lines(line: str) -> int:
    """The lines that make the criteria of an expression, its call, and with a memory two more:
    the one that makes it, and the one that fills it.
    """
    tree = list(ast.walk(ast.parse(line, mode="eval")))
    calls = [(ast.unparse(x.func), ast.unparse(x)) for x in tree if isinstance(x, ast.Call)]
    criteria = {call for name, call in calls if name.endswith(MAKERS)}
    has_memory = any(isinstance(x, ast.Name) and x.id == "memory" for x in tree)
    return len(criteria) + 1 + 2 * has_memory


def test_the_page_counts_the_projects_of_two_lines():
    most: dict[str, int] = {}
    for (project, _), line in ROWS.items():
        name = without_commit(project)
        most[name] = max(most.get(name, 0), changed_lines(line))
    two = [name for name, lines in most.items() if lines <= 2]
    assert len(two) >= 45
    page = " ".join(read("docs/their_lines.rst").split())
    assert f"Of these {len(most)} projects, {len(two)} take at most two lines" in page


@pytest.mark.parametrize("name", ROWS, ids=" ".join)
def test_our_line_is_theirs(name):
    project, theirs = name
    x = inputs()
    found = eval(ROWS[name], NAMES | vars(x))
    wanted = FORMULAS[without_commit(project), theirs](x)
    if not isinstance(wanted, Tensor):
        assert found == pytest.approx(wanted)
        return
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    if not wanted.requires_grad or wanted.dim():
        return
    leaves = [
        y for y in vars(x).values() if isinstance(y, Tensor) and y.is_leaf and y.requires_grad
    ]
    pairs = [grad_or_zeros(value, leaves) for value in (found, wanted)]
    assert any(gradient.any() for gradient in pairs[1])
    torch.testing.assert_close(*pairs, rtol=1e-8, atol=1e-9)
