"""Starts the command line for the tests of this folder: in this process where that is enough, else as people do."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from portable_fsdp.checkpoint.format import committed_steps, step_of
from portable_fsdp.launch import main
from portable_fsdp.metrics.sinks import read_jsonl
from portable_fsdp.runtime.process import LAUNCH_VARIABLES
from portable_fsdp.runtime.tasks import PORTS

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent  # torchrun lies beside python
PYTHON = [sys.executable, "-m", "portable_fsdp.launch"]
TORCHRUN = [str(PROGRAMS / "torchrun"), "--standalone", "--nproc_per_node=2", "-m", "portable_fsdp.launch"]
LIMIT_S = 120.0

TINY = {
    "run": {"dir": "run"},
    "model": {
        "architecture": {
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32,
            "tie_word_embeddings": True,
        }
    },
    "data": {"source": "python_docs", "seq_len": 32},
    "train": {"steps": 6, "global_batch": 4, "log_every": 2},
    "optim": {"lr": 0.003, "warmup_steps": 2},
    "checkpoint": {"every": 4},
}


def tiny_config(folder: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


def launch(*arguments: str | Path) -> int:
    """The exit code of a plain start, in this process; threads and signals are as they were afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    try:
        return main([str(argument) for argument in arguments])
    finally:
        torch.set_num_threads(threads)
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


class Started:
    """A command that runs, in a process group of its own."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self._process, self._out, self._err = process, out, err

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """The exit code, as Popen gives it (negative: killed by that signal)."""
        return self._process.wait(limit_s)

    def send(self, number: signal.Signals) -> None:
        """As `kill` does: to the first process alone."""
        self._process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """As the terminal does: to the whole foreground process group."""
        os.killpg(self._process.pid, signal.SIGINT)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            assert self._process.poll() is None, f"ended with {self._process.returncode} before that\n{self.err}"
            assert time.monotonic() < deadline, f"nothing after {LIMIT_S:.0f} s\n{self.err}"
            time.sleep(0.005)

    def kill(self) -> None:
        """SIGKILL to it and to all that it started (the workers have groups of their own)."""
        try:
            parent = psutil.Process(self._process.pid)
            processes = [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, timeout=LIMIT_S)
        self._process.wait(LIMIT_S)


@contextmanager
def started(command: Sequence[str | Path], cwd: Path, **variables: str) -> Generator[Started]:
    """Run the command in `cwd` with a newcomer's environment and `variables`; nothing of it outlives the block."""
    ours = {"USE_TORCH_XLA", "HF_HUB_OFFLINE", *LAUNCH_VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in ours} | variables
    environment.setdefault("OMP_NUM_THREADS", "1")  # a matrix of 32 x 32 gains nothing, and waiting threads spin
    number = len(list(cwd.glob("*.err")))
    out, err = cwd / f"console-{number}.out", cwd / f"console-{number}.err"
    with out.open("wb") as out_file, err.open("wb") as err_file:
        process = subprocess.Popen(
            [str(word) for word in command], cwd=cwd, env=environment, stdout=out_file, stderr=err_file, process_group=0
        )
    running = Started(process, out, err)
    try:
        yield running
    finally:
        running.kill()


def losses(run: Path) -> list[float]:
    """The loss of each step, after checking that each step from 1 on stands there once, in order."""
    rows = read_jsonl(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def events(run: Path, name: str) -> list[dict[str, Any]]:
    """The events of one kind, in order."""
    return [event for event in read_jsonl(run / "events.jsonl") if event["event"] == name]


def committed(run: Path) -> list[int]:
    """The steps that have a checkpoint."""
    return sorted(step_of(path) or 0 for path in committed_steps(run / "checkpoints"))


def free_port() -> int:
    """One of those that a Slurm job's number leads to."""
    for port in random.sample(PORTS, 50):
        with suppress(OSError), socket.create_server(("localhost", port)):
            return port
    raise AssertionError("no free port")
