"""Rows of experts: their places in the buffers that devices of the axis `expert` exchange, and their products."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.attach import set_expert_groups
from portable_fsdp.models import experts


@pytest.mark.parametrize("capacity", [None, 1.0, 0.5])
@pytest.mark.parametrize(("divisions", "held"), [(2, 2), (4, 4), (1, 4)])
def test_each_choice_has_a_place_among_its_experts_and_the_largest_lose_first(
    divisions: int, held: int, capacity: float | None
) -> None:
    generator, tokens, top_k = torch.Generator().manual_seed(0), 64, 2
    weights = torch.rand(tokens, divisions * held, generator=generator) * torch.arange(1, divisions * held + 1)
    chosen = weights.topk(top_k).indices.flatten().int()
    choices, room = tokens * top_k, tokens * min(top_k, held)
    if capacity is not None:
        room = int(choices / divisions * capacity)
    places = experts._places(divisions, held, room, capacity is not None, chosen)  # pyright: ignore[reportPrivateUsage]
    slot, choice, ends, dropped = places
    for device in range(divisions):
        for place in range(room):
            own = int(choice[device * room + place])
            if own < choices:
                expert = int(chosen[own])
                start = int(ends[device, expert % held - 1]) if expert % held else 0
                assert slot[own] == device * room + place
                assert expert // held == device
                assert start <= place < ends[device, expert % held]
    is_kept = slot < divisions * room
    assert int((choice < choices).sum()) == int(is_kept.sum()) == choices - int(dropped)
    sizes, kept = (torch.bincount(ids.long(), minlength=divisions * held) for ids in (chosen, chosen[is_kept]))
    assert capacity is not None or torch.equal(sizes, kept)
    for of_all, left in zip(sizes.view(divisions, held), kept.view(divisions, held), strict=True):
        assert int(left.sum()) == min(int(of_all.sum()), room)
        lost = left < of_all
        assert not lost.any() or left[lost].min() >= left.max() - 1


class Devices:
    """`experts.Groups` of several devices in one process, with the products of the native engine."""

    multiple, capacity = 1, None

    def __init__(self, divisions: int, module: Any) -> None:
        self.devices = self.divisions = divisions
        pairs = [(name, weight.chunk(divisions)) for name, weight in module.named_parameters()]
        layout = {name: getattr(module, name) for name in ("is_transposed", "has_bias")}
        self._parts = [SimpleNamespace(**layout, **{n: parts[i] for n, parts in pairs}) for i in range(divisions)]

    def on_each(self, function: Callable[..., list[Tensor]], *tensors: Tensor) -> list[Tensor]:
        with torch.no_grad():
            results = [function(*own) for own in zip(*tensors, strict=True)]
            return [torch.stack(parts) for parts in zip(*results, strict=True)]

    def exchange(self, buffer: Tensor) -> Tensor:
        return buffer.transpose(0, 1)

    def linear(self, module: Any, sizes: Tensor, active: int, rows: Tensor, name: str) -> Tensor:
        del module, active
        ends = sizes.cumsum(dim=1, dtype=torch.int32)
        each = zip(self._parts, ends, rows, strict=True)
        return torch.stack([experts.grouped_linear(part, own_ends, own, name) for part, own_ends, own in each])


class Products(TorchDispatchMode):
    """Count the multiplications of matrix products; grouped ones compute the rows up to their last offset."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm"):
            left, right, *ends = args[1:] if "add" in name else args
            if name == "_grouped_mm":  # a gradient of weights sums over the rows
                others = left.shape[0] if right.dim() == 2 else left.shape[1]
                self.count += int(ends[0][-1]) * others * right.shape[-1]
            else:
                self.count += out.numel() * left.shape[-1]
        return out


HIDDEN, INNER, TOKENS = 16, 8, 512
SPARSE = {
    "Mixtral-8x7B": {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen3-30B-A3B": {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8},
}
"""Numbers of experts as published, at a small width."""


@pytest.mark.parametrize("divisions", [1, 2, 4])
@pytest.mark.parametrize("name", SPARSE)
def test_only_chosen_rows_are_multiplied(name: str, divisions: int) -> None:
    """Forward and backward, at most 1.1 times the products of the active rows; and with the dense formula's values."""
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    architecture: dict[str, Any] = SPARSE[name] | sizes | {"intermediate_size": INNER, "moe_intermediate_size": INNER}
    experts.register_experts()
    torch.manual_seed(3)
    config = AutoConfig.for_model(architecture.pop("model_type"), vocab_size=32, **architecture)
    model = AutoModelForCausalLM.from_config(config)
    experts.choose_experts(model, "auto", 4, eager=True)
    block = cast(Any, model).model.layers[0].mlp
    hidden = torch.randn(TOKENS, HIDDEN)
    _, weights, chosen = block.gate(hidden * torch.arange(HIDDEN))  # an uneven load
    weights = weights.detach()

    own, expected = (hidden.clone().requires_grad_() for _ in range(2))
    dense = experts.dense_experts(block.experts, expected, chosen, weights)
    dense.sum().backward()
    if divisions > 1:
        set_expert_groups(block, ["experts"], Devices(divisions, block.experts))
    with Products() as products:
        out = block.experts(own, chosen, weights)
        out.sum().backward()
    torch.testing.assert_close(out, dense)
    torch.testing.assert_close(own.grad, expected.grad)
    active = TOKENS * config.num_experts_per_tok * 3 * HIDDEN * INNER  # gate, up and down
    assert active * 3 <= products.count <= active * 3 * 1.1  # forward, and backward twice
