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


def line(names: tuple[str, str], loss: PairLoss, **arguments: Callable[[X, Settings], Any]) -> Line:
    """A loss of two sets of vectors, and how its further arguments follow from a case."""

    def compute(x: X, o: Settings) -> Tensor:
        return loss(*(x[name] for name in names), **{k: f(x, o) for k, f in arguments.items()})

    return compute


queries = partial(line, ("queries", "positives"))
captions = partial(line, ("images", "texts"))


def numbers(name: str) -> Callable[[X, Settings], Tensor]:
    """Numbers of a setting."""
    return lambda x, o: torch.tensor(o[name])


def marks(exists: Any) -> Tensor:
    """Ids of negatives that match nothing, where they exist."""
    return torch.where(torch.as_tensor(exists).bool(), -1, NO_ID)


def flat(x: X, o: Settings) -> Tensor:
    """Hard negatives of each query, as candidates of all."""
    return x["negatives"].flatten(0, 1)


def of_each(x: X, o: Settings) -> Tensor:
    """Each query has hard negatives of its own."""
    return x["negatives"]


def mask(x: X, o: Settings) -> Tensor:
    """A mask says which of a query's own negatives exist."""
    return marks(o["negatives_mask"]).view(x["negatives"].shape[:2])


def lengths(x: X, o: Settings) -> Tensor:
    """Queries have different numbers of own negatives."""
    sizes = torch.tensor(o["numbers_of_negatives"])
    return marks(torch.arange(2) < sizes[:, None])


def ragged(x: X, o: Settings) -> Tensor:
    """Queries have different numbers of negatives, which are candidates of all."""
    sizes = o["numbers_of_negatives"]
    parts = [of_query[:size] for of_query, size in zip(x["negatives"], sizes, strict=True)]
    return torch.cat(parts)


def document(x: X, o: Settings) -> Tensor:
    """The number of a query's document, which is in front of those of its negatives."""
    return numbers("document_ids")(x, o)[::3]


def documents_of_negatives(x: X, o: Settings) -> Tensor:
    return numbers("document_ids")(x, o).view(-1, 3)[:, 1:].flatten()


def guide(x: X, o: Settings) -> tuple[Tensor, ...]:
    return x["guide_queries"].detach(), x["guide_positives"].detach()


def same_negatives(x: X, o: Settings) -> Tensor:
    """The same for each query, which are not next to documents then."""
    return x["negatives"].expand(len(x["queries"]), -1, -1)


def guide_of_negatives(x: X, o: Settings) -> tuple[Tensor, ...]:
    of_negatives = x["guide_negatives"].detach().expand(len(x["queries"]), -1, -1)
    return *guide(x, o), of_negatives


shared = partial(queries, negatives=flat)
own = partial(queries, negatives=of_each)
masked = partial(own, negative_ids=mask)


def one_negative_a_time(x: X, o: Settings) -> Tensor:
    """As colpali has it."""
    pair = [x[name].repeat_interleave(2, 0) for name in ("queries", "positives")]
    return of_own(0.1)(*pair, negatives=x["negatives"].reshape(-1, 1, 4))


# Late interaction: scores of sets of vectors.


late = itrloss.functional.set_similarity


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
    ids = [number for k in range(len(x["queries"])) for number in (k, -1)]  # -1 is nobody's
    return one_way(0.5)(scores=scores, text_ids=torch.tensor(ids))


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
    return shared(one_way(0.1))(x, o) + loss(scores=scores, teacher=x["teacher"].detach())


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
    return torch.tensor([NO_ID if x == "none" else x for x in values], dtype=torch.int64)


def groups(name: str) -> Callable[[X, Settings], Tensor]:
    return lambda x, o: with_no_ids(o[name])


def labels(name: str) -> Callable[[X, Settings], Tensor]:
    return lambda x, o: with_no_ids(o[name]).view(-1, 2)


def matches(x: X, o: Settings) -> Tensor:
    """A matrix says which pairs match; below 0 is neither, in the file."""
    found = torch.tensor(o["matches"], dtype=torch.float64).view(-1, 4)
    return found.masked_fill(found < 0, torch.nan)


def half(whole: Line) -> Line:
    """Their mean over the two directions, of which our loss is the sum."""
    return lambda x, o: 0.5 * whole(x, o)


both_ways = half(captions(InfoNCELoss(0.1)))


LINES = {
    "vlm2vec": shared(one_way(0.1)),
    "vlm2vec-in-example": own(of_own(0.1)),
    "tevatron-gradcache": shared(one_way(1.0, normalize=False)),
    "tevatron": shared(one_way(0.5, normalize=False)),
    "gradcache": shared(one_way(1.0)),
    "ms-swift": shared(one_way(0.1)),
    "ms-swift-own": own(of_own(0.1)),
    "ms-swift-own-ragged": own(of_own(0.1), negative_ids=lengths),
    "ms-swift-filter": shared(one_way(0.1, margin=0.1)),
    "ms-swift-qq-dd": shared(one_way(0.1, **GIST)),
    "qwen3": shared(one_way(0.1, **QWEN)),
    "qwen3-ragged": queries(one_way(0.1, **QWEN), negatives=ragged),
    "flagembedding": shared(one_way(0.1)),
    "flagembedding-own": own(of_own(0.1)),
    "flagembedding-kd": taught,
    "contrastors": shared(one_way(0.1)),
    "contrastors-both": queries(InfoNCELoss(0.1)),
    "st-mnrl": shared(one_way(0.1)),
    "st-symmetric": half(queries(InfoNCELoss(0.1))),
    "st-symmetric-negatives": half(shared(InfoNCELoss(0.1))),
    "gte": queries(InfoNCELoss(0.1, joint=True, **GIST)),
    "st-hardness-all": shared(one_way(0.1, hardness=9.0)),
    "embeddinggemma": own(one_way(0.1, hardness=(0.0, 5.0))),
    "gist": queries(one_way(0.1, margin=0.0, **GIST), guide=guide),
    "gist-plain": queries(one_way(0.1, margin=0.0), guide=guide),
    "gist-negatives": queries(
        one_way(0.1, margin=-0.05, relative=True, **GIST),
        negatives=same_negatives,
        guide=guide_of_negatives,
    ),
    "colpali": of_late(one_way(0.1)),
    "colpali-gathered": of_some_queries,
    "colpali-sum": of_late(one_way(1.0), "max_sum"),
    "colpali-smooth": of_late(one_way(0.1), "smooth_max_mean", 10.0),
    "colpali-negatives": with_a_late_negative,
    "colpali-negatives-half": half_with_a_late_negative,
    "colpali-hardest": of_late(hardest),
    "colpali-sigmoid": late_sigmoid,
    "colpali-dense": queries(one_way(0.1)),
    "colpali-dense-both": half(queries(InfoNCELoss(0.1))),
    "colpali-dense-negatives": one_negative_a_time,
    "colpali-dense-hardest": queries(hardest),
    "pylate": with_padding,
    "late-padding": with_padding,
    "nemo": masked(one_way(0.1)),
    "nemo-own": masked(of_own(0.1)),
    "nemo-symmetric": half(masked(InfoNCELoss(0.1))),
    "nemo-same-document": shared(
        one_way(0.1),
        image_ids=document,
        text_ids=document,
        negative_ids=documents_of_negatives,
    ),
    "nemo-maxsim": with_late_negatives,
    "nemo-distill": divergence,
    "clip4clip": of_logits,
    "clap": both_ways,
    "clap-mlp": of_both_towers,
    "clap-weighted": weights_of_both_towers,
    "fgclip-hard": of_regions,
    "fgclip-region": both_ways,
    "irra-itc": both_ways,
    "irra-sdm": captions(itrloss.SDMLoss(0.1), image_ids=numbers("ids"), text_ids=numbers("ids")),
    "sdm-weights": captions(itrloss.SDMLoss(0.1), matches=matches),
    "matches": captions(InfoNCELoss(0.1), matches=matches),
    "groups-same": captions(InfoNCELoss(0.1, groups="same"), image_groups=groups("groups")),
    "groups-other": captions(InfoNCELoss(0.1, groups="other"), image_groups=groups("groups")),
    "groups-open": captions(
        one_way(0.1), image_groups=groups("image_groups"), text_groups=groups("text_groups")
    ),
    "label-sets": captions(
        InfoNCELoss(0.1), image_ids=labels("image_ids"), text_ids=labels("text_ids")
    ),
    "several-positives-own-filter": captions(
        InfoNCELoss(0.1, margin=0.2),
        image_ids=numbers("image_ids"),
        text_ids=numbers("text_ids"),
        negatives=of_each,
    ),
}
assert LINES.keys() == CASES.keys()
