"""Late interaction: scores of sets of token embeddings, own ones and those of all processes.

`check_loss` has InfoNCE of such scores.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.cases import measured_apart, sets
from support.flops import Products
from support.processes import run
from torch import Tensor
from torch.autograd import gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

import itrloss
from itrloss import functional
from itrloss.engine import inputs as engine_inputs

AGGREGATIONS = (
    *("max", "mean", "smooth_chamfer"),
    *("max_sum", "max_mean", "smooth_max_sum", "smooth_max_mean"),
)
ALPHA = 4.0


def of_two_sets(a: Tensor, b: Tensor, aggregation: str) -> Tensor:
    """The definition for the products (K, L) of the elements of two sets."""
    rows = []
    for u in a:
        row = [(u * v).sum() for v in b]
        rows.append(torch.stack(row))
    products = torch.stack(rows)
    best = products.amax(1)
    exponentials = (ALPHA * products).exp()
    smooth_rows = exponentials.sum(1).log() / ALPHA
    smooth_columns = exponentials.sum(0).log() / ALPHA
    scores = {
        "max": products.max(),
        "mean": products.mean(),
        "max_sum": best.sum(),
        "max_mean": best.mean(),
        "smooth_max_sum": smooth_rows.sum(),
        "smooth_max_mean": smooth_rows.mean(),
        "smooth_chamfer": (smooth_rows.mean() + smooth_columns.mean()) / 2,
    }
    return scores[aggregation]


def loop(images, texts, aggregation, lengths=(None, None), normalize=True) -> Tensor:
    """The definition, pair by pair."""
    if normalize:
        images = F.normalize(images, dim=-1)
        texts = F.normalize(texts, dim=-1)
    image_lengths, text_lengths = lengths
    scores = []
    for i, j in itertools.product(range(len(images)), range(len(texts))):
        a = images[i]
        if image_lengths is not None:
            a = a[: int(image_lengths[i])]
        b = texts[j]
        if text_lengths is not None:
            b = b[: int(text_lengths[j])]
        if len(a) and len(b):
            scores.append(of_two_sets(a, b, aggregation))
        else:
            scores.append(images.new_zeros(()))
    return torch.stack(scores).view(len(images), len(texts))


def loop_of_own(images, texts, aggregation, lengths=(None, None), normalize=True) -> Tensor:
    """The definition for texts (N, J, L, D), image by image."""
    image_lengths, text_lengths = lengths
    rows = []
    for i in range(len(images)):
        of_image = None if image_lengths is None else image_lengths[i : i + 1]
        of_texts = None if text_lengths is None else text_lengths[i]
        image = images[i : i + 1]
        rows.append(loop(image, texts[i], aggregation, (of_image, of_texts), normalize))
    return torch.cat(rows)


def assert_same(found, wanted, leaves) -> None:
    """Compare scores, and the gradients of the sum of their sines."""
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    grad = found.detach().cos()
    gradients = torch.autograd.grad(found, leaves, grad)
    exact = torch.autograd.grad(wanted, leaves, grad)
    torch.testing.assert_close(gradients, exact, rtol=1e-9, atol=1e-9)


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


OWN_LENGTHS = {
    "all": (None, None),
    "images": (torch.tensor([3, 0, 1, 2, 3]), None),
    "texts": (None, torch.tensor([[4, 1], [0, 2], [3, 3], [1, 4], [0, 0]])),
    "both": (torch.tensor([3, 1, 1, 2, 0]), torch.tensor([[4, 1], [0, 2], [3, 3], [1, 4], [2, 2]])),
}
every_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS)


def images_and_texts() -> tuple[Tensor, Tensor]:
    """Sets of both sides, for all pairs."""
    images = sets(5, 3, 6)
    texts = sets(4, 4, 6, seed=1)
    return images.requires_grad_(), texts.requires_grad_()


def images_and_own_texts() -> tuple[Tensor, Tensor]:
    """Two sets of texts for each image."""
    texts = sets(10, 4, 6, seed=1).view(5, 2, 4, 6)
    return sets(5, 3, 6).requires_grad_(), texts.requires_grad_()


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("numel", [1, 60, 2**20])
@pytest.mark.parametrize("lengths", LENGTHS)
@every_aggregation
def test_values_and_gradients_are_those_of_the_definition(
    aggregation, lengths, numel, normalize, monkeypatch
):
    small_tiles(monkeypatch, numel)
    v, w = images_and_texts()
    sizes = LENGTHS[lengths]
    wanted = loop(v, w, aggregation, sizes, normalize)
    found = ours(v, w, aggregation, sizes, normalize=normalize)
    assert_same(found, wanted, (v, w))
    with torch.no_grad():
        again = ours(v, w, aggregation, sizes, normalize=normalize)
    torch.testing.assert_close(again, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("numel", [1, 60, 150, 2**20])
@pytest.mark.parametrize("lengths", OWN_LENGTHS)
@every_aggregation
def test_own_sets_are_those_of_the_definition(aggregation, lengths, numel, normalize, monkeypatch):
    """In one part, in parts of several images, of one, and of one set."""
    small_tiles(monkeypatch, numel)
    v, w = images_and_own_texts()
    sizes = OWN_LENGTHS[lengths]
    wanted = loop_of_own(v, w, aggregation, sizes, normalize)
    found = ours(v, w, aggregation, sizes, normalize=normalize)
    assert_same(found, wanted, (v, w))


@every_aggregation
def test_one_side_alone_has_the_same_gradient(aggregation, monkeypatch):
    small_tiles(monkeypatch)
    for v, w in (images_and_texts(), images_and_own_texts()):
        of_both = ours(v, w, aggregation)
        by_v, by_w = torch.autograd.grad(of_both.sum(), (v, w))
        of_v = ours(v, w.detach(), aggregation)
        (alone,) = torch.autograd.grad(of_v.sum(), v)
        torch.testing.assert_close(alone, by_v)
        of_w = ours(v.detach(), w, aggregation)
        (alone,) = torch.autograd.grad(of_w.sum(), w)
        torch.testing.assert_close(alone, by_w)


@pytest.mark.parametrize("own", [False, True])
@every_aggregation
def test_second_derivatives_are_those_of_differences(aggregation, own, monkeypatch):
    small_tiles(monkeypatch)
    v = sets(3, 2, 4).requires_grad_()
    image_lengths = torch.tensor([2, 1, 0])
    if own:
        w = sets(6, 3, 4, seed=1).view(3, 2, 3, 4)
        text_lengths = torch.tensor([[3, 2], [1, 0], [2, 2]])
    else:
        w = sets(2, 3, 4, seed=1)
        text_lengths = torch.tensor([3, 2])
    w.requires_grad_()

    def scores(a, b):
        return ours(a, b, aggregation, (image_lengths, text_lengths))

    assert gradgradcheck(scores, (v, w), fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
@every_aggregation
def test_scores_compile_without_a_graph_break(aggregation, own):
    torch._dynamo.reset()
    inputs = images_and_own_texts() if own else images_and_texts()
    lengths = OWN_LENGTHS["both"] if own else LENGTHS["both"]

    def step(a, b, *lengths):
        return ours(a, b, aggregation, lengths)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = compiled(*inputs, *lengths)
    wanted = step(*inputs, *lengths)
    assert_same(found, wanted, inputs)


@every_aggregation
@pytest.mark.parametrize("padding", [math.nan, math.inf, 1e6])
def test_padding_has_no_influence_and_no_gradient(aggregation, padding):
    lengths = LENGTHS["both"]
    v = sets(5, 3, 6)
    w = sets(4, 4, 6, seed=1)
    padded = []
    all_missing = []
    for x, size in zip((v, w), lengths, strict=True):
        missing = torch.arange(x.shape[1]) >= size[:, None]
        filled = x.masked_fill(missing.unsqueeze(-1), padding)
        padded.append(filled.requires_grad_())
        all_missing.append(missing)
    found = ours(*padded, aggregation, lengths)
    torch.testing.assert_close(found, ours(v, w, aggregation, lengths))
    assert (found[1] == 0).all()
    assert (found[:, 0] == 0).all()
    gradients = torch.autograd.grad(found.sum(), padded)
    for gradient, missing in zip(gradients, all_missing, strict=True):
        assert gradient.isfinite().all()
        assert not gradient[missing].any()
        assert gradient.any()


@pytest.mark.parametrize("aggregation", ["max", "mean"])
def test_texts_may_be_single_vectors(aggregation):
    v = sets(5, 3, 6)
    w = sets(4, 1, 6, seed=1)
    found = functional.set_similarity(v, w[:, 0], aggregation)
    torch.testing.assert_close(found, loop(v, w, aggregation))


@every_aggregation
def test_a_few_elements_against_many(aggregation):
    """Scores are transposed in memory then."""
    v = sets(1, 2, 6).requires_grad_()
    w = sets(9, 7, 6, seed=1).requires_grad_()
    lengths = (torch.tensor([1]), torch.arange(9).clamp_max(7))
    found = ours(v, w, aggregation, lengths)
    wanted = loop(v, w, aggregation, lengths)
    assert_same(found, wanted, (v, w))


@pytest.mark.parametrize("size", [1, 2, 31, 64, 65, 257, 1000, 8000])
@pytest.mark.parametrize("aggregation", ["max", "max_sum"])
def test_long_sets(aggregation, size):
    """Winners are noted in the smallest type that holds their number."""
    v = sets(3, 5, 8).requires_grad_()
    w = sets(4, size, 8, seed=1).requires_grad_()
    x = F.normalize(v, dim=2)
    y = F.normalize(w, dim=2)
    best = torch.einsum("nkd,mld->nkml", x, y).amax(3)
    wanted = best.amax(1) if aggregation == "max" else best.sum(1)
    found = ours(v, w, aggregation)
    assert_same(found, wanted, (v, w))


@pytest.mark.parametrize(
    ("aggregation", "of_images", "of_texts"),
    [("max", [1, 0], [1, 0, 0, 0]), ("max_sum", [1, 1], [2, 0, 0, 0])],
)
def test_of_equal_elements_the_first_has_the_gradient(aggregation, of_images, of_texts):
    v = torch.ones(1, 2, 3, requires_grad=True)
    w = torch.ones(1, 4, 3, requires_grad=True)
    score = ours(v, w, aggregation, normalize=False)
    score.backward()
    assert score.item() == 3 * sum(of_images)
    assert v.grad[0, :, 0].tolist() == of_images
    assert w.grad[0, :, 0].tolist() == of_texts


def test_zero_vectors_score_zero_without_a_gradient():
    v = torch.zeros(2, 3, 4, requires_grad=True)
    w = torch.randn(5, 2, 4, requires_grad=True)
    score = ours(v, w, "max_sum")
    assert not score.any()
    for gradient in torch.autograd.grad(score.sum(), (v, w)):
        assert not gradient.any()


@every_aggregation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(aggregation, dtype):
    half = [sets(4, 3, 16, seed, dtype).requires_grad_() for seed in range(2)]
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


def test_scores_are_those_of_a_public_package():
    package = pytest.importorskip("maxsim_cpu")
    query = F.normalize(torch.randn(32, 128), dim=1)
    documents = F.normalize(torch.randn(20, 100, 128), dim=2)
    theirs = package.maxsim_scores(query.numpy(), documents.numpy())
    found = ours(query[None], documents, "max_sum")[0]
    torch.testing.assert_close(found, torch.from_numpy(theirs), rtol=1e-5, atol=1e-5)


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
    assert max(found) < 40, found
    assert max(of_own) < 180, of_own


# ---------------------------------------------------------------------------- each image's own sets


@pytest.mark.parametrize("padding", [math.nan, math.inf, 1e4])
@every_aggregation
def test_padding_of_own_sets_has_no_influence_and_no_gradient(aggregation, padding, monkeypatch):
    """Of float16 embeddings that are not contiguous, and masks of both sides."""
    small_tiles(monkeypatch, 60)
    generator = torch.Generator().manual_seed(3)
    exists = torch.rand(4, 2, 5, generator=generator) < 0.5
    exists[1, 0] = False
    w = sets(8, 5, 6, 1, torch.float16).view(2, 4, 5, 6).transpose(0, 1)
    v = sets(4, 3, 6, 0, torch.float16).requires_grad_()
    options: dict = {"text_mask": exists, "image_mask": [[0, 1, 1]] * 4}

    def outcome(fill):
        """The scores and both gradients, with this in place of padding."""
        x = w.masked_fill(~exists[..., None], fill).requires_grad_()
        found = functional.set_similarity(v, x, aggregation, ALPHA, **options)
        assert found.dtype == torch.float32
        assert found[1, 0] == 0
        by_v, by_x = torch.autograd.grad(found.sin().sum(), (v, x))
        assert by_x.dtype == torch.float16
        assert not by_x[~exists].any()
        assert not by_v[:, 0].any()
        assert by_x.any()
        return found, by_v, by_x

    torch.testing.assert_close(outcome(padding), outcome(0.0))


def test_no_images_have_no_scores_of_own_sets():
    """As in a process of several whose share of the batch is empty."""
    v = torch.randn(0, 3, 4, requires_grad=True)
    w = torch.randn(0, 2, 5, 4, requires_grad=True)
    for aggregation in AGGREGATIONS:
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

# Sets (N, K) and (M, L) of each process.
SHARES = {
    "even": [(3, 2, 3, 4), (3, 2, 3, 4)],
    "one masked": [(3, 2, 3, 4), (3, 2, 3, 4)],
    "longer": [(3, 2, 3, 2), (3, 2, 3, 4)],
    "uneven": [(4, 2, 1, 4), (2, 5, 3, 2)],
    "no images": [(0, 2, 3, 4), (5, 2, 2, 3)],
    "no texts": [(2, 2, 0, 4), (3, 2, 5, 3)],
}


def share(name: str, rank: int) -> dict[str, Any]:
    """A process's images and texts, and which of their elements exist; some cosines are negative
    alone, so that padding would win.
    """
    n, k, m, size = SHARES[name][rank]
    generator = torch.Generator().manual_seed(5 + rank)
    mask = torch.rand(m, size, generator=generator) < 0.7
    is_masked = rank == 0 and name not in ("even", "longer")
    return {
        "images": -sets(n, k, 4, 10 + rank).requires_grad_(),
        "texts": sets(m, size, 4, 20 + rank).requires_grad_(),
        "mask": mask if is_masked else None,
    }


def scores_of(x: dict[str, Any], aggregation: Any, **options: Any) -> Tensor:
    """The scores of a share."""
    options["text_mask"] = x["mask"]
    return functional.set_similarity(x["images"], x["texts"], aggregation, ALPHA, **options)


def gathering(rank: int, name: str) -> dict[str, list[Tensor]]:
    """Scores of own images with all texts, and gradients of a sum over processes."""
    found = {}
    for aggregation in AGGREGATIONS:
        x = share(name, rank)
        leaves = x["images"], x["texts"]
        scores = scores_of(x, aggregation, gather=True)
        grads = torch.autograd.grad(weighted(scores, rank), leaves)
        found[aggregation] = [scores.detach(), *grads]
    return found


def weighted(scores: Tensor, rank: int) -> Tensor:
    """A sum whose terms differ between processes."""
    weights = torch.arange(1, 1 + scores.numel(), dtype=scores.dtype).view_as(scores)
    return ((rank + 1) * weights * scores.sin()).sum()


def wanted_scores(own: dict[str, Any], parts: list[dict[str, Any]], aggregation: str) -> Tensor:
    """Scores (N, M) of a process's images with the texts of each process by themselves."""
    images = own["images"]
    columns = []
    for other in parts:
        if len(images) and len(other["texts"]):
            together = {**other, "images": images}
            columns.append(scores_of(together, aggregation))
        else:
            shape = (len(images), len(other["texts"]))
            columns.append(torch.zeros(shape, dtype=torch.float64))
    return torch.cat(columns, 1)


@pytest.mark.parametrize("name", SHARES)
def test_processes_score_their_images_with_the_texts_of_all(name, tmp_path):
    """Values and gradients are those of one process, which sees the texts of each by themselves."""
    found = run(gathering, tmp_path, name)
    for aggregation in AGGREGATIONS:
        parts = [share(name, rank) for rank in range(2)]
        wanted = [wanted_scores(own, parts, aggregation) for own in parts]
        total = sum(weighted(scores, rank) for rank, scores in enumerate(wanted))
        for rank, part in enumerate(parts):
            leaves = (part["images"], part["texts"])
            gradients = torch.autograd.grad(
                total, leaves, retain_graph=True, materialize_grads=True
            )
            scores, of_images, of_texts = found[rank][aggregation]
            torch.testing.assert_close(scores, wanted[rank], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close((of_images, of_texts), gradients, rtol=1e-9, atol=1e-9)


def compiled(rank: int) -> list[list[Tensor]]:
    """Scores and gradients of one graph and of eager mode; processes are not compared then."""
    x = share("even", rank)
    mask = torch.arange(4) < torch.tensor([[2], [4], [3]])

    def step(v: Tensor, w: Tensor) -> Tensor:
        return functional.set_similarity(v, w, "max_mean", text_mask=mask, gather=True)

    graph = torch.compile(step, fullgraph=True, backend="aot_eager")
    leaves = (x["images"], x["texts"])
    found = []
    for call in (step, graph):
        scores = call(*leaves)
        gradients = torch.autograd.grad(weighted(scores, rank), leaves)
        found.append([scores.detach(), *gradients])
    return found


@pytest.mark.slow
def test_processes_compile_without_a_graph_break(tmp_path):
    for eager, graph in run(compiled, tmp_path):
        torch.testing.assert_close(graph, eager)


def in_a_group(rank: int) -> list[Tensor]:
    """The first and the last of three processes share a batch."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return []
    place = rank // 2
    x = share("uneven", place)
    scores = scores_of(x, "max_mean", gather=True, process_group=group)
    (by_texts,) = torch.autograd.grad(weighted(scores, place), x["texts"])
    return [scores.detach(), by_texts]


def test_a_process_group_has_its_own_texts(tmp_path):
    first, nothing, last = run(in_a_group, tmp_path, world=3)
    wanted = run(gathering, tmp_path, "uneven")
    assert nothing == []
    for found, exact in zip((first, last), wanted, strict=True):
        scores, _, of_texts = exact["max_mean"]
        torch.testing.assert_close(found, [scores, of_texts])


def contrast(rank: int | None) -> list[Tensor]:
    """ColPali's loss: of own queries with the documents of all processes, or of one process."""
    shares = [share("even", 0), share("even", 1)]
    if rank is not None:
        shares = [shares[rank]]
    images = torch.cat([x["images"] for x in shares]).detach().requires_grad_()
    texts = torch.cat([x["texts"] for x in shares]).detach().requires_grad_()
    scores = functional.set_similarity(images, texts, "max_mean", gather=rank is not None)
    first = 3 * rank if rank is not None else 0
    image_ids = torch.arange(len(images)) + first
    loss = itrloss.InfoNCELoss(0.1, directions="image-text")
    value = loss(scores=scores, image_ids=image_ids, text_ids=torch.arange(6))
    gradients = torch.autograd.grad(value, (images, texts))
    return [value.detach(), *gradients]


def test_a_loss_over_processes_is_that_of_one(tmp_path):
    """Of equal numbers of queries; DistributedDataParallel averages the gradients."""
    first, second = run(contrast, tmp_path)
    value, *gradients = contrast(None)
    first_value, *first_gradients = first
    second_value, *second_gradients = second
    torch.testing.assert_close((first_value + second_value) / 2, value)
    for wanted, *parts in zip(gradients, first_gradients, second_gradients, strict=True):
        mean = torch.cat(parts) / 2
        torch.testing.assert_close(mean, wanted, rtol=1e-9, atol=1e-9)


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


WRONG_SHARES: dict[str, tuple[Any, str]] = {
    "aggregation": (lambda rank: {"aggregation": ("max", "max_sum")[rank]}, "aggregation 'max'"),
    "dimension": (lambda rank: {"d": 3 + rank}, "dimension 3 in process 0"),
    "dtype": (lambda rank: {"dtype": (torch.float16, torch.float32)[rank]}, "torch.float16 in"),
    "one fails": (
        lambda rank: {"normalize": True, "alpha": 1.0 - rank},
        "alpha: expected a number",
    ),
    "own sets": (lambda rank: {"own": True}, "gather: expected False for each image's own texts"),
    "no texts": (lambda rank: {"m": 0}, "texts: expected at least one set"),
}


def wrong_share(rank: int, name: str) -> str:
    """What is said of a share that differs between processes."""
    options_of, _ = WRONG_SHARES[name]
    options = options_of(rank)
    d = options.pop("d", 4)
    dtype = options.pop("dtype", torch.float32)
    shape = (2, 3) if options.pop("own", False) else (options.pop("m", 2),)
    v = torch.ones(2, 3, d, dtype=dtype)
    w = torch.ones(*shape, 5, d, dtype=dtype)
    try:
        functional.set_similarity(v, w, gather=True, **options)
    except ValueError as error:
        return str(error)
    return ""


def wrong_shares(rank: int) -> list[str]:
    return [wrong_share(rank, name) for name in WRONG_SHARES]


def test_processes_that_differ_all_raise_the_error(tmp_path):
    for found in run(wrong_shares, tmp_path):
        for message, (_, wanted) in zip(found, WRONG_SHARES.values(), strict=True):
            assert wanted in message


def test_a_process_alone_gathers_nothing():
    v = sets(3, 2, 4)
    w = sets(5, 3, 4, seed=1)
    found = functional.set_similarity(v, w, "max_sum", gather=True)
    wanted = functional.set_similarity(v, w, "max_sum")
    assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match="texts: expected sets"):
        functional.set_similarity(v, w[:0], "max_sum", gather=True)


# ------------------------------------------------------------------------------------- wrong input

X = torch.ones(2, 3, 4)
OWN = torch.ones(2, 5, 3, 4)
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
    "images": (lambda: ours(X[0], X, "max_sum"), ValueError, "images: expected sets"),
    "four dimensions": (lambda: ours(OWN, X, "max_sum"), ValueError, "images: expected sets"),
    "integers": (lambda: ours(X.long(), X, "max"), TypeError, "images: expected floating-point"),
    "no sets": (lambda: ours(X[:0], X, "max"), ValueError, "images: expected sets"),
    "no elements": (lambda: ours(X, X[:, :0], "max"), ValueError, "texts: expected sets"),
    "own sets of others": (
        lambda: ours(X[:1], OWN, "max_sum"),
        ValueError,
        r"texts: expected each image's own sets, \(1, J, L, D\), got shape \(2, 5, 3, 4\)",
    ),
    "own lengths": (
        lambda: ours(X, OWN, "max_sum", (None, torch.ones(2, dtype=torch.int64))),
        ValueError,
        r"text_lengths: expected shape \(2, 5\)",
    ),
    "own mask": (
        lambda: ours(X, OWN, "max_sum", text_mask=torch.ones(2, 3)),
        TypeError,
        r"text_mask: expected a bool tensor of shape \(2, 5, 3\)",
    ),
    "own sets gathered": (
        lambda: ours(X, OWN, "max_sum", gather=True),
        ValueError,
        "gather: expected False for each image's own texts",
    ),
    "gather": (lambda: ours(X, X, "max", gather="yes"), ValueError, "gather: expected True or Fal"),
    "nan": (
        lambda: itrloss.InfoNCELoss(check_finite=True)(scores=ours(X, X * math.nan, "max_sum")),
        ValueError,
        "scores: expected fin",
    ),
    "alpha": (
        lambda: functional.set_similarity(X, X, "smooth_max_sum", -1.0),
        ValueError,
        "alpha: expected a number above 0",
    ),
    "alpha of zero": (
        lambda: functional.set_similarity(X, X, "smooth_chamfer", 0.0),
        ValueError,
        "alpha",
    ),
    "aggregation": (lambda: functional.set_similarity(X, X, "min"), ValueError, "aggregation"),
    "dimensions": (lambda: functional.set_similarity(X, X[:, :, :3]), ValueError, "texts"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(name):
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        call()
