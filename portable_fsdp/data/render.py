"""Rendering: a document becomes ids, with a mark on those that count in the loss.

    text               the tokenizer's special tokens around the text, the end of text after it; all count
    prompt_completion  texts: as above, both texts as one; messages: the chat template. Ids that the prompt alone begins
                       with too don't count
    chat               the chat template; the assistant's turns count

As TRL's SFTTrainer (1.16, `SFTTrainer._prepare_dataset`). In a stream (`data.packing`) a text has no special tokens but
the end of text.
"""

from collections.abc import Callable, Mapping, Sequence
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


Render = Callable[[Sequence[Example]], list[Rendered | Broken]]
"""Several documents at once, each to its ids or its problem; several threads may call it."""


def renderer(
    form: Format, tokenizer: Tokenizer, *, stream: bool, arguments: Mapping[str, Any] = MappingProxyType({})
) -> Render:
    """The function of this format; `arguments`: of the chat template. Raises DataError where the tokenizer lacks a
    template that the format needs."""
    template = _required(tokenizer.chat_template).taking(arguments) if arguments else tokenizer.chat_template
    if form == "chat":
        chat_template = _required(template)
        return lambda examples: _chats(examples, tokenizer, chat_template)
    if form == "prompt_completion":
        return lambda examples: _completions(examples, tokenizer, template)
    return lambda examples: _texts(examples, tokenizer, stream=stream)


def _required(template: ChatTemplate | None) -> ChatTemplate:
    if template is None:
        raise DataError(
            "data.tokenizer: expected one with a chat template, for messages, found none in it.\n"
            "  Take the tokenizer of an instruct model, or put a chat_template.jinja into the tokenizer's folder."
        )
    return template


def _broken(example: Example, problem: str) -> Broken:
    return Broken(example.number, example.place, example.size, problem)


# ------------------------------------------------------------------------------------------------------------ text


def _texts(examples: Sequence[Example], tokenizer: Tokenizer, *, stream: bool) -> list[Rendered | Broken]:
    texts = [example.fields["text"] for example in examples]
    good = [text for text in texts if isinstance(text, str)]
    encoded = iter(tokenizer.encode_all(good, special_tokens=not stream))
    return [
        Rendered(example.number, _ended(next(encoded), tokenizer, always=stream))
        if isinstance(text, str)
        else _broken(example, f"expected text, found {_kind(text)}")
        for example, text in zip(examples, texts, strict=True)
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


def _completions(
    examples: Sequence[Example], tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[Rendered | Broken]:
    texts = [example for example in examples if _are_texts(example)]
    prompts = [example.fields["prompt"] for example in texts]
    wholes = [example.fields["prompt"] + example.fields["completion"] for example in texts]
    encoded = tokenizer.encode_all([*prompts, *wholes], special_tokens=True)
    pairs = iter(zip(encoded[: len(texts)], encoded[len(texts) :], strict=True))
    return [
        _completion(example, *next(pairs), tokenizer)
        if _are_texts(example)
        else _completion_of_messages(example, tokenizer, template)
        for example in examples
    ]


def _are_texts(example: Example) -> bool:
    return isinstance(example.fields["prompt"], str) and isinstance(example.fields["completion"], str)


def _completion(example: Example, prompt: Tokens, whole: Tokens, tokenizer: Tokenizer) -> Rendered:
    """Of texts. Some tokenizers put the end of text after any text, also after the prompt, which goes on."""
    is_ended = len(prompt) and prompt[-1] == tokenizer.end_of_text
    return _masked(example, prompt[:-1] if is_ended else prompt, _ended(whole, tokenizer, always=False))


def _masked(example: Example, prompt: Tokens, whole: Tokens) -> Rendered:
    """Ids count from the first that isn't the prompt's."""
    length = min(len(prompt), len(whole))
    different = np.flatnonzero(prompt[:length] != whole[:length])
    common = int(different[0]) if len(different) else length
    return Rendered(example.number, whole, np.arange(len(whole)) >= common, prompt_differs=common < len(prompt))


def _completion_of_messages(example: Example, tokenizer: Tokenizer, template: ChatTemplate | None) -> Rendered | Broken:
    try:
        prompt, completion = (messages_of(example.fields[column]) for column in ("prompt", "completion"))
    except ValueError as error:
        return _broken(example, f"expected prompt and completion as texts, or both as messages, found: {error}")
    roles = [message["role"] for message in completion]
    if "assistant" not in roles:
        unique = ", ".join(dict.fromkeys(roles))
        return _broken(example, f"expected a turn of the assistant in the completion, found the roles {unique}")
    template, dtype = _required(template), token_dtype(tokenizer.vocab_size)
    try:
        alone = np.array(template.ids(Conversation(prompt), asks=True), dtype=dtype)
        whole = np.array(template.ids(Conversation([*prompt, *completion])), dtype=dtype)
    except Exception as error:  # a template may raise anything
        return _broken(example, _refusal(error))
    rendered = _masked(example, alone, whole)
    notes = _notes_of_roles([*prompt, *completion], template)
    if rendered.prompt_differs:
        notes += ("the chat template doesn't begin an answer as it asks for one; the difference counts as completion",)
    return rendered._replace(prompt_differs=False, notes=notes)


# ------------------------------------------------------------------------------------------------------------ chat


def _chats(examples: Sequence[Example], tokenizer: Tokenizer, template: ChatTemplate) -> list[Rendered | Broken]:
    dtype = token_dtype(tokenizer.vocab_size)
    conversations = [_conversation(example) for example in examples]
    chats = iter(template.chats([each for each in conversations if isinstance(each, Conversation)]))
    rendered: list[Rendered | Broken] = []
    for example, conversation in zip(examples, conversations, strict=True):
        if isinstance(conversation, Broken):
            rendered.append(conversation)
            continue
        chat = next(chats)
        if isinstance(chat, Exception):
            rendered.append(_broken(example, _refusal(chat)))
        elif not any(chat.counted):
            rendered.append(_broken(example, "expected a turn of the assistant, found none: nothing in it counts"))
        else:
            notes = (*example.notes, *_notes_of_roles(conversation.messages, template))
            ids, counted = np.array(chat.ids, dtype=dtype), np.array(chat.counted)
            rendered.append(Rendered(example.number, ids, counted, notes=notes))
    return rendered


_ROLES = {"system", "developer", "user", "assistant", "tool"}


def _notes_of_roles(messages: Sequence[ChatMessage], template: ChatTemplate) -> tuple[str, ...]:
    """On unusual roles that the template doesn't name either: their turns don't count, whoever is meant."""
    unknown = dict.fromkeys(role for message in messages if (role := message["role"]) not in _ROLES)
    return tuple(
        f"messages of the role {role}, which the chat template doesn't name; they don't count as the assistant's"
        for role in unknown
        if not template.names(role)
    )


def _conversation(example: Example) -> Conversation | Broken:
    tools = example.fields.get("tools")
    try:
        messages = messages_of(example.fields["messages"])
    except ValueError as error:
        return _broken(example, str(error))
    expected = "expected tools as a list of JSON schemas, found"
    if isinstance(tools, str):  # a parquet column has one schema, and functions have several: such data sets hold JSON
        try:
            tools = parse_json(tools)
        except ValueError:
            return _broken(example, f"{expected} text that isn't JSON: {tools[:40]}")
    if not (tools is None or isinstance(tools, list)):
        return _broken(example, f"{expected} {_kind(tools)}")
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
    if (problem := _problem_of_messages(value)) is not None:
        raise ValueError(problem)
    return value


def _message(turn: Mapping[str, Any]) -> ChatMessage:
    role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        raise ValueError(f"expected turns from {', '.join(_SHAREGPT_ROLES)}, found {str(turn['from'])[:40]!r}")
    return {"role": role, "content": turn["value"]}


def _problem_of_messages(value: Any) -> str | None:
    """The first problem of a list of messages; None where there is none."""
    if not isinstance(value, list) or not value:
        return f"expected a list of messages, found {_kind(value) if value != [] else 'an empty one'}"
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            return f"expected messages with role and content, found {_kind(message)} as message {number + 1}"
        content, calls = message.get("content"), message.get("tool_calls")
        keys = f"the keys {', '.join(map(str, message))} in message {number + 1}"
        if not isinstance(message.get("role"), str) or ("content" not in message and not calls):
            return f"expected messages with role and content, found {keys}"
        # A template would render null as nothing, and a list or a mapping in Python's notation.
        if not isinstance(content, str) and not (content is None and calls):
            return f"expected messages whose content is text, found {_kind(content)} as content, of {keys}"
    return None


def _refusal(error: Exception) -> str:
    message = str(error).strip() or type(error).__name__
    return message if message.startswith("expected") else f"the chat template refuses it: {message}"
