"""What later versions keep: names, values and checkpoints. ``make promises`` stores those of this
version.

Values are compared to a relative and absolute 1e-9, which leaves room for sums in another order on
other processors and with other versions of PyTorch.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from promised_names import MODULES, listing, public
from promised_states import outcome, states
from promised_values import APART, cases, record

import itrloss

HOME = Path(__file__).parent / "promises"
NAMES, VALUES, STATES = (
    HOME / "names.txt",
    HOME / "values.json",
    HOME / f"states-{itrloss.__version__}.pt",
)
# Bases; what needs several processes, files or FAISS, and has its own tests; and classes of
# results.
WITHOUT_VALUES = {
    "Anchors",
    "PairLoss",
    "MemoryLoss",
    "rerank.Reranker",
    "rerank.BiasedIndex",
    "distributed.gather",
}
WITHOUT_VALUES |= {
    "comparison.compare_rerankers",
    "comparison.table",
    "comparison.protocol_table",
    "rerank.Reranked",
}
WITHOUT_VALUES |= {"testing.check_loss", "testing.loss_checks", "testing.ConformanceError"}
WITHOUT_VALUES |= {"files.read_ids", "files.read_lines", "files.read_matrix", "files.written"}


def close(a: Any, b: Any) -> bool:
    """Whether records are equal but for rounding."""
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(close, a, b))
    return (
        a == b
        if isinstance(a, str) or isinstance(b, str)
        else math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    )


def values() -> dict[str, Any]:
    found = {name: record(name, case) for name, case in cases()}
    return dict(sorted(found.items()))


@pytest.fixture(scope="module")
def now() -> dict[str, Any]:
    return values()


def test_names_arguments_and_defaults():
    assert listing().splitlines() == NAMES.read_text(encoding="utf-8").splitlines()


def test_values_and_gradients(now):
    promised = json.loads(VALUES.read_text(encoding="utf-8"))
    computed = {name: x for name, x in now.items() if x is not None}
    changed = {
        name
        for name in promised.keys() & computed.keys()
        if not close(promised[name], computed[name])
    }
    assert not changed
    assert promised.keys() == computed.keys()


def test_everything_public_has_values(now):
    owners = {re.split(r"[( ]", name)[0] for name in now} | APART | WITHOUT_VALUES
    paths: dict[Any, set[str]] = {}  # of functions and classes
    for module_name, module in MODULES.items():
        for name in public(module):
            x = getattr(module, name)
            result = hasattr(x, "_fields") or (
                dataclasses.is_dataclass(x) and not issubclass(x, torch.nn.Module)
            )
            if inspect.isfunction(x) or (inspect.isclass(x) and not result):
                paths.setdefault(x, set()).add(f"{module_name}.{name}".removeprefix("itrloss."))
    missing = [
        names
        for names in paths.values()
        if not names & owners and not min(names).startswith("terms.")
    ]
    assert not missing


def test_every_value_of_every_option_is_accepted_somewhere(now):
    option = re.compile(r"\w+=(?:'.*?'|\(.*?\)|[^,)]+)")
    seen: dict[bool, set[tuple[str, str]]] = {False: set(), True: set()}
    for name, x in now.items():
        owner, *rest = name.split("(", 1)
        seen[x is None] |= {(owner, text) for text in option.findall(rest[0])} if rest else set()
    assert seen[True] - seen[False] == set()


@pytest.mark.parametrize("path", sorted(HOME.glob("states-*.pt")), ids=lambda path: path.stem)
def test_checkpoints(path):
    saved = torch.load(path, weights_only=True)
    assert path != STATES or saved.keys() == states().keys()
    for name, (state, promised) in saved.items():
        assert close(promised, outcome(name, state)), name


def store() -> None:
    """Write names and values, and those states that this version does not have yet; older ones are
    never changed.
    """
    NAMES.write_text(listing(), encoding="utf-8")
    lines = (
        f"{json.dumps(k)}: {json.dumps(x, ensure_ascii=False)}"
        for k, x in values().items()
        if x is not None
    )
    VALUES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    saved = torch.load(STATES, weights_only=True) if STATES.exists() else {}
    new = {
        name: (state, outcome(name, state)) for name, state in states().items() if name not in saved
    }
    if new:
        torch.save(saved | new, STATES)


if __name__ == "__main__":
    torch.set_num_threads(1)
    store()
