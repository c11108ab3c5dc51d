"""The minimum memory of a run, logged and compared with devices and hosts before any weight is allocated.

It is a lower bound, so that no run that fits is refused: it omits activations, gathered weights, buffers and programs,
assumes even shards, and counts memory used by other programs as free.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from portable_fsdp.backends.contract import Backend, MakeOptimizer
from portable_fsdp.backends.state import optimizer_state_twins
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.host import host_identity, host_memory_bytes, in_units

if TYPE_CHECKING:
    from portable_fsdp.quantised import ByteTable

log = logging.getLogger("portable_fsdp")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one replica of the model, over all devices that share it."""

    parameters: int  # number of parameters
    trained: int  # number of trained parameters
    weights: int
    gradients: int  # 0 if the program may free each gradient as soon as it is used
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer state": self.optimizer}
        return ", ".join(f"{name} {in_units(part)}" for name, part in parts.items() if part)


Room = tuple[tuple[str, str], int, int | None]
"""Memory of a process: its host (machine, container), the host's bytes, shared by its processes, and the bytes of each
device; None if the engine doesn't know them."""


def memory_need(
    model: nn.Module,
    make: MakeOptimizer,
    groups: list[dict[str, Any]],
    *,
    eager: bool,
    tables: Mapping[str, "ByteTable"],
) -> MemoryNeed:
    """Return the memory that a model on meta will need.

    `groups`: parameter groups with FQNs of the trained weights in `params`; `eager`: a step keeps all gradients between
    backward and the optimizer step; `tables`: will hold weights, quantised.
    """
    parameters = dict(model.named_parameters())
    trained = [weight for weight in parameters.values() if weight.requires_grad]
    states = optimizer_state_twins(make, groups, {fqn: parameters[fqn] for group in groups for fqn in group["params"]})
    return MemoryNeed(
        parameters=sum(weight.numel() for weight in parameters.values()),
        trained=sum(weight.numel() for weight in trained),
        weights=sum(tables.get(fqn, weight).nbytes for fqn, weight in parameters.items()),
        gradients=sum(weight.nbytes for weight in trained) if eager else 0,
        optimizer=sum(value.nbytes for state in states.values() for value in state.values()),
    )


def require_memory(config: Config, backend: Backend, need: MemoryNeed) -> None:
    """Log the memory need. Raises ConfigError, identical on all processes, if it exceeds the memory. *collective*"""
    memory = backend.memory()
    room = host_identity(), host_memory_bytes(), None if memory is None else memory.limit_bytes
    rests_on_host = config.memory.cpu_offload or backend.device_name == "cpu"
    log.info("%s", check_memory(need, backend.gather(room), backend.axes, rests_on_host=rests_on_host))


def check_memory(need: MemoryNeed, rooms: Sequence[Room], axes: Mapping[str, int], *, rests_on_host: bool) -> str:
    """Return one line about memory needed and available; `rooms`: of all processes. Raises ConfigError if it can't fit.
    `rests_on_host`: weights, gradients and optimizer state are in host memory (offload, or the CPU as device)."""
    devices, copies = math.prod(axes.values()), axes["replicate"]
    on_device, place = need.total * copies // devices, "a device"
    shares = [(on_device, limit) for _, _, limit in rooms if limit is not None]
    if rests_on_host:
        on_process, processes, place = (
            on_device * devices // len(rooms),
            Counter(host for host, _, _ in rooms),
            "a host",
        )
        shares = [(on_process * processes[host], size) for host, size, _ in rooms]
    required, limit = max(shares, key=lambda share: share[0] / share[1], default=(on_device, None))  # the fullest
    times = f", {copies} times" if copies > 1 else ""
    if limit is not None and required > limit:
        raise ConfigError(
            f"model: the run doesn't fit into memory: {need.parameters:,} parameters need at least "
            f"{in_units(required)} on {place},\n  which has {in_units(limit)}: {need}{times}.\n"
            "  Use more devices or hosts, sharding.strategy=FULL_SHARD, precision.master=bfloat16, model.lora={} or a "
            "smaller model."
        )
    trained = "" if need.trained == need.parameters else f" ({need.trained:,} train)"
    has = f" of {in_units(limit)}" if limit is not None else ""
    return f"{need.parameters:,} parameters{trained}: {need}{times}; at least {in_units(required)}{has} on {place}"
