"""Regression tests of the command line and its files: tracebacks, excessive memory, and lost
data.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from itrloss import files
from itrloss.checks import check_number
from itrloss.cli import main


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    np.save(tmp_path / "s.npy", np.random.default_rng(0).normal(size=(6, 12)).astype("f4"))
    return tmp_path / "s.npy"


def run(*arguments: object) -> int:
    return main([str(x) for x in arguments])


def refused(capsys, *arguments: object) -> str:
    assert run(*arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_numbers_beyond_float32_are_named(saved, capsys):
    said = refused(capsys, "rerank", saved, "--i2t", 1e39, 1)
    assert "i2t: expected a number in the range of float32, got 1e+39" in said
    for x in (float("nan"), float("-inf"), -1e39):
        with pytest.raises(ValueError, match="x: expected a number in the range of float32"):
            check_number("x", x)
    check_number("x", torch.finfo(torch.float32).max, positive=True)


@pytest.mark.parametrize("option", ["--out", "--rankings"])
def test_archives_are_not_written_to_devices(option, saved, capsys):
    assert "/dev/null: expected a file to write, got a device" in refused(
        capsys, "rerank", saved, option, "/dev/null"
    )
    with pytest.raises(ValueError, match="device"), files.written("/dev/null", "wb"):
        pass
    assert run("rerank", saved, "--methods", "fast", "--queries", "/dev/null") == 0


def test_a_link_to_itself_is_replaced(saved, tmp_path):
    os.symlink("loop.npz", tmp_path / "loop.npz")
    assert run("rerank", saved, "--methods", "fast", "--out", tmp_path / "loop.npz") == 0
    assert np.load(tmp_path / "loop.npz")["i2t"].shape == (6, 12)


def test_a_result_does_not_replace_an_input(saved, tmp_path, capsys):
    content = saved.read_bytes()
    os.symlink(saved, tmp_path / "link.npy")
    for path in (saved, tmp_path / "link.npy"):
        said = refused(capsys, "rerank", saved, "--methods", "fast", "--out", path)
        assert f"{path}: expected a file of its own for a result, got that of scores" in said
    (tmp_path / "ids.txt").write_text("".join(f"{i}\n" for i in range(6)))
    (tmp_path / "texts.txt").write_text("".join(f"{i // 2}\n" for i in range(12)))
    ids = "--image-ids", tmp_path / "ids.txt", "--text-ids", tmp_path / "texts.txt"
    assert "got that of text-ids" in refused(
        capsys, "rerank", saved, *ids, "--queries", tmp_path / "texts.txt"
    )
    assert saved.read_bytes() == content


def test_a_tensor_expanded_from_a_few_bytes_is_refused(tmp_path, capsys):
    torch.save(torch.randn(1).expand(10**6, 10**6), tmp_path / "bomb.pt")
    assert "expected a tensor that holds each of its numbers" in refused(
        capsys, "rerank", tmp_path / "bomb.pt"
    )
    torch.save(torch.randn(12, 6).T, tmp_path / "transposed.pt")
    assert files.read_matrix(tmp_path / "transposed.pt").shape == (6, 12)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_a_pickle_of_a_few_bytes_takes_no_gigabytes(tmp_path):
    (tmp_path / "memo.pkl").write_bytes(b"\x80\x02Nr" + struct.pack("<I", 2**28) + b".")
    code = (
        "import sys, resource; from itrloss import files\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: files.read_matrix('memo.pkl')\n"
        "except ValueError as error: print(error)\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, 'MB')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    said, megabytes = done.stdout.splitlines()
    assert said == "memo.pkl: expected an array, got NoneType" and int(megabytes.split()[0]) < 100


def test_only_the_chosen_array_of_an_archive_is_read(tmp_path):
    scores = np.random.default_rng(0).normal(size=(6, 12)).astype("f4")
    with zipfile.ZipFile(tmp_path / "side.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in (("sims.npy", scores), ("other.npy", np.zeros((5000, 5000), "f4"))):
            with archive.open(name, "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array)
    tracemalloc.start()
    found = files.read_matrix(tmp_path / "side.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(found, torch.from_numpy(scores)) and peak < 10**7
    assert files.read_matrix(tmp_path / "side.npz", "other").shape == (5000, 5000)


def test_an_archive_that_contradicts_its_number_of_images_is_refused(tmp_path):
    np.savez(tmp_path / "s.npz", sims=np.ones((6, 12)), npts=7)
    with pytest.raises(ValueError, match="says npts = 7"):
        files.read_matrix(tmp_path / "s.npz")


@pytest.mark.parametrize("images", [6, 12])
def test_the_images_of_an_archive_may_be_its_columns(images, tmp_path):
    np.savez(tmp_path / "s.npz", sims=np.ones((6, 12)), npts=images)
    assert files.read_matrix(tmp_path / "s.npz").shape == (6, 12)


def test_an_archive_that_speaks_of_more_numbers_than_it_has_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "s.npz", "w") as archive, archive.open("sims.npy", "w") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": (10**8, 10**7)}  # petabytes
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(100))
    with pytest.raises(ValueError, match=r"s\.npz: speaks of more data than there is memory"):
        files.read_matrix(tmp_path / "s.npz")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_results_have_the_permissions_of_any_new_file(mask, mode, saved, tmp_path):
    before = os.umask(mask)
    try:
        assert run("rerank", saved, "--methods", "fast", "--queries", tmp_path / "q.csv") == 0
        assert (tmp_path / "q.csv").stat().st_mode & 0o777 == mode
        assert os.umask(mask) == mask  # unchanged
    finally:
        os.umask(before)


def test_rankings_have_all_candidates_where_there_are_fewer_than_asked_for(saved, tmp_path):
    options = ("--methods", "fast", "--rankings", tmp_path / "r.npz", "--top", 9)
    for method in ("no re-ranking", "fast"):
        assert run("rerank", saved, *options, "--write", method) == 0
        found = np.load(tmp_path / "r.npz")
        assert found["i2t"].shape == (6, 9) and found["t2i"].shape == (12, 6)


def test_ids_are_integers_and_nothing_else(tmp_path):
    np.save(tmp_path / "i.npy", np.array([True, False]))
    with pytest.raises(ValueError, match=r"i\.npy: expected a row of integers, got torch\.bool"):
        files.read_ids(tmp_path / "i.npy")


def test_numbers_longer_than_pytorchs_are_read(tmp_path):
    np.save(tmp_path / "s.npy", np.full((2, 3), 0.1, np.longdouble))
    assert files.read_matrix(tmp_path / "s.npy").tolist() == [[0.1] * 3] * 2


def test_embeddings_may_differ_in_precision(tmp_path):
    for name, shape, dtype in (("v", (4, 3), "f4"), ("w", (8, 3), "f8")):
        np.save(tmp_path / f"{name}.npy", np.random.default_rng(0).normal(size=shape).astype(dtype))
    assert run("eval", tmp_path / "v.npy", tmp_path / "w.npy", "--methods", "fast") == 0


def test_a_validation_set_with_texts_as_rows_is_told_of_transpose(saved, tmp_path, capsys):
    np.save(tmp_path / "val.npy", np.random.default_rng(0).normal(size=(12, 6)))
    said = refused(capsys, "rerank", saved, "--methods", "fast", "--val", tmp_path / "val.npy")
    assert "val.npy: expected images as rows" in said and "--transpose" in said


def test_a_bank_of_scores_has_nothing_to_do_with_a_validation_set_of_another_size(
    saved, tmp_path, capsys
):
    for name, shape in (("bank", (5, 12)), ("val", (4, 8))):
        np.save(tmp_path / f"{name}.npy", np.random.default_rng(0).normal(size=shape))
    options = ("--bank-images", tmp_path / "bank.npy", "--val", tmp_path / "val.npy")
    assert run("rerank", saved, "--methods", "fast", *options) == 0
    recalls = capsys.readouterr().out.partition("\n\n")[0]
    assert recalls.count("fast, calibrated") == 2


def test_damaged_data_of_the_chosen_array_are_named(tmp_path):
    np.savez_compressed(tmp_path / "s.npz", sims=np.random.default_rng(0).normal(size=(60, 120)))
    content = bytearray((tmp_path / "s.npz").read_bytes())
    content[len(content) // 2] ^= 255
    (tmp_path / "s.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"s\.npz: not a readable \.npz file"):
        files.read_matrix(tmp_path / "s.npz")


def test_errors_of_embeddings_name_the_files(tmp_path, capsys):
    for name, shape in (("v", (6, 4)), ("w", (12, 5)), ("u", (12, 4))):
        np.save(tmp_path / f"{name}.npy", np.ones(shape, "f4"))
    said = refused(capsys, "eval", tmp_path / "v.npy", tmp_path / "w.npy")
    assert (
        f"{tmp_path / 'w.npy'}: expected embeddings of dimension 4" in said and "cols" not in said
    )
    (tmp_path / "ids.txt").write_text("1\n2\n")
    ids = "--image-ids", tmp_path / "ids.txt", "--text-ids", tmp_path / "ids.txt"
    assert "--image-ids: expected shape (6,)" in refused(
        capsys, "eval", tmp_path / "v.npy", tmp_path / "u.npy", *ids
    )


def test_a_single_query_is_told_which_option_helps(tmp_path, capsys):
    np.save(tmp_path / "one.npy", np.arange(5, dtype="f4")[None])
    said = refused(capsys, "rerank", tmp_path / "one.npy")
    assert (
        "a single image is compared with no other" in said
        and "--bank-images" in said
        and "fit(" not in said
    )


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
        "        sys.exit(cli.main(['rerank', 's.npy', '--methods', 'fast', '--out', 'out.npz']))\n"
        "    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])\n"
        "    print('ended', ended - sent, *sorted(os.listdir()), flush=True)"
    )
    given = [
        sys.executable,
        "-c",
        code,
        *(str(int(sent)) for sent in (signal.SIGTERM, signal.SIGINT)),
    ]
    done = subprocess.run(given, cwd=tmp_path, capture_output=True, text=True)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert ended == ["ended 128 s.npy"] * 2 and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_the_package_is_a_command():
    done = subprocess.run(
        [sys.executable, "-m", "itrloss", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0 and "rerank" in done.stdout


def test_the_handler_of_a_signal_is_the_callers_again(saved, capsys):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert run("rerank", saved, "--methods", "fast") == 0 and run("rerank", saved.parent) == 2
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("name", ["image_ids-val.npy", "text_ids.npy", "image_ids/s.npy"])
def test_files_keep_their_names_in_messages(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert f"rerank: {name}: there is no such file" in refused(capsys, "rerank", name)


def test_no_text_is_made_of_what_a_pickle_has_for_the_order_of_bytes(tmp_path):
    # lists in lists, each twice the one in it, would fill the memory as a text
    order = b"X\x01\x00\x00\x00<"
    pickled = pickle.dumps(np.ones((2, 2)), protocol=2)
    assert pickled.count(order) == 1
    (tmp_path / "s.pkl").write_bytes(pickled.replace(order, b"]"))
    with pytest.raises(ValueError, match="expected str instance, list found"):
        files.read_matrix(tmp_path / "s.pkl")


def test_pickles_of_arrays_are_read_as_before(tmp_path):
    array = np.random.default_rng(0).normal(size=(6, 12))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "a.pkl").write_bytes(pickle.dumps({"npts": 6, "sims": array}, protocol))
        np.testing.assert_array_equal(files.read_matrix(tmp_path / "a.pkl").numpy(), array)
