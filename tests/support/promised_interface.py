"""The public interface as text: names, arguments, defaults, and the command line's options."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from typer.main import get_command

from itrloss.cli.commands import app

MODULES = [
    "itrloss",
    "itrloss.compat",
    "itrloss.distributed",
    "itrloss.functional",
    "itrloss.losses",
    "itrloss.metrics",
    "itrloss.rerank",
    "itrloss.terms",
    "itrloss.testing",
    "itrloss.integrations.open_clip",
    "itrloss.integrations.pytorch_metric_learning",
    "itrloss.integrations.sentence_transformers",
    "itrloss.integrations.transformers",
]


def listing() -> str:
    """Return a line for each public name, member and option.

    A name that several modules have is described once.
    """
    lines: list[str] = []
    described: dict[int, str] = {}  # where a class or a function was described
    for name in MODULES:
        module = importlib.import_module(name)
        for key in public_names(module):
            path = f"{name}.{key}"
            value = getattr(module, key)
            first = described.setdefault(id(value), path)
            if first != path:
                lines.append(f"{path} is {first}")
            else:
                lines += describe(path, value)
    lines += command_line()
    return "\n".join(lines) + "\n"


def public_names(module: ModuleType) -> list[str]:
    """Return ``__all__``, or the classes and functions that the module defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    names = []
    for name, value in vars(module).items():
        defined = inspect.isclass(value) or inspect.isfunction(value)
        if defined and not name.startswith("_") and value.__module__ == module.__name__:
            names.append(name)
    return sorted(names)


def describe(path: str, value: Any) -> Iterator[str]:
    """Yield the lines of a name."""
    if isinstance(value, ModuleType):
        yield f"module {path}"
    elif inspect.isclass(value) and issubclass(value, Exception):
        yield f"exception {path}"
    elif inspect.isclass(value):
        yield f"class {path}{arguments(value)}"
        for member in members(value):
            yield f"    .{member}"
    elif callable(value):
        yield f"{path}{arguments(value)}"
    else:
        yield f"{path} = {value!r}"


def members(cls: type) -> Iterator[str]:
    """Yield the public members of a class that the library defines."""
    own = {}
    for owner in cls.__mro__:
        if owner.__module__.startswith("itrloss"):
            own |= vars(owner)
    for name in sorted(own):
        if name.startswith("_"):
            continue
        member = inspect.getattr_static(cls, name)
        if inspect.isfunction(member):
            yield name + arguments(member, bound=True)
        elif isinstance(member, (classmethod, staticmethod)):
            yield name + arguments(getattr(cls, name))
        else:
            yield name


def arguments(function: Callable[..., Any], bound: bool = False) -> str:
    """Return arguments and defaults, without types, which Python's versions write differently."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[int(bound) :]
    plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    text = str(inspect.Signature(plain))
    return re.sub(r" at 0x\w+", "", text)


def command_line() -> Iterator[str]:
    """Yield the options of each command."""
    for name, command in get_command(app).commands.items():
        yield f"$ itrloss {name}"
        for parameter in command.params:
            facts = [", ".join(parameter.opts)]
            if parameter.required:
                facts.append("required")
            if parameter.default is not None:
                facts.append(f"default={parameter.default!r}")
            yield "    " + " ".join(facts)
