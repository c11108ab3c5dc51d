"""Send a run's metrics to an experiment tracker, through accelerate's classes: during the run or afterwards.

A run starts one such process per tracker (`observe/trackers.py`), so one that raises or hangs doesn't disturb training,
and accelerate, which would start XLA in a worker, is never imported there. It reads the files of the run's folder, and
stores the last sent step in `trackers/NAME.json`.
"""

import json
import os
import select
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import psutil

from portable_fsdp.report.read import JsonObject, name_of, read_config, read_records
from portable_fsdp.runtime.errors import PortableFSDPError, UsageError
from portable_fsdp.runtime.files import parse_json, read_inside, try_lock, write_text_atomically

FOLDER = "trackers"
_PROJECT = "portable_fsdp"
_POLL_S = 1.0
_SYSTEM_EVERY_S = 10.0


@dataclass(frozen=True)
class Sent:
    """Progress of a tracker; `id` is the tracker's id of the run, which keeps a resumed run one curve."""

    id: str
    step: int = 0  # the last one sent; steps that a resumed run repeats are not sent again
    config: bool = False


# Trackers that choose the id of a run themselves -> how to read it.
_OWN_IDS = {"mlflow": lambda run: run.info.run_id, "aim": lambda run: run.hash, "clearml": lambda task: task.id}
_TAKE_TEXTS = ("comet_ml", "dvclive", "swanlab", "tensorboard", "trackio", "wandb")
"""Trackers whose class in accelerate also accepts texts."""


def arguments(name: str, folder: Path, run: str, sent: Sent) -> dict[str, Any]:
    """Return the arguments of accelerate's class for a tracker, so it writes below `folder` and to the run's curve."""
    project = {"run_name": _PROJECT}
    return {
        "aim": {"run_name": run, "logging_dir": str(folder), "run_hash": sent.id or None},
        "clearml": {**project, "task_name": run, "continue_last_task": sent.id or False},
        "comet_ml": {**project, "experiment_key": sent.id, "mode": "get_or_create"},
        # Without these, dvclive commits to the user's repository.
        "dvclive": {"dir": str(folder / name), "resume": True, "save_dvc_exp": False, "dvcyaml": None},
        "mlflow": {"experiment_name": _PROJECT, "run_name": run, "run_id": sent.id or None},
        "swanlab": {**project, "experiment_name": run, "id": sent.id, "resume": "allow", "logdir": str(folder)},
        "tensorboard": {"run_name": name, "logging_dir": str(folder)},
        "trackio": {**project, "name": run, "resume": "allow"},
        "wandb": {**project, "name": run, "id": sent.id, "resume": "allow", "dir": str(folder)},
    }[name]


def track(run: Path, name: str, *, follow: bool) -> int:
    """Send new rows; with `follow` until standard input closes. Returns the last step sent. Raises UsageError for a
    folder that is no run and while another process sends, PortableFSDPError for a library's error."""
    config, folder = read_config(run), run / FOLDER
    if folder.is_symlink() or (folder / f"{name}.lock").is_symlink():
        raise UsageError(f"--track: {folder}: this folder or {name}.lock in it is a symbolic link.\n  Remove the link.")
    try:
        folder.mkdir(exist_ok=True)
        with (folder / f"{name}.lock").open("ab") as lock:
            if try_lock(lock.fileno()) is False:
                raise UsageError(f"--track: {run}: the run itself or another command is sending; wait for it.")
            return _send(run, name, config, follow=follow)
    except OSError as error:
        raise UsageError(f"--track: {folder} can't be written to: {error.strerror}") from None


def _send(run: Path, name: str, config: dict[str, Any], *, follow: bool) -> int:
    folder = run / FOLDER
    state, began = folder / f"{name}.json", time.monotonic()
    psutil.cpu_percent()  # the first value is 0
    sent = Sent("" if name in _OWN_IDS else uuid.uuid4().hex)
    with suppress(OSError, ValueError, TypeError):  # missing, or no run wrote it
        sent = Sent(**parse_json(read_inside(state, folder)))
    try:
        tracker = _open(name, folder, name_of(run, config), sent)
        if name in _OWN_IDS:
            sent = replace(sent, id=str(_OWN_IDS[name](tracker.tracker)))
        if not sent.config:
            others = {
                key: json.dumps(v, default=str) for key, v in config.items() if not isinstance(v, str | int | float)
            }
            tracker.store_init_configuration(config | others)
            sent = replace(sent, config=True)
        samples, offset = list[JsonObject](), 0  # a run writes samples before the row of their step
        for rows in _batches(run / "metrics.jsonl", sent.step, follow=follow):
            for row in rows:
                new, _, offset = read_records(run / "samples.jsonl", "step", offset=offset)
                samples = [sample for sample in (*samples, *new) if sample["step"] >= row["step"]]
                texts = [str(sample.get("text")) for sample in samples if sample["step"] == row["step"]]
                numbered = {f"samples/{number}": text for number, text in enumerate(texts, start=1)}
                tracker.log(_values(row) | (numbered if name in _TAKE_TEXTS else {}), step=row["step"])
                sent = replace(sent, step=row["step"])
            if rows:
                write_text_atomically(state, json.dumps(asdict(sent)) + "\n")
            if time.monotonic() - began > _SYSTEM_EVERY_S:
                load = {"cpu_percent": psutil.cpu_percent(), "memory_percent": psutil.virtual_memory().percent}
                tracker.log({f"system/{name}": value for name, value in load.items()}, step=sent.step)
                began = time.monotonic()
        tracker.finish()
    except (Exception, SystemExit) as error:
        raise PortableFSDPError(f"tracker {name}: {type(error).__name__}: {error}") from error
    finally:
        write_text_atomically(state, json.dumps(asdict(sent)) + "\n")
    return sent.step


def _open(name: str, folder: Path, run_name: str, sent: Sent) -> Any:
    os.environ["USE_TORCH_XLA"] = "0"  # else accelerate starts XLA if torch_xla can be imported
    from accelerate.state import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)
    tracker = cast(dict[str, Any], LOGGER_TYPE_TO_CLASS)[name](**arguments(name, folder, run_name, sent))
    tracker.start()
    return tracker


def _batches(path: Path, after: int, *, follow: bool) -> Iterator[list[JsonObject]]:
    """Yield new rows of steps after `after`, each step once; with `follow` poll every `_POLL_S`."""
    offset, pause, is_last = 0, 0.0, False
    while not is_last:
        # The run keeps this process's standard input open while it lives.
        is_last = not follow or (
            any(select.select([sys.stdin], [], [], pause)) and not os.read(sys.stdin.fileno(), 4096)
        )
        pause = _POLL_S
        rows, _, offset = read_records(path, "step", offset=offset)
        new = {row["step"]: row for row in rows if row["step"] > after}
        after = max(new, default=after)
        yield [new[step] for step in sorted(new)]


def _values(row: JsonObject) -> dict[str, Any]:
    """Return the numbers of a row, grouped for trackers: `train/loss`, `eval/loss`, `processes/seconds_imbalance`."""
    loads: object = row.get("processes")
    pairs = [
        (f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}", row[key]) for key in row if key != "step"
    ]
    pairs += [(f"processes/{key}", value) for key, value in loads.items()] if isinstance(loads, Mapping) else []
    return {key: value for key, value in pairs if isinstance(value, int | float)}
