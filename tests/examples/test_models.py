"""The models of the papers' systems: their equations, their parameters, and what is stored."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.drawn import take_steps
from torch.nn.functional import cosine_similarity

from examples.retrieval.concepts import Concepts, normalized_graph
from examples.retrieval.config import Config
from examples.retrieval.data import pad
from examples.retrieval.evaluate import model_scores
from examples.retrieval.export import export, main
from examples.retrieval.models import VSE, ConceptBranch, build_model
from examples.retrieval.preparation import load_model
from examples.retrieval.train import Trainer, train

CODER = {"loss": "coder", "loss_options": {"clusters": 5}}
SYSTEMS = {
    "vse": {"loss": "triplet"},
    "mdcl": {"loss": "mdcl"},
    "whole": {"loss": "infonce", "views": "whole"},
    "two views": {"loss": "infonce", "views": "regions+whole"},
    "coder, two views": {**CODER, "views": "regions+whole"},
    "dvse and the whole": {"loss": "dvse", "views": "regions+whole"},
    "user sge": {"loss": "uto", "enhancement": "sge"},
    "user cge": {"loss": "uto", "enhancement": "cge"},
    "coder": CODER,
    "dvse": {"loss": "dvse"},
}
REGIONS = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
CAPTIONS = pad([[3, 4], [5], [6, 7, 8], [9, 2]])


def model_of(config: Config, **settings) -> VSE:
    torch.manual_seed(0)
    model = build_model(replace(config, **settings), 8, 30, 7)
    return model.eval().requires_grad_(False)


def cosines(images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    return cosine_similarity(images[:, None], texts[None], dim=2)


# --- equations ------------------------------------------------------------------------------------


def test_concept_branch_is_that_of_the_equations():
    torch.manual_seed(0)
    branch = ConceptBranch(6, 4, 5).double().requires_grad_(False)
    branch.graph.copy_(normalized_graph((torch.rand(4, 4) > 0.5).double()))
    answers = []
    for row in branch.graph:
        mixed = sum(share * vector for share, vector in zip(row, branch.vectors, strict=True))
        y = torch.tanh(branch.convolution.weight @ mixed)
        answers.append(y / y.norm())
    queries = torch.randn(3, 6, dtype=torch.float64)
    for query, found in zip(queries, branch("text", queries), strict=True):
        asked = branch.queries["text"].weight @ query  # type: ignore[union-attr]
        powers = [math.exp(10 * float(asked @ y) / float(asked.norm())) for y in answers]
        wanted = sum(p / sum(powers) * y for p, y in zip(powers, answers, strict=True))
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("share", [0.1, 0.0])
def test_similarity_of_coder_is_the_weighted_sum_of_both_cosines(config, share):
    model = model_of(config, loss="coder", concept_share=share)
    images, texts, image_concepts, text_concepts = model(REGIONS, *CAPTIONS)
    wanted = (1 - share) * cosines(images, texts) + share * cosines(image_concepts, text_concepts)
    found = model.similarity(model.embed_images(REGIONS), model.embed_texts(*CAPTIONS))
    torch.testing.assert_close(found, wanted)


def test_similarity_of_dvse_is_that_of_the_best_head(config):
    model = model_of(config, loss="dvse", heads=3)
    sets, texts, residuals, gate = model(REGIONS, *CAPTIONS)
    assert sets.shape == residuals.shape == (3, 3, 16)
    assert texts.shape == (4, 16)
    assert gate.shape == (3, 3)
    heads = [cosines(images, texts) for images in sets.unbind(1)]
    found = model.similarity(model.embed_images(REGIONS), model.embed_texts(*CAPTIONS))
    torch.testing.assert_close(found, torch.stack(heads).amax(0))


def test_similarity_of_views_is_the_mean_of_theirs(config):
    model = model_of(config, loss="dvse", views="regions+whole")
    wholes = torch.rand(3, 7)
    outputs = model(REGIONS, *CAPTIONS, wholes)
    assert len(outputs) == model.outputs
    assert [k for k, x in enumerate(outputs) if len(x) == 4] == list(model.of_texts)
    sets, texts, _, _, images, texts_of_wholes = outputs
    heads = [cosines(head, texts) for head in sets.unbind(1)]
    wanted = (torch.stack(heads).amax(0) + cosines(images, texts_of_wholes)) / 2
    embedded = model.embed_images(REGIONS, wholes)
    torch.testing.assert_close(model.similarity(embedded, model.embed_texts(*CAPTIONS)), wanted)


def test_parameters_at_the_papers_sizes():
    """Sizes: 36 regions of 2048 dimensions, words of 300, a space of 1024, 400 concepts; counts by
    layer.
    """
    region, word, space, words = 2048, 300, 1024, 12000
    gpo = 3 * 2 * (32 * 32 + 32 * 32 + 2 * 32) + 32
    image = (region + 1) * space + region * 512 + 2 * 512 + (512 + 1) * space + gpo
    text = words * word + 2 * 3 * (word * space + space * space + 2 * space) + gpo
    sge = 2 * region * region + 4 * region + region
    branch = 400 * word + word * space + 2 * space * space
    config = Config(dim=space, word_dim=word, bag_of_words=False, concepts=400)
    for change, wanted in (
        ({"loss": "triplet"}, image + text),
        ({"loss": "uto", "enhancement": "sge"}, image + text + sge),
        ({"loss": "coder"}, image + text + gpo + branch),
    ):
        with torch.device("meta"):
            model = build_model(replace(config, **change), region, words)
        assert sum(p.numel() for p in model.parameters()) == wanted


# --- whole systems --------------------------------------------------------------------------------


def trainer_of(config: Config, system: str) -> Trainer:
    return Trainer(replace(config, **SYSTEMS[system]))


@pytest.mark.parametrize("system", SYSTEMS)
def test_training_reaches_every_parameter(system, config):
    assert not take_steps(trainer_of(config, system), 2)  # the memory is empty in the first step


def test_coder_can_be_trained_without_its_concepts(config):
    trainer = trainer_of(config, "coder")
    trainer.objective.criterion.concept_weight = 0.0
    trainer.objective.criterion.prototype_weight = 0.0
    assert "branch.vectors" in take_steps(trainer, 2)


@pytest.mark.parametrize("system", ["vse", "user cge", "coder, two views", "dvse and the whole"])
def test_a_system_is_stored_and_exported(system, config, tmp_path):
    trainer = trainer_of(config, system)
    trainer.run()
    run = tmp_path / "run"
    model, words, config = load_model(run / "best.pt")  # of the only epoch
    assert config == trainer.config
    assert not model.training
    scores = np.load(run / "dev_scores.npy")
    assert np.array_equal(model_scores(model, trainer.dev, words), scores)
    assert np.array_equal(model_scores(trainer.model, trainer.dev, trainer.words), scores)
    if config.loss == "coder":
        concepts = Concepts(**json.loads((run / "concepts.json").read_text()))
        graph = normalized_graph(concepts.graph(0.3))
        torch.testing.assert_close(trainer.model.models[0].branch.graph, graph)
    if config.loss == "dvse":
        with pytest.raises(SystemExit, match="sets of embeddings is no cosine"):
            main(["--out", str(tmp_path / "out"), str(run)])
        return
    files = export(run, ["dev", "train"], tmp_path / "out")
    names = ["dev_images.npy", "dev_texts.npy", "train_images.npy", "train_texts.npy"]
    assert [file.name for file in files] == names
    images, texts = (np.load(file) for file in files[:2])
    np.testing.assert_allclose(images @ texts.T, scores, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(texts, axis=1), 1, atol=1e-5)


def test_views_are_trained_as_each_would_be_alone(config):
    settings = SYSTEMS["coder, two views"]
    # off, as the updates of one view would change the dropout and the clipping of the other
    names = ("feature_dropout", "whole_dropout", "word_dropout", "embedding_dropout")
    config = replace(config, **settings, **dict.fromkeys(names, 0.0), clip=1e9)
    both = Trainer(config)
    alone = []
    for index, view in enumerate(("regions", "whole")):
        trainer = Trainer(replace(config, views=view))
        trainer.model.load_state_dict(both.model.models[index].state_dict())
        trainer.objective.load_state_dict(both.objective.each[index].state_dict())
        take_steps(trainer, 4)
        alone.append(trainer)
    take_steps(both, 4)
    for trainer, view in zip(alone, both.model.models, strict=True):
        for name, p in trainer.model.named_parameters():
            own = view.get_parameter(name)
            torch.testing.assert_close(own, p, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["mdcl", "uto", "coder", "dvse"])
def test_models_of_the_papers_learn(config, loss):
    # the printed weight is too small here
    options = {"mdcl": {"positive_weight": 1.0}}.get(loss, {})
    result = train(replace(config, loss=loss, loss_options=options, epochs=5))
    assert result["best_rsum"] > 200  # for 20 images; chance level is 155


# --- data that do not fit -------------------------------------------------------------------------

BOTH_VIEWS = {"views": "regions+whole"}


@pytest.mark.parametrize(
    ("settings", "file", "shape", "message"),
    [
        (BOTH_VIEWS, "dev_global.npy", None, r"views = 'regions\+whole': needs .*dev_global\.npy"),
        (
            {"enhancement": "cge"},
            "dev_global.npy",
            None,
            r"enhancement = 'cge': needs .*dev_global\.npy",
        ),
        (
            BOTH_VIEWS,
            "dev_global.npy",
            (20, 6),
            r"dev_global\.npy: 6 features, must be 7 as in train_global",
        ),
        (
            BOTH_VIEWS,
            "dev_ims.npy",
            (20, 4, 9),
            r"dev_ims\.npy: 9 features, must be 8 as in train_ims",
        ),
    ],
)
def test_features_that_do_not_fit_are_named(settings, file, shape, message, config, tmp_path):
    other = shutil.copytree(config.data, tmp_path / "other")
    if shape is None:
        (other / file).unlink()
    else:
        np.save(other / file, np.ones(shape, np.float32))
    with pytest.raises(ValueError, match=message):
        Trainer(replace(config, data=str(other), **settings))
    if shape is None:
        Trainer(replace(config, data=str(other)))  # the model ignores them
