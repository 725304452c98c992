"""Results are written whole or not at all, into files of their own, and signals leave nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.command_line import C, N, refused, run, scores

from itrloss.files import written


def test_a_folder_of_run_files_is_made(saved):
    for _ in range(2):
        assert run("rerank", "sims.npy", "--methods", "fast", "--trec", "trec") == 0
    assert Path("trec/i2t.run").exists()


# --- where they are written -----------------------------------------------------------------------


def write_queries(path: str) -> int:
    return run("rerank", "sims.npy", "--methods", "fast", "--queries", path)


def test_archives_are_not_written_to_devices():
    with pytest.raises(ValueError, match="device"), written("/dev/null", "wb"):
        pass


def test_tables_are_written_to_devices(saved):
    assert write_queries("/dev/null") == 0


def test_a_pipe_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with written(pipe) as file:
        file.write("x")
    assert os.read(reader, 9) == b"x"
    assert pipe.is_fifo()
    os.close(reader)


def test_links_are_followed(saved):
    Path("link.csv").symlink_to("target.csv")
    assert write_queries("link.csv") == 0
    assert Path("link.csv").is_symlink()
    assert Path("target.csv").read_text().startswith("direction")
    Path("loop.npz").symlink_to("loop.npz")  # replaced
    assert run("rerank", "sims.npy", "--methods", "fast", "--out", "loop.npz") == 0
    assert np.load("loop.npz")["i2t"].shape == (N, N * C)


@pytest.mark.parametrize("name", ["s.npz", "link.npz"])
def test_a_result_does_not_replace_the_input(name, saved, capsys):
    np.savez("s.npz", scores())
    Path("link.npz").symlink_to("s.npz")
    content = Path("s.npz").read_bytes()
    said = refused(capsys, "rerank", "s.npz", "--methods", "fast", "--out", name)
    assert f"{name}: expected a file of its own for a result, got that of scores" in said
    assert Path("s.npz").read_bytes() == content
    Path("i.csv").write_text("".join(f"{i}\n" for i in range(N)))
    ids = ("--image-ids", "i.csv", "--text-ids", "t.npy")
    said = refused(capsys, "rerank", "s.npz", *ids, "--queries", "i.csv")
    assert "got that of image-ids" in said


def test_what_is_interrupted_leaves_the_old_file(saved, monkeypatch):
    Path("out.npz").write_text("of yesterday")
    before = set(saved.iterdir())

    def full(*args: object, **arrays: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert run("rerank", "sims.npy", "--methods", "fast", "--out", "out.npz") == 2
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
        assert run("rerank", "sims.npy", "--methods", "fast") == 0
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
