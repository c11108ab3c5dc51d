"""What ends a run: signals, its launcher's end. Who launched it: test_who_started.py."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from portable_fsdp.runtime import rendezvous as module
from portable_fsdp.runtime.errors import ConfigError, TrainingError
from portable_fsdp.runtime.launchers import OUR_RUNS
from portable_fsdp.runtime.rendezvous import open_store
from portable_fsdp.runtime.signals import Stopped, StopRequest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_sets_the_flag_once_and_the_old_handler_comes_back(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.begin_steps()
        stop.last_step = "step 7"
        assert (stop.requested, stop.reason) == (False, None)
        for each in (number, signal.SIGINT, signal.SIGTERM):  # the first reason stays
            os.kill(os.getpid(), each)
        assert (stop.requested, stop.reason) == (True, number.name)
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err == f"{number.name}: ending after step 7 at the latest and its save\n"
    with pytest.raises(RuntimeError), StopRequest():
        raise RuntimeError
    assert signal.getsignal(number) is before


def test_a_request_ends_at_once_what_comes_before_the_first_step() -> None:
    with StopRequest(), pytest.raises(Stopped, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_request_ends_a_main_thread_that_python_cannot_interrupt() -> None:
    """As a compiler that has let go of Python's lock."""
    code = (
        "import hashlib\nfrom portable_fsdp.runtime.signals import StopRequest\n"
        "with StopRequest(grace_s=0.2):\n"
        "    print('ready', flush=True)\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**30)\n"
        "    print('never', flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)  # until the hash has begun: before it Python would see the signal
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30) == ("", "stopped before the first step on request (SIGTERM)\n")
    assert process.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_request_interrupts(number: signal.Signals) -> None:
    with StopRequest(same_press_s=0.05) as stop:
        stop.begin_steps()
        try:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # the launcher's copy of the same request
        except KeyboardInterrupt:
            pytest.fail("one request was taken for two")
        assert stop.reason == number.name
        time.sleep(0.1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_what_announces_a_sigterm_is_no_first_request(capfd: pytest.CaptureFixture[str]) -> None:
    """The scheduler's SIGTERM comes while the run saves: it mustn't skip that save."""
    with StopRequest(same_press_s=0.05) as stop:
        stop.begin_steps()
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            assert not stop.is_by_signal
            time.sleep(0.1)
            os.kill(os.getpid(), number)
        assert (stop.reason, stop.is_by_signal) == ("SIGUSR1", True)
        time.sleep(0.1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == (
        "SIGUSR1: ending after the current step at the latest and its save\n"
        "second SIGTERM: ending now, without waiting for the current step and its save\n"
    )


ASK_THE_KERNEL = """
import ctypes, os
from portable_fsdp.runtime.signals import end_with_agent
end_with_agent(os.environ)
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
print(number.value)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own")
def test_a_worker_ends_with_its_agent() -> None:
    for run, code, output in (
        ({}, 0, "0"),  # a plain start: the shell that made it may end
        ({"TORCHELASTIC_RUN_ID": "some-id"}, 0, "9"),  # torchrun's worker
        ({"TORCHELASTIC_RUN_ID": f"{OUR_RUNS}{os.getpid()}"}, 0, "9"),  # our own
        ({"TORCHELASTIC_RUN_ID": f"{OUR_RUNS}1"}, -signal.SIGKILL, ""),  # whose agent ended while Python started
    ):
        environ = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"} | run
        done = subprocess.run([sys.executable, "-c", ASK_THE_KERNEL], env=environ, capture_output=True, text=True)
        assert (done.returncode, done.stdout.strip()) == (code, output), run


STOPPED_AS_IT_OPENS_ITS_CONFIG = """
import os, signal, sys
from portable_fsdp import launch

def stop(event, arguments):
    if event == "open" and str(arguments[0]) == sys.argv[1]:
        os.kill(os.getpid(), signal.SIGTERM)

before = signal.getsignal(signal.SIGTERM)
sys.addaudithook(stop)
code = launch.main([f"--config={sys.argv[1]}"])
assert signal.getsignal(signal.SIGTERM) is before
sys.exit(code)
"""


def test_a_stop_before_the_run_is_no_stop_after_a_save(tmp_path: Path) -> None:
    """143 promises a save."""
    path = tmp_path.resolve() / "a.yaml"
    path.write_text("{}")
    command = [sys.executable, "-c", STOPPED_AS_IT_OPENS_ITS_CONFIG, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "stopped before the run began (SIGTERM): nothing was saved\n")


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    """A port that no store answers at. Afterwards threads end that were connecting when their connection was closed."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield opened
    for thread in threading.enumerate():
        if thread.name == "portable_fsdp call":
            thread.join(60)


def environ_at(listening: socket.socket) -> dict[str, str]:
    port = str(listening.getsockname()[1])
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "1"}


def test_a_port_that_another_program_has_or_nobody(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Process 0 names it, and the others don't wait for ever for a program that is no store."""
    monkeypatch.setattr(module, "_CONNECT_S", 0.25)
    limit, started, environ = timedelta(seconds=1), time.monotonic(), environ_at(listening)
    port = environ["MASTER_PORT"]
    taken = rf"MASTER_PORT={port}: can't open the rendezvous store: .*address already in use\.\n"
    with pytest.raises(ConfigError, match=taken):
        open_store(environ, limit, serves=True)
    no_store = rf"process 1 waits for .*127\.0\.0\.1:{port}: .* not answered as a store\.\n"
    with pytest.raises(TrainingError, match=no_store):
        open_store(environ, limit, serves=False)
    assert time.monotonic() - started < 20
    assert f"at 127.0.0.1:{port}: after 0.25 s a program" in capfd.readouterr().err
    listening.close()
    with pytest.raises(TrainingError, match=r"nothing listens there yet \(.*Connection refused\)\.\n  For all"):
        open_store(environ, limit, serves=False)
    assert "after 0.25 s nothing listens there yet" in capfd.readouterr().err


def test_a_slow_store_is_waited_for(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protects a start whose process 0 is suspended or overloaded: the kernel accepts connections, nobody answers."""
    monkeypatch.setattr(module, "_CONNECT_S", 0.1)
    with ThreadPoolExecutor(1) as pool:
        environ = environ_at(listening)
        connecting = pool.submit(open_store, environ, timedelta(seconds=30), serves=False)
        time.sleep(0.5)
        make: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
        port = int(environ["MASTER_PORT"])
        server = make("127.0.0.1", port, None, True, master_listen_fd=os.dup(listening.fileno()))
        connecting.result(20).set("key", "value")
        assert server.get("key") == b"value"
