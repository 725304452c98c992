"""Five captions of a rendered scene, each about a different aspect of it, and each true of its
picture.

A caption states that objects exist which fit its noun phrases and are arranged as it says. "the" is
used only for phrases that fit exactly one object of the scene; counts are exact. Like real
captions, a caption may also fit other pictures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, permutations
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from .scenes import Scene, SceneObject

T = TypeVar("T")

SHAPE_WORDS = {
    "circle": ("circle", "circle", "disc"), "square": ("square", "square", "box"),
    "triangle": ("triangle", "triangle", "pyramid"), "star": ("star",),
    "cross": ("cross", "cross", "plus sign"), "diamond": ("diamond", "diamond", "rhombus"),
    "ring": ("ring", "ring", "hoop"), "crescent": ("crescent", "moon"),
}  # fmt: skip
COLOUR_WORDS = {
    "red": ("red", "red", "crimson", "scarlet"),
    "orange": ("orange", "orange", "amber"),
    "yellow": ("yellow", "yellow", "golden"),
    "green": ("green", "green", "emerald"),
    "blue": ("blue", "blue", "azure"),
    "purple": ("purple", "violet"),
    "pink": ("pink", "pink", "rosy"),
    "brown": ("brown", "brown", "chestnut"),
    "white": ("white", "white", "ivory"),
}
SIZE_WORDS = {
    "small": ("small", "little", "tiny"),
    "medium": ("medium", "medium-sized", "mid-sized"),
    "large": ("large", "big", "huge"),
}
ANY_SHAPE = ("shape", "object", "thing", "figure")
BACKGROUND_WORDS = {  # preposition, places, verbs
    "sky": (
        "in",
        ("a cloudy sky", "the daytime sky", "a mild summer sky"),
        ("floats", "hovers", "hangs"),
    ),
    "night": (
        "in",
        ("the night sky", "a starry night", "the dark of night"),
        ("floats", "hangs", "glows"),
    ),
    "sunset": (
        "in",
        ("the evening sky", "a glowing sunset", "the light of dusk"),
        ("floats", "hangs"),
    ),
    "sand": ("on", ("a sandy beach", "the sand", "desert ground"), ("lies", "rests", "sits")),
    "grass": ("on", ("the grass", "a fresh lawn", "a summer meadow"), ("lies", "rests", "sits")),
    "sea": ("in", ("the sea", "deep water", "a wavy sea"), ("swims", "drifts", "floats")),
    "stripes": (
        "on",
        ("a striped wall", "striped wallpaper", "a wall with stripes"),
        ("hangs", "sticks"),
    ),
    "paper": (
        "on",
        ("a sheet of paper", "a blank page", "plain paper"),
        ("is drawn", "is printed", "is"),
    ),
}
COUNT_WORDS = ("no", "one", "two", "three", "four", "five")
PLACES = {  # by column and row
    (0, 0): ("in the upper left corner", "at the top left"),
    (1, 0): ("at the top", "near the upper edge"),
    (2, 0): ("in the upper right corner", "at the top right"),
    (0, 1): ("on the left side", "near the left edge"),
    (1, 1): ("in the middle", "in the centre of the picture"),
    (2, 1): ("on the right side", "near the right edge"),
    (0, 2): ("in the lower left corner", "at the bottom left"),
    (1, 2): ("at the bottom", "near the lower edge"),
    (2, 2): ("in the lower right corner", "at the bottom right"),
}


def captions(scene: Scene, rng: np.random.Generator) -> list[str]:
    """Five distinct captions: object and background, relation, counts, sizes and places,
    arrangement.

    The texts depend on the scene and the state of `rng` only.
    """
    pairs = list(combinations(scene.objects, 2))
    rng.shuffle(pairs)
    if rng.random() < 0.7:  # people would mention that one object is in front of another
        pairs.sort(key=lambda pair: not pair[0].contains(pair[1]))
    speaker = _Speaker(scene, rng)
    texts: list[str] = []
    for options in (
        speaker.object_and_background(),
        speaker.relation(*pairs[0]),
        speaker.counts_and_colours(),
        speaker.sizes_and_places(),
        speaker.arrangement(pairs[1:]),
    ):
        texts.append(speaker.pick([text for text in options if text + "." not in texts]) + ".")
    return texts


class _Speaker:
    """Generator of phrases for one scene: a method that returns a list describes one aspect in
    several ways.
    """

    def __init__(self, scene: Scene, rng: np.random.Generator) -> None:
        self.scene = scene
        self.rng = rng

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.rng.random() * len(options))]

    def name(self, item: SceneObject, sized: float = 0.35, after: str = "") -> str:
        """Noun phrase that mentions the size with probability `sized`; `after` is the preceding
        phrase.
        """
        vague = self.rng.random()
        fits = self.scene.objects
        words: list[str] = []
        if self.rng.random() < sized:
            words.append(self.pick(SIZE_WORDS[item.size]))
            fits = [other for other in fits if other.size == item.size]
        if vague > 0.1:
            words.append(self.pick(COLOUR_WORDS[item.colour]))
            fits = [other for other in fits if other.colour == item.colour]
        if vague < 0.9:
            words.append(self.pick(SHAPE_WORDS[item.shape]))
            fits = [other for other in fits if other.shape == item.shape]
        else:
            words.append(self.pick(ANY_SHAPE))
        text = " ".join(words)
        if after.split(" ", 1)[-1] == text:
            return "another " + text
        if len(fits) == 1 and self.rng.random() < 0.2:
            return "the " + text
        return ("an " if text[0] in "aeiou" else "a ") + text

    def names(self, items: Sequence[SceneObject], sized: float = 0.35) -> list[str]:
        phrases: list[str] = []
        for item in items:
            phrases.append(self.name(item, sized, after=next((p for p in phrases if p), "")))
        return phrases

    def object_and_background(self) -> list[str]:
        salient = max(self.scene.objects, key=lambda item: item.radius)
        what = self.name(salient, 0.6)
        preposition, places, verbs = BACKGROUND_WORDS[self.scene.background]
        place, verb = self.pick(places), self.pick(verbs)
        return [
            f"{what} {verb} {preposition} {place}",
            f"there is {what} {preposition} {place}",
            f"{preposition} {place} {verb} {what}",
            f"{place}, and {what} {preposition} it",
            f"a picture of {what} {preposition} {place}",
        ]

    def relation(self, a: SceneObject, b: SceneObject) -> list[str]:
        if self.rng.random() < 0.5:
            a, b = b, a
        first, second = self.names((a, b))
        how = self.pick(_relations(a, b))
        verb = self.pick(("is", "sits", "appears"))
        return [
            f"{first} {verb} {how} {second}",
            f"{how} {second} there is {first}",
            f"we see {first} {how} {second}",
            f"{first} {how} {second}",
        ]

    def counts_and_colours(self) -> list[str]:
        items = self.scene.objects
        shapes = Counter(item.shape for item in items)
        colours = Counter(item.colour for item in items)
        total = COUNT_WORDS[len(items)]
        things = self.pick(ANY_SHAPE) + "s"
        by_shape = {
            shape: self._counted(self.pick(SHAPE_WORDS[shape]), k) for shape, k in shapes.items()
        }
        hues = {colour: self.pick(COLOUR_WORDS[colour]) for colour in colours}
        by_colour = [self._counted(f"{hues[c]} {things[:-1]}", k) for c, k in colours.items()]
        inventory = listed(list(by_shape.values()))
        colour, shape = self.pick(list(colours)), self.pick(list(shapes))
        shows = self.pick(("the picture shows", "this image contains", "someone drew"))
        count = self.pick(("in total we have", "we count", "a collection of"))
        share = f"{COUNT_WORDS[colours[colour]]} of them {colour}"
        texts = [
            f"{total} {things} in {listed(list(colours))}",
            f"{shows} {inventory}",
            f"{count} {listed(by_colour)}",
            f"{total} {things}, {share}, including {by_shape[shape]}",
        ]
        if len(colours) > 1:
            shares = []
            for name, number in colours.most_common(2):
                verb = "is" if number == 1 else "are"
                shares.append(f"{COUNT_WORDS[number]} {verb} {name}")
            texts.append(f"out of {total} {things}, {' and '.join(shares)}")
        return texts

    def _counted(self, noun: str, count: int) -> str:
        if count > 1:
            plural = "es" if noun.endswith(("s", "x")) else "s"
            return f"{COUNT_WORDS[count]} {noun}{plural}"
        article = "an" if noun[0] in "aeiou" else "a"
        return f"{self.pick(('one', article))} {noun}"

    def sizes_and_places(self) -> list[str]:
        order = [self.scene.objects[i] for i in self.rng.permutation(len(self.scene.objects))]
        first, second = self.names(order[:2], sized=0.9)
        here, there = (self.pick(PLACES[item.column, item.row]) for item in order[:2])
        texts = [
            f"{first} {here} and {second} {there}",
            f"{here} there is {first}, while {second} is {there}",
            f"{first} is placed {here}",
        ]
        by_radius = sorted(order, key=lambda item: item.radius)
        for extreme, rival, superlatives in (
            (by_radius[-1], by_radius[-2], ("biggest", "largest")),
            (by_radius[0], by_radius[1], ("smallest", "tiniest")),
        ):
            if extreme.radius != rival.radius:
                where = self.pick(PLACES[extreme.column, extreme.row])
                superlative = f"the {self.pick(superlatives)} {self.pick(ANY_SHAPE)}"
                texts.append(f"{superlative} is {self.name(extreme, 0)} {where}")
        if by_radius[0].radius != by_radius[-1].radius:
            small, large = self.names((by_radius[0], by_radius[-1]), sized=0)
            texts.append(f"{small} is smaller than {large}")
            texts.append(f"{large} that is {self.pick(('bigger', 'larger'))} than {small}")
        return texts

    def arrangement(self, pairs: Sequence[tuple[SceneObject, SceneObject]]) -> list[str]:
        items = self.scene.objects
        columns = [item.column for item in items]
        rows = [item.row for item in items]
        texts = self.in_order(columns, ("left", "right"), ("leftmost", "rightmost"))
        texts += self.in_order(rows, ("top", "bottom"), ("highest", "lowest"))
        texts += self.in_lines()
        texts += self.distances(pairs)
        if pairs:
            texts += self.relation(*pairs[0])
        if all((item.column, item.row) != (1, 1) for item in items):
            item = self.pick(items)
            where = self.pick(PLACES[item.column, item.row])
            texts.append(f"the middle is empty, with {self.name(item)} {where}")
        return texts

    def in_order(
        self, places: Sequence[int], ends: tuple[str, str], superlatives: tuple[str, str]
    ) -> list[str]:
        """Sentences on the order of the objects' columns or rows, and on the first and the last."""
        order = sorted(range(len(places)), key=lambda k: places[k])
        items = [self.scene.objects[k] for k in order]
        places = [places[k] for k in order]
        start, end = ends
        texts: list[str] = []
        if len(set(places)) == len(places):
            enumeration = listed(self.names(items))
            texts.append(f"from {start} to {end} we see {enumeration}")
            texts.append(f"{enumeration}, in this order from {start} to {end}")
        if places[0] != places[1]:
            shape = self.pick(ANY_SHAPE)
            texts.append(f"the {superlatives[0]} {shape} is {self.name(items[0], 0.6)}")
        if places[-1] != places[-2]:
            shape = self.pick(ANY_SHAPE)
            texts.append(f"the {superlatives[1]} {shape} is {self.name(items[-1], 0.6)}")
        return texts

    def in_lines(self) -> list[str]:
        """Sentences on objects in opposite corners, and between others."""
        items = self.scene.objects
        texts: list[str] = []
        for a, b in combinations(items, 2):
            if {a.column, b.column} == {a.row, b.row} == {0, 2}:
                texts.append(f"{' and '.join(self.names((a, b)))} are in opposite corners")
        for a, middle, b in permutations(items, 3):
            if items.index(a) < items.index(b) and _is_between(a, middle, b):
                outer, inner, other = self.names((a, middle, b))
                texts.append(
                    f"{inner} is {self.pick(('between', 'halfway between'))} {outer} and {other}"
                )
        return texts

    def distances(self, pairs: Sequence[tuple[SceneObject, SceneObject]]) -> list[str]:
        """Sentences on pairs that are near or far."""
        near = ("next to", "close to", "near")
        far = ("far from", "far away from")
        texts: list[str] = []
        for a, b in pairs:
            if not (a.contains(b) or 0.4 < a.distance(b) < 0.6):
                how = self.pick(near if a.distance(b) <= 0.4 else far)
                texts.append(f" is {how} ".join(self.names((a, b))))
        return texts


def _relations(a: SceneObject, b: SceneObject) -> list[str]:
    """Return the relations that may connect a and b in "a ... b"."""
    if b.contains(a):
        return ["inside", "within"] if b.shape == "ring" else ["inside", "in front of"]
    if a.contains(b):
        return ["around", "surrounding"] if a.shape == "ring" else ["behind", "surrounding"]
    phrases: list[str] = []
    if a.column < b.column:
        phrases += ["to the left of", "left of"]
    if a.column > b.column:
        phrases += ["to the right of", "right of"]
    if a.row < b.row:
        phrases += ["above", "over"]
    if a.row > b.row:
        phrases += ["below", "under"]
    return phrases


def _is_between(a: SceneObject, middle: SceneObject, b: SceneObject) -> bool:
    """Whether the middle object is about halfway on the line from a to b."""
    off = np.hypot(middle.x - (a.x + b.x) / 2, middle.y - (a.y + b.y) / 2)
    return a.distance(b) > 0.4 and off < 0.12


def listed(words: Sequence[str]) -> str:
    """Join words as in ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
