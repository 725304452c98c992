"""The components of the papers' systems, against loops over their equations."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.retrieval import concepts
from examples.retrieval.concepts import Concepts, find_concepts, normalized_graph
from examples.retrieval.config import Config
from examples.retrieval.data import (
    Batches,
    Vocabulary,
    begin_with,
    load_split,
    pad,
    whole_statistics,
    word_vectors,
)
from examples.retrieval.encoders import GuidedEnhancement, ImageEncoder, SelfGuidedEnhancement
from examples.retrieval.evaluate import model_scores
from examples.retrieval.export import export, main
from examples.retrieval.models import ConceptBranch, build_model
from examples.retrieval.preparation import load_model
from examples.retrieval.train import Trainer

CAPTIONS = [
    "A brown dog runs.",
    "Two dogs are running on the grass",
    "a black dog jumping",
    "a man rides a red bike",
    "A man riding a bike",
    "a woman in a red dress",
]


# --- USER: enhancement of regions -----------------------------------------------------------------


def told(regions: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Eq. 6 and 7 for one picture, region by region."""
    powers = [math.exp(sum(float(a * b) for a, b in zip(whole, v, strict=True))) for v in regions]
    shares = [x / sum(powers) for x in powers]
    length = math.sqrt(sum(x * x for x in shares))
    return torch.stack([v + x / length * whole for v, x in zip(regions, shares, strict=True)])


def test_self_guided_enhancement_is_that_of_the_equations():
    torch.manual_seed(0)
    module, regions = (
        SelfGuidedEnhancement(5).double().eval(),
        torch.randn(3, 4, 5, dtype=torch.float64),
    )
    for norm in (module.local_norm, module.whole_norm):
        norm.running_mean.normal_()  # type: ignore[union-attr]
        norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
        norm.weight.data.uniform_(0.5, 2)
        norm.bias.data.normal_()
    module.requires_grad_(False)

    def tanh_of_norm(norm, x):
        scaled = (x - norm.running_mean) / torch.sqrt(norm.running_var + norm.eps)
        return torch.tanh(norm.weight * scaled + norm.bias)

    found = module(regions)
    for picture, wanted in zip(regions, found, strict=True):
        average = sum(picture) / len(picture)  # Eq. 1
        whole = tanh_of_norm(module.whole_norm, module.whole.weight @ average)
        scores = []
        for v in picture:
            local = tanh_of_norm(module.local_norm, module.local.weight @ v)
            scores.append(float(module.score.weight[0] @ (whole * local)))  # Eq. 3
        powers = [math.exp(x) for x in scores]
        summed = sum(p / sum(powers) * v for p, v in zip(powers, picture, strict=True))
        torch.testing.assert_close(told(picture, summed / summed.norm()), wanted)


def test_guided_enhancement_is_that_of_the_equations():
    torch.manual_seed(0)
    module = GuidedEnhancement(6, 5).double().eval().requires_grad_(False)
    regions, wholes = (
        torch.randn(3, 4, 5, dtype=torch.float64),
        torch.randn(3, 6, dtype=torch.float64),
    )
    norm, first, linear, _, second, last = module.mlp
    found = module(regions, wholes)
    for picture, given, wanted in zip(regions, wholes, found, strict=True):
        x = (given - given.mean()) / torch.sqrt(given.var(correction=0) + norm.eps)
        x = x / math.sqrt(1 + first.eps)  # initial running statistics
        x = linear.weight @ x + linear.bias
        x = x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        whole = last.weight @ (x / math.sqrt(1 + second.eps)) + last.bias
        torch.testing.assert_close(told(picture, whole), wanted)


def test_the_whole_picture_is_seen_in_place_of_the_regions():
    torch.manual_seed(0)
    encoder = ImageEncoder(5, 8, whole_dim=3, whole=True).eval()
    encoder.whole_mean.copy_(torch.tensor([1.0, 2.0, 0.0]))
    encoder.whole_std.copy_(torch.tensor([2.0, 1.0, 0.5]))
    wholes = torch.tensor([[9.0, 4.0, -4.0], [0.0, 1.0, 1.0]])
    standard = torch.tensor([[1.0, 0.0, -4.0], [-0.5, -1.0, 2.0]])
    found = encoder(torch.full((2, 4, 5), torch.nan), wholes)
    torch.testing.assert_close(found, encoder.linear(standard) + encoder.mlp(standard))


# --- CODER: concepts ------------------------------------------------------------------------------


def test_concepts_are_lemmas_with_their_kinds_and_counts():
    found = find_concepts(CAPTIONS, 10)
    counted = dict(zip(zip(found.words, found.kinds, strict=True), found.counts, strict=True))
    assert (
        counted[("dog", "object")] == 3
        and counted[("man", "object")] == 2
        and counted[("bike", "object")] == 2
    )
    assert counted[("run", "motion")] == 2 and counted[("ride", "motion")] == 2
    assert counted[("red", "property")] == 2 and ("the", "object") not in counted
    together = dict(zip(found.words, found.together, strict=True))
    dog, run, red = (found.words.index(w) for w in ("dog", "run", "red"))
    assert together["dog"][run] == together["run"][dog] == 2 and together["dog"][red] == 0
    assert all(row[i] == 0 for i, row in enumerate(found.together))
    assert found.conditional()[run, dog] == 1 and found.conditional()[dog, run] == pytest.approx(
        2 / 3
    )
    assert found.graph(0.7)[run, dog] == 1 and found.graph(0.7)[dog, run] == 0


def test_kinds_of_concepts_have_their_shares():
    nouns, verbs = (
        [f"thing{chr(97 + i)}" for i in range(26)],
        ["jumping", "running", "riding", "walking", "eating"],
    )
    captions = [
        f"a red {noun} {verbs[i % 5]} green blue white black pink" for i, noun in enumerate(nouns)
    ]
    found = find_concepts(captions, 20)
    assert [found.kinds.count(kind) for kind in ("object", "motion", "property")] == [14, 4, 2]
    few = find_concepts([f"a {noun}" for noun in nouns], 20)  # only objects
    assert few.kinds == ["object"] * 20
    with pytest.raises(ValueError, match=r"concepts = 27: the captions have 26 words"):
        find_concepts([f"a {noun}" for noun in nouns], 27)


def test_a_tagger_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "spacy", None)
    with pytest.raises(ImportError, match="pip install spacy"):
        find_concepts(CAPTIONS, 5, "spacy")
    with pytest.raises(ValueError, match="tagger = 'hand'"):
        find_concepts(CAPTIONS, 5, "hand")


def test_concepts_are_stored_and_read(tmp_path: Path):
    found = find_concepts(CAPTIONS, 6)
    found.save(tmp_path / "concepts.json")
    assert Concepts.load(tmp_path / "concepts.json") == found


def test_concepts_can_be_looked_at(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = [str(tmp_path / name) for name in ("concepts.json", "concepts.png")]
    concepts.main([str(data), "--size", "8", "--out", files[0], "--plot", files[1]])
    said, found = capsys.readouterr().out, Concepts.load(files[0])
    assert all(
        f"{word} {count}" in said for word, count in zip(found.words, found.counts, strict=True)
    )
    assert Path(files[1]).read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        concepts.main([str(data), "--size", "1000"])
    assert "concepts = 1000" in capsys.readouterr().err


def test_normalized_graph_is_that_of_the_equation():
    graph = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = normalized_graph(graph)
    degrees = [2, 1, 1]  # a concept without edges causes no division by zero
    for i in range(3):
        for j in range(3):
            wanted = float(graph[i, j]) / math.sqrt(degrees[i] * degrees[j]) + (i == j)
            assert found[i, j] == pytest.approx(wanted)


def test_concept_branch_is_that_of_the_equations():
    torch.manual_seed(0)
    branch = ConceptBranch(6, 4, 5).double().requires_grad_(False)
    branch.graph.copy_(normalized_graph((torch.rand(4, 4) > 0.5).double()))
    queries = torch.randn(3, 6, dtype=torch.float64)
    mixed = [sum(branch.graph[i, j] * branch.vectors[j] for j in range(4)) for i in range(4)]
    answers = []
    for x in mixed:
        y = torch.tanh(branch.convolution.weight @ x)
        answers.append(y / y.norm())
    found = branch("text", queries)
    for query, wanted in zip(queries, found, strict=True):
        asked = branch.queries["text"].weight @ query  # type: ignore[union-attr]
        powers = [math.exp(10 * float(asked @ y) / float(asked.norm())) for y in answers]
        torch.testing.assert_close(
            sum(p / sum(powers) * y for p, y in zip(powers, answers, strict=True)), wanted
        )


# --- word vectors, features of whole pictures -----------------------------------------------------


def test_word_vectors_are_read_from_both_formats(tmp_path: Path):
    vectors = {"dog": np.float32([1, 2]), "cat": np.float32([3, -4])}
    (tmp_path / "glove.2d.txt").write_text("dog 1.0 2.0\ncat 3.0 -4\n")
    np.save(tmp_path / "v.npy", np.stack(list(vectors.values())))
    (tmp_path / "words.json").write_text(json.dumps(list(vectors)))
    for name in ("glove.2d.txt", "v.npy"):
        found = word_vectors(tmp_path / name)
        assert list(found) == list(vectors) and all(
            np.array_equal(found[w], vectors[w]) for w in vectors
        )
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ValueError, match=r"v\.npy: its words must be a list in v\.json"):
        word_vectors(tmp_path / "v.npy")


def test_words_begin_with_their_vectors_at_the_length_of_the_others():
    weight = torch.full((4, 3), 2.0)
    vectors = {"dog": np.float32([3, 4]), "cat": np.float32([0, 5])}
    assert begin_with(weight, ["<pad>", "cat", "bird", "dog"], vectors) == 2
    length = 2 * 3**0.5
    wanted = torch.tensor([[2, 2, 2], [0, length, 2], [2, 2, 2], [0.6 * length, 0.8 * length, 2]])
    torch.testing.assert_close(weight, wanted)
    with pytest.raises(ValueError, match=r"word_dim = 1: must be at least 2"):
        begin_with(torch.ones(1, 1), ["dog"], vectors)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Data set of 40 + 10 images of 4 regions, distinguished by their global features only."""
    rng = np.random.default_rng(0)
    for split, n in {"train": 40, "dev": 10}.items():
        np.save(tmp_path / f"{split}_ims.npy", rng.normal(size=(n, 4, 6)).astype(np.float16))
        np.save(tmp_path / f"{split}_global.npy", rng.uniform(size=(n, 7)).astype(np.float16))
        lines = [f"{CAPTIONS[(i + c) % 6]} {i}\n" for i in range(n) for c in range(5)]
        (tmp_path / f"{split}_caps.txt").write_text("".join(lines))
    return tmp_path


def test_features_of_whole_pictures_travel_with_the_regions(data: Path):
    split = load_split(data, "train")
    batches = Batches(split, Vocabulary.from_captions(split.captions, 1), 8, 1, 0)
    batch = next(batches.epoch(0))
    assert batch.wholes is not None
    assert torch.equal(
        batch.wholes, torch.from_numpy(split.wholes[batch.image_ids].astype(np.float32))
    )  # type: ignore[index]
    mean, std = whole_statistics(np.float32([[4, -9], [0, -1]]))
    torch.testing.assert_close(mean, torch.tensor([1.0, -2.0]))
    torch.testing.assert_close(std, torch.tensor([2**0.5, 2**0.5]))
    np.save(data / "train_global.npy", np.zeros((39, 7), np.float32))
    with pytest.raises(
        ValueError, match=r"train_global\.npy: float32 \(39, 7\), must be a float array \(40, d\)"
    ):
        load_split(data, "train")


# --- whole systems --------------------------------------------------------------------------------

SYSTEMS = {
    "vse": {"loss": "triplet"},
    "whole": {"loss": "infonce", "views": "whole"},
    "two views": {"loss": "infonce", "views": "regions+whole"},
    "coder, two views": {
        "loss": "coder",
        "views": "regions+whole",
        "loss_options": {"clusters": 5},
    },
    "dvse and the whole": {"loss": "dvse", "views": "regions+whole"},
    "user sge": {"loss": "uto", "enhancement": "sge"},
    "user cge": {"loss": "uto", "enhancement": "cge"},
    "coder": {"loss": "coder", "loss_options": {"clusters": 5}},
    "coder without concepts": {
        "loss": "coder",
        "loss_options": {"clusters": 5, "concept_weight": 0.0, "prototype_weight": 0.0},
    },
    "dvse": {"loss": "dvse"},
    "pvse": {"loss": "pvse", "heads": 3},
}


def settings(data: Path, out: Path, system: str) -> Config:
    config = Config(
        data=str(data),
        out=str(out),
        dim=16,
        word_dim=8,
        epochs=1,
        batch_size=16,
        min_count=1,
        concepts=6,
        memory=64,
        tensorboard=False,
        progress=False,
    )
    return replace(config, **SYSTEMS[system])


@pytest.mark.parametrize("system", SYSTEMS)
def test_one_step_reaches_every_parameter(system: str, data: Path, tmp_path: Path):
    trainer = Trainer(settings(data, tmp_path / "run", system))
    trainer.objective.begin_epoch(1)
    batches = list(trainer.batches.epoch(0))
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.model.train()
    for batch in batches[:2]:  # the memory is empty in the first step
        trainer.train_step(batch)
    still = {name for name, p in trainer.model.named_parameters() if torch.equal(p, before[name])}
    if system == "coder without concepts":
        still -= {name for name in before if name.startswith(("branch.", "text.asking."))}
    assert not still


@pytest.mark.parametrize("system", ["user cge", "coder", "pvse", "two views", "dvse and the whole"])
def test_a_stored_system_answers_as_the_trained_one(system: str, data: Path, tmp_path: Path):
    trainer = Trainer(settings(data, tmp_path / "run", system))
    trainer.run()
    model, _, _ = load_model(tmp_path / "run" / "last.pt")
    trained = trainer.model.eval()
    split = trainer.dev
    given = (
        torch.from_numpy(split.features.astype(np.float32)),
        torch.from_numpy(split.wholes.astype(np.float32)),
    )  # type: ignore[union-attr]
    texts = pad([trainer.vocabulary.encode(caption) for caption in split.captions[:4]])
    assert torch.equal(model.embed_images(*given), trained.embed_images(*given))
    assert torch.equal(model.embed_texts(*texts), trained.embed_texts(*texts))
    if system == "coder":
        stored = Concepts.load(tmp_path / "run" / "concepts.json")
        torch.testing.assert_close(model.branch.graph, normalized_graph(stored.graph(0.3)))  # type: ignore[union-attr]


@pytest.mark.parametrize("system", ["vse", "coder, two views"])
def test_exported_embeddings_have_the_models_similarities(system: str, data: Path, tmp_path: Path):
    trainer = Trainer(settings(data, tmp_path / "run", system))
    trainer.run()
    files = export(tmp_path / "run", ["dev", "train"], tmp_path / "out")
    assert [file.name for file in files] == [
        "dev_images.npy",
        "dev_texts.npy",
        "train_images.npy",
        "train_texts.npy",
    ]
    images, texts = (np.load(file) for file in files[:2])
    np.testing.assert_allclose(
        images @ texts.T, np.load(tmp_path / "run" / "dev_scores.npy"), atol=1e-5
    )
    np.testing.assert_allclose(np.linalg.norm(texts, axis=1), 1, atol=1e-5)


def test_sets_are_not_exported(data: Path, tmp_path: Path):
    Trainer(settings(data, tmp_path / "run", "dvse and the whole")).run()
    with pytest.raises(SystemExit, match="sets of embeddings is no cosine"):
        main(["--out", str(tmp_path / "out"), str(tmp_path / "run")])


def test_similarity_of_pvse_is_that_of_the_closest_two(data: Path, tmp_path: Path):
    torch.manual_seed(0)
    model = build_model(settings(data, tmp_path, "pvse"), 6, 30).eval().requires_grad_(False)
    regions, (words, lengths) = torch.randn(3, 4, 6), pad([[3, 4], [5], [6, 7, 8], [9, 2]])
    images, texts, of_images, of_texts = model(regions, words, lengths)
    assert images.shape == of_images.shape == (3, 3, 16) and texts.shape == of_texts.shape == (
        4,
        3,
        16,
    )
    found = model.similarity(model.embed_images(regions), model.embed_texts(words, lengths))
    for i in range(3):
        for j in range(4):
            pairs = [
                float(torch.cosine_similarity(a, b, dim=0)) for a in images[i] for b in texts[j]
            ]
            assert float(found[i, j]) == pytest.approx(max(pairs), abs=1e-6)


def test_beside_heads_a_whole_picture_is_one_embedding(data: Path, tmp_path: Path):
    torch.manual_seed(0)
    model = (
        build_model(settings(data, tmp_path, "dvse and the whole"), 6, 30, 7)
        .eval()
        .requires_grad_(False)
    )
    regions, wholes, (words, lengths) = (
        torch.randn(3, 4, 6),
        torch.rand(3, 7),
        pad([[3, 4], [5], [6, 7, 8], [9, 2]]),
    )
    sets, texts, _, _, images, texts_of_wholes = outputs = model(regions, words, lengths, wholes)
    assert len(outputs) == model.outputs and [
        k for k, x in enumerate(outputs) if len(x) == 4
    ] == list(model.of_texts)
    found = model.similarity(model.embed_images(regions, wholes), model.embed_texts(words, lengths))
    for i in range(3):
        for j in range(4):
            best = max(float(torch.cosine_similarity(head, texts[j], dim=0)) for head in sets[i])
            whole = float(torch.cosine_similarity(images[i], texts_of_wholes[j], dim=0))
            assert float(found[i, j]) == pytest.approx((best + whole) / 2, abs=1e-6)


def test_views_are_trained_as_each_would_be_alone_and_retrieve_by_their_mean(
    data: Path, tmp_path: Path
):
    """Dropout is off: the updates of one view do not change the other."""
    dry = {
        "feature_dropout": 0.0,
        "whole_dropout": 0.0,
        "word_dropout": 0.0,
        "embedding_dropout": 0.0,
        "clip": 1e9,
    }
    config = replace(settings(data, tmp_path / "run", "coder, two views"), **dry)
    both = Trainer(config)
    for index, view in enumerate(("regions", "whole")):
        alone = Trainer(replace(config, views=view))
        alone.model.load_state_dict(both.model.models[index].state_dict())  # type: ignore[union-attr, index]
        alone.objective.load_state_dict(both.objective.each[index].state_dict())  # type: ignore[union-attr, index]
        for batch in alone.batches.epoch(0):
            alone.train_step(batch)
        if index == 0:
            first = alone
    for batch in both.batches.epoch(0):
        both.train_step(batch)
    scores = []
    for index, trainer in enumerate((first, alone)):
        for name, p in trainer.model.named_parameters():
            mine = dict(both.model.models[index].named_parameters())[name]  # type: ignore[union-attr, operator]
            torch.testing.assert_close(mine, p, rtol=1e-4, atol=1e-5, msg=name)
        scores.append(model_scores(trainer.model, trainer.dev, trainer.vocabulary))
    found = model_scores(both.model, both.dev, both.vocabulary)
    torch.testing.assert_close(found, (scores[0] + scores[1]) / 2, rtol=1e-4, atol=1e-4)


def test_what_needs_features_of_whole_pictures_says_so(data: Path, tmp_path: Path):
    for split in ("train", "dev"):
        (data / f"{split}_global.npy").unlink()
    for change in ({"views": "regions+whole"}, {"enhancement": "cge"}):
        with pytest.raises(ValueError, match=rf"{next(iter(change))} = .*_global\.npy"):
            Trainer(replace(settings(data, tmp_path / "run", "vse"), **change))


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
