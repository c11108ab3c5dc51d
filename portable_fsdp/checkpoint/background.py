"""Saving beside the training: the step waits for a copy in host memory, a thread does the rest. No collective here."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from portable_fsdp.backends.contract import Piece
from portable_fsdp.runtime.factory import user_code

log = logging.getLogger("portable_fsdp")


class Snapshot:
    """Copies of a state in host memory, in buffers that every save reuses: at most one state's bytes.

    Pinned for a state on CUDA, so that all tensors copy at once.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def take(self, state: Iterable[tuple[str, Sequence[Piece]]]) -> dict[str, list[Piece]]:
        """Copy the pieces and wait for the copies. Overwrites the copies of the last call."""
        taken = {
            key: [self._copy(key, ordinal, piece) for ordinal, piece in enumerate(pieces)] for key, pieces in state
        }
        if any(piece.data.is_pinned() for pieces in taken.values() for piece in pieces):
            torch.cuda.synchronize()
        return taken

    def _copy(self, key: str, ordinal: int, piece: Piece) -> Piece:
        buffer = self._buffers.get((key, ordinal))
        if buffer is None or buffer.shape != piece.data.shape or buffer.dtype != piece.data.dtype:
            on_cuda = piece.data.device.type == "cuda"
            buffer = torch.empty(piece.data.shape, dtype=piece.data.dtype, pin_memory=on_cuda)
            self._buffers[key, ordinal] = buffer
        buffer.copy_(piece.data.detach(), non_blocking=True)
        return piece._replace(data=buffer)


class Background:
    """One job at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.cancelled = threading.Event()  # for a job that waits

    @property
    def failed(self) -> bool:
        """Whether the job has failed."""
        return self._failure is not None

    def start(self, work: Callable[[], None]) -> None:
        """Start a job, after `wait` for the one before."""

        def run() -> None:
            try:
                with user_code("the save"):  # a thread would drop a SystemExit
                    work()
            except Exception as error:
                self._failure = error

        # A daemon: a run that fails doesn't wait for it. That kills the save, which is harmless.
        thread = threading.Thread(target=run, name="portable_fsdp save", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("%s (ulimit -u, or the container's limit of pids): saving while the training waits", error)
            run()
            return
        self._thread = thread

    def wait(self) -> None:
        """Wait for the job; raises its error, once."""
        if self._thread is not None:
            self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        if failure is not None:
            raise failure

    def cancel(self, after_s: float) -> None:
        """Give the job `after_s` seconds, then end it where it waits. Drops its error."""
        if self._thread is not None:
            self._thread.join(after_s)
        self.cancelled.set()
        with suppress(Exception):
            self.wait()
