"""What the documents tell people to type, typed: each command of these pages runs here, as written but on CPUs.

`on_cpus` says what is changed. Scripts run with the programs of this folder in place of Slurm's, gcloud and torchrun.
Those of kubectl, sky and `docker build` can't run here: tests/test_docs.py compares them with the files that they name,
as it parses every command. It runs each `explain`, and test_migrating.py the block with a corpus.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli import PROGRAMS, committed, free_port, started
from documented import Command, commands, program_of
from fake_launchers import MPIRUN, PLAYED, srun
from shells import ROOT, Shell

pytestmark = pytest.mark.slow

NAMES = ("migrating.md", "launching.md", "library.md", "foreign_configs.md", "doctor.md", "failures.md")
ALL = [command for name in NAMES for command in commands((ROOT / "docs" / name).read_text(), name)]
ELSEWHERE = ("export ", "kubectl ", "sky ", "docker build ", "python -m portable_fsdp.explain ")
"""How commands begin that aren't started here."""
SCRIPTS = {"launch/torchrun.sh", "launch/slurm.sbatch", "launch/tpu_vm.sh", "launch/tpu_queued_resource.sh"}
EVERY_DAY = {("library.md", "python")}
"""A loop of one's own; each of the others takes ten seconds and more of a processor."""

ON_CPUS = {
    "--device=cuda": ["--device=cpu"],
    "--device=tpu": ["--device=cpu", "--backend=xla", "--num_devices=2"],
    "cuda": ["cpu"],
    "auto": ["cpu"],
}
SMALL = [
    *("model.architecture.hidden_size=32", "model.architecture.intermediate_size=64", "model.architecture.head_dim=16"),
    *("model.architecture.num_hidden_layers=2", "model.architecture.num_attention_heads=2"),
    *("model.architecture.num_key_value_heads=1", "model.architecture.vocab_size=256"),
    *("data.source=python_docs", "data.seq_len=32", "train.global_batch=4", "train.micro_batch=1"),
]
TWO_STEPS = {
    "portable_fsdp.launch": [*SMALL, "train.stop_at=2"],
    "examples/own_loop.py": [*SMALL, "train.steps=2", "train.log_every=1", "optim.warmup_steps=1"],
    "portable_fsdp.doctor": [],
}

LIMIT_S = 270.0  # XLA compiles for long on a machine with other work; pytest's own limit for a test is 300


def script_of(command: Command) -> str | None:
    """The script of ours that the command starts, by itself, by bash or by sbatch."""
    return next((word for word in command.words[:2] if word.startswith("launch/")), None)


def started_by(words: list[str]) -> str:
    """The module or the script of Python that the command starts in the end."""
    program = program_of(words).words
    return program[2] if program[1] == "-m" else program[1]


def is_program(command: Command) -> bool:
    elsewhere = shlex.join(command.words).startswith(ELSEWHERE) or "data.source=text" in command.words
    return not elsewhere and script_of(command) is None


def programs() -> Iterator[object]:
    for command in filter(is_program, ALL):
        often = (command.where.partition(":")[0], command.words[0]) in EVERY_DAY
        marks = [] if often else [pytest.mark.proof]
        if "--device=tpu" in command.words:
            marks.append(pytest.mark.xla)
        yield pytest.param(command, marks=marks, id=command.where)


def scripts(name: str) -> list[Command]:
    return [command for command in ALL if script_of(command) == name]


def on_cpus(words: list[str]) -> list[str]:
    """The same command, with CPUs for its devices, two processes for its number, and two steps of a tiny model."""
    name = started_by(words)
    fewer = [re.sub(r"^(--nproc_per_node|--num_processes|--num_devices)=\d+$", r"\1=2", word) for word in words]
    if words[0] == "accelerate":
        fewer[2:2] = ["--multi_gpu"]  # which it chooses by itself where there are GPUs
        if "--config_file" in words:  # it says 2 copies on 4 devices each
            sizes = ["--parallelism_config_dp_replicate_size=1", "--parallelism_config_dp_shard_size=2"]
            fewer[2:2] = ["--num_processes=2", *sizes]
            fewer.append("compile.enabled=false")  # its inductor is refused on CPUs
    changed = [new for word in fewer for new in ON_CPUS.get(word, [word])]
    if name == "portable_fsdp.launch" and "--device=cpu" not in changed:
        changed.append("--device=cpu")
    return [*changed, *TWO_STEPS[name]]


def typed(words: list[str]) -> list[str]:
    """What to start for these words: programs of this environment, and players of launchers that aren't here."""
    program = [sys.executable, *program_of(words).words[1:]]
    match words[0]:
        case "torchrun" | "accelerate":
            return [str(PROGRAMS / words[0]), *words[1:]]
        case "srun" | "mpirun":
            return [sys.executable, "-c", PLAYED, *program]
        case _:  # python, and docker's container, which is this machine
            return program


def variables_of(launcher: str) -> dict[str, str]:
    """What the launcher's player sets, or what the page says to set on a machine with torch_xla."""
    if launcher == "accelerate":
        return {"USE_TORCH_XLA": "0"}
    played = {"srun": srun(), "mpirun": {**MPIRUN, "MASTER_PORT": str(free_port())}}.get(launcher)
    return {"PLAYED": json.dumps(played)} if played else {}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the commands name of this checkout; what a run writes lies in it."""
    for name in ("configs", "examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "launch", tmp_path / "launch")  # beside which tpu_vm.sh writes an archive
    return tmp_path


@pytest.mark.parametrize("command", [*programs()])
def test_a_documented_program_runs(command: Command, checkout: Path) -> None:
    launcher, name = command.words[0], started_by(command.words)
    variables = {**command.variables, "PYTHONPATH": str(ROOT), "HF_HOME": str(checkout), **variables_of(launcher)}
    with started(typed(on_cpus(command.words)), checkout, **variables) as run:
        code = run.wait(LIMIT_S)
    if name == "portable_fsdp.doctor":
        assert code in (0, 1), run.err  # 1: something is wrong with this host, of which torchrun makes a traceback
        assert "launcher" in run.out
        return
    assert (code, "Traceback" in run.err) == (0, False), run.err
    [folder] = (checkout / "runs").iterdir()
    assert committed(folder) == [2]
    if name == "examples/own_loop.py":
        assert "step: 2  loss: " in run.out
    elif launcher not in ("python", "docker"):
        assert re.search(rf"^started by (torchrun, of )?{launcher}\b", run.err, re.MULTILINE), run.err
        assert ": 2 process(es), 2 of them on this host" in run.err


def test_each_command_is_started_or_known_to_be_started_elsewhere() -> None:
    assert {script_of(command) for command in ALL} == {None, *SCRIPTS}
    assert {started_by(command.words) for command in filter(is_program, ALL)} == {*TWO_STEPS}


# ------------------------------------------------------------------------------------------------------- scripts


@pytest.fixture
def shell(checkout: Path) -> Shell:
    """Without a GPU, without a virtual environment: `torchrun` records what it is asked for."""
    shell = Shell(checkout, "torchrun")
    for name in ("sbatch", "srun", "scontrol"):
        shell.install_fake(name, "fake_slurm.py")
    shell.install_fake("gcloud", "fake_gcloud.py")
    shell.install("python", f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "$@"\n')
    return shell


def ours(call: list[str], processes: int) -> list[str]:
    """The run's own arguments of a call of torchrun, whose flags are torchrun's."""
    program = program_of(call)
    assert program.words[:4] == ["python", "-m", "portable_fsdp.launch", "--device=cuda"]
    assert program.processes == processes
    return program.words[4:]


@pytest.mark.parametrize("command", scripts("launch/torchrun.sh"), ids=lambda command: command.where)
def test_torchrun_sh_checks_the_config_and_starts_torchrun(command: Command, shell: Shell, checkout: Path) -> None:
    done = shell.run(*command.words, variables={**command.variables, "NPROC_PER_NODE": "8"}, cwd=checkout)
    assert (done.returncode, done.stderr) == (0, "")
    [call] = shell.calls()
    assert ours(call, 8 * int(command.variables.get("NNODES", "1"))) == command.words[1:]


@pytest.mark.proof
@pytest.mark.parametrize("command", scripts("launch/torchrun.sh"), ids=lambda command: command.where)
def test_torchrun_sh_trains(command: Command, checkout: Path) -> None:
    variables = {**command.variables, "PYTHONPATH": str(ROOT), "NPROC_PER_NODE": "1"}
    if "RDZV_ENDPOINT" in variables:
        variables["RDZV_ENDPOINT"] = f"localhost:{free_port()}"
    variables["PATH"] = f"{PROGRAMS}:/usr/bin:/bin"
    words = ["bash", *command.words, "--device=cpu", *TWO_STEPS["portable_fsdp.launch"]]
    with started(words, checkout, **variables) as run:
        if "NNODES" in variables:
            with started(words, checkout, **variables) as other:
                assert other.wait(LIMIT_S) == 0, other.err
        assert run.wait(LIMIT_S) == 0, run.err
    assert committed(checkout / "runs/llama_1b") == [2]


@pytest.mark.parametrize("command", scripts("launch/slurm.sbatch"), ids=lambda command: command.where)
def test_slurm_sbatch_starts_torchrun_on_each_node(command: Command, shell: Shell, checkout: Path) -> None:
    done = shell.run(*command.words, variables={"NPROC_PER_NODE": "8"}, cwd=checkout)
    assert (done.returncode, done.stderr) == (0, "")
    if "--dry-run" in command.words:
        assert shell.calls() == []
        shell.run("bash", "-c", done.stdout, cwd=checkout)
    calls = [call for call in shell.calls() if call[0] == "torchrun"]
    arguments = [word for word in command.words[2:] if word != "--dry-run"]
    assert [ours(call, 16) for call in calls] == [arguments] * 2


BLOCKS = re.findall(r"^```bash\n(export TPU_NAME=.*?)^```", (ROOT / "docs/launching.md").read_text(), re.M | re.S)


@pytest.mark.parametrize(
    ("block", "usable", "expected"),
    [
        (BLOCKS[0], "READY", ["create", "ssh", "scp", "ssh", "ssh", "ssh", "ssh", "ssh", "delete"]),
        (BLOCKS[1], "ACTIVE", ["create", "ssh", "scp", "ssh", "ssh", "delete", "create", "ssh", "delete"]),
    ],
    ids=["tpu_vm", "queued"],
)
def test_tpus_are_made_used_and_deleted(
    block: str, usable: str, expected: list[str], shell: Shell, checkout: Path
) -> None:
    (shell.cloud / "creations.json").write_text(json.dumps([[usable]]))
    (shell.cloud / "answers.json").write_text(json.dumps([66, 0]))  # nothing is set up there
    done = shell.run("bash", "-e", "-c", block, variables={"TPU_POLL_S": "0"}, cwd=checkout)
    assert done.returncode == 0, done.stderr
    assert [call[4] for call in shell.calls() if call[4] != "describe"] == expected
    assert not (shell.cloud / "mine.json").exists()


def test_no_block_of_tpus_is_left_out() -> None:
    assert len(BLOCKS) == 2
    shown = [" ".join(command.words) for name in SCRIPTS for command in scripts(name) if "/tpu_" in name]
    assert sorted(re.findall(r"launch/tpu_\w+\.sh .*", "".join(BLOCKS))) == sorted(shown)


def test_variables_before_a_script_are_read_by_it() -> None:
    """A misspelt one is no error of the shell: the script would take its default."""
    workers = (ROOT / "launch/tpu_workers.sh").read_text()
    shown = [(script_of(command), name) for command in ALL for name in command.variables]
    exported = [word.partition("=")[0] for command in ALL for word in command.words[1:] if command.words[0] == "export"]
    shown += [(name, variable) for name in sorted(SCRIPTS) if "/tpu_" in name for variable in exported]
    assert len(shown) > 6
    for script, variable in shown:
        assert script, f"{variable} stands before no script"
        assert re.search(rf"\$\{{?{variable}\b", (ROOT / script).read_text() + workers), f"{script} reads no {variable}"
