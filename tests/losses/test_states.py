"""State dicts: they hold tensors alone, all that training needs, and load wherever they fit."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.losses_registry import REGISTRY
from support.versions import default_device, load, require
from torch import nn

import itrloss
from itrloss import CoupledMemory, TripletLoss

D = 8


class Model(nn.Module):
    """An encoder of images and texts, and a part that goes into its checkpoints."""

    def __init__(self, part: nn.Module):
        super().__init__()
        self.images = nn.Linear(D, D)
        self.texts = nn.Linear(D, D)
        self.part = part


def annealed(loss: TripletLoss) -> TripletLoss:
    loss.mining = "hardest"
    return loss


def filled(count: int, ids: torch.Tensor | None, size: int = 6) -> CoupledMemory:
    memory = CoupledMemory(size, D)
    memory.enqueue(torch.randn(count, D), torch.randn(count, D), ids)
    return memory


MODULES: dict[str, Callable[[], nn.Module]] = {
    **{name: entry.make for name, entry in REGISTRY.items()},
    "annealed": lambda: annealed(TripletLoss(mining="all")),
    "matryoshka": lambda: itrloss.Matryoshka(TripletLoss(), [4, D]),
    "memory": lambda: CoupledMemory(6, D),
    "half memory": lambda: CoupledMemory(6, D, dtype=torch.bfloat16),
    "full memory": lambda: filled(5, torch.arange(5)),
    "means": lambda: itrloss.OnlineKMeans(3, D),
    "momentum": lambda: itrloss.MomentumEncoder(nn.BatchNorm1d(D)),
}
WITHOUT_PARAMETERS = [
    name
    for name, make in MODULES.items()
    if name in (*REGISTRY, "annealed", "matryoshka")
    and not [*make().parameters(), *make().buffers()]
]


# ------------------------------------------------------------------------------------ tensors alone


@pytest.mark.parametrize("name", MODULES)
def test_a_state_holds_tensors_that_others_can_copy_average_and_store(name: str):
    model = Model(MODULES[name]())
    twin = Model(MODULES[name]())
    state = model.state_dict()
    for x, new in zip(twin.state_dict().values(), state.values(), strict=True):
        x.copy_(new)
        x.copy_(0.5 * x + 0.5 * new)  # in place, in the manner of averages over state dicts
        assert x.numel() == new.numel() and x.device == new.device
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    twin.load_state_dict(load(stored))
    same_state(twin, model)
    numbers = {key: x.clone() for key, x in state.items()}
    require("load_state_dict(assign=...)", 2, 1)
    for assign in (False, True):
        fresh = Model(MODULES[name]())
        fresh = fresh.to("meta") if assign else fresh
        fresh.load_state_dict(numbers, assign=assign)
        same_state(fresh, model)


def same_state(model: nn.Module, wanted: nn.Module) -> None:
    expected = wanted.state_dict()
    got = model.state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], x) for key, x in expected.items())


@pytest.mark.parametrize("name", WITHOUT_PARAMETERS)
def test_a_state_loads_into_a_model_with_another_loss(name: str):
    """The others are one whose state has its mining, and one that has nothing in it."""
    for other in (TripletLoss, itrloss.HubnessAwareLoss):
        pair = [Model(MODULES[name]()), Model(other())]
        for source, target in (pair, pair[::-1]):
            nn.init.normal_(source.images.weight)
            target.load_state_dict(source.state_dict())
            assert torch.equal(target.images.weight, source.images.weight)


def test_parameters_of_a_loss_are_still_needed_and_expected():
    learnable = Model(itrloss.InfoNCELoss(learnable=True))
    for other in (TripletLoss(), itrloss.Matryoshka(TripletLoss(), [4, D])):
        with pytest.raises(RuntimeError, match=r"Missing key.*part\.log_scale"):
            learnable.load_state_dict(Model(other).state_dict())
        with pytest.raises(RuntimeError, match=r"Unexpected key.*part\.log_scale"):
            Model(other).load_state_dict(learnable.state_dict())


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_loads_with_and_without_the_scale_of_a_model(assign: bool):
    """A model holds its scale with shape (), and a loss of its own with (1,)."""
    require("load_state_dict(assign=...)", 2, 1)
    of_model = nn.Parameter(torch.tensor(3.0))
    shares = itrloss.InfoNCELoss(learnable=True)
    shares.log_scale = of_model
    own = itrloss.InfoNCELoss(learnable=True)
    own.load_state_dict(shares.state_dict(), assign=assign)
    assert own.log_scale.shape == (1,) and own.log_scale.item() == 3
    with torch.no_grad():
        own.log_scale.fill_(4.0)
    shares.load_state_dict(own.state_dict())
    assert of_model.item() == 4


# --------------------------------------------------------------------------- which negatives count


def test_a_pretrained_model_holds_which_negatives_count(tmp_path):
    transformers = pytest.importorskip("transformers")

    class Pretrained(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any):
            super().__init__(config)
            self.encoder = nn.Linear(D, D)
            self.part = TripletLoss(mining="all")
            self.post_init()

    model = Pretrained(transformers.PretrainedConfig())
    annealed(model.part)
    model.save_pretrained(tmp_path)
    assert Pretrained.from_pretrained(tmp_path).part.mining == "hardest"


def test_a_state_does_not_depend_on_the_default_device():
    with default_device("meta"):
        state = annealed(TripletLoss(mining="all")).state_dict()
    loss = TripletLoss(mining="all")
    loss.load_state_dict(state)
    assert loss.mining == "hardest"


# -------------------------------------------------------------------------- whether keys have ids


@pytest.mark.parametrize(
    ("count", "ids"),
    [
        (4, None),
        (9, None),  # more than the memory holds
        (4, torch.arange(4)),
        (9, torch.arange(9)),
        (4, torch.tensor([0, -1, -(2**62), 2**63 - 1])),
        (1, torch.tensor([-5])),
    ],
)
def test_a_loaded_memory_knows_whether_its_keys_have_ids(count: int, ids: torch.Tensor | None):
    for start in (CoupledMemory(6, D), filled(2, None), filled(2, torch.arange(2))):
        start.load_state_dict(filled(count, ids).state_dict())
        start.check_labels("ids", ids is not None)
        with pytest.raises(ValueError, match="ids: expected"):
            start.check_labels("ids", ids is None)


def test_a_memory_that_loads_an_empty_one_takes_either():
    keys = torch.randn(2, D)
    for ids in (None, torch.arange(2)):
        memory = filled(3, torch.arange(3))
        memory.load_state_dict(CoupledMemory(6, D).state_dict())
        memory.enqueue(keys, keys, ids)
        assert len(memory) == 2
