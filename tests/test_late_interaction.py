"""Late interaction: scores of sets of token embeddings, and their loss."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import measured_apart
from test_sets import sets
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import itrloss
from itrloss import functional
from itrloss.engine import inputs as engine_inputs

AGGREGATIONS = ("max", "mean", "smooth_chamfer", "max_sum", "smooth_max_sum")
ALPHA = 4.0


def loop(images, texts, aggregation, lengths=(None, None), normalize=True) -> Tensor:
    """The definition, pair by pair and element by element."""
    rows = []
    for i, j in itertools.product(range(len(images)), range(len(texts))):
        a, b = (
            x[k] if size is None else x[k, : int(size[k])]
            for x, k, size in zip((images, texts), (i, j), lengths, strict=True)
        )
        if not len(a) or not len(b):
            rows.append(images.new_zeros(()))
            continue
        unit = (lambda v: v / v.norm()) if normalize else (lambda v: v)
        x = [[(unit(u) * unit(v)).sum() for v in b] for u in a]

        def soft(values):
            return torch.stack([(ALPHA * v).exp() for v in values]).sum().log() / ALPHA

        if aggregation == "max":
            value = max(max(line) for line in x)
        elif aggregation == "mean":
            value = sum(sum(line) for line in x) / (len(a) * len(b))
        elif aggregation == "max_sum":
            value = sum(max(line) for line in x)
        elif aggregation == "smooth_max_sum":
            value = sum(soft(line) for line in x)
        else:
            forth, back = (
                sum(soft(line) for line in x) / len(a),
                sum(soft(y) for y in zip(*x, strict=True)) / len(b),
            )
            value = (forth + back) / 2
        rows.append(value)
    return torch.stack(rows).view(len(images), len(texts))


def small_tiles(monkeypatch, numel=16):
    monkeypatch.setitem(engine_inputs.TILE, "cpu", (numel, 4))


def ours(images, texts, aggregation, lengths=(None, None), **options):
    named = {"image_lengths": lengths[0], "text_lengths": lengths[1]}
    return functional.set_similarity(images, texts, aggregation, ALPHA, **named, **options)


LENGTHS = {
    "all": (None, None),
    "images": (torch.tensor([3, 0, 1, 2, 3]), None),
    "texts": (None, torch.tensor([4, 1, 0, 2])),
    "both": (torch.tensor([3, 0, 1, 2, 1]), torch.tensor([0, 1, 4, 2], dtype=torch.int32)),
}


@pytest.mark.parametrize("numel", [1, 60, 2**20])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_values_and_gradients_are_those_of_the_definition(aggregation, lengths, numel, monkeypatch):
    small_tiles(monkeypatch, numel)
    for normalize in (True, False):
        v, w = sets(5, 3, 6).requires_grad_(), sets(4, 4, 6, seed=1).requires_grad_()
        grad = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        wanted = loop(v, w, aggregation, LENGTHS[lengths], normalize)
        found = ours(v, w, aggregation, LENGTHS[lengths], normalize=normalize)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
        with torch.no_grad():
            again = ours(v, w, aggregation, LENGTHS[lengths], normalize=normalize)
        torch.testing.assert_close(again, wanted, rtol=1e-9, atol=1e-9)
        for x, y in zip(
            torch.autograd.grad(found, (v, w), grad),
            torch.autograd.grad(wanted, (v, w), grad),
            strict=True,
        ):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_derivatives_are_those_of_differences(aggregation, monkeypatch):
    small_tiles(monkeypatch)
    inputs = sets(3, 2, 4).requires_grad_(), sets(2, 3, 4, seed=1).requires_grad_()
    lengths = torch.tensor([2, 1, 0]), torch.tensor([3, 2])
    assert gradcheck(lambda a, b: ours(a, b, aggregation, lengths), inputs)
    assert gradgradcheck(lambda a, b: ours(a, b, aggregation, lengths), inputs)
    for k in range(2):  # one side alone
        alone = [x.detach().requires_grad_(i == k) for i, x in enumerate(inputs)]
        grad = torch.autograd.grad(ours(*alone, aggregation).sum(), alone[k])[0]
        torch.testing.assert_close(
            grad, torch.autograd.grad(ours(*inputs, aggregation).sum(), inputs[k])[0]
        )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("padding", [math.nan, math.inf, 1e6])
def test_padding_has_no_influence_and_no_gradient(aggregation, padding):
    lengths = LENGTHS["both"]
    v, w = sets(5, 3, 6), sets(4, 4, 6, seed=1)
    padded = []
    for x, size in zip((v, w), lengths, strict=True):
        missing = torch.arange(x.shape[1]) >= size[:, None]
        padded.append(x.masked_fill(missing.unsqueeze(-1), padding).requires_grad_())
    found = ours(*padded, aggregation, lengths)
    torch.testing.assert_close(found, ours(v, w, aggregation, lengths))
    assert (found[1] == 0).all() and (found[:, 0] == 0).all()
    for x, size in zip(torch.autograd.grad(found.sum(), padded), lengths, strict=True):
        assert x.isfinite().all()
        assert not x[torch.arange(x.shape[1]) >= size[:, None]].any()
        assert x.any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_few_elements_against_many(aggregation):
    """Scores are transposed in memory then."""
    v, w = sets(1, 2, 6).requires_grad_(), sets(9, 7, 6, seed=1).requires_grad_()
    lengths = torch.tensor([1]), torch.arange(9).clamp_max(7)
    wanted, found = (f(v, w, aggregation, lengths) for f in (loop, ours))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(x.sin().sum(), (v, w)) for x in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 31, 64, 65, 257, 1000, 8000])
@pytest.mark.parametrize("aggregation", ["max", "max_sum"])
def test_long_sets(aggregation, size):
    """Winners are noted in the smallest type that holds their number."""
    v, w = sets(3, 5, 8).requires_grad_(), sets(4, size, 8, seed=1).requires_grad_()
    cosines = torch.einsum("nkd,mld->nkml", F.normalize(v, dim=2), F.normalize(w, dim=2)).amax(3)
    wanted = cosines.amax(1) if aggregation == "max" else cosines.sum(1)
    found = ours(v, w, aggregation)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(x.square().sum(), (v, w)) for x in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_of_equal_elements_the_first_has_the_gradient():
    v, w = torch.ones(1, 2, 3, requires_grad=True), torch.ones(1, 4, 3, requires_grad=True)
    for aggregation, rows in (("max", 1), ("max_sum", 2)):
        score = ours(v, w, aggregation, normalize=False)
        assert score.item() == 3 * rows
        of_rows, of_cols = torch.autograd.grad(score, (v, w))
        assert of_cols[0, :, 0].tolist() == [rows, 0, 0, 0] and of_rows[0, :, 0].tolist() == [
            1,
            rows - 1,
        ]


def test_zero_vectors_score_zero_without_a_gradient():
    v, w = torch.zeros(2, 3, 4, requires_grad=True), torch.randn(5, 2, 4, requires_grad=True)
    score = ours(v, w, "max_sum")
    assert not score.any()
    assert not any(x.any() for x in torch.autograd.grad(score.sum(), (v, w)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(aggregation, dtype):
    v, w = (sets(4, 3, 16, seed, dtype).requires_grad_() for seed in range(2))
    wide = [x.detach().float().requires_grad_() for x in (v, w)]
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(v, w, aggregation)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, ours(*wide, aggregation), rtol=1e-6, atol=1e-6)
    grads, wanted = (
        torch.autograd.grad(found.sum(), (v, w)),
        torch.autograd.grad(ours(*wide, aggregation).sum(), wide),
    )
    for x, y in zip(grads, wanted, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x, y.to(dtype), rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nan_is_seen_where_it_belongs(aggregation):
    v, w = sets(3, 2, 4, dtype=torch.float32), sets(4, 3, 4, 1, torch.float32)
    v[1, 0, 2] = math.nan
    v, w = v.requires_grad_(), w.requires_grad_()
    score = ours(v, w, aggregation)
    assert score[1].isnan().all() and score[[0, 2]].isfinite().all()
    assert all(x.isnan().any() for x in torch.autograd.grad(score.sum(), (v, w)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_compiles_without_a_graph_break(aggregation):
    torch._dynamo.reset()
    v, w, lengths = (
        sets(5, 3, 6).requires_grad_(),
        sets(4, 4, 6, seed=1).requires_grad_(),
        LENGTHS["both"],
    )

    def step(a, b, *lengths):
        return ours(a, b, aggregation, lengths)

    wanted, found = (
        step(v, w, *lengths),
        torch.compile(step, fullgraph=True, backend="aot_eager")(v, w, *lengths),
    )
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad(x.sin().sum(), (v, w)) for x in (found, wanted)]
    torch.testing.assert_close(*grads)


def test_scores_are_those_of_a_public_package():
    package = pytest.importorskip("maxsim_cpu")
    query, documents = (
        F.normalize(torch.randn(32, 128), dim=1),
        F.normalize(torch.randn(20, 100, 128), dim=2),
    )
    wanted = torch.from_numpy(package.maxsim_scores(query.numpy(), documents.numpy()))
    torch.testing.assert_close(
        ours(query[None], documents, "max_sum")[0], wanted, rtol=1e-5, atol=1e-5
    )


# ------------------------------------------------------------------------------------------- memory

MEASURE = """
import json, sys, torch
from itrloss import functional
from benchmarks.peak import peak_memory

torch.set_num_threads(1)
v = torch.randn(32, 32, 64, requires_grad=True)
w = torch.randn(32, 1024, 64, requires_grad=True)  # 134 MB of scores

def measured(aggregation):
    def step(v, w):
        functional.set_similarity(v, w, aggregation).sum().backward()

    step(v[:2].detach().requires_grad_(), w[:2].detach().requires_grad_())
    v.grad = w.grad = None
    return peak_memory(lambda: step(v, w), torch.device("cpu"))

print(json.dumps([measured(aggregation) for aggregation in sys.argv[1:]]))
"""


@pytest.mark.slow
def test_memory_is_that_of_a_tile():
    """Beside the gradients of 8.5 MB; plain PyTorch takes more than twice the 134 MB of the scores.

    One process measures all, as PyTorch takes long to load.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the resident set is read from /proc, which this system does not have")
    names = ["max", "max_sum", "smooth_max_sum", "smooth_chamfer"]
    found = measured_apart(MEASURE, *names)
    if None in found:
        pytest.skip("the peak of the resident set cannot be read")
    assert len(found) == len(names) and max(found) < 40, found


# --------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("alpha", [None, ALPHA])
def test_loss_is_info_nce_of_the_definition(alpha, engine):
    v, w = sets(4, 3, 6).requires_grad_(), sets(4, 4, 6, seed=1).requires_grad_()
    lengths = torch.tensor([3, 1, 2, 3]), torch.tensor([4, 1, 3, 2])
    loss = itrloss.LateInteractionLoss(0.5, alpha, engine=engine)
    scores = loop(v, w, "max_sum" if alpha is None else "smooth_max_sum", lengths) / 0.5
    wanted = F.cross_entropy(scores, torch.arange(4)) + F.cross_entropy(scores.T, torch.arange(4))
    found = loss(v, w, *lengths)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    grads = [torch.autograd.grad(x, (v, w)) for x in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_loss_takes_ids_other_counts_and_reductions():
    v, w = sets(3, 3, 6), sets(5, 4, 6, seed=1)
    ids = torch.tensor([0, 1, 7]), torch.tensor([0, 1, 1, 9, 0])
    scores = loop(v, w, "max_sum")
    for reduction in ("mean", "sum", "none"):
        loss = itrloss.LateInteractionLoss(2.0, reduction=reduction, telemetry=True)
        wanted = itrloss.InfoNCELoss(2.0, reduction=reduction)(
            scores=scores, image_ids=ids[0], text_ids=ids[1]
        )
        torch.testing.assert_close(loss(v, w, None, None, *ids), wanted, rtol=1e-9, atol=1e-9)
        assert loss.telemetry
    assert "temperature=2.0" in repr(loss)


X = torch.ones(2, 3, 4)
WRONG = {
    "image_lengths": (
        lambda: ours(X, X, "max", (torch.tensor([1, 4]), None)),
        ValueError,
        r"image_lengths: .* 0 to 3",
    ),
    "text_lengths": (
        lambda: ours(X, X, "max", (None, torch.tensor([1]))),
        ValueError,
        "text_lengths: expected shape",
    ),
    "kind": (
        lambda: ours(X, X, "max", (None, torch.ones(2))),
        TypeError,
        "text_lengths: expected an integer",
    ),
    "double": (lambda: ours(X, X.double(), "max_sum"), TypeError, "texts"),
    "images": (
        lambda: itrloss.LateInteractionLoss()(X[0], X),
        ValueError,
        "images: expected shape",
    ),
    "nan": (
        lambda: itrloss.LateInteractionLoss(check_finite=True)(X, X * math.nan),
        ValueError,
        "texts: expected fin",
    ),
    "alpha": (
        lambda: itrloss.LateInteractionLoss(alpha=-1.0)(X, X),
        ValueError,
        "alpha: expected a number above 0",
    ),
    "temperature": (
        lambda: itrloss.LateInteractionLoss(0.0),
        ValueError,
        "temperature: expected a number above 0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()


def test_sets_are_not_gathered(monkeypatch):
    loss = itrloss.LateInteractionLoss(gather=True)
    assert loss(X, X).isfinite()
    monkeypatch.setattr("itrloss.losses.base.world_size", lambda group: 2)
    with pytest.raises(ValueError, match="gather: expected False"):
        loss(X, X)
