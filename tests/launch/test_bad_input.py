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
from cli import PYTHON, TINY, TORCHRUN, committed, contents, finish, launch, losses, tiny_config
from tokenizers import Tokenizer, models

from portable_fsdp import evaluate, explain, sample
from portable_fsdp.checkpoint import __main__ as checkpoint
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.plan import __main__ as plan
from portable_fsdp.runtime.host import tpu_chips

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "launch": lambda words: launch(*words),
    **{"explain": explain.main, "evaluate": evaluate.main, "sample": sample.main},
    **{"plan": plan.main, "checkpoint": checkpoint.main},
}


def refused(capsys: pytest.CaptureFixture[str], arguments: Sequence[str | Path], command: str = "launch") -> str:
    """Start in this process, which must end with exit code 2; its message, held to one screen, changes no file."""
    before = contents(Path.cwd())
    capsys.readouterr()
    try:
        code = COMMANDS[command](list(map(str, arguments)))
    except SystemExit as end:  # argparse's
        code = end.code
    out, message = capsys.readouterr()
    assert (code, out) == (2, ""), message
    check_message(message)
    assert contents(Path.cwd()) == before, arguments
    return message


def check_message(message: str) -> None:
    assert message.strip()
    assert len(message.splitlines()) < 28, message  # one screen
    assert "Traceback" not in message
    assert 'File "' not in message


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert launch("--device=cpu", f"--config={tiny_config(folder)}", f"run.dir={folder / 'run'}") == 0
    return folder / "run"


PAGE = (Path(__file__).parents[1] / "convert/samples/hugging_face_page.yaml").read_text()
TEXTS = {"empty.jsonl": ["", ""], "two.jsonl": ["x" * 70, "x" * 99], "forty.jsonl": ["xxxx"] * 40}
WRONG_FILES = {
    "short.txt": "hello",
    "broken.yaml": "run: {dir: run\ntrain: ][\n",
    "indented.yaml": "train:\n  steps: 3\n    global_batch: 4\n",
    "text.yaml": "a sentence\n",
    "axolotl.yaml": "base_model: a/b\ndatasets: [{path: x, type: jeopardy}]\nmax_steps: 3\nrl: dpo\n",
    "page.yaml": PAGE.replace("num_processes: 2", "num_processes: 1").replace("LlamaDecoderLayer", "BertLayer"),
    "fsdp.yaml": "mixed_precision: bf16\nsharding: {auto_wrap_policy: a, use_orig_params: true}\ntrain: {steps: 3}\n",
    "train.py": "import torch\n\nprint(torch)\n",
    "number.jsonl": '{"text": 3}\n',
    "broken.jsonl": '{"text": "a"}\n{broken\n',
    **{name: "".join(map('{{"text": "{}"}}\n'.format, texts)) for name, texts in TEXTS.items()},
    "model/config.json": "",
    "stopped/events.jsonl": "",  # a run without a checkpoint
}


@pytest.fixture
def folder(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with a config, some wrong files, and in `done` a finished run."""
    tiny_config(tmp_path)
    for name, text in WRONG_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "words").mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "words/tokenizer.json"))
    shutil.copytree(finished, tmp_path / "done")
    monkeypatch.chdir(tmp_path)
    return tmp_path


CPU = ["--device=cpu", "--config=tiny.yaml"]
GOLDEN = Path(__file__).parent / "golden/bad_input.txt"


@pytest.mark.xla
@pytest.mark.timeout(900)  # for a hundred starts
def test_bad_input_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], assert_golden: Callable[[Path, str], None]
) -> None:
    """The golden file has each message, under its command: the key or flag, what was found, what to do.

    Before a command lie its variables; `WITHOUT` is a package that isn't installed.
    """
    parts: list[str] = []
    found = re.findall(r"^(## .*\n|)\$ ((?:[A-Z_]+=\S* )*)(\w+) (.*)$", GOLDEN.read_text(), re.MULTILINE)
    for title, variables, command, line in found:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (word.split("=") for word in variables.split()):
                patch.setitem(sys.modules, value, None) if name == "WITHOUT" else patch.setenv(name, value)
            message = refused(capsys, shlex.split(line), command).replace(str(folder), "FOLDER")
        assert message.count("Nothing was started.") <= (command == "launch"), message
        message = re.sub(r"\s+Nothing was started\.\n", "\n", message)
        message = re.sub(r"^(loading|building|compiling step) .*\n", "", message, flags=re.MULTILINE)
        message = re.sub(r"\nusage: (.*\n)+?  See --help\.", "\nusage: ...", message)
        message = re.sub(r"\d+ (documents of python_docs in) [\d,]+ rows", r"N \1 N rows", message)  # of this CPython
        message = re.sub(r"\(choose from .*\)", "(choose from ...)", message)  # argparse's quotes, by its version
        message = re.sub(r"[\d,.]+ [GM]iB", "N GiB", message)
        parts.append(f"{title}$ {variables}{command} {line}\n{message}")
    assert_golden(GOLDEN, "\n".join(parts))


WITHOUT_TORCH = """
import contextlib, io, json, pkgutil, shlex, sys
MODULES = {"checkpoint": "checkpoint.__main__", "plan": "plan.__main__"}
for line in json.loads(sys.argv[1]):
    command, *words = shlex.split(line)
    main = pkgutil.resolve_name(f"portable_fsdp.{MODULES.get(command, command)}:main")
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            code = main(words)
        except SystemExit as end:  # argparse's
            code = end.code
    assert (code, {"torch", "transformers"} & sys.modules.keys()) == (2, set()), line
"""
NEED_MORE = re.compile(r"started by|^\$ [A-Z_]+=|data\.tokenizer=(?!nowhere)|pretrained: words", re.MULTILINE)
"""What shows that a command needs torch, transformers or variables."""


def test_most_mistakes_are_found_without_torch(folder: Path) -> None:
    """All of those commands in one process: torch, once imported, stays."""
    blocks = re.findall(r"^\$ .*\n(?:.+\n)*", GOLDEN.read_text(), re.MULTILINE)
    lines = [block.partition("\n")[0][2:] for block in blocks if not NEED_MORE.search(block)]
    assert len(lines) > 60
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, json.dumps(lines)], cwd=folder, timeout=120, check=True)


@pytest.mark.xla
def test_a_device_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for device, is_there, expected, way_out in (
        ("cuda", torch.cuda.is_available(), "no GPU found", "use --device=cpu"),
        ("tpu", tpu_chips(), "no TPU chips found", "--device=cpu --backend=xla"),
    ):
        if not is_there:
            message = refused(capsys, ["--config=tiny.yaml", f"--device={device}"])
            assert f"--device={device}: {expected}" in message
            assert way_out in message


def test_a_config_json_that_has_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its path the same model goes on, wherever the file lies; another one in its place doesn't."""
    model: dict[str, Any] = TINY["model"]
    values: dict[str, Any] = model["architecture"]
    file = folder / "config.json"
    file.write_text(json.dumps(values))
    assert launch(*CPU, "run.dir=done", f"model.architecture={file}") == 0
    file.write_text(json.dumps(values | {"rope_theta": 5.0}))
    message = refused(capsys, [*CPU, "run.dir=done", f"model.architecture={folder}"])
    assert "the config differs from that of the run that saved it:" in message
    assert "checkpoint.allow='[model.architecture]'" in message


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


def test_loss_that_is_not_finite(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saving = ("checkpoint.every=1", "checkpoint.async_save=true")
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
