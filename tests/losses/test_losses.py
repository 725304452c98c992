"""Losses of pairs: options, losses of your own, compilation, dry runs.

`test_random_cases` has their values, `check_loss` what holds of every loss.
"""

from __future__ import annotations

import copy
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.cases import each, embeddings, make_ids, of_engines
from support.losses_registry import IN_LOOPS as LOSSES
from support.versions import require, reset_compiler
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import itrloss
from itrloss import Similarity, option
from itrloss.engine.terms import identity


def make(name, **extra):
    return LOSSES[name].make(**extra)


def test_positional_arguments_are_those_of_the_papers():
    def positional(kind):
        parameters = inspect.signature(kind).parameters.values()
        return [x.name for x in parameters if x.kind is x.POSITIONAL_OR_KEYWORD]

    dcl = ["temperature", "margin", "diversity", "epsilon", "detach_diversity"]
    dcl += ["positive_weight", "positive"]
    assert positional(itrloss.TripletLoss) == ["margin", "mining"]
    assert positional(itrloss.InfoNCELoss) == ["temperature", "learnable"]
    assert positional(itrloss.MemoryInfoNCELoss) == ["temperature", "learnable"]
    assert positional(itrloss.SigmoidLoss) == ["scale", "bias", "learnable"]
    assert positional(itrloss.HubnessAwareLoss) == ["scale", "margin", "positive"]
    assert positional(itrloss.DiversityContrastiveLoss) == dcl
    assert positional(itrloss.MemoryDiversityContrastiveLoss) == dcl
    assert positional(itrloss.VarianceAwareLoss) == ["margin", "detach_sigma", "shared_sigma"]
    assert positional(itrloss.PairLoss) == positional(itrloss.MemoryLoss) == []


def test_an_option_is_read_without_a_call():
    loss = itrloss.InfoNCELoss(0.2, margin=0.1, telemetry=True)
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame) if event == "call" else None)
    try:
        _ = loss.temperature, loss.learnable, loss.margin, loss.reduction, loss.engine
        _ = loss.telemetry
    finally:
        sys.setprofile(None)
    assert not calls


# ------------------------------------------------------------------------------ call forms, modules


def test_mining_can_be_switched_after_a_warm_up():
    v, w = embeddings(6, 6)
    loss = itrloss.TripletLoss(mining="all")
    warm = loss(v, w)
    loss.mining = "hardest"
    assert torch.equal(loss(v, w), itrloss.TripletLoss()(v, w)) and loss(v, w) < warm
    with pytest.raises(ValueError, match="mining"):
        loss.mining = "soft"
    loss.temperature = 0.1
    loss.mining = "all"
    with pytest.raises(ValueError, match="temperature: expected None with mining='all'"):
        loss(torch.randn(3, 4), torch.randn(3, 4))


def test_a_loss_of_your_own():
    class Margin(itrloss.PairLoss):
        def compute(self, sim):
            return (sim.hardest_negatives().values - sim.sum_of_positives(identity)).relu().mean()

    v, w = embeddings(6, 6)
    for engine in ("dense", "tiled"):
        S = Similarity(v, w).scores()
        by_hand = ((S - 9 * torch.eye(6)).amax(1) - S.diagonal()).relu().mean()
        torch.testing.assert_close(Margin(engine=engine)(v, w), by_hand)
    with pytest.raises(NotImplementedError, match=r"PairLoss must implement compute\(sim\)"):
        itrloss.PairLoss()(v, w)
    memory = itrloss.CoupledMemory(4, v.shape[1], dtype=v.dtype)
    with pytest.raises(NotImplementedError, match=r"MemoryLoss must implement compute\(sims\)"):
        itrloss.MemoryLoss()(v, w, v, w, memory)


def value_of(loss, sim):
    return sim.both.reduce(sim.both.logsumexp(), loss.reduction)


class Own(itrloss.PairLoss):
    """A loss of one's own, with options that are checked and one that may be anything."""

    margin: float = option(default=0.2, above=0, at_most=1)
    form: Literal["a", "b"] = "a"
    anything: Any = None
    compute = value_of


@pytest.mark.parametrize("value", [None, 0.1, 3, (0.1, 0.2), torch.ones(3), abs, "text"])
def test_an_option_of_your_own_may_be_anything(value):
    loss = Own(anything=value)
    assert loss.anything is value and loss(*embeddings(4, 4)).isfinite()
    assert repr(loss).startswith("Own(margin=0.2, form='a', anything=")


def test_an_option_becomes_no_parameter():
    loss = Own()
    for name in ("margin", "form", "reduction", "engine", "gather"):
        with pytest.raises((TypeError, ValueError), match=f"{name}: expected"):
            setattr(loss, name, nn.Parameter(torch.tensor([5.0])))
    assert not [*loss.parameters()]


def test_an_option_that_was_not_set_is_named():
    class Needy(itrloss.PairLoss):
        margin: float = option()

    class Forgetful(Needy):
        def __init__(self):
            super().__init__()

    assert Needy(0.3).margin == 0.3
    with pytest.raises(AttributeError, match="margin"):
        _ = Forgetful().margin


def test_an_option_has_a_type():
    with pytest.raises(TypeError, match="margin: expected a type, as in margin: float = option"):

        class Untyped(itrloss.PairLoss):
            margin = option(default=0.2)


def test_a_subclass_may_change_a_default():
    class Wide(itrloss.TripletLoss):
        margin = 0.5

    assert Wide().margin == 0.5 and Wide(0.3).margin == 0.3
    assert inspect.signature(Wide).parameters["margin"].default == 0.5
    with pytest.raises(ValueError, match="margin: expected a number of at least 0, got -1"):
        Wide(margin=-1)


def test_your_own_loss_may_have_modules_and_parameters():
    head = Own(anything=nn.Linear(2, 3))
    weight = Own(anything=nn.Parameter(torch.ones(3)))
    assert [*head.state_dict()] == ["anything.weight", "anything.bias"]
    assert [*weight.state_dict()] == ["anything"]
    for loss in (head, weight):
        assert copy.deepcopy(loss)(*embeddings(4, 4)).isfinite()
        assert "margin=0.2" in repr(loss)


@pytest.mark.parametrize("base", ["TripletLoss", "HubnessAwareLoss", "DiversityContrastiveLoss"])
def test_a_loss_of_the_librarys_may_get_another_option(base):
    kind = getattr(itrloss, base)

    class Weighted(kind):
        def __init__(self, weight=3.0, **options):
            super().__init__(**options)
            self.weight = weight

        def compute(self, sim):
            return self.weight * super().compute(sim)

    v, w = embeddings(6, 6)
    torch.testing.assert_close(Weighted(margin=0.4)(v, w), 3 * kind(margin=0.4)(v, w))
    assert {"weight", "margin", "reduction"} <= inspect.signature(Weighted).parameters.keys()

    class Declared(kind):
        weight: float = 3.0

        def compute(self, sim):
            return self.weight * super().compute(sim)

    torch.testing.assert_close(Declared(margin=0.4)(v, w), 3 * kind(margin=0.4)(v, w))
    assert "weight=3.0" in repr(Declared())


LATER = [
    (itrloss.InfoNCELoss, "temperature", 0.2),
    (itrloss.SigmoidLoss, "scale", 5.0),
    (itrloss.SigmoidLoss, "bias", -3.0),
]


@pytest.mark.parametrize(("kind", "name", "value"), LATER)
@pytest.mark.parametrize("learnable", [False, True])
def test_what_is_learnt_may_be_set_later(kind, name, value, learnable):
    v, w = embeddings(6, 6)
    loss = kind(learnable=learnable)
    parameters = [*loss.parameters()]
    setattr(loss, name, value)
    fresh = kind(learnable=learnable, **{name: value})
    assert torch.equal(loss(v, w), fresh(v, w)) and repr(loss) == repr(fresh)
    assert all(x is y for x, y in zip(parameters, loss.parameters(), strict=True))
    with pytest.raises(TypeError, match=f"{name}: expected a number, got '1'"):
        setattr(loss, name, "1")
    with pytest.raises(AttributeError, match="learnable: cannot be changed"):
        loss.learnable = not learnable


def test_a_number_may_become_a_parameter_of_your_own():
    loss = itrloss.SigmoidLoss(learnable=False)
    loss.bias = nn.Parameter(torch.tensor([-3.0]))
    assert [*loss.state_dict()] == ["bias"]
    loss.bias = -2.0
    v, w = embeddings(6, 6)
    wanted = itrloss.SigmoidLoss(bias=-2.0, learnable=False)
    torch.testing.assert_close(loss(v, w), wanted(v, w))


@pytest.mark.parametrize("kind", [itrloss.InfoNCELoss, itrloss.SigmoidLoss])
def test_a_loss_without_its_parameter_has_the_number_that_was_set_last(kind):
    loss = kind(0.2, learnable=True)
    loss.log_scale = None
    assert not loss.learnable and repr(loss).startswith(f"{kind.__name__}({loss_option(kind)}=0.2")
    v, w = embeddings(6, 6)
    torch.testing.assert_close(loss(v, w), kind(0.2, learnable=False)(v, w))


def loss_option(kind):
    """Return the name of a loss's first option."""
    return next(iter(inspect.signature(kind).parameters))


@pytest.mark.slow
def test_editors_see_all_options_with_their_defaults(tmp_path):
    """As pyright does, which editors ask."""
    code = """
import itrloss

class Own(itrloss.TripletLoss):
    weight: float = itrloss.option(default=3.0, above=0)

reveal_type(itrloss.InfoNCELoss.__init__)
Own(0.2, "all", 2.0, reduction="mean", telemetry=True).weight.hex()
itrloss.rerank.CSLS(k=3)
itrloss.InfoNCELoss(temprature=0.1)
"""
    (tmp_path / "own.py").write_text(code)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    home = str(Path(itrloss.__file__).parents[1])
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [home]}))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    said = [found["message"] for found in json.loads(done.stdout)["generalDiagnostics"]]
    seen, error = said
    for option_seen in (
        "temperature: float | Tensor = 0.07, learnable: bool = False, *",
        "image_image: bool = False",
        "margin: float | None = None",
        "gather: bool = False",
        "telemetry: bool | dict[str, Tensor] = False",
    ):
        assert option_seen in seen
    assert error == 'No parameter named "temprature"'


@pytest.mark.slow
def test_a_compiled_model_may_share_its_scale_with_a_limit():
    """The limit is set between the model's forward pass and its backward pass."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.logit_scale = nn.Parameter(torch.tensor(5.0))

        def forward(self, v, w):
            x = self.layer(v)
            y = self.layer(w)
            return x, y, self.logit_scale.exp() * x @ y.T

    reset_compiler()
    model = Model()
    loss = itrloss.InfoNCELoss(learnable=True, max_scale=100.0)
    loss.log_scale = model.logit_scale
    x, y, _ = torch.compile(model)(*embeddings(6, 6, 8, dtype=torch.float32))
    loss(x, y).backward()
    torch.testing.assert_close(model.logit_scale.exp().item(), 100.0)
    assert model.logit_scale.grad != 0


# -------------------------------------------------------------------------------------- compilation


def step(loss, ids):
    """A loss of one batch, and its gradients."""
    v, w = (x.requires_grad_() for x in embeddings(8, 8, dtype=torch.float32))
    value = loss(v, w, *ids)
    return [value, *torch.autograd.grad(value, (v, w))]


# `check_loss` compiles each loss as it is by default; here are the engines and another backend.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine", "backend"),
    [
        ("infonce learnable", "tiled", "aot_eager"),
        ("dcl", "tiled", "aot_eager"),
        ("triplet all", "tiled", "aot_eager"),
        ("dcl", "dense", "inductor"),
    ],
)
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param((None, None), id="pairs"),
        pytest.param(make_ids("random", 8, 8), id="ids"),
        pytest.param((torch.arange(8) % 5,) * 2, id="one tensor of ids"),
    ],
)
def test_compiled_engines_have_the_values_of_eager_mode(name, engine, backend, ids):
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile's default backend needs a C++ compiler")
    loss = make(name, engine=engine)
    reset_compiler()
    # Tiles are visited outside of graphs.
    compiled = torch.compile(loss, fullgraph=engine != "tiled", backend=backend)
    torch.testing.assert_close(step(compiled, ids), step(loss, ids), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine"), [("infonce learnable", "tiled"), ("triplet", "dense"), ("infonce", "tiled")]
)
def test_compiles_for_validation_without_gradients(name, engine):
    v, w = embeddings(8, 8, dtype=torch.float32)
    loss = make(name, engine=engine)
    reset_compiler()
    with torch.no_grad():
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(v, w)
        torch.testing.assert_close(compiled, loss(v, w))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "engine", "kind"),
    each(
        name=["infonce", "dcl", "triplet"],
        engine=["dense", "auto"],
        kind=["random", "random", None],
    ),
)
def test_one_recompilation_serves_all_batch_sizes(name, engine, kind):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    reset_compiler()
    compiled = torch.compile(make(name, engine=engine), fullgraph=True, backend=backend)
    for n in (8, 12, 16, 20):
        v, w = (x.requires_grad_() for x in embeddings(n, n, dtype=torch.float32))
        compiled(v, w, *make_ids(kind, n, n)).backward()
    assert len(graphs) == 2


@itrloss.pair_term
def wave(scores, weight):
    return torch.sin(scores * weight)


class Wave(itrloss.PairLoss):
    """A loss of a user, with a term that autograd differentiates."""

    def compute(self, sim):
        anchors = self.anchors(sim)
        weight = anchors.logsumexp(3.0)
        values = anchors.sum(wave, weight) + anchors.mean_of_positives(wave, weight)
        return anchors.reduce(values, self.reduction)


@pytest.mark.parametrize(
    "loss",
    [
        Wave(engine="dense"),
        itrloss.InfoNCELoss(engine="dense", directions="text-image", hardness=3.0),
        itrloss.InfoNCELoss(engine="dense", learnable=True, max_scale=50.0),
    ],
    ids=["a term of a user", "one direction", "a limited scale"],
)
def test_compiles_as_one_graph(loss):
    v, w = embeddings(8, 8, dtype=torch.float32)
    reset_compiler()
    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(v, w), loss(v, w))


# ------------------------------------------------------------------- tensors without data, sharding


@pytest.mark.parametrize("with_ids", [False, True])
@of_engines
@pytest.mark.parametrize("name", [name for name in LOSSES if "compiled" in LOSSES[name].tables])
def test_a_dry_run_leaves_no_trace(name, engine, with_ids):
    """Estimators of memory and FLOPs use shapes only, on the meta device or with fake tensors."""
    given = [*embeddings(8, 8, dtype=torch.float32)]
    loss = make(name, engine=engine)
    wanted = loss(*given)
    if with_ids and not LOSSES[name].lists_positives:
        given += [torch.arange(8), torch.arange(8) % 4]
    moved = copy.deepcopy(loss).to("meta") if list(loss.parameters()) else loss
    moved(*(x.to("meta") for x in given))
    require("a search in fake tensors", 2, 4)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        images, *others = (mode.from_tensor(x) for x in given)
        images.requires_grad_()
        value = loss(images, *others)
        value.backward()
        assert isinstance(value, FakeTensor)
        assert images.grad.shape == images.shape
    loss.zero_grad()
    assert torch.equal(loss(*given[:2]), wanted)


def test_no_parameter_is_without_a_dimension():
    """``fully_shard`` does not accept 0-dimensional parameters; `test_processes` shards them."""
    for loss in (itrloss.SigmoidLoss(), itrloss.InfoNCELoss(learnable=True)):
        assert list(loss.parameters()) and all(p.dim() > 0 for p in loss.parameters())
    assert f"{itrloss.InfoNCELoss(0.1, learnable=True).temperature:.3f}" == "0.100"
