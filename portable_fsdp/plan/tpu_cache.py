"""What the TPU compiler wrote, kept by the content of all its inputs; a damaged entry counts as none.

An entry is JSON in gzip, whose checksum is compared when it is read. It is written beside its name and renamed.
"""

import contextlib
import gzip
import hashlib
import json
import os
import tempfile
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
    path = folder / f"{key}.gz"
    try:
        texts = json.loads(gzip.decompress(path.read_bytes()))
        os.utime(path)  # the longest unused go first
    except (OSError, EOFError, ValueError, zlib.error):
        return None
    return texts


def save(folder: Path, key: str, texts: Mapping[str, str], largest_bytes: int = LARGEST_BYTES) -> None:
    """Keep an entry, and delete the longest unused ones beyond `largest_bytes`; nothing where folder isn't writable."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            entry = Path(temporary, key)
            entry.write_bytes(gzip.compress(json.dumps(texts).encode(), compresslevel=1))
            entry.replace(folder / f"{key}.gz")
        used = 0
        entries = [(path.stat(), path) for path in folder.iterdir() if path.is_file()]
        for stat, path in sorted(entries, key=lambda pair: -pair[0].st_mtime_ns):
            used += stat.st_size
            if used > largest_bytes:
                path.unlink(missing_ok=True)
