"""The processor time of a tensor-parallel step beside the same step by DTensor: `parallelize_module` of torch.

python benchmarks/tensor_beside_dtensor.py [--pairs=100] [--write]

A Llama of 2 layers, hidden size 256, vocabulary 2,048, 4 rows of 128 tokens, float32, AdamW: little work per operation,
so that what each way adds is seen. Both models live in the same processes and take steps in turn. DTensor's way is
torchtitan's: layers by columns and rows, embedding and head by words, `loss_parallel`. Over 4 processes FSDP2 shards
both over 2. A ratio is the median over pairs of our processor time, summed over the processes, divided by DTensor's in
the same pair. `--write` writes results/tensor_beside_dtensor.md.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SEQ_LEN, ROWS, VOCABULARY, TENSOR = 128, 4, 2048, 2
ARCHITECTURE: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512},
    **{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    **{"max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False},
}
WAYS = {"whole rows": False, "split rows": True}  # sharding.sequence_parallel
WARM_UP = 5


def main() -> None:
    from torch.multiprocessing.spawn import spawn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    lines = [
        "# A tensor-parallel step beside DTensor's",
        "",
        f"`python benchmarks/tensor_beside_dtensor.py --write`: {arguments.pairs} pairs, torch {version('torch')}.",
        "",
        "| processes | ours, processor ms | DTensor's | ratio |",
        "|---|---|---|---|",
    ]
    for devices in (2, 4):
        for way, splits_rows in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                spawn(serve, (devices, splits_rows, arguments.pairs, folder), devices)
                files = [Path(folder, str(rank)).read_text().split("\n") for rank in range(devices)]
            pairs = [[float(number) for number in line.split()] for line in map(" ".join, zip(*files, strict=True))]
            ours, theirs = [sum(pair[::2]) for pair in pairs], [sum(pair[1::2]) for pair in pairs]
            ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
            mine, other = (1000 * statistics.median(seconds) for seconds in (ours, theirs))
            lines.append(f"| {devices // TENSOR} x {TENSOR}, {way} | {mine:.0f} | {other:.0f} | {ratio:.2f} |")
    print("\n".join(lines))
    if arguments.write:
        (Path(__file__).parent / "results" / "tensor_beside_dtensor.md").write_text("\n".join([*lines, ""]))


def serve(rank: int, devices: int, splits_rows: bool, pairs: int, folder: str) -> None:
    """Write the seconds of each pair of steps to a file of this process."""
    import torch
    import torch.distributed as dist

    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": devices, "LOCAL_WORLD_SIZE": devices}
    os.environ.update({name: str(value) for name, value in launched.items()})
    # The rendezvous is a file of this benchmark; address and port are for our own check of the launch.
    os.environ.update(
        {"USE_TORCH_XLA": "0", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=devices)
    rows = torch.randint(VOCABULARY, (ROWS * TENSOR // devices, SEQ_LEN))
    dist.broadcast(rows, 0)
    seconds: list[tuple[float, float]] = []
    with _ours(devices, splits_rows, rows) as ours:
        theirs = _dtensors(devices, rows)
        for _ in range(WARM_UP + pairs):
            seconds.append((_processor_time(ours), _processor_time(theirs)))
    Path(folder, str(rank)).write_text("\n".join(f"{a} {b}" for a, b in seconds[WARM_UP:]))
    dist.destroy_process_group()


def _processor_time(step: Callable[[], float]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


@contextmanager
def _ours(devices: int, splits_rows: bool, rows: Any) -> Generator[Callable[[], float]]:
    import portable_fsdp as pf

    values: dict[str, dict[str, Any]] = {
        "model": {"architecture": ARCHITECTURE},
        "data": {"source": "text", "path": str(ROOT / "README.md"), "seq_len": SEQ_LEN},
        "train": {"steps": 2000, "global_batch": ROWS, "micro_batch": len(rows), "max_grad_norm": None},
        "optim": {"lr": 1e-4, "schedule": "constant", "warmup_steps": 0},
        "sharding": {"tensor": TENSOR, "sequence_parallel": splits_rows},
    }
    make: Any = pf.make_config
    config = make(**values)
    with pf.open_backend(config, device="cpu", backend="native", num_devices=devices) as backend:
        training = pf.build_training(config, backend, VOCABULARY)
        batch = {"input_ids": rows, "labels": rows}

        def step() -> float:
            metrics = training.step([backend.place(batch)], 1e-4, [rows.numel() - len(rows)])
            return float(backend.fetch(metrics).result()["loss"])

        yield step


def _dtensors(devices: int, rows: Any) -> Callable[[], float]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURE), attn_implementation="sdpa")
    mesh = init_device_mesh("cpu", (devices // TENSOR, TENSOR), mesh_dim_names=("shard", "tensor"))
    plan: dict[str, Any] = {
        **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        **{"model.layers.*.self_attn.o_proj": RowwiseParallel(), "model.layers.*.mlp.down_proj": RowwiseParallel()},
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh["tensor"], plan)
    if devices > TENSOR:
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    labels = torch.nn.functional.pad(rows[:, 1:], (0, 1), value=-100)
    positions = torch.arange(SEQ_LEN)[None]

    def step() -> float:
        with loss_parallel():
            logits = model(input_ids=rows, position_ids=positions, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


if __name__ == "__main__":
    main()
