"""``python -m benchmarks gpu``: every step at toy sizes, the record, and failures."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import subprocess
import sys
import time
import types
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from support.stored import assert_stored

from benchmarks import peers
from benchmarks.__main__ import main
from benchmarks.gpu import child, command, goals, modes, plan, record, speed, summary, works
from benchmarks.gpu.losses import LOSSES
from benchmarks.gpu.record import Record
from benchmarks.gpu.session import Session

pytest.importorskip("triton")
from support.interpreter import a_quick_interpreter  # noqa: F401 (a fixture)

# Masked lanes of Triton's interpreter; their results are not stored.
pytestmark = [
    pytest.mark.usefixtures("a_quick_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
STEPS = plan.all_steps()


def session(step: str, part: str | None = None, seconds: float = 300) -> Session:
    return Session(step, dry=True, seconds=seconds, part=part)


def finished(step: str, part: str | None = None, seconds: float = 300) -> Session:
    """A session whose step was run."""
    run = session(step, part, seconds)
    child.run(run)
    return run


# -------------------------------------------------------------------------------------- every step

# One part of many is enough: tests/engine/test_triton_*.py have all kernels.
PARTS = {"correct": ["siglip, bfloat16"], "compile": list(plan.TILES)[:1]}
RUNS = [(name, part) for name in STEPS for part in PARTS.get(name, [None])]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), RUNS)
def test_every_step_runs_at_toy_sizes(name, part):
    run = finished(name, part)
    assert run.figures and not run.failed, run.figures
    assert all(row["step"] == name and "error" not in row for row in run.figures)
    json.loads(json.dumps([record.finite(row) for row in run.figures], allow_nan=False))


def test_the_plan_is_of_steps_that_exist_and_fit_into_their_time(capsys):
    for step in STEPS.values():
        assert step.name in importlib.import_module(f"benchmarks.gpu.{step.module}").STEPS
    for steps in plan.SLOTS.values():
        assert steps[0].name == "machine"
        assert sum(step.seconds for step in steps) <= 1.1 * plan.TOTAL
        assert all(plan.LEAST <= step.seconds <= plan.TOTAL - plan.RESERVE for step in steps)
    assert [step.name for step in plan.chosen(["correct"])] == ["machine", "correct"]
    assert len(set(STEPS["correct"].parts)) == len(LOSSES) * 3 == 24
    with pytest.raises(SystemExit):
        main(["gpu", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in STEPS)


# ------------------------------------------------------------------------------------- correctness

NAN = float("nan")


def compared(monkeypatch, *results):
    """The row of a loss with these results: dense, and twice of the kernels."""
    left = list(results)
    monkeypatch.setattr(works, "results", lambda *given: left.pop(0))
    return works.compared(session("correct"), "siglip", (4, 4, 4), torch.float32, "rows")


@pytest.mark.parametrize(
    ("values", "same_bits"),
    [((1, 1, 1 + 1e-6), False), ((1, NAN, NAN), False), ((NAN, 1, 1), True)],
)
def test_other_bits_and_nan_are_not_right(values, same_bits, monkeypatch):
    row = compared(monkeypatch, *([torch.full((2,), float(x))] for x in values))
    assert not row["right"]
    assert row["same bits"] == same_bits


def test_gradients_of_parameters_are_compared(monkeypatch):
    leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    loss = LOSSES["siglip"](engine="dense")
    assert len(works.results(loss, leaves, {})) == 5  # the value, and of the scale and the bias
    ones = torch.ones(2)
    row = compared(monkeypatch, *([ones, ones, torch.full((1,), x)] for x in (1.0, 1.01, 1.01)))
    assert not row["right"]
    assert row["same bits"]
    assert row["errors"][:2] == [0, 0]


def test_an_engine_that_stands_in_for_triton_is_not_right(monkeypatch):
    ones = [torch.ones(2)]
    assert compared(monkeypatch, ones, ones, ones)["right"]
    dense = [ones]

    def results(*given):
        if dense:
            return dense.pop()
        warnings.warn("itrloss: the Triton engine fails; the tiled one stands in", stacklevel=1)
        return ones

    monkeypatch.setattr(works, "results", results)
    with pytest.raises(UserWarning, match="stands in"):
        works.compared(session("correct"), "hal", (4, 4, 4), torch.float32, "rows")


def test_a_wrong_engine_is_not_correct(monkeypatch):
    from itrloss.engine import triton as engine

    right = engine.sums
    monkeypatch.setattr(engine, "sums", lambda *given: 1.01 * right(*given))
    monkeypatch.setattr(works, "TOY_SHAPES", works.TOY_SHAPES[:2])
    run = finished("correct", "infonce, float32")
    assert run.failed
    wrong = [row for row in run.figures if row.get("right") is False]
    assert len(wrong) == 2
    assert any("ArithmeticError" in row.get("error", "") for row in run.figures)


def test_what_was_not_compared_is_not_correct():
    run = finished("correct", "infonce, float32", seconds=0)
    assert run.failed
    assert run.figures[0]["stopped"]


@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_a_first_step_has_to_be_finite(monkeypatch, value):
    monkeypatch.setattr(works, "results", lambda *given: [torch.full((1,), value)])
    run = finished("works")
    assert run.failed == (value > 1)
    assert len(run.figures) == 3
    assert ("seconds" in run.figures[0]) != run.failed


def test_other_gradients_in_a_mode_fail_the_step(monkeypatch):
    monkeypatch.setattr(modes, "distance", lambda a, b: 0.02)
    run = session("modes")
    step = speed.Step(LOSSES["infonce"](engine="dense"), run.pair(4, 4, 4))
    with pytest.raises(ArithmeticError, match="differ"):
        modes.same_gradients(run, step, lambda step: step, {"loss": "infonce"})


@pytest.mark.parametrize(("step", "fails"), [("tiles", False), ("kernels", True)])
def test_only_tiles_of_production_have_to_fit(monkeypatch, step, fails):
    from triton.runtime.errors import OutOfResources

    from itrloss.engine import triton as engine

    def large(*given):
        raise OutOfResources(147456, 101376, "shared memory")

    for name in ("sums", "visit"):
        monkeypatch.setattr(engine, name, large)
    run = finished(step)
    assert run.failed == fails
    key = "error" if fails else "skipped"
    assert all("shared memory" in row[key] for row in run.figures)


def test_an_error_in_an_item_fails_the_step_and_the_next_item_runs():
    run = session("machine")
    with run.attempt(item=1):
        raise ValueError("broken")
    with run.attempt(item=2):
        run.say(item=2)
    assert run.failed
    assert run.figures[0]["error"] == "ValueError: broken"
    assert run.figures[1] == {"step": "machine", "item": 2}


# ------------------------------------------------------------------------------- what needs a GPU


@pytest.fixture
def on_cuda(monkeypatch):
    """A session on a GPU that is not there, and the names of what was called."""
    calls: list[str] = []
    about = types.SimpleNamespace(
        name="a GPU", major=9, minor=0, multi_processor_count=132, total_memory=80e9
    )
    stream = types.SimpleNamespace(wait_stream=lambda other: calls.append("wait"))
    fakes = {
        "get_device_properties": lambda index: about,
        "synchronize": lambda: calls.append("synchronize"),
        "empty_cache": lambda: calls.append("empty_cache"),
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda given: contextlib.nullcontext(),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return Session("modes", dry=False, seconds=60), calls


def test_calls_are_timed_in_bursts_between_synchronisations(on_cuda):
    run, calls = on_cuda
    row = run.timed(lambda: calls.append("call"), seconds=0.05)
    assert row["rounds"] == calls.count("call") - 2  # the first two are no figures
    assert row["host seconds"] <= row["seconds"] < 0.001
    assert calls[:5] == ["call", "synchronize", "call", "synchronize", "synchronize"]
    assert calls.count("call") > 10 * calls.count("synchronize")


def test_the_device_is_described_waited_for_and_given_back(on_cuda):
    run, calls = on_cuda
    described = works.device(run)
    assert (described["device"], described["capability"]) == ("a GPU", "9.0")
    assert described["memory GB"] == 80
    modes.on_other_stream(run, lambda: calls.append("step"))()
    assert calls == ["wait", "step", "wait"]
    with run.attempt():
        calls.clear()
    assert calls == ["synchronize", "empty_cache"]
    for kind, own in (("CUDA", 5), ("CPU", 0)):  # kernels are told from operators
        device = getattr(torch.profiler.DeviceType, kind)
        event = types.SimpleNamespace(self_device_time_total=5.0, device_type=device)
        assert speed.own_time(event, run) == own


# ------------------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_leaves_a_record_in_which_a_failing_step_is_failing(
    tmp_path, monkeypatch, capsys
):
    """Python imports sitecustomize at its start, in the steps' processes."""
    bug = "from itrloss.engine import triton as e; s = e.sums; e.sums = lambda *x: 1.01 * s(*x)"
    (tmp_path / "sitecustomize.py").write_text(bug)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    correct = STEPS["correct"]._replace(parts=("infonce, float32",))
    monkeypatch.setitem(plan.SLOTS, 1, (STEPS["machine"], correct, STEPS["ncu"]))
    assert main(["gpu", "--dry", "--out", str(tmp_path)]) == 1
    path = tmp_path / "gpu_dry_slot1.json"
    found = record.load(path)
    assert found.correct is False
    assert found.failures() == ["correct"]
    codes = {step["name"]: step["rc"] for step in found.steps}
    assert codes == {"machine": 0, "correct": 1, "ncu": 0}
    assert (found.dry, found.capability, found.slot) == (True, None, 1)
    assert (found.torch, found.triton is None, found.date is None) == (
        torch.__version__,
        False,
        False,
    )
    assert {row["step"] for row in found.figures} == codes.keys()
    assert any("ArithmeticError" in row.get("error", "") for row in found.figures)
    printed = capsys.readouterr().out
    for words in (
        "FAILED  correct",
        "not measured  InfoNCE 32768 x 512",
        path.with_suffix(".txt").read_text(),
        f"0 of {len(works.TOY_SHAPES)} cases are right",
    ):
        assert words in printed
    assert path.with_suffix(".svg").stat().st_size > 1000


STEP = plan.Step("machine", "works", 60, "")


@pytest.fixture
def setup(tmp_path):
    return command.Setup(tmp_path, tmp_path / "log.txt", tmp_path, True, {"PATH": "/usr/bin:/bin"})


def fake(monkeypatch, code: str, *arguments: str) -> None:
    """Run Python code in place of a step, whose part is its first argument."""

    def words(step, part, *given):
        return [sys.executable, "-c", f"import os, sys, subprocess; {code}", str(part), *arguments]

    monkeypatch.setattr(command, "command", words)


@pytest.mark.parametrize(("code", "correct"), [("0", True), ("1", False), ("os._exit(3)", False)])
def test_losses_are_correct_if_their_step_says_so(monkeypatch, setup, code, correct):
    fake(monkeypatch, f"raise SystemExit({code})")
    steps = [STEP, STEP._replace(name="correct")]
    assert command.measured(1, steps, setup, 100).correct is correct
    assert command.measured(1, steps[:1], setup, 100).correct is None
    assert command.measured(1, steps, setup, plan.LEAST).correct is False  # there was no time


# What is run in place of a step, how it differs from one, what its row says, and whether that is a
# failure.
OUTCOMES = {
    "an exit status": ("raise SystemExit(3)", {}, {"rc": 3}, True),
    "a signal": ("os.kill(os.getpid(), 9)", {}, {"rc": -9}, True),
    "a part": ("raise SystemExit(int(sys.argv[1]))", {"parts": ("0", "7", "0")}, {"rc": 7}, True),
    "a package": (
        "raise SystemExit(1)",
        {"needs": "no_such_package"},
        {"skipped": "no_such_package is not installed"},
        False,
    ),
    "a program": (
        "raise SystemExit(1)",
        {"tool": ("no-such-program",)},
        {"skipped": "no-such-program is not installed"},
        False,
    ),
    "no time": ("raise SystemExit(1)", {}, {"skipped": "no time", "left": plan.LEAST - 1}, True),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcomes_of_steps_are_recorded(name, monkeypatch, setup):
    code, changes, wanted, is_failure = OUTCOMES[name]
    fake(monkeypatch, code)
    step = STEP._replace(**changes)
    row, figures = command.outcome(step, wanted.get("left", 100), setup._replace(dry=False))
    assert row.items() >= wanted.items()
    assert ("rc" in row) == ("rc" in wanted)
    assert figures == []
    assert Record(1, True, steps=[row]).failures() == ["machine"] * is_failure


def test_figures_of_a_step_that_is_killed_are_kept(setup, monkeypatch):
    path = setup.folder / "machine0.jsonl"
    fake(monkeypatch, f"open({str(path)!r}, 'w').write('{{\"a\": 1}}\\n{{\"b\"'); 1 / 0")
    row, figures = command.outcome(STEP, 100, setup)
    assert row["rc"] == 1
    assert figures == [{"a": 1}]


def test_a_program_runs_the_step(tmp_path, monkeypatch, setup):
    """As compute-sanitizer does; here one that keeps its arguments and ends with an error."""
    program = tmp_path / "a-sanitizer"
    program.write_text('#!/bin/sh\necho "$@"\nexit 9\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    step = STEP._replace(tool=("a-sanitizer", "--log", "{out}/seen.csv"))
    row, _ = command.outcome(step, 100, setup._replace(dry=False))
    assert row["rc"] == 9
    called = f"--log {tmp_path}/seen.csv {sys.executable} -m benchmarks.gpu.child machine"
    assert called in setup.log.read_text()


@pytest.mark.slow
def test_a_step_that_takes_too_long_is_killed_with_its_children(monkeypatch, setup):
    mark = setup.folder / "mark"
    grandchild = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
    fake(monkeypatch, "subprocess.run([sys.executable, '-c', sys.argv[2]])", grandchild)
    monkeypatch.setattr(plan, "DRY", 1)
    start = time.monotonic()
    row, _ = command.outcome(STEP._replace(seconds=1), 100, setup)
    assert row["rc"] == command.TOOK_TOO_LONG
    assert time.monotonic() - start < 2.5
    time.sleep(3)
    assert not mark.exists()


# -------------------------------------------------------------------------------------- the record


def example(**more) -> Record:
    figures = [{"step": "machine", "x": NAN}]
    about = {"correct": True, "figures": figures, **more}
    return Record(2, False, "NVIDIA H100 80GB HBM3", "9.0", **about)


def test_records_are_read_as_they_were_written(tmp_path):
    written = example()
    path = tmp_path / written.name
    record.save(written, path)
    assert path.name == "gpu_nvidia_h100_80gb_hbm3_slot2.json"
    found = record.load(path)
    assert found.figures == [{"step": "machine", "x": "nan"}]
    assert dataclasses.replace(found, figures=written.figures) == written


@pytest.mark.parametrize(
    ("key", "value"), [("correct", "yes"), ("steps", {}), ("figures", [1]), ("device", None)]
)
def test_other_files_are_refused(tmp_path, key, value):
    path = tmp_path / "a.json"
    found = dataclasses.asdict(example(figures=[])) | {key: value}
    if value is None:
        del found[key]
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=key):
        record.load(path)


def test_committed_records_are_of_devices():
    for path in RESULTS.glob("gpu_*.json"):
        found = record.load(path)
        assert not found.dry
        assert found.capability
        assert path.stem.startswith(Path(found.name).stem)  # earlier ones are kept under more words


# ----------------------------------------------------------------------------- goals, text and plot


def test_goals_are_judged_by_the_worst_figure():
    about = {"step": "goals", "loss": "infonce", "shape": [32768, 32768, 512]}
    figures = [about | {"variant": "triton", "seconds": 0.008}]
    others = [about | {"variant": "matmul_bound", "seconds": 1.0}, {"step": "machine"}]
    rows = goals.judged(figures + others)
    assert [row["met"] for row in rows] == [True] + [None] * (len(rows) - 1)
    worst, *_ = goals.judged([*figures, about | {"variant": "triton", "seconds": 0.0091}])
    assert worst["goal"] == "InfoNCE 32768 x 512"
    assert (worst["most"], worst["unit"], worst["found"], worst["met"]) == (9.0, "ms", 9.1, False)


@pytest.mark.slow
def test_goals_look_for_figures_that_steps_write():
    """With the toy shape in place of the large one."""
    found = finished("goals").figures + finished("amp").figures
    timed = [row for row in found if "seconds" in row]
    for goal in goals.GOALS:
        where = dict(goal.figures)
        where.pop("shape", None)
        if where.get("loss") in ("infonce", "siglip"):
            where["loss"] = "infonce learnable"
        matching = [row for row in timed if where.items() <= row.items()]
        assert matching, goal.name
        assert all(goal.key in row for row in matching), goal.name


def test_the_text_names_what_is_wrong():
    figures = [
        {"step": "correct", "loss": "hal", "right": True},
        {"step": "correct", "loss": "siglip", "right": False, "errors": [0.5]},
        {"step": "correct", "loss": "dcl std", "stopped": "no time"},
    ]
    steps = [
        {"name": "correct", "limit": 80, "rc": 1, "seconds": 3.5},
        {"name": "ncu", "skipped": "ncu is not installed"},
    ]
    missed = {"goal": "a", "most": 1.5, "unit": "ms", "found": 2.0, "met": False}
    found = example(steps=steps, figures=figures, goals=[missed])
    assert_stored("gpu_record", summary.text(found))


def test_the_plot_has_a_bar_for_every_throughput(tmp_path):
    bars = [
        ("goals", "hal", "triton", "tab:blue"),
        ("peers", "infonce", "open_clip", "tab:gray"),
        ("peers", "infonce", "matmul_bound", "black"),
    ]
    rows = [{"step": "modes", "loss": "infonce"}]
    for step, loss, variant, colour in bars:
        row = {"step": step, "loss": loss, "variant": variant, "gflops": 1000}
        assert summary.colour(row) == colour
        rows.append(row | {"shape": [4, 4, 4], "dtype": "bfloat16", "seconds": 1.0})
    summary.plot(example(figures=rows), tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    for step, loss, variant, _ in bars:
        assert f"{step} 4x4x4 · {loss} · {variant}" in drawn


# ---------------------------------------------------------------------------------- other libraries


def test_wheels_are_unpacked_for_the_steps(tmp_path):
    wheels = tmp_path / "wheels to use"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer/__init__.py", "NUMBER = 5")
    args = command.parser().parse_args(["--dry", "--wheels", str(wheels)])
    words = [sys.executable, "-c", "import peer; print(peer.NUMBER)"]
    variables = command.environment(tmp_path, args)
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "5\n"


def open_clip_of(monkeypatch, make) -> None:
    monkeypatch.setitem(peers.PEERS, "open_clip", peers.Peer(("infonce",), make))


@pytest.mark.slow
def test_open_clip_is_timed_under_autocast(monkeypatch):
    seen = set()

    def loss(images, texts):
        seen.add((torch.is_autocast_enabled("cpu"), images.dtype))
        return (images @ texts.T).float().sum()

    open_clip_of(monkeypatch, lambda case, problem: loss)
    run = finished("amp")
    assert not run.failed
    assert seen == {(True, torch.float32)}
    assert [row["variant"] for row in run.figures][:2] == ["open_clip", "ours"]


@pytest.mark.slow
@pytest.mark.parametrize("step", ["encoders", "amp"])
def test_a_library_that_is_missing_is_skipped(step, monkeypatch):
    def missing(case, problem):
        raise peers.Unavailable("is not installed")

    open_clip_of(monkeypatch, missing)
    run = finished(step)
    assert not run.failed
    assert {row["variant"] for row in run.figures if "skipped" in row} == {"open_clip"}
