"""Sphinx: these pages and an API reference from the docstrings. `sphinx-build -W docs site` writes HTML to site/."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

project = "moeblaze-cupy"
author = "The moeblaze_cupy authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = project
exclude_patterns = ["description.md"]  # what a package index shows
default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # results.md is generated and starts sections at any level

# An argument, or a sentence of its own, at the start of a docstring's line.
STARTS = re.compile(r"(?:Returns|Raises|[a-z][\w.]*(?:, [a-z][\w.]*)*(?: and [a-z][\w.]*)*:)(?:\s|$)")


def lines_to_paragraphs(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings say one thing per line; reStructuredText would join the lines to one paragraph."""
    found: list[str] = []
    for line in lines:
        if STARTS.match(line) and found and found[-1].strip():
            found.append("")
        found.append(line)
    lines[:] = found


def setup(app) -> None:
    app.connect("autodoc-process-docstring", lines_to_paragraphs)
