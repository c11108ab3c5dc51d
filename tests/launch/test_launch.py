"""The command line, really run: every start, a stop in the middle of each, a kill; what a run's folder holds."""

import fcntl
import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
from cli import PYTHON, STARTS, Started, committed, contents, events, launch, losses, started, tiny_config
from documented import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from portable_fsdp.checkpoint.manifests import read_manifest
from portable_fsdp.config.load import config_text
from portable_fsdp.convert.read import load_config
from portable_fsdp.observe.run_files import read_jsonl

KEYS = [
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "mfu", "memory_bytes", "seconds"),
    *("data_seconds", "imbalance", "time"),
]
CONSOLE_LINE = (
    r"step: \d+/6  loss: \d+\.\d+  grad_norm: \d+\.\d+  memory: \d+\.\d+GiB\(\d+%\)  tps: [\d,]+"
    r"(  tflops: \d+\.\d+)?(  eta: \d+\.\d s)?"
)


def run_to_the_end(folders: pytest.TempPathFactory, *kinds: str) -> dict[str, tuple[Started, Path]]:
    """The process and the run's folder of each start: the same command, each in a folder of its own."""
    with ExitStack() as stack:  # at the same time: most of it is importing
        runs: dict[str, tuple[Started, Path]] = {}
        for kind in kinds:
            folder = folders.mktemp(kind)
            command = [*STARTS[kind], f"--config={tiny_config(folder)}", "checkpoint.export=true"]
            runs[kind] = stack.enter_context(started(command, folder, **temporary(folder))), folder / "run"
        for process, _ in runs.values():
            assert process.wait() == 0, process.err
    return runs


@pytest.fixture(scope="module")
def native_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Started, Path]]:
    return run_to_the_end(tmp_path_factory, "plain", "torchrun")


@pytest.fixture(scope="module")
def finished(native_runs: dict[str, tuple[Started, Path]]) -> Path:
    """The folder of a run of one process."""
    return native_runs["plain"][1]


def temporary(folder: Path) -> dict[str, str]:
    """The variable that lets a start make its temporary files in `folder`/tmp."""
    (folder / "tmp").mkdir(exist_ok=True)
    return {"TMPDIR": str(folder / "tmp")}


def test_native_starts(native_runs: dict[str, tuple[Started, Path]], finished: Path) -> None:
    for kind, devices in (("plain", 1), ("torchrun", 2)):
        check_run(*native_runs[kind], backend="native", devices=devices)
    assert native_runs["plain"][0].err.startswith("started by hand (no launcher)\n")
    assert list((finished.parent / "tmp").iterdir()) == []  # torchrun leaves a folder for logs
    assert losses(native_runs["torchrun"][1]) == pytest.approx(losses(finished), rel=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("backend", [pytest.param("xla", marks=pytest.mark.xla), "native"])
def test_start(backend: str, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    process, run = run_to_the_end(tmp_path_factory, backend)[backend]
    check_run(process, run, backend=backend, devices=2)
    assert losses(run) == pytest.approx(losses(finished), rel=1e-5)
    assert backend == "xla" or list((run.parent / "tmp").iterdir()) == []


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check_run(console: Started, run: Path, *, backend: str, devices: int) -> None:
    """All that a finished run of six steps leaves, in its folder and on the console."""
    assert names_in(run) == ["checkpoints", "config.yaml", "events.jsonl", "export", "logs", "metrics.jsonl"]
    processes = devices if backend == "native" else 1
    assert names_in(run / "logs") == ["run.log", *(f"stderr-{index}.log" for index in range(processes))]
    assert "Gloo" not in console.out + console.err
    assert re.search(r"^20\S+ INFO step: 6/6  loss: ", (run / "logs/run.log").read_text(), re.MULTILINE)
    assert load_config(run / "config.yaml") == load_config(run.parent / "tiny.yaml", ["checkpoint.export=true"])
    assert committed(run) == [4, 6]
    assert names_in(run / "checkpoints/step-00000006") == ["manifest.json", "model", "optimizer"]
    assert read_manifest(run / "checkpoints/step-00000006").written_by.backend == backend
    rows = read_jsonl(run / "metrics.jsonl")
    of_each = [KEYS + ["processes"] * (row["step"] in (1, 2, 4, 6)) for row in rows]  # where the console has a line
    assert [list(row) for row in rows] == of_each
    assert all(value > 0 for value in rows[-1]["processes"]["memory_bytes"])
    assert losses(run)[0] == pytest.approx(math.log(256), rel=0.03)
    assert losses(run)[-1] < losses(run)[0]
    assert {row["tokens"] for row in rows} == {128}
    start, *others = read_jsonl(run / "events.jsonl")
    assert (start["event"], start["step"], start["backend"], start["devices"]) == ("start", 0, backend, devices)
    if backend == "native":
        collectives = others.pop(0)
        assert collectives["event"] == "collectives"
        assert ("all_gather" in collectives) == (devices > 1)
    assert [(event["event"], event["step"]) for event in others] == [("save", 4), ("save", 6), ("finish", 6)]
    lines = [line for line in console.err.splitlines() if line.startswith("step: ")]
    assert len(lines) == 4, console.err  # 1, 2, 4 and 6
    assert all(re.fullmatch(CONSOLE_LINE, line) for line in lines), lines
    assert console.err.count("compiling step 1; ") == (backend == "xla")
    assert "Traceback" not in console.err
    # The export opens as any model does, and its loss is that of a model which has learnt something.
    model = AutoModelForCausalLM.from_pretrained(run / "export")
    tokens = AutoTokenizer.from_pretrained(run / "export")("The value of an object", return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [list(b"The value of an object")]
    with torch.no_grad():
        assert model(tokens, labels=tokens).loss < 5.3


def test_the_same_command_again_finds_nothing_to_do(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(finished)
    monkeypatch.chdir(finished.parent)
    assert launch("--device=cpu", "--config=tiny.yaml") == 0
    assert "step 6 of 6 is already saved: nothing left to train" in capsys.readouterr().err
    after = contents(finished)
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    config = finished / "config.yaml"
    # This command asks for no export, the first one did.
    assert config_text(load_config(config, ["checkpoint.export=true"])) == before[config].decode()
    logs = {path for path in changed if path.parent.name == "logs"}
    assert all(after[path].startswith(before[path]) for path in logs)
    assert changed - logs <= {finished / "events.jsonl", config}


def test_flags_may_follow_overrides_and_a_resumed_run_tells_its_collectives_too(folder: Path) -> None:
    (folder / "here").mkdir()
    os.chdir("here")  # run.dir is taken from here, wherever the config lies
    for steps in (1, 2):
        words = ["train.stop_at=5", "run.dir=runs/x", f"train.stop_at={steps}"]  # the later value counts
        assert launch("--device=cuda", "--config=../tiny.yaml", *words, "--device=cpu") == 0
    run = folder / "here/runs/x"
    assert committed(run) == [1, 2]
    kinds = [event["event"] for event in read_jsonl(run / "events.jsonl")]
    assert kinds == ["start", "collectives", "save", "finish", "start", "resume", "collectives", "save", "finish"]


# Steps of 32 micro batches: slow enough that a signal meets the run in the middle.
SLOW = ["train.steps=16", "train.global_batch=32", "checkpoint.every=100"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert launch("--device=cpu", f"--config={tiny_config(folder)}", *SLOW, f"run.dir={folder / 'run'}") == 0
    return losses(folder / "run")


def stop_after(step: int, command: list[str], folder: Path, *, by: str, **variables: str) -> int:
    """Start, wait for the row of `step`, stop it; the exit code, once what a stopped run promises has been checked."""
    path = folder / "run/metrics.jsonl"
    with started(command, folder, **variables) as process:
        process.wait_until(lambda: path.exists() and any(row["step"] >= step for row in read_jsonl(path)))
        os.killpg(process.pid, signal.SIGINT) if by == "Ctrl-C" else process.send_signal(signal.SIGTERM)
        code = process.wait()
    stopped = json.loads((folder / "run/STOPPED").read_text())
    assert stopped["reason"] in ("SIGTERM", "SIGINT")
    assert step <= stopped["step"] < 16, "it was not stopped in the middle"
    assert len(losses(folder / "run")) == stopped["step"] == committed(folder / "run")[-1]
    message = f"stopped after step {stopped['step']} ({stopped['reason']}); rerun the same command to resume"
    assert message in process.err
    last = read_jsonl(folder / "run/events.jsonl")[-1]
    assert (last["event"], last["step"]) == ("stop", stopped["step"])
    return code


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["plain", "native", "torchrun"])
def test_stop_and_go_on(kind: str, folder: Path, uninterrupted: list[float]) -> None:
    """Stop and resume twice; under torchrun, which has its own exit code, once."""
    arguments = ["--config=tiny.yaml", *SLOW]
    if kind == "torchrun":
        command = [str(ROOT / "launch/torchrun.sh"), "--device=cpu", *arguments]
        variables = {"NPROC_PER_NODE": "2", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        assert stop_after(2, command, folder, by="SIGTERM", **variables) == 1
    else:
        command = [*STARTS[kind], *arguments]
        assert stop_after(2, command, folder, by="SIGTERM", **temporary(folder)) == 143
        first = committed(folder / "run")[-1]
        assert stop_after(first + 2, command, folder, by="Ctrl-C", **temporary(folder)) == 143
        assert list((folder / "tmp").iterdir()) == []
        assert [event["step"] for event in events(folder / "run", "start")] == [0, first]
    assert launch("--device=cpu", *arguments) == 0
    assert losses(folder / "run") == pytest.approx(uninterrupted, rel=1e-5)
    assert not (folder / "run/STOPPED").exists()


@pytest.mark.xla
def test_native_to_xla_and_back(folder: Path, uninterrupted: list[float]) -> None:
    arguments = ["--config=tiny.yaml", *SLOW]
    native = ["--device=cpu", *arguments]
    assert launch(*native, "train.stop_at=2") == 0
    more = ["checkpoint.export=true", "memory.gradient_checkpointing=auto"]
    assert stop_after(4, [*STARTS["xla"], *arguments, *more], folder, by="SIGTERM") == 143
    assert events(folder / "run", "start")[-1]["chosen"] == {"memory.gradient_checkpointing": "full"}
    said = (folder / "run/logs/run.log").read_text()
    assert "portable_fsdp.checkpoint export run run/export" in said, "a stopped run exports nothing"
    assert said.count("compiling step 3; ") == 1
    assert names_in(folder / "run/logs") == ["run.log", "stderr-0.log"]
    assert launch(*native) == 0
    assert losses(folder / "run") == pytest.approx(uninterrupted, rel=1e-5)
    checkpoints = sorted((folder / "run/checkpoints").iterdir())
    written_by = [read_manifest(checkpoint).written_by.backend for checkpoint in checkpoints]
    assert written_by == ["native", "xla", "native"]


def test_a_stop_before_anything_is_saved_is_not_called_one(folder: Path) -> None:
    """143 promises a checkpoint; processes that still import have none to give."""
    command = [*PYTHON, "--device=cpu", "--num_devices=2", "--config=tiny.yaml"]
    with started(command, folder) as process:
        process.wait_until(lambda: len(psutil.Process(process.pid).children(recursive=True)) >= 3)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        code = process.wait()
        assert psutil.wait_procs(workers, timeout=5)[1] == []  # none outlives the process that was told to end
    assert code == 1, process.err
    assert "stopped before the first step of this start ended: it saved nothing" in process.err
    assert not (folder / "run" / "STOPPED").exists()


def test_a_stop_while_a_corpus_is_tokenized_ends_at_once(folder: Path) -> None:
    """It waits for another process that tokenizes the same: this one, which holds the lock and does nothing."""
    made, waits = folder / "made", folder / "waits"
    here = ["--config=tiny.yaml", f"data.cache_dir={made}", f"run.dir={folder / 'made_by'}", "train.stop_at=1"]
    assert launch("--device=cpu", *here) == 0
    [lock] = made.glob("*.lock")
    waits.mkdir()
    command = [*PYTHON, "--device=cpu", "--config=tiny.yaml", f"data.cache_dir={waits}"]
    with (waits / lock.name).open("w") as held, started(command, folder) as process:
        fcntl.flock(held, fcntl.LOCK_EX)
        process.wait_until(lambda: "another process tokenizes this corpus" in process.err)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 1
    assert "stopped before the first step (SIGTERM): nothing to save" in process.err
    assert "Traceback" not in process.err
    assert list(waits.iterdir()) == [waits / lock.name]


def test_help_imports_nothing_that_takes_long() -> None:
    command = [sys.executable, "-X", "importtime", *PYTHON[1:], "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "--num_devices" in done.stdout
    imported = re.findall(r"\| +([a-z_]+)$", done.stderr, re.MULTILINE)
    assert "portable_fsdp" in imported
    assert {"torch", "transformers", "numpy", "pydantic", "yaml"}.isdisjoint(imported)
