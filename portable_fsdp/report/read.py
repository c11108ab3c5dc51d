"""A run's folder as data, and its figures. The run may still be active, or have ended in any way; damaged lines are
left out."""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml
from numpy.typing import NDArray

from portable_fsdp.config import yaml_text
from portable_fsdp.observe.goodput import PARTS, Attempt, Goodput, attempts, duration, goodput
from portable_fsdp.observe.run_files import OF_EXPERTS, ROW_KEYS
from portable_fsdp.runtime.errors import UsageError, printable
from portable_fsdp.runtime.failures import parse_line
from portable_fsdp.runtime.files import open_inside, read_inside
from portable_fsdp.runtime.host import time_text

JsonObject = Mapping[str, Any]
Numbers = NDArray[np.float64]
Table = list[tuple[str, str]]

_MOST_SAVES = 20  # in Markdown also the limit on samples
_MOST_STRAGGLERS = 8
_MOST_SAMPLES = 50
_MOST_PROFILES = 10


@dataclass(frozen=True)
class RunRecord:
    """Contents of one run's files."""

    folder: Path
    config: Mapping[str, Any]  # by dotted key
    rows: Sequence[JsonObject]  # of metrics.jsonl, by step
    events: Sequence[JsonObject]
    samples: Sequence[JsonObject]  # the newest of samples.jsonl
    skipped: Mapping[str, int]  # file name -> number of damaged lines

    @property
    def name(self) -> str:
        return name_of(self.folder, self.config)

    @cached_property
    def attempts(self) -> list[Attempt]:
        return attempts(self.events, self.rows)

    @cached_property
    def goodput(self) -> Goodput | None:
        return goodput(self.events, self.rows)

    @cached_property
    def steps(self) -> Numbers:
        return self.column("step")

    def column(self, *keys: str) -> Numbers:
        """Return a number per row, NaN if missing: `column("loss")`, `column("processes", "seconds_imbalance")`."""
        values: list[Any] = [*self.rows]
        for key in keys:  # isinstance with Mapping would be slow
            values = [value.get(key) if type(value) is dict else None for value in values]
        return np.array([value if _is_number(value) else np.nan for value in values], dtype=float)

    @cached_property
    def hours(self) -> Numbers:
        """Hours of training, all starts together, at the end of each row's step."""
        return np.cumsum(np.nan_to_num(self.column("seconds"))) / 3600

    def of_kind(self, kind: str) -> list[JsonObject]:
        return [event for event in self.events if event["event"] == kind]

    @cached_property
    def profiles(self) -> list[str]:
        """Summaries of profiled steps, by step."""
        folder = self.folder / "profile"
        with _readable():
            paths = sorted(folder.glob("*/summary.txt"), key=lambda path: path.lstat().st_mtime)
            return [read_inside(path, self.folder).decode(errors="replace") for path in paths[-_MOST_PROFILES:]]

    @property
    def damage(self) -> str:
        """The number of damaged lines, which were left out, in words; empty without any."""
        total, files = sum(self.skipped.values()), ", ".join(name for name, count in self.skipped.items() if count)
        return f"{total} damaged line{'s were' if total > 1 else ' was'} left out: {files}" if total else ""

    @property
    def status(self) -> str:
        """End of the run, as far as its files show."""
        end = self.attempts[-1].end if self.attempts else None
        if end is None:
            return "not finished: running, killed, or ended by a library with exit code 0"
        verb = {"finish": "finished at", "stop": "stopped after", "fail": "failed after"}[end["event"]]
        reason = "" if end["event"] == "finish" else f" ({end.get('reason', 'unknown')})"
        return f"{verb} step {end['step']}{reason}"


def name_of(folder: Path, config: Mapping[str, Any]) -> str:
    """Return `run.name` if the config has one, and the folder's name."""
    last, name = folder.resolve().name, config.get("run.name")
    return last if name in (None, last) else f"{name} ({last})"


def read_config(folder: Path) -> dict[str, Any]:
    """Read a run's config by dotted key; empty if config.yaml is missing or no run wrote it.

    Raises UsageError for a folder that is no run's.
    """
    if not (folder / "events.jsonl").is_file():
        raise UsageError(f"{folder}: this is no run's folder: it has no events.jsonl.")
    path = folder / "config.yaml"
    try:
        with _readable():
            text = read_inside(path, folder) if os.path.lexists(path) else b""
        _, value = yaml_text.parse(text.decode())
        return dict(_flat(value, ""))
    except (ValueError, yaml.YAMLError):
        return {}


def read_run(folder: Path) -> RunRecord:
    """Read the folder of a run. Raises UsageError for one that isn't."""
    config = read_config(folder)
    rows, bad_rows, _ = read_records(folder / "metrics.jsonl", "step", "seconds", part_of=_part_of)
    events, bad_events, _ = read_records(folder / "events.jsonl", "event", "time")
    samples, bad_samples, _ = read_records(folder / "samples.jsonl", "step")
    by_step = {row["step"]: row for row in rows}
    skipped = {"metrics.jsonl": bad_rows, "events.jsonl": bad_events, "samples.jsonl": bad_samples}
    rows = [by_step[step] for step in sorted(by_step)]
    return RunRecord(folder, config, rows, events, samples[-_MOST_SAMPLES:], skipped)


def _part_of(row: JsonObject) -> JsonObject:
    """Return the part of a row that the report needs: a run of many processes has long rows."""
    part = {key: row[key] for key in (*ROW_KEYS, *OF_EXPERTS, "eval_loss") if _is_number(row.get(key))}
    if isinstance(row.get("processes"), dict) and _is_number(shared := row["processes"].get("memory_imbalance")):
        part["processes"] = {"memory_imbalance": shared}
    return part | {"time": row.get("time")}


@contextmanager
def _readable() -> Generator[None]:
    """Turn OSError into a UsageError in one sentence."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename}: can't be read: {error.strerror}.") from None


def read_records(
    path: Path, *needed: str, offset: int = 0, part_of: Callable[[JsonObject], JsonObject] | None = None
) -> tuple[list[JsonObject], int, int]:
    """Read the objects from byte `offset` on that have the `needed` keys; with `part_of` keep only that part of each.

    Return them, the number of other lines, and the offset after the last. A torn line isn't read; a file that has
    become shorter is read from its beginning.
    """
    records, skipped = list[JsonObject](), 0
    if not os.path.lexists(path):
        return records, skipped, 0
    with _readable(), open_inside(path, path.parent) as file:
        offset = file.seek(offset if offset <= os.fstat(file.fileno()).st_size else 0)
        for line in file:
            record = parse_line(line)
            if record is not None and _is_whole(record, needed):
                records.append(part_of(record) if part_of else record)
            elif line.endswith(b"\n"):
                skipped += 1
            else:
                break
            offset += len(line)
    return records, skipped, offset


def _is_whole(record: JsonObject, needed: Sequence[str]) -> bool:
    """Whether all that the report needs of a record is present; null means unknown."""
    return all(record.get(key) is not None for key in (*needed, *_NEEDED.get(str(record.get("event")), ())))


def _is_number(value: object) -> bool:
    return (type(value) is float or isinstance(value, int | float)) and abs(value) < 1e300  # NaN isn't


_NEEDED = {
    **{"start": ("step",), "save": ("step",), "finish": ("step",), "stop": ("step",), "fail": ("step",)},
    **{"evaluation": ("step", "loss"), "straggler": ("step", "process", "ratio")},
}


def _flat(value: object, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)] if prefix else []
    inner = cast(dict[object, object], value).items()
    return [pair for key, part in inner for pair in _flat(part, f"{prefix}.{key}" if prefix else str(key))]


# ------------------------------------------------------------------------------------------------------------ figures


def figures(run: RunRecord) -> Table:
    """Return name and value of each known figure, as text."""
    engines = dict.fromkeys(engine(attempt.start) for attempt in run.attempts)
    rows: Table = [("status", run.status), ("engine", " → ".join(engines) or "?")]
    if run.rows:
        total = run.attempts[-1].start.get("steps") if run.attempts else None
        done = f"{run.rows[-1]['step']:,}"
        rows.append(("steps", f"{done} of {total:,}" if isinstance(total, int) else done))
        rows.append(("tokens", f"{int(np.nansum(run.column('tokens'))):,}"))
    if len(losses := _known(run, "loss")):
        rows.append(("loss", f"{losses[0]:.4f} → {losses[-1]:.4f}"))
    if evaluations := run.of_kind("evaluation"):
        best = min(evaluations, key=lambda event: event["loss"])
        rows.append(("best eval loss", f"{best['loss']:.4f} (step {best['step']})"))
    if len(speeds := _known(run, "tokens_per_second")):  # medians: the first step of a start compiles
        rows.append(("tokens per second", f"{np.median(speeds):,.0f} (median)"))
    if len(shares := _known(run, "mfu")):
        rows.append(("MFU", f"{np.median(shares):.1%} (median)"))
    if len(memory := _known(run, "memory_bytes")):
        rows.append(("peak memory", f"{memory.max() / 2**30:.2f} GiB"))
    if run.goodput is not None:
        rows.append(("wall time", duration(run.goodput.wall_seconds)))
        rows += [("goodput", f"{run.goodput.share:.1%}"), ("starts", str(len(run.attempts)))]
    for event in run.of_kind("straggler")[-_MOST_STRAGGLERS:]:
        process = f"process {event['process']} on {event.get('host', '?')}"
        rows.append(("straggler", f"{process}: {event['ratio']:.1f}x the median, at step {event['step']}"))
    return rows


def accounts(run: RunRecord) -> list[tuple[str, float, float]]:
    """Return name, seconds and share (0 to 1) of each part of the wall time that isn't empty; the largest first."""
    if run.goodput is None or run.goodput.wall_seconds <= 0:
        return []
    parts = sorted(run.goodput.parts.items(), key=lambda part: -part[1])
    return [(name, seconds, seconds / run.goodput.wall_seconds) for name, seconds in parts if round(seconds, 3) > 0]


def tables(run: RunRecord) -> dict[str, list[list[str]]]:
    """Return the tables that have rows, by title: the starts, the newest checkpoints, the environment of the last
    start. The first row of each is its head."""
    starts = [["started (UTC)", "from step", "engine", "last step", "end"]]
    for attempt in run.attempts:
        last = str(attempt.rows[-1]["step"]) if attempt.rows else "-"
        end = "-" if attempt is run.attempts[-1] else "no end recorded"
        if attempt.end is not None:
            end = f"{attempt.end['event']} {attempt.end.get('reason', '')}".strip()
        step = str(attempt.start["step"])
        starts.append([time_text(attempt.start["time"]), step, engine(attempt.start), last, end])
    saves = [["step", "saved (UTC)", "checkpoint"]]
    for event in run.of_kind("save")[-_MOST_SAVES:]:
        saves.append([str(event["step"]), time_text(event["time"]), Path(str(event.get("path", ""))).name])
    newest = (run.attempts[-1].start.get("environment") or {}) if run.attempts else {}
    environment = [["environment", "version"], *([str(name), str(value)] for name, value in newest.items())]
    titled = {"Starts": starts, "Newest checkpoints": saves, "Environment of the last start": environment}
    return {title: rows for title, rows in titled.items() if len(rows) > 1}


def engine(start: Mapping[str, object]) -> str:
    """Format a start event's engine: `native, 2 x cpu`."""
    return f"{start.get('backend', '?')}, {start.get('devices', '?')} x {start.get('device', '?')}"


def config_differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Return the keys that differ between runs: a row per key, a column per run."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "run.dir")  # it always differs
    differing = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]
    values = [[key, *(str(run.config.get(key, "-")) for run in runs)] for key in differing]
    return [["key", *(run.name for run in runs)], *values]


def markdown(runs: Sequence[RunRecord]) -> str:
    """Format all but the curves and the whole config as Markdown."""
    parts: list[str] = []
    for run in runs:
        parts += [f"## {_cell(run.name)}", _markdown_table([("", ""), *figures(run)])]
        if spent := accounts(run):
            body = [[name, duration(seconds), f"{share:.1%}", PARTS[name]] for name, seconds, share in spent]
            parts.append(_markdown_table([["part", "time", "share", "meaning"], *body]))
        parts += map(_markdown_table, tables(run).values())
        for sample in run.samples[-_MOST_SAVES:]:
            parts.append(f"Sample of step {sample['step']}:\n\n{_quoted(str(sample.get('text')))}")
        parts += [*map(_quoted, run.profiles), *filter(None, [run.damage])]
    if len(runs) > 1 and len(differing := config_differences(runs)) > 1:
        parts += ["## Config differences", _markdown_table(differing)]
    return "\n\n".join(parts) + "\n"


def _quoted(text: str) -> str:
    return "\n".join(f"    {printable(line)}" for line in text.splitlines())


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _cell(text: str) -> str:
    return printable(text).replace("|", r"\|").replace("\n", " ")


def _known(run: RunRecord, key: str) -> Numbers:
    column = run.column(key)
    return column[np.isfinite(column)]
