"""Foreign files from somebody who means harm: all refused, nothing is executed, nothing is read outside the folder."""

import json
import os
import pickle
import random
import shutil
import struct
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import MODELS, WIDE, build, dcp_save, write_gguf
from safetensors.torch import save_file

from portable_fsdp.checkpoint.safetensors import header_of
from portable_fsdp.formats.dcp import read_pickle
from portable_fsdp.formats.importing import import_checkpoint
from portable_fsdp.runtime.errors import CheckpointError

pytestmark = pytest.mark.slow


def refused(path: Path, tmp_path: Path, match: str, **options: Any) -> None:
    with pytest.raises(CheckpointError, match=match):
        import_checkpoint(path, tmp_path / "run", **options)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert not checkpoints.exists() or not any(checkpoints.iterdir())
    assert not (tmp_path / "mark").exists(), "code was run"


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return subprocess.call, (["touch", str(self.mark)],)


# -------------------------------------------------------------------------------------------------- safetensors files


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: Any, start: Any, end: Any, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def of_a(*fields: Any) -> bytes:
    """A tensor `a` with these fields, over 4 bytes."""
    return safetensors({"a": entry(*fields)}, bytes(4))


HOSTILE = {
    "empty": (b"", "at least 8 bytes, found 0"),
    "header_of_10_gb": (safetensors({}, length=10_000_000_000), "header too large: 10000000000 bytes"),
    "header_of_2_to_63": (safetensors({}, length=2**63), "header too large"),
    "no_json": (safetensors(b"{a"), "Expecting property name"),
    "no_text": (safetensors(b"\xff\xfe"), "can't decode"),
    "a_list": (safetensors([1]), "its header is not a JSON object"),
    "twice": (safetensors(b'{"a":{"dtype":"F32"},"a":{"dtype":"F32"}}'), "duplicate key 'a'"),
    "no_entry": (safetensors({"a": 3}), "expected dtype, shape, and data_offsets"),
    "other_dtype": (of_a([1], 0, 4, "F7"), "that fit them"),
    "negative": (of_a([-1], 0, 4), "that fit them"),
    "a_float": (of_a([1.5], 0, 4), "that fit them"),
    "a_bool": (of_a([True], 0, 4), "that fit them"),
    "absurd": (of_a([2**40, 2**40], 0, 4), "that fit them"),
    "large": (of_a([2**50], 0, 2**52), "expected .* bytes by the header, found"),
    "other_size": (of_a([2], 0, 4), "that fit them"),
    "hole": (safetensors({"a": entry([1], 4, 8)}, bytes(8)), "a gap or an overlap"),
    "overlap": (safetensors({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4)), "a gap or an overlap"),
    "more_data": (safetensors({"a": entry([1], 0, 4)}, bytes(5)), "expected .* bytes by the header, found"),
    "an_unknown_key": (safetensors({"a": {**entry([1], 0, 4), "file": "/etc/passwd"}}, bytes(4)), "that fit them"),
    "many_sizes": (of_a([1] * 17, 0, 4), "that fit them"),
    "a_slash": (safetensors({"../../x": entry([1], 0, 4)}, bytes(4)), "expected a tensor name like"),
    "an_escape": (safetensors({"a\u001b[2J": entry([1], 0, 4)}, bytes(4)), "expected a tensor name like"),
}


@pytest.mark.parametrize(("content", "match"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_safetensors_files(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    refused(tmp_path / "m.safetensors", tmp_path, match)


def test_a_file_of_many_gigabytes_is_not_taken_for_hostile(tmp_path: Path) -> None:
    size = 5 * 2**30
    header = {"a": entry([size // 4], 0, size), "b": entry([size // 4], size, 2 * size)}
    (tmp_path / "m.safetensors").write_bytes(safetensors(header))
    start = (tmp_path / "m.safetensors").stat().st_size
    os.truncate(tmp_path / "m.safetensors", start + 2 * size)  # sparse
    stored = header_of(tmp_path / "m.safetensors")
    assert [(key, tensor.start) for key, tensor in stored.items()] == [("a", start), ("b", start + size)]


# ------------------------------------------------------------------------------------------------- Hugging Face folders

INDEX = "model.safetensors.index.json"


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    build(MODELS["llama"]).save_pretrained(tmp_path / "hub", max_shard_size="2KB")
    return tmp_path / "hub"


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_index_names_plain_files_of_its_folder(tmp_path: Path, hub: Path) -> None:
    (tmp_path / "pickles").mkdir()
    for name in ("../outside.bin", "/etc/passwd"):
        (tmp_path / "pickles" / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        refused(tmp_path / "pickles", tmp_path, "expected the plain name of a file in this folder")
    weight_map = json.loads((hub / INDEX).read_text())["weight_map"]
    for name in ("../../../etc/passwd", "/etc/passwd", "..", "", "a/b.safetensors", "a\\b", 3, None):
        edit(hub / INDEX, weight_map={**weight_map, "model.norm.weight": name})
        refused(hub, tmp_path, "expected the plain name of a file in this folder")
    other = next(name for name in sorted(set(weight_map.values())) if name != weight_map["model.norm.weight"])
    edit(hub / INDEX, weight_map={**weight_map, "model.norm.weight": other})
    refused(hub, tmp_path, "has no tensor model.norm.weight, which .* lists")
    (hub / INDEX).write_text('{"other": {}}')
    refused(hub, tmp_path, "expected a weight_map")
    (hub / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}')
    refused(hub, tmp_path, "duplicate key 'a'")


def test_code_beside_a_model_is_never_run(tmp_path: Path, hub: Path) -> None:
    edit(hub / "config.json", model_type="mine", auto_map={"AutoConfig": "code.Config"})
    (hub / "code.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    refused(hub, tmp_path, "transformers can't load this config.json")


# ----------------------------------------------------------------------------------------------------------------- DCP


@pytest.fixture
def dcp(tmp_path: Path) -> Path:
    dcp_save({"model": {"a": torch.arange(12.0).reshape(3, 4)}}, tmp_path / "dcp")
    return tmp_path / "dcp"


def edit_metadata(folder: Path, change: Callable[[Any], Any]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def place(**changes: Any) -> Callable[[Any], Any]:
    """Changes where the first tensor lies."""
    return lambda metadata: next(iter(metadata.storage_data.values())).__dict__.update(changes)


@pytest.mark.parametrize("folder", ["hub", "dcp"])
def test_links_are_refused(tmp_path: Path, request: pytest.FixtureRequest, folder: str) -> None:
    source: Path = request.getfixturevalue(folder)
    file = next(iter(sorted([*source.glob("*.safetensors"), *source.glob("*.distcp")])))
    file.rename(tmp_path / "outside.safetensors")
    file.symlink_to(tmp_path / "outside.safetensors")
    refused(source, tmp_path, "expected a plain file, found a link, which could lead anywhere", trust_metadata=True)


PICKLES = {
    "system": b"cos\nsystem\n(S'touch %s'\ntR.",
    "eval": b'cbuiltins\neval\n(S\'open("%s","w")\'\ntR.',
    "getattr": b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__class__'\ntR.",
    "dotted": b"\x80\x04\x8c\x2ctorch.distributed.checkpoint.metadata\x8c\x0bos.system..\x93.",
    "torch_load": b"ctorch\nload\n(S'%s'\ntR.",
    "not_a_dtype": b"ctorch\nhub\n.",
    "instance": b"(ios\nsystem\n.",
    "extension": b"\x82\x01.",
    "persistent": b"Pabc\n.",
    "truncated": b"\x80\x04\x95",
    "a_number": b"I3\n.",
    "huge_length": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_malicious_pickle_is_refused_and_runs_nothing(tmp_path: Path, dcp: Path, name: str) -> None:
    (dcp / ".metadata").write_bytes(PICKLES[name].replace(b"%s", str(tmp_path / "mark").encode()))
    refused(dcp, tmp_path, "as data only, pass --trust_metadata")
    refused(dcp, tmp_path, r"\.metadata", trust_metadata=True)


def test_a_command_hidden_in_good_files_is_not_run(tmp_path: Path, dcp: Path) -> None:
    harm = Harmful(tmp_path / "mark")
    torch.save({"a": torch.ones(2), "b": harm}, tmp_path / "m.pt")
    refused(tmp_path / "m.pt", tmp_path, "Nothing was executed")
    torch.save(harm, dcp / "__0_0.distcp")
    edit_metadata(dcp, place(offset=0, length=(dcp / "__0_0.distcp").stat().st_size))
    refused(dcp, tmp_path, "Weights only load failed", trust_metadata=True)
    edit_metadata(dcp, lambda metadata: setattr(metadata, "planner_data", {"a": harm}))
    refused(dcp, tmp_path, r"refused subprocess\.call", trust_metadata=True)


def test_a_pickle_cannot_reach_into_torchs_classes(tmp_path: Path) -> None:
    """BUILD with slots sets attributes on whatever object it is given: here that is a stand-in."""
    from torch.distributed.checkpoint.metadata import Metadata

    (tmp_path / "p").write_bytes(b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(dS'evil'\nI1\nstb.")
    with pytest.raises(CheckpointError):
        read_pickle(tmp_path / "p")
    assert not hasattr(Metadata, "evil")


def grow(metadata: Any) -> None:
    tensor = metadata.state_dict_metadata["model.a"]
    tensor.size = tensor.chunks[0].sizes = torch.Size([2**50, 4])


LIES: list[tuple[Callable[[Any], Any], str]] = [
    (place(relative_path="../../../etc/passwd"), "expected the plain name"),
    (place(relative_path="/etc/passwd"), "expected the plain name"),
    (place(relative_path="missing.distcp"), "no such file"),
    (place(offset=2**62), "expected __0_0.distcp to hold"),
    (place(offset=-1), "expected offset and length"),
    (place(length=60), "PytorchStreamReader failed"),
    (place(transform_descriptors=["zstd"]), "transformed by"),
    (grow, r"expected its chunk at \[0, 0\] to take 18,014,398,509,481,984 bytes"),
]


@pytest.mark.parametrize(("change", "match"), LIES)
def test_metadata_that_lies_is_refused(tmp_path: Path, dcp: Path, change: Callable[[Any], Any], match: str) -> None:
    edit_metadata(dcp, change)
    refused(dcp, tmp_path, match, trust_metadata=True)


# ----------------------------------------------------------------------------------------------- GGUF and torch files


def test_other_architectures_and_tensors_of_gguf_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_gguf(file, build(WIDE), architecture="mamba")
    refused(file, tmp_path, r"expected an architecture of llama, .*; found mamba")
    write_gguf(file, build(WIDE))
    file.write_bytes(file.read_bytes().replace(b"output_norm.weight", b"rope_freqsX.weight"))
    refused(file, tmp_path, r"rope_freqsX\.weight")


def test_absurd_lengths_in_gguf_are_refused(tmp_path: Path) -> None:
    for content in (
        b"",
        struct.pack("<IQQ", 3, 0, 0),
        struct.pack("<IQQ", 3, 2**63, 2**63),
        struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62),
        struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 2**62),
        struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<IQIQ", 1, 2**62, 0, 0),
        struct.pack("<IQQQ", 3, 1, 0, 1) + b"a" + struct.pack("<I", 2**31),
        struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<II", 9, 9) + bytes(64),
    ):
        (tmp_path / "m.gguf").write_bytes(b"GGUF" + content)
        refused(tmp_path / "m.gguf", tmp_path, r"m\.gguf")


def test_other_torch_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.pt"
    torch.save({"a": torch.ones(1).expand(2**50)}, file)
    refused(file, tmp_path, "expected 4,503,599,627,370,496 bytes")
    torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    refused(file, tmp_path, "unknown format; expected one of huggingface, dcp")
    refused(file, tmp_path, "not a file of torch.save in zip format", name="torch")
    refused(tmp_path / "none", tmp_path, "no such file or folder")
    torch.save([1, 2], file)
    refused(file, tmp_path, "expected a dict of tensors")
    torch.save({"a": torch.ones(1000)}, file)
    file.write_bytes(file.read_bytes()[:-300])
    refused(file, tmp_path, "m.pt", name="torch")


# --------------------------------------------------------------------------------------------------- damage at random


def damaged(raw: bytes, end: int, seed: int) -> bytes:
    """One byte before `end` changed, a stretch of them changed, or the end cut off."""
    dice = random.Random(seed)
    at, kind = dice.randrange(end), dice.randrange(3)
    if kind == 2:
        return raw[:at]
    length = 1 if kind == 0 else dice.randrange(1, 9)
    return raw[:at] + dice.randbytes(length) + raw[at + length :]


TENSORS = {"a.weight": torch.randn(3, 4), "b": torch.ones(2, dtype=torch.bfloat16)}
STATE = {"model": TENSORS, "optimizer": {"state": {"b": {"exp_avg": torch.ones(2)}}}, "lr": 1.0}
WRITERS: dict[str, Callable[[Path], object]] = {
    "safetensors": partial(save_file, TENSORS),
    "torch": partial(torch.save, TENSORS),
    "dcp": partial(dcp_save, STATE),
    "gguf": lambda path: write_gguf(path, build(WIDE)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_damage_is_refused_or_harmless_but_never_a_crash(tmp_path: Path, name: str) -> None:
    """These formats have no hashes: damaged data can look right. Damage of the structure must be refused."""
    source = tmp_path / f"m.{name}"
    WRITERS[name](source)
    victim = source / ".metadata" if name == "dcp" else source
    raw = victim.read_bytes()
    end = raw.index(b"output_norm.weight") + 64 if name == "gguf" else len(raw)  # of the structure
    refusals = 0
    for seed in range(150):
        victim.write_bytes(damaged(raw, end, seed))
        try:
            shutil.rmtree(import_checkpoint(source, tmp_path / "run", name, trust_metadata=True))
        except CheckpointError:
            refusals += 1
    assert refusals > 20
    victim.write_bytes(raw[:-7])  # of gguf: within a tensor
    with pytest.raises(CheckpointError):
        import_checkpoint(source, tmp_path / "run", name, trust_metadata=True)
