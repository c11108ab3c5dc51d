"""Rendering of prompts and conversations: a document becomes ids, with a mark on those that count in the loss.

    prompt_completion  texts: as a text (`build.renderer`), both as one; messages: the chat template. Ids that the
                       prompt alone begins with too don't count
    chat               the chat template; the assistant's turns count
    instruction        alpaca's columns as prompt and completion

As TRL's SFTTrainer (1.16, `SFTTrainer._prepare_dataset`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from portable_fsdp.config.data import Format
from portable_fsdp.data.chat import KEPT_OUT, ChatTemplate, MarkedText
from portable_fsdp.data.examples import (
    WEIGHTS,
    Broken,
    Encode,
    Example,
    Rendered,
    broken,
    contains,
    is_empty,
    kind,
    meaningful_columns,
    without_nulls,
)
from portable_fsdp.data.messages import ChatMessage, Conversation, conversation_of, is_answer, messages_of
from portable_fsdp.data.tokenize import Tokenizer, Tokens, ended, token_dtype
from portable_fsdp.runtime.errors import DataError


def preparation(
    form: Format, tokenizer: Tokenizer, arguments: Mapping[str, Any], ignore: Collection[str]
) -> tuple[Callable[[Example], Any], Encode]:
    """The functions that prepare a document and encode several, for `build.render_documents`.

    `arguments`: of the chat template; `ignore`: `data.ignore`. Raises DataError where the tokenizer lacks a template
    that the format needs.
    """
    template = _required(tokenizer.chat_template).taking(arguments) if arguments else tokenizer.chat_template
    if form == "chat":
        template = _required(template)
        return partial(_chat, template, ignore), partial(_chats, template, tokenizer)
    prepare = _completion if form == "prompt_completion" else _instruction
    return partial(prepare, template, tokenizer, ignore), partial(_completions, tokenizer)


def _required(template: ChatTemplate | None) -> ChatTemplate:
    if template is None:
        raise DataError(
            "data.tokenizer: expected one with a chat template, for messages, found none in it.\n"
            "  Take the tokenizer of an instruct model, or put a chat_template.jinja into the tokenizer's folder."
        )
    return template


# --------------------------------------------------------------------------------------------- prompt, completion


def _completion(
    template: ChatTemplate | None, tokenizer: Tokenizer, ignore: Collection[str], example: Example
) -> tuple[str, str] | Rendered:
    """Prompt and whole as texts; of messages the result."""
    fields = example.fields
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        _require_use(fields, prompt + completion, "prompt_completion")
        return prompt, prompt + completion
    try:
        conversation = conversation_of(fields, "prompt", "completion", ignore=ignore)
        answers = [message["role"] for message in messages_of(completion, ignore)]
    except ValueError as error:
        raise ValueError(f"expected prompt and completion as texts, or both as messages, found: {error}") from error
    if "assistant" not in answers:
        unique = ", ".join(dict.fromkeys(answers))
        raise ValueError(f"expected a turn of the assistant in the completion, found the roles {unique}")
    answers = [role for role in answers if role not in ignore]
    return _completed("prompt_completion", _required(template), tokenizer, example, conversation, len(answers))


def _completed(
    form: Format,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    example: Example,
    conversation: Conversation,
    answers: int,
) -> Rendered:
    """The last `answers` messages are the completion."""
    first = len(conversation.messages) - answers
    try:
        written = template.written(conversation)
        prompt, begin = template.completion(written, first)
        silent, _ = template.spans(written, [number for number in conversation.silent if number >= first])
    except Exception as error:  # a template may raise anything
        raise _refusal(error) from error
    used = {*_IN_A_CONVERSATION, *(("input",) if form == "instruction" else ())}
    _require_use(example.fields, written.text, form, used)
    completion = [(begin or 0, len(written.text))]
    alone, whole = template.tokenized([(prompt, []), (written.text, completion)])
    dtype = token_dtype(tokenizer.vocab_size)
    rendered = _masked(example, np.array(alone.ids, dtype=dtype), np.array(whole.ids, dtype=dtype))
    notes = (*(n for n in written.notes if n != KEPT_OUT), *_notes_of_roles(conversation.messages, template))
    if rendered.prompt_differs and begin is None:
        notes += (_NOT_AS_ASKED,)
    if not whole.is_ended:
        notes += (_NO_END,)
    counts = rendered.counted if begin is None else np.array(whole.counted)
    if silent:
        [without] = template.tokenized([(written.text, silent)])
        counts = counts & ~np.array(without.counted)
    return rendered._replace(counted=counts, prompt_differs=False, notes=notes)


def _completions(tokenizer: Tokenizer, items: Sequence[tuple[Example, Any]]) -> list[Rendered | Broken]:
    """Some tokenizers put the end of text after any text, also after the prompt, which the completion continues."""
    pairs = [item for _, item in items if not isinstance(item, Rendered)]
    texts = [*(prompt for prompt, _ in pairs), *(whole for _, whole in pairs)]
    encoded = tokenizer.encode_all(texts, special_tokens=True)
    prompts, wholes = iter(encoded[: len(pairs)]), iter(encoded[len(pairs) :])
    rendered: list[Rendered | Broken] = []
    for example, item in items:
        if not isinstance(item, Rendered):
            prompt, whole = next(prompts), ended(next(wholes), tokenizer.end_of_text)
            is_ended = len(prompt) and prompt[-1] == tokenizer.end_of_text
            is_ended = is_ended and not np.array_equal(whole[: len(prompt)], prompt)
            item = _masked(example, prompt[:-1] if is_ended else prompt, whole)
        rendered.append(item)
    return rendered


def _masked(example: Example, prompt: Tokens, whole: Tokens) -> Rendered:
    """Ids count from the first that isn't the prompt's."""
    length = min(len(prompt), len(whole))
    different = np.flatnonzero(prompt[:length] != whole[:length])
    common = int(different[0]) if len(different) else length
    return Rendered(example.number, whole, np.arange(len(whole)) >= common, prompt_differs=common < len(prompt))


def _require_use(fields: Mapping[str, Any], text: str, form: Format, used: Collection[str] = ()) -> None:
    """Raises ValueError for a column that means something in this format, isn't `used`, and isn't in the row's text."""
    unused = set(meaningful_columns(form)) - {*WEIGHTS, *used}
    for key, value in fields.items():
        if key not in unused or is_empty(value) or isinstance(value, bool) or contains(text, without_nulls(value)):
            continue
        advice = "Write it into the row's messages or prompt"
        if key in ("context", "history", "input") and form != "instruction":
            advice = "data.format=instruction reads instruction, input and output"
        elif key == "context":
            advice = "data.columns='{input: context}' reads it as the input"
        raise ValueError(
            f"the row's text doesn't contain the column {key}, which matters for training.\n"
            f"  {advice}, or set data.ignore=[{key}] to leave it out"
        )


_IN_A_CONVERSATION = ("tools", "functions", "system", "system_prompt")


# ----------------------------------------------------------------------------------------------------- instruction


def _instruction(
    template: ChatTemplate | None, tokenizer: Tokenizer, ignore: Collection[str], example: Example
) -> tuple[str, str] | Rendered:
    """A question and an answer in the chat template, if the tokenizer has one; otherwise texts under headings."""
    fields = example.fields
    values = {key: fields.get(key) for key in ("system", "instruction", "input", "output")}
    parts: dict[str, Any] = {
        key: "" if value is None and key in ("system", "input") else value for key, value in values.items()
    }
    if wrong := next((key for key, part in parts.items() if not isinstance(part, str)), None):
        raise ValueError(f"expected {wrong} as text, found {kind(parts[wrong])}")
    if template is not None:
        question = "\n\n".join(part for part in (parts["instruction"], parts["input"]) if part)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": parts["output"]}]
        conversation = conversation_of({**fields, "messages": messages}, "messages", ignore=ignore)
        return _completed("instruction", template, tokenizer, example, conversation, 1)
    headings = {"instruction": "### Instruction:\n", "input": "### Input:\n"}  # those of Stanford's alpaca
    prompt = "\n\n".join(headings.get(key, "") + part for key, part in parts.items() if part and key != "output")
    prompt += "\n\n### Response:\n"
    _require_use(fields, prompt + parts["output"], "instruction", ("system", "input"))
    return prompt, prompt + parts["output"]


# ------------------------------------------------------------------------------------------------------------ chat

_NOT_AS_ASKED = "the chat template doesn't begin an answer as it asks for one; the difference counts as the answer"
_NO_END = (
    "answers without a special token at their end, so the model doesn't learn to stop there; put {{ eos_token }} "
    "behind the assistant's text in the chat template"
)


def _chat(
    template: ChatTemplate, ignore: Collection[str], example: Example
) -> tuple[MarkedText, bool, tuple[str, ...]]:
    """The conversation as the template writes it; whether all its turns are kept out of the loss; and notes."""
    conversation = conversation_of(example.fields, "messages", ignore=ignore)
    answers = sum(map(is_answer, conversation.messages))
    try:
        written = template.written(conversation)
        turns, as_asked = template.turns(written)
    except Exception as error:  # a template may raise anything
        raise _refusal(error) from error
    _require_use(example.fields, written.text, "chat", _IN_A_CONVERSATION)
    notes = (*written.notes, *_notes_of_roles(conversation.messages, template))
    notes = notes if as_asked else (*notes, _NOT_AS_ASKED)
    return (written.text, turns), 0 < answers == len(conversation.silent), notes


def _chats(
    template: ChatTemplate, tokenizer: Tokenizer, items: Sequence[tuple[Example, Any]]
) -> list[Rendered | Broken]:
    dtype = token_dtype(tokenizer.vocab_size)
    rendered: list[Rendered | Broken] = []
    for (example, (_, is_silent, notes)), chat in zip(
        items, template.tokenized([marked for _, (marked, _, _) in items]), strict=True
    ):
        if not any(chat.counted) and not is_silent:
            rendered.append(broken(example, "expected a turn of the assistant, found none: nothing in it counts"))
            continue
        notes = notes if chat.is_ended else (*notes, _NO_END)
        rendered.append(Rendered(example.number, np.array(chat.ids, dtype=dtype), np.array(chat.counted), notes=notes))
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


def _refusal(error: Exception) -> ValueError:
    message = str(error).strip() or type(error).__name__
    is_ours = message.startswith(("expected", "the chat template"))
    return ValueError(message if is_ours else f"the chat template refuses it: {message}")
