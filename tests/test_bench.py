"""``itrloss bench``: cases, variants, peers, what is written and how wrong use is answered."""

import json
import sys
from pathlib import Path

import pytest
import torch

from itrloss.bench import peers, report, runner
from itrloss.bench.cases import KINDS, LOSSES, SUITES, Case, embeddings, parse_shape, problem
from itrloss.cli import main

SHAPES = {"pairs": (12, 12, 8), "memory": (6, 20, 8), "sets": (6, 3, 8), "prototypes": (6, 9, 8)}


def _measure(case: Case, *variants: str, **more) -> dict[str, dict]:
    return {row["variant"]: row for row in runner.measure(case, variants, seconds=0.001, **more)}


@pytest.mark.parametrize("loss", LOSSES)
def test_ours_and_eager_are_the_same_loss(loss):
    rows = _measure(Case(loss, SHAPES[LOSSES[loss].kind]), "eager", "floor", "ours tiled")
    assert list(rows) == ["ours", "eager", "floor", "ours tiled"]
    assert rows["eager"]["gradient difference"] < 1e-5 and rows["ours tiled"]["gradient difference"] < 1e-5
    for row in rows.values():
        assert row["seconds"] > 0 and row["rounds"] >= 3 and row["to ours"] > 0 and row["to floor"] > 0
    assert rows["ours"]["to ours"] == 1 and rows["floor"]["to floor"] == 1
    assert "gradient difference" not in rows["ours"] and "gradient difference" not in rows["floor"]


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


def test_variants_take_turns_and_each_begins():
    order = []
    steps = {name: lambda name=name: order.append(name) for name in ("ours", "eager", "floor")}
    found = runner._interleave(steps, rounds=6, case=Case("infonce", (2, 2, 2)))
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 6 and all(sorted(r) == sorted(steps) for r in rounds)
    assert {r[0] for r in rounds} == set(steps)
    assert len(found["eager"]["own"]) == 6 and found["eager"]["floor"] is found["floor"]["own"]


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
    rows = _measure(Case("sigmoid", (9, 9, 4)), "open_clip siglip", "open_clip")
    assert rows["open_clip siglip"]["gradient difference"] < 1e-5 and "open_clip" not in rows
    sys.modules.pop("itrloss.bench._open_clip_loss", None)


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
        (["--losses", "pgc"], "losses: these suites have none of them"),
        (["--shapes", "12xa"], "shape: expected images x texts x dim"),
        (["--losses", "mdcl", "--shapes", "12x8"], "shape: expected batch x entries x dim"),
        (["--shapes", "0x8"], "shape: expected images x texts x dim"),
    ],
)
def test_wrong_arguments_are_named(arguments, complaint, capsys):
    assert main(["bench", *arguments]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_said_at_once(capsys):
    assert main(["bench", "huge"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"itrloss\[bench\]"):
        report.plot(tmp_path / "x.svg", {}, [])


def test_shapes_are_read():
    assert parse_shape("8x4", "pairs") == (8, 8, 4)
    assert parse_shape("8x40x4", "pairs") == (8, 40, 4)
    assert parse_shape("8x40x4", "memory") == (8, 40, 4)


def test_committed_results_are_rows_of_the_present_form():
    for path in (Path(__file__).parent.parent / "benchmarks" / "results").glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        assert {"processor", "torch", "date", "device"} <= set(found["machine"]), path.name
        for row in found["rows"]:
            assert row["loss"] in LOSSES and "shape" in row and ("seconds" in row or "why not" in row), path.name
