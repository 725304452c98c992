"""The concepts of captions and their graph."""

from __future__ import annotations

import json
import math

import pytest
import torch
from support.stored import assert_stored

from examples.retrieval.concepts import find_concepts, normalized_graph, read_concepts

CAPTIONS = [
    "A brown dog runs.",
    "Two dogs are running on the grass",
    "a black dog jumping",
    "a man rides a red bike",
    "A man riding a bike",
    "a woman in a red dress",
]
NOUNS = [f"thing{chr(97 + i)}" for i in range(26)]


def test_concepts_are_those_that_were_read():
    """Lemmas with their kinds, in shares of 7 : 2 : 1 unless one lacks words, and counts; the
    captions that have two of them; and edges from each to those in 70 % of its captions.
    """
    verbs = ["jumping", "running", "riding", "walking", "eating"]
    rich = [f"a red {noun} {verbs[i % 5]} green blue black pink" for i, noun in enumerate(NOUNS)]
    lines = []
    for captions, size in ((CAPTIONS, 10), (rich, 20), ([f"a {noun}" for noun in NOUNS], 20)):
        found = find_concepts(captions, size)
        edges = found.graph(0.7).int().tolist()
        rows = zip(found.words, found.kinds, found.counts, found.together, edges, strict=True)
        lines += [" ".join(map(str, row)) for row in rows]
    assert_stored("concepts", "\n".join(lines))


def test_captions_with_too_few_words_are_refused():
    with pytest.raises(ValueError, match=r"concepts = 27: must be at most 26, the number"):
        find_concepts([f"a {noun}" for noun in NOUNS], 27)


def test_words_of_a_file_are_counted_in_the_captions(tmp_path):
    file = tmp_path / "concepts.json"
    captions = ["A middle-aged man runs.", "a man of middle age", "two dogs", "a man, his dogs"]
    file.write_text(json.dumps(["man", "dogs", "middle-aged", "cat"]))
    found = read_concepts(str(file), captions)
    assert found.words == ["man", "dogs", "middle-aged", "cat"]
    assert found.counts == [3, 2, 1, 0]
    assert found.together == [[0, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    file.write_text(json.dumps({"man": 0, "dogs": 1, "middle-aged": 2, "cat": 3}))  # CVSE's
    assert read_concepts(str(file), captions) == found
    for words in (["together", "man"], {"together": 0, "man": 1}):
        file.write_text(json.dumps(words))
        assert read_concepts(str(file), captions).counts == [0, 3]


def test_concepts_of_a_run_are_read_with_their_counts(tmp_path):
    found = find_concepts(CAPTIONS, 8)
    file = tmp_path / "concepts.json"
    found.save(file)
    assert read_concepts(str(file), ["other captions"]) == found


@pytest.mark.parametrize(
    "content",
    [
        "dog",
        ["dog", "!!"],
        {"words": ["a", "b"], "kinds": ["x", "x"], "counts": [1], "together": [[0, 0], [0, 0]]},
    ],
)
def test_files_without_concepts_are_refused(content, tmp_path):
    file = tmp_path / "concepts.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"concept_file = .*: must be JSON: a list of words"):
        read_concepts(str(file), CAPTIONS)


def test_normalized_graph_is_that_of_the_equation():
    graph = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    found = normalized_graph(graph)
    degrees = [2, 1, 1]  # a concept without edges causes no division by zero
    for i in range(3):
        for j in range(3):
            wanted = float(graph[i, j]) / math.sqrt(degrees[i] * degrees[j]) + (i == j)
            assert found[i, j] == pytest.approx(wanted)
