"""Attempts to break a checkpoint: each ends in a `CheckpointError`, none crashes or reads outside the folder."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_backend import save_once

from portable_fsdp.backends.contract import Partition
from portable_fsdp.checkpoint.manifests import seal
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.runtime.errors import CheckpointError

pytestmark = pytest.mark.slow

FILES = [
    f"{folder}/shard-0000{p}-0{k}.safetensors" for folder in ("model", "optimizer") for p in (0, 1) for k in (0, 1)
]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_once(tmp_path_factory.mktemp("original"), count=2, devices=2)


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / original.name))


def verify(path: Path) -> None:
    with Reader(path) as reader:
        reader.verify(Partition(0, 1))


def read_all(path: Path) -> None:
    """What a load does after the hashes: the headers must stop it even where nobody hashed."""
    with Reader(path) as reader:
        for key, tensor in reader.manifest.tensors.items():
            reader.read(key, tuple(slice(0, size) for size in tensor.shape))


def refuse(path: Path, match: str = "", check: Callable[[Path], None] = verify) -> None:
    with pytest.raises(CheckpointError, match=match) as error:
        check(path)
    assert path.name in str(error.value)


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Edit the manifest by hand, by one who knows how to seal it."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["xxh3_128"]
    change(manifest)
    (path / "manifest.json").write_text(seal(json.dumps(manifest).removesuffix("}")))


def test_the_unharmed_copy_is_whole(checkpoint: Path) -> None:
    assert sorted(str(p.relative_to(checkpoint)) for p in checkpoint.rglob("*.safetensors")) == FILES
    rewrite(checkpoint, lambda manifest: None)
    verify(checkpoint)
    read_all(checkpoint)


@pytest.mark.parametrize("file", ["manifest.json", FILES[0], FILES[-1]])
def test_a_flipped_bit_anywhere_a_cut_and_a_missing_file(checkpoint: Path, file: str) -> None:
    rng, whole = random.Random(file), (checkpoint / file).read_bytes()
    is_manifest = file == "manifest.json"
    for _ in range(300 if is_manifest else 20):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        (checkpoint / file).write_bytes(damaged)
        refuse(checkpoint, file if is_manifest else f"{file}: expected content with xxh3_128")
    for size in {0, 1, 7, 8, len(whole) // 2, len(whole) - 1}:
        (checkpoint / file).write_bytes(whole[:size])
        refuse(checkpoint, file if is_manifest else f"{file}: expected {len(whole)} bytes, found {size} bytes")
        refuse(checkpoint, file, read_all)
    (checkpoint / file).write_bytes(whole + b"\0")
    refuse(checkpoint, file if is_manifest else f"found {len(whole) + 1} bytes")
    (checkpoint / file).unlink()
    refuse(checkpoint, "no such file")
    refuse(checkpoint, "no such file", read_all)


def test_a_manifest_edited_by_hand(checkpoint: Path) -> None:
    whole = (checkpoint / "manifest.json").read_text()
    (checkpoint / "manifest.json").write_text(whole.replace('"position": 20', '"position": 21'))
    refuse(checkpoint, "it was altered after the save")
    for key in ("step", "shape", "gate", "bytes"):
        at = whole.index(f'"{key}":')
        (checkpoint / "manifest.json").write_text(f'{whole[:at]}"{key}": 5, {whole[at:]}')
        refuse(checkpoint, f"duplicate key '{key}'")
    long = '{"format_version": ' + "9" * 10_000 + "}"
    for text in ("", "null", "[]", "{", '{"format_version": 1}', long, '{"step": 1, "step": 1}', "\ud800"):
        (checkpoint / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        refuse(checkpoint, r"manifest\.json")


def transpose(manifest: dict[str, Any]) -> None:
    tensor = manifest["tensors"]["1.weight"]
    tensor["shape"].reverse()
    for column in (tensor["offsets"], tensor["sizes"]):
        column[::2], column[1::2] = column[1::2], column[::2]


def edit(*where: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set `manifest[where[0]][where[1]]...` to `value`."""

    def change(manifest: dict[str, Any]) -> None:
        target: Any = manifest
        for key in where[:-1]:
            target = target[key]
        target[where[-1]] = value

    return change


def twice(column: list[Any]) -> None:
    column.append(column[0])


COLUMNS = ("files", "offsets", "sizes")
PATHS = (
    *["../model/shard-00000-00.safetensors", "model/../../x.safetensors", "/tmp/x.safetensors", "model/..safetensors"],
    *["model/sub/x.safetensors", "model\\x.safetensors", "manifest.json", "model/x.bin"],
    *("model/x.safetensors\n", "model/\0.safetensors", ""),
)
WEIGHT = ("tensors", "0.weight")  # float32 [7, 5] in four pieces of two rows, and one
NO_PIECES: dict[str, Any] = {"dtype": "int8", "files": [], "offsets": [], "sizes": []}
SOUND_BUT_UNTRUE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another dtype": lambda manifest: manifest["tensors"]["1.weight"].update(dtype="int32"),
    "another shape": transpose,
    "another name": lambda manifest: manifest["tensors"].update(x=manifest["tensors"].pop("1.weight")),
    "a tensor less": lambda manifest: manifest["tensors"].pop("0.bias"),
    "a tensor more": lambda manifest: manifest["tensors"].update(x=manifest["tensors"]["gate"]),
}
HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another step": edit("step", value=6),
    "a newer format": edit("format_version", value=2),
    **{f"path {path}": edit("files", 0, "name", value=path) for path in PATHS},
    "overlap": edit(*WEIGHT, "offsets", 2, value=1),
    "hole": lambda manifest: [manifest["tensors"]["0.weight"][name].pop() for name in COLUMNS],
    "no pieces": edit(*WEIGHT, value={**NO_PIECES, "shape": [7, 5], "dtype": "float32"}),
    "a piece twice": lambda manifest: [twice(manifest["tensors"]["gate"][name]) for name in COLUMNS],
    "two pieces in one file": edit(*WEIGHT, "files", 1, value=0),
    "a piece outside": edit(*WEIGHT, "offsets", 6, value=7),
    "a negative offset": edit(*WEIGHT, "offsets", 0, value=-1),
    "an offset that wraps": edit(*WEIGHT, "offsets", 0, value=2**63 - 1),
    "an offset that no machine holds": edit(*WEIGHT, "offsets", 0, value=2**70),
    "an empty piece": edit(*WEIGHT, "sizes", 0, value=0),
    "columns of other lengths": edit(*WEIGHT, "sizes", value=[2, 5]),
    "a file number out of range": edit(*WEIGHT, "files", 0, value=99),
    "a negative file number": edit(*WEIGHT, "files", 0, value=-1),
    "a file twice": lambda manifest: twice(manifest["files"]),
    "an absurd shape": edit(*WEIGHT, "shape", value=[2**62, 2**62]),
    "absurd pieces": edit(
        "tensors", "gate", value={"shape": [2**50], "dtype": "int8", "files": [0], "offsets": [0], "sizes": [2**50]}
    ),
    "a thousand dimensions": edit("tensors", "x", value={**NO_PIECES, "shape": [0] * 1000}),
    "a tie to nothing": edit("ties", value={"y": "z"}),
    "a tie of a stored tensor": edit("ties", value={"gate": "0.weight"}),
    "a size that is a float": edit(*WEIGHT, "shape", 0, value=7.0),
    "an offset that is false": edit(*WEIGHT, "offsets", 0, value=False),
    "an unknown dtype": edit(*WEIGHT, "dtype", value="load"),
    "a file that isn't listed": lambda manifest: manifest["files"].pop(),
    "a file that no tensor uses": lambda manifest: manifest["files"].append(
        {"name": "model/x.safetensors", "bytes": 1, "xxh3_128": "0" * 32}
    ),
    "a file in the other folder": lambda manifest: manifest["tensors"].update(
        {"x/y": manifest["tensors"].pop("1.weight")}
    ),
    "a negative length": edit("files", 0, "bytes", value=-1),
    "a hash of other length": edit("files", 0, "xxh3_128", value="00"),
    "an unknown key": edit("pickle", value="x"),
    "a missing key": lambda manifest: manifest.pop("step"),
    "a format of another type": edit("format_version", value=True),
    "tensors as a list": edit("tensors", value=[]),
}


MESSAGES = {
    **dict.fromkeys(SOUND_BUT_UNTRUE, r"safetensors: expected .*, found"),
    **dict.fromkeys(HOSTILE, r"step-00000005: manifest\.json: "),
    "another step": r"expected step 5 \(the folder's name\), found step 6 \(manifest.json\)\. Was the folder re",
    "a newer format": "expected format_version 1, found 2; saved by a newer portable_fsdp",
    "overlap": r"0.weight: the pieces at \[.*\] and \[.*\] overlap",  # which a hole makes up for
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_manifest_that_was_sealed_anew(checkpoint: Path, name: str) -> None:
    """A header that disagrees with a sound one is seen where nobody hashed, too."""
    rewrite(checkpoint, (SOUND_BUT_UNTRUE | HOSTILE)[name])
    for check in (verify, read_all):
        refuse(checkpoint, MESSAGES[name], check)


@pytest.mark.parametrize("name", ["manifest.json", "model", FILES[0]])
def test_a_link_a_pipe_or_a_folder_in_a_files_place(checkpoint: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (checkpoint / name).rename(outside)
    (checkpoint / name).symlink_to(outside)
    refuse(checkpoint, "found a link")
    refuse(checkpoint, "found a link", read_all)
    if name != "model":
        for make in (os.mkfifo, os.mkdir):
            (checkpoint / name).unlink()
            make(checkpoint / name)
            refuse(checkpoint, "special file")
