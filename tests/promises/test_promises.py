"""What later versions keep: names, values and states are those that a release has stored.

This stores those of this version, as the last step before its release:

    PYTHONPATH=tests:. python tests/promises/test_promises.py

States of earlier versions are never stored anew: they have to load into all later ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import promised_interface as interface
from support import promised_outcomes as outcomes
from support.versions import load

import itrloss

STORED = Path(__file__).parent / "stored"
NAMES = STORED / "names.txt"
VALUES = STORED / "values.json"
STORE = "if that is meant: PYTHONPATH=tests:. python tests/promises/test_promises.py"
STATES = STORED / f"states-{itrloss.__version__}.pt"


def is_close(numbers: list[float], promised: list[float]) -> bool:
    """Whether numbers are equal up to the rounding of other processors and versions of PyTorch."""
    return numbers == pytest.approx(promised, rel=1e-6, abs=1e-9, nan_ok=True)


def changed_outcomes(saved: dict[str, Any]) -> list[str]:
    """Return the names of stored states that no longer compute what they did."""
    changed = []
    for name, (state, promised) in saved.items():
        if not is_close(outcomes.outcome_of(name, state), promised):
            changed.append(name)
    return changed


def test_names_arguments_and_defaults_are_those_promised():
    promised = NAMES.read_text(encoding="utf-8").splitlines()
    assert interface.listing().splitlines() == promised, STORE


def test_values_are_those_promised_of_all_losses_rerankers_and_metrics():
    promised = json.loads(VALUES.read_text(encoding="utf-8"))
    found = outcomes.values()
    changed = [name for name in promised if not is_close(found[name], promised[name])]
    assert changed == []
    assert found.keys() == promised.keys(), STORE


@pytest.mark.parametrize("path", sorted(STORED.glob("states-*.pt")), ids=lambda path: path.stem)
def test_states_load_and_compute_what_they_did(path):
    assert changed_outcomes(load(path)) == []


def test_everything_with_a_state_is_in_this_versions_states():
    assert load(STATES).keys() == outcomes.states().keys(), STORE


def store() -> None:
    """Write the names, the values and the states of this version."""
    STORED.mkdir(exist_ok=True)
    NAMES.write_text(interface.listing(), encoding="utf-8")
    before = json.loads(VALUES.read_text(encoding="utf-8")) if VALUES.exists() else {}
    lines = []
    for name, numbers in outcomes.values().items():
        stored = before.get(name)
        if stored is None or not is_close(numbers, stored):
            # further digits differ between processors
            stored = [float(f"{number:.10g}") for number in numbers]
        lines.append(f"{json.dumps(name)}: {json.dumps(stored)}")
    VALUES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    saved = load(STATES) if STATES.exists() else {}
    found = outcomes.states()
    unchanged = saved.keys() == found.keys() and not changed_outcomes(saved)
    if not unchanged:
        saved = {name: (state, outcomes.outcome_of(name, state)) for name, state in found.items()}
        torch.save(saved, STATES)


if __name__ == "__main__":
    store()
