"""Formats with the whole model in one file: safetensors, and for import torch.save (also transformers' folders of such
files) and GGUF (llama.cpp)."""

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from portable_fsdp.backends.state import dtype_name
from portable_fsdp.checkpoint.manifests import DTYPE_BYTES, TensorEntry
from portable_fsdp.checkpoint.safetensors import byte_chunks, header_of, read_tensor, write_file
from portable_fsdp.checkpoint.storage import require_regular
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.formats import base
from portable_fsdp.formats.base import ExportOptions, ForeignCheckpoint, ForeignFormat
from portable_fsdp.models.architecture import config_to_json
from portable_fsdp.models.tensor_files import GgufFile, is_gguf
from portable_fsdp.runtime.errors import CheckpointError, ConfigError
from portable_fsdp.runtime.hub import import_transformers

_INDEX = "pytorch_model.bin.index.json"
_SINGLE = "pytorch_model.bin"
_NESTED = ("model", "state_dict", "model_state_dict")

# ---------------------------------------------------------------------------------------------------------- torch.save


def is_torch(path: Path) -> bool:
    """Whether `path` is the zip that torch.save writes, whatever its suffix, or transformers' index or folder of such
    files."""
    if path.is_dir():
        return any((path / name).is_file() for name in (_INDEX, _SINGLE))
    if not path.is_file() or path.name == _INDEX:
        return path.is_file()
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


def _open_torch(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
    """Open a file, or all files of transformers' folder or index, with its config.json. Raises `CheckpointError`."""
    if path.is_dir() or path.name == _INDEX:
        return base.open_folder(path if path.is_dir() else path.parent, _INDEX, _SINGLE, _open_torch_file)
    return _open_torch_file(path)


def _open_torch_file(path: Path) -> ForeignCheckpoint:
    """Open a dict of tensors, perhaps under `model` or `state_dict`; read with `weights_only`, mapped.

    Holds a copy of one tensor beside the page cache. Ignores other values of the dict. Raises `CheckpointError`.
    """
    require_regular(path, path.name)
    if not is_torch(path):
        raise CheckpointError(
            f"{path}: not a file of torch.save in zip format (torch 1.6 or newer).\n"
            "  Load it with torch and save it again."
        )
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # refusals of weights_only, and damage, raise many classes
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"{path}: torch.load(weights_only=True) failed: {type(error).__name__}: {first}\n"
            "  Nothing was executed. Save only the tensors: torch.save(model.state_dict(), ...)."
        ) from None
    tensors = _tensor_dict(path, value)
    entries = {key: _entry_of(f"{path}: {key}", tensor) for key, tensor in tensors.items()}
    return ForeignCheckpoint(entries, lambda key: tensors[key].clone(memory_format=torch.contiguous_format))


TORCH = ForeignFormat(is_torch, _open_torch)


def _tensor_dict(path: Path, value: object) -> dict[str, Tensor]:
    """Return the tensors by name, of the dict or of the model's dict inside it. Raises `CheckpointError`."""
    outer = cast(dict[object, object], value) if isinstance(value, dict) else {}
    inner = next((outer[name] for name in _NESTED if isinstance(outer.get(name), dict)), outer)
    tensors = {str(key): item for key, item in cast(dict[object, object], inner).items() if isinstance(item, Tensor)}
    if not tensors:
        raise CheckpointError(
            f"{path}: expected a dict of tensors, perhaps under {' or '.join(_NESTED)}; found {type(value).__name__}"
            + (f" with {', '.join(str(key) for key in list(outer)[:5])}" if outer else "")
        )
    return tensors


def _entry_of(where: str, tensor: Tensor) -> TensorEntry:
    """Return shape and dtype. Raises `CheckpointError` for anything but a plain tensor with its own bytes."""
    dtype = dtype_name(tensor.dtype)
    if dtype not in DTYPE_BYTES or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise CheckpointError(f"{where}: expected a plain tensor, found {tensor.dtype} {tensor.layout} {tensor.device}")
    shape = base.check_numbers(where, tuple(tensor.shape))
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{where}: expected {tensor.nbytes:,} bytes for {list(shape)}, found {tensor.untyped_storage().nbytes():,}"
        )
    return TensorEntry(shape=shape, dtype=dtype)


# --------------------------------------------------------------------------------------------------- safetensors, GGUF


def open_safetensors(path: Path) -> ForeignCheckpoint:
    require_regular(path, path.name)
    stored = header_of(path)
    entries = {key: tensor.entry for key, tensor in stored.items()}
    return ForeignCheckpoint(entries, lambda key: read_tensor(path, stored[key]))


def _export_safetensors(reader: Reader, options: ExportOptions) -> Callable[[Path], object]:
    """Export one file; a tied weight occurs once."""
    tensors = base.weights_of(reader, options.dtype)
    chunks_of = partial(byte_chunks, reader.read_whole)
    return lambda path: write_file(path, path.name, tensors, chunks_of, {}, options.advance)


def _open_gguf(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
    """Open the model in float32 (`--dtype` converts it further), and the config that transformers reads from the file.

    Maps the file; holds one dequantised tensor, and a permuted copy of some. Raises `CheckpointError`.
    """
    require_regular(path, path.name)
    import_transformers()
    try:
        file = GgufFile(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error

    def read(key: str) -> Tensor:
        try:
            return file.read(key, ())
        except ConfigError as error:
            raise CheckpointError(str(error)) from error

    shapes = {
        key: base.check_numbers(f"{path}: {file.file_of(key)}", list(shape)) for key, shape in file.shapes.items()
    }
    entries = {key: TensorEntry(shape=shape, dtype="float32") for key, shape in shapes.items()}
    return ForeignCheckpoint(entries, read, 0, config_to_json(file.config))


SAFETENSORS = ForeignFormat(
    lambda path: path.is_file() and path.suffix == ".safetensors",
    lambda path, *, trust_metadata: open_safetensors(path),
    _export_safetensors,
)
GGUF = ForeignFormat(is_gguf, _open_gguf)
