"""All errors that a user can cause, and their exit codes.

    PortableFSDPError            exit 1
      UsageError                 exit 2: nothing was started, nothing was written
        ConfigError              a key, a flag or a value of the config
        BackendError             not supported by this device or engine, detected when it opens
        DataError                the corpus or the tokenizer
        CheckpointError          a checkpoint that is incomplete, or of another model
          StoreError             storage that doesn't answer: the checkpoint there may be complete
      TrainingError              the run itself failed (a NaN loss)

A message states the problem, its place and the fix. Any other exception is a bug, and keeps its traceback.
"""

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Python 3.10 has none, and the doctor reports that version
    from typing import Self

_USER_OF_URL = re.compile(r"(\b[a-z][\w+.-]*://)[^/\s\"']*@|(?<![^\s\"'(])[^\s\"'/:@]+:[^\s\"'/@]+@", re.IGNORECASE)
_SECRET_OF_URL = re.compile(r"([?&;][\w.-]*(?:key|token|secret|passw|sig|credential)[\w.-]*=)[^&\s\"']+", re.IGNORECASE)

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT: Ctrl-C in a command that saves nothing
EXIT_STOPPED = 143  # 128 + SIGTERM: stopped on request, after a committed save


def printable(text: str) -> str:
    """Escape non-printable characters except line ends as Python does (`\\x1b`)."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def without_passwords(text: str) -> str:
    """Replace users, passwords and tokens in URLs by `(hidden)`, also `user:password@` in repeated parts of a URL."""
    return _SECRET_OF_URL.sub(r"\1(hidden)", _USER_OF_URL.sub(r"\1(hidden)@", text)) if "://" in text else text


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "") -> str:
    """Format columns as wide as their widest cell; columns in `right` are right-aligned."""
    columns: list[list[str]] = []
    for number, cells in enumerate(zip(*rows, strict=True)):
        align, width = str.rjust if number in right else str.ljust, max(map(len, cells))
        columns.append([align(cell, width) for cell in cells])
    return "\n".join(indent + "  ".join(line).rstrip() for line in zip(*columns, strict=True))


class PortableFSDPError(Exception):
    """Base of all errors with a message for the user; the text is `printable`."""

    exit_code = EXIT_FAILED
    run_has_started = False

    def __str__(self) -> str:
        return without_passwords(printable(super().__str__()))


class UsageError(PortableFSDPError):
    """The run can't start as requested; nothing was lost."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A flag or a config value is wrong."""


class BackendError(UsageError):
    """The device or engine is not available, or can't honour the config."""


class DataError(UsageError):
    """The corpus or the tokenizer doesn't fit the config."""


class CheckpointError(UsageError):
    """A checkpoint is incomplete, or doesn't fit this model."""


class StoreError(CheckpointError):
    """Storage doesn't answer. Not a damaged checkpoint, so the run must not resume from an older step."""


class TrainingError(PortableFSDPError):
    """The run failed after its start."""


log = logging.getLogger("portable_fsdp")


class Closing(ABC):
    """Context manager that returns itself and calls `close` on exit."""

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        close_after(error, self.close)

    @abstractmethod
    def close(self) -> None: ...


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Close at the end of a `with` block. If the block ended with an `error`, a failure to close is only a warning."""
    try:
        close()
    except Exception as failure:
        if error is None:
            raise
        log.warning("after the error below, closing failed too: %s", (str(failure).splitlines() or [repr(failure)])[0])
