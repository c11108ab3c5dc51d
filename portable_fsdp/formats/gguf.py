"""GGUF files (llama.cpp), import only: `models/tensor_files.py` reads them, and says which."""

from pathlib import Path

from torch import Tensor

from portable_fsdp.checkpoint.format import TensorEntry
from portable_fsdp.checkpoint.storage import require_regular
from portable_fsdp.formats.base import ForeignCheckpoint, check_shape
from portable_fsdp.models.architecture import config_to_json
from portable_fsdp.models.tensor_files import GgufFile, is_gguf
from portable_fsdp.runtime.errors import CheckpointError, ConfigError
from portable_fsdp.runtime.hub import import_transformers

matches = is_gguf


def open_checkpoint(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
    """The model in float32 (`--dtype` converts it further), and the config that transformers reads from the file.

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

    shapes = {key: check_shape(f"{path}: {file.file_of(key)}", list(shape)) for key, shape in file.shapes.items()}
    entries = {key: TensorEntry(shape=shape, dtype="float32") for key, shape in shapes.items()}
    return ForeignCheckpoint(entries, read, 0, config_to_json(file.config))
