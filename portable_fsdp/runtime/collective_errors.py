"""Raise an error of one process on all processes, so that none waits in a collective for one that has failed."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from portable_fsdp.runtime.errors import PortableFSDPError, TrainingError
from portable_fsdp.runtime.factory import user_code

T = TypeVar("T")


class Processes(Protocol):
    """The part of a backend that this module uses."""

    @property
    def process(self) -> Any: ...  # has an `index`

    def agree(self, value: T) -> T: ...

    def gather(self, value: T) -> list[T]: ...


def as_error_of_all(error: Exception) -> PortableFSDPError:
    """Return our errors unchanged; convert others to class and message, since not every exception can be pickled."""
    return error if isinstance(error, PortableFSDPError) else TrainingError(f"{type(error).__name__}: {error}")


def on_process_0(
    processes: Processes, work: Callable[[], T], as_error: Callable[[Exception], PortableFSDPError] = as_error_of_all
) -> T:
    """Run `work()` on process 0 and return its result, or raise its exception, on all processes. *collective*

    `as_error` makes the error that the other processes raise.
    """
    result, failure = _attempt(work) if processes.process.index == 0 else (None, None)
    result, error = processes.agree((result, None if failure is None else as_error(failure)))
    if error is not None:
        _raise(error, failure)
    return cast(T, result)


def on_each_process(processes: Processes, work: Callable[[], T]) -> T:
    """Run `work()` on every process and return its result after all have finished. *collective*

    Raises this process's own exception; else the error of the first process that failed, with its index.
    """
    result, failure = _attempt(work)
    errors = processes.gather(None if failure is None else as_error_of_all(failure))
    for index, error in enumerate(errors):
        if failure is not None:
            _raise(as_error_of_all(failure), failure)
        if error is not None:
            raise type(error)(f"process {index}: {error}")
    return cast(T, result)


def together(processes: Processes, work: Callable[[], T], as_error: Callable[[Exception], PortableFSDPError]) -> T:
    """Like `on_each_process`, but raises the error of the first process that failed on all of them. *collective*"""
    result, failure = _attempt(work)
    own = None if failure is None else as_error(failure)
    first = next((error for error in processes.gather(own) if error is not None), None)
    if first is not None:
        _raise(first, failure if str(own) == str(first) else None)
    return cast(T, result)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        with user_code():
            return work(), None
    except Exception as error:
        return None, error


def _raise(error: PortableFSDPError, failure: Exception | None) -> None:
    """Raise `error`; on the process of the failure, a bug keeps its own traceback."""
    if failure is not None and type(error) is TrainingError and not isinstance(failure, PortableFSDPError | OSError):
        raise failure
    raise error from (None if isinstance(failure, PortableFSDPError) else failure)
