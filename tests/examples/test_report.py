"""The report page for artificial run directories."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.command_line import read_page
from support.stored import assert_stored

from examples.retrieval import report
from examples.retrieval.config import Config
from examples.retrieval.data import Split, Tokenizer, load_split
from examples.retrieval.evaluate import before_and_after
from examples.retrieval.models import VSE
from examples.retrieval.report import best_value, main, write_report
from examples.retrieval.runs import FILES
from examples.retrieval.train import train
from itrloss.rerank import FastReranker

IMAGES, CAPTIONS = 6, 30


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    for split in ("train", "dev", "test"):
        np.save(root / f"{split}_ims.npy", np.zeros((IMAGES, 2, 3), np.float32))
        lines = [f"caption {i} says 1 < 2 & so on" for i in range(CAPTIONS)]
        (root / f"{split}_caps.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture
def write_run(tmp_path: Path, scenes: Path) -> Callable[..., Path]:
    def write(name: str, loss: str, quality: float, split: str = "dev", seed: int = 0) -> Path:
        """Write a run whose scores are noise plus `quality` on the right pairs, with its actual
        figures.
        """
        out = tmp_path / "runs" / name
        out.mkdir(parents=True)
        config = asdict(Config(loss=loss, epochs=3, out=str(out), seed=seed))
        (out / "config.json").write_text(json.dumps(config))
        dev = load_split(scenes, "dev")
        right = dev.image_ids[:, None] == dev.text_ids
        noise = torch.rand(IMAGES, CAPTIONS, generator=torch.Generator().manual_seed(len(loss)))
        scores = (0.2 * noise + quality * right).float()
        np.save(out / "dev_scores.npy", scores.numpy())
        figures = before_and_after(scores, dev, FastReranker())
        (out / "metrics.json").write_text(json.dumps({"dev": figures, split: figures}))
        lines = [json.dumps({"epoch": e, "seconds": 1.5, "rsum": 100.0 * e}) for e in (1, 2, 3)]
        (out / "log.jsonl").write_text("\n".join(lines) + "\n")
        return out

    return write


@pytest.fixture
def runs(write_run: Callable[..., Path]) -> list[Path]:
    return [write_run("triplet", "triplet", 0.05), write_run("dcl", "dcl", 0.12)]


def page_of(runs: list[Path], data: Path) -> str:
    out = data.parent / "page" / "report.html"
    write_report(runs, data, out)
    return out.read_text(encoding="utf-8")


def words_of(page: str) -> str:
    """The text of a page, in which the best figures of columns have a star."""
    body = re.sub(r"<svg.*?</svg>", "", page[page.index("<body>") :], flags=re.S)
    body = re.sub(r"<[^>]*>", " ", body.replace('<td class="strong">', " *"))
    lines = (" ".join(line.split()) for line in body.splitlines())
    return "\n".join(filter(None, lines)) + "\n"


@pytest.fixture
def seeds(write_run: Callable[..., Path]) -> list[Path]:
    """Three seeds, of which the last one has fewer epochs."""
    qualities = (0.02, 0.05, 0.09)
    seeds = [write_run(f"hal_{s}", "hal", q, seed=s) for s, q in enumerate(qualities)]
    log = seeds[2] / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    return seeds


def test_a_page_is_that_which_was_read(scenes, runs, seeds):
    page = page_of([*runs, *seeds], scenes)
    assert_stored("report", words_of(page))
    curves = page[page.index("Learning curves") : page.index("Hubness")]
    assert curves.count("stroke-opacity: 0.6") == 3  # of seeds, beside their mean


@pytest.mark.parametrize(
    ("column", "best"), [("i2t_r1", 3.0), ("t2i_median_rank", -2.0), ("t2i_skewness", 1.0)]
)
def test_the_best_value_depends_on_the_column(column, best):
    assert best_value(column, [-2.0, 1.0, 3.0]) == best


def test_the_test_split_is_reported_where_all_runs_have_it(scenes, runs, write_run):
    tested = [write_run(f"{loss}2", loss, 0.1, "test") for loss in ("hal", "infonce")]
    assert "queries of the test split" in page_of(tested, scenes)
    assert "queries of the dev split" in page_of([*tested, *runs], scenes)


def test_runs_of_other_test_splits_are_experiments_of_their_own(scenes, write_run):
    runs = [write_run(f"hal_{seed}", "hal", 0.1, "test", seed) for seed in range(2)]
    config = json.loads((runs[1] / "config.json").read_text())
    (runs[1] / "config.json").write_text(json.dumps({**config, "test_split": "testall"}))
    for file in scenes.glob("test_*"):
        shutil.copy(file, scenes / file.name.replace("test", "testall"))
    page = words_of(page_of(runs, scenes))
    assert "differ in seed and test_split" in page
    assert "test 6 pictures, 30 captions; testall 6 pictures, 30 captions" in page


def test_pictures_are_encoded_at_the_size_of_the_run(config, photos, resnet, tmp_path, monkeypatch):
    config = replace(config, data=str(photos), backbone=resnet, batch_size=8)
    train(config)
    sizes = []

    def points(model: VSE, words: Tokenizer, split: Split) -> dict[str, np.ndarray]:
        sizes.append(split.regions(0).shape[1:])
        return {"text": np.zeros((1, 2)), "image": np.zeros((1, 2))}

    monkeypatch.setattr(report, "in_two_dimensions", points)
    write_report([Path(config.out)], photos, tmp_path / "report.html")
    assert sizes == [(config.image_size, config.image_size)]


# --- page -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("pictures", [False, True])
def test_page_is_well_formed_and_self_contained(scenes, runs, pictures):
    if pictures:
        (scenes / "pictures").mkdir()
        for i in range(IMAGES):
            picture = Image.new("RGB", (96, 96), (40 * i, 90, 120))
            picture.save(scenes / "pictures" / f"dev_{i:05d}.png")
    page = page_of(runs, scenes)
    read_page(page)
    assert ("data:image/jpeg" in page) == pictures
    assert all(link.startswith("#") for link in re.findall(r"url\(([^)]*)\)", page))
    for word in ("@import", "<script", "http"):
        assert word not in page
    assert len(page) < 1_000_000


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", FILES)
def test_a_missing_run_file_is_named(scenes, runs, missing):
    (runs[1] / missing).unlink()
    with pytest.raises(ValueError, match=f"dcl: no finished run, {re.escape(missing)} is missing"):
        page_of(runs, scenes)


def test_missing_or_other_data_are_named(scenes, runs):
    with pytest.raises(ValueError, match="at least one run"):
        page_of([], scenes)
    np.save(runs[1] / "dev_scores.npy", np.zeros((3, 15), np.float32))
    with pytest.raises(ValueError, match=r"dev_scores.npy is \(3, 15\)"):
        page_of(runs, scenes)
    (scenes / "dev_caps.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"dev_caps\.txt"):
        page_of(runs, scenes)


def test_the_command_writes_the_page(tmp_path, scenes, runs, capsys):
    command = ["--data", str(scenes), "--out", str(tmp_path / "r.html")]
    main([*command, *map(str, runs)])
    assert "<h1>" in (tmp_path / "r.html").read_text()
    with pytest.raises(SystemExit):
        main([*command, str(tmp_path / "nothing")])
    assert "config.json is missing" in capsys.readouterr().err
