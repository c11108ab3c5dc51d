"""Limits of time and memory for untrusted parts of a model: chat templates, and regular expressions of tokenizers.

The tokenizers library can't be interrupted, so a call runs in a daemon thread. A call over its limit keeps running
until the error ends the process.
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
_SECONDS_PER_DOCUMENT = 0.05  # ten times the time of a long template on a busy host
_CHARACTERS_PER_SECOND = 20_000  # a slow tokenizer on a busy host
BYTES = 96 << 20
_BYTES_PER_CHARACTER = 500  # measured: 230, if each character is a token
_BYTES_PER_CPU = 16 << 20  # the stack of a thread of the tokenizers library, and its malloc arena
_POLL_S = 0.05


@dataclass(frozen=True)
class Limit:
    """Limit for a number of documents and their characters."""

    documents: int
    characters: int = 0
    has_bytes: bool = True

    @property
    def seconds(self) -> float:
        return SECONDS + _SECONDS_PER_DOCUMENT * self.documents + self.characters / _CHARACTERS_PER_SECOND

    @property
    def bytes(self) -> int:  # a template adds characters to each document
        return BYTES + _BYTES_PER_CHARACTER * (self.characters + 2_000 * self.documents)

    def result(self, future: "Future[T]", what: str) -> T:
        """Return the result of `begin`. Raises DataError about `what` over this limit, or on a panic of the library."""
        limit_bytes, problem, waited = _own_bytes() + self.bytes, f"took more than {self.seconds:.0f} s", 0.0
        while waited < self.seconds:
            began, is_done = time.monotonic(), bool(wait([future], _POLL_S).done)
            waited += min(time.monotonic() - began, 1.0)  # time in which the process was stopped hardly counts
            if is_done:
                error = future.exception()
                if type(error).__name__ != "PanicException":
                    return future.result()
                problem = f"failed: {error}"
                break
            if self.has_bytes and _own_bytes() > limit_bytes:
                problem = f"took more than {self.bytes >> 20} MiB of memory"
                break
        raise DataError(
            f"{what}: the tokenizer or its chat template {problem}.\n  Check the template and the regular "
            "expressions in tokenizer.json, or use another tokenizer."
        )


OPENING = Limit(0, characters=1_000_000, has_bytes=False)
"""Limit for opening a tokenizer, which may convert it: a minute. Its memory may be that of importing torch."""


def begin(call: Callable[[], T]) -> "Future[T]":
    """Run `call` in a daemon thread, for `Limit.result`."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # a panic in Rust isn't an Exception
            future.set_exception(error)

    threading.Thread(target=run, name="portable_fsdp limited", daemon=True).start()
    return future


def limited(call: Callable[[], T], what: str, limit: Limit) -> T:
    """Return the result of `call`; raises like `Limit.result`."""
    with memory_limit() as allow:
        allow(limit)
        return limit.result(begin(call), what)


@contextmanager
def memory_limit() -> Generator[Callable[[Limit], None]]:
    """Yield a function that allows 1.5 times a limit's memory from now on. An allocation beyond that, too fast for the
    polling, raises MemoryError in any thread."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)

    def allow(limit: Limit) -> None:
        if limit.has_bytes and soft == resource.RLIM_INFINITY:
            limit_bytes = _own_bytes(5) + 3 * limit.bytes // 2 + _BYTES_PER_CPU * (os.cpu_count() or 1)
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))

    try:
        yield allow
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def require_small_numbers(tokenizer: Any, what: str) -> None:
    """Raise DataError for a tokenizer with several chat templates and no default, and for powers, huge numbers and
    products of two variables in its template: Python can't be interrupted while it computes them."""
    from jinja2 import Environment, TemplateError

    try:
        lexed = [(kind, text) for _, kind, text in Environment().lex(tokenizer.get_chat_template())]
    except ValueError as error:
        raise DataError(f"{what}: {str(error).partition('!')[0]:.200}.") from None
    except TemplateError:  # applying the template will report it
        return
    tokens = [("", ""), *(token for token in lexed if token[0] != "whitespace"), ("", ""), ("", "")]
    for before, (kind, text), after, last in zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False):
        operator = text if kind == "operator" else ""  # text between expressions may also contain ** (Markdown)
        has_literal = before[0] == "string" or (after[0] == "integer" and last[1] not in ("|", ".", "[", "**"))
        is_huge = kind == "integer" and len(text) > 7
        if is_huge or operator == "**" or (operator == "*" and not has_literal):
            raise DataError(
                f"{what}: the chat template uses {' '.join((before[1], text, after[1])):.60}; powers, huge numbers and "
                "products of variables are refused because they can't be interrupted."
            )


def _own_bytes(column: int = 1) -> int:
    """Return resident memory, or another column of proc_pid_statm(5); a huge number without /proc."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()
    return 1 << 50
