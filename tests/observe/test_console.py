"""What a run prints: its lines, its summary, and the live display on a terminal."""

import io
import os
import pty
import re
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cases import TINY
from rich.console import Console as Terminal
from rich.progress import Task, TaskID

from portable_fsdp.observe.callbacks import StepEnd
from portable_fsdp.observe.console import Console
from portable_fsdp.observe.goodput import Pace
from portable_fsdp.observe.live_display import _Figures
from portable_fsdp.observe.run_files import processes_row

VALUES: dict[str, Any] = {
    **dict.fromkeys(field.name for field in fields(StepEnd)),
    **{"step": 10, "steps": 20, "loss": 2.3125, "grad_norm": 0.9, "tokens_per_second": 3100.0, "mfu": 0.0775},
    **{"memory_bytes": 3 * 2**29, "memory_limit": 15 * 2**30, "device_flops": 7.75e12, "seconds_left": 8.0},
    **{"is_logged": True, "stragglers": (), "process_seconds": (2.0, 2.0)},
}
STEP = StepEnd(**VALUES)

CONFIG = TINY | {
    "data": {"source": "python_docs", "seq_len": 32, "eval_split": "2%"},
    "train": {"steps": 30, "global_batch": 2, "log_every": 10, "eval_every": 15},
    "optim": {"lr": 0.003},
}


LINES: list[tuple[dict[str, Any], str]] = [
    ({}, "memory: 1.50GiB(10%)  tps: 3,100  tflops: 7.75  mfu: 7.8%"),
    ({"memory_limit": None, "mfu": None}, "memory: 1.50GiB  tps: 3,100  tflops: 7.75"),
    ({"memory_bytes": None, "mfu": None, "device_flops": None}, "tps: 3,100"),
    ({"memory_bytes": None, "mfu": 4e-4, "device_flops": 4e9}, "tps: 3,100"),  # they would show as 0
]


def test_a_line_leaves_out_what_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    for changes, expected in LINES:
        step, console = replace(STEP, **changes), Console()
        caplog.clear()
        with caplog.at_level("INFO"):
            console.on_step(replace(step, seconds_left=None))
            console.on_step(replace(step, step=11, is_logged=False))
            console.on_step(replace(step, step=12))
        line = "  loss: 2.3125  grad_norm: 0.9000  " + expected
        assert caplog.messages == [f"step: 10/20{line}", f"step: 12/20{line}  eta: 8.0 s"]


def test_the_time_left_counts_evaluations_and_saves_and_leaves_out_the_first_step() -> None:
    """Steps of 2 s, and 10 s after every fifth one; the first takes 100 s."""
    pace, left, now = Pace(), list[float | None](), 98.0
    for step in range(1, 52):
        now += 2
        left.append(pace.time_left(now, 100 - step))
        now += 10 * (step % 5 == 0)
    assert left[:2] == [None, 98 * 2]
    assert left[50] == pytest.approx(49 * (2 + 10 / 5))
    assert pace.time_left(now, 0) == 0


def test_imbalance_of_processes_is_the_greatest_over_the_median() -> None:
    nan = float("nan")
    step = replace(STEP, process_seconds=(2.0, 6.0, 1.0), process_own_seconds=(1.0, 3.0, 1.0))
    step = replace(step, process_data_seconds=(0.0, 0.5, 0.0), process_memory_bytes=(nan, 5.0, 5.0))
    assert processes_row(step, ["host1", "host1", "host2"]) == {
        **{"seconds": (2.0, 6.0, 1.0), "own_seconds": (1.0, 3.0, 1.0), "data_seconds": (0.0, 0.5, 0.0)},
        **{"memory_bytes": (nan, 5.0, 5.0), "memory_imbalance": None},
        "seconds_imbalance": 3.0,  # over the mean it would be 2
        "host_imbalance": pytest.approx(4 / 3),  # 2 s and 1 s, and 1.5 s between them
    }
    two = replace(STEP, process_memory_bytes=(1.0, 3.0), process_own_seconds=(1.0, 1.0))
    row = processes_row(two, ["host1", "host1"])
    assert (row["memory_imbalance"], row["host_imbalance"]) == (1.5, None)


@pytest.mark.slow
def test_on_a_terminal_lines_scroll_above_a_live_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    ours, theirs = pty.openpty()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "portable_fsdp.launch", "--device=cpu", "--config=config.yaml"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=theirs) as process:
        os.close(theirs)
        output = _read_all(ours)
        assert process.wait(60) == 0, output
    plain = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", output).replace("\r", "\n")
    assert output.rfind("\x1b[?25h") > output.rfind("\x1b[?25l") > 0, "the cursor was hidden, and comes back"
    assert re.search(r"^step +\d+/30 .*loss \d", plain, re.MULTILINE), plain
    lines = [line.rstrip() for line in plain.splitlines()]
    assert max(map(len, lines)) <= 80
    live = [line for line in lines if re.match(r"step +30/30 ", line)]
    assert re.search(r"eta \S+ s  loss \d+\.\d{4} \(eval \d+\.\d{4}\)  saved 15\b", live[-1]), live
    assert not re.search(r"…|\w\.\.\.", output), "nothing is cut inside a word"
    logged = re.findall(r"^20\S+ [A-Z]+ (.*)$", (tmp_path / "run/logs/run.log").read_text(), re.MULTILINE)
    assert max(map(len, logged)) > 80
    words = " ".join(plain.split())
    assert [line for line in logged if " ".join(line.split()) not in words] == [], "wrapped between words"
    kept = (tmp_path / "run/logs/stderr-0.log").read_text()
    assert "\x1b" not in kept
    steps = [" ".join(line.split()) for line in logged if line.startswith("step: ")]
    assert [line for line in steps if line not in " ".join(kept.split())] == []
    for beginning in ("step: 10/30  loss: ", "step: 30  eval_loss: ", "saved ", "30 steps, 1,920 tokens in "):
        assert any(line.strip().startswith(beginning) for line in lines), (beginning, plain)
    assert "run folder: run; " in plain
    assert "data.seq_len=32" in plain
    pattern = r"last loss \d\.\d{4}; best eval loss \d\.\d{4} \(step \d+\); goodput \d+% of .* since the first process"
    assert re.search(pattern, words), words
    assert "  last checkpoint: run/checkpoints/step-00000030" in lines
    of_run = "report run", "evaluate run", "checkpoint export run run/export", 'sample run --prompt="The "'
    assert [command for command in of_run if f"    python -m portable_fsdp.{command}" not in lines] == []


def test_a_line_that_a_narrower_terminal_wrapped_is_erased() -> None:
    written = io.StringIO()
    terminal = Terminal(file=written, width=100, force_terminal=True)
    figures = _Figures(terminal)
    task = Task(TaskID(0), "", 1, 0, _get_time=time.monotonic, fields={"now": ["loss 1"]})
    assert figures.render(task).texts == ["loss 1"]
    assert written.getvalue() == ""
    terminal.width = 30
    figures.render(task)
    assert written.getvalue() == "\r\x1b[3A\x1b[J"  # 100 columns had become four lines
    figures.render(task)
    assert written.getvalue().count("J") == 1


def _read_all(descriptor: int) -> str:
    """Until the other end is closed, which a pseudo-terminal tells as an error."""
    chunks = list[bytes]()
    with suppress(OSError), open(descriptor, "rb", buffering=0) as file:
        for chunk in iter(lambda: file.read(65536), b""):
            chunks.append(chunk)
    return b"".join(chunks).decode()
