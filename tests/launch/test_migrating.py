"""What docs/migrating.md tells a newcomer to type, typed: an accelerate YAML and a folder of text become a training."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from cli import ROOT, committed, losses, started

from portable_fsdp.config.load import load_config

pytestmark = pytest.mark.slow

SMALL = ("model.architecture.hidden_size=32", "model.architecture.intermediate_size=64", "data.seq_len=32")
FOREIGN = "tests/convert/samples/accelerate_0_20_fsdp.yaml"


def newcomer(folder: Path) -> list[list[str]]:
    """The commands of the page's first block, in a folder with this checkout's files and a folder of text."""
    for name in ("configs", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "corpus").mkdir()
    for number in range(3):
        text = f"Text {number} of a newcomer, line after line, in a file of its own.\n" * 40
        (folder / f"corpus/{number}.txt").write_text(text, encoding="utf-8")
    block = re.search(r"^```bash\n(.*?)^```", (ROOT / "docs/migrating.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block
    return [shlex.split(line) for line in block[1].replace("\\\n", " ").splitlines()]


def test_an_accelerate_file_and_a_folder_of_text_are_a_training(tmp_path: Path) -> None:
    train, explain = newcomer(tmp_path)
    assert FOREIGN in explain[-2]
    assert train[0] == "python"
    with started([sys.executable, *train[1:], *SMALL, "train.stop_at=2"], tmp_path) as run:
        assert run.wait() == 0, run.err
    assert "native on 2 x cpu (2 process(es))" in run.err
    first, second = losses(tmp_path / "runs/mine")
    assert second < first
    assert committed(tmp_path / "runs/mine") == [2]
    config = load_config(tmp_path / "runs/mine/config.yaml")
    assert config.data.path == "corpus/*.txt"
    assert config.memory.cpu_offload  # the accelerate file says so, and nothing else does


def test_the_text_is_what_is_trained_on(tmp_path: Path) -> None:
    train, _ = newcomer(tmp_path)
    for path in (tmp_path / "corpus").iterdir():
        path.unlink()
    with started([sys.executable, *train[1:], *SMALL, "train.stop_at=2"], tmp_path) as run:
        assert run.wait() == 2
    assert "found nothing: corpus/*.txt" in run.err
    assert "Traceback" not in run.err


def test_the_translation_is_a_config_of_ours(tmp_path: Path) -> None:
    _, explain = newcomer(tmp_path)
    with started([sys.executable, *explain[1:]], tmp_path) as run:
        assert run.wait() == 0, run.err
    assert "  # " in (tmp_path / "ours.yaml").read_text()
    both = load_config(ROOT / "configs/quickstart.yaml", [], [ROOT / FOREIGN])
    assert load_config(tmp_path / "ours.yaml") == both
