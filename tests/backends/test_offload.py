"""Inputs of recomputed layers on the host: the same gradients, and nothing else is kept there."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.native.offload import ActivationOffload
from portable_fsdp.backends.native.units import recompute
from portable_fsdp.backends.torch_xla.spmd.attention import _Attention, _Options
from portable_fsdp.backends.torch_xla.spmd.scan import _recompute

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


# -------------------------------------------------------------------------------------------- scanned layers on TPUs


def split(layer: Callable[..., Tensor], *inputs: Tensor, offload: bool) -> tuple[list[Tensor], list[list[str]]]:
    """Result and gradients of a scanned layer's forward and backward, and the operations of both.

    XLA's CPU client has no host memory beside the device's. Negations stand for the placements: two cancel out.
    """
    operations: list[list[str]] = []

    def compiler(graph: fx.GraphModule, _: list[Tensor]) -> Any:
        operations.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function" and node.users])
        for node in graph.graph.nodes:
            if ".place_to_" in str(node.target):
                node.target = torch.ops.aten.neg.default
        graph.recompile()
        return make_boxed_func(cast(Any, graph).forward)

    partition = partial(_recompute, products=False, offload=offload)
    out = cast(Any, aot_function)(layer, compiler, partition_fn=partition)(*inputs)
    return [out, *torch.autograd.grad(out.sum(), inputs)], operations


@pytest.mark.xla
def test_a_scanned_layer_gets_its_input_back_from_the_host() -> None:
    hidden, weight = (torch.randn(ROWS, ROWS, requires_grad=True) for _ in range(2))

    def layer(hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden + torch.tanh(hidden @ weight).sin()

    expected = layer(hidden, weight)
    gradients = [expected, *torch.autograd.grad(expected.sum(), (hidden, weight))]
    for offload in (False, True):
        values, (forward, backward) = split(layer, hidden, weight, offload=offload)
        torch.testing.assert_close(values, gradients)
        assert [name for name in forward if "place" in name] == ["xla.place_to_host.default"] * offload
        assert [name for name in backward if "place" in name] == ["xla.place_to_device.default"] * offload
        assert backward.count("aten.tanh.default") == 1  # it runs again


@pytest.mark.xla
@pytest.mark.parametrize("offload", [False, True])
def test_the_second_run_of_a_scanned_layer_calls_no_attention(offload: bool) -> None:
    options = _Options(mesh="", rows=(), window=None, softcap=None, interpret=False)

    def layer(hidden: Tensor, weight: Tensor) -> Tensor:
        query = (hidden @ weight)[:, None]
        out, _ = cast(Any, _Attention.apply(query, query, query, None, None, options, None))
        return hidden + torch.tanh(out[:, 0])

    with FakeTensorMode():
        inputs = (torch.empty(shape, requires_grad=True) for shape in ((1, 256, 128), (128, 128)))
        _, (forward, backward) = split(layer, *inputs, offload=offload)
    assert [name for name in forward if "attention" in name] == ["portable_fsdp.attention.default"]
    assert [name for name in backward if "attention" in name] == ["portable_fsdp.attention_backward.default"]
