"""Loops of one's own on one device of native: weights used in place, random numbers, evaluation, and settings."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from cases import CaseRows
from jobs import open_group
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from workers import GetWorkers, Group, JobFailed, marked

import portable_fsdp as pf
from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.native.units import local_part
from portable_fsdp.backends.state import dropouts
from portable_fsdp.config.schema import Train
from portable_fsdp.models.factory import open_factory
from portable_fsdp.models.tasks import Task
from portable_fsdp.runtime.errors import BackendError, ConfigError
from portable_fsdp.train.evaluate import Evaluator


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
        with pytest.raises(BackendError, match="Shard another"):
            copy.deepcopy(part)
    loss = model(INPUTS).float().sum()
    with torch.no_grad():
        model.layers[1].product.weight.zero_()
    with pytest.raises(BackendError, match="a weight was modified between a forward and its backward"):
        loss.backward()


@pytest.mark.parametrize("memory", [{}, {"recomputed": True}, {"recomputed": True, "offload": "activations"}])
def test_a_tensor_that_the_model_changes_in_place_before_backward_is_refused(engine: Engine, memory: Any) -> None:
    _, laid_out = engine
    loss = laid_out(changes=True, **memory)(INPUTS).float().sum()
    with pytest.raises(BackendError, match=r"the model's forward changed a tensor of shape \[2, 8\] in place"):
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


# ------------------------------------------------------------ modules that draw random numbers or count over rows


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x))


class Noise(nn.Module):
    """Draws by itself, on the host and on its device."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(8, 8), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(torch.rand(()) * self.linear(x * (1 + 0.5 * torch.randn(8, device=x.device))), self.rate)


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x


def squares(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    y = model(batch["x"])
    return y.square().sum(), y.new_ones(len(y)).sum()


def x_of(seed: int) -> Tensor:
    return torch.randn(18, 8, generator=torch.Generator().manual_seed(seed))


RECOMPUTED: dict[str, Any] = {"memory": {"gradient_checkpointing": "full"}}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler, of `x`
@pytest.mark.parametrize("kind", [Block, Noise])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        RECOMPUTED,
        {"memory": RECOMPUTED["memory"] | {"offload": "activations"}},
        {"memory": {"gradient_checkpointing": "selective", "save_ops": ["matmul"]}},
        RECOMPUTED | {"compile": {"enabled": True, "backend": "aot_eager"}},
    ],
    ids=str,
)
def test_recomputed_layers_draw_the_same_numbers_again(sections: Any, kind: type[nn.Module]) -> None:
    """Against the gradient by hand, with the same masks."""
    make = partial(Net, kind)
    with pf.open_backend(pf.make_config(), device="cpu", backend="native") as engine:
        model, optimizer = pf.shard(make, pf.make_config(**sections), engine)
        step = pf.train_step(engine, model, optimizer, accumulation=1, max_grad_norm=None, task=squares)
        torch.manual_seed(3)
        actual = engine.fetch(step([{"x": x_of(0)}], 1e-3)).result()
    plain = make()
    _, fill = open_factory("test", make, 0, torch.float32)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.copy_(fill(name, tuple(slice(0, size) for size in weight.shape)))
    torch.manual_seed(3)
    total, count = squares(plain, {"x": x_of(0)})
    (total / count).backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(actual["loss"], (total / count).detach())
    torch.testing.assert_close(actual["grad_norm"], norm)


class Skips(Net):
    """Leaves out a layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[0](self.norm(x)))


class Ends(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.norm(x)))


def drawn(sections: dict[str, Any], make: Callable[[], nn.Module]) -> list[float]:
    """Losses and norms of two steps on a group of XLA."""
    from torch_xla.core.xla_model import set_rng_state

    config = pf.make_config(**sections)
    with open_group(config) as engine:
        model, optimizer = pf.shard(make, config, engine)
        step = pf.train_step(engine, model, optimizer, accumulation=1, max_grad_norm=None, task=squares)
        torch.manual_seed(3)
        set_rng_state(3)
        metrics = [engine.fetch(step([engine.place({"x": x_of(seed)})], 1e-3)).result() for seed in range(2)]
    return [row[name].item() for row in metrics for name in ("loss", "grad_norm")]


@pytest.mark.parametrize("kind", [pytest.param(Block, marks=pytest.mark.proof), Noise])
@pytest.mark.parametrize("group", [marked(Group("xla", 4)), marked(Group("xla_fsdp1", 1))])
def test_recomputed_layers_draw_the_same_numbers_again_on_xla(
    group: Group, kind: type[nn.Module], workers: GetWorkers
) -> None:
    answers = [
        workers(group).run(drawn, sections=sections, make=partial(Net, kind))[0] for sections in ({}, RECOMPUTED)
    ]
    assert answers[1] == pytest.approx(answers[0], rel=1e-6)


@pytest.mark.parametrize(
    ("group", "sections", "make", "words"),
    [
        marked(Group("xla", 4), {}, partial(Net, Noise), r"they draw random numbers \(aten\.rand"),
        marked(Group("xla", 4), RECOMPUTED, partial(Net, Noise), r"they draw random numbers \(aten\.rand"),
        marked(Group("xla", 4), {}, partial(Skips, Layer), r"the model calls blocks\.2 instead of blocks\.1"),
        marked(Group("xla", 4), {}, partial(Ends, Layer), r"the model doesn't call blocks\.2"),
    ],
)
def test_scanned_layers_that_one_loop_would_change_are_refused(
    group: Group, sections: Any, make: Callable[[], nn.Module], words: str, workers: GetWorkers
) -> None:
    with pytest.raises(JobFailed, match=rf"compile\.scan_layers=true cannot be honoured: .*{words}") as failure:
        workers(group).run(drawn, sections=sections | {"compile": {"scan_layers": True}}, make=make)
    assert failure.value.kind == "BackendError"


class EndsEarly(Net):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            self.blocks[0](self.norm(x))
            raise ValueError("in the forward")
        return super().forward(x)


def two_losses(fails: bool) -> tuple[list[float], int]:
    """Losses of two steps with scanned layers, and the number of compilations; `fails`: a step between the two raises
    an error in its forward."""
    config = pf.make_config(compile={"scan_layers": True})
    with open_group(config) as engine:
        model, optimizer = pf.shard(partial(EndsEarly, Layer), config, engine)
        step = pf.train_step(engine, model, optimizer, accumulation=1, max_grad_norm=None, task=squares)
        batches = [engine.place({"x": x_of(0)})]
        losses = [engine.fetch(step(batches, 1e-3)).result()["loss"].item()]
        if fails:
            cast(EndsEarly, model).fails = True
            with pytest.raises(ValueError, match="in the forward"):
                step(batches, 1e-3)
            cast(EndsEarly, model).fails = False
        losses.append(engine.fetch(step(batches, 1e-3)).result()["loss"].item())
        return losses, engine.compilations


@pytest.mark.xla
def test_scanned_layers_run_after_a_forward_that_failed(workers: GetWorkers) -> None:
    (losses, programs), (plain, _) = (
        workers(Group("xla", 4)).run(two_losses, fails=fails)[0] for fails in (True, False)
    )
    assert (losses, programs) == (plain, 1)


def test_numbers_called_dropout_count_and_zeros_do_not() -> None:
    assert dropouts(nn.MultiheadAttention(8, 2, dropout=0.1)) == ["MultiheadAttention"]
    assert dropouts(nn.Sequential(nn.Dropout(0.0), nn.Linear(1, 1), nn.AlphaDropout(0.2))) == ["2"]
    drawn = nn.Sequential(nn.Dropout(0.1), nn.MultiheadAttention(8, 2, dropout=0.1), nn.LSTM(8, 8, 2, dropout=0.1))
    assert dropouts(drawn) == ["0", "1", "2"]
    assert dropouts(drawn, by_keys=True) == ["2"]


def test_an_evaluation_is_plain_pytorchs_eval_and_changes_nothing() -> None:
    train = Train.model_validate({"steps": 1, "global_batch": 6, "micro_batch": 6})
    with pf.open_backend(pf.make_config(), device="cpu", backend="native") as engine:
        model, _ = pf.shard(Net, pf.make_config(), engine)
        model.get_submodule("blocks.1").eval()  # as its author left it
        evaluate = Evaluator(engine, model, OwnRows(18), train, Task("squares", squares, counts_labels=False))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        evaluation = evaluate()
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        assert [model.get_submodule(f"blocks.{number}").training for number in range(3)] == [True, False, True]
        weights = {name: local_part(weight).clone() for name, weight in model.named_parameters()}
    plain = Net().eval()
    plain.load_state_dict({**weights, **before})
    with torch.no_grad():
        total, count = squares(plain, {"x": x_of(1)})
    assert evaluation is not None
    assert evaluation.loss == pytest.approx((total / count).item(), rel=1e-6)


class OwnRows(CaseRows):
    """Rows of eight numbers."""

    def rows(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        return {"x": x_of(1)[torch.from_numpy(indices)]}


def test_a_step_takes_as_many_micro_batches_as_it_was_made_for() -> None:
    with pf.open_backend(pf.make_config(), device="cpu", backend="native") as engine:
        model, optimizer = pf.shard(Net, pf.make_config(), engine)
        step = pf.train_step(engine, model, optimizer, accumulation=2, max_grad_norm=None, task=squares)
        with pytest.raises(ConfigError, match="expected a list of 2 micro batches, found 1"):
            step([{"x": x_of(0)}], 1e-3)
        for rate in (torch.ones(2), float("nan")):
            with pytest.raises(ConfigError, match="expected one finite learning rate, found"):
                step([{"x": x_of(0)}] * 2, rate)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(2, int("two")), "ValueError"),
        (nn.Linear(2, 2), "found a Linear"),
        (lambda: nn.LazyLinear(2), "of a lazy module"),
    ],
)
def test_what_makes_no_module_is_refused(make: Any, words: str) -> None:
    config = pf.make_config()
    with pf.open_backend(config, device="cpu", backend="native") as engine, pytest.raises(ConfigError, match=words):
        pf.shard(make, config, engine)


@pytest.mark.filterwarnings("ignore:Please use the new API settings")  # torch 2.9 names a newer setting
@pytest.mark.parametrize(("precision", "inside"), [("highest", "highest"), ("high", "high"), ("default", "medium")])
def test_matmul_precision_is_set_while_open(precision: str, inside: str) -> None:
    before = torch.get_float32_matmul_precision()
    with pf.open_backend(pf.make_config(precision={"matmul": precision}), device="cpu", backend="native"):
        assert torch.get_float32_matmul_precision() == inside
    assert torch.get_float32_matmul_precision() == before == "highest"
