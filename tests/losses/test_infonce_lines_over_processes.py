"""The lines of other projects over several processes, in even, uneven and empty parts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.processes import run
from torch import Tensor

import itrloss
from itrloss import NO_ID, InfoNCELoss, PairLoss

ENGINES = "dense", "tiled"

SUPPORT = Path(__file__).parents[1] / "support"
CASES = {
    case["name"]: case
    for name in ("embedders.json", "embedders_more.json")
    for case in json.loads((SUPPORT / name).read_text("utf-8"))
}
one_way = partial(InfoNCELoss, directions="image-text")
QWEN = {"image_image": True, "text_text": "unfiltered", "margin": 0.1}
GIST = {"image_image": True, "text_text": True}


def flat(x: dict[str, Tensor]) -> dict[str, Any]:
    """Hard negatives of each query, as candidates of all."""
    return {"negatives": x["negatives"].flatten(0, 1)}


def own(x: dict[str, Tensor]) -> dict[str, Any]:
    return {"negatives": x["negatives"]}


def guided(x: dict[str, Tensor]) -> dict[str, Any]:
    return {"guide": (x["guide_queries"].detach(), x["guide_positives"].detach())}


def of_each(x: dict[str, Tensor]) -> dict[str, Any]:
    """The same negatives for each query, which are not beside documents then."""
    size = len(x["queries"])
    guide = [x[f"guide_{name}"].detach() for name in ("queries", "positives")]
    guide.append(x["guide_negatives"].detach().expand(size, -1, -1))
    return {"negatives": x["negatives"].expand(size, -1, -1), "guide": guide}


def queries(loss: InfoNCELoss, x: dict[str, Tensor], *ids: Tensor, **options: Any) -> Tensor:
    return loss(x["queries"], x["positives"], *ids, **options)


def captions(loss: PairLoss, x: dict[str, Tensor], *ids: Tensor, **options: Any) -> Tensor:
    return loss(x["images"], x["texts"], *ids, **options)


def numbered(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64)


def ragged(x: dict[str, Tensor], numbers: list[int]) -> dict[str, Any]:
    parts = [own[:size] for own, size in zip(x["negatives"], numbers, strict=True)]
    nothing = x["negatives"].flatten(0, 1)[:0]  # a process may have no queries
    return {"negatives": torch.cat([nothing, *parts])}


def padded(x: dict[str, Tensor], numbers: list[int]) -> dict[str, Any]:
    ids = [[-1 if k < size else NO_ID for k in range(2)] for size in numbers]
    return {**own(x), "negative_ids": torch.tensor(ids, dtype=torch.int64).view(-1, 2)}


def masked(x: dict[str, Tensor], mask: Any) -> dict[str, Any]:
    marks = torch.tensor(mask).bool().view(x["negatives"].shape[:2])
    return {**own(x), "negative_ids": torch.where(marks, -1, NO_ID)}


def same_document(x: dict[str, Tensor], ids: Any) -> Tensor:
    documents = torch.tensor(ids, dtype=torch.int64)
    further = documents.view(-1, 3)[:, 1:].flatten()
    return queries(one_way(0.1), x, documents[::3], documents[::3], **flat(x), negative_ids=further)


def late(
    queries: Tensor, documents: Tensor, form: str, alpha: float = 1.0, **options: Any
) -> Tensor:
    """Scores of late interaction; in a job, with the documents of all processes."""
    options["gather"] = documents.dim() == 3
    return itrloss.functional.set_similarity(queries, documents, form, alpha, **options)  # type: ignore


def mean_late(x: dict[str, Tensor]) -> Tensor:
    return late(x["queries"], x["documents"], "max_mean")


def colpali_negatives(x: dict[str, Tensor]) -> Tensor:
    """Each query with one of its own negatives at a time."""
    own = late(x["queries"], x["negatives"], "max_mean")
    loss = one_way(0.1, in_batch=False)
    return loss(
        scores=mean_late(x).repeat_interleave(2, 0),
        image_ids=torch.arange(3).repeat_interleave(2),
        text_ids=torch.arange(3),
        negatives=own.reshape(-1, 1),
    )


def with_padding(x: dict[str, Tensor], options: Any) -> Tensor:
    """Two documents of each query, of which the second is another one's, and masks."""
    documents = torch.stack([x["documents"], x["others"]], 1).flatten(0, 1)
    lengths = zip(options["document_lengths"], options["other_lengths"], strict=True)
    mask = torch.arange(5) < torch.tensor([*lengths]).view(-1, 1)
    scores = late(x["queries"], documents, "max_sum", text_mask=mask)
    numbers = [[k, -1] for k in range(len(x["queries"]))]  # the second is nobody's
    return one_way(0.5)(scores=scores, text_ids=torch.tensor(numbers, dtype=torch.int64).flatten())


def hardest(*given: Tensor, **options: Any) -> Tensor:
    loss = itrloss.TripletLoss(0.0, temperature=0.1, directions="image-text", reduction="mean")
    return loss(*given, **options)


def colpali_sigmoid(x: dict[str, Tensor]) -> Tensor:
    """Theirs is a mean over pairs, where SigLIP divides by N."""
    scores = mean_late(x)
    return itrloss.SigmoidLoss(10.0, 0.0, learnable=False)(scores=scores) / scores.shape[1]


def repeated(x: dict[str, Tensor]) -> Tensor:
    """One negative a time, as colpali has it."""
    pair = [x[name].repeat_interleave(2, 0) for name in ("queries", "positives")]
    loss = one_way(0.1, in_batch=False)
    return loss(*pair, negatives=x["negatives"].reshape(-1, 1, 4))


def clap(x: dict[str, Tensor]) -> Tensor:
    first = InfoNCELoss(0.1)(x["images"], x["texts_mlp"])
    return 0.25 * (first + InfoNCELoss(0.2)(x["images_mlp"], x["texts"]))


def clip4clip(x: dict[str, Tensor]) -> Tensor:
    units = [F.normalize(x[name], dim=-1) for name in ("texts", "images")]
    return 0.5 * InfoNCELoss(1.0)(scores=10 * units[0] @ units[1].T)


def several(x: dict[str, Tensor], options: Any) -> Tensor:
    ids = numbered(options["image_ids"]), numbered(options["text_ids"])
    return captions(InfoNCELoss(0.1, margin=0.2), x, *ids, **own(x))


def with_own(x: dict[str, Tensor], prefix: str = "") -> tuple[Tensor, Tensor]:
    """The (N, N) cosines of queries with documents, and (N, K) with their own negatives."""
    q, d, n = (F.normalize(x[prefix + k], dim=-1) for k in ("queries", "positives", "negatives"))
    return q @ d.T, (n @ q[:, :, None]).squeeze(2)


def taught(x: dict[str, Tensor]) -> Tensor:
    """FlagEmbedding's: contrast, and a teacher's scores of each query's own documents."""
    in_batch, negatives = with_own(x)
    scores = torch.cat([in_batch.diagonal()[:, None], negatives], 1)
    loss = itrloss.DistillationLoss(0.1, 1.0, directions="image-text")
    return queries(one_way(0.1), x, **flat(x)) + loss(scores=scores, teacher=x["teacher"].detach())


def divergence(x: dict[str, Tensor]) -> Tensor:
    """NeMo's: without the teacher's entropy, which is the loss of the teacher itself."""
    scores = torch.cat(with_own(x), 1)
    teacher = torch.cat(with_own(x, "teacher_"), 1).detach()
    loss = itrloss.DistillationLoss(0.1, 0.1, directions="image-text")
    return loss(scores=scores, teacher=teacher) - loss(scores=teacher, teacher=teacher)


def clap_weighted(x: dict[str, Tensor], options: Any) -> Tensor:
    """Means by weights of each pair, from what its loss is for each anchor."""
    total = torch.zeros((), dtype=torch.float64)
    for images, texts, temperature, own in (
        ("images", "texts_mlp", 0.1, "images"),
        ("images_mlp", "texts", 0.2, "texts"),
    ):
        units = F.normalize(x[own].detach())
        w = ((units @ units.T).sum(1) / (options["kappa"] * len(units))).exp()
        rows, cols = InfoNCELoss(temperature, reduction="none")(x[images], x[texts])
        total = total + 0.25 * (w @ rows + w @ cols) / w.sum()
    return total


def with_no_ids(values: Any) -> Tensor:
    """Numbers, in place of which the file has "none" for what is not there."""
    if any(isinstance(value, list) for value in values):
        return torch.stack([with_no_ids(value) for value in values])
    return torch.tensor([NO_ID if x == "none" else x for x in values], dtype=torch.int64)


def groups(x: dict[str, Tensor], numbers: Any, rule: Any) -> Tensor:
    return captions(InfoNCELoss(0.1, groups=rule), x, image_groups=with_no_ids(numbers))


def open_groups(x: dict[str, Tensor], options: Any) -> Tensor:
    who = {key: with_no_ids(options[key]) for key in ("image_groups", "text_groups")}
    return captions(one_way(0.1), x, **who)


def matching(loss: Any, x: dict[str, Tensor], matrix: Any) -> Tensor:
    """Below 0 is neither, in the file."""
    matches = torch.tensor(matrix, dtype=torch.float64).view(-1, 4)
    return captions(loss, x, matches=matches.masked_fill(matches < 0, torch.nan))


LINES = {
    "vlm2vec": lambda x, o: queries(one_way(0.1), x, **flat(x)),
    "vlm2vec-in-example": lambda x, o: queries(one_way(0.1, in_batch=False), x, **own(x)),
    "tevatron-gradcache": lambda x, o: queries(one_way(1.0, normalize=False), x, **flat(x)),
    "tevatron": lambda x, o: queries(one_way(0.5, normalize=False), x, **flat(x)),
    "gradcache": lambda x, o: queries(one_way(1.0), x, **flat(x)),
    "ms-swift": lambda x, o: queries(one_way(0.1), x, **flat(x)),
    "ms-swift-own": lambda x, o: queries(one_way(0.1, in_batch=False), x, **own(x)),
    "ms-swift-own-ragged": lambda x, o: queries(
        one_way(0.1, in_batch=False), x, **padded(x, o["numbers_of_negatives"])
    ),
    "ms-swift-filter": lambda x, o: queries(one_way(0.1, margin=0.1), x, **flat(x)),
    "ms-swift-qq-dd": lambda x, o: queries(one_way(0.1, **GIST), x, **flat(x)),
    "qwen3": lambda x, o: queries(one_way(0.1, **QWEN), x, **flat(x)),
    "qwen3-ragged": lambda x, o: queries(
        one_way(0.1, **QWEN), x, **ragged(x, o["numbers_of_negatives"])
    ),
    "flagembedding": lambda x, o: queries(one_way(0.1), x, **flat(x)),
    "flagembedding-own": lambda x, o: queries(one_way(0.1, in_batch=False), x, **own(x)),
    "flagembedding-kd": lambda x, o: taught(x),
    "contrastors": lambda x, o: queries(one_way(0.1), x, **flat(x)),
    "contrastors-both": lambda x, o: queries(InfoNCELoss(0.1), x),
    "st-mnrl": lambda x, o: queries(one_way(0.1), x, **flat(x)),
    "st-symmetric": lambda x, o: 0.5 * queries(InfoNCELoss(0.1), x),
    "st-symmetric-negatives": lambda x, o: 0.5 * queries(InfoNCELoss(0.1), x, **flat(x)),
    "gte": lambda x, o: queries(InfoNCELoss(0.1, joint=True, **GIST), x),
    "st-hardness-all": lambda x, o: queries(one_way(0.1, hardness=9.0), x, **flat(x)),
    "embeddinggemma": lambda x, o: queries(one_way(0.1, hardness=(0.0, 5.0)), x, **own(x)),
    "gist": lambda x, o: queries(one_way(0.1, margin=0.0, **GIST), x, **guided(x)),
    "gist-plain": lambda x, o: queries(one_way(0.1, margin=0.0), x, **guided(x)),
    "gist-negatives": lambda x, o: queries(
        one_way(0.1, margin=-0.05, relative=True, **GIST), x, **of_each(x)
    ),
    "colpali": lambda x, o: one_way(0.1)(scores=mean_late(x)),
    "colpali-gathered": lambda x, o: one_way(0.1)(
        scores=mean_late(x), image_ids=[1, 2], text_ids=[0, 1, 2]
    ),
    "colpali-sum": lambda x, o: one_way(1.0)(scores=late(x["queries"], x["documents"], "max_sum")),
    "colpali-smooth": lambda x, o: one_way(0.1)(
        scores=late(x["queries"], x["documents"], "smooth_max_mean", 10.0)
    ),
    "colpali-negatives": lambda x, o: colpali_negatives(x),
    "colpali-negatives-half": lambda x, o: (
        0.5 * colpali_negatives(x) + 0.5 * one_way(0.1)(scores=mean_late(x))
    ),
    "colpali-hardest": lambda x, o: hardest(scores=mean_late(x)),
    "colpali-sigmoid": lambda x, o: colpali_sigmoid(x),
    "colpali-dense": lambda x, o: queries(one_way(0.1), x),
    "colpali-dense-both": lambda x, o: 0.5 * queries(InfoNCELoss(0.1), x),
    "colpali-dense-negatives": lambda x, o: repeated(x),
    "colpali-dense-hardest": lambda x, o: hardest(x["queries"], x["positives"]),
    "pylate": with_padding,
    "late-padding": with_padding,
    "nemo": lambda x, o: queries(one_way(0.1), x, **masked(x, o["negatives_mask"])),
    "nemo-own": lambda x, o: queries(
        one_way(0.1, in_batch=False), x, **masked(x, o["negatives_mask"])
    ),
    "nemo-symmetric": lambda x, o: (
        0.5 * queries(InfoNCELoss(0.1), x, **masked(x, o["negatives_mask"]))
    ),
    "nemo-same-document": lambda x, o: same_document(x, o["document_ids"]),
    "nemo-maxsim": lambda x, o: one_way(0.5, in_batch=False)(
        scores=late(x["queries"], x["documents"][:, :4], "max_sum"),
        negatives=late(x["queries"], x["negatives"], "max_sum"),
    ),
    "nemo-distill": lambda x, o: divergence(x),
    "clip4clip": lambda x, o: clip4clip(x),
    "clap": lambda x, o: 0.5 * captions(InfoNCELoss(0.1), x),
    "clap-mlp": lambda x, o: clap(x),
    "fgclip-hard": lambda x, o: one_way(0.1, in_batch=False)(
        x["images"], x["texts"][:, 0], negatives=x["texts"][:, 1:]
    ),
    "fgclip-region": lambda x, o: 0.5 * captions(InfoNCELoss(0.1), x),
    "irra-itc": lambda x, o: 0.5 * captions(InfoNCELoss(0.1), x),
    "clap-weighted": clap_weighted,
    "irra-sdm": lambda x, o: captions(
        itrloss.SDMLoss(0.1), x, numbered(o["ids"]), numbered(o["ids"])
    ),
    "sdm-weights": lambda x, o: matching(itrloss.SDMLoss(0.1), x, o["matches"]),
    "matches": lambda x, o: matching(InfoNCELoss(0.1), x, o["matches"]),
    "groups-same": lambda x, o: groups(x, o["groups"], "same"),
    "groups-other": lambda x, o: groups(x, o["groups"], "other"),
    "groups-open": open_groups,
    "label-sets": lambda x, o: captions(
        InfoNCELoss(0.1), x, *(with_no_ids(o[k]).view(-1, 2) for k in ("image_ids", "text_ids"))
    ),
    "several-positives-own-filter": several,
}


# Lines on scores of each query's own candidates, which no process shares; those with ids by hand,
# and one that has texts as rows.
NOT_SHARED = {
    "flagembedding-kd",
    "nemo-distill",
    "colpali-gathered",
    "colpali-negatives",
    "colpali-negatives-half",
    "clip4clip",
    "clap-weighted",  # whose weights are of the whole batch
}
SHARES = {  # of each process in the rows
    "two": (0.5, 0.5),
    "two, uneven": (0.25, 0.75),
    "two, one empty": (0.0, 1.0),
    "three": (0.34, 0.33, 0.33),
    "three, uneven": (0.25, 0.0, 0.75),
}


def part(x: Any, shares: tuple[float, ...], rank: int) -> Any:
    """A process's rows of a tensor, or of a list with an entry for each row."""
    ends = [round(sum(shares[:k]) * len(x)) for k in range(len(shares) + 1)]
    return x[ends[rank] : ends[rank + 1]]


def shared_line(name: str, shares: tuple[float, ...], rank: int) -> list[Tensor]:
    """The value of a line in a job, and its gradients by the parts of the inputs."""
    case = CASES[name]
    x = {}
    for key, numbers in case["inputs"].items():
        whole = torch.tensor(numbers, dtype=torch.float64)
        x[key] = part(whole, shares, rank).clone().requires_grad_()
    if name == "gist-negatives":  # the same for each query, so that nobody has a part of them
        for key in ("negatives", "guide_negatives"):
            x[key] = torch.tensor(case["inputs"][key], dtype=torch.float64).requires_grad_()
    options = {}
    for key, value in case["options"].items():
        options[key] = part(value, shares, rank) if isinstance(value, list) else value
    if name == "nemo-same-document":
        options["document_ids"] = [
            number
            for own in part(torch.tensor(case["options"]["document_ids"]).view(-1, 3), shares, rank)
            for number in own.tolist()
        ]
    value = LINES[name](x, options)
    leaves = [x[key] for key in case["gradients"]]
    gradients = torch.autograd.grad(value, leaves, materialize_grads=True)
    return [value.detach(), *gradients]


def lines_of_a_process(rank: int, shares: tuple[float, ...]) -> dict[str, list[Tensor]]:
    plain = PairLoss.__init__
    PairLoss.__init__ = lambda loss, **options: plain(loss, gather=True, **options)  # type: ignore
    return {name: shared_line(name, shares, rank) for name in LINES if name not in NOT_SHARED}


@pytest.mark.slow
@pytest.mark.parametrize("shares", SHARES)
def test_lines_of_other_projects_over_processes(shares, tmp_path):
    """Their values and gradients are those of one process, with even and with uneven parts."""
    world = len(SHARES[shares])
    every = run(lines_of_a_process, tmp_path, SHARES[shares], world=world)
    for name in every[0]:
        case = CASES[name]
        for value, *_ in (found[name] for found in every):
            assert abs(float(value) - case["value"]) < 2e-9, name
        for k, (key, wanted) in enumerate(case["gradients"].items()):
            exact = torch.tensor(wanted, dtype=torch.float64)
            gradients = [found[name][1 + k] for found in every]
            if name == "gist-negatives" and "negatives" in key:
                grad = sum(gradients) / world
            else:
                grad = torch.cat(gradients) / world
            torch.testing.assert_close(
                grad.reshape(exact.shape), exact, rtol=0, atol=2e-9, msg=f"{name} {key}"
            )
