"""The dense experts give what transformers' own loop over experts gives, in static shapes."""

from typing import Any

import pytest
import torch
from small_models import Operators, build, families, logits, materialise, shake, token_ids

from portable_fsdp.runtime.errors import ConfigError

pytestmark = pytest.mark.slow

EXPERTS = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"]


def build_with(name: str, experts: str, precision: dict[str, Any] | None = None, **changes: Any) -> Any:
    model = materialise(build(name, precision=precision, keys={"experts": experts}, **changes))
    shake(model)
    return model


def loss_and_gradients(model: Any) -> dict[str, torch.Tensor]:
    ids = token_ids(4)
    total, count = model(ids, ids)
    (total / count).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": (total / count).detach()} | grads


@pytest.mark.parametrize("name", families(EXPERTS))
def test_every_implementation_gives_what_the_loop_gives(name: str) -> None:
    loop = build_with(name, "auto")
    loop.set_experts_implementation("eager")
    expected = loss_and_gradients(loop)
    assert any("experts" in fqn for fqn in expected)
    for experts in ("auto", "dense", "batched_mm", "grouped_mm"):
        model = build_with(name, experts)
        implementation = "portable_fsdp_dense" if experts in ("auto", "dense") else experts
        assert model.config._experts_implementation == implementation
        tensors = loss_and_gradients(model)
        assert tensors.keys() == expected.keys()
        for fqn, tensor in expected.items():
            torch.testing.assert_close(
                tensors[fqn],
                tensor,
                rtol=1e-4,
                atol=1e-6,
                msg=lambda text, where=f"{experts} {fqn}": f"{where}: {text}",
            )


@pytest.mark.parametrize("name", families(EXPERTS))
def test_nothing_depends_on_the_routing(name: str) -> None:
    """The same operators on the same shapes whatever the tokens are, and none that asks the host."""

    model = build_with(name, "dense")
    runs: list[list[Any]] = []
    for ids in (token_ids(), torch.zeros_like(token_ids())):
        with Operators() as operators:
            logits(model, ids)
        operators.require_no_reads()
        runs.append(operators.calls)
    assert runs[0] == runs[1]


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
        build_with("qwen3_moe", "grouped_mm", {"compute": "bfloat16"})  # 20 numbers: 40 bytes


def test_an_auxiliary_loss_is_refused_and_not_dropped() -> None:
    with pytest.raises(ConfigError, match=r"output_router_logits=false, found true.*auxiliary loss"):
        build("mixtral", output_router_logits=True)
