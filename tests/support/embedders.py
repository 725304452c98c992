"""The lines of other projects with our losses, and cases with their values."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import itrloss
from itrloss import NO_ID, InfoNCELoss, PairLoss

SUPPORT = Path(__file__).parent
CASES = {
    case["name"]: case
    for name in ("embedders.json", "embedders_more.json")
    for case in json.loads((SUPPORT / name).read_text("utf-8"))
}
one_way = partial(InfoNCELoss, directions="image-text")
of_own = partial(one_way, in_batch=False)
QWEN = {"image_image": True, "text_text": "unfiltered", "margin": 0.1}
GIST = {"image_image": True, "text_text": True}

# Each line takes the tensors and the options of a case, and returns what the project computes.
X = dict[str, Tensor]
Settings = dict[str, Any]
Line = Callable[[X, Settings], Tensor]


def queries(loss: PairLoss, x: X, *ids: Tensor, **options: Any) -> Tensor:
    return loss(x["queries"], x["positives"], *ids, **options)


def captions(loss: PairLoss, x: X, *ids: Tensor, **options: Any) -> Tensor:
    return loss(x["images"], x["texts"], *ids, **options)


def numbered(values: Any) -> Tensor:
    """Numbers, of which a process may have none."""
    return torch.tensor(values, dtype=torch.int64)


def flat(x: X) -> Tensor:
    """Hard negatives of each query, as candidates of all."""
    return x["negatives"].flatten(0, 1)


def alone(loss: PairLoss) -> Line:
    return lambda x, o: queries(loss, x)


def shared(loss: PairLoss) -> Line:
    """Hard negatives are candidates of all queries."""
    return lambda x, o: queries(loss, x, negatives=flat(x))


def own(loss: PairLoss) -> Line:
    """Each query has hard negatives of its own."""
    return lambda x, o: queries(loss, x, negatives=x["negatives"])


def masked(loss: PairLoss) -> Line:
    """A mask says which of a query's own negatives exist."""

    def line(x: X, o: Settings) -> Tensor:
        mask = torch.tensor(o["negatives_mask"]).bool().view(x["negatives"].shape[:2])
        ids = torch.where(mask, -1, NO_ID)
        return queries(loss, x, negatives=x["negatives"], negative_ids=ids)

    return line


def guided(loss: PairLoss) -> Line:
    def line(x: X, o: Settings) -> Tensor:
        guide = x["guide_queries"].detach(), x["guide_positives"].detach()
        return queries(loss, x, guide=guide)

    return line


def guided_with_negatives(x: X, o: Settings) -> Tensor:
    """The same negatives for each query, which are not next to documents then."""
    size = len(x["queries"])
    of_negatives = x["guide_negatives"].detach().expand(size, -1, -1)
    guide = x["guide_queries"].detach(), x["guide_positives"].detach(), of_negatives
    loss = one_way(0.1, margin=-0.05, relative=True, **GIST)
    return queries(loss, x, negatives=x["negatives"].expand(size, -1, -1), guide=guide)


def padded(x: X, o: Settings) -> Tensor:
    """Queries have different numbers of own negatives; what is missing has no id."""
    ids = [[-1 if k < size else NO_ID for k in range(2)] for size in o["numbers_of_negatives"]]
    ids = numbered(ids).view(-1, 2)
    return queries(of_own(0.1), x, negatives=x["negatives"], negative_ids=ids)


def ragged(x: X, o: Settings) -> Tensor:
    """Queries have different numbers of negatives, which are candidates of all."""
    sizes = o["numbers_of_negatives"]
    parts = [of_query[:size] for of_query, size in zip(x["negatives"], sizes, strict=True)]
    nothing = flat(x)[:0]
    return queries(one_way(0.1, **QWEN), x, negatives=torch.cat([nothing, *parts]))


def same_document(x: X, o: Settings) -> Tensor:
    documents = numbered(o["document_ids"])
    of_negatives = documents.view(-1, 3)[:, 1:].flatten()
    ids = documents[::3], documents[::3]
    return queries(one_way(0.1), x, *ids, negatives=flat(x), negative_ids=of_negatives)


def one_negative_a_time(x: X, o: Settings) -> Tensor:
    """As colpali has it."""
    pair = [x[name].repeat_interleave(2, 0) for name in ("queries", "positives")]
    return of_own(0.1)(*pair, negatives=x["negatives"].reshape(-1, 1, 4))


# Late interaction: scores of sets of vectors.


def late(queries: Tensor, documents: Tensor, form: Any, alpha: float = 1.0, **mask: Any) -> Tensor:
    """Scores of queries with the documents of all processes, or with own ones."""
    shared = documents.dim() == 3
    return itrloss.functional.set_similarity(queries, documents, form, alpha, gather=shared, **mask)


def mean_late(x: X) -> Tensor:
    return late(x["queries"], x["documents"], "max_mean")


def of_late(loss: PairLoss, form: str = "max_mean", alpha: float = 1.0) -> Line:
    return lambda x, o: loss(scores=late(x["queries"], x["documents"], form, alpha))


def of_some_queries(x: X, o: Settings) -> Tensor:
    """Colpali's second process, with the documents of all."""
    return one_way(0.1)(scores=mean_late(x), image_ids=[1, 2], text_ids=[0, 1, 2])


def with_a_late_negative(x: X, o: Settings) -> Tensor:
    """Each query with one of its own negatives at a time."""
    negatives = late(x["queries"], x["negatives"], "max_mean")
    return of_own(0.1)(
        scores=mean_late(x).repeat_interleave(2, 0),
        image_ids=torch.arange(3).repeat_interleave(2),
        text_ids=torch.arange(3),
        negatives=negatives.reshape(-1, 1),
    )


def with_late_negatives(x: X, o: Settings) -> Tensor:
    scores = late(x["queries"], x["documents"][:, :4], "max_sum")
    return of_own(0.5)(scores=scores, negatives=late(x["queries"], x["negatives"], "max_sum"))


def half_with_a_late_negative(x: X, o: Settings) -> Tensor:
    in_batch = one_way(0.1)(scores=mean_late(x))
    return 0.5 * with_a_late_negative(x, o) + 0.5 * in_batch


def with_padding(x: X, o: Settings) -> Tensor:
    """Two documents of each query, of which the second is another one's, and masks."""
    documents = torch.stack([x["documents"], x["others"]], 1).flatten(0, 1)
    lengths = zip(o["document_lengths"], o["other_lengths"], strict=True)
    mask = torch.arange(5) < torch.tensor([*lengths]).view(-1, 1)
    scores = late(x["queries"], documents, "max_sum", text_mask=mask)
    numbers = [[k, -1] for k in range(len(x["queries"]))]  # the second is nobody's
    return one_way(0.5)(scores=scores, text_ids=numbered(numbers).flatten())


hardest = itrloss.TripletLoss(0.0, temperature=0.1, directions="image-text", reduction="mean")


def late_sigmoid(x: X, o: Settings) -> Tensor:
    """Theirs is a mean over pairs, where SigLIP divides by N."""
    scores = mean_late(x)
    return itrloss.SigmoidLoss(10.0, 0.0, learnable=False)(scores=scores) / scores.shape[1]


# Images and texts.


def of_both_towers(x: X, o: Settings) -> Tensor:
    first = InfoNCELoss(0.1)(x["images"], x["texts_mlp"])
    second = InfoNCELoss(0.2)(x["images_mlp"], x["texts"])
    return 0.25 * (first + second)


def weights_of_both_towers(x: X, o: Settings) -> Tensor:
    """Means by weights of each pair, from what its loss is for each anchor."""
    total = torch.zeros((), dtype=torch.float64)
    for images, texts, temperature, weighing in (
        ("images", "texts_mlp", 0.1, "images"),
        ("images_mlp", "texts", 0.2, "texts"),
    ):
        units = F.normalize(x[weighing].detach())
        w = ((units @ units.T).sum(1) / (o["kappa"] * len(units))).exp()
        rows, cols = InfoNCELoss(temperature, reduction="none")(x[images], x[texts])
        total = total + 0.25 * (w @ rows + w @ cols) / w.sum()
    return total


def of_logits(x: X, o: Settings) -> Tensor:
    texts = F.normalize(x["texts"], dim=-1)
    images = F.normalize(x["images"], dim=-1)
    return 0.5 * InfoNCELoss(1.0)(scores=10 * texts @ images.T)


def of_regions(x: X, o: Settings) -> Tensor:
    """The first text of each region is its own, the others are its negatives."""
    return of_own(0.1)(x["images"], x["texts"][:, 0], negatives=x["texts"][:, 1:])


def half_of_both_directions(x: X, o: Settings) -> Tensor:
    return 0.5 * captions(InfoNCELoss(0.1), x)


# Distillation.


def with_own(x: X, prefix: str = "") -> tuple[Tensor, Tensor]:
    """The (N, N) cosines of queries with documents, and (N, K) with their own negatives."""
    names = "queries", "positives", "negatives"
    q, d, n = (F.normalize(x[prefix + name], dim=-1) for name in names)
    return q @ d.T, (n @ q[:, :, None]).squeeze(2)


def taught(x: X, o: Settings) -> Tensor:
    """FlagEmbedding's: contrast, and a teacher's scores of each query's own documents."""
    in_batch, negatives = with_own(x)
    scores = torch.cat([in_batch.diagonal()[:, None], negatives], 1)
    loss = itrloss.DistillationLoss(0.1, 1.0, directions="image-text")
    contrast = queries(one_way(0.1), x, negatives=flat(x))
    return contrast + loss(scores=scores, teacher=x["teacher"].detach())


def divergence(x: X, o: Settings) -> Tensor:
    """NeMo's: without the teacher's entropy, which is the loss of the teacher itself."""
    scores = torch.cat(with_own(x), 1)
    teacher = torch.cat(with_own(x, "teacher_"), 1).detach()
    loss = itrloss.DistillationLoss(0.1, 0.1, directions="image-text")
    return loss(scores=scores, teacher=teacher) - loss(scores=teacher, teacher=teacher)


# Several matches, by ids, groups, labels and a matrix.


def with_no_ids(values: Any) -> Tensor:
    """Numbers, in place of which the file has "none" for what is not there."""
    if any(isinstance(value, list) for value in values):
        return torch.stack([with_no_ids(value) for value in values])
    return numbered([NO_ID if x == "none" else x for x in values])


def grouped(rule: Any) -> Line:
    loss = InfoNCELoss(0.1, groups=rule)
    return lambda x, o: captions(loss, x, image_groups=with_no_ids(o["groups"]))


def open_groups(x: X, o: Settings) -> Tensor:
    groups = {key: with_no_ids(o[key]) for key in ("image_groups", "text_groups")}
    return captions(one_way(0.1), x, **groups)


def matching(loss: PairLoss) -> Line:
    """A matrix says which pairs match; below 0 is neither, in the file."""

    def line(x: X, o: Settings) -> Tensor:
        matches = torch.tensor(o["matches"], dtype=torch.float64).view(-1, 4)
        return captions(loss, x, matches=matches.masked_fill(matches < 0, torch.nan))

    return line


def several_labels(x: X, o: Settings) -> Tensor:
    labels = (with_no_ids(o[key]).view(-1, 2) for key in ("image_ids", "text_ids"))
    return captions(InfoNCELoss(0.1), x, *labels)


def persons(x: X, o: Settings) -> Tensor:
    ids = numbered(o["ids"])
    return captions(itrloss.SDMLoss(0.1), x, ids, ids)


def several_positives(x: X, o: Settings) -> Tensor:
    ids = numbered(o["image_ids"]), numbered(o["text_ids"])
    return captions(InfoNCELoss(0.1, margin=0.2), x, *ids, negatives=x["negatives"])


def half(line: Line) -> Line:
    """Their mean over the two directions, of which our loss is the sum."""
    return lambda x, o: 0.5 * line(x, o)


LINES = {
    "vlm2vec": shared(one_way(0.1)),
    "vlm2vec-in-example": own(of_own(0.1)),
    "tevatron-gradcache": shared(one_way(1.0, normalize=False)),
    "tevatron": shared(one_way(0.5, normalize=False)),
    "gradcache": shared(one_way(1.0)),
    "ms-swift": shared(one_way(0.1)),
    "ms-swift-own": own(of_own(0.1)),
    "ms-swift-own-ragged": padded,
    "ms-swift-filter": shared(one_way(0.1, margin=0.1)),
    "ms-swift-qq-dd": shared(one_way(0.1, **GIST)),
    "qwen3": shared(one_way(0.1, **QWEN)),
    "qwen3-ragged": ragged,
    "flagembedding": shared(one_way(0.1)),
    "flagembedding-own": own(of_own(0.1)),
    "flagembedding-kd": taught,
    "contrastors": shared(one_way(0.1)),
    "contrastors-both": alone(InfoNCELoss(0.1)),
    "st-mnrl": shared(one_way(0.1)),
    "st-symmetric": half(alone(InfoNCELoss(0.1))),
    "st-symmetric-negatives": half(shared(InfoNCELoss(0.1))),
    "gte": alone(InfoNCELoss(0.1, joint=True, **GIST)),
    "st-hardness-all": shared(one_way(0.1, hardness=9.0)),
    "embeddinggemma": own(one_way(0.1, hardness=(0.0, 5.0))),
    "gist": guided(one_way(0.1, margin=0.0, **GIST)),
    "gist-plain": guided(one_way(0.1, margin=0.0)),
    "gist-negatives": guided_with_negatives,
    "colpali": of_late(one_way(0.1)),
    "colpali-gathered": of_some_queries,
    "colpali-sum": of_late(one_way(1.0), "max_sum"),
    "colpali-smooth": of_late(one_way(0.1), "smooth_max_mean", 10.0),
    "colpali-negatives": with_a_late_negative,
    "colpali-negatives-half": half_with_a_late_negative,
    "colpali-hardest": of_late(hardest),
    "colpali-sigmoid": late_sigmoid,
    "colpali-dense": alone(one_way(0.1)),
    "colpali-dense-both": half(alone(InfoNCELoss(0.1))),
    "colpali-dense-negatives": one_negative_a_time,
    "colpali-dense-hardest": alone(hardest),
    "pylate": with_padding,
    "late-padding": with_padding,
    "nemo": masked(one_way(0.1)),
    "nemo-own": masked(of_own(0.1)),
    "nemo-symmetric": half(masked(InfoNCELoss(0.1))),
    "nemo-same-document": same_document,
    "nemo-maxsim": with_late_negatives,
    "nemo-distill": divergence,
    "clip4clip": of_logits,
    "clap": half_of_both_directions,
    "clap-mlp": of_both_towers,
    "clap-weighted": weights_of_both_towers,
    "fgclip-hard": of_regions,
    "fgclip-region": half_of_both_directions,
    "irra-itc": half_of_both_directions,
    "irra-sdm": persons,
    "sdm-weights": matching(itrloss.SDMLoss(0.1)),
    "matches": matching(InfoNCELoss(0.1)),
    "groups-same": grouped("same"),
    "groups-other": grouped("other"),
    "groups-open": open_groups,
    "label-sets": several_labels,
    "several-positives-own-filter": several_positives,
}
assert LINES.keys() == CASES.keys()
