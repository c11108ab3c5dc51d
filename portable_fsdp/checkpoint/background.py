"""Saving beside the training: the step waits for a copy to host memory, a thread does the rest. No collective here."""

import threading
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from portable_fsdp.backends.base import Piece


class Snapshot:
    """Copies of a state in host memory, in buffers that every copy takes again: at most one state's bytes.

    Pinned where the state lies on CUDA, so that the copies of all tensors run at once.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def take(self, state: Iterable[tuple[str, Sequence[Piece]]]) -> dict[str, list[Piece]]:
        """The pieces, which later steps don't touch. Waits until all are copied; nobody may read the last ones."""
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
    """One piece of work at a time, in a thread of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self.cancelled = threading.Event()  # for work that waits

    @property
    def failed(self) -> bool:
        """Whether the work has ended, and failed."""
        return self._failure is not None

    def start(self, work: Callable[[], None]) -> None:
        """Begin, after `wait` was called for the work before."""

        def run() -> None:
            try:
                work()
            except Exception as error:
                self._failure = error

        # A daemon: a run that ends by an error doesn't wait for it, which is a kill to the save, and harmless.
        self._thread = threading.Thread(target=run, name="portable_fsdp save", daemon=True)
        self._thread.start()

    def wait(self) -> Exception | None:
        """Until the work is over; what it failed with, told once."""
        if self._thread is not None:
            self._thread.join()
        self._thread, failure, self._failure = None, self._failure, None
        return failure

    def cancel(self, after_s: float) -> None:
        """After so many seconds have the work end where it waits, and wait for that. What it failed with is dropped."""
        if self._thread is not None:
            self._thread.join(after_s)
        self.cancelled.set()
        self.wait()
