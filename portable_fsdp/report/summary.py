"""The figures of a run: what the head of the page and the Markdown say."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from portable_fsdp.checkpoint.report import time_text
from portable_fsdp.observe.goodput import PARTS, duration
from portable_fsdp.report.read import Numbers, RunRecord
from portable_fsdp.runtime.errors import printable

_MOST_SAVES = 20  # and samples, in Markdown
_MOST_STRAGGLERS = 8

Table = list[tuple[str, str]]


def figures(run: RunRecord) -> Table:
    """Name and value, for people; what the files don't know is left out."""
    engines = dict.fromkeys(engine(attempt.start) for attempt in run.attempts)
    rows: Table = [("status", run.status), ("engine", " → ".join(engines) or "?")]
    if run.rows:
        total = run.attempts[-1].start.get("steps") if run.attempts else None
        done = f"{run.rows[-1]['step']:,}"
        rows.append(("steps", f"{done} of {total:,}" if isinstance(total, int) else done))
        if run.every == 1:
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
    """Each part of the wall time that isn't empty: its name, seconds, and share (0 to 1); the largest first."""
    if run.goodput is None or run.goodput.wall_seconds <= 0:
        return []
    parts = sorted(run.goodput.parts.items(), key=lambda part: -part[1])
    return [(name, seconds, seconds / run.goodput.wall_seconds) for name, seconds in parts if round(seconds, 3) > 0]


def starts(run: RunRecord) -> list[list[str]]:
    """A row for each start: when, from which step, on what, to which step, its end."""
    rows = [["started (UTC)", "from step", "engine", "last step", "end"]]
    for attempt in run.attempts:
        end, unknown = attempt.end, "-" if attempt is run.attempts[-1] else "no end recorded"
        rows.append(
            [
                time_text(attempt.start["time"]),
                str(attempt.start["step"]),
                engine(attempt.start),
                str(attempt.rows[-1]["step"]) if attempt.rows else "-",
                unknown if end is None else f"{end['event']} {end.get('reason', '')}".strip(),
            ]
        )
    return rows


def saves(run: RunRecord) -> list[list[str]]:
    """Step, time and name of the newest checkpoints."""
    newest = run.of_kind("save")[-_MOST_SAVES:]
    return [[str(e["step"]), time_text(e["time"]), Path(str(e.get("path", ""))).name] for e in newest]


def environment(run: RunRecord) -> list[list[str]]:
    """Host and versions of the newest start."""
    newest = run.attempts[-1].start if run.attempts else {}
    return [[str(name), str(value)] for name, value in (newest.get("environment") or {}).items()]


def engine(start: Mapping[str, object]) -> str:
    """`native, 2 x cpu` of a start event."""
    return f"{start.get('backend', '?')}, {start.get('devices', '?')} x {start.get('device', '?')}"


def config_differences(runs: Sequence[RunRecord]) -> list[list[str]]:
    """Keys that the runs set differently: a row each, a column for each run."""
    keys = dict.fromkeys(key for run in runs for key in run.config if key != "run.dir")  # it always differs
    differing = [key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1]
    values = [[key, *(str(run.config.get(key, "-")) for run in runs)] for key in differing]
    return [["key", *(run.name for run in runs)], *values]


def markdown(runs: Sequence[RunRecord]) -> str:
    """All but the curves and the whole config, as Markdown."""
    parts: list[str] = []
    for run in runs:
        parts += [f"## {_cell(run.name)}", _markdown_table([("", ""), *figures(run)])]
        if spent := accounts(run):
            body = [[name, duration(seconds), f"{share:.1%}", PARTS[name]] for name, seconds, share in spent]
            parts.append(_markdown_table([["time in", "spent", "share", "what it is"], *body]))
        checkpoints = [["step", "saved (UTC)", "checkpoint"], *saves(run)]
        tables = starts(run), checkpoints, [["environment", "version"], *environment(run)]
        parts += [_markdown_table(table) for table in tables if len(table) > 1]
        for sample in run.samples[-_MOST_SAVES:]:
            parts.append(f"Sample of step {sample['step']}:\n\n{_quoted(str(sample.get('text')))}")
        for text in run.profiles:
            parts.append(_quoted(text))
        if run.damage:
            parts.append(run.damage)
    differing = config_differences(runs)
    if len(runs) > 1 and len(differing) > 1:
        parts += ["## What differs", _markdown_table(differing)]
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
