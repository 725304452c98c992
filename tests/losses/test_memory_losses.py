"""Losses over a memory: invariants, cost and compilation.

`test_random_cases` has them next to loops, `test_their_lines` ALBEF's formula.
"""

from __future__ import annotations

import functools

import pytest
import torch
from support.cases import embeddings, of_engines
from support.flops import Products, saved_bytes
from support.losses_registry import where
from support.memories import D, memory_batch
from support.versions import CompileCounterWithBackend, needs, reset_compiler
from torch import Tensor

import itrloss
from itrloss import CoupledMemory

LOSSES = where(lambda entry: entry.takes == "memory")


def make(name, **options):
    return LOSSES[name].make(**options)


# ---------------------------------------------------------------------------- values and gradients


@pytest.mark.parametrize("diversity", ["std", "entropy"])
@pytest.mark.parametrize("directions", ["both", "image-text", "text-image"])
def test_dcl_has_the_batchs_diversity_where_the_memory_has_no_negative(directions, diversity):
    options = {"directions": directions, "diversity": diversity, "reduction": "none"}
    options["entropy_temperature"] = 0.1
    of_batch = itrloss.DiversityContrastiveLoss(**options)
    of_both = itrloss.MemoryDiversityContrastiveLoss(
        positive_from="batch", negatives_from="batch", **options
    )
    batch = memory_batch("empty")
    torch.testing.assert_close(of_both(*batch), of_batch(*batch.inputs))
    memory = CoupledMemory(8, D, dtype=torch.float64)
    memory.enqueue(*embeddings(3, 3, D, seed=5), torch.full((3,), 2))
    ids = torch.arange(len(batch.images))
    found = of_both(*batch._replace(memory=memory, image_ids=ids, text_ids=ids))
    same = torch.stack([*found]) == torch.stack([*of_batch(*batch.inputs)])
    assert torch.equal(same, (ids == 2).expand_as(same))


@pytest.mark.parametrize("name", LOSSES)
def test_keys_and_memory_get_no_gradient(name):
    batch = memory_batch("ids")
    batch.image_keys.requires_grad_()
    batch.text_keys.requires_grad_()
    before = batch.memory.texts.clone()
    make(name)(*batch).backward()
    assert batch.image_keys.grad is None
    assert batch.text_keys.grad is None
    assert not batch.memory.texts.requires_grad
    assert torch.equal(batch.memory.texts, before)
    assert batch.images.grad.any()
    assert batch.texts.grad.any()


# -------------------------------------------------------------------------------------- invariants


@pytest.mark.parametrize("side", ["images", "texts"])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_an_enqueued_key_that_is_not_finite_leaves_no_trace(bad, side):
    """An overflow, after which the gradient scaler skips the step; the pair must be ignored."""
    batch = memory_batch("pairs", torch.float32)
    images, texts = embeddings(12, 12, D, seed=3, dtype=torch.float32)
    finite = torch.arange(12) != 5
    clean = CoupledMemory(11, D)
    clean.enqueue(images[finite], texts[finite])
    broken = images if side == "images" else texts
    broken[5, 2] = bad
    memory = CoupledMemory(12, D)
    memory.enqueue(images, texts)
    assert len(memory) == 11
    assert memory.images.isfinite().all()
    assert memory.texts.isfinite().all()
    for name in LOSSES:
        found = make(name)(*batch._replace(memory=memory))
        torch.testing.assert_close(found, make(name)(*batch._replace(memory=clean)))


# --------------------------------------------------------------------------------------------- cost


@pytest.mark.parametrize("library", ["by_blas", "by_onednn"])
@pytest.mark.parametrize(
    ("engine", "products_of_scores"),
    [
        ("dense", 2),
        # scores are formed for each answer, and once more for the gradient
        ("tiled", 4),
    ],
)
def test_no_product_for_the_gradient_of_the_memory(library, engine, products_of_scores, request):
    request.getfixturevalue(library)
    batch = memory_batch("pairs", torch.float32)
    n, size = len(batch.images), batch.memory.size
    with Products() as products:
        make("mdcl", engine=engine)(*batch).backward()
    of_scores = 2 * products_of_scores * n * size
    of_batch = n * n
    assert products.flops == 2 * D * (of_scores + of_batch)


def test_nothing_of_the_size_of_the_memory_is_kept_for_backward():
    entries = 5000
    images, texts = torch.randn(2, entries, D)
    large = CoupledMemory(entries, D)
    large.enqueue(images, texts, torch.arange(entries) + 1000)
    batch = memory_batch("ids", torch.float32)._replace(memory=large)
    loss = make("mdcl", engine="tiled")
    itself = large.images, large.texts, large.ids
    assert max(saved_bytes(lambda: loss(*batch), itself)) < entries * 4


def step_with(name: str, engine: str, directions: str, early: int) -> list[Tensor]:
    """Gradients, and the memory after as many batches were enqueued before the backward pass, or
    one after it.
    """
    batch = memory_batch("ids")
    leaves = [x.detach().requires_grad_() for x in (batch.images, batch.texts)]
    loss = make(name, engine=engine, directions=directions)
    value = loss(*leaves, *batch[2:])
    memory = batch.memory
    own = memory.images
    new = batch.image_keys[:5], batch.text_keys[:5], batch.image_ids[:5]
    for _ in range(early):
        memory.enqueue(*new)
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    if not early:
        memory.enqueue(*new)
        assert memory.images is own, "it was not in use"
    return [*[x for x in grads if x is not None], memory.images, memory.texts, memory.ids]


@needs("to enqueue before the backward pass", 2, 1)
@pytest.mark.parametrize("directions", ["both", "image-text", "text-image"])
@pytest.mark.parametrize("name", ["mdcl", "albef", "uto"])
@of_engines
def test_a_batch_may_be_enqueued_before_the_backward_pass(name, engine, directions):
    """As inside of the forward pass of MoCo's and ALBEF's models; backward reads the memory again,
    on each engine.
    """
    wanted = step_with(name, engine, directions, 0)
    torch.testing.assert_close(step_with(name, engine, directions, 1), wanted, rtol=0, atol=0)
    grads = len(wanted) - 3
    twice = step_with(name, engine, directions, 2)
    torch.testing.assert_close(twice[:grads], wanted[:grads], rtol=0, atol=0)


@of_engines
def test_a_memory_that_was_written_to_by_hand_before_the_backward_pass_is_refused(engine):
    batch = memory_batch("ids")
    value = make("mdcl", engine=engine)(*batch)
    batch.memory.texts.add_(1.0)
    batch.memory.images.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


# -------------------------------------------------------------------------------------- compilation


@pytest.mark.slow
def test_a_loss_is_compiled_once_for_all_fillings_of_its_memory():
    """Once for a memory that has never had an entry, and once for all others."""
    loss = make("mdcl", engine="dense")
    reset_compiler()
    counter = CompileCounterWithBackend("aot_eager")
    compiled_loss = torch.compile(loss, fullgraph=True, backend=counter)
    compiled_enqueue = torch.compile(CoupledMemory.enqueue, fullgraph=True, backend=counter)
    memory, other = CoupledMemory(10, D), CoupledMemory(10, D)
    for step in range(5):
        v, w = embeddings(4, 4, D, seed=step, dtype=torch.float32)
        inputs = v.requires_grad_(), w.requires_grad_()
        ids = torch.tensor([0, 1, 2, step % 3])
        value = loss(v, w, 2 * v, w + v, memory, ids, ids)
        compiled = compiled_loss(v, w, 2 * v, w + v, other, ids, ids)
        torch.testing.assert_close(compiled, value, rtol=1e-4, atol=1e-5)
        gradients = torch.autograd.grad(compiled, inputs)
        wanted = torch.autograd.grad(value, inputs)
        torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-5)
        memory.enqueue(v, w, ids)
        compiled_enqueue(other, v, w, ids)
        assert len(other) == len(memory)
        torch.testing.assert_close(other.texts, memory.texts)
    assert counter.frame_count <= 4


@pytest.mark.slow
def test_a_compiled_run_goes_on_bit_for_bit_after_a_load():
    loss = make("mdcl implicit")

    @functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
    def step(memory, v, w):
        value = loss(v, w, v, w, memory)
        memory.enqueue(v, w)
        return value

    reset_compiler()
    batches = [embeddings(4, 4, D, seed=k, dtype=torch.float32) for k in range(12)]
    memory = CoupledMemory(20, D)
    for batch in batches[:8]:  # full by then
        step(memory, *batch)
    state = {name: x.clone() for name, x in memory.state_dict().items() if torch.is_tensor(x)}
    wanted = [step(memory, *batch) for batch in batches[8:]]
    resumed = CoupledMemory(20, D)
    step(resumed, *batches[0])
    resumed.load_state_dict(state, strict=False)  # between calls of a compiled step
    found = [step(resumed, *batch) for batch in batches[8:]]
    assert found == wanted
