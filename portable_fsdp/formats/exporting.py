"""An export: our checkpoint in another format, under a new name or in place of an earlier export.

An unfinished export has a hidden name of its own beside the target, so that two exports at once never share a folder. A
killed export leaves it. We can't tell it from one that is still running, so we warn and leave it.
"""

import glob
import json
import logging
import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from portable_fsdp.backends.contract import Backend
from portable_fsdp.checkpoint.commit import cause_of
from portable_fsdp.checkpoint.manifests import Evaluated, Manifest, best_checkpoint
from portable_fsdp.checkpoint.storage import part_of
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.config.schema import Config
from portable_fsdp.data.tokenize import Tokenizer
from portable_fsdp.formats import EXPORTS
from portable_fsdp.formats.base import ExportOptions, load_format
from portable_fsdp.models.tensor_files import MARK, hashes_of
from portable_fsdp.runtime.collective_errors import on_process_0
from portable_fsdp.runtime.errors import CheckpointError, TrainingError
from portable_fsdp.runtime.files import parse_json, read_inside, sync_folder, write_text_atomically

log = logging.getLogger("portable_fsdp")

_UNIQUE = 8  # letters in the name of an unfinished export


def export_checkpoint(checkpoint: Path, name: str, target: Path, options: ExportOptions) -> None:
    """Export the folder `checkpoint` to `target`, in a format of `EXPORTS`. For one process.

    Hashes the files that it needs first. Replaces an older export in `target` once the new one is complete. Raises
    `CheckpointError`: a damaged checkpoint, other files in `target`.
    """
    is_file = name == "safetensors"
    (require_new if is_file else require_replaceable)(target)
    with Reader(checkpoint, options.model) as reader:
        write = load_format(name).export(reader, options)
        reader.verify(folder=EXPORTS[name], advance=options.advance)
        with new_file(target) if is_file else new_folder(target, reader.manifest) as unfinished:
            write(unfinished)
            if options.save_tokenizer is not None and not is_file:
                options.save_tokenizer(unfinished)


def require_replaceable(folder: Path) -> None:
    """Refuse a link, the working directory, and a folder with other files than our export. Raises `CheckpointError`."""

    def refuse(problem: str) -> NoReturn:
        raise CheckpointError(f"export to {folder}: {problem}")

    if folder.is_symlink():
        refuse(f"it is a link to {folder.readlink()}, which the export would replace.\n  Name the target itself.")
    if Path(os.path.realpath(folder)) in (Path.cwd(), *Path.cwd().parents):
        refuse("it is the working directory or one above it.\n  Name a new folder inside it.")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        exported: Any = parse_json(read_inside(folder / MARK, folder))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        exported = None
    if not isinstance(exported, list):
        refuse(f"it exists and is not an earlier export (whose {MARK} lists its files).\n  Name another folder.")
    if others := [name for name in _names(folder) if name not in exported]:
        refuse(f"{others[0]} is not a file of the earlier export (listed in {MARK}).\n  Move it elsewhere.")


def require_new(file: Path) -> None:
    """Refuse an existing `file`: a file has no mark that it is ours. Raises `CheckpointError`."""
    if file.exists() or file.is_symlink():
        raise CheckpointError(f"export to {file}: it already exists. Name another file.")


@contextmanager
def new_file(file: Path) -> Generator[Path]:
    """Yield a temporary name to write to. It becomes `file` atomically, or is deleted after an error."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _hidden(file)
    try:
        yield unfinished
        with unfinished.open("rb") as content:
            os.fsync(content.fileno())
        try:
            os.link(unfinished, file)  # unlike a rename it replaces nothing
        except OSError:  # `file` exists by now, or the file system has no links
            require_new(file)
            unfinished.rename(file)
    finally:
        for path in (unfinished, part_of(unfinished)):
            path.unlink(missing_ok=True)
    sync_folder(file.parent)


@contextmanager
def new_folder(folder: Path, manifest: Manifest) -> Generator[Path]:
    """Yield a temporary folder to write to. It replaces `folder` when the block ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _hidden(folder)
    unfinished.mkdir()
    try:
        yield unfinished
        by, files = manifest.written_by.model_dump(), _names(unfinished)
        source: dict[str, Any] = {"step": manifest.step, "written_by": by, "files": [*files, MARK]}
        source["hashes"] = hashes_of(unfinished, files)
        write_text_atomically(unfinished / MARK, json.dumps(source, indent=2) + "\n")
        require_replaceable(folder)
        _replace(folder, unfinished)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _names(folder: Path) -> list[str]:
    """List all files, including links, by their path inside the folder."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _hidden(target: Path) -> Path:
    """Return a unique name beside the target. Warns of existing files with such names."""
    for kind in ("unfinished", "replaced"):
        for left in sorted(target.parent.glob(f".{glob.escape(target.name)}.{'?' * _UNIQUE}.{kind}*")):
            log.warning("%s: left by a killed export, or in use by a running one. Delete it if none is running.", left)
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:_UNIQUE]}.unfinished")


def _replace(folder: Path, new: Path) -> None:
    """Replace `folder` with `new`. A kill in between leaves both, one of them under a hidden name."""
    sync_folder(new)
    old = new.with_suffix(".replaced")
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


# ------------------------------------------------------------------------------------------ checkpoint.export of a run


def require_room(config: Config) -> None:
    """Check that the export's folder is new, empty or an earlier export. Raises `CheckpointError`."""
    require_replaceable(_folder(config))


def export_run(
    config: Config, backend: Backend, tokenizer: Tokenizer | None, newest: Path, history: Evaluated | None
) -> None:
    """Export the best checkpoint by its evaluation, the newest without evaluations. *collective*"""
    folder = _folder(config)
    kind = "peft" if config.model.lora is not None and not config.checkpoint.merge_adapters else "huggingface"

    def export() -> None:
        checkpoint, reason = best_checkpoint(newest, history)
        # The base may have moved since the checkpoint was saved.
        save = tokenizer.save if tokenizer else None
        options = ExportOptions(save_tokenizer=save, base=config.model.pretrained)
        export_checkpoint(checkpoint, kind, folder, options)
        log.info("exported %s%s to %s", checkpoint, reason, folder)

    def as_error(error: Exception) -> TrainingError:
        again = f"python -m portable_fsdp.checkpoint export {newest.parent} FOLDER{' --format peft' * (kind == 'peft')}"
        reason = f"{error}{cause_of(error, folder.parent)}"
        return TrainingError(f"checkpoint.export: {reason}\n  The run itself is saved. To export it: {again}")

    on_process_0(backend, export, as_error)  # no process continues before the folder is complete


def _folder(config: Config) -> Path:
    return Path(config.run.dir) / "export"
