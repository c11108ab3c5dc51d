"""Jobs of torch_xla's two engines: what lies on the devices, and what the programs hold that XLA compiled."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from cases import GLOBAL_BATCH, Case, CaseRows
from jobs import open_case, running

from portable_fsdp.backends.base import ShardPolicy
from portable_fsdp.metrics.hlo import collectives_by_dtype


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
            "programs": _programs(Path(folder), backend.data_parallel_size),
            "compilations": backend.compilations,
            "expected_compilations": backend.expected_compilations,
        }


def ask_the_host(case: Case, how: str) -> None:
    """A program that can't be one; a refusal is the JobFailed that the test expects."""
    asks: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "value": lambda rows: rows[: int(rows.sum().item())].sum(),
        "operation": lambda rows: torch.linalg.solve(torch.outer(rows, rows), rows).sum(),
    }
    backend, _ = open_case(case)
    with backend:
        rows = backend.place({"rows": torch.arange(GLOBAL_BATCH).float()})["rows"]
        backend.compile(lambda rows: {"total": asks[how](rows)}, "asks")(rows)


def _on_devices(tensor: torch.Tensor) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The shape of a global tensor, and that of the piece on each device, padding included."""
    import torch_xla

    bridge: Any = cast(Any, torch_xla)._XLAC
    devices = int(os.environ["CPU_NUM_DEVICES"])
    if tensor.device.type == "cpu" or "devices=" not in bridge._get_xla_sharding_spec(tensor):
        return tuple(tensor.shape), [tuple(tensor.shape)] * devices
    (shards,) = bridge._get_local_shards([tensor])
    return tuple(tensor.shape), [tuple(shard.shape) for shard, _ in shards]


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
        policy = ShardPolicy((), compute=torch.bfloat16)
        given = _Products()
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
