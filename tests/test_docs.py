"""The documentation: equations without scripts, pages without network access, recipes for several
processes.
"""

import ast
import importlib
import re
import runpy
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.losses_registry import public_losses
from support.pages import BLOCK, DOCS, read
from support.processes import run
from support.stored import assert_stored
from support.versions import load, needs
from torch.utils._pytree import tree_flatten

import itrloss
from itrloss.engine.terms import Term

SOURCES = [*DOCS.rglob("*.rst"), *(DOCS.parent / "src").rglob("*.py")]
EQUATIONS = sorted({x for path in SOURCES for x in re.findall(r":math:`([^`]+)`", read(path))})


@pytest.fixture
def convert(monkeypatch):
    pytest.importorskip("latex2mathml")
    monkeypatch.syspath_prepend(str(DOCS))
    yield pytest.importorskip("mathml").convert
    sys.modules.pop("mathml", None)


@pytest.mark.parametrize(
    "tex, mathml",
    [
        (r"\operatorname*{mean}_p x", "<munder><mi>mean</mi><mi>p</mi></munder>"),
        (r"\operatorname{mean}_p x", "<msub><mi>mean</mi><mi>p</mi></msub>"),
        (r"\max_j x", "<munder><mi>max</mi><mi>j</mi></munder>"),
        (r"\mathcal R", "<mi>ℛ</mi>"),
        (r"\log x", '<mi>log</mi><mspace width="0.167em" /><mi>x</mi>'),
        (r"\log(x)", '<mi>log</mi><mo stretchy="false">(</mo><mi>x</mi>'),
        (r"a = -b", '<mo>=</mo><mo form="prefix">−</mo><mi>b</mi>'),
        (r"(a) - b", '<mo stretchy="false">)</mo><mo>−</mo><mi>b</mi>'),
        (r"f' x", '<mrow><mi>f</mi><mo lspace="0" rspace="0">′</mo></mrow><mi>x</mi>'),
    ],
)
def test_displayed_equations_are_set_as_tex_does(convert, tex, mathml):
    assert mathml in convert(tex, display=True)


def test_inline_limits_stay_beside(convert):
    assert "munder" not in convert(r"\max_j x", display=False)


def test_no_tex_is_left_in_any_equation(convert):
    assert len(EQUATIONS) > 50
    for tex in EQUATIONS:
        text = re.sub(r'alttext="[^"]*"', "", convert(tex.replace(r"\\", "\\"), display=False))
        assert "\\" not in text, tex


def test_pages_take_nothing_from_the_network(tmp_path):
    for name in ("furo", "latex2mathml"):
        pytest.importorskip(name)
    from sphinx.application import Sphinx

    source, pages = tmp_path / "source", tmp_path / "pages"
    source.mkdir()
    (source / "index.rst").write_text(
        "Page\n====\n\n.. math:: x_i\n\n.. code-block:: python\n\n   x = 1\n"
    )
    Sphinx(
        source, DOCS, pages, tmp_path / "trees", "html", status=None, warningiserror=True
    ).build()
    page = read(pages / "index.html")
    assert "<math " in page
    loaded = re.findall(r"<(?:script|link|img)[^>]*?(?:src|href)=\"([^\"]*)\"", page)
    styles = [read(path) for path in pages.rglob("*.css")]
    loaded += [
        url for style in styles for url in re.findall(r"(?:url\(|@import )[\"']?([^\"')]*)", style)
    ]
    assert loaded and not [url for url in loaded if re.match(r"(https?:)?//", url)]


def test_pictures_of_denominators_show_what_is_in_them(monkeypatch):
    """Row 1 of queries has the query drawn, row 1 of documents its document: + is its own pair, q
    and d are negatives of the query's and of the document's denominator. Rows that are empty are
    left out.
    """
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS))
    denominators = importlib.import_module("denominators")
    letters = {"positive": "+", "query": "q", "document": "d"}
    lines = []
    for name in denominators.PANELS:
        lines.append(name)
        found = denominators.cells(name)
        for row in sorted({row for row, _ in found}):
            line = [letters.get(found.get((row, x)), ".") for x in range(16)]
            lines.append("".join([f"  {row} ", *line[:4], " ", *line[4:12], " ", *line[12:]]))
    assert_stored("denominators", "\n".join(lines) + "\n")


def test_the_reference_has_every_public_name():
    """Losses have pages of their own, from which their entries are made."""
    pages = [read(path) for path in DOCS.glob("api_*.rst")]
    words = set(re.findall(r"\w+", "\n".join(pages)))
    public = {*itrloss.__all__, *itrloss.rerank.__all__} - public_losses()
    public |= {name for name, x in vars(itrloss.terms).items() if isinstance(x, Term)}
    assert public - words <= {"compat", "integrations"}  # which have pages


def test_rows_of_the_table_of_losses_are_read(monkeypatch):
    """`test_completeness` looks for the row of each loss."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS))
    for path in DOCS.glob("losses/*.rst"):
        page = read(path)
        rows = importlib.import_module("listing").SUMMARY.findall(page)
        assert len(rows) == page.count(".. summary::"), path.name


def test_the_table_of_losses_in_markdown_is_that_of_the_pages(monkeypatch):
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS))
    table = importlib.import_module("listing").markdown()
    assert read("LOSSES.md") == table, "run python docs/listing.py"
    assert ":" + "doc:" not in table and "``" not in table


def recipes(rank: int) -> dict[str, float]:
    """Run the snippets on distributed losses, also those that need a process group, which are not
    doctests.
    """
    blocks = BLOCK.findall(read("docs/multi_gpu.rst"))
    names = {}
    for block in blocks:
        exec(textwrap.dedent(block), names)
    rsum = names["metrics"]["rsum"]
    return {"loss": float(names["loss"]), "rsum": rsum, "blocks": len(blocks)}


def test_cyclic_terms_of_the_gallery_are_those_of_cyclip():
    """Theirs are of logits, divided by the scale again, and multiplied by the size of the batch."""
    tree = ast.parse(read("docs/gallery/cyclic.py"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {"F": torch.nn.functional}
    exec(compile(ast.Module(functions, []), "cyclic.py", "exec"), names)
    x, y = torch.randn(2, 7, 5, dtype=torch.float64).unbind()
    u, w = (z / z.norm(dim=1, keepdim=True) for z in (x, y))
    scale = 1 / 0.07
    within = (scale * u @ u.T - scale * w @ w.T).square().mean() / scale**2 * 7
    crossed = (scale * u @ w.T - scale * w @ u.T).square().mean() / scale**2 * 7
    wanted = 0.2 * within + 0.3 * crossed
    found = names["cyclic"](x, y, in_modal=0.2, cross_modal=0.3)
    torch.testing.assert_close(found, wanted)


@needs("the recipe of FSDP2 on the CPU", 2, 8)
def test_recipes_run_in_two_processes(tmp_path):
    first, second = run(recipes, tmp_path)
    assert first == second
    assert first["blocks"] == 16


def resumed(rank: int, folder: str) -> dict[str, bool]:
    """Train with the script of the documentation, once at a stretch and once with an interruption,
    and return whether all states are equal.
    """
    sys.path.insert(0, str(DOCS))
    loop = importlib.import_module("training_loop")

    class Interrupted(loop.Pairs):
        """Data that fail in the middle of the third epoch."""

        fetched = 0

        def __getitem__(self, i):
            self.fetched += 1
            if self.fetched > 2.5 * len(self) / dist.get_world_size():
                raise KeyboardInterrupt
            return super().__getitem__(i)

    def run(data, name):
        out = Path(folder, name)
        out.mkdir(exist_ok=True)
        return loop.train(data, torch.device("cpu"), out)

    whole = run(loop.Pairs(), "whole")
    with pytest.raises(KeyboardInterrupt):
        run(Interrupted(), "interrupted")
    finished = load(Path(folder, "interrupted", "last.pt"))["epoch"]
    again = run(loop.Pairs(), "interrupted")
    equal = {"interrupted after two epochs": finished == 2, "random": same_random(folder)}
    for name in whole.parts():
        expected, got = (tree_flatten(x.parts()[name].state_dict())[0] for x in (whole, again))
        equal[name] = len(got) > 0 and all(map(identical, got, expected))
    return equal


def same_random(folder: str) -> bool:
    """Return whether both runs ended with the same random numbers in all processes."""
    ends = []
    for name in ("whole", "interrupted"):
        checkpoint = load(Path(folder, name, "last.pt"))
        ends.append([state["cpu"] for state in checkpoint["random"]])
    return all(map(torch.equal, *ends)) and not torch.equal(*ends[0])


def identical(got, expected) -> bool:
    if isinstance(got, torch.Tensor):
        return torch.equal(got, expected)
    return got == expected


@needs("torch.amp.GradScaler", 2, 3)
def test_the_complete_training_loop_resumes_as_if_it_had_not_been_interrupted(tmp_path):
    first, second = run(resumed, tmp_path, str(tmp_path))
    assert first == second == dict.fromkeys(first, True)
    assert {"towers", "key_towers", "memory", "criterion", "optimizer"} <= first.keys()


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("CITATION.cff", r"^version: (.+)$"),
        ("docs/citing.rst", r"version +=.\{(.+)\}"),
        ("CHANGELOG.md", r"^## (\S+)"),  # the newest comes first
    ],
)
def test_the_version_is_named_alike(file, pattern):
    text = read(file)
    assert re.findall(pattern, text, re.M)[0] == itrloss.__version__


@pytest.fixture
def records(monkeypatch):
    pytest.importorskip("sphinx")
    for folder in (DOCS.parent, DOCS):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("records")


def test_figures_of_the_readme_are_those_of_its_records(records):
    readme = read("README.md")
    found = list(re.finditer(r" <!-- (.+?) -->", readme))
    assert len(found) > 15
    for match in found:
        figure = records.called(match[1]).text
        assert readme[: match.start()].endswith(figure), f"{match[1]}: the record says {figure}"
    # nothing that looks like a result stands without one
    prose = re.sub(r"```.*?```", "", readme, flags=re.S)
    bare = re.sub(r"[^\s(]+( ± \S+?)? <!-- .+? -->", "", prose)
    assert not re.findall(r"[+−]\d+\.\d|± \d|\d\.\d+ (?:GB|MB|ms|s)\b", bare)


PAGES_OF_RECORDS = (
    *("ablations", "choose", "embedders", "embedders_recipes", "engines", "examples"),
    *("fast_reranking", "faq", "graphed", "index", "measurements", "multi_gpu", "quickstart"),
    *("reranking", "results", "speed", "systems/coder", "systems/dvse", "systems/user"),
    *("losses/dcl", "losses/hal", "losses/late_interaction", "losses/memory", "losses/robust"),
    "tutorial",
)
# What looks measured. What is computed from sizes is in MiB or GiB.
MEASURED = re.compile(
    r"[+−]\d+\.\d"  # a difference
    r"|\d ± \d"
    r"|\d (?:[kMG]B|[mµ]?s)\b|\d\.\d+ seconds"
    r"|\d\.\d+ to \d+\.\d"  # an interval
    r"|(?<![=\d])\d{3}\.\d\b"  # RSUM
    r"|RSUM \d"
    r"|\d\.\d+e-\d"  # an error
)


def typed_by_hand(page):
    """Return what looks measured in a page's text, and is not read from a record."""
    prose = re.sub(r":figure:`[^`]+`", "", page)
    prose = re.sub(r"^\.\. test(code|output)::.*\n(?:\n| {3}.*\n)*", "", prose, flags=re.M)
    return MEASURED.findall(prose)


@pytest.mark.parametrize("name", PAGES_OF_RECORDS)
def test_results_on_pages_are_read_from_records(name):
    page = read(f"docs/{name}.rst")
    assert not typed_by_hand(page)


@pytest.mark.parametrize(
    "text",
    [
        "GCE is +7.1 ahead",
        "418.9 ± 9.3 on the scenes",
        "a step takes 0.12 s",
        "0.4 seconds",
        "27 ms, and 1790 MB",
        "documents have 0.48 to 0.91 of it",
        "two models 295.8 (312.2)",
        "with RSUM 62.1",
        "   * - VLM2Vec\n     - 3.8e-6",
    ],
)
def test_figures_typed_by_hand_are_found(text):
    assert typed_by_hand(text)


@pytest.mark.parametrize(
    "text",
    [
        ":figure:`h100_peer('ours', 'seconds')` ms",
        "S is at least 1e-6, and kept scores take 256 MiB",
        "``margin=0.2``, ``scale=100.0``, 10 seconds a case, cut to 0.6 to 1 of their sides",
        ".. testoutput::\n\n   3.8e-6 27 ms\n",
    ],
)
def test_options_sizes_and_output_are_no_figures_typed_by_hand(text):
    assert not typed_by_hand(text)


def test_records_say_how_they_were_measured(records):
    for path in records.FOLDER.glob("*.json"):
        found = records.load(path.stem)
        about = found.get("machine", found)
        assert about["itrloss"] == itrloss.__version__, f"{path.name} is of another release"
        assert re.fullmatch(r"[0-9a-f]{7,}(-dirty)?", about["commit"]), path.name
        assert records.provenance(path.stem).endswith(f"({path.name})")


def test_a_release_shows_records_of_its_own_engine(records):
    """Before the release, pages say of each older record that the engine has changed since."""
    changes = read("CHANGELOG.md")
    is_released = "not released" not in re.findall(r"^## .*", changes, re.M)[0]
    older = records.of_another_engine()
    assert not (is_released and older), f"measure anew: {', '.join(older)}"
    for name in older:
        assert "the engine has changed since" in records.provenance(name)


def test_the_digest_of_the_engine_is_that_of_its_code(records, tmp_path):
    file = tmp_path / "engine.py"
    digests = []
    for text in (
        'def f(x):\n    """Return it."""\n    return x + 1\n',
        "# why\ndef f(x):\n    return x + 1\n",
        "def f(x):\n    return x + 2\n",
    ):
        file.write_text(text)
        digests.append(records.code_digest(tmp_path))
    assert digests[0] == digests[1] != digests[2]


def test_a_package_index_shows_the_readme_with_links_that_lead_somewhere(monkeypatch):
    setuptools = pytest.importorskip("setuptools")
    given = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    runpy.run_path(str(DOCS.parent / "setup.py"))
    readme = given["long_description"]
    links = re.findall(r"\]\(([^)]+)\)", readme)
    repository = given["project_urls"]["Repository"]
    assert len(links) > 10 and all(link.startswith("https://") for link in links)
    for link in links:
        if link.startswith(repository):
            path = link.removeprefix(repository).split("/main/")[1]
            assert (DOCS.parent / path).exists(), link
    assert "<!--" not in readme
    assert readme.count("```") == read("README.md").count("```")
