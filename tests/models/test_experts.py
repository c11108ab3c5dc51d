"""The dense experts give what transformers' own loop over experts gives, in static shapes."""

from typing import Any

import pytest
import torch
from small_models import ARCHITECTURES, SEQ_LEN, VOCABULARY, build, logits, materialise, shake, token_ids
from torch.utils._python_dispatch import TorchDispatchMode

from portable_fsdp.config.schema import Model, Precision
from portable_fsdp.models.build import build_model
from portable_fsdp.runtime.errors import ConfigError

pytestmark = pytest.mark.slow

EXPERTS = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"]


def build_with(name: str, experts: str, precision: Precision | None = None, **changes: Any) -> Any:
    section = Model.model_validate({"architecture": ARCHITECTURES[name] | changes, "experts": experts})
    built = build_model(section, precision, seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY)
    model = materialise(built)
    shake(model)
    return model


def loss_and_gradients(model: Any) -> dict[str, torch.Tensor]:
    ids = token_ids(4)
    total, count = model(ids, ids)
    (total / count).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": (total / count).detach()} | grads


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("experts", ["auto", "dense", "batched_mm", "grouped_mm"])
def test_every_implementation_gives_what_the_loop_gives(name: str, experts: str) -> None:
    found = build_with(name, experts)
    implementation = {"auto": "portable_fsdp_dense", "dense": "portable_fsdp_dense"}.get(experts, experts)
    assert found.config._experts_implementation == implementation
    loop = build_with(name, "auto")
    loop.set_experts_implementation("eager")
    expected = loss_and_gradients(loop)
    answers = loss_and_gradients(found)
    assert any("experts" in fqn for fqn in expected)
    assert answers.keys() == expected.keys()
    for fqn, tensor in expected.items():
        torch.testing.assert_close(answers[fqn], tensor, rtol=1e-4, atol=1e-6, msg=lambda text, n=fqn: f"{n}: {text}")


@pytest.mark.parametrize("name", EXPERTS)
def test_nothing_depends_on_the_routing(name: str) -> None:
    """The same operators on the same shapes whatever the tokens are, and none that asks the host."""

    class Operators(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, list[Any]]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append((str(func), [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]))
            return func(*args, **(kwargs or {}))

    model = build_with(name, "dense")
    runs: list[list[tuple[str, list[Any]]]] = []
    for ids in (token_ids(), torch.zeros_like(token_ids())):
        with Operators() as operators:
            logits(model, ids)
        runs.append(operators.seen)
    assert runs[0] == runs[1]
    assert not {name for name, _ in runs[0] if "_local_scalar_dense" in name or "nonzero" in name}


@pytest.mark.parametrize("experts", ["dense", "batched_mm", "grouped_mm"])
def test_experts_of_a_dense_model_are_refused(experts: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.experts: expected auto, found {experts}: LlamaForCausalLM has no"):
        build_with("llama", experts)


def test_rows_that_the_grouped_product_cannot_take_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"experts=grouped_mm: .*16 bytes, found model\.layers\.0\.mlp\.experts\..*\["
    ):
        build_with("qwen3_moe", "grouped_mm", moe_intermediate_size=18)
    with pytest.raises(ConfigError, match=r"in numbers of 2 bytes"):
        build_with("qwen3_moe", "grouped_mm", Precision(compute="bfloat16"))  # 20 numbers: 40 bytes


JETMOE: dict[str, Any] = {
    "model_type": "jetmoe",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
} | {
    "num_key_value_heads": 2,
    "kv_channels": 8,
    "intermediate_size": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def test_experts_that_ask_the_host_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"JetMoe.*expected experts that run in static shapes, found model\.layers"):
        build_model(Model(architecture=JETMOE), seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY)


def test_an_auxiliary_loss_is_refused_and_not_dropped() -> None:
    with pytest.raises(ConfigError, match=r"output_router_logits=false, found true.*auxiliary loss"):
        build("mixtral", output_router_logits=True)
