"""The launcher on TorchTPU, whose chips are XLA's CPU plugin (tests/torchtpu): as people start it, and what it refuses.

Only `make test-torchtpu` collects this file: it needs an environment of its own.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cases
import psutil
import pytest
import yaml

from portable_fsdp.backends.native.torchtpu import check_launch
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.runtime.errors import EXIT_STOPPED, EXIT_USAGE, BackendError
from portable_fsdp.runtime.launchers import LAUNCH_VARIABLES

ROOT = Path(__file__).parents[2]
LONG = cases.TINY | {
    "train": {"steps": 400, "global_batch": 4, "log_every": 1},
    "optim": {"lr": 0.003, "warmup_steps": 2},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(LONG))
    return tmp_path


def start(
    folder: Path,
    *arguments: str,
    chips: int | None,
    log: str = "log",
    **variables: str,
) -> "subprocess.Popen[Any]":
    """A command, on a host that seems to have this many chips; None: as it is, without the stand-in for a chip."""
    unset = (*LAUNCH_VARIABLES, "TORCH_DEVICE_BACKEND_AUTOLOAD", "TEST_TORCHTPU")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    # 120 s for the last step and the save: on a busy machine torch's own 30 s are few.
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}
    if chips is not None:
        paths = [ROOT, ROOT / "tests/torchtpu", ROOT / "tests/torchtpu/at_start"]
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TEST_TORCHTPU_CHIPS": str(chips)}
    command = [sys.executable, "-m", "portable_fsdp.launch", "--config=tiny.yaml", *arguments]
    with (folder / log).open("w") as file:
        return subprocess.Popen(
            command, cwd=folder, env={**environment, **variables}, stdout=file, stderr=file, start_new_session=True
        )


def end_of(process: "subprocess.Popen[Any]", limit_s: float = 200) -> int:
    """Its exit code; nothing that it started is left."""
    with process:
        try:
            return process.wait(limit_s)
        finally:
            for left in [*psutil.Process().children(recursive=True)]:
                if left.pid == process.pid or process.poll() is None:
                    left.kill()


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(folder / "run" / "metrics.jsonl") if "loss" in row]


def test_a_plain_start_drives_all_chips_stops_and_goes_on_elsewhere(folder: Path) -> None:
    """Elsewhere is a CPU beside torch_tpu, which nothing but the launcher keeps out of torch."""
    process = start(folder, "--device=tpu", chips=2)
    until = time.monotonic() + 150
    rows = folder / "run" / "metrics.jsonl"
    while not (rows.is_file() and len(rows.read_text().splitlines()) >= 5):
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        assert time.monotonic() < until, "no fifth step in 150 s"
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    log = folder / "log"
    assert end_of(process) == EXIT_STOPPED, log.read_text()[-3000:]
    assert "new program" not in log.read_text()
    (begin,) = [row for row in read_jsonl(folder / "run" / "events.jsonl") if row["event"] == "start"]
    assert (begin["backend"], begin["device"], begin["devices"]) == ("native", "TPU", 2)
    done = len(losses(folder))
    last = f"train.stop_at={done + 5}"
    assert end_of(start(folder, "--device=cpu", last, chips=None, log="resumed")) == 0
    on_both = losses(folder)
    (alone := folder / "alone").mkdir()
    (alone / "tiny.yaml").write_text(yaml.safe_dump(LONG))
    assert end_of(start(alone, "--device=cpu", last, chips=None)) == 0
    assert len(on_both) == done + 5
    assert on_both == pytest.approx(losses(alone), rel=1e-5)


def test_a_second_start_with_a_cache_compiles_nothing(folder: Path) -> None:
    """TorchTPU also caches programs in the host's memory. Under its own cache name this test shares none of them."""
    words, counts = ("train.steps=4", f"compile.cache_dir={folder / 'cache'}", "checkpoint.resume=none"), list[int]()
    name_in_memory = f"test_{os.getpid()}_{time.time_ns()}"
    try:
        for name in ("first", "second"):
            process = start(
                folder,
                "--device=tpu",
                *words,
                f"run.dir={name}",
                chips=1,
                log=f"{name}.log",
                TORCH_TPU_TIER2_COMPILATION_CACHE=name_in_memory,
            )
            assert end_of(process) == 0
            counts += map(int, re.findall(r"num_compilations=(\d+)", (folder / f"{name}.log").read_text()))
    finally:
        shutil.rmtree(Path("/dev/shm/torch_tpu_cache") / name_in_memory, ignore_errors=True)
    first, second = counts
    assert first > 100
    assert second == 0


def test_a_process_on_the_only_chip_compiles_nothing_after_its_third_step(folder: Path) -> None:
    """Nor does a save; TorchTPU would print a new program."""
    overrides = ("train.steps=8", "checkpoint.every=5")
    assert end_of(start(folder, "--device=tpu", *overrides, chips=1)) == 0, (folder / "log").read_text()[-3000:]
    text = (folder / "log").read_text()
    assert "dump-on-miss mode set to: true" in text
    assert "new program" not in text
    assert "module @" not in text
    assert re.search(r"TorchTPU compiled \d{2,3} programs in this process", text)
    assert len(losses(folder)) == 8
    assert "get_device_name is experimental" not in text
    assert "TPU is using HIGHEST precision" not in text


def test_two_hosts_are_one_run(folder: Path, free_port: int) -> None:
    slice_ = {"TPU_WORKER_HOSTNAMES": "localhost,localhost", "TEST_TORCHTPU_PORT": str(free_port)}
    hosts = [
        start(folder, "--device=tpu", "train.steps=3", chips=1, log=f"host{n}", TPU_WORKER_ID=str(n), **slice_)
        for n in (0, 1)
    ]
    codes = [end_of(process) for process in hosts]
    assert codes == [0, 0], [(folder / f"host{n}").read_text()[-2000:] for n in (0, 1)]
    assert len(losses(folder)) == 3
    (begin,) = [row for row in read_jsonl(folder / "run" / "events.jsonl") if row["event"] == "start"]
    assert begin["devices"] == 2


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


IMPORTS_TORCH_FIRST = """
import torch, portable_fsdp
from portable_fsdp.runtime.errors import BackendError
try:
    portable_fsdp.open_backend(portable_fsdp.load_config("tiny.yaml"), device="cpu")
except BackendError as error:
    print(error)
"""


def test_a_program_that_lets_torch_load_torch_tpu_without_a_chip_is_refused(folder: Path) -> None:
    """Its first backward would hang."""
    variables = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS_TORCH_FIRST],
        env={**variables, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "Set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stdout, done.stderr


BAD_STARTS = {
    "no chip": (0, {}, "no TPU chips found on this host"),
    "more processes than chips": (4, {"--num_devices": "8"}, "expected at most 4, the chips of this host"),
    "chips that are no slice": (4, {"--num_devices": "3"}, "a number of chips that is a slice (1, 2, 4)"),
    "a launcher that doesn't tell libtpu the slice": (
        2,
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        | {"MASTER_PORT": "1"},
        "found 2 process(es), 2 chip(s) on this host and 0 address(es)",
    ),
    "several slices": (2, {"MEGASCALE_NUM_SLICES": "2"}, "expected one slice"),
    "a host that has no number": (2, {"TPU_WORKER_HOSTNAMES": "a,b"}, "but TPU_WORKER_ID is not set"),
}


@pytest.mark.parametrize("name", BAD_STARTS)
def test_a_bad_start_is_one_sentence(name: str, folder: Path) -> None:
    chips, variables, message = BAD_STARTS[name]
    flags = [f"{name}={value}" for name, value in variables.items() if name.startswith("--")]
    environment = {name: value for name, value in variables.items() if not name.startswith("--")}
    code = end_of(start(folder, "--device=tpu", "train.global_batch=24", *flags, chips=chips, **environment), 100)
    text = (folder / "log").read_text()
    assert code == EXIT_USAGE, text
    assert message in text
    assert "Traceback" not in text


def test_a_process_for_several_chips_is_refused() -> None:
    addresses = {"TORCH_TPU_SLICEBUILDER_ADDRESSES": "localhost:1,localhost:2"}
    check_launch({}, 1, 1)
    check_launch(addresses, 2, 2)
    for environ, processes, chips in (({}, 1, 4), ({}, 2, 2), (addresses, 4, 4)):
        with pytest.raises(BackendError, match="expected one process per chip"):
            check_launch(environ, processes, chips)
