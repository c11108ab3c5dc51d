"""Which collectives a step runs, and the bytes that they move."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portable_fsdp.backends.base import Traffic

COLLECTIVES = {  # in the words of torch -> of the contract
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
}


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that run inside it, in backward too: autograd's threads inherit the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic: dict[str, Traffic] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kind = COLLECTIVES.get(func.name())
        if kind is not None and _group_size(args) > 1:
            before = self.traffic.get(kind, Traffic(0, 0))
            full = max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            self.traffic[kind] = Traffic(before.calls + 1, before.bytes + full)
        return func(*args, **(kwargs or {}))


def _group_size(args: tuple[Any, ...]) -> int:
    """Processes that take part in a collective: the first object among its arguments is their group."""
    group = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
    return cast(Any, dist.ProcessGroup).unbox(group).size()
