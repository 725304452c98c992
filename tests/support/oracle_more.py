"""The equations beyond one batch of single vectors: memories, sets, prototypes, in the manner of
`oracle`.

They are plain loops over pairs in float64, written from the papers and the design page and not from
the library.

Conventions are those of `oracle`: images are rows, texts are columns, pairs of equal integer ids
are positive, and ``reduction="none"`` gives the pair ``(images, texts)`` of per-anchor values,
where an invalid anchor's value is exactly 0. Embeddings are not normalised, every score is their
cosine, and a zero vector scores 0.

Papers: CODER (Wang et al., ECCV 2022), USER (Zhang et al., 2023), DVSE (Wei et al., 2023), SigLIP
(Zhai et al., ICCV 2023), spherical k-means (Dhillon & Modha, 2001).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from support import oracle
from support.oracle import (
    SCORE_FLOOR,
    Array,
    Ids,
    PerAnchor,
    _candidates,
    _dot,
    _log_positive,
    _log_sum_exp,
    _mean,
    _negatives,
    _positives,
    _reduce_valid,
    cosine,
    exists,
    weight,
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
    diversity: str | None = "std",
    epsilon: float = 0.1,
    entropy_temperature: float = 1.0,
    positive_weight: str | float = "paper",
    positive: str = "clamp",
    positive_from: str = "key",
    diversity_from: str = "both",
    negatives_from: str = "memory",
    reduction: str = "mean",
    held: Sequence[ArrayLike] | None = None,
) -> Any:
    """Memory-aided diversity-sensitive contrastive loss, CODER Eq. 6: V (N, D), W (M, D), memories
    (Q, D).

    For image anchor n, with the memory *texts* q of other ids as negatives: ``ℓ_n = μ log(1 + Σ_{q:
    id_q ≠ id_n} exp((cos(v_n, b_q) − γ)/(μ d_n))) − w mean_p log(1 + cos(v_n, w_p^key))``, p over
    the text keys of the anchor's id (``positive_from="batch"``: over the texts w_p themselves), w =
    μ for ``"paper"``. Memory entries of the anchor's id are neither negatives nor positives. Text
    anchors have the memory *images* as negatives, and positives from ``V_keys``. d is
    `memory_diversity` (``diversity_from="batch"``: of an empty memory), or 1 for None; of the
    embeddings ``held`` in place of V and W, if there are any. An anchor
    without a positive or without a negative in the memory is invalid.

    ``negatives_from="batch"``: the negatives of image n are the texts of other ids in the batch,
    and d is `memory_diversity` only for anchors with a negative in the memory, else div^batch.

    Eq. 6 prints ``L_DCL(V, B_w) + L_DCL(W, B_v)``; ``L_DCL`` of Eq. 5 is a sum of two directions,
    of which one would have memory entries as anchors. This is only the direction whose anchors are
    in the batch.
    """
    if diversity is None:
        image_div = np.ones(len(np.asarray(V)))
        text_div = np.ones(len(np.asarray(W)))
    else:
        estimated_in = memory_ids if diversity_from == "both" else []
        embeddings = (*(held or (V, W)), memory_images, memory_texts)
        embeddings += image_ids, text_ids, estimated_in
        settings = diversity, epsilon, entropy_temperature
        image_div, text_div = memory_diversity(*embeddings, *settings)
        if negatives_from == "batch":
            alone = memory_diversity(*embeddings[:-1], [], *settings)
            for n in range(len(image_div)):
                if not _negatives(n, image_ids, estimated_in):
                    image_div[n] = alone[0][n]
            for n in range(len(text_div)):
                if not _negatives(n, text_ids, estimated_in):
                    text_div[n] = alone[1][n]
    of_anchors = _DclOfMemory(
        temperature=temperature,
        margin=margin,
        weight=temperature if positive_weight == "paper" else float(positive_weight),
        floor=SCORE_FLOOR if positive == "clamp" else 0.0,
    )
    if positive_from == "key":
        image_positives = W_keys
        text_positives = V_keys
    else:
        image_positives = W
        text_positives = V
    of_images = _Side(V, image_positives, memory_texts, image_ids, text_ids, memory_ids)
    of_texts = _Side(W, text_positives, memory_images, text_ids, image_ids, memory_ids)
    if negatives_from == "batch":
        of_images = replace(of_images, memory=W, memory_ids=text_ids)
        of_texts = replace(of_texts, memory=V, memory_ids=image_ids)
    images = of_anchors(of_images, image_div)
    texts = of_anchors(of_texts, text_div)
    return _reduce_valid(images, texts, of_images.valid(), of_texts.valid(), reduction)


@dataclass
class _Side:
    """Anchors of one side of the batch, with keys and memory of the other side."""

    queries: ArrayLike
    keys: ArrayLike
    memory: ArrayLike
    ids: Ids
    key_ids: Ids
    memory_ids: Ids

    def valid(self) -> list[int]:
        """Anchors with a key of their own id and a memory entry of another id."""
        anchors = range(len(np.asarray(self.ids)))
        return [n for n in anchors if self.positives(n) and self.negatives(n)]

    def positives(self, n: int) -> list[int]:
        """Keys of an anchor's id."""
        return _positives(n, self.ids, self.key_ids)

    def negatives(self, n: int) -> list[int]:
        """Memory entries of other ids than an anchor's."""
        return _negatives(n, self.ids, self.memory_ids)

    def near(self) -> Array:
        """Scores of the anchors and the keys."""
        return cosine(self.queries, self.keys)

    def far(self) -> Array:
        """Scores of the anchors and the memory."""
        return cosine(self.queries, self.memory)


@dataclass
class _DclOfMemory:
    """``ℓ_n`` of `memory_dcl`, as a function of one side."""

    temperature: float
    margin: float
    weight: float
    floor: float

    def __call__(self, side: _Side, div: Array) -> Array:
        near = side.near()
        far = side.far()
        values = np.zeros(len(near))
        for n in side.valid():
            scale = 1 / (self.temperature * div[n])
            exponents = [scale * (far[n, q] - self.margin) for q in side.negatives(n)]
            repulsion = self.temperature * _log_sum_exp([0.0, *exponents])
            logs = [_log_positive(near[n, p], self.floor) for p in side.positives(n)]
            values[n] = repulsion - self.weight * _mean(logs)
        return values


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
    memory_positives: bool = True,
    batch_negatives: bool = True,
    distillation: float = 0.0,
    reduction: str = "mean",
) -> Any:
    """InfoNCE against a memory, MoCo Eq. 1; with ``distillation`` α, ALBEF Eq. 6.

    Image n: ``-(1 - α) mean_p log p_np - α Σ_j q_nj log p_nj``, p over the text keys and the
    memory's texts of its id. Without ``batch_negatives`` or ``memory_positives`` the first part is
    ``(1 - α) mean_p -log(e^{S_np/τ} / (e^{S_np/τ} + Z_n))``, p over the text keys of its id;
    ``Z_n`` over the memory's texts of other ids and, with ``batch_negatives``, the text keys of
    other ids. The softmaxes ``p_n`` of the image's and
    ``q_n`` of its key's scores are over all text keys and entries of the memory that exist. An
    anchor without a positive or a negative is invalid, and its first part 0; the mean is over valid
    ones.
    """
    of_images = _Side(V, W_keys, memory_texts, image_ids, text_ids, memory_ids)
    of_texts = _Side(W, V_keys, memory_images, text_ids, image_ids, memory_ids)
    options = temperature, batch_negatives, memory_positives and batch_negatives
    images, valid_images = _contrast(of_images, *options)
    texts, valid_texts = _contrast(of_texts, *options)
    contrasts = _reduce_valid(images, texts, valid_images, valid_texts, reduction)
    images = _imitation(of_images, V_keys, temperature)
    texts = _imitation(of_texts, W_keys, temperature)
    existing = [[n for n, item in enumerate(ids) if exists(item)] for ids in (image_ids, text_ids)]
    imitations = _reduce_valid(images, texts, *existing, reduction)
    if reduction != "none":
        return (1 - distillation) * contrasts + distillation * imitations
    pairs = zip(contrasts, imitations, strict=True)
    return tuple((1 - distillation) * a + distillation * b for a, b in pairs)


def _contrast(
    side: _Side, temperature: float, batch_negatives: bool, memory_positives: bool
) -> tuple[Array, list[int]]:
    """The first part of `memory_info_nce`, and the anchors that are valid in it."""
    near = side.near() / temperature
    far = side.far() / temperature
    values = np.zeros(len(near))
    valid = []
    for n in range(len(near)):
        exponents = [far[n, q] for q in side.negatives(n)]
        if batch_negatives:
            exponents += [near[n, q] for q in _negatives(n, side.ids, side.key_ids)]
        positives = [near[n, p] for p in side.positives(n)]
        if memory_positives:
            positives += [far[n, p] for p in _positives(n, side.ids, side.memory_ids)]
        if exponents and positives:
            valid.append(n)
            competing = positives if memory_positives else []
            losses = [_log_sum_exp([*(competing or [x]), *exponents]) - x for x in positives]
            values[n] = _mean(losses)
    return values, valid


def _imitation(side: _Side, own_keys: ArrayLike, temperature: float) -> Array:
    """The second part of `memory_info_nce`: the cross entropy with the softmax of the own keys."""
    taught_by = replace(side, queries=own_keys)
    near = side.near() / temperature
    far = side.far() / temperature
    taught_near = taught_by.near() / temperature
    taught_far = taught_by.far() / temperature
    values = np.zeros(len(near))
    keys = [k for k, item in enumerate(side.key_ids) if exists(item)]
    entries = [q for q, item in enumerate(side.memory_ids) if exists(item)]
    for n, item in enumerate(side.ids):
        if not exists(item) or not (keys or entries):
            continue
        scores = [*near[n][keys], *far[n][entries]]
        taught = [*taught_near[n][keys], *taught_far[n][entries]]
        total = _log_sum_exp(scores)
        taught_total = _log_sum_exp(taught)
        entropies = []
        for score, key_score in zip(scores, taught, strict=True):
            q = math.exp(key_score - taught_total)
            log_p = score - total
            entropies.append(-q * log_p)
        values[n] = math.fsum(entropies)
    return values


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
    positive: str = "clamp",
    reduction: str = "mean",
) -> Any:
    """Unified training objective, USER Eq. 18–21: ``λ HAL(batch) + Q(texts, images in memory) +
    Q(images, texts)``.

    ``Q_i = (1/γ) log(1 + Σ_{q: id_q ≠ id_i} exp(γ(S_iq − ε))) − mean_p log(1 + cos(anchor_i,
    key_p))``, p over the keys of the anchor's id on the other side, that cosine floored at −1 +
    1e-6, with ``positive="relu"`` at 0. HAL is `oracle.hal`.

    * ``"mean"``: λ times HAL's mean + mean of Q over valid images + mean of Q over valid texts;
    * ``"sum"``: λ times HAL's sum + sums of Q;
    * ``"none"``: ``λ HAL_i + Q_i`` of each anchor. Validity in HAL (a negative in the batch) and in
      Q (a negative in the memory) are separate conditions; an invalid part is 0.

    Eq. 18 and 19 print the positive term outside the mean, and Eq. 19 prints it between two keys
    (no gradient); here it is inside, between the anchor and the other side's key. They sum over the
    whole queue; here entries of the anchor's id are excluded.
    """

    floor = SCORE_FLOOR if positive == "clamp" else 0.0
    anchors = _DclOfMemory(1 / scale, margin, 1.0, floor)
    of_images = _Side(V, W_keys, memory_texts, image_ids, text_ids, memory_ids)
    of_texts = _Side(W, V_keys, memory_images, text_ids, image_ids, memory_ids)
    images = text_memory_weight * anchors(of_images, np.ones(len(V)))
    texts = image_memory_weight * anchors(of_texts, np.ones(len(W)))
    batch = oracle.hal(cosine(V, W), image_ids, text_ids, scale, margin, reduction, positive)
    if reduction == "none":
        return batch_weight * batch[0] + images, batch_weight * batch[1] + texts
    of_memory = _reduce_valid(images, texts, of_images.valid(), of_texts.valid(), reduction)
    return batch_weight * batch + of_memory


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

    All pairs count that are positive or negative, and all anchors that have one. Each ℓ_ij is
    divided equally between its image and its text: ``rows_i = ½ Σ_j ℓ_ij``, ``cols_j = ½ Σ_i
    ℓ_ij``; ``"sum"`` is ``Σ_ij ℓ_ij``,
    ``"mean"`` is mean(rows) + mean(cols), which for N = M is the paper's ``(1/N) Σ_ij ℓ_ij``.
    """
    S = np.asarray(S, np.float64)
    rows = np.zeros(S.shape[0])
    cols = np.zeros(S.shape[1])
    for i in range(S.shape[0]):
        positives = _positives(i, row_ids, col_ids)
        for j in _candidates(i, row_ids, col_ids):
            z = 1.0 if j in positives else -1.0
            loss = _log_sum_exp([0.0, -z * (scale * S[i, j] + bias)])
            loss *= weight(i, j, row_ids, col_ids) if j in positives else 1.0
            rows[i] += loss / 2
            cols[j] += loss / 2
    counted_rows = [i for i in range(len(rows)) if _candidates(i, row_ids, col_ids)]
    counted_cols = [j for j in range(len(cols)) if _candidates(j, col_ids, row_ids)]
    return _reduce_valid(rows, cols, counted_rows, counted_cols, reduction)


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
    held: Sequence[ArrayLike] | None = None,
) -> Any:
    """Variance-aware weighting loss, DVSE Eq. 11, over heads k and positive pairs (i, p): (N, K, D)
    and (M, D).

    * image direction: ``σ_ikp^-2 [α − S^k_ip + max_{j∈neg(i)} S^k_ij]_+ + log σ_ikp``;
    * text direction: ``σ^-2 [α − S^k_ip + max_{l∈neg(p)} S^k_lp]_+ + log σ``, with the same σ_ikp
      (``shared_sigma``, as printed) or the text's own;

    σ as in `variance_sigma`, of the embeddings ``held`` in place of V_sets and W if there are any.
    A direction whose anchor has no negative drops the pair, including its log σ.

    * ``"mean"``: ``Σ_k [mean over the image direction's pairs + mean over the text direction's
      pairs]``;
    * ``"sum"``: the sum over heads, pairs and directions, as printed;
    * ``"none"``: images (N,) and texts (M,), each anchor's sum over its positive pairs and the
      heads.

    Eq. 10 takes the maximum over all j, including the target; here it excludes all positives.
    """
    S = set_cosine(V_sets, W)
    estimated = S if held is None else set_cosine(*held)
    image_sigma, text_sigma = variance_sigma(estimated, image_ids, text_ids)
    text_sigma = image_sigma if shared_sigma else text_sigma
    images = np.zeros(S.shape[0])
    texts = np.zeros(S.shape[2])
    image_pairs = 0
    text_pairs = 0
    for i in range(S.shape[0]):
        for p in _positives(i, image_ids, text_ids):
            rival_texts = _negatives(i, image_ids, text_ids)
            rival_images = _negatives(p, text_ids, image_ids)
            image_pairs += bool(rival_texts)
            text_pairs += bool(rival_images)
            for k in range(S.shape[1]):
                if rival_texts:
                    hardest = max(S[i, k, j] for j in rival_texts)
                    hinge = max(0.0, margin - S[i, k, p] + hardest)
                    images[i] += _weighted_by_sigma(hinge, image_sigma[i, k, p])
                if rival_images:
                    hardest = max(S[n, k, p] for n in rival_images)
                    hinge = max(0.0, margin - S[i, k, p] + hardest)
                    texts[p] += _weighted_by_sigma(hinge, text_sigma[i, k, p])
    if reduction == "none":
        return images, texts
    if reduction == "sum":
        return math.fsum(images) + math.fsum(texts)
    image_mean = math.fsum(images) / max(image_pairs, 1)
    text_mean = math.fsum(texts) / max(text_pairs, 1)
    return image_mean + text_mean


def _weighted_by_sigma(hinge: float, sigma: float) -> float:
    """``σ^-2 hinge + log σ``."""
    return hinge / sigma**2 + math.log(sigma)


def variance_sigma(S: ArrayLike, image_ids: Ids, text_ids: Ids) -> PerAnchor:
    """σ of every head and pair, DVSE Eq. 8 on raw cosines: (N, K, M) -> two arrays of that shape.

    Image direction ``σ_ikp = 1 + Std_{texts j ≠ p} S^k_ij``, text direction ``1 + Std_{images l ≠
    i} S^k_lp``: sample standard deviation (divisor count − 1; 0 for fewer than two values) over all
    candidates except the target itself, and so including the image's other captions, or the
    other images of the text's id (Eq. 7).
    """
    S = np.asarray(S, np.float64)
    N, K, M = S.shape
    images = np.zeros_like(S)
    texts = np.zeros_like(S)
    for i in range(N):
        for k in range(K):
            for p in range(M):
                texts_of_image = _candidates(i, image_ids, text_ids)
                images_of_text = _candidates(p, text_ids, image_ids)
                other_texts = [S[i, k, j] for j in texts_of_image if j != p]
                other_images = [S[n, k, p] for n in images_of_text if n != i]
                images[i, k, p] = 1 + _sample_std(other_texts)
                texts[i, k, p] = 1 + _sample_std(other_images)
    return images, texts


def dynamic_orthogonal(
    residuals: ArrayLike,
    gate: ArrayLike | None = None,
    slack: float = 0.4,
    pair_reduction: str = "mean",
    reduction: str = "mean",
    normalize_residuals: bool = True,
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
    u_jd)|``. Heads are normalised *first* (as on the design page), so that switching heads off can
    only lower the loss. If K = D, a gate is (N, K).

    Against the paper: Eq. 3 does not say what shape ``round(s(h(w² z)))`` has, and Eq. 4 writes it
    as a function of a head, ``‖F_mask((v̂^i)^T) F_mask(v̂^j)‖``; Eq. 4 is for one image, sums where
    the default here averages, puts norm bars round a scalar, and does not normalise v̂ (then β =
    0.4 would have no scale): ``normalize_residuals=False``.
    """
    heads = np.asarray(residuals, np.float64)
    N, K, D = heads.shape
    per_entry = _gate_of_entries(gate, N, K, D)
    values = np.zeros(N)
    for n in range(N):
        vectors = []
        for head, mask in zip(heads[n], per_entry[n], strict=True):
            vectors.append((_unit(head) if normalize_residuals else head) * mask)
        scores = []
        for i in range(K):
            for j in range(K):
                if i != j:
                    scores.append(abs(_dot(vectors[i], vectors[j])))
        correlation = _correlation(scores, K, pair_reduction)
        values[n] = max(0.0, correlation - slack)
    if reduction == "none":
        return values
    if reduction == "sum":
        return math.fsum(values)
    return math.fsum(values) / max(N, 1)


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
    old = np.array(centroids, np.float64)
    seen = np.array(counts, np.float64)
    points = np.array(x, np.float64)
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
            total = np.zeros(old.shape[1])
            for d in range(old.shape[1]):
                of_members = math.fsum(member[d] for member in members)
                total[d] = seen[k] * old[k, d] + of_members
            mean = total / new_counts[k]
            new[k] = _unit(mean) if mean.any() else old[k]
    return ids, new, new_counts


def kmeans_objective(x: ArrayLike, centroids: ArrayLike) -> float:
    """Objective of spherical k-means: the mean over x of its highest cosine with a centroid."""
    highest = [max(row) for row in cosine(x, centroids)]
    return _mean(highest)


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
        """``−log softmax(P x_b + bias)_{id_b}`` of each feature."""
        values = []
        for b, feature in enumerate(np.asarray(features, np.float64)):
            logits = [_dot(P[k], feature) + shift[k] for k in range(len(P))]
            values.append(_log_sum_exp(logits) - logits[labels[b]])
        return np.array(values)

    everyone = range(len(labels))
    return _reduce_valid(entropies(V), entropies(W), everyone, everyone, reduction)


# ------------------------------------------------------------------------------------------ helpers


def _sample_std(values: Sequence[float]) -> float:
    """The standard deviation with divisor count − 1; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    total = math.fsum((x - mean) ** 2 for x in values)
    return math.sqrt(total / (len(values) - 1))


def _unit(a: Array) -> Array:
    """a / |a|; a zero vector stays zero."""
    norm = math.sqrt(_dot(a, a))
    return a / norm if norm > 0 else np.zeros_like(a)
