"""One pure function per equation, of a :class:`itrloss.Similarity` or of :class:`itrloss.Anchors`.

The class that each function refers to documents the equation and the options.

Losses share one reduction: ``"mean"`` is the mean over the image anchors plus the mean over the
text anchors, ``"sum"`` the sum over all anchors, and ``"none"`` the pair of per-anchor values
``(rows (N,), columns (M,))``. An anchor without a positive or without a negative contributes 0 and
does not count in a mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .anchors import Anchors, Limit
from .anchors import Reduction as Reduction
from .checks import Names, as_indices, check_embeddings, check_range, one_of
from .engine.relation import are_sets
from .engine.vectors import compute_dtype, host_may_read
from .memory import MemorySimilarity
from .sets import Aggregation as Aggregation
from .sets import PairReduction as PairReduction
from .sets import dynamic_orthogonal_loss as dynamic_orthogonal_loss
from .sets import set_similarity as set_similarity
from .sets import variance_aware_loss as variance_aware_loss
from .similarity import SIDES, Engine, Similarity
from .terms import excess, identity, log1p_clamp, log1p_relu, pair_term, softplus

#: A loss: a 0-dim tensor or, with ``reduction="none"``, the values of each anchor.
Values = Tensor | tuple[Tensor, ...]
Similarities = TypeVar("Similarities", bound=Anchors)
Diversity = Literal["std", "entropy", None]
Mining = Literal["hardest", "all", "batch-hard"]
PositiveWeight = float | Literal["paper"]
PositiveForm = Literal["clamp", "relu"]
PositiveFrom = Literal["key", "batch"]
DiversityFrom = Literal["both", "batch"]
NegativesFrom = Literal["memory", "batch"]

_SHARP = 2.0**40  # so sharp a soft minimum of scores is their minimum, but for rounding
ATTRACTIONS = {"clamp": log1p_clamp, "relu": log1p_relu}


def std_diversity(sim: Anchors, epsilon: float = 0.1) -> Tensor:
    r"""Return the (N,) diversity of each row's negatives by their standard deviation (CODER Eq. 3).

    .. math::
        \mathrm{raw}_i = 1 + e^{-\epsilon / SD_i}, \qquad
        \mathrm{div}_i = \mathrm{raw}_i / \max_k \mathrm{raw}_k

    ``SD_i`` is the population standard deviation of ``{S_ij : j negative}``, at least 1e-6. The
    score is low for negatives that are all equally far away, above ½, and 1 for the most diverse
    row. Differentiable. For the columns pass ``sim.T``; for both ``sim.both``, where each side is
    divided by its own maximum.
    """
    _check_similarity("sim", sim)
    return _diversity([sim], "std", epsilon)


def entropy_diversity(sim: Anchors, epsilon: float = 0.1, temperature: float = 1.0) -> Tensor:
    r"""Return the (N,) diversity of each row's negatives by the entropy of its similarities (CODER
    supplement, Eq. 8).

    The formula of :func:`std_diversity` with ``H_i = -sum_{j negative} P_ij log2 P_ij`` in place of
    ``SD_i``, where ``P_i`` is the softmax of ``S_i / temperature`` over all candidates. At
    temperature 1, with 128 candidates, H is within about 2 % of log2 128 and every score
    practically 1. One of the order of the scores' spread is informative.
    """
    _check_similarity("sim", sim)
    return _diversity([sim], "entropy", epsilon, temperature)


def _diversity(
    several: Sequence[Anchors],
    kind: Diversity,
    epsilon: float,
    temperature: float = 1.0,
    detached: bool = False,
    own: Anchors | None = None,
) -> Tensor:
    """Return the (A,) diversity of each anchor's negatives, at most 1 in each group.

    ``several``: the same anchors with the candidates over which diversities are averaged. If those
    of the loss, its ``own``, come first, the others count where they have a negative.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detached):
        together = several[0] if len(several) == 1 else Anchors.together(*several)
        if kind == "std":
            spread = together.std()
        else:
            one_of("diversity", kind, "std", "entropy", None)
            spread = together.entropy(temperature).clamp_min(1e-6)
        diversity = together.over_group_amax(torch.exp(-epsilon / spread) + 1)
        if len(several) == 1:
            return diversity
        of_each = diversity.view(len(several), -1)
        if own is not several[0]:
            return of_each.mean(0)
        exists = torch.stack([anchors.counts(positive=False) > 0 for anchors in several[1:]])
        return (of_each[0] + (of_each[1:] * exists).sum(0)) / (1 + exists.sum(0))


def diversity_contrastive_loss(  # noqa: PLR0913 (the options of the module)
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
    diversity_of: Sequence[Anchors] = (),
) -> Any:
    """Return the loss of :class:`itrloss.DiversityContrastiveLoss`.

    A tensor (A,) for ``diversity`` holds diversity scores of your own. ``positives``: the same
    anchors with other candidates, from which the positives are taken, while the negatives come from
    ``sim``. ``diversity_of``: the same anchors with the candidates over which diversities are
    averaged; after ``sim`` itself, as a memory, those with a negative of the anchor.
    """
    anchors = _anchors(sim)
    one_of("positive", positive, *ATTRACTIONS)
    at_most = None
    if diversity is not None and not isinstance(diversity, Tensor):
        settings = diversity, epsilon, entropy_temperature, detach_diversity
        diversity = _diversity(diversity_of or [anchors], *settings, anchors)
        if epsilon >= 0:  # then a diversity is in [1/2, 1]
            at_most = 2 / temperature
    scale: float | Tensor = 1 / temperature
    if diversity is not None:
        scale = (temperature * diversity).reciprocal()
    repulsion = anchors.log1p_sum_exp(scale, margin, at_most=at_most)
    own = anchors if positives is None else positives
    attraction = own.mean_of_positives(ATTRACTIONS[positive])
    weight = temperature if positive_weight == "paper" else float(positive_weight)
    values = torch.add(temperature * repulsion, attraction, alpha=-weight)
    valid = None if positives is None else _valid(anchors, positives)
    return anchors.reduce(values, reduction, valid)


def memory_diversity_contrastive_loss(
    sims: MemorySimilarity,
    *,
    positive_from: PositiveFrom = "key",
    diversity_from: DiversityFrom = "both",
    negatives_from: NegativesFrom = "memory",
    **options: Any,
) -> Any:
    """Return the memory-aided DCL, M-DCL; see :class:`itrloss.MemoryDiversityContrastiveLoss`.

    ``options``: see :func:`diversity_contrastive_loss`.
    """
    _check_similarity("sims", sims, MemorySimilarity)
    one_of("positive_from", positive_from, "key", "batch")
    one_of("diversity_from", diversity_from, "both", "batch")
    positives = sims.keys if positive_from == "key" else sims.anchors
    diversity_of = [sims.anchors]
    if diversity_from == "both":
        diversity_of.append(sims.memory)
    negatives = sims.memory
    if negatives_from != "memory":
        one_of("negatives_from", negatives_from, "memory", "batch")
        negatives = sims.anchors
    return diversity_contrastive_loss(
        negatives, positives=positives, diversity_of=diversity_of, **options
    )


def hubness_aware_loss(
    sim: Anchors,
    scale: float = 90.0,
    margin: float = 0.5,
    reduction: Reduction = "mean",
    *,
    positive: PositiveForm = "clamp",
    positives: Anchors | None = None,
) -> Any:
    """Return the hubness-aware loss, HAL; see :class:`itrloss.HubnessAwareLoss`.

    With ``reduction="none"`` each direction has one half of the positive term. ``positives``: as in
    :func:`diversity_contrastive_loss`. Then the mean of ``log(1 + S)`` is over each anchor's own
    positives, as in the memory's terms of :class:`itrloss.UnifiedTrainingObjective`.
    """
    anchors = _anchors(sim)
    one_of("positive", positive, *ATTRACTIONS)
    if positives is not None:
        values = _against_queues(anchors, positives, scale, margin, positive)
        return anchors.reduce(values, reduction, _valid(anchors, positives))
    repulsion = anchors.log1p_sum_exp(scale, margin) / scale
    attraction = anchors.per_pair(anchors.sum_of_positives(ATTRACTIONS[positive], weights="factor"))
    return anchors.reduce(torch.add(repulsion, attraction, alpha=-0.5), reduction)


def _against_queues(
    queues: Anchors, keys: Anchors, scale: float, margin: float, positive: PositiveForm
) -> Tensor:
    """Return the (A,) values of anchors with a memory's negatives and momentum keys as positives
    (USER Eq. 19 and 20).
    """
    repulsion = queues.log1p_sum_exp(scale, margin) / scale
    return repulsion - keys.mean_of_positives(ATTRACTIONS[positive])


def unified_training_objective(
    sims: MemorySimilarity,
    scale: float = 90.0,
    margin: float = 0.5,
    reduction: Reduction = "mean",
    *,
    positive: PositiveForm = "clamp",
    batch_weight: float = 1.0,
    image_memory_weight: float = 1.0,
    text_memory_weight: float = 1.0,
) -> Any:
    """Return the unified training objective, UTO; see :class:`itrloss.UnifiedTrainingObjective`."""
    _check_similarity("sims", sims, MemorySimilarity)
    batch = hubness_aware_loss(sims.anchors, scale, margin, reduction, positive=positive)
    values = _against_queues(sims.memory, sims.keys, scale, margin, positive)
    # images have the memory's texts as negatives, and texts its images
    weights = text_memory_weight, image_memory_weight
    if weights != (1.0, 1.0):
        parts = zip(SIDES[sims.directions], sims.memory.split(values), strict=True)
        values = torch.cat([weights[side] * part for side, part in parts])
    queues = sims.memory.reduce(values, reduction, _valid(sims.memory, sims.keys))
    if reduction != "none":
        return torch.add(queues, batch, alpha=batch_weight)
    pairs = zip(queues, batch, strict=True)
    return tuple(torch.add(of_queue, of_batch, alpha=batch_weight) for of_queue, of_batch in pairs)


def info_nce_loss(
    sim: Anchors,
    temperature: float | Tensor = 0.07,
    reduction: Reduction = "mean",
    *,
    hardness: float = 0.0,
    label_smoothing: float = 0.0,
    positives: Anchors | None = None,
    below: Limit = None,
    guide: Anchors | None = None,
) -> Any:
    """Return InfoNCE in both directions, with any number of positives; see
    :class:`itrloss.InfoNCELoss`.

    ``temperature``: a number or a tensor of one value, which gets a gradient. ``positives``: as in
    :func:`diversity_contrastive_loss`. Negatives count ``below`` a limit, of a ``guide``'s scores
    if there is one: see :meth:`itrloss.Anchors.logsumexp`.
    """
    anchors = _anchors(sim)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(anchors.dtype)  # its reciprocal in half types is inaccurate
    elif not temperature > 0:
        raise ValueError(f"temperature: expected a number above 0, got {temperature}")
    scale = 1 / temperature
    negatives = hard_logsumexp(anchors, scale, hardness, below, guide)
    own = anchors if positives is None else positives
    # -log p = log(1 + exp(L - a S)) with the negatives' log-sum-exp L
    values = own.mean_of_positives(softplus, scale=-scale, shift=negatives)
    if label_smoothing:
        lead = anchors.mean_of_positives(identity) - mean_of_candidates(anchors)
        values = values + label_smoothing * scale * lead
    valid = None if positives is None else _valid(anchors, positives)
    return anchors.reduce(values, reduction, valid)


def mean_of_candidates(anchors: Anchors) -> Tensor:
    """Return the (A,) mean scores of all candidates, whose labels are smooth; 0 without any."""
    number = anchors.positive_counts + anchors.negative_counts
    return anchors.sum(identity, over="all") / number.clamp_min(1)


def _valid(anchors: Anchors, positives: Anchors) -> Tensor:
    """Return the (A,) mask of anchors with a negative, and with a positive among others."""
    valid = anchors.counts(positive=False) > 0
    if positives.one_to_one:
        return valid
    return valid & (positives.counts(positive=True) > 0)


def hard_logsumexp(
    anchors: Anchors,
    scale: float | Tensor,
    hardness: float,
    below: Limit,
    guide: Anchors | None,
) -> Tensor:
    """Return the (A,) log-sum-exp of ``scale S + hardness S`` over negatives, whose second part has
    no gradient.
    """
    if hardness == 0:
        return anchors.logsumexp(scale, below=below, guide=guide)
    share = scale / (scale + hardness)
    rest = hardness / (scale + hardness)  # 1 - share could be 0: times an empty sum's -inf, nan
    if isinstance(share, Tensor) and isinstance(rest, Tensor):
        share = share.detach()
        rest = rest.detach()
    whole = anchors.logsumexp(scale / share, below=below, guide=guide)
    return share * whole + rest * whole.detach()


@pair_term
def _taught(scores: Tensor, teacher: Tensor, scale: Tensor, norm: Tensor) -> Tensor:
    """Return ``S`` times its probability for a teacher, ``exp(a T - L)``."""
    log_p = scale * teacher - norm
    return scores * log_p.clamp_max(80.0).exp()  # pairs that are left out may overflow


def distillation_loss(
    sim: Anchors,
    teacher: Anchors,
    temperature: float | Tensor = 0.07,
    teacher_temperature: float | Tensor = 0.07,
    reduction: Reduction = "mean",
) -> Any:
    """Return the cross-entropy against a teacher's softmax over all candidates; see
    :class:`itrloss.DistillationLoss`.

    ``teacher``: the same anchors of the teacher's similarities, which get no gradient.
    """
    anchors = _anchors(sim)
    teacher = check_other_model("teacher", teacher, sim).both.detach()
    if isinstance(temperature, Tensor):
        temperature = temperature.to(anchors.dtype)
    norm = teacher.logsumexp(1 / teacher_temperature, over="all").to(anchors.dtype)
    expected = anchors.sum(_taught, 1 / teacher_temperature, norm, over="all", guide=teacher)
    values = anchors.logsumexp(1 / temperature, over="all") - expected / temperature
    return anchors.reduce(values, reduction, values != -torch.inf)


def memory_info_nce_loss(
    sims: MemorySimilarity,
    temperature: float | Tensor = 0.07,
    reduction: Reduction = "mean",
    *,
    memory_positives: bool = True,
    batch_negatives: bool = True,
    distillation: float = 0.0,
    teacher: MemorySimilarity | None = None,
) -> Any:
    """Return InfoNCE against a memory; see :class:`itrloss.MemoryInfoNCELoss`.

    ``teacher``: the similarities of the batch's keys, in place of the batch, with the same
    candidates; needed for ``distillation``.
    """
    _check_similarity("sims", sims, MemorySimilarity)
    candidates = sims.memory
    if batch_negatives:
        candidates = Anchors.pooled(sims.keys, sims.memory)
    pairs = sims.batch.pairs
    have_ids = are_sets(pairs.ids) or any(x is not None for x in pairs.ids_as_passed)
    if batch_negatives and memory_positives and have_ids:
        scale = 1 / temperature
        values = candidates.logsumexp(scale, over="all")
        values = values - scale * candidates.mean_of_positives(identity)
        contrast = candidates.reduce(values, reduction)
    else:
        contrast = info_nce_loss(candidates, temperature, reduction, positives=sims.keys)
    if not distillation:
        return contrast
    _check_similarity("teacher", teacher, MemorySimilarity)
    assert teacher is not None
    taught = Anchors.pooled(teacher.keys, teacher.memory)
    sharpness = temperature.detach() if isinstance(temperature, Tensor) else temperature
    imitation = distillation_loss(candidates, taught, temperature, sharpness, reduction)
    return weighted_mean(contrast, imitation, distillation)


def weighted_mean(first: Values, second: Values, weight: float) -> Values:
    """Return ``(1 - w) a + w b`` of two losses, or of two tuples of values of each anchor."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.lerp(first, second, weight)
    return tuple(torch.lerp(a, b, weight) for a, b in zip(first, second, strict=True))


def sigmoid_loss(
    sim: Anchors,
    scale: float | Tensor = 10.0,
    bias: float | Tensor = -10.0,
    reduction: Reduction = "mean",
) -> Any:
    """Return the sigmoid loss, SigLIP; see :class:`itrloss.SigmoidLoss`.

    ``scale`` and ``bias`` are numbers or tensors of one value, which get gradients.
    """
    _check_similarity("sim", sim)
    one_of("reduction", reduction, "mean", "sum", "none")
    for name, x in (("scale", scale), ("bias", bias)):
        if isinstance(x, Tensor) and x.numel() != 1:
            raise ValueError(
                f"{name}: expected a number or a tensor of one value, got shape {tuple(x.shape)}"
            )
    if isinstance(sim, Similarity) and reduction != "none":
        # A sum over the rows has each pair once.
        total = sim.weighted_sum(softplus, scale=scale, shift=bias)
        positives = sim.sum_of_positives(softplus, scale=-scale, shift=-bias, weights="factor")
        total = total + positives.sum()
        return sim.total(total) if reduction == "sum" else _per_row_and_column(sim, total)
    # Values of anchors need the columns, too.
    anchors = sim.both
    values = anchors.sum(softplus, scale=scale, shift=bias)
    values = values + anchors.sum_of_positives(
        softplus, scale=-scale, shift=-bias, weights="factor"
    )
    # One half of a pair's value counts for its row and the other for its column, if both are there.
    existing = anchors.counts(positive=True) + anchors.counts(positive=False) > 0
    return anchors.reduce(values / len(anchors.sizes), reduction, existing)


def _per_row_and_column(sim: Similarity, total: Tensor) -> Tensor:
    """Return a total of pairs, divided by the numbers of rows and of columns that exist, one half
    by each.
    """
    pairs = sim.pairs
    if sim.share is None and pairs.others_are_negatives and pairs.all_exist:
        n, m = pairs.shape
        return total * (0.5 / n + 0.5 / m)
    rows, cols = [side.positive_counts + side.negative_counts > 0 for side in (sim, sim.T)]
    numbers = torch.stack([total, rows.sum().to(total), cols.sum().to(total)])
    total, n, m = sim.total(numbers)
    # The batches of several processes may all be empty.
    return total * (0.5 / n.clamp_min(1) + 0.5 / m.clamp_min(1))


def triplet_loss(
    sim: Anchors,
    margin: float = 0.2,
    mining: Mining = "hardest",
    reduction: Reduction = "sum",
    *,
    temperature: float | None = None,
) -> Any:
    """Return the triplet ranking loss of VSE++, or with a ``temperature`` its soft form; see
    :class:`itrloss.TripletLoss`.
    """
    anchors = _anchors(sim)
    check_mining(mining, temperature)
    if mining == "all":
        return anchors.reduced_hinge_sum(margin, reduction)
    term = excess
    scale = 1.0
    shift = anchors.hardest_negatives().values + margin
    if mining == "batch-hard":
        lead = shift - lowest_positives(anchors)
        if temperature is None:
            values = lead.relu()
        else:
            values = F.softplus(lead / temperature, threshold=40)
        return anchors.reduce(values, reduction)
    if temperature is not None:
        term = softplus
        scale = 1 / temperature
        shift = scale * shift
    values = anchors.sum_of_positives(term, scale=-scale, shift=shift, weights="factor")
    return anchors.reduce(values, reduction)


def lowest_positives(anchors: Anchors) -> Tensor:
    """Return the (A,) scores of the anchors' lowest positives, very large without any."""
    log = anchors.logsumexp(-_SHARP, over="positives")
    return -log.clamp_min(torch.finfo(log.dtype).min) / _SHARP


def check_mining(mining: str, temperature: float | None) -> None:
    """Raise a ValueError unless the negatives that count are known, and fit the temperature."""
    one_of("mining", mining, "hardest", "all", "batch-hard")
    if mining == "all" and temperature is not None:
        expected = "expected None with mining='all', as the soft form has the hardest negative"
        raise ValueError(f"temperature: {expected}, got {temperature}")


def prototype_classification_loss(
    image_concepts: Tensor,  # (B, F)
    text_concepts: Tensor,  # (B, F)
    weight: Tensor,  # (K, F)
    prototype_ids: Tensor,  # (B,)
    reduction: Reduction = "mean",
    engine: Engine = "auto",
) -> Any:
    """Return prototype-guided classification, PGC; see
    :class:`itrloss.PrototypeClassificationLoss`.

    Args:
        image_concepts, text_concepts: (B, F) v and w of the same pairs, taken as they are.
        weight: (K, F) the classifier P.
        prototype_ids: (B,) integers z in [0, K). Others raise an error on the CPU; elsewhere the
            result is undefined.
        reduction, engine: as there.
    """
    for name, x in (("image_concepts", image_concepts), ("text_concepts", text_concepts)):
        check_embeddings(weight, x, False, Names("weight", name))
    shape = tuple(image_concepts.shape)
    if text_concepts.shape != shape:
        raise ValueError(f"text_concepts: expected shape {shape}, got {tuple(text_concepts.shape)}")
    one_of("reduction", reduction, "mean", "sum", "none")
    batch = len(image_concepts)
    classes = len(weight)
    ids = as_indices("prototype_ids", prototype_ids, batch, weight.device)
    if host_may_read(ids):
        check_range("prototype_ids", ids, classes - 1)
    dtype = compute_dtype(weight)  # autocast cannot concatenate float16 and bfloat16
    both = torch.cat([image_concepts.to(dtype), text_concepts.to(dtype)])
    class_ids = torch.arange(classes, device=ids.device)
    logits = Similarity(both, weight, ids.repeat(2), class_ids, normalize=False, engine=engine)
    values = logits.sum_of_positives(softplus, scale=-1.0, shift=logits.logsumexp())
    if reduction == "none":
        return values[:batch], values[batch:]
    total = values.sum()
    return total / batch if reduction == "mean" else total


def _anchors(sim: Anchors) -> Anchors:
    """Return the rows and columns of a similarity; raise an error if it is none."""
    if not isinstance(sim, Anchors):
        _check_similarity("sim", sim)
    return sim.both


def check_other_model(name: str, other: Similarities, sim: Anchors) -> Similarities:
    """Return another model's similarities, which have to be of as many rows and columns."""
    _check_similarity(name, other)
    own_shapes = sim.both.shapes
    other_shapes = other.both.shapes
    if own_shapes != other_shapes:
        got = f"{other_shapes[0]} with {own_shapes[0]}"
        raise ValueError(
            f"{name}: expected similarities of the same images and texts, got a matrix of {got}"
        )
    if other.device != sim.device:
        raise ValueError(f"{name}: expected device {sim.device}, got {other.device}")
    return other


def _check_similarity(name: str, x: object, kind: type = Anchors) -> None:
    """Raise a TypeError unless ``x`` is a similarity of the kind."""
    if not isinstance(x, kind):
        wanted = "Similarity" if kind is Anchors else kind.__name__
        expected = f"expected a {wanted} (the classes in itrloss take tensors)"
        raise TypeError(f"{name}: {expected}, got {type(x).__name__}")
