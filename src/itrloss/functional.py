"""One pure function per equation. Each takes a :class:`itrloss.Similarity` and returns a tensor.

Losses share one reduction: ``"mean"`` is the mean over the image anchors plus the mean over the text anchors,
``"sum"`` the sum over all anchors, and ``"none"`` the pair of per-anchor values ``(rows (N,), columns (M,))``. An
anchor without a positive or without a negative contributes 0 and does not count in a mean.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ._arguments import as_ids, check_matrix
from ._reduction import AnchorCounts, reduce_valid
from ._reduction import Reduction as Reduction
from .memory import MemorySimilarity
from .sets import Aggregation as Aggregation
from .sets import PairReduction as PairReduction
from .sets import dynamic_orthogonal_loss, set_similarity, variance_aware_loss
from .similarity import Engine, Similarity

Diversity = Literal["std", "entropy"] | None
Mining = Literal["hardest", "all"]
PositiveWeight = float | Literal["paper"]
PositiveForm = Literal["clamp", "relu"]
PositiveFrom = Literal["key", "batch"]
DiversityFrom = Literal["both", "batch"]

__all__ = [
    "diversity_contrastive_loss",
    "dynamic_orthogonal_loss",
    "entropy_diversity",
    "hubness_aware_loss",
    "info_nce_loss",
    "memory_diversity_contrastive_loss",
    "prototype_classification_loss",
    "set_similarity",
    "sigmoid_loss",
    "std_diversity",
    "triplet_loss",
    "unified_training_objective",
    "variance_aware_loss",
]


# -------------------------------------------------------------------------------------------------- diversity


def std_diversity(sim: Similarity, epsilon: float = 0.1) -> Tensor:
    r"""Diversity of each row's negatives by their standard deviation (CODER Eq. 3).

    .. math:: \mathrm{raw}_i = 1 + e^{-\epsilon / SD_i}, \qquad \mathrm{div}_i = \mathrm{raw}_i / \max_k \mathrm{raw}_k

    ``SD_i`` is the population standard deviation of ``{S_ij : j negative}``, at least 1e-6. A low score means that the
    negatives are all equally far away.

    Returns:
        (N,) in (½, 1], 1 for the most diverse row. Differentiable. ``sim.T`` gives the columns' scores.
    """
    return _diversity_scores(_checked(sim).moments().std, epsilon)


def entropy_diversity(sim: Similarity, epsilon: float = 0.1, temperature: float = 1.0) -> Tensor:
    r"""Diversity of each row's negatives by the entropy of its similarities (CODER supplement, Eq. 8).

    The map of :func:`std_diversity` applied to ``H_i = -sum_{j negative} P_ij log2 P_ij``, where ``P_i`` is the softmax
    of ``S_i / temperature`` over all candidates.

    Warning:
        At temperature 1 cosines hardly differ: with 128 candidates H is within about 2 % of log2 128 for every row and
        every score is practically 1. A temperature of the order of the similarities' spread makes it informative.

    Returns:
        (N,) in (½, 1]. Differentiable. ``sim.T`` gives the columns' scores.
    """
    return _diversity_scores(_checked(sim).entropy(temperature).clamp_min(1e-6), epsilon)


def _diversity_scores(spread: Tensor, epsilon: float) -> Tensor:
    raw = torch.exp(-epsilon / spread) + 1
    return raw / raw.amax(-1, keepdim=True)


def _diversity(sim: Similarity, kind: Diversity, epsilon: float, temperature: float) -> Tensor:
    return std_diversity(sim, epsilon) if kind == "std" else entropy_diversity(sim, epsilon, temperature)


def diversities(sim: Similarity, kind: Diversity, epsilon: float, temperature: float) -> Tensor:
    """Of rows and columns, out of one pass: (N + M,)."""
    if kind == "std":
        spread = sim._joined.moments().std
    elif kind == "entropy":
        spread = sim._joined.entropy(temperature).clamp_min(1e-6)
    else:
        raise ValueError(f"diversity: expected 'std', 'entropy' or None, got {kind!r}")
    n, m = sim.shape
    if n == m:
        return _diversity_scores(spread.view(2, n), epsilon).flatten()
    return torch.cat([_diversity_scores(x, epsilon) for x in spread.split((n, m))])


# ----------------------------------------------------------------------------------------------------- losses


def diversity_contrastive_loss(
    sim: Similarity,
    temperature: float = 0.1,
    margin: float = 0.3,
    diversity: Diversity = "std",
    epsilon: float = 0.1,
    detach_diversity: bool = True,
    positive_weight: PositiveWeight = "paper",
    positive: PositiveForm = "clamp",
    entropy_temperature: float = 1.0,
    reduction: Reduction = "mean",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Diversity-sensitive contrastive loss, DCL (CODER Eq. 4-5).

    .. math::
        \ell_i = \mu \log\Bigl(1 + \sum_{j \in neg(i)} e^{(S_{ij} - \gamma) / (\mu d_i)}\Bigr)
                 - w \operatorname{mean}_{p \in pos(i)} \log(1 + S_{ip})

    with temperature μ, margin γ, diversity ``d_i`` and ``w = μ`` as printed. ``diversity=None`` is the implicit form
    (``d = 1``). See :class:`itrloss.DiversityContrastiveLoss` for the options.
    """
    _checked(sim)
    term = _positive_term(positive)
    weight = temperature if positive_weight == "paper" else float(positive_weight)
    scale: Tensor | float = 1 / temperature
    if diversity is None:
        repulsion = sim._joined.logsumexp(scale)
    else:
        beside = sim._detach_for_now() if detach_diversity else sim
        scale = scale / diversities(beside, diversity, epsilon, entropy_temperature)
        repulsion = sim._joined.logsumexp(scale)
    counts = AnchorCounts(sim)
    attraction = counts.mean_of_positives(sim._joined.positives(term))
    values = temperature * _log1p_exp(repulsion - scale * margin) - weight * attraction
    return counts.reduce(values, reduction)


def hubness_aware_loss(
    sim: Similarity, scale: float = 90.0, margin: float = 0.5, reduction: Reduction = "mean"
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Hubness-aware loss, HAL (in-batch part of USER Eq. 17).

    .. math::
        \frac1B \sum_i \Bigl[ \tfrac1\gamma \log\bigl(1 + \sum_{j \ne i} e^{\gamma (S_{ij} - \varepsilon)}\bigr)
        + \tfrac1\gamma \log\bigl(1 + \sum_{j \ne i} e^{\gamma (S_{ji} - \varepsilon)}\bigr) - \log(1 + S_{ii}) \Bigr]

    with ``scale`` γ and ``margin`` ε. In general: mean over rows of the row term, plus mean over columns of the column
    term, minus the mean over positive pairs of ``log(1 + S)``. With ``reduction="none"`` each direction carries one
    half of the positive term. See :class:`itrloss.HubnessAwareLoss`.
    """
    repulsion = _log1p_exp(_checked(sim)._joined.logsumexp(scale) - scale * margin) / scale
    counts = AnchorCounts(sim)
    attraction = counts.mean_over_pairs(sim._joined.positives("log1p_clamp"))
    return counts.reduce(repulsion - 0.5 * attraction, reduction)


def memory_diversity_contrastive_loss(
    sims: MemorySimilarity,
    temperature: float = 0.1,
    margin: float = 0.3,
    diversity: Diversity = "std",
    epsilon: float = 0.1,
    detach_diversity: bool = True,
    positive_weight: PositiveWeight = "paper",
    positive: PositiveForm = "clamp",
    entropy_temperature: float = 1.0,
    positive_from: PositiveFrom = "key",
    reduction: Reduction = "mean",
    *,
    diversity_from: DiversityFrom = "both",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Memory-aided DCL, M-DCL (CODER Eq. 6): images against the memory's texts, texts against its images.

    .. math::
        \ell_i = \mu \log\Bigl(1 + \sum_{q} e^{(S_{iq} - \gamma) / (\mu d_i)}\Bigr)
                 - w \operatorname{mean}_{p \in pos(i)} \log(1 + \operatorname{cos}(x_i, k_p)), \qquad
        d_i = \tfrac12 (d_i^{batch} + d_i^{memory})

    over the memory's entries q with another id than the anchor's, and the momentum keys k of its positives. See
    :class:`itrloss.MemoryDiversityContrastiveLoss` for the options.
    """
    _checked_memory(sims)
    term = _positive_term(positive)
    if positive_from not in ("key", "batch"):
        raise ValueError(f"positive_from: expected 'key' or 'batch', got {positive_from!r}")
    if diversity_from not in ("both", "batch"):
        raise ValueError(f"diversity_from: expected 'both' or 'batch', got {diversity_from!r}")
    weight = temperature if positive_weight == "paper" else float(positive_weight)
    in_batch: tuple[Tensor, ...] = ()
    values = []
    if diversity is not None:
        batch = sims.batch._detach_for_now() if detach_diversity else sims.batch
        in_batch = diversities(batch, diversity, epsilon, entropy_temperature).split(batch.shape)
    for side, memory in enumerate(sims.memory):
        scale: Tensor | float = 1 / temperature
        if diversity is not None and diversity_from == "batch":
            scale = 1 / temperature / in_batch[side]
        elif diversity is not None:
            beside = memory._detach_for_now() if detach_diversity else memory
            own = _diversity(beside, diversity, epsilon, entropy_temperature)
            scale = 2 / temperature / (in_batch[side] + own)
        repulsion = memory.logsumexp(scale)
        positives = sims.keys[side] if positive_from == "key" else _seen(sims.batch, side)
        attraction = _mean_over_positives(positives, term)
        value = temperature * _log1p_exp(repulsion - scale * margin) - weight * attraction
        values.append(_zero_without_partners(value, repulsion, positives))
    return reduce_valid(values, reduction)


def unified_training_objective(
    sims: MemorySimilarity,
    scale: float = 90.0,
    margin: float = 0.5,
    batch_weight: float = 1.0,
    reduction: Reduction = "mean",
    *,
    image_memory_weight: float = 1.0,
    text_memory_weight: float = 1.0,
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Unified training objective, UTO (USER Eq. 18-21): HAL in the batch, and its rows against the memory.

    .. math::
        \lambda\, \mathrm{HAL} + \operatorname{mean}_i Q(v_i) + \operatorname{mean}_i Q(w_i), \qquad
        Q(x_i) = \tfrac1\gamma \log\bigl(1 + \sum_{q} e^{\gamma (S_{iq} - \varepsilon)}\bigr)
                 - \operatorname{mean}_{p \in pos(i)} \log(1 + \operatorname{cos}(x_i, k_p))

    with ``scale`` γ, ``margin`` ε and ``batch_weight`` λ, over the memory's entries q with another id than the
    anchor's, and the momentum keys k of its positives. ``text_memory_weight`` multiplies Q of the images, which ask the
    memory's texts, ``image_memory_weight`` that of the texts. See :class:`itrloss.UnifiedTrainingObjective`.
    """
    _checked_memory(sims)
    values = []
    for keys, memory, weight in zip(sims.keys, sims.memory, (text_memory_weight, image_memory_weight), strict=True):
        repulsion = memory.logsumexp(scale)
        value = _log1p_exp(repulsion - scale * margin) / scale - _mean_over_positives(keys, "log1p_clamp")
        values.append(_zero_without_partners(weight * value, repulsion, keys))
    queue = reduce_valid(values, reduction)
    batch = hubness_aware_loss(sims.batch, scale, margin, reduction)
    if isinstance(queue, Tensor) or isinstance(batch, Tensor):
        return batch_weight * batch + queue  # type: ignore[operator]
    rows, cols = (batch_weight * b + q for b, q in zip(batch, queue, strict=True))
    return rows, cols


def info_nce_loss(
    sim: Similarity, temperature: float | Tensor = 0.07, reduction: Reduction = "mean"
) -> Tensor | tuple[Tensor, Tensor]:
    r"""InfoNCE in both directions, with any number of positives.

    .. math:: \ell_i = \operatorname{mean}_{p \in pos(i)} -\log
        \frac{e^{S_{ip}/\tau}}{e^{S_{ip}/\tau} + \sum_{j \in neg(i)} e^{S_{ij}/\tau}}

    with the ``temperature`` τ, a number or a tensor of one value, which gets its gradient. A positive competes with the
    negatives, not with the anchor's other positives. With one positive per anchor this is the sum of the two
    cross-entropies; CLIP's loss is half of it.
    """
    if isinstance(temperature, Tensor):
        temperature = temperature.to(_checked(sim).dtype)  # its reciprocal in half precision would be far off
    scale = 1 / temperature
    a = scale if isinstance(scale, Tensor) else torch.full((1,), scale, dtype=_checked(sim).dtype, device=sim.device)
    negatives = sim._joined.logsumexp(a)
    loss = sim._joined.positives("negative_log_likelihood", negatives, a)
    counts = AnchorCounts(sim)
    return counts.reduce(counts.mean_of_positives(loss), reduction)


def sigmoid_loss(
    sim: Similarity, scale: float | Tensor = 10.0, bias: float | Tensor = -10.0, reduction: Reduction = "mean"
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Sigmoid loss, SigLIP (Zhai et al., ICCV 2023, Eq. 1): every pair is a classification of its own.

    .. math:: \frac12 \Bigl(\frac1N + \frac1M\Bigr) \sum_{i,j} \log\bigl(1 + e^{-z_{ij} (a S_{ij} + b)}\bigr)

    with ``z = 1`` for a positive pair and -1 for a negative one, ``scale`` a and ``bias`` b, numbers or tensors of one
    value, which get their gradients. All pairs count, also those of an anchor without positives. Of a pair's value one
    half is its image's and the other its text's.
    """
    _checked(sim)
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    for name, x in (("scale", scale), ("bias", bias)):
        if isinstance(x, Tensor) and x.numel() != 1:
            raise ValueError(f"{name}: expected a number or a tensor of one value, got shape {tuple(x.shape)}")
    a, b = (
        x.to(sim.device, sim.dtype).reshape(1)
        if isinstance(x, Tensor)
        else torch.full((1,), x, dtype=sim.dtype, device=sim.device)
        for x in (scale, bias)
    )
    if reduction == "none":
        pushed = sim.both.negatives("softplus", (a, b), (a, b))
        pulled = sim.both.positives("softplus", (-a, -b), (-a, -b), sparse=True)
        return 0.5 * (pulled[0] + pushed[0]), 0.5 * (pulled[1] + pushed[1])
    total = sim.negatives("softplus", a, b).sum() + sim.positives("softplus", -a, -b, sparse=True).sum()
    n, m = sim.shape
    return total * (0.5 / n + 0.5 / m) if reduction == "mean" else total


def triplet_loss(
    sim: Similarity,
    margin: float = 0.2,
    mining: Mining = "hardest",
    reduction: Reduction = "sum",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Triplet ranking loss (VSE++): every positive pair against negatives of both its members.

    .. math:: \ell_i = \sum_{p \in pos(i)} \max_{j \in neg(i)} [\alpha - S_{ip} + S_{ij}]_+ \quad\text{("hardest")}

    or the sum over all negatives instead of the maximum (``"all"``); α is the ``margin``, in units of cosine
    similarity.
    """
    return AnchorCounts(sim).reduce(triplet_values(_checked(sim), margin, mining), reduction)


def triplet_values(sim: Similarity, margin: float, mining: Mining) -> Tensor:
    """The terms of :func:`triplet_loss`, of each row and then of each column, whether it counts or not: (N + M,)."""
    if mining == "hardest":
        thresholds = torch.cat([h.values for h in sim.both.hardest()]) + margin
        return sim._joined.positives("hinge", thresholds, sparse=True)
    if mining == "all":
        return sim._joined.violations(margin)
    raise ValueError(f"mining: expected 'hardest' or 'all', got {mining!r}")


def prototype_classification_loss(
    image_concepts: Tensor,  # (B, F)
    text_concepts: Tensor,  # (B, F)
    weight: Tensor,  # (K, F)
    prototype_ids: Tensor,  # (B,)
    reduction: Reduction = "mean",
    engine: Engine = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    r"""Prototype-guided classification, PGC (CODER Eq. 7): cross-entropies of one linear classifier for both sides.

    .. math:: -\operatorname{mean}_b \log \operatorname{softmax}(P v_b)_{z_b}
              - \operatorname{mean}_b \log \operatorname{softmax}(P w_b)_{z_b}

    The classes are columns like any others: where the (2 B, K) logits are large, they are never all there.

    Args:
        image_concepts, text_concepts: (B, F) embeddings v and w, row i of one belonging to row i of the other; taken as
            they are.
        weight: (K, F) the classifier P.
        prototype_ids: (B,) integers z in [0, K). Out of range they are refused on the CPU, and undefined elsewhere.
        reduction: ``"mean"`` over the batch, ``"sum"``, or ``"none"`` for the values (B,) of images and of texts.
        engine: see :class:`itrloss.Similarity`.

    Returns:
        A 0-dim float32 tensor (float64 for float64 input), or a pair of tensors for ``"none"``.
    """
    given = (("image_concepts", image_concepts, "(B, F)"), ("text_concepts", text_concepts, "(B, F)"))
    for name, x, wanted in (*given, ("weight", weight, "(K, F)")):
        check_matrix(name, x, wanted, False)
    for name, x, _ in given:
        wanted = (image_concepts.shape[0], weight.shape[1])
        if x.shape != wanted:
            raise ValueError(f"{name}: expected shape {wanted}, got {tuple(x.shape)}")
        if (x.dtype == torch.float64) != (weight.dtype == torch.float64):
            raise TypeError(f"{name}: expected float64 for a float64 weight and for no other, got {x.dtype}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction: expected 'mean', 'sum' or 'none', got {reduction!r}")
    batch, classes = image_concepts.shape[0], weight.shape[0]
    ids = as_ids("prototype_ids", prototype_ids, batch, weight.device)
    # Only the CPU may look at them for nothing.
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and not 0 <= ids.amin() <= ids.amax() < classes:
        got = f"{int(ids.amin())} to {int(ids.amax())}"
        raise ValueError(f"prototype_ids: expected integers from 0 to {classes - 1}, got {got}")
    common = torch.promote_types(image_concepts.dtype, text_concepts.dtype)
    both = torch.cat([image_concepts.to(common), text_concepts.to(common)])
    labels = ids.repeat(2), torch.arange(classes, device=ids.device)
    logits = Similarity(both, weight, *labels, normalize=False, engine=engine)
    rivals = logits.logsumexp()
    values = logits.positives("negative_log_likelihood", rivals, rivals.new_ones(1))
    if reduction == "none":
        return values[:batch], values[batch:]
    return values.sum() / batch if reduction == "mean" else values.sum()


# ----------------------------------------------------------------------------------------------------- shared


def _checked(sim: Similarity) -> Similarity:
    if not isinstance(sim, Similarity):
        wanted = "a Similarity; the classes in itrloss take embeddings and scores"
        raise TypeError(f"sim: expected {wanted}, got {type(sim).__name__}")
    return sim


def _checked_memory(sims: MemorySimilarity) -> None:
    if not isinstance(sims, MemorySimilarity):
        wanted = "a MemorySimilarity; the classes in itrloss take embeddings, keys and a memory"
        raise TypeError(f"sims: expected {wanted}, got {type(sims).__name__}")


def _log1p_exp(z: Tensor) -> Tensor:
    return F.softplus(z, threshold=40)


def _positive_term(positive: str) -> str:
    if positive not in ("clamp", "relu"):
        raise ValueError(f"positive: expected 'clamp' or 'relu', got {positive!r}")
    return f"log1p_{positive}"


def _seen(batch: Similarity, side: int) -> Similarity:
    return batch.T if side else batch


def _mean_over_positives(sim: Similarity, term: str) -> Tensor:
    sums = sim.positives(term, sparse=True)
    return sums if sim.one_to_one else sums / sim.positive_counts.clamp_min(1)


def _zero_without_partners(values: Tensor, repulsion: Tensor, positives: Similarity) -> tuple[Tensor, Tensor]:
    """Per anchor: its value, and whether it counts, which takes a positive and a negative."""
    valid = repulsion != -torch.inf
    if not positives.one_to_one:
        valid = valid & (positives.positive_counts > 0)
    return torch.where(valid, values, 0.0), valid
