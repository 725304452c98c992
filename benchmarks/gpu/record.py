"""The record of a slot: a JSON file, benchmarks/results/gpu_DEVICE_slotK.json once committed."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from itrloss.files import written

Row = dict[str, Any]
LISTS = "steps", "goals", "figures"


@dataclass
class Record:
    """What one slot found on one device."""

    slot: int | None  # None: chosen steps
    dry: bool  # toy sizes on a CPU
    device: str = "unknown"  # as the driver calls it, such as "NVIDIA H100 80GB HBM3"
    capability: str | None = None  # of CUDA's programming model, such as "9.0"
    torch: str | None = None
    triton: str | None = None
    cuda: str | None = None  # the version that PyTorch was built for
    driver: str | None = None
    python: str | None = None
    itrloss: str | None = None
    commit: str | None = None  # of the checkout, where Git is there
    engine: str | None = None  # `benchmarks.sources.code_digest` of the engine
    date: str | None = None  # of ISO 8601
    #: Whether every case of the step "correct" agreed with float64; None: it was not asked for.
    correct: bool | None = None
    #: name, limit and seconds, and the exit status "rc" (124: took too long); or why "skipped".
    steps: list[Row] = field(default_factory=list)
    goals: list[Row] = field(default_factory=list)  # see `benchmarks.gpu.goals`
    figures: list[Row] = field(default_factory=list)  # what was measured; "step" says by which step

    @property
    def name(self) -> str:
        """The name of the file."""
        device = "dry" if self.dry else re.sub(r"[^a-z0-9]+", "_", self.device.lower()).strip("_")
        slot = "steps" if self.slot is None else f"slot{self.slot}"
        return f"gpu_{device}_{slot}.json"

    def failures(self) -> list[str]:
        """Return the names of the steps that failed, took too long, or had no time."""
        return [step["name"] for step in self.steps if step.get("rc", 0) != 0 or "left" in step]


def save(record: Record, path: Path) -> None:
    """Write a record; an existing file is replaced once all is written."""
    parts: list[str] = []
    values: dict[str, Any] = dataclasses.asdict(record)
    for key, value in values.items():
        if key in LISTS:
            rows = ",\n".join("  " + as_json(row) for row in value)
            parts.append(f' "{key}": [\n{rows}\n ]')
        else:
            parts.append(f' "{key}": {as_json(value)}')
    with written(path) as file:
        file.write("{\n" + ",\n".join(parts) + "\n}\n")


def load(path: Path) -> Record:
    """Return the record in a file.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    fields = {x.name for x in dataclasses.fields(Record)}
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.keys() != fields:
        raise ValueError(f"{path}: expected an object with {', '.join(sorted(fields))}")
    record = Record(**found)
    if record.correct not in (True, False, None):
        raise ValueError(f"{path}: correct: expected true, false or null, got {record.correct!r}")
    for key in LISTS:
        rows = found[key]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError(f"{path}: {key}: expected a list of objects")
    return record


def as_json(value: Any) -> str:
    """Return JSON on one line; numbers that JSON does not know become text, such as "nan"."""
    return json.dumps(finite(value), allow_nan=False)


def finite(value: Any) -> Any:
    """Return a value of lists, dictionaries and scalars in which every number is finite."""
    if isinstance(value, dict):
        return {str(key): finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
