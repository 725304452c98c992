"""The models of the papers' systems: their equations, their parameters, and what is stored."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.drawn import DRY, take_steps
from support.stored import assert_stored_numbers
from support.versions import default_device

from examples.retrieval.concepts import Concepts, normalized_graph
from examples.retrieval.config import Config
from examples.retrieval.data import pad
from examples.retrieval.evaluate import model_scores
from examples.retrieval.export import export, main
from examples.retrieval.models import VSE, build_model
from examples.retrieval.preparation import load_model
from examples.retrieval.train import Trainer

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


@pytest.mark.parametrize(
    ("settings", "part", "changed"),
    [
        ({"loss": "dvse"}, "heads", {0, 1, 2}),  # all but the gate
        ({"loss": "infonce"}, "pooling", {0, 1}),
        (CODER, "pooling", {0, 1, 2, 3}),
        (CODER, "concepts", {2, 3}),
        ({"loss": "uto", "enhancement": "sge"}, "enhancement", {0}),
        ({"loss": "uto", "enhancement": "cge"}, "enhancement", {0}),
    ],
)
def test_a_part_as_printed_changes_the_outputs_that_it_makes(config, settings, part, changed):
    inputs = REGIONS, *CAPTIONS, torch.rand(3, 7)
    ours = model_of(config, **settings)
    printed = model_of(config, **settings, as_printed=[part])
    own = printed.state_dict()
    weights = {name: x for name, x in ours.state_dict().items() if name in own}
    printed.load_state_dict({**own, **weights})
    outputs = zip(ours(*inputs), printed(*inputs), strict=True)
    assert {k for k, (x, y) in enumerate(outputs) if not torch.allclose(x, y)} == changed


def test_numbers_are_those_that_loops_over_the_equations_had(config):
    """Outputs and similarities of small models, and the parameters of large ones: of 36 regions of
    2048 dimensions, words of 300, a space of 1024, 400 concepts.
    """
    torch.manual_seed(0)
    wholes = torch.rand(3, 7)
    large = Config(dim=1024, word_dim=300, bag_of_words=False, concepts=400)
    numbers = {}
    for name, settings in {**SYSTEMS, "instances alone": {**CODER, "concept_share": 0.0}}.items():
        model = model_of(config, **settings)
        embedded = model.embed_images(REGIONS, wholes), model.embed_texts(*CAPTIONS)
        outputs = model(REGIONS, *CAPTIONS, wholes)
        assert len(outputs) == model.outputs
        assert [k for k, x in enumerate(outputs) if len(x) == 4] == list(model.of_texts)
        numbers[name] = model.similarity(*embedded).flatten().tolist()
        numbers[f"outputs of {name}"] = [x.mean().item() for x in outputs]
        with default_device("meta"):
            model = build_model(replace(large, **settings), 2048, 12000, 2048)
        numbers[f"parameters of {name}"] = [float(sum(p.numel() for p in model.parameters()))]
    assert_stored_numbers("models", numbers, 1e-3)


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
        main(["--out", str(tmp_path / "out"), str(run)])
        assert np.array_equal(np.load(tmp_path / "out" / "dev_scores.npy"), scores)
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
    config = replace(config, **settings, **DRY, clip=1e9)
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
