"""Safetensors files, a tensor at a time: first the header, then each tensor's bytes. Nothing is mapped or held.

A header that is read is hostile input: all of it is checked before a byte of a tensor is.
"""

import math
import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from portable_fsdp.checkpoint import safetensors
from portable_fsdp.checkpoint.format import DTYPE_BYTES, MAX_ELEMENTS, TensorEntry
from portable_fsdp.checkpoint.storage import FileReader
from portable_fsdp.formats.base import Advance, say_nothing
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.strict_json import parse_json

_CHUNK_ELEMENTS = 1 << 20


class FileTensor(NamedTuple):
    """A tensor in a file: its bytes start at `start`, counted from the beginning of the file."""

    entry: TensorEntry
    path: Path
    start: int


def size_of(entry: TensorEntry) -> int:
    """Bytes."""
    return math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]


def check_numbers(where: str, value: object, what: str = "a shape (at most 16 sizes)") -> tuple[int, ...]:
    """`value` as a tuple, if it is a list of at most 16 integers, none negative. Raises `CheckpointError`."""
    numbers: tuple[Any, ...] = tuple(cast(Any, value)) if isinstance(value, list | tuple) else (None,)
    if len(numbers) > 16 or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise CheckpointError(f"{where}: expected {what}, found {reprlib.repr(value)}")
    return numbers


def check_shape(where: str, shape: object) -> tuple[int, ...]:
    """`shape` as a tuple, if it is a list of sizes, and strides and bytes fit 64 bits. Raises `CheckpointError`."""
    sizes = check_numbers(where, shape)
    if math.prod(max(size, 1) for size in sizes) > MAX_ELEMENTS:  # as of a manifest: what is read can be written
        raise CheckpointError(f"{where}: expected at most 2**59 elements, found shape {list(sizes)}")
    return sizes


def load_json(where: str, text: bytes) -> Any:
    """As `parse_json`. Raises `CheckpointError`."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{where}: expected JSON, found: {error}") from None


def read_header(path: Path) -> dict[str, FileTensor]:
    """What a safetensors file holds. The caller has checked that it is a plain file. Raises `CheckpointError`."""
    try:
        with FileReader(path) as source:
            found = safetensors.read_header(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a safetensors file, found: {error}") from None
    for key, one in found.items():
        check_shape(f"{path}: {key[:200]!r}", one.shape)
    return {
        key: FileTensor(TensorEntry(shape=one.shape, dtype=one.dtype), path, one.start) for key, one in found.items()
    }


def read_tensor(stored: FileTensor) -> Tensor:
    """Its bytes, in one allocation of their size. Raises `CheckpointError`."""
    tensor = torch.empty(stored.entry.shape, dtype=getattr(torch, stored.entry.dtype))
    try:
        with FileReader(stored.path) as source:
            source.read_into(stored.start, safetensors.bytes_of(tensor))
    except OSError as error:
        raise CheckpointError(f"{stored.path}: {error}") from None
    return tensor


def write_file(
    path: Path,
    entries: Mapping[str, TensorEntry],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    advance: Advance = say_nothing,
) -> safetensors.Written:
    """Write a new safetensors file, fsynced: `read(key)` is asked for one tensor at a time, and let go of.

    Each is converted to the dtype of its entry on the way, a few MiB at a time. Returns length and hash. The caller
    fsyncs the folder. Raises `CheckpointError` where a value doesn't fit the dtype.
    """
    return safetensors.write(path, entries, lambda key: byte_chunks(key, read, entries[key]), metadata, advance)


def byte_chunks(key: str, read: Callable[[str], Tensor], entry: TensorEntry) -> Iterator[memoryview]:
    """The bytes of `read(key)` as `entry` wants them, a few MiB at a time; as `safetensors.chunks_of`.

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
    """Runs of keys in their order, each as long as it stays within `max_bytes`; at least one."""
    keys: list[str] = []
    total = 0
    for key, tensor in tensors.items():
        if keys and total + size_of(tensor) > max_bytes:
            yield keys
            keys, total = [], 0
        keys.append(key)
        total += size_of(tensor)
    yield keys


def copy_into(file: IO[bytes], start: int, chunks: Iterator[memoryview], advance: Advance) -> int:
    """Overwrite a file from `start` on. Returns the CRC-32 of what was written."""
    file.seek(start)
    checksum = 0
    for chunk in chunks:
        file.write(chunk)
        checksum = zlib.crc32(chunk, checksum)
        advance(len(chunk))
    return checksum
