"""MSCOCO as the papers report it: images of dev, "5K", and "1K" in five folds, on fake files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import drawn

from examples.retrieval.config import Config, load_config
from examples.retrieval.data import load_split
from examples.retrieval.evaluate import encode
from examples.retrieval.export import main as export
from examples.retrieval.pictures import Images
from examples.retrieval.preparation import load_model
from examples.retrieval.report import write_report
from examples.retrieval.summary import main as summary
from examples.retrieval.train import Trainer, train

SIZES = {"train": 60, "dev": 20, "test": 5, "testall": 25}
SYSTEMS = {
    "user": {"loss": "uto", "enhancement": "sge"},
    "coder": {"loss": "coder", "loss_options": {"clusters": 5}},
    "dvse": {"loss": "dvse", "captions_per_image": 5},
}


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drawn.features(tmp_path_factory.mktemp("coco"), SIZES)


@pytest.fixture
def settings(config: Config, coco: Path) -> Config:
    return replace(
        config,
        data=str(coco),
        dev_images=8,
        final_test=True,
        test_split="testall",
        test_folds=5,
        rerank=[9.0, 4.0, 3.0, 17.0],
    )


def similarities(config: Config) -> np.ndarray:
    """Similarities of testall by best.pt, in loops: the largest cosine of an image's set."""
    model, words, _ = load_model(Path(config.out, "best.pt"))
    images, texts = encode(model, load_split(config.data, "testall"), words)
    images, texts = images.double().numpy(), texts.double().numpy()
    sets = images if images.ndim == 3 else images[:, None]
    scores = np.empty((len(sets), len(texts)))
    for i, heads in enumerate(sets):
        for j, text in enumerate(texts):
            cosines = [h @ text / np.linalg.norm(h) / np.linalg.norm(text) for h in heads]
            scores[i, j] = max(cosines)
    return scores


def reranked(scores: np.ndarray, gamma_1: float, gamma_2: float) -> np.ndarray:
    """DVSE's Eq. 14 on the columns."""
    return np.exp(gamma_2 * scores) / np.exp(gamma_1 * scores).sum(0)


def recalls(image_to_text: np.ndarray, text_to_image: np.ndarray) -> dict[str, float]:
    """R@K of images whose texts are five in a row, by counting what scores higher."""
    n, m = image_to_text.shape
    hits = {f"{way}_r{k}": 0.0 for way in ("i2t", "t2i") for k in (1, 5, 10)}
    for k in (1, 5, 10):
        for i in range(n):
            first = np.argsort(-image_to_text[i])[:k]
            hits[f"i2t_r{k}"] += 100 / n * any(j // 5 == i for j in first)
        for j in range(m):
            first = np.argsort(-text_to_image[:, j])[:k]
            hits[f"t2i_r{k}"] += 100 / m * (j // 5 in first)
    return {**hits, "rsum": sum(hits.values())}


def both(scores: np.ndarray) -> dict[str, dict[str, float]]:
    after = reranked(scores, 9.0, 4.0), reranked(scores.T, 3.0, 17.0).T
    return {"before": recalls(scores, scores), "after": recalls(*after)}


@pytest.mark.parametrize("system", ["user", pytest.param("coder", marks=pytest.mark.slow), "dvse"])
def test_5k_and_1k_in_five_folds(settings, system, tmp_path, capsys):
    config = replace(settings, **SYSTEMS[system])
    trainer = Trainer(config)
    assert len(trainer.dev.features) == 8
    assert len(trainer.dev.captions) == 40
    trainer.run()
    metrics = json.loads(Path(config.out, "metrics.json").read_text())
    assert list(metrics) == ["dev", "test", "test_folds"]

    scores = similarities(config)
    parts = [both(scores[5 * f : 5 * f + 5, 25 * f : 25 * f + 25]) for f in range(5)]
    for when, whole in both(scores).items():
        for name, value in whole.items():
            mean = np.mean([part[when][name] for part in parts])
            assert metrics["test"][when][name] == pytest.approx(value)
            assert metrics["test_folds"][when][name] == pytest.approx(mean)

    export([config.out, "--splits", "testall", "--out", str(tmp_path / "out")])
    capsys.readouterr()
    if system == "dvse":
        exported = np.load(tmp_path / "out" / "testall_scores.npy")
    else:
        images, texts = (
            np.load(tmp_path / "out" / f"testall_{x}.npy") for x in ("images", "texts")
        )
        exported = images @ texts.T
    np.testing.assert_allclose(exported, scores, atol=1e-5)
    summary([config.out, "--split", "test_folds"])
    assert f"{metrics['test_folds']['after']['rsum']:.1f}" in capsys.readouterr().out
    write_report([Path(config.out)], Path(config.data), tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "testall 25 pictures" in page
    whole, parts = page.split("Means over 5 equal parts of the test split", 1)
    assert f"{metrics['test']['after']['rsum']:.1f}" in whole
    assert f"{metrics['test_folds']['after']['rsum']:.1f}" in parts
    assert ("embeddings: 8 pictures of dev" in page) == (system != "dvse")


def test_folds_that_do_not_divide_the_images_are_refused_before_training(settings):
    with pytest.raises(ValueError, match=r"test_folds = 4: must divide the 25 images of testall"):
        Trainer(replace(settings, test_folds=4))
    with pytest.raises(ValueError, match=r"test_split = 'val': must be 'test' or 'testall'"):
        load_config(None, ["test_split=val"])


def test_karpathys_test_has_all_test_images_under_both_names(photos):
    test, testall = (load_split(photos, name, image_size=8) for name in ("test", "testall"))
    assert isinstance(test.features, Images) and isinstance(testall.features, Images)
    assert test.features.paths == testall.features.paths
    first = test.first(2)
    assert isinstance(first.features, Images)
    assert first.features.paths == test.features.paths[:2]
    assert first.captions == test.captions[:10]


def test_the_scenes_are_scored_in_folds_too(config):
    sizes = {"train": 20, "dev": 4, "test": 10}
    config = replace(config, data="scenes", scenes_sizes=sizes, final_test=True, test_folds=5)
    metrics = train(config)["metrics"]
    assert metrics["test_folds"]["before"]["i2t_r10"] >= metrics["test"]["before"]["i2t_r10"]
