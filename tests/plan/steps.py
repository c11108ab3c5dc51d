"""Train steps that are planned in one process, and run for real in two others, where live storages are counted.

The count shares nothing with the planner: before and after each operator it asks every storage that an operator has
taken or given, and that still exists, for its size.
"""

import multiprocessing
import os
import socket
import weakref
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portable_fsdp.config.schema import Config
from portable_fsdp.plan.result import Memory, Work

PROCESSES = 2
ROWS, SEQ_LEN = 2, 256
LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408},
    **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024},
}
MIXTRAL: dict[str, Any] = {
    **LLAMA,
    **{"model_type": "mixtral", "intermediate_size": 512, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def step(devices: int = PROCESSES, accumulation: int = 1, model: dict[str, Any] = LLAMA, **settings: Any) -> Config:
    """A config; settings by their keys, with `__` for the dot: `memory__cpu_offload=True`."""
    values: dict[str, dict[str, Any]] = {
        "model": {"architecture": model},
        "data": {"seq_len": SEQ_LEN},
        "train": {"steps": 10, "global_batch": devices * ROWS * accumulation, "micro_batch": ROWS},
    }
    for key, value in settings.items():
        section, _, name = key.partition("__")
        values.setdefault(section, {})[name] = value
    return Config.model_validate(values)


def in_a_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def plans(configs: list[Config], devices: int, device: str, devices_per_host: int = 8) -> list[tuple[Memory, Work]]:
    """For a child: a plan of each config, one after the other in one process."""
    from portable_fsdp.plan.cuda import plan_memory

    torch.set_num_threads(1)
    return [plan_memory(config, devices, devices_per_host, limit_bytes=None, device=device) for config in configs]  # type: ignore[arg-type]


def measured(configs: list[Config]) -> list[list[int]]:
    """Config -> the peak of live storage bytes of each of two gloo processes, over three steps."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, context, initializer=_nothing) as pool:
        barrier = context.Manager().Barrier(PROCESSES)
        found = [pool.submit(_peaks, configs, rank, port, barrier) for rank in range(PROCESSES)]
        by_rank = [one.result() for one in found]
    return [list(peaks) for peaks in zip(*by_rank, strict=True)]


def _nothing() -> None:
    pass


def _peaks(configs: list[Config], rank: int, port: int, barrier: Any) -> list[int]:
    barrier.wait()  # each process of the pool takes one of the two jobs
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"})
    torch.distributed.init_process_group("gloo")
    return [_peak(config) for config in configs]


def _peak(config: Config) -> int:
    from portable_fsdp.backends.open import open_backend
    from portable_fsdp.train.loop import build

    with open_backend(config, device="cpu", backend="native", num_devices=PROCESSES) as backend:
        training = build(config, backend, vocabulary=256)
        state = [value for values in training.optimizer.state.values() for value in values.values()]
        with LiveStorages() as live:
            live.see([*training.model.parameters(), *training.model.buffers(), *state])
            for _ in range(3):
                batches = [backend.place(_batch()) for _ in range(training.accumulation)]
                backend.fetch(training.step(batches, 1e-3)).result()
    return live.peak


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(256, (ROWS, SEQ_LEN))
    news = {"stop": torch.zeros(ROWS), "processes": torch.zeros(ROWS, 3 * PROCESSES)}
    return {"input_ids": ids, "labels": ids, "tokens": torch.full((ROWS,), float(SEQ_LEN)), **news}


class LiveStorages(TorchDispatchMode):
    """`peak`: the most bytes that storages of tensors held at once, seen at operators."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def see(self, values: Any) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, DTensor):
                leaf = leaf.to_local()
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        self._look()

    def _look(self) -> None:
        storages = {key: reference() for key, reference in self._storages.items()}
        self._storages = {key: self._storages[key] for key, storage in storages.items() if storage is not None}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in storages.values() if storage is not None))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        self.see((args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.see(out)
        return out
