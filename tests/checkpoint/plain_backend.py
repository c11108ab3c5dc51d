"""A backend of plain PyTorch for the checkpoint tests: full tensors in every process, each writing its rows of them.

Processes are threads that meet at a barrier; the files are real.
"""

import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor, nn
from toy.engine import ToyBackend

from portable_fsdp.backends.contract import Backend, OptimizerState, Partition, Piece, Read, TensorState
from portable_fsdp.checkpoint.manager import Checkpoints, Resumed
from portable_fsdp.checkpoint.store import OwnPart, entries_without_pieces
from portable_fsdp.config.schema import Checkpoint as Settings
from portable_fsdp.layout import full_region, rows_of_shard
from portable_fsdp.runtime.errors import CheckpointError

T = TypeVar("T")
Capture = pytest.CaptureFixture[str]
Log = pytest.LogCaptureFixture
Patch = pytest.MonkeyPatch
ALONE = Partition(0, 1)


class Meeting:
    """A barrier and values that `count` processes share."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=20)
        self.values = [b""] * count


class PlainBackend(ToyBackend):
    """Deals the rows of every tensor to `count` processes of `devices` devices, as `torch.chunk` does."""

    name = "plain"

    def __init__(self, process: Partition = ALONE, devices: int = 1, meeting: Meeting | None = None) -> None:
        self.device, self.device_name = torch.device("cpu"), "cpu"
        self.process = self.data_shard = process
        self.own_devices, self.optimizers = devices, {}  # devices of each process
        self.devices = self.row_shards = process.count * devices
        self.meeting = meeting or Meeting(process.count)
        self.change: Callable[[dict[str, TensorState]], object] = lambda _: None  # what a test does to each state

    def agree(self, value: T) -> T:
        return self.gather(value)[0]

    def gather(self, value: T) -> list[T]:
        self.meeting.values[self.process.index] = pickle.dumps(value)
        self.meeting.barrier.wait()
        gathered = [pickle.loads(pickled) for pickled in self.meeting.values]
        self.meeting.barrier.wait()
        return gathered

    def state(self, model: nn.Module, optimizer: OptimizerState) -> dict[str, TensorState]:
        state = {
            key: TensorState(tuple(tensor.shape), tensor.dtype, partial(self._pieces, tensor))
            for key, tensor in named_tensors(model, optimizer).items()
        }
        self.change(state)
        return state

    def _pieces(self, tensor: Tensor) -> list[Piece]:
        mine = range(self.process.index * self.own_devices, (self.process.index + 1) * self.own_devices)
        return [
            Piece(tuple(s.start for s in slices), tensor[slices])
            for device, slices in enumerate(rows(tensor, self.devices))
            if device in mine
        ]

    def load_state(self, model: nn.Module, optimizer: OptimizerState, read: Read) -> None:
        with torch.no_grad():
            for key, tensor in named_tensors(model, optimizer).items():
                for slices in rows(tensor, self.devices):
                    tensor[slices] = read(key, slices)


def rows(tensor: Tensor, count: int) -> list[tuple[slice, ...]]:
    """`count` slices that tile `tensor` along dimension 0; the last ones may be empty, or missing for a scalar."""
    if tensor.dim() == 0:
        return [()]
    return [(rows_of_shard(len(tensor), i, count), *full_region(tensor.shape)[1:]) for i in range(count)]


def named_tensors(model: nn.Module, optimizer: OptimizerState) -> dict[str, Tensor]:
    """The live tensors under the keys of `Backend.state`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {name: parameter.detach() for parameter, name in names.items()}
    for parameter, state in optimizer.state.items():
        if parameter in names:
            tensors.update({f"{k}/{names[parameter]}": v for k, v in state.items() if isinstance(v, Tensor)})
    return tensors


def small_model(seed: int, hidden: int = 7) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Odd sizes, a bfloat16 parameter, and AdamW state (0-dim step counts too) with random content."""
    model = nn.Sequential(nn.Linear(5, hidden), nn.Linear(hidden, 3, bias=False))
    model.register_parameter("gate", nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)))
    return with_random_state(model, seed)


def with_random_state(model: nn.Module, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and an AdamW; every weight and its state get random content."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for tensor in named_tensors(model, optimizer).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator).to(tensor.dtype))
    return model, optimizer


def what_is_written(state: dict[str, TensorState]) -> OwnPart:
    """Return this process's part, as a save writes it."""
    return OwnPart(entries_without_pieces(state), {key: tensor.pieces() for key, tensor in state.items()})


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits (NaNs of every kind among the floats); 0 and 1 for bool."""
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, limit, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def snapshot(model: nn.Module, optimizer: OptimizerState) -> dict[str, bytes]:
    """The bits of every tensor."""
    return {key: bits(tensor) for key, tensor in named_tensors(model, optimizer).items()}


def checkpoints(folder: Path, backend: Backend, settings: dict[str, Any] | None = None, **changes: Any) -> Checkpoints:
    """Opened as a run would. `settings`: of the config's section `checkpoint`."""
    arguments: dict[str, Any] = {"config": {"optim": {"lr": 0.001}}, "model_config": None, "wait_s": 10.0}
    return Checkpoints(folder, backend, settings=Settings(**(settings or {})), **(arguments | changes))


def load(checkpoints: Checkpoints, model: nn.Module, optimizer: torch.optim.Optimizer, resume: str = "auto") -> Resumed:
    """Find and load."""
    point = checkpoints.find(resume)
    assert point is not None
    return checkpoints.load(point, model, optimizer)


def in_processes(count: int, work: Callable[[PlainBackend], Any], devices: int = 1) -> list[Any]:
    """`work(backend)` in `count` processes at once; what each returned, or the exception that it raised."""
    meeting, results = Meeting(count), [None] * count

    def run(index: int) -> None:
        try:
            results[index] = work(PlainBackend(Partition(index, count), devices, meeting))
        except Exception as error:
            results[index] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def refused(count: int, work: Callable[[PlainBackend], Any], devices: int = 1) -> str:
    """The message of the CheckpointError that all processes raise alike."""
    results = in_processes(count, work, devices)
    assert {type(result) for result in results} == {CheckpointError}, results
    [message] = {str(result) for result in results}
    return message


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def save_once(folder: Path, step: int = 5, seed: int = 1, count: int = 2, devices: int = 2) -> Path:
    """A committed checkpoint of `small_model(seed)` by `count` processes."""

    def work(backend: PlainBackend) -> Path:
        return checkpoints(folder, backend).save(step, *small_model(seed), (1, 20))

    result = in_processes(count, work, devices)[0]
    assert not isinstance(result, Exception), result
    return cast(Path, result)
