"""The templates of launch/: sound scripts, manifests that fit their schema, and runs that they start, on the CPU."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import yaml
from cli import PROGRAMS, ROOT, committed, finish, started, tiny_config
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from portable_fsdp.convert.read import load_config

LAUNCH, HERE = ROOT / "launch", Path(__file__).parent
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch", ROOT / ".ci/run"])
JOBSETS = sorted(LAUNCH.glob("gke_jobset_*.yaml"))
TRAINJOBS = sorted(LAUNCH.glob("kubeflow_trainjob*.yaml"))
SKY_TASKS = sorted(LAUNCH.glob("skypilot_*.yaml"))
DOCKERFILES = sorted(LAUNCH.glob("Dockerfile.*"))
ENDS_OF_A_RUN = {"exit 0": 0, "touch build/stop; exit 143": 143, "exit 143": 75, "exit 1": 1}  # of a worker's
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def named(path: Path) -> str:
    return path.name


def program(folder: Path, name: str, text: str) -> None:
    """An executable script in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def test_scripts_are_sound_bash() -> None:
    for script in SCRIPTS:
        assert os.access(script, os.X_OK) == (script.name != "tpu_workers.sh"), f"{script}: is it executable?"
        subprocess.run(["bash", "-n", script], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    checked = subprocess.run([shellcheck, "--severity=style", "-x", *SCRIPTS], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def play(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in the checkout with the programs of `folder` and no others that could cost money."""
    for name in ("bash", "cksum", "cp", "cut", "dirname", "env", "mkdir", "sleep"):
        if not (folder / name).exists():
            (folder / name).symlink_to(Path("/usr/bin") / name)
    environment = {"PATH": str(folder), "FOLDER": str(folder)}
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    done.stdout = re.sub(r"configs/\d+-", "configs/CHECKSUM-", done.stdout.replace(str(ROOT), "ROOT"))
    done.stdout, done.stderr = (text.replace(str(folder), "FOLDER") for text in (done.stdout, done.stderr))
    return done


def test_dry_runs(tmp_path: Path, assert_golden: Callable[[Path, str], None]) -> None:
    """The golden file holds its own input: after each `$ ` a command, then its exit code, its output and its errors."""
    path = HERE / "golden/dry_runs.txt"
    played = ((line, play(line, tmp_path)) for line in re.findall(r"^\$ (.*)$", path.read_text(), re.MULTILINE))
    assert_golden(path, "\n".join(f"$ {line}\nexit {d.returncode}\n{d.stdout}{d.stderr}" for line, d in played))


def worker_line(folder: Path, *arguments: str) -> str:
    """The command line that tpu_vm.sh hands to its workers, as a dry run prints it; checks the words on the way.

    The golden file has that of tpu_queued_resource.sh, which is the same.
    """
    variables = "TPU_NAME=slice TPU_ZONE=z"
    show = 'gcloud() { printf "%s\\0" "$@"; }'
    line = f'{show}; eval "$({variables} launch/tpu_vm.sh --dry-run {shlex.join(arguments)})"'
    words = play(line, folder).stdout.split("\0")
    return [word.removeprefix("--command=") for word in words if word.startswith("--command=")][-1]


def set_up_worker(folder: Path, python: str, *words: str) -> list[str]:
    """Make a checkout in `folder` whose Python is this script of bash; return what starts a run there."""
    program(folder / "portable_fsdp/.venv/bin", "python", python)
    (folder / "portable_fsdp/build").mkdir()
    (folder / "portable_fsdp/build/installed").write_text("tpu gcsfs\n")
    (folder / "programs").mkdir(exist_ok=True)
    return ["bash", "-c", worker_line(folder / "programs", "run", *(words or ["--config=c.yaml"]))]


@pytest.mark.slow
def test_a_worker_trains_outlives_its_connection_and_stops_on_request(tmp_path: Path) -> None:
    home = tmp_path / "it's $HOME"
    (home / "programs").mkdir(parents=True)
    endless = ["train.steps=100000", "train.log_every=1", "checkpoint.every=null"]
    words = ["--device=cpu", f"--config=../{tiny_config(home).name}", f"run.dir={home / 'run'}", *endless]
    stop = ["bash", "-c", worker_line(home / "programs", "stop")]
    finish(["bash", "-c", worker_line(home / "programs", "run", *words)], home, 66)  # no checkout yet
    command = set_up_worker(home, f'PYTHONPATH="{ROOT}" exec "{sys.executable}" "$@"', *words)
    checkout = home / "portable_fsdp"
    wrong = worker_line(home / "programs", "run", *words, 'run.name=`id` "&" *', "train.step=1")
    assert "train.step: unknown key" in finish(["bash", "-c", wrong], home, 2).out
    with started(command, home) as first:
        first.wait_until(lambda: "step: 2/" in first.out)
        pid = int((checkout / "build/run.pid").read_text())
        run = psutil.Process(pid)
        try:
            os.kill(first.pid, signal.SIGKILL)
            with started(command, home) as second:
                second.wait_until(lambda: "step: " in second.out)
                assert int((checkout / "build/run.pid").read_text()) == pid, "it found the run, and started no other"
                finish(stop, home)
                assert second.wait() == 143, second.err
        finally:
            for process in [*run.children(recursive=True), run] if run.is_running() else []:
                process.kill()
    assert json.loads((home / "run/STOPPED").read_text())["reason"] == "SIGTERM"
    assert len(committed(home / "run")) == 1


@pytest.mark.parametrize(
    ("has_torchtpu", "answer", "ends", "code", "output"),
    [
        (True, "echo -n unknown:unknown:10.0.0.2,unknown:unknown:10.0.0.3", "", 0, "worker 1 of 10.0.0.2,10.0.0.3\n"),
        (True, "exit 22", "", 1, ""),
        (True, "echo -n unknown:unknown:", "", 1, ""),
        # Without torchtpu nobody is asked. A TPU that is about to end may look usable for another minute: `run` shall
        # start again, and not end with 143, as after a stop by its user.
        *((False, "exit 22", f"; {end}", code, "worker  of \n") for end, code in ENDS_OF_A_RUN.items()),
    ],
)
def test_a_worker_with_torchtpu_names_the_slice_or_fails_and_tells_how_its_run_ended(
    has_torchtpu: bool, answer: str, ends: str, code: int, output: str, tmp_path: Path
) -> None:
    command = set_up_worker(tmp_path, f'echo "worker $TPU_WORKER_ID of $TPU_WORKER_HOSTNAMES"{ends}')
    metadata = f"case ${{@: -1}} in */agent-worker-number) echo -n 1 ;; */worker-network-endpoints) {answer} ;; esac"
    program(tmp_path / "bin", "curl", metadata)
    if has_torchtpu:
        (tmp_path / "portable_fsdp/.venv/lib/python3.11/site-packages/torch_tpu").mkdir(parents=True)
    done = finish(command, tmp_path, code, PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert done.out == output
    assert ("the metadata server names no hosts of this slice" in done.err) == (not output)


EVENT, WINDOW, ENDS = "maintenance-event", "upcoming-maintenance?alt=json", "TERMINATE_ON_HOST_MAINTENANCE"
NO_NOTICE = {"preempted": "FALSE", EVENT: "NONE", WINDOW: '{"can_reschedule": "TRUE", "maintenance_status": "PENDING"}'}


@pytest.mark.parametrize(
    ("first", "then", "code"),
    [
        ({}, {"preempted": "TRUE"}, 75),
        ({}, {EVENT: ENDS}, 75),
        ({EVENT: ENDS}, {WINDOW: '{"maintenance_status": "ONGOING"}'}, 75),
        ({EVENT: ENDS}, {EVENT: "MIGRATE_ON_HOST_MAINTENANCE"}, 0),
    ],
    ids=["preempted", "ends", "one more", "moves"],
)
def test_a_worker_stops_its_run_at_a_notice_that_comes_after_its_start(
    first: dict[str, str], then: dict[str, str], code: int, tmp_path: Path
) -> None:
    """Files in place of the metadata server's answers."""
    command = set_up_worker(tmp_path, "trap 'exit 143' USR1; until [[ -e end ]]; do /usr/bin/sleep 0.1; done")
    checkout, answers = tmp_path / "portable_fsdp", tmp_path / "answers"
    answers.mkdir()
    of_url = f'address=${{@: -1}}; exec cat "{answers}/${{address#*/instance/}}"'
    program(tmp_path / "bin", "curl", f"[[ $* == *Metadata-Flavor:Google* ]] || exit 22; {of_url}")
    program(tmp_path / "bin", "sleep", "echo >> rounds; exec /usr/bin/sleep 0.1")

    def say(values: dict[str, str]) -> None:
        for name, text in values.items():
            (answers / name).write_text(text)

    def has_asked(times: int) -> bool:
        return (checkout / "rounds").exists() and len((checkout / "rounds").read_text()) > times

    say(NO_NOTICE | first)
    with started(command, tmp_path, PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin") as worker:
        worker.wait_until(lambda: has_asked(3))
        say(then)
        if code == 0:
            worker.wait_until(lambda: has_asked(6))
            (checkout / "end").touch()
        assert worker.wait() == code, worker.err
    assert (checkout / "build/run.log").read_text() == ""


HOST = {"PATH": f"{PROGRAMS}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
# The first two lives save on SIGTERM and end as torchrun does, the third finishes; srun obeys SLURM_EXPORT_ENV.
SRUN = """
for name in $(compgen -e); do
    [[ ${SLURM_EXPORT_ENV:-ALL} == ALL || ,$SLURM_EXPORT_ENV, == *,$name,* ]] || unset "$name"
done
echo "$@" >> calls
(( $(wc -l < calls) < 3 )) || exit 0
trap 'echo "{\\"step\\": 3}" > run/STOPPED; exit 1' TERM
[[ $HF_TOKEN == "of file" ]] && touch up
while true; do sleep 0.05; done
"""


def test_a_slurm_job_that_is_to_end_saves_and_is_queued_again(tmp_path: Path) -> None:
    """At its time limit, and when it is preempted."""
    (tmp_path / "run").mkdir()
    program(tmp_path / "bin", "srun", SRUN)
    program(tmp_path / "bin", "scontrol", '[[ $1 == show ]] && echo node0 || echo "$@" > requeued')
    slurm = {
        "SLURM_EXPORT_ENV": "ENV_FILE",
        "SLURM_JOB_ID": "4711",
        "SLURM_NNODES": "1",
        "SLURM_JOB_NODELIST": "x",
        "NPROC_PER_NODE": "2",
    }
    variables = HOST | slurm | {"PATH": f"{tmp_path / 'bin'}:{HOST['PATH']}"}
    command = ["bash", LAUNCH / "slurm.sbatch", "--device=cpu", f"--config={tiny_config(tmp_path)}"]
    assert "train.step: unknown key" in finish([*command, "train.step=1"], tmp_path, 2, **variables).err
    secrets = tmp_path / "secrets"
    secrets.write_text("HF_TOKEN='of file'\n")
    secrets.chmod(0o640)
    (tmp_path / "link").symlink_to(secrets)
    variables["ENV_FILE"] = str(tmp_path / "link")
    assert f"chmod 600 {tmp_path / 'link'}" in finish(command, tmp_path, 2, **variables).err
    secrets.chmod(0o600)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        with started(command, tmp_path, **variables) as life:
            life.wait_until((tmp_path / "up").exists)
            life.send_signal(number)
            assert life.wait() == 143, life.err
        assert 'stopped after a save: {"step": 3}' in life.out
        assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
        for name in ("up", "requeued"):
            (tmp_path / name).unlink()
    finish(command, tmp_path, **variables)
    assert not (tmp_path / "run/STOPPED").exists()  # else a failure of this life would pass for a stop
    [first, *others] = (tmp_path / "calls").read_text().splitlines()
    assert [first] * 2 == others
    assert "torchrun --nnodes=1 --rdzv-backend=c10d --rdzv-id=4711 --rdzv-endpoint=node0:24711 " in first


def read(path: Path) -> dict[str, Any]:
    """The manifest; of several the last, which needs the others."""
    return [*yaml.safe_load_all(path.read_text())][-1]


def job(path: Path) -> dict[str, Any]:
    [replicated] = read(path)["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def container_of(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The container of a JobSet's pods, or the trainer, and its variables but for those of a Secret."""
    if path in TRAINJOBS:
        container = read(path)["spec"]["trainer"]
    else:
        [container] = job(path)["template"]["spec"]["containers"]
    secrets = {v["name"]: v["valueFrom"]["secretKeyRef"] for v in container["env"] if "valueFrom" in v}
    names = ("HF_TOKEN", "WANDB_API_KEY")
    assert secrets == {name: {"name": "portable-fsdp", "key": name, "optional": True} for name in names}
    return container, {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}


@pytest.mark.proof
@pytest.mark.parametrize("path", [*JOBSETS, *SKY_TASKS, *TRAINJOBS], ids=named)
def test_what_a_manifest_starts_trains(path: Path, tmp_path: Path) -> None:
    """On one process of the CPU, with a tiny config."""
    config, run = tiny_config(tmp_path), tmp_path / "run"
    small = ["--device=cpu", f"--config={config}", f"run.dir={run}", "train.steps=2"]
    (tmp_path / "launch").symlink_to(LAUNCH)
    if path not in SKY_TASKS:
        container, variables = container_of(path)
        command = [*container["command"], *small]
        if path.name == "kubeflow_trainjob.yaml":  # the variables that Kubeflow Trainer's torch plugin sets
            torch_plugin = "NNODES=1 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29400 NPROC_PER_NODE=auto"
            pairs = (word.partition("=") for word in torch_plugin.split())
            variables |= {f"PET_{name}": value for name, _, value in pairs} | {"NPROC_PER_NODE": "1"}
    else:
        sky = {"NUM_NODES": "1", "NODE_IPS": "127.0.0.1\n127.0.0.2", "NUM_GPUS_PER_NODE": "1", "TASK_ID": "sky-1"}
        task = read(path)
        variables = {f"SKYPILOT_{name}": value for name, value in sky.items()} | task["envs"]
        variables |= {"CONFIG": str(config), "CHECKPOINTS": str(run / "checkpoints"), "HOME": str(tmp_path)}
        (tmp_path / "portable_fsdp_env").symlink_to(PROGRAMS.parent)
        command = ["bash", "-c", f"{task['run'].rstrip()} {shlex.join([small[0], *small[2:]])}"]
    if "gpu" in path.name:  # one node of one device, in place of what the manifest says
        variables |= {"NNODES": "1", "NPROC_PER_NODE": "1"}
    finish(command, tmp_path, **HOST | variables)
    assert committed(run) == [2]


@pytest.mark.parametrize("path", [*JOBSETS, *SKY_TASKS, *TRAINJOBS], ids=named)
def test_a_manifest_is_what_its_api_takes(path: Path) -> None:
    """The schemas forbid keys that they don't name."""
    schema = json.loads((HERE / f"{'skypilot' if path in SKY_TASKS else 'jobset'}_schema.json").read_text())
    wrong = re.sub(r"(restartPolicy|num_nodes|runtimeRef):", r"\1s:", path.read_text())

    def errors(text: str) -> list[str]:
        return [
            error.message
            for each in yaml.safe_load_all(text)
            for error in jsonschema.Draft202012Validator(
                schema | ({"$ref": f"#/$defs/{each['kind']}"} if "kind" in each else {})
            ).iter_errors(each)
        ]

    assert errors(path.read_text()) == []
    assert errors(wrong)
    if path in TRAINJOBS:
        trainer, reference = container_of(path)[0], read(path)["spec"]["runtimeRef"]
        config, *overrides = trainer["args"]
        assert load_config(ROOT / config.removeprefix("--config="), overrides).checkpoint.dir == "gs://BUCKET/llama_1b"
        if "tpu" not in path.name:
            assert (trainer["command"], reference) == (["launch/torchrun.sh"], {"name": "torch-distributed"})
            return
        runtime = next(yaml.safe_load_all(path.read_text()))
        assert (runtime["kind"], runtime["metadata"]["name"]) == (reference["kind"], reference["name"])
        [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        pod, jobset = node["template"]["spec"]["template"]["spec"], read(LAUNCH / "gke_jobset_tpu.yaml")["spec"]
        assert runtime["spec"]["template"]["spec"]["failurePolicy"] == jobset["failurePolicy"]
        sides = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
        chips = trainer["resourcesPerNode"]["limits"]["google.com/tpu"]
        assert math.prod(map(int, sides)) == trainer["numNodes"] * chips
        # The container that Trainer fills in, of the job that it looks for.
        assert [container["name"] for container in pod["containers"]] == [node["name"]] == ["node"]
    if path.name == "skypilot_tpu.yaml":
        assert read(path)["num_nodes"] == 1
        assert read(path)["resources"]["job_recovery"]["recover_on_exit_codes"] == [143]


@pytest.mark.parametrize("path", JOBSETS, ids=named)
def test_what_the_schema_of_a_jobset_cannot_say(path: Path) -> None:
    pod, (container, variables) = job(path)["template"]["spec"], container_of(path)
    assert pod["restartPolicy"] == "Never", "a podFailurePolicy needs it; the webhook's default is OnFailure"
    assert job(path)["completionMode"] == "Indexed"
    assert job(path)["parallelism"] == job(path)["completions"]
    assert job(path)["backoffLimit"] == 0
    # A mistake in the config (2) ends the JobSet; a disruption, or a stop on request (143), isn't counted.
    disruption, codes = job(path)["podFailurePolicy"]["rules"]
    assert [condition["type"] for condition in disruption["onPodConditions"]] == ["DisruptionTarget"]
    assert codes["onExitCodes"]["values"] == ([2, 143] if "tpu" in path.name else [2])
    mistake, rest = read(path)["spec"]["failurePolicy"]["rules"]
    message = "Container train for pod default/x failed with exit code 2 matching FailJob rule at index 1"
    assert mistake["action"] == "FailJobSet"
    assert [re.search(pattern, message) is not None for pattern in mistake["onJobFailureMessagePatterns"]] == [True]
    assert rest["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert codes["onExitCodes"]["containerName"] == container["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    # A shell as process 1 keeps SIGTERM to itself; torchrun.sh replaces itself.
    launch = ["python", "-m", "portable_fsdp.launch", "--device=tpu"]
    assert container["command"] == (launch if "tpu" in path.name else ["launch/torchrun.sh"])
    config, *overrides = container["args"]
    assert load_config(ROOT / config.removeprefix("--config="), overrides).checkpoint.dir == "gs://BUCKET/llama_1b"
    if "tpu" in path.name:  # hosts and chips fit together
        sides = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
        chips = container["resources"]["limits"]["google.com/tpu"]
        assert math.prod(map(int, sides)) == job(path)["parallelism"] * chips
    else:  # and the first pod
        name, [replicated] = read(path)["metadata"]["name"], read(path)["spec"]["replicatedJobs"]
        assert variables["RDZV_ENDPOINT"] == f"{name}-{replicated['name']}-0-0.{name}:29500"
        assert int(variables["NNODES"]) == job(path)["completions"]


@pytest.mark.parametrize("path", [*DOCKERFILES, *SKY_TASKS, LAUNCH / "tpu_workers.sh"], ids=named)
def test_a_dockerfile_fits_the_project_and_the_extras_that_are_installed_exist(path: Path) -> None:
    text = path.read_text()
    [line] = re.findall(r"pip install (?:--[a-z-]+(?:=\S+)? )*(['\"]?\..*)", text)
    assert ("tpu" in path.name) == ("--torch-backend=cpu" in text), "TPUs have no use for CUDA's libraries"
    if default := re.search(r"(?:ARG EXTRA=|EXTRA: |TPU_EXTRA:-)(\w+)", text):
        assert "torchtpu" in text
        line = re.sub(r"\$extra|\$EXTRA", default[1], line).replace("$packages", "gcsfs")
    ours, *others = shlex.split(line.removesuffix('"') if line.count('"') % 2 else line)
    extra = re.fullmatch(r"\.(?:\[(\w+)\])?", ours)
    assert extra
    assert extra[1] is None or extra[1] in PROJECT["optional-dependencies"]
    tested = {Requirement(line).name for line in PROJECT["optional-dependencies"]["test"]}
    assert {*others} <= tested, "a store that no test uses"
    assert ("tpu" in path.name) == (extra[1] == "tpu")
    if path not in DOCKERFILES:
        return
    image = re.search(r"^FROM python:(\d+\.\d+)-slim-\w+$", text, re.MULTILINE)
    assert image
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{image[1]}.0")
    assert f"PYTHON ?= python{image[1]}" in (ROOT / "Makefile").read_text(), "not the Python of the tests"
    copied = [word for line in re.findall(r"^COPY (.*)", text, re.MULTILINE) for word in line.split()[:-1]]
    assert {"portable_fsdp", "configs", "launch", "pyproject.toml"} <= {*copied}
    assert [source for source in copied if not (ROOT / source).exists()] == []
    [command] = re.findall(r"^CMD (.*)", text, re.MULTILINE)
    assert json.loads(command)[:2] == ["python", "-m"]
