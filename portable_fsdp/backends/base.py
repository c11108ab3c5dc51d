"""The backend contract: what an engine must do so that one train loop runs on it.

A backend is opened (`portable_fsdp.backends.open_backend`), used as a context manager, and closed. It refuses
what it can't honour while it opens, never later. `tests/backends/test_contract.py` runs each line of the
contract (C1 to C7) against every backend.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

T = TypeVar("T")

Slices = tuple[slice, ...]
"""One slice a dimension, with start and stop set: a piece of a global tensor."""

Fill = Callable[[str, Slices], Tensor]
"""`fill(fqn, slices)` -> that piece of the initial weight, on the host, in the master dtype."""

Read = Callable[[str, Slices], Tensor]
"""`read(key, slices)` -> that piece of a saved tensor, on the host. Keys are those of `Backend.state`."""

Batch = dict[str, Tensor]
"""Named tensors whose dimension 0 is rows of this process's data shard: `input_ids` and `labels` int64 [rows, seq]
(`labels[r, t]` is the token after `input_ids[r, t]`, or -100), `tokens` float32 [rows] (counted labels of row r, summed
over all micro batches of the step), `stop` float32 [rows]."""

Metrics = dict[str, Tensor]
"""Named 0-dimensional device tensors, equal on all processes."""

MakeOptimizer = Callable[[list[dict[str, Any]], bool], torch.optim.Optimizer]
"""`make(groups, capturable)`: groups hold parameters under `params`; capturable keeps step counts and lr on the device."""


class Part(NamedTuple):
    """One of `count` equal parts: which process this is, or which rows it feeds."""

    index: int
    count: int


class Piece(NamedTuple):
    """A piece of a global tensor that this process must write."""

    offset: tuple[int, ...]
    data: Tensor  # on the host or the device; data.shape is the piece's shape


@dataclass(frozen=True)
class TensorState:
    """A global tensor, and the pieces of it that this process must write (perhaps none)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=lambda: [])


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of one device (on CPU: of this process, over its devices)."""

    peak_bytes: int
    now_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True)
class ShardPolicy:
    """How a model is laid out, in plain values. `units` are FQNs of the modules gathered and freed together."""

    strategy: str
    units: tuple[str, ...]
    compute: torch.dtype
    reduce: torch.dtype
    gradient_checkpointing: bool


class Pending(ABC):
    """Metrics on their way to the host."""

    @abstractmethod
    def result(self) -> dict[str, float]:
        """Wait for them. The only place where a run waits for the device."""


class Backend(ABC):
    """An open engine. Methods marked *collective* are called by all processes in the same order."""

    device: torch.device
    process: Part
    data_shard: Part
    data_parallel_size: int  # devices
    expected_compilations: int  # of the train step in a whole run; 0 where nothing compiles

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Give back what opening took (process groups)."""

    @abstractmethod
    def shard_model(self, model: nn.Module, policy: ShardPolicy, fill: Fill | None) -> nn.Module:
        """Lay out `model` (parameters on meta, buffers real on the host) over the mesh and fill it.

        `fill=None` leaves placeholders. FQNs, ties, buffers and dtypes stay those of `model`. *collective*
        """

    @abstractmethod
    def build_optimizer(self, make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimizer of the sharded model; `groups` name parameters by FQN under `params`.

        All its state exists at once, zero, laid out like its parameters. *collective*
        """

    @abstractmethod
    def place(self, batch: Batch) -> Batch:
        """Start the copy from host to device; rows go over the data shards."""

    @abstractmethod
    def compile(self, fn: Callable[..., Metrics], name: str) -> Callable[..., Metrics]:
        """One program of `fn` (batches in, device tensors out), or `fn` itself where the engine is eager."""

    @abstractmethod
    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        """Around a micro batch's forward and backward; gradients cross devices in the last one."""

    @abstractmethod
    def clip_grad_norm(self, model: nn.Module, limit: float | None) -> Tensor:
        """Clip to the global norm `limit` (None: don't); return the norm before, 0-dim, on device. *collective*"""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over data shards, on device. *collective*"""

    @abstractmethod
    def fetch(self, metrics: Metrics) -> Pending:
        """Start the copy to the host; the result is read later, so that the device never waits for the host."""

    @abstractmethod
    def agree(self, value: T) -> T:
        """Process 0's `value` (anything that pickles), on all processes. *collective*"""

    @abstractmethod
    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorState]:
        """What this process must write: each element of a global tensor exactly once over all processes.

        Keys: FQN for parameters and persistent buffers, `<state name>/<FQN>` for optimizer state. Tied weights
        appear once, under their first FQN. The same keys, shapes and dtypes on all processes.
        """

    @abstractmethod
    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, read: Read) -> None:
        """Overwrite all that `state` names, pulling this process's slices through `read`. No collective."""

    @property
    @abstractmethod
    def compilations(self) -> int:
        """Train-step programs compiled so far."""

    @abstractmethod
    def memory(self) -> MemoryStats:
        """Peak and present use of the fullest device of this process."""
