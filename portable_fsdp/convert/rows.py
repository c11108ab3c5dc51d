"""What a row of the table is: a foreign key, how its values are read, and what becomes of each.

Values arrive as they were typed (text, None for null, lists and mappings of these): so an unquoted `NO` is the word
that its author meant, and `"true"`, `yes` and `1` are one answer. A setting whose name begins with `~` is no option of
ours: the rules over several keys (`rules.py`) make options of it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, cast

YES = ("true", "yes", "y", "t", "on", "1")
NO = ("false", "no", "n", "f", "off", "0")
OFF = (*NO, "", "none", "null", "0.0", "-1", "disable", "disabled")

_DIGITS = re.compile(r"-?[0-9]+")
_ENUM = re.compile(r"^([A-Za-z_]\w*\.)+")  # ShardingStrategy.FULL_SHARD, torch.float32; the 0. of 0.3 is no such thing

Typed = str | None | list["Typed"] | dict[str, "Typed"]


class Set(NamedTuple):
    """Honoured: these settings of ours."""

    settings: Mapping[str, object]
    remark: str = ""


class Skip(NamedTuple):
    """Says nothing that a run of ours needs to be told."""

    reason: str


class Launcher(NamedTuple):
    """The launcher's business; `fact` names what launch.py compares with the processes there are."""

    reason: str
    fact: str = ""


class Refuse(NamedTuple):
    """Can't be honoured. An override of the option `about`, where there is one, settles it otherwise."""

    reason: str
    way: str  # what to do in the file
    about: str = ""

    @property
    def ways(self) -> str:
        return f"{self.way}, or override {self.about}" if self.about else self.way


Answer = Set | Skip | Launcher | Refuse


class UnreadableValue(Exception):
    """Its text says what was expected."""


@dataclass(frozen=True)
class Always:
    """Any value, one answer: texts that are not ours to judge."""

    outcome: Answer

    def answer(self, typed: Typed) -> Answer:
        return self.outcome

    def cases(self) -> list[tuple[str, Answer]]:
        return [("", self.outcome)]


@dataclass(frozen=True)
class Amount:
    """A number from `least` to `most`, or one of the words `also`; all with one answer."""

    outcome: Answer
    least: int = 0
    most: float = math.inf
    also: tuple[str, ...] = ()
    whole: bool = True

    def answer(self, typed: Typed) -> Answer:
        text = one_word(typed)
        if text.lower() in self.also:
            return self.outcome
        # A count is digits alone: its own tool takes no 2.0 for it.
        if (self.whole and not _DIGITS.fullmatch(text)) or not self.least <= _number(text) <= self.most:
            raise UnreadableValue(self._expected)
        return self.outcome

    def cases(self) -> list[tuple[str, Answer]]:
        return [(self._expected, self.outcome)]

    @property
    def _expected(self) -> str:
        bounds = f">= {self.least}" if self.most == math.inf else f"from {self.least} to {self.most}"
        return ", or ".join((f"a {'whole ' * self.whole}number {bounds}", *self.also))


@dataclass(frozen=True)
class Choice:
    """Words in any case, and the numbers that stand for some of them, from `first` on; `other` answers the rest."""

    words: Mapping[str, Answer]
    numbered: tuple[str, ...] = ()
    first: int = 1
    other: Answer | None = None

    def answer(self, typed: Typed) -> Answer:
        text = one_word(typed)
        if text.isdecimal() and 0 <= int(text) - self.first < len(self.numbered):
            text = self.numbered[int(text) - self.first]
        by_word = {word.lower(): outcome for word, outcome in self.words.items()}
        plain = _ENUM.sub("", text).lower().replace("-", "_")
        if plain not in by_word and self.other is not None:
            return self.other
        if plain not in by_word:
            numbers = f", or {self.first} to {self.first + len(self.numbered) - 1}" if self.numbered else ""
            raise UnreadableValue(" | ".join(self.words) + numbers)
        return by_word[plain]

    def cases(self) -> list[tuple[str, Answer]]:
        return [*self.words.items(), *([("else", self.other)] if self.other is not None else [])]


@dataclass(frozen=True)
class DType:
    """A dtype for an option."""

    option: str

    def answer(self, typed: Typed) -> Answer:
        float16 = Refuse("float16 needs a scaled loss, which is not built", "set it to bfloat16", self.option)
        words = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}
        found = {word: Set({self.option: dtype}) for word, dtype in words.items()}
        return Choice({**found, "float16": float16, "fp16": float16}).answer(typed)

    def cases(self) -> list[tuple[str, Answer]]:
        return [(word, self.answer(word)) for word in ("float32", "bfloat16", "float16")]


@dataclass(frozen=True)
class YesNo:
    """true, yes, on, 1 and their opposites, quoted or not; and what else, if anything, its tool takes."""

    yes: Answer
    no: Answer
    auto: Answer | None = None
    other: Answer | None = None

    def answer(self, typed: Typed) -> Answer:
        text = one_word(typed).lower()
        if text in YES:
            return self.yes
        if text in NO:
            return self.no
        if self.auto is not None and text == "auto":
            return self.auto
        if self.other is not None and text:
            return self.other
        raise UnreadableValue("true | false" + " | auto" * (self.auto is not None))

    def cases(self) -> list[tuple[str, Answer]]:
        more = (("auto", self.auto), ("else", self.other))
        return [
            ("true", self.yes),
            ("false", self.no),
            *((word, answer) for word, answer in more if answer is not None),
        ]


@dataclass(frozen=True)
class Either:
    """True or false, with one answer."""

    outcome: Answer

    def answer(self, typed: Typed) -> Answer:
        return YesNo(self.outcome, self.outcome).answer(typed)

    def cases(self) -> list[tuple[str, Answer]]:
        return [("true, false", self.outcome)]


@dataclass(frozen=True)
class Number:
    """A number for an option; `special` values have an answer of their own, and so has the word auto, if it is one."""

    option: str
    whole: bool = True
    special: Mapping[float, Answer] = field(default_factory=dict[float, Answer])
    least: float = -math.inf
    auto: Answer | None = None

    def answer(self, typed: Typed) -> Answer:
        text = one_word(typed)
        if self.auto is not None and text.lower() == "auto":
            return self.auto
        value = _number(text)
        if value in self.special:
            return self.special[value]
        if not value >= self.least or (self.whole and not value.is_integer()):
            least = f" >= {self.least:g}" if self.least > -math.inf else ""
            raise UnreadableValue(f"a {'whole ' * self.whole}number{least}")
        return Set({self.option: int(value) if self.whole else value})

    def cases(self) -> list[tuple[str, Answer]]:
        special = [(f"{value:g}", outcome) for value, outcome in self.special.items()]
        special += [("auto", self.auto)] if self.auto is not None else []
        return [*special, ("a number", Set({self.option: "it"}))]


@dataclass(frozen=True)
class Text:
    """A text for an option, as it is."""

    option: str

    def answer(self, typed: Typed) -> Answer:
        return Set({self.option: one_word(typed)})

    def cases(self) -> list[tuple[str, Answer]]:
        return [("text", Set({self.option: "it"}))]


@dataclass(frozen=True)
class Names:
    """A list of names, or one text with commas between them."""

    option: str

    def answer(self, typed: Typed) -> Answer:
        items = typed if isinstance(typed, list) else [one_word(typed)]
        names = [name.strip() for item in items for name in one_word(item).split(",")]
        if not all(names):
            raise UnreadableValue("names with commas between them, or a list of names")
        return Set({self.option: names})

    def cases(self) -> list[tuple[str, Answer]]:
        return [("names", Set({self.option: "them"}))]


@dataclass(frozen=True)
class Words:
    """Several words, each with settings of its own, in one text with spaces or a list; and true or false."""

    words: Mapping[str, Set]
    yes: Answer
    no: Answer

    def answer(self, typed: Typed) -> Answer:
        items = typed if isinstance(typed, list) else [one_word(typed)]
        found = [word for item in items for word in one_word(item).lower().replace(",", " ").split()]
        if not found or found[0] in (*NO, "none"):
            return self.no
        if len(found) == 1 and found[0] in YES:
            return self.yes
        settings: dict[str, object] = {}
        for word in found:
            if word not in self.words:
                raise UnreadableValue(f"true | false, or of {', '.join(self.words)}")
            for name, value in self.words[word].settings.items():
                if settings.setdefault(name, value) != value:
                    raise UnreadableValue("one strategy")
        return Set(settings)

    def cases(self) -> list[tuple[str, Answer]]:
        return [("true", self.yes), ("false", self.no), *self.words.items()]


@dataclass(frozen=True)
class Off:
    """What is off (false, 0, none, an empty list, or one of `also`) says nothing; the rest is refused."""

    refusal: Refuse
    also: tuple[str, ...] = ()

    def answer(self, typed: Typed) -> Answer:
        is_off = typed.lower() in (*OFF, *self.also) if isinstance(typed, str) else not typed
        return Skip("off, as here") if is_off else self.refusal

    def cases(self) -> list[tuple[str, Answer]]:
        off = ", ".join(("off", *self.also))
        return [(off, Skip("as here")), ("else", self.refusal)]


Takes = Always | Amount | Choice | DType | YesNo | Either | Number | Text | Names | Words | Off


@dataclass(frozen=True)
class Row:
    """One key of another tool, in one place of its files."""

    place: str
    key: str  # with the prefix that the tool writes
    takes: Takes
    aliases: tuple[str, ...] = ()

    @property
    def fate(self) -> str:
        """What becomes of the key: the best of its values' answers."""
        kinds = {type(outcome) for _, outcome in self.takes.cases()}
        if Set in kinds:
            return "honoured"
        if Launcher in kinds:
            return "launcher"
        return "refused" if Refuse in kinds else "not needed"


def one_word(typed: Typed) -> str:
    """The text of a scalar. Raises UnreadableValue for lists, mappings and null."""
    if isinstance(typed, str):
        return typed.strip()
    found = "null" if typed is None else "a list" if isinstance(typed, list) else "a mapping"
    raise UnreadableValue(f"one value, not {found}")


def in_words(typed: Typed) -> str:
    """A value as it could have been typed on one line."""
    if isinstance(typed, list):
        return "[" + ", ".join(map(in_words, cast(list[Typed], typed))) + "]"
    if isinstance(typed, dict):
        return "{" + ", ".join(f"{name}: {in_words(value)}" for name, value in typed.items()) + "}"
    return "null" if typed is None else typed


def _number(text: str) -> float:
    """NaN for what is no number, and for what no option can be: it is within no bounds."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
