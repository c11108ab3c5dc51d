"""Attempts to break a checkpoint: each ends in a `CheckpointError`, none crashes or reads outside the folder."""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_backend import save_once

from portable_fsdp.backends.base import Part
from portable_fsdp.checkpoint.format import seal
from portable_fsdp.checkpoint.store import Reader, hash_file
from portable_fsdp.runtime.errors import CheckpointError

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
        reader.verify(Part(0, 1))


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


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_anywhere(checkpoint: Path, file: str) -> None:
    rng, whole = random.Random(file), (checkpoint / file).read_bytes()
    for _ in range(20):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        (checkpoint / file).write_bytes(damaged)
        refuse(checkpoint, f"{file}: expected content with xxh3_128")


def test_a_flipped_bit_in_the_manifest(checkpoint: Path) -> None:
    rng, whole = random.Random(0), (checkpoint / "manifest.json").read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        (checkpoint / "manifest.json").write_bytes(damaged)
        refuse(checkpoint, r"manifest\.json")
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        (checkpoint / "manifest.json").write_bytes(whole[:size])
        refuse(checkpoint, r"manifest\.json")


def test_a_manifest_edited_by_hand(checkpoint: Path) -> None:
    text = (checkpoint / "manifest.json").read_text()
    (checkpoint / "manifest.json").write_text(text.replace('"position": 20', '"position": 21'))
    refuse(checkpoint, "it was altered after the save")


@pytest.mark.parametrize("file", FILES)
def test_a_file_cut_short_lengthened_or_missing(checkpoint: Path, file: str) -> None:
    whole = (checkpoint / file).read_bytes()
    for size in {0, 7, 8, len(whole) // 2, len(whole) - 1}:
        (checkpoint / file).write_bytes(whole[:size])
        refuse(checkpoint, f"{file}: expected {len(whole)} bytes, found {size} bytes")
        refuse(checkpoint, file, read_all)
    (checkpoint / file).write_bytes(whole + b"\0")
    refuse(checkpoint, f"found {len(whole) + 1} bytes")
    (checkpoint / file).unlink()
    refuse(checkpoint, "found none")
    refuse(checkpoint, "found none", read_all)


def test_two_files_swapped(checkpoint: Path) -> None:
    a, b = (checkpoint / file for file in FILES[:2])
    content = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(content)
    refuse(checkpoint, "expected")


def test_another_checkpoints_manifest(checkpoint: Path, tmp_path: Path) -> None:
    other = save_once(tmp_path / "other", seed=2, count=2, devices=2)
    shutil.copy(other / "manifest.json", checkpoint)
    refuse(checkpoint, "xxh3_128")


def test_a_header_of_ten_gigabytes(checkpoint: Path) -> None:
    path = checkpoint / FILES[0]
    path.write_bytes(struct.pack("<Q", 10 * 2**30) + path.read_bytes()[8:])
    refuse(checkpoint, FILES[0])
    refuse(checkpoint, "header too large", read_all)
    rewrite(checkpoint, lambda manifest: manifest["files"].update({FILES[0]: hash_file(path).model_dump()}))
    refuse(checkpoint, "header too large")  # even where its hash is right


def test_a_file_that_is_not_safetensors(checkpoint: Path) -> None:
    path = checkpoint / FILES[0]
    path.write_bytes(b"\x80\x04pickle" * 100)
    rewrite(checkpoint, lambda manifest: manifest["files"].update({FILES[0]: hash_file(path).model_dump()}))
    refuse(checkpoint, FILES[0])


def transpose(manifest: dict[str, Any]) -> None:
    tensor = manifest["tensors"]["1.weight"]
    for entry in (tensor, *tensor["pieces"]):
        entry["shape"].reverse()
    for piece in tensor["pieces"]:
        piece["offset"].reverse()


def rename_tensor(manifest: dict[str, Any]) -> None:
    manifest["tensors"]["2.weight"] = manifest["tensors"].pop("1.weight")


SOUND_BUT_UNTRUE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another dtype": lambda manifest: manifest["tensors"]["1.weight"].update(dtype="int32"),
    "another shape": transpose,
    "another name": rename_tensor,
    "a tensor less": lambda manifest: manifest["tensors"].pop("0.bias"),
}


@pytest.mark.parametrize("name", SOUND_BUT_UNTRUE)
def test_a_header_that_disagrees_with_the_manifest(checkpoint: Path, name: str) -> None:
    rewrite(checkpoint, SOUND_BUT_UNTRUE[name])
    refuse(checkpoint, r"safetensors: expected .*, found")
    refuse(checkpoint, r"safetensors: expected .*, found", read_all)


def rename_file(new: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][new] = manifest["files"].pop(FILES[0])
        for tensor in manifest["tensors"].values():
            for piece in tensor["pieces"]:
                piece["file"] = new if piece["file"] == FILES[0] else piece["file"]

    return change


def edit(*where: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set `manifest[where[0]][where[1]]...` to `value`."""

    def change(manifest: dict[str, Any]) -> None:
        target: Any = manifest
        for key in where[:-1]:
            target = target[key]
        target[where[-1]] = value

    return change


PIECES = ("tensors", "0.weight", "pieces")
HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{
        f"path {path}": rename_file(path)
        for path in (
            "../model/shard-00000-00.safetensors",
            "model/../../x.safetensors",
            "/etc/passwd",
            "/tmp/x.safetensors",
            "model//x.safetensors",
            "model/sub/x.safetensors",
            "model/.safetensors",
            "model/..safetensors",
            "model/x.safetensors\n",
            "model\\x.safetensors",
            "manifest.json",
            "model/x.bin",
            "model/\0.safetensors",
            "",
        )
    },
    "overlap": edit(*PIECES, 1, "offset", value=[1, 0]),
    "hole": lambda manifest: manifest["tensors"]["0.weight"]["pieces"].pop(1),
    "no pieces": edit(*PIECES, value=[]),
    "a piece twice": lambda manifest: manifest["tensors"]["gate"]["pieces"].append(
        manifest["tensors"]["gate"]["pieces"][0]
    ),
    "a piece outside": edit(*PIECES, 3, "offset", value=[7, 0]),
    "a negative offset": edit(*PIECES, 0, "offset", value=[-1, 0]),
    "an empty piece": edit(*PIECES, 0, "shape", value=[0, 5]),
    "a piece of other rank": edit(*PIECES, 0, "shape", value=[10]),
    "an absurd shape": edit("tensors", "0.weight", "shape", value=[2**62, 2**62]),
    "absurd pieces": lambda manifest: manifest["tensors"].update(
        {"gate": {"shape": [2**50], "dtype": "int8", "pieces": [{"file": FILES[0], "offset": [0], "shape": [2**50]}]}}
    ),
    "an absurd empty shape": lambda manifest: manifest["tensors"].update(
        {"x": {"shape": [0, 2**62, 2**62], "dtype": "int8", "pieces": []}}
    ),
    "a thousand dimensions": lambda manifest: manifest["tensors"].update(
        {"x": {"shape": [0] * 1000, "dtype": "int8", "pieces": []}}
    ),
    "a size that is a float": edit("tensors", "0.weight", "shape", 0, value=7.0),
    "a size that is a word": edit("tensors", "0.weight", "shape", 0, value="7"),
    "a size that is true": edit(*PIECES, 0, "offset", 0, value=False),
    "an unknown dtype": edit("tensors", "0.weight", "dtype", value="load"),
    "a file that isn't listed": lambda manifest: manifest["files"].pop(FILES[0]),
    "a file that no tensor uses": edit("files", "model/x.safetensors", value={"bytes": 1, "xxh3_128": "0" * 32}),
    "a file in the other folder": lambda manifest: manifest["tensors"].update(
        {"x/y": manifest["tensors"].pop("1.weight")}
    ),
    "a negative length": edit("files", FILES[0], "bytes", value=-1),
    "a hash of other length": edit("files", FILES[0], "xxh3_128", value="00"),
    "an unknown key": edit("pickle", value="x"),
    "a missing key": lambda manifest: manifest.pop("step"),
    "another step": edit("step", value=6),
    "a later format": edit("format_version", value=2),
    "a format of another type": edit("format_version", value=True),
    "tensors as a list": edit("tensors", value=[]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest(checkpoint: Path, name: str) -> None:
    rewrite(checkpoint, HOSTILE[name])
    refuse(checkpoint, r"step-00000005: (manifest\.json: |expected step 5 )")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        "[" * 100_000,
        '{"format_version": 1}',
        '{"format_version": ' + "9" * 10_000 + "}",
        '{"format_version": 1, "format_version": 1}',
        "\ud800",
    ],
    ids=["empty", "null", "list", "torn", "deep", "bare", "long", "twice", "surrogate"],
)
def test_a_manifest_that_is_not_one(checkpoint: Path, text: str) -> None:
    (checkpoint / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    refuse(checkpoint, r"manifest\.json")


@pytest.mark.parametrize("key", ["step", "shape", "gate", FILES[0]])
def test_a_key_that_stands_twice(checkpoint: Path, key: str) -> None:
    text = (checkpoint / "manifest.json").read_text()
    at = text.index(f'"{key}":')
    (checkpoint / "manifest.json").write_text(f'{text[:at]}"{key}": 5, {text[at:]}')
    refuse(checkpoint, f"the key '{key}' stands twice")


@pytest.mark.parametrize("name", ["manifest.json", "model", FILES[0]])
def test_links_out_of_the_folder(checkpoint: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (checkpoint / name).rename(outside)
    (checkpoint / name).symlink_to(outside)
    refuse(checkpoint, "found a link")
    refuse(checkpoint, "found a link", read_all)


@pytest.mark.parametrize("name", ["manifest.json", FILES[0]])
def test_a_pipe_or_a_folder_in_a_files_place(checkpoint: Path, name: str) -> None:
    (checkpoint / name).unlink()
    os.mkfifo(checkpoint / name)
    refuse(checkpoint, "special file")
    (checkpoint / name).unlink()
    (checkpoint / name).mkdir()
    refuse(checkpoint, "special file")
