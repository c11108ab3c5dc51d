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

from portable_fsdp.backends.contract import Backend, MakeOptimizer, name_groups, optimizer_state_twins
from portable_fsdp.config.schema import Config
from portable_fsdp.optim.counting import skips_on_device
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.host import host_identity, host_memory_bytes, in_units

if TYPE_CHECKING:
    from portable_fsdp.quantised.tables import ByteTable

log = logging.getLogger("portable_fsdp")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one replica of the model, over all devices that share it."""

    parameters: int  # number of parameters
    trained: int  # number of trained parameters
    weights: int
    gradients: int  # 0 if the program may free each gradient as soon as it is used
    optimizer: int
    largest_weight: int  # initialized on the host in float32
    copies: int = 0  # copies of weights and state during a step, for an optimizer that can't skip it on the device

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.copies

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer state": self.optimizer}
        parts["their copies during a step (found_inf: docs/optimizers.md)"] = self.copies
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
    own: bool,
    tables: Mapping[str, "ByteTable"],
) -> MemoryNeed:
    """Return the memory that a model on meta will need.

    `groups`: parameter groups with FQNs of the trained weights in `params`; `eager`: a step keeps all gradients between
    backward and the optimizer step; `own`: the optimizer is the user's; `tables`: will hold weights, quantised.
    """
    parameters = dict(model.named_parameters())
    trained = [weight for weight in parameters.values() if weight.requires_grad]
    states = optimizer_state_twins(make, groups, {fqn: parameters[fqn] for group in groups for fqn in group["params"]})
    optimizer = sum(value.nbytes for state in states.values() for value in state.values())
    # On meta torch's own optimizers don't show that they skip a step on a device.
    copies = own and eager and not skips_on_device(make(name_groups(groups, parameters), False))
    return MemoryNeed(
        parameters=sum(weight.numel() for weight in parameters.values()),
        trained=sum(weight.numel() for weight in trained),
        weights=sum(tables.get(fqn, weight).nbytes for fqn, weight in parameters.items()),
        gradients=sum(weight.nbytes for weight in trained) if eager else 0,
        optimizer=optimizer,
        largest_weight=max(4 * weight.numel() for weight in parameters.values()),
        copies=sum(weight.nbytes for weight in trained) + optimizer if copies else 0,
    )


def require_memory(config: Config, backend: Backend, need: MemoryNeed) -> None:
    """Log the memory need. Raises ConfigError, identical on all processes, if it exceeds the memory. *collective*"""
    memory = backend.memory()
    room = host_identity(), host_memory_bytes(), None if memory is None else memory.limit_bytes
    rests_on_host = config.memory.cpu_offload or backend.device_name == "cpu"
    log.info("%s", check_memory(config, need, backend.gather(room), backend.axes, rests_on_host=rests_on_host))


def check_memory(
    config: Config, need: MemoryNeed, rooms: Sequence[Room], axes: Mapping[str, int], *, rests_on_host: bool
) -> str:
    """Return one line about memory needed and available; `rooms`: of all processes. Raises ConfigError if it can't fit.
    `rests_on_host`: weights, gradients and optimizer state are in host memory (offload, or the CPU as device)."""
    devices, copies = math.prod(axes.values()), axes["replicate"]
    on_device = need.total * copies // devices
    limits = [limit for _, _, limit in rooms if limit is not None]
    by_host = [
        (on_device * devices // len(rooms) * count, min(size for other, size, _ in rooms if other == host), count)
        for host, count in Counter(host for host, _, _ in rooms).items()
    ]
    on_host, host_limit, count = max(by_host, key=lambda host: host[0] / host[1])  # the fullest
    times = f", {copies} times" if copies > 1 else ""
    problem = ""
    if rests_on_host:
        place = f"{in_units(on_device)} for each of {devices} device(s), {in_units(on_host)} of {in_units(host_limit)}"
        if on_host > host_limit:
            where = f"a host with {count} of the {len(rooms)} process(es)"
            problem = f"{in_units(on_host)} on {where},\n  which has {in_units(host_limit)} (with swap)"
    else:
        has = f" of {in_units(min(limits))}" if limits else ""
        place = f"{in_units(on_device)}{has} on each of {devices} device(s), {in_units(need.largest_weight)}"
        if limits and on_device > min(limits):
            problem = f"{in_units(on_device)} on each of {devices} device(s),\n  which has {in_units(min(limits))}"
    if problem:
        lora, offload = config.model.lora, config.memory.cpu_offload
        fixes = {
            "sharding.strategy=FULL_SHARD, one replica over all devices": copies > 1,
            "more hosts" if offload else "more devices or hosts": True,
            "precision.master=bfloat16, which needs half": config.precision.master == "float32",
            "model.lora={}, with gradients and optimizer state only of adapters": lora is None,
            "precision.frozen=bfloat16, or nf4": lora is not None and config.precision.frozen == "auto",
            "on GPUs memory.cpu_offload=true": not offload,
            "a smaller model": True,
        }
        raise ConfigError(
            f"model: the run doesn't fit into memory: {need.parameters:,} parameters need at least "
            f"{problem}: {need}{times}.\n  Fixes: {'; '.join(fix for fix, helps in fixes.items() if helps)}."
        )
    trained = "" if need.trained == need.parameters else f" ({need.trained:,} train)"
    return f"{need.parameters:,} parameters{trained}: {need}{times}; at least {place} on a host"
