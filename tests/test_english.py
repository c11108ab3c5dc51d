"""Docstrings say at once what they describe, and no text has the words of STYLE's left column."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "portable_fsdp"
FILES = sorted(PACKAGE.rglob("*.py"))
UNCLEAR = re.compile(r"(Of|By|As|Those|With|Where)\b")
WORDS = re.compile(
    r"\b(sign of life|so far, after which|laid under|befell|knob|of theirs|goes on from|counts no more|"
    r"is told|are told|is said|way out|ways out|at a time is taken)\b"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_and_messages_are_plain(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    described = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, described)]
    assert [docstring for docstring in docstrings if UNCLEAR.match(docstring)] == []
    assert WORDS.findall(text) == []
