"""What a policy does to a model's forwards on XLA, in the order of application. Weights are not touched here."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from portable_fsdp.backends.base import ShardPolicy
from portable_fsdp.backends.pjrt import recomputed
from portable_fsdp.backends.xla.attention import with_flash_attention
from portable_fsdp.backends.xla.forward import (
    Barrier,
    Copies,
    Use,
    finish_backward,
    in_own_dtype,
    keep_rows_split,
    run_with,
    uses_by_block,
    weight_uses,
)
from portable_fsdp.backends.xla.layouts import ROWS, Layouts
from portable_fsdp.backends.xla.reduce import replace_forwards, summed_in_float32
from portable_fsdp.backends.xla.scan import LayerLoop


def wrap_forwards(
    model: nn.Module,
    policy: ShardPolicy,
    layouts: Layouts,
    barrier: Barrier,
    *,
    keep: bool,
    flash: bool,
    sum_in_float32: bool,
) -> Copies:
    """Innermost first: attention, a dtype of its own, compute copies, recompute; then hooks on what a block gives.

    `keep`: one gathered copy of each weight a step; who runs the step calls `release` on what is returned after
    backward. `flash`: attention by the TPU's kernel. `sum_in_float32`: gradients, over devices, in any compute dtype.
    Raises BackendError for layers that can't be scanned, and for weights whose gradients can't be summed so.
    """
    head = cast(Any, model).get_output_embeddings()
    for name in policy.layers if flash else ():
        layer = model.get_submodule(name)
        layer.forward = with_flash_attention(layer.forward, layouts.mesh, ROWS)
    for name, dtype in policy.modules.items():
        module = model.get_submodule(name)
        module.forward = in_own_dtype(module.forward, dtype, None if module is head else policy.compute)
    uses = weight_uses(model, policy.compute, policy.modules)
    if sum_in_float32:
        uses = summed_in_float32(uses)
    in_loop = {fqn: use for fqn, use in uses.items() if policy.scan_layers and _is_inside(fqn, policy.layers)}
    outside = {fqn: use for fqn, use in uses.items() if fqn not in in_loop}
    blocks = {*policy.units, *policy.recompute}
    if policy.scan_layers:
        recompute = bool(policy.recompute)
        LayerLoop(model, policy.layers, policy.units, in_loop, layouts, gather=keep, recompute=recompute)
        blocks = {name for name in blocks if not _is_inside(name, policy.layers)}
    copies = Copies(layouts.gathered, barrier, keep)
    replace_forwards(uses, copies, layouts.shard)
    for name, owned in uses_by_block(outside, blocks).items():
        block = model.get_submodule(name)
        block.forward = run_with(block.forward, copies, owned)
        if name in policy.recompute:
            trains = any(weight.requires_grad for weight in block.parameters())
            block.forward = recomputed(block.forward, trains, copies.again)
        if name in policy.units and block is not head:
            keep_rows_split(block, layouts.split_rows)
    if head is not None:  # unit or not: else the logits would be split by words
        keep_rows_split(head, layouts.split_rows)
    for name in () if policy.scan_layers else policy.layers:
        finish_backward(model.get_submodule(name), barrier)
    model.forward = _gathering(model.forward, copies, list(outside.values()))
    return copies


def _is_inside(name: str, modules: tuple[str, ...]) -> bool:
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def _gathering(forward: Callable[..., Any], copies: Copies, uses: list[Use]) -> Callable[..., Any]:
    """The model's forward; gathered copies exist from its start until backward, without gradients until its end."""

    def run(*args: Any, **kwargs: Any) -> Any:
        copies.gather_all(uses)
        try:
            return forward(*args, **kwargs)
        finally:
            if not torch.is_grad_enabled():
                copies.release()

    return run
