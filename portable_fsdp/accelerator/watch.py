"""Reads of a device's values in the middle of a step, which on XLA cut its program in two."""

import sys
from types import FrameType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from portable_fsdp.accelerator.state import log

_READS = (Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.tolist, Tensor.cpu, Tensor.numpy)
_STEP = 3
"""The number of the point that is watched: after the begin of an epoch, and the first batch, whose step compiles."""


class HostReads(TorchFunctionMode):
    """In the second step, finds the first read before the optimizer's step, and says it once with file and line."""

    def __init__(self) -> None:
        super().__init__()
        self._step, self._watches, self._has_said = 0, False, False

    def begin_step(self) -> None:
        """The batch of the next step is there."""
        self._step += 1
        if self._step == _STEP:
            self._watches = True
            self.__enter__()

    def end(self) -> None:
        """An optimizer steps, or the step ends: what is read from now on cuts nothing."""
        if self._watches:
            self._watches = False
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._has_said and func in _READS and isinstance(args[0], Tensor) and args[0].device.type == "xla":
            self._has_said = True
            log.warning(
                "%s reads a number before the optimizer's step: in each step XLA runs what came before, and computes "
                "it again for the backward. Read it after the step, or let accelerator.log read it",
                _line_of_script(sys._getframe(1)),  # pyright: ignore[reportPrivateUsage]
            )
        return func(*args, **(kwargs or {}))


def _line_of_script(frame: FrameType) -> str:
    """File and line of the innermost frame outside of packages."""
    current: FrameType | None = frame
    while current is not None and "site-packages" in current.f_code.co_filename:
        current = current.f_back
    at = current or frame
    return f"{at.f_code.co_filename}:{at.f_lineno}"
