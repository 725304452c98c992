"""The equations beyond one batch of single vectors: memories, sets, prototypes, in the manner of
`oracle`.

They are plain loops over pairs in float64, written from the papers and the design page and not from
the library.

Conventions are those of `oracle`: images are rows, texts are columns, pairs of equal integer ids
are positive, and ``reduction="none"`` gives the pair ``(images, texts)`` of per-anchor values,
where an invalid anchor's value is exactly 0. Embeddings are not normalised, every score is their
cosine, and a zero vector scores 0.

Papers: CODER (Wang et al., ECCV 2022), USER (Zhang et al., 2023), DVSE (Wei et al., 2023), SigLIP
(Zhai et al., ICCV 2023), DivE (Kim et al., CVPR 2023), spherical k-means (Dhillon & Modha, 2001).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from support import oracle
from support.oracle import (
    SCORE_FLOOR,
    Array,
    Ids,
    PerAnchor,
    _log_sum_exp,
    _negatives,
    _one_of,
    _positives,
    cosine,
)

# ------------------------------------------------------------------------------------ memory losses


def memory_dcl(  # noqa: PLR0913 (the arguments and options of the loss)
    V: ArrayLike,
    W: ArrayLike,
    V_keys: ArrayLike,
    W_keys: ArrayLike,
    memory_images: ArrayLike,
    memory_texts: ArrayLike,
    image_ids: Ids,
    text_ids: Ids,
    memory_ids: Ids,
    *,
    temperature: float = 0.1,
    margin: float = 0.3,
    diversity: str | tuple[ArrayLike, ArrayLike] | None = "std",
    epsilon: float = 0.1,
    entropy_temperature: float = 1.0,
    positive_weight: str | float = "paper",
    positive: str = "clamp",
    positive_from: str = "key",
    diversity_from: str = "both",
    reduction: str = "mean",
) -> Any:
    """Memory-aided diversity-sensitive contrastive loss, CODER Eq. 6: V (N, D), W (M, D), memories
    (Q, D).

    For image anchor n, with the memory *texts* q of other ids as negatives: ``ℓ_n = μ log(1 + Σ_{q:
    id_q ≠ id_n} exp((cos(v_n, b_q) − γ)/(μ d_n))) − w mean_p log(1 + cos(v_n, w_p^key))``, p over
    the text keys of the anchor's id (``positive_from="batch"``: over the texts w_p themselves), w =
    μ for ``"paper"``. Memory entries of the anchor's id are neither negatives nor positives. Text
    anchors have the memory *images* as negatives, and positives from ``V_keys``. d is
    `memory_diversity` (``diversity_from="batch"``: of an empty memory), or the two arrays (N,) and
    (M,) given as ``diversity``, or 1 for None. An anchor without a positive or without a negative
    in the memory is invalid.

    Eq. 6 prints ``L_DCL(V, B_w) + L_DCL(W, B_v)``; ``L_DCL`` of Eq. 5 is a sum of two directions,
    of which one would have memory entries as anchors. This is only the direction whose anchors are
    in the batch.
    """
    _one_of("positive", positive, ("clamp", "relu"))
    _one_of("positive_from", positive_from, ("key", "batch"))
    _one_of("diversity_from", diversity_from, ("both", "batch"))
    weight = temperature if positive_weight == "paper" else float(positive_weight)
    floor = SCORE_FLOOR if positive == "clamp" else 0.0
    if diversity is None:
        image_div = np.ones(len(np.asarray(V)))
        text_div = np.ones(len(np.asarray(W)))
    elif isinstance(diversity, tuple):
        image_div, text_div = (np.asarray(d, np.float64) for d in diversity)
    else:
        estimated_in = memory_ids if diversity_from == "both" else []
        embeddings = (V, W, memory_images, memory_texts, image_ids, text_ids, estimated_in)
        image_div, text_div = memory_diversity(*embeddings, diversity, epsilon, entropy_temperature)

    def anchors(
        queries: ArrayLike, keys: ArrayLike, memory: ArrayLike, ids: Ids, key_ids: Ids, div: Array
    ) -> Array:
        near = cosine(queries, keys)
        far = cosine(queries, memory)
        values = np.zeros(len(near))
        for n in _valid_in_memory(ids, key_ids, memory_ids):
            exponents = [
                (far[n, q] - margin) / (temperature * div[n])
                for q in _negatives(n, ids, memory_ids)
            ]
            logs = [math.log(1 + max(near[n, p], floor)) for p in _positives(n, ids, key_ids)]
            values[n] = temperature * _log_sum_exp([0.0, *exponents]) - weight * math.fsum(
                logs
            ) / len(logs)
        return values

    image_positives, text_positives = (W_keys, V_keys) if positive_from == "key" else (W, V)
    images = anchors(V, image_positives, memory_texts, image_ids, text_ids, image_div)
    texts = anchors(W, text_positives, memory_images, text_ids, image_ids, text_div)
    valid_images = _valid_in_memory(image_ids, text_ids, memory_ids)
    valid_texts = _valid_in_memory(text_ids, image_ids, memory_ids)
    return _reduce(images, texts, valid_images, valid_texts, reduction)


def memory_info_nce(  # noqa: PLR0913 (the arguments and options of the loss)
    V: ArrayLike,
    W: ArrayLike,
    V_keys: ArrayLike,
    W_keys: ArrayLike,
    memory_images: ArrayLike,
    memory_texts: ArrayLike,
    image_ids: Ids,
    text_ids: Ids,
    memory_ids: Ids,
    *,
    temperature: float = 0.07,
    batch_negatives: bool = True,
    distillation: float = 0.0,
    reduction: str = "mean",
) -> Any:
    """InfoNCE against a memory, MoCo Eq. 1; with ``distillation`` α, ALBEF Eq. 6.

    Image n: ``(1 - α) mean_p -log(e^{S_np/τ} / (e^{S_np/τ} + Z_n)) - α Σ_j q_nj log p_nj``. p over
    the text keys of its id; ``Z_n`` over the memory's texts of other ids and, with
    ``batch_negatives``, the text keys of other ids. The softmaxes ``p_n`` of the image's and
    ``q_n`` of its key's scores are over all text keys and all entries of the memory. An anchor
    without a positive or a negative is invalid, and its first part 0; the mean is over valid ones.
    """
    sides = (
        (V, V_keys, W_keys, memory_texts, image_ids, text_ids),
        (W, W_keys, V_keys, memory_images, text_ids, image_ids),
    )
    parts: list[tuple[Array, list[int], Array]] = []
    for queries, own_keys, keys, memory, ids, key_ids in sides:
        near = cosine(queries, keys)
        far = cosine(queries, memory)
        taught_near = cosine(own_keys, keys)
        taught_far = cosine(own_keys, memory)
        contrast = np.zeros(len(near))
        imitation = np.zeros(len(near))
        valid = []
        for n in range(len(near)):
            exponents = [far[n, q] / temperature for q in _negatives(n, ids, memory_ids)]
            if batch_negatives:
                exponents += [near[n, q] / temperature for q in _negatives(n, ids, key_ids)]
            positives = [near[n, p] / temperature for p in _positives(n, ids, key_ids)]
            if exponents and positives:
                valid.append(n)
                losses = [_log_sum_exp([x, *exponents]) - x for x in positives]
                contrast[n] = math.fsum(losses) / len(losses)
            scores = [x / temperature for x in (*near[n], *far[n])]
            taught = [x / temperature for x in (*taught_near[n], *taught_far[n])]
            q = [math.exp(x - _log_sum_exp(taught)) for x in taught]
            imitation[n] = _log_sum_exp(scores) - math.fsum(
                map(math.prod, zip(q, scores, strict=True))
            )
        parts.append((contrast, valid, imitation))
    contrasts = _reduce(*[part[0] for part in parts], *[part[1] for part in parts], reduction)
    everyone = [range(len(part[0])) for part in parts]
    imitations = _reduce(*[part[2] for part in parts], *everyone, reduction)
    if reduction != "none":
        return (1 - distillation) * contrasts + distillation * imitations
    pairs = zip(contrasts, imitations, strict=True)
    return tuple((1 - distillation) * a + distillation * b for a, b in pairs)


def memory_diversity(  # noqa: PLR0913 (the arguments and options of the loss)
    V: ArrayLike,
    W: ArrayLike,
    memory_images: ArrayLike,
    memory_texts: ArrayLike,
    image_ids: Ids,
    text_ids: Ids,
    memory_ids: Ids,
    diversity: str = "std",
    epsilon: float = 0.1,
    entropy_temperature: float = 1.0,
) -> PerAnchor:
    """Diversity of each image (N,) and each text (M,) with a memory, CODER below Eq. 6.

    ``d = ½ (div^batch + div^memory)``: div^batch of ``cos(V, W)`` (transposed for texts),
    div^memory of ``cos(V, memory_texts)`` (of ``cos(W, memory_images)`` for texts), each divided by
    its own maximum over all anchors of its side, the average not divided again. The softmax of
    ``"entropy"`` runs over all entries of its matrix, those of the anchor's own id too. With an
    empty memory (no anchor is valid then) d = div^batch.
    """
    _one_of("diversity", diversity, ("std", "entropy"))

    def score(S: Array, ids: Ids, other_ids: Ids) -> Array:
        if diversity == "std":
            return oracle.std_diversity(S, ids, other_ids, epsilon)
        return oracle.entropy_diversity(S, ids, other_ids, epsilon, entropy_temperature)

    S = cosine(V, W)
    images = score(S, image_ids, text_ids)
    texts = score(S.T, text_ids, image_ids)
    if len(np.asarray(memory_ids)) == 0:
        return images, texts
    image_memory = score(cosine(V, memory_texts), image_ids, memory_ids)
    text_memory = score(cosine(W, memory_images), text_ids, memory_ids)
    return (images + image_memory) / 2, (texts + text_memory) / 2


def uto(  # noqa: PLR0913 (the arguments and options of the loss)
    V: ArrayLike,
    W: ArrayLike,
    V_keys: ArrayLike,
    W_keys: ArrayLike,
    memory_images: ArrayLike,
    memory_texts: ArrayLike,
    image_ids: Ids,
    text_ids: Ids,
    memory_ids: Ids,
    *,
    scale: float = 90.0,
    margin: float = 0.5,
    batch_weight: float = 1.0,
    image_memory_weight: float = 1.0,
    text_memory_weight: float = 1.0,
    reduction: str = "mean",
) -> Any:
    """Unified training objective, USER Eq. 18–21: ``λ HAL(batch) + Q(texts, images in memory) +
    Q(images, texts)``.

    ``Q_i = (1/γ) log(1 + Σ_{q: id_q ≠ id_i} exp(γ(S_iq − ε))) − mean_p log(1 + cos(anchor_i,
    key_p))``, p over the keys of the anchor's id on the other side, that cosine floored at −1 +
    1e-6. HAL is `oracle.hal`.

    * ``"mean"``: λ times HAL's mean + mean of Q over valid images + mean of Q over valid texts;
    * ``"sum"``: λ times HAL's sum + sums of Q;
    * ``"none"``: ``λ HAL_i + Q_i`` of each anchor. Validity in HAL (a negative in the batch) and in
      Q (a negative in the memory) are separate conditions; an invalid part is 0.

    Eq. 18 and 19 print the positive term outside the mean, and Eq. 19 prints it between two keys
    (no gradient); here it is inside, between the anchor and the other side's key. They sum over the
    whole queue; here entries of the anchor's id are excluded.
    """

    def anchors(
        queries: ArrayLike, keys: ArrayLike, memory: ArrayLike, ids: Ids, key_ids: Ids
    ) -> Array:
        near = cosine(queries, keys)
        far = cosine(queries, memory)
        values = np.zeros(len(near))
        for i in _valid_in_memory(ids, key_ids, memory_ids):
            exponents = [scale * (far[i, q] - margin) for q in _negatives(i, ids, memory_ids)]
            logs = [math.log(1 + max(near[i, p], SCORE_FLOOR)) for p in _positives(i, ids, key_ids)]
            values[i] = _log_sum_exp([0.0, *exponents]) / scale - math.fsum(logs) / len(logs)
        return values

    batch = oracle.hal(cosine(V, W), image_ids, text_ids, scale, margin, reduction)
    images = text_memory_weight * anchors(V, W_keys, memory_texts, image_ids, text_ids)
    texts = image_memory_weight * anchors(W, V_keys, memory_images, text_ids, image_ids)
    if reduction == "none":
        return batch_weight * batch[0] + images, batch_weight * batch[1] + texts
    valid_images = _valid_in_memory(image_ids, text_ids, memory_ids)
    valid_texts = _valid_in_memory(text_ids, image_ids, memory_ids)
    return batch_weight * batch + _reduce(images, texts, valid_images, valid_texts, reduction)


# ------------------------------------------------------------------------------------ in-batch loss


def sigmoid(
    S: ArrayLike,
    row_ids: Ids,
    col_ids: Ids,
    scale: float = 10.0,
    bias: float = -10.0,
    reduction: str = "mean",
) -> Any:
    """Pairwise sigmoid loss, SigLIP Eq. 1: ``ℓ_ij = log(1 + exp(−z_ij (t S_ij + b)))``, z = 1 if
    positive else −1.

    All pairs count, and no anchor is invalid. Each ℓ_ij is divided equally between its image and
    its text: ``rows_i = ½ Σ_j ℓ_ij``, ``cols_j = ½ Σ_i ℓ_ij``; ``"sum"`` is ``Σ_ij ℓ_ij``,
    ``"mean"`` is mean(rows) + mean(cols), which for N = M is the paper's ``(1/N) Σ_ij ℓ_ij``.
    """
    S = np.asarray(S, np.float64)
    rows = np.zeros(S.shape[0])
    cols = np.zeros(S.shape[1])
    for i in range(S.shape[0]):
        positives = _positives(i, row_ids, col_ids)
        for j in range(S.shape[1]):
            z = 1.0 if j in positives else -1.0
            loss = _log_sum_exp([0.0, -z * (scale * S[i, j] + bias)])
            rows[i] += loss / 2
            cols[j] += loss / 2
    return _reduce(rows, cols, range(len(rows)), range(len(cols)), reduction)


# --------------------------------------------------------------------------------------------- sets


def set_cosine(V_sets: ArrayLike, W: ArrayLike) -> Array:
    """``S^k_ij = cos(v_i^k, w_j)``: (N, K, D) and (M, D) -> (N, K, M)."""
    sets = np.asarray(V_sets, np.float64)
    texts = np.asarray(W, np.float64)
    S = np.zeros((*sets.shape[:2], len(texts)))
    for i in range(len(sets)):
        S[i] = cosine(sets[i], texts)
    return S


def variance_aware(
    V_sets: ArrayLike,
    W: ArrayLike,
    image_ids: Ids,
    text_ids: Ids,
    margin: float = 0.2,
    shared_sigma: bool = True,
    reduction: str = "mean",
    sigma: PerAnchor | None = None,
) -> Any:
    """Variance-aware weighting loss, DVSE Eq. 11, over heads k and positive pairs (i, p): (N, K, D)
    and (M, D).

    * image direction: ``σ_ikp^-2 [α − S^k_ip + max_{j∈neg(i)} S^k_ij]_+ + log σ_ikp``;
    * text direction: ``σ^-2 [α − S^k_ip + max_{l∈neg(p)} S^k_lp]_+ + log σ``, with the same σ_ikp
      (``shared_sigma``, as printed) or the text's own;

    σ as in `variance_sigma`, or held fixed at the two (N, K, M) arrays of ``sigma`` (image
    direction, text direction; ``shared_sigma`` is then ignored), so that finite differences agree
    with gradients that treat σ as a constant. A direction whose anchor has no negative drops the
    pair, including its log σ. (If an image has no negatives, all texts have its id, so a direction
    drops all pairs or none.)

    * ``"mean"``: ``Σ_k [mean over the image direction's pairs + mean over the text direction's
      pairs]``;
    * ``"sum"``: the sum over heads, pairs and directions, as printed;
    * ``"none"``: images (N,) and texts (M,), each anchor's sum over its positive pairs and the
      heads.

    Eq. 10 takes the maximum over all j, including the target; here it excludes all positives.
    """
    _one_of("reduction", reduction, ("mean", "sum", "none"))
    S = set_cosine(V_sets, W)
    if sigma is None:
        image_sigma, text_sigma = variance_sigma(S)
        text_sigma = image_sigma if shared_sigma else text_sigma
    else:
        image_sigma, text_sigma = sigma
    images = np.zeros(S.shape[0])
    texts = np.zeros(S.shape[2])
    image_pairs = text_pairs = 0
    for i in range(S.shape[0]):
        for p in _positives(i, image_ids, text_ids):
            rival_texts = _negatives(i, image_ids, text_ids)
            rival_images = _negatives(p, text_ids, image_ids)
            image_pairs += bool(rival_texts)
            text_pairs += bool(rival_images)
            for k in range(S.shape[1]):
                if rival_texts:
                    hinge = max(0.0, margin - S[i, k, p] + max(S[i, k, j] for j in rival_texts))
                    images[i] += hinge / image_sigma[i, k, p] ** 2 + math.log(image_sigma[i, k, p])
                if rival_images:
                    hinge = max(0.0, margin - S[i, k, p] + max(S[n, k, p] for n in rival_images))
                    texts[p] += hinge / text_sigma[i, k, p] ** 2 + math.log(text_sigma[i, k, p])
    if reduction == "none":
        return images, texts
    if reduction == "sum":
        return math.fsum(images) + math.fsum(texts)
    return math.fsum(images) / max(image_pairs, 1) + math.fsum(texts) / max(text_pairs, 1)


def variance_sigma(S: ArrayLike) -> PerAnchor:
    """σ of every head and pair, DVSE Eq. 8 on raw cosines: (N, K, M) -> two arrays of that shape.

    Image direction ``σ_ikp = 1 + Std_{texts j ≠ p} S^k_ij``, text direction ``1 + Std_{images l ≠
    i} S^k_lp``: sample standard deviation (divisor count − 1; 0 for fewer than two values) over all
    values except the target itself, and so including the image's other captions, or the other
    images of the text's id (Eq. 7).
    """
    S = np.asarray(S, np.float64)
    N, K, M = S.shape
    images = np.zeros_like(S)
    texts = np.zeros_like(S)
    for i in range(N):
        for k in range(K):
            for p in range(M):
                images[i, k, p] = 1 + _sample_std([S[i, k, j] for j in range(M) if j != p])
                texts[i, k, p] = 1 + _sample_std([S[n, k, p] for n in range(N) if n != i])
    return images, texts


def dynamic_orthogonal(
    residuals: ArrayLike,
    gate: ArrayLike | None = None,
    slack: float = 0.4,
    pair_reduction: str = "mean",
    reduction: str = "mean",
    gate_first: bool = False,
) -> Any:
    """Dynamic orthogonal constraint loss, DVSE Eq. 4: residual sub-embeddings (N, K, D), gate (N,
    K) or (N, D).

    With ``u_i`` the l2-normalised residual of head i (zero stays zero) and ``c_ij = |m_i m_j ⟨u_i,
    u_j⟩|``: ``[c − β]_+`` per sample, reduced over the batch, where c is

    * ``"mean"``: ``Σ_{i≠j} c_ij / (K (K − 1))``, heads that are off counting as zeros (0 for K =
      1),
    * ``"sum"``: ``Σ_{i≠j} c_ij``, each pair in both orders, as printed,
    * ``"frobenius"``: ``sqrt(Σ_{i≠j} c_ij²) / K²``.

    A gate (N, D) masks dimensions, the same ones for every head: ``c_ij = |Σ_d (m_d u_id)(m_d
    u_jd)|``. Heads are normalised *first* (as on the design page), so that switching dimensions or
    heads off can only lower the loss. ``gate_first=True`` is the alternative: mask, then normalise,
    c_ij = |cosine of the dimensions that are on|. For a gate of ones, and for any 0/1 gate (N, K),
    the two are equal. If K = D, a gate is (N, K).

    Against the paper: Eq. 3 does not say what shape ``round(s(h(w² z)))`` has, and Eq. 4 writes it
    as a function of a head, ``‖F_mask((v̂^i)^T) F_mask(v̂^j)‖``; Eq. 4 is for one image, sums where
    the default here averages, puts norm bars round a scalar, and does not normalise v̂ (then β =
    0.4 would have no scale).
    """
    _one_of("pair_reduction", pair_reduction, ("mean", "sum", "frobenius"))
    _one_of("reduction", reduction, ("mean", "sum", "none"))
    heads = np.asarray(residuals, np.float64)
    N, K, D = heads.shape
    per_entry = _gate_of_entries(gate, N, K, D)
    values = np.zeros(N)
    for n in range(N):
        if gate_first:
            vectors = [_unit(heads[n, k] * per_entry[n, k]) for k in range(K)]
        else:
            vectors = [_unit(heads[n, k]) * per_entry[n, k] for k in range(K)]
        scores = [abs(_dot(vectors[i], vectors[j])) for i in range(K) for j in range(K) if i != j]
        values[n] = max(0.0, _correlation(scores, K, pair_reduction) - slack)
    if reduction == "none":
        return values
    return math.fsum(values) / (N if reduction == "mean" else 1)


def _gate_of_entries(gate: ArrayLike | None, N: int, K: int, D: int) -> Array:
    """Return the factor (N, K, D) of each entry of the residuals."""
    per_entry = np.ones((N, K, D))
    if gate is None:
        return per_entry
    mask = np.asarray(gate, np.float64)
    if mask.shape not in ((N, K), (N, D)):
        raise ValueError(f"gate must be ({N}, {K}) or ({N}, {D}), got {mask.shape}")
    for n in range(N):
        for k in range(K):
            for d in range(D):
                per_entry[n, k, d] = mask[n, k] if mask.shape == (N, K) else mask[n, d]
    return per_entry


def _correlation(scores: Sequence[float], K: int, pair_reduction: str) -> float:
    """Return what the pairs of K heads have in common, from their scores in both orders."""
    if pair_reduction == "sum":
        return math.fsum(scores)
    if pair_reduction == "frobenius":
        return math.sqrt(math.fsum(c * c for c in scores)) / K**2
    return math.fsum(scores) / (K * (K - 1)) if K > 1 else 0.0


def set_max(S: ArrayLike) -> Array:
    """``max_k S^k_ij``: (N, K, M) -> (N, M)."""
    S = np.asarray(S, np.float64)
    return np.array([[max(S[i, :, j]) for j in range(S.shape[2])] for i in range(S.shape[0])])


def set_mean(S: ArrayLike) -> Array:
    """``(1/K) Σ_k S^k_ij``: (N, K, M) -> (N, M)."""
    S = np.asarray(S, np.float64)
    N, K, M = S.shape
    return np.array([[math.fsum(S[i, :, j]) / K for j in range(M)] for i in range(N)])


def smooth_chamfer(V_sets: ArrayLike, W_sets: ArrayLike, alpha: float = 16.0) -> Array:
    """Smooth-Chamfer similarity of two sets, DivE: (N, K, D) and (M, L, D) -> (N, M).

    ``(1/(2αK)) Σ_{a∈A} log Σ_{b∈B} exp(α cos(a, b)) + (1/(2αL)) Σ_{b∈B} log Σ_{a∈A} exp(α cos(a,
    b))``, A the K vectors of an image and B the L vectors of a text. The sums inside the logarithms
    are not averaged, so a score may exceed 1, by up to ``log(K L)/(2α)``.
    """
    images = np.asarray(V_sets, np.float64)
    texts = np.asarray(W_sets, np.float64)
    K = images.shape[1]
    L = texts.shape[1]
    result = np.zeros((len(images), len(texts)))
    for i in range(len(images)):
        for j in range(len(texts)):
            c = cosine(images[i], texts[j])
            forth = math.fsum(_log_sum_exp([alpha * c[a, b] for b in range(L)]) for a in range(K))
            back = math.fsum(_log_sum_exp([alpha * c[a, b] for a in range(K)]) for b in range(L))
            result[i, j] = forth / (2 * alpha * K) + back / (2 * alpha * L)
    return result


# --------------------------------------------------------------------------------------- prototypes


def spherical_kmeans_step(
    centroids: ArrayLike, counts: ArrayLike, x: ArrayLike
) -> tuple[NDArray[np.int64], Array, Array]:
    """One mini-batch step of spherical k-means -> ``(ids (B,), centroids (K, D), counts (K,))``.

    Each x, l2-normalised, is assigned to the centroid of highest cosine, the lowest index on ties,
    with the centroids from before the step for all x. A centroid with members becomes
    ``normalise((count_k c_k + Σ members) / (count_k + n_k))`` and ``count_k += n_k``; the others
    are unchanged. In this sum the centroid is a unit vector, not the shorter mean of its members.
    If the sum is exactly zero, the centroid is unchanged. A zero x has cosine 0 with all centroids,
    adds nothing to the sum, and is counted. Empty clusters are not re-seeded here.
    """
    old, seen, points = (np.array(a, np.float64) for a in (centroids, counts, x))
    S = cosine(points, old)
    ids = np.zeros(len(points), np.int64)
    for b in range(len(points)):
        for k in range(len(old)):
            if S[b, k] > S[b, ids[b]]:
                ids[b] = k
    new = old.copy()
    new_counts = seen.copy()
    for k in range(len(old)):
        members = [_unit(points[b]) for b in range(len(points)) if ids[b] == k]
        if members:
            new_counts[k] = seen[k] + len(members)
            total = [
                seen[k] * old[k, d] + math.fsum(m[d] for m in members) for d in range(old.shape[1])
            ]
            mean = np.array(total) / new_counts[k]
            new[k] = _unit(mean) if mean.any() else old[k]
    return ids, new, new_counts


def kmeans_objective(x: ArrayLike, centroids: ArrayLike) -> float:
    """Objective of spherical k-means: the mean over x of its highest cosine with a centroid."""
    S = cosine(x, centroids)
    return math.fsum(max(row) for row in S) / len(S)


def prototype_classification(
    V: ArrayLike,
    W: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None,
    ids: Ids,
    reduction: str = "mean",
) -> Any:
    """Prototype-guided classification loss, CODER Eq. 7: V and W (B, F), weight (K, F), ids (B,) in
    [0, K).

    ``−log softmax(P v_b + bias)_{id_b}``, mean over b, plus the same of w: one classifier P for
    both sides, on the embeddings as they are (not normalised). Eq. 7 has no bias. ``"sum"`` sums,
    ``"none"`` gives both (B,).
    """
    P = np.asarray(weight, np.float64)
    labels = np.asarray(ids)
    shift = np.zeros(len(P)) if bias is None else np.asarray(bias, np.float64)

    def entropies(features: ArrayLike) -> Array:
        values = []
        for b, feature in enumerate(np.asarray(features, np.float64)):
            logits = [_dot(P[k], feature) + shift[k] for k in range(len(P))]
            values.append(_log_sum_exp(logits) - logits[labels[b]])
        return np.array(values)

    return _reduce(entropies(V), entropies(W), range(len(labels)), range(len(labels)), reduction)


# ------------------------------------------------------------------------------------------ helpers


def _valid_in_memory(ids: Ids, key_ids: Ids, memory_ids: Ids) -> list[int]:
    """Anchors with a key of their own id on the other side and a memory entry of another id."""
    anchors = range(len(np.asarray(ids)))
    return [n for n in anchors if _positives(n, ids, key_ids) and _negatives(n, ids, memory_ids)]


def _reduce(
    rows: Array, cols: Array, valid_rows: Sequence[int], valid_cols: Sequence[int], reduction: str
) -> Any:
    """Apply a reduction of `oracle`, with the caller's mask of valid anchors."""
    _one_of("reduction", reduction, ("mean", "sum", "none"))
    if reduction == "none":
        return rows, cols
    if reduction == "sum":
        return math.fsum(rows) + math.fsum(cols)
    row_mean = math.fsum(rows[i] for i in valid_rows) / max(len(valid_rows), 1)
    col_mean = math.fsum(cols[j] for j in valid_cols) / max(len(valid_cols), 1)
    return row_mean + col_mean


def _sample_std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1))


def _dot(a: Array, b: Array) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _unit(a: Array) -> Array:
    """a / |a|; a zero vector stays zero."""
    norm = math.sqrt(_dot(a, a))
    return a / norm if norm > 0 else np.zeros_like(a)
