"""Look at a checkpoint, verify it, or export it: `python -m portable_fsdp.checkpoint show|verify|export PATH`.

PATH is a checkpoint's folder, or a run's folder, which stands for its newest checkpoint.
"""

import argparse
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import yaml

from portable_fsdp.checkpoint.format import (
    DTYPE_BYTES,
    FOLDERS,
    MANIFEST,
    Manifest,
    TensorEntry,
    committed_steps,
    describe,
    folder_of,
    read_manifest,
)
from portable_fsdp.runtime.errors import EXIT_FINISHED, CheckpointError, PortableFSDPError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (`runtime/errors.py`)."""
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], None] = options.command
    try:
        command(options)
    except PortableFSDPError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return EXIT_FINISHED


def resolve(path: Path) -> Path:
    """A checkpoint's folder, from itself or from its run's. Raises `CheckpointError`."""
    if (path / MANIFEST).exists():
        return path.resolve()
    for folder in (path / "checkpoints", path):
        committed = committed_steps(folder)
        if committed:
            return committed[0].resolve()
    raise CheckpointError(f"{path}: expected a checkpoint (step-00000500) or a run's folder with one, found none")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m portable_fsdp.checkpoint", description=(__doc__ or "").strip())
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="step, shapes, and who wrote it")
    show.add_argument("--config", action="store_true", help="print the config of the run that saved it, as YAML")
    verify = commands.add_parser("verify", help="hash every file and compare it with the manifest")
    export = commands.add_parser("export", help="write a folder that transformers' from_pretrained opens")
    for command, run in ((show, _show), (verify, _verify), (export, _export)):
        command.add_argument("path", type=Path, metavar="PATH", help="a checkpoint's folder, or a run's (its newest)")
        command.set_defaults(command=run)
    export.add_argument("folder", type=Path, metavar="FOLDER", help="new, empty, or an earlier export")
    return parser


def _show(options: argparse.Namespace) -> None:
    path = resolve(options.path)
    manifest = read_manifest(path)
    print(yaml.safe_dump(manifest.config, sort_keys=False).rstrip() if options.config else _summary(path, manifest))


def _verify(options: argparse.Namespace) -> None:
    # Torch takes a second to import, which `--help` and `show` do without.
    from portable_fsdp.backends.base import Part
    from portable_fsdp.checkpoint.store import Reader

    path = resolve(options.path)
    with Reader(path) as reader:
        reader.verify(Part(0, 1))
        files = reader.manifest.files
    print(f"{path}: whole: {len(files)} files, {_size(sum(file.bytes for file in files.values()))}")


def _export(options: argparse.Namespace) -> None:
    # Torch and transformers take seconds to import, which `--help` and `show` do without.
    from portable_fsdp.checkpoint.foreign.huggingface import export_huggingface
    from portable_fsdp.data.tokenize import load_tokenizer

    path = resolve(options.path)
    name = read_manifest(path).config.get("data", {}).get("tokenizer")
    try:
        export_huggingface(path, options.folder, None if name is None else load_tokenizer(name).save)
    except OSError as error:
        raise CheckpointError(f"export to {options.folder}: can't be written: {error}") from error
    print(f"{path}: exported to {options.folder}")


def _summary(path: Path, manifest: Manifest) -> str:
    by = manifest.written_by
    lines = [
        f"checkpoint  {path}",
        f"step        {manifest.step} (data: epoch {manifest.data.epoch}, position {manifest.data.position})",
        f"written by  portable_fsdp {by.portable_fsdp}, torch {by.torch}, backend {by.backend} on {by.device}, "
        f"{by.process_count} process{'es' if by.process_count > 1 else ''}",
    ]
    for folder in FOLDERS:
        tensors = {key: tensor for key, tensor in manifest.tensors.items() if folder_of(key) == folder}
        count = sum(math.prod(tensor.shape) for tensor in tensors.values())
        size = sum(math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] for tensor in tensors.values())
        files = sum(file.startswith(folder) for file in manifest.files)
        lines.append(f"{folder:<12}{len(tensors)} tensors, {count:,} elements, {_size(size)} in {files} files")
        lines.extend(f"  {line}" for line in _shapes(tensors.items()))
    return "\n".join(lines)


def _shapes(tensors: Iterable[tuple[str, TensorEntry]]) -> list[str]:
    """One line for the tensors of all layers that share name and shape: `layers.*.norm.weight  float32 [8]  x 2`."""
    alike = Counter((re.sub(r"\.\d+\.", ".*.", key), describe(tensor)) for key, tensor in tensors)
    return [f"{name}  {text}" + (f"  x {count}" if count > 1 else "") for (name, text), count in alike.items()]


def _size(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
