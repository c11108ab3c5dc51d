"""Bytes of the tensors' storages in a real run: counted, not planned.

Before and after each operator, every storage that an operator has taken or given, and that still exists, is asked for
its size. The planner, which is held against it, listens to allocations instead.
"""

import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from jobs import open_group
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portable_fsdp.backends.contract import Backend
from portable_fsdp.config.schema import Config
from portable_fsdp.data.build import build_data
from portable_fsdp.data.packing import Rows
from portable_fsdp.train.build import build_training
from portable_fsdp.train.measures import control_numbers

STEPS = 2


class Measured(NamedTuple):
    """Measurements of one process."""

    peak_bytes: int  # of live storages
    collectives: dict[str, tuple[int, int]]  # kind -> calls, bytes, as the engine counts its first step


def measure(config: Config) -> Measured:
    """A job of a group: `measure_on` all its devices."""
    with open_group(config) as backend:
        return measure_on(backend, config)


def measure_on(backend: Backend, config: Config) -> Measured:
    """Train that many steps; weights and optimizer state exist before."""
    rows = build_data(config.data).rows if config.data.factory else None
    training = build_training(config, backend, vocabulary=256, rows=rows)
    state = [value for values in training.optimizer.state.values() for value in values.values()]
    with LiveStorages() as live:
        live.see([*training.model.parameters(), *training.model.buffers(), *state])
        for _ in range(STEPS):
            made = [_batch(config, rows) for _ in range(training.accumulation)]
            batches = [backend.place(batch) for batch in made]
            control = control_numbers(backend.process.count)
            control[0] = float(config.train.resolved_micro_batch * config.data.seq_len * len(made))
            backend.fetch(training.step(batches, 1e-3, control)).result()
    counted = backend.collectives or {}
    return Measured(live.peak, {kind: (traffic.calls, traffic.bytes) for kind, traffic in counted.items()})


def _batch(config: Config, rows: Rows | None) -> dict[str, Tensor]:
    count, length = config.train.resolved_micro_batch, config.data.seq_len
    if rows is not None:
        return rows.rows(np.arange(count))
    ids = torch.randint(256, (count, length))
    batch = {"input_ids": ids, "labels": ids}
    if config.data.resolved_packing == "documents":
        places = torch.arange(length).expand(count, -1)
        batch |= {"positions": places % 100, "segments": places // 100 + 1}
    return batch


class LiveStorages(TorchDispatchMode):
    """`bytes` that storages of tensors hold, and the most that they held at once, both seen at operators."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}

    def see(self, values: Any) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, DTensor):
                leaf = leaf.to_local()
            is_real = isinstance(leaf, Tensor) and not isinstance(leaf, FakeTensor)  # DTensor asks fake ones for shapes
            if is_real and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = weakref.ref(storage)
        self._storages = {key: reference for key, reference in self._storages.items() if reference() is not None}
        self.bytes = sum(_bytes(reference()) for reference in self._storages.values())
        self.peak = max(self.peak, self.bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented
        self.see((args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.see(out)
        return out


def _bytes(storage: Any) -> int:
    """Return the bytes of a storage; 0 if it is gone."""
    try:
        return 0 if storage is None else storage.nbytes()
    except RuntimeError:  # a gloo thread has just released it: "Got a null Storage"
        return 0
