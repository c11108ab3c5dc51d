"""The files that a run writes line by line into its folder, and the callback that writes them.

A kill can truncate only the last line of metrics.jsonl or events.jsonl: each line is one append, and the next writer
removes an incomplete line. NaN and infinities, which JSON lacks, are written as null.
"""

import json
import logging
import math
import os
import platform
import re
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from portable_fsdp.checkpoint.manifests import NamedSave, Saved
from portable_fsdp.config.describe import changed_values, each_value
from portable_fsdp.config.load import config_text
from portable_fsdp.observe.callbacks import Callback, EvaluationEnd, ProfileEnd, RunEnd, RunStart, SamplesEnd, StepEnd
from portable_fsdp.observe.goodput import imbalance
from portable_fsdp.runtime.errors import UsageError, without_passwords
from portable_fsdp.runtime.failures import last_events, parse_line, record_failure, unfinished, utc_text
from portable_fsdp.runtime.files import open_inside, write_text_atomically
from portable_fsdp.runtime.host import installed

log = logging.getLogger("portable_fsdp")

_TAIL_BYTES = 64 << 20

ROW_KEYS = (
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "memory_bytes"),
    *("seconds", "data_seconds", "imbalance"),
)
"""Keys of each row of metrics.jsonl, which user scripts read. Some rows also have `processes`, `eval_*`, in float16
`loss_scale` and `skipped_steps`, `is_empty` (1) in a step in which nothing counted, and OF_EXPERTS."""

OF_EXPERTS = ("router_loss", "expert_load", "expert_load_max", "experts_dropped")
"""Keys of rows of a model with experts, as in `StepEnd`."""


class _LinesFile:
    """A file of JSON objects, one per line. One writer at a time. Opening it completes or removes a torn line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        last = _tail(path).rpartition(b"\n")[2]
        if last and parse_line(last) is not None:
            self._append("\n")
        elif last:
            os.truncate(path, path.stat().st_size - len(last))

    def _append(self, text: str) -> None:
        # An old handle would write to the file that truncate_after has replaced.
        with self._path.open("ab", buffering=0) as file:
            begin, line = file.tell(), memoryview(text.encode())
            try:
                while line:  # a nearly full disk first takes a part
                    line = line[file.write(line) :]
            except OSError as error:
                error.filename = str(self._path)
                with suppress(OSError):
                    file.truncate(begin)  # else the next line would follow an incomplete one
                raise


class MetricsFile(_LinesFile):
    """metrics.jsonl (one row per step) or samples.jsonl (one row per text), in the order of steps."""

    def write(self, row: Mapping[str, object]) -> None:
        self._append(_line(row))

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Add values to the row of a step; atomic."""
        rows = [{**row, **values} if row.get("step") == step else row for row in read_jsonl(self._path)]
        write_text_atomically(self._path, "".join(map(_line, rows)))

    def truncate_after(self, step: int) -> dict[str, object]:
        """Drop the rows of later steps, which a resumed run repeats; atomic. Returns the event's `lost`: their number,
        their seconds, and `until`, the end of the last one in UTC (ISO 8601); empty without such rows. Raises
        UsageError for a line that isn't a row of metrics."""
        rows = read_jsonl(self._path) if self._path.exists() else []
        for number, row in enumerate(rows, start=1):
            if not isinstance(row.get("step"), int):
                raise UsageError(f"{self._path}: row {number}: expected an integer `step`, found {row.get('step')!r}.")
        dropped = [row for row in rows if row["step"] > step]
        if not dropped:
            return {}
        write_text_atomically(self._path, "".join(_line(row) for row in rows if row["step"] <= step))
        seconds = sum(row.get("seconds") or 0 for row in dropped)
        return {"steps": len(dropped), "seconds": seconds, "until": dropped[-1].get("time")}


class EventsFile(_LinesFile):
    """events.jsonl, by time: start, resume, collectives, evaluation, samples, save, profile, straggler and ends."""

    def write(self, event: str, /, **fields: object) -> None:
        """Append one event with `time` in UTC (ISO 8601, milliseconds). Paths become strings, without passwords."""
        self._append(without_passwords(_line({"time": utc_text(time.time()), "event": event, **fields})))


def last_save(path: Path) -> NamedSave | None:
    """Return the newest save in the last 64 MiB of events.jsonl at or before the step of every later start, or None;
    skips damaged lines. Raises UsageError if it can't be read."""
    saves: list[NamedSave] = []
    for line in _tail(path).split(b"\n"):
        event = parse_line(line) or {}
        step, address = event.get("step"), str(event.get("path"))
        if type(step) is not int:
            continue
        if event.get("event") == "start":  # a start at step 0 is a new run
            saves = [save for save in saves if save.step <= step]
        elif event.get("event") == "save" and address.isprintable():
            saves.append(NamedSave(step, address, path))
    return saves[-1] if saves else None


def measured_seconds(path: Path, event: str | None) -> list[float]:
    """Return `seconds` of the last rows of metrics.jsonl (None), or of one event among the last of events.jsonl."""
    rows = last_events(path)[-200:]
    return [row["seconds"] for row in rows if row.get("event") == event and isinstance(row.get("seconds"), float)]


def read_jsonl(path: Path, folder: Path | None = None) -> list[dict[str, Any]]:
    """Read all rows of a file, except for an incomplete last line, which may be being written. Raises OSError, with
    `folder` like `open_inside`, and UsageError for any other line that isn't a JSON object."""
    rows: list[dict[str, Any]] = []
    with open_inside(path, folder) if folder else path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = line.decode(errors="replace")
            row = parse_line(text)
            if row is not None:
                rows.append(row)
            elif line.endswith(b"\n"):
                raise UsageError(
                    f"{path}:{number}: expected one JSON object per line, found {text.rstrip()[:60]!r}.\n"
                    "  Another program changed the file: fix that line, or move the file away."
                )
    return rows


def _tail(path: Path) -> bytes:
    """Read the last bytes of a file; empty without it. Raises UsageError for a file that can't be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read(_TAIL_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.\n  Move it away.") from error


def _line(row: Mapping[str, object]) -> str:
    finite = each_value(row, lambda value: None if isinstance(value, float) and not math.isfinite(value) else value)
    return json.dumps(finite, default=str, allow_nan=False) + "\n"


class RunFiles(Callback):
    """Writes config.yaml, metrics.jsonl, samples.jsonl, events.jsonl and STOPPED."""

    def on_start(self, start: RunStart) -> None:
        self._folder, self._hosts, self._first = start.folder, start.hosts, start.step
        self._folder.mkdir(parents=True, exist_ok=True)
        self._began = time.time()
        if sentence := unfinished(self._folder):
            log.warning("%s", sentence)
        self._metrics = MetricsFile(self._folder / "metrics.jsonl")
        lost = self._metrics.truncate_after(start.step)  # first: it refuses a file that another program changed
        self._samples = MetricsFile(self._folder / "samples.jsonl")
        self._samples.truncate_after(start.step)
        self._events = EventsFile(self._folder / "events.jsonl")
        for name in ("STOPPED", "PROFILE"):
            (self._folder / name).unlink(missing_ok=True)
        write_text_atomically(self._folder / "config.yaml", without_passwords(config_text(start.given)))
        self._events.write(
            "start",
            name=start.config.run.name,
            backend=start.engine,
            **{key: getattr(start, key) for key in ("step", "device", "devices", "processes", "hosts", "steps")},
            parameters=start.parameters,
            began=utc_text(_process_start()),
            environment=environment(),
            **({"chosen": chosen} if (chosen := changed_values(start.given, start.config)) else {}),
            **({"lost": lost} if lost else {}),
        )
        if (resumed := start.resumed) is not None:
            self._events.write(
                "resume",
                path=str(resumed.path),
                step=resumed.step,
                load="weights_only" if resumed.weights_only else "all",
                changes={change.name: {"saved": change.saved, "now": change.now} for change in resumed.changes},
                passed_over=list(resumed.passed_over),
            )

    def on_step(self, step: StepEnd) -> None:
        if (kinds := step.collectives) is not None:
            self._events.write("collectives", **{kind: traffic._asdict() for kind, traffic in kinds.items()})
        row = {name: getattr(step, name) for name in ROW_KEYS} | {"time": utc_text(step.ended)}
        if step.is_logged:
            row["processes"] = processes_row(step, self._hosts)
        if step.loss_scale is not None:
            row |= {"loss_scale": step.loss_scale, "skipped_steps": step.skipped_steps}
        row |= {"is_empty": 1} if step.is_empty else {}
        row |= {name: value for name in OF_EXPERTS if (value := getattr(step, name)) is not None}
        if step.evaluation is not None:
            row |= _evaluation_row(step.evaluation)
        self._metrics.write(row)
        for straggler in step.stragglers:
            self._events.write("straggler", step=step.step, **straggler._asdict())

    def on_evaluate(self, evaluation: EvaluationEnd) -> None:
        figures = asdict(evaluation)
        self._events.write("evaluation", **{**figures, **figures.pop("metrics")})
        if 0 < evaluation.step == self._first:  # an earlier start wrote the row of this step
            self._metrics.add(evaluation.step, _evaluation_row(evaluation))

    def on_samples(self, samples: SamplesEnd) -> None:
        for prompt, text in zip(samples.prompts, samples.texts, strict=True):
            self._samples.write({"step": samples.step, "prompt": prompt, "text": text})
        self._events.write("samples", step=samples.step, seconds=samples.seconds)

    def on_save(self, save: Saved) -> None:
        self._events.write("save", **save._asdict() | {"path": save.path.absolute()})

    def on_profile(self, profile: ProfileEnd) -> None:
        collectives = {kind.name: kind._asdict() for kind in profile.summary.collectives}
        shares = {name: value for name, value in profile.summary._asdict().items() if isinstance(value, float)}
        steps = {"step": profile.last, "first_step": profile.first, "seconds": profile.seconds}
        self._events.write("profile", **steps, path=profile.folder, **shares, collectives=collectives)

    def on_end(self, end: RunEnd) -> None:
        if end.outcome == "failed":
            record_failure(self._folder, end.step, end.reason, self._began, is_consequence=end.is_consequence)
            return
        kind = "finish" if end.outcome == "finished" else "stop"
        reason = {} if kind == "finish" else {"reason": end.reason}
        self._events.write(kind, step=end.step, **reason, **end.values)
        if end.outcome == "stopped":
            write_text_atomically(self._folder / "STOPPED", _line({"reason": end.reason, "step": end.step}))


def _evaluation_row(evaluation: EvaluationEnd) -> dict[str, object]:
    values = {name: getattr(evaluation, name) for name in ("loss", "perplexity", "tokens")}
    return {f"eval_{name}": value for name, value in {**values, **evaluation.metrics}.items()}


def processes_row(step: StepEnd, hosts: Sequence[str]) -> dict[str, object]:
    """Return the load of the processes, by process index, as measured at the start of this step.

    Own seconds exclude waiting for other processes, which makes wall times equal (observe/goodput.py). An imbalance is
    the largest value over the median; `host_imbalance` compares the hosts' mean own times (None for one host).
    """
    by_host = defaultdict[str, list[float]](list)
    for host, own in zip(hosts, step.process_own_seconds, strict=True):
        by_host[host].append(own)
    means = [statistics.fmean(own) for own in by_host.values()]
    return {
        "seconds": step.process_seconds,
        "own_seconds": step.process_own_seconds,
        "data_seconds": step.process_data_seconds,
        "memory_bytes": step.process_memory_bytes,
        "seconds_imbalance": imbalance(step.process_seconds, statistics.median),
        "memory_imbalance": imbalance(step.process_memory_bytes, statistics.median),
        "host_imbalance": imbalance(means, statistics.median) if len(means) > 1 else None,
    }


def _process_start() -> float:
    """Seconds since 1970; psutil's boot time has whole seconds, but the kernel's clock since boot is exact."""
    if not hasattr(time, "CLOCK_BOOTTIME"):  # not Linux
        return psutil.Process().create_time()
    after_boot = psutil.Process().create_time() - psutil.boot_time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot)


def environment() -> dict[str, str]:
    """Return this host's name and `versions()`."""
    return {"host": socket.gethostname(), **versions()}


def versions() -> dict[str, str]:
    """Return the versions of Python, of the packages that matter, and of NVIDIA's driver."""
    versions = {"python": platform.python_version()}
    packages = ("portable_fsdp", "torch", "torch_xla", "transformers")
    versions |= {package: version for package in packages if (version := installed(package))}
    with suppress(OSError):  # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  ..."
        if driver := re.search(r"Module\b.*?\s([\d.]+)\s", Path("/proc/driver/nvidia/version").read_text()):
            versions["driver"] = driver[1]
    return versions
