"""Calls in daemon threads, for libraries that nothing can interrupt."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(call: Callable[[], T]) -> "Future[T]":
    """Run `call` in a daemon thread: one that never returns doesn't keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # a panic in Rust isn't an Exception
            future.set_exception(error)

    threading.Thread(target=run, name="portable_fsdp call", daemon=True).start()
    return future
