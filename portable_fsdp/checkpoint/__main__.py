"""List, show, verify, compare or convert checkpoints: `python -m portable_fsdp.checkpoint COMMAND PATH`.

PATH is the folder or URL of a checkpoint, or of a run, which means its newest checkpoint; `export` uses the best by its
evaluations, as the run does. `--json` prints one object for scripts. Exit code: 0; 1 where `diff` finds a
difference; 2 for a usage error or a checkpoint that can't be read; 130 for Ctrl-C; 141 for a closed pipe (`| head`).
"""

import argparse
import json
import logging
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from portable_fsdp.checkpoint import commit, manifests
from portable_fsdp.checkpoint.manifests import Manifest, read_manifest
from portable_fsdp.checkpoint.storage import FOLDERS, MANIFEST, exists, locate, store_of
from portable_fsdp.config.describe import changed
from portable_fsdp.formats import EXPORTS, FORMATS, OF_TRANSFORMERS
from portable_fsdp.runtime import errors
from portable_fsdp.runtime.command import CommandParser, to_stderr, to_stdout
from portable_fsdp.runtime.errors import CheckpointError, StoreError, table
from portable_fsdp.runtime.host import in_units, time_text

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
    model_help = "the one of several models to export, or a module of it (torch's AveragedModel: NAME.module)"
    export("--model", metavar="NAME", default="", help=model_help)
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
    rows = listing(checkpoints_in(options.path))
    _print(options, rows, listing_text(rows))


def _show(options: argparse.Namespace) -> None:
    path = resolve(options.path)
    manifest = read_manifest(path)
    if options.config:
        _print(options, manifest.config, yaml.safe_dump(manifest.config, sort_keys=False).rstrip())
    else:
        _print(options, facts(path, manifest), summary(path, manifest))


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
    compared = differences(*(read_manifest(resolve(path)) for path in (options.a, options.b)))
    _print(options, compared, differences_text(compared))
    return errors.EXIT_FINISHED if compared["is_equal"] else errors.EXIT_FAILED


def export(
    path: Path | str,
    target: Path | str,
    format: str = "huggingface",  # noqa: A002
    *,
    model: str = "",
    dtype: str | None = None,
    tokenizer: str | None = None,
    base: str | None = None,
) -> Path:
    """Write a checkpoint in another format, as the command `checkpoint export` does; call it in one process, after the
    commit. Returns the checkpoint: `path`, or the best one of a run by its evaluations.

    `path`: a checkpoint's folder or a run's, or its URL. `target`: a new or earlier export's local folder, or a new
    file. `format`: huggingface, dcp, safetensors or peft. `model`: the one of several models to export, or a module of
    it. `dtype`: float32, bfloat16 or float16; None: as saved. `tokenizer`: its folder, or none. `base`: the adapters'
    base model, if it has moved. Raises CheckpointError: no or a damaged checkpoint, a target that holds other files or
    can't be written, or a format that can't hold the checkpoint.
    """
    for name, value, values in (("format", format, EXPORTS), ("dtype", dtype or _DTYPES[0], _DTYPES)):
        if value not in values:
            raise CheckpointError(f"export: {name}={value!r}: expected one of {', '.join(values)}.")
    settings = {"format": format, "model": model, "dtype": dtype, "tokenizer": tokenizer, "base": base}
    return _exported(argparse.Namespace(path=locate(path), target=_local(str(target)), **settings))[0]


def _export(options: argparse.Namespace) -> None:
    path, reason = _exported(options)
    data = {"checkpoint": str(path), "target": str(options.target), "format": options.format}
    _print(options, data, f"{path}{reason}: exported to {options.target}")


def _exported(options: argparse.Namespace) -> tuple[Path, str]:
    """Export; return the checkpoint, and why it is this one."""
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
            settings = ExportOptions(options.dtype, save_tokenizer, advance, options.base, options.model)
            export_checkpoint(path, options.format, options.target, settings)
    except OSError as error:
        cause = f"{error}{commit.cause_of(error, options.target.parent)}"
        raise CheckpointError(f"export to {options.target}: can't be written: {cause}") from error
    return path, reason


def _require_format(options: argparse.Namespace, manifest: Manifest) -> None:
    """Refuse a format that can't hold the tokenizer, or adapters without their base. Raises `CheckpointError`."""
    if options.base is not None and options.format != "huggingface":
        raise CheckpointError(f"--base {options.base}: expected --format huggingface, found {options.format}")
    if options.format in OF_TRANSFORMERS and manifest.named and manifest.named.models and not options.model:
        names = ", ".join(manifest.named.models)
        raise CheckpointError(f"--format {options.format}: the checkpoint has several models.\n  Add --model: {names}.")
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
    from portable_fsdp.data.templates import adapt
    from portable_fsdp.data.tokenize import load_tokenizer

    if options.format not in OF_TRANSFORMERS:
        return None
    data = manifest.config.get("data", {})
    if options.tokenizer is None and data.get("factory"):  # its rows are the user's own
        return None
    name = options.tokenizer or data.get("tokenizer") or "none"
    if not options.tokenizer and name == "none":
        log.warning("exporting without a tokenizer: the checkpoint names none. Use --tokenizer PATH.")
    if name == "none":
        return None
    try:
        model = manifest.config.get("model", {})
        tokenizer = load_tokenizer(name, model.get("pretrained"), model.get("gguf_file"))
        if not options.tokenizer:
            adapt(tokenizer, data.get("end"), data.get("chat_template"))
        return tokenizer.save
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
    data = facts(path, read_manifest(path))
    _print(options, data, f"{path}: imported {data['model']['tensors']} tensors, {in_units(data['bytes'])}")


@contextmanager
def _progress(name: str, total: int | None) -> Generator[Callable[[int], object]]:
    """Show a progress bar on stderr, if that is a terminal; the caller reports bytes."""
    from tqdm import tqdm

    hidden = not sys.stderr.isatty()
    with tqdm(desc=name, total=total, unit="B", unit_scale=True, leave=False, file=sys.stderr, disable=hidden) as bar:
        yield bar.update


# -------------------------------------------------------------------------------------------- reports as text and JSON


def facts(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Describe a checkpoint for `--json`. Sizes in bytes, times in UTC."""
    return {
        "path": str(path),
        "step": manifest.step,
        "saved": manifest.saved_at,
        "bytes": manifest.bytes,
        "parameters": _content(manifest, "model")["elements"] + _elements(manifest.left_out),
        "data": manifest.data.model_dump(),
        "evaluation": None if manifest.evaluation is None else manifest.evaluation.model_dump(),
        "base": None if manifest.base is None else manifest.base.model_dump(exclude={"tensors"}),
        "named": {name: [*value] for name, value in dict(manifest.named or ()).items()},
        "written_by": manifest.written_by.model_dump(),
        **{folder: _content(manifest, folder) for folder in FOLDERS},
    }


def summary(path: Path, manifest: Manifest) -> str:
    """Describe a checkpoint for a terminal."""
    lines = [
        f"checkpoint  {path}",
        f"step        {manifest.step} (data: epoch {manifest.data.epoch}, position {manifest.data.position})",
        f"written by  {_writer_text(manifest.written_by.model_dump())}",
        f"saved       {time_text(manifest.saved_at)} UTC",
    ]
    if manifest.evaluation is not None:
        step, last = manifest.step, manifest.evaluation
        at = "" if last.step == step else f" at step {last.step}"
        best = f"; the best so far: {last.best_loss:.4f} at step {last.best_step}"
        lines.append(
            f"evaluated   eval_loss {last.loss:.4f}{at}{', the best so far' if last.best_step == step else best}"
        )
    if manifest.base is not None:
        left_out = f"{len(manifest.left_out)} tensors, {_elements(manifest.left_out):,} elements"
        lines.append(f"base        {left_out}, left out: {manifest.base}")
    lines += [f"{what:<12}{', '.join(names)}" for what, names in dict(manifest.named or ()).items() if names]
    for folder in FOLDERS:
        content = _content(manifest, folder)
        lines.append(
            f"{folder:<12}{content['tensors']} tensors, {content['elements']:,} elements, "
            f"{in_units(content['bytes'])} in {content['files']} files"
        )
        lines.extend(f"  {line}" for line in _shapes(_tensors(manifest, folder).items()))
    return "\n".join(lines)


def listing(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return `facts` of each, without tensors; path and `damaged` for an unreadable manifest. Raises `StoreError`."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        try:
            row = facts(path, read_manifest(path))
            rows.append({key: row[key] for key in row if key not in FOLDERS})
        except StoreError:
            raise
        except CheckpointError as error:
            if store_of(path).is_committed(path):  # else deleted since it was listed
                rows.append({"path": str(path), "damaged": str(error)})
    return rows


def listing_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format an aligned table, with a column for evaluations if there are any. `rows`: newest first."""
    evaluated = [row for row in rows if row.get("evaluation")]
    bests = {Path(row["path"]).parent: row["evaluation"]["best_step"] for row in reversed(evaluated)}
    lines = [("checkpoint", "saved (UTC)", "size", "parameters", "eval_loss", "written by")]
    for row in rows:
        path = Path(row["path"])
        if "damaged" in row:
            lines.append((path.name, "", "", "", "", f"damaged: {str(row['damaged']).splitlines()[0]}"))
            continue
        evaluation = row["evaluation"]
        loss = f"{evaluation['loss']:.4f}" if evaluation and evaluation["step"] == row["step"] else ""
        best = "best" if bests.get(path.parent) == row["step"] else ""
        columns = (time_text(row["saved"]), in_units(row["bytes"]), f"{row['parameters']:,}", f"{loss} {best}".strip())
        lines.append((path.name, *columns, _writer_text(row["written_by"])))
    if not evaluated:
        return table([(*line[:4], line[5]) for line in lines], right=(2, 3))
    return table(lines, right=(2, 3))


def differences(a: Manifest, b: Manifest) -> dict[str, Any]:
    """Compare two checkpoints, a's value before b's. `is_equal` covers tensors and configs, not the keys after it."""
    described = {
        key: [manifests.describe(m.tensors[key]) for m in (a, b)] for key in sorted(a.tensors.keys() & b.tensors.keys())
    }
    fingerprints = [{"fingerprint": m.base.fingerprint} if m.base else {} for m in (a, b)]
    result: dict[str, Any] = {
        "only_in_a": sorted(a.tensors.keys() - b.tensors.keys()),
        "only_in_b": sorted(b.tensors.keys() - a.tensors.keys()),
        "tensors": {key: [left, right] for key, (left, right) in described.items() if left != right},
        "config": changed(a.config, b.config),
        "model_config": changed(a.architecture or {}, b.architecture or {}),
        "base": changed(fingerprints[0], fingerprints[1]),
        "objects": changed(a.named.objects if a.named else {}, b.named.objects if b.named else {}),
    }
    result["is_equal"] = not any(result.values())
    result["step"] = [a.step, b.step]
    result["data"] = changed(a.data.model_dump(), b.data.model_dump())
    result["written_by"] = changed(a.written_by.model_dump(), b.written_by.model_dump())
    return result


def differences_text(compared: Mapping[str, Any]) -> str:
    """Format one line per difference, first those that `is_equal` covers. `compared`: of `differences`."""
    rows: list[tuple[str, str]] = []
    rows += [(key, "only in A") for key in compared["only_in_a"]]
    rows += [(key, "only in B") for key in compared["only_in_b"]]
    rows += [(key, f"{a} -> {b}") for key, (a, b) in compared["tensors"].items()]
    for name in ("config", "model_config", "base", "objects", "data", "written_by"):
        rows += [(f"{name}: {key}", f"{a!r} -> {b!r}") for key, (a, b) in compared[name].items()]
    if compared["step"][0] != compared["step"][1]:
        rows.append(("step", f"{compared['step'][0]} -> {compared['step'][1]}"))
    what = "tensors (names, shapes, dtypes)"
    verdict = f"equal: {what} and configs" if compared["is_equal"] else f"different: {what} or configs"
    return "\n".join(filter(None, [table(rows) if rows else "", verdict]))


def _tensors(manifest: Manifest, folder: str) -> dict[str, manifests.TensorEntry]:
    return {key: tensor for key, tensor in manifest.tensors.items() if manifests.folder_of(key) == folder}


def _content(manifest: Manifest, folder: str) -> dict[str, int]:
    tensors = _tensors(manifest, folder)
    return {
        "tensors": len(tensors),
        "elements": _elements(tensors),
        "bytes": manifests.bytes_of_tensors(tensors),
        "files": sum(file.name.startswith(folder + "/") for file in manifest.files),
    }


def _elements(tensors: Mapping[str, manifests.TensorEntry]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


def _writer_text(by: Mapping[str, Any]) -> str:
    count = by["process_count"]
    return (
        f"portable_fsdp {by['portable_fsdp']}, torch {by['torch']}, backend {by['backend']} on {by['device']}, "
        f"{count} process{'es' if count > 1 else ''}"
    )


def _shapes(tensors: Iterable[tuple[str, manifests.TensorEntry]]) -> list[str]:
    """Format one line for equal names and shapes in all layers: `layers.*.norm.weight  float32 [8]  x 2`."""
    alike = Counter((re.sub(r"\.\d+\.", ".*.", key), manifests.describe(tensor)) for key, tensor in tensors)
    return [f"{name}  {text}" + (f"  x {count}" if count > 1 else "") for (name, text), count in alike.items()]


if __name__ == "__main__":
    sys.exit(main())
