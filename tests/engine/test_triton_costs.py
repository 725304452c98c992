"""Memory, traffic and products of the Triton engine, on the meta device."""

from __future__ import annotations

import pytest
import torch
from support.on_triton import DEVICE, HALF, OF_KERNELS
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import itrloss
from itrloss import Similarity
from itrloss.engine import kernels, terms, tiled
from itrloss.engine import triton as engine
from itrloss.engine.inputs import Inputs, Side
from itrloss.engine.question import Question
from itrloss.engine.relation import Numbers, Relation, kept
from itrloss.functional import info_nce_loss, sigmoid_loss, triplet_loss

pytestmark = [
    *OF_KERNELS,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="the interpreter is replaced"),
]


class Peak(TorchDispatchMode):
    """Counter of the bytes of tensors alive at a time, besides given ones."""

    def __init__(self, *given):
        super().__init__()
        self.given = {x.untyped_storage()._cdata for x in given}
        self.live = {}
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        results = found if isinstance(found, tuple | list) else (found,)
        for x in results:
            if isinstance(x, torch.Tensor):
                self.note(x.untyped_storage())
        self.live = {key: x for key, x in self.live.items() if not x[0].expired()}
        bytes_now = sum(size for _, size in self.live.values())
        self.bytes = max(self.bytes, bytes_now)
        return found

    def note(self, storage):
        """Count a storage from now on, as long as it is alive."""
        key = storage._cdata
        if key not in self.given:
            self.live[key] = (StorageWeakRef(storage), storage.nbytes())


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Run on the meta device, with tensors of real sizes without data, and kernels that do
    nothing.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda *_, **__: None)
    monkeypatch.setattr(engine, "INTERPRETED", False)
    # cuBLAS needs no memory from PyTorch's allocator
    monkeypatch.setattr(engine, "_addmm", lambda total, a, b, beta: None)
    monkeypatch.setattr(engine, "_mm", product_on_meta)

    def numbers(pairs):
        return Numbers(max(pairs.shape), (1, 1), (1, 1))

    def listed(pairs):
        places = meta(max(pairs.shape), dtype=torch.int64)
        return [places, places]

    monkeypatch.setattr(Relation, "listable", True)
    monkeypatch.setattr(Relation, "numbers", kept(numbers))
    monkeypatch.setattr(Relation, "listed", property(listed))


def product_on_meta(a, b):
    """The result of a product of matrices."""
    return meta(a.shape[0], b.shape[1], dtype=torch.float32)


def meta(*shape, dtype, **options):
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta", **options)


@pytest.mark.parametrize(
    ("n", "m", "d", "dtype"),
    [
        (32768, 32768, 1024, torch.bfloat16),
        (32768, 32768, 1024, torch.float16),
        (32768, 32768, 512, torch.float32),
        (16384, 65536, 1024, torch.bfloat16),
        (262144, 262144, 512, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("with_ids", [True, False])
def test_memory_beside_inputs_and_gradients(n, m, d, dtype, with_ids, as_on_a_gpu):
    """At most 256 MiB: also with listed positives, whose gradient needs no second copy of all
    embeddings.
    """
    if n != m and not with_ids:
        return
    v = meta(n, d, dtype=dtype, requires_grad=True)
    w = meta(m, d, dtype=dtype, requires_grad=True)
    ids = []
    if with_ids:
        ids = [meta(n, dtype=torch.int64), meta(m, dtype=torch.int64)]
    with Peak(v, w, *ids) as peak:
        sim = Similarity(v, w, *ids, engine="triton")
        info_nce_loss(sim).backward()
    gradients = v.nbytes + w.nbytes
    further = peak.bytes - gradients
    assert 0 < further <= 256 * 2**20, further / 2**20


@pytest.mark.parametrize("answer", ["sums", "gradients"])
@pytest.mark.parametrize("groups", [True, False])
def test_memory_of_relations(groups, answer, as_on_a_gpu, monkeypatch):
    """Groups take no memory, and a mask is made for one block after the other."""
    n, d = 32768, 512
    v = meta(n, d, dtype=torch.bfloat16)
    w = meta(n, d, dtype=torch.bfloat16)
    inputs = Inputs(Side(v, None, None, None), Side(w, None, None, None), None)
    number_of_labels = 1 if groups else 3
    labels = [meta(n, number_of_labels, dtype=torch.int64) for _ in range(2)]
    own = [meta(n, dtype=torch.int64) for _ in range(2)] if groups else []
    ids = [x[:, 0] for x in labels] if groups else labels
    pairs = Relation((n, n), tuple(ids), v.device, groups=tuple(own) or None)
    question = Question(terms.exponential, pairs, (0, 1))
    grad = meta(2 * n, dtype=torch.float32)
    needs = tiled.Needs(True, True, False, False, dtypes=(torch.float32, torch.float32))
    masks = []
    original = Relation.excluded

    def excluded(*args):
        masks.append(1)  # not the arguments, which would stay alive
        return original(*args)

    monkeypatch.setattr(Relation, "excluded", excluded)
    with Peak(grad, *labels, *own, v, w) as peak:
        if answer == "sums":
            engine.sums(question, inputs)
        else:
            engine.gradients(question, inputs, grad, needs, None)
    outputs = 2 * n * 4 if answer == "sums" else 2 * n * d * 4
    assert 0 < peak.bytes <= outputs + 256 * 2**20, (peak.bytes - outputs) / 2**20
    assert bool(masks) != groups


def test_memory_of_moments(as_on_a_gpu):
    """Three numbers of each tile take as much as one of each: blocks are smaller."""
    v, w = (meta(n, 64, dtype=torch.bfloat16) for n in (4096, 65536))
    inputs = Inputs(Side(v, None, None, None), Side(w, None, None, None), None)
    ids = [meta(len(x), dtype=torch.int64) for x in (v, w)]
    question = Question(terms.identity, Relation((4096, 65536), tuple(ids), v.device), (0, 1))
    with Peak(v, w, *ids) as peak:
        engine.moments(question, inputs)
    assert 0 < peak.bytes <= 48 * 2**20, peak.bytes / 2**20


class Work:
    """Counter of the FLOPs of the products of kernels and of cuBLAS, on the meta device.

    ``panels`` counts the bytes of panels that they write and read.
    """

    def __init__(self):
        self.flops = 0
        self.panels = 0

    def launched(self, launch, *args, **options):
        """Count a kernel's products, if it multiplies: inner products of vectors of a block."""
        if "FORM" not in options:
            return
        if isinstance(args[-1], kernels.Panel) and args[-1].x is not None:
            self.panels += args[-1].x.nbytes
        inputs, _, _, _, size_m, size_n, *_ = args
        if inputs.rows.x is not None:
            self.flops += 2 * size_m * size_n * inputs.dim

    def multiplied(self, total, a, b, beta=1):
        """Count a product of cuBLAS."""
        self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        self.panels += a.nbytes


class Operators(TorchDispatchMode):
    """Counter of operators, and of the bytes of panels of scores that they read and write."""

    def __init__(self, is_panel):
        super().__init__()
        self.is_panel = is_panel
        self.count = 0
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        aliases = [x.alias_info for x in function._schema.returns]
        is_view = any(x is not None and not x.is_write for x in aliases)
        if not is_view and "empty" not in str(function):
            self.count += 1
            results = found if isinstance(found, tuple | list) else (found,)
            tensors = (*args, *(kwargs or {}).values(), *results)
            panels = {id(x): x for x in tensors if torch.is_tensor(x) and self.is_panel(x)}
            self.bytes += sum(x.nbytes for x in panels.values())
        return found


@pytest.fixture
def work(as_on_a_gpu, monkeypatch):
    """Count the products of steps on the meta device."""
    from triton.runtime import interpreter

    counter = Work()

    def launched(*args, **options):
        counter.launched(*args, **options)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    monkeypatch.setattr(engine, "_addmm", counter.multiplied)

    def product(a, b):
        counter.multiplied(None, a, b)
        return product_on_meta(a, b)

    monkeypatch.setattr(engine, "_mm", product)
    return counter


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.bfloat16, 6), (torch.float16, 18)])
def test_traffic_and_operators_of_a_panel(dtype, wanted, work):
    """bfloat16: the kernel writes 2 bytes a score, and each product reads them. float16: it writes
    4, which the largest one takes to find and a copy to round, and products read 2 each.
    """
    n, d = 32768, 64
    v, w = (meta(n, d, dtype=dtype, requires_grad=True) for _ in range(2))
    rows = engine.BLOCK_ROWS
    with Operators(lambda x: x.dim() == 2 and len(x) == rows and x.shape[1] != d) as operators:
        itrloss.InfoNCELoss(engine="triton").to("meta")(v, w).backward()
    assert work.panels + operators.bytes == wanted * n * n
    assert work.flops == 8 * n * n * d
    panels = 32 if dtype == torch.bfloat16 else 104
    each_panel = 0 if dtype == torch.bfloat16 else 8  # rounding, and adding to two sums
    assert operators.count <= 120 + each_panel * panels


@pytest.mark.parametrize(("memory", "wanted"), [(80e9, 8), (8e9, 10), (0, 10)])
@pytest.mark.parametrize("learnable", [True, False])
def test_products_of_a_large_batch(memory, wanted, learnable, work, monkeypatch):
    """Sums of one side's gradient are held where they take 1/64 of the memory: a visit less."""
    monkeypatch.setattr(engine, "memory_of", lambda device: int(memory))
    n, d = 32768, 1536
    v, w = (meta(n, d, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    itrloss.InfoNCELoss(learnable=learnable, engine="triton").to("meta")(v, w).backward()
    for_the_maxima = 2 if learnable else 0
    assert work.flops == (wanted + for_the_maxima) * n * n * d


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, 8),
        ({"learnable": True}, 10),  # the host does not know the scale
        ({"temperature": 0.01}, 10),  # sums of so large a scale may vanish
    ],
)
def test_products_of_a_log_sum_exp(options, wanted, work, monkeypatch):
    """There is no pass for the maxima where the host knows that no sum vanishes."""
    monkeypatch.setattr(torch, "mm", lambda a, b, out: work.multiplied(out, a, b) or out)
    n, d = 32768, 512
    v, w = (meta(n, d, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    itrloss.InfoNCELoss(**options, engine="triton").to("meta")(v, w).backward()
    assert work.flops == wanted * n * n * d


LARGE = {
    "siglip": lambda sim: sigmoid_loss(sim, *(meta(1, dtype=torch.float32) for _ in range(2))),
    "siglip, learnt": lambda sim: sigmoid_loss(
        sim, *(meta(1, dtype=torch.float32, requires_grad=True) for _ in range(2)), "sum"
    ),
    "siglip, each": lambda sim: torch.cat(sigmoid_loss(sim, 10.0, -10.0, "none")).sum(),
    "triplet": lambda sim: triplet_loss(sim, mining="all"),
    "triplet, mean": lambda sim: triplet_loss(sim, mining="all", reduction="mean"),
}


@pytest.mark.parametrize("name", LARGE)
def test_products_of_totals(name, work, monkeypatch):
    """Multiples of NMD of a large batch: of both sides, one, with less memory, without training."""
    n, d = 32768, 1536

    def products(memory, *trained):
        monkeypatch.setattr(engine, "memory_of", lambda device: int(memory))
        v, w = (meta(n, d, dtype=torch.bfloat16, requires_grad=x) for x in trained)
        work.flops = 0
        value = LARGE[name](Similarity(v, w, engine="triton"))
        forward = work.flops
        if any(trained):
            value.backward()
        return forward / (n * n * d), work.flops / (n * n * d)

    if name == "siglip, each":
        assert products(80e9, True, True) == (2, 8)
        return
    assert products(80e9, True, True) == (6, 6)
    assert products(80e9, True, False) == (4, 4)
    assert products(16e9, True, True) == (2, 8)
    assert products(8e9, True, True) == (2, 10)
    assert products(80e9, False, False)[0] == 2


@pytest.mark.parametrize(
    ("memory", "at_most", "wanted"),
    [
        (80e9, 50.0, (4, 4)),
        (1e9, 50.0, (2, 6)),
        (80e9, None, (6, 6)),  # with a pass for the maxima
    ],
)
def test_products_beside_a_memory(memory, at_most, wanted, work, monkeypatch):
    """The gradient of anchors that alone are trained comes with their log-sum-exp."""
    monkeypatch.setattr(engine, "memory_of", lambda device: int(memory))
    n, m, d = 32768, 65536, 1536
    v = meta(n, d, dtype=torch.bfloat16, requires_grad=True)
    ids = meta(n, dtype=torch.int64), meta(m, dtype=torch.int64)
    sim = Similarity(v, meta(m, d, dtype=torch.bfloat16), *ids, engine="triton")
    scale = meta(n, dtype=torch.float32)
    values = sim.logsumexp(scale, at_most=at_most)
    forward = work.flops
    values.sum().backward()
    assert (forward, work.flops) == tuple(x * n * m * d for x in wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        (itrloss.MemoryDiversityContrastiveLoss(engine="triton"), 6),  # 2 of them for its diversity
        (itrloss.UnifiedTrainingObjective(engine="triton"), 4),
        (itrloss.UnifiedTrainingObjective(scale=150.0, engine="triton"), 6),  # sums may overflow
    ],
)
def test_products_of_losses_with_a_memory(loss, wanted, work):
    """For each of both matrices with the memory; those with the batch and its keys are small."""
    n = 128
    m = 2**20
    d = 256
    given = [meta(n, d, dtype=torch.bfloat16, requires_grad=k < 2) for k in range(4)]
    memory = itrloss.CoupledMemory(m, d, dtype=torch.bfloat16).to("meta")
    loss.to("meta")(*given, memory).backward()
    assert wanted <= work.flops / (2 * n * m * d) <= wanted + 0.01


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
def test_memory_of_a_total(dtype, as_on_a_gpu, monkeypatch):
    """Held sums of both sides' gradients in float32, 402 MB here, and at most 256 MiB."""
    monkeypatch.setattr(engine, "memory_of", lambda device: int(80e9))
    n, d = 65536, 768
    v, w = (meta(n, d, dtype=dtype, requires_grad=True) for _ in range(2))
    with Peak(v, w) as peak:
        LARGE["siglip, learnt"](Similarity(v, w, engine="triton")).backward()
    gradients = 2 * n * d * v.element_size()
    assert 0 < peak.bytes - gradients - 2 * n * d * 4 <= 256 * 2**20


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("InfoNCELoss", 25),
        ("HubnessAwareLoss", 32),
        ("DiversityContrastiveLoss", 49),
        ("SigmoidLoss", 40),
        ("MemoryDiversityContrastiveLoss", 98),
        ("UnifiedTrainingObjective", 129),
    ],
)
def test_launches_of_steps(name, most, monkeypatch):
    """Kernels and operators that launch one, of 2048 pairs, or of 512 and a memory of 16384."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(engine, "INTERPRETED", False)
    kernels_launched = []
    monkeypatch.setattr(
        interpreter.GridExecutor, "__call__", lambda *_, **__: kernels_launched.append(1)
    )
    n = 512 if most > 90 else 2048
    given = [meta(n, 64, dtype=torch.bfloat16, requires_grad=k < 2) for k in range(2)]
    if most > 90:
        memory = itrloss.CoupledMemory(16384, 64, dtype=torch.bfloat16).to("meta")
        ids = meta(n, dtype=torch.int64)
        given += [meta(n, 64, dtype=torch.bfloat16) for _ in range(2)] + [memory, ids, ids]
    loss = getattr(itrloss, name)(engine="triton").to("meta")
    with Operators(lambda x: False) as operators:
        loss(*given).backward()
    assert 0 < operators.count + len(kernels_launched) <= most
