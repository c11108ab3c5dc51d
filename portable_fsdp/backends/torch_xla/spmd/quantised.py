"""Quantised weights on XLA: devices gather their bytes, and comparisons dequantise them: look-ups are slow on TPUs."""

# Parameters are replaced in a module's own table.
# pyright: reportPrivateUsage=false

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode

from portable_fsdp.backends.contract import Fill, ShardPolicy
from portable_fsdp.backends.torch_xla.spmd.forward import Barrier
from portable_fsdp.backends.torch_xla.spmd.tensors import Layouts, as_operation
from portable_fsdp.backends.weight_uses import dtype_of
from portable_fsdp.layout import Region, Spec
from portable_fsdp.quantised import BLOCK, NF4, ByteTable, expand, expanded, quantised_modules, scaled


def use_tables(model: nn.Module, policy: ShardPolicy, layouts: Layouts, barrier: Barrier) -> None:
    """Gather the bytes of tables, on meta, at use; let experts dequantise them in their forwards."""
    # One function for equal layers: a loop can run them.
    gathering = cache(lambda spec: partial(_gather_and_dequantise, layouts, barrier, spec))
    for name, module in quantised_modules(model).items():
        tables = {leaf: expanded(table) for leaf, table in module.quantised.tables.items()}
        for leaf, table in tables.items():
            stored = torch.empty(table.stored_shape, dtype=torch.int8, device="meta")
            module._parameters[leaf] = nn.Parameter(stored, requires_grad=False)
        for key in [key for key in module._buffers if key.startswith("quantised_")]:
            del module._buffers[key]
        ways = {leaf: gathering(policy.layouts[f"{name}.{leaf}"]) for leaf in tables}
        module.quantised = module.quantised._replace(tables=tables, ways=ways)
        if not module.quantised.in_forward:
            module.forward = partial(_run_dequantised, module, dtype_of(name, policy))


def _gather_and_dequantise(
    layouts: Layouts,
    barrier: Barrier,
    spec: Spec,
    stored: Tensor,
    table: ByteTable,
    dtype: torch.dtype,
    gradient: Tensor | None,
) -> Tensor:
    if gradient is not None and detect_fake_mode() is None:
        # Without a barrier XLA would dequantise once, and keep the weight from forward to backward.
        stored = stored * 1
        barrier([stored, gradient])
    rows = layouts.gathered_bytes(stored, spec)
    codes, scales = rows[..., : table.code_bytes], _as_float32(rows[..., table.code_bytes :])
    return scaled(codes if table.scheme == "int8" else nf4_values(codes), scales, table, dtype)


def _constant(number: float, like: Tensor) -> Tensor:
    """Return `[1]`, int32 or float32, a constant of the program. torch_xla 2.9 makes an input of a Python number, and
    keeps 128 of them: with more, each step would be another program."""
    dtype, step = torch.int32 if isinstance(number, int) else torch.float32, max(1, abs(number))
    return torch.arange(number, number + step, step, dtype=dtype, device=like.device)


def nf4_values(codes: Tensor) -> Tensor:
    """int8 `[..., n * 32]`, as `expand` makes them -> float32 `[..., n, 64]`: by a tree of comparisons that a compiler
    fuses."""
    # torch_xla 2.9 rounds a shifted negative number toward zero: make them positive before.
    whole = codes.unflatten(-1, (-1, BLOCK // 2)).int() & _constant(255, codes)
    both = torch.cat([whole >> _constant(4, codes), whole & _constant(15, codes)], dim=-1)
    values = [_constant(level, codes) for level in NF4]
    for bit in range(4):
        has_bit = (both & _constant(1 << bit, codes)).bool()
        values = [torch.where(has_bit, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _as_float32(rows: Tensor) -> Tensor:
    """int8 `[..., 4 * n]` -> the float32 numbers `[..., n]` of these bytes; torch_xla runs Tensor.view on the host."""
    four = rows.unflatten(-1, (-1, 4))
    return as_operation("as_float32", lambda x: [_bitcast()(x)], lambda x: [x[..., 0].float()], four)[0]


@cache  # torch_xla keeps each operation that is registered
def _bitcast() -> Callable[[Tensor], Tensor]:
    from torch_xla.core import xla_builder, xla_op_registry

    return xla_op_registry.register("as_float32", lambda four_bytes: four_bytes.bitcast(xla_builder.Type.F32))


def _run_dequantised(module: Any, dtype: torch.dtype, /, *args: Any, **kwargs: Any) -> Any:
    tables = {leaf: module._parameters[leaf] for leaf in module.quantised.tables}
    try:
        for leaf, stored in tables.items():
            module._parameters[leaf] = module.quantised.weight(module, leaf, stored, dtype)
        return type(module).forward(module, *args, **kwargs)
    finally:
        module._parameters.update(tables)


def expanded_piece(fill: Fill, policy: ShardPolicy, fqn: str, where: Region) -> Tensor:
    """The `fill` of the model with expanded tables."""
    piece = fill(fqn, where)
    return expand(piece, policy.tables[fqn]) if fqn in policy.tables else piece
