"""From what a step measured to a row of metrics.jsonl and a line on the console."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

GIBIBYTE = 2**30


class MetricsRow(TypedDict):
    """One step, as it stands in metrics.jsonl. These names are read by people's scripts."""

    step: int  # counted from 1
    loss: float  # mean over the counted tokens of the global batch, nats
    grad_norm: float  # global, before clipping
    lr: float  # of this step
    tokens: int  # of the global batch
    tokens_per_second: float  # total over all devices
    mfu: float | None  # 0 to 1; None where the device's peak or the model's FLOPs are unknown
    memory_bytes: int | None  # peak of the fullest device so far; None where the engine doesn't tell
    seconds: float  # wall time of this step, without an evaluation after it
    data_seconds: float  # of them, how long process 0 waited for its rows
    eval_loss: NotRequired[float]  # mean over the counted tokens of the held-out rows, nats; where it was evaluated
    eval_perplexity: NotRequired[float]  # exp(eval_loss)
    eval_tokens: NotRequired[int]  # counted ones
    processes: NotRequired["ProcessLoads"]  # in the rows of every train.log_every-th step


class ProcessLoads(TypedDict):
    """How evenly a run's processes are loaded, as each saw it when it began this step; by process index.

    A step ends for all when its slowest process ends, so in `seconds` a straggler shows only by what it does outside
    collectives: its data, its host. An imbalance is the greatest value over the median; 1 is even.
    """

    seconds: list[float | None]  # wall time of the last step that had ended; None in the first
    memory_bytes: list[float | None]  # peak of its fullest device; None where the engine doesn't tell
    seconds_imbalance: float | None
    memory_imbalance: float | None


def processes_row(seconds: Sequence[float], memory_bytes: Sequence[float]) -> ProcessLoads:
    """From one value a process; NaN stands for one that is unknown."""
    return ProcessLoads(
        seconds=[_known(value) for value in seconds],
        memory_bytes=[_known(value) for value in memory_bytes],
        seconds_imbalance=_imbalance(seconds),
        memory_imbalance=_imbalance(memory_bytes),
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _imbalance(values: Sequence[float]) -> float | None:
    if not all(math.isfinite(value) and value > 0 for value in values):
        return None
    return max(values) / statistics.median(values)


@dataclass(frozen=True)
class Meter:
    """Knows the devices and the model, so that a step's measures become rates."""

    devices: int
    peak_flops: float | None  # of one device, FLOP/s in the compute dtype (`flops.peak_flops`)
    flops_per_token: float | None  # of the model (`flops.model_flops_per_token`)

    def row(
        self,
        step: int,
        values: Mapping[str, float],
        tokens: int,
        seconds: float,
        data_seconds: float,
        memory_bytes: int | None,
    ) -> MetricsRow:
        """The row of a step. `values` are the fetched metrics: loss, grad_norm and lr (more are left out)."""
        tokens_per_second = tokens / seconds
        flops = self._device_flops(tokens_per_second)
        return MetricsRow(
            step=step,
            loss=values["loss"],
            grad_norm=values["grad_norm"],
            lr=values["lr"],
            tokens=tokens,
            tokens_per_second=tokens_per_second,
            mfu=None if flops is None or self.peak_flops is None else flops / self.peak_flops,
            memory_bytes=memory_bytes,
            seconds=seconds,
            data_seconds=data_seconds,
        )

    def console_line(self, row: MetricsRow, memory_limit: int | None) -> str:
        """The step in torchtitan's words, without what is unknown.

        tps is total over all devices, tflops is per device; `memory_limit` is one device's, in bytes.
        """
        flops = self._device_flops(row["tokens_per_second"])
        parts = [
            f"step: {row['step']}",
            f"loss: {row['loss']:.4f}",
            f"grad_norm: {row['grad_norm']:.4f}",
        ]
        if row["memory_bytes"] is not None:
            share = f"({row['memory_bytes'] / memory_limit:.0%})" if memory_limit else ""
            parts.append(f"memory: {row['memory_bytes'] / GIBIBYTE:.2f}GiB{share}")
        parts.append(f"tps: {row['tokens_per_second']:,.0f}")
        if flops is not None:
            parts.append(f"tflops: {flops / 1e12:,.2f}")
        if row["mfu"] is not None:
            parts.append(f"mfu: {row['mfu']:.1%}")
        return "  ".join(parts)

    def _device_flops(self, tokens_per_second: float) -> float | None:
        """Model FLOP/s of one device."""
        return None if self.flops_per_token is None else self.flops_per_token * tokens_per_second / self.devices
