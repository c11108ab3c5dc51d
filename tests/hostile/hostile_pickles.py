"""Pickles as `.metadata` of a folder of torch.distributed.checkpoint: programs over all opcodes and many names.

A third are random programs, which track the stack so that many of them run; a third are a true metadata file with
opcodes put in, taken out or doubled; a third begin with a known attack.
"""

import pickletools
import random
import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from foreign_models import dcp_save

from portable_fsdp.formats import dcp
from portable_fsdp.formats.unpickle import RECORDS

_GLOBALS = [
    *((module, name) for module, names in RECORDS.items() for name in sorted(names)),
    *(("torch", "Size"), ("collections", "OrderedDict")),
    *(("torch", name) for name in ("float32", "load", "_C", "Tensor", "Size.__new__", "bool")),
    *(("builtins", name) for name in ("eval", "exec", "getattr", "object", "type", "open", "__import__")),
    *(("os", "system"), ("posix", "system"), ("pathlib", "Path.touch"), ("pathlib", "Path"), ("subprocess", "Popen")),
    *(
        ("copyreg", "_reconstructor"),
        ("collections", "OrderedDict.clear"),
        ("__main__", "x"),
        ("", ""),
        ("x" * 999, "y"),
    ),
]


def case(seed: int, folder: Path) -> Callable[[], object]:
    draw = random.Random(seed)
    true = _true_folder()
    for path in true.iterdir():
        shutil.copy(path, folder)
    program = (_random_program, _mutated, _attack)[seed % 3](draw, folder)
    (folder / dcp.METADATA).write_bytes(program)

    def read() -> object:
        before = vars(Path).keys() | vars(torch).keys()
        source = dcp.open_checkpoint(folder, trust_metadata=True)
        tensors = [source.read(key) for key in list(source.tensors)[:4]]
        assert vars(Path).keys() | vars(torch).keys() == before, "a class was changed"
        return tensors

    return read


@cache
def _true_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hostile_dcp"))
    dcp_save({"model": {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}}, folder)
    return folder


@cache
def _true_opcodes() -> list[bytes]:
    text = (_true_folder() / dcp.METADATA).read_bytes()
    starts = [position or 0 for _, _, position in pickletools.genops(text)]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _mutated(draw: random.Random, folder: Path) -> bytes:
    opcodes = list(_true_opcodes())
    for _ in range(draw.choice((1, 1, 2, 5))):
        place = draw.randrange(len(opcodes))
        match draw.randrange(5):
            case 0:
                del opcodes[place]
            case 1:
                opcodes.insert(place, opcodes[place])
            case 2:
                opcodes.insert(place, _opcode(draw))
            case 3:
                opcodes[place] = _opcode(draw)
            case _:
                other = draw.randrange(len(opcodes))
                opcodes[place], opcodes[other] = opcodes[other], opcodes[place]
    text = b"".join(opcodes)
    if draw.random() < 0.3:
        place = draw.randrange(len(text))
        text = text[:place] + bytes([draw.randrange(256)]) + text[place + 1 :]
    return text


def _random_program(draw: random.Random, folder: Path) -> bytes:
    opcodes = [b"\x80" + bytes([draw.choice((2, 4, 5, 255))])]
    for _ in range(draw.choice((2, 5, 20, 200))):
        opcodes.append(_opcode(draw))
        if draw.random() < 0.5:  # what is likely to run: a call, its fields, its items
            opcodes += draw.choice(
                (
                    [_global(draw), b")", b"R"],
                    [_global(draw), b")", b"\x81", b"}", b"b"],
                    [_global(draw), b"N", b"}", _text("_str"), _text("/tmp/harm"), b"s", b"\x86", b"b"],
                    [b"}", _value(draw), _value(draw), b"s"],
                    [b"]", _value(draw), b"a"],
                    [_global(draw), b"(", _value(draw), _value(draw), b"t", b"R"],
                )
            )
    return b"".join(opcodes) + draw.choice((b".", b".", b""))


def _colliding(number: int) -> bytes:
    """Key and value: keys of equal hashes, among which a dict looks for each one by one."""
    digits = (number * (2**61 - 1)).to_bytes(11, "little")
    return b"\x8a" + bytes([len(digits)]) + digits + b"N"


def _attack(draw: random.Random, folder: Path) -> bytes:
    harm = f"touch {folder.parent}/harm"
    module, name = draw.choice(_GLOBALS)
    attribute = (
        b"N}" + _text(draw.choice(("_str", "__init__", "__class__", "state", "kind", "get"))) + _text(harm) + b"s\x86b"
    )
    depth = draw.choice((10, 1000, 200_000))
    start = draw.choice(
        (
            _name(module, name) + attribute,  # fields of a class
            _name(module, name) + b")R" + attribute,
            _name(module, name) + b")\x81" + attribute,
            _name(module, name) + _text(harm) + b"\x85R",
            _name("os", "system") + _text(harm) + b"\x85R",
            b"(S'%s'\nios\nsystem\n" % harm.encode(),
            b"(" + _name(module, name) + _text(harm) + b"o",
            _name(module, name) + b")}\x92",  # NEWOBJ_EX
            b")" + b"\x85" * depth,
            b"}" + b")" + b"\x85" * depth + b"Ns",  # the hash of nested tuples
            b"}(" + b"".join(_colliding(number) for number in range(30_000)) + b"u",
            b"N" + b"".join(b"p%d\n" % (number * (2**61 - 1)) for number in range(30_000)),  # places of the memo
            b"]" * depth + b"a" * (depth - 1),
            b"(" * depth,
            b"N" + b"2\x86" * 60,  # a tree of 2**60 leaves
            b"N" + b"r" + struct.pack("<I", draw.choice((10**6, 10**8, 2**32 - 1))),
            b"\x96" + struct.pack("<Q", draw.choice((10**9, 2**40, 2**63))),  # a bytearray
            b"\x8e" + struct.pack("<Q", 2**40),
            b"\x95" + struct.pack("<Q", 2**62),
            b"\x8b" + struct.pack("<i", draw.choice((-1, 2**31 - 1))),
            b"\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000,
            b"I" + b"9" * 5000 + b"\n",
            b"\x82\x01",  # EXT1
            b"Pnobody\n",
            b"\x97\x98",  # NEXT_BUFFER, READONLY_BUFFER
        )
    )
    return b"\x80\x04" + start + draw.choice((b"0", b"", b"\x94")) + b"".join(_true_opcodes()[1:])


def _opcode(draw: random.Random) -> bytes:
    kind = draw.choice(pickletools.opcodes)
    code = kind.code.encode("latin-1")
    if kind.arg is None:
        return code
    match kind.arg.name:
        case "uint1" | "uint2" | "int4" | "uint4" | "uint8":
            return code + draw.randbytes(kind.arg.n)
        case "stringnl" | "stringnl_noescape" | "decimalnl_short" | "decimalnl_long" | "floatnl" | "unicodestringnl":
            return code + draw.choice((b"1", b"'x'", b"99999999999", b"1e999", b"\\u0000", b"")) + b"\n"
        case "stringnl_noescape_pair":
            return _global(draw)
        case "float8":
            return code + draw.randbytes(8)
        case _:
            length = draw.choice((0, 1, 7))
            width = {"1": 1, "4": 4, "8": 8}.get(kind.arg.name[-1], 4)
            return code + length.to_bytes(width, "little") + draw.randbytes(length)


def _value(draw: random.Random) -> bytes:
    return draw.choice((b"N", b"\x88", b"K\x05", _text("step"), b")", b"]", b"}", _global(draw), b"J\xff\xff\xff\xff"))


def _global(draw: random.Random) -> bytes:
    return _name(*draw.choice(_GLOBALS))


def _name(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def _text(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()
