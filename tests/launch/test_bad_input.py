"""Bad input: one screen that says what to do, exit code 2, no traceback, and the run's folder as it was.

Most of it is found in the first process, so it runs in this one.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cli import PYTHON, TINY, TORCHRUN, committed, finish, launch, losses, tiny_config
from tokenizers import Tokenizer, models

from portable_fsdp.checkpoint.manifests import hash_file
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.runtime.host import tpu_chips

SCREEN = 28  # lines
MACHINE = re.compile(r"[\d,.]+ [GM]iB")


def refused(capsys: pytest.CaptureFixture[str], arguments: Sequence[str | Path]) -> str:
    """Start in this process, which must end with exit code 2; its message, held to one screen, changes no file."""
    before = contents(Path.cwd())
    capsys.readouterr()
    code = launch(*arguments)
    message = capsys.readouterr().err
    assert code == 2, message
    check_message(message)
    assert contents(Path.cwd()) == before, arguments
    return message


def check_message(message: str) -> None:
    assert message.strip()
    assert len(message.splitlines()) < SCREEN, message
    assert "Traceback" not in message
    assert 'File "' not in message


def contents(folder: Path) -> dict[Path, str]:
    """Hash of each file in it; a folder in it has none."""
    return {path: hash_file(path, path.name).xxh3_128 if path.is_file() else "" for path in sorted(folder.rglob("*"))}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert launch("--device=cpu", f"--config={tiny_config(folder)}", f"run.dir={folder / 'run'}") == 0
    return folder / "run"


@pytest.fixture
def folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with a config, some wrong files, and in `done` a finished run."""
    tiny_config(tmp_path)
    (tmp_path / "short.txt").write_text("hello")
    (tmp_path / "broken.yaml").write_text("run: {dir: run\ntrain: ][\n")
    (tmp_path / "text.yaml").write_text("a sentence\n")
    page = Path(__file__).parents[1] / "convert/samples/hugging_face_page.yaml"
    text = page.read_text().replace("num_processes: 2", "num_processes: 1")
    (tmp_path / "page.yaml").write_text(text.replace("LlamaDecoderLayer", "BertLayer"))
    (tmp_path / "words").mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "words/tokenizer.json"))
    shutil.copytree(finished, tmp_path / "done")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CPU = ["--device=cpu", "--config=tiny.yaml"]
DONE = [*CPU, "run.dir=done"]

GOLDEN = Path(__file__).parent / "golden/bad_input.txt"


@pytest.mark.xla
@pytest.mark.timeout(900)  # for sixty starts
def test_bad_input_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], assert_golden: Callable[[Path, str], None]
) -> None:
    """The golden file has each message, under its command: the key or flag, what was found, what to do.

    Before a command lie its variables; `WITHOUT` is a package that isn't installed.
    """
    parts: list[str] = []
    for title, variables, line in re.findall(r"^## (.*)\n\$ (.*)launch (.*)$", GOLDEN.read_text(), re.MULTILINE):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (word.split("=") for word in variables.split()):
                patch.setitem(sys.modules, value, None) if name == "WITHOUT" else patch.setenv(name, value)
            message = refused(capsys, shlex.split(line)).replace(str(folder), "FOLDER")
        assert message.count("Nothing was started.") <= 1, message
        message = re.sub(r"\s+Nothing was started\.\n", "\n", message)
        message = re.sub(r"^(loading|building|compiling step) .*\n", "", message, flags=re.MULTILINE)
        # CPython's text differs by version.
        message = re.sub(
            r"\d+ documents of python_docs in [\d,]+ rows", "N documents of python_docs in N rows", message
        )
        parts.append(f"## {title}\n$ {variables}launch {line}\n{re.sub(MACHINE, 'N GiB', message)}")
    assert_golden(GOLDEN, "\n".join(parts))


@pytest.mark.xla
@pytest.mark.parametrize(
    ("device", "expected", "way_out", "is_there"),
    [
        ("cuda", "no GPU found", "use --device=cpu", torch.cuda.is_available()),
        ("tpu", "no TPU chips found", "--device=cpu --backend=xla", bool(tpu_chips())),
    ],
)
def test_a_device_that_is_not_there(
    device: str, expected: str, way_out: str, is_there: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if is_there:
        pytest.skip("it is there")
    message = refused(capsys, ["--config=tiny.yaml", f"--device={device}"])
    assert f"--device={device}: {expected}" in message
    assert way_out in message


# ---------------------------------------------------------------------------------------------------- checkpoints


def test_a_config_json_that_has_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its path the same model goes on, wherever the file lies; another one in its place doesn't."""
    model: dict[str, Any] = TINY["model"]
    values: dict[str, Any] = model["architecture"]
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    assert launch(*DONE, f"model.architecture={file}") == 0
    file.write_text(json.dumps(values | {"rope_theta": 5.0}))
    message = refused(capsys, [*DONE, f"model.architecture={folder}"])
    assert "the config differs from that of the run that saved it:" in message
    assert "checkpoint.allow='[model.architecture]'" in message


# ------------------------------------------------------------------------------------------------ several processes


def test_what_only_process_0_finds_is_said_once(folder: Path) -> None:
    """metrics.jsonl, which it reads while the others wait in a collective."""
    (folder / "damaged").mkdir()
    (folder / "damaged/metrics.jsonl").write_text("hello\n")
    run = finish([*PYTHON, *CPU, "--num_devices=2", "run.dir=damaged"], folder, 2)
    check_message(run.err)
    assert run.err.count("metrics.jsonl") == 1
    assert not (folder / "run").exists()


@pytest.mark.proof
def test_what_all_workers_find_is_said_once(folder: Path) -> None:
    """A corpus shorter than a row."""
    run = finish([*TORCHRUN, *CPU, "data.source=text", "data.path=short.txt"], folder, 1)  # torchrun's own code
    assert run.err.count("expected at least 33 tokens") == 1, run.err
    assert "Lower data.seq_len" in run.err
    assert not (folder / "run").exists()


# ------------------------------------------------------------------------------------------------ not a number


def test_five_mistakes_of_a_config_are_one_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong keys, and what is wrong in the rest; what only follows from a wrong key is not said."""
    words = ["data.packign=none", "optim.lr=fast", "optim.warmup_steps=70", "data.source=text", "data.path=no/*.txt"]
    words += ["train.global_batch=x", "train.micro_batch=9"]
    message = refused(capsys, ["--device=cpu", "--config=tiny.yaml", *words])
    for part in (
        "data.packign: unknown key.\n  nearest: data.packing ",
        "optim.lr: expected a number > 0, found 'fast'.",
        "train.global_batch: expected an integer >= 1, found 'x'.",
        "optim.warmup_steps: expected at most 6 (the steps of the run), found 70.",
        "data.path: no such file or match: no/*.txt",
    ):
        assert message.count(part) == 1, (part, message)
    assert "train.micro_batch" not in message


def test_mistakes_of_the_data_and_of_the_model_are_one_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.jsonl").write_text('{"text": 3}\n')
    words = ["data.source=jsonl", "data.path=bad.jsonl", "model.freeze=[nothing]"]
    message = refused(capsys, ["--device=cpu", "--config=tiny.yaml", *words])
    assert "bad.jsonl:1: expected text, found a number" in message
    assert "model.freeze: the pattern 'nothing' matches nothing in the model" in message


def test_what_a_model_lacks_is_refused_before_the_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, [*CPU, "model.router_bias_rate=0.1", "data.source=text", "data.path=short.txt"])
    assert "model.router_bias_rate: LlamaForCausalLM has no buffer" in message
    assert "short.txt" not in message


@pytest.mark.parametrize("background", ["false", "true"])
def test_loss_that_is_not_finite(folder: Path, capsys: pytest.CaptureFixture[str], background: str) -> None:
    saving = ("checkpoint.every=1", f"checkpoint.async_save={background}")
    assert launch(*CPU, "optim.lr=1e30", "train.max_grad_norm=null", *saving) == 1
    message = capsys.readouterr().err
    check_message(message)
    last = committed(folder / "run")[-1]
    assert last >= 1
    assert f"step {last + 1}: expected a finite loss and gradient norm" in message
    assert f"The last good checkpoint is run/checkpoints/step-{last:08d}." in message
    # The last save's event may come after it: its commit was awaited.
    [event] = [event for event in read_jsonl(folder / "run/events.jsonl") if event["event"] == "stop"]
    assert (event["step"], event["reason"]) == (last + 1, "not finite")
    assert len(losses(folder / "run")) == last
    # The last good checkpoint is whole: a resume that reads every byte goes as far as the run did.
    refused(capsys, [*CPU, f"train.stop_at={last}"])
    assert launch(*CPU, f"train.stop_at={last}", "checkpoint.allow=[optim.lr, train.max_grad_norm]") == 0
    assert f"resumed from run/checkpoints/step-{last:08d}" in capsys.readouterr().err


ROOT = Path(__file__).parents[2]
QUICKSTART = ["--device=cpu", f"--config={ROOT / 'configs/quickstart.yaml'}"]

# Command, its arguments ({tmp} is an empty folder), and a part of the message.
REFUSED = [
    ("launch", [*QUICKSTART, "optim.lrr=3"], "optim.lrr: unknown key"),
    ("launch", [*QUICKSTART, "sharding.plan={x: colwize}"], "sharding.plan.x: expected colwise | packed_colwise |"),
    (
        "launch",
        [*QUICKSTART, "--num_devices=24"],
        "train.micro_batch: expected at most 1, the rows of each of 24 devices",
    ),
    ("launch", [*QUICKSTART, "--backend=xla", "memory.cpu_offload=true"], "memory.cpu_offload=true"),
    ("launch", [*QUICKSTART, "--num_devices=2", "run.dir={tmp}/file"], "run.dir: expected a writable or new folder"),
    ("launch", [*QUICKSTART, "data.source=text", "data.path={tmp}/*.txt"], "data.path: no such file or match: "),
    ("launch", [*QUICKSTART, "data.tokenizer={tmp}/none"], "data.tokenizer: no such folder: "),
    (
        "launch",
        [*QUICKSTART, "model.architecture=null", "model.pretrained={tmp}/none"],
        "model.pretrained: no such folder: ",
    ),
    ("launch", [*QUICKSTART, "checkpoint.resume={tmp}/none"], "checkpoint.resume: no such folder: "),
    ("plan", [*QUICKSTART[1:], "--on=h101:8"], "nearest: h100"),
    ("checkpoint", ["shwo", "{tmp}"], "invalid choice: 'shwo'"),
    ("checkpoint", ["verify", "{tmp}/none"], "/none: no checkpoint"),
    ("checkpoint", ["diff", "{tmp}/none", "{tmp}/none"], "/none: no checkpoint"),
    ("checkpoint", ["import", "{tmp}/none", "{tmp}/out"], "/none: no such file or folder"),
    ("sample", ["{tmp}/none"], "/none: no such folder; name an exported model"),
    ("sample", ["{tmp}"], "checkpoint.export=true"),
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
