"""A slip of the keyboard is refused before torch and transformers are imported, which takes seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICKSTART = ["--device=cpu", f"--config={ROOT / 'configs/quickstart.yaml'}"]

# Command, its arguments ({tmp} is an empty folder), and a part of the message.
REFUSED = [
    ("launch", ["--device=gpu", *QUICKSTART[1:]], "--device=gpu: expected one of auto, cpu, cuda, tpu"),
    ("launch", [*QUICKSTART, "--backend=fsdp"], "--backend=fsdp: expected one of auto, native"),
    ("launch", [*QUICKSTART, "--num_devices=two"], "--num_devices: expected auto or a number"),
    ("launch", ["--device=tpu", *QUICKSTART[1:]], "--device=tpu: expected TPU chips"),
    ("launch", ["--config={tmp}/none.yaml"], "none.yaml: expected a YAML config file"),
    ("launch", [*QUICKSTART, "optim.lrr=3"], "optim.lrr: unknown key"),
    ("launch", [*QUICKSTART, "train.micro_batch=7"], "train.global_batch: expected a multiple"),
    ("launch", [*QUICKSTART, "--num_devices=5"], "train.global_batch: expected a multiple"),
    ("launch", [*QUICKSTART, "--backend=xla", "memory.cpu_offload=true"], "memory.cpu_offload=true"),
    ("launch", [*QUICKSTART, "--num_devices=2", "run.dir={tmp}/file"], "run.dir: expected a folder"),
    ("launch", [*QUICKSTART, "data.source=text", "data.path={tmp}/*.txt"], "data.path: expected a file"),
    ("launch", [*QUICKSTART, "data.tokenizer={tmp}/none"], "data.tokenizer: expected bytes, a folder"),
    (
        "launch",
        [*QUICKSTART, "model.architecture=null", "model.pretrained={tmp}/none"],
        "model.pretrained: expected a local folder or a hub id",
    ),
    ("launch", [*QUICKSTART, "checkpoint.resume={tmp}/none"], "checkpoint.resume: expected auto, none, or"),
    ("explain", ["--device=gpu", *QUICKSTART[1:]], "--device=gpu: expected one of"),
    ("plan", [*QUICKSTART[1:], "--on=h101:8"], "nearest: h100"),
    ("checkpoint", ["shwo", "{tmp}"], "invalid choice: 'shwo'"),
    ("checkpoint", ["verify", "{tmp}/none"], "expected a checkpoint"),
    ("checkpoint", ["export", "{tmp}/none", "{tmp}/out"], "expected a checkpoint"),
    ("checkpoint", ["diff", "{tmp}/none", "{tmp}/none"], "expected a checkpoint"),
    ("checkpoint", ["import", "{tmp}/none", "{tmp}/out"], "expected a file or a folder, found none"),
    ("sample", ["{tmp}/none"], "checkpoint.export=true"),
]

# All of them in one process: torch, once imported, stays.
PROGRAM = """
import contextlib, importlib, io, json, sys
answers = []
for module, arguments in json.loads(sys.argv[1]):
    main = importlib.import_module(f"portable_fsdp.{module}").main
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(arguments)
        except SystemExit as error:  # argparse's
            code = error.code
    answers.append((errors.getvalue(), code, sorted({"torch", "transformers"} & sys.modules.keys())))
print(json.dumps(answers))
"""
MODULES = {"plan": "plan.__main__", "checkpoint": "checkpoint.__main__"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, list[str]]]:
    """Message, exit code and what was imported, of each row."""
    folder = tmp_path_factory.mktemp("early")
    (folder / "file").touch()
    calls = [
        (MODULES.get(command, command), [argument.replace("{tmp}", str(folder)) for argument in arguments])
        for command, arguments, _ in REFUSED
    ]
    command = [sys.executable, "-c", PROGRAM, json.dumps(calls)]
    return json.loads(subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=True).stdout)


@pytest.mark.parametrize("row", range(len(REFUSED)), ids=lambda row: " ".join((REFUSED[row][0], REFUSED[row][1][-1])))
def test_a_mistake_is_refused_without_torch(row: int, answers: list[tuple[str, int, list[str]]]) -> None:
    message, code, imported = answers[row]
    assert REFUSED[row][2] in message
    assert (code, imported) == (2, [])
