"""The architecture: imports between layers, lengths of modules, the cost of an import, function
calls per loss.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import itrloss

HOME = Path(itrloss.__file__).parent
# The layers from the bottom up: a module imports from its own layer and those below.
FLOORS = [
    {"hints", "checks", "files"},
    {"engine"},
    {"suspicious"},
    {"distributed"},
    {"anchors", "terms", "related"},
    {"batch_parts"},
    {"similarity"},
    {
        "functional",
        "sets",
        "memory",
        "kmeans",
        "metrics",
        "rerank",
        "telemetry",
        "grad_cache",
        "mining",
    },
    {"losses", "compat"},
    {"comparison", "tables", "report", "testing", "integrations"},
    {"cli"},
]
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
MODULES = {
    ".".join(path.relative_to(HOME).with_suffix("").parts).removesuffix(".__init__"): path
    for path in HOME.rglob("*.py")
    if path != HOME / "__init__.py"
}


def test_the_package_holds_no_benchmarks():
    """Benchmarks are run from a checkout, and only ``src`` is packaged."""
    settings = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert '[tool.setuptools.packages.find]\nwhere = ["src"]\n' in settings
    assert not [name for name in MODULES if "bench" in name]
    assert not [
        name
        for name, path in MODULES.items()
        if re.search(r"^\s*(from|import) bench", path.read_text(), re.M)
    ]


def imports(name: str) -> set[str]:
    """Modules of the library that a module imports anywhere in its code, except for type
    checkers.
    """
    path = MODULES[name]
    package = ("itrloss." + name).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = [ast.Pass()]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            # The import of a package counts for its modules, that of a name for its module.
            found |= {
                f"{module}.{a.name}" if f"{module}.{a.name}"[8:] in MODULES else module
                for a in node.names
            }
    return {x.removeprefix("itrloss.") for x in found if x.startswith("itrloss.")} & {*MODULES} - {
        name
    }


def test_every_module_has_its_floor():
    assert {name.split(".")[0] for name in MODULES} <= set(FLOOR) | {"__main__"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_nothing_is_imported_from_above(name):
    above = {x for x in imports(name) if FLOOR[x.split(".")[0]] > FLOOR.get(name.split(".")[0], 99)}
    assert not above


COMPOSED = ["infonce", "matryoshka", "robust", "supervised"]


@pytest.mark.parametrize("name", COMPOSED)
def test_losses_are_written_as_those_of_users(name):
    """They ask anchors, in few lines, and know nothing of the engine, but whether arguments can be
    looked at.
    """
    module = f"losses.{name}"
    assert {x for x in imports(module) if x.startswith("engine")} <= {"engine.vectors"}
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == "compute":
            body = node.body[isinstance(node.body[0], ast.Expr) :]  # without a docstring
            assert body[-1].end_lineno - body[0].lineno < 15, node.lineno  # type: ignore


def test_imports_go_round_in_no_circle():
    left = {name: imports(name) - {name.split(".")[0]} for name in MODULES}
    while free := {name for name, needs in left.items() if not needs & left.keys()}:
        left = {name: needs for name, needs in left.items() if name not in free}
    assert not left


def test_no_operators_are_registered():
    names = torch._C._dispatch_get_all_op_names()
    assert not [name for name in names if name.startswith("itrloss::")]


def test_an_import_brings_no_compiler_along():
    """Importing the compiler takes about a second."""
    code = """
import sys, torch
before = set(sys.modules)
import itrloss
print(*(name for name in sys.modules if name not in before))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    heavy = ("torch._dynamo", "torch._inductor", "triton", "sympy", "matplotlib", "torch._export")
    heavy += ("transformers", "sentence_transformers", "pytorch_metric_learning", "open_clip")
    assert not [name for name in found if name.startswith(heavy)]


COMPREHENSIONS = {"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"}


def functions(call) -> set[tuple[str, str]]:
    """Files and names of the library's functions that are called, without comprehensions."""
    found = set()
    home = str(HOME)

    def note(frame, event, _):
        code = frame.f_code
        inside = code.co_filename.startswith(home) and code.co_name not in COMPREHENSIONS
        if event == "call" and inside:
            found.add(
                (
                    code.co_filename,
                    code.co_qualname if hasattr(code, "co_qualname") else code.co_name,
                )
            )

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_a_loss_takes_few_functions_in_few_files():
    """What a reader has to follow, from the call of a loss to the line that sums exponentials."""
    v, w = (torch.randn(16, 8, requires_grad=True) for _ in range(2))
    loss = itrloss.DiversityContrastiveLoss()
    loss(v, w).backward()  # the first call imports modules and fills caches
    seen = functions(lambda: loss(v, w))
    assert len({name for _, name in seen}) <= 135
    assert len({file for file, _ in seen}) <= 18
