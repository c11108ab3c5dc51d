"""Look at checkpoints, verify, compare, convert or delete them: `python -m portable_fsdp.checkpoint COMMAND PATH`.

PATH is the folder or URL of a checkpoint, or of a run, which stands for its newest checkpoint; `export` takes the best
by its evaluations, as the run does, where the newest knows one. `--json` prints one
object for scripts. Exit code: 0; 1 where `diff` finds a difference; 2 for anything that can't be done as asked; 130 for
Ctrl-C; 141 where nobody reads on (`| head`).
"""

import argparse
import json
import logging
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from portable_fsdp.checkpoint import report
from portable_fsdp.checkpoint.format import (
    MANIFEST,
    Manifest,
    checkpoints_below,
    is_committed,
    read_manifest,
    step_folder,
)
from portable_fsdp.checkpoint.storage import exists, locate
from portable_fsdp.checkpoint.write_errors import with_cause
from portable_fsdp.formats import EXPORTS, FORMATS, require_source
from portable_fsdp.runtime.command import CommandParser, at_least, to_stdout
from portable_fsdp.runtime.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_USAGE,
    CheckpointError,
    DataError,
    PortableFSDPError,
    StoreError,
)

log = logging.getLogger("portable_fsdp")

# Commands import torch (a second) and transformers (seconds) themselves: `--help`, `list` and `show` do without.

_EXIT_INTERRUPTED = 130  # 128 + SIGINT

_DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (`runtime/errors.py`)."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser().parse_args(words)
        command: Callable[[argparse.Namespace], int | None] = options.command
        return command(options) or EXIT_FINISHED
    except PortableFSDPError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except Exception as error:
        urls = [word for word in words if "://" in word]
        if not urls and not isinstance(error, OSError):
            raise
        print(f"{words[0]}: {_unanswered(urls, error) if urls else error}", file=sys.stderr)
        return EXIT_USAGE


def _unanswered(urls: Sequence[str], error: Exception) -> str:
    """A store's client raises errors of many classes: all are taken for its own, as in `storage.py`."""
    return (
        f"expected {' and '.join(urls)} to answer, found {type(error).__name__}: {error}\n"
        "  Check the address, the credentials, and that the store is up. What lies there may be whole."
    )


def resolve(path: Path) -> Path:
    """A checkpoint's folder, from itself or from its run's. Raises `CheckpointError`."""
    return path.resolve() if exists(path / MANIFEST) else checkpoints_in(path)[0].resolve()


def checkpoints_in(path: Path) -> list[Path]:
    """The checkpoints of a run, newest first, from the run's folder or its `checkpoints/`. Raises `CheckpointError`."""
    if found := checkpoints_below(path):
        return found
    raise CheckpointError(f"{path}: expected a checkpoint (step-00000500) or a run's folder with one, found none")


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("checkpoint", __doc__ or "")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int | None], help: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help)
        command.add_argument("--json", action="store_true", help="print one JSON object (list: an array) for scripts")
        command.set_defaults(command=run)
        return command

    path: dict[str, Any] = {"type": locate, "help": "a checkpoint's folder, or a run's (its newest)"}
    run: dict[str, Any] = {"type": locate, "metavar": "RUN", "help": "a run's folder, or its checkpoints/"}
    listed = add("list", _list, "the checkpoints of a run, newest first")
    listed.add_argument("path", **run)
    show = add("show", _show, "step, shapes, and who wrote it")
    show.add_argument("path", metavar="PATH", **path)
    show.add_argument("--config", action="store_true", help="print the config of the run that saved it, as YAML")
    verify = add("verify", _verify, "hash every file and compare it with the manifest")
    verify.add_argument("path", metavar="PATH", **path)
    verify.add_argument("--all", action="store_true", help="all checkpoints of the run, not only its newest")
    diff = add("diff", _diff, "compare two: tensors' names, shapes and dtypes, configs; exit code 1 if they differ")
    diff.add_argument("a", metavar="A", **path)
    diff.add_argument("b", metavar="B", **path)
    diff.add_argument("--values", action="store_true", help="compare the tensors' values too")
    export = add("export", _export, "write a checkpoint in another format")
    export.add_argument("path", type=locate, metavar="PATH", help="a checkpoint's folder, or a run's (its best)")
    export.add_argument(
        "target", type=_local, metavar="TARGET", help="a local folder (new, empty, or an earlier export), or a new file"
    )
    export.add_argument(
        "--format", choices=EXPORTS, default="huggingface", help="adapters (LoRA): peft alone, huggingface merged"
    )
    export.add_argument("--dtype", choices=_DTYPES, help="of the model's floating-point tensors; default: as saved")
    export.add_argument(
        "--tokenizer",
        type=_local,
        metavar="PATH|none",
        help="huggingface, peft: the tokenizer's folder, or none; default: that of the run's config",
    )
    export.add_argument(
        "--base",
        metavar="PATH",
        help="huggingface, of adapters: their base, where the run's model.pretrained has moved",
    )
    _add_import(add("import", _import, "make a checkpoint from a model in another format"))
    prune = add("prune", _prune, "delete older checkpoints")
    prune.add_argument("path", **run)
    prune.add_argument(
        "--keep", type=at_least(1, int), required=True, metavar="N", help="the newest N of each run stay"
    )
    prune.add_argument("--keep_every", type=at_least(1, int), metavar="K", help="steps that K divides stay too")
    prune.add_argument("--dry_run", action="store_true", help="say what would be deleted")
    return parser


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", type=_local, metavar="SOURCE", help="a local file or a folder in another format")
    command.add_argument("folder", type=locate, metavar="RUN", help="a run's folder, or its checkpoints/")
    command.add_argument("--format", choices=("auto", *FORMATS), default="auto")
    command.add_argument(
        "--config", type=_local, metavar="PATH", help="the model's config.json or its folder, where SOURCE has none"
    )
    command.add_argument("--dtype", choices=_DTYPES, help="of the model's floating-point tensors; default: as they are")
    command.add_argument(
        "--trust_metadata",
        action="store_true",
        help="read pickled metadata (dcp), as data: names that aren't torch's metadata are refused",
    )


def _local(text: str) -> Path:
    """Other formats are read and written by libraries that know files alone."""
    if "://" in text:
        raise CheckpointError(
            f"{text}: expected a local path, found an URL: only our own checkpoints lie in object stores.\n"
            "  Convert to or from a local folder, and copy that with the store's tool (aws s3 cp, gcloud storage cp)."
        )
    return Path(text)


def _say(options: argparse.Namespace, data: Any, text: str) -> None:
    to_stdout(json.dumps(data) if options.json else text)


def _list(options: argparse.Namespace) -> None:
    rows = report.listing(checkpoints_in(options.path))
    _say(options, rows, report.listing_text(rows))


def _show(options: argparse.Namespace) -> None:
    path = resolve(options.path)
    manifest = read_manifest(path)
    if options.config:
        _say(options, manifest.config, yaml.safe_dump(manifest.config, sort_keys=False).rstrip())
    else:
        _say(options, report.facts(path, manifest), report.summary(path, manifest))


def _verify(options: argparse.Namespace) -> None:
    wanted = [path.resolve() for path in checkpoints_in(options.path)] if options.all else [resolve(options.path)]
    from portable_fsdp.checkpoint.store import Reader
    from portable_fsdp.formats.base import verify

    done: list[dict[str, Any]] = []
    damaged: list[str] = []
    deleted: list[str] = []
    for path in wanted:
        try:
            with Reader(path) as reader:
                size = reader.manifest.bytes
                with _progress(f"verify {path.name}", size) as advance:
                    verify(reader, advance)
        except StoreError:
            raise
        except CheckpointError as error:
            if is_committed(path):
                damaged.append(str(error))
            else:  # by the run's own retention
                deleted.append(str(path))
            continue
        done.append({"path": str(path), "files": len(reader.manifest.files), "bytes": size})
    lines = [f"{row['path']}: whole: {row['files']} files, {report.size_text(row['bytes'])}" for row in done]
    lines += [f"{path}: deleted meanwhile" for path in deleted]
    if lines or options.json:
        _say(options, {"whole": done, "damaged": damaged, "deleted": deleted}, "\n".join(lines))
    if damaged:
        raise CheckpointError("\n".join(damaged))
    if not done:
        raise CheckpointError(f"verify {options.path}: expected a checkpoint that stays, found all deleted meanwhile")


def _diff(options: argparse.Namespace) -> int:
    paths = resolve(options.a), resolve(options.b)
    from portable_fsdp.checkpoint.store import Reader
    from portable_fsdp.checkpoint.values import value_differences

    with Reader(paths[0]) as a, Reader(paths[1]) as b:
        found = report.differences(a.manifest, b.manifest)
        if options.values:
            with _progress("compare", a.manifest.bytes) as advance:
                found["values"] = value_differences(a, b, advance)
            found["is_equal"] = found["is_equal"] and not found["values"]
    values = {key: str(value) if math.isnan(value) else value for key, value in found.get("values", {}).items()}
    _say(options, {**found, "values": values} if options.values else found, report.differences_text(found))
    return EXIT_FINISHED if found["is_equal"] else EXIT_FAILED


def _export(options: argparse.Namespace) -> None:
    path, which = _to_export(options.path)
    from portable_fsdp.checkpoint.store import Reader
    from portable_fsdp.formats.base import load_export

    manifest = read_manifest(path)
    base = _base(options, manifest)
    save_tokenizer = _tokenizer(options, manifest)
    size = sum(file.bytes for file in manifest.files if options.format == "dcp" or file.name.startswith("model/"))
    try:
        with Reader(path) as reader, _progress(f"export {path.name}", 2 * size) as advance:
            load_export(options.format).export(
                reader, options.target, dtype=options.dtype, save_tokenizer=save_tokenizer, advance=advance, **base
            )
    except OSError as error:
        reason = with_cause(error, options.target.parent)
        raise CheckpointError(f"export to {options.target}: can't be written: {reason}") from error
    data = {"checkpoint": str(path), "target": str(options.target), "format": options.format}
    _say(options, data, f"{path}{which}: exported to {options.target}")


def _to_export(path: Path) -> tuple[Path, str]:
    """The checkpoint that is named, or of a run what the run itself exports; and why."""
    newest = resolve(path)
    told = None if newest == path.resolve() else read_manifest(newest).evaluation
    if told is None:
        return newest, ""
    best = step_folder(newest.parent, told.best_step)
    if not is_committed(best):
        return newest, f" (the newest: {best.name}, the best by its evaluation, is gone)"
    return best, f" (the best by its evaluation: eval_loss {told.best_loss:.4f})"


def _base(options: argparse.Namespace, manifest: Manifest) -> dict[str, str]:
    """What an export is told of the base. Raises `CheckpointError` for a format that has no place for it."""
    if options.base is not None and options.format != "huggingface":
        raise CheckpointError(f"--base {options.base}: expected --format huggingface, found {options.format}")
    if manifest.base is not None and options.format not in ("huggingface", "peft"):
        raise CheckpointError(
            f"--format {options.format}: expected a checkpoint with all weights, found that this one leaves out its "
            f"base: {manifest.base}.\n  Take --format huggingface, which adds the adapters in, or peft."
        )
    return {} if options.base is None else {"base": options.base}


def _tokenizer(options: argparse.Namespace, manifest: Manifest) -> Callable[[Path], None] | None:
    """What writes the tokenizer that goes with the model; None where there is none, or no place for it."""
    from portable_fsdp.data.tokenize import load_tokenizer

    asked = None if options.tokenizer is None else str(options.tokenizer)
    if options.format not in ("huggingface", "peft"):
        if asked not in (None, "none"):
            raise CheckpointError(f"--tokenizer {asked}: expected --format huggingface or peft, found {options.format}")
        return None
    name = asked or manifest.config.get("data", {}).get("tokenizer")
    if name is None:
        log.warning(
            "no tokenizer goes with it: the checkpoint names none, as that of an import. Take --tokenizer PATH."
        )
    if name in (None, "none"):
        return None
    try:
        model = manifest.config.get("model", {})
        return load_tokenizer(name, model.get("pretrained"), model.get("gguf_file")).save
    except DataError as error:
        raise CheckpointError(
            f"{error}\n  Say --tokenizer PATH (a folder, or bytes), or --tokenizer none to export without one."
        ) from None


def _import(options: argparse.Namespace) -> None:
    require_source(options.source)
    from portable_fsdp.formats.importing import import_checkpoint

    try:
        with _progress(f"import {options.source.name}", None) as advance:
            path = import_checkpoint(
                options.source,
                options.folder,
                options.format,
                config=options.config,
                dtype=options.dtype,
                trust_metadata=options.trust_metadata,
                advance=advance,
            )
    except OSError as error:
        raise CheckpointError(f"import {options.source}: can't be read: {error}") from error
    data = report.facts(path, read_manifest(path))
    _say(options, data, f"{path}: imported {data['model']['tensors']} tensors, {report.size_text(data['bytes'])}")


def _prune(options: argparse.Namespace) -> None:
    from portable_fsdp.checkpoint.prune import prune

    folder = checkpoints_in(options.path)[0].parent
    pruned = prune(folder, options.keep, options.keep_every, dry_run=options.dry_run)
    freed = sum(pruned.deleted.values())
    word = "would delete" if options.dry_run else "deleted"
    lines = [f"{word} {path.name}: {report.size_text(size)}" for path, size in pruned.deleted.items()]
    lines += [f"left alone {path.name}: {reason}" for path, reason in pruned.left_alone.items()]
    lines.append(
        f"{folder}: {word} {len(pruned.deleted)} of {len(pruned.deleted) + len(pruned.kept)} checkpoints, "
        f"{report.size_text(freed)}"
    )
    data = {
        "deleted": [str(path) for path in pruned.deleted],
        "kept": [str(path) for path in pruned.kept],
        "left_alone": {str(path): reason for path, reason in pruned.left_alone.items()},
        "bytes": freed,
        "dry_run": options.dry_run,
    }
    _say(options, data, "\n".join(lines))


@contextmanager
def _progress(what: str, total: int | None) -> Generator[Callable[[int], None]]:
    """A bar on stderr with bytes per second, where that is a terminal."""
    from tqdm import tqdm

    with tqdm(
        total=total,
        desc=what,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        leave=False,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
    ) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        yield advance


if __name__ == "__main__":
    sys.exit(main())
