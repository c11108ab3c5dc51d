"""Whether the files of a checkpoint are still what its manifest says. No torch here."""

from pathlib import Path

import xxhash

from portable_fsdp.checkpoint.format import FileEntry
from portable_fsdp.checkpoint.storage import FileReader, require_regular
from portable_fsdp.runtime.errors import CheckpointError


def hash_file(path: Path, name: str) -> FileEntry:
    """Length and hash of what `path` holds now, under the name that it has in its checkpoint. Raises OSError."""
    digest = xxhash.xxh3_128()
    with FileReader(path) as source:
        buffer = memoryview(bytearray(source.chunk_bytes))
        for start in range(0, source.size, len(buffer)):
            chunk = buffer[: source.size - start]
            source.read_into(start, chunk)
            digest.update(chunk)
        return FileEntry(name=name, bytes=source.size, xxh3_128=digest.hexdigest())


def verify_size(folder: Path, file: FileEntry) -> None:
    """Raises CheckpointError unless it is there, a plain file, with its length."""
    found = require_regular(folder / file.name, folder.name)
    if found != file.bytes:
        raise damaged(folder, file.name, f"{file.bytes} bytes", f"{found} bytes")


def verify_hash(folder: Path, file: FileEntry) -> None:
    """Raises CheckpointError unless it has its length and its hash."""
    try:
        found = hash_file(folder / file.name, file.name)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder.name}: {file.name}: {error}") from None
    if found != file:
        raise damaged(folder, file.name, f"content with xxh3_128 {file.xxh3_128}", found.xxh3_128)


def damaged(folder: Path, file: str, expected: str, found: str) -> CheckpointError:
    """The error for a file of a checkpoint that was whole once."""
    return CheckpointError(
        f"checkpoint {folder.name}: {file}: expected {expected}, found {found}.\n"
        "  The file was altered or cut after the save: copy it again from where it was whole,\n"
        "  or take an older checkpoint."
    )
