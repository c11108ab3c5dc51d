"""Where an export is written: a new name, an empty folder, or an earlier export, which gives way to a whole one."""

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from portable_fsdp.checkpoint.format import Manifest
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.files import sync_folder, write_text_atomically

MARK = "portable_fsdp.json"
"""In every exported folder: where it comes from. One without it is somebody else's, and is never replaced."""


def require_replaceable(folder: Path) -> None:
    """Raises `CheckpointError` where `folder` holds something that isn't an export."""
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_free and not (folder / MARK).is_file():
        raise CheckpointError(
            f"export to {folder}: expected a new name, an empty folder or an earlier export (with {MARK}),\n"
            "  found something else, which is left alone. Name another folder."
        )


def require_new(file: Path) -> None:
    """Raises `CheckpointError` where something lies at `file`: a file bears no mark that it is ours."""
    if file.exists() or file.is_symlink():
        raise CheckpointError(f"export to {file}: expected a new name, found something there. Name another file.")
    file.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def new_folder(folder: Path, manifest: Manifest) -> Generator[Path]:
    """A folder to write to, which takes the place of `folder` once the block ends without an error."""
    require_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    source: dict[str, Any] = {"step": manifest.step, "written_by": manifest.written_by.model_dump()}
    try:
        yield unfinished
        write_text_atomically(unfinished / MARK, json.dumps(source, indent=2) + "\n")
        _replace(folder, unfinished)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _replace(folder: Path, new: Path) -> None:
    """Put `new` in the place of `folder`. A kill in between leaves both, one of them under a hidden name."""
    sync_folder(new)
    old = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
