"""The figures of the papers against independent computations from the same runs."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.drawn import TINY, features

from examples.retrieval import paper_figures
from examples.retrieval.data import Split, load_split
from examples.retrieval.evaluate import encode, recalls
from examples.retrieval.paper_figures import boxes_of, draw, heat, sub_embeddings
from examples.retrieval.paper_report import result_lines, write_report
from examples.retrieval.paper_runs import Grid, measured, run, scores_of, timed
from examples.retrieval.paper_tables import Row, Table
from examples.retrieval.preparation import load_model
from examples.retrieval.runs import load_run
from itrloss.metrics import retrieval_metrics
from itrloss.rerank import FastReranker

SIZES = [f"scenes_sizes.{split}={n}" for split, n in (("train", 40), ("dev", 12), ("test", 14))]


def grid_of(paper: str, out: Path, *numbers: str, split: str = "dev") -> Grid:
    """Finished runs of some tables of a paper."""
    grid = Grid(paper, None, [*TINY, *SIZES], out=out, only=numbers, split=split)
    run(grid)
    return grid


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return grid_of("coder", tmp_path_factory.mktemp("coder"), "figS1", "figS3", split="test")


@pytest.fixture(scope="module")
def dvse(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    return grid_of("dvse", tmp_path_factory.mktemp("dvse"), "fig6", "fig7")


def drawn(grid: Grid, number: str) -> list[dict[str, str]]:
    """Draw a figure; return the lines of its CSV file."""
    table = grid.source.tables[number]
    stem = grid.out / number
    file = draw(grid, table, {}, stem)
    pixels = np.asarray(Image.open(file))
    assert pixels[0, 0].tolist()[3] == 0  # no background, for light and dark pages
    assert (pixels[..., 3] == 255).any()
    with stem.with_suffix(".csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def directory(grid: Grid, row: Row) -> Path:
    return Path(grid.config(row, 0).out)


def test_similarities_are_divided_by_the_diversity_of_texts(coder):
    lines = drawn(coder, "figS1")
    model, words, _ = load_model(directory(coder, Row("")) / "best.pt")
    split = load_split(coder.out / "data", "test")
    images, texts = encode(model, split, words)
    images, texts = images[:8], texts[:40:5]
    scores = torch.nn.functional.normalize(texts) @ torch.nn.functional.normalize(images).T
    others = scores[~torch.eye(8, dtype=torch.bool)].view(8, 7)
    diversity = 1 + torch.exp(-0.1 / others.std(1, correction=0))
    divided = scores / (diversity / diversity.max())[:, None]
    for name, expected in (("S", scores), ("S / div", divided)):
        values = [float(line["value"]) for line in lines if line["matrix"] == name]
        assert values == pytest.approx(expected.flatten().tolist(), abs=1e-4)


def test_t_sne_has_all_images_and_texts_of_each_model(coder):
    lines = drawn(coder, "figS3")
    for model in coder.source.tables["figS3"].rows:
        own = [line for line in lines if line["model"] == model]
        images = [int(line["image"]) for line in own if line["kind"] == "image"]
        texts = [int(line["image"]) for line in own if line["kind"] == "text"]
        assert images == list(range(14))
        assert texts == [i for i in range(14) for _ in range(5)]
        assert np.std([float(line["x"]) for line in own]) > 0.1
    both = {(line["x"], line["y"]) for line in lines}
    assert len(both) == len(lines)


def test_correlations_are_those_of_the_models_sub_embeddings(dvse):
    lines = drawn(dvse, "fig6")
    split = load_split(dvse.out / "data", "dev")
    image = int(lines[0]["matrix"].rpartition(" ")[2])
    for name, row in dvse.source.tables["fig6"].rows.items():
        model, _, config = load_model(directory(dvse, row) / "best.pt")
        with torch.no_grad():
            sets = model.embed_images(split.regions(image)[None])[0]
        values = [
            float(line["value"]) for line in lines if line["matrix"] == f"{name}, image {image}"
        ]
        expected = torch.corrcoef(sets.double()).flatten()
        assert len(values) == config.heads**2
        assert values == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_grid_is_of_fast_re_ranking(dvse, monkeypatch):
    monkeypatch.setattr(paper_figures, "SCALES", (3, 20, 25))
    lines = drawn(dvse, "fig7")
    scores, split = scores_of(dvse.config(Row(""), 0), "dev")
    assert len(lines) == 18
    for line in lines:
        scales = float(line["γ1 or λ1"]), float(line["γ2 or λ2"])
        reranked = FastReranker(scales, scales).rerank(scores)
        expected = retrieval_metrics(reranked, split.image_ids, split.text_ids)
        name = {"i2t R@1": "i2t_r1", "t2i R@1": "t2i_r1"}[line["matrix"]]
        assert float(line["value"]) == pytest.approx(expected[name])


def test_regions_and_sub_embeddings_are_in_one_space(dvse):
    model, _, _ = load_model(directory(dvse, Row("")) / "best.pt")
    split = load_split(dvse.out / "data", "dev")
    sets, regions = sub_embeddings(model, split, 3)
    x = (split.regions(3) - model.image.mean) / model.image.std
    with torch.no_grad():
        expected = model.image.linear(x) + model.image.mlp(x)
    assert sets.shape == (6, regions.shape[1])
    torch.testing.assert_close(regions, expected)


def test_heat_is_the_sum_of_the_squared_ranks_of_a_pixels_regions():
    boxes = np.array([(0, 0, 1, 1), (0, 0, 0.5, 0.5), (0.5, 0.5, 1, 1), (0.5, 0, 1, 0.5)])
    # ranks 4, 1, 3, 2: attentions 0, 9, 1, 4
    pixels = heat(np.array([0.1, 0.9, 0.2, 0.3]), boxes, side=4)
    assert (9 * pixels).tolist() == [[9, 9, 4, 4]] * 2 + [[0, 0, 1, 1]] * 2


def test_boxes_are_those_of_the_regions(dvse, photos, tmp_path):
    data = dvse.out / "data"
    split = load_split(data, "dev")
    boxes = boxes_of(split, data, "dev", 12)
    # the regions' last five features are their boxes' centre, extent and area, standardised
    areas = (boxes[..., 2:] - boxes[..., :2]).prod(2)
    features = np.asarray(split.features[..., -1], np.float64)
    assert np.corrcoef(areas.ravel(), features.ravel())[0, 1] > 0.999
    raw = load_split(photos, "dev")
    grid = boxes_of(raw, photos, "dev", 4)
    assert grid.shape == (len(raw.features), 4, 4)
    assert grid[0].tolist() == [
        [0, 0, 0.5, 0.5],
        [0.5, 0, 1, 0.5],
        [0, 0.5, 0.5, 1],
        [0.5, 0.5, 1, 1],
    ]
    with pytest.raises(ValueError, match=r"dev_boxes\.npy: heat maps need the regions' boxes"):
        boxes_of(split, tmp_path, "dev", 12)
    np.save(tmp_path / "dev_boxes.npy", 100 * boxes)
    with pytest.raises(ValueError, match="as shares of the picture's width and height"):
        boxes_of(split, tmp_path, "dev", 12)


PRECOMPUTED = {"train": 40, "dev": 9, "testall": 10}


@pytest.fixture(scope="module")
def precomputed(tmp_path_factory: pytest.TempPathFactory) -> Grid:
    """Finished runs in VSE-infinity's directory, of more images of dev than choose the
    checkpoint.
    """
    root = tmp_path_factory.mktemp("precomputed")
    (root / "precomp").mkdir()
    features(root / "precomp", PRECOMPUTED)
    settings = [*TINY, f"data={root}", "dev_images=6", "test_split=testall", "test_folds=5"]
    grid = Grid("dvse", None, settings, out=root / "out", only=["fig10"])
    run(grid)
    return grid


@pytest.mark.parametrize(
    ("split", "file"), [("dev", "dev"), ("test", "testall"), ("test_folds", "testall")]
)
def test_heat_maps_find_the_boxes_of_the_splits_file(split, file, precomputed, monkeypatch):
    # test_paper.py draws some
    monkeypatch.setattr(paper_figures.Figure, "savefig", lambda *given, **options: None)
    grid = replace(precomputed, split=split)
    # the report is written without the figure, and says why
    reason = rf"Not drawn: .*precomp/{file}_boxes\.npy: heat maps need the regions' boxes"
    assert re.search(reason, write_report(grid))
    assert "Not drawn" in (grid.out / "report.md").read_text(encoding="utf-8")
    boxes = np.tile(np.float32([0, 0, 1, 1]), (PRECOMPUTED[file], 4, 1))
    stored = grid.out.parent / "precomp" / f"{file}_boxes.npy"
    np.save(stored, boxes)
    assert "Drawn: " in write_report(grid)
    stored.unlink()


def test_a_mean_of_rows_is_that_of_their_similarities(tmp_path):
    grid = grid_of("user", tmp_path, "III", split="test")
    table = grid.tables["III"]
    rows = measured(grid, table)
    each = []
    for name in table.rows["SGE*"].mean_of:
        scores, split = scores_of(grid.config(table.rows[name], 0), "test")
        each.append(scores)
        assert rows[name][0]["before"] == recalls(scores, split)
    expected = recalls((each[0] + each[1]) / 2, split)
    assert rows["SGE*"][0]["before"] == expected
    assert expected not in [recalls(scores, split) for scores in each]


def test_rows_are_measured_on_the_split(coder):
    config = coder.config(Row(""), 0)
    table = Table("", {"full": Row("")}, "table", "full")
    scores, split = scores_of(config, "test")
    assert scores.shape == (14, 70)
    on_test = measured(coder, table)["full"][0]
    assert on_test["before"] == recalls(scores, split)
    assert on_test["before"] != load_run(Path(config.out)).metrics["dev"]["before"]


def test_times_add_up(coder):
    both = timed(coder.config(Row(""), 0), "test")["before"]
    assert both["encode_seconds"] > both["match_seconds"] > 0
    assert both["seconds"] == pytest.approx(both["encode_seconds"] + both["match_seconds"])
    assert both["kpps"] == pytest.approx(14 * 70 / both["seconds"] / 1000)


def test_the_lines_of_a_table():
    rows = {"a": Row("first"), "b": Row("second"), "c": Row("third", cannot="another method")}
    table = Table("", rows, "table", "a", {"Flickr30K": {"a": {"rsum": 500.0, "seconds": 1.5}}})
    found = {"a": {s: {"before": {"rsum": 100.0 + s, "seconds": 0.0123}} for s in range(3)}}
    lines = result_lines(table, found, "test", {"c": "another method"})
    assert [[*line[:3], *line[-2:]] for line in lines] == [
        ["row", "", "", "RSUM", "seconds"],
        ["a", "first", "printed, Flickr30K", "500.0", "1.5"],
        ["a", "first", "ours, test, 3 seeds", "101.0 ± 1.0", "0.0123"],
        ["b", "second", "no runs", "", ""],
        ["c", "third", "not run: another method", "", ""],
    ]


def test_a_split_is_needed_for_its_pictures(photos):
    split: Split = load_split(photos, "dev")
    picture = paper_figures.picture_of(split, photos, "dev", 1)
    assert picture is not None and picture.mode == "RGB"
