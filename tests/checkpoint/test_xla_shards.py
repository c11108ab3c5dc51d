"""Shards of torch_xla's FSDP v1: those that it wrote itself, and others made by hand in its format."""

import math
import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import assert_same, tensors_in

from portable_fsdp.formats.importing import detect, import_checkpoint
from portable_fsdp.runtime.errors import CheckpointError

pytestmark = pytest.mark.slow

PLAIN = {
    "embed.weight": torch.arange(35.0).reshape(7, 5),
    "layers.0.up.weight": torch.randn(6, 5),
    "layers.0.up.bias": torch.randn(6),
    "layers.0.scale": torch.tensor([2.5]),
    "head.weight": torch.randn(3, 5),
}
UNIT = "_fsdp_wrapped_module"


def parts(flat: torch.Tensor, world: int, multiple: int) -> list[torch.Tensor]:
    """As `_flatten_and_pad_to_world_size` and chunk."""
    size = flat.shape[0]
    padded = math.ceil(size / (world * multiple)) * world * multiple
    zeros = torch.zeros(padded - size, *flat.shape[1:])
    return list(torch.cat([flat, zeros]).chunk(world))


def shards(world: int, kind: str) -> list[dict[str, Any]]:
    """What each rank saves of a model whose unit `layers.0` lies in the root unit. `kind`: flat, rows, joined."""
    models: list[dict[str, Any]] = [OrderedDict() for _ in range(world)]
    info: dict[str, Any] = {"": {}, "layers.0": {}}
    flatten: dict[str, Any] = {}

    def cut(prefix: str, name: str, tensor: torch.Tensor) -> None:
        suffix = f"_fsdp_shard.{name.replace('.', '_fsdp_dot_')}"
        by_rows = kind == "rows" and tensor.dim() > 0
        cuts = parts(tensor, world, 1) if by_rows else parts(tensor.flatten(), world, 4)
        info[prefix][suffix] = {"_orig_size": tensor.size(), "_orig_name": name}
        for model, part in zip(models, cuts, strict=True):
            model[f"{prefix}.{suffix}".lstrip(".")] = part.clone()

    for prefix, inside in (("", ("embed.weight", "head.weight")), ("layers.0", ("up.weight", "up.bias", "scale"))):
        tensors = {name: PLAIN[f"{prefix}.{name}".lstrip(".")] for name in inside}
        if kind == "joined":
            flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
            cut(prefix, f"{UNIT}.flat_param_0", flat)
            key = f"{prefix}.{UNIT}.flat_param_0".lstrip(".")
            flatten[key] = (list(tensors), [t.size() for t in tensors.values()], [t.numel() for t in tensors.values()])
        else:
            for name, tensor in tensors.items():
                cut(prefix, f"{UNIT}._fpw_module.{name}", tensor)
    for model in models:
        model[f"{UNIT}.layers.0.{UNIT}.counts"] = torch.tensor([3.0, 4.0])
    buffers = {f"{UNIT}.layers.0.{UNIT}.counts": {"_orig_dtype": torch.float64}}
    return [
        {
            "model": model,
            "shard_metadata": {
                "shard_info": info,
                "flatten_info": flatten,
                "buffer_info": buffers,
                "world_size": world,
                "rank": rank,
            },
            "optimizer": {"state": {0: {"step": 3}}},
        }
        for rank, model in enumerate(models)
    ]


def save(folder: Path, ranks: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for rank, value in enumerate(ranks):
        torch.save(value, folder / f"rank-{(rank + 1) % len(ranks)}.pth")  # names say nothing
    return folder


WRITER = """
import sys
import torch
sys.path.insert(0, sys.argv[3])
from threaded_pjrt import Devices
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as FSDP
import torch_xla, torch_xla.core.xla_model as xm

kind, folder = sys.argv[1:3]
options = {"flat": {}, "rows": {"shard_param_on_dim_0": True}, "joined": {"flatten_parameters": True}}[kind]
options["pin_layout_in_collective_ops"] = False


def build():
    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    return torch.nn.Sequential(inner, torch.nn.Linear(7, 3))


plain = build()
torch.save(plain.state_dict(), folder + ".plain")


def job():
    model = build()
    model.load_state_dict(plain.state_dict())
    model[0] = FSDP(model[0].to(torch_xla.device()), **options)
    model = FSDP(model.to(torch_xla.device()), **options)
    return model.state_dict(), model.get_shard_metadata()


for rank, (state, metadata) in enumerate(Devices().run(job)):
    cpu = {name: tensor.cpu() for name, tensor in state.items()}
    torch.save({"model": cpu, "shard_metadata": metadata}, f"{folder}/rank-{rank}.pth")
"""


@pytest.mark.xla
@pytest.mark.parametrize(
    "kind", ["flat", *(pytest.param(name, marks=pytest.mark.proof) for name in ("rows", "joined"))]
)
def test_it_reads_what_torch_xla_wrote(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2"}
    tests = Path(__file__).parents[1] / "backends"
    program = [sys.executable, "-c", WRITER, kind, str(folder), str(tests)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(
        tensors_in(import_checkpoint(folder, tmp_path / "run")), torch.load(f"{folder}.plain", weights_only=True)
    )


@pytest.mark.parametrize("kind", ["flat", "rows", "joined"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_parts_of_any_number_of_ranks_are_put_together(
    tmp_path: Path, world: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = shards(world, kind)
    folder = save(tmp_path / "shards", ranks)
    assert detect(folder) == "xla_fsdp1"
    imported = tensors_in(import_checkpoint(folder, tmp_path / "run"))
    assert_same(imported, {**PLAIN, "layers.0.counts": torch.tensor([3.0, 4.0], dtype=torch.float64)})
    assert "ignoring the optimizer state" in caplog.text


def test_ranks_must_be_of_one_run_and_all_there(tmp_path: Path) -> None:
    zero, one, two = shards(3, "flat")
    other = one | {"shard_metadata": {**one["shard_metadata"], "world_size": 2}}
    for name, ranks, message in (
        ("lost", [zero, two], r"expected a file of each rank of one run, found ranks \[0, 2\] of \[3\]"),
        ("twice", [one, one, two], "a second file of rank 1"),
        ("mixed", [zero, other, two], r"of \[2, 3\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            import_checkpoint(save(tmp_path / name, ranks), tmp_path / "run")


def test_shapes_that_the_parts_cannot_fill_are_refused(tmp_path: Path) -> None:
    ranks = shards(2, "flat")
    info = ranks[0]["shard_metadata"]["shard_info"][""]
    info[next(iter(info))]["_orig_size"] = torch.Size([2**40, 5])
    with pytest.raises(CheckpointError, match="expected parts of"):
        import_checkpoint(save(tmp_path / "absurd", ranks), tmp_path / "run")
    torch.save({"model": {"a": torch.ones(2)}}, tmp_path / "absurd" / "rank-0.pth")
    with pytest.raises(CheckpointError, match="no dicts model and shard_metadata"):
        import_checkpoint(tmp_path / "absurd", tmp_path / "run")
