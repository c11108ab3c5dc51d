"""Tensor parallelism: the plan of a model, its parts, and the native engine's forwards, with threads as processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import jobs
import pytest
import torch
from cases import ARCHITECTURES, SEQ_LEN, VOCABULARY, Case
from test_curves import assert_equal_curves
from torch import Tensor, nn
from workers import GetWorkers, Group, marked

from portable_fsdp.backends.native.tensor import split_model, sum_gradients
from portable_fsdp.layout import TensorPlan
from portable_fsdp.models.build import BuiltModel, build_model
from portable_fsdp.models.parallel import tensor_plan
from portable_fsdp.models.wrap import find_layers

T = TypeVar("T")
GPT2 = {"*.attn.c_attn": "packed_colwise", "*.c_proj": "rowwise", "*.mlp.c_fc": "colwise"}


class Threads:
    """A `Group` of threads of this process."""

    def __init__(self, index: int, count: int, values: list[Tensor], barrier: threading.Barrier) -> None:
        self.index, self.count, self._values, self._barrier = index, count, values, barrier

    def _all(self, tensor: Tensor) -> list[Tensor]:
        self._barrier.wait(60)
        self._values[self.index] = tensor.detach().clone()
        self._barrier.wait(60)
        return [*self._values]

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._all(tensor)).sum(dim=0))

    def max(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._all(tensor)).amax(dim=0))

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat(self._all(tensor))

    def scatter_sum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._all(tensor)).sum(dim=0).chunk(self.count)[self.index]


def in_threads(count: int, run: Callable[[Threads], T]) -> list[T]:
    barrier = threading.Barrier(count)
    values = [torch.empty(0)] * count

    def guarded(index: int) -> T:
        try:
            return run(Threads(index, count, values, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(guarded, index) for index in range(count)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]


def built(model: str, **settings: Any) -> tuple[BuiltModel, Any]:
    config = Case(model=model, settings=settings).config(1)
    made = build_model(config.model, config.precision, seed=7, seq_len=SEQ_LEN, vocabulary=VOCABULARY)
    return made, config


def values_of(made: BuiltModel) -> dict[str, Tensor]:
    """Not in threads: a fill draws from torch's one random state."""
    values: dict[str, Tensor] = {}
    for fqn, weight in made.model.named_parameters():
        value = made.fill(fqn, tuple(slice(0, size) for size in weight.shape))
        values[fqn] = value + 0.02 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(values)))
    return values  # of biases and adapters too, which are 0 at first


def part_of(fqn: str, value: Tensor, plan: TensorPlan, index: int) -> Tensor:
    if (part := plan.parts.get(fqn)) is None:
        return value
    ranges = part.ranges(index, plan.size)
    return torch.cat([value.narrow(part.dim, at.start, at.stop - at.start) for at in ranges], part.dim)


def materialise(model: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    for fqn, weight in [*model.named_parameters()]:
        assert values[fqn].shape == weight.shape, fqn
        own = nn.Parameter(values[fqn].clone(), requires_grad=weight.requires_grad)
        for module in model.modules():
            for name, other in module._parameters.items():
                if other is weight:
                    module._parameters[name] = own
    return model


def gradients_of(model: nn.Module, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    labels = ids.roll(-1, 1).clone()
    labels[0, -3:] = -100
    total, count = model(ids, labels, torch.arange(SEQ_LEN).expand(len(ids), -1))
    (total / count).backward()
    return float((total / count).detach()), {fqn: w.grad for fqn, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("rows", [False, True], ids=["whole rows", "split rows"])
@pytest.mark.parametrize(
    ("model", "size", "settings"),
    [
        ("llama", 2, {}),
        ("llama", 6, {}),  # 2 key-value heads
        ("llama_tied", 3, {}),
        ("qwen3", 2, {}),
        ("gemma2", 2, {}),
        ("gpt2", 2, {"sharding.plan": GPT2}),
        ("phi3", 2, {}),
        ("gpt_neox", 2, {}),
        ("qwen3_moe", 2, {}),
        ("mixtral", 2, {}),
        ("deepseek_v3", 2, {}),
        ("olmo2", 2, {}),
        ("starcoder2", 2, {}),
        ("granite", 2, {}),
        ("gemma3_text", 2, {}),
        ("llama", 2, {"model.lora": {"r": 4}}),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) else "",
)
def test_losses_and_gradients_are_those_of_the_whole_model(
    model: str, size: int, settings: dict[str, Any], rows: bool
) -> None:
    ids = torch.randint(0, VOCABULARY, (2, SEQ_LEN), generator=torch.Generator().manual_seed(3))
    whole, _ = built(model, **settings)
    values = values_of(whole)
    loss, expected = gradients_of(materialise(whole.model, values), ids)
    own = {"sharding.tensor": size, "sharding.sequence_parallel": rows}
    models = [built(model, **settings, **own) for _ in range(size)]

    def run(group: Threads) -> tuple[float, dict[str, Tensor], TensorPlan]:
        made, config = models[group.index]
        plan = tensor_plan(made.model, config, find_layers(made.model, config.sharding))
        split_model(made.model, plan, group)
        parts = materialise(made.model, {fqn: part_of(fqn, v, plan, group.index) for fqn, v in values.items()})
        own, gradients = gradients_of(parts, ids)
        sum_gradients(parts, plan, group)
        return own, gradients, plan

    for index, (own_loss, gradients, plan) in enumerate(in_threads(size, run)):
        assert own_loss == pytest.approx(loss, rel=2e-6)
        assert gradients.keys() == expected.keys()
        for fqn, gradient in gradients.items():
            of_all = part_of(fqn, expected[fqn], plan, index)
            atol = 2e-5 * float(expected[fqn].abs().max())
            torch.testing.assert_close(gradient, of_all, rtol=1e-4, atol=atol, msg=lambda m, fqn=fqn: f"{fqn}: {m}")


TWO = {"sharding.tensor": 2}
TIED = {"model.architecture": ARCHITECTURES["llama_tied"] | {"num_key_value_heads": 2}}
CURVES = {
    "llama, split rows": Case("llama", settings=TWO),
    "tied, whole rows": Case("llama_tied", settings=TWO | TIED | {"sharding.sequence_parallel": False}),
    "replicas": Case("qwen3", strategy="NO_SHARD", settings=TWO),
    "adapters": Case("llama", settings=TWO | {"model.lora": {"r": 4}}, optim={"name": "adamw", "lr": 1e-2}),
    "grad_op, recompute": Case("gemma2", strategy="SHARD_GRAD_OP", checkpointing="full", settings=TWO),
    "packed, fused": Case("gpt2", settings=TWO | {"sharding.plan": GPT2, "data.packing": "documents"}),
    "phi3": Case("phi3", settings=TWO),
    "experts": Case("mixtral", settings=TWO),
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("group", [marked(Group(engine, 4), in_suite=True) for engine in ("native", "xla")])
def test_the_curve_is_that_of_a_plain_loop(group: Group, name: str, workers: GetWorkers) -> None:
    assert_equal_curves(workers(group).run(jobs.train, case=CURVES[name]), CURVES[name])
