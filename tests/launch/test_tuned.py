"""`launch --tuned`: settings that `tune` measured, where its record holds."""

from pathlib import Path
from typing import Any

import pytest
from cli import events, launch, tiny_config

from portable_fsdp.config.tuning import Tuning, speed_settings, tuning_file
from portable_fsdp.convert.read import load_config
from portable_fsdp.observe.run_files import versions

VERSIONS = versions()
CHOSEN = {"train.micro_batch": "2", "memory.gradient_checkpointing": "full"}


@pytest.mark.parametrize(
    ("change", "overrides", "reason"),
    [
        ({}, ["optim.lr=0.001"], ""),  # it doesn't decide how fast a step is
        ({"device_name": "NVIDIA H100 80GB HBM3", "devices": 8}, [], "measured on 8 x NVIDIA H100 80GB HBM3, backend"),
        ({"versions": {**VERSIONS, "torch": "2.0"}}, [], f"torch was 2.0, is {VERSIONS['torch']}"),
        ({}, ["train.global_batch=8"], "the config now has train.global_batch=8"),
    ],
)
@pytest.mark.slow
def test_a_run_uses_a_record_of_its_config_devices_and_versions(
    change: dict[str, Any], overrides: list[str], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny_config(tmp_path)
    record = {"config": str(path), "base": speed_settings(load_config(path)), "engine": "native"}
    record |= {"device_name": "cpu", "devices": 1, "versions": VERSIONS, "candidates": [], "chosen": CHOSEN, **change}
    tuning_file(path).write_text(Tuning.model_validate(record).model_dump_json())
    words = [
        f"--config={path}",
        "--tuned",
        "--device=cpu",
        f"run.dir={tmp_path / 'run'}",
        "train.stop_at=1",
        *overrides,
    ]
    assert launch(*words) == 0
    error = capfd.readouterr().err
    assert (f"is not used: {reason}" in error) == bool(reason)
    assert events(tmp_path / "run", "start")[-1].get("chosen", {}) == ({} if reason else CHOSEN)


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ({"optim.lr": "1.0"}, "not a record of tune: tune doesn't change optim.lr"),
        ({"foo": "2"}, "not a record of tune: tune doesn't change foo"),
        ({"train.micro_batch": "many"}, "at train.micro_batch"),
        ({"train.micro_batch": "[: {"}, "chosen: "),
    ],
)
@pytest.mark.slow
def test_a_record_that_was_edited_is_refused(
    chosen: dict[str, str], reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny_config(tmp_path)
    record = {"config": str(path), "base": speed_settings(load_config(path)), "engine": "native", "device_name": "cpu"}
    record |= {"devices": 1, "versions": VERSIONS, "candidates": [], "chosen": chosen}
    tuning_file(path).write_text(Tuning.model_validate(record).model_dump_json())
    assert launch(f"--config={path}", "--tuned", "--device=cpu", f"run.dir={tmp_path / 'run'}") == 2
    assert reason in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_a_record_nothing_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tiny_config(tmp_path)
    assert launch(f"--config={path}", "--tuned") == 2
    assert f"{tuning_file(path)}: not a record of tune: No such file or directory" in capfd.readouterr().err
    tuning_file(path).write_text("{}")
    assert launch(f"--config={path}", "--tuned") == 2
    assert "not a record of tune: Field required at config" in capfd.readouterr().err
