"""A run that surely doesn't fit is refused before its first weight; what the line says is what rests there."""

import logging
from typing import Any

import pytest
import torch
from test_step import ARCHITECTURE, SEQ_LEN, VOCABULARY

from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import mesh_axes
from portable_fsdp.models.build import build_model
from portable_fsdp.optim.optimizer import make_optimizer
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.train.build import build_training
from portable_fsdp.train.memory_need import MemoryNeed, Room, check_memory, memory_need

GIB = 2**30
NEED = MemoryNeed(parameters=2**30, trained=2**30, weights=4 * GIB, gradients=4 * GIB, optimizer=8 * GIB)
HUGE = {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 65536, "intermediate_size": 262144} | {
    "num_hidden_layers": 32,
    "num_attention_heads": 64,
}


def config(**sections: Any) -> Config:
    base = {"model": {"architecture": ARCHITECTURE}, "data": {"seq_len": SEQ_LEN}, "train": {"steps": 1}}
    return Config.model_validate(base | sections)


def on_hosts(processes: list[int], host_gib: float, device_gib: float | None = None) -> list[Room]:
    """So many processes on each host; of each host and device so much memory."""
    device, hosts = None if device_gib is None else int(device_gib * GIB), enumerate(processes)
    return [((f"host {host}", ""), int(host_gib * GIB), device) for host, count in hosts for _ in range(count)]


NO_SHARD, OFFLOAD = {"sharding": {"strategy": "NO_SHARD"}}, {"memory": {"cpu_offload": True}}
GPUS = [*on_hosts([3], 64, 8), *on_hosts([1], 64, 4)]
# Message with three hundredths less -> sections, rooms with just enough, devices, and whether it rests on the host.
CASES: dict[str, tuple[dict[str, Any], list[Room], int, bool]] = {
    r"16\.0 GiB on a host,.* has 15\.5 GiB": ({}, on_hosts([2], 16), 2, True),
    r"12\.0 GiB on a host": ({}, on_hosts([1, 3], 12), 4, True),
    r"64\.0 GiB .*\n.*, 4 times": (NO_SHARD, on_hosts([1], 64), 4, True),
    r"4\.0 GiB on a device,.* has 3\.9 GiB": ({}, GPUS, 4, False),  # the smallest GPU
    r"16\.0 GiB on a host,\n": (OFFLOAD, on_hosts([4], 16, 0.1), 4, True),
}


def check(sections: dict[str, Any], rooms: list[Room], devices: int, rests_on_host: bool) -> str:
    axes = mesh_axes(config(**sections), devices, hosts=len({host for (host, _), _, _ in rooms}))
    return check_memory(NEED, rooms, axes, rests_on_host=rests_on_host)


@pytest.mark.parametrize("message", CASES)
def test_what_cannot_fit_is_refused(message: str) -> None:
    sections, rooms, devices, on_host = CASES[message]
    line = check(sections, rooms, devices, on_host)
    assert line.startswith("1,073,741,824 parameters: weights 4.0 GiB, gradients 4.0 GiB, optimizer state 8.0 GiB")
    less = [(host, size * 97 // 100, limit and limit * 97 // 100) for host, size, limit in rooms]
    with pytest.raises(ConfigError, match=rf"(?s)1,073,741,824 parameters need at least {message}"):
        check(sections, less, devices, on_host)


def test_the_line_says_where_it_rests() -> None:
    """Containers of one machine have limits of their own."""
    containers: list[Room] = [(("machine", f"container {index}"), 4 * GIB, None) for index in range(4)]
    assert check({}, containers, 4, True).endswith("at least 4.0 GiB of 4.0 GiB on a host")
    for limit, of in ((80, " of 80.0 GiB"), (None, "")):  # a device may not tell
        assert check({}, on_hosts([4], 64, limit), 4, False).endswith(f"at least 4.0 GiB{of} on a device")


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"optim": {"name": "sgd"}},
        {"precision": {"master": "bfloat16", "compute": "bfloat16"}},
        {"model": {"architecture": ARCHITECTURE, "freeze": ["model.embed_tokens"]}},
        {"model": {"architecture": ARCHITECTURE, "lora": {"r": 4}}, "precision": {"frozen": "bfloat16"}},
    ],
    ids=["adamw", "sgd", "bfloat16", "frozen", "lora"],
)
def test_the_bytes_are_those_that_rest(sections: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """On an engine, after it has made all of them: the bound is exact for one device."""
    settings = config(**sections)
    with open_backend(settings, device="cpu", backend="native") as backend, caplog.at_level(logging.INFO):
        training = build_training(settings, backend, VOCABULARY)
        model = build_model(settings.model, settings.precision, seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY).model
        groups = [{"params": [fqn for fqn, weight in model.named_parameters() if weight.requires_grad]}]
        need = memory_need(model, make_optimizer(settings.optim), groups, eager=True, tables={})
        weights = list(training.model.parameters())
        trained = [weight for weight in weights if weight.requires_grad]
        states = [value for state in training.optimizer.state.values() for value in state.values()]
        assert need.weights == sum(weight.nbytes for weight in weights)
        assert need.gradients == sum(weight.nbytes for weight in trained)
        assert need.optimizer == sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
    (line,) = [record.getMessage() for record in caplog.records if "parameters" in record.getMessage()]
    assert str(need) in line


def test_a_model_of_trillions_is_refused_before_its_first_weight() -> None:
    """In seconds: it is built on meta alone."""
    settings = config(model={"architecture": HUGE})
    with (
        open_backend(settings, device="cpu", backend="native") as backend,
        pytest.raises(ConfigError, match=r"(?s)2,199,.* parameters need at least .*weights .*Use more devices"),
    ):
        build_training(settings, backend, VOCABULARY)
