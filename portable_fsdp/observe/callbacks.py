"""Observe a run: subclass `Callback`, and pass an instance to `train(..., callbacks=[...])`.

Process 0 calls callbacks in its main thread between two steps: the built-in ones first (`run_files.py`, `console.py`),
then yours in order. They get frozen data and return nothing. A step's data arrive while the device computes the next
step, so a fast callback costs no time. If your callback raises, the run logs it, stops calling it, and continues.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from portable_fsdp.checkpoint.commit import cause_of
from portable_fsdp.checkpoint.manifests import Saved
from portable_fsdp.config.schema import Config
from portable_fsdp.observe.goodput import Straggler
from portable_fsdp.runtime.errors import TrainingError

if TYPE_CHECKING:  # torch isn't needed to read a run's files
    from portable_fsdp.backends.contract import Backend, Traffic
    from portable_fsdp.checkpoint.manager import Resumed
    from portable_fsdp.observe.profile_summary import ProfileSummary

log = logging.getLogger("portable_fsdp")

T = TypeVar("T")


@dataclass(frozen=True)
class RunStart:
    """A run before its first step, with the model built and loaded."""

    config: Config  # resolved
    given: Config  # with `auto`, as config.yaml keeps it
    folder: Path  # run.dir
    engine: str
    device: str  # the driver's name of the device
    devices: int
    processes: int
    hosts: tuple[str, ...]  # host name of each process
    step: int  # last step before this start; 0 in a new run
    steps: int  # of the whole run
    tokens: int  # per global batch
    parameters: int
    trained_parameters: int
    flops_per_token: float | None  # model FLOPs; None with experts
    peak_flops: float | None  # FLOP/s of one device; None for an unknown device
    resumed: "Resumed | None"  # the checkpoint that the run resumes from


@dataclass(frozen=True)
class EvaluationEnd:
    """An evaluation after `step`; step 0 is `train.eval_on_start`."""

    step: int
    loss: float  # mean over the counted tokens, nats
    perplexity: float
    tokens: int  # number of counted tokens; rows for a task without tokens
    seconds: float
    is_best: bool
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # means of the task's metrics: `accuracy`


@dataclass(frozen=True)
class SamplesEnd:
    """Samples generated after `step`; each text begins with its prompt."""

    step: int
    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class StepEnd:
    """A step with a finite loss, and the evaluation that followed it."""

    step: int  # counted from 1
    loss: float  # mean over the counted tokens of the global batch, nats
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # of the global batch
    tokens_per_second: float  # over all devices
    mfu: float | None  # 0 to 1
    memory_bytes: int | None  # peak, of the device of process 0 with the highest peak
    seconds: float  # wall time, without an evaluation after it
    ended: float  # seconds since 1970
    data_seconds: float  # part of `seconds` spent waiting for rows
    steps: int  # of the whole run
    seconds_left: float | None  # until the end, with evaluations and saves at the same rate; None: unknown
    elapsed: float  # seconds of training since this start
    device_flops: float | None  # model FLOP/s of one device
    is_logged: bool  # every train.log_every-th step, and the first
    memory_limit: int | None  # bytes of one device
    process_seconds: tuple[float, ...]  # previous step of each process; NaN in the first
    process_own_seconds: tuple[float, ...]  # the same without waiting for other processes; NaN in the first
    process_data_seconds: tuple[float, ...]  # part of it spent waiting for rows; NaN in the first
    process_memory_bytes: tuple[float, ...]  # peak; NaN if the engine doesn't know it
    imbalance: float | None  # own time of the slowest process over the median; None for one process
    stragglers: tuple[Straggler, ...]  # stragglers detected in this step, each once per start
    collectives: "Mapping[str, Traffic] | None"  # in the first step of a start: the traffic of each step
    evaluation: EvaluationEnd | None = None
    last_checkpoint: Path | None = None  # committed by this start, or resumed from
    loss_scale: float | None = None  # of this step; None without float16
    skipped_steps: int | None = None  # in the run so far, because of overflowing gradients
    is_empty: bool = False  # nothing counts in the step: its loss is 0 and it changed nothing
    router_loss: float | None = None  # auxiliary loss times its coefficient; `loss` leaves it out
    expert_load: tuple[float, ...] | None = None  # share of each expert in the choices of all layers
    expert_load_max: float | None = None  # largest load of an expert over the mean of its layer
    experts_dropped: float | None = None  # share of rows that sharding.expert_capacity dropped

    @property
    def is_skipped(self) -> bool:
        """Whether gradients overflowed float16, so that no weight changed; `grad_norm` isn't finite then."""
        return self.loss_scale is not None and not math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class ProfileEnd:
    """A profile of process 0, of the steps `first` to `last`."""

    first: int
    last: int
    folder: Path  # contains the trace and summary.txt
    summary: "ProfileSummary"
    seconds: float  # time to start and to write it, in addition to the steps


Outcome = Literal["finished", "stopped", "no improvement", "not finite", "failed"]


@dataclass(frozen=True)
class RunEnd:
    """The end of a run. A failed run raises its error afterwards; an export follows."""

    outcome: Outcome
    step: int  # the last finished step
    reason: str  # "SIGTERM", "no improvement in 3 evaluations", an error's first line, or the outcome
    elapsed: float  # seconds
    last_checkpoint: Path | None
    best_step: int | None  # by evaluation loss
    best_loss: float | None  # evaluation loss of best_step
    values: Mapping[str, float]  # the values of the step that are not finite
    is_consequence: bool = False  # of another process's failure, which broke a connection


class Callback:
    """Base class of callbacks. Override the methods that you need."""

    def on_start(self, start: RunStart) -> None:
        """Called before the first step, after all checks."""

    def on_step(self, step: StepEnd) -> None:
        """Called after each step, one step late; after its evaluation and before its save."""

    def on_evaluate(self, evaluation: EvaluationEnd) -> None:
        """Called after each evaluation; `on_step` of the same step follows."""

    def on_samples(self, samples: SamplesEnd) -> None:
        """Called after the samples of every `train.sample_every` steps; `on_step` of the same step follows."""

    def on_save(self, save: Saved) -> None:
        """Called after each commit; for a background save at the end of a later step."""

    def on_profile(self, profile: ProfileEnd) -> None:
        """Called after each profile, between two steps."""

    def on_end(self, end: RunEnd) -> None:
        """Called once after the last save, also if the run fails; not if the process is killed."""


class Callbacks:
    """All callbacks of a run on process 0; none on other processes."""

    def __init__(self, ours: Sequence[Callback], yours: Sequence[Callback], backend: "Backend") -> None:
        self._ours = ours
        self._all = [*ours, *yours] if backend.process.index == 0 else []

    def call(self, hook: Callable[[Callback, T], None], data: T) -> None:
        """Call a hook of all callbacks: `call(Callback.on_step, end)`. An error of a built-in one (full disk) ends the
        run."""
        for callback in self._all:
            if hook is Callback.on_end and callback not in self._ours:  # not again if another callback exits
                self._all = [other for other in self._all if other is not callback]
            try:
                getattr(callback, hook.__name__)(data)
            except Exception as error:
                if callback in self._ours:
                    if isinstance(error, OSError):
                        folder = Path(error.filename or "run.dir").parent
                        message = f"the run can't write its files: {error}{cause_of(error, folder)}"
                        raise TrainingError(message) from error
                    raise
                self._all = [other for other in self._all if other is not callback]
                log.exception(
                    "callback %s.%s raised; the run continues without it:", type(callback).__name__, hook.__name__
                )
