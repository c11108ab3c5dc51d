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
import pytest
import torch
import yaml

from portable_fsdp.checkpoint.manifests import committed_steps, step_of
from portable_fsdp.launch import main
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.runtime.launchers import LAUNCH_VARIABLES, PORTS

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent  # torchrun lies beside python
PYTHON = [sys.executable, "-m", "portable_fsdp.launch"]
TORCHRUN = [str(PROGRAMS / "torchrun"), "--standalone", "--nproc_per_node=2", "-m", "portable_fsdp.launch"]
STARTS: dict[str, list[str]] = {
    "plain": [*PYTHON, "--device=cpu"],
    "native": [*PYTHON, "--device=cpu", "--backend=native", "--num_devices=2"],
    "xla": [*PYTHON, "--device=cpu", "--backend=xla", "--num_devices=2"],
    "xla_fsdp1": [*PYTHON, "--device=cpu", "--backend=xla_fsdp1", "--num_devices=1"],
    "torchrun": [*TORCHRUN, "--device=cpu", "--backend=native"],
}
FAKE_LAUNCHERS = [sys.executable, str(Path(__file__).with_name("fake_launchers.py"))]  # then srun or mpirun
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

SMALL_LLAMA = [
    *("model.architecture.hidden_size=32", "model.architecture.intermediate_size=64", "model.architecture.head_dim=16"),
    *("model.architecture.num_hidden_layers=2", "model.architecture.num_attention_heads=2"),
    *("model.architecture.num_key_value_heads=1", "model.architecture.vocab_size=256"),
    *("data.source=python_docs", "data.path=null", "data.tokenizer=bytes", "data.seq_len=32"),
    *("train.global_batch=4", "train.micro_batch=1"),
]
"""Overrides that shrink each config of configs/ that has an architecture."""

SAVES = ["checkpoint.every=1", "checkpoint.async_save=true", "checkpoint.keep=2", "train.log_every=1"]
"""A run that saves after each step: most moments lie in a save."""


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


class Started(subprocess.Popen[bytes]):
    """A command that runs, in a process group of its own; what it prints goes to files in `cwd`."""

    def __init__(self, command: Sequence[str | Path], cwd: Path, environment: dict[str, str]) -> None:
        name = f"console-{len(list(cwd.glob('*.err')))}"
        self._out, self._err = cwd / f"{name}.out", cwd / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            super().__init__(command, cwd=cwd, env=environment, stdout=out, stderr=err, process_group=0)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait(self, timeout: float | None = LIMIT_S) -> int:
        """The exit code (negative: killed by that signal)."""
        return super().wait(timeout)

    def wait_until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not happened():
            assert self.poll() is None, f"ended with {self.returncode} before that\n{self.err}"
            assert time.monotonic() < deadline, f"nothing after {LIMIT_S:.0f} s\n{self.err}"
            time.sleep(0.005)

    def kill(self) -> None:
        """SIGKILL to it and to all that it started (the workers have groups of their own)."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            processes = [process, *process.children(recursive=True)]
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, timeout=LIMIT_S)
        self.wait()


@contextmanager
def started(command: Sequence[str | Path], cwd: Path, **variables: str) -> Generator[Started]:
    """Run the command in `cwd` with a newcomer's environment and `variables`; nothing of it outlives the block."""
    ours = {"USE_TORCH_XLA", "HF_HUB_OFFLINE", *LAUNCH_VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in ours} | variables
    environment.setdefault("OMP_NUM_THREADS", "1")  # a matrix of 32 x 32 gains nothing, and waiting threads spin
    process = Started(command, cwd, environment)
    try:
        yield process
    finally:
        process.kill()


def finish(command: Sequence[str | Path], cwd: Path, code: int = 0, /, **variables: str) -> Started:
    """The command at its end, which has the exit code `code` and, but for torchrun's 1, no traceback."""
    with started(command, cwd, **variables) as process:
        assert process.wait(2 * LIMIT_S) == code, process.err
    assert code == 1 or "Traceback" not in process.err, process.err
    return process


def require_curve(folder: Path, *arguments: str, rel: float = 5e-5) -> None:
    """`folder`/run has the losses of an uninterrupted run of the same arguments on one process."""
    assert launch(*arguments, "checkpoint.every=null", f"run.dir={folder / 'alone'}") == 0
    assert losses(folder / "run") == pytest.approx(losses(folder / "alone"), rel=rel)


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
    return committed_in(run / "checkpoints")


def committed_in(folder: Path) -> list[int]:
    """The steps that have a checkpoint in this folder."""
    return sorted(step_of(path) or 0 for path in committed_steps(folder))


def contents(folder: Path) -> dict[Path, bytes]:
    """The content of each file in it; a folder in it has none."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def free_port() -> int:
    """One of those that a Slurm job's number leads to."""
    for port in random.sample(PORTS, 50):
        with suppress(OSError), socket.create_server(("localhost", port)):
            return port
    raise AssertionError("no free port")


def two_tasks(launcher: str) -> dict[str, str]:
    """The variables for two tasks of a fake srun or mpirun on one host, which meet at a free port."""
    port = free_port()
    return {"JOB": str(port - PORTS[0])} if launcher == "srun" else {"MASTER_PORT": str(port)}
