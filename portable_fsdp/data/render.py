"""Rendering of prompts and conversations: a document becomes ids, with a mask of those that count in the loss.

    prompt_completion  texts: joined and rendered as one text (`build.renderer`); messages: the chat template. The ids
                       shared with the tokenized prompt don't count
    chat               the chat template; the assistant's turns count
    instruction        alpaca's columns as prompt and completion

Matches TRL's SFTTrainer (1.16, `SFTTrainer._prepare_dataset`).
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from string import Formatter
from typing import Any, NamedTuple, cast

import numpy as np

from portable_fsdp.config.data import Column, Documents, Format
from portable_fsdp.data.chat import KEPT_OUT, ChatTemplate, MarkedText
from portable_fsdp.data.examples import (
    MEANINGFUL,
    WEIGHTS,
    Broken,
    ChatMessage,
    Conversation,
    Encode,
    Example,
    Rendered,
    broken,
    contains,
    in_loss,
    is_answer,
    is_empty,
    kind,
    meaningful_columns,
    trains,
    without_nulls,
)
from portable_fsdp.data.tokenize import Tokenizer, Tokens, ended, token_dtype
from portable_fsdp.runtime.errors import DataError
from portable_fsdp.runtime.files import parse_json


def preparation(part: Documents, tokenizer: Tokenizer) -> tuple[Callable[[Example], Any], Encode]:
    """Return the functions that prepare one document and encode several, for `build.render_documents`.

    Raises DataError if the format needs a chat template and the tokenizer has none.
    """
    arguments, template = part.chat_template_kwargs, tokenizer.chat_template
    template = _required(template).taking(arguments) if arguments else template
    if part.format == "chat":
        template = _required(template)
        return partial(_chat, template, part.ignore, part.train_on), partial(_chats, template, tokenizer)
    encode = partial(_completions, tokenizer, part.train_on == "all")
    if part.format == "prompt_completion":
        return partial(_completion, template, tokenizer, part.ignore), encode
    return partial(_instruction, template, tokenizer, part.ignore, _prompts(part.prompt)), encode


def _required(template: ChatTemplate | None) -> ChatTemplate:
    if template is None:
        raise DataError(
            "data.tokenizer: the tokenizer has no chat template, which messages need.\n"
            "  Use the tokenizer of an instruct model, or put a chat_template.jinja into the tokenizer's folder."
        )
    return template


# --------------------------------------------------------------------------------------------- prompt, completion


def _completion(
    template: ChatTemplate | None, tokenizer: Tokenizer, ignore: Collection[str], example: Example
) -> tuple[str, str] | Rendered:
    """Return prompt and whole as texts; for messages, the rendered result."""
    fields = example.fields
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        _require_use(fields, prompt + completion, "prompt_completion")
        return prompt, prompt + completion
    try:
        conversation = conversation_of(fields, "prompt", "completion", ignore=ignore)
        answers = [message["role"] for message in messages_of(completion, ignore)]
    except ValueError as error:
        raise ValueError(f"prompt and completion must both be texts, or both messages: {error}") from error
    if "assistant" not in answers:
        unique = ", ".join(dict.fromkeys(answers))
        raise ValueError(f"the completion has no assistant message, only roles {unique}")
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
    """Render a conversation whose last `answers` messages are the completion."""
    first = len(conversation.messages) - answers
    try:
        written = template.written(conversation)
        prompt, begin = template.completion(written, first)
        silent, _ = template.spans(written, [number for number in conversation.silent if number >= first])
    except Exception as error:  # a template may raise anything
        raise _refusal(error) from error
    used = (*_IN_A_CONVERSATION, "input") if form == "instruction" else _IN_A_CONVERSATION
    _require_use(example.fields, written.text, form, used)
    alone, whole = template.tokenized([(prompt, []), (written.text, [(begin or 0, len(written.text))])])
    dtype = token_dtype(tokenizer.vocab_size)
    rendered = _masked(example, np.array(alone.ids, dtype=dtype), np.array(whole.ids, dtype=dtype))
    notes = (*(n for n in written.notes if n != KEPT_OUT), *_notes_of_roles(conversation.messages, template))
    if rendered.notes and begin is None:
        notes += (_OTHER_HEADER,)
    if not whole.is_ended:
        notes += (_NO_END,)
    counts = rendered.counted if begin is None else np.array(whole.counted)
    if silent:
        [without] = template.tokenized([(written.text, silent)])
        counts = counts & ~np.array(without.counted)
    return rendered._replace(counted=counts, notes=notes)


class _Apart(NamedTuple):
    """A prompt and its answer, which are tokenized each by itself."""

    prompt: str
    answer: str


def _completions(
    tokenizer: Tokenizer, all_count: bool, items: Sequence[tuple[Example, Any]]
) -> list[Rendered | Broken]:
    """Encode prompts and wholes, or answers apart. Some tokenizers append the end of text to any text: the end of the
    prompt is dropped, since the completion continues it."""
    pairs = [item for _, item in items if not isinstance(item, Rendered)]
    prompts = iter(tokenizer.encode_all([prompt for prompt, _ in pairs], special_tokens=True))
    wholes = [whole for pair in pairs if not isinstance(pair, _Apart) for whole in pair[1:]]
    answers = [pair.answer for pair in pairs if isinstance(pair, _Apart)]
    whole_ids = iter(tokenizer.encode_all(wholes, special_tokens=True))
    answer_ids = iter(tokenizer.encode_all(answers, special_tokens=False))
    rendered: list[Rendered | Broken] = []
    for example, item in items:
        if not isinstance(item, Rendered):
            prompt, is_apart = next(prompts), isinstance(item, _Apart)
            rest = ended(next(answer_ids if is_apart else whole_ids), tokenizer.end_of_text)
            is_ended = len(prompt) and prompt[-1] == tokenizer.end_of_text
            is_ended = is_ended and not np.array_equal(rest[: len(prompt)], prompt)
            prompt = prompt[:-1] if is_ended else prompt
            item = _masked(example, prompt, np.concatenate([prompt, rest]) if is_apart else rest)
        rendered.append(item._replace(counted=np.ones(len(item.ids), np.bool_)) if all_count else item)
    return rendered


_PROMPT_DIFFERS = (
    "the prompt tokenizes differently when the completion follows; the difference counts as completion; end prompts "
    "where a token ends (a space belongs to the completion)"
)


def _masked(example: Example, prompt: Tokens, whole: Tokens) -> Rendered:
    """Count ids from the first that differs from the prompt's."""
    length = min(len(prompt), len(whole))
    different = np.flatnonzero(prompt[:length] != whole[:length])
    common = int(different[0]) if len(different) else length
    notes = (_PROMPT_DIFFERS,) if common < len(prompt) else ()
    return Rendered(example.number, whole, np.arange(len(whole)) >= common, notes=notes)


def _require_use(fields: Mapping[str, Any], text: str, form: Format, used: Collection[str] = ()) -> None:
    """Raise ValueError for a column that matters in this format, isn't `used`, and isn't in the row's text."""
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


_WITH = "Below is an instruction that describes a task, paired with an input that provides further context. "
_WITHOUT = "Below is an instruction that describes a task. "
_RESPOND = "Write a response that appropriately completes the request."
PROMPTS = {
    "alpaca": (
        f"{_WITH}{_RESPOND}\n\n### Instruction:\n{{instruction}}\n\n### Input:\n{{input}}\n\n### Response:\n",
        f"{_WITHOUT}{_RESPOND}\n\n### Instruction:\n{{instruction}}\n\n### Response:\n",
    ),
    "alpaca-chat": (
        f"SYSTEM: {_WITH}{_RESPOND}\nUSER: {{instruction}}\n{{input}}\nASSISTANT:",
        f"SYSTEM: {_WITHOUT}{_RESPOND}\nUSER: {{instruction}}\nASSISTANT:",
    ),
}
"""`data.prompt` by name -> with and without an input. Sources: Stanford alpaca's prompts, and axolotl's `alpaca:chat`
(prompters.py)."""


def _prompts(given: str | tuple[str, str] | None) -> Sequence[str]:
    """Return the texts of `data.prompt`, none for null. Raises DataError for other names in braces."""
    texts = PROMPTS.get(given, (given,)) if isinstance(given, str) else given or ()
    names = {"instruction", "input", "system"}
    for text in texts:
        try:
            found = [name for _, name, *_ in Formatter().parse(text) if name is not None and name not in names]
        except ValueError as error:
            found = [str(error)]
        if found:
            raise DataError(
                f"data.prompt: expected {{instruction}}, {{input}} and {{system}}, found {found[0] or '{}'}.\n"
                f"  Rename the file's column, data.columns='{{instruction: {found[0] or 'COLUMN'}}}', and write other "
                "braces twice."
            )
    return texts


def _instruction(
    template: ChatTemplate | None,
    tokenizer: Tokenizer,
    ignore: Collection[str],
    prompts: Sequence[str],
    example: Example,
) -> tuple[str, str] | Rendered:
    """Render question and answer by `prompts`, or by the chat template if the tokenizer has one; otherwise as texts
    under headings."""
    fields = example.fields
    parts: dict[str, Any] = {key: fields.get(key) for key in ("system", "instruction", "input", "output")}
    parts |= {key: "" for key in ("system", "input") if parts[key] is None}
    if wrong := next((key for key, part in parts.items() if not isinstance(part, str)), None):
        raise ValueError(f"expected {wrong} as text, found {kind(parts[wrong])}")
    if prompts:
        text = prompts[0 if parts["input"] else -1]
        prompt, used = text.format_map(parts), [key for key in ("system", "input") if f"{{{key}}}" in text]
        _require_use(fields, prompt + parts["output"], "instruction", used)
        return _Apart(prompt, parts["output"])
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

_OTHER_HEADER = "the chat template begins an answer differently than its generation prompt; the difference counts too"
_NO_END = (
    "answers without a special token at their end, so the model doesn't learn to stop there; put {{ eos_token }} "
    "after the assistant's text in the chat template"
)


def _chat(
    template: ChatTemplate, ignore: Collection[str], train_on: str | Sequence[str], example: Example
) -> tuple[MarkedText, bool, tuple[str, ...]]:
    """Return the conversation as text with its spans, whether weights keep all answers out of the loss, and notes."""
    conversation = conversation_of(example.fields, "messages", ignore=ignore)
    answers = sum(map(is_answer, conversation.messages))
    try:
        written = template.written(conversation)
        turns, matches_prompt = template.turns(written, train_on)
    except Exception as error:  # a template may raise anything
        raise _refusal(error) from error
    _require_use(example.fields, written.text, "chat", _IN_A_CONVERSATION)
    notes = (*written.notes, *_notes_of_roles(conversation.messages, template))
    notes = notes if matches_prompt else (*notes, _OTHER_HEADER)
    return (written.text, turns), 0 < answers == len(conversation.silent), notes


def _chats(
    template: ChatTemplate, tokenizer: Tokenizer, items: Sequence[tuple[Example, Any]]
) -> list[Rendered | Broken]:
    dtype = token_dtype(tokenizer.vocab_size)
    rendered: list[Rendered | Broken] = []
    chats = template.tokenized([marked for _, (marked, _, _) in items])
    for (example, (_, is_silent, notes)), chat in zip(items, chats, strict=True):
        if not any(chat.counted) and not is_silent:
            turns: list[ChatMessage] = example.fields["messages"]
            roles = ", ".join(dict.fromkeys(str(turn.get("role", turn.get("from"))) for turn in turns))
            problem = f"no assistant message: nothing in the conversation counts; roles: {roles}"
            rendered.append(broken(example, f"{problem}.\n  The role that trains is assistant"))
            continue
        notes = notes if chat.is_ended else (*notes, _NO_END)
        rendered.append(Rendered(example.number, np.array(chat.ids, dtype=dtype), np.array(chat.counted), notes=notes))
    return rendered


_ROLES = {"system", "developer", "user", "assistant", "tool"}


def _notes_of_roles(messages: Sequence[ChatMessage], template: ChatTemplate) -> tuple[str, ...]:
    """Return notes on unusual roles that the template doesn't name: their turns don't count in the loss."""
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


# -------------------------------------------------------------------------------------------------------- messages

# Converts the messages of a row to one form: datasets use those of OpenAI, ShareGPT, LLaMA-Factory and TRL, and chat
# templates of transformers read one.

_SHAREGPT_ROLES = {
    **{"human": "user", "user": "user"},
    **{"gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant"},
    **{"tool": "tool", "function": "tool", "observation": "tool"},
    **{"system": "system", "function_call": "assistant"},
}


def conversation_of(fields: Mapping[Any, Any], *columns: Column, ignore: Collection[str] = ()) -> Conversation:
    """Return the messages of these columns in order, after the row's `system`. Raises ValueError for a wrong row."""
    messages = [m for column in columns for m in messages_of(fields[column], ignore) if m["role"] not in ignore]
    names = () if "system" in ignore else ("system", "system_prompt")
    system = next((fields[name] for name in names if not is_empty(fields.get(name))), None)
    if system is not None and not isinstance(system, str):
        raise ValueError(f"expected the system prompt as text, found {kind(system)}")
    if system is not None and (not messages or messages[0].get("content") != system):
        if messages and messages[0]["role"] in ("system", "developer"):
            raise ValueError(
                "the row has a system column and another system message: leave one out.\n"
                "  data.ignore=[system] leaves out both"
            )
        messages = [{"role": "system", "content": system}, *messages]
    clean = [{key: value for key, value in message.items() if key not in (*WEIGHTS, "loss")} for message in messages]
    tools = _tools(fields)
    if tools and contains("\n".join(str(message.get("content")) for message in clean), tools):
        tools = None  # rows of Hermes also have them in a system message
    return Conversation(clean, tools, list(map(_message_trains, messages)))


_OF_WEIGHTS = re.compile("loss|mask|train|weight", re.IGNORECASE)


def _message_trains(message: ChatMessage) -> bool:
    counts = trains(message, "message")
    stated = [key for key in (*WEIGHTS, "loss") if message.get(key) is not None]
    weight = next((key for key in stated if in_loss(key, message[key])), None)
    for key, value in message.items():
        if _OF_WEIGHTS.search(key) and key not in MEANINGFUL and isinstance(value, (int, float)):
            raise ValueError(
                f"the message's {key} is {value}, which may keep it out of the loss: unknown key.\n"
                f"  Name it weight (0: it doesn't train), or set data.ignore=[{key}]"
            )
    if weight is not None and not is_answer(message):
        raise ValueError(
            f"a message of the role {message['role']} has {weight}={message[weight]}: only assistant messages train.\n"
            f"  Remove the key, or set data.ignore=[{weight}] (which ignores it in all messages)"
        )
    return counts


def _tools(fields: Mapping[Any, Any]) -> list[dict[str, Any]] | None:
    """Return the row's functions. Many datasets hold JSON text: a parquet column has one schema, functions differ."""
    name = next((key for key in ("tools", "functions") if not is_empty(fields.get(key))), "tools")
    expected = f"expected {name} as a list of JSON schemas, found"
    schemas = _listed(fields.get(name), expected)
    if wrong := next((tool for tool in schemas if not isinstance(tool, dict)), None):
        raise ValueError(f"{expected} {kind(wrong)} in it")
    if name == "functions":  # OpenAI's older form is bare
        schemas = [tool if "function" in tool else {"type": "function", "function": tool} for tool in schemas]
    return schemas or None


def _from_json(value: Any, expected: str) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return parse_json(value)
    except ValueError:
        raise ValueError(f"{expected} text that isn't JSON: {value[:40]}") from None


def _listed(value: Any, expected: str) -> list[Any]:
    """Return the items of a list; it and each item may be JSON text. An empty value has none."""
    items = _from_json(value, expected)
    if is_empty(items):
        return []
    if not isinstance(items, list):
        raise ValueError(f"{expected} {kind(items)}")
    return [_from_json(item, expected) for item in cast("list[Any]", items)]


def messages_of(value: Any, ignore: Collection[str] = ()) -> list[ChatMessage]:
    """Return a column's messages with role, content and `tool_calls`, without keys that are null or in `ignore`.

    ShareGPT's turns (`from`, `value`) become `role` and `content`; `function_call` becomes `tool_calls`, with arguments
    as mappings. Raises ValueError with the reason.
    """
    if not isinstance(value, list) or not value:
        is_json = isinstance(value, str) and value.lstrip().startswith(("[", "{"))
        advice = ".\n  It is JSON text: write the list itself (jq -c '.messages |= fromjson')" if is_json else ""
        actual = kind(value) if value != [] else "an empty one"
        raise ValueError(f"expected a list of messages, found {actual}{advice}")
    turns = cast("list[Any]", value)
    is_sharegpt = all(isinstance(turn, dict) and {"from", "value"} <= turn.keys() for turn in turns)
    return [_message(turn, number, is_sharegpt, ignore) for number, turn in enumerate(turns, 1)]


def _message(turn: Any, number: int, is_sharegpt: bool, ignore: Collection[str]) -> ChatMessage:
    if not isinstance(turn, dict):
        raise ValueError(f"expected messages with role and content, found {kind(turn)} as message {number}")
    keys = f"the keys {', '.join(map(str, turn))} in message {number}"
    message: ChatMessage = {key: item for key, item in turn.items() if key not in ignore}
    if is_sharegpt:
        message = _from_sharegpt(message)
    message = _present(message)
    call = message.pop("function_call", None)
    calls = [*_calls(message.pop("tool_calls", None)), *([] if is_empty(call) else _calls([call]))]
    has_content = is_sharegpt or "content" in turn
    if not isinstance(message.get("role"), str) or not (has_content or calls):
        raise ValueError(f"expected messages with role and content, found {keys}")
    if message["role"] == "function":  # OpenAI's older name
        message["role"] = "tool"
    content = message.get("content")
    if isinstance(content, list) and content and all(map(_is_text, cast("list[Any]", content))):
        message["content"] = content = "".join(part["text"] for part in cast("list[Any]", content))
    # A template would drop null, and render a list or a mapping in Python's notation.
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(
            f"expected messages whose content is text, found {kind(content)} as content, of {keys}"
            + (".\n  Only parts of the type text are read" if isinstance(content, list) else "")
            + (".\n  Write it as JSON text" if message["role"] == "tool" else "")
            + (".\n  Write the refusal as content" if message.get("refusal") else "")
        )
    return {**message, **({"tool_calls": calls} if calls else {})}


def _present(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in mapping.items() if item is not None}


def _is_text(part: Any) -> bool:  # in OpenAI's form
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _from_sharegpt(turn: ChatMessage) -> ChatMessage:
    sender, text = turn.pop("from"), turn.pop("value")
    role = _SHAREGPT_ROLES.get(sender) if isinstance(sender, str) else None
    if role is None:
        raise ValueError(f"expected turns from {', '.join(_SHAREGPT_ROLES)}, found {str(sender)[:40]!r}")
    if sender != "function_call":
        return {**turn, "role": role, "content": text}
    calls = _from_json(text, "expected a function_call as JSON with name and arguments, found")
    return {**turn, "role": role, "tool_calls": calls if isinstance(calls, list) else [calls]}


def _calls(value: Any) -> list[dict[str, Any]]:
    """Convert calls to transformers' form: `{"type": "function", "function": {"name": ..., "arguments": {...}}}`."""
    expected = "expected tool_calls as a list of mappings with name and arguments, found"
    return [_call(call, expected) for call in _listed(value, expected)]


def _call(call: Any, expected: str) -> dict[str, Any]:
    call = _present(call) if isinstance(call, dict) else {"function": call}
    function: Any = call.get("function", call)
    function = _present(function) if isinstance(function, dict) else {}
    if not isinstance(function.get("name"), str):
        raise ValueError(f"{expected} {str(call)[:60]}")
    of_arguments = f"expected the arguments of {function['name']} as a JSON object, found"
    raw_arguments = function.get("arguments", function.get("parameters"))  # Llama 3 writes calls with parameters
    arguments = _from_json(raw_arguments, of_arguments)
    arguments = {} if is_empty(arguments) else arguments  # a null in them is a value
    if not isinstance(arguments, dict):
        raise ValueError(f"{of_arguments} {kind(arguments)}")
    outer = call if "function" in call else {}
    for key, value in (*function.items(), *outer.items()):
        if key not in ("name", "arguments", "parameters", "function", "id", "type", "index") and not is_empty(value):
            raise ValueError(f"expected only name and arguments in a call, found the key {key}")
    kept = {key: value for key, value in function.items() if key != "parameters"}
    return {"type": "function", **outer, "function": {**kept, "arguments": arguments}}
