"""Units of XlaFullyShardedDataParallel behind the forwards of modules, and layers that run again in backward.

All of it is put behind a module's forward and not among the modules, so that no name changes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from portable_fsdp.backends.base import ShardPolicy
from portable_fsdp.backends.pjrt import Forward, recomputed


def wrap_forwards(model: nn.Module, policy: ShardPolicy, make_unit: Callable[[nn.Module], Any]) -> list[Any]:
    """The units, inner ones before those around them, the root last.

    `make_unit` makes an XlaFullyShardedDataParallel of a module; it takes all parameters that none before it took. A
    layer that is a unit is gathered before it runs for the first time, and again before it runs in backward.
    """
    trains = {name for name in policy.recompute if any(p.requires_grad for p in model.get_submodule(name).parameters())}
    units: list[Any] = []
    bodies: dict[str, _Body] = {}
    for name in (*reversed(policy.units), ""):
        module = model.get_submodule(name)
        bodies[name] = _Body(module, [] if name else units)
        unit = make_unit(bodies[name])
        # C1: gradients are summed. set_gradient_divide_factors(1, 1) would move the mean into the reduction.
        unit.gradient_predivide_factor = unit.gradient_postdivide_factor = 1.0
        unit.reduce_scatter_op = _ReduceScatter(unit.reduce_scatter_op, policy.reduce)
        bodies[name].run = module.forward  # only now: the unit has given linear modules a forward of its own
        module.forward = functools.partial(unit)
        units.append(unit)
    for name in policy.recompute:
        if name in bodies:
            bodies[name].run = recomputed(bodies[name].run, name in trains)
        else:
            layer = model.get_submodule(name)
            layer.forward = recomputed(layer.forward, name in trains)
    return units


class _Body(nn.Module):
    """What a unit wraps: a module under the forward that it had, so that the module itself stays where it is.

    The root's holds all units too, since the root looks for them among its own modules.
    """

    run: Forward

    def __init__(self, module: nn.Module, inner: Sequence[nn.Module]) -> None:
        super().__init__()
        self.module = module
        self.inner = nn.ModuleList(inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class _ReduceScatter:
    """The engine's, in the dtype asked for.

    torch_xla 2.9 gives it float32 whatever `fp32_reduce_scatter` says: a full parameter stays float32 to autograd,
    which casts the gradient to that, and only its values are of the compute dtype.
    """

    def __init__(self, scatter: Any, dtype: torch.dtype) -> None:
        self.flush = scatter.flush
        self._scatter, self._dtype = scatter, dtype

    def __call__(self, gradient: Tensor, done: Callable[[Tensor], None]) -> None:
        self._scatter(gradient.to(self._dtype), done)
