"""Safetensors files, a tensor at a time: first the header, then each tensor's bytes. Nothing is mapped or held.

Also a format of its own: one safetensors file that holds the whole model, {FQN: tensor}.
"""

import reprlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.checkpoint import safetensors
from portable_fsdp.checkpoint.format import FileEntry, TensorEntry, is_too_large
from portable_fsdp.checkpoint.storage import FileReader, require_regular
from portable_fsdp.checkpoint.store import Advance, Reader, no_progress
from portable_fsdp.formats.base import ExportOptions, ForeignCheckpoint, weights_of
from portable_fsdp.runtime.errors import CheckpointError

_CHUNK_ELEMENTS = 1 << 20


def matches(path: Path) -> bool:
    """By its name."""
    return path.is_file() and path.suffix == ".safetensors"


def open_checkpoint(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
    """Holds one tensor. Raises `CheckpointError`."""
    require_regular(path, path.name)
    stored = read_header(path)
    return ForeignCheckpoint({key: s.entry for key, s in stored.items()}, lambda key: read_tensor(path, stored[key]))


def export(reader: Reader, options: ExportOptions) -> Callable[[Path], object]:
    """One file, in which a tied weight stands once."""
    tensors = weights_of(reader, options.dtype)
    return lambda path: write_file(path, tensors, reader.read_whole, {}, options.advance)


def check_numbers(where: str, value: object, what: str = "a shape (at most 16 sizes)") -> tuple[int, ...]:
    """`value` as a tuple, if it is a list of at most 16 integers, none negative. Raises `CheckpointError`."""
    numbers: tuple[Any, ...] = tuple(cast(Any, value)) if isinstance(value, list | tuple) else (None,)
    if len(numbers) > 16 or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise CheckpointError(f"{where}: expected {what}, found {reprlib.repr(value)}")
    return numbers


def check_shape(where: str, shape: object) -> tuple[int, ...]:
    """`shape` as a tuple, if it is a list of sizes whose strides and bytes fit 64 bits. Raises `CheckpointError`."""
    sizes = check_numbers(where, shape)
    if is_too_large(sizes):  # for a manifest too: what we read we can write
        raise CheckpointError(f"{where}: expected at most 2**59 elements, found shape {list(sizes)}")
    return sizes


def read_header(path: Path) -> dict[str, safetensors.Stored]:
    """The tensors of a safetensors file, a plain file. Raises `CheckpointError`."""
    try:
        with FileReader(path) as source:
            return safetensors.read_header(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a safetensors file, found: {error}") from None


def read_tensor(path: Path, stored: safetensors.Stored) -> Tensor:
    """Its bytes, in one allocation of their size. Raises `CheckpointError`."""
    tensor = torch.empty(stored.entry.shape, dtype=getattr(torch, stored.entry.dtype))
    try:
        with FileReader(path) as source:
            source.read_into(stored.start, safetensors.bytes_of(tensor))
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return tensor


def write_file(
    path: Path,
    entries: Mapping[str, TensorEntry],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    advance: Advance = no_progress,
    name: str = "",
) -> FileEntry:
    """Write and fsync a new safetensors file, one tensor of `read(key)` at a time; the caller fsyncs the folder.

    Converts each to the dtype of its entry. Raises `CheckpointError` where a value doesn't fit the dtype.
    """
    return safetensors.write(path, name, entries, lambda key: byte_chunks(key, read, entries[key]), metadata, advance)


def byte_chunks(key: str, read: Callable[[str], Tensor], entry: TensorEntry) -> Iterator[memoryview]:
    """The bytes of `read(key)` in the dtype of `entry`, a few MiB at a time; as `safetensors.chunks_of`.

    Raises `CheckpointError` for another shape, and as `converted`.
    """
    tensor = read(key)
    if tuple(tensor.shape) != entry.shape:
        raise CheckpointError(f"{key}: expected {list(entry.shape)}, found {list(tensor.shape)} in the data")
    flat = tensor.reshape(-1)
    del tensor
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        part = converted(key, flat[start : start + _CHUNK_ELEMENTS], entry.dtype).contiguous()
        with safetensors.bytes_of(part) as chunk:
            yield chunk


def converted(key: str, tensor: Tensor, dtype: str) -> Tensor:
    """`tensor` in `dtype`. Raises `CheckpointError` where a finite value would become infinite."""
    target: torch.dtype = getattr(torch, dtype)
    if tensor.dtype == target:
        return tensor
    result = tensor.to(target)
    if result.isinf().any() and not torch.equal(result.isinf(), tensor.isinf()):
        raise CheckpointError(
            f"{key}: expected values that {dtype} can hold (up to {torch.finfo(target).max:.4g}), "
            f"found {tensor[tensor.isfinite()].abs().max().item():.4g}.\n  Take --dtype bfloat16 or float32."
        )
    return result


def groups(tensors: Mapping[str, TensorEntry], max_bytes: int) -> Iterator[list[str]]:
    """Consecutive keys, cut where a group would exceed `max_bytes`; at least one group."""
    keys: list[str] = []
    total = 0
    for key, tensor in tensors.items():
        if keys and total + tensor.nbytes > max_bytes:
            yield keys
            keys, total = [], 0
        keys.append(key)
        total += tensor.nbytes
    yield keys
