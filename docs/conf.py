"""Sphinx configuration. Built by ``make docs``: first the pages are written, then the snippets are
run.
"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from docutils import nodes

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # not installed: examples/, and what extends Sphinx
try:
    import itrloss
except ModuleNotFoundError:  # not installed: document the sources next to this folder
    sys.path.insert(0, str(ROOT / "src"))
    import itrloss

project = "itrloss"
author = "the itrloss authors"
project_copyright = "the itrloss authors, Apache-2.0"
version = release = itrloss.__version__

# The snippets' matrices are small: more threads only wait for each other.
torch.set_num_threads(1)

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "mathml",
    "pictures",
    "interval_charts",
    "checks",
    "listing",
    "records",
    "paper_tables",
]
exclude_patterns = ["_build"]
default_role = "code"
highlight_language = "python3"

_optional = "torchmetrics", "sentence_transformers", "transformers", "pytorch_metric_learning"
autodoc_mock_imports = [name for name in _optional if not find_spec(name)]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Relations"]
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

# Snippets are checked to the digits they print. Each page starts afresh from here.
doctest_global_setup = f"""
import os, shutil, sysconfig
from importlib.util import find_spec
from pathlib import Path
import torch
os.chdir({str(ROOT)!r})
torch.manual_seed(0)
torch.set_printoptions(precision=4, sci_mode=False)
# torch.compile's default backend builds C++; where nothing can, the snippet is left out.
no_metrics = not all(map(find_spec, ("scipy", "pandas", "torchmetrics")))
compiler = shutil.which("g++") or shutil.which("clang++")
headers = Path(sysconfig.get_path("include"), "Python.h")
no_compiler = not (compiler and headers.exists())
"""

# Nothing on the pages comes from the network: the theme has its scripts with it, fonts are those of
# the reader.
html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"itrloss {release}"
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]


# napoleon takes what stands before a colon in the docstring of a property or an attribute for its
# type. These docstrings are plain prose.
PROSE = "property", "attribute"
_prose = {}


def _keep(app, what, name, obj, options, lines):
    if what in PROSE:
        _prose[name] = list(lines)


def _restore(app, what, name, obj, options, lines):
    if what in PROSE:
        lines[:] = _prose.pop(name)


# Signatures show defaults as they are written. These names say nothing to a reader.
_DEFAULTS = {
    "RECALLS": repr(itrloss.metrics.results.RECALLS),
    "SCALES": repr(itrloss.rerank.fast.SCALES),
    "<factory>": "{}",
    "MappingProxyType({})": "{}",
    "checks.ROWS_AND_COLUMNS": repr(tuple(itrloss.checks.ROWS_AND_COLUMNS)),
}
# The metrics import it for type checkers alone; without it their annotations are not resolved.
itrloss.metrics.retrieval.Reranker = itrloss.rerank.Reranker


def _readable(app, what, name, obj, options, signature, returned):
    if not signature:
        return None
    for written, value in _DEFAULTS.items():
        signature = re.sub(rf"(= ?){re.escape(written)}(?=[,)])", rf"\g<1>{value}", signature)
    return signature, returned


def _mark_options(app, doctree):
    """Let the style keep the words of command lines whole: ``--`` is no place to break a line."""
    for literal in doctree.findall(nodes.literal):
        if re.search(r"(^| )-", literal.astext()):
            literal["classes"].append("option")


def setup(app):
    """Run one listener before and one after napoleon's, which has the priority 500."""
    app.connect("autodoc-process-signature", _readable)
    app.connect("autodoc-process-docstring", _keep, priority=400)
    app.connect("autodoc-process-docstring", _restore, priority=600)
    app.connect("doctree-read", _mark_options)
