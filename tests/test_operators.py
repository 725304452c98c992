"""The registered operators: schemas, fake shapes, what autograd keeps, and memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from cases import embeddings, make_ids
from test_losses import LOSSES, make
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import itrloss
from itrloss.engines import softmax, tiles


def sources():
    v, w = embeddings(7, 9, dtype=torch.float32)
    ids = make_ids("random", 7, 9)
    inv = [1 / x.norm(dim=1) for x in (v, w)]
    yield "embeddings", (v, w, *inv, *ids, None, None, False)
    yield "half", (v.half(), w.half(), *inv, *ids, None, None, False)
    yield "raw", (v, w, None, None, *ids, None, None, False)
    yield "scores", (v @ w.T, None, None, None, *ids, None, None, False)
    yield "transposed scores", ((w @ v.T).T, None, None, None, *ids, None, None, False)
    yield "diagonal", (v, w[:7], inv[0], inv[1][:7], None, None, None, None, False)
    yield "kept", (v, w, None, None, *ids, v @ w.T, None, False)
    if importlib.util.find_spec("triton") and not torch.cuda.is_available():  # in the interpreter
        yield "fused", (v, w, *inv, *ids, None, None, True)
        yield "fused diagonal", (v, w[:7], inv[0], inv[1][:7], None, None, None, None, True)


def calls():
    x, y = embeddings(7, 9, dtype=torch.float32)
    yield "product", "product", (x, y.T)
    for name, source in sources():
        rows, cols = source[0], source[1]
        n, m = rows.shape[0], rows.shape[1] if cols is None else cols.shape[0]
        a, b = torch.linspace(1, 2, n), torch.linspace(1, 2, m)
        both = torch.cat((a, b))
        pairs = (torch.arange(n), torch.arange(n) % m)
        carried = a if source[4] is None and not source[8] else None
        yield f"{name}: inverse_norms", "inverse_norms", (rows,)
        for extra in (0, softmax.MEAN, softmax.ENTROPY):
            yield f"{name}: logsumexp {extra}", "logsumexp", (*source, both, True, True, True, False, extra)
        yield f"{name}: shared logsumexp", "logsumexp", (*source, torch.ones(1), True, True, False, True, 0)
        yield f"{name}: row logsumexp", "logsumexp", (*source, a, True, False, True, True, 0)
        yield f"{name}: column entropy", "logsumexp", (*source, b, False, True, True, True, softmax.ENTROPY)
        asked = (*source, both, True, True)
        *sums, _ = torch.ops.itrloss.logsumexp(*asked, True, False, softmax.ENTROPY)
        grads, flags = (both, torch.stack([both, both]), None), (True, False, softmax.ENTROPY, True, False)
        yield f"{name}: entropy_backward", "logsumexp_backward", (*asked, *sums, *grads, *flags)
        *sums, _ = torch.ops.itrloss.logsumexp(*asked, True, False, 0)
        grads, flags = (both, None, carried), (True, False, 0, True, False)
        yield f"{name}: logsumexp_backward", "logsumexp_backward", (*asked, *sums, *grads, *flags)
        if cols is not None:
            for wanted in (False, True):
                yield f"{name}: memory_sums {wanted}", "memory_sums", (*source, a, True, True, wanted)
        yield f"{name}: moment_sums", "moment_sums", (*source, True, False)
        yield f"{name}: moment_sums of both", "moment_sums", (*source, True, True)
        for grads in ((both, None), (None, both)):
            given = (True, True, both, *grads, True, True)
            yield f"{name}: moment_sums_backward", "moment_sums_backward", (*source, *given)
        yield f"{name}: hardest", "hardest", (*source, True, True)
        yield f"{name}: pair_scores", "pair_scores", (*source[:4], *pairs)
        if name == "diagonal":
            yield f"{name}: aligned pair_scores", "pair_scores", (*source[:4], None, None)
            yield f"{name}: aligned backward", "pair_scores_backward", (*source[:4], None, None, a, a, True, True)
        yield f"{name}: pair_scores_backward", "pair_scores_backward", (*source[:4], *pairs, a, a, True, True)
        for negative in (False, True):
            asked = (*source, "hinge", negative, [a], [b])
            yield f"{name}: term_sums {negative}", "term_sums", (*asked, True, True)
            yield (
                f"{name}: term_sums_backward {negative}",
                "term_sums_backward",
                (*asked, a, b, None, True, True, negative),
            )
        yield f"{name}: violations", "violations", (*source, 0.2, True, True)
        yield f"{name}: violations_backward", "violations_backward", (*source, 0.2, a, b, True, True)


@pytest.mark.parametrize(("operator", "args"), [pytest.param(*x[1:], id=x[0]) for x in calls()])
def test_operator_keeps_its_contract(operator, args):
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.itrloss, operator).default, args, test_utils=tests)


def saved_bytes(loss, v, w, ids) -> int:
    """Storage that autograd holds between forward and backward, beyond the inputs themselves."""
    seen = {}

    def pack(x):
        seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        value = loss(v, w, *ids)
    for x in (v, w, *(i for i in ids if i is not None)):
        seen.pop(x.untyped_storage().data_ptr(), None)
    assert value.requires_grad
    return sum(seen.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, "captions"])
@pytest.mark.parametrize("name", LOSSES)
def test_tiled_engine_saves_nothing_of_the_size_of_the_matrix(name, kind, dtype):
    """A few numbers per embedding: less than an eighth of what the embeddings themselves take."""
    n, d = 512, 256
    m = n if kind is None else 2 * n
    v, w = (x.requires_grad_() for x in embeddings(n, m, d, dtype=dtype))
    saved = saved_bytes(make(name, engine="tiled"), v, w, make_ids(kind, n, m))
    assert saved <= (n + m) * d * 4 / 8


def test_exponentials_are_kept_for_those_only_who_read_them():
    v, w = embeddings(64, 64, 32, dtype=torch.float32)
    scale = torch.tensor([5.0], requires_grad=True)

    def saved(*leaves):
        return saved_bytes(
            lambda v, w: itrloss.Similarity(v, w, engine="dense").both.logsumexp(scale)[0].sum(), *leaves, ()
        )

    alone = saved(v, w)
    assert alone < 1.5 * 64 * 64 * 4 < saved(v.requires_grad_(), w)


@pytest.mark.parametrize("name", ["infonce", "triplet"])
def test_one_graph_for_batches_of_any_size(name):
    """Few long vectors are multiplied otherwise than many short ones, which is no matter of the compiler's."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(make(name), fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for n in (16, 32, 80):
        compiled(*(x.requires_grad_() for x in embeddings(n, n, 32, dtype=torch.float32))).backward()
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1]


def test_sets_save_nothing_of_the_size_of_their_matrices():
    n, m, k, d = 256, 1024, 4, 64
    images = torch.randn(n, k, d, requires_grad=True)
    texts = torch.randn(m, d, requires_grad=True)
    ids = torch.arange(n), torch.arange(n).repeat_interleave(m // n)
    for shared in (True, False):
        loss = itrloss.VarianceAwareLoss(engine="tiled", shared_sigma=shared)
        saved = saved_bytes(loss, images, texts, ids)
        # Some numbers for each positive pair and head, and the strided embeddings of a head.
        assert saved <= (n * k * d + m * d + 60 * k * m) * 4 < n * m * k * 4 / 2


def test_classification_by_many_prototypes_saves_no_logits():
    batch, clusters, d = 256, 20_000, 32
    images, texts = (torch.randn(batch, d, requires_grad=True) for _ in range(2))
    module = itrloss.PrototypeClassificationLoss(d, clusters, engine="tiled")
    saved = saved_bytes(lambda *x: module(*x[:2], x[2]), images, texts, (torch.randint(0, clusters, (batch,)),))
    assert saved <= 2 * (2 * batch + clusters) * (d + 8) * 4 < 2 * batch * clusters * 4


MEASURE = """
    import resource, sys, threading, time, torch, itrloss

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

    v, w = (torch.randn({n}, {d}).requires_grad_() for _ in range(2))
    small = [torch.randn(600, {d}).requires_grad_() for _ in range(2)]
    loss = itrloss.{loss}
    loss(*small).backward()  # libraries load and threads start before the measurement
    start, peak, done = resident(), 0, False

    def watch():
        global peak
        while not done:
            peak = max(peak, resident())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    loss(v, w, *{ids}).backward()
    done = True
    thread.join()
    assert v.grad.isfinite().all()
    print((peak - start) / 1e6)
"""


def extra_megabytes(loss: str, n: int, d: int, ids: str = "()") -> float:
    """Growth of the resident set over inputs, in a fresh process."""
    code = textwrap.dedent(MEASURE.format(loss=loss, n=n, d=d, ids=ids))
    if not Path("/proc/self/statm").exists():
        pytest.skip("the resident set is read from /proc, which this system does not have")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(out.stdout)


@pytest.mark.slow
def test_memory_of_dcl_on_a_large_batch():
    """16384 pairs of 512 dimensions: the matrix alone has 1074 MB, plain PyTorch takes over 4 GB."""
    assert extra_megabytes("DiversityContrastiveLoss()", 16384, 512) < 250


@pytest.mark.slow
@pytest.mark.parametrize("ids", ["()", "[torch.arange(4096) // 2] * 2"])
@pytest.mark.parametrize("loss", ["HubnessAwareLoss", "DiversityContrastiveLoss", "TripletLoss", "SigmoidLoss"])
def test_a_dense_loss_holds_one_matrix(loss, ids):
    """4096 pairs, a matrix of 67 MB: the gradient is written over the scores."""
    option = {"TripletLoss": "mining='all', ", "SigmoidLoss": "learnable=False, "}.get(loss, "")
    assert extra_megabytes(f"{loss}({option}engine='dense')", 4096, 64, ids) < 115


@pytest.mark.slow
def test_memory_grows_with_n_and_not_with_its_square():
    two, four = (extra_megabytes("InfoNCELoss(engine='tiled')", n, 64) for n in (4096, 8192))
    assert four < 100  # the matrix: 268 MB
    assert four - two < 40


class Products(TorchDispatchMode):
    """Counts the work of matrix products."""

    def __init__(self):
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._overloadpacket.__name__
        factors = {"mm": args[:2], "addmm": args[1:3], "addmm_": args[1:3]}.get(name)
        if name == "_linear_pointwise":
            factors = args[0], args[1].T
        if factors:
            self.flops += 2 * factors[0].numel() * factors[1].shape[1]
        return function(*args, **(kwargs or {}))


# As docs/engines.rst has it, in multiples of N M D: for gradients of both sides, and for those of the images alone.
WORK = {
    "infonce": {"dense": (6, 4), "tiled": (8, 6)},
    "hal": {"dense": (6, 4), "tiled": (8, 6)},
    "dcl": {"dense": (6, 4), "tiled": (10, 8)},
    "dcl entropy": {"dense": (6, 4), "tiled": (10, 8)},
    "dcl through diversity": {"dense": (6, 4), "tiled": (16, 12)},
    "sigmoid": {"dense": (6, 4), "tiled": (8, 6)},
    "triplet": {"dense": (2, 2), "tiled": (2, 2)},
    "triplet all": {"dense": (6, 4), "tiled": (8, 6)},
}


@pytest.mark.parametrize("library", ["by_blas", "by_onednn"])
@pytest.mark.parametrize("engine", ["dense", "tiled"])
@pytest.mark.parametrize("name", WORK)
def test_no_product_is_made_twice_or_for_nothing(name, engine, library, request):
    request.getfixturevalue(library)
    n, m, d = 30, 30, 200
    loss = make(name, engine=engine)
    for both, wanted in zip((True, False), WORK[name][engine], strict=True):
        v, w = (x.float() for x in embeddings(n, m, d))
        v.requires_grad_(), w.requires_grad_(both)
        with Products() as products:
            loss(v, w).backward()
        assert products.flops == wanted * n * m * d


QUESTIONS = {
    "logsumexp": lambda both: both.logsumexp(5.0),
    "logsumexp of each": lambda both: both.logsumexp(torch.linspace(1, 9, 120), torch.linspace(9, 1, 120)),
    "softplus": lambda both: both.negatives("softplus", *[(torch.tensor([9.0]), torch.tensor([-1.0]))] * 2),
    "violations": lambda both: both.violations(0.2),
}


@pytest.mark.parametrize("ids", [None, torch.arange(120) // 2], ids=["one-to-one", "several positives"])
@pytest.mark.parametrize("case", ["once", "twice", "seen", "asked", "twin", "two readers", "by the moments too"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_scores_that_backward_may_overwrite(question, case, ids, monkeypatch):
    """One that is the only reader writes its gradient over them; nobody may notice."""
    monkeypatch.setitem(tiles.PANEL, "cpu", 2000)  # the last of several panels is ragged
    n, d = 120, 40  # more dimensions than scores would have the product keep them for itself
    v, w = (x.float() for x in embeddings(n, n, d))
    found = {}
    for engine in ("dense", "reference"):
        x, y = v.clone().requires_grad_(), w.clone().requires_grad_()
        sim = itrloss.Similarity(x, y, ids, ids, engine=engine)
        twin = sim.detach() if case == "twin" else None
        rows, cols = QUESTIONS[question](sim.both)
        loss = rows.sum() + cols.square().sum()
        if case == "two readers":
            loss = loss + QUESTIONS[question](sim.both)[0].sum()
        if case == "by the moments too":
            loss = loss + sim.moments().std.sum()
        seen = sim.scores() if case == "seen" else None
        before = None if seen is None else seen.detach().clone()
        for _ in range(2 if case == "twice" else 1):
            loss.backward(retain_graph=case in ("twice", "asked"))
        spent = engine == "dense" and case in ("once", "twice", "asked")
        assert sim._matrix._kept.spent == spent
        if case == "asked":
            (sim.entropy(0.5).sum() + sim.logsumexp(3.0).sum()).backward(retain_graph=True)
        if seen is not None:
            assert torch.equal(seen, before)
        if twin is not None:  # it has the scores of then, whatever happens to the embeddings
            with torch.no_grad():
                x.mul_(-1)
            assert torch.allclose(twin.scores(), itrloss.Similarity(v, w, engine="reference").scores(), atol=1e-6)
        found[engine] = (x.grad, y.grad)
    for mine, wanted in zip(found["dense"], found["reference"], strict=True):
        assert (mine - wanted).abs().max() <= 1e-5 * wanted.abs().max()


OVERWRITERS = ["infonce", "dcl", "sigmoid", "triplet all"]


@pytest.mark.parametrize("name", OVERWRITERS)
def test_embeddings_may_change_before_backward(name):
    """Both passes go by what they were: nothing is saved of them but the scores and unit vectors."""
    v, w = (x.float() for x in embeddings(100, 100, 10))
    first = v.clone().requires_grad_()
    wanted = torch.autograd.grad(make(name)(first, w), first)[0]
    x, y = v.clone().requires_grad_(), w.clone()
    loss = make(name)(x, y)
    y.zero_()
    for _ in range(2):
        found = torch.autograd.grad(loss, x, retain_graph=True)[0]
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", OVERWRITERS)
def test_checkpoints_and_hooks_on_saved_tensors(name):
    """Each saved tensor is unpacked once, and a copy that a hook keeps is not written over."""
    v, w = (x.float() for x in embeddings(100, 100, 10))
    found = []
    for way in ("plain", "checkpoint", "hooks"):
        x, y = v.clone().requires_grad_(), w.clone().requires_grad_()
        if way == "checkpoint":
            checkpoint(make(name), x, y, use_reentrant=False).backward()
        elif way == "hooks":
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copy: copy):
                loss = make(name)(x, y)
            loss.backward(retain_graph=True)
            x.grad = y.grad = None
            loss.backward()
        else:
            make(name)(x, y).backward()
        found.append(torch.cat((x.grad, y.grad)))
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.mark.parametrize("name", OVERWRITERS)
def test_embeddings_made_in_inference_mode(name):
    v, w = (x.float() for x in embeddings(100, 100, 10))
    with torch.inference_mode():
        fixed = w.clone()
    x, y = v.clone().requires_grad_(), v.clone().requires_grad_()
    make(name)(x, fixed).backward()
    make(name)(y, w).backward()
    torch.testing.assert_close(x.grad, y.grad)
    scale = torch.tensor(5.0, requires_grad=True)
    with torch.inference_mode():
        frozen = v.clone()
    itrloss.Similarity(frozen, fixed, engine="dense").logsumexp(scale).sum().backward()
    assert scale.grad is not None


def test_second_derivatives_are_refused_not_wrong():
    v, w = (x.requires_grad_() for x in embeddings(5, 5))
    for engine in ("dense", "tiled"):
        for name in LOSSES:
            with pytest.raises(RuntimeError, match="second derivatives"):
                torch.autograd.grad(make(name, engine=engine)(v, w), v, create_graph=True)
