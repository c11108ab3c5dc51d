"""Unsharded models (one device on the shard axis: one GPU, or replicas): use weights in place.

FSDP2 would copy each unit's weights into a buffer and out of it, though there is nothing to gather. Here a weight whose
compute dtype isn't the parameter's is cast when its block runs, and again in backward. Quantised weights use the same
casts: FSDP2 gathers their bytes, viewed as the compute dtype, since it refuses integers.
"""

# A storage's address has no public name.
# pyright: reportPrivateUsage=false

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function

from portable_fsdp.attach import refuse_copies
from portable_fsdp.backends.contract import Forward, ShardPolicy
from portable_fsdp.backends.native.units import (
    ROOT,
    cast_inputs,
    cast_modules,
    forward_of,
    prepare_layer,
    require_unchanged,
)
from portable_fsdp.backends.weight_uses import (
    Use,
    distinct,
    dtype_of,
    quantised,
    swapped,
    uses_by_block,
    weight_uses,
)
from portable_fsdp.config.describe import is_inside
from portable_fsdp.layout import weight_spec
from portable_fsdp.runtime.errors import BackendError

CASTS = "portable_fsdp::cast_weights"  # a section of a profile, which the planner recognizes


def use_in_place(model: nn.Module, policy: ShardPolicy) -> None:
    """Apply casts, gradient checkpointing and compilation of `policy`, without units: nothing is gathered."""
    cast_modules(model, policy)
    compiled = policy.layers if policy.compile_backend else ()
    layers = {*policy.recompute, *compiled}
    # A recomputed or compiled layer is one block: modules inside are cast with it.
    blocks = {name for name in (*policy.units, *layers) if not is_inside(name, layers - {name})}
    casts, known = Casts(), set[tuple[nn.Module, str]]()
    for name, uses in uses_by_block(weight_uses(model, policy), blocks).items():
        block = model.get_submodule(name)
        if policy.cast_inputs and name in (ROOT, *policy.units):  # as FSDP2 does: it may get pixels
            cast_inputs(block, dtype_of(name, policy))
        # A module with several names belongs to the innermost of its blocks, which come first.
        uses = [use for use in uses if _needs_copy(use) and (use.module, use.leaf) not in known]
        known |= {(use.module, use.leaf) for use in uses}
        inside = name in policy.recompute and name not in compiled and bool(uses)
        forward = casts.in_place(uses)(forward_of(block)) if inside else None
        prepare_layer(model, policy, name, forward=forward)
        if uses and not inside:
            casts.around(block, uses)
        if uses:
            refuse_copies([block])
    if known:
        keep = not policy.reshard_after_forward
        model.forward = casts.around_all(model.forward, keep, has_tables=bool(policy.tables))
        refuse_copies([model])


def _needs_copy(use: Use) -> bool:
    if (table := quantised(use)) is not None:
        return not table.in_forward
    return use.weight.is_floating_point() and use.weight.dtype != use.dtype


def _copy_of(use: Use, weight: Tensor) -> Tensor:
    table = quantised(use)
    return weight.to(use.dtype) if table is None else table.weight(use.module, use.leaf, weight, use.dtype)


class _Cast(NamedTuple):
    """The record that autograd keeps in place of a cast copy, or of a view of it."""

    storage: int
    weight: Tensor
    version: int  # of the weight
    use: Use
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Casts:
    """Copies of weights in their compute dtype, cast or dequantised, which exist while a block runs."""

    def __init__(self) -> None:
        self._running: dict[int, tuple[Use, Tensor, Tensor]] = {}  # by the copy's storage: the weight and the copy
        self._entered: list[tuple[nn.Module, AbstractContextManager[None]]] = []  # blocks whose forward runs

    @contextmanager
    def in_place(self, uses: list[Use]) -> Generator[None]:
        """Context in which modules use copies in place of the weights of `uses`; also decorates a forward."""
        with record_function(CASTS):
            copies = {use.key: _copy_of(use, use.weight) for use in distinct(uses)}
        running = {
            _storage(copies[use.key]): (use, use.weight.detach(), copies[use.key].detach()) for use in distinct(uses)
        }
        self._running |= running
        try:
            with swapped(uses, [copies[use.key] for use in uses]):
                yield
        finally:
            for key in running:
                del self._running[key]

    def around(self, block: nn.Module, uses: list[Use]) -> None:
        """Put the copies in place around a block's forward, even if that is replaced later."""

        def begin(*_: Any) -> None:
            self._entered.append((block, self.in_place(uses)))
            self._entered[-1][1].__enter__()

        def end(*_: Any) -> None:
            if self._entered and self._entered[-1][0] is block:  # else an earlier hook raised
                self._leave()

        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end, prepend=True, always_call=True)

    def _leave(self) -> None:
        self._entered.pop()[1].__exit__(None, None, None)

    def around_all(self, forward: Forward, keep: bool, *, has_tables: bool = False) -> Forward:
        """Wrap the model's `forward`. Without `keep` autograd keeps none of its copies, and backward casts again; it
        keeps no dequantised ones anyway."""

        def pack(tensor: Tensor) -> tuple[Tensor, int] | _Cast:
            storage = _storage(tensor)
            if storage not in self._running or (keep and quantised(self._running[storage][0]) is None):
                return tensor, tensor._version
            use, weight, _ = self._running[storage]
            offset = int(tensor.storage_offset())
            return _Cast(storage, weight, weight._version, use, tensor.size(), tensor.stride(), offset)

        def unpack(kept: tuple[Tensor, int] | _Cast) -> Tensor:
            if not isinstance(kept, _Cast):
                require_unchanged(*kept, kept[0].shape)
                return kept[0]
            if kept.weight._version != kept.version:
                raise BackendError("backend native: a weight was modified between a forward and its backward.")
            _, weight, copy = self._running.get(kept.storage, (None, None, None))
            if weight is not kept.weight or copy is None:  # else a gradient is taken within the block's forward
                with record_function(CASTS):
                    copy = _copy_of(kept.use, kept.weight)
            return copy.as_strided(kept.size, kept.stride, kept.offset)

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                with nullcontext() if keep and not has_tables else saved_tensors_hooks(pack, unpack):
                    return forward(*args, **kwargs)
            except BaseException:
                while self._entered:  # after Ctrl-C torch calls no hook
                    self._leave()
                raise

        return run


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# ------------------------------------------------------------------------------------------------- quantised weights


def view_tables(model: nn.Module, policy: ShardPolicy) -> None:
    """View each table, on meta, as the compute dtype of its module, so that FSDP2 doesn't cast it. Raises BackendError
    for experts in compiled layers."""
    from portable_fsdp.quantised import quantised_modules

    for name, module in quantised_modules(model).items():
        if policy.compile_backend is not None and not module.quantised.in_forward:
            raise BackendError(
                f"backend native: precision.frozen: {name}: a compiled layer would keep its dequantised experts until "
                "backward.\n  Set compile.enabled=false, or precision.frozen=bfloat16."
            )
        for leaf in module.quantised.tables:
            viewed = module._parameters[leaf].view(dtype_of(name, policy))
            module._parameters[leaf] = nn.Parameter(viewed, requires_grad=False)


def dequantise_experts(model: nn.Module, policy: ShardPolicy) -> None:
    """Let modules of experts in units use dequantised weights, which autograd doesn't keep."""
    from portable_fsdp.quantised import quantised_modules

    casts, modules = Casts(), quantised_modules(model)
    experts = {name: module for name, module in modules.items() if not module.quantised.in_forward}
    for name, module in experts.items():
        uses = [Use(module, leaf, dtype_of(name, policy), weight_spec(2)) for leaf in module.quantised.tables]
        casts.around(module, uses)
    if experts:
        cast(Any, model).forward = casts.around_all(model.forward, keep=True, has_tables=True)
