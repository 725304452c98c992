"""Equations as MathML, which browsers draw by themselves: no script, no network.

latex2mathml does the translation. What follows it is what TeX would do about names of functions
(space around them, limits below), signs and delimiters, and what browsers no longer do themselves
(MathML Core).
"""

import html
import re
import unicodedata
from itertools import pairwise
from xml.etree.ElementTree import Element, tostring

from docutils.nodes import SkipNode
from latex2mathml.converter import convert_to_element

NAMES = {"arg", "cos", "log", "max", "min"}
# in a displayed equation a subscript goes below, as with the names in \operatorname*
LIMITS = {"max", "min"}
SCRIPTS = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}
SIGNS, CLOSING, PRIME = ("−", "+"), tuple(")]}⟩|‖/"), "\u2032"
# the invisible operator of a function's application; marks the names in \operatorname
FUNCTION = "\u2061"
STARRED = FUNCTION + "*"


def convert(tex: str, display: bool) -> str:
    """Return the equation as a MathML element."""

    def mark(match: re.Match) -> str:
        sign = STARRED if match[1] else FUNCTION
        name = match[2].replace("\\,", "\u2009")  # a thin space
        return rf"\text{{{sign}{name}}}"

    tex = " ".join(tex.split())
    marked = re.sub(r"\\operatorname(\*?)\{([^{}]*)\}", mark, tex)
    math = convert_to_element(marked, display="block" if display else "inline")
    assert math is not None
    _set(math, display)
    math.set("alttext", tex)
    return tostring(math, encoding="unicode")


def _set(parent: Element, display: bool) -> None:
    """Set an element's children, and theirs, as TeX does."""
    for child in list(parent):
        _token(child)
        _set(child, display and child.tag not in ("mfrac", *SCRIPTS))
        if display and child.tag in SCRIPTS and child[0].get("limits"):
            child.tag = SCRIPTS[child.tag]
        # Chromium does not enlarge what has a script
        if child.tag in SCRIPTS and child[0].get("minsize"):
            parent.insert(list(parent).index(child), child[0])
            child[0] = Element("mrow")
        if child.tag == "msup" and child[1].text == PRIME:  # its glyph is raised already
            child.tag, child[1].tag, child[1].attrib = "mrow", "mo", {"lspace": "0", "rspace": "0"}
    if parent.tag in ("math", "mrow", "mtd", "mstyle"):
        _space(parent)


def _token(x: Element) -> None:
    text = x.text = html.unescape(x.text or "")
    if text.startswith(FUNCTION) or text in NAMES:
        x.tag, x.text = "mi", text.lstrip(STARRED)
        x.attrib = {"limits": "1" if text in LIMITS or text.startswith(STARRED) else ""}
    elif x.get("mathvariant") == "script":
        x.text = _script(text)
        del x.attrib["mathvariant"]
    elif text and text in "⟨⟩|‖/":
        x.tag, x.attrib = "mo", {"stretchy": "false", "lspace": "0", "rspace": "0"}
    elif x.tag == "mi" and "Α" <= text <= "Ω":
        x.set("mathvariant", "normal")
    elif x.tag == "mtd":
        x.attrib = {"style": f"text-align: {x.get('columnalign', 'center')}"}


def _script(letter: str) -> str:
    try:
        return unicodedata.lookup(f"SCRIPT CAPITAL {letter}")
    except KeyError:
        return unicodedata.lookup(f"MATHEMATICAL SCRIPT CAPITAL {letter}")


def _space(row: Element) -> None:
    """Put a thin space between a function's name and its neighbours, and make signs after operators
    prefixes.
    """
    for before, after in pairwise(list(row)):
        sign = after.tag == "mo" and after.text in SIGNS and (_is_name(before) or _is_open(before))
        if sign:
            after.set("form", "prefix")
        if _is_name(before):
            hyphen = (_core(before).text or "").endswith("-")
            apart = not hyphen and (
                sign or _is_name(after) or _core(after).tag != "mo" or after.text == "|"
            )
        else:
            apart = _is_name(after) and _core(before).tag in ("mi", "mn", "mfrac", "mstyle")
        if apart:
            row.insert(list(row).index(after), Element("mspace", width="0.167em"))
    for child in row:
        _core(child).attrib.pop("limits", None)


def _core(x: Element) -> Element:
    return x[0] if x.tag in (*SCRIPTS, *SCRIPTS.values()) else x


def _is_name(x: Element) -> bool:
    return "limits" in _core(x).attrib


def _is_open(x: Element) -> bool:
    """Whether it is an operator after which a sign stands for itself: not what closes a
    parenthesis.
    """
    return x.tag == "mo" and x.text not in CLOSING


def _inline(writer, node) -> None:
    writer.body.append(convert(node.astext(), display=False))
    raise SkipNode


def _block(writer, node) -> None:
    # Where the source has a wide space the line may break, on narrow screens.
    parts = (
        convert(part, display=True)
        for part in re.split(r"(?:\\qquad\s*)+", node.astext())
        if part.strip()
    )
    writer.body.append(f'<div class="math">{"".join(parts)}</div>')
    raise SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
