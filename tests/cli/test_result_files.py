"""Results are written whole or not at all, into files of their own, and signals leave nothing."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import FAST, C, N, refused, run, scores

from itrloss.files import written
from itrloss.metrics import retrieval_results, save_trec


def test_a_folder_of_run_files_is_made(saved):
    for _ in range(2):
        assert run(*FAST, "--trec", "trec") == 0
    assert Path("trec/i2t.run").exists()


# --- where they are written -----------------------------------------------------------------------


def write_queries(path: str) -> int:
    return run(*FAST, "--queries", path)


def test_devices_and_pipes_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    for path in ("/dev/null", tmp_path / "pipe.csv"):
        with pytest.raises(ValueError, match="a device or a pipe"), written(path):
            pass
    assert (tmp_path / "pipe.csv").is_fifo()


def test_links_are_followed(saved):
    Path("link.csv").symlink_to("target.csv")
    assert write_queries("link.csv") == 0
    assert Path("link.csv").is_symlink()
    assert Path("target.csv").read_text().startswith("direction")
    Path("loop.npz").symlink_to("loop.npz")  # replaced
    assert run(*FAST, "--out", "loop.npz") == 0
    assert np.load("loop.npz")["i2t"].shape == (N, N * C)


@pytest.mark.parametrize("name", ["s.npz", "link.npz"])
def test_a_result_does_not_replace_the_input(name, saved, capsys):
    np.savez("s.npz", scores())
    Path("link.npz").symlink_to("s.npz")
    content = Path("s.npz").read_bytes()
    said = refused(capsys, "rerank", "s.npz", "--methods", "fast", "--out", name)
    assert f"{name}: expected a file of its own for a result" in said
    assert Path("s.npz").read_bytes() == content
    Path("i.csv").write_text("".join(f"{i}\n" for i in range(N)))
    ids = ("--image-ids", "i.csv", "--text-ids", "t.npy")
    said = refused(capsys, "rerank", "s.npz", *ids, "--queries", "i.csv")
    assert "i.csv: expected a file of its own for a result" in said


def test_what_is_interrupted_leaves_the_old_file(saved, monkeypatch):
    Path("out.npz").write_text("of yesterday")
    before = set(saved.iterdir())

    def full(*args: object, **arrays: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert run(*FAST, "--out", "out.npz") == 2
    assert Path("out.npz").read_text() == "of yesterday"
    assert set(saved.iterdir()) == before


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_results_have_the_permissions_of_any_new_file(mask, mode, saved):
    before = os.umask(mask)
    try:
        assert write_queries("q.csv") == 0
        assert Path("q.csv").stat().st_mode & 0o777 == mode
        assert os.umask(mask) == mask  # unchanged
    finally:
        os.umask(before)


def test_names_of_files_may_be_of_another_system(saved):
    name = b"\xff s_\xe9 a\xc3 " + "模.npy".encode()
    path = os.fsdecode(name)
    np.save(path, scores(2))
    few = ("--samples", 9, "--metrics", "m.csv", "--report", "r.html", "--latex", "t.tex")
    assert run("rerank", path, "--methods", "csls", "--queries", "q.csv", *few) == 0
    assert run("compare", path, "sims.npy", *few) == 0
    shown = name.decode("utf-8", "replace").replace("\ufffd", "?")
    for result in ("m.csv", "r.html", "t.tex", "q.csv"):
        assert shown in Path(result).read_text(encoding="utf-8")


LATEX = ("rerank", "sims.npy", "--methods", "csls", "--samples", "9", "--latex", "t.tex")


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_results_are_written_though_nothing_can_be_said(closed: str, saved, monkeypatch):
    monkeypatch.setattr(sys, closed, None)  # as Python does at its start
    assert run(*LATEX) == 0
    assert Path("t.tex").read_text().endswith("\\end{tabular}\n}\n")


@pytest.mark.slow
def test_results_are_written_though_all_is_closed(saved):
    code = """
import os, sys
os.closerange(1, 3)
os.execv(sys.executable, [sys.executable, "-m", "itrloss", *sys.argv[1:]])"""
    done = subprocess.run([sys.executable, "-c", code, *LATEX])
    assert done.returncode == 0
    assert Path("t.tex").read_text().endswith("\\end{tabular}\n}\n")


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_leaves_no_temporary_file_and_no_traceback(saved):
    code = (  # a process for each signal, after one import
        "import os, signal, sys, time, numpy; from itrloss import cli\n"
        # background jobs of a shell script ignore SIGINT
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "signals = map(int, sys.argv[1:])\n"
        "sys.argv[1:] = 'rerank', 'sims.npy', '--methods', 'fast', '--out', 'out.npz'\n"
        "for sent in signals:\n"
        "    process = os.fork()\n"
        "    if not process:\n"
        "        def stop(*args, **kwargs): os.kill(os.getpid(), sent); time.sleep(60)\n"
        "        numpy.savez = stop\n"
        "        sys.exit(cli.main())\n"
        "    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])\n"
        "    print('ended', ended - sent, flush=True)"
    )
    before = set(saved.iterdir())
    signals = [str(int(sent)) for sent in (signal.SIGTERM, signal.SIGINT)]
    done = subprocess.run([sys.executable, "-c", code, *signals], capture_output=True, text=True)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert ended == ["ended 128"] * 2, done.stderr
    assert "Traceback" not in done.stderr
    assert set(saved.iterdir()) == before


def test_a_call_leaves_the_handler_of_a_signal_alone(saved):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run(*FAST) == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


# --- whole, or not at all -------------------------------------------------------------------------


@pytest.fixture
def full_disk():
    """Files cannot be longer than 4 kB."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


LARGE = torch.rand(120, 120, generator=torch.Generator().manual_seed(0))
NAMES = ["i2t.run", "i2t.qrels", "t2i.run", "t2i.qrels"]


@pytest.mark.parametrize("name", NAMES)
def test_on_a_full_disk_run_files_are_those_of_before(name: str, tmp_path: Path, full_disk):
    for other in NAMES:
        (tmp_path / other).write_text("of yesterday")
    with pytest.raises(OSError, match="large"):
        save_trec(retrieval_results(LARGE), tmp_path)
    assert (tmp_path / name).read_text() == "of yesterday"
    assert len(list(tmp_path.iterdir())) == 4


def test_on_a_full_disk_queries_are_those_of_before(tmp_path: Path, full_disk):
    path = tmp_path / "q.csv"
    path.write_text("of yesterday")
    with pytest.raises(OSError, match="large"):
        retrieval_results(LARGE).save(path)
    assert path.read_text() == "of yesterday"


RESULTS = ["--latex t.tex", "--queries q.csv", "--metrics m.csv", "--out o.npz"]


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_files_that_are_replaced_keep_their_permissions(mode: int, saved):
    options = " ".join(RESULTS).split()
    paths = [Path(name) for name in options[1::2]]
    for path in paths:
        path.write_text("mine")
        path.chmod(mode)
    assert run(*FAST, "--samples", 9, *options) == 0
    for path in paths:
        assert path.read_bytes() != b"mine"
        assert path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("option", [*RESULTS, "--report r.html"])
def test_a_file_that_is_read_only_is_refused_before_the_work(option: str, saved, capsys):
    path = Path(option.split()[1])
    path.write_text("mine")
    path.chmod(0o444)
    said = refused(capsys, *FAST, *option.split())
    assert f"{path}: it is read-only" in said
    assert path.read_text() == "mine"


@pytest.mark.parametrize("option", ["latex /proc/t.tex", "metrics /proc/m.csv", "out /proc/o.npz"])
def test_a_folder_where_nothing_can_be_made_is_refused_before_the_work(option, saved, capsys):
    said = refused(capsys, "rerank", "missing.npy", *f"--{option}".split())
    assert "/proc: no file can be made there" in said


@pytest.mark.parametrize("tag", ["my model", "", "two\nlines", " model", "a\tb", "\u2003"])
def test_the_name_of_a_run_is_one_word(tag: str, tmp_path: Path):
    with pytest.raises(ValueError, match="tag: expected a word without blanks"):
        save_trec(retrieval_results(LARGE), tmp_path / "runs", tag=tag)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("tag", ["model", "it-1.0", "模型", "a:b", "x"])
def test_each_line_of_a_run_has_six_columns(tag: str, tmp_path: Path):
    save_trec(retrieval_results(LARGE), tmp_path, tag=tag)
    for line in (tmp_path / "i2t.run").read_text(encoding="utf-8").splitlines():
        assert len(line.split()) == 6
