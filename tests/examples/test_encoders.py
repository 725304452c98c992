"""The encoders: their numbers, which loops over their equations had, and their dropout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.oracle import Array
from support.stored import assert_stored_numbers
from support.versions import needs
from torch import Tensor, nn

from examples.retrieval import encoders
from examples.retrieval.concepts import normalized_graph
from examples.retrieval.config import Config
from examples.retrieval.data import pad
from examples.retrieval.encoders import (
    GPO,
    GuidedEnhancement,
    ImageEncoder,
    SelfGuidedEnhancement,
    SetDropout,
    SubEmbeddings,
    TextEncoder,
    add_global,
    averaged_bigru,
    sinusoid,
)
from examples.retrieval.models import ConceptBranch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


CAPTIONS = [[3, 4, 5, 6], [7, 8], [9, 10, 11, 12, 13, 14], [8, 7]]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape)


def padded() -> tuple[Tensor, Tensor]:
    """The captions with more padding than the longest needs."""
    words, lengths = pad(CAPTIONS)
    return torch.cat([words, torch.zeros(4, 3, dtype=torch.int64)], 1), lengths


def with_graph(branch: ConceptBranch) -> ConceptBranch:
    branch.graph.copy_(normalized_graph((torch.rand(4, 4) > 0.5).float()))
    return branch


LENGTHS = torch.tensor([5, 1, 3, 5])
TEXTS = Config(dim=16, word_dim=8, word_dropout=0.5, embedding_dropout=0.5)
# an encoder, and what it is called with
ENCODERS = {
    "gpo": (lambda: GPO(8, 8), lambda: (drawn(4, 5, 6), LENGTHS)),
    "sub-embeddings": (
        lambda: SubEmbeddings(6, 2),
        lambda: (drawn(4, 5, 6), drawn(4, 6), LENGTHS),
    ),
    "texts": (lambda: TextEncoder(TEXTS, 20), padded),
    "images": (lambda: ImageEncoder(TEXTS, 5), lambda: (drawn(2, 6, 5),)),
    "whole images": (
        lambda: ImageEncoder(Config(dim=8), 5, 3, "whole"),
        lambda: (torch.full((2, 4, 5), torch.nan), drawn(2, 3)),
    ),
    "self-guided": (lambda: SelfGuidedEnhancement(TEXTS, 5, 0), lambda: (drawn(3, 4, 5),)),
    "guided": (lambda: GuidedEnhancement(TEXTS, 5, 6), lambda: (drawn(3, 4, 5), drawn(3, 6))),
    "concepts": (
        lambda: with_graph(ConceptBranch(6, 4, 5)),
        lambda: ("text", drawn(3, 6)),
    ),
}


def numbers(name: str) -> list[float]:
    """Outputs in evaluation, and the lengths of the gradients of their squares by parameters."""
    torch.manual_seed(0)
    make, inputs = ENCODERS[name]
    encoder: nn.Module = make().eval()
    for buffer in encoder.buffers():  # statistics, and scales
        if buffer.is_floating_point() and "concepts" not in name:
            buffer.uniform_(0.5, 2)
    found = encoder(*inputs())
    outputs = torch.cat([x.flatten() for x in ([found] if torch.is_tensor(found) else found)])
    gradients = torch.autograd.grad(
        outputs.square().sum(), [*encoder.parameters()], allow_unused=True
    )
    return [*outputs.tolist(), *(0.0 if x is None else x.norm().item() for x in gradients)]


@pytest.mark.parametrize("group", [2, 30])
def test_numbers_are_those_that_loops_over_the_equations_had(group, monkeypatch):
    """Regions and words behind the end of a set play no part, nor does how many captions go
    through the text encoder at once.
    """
    monkeypatch.setattr(encoders, "GROUP", group)
    assert_stored_numbers("encoders", {name: numbers(name) for name in ENCODERS}, 1e-3)


@needs("autocast of float16 on the CPU", 2, 4)
def test_gpo_does_not_overflow_in_half_precision():
    pool = GPO(8, 8)
    features = torch.randn(2, 6, 4, requires_grad=True)
    with torch.autocast("cpu", torch.float16):
        pooled = pool(features.half(), torch.tensor([3, 6]))
    loss = 256.0 * pooled.float().sum()
    loss.backward()
    for leaf in (features, *pool.parameters()):
        assert torch.isfinite(leaf.grad).all()


# --- printed forms --------------------------------------------------------------------------------


def softmax(x: Sequence[float]) -> Array:
    return np.exp(x) / np.exp(x).sum()


def arrays(module: nn.Module) -> dict[str, Array]:
    return {name: x.detach().numpy() for name, x in module.named_parameters()}


def test_pooling_as_printed_is_a_two_layer_perceptron():
    pool = GPO(8, 6, as_printed=True)
    states = averaged_bigru(pool.gru, sinusoid(5, 8)[None], torch.tensor([5]))[0]
    p = arrays(pool.score)
    scores = []
    for state in states.detach().numpy():  # CODER's supplement, Eq. 2; USER, Eq. 13
        hidden = np.maximum(p["0.weight"] @ state + p["0.bias"], 0)
        scores.append((p["2.weight"] @ hidden + p["2.bias"]).item())
    features = torch.randn(1, 5, 3)
    ranked = -np.sort(-features[0].numpy(), axis=0)
    pooled = pool(features, torch.tensor([5]))[0]
    weights = softmax(np.array(scores) / 0.1)
    np.testing.assert_allclose(pooled.detach(), weights @ ranked, rtol=1e-5)


def test_sub_embeddings_as_printed_have_a_sigmoid_and_a_layer_normalisation():
    heads = SubEmbeddings(6, 2, as_printed=True).double()
    elements, pooled = torch.randn(4, 5, 6).double(), torch.randn(4, 6).double()
    sets, residuals = heads(elements, pooled, LENGTHS)
    p = arrays(heads)
    for n, k in np.ndindex(4, 2):  # DVSE, section III-B
        own = elements[n, : LENGTHS[n]].numpy()
        attention = softmax(
            (np.tanh(own @ p["attention.0.weight"].T) @ p["attention.2.weight"].T)[:, k]
        )
        residual = 1 / (1 + np.exp(-p["linear.weight"] @ (attention @ own) - p["linear.bias"]))
        total = pooled[n].numpy() + residual
        np.testing.assert_allclose(residuals[n, k].detach(), residual)
        normalised = (total - total.mean()) / np.sqrt(total.var() + 1e-5)
        np.testing.assert_allclose(sets[n, k].detach(), normalised)


def test_concepts_as_printed_are_queried_by_inner_products():
    branch = with_graph(ConceptBranch(6, 4, 5, as_printed=True)).double()
    queries = torch.randn(3, 6).double()
    concepts = branch.concepts().detach().numpy()
    matrix = arrays(branch)["queries.text.weight"]
    for query, found in zip(queries.numpy(), branch("text", queries), strict=True):  # CODER, Eq. 2
        attention = softmax([10.0 * (matrix @ query) @ concept for concept in concepts])
        np.testing.assert_allclose(found.detach(), attention @ concepts)


def test_the_global_feature_as_printed_is_added_by_softmax_weights():
    regions, whole = torch.randn(2, 4, 5).double(), torch.randn(2, 5).double()
    found = add_global(regions, whole, as_printed=True).numpy()
    for n in range(2):  # USER, Eq. 6 and 7
        own, v_glo = regions[n].numpy(), whole[n].numpy()
        attention = softmax(own @ v_glo)
        np.testing.assert_allclose(
            found[n], [v + a * v_glo for v, a in zip(own, attention, strict=True)]
        )


# --- dropout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_shared_dropout_takes_a_feature_from_the_whole_set(shared):
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
    text = TextEncoder(replace(TEXTS, embedding_dropout=0.0), 20)
    words, lengths = pad([[3, 4, 5, 6]])
    first = text(words, lengths)
    second = text(words, lengths)
    assert not torch.equal(first, second)
    text.eval()
    first = text(words, lengths)
    second = text(words, lengths)
    assert torch.equal(first, second)


def test_dropout_of_the_enhancement_is_in_both_of_its_branches():
    enhance = SelfGuidedEnhancement(replace(TEXTS, enhancement_dropout=0.4), 5, 0)
    seen: list[Tensor] = []
    enhance.dropout.register_forward_hook(lambda _, inputs, output: seen.append(output))
    regions = drawn(200, 4, 5)
    enhance(regions)
    local, whole = seen
    assert local.shape == (200, 4, 5) and whole.shape == (200, 5)
    for x in seen:
        assert (x == 0).float().mean().item() == pytest.approx(0.4, abs=0.05)
    enhance.eval()
    assert torch.equal(enhance(regions), enhance(regions))
