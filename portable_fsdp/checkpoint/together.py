"""Errors of checkpoints on all processes: `runtime/collective_errors.py`, with every error a CheckpointError."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from portable_fsdp.backends.base import Backend
from portable_fsdp.runtime import collective_errors
from portable_fsdp.runtime.errors import CheckpointError

T = TypeVar("T")


def on_process_0(backend: Backend, subject: str, work: Callable[[], T]) -> T:
    """`work()` of process 0, on all processes; what it raises is raised on all of them. *collective*"""
    return collective_errors.on_process_0(backend, work, partial(as_checkpoint_error, subject))


def raise_together(backend: Backend, subject: str, failure: Exception | None) -> None:
    """Raise on all processes what one of them has failed with; nothing where none has. *collective*"""
    collective_errors.raise_together(backend, failure, partial(as_checkpoint_error, subject))


def as_checkpoint_error(subject: str, error: Exception) -> CheckpointError:
    """An error of another kind bears its class."""
    return (
        error if isinstance(error, CheckpointError) else CheckpointError(f"{subject}: {type(error).__name__}: {error}")
    )
