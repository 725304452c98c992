"""Results are written whole or not at all, into files of their own, and signals leave nothing."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from support.command_line import C, N, refused, run, scores

from itrloss import rerank
from itrloss.files import written
from itrloss.metrics import retrieval_metrics, retrieval_results


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "sims.npy"
    np.save(path, scores())
    return path


def expect_scores(path: Path, reranker: rerank.Reranker) -> None:
    """Check that a file has the scores of a re-ranker, up to rounding."""
    wanted = reranker.rerank(torch.from_numpy(scores()))
    with np.load(path) as arrays:
        np.testing.assert_allclose(arrays["i2t"], wanted.i2t, rtol=1e-5)
        np.testing.assert_allclose(arrays["t2i"], wanted.t2i, rtol=1e-5)


# --- content --------------------------------------------------------------------------------------

SCALES = ("--i2t", 9, 8, "--t2i", 8, 17)
FAST = rerank.FastReranker((9, 8), (8, 17))


def test_scores_are_those_of_the_library(saved, tmp_path, capsys):
    out = tmp_path / "out.npz"
    methods = ("--methods", "csls", "fast", "--write", "fast")
    assert run("rerank", saved, *methods, *SCALES, "--out", out) == 0
    assert "written (fast, hubs of the test queries)" in capsys.readouterr().out
    expect_scores(out, FAST)


def test_scores_without_re_ranking_are_the_input(saved, tmp_path):
    out = tmp_path / "out.npz"
    assert run("rerank", saved, "--methods", "csls", "--write", "no re-ranking", "--out", out) == 0
    with np.load(out) as arrays:
        np.testing.assert_allclose(arrays["t2i"], scores())


def test_calibrated_scores_are_written_before_others(saved, tmp_path, capsys):
    val, out = tmp_path / "val.npy", tmp_path / "o.npz"
    np.save(val, scores(1))
    command = ("rerank", saved, "--val", val, "--methods", "fast", "csls", "--out", out)
    assert run(*command) == 0
    assert "written (fast, calibrated, hubs of" in capsys.readouterr().out
    expect_scores(out, rerank.FastReranker().calibrate(torch.from_numpy(scores(1))))
    assert run(*command, "--write", "fast") == 0
    assert "written (fast, hubs of" in capsys.readouterr().out


@pytest.mark.parametrize("transposed", [False, True])
def test_scores_by_the_bank_are_written_before_others(transposed, tmp_path, capsys):
    bank = np.random.default_rng(0).random((30, N * C))
    np.save(tmp_path / "s.npy", scores().T if transposed else scores())
    np.save(tmp_path / "b.npy", bank.T if transposed else bank)
    out = tmp_path / "o.npz"
    options = ["--bank-images", tmp_path / "b.npy", "--methods", "csls", "--out", out]
    if transposed:
        options.append("--transpose")
    assert run("rerank", tmp_path / "s.npy", *options) == 0
    assert "written (csls, hubs of the bank (i2t))" in capsys.readouterr().out
    expect_scores(out, rerank.CSLS().fit(images=torch.from_numpy(bank)))


def test_rankings_are_those_of_the_library(saved, tmp_path):
    path = tmp_path / "rankings.npz"
    assert run("rerank", saved, "--methods", "fast", "--rankings", path, *SCALES, "--top", 3) == 0
    wanted = FAST.topk(torch.from_numpy(scores()), 3)
    with np.load(path) as arrays:
        assert arrays["i2t"].tolist() == wanted.i2t.indices.tolist()
        assert arrays["t2i"].tolist() == wanted.t2i.indices.tolist()


@pytest.mark.parametrize("method", ["no re-ranking", "fast"])
def test_rankings_have_all_candidates_where_there_are_fewer_than_asked_for(method, saved, tmp_path):
    path = tmp_path / "r.npz"
    options = ("--methods", "fast", "--write", method, "--rankings", path, "--top", 20)
    assert run("rerank", saved, *options) == 0
    found = np.load(path)
    assert found["i2t"].shape == (N, 20)
    assert found["t2i"].shape == (N * C, N)


def test_queries_have_the_ranks_of_the_library(saved, tmp_path):
    path = tmp_path / "queries.csv"
    assert run("rerank", saved, "--methods", "fast", *SCALES, "--queries", path) == 0
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    plain = torch.from_numpy(scores())
    results = retrieval_results(plain, reranker=FAST)
    found = {"i2t": [], "t2i": []}
    for row in rows:
        found[row["direction"]].append(int(row["best_rank"]))
    assert found == {way: side.best.tolist() for way, side in results.ways.items()}
    assert found["t2i"] != retrieval_results(plain).t2i.best.tolist()
    hits = [rank <= 5 for rank in found["t2i"]]
    wanted = retrieval_metrics(plain, reranker=FAST)["t2i_r5"]
    assert 100 * sum(hits) / len(hits) == pytest.approx(wanted)


def test_suffixes_may_be_upper_case(saved, tmp_path):
    assert write_queries(saved, tmp_path / "Q.CSV") == 0
    assert (tmp_path / "Q.CSV").exists()


def test_a_folder_of_run_files_is_made(saved, tmp_path):
    for _ in range(2):
        assert run("rerank", saved, "--methods", "fast", "--trec", tmp_path / "trec") == 0
    assert (tmp_path / "trec" / "i2t.run").exists()


# --- where they are written -----------------------------------------------------------------------


def write_queries(saved: Path, path: Path | str) -> int:
    return run("rerank", saved, "--methods", "fast", "--queries", path)


@pytest.mark.parametrize("option", ["--out", "--rankings"])
def test_archives_are_not_written_to_devices(option, saved, capsys):
    said = refused(capsys, "rerank", saved, option, "/dev/null")
    assert "/dev/null: expected a file to write, got a device" in said
    with pytest.raises(ValueError, match="device"), written("/dev/null", "wb"):
        pass


def test_tables_are_written_to_devices(saved):
    assert write_queries(saved, "/dev/null") == 0


def test_a_pipe_stays_a_pipe(tmp_path):
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with written(pipe) as file:
        file.write("x")
    assert os.read(reader, 9) == b"x"
    assert pipe.is_fifo()
    os.close(reader)


def test_links_are_followed(saved, tmp_path):
    link, target = tmp_path / "link.csv", tmp_path / "target.csv"
    link.symlink_to(target)
    assert write_queries(saved, link) == 0
    assert link.is_symlink()
    assert target.read_text().startswith("direction")


def test_a_link_to_itself_is_replaced(saved, tmp_path):
    loop = tmp_path / "loop.npz"
    loop.symlink_to("loop.npz")
    assert run("rerank", saved, "--methods", "fast", "--out", loop) == 0
    assert np.load(loop)["i2t"].shape == (N, N * C)


@pytest.mark.parametrize("name", ["sims.npy", "link.npy"])
def test_a_result_does_not_replace_the_scores(name, saved, tmp_path, capsys):
    content = saved.read_bytes()
    (tmp_path / "link.npy").symlink_to(saved)
    path = tmp_path / name
    said = refused(capsys, "rerank", saved, "--methods", "fast", "--out", path)
    assert f"{path}: expected a file of its own for a result, got that of scores" in said
    assert saved.read_bytes() == content


def test_a_result_does_not_replace_ids(saved, tmp_path, capsys):
    images, texts = tmp_path / "images.txt", tmp_path / "texts.txt"
    images.write_text("".join(f"{i}\n" for i in range(N)))
    texts.write_text("".join(f"{i // C}\n" for i in range(N * C)))
    ids = ("--image-ids", images, "--text-ids", texts)
    assert "got that of text-ids" in refused(capsys, "rerank", saved, *ids, "--queries", texts)


def test_what_is_interrupted_leaves_the_old_file(saved, tmp_path, monkeypatch):
    out = tmp_path / "out.npz"
    out.write_text("of yesterday")

    def full(*args: object, **arrays: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", full)
    assert run("rerank", saved, "--methods", "fast", "--out", out) == 2
    assert out.read_text() == "of yesterday"
    assert set(tmp_path.iterdir()) == {out, saved}


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_results_have_the_permissions_of_any_new_file(mask, mode, saved, tmp_path):
    before = os.umask(mask)
    try:
        assert write_queries(saved, tmp_path / "q.csv") == 0
        assert (tmp_path / "q.csv").stat().st_mode & 0o777 == mode
        assert os.umask(mask) == mask  # unchanged
    finally:
        os.umask(before)


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_leaves_no_temporary_file_and_no_traceback(saved, tmp_path):
    code = (  # a process for each signal, after one import
        "import os, signal, sys, time; from itrloss import cli\n"
        # background jobs of a shell script ignore SIGINT
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "for sent in map(int, sys.argv[1:]):\n"
        "    process = os.fork()\n"
        "    if not process:\n"
        "        def stop(*args, **kwargs): os.kill(os.getpid(), sent); time.sleep(60)\n"
        "        cli.np.savez = stop\n"
        "        command = ['rerank', 'sims.npy', '--methods', 'fast', '--out', 'out.npz']\n"
        "        sys.exit(cli.main(command))\n"
        "    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])\n"
        "    print('ended', ended - sent, *sorted(os.listdir()), flush=True)"
    )
    signals = [str(int(sent)) for sent in (signal.SIGTERM, signal.SIGINT)]
    command = [sys.executable, "-c", code, *signals]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert ended == ["ended 128 sims.npy"] * 2, done.stderr
    assert "Traceback" not in done.stderr


def test_the_handler_of_a_signal_is_the_callers_again(saved):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run("rerank", saved, "--methods", "fast") == 0
        assert run("rerank", saved.parent) == 2
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
