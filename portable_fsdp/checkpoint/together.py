"""One verdict for all processes, errors included, so that none waits for one that has given up."""

from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

from portable_fsdp.backends.base import Backend
from portable_fsdp.runtime.errors import CheckpointError

T = TypeVar("T")


def on_process_0(backend: Backend, subject: str, work: Callable[[], T]) -> T:
    """`work()` of process 0, on all processes; what it raises is raised on all of them. *collective*"""
    result: T | None = None
    failure: Exception | None = None
    if backend.process.index == 0:
        try:
            result = work()
        except Exception as error:
            failure = error
    message = None if failure is None else message_of(subject, failure)
    result, message = backend.agree((result, message))
    if message is not None:
        _raise(message, failure)
    return cast(T, result)


def raise_together(backend: Backend, message: str | None, failure: Exception | None = None) -> None:
    """Raise the first process's message, on all processes; nothing where none has one. *collective*"""
    messages = backend.gather(message)
    first = next((one for one in messages if one is not None), None)
    if first is not None:
        _raise(first, failure if message == first else None)


def message_of(subject: str, error: Exception) -> str:
    """A sentence for the user, in which an error of another kind bears its class."""
    return str(error) if isinstance(error, CheckpointError) else f"{subject}: {type(error).__name__}: {error}"


def _raise(message: str, failure: Exception | None) -> NoReturn:
    raise CheckpointError(message) from (None if isinstance(failure, CheckpointError) else failure)
