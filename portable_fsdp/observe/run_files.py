"""The files that a run writes line by line into its folder, and the callback that writes them.

A kill can tear the last line of metrics.jsonl or events.jsonl, never more: each line goes out in one append, and
whoever opens the file again cuts a torn line off. NaN and infinities, which JSON lacks, are written as null.
"""

import json
import math
import os
import platform
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import psutil

from portable_fsdp.checkpoint.format import NamedSave
from portable_fsdp.config.load import config_text
from portable_fsdp.observe.callbacks import Callback, EvaluationEnd, ProfileEnd, RunEnd, RunStart, SamplesEnd, StepEnd
from portable_fsdp.observe.goodput import imbalance
from portable_fsdp.runtime.errors import UsageError, without_passwords
from portable_fsdp.runtime.files import MAX_LINE_BYTES, MAX_LOG_BYTES, lines_of, open_regular, write_text_atomically

if TYPE_CHECKING:
    from portable_fsdp.checkpoint.manager import Saved

_TAIL_BYTES = 64 << 20

_KEYS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "mfu",
    "memory_bytes",
    "seconds",
    "data_seconds",
    "imbalance",
)
"""Keys of metrics.jsonl, which people's scripts read; `processes`, `eval_*`, and in float16 `loss_scale` and
`skipped_steps`, where they are known; `is_empty`, 1, in a step in which nothing counted."""


class LostSteps(NamedTuple):
    """Steps that ran after the checkpoint that a run resumes from, and that it repeats."""

    steps: int
    seconds: float
    until: str | None  # when the last one ended, in UTC (ISO 8601)


class _LinesFile:
    """A file of JSON objects, one a line. One writer at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _cut_torn_line(path)

    def _append(self, text: str) -> None:
        # Opened for each line: truncate_after replaces the file, and a handle would write into the old one.
        with self._path.open("ab", buffering=0) as file:
            begin, line = file.tell(), memoryview(text.encode())
            try:
                while line:  # a full disk first takes a part
                    line = line[file.write(line) :]
            except OSError as error:
                error.filename = str(self._path)
                with suppress(OSError):
                    file.truncate(begin)  # else the next line would follow on a torn one
                raise


class MetricsFile(_LinesFile):
    """metrics.jsonl, one row a step, and samples.jsonl, one a text, both in the order of the steps."""

    def write(self, row: Mapping[str, object]) -> None:
        """Append one row; it is with the operating system when this returns."""
        self._append(_line(row))

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Add values to the row of a step; atomic."""
        rows = [{**row, **values} if row.get("step") == step else row for row in read_jsonl(self._path)]
        write_text_atomically(self._path, "".join(map(_line, rows)))

    def truncate_after(self, step: int) -> LostSteps | None:
        """Drop the rows of later steps, which a resumed run repeats, and return what they took; atomic.

        Raises UsageError for a line that is no row of metrics.
        """
        if not self._path.exists():
            return None
        rows = read_jsonl(self._path)
        for number, row in enumerate(rows, start=1):
            if not isinstance(row.get("step"), int):
                raise UsageError(f"{self._path}: row {number}: expected an integer `step`, found {row.get('step')!r}.")
        dropped = [row for row in rows if row["step"] > step]
        if not dropped:
            return None
        write_text_atomically(self._path, "".join(_line(row) for row in rows if row["step"] <= step))
        return LostSteps(len(dropped), sum(row.get("seconds") or 0 for row in dropped), dropped[-1].get("time"))


class EventsFile(_LinesFile):
    """events.jsonl: start, resume, collectives, evaluation, samples, save, profile, straggler, each end, by time."""

    def write(self, event: str, /, **fields: object) -> None:
        """Append one event with `time` in UTC (ISO 8601, milliseconds). Paths become text, without passwords."""
        self._append(without_passwords(_line({"time": utc_text(time.time()), "event": event, **fields})))


def last_save(path: Path) -> NamedSave | None:
    """The newest save that an events.jsonl names and that no later start went behind; None: no such save.

    Reads the last 64 MiB, and leaves out damaged lines. Raises UsageError for what is no plain file.
    """
    saves: list[NamedSave] = []
    for line in _tail(path).split(b"\n"):
        event = parse_line(line) or {}
        step, address = event.get("step"), str(event.get("path"))
        if type(step) is not int:
            continue
        if event.get("event") == "start":  # at 0 it began anew
            saves = [save for save in saves if save.step <= step]
        elif event.get("event") == "save" and address.isprintable():
            saves.append(NamedSave(step, address, path))
    return saves[-1] if saves else None


def utc_text(seconds: float) -> str:
    """Seconds since 1970 as both files write times: in UTC (ISO 8601, milliseconds)."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def read_jsonl(path: Path, folder: Path | None = None) -> list[dict[str, Any]]:
    """All rows of a file that may be in the middle of being written: a torn last line is left out.

    Raises OSError as `open_regular` with `folder`, and UsageError for any other line that is not a JSON object.
    """
    rows: list[dict[str, Any]] = []
    with open_regular(path, folder, MAX_LOG_BYTES) as file:
        for number, line in enumerate(lines_of(file), start=1):
            text = line.decode(errors="replace")
            row = parse_line(text)
            if row is not None:
                rows.append(row)
            elif line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                raise UsageError(
                    f"{path}:{number}: expected one JSON object a line, found {text.rstrip()[:60]!r}.\n"
                    "  The file was changed by something else: fix that line, or move the file away."
                )
    return rows


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None for anything else."""
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _tail(path: Path) -> bytes:
    """The end of a file, or all of it; empty for an absent one. Raises UsageError for a file that can't be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read(_TAIL_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.\n  Move it away.") from error


def _cut_torn_line(path: Path) -> None:
    """Let the file end with a whole line, so that the next append starts one."""
    last = _tail(path).rpartition(b"\n")[2]
    if last and parse_line(last) is not None:
        with path.open("ab") as file:
            file.write(b"\n")
    elif last:
        os.truncate(path, path.stat().st_size - len(last))


def _line(row: Mapping[str, object]) -> str:
    return json.dumps(_without_nan(row), default=str, allow_nan=False) + "\n"


def _without_nan(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(inner) for key, inner in cast(Mapping[str, object], value).items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in cast(Sequence[object], value)]
    return value


# ------------------------------------------------------------------------------------------------------ the callback


class RunFiles(Callback):
    """config.yaml, metrics.jsonl, samples.jsonl, events.jsonl, STOPPED."""

    def on_start(self, start: RunStart) -> None:
        """Makes the folder and drops the rows of steps that run again."""
        self._folder, self._hosts, self._first = start.folder, start.hosts, start.step
        self._folder.mkdir(parents=True, exist_ok=True)
        self._metrics = MetricsFile(self._folder / "metrics.jsonl")
        lost = self._metrics.truncate_after(start.step)  # first: it refuses a file that something else has written to
        self._samples = MetricsFile(self._folder / "samples.jsonl")
        self._samples.truncate_after(start.step)
        self._events = EventsFile(self._folder / "events.jsonl")
        for name in ("STOPPED", "PROFILE"):
            (self._folder / name).unlink(missing_ok=True)
        write_text_atomically(self._folder / "config.yaml", without_passwords(config_text(start.config)))
        self._events.write(
            "start",
            name=start.config.run.name,
            step=start.step,
            backend=start.engine,
            device=start.device,
            devices=start.devices,
            processes=start.processes,
            hosts=start.hosts,
            steps=start.steps,
            parameters=start.parameters,
            began=utc_text(_process_start()),
            environment=environment(),
            **({"lost": lost._asdict()} if lost else {}),
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
        row = {name: getattr(step, name) for name in _KEYS} | {"time": utc_text(step.ended)}
        if step.is_logged:
            row["processes"] = processes_row(step, self._hosts)
        if step.loss_scale is not None:
            row |= {"loss_scale": step.loss_scale, "skipped_steps": step.skipped_steps}
        row |= {"is_empty": 1} if step.is_empty else {}
        if step.evaluation is not None:
            row |= _evaluation_row(step.evaluation)
        self._metrics.write(row)
        for straggler in step.stragglers:
            self._events.write("straggler", step=step.step, **straggler._asdict())

    def on_evaluate(self, evaluation: EvaluationEnd) -> None:
        figures = asdict(evaluation)
        self._events.write("evaluation", **{**figures, **figures.pop("metrics")})
        if 0 < evaluation.step == self._first:  # of the step before this start, which wrote its row
            self._metrics.add(evaluation.step, _evaluation_row(evaluation))

    def on_samples(self, samples: SamplesEnd) -> None:
        for prompt, text in zip(samples.prompts, samples.texts, strict=True):
            self._samples.write({"step": samples.step, "prompt": prompt, "text": text})
        self._events.write("samples", step=samples.step, seconds=samples.seconds)

    def on_save(self, save: "Saved") -> None:
        self._events.write("save", **save._asdict() | {"path": save.path.absolute()})

    def on_profile(self, profile: ProfileEnd) -> None:
        figures = profile.summary._asdict()
        collectives = {kind.name: kind._asdict() for kind in figures.pop("collectives")}
        shares = {name: value for name, value in figures.items() if isinstance(value, float)}
        steps = {"step": profile.last, "first_step": profile.first, "seconds": profile.seconds}
        self._events.write("profile", **steps, path=profile.folder, **shares, collectives=collectives)

    def on_end(self, end: RunEnd) -> None:
        kind = {"finished": "finish", "failed": "fail"}.get(end.outcome, "stop")
        reason = {} if kind == "finish" else {"reason": end.reason}
        self._events.write(kind, step=end.step, **reason, **end.values)
        if end.outcome == "stopped":
            content = json.dumps({"reason": end.reason, "step": end.step})
            write_text_atomically(self._folder / "STOPPED", content + "\n")


def _evaluation_row(evaluation: EvaluationEnd) -> dict[str, object]:
    """Its part of a row of metrics.jsonl."""
    values = {name: getattr(evaluation, name) for name in ("loss", "perplexity", "tokens")}
    return {f"eval_{name}": value for name, value in {**values, **evaluation.metrics}.items()}


def processes_row(step: StepEnd, hosts: Sequence[str]) -> dict[str, object]:
    """How evenly the processes are loaded, by process index, as each saw it at the start of this step.

    Own seconds leave out waiting for others, which makes wall times even (observe/goodput.py). An imbalance is the
    greatest value over the median; of `hosts`: of their mean own times, None for one host.
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
    """Seconds since 1970. psutil counts from a boot time of whole seconds, the kernel's clock since boot doesn't."""
    if not hasattr(time, "CLOCK_BOOTTIME"):  # not Linux
        return psutil.Process().create_time()
    after_boot = psutil.Process().create_time() - psutil.boot_time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot)


def environment() -> dict[str, str]:
    """Host and versions, for whoever reads the run later."""
    versions = {"host": socket.gethostname(), "python": platform.python_version()}
    for package in ("portable_fsdp", "torch", "torch_xla", "transformers"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
