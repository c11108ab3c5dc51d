"""A base for what is closed at the end of a `with` block."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

log = logging.getLogger("portable_fsdp")


class Closing(ABC):
    """A context manager whose target is itself and whose exit is `close`."""

    def __enter__(self) -> Self:
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
