"""The launch scripts: sound bash, and what torchrun.sh would start, to the letter. `torchrun` is a recorder on PATH."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from shells import ROOT, TRICKY, Shell

SOURCED = ROOT / "launch/tpu_workers.sh"
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), ROOT / "launch/slurm.sbatch", ROOT / ".ci/run"])
TORCHRUN = ROOT / "launch/torchrun.sh"


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path, "torchrun", "python")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_is_sound_bash(script: Path) -> None:
    assert os.access(script, os.X_OK) == (script != SOURCED), f"{script}: is it executable?"
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run([shellcheck, "--severity=style", "-x", script], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_shellcheck_finds_arguments_torn_apart_on_their_way_to_ssh(tmp_path: Path) -> None:
    script = tmp_path / "torn.sh"
    script.write_text('#!/usr/bin/env bash\ngcloud compute tpus tpu-vm ssh slice --command="python train.py $@"\n')
    shellcheck = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert "SC2145" in found.stdout


CHECK = ["python", "-m", "portable_fsdp.explain", "--strict", "--json"]
PYTHON = f"""#!/bin/bash
[[ $1 == -c ]] && echo "${{GPUS:-auto}}" || exec "{sys.executable}" "$@"
"""  # it has so many GPUs


def launch(*arguments: str) -> list[str]:
    return ["--max-restarts=3", "-m", "portable_fsdp.launch", "--device=cuda", *arguments]


def test_torchrun_on_one_node(shell: Shell) -> None:
    arguments = ["--config=configs/llama_1b.yaml", *TRICKY]
    done = shell.run(TORCHRUN, *arguments, variables={"NPROC_PER_NODE": "8"})
    assert (done.returncode, done.stderr) == (0, "")
    assert shell.calls() == [
        [*CHECK, "--num_devices=8", "--num_hosts=1", "--device=cuda", *arguments],
        ["torchrun", "--standalone", "--nproc-per-node=8", *launch(*arguments)],
    ]


def test_without_a_gpu_torchrun_is_not_started(shell: Shell) -> None:
    shell.install("python", PYTHON)
    done = shell.run(TORCHRUN, "--config=configs/quickstart.yaml", variables={"GPUS": "0"})
    assert done.returncode == 2
    assert done.stderr.startswith("torchrun.sh: NPROC_PER_NODE=gpu: expected a GPU, torch sees none here.")
    assert shell.calls() == []


def test_torchrun_takes_every_gpu_unless_told(shell: Shell) -> None:
    shell.run(TORCHRUN, "--config=c.yaml", variables={"MAX_RESTARTS": "7"})
    assert {"--nproc-per-node=gpu", "--max-restarts=7"} <= {*shell.calls()[-1]}


def test_torchrun_on_several_nodes(shell: Shell) -> None:
    variables = {"NNODES": "2", "RDZV_ENDPOINT": "node0:29500", "RDZV_ID": "job 7"}
    done = shell.run(TORCHRUN, "--config=c.yaml", variables=variables)
    assert (done.returncode, done.stderr) == (0, "")
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job 7", "--rdzv-endpoint=node0:29500"]
    [counting, checking, training] = shell.calls()
    assert counting[:2] == ["python", "-c"]
    assert checking == [*CHECK, "--num_devices=auto", "--num_hosts=2", "--device=cuda", "--config=c.yaml"]
    assert training == ["torchrun", *meeting, "--nproc-per-node=gpu", *launch("--config=c.yaml")]


@pytest.mark.parametrize(
    ("variables", "said"),
    [({"NNODES": "2"}, "needs RDZV_ENDPOINT"), ({"NNODES": "1:2", "RDZV_ENDPOINT": "a"}, "expected one number")],
)
def test_torchrun_refuses_nodes_that_cannot_meet(shell: Shell, variables: dict[str, str], said: str) -> None:
    done = shell.run(TORCHRUN, "--config=c.yaml", variables=variables)
    assert done.returncode == 2
    assert said in done.stderr
    assert shell.calls() == []


def test_exit_code_is_the_programs_own(shell: Shell) -> None:
    shell.install("torchrun", "#!/bin/sh\nexit 7\n")
    assert shell.run(TORCHRUN, "--config=c.yaml").returncode == 7


def test_a_mistake_in_the_config_ends_before_torchrun(shell: Shell) -> None:
    shell.install("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    done = shell.run(TORCHRUN, "--config=configs/quickstart.yaml", "optim.learning_rate=1")
    assert done.returncode == 2
    assert "optim.learning_rate: unknown key" in done.stderr
    assert shell.calls() == []


@pytest.mark.parametrize(
    ("override", "variables", "said"),
    [
        ("optim.warmup_steps=151", {}, "optim.warmup_steps: expected at most 150"),
        ("compile.scan_layers=true", {}, "backend native on cuda: compile.scan_layers=true"),
        ("train.micro_batch=2", {"NPROC_PER_NODE": "8"}, "devices = 2 * 8 = 16 sequences, found 24"),
        ("train.micro_batch=2", {"GPUS": "5"}, "devices = 2 * 5 = 10 sequences, found 24"),
        (
            "train.micro_batch=2",
            {"GPUS": "4", "NNODES": "2", "RDZV_ENDPOINT": "a"},
            "devices = 2 * 8 = 16 sequences, found 24",
        ),
    ],
)
def test_what_the_run_would_refuse_ends_before_torchrun(
    shell: Shell, override: str, variables: dict[str, str], said: str
) -> None:
    shell.install("python", PYTHON)
    done = shell.run(TORCHRUN, "--config=configs/quickstart.yaml", override, variables=variables)
    assert done.returncode == 2
    assert said in done.stderr
    assert shell.calls() == []


def test_a_config_that_fits_is_started(shell: Shell) -> None:
    shell.install("python", PYTHON)
    done = shell.run(TORCHRUN, "--config=configs/quickstart.yaml", variables={"GPUS": "6"})
    assert (done.returncode, done.stderr) == (0, "")
    assert [call[0] for call in shell.calls()] == ["torchrun"]


def test_dry_run_prints_what_would_be_called_and_calls_nothing(shell: Shell) -> None:
    shown = shell.run(TORCHRUN, "--dry-run", *TRICKY, variables={"NPROC_PER_NODE": "8"})
    assert (shown.returncode, shown.stderr, shell.calls()) == (0, "", [])
    shell.run(TORCHRUN, *TRICKY, variables={"NPROC_PER_NODE": "8"})
    really = shell.calls()
    assert len(really) == 2
    shell.run("bash", "-c", shown.stdout)
    assert shell.calls() == really
