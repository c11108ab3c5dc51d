"""What a script's own operations do between the engine's: reads of a device's values in the middle of a step, which on
XLA cut its program in two, and an average of weights that was copied before they were sharded."""

import sys
import sysconfig
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_leaves, tree_map

from portable_fsdp.accelerator.state import log

_READS = (Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.tolist, Tensor.cpu, Tensor.numpy)
_STEP = 3
"""The number of the point that is watched: after the begin of an epoch, and the first batch, whose step compiles."""


class _ScriptMode(TorchFunctionMode):
    """A mode that begins and ends at any point of a script, also inside a mode of the script's."""

    def __init__(self) -> None:
        super().__init__()
        self._is_entered = self._is_on = False

    def _begin(self) -> None:
        self._is_on = True
        if not self._is_entered:
            self._is_entered = True
            self.__enter__()

    def end(self, *_: Any) -> None:
        self._is_on = False
        if self._is_entered and _get_current_function_mode() is self:  # else the script's would be taken off
            self._is_entered = False
            self.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {}) if self._is_on else func(*args, **(kwargs or {}))

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class HostReads(_ScriptMode):
    """In the second step, finds the first read before the optimizer's step, and says it once with file and line.

    It ends where an optimizer steps, or the step ends: what is read from then on cuts nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._step, self._has_said = 0, False

    def begin_step(self) -> None:
        """The batch of the next step is there."""
        self._step += 1
        if self._step == _STEP:
            self._begin()

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._has_said and func in _READS and isinstance(args[0], Tensor) and args[0].device.type == "xla":
            self._has_said = True
            log.warning(
                "%s reads a number before the optimizer's step: in each step XLA runs what came before, and computes "
                "it again for the backward. Read it after the step, or let accelerator.log read it",
                _line_of_script(sys._getframe(1)),  # pyright: ignore[reportPrivateUsage]
            )
        return func(*args, **kwargs)


_KINDS = ("add", "sub", "mul", "lerp")
_PUTS = {"copy_", "_foreach_copy_"}
_ELEMENTWISE = _PUTS | {
    *("rsub", *_KINDS, *(f"__{kind}__" for kind in _KINDS), *(f"__r{kind}__" for kind in _KINDS)),
    *(name for kind in _KINDS for name in (f"{kind}_", f"__i{kind}__", f"_foreach_{kind}", f"_foreach_{kind}_")),
}
"""Names of torch's functions by which averages of weights are computed and put in."""


class WholeCopies(_ScriptMode):
    """Lets whole copies of weights, made before `prepare`, be averaged with the sharded ones, without gradients.

    Each process has such a copy, as an EMA class makes it (`shadow_params`). It stays whole: weights are gathered for
    it, one operation at a time. *collective* `put(weight, value)` overwrites a weight, or returns False for values that
    each process has its part of. It is on from an optimizer's
    step, a loader's end or a forward without gradients to the next batch, forward or backward, and where scripts save:
    it slows each of torch's functions. For other operations of both, torch raises its error.
    """

    def __init__(self, put: Callable[[DTensor, Tensor], bool]) -> None:
        super().__init__()
        self._put, self._is_used = put, False

    def watch(self, model: nn.Module) -> None:
        """Begin to work, if this model is sharded."""
        if any(isinstance(weight, DTensor) for weight in model.parameters()):
            self._is_used = True
            model.register_forward_pre_hook(self.end, prepend=True)
            model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else self._begin())
            self._begin()

    def begin(self) -> None:
        if self._is_used:
            self._begin()

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _ELEMENTWISE or not args:
            return func(*args, **kwargs)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor) and value.dim()]
        has_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        targets, *others = (value if isinstance(value, (list, tuple)) else [value] for value in args)
        if name in _PUTS and isinstance(targets[0], DTensor) and not has_gradient:
            for target, value in zip(targets, others[0], strict=True):
                if not self._put(target, value):
                    target.copy_(value)
            return args[0]
        if has_gradient or len({isinstance(tensor, DTensor) for tensor in tensors}) < 2:
            return func(*args, **kwargs)

        def whole(value: Any) -> Any:
            return value.full_tensor() if isinstance(value, DTensor) else value

        return func(*tree_map(whole, args), **tree_map(whole, kwargs))


def _line_of_script(frame: FrameType) -> str:
    """File and line of the innermost frame outside of packages and Python's library."""
    current: FrameType | None = frame
    others = ("<frozen", *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    while current is not None and current.f_code.co_filename.startswith(others):
        current = current.f_back
    at = current or frame
    return f"{at.f_code.co_filename}:{at.f_lineno}"
