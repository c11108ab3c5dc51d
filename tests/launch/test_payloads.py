"""What the launch templates start on a worker, in a container or in a step of Slurm, started here on the CPU."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from cli import PROGRAMS, TINY, committed, committed_in, events, finish, free_port, launch, losses, started, tiny_config
from shells import ROOT, Shell

from portable_fsdp.runtime.launchers import PORTS

pytestmark = pytest.mark.slow

LAUNCH = ROOT / "launch"
# As `python3.11 -m venv FOLDER` and its pip: the environment is that of the tests, the package the copied checkout's.
PYTHON = f"""#!/bin/bash
case "$*" in
"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip install"*) [[ -f pyproject.toml ]] ;;
*) PYTHONPATH="${{CHECKOUT:-$PWD}}" exec "{sys.executable}" "$@" ;;
esac
"""
TORCHRUN = f'#!/bin/bash\nPYTHONPATH="${{CHECKOUT:-$PWD}}" exec "{PROGRAMS / "torchrun"}" "$@"\n'


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A worker's programs: root may do all, apt has all, and python is that of the tests."""
    shell = Shell(tmp_path)
    for name in ("cp", "cut", "uname", "cc", "gcc"):
        with suppress(FileExistsError, TypeError):
            (shell.programs / name).symlink_to(str(shutil.which(name)))
    shell.install("sudo", "#!/bin/sh\n")
    shell.install("torchrun", TORCHRUN)
    for name in ("python", "python3.11"):
        shell.install(name, PYTHON)
    yield shell
    _end_runs(shell)


def tiny(folder: Path, *overrides: str) -> list[str]:
    return ["--device=cpu", f"--config={tiny_config(folder)}", f"run.dir={folder / 'run'}", *overrides]


# ------------------------------------------------------------------------------------------------------ containers


def image(dockerfile: Path, folder: Path) -> Path:
    """What the COPY lines make of this checkout."""
    for line in dockerfile.read_text().splitlines():
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, folder / target, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    folder.mkdir(exist_ok=True)
                    shutil.copy(ROOT / source, folder / target)
    return folder


@pytest.mark.parametrize("device", ["tpu", pytest.param("cuda", marks=pytest.mark.proof)])
def test_the_container_of_a_jobset(shell: Shell, tmp_path: Path, device: str) -> None:
    folder = image(LAUNCH / f"Dockerfile.{device}", tmp_path / "image")
    manifest = yaml.safe_load((LAUNCH / f"gke_jobset_{'tpu' if device == 'tpu' else 'gpu'}.yaml").read_text())
    [job] = manifest["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    program, *words = [*container["command"], *container["args"]]
    if device == "cuda":  # one pod of one device here, instead of what the manifest says
        variables |= {"NNODES": "1", "NPROC_PER_NODE": "1"}
    kept = [word for word in words if not word.startswith(("--config=", "run.dir=", "checkpoint.dir="))]
    start = [folder / program if device == "cuda" else shell.programs / program, *kept]
    environment = shell.environment(**variables, CHECKOUT=str(folder))
    finish([*start, *tiny(tmp_path, "train.steps=2", "checkpoint.every=1")], folder, **environment)
    assert committed(tmp_path / "run") == [1, 2]


# -------------------------------------------------------------------------------------------------------- SkyPilot


SKY = {"NUM_NODES": "1", "NODE_IPS": "127.0.0.1\n127.0.0.2", "NUM_GPUS_PER_NODE": "2", "TASK_ID": "sky-1"}


@pytest.mark.proof
@pytest.mark.parametrize("device", ["gpu", "tpu"])
def test_the_run_of_a_sky_task(shell: Shell, tmp_path: Path, device: str) -> None:
    task = yaml.safe_load((LAUNCH / f"skypilot_{device}.yaml").read_text())
    config = tmp_path / "sky.yaml"
    two_steps = {"steps": 2, "global_batch": 4}
    config.write_text(yaml.safe_dump(TINY | {"run": {"dir": str(tmp_path / "run")}, "train": two_steps}))
    workdir = image(LAUNCH / "Dockerfile.tpu", tmp_path / "workdir")
    home = tmp_path / "home" / "portable_fsdp_env" / "bin"
    home.mkdir(parents=True)
    shutil.copy(shell.programs / "python", home / "python")
    line = task["run"].replace("--device=tpu", "").rstrip() + " --device=cpu\n"
    variables = {f"SKYPILOT_{name}": value for name, value in SKY.items() if device == "gpu"} | task["envs"]
    variables |= {"CONFIG": str(config), "CHECKPOINTS": str(tmp_path / "run/checkpoints")}
    variables |= {"HOME": str(tmp_path / "home"), "CHECKOUT": str(workdir)}
    finish(["bash", "-c", line], workdir, **shell.environment(**variables))
    assert committed(tmp_path / "run") == [2]


# ----------------------------------------------------------------------------------------------------------- Slurm


@pytest.mark.proof
def test_a_job_of_two_nodes_that_is_stopped_and_goes_on(shell: Shell, tmp_path: Path) -> None:
    for name in ("sbatch", "srun", "scontrol"):
        shell.install_fake(name, "fake_launchers.py")
    variables = {"JOB": str(free_port() - PORTS[0]), "NPROC_PER_NODE": "1", "CHECKOUT": str(ROOT)}
    arguments = tiny(tmp_path, "train.steps=40", "checkpoint.every=10", "checkpoint.keep=9", "train.log_every=1")
    command = [shell.programs / "sbatch", LAUNCH / "slurm.sbatch", *arguments]
    with started(command, tmp_path, **shell.environment(**variables)) as job:
        job.wait_until(lambda: "step: 3/" in job.err)
        os.kill(int((shell.cloud / "batch.pid").read_text()), signal.SIGUSR1)
        assert job.wait() == 0, job.err
    assert committed(tmp_path / "run")[-1] == 40
    starts = events(tmp_path / "run", "start")
    assert [row["processes"] for row in starts] == [2, 2]
    assert 3 <= starts[1]["step"] < 40, "the second life goes on from the save of the first"
    assert losses(tmp_path / "run")
    assert "stopped after a save" in job.out


# -------------------------------------------------------------------------------------------------------- TPU VMs


TPU = {"TPU_NAME": "slice", "TPU_ZONE": "z", "TPU_TYPE": "v6e-8", "TPU_POLL_S": "0", "TPU_TRIES": "4"}


@pytest.fixture
def cloud(shell: Shell) -> Shell:
    """With a gcloud whose workers are folders."""
    shell.install_fake("gcloud", "fake_gcloud.py")
    (shell.cloud / "homes").mkdir()
    return shell


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return image(LAUNCH / "Dockerfile.tpu", tmp_path / "checkout")


def worker_processes(shell: Shell) -> list[psutil.Process]:
    """Those that runs left on the workers."""
    processes: list[psutil.Process] = []
    for file in shell.cloud.glob("homes/*/portable_fsdp/build/run.pid"):
        with suppress(psutil.NoSuchProcess, ValueError):
            process = psutil.Process(int(file.read_text()))
            processes += [process, *process.children(recursive=True)]
    return processes


def _end_runs(shell: Shell) -> None:
    processes = worker_processes(shell)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=30)


@pytest.mark.parametrize(
    ("script", "usable", "gone"),
    [
        pytest.param("tpu_vm.sh", "READY", "PREEMPTED", marks=pytest.mark.proof),
        ("tpu_queued_resource.sh", "ACTIVE", "SUSPENDED"),
    ],
)
def test_a_run_goes_on_after_its_tpu_was_taken_away(
    cloud: Shell, checkout: Path, tmp_path: Path, script: str, usable: str, gone: str
) -> None:
    (cloud.cloud / "creations.json").write_text(json.dumps([[usable]]))
    bucket, alone = tmp_path / "bucket", tmp_path / "alone"
    arguments = ["--device=cpu", f"--config={tiny_config(tmp_path)}", "train.steps=40", "train.log_every=1"]
    saves = ["checkpoint.every=2", "checkpoint.keep=99"]
    command = [checkout / "launch" / script, "run", *arguments, *saves, f"checkpoint.dir={bucket}"]
    with started(command, tmp_path, **cloud.environment(**TPU)) as run:
        run.wait_until(lambda: bool(committed_in(bucket)))
        (cloud.cloud / "slice.json").write_text(json.dumps([gone]))
        _end_runs(cloud)
        before = committed_in(bucket)[-1]
        assert before < 40
        assert run.wait() == 0, run.err + run.out
    assert f"slice is {gone}" in run.err
    assert f"at step {before}" in run.out or f"step-{before:08d}" in run.out, "it went on from the last save"
    assert committed_in(bucket)[-1] == 40
    assert launch(*arguments, f"run.dir={alone}") == 0
    last_losses = [line.split()[3] for line in run.out.splitlines() if line.startswith("step: 40/")]
    assert float(last_losses[0]) == pytest.approx(losses(alone)[-1], abs=1e-4)


def test_a_run_on_a_tpu_vm_outlives_its_connection_and_stops_on_request(
    cloud: Shell, checkout: Path, tmp_path: Path
) -> None:
    (cloud.cloud / "creations.json").write_text(json.dumps([["READY"]]))
    environment = cloud.environment(**TPU | {"TPU_TRIES": "1"})
    script = checkout / "launch/tpu_vm.sh"
    arguments = tiny(tmp_path, "train.steps=100000", "train.log_every=1", "checkpoint.every=null")
    with started([script, "run", *arguments], tmp_path, **environment) as first:
        first.wait_until(lambda: "step: 2/" in first.out)
        pids = {process.pid for process in worker_processes(cloud)}
        for process in psutil.Process(first.pid).children(recursive=True):
            if process.pid not in pids:  # of the connection
                process.kill()
        first.wait()
    assert {process.pid for process in worker_processes(cloud)} == pids
    with started([script, "run", *arguments], tmp_path, **environment) as second:
        second.wait_until(lambda: "step: " in second.out)
        assert {process.pid for process in worker_processes(cloud)} == pids, "it found the run, and started no other"
        finish([script, "stop"], tmp_path, **environment)
        assert second.wait() == 143, second.err
    assert json.loads((tmp_path / "run/STOPPED").read_text())["reason"] == "SIGTERM"
    assert len(committed(tmp_path / "run")) == 1
