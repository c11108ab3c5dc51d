"""Limits of time and memory for what comes with a model: chat templates, and regular expressions of tokenizers.

Nothing can interrupt the tokenizers library, so a call runs in a daemon thread. One over its limit is left behind, and
dies with the process that the error ends.
"""

import os
import resource
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from portable_fsdp.runtime.errors import DataError

T = TypeVar("T")

SECONDS = 4.0
_SECONDS_PER_DOCUMENT = 0.05  # a template on a busy host: ten times what a long one takes
_CHARACTERS_PER_SECOND = 20_000  # a slow tokenizer on a busy host
BYTES = 96 << 20
_BYTES_PER_CHARACTER = 500  # measured: 230, where each is a token
_BYTES_PER_CPU = 16 << 20  # the stack of a thread of the tokenizers library, and what malloc keeps for it
_POLL_S = 0.05


@dataclass(frozen=True)
class Limit:
    """What documents with so many characters may take."""

    documents: int
    characters: int = 0

    @property
    def seconds(self) -> float:
        return SECONDS + _SECONDS_PER_DOCUMENT * self.documents + self.characters / _CHARACTERS_PER_SECOND

    @property
    def bytes(self) -> int:  # a template adds some characters to each
        return BYTES + _BYTES_PER_CHARACTER * (self.characters + 2_000 * self.documents)

    def result(self, future: "Future[T]", what: str) -> T:
        """The result of `begin`. Raises DataError about `what` over this limit, and for a panic of the library."""
        most, problem, waited = _own_bytes() + self.bytes, f"took more than {self.seconds:.0f} s", 0.0
        while waited < self.seconds:
            began, is_done = time.monotonic(), bool(wait([future], _POLL_S).done)
            waited += min(time.monotonic() - began, 1.0)  # a process that is stopped and continues counts little
            if is_done:
                error = future.exception()
                if type(error).__name__ != "PanicException":
                    return future.result()
                problem = f"failed: {error}"
                break
            if _own_bytes() > most:
                problem = f"took more than {self.bytes >> 20} MiB of memory"
                break
        raise DataError(
            f"{what}: the tokenizer or its chat template {problem}.\n  Look at the template and at the regular "
            "expressions in tokenizer.json, or take another tokenizer."
        )


OPENING = Limit(0, characters=1_000_000)
"""For opening a tokenizer, which may convert it: a minute, and 0.6 GiB."""


def begin(call: Callable[[], T]) -> "Future[T]":
    """Run `call` in a daemon thread, for `Limit.result`."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # a panic in Rust is no Exception
            future.set_exception(error)

    threading.Thread(target=run, name="portable_fsdp limited", daemon=True).start()
    return future


def limited(call: Callable[[], T], what: str, limit: Limit) -> T:
    """The result of `call`; raises as `Limit.result`."""
    with memory_limit() as allow:
        allow(limit)
        return limit.result(begin(call), what)


@contextmanager
def memory_limit() -> Generator[Callable[[Limit], None]]:
    """Gives a function that allows 1.5 times a limit's memory from now on. An allocation beyond that, which no
    poll would notice in time, raises MemoryError in any thread."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)

    def allow(limit: Limit) -> None:
        if soft == resource.RLIM_INFINITY:
            most = _own_bytes(5) + 3 * limit.bytes // 2 + _BYTES_PER_CPU * (os.cpu_count() or 1)
            resource.setrlimit(resource.RLIMIT_DATA, (most, hard))

    try:
        yield allow
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def require_small_numbers(tokenizer: Any, what: str) -> None:
    """Raises DataError for a tokenizer of several chat templates and no default, and for powers, huge numbers and
    products of two variables in its template: nothing stops Python while it computes those."""
    from jinja2 import Environment, TemplateError

    try:
        lexed = [(kind, text) for _, kind, text in Environment().lex(tokenizer.get_chat_template())]
    except ValueError as error:
        raise DataError(f"{what}: {str(error).partition('!')[0]:.200}.") from None
    except TemplateError:  # whoever applies it says so
        return
    tokens = [("", ""), *(token for token in lexed if token[0] != "whitespace"), ("", ""), ("", "")]
    for before, (kind, text), after, last in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
        operator = text if kind == "operator" else ""  # text between expressions may be ** too: Markdown's
        has_literal = before[0] == "string" or (after[0] == "integer" and last[1] not in ("|", ".", "[", "**"))
        is_huge = kind == "integer" and len(text) > 7
        if is_huge or operator == "**" or (operator == "*" and not has_literal):
            raise DataError(
                f"{what}: expected a chat template without powers, huge numbers and products of variables, found "
                f"{' '.join((before[1], text, after[1])):.60}."
            )


def _own_bytes(column: int = 1) -> int:
    """Resident memory, or by proc_pid_statm(5) another size; a huge one where there is no /proc."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()
    return 1 << 50
