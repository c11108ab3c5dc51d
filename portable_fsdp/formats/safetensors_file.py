"""One safetensors file that holds the whole model: {FQN: tensor}."""

from collections.abc import Callable
from pathlib import Path

from portable_fsdp.checkpoint import safetensors
from portable_fsdp.checkpoint.storage import require_regular
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.formats.base import ExportOptions, ForeignCheckpoint, weights_of


def matches(path: Path) -> bool:
    """By its name."""
    return path.is_file() and path.suffix == ".safetensors"


def open_checkpoint(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
    """Holds one tensor. Raises `CheckpointError`."""
    require_regular(path, path.name)
    stored = safetensors.header_of(path)
    entries = {key: tensor.entry for key, tensor in stored.items()}
    return ForeignCheckpoint(entries, lambda key: safetensors.read_tensor(path, stored[key]))


def export(reader: Reader, options: ExportOptions) -> Callable[[Path], object]:
    """One file, in which a tied weight stands once."""
    tensors = weights_of(reader, options.dtype)
    return lambda path: safetensors.write_tensors(path, tensors, reader.read_whole, {}, options.advance)
