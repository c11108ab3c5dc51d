"""The forward of a block (a unit, a recomputed layer, the model) on XLA: compute dtype, recompute, outputs by rows.

Instances get a new forward, not a wrapper module: no name changes. XLA decides when to gather a sharded weight. This
module decides what XLA may keep: `Copies` of one step (SHARD_GRAD_OP), or barriers that force a second gather.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portable_fsdp.backends.contract import Forward
from portable_fsdp.backends.nested import grad_tensors
from portable_fsdp.backends.torch_xla.runtime import Keep, is_float
from portable_fsdp.backends.weight_uses import Use, cast_weight, distinct, swapped
from portable_fsdp.layout import Spec

Mark = Callable[[Tensor], None]
"""Annotates a tensor with its sharding over the mesh, in place."""

Barrier = Callable[[list[Tensor]], None]
"""Optimization barrier: XLA neither moves operations across it nor merges equal ones on both sides. In place."""


class Copies:
    """Weights in their compute dtype replace the masters while a block runs; gradients reach the masters.

    A block casts at use; XLA gathers for forward and again for backward. With `keep` one gathered copy of each weight
    lives from the model's forward until `release`, after backward. Blocks then use leaves of autograd, whose gradients
    `release` passes on. Without leaves a recomputed layer would reach the masters in an order that depends on the
    number of autograd's operations in its threads. XLA would compile again for each order of results.
    """

    def __init__(self, gather: Callable[[Tensor, Spec], Tensor], barrier: Barrier, keep: bool) -> None:
        self._gather, self._barrier, self._keep = gather, barrier, keep
        self._gathered: list[Tensor] = []
        self._kept: dict[tuple[int, torch.dtype], Tensor] = {}  # the same, as leaves
        self._here: dict[tuple[int, torch.dtype], Tensor] = {}  # copies of the running blocks
        self._runs_again_on: list[Tensor] | None = None

    def release(self) -> None:
        """Pass gradients on and drop the copies, after backward. Tensors alive at a program's end are its outputs."""
        pairs = zip(self._gathered, self._kept.values(), strict=True)
        reached = [(copy, leaf.grad) for copy, leaf in pairs if leaf.grad is not None]
        self._gathered, self._kept = [], {}
        if reached:
            torch.autograd.backward([copy for copy, _ in reached], [gradient for _, gradient in reached])

    @contextmanager
    def again(self, inputs: list[Tensor]) -> Generator[None]:
        """Context of a block's second run, on `inputs`."""
        self._runs_again_on = inputs
        try:
            yield
        finally:
            self._runs_again_on = None

    @contextmanager
    def in_place(self, uses: list[Use]) -> Generator[None]:
        """Context in which a block runs with the compute copies of `uses`; also decorates its forward."""
        copies = self._kept or {use.key: cast_weight(use) for use in distinct(uses)}
        if self._runs_again_on is not None and not self._kept:
            # Without a barrier XLA would merge the gathers of both runs, and keep the weights in between.
            copies = {key: copy * 1 for key, copy in copies.items()}
            self._barrier([*copies.values(), *self._runs_again_on])
            copies = {use.key: self._gather(copies[use.key], use.spec) for use in distinct(uses)}
        replaced = [use for use in uses if not use.splits_gradient]
        around, self._here = self._here, {**self._here, **copies}
        try:
            with swapped(replaced, [copies[use.key] for use in replaced]):
                yield
        finally:
            self._here = around

    def of(self, use: Use) -> Tensor:
        """Return the copy of a weight for a use in a running block that `splits_gradient`."""
        return self._here[use.key]

    def run_model(self, uses: list[Use], forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        """Run the model's `forward`: gathered copies live until after backward, or without gradients until its end."""
        is_first = not self._gathered  # a second forward before the backward uses the same copies
        if is_first and self._keep:
            kept = list(distinct(uses))
            self._gathered = [self._gather(cast_weight(use), use.spec) for use in kept]
            leaves = [copy.detach().requires_grad_(copy.requires_grad) for copy in self._gathered]
            self._kept = {use.key: leaf for use, leaf in zip(kept, leaves, strict=True)}
        try:
            return forward(*args, **kwargs)
        finally:
            if is_first and not torch.is_grad_enabled():
                self.release()


class _KeptProducts(TorchDispatchMode):
    """Adds the outputs of matrix products to `kept`; `again`: reuses them instead of running the products.

    It works below autograd, which computes the gradients of the products as before.
    """

    def __init__(self, kept: list[Tensor], *, again: bool) -> None:
        super().__init__()
        self._kept, self._again = kept, again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_product(func):
            return func(*args, **(kwargs or {}))
        if self._again:
            return self._kept.pop(0)
        self._kept.append(out := func(*args, **(kwargs or {})))
        return out


def is_product(operation: Any) -> bool:
    """Whether an operation is a matrix product, which `memory.save_ops` can keep."""
    of_aten = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
    return str(operation) in (*of_aten, "portable_fsdp.int8_product.default")


@contextmanager
def keep_products(keep: Keep, kept: list[Tensor], *, again: bool) -> Generator[None]:
    """Extend `keep` to the outputs of matrix products."""
    # The first run records a graph too, which is dropped: torch forms other products if no gradient is needed.
    with torch.enable_grad(), keep(kept, again=again), _KeptProducts(kept, again=again):
        yield


def keep_rows_split(unit: nn.Module, mark_rows: Mark) -> None:
    """Keep the unit's output split by rows, so that XLA gathers weights and not activations."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(output) if is_float(leaf)]
        if tensors:
            mark_rows(tensors[0])

    unit.register_forward_hook(hook)


def finish_backward(layer: nn.Module, barrier: Barrier) -> None:
    """Let backward leave the layer only when its gradients are done, else gathered weights of all layers stay alive.

    Like torch_xla's `apply_backward_optimization_barrier`, which warns if a layer's input needs no gradient.
    """

    def wait_for_weights(gradient: Tensor) -> None:
        done = [weight.grad for weight in layer.parameters() if weight.grad is not None]
        barrier([*done, gradient])

    def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in grad_tensors((args, kwargs))[:1]:
            tensor.register_hook(wait_for_weights)

    layer.register_forward_pre_hook(hook, with_kwargs=True)
