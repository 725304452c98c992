"""Losses of batches that several processes share are those of one process, in random
configurations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cases import weighted_by_guide
from support.processes import run
from support.sharded import LOSSES, SAMPLES, batch, configuration, filled_memory, joined, outcome

import itrloss
from itrloss import Anchors, Similarity
from itrloss.engine import pairs
from itrloss.engine.terms import identity


def sharded(rank: int, seeds: list[int], world: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    found = []
    for seed in seeds:
        config = configuration(seed, world)
        own = batch(config, dtype)[rank]
        found.append(outcome(config, own, filled_memory(config, dtype), gather=True))
    return found


def check(
    found: list[dict[str, Any]], config: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    """Compare the results of all processes with those of one."""
    whole = outcome(
        config, joined(batch(config, dtype), config["ids"]), filled_memory(config, dtype)
    )
    world, name = len(found), f"{config}"
    if config["options"]["reduction"] == "none":  # each process has the values of its own anchors
        for k, value in enumerate(whole["values"]):
            values = torch.cat([part["values"][k] for part in found])
            torch.testing.assert_close(values, value, rtol=tolerance, atol=tolerance, msg=name)
        return
    for part in found:
        torch.testing.assert_close(
            part["values"], whole["values"], rtol=tolerance, atol=tolerance, msg=name
        )
    for what, grad in whole["grads"].items():
        if what in ("images", "texts"):  # averaged over the processes, as DDP does
            grads = [torch.cat([part["grads"][what] for part in found]) / world]
        else:
            grads = [part["grads"][what] for part in found]
        for x in grads:
            assert (x - grad).norm() <= tolerance * grad.norm() + 1e-14, (what, name)


@pytest.mark.parametrize(
    ("world", "turn"),
    [
        (2, 0),
        (2, 1),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(3, 3, marks=pytest.mark.slow),
    ],
)
def test_random_batches_have_the_loss_and_the_gradients_of_one_process(tmp_path, world, turn):
    """Each turn has all losses, each in another configuration; all four have all sizes, reductions
    and engines.
    """
    seeds = [*range(turn * len(LOSSES), (turn + 1) * len(LOSSES))]
    found = run(sharded, tmp_path, seeds, world, torch.float64, world=world)
    for seed, parts in zip(seeds, zip(*found, strict=True), strict=True):
        check(list(parts), configuration(seed, world), torch.float64, 1e-9)


def listing_in_one(rank: int, seeds: list[int], world: int) -> list[dict[str, Any]]:
    """Outcomes where the first process lists its positives, and the others do not."""
    if rank > 0:
        pairs.FEW = -1
    return sharded(rank, seeds, world, torch.float64)


@pytest.mark.slow
def test_one_process_may_have_many_positives_and_another_few(tmp_path):
    seeds = [*range(len(LOSSES), 2 * len(LOSSES))]
    found = run(listing_in_one, tmp_path, seeds, 2, world=2)
    for seed, parts in zip(seeds, zip(*found, strict=True), strict=True):
        check(list(parts), configuration(seed, 2), torch.float64, 1e-9)


@pytest.mark.slow
def test_random_batches_of_float32(tmp_path):
    seeds = [seed for seed in range(len(LOSSES)) if list(LOSSES)[seed % len(LOSSES)] not in SAMPLES]
    found = run(sharded, tmp_path, seeds, 2, torch.float32, world=2)
    for seed, parts in zip(seeds, zip(*found, strict=True), strict=True):
        check(list(parts), configuration(seed, 2), torch.float32, 1e-5)


def compiled(rank: int, names: list[str]) -> list[list[dict[str, Any]]]:
    """Outcomes of each loss, eager and compiled as one graph."""
    found, ids = [], torch.arange(6) % 4
    for name in names:
        config = {"loss": name, "sizes": [(6, 6)] * 2, "ids": "across", "options": {}, "seed": 3}
        own, memory = batch(config, torch.float64)[rank], filled_memory(config, torch.float64)
        found.append([outcome(config, own, memory, compiled=x, gather=True) for x in (False, True)])
    if rank == 0:  # tracing exchanges nothing
        criterion = torch.compile(
            LOSSES["triplet all"].make(gather=True), fullgraph=True, backend="aot_eager"
        )
        with pytest.raises(Exception, match=r"hinge_sum: torch\.compile cannot list the positives"):
            criterion(torch.randn(6, 5), torch.randn(6, 5), ids, ids)
    return found


@pytest.mark.slow
def test_compiled_losses_over_processes(tmp_path):
    for each in run(compiled, tmp_path, ["triplet", "mdcl"]):
        for eager, graph in each:
            torch.testing.assert_close(graph, eager, rtol=1e-9, atol=1e-12)


FLOATS = torch.float32, torch.float64


def refused(rank: int) -> None:
    """Errors of the forms of InfoNCE, which all processes raise, and answers of pooled
    candidates.
    """
    ids = torch.arange(4) + 4 * rank
    v, w = torch.randn(4, 5), torch.randn(4, 5)
    with pytest.raises(
        TypeError, match=r"teacher: expected a Similarity\.sharded in a job of several processes"
    ):
        itrloss.DistillationLoss(gather=True)(v, w, Similarity(v, w))
    with pytest.raises(ValueError, match=r"teacher: expected shape \(4, 8\), got \(4, 7\)"):
        itrloss.DistillationLoss(gather=True)(v, w, torch.randn(4, 7))
    # also where one process alone is wrong
    with pytest.raises(ValueError, match=r"scores: expected 8 columns .*, got \[7, 8\]"):
        itrloss.InfoNCELoss(gather=True)(scores=torch.randn(4, 7 + rank))
    with pytest.raises(ValueError, match=r"matches: expected 8 columns .*, got \[4, 4\]"):
        itrloss.InfoNCELoss(gather=True)(v, w, matches=torch.eye(4))
    different: list[tuple[str, dict[str, Any]]] = [
        ("with groups", {"image_groups": ids} if rank else {}),
        ("of strings .*True", {"image_groups": list("abcd") if rank else ids}),
        ("numbers of labels", {"image_ids": torch.randn(4, 2 + rank).long(), "text_ids": ids}),
        (r"with matches of torch\.float", {"matches": torch.ones(4, 8, dtype=FLOATS[rank])}),
    ]
    for message, who in different:
        with pytest.raises(ValueError, match=message):
            itrloss.InfoNCELoss(gather=True)(v, w, **who)
    rules = "same", "other"
    with pytest.raises(ValueError, match=r"rule same.*rule other"):
        Similarity.sharded(v, w, related=itrloss.Related((ids, ids), rules[rank]))
    expected = r"negatives: expected shape \(K, D\) or \(4, K, 5\)"
    with pytest.raises(ValueError, match=f"{expected}|process 1 failed"):
        itrloss.InfoNCELoss(gather=True)(v, w, negatives=torch.randn(4 - rank, 2, 5))
    sims = [Similarity.sharded(v, x, ids, ids) for x in (w, w.sin())]
    with pytest.raises(ValueError, match="hardest_negatives: expected one matrix of candidates"):
        Anchors.pooled(*sims).hardest_negatives()
    for other in (
        sims[1].T,
        Similarity.sharded(torch.randn(4 + rank, 5), w, torch.arange(4 + rank), ids),
    ):
        with pytest.raises(ValueError, match="anchors: expected"):
            Anchors.pooled(sims[0].T, other)
    with pytest.raises(ValueError, match="anchors: expected those of one batch"):
        Anchors.together(*sims)


def test_what_processes_cannot_share_is_an_error_in_all_of_them(tmp_path):
    run(refused, tmp_path)


def limited(rank: int | None) -> list[torch.Tensor]:
    """Answers within limits, of positives and with a bias, and their gradients; ``rank`` None: of
    one process.
    """
    generator = torch.Generator().manual_seed(0)
    v, w = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (7, 9))
    ids = torch.arange(7) % 5, torch.arange(9) % 6
    whole = [
        v,
        w,
        torch.linspace(-0.2, 0.3, 7, dtype=v.dtype),
        torch.linspace(0.4, 0.1, 9, dtype=v.dtype),
    ]
    rows, cols = [(slice(7), slice(9)), (slice(3), slice(7)), (slice(3, 7), slice(7, 9))][
        0 if rank is None else rank + 1
    ]
    leaves = [
        x[part].clone().requires_grad_() for x, part in zip(whole, (rows, cols) * 2, strict=True)
    ]
    kind: Any = Similarity if rank is None else Similarity.sharded
    sim = kind(*leaves[:2], ids[0][rows], ids[1][cols], bias=tuple(leaves[2:]))
    both, found = sim.both, []
    positive = both.mean_of_positives(identity)
    teacher = (x.detach().cos() for x in leaves[:2])
    other = kind(*teacher, ids[0][rows], ids[1][cols]).both
    guided = [
        both.logsumexp(5.0, below=0.2, guide=other),
        both.sum(weighted_by_guide, 2.0, 1.0, guide=other),
    ]
    for values in (
        both.logsumexp(5.0, below=positive + 0.1),
        both.logsumexp(300.0, above=-0.2, below=0.5),
        both.logsumexp(5.0, over="positives"),
        both.sum(identity, below=0.3),
        both.hardest_negatives(positive).values,
        *guided,
    ):
        finite = torch.where(values.isfinite(), values, 0.0)
        total = both.reduce(finite, "mean")
        grads = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
        found += [
            total.detach(),
            *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)),
        ]
    return found


def test_limits_positives_and_biases_over_processes(tmp_path):
    found, wanted = run(limited, tmp_path), limited(None)
    for k, (x, *parts) in enumerate(zip(wanted, *found, strict=True)):
        if k % 5 == 0:  # values
            torch.testing.assert_close(parts, [x, x], rtol=1e-9, atol=1e-12)
        else:
            torch.testing.assert_close(torch.cat(parts) / 2, x, rtol=1e-9, atol=1e-12)


def biased_scores(rank: int, *whole: torch.Tensor) -> list[torch.Tensor]:
    """Scores of the rows and of the columns of a process that has 3 or 4, and 7 or 2, of them."""
    sides = zip(whole, [(3, 4), (7, 2)] * 2, strict=True)
    images, texts, *bias = [x.split(sizes)[rank].clone() for x, sizes in sides]
    ids = torch.arange(len(images)) + 10 * rank, torch.arange(len(texts)) + 10 * rank
    sim = Similarity.sharded(images, texts, *ids, bias=tuple(bias))
    return [sim.scores(), sim.T.scores()]


def test_scores_of_both_sides_have_the_biases_of_all_processes(tmp_path):
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(n, 4, generator=generator) for n in (7, 9))
    b, c = (torch.randn(n, generator=generator) for n in (7, 9))
    parts = zip(*run(biased_scores, tmp_path, images, texts, b, c), strict=True)
    of_rows, of_cols = (torch.cat(x) for x in parts)
    ids = torch.arange(7), torch.arange(9)
    whole = Similarity(images, texts, *ids, bias=(b, c)).scores()
    torch.testing.assert_close(of_rows, whole)
    torch.testing.assert_close(of_cols, whole.T)


def without_samples(rank: int) -> dict[str, list[float]]:
    """The values and gradients of each loss where the batches of all processes are empty."""
    found = {}
    for name in LOSSES:
        for reduction in ("mean", "sum"):
            options = {"reduction": reduction}
            config = {"loss": name, "sizes": [(0, 0)] * 2, "ids": "none", "seed": 1}
            config["options"] = options
            own = batch(config, torch.float32)[rank]
            got = outcome(config, own, filled_memory(config, torch.float32), gather=True)
            parts = [*got["values"], *got["grads"].values()]
            found[f"{name} {reduction}"] = [float(x.abs().sum()) for x in parts]
    empty = torch.zeros(0, 5)
    objective = itrloss.CODERObjective(5, 3, gather=True)
    for mode in (True, False):  # its prototypes are still empty, and then are those of one process
        memory = itrloss.CoupledMemory(8, 5)
        total, _ = objective.train(mode)(empty, empty, empty, empty, memory, empty, empty)
        found[f"coder {mode}"] = [float(total)]
    prototypes = itrloss.OnlineKMeans(3, 5)
    assert prototypes.update(empty).shape == (0,) and not prototypes.reseeded.any()
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    objective.train()
    for _ in range(2):  # the first process has none, with and without prototypes
        own = rows[: 4 * rank]
        memory = itrloss.CoupledMemory(8, 5)
        total, _ = objective(own, own, own, own, memory, own, own)
        assert total.isfinite()
        objective.eval()
    return found


@pytest.mark.slow
def test_batches_may_be_empty_in_all_processes(tmp_path):
    for found in run(without_samples, tmp_path):
        assert {name: x for name, x in found.items() if any(x)} == {}


def guided(rank: int) -> list[str]:
    """What a loss says of guides with its own ids, with others, and without any."""
    v, w, x, y = (torch.randn(4, 5, generator=torch.Generator().manual_seed(k)) for k in range(4))
    own = torch.arange(4) + 4 * rank
    found = []
    for ids in (
        (own, own),
        (own, own.flip(0) if rank else own),
        (None, None),
        (own // 2, own // 2),
    ):
        guide = Similarity.sharded(x, y, *ids)
        try:
            itrloss.InfoNCELoss(margin=0.1, gather=True)(v, w, own, own, guide=guide)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_all_processes_refuse_a_guide_with_other_ids(tmp_path):
    for own, others, without, coarse in run(guided, tmp_path):
        assert own == without == ""  # without ids, row i has the number of row i
        assert others == coarse and others.startswith("guide: expected the ids of the loss")


def tied(rank: int) -> list[torch.Tensor]:
    """The hardest negatives of alike images and texts."""
    sim = Similarity.sharded(torch.ones(3, 4), torch.ones(3, 4))
    return [*sim.both.hardest_negatives().indices.split(3)]


def test_of_equal_negatives_the_first_is_the_hardest(tmp_path):
    found = zip(*run(tied, tmp_path), strict=True)
    wanted = Similarity(torch.ones(6, 4), torch.ones(6, 4)).both.hardest_negatives().indices
    assert torch.equal(torch.cat([torch.cat(parts) for parts in found]), wanted)


def all_hinges(
    rank: int, sizes: list[int], images: torch.Tensor, texts: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    own = [x.split(sizes)[rank] for x in (images, texts, ids, ids)]
    return itrloss.TripletLoss(0.5, "all", reduction="sum", gather=True)(*own)


def test_positives_of_three_uneven_processes_each_have_their_hinges(tmp_path):
    sizes, ids = [1, 3, 4], torch.arange(8) % 2
    images, texts = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(0))
    whole = itrloss.TripletLoss(0.5, "all", reduction="sum")(images, texts, ids, ids)
    for found in run(all_hinges, tmp_path, sizes, images, texts, ids, world=3):
        torch.testing.assert_close(found, whole)


SECOND = {
    "infonce": lambda **options: itrloss.InfoNCELoss(0.2, learnable=True, **options),
    "sigmoid": lambda **options: itrloss.SigmoidLoss(5.0, -2.0, **options),
    "dcl": lambda **options: itrloss.DiversityContrastiveLoss(detach_diversity=False, **options),
    "hal": lambda **options: itrloss.HubnessAwareLoss(20.0, 0.2, **options),
    "supcon": lambda **options: itrloss.SupConLoss(**options),
}


def second_derivatives(
    criterion: torch.nn.Module, images: torch.Tensor, texts: torch.Tensor, factor: float
) -> list[torch.Tensor]:
    """Return the gradients of ``factor (|dL/dv|^2 + |dL/dw|^2)``."""
    images = images.clone().requires_grad_()
    texts = texts.clone().requires_grad_()
    first = torch.autograd.grad(criterion(images, texts), (images, texts), create_graph=True)
    squares = factor * sum(x.square().sum() for x in first)
    return list(torch.autograd.grad(squares, (images, texts)))


def second_derivatives_of_a_part(
    rank: int, all_sizes: list[list[int]], images: torch.Tensor, texts: torch.Tensor
) -> list[Any]:
    found = []
    for sizes in all_sizes:
        for make in SECOND.values():
            criterion = make(engine="dense", gather=True).double()
            v = images[: sum(sizes)].split(sizes)[rank]
            w = texts[: sum(sizes)].split(sizes)[rank]
            found.append(second_derivatives(criterion, v, w, 1.0))
    return found


@pytest.mark.slow
def test_second_derivatives_are_those_of_one_process(tmp_path):
    images, texts = torch.randn(2, 8, 5, dtype=torch.float64)
    all_sizes = [[4, 4], [4, 3], [1, 4], [0, 4], [4, 0]]
    found = run(second_derivatives_of_a_part, tmp_path, all_sizes, images, texts)
    cases = [(sizes, name) for sizes in all_sizes for name in SECOND]
    for (sizes, name), parts in zip(cases, zip(*found, strict=True), strict=True):
        n = sum(sizes)
        criterion = SECOND[name](engine="dense").double()
        # A process's first derivatives are twice as large, as DDP takes the mean.
        whole = second_derivatives(criterion, images[:n], texts[:n], 4.0)
        for side, expected in enumerate(whole):
            got = torch.cat([part[side] for part in parts])
            torch.testing.assert_close(got, expected, msg=f"{sizes} {name}")
