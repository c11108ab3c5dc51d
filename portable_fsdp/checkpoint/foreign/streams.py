"""Safetensors files, a tensor at a time: first the header, then each tensor's bytes. Nothing is mapped or held.

A header that is read is hostile input: all of it is checked before a byte of a tensor is.
"""

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
import xxhash
from torch import Tensor

from portable_fsdp.checkpoint.foreign.base import Advance, say_nothing
from portable_fsdp.checkpoint.format import DTYPE_BYTES, FileEntry, TensorEntry
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.files import sync_folder

CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_MAX_HEADER_BYTES = 100_000_000  # as the safetensors library has it
_MAX_ELEMENTS = 2**60
_CHUNK_ELEMENTS = 1 << 20


class Stored(NamedTuple):
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
        raise CheckpointError(f"{where}: expected {what}, found {str(value)[:80]}")
    return numbers


def check_shape(where: str, shape: object) -> tuple[int, ...]:
    """`shape` as a tuple, if it is a list of sizes, and strides and bytes fit 64 bits. Raises `CheckpointError`."""
    sizes = check_numbers(where, shape)
    if math.prod(max(size, 1) for size in sizes) > _MAX_ELEMENTS:
        raise CheckpointError(f"{where}: expected at most 2**60 elements, found shape {list(sizes)}")
    return sizes


def load_json(where: str, text: bytes) -> Any:
    """Parse, refusing a key that stands twice. Raises `CheckpointError`."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_refuse_duplicates)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: expected JSON, found: {error}") from None


def read_header(path: Path) -> dict[str, Stored]:
    """What a safetensors file holds. The caller has checked that it is a plain file. Raises `CheckpointError`."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise CheckpointError(
                    f"{path}: expected a safetensors file, found a header of {length:,} bytes in one of {size:,}"
                )
            header = load_json(str(path), file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: expected a JSON object as its header, found {type(header).__name__}")
    cast(dict[str, object], header).pop("__metadata__", None)
    return _check_entries(path, cast(dict[str, Any], header), 8 + length, size)


def read_tensor(stored: Stored) -> Tensor:
    """Its bytes, in one allocation of their size. Raises `CheckpointError`."""
    tensor = torch.empty(stored.entry.shape, dtype=getattr(torch, stored.entry.dtype))
    target = _bytes(tensor)
    try:
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.start)
            done = 0
            while done < len(target):
                count = file.readinto(target[done : done + (1 << 26)])
                if not count:
                    raise CheckpointError(f"{stored.path}: expected {len(target)} more bytes, found {done}")
                done += count
    except OSError as error:
        raise CheckpointError(f"{stored.path}: {error}") from None
    return tensor


def write_file(
    path: Path,
    entries: Mapping[str, TensorEntry],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    advance: Advance = say_nothing,
) -> FileEntry:
    """Write a new safetensors file, fsynced: `read(key)` is asked for one tensor at a time, and let go of.

    Each is converted to the dtype of its entry on the way, a few MiB at a time. Returns length and hash. The caller
    fsyncs the folder. Raises `CheckpointError` where a value doesn't fit the dtype.
    """
    order = sorted(entries, key=lambda key: -DTYPE_BYTES[entries[key].dtype])  # so that each starts at its alignment
    digest, size = xxhash.xxh3_128(), 0
    with path.open("xb") as file:
        tensors = (chunk for key in order for chunk in byte_chunks(key, read, entries[key]))
        for chunk in itertools.chain((memoryview(_header(entries, order, metadata)),), tensors):
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            advance(len(chunk))
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(bytes=size, xxh3_128=digest.hexdigest())


def byte_chunks(key: str, read: Callable[[str], Tensor], entry: TensorEntry) -> Iterator[memoryview]:
    """The bytes of `read(key)` as `entry` wants them, a few MiB at a time."""
    tensor = read(key)
    if tuple(tensor.shape) != entry.shape:
        raise CheckpointError(f"{key}: expected {list(entry.shape)}, found {list(tensor.shape)} in the data")
    flat = tensor.reshape(-1)
    del tensor
    for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
        yield _bytes(converted(key, flat[start : start + _CHUNK_ELEMENTS], entry.dtype))


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


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """A name to write to, which becomes `path` at one instant if nothing is raised, and vanishes otherwise."""
    temporary = path.with_name(f".{path.name}.unfinished")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


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


def copy_into(file: IO[bytes], start: int, chunks: Iterator[memoryview], advance: Advance) -> None:
    """Overwrite a file from `start` on."""
    file.seek(start)
    for chunk in chunks:
        file.write(chunk)
        advance(len(chunk))


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(cast(Any, tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))


def _header(entries: Mapping[str, TensorEntry], order: list[str], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for key in order:
        start, end = end, end + size_of(entries[key])
        header[key] = {
            "dtype": CODES[entries[key].dtype],
            "shape": list(entries[key].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check_entries(path: Path, header: dict[str, Any], data: int, size: int) -> dict[str, Stored]:
    """Dtypes that we know, and ranges that fill the file from its header to its end, each byte once."""
    found = {key: _entry(f"{path}: {key[:200]!r}", path, value, data) for key, value in header.items()}
    end = data
    for key, stored in sorted(found.items(), key=lambda item: (item[1].start, size_of(item[1].entry))):
        if stored.start != end:
            raise CheckpointError(f"{path}: {key[:200]!r}: expected its bytes at {end}, found them at {stored.start}")
        end += size_of(stored.entry)
    if end != size:
        raise CheckpointError(f"{path}: expected {end:,} bytes (its header), found {size:,}")
    return found


def _entry(where: str, path: Path, value: object, data: int) -> Stored:
    fields = cast(dict[str, object], value) if isinstance(value, dict) else {}
    if fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: expected dtype, shape and data_offsets, found {str(value)[:80]}")
    dtype = next((dtype for dtype, code in CODES.items() if code == fields["dtype"]), None)
    if dtype is None:
        raise CheckpointError(f"{where}: expected a dtype of {', '.join(CODES.values())}; found {fields['dtype']!r}")
    entry = TensorEntry(shape=check_shape(where, fields["shape"]), dtype=dtype, pieces=())
    offsets = check_numbers(where, fields["data_offsets"], "data_offsets (two numbers)")
    if len(offsets) != 2 or offsets[1] - offsets[0] != size_of(entry):
        raise CheckpointError(f"{where}: expected offsets of {size_of(entry)} bytes, found {list(offsets)}")
    return Stored(entry, path, data + offsets[0])


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key!r} stands twice")
    return result
