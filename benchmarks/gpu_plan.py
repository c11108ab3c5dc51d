"""How close a plan of GPU memory comes: to torch's own tracker, to published figures, and to a GPU's allocator.

    python benchmarks/gpu_plan.py                        # results/gpu_plan.json: no GPU needed
    python benchmarks/gpu_plan.py --parts=gpu            # the plans against a GPU: results/gpu_plan_<name>.json
    python benchmarks/gpu_plan.py --parts=gpu --tiny     # the same on CPU, tiny: does the script itself work

Every plan and every measured run has a process of its own. Published are torchtitan's Llama-3.1-8B rows, eager, on H100
(its `max_reserved`): they are planned with torchtitan's loss (all logits in float32 at once) and its "selective op"
checkpointing (attention and every second product kept) in the place of ours.
"""

import argparse
import json
import multiprocessing
import platform
import re
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import MethodType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, where the package isn't installed
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "backends"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "plan"))
from live_storages import measure_on
from programs import LLAMA_8B
from steps import LLAMA, step

from portable_fsdp.backends.native import units
from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.schema import Config
from portable_fsdp.models import build as models_build
from portable_fsdp.plan import fake_step as cuda
from portable_fsdp.plan.fake_step import empty_batch
from portable_fsdp.plan.memory_trace import Recorder
from portable_fsdp.plan.result import DeviceMemory
from portable_fsdp.plan.target import parse_target
from portable_fsdp.train.build import build_training
from portable_fsdp.train.measures import control_numbers

HERE = Path(__file__).parent
PER_HOST = 8
GIBIBYTE = 2**30
SOURCE = "github.com/pytorch/torchtitan/blob/31a17bf/benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3"
PUBLISHED = {8: 82.4, 128: 67.0}  # devices -> max_reserved in GiB
ON_TOP = ("allocator", "communication buffers")
BFLOAT16: dict[str, Any] = {"precision__compute": "bfloat16"}
FULL: dict[str, Any] = {"memory__gradient_checkpointing": "full"}
KEPT: dict[str, Any] = {"memory__gradient_checkpointing": "selective", "memory__save_ops": ("matmul", "attention")}


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        **{"model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary},
        "max_position_embeddings": 131072,
    }


EIGHT_B = {"model_type": "llama", "max_position_embeddings": 131072, **LLAMA_8B}
SEVENTY_B = _llama(8192, 28672, 80, 64, 8, 128256)
ONE_B = _llama(2048, 8192, 16, 32, 8, 128256)
SMALL = _llama(768, 2048, 12, 12, 12, 32000)


def _config(model: dict[str, Any], seq_len: int, rows: int, devices: int = 1, **settings: Any) -> Config:
    accumulation = settings.pop("accumulation", 1)
    batch = {"train__micro_batch": rows, "train__global_batch": rows * devices * accumulation}
    return step(model=model, data__seq_len=seq_len, **batch, **settings)


def on_gpu() -> dict[str, Config]:
    """Eager steps on one device, 160 M to 8 B, for a GPU of 80 GB but for the last one."""
    return {
        "160M, 1k": _config(SMALL, 1024, 8, **BFLOAT16),
        "160M, 2k, float32, SHARD_GRAD_OP": _config(SMALL, 2048, 4, sharding__strategy="SHARD_GRAD_OP"),
        "1.5B, 2k": _config(ONE_B, 2048, 4, **BFLOAT16),
        "1.5B, 16k, recomputed": _config(ONE_B, 16384, 1, **BFLOAT16, **FULL),
        "1.5B, 8k, products and attention kept": _config(ONE_B, 8192, 1, **BFLOAT16, **KEPT),
        "1.5B, 4k, offloaded, recomputed": _config(ONE_B, 4096, 2, memory__cpu_offload=True, **BFLOAT16, **FULL),
        "1.5B, 4k, NO_SHARD, three micro batches": _config(
            ONE_B, 4096, 2, accumulation=3, sharding__strategy="NO_SHARD", **BFLOAT16, **FULL
        ),
        "8B, 4k, bfloat16 at rest, recomputed": _config(
            EIGHT_B, 4096, 2, precision__master="bfloat16", **BFLOAT16, **FULL
        ),
    }


def on_cpu() -> dict[str, Config]:
    """For --tiny."""
    return {"tiny": _config({**LLAMA, "num_hidden_layers": 2}, 64, 2, **FULL)}


# ----------------------------------------------------------------------------------------------------- in processes


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def planned(config: Config, devices: int, device: str) -> dict[str, Any]:
    began, spent = time.monotonic(), time.process_time()
    target = parse_target("cpu" if device == "cpu" else "h100")
    hosts = 1 if device == "cpu" else -(-devices // PER_HOST)
    target = replace(target, hardware=replace(target.hardware, program=None), devices=devices, hosts=hosts)  # no limit
    memory = cuda.plan_memory(config, target).memory
    return _figures(memory) | {
        "plan_seconds": round(time.monotonic() - began, 1),
        "plan_processor_seconds": round(time.process_time() - spent, 1),
        "plan_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _figures(memory: DeviceMemory) -> dict[str, Any]:
    live = sum(size for part, size in memory.parts.items() if part not in ON_TOP)
    return {
        "planned_live_bytes": live,
        "planned_reserved_bytes": live + memory.parts.get("allocator", 0),
        "parts": memory.parts,
        "at": memory.at,
    }


def planned_as_torchtitan(config: Config, devices: int) -> dict[str, Any]:
    def attach(model: Any, *_: object) -> None:
        def forward(self: Any, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            logits = type(self).forward(self, input_ids=input_ids, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            return loss, (labels != -100).sum().float()

        model.forward = MethodType(forward, model)

    models_build.attach_loss = attach
    units.create_selective_checkpoint_contexts = cast(Any, _every_second_product)
    return planned(config, devices, "cuda")


def _every_second_product(_: object) -> Any:
    aten = torch.ops.aten
    seen = {False: 0, True: 0}

    def policy(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        if op is aten.mm.default:
            seen[context.is_recompute] += 1
            return (CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE)[seen[context.is_recompute] % 2]
        kept = op is aten._scaled_dot_product_flash_attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def tracked(config: Config, devices: int) -> int:
    """The peak that torch's FSDPMemTracker sees of the same two steps."""
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(fake, cuda.stand_in(), "cpu")  # its own record isn't used
    most = 0
    with (
        cuda.ranks(devices, min(devices, PER_HOST)),
        cuda.planned_backend(config, fake, recorder, whole=True) as backend,
        cuda._seen_by(recorder),
        patch.object(F, "scaled_dot_product_attention", cuda.gpu_attention),
    ):
        training = build_training(config, backend, vocabulary=1, fill=False)
        with fake:
            tracker = FSDPMemTracker(cast(Any, training.model), training.optimizer)
            for _ in range(2):
                rows = empty_batch(config, training, config.train.resolved_micro_batch, "cpu")
                batches = [backend.place(rows) for _ in range(training.accumulation)]
                with tracker:
                    training.step(batches, config.optim.lr, control_numbers(devices))
                found = cast(dict[Any, Any], tracker.get_tracker_snapshot("peak"))
                most = max(most, *(by_kind["Total"] for device, by_kind in found.items() if device == cuda.stand_in()))
                tracker.reset_mod_stats()
    return most


def measured(config: Config, device: str) -> dict[str, Any]:
    """Three steps of the trainer's on this machine: what the allocator says, or on CPU what lives."""
    with open_backend(config, device=device, backend="native", num_devices=1) as backend:
        if device == "cpu":
            return {"device": "cpu", "live_bytes": measure_on(backend, config).peak_bytes}
        training = build_training(config, backend, vocabulary=1)
        rows, length = config.train.resolved_micro_batch, config.data.seq_len
        ids = torch.randint(256, (rows, length))
        batch, control = {"input_ids": ids, "labels": ids}, control_numbers(1)
        control[0] = float(rows * length * training.accumulation)
        for _ in range(3):
            placed = [backend.place(batch) for _ in range(training.accumulation)]
            backend.fetch(training.step(placed, config.optim.lr, control)).result()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        return {
            "device": torch.cuda.get_device_name(),
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "outside_the_allocator_bytes": total - free - reserved,  # context, kernels, NCCL, other processes
        }


# ------------------------------------------------------------------------------------------------------------ parts


def references() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, settings in {"none": {}, "full": FULL}.items():
        config = _config(EIGHT_B, 8192, 2, 8, **BFLOAT16, **settings)
        found = apart(planned, config, 8, "cuda")
        found["reference_bytes"] = apart(tracked, config, 8)
        found["ratio"] = (found["planned_live_bytes"]) / found["reference_bytes"]
        rows.append({"what": f"8B on 8, 2 x 8192, checkpointing {name}: FSDPMemTracker", **found})
        _say(rows[-1])
    for devices, gibibytes in PUBLISHED.items():
        selective = {"memory__gradient_checkpointing": "selective", "memory__save_ops": ("matmul",)}
        config = _config(EIGHT_B, 8192, 2, devices, **BFLOAT16, **selective)
        found = apart(planned_as_torchtitan, config, devices)
        found["reference_bytes"] = int(gibibytes * GIBIBYTE)
        found["ratio"] = found["planned_reserved_bytes"] / found["reference_bytes"]
        rows.append({"what": f"8B on {devices}, 2 x 8192: torchtitan's max_reserved", "source": SOURCE, **found})
        _say(rows[-1])
    return rows


def cost() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, model, devices in (
        ("8B", EIGHT_B, 8),
        ("8B", EIGHT_B, 128),
        ("8B", EIGHT_B, 512),
        ("70B", SEVENTY_B, 256),
    ):
        rows.append(
            {
                "what": f"{name} on {devices}",
                **apart(planned, _config(model, 8192, 1, devices, **BFLOAT16, **FULL), devices, "cuda"),
            }
        )
        _say(rows[-1])
    return rows


def gpu(tiny: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    device = "cpu" if tiny else "cuda"
    for name, config in (on_cpu() if tiny else on_gpu()).items():
        row: dict[str, Any] = {"what": name, **apart(planned, config, 1, device)}
        try:
            row |= apart(measured, config, device)
        except Exception as error:  # out of memory, above all: a result of this row, and the others go on
            row["error"] = f"{type(error).__name__}: {error}"[:500]
        if "live_bytes" in row:
            row["ratio"] = row["planned_live_bytes"] / row["live_bytes"]
        elif "allocated_bytes" in row:
            row["ratio"] = row["planned_live_bytes"] / row["allocated_bytes"]
            row["ratio_reserved"] = row["planned_reserved_bytes"] / row["reserved_bytes"]
        rows.append(row)
        _say(row)
    return rows


def _say(row: dict[str, Any]) -> None:
    words = [f"planned live {row['planned_live_bytes'] / GIBIBYTE:.2f}"]
    words.append(f"reserved {row['planned_reserved_bytes'] / GIBIBYTE:.2f} GiB, {row['at']}")
    words += [f"{key} {row[key]:.3f}" for key in ("ratio", "ratio_reserved") if key in row]
    words.append(f"{row['plan_seconds']} s ({row['plan_processor_seconds']} of the processor)")
    words.append(f"{row['plan_rss_bytes'] / GIBIBYTE:.2f} GiB of RAM")
    print(f"{row['what']}: {'; '.join(words)}", row.get("error", ""), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Plans of GPU memory against references.")
    parser.add_argument("--parts", default="references,cost", help="some of references,cost,gpu")
    parser.add_argument("--out", type=Path, help="the JSON file to write, instead of one in results/")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, for --parts=gpu")
    arguments = parser.parse_args()
    parts = {"references": references, "cost": cost, "gpu": lambda: gpu(arguments.tiny)}
    asked = arguments.parts.split(",")
    if unknown := [name for name in asked if name not in parts]:
        sys.exit(f"--parts: expected some of {', '.join(parts)}, found {', '.join(unknown)}.")
    if "gpu" in asked and not arguments.tiny and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu_plan.py: --parts=gpu expects a GPU that torch can use, found none; --tiny needs none.")
    result: dict[str, Any] = {
        "command": ["python", "benchmarks/gpu_plan.py", *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    for name in asked:
        result[name] = parts[name]()
    where = arguments.out or HERE / "results" / f"gpu_plan{_device_of(result)}.json"
    where.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {where}")
    return 1 if any("error" in row for row in result.get("gpu", [])) else 0


def _device_of(result: dict[str, Any]) -> str:
    names = [row["device"] for row in result.get("gpu", []) if "device" in row]
    return "_" + re.sub(r"[^a-z0-9]+", "_", names[0].lower()) if names else ""


if __name__ == "__main__":
    sys.exit(main())
