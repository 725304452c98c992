"""Which sources a record was measured with: the commit, and a digest of the engine's code."""

from __future__ import annotations

import ast
import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "src" / "itrloss" / "engine"
RECORDS = ROOT / "benchmarks" / "results"


def commit() -> str:
    """Return the commit of the checkout, with "-dirty" if a file but the records was changed; ""
    without Git.
    """
    git = "git", "-C", str(ROOT)
    number = output(*git, "describe", "--always", "--exclude=*")
    records = f":(exclude){RECORDS.relative_to(ROOT)}"
    changed = output(*git, "status", "--porcelain", "--untracked-files=no", "--", ".", records)
    return f"{number}-dirty" if changed else number


def output(*command: str) -> str:
    """Return what a program prints, "" if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def code_digest(folder: Path = ENGINE) -> str:
    """Return twelve hexadecimal digits that change with the code of a folder, not with its comments
    and docstrings.

    It needs no Git, so pages can tell whether the engine changed since a record was measured.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        for word in _words(ast.parse(path.read_text(encoding="utf-8"))):
            digest.update(word.encode())
    return digest.hexdigest()[:12]


def _words(node: ast.AST) -> Iterator[str]:
    """The names of all nodes and their values, without the empty fields that Pythons differ in."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring
    yield type(node).__name__
    for _, value in ast.iter_fields(node):
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.AST):
                yield from _words(part)
            elif part is not None:
                yield repr(part)
