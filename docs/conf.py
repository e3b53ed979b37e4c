"""The site: the pages of this folder and the docstrings, by Sphinx. `make site` builds it; warnings are errors."""

from __future__ import annotations

import inspect
import re
from typing import Any

import evenshare

project = "evenshare"
author = "the evenshare maintainers"
release = version = evenshare.__version__
copyright = f"{author}, Apache-2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"evenshare {release}"
html_copy_source = False
html_show_sphinx = False
html_extra_path = ["../build/timelines"]  # pages of `evenshare explain --html`, which `make site` writes
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#3b6fb6", "color-brand-content": "#3b6fb6"},
    "dark_css_variables": {"color-brand-primary": "#7db4ff", "color-brand-content": "#7db4ff"},
}

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_use_type_comments = False
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False


def _to_rst(lines: list[str], names: set[str]) -> list[str]:
    """Our docstrings are prose: sentences, lines that begin with an argument's name, indented examples, and >>> sessions."""
    out: list[str] = []
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        block = paragraph.split("\n")
        if block[0].lstrip().startswith(">>>"):
            out += ["", *block, ""]
        elif block[0].startswith("    "):
            out += ["", ".. code-block:: text", "", *("    " + line for line in block), ""]
        else:
            for line in block:
                head = re.match(r"((?:\w+)(?:, \w+)*): ", line.strip())
                if (head and set(head[1].split(", ")) <= names) or line.strip().startswith(("Returns", "Raises")):
                    out.append("")
                out.append(_inline(line.strip(), names))
            out.append("")
    return out


def _inline(line: str, names: set[str]) -> str:
    """Escape what RST would read, keep `code` as code, and set the arguments that a sentence explains in bold."""
    parts = re.split(r"(`[^`]+`)", line)
    for i, part in enumerate(parts):
        if part.startswith("`"):
            parts[i] = f"`{part}`"
            continue
        escaped = re.sub(r"([\\*|_`])", r"\\\1", part)
        bold = r"(^|(?<=\. )|(?<=, ))((?:\w|\\_)+)(?=: |, )"
        parts[i] = re.sub(
            bold, lambda m: f"**{m[2]}**" if m[2].replace("\\_", "_") in names else m[0], escaped, flags=re.MULTILINE
        )
    return "".join(parts)


def _source(app: Any, name: str, content: list[str]) -> None:
    """Links to files that are not on the site become their text."""
    content[0] = re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", content[0])


def _docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    try:
        names = set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        names = set()
    lines[:] = _to_rst(lines, names)


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("source-read", _source)
    app.connect("autodoc-process-docstring", _docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
