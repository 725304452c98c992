"""``python -m benchmarks``: cases, variants, peers, output files, and errors for invalid use."""

import contextlib
import errno
import gc
import itertools
import json
import os
import re
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.processes import start

from benchmarks import cases, mining, peers, processes, report, reranking, runner
from benchmarks.__main__ import main
from benchmarks.cases import KINDS, LOSSES, SUITES, Case, embeddings, parse_shape, problem
from itrloss.cli import files
from itrloss.engine import products
from itrloss.engine.matrix import Matrix

SHAPES = {"pairs": (12, 12, 8), "memory": (6, 20, 8), "sets": (6, 3, 8), "prototypes": (6, 9, 8)}


@pytest.fixture(scope="module", autouse=True)
def small_heap():
    """Keep what was imported out of the collections before each measurement of memory, most of the
    time otherwise.
    """
    torch._dynamo.reset()  # each measurement imports the compiler
    gc.collect()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def small_heap_again(small_heap):
    """Keep what other tests imported out of them, too."""
    gc.freeze()


def _measure(case: Case, *variants: str, **more) -> dict[str, dict]:
    return {row["variant"]: row for row in runner.measure(case, variants, seconds=0.001, **more)}


@pytest.mark.parametrize(
    "loss",
    [
        "infonce",
        "mdcl",
        *(pytest.param(x, marks=pytest.mark.slow) for x in LOSSES if x not in ("infonce", "mdcl")),
    ],
)
def test_ours_and_eager_are_the_same_loss(loss):
    rows = _measure(Case(loss, SHAPES[LOSSES[loss].kind]), "eager", "matmul_bound", "ours tiled")
    assert list(rows) == ["ours", "eager", "matmul_bound", "ours tiled"]
    assert (
        rows["eager"]["gradient difference"] < 1e-5
        and rows["ours tiled"]["gradient difference"] < 1e-5
    )
    for row in rows.values():
        assert (
            row["seconds"] > 0
            and row["rounds"] >= 3
            and row["to ours"] > 0
            and row["to matmul_bound"] > 0
        )
    assert rows["ours"]["to ours"] == 1 and rows["matmul_bound"]["to matmul_bound"] == 1
    assert (
        "gradient difference" not in rows["ours"]
        and "gradient difference" not in rows["matmul_bound"]
    )
    if LOSSES[loss].kind != "prototypes":  # these have no score matrix
        assert rows["ours"]["engine"] == rows["ours tiled"]["engine"] == "tiled"
    assert rows["ours"]["products"] == "BLAS" and not {"engine", "products"} & rows["eager"].keys()


@pytest.mark.parametrize(("fixture", "libraries"), [("by_blas", "BLAS"), ("by_onednn", "oneDNN")])
def test_rows_of_ours_name_what_was_chosen(fixture, libraries, request):
    request.getfixturevalue(fixture)
    chosen = Matrix.__init__, products._use_onednn
    rows = _measure(Case("infonce", (300, 300, 8)))
    assert (rows["ours"]["engine"], rows["ours"]["products"]) == ("tiled", libraries)
    assert (Matrix.__init__, products._use_onednn) == chosen


def test_the_machine_names_processor_and_blas(monkeypatch):
    about = runner.machine("cpu")
    assert about["processor"] and about["instructions"] == torch.backends.cpu.get_cpu_capability()
    if torch.backends.mkl.is_available():
        assert re.fullmatch(r"MKL [\d.]+", about["blas"])
    if torch.backends.mkldnn.is_available():
        assert re.fullmatch(r"v[\d.]+", about["onednn"])
    monkeypatch.setattr(torch.__config__, "show", lambda: "BLAS_INFO=open, USE_MKLDNN=0")
    assert runner.machine("cpu")["blas"] == "open" and runner.machine("cpu")["onednn"] is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    assert (
        runner.machine("cuda:0")["processor"] == "a GPU"
        and "cuBLAS" in runner.machine("cuda:0")["blas"]
    )


def test_a_graph_is_recorded_once_and_leaves_its_gradients(monkeypatch):
    case = Case("infonce", (6, 6, 8))
    with pytest.raises(peers.Unavailable, match="CUDA only"):
        runner.step("ours graphed", case, problem(case))
    calls, nothing = [], contextlib.nullcontext
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    for name in ("device", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: nothing())
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    graph = types.SimpleNamespace(replay=lambda: calls.append("replay"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    made = problem(case)

    def run():
        calls.append("run")
        made.leaves[0].grad = torch.full_like(made.leaves[0], len(calls))

    replay = runner.graphed(run, torch.device("cuda"), made.trained)
    recorded, made.leaves[0].grad = made.leaves[0].grad, None
    replay()
    assert calls == ["run"] * 4 + ["replay"] and made.leaves[0].grad is recorded


@pytest.mark.parametrize(("shape", "losses"), [((8, 40, 16), ["infonce", "dcl std", "sigmoid"])])
def test_several_captions_an_image(shape, losses):
    for loss in losses:
        rows = _measure(Case(loss, shape), "eager", accuracy=True)
        assert rows["eager"]["gradient difference"] < 1e-5
        assert rows["ours"]["gradient error"] < 1e-5
    images, texts = embeddings(8, 16, per_image=5)
    cosines = (
        torch.nn.functional.normalize(images, dim=1) @ torch.nn.functional.normalize(texts, dim=1).T
    )
    own = torch.arange(8)[:, None] == torch.arange(40) // 5
    assert cosines[own].mean() > cosines[~own].mean() + 0.1


def test_accuracy_tells_a_rough_gradient_from_an_exact_one():
    rows = _measure(Case("infonce", (16, 16, 8), torch.bfloat16), "eager", accuracy=True)
    assert rows["ours"]["gradient error"] < rows["eager"]["gradient error"]
    assert 1e-4 < rows["eager"]["gradient error"] < 0.1  # the products are rounded under autocast


def test_matmul_bound_counts_the_products_it_makes():
    from torch.utils.flop_counter import FlopCounterMode

    for kind, shape in SHAPES.items():
        made = problem(
            Case(next(name for name, loss in LOSSES.items() if loss.kind == kind), shape)
        )
        with FlopCounterMode(display=False) as counter:
            made.matmul_bound()
        assert counter.get_total_flops() == made.flops, kind


def test_matmul_bound_is_made_in_blocks_of_rows(monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr("benchmarks.cases._BLOCK", 50)
    made = problem(Case("infonce", (12, 12, 8)))
    with FlopCounterMode(display=False) as counter:
        made.matmul_bound()
    assert counter.get_total_flops() == made.flops


# ------------------------------------------------------------------------------------------- runner


def test_variants_take_turns_in_changing_order():
    order = []
    steps = {
        name: lambda name=name: order.append(name) for name in ("ours", "eager", "matmul_bound")
    }
    rows = {name: {"variant": name} for name in steps}
    times = runner._interleave(steps, 30, Case("infonce", (2, 2, 2)), rows)
    rounds = [order[i : i + 3] for i in range(0, 90, 3)]
    assert len(order) == 90 and all(sorted(r) == sorted(steps) for r in rounds)
    assert {tuple(r) for r in rounds} == set(itertools.permutations(steps))
    assert all(len(seconds) == 30 for seconds in times.values())


def test_many_rounds_where_time_allows():
    rows = {
        row["variant"]: row
        for row in runner.measure(
            Case("infonce", (4, 4, 4)), ["matmul_bound", "eager"], seconds=1.0
        )
    }
    assert rows["ours"]["rounds"] > 30


def test_ratios_are_medians_of_rounds():
    assert runner._ratio([1.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2.0


def test_compiled_code_runs_in_rounds_of_its_own():
    names = ["ours", "eager", "ours compiled", "matmul_bound", "eager compiled"]
    assert runner._groups(names) == [
        ["ours", "eager", "matmul_bound"],
        ["ours", "ours compiled", "eager compiled"],
    ]
    assert runner._groups(["ours", "eager"]) == [["ours", "eager"]]


def test_peak_of_memory_is_that_of_the_step():
    case = Case("infonce", (64, 64, 8))
    inputs = problem(case)
    small = runner._peak(lambda: None, case, inputs)
    large = runner._peak(lambda: torch.ones(16_000_000).sum(), case, inputs)  # 64 MB
    if not sys.platform.startswith("linux"):
        assert small is None and large is None
    else:
        assert small < 5 and 60 < large < 75


def test_a_failure_of_ours_is_no_row(monkeypatch):
    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr("benchmarks.cases.module", broken)
    with pytest.raises(RuntimeError, match="broken"):
        _measure(Case("infonce", (4, 4, 4)))


# when it fails: at once, when memory is measured, or when it is timed
@pytest.mark.parametrize("calls", [0, 1, 4])
def test_a_failure_of_a_peer_loses_nothing_else(monkeypatch, calls):
    left = [calls]

    def make(case, problem):
        def loss(images, texts):
            left[0] -= 1
            if left[0] < 0:
                raise ArithmeticError("no more")
            return (images * texts).sum()

        return loss

    monkeypatch.setitem(peers.PEERS, "open_clip", peers.Peer(("infonce",), make))
    rows = _measure(Case("infonce", (4, 4, 4)), "open_clip", "eager", accuracy=True)
    assert rows["open_clip"]["error"] == "no more" and "to ours" not in rows["open_clip"]
    assert rows["eager"]["rounds"] >= 3 and rows["eager"]["gradient error"] < 1e-5


def test_measure_knows_its_variants():
    with pytest.raises(ValueError, match="variants: expected some of ours"):
        _measure(Case("infonce", (4, 4, 4)), "eeager")
    with pytest.raises(ValueError, match="seconds: expected a number above 0, got -1"):
        runner.measure(Case("infonce", (4, 4, 4)), [], seconds=-1)
    rows = _measure(Case("sigmoid", (4, 4, 4)), "open_clip")
    assert rows["open_clip"]["error"] == "has infonce only"


def test_steps_begin_without_gradients():
    for loss in ("pgc", "infonce"):
        case = Case(loss, SHAPES[LOSSES[loss].kind])
        inputs = problem(case)
        run = runner.step("eager", case, inputs)
        run()
        before = [x.grad.clone() for x in inputs.trained]
        run()
        assert len(before) == (3 if loss == "pgc" else 2)
        assert all(torch.equal(a, x.grad) for a, x in zip(before, inputs.trained, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("loss", ["dcl std", "mdcl", "variance aware", "pgc"])
def test_other_types(loss, dtype):
    rows = _measure(Case(loss, SHAPES[LOSSES[loss].kind], dtype), "eager", "matmul_bound")
    assert (
        rows["matmul_bound"]["dtype"] == rows["ours"]["dtype"] == str(dtype).removeprefix("torch.")
    )
    assert rows["eager"]["gradient difference"] < (1e-9 if dtype == torch.float64 else 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_eager_losses_compile_without_a_graph_break(loss):
    plain = LOSSES[loss].plain
    made = problem(Case(loss, SHAPES[LOSSES[loss].kind]))
    arguments = (*made.leaves, *made.plain_arguments)
    torch._dynamo.reset()
    compiled = torch.compile(plain, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*arguments), plain(*arguments))


@pytest.mark.slow
def test_compiled_variants(tmp_path):
    rows = _measure(
        Case("infonce", (12, 12, 8)), "eager", "matmul_bound", "ours compiled", "eager compiled"
    )
    for name in ("ours compiled", "eager compiled"):
        assert (
            rows[name]["gradient difference"] < 1e-5
            and rows[name]["to ours"] > 0
            and "to matmul_bound" not in rows[name]
        )
    picture = tmp_path / "bars.svg"
    report.plot(picture, runner.machine("cpu"), list(rows.values()))
    assert picture.read_text().count("<!-- infonce 12x12x8 · ") == 5


# -------------------------------------------------------------------------------------------- peers


def test_peers_that_cannot_run_say_why(monkeypatch):
    real = peers.importlib.util.find_spec
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda name: None if name == "open_clip" else real(name)
    )
    # as if the library were not installed
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning.losses", None)
    rows = _measure(Case("infonce", (8, 8, 4)), "peers")
    assert set(rows) == {
        "ours",
        *(name for name, peer in peers.PEERS.items() if "infonce" in peer.losses),
    }
    assert "the extra 'bench'" in rows["open_clip"]["error"]
    assert "the extra 'bench'" in rows["pytorch-metric-learning supcon"]["error"]
    for name in ("cut-cross-entropy", "liger-kernel", "inf-cl"):
        assert "CUDA" in rows[name]["error"]
    assert "CUDA" in _measure(Case("sigmoid", (8, 8, 4)), "peers")["siglip-kernel"]["error"]
    text = report.table(rows.values())
    assert all(name in text for name in rows) and "the extra 'bench'" in text
    rows = _measure(Case("infonce", (512, 2048, 8)), "pytorch-metric-learning ntxent")
    assert "GB" in rows["pytorch-metric-learning ntxent"]["error"]
    assert "one positive" in _measure(Case("infonce", (4, 8, 4)), "open_clip")["open_clip"]["error"]


CLIP_LOSS = '''
import torch
from torch.nn import functional as F

class ClipLoss(torch.nn.Module):
    """As open_clip publishes it for one process."""
    def __init__(self, cache_labels=False):
        super().__init__()

    def forward(
        self, image_features, text_features, logit_scale, logit_bias=None, output_dict=False
    ):
        logits = logit_scale * image_features @ text_features.T
        labels = torch.arange(len(logits))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

class SigLipLoss(torch.nn.Module):
    def __init__(self, cache_labels=False):
        super().__init__()

    def forward(self, image_features, text_features, logit_scale, logit_bias, output_dict=False):
        logits = logit_scale * image_features @ text_features.T + logit_bias
        labels = 2 * torch.eye(len(logits)) - 1
        return -F.logsigmoid(labels * logits).sum() / len(logits)
'''


def test_open_clip_is_measured_on_the_same_gradient(monkeypatch, tmp_path):
    (tmp_path / "open_clip").mkdir()
    (tmp_path / "open_clip" / "__init__.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "open_clip" / "loss.py").write_text(CLIP_LOSS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "benchmarks._open_clip_loss", raising=False)
    assert (
        _measure(Case("infonce", (9, 9, 4)), "open_clip")["open_clip"]["gradient difference"] < 1e-5
    )
    rows = _measure(Case("sigmoid", (9, 9, 4)), "open_clip siglip")
    assert rows["open_clip siglip"]["gradient difference"] < 1e-5
    sys.modules.pop("benchmarks._open_clip_loss", None)


def _cross_entropy(x, weight, target):
    return torch.nn.functional.cross_entropy(x @ weight.T, target)


def _sigmoid_loss(images, texts, log_temperature, bias):
    logits = log_temperature.exp() * images @ texts.T + bias
    return -torch.nn.functional.logsigmoid((2 * torch.eye(len(images)) - 1) * logits).sum() / len(
        images
    )


STAND_INS = {  # the interfaces of the CUDA libraries, in plain PyTorch
    "siglip-kernel": ("siglip_kernel", {"fused_siglip_loss": _sigmoid_loss}),
    "cut-cross-entropy": (
        "cut_cross_entropy",
        {"linear_cross_entropy": lambda e, c, targets: _cross_entropy(e, c, targets)},
    ),
    "liger-kernel": (
        "liger_kernel.transformers.functional",
        {
            "liger_fused_linear_cross_entropy": lambda input, weight, target: _cross_entropy(
                input, weight, target
            )
        },
    ),
    "inf-cl": (
        "inf_cl",
        {
            "cal_flash_loss": lambda q, k, labels=None, scale=None, head_dim=256: (
                torch.nn.functional.cross_entropy(
                    scale * q @ k.T, torch.arange(len(q)), reduction="none"
                )
            )
        },
    ),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_libraries_for_cuda_are_called_for_the_same_gradient(monkeypatch, name):
    module, contents = STAND_INS[name]
    loss = peers.PEERS[name].losses[0]
    monkeypatch.setattr(peers, "_on_cuda", lambda case: None)
    monkeypatch.setitem(sys.modules, module, None)  # as if the library were not installed
    missing = _measure(Case(loss, (9, 9, 256), torch.bfloat16), name)[name]["error"]
    assert missing.startswith(name) and "the extra 'bench'" in missing
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**contents))
    half = name == "cut-cross-entropy"
    row = _measure(Case(loss, (9, 9, 256), torch.bfloat16 if half else torch.float32), name)[name]
    assert row["gradient difference"] < (0.05 if half else 1e-5)
    if half:
        assert "half precision" in _measure(Case("infonce", (9, 9, 256)), name)[name]["error"]
    if name == "inf-cl":
        assert "256" in _measure(Case("infonce", (9, 9, 8)), name)[name]["error"]
    if name == "siglip-kernel":
        assert "float64" in _measure(Case("sigmoid", (9, 9, 8), torch.float64), name)[name]["error"]


@pytest.mark.parametrize("name", [name for name in peers.PEERS if name.startswith("pytorch")])
def test_pytorch_metric_learning_where_it_is_installed(name):
    loss = peers.PEERS[name].losses[0]
    row = _measure(Case(loss, SHAPES[LOSSES[loss].kind]), name)[name]
    if find_spec("pytorch_metric_learning"):
        assert row["to ours"] > 0 and row.get("gradient difference", 0) < 1e-5
    else:
        assert "the extra 'bench'" in row["error"]


def test_linear_cross_entropy_of_torch_is_measured_on_the_same_gradient():
    rows = _measure(
        Case("infonce", (9, 9, 4)), "linear_cross_entropy", "linear_cross_entropy chunked"
    )
    for name in ("linear_cross_entropy", "linear_cross_entropy chunked"):
        if hasattr(torch.nn.functional, "linear_cross_entropy"):
            assert rows[name]["gradient difference"] < 1e-5
        else:
            assert torch.__version__ in rows[name]["error"]


# ------------------------------------------------------------------------------------------ command


def test_suites_name_cases_and_variants_that_exist():
    known = {*runner.VARIANTS, *peers.PEERS}
    for suite in SUITES.values():
        assert suite.cases and set(suite.variants) <= known
        for case in suite.cases:
            assert len(case.shape) == 3 and case.kind in KINDS


def test_command_writes_table_json_and_plot(tmp_path, capsys):
    out, picture = tmp_path / "a" / "rows.json", tmp_path / "b" / "bars.svg"
    options = [
        "--losses",
        "infonce",
        "mdcl",
        "--variants",
        "eager",
        "matmul_bound",
        "--seconds",
        "0.001",
        "--accuracy",
    ]
    options += ["--out", str(out), "--plot", str(picture)]
    assert main(["--shapes", "6x12x4", *options]) == 0
    shown = capsys.readouterr()
    assert "[2/2] mdcl 6x12x4" in shown.err
    results = json.loads(out.read_text())
    assert [(r["loss"], r["variant"]) for r in results["rows"]] == [
        (loss, variant)
        for loss in ("infonce", "mdcl")
        for variant in ("ours", "eager", "matmul_bound")
    ]
    assert results["machine"] == runner.machine("cpu")
    for row in results["rows"]:
        assert f"{1e3 * row['seconds']:.4g}" in shown.out
    assert picture.read_text().startswith("<?xml")
    assert picture.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--losses", "infonce", "pgc"], "losses: these suites have no pgc"),
        (
            ["--shapes", "6x9x4"],
            "shape: expected a whole number of texts per image, got 9 texts of 6 images",
        ),
        (["--losses", "mdcl", "--shapes", "9x4x8"], "shape: expected a batch of at most twice"),
        (["--losses", "variance aware", "--shapes", "2x4x8"], "shape: expected at least 3 images"),
        (["--seconds", "0"], "seconds: expected a number above 0"),
        (["--shapes", "12xa"], "shape: expected images x texts x dim"),
        (["--losses", "mdcl", "--shapes", "12x8"], "shape: expected batch x entries x dim"),
        (["--shapes", "0x8"], "shape: expected images x texts x dim"),
        # Sizes far beyond any memory, in several ways:
        (["--shapes", "99999999999x8"], "shape: expected images x texts x dim"),
        (["--shapes", "9" * 5000 + "x8"], "shape: expected images x texts x dim"),
        (
            ["--shapes", "8x8", "99999999x512"],
            "shape: the inputs of infonce 99999999x99999999x512 take 490 GB, and the",
        ),
        (
            ["--shapes", "8x1999999999"],
            "shape: the inputs of infonce 8x8x1999999999 take 128 GB, and the",
        ),
        (["--losses", "mdcl", "--shapes", "8x1999999999x1"], "shape: the inputs of mdcl"),
        (
            ["--losses", "variance aware", "--shapes", "3x1999999999x1"],
            "shape: the inputs of variance aware",
        ),
        (["--losses", "pgc", "--shapes", "8x1999999999x1"], "shape: the inputs of pgc"),
    ],
)
def test_wrong_arguments_end_in_one_line(arguments, complaint, monkeypatch, capsys):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10**6}.get)
    monkeypatch.setattr(runner, "step", lambda *args: pytest.fail("measured"))
    assert main(arguments) == 2
    *progress, said = capsys.readouterr().err.splitlines()
    assert said.startswith(f"benchmarks: {complaint}") and len(progress) == (
        arguments[0] == "--seconds"
    )


@pytest.mark.parametrize("option", ["--suites", "--losses", "--variants"])
def test_unknown_names_are_refused(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([option, "nothing"])
    assert f"argument {option}: invalid choice: 'nothing'" in capsys.readouterr().err


def test_a_loss_that_does_not_fit_into_memory_ends_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(cases, "module", lambda *args: torch.empty(2**58))
    assert main([]) == 2
    assert "can't allocate memory" in capsys.readouterr().err.splitlines()[-1]


def test_what_cannot_be_is_said_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runner, "measure", lambda *args: pytest.fail("measured"))
    for arguments, complaint in (
        (["--device", "gpu"], "device: 'gpu' cannot be used here"),
        (["--device", "cuda:99"], "device: 'cuda:99' cannot be used here"),
        (["--suites", "quick", "huge"], "suites: expected those of one device, got cpu, cuda"),
        (["--threads", "0"], "threads: expected at least 1, got 0"),
        (["--out", str(tmp_path)], "expected a file to write, got a directory"),
        (["--plot", str(tmp_path)], "plot: expected a file name that ends in one of"),
        (["--plot", "x.xyz"], "plot: expected a file name that ends in one of"),
    ):
        assert main(arguments) == 2
        assert complaint in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert main(["--plot", "x.svg"]) == 2
    assert "the extra 'bench'" in capsys.readouterr().err


def test_results_of_yesterday_stay_until_there_are_others(monkeypatch, tmp_path):
    out = tmp_path / "rows.json"
    out.write_text("of yesterday")
    seen = []
    monkeypatch.setattr(runner, "measure", lambda *args: seen.append(out.read_text()) or [])
    assert main(["--out", str(out)]) == 0
    assert (
        seen[0] == "of yesterday"
        and json.loads(seen[1])["rows"] == []
        and list(tmp_path.iterdir()) == [out]
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_leaves_the_rows_measured_before(monkeypatch, tmp_path, capsys):
    out, measured = tmp_path / "rows.json", []

    def measure(case, *args):
        measured.append(case)
        if len(measured) == 2:  # from this call on

            def full(path, mode, encoding):
                return open("/dev/full", mode, encoding=encoding)

            monkeypatch.setattr(files, "open", full, raising=False)
        return [case.fields() | {"variant": "ours", "seconds": 1.0}]

    monkeypatch.setattr(runner, "measure", measure)
    assert main(["--out", str(out)]) == 2
    shown = capsys.readouterr()
    assert os.strerror(errno.ENOSPC) in shown.err.splitlines()[-1]
    rows = json.loads(out.read_text())["rows"]
    assert len(measured) == 2 and [tuple(row["shape"]) for row in rows] == [measured[0].shape]
    assert list(tmp_path.iterdir()) == [out]


def test_cases_named_twice_are_measured_once(monkeypatch):
    seen = []
    monkeypatch.setattr(
        runner, "measure", lambda case, variants, *args: seen.append((case, variants)) or []
    )
    assert main(["--suites", "quick", "quick"]) == 0
    assert [case for case, _ in seen] == list(SUITES["quick"].cases)
    assert all(variants == SUITES["quick"].variants for _, variants in seen)


def test_a_single_pair_is_no_number_and_no_reason_to_stop(tmp_path):
    out = tmp_path / "rows.json"
    assert (
        main(["--losses", "infonce", "--shapes", "1x8", "--seconds", "0.001", "--out", str(out)])
        == 0
    )
    assert json.loads(out.read_text())["rows"][1]["gradient difference"] in (0.0, None)


def test_shapes_are_read():
    assert parse_shape("8x4", "pairs") == (8, 8, 4)
    assert parse_shape("8x40x4", "pairs") == (8, 40, 4)
    assert parse_shape("8x40x4", "memory") == (8, 40, 4)


RERANKING = {
    "shape",
    "to matmul_bound",
    "rr to fast on the matrix",
    "mr to fast on the matrix",
    "seconds",
}


def test_reranking_is_measured_and_written(monkeypatch, tmp_path, capsys):
    out = tmp_path / "rows.json"
    monkeypatch.setattr(reranking, "SIZES", ((6, 30), (8, 40)))
    monkeypatch.setattr(sys, "argv", ["reranking", "--rounds", "1", "--out", str(out)])
    assert reranking.main() == 0
    results = json.loads(out.read_text())
    assert [row["shape"] for row in results["rows"]] == [
        [6, 30, reranking.DIM],
        [8, 40, reranking.DIM],
    ]
    for row in results["rows"]:
        assert set(row) >= RERANKING and row["largest difference to dense metrics"] < 1e-6
        assert all(seconds > 0 for seconds in row["seconds"].values())
    assert (
        "processor" in results["machine"]
        and "rr to fast on the matrix: " in capsys.readouterr().out
    )


OTHERS = {  # columns of results that are not the runner's, by the name of their file
    "noise": {"loss", "noise", "seed", "last", "best"},
    "judged": {"system"},
    "negatives": {"form", "split", "options", "rsum"},
    "conformance": {"loss", "package"},
    "cpu_mining": {"way", "shape", "k", "seconds", "to ours", "same neighbours", "peak_mb"},
}


def test_committed_results_are_rows_of_the_present_form():
    paths = list((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
    assert paths
    for path in paths:
        if path.stem.startswith("gpu_"):  # see test_gpu_bench.py
            continue
        results = json.loads(path.read_text(encoding="utf-8"))
        assert {"processor", "torch", "date", "device"} <= set(results["machine"]), path.name
        for row in results["rows"]:
            if path.stem.endswith("reranking"):  # written by benchmarks/reranking.py
                assert set(row) >= RERANKING, path.name
                continue
            if path.stem in OTHERS:
                assert set(row) >= OTHERS[path.stem], path.name
                continue
            assert (
                row["loss"] in LOSSES and "shape" in row and ("seconds" in row or "error" in row)
            ), path.name
            assert row["variant"] in {*runner.VARIANTS, *peers.PEERS}, path.name


@pytest.mark.slow
def test_processes_are_timed(capsys, monkeypatch):
    monkeypatch.setattr(processes, "spawn", start)
    processes.main(["--pairs", "32", "--dim", "8", "--repeats", "1", "--losses", "InfoNCELoss"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("InfoNCELoss, 32 pairs") and len(lines) == 1 + len(processes.FORMS)


def test_the_benchmark_of_mining(tmp_path):
    path = tmp_path / "mining.json"
    assert mining.main(["--shape", "20", "3000", "16", "--rounds", "1", "--out", str(path)]) == 0
    rows = {row["way"]: row for row in json.loads(path.read_text())["rows"]}
    assert {"ours", "mm and topk", "matmul_bound"} <= rows.keys() and rows["ours"]["to ours"] == 1
    assert all(
        row["same neighbours"] in (None, 1.0) and row["seconds"] > 0 for row in rows.values()
    )


@pytest.mark.parametrize(
    ("loss", "shape", "most"),
    [
        ("infonce", (512, 512, 1024), 47),
        ("dcl std", (512, 512, 1024), 89),
        ("mdcl", (128, 4096, 1024), 190),  # eager PyTorch: 191
    ],
)
def test_launches_of_a_step(loss, shape, most):
    """At these sizes a GPU spends its time on launches."""
    from benchmarks.launches import launches  # and the compiler, which takes a second

    assert sum(launches(Case(loss, shape), "ours")) <= most


@pytest.mark.slow
def test_launches_of_a_compiled_step_with_a_memory():
    from benchmarks.launches import launches

    case = Case("mdcl", (128, 4096, 1024))
    assert sum(launches(case, "ours compiled")) <= 54 and sum(launches(case, "eager")) <= 191
