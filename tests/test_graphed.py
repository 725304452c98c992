"""Recorded steps: values, gradients, what is recorded, and what goes to the criterion itself.

There is no GPU here. `Rerun` computes a step again, bit by bit as the criterion does; `Tape` runs
the operators of a recording again, so that options, addresses and choices are frozen as in a CUDA
graph, and raises an error where the host would wait.
"""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from support.calls import calls_of_the_library
from support.cases import sample
from support.conforming import CALLS, conforming
from support.graphs import FakeCuda, Idling, OnCPU, Operators, Tape, Taped, read_nothing
from support.losses_registry import REGISTRY, where
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import itrloss
from itrloss import Graphed
from itrloss.engine import devices
from itrloss.engine.matrix import choose_engine
from itrloss.training.graphed import CUDAGraph

N, D = 6, 8
IDS = torch.arange(N)
CALLED = where(lambda entry: entry.takes in CALLS)

of_kinds = pytest.mark.parametrize("kind", [OnCPU, Taped])


@pytest.fixture
def accelerator(monkeypatch):
    """The host reads no tensor, as on an accelerator."""
    read_nothing(monkeypatch)


def batch(n: int = N, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Images and texts (n, D) that get a gradient."""
    return [x.requires_grad_() for x in sample(2, n, D, seed=seed, dtype=dtype).unbind()]


def fixed(seed: int) -> list[Tensor]:
    """Images and texts without a gradient."""
    return [x.detach() for x in batch(seed=seed)]


def filled(n: int = 12) -> itrloss.CoupledMemory:
    memory = itrloss.CoupledMemory(20, D)
    memory.enqueue(*[x.detach() for x in batch(n, seed=5)], torch.arange(n))
    return memory


def outcome(value: Any, leaves: Sequence[Tensor], factor: float = 1.0) -> list[Any]:
    """The form of a result, its tensors, whether they have a graph, and the gradients of the first
    times a factor.
    """
    results, form = tree_flatten(value)
    for x in leaves:
        x.grad = None
    with_graph = [x.requires_grad for x in results]
    if with_graph[0]:
        (results[0].sum() * factor).backward()
    return [form, with_graph, *[x.detach() for x in results], *[x.grad for x in leaves]]


def are_equal(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    """Whether tensors are equal in every bit, and other objects are equal."""
    for x, y in zip(found, expected, strict=True):
        both = isinstance(x, Tensor) and isinstance(y, Tensor)
        if not (torch.equal(x, y) if both else x is y or x == y):
            return False
    return True


def agrees(graphed: Graphed, *args: Any, factor: float = 1.0, **kwargs: Any) -> bool:
    """Whether a recorded step has the values and the gradients of its criterion, and leaves the
    same in its inputs and parameters.
    """
    given = [
        x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.requires_grad
    ]
    leaves = [*given, *graphed.criterion.parameters()]
    found = outcome(graphed(*args, **kwargs), leaves, factor)
    after = [x.detach().clone() for x in leaves]
    expected = outcome(graphed.criterion(*args, **kwargs), leaves, factor)
    return are_equal([*found, *after], [*expected, *leaves])


def assert_close(
    call: Any, criterion: Any, args: Sequence[Any], leaves: Any = None, **tolerance: float
) -> None:
    """Compare values and gradients, which may differ by rounding."""
    leaves = leaves or args
    found, expected = (outcome(each(*args), leaves)[2:] for each in (call, criterion))
    torch.testing.assert_close(found, expected, **tolerance)


def recorded(graphed: Graphed) -> int:
    """The number of recorded steps."""
    return int(graphed.extra_repr().rpartition("=")[2])


# ------------------------------------------------------------------- losses that are not ours


class Several(nn.Module):
    """Two losses, each with a gradient."""

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return images.sum(), (images * texts).sum()


class Penalty(nn.Linear):
    """A loss of its parameters alone."""

    def forward(self, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        return self.weight.square().sum()


class Linear(nn.Linear):
    """A loss whose weight autocast converts, and keeps."""

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(images - texts).square().sum()


class Running(nn.Module):
    """A loss with a running mean, which each call moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(images.detach().mean())
        return images.square().sum() * self.mean


class Noisy(itrloss.InfoNCELoss):
    """InfoNCE with a number that is drawn in each call."""

    def compute(self, sim: itrloss.Similarity, *more: Any) -> Any:
        return super().compute(sim, *more) * (1 + torch.rand(()))


class Weighted(itrloss.InfoNCELoss):
    """InfoNCE times a tensor, a buffer or another attribute."""

    factor: Tensor

    def __init__(self, is_buffer: bool):
        super().__init__()
        if is_buffer:
            self.register_buffer("factor", torch.tensor(2.0))
        else:
            self.factor = torch.tensor(2.0)

    def compute(self, sim: itrloss.Similarity, *more: Any) -> Any:
        return super().compute(sim, *more) * self.factor


class Filling(nn.Module):
    """A loss that puts keys into the memory itself."""

    def forward(self, images: Tensor, texts: Tensor, *more: Any) -> Tensor:
        *keys, memory, ids, _ = more
        loss = (images @ memory.images.sum(0)).sum()
        memory.enqueue(*keys, ids)
        return loss


# --------------------------------------------------------------------------- values and gradients


def given(*args: Any, **kwargs: Any) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments of a call."""
    return args, kwargs


# Arguments by a seed and a memory with entries of ids 0 to 11.
Arguments = Callable[[int, itrloss.CoupledMemory], tuple[Sequence[Any], dict[str, Any]]]


def pairs(seed: int, memory: itrloss.CoupledMemory) -> Any:
    return given(*batch(seed=seed))


def with_ids(seed: int, memory: itrloss.CoupledMemory) -> Any:
    return given(*batch(seed=seed), IDS, IDS.roll(seed))


def with_memory(seed: int, memory: itrloss.CoupledMemory) -> Any:
    return given(*batch(seed=seed), *fixed(seed + 20), memory, IDS + N * seed, IDS)


def coder(seed: int, memory: itrloss.CoupledMemory) -> Any:
    heads = batch(seed=seed + 40)
    named = {"image_ids": IDS, "text_ids": IDS}
    return given(*batch(seed=seed), *fixed(seed + 20), memory, *heads, **named)


def dvse(seed: int, memory: itrloss.CoupledMemory) -> Any:
    images, texts = batch(seed=seed)
    sets = torch.stack([images.detach(), images.detach().flip(0)], 1).requires_grad_()
    residuals = (sets.detach() + 1).requires_grad_()
    return given(sets, texts, residuals=residuals, gate=torch.ones(N, 2), image_ids=None)


def scores(seed: int, memory: itrloss.CoupledMemory) -> Any:
    images, texts = fixed(seed)
    return given(scores=(images @ texts.T).requires_grad_())


def matches(seed: int, memory: itrloss.CoupledMemory) -> Any:
    own = torch.eye(N).roll(seed, 0)
    own[0, 3] = torch.nan
    own[1, 1] = 0.5
    return given(*batch(seed=seed), matches=own)


def transposed(seed: int, memory: itrloss.CoupledMemory) -> Any:
    return given(*[x.T.contiguous().T.requires_grad_() for x in fixed(seed)])


def of_size(n: int, dtype: torch.dtype = torch.float32) -> Arguments:
    return lambda seed, memory: given(*batch(n, dtype, seed))


def named(**ids: Any) -> Arguments:
    return lambda seed, memory: given(*batch(seed=seed), **ids)


def setting(option: str, value: Any) -> Callable[[Any, Any], None]:
    """Set an option of a criterion later."""
    return lambda criterion, memory: setattr(criterion, option, value)


def unchanged(criterion: Any, memory: itrloss.CoupledMemory) -> None:
    """Change nothing."""


class Row(NamedTuple):
    """Calls of a criterion, which are repeated, and what is changed between them."""

    criterion: Callable[[], nn.Module]
    recorded: int
    arguments: Sequence[Arguments] = (pairs,)
    change: Callable[[Any, itrloss.CoupledMemory], object] = unchanged
    most: int = 4


InfoNCE = itrloss.InfoNCELoss
OTHER = filled(3)


def learnable() -> nn.Module:
    return InfoNCE(learnable=True)


def uto() -> nn.Module:
    return itrloss.UnifiedTrainingObjective()


def nested() -> nn.Module:
    return itrloss.Matryoshka(itrloss.SupConLoss(), (4, 8))


FIRST, SECOND = IDS // 2, IDS // 3
INPUTS = {
    "pairs": Row(InfoNCE, 1),
    "ids": Row(InfoNCE, 1, [with_ids]),
    "names in another order": Row(
        lambda: InfoNCE(directions="image-text"),
        3,
        [
            named(image_ids=FIRST, text_ids=SECOND),
            named(text_ids=FIRST, image_ids=SECOND),
            lambda seed, memory: given(*batch(seed=seed), FIRST, text_ids=SECOND),
        ],
    ),
    "matches and groups": Row(InfoNCE, 2, [matches, named(image_groups=SECOND, text_groups=None)]),
    "scores": Row(itrloss.TripletLoss, 1, [scores]),
    "layouts": Row(InfoNCE, 1, [transposed]),
    "dtypes": Row(
        InfoNCE, 3, [of_size(N, x) for x in (torch.float32, torch.float64, torch.bfloat16)]
    ),
    "ragged batches": Row(InfoNCE, 2, [of_size(n) for n in (6, 5, 4, 3)], most=2),
    "no steps": Row(InfoNCE, 0, most=0),
    "a side without a gradient": Row(
        InfoNCE, 2, [pairs, lambda seed, memory: given(batch(seed=seed)[0], fixed(seed)[1])]
    ),
    "parameters alone": Row(learnable, 1, [lambda seed, memory: given(*fixed(seed))]),
    "sigmoid": Row(itrloss.SigmoidLoss, 1),
    "diversity": Row(itrloss.DiversityContrastiveLoss, 1),
    "mdcl": Row(itrloss.MemoryDiversityContrastiveLoss, 1, [with_memory]),
    "two memories": Row(uto, 2, [with_memory, lambda seed, memory: with_memory(seed, OTHER)]),
    "coder": Row(lambda: itrloss.CODERObjective(D, 3, prototype_weight=0), 1, [coder]),
    "inputs that are left out": Row(lambda: Penalty(2, 3), 1),
    "dvse": Row(itrloss.DVSEObjective, 1, [dvse]),
}
CHANGES = {
    "number": Row(InfoNCE, 2, change=setting("temperature", 0.5)),
    "word": Row(InfoNCE, 2, change=setting("directions", "image-text")),
    "none": Row(InfoNCE, 2, change=setting("margin", 0.1)),
    "pair of numbers": Row(InfoNCE, 2, change=setting("hardness", (2.0, 0.0))),
    "flag": Row(InfoNCE, 2, change=setting("joint", True)),
    "reduction": Row(itrloss.HubnessAwareLoss, 2, change=setting("reduction", "sum")),
    "mode": Row(itrloss.TripletLoss, 2, change=lambda loss, memory: loss.eval()),
    "mining": Row(
        lambda: itrloss.TripletLoss(reduction="mean"), 2, change=setting("mining", "all")
    ),
    "of an inner loss": Row(
        nested, 2, change=lambda loss, memory: setattr(loss.loss, "temperature", 0.5)
    ),
    "list": Row(nested, 2, change=setting("weights", [1.0, 9.0])),
    "entry of a list": Row(nested, 2, change=lambda loss, memory: loss.dims.__setitem__(0, 2)),
    "learnt": Row(learnable, 1, change=setting("temperature", 0.5)),
    "scale above its limit": Row(
        lambda: InfoNCE(learnable=True, max_scale=20),
        1,
        change=lambda loss, memory: loss.log_scale.data.fill_(9.0),
    ),
    "parameter": Row(
        learnable,
        2,
        change=lambda loss, memory: setattr(loss, "log_scale", nn.Parameter(torch.ones(1))),
    ),
    "dtype of a parameter": Row(learnable, 2, change=lambda loss, memory: loss.double()),
    "frozen": Row(learnable, 2, change=lambda loss, memory: loss.requires_grad_(False)),
    "buffer": Row(lambda: Weighted(True), 1, change=lambda loss, memory: loss.factor.fill_(3.0)),
    "entries": Row(
        lambda: itrloss.Matryoshka(uto(), (4, 8)),
        1,
        [with_memory],
        lambda loss, memory: memory.enqueue(*[x.detach() for x in batch(15)], torch.arange(15)),
    ),
    "dtype of a memory": Row(uto, 2, [with_memory], lambda loss, memory: memory.to(torch.bfloat16)),
}
PASSED_ON = {
    "lists": Row(InfoNCE, 0, [named(image_ids=list(range(N)), text_ids=list(range(N)))]),
    "strings": Row(InfoNCE, 0, [named(image_ids=["a"] * N, text_ids=["a"] * N)]),
    "arrays": Row(InfoNCE, 0, [named(image_ids=FIRST.numpy(), text_ids=FIRST.numpy())]),
    "similarity": Row(InfoNCE, 0, [lambda seed, memory: given(itrloss.Similarity(*fixed(seed)))]),
    "values of anchors": Row(lambda: InfoNCE(reduction="none"), 0),
    "values of images": Row(lambda: InfoNCE(reduction="none", directions="image-text"), 0),
    "several losses": Row(Several, 0),
    "no input": Row(lambda: Penalty(2, 3), 0, [lambda seed, memory: given()]),
    "gather": Row(lambda: InfoNCE(gather=True), 0),
    "telemetry": Row(lambda: InfoNCE(telemetry=True), 0),
    "inner telemetry": Row(lambda: itrloss.Matryoshka(InfoNCE(telemetry=True), (4, 8)), 0),
    "check_finite": Row(lambda: InfoNCE(check_finite=True), 0),
    "float16": Row(InfoNCE, 0, [of_size(N, torch.float16)]),
    "nothing to train": Row(InfoNCE, 0, [lambda seed, memory: given(*fixed(seed))]),
    "a new memory": Row(
        uto, 0, [lambda seed, memory: with_memory(seed, itrloss.CoupledMemory(20, D))]
    ),
    "a tensor": Row(lambda: Weighted(False), 0, change=lambda loss, memory: loss.factor.fill_(3.0)),
}
ROWS = {**INPUTS, **CHANGES, **PASSED_ON}


@of_kinds
@pytest.mark.parametrize("name", ROWS)
def test_calls_return_what_the_criterion_returns(name, kind, monkeypatch):
    row = ROWS[name]
    if kind is Taped:
        read_nothing(monkeypatch)
    graphed = kind(row.criterion(), row.most)
    memory = filled()
    for step, factor in enumerate([1.0, 0.25, 1024.0, 0.0]):  # powers of two round nothing
        if step == 2:
            row.change(graphed.criterion, memory)
        for arguments in row.arguments:
            args, kwargs = arguments(step, memory)
            assert agrees(graphed, *args, factor=factor, **kwargs)
    assert recorded(graphed) == row.recorded


@of_kinds
@pytest.mark.parametrize("name", CALLED)
def test_all_losses_replay_bit_by_bit(name, kind, monkeypatch):
    case = conforming(name)
    if kind is Taped:
        read_nothing(monkeypatch)
    call = case.options.get("call", lambda loss, *x: loss(*x))
    criterion = case.loss.float()
    graphed = kind(criterion)
    for step in range(3):
        pair = [x.requires_grad_() for x in sample(2, N, 64, seed=step).unbind()]
        ids = torch.randint(0, 5, (N,), generator=torch.Generator().manual_seed(step))
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
    memory = filled().to(device)
    for seed in range(4):
        leaves = [x.detach().to(device).requires_grad_() for x in batch(seed=seed)]
        ids = IDS.to(device)
        arguments = [*leaves, ids, ids.roll(seed)]
        if entry.takes == "memory":
            keys = [x.to(device) for x in fixed(seed + 20)]
            arguments[2:2] = [*keys, memory]
        trained = [*leaves, *graphed.criterion.parameters()]
        # the criterion lists positives on a GPU
        assert_close(graphed, graphed.criterion, arguments, trained, rtol=1e-4, atol=1e-5)
        if entry.takes == "memory":
            memory.enqueue(*keys, ids + N * seed)
    assert recorded(graphed) == 1


TRAINED: dict[str, tuple[Callable[[], nn.Module], Arguments, int]] = {
    "a temperature": (learnable, pairs, 1),
    "random numbers": (Noisy, pairs, 1),
    "a running mean": (Running, pairs, 0),
    "prototypes": (lambda: itrloss.CODERObjective(D, 3), coder, 0),
    "a memory that the loss fills": (Filling, with_memory, 0),
}


@of_kinds
@pytest.mark.parametrize("name", TRAINED)
def test_encoders_parameters_and_states_are_trained_as_by_the_criterion(name, kind, accelerator):
    make, arguments, steps = TRAINED[name]
    found = []
    for wrap in (kind, lambda criterion: criterion):
        torch.manual_seed(3)
        call = wrap(make())
        encoder = nn.Linear(D, D)
        optimizer = torch.optim.AdamW([*encoder.parameters(), *call.parameters()], 0.1)
        memory = filled()
        losses = []
        for seed in range(5):
            (images, *others), named = arguments(seed, memory)
            optimizer.zero_grad()
            losses.append(tree_flatten(call(encoder(images), *others, **named))[0][0])
            losses[-1].backward()
            optimizer.step()
        state = [*call.state_dict().values(), *memory.state_dict().values()]
        found.append([*[x.detach() for x in losses], *encoder.parameters(), *state])
        if isinstance(call, Graphed):
            assert recorded(call) == steps
    assert are_equal(*found)


def test_a_gradient_cache_takes_it():
    torch.manual_seed(0)
    encoders = nn.Linear(D, D), nn.Linear(D, D)
    graphed = OnCPU(learnable())
    leaves = [p for module in (*encoders, graphed) for p in module.parameters()]
    found = []
    for call in (graphed.criterion, graphed, graphed):
        for x in leaves:
            x.grad = None
        loss = itrloss.grad_cache_step(call, encoders, fixed(0), chunk_size=2)
        found.append([loss, *[x.grad for x in leaves]])
    assert are_equal(found[0], found[1])
    assert are_equal(found[0], found[2])
    assert recorded(graphed) == 1


def test_two_calls_before_one_backward_pass(accelerator):
    graphed = Taped(InfoNCE())
    first, second = batch(seed=1), batch(seed=2)
    graphed(*first)
    leaves = [*first, *second]
    expected = outcome(graphed.criterion(*first) + 2 * graphed.criterion(*second), leaves)
    assert are_equal(outcome(graphed(*first) + 2 * graphed(*second), leaves), expected)
    assert are_equal(first, batch(seed=1))  # no input is written to


def test_an_input_that_is_changed_before_backward_has_the_gradient_of_the_call(accelerator):
    graphed = Taped(InfoNCE())
    graphed(*batch())
    pair, again = batch(), batch()
    loss = graphed(*pair)
    with torch.no_grad():
        pair[0].mul_(3)
    assert are_equal(outcome(loss, pair), outcome(graphed.criterion(*again), again))


def test_strided_embeddings_and_one_tensor_as_both_sides_differ_by_rounding(accelerator):
    graphed = Taped(InfoNCE())
    plain = batch()
    strided = [torch.stack([x.detach()] * 2, 2)[..., 0].requires_grad_() for x in plain]
    for sides in (plain, strided, [plain[0]] * 2):
        assert_close(graphed, graphed.criterion, sides)
    assert recorded(graphed) == 1


# ------------------------------------------------------------------------ what makes another step


def test_most_is_checked_and_may_be_raised():
    graphed = OnCPU(InfoNCE(), most=1)
    graphed(*fixed(0))  # what trains nothing takes no place
    assert agrees(graphed, *batch())
    assert agrees(graphed, *batch(4))
    graphed.most = 2
    assert agrees(graphed, *batch(5))
    assert recorded(graphed) == 2
    with pytest.raises(ValueError, match="most: expected a number of at least 0, got -1"):
        Graphed(InfoNCE(), most=-1)


def test_hooks_of_tensors_and_accumulation():
    graphed = OnCPU(learnable())
    graphed(*batch())
    seen = []
    scale = graphed.criterion.log_scale
    scale.register_hook(seen.append)
    for _ in range(2):
        graphed(*batch()).backward()
    assert len(seen) == 2
    assert torch.equal(scale.grad, 2 * seen[0])


def test_state_dicts_are_those_of_a_module_inside():
    source = InfoNCE(temperature=0.5, learnable=True)
    graphed = OnCPU(learnable())
    graphed(*batch())
    assert list(graphed.state_dict()) == ["criterion.log_scale"]
    graphed.load_state_dict({"criterion.log_scale": source.log_scale.detach()})
    assert torch.equal(graphed(*batch()), source(*batch()))


def test_a_memory_with_loaded_labels_is_checked_again(accelerator):
    graphed = Taped(uto())
    memory = itrloss.CoupledMemory(20, D)
    memory.enqueue(*fixed(5))
    for _ in range(2):
        assert agrees(graphed, *batch(), *fixed(20), memory)
    memory.load_state_dict(filled().state_dict())
    with pytest.raises(ValueError, match="expected ids, as the memory's entries have them"):
        graphed(*batch(), *fixed(20), memory)


# ------------------------------------------------------------------------ what the criterion takes


def test_warm_ups_count_no_calls_and_keep_no_figures():
    graphed = OnCPU(itrloss.TripletLoss())
    for _ in range(5):
        graphed(*batch())
    assert graphed.criterion._calls == 1  # the first one, which the criterion took itself


def test_hooks_and_telemetry_that_are_set_later_run_in_each_call():
    graphed = OnCPU(InfoNCE())
    for _ in range(2):
        graphed(*batch())
    graphed.criterion.telemetry = True
    graphed(*batch())
    assert graphed.criterion.telemetry
    seen = []
    graphed.criterion.telemetry = False
    graphed.criterion.register_forward_hook(lambda *_: seen.append(1))
    for _ in range(3):
        graphed(*batch())
    assert len(seen) == 3


def test_on_a_device_without_graphs_it_is_the_criterion():
    graphed = Graphed(InfoNCE())
    assert agrees(graphed, *batch())
    assert recorded(graphed) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient_nothing_is_recorded(mode):
    graphed = OnCPU(learnable())
    for steps in range(2):
        with mode():
            found = graphed(*batch())
            assert torch.equal(found, graphed.criterion(*batch()))
        assert not found.requires_grad
        assert recorded(graphed) == steps
        assert agrees(graphed, *batch())


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
    graphed = OnCPU(InfoNCE())
    compiled = torch.compile(graphed, backend="eager", fullgraph=True)
    assert_close(compiled, graphed.criterion, batch())
    assert recorded(graphed) == 0


# ------------------------------------------------------------------------------------------ errors


def test_a_second_derivative_is_an_error_that_names_the_way_out():
    graphed = OnCPU(InfoNCE())
    graphed(*batch())
    pair = batch()
    with pytest.raises(RuntimeError, match="create_graph: second derivatives need the criterion"):
        torch.autograd.grad(graphed(*pair), pair, create_graph=True)


def test_wrong_input_is_the_error_of_the_criterion():
    graphed = OnCPU(InfoNCE())
    images, texts = batch()
    for _ in range(2):
        with pytest.raises(ValueError, match="texts"):
            graphed(images, texts[:, :3])
        with pytest.raises(TypeError, match="nonsense"):
            graphed(images, texts, nonsense=texts)
    assert agrees(graphed, images, texts)
    with pytest.raises(TypeError, match="criterion: expected a module, got function"):
        Graphed(batch)


class Failing(InfoNCE):
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
        assert torch.equal(found, InfoNCE()(*batch()))
    assert recorded(graphed) == int(call != 2)  # a recording that failed is not tried again
    assert Failing.calls >= call


# ------------------------------------------------------------------------ criteria of one's own


def own(function: Callable[..., Any], **attributes: Any) -> nn.Module:
    """A criterion whose forward is a function, with attributes; tensors are buffers, unless they
    are private.
    """
    criterion = type("Own", (nn.Module,), {"forward": function})()
    for name, x in attributes.items():
        if isinstance(x, Tensor) and not name.startswith("_"):
            criterion.register_buffer(name, x)
        else:
            setattr(criterion, name, x)
    return criterion


def product(criterion: Any, images: Tensor, texts: Tensor) -> Tensor:
    """A loss of images and texts alone."""
    return (images * texts).sum()


def with_activation(criterion: Any, images: Tensor, texts: Tensor) -> Tensor:
    return (criterion.act(images) * texts).sum()


def of_another_module(criterion: Any, images: Tensor, texts: Tensor) -> Tensor:
    return (ANOTHER(images) * texts).sum()


def reassigning(criterion: Any, images: Tensor, texts: Tensor) -> Tensor:
    criterion.mean = 0.5 * criterion.mean + images.detach().mean()
    return product(criterion, images, texts) - criterion.mean


def writing_later(criterion: Any, images: Tensor, texts: Tensor) -> Tensor:
    CALLS_OF.append(criterion)
    if len(CALLS_OF) > 1:
        criterion.mean.add_(1)
    return product(criterion, images, texts) + criterion.mean


def keeping(criterion: Any, images: Tensor, texts: Tensor) -> Tensor:
    criterion._last = images @ texts.T
    return criterion._last.mean()


def counting(criterion: Any, images: Tensor, texts: Tensor) -> Tensor:
    criterion._step += 1
    return product(criterion, images, texts) * criterion._step


ANOTHER = nn.Linear(D, D)
CALLS_OF: list[Any] = []
REFUSED = {
    "parameters of another module": lambda: own(of_another_module),
    "modules in a list": lambda: own(product, held=[nn.Linear(D, D)]),
    "an object": lambda: own(product, settings=threading.local()),
    "a private tensor": lambda: own(product, _weight=torch.ones(())),
    "a buffer that is replaced": lambda: own(reassigning, mean=torch.zeros(())),
    "a buffer that is written to later": lambda: own(writing_later, mean=torch.zeros(())),
    "a tensor that is kept": lambda: own(keeping),
    "a number that is counted": lambda: own(counting, _step=0),
    "no result": lambda: own(lambda criterion, images, texts: ()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_may_change_unnoticed_is_not_recorded(name):
    CALLS_OF.clear()
    graphed = OnCPU(REFUSED[name]())
    for seed in range(3):
        graphed(*batch(seed=seed))
    assert recorded(graphed) == 0
    if name == "a buffer that is written to later":  # by the second and the third call
        assert graphed.criterion.mean == 2


def test_another_module_in_the_same_place_is_another_kind():
    graphed = Taped(own(with_activation, act=nn.Tanh()))
    assert agrees(graphed, *batch())
    graphed.criterion.act = nn.Sigmoid()
    for _ in range(2):
        assert agrees(graphed, *batch())
    assert recorded(graphed) == 2


def test_parameters_that_are_no_longer_one():
    criterion = nn.ModuleDict({"a": nn.Linear(D, D), "b": nn.Linear(D, D)})
    criterion["b"].weight = criterion["a"].weight
    whole = own(lambda self, x, y: (self.m["a"](x) * self.m["b"](y)).sum(), m=criterion)
    graphed = Taped(whole)
    assert agrees(graphed, *batch())
    criterion["b"].weight = nn.Parameter(criterion["a"].weight.detach())
    for _ in range(2):
        assert agrees(graphed, *batch())
    assert recorded(graphed) == 2


def test_matches_whose_weights_a_recording_cannot_tell():
    graphed = Taped(itrloss.TripletLoss(mining="all"))
    for _ in range(2):
        assert agrees(graphed, *batch(), matches=torch.eye(N))
    assert recorded(graphed) == 0


def test_hooks_of_saved_tensors_and_checkpoints_go_to_the_criterion():
    graphed = OnCPU(InfoNCE())
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone):
        graphed(*batch())
    loss = torch.utils.checkpoint.checkpoint(graphed, *batch(), use_reentrant=False)
    loss.backward()
    assert recorded(graphed) == 0


def test_float16_under_autocast_goes_to_the_criterion():
    graphed = OnCPU(InfoNCE())
    with torch.autocast("cpu", torch.float16):
        graphed(*batch())
    assert recorded(graphed) == 0


def test_a_call_that_waits_for_the_device_cannot_be_recorded(accelerator):
    class Waiting(InfoNCE):
        def compute(self, sim: itrloss.Similarity, *more: Any) -> Any:
            loss = super().compute(sim, *more)
            return loss * 2 if float(loss.detach()) > 0 else loss

    graphed = Taped(Waiting())
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        graphed(*batch())
    assert recorded(graphed) == 0


# ------------------------------------------------------------------------------ autocast, threads


AUTOCAST = {
    "infonce": learnable,
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
    graphed = Taped(learnable(), most=8)
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
    graphed = Taped(learnable())
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
    graphed = OnCPU(InfoNCE())
    graphed(*batch())
    assert repr(graphed).startswith("OnCPU(\n  most=4, recorded=1\n  (criterion): InfoNCELoss(")


# -------------------------------------------------------------------------------- work of the host


class Counted(TorchDispatchMode):
    """Counts operators."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def work_of_a_step(
    criterion: nn.Module, args: Sequence[Any], named: dict[str, Any]
) -> tuple[int, int]:
    """The numbers of operators and of the library's calls in a step after the first one."""

    def step() -> None:
        tree_flatten(criterion(*args, **named))[0][0].backward()

    step()
    criterion.zero_grad()
    for x in args:
        if isinstance(x, Tensor):
            x.grad = None
    with Counted() as operators:
        step()
    return operators.number, calls_of_the_library(step)


@pytest.mark.parametrize("name", ["pairs", "learnt", "ids", "sigmoid", "mdcl", "coder"])
def test_a_replayed_step_takes_few_operators_and_calls(name):
    """As docs/graphed.rst says."""
    graphed = Idling(ROWS[name].criterion())
    args, named = ROWS[name].arguments[0](0, filled())
    operators, calls = work_of_a_step(graphed, args, named)
    assert recorded(graphed) == 1
    assert operators <= 12
    assert calls <= 100
    own_operators, own_calls = work_of_a_step(ROWS[name].criterion(), args, named)
    assert 5 * operators < own_operators
    assert 5 * calls < own_calls


# ------------------------------------------------------------------------------------ CUDA graphs


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


# Numbers of scores, and the engines outside of a recording and in one.
ENGINES = [
    (2**16, "tiled", "tiled"),
    (2**16 + 1, "tiled", "triton"),
    (2**20, "tiled", "triton"),
    (2**20 + 1, "triton", "triton"),
]


@pytest.mark.parametrize(("numel", "eager", "recorded"), ENGINES)
def test_auto_takes_triton_earlier_while_a_step_or_a_capture_of_ones_own_is_recorded(
    numel, eager, recorded, monkeypatch
):
    def chosen() -> str:
        return choose_engine("auto", numel, 2**30, OnCuda())

    monkeypatch.setattr(devices, "is_verified", lambda device: True)
    assert chosen() == eager
    with devices.recording():
        assert chosen() == recorded
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for capturing, expected in ((True, recorded), (False, eager)):
        answer = partial(bool, capturing)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", answer)
        assert devices.is_recorded(OnCuda.device) is capturing
        assert chosen() == expected


def test_recorded_steps_run_as_recorded_ones(accelerator):
    """Warm-ups run the kernels that the capture takes."""
    seen = []

    class Looking(InfoNCE):
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
