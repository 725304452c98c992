"""The step in chunks: gradients equal those of the whole batch, in the memory of one chunk, without
side effects.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections import UserDict, namedtuple
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cases import sample
from support.processes import both
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import itrloss
from itrloss.grad_cache import grad_cache_step

N, D = 10, 6
Words = namedtuple("Words", "embedding hidden lengths")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tower(width: int, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, D)
    ).double()


def batch(n: int = N, m: int | None = None) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 5).double(), torch.randn(n if m is None else m, 4).double()


def whole(loss, encoders, inputs, **kwargs):
    """The expected values: one graph of the whole batch."""
    result = loss(*(encoder(x) for encoder, x in zip(encoders, inputs, strict=True)), **kwargs)
    total = result[0] if isinstance(result, tuple) else result
    total.backward()
    return total.detach()


def by_chunks(loss, encoders, inputs, chunk_size, **kwargs):
    """Plain autograd over all chunks: other random numbers than those of the whole batch, and all
    graphs in memory.
    """
    outputs = [
        torch.cat([encoder(part) for part in x.split(chunk_size)])
        for encoder, x in zip(encoders, inputs, strict=True)
    ]
    total = loss(*outputs, **kwargs)
    total.backward()
    return total.detach()


def take_gradients(*modules: nn.Module) -> list[Tensor | None]:
    gradients = [p.grad for module in modules for p in module.parameters()]
    for module in modules:
        module.zero_grad()
    return gradients


def assert_same(found, expected, **tolerance) -> None:
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(found, expected, **tolerance)


def product(images: Tensor, texts: Tensor) -> Tensor:
    """Loss that couples all rows, without random numbers and with little memory."""
    return (images.sum(0) * texts.sum(0)).sum() + (images.sum(0) ** 3).sum()


def exponential(images: Tensor, texts: Tensor) -> Tensor:
    """Loss for encoders that end with BatchNorm, whose outputs sum to 0."""
    return (images.exp().sum(0) * texts.exp().sum(0)).mean()


class Called(nn.Module):
    """Encoder that counts its calls."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder, self.calls = encoder, 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        return self.encoder(*args, **kwargs)


# ---------------------------------------------------------------------------------------- gradients


def memory_loss() -> tuple[nn.Module, dict]:
    memory = itrloss.CoupledMemory(16, D, dtype=torch.float64)
    memory.enqueue(torch.randn(12, D).double(), torch.randn(12, D).double())
    keys = {"image_keys": torch.randn(N, D).double(), "text_keys": torch.randn(N, D).double()}
    return itrloss.MemoryDiversityContrastiveLoss(), {"memory": memory, **keys}


def with_ids() -> tuple[nn.Module, dict]:
    ids = torch.arange(N) // 2
    return itrloss.DiversityContrastiveLoss(), {"image_ids": ids, "text_ids": ids}


LOSSES = {
    "learnable": lambda: (itrloss.InfoNCELoss(learnable=True).double(), {}),
    "ids": with_ids,
    "triplet": lambda: (itrloss.TripletLoss(), {}),
    "memory": memory_loss,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunk_size", [1, 4, 5, N, 99])
def test_value_and_gradients_are_those_of_the_whole_batch(name, chunk_size):
    encoders, inputs = (tower(5), tower(4)), batch()
    criterion, kwargs = LOSSES[name]()
    expected = whole(criterion, encoders, inputs, **kwargs)
    gradients = take_gradients(*encoders, criterion)
    assert any(g.abs().max() > 1e-3 for g in gradients)
    found = grad_cache_step(criterion, encoders, inputs, chunk_size, **kwargs)
    assert not found.requires_grad
    assert_same(found, expected)
    assert_same(take_gradients(*encoders, criterion), gradients)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 12), st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_batches_of_any_sizes_can_be_cut_anywhere(n, m, chunk_size, seed):
    torch.manual_seed(seed)
    encoders, inputs = (tower(5), tower(4)), batch(n, m)
    ids = {"image_ids": torch.randint(0, 4, (n,)), "text_ids": torch.randint(0, 4, (m,))}
    criterion = itrloss.HubnessAwareLoss(scale=5.0)
    expected = whole(criterion, encoders, inputs, **ids), take_gradients(*encoders)
    assert_same(
        (
            grad_cache_step(criterion, encoders, inputs, chunk_size, **ids),
            take_gradients(*encoders),
        ),
        expected,
    )


def test_gradients_add_up_over_calls():
    encoders, batches = (tower(5), tower(4)), (batch(), batch())
    for inputs in batches:
        whole(product, encoders, inputs)
    expected = take_gradients(*encoders)
    for inputs in batches:
        grad_cache_step(product, encoders, inputs, 4)
    assert_same(take_gradients(*encoders), expected)


def test_inputs_may_want_gradients():
    encoders, inputs = (tower(5), tower(4)), batch()
    prompts = inputs[0].clone().requires_grad_()
    whole(product, encoders, (prompts, inputs[1]))
    expected, prompts.grad = prompts.grad, None
    take_gradients(*encoders)
    for p in encoders[0].parameters():
        p.requires_grad_(False)
    grad_cache_step(product, encoders, (prompts, inputs[1]), 4)
    assert_same(prompts.grad, expected)


def test_encoders_may_write_to_their_input():
    class Halving(nn.Module):
        def forward(self, x):
            return x.mul_(0.5)

    encoders, inputs = (nn.Sequential(Halving(), tower(5)), tower(4)), batch()
    copies = [x.clone() for x in inputs]
    expected = whole(product, encoders, copies), take_gradients(*encoders)
    assert_same(
        (grad_cache_step(product, encoders, inputs, 4), take_gradients(*encoders)), expected
    )


def test_one_encoder_may_serve_both_inputs():
    encoder, inputs = tower(5), (batch()[0], batch()[0])
    expected = whole(product, (encoder, encoder), inputs), take_gradients(encoder)
    assert_same(
        (grad_cache_step(product, (encoder, encoder), inputs, 4), take_gradients(encoder)), expected
    )


def test_scaler_scales_gradients_and_not_the_value():
    encoders, inputs = (tower(5), tower(4)), batch()
    expected = grad_cache_step(product, encoders, inputs, 4)
    gradients = take_gradients(*encoders)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert_same(grad_cache_step(product, encoders, inputs, 4, scaler=scaler), expected)
    assert_same(take_gradients(*encoders), [1024 * g for g in gradients])


# ------------------------------------------------------------------------------- inputs and outputs


class TextEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, D).double()

    def forward(self, tokens, lengths):
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        hidden = self.words(tokens) * mask[..., None]
        return Words(hidden.sum(1), hidden, lengths)


def of_words(images: Tensor, words: Words) -> Tensor:
    """Loss of three outputs, of which the last, the lengths, is not differentiable."""
    return (
        product(images, words.embedding)
        + (words.hidden.sum((0, 1)) ** 2 / words.lengths.sum()).sum()
    )


@pytest.mark.parametrize("form", [tuple, list, dict])
def test_encoders_take_and_return_several_tensors(form):
    encoders, (images, _) = (tower(5), TextEncoder()), batch()
    tokens, lengths = torch.randint(0, 20, (N, 7)), torch.randint(1, 8, (N,))
    words = {"lengths": lengths, "tokens": tokens} if form is dict else form((tokens, lengths))
    of_words(encoders[0](images), encoders[1](tokens, lengths)).backward()
    expected = take_gradients(*encoders)
    grad_cache_step(of_words, encoders, [images, words], 4)
    assert_same(take_gradients(*encoders), expected)


def test_loss_is_called_once_and_all_of_its_result_comes_back_without_a_graph():
    calls = []

    def loss(images, texts, weight):
        calls.append((images.shape, texts.shape))
        total = weight * product(images, texts)
        return total, {"half": total / 2, "name": "x"}, [images.mean()]

    encoders, inputs = (tower(5), tower(4)), batch()
    expected = whole(partial(loss, weight=2.0), encoders, inputs), take_gradients(*encoders)
    calls.clear()
    total, terms, (mean,) = grad_cache_step(loss, encoders, inputs, 3, weight=2.0)
    assert calls == [((N, D), (N, D))]
    assert_same((total, take_gradients(*encoders)), expected)
    assert terms["name"] == "x"
    assert_same(terms["half"], total / 2)
    assert not any(x.requires_grad for x in (total, terms["half"], mean))


@pytest.mark.parametrize("chunk_size", [3, 10])
def test_frozen_encoder_runs_once_and_then_one_chunk(chunk_size):
    images, texts = Called(tower(5)), Called(tower(4))
    images.requires_grad_(False)
    expected = whole(product, (images, texts), inputs := batch()), take_gradients(images, texts)
    images.calls = texts.calls = 0
    assert_same(
        (
            grad_cache_step(product, (images, texts), inputs, chunk_size),
            take_gradients(images, texts),
        ),
        expected,
    )
    chunks = -(-N // chunk_size)
    assert (images.calls, texts.calls) == (chunks + 1, 2 * chunks)


def test_what_a_module_trains_may_be_held_elsewhere():
    class Hidden(nn.Module):
        def __init__(self, encoder):
            super().__init__()
            self.held = [encoder]
            self.frozen = nn.Linear(D, D).double().requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.held[0](x))

    encoder, texts, inputs = tower(5), tower(4), batch()
    hidden = Hidden(encoder)
    expected = whole(product, (hidden, texts), inputs), take_gradients(encoder, texts)
    assert_same(
        (grad_cache_step(product, (hidden, texts), inputs, 3), take_gradients(encoder, texts)),
        expected,
    )


def test_chunk_without_a_gradient_does_not_end_the_pass():
    class Dropped(nn.Module):
        """Encoder whose only trained layer is not used in about half of the chunks."""

        def __init__(self):
            super().__init__()
            self.fixed, self.layer = tower(5).requires_grad_(False), nn.Linear(D, D).double()

        def forward(self, x):
            x = self.fixed(x)
            return self.layer(x) if torch.rand(()) < 0.5 else x

    encoders, inputs = (Dropped(), tower(4)), batch()
    for seed in range(4):
        torch.manual_seed(seed)
        by_chunks(product, encoders, inputs, 2)
        expected = take_gradients(*encoders)
        torch.manual_seed(seed)
        grad_cache_step(product, encoders, inputs, 2)
        assert_same(take_gradients(*encoders), expected)


def test_encoder_that_the_loss_ignores_is_not_run_again():
    encoders = Called(tower(5)), Called(tower(4))
    grad_cache_step(lambda images, texts: images.square().sum(), encoders, batch(), 5)
    assert (encoders[0].calls, encoders[1].calls) == (4, 2)
    assert take_gradients(encoders[1]) == [None] * 4


class Averaged(nn.Module):
    """Encoder that notes after which calls processes would average gradients, as those of DDP."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder, self.averages, self.averaged = encoder, True, []

    @contextlib.contextmanager
    def no_sync(self):
        self.averages = False
        yield
        self.averages = True

    def forward(self, x):
        if torch.is_grad_enabled():
            self.averaged.append(self.averages)
        return self.encoder(x)


def test_gradients_are_averaged_though_the_loss_ignores_an_encoders_last_input():
    encoder, x = Averaged(tower(5)), batch()[0]
    grad_cache_step(lambda images, others: images.square().sum(), (encoder, encoder), (x, x), 5)
    assert encoder.averaged == [False] * (len(encoder.averaged) - 1) + [True]


# ------------------------------------------------------------------------- random numbers, autocast


class Draws(nn.Module):
    """Encoder with dropout by the random numbers of PyTorch, NumPy and Python."""

    def __init__(self, width: int):
        super().__init__()
        self.tower = tower(width, dropout=0.4)

    def forward(self, x):
        x = x * torch.from_numpy(np.random.rand(*x.shape) < 0.7) * (1 + random.random())
        return self.tower(x)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def next_draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), np.random.rand(), random.random()


def noisy(images: Tensor, texts: Tensor) -> Tensor:
    return product(images * torch.rand(N, 1), texts * np.random.rand() * random.random())


@pytest.mark.parametrize("chunk_size", [4, 5, 10])
def test_second_pass_repeats_the_draws_of_the_first(chunk_size):
    encoders, inputs = (Draws(5), Draws(4)), batch()
    results = []
    for step in (by_chunks, grad_cache_step):
        seed_all(7)
        results.append(
            (step(noisy, encoders, inputs, chunk_size), take_gradients(*encoders), next_draws())
        )
    assert_same(results[1], results[0])
    assert results[1][2] == results[0][2]
    seed_all(8)
    assert not torch.allclose(grad_cache_step(noisy, encoders, inputs, chunk_size), results[0][0])


def test_draws_are_repeated_behind_hooks_that_draw():
    encoders, inputs, gradients = (Draws(5), Draws(4)), batch(), []
    for drawn in (0, 3):
        hooks = [
            p.register_hook(lambda g, n=drawn: g + 0 * torch.rand(n).sum())
            for p in encoders[0].parameters()
        ]
        seed_all(7)
        grad_cache_step(product, encoders, inputs, 3)
        gradients.append(take_gradients(*encoders))
        for hook in hooks:
            hook.remove()
    assert_same(gradients[1], gradients[0])


def test_draws_are_repeated_behind_an_encoder_that_is_not_run_again():
    encoders, inputs = (Draws(5).requires_grad_(False), Draws(4)), batch()
    results = []
    for step in (by_chunks, grad_cache_step):
        seed_all(7)
        results.append((step(product, encoders, inputs, 4), take_gradients(*encoders)))
    assert_same(results[1], results[0])


class Island(nn.Module):
    """Encoder of which a part disables autocast."""

    def __init__(self, width: int):
        super().__init__()
        self.tower, self.exact = tower(width, dropout=0.3).float(), nn.Linear(D, D)

    def forward(self, x):
        x = self.tower(x)
        with torch.autocast("cpu", enabled=False):
            return self.exact(x.float()).bfloat16()


@pytest.mark.parametrize("loss", [product, itrloss.InfoNCELoss()])
def test_autocast_gives_the_bits_that_chunks_with_all_graphs_kept_give(loss):
    encoders, inputs = (Island(5), Island(4)), [x.float() for x in batch()]
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        parts = [[e(part) for part in x.split(4)] for e, x in zip(encoders, inputs, strict=True)]
        leaves = [torch.cat(outputs).detach().requires_grad_() for outputs in parts]
        expected = loss(*leaves)
    expected.backward()
    for outputs, leaf in zip(parts, leaves, strict=True):
        for output, gradient in zip(outputs, leaf.grad.split(4), strict=True):
            output.backward(gradient)
    gradients = take_gradients(*encoders)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        found = grad_cache_step(loss, encoders, inputs, 4)
    assert torch.equal(found, expected.detach())
    assert all(map(torch.equal, take_gradients(*encoders), gradients))


# ------------------------------------------------------------------------------------------ buffers


class Rebinding(nn.Module):
    """Encoder that reads a buffer in training, and replaces it by another tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5).double())

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))
        self.layers = nn.Sequential(
            Rebinding(), spectral, nn.Tanh(), nn.Linear(5, D), nn.BatchNorm1d(D)
        ).double()

    def forward(self, x):
        return self.layers(x)

    def encode(self, x, k=1):
        return k * self.layers(x)


@pytest.mark.parametrize(
    "encoder_of", [lambda m: m, lambda m: m.encode, lambda m: partial(partial(m.encode), k=1)]
)
def test_buffers_are_read_and_left_as_after_one_pass(encoder_of):
    once, twice = WithBuffers(), WithBuffers()
    twice.load_state_dict(once.state_dict())
    inputs = batch(9, 9)[0], batch(9, 9)[0]
    by_chunks(exponential, (once, once), inputs, 3)
    encoder = encoder_of(twice)
    grad_cache_step(exponential, (encoder, encoder), inputs, 3)
    buffers = dict(twice.named_buffers())
    assert buffers["layers.4.num_batches_tracked"] == 6
    assert_same(buffers, dict(once.named_buffers()))
    gradients = take_gradients(once)
    assert all(g.dim() == 1 or g.abs().max() > 1e-2 for g in gradients)
    assert_same(take_gradients(twice), gradients)


def test_buffers_that_do_not_change_stay_good_for_other_graphs():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.rand(D).double())
            self.tower = tower(5)

        def forward(self, x):
            return self.tower(x) * self.scale

    encoders, inputs = (Positions(), tower(4)), batch()
    encoders[0](inputs[0]).sum().backward()
    expected = take_gradients(encoders[0])
    other = encoders[0](inputs[0]).sum()
    grad_cache_step(product, encoders, inputs, 4)
    take_gradients(encoders[0])
    other.backward()  # PyTorch raises an error if a saved buffer was modified
    assert_same(take_gradients(encoders[0]), expected)


# ------------------------------------------------------------------------------------------- memory


@contextmanager
def saved_bytes():
    """Maximum storage saved by autograd at any time."""
    held, most = 0, [0]

    class Kept:
        def __init__(self, x):
            nonlocal held
            # an output would keep its own graph alive
            self.x, size = x.detach(), x.numel() * x.element_size()
            held += size
            most[0] = max(most[0], held)
            weakref.finalize(self, release, size)

    def release(size):
        nonlocal held
        held -= size

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.x):
        yield most


@pytest.mark.parametrize("unused", [False, True])
def test_memory_is_that_of_one_chunk(unused):
    images = nn.Sequential(
        *(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(6)), nn.Linear(5, D)
    ).double()

    def both(x):
        """Encoder that also returns an output without a gradient, whose graph no backward pass
        frees.
        """
        return (images(x), images(x) if unused else x)

    def loss(pair, texts):
        return product(pair[0], texts)

    encoders, inputs = (both, tower(4)), batch(400)
    with saved_bytes() as small:
        whole(loss, encoders, [x[:20] for x in inputs])
    with saved_bytes() as large:
        whole(loss, encoders, inputs)
    with saved_bytes() as most:
        grad_cache_step(loss, encoders, inputs, 20)
    assert most[0] <= small[0] < large[0] / 10


# ---------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "chunk_size, error", [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)]
)
def test_chunk_size_is_a_positive_integer(chunk_size, error):
    with pytest.raises(error, match="chunk_size"):
        grad_cache_step(product, (tower(5), tower(4)), batch(), chunk_size)


@pytest.mark.parametrize(
    "encoders, inputs, error, message",
    [
        (1, 2, ValueError, r"inputs: .* 1 encoders, .* got 2"),
        (0, 0, ValueError, r"inputs: .* at least one"),
        (2, [[1.0], [2.0]], TypeError, r"inputs\[0\]: .* float"),
        (1, [None], TypeError, r"inputs\[0\]: .* NoneType"),
        (1, [()], ValueError, r"inputs\[0\]: .* \[\]"),
        (1, [torch.rand(0, 5)], ValueError, r"inputs\[0\]: .* at least 1"),
        (1, [torch.tensor(1.0)], ValueError, r"inputs\[0\]: .*\(\)"),
        (
            2,
            [torch.rand(4, 5), (torch.rand(4, 2), torch.rand(5))],
            ValueError,
            r"inputs\[1\]: .*\(4, 2\), \(5,\)",
        ),
        (
            1,
            [{"x": torch.rand(4, 2), "y": torch.tensor(4)}],
            ValueError,
            r"inputs\[0\]: .*\(4, 2\), \(\)",
        ),
        (1, [torch.rand(4, 5, requires_grad=True) * 2], ValueError, r"inputs\[0\]: .* graph"),
    ],
)
def test_inputs_are_named_that_do_not_fit(encoders, inputs, error, message):
    inputs = batch()[:inputs] if isinstance(inputs, int) else inputs
    with pytest.raises(error, match=message):
        grad_cache_step(product, [tower(5)] * encoders, inputs, 4)


def test_single_encoder_or_input_is_no_list():
    with pytest.raises(TypeError, match=r"encoders: .* Sequential"):
        grad_cache_step(product, tower(5), batch(), 4)
    with pytest.raises(TypeError, match=r"inputs: .* Tensor"):
        grad_cache_step(product, (tower(5),), batch()[0], 4)


@pytest.mark.parametrize(
    "encoder, error, message",
    [
        (lambda x: x.mean(), ValueError, r"encoders\[0\]: .*\(4, ...\), got \(\)"),
        (lambda x: x.T, ValueError, r"encoders\[0\]: .*\(4, ...\), got \(5, 4\)"),
        (lambda x: (x, x.numpy()), TypeError, r"encoders\[0\]: .* ndarray"),
        (lambda x: None, TypeError, r"encoders\[0\]: .* NoneType"),
        (lambda x: (x, x if len(x) == 4 else None), TypeError, "from all chunks or from none"),
        (lambda x: x[:, : len(x)], ValueError, r"encoders\[0\]: .*\(4, 4\), \(4, 4\), \(2, 2\)"),
    ],
)
def test_encoders_are_named_whose_output_does_not_fit(encoder, error, message):
    with pytest.raises(error, match=message):
        grad_cache_step(lambda x: x.sum(), (encoder,), batch()[:1], 4)


@pytest.mark.parametrize(
    "loss, error",
    [
        (itrloss.InfoNCELoss(reduction="none"), ValueError),
        (lambda images, texts: images, ValueError),
        (lambda images, texts: {"loss": images.sum()}, TypeError),
        (lambda images, texts: 1.0, TypeError),
    ],
)
def test_loss_returns_a_scalar(loss, error):
    with pytest.raises(error, match="loss"):
        grad_cache_step(loss, (tower(5), tower(4)), batch(), 4)


# --------------------------------------------------------------------------------- output and split


class Reading(nn.Module):
    """A text encoder with more outputs than a loss needs, one of which has no rows."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, D).double()

    def forward(self, input_ids):
        hidden = self.words(input_ids).tanh()
        return {"hidden": hidden, "pooled": hidden.mean(1), "total": hidden.sum(), "name": {1, 2}}


def test_output_is_what_the_loss_gets():
    encoder, words = Reading(), torch.arange(4 * N).view(N, 4) * 7 % 20
    expected = product(encoder(words)["pooled"], encoder(words + 0)["pooled"])
    expected.backward()
    gradients = take_gradients(encoder)
    inputs = [{"input_ids": words}, words]
    found = grad_cache_step(
        product, [encoder, encoder], inputs, 3, output=lambda out: out["pooled"]
    )
    assert_same(found, expected.detach())
    assert_same(take_gradients(encoder), gradients)


def test_output_may_be_a_mapping_of_tensors_and_none():
    encoder, words = Reading(), torch.arange(4 * N).view(N, 4) * 7 % 20
    expected = product(encoder(words)["hidden"][:, -1], encoder(words)["hidden"][:, -1])
    expected.backward()
    gradients = take_gradients(encoder)

    def last(out):
        return UserDict(word=out["hidden"][:, -1], other=None)

    def loss(first, second):
        return product(first["word"], second["word"])

    found = grad_cache_step(loss, [encoder, encoder], [words, words], 3, output=last)
    assert_same(found, expected.detach())
    assert_same(take_gradients(encoder), gradients)


class Patches(nn.Module):
    """An image encoder of patches: those of all images are in one tensor, with numbers of them."""

    def __init__(self):
        super().__init__()
        self.tower = tower(5, dropout=0.3)

    def forward(self, patches, counts):
        parts = self.tower(patches).split(counts.tolist())
        return torch.stack([part.mean(0) for part in parts])


def images_of(inputs: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """Chunks of some images, with their patches."""
    patches = inputs["patches"].split(inputs["counts"].tolist())
    chunks = []
    for at in range(0, len(patches), size):
        rows = slice(at, at + size)
        chunks.append({"patches": torch.cat(patches[rows]), "counts": inputs["counts"][rows]})
    return chunks


@pytest.mark.parametrize("size", [1, 3, 4, 99])
def test_split_cuts_inputs_that_have_no_rows(size):
    counts = torch.tensor([2, 1, 4, 3, 1, 1, 5])
    inputs = {"patches": torch.randn(17, 5).double(), "counts": counts}
    encoders = [Patches(), Patches()]
    torch.manual_seed(1)
    outputs = []
    for encoder, x in zip(encoders, [inputs, inputs], strict=True):
        outputs.append(torch.cat([encoder(**chunk) for chunk in images_of(x, size)]))
    expected = product(*outputs)
    expected.backward()
    gradients = take_gradients(*encoders)
    torch.manual_seed(1)
    found = grad_cache_step(product, encoders, [inputs, inputs], size, split=images_of)
    assert_same(found, expected.detach())
    assert_same(take_gradients(*encoders), gradients)


def test_chunks_of_a_split_may_have_any_numbers_of_rows():
    encoders, inputs = (tower(5), tower(4)), batch()
    expected = whole(itrloss.InfoNCELoss(), encoders, inputs)
    gradients = take_gradients(*encoders)
    sizes = []

    def uneven(x, size):
        sizes.append(size)
        return x.split([1, 0, 6, N - 7])

    found = grad_cache_step(itrloss.InfoNCELoss(), encoders, inputs, 5, split=uneven)
    assert_same(found, expected)
    assert_same(take_gradients(*encoders), gradients)
    assert sizes == [5, 5]
    with torch.no_grad():
        found = grad_cache_step(itrloss.InfoNCELoss(), encoders, inputs, 5, split=uneven)
    assert_same(found, expected)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"output": "pooled"}, TypeError, "output: expected a function or None, got 'pooled'"),
        ({"split": 3}, TypeError, "split: expected a function or None, got 3"),
        ({"split": lambda x, size: x}, TypeError, "split: .* return a list, got Tensor"),
        ({"split": lambda x, size: []}, ValueError, "split: .* at least one chunk, got none"),
        (
            {"split": lambda x, size: [x[:3], None]},
            TypeError,
            r"split\(inputs\[0\]\)\[1\]: expected a tensor, .* got NoneType",
        ),
        ({"output": lambda x: x.sum()}, ValueError, r"encoders\[0\]: .*\(4, ...\), got \(\)"),
        (
            {"output": lambda x: x.sum(), "split": lambda x, size: [x]},
            ValueError,
            r"encoders\[0\]: .*\(B, ...\), got \(\)",
        ),
        (
            {"output": lambda x: (x, x[1:]), "split": lambda x, size: [x]},
            ValueError,
            r"encoders\[0\]: .*\(10, ...\), got \(9, 6\)",
        ),
    ],
)
def test_output_and_split_are_named_if_they_do_not_fit(options, error, message):
    with pytest.raises(error, match=message):
        grad_cache_step(product, (tower(5), tower(4)), batch(), 4, **options)


# ---------------------------------------------------------------------------------------- processes


class Scaled(nn.Module):
    """An encoder that holds the scale of the loss, as CLIP does; another scale is for nothing."""

    def __init__(self):
        super().__init__()
        self.tower = tower(5)
        self.scale = nn.Parameter(torch.tensor(2.0).double())
        self.frozen = nn.Parameter(torch.tensor(1.0).double(), requires_grad=False)

    def forward(self, x):
        return self.tower(x) * self.frozen


def scaled(model: Scaled, images: Tensor, texts: Tensor) -> Tensor:
    return model.scale * product(images, texts) / 100


def scales_worker(rank: int) -> list[tuple]:
    """Gradients of steps with the loss's scale in the encoder: alone, and of both processes."""
    torch.manual_seed(0)
    alone = Scaled()
    torch.manual_seed(0)
    model = Scaled()
    wrapped = DistributedDataParallel(model)
    results = []
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        inputs = batch(6)[0], batch(6)[0]
        by_chunks(partial(scaled, alone), [alone] * 2, inputs, 4)
        if step == 2:  # accumulated, and averaged with the next one
            with wrapped.no_sync():
                grad_cache_step(partial(scaled, model), [wrapped] * 2, inputs, 4)
            continue
        grad_cache_step(partial(scaled, model), [wrapped] * 2, inputs, 4)
        results.append((take_gradients(alone), take_gradients(model)))
    return results


@pytest.mark.slow
def test_processes_average_the_gradient_of_a_scale_in_the_encoder(tmp_path):
    results = both(scales_worker, tmp_path)
    assert len(results[0]) == 3
    for (alone, found), (alone_too, found_too) in zip(*results, strict=True):
        mean = [None if a is None else (a + b) / 2 for a, b in zip(alone, alone_too, strict=True)]
        assert sum(g is None for g in mean) == 1
        assert_same(found, mean)
        assert_same(found_too, mean)


def towers_with_buffers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(tower(5, dropout=0.3), nn.BatchNorm1d(D).double()), tower(4, dropout=0.3)]


def worker(rank: int) -> list[tuple]:
    """The processes have different numbers of chunks and would deadlock if each chunk
    synchronised.
    """
    alone, models = towers_with_buffers(), towers_with_buffers()
    wrapped, met = [DistributedDataParallel(model) for model in models], []

    def average(_, bucket):
        met.append(rank)
        tensor = bucket.buffer() / 2
        return (
            dist.all_reduce(tensor, async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    for model in wrapped:
        model.register_comm_hook(None, average)
    results = []
    for step, siamese in enumerate((False, False, True, True)):
        torch.manual_seed(10 * step + rank)
        inputs = batch(4 + 4 * rank, 4)
        inputs = (inputs[0], inputs[0] + 1) if siamese else inputs
        met.clear()
        for function, given_to in ((by_chunks, alone), (grad_cache_step, wrapped)):
            torch.manual_seed(rank)
            function(exponential, [given_to[0]] * 2 if siamese else given_to, inputs, 2)
        results.append((take_gradients(*alone), take_gradients(*models), len(met)))
    return results


@pytest.mark.slow
def test_processes_meet_once_a_step_and_average_gradients(tmp_path):
    results = both(worker, tmp_path)
    for step, ((alone, found, met), (alone_too, found_too, met_too)) in enumerate(
        zip(*results, strict=True)
    ):
        siamese = step >= 2
        mean = [None if a is None else (a + b) / 2 for a, b in zip(alone, alone_too, strict=True)]
        assert met == met_too == (1 if siamese else 2)
        assert all(g is None or g.dim() == 1 or g.abs().max() > 1e-2 for g in mean)
        assert_same(found, mean)
        assert_same(found_too, mean)


def test_expanded_buffers_are_left_alone():
    encoder = torch.nn.Linear(3, 4)
    encoder.register_buffer("shared", torch.zeros(1).expand(4))
    x = torch.randn(5, 3), torch.randn(5, 3)
    loss = itrloss.grad_cache_step(itrloss.InfoNCELoss(), (encoder, encoder), x, chunk_size=2)
    assert loss.isfinite()


def test_expanded_buffers_of_one_number_are_restored():
    class Steps(nn.Linear):
        def forward(self, x):
            self.steps.add_(1)
            return super().forward(x)

    encoder = Steps(3, 4)
    encoder.register_buffer("steps", torch.zeros(()).expand(1))
    itrloss.grad_cache_step(
        itrloss.InfoNCELoss(), (encoder, encoder), (torch.randn(5, 3),) * 2, chunk_size=2
    )
    assert encoder.steps == 6


class Tokens(UserDict):
    """What a tokenizer returns: a mapping that is no dict."""


class Reader(nn.Module):
    """A text encoder as those of transformers are called."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, D).double()

    def forward(self, input_ids, attention_mask=None, scale=1.0, output_all=False):
        hidden = self.words(input_ids) * scale
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        return Tokens(pooled=hidden.mean(1), hidden=hidden if output_all else None, scale=scale)


WORDS = torch.arange(4 * N).view(N, 4) * 7 % 20
MASK = (torch.arange(4) < 1 + torch.arange(N)[:, None] % 4).double()


@pytest.mark.parametrize(
    "inputs",
    [
        Tokens(input_ids=WORDS, attention_mask=MASK),
        Tokens(input_ids=WORDS, attention_mask=None, output_all=True),
        {"input_ids": WORDS, "scale": 2.0},
        {"input_ids": WORDS, "attention_mask": MASK, "output_all": True},
        (WORDS, None, 3),
        [WORDS, MASK, 0.5, False],
    ],
)
def test_mappings_none_and_flags_are_passed_on(inputs):
    images, texts = tower(5), Reader()
    pixels = batch()[0]
    loss = itrloss.InfoNCELoss()

    def objective(x, y):
        return loss(x, y["pooled"])

    call = texts(*inputs) if isinstance(inputs, (tuple, list)) else texts(**inputs)
    expected = objective(images(pixels), call)
    expected.backward()
    gradients = [p.grad.clone() for p in [*images.parameters(), *texts.parameters()]]
    for p in [*images.parameters(), *texts.parameters()]:
        p.grad = None
    found = grad_cache_step(objective, [images, texts], [pixels, inputs], 3)
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(
        [p.grad for p in [*images.parameters(), *texts.parameters()]], gradients
    )


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("learnable", [False, True])
def test_without_gradients_it_is_the_loss_alone(context, learnable: bool):
    encoders, inputs = [tower(5), tower(4)], batch()
    loss = itrloss.InfoNCELoss(learnable=learnable)
    expected = loss(*(encoder(x) for encoder, x in zip(encoders, inputs, strict=True)))
    with context():
        found = grad_cache_step(loss, encoders, inputs, 3)
    torch.testing.assert_close(found, expected.detach())
    assert all(p.grad is None for encoder in encoders for p in encoder.parameters())


def test_without_gradients_buffers_are_updated_once_for_each_chunk():
    encoder = nn.BatchNorm1d(5, momentum=0.5).double()
    alone = nn.BatchNorm1d(5, momentum=0.5).double()
    x = torch.randn(6, 5).double()
    with torch.no_grad():
        grad_cache_step(itrloss.InfoNCELoss(), [encoder, nn.Identity()], [x, x], 3)
        alone(x[:3])
        alone(x[3:])
    assert torch.equal(encoder.running_mean, alone.running_mean)


@pytest.mark.parametrize("size", [9, 13, 12, 4])
def test_a_last_chunk_of_one_row_goes_through_batch_norm(size):
    encoders = [nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    inputs = [sample(size, 8), sample(size, 8, seed=1)]
    value = itrloss.grad_cache_step(itrloss.InfoNCELoss(), encoders, inputs, 4)
    assert value.isfinite()
