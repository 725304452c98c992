"""Small random mistakes in the library, one at a time, and whether the tests notice them.

``python tests/mutants.py [FILES] --count 20 --seed 0`` changes one operator, number, argument,
condition or statement of a module in a copy of the checkout, runs the tests of that module, and
prints the changes that no test noticed. Without FILES it takes the modules that differ from
``--since``. A survivor is a missing test, code that nothing needs, or a change that changes
nothing.

Docstrings, messages of errors, type hints and assertions stay as they are.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/itrloss")
TIMEOUT = 600.0  # seconds for the tests of a mutant

# Tests of a module or a package, from the nearest on. Others have ``tests/NAME`` or
# ``tests/test_NAME.py``.
SPINE = "tests/test_random_cases.py"
EVALUATIONS = "tests/metrics/test_random_evaluations.py"
LOSSES = [SPINE, "tests/losses"]
CORE = [SPINE, "tests/engine", "tests/losses", "tests/test_similarity.py"]
TESTS = {
    "losses/telemetry": ["tests/test_telemetry.py"],
    "losses": LOSSES,
    "training/grad_cache": ["tests/test_grad_cache.py"],
    "training/graphed": ["tests/test_graphed.py"],
    "engine/triton": ["tests/engine/test_triton_random.py", "tests/engine"],
    "engine/kernels": ["tests/engine/test_triton_random.py", "tests/engine"],
    "engine/sets": ["tests/losses/test_late_interaction.py", "tests/engine"],
    "engine/ranking": [EVALUATIONS, *CORE],
    "engine": CORE,
    "anchors": CORE,
    "similarity": [*CORE, "tests/distributed"],
    "engine/related": [*CORE, "tests/test_input_forms.py"],
    "distributed": [SPINE, "tests/distributed", "tests/losses"],
    "functional": LOSSES,
    "memory": ["tests/test_memory.py", "tests/test_momentum_encoder.py", *LOSSES],
    "sets": LOSSES,
    "checks/warnings": ["tests/test_warnings.py"],
    "checks/options": ["tests/test_options.py", "tests/losses/test_losses.py"],
    "checks": ["tests/test_options.py", "tests/test_messages.py", "tests/test_input_forms.py"],
    "files": ["tests/cli"],
    "metrics": [EVALUATIONS, "tests/metrics"],
    "rerank": [EVALUATIONS, "tests/rerank"],
    "cli": ["tests/cli", "tests/rerank"],
}

OPERATORS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
    ast.BitAnd: ast.BitOr,
    ast.And: ast.Or,
}
OPERATORS |= {other: operator for operator, other in OPERATORS.items()}
OPERATORS |= dict.fromkeys((ast.FloorDiv, ast.Mod, ast.Pow), ast.Mult)
OPPOSITES = {
    "min": "max",
    "amin": "amax",
    "minimum": "maximum",
    "clamp_min": "clamp_max",
    "any": "all",
    "sum": "mean",
    "zeros": "ones",
    "zeros_like": "ones_like",
}
OPPOSITES |= {other: name for name, other in OPPOSITES.items()}


@dataclass
class Mutant:
    """A change of one place of a module."""

    path: str
    module: ast.Module
    parent: ast.AST
    field: str
    index: int | None  # of a list
    old: ast.AST
    new: ast.AST

    @property
    def line(self) -> int:
        return self.old.lineno  # type: ignore

    def put(self, node: ast.AST) -> None:
        """Put a node into the place."""
        if self.index is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.index] = node

    def text(self) -> str:
        """Return the module with the change, and without comments."""
        self.put(self.new)
        text = ast.unparse(ast.fix_missing_locations(self.module))
        self.put(self.old)
        return text + "\n"

    def diff(self) -> str:
        """Return the lines that change; empty if it is the same program."""
        before = ast.unparse(self.module).splitlines()
        lines = difflib.unified_diff(before, self.text().splitlines(), lineterm="", n=0)
        return "\n".join(list(lines)[3:])


def mutants(path: str, source: str) -> Iterator[Mutant]:
    """Yield all mutants of a module."""
    module = ast.parse(source)
    for parent, field, index, node in places(module):
        for new in changes(node):
            yield Mutant(path, module, parent, field, index, node, new)


def places(parent: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, ast.AST]]:
    """Yield the nodes below one with their places, but for those that stay and type hints."""
    for name, value in ast.iter_fields(parent):
        if name in ("annotation", "returns"):
            continue
        nodes = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, node in nodes:
            if isinstance(node, ast.AST) and not stays(node):
                yield parent, name, index, node
                yield from places(node)


def changed(node: ast.AST, **fields: object) -> ast.AST:
    """Return a copy of a node with other fields."""
    new = copy.copy(node)
    vars(new).update(fields)
    return new


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of a node."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield changed(node, ops=[OPERATORS[type(node.ops[0])]()])
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OPERATORS:
        yield changed(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Constant):
        yield from changed_constants(node)
    elif isinstance(node, ast.Call):
        yield from changed_calls(node)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield changed(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.AugAssign | ast.Expr):
        yield ast.Pass()


def changed_constants(node: ast.Constant) -> Iterator[ast.AST]:
    """Yield another number, or the other truth value."""
    value = node.value
    if isinstance(value, bool):
        yield changed(node, value=not value)
    elif isinstance(value, int):
        yield changed(node, value=0 if value == 1 else value + 1)
    elif isinstance(value, float):
        yield changed(node, value=2 * value or 1.0)


def changed_calls(node: ast.Call) -> Iterator[ast.AST]:
    """Yield the opposite function, its arguments swapped, and one left out."""
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr in OPPOSITES:
        yield changed(node, func=changed(function, attr=OPPOSITES[function.attr]))
    if isinstance(function, ast.Name) and function.id in OPPOSITES:
        yield changed(node, func=changed(function, id=OPPOSITES[function.id]))
    if len(node.args) > 1 and not any(isinstance(x, ast.Starred) for x in node.args[:2]):
        first, second, *others = node.args
        yield changed(node, args=[second, first, *others])
    if node.keywords and node.keywords[0].arg != "strict":
        yield changed(node, keywords=node.keywords[1:])


# They have no effect that a test should see: messages, types, and checks of what cannot be.
STAY = ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom
CALLS_THAT_STAY = "isinstance", "cast", "TypeVar", "warnings.warn"


def stays(node: ast.AST) -> bool:
    """Return whether nothing in a node is changed."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)  # a docstring
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in CALLS_THAT_STAY
    if isinstance(node, ast.keyword):
        return node.arg == "strict"  # of zip
    if isinstance(node, ast.BinOp):
        return ast.unparse(node.right) == "None"  # a type
    return isinstance(node, STAY)


def tests_of(path: str) -> list[str]:
    """Return the tests of a module, from the nearest on."""
    name = Path(path).relative_to(SOURCE).with_suffix("").as_posix()
    for prefix in (name, name.split("/")[0]):
        if prefix in TESTS:
            return TESTS[prefix]
        near = [f"tests/{prefix}", f"tests/test_{prefix}.py"]
        existing = [place for place in near if (ROOT / place).exists()]
        if existing:
            return existing
    return ["tests"]


def git(*arguments: str) -> list[str]:
    """Return the lines that a command of git prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def changed_since(commit: str) -> list[str]:
    """Return the modules that differ from a commit."""
    names = git("diff", "--name-only", commit, "--", str(SOURCE))
    return [name for name in names if name.endswith(".py") and (ROOT / name).exists()]


def modules(names: list[str]) -> list[str]:
    """Return the modules of files and folders."""
    found = []
    for name in names:
        path = (ROOT / name).resolve()
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        found += [file.relative_to(ROOT).as_posix() for file in files]
    return found


def drawn(paths: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants that are other programs, each place with the same probability."""
    every: list[Mutant] = []
    for path in paths:
        every += mutants(path, (ROOT / path).read_text(encoding="utf-8"))
    random.Random(seed).shuffle(every)
    return list(itertools.islice(filter(Mutant.diff, every), count))


def copied(folder: str) -> Path:
    """Copy the files of the checkout, as they are now, and return where they are."""
    checkout = Path(folder) / "checkout"
    for name in git("ls-files", "--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    return checkout


def notices(folder: Path, tests: list[str], *options: str) -> str | None:
    """Return the first test that fails, or another reason, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *options, *tests],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return "they do not end"
    if done.returncode == 0:
        return None
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return line
    return f"pytest's exit status {done.returncode}"


def survives(mutant: Mutant, folder: Path, tests: list[str] | None, *options: str) -> bool:
    """Run the tests of a module with a change in it, and print which one notices."""
    file = folder / mutant.path
    source = file.read_bytes()
    begin = time.monotonic()
    file.write_text(mutant.text(), encoding="utf-8")
    reason = notices(folder, tests or tests_of(mutant.path), *options)
    file.write_bytes(source)
    print(f"  {reason or 'survived'} ({time.monotonic() - begin:.0f} s)", flush=True)
    return reason is None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    add = made.add_argument
    add("files", nargs="*", help="modules or folders of src")
    add("--since", default="HEAD", help="a commit; default: HEAD")
    add("--count", type=int, default=20, help="number of mutants; default: 20")
    add("--seed", type=int, default=0)
    add("--tests", nargs="+", help="in place of those of each module")
    add("--thorough", action="store_true", help="all cases, not those of --fast")
    add("--only", type=int, nargs="+", help="numbers of the mutants that are run")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the number of survivors."""
    args = parser().parse_args(arguments)
    paths = modules(args.files) if args.files else changed_since(args.since)
    chosen = dict(enumerate(drawn(paths, args.count, args.seed)))
    if args.only:
        chosen = {number: chosen[number] for number in args.only}
    options = [] if args.thorough else ["--fast"]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        checkout = copied(folder)
        for number, mutant in chosen.items():
            print(f"{number}: {mutant.path}:{mutant.line}\n{mutant.diff()}", flush=True)
            survivors += survives(mutant, checkout, args.tests, *options)
    print(f"{len(chosen)} mutants, {survivors} survived")
    return survivors


if __name__ == "__main__":
    sys.exit(min(main(), 1))
