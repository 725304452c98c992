"""The encoders, against loops over their equations."""

from __future__ import annotations

import math

import pytest
import torch

from examples.retrieval import encoders
from examples.retrieval.data import pad
from examples.retrieval.encoders import (
    GPO,
    GuidedEnhancement,
    ImageEncoder,
    SelfGuidedEnhancement,
    SetDropout,
    SubEmbeddings,
    TextEncoder,
)

# --- pooling --------------------------------------------------------------------------------------


def pooling_weights(gpo: GPO, length: int) -> list[float]:
    """The weights of the elements of a set, from the largest to the smallest."""
    codes = torch.zeros(1, length, 32)
    for t in range(length):
        for k in range(16):
            angle = t / 10000 ** (2 * k / 32)
            codes[0, t, 2 * k] = math.sin(angle)
            codes[0, t, 2 * k + 1] = math.cos(angle)
    outputs, _ = gpo.gru(codes)
    hidden = outputs[0]
    mean_of_directions = (hidden[:, :32] + hidden[:, 32:]) / 2
    scores = gpo.score(mean_of_directions)[:, 0]
    return torch.softmax(scores / 0.1, dim=0).tolist()


def test_gpo_agrees_with_a_loop_over_sets_and_dimensions():
    torch.manual_seed(0)
    gpo = GPO()
    lengths = torch.tensor([5, 1, 3, 5])
    features = torch.randn(4, 5, 6)
    expected = torch.empty(4, 6)
    for b, length in enumerate(lengths.tolist()):
        weights = pooling_weights(gpo, length)
        for d in range(6):
            elements = features[b, :length, d].tolist()
            ranked = sorted(elements, reverse=True)
            weighted = [w * x for w, x in zip(weights, ranked, strict=True)]
            expected[b, d] = sum(weighted)
    found = gpo(features, lengths)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_gpo_does_not_overflow_in_half_precision():
    torch.manual_seed(0)
    pool = GPO(8, 8)
    features = torch.randn(2, 6, 4, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        pooled = pool(features.half(), torch.tensor([3, 6]))
    loss = 256.0 * pooled.float().sum()
    loss.backward()
    for leaf in (features, *pool.parameters()):
        assert torch.isfinite(leaf.grad).all()


def test_sub_embeddings_leave_padding_out():
    torch.manual_seed(0)
    heads = SubEmbeddings(6, 2)
    elements = torch.randn(3, 5, 6)
    pooled = torch.randn(3, 6)
    lengths = torch.tensor([5, 2, 3])
    sets, residuals = heads(elements, pooled, lengths)
    for b, length in enumerate(lengths.tolist()):
        one = slice(b, b + 1)
        alone = heads(elements[one, :length], pooled[one], torch.tensor([length]))
        torch.testing.assert_close((sets[one], residuals[one]), alone)


# --- texts and images -----------------------------------------------------------------------------


def test_text_encoder_leaves_padding_out():
    torch.manual_seed(0)
    text = TextEncoder(20, 8, 16, word_dropout=0.5, embedding_dropout=0.5).eval()
    captions = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14]]
    words, lengths = pad(captions)
    zeros = torch.zeros(3, 4, dtype=torch.int64)
    padded = torch.cat([words, zeros], dim=1)
    together = text(padded, lengths)
    alone = []
    for caption in captions:
        own_words, own_length = pad([caption])
        alone.append(text(own_words, own_length))
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-6)


def test_text_encoder_distinguishes_the_order_of_words():
    torch.manual_seed(0)
    text = TextEncoder(20, 8, 16).eval()
    words, lengths = pad([[3, 4, 5], [5, 4, 3]])
    a, b = text(words, lengths)
    assert (a - b).abs().max() > 1e-3


def test_image_encoder_ignores_the_order_of_regions():
    torch.manual_seed(0)
    image = ImageEncoder(5, 16).eval()
    regions = torch.randn(2, 6, 5)
    turned_round = regions.flip(1)
    torch.testing.assert_close(image(regions), image(turned_round), rtol=0, atol=1e-6)


def test_image_encoder_of_whole_pictures_ignores_regions():
    torch.manual_seed(0)
    encoder = ImageEncoder(5, 8, whole_dim=3, whole=True).eval()
    encoder.whole_mean.copy_(torch.tensor([1.0, 2.0, 0.0]))
    encoder.whole_std.copy_(torch.tensor([2.0, 1.0, 0.5]))
    wholes = torch.tensor([[9.0, 4.0, -4.0], [0.0, 1.0, 1.0]])
    standard = torch.tensor([[1.0, 0.0, -4.0], [-0.5, -1.0, 2.0]])
    regions = torch.full((2, 4, 5), torch.nan)
    found = encoder(regions, wholes)
    wanted = encoder.linear(standard) + encoder.mlp(standard)
    torch.testing.assert_close(found, wanted)


def test_text_encoder_runs_in_groups_as_it_would_in_one(monkeypatch):
    torch.manual_seed(0)
    text = TextEncoder(20, 8, 16)
    sizes = torch.randint(1, 12, (30,)).tolist()
    captions = [torch.randint(1, 20, (n,)).tolist() for n in sizes]
    words, lengths = pad(captions)

    def outcome(group: int) -> list[torch.Tensor]:
        """The embeddings, and the gradients of their squares by the parameters."""
        monkeypatch.setattr(encoders, "GROUP", group)
        out = text(words, lengths)
        gradients = torch.autograd.grad(out.square().sum(), list(text.parameters()))
        return [out, *gradients]

    torch.testing.assert_close(outcome(group=7), outcome(group=30))


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_shared_dropout_takes_a_feature_from_the_whole_set(shared):
    torch.manual_seed(0)
    dropout = SetDropout(0.3, shared)
    kept = dropout(torch.ones(200, 6, 50))
    scaled = torch.ones(()).div(0.7).item()
    assert set(kept.unique().tolist()) == {0, scaled}
    share_of_zeros = (kept == 0).float().mean()
    assert share_of_zeros.item() == pytest.approx(0.3, abs=0.02)
    first_element_of_each = kept[:, :1].expand_as(kept)
    assert torch.equal(kept, first_element_of_each) == shared
    first_set = kept[:1].expand_as(kept)
    assert not torch.equal(first_set, kept)  # independent for each set
    dropout.eval()
    assert torch.equal(dropout(kept), kept)


def test_word_dropout_acts_in_training_only():
    torch.manual_seed(0)
    text = TextEncoder(20, 8, 16, word_dropout=0.5)
    words, lengths = pad([[3, 4, 5, 6]])
    first = text(words, lengths)
    second = text(words, lengths)
    assert not torch.equal(first, second)
    text.eval()
    first = text(words, lengths)
    second = text(words, lengths)
    assert torch.equal(first, second)


# --- USER: enhancement of regions -----------------------------------------------------------------


def with_global(regions: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Eq. 6 and 7 for one picture, region by region."""
    powers = [math.exp(float(whole @ region)) for region in regions]
    shares = [power / sum(powers) for power in powers]
    length = math.sqrt(sum(share**2 for share in shares))
    enhanced = []
    for region, share in zip(regions, shares, strict=True):
        enhanced.append(region + share / length * whole)
    return torch.stack(enhanced)


def test_self_guided_enhancement_is_that_of_the_equations():
    torch.manual_seed(0)
    module = SelfGuidedEnhancement(5).double().eval().requires_grad_(False)
    for norm in (module.local_norm, module.whole_norm):
        norm.running_mean.normal_()  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        norm.weight.uniform_(0.5, 2)
        norm.bias.normal_()

    def tanh_of_norm(norm, x):
        scaled = (x - norm.running_mean) / torch.sqrt(norm.running_var + norm.eps)
        return torch.tanh(norm.weight * scaled + norm.bias)

    regions = torch.randn(3, 4, 5, dtype=torch.float64)
    for picture, found in zip(regions, module(regions), strict=True):
        average = sum(picture) / len(picture)  # Eq. 1
        whole = tanh_of_norm(module.whole_norm, module.whole.weight @ average)
        powers = []
        for region in picture:
            local = tanh_of_norm(module.local_norm, module.local.weight @ region)
            score = module.score.weight[0] @ (whole * local)  # Eq. 3
            powers.append(math.exp(float(score)))
        summed = torch.zeros(5, dtype=torch.float64)
        for power, region in zip(powers, picture, strict=True):
            summed = summed + power / sum(powers) * region
        wanted = with_global(picture, summed / summed.norm())
        torch.testing.assert_close(found, wanted)


def test_guided_enhancement_is_that_of_the_equations():
    torch.manual_seed(0)
    module = GuidedEnhancement(6, 5).double().eval().requires_grad_(False)
    regions = torch.randn(3, 4, 5, dtype=torch.float64)
    wholes = torch.randn(3, 6, dtype=torch.float64)
    norm, first, linear, _, second, last = module.mlp
    enhanced = module(regions, wholes)
    for picture, whole, found in zip(regions, wholes, enhanced, strict=True):
        deviation = torch.sqrt(whole.var(correction=0) + norm.eps)
        x = (whole - whole.mean()) / deviation
        x = x / math.sqrt(1 + first.eps)  # initial running statistics
        x = linear.weight @ x + linear.bias
        gate = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        x = x * gate
        x = x / math.sqrt(1 + second.eps)
        x = last.weight @ x + last.bias
        torch.testing.assert_close(found, with_global(picture, x))
