"""No synchronisation with the accelerator: reading a value of a meta tensor, which has no data,
raises an error.
"""

from __future__ import annotations

import pytest
import torch
from support.losses_registry import IN_LOOPS, where
from support.versions import needs

import itrloss
from benchmarks.launches import Operators
from itrloss.engine import related
from itrloss.engine.relation import Numbers, Relation, kept
from itrloss.engine.terms import hinge, log1p_relu

pytestmark = needs("torch.searchsorted of tensors without data", 2, 4)

N, M, D, K = 16, 24, 8, 40
ENGINES = ("dense", "tiled", "triton")
OF_PAIRS = IN_LOOPS
OF_MEMORIES = where(lambda entry: entry.takes == "memory")
# Sums over candidates and over positives are all that they need: no positive is listed.
OF_SUMS = ("supcon", "supcon smoothed", "supcon learnable", "albef")
ANSWERS = {
    "logsumexp": lambda sim: (sim.both.logsumexp(30.0),),
    "logsumexp of a learnt scale": lambda sim: (sim.logsumexp(given(1)[0]),),
    "logsumexp of a large scale": lambda sim: (sim.both.logsumexp(90.0),),
    "moments": lambda sim: sim.mean_std(),
    "entropy": lambda sim: (sim.both.entropy(0.1),),
    "hardest": lambda sim: sim.hardest_negatives(),
    "positives": lambda sim: (sim.sum_of_positives(hinge, given(N)),),
    "negatives": lambda sim: (sim.both.sum(log1p_relu),),
    "topk": lambda sim: sim.topk(3, torch.zeros(sim.shape[1], device="meta")),
    "pairs": lambda sim: (sim.pair_scores(*torch.zeros(2, 5, dtype=torch.int64, device="meta")),),
    "counts": lambda sim: (sim.positive_counts, sim.negative_counts),
}


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    """Each engine; launches of Triton kernels are disabled, as meta tensors have no data."""
    if request.param == "triton":
        interpreter = pytest.importorskip("triton.runtime.interpreter")
        monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *_, **__: None)
    return request.param


def given(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without data that gets a gradient."""
    return torch.randn(shape, dtype=dtype, device="meta", requires_grad=True)


def numbers(*sizes: int) -> list[torch.Tensor]:
    """Ids of each side, without data."""
    return [torch.arange(size, device="meta") for size in sizes]


def backward(found: tuple[torch.Tensor, ...], *leaves: torch.Tensor) -> bool:
    """Whether all results are on the device, and every leaf has a gradient if any result is
    differentiable.
    """
    differentiable = [x.sum() for x in found if x.requires_grad]
    torch.autograd.backward(differentiable)
    on_the_device = all(x.is_meta for x in found)
    has_gradient = [x.grad is not None for x in leaves]
    return on_the_device and has_gradient == [bool(differentiable)] * len(leaves)


# Losses, and whether pairs have ids, which some losses wait for (see docs/engines.rst).
OF_BATCHES = [
    (name, with_ids)
    for name, entry in OF_PAIRS.items()
    for with_ids in (False, True)
    if not (with_ids and entry.lists_positives)
]


def step(name: str, engine: str, m: int, ids: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Take a step with N images and m texts."""
    images = given(N, D, dtype=dtype)
    texts = given(m, D, dtype=dtype)
    loss = OF_PAIRS[name].make(engine=engine).to("meta")
    value = loss(images, texts, *ids)
    assert backward((value,), images, texts)


@pytest.mark.parametrize(("name", "with_ids"), OF_BATCHES)
def test_losses_wait_for_nothing(name, with_ids, engine):
    if with_ids:
        step(name, engine, M, numbers(N, M), torch.bfloat16)
    else:
        step(name, engine, N, [], torch.float32)


@pytest.fixture
def reads(monkeypatch):
    """The pairs whose numbers the host reads, as it may on CUDA; meta tensors have none to read."""
    found = []

    def numbers(pairs):
        found.append(pairs)
        return Numbers(sum(pairs.shape), (3, 3), (0, 0))

    monkeypatch.setattr(Relation, "listable", True)
    monkeypatch.setattr(Relation, "numbers", kept(numbers))
    return found


@pytest.mark.parametrize("name", OF_PAIRS)
def test_losses_wait_once_to_list_positives(name, engine, reads):
    step(name, engine, M, numbers(N, M), torch.bfloat16)
    waits = OF_PAIRS[name].lists_positives or (engine != "dense" and name not in OF_SUMS)
    assert len(reads) == (1 if waits else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_wait_for_nothing(name, dtype, engine):
    for m, ids in ((N, ()), (M, numbers(N, M))):
        rows = given(N, D, dtype=dtype)
        cols = given(m, D, dtype=dtype)
        sim = itrloss.Similarity(rows, cols, *ids, engine=engine)
        found = ANSWERS[name](sim)
        assert backward(tuple(found), rows, cols)


@pytest.mark.parametrize("name", OF_MEMORIES)
def test_memories_wait_once_to_list_positives(name, engine, reads):
    test_memories_wait_for_nothing(name, engine)
    of_matrices = 3 if "entropy" in name else 1  # the batch's positives, and each memory's
    waits = engine != "dense" and name not in OF_SUMS
    assert len(reads) == (of_matrices if waits else 0)


@pytest.mark.parametrize("name", OF_MEMORIES)
def test_memories_wait_for_nothing(name, engine):
    memory = itrloss.CoupledMemory(K, D).to("meta")
    for size in (K, N):  # fill the memory, then wrap around its end
        memory.enqueue(given(size, D).detach(), given(size, D).detach(), *numbers(size))
    keys = given(N, D).detach(), given(N, D).detach()
    images = given(N, D)
    texts = given(N, D)
    loss = OF_MEMORIES[name].make(engine=engine)
    value = loss(images, texts, *keys, memory, *numbers(N, N))
    assert backward((value,), images, texts)


def test_momentum_encoders_wait_for_nothing():
    encoder = torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.BatchNorm1d(D)).to("meta")
    keys = itrloss.MomentumEncoder(encoder).to("meta")
    keys.update(encoder)
    assert keys.module[0].weight.is_meta


def test_sets_and_prototypes_wait_for_nothing(engine):
    heads = given(N, 4, D)
    images = given(N, D)
    texts = given(N, D)
    variance_aware = itrloss.VarianceAwareLoss(engine=engine)
    value = variance_aware(heads, texts)
    assert backward((value,), heads, texts)
    orthogonal = itrloss.DynamicOrthogonalLoss()
    value = orthogonal(heads)
    assert backward((value,), heads)
    prototypes = itrloss.PrototypeClassificationLoss(D, 20, engine=engine).to("meta")
    value = prototypes(images, texts, *numbers(N))
    assert backward((value,), images, texts, prototypes.weight)


def test_reading_a_number_is_seen():
    sim = itrloss.Similarity(given(N, D), given(M, D), *numbers(N, M))
    with pytest.raises(RuntimeError, match="meta"):
        sim.ranks()


def launches(loss: torch.nn.Module, *arguments: object) -> int:
    """Return how many operators of a step launch something, with N images and N texts."""
    images = given(N, D)
    texts = given(N, D)
    with Operators() as operators:
        loss(images, texts, *arguments).backward()
    assert images.grad is not None and images.grad.is_meta
    return operators.count


@pytest.mark.parametrize("name", ["infonce learnable", "dcl entropy", "hal", "triplet"])
def test_different_ids_on_the_cpu_spare_an_accelerator_the_masks(name):
    """They are read before they are moved: what is left are a few operators of the CPU."""
    loss = OF_PAIRS[name].make().to("meta")
    ids = torch.arange(N).flip(0)
    without_ids = launches(loss)
    assert launches(loss, ids, ids.clone()) <= without_ids + 6
    assert launches(loss, ids.tolist(), ids.numpy()) <= without_ids + 6
    assert launches(loss, *numbers(N, N)) >= without_ids + 15


@pytest.mark.parametrize("name", ["mdcl", "uto"])
def test_different_ids_on_the_cpu_spare_a_memory_masks_of_the_batch(name):
    memory = itrloss.CoupledMemory(K, D).to("meta")
    loss = OF_MEMORIES[name].make().to("meta")
    keys = given(N, D).detach(), given(N, D).detach()
    ids = torch.arange(N)
    of_device = launches(loss, *keys, memory, *numbers(N, N))
    assert launches(loss, *keys, memory, ids, ids) <= of_device - 20


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_ids_of_one_side_may_be_on_the_cpu(place):
    """Repeated ones, padding and sets of labels: what is kept is on the device."""
    ids = torch.arange(N) // 2
    ids[0] = itrloss.NO_ID
    sets = torch.stack([ids, ids + 1], 1)
    for rows, cols in ((ids, ids), (sets, ids), (ids, sets)):
        sim = itrloss.Similarity(given(N, D), given(N, D), rows, cols.to(place))
        kept = (*sim.pairs.ids, *sim.pairs.ignored, *sim.ids)
        assert not sim.pairs.one_to_one
        assert all(x is None or x.is_meta for x in kept)
        itrloss.InfoNCELoss()(sim).backward()


def test_a_recorded_graph_does_not_keep_what_ids_on_the_cpu_say(monkeypatch):
    monkeypatch.setattr(related, "is_recorded", lambda device: True)
    ids = torch.arange(N)
    sim = itrloss.Similarity(given(N, D), given(N, D), ids, ids)
    assert not sim.pairs.one_to_one
