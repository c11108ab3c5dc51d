"""User code that ends a process: by sys.exit, by an exception that is no Exception, or by no exception at all."""

import importlib
import itertools
import pickle
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli import STARTS, events, finish, launch, losses
from plain_backend import PlainBackend, in_processes

from portable_fsdp import evaluate
from portable_fsdp.config.data import Data
from portable_fsdp.convert.read import load_config
from portable_fsdp.data.batches import _Steps
from portable_fsdp.data.packing import StepRows
from portable_fsdp.observe.callbacks import Callback, RunEnd
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.report.read import read_run
from portable_fsdp.runtime.collective_errors import on_each_process
from portable_fsdp.runtime.factory import UserExit, user_code
from portable_fsdp.runtime.signals import Interrupted, Stopped, StopRequest
from portable_fsdp.train.loop import train

MODULE = """
import torch
from torch.utils.data import default_collate

AT, ERROR, READ, BEGUN = "", SystemExit(0), 0, 60

def exits(place):
    if place == AT:
        raise ERROR  # the line

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        exits("model")
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, x, labels):
        if x.device.type != "meta":
            exits("forward" if self.training else "evaluation")
            exits("gil")
        return ((self.linear(x) - labels) ** 2).sum(), torch.ones_like(labels).sum()

class Rows:
    def __len__(self): return 400
    def __getitem__(self, index):
        global READ
        READ += 1
        if READ > BEGUN:
            exits("row")
        return {"x": torch.tensor([index / 400]), "labels": torch.tensor([0.5])}

class Stream:
    def __iter__(self):
        exits("iterator")
        return ({"x": torch.tensor([n / 400]), "labels": torch.tensor([0.5])} for n in range(400))

def collate(rows):
    if READ > BEGUN:
        exits("collate")
    return default_collate(rows)

def stream(split): return Stream()

def data(split):
    exits("data")
    return Rows(), collate

def task(model, batch):
    exits("task")
    return model(batch["x"], batch["labels"])

class SGD(torch.optim.SGD):
    def step(self, closure=None):
        exits("optimizer's step")
        return super().step(closure)

def optimizer(groups, lr):
    exits("optimizer")
    return SGD(groups, lr=lr)
"""

CONFIG = """
run: {dir: run}
model: {factory: "user_exits:Model"}
data: {factory: "user_exits:data"}
train: {task: "user_exits:task", steps: 40, global_batch: 4, micro_batch: 4}
optim: {factory: "user_exits:optimizer", weight_decay: 0.0}
checkpoint: {every: 2}
"""
LINE = 1 + MODULE.splitlines().index("        raise ERROR  # the line")


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The user's module, from which a config takes all that it can."""
    monkeypatch.chdir(tmp_path)
    Path("user.yaml").write_text(CONFIG)
    Path("user_exits.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("user_exits")
    del sys.modules["user_exits"]


class OwnError(BaseException):
    """As pytest, asyncio and trio have them."""


BEFORE = {"model": [], "data": [], "task": [], "optimizer": [], "optimizer's step": []}
AT = BEFORE | {"row": [], "collate": [], "forward": [], "iterator": ["data.factory=user_exits:stream"]}
ERRORS: list[tuple[type[BaseException], tuple[Any, ...]]] = [
    *((SystemExit, arguments) for arguments in ((0,), (), ("a reason",))),
    *((KeyboardInterrupt, ()), (GeneratorExit, ()), (OwnError, ("own",))),
]


@pytest.mark.parametrize("place", AT)
def test_a_run_fails_where_user_code_exits(place: str, user: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, file and line, and the event `fail`, also while the run is built; one that has begun resumes."""
    kind, arguments = ERRORS[[*AT].index(place) % len(ERRORS)]
    user.AT, user.ERROR = place, kind(*arguments)
    assert launch("--device=cpu", "--config=user.yaml", *AT[place]) == 1
    message = capsys.readouterr().err
    assert re.search(rf"raised {kind.__name__}(: .+)?\n  in {re.escape(user.__file__)}:{LINE}: raise", message)
    assert "Traceback" not in message
    assert "Nothing was started" not in message
    [failure] = events(Path("run"), "fail")
    assert re.match(rf"UserExit: .* raised {kind.__name__}", failure["reason"])
    if place not in ("row", "collate"):
        assert failure["step"] == 0
        return
    done = len(losses(Path("run")))
    assert failure["step"] == done >= 4
    assert f"The run ended after step {done}. The last good checkpoint is run/checkpoints/step-" in message
    where = "row" if place == "row" else "the"
    assert failure["reason"].startswith(f"UserExit: data.factory: user_exits:data: {where}")
    user.AT = ""
    assert launch("--device=cpu", "--config=user.yaml", f"train.stop_at={done + 1}") == 0
    assert len(losses(Path("run"))) == done + 1


def test_a_factory_that_raises_is_recorded_and_a_mistake_in_the_config_is_not(user: Any) -> None:
    """The former is a failure of the user's code; the latter leaves no folder behind."""
    assert launch("--device=cpu", "--config=user.yaml", "model.factory=user_exits:absent") == 2
    assert not Path("run").exists()
    user.AT, user.ERROR = "model", ValueError("no such size")
    assert launch("--device=cpu", "--config=user.yaml") == 2
    [failure] = events(Path("run"), "fail")
    assert failure["reason"] == "ConfigError: model.factory: user_exits:Model failed: ValueError: no such size"
    assert [path.name for path in Path("run").iterdir()] == ["events.jsonl"]
    assert read_run(Path("run")).goodput is None
    user.AT = ""
    assert launch("--device=cpu", "--config=user.yaml", "train.steps=1") == 0
    user.AT = "model"
    assert launch("--device=cpu", "--config=user.yaml", "train.steps=2") == 2
    assert len(events(Path("run"), "fail")) == 2
    assert read_run(Path("run")).status == "finished at step 1"


class Ends(Callback):
    ends = 0

    def on_end(self, end: RunEnd) -> None:
        self.ends += 1


@pytest.mark.parametrize("hook", ["on_start", "on_step", "on_end"])
def test_a_callback_that_exits_fails_the_run(hook: str, user: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other exceptions of a callback only end the callback; who calls sys.exit wants the run to end. Each callback sees
    one end."""
    callback, other = Ends(), Ends()
    own = getattr(callback, hook)

    def exits(about: object) -> None:
        own(about)
        sys.exit()

    monkeypatch.setattr(callback, hook, exits)
    with pytest.raises(UserExit, match=rf"user code raised SystemExit\n  in {re.escape(__file__)}:\d+: sys.exit"):
        train(load_config("user.yaml", ["train.steps=2"]), device="cpu", callbacks=[callback, other])
    assert len(events(Path("run"), "fail")) == 1
    assert read_jsonl(Path("run/events.jsonl"))[-1]["event"] == "fail"
    assert (callback.ends, other.ends) == (1, 1)


def test_a_worker_hands_an_exit_over_and_what_exits_on_one_process_is_an_error_on_all(user: Any) -> None:
    """It would end the worker with exit code 0, or be dropped without a word."""
    user.AT, user.ERROR = "data", KeyboardInterrupt()
    steps = _Steps(Data(factory="user_exits:data"), lambda rows, first: StepRows([], 0))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a worker
    try:
        error = pickle.loads(pickle.dumps(steps[0]))
    finally:
        signal.signal(signal.SIGINT, before)
    assert isinstance(error, UserExit)
    assert str(error).startswith("data.factory: user_exits:data raised KeyboardInterrupt\n  in ")

    def work(backend: PlainBackend) -> None:
        on_each_process(backend, lambda: sys.exit(0) if backend.process.index == 1 else None)

    errors = in_processes(2, work)
    assert [type(error).__name__ for error in errors] == ["UserExit", "UserExit"]
    assert str(errors[0]).startswith("process 1: user code raised SystemExit: 0\n  in ")


def test_signals_stay_signals() -> None:
    """A real Ctrl-C, and both requests of a run to stop."""
    with StopRequest(), pytest.raises(Stopped), user_code():
        signal.raise_signal(signal.SIGINT)
    with StopRequest(same_press_s=0.0) as stop:
        stop.begin_steps()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted), user_code():
            signal.raise_signal(signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), user_code():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


FAULTY = """
import os, resource
import torch
from user_exits import Model, data

CALLS, FAULT, PROCESSES = 0, os.environ.get("FAULT", ""), os.environ.get("PROCESSES", "").split()

def memory():
    resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
    torch.ones(4 << 30)

def task(model, batch):
    global CALLS
    CALLS += batch["x"].device.type != "meta"
    if CALLS == 5 and os.environ.get("RANK", "0") in PROCESSES:
        exec(FAULT)
    return model(batch["x"], batch["labels"])
"""
FAULTS = {
    "error": ("raise ValueError('bad row 17')", "ValueError: bad row 17"),
    "MemoryError": ("raise MemoryError", "MemoryError"),
    "host memory": ("memory()", "RuntimeError: .*can't allocate memory"),
    "SIGKILL": ("os.kill(os.getpid(), 9)", "ended by SIGKILL"),
    "SIGSEGV": ("os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
    "exit code 0": ("os._exit(0)", "ended with exit code 0"),
}
"""What process does in its fifth forward, and the cause."""
FAULTY_RUN = ["--config=user.yaml", "optim.factory=null", "train.task=faulty:task", "train.micro_batch=2"]
IN_SUITE = ("torchrun", "error", "1")  # which starts once; test_restarts.py has restarts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "fault", "process"),
    [
        pytest.param(*case, marks=[pytest.mark.proof] * (case != IN_SUITE))
        for case in itertools.product(("native", "xla", "xla_fsdp1", "torchrun"), FAULTS, "01")
        if not case[0].startswith("xla") or case[2] == "0"
    ],
)
def test_the_process_that_failed_first_names_the_cause(start: str, fault: str, process: str, user: Any) -> None:
    """Both starts record it, and the run ends after two failures with the same cause at the same step."""
    Path("faulty.py").write_text(FAULTY)
    code, cause = FAULTS[fault]
    # Only torchrun's agent sees how a process ends, and takes exit code 0 for success.
    if cause.startswith("ended") and (start == "torchrun" or (start, fault) == ("native", "exit code 0")):
        cause = f"lost its connection to process {process}"
    variables = {"FAULT": code, "PROCESSES": process}
    run = finish([*STARTS[start], *FAULTY_RUN, "checkpoint.every=null"], Path(), 1, **variables)
    reasons = [event["reason"] for event in events(Path("run"), "fail")]
    assert len(reasons) == (1 if start == "torchrun" else 2), run.err
    assert all(re.search(cause, reason) for reason in reasons), reasons
    if start != "torchrun":
        # Metrics are read a step late: of a process that is killed, those of its last step are lost.
        assert re.search(f"  after step [1234]: .*{cause}", run.err.splitlines()[-1])


@pytest.mark.proof
@pytest.mark.slow
def test_a_run_whose_processes_all_end_with_exit_code_0_has_not_finished(
    user: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under torchrun, which takes that for success."""
    Path("faulty.py").write_text(FAULTY)
    finish([*STARTS["torchrun"], *FAULTY_RUN], Path(), 0, FAULT="os._exit(0)", PROCESSES="0 1")
    sentence = "the last start didn't finish: it recorded no end after step"
    assert read_run(Path("run")).status.startswith("not finished")
    assert evaluate.main(["run", "--device=cpu", "data.eval_split=test"]) == 0
    assert sentence in capsys.readouterr().err
    assert launch("--device=cpu", *FAULTY_RUN) == 0
    assert sentence in capsys.readouterr().err
    assert read_run(Path("run")).status == "finished at step 40"
