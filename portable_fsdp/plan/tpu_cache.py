"""What the TPU compiler wrote, kept by the content of all its inputs; a damaged entry counts as none.

One zip file an entry, whose checksums are compared when it is read. It is written beside its name and renamed.
"""

import contextlib
import hashlib
import os
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

LARGEST_BYTES = 2**30  # of all entries: 8B, unrolled, takes about 5 MB


def key_of(*parts: bytes) -> str:
    """The name of an entry: equal for equal parts, and only for those."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


def load(folder: Path, key: str) -> dict[str, str] | None:
    """Name -> text of an entry; None where there is no undamaged one."""
    path = folder / f"{key}.zip"
    try:
        with zipfile.ZipFile(path) as entry:
            texts = {name: entry.read(name).decode() for name in entry.namelist()}
        os.utime(path)  # the longest unused go first
    except (OSError, zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, zlib.error):
        return None
    return texts


def save(folder: Path, key: str, texts: Mapping[str, str], largest_bytes: int = LARGEST_BYTES) -> None:
    """Keep an entry, and delete the longest unused ones beyond `largest_bytes`; nothing where folder isn't writable."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=folder, suffix=".tmp")
        temporary = Path(name)
        try:
            with (
                os.fdopen(descriptor, "wb") as file,
                zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as entry,
            ):
                for title, text in texts.items():
                    entry.writestr(title, text)
            temporary.replace(folder / f"{key}.zip")
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        used = 0
        entries = [(path.stat(), path) for path in folder.glob("*.zip")]
        for stat, path in sorted(entries, key=lambda pair: -pair[0].st_mtime_ns):
            used += stat.st_size
            if used > largest_bytes:
                path.unlink(missing_ok=True)
