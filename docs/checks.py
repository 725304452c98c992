"""A Sphinx extension: the list of the checks of ``itrloss.testing``, and the table of other
libraries' losses.
"""

import json
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from itrloss.testing.registry import CHECKS

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "conformance.json"
GROUPS = {
    "transformations": "After these transformations the value and the gradients are the same",
    "properties": "Values, gradients, unusual batches, rounding, memory and processes",
}


class LossChecks(Directive):
    """``.. loss-checks::`` lists the checks by module, with their docstrings."""

    def run(self):
        lines = []
        for module, title in GROUPS.items():
            lines += ["", f"**{title}**", ""]
            for name, check in CHECKS.items():
                if check.function.__module__.endswith("." + module):
                    lines += [
                        f"``{name}``",
                        *(f"   {line}" for line in check.about.splitlines()),
                        "",
                    ]
        return parsed(self, lines)


class ConformanceTable(Directive):
    """``.. conformance-table::`` tells which checks each loss of the results failed."""

    def run(self):
        results = json.loads(RESULTS.read_text(encoding="utf-8"))
        lines = [
            ".. list-table::",
            "   :header-rows: 1",
            "   :widths: 35 65",
            "",
            "   * - loss, package",
            "     - failed",
        ]
        for row in results["rows"]:
            names = [f"``{name}``" for name in row.get("failed", ()) if name in CHECKS]
            failed = ", ".join(names) or "none"
            lines += [f"   * - {row['loss']} ({row['package']})"]
            lines += [f"     - {row.get('error', failed)}"]
        return parsed(self, lines)


def parsed(directive, lines):
    """Return the nodes of lines of reStructuredText."""
    node = nodes.container()
    directive.state.nested_parse(StringList(lines, source=__file__), directive.content_offset, node)
    return node.children


def setup(app):
    """Register the extension."""
    app.add_directive("loss-checks", LossChecks)
    app.add_directive("conformance-table", ConformanceTable)
    return {"parallel_read_safe": True}
