"""Each family of models trains as transformers' own does; families that can't be trained are refused by name."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import ARCHITECTURES, VOCABULARY, build, families, logits, materialise, shake, stock_model, token_ids
from torch import Tensor, nn
from torch.nn import functional as F

from portable_fsdp.models.attention import STATIC
from portable_fsdp.runtime.errors import ConfigError

STEPS = 4
# Options that transformers' own sdpa lacks: softcap, sinks, ALiBi; mamba2 attends to nothing.
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


@pytest.mark.slow
@pytest.mark.parametrize("name", families())
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


PAGE = (Path(__file__).parents[2] / "docs/features.md").read_text()
REASONS = {
    model_type: reason
    for cells, reason in re.findall(r"^\| (`[\w`, -]+`) \| refused: `(.+?)` \|", PAGE, re.MULTILINE)
    for model_type in re.findall(r"`([\w-]+)`", cells)
}
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED: dict[str, dict[str, Any]] = {
    "bert": _SIZES | {"intermediate_size": 80},
    "t5": {},
    "jetmoe": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2}
    | {"kv_channels": 8, "intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
    "longcat_flash": {"vocab_size": VOCABULARY, "hidden_size": 48, "num_attention_heads": 4}
    | {"n_routed_experts": 4, "num_layers": 1, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 20},
    "openai-gpt": {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4},
    "rwkv": {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "context_length": 64},
    "apertus": _SIZES | {"num_key_value_heads": 2, "intermediate_size": 80},
    "falcon_h1": _SIZES | {"num_key_value_heads": 2, "intermediate_size": 80},
    "blt": {"vocab_size": VOCABULARY},
}


def test_the_page_lists_refused_families() -> None:
    assert REASONS.keys() == REFUSED.keys()


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_that_cannot_be_trained_is_refused(model_type: str) -> None:
    with pytest.raises(ConfigError) as error:
        materialise(build({"model_type": model_type, **REFUSED[model_type]}))
    assert REASONS[model_type] in str(error.value)
