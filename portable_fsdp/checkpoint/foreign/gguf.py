"""GGUF files (llama.cpp), for import: dequantised by the gguf library, named by transformers' own tables.

The architectures below map one tensor to one; others are refused by name. `rope_freqs` and other tensors that
transformers has no place for are refused too: what they say would be lost.
"""

import struct
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor

from portable_fsdp.checkpoint.foreign.base import ForeignCheckpoint
from portable_fsdp.checkpoint.foreign.names import config_object, import_transformers
from portable_fsdp.checkpoint.foreign.streams import check_shape
from portable_fsdp.checkpoint.format import TensorEntry
from portable_fsdp.checkpoint.storage import require_regular
from portable_fsdp.models.config_json import config_to_json
from portable_fsdp.runtime.errors import CheckpointError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_MAGIC = b"GGUF"
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def matches(path: Path) -> bool:
    """By its first four bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


@contextmanager
def open_checkpoint(path: Path, *, trust_metadata: bool) -> Generator[ForeignCheckpoint]:
    """The model in float32 (`--dtype` converts it further), and the config that transformers reads from the file.

    Holds one tensor, dequantised, and a copy of it where it must be permuted; the file is mapped. Raises
    `CheckpointError`.
    """
    require_regular(path, path.name)
    _check_lengths(path)
    try:
        import gguf

        reader: Any = gguf.GGUFReader(str(path))
    except Exception as error:  # the library lets numpy's errors through
        raise CheckpointError(f"{path}: expected a GGUF file, found: {type(error).__name__}: {error}") from None
    config, processor, names = _transformers_view(path, reader)
    stored = {_hf_name(path, names, str(tensor.name)): tensor for tensor in reader.tensors}
    if len(stored) != len(reader.tensors):
        raise CheckpointError(f"{path}: expected one tensor for each name of the model, found two for one")
    entries = {
        key: TensorEntry(
            shape=check_shape(f"{path}: {tensor.name}", tuple(int(size) for size in reversed(tensor.shape))),
            dtype="float32",
        )
        for key, tensor in stored.items()
    }
    yield ForeignCheckpoint(entries, lambda key: _read(path, stored[key], processor), 0, config)


def _read(path: Path, tensor: Any, processor: Any) -> Tensor:
    import gguf

    try:
        weights = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        weights = processor.process(weights=weights, name=str(tensor.name)).weights
    except Exception as error:  # a type that the library can't dequantise, or sizes that don't fit
        raise CheckpointError(f"{path}: {tensor.name}: {type(error).__name__}: {error}") from None
    return torch.from_numpy(np.require(weights, requirements=["C", "W"]))


def _transformers_view(path: Path, reader: Any) -> tuple[dict[str, Any], Any, dict[str, str]]:
    """The config as a dict, what undoes llama.cpp's permutations, and GGUF name -> FQN."""
    transformers = import_transformers()
    from transformers import modeling_gguf_pytorch_utils as tables

    field = reader.fields.get("general.architecture")
    architecture = str(field.contents()) if field is not None else "none"
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{path}: expected an architecture of {', '.join(ARCHITECTURES)}; found {architecture}.\n"
            "  Load it with transformers (gguf_file=) if that knows it, save_pretrained, and import that folder."
        )
    try:
        loaded: Any = cast(Any, tables).load_gguf_checkpoint(str(path), return_tensors=False)
    except Exception as error:  # it looks at nothing before it uses it
        raise CheckpointError(f"{path}: its metadata: {type(error).__name__}: {error}") from None
    width = reader.fields.get(f"{architecture}.attention.key_length")
    if width is not None:  # transformers 5.23 overlooks it for qwen3
        loaded["config"].setdefault("head_dim", int(width.contents()))
    config = config_object(loaded["config"], str(path))
    processor: Any = cast(Any, tables).TENSOR_PROCESSORS.get(architecture, tables.TensorProcessor)(
        config=loaded["config"]
    )
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:  # sizes that don't fit each other fail in many ways
        raise CheckpointError(f"{path}: its sizes don't make a model: {type(error).__name__}: {error}") from None
    return config_to_json(config), processor, cast(Any, tables).get_gguf_hf_weights_map(model, processor)


def _hf_name(path: Path, names: dict[str, str], name: str) -> str:
    if name not in names:
        raise CheckpointError(
            f"{path}: expected tensors that transformers has a name for, found {name[:200]!r}, whose meaning would be\n"
            "  lost. Import the model from its Hugging Face folder instead."
        )
    return names[name]


# --------------------------------------------------------------------------------------- lengths, before the library


def _check_lengths(path: Path) -> None:
    """Every length in the header stays inside the file: the library would loop over an absurd one."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            _take(file, size, 8)
            tensors, pairs = struct.unpack("<QQ", _take(file, size, 16))
            for _ in range(pairs):
                _skip_string(file, size)
                _skip_value(file, size, _number(file, size, "<I"))
            for _ in range(tensors):
                _skip_string(file, size)
                _take(file, size, 8 * min(_number(file, size, "<I"), size) + 12)
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path}: expected a GGUF file (version 2 or 3, little-endian), found: {error}") from None


def _skip_value(file: BinaryIO, size: int, kind: int) -> None:
    if kind == _STRING:
        _skip_string(file, size)
    elif kind == _ARRAY:
        inner, count = _number(file, size, "<I"), _number(file, size, "<Q")
        if inner in _SCALAR_BYTES:
            _skip(file, size, count * _SCALAR_BYTES[inner])
        elif inner == _STRING:
            for _ in range(count):
                _skip_string(file, size)
        else:
            raise ValueError(f"an array of type {inner}")
    elif kind in _SCALAR_BYTES:
        _skip(file, size, _SCALAR_BYTES[kind])
    else:
        raise ValueError(f"a value of type {kind}")


def _skip_string(file: BinaryIO, size: int) -> None:
    _skip(file, size, _number(file, size, "<Q"))


def _skip(file: BinaryIO, size: int, count: int) -> None:
    if count > size - file.tell():
        raise ValueError(f"a length of {count:,} at byte {file.tell():,} of {size:,}")
    file.seek(count, 1)


def _number(file: BinaryIO, size: int, code: str) -> int:
    return int(struct.unpack(code, _take(file, size, struct.calcsize(code)))[0])


def _take(file: BinaryIO, size: int, count: int) -> bytes:
    if count > size - file.tell():
        raise ValueError(f"a length of {count:,} at byte {file.tell():,} of {size:,}")
    return file.read(count)
