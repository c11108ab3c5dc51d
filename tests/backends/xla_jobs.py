"""Jobs of torch_xla's two engines: what lies on the devices, and what the programs hold that XLA compiled."""

# The kernel's calls are counted where it is called.
# pyright: reportPrivateUsage=false

import logging
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import jobs
import pytest
import torch
from cases import GLOBAL_BATCH, VOCABULARY, Case, CaseRows
from jobs import open_case, running

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.torch_xla.spmd import engine, head, scatter, splash
from portable_fsdp.backends.torch_xla.spmd.sums import int8_product
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import weight_spec
from portable_fsdp.plan.hlo import collectives_by_dtype
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.train.build import build_training, shard
from portable_fsdp.train.step import train_step


def xla_run(case: Case, folder: str) -> dict[str, Any]:
    """A whole run: its metrics, what each device holds after it, and the programs that XLA wrote into `folder`."""
    with running(case) as run:
        backend = run.backend
        metrics = run.train(1, case.steps)
        held = {fqn: _on_devices(parameter) for fqn, parameter in run.model.named_parameters()}
        for fqn, parameter in run.model.named_parameters():
            for name, value in run.optimizer.state.get(parameter, {}).items():
                held[f"{name}/{fqn}"] = _on_devices(value)
        return {
            "metrics": metrics,
            "held": held,
            "final": run.state(),
            "programs": _programs(Path(folder), backend.devices),
            "compilations": backend.compilations,
            "expected_compilations": backend.expected_compilations,
        }


def xla_run_on_chips(case: Case, folder: str, torus: tuple[int, ...], global_batch: int) -> dict[str, Any]:
    """As `xla_run`, on CPU devices that say where on a torus they are: slices, y, x. Empty: nowhere, as they are.

    Besides `head_chunks`: how often the head's gradient was computed for some of the positions, and in which dtypes.
    """
    places = list(product(*map(range, torus))) if torus else []
    chips = [{"name": f"TPU:{i}", "slice_index": at, "coords": [x, y, 0]} for i, (at, y, x) in enumerate(places)]
    rows = {"train.global_batch": global_batch, "train.micro_batch": case.micro_batch or global_batch // _devices()}
    with (
        _chips(chips or [{"name": "CPU:0"}]),
        patch.object(scatter, "LARGEST_OF_COMPILER", 1),
        patch.object(head, "POSITIONS", 16),
        patch.object(head, "product_in", wraps=head.product_in) as products,
        patch.object(jobs, "GLOBAL_BATCH", global_batch),
    ):
        run = xla_run(replace(case, settings=case.settings | rows), folder)
    dtypes = {str(call.args[1].dtype).removeprefix("torch.") for call in products.call_args_list}
    return {**run, "head_chunks": products.call_count, "head_dtypes": dtypes}


def torus_of_chips(chips: list[dict[str, Any]]) -> tuple[int, ...]:
    with _chips(chips):
        return scatter.torus_of_run()


def _chips(attributes: list[dict[str, Any]]) -> Any:
    import torch_xla.runtime

    return patch.object(torch_xla.runtime, "global_runtime_device_attributes", lambda: attributes)


class _ReadsItsGradient(torch.autograd.Function):
    """The same values; its backward branches on one, or copies them to the host, which no operator of torch does."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, copies: bool) -> torch.Tensor:
        ctx.copies = copies
        return rows * 1

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> Any:
        if ctx.copies:
            return outer[0].cpu().to(outer[0].device), None
        return outer[0] * (2 if outer[0].sum() < 0 else 1), None


def _filled(rows: torch.Tensor) -> torch.Tensor:
    return rows.masked_scatter(rows > 2, rows)


NO_PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "value": lambda rows: rows[: int(rows.sum().item())].sum(),
    "operation": lambda rows: torch.linalg.solve(torch.outer(rows, rows), rows).sum(),
    "operation on an input": lambda rows: torch.unique(rows.detach()).sum(),
    "gradient": lambda rows: torch.zeros_like(rows).masked_scatter(rows > 2, rows).sum(),
    "value of a gradient": lambda rows: cast(Any, _ReadsItsGradient).apply(rows * 2, False).sum(),
    "copy of a gradient": lambda rows: cast(Any, _ReadsItsGradient).apply(rows * 2, True).sum(),
    "broken gradient": lambda rows: torch.linalg.slogdet(torch.eye(2, device=rows.device) * rows.sum())[1],
    "evaluation": lambda rows: _filled(rows[:, None] * torch.ones(1, 4, device=rows.device)).sum(),
    "own mistake": lambda rows: rows * {}["absent"],
}
"""Functions that make no program; all but `value` and `operation` passed torch_xla's own check, or ended in C++."""

LEAVE_TENSORS = ("evaluation", "copy of a gradient")
"""XLA had begun to run these: tensors have lost their operations, and have no values yet."""


def no_program(case: Case, how: str) -> None:
    """Forward and backward of one of them; its refusal is the JobFailed that the test expects.

    The next engine of the process works, or is refused while the error keeps tensors of the refused program.
    """
    backend, _ = open_case(case)

    def run(rows: torch.Tensor) -> dict[str, torch.Tensor]:
        weights = rows.detach().requires_grad_(how != "evaluation")
        total = NO_PROGRAMS[how](weights)
        if total.requires_grad:
            total.backward()
        return {"total": total.detach(), "gradient": rows if weights.grad is None else weights.grad}

    rows = {"rows": torch.arange(GLOBAL_BATCH).float()}
    try:
        with backend:
            backend.compile(run, "asks")(backend.place(rows)["rows"])
        return
    except Exception as error:
        refused = error
    if how in LEAVE_TENSORS:
        with pytest.raises(BackendError, match=r"without values\.\n  Start a new process"):
            open_case(case)
        refused = BackendError(str(refused))
    following, _ = open_case(case)
    with following:
        total = following.compile(lambda rows: {"total": rows.sum()}, "next")(following.place(rows)["rows"])["total"]
        assert float(total) == rows["rows"].sum()
    raise refused


def compiled_again(case: Case) -> dict[str, list[str]]:
    """What changes at the third step of a small model -> the warnings of a run of three steps."""
    out: dict[str, list[str]] = {}
    handler = logging.Handler()
    handler.emit = lambda record: out[how].append(record.getMessage())
    logging.getLogger("portable_fsdp").addHandler(handler)
    try:
        # Each has a width of its own: a worker keeps its programs.
        for width, how in enumerate(("shape", "gradient", "number", "branch", "nothing"), start=2):
            out[how] = []
            backend, config = open_case(case)
            with backend:
                _three_steps(backend, config, how, width)
    finally:
        logging.getLogger("portable_fsdp").removeHandler(handler)
    return out


def _three_steps(backend: Any, config: Config, how: str, width: int) -> None:
    changes = [False]

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, width), torch.nn.Linear(width, 2)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if how == "gradient" and changes[0]:
                return self.first(rows)
            rows = self.second(self.first(rows))
            return rows.tanh() if how == "branch" and changes[0] else rows

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        losses = model(batch["rows"]).square().flatten(1).mean(1)
        return losses.sum(), torch.ones_like(losses).sum()

    model, optimizer = shard(Two, config, backend)
    step = train_step(backend, model, optimizer, accumulation=1, max_grad_norm=1.0, task=loss)
    for number in range(3):
        changes[0] = number == 2
        if how == "number":
            optimizer.param_groups[0]["betas"] = (0.0 if changes[0] else 0.5, 0.9)
        shape = (GLOBAL_BATCH, 3, 2) if how == "shape" and changes[0] else (GLOBAL_BATCH, 2)
        step([backend.place({"rows": torch.ones(shape)})], 0.01 * (number + 1))


def recurrent(case: Case, kind: str, options: dict[str, Any], data: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a recurrent layer, which was evaluated before, and how many loops it has."""
    import torch_xla

    with open_case(case)[0]:
        torch.manual_seed(0)
        layer: Any = getattr(torch.nn, kind)(3, 3, batch_first=True, **options)
        weights = {name: value.detach().to("xla") for name, value in layer.named_parameters()}
        given = data.to("xla")
        with torch.no_grad():
            torch.func.functional_call(layer, weights, (given,))
        for weight in weights.values():
            weight.requires_grad_()
        embedded = given.clone().requires_grad_()
        frozen, _ = torch.func.functional_call(layer, weights, (given,))  # as data, or a frozen embedding, are
        output, last = torch.func.functional_call(layer, weights, (embedded,))
        states = last if isinstance(last, tuple) else (last,)
        (output.square().sum() + frozen.cos().sum() + sum(state.sin().sum() for state in states)).backward()
        tensors = {"output": output, "input": embedded.grad, **{name: w.grad for name, w in weights.items()}}
        loops = cast(Any, torch_xla)._XLAC._get_xla_tensors_hlo([output]).count(" while(")
        torch_xla.sync()  # one program for all of them
        return {"loops": torch.tensor(loops), **{name: cast(Any, t).detach().cpu() for name, t in tensors.items()}}


def _on_devices(tensor: torch.Tensor) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The shape of a global tensor, and that of the piece on each device, padding included."""
    import torch_xla

    bridge: Any = cast(Any, torch_xla)._XLAC
    devices = _devices()
    if tensor.device.type == "cpu" or "devices=" not in bridge._get_xla_sharding_spec(tensor):
        return tuple(tensor.shape), [tuple(tensor.shape)] * devices
    (shards,) = bridge._get_local_shards([tensor])
    return tuple(tensor.shape), [tuple(shard.shape) for shard, _ in shards]


def _devices() -> int:
    return int(os.environ["CPU_NUM_DEVICES"])


def _programs(folder: Path, devices: int) -> dict[str, Any]:
    """Name -> what stands in the program after partitioning. Empties the folder: another process names files alike."""
    programs: dict[str, Any] = {}
    for path in folder.iterdir():
        text = path.read_text(errors="ignore")
        path.unlink()
        if path.name.endswith("cpu_after_optimizations.txt"):
            gathers = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
            programs[path.name.split(".")[1]] = {
                "collectives": collectives_by_dtype(text, devices),
                "gathered": [tuple(int(size) for size in shape.split(",")) for shape in gathers],
                "dots": text.count(" dot("),
                "loops": text.count(" while("),
            }
    return programs


class _Products(torch.nn.Module):
    """An embedding, a linear layer and GPT-2's, each with an output gradient of its own; no dimension divides by 4."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.table, self.linear, self.conv1d = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 7), Conv1D(5, 6)

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, ids: torch.Tensor, x: torch.Tensor, outer: dict[str, torch.Tensor]) -> torch.Tensor:
        return (
            (self.table(ids) * outer["table"]).sum()
            + (self.linear(x) * outer["linear"]).sum()
            + (self.conv1d(x) * outer["conv1d"]).sum()
        )


def xla_gradients(reduce: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Name -> the gradient of a bfloat16 weight, and the same from its factors in float64."""
    backend, _ = open_case(Case(compute="bfloat16", reduce=reduce))
    draw = torch.Generator().manual_seed(3)
    rows = (GLOBAL_BATCH, 40)
    ids = torch.randint(11, rows, generator=draw)
    x, *outer = (torch.randn(*rows, size, generator=draw).bfloat16() for size in (6, 6, 7, 5))
    factors = dict(zip(("table", "linear", "conv1d"), outer, strict=True))
    with backend:
        given = _Products()
        layouts = {fqn: weight_spec(weight.dim()) for fqn, weight in given.named_parameters()}
        policy = ShardPolicy((), compute=torch.bfloat16, layouts=layouts)
        values = {fqn: weight.detach().clone() for fqn, weight in given.named_parameters()}
        model = backend.shard_model(given, policy, lambda fqn, slices: values[fqn][slices])
        weights = dict(model.named_parameters())

        def gradients(ids: torch.Tensor, x: torch.Tensor, factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            model(ids, x, factors).backward()
            return {fqn: cast(torch.Tensor, weight.grad) for fqn, weight in weights.items()}

        placed = backend.place({"ids": ids, "x": x, **factors})
        gradient_of = backend.fetch(
            backend.compile(gradients, "gradients")(
                placed["ids"], placed["x"], {name: placed[name] for name in factors}
            )
        ).result()
    one_hot = torch.nn.functional.one_hot(ids, 11)
    flat = {name: factor.double().flatten(0, 1) for name, factor in {**factors, "x": x, "ids": one_hot}.items()}
    return {
        "table": (gradient_of["table.weight"], flat["ids"].T @ flat["table"]),
        "linear": (gradient_of["linear.weight"], flat["linear"].T @ flat["x"]),
        "bias": (gradient_of["linear.bias"], flat["linear"].sum(0)),
        "conv1d": (gradient_of["conv1d.weight"], flat["x"].T @ flat["conv1d"]),
        "conv1d_bias": (gradient_of["conv1d.bias"], flat["conv1d"].sum(0)),
    }


def xla_matmul_precision(case: Case) -> tuple[list[str], str]:
    """XLA's setting before a backend opens, while it is open, and after; and a product traced in between, as HLO."""
    import torch_xla

    bridge: Any = cast(Any, torch_xla)._XLAC
    before = bridge._xla_get_mat_mul_precision()
    backend, _ = open_case(case)
    with backend:
        during = bridge._xla_get_mat_mul_precision()
        square = torch.ones(4, 4).to(backend.device)
        product = bridge._get_xla_tensors_hlo([square @ square])
    return [before, during, bridge._xla_get_mat_mul_precision()], product


# ------------------------------------------------------------------------------------------------ the engine xla_fsdp1


def fsdp1_program(case: Case) -> dict[str, Any]:
    """What forward and backward of a step would run, read from the traced program; nothing of it runs."""
    import torch_xla

    with running(case) as run:
        rows = run.backend.place(CaseRows().rows(torch.arange(2).numpy()))
        parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        before = {parameter: parameter.detach().cpu() for parameter in parameters}
        run.model(rows["input_ids"], rows["labels"])[0].backward()
        text: str = cast(Any, torch_xla)._XLAC._get_xla_tensors_hlo([p.grad for p in parameters])
        for parameter in parameters:  # barriers made them results of what shall not run
            parameter.grad = None
            parameter.data = run.backend.place({"as before": before[parameter]})["as before"]
        out: dict[str, Any] = {
            name: len(re.findall(rf" {name}\(", text)) for name in ("all-gather", "reduce-scatter", "all-reduce", "dot")
        }
        out["reduced"] = set(re.findall(r"= \(?(\w+)\[[^=]* reduce-scatter\(", text))
        out["gathered"] = set(re.findall(r"= \(?(\w+)\[[^=]* all-gather\(", text))
        out["pinned"] = text.count("constrain_layout=true")
        out["shards"] = {name: tuple(p.shape) for name, p in run.model.named_parameters()}
        out["buffers"] = {name: str(buffer.dtype) for name, buffer in run.model.named_buffers()}
        return out


def traced_products(case: Case) -> dict[str, int]:
    """The products in forward and backward of a step: `s8 s8 -> s32` -> how many; nothing of them runs."""
    import torch_xla

    with running(case) as run:
        rows = run.backend.place(CaseRows().rows(torch.arange(_devices()).numpy()))
        weights = list(run.model.parameters())
        loss = run.model(rows["input_ids"], rows["labels"])[0]
        gradients = torch.autograd.grad(loss, weights)
        text: str = cast(Any, torch_xla)._XLAC._get_xla_tensors_hlo(list(gradients))
        dots = re.findall(r"= (\w+)\[\S+ dot\((\w+)\[[^%]* %[^%]*?(\w+)\[", text)
        return Counter(f"{left} {right} -> {result}" for result, left, right in dots)


def int8_product_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    import torch_xla

    with open_case(Case())[0]:
        device = torch_xla.device()
        return int8_product(x.to(device), weight.to(device)).cpu()


def kernel_run(case: Case, interpreted: bool) -> dict[str, Any]:
    """Three steps on rows of `data.seq_len` tokens: with the TPU's attention kernel in an interpreter, or without."""
    backend, config = open_case(case)
    calls: Counter[str] = Counter()

    def counted(kernel: splash.Kernel, function: Any, *tensors: Any) -> list[torch.Tensor]:
        calls[function.__name__] += 1
        return run(kernel, function, *tensors)

    run = splash.Kernel._run
    with (
        backend,
        patch.object(splash.Kernel, "_run", counted),
        patch.object(engine, "LayerAttention", partial(engine.LayerAttention, interpret=True)),
    ):
        cast(Any, backend)._tensors.for_tpu = interpreted
        training = build_training(config, backend, vocabulary=256)
        metrics: list[dict[str, list[float]]] = []
        for step in range(3):
            rows = _long_rows(config, step)
            pending = backend.fetch(training.step([backend.place(rows)], 0.01, [float(rows["labels"].numel())]))
            metrics.append({name: value.tolist() for name, value in pending.result().items()})
        weights = {fqn: parameter.detach().cpu() for fqn, parameter in training.model.named_parameters()}
    return {"metrics": metrics, "weights": weights, "calls": dict(calls), "compilations": backend.compilations}


def _long_rows(config: Config, seed: int) -> dict[str, torch.Tensor]:
    shape = (GLOBAL_BATCH, config.data.seq_len)
    ids = torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    if config.data.packing == "documents":
        cut = shape[1] // 3
        segments = (torch.arange(shape[1]) >= cut).long().expand(shape) + 1
        positions = (torch.arange(shape[1]) - cut * (segments - 1)).contiguous()
        batch |= {"segments": segments.contiguous(), "positions": positions}
    return batch
