"""The concepts of CODER: frequent words of the training captions, and how often two of them occur
together.

Captions are converted to bags of lemmas, each an *Object*, a *Motion* or a *Property*. The most
frequent lemmas of each kind are the concepts, in the ratio 7 : 2 : 1. The graph of CVSE and CODER
(supplement, Eq. 4 and 5) connects concepts that imply others. Its weights ``P_ij = B_ij / N_i``, of
the ``B_ij`` captions with both concepts and the ``N_i`` with concept i, are binarised: 1 from a
threshold on, and 0 below.

The kinds are found by rules for captions: *-ing* forms and their verbs are motions, listed words
and other *-ed* forms are properties, and all other words except function words are objects.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from itrloss.files import written

from .config import must_be, read_toml
from .data import tokenize

KINDS = {"object": 7, "motion": 2, "property": 1}  # and their shares
Lemma = tuple[str, str]  # and its kind

_LISTS = read_toml(Path(__file__).with_name("caption_words.toml"))
_FUNCTION = frozenset(_LISTS["function"].split())
_PROPERTY = frozenset(_LISTS["property"].split())
_NOT_MOTION = frozenset(_LISTS["not_motion"].split())  # -ing words that are not forms of a verb
_VOWELS = "aeiou"


@dataclass(frozen=True)
class Concepts:
    """The concepts, most frequent first within a kind, and the counts for their graph."""

    words: list[str]
    kinds: list[str]
    counts: list[int]  # N_i: captions that have concept i
    together: list[list[int]]  # B_ij: captions that have i and j; 0 for i = j

    def graph(self, threshold: float) -> Tensor:
        """Adjacency matrix ``H``, (g, g) float32: 1 where the conditional frequency ``P_ij = B_ij /
        N_i`` is at least ``threshold``, else 0.
        """
        captions = torch.tensor(self.counts).clamp_min(1)
        conditional = torch.tensor(self.together) / captions[:, None]
        return (conditional >= threshold).float()

    def save(self, path: str | Path) -> None:
        """Write the concepts as JSON."""
        with written(path) as file:
            file.write(json.dumps(asdict(self)) + "\n")


def normalized_graph(graph: Tensor) -> Tensor:
    """Normalised graph ``D^-1/2 H D^-1/2 + I`` with the row sums D of H."""
    scale = graph.sum(1).clamp_min(1).rsqrt()
    return scale[:, None] * graph * scale + torch.eye(len(graph))


def find_concepts(captions: Sequence[str], size: int) -> Concepts:
    """Find the ``size`` concepts of captions. If a kind has too few words, the other kinds get
    more.

    Raises:
        ValueError: captions with fewer than ``size`` words that can be concepts.
    """
    tagger = Tagger(captions)
    bags = [tagger.lemmas(caption) for caption in captions]
    counts = Counter(lemma for bag in bags for lemma in bag)
    if len(counts) < size:
        raise ValueError(
            f"concepts = {size}: must be at most {len(counts)}, the number of words in the "
            "captions that can be concepts"
        )
    frequent = sorted(counts, key=lambda lemma: (-counts[lemma], lemma))
    chosen = []
    for kind, share in KINDS.items():
        of_kind = [lemma for lemma in frequent if lemma[1] == kind]
        chosen += of_kind[: round(size * share / sum(KINDS.values()))]
    rest = [lemma for lemma in frequent if lemma not in chosen]
    chosen = (chosen + rest)[:size]
    kinds = list(KINDS)
    chosen.sort(key=lambda lemma: (kinds.index(lemma[1]), -counts[lemma], lemma[0]))
    return counted(bags, chosen)


def read_concepts(path: str, captions: Sequence[str]) -> Concepts:
    """Read concepts from JSON: those of a run with their counts; or words, a list or, as in CVSE's
    category_concepts.json, an object of their numbers, which are counted in the captions.

    A caption has a concept if it has all its words, as of "middle-aged".
    """
    wanted = "JSON: a list of words, CVSE's numbers of words, or concepts.json of a run"
    with must_be(f"concept_file = {path!r}", wanted):
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if isinstance(content, dict) and isinstance(content.get("together"), list):
            found = Concepts(**content)
            of_each = (found.kinds, found.counts, found.together, *found.together)
            if any(len(x) != len(found.words) for x in of_each):
                raise ValueError("its lists differ in size")
            return found
        if not isinstance(content, (dict, list)):
            raise TypeError(f"it is {type(content).__name__}")
        chosen = {(word, "listed"): {*tokenize(word)} for word in content}
        for (word, _), said in chosen.items():
            if not said:
                raise ValueError(f"{word!r} is no word")
    bags = []
    for caption in captions:
        said = {*tokenize(caption)}
        bags.append({lemma for lemma, words in chosen.items() if words <= said})
    return counted(bags, [*chosen])


def counted(bags: Sequence[set[Lemma]], chosen: Sequence[Lemma]) -> Concepts:
    """Count the chosen lemmas in the captions' bags."""
    counts = Counter(lemma for bag in bags for lemma in bag)
    return Concepts(
        words=[word for word, _ in chosen],
        kinds=[kind for _, kind in chosen],
        counts=[counts[lemma] for lemma in chosen],
        together=_together(bags, chosen).tolist(),
    )


def _together(bags: Sequence[set[Lemma]], chosen: Sequence[Lemma]) -> Tensor:
    """How many bags have two lemmas, (g, g) int64 with 0 on the diagonal."""
    place = {lemma: i for i, lemma in enumerate(chosen)}
    together = torch.zeros(len(chosen), len(chosen), dtype=torch.int64)
    for bag in bags:
        places = torch.tensor([place[lemma] for lemma in bag if lemma in place], dtype=torch.int64)
        together[places[:, None], places] += 1
    return together.fill_diagonal_(0)


# ------------------------------------------------------------------------------------------- tagger


class Tagger:
    """Finds lemmas by word lists and by the word counts of captions."""

    def __init__(self, captions: Sequence[str]) -> None:
        self.known = Counter(word for caption in captions for word in tokenize(caption))
        self.verbs = {}  # of words in -ing
        self.running = Counter()  # how often a verb occurs in its -ing form
        for word, count in self.known.items():
            if word.endswith("ing") and len(word) > 4 and word not in _NOT_MOTION:
                verb = _verb(word, self.known)
                self.verbs[word] = verb
                self.running[verb] += count
        self.found = {word: self.lemma(word) for word in self.known}

    def lemmas(self, caption: str) -> set[Lemma]:
        """The lemmas of one of the captions."""
        lemmas = (self.found[word] for word in tokenize(caption))
        return {lemma for lemma in lemmas if lemma is not None}

    def lemma(self, word: str) -> Lemma | None:
        """The lemma and kind of a word; None for words without a kind."""
        if word in _FUNCTION or len(word) < 2 or word.isdigit():
            return None
        if word in _PROPERTY:
            return word, "property"
        if word in self.verbs:
            return self.verbs[word], "motion"
        for stem in _stems(word):
            # A verb must occur more often in its -ing form: "jumps" is a motion, "dresses" is not.
            if self.running[stem] >= self.known[word]:
                return stem, "motion"
        if word.endswith("ed"):
            return word, "property"
        return _singular(word, self.known), "object"


def _verb(word: str, known: Counter[str]) -> str:
    """Verb of an -ing form: run for running, ride for riding, jump for jumping."""
    stem = word[:-3]
    if len(stem) == 2 and stem[1] == "y":
        return stem[0] + "ie"
    forms = [stem] if stem.endswith(("ch", "sh", "x", "ss", "zz", "o")) else [stem, stem + "e"]
    if len(stem) > 2 and stem[-1] == stem[-2] and stem[-1] not in "lsz":
        forms.insert(0, stem[:-1])
    best = max(forms, key=lambda form: known[form] + known[form + "s"])
    if known[best] + known[best + "s"]:
        return best
    # If no form occurs in the captions, guess: stems on c, g, s, v or z after a vowel, n or r have
    # mostly lost an e.
    lost_e = len(stem) > 2 and stem[-1] in "cgsvz" and stem[-2] in _VOWELS + "nr"
    return forms[-1] if lost_e else forms[0]


_ENDINGS = [("ies", "y"), ("es", ""), ("es", "e"), ("s", ""), ("ed", ""), ("ed", "e"), ("d", "")]


def _stems(word: str) -> list[str]:
    """The word, and what it may be a form of."""
    stems = [word]
    for ending, instead in _ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) > 1:
            stems.append(word[: -len(ending)] + instead)
    return stems


_IRREGULAR = {
    "men": "man",
    "women": "woman",
    "children": "child",
    "people": "person",
    "feet": "foot",
    "teeth": "tooth",
}


def _singular(word: str, known: Counter[str]) -> str:
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if not word.endswith("s") or word.endswith("ss"):
        return word
    forms = [word[:-1]]
    if word.endswith("ies"):
        forms.append(word[:-3] + "y")
    if word.endswith("es"):
        forms.append(word[:-2])
    best = max(forms, key=lambda form: known[form])
    return best if known[best] else word
