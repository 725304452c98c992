"""The public interface as text: names, arguments, defaults, and the command line's options."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any, get_args
from unittest import mock

from torch import nn

import itrloss.cli
import itrloss.integrations
from itrloss.anchors import Hardest, MeanStd
from itrloss.similarity import TopK

# Those of the reference pages.
NAMES = "", "functional", "losses", "memory", "metrics", "rerank", "compat", "distributed", "terms"
MODULES = {
    name: importlib.import_module(name)
    for name in (
        ".".join(filter(None, ("itrloss", part)))
        for part in (*NAMES, "telemetry", "testing", "comparison", "files")
    )
}
# public as the types of results, although no public module has them
RESULTS = (TopK, Hardest, MeanStd)


def public(module: ModuleType) -> list[str]:
    """``__all__``; without one, classes, functions and unions of types, defined there or imported
    as ``x as x``.
    """
    if hasattr(module, "__all__"):
        return sorted(
            {*module.__all__, *(["RetrievalMetrics"] if module is itrloss.metrics else [])}
        )
    names: list[str] = []
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom):
            names += [x.name for x in node.names if x.asname == x.name]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [
                x.id
                for x in node.targets
                if isinstance(x, ast.Name) and get_args(getattr(module, x.id))
            ]
    return sorted(name for name in names if not name.startswith("_"))


PUBLIC = {name for module in MODULES.values() for name in public(module)}


def arguments(function: Any, bound: bool = False) -> str:
    """Arguments and defaults, without types, which are written differently by different versions of
    Python.
    """
    parameters = list(inspect.signature(function).parameters.values())[bound:]
    text = str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))
    return re.sub(r" at 0x\w+", "", text)


def members(cls: type) -> Iterator[str]:
    """The members of a class that are no arguments of it: its own, and those it has from bases that
    are not public.
    """
    seen = {"__init__", *dir(nn.Module), *inspect.signature(cls).parameters} - {"forward"}
    for base in cls.__mro__:
        if base is not cls and (
            base.__name__ in PUBLIC or not base.__module__.startswith("itrloss")
        ):
            seen |= set(dir(base))
            continue
        for name in sorted({*vars(base), *inspect.get_annotations(base)} - seen):
            seen.add(name)
            value = inspect.getattr_static(base, name, None)
            if name.startswith("_") and name != "__len__":
                continue
            if isinstance(value, (classmethod, staticmethod)):
                yield name + arguments(getattr(cls, name))
            else:
                yield name + (arguments(value, bound=True) if inspect.isfunction(value) else "")


def described(path: str, x: Any) -> Iterator[str]:
    if inspect.isclass(x):
        bases = [
            base.__name__
            for base in x.__bases__
            if base.__name__ in PUBLIC | {"Module", "Metric", "tuple"}
        ]
        yield f"class {path}{arguments(x)}" + (f"  # {', '.join(bases)}" if bases else "")
        yield from (f"    .{line}" for line in members(x))
    else:
        yield path + (f" = {get_args(x)}" if get_args(x) else arguments(x))


def options() -> Iterator[str]:
    """The options of each command, as the parser has them that ``main`` uses."""
    with mock.patch.object(
        argparse.ArgumentParser, "parse_args", autospec=True, side_effect=InterruptedError
    ) as parse:
        try:
            itrloss.cli.main([])
        except InterruptedError:
            parser = parse.call_args.args[0]
    (commands,) = (x for x in parser._actions if isinstance(x, argparse._SubParsersAction))
    for command, its_parser in commands.choices.items():
        yield f"$ itrloss {command}"
        for x in its_parser._actions:
            facts = {
                "nargs": x.nargs,
                "default": x.default,
                "choices": x.choices and list(x.choices),
            }
            shown = [
                f"{name}={value!r}"
                for name, value in facts.items()
                if value not in (None, argparse.SUPPRESS)
            ]
            yield " ".join(
                ["   ", *(x.option_strings or [x.dest]), *["required"] * x.required, *shown]
            )


def listing() -> str:
    """Return a line for each name, member and option; a name that several modules have is described
    once.
    """
    lines: list[str] = []
    first: dict[int, str] = {}
    for name, module in MODULES.items():
        for key in public(module):
            path, x = f"{name}.{key}", getattr(module, key)
            if isinstance(x, ModuleType):
                lines.append(f"module {path}")
            elif first.setdefault(id(x), path) != path:
                lines.append(f"{path} is {first[id(x)]}")
            else:
                lines += described(path, x)
    for framework in itrloss.integrations.__all__:
        module = importlib.import_module(f"itrloss.integrations.{framework}")
        own = [x for key, x in sorted(vars(module).items()) if not key.startswith("_")]
        for x in own:
            if inspect.isclass(x) or inspect.isfunction(x):
                lines += (
                    described(f"{module.__name__}.{x.__name__}", x)
                    if x.__module__ == module.__name__
                    else []
                )
    for x in RESULTS:
        lines += described(f"{x.__module__}.{x.__name__}", x)
    return "\n".join([*lines, *options(), ""])
