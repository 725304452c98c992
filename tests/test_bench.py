"""``itrloss bench``: cases, variants, peers, what is written and how wrong use is answered."""

import contextlib
import itertools
import json
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from itrloss.bench import peers, report, runner
from itrloss.bench.cases import KINDS, LOSSES, SUITES, Case, embeddings, parse_shape, problem
from itrloss.cli import main

SHAPES = {"pairs": (12, 12, 8), "memory": (6, 20, 8), "sets": (6, 3, 8), "prototypes": (6, 9, 8)}


def _measure(case: Case, *variants: str, **more) -> dict[str, dict]:
    return {row["variant"]: row for row in runner.measure(case, variants, seconds=0.001, **more)}


@pytest.mark.parametrize(
    "loss",
    ["infonce", "mdcl", *(pytest.param(x, marks=pytest.mark.slow) for x in LOSSES if x not in ("infonce", "mdcl"))],
)
def test_ours_and_eager_are_the_same_loss(loss):
    rows = _measure(Case(loss, SHAPES[LOSSES[loss].kind]), "eager", "floor", "ours tiled")
    assert list(rows) == ["ours", "eager", "floor", "ours tiled"]
    assert rows["eager"]["gradient difference"] < 1e-5 and rows["ours tiled"]["gradient difference"] < 1e-5
    for row in rows.values():
        assert row["seconds"] > 0 and row["rounds"] >= 3 and row["to ours"] > 0 and row["to floor"] > 0
    assert rows["ours"]["to ours"] == 1 and rows["floor"]["to floor"] == 1
    assert "gradient difference" not in rows["ours"] and "gradient difference" not in rows["floor"]


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
    monkeypatch.setattr(Case, "where", torch.device("cuda"))
    made = problem(case)

    def run():
        calls.append("run")
        made.leaves[0].grad = torch.full_like(made.leaves[0], len(calls))

    replay = runner._graphed(run, case, made)
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
    cosines = torch.nn.functional.normalize(images, dim=1) @ torch.nn.functional.normalize(texts, dim=1).T
    own = torch.arange(8)[:, None] == torch.arange(40) // 5
    assert cosines[own].mean() > cosines[~own].mean() + 0.1


def test_accuracy_tells_a_rough_gradient_from_an_exact_one():
    rows = _measure(Case("infonce", (16, 16, 8), torch.bfloat16), "eager", accuracy=True)
    assert rows["ours"]["gradient error"] < rows["eager"]["gradient error"]
    assert 1e-4 < rows["eager"]["gradient error"] < 0.1  # autocast rounds the products


def test_the_floor_counts_the_products_it_makes():
    from torch.utils.flop_counter import FlopCounterMode

    for kind, shape in SHAPES.items():
        made = problem(Case(next(name for name, loss in LOSSES.items() if loss.kind == kind), shape))
        with FlopCounterMode(display=False) as counter:
            made.products()
        assert counter.get_total_flops() == made.flops, kind


def test_a_floor_too_large_to_exist_is_made_in_panels(monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    monkeypatch.setattr("itrloss.bench.cases._PANEL", 50)
    made = problem(Case("infonce", (12, 12, 8)))
    with FlopCounterMode(display=False) as counter:
        made.products()
    assert counter.get_total_flops() == made.flops


# ----------------------------------------------------------------------------------------------------- runner


def test_variants_take_turns_in_changing_order():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in ("ours", "eager", "floor")}
    rows = {name: {"variant": name} for name in steps}
    found = runner._interleave(steps, 30, Case("infonce", (2, 2, 2)), rows)
    rounds = [order[i : i + 3] for i in range(0, 90, 3)]
    assert len(order) == 90 and all(sorted(r) == sorted(steps) for r in rounds)
    assert {tuple(r) for r in rounds} == set(itertools.permutations(steps))
    assert all(len(times) == 30 for times in found.values())


def test_many_rounds_where_time_allows():
    rows = {row["variant"]: row for row in runner.measure(Case("infonce", (4, 4, 4)), ["floor", "eager"], seconds=1.0)}
    assert rows["ours"]["rounds"] > 30


def test_ratios_are_medians_of_rounds():
    assert runner._ratio([1.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2.0


def test_compiled_code_runs_in_rounds_of_its_own():
    names = ["ours", "eager", "ours compiled", "floor", "eager compiled"]
    assert runner._groups(names) == [["ours", "eager", "floor"], ["ours", "ours compiled", "eager compiled"]]
    assert runner._groups(["ours", "eager"]) == [["ours", "eager"]]


def test_peak_of_memory_is_that_of_the_step():
    case = Case("infonce", (64, 64, 8))
    given = problem(case)
    small = runner._peak(lambda: None, case, given)
    large = runner._peak(lambda: torch.ones(16_000_000).sum(), case, given)  # 64 MB
    if not sys.platform.startswith("linux"):
        assert small is None and large is None
    else:
        assert small < 5 and 60 < large < 75


def test_a_failure_of_ours_is_no_row(monkeypatch):
    def broken(*args):
        raise RuntimeError("broken")

    monkeypatch.setattr("itrloss.bench.cases.module", broken)
    with pytest.raises(RuntimeError, match="broken"):
        _measure(Case("infonce", (4, 4, 4)))


@pytest.mark.parametrize("calls", [0, 1, 4])  # before it fails: at once, when memory is looked at, while timed
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
    assert rows["open_clip"]["why not"] == "no more" and "to ours" not in rows["open_clip"]
    assert rows["eager"]["rounds"] >= 3 and rows["eager"]["gradient error"] < 1e-5


def test_measure_knows_its_variants():
    with pytest.raises(ValueError, match="variants: expected some of ours"):
        _measure(Case("infonce", (4, 4, 4)), "eeager")
    with pytest.raises(ValueError, match="seconds: expected a number above 0, got -1"):
        runner.measure(Case("infonce", (4, 4, 4)), [], seconds=-1)
    rows = _measure(Case("sigmoid", (4, 4, 4)), "open_clip")
    assert rows["open_clip"]["why not"] == "has infonce only"


def test_steps_begin_without_gradients():
    for loss in ("pgc", "infonce"):
        case = Case(loss, SHAPES[LOSSES[loss].kind])
        given = problem(case)
        run = runner.step("eager", case, given)
        run()
        before = [x.grad.clone() for x in given.trained]
        run()
        assert len(before) == (3 if loss == "pgc" else 2)
        assert all(torch.equal(a, x.grad) for a, x in zip(before, given.trained, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("loss", ["dcl std", "mdcl", "variance aware", "pgc"])
def test_other_types(loss, dtype):
    rows = _measure(Case(loss, SHAPES[LOSSES[loss].kind], dtype), "eager", "floor")
    assert rows["floor"]["dtype"] == rows["ours"]["dtype"] == str(dtype).removeprefix("torch.")
    assert rows["eager"]["gradient difference"] < (1e-9 if dtype == torch.float64 else 0.05)


@pytest.mark.slow
def test_compiled_variants(tmp_path):
    rows = _measure(Case("infonce", (12, 12, 8)), "eager", "floor", "ours compiled", "eager compiled")
    for name in ("ours compiled", "eager compiled"):
        assert rows[name]["gradient difference"] < 1e-5 and rows[name]["to ours"] > 0 and "to floor" not in rows[name]
    picture = tmp_path / "bars.svg"
    report.plot(picture, runner.machine("cpu"), list(rows.values()))
    assert picture.read_text().count("<!-- infonce 12x12x8 · ") == 5


# ------------------------------------------------------------------------------------------------------ peers


def test_peers_that_cannot_run_say_why(monkeypatch):
    real = peers.importlib.util.find_spec
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name == "open_clip" else real(name))
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning.losses", None)  # as if it were not there
    rows = _measure(Case("infonce", (8, 8, 4)), "peers")
    assert set(rows) == {"ours", *(name for name, peer in peers.PEERS.items() if "infonce" in peer.losses)}
    assert "itrloss[bench]" in rows["open_clip"]["why not"]
    assert "itrloss[bench]" in rows["pytorch-metric-learning supcon"]["why not"]
    for name in ("cut-cross-entropy", "liger-kernel", "inf-cl"):
        assert "CUDA" in rows[name]["why not"]
    text = report.table(rows.values())
    assert all(name in text for name in rows) and "itrloss[bench]" in text
    rows = _measure(Case("infonce", (512, 2048, 8)), "pytorch-metric-learning ntxent", memory=False)
    assert "GB" in rows["pytorch-metric-learning ntxent"]["why not"]
    assert "one positive" in _measure(Case("infonce", (4, 8, 4)), "open_clip")["open_clip"]["why not"]


CLIP_LOSS = '''
import torch
from torch.nn import functional as F

class ClipLoss(torch.nn.Module):
    """As open_clip publishes it for one process."""
    def __init__(self, cache_labels=False):
        super().__init__()

    def forward(self, image_features, text_features, logit_scale, logit_bias=None, output_dict=False):
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
    monkeypatch.delitem(sys.modules, "itrloss.bench._open_clip_loss", raising=False)
    assert _measure(Case("infonce", (9, 9, 4)), "open_clip")["open_clip"]["gradient difference"] < 1e-5
    rows = _measure(Case("sigmoid", (9, 9, 4)), "open_clip siglip")
    assert rows["open_clip siglip"]["gradient difference"] < 1e-5
    sys.modules.pop("itrloss.bench._open_clip_loss", None)


def _cross_entropy(x, weight, target):
    return torch.nn.functional.cross_entropy(x @ weight.T, target)


STAND_INS = {  # what the libraries for CUDA publish, by their names, in plain PyTorch
    "cut-cross-entropy": (
        "cut_cross_entropy",
        {"linear_cross_entropy": lambda e, c, targets: _cross_entropy(e, c, targets)},
    ),
    "liger-kernel": (
        "liger_kernel.transformers.functional",
        {"liger_fused_linear_cross_entropy": lambda input, weight, target: _cross_entropy(input, weight, target)},
    ),
    "inf-cl": (
        "inf_cl",
        {
            "cal_flash_loss": lambda q, k, labels=None, scale=None, head_dim=256: torch.nn.functional.cross_entropy(
                scale * q @ k.T, torch.arange(len(q)), reduction="none"
            )
        },
    ),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_libraries_for_cuda_are_called_for_the_same_gradient(monkeypatch, name):
    module, contents = STAND_INS[name]
    monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**contents))
    monkeypatch.setattr(peers, "_on_cuda", lambda case: None)
    half = name == "cut-cross-entropy"
    row = _measure(Case("infonce", (9, 9, 256), torch.bfloat16 if half else torch.float32), name)[name]
    assert row["gradient difference"] < (0.05 if half else 1e-5)
    if half:
        assert "half precision" in _measure(Case("infonce", (9, 9, 256)), name)[name]["why not"]
    if name == "inf-cl":
        assert "256" in _measure(Case("infonce", (9, 9, 8)), name)[name]["why not"]


@pytest.mark.parametrize("name", [name for name in peers.PEERS if name.startswith("pytorch")])
def test_pytorch_metric_learning_where_it_is_installed(name):
    loss = peers.PEERS[name].losses[0]
    row = _measure(Case(loss, SHAPES[LOSSES[loss].kind]), name)[name]
    if find_spec("pytorch_metric_learning"):
        assert row["to ours"] > 0 and row.get("gradient difference", 0) < 1e-5
    else:
        assert "itrloss[bench]" in row["why not"]


def test_linear_cross_entropy_of_torch_is_measured_on_the_same_gradient():
    rows = _measure(Case("infonce", (9, 9, 4)), "linear_cross_entropy", "linear_cross_entropy chunked")
    for name in ("linear_cross_entropy", "linear_cross_entropy chunked"):
        if hasattr(torch.nn.functional, "linear_cross_entropy"):
            assert rows[name]["gradient difference"] < 1e-5
        else:
            assert torch.__version__ in rows[name]["why not"]


# ---------------------------------------------------------------------------------------------------- command


def test_suites_name_cases_and_variants_that_exist():
    known = {*runner.VARIANTS, *peers.PEERS}
    for suite in SUITES.values():
        assert suite.cases and set(suite.variants) <= known
        for case in suite.cases:
            assert len(case.shape) == 3 and case.kind in KINDS


def test_command_writes_table_json_and_plot(tmp_path, capsys):
    out, picture = tmp_path / "a" / "rows.json", tmp_path / "b" / "bars.svg"
    options = ["--losses", "infonce", "mdcl", "--variants", "eager", "floor", "--seconds", "0.001", "--accuracy"]
    options += ["--out", str(out), "--plot", str(picture)]
    status = main(["bench", "--shapes", "6x9x4", *options])
    shown = capsys.readouterr()
    assert status == 2 and "texts of" in shown.err  # nine texts of six images
    assert main(["bench", "--shapes", "6x12x4", *options]) == 0
    shown = capsys.readouterr()
    assert "[2/2] mdcl 6x12x4" in shown.err
    found = json.loads(out.read_text())
    assert [(r["loss"], r["variant"]) for r in found["rows"]] == [
        (loss, variant) for loss in ("infonce", "mdcl") for variant in ("ours", "eager", "floor")
    ]
    assert found["machine"]["torch"] == torch.__version__ and found["machine"]["threads"] == torch.get_num_threads()
    for row in found["rows"]:
        assert f"{1e3 * row['seconds']:.4g}" in shown.out
    assert picture.read_text().startswith("<?xml")
    assert picture.stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nothing"], "suites: expected some of quick, losses"),
        (["--losses", "dlc"], "losses: expected some of dcl std"),
        (["--variants", "quick"], "variants: expected some of ours"),
        (["--losses", "infonce", "pgc"], "losses: these suites have no pgc"),
        (["--losses", "mdcl", "--shapes", "9x4x8"], "shape: expected a batch of at most twice"),
        (["--losses", "variance aware", "--shapes", "2x4x8"], "shape: expected at least 3 images"),
        (["--seconds", "0"], "seconds: expected a number above 0"),
        (["--shapes", "12xa"], "shape: expected images x texts x dim"),
        (["--losses", "mdcl", "--shapes", "12x8"], "shape: expected batch x entries x dim"),
        (["--shapes", "0x8"], "shape: expected images x texts x dim"),
    ],
)
def test_wrong_arguments_are_named(arguments, complaint, capsys):
    assert main(["bench", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_what_cannot_be_is_said_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runner, "measure", lambda *args: pytest.fail("measured"))
    for arguments, complaint in (
        (["--device", "gpu"], "device: 'gpu' cannot be used here"),
        (["--device", "cuda:99"], "device: 'cuda:99' cannot be used here"),
        (["quick", "huge"], "suites: expected those of one device, got cpu, cuda"),
        (["--threads", "0"], "threads: expected at least 1, got 0"),
        (["--out", str(tmp_path)], "Is a directory" if sys.platform != "win32" else ""),
        (["--plot", "x.xyz"], "plot: expected a file name that ends in one of"),
    ):
        assert main(["bench", *arguments]) == 2
        assert complaint in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert main(["bench", "--plot", "x.svg"]) == 2
    assert "pip install 'itrloss[bench]'" in capsys.readouterr().err


def test_cases_named_twice_are_measured_once(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(runner, "measure", lambda case, variants, *args: seen.append((case, variants)) or [])
    assert main(["bench", "quick", "quick"]) == 0
    assert [case for case, _ in seen] == list(SUITES["quick"].cases)
    assert all(variants == SUITES["quick"].variants for _, variants in seen)


def test_a_single_pair_is_no_number_and_no_reason_to_stop(tmp_path):
    out = tmp_path / "rows.json"
    assert main(["bench", "--losses", "infonce", "--shapes", "1x8", "--seconds", "0.001", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["rows"][1]["gradient difference"] in (0.0, None)


def test_shapes_are_read():
    assert parse_shape("8x4", "pairs") == (8, 8, 4)
    assert parse_shape("8x40x4", "pairs") == (8, 40, 4)
    assert parse_shape("8x40x4", "memory") == (8, 40, 4)


def test_committed_results_are_rows_of_the_present_form():
    paths = list((Path(__file__).parent.parent / "benchmarks" / "results").glob("*.json"))
    assert paths
    for path in paths:
        found = json.loads(path.read_text(encoding="utf-8"))
        assert {"processor", "torch", "date", "device"} <= set(found["machine"]), path.name
        for row in found["rows"]:
            if path.stem.endswith("reranking"):  # by benchmarks/reranking.py
                assert {"shape", "to the products", "seconds"} <= set(row), path.name
                continue
            assert row["loss"] in LOSSES and "shape" in row and ("seconds" in row or "why not" in row), path.name
