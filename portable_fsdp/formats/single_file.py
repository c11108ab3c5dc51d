"""Formats with the whole model in one file: torch.save, safetensors, and GGUF (llama.cpp; import only)."""

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, cast

import torch
from torch import Tensor

from portable_fsdp.backends.contract import dtype_name
from portable_fsdp.checkpoint.format import DTYPE_BYTES, TensorEntry
from portable_fsdp.checkpoint.safetensors import byte_chunks, header_of, read_tensor, write_file
from portable_fsdp.checkpoint.storage import require_regular, store_of
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.formats import base
from portable_fsdp.formats.base import ExportOptions, ForeignCheckpoint, ForeignFormat
from portable_fsdp.models.architecture import config_to_json
from portable_fsdp.models.tensor_files import GgufFile, is_gguf
from portable_fsdp.runtime.errors import CheckpointError, ConfigError
from portable_fsdp.runtime.hub import import_transformers

_NESTED = ("model", "state_dict", "model_state_dict")

# ---------------------------------------------------------------------------------------------------------- torch.save


def is_torch(path: Path) -> bool:
    """Whether `path` is the zip that torch.save writes, whatever its suffix."""
    if not path.is_file():
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


def _open_torch(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
    """Open a dict of tensors, perhaps under `model` or `state_dict`; read with `weights_only`, mapped.

    Holds a copy of one tensor beside the page cache. Ignores other values of the dict. Raises `CheckpointError`.
    """
    tensors = tensor_dict(path, load_mapped(path))
    entries = {key: entry_of(f"{path}: {key}", tensor) for key, tensor in tensors.items()}
    return ForeignCheckpoint(entries, lambda key: tensors[key].clone(memory_format=torch.contiguous_format))


def _export_torch(reader: Reader, options: ExportOptions) -> Callable[[Path], None]:
    """Export {FQN: tensor} for `torch.load(path, weights_only=True)`; all names of a tied weight share one storage.

    torch.save reads the tensors from mapped files beside the target, which need the same disk space again.
    """
    tensors = base.weights_of(reader, options.dtype)
    aliases = base.aliases_of(reader)

    def write(path: Path) -> None:
        with TemporaryDirectory(prefix=f"{path.name}-", dir=path.parent) as folder:
            saved: dict[str, Tensor] = {}
            for number, (key, entry) in enumerate(tensors.items()):
                file = Path(folder) / str(number)
                store_of(file).write(file, byte_chunks(reader.read_whole, key, entry))
                options.advance(entry.nbytes)
                tensor = torch.empty(0, dtype=torch.uint8)
                if entry.nbytes:
                    tensor = torch.from_file(str(file), size=entry.nbytes, dtype=torch.uint8)
                tensor = tensor.view(getattr(torch, entry.dtype)).reshape(entry.shape)
                saved |= dict.fromkeys(aliases.get(key, [key]), tensor)
            with base.torch_saving(path):
                torch.save(saved, path)

    return write


TORCH = ForeignFormat(is_torch, _open_torch, _export_torch)


def load_mapped(path: Path) -> Any:
    """Call `torch.load` with `weights_only`, its tensors mapped from the file. Raises `CheckpointError`."""
    require_regular(path, path.name)
    if not is_torch(path):
        raise CheckpointError(
            f"{path}: not a file of torch.save in zip format (torch 1.6 or newer).\n"
            "  Load it with torch and save it again."
        )
    with path.open("rb") as file:
        check_members(str(path), file)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # refusals of weights_only, and damage, raise many classes
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"{path}: torch.load(weights_only=True) failed: {type(error).__name__}: {first}\n"
            "  Nothing was executed. Save only the tensors: torch.save(model.state_dict(), ...)."
        ) from None


def check_members(where: str, file: IO[bytes]) -> None:
    """Check the CRC-32 of each member of a zip of torch.save, which torch doesn't, a MiB at a time.

    Raises `CheckpointError` for a member that differs, or is compressed: torch.save writes none, and a few bytes may
    expand to terabytes.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    raise CheckpointError(
                        f"{where}: {member.filename:.200}: expected uncompressed bytes, found compressed ones"
                    )
                with archive.open(member) as content:
                    while content.read(1 << 20):
                        pass
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, OSError) as error:
        raise CheckpointError(
            f"{where}: damaged since torch.save wrote it: {error!s:.300}.\n  Copy it again."
        ) from None


def tensor_dict(path: Path, value: object) -> dict[str, Tensor]:
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


def entry_of(where: str, tensor: Tensor) -> TensorEntry:
    """Return shape and dtype. Raises `CheckpointError` for anything but a plain tensor with its own bytes."""
    dtype = dtype_name(tensor.dtype)
    if dtype not in DTYPE_BYTES or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise CheckpointError(f"{where}: expected a plain tensor, found {tensor.dtype} {tensor.layout} {tensor.device}")
    shape = base.check_shape(where, tuple(tensor.shape))
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{where}: expected {tensor.nbytes:,} bytes for {list(shape)}, found {tensor.untyped_storage().nbytes():,}"
        )
    return TensorEntry(shape=shape, dtype=dtype)


# --------------------------------------------------------------------------------------------------- safetensors, GGUF


def _open_safetensors(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
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

    shapes = {key: base.check_shape(f"{path}: {file.file_of(key)}", list(shape)) for key, shape in file.shapes.items()}
    entries = {key: TensorEntry(shape=shape, dtype="float32") for key, shape in shapes.items()}
    return ForeignCheckpoint(entries, read, 0, config_to_json(file.config))


SAFETENSORS = ForeignFormat(
    lambda path: path.is_file() and path.suffix == ".safetensors", _open_safetensors, _export_safetensors
)
GGUF = ForeignFormat(is_gguf, _open_gguf)
