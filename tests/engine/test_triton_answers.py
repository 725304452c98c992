"""Answers of the Triton engine against the float64 reference of the tests."""

from __future__ import annotations

import pytest
import torch
from support.answers import ANSWERS, evaluate
from support.cases import (
    case,
    embeddings,
    similarity,
    upstream,
)
from support.on_triton import OF_KERNELS, moved

from itrloss import Similarity
from itrloss.engine import triton as engine
from itrloss.engine.terms import pair_term

pytestmark = OF_KERNELS


def test_a_term_of_ones_own_takes_the_tiles_of_torch(few_tiles):
    @pair_term
    def cube(scores):
        return scores**3

    v, w = moved(*embeddings(5, 5, dtype=torch.float32))
    found = similarity(v, w, (None, None), "triton").both.sum(cube)
    torch.testing.assert_close(found, similarity(v, w, (None, None), "dense").both.sum(cube))


@pytest.mark.parametrize(
    "name", ["logsumexp below", "logsumexp between", "logsumexp above, over all", "sum between"]
)
@pytest.mark.parametrize("view", [lambda s: s, lambda s: s.both], ids=["rows", "both"])
def test_limits_have_kernels(name, view, few_tiles, monkeypatch):
    """Their values and gradients are those of `test_triton_random`."""
    used = []
    for name_of in ("sums", "gradients"):
        function = getattr(engine, name_of)
        monkeypatch.setattr(
            engine, name_of, lambda *args, function=function: used.append(1) or function(*args)
        )
    v, w, ids, grads = case("wide")
    evaluate(ANSWERS[name], *moved(v.float(), w.float()), moved(*ids), "triton", grads, view)
    assert len(used) == 2


def test_the_same_bits_again():
    v, w = moved(*embeddings(20, 40, 16, dtype=torch.bfloat16))
    ids = moved(torch.arange(20), torch.arange(40) // 2)

    def outcome():
        return evaluate(ANSWERS["logsumexp"], v, w, ids, "triton", moved(*upstream(20, 40)))

    torch.testing.assert_close(outcome(), outcome(), rtol=0, atol=0)


def test_what_triton_cannot_do_is_refused(monkeypatch):
    v, w = embeddings(3, 3)
    with pytest.raises(TypeError, match="engine: 'triton' computes in float32"):
        Similarity(v, w, engine="triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="engine: 'triton' needs an accelerator"):
        Similarity(v.float(), w.float(), engine="triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install triton"):
        Similarity(v.float(), w.float(), engine="triton")
