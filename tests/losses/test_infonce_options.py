"""InfoNCE with all its options, compared with loops."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.embedders import GIST, QWEN, one_way
from support.losses_registry import select
from support.processes import run
from torch import Tensor

import itrloss
from itrloss import NO_ID, InfoNCELoss, Similarity

ENGINES = "dense", "tiled"


# ---------------------------------------------------------------------------------------- processes

# Options of losses whose batch two processes share, and what they take besides images and texts:
# arguments, and the parts of the batch that they are.
IDS = {"image_ids": "image_ids", "text_ids": "text_ids"}
WITH_NEGATIVES = IDS | {"negatives": "negatives", "negative_ids": "negative_ids"}
WITH_OWN = IDS | {"negatives": "own", "negative_ids": "own_ids"}
GUIDED = IDS | {"guide": ("guide_images", "guide_texts")}
SHARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen": (dict(QWEN, directions="image-text"), WITH_NEGATIVES),
    "own alone": (
        {"directions": "image-text", "in_batch": False, "hardness": (0.0, 5.0)},
        WITH_OWN,
    ),
    "own and joint": ({"joint": True, **GIST, "margin": 0.05}, WITH_OWN),
    "guide": ({"margin": -0.1, "relative": True, **GIST}, GUIDED),
    "text-image": ({"directions": "text-image", "image_image": True}, IDS),
    "inner products": ({"normalize": False, "text_text": True}, WITH_NEGATIVES),
    "groups": (
        {"groups": "same"},
        IDS | {"image_groups": "image_groups", "text_groups": "text_groups"},
    ),
    "labels": ({}, {"image_ids": "image_labels", "text_ids": "text_labels"}),
    "matches": ({}, {"matches": "matches"}),
}
N, M = 8, 10
# Of images, texts and negatives that the first of two processes has; the second has the rest.
SIZES = {"even": (4, 5, 2), "uneven": (6, 3, 4), "empty": (0, 10, 5)}


def batch(of_images: slice = slice(N), of_texts: slice = slice(M), of_negatives: slice = slice(5)):
    """Return a batch, or a process's part of it, in which several match."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    images = {
        "images": draw(N, 4),
        "image_ids": torch.arange(N) % 5,
        "image_groups": torch.arange(N) % 2,
        "image_labels": torch.stack([torch.arange(N) % 3, 5 + torch.arange(N) % 4], 1),
        "own": draw(N, 2, 4),
        "own_ids": torch.tensor([[NO_ID, 7], [8, NO_ID]] * 4),
        "guide_images": draw(N, 3),
        "matches": torch.rand(N, M, generator=generator, dtype=torch.float64).round(),
    }
    texts = {
        "texts": draw(M, 4),
        "text_ids": torch.arange(M) % 6,
        "text_groups": torch.arange(M) % 2,
        "text_labels": torch.stack([torch.arange(M) % 4, 5 + torch.arange(M) % 3], 1),
        "guide_texts": draw(M, 3),
    }
    negatives = {
        "negatives": draw(5, 4),
        "negative_ids": torch.tensor([0, 9, 2, NO_ID, 9]),
    }
    found = {name: x[of_images] for name, x in images.items()}
    found |= {name: x[of_texts] for name, x in texts.items()}
    return found | {name: x[of_negatives] for name, x in negatives.items()}


def shared_loss(name: str, x: dict[str, Tensor], **common: Any) -> list[Tensor]:
    """Return the loss of a batch, or of a process's part, and its gradients."""
    options, given = SHARED[name]
    leaves = [x["images"], x["texts"]]
    if "negatives" in given:
        leaves.append(x[given["negatives"]])
    for leaf in leaves:
        leaf.requires_grad_()
    arguments = {}
    for argument, part in given.items():
        arguments[argument] = x[part] if isinstance(part, str) else tuple(x[key] for key in part)
    loss = InfoNCELoss(0.2, **options, **common)
    value = loss(x["images"], x["texts"], **arguments)
    return [value.detach(), *torch.autograd.grad(value, leaves, materialize_grads=True)]


def of_a_process(rank: int, sizes: tuple[int, ...]) -> dict[str, list[Tensor]]:
    rows = [slice(None, size) if rank == 0 else slice(size, None) for size in sizes]
    return {name: shared_loss(name, batch(*rows), gather=True) for name in SHARED}


@pytest.mark.parametrize("sizes", SIZES)
def test_processes_have_the_loss_and_the_gradients_of_one(sizes, tmp_path):
    parts = run(of_a_process, tmp_path, SIZES[sizes])
    for name in SHARED:
        value, *exact = shared_loss(name, batch())
        (first, *of_first), (second, *of_second) = (part[name] for part in parts)
        assert first == second
        torch.testing.assert_close(first, value)
        # DistributedDataParallel divides gradients by the number of processes.
        found = [torch.cat([a, b]) / 2 for a, b in zip(of_first, of_second, strict=True)]
        torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


NUMBERS = [[0, 1], [NO_ID, 1], [0, 2], [0, 9], [1, 3]]  # of images, for each image's own negatives


def loss_of_numbered(rank: int | None) -> list[Tensor]:
    """The loss where ids of negatives are numbers of own images; ``rank`` None: of the whole."""
    whole = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = {0: slice(2), 1: slice(2, 5), None: slice(5)}[rank]
    images, texts, negatives = (x[rows] for x in (whole[:, 0], whole[:, 1], whole[:, 2:]))
    numbers = torch.tensor(NUMBERS)
    if rank is None:
        numbers[2:] = torch.where(numbers[2:] < 3, numbers[2:] + 2, -1)  # the second process's
        numbers[:2] = torch.where(numbers[:2] < 2, numbers[:2], -1)
        numbers[1, 0] = NO_ID
    loss = InfoNCELoss(0.5, directions="image-text", gather=rank is not None)
    return [loss(images, texts, negatives=negatives, negative_ids=numbers[rows])]


def test_negatives_by_numbers_of_images_of_their_process(tmp_path):
    parts = run(loss_of_numbered, tmp_path)
    (wanted,) = loss_of_numbered(None)
    for (found,) in parts:
        torch.testing.assert_close(found, wanted)


# --------------------------------------------------------------------------------------- directions

# Losses whose value of one direction is a part of that of both.
DIRECTED = select(
    "infonce",
    "dcl",
    "hal",
    "triplet",
    "triplet all",
    "rince",
    "complementary",
    "supcon",
    "supcon inside",
    "mil-nce",
    "multi-similarity mined",
    "circle",
)


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", DIRECTED)
def test_one_direction_is_a_part_of_both(name, engine, reduction, small_tiles):
    x = batch()
    given = x["images"], x["texts"], x["image_ids"], x["text_ids"]
    make = partial(DIRECTED[name].make, engine=engine, reduction=reduction)
    parts = DIRECTED[name].make(engine=engine, reduction="none")(*given)
    if reduction == "sum":
        parts = [part.sum() for part in parts]
    for directions, part in zip(("image-text", "text-image"), parts, strict=True):
        loss = make(directions=directions)
        torch.testing.assert_close(loss(*given), part)
        assert f"directions='{directions}'" in repr(loss)
        later = make()
        later.directions = directions
        torch.testing.assert_close(later(*given), part)


def test_distillation_of_one_direction():
    x = batch()
    teacher = torch.randn(N, M, dtype=torch.float64)
    _, wanted = itrloss.DistillationLoss(reduction="none")(x["images"], x["texts"], teacher)
    loss = itrloss.DistillationLoss(reduction="none", directions="text-image")
    torch.testing.assert_close(loss(x["images"], x["texts"], teacher), wanted)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("rule", ["same", "other"])
def test_distillation_within_groups(engine, rule, small_tiles):
    """By loops: a candidate counts if it matches, or if its group lets it."""
    v, w = (torch.randn(7, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    teacher = torch.randn(7, 7, dtype=torch.float64)
    groups = torch.tensor([0, 1, 0, 1, 2, 0, 2])
    loss = itrloss.DistillationLoss(0.2, 0.5, groups=rule, engine=engine, directions="image-text")
    found = loss(v, w, teacher, image_groups=groups)
    scores = F.normalize(v) @ F.normalize(w).T
    values = []
    for i in range(7):
        own = [j for j in range(7) if i == j or (groups[i] == groups[j]) == (rule == "same")]
        q = (teacher[i, own] / 0.5).softmax(0)
        values.append(-(q * (scores[i, own] / 0.2).log_softmax(0)).sum())
    wanted = torch.stack(values).mean()
    torch.testing.assert_close(found, wanted)
    gradients = torch.autograd.grad(found, (v, w))
    torch.testing.assert_close(gradients, torch.autograd.grad(wanted, (v, w)))


def test_distillation_of_scores_is_that_of_their_embeddings():
    x = batch()
    teacher = torch.randn(N, M, dtype=torch.float64)
    loss = itrloss.DistillationLoss()
    scores = F.normalize(x["images"]) @ F.normalize(x["texts"]).T
    wanted = loss(x["images"], x["texts"], teacher)
    torch.testing.assert_close(loss(scores=scores, teacher=teacher), wanted)
    model = torch.randn(N, 3, dtype=torch.float64), torch.randn(M, 3, dtype=torch.float64)
    of_model = Similarity(*model, torch.arange(N), torch.arange(M))
    by_embeddings = loss(x["images"], x["texts"], model)
    torch.testing.assert_close(by_embeddings, loss(x["images"], x["texts"], of_model.scores()))
    similarity = Similarity.from_scores(teacher, torch.arange(N), torch.arange(M))
    torch.testing.assert_close(loss(scores=scores, teacher=similarity), wanted)
    with pytest.raises(TypeError, match="teacher: expected a Similarity"):
        loss(scores=scores)
    with pytest.raises(ValueError, match="teacher: expected shape"):
        loss(scores=scores, teacher=teacher[:, :4])


@pytest.mark.parametrize("name", ["infonce", "dcl", "supcon"])
def test_inner_products(name):
    x = batch()
    v = x["images"] / 3
    w = x["texts"] / 3
    ids = x["image_ids"], x["text_ids"]
    loss = DIRECTED[name].make(normalize=False)
    torch.testing.assert_close(loss(v, w, *ids), loss(Similarity(v, w, *ids, normalize=False)))
    assert "normalize=False" in repr(loss)
    assert loss(2 * v, w, *ids) != loss(v, w, *ids)


# ----------------------------------------------------------------------------------------- the rest


def test_a_learnt_scale_is_limited_in_training():
    v, w = (torch.randn(4, 8) for _ in range(2))
    loss = InfoNCELoss(0.01, learnable=True, max_scale=50.0)
    before = loss.eval()(v, w)
    torch.testing.assert_close(float(loss.temperature), 0.01)
    after = loss.train()(v, w)
    torch.testing.assert_close(float(loss.temperature), 0.02)
    torch.testing.assert_close(after, InfoNCELoss(0.02)(v, w))
    assert before != after
    after.backward()
    assert loss.log_scale is not None and loss.log_scale.grad is not None
    assert loss.log_scale.grad != 0  # at the limit, it may still fall


@pytest.mark.parametrize("shared", [True, False])
def test_an_image_whose_negatives_all_match_it_does_not_count(shared):
    v, w = torch.randn(2, 8), torch.randn(2, 8)
    loss = one_way(0.1, in_batch=False)
    if shared:
        further, ids = torch.randn(1, 8), [0]
        second = further[None]
    else:
        further, ids = torch.randn(2, 1, 8), [[0], [7]]
        second = further[1:]
    found = loss(v, w, negatives=further, negative_ids=ids)
    torch.testing.assert_close(found, loss(v[1:], w[1:], negatives=second))
    loss.reduction = "none"
    assert loss(v, w, negatives=further, negative_ids=ids)[0] == 0


def test_negatives_alone_multiply_nothing_else():
    """Without the batch's texts, nothing of its size (N, M) is computed."""
    n, k, d = 256, 2, 16
    v, w, z = (torch.randn(n, *size, d) for size in ((), (), (k,)))
    loss = one_way(0.1, in_batch=False)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        loss(v, w, negatives=z)
    assert counter.get_total_flops() <= 2 * n * (k + 1) * d


@pytest.mark.parametrize("engine", ENGINES)
def test_options_that_are_left_out_cost_nothing(engine):
    """A plain InfoNCE launches what its function does."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += 1
            return function(*args, **(kwargs or {}))

    v, w = (torch.randn(32, 16, requires_grad=True) for _ in range(2))
    loss = InfoNCELoss(engine=engine)
    loss(v, w)  # which looks at the first batch
    with Counter() as of_class:
        torch.autograd.grad(loss(v, w), (v, w))
    with Counter() as of_function:
        value = itrloss.functional.info_nce_loss(Similarity(v, w, engine=engine))
        torch.autograd.grad(value, (v, w))
    assert of_class.count == of_function.count


@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_copy_of_the_positive_is_no_negative_with_a_margin_of_zero(engine: Any, dtype: Any):
    """Whatever the rounding of two products of the same vectors."""
    loss = InfoNCELoss(0.05, margin=0.0, directions="image-text", engine=engine)
    guided = InfoNCELoss(0.05, margin=0.0, engine=engine)
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        image = torch.randn(1, 64, generator=draw, dtype=dtype)
        text = torch.randn(1, 64, generator=draw, dtype=dtype)
        assert loss(image, text.repeat(2, 1), [0], [0, 1]) == 0
        images, texts = (x.repeat(2, 1) for x in (image, text))
        guide = torch.randn(2, 2, 48, generator=draw, dtype=dtype)[:, :1].repeat(1, 2, 1)
        assert guided(images, texts, guide=tuple(guide)) == 0
