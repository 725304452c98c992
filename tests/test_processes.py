"""Processes that are lost, that disagree, that wrap their models, and that are stopped and resumed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import run, survivors
from torch import Tensor

import itrloss
from itrloss.engine import processes, ring

D, WORLD, ODD = 6, 3, 1  # ODD: the process that is lost, or that differs
SCHEDULES = "all-gather", "ring"


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, trained: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    return x.requires_grad_(trained)


def pairs(seed: int = 0, **options: Any) -> tuple[Tensor, Tensor]:
    return sample(4, D, seed=2 * seed, **options), sample(4, D, seed=2 * seed + 1, **options)


# --- a process is lost -----------------------------------------------------------------------------------------------

TIMEOUT = 7.0  # seconds


def enqueued(v: Tensor, w: Tensor) -> Tensor:
    memory = itrloss.CoupledMemory(9, D)
    memory.enqueue(v, w)
    return memory.images


def clustered(v: Tensor, w: Tensor) -> Tensor:
    means = itrloss.OnlineKMeans(4, D)
    means.update(v)
    return means.centroids


def measured(v: Tensor, w: Tensor) -> Tensor:
    return torch.tensor([*itrloss.metrics.retrieval_metrics(itrloss.Similarity(v, w), gather=True).values()])


def against_memory(v: Tensor, w: Tensor, schedule: Any) -> Tensor:
    keys = v.detach(), w.detach()
    return itrloss.MemoryDiversityContrastiveLoss(gather=schedule)(v, w, *keys, itrloss.CoupledMemory(9, D))


WORK: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "all-gather": lambda v, w: itrloss.InfoNCELoss(learnable=True, gather="all-gather")(v, w),
    "ring": lambda v, w: itrloss.InfoNCELoss(learnable=True, gather="ring")(v, w),
    "memory, all-gather": lambda v, w: against_memory(v, w, "all-gather"),
    "memory, ring": lambda v, w: against_memory(v, w, "ring"),
    "enqueue": enqueued,
    "k-means": clustered,
    "metrics": measured,
}
FAULTS = [
    *((kind, "is stuck", "before") for kind in ("all-gather", "ring", "enqueue")),
    ("ring", "is stuck", "backward 4"),
    *((kind, how, when) for kind in WORK for how, when in [("raises", "before"), ("is killed", "forward 2")]),
    *((kind, "is killed", "forward 6") for kind in [*list(WORK)[:4], "metrics"]),
    *((kind, "raises", "between") for kind in list(WORK)[:4]),
    *((kind, "is killed", "backward 1") for kind in list(WORK)[:4]),
    *((kind, "is killed", "backward 6") for kind in ("all-gather", "ring", "memory, ring")),
]


def stepping(rank: int, kind: str, how: str, when: str) -> dict[str, Any]:
    """Two steps; one process is lost before or between forward and backward, or at one of their collectives."""
    phase, number, communicate = "forward", 0, processes.communicate

    def fault(place: str) -> None:
        if rank != ODD or place != when:
            return
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "is stuck":
            time.sleep(TIMEOUT + 3)
            os._exit(1)
        raise LookupError("an image is missing")

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal number
        number += 1
        fault(f"{phase} {number}")
        return communicate(*args, **options)

    processes.communicate = ring.communicate = counted  # type: ignore[assignment]
    began, said, steps = time.monotonic(), "", []
    try:
        for _ in range(2):
            v, w = pairs(rank)
            fault("before")
            value = WORK[kind](v, w)
            fault("between")
            phase, number = "backward", 0
            if value.requires_grad:
                value.backward()
            phase, number = "forward", 0
            steps.append([x for x in (value.detach(), v.grad, w.grad) if x is not None])
    except RuntimeError as error:
        said = str(error)
    return {"steps": steps, "said": said, "seconds": time.monotonic() - began}


@pytest.mark.slow
def test_the_others_end_with_an_error_that_names_a_lost_process(tmp_path):
    cases = [*((kind, "", "") for kind in WORK), *FAULTS]
    found = dict(zip(cases, survivors(stepping, tmp_path, cases, world=WORLD, timeout=TIMEOUT), strict=True))
    for case in FAULTS:
        assert found[case][ODD] is None, case
        for mine, healthy in zip(found[case], found[case[0], "", ""], strict=True):
            if mine is None:
                continue
            assert re.fullmatch(rf"gather: no answer from process ([02], )?{ODD}(, 2)?", mine["said"]), (case, mine)
            assert mine["seconds"] < TIMEOUT + 6 * (case[1] == "is stuck"), (case, mine)
            # A process may be lost after it has sent its last part of a step: then the others complete that one.
            assert len(mine["steps"]) < 2 and not healthy["said"], case
            for step, wanted in zip(mine["steps"], healthy["steps"], strict=False):
                assert all(torch.equal(x, y) for x, y in zip(step, wanted, strict=True)), case


# --- processes disagree ----------------------------------------------------------------------------------------------


def frozen(parameter: str, loss: Any, odd: bool) -> Any:
    if odd:
        loss.get_parameter(parameter).requires_grad_(False)
    return loss


def memory(size: int = 9, **options: Any) -> itrloss.CoupledMemory:
    return itrloss.CoupledMemory(size, D, **options)


def without_gradient(call: Callable[[], Any], odd: bool) -> Any:
    with torch.set_grad_enabled(not odd):
        return call()


half = {False: torch.bfloat16, True: torch.float16}
floats = {False: torch.float32, True: torch.float64}
ids = torch.arange(4)
pair = itrloss.InfoNCELoss
mdcl = itrloss.MemoryDiversityContrastiveLoss
classifier = itrloss.PrototypeClassificationLoss
# What a process calls, the odd one with True, and what the error says of the others and of it.
DIFFERENT: dict[str, tuple[Callable[[bool, Any], Any], str, str]] = {
    "temperature": (lambda odd, s: pair(0.06 if odd else 0.05, gather=s)(*pairs()), "0.05", "0.06"),
    "reduction": (lambda odd, s: pair(reduction=("mean", "sum")[odd], gather=s)(*pairs()), "'mean'", "'sum'"),
    "engine": (lambda odd, s: pair(engine=("dense", "tiled")[odd], gather=s)(*pairs()), "'dense'", "'tiled'"),
    "class": (
        lambda odd, s: (itrloss.HubnessAwareLoss if odd else pair)(gather=s)(*pairs()),
        "InfoNCELoss",
        "HubnessAwareLoss",
    ),
    "another function": (
        lambda odd, s: memory().enqueue(*pairs()) if odd else pair(gather=s)(*pairs()),
        "InfoNCELoss",
        "memory (9, 6)",
    ),
    "half type": (lambda odd, s: pair(gather=s)(*pairs(dtype=half[odd])), "bfloat16 (B, 6)", " float16 (B, 6)"),
    "type": (lambda odd, s: pair(gather=s)(*pairs(dtype=floats[odd])), "float32 (B, 6)", "float64 (B, 6)"),
    "as many numbers": (
        lambda odd, s: pair(gather=s)(*(sample(4 + 2 * odd, 6 - 2 * odd) for _ in range(2))),
        "(B, 6)",
        "(B, 4)",
    ),
    "ids": (lambda odd, s: pair(gather=s)(*pairs(), *[ids] * 2 * odd), "ids [False, False]", "ids [True, True]"),
    "image ids": (
        lambda odd, s: pair(gather=s)(*pairs(), None if odd else ids, ids),
        "ids [True, True]",
        "ids [False, True]",
    ),
    "gradient": (
        lambda odd, s: pair(gather=s)(pairs()[0], pairs(trained=not odd)[1]),
        "gradients [True, True]",
        "gradients [True, False]",
    ),
    "no gradient": (
        lambda odd, s: without_gradient(lambda: pair(gather=s)(*pairs()), odd),
        "gradients [True, True]",
        "gradients [False, False]",
    ),
    "parameter": (
        lambda odd, s: frozen("log_scale", pair(learnable=True, gather=s), odd)(*pairs()),
        "trained ['log_scale']",
        "trained []",
    ),
    "schedule": (lambda odd, s: pair(gather=SCHEDULES[odd])(*pairs()), " all-gather ", " ring "),
    "chosen schedule": (lambda odd, s: pair(gather=True if odd else s)(*pairs()), "", " auto "),
    "telemetry": (lambda odd, s: pair(gather=s, telemetry=odd)(*pairs()), "telemetry False", "telemetry True"),
    "size of the memory": (
        lambda odd, s: mdcl(gather=s)(*pairs(), *pairs(), memory(9 + odd)),
        "memory (9, 6)",
        "memory (10, 6)",
    ),
    "keys": (
        lambda odd, s: mdcl(gather=s)(*pairs(), *pairs(dtype=half[odd]), memory()),
        "keys float32, bfloat16, bfloat16",
        "keys float32, float16, float16",
    ),
    "ids beside a memory": (
        lambda odd, s: mdcl(gather=s)(*pairs(), *pairs(), memory(), *[ids] * 2 * odd),
        "ids [False, False]",
        "ids [True, True]",
    ),
    "enqueued keys": (lambda odd, s: memory().enqueue(*pairs(dtype=half[odd])), "bfloat16", "float16"),
    "enqueued ids": (lambda odd, s: memory().enqueue(*pairs(), *[ids] * odd), "", "int64 (B)"),
    "clusters": (
        lambda odd, s: itrloss.OnlineKMeans(4 + odd, D).update(sample(4, D)),
        "clusters=4",
        "clusters=5",
    ),
    "gate": (
        lambda odd, s: itrloss.DynamicGate(D, 3, momentum=0.2 if odd else 0.1)(sample(4, 2, D)),
        "momentum=0.1",
        "momentum=0.2",
    ),
    "heads": (
        lambda odd, s: itrloss.VarianceAwareLoss(gather=s)(sample(4, 3 + odd, D), sample(4, D)),
        "3 heads",
        "4 heads",
    ),
    "slack": (
        lambda odd, s: itrloss.DynamicOrthogonalLoss(0.2 if odd else 0.1, gather=s)(sample(4, 3, D)),
        "0.1",
        "0.2",
    ),
    "type of concepts": (
        lambda odd, s: classifier(D, 4, gather=s)(*pairs(dtype=floats[odd]), ids),
        "float32",
        "float64",
    ),
    "classifier": (
        lambda odd, s: frozen("weight", classifier(D, 4, reduction="none", gather=s), odd)(*pairs(), ids),
        "trained ['weight']",
        "trained []",
    ),
}
# What the odd process refuses, and how its error begins.
REFUSED: dict[str, tuple[Callable[[bool, Any], Any], str]] = {
    "vector": (lambda odd, s: pair(gather=s)(sample(4) if odd else sample(4, D), sample(4, D)), "ValueError: images:"),
    "3-d": (lambda odd, s: pair(gather=s)(sample(4, D), sample(*(4, D, 2)[: 2 + odd])), "ValueError: texts:"),
    "integers": (lambda odd, s: pair(gather=s)(*(x.long() if odd else x for x in pairs())), "TypeError: images:"),
    "nothing": (lambda odd, s: pair(gather=s)(None if odd else sample(4, D), sample(4, D)), "TypeError: images:"),
    "more texts": (lambda odd, s: pair(gather=s)(sample(4, D), sample(4 + odd, D)), "ValueError: image_ids, text_ids:"),
    "ids of few": (lambda odd, s: pair(gather=s)(*pairs(), ids, ids[: 4 - odd]), "ValueError: text_ids:"),
    "nan": (
        lambda odd, s: pair(check_finite=True, gather=s)(*(x / (1 - odd) for x in pairs())),
        "ValueError: images: expected finite values",
    ),
    "scores": (
        lambda odd, s: pair(gather=s)(scores=sample(4, 4)) if odd else pair(gather=s)(*pairs()),
        "ValueError: gather: expected embeddings",
    ),
    "no memory": (
        lambda odd, s: mdcl(gather=s)(*pairs(), *pairs(), None if odd else memory()),
        "TypeError: memory:",
    ),
    "shape of keys": (
        lambda odd, s: mdcl(gather=s)(*pairs(), *(sample(4 + odd, D) for _ in range(2)), memory()),
        "ValueError: image_keys:",
    ),
    "enqueued shape": (lambda odd, s: memory().enqueue(sample(4, D + odd), sample(4, D)), "ValueError: image_keys:"),
    "points": (lambda odd, s: itrloss.OnlineKMeans(4, D).update(sample(4, D + odd)), "ValueError: x:"),
    "regions": (lambda odd, s: itrloss.DynamicGate(D, 3)(sample(4, 2, D + odd)), "ValueError: regions:"),
    "no sets": (
        lambda odd, s: itrloss.VarianceAwareLoss(gather=s)(sample(*(4, 3, D)[odd:]), sample(4, D)),
        "ValueError: image_sets:",
    ),
    "prototypes": (
        lambda odd, s: classifier(D, 4, gather=s)(*pairs(), torch.arange(4 + odd)),
        "ValueError: prototype_ids:",
    ),
    "prototypes, none": (
        lambda odd, s: classifier(D, 4, reduction="none", gather=s)(*pairs(), torch.arange(4 + odd)),
        "ValueError: prototype_ids:",
    ),
    "concepts": (
        lambda odd, s: itrloss.CODERObjective(D, 4, gather=s)(
            *pairs(), *pairs(), memory(), *(sample(4, D + odd) for _ in range(2))
        ),
        "ValueError: image_concepts:",
    ),
}


def disagreeing(rank: int, schedule: str) -> dict[str, tuple[str, float]]:
    """What each case raises, and the loss of a good step after it."""
    found = {}
    for name, (call, *_) in {**DIFFERENT, **REFUSED}.items():
        said = "no error"
        try:
            call(rank == ODD, schedule)
        except (TypeError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
        found[name] = said, pair(gather=schedule)(*pairs(rank)).item()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_raise_an_error_if_processes_disagree_and_go_on(tmp_path, schedule):
    found = run(disagreeing, tmp_path, schedule, world=WORLD)
    whole = pair()(*(torch.cat(x) for x in zip(*map(pairs, range(WORLD)), strict=True))).item()
    for name in found[0]:
        texts, afterwards = zip(*(mine[name] for mine in found), strict=True)
        assert afterwards == pytest.approx([whole] * WORLD, rel=1e-5), name
        if name in REFUSED:
            assert texts[ODD].startswith(REFUSED[name][1]), (name, texts)
            quoted = f"ValueError: gather: process {ODD} failed: {texts[ODD]}"
            assert all(text == quoted for rank, text in enumerate(texts) if rank != ODD), (name, texts)
            continue
        started = "ValueError: gather: expected the same in all processes, got "
        assert len(set(texts)) == 1 and texts[0].startswith(started), (name, texts)
        others, odd, last, _ = re.split(r" in process \d(?:; |$)", texts[0].removeprefix(started))
        usual, different = DIFFERENT[name][1:]
        assert others == last != odd and usual in others and different in odd, (name, texts)
