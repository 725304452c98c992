"""The script that plants small mistakes: what it changes, and what it says of them."""

from __future__ import annotations

from pathlib import Path

import mutants

SOURCE = '''
"""A docstring with 1 < 2."""
from typing import Final

LIMIT: Final = 3


def clamped(x: int | None, low=0.5, *, strict=False):
    """Another one, 1 + 1."""
    if x is None or x < (low + 1):
        raise ValueError(f"x: expected at least {low + 1}")
    x -= 1
    check(x)
    return max(min(x, LIMIT), low, key=abs)
'''


def changes() -> set[str]:
    """Return the lines of the source as mutants have them."""
    found = mutants.mutants("module.py", SOURCE)
    return {mutant.diff().splitlines()[-1][1:].strip() for mutant in found}


def test_operators_numbers_conditions_arguments_and_statements_change():
    assert {
        "LIMIT: Final = 4",
        "def clamped(x: int | None, low=1.0, *, strict=False):",
        "def clamped(x: int | None, low=0.5, *, strict=True):",
        "if x is not None or x < low + 1:",
        "if x is None and x < low + 1:",
        "if x is None or x <= low + 1:",
        "if x is None or x < low - 1:",
        "if not (x is None or x < low + 1):",
        "pass",
        "return min(min(x, LIMIT), low, key=abs)",
        "return max(min(LIMIT, x), low, key=abs)",
        "return max(min(x, LIMIT), low)",
    } <= changes()


def test_docstrings_messages_and_types_stay():
    for line in changes():
        assert not line.startswith(('"""', "raise", "from"))
        assert "int | None" in line or "def " not in line


def test_draws_are_the_same_for_a_seed():
    paths = ["src/itrloss/engine/related.py"]
    first, second, other = (
        [mutant.diff() for mutant in mutants.drawn(paths, 5, seed)] for seed in (1, 1, 2)
    )
    assert first == second != other
    assert all(first)


def test_tests_of_a_module_exist():
    paths = mutants.modules(["src/itrloss"])
    assert len(paths) > 50
    for path in paths:
        for place in mutants.tests_of(path):
            assert (mutants.ROOT / place).exists(), place


def test_a_mistake_is_noticed(tmp_path: Path):
    """In a checkout of one module and one test."""
    test = tmp_path / "test_sum.py"
    test.write_text("def test_sum():\n    assert 1 + 1 == 2\n")
    assert mutants.notices(tmp_path, ["test_sum.py"]) is None
    test.write_text("def test_sum():\n    assert 1 - 1 == 2\n")
    assert "test_sum" in str(mutants.notices(tmp_path, ["test_sum.py"]))
