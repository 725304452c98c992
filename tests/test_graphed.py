"""Recorded steps: values, gradients, what is recorded, and what goes to the criterion itself.

There is no GPU here. `Rerun` computes a step again, bit by bit as the criterion does; `Tape` runs
the operators of a recording again, so that options, addresses and choices are frozen as in a CUDA
graph, and raises an error where the host would wait.
"""

from __future__ import annotations

import copy
import io
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.conforming import CALLS, conforming
from support.graphs import Idling, OnCPU, Operators, Tape, Taped, read_nothing
from support.losses_registry import REGISTRY, where
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import itrloss
from itrloss import Graphed
from itrloss.engine import devices
from itrloss.engine.matrix import choose_engine
from itrloss.graphed import CUDAGraph

N, D = 6, 8
CALLED = where(lambda entry: entry.takes in CALLS)


@pytest.fixture
def accelerator(monkeypatch):
    """The host reads no tensor, as on an accelerator."""
    read_nothing(monkeypatch)


def batch(n: int = N, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Images and texts (n, D) that get a gradient."""
    generator = torch.Generator().manual_seed(seed)
    pair = torch.randn(2, n, D, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in pair]


def outcome(value: Any, leaves: Sequence[Tensor], factor: float = 1.0) -> list[Tensor | None]:
    """A loss, further results, and the gradients of the loss times a factor."""
    results = value if isinstance(value, tuple) else (value,)
    for x in leaves:
        x.grad = None
    (results[0] * factor).backward()
    terms = [x for part in results[1:] for x in part]
    return [results[0].detach(), *terms, *[x.grad for x in leaves]]


def are_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Whether tensors are equal in every bit; None in the same places."""
    pairs = list(zip(found, expected, strict=True))
    missing = [(x is None) == (y is None) for x, y in pairs]
    return all(missing) and all(
        torch.equal(x, y) for x, y in pairs if x is not None and y is not None
    )


def agrees(graphed: Graphed, *args: Any, factor: float = 1.0, **kwargs: Any) -> bool:
    """Whether a recorded step has the values and the gradients of its criterion."""
    given = [x for x in [*args, *kwargs.values()] if isinstance(x, Tensor) and x.requires_grad]
    leaves = [*given, *graphed.criterion.parameters()]
    expected = outcome(graphed.criterion(*args, **kwargs), leaves, factor)
    return are_equal(outcome(graphed(*args, **kwargs), leaves, factor), expected)


def recorded(graphed: Graphed) -> int:
    """The number of recorded steps."""
    return int(graphed.extra_repr().rpartition("=")[2])


def filled(ids: Tensor | None = None, dim: int = D) -> itrloss.CoupledMemory:
    memory = itrloss.CoupledMemory(20, dim)
    memory.enqueue(*[x.detach() for x in batch(12, seed=5)], ids)
    return memory


# --------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("kind", [OnCPU, Taped])
@pytest.mark.parametrize("name", CALLED)
def test_all_losses_replay_bit_by_bit(name, kind, monkeypatch):
    case = conforming(name)
    if kind is Taped:
        read_nothing(monkeypatch)
    call = case.options.get("call", lambda loss, *x: loss(*x))
    criterion = case.loss.float()
    graphed = kind(criterion)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        pair = [torch.randn(N, 64, generator=generator, requires_grad=True) for _ in "vw"]
        ids = torch.randint(0, 5, (N,), generator=generator)
        more = () if case.options.get("ids") is False else (ids, ids)
        leaves = [*pair, *criterion.parameters()]
        if kind is Taped and name in ("coder", "dvse"):  # for prototypes, and for ids
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                call(graphed, *pair, *more)
            return
        expected = outcome(call(criterion, *pair, *more), leaves)
        assert are_equal(outcome(call(graphed, *pair, *more), leaves), expected)
    assert recorded(graphed) == 1


ON_DEVICES = [
    pytest.param(Taped, "cpu", id="cpu"),
    pytest.param(
        Graphed,
        "cuda",
        id="cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs"),
    ),
]


@pytest.mark.parametrize(("kind", "device"), ON_DEVICES)
@pytest.mark.parametrize("name", where(lambda entry: entry.takes in ("pairs", "memory")))
def test_losses_of_pairs_and_memories_replay_on_a_device(name, kind, device, accelerator):
    entry = REGISTRY[name]
    graphed = kind(entry.make().to(device))
    memory = filled(torch.arange(12)).to(device)
    for seed in range(4):
        leaves = [x.detach().to(device).requires_grad_() for x in batch(seed=seed)]
        arguments = [*leaves]
        ids = torch.arange(N, device=device)
        if entry.takes == "memory":
            keys = [x.detach().to(device) for x in batch(seed=seed + 20)]
            arguments += [*keys, memory]
        arguments += [ids, ids.roll(seed)]
        trained = [*leaves, *graphed.criterion.parameters()]
        expected = outcome(graphed.criterion(*arguments), trained)
        found = outcome(graphed(*arguments), trained)
        # the criterion lists positives on a GPU
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        if entry.takes == "memory":
            memory.enqueue(*keys, ids + N * seed)
    assert recorded(graphed) == 1


def coder_arguments(seed: int, dim: int = D) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(N, dim, generator=generator) for _ in range(6)]
    for k in (0, 1, 4, 5):
        tensors[k].requires_grad_()
    return [*tensors[:4], *tensors[4:]]


def test_coder_without_prototypes_takes_all_of_its_inputs(accelerator):
    criterion = itrloss.CODERObjective(D, 3, prototype_weight=0)
    graphed = Taped(criterion)
    ids = torch.arange(N)
    memory = filled(torch.arange(12))
    for seed in range(3):
        *four, v, w = coder_arguments(seed)
        assert agrees(graphed, *four, memory, v, w, image_ids=ids, text_ids=ids)
    total, terms = graphed(*four, memory, v, w, image_ids=ids, text_ids=ids)
    assert type(terms) is itrloss.CODERTerms
    assert total.requires_grad
    assert not any(x.requires_grad for x in terms)
    assert recorded(graphed) == 1


def test_dvse_takes_its_inputs_by_name(accelerator):
    graphed = Taped(itrloss.DVSEObjective())
    for seed in range(3):
        sets = torch.randn(N, 3, D, generator=torch.Generator().manual_seed(seed))
        residuals = (sets + 1).requires_grad_()
        named = {"residuals": residuals, "gate": torch.ones(N, 3), "image_ids": None}
        assert agrees(graphed, sets.requires_grad_(), batch(seed=seed)[1], **named)
    assert recorded(graphed) == 1


def test_an_input_that_the_loss_leaves_out_has_no_gradient():
    graphed = OnCPU(itrloss.CODERObjective(D, 3, prototype_weight=0, concept_weight=0))
    for seed in range(2):
        *four, v, w = coder_arguments(seed)
        assert agrees(graphed, *four, filled(), v, w) or recorded(graphed) == 1
        assert v.grad is None
        assert four[0].grad is not None


def test_gradients_go_on_to_encoders(accelerator):
    torch.manual_seed(0)
    encoders = nn.ModuleList([nn.Linear(D, D), nn.Linear(D, D)])
    criterion = itrloss.InfoNCELoss(learnable=True)
    graphed = Taped(criterion)
    leaves = [*encoders.parameters(), *criterion.parameters()]
    for seed in range(3):
        found = []
        for call in (criterion, graphed):
            embedded = [f(x.detach()) for f, x in zip(encoders, batch(seed=seed), strict=True)]
            found.append(outcome(call(*embedded), leaves))
        assert are_equal(*found)
    assert recorded(graphed) == 1


def test_a_gradient_cache_takes_it():
    torch.manual_seed(0)
    encoders = nn.Linear(D, D), nn.Linear(D, D)
    criterion = itrloss.InfoNCELoss(learnable=True)
    leaves = [p for module in (*encoders, criterion) for p in module.parameters()]
    pair = [x.detach() for x in batch()]
    graphed = OnCPU(criterion)
    found = []
    for call in (criterion, graphed, graphed):
        for x in leaves:
            x.grad = None
        loss = itrloss.grad_cache_step(call, encoders, pair, chunk_size=2)
        found.append([loss, *[x.grad for x in leaves]])
    assert are_equal(found[0], found[1])
    assert are_equal(found[0], found[2])
    assert recorded(graphed) == 1


def test_arguments_by_name_in_another_order(accelerator):
    graphed = Taped(itrloss.InfoNCELoss(directions="image-text"))
    first, second = torch.arange(N) // 2, torch.arange(N) // 3
    pair = batch()
    for _ in range(2):
        assert agrees(graphed, *pair, image_ids=first, text_ids=second)
        assert agrees(graphed, *pair, text_ids=first, image_ids=second)
        assert agrees(graphed, *pair, first, text_ids=second)
    assert recorded(graphed) == 3


def test_the_incoming_gradient_is_a_factor():
    graphed = OnCPU(itrloss.DiversityContrastiveLoss())
    for factor in (1.0, 0.25, 65536.0, 0.0):  # powers of two round nothing
        assert agrees(graphed, *batch(), factor=factor)


def test_two_calls_before_one_backward_pass(accelerator):
    graphed = Taped(itrloss.InfoNCELoss())
    first, second = batch(seed=1), batch(seed=2)
    graphed(*first)
    leaves = [*first, *second]
    expected = outcome(graphed.criterion(*first) + 2 * graphed.criterion(*second), leaves)
    assert are_equal(outcome(graphed(*first) + 2 * graphed(*second), leaves), expected)


def test_an_input_that_is_changed_before_backward_has_the_gradient_of_the_call(accelerator):
    graphed = Taped(itrloss.InfoNCELoss())
    graphed(*batch())
    expected = outcome(graphed.criterion(*batch()), [])
    pair = batch()
    loss = graphed(*pair)
    with torch.no_grad():
        pair[0].mul_(3)
    loss.backward()
    again = batch()
    graphed.criterion(*again).backward()
    assert torch.equal(loss.detach(), expected[0])
    assert torch.equal(pair[0].grad, again[0].grad)


def test_no_input_is_written_to(accelerator):
    graphed = Taped(itrloss.InfoNCELoss())
    first = batch(seed=1)
    graphed(*first)
    graphed(*batch(seed=2))
    assert are_equal(first, batch(seed=1))


def test_embeddings_in_other_layouts(accelerator):
    graphed = Taped(itrloss.InfoNCELoss())
    for seed in range(3):
        transposed = [x.detach().T.contiguous().T.requires_grad_() for x in batch(seed=seed)]
        assert agrees(graphed, *transposed)
    plain = batch(seed=4)
    strided = [torch.stack([x.detach()] * 2, 2)[..., 0].requires_grad_() for x in plain]
    found = outcome(graphed(*strided), strided)
    for x, y in zip(found, outcome(graphed.criterion(*plain), plain), strict=True):
        torch.testing.assert_close(x, y)
    assert recorded(graphed) == 1


def test_one_tensor_as_both_sides():
    graphed = OnCPU(itrloss.InfoNCELoss())
    for seed in range(2):
        x, _ = batch(seed=seed)
        expected = outcome(graphed.criterion(x, x), [x])
        for found, other in zip(outcome(graphed(x, x), [x]), expected, strict=True):
            torch.testing.assert_close(found, other)


def test_a_side_without_a_gradient():
    graphed = OnCPU(itrloss.InfoNCELoss())
    for seed in range(2):
        images, texts = batch(seed=seed)
        assert agrees(graphed, images, texts.detach())
        assert agrees(graphed, images, texts)
    assert recorded(graphed) == 2


def test_scores_are_inputs(accelerator):
    graphed = Taped(itrloss.TripletLoss())
    for seed in range(2):
        scores = torch.rand(N, N, generator=torch.Generator().manual_seed(seed))
        assert agrees(graphed, scores=scores.requires_grad_())
    assert recorded(graphed) == 1


def test_matches_and_groups_are_inputs(accelerator):
    graphed = Taped(itrloss.InfoNCELoss())
    for seed in range(3):
        matches = torch.eye(N).roll(seed, 0)
        matches[0, 3] = torch.nan
        matches[1, 1] = 0.5
        assert agrees(graphed, *batch(seed=seed), matches=matches)
        groups = torch.arange(N) // 3
        assert agrees(graphed, *batch(seed=seed), image_groups=groups, text_groups=None)
    assert recorded(graphed) == 2


# ------------------------------------------------------------------------ what makes another step


def test_a_ragged_batch_is_another_step_and_further_ones_are_not_recorded():
    graphed = OnCPU(itrloss.InfoNCELoss(), most=2)
    for _ in range(2):
        for n in (6, 5, 4, 3):
            assert agrees(graphed, *batch(n))
    assert recorded(graphed) == 2


def test_most_may_be_none_and_is_checked():
    graphed = OnCPU(itrloss.InfoNCELoss(), most=0)
    assert agrees(graphed, *batch())
    assert recorded(graphed) == 0
    with pytest.raises(ValueError, match="most: expected a number of at least 0, got -1"):
        Graphed(itrloss.InfoNCELoss(), most=-1)
    graphed.most = 1
    assert agrees(graphed, *batch())
    assert recorded(graphed) == 1


def test_a_batch_of_another_dtype(accelerator):
    graphed = Taped(itrloss.InfoNCELoss())
    for _ in range(2):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            assert agrees(graphed, *batch(dtype=dtype))
    assert recorded(graphed) == 3


OPTIONS: dict[str, tuple[Callable[[], nn.Module], str, Any]] = {
    "number": (itrloss.InfoNCELoss, "temperature", 0.5),
    "word": (itrloss.InfoNCELoss, "directions", "image-text"),
    "none": (itrloss.InfoNCELoss, "margin", 0.1),
    "pair of numbers": (itrloss.InfoNCELoss, "hardness", (2.0, 0.0)),
    "reduction": (itrloss.HubnessAwareLoss, "reduction", "sum"),
    "mode": (itrloss.TripletLoss, "training", False),
    "flag": (itrloss.InfoNCELoss, "joint", True),
    "mining": (itrloss.TripletLoss, "mining", "all"),
    "of an inner loss": (
        lambda: itrloss.Matryoshka(itrloss.SupConLoss(), (4, 8)),
        "loss.temperature",
        0.5,
    ),
    "list": (lambda: itrloss.Matryoshka(itrloss.SupConLoss(), (4, 8)), "weights", [1.0, 9.0]),
    "entry of a list": (lambda: itrloss.Matryoshka(itrloss.SupConLoss(), (4, 8)), "dims", None),
    "learnt": (lambda: itrloss.InfoNCELoss(learnable=True), "temperature", 0.5),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_that_is_set_later_counts(name, accelerator):
    make, option, value = OPTIONS[name]
    graphed = Taped(make())
    if name == "mining":
        graphed.criterion.reduction = "mean"
    before = [outcome(graphed(*batch()), [])[0] for _ in range(2)]
    *path, last = option.split(".")
    owner = graphed.criterion
    for part in path:
        owner = getattr(owner, part)
    if value is None:
        owner.dims[0] = 2
    else:
        setattr(owner, last, value)
    assert agrees(graphed, *batch())
    assert agrees(graphed, *batch())
    assert recorded(graphed) == (1 if name == "learnt" else 2)
    assert name == "mode" or not torch.equal(outcome(graphed(*batch()), [])[0], before[0])


# ------------------------------------------------------------------------------------- parameters


def test_a_learnt_temperature_is_read_and_trained(accelerator):
    twins = [itrloss.InfoNCELoss(learnable=True) for _ in range(2)]
    graphed = Taped(twins[0])
    optimizers = [torch.optim.AdamW(x.parameters(), 0.1) for x in twins]
    for seed in range(5):
        for call, optimizer in zip((graphed, twins[1]), optimizers, strict=True):
            optimizer.zero_grad()
            call(*batch(seed=seed)).backward()
            optimizer.step()
    assert torch.equal(twins[0].log_scale, twins[1].log_scale)
    assert recorded(graphed) == 1


def test_a_learnt_scale_is_limited(accelerator):
    criterion = itrloss.InfoNCELoss(learnable=True, max_scale=20)
    graphed = Taped(criterion)
    graphed(*batch())
    with torch.no_grad():
        criterion.log_scale.fill_(9.0)
    graphed(*batch())
    assert criterion.log_scale.detach().exp().item() == pytest.approx(20)


def test_parameters_that_are_moved_or_frozen(accelerator):
    graphed = Taped(itrloss.InfoNCELoss(learnable=True))
    pair = batch()
    assert agrees(graphed, *pair)
    graphed.criterion.log_scale = nn.Parameter(torch.ones(1))
    assert agrees(graphed, *pair)
    graphed.to(torch.float64)
    assert agrees(graphed, *pair)
    graphed.criterion.log_scale.requires_grad_(False)
    assert agrees(graphed, *pair)
    assert agrees(graphed, *pair)
    assert graphed.criterion.log_scale.grad is None
    assert recorded(graphed) == 4


def test_parameters_alone_are_trained(accelerator):
    graphed = Taped(itrloss.InfoNCELoss(learnable=True))
    for seed in range(2):
        assert agrees(graphed, *[x.detach() for x in batch(seed=seed)])
    assert recorded(graphed) == 1


def test_hooks_of_tensors_and_accumulation():
    criterion = itrloss.InfoNCELoss(learnable=True)
    graphed = OnCPU(criterion)
    graphed(*batch())
    seen = []
    criterion.log_scale.register_hook(seen.append)
    for _ in range(2):
        graphed(*batch()).backward()
    assert len(seen) == 2
    assert torch.equal(criterion.log_scale.grad, 2 * seen[0])


def test_state_dicts_are_those_of_a_module_inside():
    source = itrloss.InfoNCELoss(temperature=0.5, learnable=True)
    graphed = OnCPU(itrloss.InfoNCELoss(learnable=True))
    graphed(*batch())
    assert list(graphed.state_dict()) == ["criterion.log_scale"]
    graphed.load_state_dict({"criterion.log_scale": source.log_scale.detach()})
    assert torch.equal(graphed(*batch()), source(*batch()))


# ---------------------------------------------------------------------------------------- memories


def memory_arguments(seed: int) -> list[Tensor]:
    return [*batch(seed=seed), *[x.detach() for x in batch(seed=seed + 20)]]


def test_a_memory_that_is_cut_is_read_where_it_is(accelerator):
    graphed = Taped(itrloss.Matryoshka(itrloss.UnifiedTrainingObjective(), (4, 8)))
    memory = filled(torch.arange(12))
    for step in range(5):
        ids = torch.arange(N) + N * step  # entries are overwritten after two steps
        arguments = memory_arguments(step)
        assert agrees(graphed, *arguments, memory, ids, ids)
        memory.enqueue(*arguments[2:], ids)
    assert recorded(graphed) == 1


def test_a_memory_that_is_replaced_or_moved(accelerator):
    graphed = Taped(itrloss.UnifiedTrainingObjective())
    memory = filled()
    for _ in range(2):
        assert agrees(graphed, *memory_arguments(0), memory)
    other = itrloss.CoupledMemory(20, D)
    other.enqueue(*[x.detach() for x in batch(3, seed=9)])
    for _ in range(2):
        assert agrees(graphed, *memory_arguments(0), other)
    memory.to(torch.bfloat16)
    for _ in range(2):
        assert agrees(graphed, *memory_arguments(0), memory)
    assert recorded(graphed) == 3


def test_a_new_memory_goes_to_the_criterion_which_counts_calls():
    graphed = OnCPU(itrloss.UnifiedTrainingObjective())
    memory = itrloss.CoupledMemory(20, D)
    for _ in range(99):
        graphed(*memory_arguments(0), memory)
    with pytest.warns(UserWarning, match="nothing was put into the memory"):
        graphed(*memory_arguments(0), memory)
    assert recorded(graphed) == 0


# ------------------------------------------------------------------------------- what is not state


class Filling(itrloss.MemoryInfoNCELoss):
    """A loss that puts its keys into the memory itself."""

    def _value(self, sims: Any, keys: Any, memory: itrloss.CoupledMemory, ids: Any) -> Any:
        loss = super()._value(sims, keys, memory, ids)
        memory.enqueue(*keys)
        return loss


def test_a_loss_that_fills_the_memory_fills_it_once_a_call():
    graphed = OnCPU(Filling())
    memory = filled()
    for step in range(3):
        assert int(memory.enqueued) == 12 + N * step
        graphed(*memory_arguments(step), memory)
    assert recorded(graphed) == 0


def test_a_memory_with_loaded_labels_is_checked_again(accelerator):
    graphed = Taped(itrloss.UnifiedTrainingObjective())
    memory = filled()
    for _ in range(2):
        graphed(*memory_arguments(0), memory)
    memory.load_state_dict(filled(torch.arange(12)).state_dict())
    with pytest.raises(ValueError, match="expected ids, as the memory's entries have them"):
        graphed(*memory_arguments(0), memory)


class Noisy(itrloss.InfoNCELoss):
    """InfoNCE with a number that is drawn in each call, which it counts."""

    calls_so_far = 0

    def compute(self, sim: itrloss.Similarity, *more: Any) -> Any:
        self._drawn = torch.rand(())
        self._calls = getattr(self, "_calls", 0) + 1
        return super().compute(sim, *more) * (1 + self._drawn)


@pytest.mark.parametrize("kind", [OnCPU, Taped])
def test_random_numbers_are_those_of_the_criterion(kind, accelerator):
    found = []
    for call in (kind(Noisy()), Noisy()):
        torch.manual_seed(3)
        found.append([call(*batch()).detach() for _ in range(4)])
    assert are_equal(*found)
    assert len({float(x) for x in found[0]}) == 4


def test_warm_ups_count_no_calls_and_keep_no_figures():
    graphed = OnCPU(itrloss.TripletLoss())
    for _ in range(5):
        graphed(*batch())
    assert graphed.criterion._calls == 1  # the first one, which the criterion took itself


class Running(nn.Module):
    """A loss with a running mean, which each call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean())
        return x.square().sum() * self.mean


def test_a_criterion_with_state_is_called_itself():
    twins = Running(), Running()
    graphed = OnCPU(twins[0])
    for step in range(3):
        x, _ = batch(seed=step)
        assert torch.equal(graphed(x), twins[1](x))
    assert torch.equal(twins[0].mean, twins[1].mean)
    assert recorded(graphed) == 0


def test_coder_moves_its_prototypes_once_a_call():
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        twins.append(itrloss.CODERObjective(D, 3))
    graphed = OnCPU(twins[0])
    memory = filled()
    for seed in range(3):
        *four, v, w = coder_arguments(seed)
        for call in (graphed, twins[1]):
            call(*four, memory, v, w)[0].backward()
    assert torch.equal(twins[0].prototypes.centroids, twins[1].prototypes.centroids)
    assert torch.equal(twins[0].prototypes.counts, twins[1].prototypes.counts)
    assert recorded(graphed) == 0


# ------------------------------------------------------------------------ what the criterion takes


def other_arguments(name: str) -> dict[str, Any]:
    images, texts = batch()
    ids: dict[str, Any] = {
        "lists": list(range(N)),
        "strings": [f"id {k}" for k in range(N)],
        "arrays": torch.arange(N).numpy(),
    }
    return {"images": images, "texts": texts, "image_ids": ids[name], "text_ids": ids[name]}


@pytest.mark.parametrize("name", ["lists", "strings", "arrays"])
def test_ids_that_are_no_tensors_go_to_the_criterion(name):
    graphed = OnCPU(itrloss.InfoNCELoss())
    assert agrees(graphed, **other_arguments(name))
    assert agrees(graphed, **other_arguments(name))
    assert recorded(graphed) == 0


class Several(nn.Module):
    """Two losses, each with a gradient."""

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return images.sum(), (images * texts).sum()


PASSED_ON: dict[str, Callable[[], tuple[Graphed, Sequence[Any]]]] = {
    "similarity": lambda: (OnCPU(itrloss.InfoNCELoss()), [itrloss.Similarity(*batch())]),
    "values of anchors": lambda: (OnCPU(itrloss.InfoNCELoss(reduction="none")), batch()),
    "values of images": lambda: (
        OnCPU(itrloss.InfoNCELoss(reduction="none", directions="image-text")),
        batch(),
    ),
    "several losses": lambda: (OnCPU(Several()), batch()),
    "gather": lambda: (OnCPU(itrloss.InfoNCELoss(gather=True)), batch()),
    "telemetry": lambda: (OnCPU(itrloss.InfoNCELoss(telemetry=True)), batch()),
    "check_finite": lambda: (OnCPU(itrloss.InfoNCELoss(check_finite=True)), batch()),
    "inner telemetry": lambda: (
        OnCPU(itrloss.Matryoshka(itrloss.InfoNCELoss(telemetry=True), (4, 8))),
        batch(),
    ),
    "float16": lambda: (OnCPU(itrloss.InfoNCELoss()), batch(dtype=torch.float16)),
    "no gradient": lambda: (OnCPU(itrloss.InfoNCELoss()), [x.detach() for x in batch()]),
    "a device without graphs": lambda: (Graphed(itrloss.InfoNCELoss()), batch()),
}


@pytest.mark.parametrize("name", PASSED_ON)
def test_other_calls_go_to_the_criterion(name):
    graphed, arguments = PASSED_ON[name]()
    for _ in range(2):
        found, expected = graphed(*arguments), graphed.criterion(*arguments)
        assert type(found) is type(expected)
        parts = [x if isinstance(x, tuple) else (x,) for x in (found, expected)]
        assert are_equal(*parts)
    assert recorded(graphed) == 0


def test_calls_that_train_nothing_take_no_place():
    graphed = OnCPU(itrloss.InfoNCELoss(), most=1)
    graphed(*[x.detach() for x in batch()])
    graphed(*batch())
    assert recorded(graphed) == 1


def test_telemetry_is_kept_when_it_is_set_later():
    graphed = OnCPU(itrloss.InfoNCELoss())
    for _ in range(2):
        graphed(*batch())
    graphed.criterion.telemetry = True
    graphed(*batch())
    assert graphed.criterion.telemetry


class Penalty(nn.Linear):
    """A loss of its parameters alone."""

    def forward(self) -> Tensor:  # type: ignore[override]
        return self.weight.square().sum()


def test_a_loss_without_inputs_is_called_itself():
    graphed = OnCPU(Penalty(2, 3))
    for _ in range(2):
        assert agrees(graphed)
    assert recorded(graphed) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient_nothing_is_recorded(mode):
    graphed = OnCPU(itrloss.InfoNCELoss(learnable=True))
    with mode():
        assert torch.equal(graphed(*batch()), graphed.criterion(*batch()))
    assert recorded(graphed) == 0
    assert agrees(graphed, *batch())
    assert recorded(graphed) == 1
    with mode():
        found = graphed(*batch())
        assert torch.equal(found, graphed.criterion(*batch()))
    assert not found.requires_grad


def test_hooks_of_the_criterion_run_in_each_call():
    graphed = OnCPU(itrloss.InfoNCELoss())
    for _ in range(2):
        graphed(*batch())
    seen = []
    graphed.criterion.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(3):
        graphed(*batch())
    assert len(seen) == 3


class Weighted(itrloss.InfoNCELoss):
    """InfoNCE times a tensor, a buffer or another attribute."""

    factor: Tensor

    def compute(self, sim: itrloss.Similarity, *more: Any) -> Any:
        return super().compute(sim, *more) * self.factor


@pytest.mark.parametrize("is_buffer", [False, True])
def test_tensors_of_the_criterion_may_change(is_buffer, accelerator):
    criterion = Weighted()
    if is_buffer:
        criterion.register_buffer("factor", torch.tensor(2.0))
    else:
        criterion.factor = torch.tensor(2.0)
    graphed = Taped(criterion)
    assert agrees(graphed, *batch())
    criterion.factor.fill_(3.0)
    assert agrees(graphed, *batch())
    assert recorded(graphed) == int(is_buffer)


def test_a_graph_inside_of_a_graph_is_one(accelerator, monkeypatch):
    made = []
    make = Tape.__init__
    monkeypatch.setattr(Tape, "__init__", lambda self, *x: (made.append(self), make(self, *x))[1])
    inner = Taped(itrloss.SupConLoss())
    graphed = Taped(itrloss.Matryoshka(inner, (4, 8)))
    for seed in range(3):
        assert agrees(graphed, *batch(seed=seed))
    assert recorded(graphed) == 1
    assert len(made) == 1 + recorded(inner) == 3  # inner ones are those of calls outside


@pytest.mark.slow
def test_compiled_it_is_the_criterion():
    graphed = OnCPU(itrloss.InfoNCELoss())
    compiled = torch.compile(graphed, backend="eager", fullgraph=True)
    expected = outcome(graphed.criterion(*(pair := batch())), pair)
    for found, other in zip(outcome(compiled(*pair), pair), expected, strict=True):
        torch.testing.assert_close(found, other)
    assert recorded(graphed) == 0


# ------------------------------------------------------------------------------------------ errors


def test_a_second_derivative_is_an_error_that_names_the_way_out():
    graphed = OnCPU(itrloss.InfoNCELoss())
    graphed(*batch())
    pair = batch()
    with pytest.raises(RuntimeError, match="create_graph: second derivatives need the criterion"):
        torch.autograd.grad(graphed(*pair), pair, create_graph=True)


def test_wrong_input_is_the_error_of_the_criterion():
    graphed = OnCPU(itrloss.InfoNCELoss())
    images, texts = batch()
    for _ in range(2):
        with pytest.raises(ValueError, match="texts"):
            graphed(images, texts[:, :3])
        with pytest.raises(TypeError, match="nonsense"):
            graphed(images, texts, nonsense=texts)
    assert agrees(graphed, images, texts)
    with pytest.raises(TypeError, match="criterion: expected a module, got function"):
        Graphed(batch)


class Failing(itrloss.InfoNCELoss):
    """It raises an error in chosen calls."""

    failing: Any = ()
    calls = 0

    def compute(self, sim: itrloss.Similarity, *more: Any) -> Any:
        type(self).calls += 1
        if self.calls in self.failing:
            raise ArithmeticError("in the middle")
        return super().compute(sim, *more)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_an_error_in_the_middle_leaves_nothing_half_done(call):
    Failing.calls = 0
    graphed = OnCPU(Failing(failing=(call,)))
    calls = 0
    while calls < 3:
        calls += 1
        try:
            found = graphed(*batch())
        except ArithmeticError:
            assert not devices.is_recorded(torch.device("cpu"))
            continue
        assert torch.equal(found, itrloss.InfoNCELoss()(*batch()))
    assert recorded(graphed) == 1
    assert Failing.calls > call


def test_a_call_that_waits_for_the_device_cannot_be_recorded(accelerator):
    class Waiting(itrloss.InfoNCELoss):
        def compute(self, sim: itrloss.Similarity, *more: Any) -> Any:
            loss = super().compute(sim, *more)
            return loss * 2 if float(loss.detach()) > 0 else loss

    graphed = Taped(Waiting())
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        graphed(*batch())
    assert recorded(graphed) == 0


# ------------------------------------------------------------------------------ autocast, threads


class Linear(nn.Linear):
    """A loss whose weight autocast converts, and keeps."""

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(images - texts).square().sum()


AUTOCAST = {
    "infonce": lambda: itrloss.InfoNCELoss(learnable=True),
    "linear": lambda: Linear(D, 3),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_is_part_of_the_kind_and_keeps_no_parameter(name, accelerator):
    torch.manual_seed(0)
    criterion = AUTOCAST[name]()
    graphed = Taped(criterion)
    for enabled in (False, True, True):
        for call in (criterion, graphed):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                found = outcome(call(*(pair := batch())), [*pair, *criterion.parameters()])
            if call is criterion:
                expected = found
        assert are_equal(found, expected)
        with torch.no_grad():
            for p in criterion.parameters():
                p.mul_(1.5)
    assert recorded(graphed) == 2


def test_threads_do_not_disturb_each_other(accelerator):
    graphed = Taped(itrloss.InfoNCELoss(learnable=True), most=8)
    expected = [graphed.criterion(*batch(seed=k)).detach() for k in range(4)]
    wrong = []

    def train(seed: int) -> None:
        """Replay one batch many times."""
        for _ in range(20):
            pair = batch(seed=seed)
            loss = graphed(*pair)
            grads = torch.autograd.grad(loss, [*pair, *graphed.criterion.parameters()])
            if not torch.equal(loss.detach(), expected[seed]) or grads[-1] is None:
                wrong.append(seed)

    threads = [threading.Thread(target=train, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ------------------------------------------------------------------------------------------ copies


def pickled(module: nn.Module) -> nn.Module:
    """Return what is loaded of a saved module."""
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_has_parameters_and_steps_of_its_own(copied, accelerator):
    graphed = Taped(itrloss.InfoNCELoss(learnable=True))
    for _ in range(2):
        assert agrees(graphed, *batch())
    twin = copied(graphed)
    assert recorded(twin) == 0
    with torch.no_grad():
        twin.criterion.log_scale.fill_(0.5)
    for _ in range(2):
        assert agrees(twin, *batch())
        assert agrees(graphed, *batch())
    assert recorded(twin) == recorded(graphed) == 1
    assert not torch.equal(twin(*batch()), graphed(*batch()))


def test_it_is_shown_with_its_criterion():
    graphed = OnCPU(itrloss.InfoNCELoss())
    graphed(*batch())
    assert repr(graphed).startswith("OnCPU(\n  most=4, recorded=1\n  (criterion): InfoNCELoss(")


# -------------------------------------------------------------------------------- work of the host


class Counted(TorchDispatchMode):
    """Counts operators."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def calls_of_the_library(function: Callable[[], object]) -> int:
    """The number of calls of the library's Python functions."""
    home = itrloss.__file__.removesuffix("__init__.py")
    calls = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(home):
            calls.append(frame)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return len(calls)


def all_of_coder() -> tuple[nn.Module, Sequence[Any]]:
    *four, v, w = coder_arguments(0)
    return itrloss.CODERObjective(D, 3, prototype_weight=0), [*four, filled(), v, w]


COUNTED: dict[str, Callable[[], tuple[nn.Module, Sequence[Any]]]] = {
    "infonce": lambda: (itrloss.InfoNCELoss(), batch()),
    "infonce learnable": lambda: (itrloss.InfoNCELoss(learnable=True), batch()),
    "infonce with ids": lambda: (itrloss.InfoNCELoss(), [*batch(), *torch.arange(N).expand(2, N)]),
    "sigmoid": lambda: (itrloss.SigmoidLoss(), batch()),
    "mdcl": lambda: (
        itrloss.MemoryDiversityContrastiveLoss(),
        [*memory_arguments(0), filled(torch.arange(12)), *torch.arange(N).expand(2, N)],
    ),
    "coder": all_of_coder,
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_replayed_step_takes_few_operators_and_calls(name):
    criterion, arguments = COUNTED[name]()
    graphed = Idling(criterion)

    def step() -> None:
        result = graphed(*arguments)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()

    step()
    graphed.zero_grad()
    for x in arguments:
        if isinstance(x, Tensor):
            x.grad = None
    with Counted() as operators:
        step()
    assert recorded(graphed) == 1
    assert operators.number <= 12
    assert calls_of_the_library(step) <= 100


# ------------------------------------------------------------------------------------ CUDA graphs


class FakeCuda:
    """What a capture calls of ``torch.cuda``, in the order of the calls."""

    def __init__(self, monkeypatch: Any):
        self.log: list[str] = []
        for name in ("device", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, self.context(name))
        monkeypatch.setattr(torch.cuda, "Stream", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.random, "fork_rng", self.drawn_again)

    def context(self, name: str) -> Callable[..., Any]:
        def enter(*_: object, **options: object) -> Any:
            self.log.append(name)
            return nullcontext()

        return enter

    def drawn_again(self, devices: Sequence[torch.device]) -> Any:
        self.log.append(f"numbers of {devices[0]}")
        return nullcontext()

    def wait_stream(self, other: object) -> None:
        self.log.append("wait")

    def replay(self) -> None:
        self.log.append("replay")


def test_a_capture_follows_warm_ups_on_a_stream_of_its_own(monkeypatch):
    fake = FakeCuda(monkeypatch)

    def function() -> list[Tensor]:
        fake.log.append("call")
        return [torch.ones(())]

    graph = CUDAGraph(function, torch.device("cuda", 0))
    graph.replay()
    warm_up = ["device", "numbers of cuda:0", "wait", "stream", "call", "call", "call", "wait"]
    assert fake.log == [*warm_up, "graph", "call", "replay"]
    assert torch.equal(graph.outputs[0], torch.ones(()))


class OnCuda:
    """Embeddings on a GPU that is not there."""

    device = torch.device("cuda:0")
    dtype = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(devices, "is_verified", lambda device: True)


ENGINES = {2**16: "tiled", 2**16 + 1: "triton", 2**20: "triton", 2**20 + 1: "triton"}


@pytest.mark.parametrize("numel", ENGINES)
def test_auto_takes_triton_earlier_while_a_step_is_recorded(numel, gpu):
    eager = "triton" if numel > 2**20 else "tiled"
    assert choose_engine("auto", numel, 2**30, OnCuda()) == eager
    with devices.recording():
        assert choose_engine("auto", numel, 2**30, OnCuda()) == ENGINES[numel]
    assert choose_engine("auto", numel, 2**30, OnCuda()) == eager


@pytest.mark.parametrize("capturing", [False, True])
def test_a_capture_of_ones_own_counts_as_well(capturing, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    expected = "triton" if capturing else "tiled"
    assert devices.is_recorded(OnCuda.device) is capturing
    assert choose_engine("auto", 2**18, 2**30, OnCuda()) == expected


def test_recorded_steps_run_as_recorded_ones(accelerator):
    """Warm-ups run the kernels that the capture takes."""
    seen = []

    class Looking(itrloss.InfoNCELoss):
        def compute(self, sim: itrloss.Similarity, *more: Any) -> Any:
            seen.append(devices.is_recorded(sim.device))
            return super().compute(sim, *more)

    graphed = Taped(Looking())
    graphed(*batch())
    graphed(*batch())
    assert seen == [False, True, True]


def test_the_tape_refuses_what_a_capture_cannot_hold():
    x = torch.arange(3.0)
    for wait in (lambda: float(x[0]), lambda: x[x > 1], lambda: x.nonzero(), lambda: x.unique()):
        with pytest.raises(RuntimeError, match="not permitted"), Operators():
            wait()
