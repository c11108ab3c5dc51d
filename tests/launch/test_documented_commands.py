"""What the documents tell people to type runs here, as written but on CPUs; `here` says what is changed.

Commands of scripts, kubectl, sky and `docker build` don't run here: tests/test_docs.py compares them with the files
that they name, as it parses every command and runs each `explain`; test_templates.py runs the scripts dry.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli import FAKE_LAUNCHERS, PROGRAMS, SMALL_LLAMA, committed, finish, launch, losses, started, two_tasks
from documented import ROOT, Command, blocks, commands, program_of

from portable_fsdp import explain
from portable_fsdp.checkpoint.__main__ import main, resolve
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.convert.read import load_config

pytestmark = pytest.mark.slow

NAMES = ("migrating.md", "launching.md", "library.md", "foreign_configs.md", "doctor.md", "failures.md")
ALL = [command for name in NAMES for command in commands((ROOT / "docs" / name).read_text(), name)]

TWO_STEPS = {
    "portable_fsdp.launch": [*SMALL_LLAMA, "train.stop_at=2", "--device=cpu"],
    "examples/own_loop.py": [
        *SMALL_LLAMA,
        "train.steps=2",
        "train.log_every=1",
        "optim.warmup_steps=1",
        "compile.enabled=false",
    ],
    "portable_fsdp.doctor": [],
}
"""What follows each program, so that it ends soon."""


def started_by(command: Command) -> str | None:
    """The module or the script of Python that the command starts in the end."""
    name, *rest = program_of(command.words).words
    return rest[rest[0] == "-m"] if name == "python" else None


def programs() -> Iterator[object]:
    """srun is every day's; each of the others takes ten seconds and more of a processor."""
    for command in ALL:
        if started_by(command) in TWO_STEPS and "data.source=text" not in command.words:
            rare, xla = command.words[0] != "srun", "--device=tpu" in command.words
            marks = [pytest.mark.proof] * rare + [pytest.mark.xla] * xla
            yield pytest.param(command, marks=marks, id=command.where)


def here(words: list[str]) -> list[str]:
    """The same command with the programs of this environment, CPUs for its devices, and two processes."""
    words = [re.sub(r"^(--nproc[_-]per[_-]node|--num_processes|--num_devices)=\d+$", r"\1=2", word) for word in words]
    words = [re.sub(r"^--nnodes=2:", "--nnodes=1:", word).replace("=node0:29500", "=localhost:0") for word in words]
    if "examples/own_loop.py" in words:
        device = words.index("examples/own_loop.py") + 2
        words[device : device + 2] = ["cpu", "native"]
    if "--device=tpu" in words:
        words += ["--backend=xla", "--num_devices=2"]
    if words[0] == "accelerate":
        words[2:2] = ["--multi_gpu"]  # which it chooses by itself where there are GPUs
        if "--config_file" in words:  # it says 2 copies on 4 devices each, and has an inductor, which CPUs refuse
            sizes = ["--parallelism_config_dp_replicate_size=1", "--parallelism_config_dp_shard_size=2"]
            words[2:2] = ["--num_processes=2", *sizes]
            words += ["compile.enabled=false", "compile.backend=auto"]
    if words[0] in ("torchrun", "accelerate"):
        return [str(PROGRAMS / words[0]), *words[1:]]
    tasks = [*FAKE_LAUNCHERS, words[0]] if words[0] in ("srun", "mpirun") else []
    return [*tasks, sys.executable, *program_of(words).words[1:]]  # docker's container is this machine


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the commands name of this checkout; what a run writes lies in it."""
    for name in ("configs", "examples", "tests", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.parametrize("command", [*programs()])
def test_a_documented_program_runs(command: Command, checkout: Path) -> None:
    launcher, name = command.words[0], str(started_by(command))
    variables = {**command.variables, "PYTHONPATH": str(ROOT), "HF_HOME": str(checkout)}
    variables |= two_tasks(launcher) if launcher in ("srun", "mpirun") else {}
    variables |= {"USE_TORCH_XLA": "0"} if launcher == "accelerate" else {}
    with started([*here(command.words), *TWO_STEPS[name]], checkout, **variables) as run:
        code = run.wait(270)  # XLA compiles for long on a machine with other work
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


@pytest.mark.proof
def test_the_config_and_the_loop_of_the_readme_run(tmp_path: Path) -> None:
    for language, name in (("yaml", "run.yaml"), ("python", "loop.py")):
        [block] = blocks("README.md", language)
        (tmp_path / name).write_text(block)
    assert load_config(tmp_path / "run.yaml").train.global_batch % 8 == 0  # its torchrun has eight processes
    finish([sys.executable, "-m", "portable_fsdp.launch", "--device=cpu", "--config=run.yaml"], tmp_path)
    assert committed(tmp_path / "runs/first") == [10, 20]
    assert losses(tmp_path / "runs/first")[-1] < 4.5 < losses(tmp_path / "runs/first")[0]
    out = finish([sys.executable, "loop.py"], tmp_path, PYTHONPATH=str(ROOT)).out
    assert float(out.split()[-1]) < 1  # from 8


def test_variables_before_a_script_are_read_by_it() -> None:
    """A misspelt one is no error of the shell: the script would take its default."""
    workers = (ROOT / "launch/tpu_workers.sh").read_text()
    scripts = [(word, command) for command in ALL for word in command.words[:2] if word.startswith("launch/")]
    shown = [(script, name) for script, command in scripts for name in command.variables]
    exported = [word.partition("=")[0] for command in ALL for word in command.words[1:] if command.words[0] == "export"]
    shown += [(f"launch/tpu_{name}.sh", variable) for name in ("vm", "queued_resource") for variable in exported]
    assert len(shown) > 6
    for script, variable in shown:
        assert re.search(rf"\$\{{?{variable}\b", (ROOT / script).read_text() + workers), f"{script} reads no {variable}"


def words_of(page: str) -> list[list[list[str]]]:
    """Of each block of commands, the words after `python -m MODULE` of each one."""
    texts = [f"```bash\n{block}```\n" for block in blocks(page, "bash")]
    return [[command.words[3:] for command in commands(text, page)] for text in texts]


@pytest.mark.proof
def test_an_accelerate_file_and_a_folder_of_text_are_a_training(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, explained = words_of("docs/migrating.md")[0]
    (checkout / "corpus").mkdir()
    for number in range(3):
        text = f"Text {number} of a newcomer, line after line, in a file of its own.\n" * 40
        (checkout / f"corpus/{number}.txt").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "portable_fsdp.launch", *SMALL_LLAMA, *train, "train.stop_at=2"]
    assert "native on 2 x cpu (2 process(es))" in finish(command, checkout).err
    first, second = losses(checkout / "runs/mine")
    assert second < first
    assert committed(checkout / "runs/mine") == [2]
    config = load_config(checkout / "runs/mine/config.yaml")
    assert config.data.path == "corpus/*.txt"
    assert config.memory.cpu_offload  # the accelerate file says so, and nothing else does
    monkeypatch.chdir(checkout)
    assert explain.main(explained) == 0
    assert "  # " in Path("ours.yaml").read_text()
    [foreign] = [word.removeprefix("--import=") for word in explained if word.startswith("--import=")]
    assert load_config("ours.yaml") == load_config(ROOT / "configs/quickstart.yaml", [], [ROOT / foreign])


def test_conversions_of_the_page_keep_every_value(folder: Path) -> None:
    """And what was exported and imported is trained on."""
    flags = ("--device=cpu", "--config=tiny.yaml")
    assert launch(*flags, "run.dir=runs/demo") == 0
    conversions, of_pickles = words_of("docs/foreign_formats.md")
    for words in conversions:
        assert main(words) == 0, words
    assert sorted(path.name for path in Path("runs").iterdir()) == ["demo", "imported", "titan"]
    [line] = blocks("docs/foreign_formats.md", "python")
    exec(line, {})
    saved = torch.load("model.pt", weights_only=True)
    with Reader(resolve(Path("runs/demo"))) as reader:
        assert saved.keys() == {key for key in reader.manifest.tensors if "/" not in key}
        assert all(torch.equal(tensor, reader.read_whole(key)) for key, tensor in saved.items())
    shutil.copytree("hub", "opt")
    torch.save(saved, "opt/pytorch_model.bin")
    Path("opt/model.safetensors").unlink()
    Path("opt/portable_fsdp.json").unlink()
    for words in of_pickles:
        assert main(words) == 0, words
    assert launch(*flags, "run.dir=from", "model.architecture=null", "model.pretrained=opt-safetensors") == 0
    with Reader(resolve(Path("runs/demo"))) as a, Reader(resolve(Path("runs/titan"))) as b:
        assert a.manifest.tensors.keys() == b.manifest.tensors.keys()
        assert (a.manifest.step, a.manifest.ties) == (b.manifest.step, b.manifest.ties)
        assert all(torch.equal(a.read_whole(key), b.read_whole(key)) for key in a.manifest.tensors)
    new = ["checkpoint.resume=runs/imported/checkpoints/step-00000000", "checkpoint.load=weights_only"]
    assert launch(*flags, "run.dir=new", *new, "train.stop_at=2") == 0
    assert losses(folder / "new")[0] < losses(folder / "runs/demo")[0] - 0.05  # from trained weights
