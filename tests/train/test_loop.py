"""Small parts of the loop; whole runs are in tests/launch."""

from typing import Any

from portable_fsdp.config.schema import Config
from portable_fsdp.train.loop import _changes


def config(**sections: Any) -> dict[str, Any]:
    given = {"model": {"architecture": {"model_type": "llama"}}, "train": {"steps": 3}} | sections
    return Config.model_validate(given).model_dump(mode="json")


def test_a_resume_names_what_differs_from_the_run_that_saved() -> None:
    assert _changes(config(), config()) == []
    other = config(data={"seq_len": 16}, run={"seed": 5, "dir": "elsewhere"}, train={"steps": 4, "log_every": 1})
    assert _changes(config(), other) == ["data.seq_len: 256, now 16", "run.seed: 0, now 5", "train.steps: 3, now 4"]
