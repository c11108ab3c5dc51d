"""What a run surely needs of memory: told, and held against what devices and hosts have, before a weight is made.

A lower bound, so that nothing is refused that would run: activations, gathered weights, buffers and the program itself
aren't counted, a shard is taken for an even part, and memory that others use for free.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from portable_fsdp.backends.base import Backend, MakeOptimizer, optimizer_state_twins
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.host import host_identity, host_memory_bytes, in_units

log = logging.getLogger("portable_fsdp")


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes of one copy of the model, over all devices that share it."""

    parameters: int  # their number
    trained: int  # of them
    weights: int
    gradients: int  # 0 where a program may free each as soon as it is used
    optimizer: int
    largest_weight: int  # as it is drawn on the host, in float32

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer state": self.optimizer}
        return ", ".join(f"{name} {in_units(part)}" for name, part in parts.items() if part)


class Room(NamedTuple):
    """What a process has."""

    host: tuple[str, str]  # machine and container; processes of both share one limit
    host_bytes: int  # of all its processes together
    device_bytes: int | None  # of each of its devices; None where the engine doesn't tell


def memory_need(model: nn.Module, make: MakeOptimizer, groups: list[dict[str, Any]], *, eager: bool) -> MemoryNeed:
    """Of a model on meta. `groups` name what is trained, by FQN, under `params`; `eager`: a step keeps all gradients
    from the end of the backward to the optimizer."""
    parameters = dict(model.named_parameters())
    trained = [weight for weight in parameters.values() if weight.requires_grad]
    states = optimizer_state_twins(make, groups, {fqn: parameters[fqn] for group in groups for fqn in group["params"]})
    return MemoryNeed(
        parameters=sum(weight.numel() for weight in parameters.values()),
        trained=sum(weight.numel() for weight in trained),
        weights=sum(weight.nbytes for weight in parameters.values()),
        gradients=sum(weight.nbytes for weight in trained) if eager else 0,
        optimizer=sum(value.nbytes for state in states.values() for value in state.values()),
        largest_weight=max(4 * weight.numel() for weight in parameters.values()),
    )


def require_memory(config: Config, backend: Backend, need: MemoryNeed) -> None:
    """Tell what the run needs. Raises ConfigError, the same on all processes, where that is too much. *collective*"""
    memory = backend.memory()
    room = Room(host_identity(), host_memory_bytes(), None if memory is None else memory.limit_bytes)
    rests_on_host = config.memory.cpu_offload or backend.device_name == "cpu"
    log.info("%s", check_memory(config, need, backend.gather(room), backend.axes, rests_on_host=rests_on_host))


def check_memory(
    config: Config, need: MemoryNeed, rooms: Sequence[Room], axes: Mapping[str, int], *, rests_on_host: bool
) -> str:
    """One line on what the run needs and what there is; `rooms`: of all processes. Raises ConfigError if it can't fit.

    `rests_on_host`: weights, gradients and optimizer state do, with offload and where the CPU is the device.
    """
    processes = Counter(room.host for room in rooms)
    devices, copies = math.prod(axes.values()), axes["replicate"]
    on_device = need.total * copies // devices
    host, on_host, host_has = max(
        (
            (
                name,
                on_device * devices // len(rooms) * count,
                min(room.host_bytes for room in rooms if room.host == name),
            )
            for name, count in processes.items()
        ),
        key=lambda one: one[1] / one[2],
    )
    limits = [room.device_bytes for room in rooms if room.device_bytes is not None]
    if rests_on_host and on_host > host_has:
        where = f"a host with {processes[host]} of the {len(rooms)} process(es)"
        raise _too_much(config, need, f"{in_units(on_host)} on {where}", f"{in_units(host_has)} (with swap)", copies)
    if not rests_on_host and limits and on_device > min(limits):
        raise _too_much(
            config,
            need,
            f"{in_units(on_device)} on each of {devices} device(s)",
            in_units(min(limits)),
            copies,
        )
    if rests_on_host:
        on_a_host = f"{in_units(on_host)} of {in_units(host_has)} on a host"
        place = f"{in_units(on_device)} for each of {devices} device(s), {on_a_host}"
    else:
        has = f" of {in_units(min(limits))}" if limits else ""
        place = f"{in_units(on_device)}{has} on each of {devices} device(s), {in_units(need.largest_weight)} on a host"
    trained = "" if need.trained == need.parameters else f" ({need.trained:,} train)"
    times = f", {copies} times" if copies > 1 else ""
    return f"{need.parameters:,} parameters{trained}: {need}{times}; at least {place}"


def _too_much(config: Config, need: MemoryNeed, needs: str, has: str, copies: int) -> ConfigError:
    times = f", {copies} times" if copies > 1 else ""
    return ConfigError(
        f"model: expected a run that fits into memory, found that {need.parameters:,} parameters need at least "
        f"{needs},\n  which has {has}: {need}{times}.\n  Ways out: {'; '.join(_ways(config, copies))}. "
        "Nothing was started."
    )


def _ways(config: Config, copies: int) -> Iterator[str]:
    if copies > 1:
        yield "sharding.strategy=FULL_SHARD, one copy over all devices"
    yield "more hosts" if config.memory.cpu_offload else "more devices or hosts"
    if config.precision.master == "float32":
        yield "precision.master=bfloat16, half of it"
    if config.model.lora is None:
        yield "model.lora={}, no gradients and optimizer state but the adapters'"
    elif config.precision.frozen == "auto":
        yield "precision.frozen=bfloat16"
    if not config.memory.cpu_offload:
        yield "on GPUs memory.cpu_offload=true"
    yield "a smaller model"
