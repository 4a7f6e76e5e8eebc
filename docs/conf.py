"""Sphinx: these pages and an API reference from the docstrings. `sphinx-build -W docs site` writes HTML to site/."""

import re
import sys
from pathlib import Path

from docutils import nodes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

project = "moeblaze-cupy"
author = "The moeblaze_cupy authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = project
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
exclude_patterns = ["description.md"]  # what a package index shows
default_role = "code"  # docstrings write `name`, as Markdown does
autodoc_member_order = "bysource"
maximum_signature_line_length = 80
autodoc_typehints = "signature"
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # results.md is generated and starts sections at any level

# Arguments, or a sentence of its own, at the start of a docstring's line.
ARGUMENTS = re.compile(r"([a-z][\w.]*(?:(?:, | and )[a-z][\w.]*)*):(?:\s|$)")
SENTENCE = re.compile(r"(?:Returns|Raises|Source:)(?:\s|$)")


def lines_to_lists(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings say one thing per line; reStructuredText would join the lines to one paragraph. Arguments become a
    list of definitions."""
    found: list[str] = []
    inside = False
    for line in lines:
        named = ARGUMENTS.match(line) if what in ("function", "method", "class") else None
        if named:
            found += ["", ", ".join(f"``{word}``" for word in re.split(r", | and ", named[1]))]
            line, inside = line[named.end() :].strip(), True
        elif SENTENCE.match(line) or not line.strip():
            inside = False
            found.append("")
        found.append(f"   {line}" if inside else line)
    lines[:] = found


def without_any(app, what, name, obj, options, signature, returned):
    """`Any` is the type of arrays of any framework; the lists say their shapes and dtypes."""
    if signature is None:  # of an attribute or a module
        return None
    stripped = re.sub(r": (?:~?typing\.)?Any(?= ?[=,)])", "", signature)
    return stripped, None if returned and "Any" in returned else returned


def link_tables(app, doctree, docname: str) -> None:
    """Names in the tables of the API page lead to their docstrings below. The head of a table names the module."""
    objects = app.env.get_domain("py").objects
    for table in doctree.findall(nodes.table) if docname == "api" else ():
        head, *names = (next(row.findall(nodes.literal), nodes.literal()) for row in table.findall(nodes.row))
        for name in names:
            for module in (head.astext(), "moeblaze_cupy"):
                target = objects.get(f"{module}.{name.astext()}")
                if target:
                    place = f"#{target.node_id}"
                    name.replace_self(nodes.reference("", "", name.deepcopy(), refuri=place, internal=True))
                    break


def setup(app) -> None:
    app.connect("doctree-resolved", link_tables)
    app.connect("autodoc-process-docstring", lines_to_lists)
    app.connect("autodoc-process-signature", without_any)
