"""The loops of `oracle_embedders` against the formulas of the projects that they are for, and the
library against the loops.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import itrloss
from support.oracle_embedders import (
    NO_ID,
    contrastive,
    distillation,
    late_scores,
    mask_of_lengths,
    sdm,
    soft_triplet,
    unit,
)

Inputs = dict[str, Tensor]
Options = dict[str, Any]
FOLDER = Path(__file__).parent


def read_cases() -> dict[str, Any]:
    """The values and gradients of the projects' formulas, in float64 and rounded to 10 digits."""
    cases = {}
    for name in ("embedders.json", "embedders_more.json"):
        for case in json.loads((FOLDER / name).read_text("utf-8")):
            cases[case["name"]] = case
    return cases


CASES = read_cases()
one = partial(contrastive, directions="image-text")


# -------------------------------------------------------------------- the projects' lines in ours


def line(temperature: float, negatives: str = "", **options: Any) -> Any:
    """One direction, with everybody's negatives (``"shared"``) or each query's own (``"own"``)."""

    def compute(x: Inputs, _: Options) -> Tensor:
        given = x["negatives"] if negatives else None
        if negatives == "shared":
            given = given.flatten(0, 1)
        return one(
            x["queries"], x["positives"], temperature=temperature, negatives=given, **options
        )

    return compute


def halved(temperature: float, names: tuple[str, str], **options: Any) -> Any:
    """The mean of both directions, where ours is their sum."""

    def compute(x: Inputs, _: Options) -> Tensor:
        return 0.5 * contrastive(x[names[0]], x[names[1]], temperature=temperature, **options)

    return compute


QUERIES = ("queries", "positives")
PAIRS = ("images", "texts")
QWEN = {"image_image": True, "text_text": "unfiltered", "margin": 0.1}


def ragged(x: Inputs, options: Options) -> Tensor:
    """Qwen3 with another number of negatives for each query."""
    numbers = options["numbers_of_negatives"]
    shared = torch.cat([own[:k] for own, k in zip(x["negatives"], numbers, strict=True)])
    return one(x["queries"], x["positives"], temperature=0.1, negatives=shared, **QWEN)


def marks(mask: Any) -> Tensor:
    """Ids of negatives: -1 matches nothing here, and NO_ID says that there is none."""
    return torch.where(torch.as_tensor(mask).bool(), -1, NO_ID)


def own_ragged(x: Inputs, options: Options) -> Tensor:
    ids = marks(mask_of_lengths(options["numbers_of_negatives"], 2))
    return one(
        *(x["queries"], x["positives"]),
        temperature=0.1,
        in_batch=False,
        negatives=x["negatives"],
        negative_ids=ids,
    )


def nemo(x: Inputs, options: Options, **more: Any) -> Tensor:
    ids = marks(options["negatives_mask"])
    return contrastive(
        *(x["queries"], x["positives"]),
        temperature=0.1,
        negatives=x["negatives"],
        negative_ids=ids,
        **more,
    )


def nemo_same_document(x: Inputs, options: Options) -> Tensor:
    documents = torch.tensor(options["document_ids"]).view(3, 3)
    return one(
        *(x["queries"], x["positives"]),
        temperature=0.1,
        image_ids=documents[:, 0],
        text_ids=documents[:, 0],
        negatives=x["negatives"].flatten(0, 1),
        negative_ids=documents[:, 1:].flatten(),
    )


def gist(x: Inputs, _: Options, **options: Any) -> Tensor:
    guide = [x[name] for name in ("guide_queries", "guide_positives")]
    if "negatives" in x:
        options["negatives"] = x["negatives"]
        guide.append(x["guide_negatives"])
    options["negatives_are_texts"] = False
    return one(x["queries"], x["positives"], temperature=0.1, guide=guide, **options)


def own_scores(queries: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """(N, 1 + K) cosines of each query with its positive and its negatives."""
    rows = []
    for q, p, own in zip(queries, positives, negatives, strict=True):
        rows.append(torch.stack([(unit(q) * unit(d)).sum() for d in (p, *own)]))
    return torch.stack(rows)


def flagembedding_kd(x: Inputs, options: Options) -> Tensor:
    own = own_scores(x["queries"], x["positives"], x["negatives"])
    kd = distillation(own, x["teacher"], temperature=0.1, teacher_temperature=1.0)
    return line(0.1, "shared")(x, options) + kd


def nemo_distill(x: Inputs, _: Options) -> Tensor:
    """A divergence: the cross-entropy minus the teacher's entropy."""

    def scores(prefix: str) -> Tensor:
        q, p, n = (x[prefix + name] for name in ("queries", "positives", "negatives"))
        batch = torch.stack([torch.stack([(unit(a) * unit(b)).sum() for b in p]) for a in q])
        return torch.cat([batch, own_scores(q, p, n)[:, 1:]], 1)

    teacher = scores("teacher_").detach()
    kd = partial(distillation, teacher=teacher, temperature=0.1, teacher_temperature=0.1)
    return kd(scores("")) - kd(teacher)


def late(temperature: float, form: str, **options: Any) -> Any:
    """In-batch contrast of late interaction."""

    def compute(x: Inputs, _: Options) -> Tensor:
        scores = late_scores(x["queries"], x["documents"], form, **options)
        return one(scores=scores, temperature=temperature)

    return compute


def colpali_gathered(x: Inputs, options: Options) -> Tensor:
    scores = late_scores(x["queries"], x["documents"], "max_mean")
    ids = options["offset"] + torch.arange(len(scores))
    return one(scores=scores, temperature=0.1, image_ids=ids, text_ids=torch.arange(3))


def colpali_negatives(x: Inputs, _: Options) -> Tensor:
    """Each own negative is a pair of its own."""
    scores = late_scores(x["queries"], x["documents"], "max_mean")
    own = late_scores(x["queries"], x["negatives"], "max_mean")
    return one(
        scores=scores.repeat_interleave(2, 0),
        image_ids=torch.arange(3).repeat_interleave(2),
        text_ids=torch.arange(3),
        negatives=own.reshape(-1, 1),
        in_batch=False,
        temperature=0.1,
    )


def colpali_negatives_half(x: Inputs, options: Options) -> Tensor:
    return 0.5 * colpali_negatives(x, options) + 0.5 * late(0.1, "max_mean")(x, options)


def colpali_dense_negatives(x: Inputs, _: Options) -> Tensor:
    return one(
        x["queries"].repeat_interleave(2, 0),
        x["positives"].repeat_interleave(2, 0),
        temperature=0.1,
        negatives=x["negatives"].reshape(-1, 1, 4),
        in_batch=False,
    )


HARDEST = {"temperature": 0.1, "margin": 0.0, "directions": "image-text", "reduction": "mean"}


def colpali_hardest(x: Inputs, _: Options) -> Tensor:
    return soft_triplet(scores=late_scores(x["queries"], x["documents"], "max_mean"), **HARDEST)


def colpali_sigmoid(x: Inputs, _: Options) -> Tensor:
    """A mean over pairs, of which query i and document i match."""
    scores = late_scores(x["queries"], x["documents"], "max_mean") / 0.1
    signs = 2 * torch.eye(len(scores), dtype=scores.dtype) - 1
    return torch.stack([(1 + (-z).exp()).log() for z in (signs * scores).flatten()]).mean()


def colpali_dense_hardest(x: Inputs, _: Options) -> Tensor:
    return soft_triplet(x["queries"], x["positives"], **HARDEST)


def padded(x: Inputs, options: Options) -> Tensor:
    """Two documents of each query, the second of which matches none; padding is masked."""
    both = torch.stack([x["documents"], x["others"]], 1).flatten(0, 1)
    lengths = zip(options["document_lengths"], options["other_lengths"], strict=True)
    mask = mask_of_lengths([length for pair in lengths for length in pair], 5)
    ids = torch.tensor([0, -1, 1, -1, 2, -1])
    scores = late_scores(x["queries"], both, "max_sum", text_mask=mask)
    return one(scores=scores, text_ids=ids, temperature=0.5)


def nemo_maxsim(x: Inputs, _: Options) -> Tensor:
    scores = late_scores(x["queries"], x["documents"][:, :4])
    own = late_scores(x["queries"], x["negatives"])
    return one(scores=scores, negatives=own, temperature=0.5, in_batch=False)


def clip4clip(x: Inputs, _: Options) -> Tensor:
    scores = [
        torch.stack([10 * (unit(t) * unit(v)).sum() for v in x["images"]]) for t in x["texts"]
    ]
    return 0.5 * contrastive(scores=torch.stack(scores), temperature=1.0)


def clap_mlp(x: Inputs, options: Options) -> Tensor:
    first = halved(0.1, ("images", "texts_mlp"))(x, options)
    return 0.5 * (first + halved(0.2, ("images_mlp", "texts"))(x, options))


def clap_weighted(x: Inputs, options: Options) -> Tensor:
    """A mean over pairs, weighted by how close an item is to the others of its side."""

    def weights(vectors: Tensor) -> Tensor:
        near = [sum((unit(a) * unit(b)).sum() for b in vectors) for a in vectors.detach()]
        return (torch.stack(near) / (options["kappa"] * len(vectors))).exp()

    total = 0
    for a, b, t, own in (
        ("images", "texts_mlp", 0.1, "images"),
        ("images_mlp", "texts", 0.2, "texts"),
    ):
        rows, cols = contrastive(x[a], x[b], temperature=t, reduction="none")
        w = weights(x[own]).detach()
        total = total + (w @ rows + w @ cols) / w.sum()
    return total / 4


def fgclip_hard(x: Inputs, _: Options) -> Tensor:
    texts = x["texts"][:, 0]
    own = x["texts"][:, 1:]
    return one(x["images"], texts, temperature=0.1, in_batch=False, negatives=own)


def irra(x: Inputs, options: Options) -> Tensor:
    ids = options["ids"]
    return sdm(x["images"], x["texts"], temperature=0.1, image_ids=ids, text_ids=ids)


def sdm_weights(x: Inputs, options: Options) -> Tensor:
    matches = torch.tensor(options["matches"], dtype=torch.float64)
    return sdm(x["images"], x["texts"], temperature=0.1, matches=matches)


def marked(values: Any) -> Any:
    """``"none"`` in the file is NO_ID."""
    if isinstance(values, list):
        return [marked(value) for value in values]
    return NO_ID if values == "none" else values


def groups(rule: str) -> Any:
    def compute(x: Inputs, options: Options) -> Tensor:
        return contrastive(
            *(x["images"], x["texts"]),
            temperature=0.1,
            image_groups=options["groups"],
            negative_groups=rule,
        )

    return compute


def groups_open(x: Inputs, options: Options) -> Tensor:
    return one(
        *(x["images"], x["texts"]),
        temperature=0.1,
        image_groups=options["image_groups"],
        text_groups=marked(options["text_groups"]),
    )


def label_sets(x: Inputs, options: Options) -> Tensor:
    ids = {name: marked(options[name]) for name in ("image_ids", "text_ids")}
    return contrastive(x["images"], x["texts"], temperature=0.1, **ids)


def matches(x: Inputs, options: Options) -> Tensor:
    """The file has -1 for a pair in no sum."""
    given = torch.tensor(options["matches"], dtype=torch.float64)
    given[given < 0] = torch.nan
    return contrastive(x["images"], x["texts"], temperature=0.1, matches=given)


def several_positives(x: Inputs, options: Options) -> Tensor:
    return contrastive(
        *(x["images"], x["texts"]),
        temperature=0.1,
        image_ids=options["image_ids"],
        text_ids=options["text_ids"],
        margin=0.2,
        negatives=x["negatives"],
    )


LINES = {
    "vlm2vec": line(0.1, "shared"),
    "vlm2vec-in-example": line(0.1, "own", in_batch=False),
    "tevatron-gradcache": line(1.0, "shared", normalize=False),
    "tevatron": line(0.5, "shared", normalize=False),
    "gradcache": line(1.0, "shared"),
    "ms-swift": line(0.1, "shared"),
    "ms-swift-own": line(0.1, "own", in_batch=False),
    "ms-swift-filter": line(0.1, "shared", margin=0.1),
    "qwen3": line(0.1, "shared", **QWEN),
    "ms-swift-qq-dd": line(0.1, "shared", image_image=True, text_text=True),
    "qwen3-ragged": ragged,
    "ms-swift-own-ragged": own_ragged,
    "flagembedding-own": line(0.1, "own", in_batch=False),
    "flagembedding": line(0.1, "shared"),
    "flagembedding-kd": flagembedding_kd,
    "contrastors": line(0.1, "shared"),
    "contrastors-both": line(0.1, directions="both"),
    "st-mnrl": line(0.1, "shared"),
    "st-symmetric": halved(0.1, QUERIES),
    "st-symmetric-negatives": lambda x, _: 0.5 * line(0.1, "shared", directions="both")(x, _),
    "gte": line(0.1, directions="both", joint=True, image_image=True, text_text=True),
    "st-hardness-all": line(0.1, "shared", hardness=9.0),
    "embeddinggemma": line(0.1, "own", hardness=(0.0, 5.0)),
    "gist": partial(gist, image_image=True, text_text=True, margin=0.0),
    "gist-plain": partial(gist, margin=0.0),
    "gist-negatives": partial(gist, image_image=True, text_text=True, margin=-0.05, relative=True),
    "colpali": late(0.1, "max_mean"),
    "colpali-sum": late(1.0, "max_sum"),
    "colpali-smooth": late(0.1, "smooth_max_mean", alpha=10.0),
    "colpali-gathered": colpali_gathered,
    "colpali-negatives": colpali_negatives,
    "colpali-negatives-half": colpali_negatives_half,
    "colpali-hardest": colpali_hardest,
    "colpali-sigmoid": colpali_sigmoid,
    "colpali-dense": line(0.1),
    "colpali-dense-both": halved(0.1, QUERIES),
    "colpali-dense-negatives": colpali_dense_negatives,
    "colpali-dense-hardest": colpali_dense_hardest,
    "pylate": padded,
    "late-padding": padded,
    "nemo": partial(nemo, directions="image-text"),
    "nemo-own": partial(nemo, directions="image-text", in_batch=False),
    "nemo-symmetric": lambda x, options: 0.5 * nemo(x, options),
    "nemo-same-document": nemo_same_document,
    "nemo-maxsim": nemo_maxsim,
    "nemo-distill": nemo_distill,
    "clip4clip": clip4clip,
    "clap": halved(0.1, PAIRS),
    "clap-mlp": clap_mlp,
    "clap-weighted": clap_weighted,
    "fgclip-hard": fgclip_hard,
    "fgclip-region": halved(0.1, PAIRS),
    "irra-sdm": irra,
    "sdm-weights": sdm_weights,
    "irra-itc": halved(0.1, PAIRS),
    "groups-same": groups("same"),
    "groups-open": groups_open,
    "groups-other": groups("other"),
    "label-sets": label_sets,
    "matches": matches,
    "several-positives-own-filter": several_positives,
}


def test_every_case_has_a_line() -> None:
    assert set(LINES) == set(CASES)


@pytest.mark.parametrize("name", LINES)
def test_loops_are_the_projects_formulas(name: str) -> None:
    """Values and gradients, to the digits of the file."""
    case = CASES[name]
    x = {
        key: torch.tensor(value, dtype=torch.float64, requires_grad=True)
        for key, value in case["inputs"].items()
    }
    value = LINES[name](x, case["options"])
    assert value.item() == pytest.approx(case["value"], abs=1e-9)
    value.backward()
    for key, rows in case["gradients"].items():
        given = torch.zeros_like(x[key]) if x[key].grad is None else x[key].grad
        wanted = torch.tensor(rows, dtype=torch.float64)
        error = (given.reshape(wanted.shape) - wanted).abs().max()
        assert error < 1e-9, (key, error)


# ------------------------------------------------------------------- rules that no case has alone


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# ------------------------------------------------------------------- random options of the library


def value_and_gradients(value: Any, inputs: list[Tensor]) -> list[Tensor]:
    """The values, and the gradients of a sum of them with weights."""
    parts = value if isinstance(value, tuple) else (value,)
    weights = torch.Generator().manual_seed(0)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        total = total + (part * torch.rand(part.shape, generator=weights, dtype=part.dtype)).sum()
    if not total.requires_grad:  # no anchor counts
        return [part.detach() for part in parts] + [torch.zeros_like(x) for x in inputs]
    found = torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)
    return [part.detach() for part in parts] + list(found)


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("directions", ["both", "image-text", "text-image"])
@pytest.mark.parametrize("seed", range(8))
def test_soft_triplet_against_loops(engine: Any, directions: Any, seed: int) -> None:
    """Matches have weights, and some pairs neither match nor are negatives."""
    generator = torch.Generator().manual_seed(seed)
    images = normal(seed, 5, 4)
    texts = normal(seed + 100, 6, 4)
    matches = torch.randint(-1, 3, (5, 6), generator=generator).double()
    matches[matches < 0] = torch.nan
    if seed == 0:
        matches[0] = 1.0  # without a negative
    given = [x.requires_grad_() for x in (images, texts)]
    options: dict[str, Any] = {"margin": 0.1, "temperature": 0.3, "directions": directions}
    options["reduction"] = ("sum", "mean", "none")[seed % 3]
    loss = itrloss.TripletLoss(engine=engine, **options)
    found = value_and_gradients(loss(images, texts, matches=matches), given)
    wanted = value_and_gradients(soft_triplet(images, texts, matches=matches, **options), given)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_irras_sdm_is_the_library_s() -> None:
    case = CASES["irra-sdm"]
    images, texts = (
        torch.tensor(case["inputs"][key], dtype=torch.float64) for key in ("images", "texts")
    )
    ids = case["options"]["ids"]
    found = itrloss.SDMLoss(0.1)(images, texts, ids, ids)
    assert found.item() == pytest.approx(case["value"], abs=1e-9)
