"""What a run says of itself: metrics.jsonl, events.jsonl, config.yaml, STOPPED, the console. Process 0 writes."""

import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from portable_fsdp.backends.base import Backend, Pending
from portable_fsdp.checkpoint.format import Evaluated
from portable_fsdp.checkpoint.manager import Resumed, Saved
from portable_fsdp.config.load import config_text
from portable_fsdp.config.schema import Config
from portable_fsdp.metrics.flops import model_flops_per_token, peak_flops
from portable_fsdp.metrics.meter import Meter, MetricsRow, processes_row
from portable_fsdp.metrics.sinks import EventsFile, MetricsFile
from portable_fsdp.models.build import BuiltModel
from portable_fsdp.models.size import ModelSize
from portable_fsdp.runtime.errors import TrainingError
from portable_fsdp.runtime.files import write_text_atomically
from portable_fsdp.train.evaluate import Evaluation
from portable_fsdp.train.save_triggers import SaveTriggers

log = logging.getLogger("portable_fsdp")


@dataclass(frozen=True)
class InFlight:
    """A step that was dispatched and whose metrics nobody has read."""

    step: int
    lr: float
    began: float  # seconds of time.perf_counter
    waited: float  # seconds, for the step's rows
    metrics: Pending


class Asked(NamedTuple):
    """What any process asked for with a step."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class Measured:
    """A step whose metrics were read and are finite, and that isn't written yet."""

    step: int
    asked: Asked
    row: MetricsRow


class Records:
    """What a run says of itself: metrics.jsonl, events.jsonl, config.yaml, the console. Process 0 writes."""

    def __init__(
        self, config: Config, backend: Backend, built: BuiltModel, steps: int, last_saved: Callable[[], str]
    ) -> None:
        """`last_saved()`: a sentence on the newest checkpoint, for the message that the run's numbers end it with."""
        size = built.size
        self._config = config
        self._backend = backend
        self._size = size
        self._steps = steps
        self._last_saved = last_saved
        self._seconds = math.nan  # of the last step that ended
        self._folder = Path(config.run.dir)
        self._writes = backend.process.index == 0
        self._tokens = config.train.global_batch * config.data.seq_len
        self._meter = Meter(
            devices=backend.data_parallel_size,
            peak_flops=peak_flops(backend.device_name, config.precision.compute),
            flops_per_token=flops_per_token(size, config.data.seq_len),
        )

    def begin(self, step: int, resumed: Resumed | None) -> None:
        """Make the run's folder, drop the rows of steps that are run again, say what starts and from where."""
        if not self._writes:
            return
        self._first = step + 1
        self._folder.mkdir(parents=True, exist_ok=True)
        self._metrics = MetricsFile(self._folder / "metrics.jsonl")
        self._metrics.truncate_after(step)  # first: it refuses a file that something else has written to
        self._events = EventsFile(self._folder / "events.jsonl")
        (self._folder / "STOPPED").unlink(missing_ok=True)
        write_text_atomically(self._folder / "config.yaml", config_text(self._config))
        backend = self._backend
        self._events.write(
            "start",
            name=self._config.run.name,
            step=step,
            backend=backend.name,
            device=backend.device_name,
            devices=backend.data_parallel_size,
            processes=backend.process.count,
        )
        if resumed is not None:
            self._resumed(resumed)
        log.info(
            "%s on %d x %s (%d process(es)): %s parameters%s, %d steps of %s tokens",
            backend.name,
            backend.data_parallel_size,
            backend.device_name,
            backend.process.count,
            f"{self._size.parameters:,}",
            f" ({self._size.trained_parameters:,} train)"
            if self._size.trained_parameters < self._size.parameters
            else "",
            self._steps,
            f"{self._tokens:,}",
        )

    def _resumed(self, resumed: Resumed) -> None:
        self._events.write(
            "resume",
            path=str(resumed.path),
            step=resumed.step,
            load="weights_only" if resumed.weights_only else "all",
            changes={one.name: {"saved": one.saved, "now": one.now} for one in resumed.changes},
            passed_over=list(resumed.passed_over),
        )
        if resumed.weights_only:
            log.info("a new run from the weights of %s", resumed.path)
        else:
            log.info("resumed from %s: step %d", resumed.path, resumed.step)
        for change in resumed.changes:
            if change.makes_curve and not resumed.weights_only:
                log.warning("changed since it was saved, as checkpoint.allow says: %s", change)

    def report(self, late: InFlight, until: float | None = None) -> Asked:
        """`measure` and `write`; says what a process asked for."""
        measured = self.measure(late, until)
        self.write(measured)
        return measured.asked

    def measure(self, late: InFlight, until: float | None = None) -> Measured:
        """Wait for a step's metrics.

        All processes read the same values, and so come to the same end. The step took until the next one began, or
        until now. Raises TrainingError for a loss or gradient norm that is not finite.
        """
        fetched = late.metrics.result()
        stop, processes = fetched.pop("votes").tensor_split([1])
        seconds, loads, saves = processes.view(-1, 3).unbind(dim=1)
        values = {name: value.item() for name, value in fetched.items()}
        self._seconds = (until or time.perf_counter()) - late.began
        self._require_finite(late.step, {name: values[name] for name in ("loss", "grad_norm")})
        memory = self._backend.memory()
        peak = memory.peak_bytes if memory else None
        values["lr"] = late.lr
        row = self._meter.row(late.step, values, self._tokens, self._seconds, late.waited, peak)
        if self._writes and late.step == self._first:
            self._write_collectives()
        if late.step == 1 or late.step % self._config.train.log_every == 0:
            row["processes"] = processes_row(seconds.tolist(), loads.tolist())
            log.info(self._meter.console_line(row, memory.limit_bytes if memory else None))
        return Measured(late.step, Asked(bool(stop > 0), bool((saves > 0).any())), row)

    def write(self, measured: Measured, evaluation: Evaluation | None = None) -> None:
        """A step's row, with the evaluation after it."""
        if not self._writes:
            return
        row = measured.row.copy()
        if evaluation is not None:
            row["eval_loss"] = evaluation.loss
            row["eval_perplexity"] = evaluation.perplexity
            row["eval_tokens"] = evaluation.tokens
        self._metrics.write(row)

    def evaluated(self, step: int, evaluation: Evaluation, seconds: float, *, is_best: bool) -> None:
        """Raises TrainingError for a loss that is not finite."""
        values = {"loss": evaluation.loss, "perplexity": evaluation.perplexity, "tokens": evaluation.tokens}
        self._require_finite(step, {"eval_loss": evaluation.loss})
        if self._writes:
            self._events.write("evaluation", step=step, **values, seconds=seconds, is_best=is_best)
            log.info(
                "step: %d  eval_loss: %.4f  perplexity: %.2f  tokens: %s  seconds: %.1f%s",
                *(step, evaluation.loss, evaluation.perplexity, f"{evaluation.tokens:,}", seconds),
                "  best so far" if is_best else "",
            )

    def gave_up(self, told: Evaluated) -> None:
        """The run ends for train.patience, after the last evaluation."""
        reason = f"no improvement in {told.without_improvement} evaluations"
        if self._writes:
            self._events.write("stop", step=told.step, reason=reason)
            log.info("ended after step %d: %s; the best was step %d", told.step, reason, told.best_step)

    def seen(self, requests: SaveTriggers) -> Tensor:
        """What this process tells all with the next step: float32 [3 * processes], zeros but for its own three.

        Process 0's clock and its view of the run's folder decide for all.
        """
        index, count = self._backend.process.index, self._backend.process.count
        memory = self._backend.memory()
        save = index == 0 and requests.due
        seen = torch.zeros(count, 3)
        seen[index] = torch.tensor([self._seconds, memory.peak_bytes if memory else math.nan, float(save)])
        return seen.flatten()

    def _write_collectives(self) -> None:
        """What a step sends, once the first of this process has run; left out where the engine doesn't tell."""
        traffic = self._backend.collectives
        if traffic is not None:
            kinds = {kind: {"calls": one.calls, "bytes": one.bytes} for kind, one in traffic.items()}
            self._events.write("collectives", **kinds)

    def saved(self, finished: list[Saved]) -> None:
        """Of checkpoints that were committed since the last call, and of those deleted after them."""
        for one in finished if self._writes else ():
            self._events.write(
                "save",
                step=one.step,
                path=str(one.path),
                seconds=one.seconds,
                blocked_seconds=one.blocked_seconds,
                removed=list(one.removed),
            )
            log.info("saved %s in %.1f s (%.1f s of the training)", one.path, one.seconds, one.blocked_seconds)

    def stopped(self, step: int, reason: str | None) -> None:
        reason = reason or "a signal to another process"
        if self._writes:
            self._events.write("stop", step=step, reason=reason)
            write_text_atomically(self._folder / "STOPPED", json.dumps({"reason": reason, "step": step}) + "\n")
            log.info("stopped after step %d on request (%s); the same command goes on from here", step, reason)

    def _require_finite(self, step: int, values: dict[str, float]) -> None:
        if all(map(math.isfinite, values.values())):
            return
        if self._writes:
            self._events.write("stop", step=step, reason="not finite", **values)
        expected = "evaluation loss" if "eval_loss" in values else "loss and gradient norm"
        found = " and ".join(f"{name} {value}" for name, value in values.items())
        raise TrainingError(
            f"step {step}: expected a finite {expected}, found {found}.\n  {self._last_saved()}\n"
            "  Lower optim.lr or clip harder (train.max_grad_norm), with\n"
            "  checkpoint.allow='[optim.lr, train.max_grad_norm]', or look at the rows of this step."
        )


def flops_per_token(size: ModelSize, seq_len: int) -> float | None:
    """Of the model, as MFU counts them; None where not every weight meets every token."""
    if size.has_experts:
        return None
    return model_flops_per_token(
        size.parameters, size.embedding_parameters, size.layers, size.hidden, seq_len, size.frozen_parameters
    )
