"""The report page for artificial run directories, and the demo's decisions about what to train."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from examples.retrieval import demo
from examples.retrieval.config import Config
from examples.retrieval.data import load_split
from examples.retrieval.evaluate import before_and_after
from examples.retrieval.report import best_value, load_run, main, merge_seeds, write_report
from examples.retrieval.report_gallery import draw_queries
from itrloss.metrics import RetrievalResults, retrieval_results
from itrloss.report.comparison import hubness
from itrloss.rerank import FastReranker

IMAGES, CAPTIONS = 6, 30


def write_data(
    root: Path, pictures: bool = False, splits: tuple[str, ...] = ("dev", "test")
) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for split in splits:
        np.save(root / f"{split}_ims.npy", np.zeros((IMAGES, 2, 3), np.float32))
        lines = [f"caption {i} says 1 < 2 & so on" for i in range(CAPTIONS)]
        (root / f"{split}_caps.txt").write_text("\n".join(lines) + "\n")
    if pictures:
        (root / "pictures").mkdir()
        for i in range(IMAGES):
            Image.new("RGB", (96, 96), (40 * i, 90, 120)).save(
                root / "pictures" / f"dev_{i:05d}.png"
            )
    return root


def write_run(
    out: Path, data: Path, loss: str, quality: float, splits: tuple[str, ...] = ("dev",)
) -> Path:
    """Write a run whose scores are noise plus `quality` on the right pairs, with its actual
    figures.
    """
    out.mkdir(parents=True)
    config = asdict(Config(loss=loss, epochs=3, out=str(out)))
    (out / "config.json").write_text(json.dumps(config))
    split = load_split(data, "dev")
    right = split.image_ids[:, None] == split.text_ids
    noise = torch.rand(IMAGES, CAPTIONS, generator=torch.Generator().manual_seed(len(loss)))
    scores = (0.2 * noise + quality * right).float()
    np.save(out / "dev_scores.npy", scores.numpy())
    metrics = {name: before_and_after(scores, split, FastReranker()) for name in splits}
    (out / "metrics.json").write_text(json.dumps(metrics))
    lines = [
        {"epoch": e, "step": e, "loss": 3.0 / e, "lr": 1e-3, "seconds": 1.5, "rsum": 100.0 * e}
        for e in (1, 2, 3)
    ]
    (out / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


@pytest.fixture
def data(tmp_path) -> Path:
    return write_data(tmp_path / "data")


@pytest.fixture
def runs(tmp_path, data) -> dict[str, Path]:
    return {
        "triplet": write_run(tmp_path / "runs" / "triplet", data, "triplet", 0.05),
        "dcl": write_run(tmp_path / "runs" / "dcl", data, "dcl", 0.12),
    }


def page_of(runs: dict[str, Path], data: Path) -> str:
    out = data.parent / "page" / "report.html"
    write_report(runs, data, out)
    return out.read_text(encoding="utf-8")


class Checker(HTMLParser):
    """Parser that checks that elements are closed in order, and collects the page's references."""

    VOID = ("meta", "img", "path", "rect", "use")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.links += [
            value for name, value in attrs if name in ("src", "href", "srcset", "action") and value
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in self.VOID

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def rows_of(page: str) -> list[list[str]]:
    """Cells of the table's body rows, without the small figures of the change."""
    table = page[page.index("<tbody>") : page.index("</table>")]
    table = re.sub(r"<small>.*?</small>", "", table)
    return [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in table.split("</tr>")][:-1]


def test_seeds_of_one_experiment_are_one_line_with_their_spread(tmp_path, data, runs):
    for seed, quality in enumerate((0.02, 0.05, 0.09)):
        out = write_run(tmp_path / "runs" / f"hal_{seed}", data, "hal", quality)
        config = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(config | {"seed": seed}))
        runs[f"hal_{seed}"] = out
    lines = [json.loads(line) for line in (runs["hal_2"] / "log.jsonl").read_text().splitlines()]
    (runs["hal_2"] / "log.jsonl").write_text(
        "".join(json.dumps(x | {"rsum": 7.0}) + "\n" for x in lines[:2])
    )
    page = page_of(runs, data)
    assert "seed 0 / 0, 1, 2," in page and "means over 1 seed and 3 seeds" in page
    measured = [
        json.loads((runs[f"hal_{s}"] / "metrics.json").read_text())["dev"] for s in range(3)
    ]
    assert len(rows_of(page)) == 6
    table = page[page.index("<tbody>") : page.index("</table>")]
    for when, row in zip(("before", "after"), table.split("</tr>")[4:], strict=False):
        values = [m[when]["rsum"] for m in measured]
        assert f">{np.mean(values):.1f}<" in row and f"±\u00a0{np.std(values, ddof=1):.1f}<" in row
    merged = merge_seeds([load_run(name, directory) for name, directory in runs.items()])
    assert [run.title for run in merged] == ["Triplet", "DCL", "HAL"]
    assert [line["rsum"] for line in merged[2].history] == pytest.approx(
        [(100 + 100 + 7) / 3, (200 + 200 + 7) / 3]
    )
    assert merged[2].seconds == pytest.approx(1.5 * 8)
    curves = page[page.index("Learning curves") : page.index("Training loss")]
    assert curves.count("stroke-opacity: 0.6") == 3  # thin lines


def test_table_holds_the_figures_of_metrics_json(runs, data):
    page = page_of(runs, data)
    rows = rows_of(page)
    assert len(rows) == 4
    for (before, after), directory in zip((rows[:2], rows[2:]), runs.values(), strict=True):
        metrics = json.loads((directory / "metrics.json").read_text())["dev"]
        for cells, when in ((before, "before"), (after, "after")):
            wanted = [metrics[when][f"{way}_r{k}"] for way in ("i2t", "t2i") for k in (1, 5, 10)]
            wanted.append(metrics[when]["rsum"])
            assert cells[:7] == [f"{value:.1f}" for value in wanted]
        gain = metrics["after"]["rsum"] - metrics["before"]["rsum"]
        assert f"{gain:+.1f}".replace("-", "−") in page
    assert "queries of the dev split" in page


def test_the_best_of_each_column_is_marked(runs, data):
    page = page_of(runs, data)
    rsums = {
        when: {
            n: json.loads((d / "metrics.json").read_text())["dev"][when]["rsum"]
            for n, d in runs.items()
        }
        for when in ("before", "after")
    }
    for values in rsums.values():
        low, high = sorted(values.values())
        assert low < high
        assert f'<td class="strong">{high:.1f}' in page
        assert f'<td class="strong">{low:.1f}<' not in page
    assert best_value("i2t_r1", [1.0, 3.0]) == 3.0
    assert best_value("t2i_median_rank", [1.0, 3.0]) == 1.0
    assert best_value("t2i_skewness", [-2.0, 1.0, 3.0]) == 1.0


def test_the_test_split_is_reported_where_all_runs_have_it(tmp_path, data, runs):
    both = ("dev", "test")
    runs = {
        f"{loss}2": write_run(tmp_path / f"{loss}2", data, loss, 0.1, both)
        for loss in ("hal", "infonce")
    } | runs
    assert "queries of the dev split" in page_of(runs, data)
    assert "queries of the test split" in page_of(
        {name: runs[name] for name in ("hal2", "infonce2")}, data
    )


@pytest.mark.parametrize("pictures", [False, True])
def test_page_is_well_formed_and_self_contained(tmp_path, pictures):
    data = write_data(tmp_path / "data", pictures)
    page = page_of({"hal": write_run(tmp_path / "hal", data, "hal", 0.08)}, data)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert all(link.startswith("data:image/jpeg;base64,") for link in checker.links)
    assert bool(checker.links) == pictures
    assert all(link.startswith("#") for link in re.findall(r"url\(([^)]*)\)", page))
    assert "@import" not in page and "<script" not in page and "http" not in page
    assert len(page) < 1_000_000


def test_text_is_escaped(tmp_path, data):
    name = "<b>&\"'"
    page = page_of({name: write_run(tmp_path / "odd", data, "dcl", 0.1)}, data)
    assert "1 &lt; 2 &amp; so on" in page and "1 < 2" not in page
    assert "<b>" not in page and "&lt;b&gt;&amp;&#34;&#39;" in page


def test_right_answers_are_marked_and_no_others(runs, data):
    page = page_of(runs, data)
    for card in page[page.index("Pictures asking") : page.index("Captions asking")].split(
        "<article"
    )[1:]:
        image = int(re.search(r"picture (\d+), captioned", card).group(1))
        answers = re.findall(r'<li( class="right")?>caption (\d+) [^<]*(<span[^>]*>✓)?', card)
        assert len(answers) in (5, 10)
        for edge, caption, check in answers:
            assert bool(edge) == bool(check) == (int(caption) // 5 == image)
    for card in page[page.index("Captions asking") : page.index("How to read this")].split(
        "<article"
    )[1:]:
        caption = int(re.search(r"“caption (\d+) ", card).group(1))
        for edge, image in re.findall(r'<li( class="right")?>picture (\d+)', card):
            assert bool(edge) == (int(image) == caption // 5)


def results_of(data: Path, seed: int) -> list[RetrievalResults]:
    split = load_split(data, "dev")
    scores = torch.rand(IMAGES, CAPTIONS, generator=torch.Generator().manual_seed(seed))
    return [
        retrieval_results(scores, split.image_ids, split.text_ids, reranker=by)
        for by in (None, FastReranker())
    ]


def test_the_figure_of_hubness_tells_what_the_metrics_do(data):
    before, after = results_of(data, 5)
    chart, caption = hubness(before.i2t, after.i2t, ("cosine", "re-ranked"), "picture", "caption")
    counts = [np.bincount(x.i2t.top.flatten(), minlength=CAPTIONS) for x in (before, after)]
    skews = " → ".join(
        f"{x.metrics()['i2t_skewness']:.2f}".replace("-", "−") for x in (before, after)
    )
    assert f"Captions, retrieved by {IMAGES} pictures. Skewness {skews}. " in caption
    assert f"in {counts[0].max()} → {counts[1].max()} lists; " in caption
    assert (
        f"{(counts[0] == 0).sum()} → {(counts[1] == 0).sum()} of {CAPTIONS} are in none" in caption
    )
    assert all(
        f">{text}<" in chart for text in ("cosine", "re-ranked", f"mean {counts[0].mean():.1f}")
    )


def test_queries_are_drawn_from_their_groups_and_the_same_every_time(data):
    before, after = (x.t2i for x in results_of(data, 1))
    picks = draw_queries(before, after)
    assert picks == draw_queries(before, after)
    assert len({pick.query for pick in picks}) == len(picks) >= 4
    for pick in picks:
        assert pick.ranks == (before.best[pick.query], after.best[pick.query])
        if pick.group == "Right at once":
            assert (
                pick.ranks == (1, 1)
                and pick.group_size == ((before.best == 1) & (after.best == 1)).sum()
            )


@pytest.mark.parametrize("missing", ["config.json", "metrics.json", "log.jsonl", "dev_scores.npy"])
def test_a_missing_run_file_is_named(runs, data, missing):
    (runs["dcl"] / missing).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(str(runs["dcl"] / missing))):
        page_of(runs, data)


def test_missing_or_other_data_are_named(tmp_path, runs, data):
    with pytest.raises(ValueError, match="at least one run"):
        write_report({}, data, tmp_path / "r.html")
    np.save(runs["dcl"] / "dev_scores.npy", np.zeros((3, 15), np.float32))
    with pytest.raises(ValueError, match=r"dev_scores.npy is \(3, 15\)"):
        page_of(runs, data)
    (data / "dev_caps.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"dev_caps\.txt"):
        page_of(runs, data)


def test_command_line(tmp_path, runs, data, capsys):
    main(["--data", str(data), "--out", str(tmp_path / "r.html"), *map(str, runs.values())])
    assert "<h1>" in (tmp_path / "r.html").read_text()
    with pytest.raises(SystemExit):
        main(["--data", str(data), "--out", str(tmp_path / "r.html"), str(tmp_path / "nothing")])
    assert "config.json is missing" in capsys.readouterr().err


# --- the demo -------------------------------------------------------------------------------------


def test_demo_arguments(monkeypatch):
    calls = []
    monkeypatch.setattr(demo, "run_demo", lambda out, quick: calls.append((out, quick)))
    demo.main([])
    demo.main(["--out", "elsewhere", "--quick"])
    assert calls == [(Path("demo"), False), (Path("elsewhere"), True)]
    with pytest.raises(SystemExit):
        demo.main(["--fast"])


def test_demo_runs_differ_in_the_loss_only(tmp_path):
    configs = [asdict(demo.demo_config(loss, tmp_path)) for loss in demo.LOSSES]
    assert [config["loss"] for config in configs] == ["triplet", "infonce", "hal", "dcl"]
    for config in configs:
        differing = {key for key in config if config[key] != configs[0][key]}
        assert differing <= {"loss", "loss_options", "warmup_epochs", "out"}
    assert asdict(demo.demo_config("dcl", tmp_path, quick=True))["epochs"] < configs[0]["epochs"]


def test_a_finished_run_is_reused_and_another_one_is_not(tmp_path):
    config = demo.demo_config("dcl", tmp_path)
    out = Path(config.out)
    assert not demo.is_finished(config)
    demo.clear_other_run(config)  # there is no run yet
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps({**asdict(config), "resume": True}))
    (out / "last.pt").touch()
    demo.clear_other_run(config)
    assert not demo.is_finished(config) and (out / "last.pt").exists()  # interrupted: resumes there
    (out / "metrics.json").touch()
    demo.clear_other_run(config)
    assert demo.is_finished(config)
    other = demo.demo_config("dcl", tmp_path, quick=True)
    demo.clear_other_run(other)
    assert not demo.is_finished(other)
    # otherwise it could be taken for this run's
    assert [file.name for file in out.iterdir()] == ["config.json"]


@pytest.mark.slow
def test_quick_demo_runs_to_the_end(tmp_path, capsys, monkeypatch):
    titles = ("Triplet", "InfoNCE", "HAL", "DCL")
    demo.main(["--out", str(tmp_path), "--quick"])
    first = capsys.readouterr().out
    assert (
        all(f"{title}: RSUM" in first for title in titles)
        and str(tmp_path / "report.html") in first
    )
    page = (tmp_path / "report.html").read_text()
    assert all(title in page for title in titles) and "data:image/jpeg" in page
    reported: list[tuple] = []
    # it takes two seconds
    monkeypatch.setattr(demo, "write_report", lambda *arguments: reported.append(arguments))
    demo.main(["--out", str(tmp_path), "--quick"])
    assert capsys.readouterr().out.count("trained already") == 4
    assert [[*runs] for runs, *_ in reported] == [list(demo.LOSSES)]
