"""One safetensors file that holds the whole model: {FQN: tensor}."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from portable_fsdp.checkpoint.storage import require_regular
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.formats.base import (
    Advance,
    ForeignCheckpoint,
    SaveTokenizer,
    as_dtype,
    say_nothing,
    tensors_of,
    verify,
)
from portable_fsdp.formats.streams import read_header, read_tensor, write_file
from portable_fsdp.formats.target import new_file, require_new


def matches(path: Path) -> bool:
    """By its name."""
    return path.is_file() and path.suffix == ".safetensors"


@contextmanager
def open_checkpoint(path: Path, *, trust_metadata: bool) -> Generator[ForeignCheckpoint]:
    """Holds one tensor. Raises `CheckpointError`."""
    require_regular(path, path.name)
    stored = read_header(path)
    yield ForeignCheckpoint({key: s.entry for key, s in stored.items()}, lambda key: read_tensor(stored[key]))


def export(
    reader: Reader,
    target: Path,
    *,
    dtype: str | None = None,
    save_tokenizer: SaveTokenizer | None = None,
    advance: Advance = say_nothing,
) -> None:
    """Write a new file; a tied weight stands in it once. Holds one tensor as it was saved. Raises `CheckpointError`."""
    require_new(target)
    tensors = {key: as_dtype(tensor, dtype) for key, tensor in tensors_of(reader, "model").items()}
    verify(reader, advance, "model/")
    with new_file(target) as file:
        write_file(file, tensors, lambda key: reader.read_whole(key), {}, advance)
