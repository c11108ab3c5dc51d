"""Chat templates and tokenizers that never end, take all memory, or make their library panic."""

import json
import threading
import time
from pathlib import Path

import pytest

from portable_fsdp.config.data import Format
from portable_fsdp.config.schema import Data
from portable_fsdp.data.build import build_data
from portable_fsdp.data.tokenize import load_tokenizer
from portable_fsdp.runtime import limits
from portable_fsdp.runtime.errors import DataError

_MESSAGES = [{"role": "user", "content": "a" * 40 + "b"}, {"role": "assistant", "content": "c"}]
_LOOP = "{% for a in range(2000) %}{% for b in range(5000) %}{% endfor %}{% endfor %}"  # seconds


def build(folder: Path, *, form: Format, template: str = "", split: str | None = None) -> None:
    tokenizer = folder / "tokenizer"
    load_tokenizer("bytes").save(tokenizer)
    (tokenizer / "chat_template.jinja").write_text(template or "{{ messages }}")
    if split is not None:
        values = json.loads((tokenizer / "tokenizer.json").read_text())
        hostile = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [hostile, values["pre_tokenizer"]]}
        (tokenizer / "tokenizer.json").write_text(json.dumps(values))
    (folder / "rows.jsonl").write_text(json.dumps({"text": "a" * 40 + "b", "messages": _MESSAGES}) + "\n")
    path, cache = f"{folder}/rows.jsonl", f"{folder}/cache"
    build_data(Data(source="jsonl", path=path, format=form, seq_len=8, tokenizer=str(tokenizer), cache_dir=cache))


def join_what_was_left_behind() -> None:
    for thread in threading.enumerate():
        if thread.name == "portable_fsdp limited":
            thread.join()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "refuses it: access to attribute '__class__' of 'str' object is unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "refuses it: maximum recursion depth exceeded"),
        (
            "{% for a in range(10000000 - 1) %}{% endfor %}",
            "huge numbers and products of variables, found \\( 10000000 -",
        ),
        ("{{ 10 ** 10 ** 10 }}", r"products of variables, found 10 \*\* 10"),
        ("{% set n = namespace(x=7) %}{{ n.x * n.x }}", r"products of variables, found x \* n"),
        ("{{ 2 * 3|default(messages, true)|length }}", r"products of variables, found 2 \* 3"),
        ("{{ 'a' * 999999 * 99999 }}", "refuses it: MemoryError"),
        ("{{ messages[0].content.ljust(99999 * 999999) }}", "refuses it: MemoryError"),
        (_LOOP, r"rows\.jsonl:1 to .*rows\.jsonl:1: the tokenizer or its chat template took more than 0 s\.\n  Look"),
    ],
)
def test_a_hostile_template_ends_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    """Protects a start from a template that blocks it or takes the host's memory; nothing is left in the cache."""
    monkeypatch.setattr(limits, "SECONDS", 0.3 if template == _LOOP else 20.0)
    monkeypatch.setattr(limits, "_SECONDS_PER_DOCUMENT", 0.01)
    before = limits._own_bytes()  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(DataError, match=message):
        build(tmp_path, form="chat", template=template)
    assert limits._own_bytes() - before < 300 << 20  # pyright: ignore[reportPrivateUsage]
    assert not list(tmp_path.glob("cache/*.tmp-*"))
    join_what_was_left_behind()


def test_markdown_between_expressions_is_no_power(tmp_path: Path) -> None:
    """Protects templates that write **bold** text: the lexer gives the asterisks between two expressions as a token."""
    load_tokenizer("bytes").save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}**{{ m.content }}*{% endfor %}")
    assert load_tokenizer(str(tmp_path)).chat_template is not None


def test_a_panic_and_a_regular_expression_that_takes_long_end_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Protects a start from a tokenizer.json: a panic is no Exception, and nothing interrupts its library."""
    with pytest.raises(DataError, match="the tokenizer or its chat template failed: Onig: Regex search error"):
        build(tmp_path, form="text", split="(a+)+$")
    monkeypatch.setattr(limits, "SECONDS", 0.05)
    monkeypatch.setattr(limits, "_SECONDS_PER_DOCUMENT", 0.01)
    with pytest.raises(DataError, match="a call: the tokenizer or its chat template took more than 0 s"):
        limits.limited(lambda: time.sleep(1), "a call", limits.Limit(1))
    join_what_was_left_behind()
