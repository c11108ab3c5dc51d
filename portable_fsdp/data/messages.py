"""One form for the messages of a row: data sets write them as OpenAI, ShareGPT, LLaMA-Factory and TRL do, and chat
templates of transformers read one form."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from portable_fsdp.config.data import Column
from portable_fsdp.data.examples import WEIGHTS, contains, is_empty, kind, trains, without_nulls
from portable_fsdp.runtime.files import parse_json

_SHAREGPT_ROLES = {
    **{"human": "user", "user": "user"},
    **{"gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "model": "assistant"},
    **{"tool": "tool", "function": "tool", "observation": "tool"},
    **{"system": "system", "function_call": "assistant"},
}

ChatMessage = dict[str, Any]


class Conversation(NamedTuple):
    """Messages, the functions that the assistant may call in them (JSON schemas), and whether each message trains."""

    messages: Sequence[ChatMessage]
    tools: Sequence[dict[str, Any]] | None = None
    trains: Sequence[bool] = ()
    """Empty: all do."""

    @property
    def silent(self) -> list[int]:
        """The assistant's messages that don't train."""
        pairs = zip(self.messages, self.trains, strict=False)
        return [number for number, (message, trains) in enumerate(pairs) if is_answer(message) and not trains]


def is_answer(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


def conversation_of(fields: Mapping[Any, Any], *columns: Column, ignore: Collection[str] = ()) -> Conversation:
    """The messages of these columns one after the other, below the row's `system`. Raises ValueError."""
    given = [message for column in columns for message in messages_of(fields[column], ignore)]
    messages = [message for message in given if message["role"] not in ignore]
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
        tools = None  # Hermes' rows have them in a system message too
    return Conversation(clean, tools, [_message_trains(message) for message in messages])


def _message_trains(message: ChatMessage) -> bool:
    counts = trains(message, "message")
    weight = next((key for key in (*WEIGHTS, "loss") if message.get(key)), None)
    if weight is not None and not is_answer(message):
        raise ValueError(
            f"a message of the role {message['role']} has {weight}={message[weight]}: only the assistant's train.\n"
            f"  Remove the key, or set data.ignore=[{weight}] (which ignores it in all messages)"
        )
    return counts


def _tools(fields: Mapping[Any, Any]) -> list[dict[str, Any]] | None:
    """The row's functions; a column of parquet has one schema, and functions have several: many data sets hold JSON."""
    name = next((key for key in ("tools", "functions") if not is_empty(fields.get(key))), "tools")
    expected = f"expected {name} as a list of JSON schemas, found"
    tools = _from_json(fields.get(name), expected)
    if is_empty(tools):
        return None
    if not isinstance(tools, list):
        raise ValueError(f"{expected} {kind(tools)}")
    schemas = [_from_json(tool, expected) for tool in cast("list[Any]", tools)]
    if wrong := next((tool for tool in schemas if not isinstance(tool, dict)), None):
        raise ValueError(f"{expected} {kind(wrong)} in it")
    schemas = without_nulls(schemas)
    if name == "functions":  # OpenAI's older form is bare
        return [tool if "function" in tool else {"type": "function", "function": tool} for tool in schemas]
    return schemas


def _from_json(value: Any, expected: str) -> Any:
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return parse_json(value)
    except ValueError:
        raise ValueError(f"{expected} text that isn't JSON: {value[:40]}") from None


# -------------------------------------------------------------------------------------------------------- messages


def messages_of(value: Any, ignore: Collection[str] = ()) -> list[ChatMessage]:
    """A column's messages with role, content and `tool_calls`, without null values and keys in `ignore`.

    ShareGPT's turns (`from`, `value`) become `role` and `content`; `function_call` becomes `tool_calls`, with arguments
    as mappings. Raises ValueError with what is wrong.
    """
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a list of messages, found {kind(value) if value != [] else 'an empty one'}")
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
    message = {key: without_nulls(item) for key, item in message.items() if item is not None}
    call = message.pop("function_call", None)
    calls = [*_calls(message.pop("tool_calls", None)), *([] if is_empty(call) else _calls([call]))]
    has_content = is_sharegpt or "content" in turn
    if not isinstance(message.get("role"), str) or not (has_content or calls):
        raise ValueError(f"expected messages with role and content, found {keys}")
    if message["role"] == "function":  # OpenAI's older name
        message["role"] = "tool"
    content = message.get("content")
    if isinstance(content, list) and content and all(_is_text(part) for part in cast("list[Any]", content)):
        message["content"] = content = "".join(part["text"] for part in cast("list[Any]", content))
    # A template would render null as nothing, and a list or a mapping in Python's notation.
    if not isinstance(content, str) and not (content is None and calls):
        raise ValueError(
            f"expected messages whose content is text, found {kind(content)} as content, of {keys}"
            + (".\n  Only parts of the type text are read" if isinstance(content, list) else "")
            + (".\n  Write it as JSON text" if message["role"] == "tool" else "")
            + (".\n  Write the refusal as content" if message.get("refusal") else "")
        )
    return {**message, **({"tool_calls": calls} if calls else {})}


def _is_text(part: Any) -> bool:
    """Whether it is a part of a message as OpenAI writes text."""
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
    """The calls in the form of transformers: `{"type": "function", "function": {"name": ..., "arguments": {...}}}`."""
    expected = "expected tool_calls as a list of mappings with name and arguments, found"
    calls = _from_json(value, expected)
    if is_empty(calls):
        return []
    if not isinstance(calls, list):
        raise ValueError(f"{expected} {kind(calls)}")
    return [_call(_from_json(call, expected), expected) for call in cast("list[Any]", calls)]


def _call(call: Any, expected: str) -> dict[str, Any]:
    function = cast("dict[str, Any]", call).get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{expected} {str(call)[:60]}")
    of_arguments = f"expected the arguments of {function['name']} as a JSON object, found"
    given = function.get("arguments", function.get("parameters"))  # Llama 3 writes calls with parameters
    arguments = _from_json(given, of_arguments)
    arguments = {} if is_empty(arguments) else without_nulls(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f"{of_arguments} {kind(arguments)}")
    outer = {} if function is call else cast("dict[str, Any]", call)
    for key, value in (*function.items(), *outer.items()):
        if key not in ("name", "arguments", "parameters", "function", "id", "type", "index") and not is_empty(value):
            raise ValueError(f"expected name and arguments in a call, found the key {key}")
    kept = {key: value for key, value in function.items() if key != "parameters"}
    return {"type": "function", **outer, "function": {**kept, "arguments": arguments}}
