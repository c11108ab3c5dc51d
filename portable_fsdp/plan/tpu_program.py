"""A traced step, on its way from the process that traces it to the one that compiles it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from portable_fsdp.plan.result import ModelFacts


@dataclass(frozen=True)
class Argument:
    """An input of a program, in the order of its parameters."""

    name: str  # as Backend.state's keys, with `grad/<FQN>` besides; `batch.<key>`; or `constant`
    shape: tuple[int, ...]
    sharding: str  # in XLA's words
    output: int | None  # number of the output that takes its place in memory

    @property
    def part(self) -> str:
        """Its part of a device's memory, a key of `result.DeviceMemory.parts`."""
        before, slash, _ = self.name.partition("/")
        if slash:
            return "gradients" if before == "grad" else "optimizer"
        is_weight = not self.name.startswith("batch.") and " " not in self.name and self.name != "constant"
        return "weights" if is_weight else "batch"


@dataclass(frozen=True)
class Program:
    """One global program, not yet partitioned."""

    name: str
    devices: int
    hlo: bytes  # a serialized HloModuleProto
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]  # shardings


class Traced(NamedTuple):
    """A config's step: `train_step`, or `micro_batch` and `update`; and the model that it trains."""

    programs: dict[str, Program]
    model: ModelFacts


def write_traced(folder: Path, traced: Traced) -> None:
    """Each program's .hlo.pb; `model.json` and `programs.json` for the rest."""
    described: list[dict[str, object]] = []
    for name, program in traced.programs.items():
        (folder / f"{name}.hlo.pb").write_bytes(program.hlo)
        described.append({key: value for key, value in asdict(program).items() if key != "hlo"})
    (folder / "programs.json").write_text(json.dumps(described))
    (folder / "model.json").write_text(traced.model.model_dump_json())


def read_traced(folder: Path) -> Traced:
    """What `write_traced` wrote, in its order."""
    programs: dict[str, Program] = {}
    for fields in cast(list[dict[str, Any]], json.loads((folder / "programs.json").read_text())):
        name, outputs = fields["name"], tuple(fields["outputs"])
        arguments = tuple(
            Argument(given["name"], tuple(given["shape"]), given["sharding"], given["output"])
            for given in fields["arguments"]
        )
        hlo = (folder / f"{name}.hlo.pb").read_bytes()
        programs[name] = Program(name, fields["devices"], hlo, arguments, outputs)
    return Traced(programs, ModelFacts.model_validate_json((folder / "model.json").read_text()))
