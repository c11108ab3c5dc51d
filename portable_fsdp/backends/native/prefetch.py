"""Prefetching for FSDP2: gather k units ahead, in the order in which the model runs them.

The order is that of the first forward, not that of definition. By default FSDP2 gathers a unit in forward when it is
needed, and in backward one unit ahead; that stays unless the config sets something else.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.native.units import UnitGroup
from portable_fsdp.backends.nested import grad_tensors


class Prefetch:
    """Watches the first forward of `units` (the root first), then sets which units each of them gathers ahead."""

    def __init__(self, units: list[UnitGroup], policy: ShardPolicy) -> None:
        self._units, self._policy = units, policy
        self._first: list[FSDPModule] = []  # gathered before the root's forward
        self._began: list[UnitGroup] = []
        self._ended: list[UnitGroup] = []  # units that take part in backward
        self._watching: list[RemovableHandle] = []
        requested = (policy.forward_prefetch, policy.backward_prefetch, policy.backward_prefetch_units)
        # FSDP2 counts a group inside a recomputed layer twice, and then gathers the wrong unit ahead.
        runs_twice = policy.recompute and any(group.inside for group in units)
        if requested != (0, "BACKWARD_PRE", 1) or runs_twice:
            self._watch()

    def before_forward(self) -> None:
        """Start to gather the root and the first units, overlapping the work before their forward."""
        for module in self._first:
            module.unshard(async_op=True)

    def _watch(self) -> None:
        for group in self._units:
            module = cast(nn.Module, group.unit)

            def began(*_: Any, group: UnitGroup = group) -> None:
                if torch.is_grad_enabled():
                    self._began.append(group)

            def ended(_: nn.Module, __: Any, output: Any, group: UnitGroup = group) -> None:
                if not torch.is_grad_enabled():  # evaluation has no backward
                    return
                if grad_tensors(output):
                    self._ended.append(group)
                if group is self._units[0]:
                    self._arrange()

            self._watching += [module.register_forward_pre_hook(began), module.register_forward_hook(ended)]

    def _arrange(self) -> None:
        for handle in self._watching:
            handle.remove()
        self._watching.clear()
        if self._policy.forward_prefetch:
            self._arrange_forward(list(dict.fromkeys(self._began)))
        self._arrange_backward(list(dict.fromkeys(reversed(self._ended))))

    def _arrange_forward(self, order: list[UnitGroup]) -> None:
        ahead = self._policy.forward_prefetch
        for index, group in enumerate(order):
            following = _modules(order[index + 1 : index + 1 + ahead])
            group.unit.set_modules_to_forward_prefetch([*group.inside, *following])
        root, *units = order
        self._first = [root.unit, *root.inside, *_modules(units[:ahead])]

    def _arrange_backward(self, order: list[UnitGroup]) -> None:
        # An empty list selects FSDP2's default, one unit ahead; gathering a gathered unit is a no-op.
        for module in cast(nn.Module, self._units[0].unit).modules():
            if isinstance(module, FSDPModule):
                module.set_modules_to_backward_prefetch([module])
        for index, group in enumerate(order):
            following = _modules(order[index + 1 : index + 1 + self._policy.backward_prefetch_units])
            if self._policy.backward_prefetch == "BACKWARD_PRE":
                group.unit.set_modules_to_backward_prefetch([*reversed(group.inside), *following] or [group.unit])
            elif self._policy.backward_prefetch == "BACKWARD_POST" and following:
                self._gather_after(group.unit, following)

    def _gather_after(self, unit: FSDPModule, following: list[FSDPModule]) -> None:
        """Gather `following` once the gradient of the unit's input is there, before the unit's are reduced."""

        def gather(_: Tensor) -> None:
            for module in following:
                module.unshard(async_op=True)

        def watch_input(_: nn.Module, args: Any, kwargs: Any) -> None:
            # FSDP2's own hook ran before this one, and reduces when the tensor that it passed on gets its gradient.
            for tensor in grad_tensors((args, kwargs))[:1]:
                tensor.register_hook(gather)

        cast(nn.Module, unit).register_forward_pre_hook(watch_input, with_kwargs=True)


def _modules(units: list[UnitGroup]) -> list[FSDPModule]:
    return [module for group in units for module in (group.unit, *group.inside)]
