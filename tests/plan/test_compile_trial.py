"""Whether layers compile, as a plan finds out on meta before `compile.enabled=auto` is on."""

from typing import Any

import pytest
from cases import ARCHITECTURES
from steps import step_of_rows

from portable_fsdp.config.load import make_config
from portable_fsdp.config.schema import Config
from portable_fsdp.plan.compile_trial import count_programs
from portable_fsdp.runtime.child import Worker

pytestmark = pytest.mark.slow


def of_family(name: str, memory: dict[str, Any] | None = None, **more: Any) -> Config:
    model = {"architecture": ARCHITECTURES[name] | more.pop("architecture", {})}
    return make_config(model=model | more, compile={"enabled": "auto"}, data={"seq_len": 32}, memory=memory or {})


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        (of_family("llama"), 1),
        (of_family("gpt2", dropout=0.1), 1),
        (of_family("llama", memory={"gradient_checkpointing": "full", "offload": "activations"}), 1),
        (of_family("llama", memory={"gradient_checkpointing": "selective", "save_ops": ["matmul"]}), 1),
        (of_family("llama", memory={"gradient_checkpointing": "budget", "budget": 0.3}), 1),
        (of_family("gemma2"), 2),  # layers with and without a window
        (step_of_rows("images", "image_classification", {"factory": "planned_rows:model"}), 1),
        (
            step_of_rows("images", "image_classification", {"factory": "planned_rows:looking"}),
            r"Data-dependent branching (planned_rows.py:46)",
        ),
        (of_family("qwen3_moe", architecture={"output_router_logits": True}), "output_router_logits=true"),
    ],
    ids=["llama", "gpt2", "offload", "chosen products", "budget", "gemma2", "own", "own, that reads", "router loss"],
)
def test_layers_that_compile_are_counted_and_others_say_why(config: Config, answer: int | str, worker: Worker) -> None:
    result = worker(count_programs, config)
    assert result == answer if isinstance(answer, int) else answer in result, result
