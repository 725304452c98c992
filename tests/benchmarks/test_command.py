"""``python -m benchmarks``: rows of losses and peers, how they are measured, and the command."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.cases import clip
from support.graphs import FakeCuda
from support.processes import start
from support.transcripts import printed, replay
from support.versions import reset_compiler

from benchmarks import cases, mining, peers, processes, report, reranking, runner
from benchmarks.__main__ import main
from benchmarks.cases import KINDS, LOSSES, SUITES, Case, embeddings, problem
from itrloss import files
from itrloss.engine import products
from itrloss.engine.matrix import Matrix

SHAPES = {"pairs": (12, 12, 8), "memory": (6, 20, 8), "sets": (6, 3, 8), "prototypes": (6, 9, 8)}
QUICK = ["infonce", "mdcl"]
SLOW = pytest.mark.slow
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9, torch.bfloat16: 0.05, torch.float16: 0.05}
OTHER_TYPES = ["dcl std", "mdcl", "variance aware", "pgc"]


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Keep what was imported out of the collections before each measurement of memory, most of the
    time otherwise.
    """
    torch._dynamo.reset()  # each measurement imports the compiler
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def small(loss: str, dtype: torch.dtype = torch.float32) -> Case:
    """The smallest case of a loss."""
    return Case(loss, SHAPES[LOSSES[loss].kind], dtype)


def measured(case: Case, *variants: str, **more: Any) -> dict[str, dict]:
    """The row of each variant."""
    return {row["variant"]: row for row in runner.measure(case, variants, seconds=0.001, **more)}


# -------------------------------------------------------------------------------------------- rows


CASES = [
    pytest.param(loss, dtype, marks=[] if dtype == torch.float32 and loss in QUICK else SLOW)
    for loss in LOSSES
    for dtype in (TOLERANCES if loss in OTHER_TYPES else [torch.float32])
]


@pytest.mark.parametrize(("loss", "dtype"), CASES)
def test_rows_of_a_loss(loss, dtype):
    """Ours, of each engine, and eager PyTorch are one loss, and each row says how long it took."""
    rows = measured(small(loss, dtype), "eager", "matmul_bound", "ours tiled")
    assert list(rows) == ["ours", "eager", "matmul_bound", "ours tiled"]
    for name, row in rows.items():
        assert row["dtype"] == str(dtype).removeprefix("torch.")
        assert row["rounds"] >= 3
        assert min(row[key] for key in ("seconds", "to ours", "to matmul_bound")) > 0
        assert row.get("gradient difference", 0.0) < TOLERANCES[dtype]
        assert ("gradient difference" in row) == (name in ("eager", "ours tiled"))
        assert ("products" in row) == name.startswith("ours")
    assert rows["ours"]["to ours"] == rows["matmul_bound"]["to matmul_bound"] == 1
    if LOSSES[loss].kind != "prototypes":  # these have no score matrix
        assert rows["ours"]["engine"] == rows["ours tiled"]["engine"] == "tiled"


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_eager_losses_compile_without_a_graph_break(loss):
    plain = LOSSES[loss].plain
    made = problem(small(loss))
    arguments = (*made.leaves, *made.plain_arguments)
    reset_compiler()
    compiled = torch.compile(plain, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*arguments), plain(*arguments))


@pytest.mark.slow
def test_compiled_variants():
    rows = measured(small("infonce"), "matmul_bound", "ours compiled", "eager compiled")
    for name in ("ours compiled", "eager compiled"):
        assert rows[name]["gradient difference"] < 1e-5
        assert rows[name]["to ours"] > 0
        assert "to matmul_bound" not in rows[name]  # they run in rounds of their own


@pytest.mark.parametrize(("fixture", "libraries"), [("by_blas", "BLAS"), ("by_onednn", "oneDNN")])
def test_rows_of_ours_name_what_was_chosen(fixture, libraries, request):
    request.getfixturevalue(fixture)
    chosen = Matrix.__init__, products._use_onednn
    row = measured(Case("infonce", (300, 300, 8)))["ours"]
    assert (row["engine"], row["products"]) == ("tiled", libraries)
    assert (Matrix.__init__, products._use_onednn) == chosen


@pytest.mark.parametrize("loss", ["infonce", "dcl std", "sigmoid"])
def test_several_captions_an_image(loss):
    rows = measured(Case(loss, (8, 40, 16)), "eager", accuracy=True)
    assert rows["eager"]["gradient difference"] < 1e-5
    assert rows["ours"]["gradient error"] < 1e-5
    images, texts = (F.normalize(x) for x in embeddings(8, 16, per_image=5))
    own = torch.arange(8)[:, None] == torch.arange(40) // 5
    cosines = images @ texts.T
    assert cosines[own].mean() > cosines[~own].mean() + 0.1


def test_accuracy_tells_a_rough_gradient_from_an_exact_one():
    rows = measured(Case("infonce", (16, 16, 8), torch.bfloat16), "eager", accuracy=True)
    rough = rows["eager"]["gradient error"]
    assert rows["ours"]["gradient error"] < rough
    assert 1e-4 < rough < 0.1  # the products are rounded under autocast


@pytest.mark.parametrize("block", [50, None])
@pytest.mark.parametrize("kind", SHAPES)
def test_matmul_bound_counts_the_products_it_makes(kind, block, monkeypatch):
    from support.versions import FlopCounterMode

    if block:  # of rows
        monkeypatch.setattr(cases, "_BLOCK", block)
    made = problem(small(next(name for name, loss in LOSSES.items() if loss.kind == kind)))
    with FlopCounterMode(display=False) as counter:
        made.matmul_bound()
    assert counter.get_total_flops() == made.flops


# ------------------------------------------------------------------------------------------- runner


def test_variants_take_turns_in_changing_order():
    order: list[str] = []
    names = ["ours", "eager", "matmul_bound"]
    steps: dict[str, Callable] = {name: lambda name=name: order.append(name) for name in names}
    rows = {name: {"variant": name} for name in names}
    times = runner._interleave(steps, 30, Case("infonce", (2, 2, 2)), rows)
    rounds = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert [len(seconds) for seconds in times.values()] == [30] * 3
    assert len(rounds) == 30
    assert set(rounds) == set(itertools.permutations(names))
    assert runner._ratio([1.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2.0  # the median of rounds


def test_peak_of_memory_is_that_of_the_step():
    case = Case("infonce", (64, 64, 8))
    inputs = problem(case)
    idle = runner._peak(lambda: None, case, inputs)
    large = runner._peak(lambda: torch.ones(16_000_000).sum(), case, inputs)  # 64 MB
    if not sys.platform.startswith("linux"):
        assert idle is None and large is None
    else:
        assert idle < 5
        assert 60 < large < 75


@pytest.mark.parametrize("loss", ["pgc", "infonce"])
def test_steps_begin_without_gradients(loss):
    inputs = problem(small(loss))
    run = runner.step("eager", small(loss), inputs)
    run()
    before = [x.grad.clone() for x in inputs.trained]
    run()
    assert len(before) == (3 if loss == "pgc" else 2)
    assert all(torch.equal(a, x.grad) for a, x in zip(before, inputs.trained, strict=True))


def test_a_graph_is_recorded_once_and_leaves_its_gradients(monkeypatch):
    fake = FakeCuda(monkeypatch)
    leaf = torch.zeros(2, requires_grad=True)

    def run():
        fake.log.append("run")
        leaf.grad = torch.ones(2)

    replay = runner.graphed(run, torch.device("cuda"), [leaf])
    recorded = leaf.grad
    leaf.grad = None
    replay()
    calls = [name for name in fake.log if name in ("run", "graph", "replay")]
    assert calls == ["run"] * 3 + ["graph", "run", "replay"]
    assert leaf.grad is recorded


def test_a_failure_of_ours_is_no_row(monkeypatch):
    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr(cases, "module", broken)
    with pytest.raises(RuntimeError, match="broken"):
        measured(Case("infonce", (4, 4, 4)))


# when it fails: at once, when memory is measured, or when it is timed
@pytest.mark.parametrize("calls", [0, 1, 4])
def test_a_failure_of_a_peer_loses_nothing_else(monkeypatch, calls):
    left = [calls]

    def loss(images, texts):
        left[0] -= 1
        if left[0] < 0:
            raise ArithmeticError("no more")
        return (images * texts).sum()

    peer = peers.Peer(("infonce",), lambda case, problem: loss)
    monkeypatch.setitem(peers.PEERS, "open_clip", peer)
    rows = measured(Case("infonce", (4, 4, 4)), "open_clip", "eager")
    assert rows["open_clip"]["error"] == "no more"
    assert "to ours" not in rows["open_clip"]
    assert rows["eager"]["rounds"] >= 3


# -------------------------------------------------------------------------------------------- peers


def cross_entropy(x, weight, target, **more):
    return F.cross_entropy(x @ weight.T, target, **more)


def sigmoid_loss(images, texts, scale, bias):
    logits = scale * images @ texts.T + bias
    signs = 2 * torch.eye(len(images)) - 1
    return -F.logsigmoid(signs * logits).sum() / len(images)


def flash_loss(q, k, scale):
    return cross_entropy(scale * q, k, torch.arange(len(q)), reduction="none")


# The interfaces of libraries that are not installed, or want a GPU, in plain PyTorch.
CLIP = {
    "ClipLoss": lambda cache_labels: clip,
    "SigLipLoss": lambda cache_labels: sigmoid_loss,
}
STAND_INS: dict[str, tuple[str, dict[str, Any]]] = {
    "open_clip": ("benchmarks._open_clip_loss", CLIP),
    "open_clip siglip": ("benchmarks._open_clip_loss", CLIP),
    "siglip-kernel": (
        "siglip_kernel",
        {"fused_siglip_loss": lambda v, w, log, b: sigmoid_loss(v, w, log.exp(), b)},
    ),
    "cut-cross-entropy": ("cut_cross_entropy", {"linear_cross_entropy": cross_entropy}),
    "liger-kernel": (
        "liger_kernel.transformers.functional",
        {"liger_fused_linear_cross_entropy": cross_entropy},
    ),
    "inf-cl": ("inf_cl", {"cal_flash_loss": flash_loss}),
}


@pytest.mark.parametrize("name", peers.PEERS)
def test_peers_are_called_for_the_same_gradient(name, monkeypatch):
    monkeypatch.setattr(peers, "_on_cuda", lambda case: None)
    if name in STAND_INS:
        module, contents = STAND_INS[name]
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**contents))
    elif name.startswith("pytorch") and not find_spec("pytorch_metric_learning"):
        pytest.skip("pytorch-metric-learning is not installed")
    elif name.startswith("linear") and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("PyTorch is too old")
    loss = peers.PEERS[name].losses[0]
    dtype = torch.bfloat16 if name == "cut-cross-entropy" else torch.float32
    shape = (9, 9, 256) if loss != "mdcl" else SHAPES["memory"]
    row = measured(Case(loss, shape, dtype), name)[name]
    assert row["to ours"] > 0, row
    assert ("gradient difference" in row) == (loss != "mdcl")  # theirs has other negatives
    assert row.get("gradient difference", 0.0) < TOLERANCES[dtype]


NOT_INSTALLED = {
    **{name: module for name, (module, _) in STAND_INS.items() if "open_clip" not in name},
    **{name: "pytorch_metric_learning.losses" for name in peers.PEERS if "metric" in name},
}


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_that_is_not_installed_says_so(name, monkeypatch):
    real = peers.importlib.util.find_spec
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda x: None if x == "open_clip" else real(x)
    )
    monkeypatch.delitem(sys.modules, "benchmarks._open_clip_loss", raising=False)
    monkeypatch.setattr(peers, "_on_cuda", lambda case: None)
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    if name in NOT_INSTALLED:
        monkeypatch.setitem(sys.modules, NOT_INSTALLED[name], None)
    loss = peers.PEERS[name].losses[0]
    shape = (9, 9, 256) if loss != "mdcl" else SHAPES["memory"]
    rows = measured(Case(loss, shape, torch.bfloat16), name)
    reason = torch.__version__ if name.startswith("linear") else "the extra 'bench'"
    assert reason in rows[name]["error"]
    assert reason in report.table(rows.values())


LIMITS = [
    ("open_clip", Case("sigmoid", (4, 4, 4)), "has infonce only"),
    ("open_clip", Case("infonce", (4, 8, 4)), "one positive"),
    ("pytorch-metric-learning ntxent", Case("infonce", (512, 2048, 8)), "GB"),
    ("liger-kernel", Case("infonce", (8, 8, 4)), "CUDA"),
    ("ours graphed", Case("infonce", (8, 8, 4)), "CUDA"),
]
LIMITS_ON_GPUS = [
    ("cut-cross-entropy", Case("infonce", (9, 9, 256)), "half precision"),
    ("inf-cl", Case("infonce", (9, 9, 8)), "256"),
    ("siglip-kernel", Case("sigmoid", (9, 9, 8), torch.float64), "float64"),
]


@pytest.mark.parametrize(("name", "case", "reason"), [*LIMITS, *LIMITS_ON_GPUS])
def test_a_variant_that_cannot_do_a_case_says_why(name, case, reason, monkeypatch):
    if (name, case, reason) in LIMITS_ON_GPUS:
        monkeypatch.setattr(peers, "_on_cuda", lambda case: None)
    assert reason in measured(case, name)[name]["error"]


def test_all_peers_of_a_loss_are_measured():
    rows = measured(Case("infonce", (4, 4, 4)), "peers")
    of_loss = [name for name, peer in peers.PEERS.items() if "infonce" in peer.losses]
    assert list(rows) == ["ours", *of_loss]


# ------------------------------------------------------------------------------------------ command


@pytest.fixture
def unmeasured(monkeypatch):
    """Replace measurements by rows without any; yields the cases and their variants."""
    seen: list[tuple[Case, Any]] = []

    def measure(case, variants, *given):
        seen.append((case, variants))
        return [{**case.fields(), "variant": "ours", "seconds": 1.0}]

    monkeypatch.setattr(runner, "measure", measure)
    return seen


def test_suites_name_cases_and_variants_that_exist():
    known = {*runner.VARIANTS, *peers.PEERS}
    for suite in SUITES.values():
        assert suite.cases
        assert set(suite.variants) <= known
        for case in suite.cases:
            assert len(case.shape) == 3
            assert case.kind in KINDS


def test_command_writes_table_json_and_plot(tmp_path, capsys):
    out = tmp_path / "a" / "rows.json"
    picture = tmp_path / "b" / "bars.svg"
    command = "--losses infonce mdcl --variants eager matmul_bound --seconds 0.001 --accuracy"
    files = ["--out", str(out), "--plot", str(picture)]
    assert main(["--shapes", "6x12x4", *command.split(), *files]) == 0
    shown = capsys.readouterr()
    assert "[2/2] mdcl 6x12x4" in shown.err
    results = json.loads(out.read_text())
    found = [(row["loss"], row["variant"]) for row in results["rows"]]
    assert found == [*itertools.product(QUICK, ["ours", "eager", "matmul_bound"])]
    assert results["machine"] == runner.machine("cpu")
    for row in results["rows"]:
        assert f"{1e3 * row['seconds']:.4g}" in shown.out
    assert picture.read_text().count("<!-- infonce 6x12x4 · ") == 3


def test_wrong_arguments_end_in_one_line(monkeypatch, tmp_path, unmeasured):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10**6}.get)
    replay("benchmarks", benchmarks=partial(printed, main))
    assert main(["--shapes", f"{'9' * 5000}x8"]) == 2
    assert not unmeasured


@pytest.mark.parametrize(
    ("words", "name", "value", "complaint"),
    [
        (["--seconds", "0"], "cases._BLOCK", 1, "seconds: expected a number above 0"),
        ([], "cases.module", lambda *given: torch.empty(2**58), "can't allocate memory"),
    ],
)
def test_a_measurement_that_fails_ends_in_one_line(
    words, name, value, complaint, monkeypatch, capsys
):
    monkeypatch.setattr(f"benchmarks.{name}", value)
    assert main(words) == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert main(["--plot", "x.svg"]) == 2
    assert "the extra 'bench'" in capsys.readouterr().err


def test_results_of_yesterday_stay_until_there_are_others(monkeypatch, tmp_path):
    out = tmp_path / "rows.json"
    out.write_text("of yesterday")
    seen: list[str] = []
    monkeypatch.setattr(runner, "measure", lambda *args: seen.append(out.read_text()) or [])
    assert main(["--out", str(out)]) == 0
    assert seen[0] == "of yesterday"
    assert json.loads(seen[1])["rows"] == []
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_leaves_the_rows_measured_before(monkeypatch, tmp_path, capsys, unmeasured):
    out = tmp_path / "rows.json"

    def full(path, mode, **options):
        if len(unmeasured) > 1:
            Path(path).touch()
            path = "/dev/full"
        return open(path, mode, **options)

    monkeypatch.setattr(files, "open", full, raising=False)
    assert main(["--out", str(out)]) == 2
    assert os.strerror(errno.ENOSPC) in capsys.readouterr().err.splitlines()[-1]
    (row,) = json.loads(out.read_text())["rows"]
    assert len(unmeasured) == 2
    assert tuple(row["shape"]) == unmeasured[0][0].shape
    assert list(tmp_path.iterdir()) == [out]


def test_cases_named_twice_are_measured_once(unmeasured):
    assert main(["--suites", "quick", "quick"]) == 0
    quick = SUITES["quick"]
    assert unmeasured == [(case, quick.variants) for case in quick.cases]


def test_a_single_pair_is_no_number_and_no_reason_to_stop(tmp_path):
    out = tmp_path / "rows.json"
    command = "--losses infonce --shapes 1x8 --seconds 0.001 --out"
    assert main([*command.split(), str(out)]) == 0
    assert json.loads(out.read_text())["rows"][1]["gradient difference"] in (0.0, None)


# ----------------------------------------------------------------------------------- other commands

# Columns of results that are not the runner's, by the name of their file.
RERANKING = ["shape", "to matmul_bound", "rr to fast on the matrix", "mr to fast on the matrix"]
COLUMNS = {
    "reranking": [*RERANKING, "seconds"],
    "noise": ["loss", "noise", "seed", "last", "best"],
    "judged": ["system"],
    "negatives": ["form", "split", "options", "rsum"],
    "conformance": ["loss", "package"],
    "peak": ["loss", "shape", "variant", "peak_mb"],
    "processes": ["how", "loss", "shape", "seconds"],
    "command": ["method", "seconds"],
    "trainer": ["study"],
    "rerankers": ["study"],
    "ablations": ["paper", "table"],
    "mining": ["way", "shape", "k", "seconds", "to ours", "same neighbours", "peak_mb"],
}


def check_record(path: Path, *about: str) -> list[dict[str, Any]]:
    """Return the rows of a file, which have the columns of its kind."""
    results = json.loads(path.read_text(encoding="utf-8"))
    assert {"processor", "torch", "date", *about} <= set(results["machine"]), path.name
    columns = COLUMNS.get(path.stem.removeprefix("cpu_").split("_")[-1])
    for row in results["rows"]:
        if columns is not None:
            assert row.keys() >= set(columns), path.name
            continue
        assert row["loss"] in LOSSES, path.name
        assert row["variant"] in {*runner.VARIANTS, *peers.PEERS}, path.name
        assert "shape" in row, path.name
        assert row.keys() & {"seconds", "error"}, path.name
    return results["rows"]


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_rows_of_the_present_form(path):
    if not path.stem.startswith("gpu_"):  # see test_gpu.py
        assert check_record(path, "device")


def test_reranking_is_measured_and_written(monkeypatch, tmp_path, capsys):
    out = tmp_path / "reranking.json"
    monkeypatch.setattr(reranking, "SIZES", ((6, 30), (8, 40)))
    monkeypatch.setattr(sys, "argv", ["reranking", "--rounds", "1", "--out", str(out)])
    assert reranking.main() == 0
    rows = check_record(out)
    assert [row["shape"] for row in rows] == [[*size, reranking.DIM] for size in reranking.SIZES]
    for row in rows:
        assert row["largest difference to dense metrics"] < 1e-6
        assert min(row["seconds"].values()) > 0
    assert "rr to fast on the matrix: " in capsys.readouterr().out


def test_methods_of_the_command_are_timed_and_written(monkeypatch, tmp_path):
    out = tmp_path / "rerank_command.json"
    monkeypatch.setattr(reranking, "SIZES", ((6, 30),))
    monkeypatch.setattr(sys, "argv", ["reranking", "--methods", "--out", str(out)])
    assert reranking.main() == 0
    rows = check_record(out)
    assert {"no re-ranking", "csls", "fast"} <= {row["method"] for row in rows}
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)


def test_mining_is_measured_and_written(tmp_path):
    out = tmp_path / "mining.json"
    assert mining.main(["--shape", "20", "3000", "16", "--rounds", "1", "--out", str(out)]) == 0
    rows = {row["way"]: row for row in check_record(out)}
    assert {"ours", "mm and topk", "matmul_bound"} <= rows.keys()
    assert rows["ours"]["to ours"] == 1
    assert {row["same neighbours"] for row in rows.values()} <= {None, 1.0}
    assert min(row["seconds"] for row in rows.values()) > 0


@pytest.mark.slow
def test_processes_are_timed_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "spawn", start)
    out = tmp_path / "processes.json"
    command = f"--pairs 32 --dim 8 --repeats 1 --losses InfoNCELoss --out {out}"
    assert processes.main(command.split()) == 0
    rows = check_record(out)
    assert [row["how"] for row in rows] == [*processes.FORMS.values()]
    assert rows[0]["to one process"] == 1
    assert min(row["seconds"] for row in rows) > 0


@pytest.mark.parametrize(
    ("loss", "shape", "variant", "most"),
    [
        ("infonce", (512, 512, 1024), "ours", 47),
        ("dcl std", (512, 512, 1024), "ours", 89),
        ("mdcl", (128, 4096, 1024), "ours", 190),
        ("mdcl", (128, 4096, 1024), "eager", 191),
        pytest.param("mdcl", (128, 4096, 1024), "ours compiled", 54, marks=pytest.mark.slow),
    ],
)
def test_launches_of_a_step(loss, shape, variant, most):
    """At these sizes a GPU spends its time on launches."""
    from benchmarks.launches import launches  # and the compiler, which takes a second

    assert sum(launches(Case(loss, shape), variant)) <= most
