"""Golden values: what losses, answers, re-rankers and metrics return in float64, with the values of
all options.

Cases are made from signatures: a new option, class or function gets its own, and the test fails
until they are stored.
"""

from __future__ import annotations

import inspect
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from promised_inputs import DATA, SQUARE, Batch, D, choices, linear, numbers, squared
from promised_names import public
from support.cases import each, pairwise
from torch import Tensor, nn

import itrloss
from itrloss import Anchors, Similarity, compat, functional, metrics, rerank, telemetry, terms

Case = tuple[str, Callable[[Batch], Any]]  # a name, which ends with that of the batch


def spread(
    name: str, call: Any, *functions: Any, select: Any = pairwise, **axes: list[Any]
) -> Iterator[Case]:
    """Yield cases in which all values of the functions' arguments occur, by default all pairs of
    them.

    ``call`` gets the batch, and the arguments by name.
    """
    owner = name.split(".")[-1]
    axes |= {key: x for function in functions for key, x in choices(owner, function).items()}
    kinds = ["pairs", "repeated"] if owner in SQUARE else ["captions", "pairs"]
    for kind, *values in select(batch=kinds, **axes):
        given = dict(zip(axes, values, strict=True))
        shown = (
            f"{key}={'given' if callable(x) else repr(x)}"
            for key, x in given.items()
            if x != axes[key][0]
        )
        yield f"{name}({', '.join(shown)}) {kind}", partial(called, call, given)


def called(call: Any, given: Mapping[str, Any], b: Batch) -> Any:
    return call(b, **{name: x(b) if callable(x) else x for name, x in given.items()})


STEPS: dict[str, Callable[[Any, int], Any]] = {  # of modules that are not called, or not only
    "CoupledMemory": lambda memory, i: memory.enqueue(
        *numbers(60 + i, 2, 6, D), torch.arange(6) + i
    ),
    "OnlineKMeans": lambda kmeans, i: kmeans.update(numbers(60 + i, 22, D)),
    "MomentumEncoder": lambda encoder, i: (
        encoder.update(linear(i)),
        encoder(numbers(60 + i, 2, D)),
    ),
}


def built(cls: Any, b: Batch, **given: Any) -> tuple[nn.Module, Callable[[int], Any]]:
    """Return a module, and a function that takes a step of it."""
    own = {name: given.pop(name) for name in choices(cls.__name__, cls)}
    module, step = b.module(cls(**own)), STEPS.get(cls.__name__)
    return module, lambda i: module(**given) if step is None else step(module, i)


def used(cls: Any, b: Batch, **given: Any) -> Any:
    """Return what a module returns, of one with buffers in the last of three steps, and these."""
    module, step = built(cls, b, **given)
    buffers = list(module.buffers())
    return [step(i) for i in range(3 if buffers else 1)][-1], buffers


def asked(name: str, b: Batch, **given: Any) -> Any:
    sim = b.similarity()
    found = getattr(sim.both if hasattr(Anchors, name) and name != "both" else sim, name)
    return found(**given) if callable(found) else found


BANKS = numbers(51, 9, D), numbers(52, 7, D)


def reranked(cls: Any, b: Batch, bank: bool, **given: Any) -> Any:
    reranker = cls(**given).fit(*BANKS) if bank else cls(**given)
    return tuple(reranker.rerank(b.similarity().detach()))


def cached(b: Batch) -> Any:
    """The loss and the encoders' gradients of a step in chunks."""
    encoders, ids = (linear(0), linear(1)), {"image_ids": b.ids[0], "text_ids": b.ids[1]}
    loss = itrloss.grad_cache_step(
        itrloss.TripletLoss(), encoders, (b.near(0, 2), b.near(1, 3)), 4, **ids
    )
    return loss, *(p.grad for encoder in encoders for p in encoder.parameters())


def by_batches(b: Batch) -> Any:
    metric = metrics.RetrievalMetrics()
    for part in (slice(0, 3), slice(3, None)):
        metric.update(b.near(0, 2)[part], b.near(1, 3)[part], b.own[0][part], b.own[1][part])
    return metric.compute()


def saved(b: Batch) -> list[int]:
    """Checksums of the files of a result."""
    results = metrics.retrieval_results(b.similarity())
    with TemporaryDirectory() as folder:
        results.save(Path(folder, "rows.csv"))
        metrics.save_trec(results, folder)
        return [zlib.crc32(file.read_text().encode()) for file in sorted(Path(folder).iterdir())]


def of_terms(b: Batch) -> Iterator[Tensor]:
    anchors = b.similarity().both
    for term in (getattr(terms, name) for name in public(terms) if name != "pair_term"):
        params = [0.3 + 0.2 * i for i in range(len(inspect.signature(term).parameters) - 1)]
        yield from (anchors.sum(term, *params), anchors.sum_of_positives(term, *params))


def adapted(b: Batch) -> Iterator[Tensor]:
    loss, (im, s) = itrloss.UnifiedTrainingObjective(7.0, 0.2), (b.near(0, 2), b.near(0, 3))
    yield compat.adapt(itrloss.InfoNCELoss(), "hrem")(im, s, DATA["img_ids"](b))
    yield compat.adapt(itrloss.InfoNCELoss(), "pvse", opt=DATA["opt"](b))(
        *(numbers(i, 6, 3, 4) for i in range(4))
    )[0]
    yield compat.adapt(loss, "hal")(
        im, s, *(DATA[name](b) for name in ("mb_img", "mb_cap", "mb_ind", "indices"))
    )


def differences(b: Batch) -> dict[str, Any]:
    """What does not depend on PyTorch's random numbers in comparisons by a bootstrap."""
    systems = DATA["systems"](b)
    found = metrics.compare(*systems.values(), samples=2)
    found |= {"all": metrics.compare_all(systems, baseline="b", samples=2)["a"]["rsum"]}
    return {name: x.difference for name, x in found.items()} | dict.fromkeys(
        metrics.confidence_intervals(systems["a"], samples=2)
    )


RELEVANT = torch.tensor([0, 0, 2, 5]), torch.tensor([1, 5, 3, 0])
SINGLE: dict[str, Callable[[Batch], Any]] = {  # what needs a call of its own
    "terms": of_terms,
    "pair_term": lambda b: b.similarity().both.sum(squared, 0.2),
    "grad_cache_step": cached,
    "Anchors.together": lambda b: Anchors.together(b.similarity(), b.similarity(6).T),
    "Anchors.pooled": lambda b: Anchors.pooled(b.similarity(), b.similarity(6)),
    "Similarity.from_scores": lambda b: (
        Similarity.from_scores(b.similarity().scores() * 3, *b.ids).both
    ),
    "memory.MemorySimilarity": lambda b: tuple(DATA["sims"](b)),
    "compat.adapt": adapted,
    "compat.HALLoss batch": lambda b: compat.HALLoss(DATA["opt"](b))(b.near(0, 2), b.near(0, 3)),
    "rerank.FastReranker.calibrate": lambda b: vars(
        rerank.FastReranker().calibrate(b.similarity())
    ),
    "rerank.Reranker.biases": lambda b: rerank.CSLS(3).biases(b.similarity()),
    "rerank.Reranker.topk": lambda b: tuple(rerank.DualSoftmax().topk(b.similarity(), 3)),
    "metrics.Judgements": lambda b: DATA["judgements"](b).at_least(0.2),
    "metrics.RetrievalMetrics": by_batches,
    "metrics.retrieval_results relevant": lambda b: metrics.retrieval_results(
        b.similarity(), relevant=RELEVANT
    ),
    **dict.fromkeys(
        ["metrics.compare", "metrics.compare_all", "metrics.confidence_intervals"], differences
    ),
    "metrics.latex_table": lambda b: metrics.latex_table(DATA["systems"](b)),
    "metrics.default_ids": lambda b: metrics.default_ids(3, 12),
    "metrics.save_trec": saved,
}
NOT_ASKED = {  # how something is computed; shards; and what is in SINGLE
    *(
        "dtype",
        "device",
        "weights",
        "engine",
        "ids",
        "one_to_one",
        "of_one_size",
        "exchange",
        "groups",
        "sharded",
    ),
    *("all_ids", "check_finite", "together", "pooled", "from_scores"),
}
# 5,000 × 25,000 scores; every c-th row of its input
APART = {"metrics.coco_protocol", "metrics.fold_repeated"}
MODULES = {
    name: cls
    for name, cls in sorted(vars(itrloss).items())
    if inspect.isclass(cls)
    and issubclass(cls, nn.Module)
    and name not in ("PairLoss", "MemoryLoss")
}
CODE_BASES = [name for name in compat.__all__ if name != "adapt"]
RERANKERS = {
    name: cls
    for name, cls in vars(rerank).items()
    if inspect.isclass(cls) and issubclass(cls, rerank.Reranker) and not inspect.isabstract(cls)
}


def cases() -> Iterator[Case]:
    for name, cls in {
        **MODULES,
        **{f"compat.{name}": getattr(compat, name) for name in CODE_BASES},
    }.items():
        yield from spread(name, partial(used, cls), cls, *[cls.forward] * (name not in STEPS))
    for name in (name for name in set(dir(Similarity)) - NOT_ASKED if not name.startswith("_")):
        yield from spread(
            f"Similarity.{name}",
            partial(asked, name),
            *filter(callable, [getattr(Similarity, name)]),
        )
    yield from spread("Similarity", lambda b, **given: Similarity(**given).scores(), Similarity)
    for name, cls in RERANKERS.items():
        banks = [
            x for x in (False, True) if (x or not cls.needs_bank) and (cls.takes_bank or not x)
        ]
        yield from spread(f"rerank.{name}", partial(reranked, cls), cls, bank=banks)
    functions = {"mine_hard_negatives": itrloss.mine_hard_negatives}
    for module in (functional, metrics, telemetry):
        functions |= {
            f"{module.__name__.split('.')[1]}.{name}": getattr(module, name)
            for name in public(module)
        }
    for name, function in functions.items():
        if inspect.isfunction(function) and name not in APART | SINGLE.keys():
            yield from spread(
                name, lambda _, function=function, **given: function(**given), function, select=each
            )
    user, queues = compat.USERLoss(DATA["opt"](Batch("pairs"))), compat.USERLoss.moco_forward
    yield from spread(
        "compat.USERLoss.moco_forward", lambda b, **given: user.moco_forward(**given), queues
    )
    for name, case in SINGLE.items():
        yield from ((f"{name} {kind}", case) for kind in ("captions", "pairs"))


def leaves(x: Any) -> Iterator[Any]:
    """The tensors, numbers and texts of what a case returned."""
    if isinstance(x, (Tensor, float, int, str)):
        yield x
    elif isinstance(x, Anchors):
        yield from (
            x.logsumexp(3.0),
            x.sum_of_positives(terms.identity),
            x.hardest_negatives().values,
        )
    elif isinstance(x, slice):
        yield from (x.start, x.stop)
    elif x is not None:
        x = vars(x) if is_dataclass(x) else x
        for part in x.values() if isinstance(x, Mapping) else x:
            yield from leaves(part)


def checksum(x: Tensor) -> list[float]:
    """Return up to three values; of more, a sum with uneven weights, and the length."""
    x = torch.where(x == -math.inf, -9.0, x.detach().double()).flatten()
    figures = x.tolist() if len(x) < 4 else [float(numbers(100, len(x)) @ x), float(x.norm())]
    return [float(f"{y:.12g}") for y in figures]


def record(name: str, case: Callable[[Batch], Any]) -> list[list[Any]] | None:
    """Return checksums of what a case returns, and of the gradients of its inputs; None if it is
    refused.
    """
    b = Batch(name.rsplit(" ", 1)[1])
    try:
        found = list(leaves(case(b)))
    except ValueError:  # options that exclude each other
        return None
    tensors = [
        x if isinstance(x, Tensor) else torch.tensor(x).double()
        for x in found
        if not isinstance(x, str)
    ]
    trained, inputs, grads = (
        [x for x in tensors if x.requires_grad],
        [x for x in b.leaves if x.requires_grad],
        [],
    )
    if trained:
        total = sum(
            (numbers(200, x.numel()) * torch.where(x.isfinite(), x, 0.0).flatten()).sum()
            for x in trained
        )
        grads = torch.autograd.grad(total, inputs, allow_unused=True)
    values, slopes = (
        [y for x in xs if x is not None for y in checksum(x)] for xs in (tensors, grads)
    )
    return [[*values, *(x for x in found if isinstance(x, str))], slopes]
