"""Options that are declared in the bodies of classes."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytest
from torch import Tensor, nn

from itrloss import option
from itrloss.checks import CheckedModule, Options

if TYPE_CHECKING:
    from decimal import Decimal  # which is not there when the class is made


class First(Options):
    scale: float = option(default=2.0, above=0, at_most=10)
    words: Literal["a", "b"] = "a"

    _: KW_ONLY
    several: bool | Literal["some"] | None = None
    count: int = option(default=3, at_least=1)
    limit: float | Literal["none"] = "none"


class Second(First):
    KIND: ClassVar[str] = "second"
    cached = 0  # without a type it is no option
    weight: Tensor  # nor is it without a default

    shape: tuple = (1, 2)
    unknown: Decimal = 1  # type: ignore[assignment]

    _: KW_ONLY
    words: Literal["a", "c"] = "c"  # type: ignore[assignment]
    label: str = option(default="x", local=True)


def names(kind: type) -> list[str]:
    return list(inspect.signature(kind).parameters)


def test_options_of_bases_come_first_by_position_and_last_by_name():
    assert names(First) == ["scale", "words", "several", "count", "limit"]
    positional = ["scale", "shape", "unknown"]
    assert names(Second) == [*positional, "words", "label", "several", "count", "limit"]
    kinds = [x.kind.name for x in inspect.signature(Second).parameters.values()]
    assert kinds == ["POSITIONAL_OR_KEYWORD"] * 3 + ["KEYWORD_ONLY"] * 5
    assert inspect.signature(Second).parameters["scale"].annotation is float


def test_values_are_plain_attributes():
    made = Second(3, unknown="any", limit=0.5)
    assert vars(made) == {
        "scale": 3,
        "shape": (1, 2),
        "unknown": "any",
        "words": "c",
        "label": "x",
        "several": None,
        "count": 3,
        "limit": 0.5,
    }
    assert Second.KIND == "second" and Second.cached == 0
    assert not hasattr(Second, "scale")


WRONG = [
    ({"scale": 0}, "scale: expected a number above 0 and at most 10, got 0"),
    ({"scale": 11}, "scale: expected a number above 0 and at most 10, got 11"),
    ({"scale": None}, "scale: expected a number, got None"),
    ({"words": "b"}, "words: expected 'a' or 'c', got 'b'"),
    ({"several": "all"}, "several: expected True, False, 'some' or None, got 'all'"),
    ({"count": 0}, "count: expected a number of at least 1, got 0"),
    ({"count": 1.0}, "count: expected an integer, got 1.0"),
    ({"count": True}, "count: expected an integer, got True"),
    ({"limit": "nonne"}, "limit: expected 'none' or a number, got 'nonne'; did you mean 'none'?"),
    ({"limit": float("nan")}, "limit: expected a number in the range of float32, got nan"),
    ({"scales": 1}, "Second: got an unexpected keyword argument 'scales'; did you mean 'scale'?"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_values_are_refused_when_they_are_passed_and_when_they_are_set(given, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        Second(**given)
    assert str(raised.value) == message
    if "unexpected" in message:
        return
    made = Second()
    before = dict(vars(made))
    with pytest.raises((TypeError, ValueError)) as raised:
        setattr(made, *next(iter(given.items())))
    assert str(raised.value) == message and vars(made) == before


def test_words_are_kept_as_they_are_written():
    assert First(several=1).several is True and First(several=0).several is False


class OfMine(CheckedModule):
    """A module with a constructor of its own, which passes options on."""

    size: int = option(fixed=True)
    scale: float = option(default=2.0, above=0)
    anything: Any = option(default=None, fixed=True)

    def __init__(self, weight: float = 1.0, **common: Any):
        super().__init__(**common)
        self.weight = weight
        self.size = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layer = nn.Linear(2, 3)


class Passing(OfMine):
    def __init__(self, *args: Any, **others: Any):
        super().__init__(*args, **others)


def test_a_constructor_of_ones_own_shows_the_options_that_it_passes_on():
    assert names(OfMine) == ["weight", "size", "scale", "anything", "common"]
    assert names(Passing) == ["args", "size", "scale", "anything", "others"]
    made = Passing(3.0, scale=5)
    assert (made.weight, made.scale, made.size) == (3.0, 5, 4)
    with pytest.raises(TypeError, match="Passing: got an unexpected keyword argument 'scal'"):
        Passing(scal=5)


def test_an_option_without_a_default_comes_first_or_by_name():
    with pytest.raises(ValueError, match="non-default argument follows default argument"):

        class Late(First):
            size: int = option()

    class ByName(First):
        _: KW_ONLY
        size: int = option()

    assert ByName(size=3).size == 3
    with pytest.raises(TypeError, match="ByName: missing a required argument: 'size'"):
        ByName()


def test_how_a_loss_of_yours_learns_is_no_word():
    with pytest.raises(TypeError, match=r"learnt: expected None .* __post_init__, got 'scale'"):
        option(default=1.0, learnt="scale")


def test_a_fixed_option_is_set_once():
    made = OfMine(anything="x")
    for name in ("size", "anything"):
        with pytest.raises(AttributeError, match=f"{name}: cannot be changed"):
            setattr(made, name, 5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_the_options_and_checks_them(copied):
    made = copied(OfMine(scale=5))
    assert made.scale == 5 and [*made.state_dict()] == ["layer.weight", "layer.bias"]
    with pytest.raises(ValueError, match="scale: expected a number above 0, got -1"):
        made.scale = -1


def test_repr_has_options_by_position_and_changed_ones_by_name():
    assert repr(OfMine()).startswith("OfMine(\n  size=4, scale=2.0, anything=None\n")
    made = Second(label="y", count=9)
    assert made._options_in_words() == "scale=2.0, shape=(1, 2), unknown=1, count=9"
