"""The losses of embedding models in plain loops over anchors and candidates, in float64.

It is written from the design pages and the sources that each rule names, and not from the library:
an independent judge, deliberately simple and slow, for batches of up to some ten items. Scores are
0-dim tensors, so that autograd gives the gradients; every rule is one small function.

Images are queries and rows (N), texts are documents and columns (M); S are their scores, V those of
images among themselves, W those of texts. τ is the temperature, sg means without a gradient.

Two questions say what two items are to each other. For an image and a text the answer is one
number, the *weight* of the pair:

* Do they match? They do if they have a label in common: equal ids, or sets of labels that share
  one; or if ``matches`` has a number above 0, which is the weight (1 for ids).
* If they do not, may one be a negative of the other? It may if their groups allow it: weight 0.
* Otherwise the pair is in no sum: the weight is None.

Sources: InfoNCE with several positives (CPC, van den Oord et al., 2018, Eq. 4, as in
`oracle.infonce`), GTE (Li et al., arXiv 2308.03281), Qwen3-Embedding (Zhang et al., arXiv
2506.05176) as in ms-swift, NV-Retriever (Moreira et al., arXiv 2407.15831), GISTEmbed (Solatorio,
arXiv 2402.16829), LLaVE (Lan et al., arXiv 2503.04812), EmbeddingGemma (arXiv 2509.20354), IRRA
(Jiang & Ye, CVPR 2023), ColBERT (Khattab & Zaharia, SIGIR 2020), colpali.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

NO_ID = -(2**63)
"""As an id: padding of a label set, or an item that does not exist. As a group: open to all."""

Matrix = list[list[Tensor]]  # of 0-dim scores
Labels = frozenset  # the ids of one item; empty: it does not exist
Weights = list[list[float | None]]
MATCHES_NOTHING: Labels = frozenset({"matches nothing"})

# ------------------------------------------------------------------------------------------- scores


def unit(vector: Tensor) -> Tensor:
    """The vector scaled to length 1; a zero vector stays zero, so that it scores 0."""
    length = (vector * vector).sum().sqrt()
    return vector * 0 if length.item() == 0 else vector / length


def score(a: Tensor, b: Tensor, normalize: bool) -> Tensor:
    """The cosine of two vectors, or their inner product."""
    return (unit(a) * unit(b)).sum() if normalize else (a * b).sum()


def score_matrix(rows: Sequence[Tensor], cols: Sequence[Tensor], normalize: bool) -> Matrix:
    """The scores of all rows with all columns."""
    return [[score(a, b, normalize) for b in cols] for a in rows]


@dataclass
class Scores:
    """What one model says of a batch; an empty list is a score that nobody can compute."""

    pairs: Matrix  # (N, M), S
    images: Matrix = field(default_factory=list)  # (N, N), V
    texts: Matrix = field(default_factory=list)  # (M, M), W
    further: Matrix = field(default_factory=list)  # (N, K), images with their further negatives
    texts_further: Matrix = field(default_factory=list)  # (M, K), texts with shared negatives


def scores_of_embeddings(
    images: Tensor, texts: Tensor, negatives: Tensor | None, normalize: bool
) -> Scores:
    """All scores of (N, D) images, (M, D) texts and negatives, which are (K, D) or (N, K, D)."""
    result = Scores(
        score_matrix(images, texts, normalize),
        score_matrix(images, images, normalize),
        score_matrix(texts, texts, normalize),
    )
    if negatives is None:
        return result
    if negatives.dim() == 2:  # of everybody
        result.further = score_matrix(images, negatives, normalize)
        result.texts_further = score_matrix(texts, negatives, normalize)
    else:  # each image's own
        for image, own in zip(images, negatives, strict=True):
            result.further.append([score(image, negative, normalize) for negative in own])
    return result


def scores_of_scores(scores: Tensor, negatives: Tensor | None) -> Scores:
    """The scores that are given: (N, M), and (N, K) of each image's own negatives."""
    further = [] if negatives is None else [list(row) for row in negatives]
    return Scores([list(row) for row in scores], further=further)


def scores_of_guide(guide: Sequence[Tensor]) -> Scores:
    """What another model says, without a gradient: cosines of its embeddings ``(images, texts)`` or
    ``(images, texts, negatives)`` (GISTEmbed).
    """
    images, texts, *negatives = [x.detach() for x in guide]
    return scores_of_embeddings(images, texts, negatives[0] if negatives else None, normalize=True)


# -------------------------------------------------------------------------------- who is whose what


def label_sets(ids: Any) -> list[Labels]:
    """The labels of each item, of ids (N,) or label sets (N, k), without ``NO_ID``."""
    rows = ids.tolist() if isinstance(ids, Tensor) else list(ids)
    sets = [row if isinstance(row, list) else [row] for row in rows]
    return [frozenset(label for label in row if label != NO_ID) for row in sets]


def match(a: Labels, b: Labels) -> bool:
    """Two items match if they have a label in common."""
    return bool(a & b)


def groups_meet(a: int, b: int, rule: str) -> bool:
    """Whether members of two groups may be negatives of each other: with ``"same"`` those of one
    group, with ``"other"`` those of different ones. ``NO_ID`` is open to all.
    """
    if NO_ID in (a, b):
        return True
    return (a == b) == (rule == "same")


class Item(NamedTuple):
    """What is known of an image, a text or a negative next to its scores."""

    labels: Labels
    group: int


def may_be_negative(a: Item, b: Item, rule: str) -> bool:
    """Both exist, they do not match, and their groups allow it."""
    exist = bool(a.labels) and bool(b.labels)
    return exist and not match(a.labels, b.labels) and groups_meet(a.group, b.group, rule)


def weight_by_labels(image: Item, text: Item, rule: str) -> float | None:
    """1 for a match, which groups do not undo; 0 for a negative; None for what is neither."""
    if match(image.labels, text.labels):
        return 1.0
    return 0.0 if may_be_negative(image, text, rule) else None


def weight_by_matches(entry: float) -> float | None:
    """A number above 0 is the weight of a match, 0 is a negative, nan is a pair in no sum."""
    return None if math.isnan(entry) else entry


@dataclass
class Relations:
    """For each score of `Scores`, what it is for."""

    pairs: Weights  # (N, M)
    images: list[list[bool]]  # (N, N), whether one may be a negative of the other
    texts: list[list[bool]]  # (M, M)
    further: list[list[bool]]  # (N, K)
    texts_further: list[list[bool]]  # (M, K), empty if negatives are each image's own


def items(ids: Any, groups: Any, number: int) -> list[Item]:
    """The items of one side. Without ids no two are equal, without groups all are open to all."""
    labels = label_sets(range(number) if ids is None else ids)
    if groups is None:
        groups = [NO_ID] * number
    return [Item(own, int(group)) for own, group in zip(labels, groups, strict=True)]


def negative_items(negatives: Tensor | None, negative_ids: Any, shared: bool) -> list[Any]:
    """K items, or K items of each image. Without ids they match nothing. Their groups are open: a
    shared negative is everybody's, and an own one is the image's, whatever its group.
    """
    if negatives is None:
        return []
    if negative_ids is None:
        one = Item(MATCHES_NOTHING, NO_ID)
        number = negatives.shape[0] if shared else negatives.shape[1]
        return [one] * number if shared else [[one] * number] * len(negatives)
    if shared:
        return [Item(labels, NO_ID) for labels in label_sets(negative_ids)]
    return [[Item(labels, NO_ID) for labels in label_sets(row)] for row in negative_ids]


def among(own: list[Item], others: list[Item], rule: str) -> list[list[bool]]:
    """Whether each of the others may be a negative of each of one's own."""
    return [[may_be_negative(a, b, rule) for b in others] for a in own]


# --------------------------------------------------------------------------------------- the batch


@dataclass
class Batch:
    """The scores of a batch and what they are for: the *view* that all losses of pairs have."""

    scores: Scores
    relations: Relations

    @property
    def images(self) -> range:
        return range(len(self.scores.pairs))

    @property
    def texts(self) -> range:
        return range(len(self.scores.pairs[0]))

    def pairs_of_image(self, i: int) -> list[tuple[int, int]]:
        return [(i, p) for p in self.texts if self.weight(i, p)]

    def pairs_of_text(self, p: int) -> list[tuple[int, int]]:
        return [(i, p) for i in self.images if self.weight(i, p)]

    def weight(self, i: int, p: int) -> float | None:
        return self.relations.pairs[i][p]


def make_batch(  # noqa: PLR0913 (all that a loss is called with)
    images: Tensor | None,
    texts: Tensor | None,
    *,
    image_ids: Any = None,
    text_ids: Any = None,
    image_groups: Any = None,
    text_groups: Any = None,
    negative_groups: str = "same",
    matches: Tensor | None = None,
    negatives: Tensor | None = None,
    negative_ids: Any = None,
    scores: Tensor | None = None,
    normalize: bool = True,
) -> Batch:
    """Scores and relations of the arguments of a call, see `contrastive`."""
    if scores is not None:
        known = scores_of_scores(scores, negatives)
    else:
        known = scores_of_embeddings(images, texts, negatives, normalize)
    n = len(known.pairs)
    m = len(known.pairs[0])
    if text_groups is None:
        text_groups = image_groups
    rows = items(image_ids, image_groups, n)
    cols = items(text_ids, text_groups, m)
    shared = negatives is not None and scores is None and negatives.dim() == 2
    more = negative_items(negatives, negative_ids, shared)
    rule = negative_groups
    if matches is not None:
        pairs = [[weight_by_matches(float(entry)) for entry in row] for row in matches]
    else:
        pairs = [[weight_by_labels(a, b, rule) for b in cols] for a in rows]
    if shared:
        further = among(rows, more, rule)
    else:
        further = [
            [may_be_negative(row, negative, rule) for negative in own]
            for row, own in zip(rows, more, strict=bool(more))
        ]
    relations = Relations(
        pairs,
        among(rows, rows, rule),
        among(cols, cols, rule),
        further,
        among(cols, more, rule) if shared else [],
    )
    return Batch(known, relations)


# --------------------------------------------------------------------------------------- arithmetic


def log_sum_exp(logits: Sequence[Tensor]) -> Tensor:
    """``log Σ e^z``, shifted by the largest."""
    top = max(z.item() for z in logits)
    return top + torch.stack([(z - top).exp() for z in logits]).sum().log()


def reduced(values: list[Tensor | None], reduction: str, like: Tensor) -> Tensor:
    """The values of the anchors of one direction; None is an anchor that is left out: it has the
    value 0, and the mean is over the others (0 if there are none).
    """
    zero = like.new_zeros(())
    filled = torch.stack([zero if value is None else value for value in values])
    if reduction == "none":
        return filled
    count = sum(value is not None for value in values)
    return filled.sum() / (max(count, 1) if reduction == "mean" else 1)


def of_directions(
    directions: str, rows: Callable[[], Tensor], cols: Callable[[], Tensor], reduction: str
) -> Any:
    """The images' part, the texts' part, or both: added, or as a pair with ``reduction="none"``."""
    if directions == "image-text":
        return rows()
    if directions == "text-image":
        return cols()
    return (rows(), cols()) if reduction == "none" else rows() + cols()


# -------------------------------------------------------------------------------------- contrastive


class Candidate(NamedTuple):
    """What may stand in a denominator next to the positive."""

    score: Tensor
    judged: Tensor  # the score that the filter looks at: the same, or the guide's
    limit: float | None  # the limit of the anchor whose sum it is in
    hardness: float


@dataclass
class Contrast:
    """A batch with the options of `contrastive`, and the limits of its anchors."""

    batch: Batch
    judge: Scores
    temperature: Any
    in_batch: bool
    image_image: bool
    text_text: bool | str
    joint: bool
    hardness: tuple[float, float]
    image_limits: list[float | None]
    text_limits: list[float | None]


def limit(
    batch: Batch,
    judge: Scores,
    positives: list[tuple[int, int]],
    margin: float | None,
    relative: bool,
) -> float | None:
    """``t = Ḡ + m`` (Qwen3-Embedding, GISTEmbed) or ``Ḡ + m |Ḡ|`` (NV-Retriever), without a
    gradient. Ḡ is the mean score of the anchor's positives, weighted as its matches are.
    """
    if margin is None or not positives:
        return None
    weights = [batch.weight(i, p) for i, p in positives]
    scores = [judge.pairs[i][p].item() for i, p in positives]
    mean = sum(w * s for w, s in zip(weights, scores, strict=True)) / sum(weights)
    return mean + margin * (abs(mean) if relative else 1.0)


def stays(candidate: Candidate) -> bool:
    """Candidates count below the limit."""
    return candidate.limit is None or candidate.judged.item() < candidate.limit


def logit(candidate: Candidate, temperature: Any) -> Tensor:
    """``S/τ + α sg(S)``: the candidate counts ``e^{α S}`` times (LLaVE)."""
    weight = candidate.hardness * candidate.score.detach()
    return candidate.score / temperature + weight


def texts_beside(c: Contrast, i: int) -> list[Candidate]:
    """The texts of the batch that are negatives of image i: ``Σ_neg e^{S_ij/τ + α₀ sg S_ij}``.
    With ``in_batch=False`` there are none.
    """
    if not c.in_batch:
        return []
    return [
        Candidate(c.batch.scores.pairs[i][j], c.judge.pairs[i][j], c.image_limits[i], c.hardness[0])
        for j in c.batch.texts
        if c.batch.weight(i, j) == 0
    ]


def images_beside(c: Contrast, p: int) -> list[Candidate]:
    """The images that are negatives of text p: ``Σ_neg e^{S_jp/τ + α₀ sg S_jp}``."""
    return [
        Candidate(c.batch.scores.pairs[j][p], c.judge.pairs[j][p], c.text_limits[p], c.hardness[0])
        for j in c.batch.images
        if c.batch.weight(j, p) == 0
    ]


def further_negatives(c: Contrast, i: int) -> list[Candidate]:
    """Texts that are no anchors, everybody's (K, D) or image i's own (N, K, D):
    ``Σ_k e^{S(i,n_k)/τ + α₁ sg S}``. One that has an id of the image is left out, as is padding.
    """
    if not c.batch.scores.further:
        return []
    scores = c.batch.scores.further[i]
    judged = c.judge.further[i]
    return [
        Candidate(scores[k], judged[k], c.image_limits[i], c.hardness[1])
        for k, negative in enumerate(c.batch.relations.further[i])
        if negative
    ]


def other_images(c: Contrast, i: int) -> list[Candidate]:
    """Images that do not match image i, for ``image_image``: ``Σ_j e^{V_ij/τ}`` (GTE)."""
    return [
        Candidate(c.batch.scores.images[i][j], c.judge.images[i][j], c.image_limits[i], 0.0)
        for j in c.batch.images
        if c.batch.relations.images[i][j]
    ]


def other_texts(c: Contrast, p: int) -> list[Candidate]:
    """Texts that do not match text p, for ``text_text``: ``Σ_j e^{W_pj/τ}``. With ``"unfiltered"``
    they have no limit (Qwen3-Embedding).
    """
    most = None if c.text_text == "unfiltered" else c.text_limits[p]
    return [
        Candidate(c.batch.scores.texts[p][j], c.judge.texts[p][j], most, 0.0)
        for j in c.batch.texts
        if c.batch.relations.texts[p][j]
    ] + negatives_of_text(c, p, most)


def negatives_of_text(c: Contrast, p: int, most: float | None) -> list[Candidate]:
    """Shared negatives are texts in that sum, too (ms-swift)."""
    if not c.batch.relations.texts_further:
        return []
    scores = c.batch.scores.texts_further[p]
    judged = c.judge.texts_further[p]
    return [
        Candidate(scores[k], judged[k], most, 0.0)
        for k, negative in enumerate(c.batch.relations.texts_further[p])
        if negative
    ]


def among_themselves(c: Contrast, i: int, p: int) -> list[Candidate]:
    """The sums that both directions have alike for the pair of image i and text p."""
    candidates = []
    if c.image_image:
        candidates += other_images(c, i)
    if c.text_text:
        candidates += other_texts(c, p)
    return candidates


def candidates_of_image(c: Contrast, i: int, p: int) -> list[Candidate]:
    """What image i tells its text p from; with ``joint``, also what text p tells image i from."""
    candidates = texts_beside(c, i) + further_negatives(c, i) + among_themselves(c, i, p)
    return candidates + images_beside(c, p) if c.joint else candidates


def candidates_of_text(c: Contrast, i: int, p: int) -> list[Candidate]:
    """What text p tells its image i from. Further negatives are texts, none of its candidates."""
    return images_beside(c, p) + among_themselves(c, i, p)


def value_of_pair(c: Contrast, i: int, p: int, candidates: list[Candidate]) -> Tensor:
    """``−log e^{S_ip/τ} / (e^{S_ip/τ} + Z)``: a positive competes with candidates, not with other
    positives. With ``joint`` both directions bring their ``e^{S_ip/τ}`` (GTE).
    """
    positive = c.batch.scores.pairs[i][p] / c.temperature
    logits = [positive] + [logit(x, c.temperature) for x in candidates if stays(x)]
    if c.joint:
        logits.append(positive)
    return log_sum_exp(logits) - positive


def value_of_anchor(
    c: Contrast, positives: list[tuple[int, int]], candidates_of: Callable[..., list[Candidate]]
) -> Tensor | None:
    """The mean over the positives, by the weights of the matches. None if the anchor has no
    positive, or no candidate next to it even before the filter; if it is the filter that leaves
    none, the value counts.
    """
    others = [candidates_of(c, i, p) for i, p in positives]
    if not any(others):
        return None
    total, weights = 0, 0.0
    for (i, p), candidates in zip(positives, others, strict=True):
        weight = c.batch.weight(i, p)
        total = total + weight * value_of_pair(c, i, p, candidates)
        weights += weight
    return total / weights


def contrastive(  # noqa: PLR0913 (the options and arguments of the loss)
    images: Tensor | None = None,
    texts: Tensor | None = None,
    *,
    temperature: Any = 0.07,
    directions: str = "both",
    in_batch: bool = True,
    image_image: bool = False,
    text_text: bool | str = False,
    joint: bool = False,
    margin: float | None = None,
    relative: bool = False,
    hardness: float | tuple[float, float] = 0.0,
    guide: Sequence[Tensor] | None = None,
    reduction: str = "mean",
    **view: Any,
) -> Any:
    """InfoNCE with all that embedding models put into its denominator.

    For an image i and each of its positives p (mirrored for a text), with the mean over p::

        ℓ_ip = −log e^{S_ip/τ} / (e^{S_ip/τ} + Z_ip)
        Z_ip = Σ_neg e^{S_ij/τ + α₀ sg S_ij}             unless in_batch=False
             + Σ_k e^{S(i,n_k)/τ + α₁ sg S(i,n_k)}       negatives
             + Σ_j e^{V_ij/τ}                            image_image
             + Σ_j e^{W_pj/τ}                            text_text
             + e^{S_ip/τ} + Σ_neg e^{S_jp/τ + α₀ sg S}   joint

    Args:
        images, texts: (N, D), (M, D).
        temperature: τ, a number or a tensor with a gradient.
        directions: ``"both"``, ``"image-text"`` or ``"text-image"``: whose anchors count.
        in_batch: False: texts of the batch are no candidates, an image's negatives alone are.
        image_image, text_text, joint: further sums, see above; ``text_text="unfiltered"`` is one
            without the limit.
        margin, relative: the limit, see `limit`; each sum has that of the anchor whose sum it is.
        hardness: α, or (α₀, α₁) of the batch's and of further negatives.
        guide: embeddings of another model, whose scores are those that the limit is for.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        view: ``image_ids`` (N,) or label sets (N, k), ``text_ids``; ``matches`` (N, M), bool or
            weights, with nan for pairs in no sum, in their place; ``image_groups`` (N,),
            ``text_groups`` (M,) with ``negative_groups="same"`` or ``"other"``; ``negatives``
            (K, D), (N, K, D), or (N, K) scores next to ``scores`` (N, M); ``negative_ids`` (K,) or
            (N, K), or sets of them; ``normalize``.
    """
    batch = make_batch(images, texts, **view)
    judge = batch.scores if guide is None else scores_of_guide(guide)
    pair = hardness if isinstance(hardness, tuple) else (hardness, hardness)
    row_pairs = [batch.pairs_of_image(i) for i in batch.images]
    col_pairs = [batch.pairs_of_text(p) for p in batch.texts]
    c = Contrast(
        batch,
        judge,
        temperature,
        in_batch,
        image_image,
        text_text,
        joint,
        pair,
        [limit(batch, judge, pairs, margin, relative) for pairs in row_pairs],
        [limit(batch, judge, pairs, margin, relative) for pairs in col_pairs],
    )
    like = batch.scores.pairs[0][0]

    def rows() -> Tensor:
        values = [value_of_anchor(c, pairs, candidates_of_image) for pairs in row_pairs]
        return reduced(values, reduction, like)

    def cols() -> Tensor:
        values = [value_of_anchor(c, pairs, candidates_of_text) for pairs in col_pairs]
        return reduced(values, reduction, like)

    if joint:
        return rows()
    return of_directions(directions, rows, cols, reduction)


# ------------------------------------------------------------------------------------ distillation


def distillation(
    scores: Tensor, teacher: Tensor, *, temperature: float, teacher_temperature: float
) -> Tensor:
    """The mean over rows of ``−Σ_k softmax(teacher/T)_k log softmax(S/τ)_k`` (FlagEmbedding)."""
    values = []
    for row, given in zip(scores, teacher, strict=True):
        logits = [s / temperature for s in row]
        targets = [t.detach() / teacher_temperature for t in given]
        norm = log_sum_exp(logits)
        target_norm = log_sum_exp(targets)
        terms = zip(logits, targets, strict=True)
        values.append(torch.stack([(t - target_norm).exp() * (norm - z) for z, t in terms]).sum())
    return torch.stack(values).mean()


# --------------------------------------------------------------------------------- late interaction


def best_of(cosines: list[Tensor], alpha: float | None) -> Tensor:
    """The maximum, the first of equal ones, or ``log(Σ e^{α s}) / α``."""
    if alpha is None:
        return max(cosines, key=Tensor.item)
    return log_sum_exp([alpha * s for s in cosines]) / alpha


def existing(elements: Tensor, mask: Tensor | None) -> list[Tensor]:
    """The vectors of a set that exist, wherever the padding is and whatever it holds."""
    if mask is None:
        return list(elements)
    return [x for x, exists in zip(elements, mask, strict=True) if exists]


def late_score(image: list[Tensor], text: list[Tensor], form: str, alpha: float) -> Tensor:
    """``Σ_a max_b s(a, b)`` (ColBERT), divided by the number of the image's elements in the forms
    of ``_mean`` (colpali), or with the smooth maximum.
    """
    sharpness = alpha if form.startswith("smooth") else None
    parts = [best_of([score(a, b, normalize=True) for b in text], sharpness) for a in image]
    total = torch.stack(parts).sum()
    return total / len(image) if form.endswith("mean") else total


def mask_of_lengths(lengths: Sequence[int], most: int) -> Tensor:
    """(N, most) bool: the first elements of each set exist."""
    return torch.tensor([[k < length for k in range(most)] for length in lengths])


def late_scores(
    images: Tensor,
    texts: Tensor,
    form: str = "max_sum",
    *,
    alpha: float = 16.0,
    image_mask: Tensor | None = None,
    text_mask: Tensor | None = None,
) -> Tensor:
    """Scores of sets by late interaction, (N, M).

    Args:
        images, texts: (N, K, D) sets, whose elements are summed up, and (M, L, D).
        form: ``"max_sum"``, ``"max_mean"``, ``"smooth_max_sum"`` or ``"smooth_max_mean"``.
        image_mask, text_mask: (N, K) and (M, L), true where an element exists; each set has one.
    """
    of_images, of_texts = (
        [existing(x, None if mask is None else mask[k]) for k, x in enumerate(sets)]
        for sets, mask in ((images, image_mask), (texts, text_mask))
    )
    return torch.stack(
        [torch.stack([late_score(a, b, form, alpha) for b in of_texts]) for a in of_images]
    )
