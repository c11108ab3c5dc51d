"""The safetensors format, as https://github.com/huggingface/safetensors describes it under "Format".

8 bytes: the header's length N, unsigned, little endian. N bytes of JSON: tensor name -> dtype, shape, data_offsets (of
the bytes that follow), and `__metadata__`, text to text. Then the tensors, row-major, without gaps.

Our writer hashes a file while it writes it, a tensor at a time, to any storage. Our reader reads one slice from any
storage straight into its place.
"""

import json
import math
import reprlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import xxhash
from torch import Tensor

from portable_fsdp.checkpoint.manifests import DTYPE_BYTES, MAX_RANK, SAFETENSORS_DTYPES, FileEntry, TensorEntry
from portable_fsdp.checkpoint.storage import FileReader, store_of
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.files import parse_json

_MAX_HEADER = 100_000_000  # bytes: the library's own limit
_CHUNK = 4 << 20  # bytes
_CHUNK_ELEMENTS = 1 << 20  # converted at a time


ChunksOf = Callable[[str, TensorEntry], Iterable[memoryview]]


class Stored(NamedTuple):
    """A tensor of a file, and the offset of its bytes."""

    entry: TensorEntry
    start: int


def write_file(
    path: Path,
    name: str,
    tensors: Mapping[str, TensorEntry],
    chunks_of: ChunksOf,
    metadata: Mapping[str, str],
    advance: Callable[[int], object] | None = None,
) -> FileEntry:
    """Write a new file durably, a tensor at a time; the caller syncs the folder. Returns its entry under `name`.

    `chunks_of(key, entry)` yields a tensor's bytes, in the dtype and shape of its entry. `advance(bytes)` reports
    progress. Raises OSError, ValueError.
    """
    digest, size = xxhash.xxh3_128(), 0

    def hashed() -> Iterator[memoryview]:
        nonlocal size
        for chunk in _content(tensors, chunks_of, metadata):
            digest.update(chunk)
            size += len(chunk)
            yield chunk
            if advance is not None:
                advance(len(chunk))

    store_of(path).write(path, hashed())
    return FileEntry(name=name, bytes=size, xxh3_128=digest.hexdigest())


def chunks_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes, some MiB at a time, so that the cache still holds them between hash and write. A chunk is
    released after its turn: a reference to it would keep the whole tensor in memory."""
    with bytes_of(tensor.detach().cpu().contiguous()) as content:
        for start in range(0, len(content), _CHUNK):
            with content[start : start + _CHUNK] as chunk:
                yield chunk


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host, without a copy."""
    return memoryview(cast(Any, tensor.detach().reshape(-1).view(torch.uint8).numpy()))


def read_header(source: FileReader) -> dict[str, Stored]:
    """Read the header: every tensor of the file. Raises OSError, and ValueError for a malformed file."""
    if source.size < 8:
        raise ValueError(f"expected at least 8 bytes, found {source.size}")
    (length,) = struct.unpack("<Q", source.read(0, 8))
    if length > source.size - 8:
        raise ValueError(f"header too large: {length} bytes in a file of {source.size}")
    text = source.read(8, length)
    header = parse_json(text)
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    tensors = cast(dict[str, Any], header)
    tensors.pop("__metadata__", None)
    end = 8 + length
    entries = {key: _stored(key, entry, end) for key, entry in tensors.items()}
    for key, stored in sorted(entries.items(), key=lambda item: (item[1].start, item[1].entry.nbytes)):
        if stored.start != end:
            raise ValueError(f"{key:.200}: expected to begin at byte {end}, found {stored.start}: a gap or an overlap")
        end += stored.entry.nbytes
    if end != source.size:
        raise ValueError(f"expected {end} bytes by the header, found {source.size}")
    return entries


def read_slice(source: FileReader, stored: Stored, slices: Sequence[slice], target: Tensor) -> None:
    """Copy `slices` of a stored tensor into `target`, a host tensor of that shape and dtype, by whole rows."""
    rows = slices[0] if slices else slice(0, 1)
    inner = stored.entry.shape[1:]
    whole = all(s.stop - s.start == size for s, size in zip(slices[1:], inner, strict=True))
    direct = whole and target.is_contiguous()
    shape = (rows.stop - rows.start, *inner) if slices else ()
    buffer = target if direct else torch.empty(shape, dtype=target.dtype)
    source.read_into(stored.start + rows.start * math.prod(inner) * target.dtype.itemsize, bytes_of(buffer))
    if not direct:
        target.copy_(buffer[(slice(None), *slices[1:])] if slices else buffer)


def header_of(path: Path) -> dict[str, Stored]:
    """Read the header of a safetensors file, which must be a plain file. Raises `CheckpointError`."""
    try:
        with store_of(path).open(path) as source:
            return read_header(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a valid safetensors file: {error}") from None


def read_tensor(path: Path, stored: Stored) -> Tensor:
    """Read a tensor into one allocation of its size. Raises `CheckpointError`."""
    tensor = torch.empty(stored.entry.shape, dtype=getattr(torch, stored.entry.dtype))
    try:
        with store_of(path).open(path) as source:
            source.read_into(stored.start, bytes_of(tensor))
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return tensor


def byte_chunks(read: Callable[[str], Tensor], key: str, entry: TensorEntry) -> Iterator[memoryview]:
    """Yield the bytes of `read(key)` in the dtype of `entry`, a few MiB at a time, like `chunks_of`.

    Raises `CheckpointError` for another shape, and like `converted`.
    """
    tensor = read(key)
    if tuple(tensor.shape) != entry.shape:
        raise CheckpointError(f"{key}: expected {list(entry.shape)}, found {list(tensor.shape)} in the data")
    tensor = tensor.reshape(-1)  # frees one that isn't contiguous
    for part in tensor.split(_CHUNK_ELEMENTS):
        yield from chunks_of(converted(key, part, entry.dtype))


def digest_of(key: str, read: Callable[[str], Tensor], entry: TensorEntry) -> bytes:
    """Hash the dtype and the bytes of a tensor of `read`. Raises `CheckpointError` for another shape or dtype."""
    digest = xxhash.xxh3_128(entry.dtype.encode())
    for chunk in byte_chunks(read, key, entry):
        digest.update(chunk)
    return digest.digest()


def converted(key: str, tensor: Tensor, dtype: str) -> Tensor:
    """Convert `tensor` to `dtype`. Raises `CheckpointError` if a finite value would become infinite."""
    target: torch.dtype = getattr(torch, dtype)
    if tensor.dtype == target:
        return tensor
    result = tensor.to(target)
    if result.isinf().any() and not torch.equal(result.isinf(), tensor.isinf()):
        raise CheckpointError(
            f"{key}: expected values that {dtype} can hold (up to {torch.finfo(target).max:.4g}), "
            f"found {tensor[tensor.isfinite()].abs().max().item():.4g}.\n  Use --dtype bfloat16 or float32."
        )
    return result


def groups(tensors: Mapping[str, TensorEntry], max_bytes: int) -> Iterator[list[str]]:
    """Yield groups of consecutive keys with at most `max_bytes` (or one tensor) each; at least one group."""
    keys: list[str] = []
    total = 0
    for key, tensor in tensors.items():
        if keys and total + tensor.nbytes > max_bytes:
            yield keys
            keys, total = [], 0
        keys.append(key)
        total += tensor.nbytes
    yield keys


def _content(
    tensors: Mapping[str, TensorEntry], chunks_of: ChunksOf, metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    # Wide dtypes first, as the library sorts them: this aligns every tensor to its items.
    order = sorted(tensors, key=lambda key: -DTYPE_BYTES[tensors[key].dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for key in order:
        start, end = end, end + tensors[key].nbytes
        shape = list(tensors[key].shape)
        header[key] = {"dtype": SAFETENSORS_DTYPES[tensors[key].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER:
        raise ValueError(
            f"expected at most {_MAX_HEADER:,} bytes for names and shapes in a file, found {len(text):,} for "
            f"{len(tensors):,} tensors"
        )
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for key in order:
        size = 0
        for chunk in chunks_of(key, tensors[key]):
            size += len(chunk)
            yield chunk
        if size != tensors[key].nbytes:
            raise ValueError(f"{key}: expected {tensors[key].nbytes} bytes, found {size}")


def _stored(key: str, entry: Any, data: int) -> Stored:
    match entry:
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [start, stop]} if (
            len(entry) == 3
            and len(shape) <= MAX_RANK
            and code in SAFETENSORS_DTYPES.values()
            and all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, stop))
        ):
            dtype = next(name for name, known in SAFETENSORS_DTYPES.items() if known == code)
            stored = Stored(TensorEntry(shape=tuple(shape), dtype=dtype), data + start)
            if stop - start == stored.entry.nbytes:
                return stored
        case _:
            pass
    raise ValueError(f"{key:.200}: expected dtype, shape, and data_offsets that fit them, found {reprlib.repr(entry)}")
