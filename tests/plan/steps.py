"""Train steps to plan, and to run: small, but large enough that tens of MB are their tensors."""

from dataclasses import replace
from typing import Any

import torch

from portable_fsdp.config.schema import Config
from portable_fsdp.plan.cuda import plan_memory
from portable_fsdp.plan.result import DeviceMemory, Work
from portable_fsdp.plan.target import Target, parse_target

ROWS, SEQ_LEN = 2, 256
LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408},
    **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024},
}
MIXTRAL: dict[str, Any] = {
    **LLAMA,
    **{"model_type": "mixtral", "intermediate_size": 512, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def step(devices: int = 2, accumulation: int = 1, model: dict[str, Any] = LLAMA, **settings: Any) -> Config:
    """A config; settings by their keys, with `__` for the dot: `memory__cpu_offload=True`."""
    values: dict[str, dict[str, Any]] = {
        "model": {"architecture": model},
        "data": {"seq_len": SEQ_LEN},
        "train": {"steps": 10, "global_batch": devices * ROWS * accumulation, "micro_batch": ROWS},
    }
    for key, value in settings.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})[name] = value
    return Config.model_validate(values)


def gpus(devices: int, hosts: int = 1) -> Target:
    """H100s, as many on each host."""
    return replace(parse_target("h100"), devices=devices, hosts=hosts)


def plans(configs: list[Config], target: Target) -> list[tuple[DeviceMemory, Work]]:
    """For a child: a plan of each config."""
    torch.set_num_threads(1)
    made = [plan_memory(config, target) for config in configs]
    return [(plan.memory, plan.work) for plan in made]
