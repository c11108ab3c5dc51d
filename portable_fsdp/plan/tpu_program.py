"""A traced step, on its way from the process that traces it to the one that compiles it."""

from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Base64Bytes, TypeAdapter

from portable_fsdp.plan.result import ModelFacts


def part_of(name: str) -> str:
    """The part of a device's memory that an argument takes, a key of `result.DeviceMemory.parts`."""
    before, slash, _ = name.partition("/")
    if slash:
        return "gradients" if before == "grad" else "optimizer"
    is_weight = not name.startswith("batch.") and " " not in name and name != "constant"
    return "weights" if is_weight else "batch"


@dataclass(frozen=True)
class Argument:
    """An input of a program, in the order of its parameters."""

    name: str  # as Backend.state's keys, with `grad/<FQN>` besides; `batch.<key>`; or `constant`
    shape: tuple[int, ...]
    sharding: str  # in XLA's words
    output: int | None  # number of the output that takes its place in memory


@dataclass(frozen=True)
class Program:
    """One global program, not yet partitioned."""

    name: str
    devices: int
    hlo: Base64Bytes  # a serialized HloModuleProto; base64 in JSON alone
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]  # shardings


class Traced(NamedTuple):
    """A config's step: `train_step`, or `micro_batch` and `update`; and the model that it trains."""

    programs: dict[str, Program]
    model: ModelFacts


TRACED = TypeAdapter(Traced)
"""Writes a traced step as JSON, and reads it."""
