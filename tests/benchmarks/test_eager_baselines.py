"""The benchmarks' eager baselines equal the oracle, and compile without graph breaks."""

import numpy as np
import pytest
import torch
from support import oracle, oracle_more
from torch import Tensor

from benchmarks import eager

DCL_OPTIONS = [
    {"diversity": diversity, "positive_weight": weight, "positive": positive}
    for diversity in ("std", "entropy", None)
    for weight, positive in (("paper", "clamp"), (0.5, "relu"))
]
CASES = [
    ("triplet", {"mining": "hardest"}),
    ("triplet", {"mining": "all", "margin": 0.7}),
    ("infonce", {}),
    ("infonce", {"temperature": 0.5}),
    ("hal", {}),
    ("hal", {"scale": 7.0, "margin": 0.1}),
    *[("dcl", options) for options in DCL_OPTIONS],
    ("dcl", {"temperature": 0.3, "margin": -0.2, "epsilon": 0.7}),
    ("sigmoid", {}),
    ("sigmoid", {"scale": 3.0, "bias": -0.5}),
]
COMPILED = [CASES[i] for i in (0, 1, 2, 4, 6, 8, 10, 13)]  # each loss, mining and diversity once
# Duplicates on both sides, ids missing on one side, a single id, disjoint ids, a single column.
IDS = {
    "none": None,
    "captions": ([0, 1, 2, 3, 4, 5], [i // 3 for i in range(18)]),
    "classes": ([0, 0, 1, 2, 2, 2, 3], [2, 0, 1, 1, 2, 0, 3, 3, 2]),
    "unmatched": ([0, 1, 2, 8, 9], [1, 0, 5, 6, 1, 2, 7]),
    "one_class": ([4, 4, 4], [4, 4]),
    "strangers": ([0, 1, 2], [3, 4, 5, 6]),
    "one_text": ([0, 1, 1], [1]),
}


def _case(
    name: str, seed: int = 0
) -> tuple[Tensor, Tensor, tuple[Tensor | None, Tensor | None], tuple]:
    """Embeddings with aligned first coordinates, ids for eager, ids for the oracle."""
    ids = IDS[name] or (list(range(9)), list(range(9)))
    generator = torch.Generator().manual_seed(seed)
    images, texts = (torch.randn(len(i), 5, dtype=torch.float64, generator=generator) for i in ids)
    tensors = (None, None) if IDS[name] is None else (torch.tensor(ids[0]), torch.tensor(ids[1]))
    return images, texts, tensors, ids


def _oracle_value(loss: str, images: Tensor, texts: Tensor, ids: tuple, **options: object) -> float:
    scores = oracle.cosine(images.detach().numpy(), texts.detach().numpy())
    return getattr(oracle_more if loss == "sigmoid" else oracle, loss)(scores, *ids, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize(("loss", "options"), CASES)
def test_values_equal_the_oracle(loss, options, ids, reduction):
    images, texts, tensor_ids, plain_ids = _case(ids)
    value = getattr(eager, loss)(images, texts, *tensor_ids, reduction=reduction, **options)
    assert value.shape == ()
    expected = _oracle_value(loss, images, texts, plain_ids, reduction=reduction, **options)
    assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("loss", ["triplet", "infonce", "sigmoid", "hal", "dcl"])
def test_defaults_equal_the_oracle(loss):
    images, texts, tensor_ids, plain_ids = _case("classes", seed=1)
    expected = _oracle_value(loss, images, texts, plain_ids)
    assert getattr(eager, loss)(images, texts, *tensor_ids).item() == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize(("loss", "options"), CASES)
def test_gradients_equal_finite_differences_of_the_oracle(loss, options, ids):
    images, texts, tensor_ids, plain_ids = _case(ids, seed=2)
    images.requires_grad_()
    texts.requires_grad_()
    value = getattr(eager, loss)(images, texts, *tensor_ids, reduction="mean", **options)
    gradients = torch.autograd.grad(value, (images, texts))
    fixed = dict(options)
    if loss == "dcl" and options.get("diversity", "std") is not None:
        # The gradient treats the diversity as a constant, so the finite differences must, too.
        score = (
            oracle.entropy_diversity
            if options.get("diversity") == "entropy"
            else oracle.std_diversity
        )
        scores = oracle.cosine(images.detach().numpy(), texts.detach().numpy())
        row_ids, col_ids = plain_ids
        epsilon = options.get("epsilon", 0.1)
        fixed["diversity"] = (
            score(scores, row_ids, col_ids, epsilon),
            score(scores.T, col_ids, row_ids, epsilon),
        )
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for x in (images, texts)]
    step = 1e-6
    ahead, behind = (
        _oracle_value(
            loss,
            images + s * directions[0],
            texts + s * directions[1],
            plain_ids,
            reduction="mean",
            **fixed,
        )
        for s in (step, -step)
    )
    slope = sum((g * d).sum().item() for g, d in zip(gradients, directions, strict=True))
    assert slope == pytest.approx((ahead - behind) / (2 * step), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("loss", ["triplet", "infonce", "hal", "dcl"])
def test_a_zero_vector_and_a_single_pair_stay_finite(loss):
    images, texts, _, ids = _case("none")
    images[2] = 0
    images.requires_grad_()
    value = getattr(eager, loss)(images, texts)
    value.backward()
    assert value.item() == pytest.approx(_oracle_value(loss, images, texts, ids), rel=1e-9)
    assert images.grad is not None and images.grad.isfinite().all()
    assert getattr(eager, loss)(images[:1], texts[:1]).item() == 0


@pytest.mark.parametrize("loss", ["triplet", "infonce", "sigmoid", "hal", "dcl"])
def test_one_side_of_ids_may_be_left_out(loss):
    images, texts, _, _ = _case("none")
    ids = torch.tensor([0, 1, 2, 2, 3, 20, 5, 6, 0])
    both = getattr(eager, loss)(images, texts, torch.arange(9), ids)
    assert torch.equal(getattr(eager, loss)(images, texts, text_ids=ids), both)
    with pytest.raises(ValueError, match="image_ids and text_ids"):
        getattr(eager, loss)(images, texts[:4])


@pytest.mark.parametrize("ids", ["none", "unmatched"])
def test_half_precision_scores_are_float32(ids):
    images, texts, tensor_ids, plain_ids = _case(ids)
    half = images.bfloat16(), texts.bfloat16()
    value = eager.dcl(*half, *tensor_ids)
    assert value.dtype == torch.float32
    # Two roundings of the unit vectors, one of the score: a few times 2^-9, times slopes below 2.
    assert value.item() == pytest.approx(_oracle_value("dcl", images, texts, plain_ids), abs=2**-5)


@pytest.mark.slow
@pytest.mark.parametrize("ids", ["none", "classes"])
@pytest.mark.parametrize(("loss", "options"), COMPILED)
def test_compiles_without_a_graph_break(loss, options, ids):
    images, texts, tensor_ids, _ = _case(ids)
    function = getattr(eager, loss)
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")
    results = []
    for call in (function, compiled):
        leaves = images.clone().requires_grad_(), texts.clone().requires_grad_()
        value = call(*leaves, *tensor_ids, **options)
        results.append((value.detach(), *torch.autograd.grad(value, leaves)))
    for plain, fast in zip(*results, strict=True):
        np.testing.assert_allclose(fast, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [
        ("triplet", {"mining": "semi"}),
        ("infonce", {"reduction": "none"}),
        ("dcl", {"diversity": "variance"}),
        ("dcl", {"positive": "abs"}),
    ],
)
def test_unknown_options_are_refused(loss, wrong):
    images, texts, _, _ = _case("none")
    with pytest.raises(ValueError, match=next(iter(wrong))):
        getattr(eager, loss)(images, texts, **wrong)


@pytest.mark.parametrize("loss", ["memory_dcl", "uto"])
def test_memory_baselines_equal_the_oracle(loss):
    generator = torch.Generator().manual_seed(0)
    sizes = (6, 6, 6, 6, 11, 11)
    rows = [torch.randn(n, 5, dtype=torch.float64, generator=generator) for n in sizes]
    rows[4:] = [torch.nn.functional.normalize(x, dim=1) for x in rows[4:]]
    ids, memory_ids = torch.randperm(9, generator=generator)[:6], torch.arange(11) % 7
    value = getattr(eager, loss)(*rows, ids, memory_ids)
    arrays = [x.numpy() for x in (*rows, ids, ids, memory_ids)]
    assert value.item() == pytest.approx(getattr(oracle_more, loss)(*arrays), rel=1e-9)


def test_variance_aware_and_classification_equal_the_oracle():
    generator = torch.Generator().manual_seed(0)
    sets, texts = (
        torch.randn(7, *k, 5, generator=generator, dtype=torch.float64) for k in ((3,), ())
    )
    ids = list(range(7))
    wanted = oracle_more.variance_aware(sets.numpy(), texts.numpy(), ids, ids, 0.4)
    np.testing.assert_allclose(
        float(eager.variance_aware(sets, texts, margin=0.4)), wanted, rtol=1e-9
    )
    weight, labels = torch.randn(11, 5, generator=generator, dtype=torch.float64), torch.arange(7)
    wanted = oracle_more.prototype_classification(
        sets[:, 0].numpy(), texts.numpy(), weight.numpy(), None, ids
    )
    found = eager.prototype_classification(sets[:, 0], texts, weight, labels)
    np.testing.assert_allclose(float(found), wanted, rtol=1e-9)
