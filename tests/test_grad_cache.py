"""The step in chunks: gradients equal those of the whole batch, in the memory of one chunk, without
side effects.
"""

from __future__ import annotations

import contextlib
import random
import warnings
import weakref
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import sample
from support.processes import run
from support.versions import GradScaler, needs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import itrloss
from itrloss import grad_cache_step

N, D = 10, 6


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tower(width: int, dropout: float = 0.0) -> nn.Sequential:
    layers = [nn.Linear(width, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, D)]
    return nn.Sequential(*layers).double()


def towers() -> list[nn.Module]:
    return [tower(5), tower(4)]


def batch(n: int = N, m: int = N) -> list[Tensor]:
    return [sample(n, 5, dtype=torch.float64), sample(m, 4, seed=1, dtype=torch.float64)]


def product(images: Tensor, texts: Tensor) -> Tensor:
    """A loss that couples all rows, without random numbers and with little memory."""
    return (images.sum(0) * texts.sum(0)).sum() + (images.sum(0) ** 3).sum()


def exponential(images: Tensor, texts: Tensor) -> Tensor:
    """A loss for encoders that end with BatchNorm, whose outputs sum to 0."""
    return (images.exp().sum(0) * texts.exp().sum(0)).mean()


# ---------------------------------------------------------------------------------- two other steps


def encoded(encoder: Any, x: Any) -> Any:
    """Call an encoder as `grad_cache_step` does."""
    if isinstance(x, (dict, UserDict)):
        return encoder(**x)
    if isinstance(x, (tuple, list)):
        return encoder(*x)
    return encoder(x)


def whole(loss: Any, encoders: Any, inputs: Any, chunk_size: int = 0, **options: Any) -> Tensor:
    """Plain autograd over the batch at once."""
    outputs = [encoded(encoder, x) for encoder, x in zip(encoders, inputs, strict=True)]
    value = loss(*outputs, **options)
    value.backward()
    return value.detach()


def chunks_at_once(loss: Any, encoders: Any, inputs: Any, chunk_size: int) -> Tensor:
    """Plain autograd over all chunks: other random numbers than those of the whole batch, and all
    graphs in memory.
    """
    outputs = []
    for encoder, x in zip(encoders, inputs, strict=True):
        outputs.append(torch.cat([encoder(part) for part in x.split(chunk_size)]))
    value = loss(*outputs)
    value.backward()
    return value.detach()


def take_gradients(*modules: Any) -> list[Tensor | None]:
    """Return the gradients of the parameters of all that is a module, and reset them."""
    gradients = []
    for module in modules:
        if isinstance(module, nn.Module):
            gradients += [parameter.grad for parameter in module.parameters()]
            module.zero_grad(set_to_none=True)
    return gradients


def outcome(step: Any, loss: Any, encoders: Any, inputs: Any, *size: int, **options: Any) -> list:
    """Return the value of a step, and the gradients of the encoders and of the loss."""
    value = step(loss, encoders, inputs, *size, **options)
    return [value, *take_gradients(*encoders, loss)]


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def check_step(loss: Any, encoders: Any, inputs: Any, chunk_size: int, **options: Any) -> None:
    """The step in chunks has the value and the gradients of the whole batch."""
    expected = outcome(whole, loss, encoders, inputs, **options)
    found = outcome(grad_cache_step, loss, encoders, inputs, chunk_size, **options)
    assert_same(found, expected)


# ---------------------------------------------------------------------------------------- gradients


# `tests/losses/test_programs.py` has a step of each loss.
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_batches_of_any_sizes_can_be_cut_anywhere(n, m, chunk_size, seed):
    """The value and the gradients are those of the whole batch; a learnt scale has one, too."""
    torch.manual_seed(seed)
    ids = {"image_ids": torch.randint(0, 9, (n, 2)), "text_ids": torch.randint(0, 9, (m, 3))}
    loss = itrloss.InfoNCELoss(learnable=True).double()
    encoders = towers()
    inputs = batch(n, m)
    check_step(loss, encoders, inputs, chunk_size, **ids)
    # gradients add up over calls
    whole(loss, encoders, inputs, **ids)
    expected = outcome(whole, loss, encoders, inputs, **ids)
    value = grad_cache_step(loss, encoders, inputs, chunk_size, **ids)
    assert not value.requires_grad
    assert_same(outcome(grad_cache_step, loss, encoders, inputs, chunk_size, **ids), expected)


def test_scaler_scales_gradients_and_not_the_value():
    encoders = towers()
    value, *gradients = outcome(grad_cache_step, product, encoders, batch(), 4)
    scaler = GradScaler("cpu", init_scale=1024.0)
    found = outcome(grad_cache_step, product, encoders, batch(), 4, scaler=scaler)
    assert_same(found, [value, *(1024 * x for x in gradients)])


# ----------------------------------------------------------------------------------------- encoders


class Called(nn.Sequential):
    """An encoder that counts its calls."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Halving(nn.Module):
    """It writes to its input."""

    def forward(self, x):
        return x.mul_(0.5)


class Hidden(nn.Module):
    """What a loss trains through it is not registered as its parameters."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.held = [encoder]
        self.frozen = nn.Linear(D, D).double().requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.held[0](x))


class Locked(nn.Module):
    """A model whose image encoder is frozen, with methods for both sides and the loss's scale."""

    def __init__(self):
        super().__init__()
        self.images = tower(5).requires_grad_(False)
        self.texts = tower(4)
        self.scale = nn.Parameter(torch.tensor(2.0).double())

    def encode_images(self, x):
        return self.images(x)

    def encode_texts(self, x):
        return self.texts(x)

    def loss(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.scale * product(images, texts)


@pytest.mark.parametrize("name", ["one of both", "writing", "hidden", "methods"])
def test_encoders_of_any_kind(name):
    images, texts, model = tower(5), tower(4), Locked()
    inputs = batch()
    loss: Any = product
    if name == "one of both":
        encoders, modules, inputs = [images, images], [images], [inputs[0], inputs[0].flip(0)]
    elif name == "writing":
        encoders, modules = [nn.Sequential(Halving(), images), texts], [images, texts]
    elif name == "hidden":
        encoders, modules = [Hidden(images), texts], [images, texts]
    else:
        encoders, modules, loss = [model.encode_images, model.encode_texts], [model], model.loss
    copies = [x.clone().requires_grad_() for x in inputs]
    found = [grad_cache_step(loss, encoders, copies, 4), *take_gradients(*modules)]
    assert all(map(torch.equal, inputs, copies))
    wanted = [x.clone().requires_grad_() for x in inputs]
    expected = [whole(loss, encoders, [x.clone() for x in wanted]), *take_gradients(*modules)]
    assert_same(found, expected)
    assert_same([x.grad for x in copies], [x.grad for x in wanted])


@pytest.mark.parametrize(("chunk_size", "chunks"), [(3, 4), (10, 1)])
def test_an_encoder_is_run_again_only_where_it_has_a_gradient(chunk_size, chunks):
    """A frozen one for one more chunk, and one that the loss ignores for none."""
    frozen = Called(tower(5)).requires_grad_(False)
    texts = Called(tower(4))
    ignored = Called(tower(4))
    inputs = [*batch(), batch()[1]]
    grad_cache_step(lambda x, y, z: product(x, y), [frozen, texts, ignored], inputs, chunk_size)
    assert frozen.calls == chunks + 1
    assert texts.calls == 2 * chunks
    assert ignored.calls == chunks
    gradients = take_gradients(texts)
    whole(product, [frozen, texts], inputs[:2])
    assert_same(gradients, take_gradients(texts))
    assert take_gradients(ignored) == [None] * 4


class WithoutGraph(nn.Linear):
    """An encoder with parameters to train that leaves out their graph."""

    def forward(self, x):
        return super().forward(x).detach()


@pytest.mark.parametrize("form", [lambda x: x, lambda x: x.forward, lambda x: partial(x.forward)])
def test_an_encoder_with_parameters_whose_output_has_no_graph_is_warned_of(form):
    encoder = WithoutGraph(4, D, dtype=torch.float64)
    message = r"encoders\[1\]: what it returns needs no gradient, so that nothing in it is trained"
    for _ in range(2):  # whatever gradients are left from the step before
        with pytest.warns(itrloss.SuspiciousInputWarning, match=message):
            grad_cache_step(product, [tower(5), form(encoder)], batch(), 4)
        encoder.weight.grad = torch.ones_like(encoder.weight)
    encoder.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", itrloss.SuspiciousInputWarning)
        grad_cache_step(product, [tower(5), form(encoder)], batch(), 4)
        grad_cache_step(product, [tower(5), lambda x: x @ torch.ones(4, D).double()], batch(), 4)


class Sometimes(nn.Linear):
    """A layer that is not used in about half of the chunks."""

    def forward(self, x):
        return super().forward(x) if torch.rand(()) < 0.5 else x


@pytest.mark.parametrize("seed", [1, 2])
def test_a_chunk_without_a_gradient_does_not_end_the_pass(seed):
    fixed = tower(5).requires_grad_(False)
    encoders = [nn.Sequential(fixed, Sometimes(D, D, dtype=torch.float64)), tower(4)]
    torch.manual_seed(seed)
    expected = outcome(chunks_at_once, product, encoders, batch(), 2)
    torch.manual_seed(seed)
    assert_same(outcome(grad_cache_step, product, encoders, batch(), 2), expected)


class Averaged(nn.Sequential):
    """An encoder that notes in which passes processes would average gradients, as those of DDP."""

    averages = True

    def __init__(self, encoder: nn.Module):
        super().__init__(encoder)
        self.averaged: list[bool] = []

    @contextlib.contextmanager
    def no_sync(self):
        self.averages = False
        yield
        self.averages = True

    def forward(self, x):
        if torch.is_grad_enabled():
            self.averaged.append(self.averages)
        return super().forward(x)


def test_gradients_are_averaged_once_where_the_loss_ignores_an_input():
    encoder = Averaged(tower(5))
    images = batch()[0]
    grad_cache_step(lambda x, y: x.square().sum(), [encoder, encoder], [images, images], 5)
    *before, last = encoder.averaged
    assert before
    assert last
    assert not any(before)


# ------------------------------------------------------------------------------- inputs and outputs

WORDS = torch.arange(4 * N).view(N, 4) * 7 % 20
MASK = (torch.arange(4) < 1 + torch.arange(N)[:, None] % 4).double()


class Tokens(UserDict):
    """What a tokenizer returns: a mapping that is no dict."""


class Reader(nn.Module):
    """A text encoder as those of transformers are called; an output may be missing, and one has no
    gradient.
    """

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, D).double()

    def forward(self, input_ids, attention_mask=None, scale=1.0, output_all=False):
        hidden = scale * self.words(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        return Tokens(
            pooled=hidden.mean(1), hidden=hidden if output_all else None, ids=input_ids, scale=scale
        )


@pytest.mark.parametrize(
    "texts",
    [
        Tokens(input_ids=WORDS, attention_mask=None, output_all=True),
        {"input_ids": WORDS, "attention_mask": MASK, "scale": 2.0},
        (WORDS, None, 3),
        [WORDS, MASK, 0.5, True],
    ],
)
def test_several_tensors_none_and_flags_are_passed_on(texts):
    def loss(images, words):
        total = product(images, words["pooled"]) / words["ids"].sum()
        return total if words["hidden"] is None else total + words["hidden"].pow(3).sum()

    check_step(loss, [tower(5), Reader()], [batch()[0], texts], 3)


def test_the_loss_is_called_once_and_all_of_its_result_comes_back_without_a_graph():
    calls = []

    def loss(images, texts, weight):
        calls.append((images.shape, texts.shape))
        total = weight * product(images, texts)
        return total, {"half": total / 2, "name": "x"}

    total, terms = grad_cache_step(loss, towers(), batch(), 3, weight=2.0)
    assert calls == [((N, D), (N, D))]
    assert_same(terms["half"], total / 2)
    assert terms["name"] == "x"
    assert not total.requires_grad
    assert not terms["half"].requires_grad


# ------------------------------------------------------------------------- random numbers, autocast


class Draws(nn.Module):
    """An encoder with dropout by the random numbers of PyTorch, NumPy and Python."""

    def __init__(self, width: int):
        super().__init__()
        self.tower = tower(width, dropout=0.4)

    def forward(self, x):
        kept = torch.from_numpy(np.random.rand(*x.shape) < 0.7)
        return self.tower(x * kept * (1 + random.random()))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def next_draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.rand(), random.random()


def noisy(images: Tensor, texts: Tensor) -> Tensor:
    return product(images * torch.rand(N, 1), texts * np.random.rand() * random.random())


@needs("torch.mps", 2, 0)
def test_random_states_of_apple_devices_are_set_back(monkeypatch):
    restored = []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: "state")
    monkeypatch.setattr(torch.mps, "set_rng_state", restored.append)
    grad_cache_step(product, towers(), batch(), 4)
    assert set(restored) == {"state"}


@pytest.mark.parametrize("chunk_size", [4, 10])
@pytest.mark.parametrize("kind", ["trained", "hooks that draw", "frozen"])
def test_the_second_pass_repeats_the_draws_of_the_first(kind, chunk_size):
    encoders = [Draws(5), Draws(4)]
    if kind == "frozen":
        encoders[0].requires_grad_(False)
    seed_all(7)
    expected = outcome(chunks_at_once, noisy, encoders, batch(), chunk_size)
    wanted_draws = next_draws()
    if kind == "hooks that draw":
        for parameter in encoders[0].parameters():
            parameter.register_hook(lambda gradient: gradient + 0 * torch.rand(3).sum())
    seed_all(7)
    assert_same(outcome(grad_cache_step, noisy, encoders, batch(), chunk_size), expected)
    assert next_draws() == wanted_draws
    seed_all(8)
    assert not torch.allclose(grad_cache_step(noisy, encoders, batch(), chunk_size), expected[0])


class Island(nn.Module):
    """An encoder of which a part disables autocast."""

    def __init__(self, width: int):
        super().__init__()
        self.tower = tower(width, dropout=0.3).float()
        self.exact = nn.Linear(D, D)

    def forward(self, x):
        x = self.tower(x)
        with torch.autocast("cpu", enabled=False):
            return self.exact(x.float()).bfloat16()


@pytest.mark.parametrize("loss", [product, itrloss.InfoNCELoss()])
def test_autocast_gives_the_bits_of_plain_autograd(loss):
    """Forward passes run in it, and backward passes outside."""
    encoders = [Island(5), Island(4)]
    inputs = [x.float() for x in batch()]
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = [encoder(x) for encoder, x in zip(encoders, inputs, strict=True)]
        value = loss(*outputs)
    value.backward()
    expected = [value.detach(), *take_gradients(*encoders)]
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(grad_cache_step, loss, encoders, inputs, N)
    assert all(map(torch.equal, found, expected))


# ------------------------------------------------------------------------------------------ buffers


class Rebinding(nn.Module):
    """It reads a buffer in training, and replaces it by another tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5).double())

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class WithBuffers(nn.Module):
    """An encoder with buffers of its own, of BatchNorm and of a parametrisation."""

    def __init__(self):
        super().__init__()
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))
        layers = [Rebinding(), spectral, nn.Tanh(), nn.Linear(5, D), nn.BatchNorm1d(D)]
        self.layers = nn.Sequential(*layers).double()

    def forward(self, x, k=1):
        return k * self.layers(x)


# a module, its method, and a partial function of a partial function of it
FORMS = {
    "module": lambda model: model,
    "method": lambda model: model.forward,
    "partial": lambda model: partial(partial(model.forward), k=1),
}


@pytest.mark.parametrize("form", FORMS)
def test_buffers_are_read_and_left_as_after_one_pass(form):
    once, twice = WithBuffers(), WithBuffers()
    twice.load_state_dict(once.state_dict())
    inputs = [batch(9)[0], batch(9)[0].flip(0)]
    chunks_at_once(exponential, [once, once], inputs, 3)
    encoder = FORMS[form](twice)
    grad_cache_step(exponential, [encoder, encoder], inputs, 3)
    buffers = dict(twice.named_buffers())
    assert buffers["layers.4.num_batches_tracked"] == 6
    assert_same(buffers, dict(once.named_buffers()))
    gradients = take_gradients(once)
    assert all(x.dim() == 1 or x.abs().max() > 1e-2 for x in gradients)
    assert_same(take_gradients(twice), gradients)


class Late(nn.Linear):
    """A buffer is None before the first pass; two others begin as one tensor."""

    def __init__(self):
        super().__init__(5, D, dtype=torch.float64)
        zeros = torch.zeros(D, dtype=torch.float64)
        self.register_buffer("first", None)
        self.register_buffer("fast", zeros)
        self.register_buffer("slow", zeros)

    def forward(self, x):
        x = super().forward(x)
        mean = x.detach().mean(0)
        if self.first is None:
            self.first = mean
        self.fast = self.fast.lerp(mean, 0.5)
        self.slow = self.slow.lerp(mean, 0.1)
        return x * (1 + (self.first + self.fast + self.slow).tanh())


def test_buffers_that_are_none_or_one_tensor_at_first_are_restored():
    once, twice = Late(), Late()
    twice.load_state_dict(once.state_dict())
    inputs = batch()[:1]
    expected = outcome(chunks_at_once, lambda x: x.exp().sum(), [once], inputs, 4)
    found = outcome(grad_cache_step, lambda x: x.exp().sum(), [twice], inputs, 4)
    assert_same(found, expected)
    assert_same(dict(twice.named_buffers()), dict(once.named_buffers()))


def test_buffers_that_do_not_change_stay_good_for_other_graphs():
    encoders = [nn.Sequential(tower(5), nn.BatchNorm1d(D).double().eval()), tower(4)]
    images, texts = batch()
    other = encoders[0](images).sum()
    grad_cache_step(product, encoders, [images, texts], 4)
    other.backward()  # PyTorch raises an error if a saved buffer was modified


class Steps(nn.Linear):
    """It counts its calls in a buffer, next to one of several entries in one place of memory."""

    def __init__(self):
        super().__init__(5, D)
        self.register_buffer("steps", torch.zeros(()).expand(1))
        self.register_buffer("shared", torch.zeros(1).expand(4))

    def forward(self, x):
        self.steps.add_(1)
        return super().forward(x)


def test_expanded_buffers_are_restored_where_they_can_be_written_to():
    encoder = Steps().double()
    grad_cache_step(product, [encoder, encoder], [batch(5)[0]] * 2, 2)
    assert encoder.steps == 6


@pytest.mark.parametrize("size", [9, 13])
def test_a_last_chunk_of_one_row_goes_through_batch_norm(size):
    encoders = [nn.Sequential(encoder, nn.BatchNorm1d(D).double()) for encoder in towers()]
    assert grad_cache_step(itrloss.InfoNCELoss(), encoders, batch(size, size), 4).isfinite()


# ------------------------------------------------------------------------------------------- memory


class Held:
    """Hooks on saved tensors that count what autograd holds."""

    def __init__(self):
        self.now = 0
        self.most = 0

    def pack(self, x: Tensor) -> Kept:
        return Kept(x, self)

    def change(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


class Kept:
    """A tensor that autograd has saved."""

    def __init__(self, x: Tensor, held: Held):
        self.x = x.detach()  # an output would keep its own graph alive
        size = x.numel() * x.element_size()
        held.change(size)
        weakref.finalize(self, held.change, -size)


@contextlib.contextmanager
def saved_bytes() -> Iterator[Held]:
    held = Held()
    with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda kept: kept.x):
        yield held


@pytest.mark.parametrize("unused", [False, True])
def test_memory_is_that_of_one_chunk(unused):
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(6)]
    encoder = nn.Sequential(*layers, nn.Linear(5, D)).double()

    def images(x):
        """It may return an output that the loss does not use, whose graph no backward pass
        frees.
        """
        return encoder(x), encoder(x) if unused else x

    def loss(outputs, texts):
        return product(outputs[0], texts)

    encoders, inputs = [images, tower(4)], batch(400, 400)
    with saved_bytes() as of_a_chunk:
        whole(loss, encoders, [x[:20] for x in inputs])
    with saved_bytes() as of_the_batch:
        whole(loss, encoders, inputs)
    with saved_bytes() as of_the_step:
        grad_cache_step(loss, encoders, inputs, 20)
    assert of_the_step.most <= of_a_chunk.most < of_the_batch.most / 10


# -------------------------------------------------------------------------------- without gradients


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_the_loss_alone(context):
    """Buffers are those of one pass over the chunks."""
    encoder, alone = (nn.BatchNorm1d(5, momentum=0.5).double() for _ in range(2))
    loss = itrloss.InfoNCELoss(learnable=True)
    x, y = batch(6)[0], batch(6)[0].flip(0)
    with context():
        found = grad_cache_step(loss, [encoder, nn.Identity()], [x, y], 3)
        expected = loss(torch.cat([alone(x[:3]), alone(x[3:])]), y)
    assert_same(found, expected)
    assert torch.equal(encoder.running_mean, alone.running_mean)
    assert not any(p.grad is not None for p in (*encoder.parameters(), *loss.parameters()))


# --------------------------------------------------------------------------------- output and split


def last(out):
    return UserDict(word=out["hidden"][:, -1], other=None)


def test_output_is_what_the_loss_gets():
    """An encoder may return more, such as a sum without rows."""

    class Reading(Reader):
        def forward(self, input_ids):
            return {**super().forward(input_ids, output_all=True), "total": self.words.weight.sum()}

    def loss(x, y):
        return product(x["word"], y["word"])

    encoders = [Reading()] * 2
    inputs = [{"input_ids": WORDS}, WORDS]
    step = partial(grad_cache_step, output=last)
    expected = outcome(whole, lambda x, y: loss(last(x), last(y)), encoders, inputs)
    assert_same(outcome(step, loss, encoders, inputs, 3), expected)


class Patches(nn.Sequential):
    """An encoder of images, two rows of the input each."""

    def forward(self, x):
        return super().forward(x).unflatten(0, (-1, 2)).mean(1)


def test_split_cuts_inputs_that_have_no_rows():
    """Chunks may stand for any numbers of images."""
    encoders = [Patches(tower(5)), Patches(tower(5))]
    loss = itrloss.InfoNCELoss()
    inputs = [batch(2 * N)[0], batch(2 * N)[0].flip(0)]
    sizes = []

    def uneven(x, size):
        sizes.append(size)
        return x.split([2, 0, 12, 2 * N - 14])

    expected = outcome(whole, loss, encoders, inputs)
    step = partial(grad_cache_step, split=uneven)
    assert_same(outcome(step, loss, encoders, inputs, 5), expected)
    assert sizes == [5, 5]
    with torch.no_grad():
        assert_same(step(loss, encoders, inputs, 5), expected[0])


class AsComplex(nn.Module):
    """It has real numbers as real and as imaginary parts."""

    def forward(self, x):
        return torch.complex(x, x.flip(1))


def test_complex_outputs_have_a_gradient():
    def loss(x):
        return (x.real * x.imag).sum() + x.abs().pow(3).sum()

    encoder = tower(5)
    check_step(loss, [nn.Sequential(encoder, AsComplex())], batch()[:1], 4)
    grad_cache_step(loss, [nn.Sequential(encoder, AsComplex())], batch()[:1], 4)
    assert all(x.any() for x in take_gradients(encoder))


# ------------------------------------------------------------------------------------- wrong input

# Encoders' inputs, what they do with them, options of the step, and words of the message.
# `tests/test_messages.py` has more.
X = sample(6, 5)
WRONG: dict[str, tuple[list[Any], Any, dict[str, Any], str]] = {
    "more inputs": ([X, X], nn.Identity(), {}, r"inputs: .* 1 encoders, .* 2"),
    "numbers": ([[1.0]], nn.Identity(), {}, r"inputs\[0\]: .*at least 1, got shapes \[\]"),
    "no rows": ([X[:0]], nn.Identity(), {}, r"inputs\[0\]: .* at least 1"),
    "of a split": (
        [X],
        nn.Identity(),
        {"output": lambda x: (x, x[1:]), "split": lambda x, size: [x]},
        r"encoders\[0\]: .*\(6, ...\), got \(5, 5\)",
    ),
    "a split into nothing": (
        [X],
        nn.Identity(),
        {"split": lambda x, size: []},
        r"split: expected .* chunks of inputs\[0\], at least one, got none",
    ),
    "chunk_size": ([X], nn.Identity(), {"chunk_size": 0}, "chunk_size: .*got 0"),
    "a loss of rows": ([X], nn.Identity(), {"loss": torch.square}, r"loss: .* got \(6, 5\)"),
    "a loss of a name": ([X], nn.Identity(), {"loss": lambda x: {"loss": x}}, "loss: .* got dict"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(name):
    inputs, encoder, options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        grad_cache_step(
            encoders=[encoder], inputs=inputs, **{"loss": torch.sum, "chunk_size": 4, **options}
        )


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_an_output_without_a_tensor_is_refused(context):
    """A namespace, for one, cannot be cut and joined."""

    def encoder(x):
        return SimpleNamespace(embeds=2 * x)

    message = r"encoders\[0\]: expected it to return a tensor, .*, got SimpleNamespace; output=.*"
    with context(), pytest.raises(TypeError, match=message):
        grad_cache_step(lambda x: x.embeds.sum(), [encoder], [X], 4)
    value = grad_cache_step(torch.sum, [encoder], [X], 4, output=lambda out: out.embeds)
    torch.testing.assert_close(value, 2 * X.sum())


# ---------------------------------------------------------------------------------------- processes


class WithScale(nn.Module):
    """An encoder with random numbers and buffers that holds the scale of the loss, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(tower(5, dropout=0.3), nn.BatchNorm1d(D).double())
        self.scale = nn.Parameter(torch.tensor(2.0).double())
        self.frozen = nn.Parameter(torch.tensor(1.0).double(), requires_grad=False)

    def forward(self, x):
        return self.layers(x) * self.frozen

    def loss(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.scale * exponential(images, texts)


def test_a_scale_in_an_encoder_that_averages_is_set_aside_until_then():
    model = WithScale()
    inputs = [batch()[0], batch()[0].flip(0)]
    torch.manual_seed(1)
    expected = outcome(chunks_at_once, model.loss, [model] * 2, inputs, 4)
    torch.manual_seed(1)
    assert_same(outcome(grad_cache_step, model.loss, [Averaged(model)] * 2, inputs, 4), expected)


def test_an_error_in_the_backward_pass_leaves_gradients_as_they_were():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            raise RuntimeError("out of memory")

    encoder = Averaged(tower(5))
    images = batch()[:1]
    grad_cache_step(torch.sum, [encoder], images, 4)
    before = [x.grad.clone() for x in encoder.parameters()]
    with pytest.raises(RuntimeError, match="out of memory"):
        grad_cache_step(lambda x: Failing.apply(x.sum()), [encoder], images, 4)
    assert_same(take_gradients(encoder), before)


def mean_of(mine: list[Tensor | None], others: list[Tensor | None]) -> list[Tensor | None]:
    pairs = zip(mine, others, strict=True)
    return [None if x is None or y is None else (x + y) / 2 for x, y in pairs]


def steps_of_uneven_batches(rank: int) -> list[tuple]:
    """Gradients alone, those of both processes, and how often the latter were averaged.

    Processes have different numbers of chunks and would deadlock if each chunk were averaged.
    """
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append((WithScale(), tower(5, dropout=0.3)))
    alone, shared = models
    wrapped = [DistributedDataParallel(model) for model in shared]
    averages = []

    def average(_, bucket):
        averages.append(rank)
        future = dist.all_reduce(bucket.buffer() / 2, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    for model in wrapped:
        model.register_comm_hook(None, average)
    results = []
    for step, kind in enumerate(["two encoders", "two encoders", "one", "accumulates", "one"]):
        images = sample(4 + 4 * rank, 5, seed=10 * step + rank, dtype=torch.float64)
        texts = sample(4, 5, seed=10 * step + rank + 100, dtype=torch.float64)
        averages.clear()
        for function, encoders in ((chunks_at_once, alone), (grad_cache_step, wrapped)):
            torch.manual_seed(rank)
            if kind != "two encoders":
                encoders = [encoders[0]] * 2
            model = alone[0] if function is chunks_at_once else shared[0]
            with wrapped[0].no_sync() if kind == "accumulates" else contextlib.nullcontext():
                function(model.loss, encoders, [images, texts], 2)
        if kind != "accumulates":  # otherwise averaged with the next one
            results.append((take_gradients(*alone), take_gradients(*shared), len(averages)))
    return results


@pytest.mark.slow
def test_processes_average_gradients_once_a_step(tmp_path):
    first, second = run(steps_of_uneven_batches, tmp_path)
    for mine, others, count in zip(first, second, [2, 2, 1, 1], strict=True):
        mean = mean_of(mine[0], others[0])
        assert all(x is None or x.dim() < 2 or x.abs().max() > 1e-2 for x in mean)
        for _, found, averages in (mine, others):
            assert averages == count
            assert_same(found, mean)


def warnings_of_encoders(rank: int) -> list[list[str]]:
    """What is said of encoders whose gradients are exchanged, and of some whose are not."""
    wrapped, unused = (DistributedDataParallel(tower(5)) for _ in range(2))
    frozen, another = tower(5).requires_grad_(False), tower(5)
    said = []
    for encoders in (
        [wrapped, wrapped],
        [frozen, wrapped],
        [wrapped, another.forward],
        [unused.module, unused.module],
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            grad_cache_step(product, encoders, [batch()[0]] * 2, 4)
        said.append([str(x.message).partition(",")[0] for x in caught])
    return said


@pytest.mark.slow
def test_a_warning_says_that_processes_do_not_exchange_gradients(tmp_path):
    message = "processes do not exchange the gradients of this encoder"
    expected = [[], [], [f"encoders[1]: {message}"], [f"encoders[0]: {message}"]]
    assert run(warnings_of_encoders, tmp_path) == [expected, expected]


def test_an_input_with_a_graph_is_refused_where_each_chunk_would_go_back_through_it():
    stem = nn.Linear(D, D).double()
    x, y = torch.randn(2, N, D, dtype=torch.float64)
    encoders = tower(D), tower(D)
    loss = itrloss.InfoNCELoss()
    with pytest.raises(ValueError, match=r"^inputs\[0\]: expected tensors without a graph"):
        grad_cache_step(loss, encoders, (stem(x), y), 4)
    assert stem.weight.grad is None
    with_graph = stem(x)
    with torch.no_grad():  # nothing goes back
        grad_cache_step(loss, encoders, (with_graph, y), 4)
    grad_cache_step(loss, encoders, (stem(x), y), N)
    assert stem.weight.grad is not None
