"""One file of `torch.save` that holds the whole model: `torch.load(path, weights_only=True)` gives {FQN: tensor}."""

import struct
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from portable_fsdp.checkpoint.format import DTYPE_BYTES, TensorEntry
from portable_fsdp.checkpoint.safetensors import byte_chunks
from portable_fsdp.checkpoint.storage import part_of, require_regular
from portable_fsdp.checkpoint.store import Advance, Reader
from portable_fsdp.formats.base import ExportOptions, ForeignCheckpoint, check_shape, torch_saving, weights_of
from portable_fsdp.formats.names import names_of
from portable_fsdp.runtime.errors import CheckpointError

_NESTED = ("model", "state_dict", "model_state_dict")


def open_checkpoint(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
    """A dict of tensors, perhaps under `model` or `state_dict`; read with `weights_only`, mapped.

    Holds a copy of one tensor beside the page cache. Ignores other values of the dict. Raises `CheckpointError`.
    """
    tensors = tensor_dict(path, load_mapped(path))
    entries = {key: entry_of(f"{path}: {key}", tensor) for key, tensor in tensors.items()}
    return ForeignCheckpoint(entries, lambda key: tensors[key].clone(memory_format=torch.contiguous_format))


def export(reader: Reader, options: ExportOptions) -> Callable[[Path], None]:
    """One file; all names of a tied weight share one storage in it.

    torch.save writes the file without its tensors (`skip_data`, on fake ones). We copy that, with the tensors.
    """
    tensors = weights_of(reader, options.dtype)
    names = names_of(reader.manifest.architecture, f"checkpoint {reader.folder.name}")
    aliases = {} if names is None else names.aliases

    def write(path: Path) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.serialization import skip_data

        empty, keys = part_of(path), iter(tensors)
        with FakeTensorMode():
            fake = {key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for key, entry in tensors.items()}
        with skip_data(materialize_fake_tensors=True), torch_saving(path):
            torch.save({name: fake[key] for key in tensors for name in aliases.get(key, [key])}, empty)
        with zipfile.ZipFile(empty) as source, zipfile.ZipFile(path, "w") as archive:
            for member in source.infolist():
                name = member.filename.partition("/")[2]
                if name.startswith("data/"):
                    key = next(keys)
                    chunks = byte_chunks(key, reader.read_whole, tensors[key])
                    _write_member(archive, f"archive/{name}", chunks, options.advance)
                elif not name.startswith("."):  # how torch aligned the file that it wrote
                    archive.writestr(f"archive/{name}", source.read(member))
        empty.unlink()

    return write


def _write_member(archive: zipfile.ZipFile, name: str, chunks: Iterable[memoryview], advance: Advance) -> None:
    """Its bytes begin at a multiple of 64, as torch's own do, for tensors that are mapped."""
    member = zipfile.ZipInfo(name)
    padding = -(archive.start_dir + 30 + len(name) + 4 + 20) % 64  # header, name, this field and that of large files
    member.extra = struct.pack("<HH", 0x4246, padding) + bytes(padding)
    with archive.open(member, "w", force_zip64=True) as file:
        for chunk in chunks:
            file.write(chunk)
            advance(len(chunk))


def matches(path: Path) -> bool:
    """Whether it is the zip that torch.save writes, whatever its suffix."""
    if not path.is_file():
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


def load_mapped(path: Path) -> Any:
    """`torch.load` with `weights_only`, its tensors mapped from the file. Raises `CheckpointError`."""
    require_regular(path, path.name)
    if not matches(path):
        raise CheckpointError(
            f"{path}: expected a file of torch.save in its zip format (torch 1.6 or newer), found another.\n"
            "  Load it with torch and save it again."
        )
    with path.open("rb") as file:
        check_members(str(path), file)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # what weights_only refuses, and damage, show in many ways
        first = (str(error).splitlines() or [""])[0]
        raise CheckpointError(
            f"{path}: expected tensors and plain values (weights_only=True), found: {type(error).__name__}: {first}\n"
            "  Nothing was executed. Save the tensors alone: torch.save(model.state_dict(), ...)."
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
                        f"{where}: {member.filename:.200}: expected bytes as they are, found them packed"
                    )
                with archive.open(member) as content:
                    while content.read(1 << 20):
                        pass
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, OSError) as error:
        raise CheckpointError(
            f"{where}: expected the bytes that torch.save wrote, found: {error!s:.300}.\n"
            "  It was damaged since: copy it again."
        ) from None


def tensor_dict(path: Path, value: object) -> dict[str, Tensor]:
    """The tensors by name, of the dict or of the dict in it that holds the model. Raises `CheckpointError`."""
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
    """Shape and dtype. Raises `CheckpointError` for anything but a plain tensor with bytes of its own."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES or tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise CheckpointError(f"{where}: expected a plain tensor, found {tensor.dtype} {tensor.layout} {tensor.device}")
    shape = check_shape(where, tuple(tensor.shape))
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{where}: expected {tensor.nbytes:,} bytes for {list(shape)}, found {tensor.untyped_storage().nbytes():,}"
        )
    return TensorEntry(shape=shape, dtype=dtype)
