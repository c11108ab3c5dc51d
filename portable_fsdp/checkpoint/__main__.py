"""List, show, verify, compare or convert checkpoints: `python -m portable_fsdp.checkpoint COMMAND PATH`.

PATH is the folder or URL of a checkpoint, or of a run, which means its newest checkpoint; `export` uses the best by its
evaluations, as the run does. `--json` prints one object for scripts. Exit code: 0; 1 where `diff` finds a
difference; 2 for a usage error or a checkpoint that can't be read; 130 for Ctrl-C; 141 for a closed pipe (`| head`).
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from portable_fsdp.checkpoint import commit, manifests, report
from portable_fsdp.checkpoint.manifests import Manifest, read_manifest
from portable_fsdp.checkpoint.storage import MANIFEST, exists, locate, store_of
from portable_fsdp.formats import EXPORTS, FORMATS, OF_TRANSFORMERS
from portable_fsdp.runtime import errors
from portable_fsdp.runtime.command import CommandParser, to_stderr, to_stdout
from portable_fsdp.runtime.errors import CheckpointError, StoreError
from portable_fsdp.runtime.host import in_units

log = logging.getLogger("portable_fsdp")

# Commands import torch (a second) and transformers (seconds) inside: `--help`, `list` and `show` need neither.

_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (`runtime/errors.py`)."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser().parse_args(words)
        command: Callable[[argparse.Namespace], int | None] = options.command
        return command(options) or errors.EXIT_FINISHED
    except errors.PortableFSDPError as error:
        message, code = str(error), error.exit_code
    except KeyboardInterrupt:
        message, code = "interrupted", errors.EXIT_INTERRUPTED
    except Exception as error:
        urls, code = [word for word in words if "://" in word], errors.EXIT_USAGE
        if not urls and not isinstance(error, OSError):
            raise
        message = f"{words[0]}: {error}"
        if urls:  # a store's client raises errors of many classes: we treat all as its own, as `storage.py` does
            message = (
                f"{words[0]}: can't access {' and '.join(urls)}: {type(error).__name__}: {error}\n"
                "  Check the address, the credentials, and that the store is up. Its data may be intact."
            )
    to_stderr(message)
    return code


def resolve(path: Path) -> Path:
    """Return a checkpoint's folder, given that or its run's. Raises `CheckpointError`."""
    return (path if exists(path / MANIFEST) else checkpoints_in(path)[0]).resolve()


def checkpoints_in(path: Path) -> list[Path]:
    """List a run's checkpoints, newest first, from its folder or its `checkpoints/`. Raises `CheckpointError`."""
    if checkpoints := manifests.checkpoints_below(path):
        return checkpoints
    raise CheckpointError(f"{path}: no checkpoint; name a checkpoint (step-00000500) or a run's folder with one")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("checkpoint", __doc__ or "")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int | None], help: str) -> Callable[..., argparse.Action]:
        command = commands.add_parser(name, help=help, description=help)
        command.add_argument("--json", action="store_true", help="print one JSON object (list: an array) for scripts")
        command.set_defaults(command=run)
        return command.add_argument

    path: dict[str, Any] = {"type": locate, "help": "a checkpoint's folder, or a run's (its newest)"}
    run: dict[str, Any] = {"type": locate, "metavar": "RUN", "help": "a run's folder, or its checkpoints/"}
    dtype: dict[str, Any] = {"choices": _DTYPES, "help": "dtype of the model's floating-point tensors; default: same"}
    add("list", _list, "the checkpoints of a run, newest first")("path", **run)
    show = add("show", _show, "step, shapes, and the versions and engine that wrote it")
    show("path", metavar="PATH", **path)
    show("--config", action="store_true", help="print the config of the run that saved it, as YAML")
    verify = add("verify", _verify, "hash every file and compare it with the manifest")
    verify("path", metavar="PATH", **path)
    verify("--all", action="store_true", help="verify all checkpoints of the run, not only its newest")
    diff = add("diff", _diff, "compare two: tensors' names, shapes and dtypes, configs; exit code 1 if they differ")
    diff("a", metavar="A", **path)
    diff("b", metavar="B", **path)
    export = add("export", _export, "write a checkpoint in another format")
    export("path", type=locate, metavar="PATH", help="a checkpoint's folder, or a run's (its best)")
    target_help = "a local folder (new, empty, or an earlier export), or a new file"
    export("target", type=_local, metavar="TARGET", help=target_help)
    export("--format", choices=EXPORTS, default="huggingface", help="adapters: peft alone, huggingface merged")
    export("--dtype", **dtype)
    tokenizer_help = "huggingface, peft: the tokenizer's folder, or none; default: that of the run's config"
    export("--tokenizer", type=lambda text: str(_local(text)), metavar="PATH|none", help=tokenizer_help)
    base_help = "huggingface, adapters: their base model, if the run's model.pretrained has moved"
    export("--base", metavar="PATH", help=base_help)
    imports = add("import", _import, "make a checkpoint from a model in another format")
    imports("source", type=_local, metavar="SOURCE", help="a local file or a folder in another format")
    imports("folder", **run)
    imports("--format", choices=("auto", *FORMATS), default="auto")
    imports("--config", type=_local, metavar="PATH", help="the model's config.json or its folder, if SOURCE lacks it")
    imports("--dtype", **dtype)
    trust_help = "read pickled metadata (dcp), as data: names that aren't torch's metadata are refused"
    imports("--trust_metadata", action="store_true", help=trust_help)
    return parser


def _local(text: str) -> Path:
    """Parse a local path: the libraries of other formats know local files only."""
    if "://" in text:
        raise CheckpointError(
            f"{text}: expected a local path, found a URL: object stores hold only our own checkpoints.\n"
            "  Convert to or from a local folder, and copy it with the store's tool (aws s3 cp, gcloud storage cp)."
        )
    return Path(text)


def _print(options: argparse.Namespace, data: Any, text: str) -> None:
    to_stdout(json.dumps(data) if options.json else text)


def _list(options: argparse.Namespace) -> None:
    rows = report.listing(checkpoints_in(options.path))
    _print(options, rows, report.listing_text(rows))


def _show(options: argparse.Namespace) -> None:
    path = resolve(options.path)
    manifest = read_manifest(path)
    if options.config:
        _print(options, manifest.config, yaml.safe_dump(manifest.config, sort_keys=False).rstrip())
    else:
        _print(options, report.facts(path, manifest), report.summary(path, manifest))


def _verify(options: argparse.Namespace) -> None:
    paths = [path.resolve() for path in checkpoints_in(options.path)] if options.all else [resolve(options.path)]
    from portable_fsdp.checkpoint.store import Reader

    result: dict[str, list[Any]] = {"whole": [], "damaged": []}
    for path in paths:
        try:
            with Reader(path) as reader, _progress(f"verify {path.name}", reader.manifest.bytes) as advance:
                reader.verify(advance=advance)
            files = reader.manifest.files
            result["whole"].append({"path": str(path), "files": len(files), "bytes": reader.manifest.bytes})
        except StoreError:
            raise
        except CheckpointError as error:
            if store_of(path).is_committed(path):  # else the run's retention deleted it meanwhile
                result["damaged"].append(str(error))
    lines = [f"{row['path']}: whole: {row['files']} files, {in_units(row['bytes'])}" for row in result["whole"]]
    if lines or options.json:
        _print(options, result, "\n".join(lines))
    if result["damaged"] or not result["whole"]:
        raise CheckpointError("\n".join(result["damaged"]) or f"verify {options.path}: deleted meanwhile")


def _diff(options: argparse.Namespace) -> int:
    differences = report.differences(*(read_manifest(resolve(path)) for path in (options.a, options.b)))
    _print(options, differences, report.differences_text(differences))
    return errors.EXIT_FINISHED if differences["is_equal"] else errors.EXIT_FAILED


def _export(options: argparse.Namespace) -> None:
    newest = resolve(options.path)
    is_run = newest != options.path.resolve()
    path, reason = manifests.best_checkpoint(newest, read_manifest(newest).evaluation if is_run else None)
    from portable_fsdp.formats.base import ExportOptions
    from portable_fsdp.formats.exporting import export_checkpoint

    manifest = read_manifest(path)
    _require_format(options, manifest)
    save_tokenizer = _tokenizer(options, manifest)
    size = sum(file.bytes for file in manifest.files if file.name.startswith(EXPORTS[options.format]))
    try:
        with _progress(f"export {path.name}", 2 * size) as advance:
            settings = ExportOptions(options.dtype, save_tokenizer, advance, options.base)
            export_checkpoint(path, options.format, options.target, settings)
    except OSError as error:
        cause = f"{error}{commit.cause_of(error, options.target.parent)}"
        raise CheckpointError(f"export to {options.target}: can't be written: {cause}") from error
    data = {"checkpoint": str(path), "target": str(options.target), "format": options.format}
    _print(options, data, f"{path}{reason}: exported to {options.target}")


def _require_format(options: argparse.Namespace, manifest: Manifest) -> None:
    """Refuse a format that can't hold the tokenizer, or adapters without their base. Raises `CheckpointError`."""
    if options.base is not None and options.format != "huggingface":
        raise CheckpointError(f"--base {options.base}: expected --format huggingface, found {options.format}")
    if options.format in OF_TRANSFORMERS:
        return
    if options.tokenizer not in (None, "none"):
        raise CheckpointError(
            f"--tokenizer {options.tokenizer}: expected --format huggingface or peft, found {options.format}"
        )
    if manifest.base is not None:
        raise CheckpointError(
            f"--format {options.format}: the checkpoint leaves out the base model of its adapters: {manifest.base}.\n"
            "  Use --format huggingface, which merges the adapters, or peft."
        )


def _tokenizer(options: argparse.Namespace, manifest: Manifest) -> Callable[[Path], None] | None:
    """Return the function that writes the model's tokenizer; None if it has none, or the format no place."""
    from portable_fsdp.data.tokenize import load_tokenizer

    if options.format not in OF_TRANSFORMERS:
        return None
    data = manifest.config.get("data", {})
    if options.tokenizer is None and data.get("factory"):  # its rows are the user's own
        return None
    name = options.tokenizer or data.get("tokenizer") or "none"
    if not options.tokenizer and name == "none":
        log.warning("exporting without a tokenizer: the imported checkpoint names none. Use --tokenizer PATH.")
    if name == "none":
        return None
    try:
        model = manifest.config.get("model", {})
        return load_tokenizer(name, model.get("pretrained"), model.get("gguf_file")).save
    except errors.DataError as error:
        raise CheckpointError(
            f"{error}\n  Use --tokenizer PATH (a folder, or bytes), or --tokenizer none to export without one."
        ) from None


def _import(options: argparse.Namespace) -> None:
    if not options.source.exists():  # before torch is imported
        raise CheckpointError(f"import {options.source}: no such file or folder")
    from portable_fsdp.formats.importing import import_checkpoint

    settings = {name: getattr(options, name) for name in ("config", "dtype", "trust_metadata")}
    try:
        with _progress(f"import {options.source.name}", None) as advance:
            path = import_checkpoint(options.source, options.folder, options.format, advance=advance, **settings)
    except OSError as error:
        raise CheckpointError(f"import {options.source}: can't be read: {error}") from error
    data = report.facts(path, read_manifest(path))
    _print(options, data, f"{path}: imported {data['model']['tensors']} tensors, {in_units(data['bytes'])}")


@contextmanager
def _progress(name: str, total: int | None) -> Generator[Callable[[int], object]]:
    """Show a progress bar on stderr, if that is a terminal; the caller reports bytes."""
    from tqdm import tqdm

    hidden = not sys.stderr.isatty()
    with tqdm(desc=name, total=total, unit="B", unit_scale=True, leave=False, file=sys.stderr, disable=hidden) as bar:
        yield bar.update


if __name__ == "__main__":
    sys.exit(main())
