"""Transcripts of commands, each a line ``$ COMMAND`` above what it prints, in ``tests/stored``.

``...`` stands for any text, such as a time or the words of another library.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from support.stored import FOLDER, assert_stored


def replay(name: str, **programs: Callable[..., str]) -> None:
    """Run each command of a transcript, and compare what it prints.

    Commands begin with the name of their program, which is called with their other words.
    """
    head, *parts = re.split(r"^\$ ", (FOLDER / f"{name}.txt").read_text("utf-8"), flags=re.M)
    text = head
    for part in parts:
        command, _, expected = part.partition("\n")
        program, *words = shlex.split(command)
        said = re.sub(" +$", "", programs[program](*words), flags=re.M).strip("\n")
        pattern = re.escape(expected.strip("\n")).replace(r"\.\.\.", ".*")
        is_same = re.fullmatch(pattern, said, re.S)
        text += f"$ {command}\n" + (expected if is_same else f"{said}\n\n")
    assert_stored(name, text)


def printed(main: Callable[[list[str]], int | None], *words: str) -> str:
    """Return what a command prints, behind it its exit status if that is an error.

    A command that fails changes no file.
    """
    before = files()
    said, complaint = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complaint):
        try:
            status = main([*words])
        except SystemExit as ended:
            status = ended.code
    text = said.getvalue() + complaint.getvalue()
    if not status:
        return text
    assert files() == before, words
    return f"{text}exit status {status}"


def files() -> dict[Path, bytes]:
    """Return the files in the working directory, with their content."""
    return {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
