"""The tensors that enter and leave an FSDP2 unit, wherever they are: in dataclasses, in lists that a block appends to,
in attributes that it sets.

In backward FSDP2 gathers a unit when the gradient of one of its outputs arrives. It reduces and frees the unit when the
gradients of all its inputs are there. By itself it knows only the values that the forward takes and returns, and
searches only lists, tuples and dicts.
"""

import traceback
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction

from portable_fsdp.backends.nested import Replacement, grad_tensors, tensors_in, tensors_of_modules
from portable_fsdp.runtime.errors import BackendError

_CAUSES = {
    "RegisterPostBackwardFunction": (
        "changes one of its inputs in place, which FSDP2 tracks",
        "Compute a new tensor there: x = x + y, not x += y",
    ),
    "mixed torch.Tensor and DTensor": (
        "uses weights of a unit outside the unit's forward, which gathers them",
        "Call the unit itself",
    ),
    "out of bounds for storage of size 0": (
        "is a unit whose weights backward needs before the gradient of any of its outputs arrives. A loss that holds a "
        "gradient (create_graph=True: forces, gradient penalties) needs `with engine.second_derivatives(model):`",
        "Return all that the loss needs from its forward (gradient checkpointing reruns blocks in backward:\n"
        "  clear a list that they append to at the beginning of the model's forward, not at its end)",
    ),
}


def explain(error: RuntimeError, models: Iterable[nn.Module]) -> None:
    """Raise BackendError, which names the module, if torch's error is about a unit that FSDP2 can't track."""
    for words, (problem, fix) in _CAUSES.items():
        if words in str(error):
            names = {module: name for model in models for name, module in model.named_modules()}
            # In backward no module runs: name the last unit that backward hasn't reached.
            places: list[Any] = [*[*names][:1], *(m for m in names if "storage" in words and _is_idle(m))]
            places += [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
            place = next(m for m in reversed(places) if isinstance(m, nn.Module) and m in names)
            kind = type(place).__name__.removeprefix("FSDP" if isinstance(place, FSDPModule) else "")
            raise BackendError(
                f"backend native: {names[place] or 'the model'} ({kind}) {problem}.\n"
                f"  {fix}, or set sharding.wrap=NO_WRAP, or sharding.strategy=NO_SHARD."
            ) from error


def _is_idle(module: nn.Module) -> bool:
    group = cast(Any, module)._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
    return group is not None and group._training_state.name == "IDLE"


class Boundary:
    """Finds the input and output tensors, for FSDP2, of a unit or of a group of modules that are gathered together."""

    def __init__(self, unit: FSDPModule) -> None:
        self._state = cast(Any, unit)._get_fsdp_state()
        self._group = self._state._fsdp_param_group  # None: no weights
        self._modules: list[nn.Module] = []  # set once all units exist
        self._arguments: Any = ()
        self._replaced = Replacement(lambda tensor: tensor)
        self._outside: set[int] = set()  # ids of tensors that the unit didn't make
        self._state._register_pre_backward_hook = self._leave
        if self._group is not None:
            self._group._register_post_backward_hook = self._enter

    def _enter(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments for the unit's forward."""
        self._arguments = args, kwargs
        if torch.is_grad_enabled() and (entering := grad_tensors((args, kwargs))):
            inside = cast("tuple[Tensor, ...]", cast(Any, RegisterPostBackwardFunction).apply(self._group, *entering))
            by_id = {id(tensor): new for tensor, new in zip(entering, inside, strict=True)}
            self._outside = {id(tensor) for new in inside for tensor in (new, new._base)}
            self._replaced = Replacement(lambda tensor: by_id.get(id(tensor), tensor))
            self._arguments = self._replaced((args, kwargs))
        return self._arguments

    def _leave(self, output: Any) -> Any:
        """Hook the outputs. FSDP2 calls this after the unit's forward, instead of searching `output` itself."""
        self._replaced.write_back()
        if torch.is_grad_enabled():
            self._modules = self._modules or [*self._own_modules()]
            number = cast(Any, torch.autograd)._get_sequence_nr()  # number of the next node
            for tensor in tensors_in((output, self._arguments, tensors_of_modules(self._modules))):
                # An in-place change of a view replaces the view's node in the graph, but not that of its base.
                for leaving in (tensor._base, tensor):
                    if leaving is not None and leaving.grad_fn is not None and id(leaving) not in self._outside:
                        leaving.register_hook(self._state._pre_backward)
                        # Backward runs ready nodes in descending order of these numbers: this one before the unit's.
                        node = cast(Any, leaving.grad_fn)
                        if node._sequence_nr() < number - 1:
                            node._set_sequence_nr(number)
        self._arguments, self._outside = (), set()
        self._replaced = Replacement(lambda tensor: tensor)
        return output

    def _own_modules(self) -> Iterator[nn.Module]:
        """Yield the unit's modules that are in no inner unit."""
        waiting = [*self._state._modules]
        while waiting:
            yield (module := waiting.pop())
            waiting += [child for child in module.children() if not isinstance(child, FSDPModule)]
