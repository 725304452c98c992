"""The concepts of captions and their graph."""

from __future__ import annotations

import json
import math

import pytest
import torch

from examples.retrieval import concepts
from examples.retrieval.concepts import Concepts, find_concepts, normalized_graph
from examples.retrieval.data import load_split

CAPTIONS = [
    "A brown dog runs.",
    "Two dogs are running on the grass",
    "a black dog jumping",
    "a man rides a red bike",
    "A man riding a bike",
    "a woman in a red dress",
]
NOUNS = [f"thing{chr(97 + i)}" for i in range(26)]


def test_concepts_are_lemmas_with_their_kinds_and_counts():
    found = find_concepts(CAPTIONS, 10)
    counted = dict(zip(zip(found.words, found.kinds, strict=True), found.counts, strict=True))
    assert counted["dog", "object"] == 3
    assert counted["man", "object"] == 2
    assert counted["bike", "object"] == 2
    assert counted["run", "motion"] == 2
    assert counted["ride", "motion"] == 2
    assert counted["red", "property"] == 2
    assert "the" not in found.words


def test_a_graph_is_of_shares_of_captions():
    found = find_concepts(CAPTIONS, 10)
    dog, run, red = (found.words.index(word) for word in ("dog", "run", "red"))
    assert found.together[dog][run] == found.together[run][dog] == 2
    assert found.together[dog][red] == 0
    assert [row[i] for i, row in enumerate(found.together)] == [0] * 10
    conditional = found.conditional()
    assert conditional[run, dog] == 1
    assert conditional[dog, run] == pytest.approx(2 / 3)
    graph = found.graph(0.7)
    assert graph[run, dog] == 1
    assert graph[dog, run] == 0


def test_kinds_of_concepts_have_their_shares():
    verbs = ["jumping", "running", "riding", "walking", "eating"]
    captions = [
        f"a red {noun} {verbs[i % 5]} green blue white black pink" for i, noun in enumerate(NOUNS)
    ]
    kinds = find_concepts(captions, 20).kinds
    assert [kinds.count(kind) for kind in ("object", "motion", "property")] == [14, 4, 2]


def test_other_kinds_fill_up_what_a_kind_lacks():
    assert find_concepts([f"a {noun}" for noun in NOUNS], 20).kinds == ["object"] * 20


def test_captions_with_too_few_words_are_refused():
    with pytest.raises(ValueError, match=r"concepts = 27: the captions have 26 words"):
        find_concepts([f"a {noun}" for noun in NOUNS], 27)


def test_the_command_lists_and_stores_concepts(data, tmp_path, capsys):
    file = tmp_path / "concepts.json"
    concepts.main([str(data), "--size", "8", "--out", str(file)])
    said = capsys.readouterr().out
    found = Concepts(**json.loads(file.read_text()))
    assert found == find_concepts(load_split(data, "train").captions, 8)
    for word, count in zip(found.words, found.counts, strict=True):
        assert f"{word} {count}" in said
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
