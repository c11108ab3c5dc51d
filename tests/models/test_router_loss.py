"""The router loss and its gradient against transformers' own function of all layers."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from small_models import ARCHITECTURES
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from portable_fsdp.attach import load_of
from portable_fsdp.models.routers import Routers, balanced_routers
from portable_fsdp.runtime.errors import ConfigError


def small(coefficient: float) -> Any:
    architecture: dict[str, Any] = dict(ARCHITECTURES["mixtral"]) | {"router_aux_loss_coef": coefficient}
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture.pop("model_type"), **architecture))


def test_the_loss_and_its_gradient_are_those_of_transformers() -> None:
    ids = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(1))
    plain, ours = small(0.3), small(0.3)
    out = plain(input_ids=ids, output_router_logits=True, use_cache=False)
    expected: Any = 0.3 * load_balancing_loss_func(out.router_logits, plain.num_experts, plain.num_experts_per_tok)
    (out.logits.square().mean() + expected).backward()

    routers = Routers(ours, None, 0.0, has_loss=True, drops=False)
    routers.open(torch.device("cpu"))
    score = ours(input_ids=ids, use_cache=False).logits.square().mean()
    taken = routers.take(same)
    routers.prepare_backward(taken["balance"], 1.0)
    score.backward()
    torch.testing.assert_close(routers.loss(taken["balance"]), expected.detach())
    assert gradients(plain).keys() == gradients(ours).keys()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(ours)[name], gradient, rtol=1e-4, atol=1e-7)


def test_a_backward_without_counts_is_refused() -> None:
    model = small(0.3)
    Routers(model, None, 0.0, has_loss=True, drops=False)
    loss = model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False).logits.sum()
    with pytest.raises(RuntimeError, match="use train_step"):
        loss.backward()


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_class_without_that_loss_is_refused_by_name(name: str) -> None:
    architecture = dict(ARCHITECTURES[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture.pop("model_type"), **architecture))
    with pytest.raises(ConfigError, match=f"{type(model).__name__} computes no router loss"):
        balanced_routers(model)


class Experts(nn.Module):
    """What `expert_modules` finds."""

    is_transposed = False

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count

    def _apply_gate(self, hidden: Tensor) -> Tensor:
        return hidden


def test_layers_with_different_numbers_of_experts_have_a_largest_load_but_no_shares_of_experts() -> None:
    model = nn.ModuleList([Experts(4), Experts(2)])
    routers = Routers(model, None, 0.0, has_loss=False, drops=True)
    routers.open(torch.device("cpu"))
    for layer, load in zip(model, ([1.0, 2, 3, 4, 0], [9.0, 1, 2]), strict=True):
        cast(Tensor, load_of(layer)).copy_(torch.tensor(load))
    metrics = routers.finish_step(routers.take(same), torch.tensor(False), same)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {"expert_load_max": 9 / 5, "experts_dropped": 2 / 20}
    )


def test_a_model_without_experts_has_no_loads() -> None:
    routers = Routers(nn.Linear(2, 2), None, 0.0, has_loss=False, drops=False)
    sums = routers.take(same)
    assert (routers.zeros(), sums, routers.finish_step(sums, torch.tensor(False), same)) == ({}, {}, {})


def same(tensor: Tensor, axes: Sequence[str]) -> Tensor:
    return tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: cast(Tensor, weight.grad) for name, weight in model.named_parameters()}
