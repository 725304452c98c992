"""What several processes share beyond what `test_random_cases` compares: compiled losses, empty
batches, ties, second derivatives, and what they refuse.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.cases import sample
from support.drawn_losses import LossCase
from support.draws import Batch
from support.losses_registry import REGISTRY
from support.processes import run

import itrloss
from itrloss import Anchors, Similarity

LOSSES = [name for name, entry in REGISTRY.items() if entry.takes != "features"]  # a gate


def case_of(name: str, pairs: int, reduction: str = "mean") -> LossCase:
    """A loss of the defaults, of some pairs without ids."""
    case = LossCase(name, 0, in_processes=True, batch=Batch("pairs", pairs, pairs))
    case.common = {"reduction": reduction}
    case.form = "embeddings"
    case.has_embeddings = True  # of a teacher, whose scores have the columns of all
    return case


def compiled(rank: int, names: list[str]) -> list[list[list[torch.Tensor]]]:
    """Outcomes of each loss, eager and compiled as one graph."""
    found = []
    for name in names:
        part = slice(6) if rank == 0 else slice(6, 12)
        case = case_of(name, 12).part(part, part)
        outcomes = [case.outcome("auto", compiled=x, gather=True) for x in (False, True)]
        found.append(outcomes)
    if rank == 0:  # tracing exchanges nothing
        loss = REGISTRY["triplet all"].make(gather=True)
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


def without_samples(rank: int) -> dict[str, list[float]]:
    """The values and gradients of each loss where the batches of all processes are empty."""
    found = {}
    for name in LOSSES:
        for reduction in ("mean", "sum"):
            case = case_of(name, 0, reduction)
            if case.can_be_shared and case.takes != "tokens":  # which need a set among all
                found[f"{name} {reduction}"] = [
                    float(x.abs().sum()) for x in case.outcome("auto", gather=True)
                ]
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
    rows = sample(4, 5)
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


def words_in_one(rank: int | None) -> list[torch.Tensor]:
    """Losses with words as ids, of two images that the first process has, or one process alone."""
    torch.manual_seed(0)
    images, keys, texts = torch.randn(2, 5), torch.randn(2, 5), torch.randn(4, 5)
    words = ["a", "b"]
    words_of_texts = ["a", "b", "c", "a"]
    if rank == 1:
        images, keys, words = images[:0], keys[:0], []
    if rank is not None:
        part = slice(2 * rank, 2 * rank + 2)
        texts, words_of_texts = texts[part], words_of_texts[part]
    memory = itrloss.CoupledMemory(8, 5)
    memory.enqueue(images, keys, words)
    assert len(memory) == 2
    infonce = itrloss.InfoNCELoss(gather=True)
    against_memory = itrloss.MemoryInfoNCELoss(gather=True)
    return [
        infonce(images, texts, words, words_of_texts),
        infonce(images, keys, words, words, negatives=keys, negative_ids=words),
        infonce(images, keys, labels=words),
        against_memory(images, keys, images, keys, memory, words, words),
    ]


def test_an_empty_batch_goes_with_words_as_ids(tmp_path):
    wanted = words_in_one(None)
    for found in run(words_in_one, tmp_path):
        torch.testing.assert_close(found, wanted)


def copied(rank: int) -> None:
    """Copies of losses with a process group, as averages of models hold them."""
    group = torch.distributed.new_group([0, 1])
    batch = torch.randn(2, 3, 5)
    criterion = itrloss.InfoNCELoss(learnable=True, gather=True, process_group=group)
    twin = copy.deepcopy(criterion)
    assert twin.process_group is group
    assert twin.log_scale is not criterion.log_scale
    assert torch.equal(twin(*batch), criterion(*batch))
    coder = itrloss.CODERObjective(5, 3, gather=True, process_group=group)
    average = torch.optim.swa_utils.AveragedModel(torch.nn.ModuleList([criterion, coder]))
    assert average.module[1].classifier.process_group is group


def test_losses_with_a_process_group_may_be_copied(tmp_path):
    run(copied, tmp_path)


def nothing_enqueued(rank: int) -> int:
    """How many entries a memory has after no pairs with ids, and two without."""
    memory = itrloss.CoupledMemory(8, 5)
    no_keys = torch.zeros(2, 0, 5)
    memory.enqueue(*no_keys, torch.arange(0))
    assert memory.is_new
    memory.enqueue(*torch.randn(2, 1, 5))
    return len(memory)


def test_no_keys_in_any_process_leave_a_memory_new(tmp_path):
    assert run(nothing_enqueued, tmp_path) == [2, 2]


def figures_of_sets(rank: int, size: int) -> dict[str, torch.Tensor]:
    """The figures of a process's part of eight images with three embeddings each."""
    torch.manual_seed(0)
    sets, texts = torch.randn(8, 3, 5), torch.randn(8, 5)
    part = slice(0, size) if rank == 0 else slice(size, None)
    loss = itrloss.VarianceAwareLoss(gather=True, telemetry=True)
    loss(sets[part], texts[part])
    return loss.telemetry


@pytest.mark.parametrize("size", [3, 0])
def test_figures_of_sets_are_those_of_one_process(size, tmp_path):
    whole = figures_of_sets(0, 8)
    for figures in run(figures_of_sets, tmp_path, size):
        torch.testing.assert_close(figures, whole)


def tied(rank: int) -> list[torch.Tensor]:
    """The hardest negatives of alike images and texts, of which processes have 4 and 2."""
    size = 4 - 2 * rank
    sim = Similarity.sharded(torch.ones(size, 4), torch.ones(size, 4))
    hardest = sim.both.hardest_negatives()
    return [x[:size] for x in hardest.indices.chunk(2)]


def test_of_equal_negatives_the_first_is_the_hardest(tmp_path):
    of_sides = zip(*run(tied, tmp_path), strict=True)
    found = torch.cat([torch.cat(parts) for parts in of_sides])
    whole = Similarity(torch.ones(6, 4), torch.ones(6, 4))
    wanted = whole.both.hardest_negatives()
    assert torch.equal(found, wanted.indices)


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
