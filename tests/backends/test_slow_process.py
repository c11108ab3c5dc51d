"""A process that the others wait for is named, by the time that it spends alone: whole runs of three processes."""

import socket
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from workers import GetWorkers, Group

from portable_fsdp.config.schema import Config
from portable_fsdp.observe.run_files import read_jsonl

THREE = Group("native", 3)
MODEL = {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64} | {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def train_with_a_slow_process(config: Config, slow: int | None, place: str, seconds: float) -> None:
    """A whole run. Process `slow` sleeps in each step: in its layers' forward, or as it waits for rows."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    from portable_fsdp.data.batches import Batches
    from portable_fsdp.train.loop import train

    def sleep(module: Any, _: Any) -> None:
        if place == "forward" and type(module).__name__ == "LlamaMLP" and dist.get_rank() == slow:
            time.sleep(seconds)

    def late(batches: Batches) -> Any:
        time.sleep(seconds)
        return following(batches)

    following, hook = Batches.__next__, register_module_forward_pre_hook(sleep)
    is_late = place == "rows" and dist.get_rank() == slow
    try:
        with patch.object(Batches, "__next__", late) if is_late else nullcontext():
            assert train(config, device="cpu", backend="native") == 0
    finally:
        hook.remove()


@pytest.mark.parametrize(("slow", "place"), [(2, "forward"), (0, "rows"), (None, "nowhere")])
def test_a_slow_process_is_named_once_within_10_steps(
    slow: int | None, place: str, workers: GetWorkers, tmp_path: Path
) -> None:
    config = Config.model_validate(
        {
            "run": {"dir": str(tmp_path / "run")},
            "model": {"architecture": MODEL},
            "data": {"source": "python_docs", "seq_len": 32},
            "train": {"steps": 12, "global_batch": 3, "log_every": 6},
            "optim": {"warmup_steps": 1},
        }
    )
    workers(THREE).run(train_with_a_slow_process, config=config, slow=slow, place=place, seconds=0.1)
    named = [event for event in read_jsonl(tmp_path / "run/events.jsonl") if event["event"] == "straggler"]
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    loads = rows[-1]["processes"]
    assert rows[0]["imbalance"] is None  # no step had ended
    if slow is None:
        assert named == []
        return
    (event,) = named
    assert (event["process"], event["host"], event["slow"]) == (slow, socket.gethostname(), 9)
    assert event["step"] <= 10
    assert event["ratio"] > 2
    assert loads["own_seconds"][slow] == max(loads["own_seconds"]) >= 0.1
    assert rows[-1]["imbalance"] == pytest.approx(max(loads["own_seconds"]) / sorted(loads["own_seconds"])[1])
    assert (loads["data_seconds"][slow] > 0.1) == (place == "rows")
    assert loads["seconds_imbalance"] < 1.5  # wall time tells nothing
