"""Parser of captions of rendered scenes, which decides whether a caption is literally true of a
scene.

It shares no word list, threshold or code with the generator of the captions: it has its own English
names of things and checks the coordinates of the objects.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from examples.retrieval.scenes import Scene, SceneObject


def _index(table: dict[str, str]) -> dict[str, str]:
    return {word: meaning for meaning, words in table.items() for word in words.split(", ")}


NOUNS = _index(
    {
        "circle": "circle, disc",
        "square": "square, box",
        "triangle": "triangle, pyramid",
        "star": "star",
        "cross": "cross, plus sign",
        "diamond": "diamond, rhombus",
        "ring": "ring, hoop",
        "crescent": "crescent, moon",
        "any": "shape, object, thing, figure",
    }
)
HUES = _index(
    {
        "red": "red, crimson, scarlet",
        "orange": "orange, amber",
        "yellow": "yellow, golden",
        "green": "green, emerald",
        "blue": "blue, azure",
        "purple": "purple, violet",
        "pink": "pink, rosy",
        "brown": "brown, chestnut",
        "white": "white, ivory",
    }
)
EXTENTS = _index(
    {
        "small": "small, little, tiny",
        "medium": "medium, medium-sized, mid-sized",
        "large": "large, big, huge",
    }
)
SETTINGS = _index({
    "sky": "a cloudy sky, the daytime sky, a mild summer sky",
    "night": "the night sky, a starry night, the dark of night",
    "sunset": "the evening sky, a glowing sunset, the light of dusk",
    "sand": "a sandy beach, the sand, desert ground",
    "grass": "the grass, a fresh lawn, a summer meadow", "sea": "the sea, deep water, a wavy sea",
    "stripes": "a striped wall, striped wallpaper, a wall with stripes",
    "paper": "a sheet of paper, a blank page, plain paper",
})  # fmt: skip
AMOUNTS = {
    "a": 1,
    "an": 1,
    "the": 1,
    "another": 1,
    "one": 1,
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
}
LOW, HIGH = (0.0, 0.35), (0.65, 1.0)
CENTRAL, ANYWHERE = (0.4, 0.6), (0.0, 1.0)
SPOTS = {  # where x and y must be
    "in the upper left corner": (LOW, LOW), "at the top left": (LOW, LOW),
    "in the upper right corner": (HIGH, LOW), "at the top right": (HIGH, LOW),
    "in the lower left corner": (LOW, HIGH), "at the bottom left": (LOW, HIGH),
    "in the lower right corner": (HIGH, HIGH), "at the bottom right": (HIGH, HIGH),
    "in the middle": (CENTRAL, CENTRAL), "in the centre of the picture": (CENTRAL, CENTRAL),
    "at the top": (ANYWHERE, LOW), "near the upper edge": (ANYWHERE, LOW),
    "at the bottom": (ANYWHERE, HIGH), "near the lower edge": (ANYWHERE, HIGH),
    "on the left side": (LOW, ANYWHERE), "near the left edge": (LOW, ANYWHERE),
    "on the right side": (HIGH, ANYWHERE), "near the right edge": (HIGH, ANYWHERE),
}  # fmt: skip


def _reach(item: SceneObject) -> float:
    return {"small": 0.08, "medium": 0.12, "large": 0.17}[item.size]


def _apart(a: SceneObject, b: SceneObject) -> float:
    return float(np.hypot(a.x - b.x, a.y - b.y))


def _covers(a: SceneObject, b: SceneObject) -> bool:
    return _apart(a, b) + _reach(b) < _reach(a)


def _halfway(middle: SceneObject, a: SceneObject, b: SceneObject) -> bool:
    detour = _apart(a, middle) + _apart(middle, b) - _apart(a, b)
    return 0 <= detour < 0.12 and abs(_apart(a, middle) - _apart(middle, b)) < 0.25


RELATIONS = {
    "to the left of|left of": lambda a, b: a.x < b.x - 0.1,
    "to the right of|right of": lambda a, b: a.x > b.x + 0.1,
    "above|over": lambda a, b: a.y < b.y - 0.1,
    "below|under": lambda a, b: a.y > b.y + 0.1,
    "inside|within|in front of": lambda a, b: _covers(b, a),
    "around|surrounding|behind": lambda a, b: _covers(a, b),
    "next to|close to|near": lambda a, b: _apart(a, b) <= 0.4,
    "far from|far away from": lambda a, b: _apart(a, b) >= 0.6,
    "that is bigger than|that is larger than": lambda a, b: _reach(a) > _reach(b),
    "smaller than": lambda a, b: _reach(a) < _reach(b),
}


@dataclass(frozen=True)
class Phrase:
    article: str
    size: str | None
    colour: str | None
    noun: str

    def fits(self, item: SceneObject) -> bool:
        return (
            EXTENTS.get(self.size or "", item.size) == item.size
            and HUES.get(self.colour or "", item.colour) == item.colour
            and NOUNS[self.noun] in (item.shape, "any")
        )


def _any_of(words) -> str:
    return "(" + "|".join(sorted(map(re.escape, words), key=len, reverse=True)) + ")"


NOUN_PHRASE = re.compile(
    rf"\b{_any_of(AMOUNTS)} (?:{_any_of(EXTENTS)} )?(?:{_any_of(HUES)} )?{_any_of(NOUNS)}(s|es)?\b"
)
INVENTORY = (
    "the picture shows|this image contains|someone drew|in total we have|we count|a collection of"
)
SHARES = r"N, \w+ of them \w+, including N|out of N, \w+ (is|are) \w+( and \w+ (is|are) \w+)?"
PALETTE = r"N in (\w+(?:, \w+)*(?: and \w+)?)"
WITH_PLACES = "N P and N P|P there is N, while N is P|N is placed P"
WITH_BACKGROUND = (
    "(N [a-z ]+|there is N|a picture of N) (in|on) B|(in|on) B [a-z ]+ N|B, and N (in|on) it"
)
IN_ORDER = "from (left|top) to (right|bottom)"
LIST = "N(?:, N)*(?: and N)?"


class Reader:
    """A parsed caption: the skeleton has N for a noun phrase, P for a place, B for a background."""

    def __init__(self, caption: str):
        assert caption.endswith(".") and not caption.endswith("..")
        self.phrases: list[Phrase] = []
        self.places: list[str] = []
        self.settings: list[str] = []
        text = re.sub(
            _any_of(SPOTS) + r"\b", lambda m: self.places.append(m[1]) or "P", caption[:-1]
        )
        text = re.sub(
            r"\b" + _any_of(SETTINGS) + r"\b", lambda m: self.settings.append(m[1]) or "B", text
        )
        self.skeleton = NOUN_PHRASE.sub(self._note, text)

    def _note(self, match: re.Match) -> str:
        *words, plural = match.groups()
        self.phrases.append(Phrase(*words))
        assert bool(plural) == (AMOUNTS[words[0]] > 1), match[0]
        return "N"

    def holds(self, scene: Scene) -> bool:
        """Whether the caption is literally true of the scene; fails if it cannot parse a
        sentence.
        """
        if any(SETTINGS[words] != scene.background for words in self.settings):
            return False
        counted = self._counts(scene)
        if counted is not None:
            return counted
        for phrase in self.phrases:
            if phrase.article == "the" and sum(map(phrase.fits, scene.objects)) != 1:
                return False
        return any(
            all(phrase.fits(item) for phrase, item in zip(self.phrases, items, strict=True))
            and self._says(scene, items)
            for items in permutations(scene.objects, len(self.phrases))
        )

    def _counts(self, scene: Scene) -> bool | None:
        """Whether a sentence about numbers is true; None for any other sentence."""
        hues = Counter(item.colour for item in scene.objects)

        def exact(phrase: Phrase) -> bool:
            return sum(map(phrase.fits, scene.objects)) == AMOUNTS[phrase.article]

        if re.fullmatch(f"({INVENTORY}) {LIST}", self.skeleton):
            total = sum(AMOUNTS[phrase.article] for phrase in self.phrases)
            return all(map(exact, self.phrases)) and total == len(scene.objects)
        shares = re.findall(
            rf"{_any_of(AMOUNTS)} (?:of them|is|are) {_any_of(HUES)}\b", self.skeleton
        )
        if re.fullmatch(SHARES, self.skeleton):
            return all(map(exact, self.phrases)) and all(
                hues[hue] == AMOUNTS[k] for k, hue in shares
            )
        if match := re.fullmatch(PALETTE, self.skeleton):
            return exact(self.phrases[0]) and set(re.split(", | and ", match[1])) == set(hues)
        return None

    def _says(self, scene: Scene, items: tuple[SceneObject, ...]) -> bool:
        """Whether these objects, which fit the noun phrases in this order, are arranged as the
        sentence says.
        """
        if not self._in_their_places(items):
            return False
        related = self._related(items)
        if related is not None:
            return related
        if re.fullmatch(f"{WITH_PLACES}|{WITH_BACKGROUND}", self.skeleton):
            return True  # the sentence has no other content than places and the background
        if match := re.fullmatch(r"the (\w+) (shape|object|thing|figure) is N( P)?", self.skeleton):
            return self._extreme(match[1], scene, items[0])
        if re.fullmatch(
            f"{IN_ORDER} we see {LIST}|{LIST}, in this order {IN_ORDER}", self.skeleton
        ):
            along = [item.x if "left" in self.skeleton else item.y for item in items]
            return len(items) == len(scene.objects) and all(np.diff(along) > 0.1)
        if self.skeleton == "N and N are in opposite corners":
            a, b = items
            # so neither is in the middle of an edge
            return min(abs(a.x - b.x), abs(a.y - b.y)) > 0.4
        if re.fullmatch("N is (halfway )?between N and N", self.skeleton):
            return _halfway(*items)
        if self.skeleton == "the middle is empty, with N P":
            return not any(0.35 < item.x < 0.65 and 0.35 < item.y < 0.65 for item in scene.objects)
        raise AssertionError(f"cannot read: {self.skeleton}")

    def _in_their_places(self, items: tuple[SceneObject, ...]) -> bool:
        for words, item in zip(self.places, items, strict=False):
            (left, right), (top, bottom) = SPOTS[words]
            if not (left <= item.x <= right and top <= item.y <= bottom):
                return False
        return True

    def _related(self, items: tuple[SceneObject, ...]) -> bool | None:
        """Whether two objects have the relation that the sentence names; None if it names none."""
        for words, relation in RELATIONS.items():
            if re.fullmatch(rf"(we see )?N (is |sits |appears )?({words}) N", self.skeleton):
                return relation(*items)
            if re.fullmatch(rf"({words}) N there is N", self.skeleton):
                return relation(*items[::-1])
        return None

    @staticmethod
    def _extreme(superlative: str, scene: Scene, item: SceneObject) -> bool:
        key, margin = {
            "biggest": (_reach, 0.01), "largest": (_reach, 0.01),
            "smallest": (lambda o: -_reach(o), 0.01), "tiniest": (lambda o: -_reach(o), 0.01),
            "leftmost": (lambda o: -o.x, 0.1), "rightmost": (lambda o: o.x, 0.1),
            "highest": (lambda o: -o.y, 0.1), "lowest": (lambda o: o.y, 0.1),
        }[superlative]  # fmt: skip
        return all(other is item or key(item) > key(other) + margin for other in scene.objects)
