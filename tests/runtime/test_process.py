import os
import signal
import subprocess
import sys
import time

import pytest

from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.process import OUR_RUNS, Launch, Stopped, StopRequest, detect_launch

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_plain_start() -> None:
    assert detect_launch({"PATH": "/bin"}) == Launch("plain", rank=0, local_rank=0, world_size=1)


def test_torchrun_start() -> None:
    launch = detect_launch({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "4"})
    assert launch == Launch("torchrun", rank=5, local_rank=1, world_size=8)
    assert launch.said == "torchrun: 8 process(es), 4 of them on this host"
    assert not launch.is_alone


def test_variables_that_somebody_set() -> None:
    assert detect_launch(TORCHRUN) == Launch("variables", rank=5, local_rank=1, world_size=8)
    assert detect_launch(TORCHRUN).said.startswith("RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT of its env")


def test_half_an_environment_names_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="found RANK=5, WORLD_SIZE=8 without LOCAL_RANK, MASTER_ADDR, MASTER_PORT"):
        detect_launch({"RANK": "5", "WORLD_SIZE": "8"})


def test_an_empty_variable_is_missing() -> None:
    with pytest.raises(ConfigError, match="without MASTER_ADDR"):
        detect_launch({**TORCHRUN, "MASTER_ADDR": ""})


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_word_for_a_number(name: str) -> None:
    with pytest.raises(ConfigError, match=f"environment: {name}: expected an integer, found 'x'"):
        detect_launch({**TORCHRUN, name: "x"})


@pytest.mark.parametrize("change", [{"RANK": "8"}, {"RANK": "-1"}, {"LOCAL_RANK": "6"}, {"WORLD_SIZE": "0"}])
def test_numbers_that_contradict_each_other(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="expected 0 <= LOCAL_RANK <= RANK < WORLD_SIZE, found LOCAL_RANK="):
        detect_launch({**TORCHRUN, **change})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        stop.begin_steps()
        assert not stop.requested
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.reason == number.name
    assert signal.getsignal(number) is before


def test_the_first_reason_stays() -> None:
    with StopRequest() as stop:
        stop.begin_steps()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason == "SIGTERM"


def test_a_request_ends_at_once_what_comes_before_the_first_step() -> None:
    with StopRequest(), pytest.raises(Stopped, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_request_ends_a_main_thread_that_python_cannot_interrupt() -> None:
    """As a compiler that has let go of Python's lock."""
    code = (
        "import hashlib\nfrom portable_fsdp.runtime.process import StopRequest\n"
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


def test_a_request_is_acknowledged_once(capfd: pytest.CaptureFixture[str]) -> None:
    with StopRequest() as stop:
        stop.begin_steps()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert capfd.readouterr().err == "SIGTERM: ending after the step at hand and its save\n"


def test_handlers_come_back_after_an_error() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), StopRequest():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) is before


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


def test_a_process_finishes_its_step() -> None:
    code = (
        "import time\nfrom portable_fsdp.runtime.process import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    stop.begin_steps()\n"
        "    print('ready', flush=True)\n"
        "    for step in range(1000):\n"
        "        time.sleep(0.02)\n"
        "        if stop.requested: break\n"
        "print(stop.reason, flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert output.read() == "SIGTERM\n"
    assert process.wait(timeout=30) == 0


ASK_THE_KERNEL = """
import ctypes, os
from portable_fsdp.runtime.process import end_with_agent
end_with_agent(os.environ)
number = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
print(number.value)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own")
@pytest.mark.parametrize(
    ("run", "code", "said"),
    [
        (None, 0, "0"),  # a plain start: the shell that made it may end
        ("some-id", 0, "9"),  # torchrun's worker
        (f"{OUR_RUNS}{os.getpid()}", 0, "9"),  # our own
        (f"{OUR_RUNS}1", -signal.SIGKILL, ""),  # whose agent ended while Python started
    ],
    ids=["plain", "torchrun", "our own", "too late"],
)
def test_a_worker_ends_with_its_agent(run: str | None, code: int, said: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    if run is not None:
        environ["TORCHELASTIC_RUN_ID"] = run
    done = subprocess.run([sys.executable, "-c", ASK_THE_KERNEL], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (code, said)
