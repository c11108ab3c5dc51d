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


def of_family(name: str, **more: Any) -> Config:
    model = {"architecture": ARCHITECTURES[name] | more.pop("architecture", {})}
    return make_config(model=model | more, compile={"enabled": "auto"}, data={"seq_len": 32})


def own(name: str) -> Config:
    return step_of_rows("images", "image_classification", {"factory": f"planned_rows:{name}"})


MODELS: dict[str, tuple[Config, int | str]] = {
    "llama": (of_family("llama"), 1),
    "gpt2": (of_family("gpt2", dropout=0.1), 1),
    "gemma2": (of_family("gemma2"), 2),  # layers with and without a window
    "own": (own("model"), 1),
    "own, that reads": (own("looking"), r"Data-dependent branching (planned_rows.py:46)"),
    "router loss": (of_family("qwen3_moe", architecture={"output_router_logits": True}), "output_router_logits=true"),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_compile_are_counted_and_others_say_why(name: str, worker: Worker) -> None:
    config, answer = MODELS[name]
    result = worker(count_programs, config)
    assert result == answer if isinstance(answer, int) else answer in result, result
