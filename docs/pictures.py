"""Pictures that the build draws itself, once in the ink of a light page and once in that of a dark
one.
"""

import contextlib
import importlib
import io
import os
import tempfile
from pathlib import Path
from types import ModuleType

import matplotlib
import matplotlib.pyplot as plt
from docutils import nodes
from matplotlib.figure import Figure
from sphinx.util.docutils import SphinxDirective

INK = {"light": "#20242b", "dark": "#d8dce3"}
STYLE = {
    **dict.fromkeys(
        (
            "text.color",
            "axes.labelcolor",
            "axes.edgecolor",
            "axes.titlecolor",
            "xtick.color",
            "ytick.color",
        ),
        INK["light"],
    ),
    "axes.prop_cycle": matplotlib.cycler(
        color=["#3a86c8", "#e0783c", "#42a874", "#b46ac2", "#c7a12b", "#8b919c"]
    ),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "figure.constrained_layout.use": True,
    "figure.figsize": (6.4, 3.6),
    "font.size": 10,
    "legend.frameon": False,
    "savefig.transparent": True,
    "svg.hashsalt": "itrloss",
}


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write name-light.svg and name-dark.svg."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    plt.close(figure)
    folder.mkdir(parents=True, exist_ok=True)
    for theme, ink in INK.items():
        drawn = text.getvalue().replace(INK["light"], ink)
        (folder / f"{name}-{theme}.svg").write_text(drawn, encoding="utf-8")


class Drawn(SphinxDirective):
    """What the directives share: where pictures go, and how a page shows them."""

    has_content = True

    @property
    def folder(self) -> Path:
        return Path(self.env.srcdir) / "_build" / "pictures"

    def images(self, name: str, alt: str) -> list[nodes.Node]:
        uri = "/" + (self.folder / name).relative_to(self.env.srcdir).as_posix()
        return [
            nodes.image(uri=f"{uri}-{theme}.svg", alt=alt, classes=[f"only-{theme}"])
            for theme in INK
        ]

    def row(self, module: ModuleType, name: str, alt: str, *args: str) -> nodes.container:
        """Return the pictures that ``module.figures(*args)`` draws, side by side; their titles
        complete ``alt``.
        """
        self.env.note_dependency(str(module.__file__))
        row = nodes.container(classes=["pictures"])
        with plt.rc_context(STYLE):
            for i, figure in enumerate(module.figures(*args)):
                save(figure, self.folder, f"{name}-{i}")
                row += self.images(f"{name}-{i}", f"{alt}: {figure.axes[0].get_title()}")
        return row


class Picture(Drawn):
    """``.. picture:: MODULE NAME`` shows what ``figures(NAME)`` of a module of this folder draws.

    The module's ``ALT`` describes its pictures, and its ``LEGEND``, if any, is shown below them.
    The content says what to see.
    """

    required_arguments = 1
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        if self.env.app.builder.format != "html":
            return []
        module = importlib.import_module(self.arguments[0])
        shown = [self.row(module, "-".join(self.arguments), module.ALT, *self.arguments[1:])]
        if hasattr(module, "LEGEND"):
            shown.append(nodes.paragraph("", module.LEGEND, classes=["legend"]))
        return [*shown, *self.parse_content_to_nodes()]


class Gallery(Drawn):
    """``.. gallery:: scripts`` runs those of a folder which are named in the content, and shows
    them in that order.

    A script's docstring has its title, and what it shows. It leaves one picture, and may print.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        if self.env.app.builder.format != "html":
            return []
        thumbnails, found = nodes.container(classes=["thumbnails"]), []
        for name in self.content:
            path = (Path(self.env.srcdir) / self.arguments[0] / f"{name}.py").resolve()
            self.env.note_dependency(str(path))
            section = self.example(path)
            found.append(section)
            link = nodes.reference("", "", internal=True, refid=section["ids"][0])
            link += [*self.images(name, ""), nodes.inline("", section[0].astext())]
            thumbnails += nodes.paragraph("", "", link)
        return [thumbnails, *found]

    def example(self, path: Path) -> nodes.section:
        _, docstring, code = path.read_text(encoding="utf-8").split('"""', 2)
        title, text = docstring.split("\n", 1)
        section = nodes.section(
            "", nodes.title("", title.rstrip(".")), ids=[nodes.make_id(path.stem)]
        )
        section += self.parse_text_to_nodes(text)
        section += [*self.images(path.stem, title)]
        code, printed = code.strip(), self.execute(path)
        section += nodes.literal_block(code, code, language="python3")
        if printed:
            section += nodes.literal_block(printed, printed, language="text", classes=["printed"])
        return section

    def execute(self, path: Path) -> str:
        """Run a script, save its picture and return what it printed."""
        with plt.rc_context(STYLE):
            (printed,) = outputs([path.read_text(encoding="utf-8")], path)
            save(plt.gcf(), self.folder, path.stem)
        return printed


class Walkthrough(SphinxDirective):
    """``.. walkthrough:: tutorial.py`` shows a script in parts: the comment with which a part
    begins as text, the code, and what it printed.

    A part begins with ``# %%``, as a cell does in editors. The script's docstring comes first.
    """

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        if self.env.app.builder.format != "html":
            return []
        path = (Path(self.env.srcdir) / self.arguments[0]).resolve()
        self.env.note_dependency(str(path))
        _, docstring, code = path.read_text(encoding="utf-8").split('"""', 2)
        _, text = docstring.split("\n", 1)
        lines = text.splitlines()
        _, *parts = code.split("# %%\n")
        for part, printed in zip(parts, outputs(parts, path), strict=True):
            comment, code = split_comment(part)
            lines += ["", *comment]
            lines += literal("python3", code)
            lines += literal("text", printed, ":class: printed")
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def split_comment(part: str) -> tuple[list[str], str]:
    """Return the lines of the comment at the beginning of a part, and the code below."""
    lines = part.splitlines()
    at = 0
    while at < len(lines) and lines[at].startswith("#"):
        at += 1
    return [line.removeprefix("#").removeprefix(" ") for line in lines[:at]], "\n".join(lines[at:])


def literal(language: str, text: str, *options: str) -> list[str]:
    """Return the lines of reStructuredText of a literal block; none of an empty one."""
    shown = text.strip("\n").splitlines()
    if not shown:
        return []
    head = [f".. code-block:: {language}", *(f"   {option}" for option in options)]
    return ["", *head, "", *(f"   {line}" for line in shown), ""]


def outputs(parts: list[str], path: Path) -> list[str]:
    """Run the parts of a script one after the other, in a folder of their own, and return what
    each printed.
    """
    names, printed, before = {"__name__": "__main__"}, [], os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for part in parts:
                text = io.StringIO()
                with contextlib.redirect_stdout(text):
                    exec(compile(part, path, "exec"), names)
                printed.append(text.getvalue().rstrip())
        finally:
            os.chdir(before)
    return printed


def setup(app):
    matplotlib.use("svg")
    app.add_directive("picture", Picture)
    app.add_directive("gallery", Gallery)
    app.add_directive("walkthrough", Walkthrough)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
