"""What the benchmarks share: ways measured in turns, medians, our step without a loop around it, pages of results."""

import json
import os
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:  # some benchmarks choose a device before torch is imported, others never import it
    from portable_fsdp.config.schema import Config
    from portable_fsdp.data.build import Corpus

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
RESAMPLES = 10_000
Way = TypeVar("Way")
T = TypeVar("T")


def in_turns(
    ways: Mapping[str, Way], rounds: int, measure: Callable[[Way], T], *, warm_up: int = 0
) -> dict[str, list[T]]:
    """Measure each way once a round, A B C, then C B A, so that other load on the machine falls on all of them. Rounds
    of warm-up are left out."""
    out: dict[str, list[T]] = {name: [] for name in ways}
    for number in range(-warm_up, rounds):
        for name in ways if number % 2 == 0 else reversed([*ways]):
            value = measure(ways[name])
            if number >= 0:
                out[name].append(value)
    return out


class Ratio(NamedTuple):
    """Median over rounds of one time / the other, with the bounds of its bootstrap 95 % interval."""

    median: float
    low: float
    high: float


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return Ratio(statistics.median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)])


class Steps:
    """Our step over the rows of the config: place, compute, fetch, and no loop around it. A call returns the metrics.

    The engine stays open until `held` closes. `corpus`: instead of the config's own.
    """

    def __init__(
        self,
        config: "Config",
        held: ExitStack,
        *,
        device: str = "cpu",
        backend: str = "native",
        num_devices: int | None = None,
        corpus: "Corpus | None" = None,
    ) -> None:
        import portable_fsdp as pf

        self.config, self.number = config, 0
        self.backend = held.enter_context(
            pf.open_backend(config, device=device, backend=backend, num_devices=num_devices)
        )
        corpus = corpus or pf.build_data(config.data, config.model)
        self.training = pf.build_training(config, self.backend, corpus.tokenizer)
        self.batches = held.enter_context(pf.open_batches(config, self.backend, self.training, corpus))

    def __call__(self, leave_out: str = "") -> dict[str, Any]:
        """`leave_out`: a tensor of the batches that the step doesn't get."""
        from portable_fsdp import learning_rate

        self.number += 1
        rows, lr = next(self.batches), learning_rate(self.config.optim, self.number, self.config.train.steps or 0)
        batches = [{n: tensor for n, tensor in batch.items() if n != leave_out} for batch in rows.micro_batches]
        metrics = self.training.step([self.backend.place(batch) for batch in batches], lr, [rows.count])
        return self.backend.fetch(metrics).result()


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {"cpu": cpu, "cores": os.cpu_count()}


def write_json(path: Path, result: Any) -> None:
    path.write_text(json.dumps(result, indent=2) + "\n")


def markdown(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(map(str, line))} |" for line in (head, ["---"] * len(head), *rows)]
