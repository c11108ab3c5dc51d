"""Chat templates: render messages as text and locate the assistant's turns in it.

A template with `{% generation %}` marks the assistant's text itself. Otherwise a turn begins where the preceding
conversation ends when rendered with `add_generation_prompt`, and ends where the conversation up to it ends. Some
templates render such a prefix differently than the whole (without the reasoning of earlier turns, say). Then a second
rendering, with a mark in place of the turn's text, shows what surrounds the turn in the whole.
"""

import inspect
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from typing import Any, NamedTuple, Self

from portable_fsdp.data.examples import (
    LEFT_OUT,
    MEANINGFUL,
    REASONING,
    ChatMessage,
    Conversation,
    holds,
    is_answer,
    is_empty,
)
from portable_fsdp.runtime.errors import DataError
from portable_fsdp.runtime.hub import import_transformers

DATE = "2024-07-26"
"""The date that `strftime_now` returns in a template: a run's rows mustn't depend on the day it starts. Llama 3's
templates fall back to this date."""

_DATE_CALL = re.compile(r"""\bstrftime_now\(\s*(?P<quote>["'])(?P<form>[^"'\\]*)(?P=quote)\s*\)""")
_MARK = 0xF0000
"""First character of a private plane, which no text uses: each text of a conversation is replaced by one of them."""

KEPT_OUT = "answers that the chat template keeps out of the loss: they are outside of {% generation %}"

CharacterSpan = tuple[int, int]
"""[begin, end)."""
MarkedText = tuple[str, list[CharacterSpan]]
"""A conversation as text, and parts of it, in order."""


class Written(NamedTuple):
    conversation: Conversation
    """Its messages, with tool calls in the form that the template reads."""
    text: str
    generated: list[CharacterSpan]
    """Spans in `{% generation %}`."""
    notes: tuple[str, ...]


class TokenizedChat(NamedTuple):
    ids: list[int]
    counted: list[bool]
    """Mask of the ids that are in one of the spans, or end one."""
    is_ended: bool
    """A special token ends each span."""


_Form = Callable[[ChatMessage], ChatMessage]


def _with_calls(
    message: ChatMessage, no_content: ChatMessage, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> ChatMessage:
    calls = message.get("tool_calls")
    return {**no_content, **message, "tool_calls": [change(call) for call in calls]} if calls else message


def _arguments_as_text(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


_FORMS = [
    partial(_with_calls, no_content=no_content, change=change)
    for no_content in ({}, {"content": None})  # DeepSeek's templates test whether content is none
    for change in (lambda call: call, _arguments_as_text, lambda call: call["function"])
]
"""The forms in which templates read tool calls, transformers' documented form first."""


class ChatTemplate:
    """The chat template of a tokenizer of transformers."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        """`arguments`: further variables of the template, beyond messages and tools."""
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        self.text: str = tokenizer.get_chat_template()
        # transformers passes the real clock to templates, and accepts no other function.
        date = datetime.fromisoformat(DATE)
        self._dated = re.sub(_DATE_CALL, lambda match: repr(date.strftime(match["form"])), self.text)
        self._has_other_date_call = re.search(r"\bstrftime_now\s*\(", self._dated) is not None
        self._render_template = import_transformers().utils.chat_template_utils.render_jinja_template
        self._marks_turns = re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None
        self._shapes: dict[object, tuple[_Form, list[tuple[int, str]]]] = {}

    @property
    def date(self) -> str | None:
        """`DATE` if the template's text depends on the date, else None."""
        return DATE if self._reads("strftime_now") else None

    def taking(self, arguments: Mapping[str, Any]) -> Self:
        """Return a copy with these arguments. Raises DataError for those that it doesn't read or the trainer sets."""
        ours = {"messages", "strftime_now", *inspect.signature(self._tokenizer.apply_chat_template).parameters}
        for name in arguments:
            if name in ours - {"documents"}:
                raise DataError(f"data.chat_template_kwargs: the trainer itself sets {name}.\n  Leave it out.")
            if not self._reads(name):
                raise DataError(
                    f"data.chat_template_kwargs: the chat template doesn't read {name}.\n"
                    "  Leave it out, or correct its name (data.tokenizer has the template)."
                )
        return type(self)(self._tokenizer, arguments)

    def _reads(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self.text) is not None

    def names(self, role: str) -> bool:
        return re.search(rf"""["']{re.escape(role)}["']""", self.text) is not None

    # ------------------------------------------------------------------------------------------------------- text

    def written(self, conversation: Conversation) -> Written:
        """Render the conversation. Raises the template's own error, and ValueError if it omits a message or a key."""
        form, left_out = self._left_out_of(conversation)
        conversation = conversation._replace(messages=[form(message) for message in conversation.messages])
        text, generated = self._render(conversation)
        notes: list[str] = []
        for number, key in left_out:
            notes += [KEPT_OUT] if key == "generation" else self._left_out_note(conversation, number, key)
        for message in conversation.messages:
            if not holds(text, message.get("content")):
                notes.append(f"messages of the role {message['role']} whose text the chat template cuts or changes")
        notes += self._keys_left_out(conversation, text)
        return Written(conversation, text, generated, tuple(dict.fromkeys(notes)))

    def _left_out_of(self, conversation: Conversation) -> tuple[_Form, list[tuple[int, str]]]:
        """Return the first form of calls that the template renders, and what it omits: (message, key), (-1, "tools"),
        and (message, "generation") for answers outside of `{% generation %}`. Renders with marks in place of all texts,
        since a short text may be in the output by accident."""
        marked, marks = _marked(conversation)
        shape = tuple(marks), tuple(message["role"] for message in conversation.messages)
        if shape in self._shapes:
            return self._shapes[shape]
        results = list[tuple[_Form, list[tuple[int, str]]]]()
        for form in _FORMS:
            try:
                text, generated = self._render(marked._replace(messages=[form(message) for message in marked.messages]))
            except Exception:  # a template may raise anything
                continue
            left_out = [(number, key) for number, key, mark in marks if mark not in text]
            inside = "".join(text[begin:end] for begin, end in generated) if self._marks_turns else text
            outside = {n for n, _, mark in marks if mark in text} - {-1, *(n for n, _, mark in marks if mark in inside)}
            left_out += [(n, "generation") for n in outside if is_answer(marked.messages[n])]
            results.append((form, list(dict.fromkeys(left_out))))
            if not any(key == "tool_calls" for _, key in left_out):
                break
        if len(self._shapes) > 1000:
            self._shapes.clear()
        # If no form can be rendered, rendering the texts themselves raises.
        self._shapes[shape] = results[-1] if results else (_FORMS[0], [])
        return self._shapes[shape]

    def _left_out_note(self, conversation: Conversation, number: int, key: str) -> list[str]:
        """Raise ValueError unless the template reads this key and omits it in some messages only."""
        if key == "content":
            role, problem = conversation.messages[number]["role"], "the chat template leaves out"
            if conversation.messages[number].get("tool_calls"):
                raise ValueError(
                    f"{problem} the text of message {number + 1}, which has tool_calls too.\n"
                    "  Remove that text, or use another template"
                )
            raise ValueError(
                f"{problem} message {number + 1} (role {role}).\n"
                f"  Remove the message, or set data.ignore=[{role}] to leave out all of this role"
            )
        if key not in REASONING or not any(map(self._reads, REASONING)):
            raise ValueError(
                f"the chat template leaves out {key}, or a part of it.\n  Write it into the text of a message, use "
                f"another template, or set data.ignore=[{key}] to leave it out"
            )
        return [f"messages whose {key} the chat template drops, although it mentions that key"]

    def _keys_left_out(self, conversation: Conversation, text: str) -> list[str]:
        """Return notes on keys that don't matter for training and that the template doesn't use."""
        known = {"role", "content", *MEANINGFUL}
        keys = {key for message in conversation.messages for key in message if key not in known}
        if maybe := {key for key in keys if self._reads(key)}:
            bare = [{key: m[key] for key in m if key not in maybe} for m in conversation.messages]
            try:
                keys -= maybe if self._render(conversation._replace(messages=bare))[0] != text else set()
            except Exception:  # the template needs one of them
                keys -= maybe
        return [f"{LEFT_OUT}messages[].{key[:64]}" for key in sorted(keys)]

    def _render(self, conversation: Conversation, *, add_prompt: bool = False) -> MarkedText:
        """Return the text, and its spans in `{% generation %}`. Unlike `apply_chat_template`, accepts an empty list."""
        if conversation.tools is not None and not self._reads("tools"):
            raise ValueError(
                "the chat template doesn't read `tools`: it would leave the functions out.\n"
                "  Use another template, or set data.ignore=[tools]"
            )
        if self._has_other_date_call:
            raise ValueError(
                "the chat template calls strftime_now without a quoted format, as in strftime_now('%Y-%m-%d'): its "
                "rows would change every day"
            )
        texts, generated = self._render_template(
            conversations=[list(conversation.messages)],
            tools=conversation.tools,
            # The template itself: with tools, a tokenizer with several templates would pick another.
            chat_template=self._dated,
            return_assistant_tokens_mask=self._marks_turns,
            add_generation_prompt=add_prompt,
            **{**self._tokenizer.special_tokens_map, **self._arguments},
        )
        return texts[0], generated[0] if generated else []

    # ------------------------------------------------------------------------------------------------------ turns

    def turns(self, written: Written, train_on: str | Sequence[str] = "answers") -> tuple[list[CharacterSpan], bool]:
        """Return the spans of the turns that train (`data.train_on`), and whether each begins with the generation
        prompt. Raises ValueError if the text doesn't show where a turn begins and ends."""
        silent, messages = written.conversation.silent, written.conversation.messages
        if train_on == "all":
            return [(0, len(written.text))], True
        if not isinstance(train_on, str) and {*train_on} != {"assistant"}:
            numbers = [number for number, message in enumerate(messages) if message["role"] in train_on]
            return self.spans(written, [number for number in numbers if number not in silent])
        answers = [number for number, message in enumerate(messages) if is_answer(message)]
        if train_on == "last":
            return self.spans(written, [number for number in answers[-1:] if number not in silent])
        if not self._marks_turns:
            return self.spans(written, [number for number in answers if number not in silent])
        if silent and len(written.generated) != len(answers):
            raise ValueError("expected one {% generation %} for each answer, since some of them have weight 0")
        pairs = zip(answers, written.generated, strict=False)
        return [span for number, span in pairs if number not in silent] if silent else written.generated, True

    def spans(self, written: Written, numbers: Sequence[int]) -> tuple[list[CharacterSpan], bool]:
        """Return the spans of these messages, like `turns`: an answer with what its end is, else the text alone."""
        spans: list[CharacterSpan] = []
        all_match = True
        for number in numbers:
            after = spans[-1][1] if spans else 0
            if is_answer(written.conversation.messages[number]):
                begin, matches_prompt = self._begin(written.conversation, written.text, number, after)
                end = self._end(written.conversation, written.text, number)
            else:
                before, behind = self._around(written.conversation, number)
                matches_prompt = written.text.startswith(before) and written.text.endswith(behind)
                if not matches_prompt:
                    raise _ambiguous(number)
                begin, end = len(before), len(written.text) - len(behind)
            if not after <= begin <= end:
                raise _ambiguous(number)
            spans.append((begin, end))
            all_match &= matches_prompt
        return spans, all_match

    def completion(self, written: Written, first: int) -> tuple[str, int | None]:
        """Return the prompt for message `first`, and where that message begins in the whole; None: where the whole
        begins to differ from the prompt. Raises the template's own error, and ValueError if the text doesn't show it.
        """
        conversation, text, *_ = written
        before = Conversation(conversation.messages[:first], conversation.tools)
        prompt = self._render(before, add_prompt=True)[0]
        common = _common(text, prompt)
        if common == len(prompt) or common >= _common(self._render(before)[0], prompt):
            return prompt, None
        # The template renders the prompt differently once messages follow: Mistral puts the system prompt into the
        # last turn.
        if not is_answer(conversation.messages[first]):
            raise _ambiguous(first)
        return prompt, self._begin(conversation, text, first, 0)[0]

    def _begin(self, conversation: Conversation, text: str, number: int, after: int) -> tuple[int, bool]:
        prefix = self._or_none(conversation._replace(messages=conversation.messages[:number]), add_prompt=True)
        if prefix is not None and text.startswith(prefix):
            return len(prefix), True
        before, _ = self._around(conversation, number)
        start = _common(text, before)
        with_prompt = self._or_none(conversation, add_prompt=True) or text
        header = with_prompt[_common(text, with_prompt) :]
        if not header and not conversation.messages[number].get("tool_calls"):
            return start, True
        for length in range(len(header), 0, -1) if len(header) < 300 else ():
            if (at := text.rfind(header[:length], after, start)) >= 0:
                # Some templates end the generation prompt with thinking tags that the answers in the text lack.
                if not re.fullmatch(r"\s*(<[^<>]+>\s*)*", header[length:]):
                    break
                return at + length, length == len(header)
        raise _ambiguous(number)

    def _end(self, conversation: Conversation, text: str, number: int) -> int:
        # Some templates (Phi-3) append the end of text to every text, also to one that more messages continue.
        end_of_text = self._tokenizer.eos_token or "\0"
        up_to_it = conversation._replace(messages=conversation.messages[: number + 1])
        rendered = self._or_none(up_to_it)
        for prefix in () if rendered is None else (rendered, rendered.removesuffix(end_of_text)):
            if text.startswith(prefix):
                return len(prefix)
        _, behind = self._around(conversation, number)
        _, ending = self._around(up_to_it, number)
        for end in (ending, ending.removesuffix(end_of_text)):
            if text.endswith(behind) and behind.startswith(end):
                return len(text) - len(behind) + len(end)
        # The turn ends differently than the last turn (gpt-oss): `_with_ends` finds the end.
        if text.endswith(behind) and not conversation.messages[number].get("tool_calls"):
            return len(text) - len(behind)
        raise _ambiguous(number)

    def _around(self, conversation: Conversation, number: int) -> tuple[str, str]:
        """Return the text before and after this message's text (without text: before and after its first call's name).
        Raises ValueError unless the template renders that exactly once."""
        mark, messages, message = chr(_MARK), list(conversation.messages), conversation.messages[number]
        first, *others = message.get("tool_calls") or [{}]
        has_calls = not message.get("content") and message.get("tool_calls")
        with_mark = {"tool_calls": [_named(first, mark), *others]} if has_calls else {"content": mark}
        messages[number] = {**message, **with_mark}
        text = self._or_none(conversation._replace(messages=messages))
        if text is None or text.count(mark) != 1:
            raise _ambiguous(number)
        before, _, behind = text.partition(mark)
        return before, behind

    def _or_none(self, conversation: Conversation, *, add_prompt: bool = False) -> str | None:
        try:
            return self._render(conversation, add_prompt=add_prompt)[0]
        except Exception:  # a template may raise anything
            return None

    # ----------------------------------------------------------------------------------------------------- tokens

    def tokenized(self, texts: Sequence[MarkedText]) -> list[TokenizedChat]:
        """Tokenize each text; ids in its spans count, and so does the special token that ends each span."""
        if not texts:
            return []
        # As in apply_chat_template: the template writes the special tokens itself.
        options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        encoded = self._tokenizer([text for text, _ in texts], **options)
        parts = zip(encoded["input_ids"], encoded["offset_mapping"], texts, strict=True)
        return [self._with_ends(text, ids, offsets, spans) for ids, offsets, (text, spans) in parts]

    @cached_property
    def _special(self) -> set[int]:
        added = self._tokenizer.added_tokens_decoder.items()
        return {*self._tokenizer.all_special_ids, *(number for number, token in added if token.special)}

    def _with_ends(
        self, text: str, ids: list[int], offsets: Sequence[CharacterSpan], spans: Sequence[CharacterSpan]
    ) -> TokenizedChat:
        """Count the spans' ids, and after a span without a special token at its end the next one: the template puts it
        outside of `{% generation %}`, or the next role's marker ends a turn (GLM)."""
        counted, is_ended = _inside(offsets, spans), True
        begins = [begin for begin, _ in offsets]

        def is_blank(index: int) -> bool:
            begin, end = offsets[index]
            return ids[index] not in self._special and not text[begin:end].strip()

        for _, end in spans:
            behind = bisect_left(begins, end)
            last = next((index for index in range(behind - 1, -1, -1) if not is_blank(index)), None)
            if last is None or ids[last] in self._special:
                continue
            following = next((index for index in range(behind, len(ids)) if not is_blank(index)), None)
            if following is None or ids[following] not in self._special:
                is_ended = False
                continue
            counted[behind : following + 1] = [True] * (following + 1 - behind)
        return TokenizedChat(ids, counted, is_ended)


def _marked(conversation: Conversation) -> tuple[Conversation, list[tuple[int, str, str]]]:
    """Replace each text by a unique character; also return (message, key, character) of each, -1 for the functions."""
    marks: list[tuple[int, str, str]] = []

    def mark(number: int, key: str) -> str:
        marks.append((number, key, chr(_MARK + len(marks) % 65000)))
        return marks[-1][2]

    def call(number: int, tool_call: dict[str, Any]) -> dict[str, Any]:
        name, argument, value = (mark(number, "tool_calls") for _ in range(3))
        if not tool_call["function"]["arguments"]:
            del marks[-2:]
        arguments = {argument: value} if tool_call["function"]["arguments"] else {}
        return {**tool_call, "function": {**tool_call["function"], "name": name, "arguments": arguments}}

    messages: list[ChatMessage] = []
    for number, message in enumerate(conversation.messages):
        keys = ["content", *(key for key in MEANINGFUL if key in message and key != "tool_calls")]
        texts = {key: mark(number, key) for key in keys if not is_empty(message.get(key))}
        calls = [call(number, tool_call) for tool_call in message.get("tool_calls", ())]
        messages.append({**message, **texts, **({"tool_calls": calls} if calls else {})})
    tools = [_named(tool, mark(-1, "tools")) for tool in conversation.tools or ()]
    return Conversation(messages, tools or None), marks


def _named(call: dict[str, Any], name: str) -> dict[str, Any]:
    """Return this call or function under another name."""
    return {**call, "function": {**call["function"], "name": name}} if "function" in call else {**call, "name": name}


def _common(text: str, other: str) -> int:
    """Return the length of the common prefix."""
    length = min(len(text), len(other))
    return next((index for index in range(length) if text[index] != other[index]), length)


def _ambiguous(number: int) -> ValueError:
    return ValueError(
        f"the chat template doesn't show where message {number + 1} begins and ends.\n"
        "  Put {% generation %} and {% endgeneration %} around the assistant's text in that template"
    )


def _inside(offsets: Sequence[CharacterSpan], spans: Sequence[CharacterSpan]) -> list[bool]:
    """Return a mask of the tokens with a character in one of the spans; both ascend."""
    counted, at = [False] * len(offsets), 0
    for begin, end in spans:
        while at < len(offsets) and offsets[at][1] <= begin:
            at += 1
        while at < len(offsets) and offsets[at][0] < end:
            counted[at] = True
            at += 1
    return counted
