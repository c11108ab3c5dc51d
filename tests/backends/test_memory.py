"""What is kept in memory: until backward, by recomputation, offload and torch.compile; and of models of paper scale."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from cases import ARCHITECTURES, Case, CaseRows, size_of
from jobs import running
from live_storages import LiveStorages
from reference import reference
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from workers import GetWorkers, Group

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.native.offload import ActivationOffload
from portable_fsdp.backends.native.units import local_part, recompute
from portable_fsdp.backends.open import open_backend
from portable_fsdp.backends.torch_xla.spmd.attention import _Attention, _on_each_device
from portable_fsdp.backends.torch_xla.spmd.scan import _recompute
from portable_fsdp.config.schema import Train
from portable_fsdp.train.build import build_training, shard_policy

Settings = dict[str, Any]

ONE = Group("native", 1)

# As many heads for keys as for queries: only then SDPA has a kernel on CPU, which is what "attention" names.
DEEP = {"model.architecture": {**ARCHITECTURES["llama"], "num_hidden_layers": 6, "num_key_value_heads": 6}}
SELECTIVE = {**DEEP, "memory.gradient_checkpointing": "selective"}
RECOMPUTED = {"memory.gradient_checkpointing": "full"}
FULL = DEEP | RECOMPUTED


# ----------------------------------------------------------------------------------------------- kept until backward


def kept_for_backward(case: Case) -> dict[str, int]:
    """Bytes that forward made and that live on until backward; FLOPs of both together, and those of attention."""
    with running(case) as run:
        rows = CaseRows().rows(torch.arange(4).numpy())
        with FlopCounterMode(display=False) as flops, LiveStorages() as live, run.backend.accumulate(True):
            live.see([*run.model.parameters(), rows])
            before = live.bytes
            loss, _ = run.model(rows["input_ids"], rows["labels"])
            live.see([])
            kept = live.bytes - before
            loss.backward()
        attention = sum(
            count
            for op, count in flops.get_flop_counts()["Global"].items()
            if "scaled_dot_product" in str(op) and "backward" not in str(op)
        )
        return {"bytes": kept, "flops": flops.get_total_flops(), "attention": attention}


Kept = Callable[[Settings], dict[str, int]]


@pytest.fixture
def kept(workers: GetWorkers) -> Kept:
    return lambda settings: workers(ONE).run(kept_for_backward, case=Case(settings=settings))[0]


def test_recomputation_keeps_less_and_computes_more(kept: Kept) -> None:
    none, full = kept(DEEP), kept(FULL)
    assert full["bytes"] <= 0.3 * none["bytes"]
    matmul, attention, both = (
        kept({**SELECTIVE, "memory.save_ops": ops}) for ops in (["matmul"], ["attention"], ["matmul", "attention"])
    )
    assert full["bytes"] < attention["bytes"] < matmul["bytes"] < both["bytes"] < none["bytes"]
    assert matmul["flops"] == both["flops"] == none["flops"] < attention["flops"] == full["flops"]
    assert none["attention"] == attention["attention"] == both["attention"]
    assert matmul["attention"] == full["attention"] == 2 * none["attention"]


@pytest.mark.proof
def test_the_more_is_recomputed_the_less_is_kept(kept: Kept) -> None:
    """Layers, and parts of them."""
    none, full = kept(DEEP), kept(FULL)
    every = [kept({**SELECTIVE, "memory.every": number}) for number in (2, 3, 6)]  # 3, 2 and 1 of the 6 layers
    by_bytes = [full["bytes"], *(run["bytes"] for run in every), none["bytes"]]
    assert by_bytes == sorted(set(by_bytes))
    by_flops = [none["flops"], *(run["flops"] for run in reversed(every)), full["flops"]]
    assert by_flops == sorted(set(by_flops))
    parts, both_parts, all_at_once = (
        kept({**FULL, "memory.classes": classes})
        for classes in (["LlamaMLP"], ["LlamaMLP", "LlamaAttention"], ["LlamaModel"])
    )
    assert full["bytes"] < both_parts["bytes"] < parts["bytes"] < none["bytes"]
    assert all_at_once["bytes"] < full["bytes"]
    assert none["flops"] < parts["flops"] < both_parts["flops"] < full["flops"]
    assert (parts["attention"], both_parts["attention"]) == (none["attention"], full["attention"])


def test_on_one_device_no_copy_of_a_weight_is_kept_for_backward(workers: GetWorkers) -> None:
    """But with SHARD_GRAD_OP, which keeps what FULL_SHARD makes again; also under recomputation."""

    def kept(**settings: str) -> int:
        case = Case(settings=DEEP | {"precision.compute": "bfloat16"} | settings)
        return workers(ONE).run(kept_for_backward, case=case)[0]["bytes"]

    shapes = {fqn: tuple(weight.shape) for fqn, weight in reference(Case(steps=1, settings=DEEP)).initial.items()}
    copies = 2 * sum(size_of(shape) for shape in shapes.values() if len(shape) > 1)  # the products', in bfloat16
    # The embedding's backward needs none, and the head has its gradient in forward.
    copies -= 2 * (size_of(shapes["model.embed_tokens.weight"]) + size_of(shapes["lm_head.weight"]))
    again, stays = kept(), kept(**{"sharding.strategy": "SHARD_GRAD_OP"})
    assert again + copies <= stays <= again + 1.1 * copies
    assert kept(**RECOMPUTED) <= 0.3 * again


# ----------------------------------------------------------------------------------------------------- torch.compile

TWELVE = {"model.architecture": {**ARCHITECTURES["llama"], "num_hidden_layers": 12}}
COMPILED = {"compile.enabled": True, "compile.backend": "aot_eager"}
OFFLOADED = RECOMPUTED | {"memory.offload": "activations"}
CAST = {"precision.compute": "bfloat16", "precision.modules": {"*norm*": "float32"}}


def programs(case: Case, inductor: str = "") -> dict[str, Any]:
    """Programs of torch.compile in three steps, breaks of their graphs, and bytes kept for backward in the last one.

    `inductor`: a folder for its cache, for it in place of the case's compiler; a config on CPU is refused it.
    """
    torch._dynamo.reset()
    counters.clear()

    def policy(*arguments: Any) -> ShardPolicy:
        return replace(shard_policy(*arguments), compile_backend="inductor")

    environment = patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": inductor}) if inductor else nullcontext()
    made = patch("portable_fsdp.train.build.shard_policy", policy) if inductor else nullcontext()
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with environment, made, running(case) as run:
        losses = [metrics["loss"] for metrics in run.train(1, 2)]
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            losses += [metrics["loss"] for metrics in run.train(3, 3)]
    return {
        "kept": sum(kept.values()),
        "programs": counters["stats"]["unique_graphs"],
        "cached": counters["inductor"]["fxgraph_cache_hit"],
        "breaks": dict(counters["graph_break"]),
        "losses": losses,
    }


@pytest.mark.parametrize(
    ("devices", "settings", "tolerance"),
    [
        pytest.param(2, {}, 1e-5, marks=pytest.mark.proof),
        pytest.param(2, OFFLOADED, 1e-5, marks=pytest.mark.proof),
        (1, CAST | OFFLOADED, 1e-3),
    ],
    ids=["plain", "offloaded", "one device, offloaded, of two dtypes"],
)
def test_equal_layers_are_one_program_without_breaks(
    devices: int, settings: Settings, tolerance: float, workers: GetWorkers
) -> None:
    plain, answer = (
        workers(Group("native", devices).for_case(case)).run(programs, case=case)[0]
        for case in (Case(settings=TWELVE | settings | compiled) for compiled in ({}, COMPILED))
    )
    assert (plain["programs"], answer["programs"]) == (0, 2)  # all layers, and the loss
    assert answer["breaks"] == {}
    assert answer["losses"] == pytest.approx(plain["losses"], rel=tolerance)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_a_budget_bounds_what_compiled_layers_keep_and_leaves_the_curve(devices: int, workers: GetWorkers) -> None:
    def run(budget: float | None) -> dict[str, Any]:
        within = {} if budget is None else {"memory.gradient_checkpointing": "budget", "memory.budget": budget}
        return workers(Group("gloo", devices)).run(programs, case=Case(settings=COMPILED | within))[0]

    plain, half, least, again = map(run, (None, 0.5, 0.0, None))
    assert 0.95 * plain["kept"] > half["kept"] > least["kept"]
    for answer in (half, least):
        assert (answer["programs"], answer["breaks"]) == (2, {})
        assert answer["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert 0.95 * again["kept"] > half["kept"]  # the setting ends with its backend


@pytest.mark.proof  # it needs a C++ compiler
@pytest.mark.timeout(300)
def test_inductor_compiles_units_over_shards(workers: GetWorkers, tmp_path: Path) -> None:
    """torch's default compiler, which builds kernels for GPUs, here builds C++; a start with it on CPU is refused."""
    eager, answer, again = (
        workers(Group("gloo", 2)).run(programs, case=Case(settings=settings), inductor=inductor)[0]
        for settings, inductor in (({}, ""), (COMPILED, str(tmp_path)), (COMPILED, str(tmp_path)))
    )
    assert (answer["programs"], answer["breaks"]) == (2, {})
    assert len(list(tmp_path.rglob("*.so"))) >= 2  # forward and backward
    assert answer["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert (answer["cached"], again["cached"]) == (0, 2)


# ------------------------------------------------------------------------------------------------------- paper scale

LLAMA = {  # Llama 3 (arXiv 2407.21783), untied: parameters, hidden and intermediate size, layers, heads
    "8B": (8.03e9, 4096, 14336, 32, 32),
    "70B": (70.55e9, 8192, 28672, 80, 64),
    "405B": (405.85e9, 16384, 53248, 126, 128),
}
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def at_scale(name: str, devices: int) -> dict[str, Any]:
    """A Llama on the first of `devices` pretended processes, without weights: its bytes on this one, by kind.

    Runs in a process of its own, whose peak of memory it tells.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    architecture: dict[str, Any] = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
    architecture |= {"max_position_embeddings": 8192, **dict(zip(KEYS, LLAMA[name][1:], strict=True))}
    case = Case(settings={"model.architecture": architecture, "precision.compute": "bfloat16"})
    config = case.config(1).model_copy(update={"train": Train(steps=1, global_batch=devices)})
    with open_backend(config, device="cpu", backend="native", num_devices=devices) as backend:
        training = build_training(config, backend, vocabulary=256, fill=False)
        weights = list(training.model.parameters())
        states = [state[name] for state in training.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        return {
            "parameters": sum(local_part(weight).nbytes for weight in weights),
            "state": sum(local_part(state).nbytes for state in states),
            "shapes": [tuple(weight.shape) for weight in weights],
            "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("8B", 1024),
        *(pytest.param(*case, marks=pytest.mark.proof) for case in (("8B", 8), ("70B", 512), ("405B", 512))),
    ],
)
def test_a_model_of_paper_scale_is_sharded_without_its_memory(name: str, devices: int) -> None:
    script = f"import json, test_memory; print(json.dumps(test_memory.at_scale({name!r}, {devices})))"
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": "8"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | launched, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert sum(map(size_of, answer["shapes"])) == pytest.approx(LLAMA[name][0], rel=1e-3)
    share = 4 * sum(size_of(shape, devices) // devices for shape in answer["shapes"])
    assert (answer["parameters"], answer["state"]) == (share, 2 * share)
    assert answer["host_bytes"] < 4 * 2**30


# ---------------------------------------------------------------- inputs of recomputed layers on the host, or another

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
    def layer(hidden: Tensor, weight: Tensor) -> Tensor:
        query = (hidden @ weight)[:, None]
        out, _ = cast(Any, _Attention.apply(_on_each_device, None, query, query, query, None, None))
        return hidden + torch.tanh(out[:, 0])

    with FakeTensorMode():
        inputs = (torch.empty(shape, requires_grad=True) for shape in ((1, 256, 128), (128, 128)))
        _, (forward, backward) = split(layer, *inputs, offload=offload)
    assert [name for name in forward if "attention" in name] == ["portable_fsdp.attention.default"]
    assert [name for name in backward if "attention" in name] == ["portable_fsdp.attention_backward.default"]
