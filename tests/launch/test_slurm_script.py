"""slurm.sbatch in a Slurm of this machine: what the step is, and what becomes of the ways in which it can end."""

import os
import signal
import sys
from pathlib import Path

import pytest
import yaml
from cli import TINY, started
from shells import ROOT, TRICKY, Shell

SCRIPT = ROOT / "launch/slurm.sbatch"
TORCHRUN = """#!/usr/bin/env bash
# Two lives: the first waits for a signal, saves, and ends as torchrun does.
echo "torchrun $* of node $SLURM_NODEID" >> "$CLOUD/lives"
[[ -z ${SLURM_RESTART_COUNT:-} ]] || exit 0
trap 'echo "{\\"step\\": 3}" > run/STOPPED; exit 1' TERM
touch "$CLOUD/up$SLURM_NODEID"
while true; do sleep 0.05; done
"""
PYTHON = f"""#!/bin/sh
case "$2" in *torch.cuda*) echo "${{GPUS:-2}}"; exit;; esac
PYTHONPATH="{ROOT}" exec "{sys.executable}" "$@"
"""


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    shell = Shell(tmp_path, "torchrun")
    for name in ("sbatch", "srun", "scontrol"):
        shell.install_fake(name, "fake_slurm.py")
    # No venv of the checkout, since the script runs in `tmp_path`; and a torch that sees so many GPUs.
    shell.install("python", PYTHON)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    (tmp_path / "run").mkdir()
    return shell


def test_the_step(shell: Shell, tmp_path: Path) -> None:
    done = shell.run("sbatch", SCRIPT, "--config=tiny.yaml", "optim.lr=1e-3", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    calls = shell.calls()
    torchrun = [
        *("torchrun", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=4711", "--rdzv-endpoint=localhost:24711"),
        *("--nproc-per-node=gpu", "--max-restarts=3", "-m", "portable_fsdp.launch", "--device=cuda"),
        *("--config=tiny.yaml", "optim.lr=1e-3"),
    ]
    names = [call[0] for call in calls]
    assert names == ["sbatch", "scontrol", "srun", "torchrun", "torchrun"]
    assert calls[1] == ["scontrol", "show", "hostnames", "nodes"]
    assert calls[2] == ["srun", "--kill-on-bad-exit=1", *torchrun]
    assert calls[3] == calls[4] == torchrun


def test_one_task_a_node() -> None:
    lines = SCRIPT.read_text().splitlines()
    wanted = ["--ntasks-per-node=1", "--signal=B:USR1@300", "--requeue", "--open-mode=append"]
    assert {f"#SBATCH {option}" for option in wanted} <= {*lines}


def test_without_a_gpu_there_is_no_step(shell: Shell, tmp_path: Path) -> None:
    done = shell.run("sbatch", SCRIPT, "--config=tiny.yaml", variables={"GPUS": "0"}, cwd=tmp_path)
    assert done.returncode == 2
    assert "slurm.sbatch: NPROC_PER_NODE=gpu: expected a GPU, torch sees none here." in done.stderr
    assert "srun" not in [call[0] for call in shell.calls()]


def test_an_option_that_sbatch_does_not_know_is_found(shell: Shell, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.sbatch"
    wrong.write_text(SCRIPT.read_text().replace("--requeue", "--requeu"))
    done = shell.run("sbatch", wrong, "--config=tiny.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "unrecognized option '--requeu'" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM], ids=["time limit", "preemption"])
def test_a_job_that_is_to_end_saves_and_is_queued_again(shell: Shell, tmp_path: Path, number: signal.Signals) -> None:
    shell.install("torchrun", TORCHRUN)
    command = [str(shell.programs / "sbatch"), SCRIPT, "--config=tiny.yaml"]
    with started(command, tmp_path, **shell.environment()) as job:
        job.wait_until(lambda: all((shell.cloud / f"up{node}").exists() for node in range(2)))
        pid = int((shell.cloud / "batch.pid").read_text())
        os.kill(pid, number)
        assert job.wait() == 0, job.err
    assert 'stopped after a save: {"step": 3}' in job.out
    lives = (shell.cloud / "lives").read_text().splitlines()
    assert len(lives) == 4  # two nodes, twice
    assert ["scontrol", "requeue", "4711"] in shell.calls()
    assert not (tmp_path / "run/STOPPED").exists()  # else a failure of the second life would pass for a stop


def test_a_failure_is_not_queued_again(shell: Shell, tmp_path: Path) -> None:
    shell.install("torchrun", "#!/bin/sh\nexit 1\n")
    (tmp_path / "run/STOPPED").touch()  # of an earlier life
    assert shell.run("sbatch", SCRIPT, "--config=tiny.yaml", cwd=tmp_path).returncode == 1
    assert ["scontrol", "requeue", "4711"] not in shell.calls()


def test_a_mistake_in_the_config_ends_the_job_before_the_step(shell: Shell, tmp_path: Path) -> None:
    done = shell.run("sbatch", SCRIPT, "--config=tiny.yaml", "optim.l=1", cwd=tmp_path)
    assert done.returncode == 2
    assert "optim.l: unknown key" in done.stderr
    assert "srun" not in [call[0] for call in shell.calls()]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optim.warmup_steps=7", "optim.warmup_steps: expected at most 6"),
        ("compile.scan_layers=true", "backend native on cuda (6 device(s) of 2 host(s)): compile.scan_layers=true"),
        ("train.micro_batch=1", "devices = 1 * 6 = 6 sequences, found 4"),
    ],
)
def test_what_the_run_would_refuse_ends_the_job_before_the_step(
    shell: Shell, tmp_path: Path, override: str, said: str
) -> None:
    variables = {"NPROC_PER_NODE": "3"}
    done = shell.run("sbatch", SCRIPT, "--config=tiny.yaml", override, cwd=tmp_path, variables=variables)
    assert done.returncode == 2
    assert said in done.stderr
    assert "srun" not in [call[0] for call in shell.calls()]


def test_no_host_is_an_error(shell: Shell, tmp_path: Path) -> None:
    shell.install("scontrol", "#!/bin/sh\n")
    done = shell.run("sbatch", SCRIPT, "--config=tiny.yaml", cwd=tmp_path)
    assert done.returncode == 1
    assert "names no host" in done.stderr


def test_dry_run_prints_the_step_anywhere(shell: Shell, tmp_path: Path) -> None:
    shown = shell.run("bash", SCRIPT, "--dry-run", *TRICKY, cwd=tmp_path)
    assert (shown.returncode, shown.stderr, shell.calls()) == (0, "", [])
    shell.run("bash", "-c", shown.stdout, variables={"NODES": "1"})
    [srun, torchrun] = shell.calls()
    assert torchrun == srun[2:]
    assert torchrun[-len(TRICKY) :] == TRICKY
    assert "--rdzv-endpoint=FIRST_HOST:20000" in torchrun
