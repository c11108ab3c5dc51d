"""Checks what a config names on this host before torch and transformers are imported, which takes seconds.

A start without a launcher calls this, and the run checks again, on all processes together. It asks no hub and no object
store.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, cast

from portable_fsdp.checkpoint.config_diff import differences
from portable_fsdp.checkpoint.format import (
    committed_steps,
    read_manifest,
    require_checkpoint,
    step_of,
    verify_file,
)
from portable_fsdp.checkpoint.storage import locate, store_of
from portable_fsdp.config.schema import Config
from portable_fsdp.data.sources import EXAMPLES, files_of
from portable_fsdp.data.tokenize import require_tokenizer_folder
from portable_fsdp.models.architecture import architecture_mapping
from portable_fsdp.observe.run_files import last_event
from portable_fsdp.runtime.errors import CheckpointError, ConfigError, DataError, UsageError, without_passwords
from portable_fsdp.runtime.hub import is_hub_id, require_folder_or_hub_id


def check_paths(config: Config) -> None:
    """Raises ConfigError or DataError for a run.dir that can't be written to, and for a model, a tokenizer or files of
    data that aren't there; CheckpointError for a checkpoint.resume that isn't there."""
    require_writable(Path(config.run.dir))
    require_trackers(config)
    if config.model.architecture is not None:
        architecture_mapping(config.model.architecture)
    if config.model.pretrained is not None:
        require_folder_or_hub_id("model.pretrained", config.model.pretrained)
    if config.data.tokenizer not in ("auto", "bytes") and not is_hub_id(config.data.tokenizer):
        require_tokenizer_folder(Path(config.data.tokenizer), "data.tokenizer")
    for source in config.data.mixture or (config.data,):
        if source.source in EXAMPLES:
            files_of(source)
    if config.checkpoint.resume not in ("auto", "none"):
        own, other = checkpoint_folder(config), locate(config.checkpoint.resume)
        # A run with checkpoints of its own resumes from those: checkpoint.resume says where it began.
        if store_of(own).is_local and store_of(other).is_local and not committed_steps(own):
            require_checkpoint(other)


def checkpoint_folder(config: Config) -> Path:
    """The folder of the run's checkpoints. Raises CheckpointError for an URL of no store."""
    return locate(config.checkpoint.dir or Path(config.run.dir) / "checkpoints")


def nothing_left(config: Config) -> str | None:
    """A message for a run whose newest checkpoint, verified as `checkpoint.verify` says, is that of its last step.

    None where the run itself must look: it isn't finished, its config has changed, a file that it read is newer, or
    there is something to export.
    """
    folder, checkpoint = checkpoint_folder(config), config.checkpoint
    if checkpoint.resume != "auto" or checkpoint.export or config.train.steps is None or not store_of(folder).is_local:
        return None
    last = min(config.train.steps, config.train.stop_at or config.train.steps)
    newest = next(iter(committed_steps(folder)), None)
    if newest is None or (step_of(newest) or 0) < last:
        return None
    try:
        manifest = read_manifest(newest)
        changes = differences(manifest, saved_config(config), None, None, is_own=True)
        evaluated = manifest.evaluation and manifest.evaluation.step
        misses = None not in (config.train.eval_every, config.data.eval_split) and evaluated != manifest.step
        # A run with an empty validation set finishes without an evaluation; otherwise a stop came before it.
        if misses and (changes or last_event(Path(config.run.dir) / "events.jsonl").get("event") != "finish"):
            return None
        if any(change.makes_curve for change in changes):
            return None
        begun = [path.stat().st_mtime for path in (newest, Path(config.run.dir) / "config.yaml") if path.exists()]
        if (files := _files_read(config)) is None or any(path.stat().st_mtime > min(begun) for path in files):
            return None
        for file in manifest.files if checkpoint.verify != "off" else ():
            verify_file(newest, file, content=checkpoint.verify == "full")
    except (CheckpointError, DataError, OSError, UsageError):
        return None
    return f"step {manifest.step} of {last} is saved already: nothing left to train"


def _files_read(config: Config) -> list[Path] | None:
    """The files that a run of this config reads; None where a hub has them, which only a download would tell."""
    files: list[Path] = []
    names = [config.model.pretrained, config.data.tokenizer, config.data.eval_split]
    for source in config.data.mixture or (config.data,):
        if source.source in EXAMPLES:
            files += files_of(source)
        elif source.source == "huggingface":
            names.append(source.path)
    for name in map(str, names):
        if name in ("None", "auto", "bytes") or name.endswith("%"):
            continue
        if not (path := Path(name)).exists():
            return None
        files += [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return files


def saved_config(config: Config) -> dict[str, Any]:
    """The config as a checkpoint holds it: JSON, with what the file holds that `model.architecture` names, since that
    may have changed when the run is resumed. It holds no passwords: checkpoints travel."""
    values = config.model_dump(mode="json")
    if config.model.architecture is not None:
        values["model"]["architecture"] = _as_json(architecture_mapping(config.model.architecture))
    return json.loads(without_passwords(json.dumps(values)))


def _as_json(value: Any) -> Any:
    """Infinities as transformers writes them: JSON has none."""
    if isinstance(value, dict):
        return {key: _as_json(inside) for key, inside in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_as_json(inside) for inside in cast(list[Any], value)]
    if isinstance(value, float) and math.isinf(value):
        return {"__float__": "Infinity" if value > 0 else "-Infinity"}
    return value


def check_profile(config: Config, steps: int, resumed_step: int = 0, *, is_new: bool = True) -> None:
    """Raises ConfigError for an observe.profile past the last of `steps`, or before the step that a run resumes from
    unless the run had it before (`is_new`): then the same command resumes it all the same."""
    if config.observe.profile is None:
        return
    (begin, end), last = config.observe.profile.steps, min(steps, config.train.stop_at or steps)
    if end > last or (is_new and begin <= resumed_step):
        raise ConfigError(
            f"observe.profile.steps: expected steps from {resumed_step + 1} to {last}, found [{begin}, {end}].\n"
            "  Choose among those, or profile the next steps of a run under way: touch RUN/PROFILE."
        )


def require_trackers(config: Config) -> None:
    """Raises ConfigError for trackers that aren't installed."""
    if config.observe.trackers:
        from portable_fsdp.observe.trackers import require_installed

        later = "leave it out; `python -m portable_fsdp.report RUN --track=NAME` sends a run's metrics later"
        require_installed(config.observe.trackers, "observe.trackers", later)


def require_writable(folder: Path) -> None:
    """Raises ConfigError for a run.dir that can't be made or written to."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        problem = "a folder that this user may not write to" if nearest.is_dir() else "a file"
        raise ConfigError(
            f"run.dir: expected a folder that can be written to, or a new one: {folder}\n  found {problem}: {nearest}\n"
            "  Set run.dir to another folder."
        )
