"""Two processes of ``torch.distributed``: ids, states that DDP broadcasts, and evaluation."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import sample
from support.losses_registry import select
from support.processes import WORLD, run
from support.versions import needs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import itrloss
import itrloss.cli.comparison

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
# per-process image indices of texts: invalid ones match no image, and the numbers in two processes
# are beyond 127 and 255, which small types end at
NUMBERED = {
    "none": (4, torch.tensor([0, 1, 2, -1])),
    "beyond the last": (4, torch.tensor([0, 1, 2, 5])),
    "int8": (65, torch.arange(65).to(torch.int8)),
    "uint8": (130, torch.arange(130).to(torch.uint8)),
}
NUMBERED_IN_ONE = {
    **dict.fromkeys(["none", "beyond the last"], torch.tensor([0, 1, 2, -1, 4, 5, 6, -1])),
    "int8": torch.arange(130),
    "uint8": torch.arange(260),
}


def numbered(rank: int | None, name: str, **options: Any) -> list[torch.Tensor]:
    """Values of losses that depend on all pairs, with this process's part or with everything."""
    n, ids = (
        NUMBERED[name] if rank is not None else (WORLD * NUMBERED[name][0], NUMBERED_IN_ONE[name])
    )
    v, w = sample(2, WORLD * NUMBERED[name][0], D)
    own = slice((rank or 0) * n, (rank or 0) * n + n)
    losses = [entry.make(**options) for entry in PAIR_LOSSES.values()]
    return [loss(v[own], w[own], None, ids).detach() for loss in losses]


def numbering(rank: int) -> dict[str, list[torch.Tensor]]:
    return {name: numbered(rank, name, gather=True) for name in NUMBERED}


def test_texts_of_no_image_stay_so_among_the_images_of_all(tmp_path):
    wanted = {name: numbered(None, name) for name in NUMBERED}
    for found in run(numbering, tmp_path):
        torch.testing.assert_close(found, wanted)


def warned(rank: int) -> dict[str, list[str]]:
    """What losses of both processes warn of, by the names of their ids."""
    numbers = torch.arange(4)
    calls = {
        "alike": {"image_ids": numbers, "text_ids": numbers},
        "alike, of one set": {"labels": numbers},
        "different": {"image_ids": numbers + 4 * rank, "text_ids": numbers + 4 * rank},
        "of texts alone": {"text_ids": numbers},
        "none": {},
    }
    said = {}
    for name, ids in calls.items():
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            itrloss.InfoNCELoss(gather=True)(torch.randn(4, D), torch.randn(4, D), **ids)
        said[name] = [str(warning.message) for warning in found]
    return said


def test_numbers_in_a_batch_are_no_ids_of_a_job(tmp_path):
    for said in run(warned, tmp_path):
        for name, messages in said.items():
            assert len(messages) == name.startswith("alike"), messages
            assert all("are the same in all processes" in message for message in messages)


def gradient_of_gathered(rank: int) -> torch.Tensor:
    """A gradient of 256 from one of three processes, another for each row, and of 1 from others."""
    x = torch.zeros(3, 1, dtype=torch.bfloat16, requires_grad=True)
    gathered = itrloss.distributed.gather(x)
    upstream = torch.ones_like(gathered)
    upstream[rank::3] = 256
    gathered.backward(upstream)
    assert x.grad is not None
    return x.grad


@needs("exchanging bfloat16 on the CPU", 2, 4)
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


# --- evaluation -----------------------------------------------------------------------------------


PARTS = {  # images and texts of a process, or of one with everything
    None: (slice(8), slice(16)),
    0: (slice(5), slice(12)),
    1: (slice(5, 8), slice(12, 16)),
}


def part_of(rank: int | None) -> list[torch.Tensor]:
    """This process's images, texts and their ids, or everything."""
    images = sample(8, D)
    texts = images.repeat_interleave(2, 0) + sample(16, D, seed=1)
    n, m = PARTS[rank]
    return [images[n], texts[m], torch.arange(8)[n], torch.arange(16)[m] // 2]


def evaluated(given: list[torch.Tensor]) -> dict[str, Any]:
    """What is evaluated of all images and texts with their ids."""
    sim = itrloss.Similarity(*given)
    reranker = itrloss.rerank.CSLS(3)
    best = reranker.topk(sim, 3)
    return {
        "plain": itrloss.metrics.retrieval_metrics(sim),
        "re-ranked": itrloss.metrics.retrieval_metrics(sim, reranker=reranker),
        "best": [best.i2t.indices, best.t2i.indices],
    }


def gathering(rank: int) -> dict[str, Any] | None:
    """As docs/multi_gpu.rst has it: gather everything, and evaluate it in the first process."""
    given = [itrloss.distributed.gather(x) for x in part_of(rank)]
    return evaluated(given) if rank == 0 else None


def test_what_is_gathered_is_evaluated_as_in_one_process(tmp_path):
    first, second = run(gathering, tmp_path)
    wanted = evaluated(part_of(None))
    assert second is None
    assert first["plain"] == wanted["plain"]
    assert first["re-ranked"] == wanted["re-ranked"] != wanted["plain"]
    for found, exact in zip(first["best"], wanted["best"], strict=True):
        assert torch.equal(found, exact)


SHARED: dict[str, Callable[[Any], Any]] = {
    "metrics": itrloss.metrics.retrieval_metrics,
    "results": itrloss.metrics.retrieval_results,
    "metrics of a view": lambda sim: itrloss.metrics.retrieval_metrics(sim.T),
    "metrics by grades": lambda sim: itrloss.metrics.retrieval_metrics(
        sim, relevant=(torch.arange(2), torch.arange(2))
    ),
    "a pair": lambda sim: itrloss.metrics.retrieval_metrics((sim, torch.rand(sim.shape))),
    "re-ranked metrics": lambda sim: itrloss.metrics.retrieval_metrics(
        sim, reranker=itrloss.rerank.CSLS()
    ),
    "rerank": itrloss.rerank.CSLS().rerank,
    "topk": lambda sim: itrloss.rerank.MutualProximity().topk(sim, 2),
    "biases": itrloss.rerank.CSLS().biases,
    "comparison": itrloss.cli.comparison.compare_rerankers,
    "calibration": itrloss.rerank.FastReranker().calibrate,
    "protocol": itrloss.metrics.coco_protocol,
}


def evaluating_a_part(rank: int) -> dict[str, str]:
    """What is said of a part of a shared batch, by each function that wants everything."""
    sim = itrloss.Similarity.sharded(*part_of(rank))
    found = {}
    for name, call in SHARED.items():
        with pytest.raises(ValueError) as error:
            call(sim)
        found[name] = str(error.value)
    return found


def test_a_part_of_a_shared_batch_is_refused_with_what_to_do(tmp_path):
    for found in run(evaluating_a_part, tmp_path):
        for name, said in found.items():
            assert "this process's part of a shared batch" in said, name
            assert "itrloss.distributed.gather(images)" in said, name
