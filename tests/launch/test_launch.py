"""The command line, really run: every start, a stop in the middle of each, a kill; what a run's folder holds."""

import fcntl
import json
import math
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
import torch
from cli import PROGRAMS, PYTHON, ROOT, TINY, TORCHRUN, Started, committed, events, launch, losses, started, tiny_config
from test_pretrained_run import write_repository
from transformers import AutoModelForCausalLM, AutoTokenizer

from portable_fsdp.checkpoint.format import read_manifest
from portable_fsdp.config.load import load_config
from portable_fsdp.metrics.sinks import read_jsonl
from portable_fsdp.runtime.lock import LOCK_NAME
from portable_fsdp.train.early_checks import nothing_left

STARTS: dict[str, list[str]] = {
    "plain": [*PYTHON, "--device=cpu"],
    "torchrun": [*TORCHRUN, "--device=cpu"],
    "several": [*PYTHON, "--device=cpu", "--backend=native", "--num_devices=2"],
    "xla": [*PYTHON, "--device=cpu", "--backend=xla", "--num_devices=4"],
}
KEYS = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "mfu",
    "memory_bytes",
    "seconds",
    "data_seconds",
]
CONSOLE_LINE = (
    r"step: \d+  loss: \d+\.\d+  grad_norm: \d+\.\d+  memory: \d+\.\d+GiB\(\d+%\)  tps: [\d,]+  tflops: \d+\.\d+"
)


# ------------------------------------------------------------------------------------------------ the four starts


@pytest.fixture(scope="module")
def native_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Started, Path]]:
    return run_to_the_end(["plain", "torchrun", "several"], tmp_path_factory)


def run_to_the_end(kinds: Sequence[str], folders: pytest.TempPathFactory) -> dict[str, tuple[int, Started, Path]]:
    """Exit code, what it said, and the run's folder of each start: the same command, each in a folder of its own."""
    with ExitStack() as stack:  # at the same time: most of it is importing
        running: dict[str, tuple[Started, Path]] = {}
        for kind in kinds:
            folder = folders.mktemp(kind)
            command = [*STARTS[kind], f"--config={tiny_config(folder)}"]
            running[kind] = stack.enter_context(started(command, folder, **temporary(folder))), folder / "run"
        return {kind: (process.wait(), process, run) for kind, (process, run) in running.items()}


def temporary(folder: Path) -> dict[str, str]:
    """The variable that lets a start make its temporary files in `folder`/tmp."""
    (folder / "tmp").mkdir(exist_ok=True)
    return {"TMPDIR": str(folder / "tmp")}


@pytest.mark.parametrize(("kind", "devices"), [("plain", 1), ("torchrun", 2), ("several", 2)])
def test_native_start(native_runs: dict[str, tuple[int, Started, Path]], kind: str, devices: int) -> None:
    check_run(*native_runs[kind], backend="native", devices=devices)
    assert kind != "plain" or native_runs[kind][1].err.startswith("started by hand (no launcher)\n")
    left = list((native_runs[kind][2].parent / "tmp").iterdir())
    assert kind == "torchrun" or left == []  # torchrun leaves a folder for logs
    assert losses(native_runs[kind][2]) == pytest.approx(losses(native_runs["plain"][2]), rel=1e-5)


@pytest.mark.xla
def test_xla_start(native_runs: dict[str, tuple[int, Started, Path]], tmp_path_factory: pytest.TempPathFactory) -> None:
    xla = run_to_the_end(["xla"], tmp_path_factory)["xla"]
    check_run(*xla, backend="xla", devices=4)
    assert losses(xla[2]) == pytest.approx(losses(native_runs["plain"][2]), rel=1e-5)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check_run(code: int, console: Started, run: Path, *, backend: str, devices: int) -> None:
    """All that a finished run of six steps leaves, in its folder and on the console."""
    assert code == 0, console.err
    assert names_in(run) == ["checkpoints", "config.yaml", "events.jsonl", "metrics.jsonl"]
    assert load_config(run / "config.yaml") == load_config(run.parent / "tiny.yaml")
    assert committed(run) == [4, 6]
    assert names_in(run / "checkpoints/step-00000006") == ["manifest.json", "model", "optimizer"]
    rows = read_jsonl(run / "metrics.jsonl")
    of_each = [KEYS + ["processes"] * (row["step"] in (1, 2, 4, 6)) for row in rows]  # where the console has a line
    assert [list(row) for row in rows] == of_each
    assert all(value > 0 for value in rows[-1]["processes"]["memory_bytes"])
    assert losses(run)[0] == pytest.approx(math.log(256), rel=0.03)
    assert losses(run)[-1] < losses(run)[0]
    assert {row["tokens"] for row in rows} == {128}
    start, *saves = read_jsonl(run / "events.jsonl")
    if backend == "native":
        collectives = saves.pop(0)
        assert collectives["event"] == "collectives"
        assert ("all_gather" in collectives) == (devices > 1)
    assert (start["event"], start["step"], start["backend"], start["devices"]) == ("start", 0, backend, devices)
    assert [(event["event"], event["step"]) for event in saves] == [("save", 4), ("save", 6)]
    lines = [line for line in console.err.splitlines() if line.startswith("step: ")]
    assert len(lines) == 4, console.err  # 1, 2, 4 and 6
    assert all(re.fullmatch(CONSOLE_LINE, line) for line in lines), lines
    assert "Traceback" not in console.err


def test_the_same_command_again_finds_nothing_to_do(
    native_runs: dict[str, tuple[int, Started, Path]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = native_runs["plain"][2]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "events.jsonl"}
    monkeypatch.chdir(run.parent)
    assert launch("--device=cpu", "--config=tiny.yaml") == 0
    assert "step 6 of 6 is saved already: nothing left to train" in capsys.readouterr().err
    assert all(path.read_bytes() == content for path, content in before.items())
    assert {path for path in run.rglob("*") if path.is_file()} == {*before, run / "events.jsonl"}


@pytest.mark.parametrize(
    ("overrides", "is_finished"),
    [
        ([], True),
        (["train.log_every=3", "run.dir=copy"], True),
        (["train.stop_at=4"], True),
        (["train.steps=7"], False),
        (["optim.lr=0.5"], False),
        (["checkpoint.export=true"], False),
        (["checkpoint.resume=copy/checkpoints/step-00000006"], False),
        (["run.dir=damaged"], False),
        (["run.dir=damaged", "checkpoint.verify=size"], True),
        (["run.dir=cut", "checkpoint.verify=size"], False),
        (["run.dir=new"], False),
    ],
)
def test_a_finished_run_is_told_by_its_newest_checkpoint(
    native_runs: dict[str, tuple[int, Started, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    is_finished: bool,
) -> None:
    run = native_runs["plain"][2]
    monkeypatch.chdir(tmp_path)
    for name in ("copy", "damaged", "cut"):
        shutil.copytree(run, name)
        file = next(Path(name).glob("checkpoints/step-00000006/model/*.safetensors"))
        content = file.read_bytes()
        file.write_bytes({"copy": content, "damaged": content[:-1] + b"\x7f", "cut": content[:-1]}[name])
    config = load_config(run.parent / "tiny.yaml", ["run.dir=copy", *overrides])
    assert (nothing_left(config) is not None) == is_finished


def test_a_finished_run_whose_files_changed_looks_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "a.txt"
    text.write_text("a line of some words\n" * 200)
    (tmp_path / "config.json").write_text(json.dumps(TINY["model"]["architecture"]))
    files = ["data.source=text", f"data.path={text}", "model.architecture=config.json"]
    assert launch("--device=cpu", f"--config={tiny_config(tmp_path)}", *files) == 0
    config = load_config(tmp_path / "tiny.yaml", files)
    assert nothing_left(config) is not None
    text.write_text(text.read_text() + "and one more\n")
    assert nothing_left(config) is None


def test_export_of_a_run_that_was_finished_elsewhere(
    native_runs: dict[str, tuple[int, Started, Path]], tmp_path: Path
) -> None:
    finished = native_runs["several"][2] / "checkpoints/step-00000006"
    here = [f"run.dir={tmp_path / 'run'}", f"checkpoint.resume={finished}", "checkpoint.export=true"]
    assert launch("--device=cpu", f"--config={tiny_config(tmp_path)}", *here) == 0
    assert (tmp_path / "run/export/model.safetensors").is_file()


def test_flags_may_follow_overrides_and_the_later_value_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # run.dir is taken from here, wherever the config lies
    config = f"--config={tiny_config(tmp_path)}"
    assert launch("--device=cuda", config, "train.stop_at=2", "run.dir=runs/x", "train.stop_at=1", "--device=cpu") == 0
    assert committed(tmp_path / "runs/x") == [1]


def test_a_resumed_run_tells_its_collectives_too(tmp_path: Path) -> None:
    """It may run on another number of devices."""
    arguments = ["--device=cpu", f"--config={tiny_config(tmp_path)}", f"run.dir={tmp_path / 'run'}"]
    for stop_at in (2, 4):
        assert launch(*arguments, f"train.stop_at={stop_at}") == 0
    kinds = [event["event"] for event in read_jsonl(tmp_path / "run/events.jsonl")]
    assert kinds == ["start", "collectives", "save", "start", "resume", "collectives", "save"]


SIZES = (
    "hidden_size=64 intermediate_size=128 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2 head_dim=16"
)
LLAMA_IN_SMALL = [
    *(f"model.architecture.{size}" for size in SIZES.split()),
    *("data.source=python_docs", "data.seq_len=32", "train.global_batch=4", "train.micro_batch=2"),
]
CONFIGS = {
    "quickstart": ["train.global_batch=2", "data.seq_len=64"],
    "llama_1b": LLAMA_IN_SMALL,
    "llama_8b": LLAMA_IN_SMALL,
    "finetune_smollm2": ["model.pretrained=model", "model.gguf_file=null", "data.seq_len=32", "train.eval_every=2"],
}


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_config_is_started(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_repository(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    shrunk = [*CONFIGS[config.stem], "train.stop_at=2", "run.dir=run"]
    assert launch("--device=cpu", f"--config={config}", *shrunk) == 0
    assert len(losses(tmp_path / "run")) == 2
    assert committed(tmp_path / "run") == [2]


# -------------------------------------------------------------------------------------------------- stop, resume

# Steps of 32 micro batches: slow enough that a signal meets the run in the middle.
SLOW = ["train.steps=16", "train.global_batch=32", "checkpoint.every=100"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert launch("--device=cpu", f"--config={tiny_config(folder)}", *SLOW, f"run.dir={folder / 'run'}") == 0
    return losses(folder / "run")


def stop_after(step: int, command: list[str], folder: Path, *, by: str, **variables: str) -> int:
    """Start, wait for the row of `step`, stop it; the exit code, once what a stopped run promises has been checked."""
    with started(command, folder, **variables) as process:
        process.wait_until(lambda: has_row(folder / "run", step))
        process.press_ctrl_c() if by == "Ctrl-C" else process.send(signal.SIGTERM)
        code = process.wait()
    stopped = json.loads((folder / "run/STOPPED").read_text())
    assert stopped["reason"] in ("SIGTERM", "SIGINT")
    assert step <= stopped["step"] < 16, "it was not stopped in the middle"
    assert len(losses(folder / "run")) == stopped["step"] == committed(folder / "run")[-1]
    assert (
        f"stopped after step {stopped['step']} ({stopped['reason']}); rerun the same command to resume" in process.err
    )
    last = read_jsonl(folder / "run/events.jsonl")[-1]
    assert (last["event"], last["step"]) == ("stop", stopped["step"])
    return code


def has_row(run: Path, step: int) -> bool:
    path = run / "metrics.jsonl"
    return path.exists() and any(row["step"] >= step for row in read_jsonl(path))


@pytest.mark.parametrize("kind", ["plain", pytest.param("several", marks=pytest.mark.proof)])
def test_stop_twice_and_go_on(kind: str, tmp_path: Path, uninterrupted: list[float]) -> None:
    arguments = [f"--config={tiny_config(tmp_path)}", *SLOW]
    command = [*STARTS[kind], *arguments]
    assert stop_after(2, command, tmp_path, by="SIGTERM", **temporary(tmp_path)) == 143
    first = committed(tmp_path / "run")[-1]
    assert stop_after(first + 2, command, tmp_path, by="Ctrl-C", **temporary(tmp_path)) == 143
    assert list((tmp_path / "tmp").iterdir()) == []
    assert [event["step"] for event in events(tmp_path / "run", "start")] == [0, first]
    assert launch("--device=cpu", *arguments, f"run.dir={tmp_path / 'run'}") == 0
    assert losses(tmp_path / "run") == pytest.approx(uninterrupted, rel=1e-5)
    assert not (tmp_path / "run/STOPPED").exists()


def test_stop_under_torchrun_and_go_on(tmp_path: Path, uninterrupted: list[float]) -> None:
    command = [str(ROOT / "launch/torchrun.sh"), "--device=cpu", f"--config={tiny_config(tmp_path)}", *SLOW]
    variables = {"NPROC_PER_NODE": "2", "PATH": f"{PROGRAMS}:/usr/bin:/bin"}
    assert stop_after(2, command, tmp_path, by="SIGTERM", **variables) == 1  # torchrun's own
    assert launch("--device=cpu", *command[2:], f"run.dir={tmp_path / 'run'}") == 0
    assert losses(tmp_path / "run") == pytest.approx(uninterrupted, rel=1e-5)


@pytest.mark.xla
def test_native_to_xla_stop_go_on_and_export(tmp_path: Path, uninterrupted: list[float]) -> None:
    arguments = [f"--config={tiny_config(tmp_path)}", *SLOW]
    assert launch("--device=cpu", *arguments, f"run.dir={tmp_path / 'run'}", "train.stop_at=2") == 0
    command = [*PYTHON, "--device=cpu", "--backend=xla", "--num_devices=2", *arguments, "checkpoint.export=true"]
    assert stop_after(4, command, tmp_path, by="SIGTERM") == 143
    with started(command, tmp_path) as again:
        assert again.wait() == 0, again.err
    assert losses(tmp_path / "run") == pytest.approx(uninterrupted, rel=1e-5)
    checkpoints = sorted((tmp_path / "run/checkpoints").iterdir())
    written_by = [read_manifest(checkpoint).written_by.backend for checkpoint in checkpoints]
    assert written_by == ["native", "xla", "xla"]
    check_export(tmp_path / "run/export")


def check_export(folder: Path) -> None:
    """It opens as any model does, and its loss is that of a model which has learnt something."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("The value of an object", return_tensors="pt")["input_ids"]
    assert tokens.tolist() == [list(b"The value of an object")]
    with torch.no_grad():
        assert model(tokens, labels=tokens).loss < 5.0


def test_a_stop_before_anything_is_saved_is_not_called_one(tmp_path: Path) -> None:
    """143 promises a checkpoint; processes that still import have none to give."""
    tiny_config(tmp_path)
    command = [*PYTHON, "--device=cpu", "--num_devices=2", "--config=tiny.yaml"]
    with started(command, tmp_path) as process:
        process.wait_until(lambda: len(psutil.Process(process.pid).children()) >= 2)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send(signal.SIGTERM)
        code = process.wait()
        assert psutil.wait_procs(workers, timeout=5)[1] == []  # none outlives the process that was told to end
    assert code == 1, process.err
    assert "stopped before a save" in process.err
    assert not (tmp_path / "run" / "STOPPED").exists()


def test_a_stop_while_a_corpus_is_tokenized_ends_at_once(tmp_path: Path) -> None:
    """It waits for another process that tokenizes the same: this one, which holds the lock and does nothing."""
    config = tiny_config(tmp_path)
    made, waits = tmp_path / "made", tmp_path / "waits"
    here = [f"--config={config}", f"data.cache_dir={made}", f"run.dir={tmp_path / 'made_by'}", "train.stop_at=1"]
    assert launch("--device=cpu", *here) == 0
    [lock] = made.glob("*.lock")
    waits.mkdir()
    command = [*PYTHON, "--device=cpu", f"--config={config}", f"data.cache_dir={waits}"]
    with (waits / lock.name).open("w") as held, started(command, tmp_path) as process:
        fcntl.flock(held, fcntl.LOCK_EX)
        process.wait_until(lambda: "another process tokenizes this corpus" in process.err)
        process.send(signal.SIGTERM)
        assert process.wait(20) == 1
    assert "stopped before the first step (SIGTERM): nothing to save" in process.err
    assert "Traceback" not in process.err
    assert list(waits.iterdir()) == [waits / lock.name]


def test_kill_loses_no_more_than_the_steps_since_the_last_save(tmp_path: Path, uninterrupted: list[float]) -> None:
    run = tmp_path / "run"
    arguments = [f"--config={tiny_config(tmp_path)}", *SLOW, "checkpoint.every=3"]
    with started([*STARTS["several"], *arguments], tmp_path) as process:
        process.wait_until(lambda: has_row(run, 5))
        owner = json.loads((run / LOCK_NAME).read_text())["pid"]
        process.kill()
    assert (run / LOCK_NAME).exists()  # which stops nobody, now that its process is gone
    assert not psutil.pid_exists(owner)
    last = committed(run)[-1]
    assert 3 <= last < 16
    assert launch("--device=cpu", *arguments, f"run.dir={run}") == 0
    assert read_jsonl(run / "events.jsonl")[-1]["step"] == 16
    assert [event["step"] for event in events(run, "start")] == [0, last]
    assert losses(run) == pytest.approx(uninterrupted, rel=1e-5)


# ----------------------------------------------------------------------------------------------------------- help


def test_help_is_quick_and_imports_no_torch() -> None:
    seconds: list[float] = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-X", "importtime", *PYTHON[1:], "--help"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert "--num_devices" in done.stdout
        imported = re.findall(r"\| +([a-z_]+)$", done.stderr, re.MULTILINE)
        assert "portable_fsdp" in imported
        assert {"torch", "transformers", "numpy", "pydantic", "yaml"}.isdisjoint(imported)
    assert min(seconds) < 0.5
