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
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import sample
from support.processes import run
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
            module.zero_grad()
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
@pytest.mark.parametrize("chunk_size", [1, 4, 5, N, 99])
def test_value_and_gradients_are_those_of_the_whole_batch(chunk_size):
    encoders = towers()
    loss = itrloss.InfoNCELoss(learnable=True).double()
    ids = torch.arange(N) // 2
    options = {"image_ids": ids, "text_ids": ids}
    check_step(loss, encoders, batch(), chunk_size, **options)
    assert not grad_cache_step(loss, encoders, batch(), chunk_size, **options).requires_grad
    assert any(gradient.abs().max() > 1e-3 for gradient in take_gradients(*encoders))


@pytest.mark.filterwarnings("ignore::itrloss.SuspiciousInputWarning")
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_batches_of_any_sizes_can_be_cut_anywhere(n, m, chunk_size, seed):
    torch.manual_seed(seed)
    ids = {"image_ids": torch.randint(0, 4, (n,)), "text_ids": torch.randint(0, 4, (m,))}
    check_step(itrloss.HubnessAwareLoss(scale=5.0), towers(), batch(n, m), chunk_size, **ids)


def test_gradients_add_up_over_calls():
    encoders = towers()
    first, second = batch(), batch(7, 7)
    whole(product, encoders, first)
    expected = outcome(whole, product, encoders, second)
    grad_cache_step(product, encoders, first, 4)
    assert_same(outcome(grad_cache_step, product, encoders, second, 4), expected)


def test_inputs_may_want_gradients():
    encoders = towers()
    images, texts = batch()
    images.requires_grad_()
    whole(product, encoders, [images, texts])
    expected = images.grad
    images.grad = None
    encoders[0].requires_grad_(False)
    grad_cache_step(product, encoders, [images, texts], 4)
    assert_same(images.grad, expected)


def test_scaler_scales_gradients_and_not_the_value():
    encoders = towers()
    value, *gradients = outcome(grad_cache_step, product, encoders, batch(), 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = outcome(grad_cache_step, product, encoders, batch(), 4, scaler=scaler)
    assert_same(found, [value, *(1024 * x for x in gradients)])


# ----------------------------------------------------------------------------------------- encoders


class Called(nn.Module):
    """An encoder that counts its calls."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.encoder(x)


class Halving(nn.Module):
    """It writes to its input."""

    def forward(self, x):
        return x.mul_(0.5)


class Hidden(nn.Module):
    """Its parameters are not those that a loss trains through it."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.held = [encoder]
        self.frozen = nn.Linear(D, D).double().requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.held[0](x))


def test_one_encoder_may_serve_both_inputs():
    encoder = tower(5)
    check_step(product, [encoder, encoder], [batch()[0], batch(N)[0].flip(0)], 4)


def test_encoders_may_write_to_their_input():
    encoders = [nn.Sequential(Halving(), tower(5)), tower(4)]
    expected = outcome(whole, product, encoders, batch())
    assert_same(outcome(grad_cache_step, product, encoders, batch(), 4), expected)


def test_what_a_module_trains_may_be_held_elsewhere():
    encoder, texts = tower(5), tower(4)
    encoders = [Hidden(encoder), texts]
    expected = [whole(product, encoders, batch()), *take_gradients(encoder, texts)]
    found = [grad_cache_step(product, encoders, batch(), 3), *take_gradients(encoder, texts)]
    assert_same(found, expected)


@pytest.mark.parametrize(("chunk_size", "chunks"), [(3, 4), (10, 1)])
def test_a_frozen_encoder_runs_once_and_then_one_chunk(chunk_size, chunks):
    images = Called(tower(5)).requires_grad_(False)
    texts = Called(tower(4))
    check_step(product, [images, texts], batch(), chunk_size)
    assert images.calls == 1 + chunks + 1  # the first is that of the whole batch
    assert texts.calls == 1 + 2 * chunks


def test_an_encoder_that_the_loss_ignores_is_not_run_again():
    images, texts = Called(tower(5)), Called(tower(4))
    grad_cache_step(lambda x, y: x.square().sum(), [images, texts], batch(), 5)
    assert images.calls == 4
    assert texts.calls == 2
    assert take_gradients(texts) == [None] * 4


UNTRAINED = r"encoders\[1\]: what it returns needs no gradient, so that nothing in it is trained"


class WithoutGraph(nn.Module):
    """An encoder with parameters to train that leaves out their graph."""

    def __init__(self, width: int):
        super().__init__()
        self.encoder = tower(width)

    @torch.no_grad()
    def forward(self, x):
        return self.encoder(x)

    def detached(self, x):
        return self.encoder(x).detach()


@pytest.mark.parametrize("form", ["module", "method", "partial"])
def test_an_encoder_with_parameters_whose_output_has_no_graph_is_warned_of(form):
    encoder = WithoutGraph(4)
    forms = {"module": encoder, "method": encoder.detached, "partial": partial(encoder.detached)}
    for _ in range(2):  # whatever gradients are left from the step before
        with pytest.warns(itrloss.SuspiciousInputWarning, match=UNTRAINED):
            grad_cache_step(product, [tower(5), forms[form]], batch(), 4)
        encoder.encoder[0].weight.grad = torch.ones_like(encoder.encoder[0].weight)
    encoder.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", itrloss.SuspiciousInputWarning)
        grad_cache_step(product, [tower(5), forms[form]], batch(), 4)


def test_output_may_not_take_the_graph_away():
    with pytest.warns(itrloss.SuspiciousInputWarning, match=r"encoders\[0\]: .*Leave out .*detach"):
        grad_cache_step(product, towers(), batch(), 4, output=lambda x: x.detach())


def test_functions_are_warned_of_if_nothing_is_trained():
    encoder = tower(4)

    def features(x):  # that were computed before
        return x @ torch.ones(x.shape[1], D).double()

    def detached(x):
        return encoder(x).detach()

    with pytest.warns(itrloss.SuspiciousInputWarning, match=r"encoders\[0\]: what it returns"):
        grad_cache_step(product, [features, detached], batch(), 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", itrloss.SuspiciousInputWarning)
        grad_cache_step(product, [features, encoder], batch(), 4)


class Locked(nn.Module):
    """A model whose image encoder is frozen, with methods for both sides."""

    def __init__(self):
        super().__init__()
        self.images = tower(5).requires_grad_(False)
        self.texts = tower(4)

    def encode_images(self, x):
        return self.images(x)

    def encode_texts(self, x):
        return self.texts(x)


def test_a_method_may_be_of_the_frozen_part_of_a_model():
    model = Locked()
    encoders = [model.encode_images, model.encode_texts]
    expected = [whole(product, encoders, batch()), *take_gradients(model)]
    found = [grad_cache_step(product, encoders, batch(), 4), *take_gradients(model)]
    assert_same(found, expected)


class FrozenWithScale(nn.Module):
    """A frozen encoder that holds the scale of the loss."""

    def __init__(self):
        super().__init__()
        self.frozen = tower(5).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()).double())

    def forward(self, x):
        return self.frozen(x)


def test_a_frozen_encoder_may_hold_the_scale_of_the_loss():
    encoder = FrozenWithScale()
    check_step(lambda x, y: product(x, y) * encoder.scale, [encoder, tower(4)], batch(), 4)


class Sometimes(nn.Module):
    """Its only trained layer is not used in about half of the chunks."""

    def __init__(self):
        super().__init__()
        self.fixed = tower(5).requires_grad_(False)
        self.layer = nn.Linear(D, D).double()

    def forward(self, x):
        x = self.fixed(x)
        return self.layer(x) if torch.rand(()) < 0.5 else x


@pytest.mark.parametrize("seed", range(4))
def test_a_chunk_without_a_gradient_does_not_end_the_pass(seed):
    encoders = [Sometimes(), tower(4)]
    torch.manual_seed(seed)
    expected = outcome(chunks_at_once, product, encoders, batch(), 2)
    torch.manual_seed(seed)
    assert_same(outcome(grad_cache_step, product, encoders, batch(), 2), expected)


class Averaged(nn.Module):
    """An encoder that notes in which passes processes would average gradients, as those of DDP."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder
        self.averages = True
        self.averaged: list[bool] = []

    @contextlib.contextmanager
    def no_sync(self):
        self.averages = False
        yield
        self.averages = True

    def forward(self, x):
        if torch.is_grad_enabled():
            self.averaged.append(self.averages)
        return self.encoder(x)


@pytest.mark.parametrize("ignores_second", [False, True])
def test_gradients_are_averaged_once_whatever_the_loss_uses(ignores_second):
    encoder = Averaged(tower(5))
    images = batch()[0]

    def loss(x, y):
        return x.square().sum() if ignores_second else (x * y).sum()

    grad_cache_step(loss, [encoder, encoder], [images, images], 5)
    *before, last = encoder.averaged
    assert before
    assert last
    assert not any(before)


# ------------------------------------------------------------------------------- inputs and outputs

WORDS = torch.arange(4 * N).view(N, 4) * 7 % 20
LENGTHS = 1 + torch.arange(N) % 4
MASK = (torch.arange(4) < LENGTHS[:, None]).double()


class Words(NamedTuple):
    embedding: Tensor
    hidden: Tensor
    lengths: Tensor


class TextEncoder(nn.Module):
    """It takes two tensors and returns three, of which the last has no gradient."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, D).double()

    def forward(self, tokens, lengths):
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        hidden = self.words(tokens) * mask[..., None]
        return Words(hidden.sum(1), hidden, lengths)


def of_words(images: Tensor, words: Words) -> Tensor:
    squares = words.hidden.sum((0, 1)) ** 2
    return product(images, words.embedding) + (squares / words.lengths.sum()).sum()


def test_encoders_take_and_return_several_tensors():
    check_step(of_words, [tower(5), TextEncoder()], [batch()[0], (WORDS, LENGTHS)], 4)


class Tokens(UserDict):
    """What a tokenizer returns: a mapping that is no dict."""


class Reader(nn.Module):
    """A text encoder as those of transformers are called; an output may be missing."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, D).double()

    def forward(self, input_ids, attention_mask=None, scale=1.0, output_all=False):
        hidden = scale * self.words(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        return Tokens(pooled=hidden.mean(1), hidden=hidden if output_all else None, scale=scale)


@pytest.mark.parametrize(
    "texts",
    [
        Tokens(input_ids=WORDS, attention_mask=MASK),
        Tokens(input_ids=WORDS, attention_mask=None, output_all=True),
        {"input_ids": WORDS, "scale": 2.0},
        {"input_ids": WORDS, "attention_mask": MASK, "output_all": True},
        (WORDS, None, 3),
        [WORDS, MASK, 0.5, False],
    ],
)
def test_mappings_none_and_flags_are_passed_on(texts):
    def loss(images, words):
        return product(images, words["pooled"])

    check_step(loss, [tower(5), Reader()], [batch()[0], texts], 3)


def test_the_loss_is_called_once_and_all_of_its_result_comes_back_without_a_graph():
    calls = []

    def loss(images, texts, weight):
        calls.append((images.shape, texts.shape))
        total = weight * product(images, texts)
        return total, {"half": total / 2, "name": "x"}, [images.mean()]

    encoders = towers()
    expected = outcome(whole, lambda x, y: 2 * product(x, y), encoders, batch())
    total, terms, (mean,) = grad_cache_step(loss, encoders, batch(), 3, weight=2.0)
    assert calls == [((N, D), (N, D))]
    assert_same([total, *take_gradients(*encoders)], expected)
    assert terms["name"] == "x"
    assert_same(terms["half"], total / 2)
    assert not any(x.requires_grad for x in (total, terms["half"], mean))


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


@pytest.mark.parametrize("chunk_size", [4, 5, 10])
def test_the_second_pass_repeats_the_draws_of_the_first(chunk_size):
    encoders = [Draws(5), Draws(4)]
    seed_all(7)
    expected = outcome(chunks_at_once, noisy, encoders, batch(), chunk_size)
    wanted_draws = next_draws()
    seed_all(7)
    assert_same(outcome(grad_cache_step, noisy, encoders, batch(), chunk_size), expected)
    assert next_draws() == wanted_draws
    seed_all(8)
    assert not torch.allclose(grad_cache_step(noisy, encoders, batch(), chunk_size), expected[0])


def test_draws_are_repeated_behind_hooks_that_draw():
    encoders = [Draws(5), Draws(4)]
    seed_all(7)
    expected = outcome(grad_cache_step, product, encoders, batch(), 3)
    for parameter in encoders[0].parameters():
        parameter.register_hook(lambda gradient: gradient + 0 * torch.rand(3).sum())
    seed_all(7)
    assert_same(outcome(grad_cache_step, product, encoders, batch(), 3), expected)


def test_draws_are_repeated_behind_an_encoder_that_is_not_run_again():
    encoders = [Draws(5).requires_grad_(False), Draws(4)]
    seed_all(7)
    expected = outcome(chunks_at_once, product, encoders, batch(), 4)
    seed_all(7)
    assert_same(outcome(grad_cache_step, product, encoders, batch(), 4), expected)


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


def chunks_with_all_graphs(loss: Any, encoders: Any, inputs: Any, chunk_size: int) -> Tensor:
    """The same passes, with the graphs of all chunks in memory, under autocast."""
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        parts = []
        for encoder, x in zip(encoders, inputs, strict=True):
            parts.append([encoder(part) for part in x.split(chunk_size)])
        leaves = [torch.cat(outputs).detach().requires_grad_() for outputs in parts]
        value = loss(*leaves)
    value.backward()
    for outputs, leaf in zip(parts, leaves, strict=True):
        for output, gradient in zip(outputs, leaf.grad.split(chunk_size), strict=True):
            output.backward(gradient)
    return value.detach()


@pytest.mark.parametrize("loss", [product, itrloss.InfoNCELoss()])
def test_autocast_gives_the_bits_of_chunks_with_all_graphs(loss):
    encoders = [Island(5), Island(4)]
    inputs = [x.float() for x in batch()]
    torch.manual_seed(1)
    expected = outcome(chunks_with_all_graphs, loss, encoders, inputs, 4)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        found = outcome(grad_cache_step, loss, encoders, inputs, 4)
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


class Positions(nn.Module):
    """An encoder with a buffer that does not change."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.rand(D).double())
        self.tower = tower(5)

    def forward(self, x):
        return self.tower(x) * self.scale


def test_buffers_that_do_not_change_stay_good_for_other_graphs():
    encoders = [Positions(), tower(4)]
    images, texts = batch()
    encoders[0](images).sum().backward()
    expected = take_gradients(encoders[0])
    other = encoders[0](images).sum()
    grad_cache_step(product, encoders, [images, texts], 4)
    take_gradients(encoders[0])
    other.backward()  # PyTorch raises an error if a saved buffer was modified
    assert_same(take_gradients(encoders[0]), expected)


def test_expanded_buffers_are_left_alone():
    encoder = tower(5)
    encoder.register_buffer("shared", torch.zeros(1).expand(4))
    assert grad_cache_step(product, [encoder, encoder], [batch()[0]] * 2, 2).isfinite()


class Steps(nn.Linear):
    def forward(self, x):
        self.steps.add_(1)
        return super().forward(x)


def test_expanded_buffers_of_one_number_are_restored():
    encoder = Steps(5, D).double()
    encoder.register_buffer("steps", torch.zeros(()).expand(1))
    grad_cache_step(product, [encoder, encoder], [batch(5)[0]] * 2, 2)
    assert encoder.steps == 6


@pytest.mark.parametrize("size", [9, 13, 12, 4])
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
@pytest.mark.parametrize("learnable", [False, True])
def test_without_gradients_it_is_the_loss_alone(context, learnable):
    encoders = towers()
    loss = itrloss.InfoNCELoss(learnable=learnable)
    expected, *_ = outcome(whole, loss, encoders, batch())
    with context():
        found, *gradients = outcome(grad_cache_step, loss, encoders, batch(), 3)
    torch.testing.assert_close(found, expected)
    assert not any(x is not None for x in gradients)


def test_without_gradients_buffers_are_updated_once_for_each_chunk():
    encoder, alone = (nn.BatchNorm1d(5, momentum=0.5).double() for _ in range(2))
    x = batch(6)[0]
    with torch.no_grad():
        grad_cache_step(product, [encoder, nn.Identity()], [x, x], 3)
        alone(x[:3])
        alone(x[3:])
    assert torch.equal(encoder.running_mean, alone.running_mean)


# --------------------------------------------------------------------------------- output and split


class Reading(nn.Module):
    """A text encoder with more outputs than a loss needs, one of which has no rows."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, D).double()

    def forward(self, input_ids):
        hidden = self.words(input_ids).tanh()
        return {"hidden": hidden, "pooled": hidden.mean(1), "total": hidden.sum(), "name": {1, 2}}


def pooled(out):
    return out["pooled"]


def last(out):
    return UserDict(word=out["hidden"][:, -1], other=None)


@pytest.mark.parametrize(
    ("output", "loss"),
    [(pooled, product), (last, lambda first, second: product(first["word"], second["word"]))],
)
def test_output_is_what_the_loss_gets(output, loss):
    encoders = [Reading()] * 2
    inputs = [{"input_ids": WORDS}, WORDS]
    step = partial(grad_cache_step, output=output)
    expected = outcome(whole, lambda x, y: loss(output(x), output(y)), encoders, inputs)
    assert_same(outcome(step, loss, encoders, inputs, 3), expected)


class Patches(nn.Module):
    """An image encoder of patches: those of all images are in one tensor, with numbers of them."""

    def __init__(self):
        super().__init__()
        self.tower = tower(5, dropout=0.3)

    def forward(self, patches, counts):
        parts = self.tower(patches).split(counts.tolist())
        return torch.stack([part.mean(0) for part in parts])


def images_of(inputs: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """Return chunks of some images, with their patches."""
    patches = inputs["patches"].split(inputs["counts"].tolist())
    chunks = []
    for start in range(0, len(patches), size):
        rows = slice(start, start + size)
        chunks.append({"patches": torch.cat(patches[rows]), "counts": inputs["counts"][rows]})
    return chunks


@pytest.mark.parametrize("size", [1, 3, 4, 99])
def test_split_cuts_inputs_that_have_no_rows(size):
    encoders = [Patches(), Patches()]
    counts = torch.tensor([2, 1, 4, 3, 1, 1, 5])
    images = {"patches": batch(17)[0], "counts": counts}
    torch.manual_seed(1)
    outputs = []
    for encoder in encoders:
        outputs.append(torch.cat([encoder(**chunk) for chunk in images_of(images, size)]))
    value = product(*outputs)
    value.backward()
    expected = [value.detach(), *take_gradients(*encoders)]
    torch.manual_seed(1)
    step = partial(grad_cache_step, split=images_of)
    assert_same(outcome(step, product, encoders, [images, images], size), expected)


def test_chunks_of_a_split_may_have_any_numbers_of_rows():
    encoders = towers()
    loss = itrloss.InfoNCELoss()
    sizes = []

    def uneven(x, size):
        sizes.append(size)
        return x.split([1, 0, 6, N - 7])

    expected = outcome(whole, loss, encoders, batch())
    assert_same(
        outcome(partial(grad_cache_step, split=uneven), loss, encoders, batch(), 5), expected
    )
    assert sizes == [5, 5]
    with torch.no_grad():
        found = grad_cache_step(loss, encoders, batch(), 5, split=uneven)
    assert_same(found, expected[0])


# ------------------------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("chunk_size", "error"),
    [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)],
)
def test_chunk_size_is_a_positive_integer(chunk_size, error):
    with pytest.raises(error, match="chunk_size"):
        grad_cache_step(product, towers(), batch(), chunk_size)


IMAGES = sample(4, 5)
WRONG_INPUTS = {
    "more than encoders": ([IMAGES, IMAGES, IMAGES], ValueError, r"inputs: .* 2 encoders, .* 3"),
    "numbers": ([[1.0], [2.0]], TypeError, r"inputs\[0\]: .* float"),
    "None": ([None, IMAGES], TypeError, r"inputs\[0\]: .* NoneType"),
    "an empty tuple": ([(), IMAGES], ValueError, r"inputs\[0\]: .* \[\]"),
    "no rows": ([IMAGES[:0], IMAGES], ValueError, r"inputs\[0\]: .* at least 1"),
    "no dimension": ([torch.tensor(1.0), IMAGES], ValueError, r"inputs\[0\]: .*\(\)"),
    "tensors of other lengths": (
        [IMAGES, (IMAGES, torch.rand(5))],
        ValueError,
        r"inputs\[1\]: .*\(4, 5\), \(5,\)",
    ),
    "a tensor without rows in a mapping": (
        [{"x": IMAGES, "y": torch.tensor(4)}, IMAGES],
        ValueError,
        r"inputs\[0\]: .*\(4, 5\), \(\)",
    ),
    "a tensor with a graph": (
        [2 * IMAGES.clone().requires_grad_(), IMAGES],
        ValueError,
        r"inputs\[0\]: .* graph",
    ),
    "a tensor": (IMAGES, TypeError, r"inputs: .* Tensor"),
}


@pytest.mark.parametrize("name", WRONG_INPUTS)
def test_inputs_that_do_not_fit_are_named(name):
    inputs, error, message = WRONG_INPUTS[name]
    with pytest.raises(error, match=message):
        grad_cache_step(product, [nn.Identity(), nn.Identity()], inputs, 4)


def test_encoders_are_a_list_of_at_least_one():
    with pytest.raises(TypeError, match=r"encoders: .* Sequential"):
        grad_cache_step(product, tower(5), batch(), 4)
    with pytest.raises(ValueError, match=r"inputs: .* at least one"):
        grad_cache_step(product, [], [], 4)


@pytest.mark.parametrize(
    ("encoder", "error", "message"),
    [
        (lambda x: x.mean(), ValueError, r"encoders\[0\]: .*\(4, ...\), got \(\)"),
        (lambda x: x.T, ValueError, r"encoders\[0\]: .*\(4, ...\), got \(5, 4\)"),
        (lambda x: (x, x.numpy()), TypeError, r"encoders\[0\]: .* ndarray"),
        (lambda x: None, TypeError, r"encoders\[0\]: .* NoneType"),
        (lambda x: (x, x if len(x) == 4 else None), TypeError, "from all chunks or from none"),
        (lambda x: x[:, : len(x)], ValueError, r"encoders\[0\]: .*\(4, 4\), \(4, 4\), \(2, 2\)"),
    ],
)
def test_encoders_whose_output_does_not_fit_are_named(encoder, error, message):
    with pytest.raises(error, match=message):
        grad_cache_step(lambda x: x.sum(), [encoder], batch()[:1], 4)


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (itrloss.InfoNCELoss(reduction="none"), ValueError),
        (lambda images, texts: images, ValueError),
        (lambda images, texts: {"loss": images.sum()}, TypeError),
        (lambda images, texts: 1.0, TypeError),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss, error):
    with pytest.raises(error, match="loss"):
        grad_cache_step(loss, towers(), batch(), 4)


def one_chunk(x, size):
    return [x]


WRONG_OPTIONS = {
    "a name": ({"output": "pooled"}, TypeError, "output: expected a function or None, got 'pooled"),
    "a number": ({"split": 3}, TypeError, "split: expected a function or None, got 3"),
    "chunks in a tensor": (
        {"split": lambda x, size: x},
        TypeError,
        "split: .* return a list, got Tensor",
    ),
    "no chunk": (
        {"split": lambda x, size: []},
        ValueError,
        "split: .* at least one chunk, got none",
    ),
    "None for a chunk": (
        {"split": lambda x, size: [x[:3], None]},
        TypeError,
        r"split\(inputs\[0\]\)\[1\]: expected a tensor, .* got NoneType",
    ),
    "an output without rows": (
        {"output": lambda x: x.sum()},
        ValueError,
        r"encoders\[0\]: .*\(4, ...\), got \(\)",
    ),
    "an output without rows of a split": (
        {"output": lambda x: x.sum(), "split": one_chunk},
        ValueError,
        r"encoders\[0\]: .*\(B, ...\), got \(\)",
    ),
    "outputs of other lengths": (
        {"output": lambda x: (x, x[1:]), "split": one_chunk},
        ValueError,
        r"encoders\[0\]: .*\(10, ...\), got \(9, 6\)",
    ),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_output_and_split_that_do_not_fit_are_named(name):
    options, error, message = WRONG_OPTIONS[name]
    with pytest.raises(error, match=message):
        grad_cache_step(product, towers(), batch(), 4, **options)


# ---------------------------------------------------------------------------------------- processes


def mean_of(mine: list[Tensor | None], others: list[Tensor | None]) -> list[Tensor | None]:
    pairs = zip(mine, others, strict=True)
    return [None if x is None or y is None else (x + y) / 2 for x, y in pairs]


class Scaled(nn.Module):
    """An encoder that holds the scale of the loss, as CLIP does, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.tower = tower(5)
        self.scale = nn.Parameter(torch.tensor(2.0).double())
        self.frozen = nn.Parameter(torch.tensor(1.0).double(), requires_grad=False)

    def forward(self, x):
        return self.tower(x) * self.frozen

    def loss(self, images: Tensor, texts: Tensor) -> Tensor:
        return self.scale * product(images, texts) / 100


def test_a_scale_in_an_encoder_that_averages_gets_its_gradient():
    """It is set aside until the pass in which processes average the encoder's gradients."""
    model = Scaled()
    encoder = Averaged(model)
    check_step(model.loss, [encoder, encoder], [batch()[0], batch()[0].flip(0)], 4)
    grad_cache_step(model.loss, [encoder, encoder], [batch()[0]] * 2, 4)
    assert model.scale.grad.abs() > 1e-3


def steps_with_a_scale(rank: int) -> list[tuple]:
    """Gradients of steps with the loss's scale in the encoder: alone, and of both processes."""
    torch.manual_seed(0)
    alone = Scaled()
    torch.manual_seed(0)
    model = Scaled()
    wrapped = DistributedDataParallel(model)
    results = []
    for step in range(4):
        images = sample(2, 6, 5, seed=10 * step + rank, dtype=torch.float64)
        chunks_at_once(alone.loss, [alone] * 2, images, 4)
        if step == 2:  # accumulated, and averaged with the next one
            with wrapped.no_sync():
                grad_cache_step(model.loss, [wrapped] * 2, list(images), 4)
        else:
            grad_cache_step(model.loss, [wrapped] * 2, list(images), 4)
            results.append((take_gradients(alone), take_gradients(model)))
    return results


@pytest.mark.slow
def test_processes_average_the_gradient_of_a_scale_in_the_encoder(tmp_path):
    first, second = run(steps_with_a_scale, tmp_path)
    assert len(first) == 3
    for (alone, found), (others_alone, others_found) in zip(first, second, strict=True):
        mean = mean_of(alone, others_alone)
        assert sum(x is None for x in mean) == 1
        assert_same(found, mean)
        assert_same(others_found, mean)


def warnings_of_encoders(rank: int) -> list[list[str]]:
    """What is said of encoders whose gradients are exchanged, and of some whose are not."""
    model = Scaled()
    wrapped = DistributedDataParallel(model)
    frozen, another = tower(5).requires_grad_(False), tower(5)
    unused = DistributedDataParallel(tower(5))
    images = list(sample(2, 6, 5, seed=rank, dtype=torch.float64))
    said = []
    for encoders in (
        [wrapped, wrapped],
        [frozen, wrapped],
        [wrapped, another.forward],
        [unused.module, unused.module],
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            grad_cache_step(model.loss, encoders, images, 4)
        said.append([str(x.message).partition(",")[0] for x in caught])
    return said


@pytest.mark.slow
def test_a_warning_says_that_processes_do_not_exchange_gradients(tmp_path):
    message = "processes do not exchange the gradients of this encoder"
    expected = [[], [], [f"encoders[1]: {message}"], [f"encoders[0]: {message}"]]
    assert run(warnings_of_encoders, tmp_path) == [expected, expected]


def towers_with_buffers() -> list[nn.Module]:
    torch.manual_seed(0)
    images = nn.Sequential(tower(5, dropout=0.3), nn.BatchNorm1d(D).double())
    return [images, tower(4, dropout=0.3)]


def steps_of_uneven_batches(rank: int) -> list[tuple]:
    """Processes have different numbers of chunks and would deadlock if each chunk were averaged."""
    alone, models = towers_with_buffers(), towers_with_buffers()
    wrapped = [DistributedDataParallel(model) for model in models]
    averages = []

    def average(_, bucket):
        averages.append(rank)
        future = dist.all_reduce(bucket.buffer() / 2, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    for model in wrapped:
        model.register_comm_hook(None, average)
    results = []
    for step, one_encoder in enumerate((False, False, True, True)):
        seed = 10 * step + rank
        images = sample(4 + 4 * rank, 5, seed=seed, dtype=torch.float64)
        texts = sample(4, 4, seed=seed + 100, dtype=torch.float64)
        inputs = [images, images + 1] if one_encoder else [images, texts]
        averages.clear()
        for function, encoders in ((chunks_at_once, alone), (grad_cache_step, wrapped)):
            torch.manual_seed(rank)
            if one_encoder:
                encoders = [encoders[0]] * 2
            function(exponential, encoders, inputs, 2)
        results.append((take_gradients(*alone), take_gradients(*models), len(averages)))
    return results


@pytest.mark.slow
def test_processes_average_gradients_once_a_step(tmp_path):
    first, second = run(steps_of_uneven_batches, tmp_path)
    encoders = [2, 2, 1, 1]
    for mine, others, count in zip(first, second, encoders, strict=True):
        mean = mean_of(mine[0], others[0])
        assert all(x is None or x.dim() == 1 or x.abs().max() > 1e-2 for x in mean)
        for _, found, averages in (mine, others):
            assert averages == count
            assert_same(found, mean)
