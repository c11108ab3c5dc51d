"""Which ids a document becomes, and which of them count."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from chat_templates import CHATML, DATED, FAMILIES, GENERATION, TOLD_TOOLS, TOOLS, MakeTokenizer

from portable_fsdp.config.data import Format
from portable_fsdp.config.schema import Data
from portable_fsdp.data.build import renderer
from portable_fsdp.data.examples import Broken, Example, Rendered
from portable_fsdp.data.sources import open_source
from portable_fsdp.data.tokenize import ByteTokenizer, Tokenizer
from portable_fsdp.runtime.errors import DataError

CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is a statement?"},
    {"role": "assistant", "content": "A simple one fits one line."},
    {"role": "user", "content": "And an expression?"},
    {"role": "assistant", "content": "It has a value."},
]
FUNCTION = {"name": "search", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}}
SCHEMAS = [{"type": "function", "function": FUNCTION}]
CALL = {"type": "function", "function": {"name": "search", "arguments": {"what": "a statement"}}}
CALLS = [
    {"role": "user", "content": "What is a statement?"},
    {"role": "assistant", "content": "Two looks.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "one line"},
    {"role": "tool", "content": "or many"},
    {"role": "assistant", "content": "It fits one line or many."},
]
ONE_CALL = '<call>{"name": "search", "arguments": {"what": "a statement"}}</call>'
ANSWERS = ["A simple one fits one line.<|im_end|>\n", "It has a value.<|im_end|>\n"]
PROMPT_OF_MESSAGES = {"prompt": CONVERSATION[:2], "completion": CONVERSATION[2:3]}


def render(
    form: Format, tokenizer: Tokenizer, *fields: Mapping[Any, Any], stream: bool = False, **arguments: Any
) -> list[Rendered | Broken]:
    examples = [Example(number, f"here:{number}", 1, item) for number, item in enumerate(fields)]
    data = Data(source="jsonl", path="a.jsonl", format=form, chat_template_kwargs=arguments)
    return renderer(data, tokenizer, stream=stream)(examples)


def render_one(form: Format, tokenizer: Tokenizer, fields: Mapping[Any, Any], **arguments: Any) -> Rendered:
    [rendered] = render(form, tokenizer, fields, **arguments)
    assert isinstance(rendered, Rendered), rendered
    return rendered


def text_of(tokenizer: Any, rendered: Rendered) -> str:
    return tokenizer._tokenizer.decode(rendered.ids)


def counted_text(tokenizer: Any, rendered: Rendered) -> list[str]:
    """The text of each run of tokens that count."""
    assert rendered.counted is not None
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rendered.counted.astype(int), [0]])))
    return [tokenizer._tokenizer.decode(rendered.ids[begin:end]) for begin, end in edges.reshape(-1, 2)]


@pytest.mark.parametrize("around", [None, "<begin> $A", "<begin> $A <end>"])
def test_one_end_and_what_the_tokenizer_puts_around_a_text(make_tokenizer: MakeTokenizer, around: str | None) -> None:
    """In completions the text and the end token count."""
    tokenizer = make_tokenizer(around=around)
    end, begin = 0, 1
    rendered, bare = render_one("text", tokenizer, {"text": "a b"}), tokenizer.encode("a b").tolist()
    assert rendered.ids.tolist() == [*([begin] if around else []), *bare, end]
    assert rendered.counted is None
    spelled = "<begin>a b<end>" if around else "a b<end>"
    assert render_one("text", tokenizer, {"text": spelled}).ids.tolist() == rendered.ids.tolist()
    for text in ("a b", "a b<end>"):
        [streamed] = render("text", tokenizer, {"text": text}, stream=True)
        assert isinstance(streamed, Rendered)
        assert streamed.ids.tolist() == [*bare, end]
    parts = {"prompt": "<begin>a" if around else "a", "completion": " b<end>"}
    assert render_one("prompt_completion", tokenizer, parts).ids.tolist() == rendered.ids.tolist()
    rendered = render_one("prompt_completion", tokenizer, {"prompt": "Say it:", "completion": " statement"})
    assert counted_text(tokenizer, rendered) == [" statement<end>"]
    assert text_of(tokenizer, rendered) == ("<begin>" if around else "") + "Say it: statement<end>"
    assert rendered.notes == ()


def test_text_in_a_stream_is_bare_and_ended_and_what_is_no_text_is_broken() -> None:
    rendered = render("text", ByteTokenizer(), {"text": "ab"}, {"text": ""}, {"text": "c\0"}, stream=True)
    assert [item.ids.tolist() for item in rendered if isinstance(item, Rendered)] == [[97, 98, 0], [0], [99, 0]]
    rendered = render("text", ByteTokenizer(), {"text": 5}, {"text": "a"}, {"text": None}, {"text": ["a"]})
    problems = [item.problem for item in rendered if isinstance(item, Broken)]
    assert problems == [f"expected text, found {what}" for what in ("a number", "null", "a list")]
    assert isinstance(rendered[1], Rendered)
    assert rendered[1].ids.tolist() == [97, 0]


def test_a_prompt_that_ends_within_a_token_counts_from_where_they_part(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer()
    rendered = render_one("prompt_completion", tokenizer, {"prompt": "the state", "completion": "ment"})
    alone, whole = tokenizer.encode("the state").tolist(), tokenizer.encode("the statement").tolist()
    assert alone != whole[: len(alone)]  # else the case isn't there
    assert [note[:32] for note in rendered.notes] == ["the prompt tokenizes differently"]
    assert rendered.counted is not None
    common = next(length for length, pair in enumerate(zip(alone, whole, strict=False)) if pair[0] != pair[1])
    assert rendered.counted.tolist() == [False] * common + [True] * (len(whole) - common + 1)


def test_one_that_is_broken_leaves_the_others_as_they_are(make_tokenizer: MakeTokenizer) -> None:
    texts = {"prompt": "a", "completion": "b"}
    rendered = render("prompt_completion", ByteTokenizer(), texts | {"completion": 1}, texts)
    assert isinstance(rendered[0], Broken)
    assert isinstance(rendered[1], Rendered)
    assert rendered[1].ids.tolist() == [97, 98, 0]
    mark = "{{ raise_exception('no such role: judge') if messages[0].role == 'judge' }}{% for"
    judge = {"messages": [{"role": "judge", "content": "?"}]}
    for template in (CHATML, GENERATION.replace("{% for", mark, 1)):
        first, *others = render("chat", make_tokenizer(template), judge, {"messages": CONVERSATION}, judge)
        assert [(type(item), item.number) for item in others] == [(Rendered, 1), (Broken, 2)]
        assert first == Broken(0, "here:0", 1, "the chat template refuses it: no such role: judge")


SAID = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}]
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
NAMED = "{% if m.role in ['user', 'assistant'] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
OUTSIDE = GENERATION.replace(" + '<|im_end|>\n' }}{% endgen", " }}{% endgen")
ONLY_LAST = "message['content'] +", "(message['content'] if loop.last else message['content'][:3]) +"
TEMPLATES = {
    **{"none": None, "chatml": CHATML, "generation": GENERATION, "tools": TOOLS, "told_tools": TOLD_TOOLS, **FAMILIES},
    "endless": CHATML.replace(" + '<|im_end|>\n'", ""),
    "ended": CHATML.replace("{% if add_g", "{% if not add_generation_prompt %}<end>{% endif %}{% if add_g"),
    "outside": OUTSIDE.replace("{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>\n' }}"),
    **{"cut": CHATML.replace(*ONLY_LAST), "cut_generation": GENERATION.replace(*ONLY_LAST)},
    "last": GENERATION.replace("'assistant' %}", "'assistant' and loop.last %}"),
    "robot": CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>robot\n'"),
    "counted": CHATML + "{{ messages | length }}",
    "named": "{% for m in messages %}" + NAMED + "{% endfor %}" + ASKS,
}


def test_rows_as_people_write_them(
    make_tokenizer: MakeTokenizer, tmp_path: Path, assert_golden: Callable[[Path, str], None]
) -> None:
    """Weights, forms of functions and calls, thinking that a template cuts or adds, ends outside of a turn, alpaca,
    and answers that a template keeps out of the loss, which shall not go without a word.

    The golden file has, after each `$ `, a template, a form and a row; then its text, each part that counts, and notes,
    or what is wrong with it. A row with a key that can't be used is read again with `data.ignore`.
    """
    golden, parts = Path(__file__).parent / "golden/rows.txt", list[str]()
    for line in re.findall(r"^\$ (.*)$", golden.read_text(), re.MULTILINE):
        name, form, row = line.split(" ", 2)
        form, fields, tokenizer = cast(Format, form), json.loads(row), cast(Any, make_tokenizer(TEMPLATES[name]))
        [item] = render(form, tokenizer, fields)
        problem = item.problem if isinstance(item, Broken) else ""
        if ignored := re.search(r"data\.ignore=\[(\w+)\]", problem):
            (tmp_path / "row.jsonl").write_text(row)
            data = Data(source="jsonl", path=str(tmp_path / "row.jsonl"), format=form, ignore=(ignored[1],))
            [item] = renderer(data, tokenizer, stream=False)(list(open_source(data).read()))
        shown = [f"$ {line}", problem] if problem else [f"$ {line}"]
        if isinstance(item, Rendered):
            shown += map(json.dumps, (text_of(tokenizer, item), counted_text(tokenizer, item), *item.notes))
            if fields.get("messages") == CONVERSATION and not problem:
                assert item.ids.tolist() == list(tokenizer._tokenizer.apply_chat_template(CONVERSATION)["input_ids"])
        parts.append("\n".join(shown) + "\n")
    assert_golden(golden, "\n".join(parts))


def test_a_tokenizer_without_a_template_is_refused(make_tokenizer: MakeTokenizer) -> None:
    for tokenizer, form, fields, arguments in (
        (ByteTokenizer(), "chat", (), {}),
        (make_tokenizer(None), "chat", (), {}),
        (ByteTokenizer(), "prompt_completion", (PROMPT_OF_MESSAGES,), {}),
        (ByteTokenizer(), "prompt_completion", (), {"enable_thinking": False}),
    ):
        with pytest.raises(DataError, match=r"data\.tokenizer: the tokenizer has no chat template"):
            render(cast(Format, form), tokenizer, *fields, **arguments)


@pytest.mark.parametrize("tools", [SCHEMAS, json.dumps(SCHEMAS), [], None], ids=["list", "JSON", "empty", "null"])
@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_calls_and_arguments_of_the_template_are_rendered_and_masked_as_transformers_does(
    make_tokenizer: MakeTokenizer, tools: Any, arguments: dict[str, Any]
) -> None:
    """Its mask is of `{% generation %}`; ours is the same with it and, by where turns begin, without."""
    marked: Any = make_tokenizer(TOLD_TOOLS)
    listed = json.loads(tools) if isinstance(tools, str) else tools or None
    given = {"tools": listed, "return_dict": True, "return_assistant_tokens_mask": True, **arguments}
    expected = marked._tokenizer.apply_chat_template(CALLS, **given)
    for tokenizer in (marked, make_tokenizer(TOOLS)):
        rendered = render_one("chat", tokenizer, {"messages": CALLS, "tools": tools}, **arguments)
        assert rendered.ids.tolist() == expected["input_ids"]
        assert rendered.counted is not None
        assert rendered.counted.tolist() == [bool(each) for each in expected["assistant_masks"]]
        assert counted_text(tokenizer, rendered) == [
            f"Two looks.{ONE_CALL * 2}<|im_end|>\n",
            "It fits one line or many.<|im_end|>\n",
        ]
        text = text_of(tokenizer, rendered)
        assert text.count("<think></think>") == (2 if arguments.get("enable_thinking") is False else 0)
        assert ('"properties": {"what"' in text) == bool(listed)


@pytest.mark.parametrize("form", ["chat", "prompt_completion"])
def test_a_template_that_asks_for_the_day_is_told_the_same_one_each_day(
    make_tokenizer: MakeTokenizer, form: Format
) -> None:
    tokenizer: Any = make_tokenizer(DATED)
    fields = {"messages": CONVERSATION, **PROMPT_OF_MESSAGES}

    def text(**arguments: Any) -> str:
        return text_of(tokenizer, render_one(form, tokenizer, fields, **arguments))

    assert "Today: 26 Jul 2024<|im_end|>" in text()
    assert "Today: 05 Jan 2026<|im_end|>" in text(date_string="05 Jan 2026")
    with pytest.raises(DataError, match=r"the trainer itself sets strftime_now\."):
        text(strftime_now="05 Jan 2026")
    other = make_tokenizer(DATED.replace("strftime_now('%d %b %Y')", "strftime_now('%d' + ' %b')"))
    [broken] = render(form, other, fields)
    assert isinstance(broken, Broken)
    assert broken.problem.startswith("the chat template calls strftime_now without a quoted format")


def test_arguments_hold_for_prompts_too_and_unread_ones_are_refused(make_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_tokenizer(TOOLS)
    rendered = render_one("prompt_completion", tokenizer, PROMPT_OF_MESSAGES, enable_thinking=False)
    assert counted_text(tokenizer, rendered) == ANSWERS[:1]
    assert "<think></think>A simple one" in text_of(tokenizer, rendered)
    with pytest.raises(DataError, match=r"data\.chat_template_kwargs: .* doesn't read enable_thinkin\."):
        render("chat", tokenizer, enable_thinkin=False)
    for name in ("add_generation_prompt", "messages", "tools", "tokenize", "chat_template"):
        with pytest.raises(DataError, match=rf"data\.chat_template_kwargs: .* trainer itself sets {name}\."):
            render("chat", tokenizer, **{name: True})
