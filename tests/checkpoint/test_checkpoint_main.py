"""`python -m portable_fsdp.checkpoint`: what it prints, and its exit codes."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from foreign_models import MODELS, build, save
from plain_backend import Capture, Log, Patch, PlainBackend, checkpoints, save_once, small_model
from torch.optim import SGD
from transformers import AutoModelForCausalLM, AutoTokenizer

import portable_fsdp as pf
from portable_fsdp.checkpoint import commit
from portable_fsdp.checkpoint.__main__ import listing, main
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.runtime.errors import CheckpointError

pytestmark = pytest.mark.slow


def test_show_prints_content_and_writer(tmp_path: Path, capsys: Capture) -> None:
    path = save_once(tmp_path / "checkpoints", count=2, devices=2)
    assert main(["show", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"checkpoint  {path}", "step        5 (data: epoch 1, position 20)"]
    assert lines[2].endswith("backend plain on cpu, 2 processes")
    assert re.fullmatch(r"saved       \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", lines[3])
    assert lines[4] == "model       4 tensors, 65 elements, 1 KiB in 4 files"
    assert "  0.weight  float32 [7, 5]" in lines
    assert main(["show", "--json", str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["step"], facts["model"]["elements"], facts["data"]["position"]) == (5, 65, 20)
    assert main(["show", "--config", str(path)]) == 0
    assert capsys.readouterr().out == "optim:\n  lr: 0.001\n"
    assert main(["show", "--json", "--config", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out) == {"optim": {"lr": 0.001}}
    save(tmp_path / "layers", build(MODELS["llama"]))
    assert main(["show", str(tmp_path / "layers")]) == 0
    assert "  model.layers.*.mlp.up_proj.weight  float32 [80, 48]  x 2\n" in capsys.readouterr().out


def test_list_shows_all_of_a_run_and_which_are_damaged(tmp_path: Path, capsys: Capture) -> None:
    save_once(tmp_path / "checkpoints", step=5)
    save_once(tmp_path / "checkpoints", step=10)
    manifest = save_once(tmp_path / "checkpoints", step=15) / "manifest.json"
    manifest.write_text("{")
    assert main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["checkpoint", "step-00000015", "step-00000010", "step-00000005"]
    assert "damaged: checkpoint step-00000015: manifest.json" in lines[1]
    assert lines[2].endswith("backend plain on cpu, 2 processes")
    assert len({line.index("portable_fsdp") for line in lines[2:]}) == 1  # aligned
    assert main(["list", "--json", str(tmp_path / "checkpoints")]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row.get("step") for row in rows] == [None, 10, 5]
    assert rows[1]["parameters"] == 65
    assert rows[1]["written_by"]["process_count"] == 2
    assert rows[1]["bytes"] > 65 * 4


def test_verify_takes_the_newest_of_a_run_or_all(tmp_path: Path, capsys: Capture) -> None:
    older = save_once(tmp_path / "checkpoints", step=5)
    newest = save_once(tmp_path / "checkpoints", step=10)
    shard = next((older / "model").iterdir())
    shard.write_bytes(shard.read_bytes() + b"x")
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{newest}: whole: 8 files, 7 KiB\n"
    assert main(["verify", str(older)]) == 2
    assert "expected" in capsys.readouterr().err
    assert main(["verify", "--json", "--all", str(tmp_path)]) == 2
    result = json.loads(capsys.readouterr().out)
    assert [row["path"] for row in result["whole"]] == [str(newest)]
    assert [message.split(":")[0] for message in result["damaged"]] == ["checkpoint step-00000005"]


def test_diff_tells_what_differs(tmp_path: Path, capsys: Capture) -> None:
    one = save_once(tmp_path / "one" / "checkpoints", seed=1)
    same = save_once(tmp_path / "same" / "checkpoints", seed=1, count=1, step=6)
    assert main(["diff", str(one), str(same)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "equal: tensors (names, shapes, dtypes) and configs"
    assert "written_by: process_count  2 -> 1" in lines  # no difference of content

    two = save_once(tmp_path / "two" / "checkpoints", seed=2)
    assert main(["diff", "--json", str(one), str(two)]) == 0  # other values
    assert json.loads(capsys.readouterr().out)["is_equal"]

    model, _ = small_model(1, hidden=8)
    del model.gate
    opened = checkpoints(tmp_path / "three", PlainBackend(), config={"optim": {"lr": 0.002}, "more": 1})
    three = opened.save(5, model, SGD(model.parameters()), (0, 0))
    assert main(["diff", str(one), str(three)]) == 1
    rows = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert ["gate", "only in A"] in rows
    assert ["0.weight", "float32 [7, 5] -> float32 [8, 5]"] in rows
    assert ["config: optim.lr", "0.001 -> 0.002"] in rows
    assert ["config: more", "None -> 1"] in rows


def test_export_is_the_command_for_scripts(tmp_path: Path) -> None:
    path = save_once(tmp_path / "checkpoints")
    ours, its = tmp_path / "ours.safetensors", tmp_path / "its.safetensors"
    assert pf.export(tmp_path, ours, "safetensors") == path
    assert main(["export", str(tmp_path), str(its), "--format", "safetensors"]) == 0
    assert ours.read_bytes() == its.read_bytes()
    for target, settings, message in (
        (ours, {"format": "safetensors"}, "already exists"),
        (tmp_path / "x", {"format": "torch"}, "format='torch': expected one of huggingface, dcp, safetensors, peft"),
        (tmp_path / "x", {"format": "dcp", "dtype": "int8"}, "dtype='int8': expected one of float32"),
        (tmp_path / "x", {"format": "dcp", "tokenizer": "bytes"}, "tokenizer bytes: expected"),
        (tmp_path / "x", {}, "names no model of transformers .*\n.*safetensors, or dcp"),
    ):
        with pytest.raises(CheckpointError, match=message):
            pf.export(path, target, **settings)


NO_CHECKPOINT = ".: no checkpoint; name a checkpoint (step-00000500) or a run's folder with one"
MISTAKES = {
    "import none run": "import none: no such file or folder",
    "import file run": "unknown format; expected one of huggingface, dcp",
    **dict.fromkeys(("list .", "show .", "verify .", "export . out", "diff . ."), NO_CHECKPOINT),
    "import file run --format torch": "not a file of torch.save",
    "import file run --format gguf": "not a readable GGUF file",
    "import . run --format dcp": "torch.distributed.checkpoint: it has no .metadata",
    "import . run --format huggingface": "no such file",
    "import s3://bucket/hub run": "expected a local path, found a URL",
    "export . s3://bucket/hub": "expected a local path, found a URL",
    f"list {'n' * 300}": "File name too long",
    "list loop": "symbolic links",
    "list http://localhost:1/x": "can't access http://localhost:1/x: ",
    "export . x --dtype int8": "--dtype",
    "destroy": "destroy",
}


def test_mistakes_end_with_2_and_one_sentence(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("text")
    Path("loop").symlink_to("loop")
    for command, message in MISTAKES.items():
        try:
            code: object = main(command.split())
        except SystemExit as ended:  # of argparse
            code = ended.code
        printed = capsys.readouterr().err
        assert code == 2, (command, printed)
        assert message in printed, command
        assert sorted(os.listdir()) == ["file", "loop"], command


def test_list_and_show_do_without_torch_and_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    save_once(tmp_path / "checkpoints")
    program = (
        "import signal, os, sys\nfrom portable_fsdp.checkpoint import __main__ as command\n"
        f"assert [command.main([name, {str(tmp_path)!r}]) for name in ('list', 'show')] == [0, 0]\n"
        "assert 'torch' not in sys.modules\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background job ignores it
        "command.manifests.checkpoints_below = lambda _: os.kill(os.getpid(), signal.SIGINT)\n"
        f"sys.exit(command.main(['list', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    save_once(tmp_path / "checkpoints")
    line = f"{sys.executable} -m portable_fsdp.checkpoint list {tmp_path} | head -0; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("kind", ["huggingface", "dcp", "safetensors"])
def test_an_export_without_room_ends_with_2(tmp_path: Path, capsys: Capture, kind: str) -> None:
    save(tmp_path / "run", build(MODELS["llama"]), config={})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        code = main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", kind])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    printed = capsys.readouterr().err
    assert re.search(r"^export to .*/out: can't be written: .*(too large|failed|error)", printed, re.MULTILINE), printed
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_an_export_takes_a_tokenizer_along(tmp_path: Path, capsys: Capture, caplog: Log) -> None:
    model = build(MODELS["gpt2"])
    run = str(save(tmp_path / "run", model, config={"data": {"tokenizer": "bytes"}}))
    assert main(["export", run, str(tmp_path / "own")]) == 0
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "own")) is type(model)
    gone = str(save(tmp_path / "gone", model, config={"data": {"tokenizer": str(tmp_path / "none")}}))
    assert main(["export", gone, str(tmp_path / "out")]) == 2
    assert "--tokenizer none to export without one" in capsys.readouterr().err
    assert main(["export", gone, str(tmp_path / "out"), "--tokenizer", "none"]) == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()
    assert main(["export", gone, str(tmp_path / "bytes"), "--tokenizer", "bytes"]) == 0
    assert main(["export", gone, str(tmp_path / "other"), "--tokenizer", str(tmp_path / "bytes")]) == 0
    for folder in ("own", "other"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder)("a").input_ids == [97]
    assert main(["export", gone, str(tmp_path / "x"), "--format", "safetensors", "--tokenizer", "bytes"]) == 2
    assert "expected --format huggingface or peft, found safetensors" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "own"), str(tmp_path / "imported")]) == 0
    assert main(["export", str(tmp_path / "imported"), str(tmp_path / "again")]) == 0
    assert "exporting without a tokenizer" in caplog.text


def test_a_step_that_retention_deletes_is_not_damaged(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    older = save_once(tmp_path / "checkpoints", step=5)
    newest = save_once(tmp_path / "checkpoints", step=10)

    verify = Reader.verify

    def delete_older(reader: Reader, **arguments: Any) -> None:
        if older.exists():
            commit.delete(older, "")
        verify(reader, **arguments)

    monkeypatch.setattr("portable_fsdp.checkpoint.store.Reader.verify", delete_older)
    assert main(["verify", "--all", str(tmp_path)]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{newest}: whole")
    monkeypatch.setattr("portable_fsdp.checkpoint.__main__.checkpoints_in", lambda _: [older])
    assert main(["verify", "--all", str(tmp_path)]) == 2
    assert ": deleted meanwhile" in capsys.readouterr().err
    assert listing([older]) == []
