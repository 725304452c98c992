"""Kernels are checked before they are used, and no error of theirs surfaces in a step."""

from __future__ import annotations

import functools
import warnings
from unittest import mock

import pytest
import torch
from support.cases import embeddings, make_ids
from support.on_triton import DEVICE, OF_KERNELS, moved
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

import itrloss
from itrloss import Similarity
from itrloss.engine import kernels, terms, trial
from itrloss.engine import triton as engine
from itrloss.engine.pairs import Pairs
from itrloss.engine.question import Question

pytestmark = OF_KERNELS


# The form of InfoNCE with ids, of which the others differ in a few places.
ASKED_FORM = trial.Form(
    device=DEVICE,
    dtypes=(torch.bfloat16, torch.bfloat16),
    dim=24,
    normalized=(True, True),
    large=False,
    sides=(0, 1),
    terms=(terms.exponential,),
    over="negatives",
    ids=True,
    groups=None,
    mask=False,
    scale="number",
    shift="number",
    below="none",
    above="none",
    slots=1,
    attempt="none",
    listed="listed",
    gradients=trial.Trained(rows=torch.float32, cols=torch.bfloat16),
    early=False,
    weights="none",
)


FLOATS = {"dtypes": (torch.float32, torch.float32)}


LEARNT = trial.Trained(torch.float32, None, scale=True)


FROM_A_MEMORY = {
    "sides": (0,),
    "early": True,
    "gradients": trial.Trained(torch.bfloat16, None),
    "listed": "none",
}


FORMS = {
    "bfloat16": {},
    "float16": {"dtypes": (torch.float16, torch.float16)},
    "float32": FLOATS,
    "no ids": {"ids": False, "listed": "diagonal"},
    "groups": {"groups": "same"},
    "other groups, over all": {"groups": "other", "over": "all"},
    "maximum in a group": {"groups": "same", "terms": (), "gradients": trial.Trained()},
    "a mask": {"ids": False, "mask": True},
    "a mask of positives": {"ids": False, "mask": True, "over": "positives", "listed": "none"},
    "maximum by a mask": {
        "ids": False,
        "mask": True,
        "terms": (),
        "gradients": trial.Trained(),
    },
    "a mask of given scores": {
        **FLOATS,
        "ids": False,
        "mask": True,
        "dim": 0,
        "normalized": (False, False),
        "gradients": trial.Trained(scores=True),
    },
    "a memory": {"normalized": (True, False), "sides": (0,), "listed": "none"},
    "learnt": {"scale": "one", "shift": "each", "gradients": LEARNT},
    "attempted": {"scale": "one", "shift": "each", "attempt": "one", "gradients": LEARNT},
    "maximum after an attempt": {"terms": (), "gradients": trial.Trained(), "attempt": "one"},
    "limits": {"below": "number", "above": "each", "scale": "each"},
    "given": {
        **FLOATS,
        "dim": 0,
        "normalized": (False, False),
        "gradients": trial.Trained(scores=True),
    },
    "no gradient": {"gradients": trial.Trained()},
    "maximum": {"terms": (), "gradients": trial.Trained()},
    "softplus": {"terms": (terms.softplus,), "shift": "one", "scale": "one", "gradients": LEARNT},
    "excess": {"terms": (terms.excess,), "slots": 2, "shift": "each", "sides": (1,)},
    "many shifts": {
        "terms": (terms.excess,),
        "slots": 17,
        "shift": "each",
        "gradients": trial.Trained(torch.float32, torch.float32, shift=True),
    },
    "moments": {"terms": (terms.identity, terms.square), "over": "all"},
    "a total": {
        "terms": (terms.softplus,),
        "shift": "one",
        "scale": "one",
        "early": True,
        "weights": "one",
    },
    "a weighted total": {
        "terms": (terms.excess,),
        "early": True,
        "weights": "each",
        "listed": "none",
    },
    "early sums": {**FROM_A_MEMORY, "scale": "each"},
    "early sums of one scale": {**FROM_A_MEMORY, "listed": "listed"},
}


WEIGHTS = {"none": None, "one": torch.ones(1), "each": torch.ones(2)}


@pytest.fixture
def examples(monkeypatch, few_tiles):
    """Small examples that were not tried yet."""
    monkeypatch.setattr(trial, "_results", {})
    monkeypatch.setattr(trial, "LARGE_EXAMPLE", (40, 56))
    monkeypatch.setattr(trial, "SMALL_EXAMPLE", (20, 40))


def refused(*args, **kwargs):
    raise RuntimeError("no C compiler")


def about_triton(warned):
    return [w for w in warned if "Triton engine" in str(w.message)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "many shifts" else [])
        for name in FORMS
    ],
)
def test_the_very_form_is_tried(name, examples, recwarn, monkeypatch):
    """What the engine is asked for in the trial is of the form, and the answers agree."""
    wanted = ASKED_FORM._replace(**FORMS[name])
    pairs = {"none": None, "diagonal": (None, None), "listed": (torch.zeros(1),) * 2}
    about = wanted.gradients, pairs[wanted.listed], wanted.early, WEIGHTS[wanted.weights]
    seen = set()

    def noted(answer, question, inputs, *rest):
        if answer is highest:
            form = trial.form_of_maximum(question, inputs)
            seen.add(form._replace(gradients=wanted.gradients, listed=wanted.listed))
        else:
            seen.add(trial.form_of(question, inputs, *about))
        return answer(question, inputs, *rest)

    highest = engine.highest
    for answer in (engine.sums, highest, engine.sums_and_gradients, engine.gradients):
        monkeypatch.setattr(engine, answer.__name__, functools.partial(noted, answer))
    assert trial.works(wanted)
    assert not about_triton(recwarn)
    assert seen == {wanted}
    assert list(trial._results) == [wanted]  # and nothing else is tried


def test_each_form_is_tried_once(examples, monkeypatch):
    tried = []
    monkeypatch.setattr(trial, "error_of", lambda form: tried.append(form) or "")
    v, w = embeddings(20, 20, dtype=torch.bfloat16)
    scale = torch.tensor([5.0], requires_grad=True)
    asked = [
        lambda sim: sim.sum(terms.excess),
        lambda sim: sim.sum(terms.excess, scale=3.0),
        lambda sim: sim.sum(terms.excess, scale=scale),
        lambda sim: sim.sum(terms.square),
        lambda sim: sim.both.sum(terms.square),
        lambda sim: sim.sum(terms.square, below=0.5),
    ]
    for _ in range(2):
        for question in asked:
            question(chosen_by_auto(v, w))
        asked[0](chosen_by_auto(v, w, *make_ids("random", 20, 20)))
        asked[0](chosen_by_auto(v[:, :5], w[:, :5]))
        asked[0](chosen_by_auto(v.float(), w.float()))
        asked[0](chosen_by_auto(v.clone().requires_grad_(), w))
    assert len(tried) == 9  # the second question differs from the first by a number alone
    assert len(set(tried)) == 9


def test_the_example_is_tried_out_of_sight_of_the_caller(examples, recwarn):
    modes = [torch.device("meta"), torch.inference_mode(), torch.no_grad(), FakeTensorMode()]
    modes += [torch.autocast(DEVICE.type, torch.bfloat16), saved_tensors_hooks(refused, refused)]
    for mode in modes:
        trial._results.clear()
        with mode:
            assert trial.works(ASKED_FORM._replace(**FLOATS))
    assert not about_triton(recwarn)


def full(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_a_full_memory_is_no_answer(examples, monkeypatch):
    monkeypatch.setattr(engine, "sums", full)
    with pytest.warns(UserWarning, match="OutOfMemoryError"):
        assert not trial.works(ASKED_FORM)
    assert not trial._results


def test_nothing_is_tried_while_a_graph_is_captured(examples, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(trial, "error_of", refused)
    with pytest.warns(UserWarning, match="not tried while a CUDA graph is captured"):
        assert not trial.works(ASKED_FORM)
    trial._results[ASKED_FORM] = True
    assert trial.works(ASKED_FORM)


@pytest.mark.parametrize(
    ("name", "broken", "why"),
    [
        ("add_product_", lambda *args: None, "finds something else than the tiled one"),
        ("contiguous_vectors", torch.zeros_like, "finds something else"),
        ("sorted_by", lambda *args: kernels.Listed(), "finds something else"),
        ("AnchorTotals", refused, "fails: RuntimeError: no C compiler"),
    ],
)
def test_what_does_not_work_is_left_alone(name, broken, why, examples, monkeypatch):
    monkeypatch.setattr(engine, name, broken)
    told = f"the Triton engine {why}.*does without it for sums of exponential over negatives .24 "
    with pytest.warns(UserWarning, match=told):
        assert not trial.works(ASKED_FORM)
    assert not trial.works(ASKED_FORM)  # and it is not tried again


def chosen_by_auto(v, w, *ids, **options):
    """Return a similarity whose engine is Triton, as if ``"auto"`` had chosen it."""
    sim = Similarity(*moved(v, w, *ids), engine="triton", **options)
    sim._matrix.strict = False
    return sim


class CompilationError(Exception):
    """As Triton's, which derives from Exception alone."""


def fails(at):
    """Return launches that fail from the one with the number ``at`` on."""
    launches = []

    def launch(*args, **kwargs):
        launches.append(args)
        if len(launches) > at:
            raise CompilationError("out of resource: shared memory")

    return launch


LOSSES_OF_SIMILARITIES = {
    "infonce": itrloss.InfoNCELoss(),
    "dcl": itrloss.DiversityContrastiveLoss(),
    "hal": itrloss.HubnessAwareLoss(),
    "sigmoid": itrloss.SigmoidLoss(),
    "triplet all": itrloss.TripletLoss(mining="all"),
    "triplet mean": itrloss.TripletLoss(mining="all", reduction="mean"),
}


@pytest.mark.parametrize("at", [0, 1, 2, 3, "the projection"])  # the first launches are forward's
@pytest.mark.parametrize("name", LOSSES_OF_SIMILARITIES)
def test_no_error_of_triton_surfaces_in_a_step_of_auto(name, at, examples, monkeypatch):
    """Value and gradients are then the tiled engine's, whatever fails, and a warning says it."""
    monkeypatch.setattr(trial, "error_of", lambda form: "")
    v, w = (x.to(torch.float32) for x in embeddings(20, 20))
    wanted, warned = step_of(name, Similarity, v, w, engine="tiled")
    assert not warned
    if at != "the projection":
        launches = launches_of(name, v, w)
        assert launches > 0
        at = min(at, launches - 1)  # a GPU's tiles are large, and launches few
    break_triton(at, monkeypatch)
    found, warned = step_of(name, chosen_by_auto, v, w)
    assert warned
    for got, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.cpu(), right, rtol=2e-5, atol=1e-6)


def launches_of(name, v, w):
    """Return how many kernels a step launches."""
    with mock.patch.object(
        engine.Pass, "launch", autospec=True, side_effect=engine.Pass.launch
    ) as launch:
        _, warned = step_of(name, chosen_by_auto, v, w)
    assert not warned
    return launch.call_count


def break_triton(at, monkeypatch):
    """Let launches from a number on fail, or the kernel that projects gradients."""
    if at == "the projection":
        monkeypatch.setattr(engine.VectorGradient, "finish", refused)
        return
    launch = fails(at)
    real = engine.Pass.launch

    def sometimes(run, *args):
        launch()
        real(run, *args)

    monkeypatch.setattr(engine.Pass, "launch", sometimes)


def step_of(name, similarity, v, w, **options):
    """Return a loss and its gradients, and the warnings about Triton."""
    x, y = (z.clone().requires_grad_() for z in (v, w))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        loss = LOSSES_OF_SIMILARITIES[name](similarity(x, y, **options))
        loss.backward()
    return [loss.detach(), x.grad, y.grad], about_triton(warned)


def test_a_form_that_failed_in_a_step_is_not_tried_again(examples, monkeypatch):
    v, w = embeddings(20, 20, dtype=torch.float32)
    calls = []
    monkeypatch.setattr(trial, "error_of", lambda form: "")
    monkeypatch.setattr(engine, "sums", lambda *args: calls.append(args) or refused())
    with pytest.warns(UserWarning, match="fails: RuntimeError: no C compiler"):
        wanted = chosen_by_auto(v, w).sum(terms.square)
    again = chosen_by_auto(v, w).sum(terms.square)
    assert len(calls) == 1
    assert torch.equal(wanted, again)
    by_tiles = Similarity(v, w, engine="tiled").sum(terms.square)
    torch.testing.assert_close(wanted.cpu(), by_tiles)


def test_maxima_fall_back_too(examples, monkeypatch):
    v, w = moved(*embeddings(20, 20, dtype=torch.float32))
    question = Question(Pairs((20, 20), (None, None), v.device), (0, 1), (terms.identity,))
    monkeypatch.setattr(trial, "error_of", lambda form: "")
    monkeypatch.setattr(engine, "highest", refused)
    with pytest.warns(UserWarning, match="does without it for maxima over negatives"):
        found = chosen_by_auto(v, w)._matrix.highest(question)
    assert torch.equal(found, Similarity(v, w, engine="tiled")._matrix.highest(question))
    with pytest.raises(RuntimeError, match=r"failed for maxima.*no C compiler"):
        Similarity(v, w, engine="triton")._matrix.highest(question)


def test_a_full_memory_is_the_users_to_know(examples, monkeypatch):
    """Scripts look for a batch size that fits by this error; no other engine hides it."""
    monkeypatch.setattr(trial, "error_of", lambda form: "")
    monkeypatch.setattr(engine, "sums", full)
    v, w = embeddings(20, 20, dtype=torch.float32)
    with pytest.raises(torch.OutOfMemoryError):
        chosen_by_auto(v, w).sum(terms.square)


@pytest.mark.parametrize("part", ["sums", "gradients"])
def test_an_error_of_triton_by_name_names_the_form(part, examples, monkeypatch):
    v, w = (x.requires_grad_() for x in moved(*embeddings(20, 20, dtype=torch.float32)))
    monkeypatch.setattr(engine, part, refused)
    monkeypatch.setattr(trial, "error_of", refused)  # nothing is tried
    about = (
        r"engine='triton' failed for sums of square over negatives \(6 dimensions of torch.float32 "
        "and torch.float32, small tiles.*no C compiler; engine='tiled'"
    )
    with pytest.raises(RuntimeError, match=about) as raised:
        Similarity(v, w, engine="triton").sum(terms.square).sum().backward()
    assert "no C compiler" in str(raised.value.__cause__)


def test_the_compiler_does_not_look_into_the_example(examples, monkeypatch):
    """A similarity may be made outside of compiled code that asks it."""
    monkeypatch.setattr(trial, "error_of", refused)
    v, w = embeddings(20, 20, dtype=torch.float32)
    sim = chosen_by_auto(v, w)
    torch._dynamo.reset()
    compiled = torch.compile(lambda: sim.sum(terms.square), backend="eager")
    by_tiles = Similarity(v, w, engine="tiled").sum(terms.square)
    torch.testing.assert_close(compiled().cpu(), by_tiles)
