"""An export: our checkpoint in another format, under a new name or in place of an earlier export.

An unfinished export has a hidden name of its own beside the target, so that two exports at once never share a folder. A
killed one leaves it. We can't tell it from one that is still at work, so we warn and leave it.
"""

import glob
import json
import logging
import os
import shutil
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from portable_fsdp.checkpoint.format import Manifest, run_name
from portable_fsdp.checkpoint.storage import part_of
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.formats import EXPORTS, OF_TRANSFORMERS, SINGLE_FILE
from portable_fsdp.formats.base import ExportOptions, load_format
from portable_fsdp.models.tensor_files import MARK, hashes_of
from portable_fsdp.runtime.errors import CheckpointError, printable
from portable_fsdp.runtime.files import parse_json, read_regular, sync_folder, write_text_atomically
from portable_fsdp.runtime.hub import is_hub_id

log = logging.getLogger("portable_fsdp")

_UNIQUE = 8  # letters in the name of an unfinished export


def export_checkpoint(checkpoint: Path, name: str, target: Path, options: ExportOptions) -> None:
    """Write the checkpoint in a folder as `target`, in a format of `EXPORTS`. For one process.

    Hashes the files that it needs first. Replaces an older export in `target` once the new one is complete. Raises
    `CheckpointError`: a damaged checkpoint, something else in `target`.
    """
    is_file = name in SINGLE_FILE
    (require_new if is_file else require_replaceable)(target)
    with Reader(checkpoint) as reader:
        write = load_format(name).export(reader, options)
        reader.verify(folder=EXPORTS[name], advance=options.advance)
        with new_file(target) if is_file else new_folder(target, reader.manifest) as unfinished:
            write(unfinished)
            if options.save_tokenizer is not None and not is_file:
                options.save_tokenizer(unfinished)
            if name in OF_TRANSFORMERS:
                _write_card(unfinished, reader.manifest, OF_TRANSFORMERS[name])


def require_replaceable(folder: Path) -> None:
    """Raises `CheckpointError` for a link, the working folder, and a folder that isn't an export of ours alone."""

    def problems() -> Iterator[str]:
        if folder.is_symlink():
            yield (
                f"expected a folder, found a link to {folder.readlink()}: the export would replace the link,\n"
                "  not its target. Name that folder itself."
            )
        if Path(os.path.realpath(folder)) in (Path.cwd(), *Path.cwd().parents):
            yield (
                "expected a folder that can be replaced as a whole, found the one that you are in,\n"
                "  or one above it. Name a new one inside it."
            )
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return
        if not (folder / MARK).is_file():
            yield (
                f"expected a new name, an empty folder or an earlier export (with {MARK}),\n"
                "  found something else, which is left alone. Name another folder."
            )
        exported = _exported(folder)
        if exported is None:
            yield (
                f"expected the names of an earlier export's files in {MARK}, found none: files\n"
                "  that were added since can't be told from them. Delete the folder, or name another."
            )
        for other in (name for name in _names(folder) if name not in (exported or ())):
            yield (
                f"expected the files of an earlier export (listed in {MARK}), found {other} too,\n"
                "  which would be lost. Move it elsewhere, or name another folder."
            )

    for problem in problems():
        raise CheckpointError(f"export to {folder}: {problem}")


def require_new(file: Path) -> None:
    """Raises `CheckpointError` where something lies at `file`: a file has no mark that it is ours."""
    if file.exists() or file.is_symlink():
        raise CheckpointError(f"export to {file}: expected a new name, found something there. Name another file.")


@contextmanager
def new_file(file: Path) -> Generator[Path]:
    """A temporary name to write to. It becomes `file` at one instant, or vanishes after an error."""
    require_new(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _hidden(file)
    try:
        yield unfinished
        with unfinished.open("rb") as content:
            os.fsync(content.fileno())
        try:
            os.link(unfinished, file)  # unlike a rename it replaces nothing
        except OSError:  # `file` is there by now, or the file system has no links
            require_new(file)
            unfinished.rename(file)
    finally:
        for path in (unfinished, part_of(unfinished)):
            path.unlink(missing_ok=True)
    sync_folder(file.parent)


@contextmanager
def new_folder(folder: Path, manifest: Manifest) -> Generator[Path]:
    """A temporary folder to write to. It replaces `folder` when the block ends without an error."""
    require_replaceable(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _hidden(folder)
    unfinished.mkdir()
    try:
        yield unfinished
        by, files = manifest.written_by.model_dump(), _names(unfinished)
        hashes = hashes_of(unfinished, files)
        source = {"step": manifest.step, "written_by": by, "files": [*files, MARK], "hashes": hashes}
        write_text_atomically(unfinished / MARK, json.dumps(source, indent=2) + "\n")
        require_replaceable(folder)
        _replace(folder, unfinished)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _exported(folder: Path) -> set[str] | None:
    """The files of an export, by its mark; None where it is unreadable."""
    try:
        files = parse_json(read_regular(folder / MARK, folder))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return {str(name) for name in files} if isinstance(files, list) else None


def _names(folder: Path) -> list[str]:
    """All files, links among them, by their path inside the folder."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _hidden(target: Path) -> Path:
    """A unique name beside the target. Warns of what lies under such names."""
    for kind in ("unfinished", "replaced"):
        for left in sorted(target.parent.glob(f".{glob.escape(target.name)}.{'?' * _UNIQUE}.{kind}*")):
            log.warning("%s: a killed export left it, or one is at work. Delete it if none is.", left)
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


def _write_card(folder: Path, manifest: Manifest, library: str) -> None:
    """Write README.md, for the `library` that opens the folder: its base, and what was trained on what.

    Names no local folder and no host. Names in a checkpoint are untrusted: each value stands in a code span.
    """
    front: dict[str, Any] = {"library_name": library if manifest.architecture else "pytorch", "tags": ["portable_fsdp"]}
    data, evaluation, by = manifest.config.get("data", {}), manifest.evaluation, manifest.written_by
    pretrained = str(manifest.config.get("model", {}).get("pretrained") or "")
    if is_hub_id(pretrained):
        front["base_model"] = pretrained.partition("@")[0]
    sources = [
        f"{source.get('source') or ''} {_public(str(source.get('path') or ''))}".strip()
        for source in data.get("mixture") or [data]
    ]
    rows = {
        "model": str((manifest.architecture or {}).get("model_type", "")),
        "fine-tuned from": _public(pretrained),
        "data": data.get("factory") or ", ".join(sources),
        "checkpoint": f"step {manifest.step:,}",
        "eval loss at its save": f"{evaluation.loss:.4f} (step {evaluation.step})" if evaluation else "",
        "saved by": f"{by.backend} on {by.device}, torch {by.torch}, portable_fsdp {by.portable_fsdp}",
    }
    lines = [f"- {name}: {_code(value)}" for name, value in rows.items() if value]
    title = f"# {_code(run_name(manifest.config) or 'model')}"
    text = "\n".join([f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n{title}\n", *lines])
    (folder / "README.md").write_text(f"{text}\n", encoding="utf-8")


def _public(name: str) -> str:
    return name if is_hub_id(name) else Path(name).name


def _code(text: str) -> str:
    """A code span, in which nothing is Markdown or HTML."""
    return "`" + " ".join(printable(text).split()).replace("`", "'") + "`"
