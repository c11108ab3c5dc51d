"""Inputs of recomputed layers on the host: the same gradients, and nothing else is kept there."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from portable_fsdp.backends.base import ShardPolicy
from portable_fsdp.backends.native.offload import ActivationOffload
from portable_fsdp.backends.native.units import recompute

WIDTH, ROWS = 8, 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.product(hidden)) * mask


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer() for _ in range(4)]


def run(stack: list[nn.Module], hidden: Tensor, mask: Tensor) -> Tensor:
    for layer in stack:
        hidden = layer(hidden, mask)
    return hidden.sum()


def test_gradients_are_those_without_and_only_inputs_of_layers_are_on_the_host() -> None:
    hidden, mask = torch.randn(ROWS, WIDTH, requires_grad=True), torch.ones(ROWS, WIDTH)
    plain = layers()
    run(plain, hidden, mask).backward()
    expected, hidden.grad = hidden.grad, None

    stack, offload = layers(), ActivationOffload(torch.device("cpu"))
    for layer in stack:
        recompute(layer, ShardPolicy(units=()), whole=False)
    offload.wrap(stack)
    for _ in range(2):  # two micro batches
        hidden.grad = None
        run(stack, hidden, mask).backward()
        assert torch.equal(cast(Tensor, hidden.grad), cast(Tensor, expected))
        # Of three layers: the last keeps its input. The second micro batch begins when the first has left the host.
        assert offload.host_bytes == 3 * ROWS * WIDTH * 4
    for one, other in zip(plain, stack, strict=True):
        once, twice = (cast(Tensor, layer.get_parameter("product.weight").grad) for layer in (one, other))
        torch.testing.assert_close(once * 2, twice)
    with torch.no_grad():
        run(stack, hidden, mask)
    assert offload.host_bytes == 3 * ROWS * WIDTH * 4


def test_what_else_is_saved_goes_to_the_hooks_around() -> None:
    """As the casts of weights that lie in place do."""
    stack, offload = layers(), ActivationOffload(torch.device("cpu"))
    offload.wrap(stack)  # not recomputed: each layer saves its weight, tanh and the mask too
    hidden, seen = torch.randn(ROWS, WIDTH, requires_grad=True), list[torch.Size]()

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        run(stack, hidden, torch.ones(ROWS, WIDTH)).backward()
    assert seen.count(torch.Size([WIDTH, WIDTH])) >= 3
    assert hidden.grad is not None
