"""tpu_vm.sh and tpu_queued_resource.sh, and a gcloud that records, refuses unknown flags, and has scripted states."""

import json
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from shells import RECORDER, ROOT, TRICKY, Shell

TPU_VM = ROOT / "launch/tpu_vm.sh"
QUEUED = ROOT / "launch/tpu_queued_resource.sh"
TPU = {"TPU_NAME": "slice", "TPU_ZONE": "us-east5-b", "TPU_POLL_S": "0"}
CREATED = {**TPU, "TPU_TYPE": "v6e-16"}
ZONE = "--zone=us-east5-b"
NOT_SET_UP = 66
GROUPS = {TPU_VM: "tpu-vm", QUEUED: "queued-resources"}
USABLE = {TPU_VM: "READY", QUEUED: "ACTIVE"}
BOTH = pytest.mark.parametrize("script", [TPU_VM, QUEUED], ids=["tpu_vm", "queued"])
OF_NODES = {TPU_VM: [], QUEUED: ["--node=all"]}


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    shell = Shell(tmp_path)
    shell.install_fake("gcloud", "fake_gcloud.py")
    return shell


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small one of its own: `setup` writes an archive into it."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "launch", checkout / "launch")
    for kept_or_not in ("portable_fsdp/launch.py", ".venv/x", ".venv-latest/x", ".git/x", "runs/x", "build/x"):
        (checkout / kept_or_not).parent.mkdir(parents=True, exist_ok=True)
        (checkout / kept_or_not).touch()
    return checkout


def script_cloud(shell: Shell, *creations: list[str], now: Sequence[str] = (), ssh: Sequence[int] = (0,)) -> None:
    """The states of the TPU that is there, of those that are created after it, and the exit codes of ssh."""
    if now:
        (shell.cloud / "slice.json").write_text(json.dumps(now))
    (shell.cloud / "creations.json").write_text(json.dumps(creations))
    (shell.cloud / "answers.json").write_text(json.dumps(ssh))


def verbs(calls: list[list[str]]) -> list[str]:
    """What was done to TPUs, without the questions for their state."""
    return [call[4] for call in calls if call[4] != "describe"]


def command(call: list[str]) -> str:
    [line] = [word for word in call if word.startswith("--command=")]
    return line.removeprefix("--command=")


# ------------------------------------------------------------------------------------------------- single actions


def test_a_tpu_vm_is_created(shell: Shell) -> None:
    script_cloud(shell, ["READY"])
    assert shell.run(TPU_VM, "create", variables=CREATED).stderr == ""
    head = ["gcloud", "compute", "tpus", "tpu-vm", "create", "slice", ZONE, "--accelerator-type=v6e-16"]
    assert shell.calls() == [[*head, "--version=v2-alpha-tpuv6e", "--spot"]]
    (shell.cloud / "slice.json").unlink()
    more = {"TPU_SPOT": "false", "TPU_VERSION": "mine", "TPU_PROJECT": "p"}
    assert shell.run(TPU_VM, "create", variables={**CREATED, **more}).stderr == ""
    assert shell.calls() == [[*head[:7], "--project=p", head[7], "--version=mine"]]


def test_a_queued_resource_is_created(shell: Shell) -> None:
    script_cloud(shell, ["ACCEPTED"])
    assert shell.run(QUEUED, "create", variables=CREATED).stderr == ""
    head = ["gcloud", "compute", "tpus", "queued-resources", "create", "slice", ZONE]
    tail = ["--accelerator-type=v6e-16", "--runtime-version=v2-alpha-tpuv6e", "--valid-until-duration=6h"]
    assert shell.calls() == [[*head, "--node-id=slice-node", *tail, "--spot"]]
    (shell.cloud / "slice.json").unlink()
    more = {"TPU_SLICES": "4", "TPU_CAPACITY": "on-demand", "TPU_VALID_UNTIL": "1h"}
    assert shell.run(QUEUED, "create", variables={**CREATED, **more}).stderr == ""
    nodes = ["--node-count=4", "--node-prefix=slice-node"]
    assert shell.calls() == [[*head, *nodes, *tail[:2], "--valid-until-duration=1h"]]


@pytest.mark.parametrize(
    ("kind", "image"),
    [
        ("v6e-8", "v2-alpha-tpuv6e"),
        ("v5p-16", "v2-alpha-tpuv5"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v4-8", "tpu-ubuntu2204-base"),
    ],
)
def test_the_image_fits_the_type(shell: Shell, kind: str, image: str) -> None:
    shown = shell.run(TPU_VM, "--dry-run", "create", variables={**CREATED, "TPU_TYPE": kind})
    assert f"--version={image} " in shown.stdout


@BOTH
def test_delete_asks_nothing(shell: Shell, script: Path) -> None:
    script_cloud(shell, now=["READY"])
    assert shell.run(script, "delete", variables=TPU).returncode == 0
    force = ["--force"] if script == QUEUED else []
    assert shell.calls() == [["gcloud", "compute", "tpus", GROUPS[script], "delete", "slice", ZONE, *force, "--quiet"]]


@BOTH
@pytest.mark.parametrize("action", ["logs", "stop", "doctor"])
def test_actions_on_workers(shell: Shell, script: Path, action: str) -> None:
    script_cloud(shell, now=["READY"])
    assert shell.run(script, action, variables=TPU).returncode == 0
    [call] = shell.calls()
    who = "0" if action == "logs" else "all"
    node = [f"--node={who}"] if script == QUEUED else []
    assert call[:-1] == ["gcloud", "compute", "tpus", GROUPS[script], "ssh", "slice", ZONE, *node, f"--worker={who}"]
    subprocess.run(["bash", "-n"], input=command(call), text=True, check=True)


@BOTH
def test_setup_copies_the_checkout_and_installs_it(shell: Shell, checkout: Path, script: Path) -> None:
    script_cloud(shell, now=["READY"])
    done = shell.run(checkout / "launch" / script.name, "setup", variables=TPU)
    assert (done.returncode, done.stderr) == (0, "")
    copy, install = shell.calls()
    archive = checkout / "build/portable_fsdp.tar.gz"
    head = ["gcloud", "compute", "tpus", GROUPS[script], "scp", str(archive), "slice:portable_fsdp.tar.gz", ZONE]
    assert copy == [*head, *OF_NODES[script], "--worker=all"]
    with tarfile.open(archive) as tar:
        files = {member.name for member in tar if member.isfile()}
    ours = {f"./launch/{path.name}" for path in (ROOT / "launch").iterdir()}
    assert files == {*ours, "./portable_fsdp/launch.py"}
    lines = command(install).splitlines()
    assert lines[0] == "set -e"
    assert ".venv/bin/python -m pip install --editable '.[tpu]' gcsfs" in lines
    subprocess.run(["bash", "-n"], input=command(install), text=True, check=True)


@BOTH
@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        ([], CREATED),
        (["--dry-run"], CREATED),
        (["run"], CREATED),
        (["start", "--config=c.yaml"], CREATED),
        (["setup", "now"], CREATED),
        (["setup"], {"TPU_NAME": "slice"}),
        (["create"], TPU),
    ],
)
def test_what_is_not_understood_is_refused(
    shell: Shell, script: Path, arguments: list[str], variables: dict[str, str]
) -> None:
    done = shell.run(script, *arguments, variables=variables)
    assert (done.returncode, done.stdout, shell.calls()) == (2, "", [])
    assert done.stderr.startswith("usage: ")


def test_spot_or_not_is_never_guessed(shell: Shell) -> None:
    done = shell.run(TPU_VM, "create", variables={**CREATED, "TPU_SPOT": "yes"})
    assert (done.returncode, done.stderr) == (2, "tpu_vm.sh: TPU_SPOT=yes: expected true or false.\n")
    assert shell.calls() == []


def test_without_gcloud_nothing_is_tried(shell: Shell) -> None:
    (shell.programs / "gcloud").unlink()
    done = shell.run(TPU_VM, "run", "--config=c.yaml", variables=CREATED)
    assert (done.returncode, done.stderr) == (1, "tpu_vm.sh: gcloud isn't installed\n")


@pytest.mark.parametrize(
    "arguments",
    ["tpu-vm create slice --zone=z --version=v --spott", "tpu-vm create slice --zone=z", "tpu-vm stop slice"],
)
def test_the_fake_refuses_what_gcloud_would(shell: Shell, arguments: str) -> None:
    assert shell.run("gcloud", "compute", "tpus", *arguments.split()).returncode == 2


# ------------------------------------------------------------------------------------------------------------ runs


@BOTH
def test_run_hands_every_argument_on_unharmed(shell: Shell, script: Path, tmp_path: Path) -> None:
    script_cloud(shell, now=[USABLE[script]])
    done = shell.run(script, "run", "--config=configs/llama_1b.yaml", *TRICKY, variables=TPU)
    assert (done.returncode, done.stderr) == (0, "")
    line = command(next(call for call in shell.calls() if call[4] == "ssh"))
    home = tmp_path / "home"
    python = home / "portable_fsdp/.venv/bin/python"
    python.parent.mkdir(parents=True)
    (home / "portable_fsdp/build").mkdir()
    (home / "portable_fsdp/build/installed").touch()
    shell.install(python, RECORDER)
    worker = shell.run("bash", "-c", line, variables={"HOME": str(home)}, cwd=home)
    assert (worker.returncode, worker.stderr) == (0, "")
    launch = ["-m", "portable_fsdp.launch", "--device=tpu", "--config=configs/llama_1b.yaml", *TRICKY]
    assert shell.calls() == [["python", *launch]]
    assert "PJRT_DEVICE=TPU" in line


def test_a_worker_without_a_checkout_says_so(shell: Shell, tmp_path: Path) -> None:
    script_cloud(shell, now=["READY"])
    shell.run(TPU_VM, "run", "--config=c.yaml", variables=TPU)
    line = command(shell.calls()[1])
    assert shell.run("bash", "-c", line, cwd=tmp_path).returncode == NOT_SET_UP


@BOTH
def test_a_run_from_nothing(shell: Shell, checkout: Path, script: Path) -> None:
    usable = USABLE[script]
    script_cloud(shell, ["WAITING_FOR_RESOURCES", "PROVISIONING", usable], ssh=[NOT_SET_UP, 0, 0])
    done = shell.run(checkout / "launch" / script.name, "run", "--config=c.yaml", variables=CREATED)
    assert done.returncode == 0, done.stderr
    last = ["delete"] if script == QUEUED else []
    assert verbs(shell.calls()) == ["create", "ssh", "scp", "ssh", "ssh", *last]


@BOTH
@pytest.mark.parametrize("gone", ["SUSPENDED", "FAILED", "PREEMPTED", "TERMINATED", "an unheard-of state"])
def test_a_tpu_that_is_taken_away_is_made_again(shell: Shell, checkout: Path, script: Path, gone: str) -> None:
    usable = USABLE[script]
    # ssh loses its connection (255); on the new TPU nothing is set up; then the run finishes.
    script_cloud(shell, [usable], now=[usable, gone], ssh=[255, NOT_SET_UP, 0, 0])
    done = shell.run(checkout / "launch" / script.name, "run", "--config=c.yaml", variables=CREATED)
    assert done.returncode == 0, done.stderr
    assert f"slice is {gone}" in done.stderr
    last = ["delete"] if script == QUEUED else []
    assert verbs(shell.calls()) == ["ssh", "delete", "create", "ssh", "scp", "ssh", "ssh", *last]


@BOTH
def test_a_tpu_whose_state_gcloud_cannot_tell_is_never_deleted(shell: Shell, script: Path) -> None:
    usable = USABLE[script]
    script_cloud(shell, now=["error: UNAUTHENTICATED", usable, "error: timed out", usable], ssh=[255, 0])
    done = shell.run(script, "run", "--config=c.yaml", variables={**CREATED, "TPU_TRIES": "4"})
    assert done.returncode == 0, done.stderr
    assert "no answer from gcloud: ERROR: (gcloud) error: UNAUTHENTICATED" in done.stderr
    last = ["delete"] if script == QUEUED else []
    assert verbs(shell.calls()) == ["ssh", "ssh", *last]


@BOTH
@pytest.mark.parametrize("code", [1, 255])
def test_a_run_that_fails_is_started_again_a_bounded_number_of_times(shell: Shell, script: Path, code: int) -> None:
    script_cloud(shell, now=[USABLE[script]], ssh=[code])
    done = shell.run(script, "run", "--config=c.yaml", variables={**CREATED, "TPU_TRIES": "3"})
    assert done.returncode == 1
    assert f"try 3 of 3 ended with {code}" in done.stderr
    assert "given up after 3 tries" in done.stderr
    assert verbs(shell.calls()) == ["ssh"] * 3


@BOTH
def test_a_request_that_keeps_failing_is_given_up(shell: Shell, script: Path) -> None:
    script_cloud(shell, ["CREATING", "FAILED"])
    done = shell.run(script, "run", "--config=c.yaml", variables={**CREATED, "TPU_TRIES": "2"})
    assert done.returncode == 1
    assert verbs(shell.calls()) == ["create", "delete", "create"]


@BOTH
def test_a_mistake_in_the_config_is_never_tried_again(shell: Shell, script: Path) -> None:
    script_cloud(shell, now=[USABLE[script]], ssh=[2])
    assert shell.run(script, "run", "--config=c.yaml", variables=CREATED).returncode == 2
    assert verbs(shell.calls()) == ["ssh"]


@BOTH
def test_a_stop_on_request_ends_it(shell: Shell, script: Path) -> None:
    script_cloud(shell, now=[USABLE[script]], ssh=[143])
    done = shell.run(script, "run", "--config=c.yaml", variables=CREATED)
    assert done.returncode == 143
    assert "stopped on request" in done.stderr
    assert verbs(shell.calls()) == ["ssh"]


@BOTH
def test_a_stop_by_a_tpu_that_goes_away_does_not(shell: Shell, script: Path) -> None:
    usable = USABLE[script]
    script_cloud(shell, [usable], now=[usable, "SUSPENDED"], ssh=[143, 0])
    assert shell.run(script, "run", "--config=c.yaml", variables=CREATED).returncode == 0
    assert verbs(shell.calls())[:4] == ["ssh", "delete", "create", "ssh"]


def test_without_a_type_nothing_is_deleted(shell: Shell) -> None:
    script_cloud(shell, now=["PREEMPTED"])
    done = shell.run(TPU_VM, "run", "--config=c.yaml", variables=TPU)
    assert done.returncode == 1
    assert "slice is PREEMPTED" in done.stderr
    assert "set TPU_TYPE" in done.stderr
    assert verbs(shell.calls()) == []


@BOTH
def test_dry_run_prints_what_would_be_called_and_calls_nothing(shell: Shell, checkout: Path, script: Path) -> None:
    script = checkout / "launch" / script.name
    usable = USABLE[ROOT / "launch" / script.name]
    script_cloud(shell, [usable], ssh=[NOT_SET_UP, 0, 0])
    shown = shell.run(script, "--dry-run", "run", *TRICKY, variables=CREATED)
    assert (shown.returncode, shown.stderr, shell.calls()) == (0, "", [])
    shell.run(script, "run", *TRICKY, variables=CREATED)
    really = [call for call in shell.calls() if call[4] != "describe"]
    start = really.index(next(call for call in really if call[4] == "ssh"))
    del really[start]  # the answer to this one was that nothing is set up
    script_cloud(shell, [usable])
    shell.run("bash", "-c", shown.stdout)
    shown_calls = shell.calls()
    assert len(shown_calls) >= 4
    assert shown_calls == really
