"""Headers of safetensors files: of each field all kinds of values, and headers that are huge, deep or cut."""

import json
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from portable_fsdp.formats.importing import import_checkpoint

_DTYPES = ("F32", "F32", "BF16", "I64", "BOOL", "F8_E4M3", "F4", "f32", "", 1, None, ["F32"])
_NAMES = ("a", "b.weight", "c", "d", "", "x" * 100_000, "__metadata__", "\x1b[31m", "../../harm", "exp_avg/a", "a\x00b")
_ODD = (True, False, -1, 0, 1, 2.0, 1e999, 2**31, 2**63, 10**400, None, "0", [], {}, [[]], float("nan"))


def case(seed: int, folder: Path) -> Callable[[], object]:
    draw = random.Random(seed)
    header, size = _header(draw)
    data = bytes(size if draw.random() < 0.9 else draw.choice((0, 4, 1000)))
    length = len(header) if draw.random() < 0.9 else draw.choice((0, 1, len(header) - 1, 2**20, 10**10, 2**63))
    path = folder / "hostile.safetensors"
    path.write_bytes(struct.pack("<Q", length) + header + data)
    if draw.random() < 0.1:
        path.write_bytes(path.read_bytes()[: draw.randrange(40)])
    return lambda: import_checkpoint(path, folder / "run")


def _header(draw: random.Random) -> tuple[bytes, int]:
    """And the bytes of the tensors that should follow."""
    if draw.random() < 0.1:
        return _bomb(draw), 4
    entries: list[tuple[str, Any]] = []
    end = 0
    for _ in range(draw.choice((1, 1, 2, 3))):
        shape = [draw.choice((1, 2, 3)) for _ in range(draw.randint(0, 2))]
        start, end = end, end + 4 * math.prod(shape)
        entries.append((draw.choice(_NAMES), _entry(draw, shape, [start, end])))
    fields = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries]
    return ("{" + ", ".join(fields) + "}" + " " * draw.choice((0, 7))).encode(), end


def _bomb(draw: random.Random) -> bytes:
    match draw.randrange(11):
        case 0:
            empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            return json.dumps({f"t{number}": empty for number in range(draw.choice((20_000, 200_000)))}).encode()
        case 1:
            return b'{"a":[' + b"[]," * draw.choice((1_000_000, 20_000_000)) + b"[]]}"
        case 2:
            return b'{"a":' + b"[" * 200_000
        case 3:
            return b'{"a":' * 200_000
        case 4:
            return b'{"a":{"dtype":"F32","shape":[' + b"1," * 3_000_000 + b'1],"data_offsets":[0,4]}}'
        case 5:
            return b'{"a":{"dtype":"F32","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,4]}}'
        case 6:
            return draw.randbytes(draw.choice((0, 5, 1000)))
        case 7:  # sizes whose product takes long
            digits, count = draw.choice(((18, 50_000), (4000, 3000)))
            sizes = b",".join([b"9" * digits] * count)
            return b'{"a":{"dtype":"F32","shape":[' + sizes + b'],"data_offsets":[0,4]}}'
        case 8:
            return b"[" * 60_001 + b'\\"' * 60_000
        case 9:
            return b"{" + b",".join(b'"%d":1' % number for number in range(1_000_000)) + b"}"
        case _:
            return draw.choice((b"[]", b"null", b'"a"', b"{}", b"{", b"\xff\xfe", b"NaN", b'{"a":1,"a":2}', b"{}" * 9))


def _entry(draw: random.Random, shape: list[Any], offsets: list[Any]) -> Any:
    """Legal as often as not."""
    entry: dict[str, Any] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
    for _ in range(draw.choice((0, 0, 1, 1, 2))):
        match draw.randrange(7):
            case 0:
                entry["dtype"] = draw.choice(_DTYPES)
            case 1:
                entry["shape"] = [draw.choice(_ODD) for _ in range(draw.choice((1, 2, 20)))]
            case 2:
                entry["data_offsets"] = [draw.choice(_ODD), draw.choice(_ODD)]
            case 3:
                entry["data_offsets"] = draw.choice(([False, True], [0], [4, 0], [0, 4, 8], {}, None))
            case 4:
                entry[draw.choice(("more", "shape", "dtype"))] = draw.choice(_ODD)
            case 5:
                entry.pop(draw.choice(list(entry)))
            case _:
                return draw.choice((*_ODD, entry, [entry]))
        if len(entry) < 3:
            break
    return entry
