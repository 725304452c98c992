"""InfoNCE with all its options beside loops, and beside the formulas of other projects."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import oracle_contrast
from support.oracle_contrast import Model, Options
from support.processes import both as in_two_processes
from support.processes import run
from torch import Tensor

import itrloss
from itrloss import NO_ID, InfoNCELoss, PairLoss, Similarity

ENGINES = "dense", "tiled"


# ------------------------------------------------------------------------------ random combinations


class Draw:
    """A batch with options, drawn by a seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        pick = self.random.choice
        self.n = pick([2, 3, 4, 6])
        self.one_to_one = pick([True, False])
        self.m = self.n if self.one_to_one else pick([2, 5, 7])
        self.images = self.vectors(self.n)
        self.texts = self.vectors(self.m)
        self.image_ids: list[int] | None = None
        self.text_ids: list[int] | None = None
        if not self.one_to_one:
            self.image_ids = [pick([1, 2, 3, 3, 4]) for _ in range(self.n)]
            self.text_ids = [pick([1, 2, 3, 4, 5]) for _ in range(self.m)]
            if pick([True, False, False]):
                self.text_ids[0] = NO_ID
        self.unit = pick([True, True, False])
        self.options = self.some_options()
        self.negatives = self.some_negatives()
        self.negative_ids = self.some_negative_ids()
        self.guide: tuple[Tensor, ...] | None = None
        if self.options.margin is not None and pick([True, False]):
            self.guide = (self.vectors(self.n, 5), self.vectors(self.m, 5))
            if self.negatives is not None:
                shape = (*self.negatives.shape[:-1], 5)
                self.guide += (self.vectors(*shape),)

    def vectors(self, *shape: int) -> Tensor:
        """Draw vectors; the last number is their dimension, by default 4."""
        if len(shape) == 1:
            shape = (*shape, 4)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def some_options(self) -> Options:
        pick = self.random.choice
        found = Options(temperature=pick([0.1, 0.5, 1.0]))
        found.directions = pick(["both", "image-text", "text-image"])
        found.hardness = pick([0.0, 0.0, 3.0, (0.0, 2.0), (1.5, 0.0)])
        found.margin = pick([None, None, 0.1, -0.2, 0.0])
        if found.margin is not None:
            found.relative = pick([True, False])
        if found.directions == "image-text" and pick([True, False, False]):
            found.in_batch = False
            return found
        found.image_image = pick([True, False])
        found.text_text = pick([True, False])
        if found.margin is not None and pick([True, False]):
            found.text_text = "unfiltered"
        if found.directions == "both":
            found.joint = pick([True, False])
        return found

    def some_negatives(self) -> Tensor | None:
        kind = self.random.choice(["none", "shared", "own"])
        if not self.options.in_batch and kind == "none":
            kind = "own"
        if kind == "none":
            return None
        return self.vectors(3, 4) if kind == "shared" else self.vectors(self.n, 2, 4)

    def some_negative_ids(self) -> Any:
        if self.negatives is None or self.random.choice([True, False]):
            return None
        choices = [0, 1, 2, 7, NO_ID]
        if self.negatives.dim() == 2:
            return [self.random.choice(choices) for _ in range(3)]
        return [[self.random.choice(choices) for _ in range(2)] for _ in range(self.n)]

    def loss(self, engine: str, reduction: str) -> InfoNCELoss:
        options = asdict(self.options)
        return InfoNCELoss(engine=engine, reduction=reduction, normalize=self.unit, **options)  # type: ignore

    def leaves(self) -> list[Tensor]:
        leaves = [self.images, self.texts]
        if self.negatives is not None:
            leaves.append(self.negatives)
        return [x.clone().requires_grad_() for x in leaves]

    def ours(self, leaves: list[Tensor], loss: InfoNCELoss) -> Any:
        images, texts, *more = leaves
        ids = [None if x is None else torch.tensor(x) for x in (self.image_ids, self.text_ids)]
        options: dict[str, Any] = {}
        if more:
            options["negatives"] = more[0]
        if self.negative_ids is not None:
            options["negative_ids"] = self.negative_ids
        if self.guide is not None:
            options["guide"] = self.guide
        return loss(images, texts, *ids, **options)

    def loops(self, leaves: list[Tensor]) -> list[tuple[list[Tensor], list[bool]]]:
        images, texts, *more = leaves
        model = Model.of(images, texts, more[0] if more else None, self.unit)
        judge = model
        if self.guide is not None:
            guide_images, guide_texts, *others = self.guide
            judge = Model.of(guide_images, guide_texts, others[0] if others else None, True)
        image_ids = self.image_ids or list(range(self.n))
        text_ids = self.text_ids or list(range(self.m))
        return oracle_contrast.Loss(
            model, judge, self.options, image_ids, text_ids, self.negative_ids
        ).groups()


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
@pytest.mark.parametrize("seed", range(300))
def test_random_combinations_of_options_equal_loops(seed, small_tiles):
    draw = Draw(seed)
    engine = ENGINES[seed % 2]
    exact = draw.leaves()
    groups = draw.loops(exact)
    wanted = [torch.stack(values) for values, _ in groups]
    leaves = draw.leaves()
    found = draw.ours(leaves, draw.loss(engine, "none"))
    found = found if isinstance(found, tuple) else (found,)
    assert len(found) == len(wanted)
    total = exact_total = 0
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)
        weights = torch.linspace(-1, 2, len(right), dtype=torch.float64)
        total = total + (weights * got).sum()
        exact_total = exact_total + (weights * right).sum()
    for got, right in zip(
        torch.autograd.grad(total, leaves, allow_unused=True),
        torch.autograd.grad(exact_total, exact, allow_unused=True),
        strict=True,
    ):
        zero = torch.zeros((), dtype=torch.float64)
        got, right = (zero if x is None else x for x in (got, right))
        torch.testing.assert_close(got, right.expand_as(got), rtol=1e-9, atol=1e-9)
    mean = sum(
        value.sum() / max(1, sum(counted))
        for value, (_, counted) in zip(wanted, groups, strict=True)
    )
    torch.testing.assert_close(draw.ours(leaves, draw.loss(engine, "mean")), mean)


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(300, 320))
def test_random_combinations_in_lower_precision(seed, dtype, small_tiles):
    """Rounded input is the exact input of both; near a limit, rounding may decide who counts."""
    draw = Draw(seed)
    leaves = [x.detach().to(dtype) for x in draw.leaves()]
    if draw.guide is not None:
        draw.guide = tuple(x.to(dtype) for x in draw.guide)
    loss = draw.loss(ENGINES[seed % 2], "mean")
    found = draw.ours([x.clone().requires_grad_() for x in leaves], loss)
    draw.guide = None if draw.guide is None else tuple(x.double() for x in draw.guide)
    exact = draw.ours([x.double() for x in leaves], loss)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=2e-5, atol=2e-5)
    (grad, *_) = torch.autograd.grad(
        draw.ours(parts := [x.clone().requires_grad_() for x in leaves], loss), parts[:1]
    )
    assert grad.dtype == dtype and grad.isfinite().all()


# ---------------------------------------------------------------------------- other projects' lines

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


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LINES)
def test_lines_of_other_projects(name, engine, small_tiles, monkeypatch):
    """Their values and gradients, in float64 and with ten digits."""
    plain = PairLoss.__init__

    def with_engine(loss, **options):
        plain(loss, engine=engine, **options)

    monkeypatch.setattr(PairLoss, "__init__", with_engine)
    case = CASES[name]
    x = {}
    for key, numbers in case["inputs"].items():
        x[key] = torch.tensor(numbers, dtype=torch.float64).requires_grad_()
    value = LINES[name](x, case["options"])
    value.backward()
    assert abs(float(value) - case["value"]) < 2e-9
    for key, wanted in case["gradients"].items():
        grad = torch.zeros_like(x[key]) if x[key].grad is None else x[key].grad
        exact = torch.tensor(wanted, dtype=torch.float64)
        torch.testing.assert_close(grad.reshape(exact.shape), exact, rtol=0, atol=2e-9)


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


# ---------------------------------------------------------------------------------------- processes

# Options of losses whose batch two processes share, and what they pass.
SHARED = {
    "qwen": (dict(QWEN, directions="image-text"), "negatives"),
    "own alone": ({"directions": "image-text", "in_batch": False, "hardness": (0.0, 5.0)}, "own"),
    "own and joint": ({"joint": True, **GIST, "margin": 0.05}, "own"),
    "guide": ({"margin": -0.1, "relative": True, **GIST}, "guide"),
    "text-image": ({"directions": "text-image", "image_image": True}, ""),
    "inner products": ({"normalize": False, "text_text": True}, "negatives"),
}


def batch_of(sizes: tuple[int, int]) -> dict[str, Tensor]:
    """Return a whole batch: of sizes (images, texts) with ids, of which several match."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    n, m = sizes
    return {
        "images": draw(n, 4),
        "texts": draw(m, 4),
        "image_ids": torch.arange(n) % 5,
        "text_ids": torch.arange(m) % 6,
        "negatives": draw(5, 4),
        "negative_ids": torch.tensor([0, 9, 2, NO_ID, 9]),
        "own": draw(n, 2, 4),
        "guide_images": draw(n, 3),
        "guide_texts": draw(m, 3),
    }


def shared_loss(name: str, x: dict[str, Tensor], **common: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of a batch, or of a process's part, and the leaves."""
    options, further = SHARED[name]
    leaves = [x["images"], x["texts"]]
    more: dict[str, Any] = {}
    if further in ("negatives", "own"):
        leaves.append(x[further])
        more["negatives"] = x[further]
    if further == "negatives":
        more["negative_ids"] = x["negative_ids"]
    if further == "guide":
        more["guide"] = (x["guide_images"], x["guide_texts"])
    for leaf in leaves:
        leaf.requires_grad_()
    loss = InfoNCELoss(0.2, **options, **common)  # type: ignore
    value = loss(x["images"], x["texts"], x["image_ids"], x["text_ids"], **more)
    return value, leaves


SIZES = {  # of the first process; the second has the rest
    "even": {"images": 4, "texts": 5, "negatives": 2},
    "uneven": {"images": 6, "texts": 3, "negatives": 4},
    "empty": {"images": 0, "texts": 10, "negatives": 5},
}


def of_a_process(rank: int, sizes: dict[str, int]) -> dict[str, list[Tensor]]:
    whole = batch_of((8, 10))
    first = {
        "image_ids": sizes["images"],
        "own": sizes["images"],
        "guide_images": sizes["images"],
        "text_ids": sizes["texts"],
        "guide_texts": sizes["texts"],
        "negative_ids": sizes["negatives"],
        **sizes,
    }
    found = {}
    for name in SHARED:
        part = {}
        for key, x in whole.items():
            part[key] = (x[: first[key]] if rank == 0 else x[first[key] :]).clone()
        value, leaves = shared_loss(name, part, gather=True)
        found[name] = [value.detach(), *torch.autograd.grad(value, leaves, allow_unused=True)]
    return found


@pytest.mark.parametrize("sizes", SIZES)
def test_processes_have_the_loss_and_the_gradients_of_one(sizes, tmp_path):
    parts = in_two_processes(of_a_process, tmp_path, SIZES[sizes])
    for name in SHARED:
        value, leaves = shared_loss(name, batch_of((8, 10)))
        exact = torch.autograd.grad(value, leaves)
        (first, *of_first), (second, *of_second) = (part[name] for part in parts)
        assert first == second
        torch.testing.assert_close(first, value.detach())
        for a, b, wanted in zip(of_first, of_second, exact, strict=True):
            # DistributedDataParallel divides gradients by the number of processes.
            torch.testing.assert_close(torch.cat([a, b]) / 2, wanted, rtol=1e-9, atol=1e-9)


NUMBERS = [[0, 1], [NO_ID, 1], [0, 2], [0, 9], [1, 3]]  # of images, for each image's own negatives


def loss_of_numbered(rank: int | None) -> list[Tensor]:
    """The loss where ids of negatives are numbers of own images; ``rank`` None: of the whole."""
    whole = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = {0: slice(2), 1: slice(2, 5), None: slice(5)}[rank]
    images, texts, negatives = (x[rows] for x in (whole[:, 0], whole[:, 1], whole[:, 2:]))
    numbers = torch.tensor(NUMBERS)
    if rank is None:
        numbers[2:] = torch.where(numbers[2:] < 3, numbers[2:] + 2, -1)  # the second process's
        numbers[:2] = torch.where(numbers[:2] < 2, numbers[:2], -1)
        numbers[1, 0] = NO_ID
    loss = InfoNCELoss(0.5, directions="image-text", gather=rank is not None)
    return [loss(images, texts, negatives=negatives, negative_ids=numbers[rows])]


def test_negatives_by_numbers_of_images_of_their_process(tmp_path):
    parts = in_two_processes(loss_of_numbered, tmp_path)
    (wanted,) = loss_of_numbered(None)
    for (found,) in parts:
        torch.testing.assert_close(found, wanted)


# --------------------------------------------------------------------------------------- directions

# Losses whose value of one direction is a part of that of both.
DIRECTED = {
    "infonce": lambda **o: InfoNCELoss(0.1, **o),
    "dcl": itrloss.DiversityContrastiveLoss,
    "hal": itrloss.HubnessAwareLoss,
    "triplet": itrloss.TripletLoss,
    "triplet all": lambda **o: itrloss.TripletLoss(mining="all", **o),
    "rince": itrloss.RINCELoss,
    "complementary": itrloss.ComplementaryContrastiveLoss,
    "supcon": itrloss.SupConLoss,
    "supcon inside": lambda **o: itrloss.SupConLoss(inside=True, **o),
    "mil-nce": itrloss.MILNCELoss,
    "multi-similarity": lambda **o: itrloss.MultiSimilarityLoss(epsilon=0.1, **o),
    "circle": itrloss.CircleLoss,
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", DIRECTED)
def test_one_direction_is_a_part_of_both(name, engine, small_tiles):
    x = batch_of((8, 10))
    given = x["images"], x["texts"], x["image_ids"], x["text_ids"]
    both = DIRECTED[name](reduction="none", engine=engine)(*given)
    for k, directions in enumerate(("image-text", "text-image")):
        loss = DIRECTED[name](directions=directions, reduction="none", engine=engine)
        found = loss(*given)
        torch.testing.assert_close(found, both[k])
        loss.reduction = "sum"
        torch.testing.assert_close(loss(*given), both[k].sum())
        assert f"directions='{directions}'" in repr(loss)
        other = DIRECTED[name](engine=engine)
        other.directions = directions
        loss.reduction = other.reduction
        torch.testing.assert_close(loss(*given), other(*given))


def test_distillation_of_one_direction():
    x = batch_of((8, 10))
    teacher = torch.randn(8, 10, dtype=torch.float64)
    both = itrloss.DistillationLoss(reduction="none")(x["images"], x["texts"], teacher)
    loss = itrloss.DistillationLoss(reduction="none", directions="text-image")
    torch.testing.assert_close(loss(x["images"], x["texts"], teacher), both[1])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", ["same", "other"])
def test_distillation_within_groups(engine, rule, small_tiles):
    """By loops: a candidate counts if it matches, or if its group lets it."""
    v, w = (torch.randn(7, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    teacher = torch.randn(7, 7, dtype=torch.float64)
    groups = torch.tensor([0, 1, 0, 1, 2, 0, 2])
    options = {"groups": rule, "engine": engine, "directions": "image-text"}
    loss = itrloss.DistillationLoss(0.2, 0.5, **options)
    found = loss(v, w, teacher, image_groups=groups)
    scores = F.normalize(v) @ F.normalize(w).T
    values = []
    for i in range(7):
        own = [j for j in range(7) if i == j or (groups[i] == groups[j]) == (rule == "same")]
        q = (teacher[i, own] / 0.5).softmax(0)
        values.append(-(q * (scores[i, own] / 0.2).log_softmax(0)).sum())
    wanted = torch.stack(values).mean()
    torch.testing.assert_close(found, wanted)
    for a, b in zip(*[torch.autograd.grad(x, (v, w)) for x in (found, wanted)], strict=True):
        torch.testing.assert_close(a, b)


def test_distillation_of_scores_is_that_of_their_embeddings():
    x = batch_of((8, 10))
    teacher = torch.randn(8, 10, dtype=torch.float64)
    loss = itrloss.DistillationLoss()
    scores = F.normalize(x["images"]) @ F.normalize(x["texts"]).T
    wanted = loss(x["images"], x["texts"], teacher)
    torch.testing.assert_close(loss(scores=scores, teacher=teacher), wanted)
    torch.testing.assert_close(
        loss(
            scores=scores,
            teacher=Similarity.from_scores(teacher, torch.arange(8), torch.arange(10)),
        ),
        wanted,
    )
    with pytest.raises(TypeError, match="teacher: expected a Similarity"):
        loss(scores=scores)
    with pytest.raises(ValueError, match="teacher: expected shape"):
        loss(scores=scores, teacher=teacher[:, :4])


@pytest.mark.parametrize("name", ["infonce", "dcl", "supcon"])
def test_inner_products(name):
    x = batch_of((8, 10))
    v, w, *ids = x["images"] / 3, x["texts"] / 3, x["image_ids"], x["text_ids"]
    loss = DIRECTED[name](normalize=False)
    torch.testing.assert_close(loss(v, w, *ids), loss(Similarity(v, w, *ids, normalize=False)))
    assert "normalize=False" in repr(loss)
    assert loss(2 * v, w, *ids) != loss(v, w, *ids)


# ----------------------------------------------------------------------------------------- the rest


def test_a_learnt_scale_is_limited_in_training():
    v, w = (torch.randn(4, 8) for _ in range(2))
    loss = InfoNCELoss(0.01, learnable=True, max_scale=50.0)
    before = loss.eval()(v, w)
    torch.testing.assert_close(float(loss.temperature), 0.01)
    after = loss.train()(v, w)
    torch.testing.assert_close(float(loss.temperature), 0.02)
    torch.testing.assert_close(after, InfoNCELoss(0.02)(v, w))
    assert before != after
    after.backward()
    assert loss.log_scale is not None and loss.log_scale.grad is not None
    assert loss.log_scale.grad != 0  # at the limit, it may still fall


@pytest.mark.parametrize("shared", [True, False])
def test_an_image_whose_negatives_all_match_it_does_not_count(shared):
    v, w = torch.randn(2, 8), torch.randn(2, 8)
    loss = one_way(0.1, in_batch=False)
    if shared:
        further, ids = torch.randn(1, 8), [0]
        second = further[None]
    else:
        further, ids = torch.randn(2, 1, 8), [[0], [7]]
        second = further[1:]
    found = loss(v, w, negatives=further, negative_ids=ids)
    torch.testing.assert_close(found, loss(v[1:], w[1:], negatives=second))
    loss.reduction = "none"
    assert loss(v, w, negatives=further, negative_ids=ids)[0] == 0


def test_negatives_alone_multiply_nothing_else():
    """Without the batch's texts, nothing of its size (N, M) is computed."""
    n, k, d = 256, 2, 16
    v, w, z = (torch.randn(n, *size, d) for size in ((), (), (k,)))
    loss = one_way(0.1, in_batch=False)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        loss(v, w, negatives=z)
    assert counter.get_total_flops() <= 2 * n * (k + 1) * d


@pytest.mark.parametrize("engine", ENGINES)
def test_options_that_are_left_out_cost_nothing(engine):
    """A plain InfoNCE launches what its function does."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Counter.count += 1
            return function(*args, **(kwargs or {}))

    v, w = (torch.randn(32, 16, requires_grad=True) for _ in range(2))
    counts = []
    loss = InfoNCELoss(engine=engine)
    loss(v, w)  # which looks at the first batch
    for call in (
        lambda: loss(v, w),
        lambda: itrloss.functional.info_nce_loss(Similarity(v, w, engine=engine)),
    ):
        Counter.count = 0
        with Counter():
            call().backward()
        counts.append(Counter.count)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_copy_of_the_positive_is_no_negative_with_a_margin_of_zero(engine: Any, dtype: Any):
    """Whatever the rounding of two products of the same vectors."""
    loss = InfoNCELoss(0.05, margin=0.0, directions="image-text", engine=engine)
    guided = InfoNCELoss(0.05, margin=0.0, engine=engine)
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        image = torch.randn(1, 64, generator=draw, dtype=dtype)
        text = torch.randn(1, 64, generator=draw, dtype=dtype)
        assert loss(image, text.repeat(2, 1), [0], [0, 1]) == 0
        images, texts = (x.repeat(2, 1) for x in (image, text))
        guide = torch.randn(2, 2, 48, generator=draw, dtype=dtype)[:, :1].repeat(1, 2, 1)
        assert guided(images, texts, guide=tuple(guide)) == 0
