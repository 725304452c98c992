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
import difflib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = Path("src/itrloss")

# Tests of a module or a package, from the nearest on. Others have ``tests/NAME`` or
# ``tests/test_NAME.py``.
SPINE = "tests/test_random_cases.py"
LOSSES = [SPINE, "tests/losses"]
CORE = [SPINE, "tests/engine", "tests/losses", "tests/test_similarity.py"]
TESTS = {
    "losses": LOSSES,
    "engine/triton": ["tests/engine/test_triton_random.py", "tests/engine"],
    "engine/kernels": ["tests/engine/test_triton_random.py", "tests/engine"],
    "engine/sets": ["tests/losses/test_late_interaction.py", "tests/engine"],
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
    "cli": ["tests/cli", "tests/rerank"],
}

OPERATORS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.And: "or",
    ast.Or: "and",
}
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
    line: int
    start: int  # offsets in bytes
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        """Return the module with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        """Return the lines that change."""
        before = source.decode().splitlines()
        after = self.apply(source).decode().splitlines()
        lines = difflib.unified_diff(before, after, lineterm="", n=0)
        return "\n".join(list(lines)[3:])


class Places:
    """The places of a module that a mutant may change."""

    def __init__(self, path: str, source: bytes):
        self.path = path
        self.source = source
        self.lengths = [0]  # bytes up to the beginning of each line
        for line in source.splitlines(keepends=True):
            self.lengths.append(self.lengths[-1] + len(line))

    def start(self, node: ast.AST) -> int:
        """Return the offset where a node begins."""
        return self.lengths[node.lineno - 1] + node.col_offset  # type: ignore

    def end(self, node: ast.AST) -> int:
        """Return the offset where a node ends."""
        return self.lengths[node.end_lineno - 1] + node.end_col_offset  # type: ignore

    def text(self, node: ast.AST) -> str:
        """Return the source of a node."""
        return self.source[self.start(node) : self.end(node)].decode()

    def replaced(self, node: ast.AST, text: str) -> Mutant:
        """Return a mutant with another text in the place of a node."""
        start, end = self.start(node), self.end(node)
        return Mutant(self.path, node.lineno, start, end, text)  # type: ignore

    def between(self, left: ast.AST, right: ast.AST, operator: str) -> Mutant:
        """Return a mutant with another operator between two nodes; brackets around them stay."""
        start, end = self.end(left), self.start(right)
        brackets = [x for x in self.source[start:end].decode() if x in "()"]
        closing = "".join(x for x in brackets if x == ")")
        opening = "".join(x for x in brackets if x == "(")
        text = f"{closing} {operator} {opening}"
        return Mutant(self.path, left.lineno, start, end, text)  # type: ignore

    def mutants(self) -> list[Mutant]:
        """Return all mutants of the module; some may be no Python."""
        found: list[Mutant] = []
        for node in mutable(ast.parse(self.source)):
            found += self.of(node)
        return found

    def of(self, node: ast.AST) -> Iterator[Mutant]:
        """Yield the mutants of one node."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = OPERATORS[type(node.ops[0])]
            yield self.between(node.left, node.comparators[0], operator)
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield self.between(node.left, node.right, OPERATORS[type(node.op)])
        elif isinstance(node, ast.BoolOp):
            yield self.between(node.values[0], node.values[1], OPERATORS[type(node.op)])
        elif isinstance(node, ast.UnaryOp):
            yield self.replaced(node, f"({self.text(node.operand)})")
        elif isinstance(node, ast.Constant):
            yield from self.of_constant(node)
        elif isinstance(node, ast.Call):
            yield from self.of_call(node)
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield self.replaced(node.test, f"(not ({self.text(node.test)}))")
        elif isinstance(node, ast.AugAssign | ast.Expr):
            yield self.replaced(node, "pass")

    def of_constant(self, node: ast.Constant) -> Iterator[Mutant]:
        """Yield another number, or the other truth value."""
        value = node.value
        if isinstance(value, bool):
            yield self.replaced(node, str(not value))
        elif isinstance(value, int):
            yield self.replaced(node, "0" if value == 1 else str(value + 1))
        elif isinstance(value, float):
            yield self.replaced(node, repr(2 * value or 1.0))

    def of_call(self, node: ast.Call) -> Iterator[Mutant]:
        """Yield the opposite function, its arguments swapped, and one left out."""
        function = node.func
        name = getattr(function, "id", None) or getattr(function, "attr", None)
        if name in OPPOSITES:
            before = self.text(function)[: -len(name)]
            yield self.replaced(function, before + OPPOSITES[name])
        if len(node.args) > 1 and not any(isinstance(x, ast.Starred) for x in node.args[:2]):
            first, second, *others = map(self.text, [*node.args, *node.keywords])
            arguments = ", ".join([second, first, *others])
            yield self.replaced(node, f"{self.text(function)}({arguments})")
        if node.keywords and node.keywords[0].arg != "strict":
            arguments = ", ".join(map(self.text, [*node.args, *node.keywords[1:]]))
            yield self.replaced(node, f"{self.text(function)}({arguments})")


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


def mutable(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those in it, but for those that stay and type hints."""
    if stays(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from mutable(child)


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


def is_a_change(mutant: Mutant) -> bool:
    """Return whether a mutant is Python, and another program than the module."""
    source = (ROOT / mutant.path).read_bytes()
    try:
        changed = ast.parse(mutant.apply(source))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def drawn(paths: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants, each place with the same probability."""
    every: list[Mutant] = []
    for path in paths:
        every += Places(path, (ROOT / path).read_bytes()).mutants()
    random.Random(seed).shuffle(every)
    return list(itertools.islice(filter(is_a_change, every), count))


def copied(folder: str) -> Path:
    """Copy the files of the checkout, as they are now, and return where they are."""
    copy = Path(folder) / "checkout"
    for name in git("ls-files", "--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


def notices(copy: Path, tests: list[str], options: list[str], timeout: float) -> str | None:
    """Return the first test that fails, or another reason, or None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *options, *tests],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return "they do not end"
    if done.returncode == 0:
        return None
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return line
    return f"pytest's exit status {done.returncode}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the number of survivors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="modules or folders of src")
    parser.add_argument("--since", default="HEAD", help="a commit; default: HEAD")
    parser.add_argument("--count", type=int, default=20, help="number of mutants; default: 20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="+", help="in place of those of each module")
    parser.add_argument("--thorough", action="store_true", help="all cases, not those of --fast")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each mutant")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the mutants that are run")
    parser.add_argument("--results", type=Path, help="a JSON file to write")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    options = parser.parse_args(arguments)
    paths = modules(options.files) if options.files else changed_since(options.since)
    mutants = drawn(paths, options.count, options.seed)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(folder)
        for number, mutant in enumerate(mutants):
            if options.only and number not in options.only:
                continue
            source = (copy / mutant.path).read_bytes()
            print(f"{number}: {mutant.path}:{mutant.line}\n{mutant.diff(source)}", flush=True)
            if options.list:
                continue
            begin = time.monotonic()
            (copy / mutant.path).write_bytes(mutant.apply(source))
            chosen = options.tests or tests_of(mutant.path)
            reason = notices(copy, chosen, [] if options.thorough else ["--fast"], options.timeout)
            (copy / mutant.path).write_bytes(source)
            seconds = round(time.monotonic() - begin)
            print(f"  {'survived' if reason is None else reason} ({seconds} s)", flush=True)
            results.append(
                {
                    **asdict(mutant),
                    "number": number,
                    "diff": mutant.diff(source),
                    "caught_by": reason,
                }
            )
            if options.results:
                options.results.write_text(json.dumps(results, indent=1))
    survivors = sum(result["caught_by"] is None for result in results)
    print(f"{len(results)} mutants, {survivors} survived")
    return survivors


if __name__ == "__main__":
    sys.exit(min(main(), 1))
