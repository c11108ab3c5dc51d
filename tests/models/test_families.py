"""Each family of models trains as transformers' own does: its attention, its experts, its initial buffers."""

from typing import Any

import pytest
import torch
from small_models import ARCHITECTURES, build, logits, materialise, shake, stock_model, token_ids
from torch import Tensor, nn
from torch.nn import functional as F

from portable_fsdp.models.attention import STATIC

pytestmark = pytest.mark.slow

STEPS = 4
# What transformers' own sdpa doesn't do: softcap, sinks, ALiBi; mamba2 attends to nothing.
EAGER = {"gemma2", "gpt_oss", "bloom", "mamba2"}


def curve(model: nn.Module, loss: Any) -> list[float]:
    """Losses of a few steps of AdamW, each on rows of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for step in range(STEPS):
        ids = token_ids(4).roll(step, dims=1)
        value: Tensor = loss(ids)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_trains_as_transformers_own(name: str) -> None:
    ours = materialise(build(name))
    shake(ours)
    assert ours.config._attn_implementation == ("sdpa" if "falcon" in name else "eager" if name == "bloom" else STATIC)
    stock = stock_model(ARCHITECTURES[name], "eager" if name in EAGER else "sdpa")
    stock.load_state_dict(ours.state_dict())
    for module in stock.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):  # OPT's layers call the function
            module.dropout = 0.0
    stock.train()

    def our_loss(ids: Tensor) -> Tensor:
        total, count = ours(ids, ids)
        return total / count

    def stock_loss(ids: Tensor) -> Tensor:
        return F.cross_entropy(logits(stock, ids).flatten(0, 1), ids.flatten())

    expected = curve(stock, stock_loss)
    assert expected[-1] != pytest.approx(expected[0], rel=1e-3), "it learnt nothing: the curve would show no fault"
    assert curve(ours, our_loss) == pytest.approx(expected, rel=2e-6)
