"""Train steps to plan, and to run: small, but large enough that tens of MB are their tensors."""

from dataclasses import replace
from typing import Any

import torch

from portable_fsdp.config.schema import Config
from portable_fsdp.plan.fake_step import plan_memory
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


VIT: dict[str, Any] = {
    **{"model_type": "vit", "hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4},
    **{"num_attention_heads": 6, "image_size": 64, "patch_size": 8, "num_labels": 10},
}
T5: dict[str, Any] = {
    **{"model_type": "t5", "vocab_size": 4096, "d_model": 384, "d_kv": 64, "d_ff": 1024, "num_heads": 6},
    **{"num_layers": 3, "num_decoder_layers": 3, "decoder_start_token_id": 0, "pad_token_id": 0},
}


def step_of_rows(rows: str, task: str, model: dict[str, Any], micro_batch: int = 32, **settings: Any) -> Config:
    """Make a `step` for two devices, with rows of backends/planned_rows.py; `model`: keys of the section."""
    config = step(train__task=task, train__micro_batch=micro_batch, train__global_batch=2 * micro_batch, **settings)
    values = {**config.model_dump(), "model": model, "data": {"factory": f"planned_rows:{rows}"}}
    return Config.model_validate(values)


def gpus(devices: int, hosts: int = 1) -> Target:
    """Make a target of H100s, equally many on each host."""
    return replace(parse_target("h100"), devices=devices, hosts=hosts)


def plans(configs: list[Config], target: Target) -> list[tuple[DeviceMemory, Work]]:
    """Plan each config; runs in a child process."""
    torch.set_num_threads(1)
    made = [plan_memory(config, target) for config in configs]
    return [(plan.memory, plan.work) for plan in made]
