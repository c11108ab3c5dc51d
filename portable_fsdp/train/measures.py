"""Values that processes exchange in each step, and the step's metrics: one device vector, read one step late."""

import math
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from portable_fsdp.backends.contract import Backend, Pending
from portable_fsdp.checkpoint.manager import Resumed
from portable_fsdp.config.schema import Config
from portable_fsdp.models.flops import RowCost, model_flops_per_token, peak_flops
from portable_fsdp.models.weights import ModelSize
from portable_fsdp.observe.callbacks import RunStart, StepEnd
from portable_fsdp.observe.goodput import Pace, StragglerWatch, imbalance
from portable_fsdp.runtime.errors import TrainingError
from portable_fsdp.train.control import Votes

VOTES = 5  # numbers of each process in the control vector


def control_numbers(processes: int) -> list[float]:
    """Return zeros for a step's control numbers: its count, the request to stop, and VOTES for each process."""
    return [0.0] * (2 + VOTES * processes)


@dataclass(frozen=True)
class InFlight:
    """A step that was dispatched, with metrics not read yet."""

    step: int
    lr: float
    began: float  # seconds of time.perf_counter
    waited: float  # seconds of waiting for rows
    metrics: Pending


class NotFiniteError(TrainingError):
    """A loss or a gradient norm that is not finite."""

    def __init__(self, step: int, values: dict[str, float], last_saved: str, loss_scale: float | None = None) -> None:
        expected = "evaluation loss" if "eval_loss" in values else "loss and gradient norm"
        actual = " and ".join(f"{name} {value}" for name, value in values.items())
        float16 = ""
        if loss_scale is not None:
            actual += f" at a loss scale of {loss_scale:g}, in float16"
            float16 = "  Compute in bfloat16 instead (precision.compute, precision.modules), with\n"
            float16 += "  checkpoint.allow='[precision]'.\n"
        super().__init__(
            f"step {step}: expected a finite {expected}, found {actual}.\n  {last_saved}\n{float16}"
            "  Lower optim.lr or train.max_grad_norm, with\n"
            "  checkpoint.allow='[optim.lr, train.max_grad_norm]', or inspect the rows of this step."
        )
        self.values = values


class Measures:
    """Collects this process's control numbers; reads each step's metrics."""

    def __init__(self, backend: Backend, start: RunStart) -> None:
        self._backend, self._start = backend, start
        self._began = time.perf_counter()
        self._pace, self._last = Pace(), start.config.train.stop_at or start.steps
        self._seconds = self._waited = self._own = math.nan  # of the last step that ended
        self._began_step, self._elsewhere = math.nan, {"step": 0.0, "wait": 0.0}
        self._watch = StragglerWatch(start.hosts)

    @property
    def elapsed(self) -> float:
        """Seconds since this process began to train."""
        return time.perf_counter() - self._began

    def begin_step(self) -> float:
        """Begin a step and end the previous one, whose own time is now known. Returns time.perf_counter()."""
        now, compute = time.perf_counter(), self._backend.compute_seconds()
        self._own = now - self._began_step - self._elsewhere["wait"]
        if compute is not None:
            self._own += compute - self._elsewhere["step"]
        self._began_step, self._elsewhere = now, {"step": 0.0, "wait": 0.0}
        return now

    @contextmanager
    def timed(self, part: Literal["step", "wait"]) -> Generator[None]:
        """Time the engine's step, or another part that may wait for the device or for other processes."""
        began = time.perf_counter()
        yield
        self._elsewhere[part] += time.perf_counter() - began

    def control(self, count: float, votes: Votes) -> list[float]:
        """Return a step's control numbers, which the step sums over all processes: `count` of this process's losses,
        its request to stop, and VOTES numbers per process, all zero except for this process: seconds of its last step,
        seconds that it computed and that it waited for rows, peak memory (bytes), and its request to save."""
        process, memory = self._backend.process, self._backend.memory()
        peak = memory.peak_bytes if memory else math.nan
        numbers, own = control_numbers(process.count), 2 + VOTES * process.index
        numbers[:2] = count, float(votes.stop)
        numbers[own : own + VOTES] = self._seconds, self._own, self._waited, peak, float(votes.save)
        return numbers

    def read(self, late: InFlight, until: float | None = None) -> tuple[StepEnd, Votes]:
        """Wait for a step's metrics, the same on all processes: the only place where the loop waits for the device. The
        step ended when the next one began (`until`), or now."""
        with self.timed("wait"):
            tensors = late.metrics.result()
        stop, by_process = tensors.pop("votes").tensor_split([1])
        seconds, own, data, memory_bytes, saves = by_process.view(-1, VOTES).unbind(dim=1)
        now = time.perf_counter()
        until = until or now
        self._seconds, self._waited = until - late.began, late.waited
        memory, step, start = self._backend.memory(), late.step, self._start
        metrics: dict[str, Any] = {name: tensor.tolist() for name, tensor in tensors.items()}
        tokens_per_second = start.tokens / self._seconds
        flops = None if start.flops_per_token is None else start.flops_per_token * tokens_per_second / start.devices
        end = StepEnd(
            step=step,
            loss=metrics["loss"],
            grad_norm=metrics["grad_norm"],
            lr=late.lr,
            tokens=start.tokens,
            tokens_per_second=tokens_per_second,
            mfu=None if flops is None or start.peak_flops is None else flops / start.peak_flops,
            memory_bytes=memory.peak_bytes if memory else None,
            seconds=self._seconds,
            ended=time.time() - (now - until),
            data_seconds=late.waited,
            steps=start.steps,
            seconds_left=self._pace.time_left(until, min(start.steps, self._last) - step),
            elapsed=self.elapsed,
            is_logged=step == 1 or step % start.config.train.log_every == 0,
            device_flops=flops,
            memory_limit=memory.limit_bytes if memory else None,
            process_seconds=tuple(seconds.tolist()),
            process_own_seconds=tuple(own.tolist()),
            process_data_seconds=tuple(data.tolist()),
            process_memory_bytes=tuple(memory_bytes.tolist()),
            imbalance=imbalance(own.tolist()) if len(own) > 1 else None,
            stragglers=self._watch.add(own.tolist(), self._seconds),
            collectives=self._backend.collectives if step == start.step + 1 else None,
            loss_scale=metrics.get("loss_scale"),
            skipped_steps=int(metrics["skipped_steps"]) if "skipped_steps" in metrics else None,
            is_empty=metrics["is_empty"] > 0,
            router_loss=metrics.get("router_loss"),
            expert_load=tuple(metrics["expert_load"]) if "expert_load" in metrics else None,
            expert_load_max=metrics.get("expert_load_max"),
            experts_dropped=metrics.get("experts_dropped"),
        )
        return end, Votes(bool(stop > 0), bool((saves > 0).any()))


def run_start(
    config: Config,
    given: Config,
    engine: Backend,
    size: ModelSize,
    steps: int,
    resumed: Resumed | None,
    cost: RowCost | None = None,
) -> RunStart:
    """Return the facts about the run. `cost`: of a row that isn't text of `data.seq_len` tokens. *collective*"""
    tokens, flops = tokens_and_flops(size, config.data.seq_len, cost)
    return RunStart(
        config=config,
        given=given,
        folder=Path(config.run.dir),
        engine=engine.name,
        device=engine.device_name,
        devices=engine.devices,
        processes=engine.process.count,
        hosts=tuple(engine.gather(socket.gethostname())),
        step=resumed.step if resumed else 0,
        steps=steps,
        tokens=config.train.global_batch * tokens,
        parameters=size.parameters,
        trained_parameters=size.trained_parameters,
        flops_per_token=flops,
        peak_flops=peak_flops(engine.device_name, config.precision.compute),
        resumed=resumed,
    )


def tokens_and_flops(size: ModelSize, seq_len: int, cost: RowCost | None) -> tuple[int, float | None]:
    """Return (tokens per row, model FLOPs per token for MFU). FLOPs are None if unknown, or if not every weight
    processes every token (experts). `cost`: of a row that isn't text of `seq_len` tokens."""
    if cost is not None:
        return cost.tokens, None if cost.flops is None else cost.flops / cost.tokens
    sizes = size.parameters, size.embedding_parameters, size.layers, size.hidden
    return seq_len, None if size.has_experts else model_flops_per_token(*sizes, seq_len, size.frozen_parameters)
