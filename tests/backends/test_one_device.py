"""Weights used in place, on one device of native: what a training loop of your own may do with such a model."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import portable_fsdp as pf
from portable_fsdp.backends.contract import Backend
from portable_fsdp.runtime.errors import BackendError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.tanh(self.product(inputs))


class Model(nn.Module):
    """Layers, perhaps the same one several times, and weights of the root's own; `ends`: raised in its forward.

    `changes`: after a layer it changes what the layer took, which that needs for the gradient of its weight.
    """

    def __init__(self, shared: bool = False, ends: BaseException | None = None, changes: bool = False) -> None:
        super().__init__()
        first, self.changes = Layer(), changes
        self.layers = nn.ModuleList(first if shared else Layer() for _ in range(3))
        self.last, self.ends = nn.Linear(8, 1), ends

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = 1 * inputs
        for layer in self.layers:
            taken, inputs = inputs, layer(inputs)
            if self.changes:
                taken.mul_(0.5)
        if self.ends is not None:
            raise self.ends
        return self.last(inputs)


@pytest.fixture
def engine() -> Iterator[tuple[Backend, Callable[..., Any]]]:
    """Opens in bfloat16; the function lays out a model, recomputed or not."""
    sections: dict[str, Any] = {"precision": {"compute": "bfloat16"}}
    with pf.open_backend(pf.make_config(**sections), device="cpu", backend="native") as backend:

        def laid_out(recomputed: bool = False, offload: Any = "none", **model: Any) -> nn.Module:
            memory = {"gradient_checkpointing": "full" if recomputed else "none", "offload": offload}
            torch.manual_seed(0)
            return pf.shard(lambda: Model(**model), pf.make_config(**sections, memory=memory), backend)[0]

        yield backend, laid_out


Engine = tuple[Backend, Callable[..., nn.Module]]
INPUTS = torch.linspace(-1, 1, 16).view(2, 8)


def _gradients(backend: Backend, model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    with backend.accumulate(True):
        model(INPUTS).float().sum().backward()
    return {fqn: weight.grad for fqn, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_layer_used_several_times_has_the_gradients_of_a_plain_model(engine: Engine, recomputed: bool) -> None:
    backend, laid_out = engine
    model, plain = laid_out(recomputed, shared=True), Model(shared=True)
    plain.load_state_dict(model.state_dict())
    plain = plain.bfloat16()
    plain(INPUTS.bfloat16()).float().sum().backward()
    gradients = _gradients(backend, model)
    assert gradients.keys() == dict(plain.named_parameters()).keys()
    for fqn, weight in plain.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(gradients[fqn], weight.grad.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("ends", [ValueError("in the forward"), KeyboardInterrupt()], ids=type)
def test_a_forward_that_ends_early_leaves_the_weights_in_their_place(engine: Engine, ends: BaseException) -> None:
    backend, laid_out = engine
    model: Any = laid_out(ends=ends)
    with pytest.raises(type(ends)):
        model(INPUTS)
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert all(isinstance(weight, nn.Parameter) for weight in model.parameters())
    model.ends = None
    assert _gradients(backend, model).keys() == dict(model.named_parameters()).keys()


def test_a_copy_and_weights_that_change_before_backward_are_refused(engine: Engine) -> None:
    _, laid_out = engine
    model: Any = laid_out()
    for part in (model, model.layers[0]):
        with pytest.raises(BackendError, match="Copy it before shard"):
            copy.deepcopy(part)
    loss = model(INPUTS).float().sum()
    with torch.no_grad():
        model.layers[1].product.weight.zero_()
    with pytest.raises(BackendError, match="expected the weights of the forward in its backward"):
        loss.backward()


@pytest.mark.parametrize("memory", [{}, {"recomputed": True}, {"recomputed": True, "offload": "activations"}])
def test_a_tensor_that_the_model_changes_in_place_before_backward_is_refused(engine: Engine, memory: Any) -> None:
    _, laid_out = engine
    loss = laid_out(changes=True, **memory)(INPUTS).float().sum()
    with pytest.raises(BackendError, match=r"found one of shape \[2, 8\] that the model's forward changed in place"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # of torch.compile, at casts of weights
def test_layers_have_a_program_for_each_size_of_rows_in_training_and_evaluation() -> None:
    """torch.compile's own limit is 8 programs of a function. Those of one engine don't count for the next."""
    sizes = [*range(2, 14)]
    sections: dict[str, Any] = {
        "model": {"factory": "a:b"},
        "data": {"factory": "a:b", "buckets": {"inputs": sizes}},
        "train": {"task": "a:b", "steps": 1},
        "compile": {"enabled": True, "backend": "aot_eager"},
    }
    config = pf.make_config(**sections)
    counters.clear()
    with pf.open_backend(config, device="cpu", backend="native") as backend:
        model = pf.shard(Model, config, backend)[0]
        for rows in (torch.ones(size, 8) for size in sizes):
            model.zero_grad()
            with backend.accumulate(True):
                model(rows).sum().backward()
            with backend.evaluate():
                model(rows)
    # Rows need no gradient in the first layer, and in all of an evaluation.
    assert counters["stats"]["unique_graphs"] == 3 * len(sizes)
    with pf.open_backend(pf.make_config(compile=sections["compile"]), device="cpu", backend="native") as backend:
        pf.shard(Model, config, backend)[0](torch.ones(20, 8)).sum().backward()
