"""Chat templates: messages become text, with the assistant's turns marked.

A template with `{% generation %}` marks the assistant's text itself. Without it, a turn begins where the conversation
before it ends when that asks the assistant to answer (`add_generation_prompt`), and ends where the conversation up to
it ends. Both must be the beginning of the whole text: this refuses a template that renders a turn differently once more
follows (for example, without the reasoning of earlier turns).
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Self

from portable_fsdp.runtime.errors import DataError

DATE = "2024-07-26"
"""The answer to `strftime_now` in a template: a run's rows mustn't depend on the day it starts. Llama 3's templates
take this date where they can't ask."""

_ASKS = re.compile(r"""\bstrftime_now\(\s*(?P<quote>["'])(?P<form>[^"'\\]*)(?P=quote)\s*\)""")

ChatMessage = dict[str, Any]
CharacterSpan = tuple[int, int]
"""[begin, end)."""


class Conversation(NamedTuple):
    """Messages, and the functions that the assistant may call in them, as JSON schemas."""

    messages: Sequence[ChatMessage]
    tools: Sequence[dict[str, Any]] | None = None


TokenizedChat = tuple[list[int], list[bool]]
"""A conversation as ids, and which of them the assistant writes."""
MarkedText = tuple[str, list[CharacterSpan]]
"""A conversation as text, and the assistant's turns in it."""


class ChatTemplate:
    """The chat template of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        """`arguments`: of the template, besides messages and tools."""
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        self.text: str = tokenizer.get_chat_template()
        # transformers gives templates the real clock, and takes no function in its place.
        date = datetime.fromisoformat(DATE)
        self._dated = re.sub(_ASKS, lambda asks: repr(date.strftime(asks["form"])), self.text)
        self._marks_turns = re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None

    @property
    def asks_for_time(self) -> bool:
        """Its text then depends on `DATE` too."""
        return self._reads("strftime_now")

    def taking(self, arguments: Mapping[str, Any]) -> Self:
        """A copy with these arguments; raises DataError for those that it doesn't read or that the trainer sets."""
        ours = {"messages", "strftime_now", *inspect.signature(self._tokenizer.apply_chat_template).parameters}
        for name in arguments:
            if name in ours - {"documents"}:
                raise DataError(
                    f"data.chat_template_kwargs: expected arguments of the chat template's own, found {name}, which "
                    "the trainer sets.\n  Leave it out."
                )
            if not self._reads(name):
                raise DataError(
                    f"data.chat_template_kwargs: expected arguments that the chat template reads, found {name}, which "
                    "is nowhere in it.\n  Leave it out, or correct its name (data.tokenizer has the template)."
                )
        return type(self)(self._tokenizer, arguments)

    def _reads(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self.text) is not None

    def names(self, role: str) -> bool:
        return re.search(rf"""["']{re.escape(role)}["']""", self.text) is not None

    def ids(self, conversation: Conversation, *, asks: bool = False) -> list[int]:
        """The whole conversation; `asks` adds the beginning of an assistant's answer. Raises what the template does."""
        encoded = self._applied(conversation, tokenize=True, return_dict=True, add_generation_prompt=asks)
        return list(encoded["input_ids"])

    def rendered(self, conversation: Conversation) -> TokenizedChat | MarkedText:
        """With its turns marked. Raises the template's own error, or a ValueError where the text doesn't show where
        turns begin and end."""
        if self._marks_turns:
            encoded = self._applied(conversation, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
            return list(encoded["input_ids"]), [bool(mask) for mask in encoded["assistant_masks"]]
        text = self._text(conversation)
        return text, self._turns(conversation, text)

    def tokenized(self, rendered: Sequence[Any]) -> list[TokenizedChat]:
        """What `rendered` gave for each of several conversations."""
        if self._marks_turns or not rendered:
            return list(rendered)
        # As apply_chat_template does: the template writes the special tokens itself.
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        encoded = self._tokenizer([text for text, _ in rendered], **options)
        parts = zip(encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True)
        return [(ids, _inside(offsets, turns)) for ids, offsets, (_, turns) in parts]

    def _turns(self, conversation: Conversation, text: str) -> list[CharacterSpan]:
        """The assistant's turns in the rendered text."""
        spans: list[CharacterSpan] = []
        messages, tools = conversation
        for number, message in enumerate(messages):
            if message.get("role") == "assistant":
                if number == 0:
                    raise ValueError(
                        "expected a message before the assistant's first one: this chat template has no "
                        "{% generation %}, so nothing shows where that turn begins"
                    )
                before, turn = Conversation(messages[:number], tools), Conversation(messages[: number + 1], tools)
                spans.append((self._end_of(before, text, asks=True), self._end_of(turn, text, asks=False)))
        return spans

    def _end_of(self, beginning: Conversation, text: str, *, asks: bool) -> int:
        rendered = self._text(beginning, asks=asks)
        # Some templates end every text by the end of text (Phi-3), also one that goes on when more messages follow.
        for prefix in (rendered, rendered.removesuffix(self._tokenizer.eos_token or "\0")):
            if text.startswith(prefix):
                return len(prefix)
        raise ValueError(
            "expected a chat template that only adds to the text when messages follow, found one that then renders "
            f"message {len(beginning.messages)} of the conversation differently.\n"
            "  Put {% generation %} and {% endgeneration %} around the assistant's text in that template"
        )

    def _text(self, conversation: Conversation, *, asks: bool = False) -> str:
        return str(self._applied(conversation, tokenize=False, add_generation_prompt=asks))

    def _applied(self, conversation: Conversation, **how: Any) -> Any:
        if conversation.tools is not None and not self._reads("tools"):
            raise ValueError(
                "expected a chat template that reads tools, found no `tools` in it: it would leave the functions out"
            )
        if re.search(r"\bstrftime_now\s*\(", self._dated):
            raise ValueError(
                "expected a chat template that asks for the date by a format in quotes, as strftime_now('%Y-%m-%d'), "
                "found another call: its rows would change every day"
            )
        # With the template itself: with tools, a tokenizer of several templates would take another.
        return self._tokenizer.apply_chat_template(
            list(conversation.messages),
            tools=conversation.tools,
            chat_template=self._dated,
            **how,
            **self._arguments,
        )


def _inside(offsets: Sequence[CharacterSpan], spans: Sequence[CharacterSpan]) -> list[bool]:
    """Which tokens have a character in one of the spans; both in ascending order."""
    counted = [False] * len(offsets)
    at = 0
    for begin, end in spans:
        while at < len(offsets) and offsets[at][1] <= begin:
            at += 1
        while at < len(offsets) and offsets[at][0] < end:
            counted[at] = True
            at += 1
    return counted
