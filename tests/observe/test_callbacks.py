"""Callbacks see a run in plain data, in order; one that raises is dropped. The loop is near the optimizer."""

import inspect
import json
import logging
import math
import re
import resource
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import partialmethod
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import toy
from cases import TINY
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.utils import logging as transformers_log

import portable_fsdp
from portable_fsdp.backends.native.engine import NativeBackend
from portable_fsdp.backends.open import ENGINES, spec_of
from portable_fsdp.backends.refusals import lines_of, rules_of
from portable_fsdp.checkpoint.manager import Saved
from portable_fsdp.config.data import Data
from portable_fsdp.config.schema import Config
from portable_fsdp.observe.callbacks import Callback, EvaluationEnd, RunEnd, RunStart, StepEnd
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.runtime.command import run_log
from portable_fsdp.runtime.errors import DataError, TrainingError
from portable_fsdp.train.loop import train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PACKAGE = Path(portable_fsdp.__file__).parent


@pytest.fixture(autouse=True)
def toy_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setitem(ENGINES, "toy", toy.SPEC)
    monkeypatch.chdir(tmp_path)
    yield
    for cached in (spec_of, lines_of, rules_of):
        cached.cache_clear()


def config(**sections: dict[str, Any]) -> Config:
    base = TINY | {"train": TINY["train"] | {"log_every": 2}}
    return Config.model_validate({name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


class Recorder(Callback):
    """Keeps what it gets, and raises at one hook."""

    def __init__(self, raises_at: str = "") -> None:
        self.seen: list[Any] = []
        self._raises_at = raises_at

    def note(self, hook: str, data: Any) -> None:
        assert is_dataclass(data) or isinstance(data, Saved)
        self.seen.append(data)
        if hook == self._raises_at:
            raise KeyError("a bug")


HOOKS = {"on_start": RunStart, "on_step": StepEnd, "on_evaluate": EvaluationEnd, "on_save": Saved, "on_end": RunEnd}
for hook in HOOKS:
    setattr(Recorder, hook, partialmethod(Recorder.note, hook))


def test_a_run_as_its_callbacks_see_it_and_those_that_raise_are_dropped_and_harm_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portable_fsdp.train.run.configure_log", lambda index: None)  # pytest listens at the root
    broken, recorder = [Recorder(hook) for hook in HOOKS], Recorder()
    settings = config(data={"eval_split": "5%"}, train={"eval_every": 2, "eval_batches": 1}, checkpoint={"every": 2})
    assert train(settings, device="cpu", backend="toy", callbacks=[*broken, recorder]) == 0
    kinds = [type(data).__name__ for data in recorder.seen]
    first_half = ["StepEnd", "EvaluationEnd", "StepEnd", "Saved"]
    assert kinds == ["RunStart", *first_half, *first_half, "RunEnd"]
    start, end = recorder.seen[0], recorder.seen[-1]
    assert (start.config, start.folder, start.engine, start.device) == (settings, Path("run"), "toy", "cpu")
    assert (start.devices, start.processes, start.step, start.steps, start.tokens) == (1, 1, 0, 4, 128)
    assert start.parameters == start.trained_parameters > 0
    assert (start.resumed, start.peak_flops) == (None, None)
    assert (end.outcome, end.step, end.reason, end.values) == ("finished", 4, "finished", {})
    assert end.last_checkpoint == Path("run/checkpoints/step-00000004")
    steps = [data for data in recorder.seen if isinstance(data, StepEnd)]
    for step, row in zip(steps, read_jsonl(Path("run/metrics.jsonl")), strict=True):
        assert {name: getattr(step, name) for name in list(row)[:10]} == dict(list(row.items())[:10])
        assert (step.evaluation.loss if step.evaluation else None) == row.get("eval_loss")
        assert step.is_logged == ("processes" in row)
    assert [step.last_checkpoint and step.last_checkpoint.name for step in steps] == [None] * 2 + ["step-00000002"] * 2
    assert 0 < steps[0].elapsed < steps[-1].elapsed <= end.elapsed
    assert end.best_step in (2, 4)
    assert [len(each.seen) for each in broken] == [kinds.index(kind.__name__) + 1 for kind in HOOKS.values()]
    messages = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    raised = [f"callback Recorder.{hook} raised; the run continues without it:" for hook in HOOKS]
    assert sorted(messages) == sorted(raised)
    assert caplog.text.count("KeyError: 'a bug'") == len(HOOKS)


@contextmanager
def files_of_at_most(limit_bytes: int) -> Generator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("file", ["metrics.jsonl", "events.jsonl", "config.yaml"])
def test_a_full_disk_ends_the_run_with_a_sentence(file: str, tmp_path: Path) -> None:
    """A file can grow no further; the lines before stay whole, and the same command resumes."""
    folder, lines = tmp_path / "run", {"metrics.jsonl": {"step": 0}, "events.jsonl": {"event": "x"}}
    limit = 1 << 20 if file in lines else 300
    if file in lines:
        folder.mkdir()
        (folder / file).write_text(json.dumps(lines[file] | {"long": "x" * (limit - 1300)}) + "\n")
    settings = config(train={"steps": 4, "micro_batch": 4}, checkpoint={"every": 1, "keep": 1})
    with files_of_at_most(limit), pytest.raises(TrainingError) as raised:
        train(settings, device="cpu", backend="toy")
    message = str(raised.value)
    assert message.startswith(f"the run can't write its files: [Errno 27] File too large: 'run/{file}'\n")
    assert "\n  A file in run may not become that large: raise the limit (ulimit -f)." in message
    assert raised.value.exit_code == 1
    assert file not in lines or all(read_jsonl(folder / name) for name in lines), "no torn line in the middle"
    if file == "metrics.jsonl":
        assert "The last good checkpoint is run/checkpoints/step-" in message
        assert read_jsonl(folder / "events.jsonl")[-1]["event"] == "fail"
        assert train(settings, device="cpu", backend="toy") == 0
        assert [row["step"] for row in read_jsonl(folder / file)] == [*range(5)]


ROWS = """
import torch
from pathlib import Path

class Rows(torch.utils.data.Dataset):
    reads = 0

    def __init__(self, counted, ends=False):
        self.counted, self.ends = counted, ends

    def __len__(self):
        return 8

    def __getitem__(self, row):
        Rows.reads += Path("run/config.yaml").exists()  # the run has begun
        if self.ends and Rows.reads > 1:
            raise OSError("the archive is broken")
        ids = (torch.arange(6) * (row + 3)) % 16
        return {"input_ids": ids, "labels": ids if row in self.counted else torch.full((6,), -100)}

def end(split):
    return Rows(range(8), ends=True)

def lack_labels(split):
    return Rows([] if split == "test" else [0, 5])
"""


@pytest.fixture
def classifier(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Config]:
    """The config of a model of tokens on ROWS."""
    (tmp_path / "callback_rows.py").write_text(ROWS)
    monkeypatch.syspath_prepend(str(tmp_path))
    bert = {"model_type": "bert", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_labels": 16}
    bert |= {"num_hidden_layers": 1, "num_attention_heads": 2}

    def settings(function: str, train: dict[str, Any], **data: Any) -> Config:
        train = {"task": "token_classification", "steps": 8, "global_batch": 1, **train}
        values = config(model={"architecture": bert}, train=train)
        return values.model_copy(update={"data": Data(factory=f"callback_rows:{function}", **data)})

    return settings


def test_an_error_of_the_data_is_not_hidden_by_a_full_disk(classifier: Callable[..., Config], tmp_path: Path) -> None:
    """Protects the cause: the row of the step in flight can't be written either."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 0, "long": "x" * ((1 << 20) - 100)}) + "\n")
    with files_of_at_most(1 << 20), pytest.raises(DataError, match="the archive is broken"):
        train(classifier("end", {}), device="cpu", backend="native")


def test_steps_and_evaluations_in_which_nothing_counts_are_said(classifier: Callable[..., Config]) -> None:
    settings = classifier("lack_labels", {"eval_every": 4}, eval_split="test")
    recorder = Recorder()
    assert train(settings, device="cpu", backend="native", callbacks=[recorder]) == 0
    steps = [data for data in recorder.seen if isinstance(data, StepEnd)]
    assert sorted(step.is_empty for step in steps) == [False] * 2 + [True] * 6
    assert all((step.loss == 0) == (step.grad_norm == 0) == step.is_empty for step in steps)
    assert not any(isinstance(data, EvaluationEnd) for data in recorder.seen)
    assert sum(row.get("is_empty", 0) for row in read_jsonl(Path("run/metrics.jsonl"))) == 6
    printed = Path("run/logs/run.log").read_text()
    assert printed.count("so the step changed nothing") == 1
    assert printed.count("no label in the validation set counts") == 2
    assert "; nothing counted in 6 of 8 steps" in printed


def test_gradients_that_overflow_at_every_scale_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is skipped, and shown, until the scale is 1."""
    clip, recorder = NativeBackend.clip_grad_norm, Recorder()
    monkeypatch.setattr(NativeBackend, "clip_grad_norm", lambda *args: clip(*args) * math.inf)
    settings = config(precision={"compute": "float16", "loss_scale": 4.0}, checkpoint={"every": 1})
    with pytest.raises(TrainingError) as raised:
        train(settings, device="cpu", backend="native", callbacks=[recorder])
    assert "step 3: expected a finite loss and gradient norm, found loss " in str(raised.value)
    assert " and grad_norm inf at a loss scale of 1, in float16.\n  The last good checkpoint is " in str(raised.value)
    assert "step-00000002.\n  Compute in bfloat16 instead (precision.compute" in str(raised.value)
    steps = [data for data in recorder.seen if isinstance(data, StepEnd)]
    assert [(step.loss_scale, step.skipped_steps, step.is_skipped) for step in steps] == [(4, 1, True), (2, 2, True)]
    rows = read_jsonl(Path("run/metrics.jsonl"))
    assert [(row["loss_scale"], row["skipped_steps"], row["grad_norm"]) for row in rows] == [(4, 1, None), (2, 2, None)]
    end, stop = recorder.seen[-1], read_jsonl(Path("run/events.jsonl"))[-1]
    assert (end.outcome, end.reason, list(end.values)) == ("not finite", "not finite", ["loss", "grad_norm"])
    assert (stop["event"], stop["step"], stop["reason"], stop["grad_norm"]) == ("stop", 3, "not finite", None)


@pytest.mark.parametrize(("engine", "micro_batch"), [("native", 2), ("toy", 4)])
def test_three_calls_from_the_loop_to_the_optimizer(engine: str, micro_batch: int) -> None:
    stacks: list[list[str]] = []

    def look(*_: Any) -> None:
        frame: FrameType | None = inspect.currentframe()
        names: list[str] = []
        while frame is not None and frame.f_code.co_name != "_train_steps":
            if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
                names.append(frame.f_code.co_name)
            frame = frame.f_back
        if frame is not None:  # building an optimizer takes a step too
            stacks.append(names)

    hook = register_optimizer_step_pre_hook(look)
    try:
        assert train(config(train={"steps": 2, "micro_batch": micro_batch}), device="cpu", backend=engine) == 0
    finally:
        hook.remove()
    assert stacks == [["_update", "__call__"]] * 2  # so optimizer.step is the third call


def test_the_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/library.md").read_text()
    [block] = re.findall(r"```python\n(.*?)```", page.partition("## Callbacks")[2], re.DOTALL)
    small = ["data.seq_len=32", "train.global_batch=2", "train.steps=2", "optim.warmup_steps=1", "run.dir=run"]
    program = block.replace('"configs/quickstart.yaml", []', f'"{ROOT}/configs/quickstart.yaml", {small}')
    names: dict[str, Any] = {}
    exec(compile(program, "library.md", "exec"), names)
    assert names["exit_code"] == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "/" in line] == ["1/2", "2/2"]


def test_transformers_warns_in_the_log_instead_of_on_the_terminal(tmp_path: Path) -> None:
    noise = transformers_log.get_logger("transformers.some_module")
    transformers_log.set_verbosity_warning()  # other tests of this process may have lowered it
    of_transformers = logging.getLogger("transformers")
    before, on_the_terminal = set(of_transformers.handlers), transformers_log._default_handler
    with run_log(1):
        noise.warning("not kept")
    with run_log(0) as log_file:
        noise.warning("held until the folder is there")
        log_file.open(tmp_path)
        assert set(of_transformers.handlers) == before - {on_the_terminal} | {log_file}
    assert (tmp_path / "logs/run.log").read_text().endswith(" WARNING held until the folder is there\n")
    assert set(of_transformers.handlers) == before
