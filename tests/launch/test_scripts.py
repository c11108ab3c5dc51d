"""The launch scripts: sound bash, and the transcript of each in golden/scripts: what it calls, says and ends with.

A transcript holds its own input: under each heading a command, then what comes of it. `--rewrite-goldens` plays the
commands again; `shells.play` knows the variables before a command.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cli import started
from shells import RECORDER, ROOT, TRICKY, Shell, new_shell, play

GOLDEN = Path(__file__).parent / "golden/scripts"
SOURCED = ROOT / "launch/tpu_workers.sh"
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), ROOT / "launch/slurm.sbatch", ROOT / ".ci/run"])


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return new_shell(tmp_path)


@pytest.fixture
def checkout(shell: Shell) -> Path:
    return shell.folder / "checkout"


# ------------------------------------------------------------------------------------------------------ transcripts


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_transcript(path: Path, tmp_path: Path, assert_golden: Callable[[Path, str], None]) -> None:
    scenes = re.findall(r"^## (.*)\n\$ (.*)$", path.read_text(), re.MULTILINE)
    with ThreadPoolExecutor(4) as pool:
        played = pool.map(play, *zip(*scenes, strict=True), [tmp_path / str(n) for n in range(len(scenes))])
        text = "\n".join(
            f"## {title}\n$ {line}\n{result}" for (title, line), result in zip(scenes, played, strict=True)
        )
    assert_golden(path, text)


# ------------------------------------------------------------------------------------------------------------- bash


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_is_sound_bash(script: Path) -> None:
    assert os.access(script, os.X_OK) == (script != SOURCED), f"{script}: is it executable?"
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([shellcheck, "--severity=style", "-x", script], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


# ---------------------------------------------------------------------------- what a transcript of calls can't show

TPU = {"TPU_NAME": "slice", "TPU_ZONE": "us-east5-b", "TPU_POLL_S": "0", "TPU_TYPE": "v6e-16"}
USABLE = {"tpu_vm.sh": "READY", "tpu_queued_resource.sh": "ACTIVE"}


def script_cloud(shell: Shell, usable: str, *ssh: int) -> None:
    """No TPU is there; the next ones are usable at once; the exit codes of ssh."""
    (shell.cloud / "creations.json").write_text(json.dumps([[usable]]))
    (shell.cloud / "answers.json").write_text(json.dumps(ssh))
    (shell.cloud / "slice.json").unlink(missing_ok=True)


@pytest.mark.parametrize("script", ["torchrun.sh", *USABLE])
def test_what_a_dry_run_prints_calls_the_same(shell: Shell, checkout: Path, script: str) -> None:
    words = ["run", *TRICKY] if script in USABLE else TRICKY
    variables = {**TPU, "NPROC_PER_NODE": "8"}
    script_cloud(shell, USABLE.get(script, ""), 66, 0, 0)  # 66: nothing is set up there
    shown = shell.run(ROOT, checkout / "launch" / script, "--dry-run", *words, **variables)
    assert (shown.returncode, shown.stderr, shell.calls()) == (0, "", [])
    shell.run(ROOT, checkout / "launch" / script, *words, **variables)
    really = [call for call in shell.calls() if "describe" not in call]
    if script in USABLE:  # the first answer of ssh is one that a dry run doesn't get
        really.remove(next(call for call in really if "ssh" in call))
    script_cloud(shell, USABLE.get(script, ""), 0)
    shell.run(ROOT, "bash", "-c", shown.stdout)
    assert shell.calls() == really
    assert len(really) >= 2


def test_the_dry_run_of_a_slurm_job_prints_its_step(shell: Shell, checkout: Path) -> None:
    shown = shell.run(ROOT, "bash", checkout / "launch/slurm.sbatch", "--dry-run", *TRICKY)
    assert (shown.returncode, shown.stderr, shell.calls()) == (0, "", [])
    shell.run(ROOT, "bash", "-c", shown.stdout, NODES="1")
    [srun, torchrun] = shell.calls()
    assert torchrun == srun[2:]
    assert torchrun[-len(TRICKY) :] == TRICKY


def test_one_task_a_node() -> None:
    lines = (ROOT / "launch/slurm.sbatch").read_text().splitlines()
    options = ["--ntasks-per-node=1", "--signal=B:USR1@300", "--requeue", "--open-mode=append"]
    assert {f"#SBATCH {option}" for option in options} <= {*lines}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=["time limit", "preemption"])
def test_a_job_that_is_to_end_saves_and_is_queued_again(shell: Shell, checkout: Path, number: signal.Signals) -> None:
    """Two lives of torchrun: the first waits for a signal, saves, and ends as torchrun does."""
    text = """#!/usr/bin/env bash
        echo "torchrun $* of node $SLURM_NODEID" >> "$CLOUD/lives"
        [[ -z ${SLURM_RESTART_COUNT:-} ]] || exit 0
        trap 'echo "{\\"step\\": 3}" > run/STOPPED; exit 1' TERM
        touch "$CLOUD/up$SLURM_NODEID"
        while true; do sleep 0.05; done
        """
    shell.install("torchrun", text)
    command = [str(shell.programs / "sbatch"), "launch/slurm.sbatch", "--config=tiny.yaml"]
    with started(command, checkout, **shell.environment(GPUS="2")) as job:
        job.wait_until(lambda: all((shell.cloud / f"up{node}").exists() for node in range(2)))
        os.kill(int((shell.cloud / "batch.pid").read_text()), number)
        assert job.wait() == 0, job.err
    assert 'stopped after a save: {"step": 3}' in job.out
    assert len((shell.cloud / "lives").read_text().splitlines()) == 4  # two nodes, twice
    assert ["scontrol", "requeue", "4711"] in shell.calls()
    assert not (checkout / "run/STOPPED").exists()  # else a failure of the second life would pass for a stop


@pytest.mark.parametrize("script", USABLE)
def test_a_worker_gets_the_checkout_and_every_argument_unharmed(shell: Shell, checkout: Path, script: str) -> None:
    (shell.cloud / "slice.json").write_text(json.dumps([USABLE[script]]))
    assert shell.run(ROOT, checkout / "launch" / script, "setup", **TPU).stderr == ""
    with tarfile.open(checkout / "build/portable_fsdp.tar.gz") as tar:
        files = {member.name for member in tar if member.isfile()}
    ours = {f"./launch/{path.name}" for path in (ROOT / "launch").iterdir()}
    assert files == {*ours, "./portable_fsdp/launch.py", "./tiny.yaml", "./wrong.sbatch", "./run/STOPPED"}
    shell.calls()
    arguments = ["--config=configs/llama_1b.yaml", *TRICKY]
    assert shell.run(ROOT, checkout / "launch" / script, "run", *arguments, **TPU).stderr == ""
    [line] = [word for call in shell.calls() for word in call if word.startswith("--command=")]
    line = line.removeprefix("--command=")
    home = shell.folder / "home"
    python = home / "portable_fsdp/.venv/bin/python"
    python.parent.mkdir(parents=True)
    worker = shell.run(home, "bash", "-c", line, HOME=str(home))
    assert worker.returncode == 66, "a worker without a checkout says so"
    (home / "portable_fsdp/build").mkdir()
    (home / "portable_fsdp/build/installed").touch()
    shell.install(python, RECORDER)
    worker = shell.run(home, "bash", "-c", line, HOME=str(home))
    assert (worker.returncode, worker.stderr) == (0, "")
    assert shell.calls() == [["python", "-m", "portable_fsdp.launch", "--device=tpu", *arguments]]


ENDPOINTS = "unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3"
METADATA = """#!/bin/bash
case ${@: -1} in
*/agent-worker-number) echo -n 1 ;;
*/worker-network-endpoints) %s ;;
esac
"""
SAYS_THE_SLICE = """#!/bin/bash
echo "worker $TPU_WORKER_ID of $TPU_WORKER_HOSTNAMES"
"""


@pytest.mark.parametrize(
    ("has_torchtpu", "answer", "code", "output"),
    [
        (True, f"echo -n {ENDPOINTS}", 0, "worker 1 of 10.0.0.2,10.0.0.3\n"),
        (True, "exit 22", 1, ""),
        (True, "echo -n unknown:unknown:", 1, ""),
        (False, "exit 22", 0, "worker  of \n"),
    ],
    ids=["the slice", "no attribute", "no addresses", "torch_xla asks nobody"],
)
def test_a_worker_with_torchtpu_names_the_slice_or_fails(
    shell: Shell, checkout: Path, has_torchtpu: bool, answer: str, code: int, output: str
) -> None:
    (shell.cloud / "slice.json").write_text(json.dumps(["READY"]))
    assert shell.run(ROOT, checkout / "launch/tpu_vm.sh", "run", "--config=c.yaml", **TPU).returncode == 0
    [line] = [word for call in shell.calls() for word in call if word.startswith("--command=")]
    for name in ("tr", "cut", "paste"):
        (shell.programs / name).symlink_to(str(shutil.which(name)))
    shell.install("curl", METADATA % answer)
    home = shell.folder / "home"
    python = home / "portable_fsdp/.venv/bin/python"
    for folder in (python.parent, home / "portable_fsdp/build"):
        folder.mkdir(parents=True)
    (home / "portable_fsdp/build/installed").touch()
    shell.install(python, SAYS_THE_SLICE)
    if has_torchtpu:
        (home / "portable_fsdp/.venv/lib/python3.11/site-packages/torch_tpu").mkdir(parents=True)
    worker = shell.run(home, "bash", "-c", line.removeprefix("--command="), HOME=str(home))
    assert (worker.returncode, worker.stdout) == (code, output), worker.stderr
    assert ("the metadata server names no hosts of this slice" in worker.stderr) == (code == 1)
