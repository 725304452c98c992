"""Parameters of a model that losses share, in the form in which they are passed: τ, ``1/τ`` or its
logarithm.
"""

from __future__ import annotations

import copy
import inspect
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.cases import embeddings, of_engines, sample
from support.losses_registry import public_losses
from support.versions import load, reset_compiler
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import itrloss

D = 6
V, W = embeddings(8, 8, D)
IDS = torch.arange(8) // 2
TAU = 0.3
# A number of τ in each form, and the derivative of τ by it.
FORMS: dict[str, tuple[float, float]] = {
    "temperature": (TAU, 1.0),
    "scale": (1 / TAU, -(TAU**2)),
    "log_scale": (-math.log(TAU), -TAU),
}


def of_memory(loss: Any) -> Tensor:
    memory = itrloss.CoupledMemory(5, D, dtype=torch.float64)
    memory.enqueue(sample(5, D, seed=4), sample(5, D, seed=5), torch.arange(5) + 2)
    return loss(V, W, W.flip(1), V.flip(1), memory, IDS, IDS)


def of_ids(loss: Any) -> Tensor:
    return loss(V, W, IDS, IDS)


def of_teacher(loss: Any) -> Tensor:
    return loss(V, W, teacher=(W.flip(1), V))


#: Losses that learn a temperature: how they are made and called.
LEARNT: dict[str, tuple[Callable[..., Any], Callable[[Any], Tensor]]] = {
    "infonce": (itrloss.InfoNCELoss, of_ids),
    "infonce joint": (lambda **x: itrloss.InfoNCELoss(joint=True, **x), of_ids),
    "hard infonce": (lambda **x: itrloss.InfoNCELoss(hardness=3.0, **x), of_ids),
    "memory infonce": (itrloss.MemoryInfoNCELoss, of_memory),
    "sigmoid": (itrloss.SigmoidLoss, of_ids),
    "supcon": (itrloss.SupConLoss, of_ids),
    "supcon inside": (lambda **x: itrloss.SupConLoss(inside=True, **x), of_ids),
    "mil-nce": (itrloss.MILNCELoss, of_ids),
    "sdm": (itrloss.SDMLoss, of_ids),
    "distillation": (itrloss.DistillationLoss, of_teacher),
    "rince": (itrloss.RINCELoss, of_ids),
    "gce": (itrloss.GeneralizedCrossEntropyLoss, of_ids),
    "decoupled": (itrloss.DecoupledContrastiveLoss, of_ids),
    "complementary": (itrloss.ComplementaryContrastiveLoss, of_ids),
}
of_losses = pytest.mark.parametrize("name", LEARNT)
of_forms = pytest.mark.parametrize("form", FORMS)
# A loss with a weight without a gradient, or whose teacher has τ, too, is tested by its oracle.
DIFFERENTIABLE = [name for name in LEARNT if name != "hard infonce"]


def made(name: str, **options: Any) -> Any:
    return LEARNT[name][0](**options)


def value_of(name: str, loss: Any) -> Tensor:
    return LEARNT[name][1](loss)


def parameter(form: str, shape: tuple[int, ...] = ()) -> Any:
    return nn.Parameter(torch.full(shape, FORMS[form][0], dtype=torch.float64))


def test_each_loss_with_a_learnable_temperature_is_here():
    kinds = {vars(itrloss)[name] for name in public_losses()}
    forms = {
        x for x in kinds if {"log_scale", "learnable"} <= inspect.signature(x).parameters.keys()
    }
    assert forms == {type(made(name)) for name in LEARNT}


@of_losses
@of_forms
def test_a_number_or_a_parameter_counts_in_its_form(name: str, form: str):
    number, _ = FORMS[form]
    wanted = value_of(name, made(name, temperature=TAU))
    for given in (number, torch.tensor(number), parameter(form), parameter(form, shape=(1,))):
        loss = made(name, **{form: given}).double()
        torch.testing.assert_close(value_of(name, loss), wanted, rtol=1e-6, atol=0)
        read = [loss.temperature, loss.scale, loss.log_scale]
        for own, other in zip(read, FORMS, strict=True):
            assert float(torch.as_tensor(own).detach()) == pytest.approx(FORMS[other][0], rel=1e-6)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@of_forms
@of_engines
def test_a_parameter_has_the_gradient_of_its_form(name: str, form: str, engine: str, small_tiles):
    def at(temperature: float) -> float:
        loss = made(name, temperature=temperature, learnable=False, engine=engine)
        return value_of(name, loss).item()

    step = 1e-5 * TAU
    by_temperature = (at(TAU + step) - at(TAU - step)) / (2 * step)
    for shape in ((), (1,), (1, 1)):
        own = parameter(form, shape=shape)
        loss = made(name, engine=engine, **{form: own})
        value_of(name, loss).backward()
        assert own.grad is not None and own.grad.shape == shape
        wanted = by_temperature * FORMS[form][1]
        assert own.grad.item() == pytest.approx(wanted, rel=1e-5), shape


@of_losses
def test_a_learnable_loss_makes_the_logarithm_of_any_form(name: str):
    for form, (number, _) in FORMS.items():
        loss = made(name, learnable=True, **{form: number}).double()
        own = dict(loss.named_parameters())
        assert own["log_scale"].shape == (1,) and not {"temperature", "scale"} & own.keys()
        assert own["log_scale"].item() == pytest.approx(-math.log(TAU), rel=1e-6)


@of_losses
@of_forms
def test_a_reset_leaves_a_shared_parameter_to_its_model(name: str, form: str):
    of_model = parameter(form)
    before = of_model.item()
    made(name, **{form: of_model}).reset_parameters()
    shared_later = made(name, learnable=True)
    setattr(shared_later, form, of_model)
    shared_later.reset_parameters()
    assert of_model.item() == before


@of_losses
@of_forms
def test_the_constructor_shares_as_an_assignment_does(name: str, form: str):
    of_model = parameter(form)
    first = made(name, **{form: of_model})
    second = made(name)
    setattr(second, form, of_model)
    for loss in (first, second):
        assert getattr(loss, form) is of_model and loss.learnable
        assert [x for x in loss.parameters() if x.dim() == 0] == [of_model]
        assert "learnable=True" in repr(loss)
    torch.testing.assert_close(value_of(name, first), value_of(name, second), rtol=0, atol=0)
    second.temperature = 0.5
    number = {"temperature": 0.5, "scale": 2.0, "log_scale": math.log(2)}[form]
    assert of_model.item() == pytest.approx(number)  # of the model, which the other loss has, too
    torch.testing.assert_close(value_of(name, first), value_of(name, made(name, temperature=0.5)))


@of_forms
@pytest.mark.parametrize("other", FORMS)
@pytest.mark.parametrize("kind", [itrloss.InfoNCELoss, itrloss.SigmoidLoss, itrloss.SupConLoss])
def test_another_parameter_takes_the_place_of_the_first(kind: Any, form: str, other: str):
    loss = kind(**{form: parameter(form)})
    replaced = parameter(other)
    setattr(loss, other, replaced)
    names = set(dict(loss.named_parameters())) - {"bias"}
    assert names == {other} and getattr(loss, other) is replaced
    setattr(loss, other, None)
    assert not set(dict(loss.named_parameters())) - {"bias"}
    default = kind(learnable=False)
    torch.testing.assert_close(loss.temperature, default.temperature)
    torch.testing.assert_close(loss(V, W), default(V, W))


@of_forms
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [itrloss.InfoNCELoss, itrloss.SigmoidLoss])
def test_half_precision_is_read_in_float32(kind: Any, dtype: torch.dtype, form: str):
    half = kind(**{form: parameter(form)}).to(dtype)
    single = copy.deepcopy(half).float()
    v, w = V.float(), W.float()
    torch.testing.assert_close(half(v, w), single(v, w), rtol=1e-6, atol=0)


@of_forms
@pytest.mark.parametrize("name", ["infonce", "memory infonce", "supcon", "sdm"])
def test_the_largest_scale_limits_each_form(name: str, form: str):
    of_model = parameter(form)
    loss = made(name, max_scale=2.0, **{form: of_model})
    wanted = value_of(name, made(name, scale=2.0))
    value_of(name, loss.eval())
    assert of_model.item() == FORMS[form][0]
    value = value_of(name, loss.train())
    torch.testing.assert_close(value, wanted)
    assert loss.scale.item() == pytest.approx(2.0)
    value.backward()
    assert of_model.grad != 0  # at the limit, it may still fall
    loss.max_scale = 20.0  # a smaller one stays
    torch.testing.assert_close(value_of(name, loss), wanted)
    replica = made(name, max_scale=1.5, **{form: of_model})
    replica._replicate_for_data_parallel()
    assert replica.scale.item() == pytest.approx(1.5)


class Model(nn.Module):
    """Towers with a temperature in some form, and a loss that shares it."""

    def __init__(self, form: str, kind: Any = itrloss.SupConLoss):
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Linear(D, D).double()
        self.own = parameter(form)
        self.loss = kind(**{form: self.own})

    def forward(self) -> Tensor:
        return self.loss(self.tower(V), self.tower(W), IDS, IDS)


def trained(model: Model, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = model()
        value.backward()
        optimizer.step()
        values.append(value.item())
    return values


@of_forms
@pytest.mark.parametrize("kind", [itrloss.SupConLoss, itrloss.SigmoidLoss])
def test_copies_averages_and_states_keep_what_is_shared(form: str, kind: Any):
    model = Model(form, kind)
    copied = copy.deepcopy(model)
    assert getattr(copied.loss, form) is copied.own and copied.own is not model.own
    average = AveragedModel(model, avg_fn=lambda mean, x, _: (mean + x) / 2)
    wanted = trained(model)
    assert trained(copied) == wanted
    average.update_parameters(model)
    assert getattr(average.module.loss, form) is average.module.own
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    stored.seek(0)
    assert f"loss.{form}" in model.state_dict()
    resumed = Model(form, kind)
    resumed.load_state_dict(load(stored))
    assert getattr(resumed.loss, form) is resumed.own
    assert trained(resumed) == trained(model)
    moved = Model(form, kind).float().double()
    assert getattr(moved.loss, form) is moved.own


def test_a_state_of_a_loss_in_another_form_is_refused():
    shares = itrloss.InfoNCELoss(temperature=parameter("temperature"))
    with pytest.raises(RuntimeError, match=r"Missing key.*log_scale"):
        itrloss.InfoNCELoss(learnable=True).load_state_dict(shares.state_dict())


@of_forms
@pytest.mark.slow
def test_a_compiled_loss_shares_a_parameter(form: str):
    reset_compiler()
    own = parameter(form)
    loss = itrloss.SupConLoss(**{form: own})
    value = torch.compile(loss, backend="aot_eager", fullgraph=True)(V, W, IDS, IDS)
    value.backward()
    found = own.grad
    own.grad = None
    wanted = loss(V, W, IDS, IDS)
    wanted.backward()
    torch.testing.assert_close((value, found), (wanted, own.grad))


def test_a_distilled_loss_may_have_its_teachers_temperature():
    own = parameter("temperature")
    loss = itrloss.DistillationLoss(temperature=own, teacher_temperature=None)
    value = of_teacher(loss)
    torch.testing.assert_close(value, of_teacher(itrloss.DistillationLoss(TAU, TAU)))
    (found,) = torch.autograd.grad(value, own)
    constant = of_teacher(itrloss.DistillationLoss(temperature=own, teacher_temperature=TAU))
    torch.testing.assert_close(found, *torch.autograd.grad(constant, own))
