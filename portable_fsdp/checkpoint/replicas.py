"""Replicas of a weight must be equal bit for bit: a save compares their digests, and commits nothing where they differ.

Replicas update the same weights with the same reduced gradients. Where they differ, memory, a device or a program
changed one of them, and a checkpoint would silently keep the first one's values. No process copies a replica for this.
On the host XXH3 reads it where it lies (the writer's while it is written); elsewhere the device sums it up.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor

from portable_fsdp.backends.base import Piece
from portable_fsdp.checkpoint.commit import Index, ReplicaDigest
from portable_fsdp.checkpoint.format import TensorEntry
from portable_fsdp.checkpoint.safetensors import chunks_of
from portable_fsdp.checkpoint.tables import table

_MAX_ROWS = 12  # of a table of what differs
_ELEMENTS = 1 << 22  # summed at a time on a device: 32 MiB of int64 beside them


class Digests:
    """Of the pieces of one process that others hold too."""

    def __init__(self) -> None:
        self._done: list[ReplicaDigest] = []
        self._on_device: list[tuple[ReplicaDigest, Tensor]] = []

    def take(self, key: str, pieces: Iterable[Piece]) -> list[Piece]:
        """Those that this process must write, after the others were digested: the next step may change them.

        A piece that is still to be digested, while it is written, keeps its number.
        """
        written: list[Piece] = []
        for piece in pieces:
            on_host = piece.data.device.type == "cpu"
            if piece.replica is not None and piece.data.numel() and (piece.replica or not on_host):
                self._add(key, piece)
            if not piece.replica:
                written.append(piece if on_host else piece._replace(replica=None))
        return written

    def _add(self, key: str, piece: Piece) -> None:
        if piece.data.device.type == "cpu":
            digest = xxhash.xxh3_128()
            for chunk in chunks_of(piece.data):
                digest.update(chunk)
            self._done.append(copy_of(key, piece, digest.hexdigest()))
        else:
            self._on_device.append((copy_of(key, piece, ""), sum_of_bits(piece.data)))

    def result(self) -> tuple[ReplicaDigest, ...]:
        """All of them. Waits for the device, once."""
        sums: list[int] = []
        if self._on_device:
            sums = torch.stack([total for _, total in self._on_device]).tolist()
        of_device = (
            copy.model_copy(update={"digest": f"{total:x}"})
            for (copy, _), total in zip(self._on_device, sums, strict=True)
        )
        return (*self._done, *of_device)


def copy_of(key: str, piece: Piece, digest: str) -> ReplicaDigest:
    """What an index says of a replica's piece."""
    return ReplicaDigest(
        key=key, offset=piece.offset, shape=tuple(piece.data.shape), replica=piece.replica or 0, digest=digest
    )


def sum_of_bits(tensor: Tensor) -> Tensor:
    """int64 [] on the device of `tensor`: its bytes as int32 (int8 where they are no multiple of 4), each times an odd
    number of its own, modulo 2**64.

    An odd factor has an inverse modulo 2**64, so one changed element always changes the sum.
    """
    content = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if content.storage_offset() % 4:
        content = content.clone()  # else no view of it as int32
    content = content.view(torch.int32 if content.numel() % 4 == 0 else torch.int8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, content.numel(), _ELEMENTS):
        part = content[start : start + _ELEMENTS]
        # Knuth's multiplicative hash of the place (The Art of Computer Programming, vol. 3, section 6.4), made odd.
        factors = torch.arange(start, start + part.numel(), device=tensor.device).mul_(-7046029254386353131)
        total += factors.bitwise_or_(1).mul_(part).sum()
    return total


class Differing(NamedTuple):
    """A piece of a tensor whose replicas differ."""

    name: str  # with its place where it is no whole tensor
    groups: tuple[tuple[str, ...], ...]  # `process 1` or, where that drives several, `process 1 replica 2`: equal ones


def differing(indexes: Sequence[Index], tensors: Mapping[str, TensorEntry]) -> list[Differing]:
    """The pieces of `tensors` that don't hold the same bits in all replicas."""
    found: dict[tuple[str, tuple[int, ...], tuple[int, ...]], dict[str, list[tuple[int, int]]]] = {}
    for index in indexes:
        for copy in index.copies:
            by_digest = found.setdefault((copy.key, copy.offset, copy.shape), {})
            by_digest.setdefault(copy.digest, []).append((index.process, copy.replica))
    return [
        Differing(_name(key, offset, shape, tensors[key].shape), tuple(_groups(by_digest)))
        for (key, offset, shape), by_digest in found.items()
        if len(by_digest) > 1
    ]


def describe_differing(found: Sequence[Differing]) -> str:
    """A table: each tensor, and which processes hold equal values of it."""
    rows = [("", "equal values in"), *((one.name, _joined(one.groups)) for one in found[:_MAX_ROWS])]
    more = f"\n    and {len(found) - _MAX_ROWS} more" if len(found) > _MAX_ROWS else ""
    return table(rows, indent="    ") + more


def odd_ones(found: Sequence[Differing]) -> list[str]:
    """Who differs from more than half of all holders, in any of the tensors; nobody where no such majority exists."""
    odd: dict[str, None] = {}
    for one in found:
        largest = max(one.groups, key=len)
        if 2 * len(largest) > sum(len(group) for group in one.groups):
            odd |= dict.fromkeys(holder for group in one.groups if group is not largest for holder in group)
    return list(odd)


def _joined(groups: Sequence[Sequence[str]]) -> str:
    return " | ".join(", ".join(group) for group in groups)


def _groups(by_digest: Mapping[str, Sequence[tuple[int, int]]]) -> Iterator[tuple[str, ...]]:
    holders = [holder for group in by_digest.values() for holder in group]
    several = len({process for process, _ in holders}) < len(holders)  # one process drives several devices
    for group in sorted(sorted(group) for group in by_digest.values()):
        yield tuple(f"process {process}" + f" replica {replica}" * several for process, replica in group)


def _name(key: str, offset: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...]) -> str:
    if shape == whole:
        return key
    return f"{key}[{', '.join(f'{start}:{start + size}' for start, size in zip(offset, shape, strict=True))}]"
