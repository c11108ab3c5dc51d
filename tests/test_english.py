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
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    starts = [(ast.get_docstring(node) or "").splitlines()[:1] for node in nodes]
    assert [line for lines in starts for line in lines if UNCLEAR.match(line)] == []
    assert WORDS.findall(text) == []
