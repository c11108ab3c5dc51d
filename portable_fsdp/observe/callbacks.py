"""Observe a run: subclass `Callback`, and pass an instance to `train(..., callbacks=[...])`.

Process 0 calls callbacks, in its main thread between two steps: ours first (`run_files.py`, `console.py`), then yours
in order. They get frozen data and return nothing. A step's data arrive while the device computes the next step, so a
quick callback costs no time. A callback of yours that raises is logged and gets no more calls; the run continues.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from portable_fsdp.checkpoint.commit import with_cause
from portable_fsdp.config.schema import Config
from portable_fsdp.observe.goodput import Straggler
from portable_fsdp.runtime.errors import TrainingError

if TYPE_CHECKING:  # torch isn't needed to read a run's files
    from portable_fsdp.backends.contract import Backend, Traffic
    from portable_fsdp.checkpoint.manager import Resumed, Saved
    from portable_fsdp.observe.profiles import ProfileSummary

log = logging.getLogger("portable_fsdp")

T = TypeVar("T")


@dataclass(frozen=True)
class RunStart:
    """A run whose model is built and loaded, before its first step."""

    config: Config  # resolved
    folder: Path  # run.dir
    engine: str
    device: str  # as its driver names it
    devices: int
    processes: int
    hosts: tuple[str, ...]  # of each process
    step: int  # the last one done before this start; 0 in a new run
    steps: int  # of the whole run
    tokens: int  # of a global batch
    parameters: int
    trained_parameters: int
    flops_per_token: float | None  # model FLOPs; None with experts
    peak_flops: float | None  # of one device, FLOP/s; None for an unknown one
    resumed: "Resumed | None"  # the checkpoint that it starts from


@dataclass(frozen=True)
class EvaluationEnd:
    """An evaluation after `step`; step 0 is `train.eval_on_start`."""

    step: int
    loss: float  # mean over the counted tokens, nats
    perplexity: float
    tokens: int  # counted; of a task without tokens: rows
    seconds: float
    is_best: bool
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])  # means, by the task: `accuracy`


@dataclass(frozen=True)
class SamplesEnd:
    """Texts that the model wrote after `step`, each with its prompt at its beginning."""

    step: int
    prompts: tuple[str, ...]
    texts: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class StepEnd:
    """A step whose loss is finite, with the evaluation that followed it."""

    step: int  # counted from 1
    loss: float  # mean over the counted tokens of the global batch, nats
    grad_norm: float  # before clipping
    lr: float
    tokens: int  # of the global batch
    tokens_per_second: float  # over all devices
    mfu: float | None  # 0 to 1
    memory_bytes: int | None  # peak of the fullest device of process 0
    seconds: float  # wall time, without an evaluation after it
    ended: float  # seconds since 1970
    data_seconds: float  # of them, waiting for rows
    steps: int  # of the whole run
    seconds_left: float | None  # of this start, evaluations and saves as often as so far; None while nothing is known
    elapsed: float  # seconds since this start began to train
    device_flops: float | None  # model FLOP/s of one device
    is_logged: bool  # every train.log_every-th step, and the first
    memory_limit: int | None  # bytes of one device
    process_seconds: tuple[float, ...]  # of each process's previous step; NaN in the first
    process_own_seconds: tuple[float, ...]  # of them without waiting for others; NaN in the first
    process_data_seconds: tuple[float, ...]  # of them waiting for rows; NaN in the first
    process_memory_bytes: tuple[float, ...]  # NaN where the engine doesn't tell
    imbalance: float | None  # of own times: the slowest process over the median; None for one process
    stragglers: tuple[Straggler, ...]  # those that this step makes known, each once a start
    collectives: "Mapping[str, Traffic] | None"  # in the first step of a start: what each step sends
    evaluation: EvaluationEnd | None = None
    last_checkpoint: Path | None = None  # committed by this start, or resumed from
    loss_scale: float | None = None  # of this step; None: nothing computes in float16
    skipped_steps: int | None = None  # of the run so far, since their gradients overflowed
    is_empty: bool = False  # nothing counts in it, so that its loss is 0 and it changed nothing

    @property
    def is_skipped(self) -> bool:
        """Whether gradients overflowed float16, so that no weight changed; `grad_norm` isn't finite then."""
        return self.loss_scale is not None and not math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class ProfileEnd:
    """A profile of process 0, of the steps `first` to `last`."""

    first: int
    last: int
    folder: Path  # of the trace, and summary.txt
    summary: "ProfileSummary"
    seconds: float  # to start it and to write it, beyond the steps


Outcome = Literal["finished", "stopped", "no improvement", "not finite", "failed"]


@dataclass(frozen=True)
class RunEnd:
    """How a run ended. A failed one raises its error afterwards; an export follows."""

    outcome: Outcome
    step: int  # the last one that is done
    reason: str  # "SIGTERM", "no improvement in 3 evaluations", an error's first line, or the outcome
    elapsed: float  # seconds
    last_checkpoint: Path | None
    best_step: int | None  # by evaluation loss
    best_loss: float | None  # that one
    values: Mapping[str, float]  # those that are not finite


class Callback:
    """Override what you need."""

    def on_start(self, start: RunStart) -> None:
        """Before the first step, once everything has been checked."""

    def on_step(self, step: StepEnd) -> None:
        """After each step, a step late; after its evaluation and before its save."""

    def on_evaluate(self, evaluation: EvaluationEnd) -> None:
        """After each evaluation; `on_step` of the same step follows."""

    def on_samples(self, samples: SamplesEnd) -> None:
        """After the samples of each `train.sample_every` steps; `on_step` of the same step follows."""

    def on_save(self, save: "Saved") -> None:
        """After each commit; that of a background save is seen at the end of a later step."""

    def on_profile(self, profile: ProfileEnd) -> None:
        """After each profile of steps, between two steps."""

    def on_end(self, end: RunEnd) -> None:
        """Once, after the last save, also where the run fails; not where the process is killed."""


class Callbacks:
    """All callbacks of a run, on process 0; on the other processes none."""

    def __init__(self, ours: Sequence[Callback], yours: Sequence[Callback], backend: "Backend") -> None:
        self._ours = ours
        self._all = [*ours, *yours] if backend.process.index == 0 else []

    def call(self, hook: Callable[[Callback, T], None], data: T) -> None:
        """`call(Callback.on_step, end)`: of all of them. What one of ours raises, as for a full disk, ends the run."""
        for callback in self._all:
            if hook is Callback.on_end and callback not in self._ours:  # not again where another one exits
                self._all = [other for other in self._all if other is not callback]
            try:
                getattr(callback, hook.__name__)(data)
            except Exception as error:
                if callback in self._ours:
                    if isinstance(error, OSError):
                        folder = Path(error.filename or "run.dir").parent
                        message = f"the run can't write its record: {with_cause(error, folder)}"
                        raise TrainingError(message) from error
                    raise
                self._all = [other for other in self._all if other is not callback]
                log.exception(
                    "callback %s.%s raised; the run continues without it:", type(callback).__name__, hook.__name__
                )
