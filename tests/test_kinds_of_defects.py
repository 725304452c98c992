"""Cases of kinds of defects that were found before, thought of from the kind alone.

They are where a young feature meets an old assumption: a parameter that is not plain, and the cost
of sets of labels. `test_random_cases` draws relations that are no plain ids, and padding in a
count; input by another way is in ``test_messages.py``, a fault in one process alone in
``distributed/test_processes.py``.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from support.cases import sample
from support.flops import Sizes
from support.processes import run
from support.versions import fully_shard, init_device_mesh, needs
from torch import Tensor, nn
from torch.nn.utils import parametrize

import itrloss
from itrloss import NO_ID, Similarity
from itrloss.metrics import retrieval_metrics
from itrloss.torch_versions import functional_call


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return sample(*shape, seed=seed, dtype=torch.float64)


N, M, D = 7, 10, 8
IMAGES = numbers(N, D)
TEXTS = numbers(M, D, seed=1)

# ----------------------------------------------------------------- 3: parameters that are not plain


def of_model(number: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([number]))


LEARNT: dict[str, Any] = {
    "temperature": lambda: itrloss.SupConLoss(temperature=of_model(0.3)),
    "scale": lambda: itrloss.SDMLoss(scale=of_model(3.0)),
    "log_scale": lambda: itrloss.MILNCELoss(log_scale=of_model(1.1)),
    "infonce": lambda: itrloss.InfoNCELoss(learnable=True),
    "sigmoid": itrloss.SigmoidLoss,
    "pcme++": itrloss.PCMEPlusPlusLoss,
    "prefixes": lambda: itrloss.Matryoshka(itrloss.SigmoidLoss(), (3, D)),
    "prototypes": lambda: itrloss.PrototypeClassificationLoss(D, 3),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    return LEARNT[name]().double()


def inputs_of(name: str) -> list[Tensor]:
    if name == "prototypes":
        return [IMAGES, TEXTS[:N], torch.arange(N) % 3]
    number = 4 if name == "pcme++" else 2
    return list(numbers(number, 6, D))


def outcome(loss: Any, name: str, parameters: dict[str, Tensor]) -> list[Tensor]:
    value = loss(*inputs_of(name))
    return [value, *torch.autograd.grad(value, list(parameters.values()))]


def moved(name: str, by: float) -> list[Tensor]:
    """The outcome of a loss with parameters that are larger by a number."""
    loss = made(name)
    with torch.no_grad():
        for x in loss.parameters():
            x += by
    return outcome(loss, name, dict(loss.named_parameters()))


def replica_of(module: nn.Module) -> Any:
    """What ``nn.DataParallel`` makes of a module on each of its devices."""
    replicas = {x: x._replicate_for_data_parallel() for x in module.modules()}
    for own, copied in replicas.items():
        for name, part in own._modules.items():
            copied._modules[name] = replicas[part]
        for name, x in own._parameters.items():
            if x is not None:
                setattr(copied, name, x + 0.25)
    return replicas[module]


class Moved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.25


def as_replica(loss: Any) -> tuple[Any, dict[str, Tensor]]:
    return replica_of(loss), dict(loss.named_parameters())


def as_arguments(loss: Any) -> tuple[Any, dict[str, Tensor]]:
    own = {key: (x + 0.25).detach().requires_grad_() for key, x in loss.named_parameters()}
    return lambda *x: functional_call(loss, own, x), own


def as_computed(loss: Any) -> tuple[Any, dict[str, Tensor]]:
    for part in list(loss.modules()):
        for key, x in list(part._parameters.items()):
            if x is not None:
                parametrize.register_parametrization(part, key, Moved())
    return loss, dict(loss.named_parameters())


@pytest.mark.parametrize("name", LEARNT)
def test_parameters_that_are_not_plain_count_as_plain_ones(name):
    for form in (as_replica, as_arguments, as_computed):
        call, parameters = form(made(name))
        torch.testing.assert_close(outcome(call, name, parameters), moved(name, 0.25))


def test_an_option_whose_parameter_is_computed_cannot_be_set():
    loss = made("infonce")
    parametrize.register_parametrization(loss, "log_scale", Moved())
    with pytest.raises(AttributeError, match="temperature: cannot be set"):
        loss.temperature = 0.5


def test_a_replica_leaves_the_limit_to_the_parameter_that_learns():
    loss = itrloss.InfoNCELoss(0.01, learnable=True, max_scale=20.0)
    value = replica_of(loss)(*sample(2, 6, D))
    assert float(loss.log_scale.detach().exp()) == pytest.approx(20)
    torch.testing.assert_close(value, itrloss.InfoNCELoss(0.05)(*sample(2, 6, D)))


class Sharded(nn.Module):
    """Towers with losses whose parameters are changed by a call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Linear(D, D)
        self.logit_scale = nn.Parameter(torch.tensor([math.log(100)]))
        self.loss = itrloss.InfoNCELoss(learnable=True, max_scale=20.0)
        self.loss.log_scale = self.logit_scale
        self.temp = of_model(0.01)
        self.scale = of_model(100.0)
        self.supcon = itrloss.SupConLoss(temperature=self.temp, max_scale=20.0)
        self.sdm = itrloss.SDMLoss(scale=self.scale, max_scale=20.0)
        self.objective = itrloss.CODERObjective(D, 4)
        self.memory = itrloss.CoupledMemory(4, D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        pairs = self.tower(x), self.tower(y)
        total, _ = self.objective(*pairs, x, y, self.memory, *pairs)
        return total + self.loss(*pairs) + self.supcon(*pairs) + self.sdm(*pairs)


def after_a_step(rank: int, is_sharded: bool) -> dict[str, Any]:
    model = Sharded()
    x, y = sample(2, 6, D)
    said = ""
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        said = repr(model.loss) if rank == 0 else ""
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    model(x, y).backward()
    optimizer.step()
    names = ["logit_scale", "temp", "scale", "objective.classifier.weight", "tower.weight"]
    whole = []
    for name in names:
        p = model.get_parameter(name)
        whole.append((p.full_tensor() if is_sharded else p).detach())
    return {"whole": whole, "said": said}


@needs("fully_shard on the CPU", 2, 8)
def test_shards_are_limited_and_reset(tmp_path):
    wanted = after_a_step(0, False)["whole"]
    assert float(wanted[0].exp()) < 21 and float(wanted[1]) > 0.049 and float(wanted[2]) < 21
    for rank, found in enumerate(run(after_a_step, tmp_path, True)):
        torch.testing.assert_close(found["whole"], wanted, rtol=1e-5, atol=1e-6)
        # one process alone asks: nothing that all have to answer
        assert ("temperature=in shards" in found["said"]) == (rank == 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [itrloss.SDMLoss, itrloss.InfoNCELoss, itrloss.HubnessAwareLoss])
def test_weights_in_half_precision_are_not_rounded_again(make, dtype):
    """Their sums would be, where an anchor has several: 0.1 + 0.2 in bfloat16 is 1 % off."""
    matches = torch.arange(N)[:, None] == torch.arange(M) // 2
    weights = (matches * torch.rand(N, M, dtype=torch.float64)).to(dtype)
    found, wanted = [make()(IMAGES, TEXTS, matches=x) for x in (weights, weights.double())]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


# ------------------------------------------------------------------ 6: the cost of sets of labels


def trained(*shape: int, seed: int = 0) -> Tensor:
    return sample(*shape, seed=seed).requires_grad_()


SIZE, LABELS = 512, 16


def drawn(kind: str, size: int = SIZE) -> Tensor:
    """Sets of 16 labels."""
    generator = torch.Generator().manual_seed(size)
    sets = torch.randint(0, 5000, (size, LABELS), generator=generator)
    if kind == "two that all have":
        sets[:, 0] = 7
        sets[:, 1] = 8
    if kind == "of twenty":
        sets = torch.rand(size, 20, generator=generator).argsort(1)[:, :LABELS]
    if kind == "padded":
        sets[:, 3:] = NO_ID
        sets[:, :3] %= 80
    return sets


def passes(call: Any, pairs: int) -> float:
    with Sizes() as written:
        call()
    return sum(written.sizes) / pairs


@pytest.mark.parametrize("kind", ["rare", "two that all have", "of twenty", "padded"])
@pytest.mark.parametrize("engine", ["auto", "tiled"])
def test_sets_cost_no_more_passes_than_matches(kind, engine):
    """Comparing each label with each takes 3000."""
    sets = drawn(kind)
    members = [set(x) - {NO_ID} for x in sets.tolist()]
    matches = torch.tensor([[not a.isdisjoint(b) for b in members] for a in members])
    x, y = trained(SIZE, 4), trained(SIZE, 4, seed=1)
    loss = itrloss.InfoNCELoss(engine=engine)
    pairs = SIZE * SIZE
    assert passes(lambda: loss(x, y, sets, sets).backward(), pairs) < 1.3 * passes(
        lambda: loss(x, y, matches=matches).backward(), pairs
    )
    torch.testing.assert_close(loss(x, y, sets, sets), loss(x, y, matches=matches))


def of_one_side(x, y, ids):
    itrloss.InfoNCELoss()(x, y, ids[:SIZE], drawn("rare")[:, 3].contiguous())


def of_further_negatives(x, y, ids):
    own = {"negatives": sample(2048, 4), "negative_ids": drawn("rare", 2048)[:, 0]}
    itrloss.InfoNCELoss()(x, y, ids[:SIZE], ids[:SIZE], **own).backward()


def of_a_test_set(x, y, ids):
    retrieval_metrics(Similarity(x.detach(), sample(2048, 4), ids[:SIZE], ids))


def of_a_memory(x, y, ids, make=itrloss.UnifiedTrainingObjective):
    memory = itrloss.CoupledMemory(8192, 4)
    memory.enqueue(*sample(2, 8192, 4), drawn("rare", 8192)[:, 0])
    keys = x[:64].detach(), y[:64].detach()
    make()(x[:64], y[:64], *keys, memory, ids[:64], ids[:64]).backward()


def of_a_memory_with_a_teacher(x, y, ids):
    of_a_memory(x, y, ids, itrloss.MemoryInfoNCELoss)


# What takes ids, the number of pairs, and how many more passes over them sets may cost: where each
# label is compared, they are more than 200.
WITH_SETS = [
    (of_one_side, SIZE**2, 20),
    (of_further_negatives, SIZE * 2048, 40),
    (of_a_test_set, SIZE * 2048, 40),
    (of_a_memory, 2 * 64 * 8192, 30),
    (of_a_memory_with_a_teacher, 2 * 64 * 8192, 30),
]


def test_sets_cost_few_passes():
    x, y = trained(SIZE, 4), trained(SIZE, 4, seed=1)
    sets = drawn("rare", 2048)
    ids = sets[:, 0].contiguous()
    for call, pairs, more in WITH_SETS:
        by_ids, by_sets = [passes(partial(call, x, y, own), pairs) for own in (ids, sets)]
        assert by_sets < by_ids + more, call.__name__


def test_mining_looks_at_the_labels_of_few_pairs():
    x, y = sample(64, 4), sample(20_000, 4)
    sets = drawn("rare", 20_000)

    def mined(ids: Tensor) -> float:
        call = itrloss.mine_hard_negatives
        return passes(lambda: call(x, y, ids[:64], ids, 10), 64 * 20_000)

    assert mined(sets) < 2.5 * mined(sets[:, 0].contiguous())
