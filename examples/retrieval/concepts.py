"""The concepts of CODER: frequent words of the training captions, and how often two of them occur
together.

    python -m examples.retrieval.concepts runs/data --size 100 --out concepts.json --plot
    concepts.png

Captions are converted to bags of lemmas, each an *Object*, a *Motion* or a *Property*. The most
frequent lemmas of each kind are the concepts, in the ratio 7 : 2 : 1. The graph of CVSE and CODER
(supplement, Eq. 4 and 5) connects concepts that imply others. Its weights ``P_ij = B_ij / N_i``, of
the ``B_ij`` captions with both concepts and the ``N_i`` with concept i, are binarised: 1 from a
threshold on, and 0 below.

A part-of-speech tagger finds kinds best: ``tagger="spacy"`` uses spaCy's small English model (``pip
install spacy`` and its ``en_core_web_sm``). The default is a set of rules for captions: *-ing*
forms and their verbs are motions, listed words and other *-ed* forms are properties, and all other
words except function words are objects.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from .config import tomllib
from .data import load_split, tokenize

KINDS = {"object": 7, "motion": 2, "property": 1}  # and their shares
Tagged = list[tuple[str, str]]  # (lemma, kind) of the words of a caption that have a kind

# Function words, properties, and -ing words that are not forms of a verb.
_LISTS = tomllib.loads(Path(__file__).with_name("caption_words.toml").read_text(encoding="utf-8"))
_FUNCTION, _PROPERTY, _NOT_MOTION = (
    frozenset(_LISTS[name].split()) for name in ("function", "property", "not_motion")
)
_VOWELS = "aeiou"


@dataclass(frozen=True)
class Concepts:
    """The concepts, most frequent first within a kind, and the counts for their graph."""

    words: list[str]
    kinds: list[str]
    counts: list[int]  # N_i: captions that have concept i
    together: list[list[int]]  # B_ij: captions that have i and j; 0 for i = j

    def conditional(self) -> Tensor:
        """Conditional frequencies ``P_ij = B_ij / N_i``, (g, g) float32."""
        return torch.tensor(self.together) / torch.tensor(self.counts).clamp_min(1)[:, None]

    def graph(self, threshold: float) -> Tensor:
        """Adjacency matrix ``H``, (g, g) float32: 1 where ``P_ij`` is at least ``threshold``, else
        0.
        """
        return (self.conditional() >= threshold).float()

    def save(self, path: str | Path) -> None:
        """Write the concepts as JSON."""
        Path(path).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Concepts:
        """Read what :meth:`save` wrote."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def normalized_graph(graph: Tensor) -> Tensor:
    """Normalised graph ``D^-1/2 H D^-1/2 + I`` with the row sums D of H."""
    scale = graph.sum(1).clamp_min(1).rsqrt()
    return scale[:, None] * graph * scale + torch.eye(len(graph))


def find_concepts(captions: Sequence[str], size: int, tagger: str = "rules") -> Concepts:
    """Find the ``size`` concepts of captions. If a kind has too few words, the other kinds get
    more.

    Raises:
        ValueError: an unknown tagger, or captions with fewer than ``size`` words that can be
            concepts.
        ImportError: spaCy or its model is not installed.
    """
    if tagger not in ("rules", "spacy"):
        raise ValueError(f"tagger = {tagger!r}: must be 'rules' or 'spacy'")
    tag = rules(captions) if tagger == "rules" else _spacy()
    bags = [set(tag(caption)) for caption in captions]
    counts = Counter(word for bag in bags for word in bag)
    best = {
        kind: sorted((w for w in counts if w[1] == kind), key=lambda w: (-counts[w], w))
        for kind in KINDS
    }
    if sum(map(len, best.values())) < size:
        raise ValueError(
            f"concepts = {size}: the captions have {sum(map(len, best.values()))} words that can "
            "be some"
        )
    chosen = [
        word
        for kind, share in KINDS.items()
        for word in best[kind][: round(size * share / sum(KINDS.values()))]
    ]
    rest = sorted(set(counts) - set(chosen), key=lambda w: (-counts[w], w))
    chosen = (chosen + rest)[:size]
    chosen.sort(key=lambda w: (list(KINDS).index(w[1]), -counts[w], w[0]))
    place = {word: i for i, word in enumerate(chosen)}
    together = torch.zeros(size, size, dtype=torch.int64)
    for bag in bags:
        places = torch.tensor(sorted(place[word] for word in bag if word in place))
        if len(places) > 1:
            together[places[:, None], places] += 1
    together.fill_diagonal_(0)
    words, kinds = zip(*chosen, strict=True)
    return Concepts(list(words), list(kinds), [counts[w] for w in chosen], together.tolist())


# ------------------------------------------------------------------------------------------ taggers


def rules(captions: Sequence[str]) -> Callable[[str], Tagged]:
    """Build a tagger from word lists and from the word counts of the captions themselves."""
    known = Counter(word for caption in captions for word in tokenize(caption))
    motions = {
        w: _verb(w, known)
        for w in known
        if w.endswith("ing") and len(w) > 4 and w not in _NOT_MOTION
    }
    running = Counter()  # how often a verb occurs in its -ing form
    for word, verb in motions.items():
        running[verb] += known[word]

    def kind(word: str) -> tuple[str, str] | None:
        if word in _FUNCTION or len(word) < 2 or word.isdigit():
            return None
        if word in _PROPERTY:
            return word, "property"
        if word in motions:
            return motions[word], "motion"
        for stem in _stems(word):
            # A verb must occur more often in its -ing form: "jumps" is a motion, "dresses" is not.
            if running[stem] >= known[word]:
                return stem, "motion"
        return (word, "property") if word.endswith("ed") else (_singular(word, known), "object")

    kinds = {word: kind(word) for word in known}

    def tag(caption: str) -> Tagged:
        return [
            x
            for x in (kinds.get(word) or kind(word) for word in tokenize(caption))
            if x is not None
        ]

    return tag


def _verb(word: str, known: Counter[str]) -> str:
    """Verb of an -ing form: run for running, ride for riding, jump for jumping."""
    stem = word[:-3]
    if len(stem) == 2 and stem[1] == "y":
        return stem[0] + "ie"
    forms = [stem] if stem.endswith(("ch", "sh", "x", "ss", "zz", "o")) else [stem, stem + "e"]
    if len(stem) > 2 and stem[-1] == stem[-2] and stem[-1] not in "lsz":
        forms.insert(0, stem[:-1])
    # If no form occurs in the captions, guess: stems on c, g, s, v or z after a vowel, n or r have
    # mostly lost an e.
    guess = (
        forms[-1]
        if len(stem) > 2 and stem[-1] in "cgsvz" and stem[-2] in _VOWELS + "nr"
        else forms[0]
    )
    best = max(forms, key=lambda form: known[form] + known[form + "s"])
    return best if known[best] + known[best + "s"] else guess


def _stems(word: str) -> list[str]:
    stems = [word]
    for ending, instead in (
        ("ies", "y"),
        ("es", ""),
        ("es", "e"),
        ("s", ""),
        ("ed", ""),
        ("ed", "e"),
        ("d", ""),
    ):
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


def _spacy() -> Callable[[str], Tagged]:
    try:
        import spacy  # pyright: ignore[reportMissingImports]

        model = spacy.load("en_core_web_sm", disable=["parser", "ner"])
    except (ImportError, OSError) as error:
        raise ImportError(
            "tagger = 'spacy' needs spaCy and its small English model: pip install spacy, "
            "python -m spacy download en_core_web_sm"
        ) from error
    kinds = {
        "NOUN": "object",
        "PROPN": "object",
        "VERB": "motion",
        "ADJ": "property",
        "NUM": "property",
    }

    def tag(caption: str) -> Tagged:
        return [
            (word.lemma_.lower(), kinds[word.pos_])
            for word in model(caption.lower())
            if word.pos_ in kinds
        ]

    return tag


# ------------------------------------------------------------------------------------ text and plot


def listing(concepts: Concepts, width: int = 110) -> str:
    """List the concepts of each kind with their counts, and the graph's strongest edges, as
    text.
    """
    lines = []
    for kind in KINDS:
        own = [
            f"{w} {n}"
            for w, k, n in zip(concepts.words, concepts.kinds, concepts.counts, strict=True)
            if k == kind
        ]
        lines += [
            f"{kind} ({len(own)})",
            *textwrap.wrap(", ".join(own), width, initial_indent="  ", subsequent_indent="  "),
        ]
    conditional = concepts.conditional()
    strongest = conditional.flatten().topk(min(20, conditional.numel())).indices.tolist()
    pairs = [
        (concepts.words[i // len(concepts.words)], concepts.words[i % len(concepts.words)])
        for i in strongest
    ]
    shares = [float(conditional.flatten()[i]) for i in strongest]
    edges = [f"{a} -> {b} {p:.2f}" for (a, b), p in zip(pairs, shares, strict=True) if p]
    return "\n".join([*lines, "strongest edges", *_wrapped(edges, width)])


def _wrapped(words: list[str], width: int) -> list[str]:
    return textwrap.wrap(", ".join(words), width, initial_indent="  ", subsequent_indent="  ")


def plot(concepts: Concepts, path: str | Path, most: int = 60) -> None:
    """Draw ``P`` between the most frequent concepts, by kind; ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install matplotlib") from error
    order = sorted(range(len(concepts.words)), key=lambda i: -concepts.counts[i])[:most]
    order.sort(key=lambda i: (list(KINDS).index(concepts.kinds[i]), -concepts.counts[i]))
    shown = concepts.conditional()[order][:, order]
    figure = Figure(figsize=(2 + 0.18 * len(order), 1.5 + 0.18 * len(order)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(shown.numpy(), cmap="magma_r", vmin=0, vmax=1)
    names = [concepts.words[i] for i in order]
    axes.set_xticks(range(len(order)), names, rotation=90, fontsize=7)
    axes.set_yticks(range(len(order)), names, fontsize=7)
    axes.set_title(
        "share of the captions with the row's concept that have the column's, too", fontsize=9
    )
    for place in range(1, len(order)):
        if concepts.kinds[order[place]] != concepts.kinds[order[place - 1]]:
            axes.axhline(place - 0.5, color="gray", linewidth=0.8)
            axes.axvline(place - 0.5, color="gray", linewidth=0.8)
    figure.colorbar(image, shrink=0.6)
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Find the concepts of a data set's training captions."
    )
    parser.add_argument("data", help="a directory in the SCAN layout")
    parser.add_argument("--size", type=int, default=400)
    parser.add_argument("--tagger", choices=("rules", "spacy"), default="rules")
    parser.add_argument("--out", metavar="FILE.json")
    parser.add_argument("--plot", metavar="FILE.png")
    args = parser.parse_args(arguments)
    try:
        concepts = find_concepts(load_split(args.data, "train").captions, args.size, args.tagger)
        if args.plot:
            plot(concepts, args.plot)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    if args.out:
        concepts.save(args.out)
    print(listing(concepts))


if __name__ == "__main__":
    main()
