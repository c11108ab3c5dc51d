"""Several backwards through one forward on FSDP2, which by itself frees a unit after its first."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from portable_fsdp.runtime.errors import BackendError


class KeptGathered:
    """From its making to `end`, units (FSDP's states of them) stay gathered and reduce no gradients: several backwards
    run through one forward, and the first would reshard weights that the next one reads."""

    def __init__(self, states: Iterable[Any]) -> None:
        values = {"post_forward_mesh_info": None, "reshard_after_backward": False, "reduce_grads": False}
        self.groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
        self._before = [{name: getattr(group, name) for name in values} for group in self.groups]
        for group in self.groups:
            vars(group).update(values)

    def end(self) -> None:
        for group, values in zip(self.groups, self._before, strict=True):
            vars(group).update(values)


@contextmanager
def kept_gathered(units: Iterable[FSDPModule]) -> Generator[None]:
    """Context of several backwards through one forward: units stay gathered, and reduce their gradients at its end."""
    kept = KeptGathered(cast(Any, unit)._get_fsdp_state() for unit in units)
    try:
        yield
    finally:
        kept.end()
    for group in kept.groups:
        group.post_backward()
    for group in kept.groups:
        group.finalize_backward()
        group._training_state = type(group._training_state).IDLE


class GradientGraphs:
    """Notes which models have a gradient taken by `autograd.grad(..., create_graph=True)`, and keeps those gathered on
    FSDP2, which would free a unit after its first backward, until the backward of a loss that may hold this gradient.
    """

    def __init__(self) -> None:
        self._kept: dict[nn.Module, KeptGathered] = {}
        self._is_inside = False  # of `backward`

    def watch(self, model: nn.Module) -> None:
        """FSDP2 runs a hook of each unit before its backward, where autograd records only with `create_graph`."""
        states = [cast(Any, unit)._get_fsdp_state() for unit in model.modules() if isinstance(unit, FSDPModule)]

        def note(hook: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
            if not self._is_inside and any(map(_accumulates, states)):
                raise BackendError(
                    f"backward: {type(model).__name__} is sharded, and gradients of a loss's own backward would be "
                    "sums, not means.\n  Write accelerator.backward(loss) in place of loss.backward()."
                )
            if torch.is_grad_enabled() and model not in self._kept:
                self._kept[model] = KeptGathered(states)
            return hook(gradient)

        for state in states:
            state._pre_backward = partial(note, state._pre_backward)

    @contextmanager
    def backward(self) -> Generator[list[nn.Module]]:
        """Context of a backward, with these models, whose units behave as before: it needs `second_derivatives`."""
        models = [*self._kept]
        for kept in self._kept.values():
            kept.end()
        self._kept.clear()
        self._is_inside = True
        try:
            yield models
        finally:
            self._is_inside = False


def _accumulates(state: Any) -> bool:
    """Whether the running backward adds to the gradients of a unit: `autograd.grad` doesn't."""
    weights = state._fsdp_param_group.fsdp_params if state._fsdp_param_group is not None else ()
    leaves = (getattr(weight, "_unsharded_param", None) for weight in weights)
    will_run = cast(Any, torch)._C._will_engine_execute_node
    return any(will_run(get_gradient_edge(leaf).node) for leaf in leaves if leaf is not None and leaf.requires_grad)
