"""Hashes of large files, remembered, so that a corpus isn't read whole at every start by every process.

A memo is a small file named by what the file system says of the files: real path, inode, size, time of the last
change of the content (mtime) and of anything (ctime). What changes a file changes one of these, as long as the change
and the hash don't fall into one tick of the clock: so a file that is younger than `settled_s` when it is hashed isn't
remembered, as git's index does it (its "racy" entries). What goes unnoticed is a change that the file system doesn't
tell: one that leaves all five as they were.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from portable_fsdp.runtime.files import write_text_atomically

SETTLED_S = 10.0
"""FAT keeps times to 2 seconds, and the clock of a file server is seconds off."""

Remember = Callable[[str, Callable[[], str]], str]
"""`remember(what, make)`: what `make()` gives, perhaps without calling it; see `remembered`."""


def remembered(
    folder: Path,
    files: Sequence[Path],
    what: str,
    make: Callable[[], str],
    *,
    settled_s: float = SETTLED_S,
    clock: Callable[[], int] = time.time_ns,
) -> str:
    """`make()`, a hash that follows from `what` and the bytes of `files` and nothing else, or its memo in `folder`.

    Any number of processes may call it at once: each finds a whole memo or makes its own. A damaged one is none, and
    where `folder` can't be written to nothing is remembered. Raises OSError for a file that isn't there.
    """
    now = clock()
    told = [(os.path.realpath(path), os.stat(path)) for path in files]
    facts = [(path, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for path, one in told]
    memo = folder / xxhash.xxh3_128_hexdigest(json.dumps([what, facts]).encode())
    found = _read(memo)
    if found is not None:
        return found
    made = make()
    newest = max((max(one.st_mtime_ns, one.st_ctime_ns) for _, one in told), default=0)
    if newest < now - settled_s * 1e9:
        _write(memo, made)
    return made


def _read(memo: Path) -> str | None:
    try:
        made, _, check = memo.read_text(encoding="utf-8").partition(" ")
    except (OSError, UnicodeDecodeError):
        return None
    return made if check == _check(memo, made) else None


def _write(memo: Path, made: str) -> None:
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(memo, f"{made} {_check(memo, made)}")
    except OSError:
        return  # the next start hashes again


def _check(memo: Path, made: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{memo.name} {made}".encode())
