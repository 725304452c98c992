"""The losses of embedding models in plain loops over anchors and candidates, in float64.

It is written from the design pages and the sources that each rule names, and not from the library:
an independent judge, deliberately simple and slow, for batches of up to some ten items. Scores are
0-dim tensors, so that autograd gives the gradients; every rule is one small function.

Images are queries and rows (N), texts are documents and columns (M); S are their scores, V those of
images among themselves, W those of texts. τ is the temperature, sg means without a gradient.

What two items are to each other say `oracle.match`, `oracle.differ` and `oracle.weight`: a pair
matches, with a weight, or one may be a negative of the other, or it is in no sum.

Sources: InfoNCE with several positives (CPC, van den Oord et al., 2018, Eq. 4), GTE (Li et al.,
arXiv 2308.03281), Qwen3-Embedding (Zhang et al., arXiv 2506.05176) as in ms-swift, NV-Retriever
(Moreira et al., arXiv 2407.15831), GISTEmbed (Solatorio, arXiv 2402.16829), LLaVE (Lan et al.,
arXiv 2503.04812), EmbeddingGemma (arXiv 2509.20354), IRRA (Jiang & Ye, CVPR 2023), ColBERT (Khattab
& Zaharia, SIGIR 2020), colpali.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from support import oracle

Matrix = list[list[Tensor]]  # of 0-dim scores

# ------------------------------------------------------------------------------------------- scores


def unit(vector: Tensor) -> Tensor:
    """The vector scaled to length 1; a zero vector stays zero, so that it scores 0."""
    length = (vector * vector).sum().sqrt()
    return vector * 0 if length.item() == 0 else vector / length


def score_matrix(rows: Sequence[Tensor], cols: Sequence[Tensor], normalize: bool) -> Matrix:
    """The cosines of all rows with all columns, or their inner products."""
    if normalize:
        rows, cols = ([unit(x) for x in side] for side in (rows, cols))
    every = torch.stack([*cols])
    return [[*(row * every).sum(1)] for row in rows]


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
            result.further += score_matrix([image], [*own], normalize)
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


# --------------------------------------------------------------------------------------- the batch


@dataclass
class Batch:
    """The scores of a batch, and its items as `oracle` has them: ids, `oracle.Item` or
    `oracle.Judged`.
    """

    scores: Scores
    rows: Sequence[Any]
    cols: Sequence[Any]
    # K items of negatives that all images share, or K of each image; next to a matrix of matches,
    # numbers of images; None: they match nothing
    more: Sequence[Any] | None

    @property
    def images(self) -> range:
        return range(len(self.rows))

    @property
    def texts(self) -> range:
        return range(len(self.cols))

    def pairs_of_image(self, i: int) -> list[tuple[int, int]]:
        return [(i, p) for p in self.texts if oracle.match(self.rows[i], self.cols[p])]

    def pairs_of_text(self, p: int) -> list[tuple[int, int]]:
        return [(i, p) for i in self.images if oracle.match(self.rows[i], self.cols[p])]

    def weight(self, i: int, p: int) -> float:
        return oracle.weight(i, p, self.rows, self.cols)

    def negatives(self, item: Any, others: Sequence[Any]) -> list[int]:
        """The places of those that may be an item's negatives."""
        return [j for j, other in enumerate(others) if oracle.differ(item, other)]

    def among(self, own: Sequence[Any], i: int) -> list[int]:
        """The places of an item's negatives of its own side, of which a matrix says nothing."""
        if isinstance(own[i], oracle.Judged):
            return [j for j in range(len(own)) if j != i]
        return self.negatives(own[i], own)

    def further(self, i: int) -> list[int]:
        """The places of the further negatives that count for an image."""
        if self.more is None:
            return [*range(len(self.scores.further[i]))] if oracle.exists(self.rows[i]) else []
        own = self.more[i] if isinstance(self.more[0], list) else self.more
        if isinstance(self.rows[i], oracle.Judged):
            return [k for k, number in enumerate(own) if number not in (i, oracle.NO_ID)]
        return self.negatives(self.rows[i], own)

    def further_of_text(self, p: int) -> list[int]:
        """The places of the shared negatives that count for a text."""
        if self.more is None:
            exists = oracle.exists(self.cols[p])
            return [*range(len(self.scores.texts_further[p]))] if exists else []
        if isinstance(self.cols[p], oracle.Judged):
            return [k for k, number in enumerate(self.more) if self.is_apart(p, number)]
        return self.negatives(self.cols[p], self.more)

    def is_apart(self, p: int, number: int) -> bool:
        """Whether a text differs from an image with a number, or there is no such image."""
        if number in self.images:
            return self.cols[p].entries[number] == 0
        return number != oracle.NO_ID


def items_of_negatives(ids: Tensor | None) -> Any:
    """Items of (K,) or (N, K) ids of negatives, see `Batch`."""
    if ids is None:
        return None
    if ids.dim() == 2:
        return [items_of_negatives(own) for own in ids]
    return [oracle.Item(frozenset({label}) - {oracle.NO_ID}) for label in ids.tolist()]


# --------------------------------------------------------------------------------------- arithmetic


def log_sum_exp(logits: Sequence[Tensor]) -> Tensor:
    """``log Σ e^z``, shifted by the largest."""
    every = torch.stack([*logits])
    top = every.detach().max()
    return top + (every - top).exp().sum().log()


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
    joint: bool | str
    label_smoothing: float
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
        for j in c.batch.negatives(c.batch.rows[i], c.batch.cols)
    ]


def images_beside(c: Contrast, p: int) -> list[Candidate]:
    """The images that are negatives of text p: ``Σ_neg e^{S_jp/τ + α₀ sg S_jp}``."""
    return [
        Candidate(c.batch.scores.pairs[j][p], c.judge.pairs[j][p], c.text_limits[p], c.hardness[0])
        for j in c.batch.negatives(c.batch.cols[p], c.batch.rows)
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
        for k in c.batch.further(i)
    ]


def other_images(c: Contrast, i: int) -> list[Candidate]:
    """Images that do not match image i, for ``image_image``: ``Σ_j e^{V_ij/τ}`` (GTE)."""
    return [
        Candidate(c.batch.scores.images[i][j], c.judge.images[i][j], c.image_limits[i], 0.0)
        for j in c.batch.among(c.batch.rows, i)
    ]


def other_texts(c: Contrast, p: int) -> list[Candidate]:
    """Texts that do not match text p, for ``text_text``: ``Σ_j e^{W_pj/τ}``. With ``"unfiltered"``
    they have no limit (Qwen3-Embedding).
    """
    most = None if c.text_text == "unfiltered" else c.text_limits[p]
    return [
        Candidate(c.batch.scores.texts[p][j], c.judge.texts[p][j], most, 0.0)
        for j in c.batch.among(c.batch.cols, p)
    ] + negatives_of_text(c, p, most)


def negatives_of_text(c: Contrast, p: int, most: float | None) -> list[Candidate]:
    """Shared negatives are texts in that sum, too (ms-swift)."""
    if not c.batch.scores.texts_further:
        return []
    scores = c.batch.scores.texts_further[p]
    judged = c.judge.texts_further[p]
    return [Candidate(scores[k], judged[k], most, 0.0) for k in c.batch.further_of_text(p)]


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
    positives. With ``joint`` both directions bring their ``e^{S_ip/τ}`` (GTE), with "once" one.
    """
    positive = c.batch.scores.pairs[i][p] / c.temperature
    logits = [positive] + [logit(x, c.temperature) for x in candidates if stays(x)]
    if c.joint is True:
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
    return total / weights + smoothing(c, positives, others[0])


def smoothing(c: Contrast, positives: list[tuple[int, int]], others: list[Candidate]) -> Any:
    """What a label of which ε is spread over all candidates adds to the mean of ``-log p``."""
    if not c.label_smoothing:
        return 0
    own = [c.batch.scores.pairs[i][p] for i, p in positives]
    weights = [c.batch.weight(i, p) for i, p in positives]
    every = own + [x.score for x in others]
    of_positives = sum(w * s for w, s in zip(weights, own, strict=True)) / sum(weights)
    return c.label_smoothing / c.temperature * (of_positives - sum(every) / len(every))


def contrastive(  # noqa: PLR0913 (the options and arguments of the loss)
    images: Tensor | None = None,
    texts: Tensor | None = None,
    *,
    temperature: Any = 0.07,
    directions: str = "both",
    in_batch: bool = True,
    image_image: bool = False,
    text_text: bool | str = False,
    joint: bool | str = False,
    label_smoothing: float = 0.0,
    margin: float | None = None,
    relative: bool = False,
    hardness: float | tuple[float, float] = 0.0,
    guide: Sequence[Tensor] | None = None,
    reduction: str = "mean",
    rows: Sequence[Any],
    cols: Sequence[Any],
    more: Sequence[Any] | None = None,
    negatives: Tensor | None = None,
    scores: Tensor | None = None,
    normalize: bool = True,
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
        rows, cols, more: the items of images, of texts, and of negatives, see `Batch`.
        negatives: (K, D), (N, K, D), or (N, K) scores next to ``scores`` (N, M).
    """
    if scores is not None:
        known = scores_of_scores(scores, negatives)
    else:
        known = scores_of_embeddings(images, texts, negatives, normalize)
    batch = Batch(known, rows, cols, more)
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
        label_smoothing,
        pair,
        [limit(batch, judge, pairs, margin, relative) for pairs in row_pairs],
        [limit(batch, judge, pairs, margin, relative) for pairs in col_pairs],
    )
    like = batch.scores.pairs[0][0]

    def of_images() -> Tensor:
        values = [value_of_anchor(c, pairs, candidates_of_image) for pairs in row_pairs]
        return reduced(values, reduction, like)

    def of_texts() -> Tensor:
        values = [value_of_anchor(c, pairs, candidates_of_text) for pairs in col_pairs]
        return reduced(values, reduction, like)

    if joint:
        return of_images()
    return of_directions(directions, of_images, of_texts, reduction)


def infonce(S: Any, row_ids: Any, col_ids: Any, temperature: float = 0.07, **options: Any) -> Any:
    """InfoNCE of a matrix of scores, in the manner of `oracle`."""
    scores = torch.as_tensor(S, dtype=torch.float64)
    given = {"rows": row_ids, "cols": col_ids, "temperature": temperature}
    return contrastive(scores=scores, **given, **options)


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


FORMS = ["max", "mean", "max_sum", "max_mean"]
FORMS += ["smooth_max_sum", "smooth_max_mean", "smooth_chamfer"]


def late_score(
    image: list[Tensor], text: list[Tensor], form: str, alpha: float, normalize: bool
) -> Tensor:
    """``Σ_a max_b s(a, b)`` (ColBERT), divided by the number of the image's elements in the forms
    of ``_mean`` (colpali), or with the smooth maximum; the maximum or mean of all products (PVSE);
    or the smooth Chamfer similarity (DivE). An empty set scores 0.
    """
    if not image or not text:
        return torch.zeros((), dtype=torch.float64)
    products = score_matrix(image, text, normalize)
    sharpness = alpha if form.startswith("smooth") else None
    best = torch.stack([best_of(row, sharpness) for row in products])
    if form == "max":
        return best.max()
    if form == "mean":
        return torch.stack([torch.stack(row).mean() for row in products]).mean()
    if form == "smooth_chamfer":
        of_text = torch.stack([best_of([*col], sharpness) for col in zip(*products, strict=True)])
        return (best.mean() + of_text.mean()) / 2
    return best.mean() if form.endswith("mean") else best.sum()


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
    normalize: bool = True,
) -> Tensor:
    """Scores of sets by late interaction, (N, M).

    Args:
        images, texts: (N, K, D) sets, and (M, L, D), or each image's own (N, M, L, D).
        form: see `late_score`.
        image_mask, text_mask: (N, K) and (M, L) or (N, M, L), true where an element exists.
    """
    rows = []
    for i, image in enumerate(images):
        own = existing(image, None if image_mask is None else image_mask[i])
        row = []
        for j in range(texts.shape[-3]):
            place = (i, j) if texts.dim() == 4 else j
            text = existing(texts[place], None if text_mask is None else text_mask[place])
            row.append(late_score(own, text, form, alpha, normalize))
        rows.append(torch.stack(row))
    return torch.stack(rows)
