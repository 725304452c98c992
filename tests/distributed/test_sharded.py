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
from itrloss.engine import relation
from itrloss.engine.terms import identity


def sharded(rank: int, seeds: list[int], world: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """What a process finds in each configuration."""
    found = []
    for seed in seeds:
        config = configuration(seed, world)
        own = batch(config, dtype)[rank]
        memory = filled_memory(config, dtype)
        found.append(outcome(config, own, memory, gather=True))
    return found


def check_all(found: Any, seeds: list[int], dtype: torch.dtype, tolerance: float) -> None:
    """Compare the results of all processes with those of one, in each configuration."""
    world = len(found)
    of_each_seed = zip(*found, strict=True)
    for seed, parts in zip(seeds, of_each_seed, strict=True):
        check(list(parts), configuration(seed, world), dtype, tolerance)


def check(
    found: list[dict[str, Any]], config: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    """Compare the results of all processes with those of one."""
    everything = joined(batch(config, dtype), config["ids"])
    whole = outcome(config, everything, filled_memory(config, dtype))
    compared: dict[str, Any] = {"rtol": tolerance, "atol": tolerance, "msg": f"{config}"}
    if config["options"]["reduction"] == "none":  # each process has the values of its own anchors
        for k, value in enumerate(whole["values"]):
            values = torch.cat([part["values"][k] for part in found])
            torch.testing.assert_close(values, value, **compared)
        return
    for part in found:
        torch.testing.assert_close(part["values"], whole["values"], **compared)
    for what, wanted in whole["grads"].items():
        of_processes = [part["grads"][what] for part in found]
        size = wanted.norm()
        if what in ("images", "texts"):  # averaged over the processes, as DDP does
            of_processes = [torch.cat(of_processes) / len(found)]
        elif dtype == torch.float32:  # a parameter's is a sum of terms of about 1 that cancel
            size = size + 1
        for grad in of_processes:
            error = (grad - wanted).norm()
            assert error <= tolerance * size + 1e-14, f"{what} {config}"


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
    first = turn * len(LOSSES)
    seeds = [*range(first, first + len(LOSSES))]
    found = run(sharded, tmp_path, seeds, world, torch.float64, world=world)
    check_all(found, seeds, torch.float64, 1e-9)


def listing_in_one(rank: int, seeds: list[int], world: int) -> list[dict[str, Any]]:
    """Outcomes where the first process lists its positives, and the others do not."""
    if rank > 0:
        relation.FEW = -1
    return sharded(rank, seeds, world, torch.float64)


@pytest.mark.slow
def test_one_process_may_have_many_positives_and_another_few(tmp_path):
    seeds = [*range(len(LOSSES), 2 * len(LOSSES))]
    found = run(listing_in_one, tmp_path, seeds, 2, world=2)
    check_all(found, seeds, torch.float64, 1e-9)


@pytest.mark.slow
def test_random_batches_of_float32(tmp_path):
    seeds = [seed for seed, name in enumerate(LOSSES) if name not in SAMPLES]
    found = run(sharded, tmp_path, seeds, 2, torch.float32, world=2)
    check_all(found, seeds, torch.float32, 1e-5)


def compiled(rank: int, names: list[str]) -> list[list[dict[str, Any]]]:
    """Outcomes of each loss, eager and compiled as one graph."""
    found = []
    for name in names:
        config = {"loss": name, "sizes": [(6, 6)] * 2, "ids": "across", "options": {}, "seed": 3}
        own = batch(config, torch.float64)[rank]
        memory = filled_memory(config, torch.float64)
        eager = outcome(config, own, memory, compiled=False, gather=True)
        graph = outcome(config, own, memory, compiled=True, gather=True)
        found.append([eager, graph])
    if rank == 0:  # tracing exchanges nothing
        loss = LOSSES["triplet all"].make(gather=True)
        criterion = torch.compile(loss, fullgraph=True, backend="aot_eager")
        ids = torch.arange(6) % 4
        with pytest.raises(Exception, match=r"hinge_sum: torch\.compile cannot list the positives"):
            criterion(torch.randn(6, 5), torch.randn(6, 5), ids, ids)
    return found


@pytest.mark.slow
def test_compiled_losses_over_processes(tmp_path):
    for each in run(compiled, tmp_path, ["triplet", "mdcl"]):
        for eager, graph in each:
            torch.testing.assert_close(graph, eager, rtol=1e-9, atol=1e-12)


def own_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, texts and ids of four pairs of a process."""
    return torch.randn(4, 5), torch.randn(4, 5), torch.arange(4) + 4 * rank


def refused(rank: int) -> None:
    """Errors that all processes raise, also where one of them alone is wrong."""
    refused_teachers(rank)
    refused_relations(rank)
    refused_anchors(rank)


def refused_teachers(rank: int) -> None:
    """Scores of a teacher that are not those of the whole batch."""
    v, w, _ = own_batch(rank)
    loss = itrloss.DistillationLoss(gather=True)
    of_one_process = Similarity(v, w)
    message = r"teacher: expected a Similarity\.sharded in a job of several processes"
    with pytest.raises(TypeError, match=message):
        loss(v, w, of_one_process)
    with pytest.raises(ValueError, match=r"teacher: expected shape \(4, 8\), got \(4, 7\)"):
        loss(v, w, torch.randn(4, 7))


def refused_relations(rank: int) -> None:
    """Scores, and what matches what, in forms that differ between the processes."""
    v, w, ids = own_batch(rank)
    loss = itrloss.InfoNCELoss(gather=True)
    with pytest.raises(ValueError, match=r"scores: expected 8 columns .*, got \[7, 8\]"):
        loss(scores=torch.randn(4, 7 + rank))
    with pytest.raises(ValueError, match=r"matches: expected 8 columns .*, got \[4, 4\]"):
        loss(v, w, matches=torch.eye(4))
    with pytest.raises(ValueError, match="with groups"):
        loss(v, w, image_groups=ids if rank else None)
    with pytest.raises(ValueError, match=r"of strings .*True"):
        loss(v, w, image_groups=list("abcd") if rank else ids)
    labels = torch.randn(4, 2 + rank).long()
    with pytest.raises(ValueError, match="numbers of labels"):
        loss(v, w, image_ids=labels, text_ids=ids)
    matches = torch.ones(4, 8, dtype=torch.float64 if rank else torch.float32)
    with pytest.raises(ValueError, match=r"with matches of torch\.float"):
        loss(v, w, matches=matches)
    related = itrloss.Related((ids, ids), "other" if rank else "same")
    with pytest.raises(ValueError, match=r"rule same.*rule other"):
        Similarity.sharded(v, w, related=related)
    expected = r"negatives: expected shape \(K, D\) or \(4, K, 5\)"
    with pytest.raises(ValueError, match=f"{expected}|process 1 failed"):
        loss(v, w, negatives=torch.randn(4 - rank, 2, 5))


def refused_anchors(rank: int) -> None:
    """Anchors whose candidates, or whose batches, are not the same."""
    v, w, ids = own_batch(rank)
    sim = Similarity.sharded(v, w, ids, ids)
    other = Similarity.sharded(v, w.sin(), ids, ids)
    pooled = Anchors.pooled(sim, other)
    with pytest.raises(ValueError, match="hardest_negatives: expected one matrix of candidates"):
        pooled.hardest_negatives()
    size = 4 + rank
    of_more_images = Similarity.sharded(torch.randn(size, 5), w, torch.arange(size), ids)
    for candidates in (other.T, of_more_images):
        with pytest.raises(ValueError, match="anchors: expected"):
            Anchors.pooled(sim.T, candidates)
    with pytest.raises(ValueError, match="anchors: expected those of one batch"):
        Anchors.together(sim, other)


def test_what_processes_cannot_share_is_an_error_in_all_of_them(tmp_path):
    run(refused, tmp_path)


def part_of_seven_and_nine(rank: int | None) -> tuple[slice, slice]:
    """The images and the texts of a process of two; all of them for None."""
    if rank is None:
        return slice(7), slice(9)
    return [(slice(3), slice(7)), (slice(3, 7), slice(7, 9))][rank]


def limited(rank: int | None) -> list[torch.Tensor]:
    """Answers within limits, of positives and with a bias, and their gradients; ``rank`` None: of
    one process.
    """
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    w = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    v_bias = torch.linspace(-0.2, 0.3, 7, dtype=torch.float64)
    w_bias = torch.linspace(0.4, 0.1, 9, dtype=torch.float64)
    rows, cols = part_of_seven_and_nine(rank)
    ids = (torch.arange(7)[rows] % 5, torch.arange(9)[cols] % 6)
    own = (v[rows], w[cols], v_bias[rows], w_bias[cols])
    leaves = [x.clone().requires_grad_() for x in own]
    x, y, *bias = leaves
    make: Any = Similarity if rank is None else Similarity.sharded
    both = make(x, y, *ids, bias=tuple(bias)).both
    guide = make(x.detach().cos(), y.detach().cos(), *ids).both
    found = []
    for values in limited_answers(both, guide):
        finite = torch.where(values.isfinite(), values, 0.0)
        total = both.reduce(finite, "mean")
        grads = torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True)
        found += [total.detach(), *grads]
    return found


def limited_answers(both: Anchors, guide: Anchors) -> list[torch.Tensor]:
    """Answers that take limits, positives or a guide."""
    positive = both.mean_of_positives(identity)
    return [
        both.logsumexp(5.0, below=positive + 0.1),
        both.logsumexp(300.0, above=-0.2, below=0.5),
        both.logsumexp(5.0, over="positives"),
        both.sum(identity, below=0.3),
        both.hardest_negatives(positive).values,
        both.logsumexp(5.0, below=0.2, guide=guide),
        both.sum(weighted_by_guide, 2.0, 1.0, guide=guide),
    ]


def test_limits_positives_and_biases_over_processes(tmp_path):
    found = run(limited, tmp_path)
    wanted = limited(None)
    for k, (exact, *parts) in enumerate(zip(wanted, *found, strict=True)):
        if k % 5 == 0:  # a value, before four gradients
            torch.testing.assert_close(parts, [exact, exact], rtol=1e-9, atol=1e-12)
        else:
            mean = torch.cat(parts) / 2
            torch.testing.assert_close(mean, exact, rtol=1e-9, atol=1e-12)


def biased_scores(rank: int, *whole: torch.Tensor) -> list[torch.Tensor]:
    """Scores of the rows and of the columns of a process that has 3 or 4, and 7 or 2, of them."""
    rows, cols = part_of_seven_and_nine(rank)
    images, texts, b, c = whole
    image_ids = torch.arange(7)[rows]
    text_ids = torch.arange(9)[cols]
    bias = (b[rows], c[cols])
    sim = Similarity.sharded(images[rows], texts[cols], image_ids, text_ids, bias=bias)
    return [sim.scores(), sim.T.scores()]


def test_scores_of_both_sides_have_the_biases_of_all_processes(tmp_path):
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.randn(n, 4, generator=generator) for n in (7, 9))
    b, c = (torch.randn(n, generator=generator) for n in (7, 9))
    parts = zip(*run(biased_scores, tmp_path, images, texts, b, c), strict=True)
    of_rows, of_cols = (torch.cat(x) for x in parts)
    ids = (torch.arange(7), torch.arange(9))
    whole = Similarity(images, texts, *ids, bias=(b, c)).scores()
    torch.testing.assert_close(of_rows, whole)
    torch.testing.assert_close(of_cols, whole.T)


def without_samples(rank: int) -> dict[str, list[float]]:
    """The values and gradients of each loss where the batches of all processes are empty."""
    found = {}
    for name in LOSSES:
        for reduction in ("mean", "sum"):
            config = {"loss": name, "sizes": [(0, 0)] * 2, "ids": "none", "seed": 1}
            config["options"] = {"reduction": reduction}
            own = batch(config, torch.float32)[rank]
            memory = filled_memory(config, torch.float32)
            got = outcome(config, own, memory, gather=True)
            parts = [*got["values"], *got["grads"].values()]
            found[f"{name} {reduction}"] = [float(x.abs().sum()) for x in parts]
    return found | coder_without_samples(rank)


def coder_without_samples(rank: int) -> dict[str, list[float]]:
    """The values of CODER's objective, whose prototypes are those of all processes."""
    found = {}
    empty = torch.zeros(0, 5)
    objective = itrloss.CODERObjective(5, 3, gather=True)
    for mode in (True, False):  # its prototypes are still empty, and then are those of one process
        objective.train(mode)
        memory = itrloss.CoupledMemory(8, 5)
        total, _ = objective(empty, empty, empty, empty, memory, empty, empty)
        found[f"coder {mode}"] = [float(total)]
    prototypes = itrloss.OnlineKMeans(3, 5)
    assert prototypes.update(empty).shape == (0,)
    assert not prototypes.reseeded.any()
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 5, generator=generator)
    own = rows if rank else rows[:0]
    for mode in (True, False):  # the first process has none, with and without prototypes
        objective.train(mode)
        memory = itrloss.CoupledMemory(8, 5)
        total, _ = objective(own, own, own, own, memory, own, own)
        assert total.isfinite()
    return found


@pytest.mark.slow
def test_batches_may_be_empty_in_all_processes(tmp_path):
    for found in run(without_samples, tmp_path):
        not_zero = {name: values for name, values in found.items() if any(values)}
        assert not_zero == {}


def guided(rank: int) -> list[str]:
    """What a loss says of guides with its own ids, with others, and without any."""
    v, w, x, y = (torch.randn(4, 5, generator=torch.Generator().manual_seed(k)) for k in range(4))
    own = torch.arange(4) + 4 * rank
    others = own.flip(0) if rank else own
    coarse = own // 2
    loss = itrloss.InfoNCELoss(margin=0.1, gather=True)
    found = []
    for ids in ((own, own), (own, others), (None, None), (coarse, coarse)):
        guide = Similarity.sharded(x, y, *ids)
        try:
            loss(v, w, own, own, guide=guide)
            found.append("")
        except ValueError as error:
            found.append(str(error))
    return found


def test_all_processes_refuse_a_guide_with_other_ids(tmp_path):
    for own, others, without, coarse in run(guided, tmp_path):
        assert own == ""
        assert without == ""  # without ids, row i has the number of row i
        assert others == coarse
        assert others.startswith("guide: expected the ids of the loss")


def tied(rank: int) -> list[torch.Tensor]:
    """The hardest negatives of alike images and texts, of which processes have 4 and 2."""
    size = 4 - 2 * rank
    sim = Similarity.sharded(torch.ones(size, 4), torch.ones(size, 4))
    hardest = sim.both.hardest_negatives()
    return [x[:size] for x in hardest.indices.chunk(2)]


def distinct(rank: int) -> list[torch.Tensor]:
    """The hardest negatives of vectors of which each has one that is near; again 4 and 2."""
    x = torch.eye(6)
    y = x.roll(1, 0) + 0.5 * x
    own = slice(4) if rank == 0 else slice(4, 6)
    hardest = Similarity.sharded(x[own], y[own]).both.hardest_negatives()
    return [part[: len(x[own])] for part in hardest.indices.chunk(2)]


def test_of_equal_negatives_the_first_is_the_hardest(tmp_path):
    of_sides = zip(*run(tied, tmp_path), strict=True)
    found = torch.cat([torch.cat(parts) for parts in of_sides])
    whole = Similarity(torch.ones(6, 4), torch.ones(6, 4))
    wanted = whole.both.hardest_negatives()
    assert torch.equal(found, wanted.indices)


def test_hardest_negatives_have_their_numbers_among_all(tmp_path):
    images, texts = (torch.cat(parts) for parts in zip(*run(distinct, tmp_path), strict=True))
    assert images.tolist() == [1, 2, 3, 4, 5, 0]
    assert texts.tolist() == [5, 0, 1, 2, 3, 4]


def all_hinges(
    rank: int, sizes: list[int], images: torch.Tensor, texts: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """The sum of all hinges, from a process's part."""
    own = [x.split(sizes)[rank] for x in (images, texts, ids, ids)]
    loss = itrloss.TripletLoss(0.5, "all", reduction="sum", gather=True)
    return loss(*own)


def test_positives_of_three_uneven_processes_each_have_their_hinges(tmp_path):
    sizes = [1, 3, 4]
    ids = torch.arange(8) % 2
    generator = torch.Generator().manual_seed(0)
    images, texts = torch.randn(2, 8, 5, generator=generator)
    loss = itrloss.TripletLoss(0.5, "all", reduction="sum")
    whole = loss(images, texts, ids, ids)
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
    value = criterion(images, texts)
    by_images, by_texts = torch.autograd.grad(value, (images, texts), create_graph=True)
    squares = factor * (by_images.square().sum() + by_texts.square().sum())
    return list(torch.autograd.grad(squares, (images, texts)))


def second_derivatives_of_a_part(
    rank: int, all_sizes: list[list[int]], images: torch.Tensor, texts: torch.Tensor
) -> list[Any]:
    """The second derivatives of each loss for each division of the pairs."""
    found = []
    for sizes in all_sizes:
        n = sum(sizes)
        v = images[:n].split(sizes)[rank]
        w = texts[:n].split(sizes)[rank]
        for make in SECOND.values():
            criterion = make(engine="dense", gather=True).double()
            found.append(second_derivatives(criterion, v, w, 1.0))
    return found


@pytest.mark.slow
def test_second_derivatives_are_those_of_one_process(tmp_path):
    images, texts = torch.randn(2, 8, 5, dtype=torch.float64)
    all_sizes = [[4, 4], [4, 3], [1, 4], [0, 4], [4, 0]]
    found = run(second_derivatives_of_a_part, tmp_path, all_sizes, images, texts)
    cases = [(sizes, name) for sizes in all_sizes for name in SECOND]
    of_each_case = zip(*found, strict=True)
    for (sizes, name), parts in zip(cases, of_each_case, strict=True):
        n = sum(sizes)
        criterion = SECOND[name](engine="dense").double()
        # A process's first derivatives are twice as large, as DDP takes the mean.
        whole = second_derivatives(criterion, images[:n], texts[:n], 4.0)
        for side, expected in enumerate(whole):
            got = torch.cat([part[side] for part in parts])
            torch.testing.assert_close(got, expected, msg=f"{sizes} {name}")
