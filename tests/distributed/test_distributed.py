"""Two processes of ``torch.distributed``: ids, states that DDP broadcasts, re-ranking and
metrics.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import pairwise, public_rerankers
from support.losses_registry import select
from support.processes import WORLD, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import itrloss

D = 4


def encoder() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, D)


def late_worker(rank: int, state: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Only the first process loads a state; DDP broadcasts it to the other."""
    model = nn.ModuleDict({"encoder": encoder(), "memory": itrloss.CoupledMemory(9, D)})
    model["means"] = itrloss.OnlineKMeans(4, D)
    if rank == 0:
        model.load_state_dict(state)
    DistributedDataParallel(model)
    assert len(model["memory"]) == 5 and len(model["means"]) == 4
    return model["means"].update(torch.ones(2, D) * (rank + 1)), model["means"].centroids


@pytest.mark.slow
def test_a_state_that_ddp_broadcasts_counts_too(tmp_path):
    model = nn.ModuleDict({"encoder": encoder(), "memory": itrloss.CoupledMemory(9, D)})
    model["means"] = itrloss.OnlineKMeans(4, D)
    model["memory"].enqueue(*torch.randn(2, 5, D), torch.arange(5))
    model["means"].update(torch.randn(4, D))
    (ids, centroids), (other_ids, other) = run(late_worker, tmp_path, model.state_dict())
    assert torch.equal(ids, other_ids) and torch.equal(centroids, other)


PAIR_LOSSES = select("dcl", "hal", "infonce learnable", "sigmoid", "triplet", "triplet all")
# per-process image indices of texts: invalid ones match no image, small types must not overflow
NUMBERED = {
    "none": (4, torch.tensor([0, 1, 2, -1])),
    "beyond the last": (4, torch.tensor([0, 1, 2, 5])),
    "int8": (100, torch.arange(100).to(torch.int8)),
    "uint8": (200, torch.arange(200).to(torch.uint8)),
}
NUMBERED_IN_ONE = {
    **dict.fromkeys(["none", "beyond the last"], torch.tensor([0, 1, 2, -1, 4, 5, 6, -1])),
    "int8": torch.arange(200),
    "uint8": torch.arange(400),
}


def numbered(rank: int | None, name: str, **options: Any) -> list[torch.Tensor]:
    """Values of losses that depend on all pairs, with this process's part or with everything."""
    n, ids = (
        NUMBERED[name] if rank is not None else (WORLD * NUMBERED[name][0], NUMBERED_IN_ONE[name])
    )
    generator = torch.Generator().manual_seed(0)
    v, w = (torch.randn(WORLD * NUMBERED[name][0], D, generator=generator) for _ in range(2))
    own = slice((rank or 0) * n, (rank or 0) * n + n)
    losses = [entry.make(**options) for entry in PAIR_LOSSES.values()]
    return [loss(v[own], w[own], None, ids).detach() for loss in losses]


def numbering(rank: int) -> dict[str, list[torch.Tensor]]:
    return {name: numbered(rank, name, gather=True) for name in NUMBERED}


def test_texts_of_no_image_stay_so_among_the_images_of_all(tmp_path):
    for found in run(numbering, tmp_path):
        torch.testing.assert_close(found, {name: numbered(None, name) for name in NUMBERED})


def gradient_of_gathered(rank: int) -> torch.Tensor:
    """A gradient of 256 from one of three processes, another for each row, and of 1 from others."""
    x = torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = itrloss.distributed.gather(x)
    upstream = torch.ones_like(gathered)
    upstream[rank::3] = 256
    gathered.backward(upstream)
    assert x.grad is not None
    return x.grad


def test_gradients_of_half_types_are_summed_in_float32(tmp_path):
    """In bfloat16, 256 + 1 is 256."""
    for found in run(gradient_of_gathered, tmp_path, world=3):
        assert found.flatten().tolist() == [258.0] * 3


def test_a_process_alone_gathers_nothing():
    x = torch.randn(3, 2)
    assert itrloss.distributed.gather(x) is x
    scores = torch.randn(3, 3)
    assert torch.equal(
        itrloss.InfoNCELoss(gather=True)(scores=scores), itrloss.InfoNCELoss()(scores=scores)
    )


# --- re-ranking -----------------------------------------------------------------------------------

RERANKERS = {
    "fast": itrloss.rerank.FastReranker((9.0, 8.0), (8.0, 17.0)),
    "inverted softmax": itrloss.rerank.InvertedSoftmax(2.0),
    "inverted softmax, bank": itrloss.rerank.InvertedSoftmax(2.0),
    "nnn": itrloss.rerank.NearestNeighborNorm(k=4),
    "csls": itrloss.rerank.CSLS(k=3),
    "csls, bank": itrloss.rerank.CSLS(k=3),
    "fast, bank": itrloss.rerank.FastReranker((9.0, 8.0), (8.0, 17.0)),
    "dbnorm": itrloss.rerank.DualBankNorm(),
    "sinkhorn": itrloss.rerank.Sinkhorn(scale=9.0, iterations=3),
    "dbsn": itrloss.rerank.DualBankSinkhorn(scale=9.0, iterations=3),
    "dual softmax": itrloss.rerank.DualSoftmax(9.0),
    "dual softmax, bank": itrloss.rerank.DualSoftmax(9.0),
    "qb-norm": itrloss.rerank.QueryBankNorm(9.0),
    # more than the number of images of the second process
    "qb-norm, 4": itrloss.rerank.QueryBankNorm(9.0, k=4),
    "mutual proximity": itrloss.rerank.MutualProximity(),
    "mutual proximity, bank": itrloss.rerank.MutualProximity(),
    "rr": itrloss.rerank.ReciprocalReranker(3, 5),
    "rr, bank": itrloss.rerank.ReciprocalReranker(3, 5),
    "mr": itrloss.rerank.MultiFactorReranker(4),
    "mr, bank": itrloss.rerank.MultiFactorReranker(4),
}
BANKED = (
    "dbnorm",
    "dbsn",
    "qb-norm",
    "qb-norm, 4",
    *(name for name in RERANKERS if name.endswith(", bank")),
)
CUTS = {"images": 5, "texts": 12}  # of 8 and 16 candidates: the first process has more


def embedded() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"images": 8, "texts": 16, "bank_images": 11, "bank_texts": 9}
    return {
        name: torch.randn(n, D, generator=generator, dtype=torch.float64)
        for name, n in sizes.items()
    }


class Scorer:
    """A second stage whose representation, as that of a function, has an address of its process."""

    def __call__(self, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return ((7 * i + 3 * j) % 11).double()

    def __repr__(self) -> str:
        return f"<scorer of process {os.getpid()}>"


def reranked(given: dict[str, torch.Tensor], **options: Any) -> dict[str, list[torch.Tensor]]:
    ids = torch.arange(len(given["images"])), torch.arange(len(given["texts"]))
    found = {}
    for kind, (dtype, more) in {
        "": (torch.float64, {}),
        "tiled ": (torch.float64, {"engine": "tiled", "normalize": False}),
        "half ": (torch.bfloat16, {}),
    }.items():
        sim = itrloss.Similarity(given["images"].to(dtype), given["texts"].to(dtype), *ids, **more)
        for name, reranker in RERANKERS.items():
            reranker.fit(*((given["bank_images"], given["bank_texts"]) if name in BANKED else ()))
            found[kind + name] = [x for top in reranker.topk(sim, 3, **options) for x in top]
        half = itrloss.rerank.ReciprocalReranker(3, 5).fit(images=given["bank_images"])
        found[f"{kind}rr, one bank"] = [x for top in half.topk(sim, 3, **options) for x in top]
        two_stages = itrloss.rerank.TwoStageReranker(Scorer(), 4)
        found[f"{kind}two stages"] = [x for top in two_stages.topk(sim, 3, **options) for x in top]
    return found


def reranking_worker(rank: int) -> dict[str, Any]:
    given = embedded()
    for name, cut in CUTS.items():
        given[name] = given[name][:cut] if rank == 0 else given[name][cut:]
    found: dict[str, Any] = reranked(given, gather=True)
    try:
        itrloss.rerank.Sinkhorn().topk(torch.rand(4, 4), 2, gather=True)
    except ValueError as error:
        found["of scores"] = str(error)
    return found


def test_two_processes_rank_as_one_does(tmp_path):
    found, whole = run(reranking_worker, tmp_path), reranked(embedded())
    for name, wanted in whole.items():
        for part, (mine, theirs) in zip(
            wanted, zip(*(f[name] for f in found), strict=True), strict=True
        ):
            torch.testing.assert_close(torch.cat([mine, theirs]), part)
    assert "Similarity of embeddings" in found[0]["of scores"]


def test_every_reranker_is_ranked_in_two_processes():
    tested = {type(method) for method in RERANKERS.values()}
    tested.add(itrloss.rerank.TwoStageReranker)
    # it refuses, as it compares the candidates with one another
    tested.add(itrloss.rerank.KReciprocalReranker)
    assert tested == public_rerankers()


# --- metrics --------------------------------------------------------------------------------------


# images and texts of a process, or of one with everything; and so for the kind "one image"
OWN = {None: (slice(8), slice(16)), 0: (slice(5), slice(12)), 1: (slice(5, 8), slice(12, 16))}
ONE_IMAGE = {
    None: (slice(6), slice(16)),
    0: (slice(5), slice(15)),
    1: (slice(5, 6), slice(15, 16)),
}


def parts_of(rank: int | None, given: dict[str, torch.Tensor]) -> dict[str, itrloss.Similarity]:
    """This process's share, or everything, with ids or with the default that replaces them."""
    images, texts = given["images"], given["texts"]
    n, m = OWN[rank]
    own = torch.arange(8)[n]
    of = torch.arange(16) // 2  # the image of each text
    crowd = torch.arange(16)[m].int() // 11
    several = {
        "matches across": itrloss.Similarity(images[n], texts[m], own, of[m]),
        "crowded": itrloss.Similarity(images[n], texts[m], own // 6, crowd),
    }
    n, m = ONE_IMAGE[rank]
    image_ids = torch.cat((of[:5], of[10:11]))
    text_ids = torch.cat((torch.arange(15) % 6, torch.tensor([4])))
    one_image = itrloss.Similarity(images[:6][n], texts[m], image_ids[n], text_ids[m])
    return {**several, "one image": one_image, **pairs_of(rank, images, images + 0.5 * texts[:8])}


def pairs_of(
    rank: int | None, images: torch.Tensor, near: torch.Tensor
) -> dict[str, itrloss.Similarity]:
    """This process's share of images and of one text each, or all of them."""
    n, _ = OWN[rank]
    own = torch.arange(8)[n]
    first = own - own[0]
    lengths = torch.arange(1, 9)[n, None]
    # Integers, whose scores are exact in any order of summation: otherwise copies might not tie
    # across processes.
    copies = (4 * images[:1]).round().expand(8, D)[n]
    whole_numbers = (4 * near[n]).round()
    # per process, the ids are unique: row i matches column i
    twice = torch.tensor([7, 3, 1, 2, 9, 3, 1, 7])[n]
    of_none = torch.where(own % 5 == 2, -1, first)
    return {
        "pairs": itrloss.Similarity(images[n], near[n]),
        "lengths count": itrloss.Similarity(images[n], near[n] * lengths, normalize=False),
        "ties": itrloss.Similarity(copies, whole_numbers, normalize=False),
        "the same ids in both": itrloss.Similarity(images[n], near[n], twice, twice),
        "numbers": itrloss.Similarity(images[n], near[n].flip(0), None, first.flip(0)),
        "numbers of none": itrloss.Similarity(images[n], near[n], None, of_none),
    }


def evaluated(rank: int | None, **options: Any) -> dict[str, Any]:
    given = embedded()
    found: dict[str, Any] = {}
    sims, ways = parts_of(rank, given), ("pessimistic", "optimistic")
    cases = dict.fromkeys(pairwise(ties=ways, kind=[*sims], name=["plain", *RERANKERS]))
    for ties, kind, name in cases | dict.fromkeys((ties, "ties", "plain") for ties in ways):
        reranker = RERANKERS.get(name)
        # sums over queries are rounded, so copies no longer tie
        if kind == "ties" and reranker is not None:
            continue
        if reranker is not None:
            reranker.fit(*((given["bank_images"], given["bank_texts"]) if name in BANKED else ()))
        found[f"{kind}, {name}, {ties}"] = itrloss.metrics.retrieval_metrics(
            sims[kind], reranker=reranker, ties=ties, hubness_k=2, **options
        )
    for kind, sim in sims.items():
        results = itrloss.metrics.retrieval_results(sim, **options)
        found[f"{kind}, queries"] = [dict(row) for row in results.rows()]
    return found


def metrics(sim: Any, **options: Any) -> dict[str, float]:
    return itrloss.metrics.retrieval_metrics(sim, gather=True, **options)


def wrong_embeddings(rank: int) -> dict[str, Callable[[], Any]]:
    """Evaluations of embeddings that one process refuses, or that differ in their kind."""
    given = embedded()
    images, texts = given["images"][:3], given["texts"][:3]
    broken = images.clone()
    broken[1, 2] = float("nan") if rank == 1 else 0.0
    dtype = (torch.float16, torch.bfloat16)[rank]
    dim = D - rank
    numbers = (torch.arange(3), torch.arange(3)) if rank else ()
    huge = given["images"] * 1e200
    far = itrloss.Similarity(huge, huge, normalize=False)
    changed = images.clone()
    late = itrloss.Similarity(changed, texts)
    changed += rank
    best = RERANKERS["nnn"].topk
    return {
        "nan": partial(metrics, itrloss.Similarity(broken, texts)),
        "nan, best": partial(best, itrloss.Similarity(broken, texts), 2, gather=True),
        "nan in texts": partial(metrics, itrloss.Similarity(texts, broken)),
        "type": partial(metrics, itrloss.Similarity(images.to(dtype), texts.to(dtype))),
        "dimension": partial(
            metrics, itrloss.Similarity(torch.ones_like(images)[:, :dim], texts[:, :dim])
        ),
        "numbers here": partial(metrics, itrloss.Similarity(images, texts, *numbers)),
        "changed": partial(metrics, late),
        "far": partial(best, far, 2, gather=True),
    }


def wrong_questions(rank: int) -> dict[str, Callable[[], Any]]:
    """Evaluations that processes cannot do together, or that differ in what they ask."""
    given = embedded()
    whole = itrloss.Similarity(given["images"][:3], given["texts"][:3])
    across = parts_of(rank, given)["matches across"]
    blocks = itrloss.rerank.KReciprocalReranker()
    return {
        "one asks more": partial(metrics, whole, hubness_k=2 + rank),
        "one without": partial(metrics, whole if rank else torch.eye(3)),
        "scores": partial(metrics, torch.eye(4)),
        "folds": partial(metrics, across, folds=2),
        "blocks": partial(metrics, across, reranker=blocks),
        "other": partial(itrloss.metrics.retrieval_results, (across, torch.eye(4)), gather=True),
    }


def wrong_banks(rank: int) -> dict[str, Callable[[], Any]]:
    """Evaluations with re-rankers whose banks differ, or whose scorer fails in one process."""
    given = embedded()
    across = parts_of(rank, given)["matches across"]
    bank = given["bank_images"]
    moved = itrloss.rerank.ReciprocalReranker().fit(bank + rank, given["bank_texts"])
    fitted = itrloss.rerank.DualSoftmax().fit(*[bank] * rank)
    half_right = itrloss.rerank.TwoStageReranker(lambda images, texts: images / rank, 1)
    return {
        "other banks": partial(metrics, across, reranker=moved),
        "one bank": partial(fitted.topk, across, 3, gather=True),
        "one fails, best": partial(half_right.topk, across, 1, gather=True),
        "one fails": partial(metrics, across, reranker=half_right),
    }


def metrics_worker(rank: int) -> dict[str, Any]:
    found = evaluated(rank, gather=True)
    wrong = wrong_embeddings(rank) | wrong_questions(rank) | wrong_banks(rank)
    for name, call in wrong.items():
        try:
            call()
        except (RuntimeError, ValueError) as error:
            found[f"wrong: {name}"] = str(error)
    return found


@pytest.mark.slow
def test_two_processes_evaluate_as_one_does(tmp_path):
    first, second = run(metrics_worker, tmp_path)
    for name, (here, there) in REFUSED.items():
        assert first[f"wrong: {name}"].startswith(here), name
        assert second[f"wrong: {name}"].startswith(there), name
    first, second = (
        {k: x for k, x in found.items() if "wrong" not in k} for found in (first, second)
    )
    assert first == second
    for name, wanted in evaluated(None).items():
        if name.endswith("queries"):
            assert sorted(found_by(first[name])) == sorted(found_by(wanted))
        else:
            assert first[name] == pytest.approx(wanted)
    plain, fast = (
        next(x for k, x in first.items() if k.startswith(f"matches across, {n},"))
        for n in ("plain", "fast")
    )
    assert plain != fast


def repeating_worker(rank: int) -> dict[str, float]:
    images, texts = (embedded()[x] for x in ("images", "texts"))
    n, m = (slice(5), slice(10)) if rank == 0 else (slice(5, 8), slice(10, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sim = itrloss.Similarity(images[n].repeat_interleave(2, 0), texts[m])
        return itrloss.metrics.retrieval_metrics(sim, gather=True, hubness_k=2)


def test_two_processes_count_images_saved_once_per_caption_once(tmp_path):
    images, texts = (embedded()[x] for x in ("images", "texts"))
    numbers = torch.arange(8)
    whole = itrloss.Similarity(images, texts[:16], numbers, numbers.repeat_interleave(2))
    for found in run(repeating_worker, tmp_path):
        assert found == pytest.approx(itrloss.metrics.retrieval_metrics(whole, hubness_k=2))


def found_by(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Figures of each query without its position and its candidates' positions."""
    return [
        tuple(row[name] for name in ("direction", "id", "best_rank", "positives")) for row in rows
    ]


REFUSED = {  # error messages of the two processes
    "nan": (
        "gather: process 1 failed: ValueError: images: expected finite",
        "images: expected finite",
    ),
    "nan, best": (
        "gather: process 1 failed: ValueError: images: expected finite",
        "images: expected finite",
    ),
    "nan in texts": (
        "gather: process 1 failed: ValueError: texts: expected finite",
        "texts: expected finite",
    ),
    "type": ("gather: expected the same in all processes, got float",) * 2,
    "dimension": ("gather: expected the same in all processes, got float",) * 2,
    "numbers here": ("gather: expected the same in all processes, got ids [False",) * 2,
    "one asks more": ("gather: expected the same in all processes, got hubness_k",) * 2,
    "one without": (
        "scores: expected a Similarity of",
        "gather: process 0 failed: ValueError: scores: expected a Similarity of",
    ),
    "changed": ("the embeddings were modified", "the embeddings were modified"),
    "far": ("scores: too large for NearestNeighborNorm",) * 2,
    "scores": ("scores: expected a Similarity of",) * 2,
    "folds": ("folds: expected 1",) * 2,
    "blocks": ("gather: KReciprocalReranker",) * 2,
    "other banks": ("gather: expected the same in all processes, got torch.float64 (11, 4) ",) * 2,
    "one bank": ("gather: expected the same in all processes, got no bank in process 0; ",) * 2,
    "one fails, best": (
        "scorer: expected finite scores",
        "gather: process 0 failed: ValueError: scorer: expected finite scores",
    ),
    "one fails": (
        "scorer: expected finite scores",
        "gather: process 0 failed: ValueError: scorer: expected finite scores",
    ),
    "other": ("relevant, exclude, candidates, image_ids",) * 2,
}


def test_a_process_alone_evaluates_its_own():
    sim = itrloss.Similarity(torch.randn(4, D), torch.randn(4, D))
    assert itrloss.metrics.retrieval_metrics(sim, gather=True) == itrloss.metrics.retrieval_metrics(
        sim
    )
