"""Models whose blocks take, return and keep more than tensors, and scalar weights, against a plain PyTorch loop.

And the walk that finds tensors in what modules take and return: its price, its depth, and what it finds.
"""

import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import assemble
from jobs import numbers, open_group, pieces
from torch import nn
from torch.distributed.tensor import DTensor
from unit_models import MODELS, loss_of_rows, plain_run, rows_of_step
from workers import GetWorkers, Group, JobFailed, Workers, marked

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.native.units import cast_scalars
from portable_fsdp.backends.nested import Replacement, tensors_in
from portable_fsdp.config.load import make_config
from portable_fsdp.train.build import shard
from portable_fsdp.train.step import train_step

Settings = dict[str, dict[str, Any]]

TWO, FOUR, XLA, LR = Group("native", 2), Group("native", 4), Group("xla", 4), 1e-2
CHECKPOINTED: Settings = {"memory": {"gradient_checkpointing": "full"}}
RECOMPUTED = CHECKPOINTED | {
    "sharding": {"strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_POST"},
}
REFUSED = ("InputInPlace", "Parts", "Hidden")
TRAINED = [name for name in MODELS if name not in REFUSED]


def train_module(name: str, steps: int, settings: dict[str, dict[str, Any]], micro_batches: int = 1) -> dict[str, Any]:
    """A model of unit_models.py, trained through the library: what each step measured, where the gradients are after
    it, and the last state."""
    config = make_config(**settings)
    with open_group(config) as backend:
        model, optimizer = shard(MODELS[name], config, backend)
        step = train_step(backend, model, optimizer, accumulation=micro_batches, max_grad_norm=1.0, task=loss_of_rows)
        part, metrics, addresses = backend.data_shard, list[dict[str, float]](), list[list[int]]()
        for number in range(steps):
            rows = {name: value.chunk(part.count)[part.index] for name, value in rows_of_step(number).items()}
            batches = [
                backend.place({name: value.chunk(micro_batches)[micro].clone() for name, value in rows.items()})
                for micro in range(micro_batches)
            ]
            metrics.append(numbers(backend.fetch(step(batches, config.optim.lr))))
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            addresses.append([g.to_local().data_ptr() for g in gradients if isinstance(g, DTensor)])
        return {"metrics": metrics, "final": pieces(backend.state(model, optimizer)), "gradients": addresses}


def train(workers: Workers, name: str, settings: Settings, steps: int = 3, micro_batches: int = 1) -> dict[str, Any]:
    """What the first process of the group measured."""
    optim = {"lr": LR, "schedule": "constant", "weight_decay": 0.0, **settings.get("optim", {})}
    settings = {**settings, "optim": optim}
    answers = workers.run(train_module, name=name, steps=steps, settings=settings, micro_batches=micro_batches)
    final, losses = assemble([answer["final"] for answer in answers]), answers[0]["metrics"]
    assert all(answer["metrics"] == losses for answer in answers)
    return {**answers[0], "final": final}


def assert_equal(metrics: list[dict[str, float]], expected: list[dict[str, float]], rel: float = 1e-5) -> None:
    for actual, plain in zip(metrics, expected, strict=True):
        assert actual["loss"] == pytest.approx(plain["loss"], rel=rel)
        assert actual["grad_norm"] == pytest.approx(plain["grad_norm"], rel=10 * rel)


HYBRID: Settings = {"sharding": {"strategy": "HYBRID_SHARD", "replicas": 2}}


@pytest.mark.parametrize(
    ("group", "name", "settings"),
    [
        *(marked(TWO, name, {}, in_suite=True) for name in TRAINED),
        *(marked(TWO, name, RECOMPUTED, in_suite=True) for name in ("Changed", "Nested", "Attribute")),
        marked(FOUR, "Scalars", HYBRID, in_suite=True),
        marked(FOUR, "Attribute", HYBRID, in_suite=False),
        marked(XLA, "Kinds", CHECKPOINTED, in_suite=True),
    ],
)
def test_what_enters_and_leaves_a_unit_trains_as_in_a_plain_loop(
    group: Group, name: str, settings: Settings, workers: GetWorkers
) -> None:
    assert_equal(train(workers(group), name, settings)["metrics"], plain_run(name, 3, LR)[1])


@pytest.mark.xla
@pytest.mark.parametrize("name", ["Changed", "Attribute"])
def test_recomputed_blocks_on_xla_that_return_less_are_refused(name: str, workers: GetWorkers) -> None:
    """torch_xla's checkpoint gives a gradient to what a block returns alone."""
    with pytest.raises(JobFailed, match=r"on XLA: block changes one of its inputs, or keeps a tensor in an attr"):
        train(workers(XLA), name, CHECKPOINTED)


@pytest.mark.parametrize("name", ["Appended", "Changed", "Scalars"])
def test_casts_reach_into_objects_and_scalars_with_and_without_shards(name: str, workers: GetWorkers) -> None:
    sharded, whole = (
        train(workers(TWO), name, {"precision": {"compute": "bfloat16"}, "sharding": {"strategy": strategy}})
        for strategy in ("FULL_SHARD", "NO_SHARD")
    )
    assert_equal(sharded["metrics"], whole["metrics"], rel=5e-4 if name == "Appended" else 1e-5)  # rounded otherwise
    assert_equal(sharded["metrics"], plain_run(name, 3, LR)[1], rel=5e-3)
    assert sharded["metrics"] != plain_run(name, 3, LR)[1]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("InputInPlace", r"blocks\.0 \(block\) changes one of its inputs in place.*\n.*x = x \+ y.*NO_WRAP"),
        ("Parts", r"blocks\.1\.inner \(Linear\) uses weights of a unit outside .*\n  Call the unit"),
        (
            "Hidden",
            r"blocks\.2 \(block\) is a unit whose weights backward needs before .*\n  Return all .*checkpointing",
        ),
    ],
)
def test_what_units_cannot_follow_is_refused_with_the_block(name: str, message: str, workers: GetWorkers) -> None:
    """In place of torch's "setStorage ... out of bounds" and "got mixed torch.Tensor and DTensor"."""
    with pytest.raises(JobFailed, match=message) as failure:
        train(workers(TWO), name, {}, steps=1)
    assert failure.value.kind == "BackendError"
    assert_equal(train(workers(TWO), name, {"sharding": {"wrap": "NO_WRAP"}})["metrics"], plain_run(name, 3, LR)[1])


# ------------------------------------------------------------------------------------- a forward without a backward


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4))
        with torch.no_grad():
            for number, weight in enumerate(self.parameters()):
                values = torch.arange(float(weight.numel())) * (0.7 + 0.1 * number)
                weight.copy_(values.sin().view(weight.shape) * 0.3)


def loss_of_critic(makes: nn.Module, critic: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (critic(makes(x).detach()) - 1).square().sum() + critic(x).square().sum()


def loss_of_maker(makes: nn.Module, critic: nn.Module, x: torch.Tensor, no_backward: Any) -> torch.Tensor:
    out = makes(x)
    with no_backward():
        target = makes(x * 0.5)
    return critic(out).square().sum() + (out - target).square().sum() + (out - makes(x / 3).detach()).square().sum()


def train_two(settings: Settings) -> tuple[list[float], dict[str, Any]]:
    config = make_config(optim={"lr": LR, "weight_decay": 0.0, "betas": (0.9, 0.95)}, **settings)
    with open_group(config) as backend:
        (makes, of_makes), (critic, of_critic) = shard(Net, config, backend), shard(Net, config, backend)

        def task_of_critic(_: nn.Module, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return loss_of_critic(makes, critic, rows["x"]), torch.tensor(float(len(rows["x"])))

        def task_of_maker(_: nn.Module, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return loss_of_maker(makes, critic, rows["x"], backend.evaluate), torch.tensor(float(len(rows["x"])))

        steps = [
            train_step(backend, model, optimizer, accumulation=1, max_grad_norm=1.0, task=task)
            for model, optimizer, task in (
                (critic, of_critic, task_of_critic),
                (makes, of_makes, task_of_maker),
            )
        ]
        losses, part = list[float](), backend.data_shard
        for number in range(6):
            batch = backend.place({"x": rows_of_two(number).chunk(part.count)[part.index].clone()})
            losses += [backend.fetch(step([batch], LR)).result()["loss"].item() for step in steps]
            makes(batch["x"])  # a sample between steps, with and without gradients
            with torch.no_grad():
                critic(batch["x"])
        return losses, pieces(backend.state(makes, of_makes))


def rows_of_two(number: int) -> torch.Tensor:
    return torch.arange(32.0).mul(number + 1.3).cos().view(8, 4)


@pytest.mark.parametrize(
    ("group", "sharding"),
    [
        (TWO, {}),
        (TWO, {"wrap_modules": ["1"], "forward_prefetch": 1}),
        (TWO, {"strategy": "SHARD_GRAD_OP", "wrap_modules": ["1"]}),
        (TWO, {"strategy": "NO_SHARD"}),
        pytest.param(FOUR, {"strategy": "HYBRID_SHARD", "replicas": 2}, marks=pytest.mark.proof),
        pytest.param(Group("native", 1), {}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_models_that_run_forward_without_a_backward_train_as_in_a_plain_loop(
    group: Group, sharding: dict[str, Any], workers: GetWorkers
) -> None:
    """What stays gathered after such a forward was taken for replicated weights: its gradients were summed twice."""
    makes, critic, expected = Net(), Net(), list[float]()
    of_critic, of_makes = (torch.optim.AdamW(m.parameters(), LR, (0.9, 0.95), 1e-8, 0.0) for m in (critic, makes))
    for number in range(6):
        x = rows_of_two(number)
        for model, optimizer in ((critic, of_critic), (makes, of_makes)):
            is_critic = model is critic
            loss = loss_of_critic(makes, critic, x) if is_critic else loss_of_maker(makes, critic, x, torch.no_grad)
            optimizer.zero_grad()
            (loss / len(x)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            expected.append(loss.item() / len(x))
    answers = workers(group).run(train_two, settings={"sharding": sharding})
    for losses, _ in answers:
        assert losses == pytest.approx(expected, rel=2e-5)
    final = assemble([state for _, state in answers])
    for fqn, weight in makes.named_parameters():
        torch.testing.assert_close(final[fqn], weight.detach(), rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------------------------- a gradient in the loss


def loss_with_forces(model: nn.Module, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    x = rows["x"].detach().requires_grad_()
    energy = model(x).sum(-1)
    (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return energy.square().sum() + (force - x).square().sum(), torch.ones_like(energy).sum()


def train_forces(strategy: str) -> list[float]:
    config = make_config(optim={"lr": LR, "weight_decay": 0.0}, sharding={"strategy": strategy})
    with open_group(config) as backend:
        model, optimizer = shard(Net, config, backend)
        step = train_step(backend, model, optimizer, accumulation=1, max_grad_norm=1.0, task=loss_with_forces)
        part = backend.data_shard
        batch = backend.place({"x": rows_of_two(0).chunk(part.count)[part.index].clone()})
        return [backend.fetch(step([batch], LR)).result()["loss"].item() for _ in range(3)]


def test_a_gradient_in_the_loss_trains_without_shards_and_is_refused_with_them(workers: GetWorkers) -> None:
    model, expected = Net(), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), LR, (0.9, 0.95), 1e-8, 0.0)
    for _ in range(3):
        total, count = loss_with_forces(model, {"x": rows_of_two(0)})
        optimizer.zero_grad()
        (total / count).backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
        optimizer.step()
        expected.append((total / count).item())
    assert workers(TWO).run(train_forces, strategy="NO_SHARD")[0] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(JobFailed, match=r"A loss that holds a gradient \(create_.*\) needs `with engine\.second_deriv"):
        workers(TWO).run(train_forces, strategy="FULL_SHARD")


# ------------------------------------------------------------------------------------------- weights of no dimension


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_scalar_weights_keep_their_shape_and_train_with_offload(micro_batches: int, workers: GetWorkers) -> None:
    """Also one that no row uses; and with memory.cpu_offload gradients keep their memory from step to step."""
    answer = train(workers(TWO), "Scalars", {"memory": {"cpu_offload": True}}, 3, micro_batches)
    model, expected = plain_run("Scalars", 3, LR)
    assert_equal(answer["metrics"], expected)
    for fqn, weight in model.named_parameters():
        torch.testing.assert_close(answer["final"][fqn], weight.detach(), rtol=1e-4, atol=1e-6)
        assert (f"exp_avg/{fqn}" in answer["final"]) == weight.requires_grad
    first, *later = answer["gradients"]
    assert first
    assert later == [first, first]


@pytest.mark.parametrize("name", ["adafactor", "lion", "muon"])
def test_each_optimizer_takes_scalars_beside_shards(name: str, workers: GetWorkers) -> None:
    optim = {"name": name, "lr": 1e-3} | ({"momentum": 0.95} if name == "muon" else {})
    sharded, whole = (
        train(workers(TWO), "Scalars", {"optim": optim, "sharding": {"strategy": strategy}}, 2)
        for strategy in ("FULL_SHARD", "NO_SHARD")
    )
    assert_equal(sharded["metrics"], whole["metrics"])
    for key, value in whole["final"].items():
        torch.testing.assert_close(sharded["final"][key], value, rtol=1e-4, atol=1e-6)


def test_a_loop_that_changes_a_scalar_between_steps_reaches_the_weight() -> None:
    """OpenCLIP clamps logit_scale so; forward, recomputation and evaluation read a copy in the compute dtype."""
    model: Any = nn.Module()
    model.scale = nn.Parameter(torch.tensor(9.0))
    cast_scalars(model, ShardPolicy((), compute=torch.bfloat16), torch.device("cpu"))
    with torch.no_grad():
        model.scale.clamp_(max=4.6)
    assert dict(model.named_parameters())["scale"].item() == pytest.approx(4.6)
    assert model.scale.dtype == torch.bfloat16
    with torch.no_grad():
        assert model.eval().scale.dtype == torch.bfloat16


# ------------------------------------------------------------ the walk through what modules take and return

N = 30_000
TABLES: dict[str, Any] = {
    "list": list(range(N)),
    "tuple": tuple(range(N)),
    "set": set(range(N)),
    "deque": deque(range(N)),
    "dict": dict.fromkeys(range(N), 0.5),
    "numbers of NumPy": list(np.arange(float(N))),
    "array": np.arange(N),
    "rows": [("a", [number]) for number in range(N)],
    "records": [{"id": number, "kinds": ["a"]} for number in range(N)],
    "object": SimpleNamespace(words=["a"] * N),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_large_table_beside_a_tensor_costs_no_python_call_for_each_element(name: str) -> None:
    """Several walks for each block and step: they made steps a hundred times slower."""
    calls, state = 0, {"x": torch.ones(2), "table": TABLES[name]}

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        replacement = Replacement(lambda tensor: tensor + 1)
        changed = replacement(state)
        changed["new"] = 1
        replacement.write_back()
    finally:
        sys.setprofile(None)
    assert calls < 1000
    assert changed["table"] is state["table"]
    assert changed["x"].tolist() == [2, 2]
    assert (state["x"].tolist(), state["new"]) == ([1, 1], 1)


@pytest.mark.parametrize("depth", [3, 20_000])
def test_tensors_are_found_and_replaced_at_any_depth(depth: int) -> None:
    """A chain of objects may be longer than Python's stack."""
    inner: Any = {"rows": [[1, 2], [3, (torch.ones(1), 4)]], "plain": [[5]]}
    chain: Any = inner
    for _ in range(depth):
        chain = SimpleNamespace(next=chain)
    assert len(tensors_in(chain)) == 1
    new = Replacement(lambda tensor: tensor * 7)(chain)
    for _ in range(depth):
        new = new.next
    assert new["rows"][1][1][0].item() == 7
    assert new["plain"] is inner["plain"]
    assert inner["rows"][1][1][0].item() == 1


def test_a_cycle_of_lists_ends() -> None:
    cycle: list[Any] = [1]
    cycle.append([cycle, [torch.ones(1)]])
    assert len(tensors_in(cycle)) == 1
    plain: list[Any] = [1]
    plain.append((plain, [plain]))
    assert tensors_in(plain) == []


class OneSlot:
    __slots__ = "loss"


def test_a_slot_is_found_by_whatever_its_class_writes() -> None:
    value = OneSlot()
    value.loss = torch.ones(1)
    assert len(tensors_in([value])) == 1
