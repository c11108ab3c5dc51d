"""The safetensors format, as https://github.com/huggingface/safetensors describes it under "Format".

8 bytes: the header's length N, unsigned, little endian. N bytes of JSON: tensor name -> dtype, shape, data_offsets (of
the bytes that follow), and `__metadata__`, words to words. Then the tensors, row-major, without holes.

Written here and not by the library, so that a file is hashed while it is written, tensor by tensor, wherever it goes;
and read here, so that one slice is read, from wherever it lies, straight into its place.
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

from portable_fsdp.checkpoint import storage
from portable_fsdp.checkpoint.format import DTYPE_BYTES, TensorEntry
from portable_fsdp.runtime.strict_json import parse_json

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
"""torch's name of a dtype -> the format's."""

_MAX_HEADER = 1 << 25  # bytes; the library's own limit is 100 MB
_MAX_TENSORS = 150_000  # of one file, which fit into that; Qwen3-30B-A3B, expert by expert, has 18,900 in all its files
_MAX_COMMAS = 20  # for each of them, beside those in their names: some for sizes
_MAX_RANK = 16
_CHUNK = 4 << 20  # bytes


class Stored(NamedTuple):
    """A tensor of a file: where its bytes begin."""

    dtype: str  # torch's name
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Written(NamedTuple):
    """A file's length, and the 128-bit XXH3 of its content in hexadecimal."""

    bytes: int
    xxh3_128: str


def write(
    path: Path,
    tensors: Mapping[str, TensorEntry],
    chunks_of: Callable[[str], Iterable[memoryview]],
    metadata: Mapping[str, str],
    advance: Callable[[int], None] | None = None,
) -> Written:
    """Write a new file, durably, a tensor at a time; the caller syncs the folder.

    `chunks_of(key)` gives a tensor's bytes, in the dtype and shape that `tensors` says. `advance` is told the bytes
    that were written. Raises OSError, ValueError.
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

    storage.write(path, hashed())
    return Written(size, digest.hexdigest())


def chunks_of(tensor: Tensor) -> Iterator[memoryview]:
    """Its bytes, some MiB at a time: they are in the cache when they have been hashed and are written.

    Each is good until the next is asked for. Released then, else whoever still names the last one of a tensor would
    hold all of it while the next tensor is read.
    """
    with bytes_of(tensor.detach().cpu().contiguous()) as content:
        for start in range(0, len(content), _CHUNK):
            with content[start : start + _CHUNK] as chunk:
                yield chunk


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, where they lie."""
    return memoryview(cast(Any, tensor.detach().reshape(-1).view(torch.uint8).numpy()))


def read_header(source: storage.FileReader) -> dict[str, Stored]:
    """Every tensor of the file; raises ValueError where the file isn't as the format says, OSError."""
    if source.size < 8:
        raise ValueError(f"expected at least 8 bytes, found {source.size}")
    (length,) = struct.unpack("<Q", source.read(0, 8))
    if length > min(_MAX_HEADER, source.size - 8):
        raise ValueError(f"expected a header inside {source.size} bytes, found header too large: {length} bytes")
    text = source.read(8, length)
    if text.count(b",") > _MAX_COMMAS * (text.count(b"{") + 5000):
        raise ValueError("expected a header of tensors, found more values than they have")
    header = parse_json(text, _MAX_TENSORS + 2)  # the header itself, and its metadata
    if not isinstance(header, dict):
        raise ValueError("expected a header that is a JSON object")
    tensors = cast(dict[str, Any], header)
    tensors.pop("__metadata__", None)
    found = {key: _stored(key, entry, 8 + length) for key, entry in tensors.items()}
    end = 8 + length
    for key, one in sorted(found.items(), key=lambda item: (item[1].start, item[1].bytes)):
        if one.start != end:
            raise ValueError(f"{key:.200}: expected to begin at byte {end}, found {one.start}: a hole or an overlap")
        end += one.bytes
    if end != source.size:
        raise ValueError(f"expected {end} bytes by the header, found {source.size}")
    return found


def read_slice(source: storage.FileReader, stored: Stored, slices: Sequence[slice], target: Tensor) -> None:
    """Copy `slices` of a stored tensor into `target`, a view of a host tensor of the same shape and dtype.

    Whole rows are read in one piece: what other dimensions leave out of them is read too, and dropped.
    """
    rows = slices[0] if slices else slice(0, 1)
    row = math.prod(stored.shape[1:])
    whole = all(s.stop - s.start == size for s, size in zip(slices[1:], stored.shape[1:], strict=True))
    direct = whole and target.is_contiguous()
    shape = (rows.stop - rows.start, *stored.shape[1:]) if slices else ()
    buffer = target if direct else torch.empty(shape, dtype=target.dtype)
    source.read_into(stored.start + rows.start * row * target.dtype.itemsize, bytes_of(buffer))
    if not direct:
        target.copy_(buffer[(slice(None), *slices[1:])] if slices else buffer)


def _content(
    tensors: Mapping[str, TensorEntry], chunks_of: Callable[[str], Iterable[memoryview]], metadata: Mapping[str, str]
) -> Iterator[memoryview]:
    # Wide dtypes first, as the library sorts them: every tensor then begins at a multiple of its items' bytes.
    order = sorted(tensors, key=lambda key: -DTYPE_BYTES[tensors[key].dtype])
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    sizes = {key: math.prod(tensors[key].shape) * DTYPE_BYTES[tensors[key].dtype] for key in order}
    end = 0
    for key in order:
        start, end = end, end + sizes[key]
        shape = list(tensors[key].shape)
        header[key] = {"dtype": CODES[tensors[key].dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER or len(tensors) > _MAX_TENSORS:
        raise ValueError(
            f"expected at most {_MAX_TENSORS:,} tensors in a file, and {_MAX_HEADER >> 20} MiB for their names and "
            f"shapes, found {len(tensors):,} and {len(text) / 2**20:.1f} MiB"
        )
    yield memoryview(struct.pack("<Q", len(text)) + text)
    for key in order:
        rest = sizes[key]
        for chunk in chunks_of(key):
            rest -= len(chunk)
            yield chunk
        if rest:
            raise ValueError(f"{key}: expected {sizes[key]} bytes, found {sizes[key] - rest}")


def _stored(key: str, entry: Any, data: int) -> Stored:
    match entry:
        case {"shape": [*shape]} if len(shape) > _MAX_RANK:  # before they are multiplied
            raise ValueError(f"{key:.200}: expected at most {_MAX_RANK} sizes, found {len(shape):,}")
        case {"dtype": str(code), "shape": [*shape], "data_offsets": [start, stop]} if (
            len(entry) == 3
            and code in CODES.values()
            and all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, stop))
        ):
            dtype = next(name for name, known in CODES.items() if known == code)
            stored = Stored(dtype, tuple(shape), data + start)
            if stop - start == stored.bytes:
                return stored
        case _:
            pass
    raise ValueError(f"{key:.200}: expected dtype, shape, and data_offsets that fit them, found {reprlib.repr(entry)}")
