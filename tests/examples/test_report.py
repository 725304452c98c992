"""The report page for artificial run directories."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from examples.retrieval.config import Config
from examples.retrieval.data import load_split
from examples.retrieval.evaluate import RECALLS, before_and_after
from examples.retrieval.report import best_value, main, write_report
from examples.retrieval.report_gallery import draw_queries
from examples.retrieval.runs import FILES, experiments, load_run
from itrloss.metrics import RetrievalResults, retrieval_results
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


def metrics_of(run: Path) -> dict[str, dict[str, float]]:
    return json.loads((run / "metrics.json").read_text())["dev"]


def rows_of(page: str) -> list[str]:
    """The body rows of the first table."""
    table = page[page.index("<tbody>") : page.index("</table>")]
    return table.split("</tr>")[:-1]


def between(page: str, start: str, end: str) -> str:
    return page[page.index(start) : page.index(end)]


# --- seeds ----------------------------------------------------------------------------------------


@pytest.fixture
def seeds(write_run: Callable[..., Path]) -> list[Path]:
    """Three seeds, of which the last one has fewer epochs."""
    qualities = (0.02, 0.05, 0.09)
    seeds = [write_run(f"hal_{s}", "hal", q, seed=s) for s, q in enumerate(qualities)]
    log = seeds[2] / "log.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    return seeds


def test_seeds_of_one_experiment_are_one_line_with_their_spread(scenes, runs, seeds):
    page = page_of([*runs, *seeds], scenes)
    assert "seeds 0, 1, 2, on" in page
    assert "Figures are of 1 seed and 3 seeds" in page
    rows = rows_of(page)
    assert len(rows) == 6
    for when, row in zip(("before", "after"), rows[4:], strict=True):
        values = [metrics_of(seed)[when]["rsum"] for seed in seeds]
        assert f">{np.mean(values):.1f}<" in row
        assert f"±\u00a0{np.std(values, ddof=1):.1f}<" in row


def test_curves_of_seeds_are_thin_beside_their_mean(scenes, seeds):
    curves = between(page_of(seeds, scenes), "Learning curves", "Hubness")
    assert curves.count("stroke-opacity: 0.6") == 3
    assert "thick ones their means" in curves


def test_experiments_are_named_after_their_directories(runs, seeds):
    found = experiments(map(load_run, [*runs, *seeds]))
    assert [experiment.name for experiment in found] == ["triplet", "dcl", "hal"]
    assert found[2].seconds == pytest.approx(1.5 * 8)


# --- table ----------------------------------------------------------------------------------------


def test_table_holds_the_figures_of_metrics_json(scenes, runs):
    page = page_of(runs, scenes)
    rows = iter(rows_of(page))
    for run in runs:
        metrics = metrics_of(run)
        for when in ("before", "after"):
            row = re.sub(r"<small>.*?</small>", "", next(rows))
            cells = re.findall(r"<td[^>]*>([^<]*)</td>", row)
            assert cells[:7] == [f"{metrics[when][name]:.1f}" for name in (*RECALLS, "rsum")]
        gain = metrics["after"]["rsum"] - metrics["before"]["rsum"]
        assert f"{gain:+.1f}".replace("-", "−") in page
    assert "queries of the dev split" in page


def test_the_best_of_each_column_is_marked(scenes, runs):
    page = page_of(runs, scenes)
    for when in ("before", "after"):
        low, high = sorted(metrics_of(run)[when]["rsum"] for run in runs)
        assert low < high
        assert f'<td class="strong">{high:.1f}' in page
        assert f'<td class="strong">{low:.1f}<' not in page


def test_the_best_value_depends_on_the_column():
    assert best_value("i2t_r1", [1.0, 3.0]) == 3.0
    assert best_value("t2i_median_rank", [1.0, 3.0]) == 1.0
    assert best_value("t2i_skewness", [-2.0, 1.0, 3.0]) == 1.0


def test_the_test_split_is_reported_where_all_runs_have_it(scenes, runs, write_run):
    tested = [write_run(f"{loss}2", loss, 0.1, "test") for loss in ("hal", "infonce")]
    assert "queries of the test split" in page_of(tested, scenes)
    assert "queries of the dev split" in page_of([*tested, *runs], scenes)


# --- page -----------------------------------------------------------------------------------------


class Checker(HTMLParser):
    """Parser that checks that elements are closed in order, and collects the page's references."""

    VOID = ("meta", "img", "path", "rect", "use")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        links = ("src", "href", "srcset", "action")
        self.links += [value for name, value in attrs if name in links and value]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in self.VOID

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("pictures", [False, True])
def test_page_is_well_formed_and_self_contained(scenes, runs, pictures):
    if pictures:
        (scenes / "pictures").mkdir()
        for i in range(IMAGES):
            picture = Image.new("RGB", (96, 96), (40 * i, 90, 120))
            picture.save(scenes / "pictures" / f"dev_{i:05d}.png")
    page = page_of(runs, scenes)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert all(link.startswith("data:image/jpeg;base64,") for link in checker.links)
    assert bool(checker.links) == pictures
    assert all(link.startswith("#") for link in re.findall(r"url\(([^)]*)\)", page))
    for word in ("@import", "<script", "http"):
        assert word not in page
    assert len(page) < 1_000_000


# --- gallery --------------------------------------------------------------------------------------


def test_right_captions_are_marked_and_no_others(scenes, runs):
    cards = between(page_of(runs, scenes), "Pictures asking", "Captions asking")
    for card in cards.split("<article")[1:]:
        image = int(re.search(r"picture (\d+), captioned", card).group(1))
        answers = re.findall(r'<li( class="right")?>caption (\d+) [^<]*(<span[^>]*>✓)?', card)
        assert len(answers) in (5, 10)
        for edge, caption, check in answers:
            assert bool(edge) == bool(check) == (int(caption) // 5 == image)


def test_right_pictures_are_marked_and_no_others(scenes, runs):
    cards = between(page_of(runs, scenes), "Captions asking", "How to read this")
    for card in cards.split("<article")[1:]:
        caption = int(re.search(r"“caption (\d+) ", card).group(1))
        answers = re.findall(r'<li( class="right")?>picture (\d+)', card)
        assert len(answers) in (5, 10)
        for edge, image in answers:
            assert bool(edge) == (int(image) == caption // 5)


def test_queries_are_drawn_from_their_groups_and_the_same_every_time():
    ids = torch.arange(CAPTIONS) // 5
    scores = torch.rand(IMAGES, CAPTIONS, generator=torch.Generator().manual_seed(1))

    def results(by: FastReranker | None) -> RetrievalResults:
        return retrieval_results(scores, torch.arange(IMAGES), ids, reranker=by)

    before, after = results(None).t2i, results(FastReranker()).t2i
    picks = draw_queries(before, after)
    assert picks == draw_queries(before, after)
    assert len({pick.query for pick in picks}) == len(picks) >= 4
    at_once = ((before.best == 1) & (after.best == 1)).sum()
    for pick in picks:
        assert pick.ranks == (before.best[pick.query], after.best[pick.query])
        if pick.group == "Right at once":
            assert pick.ranks == (1, 1)
            assert pick.group_size == at_once


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
