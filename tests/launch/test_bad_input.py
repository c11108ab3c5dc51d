"""Bad input: one screen that says what to do, exit code 2, no traceback, and the run's folder as it was.

Most of it is found in the first process, so it runs in this one.
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cli import PYTHON, TINY, TORCHRUN, committed, launch, losses, started, tiny_config
from tokenizers import Tokenizer, models

from portable_fsdp.checkpoint.format import hash_file
from portable_fsdp.metrics.sinks import read_jsonl

SCREEN = 25  # lines
MACHINE = re.compile(r"[\d,.]+ [GM]iB")


def refused(capsys: pytest.CaptureFixture[str], arguments: Sequence[str | Path]) -> str:
    """Start in this process, which must end with exit code 2; what it message, held to one screen."""
    capsys.readouterr()
    code = launch(*arguments)
    message = capsys.readouterr().err
    assert code == 2, message
    check_message(message)
    return message


def check_message(message: str) -> None:
    assert message.strip()
    assert len(message.splitlines()) < SCREEN, message
    assert "Traceback" not in message
    assert 'File "' not in message


def contents(folder: Path) -> dict[Path, str]:
    """Hash of each file in it; a folder in it has none."""
    return {path: hash_file(path, path.name).xxh3_128 if path.is_file() else "" for path in sorted(folder.rglob("*"))}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with a config and some wrong files."""
    tiny_config(tmp_path)
    (tmp_path / "short.txt").write_text("hello")
    (tmp_path / "broken.yaml").write_text("run: {dir: run\ntrain: ][\n")
    (tmp_path / "text.yaml").write_text("a sentence\n")
    page = Path(__file__).parents[1] / "convert/samples/hugging_face_page.yaml"
    text = page.read_text().replace("num_processes: 2", "num_processes: 1")
    (tmp_path / "page.yaml").write_text(text.replace("LlamaDecoderLayer", "BertLayer"))
    (tmp_path / "words").mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "words/tokenizer.json"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


CPU = ["--device=cpu", "--config=tiny.yaml"]
ANYWHERE = ["--config=tiny.yaml"]

GOLDEN = Path(__file__).parent / "golden/bad_input.txt"


@pytest.mark.timeout(900)  # for fifty starts
def test_bad_input_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], assert_golden: Callable[[Path, str], None]
) -> None:
    """The golden file has each message, under its command: the key or flag, what was found, what to do."""
    before = contents(folder)
    parts: list[str] = []
    for title, line in re.findall(r"^## (.*)\n\$ launch (.*)$", GOLDEN.read_text(), re.MULTILINE):
        message = refused(capsys, shlex.split(line)).replace(str(folder), "FOLDER")
        assert message.count("Nothing was started.") <= 1, message
        message = re.sub(r"\s+Nothing was started\.\n", "\n", message)
        parts.append(f"## {title}\n$ launch {line}\n{re.sub(MACHINE, 'N GiB', message)}")
        assert contents(folder) == before, title
    assert_golden(GOLDEN, "\n".join(parts))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_with_no_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refused(capsys, [*ANYWHERE, "--device=cuda"])
    assert "--device=cuda: expected a GPU, found none" in message
    assert "use --device=cpu" in message
    assert not (folder / "run").exists()


@pytest.mark.xla
def test_tpu_with_no_tpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]:
        pytest.skip("there is a TPU here")
    message = refused(capsys, [*ANYWHERE, "--device=tpu"])
    assert "--device=tpu: expected TPU chips, found none" in message
    assert "--device=cpu --backend=xla" in message
    assert not (folder / "run").exists()


class WithoutXla(PathFinder):
    """The path finder of an environment that has no torch_xla."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if fullname.partition(".")[0] == "torch_xla" else super().find_spec(fullname, path, target)


@pytest.mark.parametrize(("device", "extra"), [("cpu", "[xla]"), ("tpu", "[tpu]")])
def test_xla_not_installed(
    device: str, extra: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    finders = [WithoutXla if finder is PathFinder else finder for finder in sys.meta_path]
    monkeypatch.setattr(sys, "meta_path", finders)
    message = refused(capsys, [*ANYWHERE, f"--device={device}", "--backend=xla"])
    assert f"backend xla on {device}: expected the package torch_xla, found none" in message
    assert f"pip install '.{extra}'" in message
    assert not (folder / "run").exists()


LAUNCHER = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "words", "expected"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, CPU, ["RANK=0, WORLD_SIZE=2 without LOCAL_RANK, MASTER_ADDR", "torchrun"]),
        ({**LAUNCHER, "WORLD_SIZE": "two"}, CPU, ["WORLD_SIZE", "'two'"]),
        pytest.param(  # each of them would believe that it is the whole run
            LAUNCHER,
            [*CPU, "--backend=xla"],
            ["expected one process for all devices, found 2"],
            marks=pytest.mark.xla,
        ),
    ],
    ids=["half of them", "not a number", "xla on cpu"],
)
def test_variables_of_a_launcher(
    variables: dict[str, str],
    words: list[str],
    expected: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    message = refused(capsys, words)
    assert [text for text in expected if text not in message] == [], message
    assert not (folder / "run").exists()


# ---------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert launch("--device=cpu", f"--config={tiny_config(folder)}", f"run.dir={folder / 'run'}") == 0
    return folder / "run"


@pytest.fixture
def run(finished: Path, folder: Path) -> Path:
    return Path(shutil.copytree(finished, folder / "run"))


def test_folder_with_another_models_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    message = refused(capsys, [*CPU, "model.architecture.hidden_size=64"])
    assert "checkpoint step-00000006: expected the tensors of this model, found " in message
    assert "that differ:\n  model.architecture.hidden_size: 32, now 64\n" in message
    assert re.search(r"    model\.embed_tokens\.weight +float32 \[256, 64\] +float32 \[256, 32\]\n", message)
    assert "train in another run.dir" in message
    assert contents(run) == before


def test_a_config_json_that_has_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its path the same model goes on, wherever the file lies; another one in its place doesn't."""
    model: dict[str, Any] = TINY["model"]
    values: dict[str, Any] = model["architecture"]
    file = run.parent / "config.json"
    file.write_text(json.dumps(values))
    assert launch(*CPU, f"model.architecture={file}") == 0
    file.write_text(json.dumps(values | {"rope_theta": 5.0}))
    before = contents(run)
    message = refused(capsys, [*CPU, f"model.architecture={run.parent}"])
    assert "found another:" in message
    assert "checkpoint.allow='[model.architecture]'" in message
    assert contents(run) == before


def test_a_new_run_in_a_used_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    message = refused(capsys, [*CPU, "checkpoint.resume=none"])
    assert "expected no checkpoint" in message
    assert "found step-00000006 and 1 older" in message
    assert contents(run) == before


def _alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "altered": _alter,
}


@pytest.mark.parametrize("file", ["manifest.json", "model/shard-00000-00.safetensors"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_named_checkpoint_is_damaged(damage: str, file: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = run / "checkpoints/step-00000006"
    DAMAGE[damage](checkpoint / file)
    before = contents(run)
    message = refused(capsys, [*CPU, f"checkpoint.resume={checkpoint}", "run.dir=new", "train.steps=8"])
    assert "checkpoint step-00000006: " in message
    assert file in message
    assert contents(run) == before
    assert not Path("new").exists()


def test_auto_goes_back_past_a_damaged_checkpoint_and_says_so(
    finished: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _alter(run / "checkpoints/step-00000006/model/shard-00000-00.safetensors")
    assert launch(*CPU) == 0
    message = capsys.readouterr().err
    assert "passed over a damaged checkpoint: checkpoint step-00000006" in message
    assert "resuming from the older step-00000004" in message
    assert losses(run) == pytest.approx(losses(finished), rel=1e-5)
    assert (run / "checkpoints/step-00000006.damaged-1").is_dir()
    assert committed(run) == [4, 6]


# ------------------------------------------------------------------------------------------------ several processes


def test_what_only_workers_find_is_said_once(folder: Path) -> None:
    """A corpus shorter than a row; and metrics.jsonl, which process 0 reads while the others wait in a collective."""
    short = ["data.source=text", "data.path=short.txt"]
    (folder / "damaged").mkdir()
    (folder / "damaged/metrics.jsonl").write_text("hello\n")
    commands = {
        "several": [*PYTHON, *CPU, "--num_devices=2", *short],
        "torchrun": [*TORCHRUN, *CPU, *short],
        "process 0": [*PYTHON, *CPU, "--num_devices=2", "run.dir=damaged"],
    }
    with ExitStack() as stack:  # at the same time: most of it is importing
        running = {name: stack.enter_context(started(command, folder)) for name, command in commands.items()}
        codes = {name: process.wait() for name, process in running.items()}
        messages = {name: process.err for name, process in running.items()}
    assert codes == {"several": 2, "torchrun": 1, "process 0": 2}  # torchrun answers 1 for all but 0, with a traceback
    check_message(messages["several"])
    check_message(messages["process 0"])
    assert messages.pop("process 0").count("metrics.jsonl") == 1
    for text in messages.values():
        assert text.count("expected at least 33 tokens") == 1, text
        assert "Lower data.seq_len" in text
    assert not (folder / "run").exists()


@pytest.mark.xla
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "--num_devices=4 memory.cpu_offload=true sharding.reshard_after_forward=2 model.attention=sdpa",
            [
                *("cpu_offload=true on XLA", "reshard_after_forward=2 on XLA", "Set model.attention=auto"),
                "backend xla on cpu (4 device(s) of 1 host(s))",
            ],
        ),
        (  # a bad batch hides no refusal
            "--num_devices=3 memory.cpu_offload=true",
            ["cpu_offload=true on XLA", "expected a multiple of train.micro_batch * devices = 1 * 3 = 3"],
        ),
    ],
    ids=["options", "batch"],
)
def test_what_xla_cannot_do_is_refused_at_once(words: str, expected: list[str], folder: Path) -> None:
    with started([*PYTHON, *CPU, "--backend=xla", *words.split()], folder) as process:
        assert process.wait() == 2
    check_message(process.err)
    assert [text for text in expected if text not in process.err] == [], process.err
    assert not (folder / "run").exists()


# ------------------------------------------------------------------------------------------------ not a number


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
    assert launch(*CPU, f"train.stop_at={last}") == 2
    capsys.readouterr()
    assert launch(*CPU, f"train.stop_at={last}", "checkpoint.allow=[optim.lr, train.max_grad_norm]") == 0
    assert f"resumed from run/checkpoints/step-{last:08d}" in capsys.readouterr().err
