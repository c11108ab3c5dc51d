"""How long a process computes by itself: the forwards of its units, without FSDP2's gathers around them."""

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class ComputeTime:
    """Times the forwards of training in the innermost units; backward's collectives wait for other processes."""

    def __init__(self, model: nn.Module, units: Sequence[str], device: torch.device) -> None:
        """Once the units are FSDP2's, whose hooks wait for gathered parameters: these hooks run inside them."""
        self._is_cuda = device.type == "cuda"
        # Beginning and end of each forward, by step; the newest step last. A device has finished the one before it.
        self._steps = deque[list[Any]]([] for _ in range(1 + self._is_cuda))
        innermost = [name for name in units if not any(other.startswith(f"{name}.") for other in units)]
        for module in map(model.get_submodule, innermost or [""]):
            module.register_forward_pre_hook(self._mark)
            module.register_forward_hook(self._mark, prepend=True)

    def _mark(self, *_: Any) -> None:
        if torch.is_grad_enabled():  # no evaluation
            mark: Any = torch.cuda.Event(enable_timing=True) if self._is_cuda else time.perf_counter()
            if self._is_cuda:
                mark.record()
            self._steps[-1].append(mark)

    def take(self) -> float:
        """Seconds of the last step; on CUDA of the one before it. NaN: none yet."""
        self._steps.append([])
        marks = self._steps.popleft()
        pairs = zip(marks[::2], marks[1::2], strict=True)
        times = [begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin for begin, end in pairs]
        return sum(times) if times else math.nan
