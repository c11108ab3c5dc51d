"""What another format held is trained on: export, import, and a whole run from it, in this process."""

import re
import shlex
from pathlib import Path

import pytest
from cli import ROOT, launch, losses, tiny_config

from portable_fsdp.checkpoint.__main__ import main, resolve
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.checkpoint.values import value_differences


def test_a_tied_model_goes_out_and_in_and_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    flags = ("--device=cpu", "--config=tiny.yaml")
    assert launch(*flags) == 0
    assert main(["export", "run", "hub"]) == 0
    assert main(["import", "hub", "imported"]) == 0
    new = ["checkpoint.resume=imported/checkpoints/step-00000000", "checkpoint.load=weights_only"]
    assert launch(*flags, "run.dir=new", *new, "train.stop_at=2") == 0
    assert losses(tmp_path / "new")[0] < losses(tmp_path / "run")[0] - 0.05  # from trained weights


def test_the_commands_of_the_page_do_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert launch("--device=cpu", "--config=tiny.yaml", "run.dir=runs/demo") == 0
    [block] = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs/foreign_formats.md").read_text(), re.M | re.S)
    for line in block.splitlines():
        program, arguments = shlex.split(line)[:3], shlex.split(line)[3:]
        assert program == ["python", "-m", "portable_fsdp.checkpoint"]
        assert main(arguments) == 0, line
    assert sorted(path.name for path in Path("runs").iterdir()) == ["demo", "imported", "titan"]
    with Reader(resolve(Path("runs/demo"))) as a, Reader(resolve(Path("runs/titan"))) as b:
        assert a.manifest.tensors.keys() == b.manifest.tensors.keys()
        assert (a.manifest.step, a.manifest.ties) == (b.manifest.step, b.manifest.ties)
        assert value_differences(a, b) == {}
