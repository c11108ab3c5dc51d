"""One safetensors file that holds the whole model: {FQN: tensor}."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from portable_fsdp.checkpoint import safetensors
from portable_fsdp.checkpoint.storage import require_regular, store_of
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.formats.base import ExportOptions, ForeignCheckpoint, weights_of, write_file
from portable_fsdp.runtime.errors import CheckpointError


def matches(path: Path) -> bool:
    """By its name."""
    return path.is_file() and path.suffix == ".safetensors"


def open_checkpoint(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
    """Holds one tensor. Raises `CheckpointError`."""
    require_regular(path, path.name)
    stored = read_header(path)
    return ForeignCheckpoint({key: s.entry for key, s in stored.items()}, lambda key: read_tensor(path, stored[key]))


def export(reader: Reader, options: ExportOptions) -> Callable[[Path], object]:
    """One file, in which a tied weight stands once."""
    tensors = weights_of(reader, options.dtype)
    return lambda path: write_file(path, tensors, reader.read_whole, {}, options.advance)


def read_header(path: Path) -> dict[str, safetensors.Stored]:
    """The tensors of a safetensors file, a plain file. Raises `CheckpointError`."""
    try:
        with store_of(path).open(path) as source:
            return safetensors.read_header(source)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: expected a safetensors file, found: {error}") from None


def read_tensor(path: Path, stored: safetensors.Stored) -> Tensor:
    """Its bytes, in one allocation of their size. Raises `CheckpointError`."""
    tensor = torch.empty(stored.entry.shape, dtype=getattr(torch, stored.entry.dtype))
    try:
        with store_of(path).open(path) as source:
            source.read_into(stored.start, safetensors.bytes_of(tensor))
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return tensor
