"""What the documents tell people to type runs here, as written but on CPUs; `on_cpus` says what is changed.

Scripts are played with fakes of Slurm, gcloud and torchrun. Commands of kubectl, sky and `docker build` can't run here:
tests/test_docs.py compares them with the files that they name, as it parses every command and runs each `explain`.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli import PROGRAMS, committed, free_port, launch, losses, started, tiny_config
from documented import Command, commands, program_of
from fake_launchers import MPIRUN, TASKS, srun
from shells import ROOT, play

from portable_fsdp.checkpoint.__main__ import main, resolve
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.checkpoint.values import value_differences
from portable_fsdp.config.load import load_config

pytestmark = pytest.mark.slow

NAMES = ("migrating.md", "launching.md", "library.md", "foreign_configs.md", "doctor.md", "failures.md")
ALL = [command for name in NAMES for command in commands((ROOT / "docs" / name).read_text(), name)]
ELSEWHERE = ("export ", "kubectl ", "sky ", "docker build ", "python -m portable_fsdp.explain ")
"""How commands begin that aren't started here."""
SCRIPTS = {"launch/torchrun.sh", "launch/slurm.sbatch", "launch/tpu_vm.sh", "launch/tpu_queued_resource.sh"}
EVERY_DAY = {("library.md", "python")}
"""Your own loop; each of the others takes ten seconds and more of a processor."""

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


def command_here(words: list[str]) -> list[str]:
    """What to start for these words: programs of this environment, and fakes of launchers that aren't here."""
    program = [sys.executable, *program_of(words).words[1:]]
    match words[0]:
        case "torchrun" | "accelerate":
            return [str(PROGRAMS / words[0]), *words[1:]]
        case "srun" | "mpirun":
            return [sys.executable, "-c", TASKS, *program]
        case _:  # python, and docker's container, which is this machine
            return program


def variables_of(launcher: str) -> dict[str, str]:
    """What the fake launcher sets, or what the page says to set on a machine with torch_xla."""
    if launcher == "accelerate":
        return {"USE_TORCH_XLA": "0"}
    of_tasks = {"srun": srun(), "mpirun": {**MPIRUN, "MASTER_PORT": str(free_port())}}.get(launcher)
    return {"TASK_VARIABLES": json.dumps(of_tasks)} if of_tasks else {}


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
    with started(command_here(on_cpus(command.words)), checkout, **variables) as run:
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

OF_SCRIPTS = [command for command in ALL if script_of(command)]
VARIABLES = "GPUS=8 NPROC_PER_NODE=8 HAS={} TPU_NAME=slice TPU_ZONE=z TPU_TYPE=v6e-16 TPU_POLL_S=0 SSH=0"


@pytest.mark.parametrize("command", OF_SCRIPTS, ids=lambda command: command.where)
def test_a_documented_script_ends_well(command: Command, tmp_path: Path) -> None:
    """test_scripts.py has the transcripts of what each calls."""
    usable = "ACTIVE" if "queued" in shlex.join(command.words) else "READY"
    given = " ".join(f"{name}={shlex.quote(value)}" for name, value in command.variables.items())
    transcript = play("", f"{VARIABLES.format(usable)} {given} {shlex.join(command.words)}", tmp_path / "shell")
    assert transcript.startswith("exit 0\n"), transcript
    arguments = [word for word in command.words if word.startswith(("--config=", "run.dir=", "checkpoint.dir="))]
    assert all(word in transcript for word in arguments if "/tpu_" not in command.words[0]), transcript


@pytest.mark.proof
@pytest.mark.parametrize(
    "command",
    [command for command in OF_SCRIPTS if command.words[0] == "launch/torchrun.sh"],
    ids=lambda command: command.where,
)
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


# ----------------------------------------------------------------------------------- migrating.md, foreign_formats.md

SMALL_MODEL = ("model.architecture.hidden_size=32", "model.architecture.intermediate_size=64", "data.seq_len=32")


def first_block(page: str) -> list[list[str]]:
    block = re.search(r"^```bash\n(.*?)^```", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    assert block
    return [shlex.split(line) for line in block[1].replace("\\\n", " ").splitlines()]


def test_an_accelerate_file_and_a_folder_of_text_are_a_training(checkout: Path) -> None:
    train, explain = first_block("migrating.md")
    [foreign] = [word.removeprefix("--import=") for word in explain if word.startswith("--import=")]
    (checkout / "corpus").mkdir()
    command = [sys.executable, *train[1:], *SMALL_MODEL, "train.stop_at=2"]
    with started(command, checkout) as run:
        assert run.wait() == 2
    assert "found nothing: corpus/*.txt" in run.err
    assert "Traceback" not in run.err
    for number in range(3):
        text = f"Text {number} of a newcomer, line after line, in a file of its own.\n" * 40
        (checkout / f"corpus/{number}.txt").write_text(text, encoding="utf-8")
    with started(command, checkout) as run:
        assert run.wait() == 0, run.err
    assert "native on 2 x cpu (2 process(es))" in run.err
    first, second = losses(checkout / "runs/mine")
    assert second < first
    assert committed(checkout / "runs/mine") == [2]
    config = load_config(checkout / "runs/mine/config.yaml")
    assert config.data.path == "corpus/*.txt"
    assert config.memory.cpu_offload  # the accelerate file says so, and nothing else does
    with started([sys.executable, *explain[1:]], checkout) as run:
        assert run.wait() == 0, run.err
    assert "  # " in (checkout / "ours.yaml").read_text()
    assert load_config(checkout / "ours.yaml") == load_config(ROOT / "configs/quickstart.yaml", [], [ROOT / foreign])


def test_conversions_of_the_page_keep_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was exported and imported is trained on."""
    tiny_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = ("--device=cpu", "--config=tiny.yaml")
    assert launch(*flags, "run.dir=runs/demo") == 0
    for line in first_block("foreign_formats.md"):
        assert line[:3] == ["python", "-m", "portable_fsdp.checkpoint"]
        assert main(line[3:]) == 0, line
    assert sorted(path.name for path in Path("runs").iterdir()) == ["demo", "imported", "titan"]
    with Reader(resolve(Path("runs/demo"))) as a, Reader(resolve(Path("runs/titan"))) as b:
        assert a.manifest.tensors.keys() == b.manifest.tensors.keys()
        assert (a.manifest.step, a.manifest.ties) == (b.manifest.step, b.manifest.ties)
        assert value_differences(a, b) == {}
    new = ["checkpoint.resume=runs/imported/checkpoints/step-00000000", "checkpoint.load=weights_only"]
    assert launch(*flags, "run.dir=new", *new, "train.stop_at=2") == 0
    assert losses(tmp_path / "new")[0] < losses(tmp_path / "runs/demo")[0] - 0.05  # from trained weights
