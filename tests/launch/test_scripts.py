"""The launch scripts: what they would start, to the letter. `torchrun` and `gcloud` are recorders on PATH."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), ROOT / ".ci/run"])
TORCHRUN = ROOT / "launch/torchrun.sh"
TPU_VM = ROOT / "launch/tpu_vm.sh"
TPU = {"TPU_NAME": "slice", "TPU_ZONE": "us-east5-b"}
TRICKY = ['run.name=it\'s $HOME; `id` "&" *', "run.dir=a folder/ü", "data.path=corpus/**/*.txt", ""]

RECORDER = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + "\\n")
"""


class Shell:
    """Runs command lines with recorders in place of the programs that need a cluster."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "bin"
        self.record = folder / "record.jsonl"
        self.programs.mkdir()
        for name in ("torchrun", "gcloud"):
            self.install(self.programs / name)

    def install(self, program: Path) -> None:
        program.write_text(RECORDER)
        program.chmod(0o755)

    def run(
        self, *argv: str | Path, variables: dict[str, str] | None = None, cwd: Path = ROOT
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "HOME": os.environ.get("HOME", "/"),
            "RECORD": str(self.record),
            **(variables or {}),
        }
        return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)

    def calls(self) -> list[list[str]]:
        """The argument lists recorded since the last look."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script_is_sound_bash(script: Path) -> None:
    assert os.access(script, os.X_OK), f"{script} is not executable"
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run([shellcheck, "--severity=style", script], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


def test_shellcheck_finds_arguments_torn_apart_on_their_way_to_ssh(tmp_path: Path) -> None:
    script = tmp_path / "torn.sh"
    script.write_text('#!/usr/bin/env bash\ngcloud compute tpus tpu-vm ssh slice --command="python train.py $@"\n')
    shellcheck = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert "SC2145" in found.stdout


def test_torchrun_on_one_node(shell: Shell) -> None:
    done = shell.run(TORCHRUN, "--config=configs/llama_1b.yaml", *TRICKY, variables={"NPROC_PER_NODE": "8"})
    assert (done.returncode, done.stderr) == (0, "")
    launch = ["-m", "portable_fsdp.launch", "--device=cuda", "--config=configs/llama_1b.yaml", *TRICKY]
    assert shell.calls() == [["torchrun", "--standalone", "--nproc-per-node=8", *launch]]


def test_torchrun_takes_every_gpu_unless_told(shell: Shell) -> None:
    shell.run(TORCHRUN, "--config=c.yaml")
    assert "--nproc-per-node=gpu" in shell.calls()[0]


def test_torchrun_on_several_nodes(shell: Shell) -> None:
    variables = {"NNODES": "2", "RDZV_ENDPOINT": "node0:29500", "RDZV_ID": "job 7"}
    done = shell.run(TORCHRUN, "--config=c.yaml", variables=variables)
    assert (done.returncode, done.stderr) == (0, "")
    meeting = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=job 7", "--rdzv-endpoint=node0:29500"]
    launch = ["-m", "portable_fsdp.launch", "--device=cuda", "--config=c.yaml"]
    assert shell.calls() == [["torchrun", *meeting, "--nproc-per-node=gpu", *launch]]


def test_torchrun_on_several_nodes_needs_an_endpoint(shell: Shell) -> None:
    done = shell.run(TORCHRUN, "--config=c.yaml", variables={"NNODES": "2"})
    assert done.returncode == 2
    assert "RDZV_ENDPOINT" in done.stderr
    assert shell.calls() == []


def test_exit_code_is_the_programs_own(shell: Shell) -> None:
    (shell.programs / "torchrun").write_text("#!/bin/sh\nexit 7\n")
    assert shell.run(TORCHRUN, "--config=c.yaml").returncode == 7


@pytest.mark.parametrize(
    ("script", "arguments"),
    [(TORCHRUN, TRICKY), (TPU_VM, ["run", *TRICKY])],
    ids=["torchrun", "tpu_vm run"],
)
def test_dry_run_prints_what_would_be_called_and_calls_nothing(
    shell: Shell, script: Path, arguments: list[str]
) -> None:
    shown = shell.run(script, "--dry-run", *arguments, variables=TPU)
    assert (shown.returncode, shown.stderr, shell.calls()) == (0, "", [])
    shell.run(script, *arguments, variables=TPU)
    really = shell.calls()
    shell.run("bash", "-c", shown.stdout)
    assert shell.calls() == really


def remote_command(call: list[str], name: str = "slice") -> str:
    """What the workers' shell gets from a recorded gcloud call."""
    head = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", name, "--zone=us-east5-b", "--worker=all"]
    assert call[:-1] == head
    return call[-1].removeprefix("--command=")


def test_tpu_vm_run_hands_every_argument_on_unharmed(shell: Shell, tmp_path: Path) -> None:
    done = shell.run(TPU_VM, "run", "--config=configs/llama_1b.yaml", *TRICKY, variables=TPU)
    assert (done.returncode, done.stderr) == (0, "")
    [call] = shell.calls()
    home = tmp_path / "home"
    python = home / "portable_fsdp/.venv/bin/python"
    python.parent.mkdir(parents=True)
    shell.install(python)
    assert shell.run("bash", "-c", remote_command(call), variables={"HOME": str(home)}, cwd=home).stderr == ""
    launch = ["-m", "portable_fsdp.launch", "--device=tpu", "--config=configs/llama_1b.yaml", *TRICKY]
    assert shell.calls() == [["python", *launch]]


def test_tpu_vm_run_sets_the_device_that_torch_xla_reads(shell: Shell) -> None:
    shell.run(TPU_VM, "run", "--config=c.yaml", variables=TPU)
    assert "PJRT_DEVICE=TPU .venv/bin/python" in remote_command(shell.calls()[0])


def test_tpu_vm_project_reaches_gcloud(shell: Shell) -> None:
    shell.run(TPU_VM, "run", "--config=c.yaml", variables={**TPU, "TPU_PROJECT": "mine"})
    assert "--project=mine" in shell.calls()[0]


def test_tpu_vm_setup_copies_the_checkout_and_installs_it(shell: Shell, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "launch").mkdir(parents=True)
    shutil.copy(TPU_VM, checkout / "launch")
    for kept_or_not in ("portable_fsdp/launch.py", ".venv/x", ".venv-latest/x", ".git/x", "runs/x", "build/x"):
        (checkout / kept_or_not).parent.mkdir(parents=True, exist_ok=True)
        (checkout / kept_or_not).touch()
    done = shell.run(checkout / "launch/tpu_vm.sh", "setup", variables=TPU)
    assert (done.returncode, done.stderr) == (0, "")
    copy, install = shell.calls()
    archive = checkout / "build/portable_fsdp.tar.gz"
    where = ["--zone=us-east5-b", "--worker=all"]
    assert copy == ["gcloud", "compute", "tpus", "tpu-vm", "scp", str(archive), "slice:portable_fsdp.tar.gz", *where]
    with tarfile.open(archive) as tar:
        files = {member.name for member in tar if member.isfile()}
    assert files == {"./launch/tpu_vm.sh", "./portable_fsdp/launch.py"}
    lines = remote_command(install).splitlines()
    assert lines[0] == "set -e"
    assert lines[-1] == ".venv/bin/python -m pip install --editable '.[tpu]'"
    subprocess.run(["bash", "-n"], input=remote_command(install), text=True, check=True)


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        ([], TPU),
        (["--dry-run"], TPU),
        (["run"], TPU),
        (["start", "--config=c.yaml"], TPU),
        (["setup", "now"], TPU),
        (["setup"], {"TPU_NAME": "slice"}),
    ],
)
def test_tpu_vm_refuses_what_it_does_not_understand(
    shell: Shell, arguments: list[str], variables: dict[str, str]
) -> None:
    done = shell.run(TPU_VM, *arguments, variables=variables)
    assert (done.returncode, done.stdout, shell.calls()) == (2, "", [])
    assert done.stderr.startswith("usage: ")
