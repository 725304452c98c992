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


def session(step: str, part: str | None = None, seconds: float = 300) -> Session:
    return Session(step, dry=True, seconds=seconds, part=part)


# -------------------------------------------------------------------------------------- every step

# One part of many is enough: tests/engine/test_triton_*.py have all kernels.
PARTS = {"correct": ["siglip, bfloat16"], "compile": list(plan.TILES)[:1]}
RUNS = [(name, part) for name in plan.all_steps() for part in PARTS.get(name, [None])]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), RUNS)
def test_every_step_runs_at_toy_sizes(name, part):
    run = session(name, part)
    child.run(run)
    assert run.figures and not run.failed, run.figures
    assert all(row["step"] == name and "error" not in row for row in run.figures)
    json.loads(json.dumps([record.finite(row) for row in run.figures], allow_nan=False))


def test_steps_are_in_the_modules_that_the_plan_names():
    for step in plan.all_steps().values():
        module = importlib.import_module(f"benchmarks.gpu.{step.module}")
        assert step.name in module.STEPS


def test_steps_of_a_slot_fit_into_its_time():
    for steps in plan.SLOTS.values():
        assert steps[0].name == "machine"
        assert sum(step.seconds for step in steps) <= 1.1 * plan.TOTAL
        assert all(plan.LEAST <= step.seconds <= plan.TOTAL - plan.RESERVE for step in steps)


def test_chosen_steps_begin_with_the_machine():
    assert [step.name for step in plan.chosen(["correct"])] == ["machine", "correct"]


def test_correct_has_a_part_for_each_loss_and_dtype():
    parts = plan.all_steps()["correct"].parts
    assert len(set(parts)) == len(LOSSES) * 3 == 24


def test_the_help_names_all_steps(capsys):
    with pytest.raises(SystemExit):
        main(["gpu", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  {step.name} " in shown for step in plan.all_steps().values())


# ------------------------------------------------------------------------------------- correctness


def test_a_wrong_engine_is_not_correct(monkeypatch):
    from itrloss.engine import triton as engine

    right = engine.sums
    monkeypatch.setattr(engine, "sums", lambda *given: 1.01 * right(*given))
    run = session("correct", "infonce, float32")
    child.run(run)
    wrong = [row for row in run.figures if row.get("right") is False]
    assert run.failed and len(wrong) == len(works.TOY_SHAPES)
    assert any("ArithmeticError" in row.get("error", "") for row in run.figures)


def test_gradients_of_parameters_are_compared(monkeypatch):
    leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    loss = LOSSES["siglip"](engine="dense")
    assert len(works.results(loss, leaves, {})) == 5  # the value, and of the scale and the bias
    found = [[torch.ones(2), torch.ones(2), torch.full((1,), x)] for x in (1.0, 1.01, 1.01)]
    monkeypatch.setattr(works, "results", lambda *given: found.pop(0))
    row = works.compared(session("correct"), "siglip", (4, 4, 4), torch.float32, "rows")
    assert not row["right"] and row["same bits"] and row["errors"][:2] == [0, 0]


NAN = float("nan")


@pytest.mark.parametrize("values", [(1, 1, 1 + 1e-6), (1, NAN, NAN), (NAN, 1, 1)])
def test_other_bits_and_nan_are_not_right(monkeypatch, values):
    """Of the exact result, and of two runs."""
    found = [[torch.full((2,), float(x))] for x in values]
    monkeypatch.setattr(works, "results", lambda *given: found.pop(0))
    row = works.compared(session("correct"), "siglip", (4, 4, 4), torch.float32, "rows")
    assert not row["right"] and row["same bits"] == (values[1] == values[2])


def test_what_was_not_compared_is_not_correct():
    run = session("correct", "infonce, float32", seconds=0)
    child.run(run)
    assert run.failed and run.figures[0]["stopped"]


@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_a_first_step_has_to_be_finite(monkeypatch, value):
    monkeypatch.setattr(works, "results", lambda *given: [torch.full((1,), value)])
    run = session("works")
    child.run(run)
    assert run.failed == (value > 1) and len(run.figures) == 3
    assert ("seconds" in run.figures[0]) != run.failed


def test_an_engine_that_stands_in_for_triton_is_not_right(monkeypatch):
    def warned(*given):
        warnings.warn("itrloss: the Triton engine fails; the tiled one stands in", stacklevel=1)
        return [torch.ones(2)]

    monkeypatch.setattr(works, "results", lambda *given: [torch.ones(2)])
    assert works.compared(session("correct"), "hal", (4, 4, 4), torch.float32, "rows")["right"]
    dense = [[torch.ones(2)]]
    monkeypatch.setattr(works, "results", lambda *x: dense.pop() if dense else warned(*x))
    with pytest.raises(UserWarning, match="stands in"):
        works.compared(session("correct"), "hal", (4, 4, 4), torch.float32, "rows")


def test_other_gradients_in_a_mode_fail_the_step(monkeypatch):
    monkeypatch.setattr(modes, "distance", lambda a, b: 0.02)
    step = speed.Step(LOSSES["infonce"](engine="dense"), session("modes").pair(4, 4, 4))
    with pytest.raises(ArithmeticError, match="differ"):
        modes.same_gradients(session("modes"), step, lambda step: step, {"loss": "infonce"})


@pytest.mark.parametrize(("step", "fails"), [("tiles", False), ("kernels", True)])
def test_only_tiles_of_production_have_to_fit(monkeypatch, step, fails):
    from triton.runtime.errors import OutOfResources

    from itrloss.engine import triton as engine

    def large(*given):
        raise OutOfResources(147456, 101376, "shared memory")

    monkeypatch.setattr(engine, "sums", large)
    monkeypatch.setattr(engine, "visit", large)
    run = session(step)
    child.run(run)
    key = "error" if fails else "skipped"
    assert run.failed == fails and all("shared memory" in row[key] for row in run.figures)


# ------------------------------------------------------------------------------- what needs a GPU


@pytest.fixture
def on_cuda(monkeypatch):
    """A session on a GPU that is not there; yields it and the names of what was called."""
    calls = []
    about = types.SimpleNamespace(
        name="a GPU", major=9, minor=0, multi_processor_count=132, total_memory=80e9
    )
    stream = types.SimpleNamespace(wait_stream=lambda other: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda given: contextlib.nullcontext())
    return Session("modes", dry=False, seconds=60), calls


def test_the_device_is_described(on_cuda):
    run, _ = on_cuda
    assert run.device.type == "cuda"
    described = works.device(run)
    assert described["device"] == "a GPU" and described["capability"] == "9.0"
    assert described["memory GB"] == 80


def test_calls_are_timed_in_bursts_between_synchronisations(on_cuda):
    run, calls = on_cuda
    row = run.timed(lambda: calls.append("call"), seconds=0.05)
    assert row["rounds"] == calls.count("call") - 2  # the first two are no figures
    assert row["host seconds"] <= row["seconds"] < 0.001
    assert calls[:5] == ["call", "synchronize", "call", "synchronize", "synchronize"]
    assert calls.count("call") > 10 * calls.count("synchronize")


def test_a_step_waits_for_the_other_stream(on_cuda):
    run, calls = on_cuda
    modes.on_other_stream(run, lambda: calls.append("step"))()
    assert calls == ["wait", "step", "wait"]


def test_kernels_are_told_from_operators(on_cuda):
    run, _ = on_cuda
    event = types.SimpleNamespace(
        self_device_time_total=5.0, device_type=torch.profiler.DeviceType.CUDA
    )
    assert speed.own_time(event, run) == 5
    event.device_type = torch.profiler.DeviceType.CPU
    assert speed.own_time(event, run) == 0


def test_memory_is_given_back_after_an_item(on_cuda):
    run, calls = on_cuda
    with run.attempt():
        pass
    assert calls == ["synchronize", "empty_cache"]


# ------------------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_leaves_a_record_in_which_a_failing_step_is_failing(
    tmp_path, monkeypatch, capsys
):
    """Python imports sitecustomize at its start, in the steps' processes."""
    bug = "from itrloss.engine import triton as e; s = e.sums; e.sums = lambda *x: 1.01 * s(*x)"
    (tmp_path / "sitecustomize.py").write_text(bug)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    steps = plan.all_steps()
    slot = steps["machine"], steps["correct"]._replace(parts=("infonce, float32",)), steps["ncu"]
    monkeypatch.setitem(plan.SLOTS, 1, slot)
    assert main(["gpu", "--dry", "--out", str(tmp_path)]) == 1
    path = tmp_path / "gpu_dry_slot1.json"
    found = record.load(path)
    assert found.correct is False and found.failures() == ["correct"]
    assert [(x["name"], x["rc"]) for x in found.steps] == [
        ("machine", 0),
        ("correct", 1),
        ("ncu", 0),
    ]
    assert found.dry and found.capability is None and found.slot == 1
    assert found.torch == torch.__version__ and found.triton and found.date
    assert {row["step"] for row in found.figures} == {"machine", "correct", "ncu"}
    assert any("ArithmeticError" in row.get("error", "") for row in found.figures)
    printed = capsys.readouterr().out
    assert "FAILED  correct" in printed and "not measured  InfoNCE 32768 x 512" in printed
    assert path.with_suffix(".txt").read_text() in printed
    assert path.with_suffix(".svg").stat().st_size > 1000
    assert f"0 of {len(works.TOY_SHAPES)} cases are right" in printed


@pytest.mark.parametrize(("code", "correct"), [("0", True), ("1", False), ("os._exit(3)", False)])
def test_losses_are_correct_if_their_step_says_so(monkeypatch, setup, code, correct):
    fake(monkeypatch, f"import os; raise SystemExit({code})")
    steps = [STEP, STEP._replace(name="correct")]
    found = command.measured(1, steps, setup, 100)
    assert found.correct is correct
    assert command.measured(1, steps[:1], setup, 100).correct is None
    assert command.measured(1, steps, setup, plan.LEAST).correct is False  # there was no time


@pytest.fixture
def setup(tmp_path):
    return command.Setup(tmp_path, tmp_path / "log.txt", tmp_path, True, {"PATH": "/usr/bin:/bin"})


STEP = plan.Step("machine", "works", 60, "")


def fake(monkeypatch, code: str) -> None:
    """Run Python code in place of a step."""
    monkeypatch.setattr(command, "command", lambda *given: [sys.executable, "-c", code])


@pytest.mark.parametrize("code", [3, 1, -9])
def test_exit_statuses_are_recorded(monkeypatch, setup, code):
    end = f"raise SystemExit({code})" if code > 0 else "import os; os.kill(os.getpid(), 9)"
    fake(monkeypatch, end)
    row, figures = command.outcome(STEP, 100, setup)
    assert row["rc"] == code and figures == []
    assert Record(1, True, steps=[row]).failures() == ["machine"]


def test_a_part_that_fails_fails_its_step(monkeypatch, setup):
    codes = {"a": 0, "b": 7, "c": 0}
    words = [sys.executable, "-c", "import sys; raise SystemExit(int(sys.argv[1]))"]
    monkeypatch.setattr(command, "command", lambda step, part, *_: [*words, str(codes[part])])
    row, _ = command.outcome(STEP._replace(parts=("a", "b", "c")), 100, setup)
    assert row["rc"] == 7


def test_a_program_runs_the_step(tmp_path, monkeypatch, setup):
    """As compute-sanitizer does; here one that keeps its arguments and ends with an error."""
    program = tmp_path / "a-sanitizer"
    program.write_text('#!/bin/sh\necho "$@"\nexit 9\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    step = STEP._replace(tool=("a-sanitizer", "--log", "{out}/seen.csv"))
    row, _ = command.outcome(step, 100, setup._replace(dry=False))
    called = f"--log {tmp_path}/seen.csv {sys.executable} -m benchmarks.gpu.child machine"
    assert row["rc"] == 9 and called in setup.log.read_text()


@pytest.mark.slow
def test_a_step_that_takes_too_long_is_killed_with_its_children(monkeypatch, setup):
    mark = setup.folder / "mark"
    grandchild = f"import time; time.sleep(3); open({str(mark)!r}, 'w')"
    fake(
        monkeypatch,
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])",
    )
    monkeypatch.setattr(plan, "DRY", 1)
    start = time.monotonic()
    row, _ = command.outcome(STEP._replace(seconds=1), 100, setup)
    assert row["rc"] == command.TOOK_TOO_LONG and time.monotonic() - start < 2.5
    time.sleep(3)
    assert not mark.exists()


def test_a_step_without_time_is_not_begun(monkeypatch, setup):
    fake(monkeypatch, "raise SystemExit(1)")
    row, _ = command.outcome(STEP, plan.LEAST - 1, setup)
    assert row["skipped"] == "no time" and "rc" not in row
    assert Record(1, True, steps=[row]).failures() == ["machine"]


def test_figures_of_a_step_that_is_killed_are_kept(setup, monkeypatch):
    path = setup.folder / "machine0.jsonl"
    fake(monkeypatch, f"open({str(path)!r}, 'w').write('{{\"a\": 1}}\\n{{\"b\"'); 1 / 0")
    row, figures = command.outcome(STEP, 100, setup)
    assert row["rc"] == 1 and figures == [{"a": 1}]


def test_a_missing_package_or_program_skips_a_step(monkeypatch, setup):
    fake(monkeypatch, "raise SystemExit(1)")
    row, _ = command.outcome(STEP._replace(needs="no_such_package"), 100, setup)
    assert row == {"name": "machine", "skipped": "no_such_package is not installed"}
    assert Record(1, True, steps=[row]).failures() == []
    production = setup._replace(dry=False)
    row, _ = command.outcome(STEP._replace(tool=("no-such-program",)), 100, production)
    assert row["skipped"] == "no-such-program is not installed"


def test_an_error_in_an_item_fails_the_step_and_the_next_item_runs():
    run = session("machine")
    with run.attempt(item=1):
        raise ValueError("broken")
    with run.attempt(item=2):
        run.say(item=2)
    assert run.failed and run.figures[0]["error"] == "ValueError: broken"
    assert run.figures[1] == {"step": "machine", "item": 2}


# -------------------------------------------------------------------------------------- the record


def example() -> Record:
    figures = [{"step": "machine", "x": float("nan")}]
    return Record(2, False, "NVIDIA H100 80GB HBM3", "9.0", correct=True, figures=figures)


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
    found = dataclasses.asdict(example()) | {"figures": [], key: value}
    if value is None:
        del found[key]
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=key):
        record.load(path)


def test_committed_records_are_of_devices():
    for path in RESULTS.glob("gpu_*.json"):
        found = record.load(path)
        assert not found.dry and found.capability
        assert path.stem.startswith(Path(found.name).stem)  # earlier ones are kept under more words


# --------------------------------------------------------------------------------------- the goals


def test_goals_are_judged_by_the_worst_figure():
    about = {"step": "goals", "loss": "infonce", "shape": [32768, 32768, 512]}
    figures = [about | {"variant": "triton", "seconds": 0.008}]
    others = [about | {"variant": "matmul_bound", "seconds": 1.0}, {"step": "machine"}]
    rows = goals.judged(figures + others)
    assert [row["met"] for row in rows] == [True] + [None] * (len(rows) - 1)
    figures.append(about | {"variant": "triton", "seconds": 0.0091})
    assert goals.judged(figures)[0] == {
        "goal": "InfoNCE 32768 x 512",
        "most": 9.0,
        "unit": "ms",
        "found": 9.1,
        "met": False,
    }


@pytest.mark.slow
def test_goals_look_for_figures_that_steps_write():
    """With the toy shape in place of the large one."""
    found = []
    for name in ("goals", "amp"):
        run = session(name)
        child.run(run)
        found += run.figures
    timed = [row for row in found if "seconds" in row]
    for goal in goals.GOALS:
        where = dict(goal.figures)
        where.pop("shape", None)
        if where.get("loss") in ("infonce", "siglip"):
            where["loss"] = "infonce learnable"
        matching = [row for row in timed if where.items() <= row.items()]
        assert matching and all(goal.key in row for row in matching), goal.name


# --------------------------------------------------------------------------------------- the text


def test_the_text_names_what_is_wrong():
    right = {"step": "correct", "loss": "hal", "right": True}
    wrong = {"step": "correct", "loss": "siglip", "right": False, "errors": [0.5]}
    late = {"step": "correct", "loss": "dcl std", "stopped": "no time"}
    steps = [
        {"name": "correct", "limit": 80, "rc": 1, "seconds": 3.5},
        {"name": "ncu", "skipped": "ncu is not installed"},
    ]
    found = dataclasses.replace(example(), steps=steps, figures=[right, wrong, late])
    found.goals = [{"goal": "a", "most": 1.5, "unit": "ms", "found": 2.0, "met": False}]
    text = summary.text(found)
    assert "correct     rc 1     3.5 s of 80\nncu         skipped: ncu is not installed" in text
    assert "MISSED        a: 2, at most 1.5 ms" in text
    assert "1 of 2 cases are right\nloss siglip, right False, errors [0.5]" in text
    assert "loss dcl std, stopped no time" in text and "NVIDIA H100 80GB HBM3" in text


def test_the_plot_has_a_bar_for_every_throughput(tmp_path):
    row = {"shape": [4, 4, 4], "dtype": "bfloat16", "seconds": 1.0}
    rows = [
        row | {"step": "goals", "loss": "hal", "variant": "triton", "gflops": 1000},
        row | {"step": "peers", "loss": "infonce", "variant": "open_clip", "gflops": 500},
        row | {"step": "peers", "loss": "infonce", "variant": "matmul_bound", "gflops": 900},
        {"step": "modes", "loss": "infonce"},
    ]
    summary.plot(dataclasses.replace(example(), figures=rows), tmp_path / "a.svg")
    drawn = (tmp_path / "a.svg").read_text()
    for words in ("goals 4x4x4 · hal · triton", "peers 4x4x4 · infonce · matmul_bound"):
        assert words in drawn
    assert [summary.colour(x) for x in rows[:3]] == ["tab:blue", "tab:gray", "black"]


# ---------------------------------------------------------------------------------- other libraries


def test_wheels_are_unpacked_for_the_steps(tmp_path):
    wheels = tmp_path / "wheels to use"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "peer-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("peer/__init__.py", "NUMBER = 5")
    args = command.parser().parse_args(["--dry", "--wheels", str(wheels)])
    variables = command.environment(tmp_path, args)
    code = "import peer; print(peer.NUMBER)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "5\n"


@pytest.mark.slow
def test_open_clip_is_timed_under_autocast(monkeypatch):
    seen = []

    def loss(images, texts):
        seen.append((torch.is_autocast_enabled("cpu"), images.dtype))
        return (images @ texts.T).float().sum()

    peer = peers.Peer(("infonce",), lambda case, problem: loss)
    monkeypatch.setitem(peers.PEERS, "open_clip", peer)
    run = session("amp")
    child.run(run)
    assert not run.failed and set(seen) == {(True, torch.float32)}
    assert [row["variant"] for row in run.figures][:2] == ["open_clip", "ours"]


@pytest.mark.slow
def test_a_library_that_is_missing_is_skipped(monkeypatch):
    def missing(case, problem):
        raise peers.Unavailable("is not installed")

    monkeypatch.setitem(peers.PEERS, "open_clip", peers.Peer(("infonce",), missing))
    for step in ("encoders", "amp"):
        run = session(step)
        child.run(run)
        skipped = [row for row in run.figures if "skipped" in row]
        assert not run.failed and {row["variant"] for row in skipped} == {"open_clip"}
