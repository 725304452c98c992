"""A Sphinx extension: the list of the checks of ``itrloss.testing``."""

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

from itrloss.testing.registry import CHECKS

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


def parsed(directive, lines):
    """Return the nodes of lines of reStructuredText."""
    node = nodes.container()
    directive.state.nested_parse(StringList(lines, source=__file__), directive.content_offset, node)
    return node.children


def setup(app):
    """Register the extension."""
    app.add_directive("loss-checks", LossChecks)
    return {"parallel_read_safe": True}
