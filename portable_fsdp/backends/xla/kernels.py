"""torch_xla's Pallas kernels, lowered so that the TPU compiler it comes with can read them.

torch_xla 2.9.0 pins jax 0.7.1 and libtpu 0.0.21, and lowers a kernel with `jax.jit(...).lower`. That writes version 8
of the kernels' format, which this libtpu refuses: "Failed to deserialize the Mosaic module [...] expected <= 7 but got
8" (pytorch/xla issue 9614). `jax.export` writes the format of a month before, so that older compilers can read it. It
lowers for TPUs wherever it runs: a plan holds the same kernel as a run.
"""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor


def use_readable_kernels() -> None:
    """Take the place of torch_xla's `trace_pallas` in this process. May go with the torch_xla that mends it."""
    import torch_xla.experimental.custom_kernel

    kernels = cast(Any, torch_xla.experimental.custom_kernel)
    if not isinstance(kernels.trace_pallas, _Lowering):
        kernels.trace_pallas = _Lowering(kernels.to_jax_shape_dtype_struct)


class _Lowering:
    """`trace_pallas(kernel, *args, **kwargs)` -> (what XLA's custom call takes, the tensors among `args`)."""

    def __init__(self, abstract: Callable[[Tensor], Any]) -> None:
        self._abstract = abstract
        self._lowered: dict[tuple[Any, str], str] = {}

    def __call__(
        self,
        kernel: Callable[..., Any],
        *args: Any,
        static_argnums: Any = None,
        static_argnames: Any = None,
        use_cache: bool = False,  # always kept: a kernel has few shapes, and lowering one takes a second
        **kwargs: Any,
    ) -> tuple[str, list[Tensor]]:
        shapes = [self._abstract(argument) if isinstance(argument, Tensor) else argument for argument in args]
        key = kernel, str((shapes, kwargs))
        if key not in self._lowered:
            self._lowered[key] = _lowered(kernel, static_argnums, static_argnames, shapes, kwargs)
        return self._lowered[key], [argument for argument in args if isinstance(argument, Tensor)]


def _lowered(
    kernel: Callable[..., Any], static_argnums: Any, static_argnames: Any, args: list[Any], kwargs: dict[str, Any]
) -> str:
    import jax
    from jax import export
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    jitted = jax.jit(kernel, static_argnums=static_argnums, static_argnames=static_argnames)
    exported = export.export(jitted, platforms=["tpu"])(*args, **kwargs)
    with mlir.make_ir_context():
        module = cast(Any, ir.Module.parse(exported.mlir_module()))
        operations = [op for function in module.body.operations for op in function.regions[0].blocks[0].operations]
        return next(op.attributes["backend_config"].value for op in operations if op.name == "stablehlo.custom_call")
