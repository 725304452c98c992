"""Late interaction: scores of sets of token embeddings, own ones and those of all processes.

`check_loss` has InfoNCE of such scores, `test_random_cases` over processes, too.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.cases import measured_apart, sets
from support.flops import Products
from support.oracle_embedders import FORMS, late_scores
from support.processes import run
from support.versions import FlopCounterMode, reset_compiler
from torch import Tensor
from torch.autograd import gradgradcheck

from itrloss import functional
from itrloss.engine import inputs as engine_inputs

ALPHA = 4.0
every_aggregation = pytest.mark.parametrize("aggregation", FORMS)
of_sides = pytest.mark.parametrize("own", [False, True])


def assert_same(found, wanted, leaves) -> None:
    """Compare scores, and the gradients of the sum of their sines."""
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    grad = found.detach().cos()
    gradients = torch.autograd.grad(found, leaves, grad, retain_graph=True)
    exact = torch.autograd.grad(wanted, leaves, grad, retain_graph=True)
    torch.testing.assert_close(gradients, exact, rtol=1e-9, atol=1e-9)


def small_tiles(monkeypatch, numel=16):
    monkeypatch.setitem(engine_inputs.TILE, "cpu", (numel, 4))


def ours(images, texts, aggregation, **options):
    return functional.set_similarity(images, texts, aggregation, ALPHA, **options)


def both_sides(own: bool) -> tuple[Tensor, Tensor]:
    """Sets of images, and of texts: for all images, or two for each. Every other image has
    negative cosines, so that padding would win.
    """
    signs = torch.tensor([-1, 1, -1, 1, -1]).view(5, 1, 1)
    texts = sets(10, 4, 6, seed=1).view(5, 2, 4, 6) if own else sets(4, 4, 6, seed=1)
    return (signs * sets(5, 3, 6)).requires_grad_(), texts.requires_grad_()


def mask_of(x: Tensor, seed: int) -> Tensor:
    """Which elements exist, anywhere in a set; one set is empty."""
    mask = torch.rand(x.shape[:-1], generator=torch.Generator().manual_seed(seed)) < 0.6
    mask[-1] = False
    return mask


# ------------------------------------------------------------------------------------------- values


# Which sides have padding, and of what.
PADDING = [((), 0.0), ((0,), math.nan), ((1,), math.inf), ((0, 1), 1e6), ((0, 1), math.nan)]


@pytest.mark.parametrize(("sides", "padding"), PADDING)
@of_sides
@every_aggregation
def test_values_and_gradients_are_those_of_the_definition(
    aggregation, own, sides, padding, monkeypatch
):
    """In one block, in several, of one set each. Padding has no influence, and no gradient."""
    leaves = both_sides(own)
    filled = list(leaves)
    options: dict[str, Any] = {"normalize": padding != 1e6}
    for side in sides:
        mask = mask_of(leaves[side], side)
        options[("image_mask", "text_mask")[side]] = mask
        filled[side] = leaves[side].masked_fill(~mask.unsqueeze(-1), padding)
    wanted = late_scores(*leaves, aggregation, alpha=ALPHA, **options)
    v, w = filled
    for numel in (1, 60, 150, 2**20):
        small_tiles(monkeypatch, numel)
        assert_same(ours(v, w, aggregation, **options), wanted, leaves)
        # the same gradient if the other side has none
        assert_same(ours(v, w.detach(), aggregation, **options), wanted, leaves[:1])
        assert_same(ours(v.detach(), w, aggregation, **options), wanted, leaves[1:])
        with torch.no_grad():
            again = ours(v, w, aggregation, **options)
        torch.testing.assert_close(again, wanted, rtol=1e-9, atol=1e-9)


@every_aggregation
def test_lengths_are_masks_on_the_right(aggregation):
    v, w = both_sides(False)
    lengths = torch.tensor([3, 0, 1, 2, 1]), torch.tensor([[0], [1], [4], [2]], dtype=torch.int32)
    found = ours(v, w, aggregation, image_lengths=lengths[0], text_lengths=lengths[1])
    of_images = [[1, 1, 1], [0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]]
    of_texts = torch.arange(4) < lengths[1]
    assert torch.equal(found, ours(v, w, aggregation, image_mask=of_images, text_mask=of_texts))
    assert not found[1].any()
    assert not found[:, 0].any()


@of_sides
@every_aggregation
def test_second_derivatives_are_those_of_differences(aggregation, own, monkeypatch):
    small_tiles(monkeypatch)
    v = sets(3, 2, 4).requires_grad_()
    w = sets(6, 3, 4, seed=1).view(3, 2, 3, 4) if own else sets(2, 3, 4, seed=1)
    masks = {"image_mask": mask_of(v, 5), "text_mask": mask_of(w, 6)}
    w.requires_grad_()
    assert gradgradcheck(lambda a, b: ours(a, b, aggregation, **masks), (v, w), fast_mode=True)


@pytest.mark.slow
@of_sides
@every_aggregation
def test_scores_compile_without_a_graph_break(aggregation, own):
    reset_compiler()
    inputs = both_sides(own)
    masks = [mask_of(x, 7) for x in inputs]

    def step(a, b, image_mask, text_mask):
        return ours(a, b, aggregation, image_mask=image_mask, text_mask=text_mask)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_same(compiled(*inputs, *masks), step(*inputs, *masks), inputs)


@pytest.mark.parametrize("aggregation", ["max", "mean"])
def test_texts_may_be_single_vectors(aggregation):
    v = sets(5, 3, 6)
    w = sets(4, 1, 6, seed=1)
    found = functional.set_similarity(v, w[:, 0], aggregation)
    torch.testing.assert_close(found, late_scores(v, w, aggregation))


@of_sides
@every_aggregation
def test_one_side_may_be_made_in_inference_mode(aggregation, own):
    v, w = both_sides(own)
    with torch.inference_mode():
        inferred = w.clone()
    (wanted,) = torch.autograd.grad(ours(v, w, aggregation).sum(), v)
    (found,) = torch.autograd.grad(ours(v, inferred, aggregation).sum(), v)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("size", [1, 64, 257, 8000])
@pytest.mark.parametrize("aggregation", ["max", "max_sum"])
def test_long_sets(aggregation, size):
    """Winners are noted in the smallest type that holds their number."""
    v = sets(3, 5, 8).requires_grad_()
    w = sets(4, size, 8, seed=1).requires_grad_()
    best = torch.einsum("nkd,mld->nkml", F.normalize(v, dim=2), F.normalize(w, dim=2)).amax(3)
    wanted = best.amax(1) if aggregation == "max" else best.sum(1)
    assert_same(ours(v, w, aggregation), wanted, (v, w))


@pytest.mark.parametrize(
    ("aggregation", "of_images", "of_texts"),
    [("max", [1, 0], [1, 0, 0, 0]), ("max_sum", [1, 1], [2, 0, 0, 0])],
)
def test_of_equal_elements_the_first_has_the_gradient(aggregation, of_images, of_texts):
    v = torch.ones(1, 2, 3, requires_grad=True)
    w = torch.ones(1, 4, 3, requires_grad=True)
    score = ours(v, w, aggregation, normalize=False)
    by_v, by_w = torch.autograd.grad(score, (v, w))
    assert by_v[0, :, 0].tolist() == of_images
    assert by_w[0, :, 0].tolist() == of_texts


def test_zero_vectors_score_zero_without_a_gradient():
    v = torch.zeros(2, 3, 4, requires_grad=True)
    w = torch.randn(5, 2, 4, requires_grad=True)
    score = ours(v, w, "max_sum")
    assert not score.any()
    for gradient in torch.autograd.grad(score.sum(), (v, w)):
        assert not gradient.any()


@of_sides
@every_aggregation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(aggregation, dtype, own, monkeypatch):
    """Of sets that are not contiguous, in several blocks."""
    small_tiles(monkeypatch, 60)
    half = [x.detach().to(dtype).mT.contiguous().mT.requires_grad_() for x in both_sides(own)]
    wide = [x.detach().float().requires_grad_() for x in half]
    with torch.autocast("cpu", torch.bfloat16):
        found = ours(*half, aggregation)
        wanted = ours(*wide, aggregation)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    gradients = torch.autograd.grad(found.sum(), half)
    exact = [x.to(dtype) for x in torch.autograd.grad(wanted.sum(), wide)]
    torch.testing.assert_close([*gradients], exact, rtol=2e-2, atol=1e-4)


@every_aggregation
def test_nan_is_seen_where_it_belongs(aggregation):
    v = sets(3, 2, 4, dtype=torch.float32)
    v[1, 0, 2] = math.nan
    v.requires_grad_()
    w = sets(4, 3, 4, 1, torch.float32).requires_grad_()
    score = ours(v, w, aggregation)
    assert score[1].isnan().all()
    assert score[[0, 2]].isfinite().all()
    for gradient in torch.autograd.grad(score.sum(), (v, w)):
        assert gradient.isnan().any()


# ------------------------------------------------------------------------------------------- memory

MEASURE = """
import json, sys, torch
from itrloss import functional
from benchmarks.peak import peak_memory

torch.set_num_threads(1)
v = torch.randn(32, 32, 64, requires_grad=True)
w = torch.randn(32, 1024, 64, requires_grad=True)  # 134 MB of scores
queries = torch.randn(512, 32, 16, requires_grad=True)
own = torch.randn(512, 4, 512, 16, requires_grad=True)  # 134 MB of scores, 67 MB of embeddings

def measured(aggregation, v, w, **options):
    def step(v, w):
        functional.set_similarity(v, w, aggregation, **options).sum().backward()

    step(v[:2].detach().requires_grad_(), w[:2].detach().requires_grad_())
    v.grad = w.grad = None
    found = peak_memory(lambda: step(v, w), torch.device("cpu"))
    v.grad = w.grad = None
    return found

memory = [measured(aggregation, v, w) for aggregation in sys.argv[1:]]
of_own = [measured(aggregation, queries, own) for aggregation in sys.argv[1:]]
print(json.dumps([memory, of_own]))
"""


@pytest.mark.slow
def test_memory_is_that_of_a_tile():
    """Beside the gradients of 8.5 MB; plain PyTorch takes more than twice the 134 MB of the scores.

    One process measures all, as PyTorch takes long to load.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the resident set is read from /proc, which this system does not have")
    names = ["max", "max_sum", "smooth_max_sum", "smooth_chamfer"]
    found, of_own = measured_apart(MEASURE, *names)
    if None in found:
        pytest.skip("the peak of the resident set cannot be read")
    assert len(found) == len(of_own) == len(names)
    assert max(found) < 40, found  # less than a third, as docs/losses/late_interaction.rst says
    assert max(of_own) < 180, of_own


# ---------------------------------------------------------------------------- each image's own sets


def test_no_images_have_no_scores_of_own_sets():
    """As in a process of several whose share of the batch is empty."""
    v = torch.randn(0, 3, 4, requires_grad=True)
    w = torch.randn(0, 2, 5, 4, requires_grad=True)
    for aggregation in FORMS:
        scores = ours(v, w, aggregation)
        assert scores.shape == (0, 2)
        by_v, by_w = torch.autograd.grad(scores.sum(), (v, w))
        assert by_v.shape == v.shape
        assert by_w.shape == w.shape


def test_own_sets_are_scored_with_their_image_alone():
    """N J sets cost N J products of sets, not N times as many."""
    n, j, k, size, d = 8, 3, 5, 7, 16
    v = torch.randn(n, k, d)
    w = torch.randn(n, j, size, d)
    with FlopCounterMode(display=False) as counter:
        functional.set_similarity(v, w, "max_sum")
    assert counter.get_total_flops() == 2 * n * j * k * size * d


# -------------------------------------------------------------------------------- several processes


def compiled(rank: int) -> list[list[Tensor]]:
    """Scores and gradients of one graph and of eager mode, where processes are not compared; the
    first and the last of three processes share a batch.
    """
    group = dist.new_group([0, 2])
    leaves = sets(3, 2, 4, 10 + rank).requires_grad_(), sets(3, 4, 4, 20 + rank).requires_grad_()
    mask = torch.arange(4) < torch.tensor([[2], [4], [3]])

    def step(v: Tensor, w: Tensor) -> Tensor:
        return ours(v, w, "max_mean", text_mask=mask, gather=True, process_group=group)

    found: list[list[Tensor]] = []
    if rank == 1:
        return found
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        scores = call(*leaves)
        weights = (rank + 1) * torch.arange(1, 19).view(3, 6)
        gradients = torch.autograd.grad((weights * scores.sin()).sum(), leaves)
        found.append([scores.detach(), *gradients])
    return found


@pytest.mark.slow
def test_processes_compile_without_a_graph_break(tmp_path):
    first, nothing, last = run(compiled, tmp_path, world=3)
    assert not nothing
    for eager, graph in (first, last):
        torch.testing.assert_close(graph, eager)


def products(rank: int | None) -> int:
    """FLOPs of forward and backward."""
    n, world = 8, 2
    rows = n if rank is None else n // world
    v = torch.randn(rows, 4, 16, requires_grad=True)
    w = torch.randn(rows, 6, 16)
    with Products() as counter:
        scores = functional.set_similarity(v, w, "smooth_max_sum", gather=rank is not None)
        scores.sum().backward()
    return counter.flops


def test_a_process_of_two_computes_half(tmp_path):
    whole = products(None)
    assert whole > 0
    assert run(products, tmp_path) == [whole / 2, whole / 2]


X = torch.ones(2, 3, 4)
OWN = torch.ones(2, 5, 3, 4)
# ------------------------------------------------------------------------------------- wrong input

ONES = torch.ones(2, 3, dtype=torch.bool)
# Images, texts, options and words of the message.
WRONG: list[tuple[Any, Any, dict[str, Any], str]] = [
    (X, X, {"image_lengths": [1, 4]}, r"image_lengths: .* 0 to 3"),
    (X, X, {"text_lengths": [1]}, "text_lengths: expected shape"),
    (X, X, {"text_lengths": torch.ones(2)}, "text_lengths: expected an integer"),
    (X, X, {"text_mask": ONES[:, :2]}, r"text_mask: expected shape \(2, 3\)"),
    (X, X, {"image_mask": ONES.float()}, "image_mask: expected a bool tensor"),
    (X, X, {"text_mask": "1 1 0"}, "text_mask: expected a bool tensor .*str"),
    (X, X, {"text_mask": ONES, "text_lengths": [1, 2]}, "text_mask: expected None with text_len"),
    (X, OWN, {"text_lengths": [1, 1]}, r"text_lengths: expected shape \(2, 5\)"),
    (X, OWN, {"text_mask": ONES.float()}, r"text_mask: expected a bool .* shape \(2, 5, 3\)"),
    (X, X.double(), {}, "texts: expected .*float32"),
    (X.long(), X, {}, "images: expected floating-point"),
    (X[0], X, {}, "images: expected sets"),
    (OWN, X, {}, "images: expected sets"),
    (X[:0], X, {}, "images: expected sets"),
    (X, X[:, :0], {}, "texts: expected sets"),
    (X, X[:0], {"gather": True}, "texts: expected sets"),  # of a process alone
    (X, X[:, :, :3], {}, "texts: expected sets .*dimension 4"),
    (X[:1], OWN, {}, r"texts: expected each image's own sets, \(1, J, L, D\), .* \(2, 5, 3, 4\)"),
    (X, OWN, {"gather": True}, "gather: expected False for each image's own texts"),
    (X, X, {"gather": "yes"}, "gather: expected True or Fal"),
    (X, X, {"alpha": 0.0}, "alpha: expected a number above 0"),
    (X, X, {"aggregation": "min"}, "aggregation: .*'min'"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case[3])
def test_wrong_input_is_named(case):
    images, texts, options, message = case
    with pytest.raises((TypeError, ValueError), match=message):
        functional.set_similarity(images, texts, **options)
