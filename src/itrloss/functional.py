"""One pure function per equation, of a :class:`itrloss.Similarity` or of :class:`itrloss.Anchors`.

Losses share one reduction: ``"mean"`` is the mean over the image anchors plus the mean over the text anchors,
``"sum"`` the sum over all anchors, and ``"none"`` the pair of per-anchor values ``(rows (N,), columns (M,))``. An
anchor without a positive or without a negative contributes 0 and does not count in a mean.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .anchors import Anchors
from .anchors import Reduction as Reduction
from .checks import as_ids, check_matrix, one_of
from .engine.answers import hinge, log1p_clamp, log1p_relu, negative_log_likelihood, softplus
from .engine.scores import Embeddings, host_may_read
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
Loss = Tensor | tuple[Tensor, Tensor]

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

_TERMS = {"clamp": log1p_clamp, "relu": log1p_relu}


# -------------------------------------------------------------------------------------------------- diversity


def std_diversity(sim: Anchors, epsilon: float = 0.1) -> Tensor:
    r"""Return the (N,) diversity of each row's negatives by their standard deviation (CODER Eq. 3).

    .. math:: \mathrm{raw}_i = 1 + e^{-\epsilon / SD_i}, \qquad \mathrm{div}_i = \mathrm{raw}_i / \max_k \mathrm{raw}_k

    ``SD_i`` is the population standard deviation of ``{S_ij : j negative}``, at least 1e-6. A low score means that the
    negatives are all equally far away. It lies in (½, 1], and is 1 for the most diverse row. Differentiable.
    ``sim.T`` gives the columns' scores, ``sim.both`` those of both, each with a maximum of its own.
    """
    if not isinstance(sim, Anchors):
        _checked(sim)
    return _diversity_scores(sim, sim.mean_std().std, epsilon)


def entropy_diversity(sim: Anchors, epsilon: float = 0.1, temperature: float = 1.0) -> Tensor:
    r"""Return the (N,) diversity of each row's negatives by the entropy of its similarities (CODER supplement, Eq. 8).

    The map of :func:`std_diversity` applied to ``H_i = -sum_{j negative} P_ij log2 P_ij``, where ``P_i`` is the softmax
    of ``S_i / temperature`` over all candidates. In (½, 1]. Differentiable.

    Warning:
        At temperature 1 cosines hardly differ: with 128 candidates H is within about 2 % of log2 128 for every row and
        every score is practically 1. A temperature of the order of the similarities' spread makes it informative.
    """
    return _diversity_scores(sim, _checked(sim).entropy(temperature).clamp_min(1e-6), epsilon)


def _diversity_scores(anchors: Anchors, spread: Tensor, epsilon: float) -> Tensor:
    raw = torch.exp(-epsilon / spread) + 1
    if anchors.of_one_size:
        groups = raw.view(len(anchors.sizes), -1)
        return (groups / groups.amax(1, keepdim=True)).flatten()
    return torch.cat([x / x.amax() for x in anchors.split(raw)])


def _diversity(anchors: Anchors, kind: Diversity, epsilon: float, temperature: float, detached: bool) -> Tensor:
    """(A,) scores of one kind."""
    if kind not in ("std", "entropy"):
        one_of("diversity", kind, "std", "entropy", None)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
        if kind == "std":
            return std_diversity(anchors, epsilon)
        return entropy_diversity(anchors, epsilon, temperature)


# ----------------------------------------------------------------------------------------------------- losses


def diversity_contrastive_loss(
    sim: Anchors,
    temperature: float = 0.1,
    margin: float = 0.3,
    diversity: Diversity | Tensor = "std",
    epsilon: float = 0.1,
    detach_diversity: bool = True,
    positive_weight: PositiveWeight = "paper",
    positive: PositiveForm = "clamp",
    entropy_temperature: float = 1.0,
    reduction: Reduction = "mean",
    *,
    positives: Anchors | None = None,
) -> Any:
    r"""Return the diversity-sensitive contrastive loss, DCL (CODER Eq. 4-5).

    .. math::
        \ell_i = \mu \log\Bigl(1 + \sum_{j \in neg(i)} e^{(S_{ij} - \gamma) / (\mu d_i)}\Bigr)
                 - w \operatorname{mean}_{p \in pos(i)} \log(1 + S_{ip})

    with temperature μ, margin γ, diversity ``d_i`` and ``w = μ`` as printed. ``diversity=None`` is the implicit form
    (``d = 1``), and a tensor (A,) holds scores of your own. ``positives``: the same anchors with the candidates that
    their positives are among, instead of those of the negatives. See :class:`itrloss.DiversityContrastiveLoss`.
    """
    anchors = sim.both if isinstance(sim, Similarity) else _checked(sim)
    if positive not in _TERMS:
        one_of("positive", positive, *_TERMS)
    scale: float | Tensor = 1 / temperature
    if isinstance(diversity, Tensor):
        scale = scale / diversity
    elif diversity is not None:
        scale = scale / _diversity(anchors, diversity, epsilon, entropy_temperature, detach_diversity)
    repulsion = anchors.logsumexp(scale)
    attraction = (positives or anchors).mean_of_positives(_TERMS[positive])
    weight = temperature if positive_weight == "paper" else float(positive_weight)
    values = temperature * F.softplus(repulsion - scale * margin, threshold=40) - weight * attraction
    return anchors.reduce(values, reduction, None if positives is None else _valid(repulsion, positives))


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
) -> Any:
    r"""Return the memory-aided DCL, M-DCL (CODER Eq. 6): images against the memory's texts, texts against its images.

    It is :func:`diversity_contrastive_loss` over the memory's entries with another id than the anchor's, with the
    momentum keys of the batch as positives and

    .. math:: d_i = \tfrac12 (d_i^{batch} + d_i^{memory}).

    See :class:`itrloss.MemoryDiversityContrastiveLoss` for the options.
    """
    _checked_memory(sims)
    one_of("positive_from", positive_from, "key", "batch")
    one_of("diversity_from", diversity_from, "both", "batch")
    scores: Tensor | None = None
    if diversity is not None:
        options = diversity, epsilon, entropy_temperature, detach_diversity
        scores = _diversity(sims.batch.both, *options)
        if diversity_from == "both":
            scores = 0.5 * (scores + _diversity(sims.memory, *options))
    positives = sims.keys if positive_from == "key" else sims.batch.both
    given = temperature, margin, scores, epsilon, detach_diversity, positive_weight, positive, entropy_temperature
    return diversity_contrastive_loss(sims.memory, *given, reduction, positives=positives)


def hubness_aware_loss(
    sim: Anchors,
    scale: float = 90.0,
    margin: float = 0.5,
    reduction: Reduction = "mean",
    *,
    positive: PositiveForm = "clamp",
    positives: Anchors | None = None,
) -> Any:
    r"""Return the hubness-aware loss, HAL (in-batch part of USER Eq. 17).

    .. math::
        \frac1B \sum_i \Bigl[ \tfrac1\gamma \log\bigl(1 + \sum_{j \ne i} e^{\gamma (S_{ij} - \varepsilon)}\bigr)
        + \tfrac1\gamma \log\bigl(1 + \sum_{j \ne i} e^{\gamma (S_{ji} - \varepsilon)}\bigr) - \log(1 + S_{ii}) \Bigr]

    with ``scale`` γ and ``margin`` ε. In general: mean over rows of the row term, plus mean over columns of the column
    term, minus the mean over positive pairs of ``log(1 + S)``. With ``reduction="none"`` each direction carries one
    half of the positive term.

    ``positives``: the same anchors with the candidates that their positives are among; then the mean of ``log(1 + S)``
    over them is each anchor's own, as in a memory's terms of USER. See :class:`itrloss.HubnessAwareLoss`.
    """
    anchors = _both(sim)
    one_of("positive", positive, *_TERMS)
    repulsion = anchors.logsumexp(scale)
    if positives is None:
        attraction = 0.5 * anchors.per_pair(anchors.sum_of_positives(_TERMS[positive]))
    else:
        attraction = positives.mean_of_positives(_TERMS[positive])
    values = F.softplus(repulsion - scale * margin, threshold=40) / scale - attraction
    return anchors.reduce(values, reduction, None if positives is None else _valid(repulsion, positives))


def unified_training_objective(
    sims: MemorySimilarity,
    scale: float = 90.0,
    margin: float = 0.5,
    batch_weight: float = 1.0,
    reduction: Reduction = "mean",
    *,
    positive: PositiveForm = "clamp",
    image_memory_weight: float = 1.0,
    text_memory_weight: float = 1.0,
) -> Any:
    r"""Return the unified training objective, UTO (USER Eq. 18-21): HAL in the batch, and its rows against the memory.

    .. math::
        \lambda\, \mathrm{HAL} + \operatorname{mean}_i Q(v_i) + \operatorname{mean}_i Q(w_i), \qquad
        Q(x_i) = \tfrac1\gamma \log\bigl(1 + \sum_{q} e^{\gamma (S_{iq} - \varepsilon)}\bigr)
                 - \operatorname{mean}_{p \in pos(i)} \log(1 + \operatorname{cos}(x_i, k_p))

    with ``scale`` γ, ``margin`` ε and ``batch_weight`` λ, over the memory's entries q with another id than the
    anchor's, and the momentum keys k of its positives. ``text_memory_weight`` multiplies Q of the images, which ask the
    memory's texts, ``image_memory_weight`` that of the texts. See :class:`itrloss.UnifiedTrainingObjective`.
    """
    _checked_memory(sims)
    options: dict[str, Any] = {"scale": scale, "margin": margin, "reduction": reduction, "positive": positive}
    batch = hubness_aware_loss(sims.batch, **options)
    sides = zip((text_memory_weight, image_memory_weight), sims.memory.groups(), sims.keys.groups(), strict=True)
    queues = [(weight, hubness_aware_loss(memory, **options, positives=keys)) for weight, memory, keys in sides]
    if reduction != "none":
        return batch_weight * batch + sum(weight * value for weight, value in queues)
    return tuple(batch_weight * b + weight * value for b, (weight, (value,)) in zip(batch, queues, strict=True))


def info_nce_loss(sim: Anchors, temperature: float | Tensor = 0.07, reduction: Reduction = "mean") -> Any:
    r"""Return InfoNCE in both directions, with any number of positives.

    .. math:: \ell_i = \operatorname{mean}_{p \in pos(i)} -\log
        \frac{e^{S_{ip}/\tau}}{e^{S_{ip}/\tau} + \sum_{j \in neg(i)} e^{S_{ij}/\tau}}

    with the ``temperature`` τ, a number or a tensor of one value, which gets its gradient. A positive competes with the
    negatives, not with the anchor's other positives. With one positive per anchor this is the sum of the two
    cross-entropies; CLIP's loss is half of it.
    """
    anchors = _both(sim)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(anchors.dtype)  # its reciprocal in half precision would be far off
    scale = 1 / temperature
    loss = anchors.mean_of_positives(negative_log_likelihood, anchors.logsumexp(scale), scale)
    return anchors.reduce(loss, reduction)


def sigmoid_loss(
    sim: Similarity, scale: float | Tensor = 10.0, bias: float | Tensor = -10.0, reduction: Reduction = "mean"
) -> Any:
    r"""Return the sigmoid loss, SigLIP (Zhai et al., ICCV 2023, Eq. 1): every pair is a classification of its own.

    .. math:: \frac12 \Bigl(\frac1N + \frac1M\Bigr) \sum_{i,j} \log\bigl(1 + e^{-z_{ij} (a S_{ij} + b)}\bigr)

    with ``z = 1`` for a positive pair and -1 for a negative one, ``scale`` a and ``bias`` b, numbers or tensors of one
    value, which get their gradients. All pairs count, also those of an anchor without positives. Of a pair's value one
    half is its image's and the other its text's.
    """
    one_of("reduction", reduction, "mean", "sum", "none")
    anchors = _both(sim) if reduction == "none" else _checked(sim)
    for name, x in (("scale", scale), ("bias", bias)):
        if isinstance(x, Tensor) and x.numel() != 1:
            raise ValueError(f"{name}: expected a number or a tensor of one value, got shape {tuple(x.shape)}")
    # Each pair is visited once, from its row; for the values of both sides, from both.
    values = anchors.sum(softplus, scale, bias) + anchors.sum_of_positives(softplus, -scale, -bias)
    if reduction == "none":
        return anchors.split(0.5 * values)
    n, m = sim.shape
    return values.sum() * (0.5 / n + 0.5 / m) if reduction == "mean" else values.sum()


def triplet_loss(sim: Anchors, margin: float = 0.2, mining: Mining = "hardest", reduction: Reduction = "sum") -> Any:
    r"""Return the triplet ranking loss (VSE++): every positive pair against negatives of both its members.

    .. math:: \ell_i = \sum_{p \in pos(i)} \max_{j \in neg(i)} [\alpha - S_{ip} + S_{ij}]_+ \quad\text{("hardest")}

    or the sum over all negatives instead of the maximum (``"all"``); α is the ``margin``, in units of cosine
    similarity.
    """
    anchors = _both(sim)
    one_of("mining", mining, "hardest", "all")
    if mining == "hardest":
        values = anchors.sum_of_positives(hinge, anchors.hardest_negatives().values + margin)
    else:
        values = anchors.hinge_sum(margin)
    return anchors.reduce(values, reduction)


def prototype_classification_loss(
    image_concepts: Tensor,  # (B, F)
    text_concepts: Tensor,  # (B, F)
    weight: Tensor,  # (K, F)
    prototype_ids: Tensor,  # (B,)
    reduction: Reduction = "mean",
    engine: Engine = "auto",
) -> Any:
    r"""Return prototype-guided classification, PGC (CODER Eq. 7): cross-entropies of one linear classifier.

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
    named = (("image_concepts", image_concepts, "(B, F)"), ("text_concepts", text_concepts, "(B, F)"))
    for name, x, wanted in (*named, ("weight", weight, "(K, F)")):
        check_matrix(name, x, wanted, False)
    for name, x, _ in named:
        shape = (image_concepts.shape[0], weight.shape[1])
        if x.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
        if (x.dtype == torch.float64) != (weight.dtype == torch.float64):
            raise TypeError(f"{name}: expected float64 for a float64 weight and for no other, got {x.dtype}")
    one_of("reduction", reduction, "mean", "sum", "none")
    batch, classes = image_concepts.shape[0], weight.shape[0]
    ids = as_ids("prototype_ids", prototype_ids, batch, weight.device)
    if host_may_read(ids) and not 0 <= int(ids.amin()) <= int(ids.amax()) < classes:
        got = f"{int(ids.amin())} to {int(ids.amax())}"
        raise ValueError(f"prototype_ids: expected integers from 0 to {classes - 1}, got {got}")
    dtype = torch.promote_types(image_concepts.dtype, torch.float32)  # autocast does not join two half types
    both = torch.cat([image_concepts.to(dtype), text_concepts.to(dtype)])
    labels = ids.repeat(2), torch.arange(classes, device=ids.device)
    logits = Similarity._of(Embeddings(both, False), Embeddings(weight, False), labels, engine)
    values = logits.sum_of_positives(negative_log_likelihood, logits.logsumexp(), 1.0)
    if reduction == "none":
        return values[:batch], values[batch:]
    return values.sum() / batch if reduction == "mean" else values.sum()


# ----------------------------------------------------------------------------------------------------- shared


def _checked(sim: Anchors) -> Anchors:
    if not isinstance(sim, Anchors):
        wanted = "a Similarity; the classes in itrloss take embeddings and scores"
        raise TypeError(f"sim: expected {wanted}, got {type(sim).__name__}")
    return sim


def _both(sim: Anchors) -> Anchors:
    """Rows and columns of a similarity; other anchors as they are."""
    return sim.both if isinstance(sim, Similarity) else _checked(sim)


def _checked_memory(sims: MemorySimilarity) -> None:
    if not isinstance(sims, MemorySimilarity):
        wanted = "a MemorySimilarity; the classes in itrloss take embeddings, keys and a memory"
        raise TypeError(f"sims: expected {wanted}, got {type(sims).__name__}")


def _valid(repulsion: Tensor, positives: Anchors) -> Tensor:
    """(A,) which anchors have a negative, and a positive among the candidates for that."""
    valid = repulsion != -torch.inf
    return valid if positives.one_to_one else valid & (positives.positive_counts > 0)
