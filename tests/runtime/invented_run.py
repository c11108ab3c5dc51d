"""Writes the files of an invented run: two starts on different engines, a straggler, evaluations, saves, loads every
tenth step."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

EPOCH = 1_700_000_000.0


def write_run(folder: Path, steps: int = 40, lr: float = 0.001, **config: Mapping[str, Any]) -> Path:
    """The second half ran on xla, after a stop request; each start takes 8 s, its first step 5 s more."""
    folder.mkdir(parents=True)
    clock, half = EPOCH, steps // 2
    rows: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []

    def add(kind: str, **fields: Any) -> None:
        events.append({"time": _text(clock), "event": kind, **fields})

    for first, engine in ((0, "native"), (half, "xla")):
        began, clock = clock, clock + 8
        start = {"step": first, "backend": engine, "device": "cpu", "devices": 2, "processes": 2, "steps": steps}
        add("start", name=folder.name, began=_text(began), environment={"torch": "2.9.0"}, **start)
        for step in range(first + 1, first + half + 1):
            seconds = 1.0 + 5 * (step == first + 1)
            clock += seconds
            row = {"step": step, "loss": 4 - step / steps, "grad_norm": 1.5, "lr": lr, "tokens": 2048}
            row |= {"tokens_per_second": 2048 / seconds, "mfu": None, "memory_bytes": 2**30, "seconds": seconds}
            row |= {"data_seconds": 0.25, "imbalance": 1.5, "time": _text(clock)}
            if step % 10 == 0:
                loads = {"seconds": [1.0, 1.0], "own_seconds": [0.5, 0.75], "data_seconds": [0.25, 0.25]}
                loads["memory_bytes"] = [2**30, 2**30]
                row["processes"] = {**loads, "seconds_imbalance": 1.5, "memory_imbalance": 1.0, "host_imbalance": None}
                row["eval_loss"] = 4.5 - step / steps
            rows.append(row)
        if first == 0:
            add("straggler", step=12, process=1, host="host2", ratio=1.75, slow=9, steps=10)
        clock += 2
        add("evaluation", step=first + half, loss=4.5 - (first + half) / steps, seconds=2.0)
        clock += 1
        add("save", step=first + half, path=f"checkpoints/step-{first + half:08d}", seconds=1.0, blocked_seconds=1.0)
        add("stop", step=half, reason="SIGTERM") if first == 0 else add("finish", step=steps)
        clock += 60
    _write(folder / "metrics.jsonl", rows)
    _write(folder / "events.jsonl", events)
    values = {"run": {"name": folder.name, "dir": str(folder)}, "optim": {"lr": lr}, **config}
    (folder / "config.yaml").write_text(json.dumps(values), encoding="utf-8")  # YAML holds JSON
    return folder


def _text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
