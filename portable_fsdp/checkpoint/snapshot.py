"""The part of the state that a process saves: copies in host memory, and digests of the replicas.

With `async_save` training waits only for the copies; a thread (`Background`) does the rest, without collectives.

Replicas of a weight apply the same reduced gradients, so they are equal bit for bit unless memory, a device or a
program changed one: a save compares their digests and commits nothing where they differ. The host hashes a replica in
place with XXH3 (the writer while it writes); any other device sums its bits.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from portable_fsdp.backends.contract import Piece
from portable_fsdp.checkpoint.commit import Index, ReplicaDigest
from portable_fsdp.checkpoint.manifests import TensorEntry, committed_steps, first_rows
from portable_fsdp.checkpoint.safetensors import chunks_of
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.factory import user_code

log = logging.getLogger("portable_fsdp")

_ELEMENTS = 1 << 22  # summed at a time on a device, with 32 MiB of int64 factors


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
    """Runs one job at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None  # of the job
        self.cancelled = threading.Event()  # for a job that waits

    def start(self, work: Callable[[], None]) -> None:
        """Start a job, after `wait` for the one before."""

        def run() -> None:
            try:
                with user_code("the save"):  # a thread would drop a SystemExit
                    work()
            except Exception as error:
                self.failure = error

        # A daemon: a run that fails doesn't wait for it. That kills the save, which is harmless.
        thread = threading.Thread(target=run, name="portable_fsdp save", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("%s (ulimit -u, or the container's limit of pids): saving while the training waits", error)
            run()
            return
        self._thread = thread

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the job; raises its error, once."""
        if self._thread is not None:
            self._thread.join()
        self._thread, failure, self.failure = None, self.failure, None
        if failure is not None:
            raise failure

    def cancel(self, after_s: float) -> None:
        """Give the job `after_s` seconds, then end it where it waits. Drops its error."""
        if self._thread is not None:
            self._thread.join(after_s)
        self.cancelled.set()
        with suppress(Exception):
            self.wait()


class Digests:
    """Digests of the pieces of one process that other processes or devices hold too."""

    def __init__(self) -> None:
        self._done: list[ReplicaDigest] = []
        self._on_device: list[tuple[ReplicaDigest, Tensor]] = []

    def take(self, key: str, pieces: Iterable[Piece]) -> list[Piece]:
        """Digest the pieces that the next step may change; returns those that this process must write.

        A piece that keeps its replica number is digested while it is written.
        """
        written: list[Piece] = []
        for piece in pieces:
            on_host, is_copy = piece.data.device.type == "cpu", piece.replica is not None and piece.data.numel() > 0
            if is_copy and not on_host:
                self._on_device.append((digest_of(key, piece, ""), sum_of_bits(piece.data)))
            elif is_copy and piece.replica:
                digest = xxhash.xxh3_128()
                for chunk in chunks_of(piece.data):
                    digest.update(chunk)
                self._done.append(digest_of(key, piece, digest.hexdigest()))
            if not piece.replica:
                written.append(piece if on_host else piece._replace(replica=None))
        return written

    def result(self) -> tuple[ReplicaDigest, ...]:
        """Return all digests. Waits for the device, once."""
        sums: list[int] = torch.stack([total for _, total in self._on_device]).tolist() if self._on_device else []
        pairs = zip(self._on_device, sums, strict=True)
        return (*self._done, *(entry.model_copy(update={"digest": f"{total:x}"}) for (entry, _), total in pairs))


def digest_of(key: str, piece: Piece, digest: str) -> ReplicaDigest:
    """Make the index entry of a replica's piece."""
    shape = tuple(piece.data.shape)
    return ReplicaDigest(key=key, offset=piece.offset, shape=shape, replica=piece.replica or 0, digest=digest)


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return int64 [] on the device of `tensor`: the sum modulo 2**64 of its bytes as int32 (int8 unless their number
    is a multiple of 4), each multiplied by its own odd number.

    An odd factor has an inverse modulo 2**64, so one changed element always changes the sum.
    """
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if content.storage_offset() % 4:
        content = content.clone()  # else no view of it as int32
    content = content.view(torch.int32 if content.numel() % 4 == 0 else torch.int8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, content.numel(), _ELEMENTS):
        part = content[start : start + _ELEMENTS]
        # Knuth's multiplicative hash of the position (The Art of Computer Programming, vol. 3, section 6.4), made odd.
        factors = torch.arange(start, start + part.numel(), device=tensor.device).mul_(-7046029254386353131)
        total += factors.bitwise_or_(1).mul_(part).sum()
    return total


def require_equal(
    indexes: Sequence[Index], tensors: Mapping[str, TensorEntry], checkpoint: Path, is_allowed: bool
) -> None:
    """Raise CheckpointError with a table if replicas differ; only warn if `checkpoint.allow` names them."""
    differing = _differing(indexes, tensors)
    if not differing:
        return
    rows = [(name, " | ".join(map(", ".join, groups))) for name, groups in differing.items()]
    shown = first_rows(("", "equal values in"), rows)
    if is_allowed:
        log.warning("%s: replicas differ in %d places; saving the first:\n%s", checkpoint.name, len(differing), shown)
        return
    last = next(iter(committed_steps(checkpoint.parent)), None)
    raise CheckpointError(
        f"checkpoint {checkpoint.name}: replicas differ in {len(differing)} places:\n"
        f"{shown}\n"
        "  Replicas apply the same gradients: memory, a device or a program has changed one of them since "
        f"{last.name if last else 'the run began'}.\n"
        "  This step isn't saved. Rerun the same command: it "
        + (f"resumes from {last.name}. " if last else "starts over. ")
        + "If it happens again, test those devices.\n"
        "  To save the first replica's values with a warning: checkpoint.allow='[replicas]'."
    )


def _differing(indexes: Sequence[Index], tensors: Mapping[str, TensorEntry]) -> dict[str, list[list[str]]]:
    """Map pieces whose replicas differ to groups with equal values: `process 1`, or `process 1 replica 2` if a process
    drives several devices."""
    holders: dict[tuple[str, tuple[int, ...], tuple[int, ...]], dict[str, list[tuple[int, int]]]] = {}
    for index in indexes:
        for copy in index.copies:
            by_digest = holders.setdefault((copy.key, copy.offset, copy.shape), {})
            by_digest.setdefault(copy.digest, []).append((index.process, copy.replica))
    differing: dict[str, list[list[str]]] = {}
    for (key, offset, shape), by_digest in holders.items():
        if len(by_digest) > 1:
            part = ", ".join(f"{start}:{start + size}" for start, size in zip(offset, shape, strict=True))
            processes = [process for group in by_digest.values() for process, _ in group]
            several = len(set(processes)) < len(processes)
            differing[key if shape == tensors[key].shape else f"{key}[{part}]"] = [
                [f"process {process}" + f" replica {replica}" * several for process, replica in group]
                for group in sorted(sorted(group) for group in by_digest.values())
            ]
    return differing
