"""Who launched this process, and who asks it to stop. Device counts come from the engine, never from here."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Literal, Self

from portable_fsdp.runtime.errors import ConfigError

LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OUR_RUNS = "portable_fsdp.launch-"  # of the elastic run's id in a start of our own: the agent's PID follows
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@dataclass(frozen=True)
class Launch:
    """How this process was started, in torchrun's words."""

    kind: Literal["plain", "torchrun"]
    rank: int  # among all processes
    local_rank: int  # among the processes of this host
    world_size: int  # processes


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Read torchrun's five variables; `accelerate launch` and MPI wrappers set the same ones.

    None of them set: a plain start. Raises ConfigError when only some are set, or when they contradict each other.
    """
    missing = [name for name in LAUNCH_VARIABLES if not environ.get(name)]
    if len(missing) == len(LAUNCH_VARIABLES):
        return Launch("plain", rank=0, local_rank=0, world_size=1)
    if missing:
        present = [f"{name}={environ[name]}" for name in LAUNCH_VARIABLES if name not in missing]
        raise ConfigError(
            f"environment: expected all or none of {', '.join(LAUNCH_VARIABLES)}, found {', '.join(present)} "
            f"without {', '.join(missing)}.\n  Start with torchrun, which sets all five, or unset them. "
            "Nothing was started."
        )
    rank, local_rank, world_size = (_integer(environ, name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    _integer(environ, "MASTER_PORT")
    if not 0 <= local_rank <= rank < world_size:
        raise ConfigError(
            "environment: expected 0 <= LOCAL_RANK <= RANK < WORLD_SIZE, found "
            f"LOCAL_RANK={local_rank}, RANK={rank}, WORLD_SIZE={world_size}.\n"
            "  Start with torchrun, which sets them, or unset them. Nothing was started."
        )
    return Launch("torchrun", rank, local_rank, world_size)


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(
            f"environment: {name}: expected an integer, found {environ[name]!r}. Nothing was started."
        ) from None


def end_with_agent(environ: Mapping[str, str]) -> None:
    """Have a worker of torch's elastic agent (torchrun, or our own start) killed when the agent ends, however it does.

    Else a SIGKILL of the agent leaves workers that train and save on, and the same command started again races them.
    Linux only. A process that was started plainly is left alone: whoever started it may end before it.
    """
    run = environ.get("TORCHELASTIC_RUN_ID")
    if not run or sys.platform != "linux":
        return
    end_with_parent(int(run.removeprefix(OUR_RUNS)) if run.startswith(OUR_RUNS) else os.getppid())


def end_with_parent(parent: int) -> None:
    """Have this process killed when its parent, process `parent`, ends, however it does. Linux only; else nothing."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        print("this process can't be tied to its launcher (prctl): if that is killed, it goes on", file=sys.stderr)
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


class StopRequest:
    """While entered, SIGTERM and SIGINT only set a flag, which the loop reads at step boundaries.

        with StopRequest() as stop:
            while not stop.requested: ...

    A second SIGINT raises KeyboardInterrupt: the way out for someone who won't wait for the step and the save. Enter
    in the main thread (Python handles signals nowhere else).
    """

    def __init__(self, same_press_s: float = 1.0) -> None:
        # torch's elastic launcher passes SIGINT on to processes that the terminal has sent it to already, so one
        # press of Ctrl-C can arrive twice within milliseconds.
        self._same_press_s = same_press_s
        self._interrupted_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self.reason: str | None = None

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            # None: the handler was installed by C code, which Python can't put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted_at is not None and now - self._interrupted_at > self._same_press_s:
                raise KeyboardInterrupt
            self._interrupted_at = self._interrupted_at or now
        self.reason = self.reason or signal.Signals(number).name
