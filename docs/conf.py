"""Sphinx builds the documentation site from the Markdown pages: `make site`. `index.md` is the navigation.

Each heading of index.md is a part of the navigation; its links, in their order, are the pages of that part.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

from portable_fsdp import __version__

ROOT = Path(__file__).parents[1]  # the source folder: pages also link to README.md, BUILD.md, configs/ and benchmarks/

project = "portable_fsdp"
author = copyright = "The portable_fsdp authors"
release = __version__
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "benchmarks/*.md", "benchmarks/results/*.md"]
html_additional_pages = {"index": "start.html"}
templates_path = ["."]
html_theme = "furo"
html_title = f"portable_fsdp {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sourcelink = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4  # links to headings, as code hosts make them
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
default_role = "code"  # of single backticks in docstrings
suppress_warnings = ["toc.not_included"]  # tests/test_docs.py compares the navigation with the pages


def pages_by_part(index: str) -> dict[str, list[str]]:
    """Heading -> the pages (paths from the root, without .md) that its text links to, in order."""
    parts = re.split(r"^## (.+)$", index, flags=re.MULTILINE)[1:]
    links = (re.findall(r"\]\(([^):#]+)\.md\)", text) for text in parts[1::2])
    return {
        title: [(ROOT / "docs" / page).resolve().relative_to(ROOT).as_posix() for page in pages]
        for title, pages in zip(parts[::2], links, strict=True)
    }


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add the table of contents that the links of index.md are."""
    if docname == root_doc:
        for title, pages in pages_by_part(source[0]).items():
            entries = "\n".join(f"/{page}" for page in pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
