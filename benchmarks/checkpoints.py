"""Saving and loading a checkpoint: ours, torch's dcp, and torch.save of a full state dict, interleaved in one run.

    torchrun --standalone --nproc_per_node=2 benchmarks/checkpoints.py

The state is that of an FSDP2 model on gloo processes: float32 weights and both moments of AdamW, the same tensors for
all ways, written to the same disk, all fsynced. Ours hashes what it writes, and what it reads (`verify: full`). Ways
alternate A B C C B A; a figure is the median of its rounds, in wall time, from a barrier to the last process's end.
Beside it, what one process takes to plan a load of Llama 3 8B from the manifest of 512 processes.
"""

import argparse
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

os.environ["USE_TORCH_XLA"] = "0"  # transformers imports torch_xla otherwise

import torch
import torch.distributed as dist
from measuring import RESULTS, in_turns, machine, write_json
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from portable_fsdp.backends.contract import Backend, Partition
from portable_fsdp.backends.open import open_backend
from portable_fsdp.checkpoint.commit import Index, merge
from portable_fsdp.checkpoint.manager import Checkpoints
from portable_fsdp.checkpoint.manifests import (
    DataPosition,
    FileEntry,
    Manifest,
    TensorEntry,
    WrittenBy,
    folder_of,
    manifest_text,
)
from portable_fsdp.checkpoint.store import Reader, touching
from portable_fsdp.config.schema import Checkpoint, Config
from portable_fsdp.layout import rows_of_shard
from portable_fsdp.train.build import Training, build_training

RANKS = 512
GOALS = {"save: ours / dcp": 1 / 0.95, "load: ours / dcp": 1 / 0.95, "save: blocked / ours": 0.35, "plan: seconds": 1.0}


def config(folder: Path, layers: int) -> Config:
    """11.5 million parameters a layer, and 8.4 million beside them."""
    architecture = {
        **{"model_type": "llama", "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816},
        **{"num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 4},
        **{"max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
    }
    return Config.model_validate(
        {
            "run": {"dir": str(folder)},
            "model": {"architecture": architecture},
            "data": {"seq_len": 64},
            "train": {"steps": 1, "global_batch": dist.get_world_size()},
        }
    )


class Ways:
    """Each way to save and to load, over the same live state. A method returns its seconds on the slowest process."""

    def __init__(self, folder: Path, backend: Backend, training: Training, configuration: Config) -> None:
        self.folder, self.backend, self.training = folder, backend, training
        self.config = configuration.model_dump(mode="json")
        self.model, self.optimizer = training.model, training.optimizer
        self.count = 0

    def save(self, way: str) -> tuple[float, float]:
        """Seconds until the checkpoint is committed, and seconds that the training stands still."""
        path = self._new_folder()
        blocked: list[float] = []
        seconds = self._timed(lambda: blocked.append(getattr(self, f"_save_{way}")(path)))
        return seconds, self._slowest(blocked[0]) or seconds

    def load(self, way: str) -> float:
        return self._timed(lambda: getattr(self, f"_load_{way}")(self.folder / f"of-{way}"))

    def keep(self, way: str) -> None:
        """A checkpoint of each way, to load."""
        getattr(self, f"_save_{way}")(self.folder / f"of-{way}")

    def _save_ours(self, path: Path) -> float:
        self._checkpoints(path, Checkpoint()).save(1, self.model, self.optimizer, (0, 0))
        return 0.0

    def _save_background(self, path: Path) -> float:
        checkpoints = self._background
        checkpoints.folder = path
        began = time.perf_counter()
        checkpoints.save(1, self.model, self.optimizer, (0, 0))
        blocked = time.perf_counter() - began
        checkpoints.wait()
        return blocked

    def _save_dcp(self, path: Path) -> float:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(path))
        return 0.0

    def _save_full(self, path: Path) -> float:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
            with (path / "state.pt").open("wb") as file:
                torch.save({"model": model, "optimizer": optimizer}, file)
                file.flush()
                os.fsync(file.fileno())
        return 0.0

    def _load_ours(self, path: Path) -> None:
        checkpoints = self._checkpoints(path, Checkpoint())
        found = checkpoints.find("auto")
        assert found is not None
        checkpoints.load(found, self.model, self.optimizer)

    def _load_dcp(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state_dict_loader.load({"model": model, "optimizer": optimizer}, checkpoint_id=str(path))
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def _load_full(self, path: Path) -> None:
        state = torch.load(path / "state.pt", mmap=True, weights_only=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )

    def _checkpoints(self, path: Path, settings: Checkpoint) -> Checkpoints:
        return Checkpoints(path, self.backend, config=self.config, model_config={}, settings=settings)

    def prepare(self) -> None:
        """The background's buffers are there from the second save on."""
        self._background = self._checkpoints(self._new_folder(), Checkpoint(async_save=True))
        self._background.save(1, self.model, self.optimizer, (0, 0))
        self._background.wait()

    def _new_folder(self) -> Path:
        shutil.rmtree(self.folder / f"{self.count}", ignore_errors=True) if dist.get_rank() == 0 else None
        self.count += 1
        return self.folder / f"{self.count}"

    def _timed(self, work: Callable[[], object]) -> float:
        dist.barrier()
        began = time.perf_counter()
        work()
        return self._slowest(time.perf_counter() - began)

    def _slowest(self, seconds: float) -> float:
        return max(self.backend.gather(seconds))


def measure(ways: Ways, rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, by what was done."""
    loads = {way: way for way in ("ours", "dcp", "full")}
    for way in loads:
        ways.keep(way)
    saved = in_turns({"ours": "ours", "background": "background", "dcp": "dcp", "full": "full"}, rounds, ways.save)
    loaded = in_turns(loads, rounds, ways.load)
    return {
        **{f"save {way}": [seconds for seconds, _ in values] for way, values in saved.items()},
        "save blocked": [blocked for _, blocked in saved["background"]],
        **{f"load {way}": values for way, values in loaded.items()},
    }


def plan(folder: Path) -> dict[str, float]:
    """CPU seconds to read the manifest of Llama 3 8B's state from 512 processes, and to find one process's pieces."""
    shapes = {
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(32)
        for name, shape in {
            **{"self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.v_proj": (1024, 4096)},
            **{"self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (14336, 4096), "mlp.up_proj": (14336, 4096)},
            **{"mlp.down_proj": (4096, 14336), "input_layernorm": (4096,), "post_attention_layernorm": (4096,)},
        }.items()
    } | {"model.embed_tokens.weight": (128256, 4096), "lm_head.weight": (128256, 4096), "model.norm.weight": (4096,)}
    states = {f"{prefix}{key}": shape for prefix in ("", "exp_avg/", "exp_avg_sq/") for key, shape in shapes.items()}
    (folder / "manifest.json").write_text(manifest_text(_manifest(states)))
    began = time.process_time()
    with Reader(folder) as reader:
        for key, shape in states.items():
            rows = rows_of_shard(shape[0], 200, RANKS + 1)  # another world size: slices that cross pieces
            touching(reader.manifest.tensors[key], (rows, *(slice(0, size) for size in shape[1:])))
    seconds = time.process_time() - began
    pieces = sum(len(tensor.files) for tensor in reader.manifest.tensors.values())
    return {"seconds": seconds, "pieces": pieces, "manifest_bytes": (folder / "manifest.json").stat().st_size}


def _manifest(shapes: dict[str, tuple[int, ...]]) -> Manifest:
    entries = {key: TensorEntry(shape=shape, dtype="float32") for key, shape in shapes.items()}
    files, tensors = merge(entries, [_index(rank, shapes) for rank in range(RANKS)])
    by = WrittenBy(device="d", backend="b", process_count=RANKS, torch="t", portable_fsdp="p")
    return Manifest(
        format_version=1,
        step=1,
        saved_at="",
        config={},
        model_config=None,
        data=DataPosition(epoch=0, position=0),
        ties={},
        written_by=by,
        files=files,
        tensors=tensors,
    )


def _index(rank: int, shapes: dict[str, tuple[int, ...]]) -> Index:
    tensors: dict[str, TensorEntry] = {}
    for key, shape in shapes.items():
        rows = rows_of_shard(shape[0], rank, RANKS)
        if rows.start == rows.stop:
            continue
        tensors[key] = TensorEntry(
            shape=shape,
            dtype="float32",
            files=[int(folder_of(key) == "optimizer")],
            offsets=[rows.start, *[0] * (len(shape) - 1)],
            sizes=[rows.stop - rows.start, *shape[1:]],
        )
    files = tuple(
        FileEntry(name=f"{folder}/shard-{rank:05d}-00.safetensors", bytes=2**40, xxh3_128="0" * 32)
        for folder in ("model", "optimizer")
    )
    return Index(attempt="", process=rank, files=files, tensors=tensors)


def report(seconds: dict[str, list[float]], planned: dict[str, float], bytes_: int) -> dict[str, Any]:
    """Medians, ratios, and where they were found."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    pairs = [(what, way) for what in ("save", "load") for way in ("dcp", "full")]
    figures = {
        **{f"{what}: ours / {way}": median[f"{what} ours"] / median[f"{what} {way}"] for what, way in pairs},
        "save: blocked / ours": median["save blocked"] / median["save ours"],
        "plan: seconds": planned["seconds"],
    }
    return {
        "what": (__doc__ or "").splitlines()[0],
        "command": " ".join(["torchrun --standalone --nproc_per_node=2 benchmarks/checkpoints.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "state_bytes": bytes_,
        "processes": dist.get_world_size(),
        "seconds": seconds,
        "plan": planned,
        "figures": figures,
        "goals": GOALS,
        "environment": {"python": platform.python_version(), "torch": str(torch.__version__), **machine()},
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':<24}{'median s':>10}{'least s':>10}{'most s':>10}"]
    for name, values in cast(dict[str, list[float]], result["seconds"]).items():
        lines.append(f"{name:<24}{statistics.median(values):>10.2f}{min(values):>10.2f}{max(values):>10.2f}")
    for name, value in result["figures"].items():
        goal = GOALS.get(name)
        lines.append(f"{name:<24}{value:>10.2f}" + ("" if goal is None else f"   goal: at most {goal:.2f}"))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=6, help="6 make 0.93 GB of state")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where to write; a new folder below it, deleted at the end")
    parser.add_argument("--out", type=Path, help="the JSON file to write, instead of one in results/")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as mine:
        configuration = config(Path(mine), arguments.layers)
        with open_backend(configuration, device="cpu", backend="native") as backend:
            folder = Path(backend.agree(mine))
            training = build_training(configuration, backend, vocabulary=4096)
            ways = Ways(folder, backend, training, configuration)
            ways.prepare()
            seconds = measure(ways, arguments.rounds)
            if backend.process == Partition(0, dist.get_world_size()):
                state = backend.state(training.model, training.optimizer).values()
                size = sum(torch.Size(one.shape).numel() * one.dtype.itemsize for one in state)
                result = report(seconds, plan(Path(mine)), size)
                print(table(result))
                write_json(arguments.out or RESULTS / "checkpoints.json", result)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
