"""GGUF files (llama.cpp), for import: read by `models/gguf.py`, which says what it takes."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from portable_fsdp.checkpoint.format import TensorEntry
from portable_fsdp.checkpoint.storage import require_regular
from portable_fsdp.formats.base import ForeignCheckpoint
from portable_fsdp.formats.names import import_transformers
from portable_fsdp.formats.streams import check_shape
from portable_fsdp.models.architecture import config_to_json
from portable_fsdp.models.gguf import GgufFile, is_gguf
from portable_fsdp.runtime.errors import CheckpointError, ConfigError


def matches(path: Path) -> bool:
    """By its first four bytes."""
    return is_gguf(path)


@contextmanager
def open_checkpoint(path: Path, *, trust_metadata: bool) -> Generator[ForeignCheckpoint]:
    """The model in float32 (`--dtype` converts it further), and the config that transformers reads from the file.

    Holds one tensor, dequantised, and a copy of it where it must be permuted; the file is mapped. Raises
    `CheckpointError`.
    """
    require_regular(path, path.name)
    import_transformers()
    try:
        file = GgufFile(path)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    entries = {
        key: TensorEntry(shape=check_shape(f"{path}: {file.file_of(key)}", list(shape)), dtype="float32")
        for key, shape in file.shapes.items()
    }
    yield ForeignCheckpoint(entries, lambda key: _read(file, key), 0, config_to_json(file.config))


def _read(file: GgufFile, key: str) -> Tensor:
    try:
        return file.read(key, ())
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
