"""A traced step as it goes from the process that traces it to the one that compiles it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from portable_fsdp.plan.result import Model


@dataclass(frozen=True)
class Argument:
    """An input of a program, in the order of its parameters."""

    name: str  # as Backend.state's keys, with `grad/<FQN>` besides; `batch.<key>`; or `constant`
    shape: tuple[int, ...]
    sharding: str  # in XLA's words
    output: int | None  # number of the output that takes its place in memory

    @property
    def part(self) -> str:
        """What it is of a device's memory, as `result.Memory.parts` calls it."""
        before, slash, _ = self.name.partition("/")
        if slash:
            return "gradients" if before == "grad" else "optimizer"
        is_weight = not self.name.startswith("batch.") and " " not in self.name and self.name != "constant"
        return "weights" if is_weight else "batch"


@dataclass(frozen=True)
class Program:
    """A step as it was traced: one global program, not yet partitioned."""

    name: str
    devices: int
    hlo: bytes  # a serialized HloModuleProto
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]  # shardings


class Traced(NamedTuple):
    """A config's step: `train_step`, or `micro_batch` and `update`; and the model that it trains."""

    programs: dict[str, Program]
    model: Model


def write_traced(folder: Path, traced: Traced) -> None:
    """Each program's .hlo.pb; `model.json` and `programs.json` for the rest."""
    described: list[dict[str, object]] = []
    for name, program in traced.programs.items():
        (folder / f"{name}.hlo.pb").write_bytes(program.hlo)
        fields = {key: value for key, value in asdict(program).items() if key != "hlo"}
        described.append(fields)
    (folder / "programs.json").write_text(json.dumps(described))
    (folder / "model.json").write_text(traced.model.model_dump_json())


def read_traced(folder: Path) -> Traced:
    """What `write_traced` wrote, in its order."""
    found: dict[str, Program] = {}
    for fields in cast(list[dict[str, Any]], json.loads((folder / "programs.json").read_text())):
        arguments = tuple(
            Argument(one["name"], tuple(one["shape"]), one["sharding"], one["output"]) for one in fields["arguments"]
        )
        hlo = (folder / f"{fields['name']}.hlo.pb").read_bytes()
        found[fields["name"]] = Program(fields["name"], fields["devices"], hlo, arguments, tuple(fields["outputs"]))
    return Traced(found, Model.model_validate_json((folder / "model.json").read_text()))
