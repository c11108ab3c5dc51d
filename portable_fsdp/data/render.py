"""Rendering: a document becomes ids, and it is settled which of them count in the loss.

    text               the tokenizer's special tokens around the text, the end of text after it; all count
    prompt_completion  texts: as above, both texts as one; messages: the chat template. What the prompt alone begins
                       with too doesn't count
    chat               the chat template; the assistant's turns count

TRL's SFTTrainer does the same (1.16, `SFTTrainer._prepare_dataset`). In a stream (`data.packing`) a text has no special
tokens but the end of text.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from portable_fsdp.config.data import Format
from portable_fsdp.data.chat import ChatTemplate, Conversation, Message
from portable_fsdp.data.examples import Broken, Example
from portable_fsdp.data.tokenize import Tokenizer, Tokens, token_dtype
from portable_fsdp.runtime.errors import DataError
from portable_fsdp.runtime.strict_json import parse_json


class Rendered(NamedTuple):
    """A document's ids, and a flag for each that tells whether it counts; None: all do."""

    number: int
    ids: Tokens
    counted: NDArray[np.bool_] | None = None
    prompt_differs: bool = False
    """The prompt alone has other tokens at its end than within the whole: there the model learns another context."""
    notes: tuple[str, ...] = ()
    """See `Example.notes`."""


Render = Callable[[Sequence[Example]], list[Rendered | Broken]]
"""Several documents at once, each to itself or to what is wrong with it; may be called by several threads."""


def renderer(
    form: Format, tokenizer: Tokenizer, *, stream: bool, arguments: Mapping[str, Any] = MappingProxyType({})
) -> Render:
    """The function of this format; `arguments`: of the chat template. Raises DataError where the tokenizer can't serve
    it."""
    template = _required(tokenizer.chat_template).taking(arguments) if arguments else tokenizer.chat_template
    if form == "chat":
        told = _required(template)
        return lambda examples: _chats(examples, tokenizer, told)
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
    found: list[Rendered | Broken] = []
    good = [example for example in examples if isinstance(example.fields["text"], str)]
    encoded = iter(tokenizer.encode_all([example.fields["text"] for example in good], special_tokens=not stream))
    for example in examples:
        text = example.fields["text"]
        if isinstance(text, str):
            found.append(Rendered(example.number, _ended(next(encoded), tokenizer, always=stream)))
        else:
            found.append(_broken(example, f"expected text, found {_kind(text)}"))
    return found


def _ended(ids: Tokens, tokenizer: Tokenizer, *, always: bool) -> Tokens:
    """With the end of text behind it, where there is one; `always`: also where the text spells it itself."""
    end = tokenizer.end_of_text
    if end is None or (not always and len(ids) and ids[-1] == end):
        return ids
    return np.append(ids, np.array([end], dtype=ids.dtype))


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case str():
            return "text"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case list():
            return "a list"
        case dict():
            return "a mapping"
        case _:
            return type(value).__name__


# --------------------------------------------------------------------------------------------- prompt, completion


def _completions(
    examples: Sequence[Example], tokenizer: Tokenizer, template: ChatTemplate | None
) -> list[Rendered | Broken]:
    texts = [example for example in examples if _are_texts(example)]
    prompts = [example.fields["prompt"] for example in texts]
    wholes = [example.fields["prompt"] + example.fields["completion"] for example in texts]
    encoded = iter(tokenizer.encode_all([*prompts, *wholes], special_tokens=True))
    alone = [next(encoded) for _ in texts]
    pairs = iter(zip(alone, encoded, strict=True))
    found: list[Rendered | Broken] = []
    for example in examples:
        if _are_texts(example):
            prompt, whole = next(pairs)
            found.append(_completion(example, _unended(prompt, tokenizer), _ended(whole, tokenizer, always=False)))
        else:
            found.append(_completion_of_messages(example, tokenizer, template))
    return found


def _are_texts(example: Example) -> bool:
    return isinstance(example.fields["prompt"], str) and isinstance(example.fields["completion"], str)


def _unended(ids: Tokens, tokenizer: Tokenizer) -> Tokens:
    """Without the end of text that some tokenizers put after any text: the prompt goes on."""
    return ids[:-1] if len(ids) and ids[-1] == tokenizer.end_of_text else ids


def _completion(example: Example, prompt: Tokens, whole: Tokens) -> Rendered:
    common = _common_length(prompt, whole)
    return Rendered(example.number, whole, np.arange(len(whole)) >= common, prompt_differs=common < len(prompt))


def _common_length(one: Tokens, other: Tokens) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


def _completion_of_messages(example: Example, tokenizer: Tokenizer, template: ChatTemplate | None) -> Rendered | Broken:
    try:
        prompt, completion = (messages_of(example.fields[column]) for column in ("prompt", "completion"))
    except ValueError as error:
        return _broken(example, f"expected prompt and completion as texts, or both as messages, found: {error}")
    roles = [message["role"] for message in completion]
    if "assistant" not in roles:
        found = ", ".join(dict.fromkeys(roles))
        return _broken(example, f"expected a turn of the assistant in the completion, found the roles {found}")
    template, dtype = _required(template), token_dtype(tokenizer.vocab_size)
    try:
        asked = np.array(template.ids(Conversation(prompt), asks=True), dtype=dtype)
        whole = np.array(template.ids(Conversation([*prompt, *completion])), dtype=dtype)
    except Exception as error:  # a template may raise anything
        return _broken(example, _refusal(error))
    found = _completion(example, asked, whole)
    notes = _notes_of_roles([*prompt, *completion], template)
    if found.prompt_differs:
        notes += ("the chat template doesn't begin an answer as it asks for one; what differs counts as completion",)
    return found._replace(prompt_differs=False, notes=notes)


# ------------------------------------------------------------------------------------------------------------ chat


def _chats(examples: Sequence[Example], tokenizer: Tokenizer, template: ChatTemplate) -> list[Rendered | Broken]:
    dtype = token_dtype(tokenizer.vocab_size)
    conversations = [_conversation(example) for example in examples]
    chats = iter(template.chats([one for one in conversations if isinstance(one, Conversation)]))
    found: list[Rendered | Broken] = []
    for example, conversation in zip(examples, conversations, strict=True):
        if isinstance(conversation, Broken):
            found.append(conversation)
            continue
        chat = next(chats)
        if isinstance(chat, Exception):
            found.append(_broken(example, _refusal(chat)))
        elif not any(chat.counted):
            found.append(_broken(example, "expected a turn of the assistant, found none: nothing in it counts"))
        else:
            notes = (*example.notes, *_notes_of_roles(conversation.messages, template))
            found.append(Rendered(example.number, np.array(chat.ids, dtype=dtype), np.array(chat.counted), notes=notes))
    return found


_ROLES = {"system", "developer", "user", "assistant", "tool"}


def _notes_of_roles(messages: Sequence[Message], template: ChatTemplate) -> tuple[str, ...]:
    """Of those that neither the field nor the template knows: a turn of theirs doesn't count, whoever is meant."""
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
    if isinstance(tools, str):  # a parquet column has one schema, and so can't hold several: such data sets hold JSON
        try:
            tools = parse_json(tools)
        except ValueError:
            return _broken(
                example, f"expected tools as a list of JSON schemas, found text that isn't JSON: {tools[:40]}"
            )
    if not (tools is None or isinstance(tools, list)):
        return _broken(example, f"expected tools as a list of JSON schemas, found {_kind(tools)}")
    return Conversation(messages, tools or None)


_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "system": "system",
}


def messages_of(value: Any) -> list[Message]:
    """A column's messages; ShareGPT's turns (`from`, `value`) become `role` and `content`.

    Raises ValueError, which says what was expected and found.
    """
    if isinstance(value, list) and all(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in value):
        value = [_message(turn) for turn in value]
    if (problem := _problem_of_messages(value)) is not None:
        raise ValueError(problem)
    return value


def _message(turn: Mapping[str, Any]) -> Message:
    role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        raise ValueError(f"expected turns from {', '.join(_SHAREGPT_ROLES)}, found {str(turn['from'])[:40]!r}")
    return {"role": role, "content": turn["value"]}


def _problem_of_messages(value: Any) -> str | None:
    """What is wrong with a list of messages; None where nothing is."""
    if not isinstance(value, list) or not value:
        return f"expected a list of messages, found {_kind(value) if value != [] else 'an empty one'}"
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            return f"expected messages with role and content, found {_kind(message)} as message {number + 1}"
        content, calls = message.get("content"), message.get("tool_calls")
        keys = f"the keys {', '.join(map(str, message))} in message {number + 1}"
        if not isinstance(message.get("role"), str) or ("content" not in message and not calls):
            return f"expected messages with role and content, found {keys}"
        # A template would render null as nothing, and a list or a mapping as Python writes it.
        if not isinstance(content, str) and not (content is None and calls):
            return f"expected messages whose content is text, found {_kind(content)} as content, of {keys}"
    return None


def _refusal(error: Exception) -> str:
    said = str(error).strip() or type(error).__name__
    return said if said.startswith("expected") else f"the chat template refuses it: {said}"
