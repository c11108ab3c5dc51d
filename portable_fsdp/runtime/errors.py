"""Every error that a user can cause, and the exit code that each one ends with.

    PortableFSDPError            exit 1
      UsageError                 exit 2: nothing was started, nothing was written
        ConfigError              a key, a flag or a value of the config
        BackendError             what this device or this engine cannot do, found when it opens
        DataError                the corpus or the tokenizer
        CheckpointError          a checkpoint that is incomplete, or of another model
          StoreError             storage that doesn't answer: the checkpoint there may be complete
      TrainingError              the run itself went wrong (a NaN loss)

A message says what was expected, what was found, where, and what to do. Any other exception is a bug, and keeps its
traceback.
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
EXIT_STOPPED = 143  # 128 + SIGTERM: stopped on request, after a committed save


def printable(text: str) -> str:
    """The text with each character that doesn't print, but for line ends, written as Python does (`\\x1b`)."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def without_passwords(text: str) -> str:
    """Replace users, passwords and tokens in URLs by `(hidden)`, and `user:password@` where a client repeats a part."""
    return _SECRET_OF_URL.sub(r"\1(hidden)", _USER_OF_URL.sub(r"\1(hidden)@", text)) if "://" in text else text


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "") -> str:
    """Columns as wide as their widest cell; those in `right` are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = (
        [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return "\n".join(indent + "  ".join(cells).rstrip() for cells in aligned)


class PortableFSDPError(Exception):
    """Base of all errors whose message is meant for the user; its text is `printable`."""

    exit_code = EXIT_FAILED
    run_has_started = False

    def __str__(self) -> str:
        return without_passwords(printable(super().__str__()))


class UsageError(PortableFSDPError):
    """The run can't start as asked; nothing was lost."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A flag or a config value is wrong."""


class BackendError(UsageError):
    """The device or engine is absent, or can't honour the config."""


class DataError(UsageError):
    """The corpus or the tokenizer doesn't fit the config."""


class CheckpointError(UsageError):
    """A checkpoint is incomplete, or doesn't fit this model."""


class StoreError(CheckpointError):
    """Storage doesn't answer; that is no damage, and no reason to resume from an older step."""


class TrainingError(PortableFSDPError):
    """The run failed after it had started."""


log = logging.getLogger("portable_fsdp")


class Closing(ABC):
    """A context manager whose target is itself and whose exit is `close`."""

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        close_after(error, self.close)

    @abstractmethod
    def close(self) -> None: ...


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Close at the end of a `with` block. What fails then is a warning if the block itself ended with an `error`."""
    try:
        close()
    except Exception as failure:
        if error is None:
            raise
        log.warning("after the error below, closing failed too: %s", (str(failure).splitlines() or [repr(failure)])[0])
