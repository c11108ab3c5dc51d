"""Rendering: a document becomes ids, with a mark on those that count in the loss.

    text               the tokenizer's special tokens around the text, the end of text after it; all count
    prompt_completion  texts: as above, both texts as one; messages: the chat template. Ids that the prompt alone begins
                       with too don't count
    chat               the chat template; the assistant's turns count

As TRL's SFTTrainer (1.16, `SFTTrainer._prepare_dataset`). In a stream (`data.packing`) a text has no special tokens but
the end of text.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType, NoneType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from portable_fsdp.config.data import Format
from portable_fsdp.data.chat import ChatMessage, ChatTemplate, Conversation
from portable_fsdp.data.examples import Broken, Example
from portable_fsdp.data.tokenize import Tokenizer, Tokens, token_dtype
from portable_fsdp.runtime.errors import DataError
from portable_fsdp.runtime.strict_json import parse_json


class Rendered(NamedTuple):
    """A document's ids, and for each whether it counts; None: all do."""

    number: int
    ids: Tokens
    counted: NDArray[np.bool_] | None = None
    prompt_differs: bool = False
    """The prompt alone ends in other tokens than within the whole, so the model learns from another context."""
    notes: tuple[str, ...] = ()
    """See `Example.notes`."""


Render = Callable[[Sequence[Example | Broken]], list[Rendered | Broken]]
"""Several documents at once, each to its ids or its problem; several threads may call it."""


def renderer(
    form: Format, tokenizer: Tokenizer, *, stream: bool, arguments: Mapping[str, Any] = MappingProxyType({})
) -> Render:
    """The function of this format; `arguments`: of the chat template. Raises DataError where the tokenizer lacks a
    template that the format needs."""
    template = _required(tokenizer.chat_template).taking(arguments) if arguments else tokenizer.chat_template
    if form == "chat":
        return partial(_render, partial(_chat, _required(template)), partial(_chats, _required(template), tokenizer))
    if form == "prompt_completion":
        return partial(_render, partial(_completion, template, tokenizer), partial(_completions, tokenizer))
    return partial(_render, _text, partial(_texts, tokenizer, stream=stream))


def _required(template: ChatTemplate | None) -> ChatTemplate:
    if template is None:
        raise DataError(
            "data.tokenizer: expected one with a chat template, for messages, found none in it.\n"
            "  Take the tokenizer of an instruct model, or put a chat_template.jinja into the tokenizer's folder."
        )
    return template


def _render(
    prepare: Callable[[Example], Any],
    encode: Callable[[Sequence[Any]], list[Rendered | Broken]],
    examples: Sequence[Example | Broken],
) -> list[Rendered | Broken]:
    """`prepare` gives what of a document is tokenized, or raises ValueError, which says what is wrong with it; `encode`
    makes the results of all others at once, from pairs of the document and what was prepared."""
    prepared: list[Any] = []
    for example in examples:
        try:
            prepared.append(example if isinstance(example, Broken) else (example, prepare(example)))
        except ValueError as error:
            prepared.append(_broken(example, str(error)))
    rendered = iter(encode([item for item in prepared if not isinstance(item, Broken)]))
    return [item if isinstance(item, Broken) else next(rendered) for item in prepared]


def _broken(example: Example | Broken, problem: str) -> Broken:
    return Broken(example.number, example.place, example.size, problem)


# ------------------------------------------------------------------------------------------------------------ text


def _text(example: Example) -> str:
    text = example.fields["text"]
    if not isinstance(text, str):
        raise ValueError(f"expected text, found {_kind(text)}")
    return text


def _texts(tokenizer: Tokenizer, items: Sequence[tuple[Example, str]], *, stream: bool) -> list[Rendered | Broken]:
    encoded = tokenizer.encode_all([text for _, text in items], special_tokens=not stream)
    return [
        Rendered(example.number, _ended(ids, tokenizer, always=stream))
        for (example, _), ids in zip(items, encoded, strict=True)
    ]


def _ended(ids: Tokens, tokenizer: Tokenizer, *, always: bool) -> Tokens:
    """With the end of text behind it, where there is one; `always`: also where the text spells it itself."""
    end = tokenizer.end_of_text
    if end is None or (not always and len(ids) and ids[-1] == end):
        return ids
    return np.append(ids, np.array([end], dtype=ids.dtype))


_KINDS: dict[type, str] = {
    **{NoneType: "null", str: "text", bool: "true or false", int: "a number", float: "a number"},
    **{list: "a list", dict: "a mapping"},
}


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


# --------------------------------------------------------------------------------------------- prompt, completion


def _completion(template: ChatTemplate | None, tokenizer: Tokenizer, example: Example) -> tuple[str, str] | Rendered:
    """Prompt and whole as texts; of messages the result."""
    prompt, completion = example.fields["prompt"], example.fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return prompt, prompt + completion
    try:
        prompt, completion = messages_of(prompt), messages_of(completion)
    except ValueError as error:
        raise ValueError(f"expected prompt and completion as texts, or both as messages, found: {error}") from error
    roles = [message["role"] for message in completion]
    if "assistant" not in roles:
        unique = ", ".join(dict.fromkeys(roles))
        raise ValueError(f"expected a turn of the assistant in the completion, found the roles {unique}")
    template, dtype, messages = _required(template), token_dtype(tokenizer.vocab_size), [*prompt, *completion]
    try:
        alone = np.array(template.ids(Conversation(prompt), asks=True), dtype=dtype)
        whole = np.array(template.ids(Conversation(messages)), dtype=dtype)
    except Exception as error:  # a template may raise anything
        raise _refusal(error) from error
    rendered = _masked(example, alone, whole)
    notes = _notes_of_roles(messages, template)
    if rendered.prompt_differs:
        notes += ("the chat template doesn't begin an answer as it asks for one; the difference counts as completion",)
    return rendered._replace(prompt_differs=False, notes=notes)


def _completions(tokenizer: Tokenizer, items: Sequence[tuple[Example, Any]]) -> list[Rendered | Broken]:
    """Some tokenizers put the end of text after any text, also after the prompt, which the completion continues."""
    pairs = [item for _, item in items if not isinstance(item, Rendered)]
    texts = [*(prompt for prompt, _ in pairs), *(whole for _, whole in pairs)]
    encoded = tokenizer.encode_all(texts, special_tokens=True)
    prompts, wholes = iter(encoded[: len(pairs)]), iter(encoded[len(pairs) :])
    rendered: list[Rendered | Broken] = []
    for example, item in items:
        if not isinstance(item, Rendered):
            prompt, whole = next(prompts), _ended(next(wholes), tokenizer, always=False)
            is_ended = len(prompt) and prompt[-1] == tokenizer.end_of_text
            item = _masked(example, prompt[:-1] if is_ended else prompt, whole)
        rendered.append(item)
    return rendered


def _masked(example: Example, prompt: Tokens, whole: Tokens) -> Rendered:
    """Ids count from the first that isn't the prompt's."""
    length = min(len(prompt), len(whole))
    different = np.flatnonzero(prompt[:length] != whole[:length])
    common = int(different[0]) if len(different) else length
    return Rendered(example.number, whole, np.arange(len(whole)) >= common, prompt_differs=common < len(prompt))


# ------------------------------------------------------------------------------------------------------------ chat


def _chat(template: ChatTemplate, example: Example) -> tuple[Any, tuple[str, ...]]:
    """The conversation as the template renders it, and notes."""
    conversation = _conversation(example)
    try:
        return template.rendered(conversation), (*example.notes, *_notes_of_roles(conversation.messages, template))
    except Exception as error:  # a template may raise anything
        raise _refusal(error) from error


def _chats(
    template: ChatTemplate, tokenizer: Tokenizer, items: Sequence[tuple[Example, tuple[Any, tuple[str, ...]]]]
) -> list[Rendered | Broken]:
    dtype = token_dtype(tokenizer.vocab_size)
    chats = template.tokenized([rendered for _, (rendered, _) in items])
    return [
        Rendered(example.number, np.array(ids, dtype=dtype), np.array(counted), notes=notes)
        if any(counted)
        else _broken(example, "expected a turn of the assistant, found none: nothing in it counts")
        for (example, (_, notes)), (ids, counted) in zip(items, chats, strict=True)
    ]


_ROLES = {"system", "developer", "user", "assistant", "tool"}


def _notes_of_roles(messages: Sequence[ChatMessage], template: ChatTemplate) -> tuple[str, ...]:
    """On unusual roles that the template doesn't name either: their turns don't count, whoever is meant."""
    unknown = dict.fromkeys(role for message in messages if (role := message["role"]) not in _ROLES)
    return tuple(
        f"messages of the role {role}, which the chat template doesn't name; they don't count as the assistant's"
        for role in unknown
        if not template.names(role)
    )


def _conversation(example: Example) -> Conversation:
    """Raises ValueError, as `messages_of`."""
    messages, tools = messages_of(example.fields["messages"]), example.fields.get("tools")
    expected = "expected tools as a list of JSON schemas, found"
    if isinstance(tools, str):  # a parquet column has one schema, and functions have several: such data sets hold JSON
        try:
            tools = parse_json(tools)
        except ValueError:
            raise ValueError(f"{expected} text that isn't JSON: {tools[:40]}") from None
    if not (tools is None or isinstance(tools, list)):
        raise ValueError(f"{expected} {_kind(tools)}")
    return Conversation(messages, tools or None)


_SHAREGPT_ROLES = {
    **{"human": "user", "user": "user"},
    **{"gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant"},
    **{"tool": "tool", "function": "tool", "observation": "tool"},
    "system": "system",
}


def messages_of(value: Any) -> list[ChatMessage]:
    """A column's messages; ShareGPT's turns (`from`, `value`) become `role` and `content`.

    Raises ValueError, which says what was expected and found.
    """
    if isinstance(value, list) and all(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in value):
        value = [_message(turn) for turn in value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a list of messages, found {_kind(value) if value != [] else 'an empty one'}")
    for number, message in enumerate(value):
        _check_message(message, number)
    return value


def _message(turn: Mapping[str, Any]) -> ChatMessage:
    role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        raise ValueError(f"expected turns from {', '.join(_SHAREGPT_ROLES)}, found {str(turn['from'])[:40]!r}")
    return {"role": role, "content": turn["value"]}


def _check_message(message: Any, number: int) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"expected messages with role and content, found {_kind(message)} as message {number + 1}")
    content, calls = message.get("content"), message.get("tool_calls")
    keys = f"the keys {', '.join(map(str, message))} in message {number + 1}"
    if not isinstance(message.get("role"), str) or ("content" not in message and not calls):
        raise ValueError(f"expected messages with role and content, found {keys}")
    # A template would render null as nothing, and a list or a mapping in Python's notation.
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(f"expected messages whose content is text, found {_kind(content)} as content, of {keys}")


def _refusal(error: Exception) -> ValueError:
    message = str(error).strip() or type(error).__name__
    return ValueError(message if message.startswith("expected") else f"the chat template refuses it: {message}")
