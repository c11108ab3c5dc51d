"""One file of `torch.save` that holds the whole model: `torch.load(path, weights_only=True)` gives {FQN: tensor}."""

import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from portable_fsdp.checkpoint.format import DTYPE_BYTES, TensorEntry
from portable_fsdp.checkpoint.storage import require_regular
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.formats.base import ExportOptions, ForeignCheckpoint, weights_of
from portable_fsdp.formats.names import names_of
from portable_fsdp.formats.safetensors_file import byte_chunks, check_shape
from portable_fsdp.formats.target import torch_saving
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

    torch.save writes the file without its tensors (`skip_data`). We put them in their places one at a time, and their
    checksums in place of those of zeros.
    """
    tensors = weights_of(reader, options.dtype)
    names = names_of(reader.manifest.architecture, f"checkpoint {reader.folder.name}")

    def write(path: Path) -> None:
        places = _write_without_data(path, tensors, {} if names is None else names.aliases)
        with path.open("r+b") as file:
            checksums: dict[int, int] = {}
            for key, entry in tensors.items():
                file.seek(places[key])
                checksum = 0
                for chunk in byte_chunks(key, reader.read_whole, entry):
                    file.write(chunk)
                    checksum = zlib.crc32(chunk, checksum)
                    options.advance(len(chunk))
                checksums[places[key]] = checksum
            _write_checksums(file, checksums)

    return write


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


def _write_checksums(file: BinaryIO, checksums: Mapping[int, int]) -> None:
    """Put the CRC-32 of each member (by the offset of its bytes) into the zip: after those bytes, and into the
    directory at the end (APPNOTE.TXT 6.3.10, 4.3.9 and 4.3.12)."""
    archive = zipfile.ZipFile(file)
    entry = archive.start_dir
    for member in archive.infolist():
        file.seek(member.header_offset + 26)
        start = member.header_offset + 30 + sum(struct.unpack("<HH", file.read(4)))
        file.seek(entry + 28)
        size = 46 + sum(struct.unpack("<HHH", file.read(6)))
        if start in checksums:
            for place in (start + member.file_size + 4, entry + 16):
                file.seek(place)
                file.write(struct.pack("<I", checksums[start]))
        entry += size


def _write_without_data(path: Path, tensors: dict[str, TensorEntry], aliases: dict[str, list[str]]) -> dict[str, int]:
    """Write the file with room for the tensors. Returns the offset of each one's bytes, as `skip_data` documents it."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.serialization import skip_data

    with FakeTensorMode():
        fake = {key: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for key, entry in tensors.items()}
    state = {name: fake[key] for key in tensors for name in aliases.get(key, [key])}
    with skip_data(materialize_fake_tensors=True), torch_saving(path):
        torch.save(state, path)
    with FakeTensorMode():
        loaded = torch.load(path, weights_only=True)
    return {key: loaded[key].untyped_storage()._checkpoint_offset for key in tensors}
