"""Runs that save and stop before their host ends: notices of a metadata server, SIGUSR1, and too short a grace."""

import json
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from cli import (
    PYTHON,
    SAVES,
    TORCHRUN,
    Started,
    committed,
    events,
    finish,
    free_port,
    launch,
    require_curve,
    started,
    tiny_config,
)

from portable_fsdp.convert.read import load_config
from portable_fsdp.runtime import preemption
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.host import metadata_server
from portable_fsdp.runtime.preemption import _watch

CPU = [*PYTHON, "--device=cpu"]
STARTS = {
    "native": [*CPU, "--backend=native", "--num_devices=2"],
    "xla": [*CPU, "--backend=xla", "--num_devices=2"],
}
GRACE_S = 30  # of a spot VM
NOTHING = {
    "preempted": "FALSE",
    "maintenance-event": "NONE",
    "upcoming-maintenance": '{ "error": "no notifications have been received yet, try again later" }',
}


class Metadata(ThreadingHTTPServer):
    """Compute Engine's metadata server: it needs its header, and holds a request until its value changes."""

    def __init__(self, **values: str) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.values, self.changed = NOTHING | values, threading.Condition()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values = self.values | {key: value}
            self.changed.notify_all()


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Metadata)
        path, _, query = self.path.partition("?")
        key = path.removeprefix("/computeMetadata/v1/instance/")
        wanted = dict(part.split("=") for part in query.split("&") if part)
        values, changed = self.server.values, self.server.changed
        if self.headers["Metadata-Flavor"] != "Google" or key not in values:
            self.send_error(404)
            return
        with changed:
            if "wait_for_change" in wanted:
                server = self.server
                is_new = lambda: etag(server.values[key]) != wanted["last_etag"]  # noqa: E731
                changed.wait_for(is_new, float(wanted["timeout_sec"]))
            value = self.server.values[key]
        if value.isdecimal():
            self.send_error(int(value))
            return
        self.send_response(200)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("ETag", etag(value))
        self.end_headers()
        self.wfile.write(value.encode())

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002


def etag(value: str) -> str:
    return f"{hash(value) & 0xFFFFFFFF:x}"


@contextmanager
def serving(**values: str) -> Generator[Metadata]:
    with Metadata(**values) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


# ----------------------------------------------------------------------------------------------------------- the watch


@pytest.fixture
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_HELD_S", 1)
    monkeypatch.setattr(preemption, "_PAUSE_S", 0.5)


def window(start: datetime, status: str = "PENDING") -> str:
    return json.dumps({"maintenance_status": status, "window_start_time": start.isoformat()})


NOW = datetime.now(UTC)
HOST = socket.gethostname()


def reasons_of_stops(server: Metadata, changes: list[tuple[float, str, str]], ends_after_s: float) -> list[str]:
    """What a watch requests while the server's values change, each (seconds from now, key, value)."""
    reasons, over = list[str](), threading.Event()
    timers = [threading.Timer(after_s, server.set, change) for after_s, *change in changes]
    timers.append(threading.Timer(ends_after_s, over.set))
    for timer in timers:
        timer.start()
    _watch(server.url, lambda text: not reasons.append(text), over)
    for timer in timers:
        timer.cancel()
        timer.join()
    return reasons


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("preempted", "TRUE", f"Compute Engine preempts {HOST}"),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", f"Compute Engine's maintenance ends {HOST}"),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", None),
        ("upcoming-maintenance", window(NOW, "ONGOING"), f"Compute Engine's maintenance of {HOST} begins"),
        ("upcoming-maintenance", window(NOW + timedelta(minutes=1)), f"Compute Engine's maintenance of {HOST} begins"),
        ("upcoming-maintenance", window(NOW + timedelta(days=7)), None),
        ("upcoming-maintenance", '{"windowStartTime": "soon"}', None),
    ],
    ids=["preempted", "ends", "moves", "a window is open", "a window opens", "a window in a week", "no window"],
)
@pytest.mark.usefixtures("short_polls")
def test_a_notice_requests_a_stop(key: str, value: str, reason: str | None, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server:
        reasons = reasons_of_stops(server, [(0.3, key, value)], 8 if reason else 1.8)
    assert reasons == ([reason] if reason else [])
    assert [record.message for record in caplog.records] == (
        [f"{reason}: ending after the current step and its save"] if reason else []
    )


@pytest.mark.usefixtures("short_polls")
@pytest.mark.parametrize("key", ["maintenance-event", "preempted"])
def test_a_key_that_fails_hides_no_notice(key: str) -> None:
    """`maintenance-event` fails all the time, `preempted` only at first."""
    answers_again = [(0.3, key, "FALSE")] if key == "preempted" else []
    with serving(**{key: "503"}) as server:
        reasons = reasons_of_stops(server, [*answers_again, (2.0, "preempted", "TRUE")], 8)
    assert reasons == [f"Compute Engine preempts {HOST}"]


@pytest.mark.usefixtures("short_polls")
def test_a_notice_from_before_the_start_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Else a run that is started again on a host with an hour of notice would stop after each step."""
    over = threading.Event()
    with serving(**{"maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}) as server:
        ends = threading.Timer(1.5, over.set)
        ends.start()
        _watch(server.url, lambda reason: pytest.fail(reason), over)
        ends.join()
    assert [record.message for record in caplog.records] == [
        f"Compute Engine's maintenance ends {HOST}, announced before this start: the run continues until a signal"
    ]


BAD = {
    "not found": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "another value": b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 5\r\n\r\nmaybe",
    "another server": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nFALSE",
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
    "no HTTP": b"\x00\xff SSH-2.0 hello\r\n",
    "cut short": b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nContent-Length: 500\r\n\r\nFAL",
    "closes": b"",
}


@contextmanager
def bad_server(answer: bytes | None) -> Generator[str]:
    """A server that answers each connection so; None: it accepts, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answers() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        if not connection.recv(4096):
                            return
                        connection.sendall(answer or b"")

        thread = threading.Thread(target=answers)
        if answer is not None:
            thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        if answer is not None:
            socket.create_connection(listening.getsockname()).close()
            thread.join()


@pytest.mark.usefixtures("short_polls")
@pytest.mark.parametrize("answer", [*BAD.values(), None], ids=[*BAD, "hangs"])
def test_a_server_that_is_none_is_named_once(
    answer: bytes | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "_LONGEST_S", 1.0)
    began = time.monotonic()
    with bad_server(answer) as url:
        _watch(url, lambda reason: pytest.fail(reason), threading.Event())
    assert time.monotonic() - began < 15
    [record] = caplog.records
    assert f"run.preemption: {url} is no metadata server: " in record.message
    assert "Only signals will stop the run." in record.message


def test_nothing_is_watched_where_compute_engine_isnt(tmp_path: Path) -> None:
    product = tmp_path / "product_name"
    assert metadata_server("auto", product) is None
    product.write_text("Google Compute Engine\n")
    assert metadata_server("auto", product) == "http://metadata.google.internal"
    assert metadata_server("off", product) is None
    assert metadata_server("http://localhost:1/proxy", product) == "http://localhost:1/proxy"


def test_the_values_of_the_key(tmp_path: Path) -> None:
    path = tiny_config(tmp_path)
    for value in ("auto", "off", "'off'", "http://h:8080", "https://proxy.example/gce"):
        assert load_config(path, [f"run.preemption={value}"]).run.preemption == value.strip("'")
    for value in ("on", "true", "metadata.google.internal", "ftp://h", "http://", "http://h:99999", "7", "null"):
        with pytest.raises(ConfigError, match=r"run\.preemption.*expected off, auto, or a URL"):
            load_config(path, [f"run.preemption={value}"])


# ---------------------------------------------------------------------------------------------------------------- runs


def stopped_by_notice(engine: str, folder: Path, seed: int, *words: str) -> float:
    """Start a run, plant a notice at a random moment, and check what it leaves. Returns its seconds until the end."""
    moment, run_dir = random.Random(seed), folder / "run"
    after = moment.randrange(1, 12)
    with serving() as server:
        command = [*STARTS[engine], *words, f"run.preemption={server.url}"]
        with started(command, folder) as run:
            run.wait_until(lambda: max(committed(run_dir), default=0) >= after)
            time.sleep(moment.uniform(0, 0.5))
            key, value = moment.choice([("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")])
            server.set(key, value)
            began = time.monotonic()
            assert run.wait(GRACE_S) == 143, run.err
            seconds = time.monotonic() - began
            assert run.err.count("ending after the current step and its save") == 1, run.err
            assert "Traceback" not in run.err, run.err
            assert "before the run began" not in run.err, run.err
            assert "Restart" not in run.err, run.err
    end = json.loads((run_dir / "STOPPED").read_text())
    assert "Compute Engine" in end["reason"]
    assert committed(run_dir)[-1] == end["step"] > after
    assert events(run_dir, "stop")[-1]["step"] == end["step"]
    return seconds


@pytest.mark.slow
@pytest.mark.xla
def test_a_run_saves_before_its_host_ends(tmp_path: Path) -> None:
    """On xla; SIGUSR1 stops one on native."""
    words = [f"--config={tiny_config(tmp_path)}", *SAVES, "train.steps=100000"]
    stopped_by_notice("xla", tmp_path, 0, *words)


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("engine", ["native", pytest.param("xla", marks=pytest.mark.xla)])
def test_a_run_saves_before_its_host_ends_and_resumes_to_the_same_curve(engine: str, seed: int, tmp_path: Path) -> None:
    words = [f"--config={tiny_config(tmp_path)}", *SAVES, "train.steps=60", "train.global_batch=16"]
    seconds = stopped_by_notice(engine, tmp_path, seed, *words)
    print(f"{engine}, seed {seed}: out after {seconds:.2f} s")
    finish([*STARTS[engine], *words], tmp_path)
    assert len(events(tmp_path / "run", "start")) == 2
    require_curve(tmp_path, "--device=cpu", *words)


@pytest.mark.proof
def test_the_notice_of_any_host_stops_all(tmp_path: Path) -> None:
    """Two processes as on two hosts, each with a metadata server of its own; only that of the second has a notice."""
    words = [f"--config={tiny_config(tmp_path)}", *SAVES, "train.steps=100000"]
    counts = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    counts["MASTER_PORT"] = str(free_port())
    with ExitStack() as stack:
        servers = [stack.enter_context(serving()) for _ in range(2)]
        commands = [[*CPU, "--backend=native", *words, f"run.preemption={server.url}"] for server in servers]
        starts = (started(command, tmp_path, RANK=str(rank), **counts) for rank, command in enumerate(commands))
        runs = [stack.enter_context(start) for start in starts]
        runs[0].wait_until(lambda: bool(committed(tmp_path / "run")))
        servers[1].set("preempted", "TRUE")
        assert [run.wait(GRACE_S) for run in runs] == [143, 143], runs[0].err + runs[1].err
    assert f"stopped after step {committed(tmp_path / 'run')[-1]} (Compute Engine preempts {HOST})" in runs[0].err
    assert f"[process 1] Compute Engine preempts {HOST}: ending after" in runs[1].err
    assert "grace" not in runs[1].err


@pytest.mark.proof
def test_torchrun_restarts_nothing_after_a_notice(tmp_path: Path) -> None:
    words = ["--device=cpu", f"--config={tiny_config(tmp_path)}", *SAVES, "train.steps=100000"]
    with serving() as server:
        command = [*TORCHRUN[:-2], "--max-restarts=3", *TORCHRUN[-2:], *words, f"run.preemption={server.url}"]
        with started(command, tmp_path) as run:
            run.wait_until(lambda: bool(committed(tmp_path / "run")))
            server.set("preempted", "TRUE")
            assert run.wait(GRACE_S) == 1, run.err  # torchrun's own
    assert len(events(tmp_path / "run", "start")) == 1
    assert json.loads((tmp_path / "run/STOPPED").read_text())["step"] == committed(tmp_path / "run")[-1]


def everything(run: Started) -> list[psutil.Process]:
    process = psutil.Process(run.pid)
    return [process, *process.children(recursive=True)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", pytest.param("xla", marks=[pytest.mark.proof, pytest.mark.xla])])
@pytest.mark.parametrize("to_all", [False, pytest.param(True, marks=pytest.mark.proof)], ids=["supervisor", "all"])
def test_sigusr1_requests_a_stop(engine: str, to_all: bool, tmp_path: Path) -> None:
    """To all processes: as Slurm does to those of a step. The SIGTERM that follows doesn't skip the save."""
    words = [f"--config={tiny_config(tmp_path)}", *SAVES, "train.steps=100000", "run.grace_s=0.001"]
    with started([*STARTS[engine], *words], tmp_path) as run:
        run.wait_until(lambda: len(committed(tmp_path / "run")) > 1)
        processes = everything(run) if to_all else [psutil.Process(run.pid)]
        for number in (signal.SIGUSR1, signal.SIGTERM):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            time.sleep(0.05)
        assert run.wait(GRACE_S) == 143, run.err
        assert "stopped after step" in run.err, run.err
        assert run.err.count("0.0 s of run.grace_s are left. Newest checkpoint until then: step-") == 1, run.err
        assert "Restart" not in run.err
        assert "Traceback" not in run.err
    end = json.loads((tmp_path / "run/STOPPED").read_text())
    assert end["step"] == committed(tmp_path / "run")[-1]
    assert end["reason"] == "SIGUSR1"
    latest = [int(step) for step in re.findall(r"SIGUSR1: ending after step (\d+) at the latest and its save", run.err)]
    assert len(latest) == 1
    assert latest[0] - 3 < end["step"] <= latest[0]


@pytest.mark.slow
def test_too_short_a_grace_is_said_after_the_first_save_and_at_the_next_start(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--device=cpu", "--config=tiny.yaml", "run.grace_s=0.001", "checkpoint.every=2"]
    said = "more than run.grace_s=0.001 s"
    assert launch(*words, "train.stop_at=4") == 0
    err = capfd.readouterr().err
    assert err.count(said) == 1
    assert err.index("saved ") < err.index(said) < err.index("step-00000004")
    assert launch(*words) == 0
    err = capfd.readouterr().err
    assert err.count(said) == 1
    assert err.index(said) < err.index("step: ")
    assert "a save takes " in err
    assert launch(*words, "train.steps=8", "run.grace_s=60", "checkpoint.allow=[train.steps]") == 0
    assert "grace_s" not in capfd.readouterr().err.replace("run.grace_s=60", "")
