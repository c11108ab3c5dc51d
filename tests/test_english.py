"""Docstrings say at once what they describe, and no text has the words of STYLE's left column."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "portable_fsdp"
UNCLEAR = re.compile(r"(Of|By|As|Those|With|Where)\b")
WORDS = re.compile(
    r"\b(sign of life|so far, after which|laid under|befell|knob|of theirs|goes on from|counts no more|"
    r"is told|are told|is said|way out|ways out|at a time is taken)\b"
)


def test_docstrings_and_messages_are_plain() -> None:
    problems: list[str] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        nodes = ast.walk(ast.parse(text))
        described = [node for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        unclear = [docstring for node in described if UNCLEAR.match(docstring := ast.get_docstring(node) or "")]
        problems += [f"{path.relative_to(PACKAGE)}: {found}" for found in (*unclear, *WORDS.findall(text))]
    assert problems == []
