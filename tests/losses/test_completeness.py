"""One test says all that a loss still lacks: in the registry, in the tests, on the pages."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from support.conforming import CALLS, LOSSES
from support.drawn_losses import TAKES
from support.losses_registry import REGISTRY, Entry, LateInteraction, public_losses

import itrloss
from itrloss import MemoryLoss, PairLoss
from itrloss.losses.base import Loss, SimilarityLoss

HOME = Path(__file__).parents[2]
REGISTERED = "tests/support/losses_registry.py"
# Options that tests of their own compare at other values than their defaults.
ELSEWHERE = {
    "CODERObjective": "test_random_cases.py",
    "DVSEObjective": "test_random_cases.py",
    "DynamicGate": "test_dvse.py",
    "DynamicOrthogonalLoss": "test_random_cases.py",
    "DistillationLoss": "test_random_cases.py",
    "InfoNCELoss": "test_random_cases.py",
    "Matryoshka": "test_matryoshka.py",
    "PCMEPlusPlusLoss": "test_probabilistic.py",
    "VarianceAwareLoss": "test_random_cases.py",
}
WITHOUT_VALUE = {"learnable", "max_scale", "reduction", "engine", "check_finite"}
# Other forms of an option, which `test_shared_parameters.py` compares with it.
FORMS = {"temperature": {"scale", "log_scale"}, "scale": {"temperature", "log_scale"}}
OF_ALL = PairLoss, MemoryLoss, SimilarityLoss, Loss  # whose options all losses have


def own_options(kind: type) -> dict[str, Any]:
    """Return the options of a loss with their defaults, without those that all losses have."""
    common: set[str] = set()
    for base in OF_ALL:
        if issubclass(kind, base):
            common |= inspect.signature(base).parameters.keys()
    found = {}
    for name, parameter in inspect.signature(kind).parameters.items():
        if name not in common and parameter.default is not parameter.empty:
            found[name] = parameter.default
    first = next(iter(found), "")
    if "log_scale" in found:
        found = {name: x for name, x in found.items() if name not in FORMS[first]}
    return found


def lacks(kind: type) -> list[str]:
    """Return what a public loss lacks, in words."""
    name = kind.__name__
    entries = {x: entry for x, entry in REGISTRY.items() if type(entry.make()) is kind}
    found = lacks_in_public(name)
    if not entries:
        found.append(f"{REGISTERED}: an entry, with its loops in tests/support/oracle_*.py")
    for entry_name, entry in entries.items():
        found += [f"{REGISTERED}, entry {entry_name!r}: {x}" for x in lacks_of_entry(entry)]
    left = own_options(kind).keys() - compared_options(kind, [*entries.values()]) - WITHOUT_VALUE
    if left and name not in ELSEWHERE:
        found.append(f"{REGISTERED}: an entry with loops and other values of {sorted(left)}")
    is_called = not entries or any(entry.takes in CALLS for entry in entries.values())
    if is_called and name not in {type(case.loss).__name__ for case in LOSSES.values()}:
        found.append(f"{REGISTERED}: an entry in the table 'conforming'")
    return found


def lacks_in_public(name: str) -> list[str]:
    found = []
    if name not in itrloss.__all__:
        found.append("src/itrloss/losses/__init__.py: its name in __all__")
    pages = "".join(page.read_text("utf-8") for page in HOME.glob("docs/losses/*.rst"))
    rows = ", ".join(re.findall(r"^\.\. summary:: (.+)$", pages, re.M))
    if name not in rows.split(", "):
        found.append(f"docs/losses/: a page or section with '.. summary:: {name}'")
    promised = (HOME / "tests/promises/stored/names.txt").read_text("utf-8")
    if not re.search(rf"\b{name}\b", promised):
        found.append("tests/promises: stored anew, see CONTRIBUTING")
    return found


def lacks_of_entry(entry: Entry) -> list[str]:
    """Return what an entry of the registry lacks."""
    found = []
    has_loops = entry.takes in {*TAKES, "features"} - {"pairs"}
    has_loops = has_loops or issubclass(
        type(entry.make()), itrloss.InfoNCELoss | itrloss.Matryoshka
    )
    if entry.oracle is None and not has_loops:
        found.append("oracle, the loss in loops")
    if entry.oracle is not None:
        options = entry.options if entry.oracle_options is None else entry.oracle_options
        try:
            inspect.signature(entry.oracle).bind_partial(**options, reduction="none")
        except TypeError as error:
            found.append(f"an oracle that takes its options: {error}")
    return found


def compared_options(kind: type, entries: list[Entry]) -> set[str]:
    """Return the options that entries with loops have at other values than their defaults."""
    defaults = own_options(kind)
    found = set()
    for entry in entries:
        if entry.oracle is not None:
            found |= {x for x, value in entry.options.items() if value != defaults.get(x)}
    return found


def test_no_loss_lacks_anything():
    found = []
    for name in sorted(public_losses()):
        found += [f"{name} lacks\n    {x}" for x in lacks(vars(itrloss)[name])]
    assert not found, "\n" + "\n".join(found)


class New(itrloss.PairLoss):
    """A loss with an option, and nothing else."""

    margin: float = 0.2


def test_a_new_loss_lacks_everything_at_once():
    places = [x.split(":")[0] for x in lacks(New)]
    assert places == [
        "src/itrloss/losses/__init__.py",
        "docs/losses/",
        "tests/promises",
        REGISTERED,
        REGISTERED,
        REGISTERED,
    ]


def test_a_wrong_entry_is_named():
    assert len(lacks_of_entry(Entry(New, {"margin": 0.3}))) == 1
    of_others = Entry(New, {"margin": 0.3}, oracle=lambda S, rows, cols, reduction: 0)
    assert "margin" in lacks_of_entry(of_others)[0]


def test_losses_that_are_compared_elsewhere_have_options_left():
    for entry in REGISTRY.values():
        kind = type(entry.make())
        if kind.__name__ in ELSEWHERE:
            same = [x for x in REGISTRY.values() if type(x.make()) is kind]
            left = own_options(kind).keys() - compared_options(kind, same) - WITHOUT_VALUE
            assert left, f"{kind.__name__}: all options are compared in loops"


@pytest.mark.parametrize("entry", REGISTRY.values(), ids=REGISTRY)
def test_every_option_is_in_the_signature_and_compared_by_processes(entry):
    loss = entry.make()
    if not isinstance(loss, Loss):
        return
    names = inspect.signature(type(loss)).parameters
    assert not any(x.kind is x.VAR_POSITIONAL for x in names.values())
    assert {"reduction", "gather", "process_group"} <= names.keys()
    assert entry.options.keys() <= names.keys()
    if not isinstance(loss, LateInteraction):  # whose own options are no declared ones
        compared = {name for name, x in type(loss)._all_options.items() if not x.local}
        assert own_options(type(loss)).keys() - {"engine", "check_finite"} <= compared
