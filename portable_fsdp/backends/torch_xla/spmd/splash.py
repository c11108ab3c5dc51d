"""The attention kernel of TPUs: jax's splash attention, forward and backward, as computations for torch_xla.

Forward returns the output and the log-sum-exp of each position's scores; backward starts from both. Key and value heads
are not repeated, windows and documents need no mask in memory, and fully masked blocks are skipped.
Written for jax 0.7.1; imports it in functions only.
"""

# jax's backward has no public name, and is otherwise reached only through its automatic differentiation.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from portable_fsdp.backends.torch_xla.spmd.experts import GroupedProduct

_FORWARD_BLOCK = 1024  # queries and keys; not measured on a chip
# The fused backward writes a copy of the queries' gradient for each block of keys, and XLA adds them: larger blocks of
# keys write less, but compute more that the causal mask then hides.
_BACKWARD_QUERIES, _BACKWARD_KEYS = 512, 1024
_AT_ONCE = 512  # keys
# Copies grow as the square of the length. From the first number on blocks have twice the keys. Above the second, copies
# would take most of the memory: a second kernel computes the queries' gradient, and repeats 2 of backward's 5 products.
_MANY_COPIES, _MOST_COPIES = 32, 64


@dataclass(frozen=True)
class Kernel:
    """Causal attention of one kind.

    Args:
        window: number of tokens that a position sees, itself included; None: all before it.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        interpret: run on CPUs, by plain operations in the kernel's order.
        parts: devices that share the queries of a row; each has those of its `positions` and all keys and values.
    """

    window: int | None = None
    softcap: float | None = None
    interpret: bool = False
    parts: int = 1

    def visible(self, length: int) -> int:
        """Return the number of visible pairs of positions of one part; the diagonal counts half."""
        window = min(self.window or length, length)
        return (window * length - window * window // 2) // self.parts

    def positions(self, length: int) -> np.ndarray:
        """Return the position in the row of each query, int32 `[length]`, one part after the other.

        Each of `parts` neighbouring pieces of a row is cut again, and its pieces go to the parts in turn, in every
        other one backwards: then causal attention is equal work for all parts.
        """
        first = np.arange(self.parts) * self.parts
        pieces = [first + np.where(np.arange(self.parts) % 2, self.parts - 1 - at, at) for at in range(self.parts)]
        size = length // self.parts**2
        return (np.concatenate(pieces)[:, None] * size + np.arange(size)).ravel().astype(np.int32)

    def flops(self, function: Callable[..., Any], kinds: "Sequence[_Kind]") -> int:
        """FLOPs of scores and output; in backward of scores, and the gradients of weights, value, query and key.

        A second kernel in backward repeats scores and the gradient of weights. A product takes 2 operations per head,
        element of a head and visible pair of positions.
        """
        query, key, value = cast(Any, kinds[:3])
        (rows, heads, _, width), length, value_width = query[0], key[0][2], value[0][-1]
        widths = width + value_width
        if function is not splash_forward:
            widths = 3 * width + 2 * value_width + (0 if _backward_blocks(length, width)[1] else widths)
        return 2 * rows * heads * widths * self.visible(length)


def block_of(length: int, limit: int = _BACKWARD_KEYS) -> int:
    """Return the largest multiple of 128, up to `limit`, that divides `length`."""
    return max(size for size in range(128, limit + 1, 128) if length % size == 0)


def _backward_blocks(length: int, width: int) -> tuple[int, bool]:
    """Return the keys of a block in backward, and whether one kernel computes all gradients."""
    keys = block_of(length, _BACKWARD_KEYS)
    if length // keys >= _MANY_COPIES and width <= 128:  # blocks of wider heads would fill a TPU's fast memory
        keys = block_of(length, 2 * _BACKWARD_KEYS)
    return keys, length // keys <= _MOST_COPIES


def _splash(kernel: Kernel, query: Any, key: Any, part: Any) -> Any:
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    heads, length, width = query.shape[1], *key.shape[2:]
    queries = length // kernel.parts
    # A block of queries from pieces that lie far apart would meet keys that only the later ones see.
    together = _FORWARD_BLOCK if kernel.parts == 1 else max(_BACKWARD_QUERIES, queries // kernel.parts)
    forward, (keys, fused) = block_of(length, _FORWARD_BLOCK), _backward_blocks(length, width)
    blocks = splash.BlockSizes(
        block_q=block_of(queries, min(_FORWARD_BLOCK, together)),
        block_kv=forward,
        block_kv_compute=block_of(forward, _AT_ONCE),
        block_q_dkv=block_of(queries, _BACKWARD_QUERIES),
        block_kv_dkv=keys,
        block_kv_dkv_compute=block_of(keys, _AT_ONCE),
        block_q_dq=None if fused else block_of(queries, _BACKWARD_QUERIES),
        block_kv_dq=None if fused else block_of(length, _AT_ONCE),
        use_fused_bwd_kernel=fused,
    )
    shape = (length, length)
    mask = masks.CausalMask(shape) if kernel.window is None else masks.LocalMask(shape, (kernel.window - 1, 0), 0)
    mask.q_sequence, function = kernel.positions(length), mask.mask_function
    piece = length // kernel.parts**2
    neighbours = not (piece % blocks.block_q or piece % cast(int, blocks.block_q_dkv))

    def is_visible(queries: Any, keys: Any) -> Any:
        # jax looks with numpy at each block for pairs of positions that see each other: minutes in rows of 200,000
        # tokens. If a block's queries are neighbours, and no more than its keys, the first and the last tell.
        few = neighbours and isinstance(queries, np.ndarray)
        return function(queries[[0, -1]] if few else queries, keys)

    mask.mask_function = is_visible
    attend = splash.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=blocks,
        head_shards=1,
        q_seq_shards=kernel.parts,
        save_residuals=True,
        attn_logits_soft_cap=kernel.softcap,
        interpret=kernel.interpret,
    )

    def own(array: Any) -> Any:
        axis = min(1, array.ndim - 1)  # blocks of queries, or queries
        size = array.shape[axis] // kernel.parts
        return jax.lax.dynamic_slice_in_dim(array, part[0] * size, size, axis)

    # All parts run one program, so which blocks they skip is data.
    infos: Any = (attend.fwd_mask_info, attend.dq_mask_info, attend.dkv_mask_info)
    return splash.SplashAttentionKernel(*(infos if kernel.parts == 1 else jax.tree.map(own, infos)), **attend.kwargs)


def _ids(documents: Any, attend: Any) -> Any:
    """The documents of queries and of keys, for a row."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    if documents is None:
        return None
    positions = attend.fwd_mask_info.q_sequence
    whole = len(positions) == len(documents)
    return splash.SegmentIds(documents if whole else documents[positions], documents)


def splash_forward(kernel: Kernel, query: Any, key: Any, value: Any, documents: Any, sinks: Any, part: Any) -> Any:
    """Return the output, and the log-sum-exp as float32 `[rows, heads, queries]`.

    Args:
        query: `[rows, heads, queries, width]`, times the scale of the scores; `queries` is seq / parts.
        key, value: `[rows, heads, seq, width]`; their numbers of heads must divide the query's.
        documents: int32 `[rows, seq]` or None, the document of each position, which attends only within it.
        sinks: `[heads]` or None: a further score of each position, without a value.
        part: int32 `[1]`, this device's number among `parts`; None for one part.
    """
    import jax

    attend = _splash(kernel, query, key, part)

    def row(query: Any, key: Any, value: Any, documents: Any) -> Any:
        out, (lse,) = attend(query, key, value, _ids(documents, attend), sinks)
        return out, lse

    # The kernel writes each log-sum-exp 128 times. Without the barrier all copies would stay until backward reads them.
    return jax.lax.optimization_barrier(jax.vmap(row)(query, key, value, documents))


def splash_backward(
    kernel: Kernel, query: Any, key: Any, value: Any, documents: Any, sinks: Any, part: Any, *of_output: Any
) -> Any:
    """Return the gradients of query, key and value, and of sinks, if given, by row: `[rows, heads]`.

    `of_output`: the results of `splash_forward`, and the gradient of the output.
    """
    import jax
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    attend = _splash(kernel, query, key, part)
    options: dict[str, Any] = {**attend.kwargs, "save_residuals": False}

    def row(query: Any, key: Any, value: Any, documents: Any, out: Any, lse: Any, gradient: Any) -> Any:
        ids = _ids(documents, attend)
        kept = (query, key, value, ids, sinks, out, lse, attend.dq_mask_info, attend.dkv_mask_info)
        *_, d_query, d_key, d_value, _, d_sinks = splash._splash_attention_bwd(**options, res=kept, do=gradient)
        return d_query, d_key, d_value, d_sinks

    gradients = jax.vmap(row)(query, key, value, documents, *of_output)
    return gradients[:3] if sinks is None else gradients


# ------------------------------------------------------------------------------------------------------- lowering

_Kind = tuple[tuple[int, ...], torch.dtype] | None


def run_kernel(
    function: Callable[..., Any], kernel: "Kernel | GroupedProduct", *tensors: Tensor | None
) -> list[Tensor]:
    """Run `function(kernel, *tensors)`, written for jax arrays, on a device."""
    import torch_xla

    kinds = tuple(None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    inputs = [tensor for tensor in tensors if tensor is not None]
    bridge = cast(Any, torch_xla)._XLAC
    return bridge._xla_user_computation("xla::kernel", inputs, computation(function, kernel, kinds))


@cache  # a model has few shapes, and lowering one takes a second
def computation(function: Callable[..., Any], kernel: "Kernel | GroupedProduct", kinds: tuple[_Kind, ...]) -> Any:
    """Lower `function` for tensors of these shapes and dtypes; None for tensors that aren't given.

    jax.export lowers for TPUs on any host, so a plan has a run's kernel, in the format that libtpu 0.0.21 reads. That
    of `jax.jit(...).lower` is newer (pytorch/xla issue 9614).
    """
    import jax
    import jax.numpy as jnp
    from jax import export
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir
    from torch_xla.core.xla_builder import computation_from_module_proto

    shapes = [k and jax.ShapeDtypeStruct(k[0], jnp.dtype(str(k[1]).removeprefix("torch."))) for k in kinds]

    def on_given(*given: Any) -> Any:
        rest = iter(given)
        return function(kernel, *(None if kind is None else next(rest) for kind in kinds))

    platform = "cpu" if kernel.interpret else "tpu"
    exported = export.export(jax.jit(on_given), platforms=[platform])(*filter(None, shapes))
    with mlir.make_ir_context(), ir.Location.unknown():
        module = cast(Any, ir.Module.parse(exported.mlir_module()))
        _note_work(kernel.flops(function, kinds), module)
        program = xla_client._xla.mlir.mlir_module_to_xla_computation(
            mlir.module_to_bytecode(module), use_tuple_args=False, return_tuple=True
        )
    return computation_from_module_proto("attention", program.as_serialized_hlo_module_proto())


def _note_work(flops: int, module: Any) -> None:
    """Write the FLOPs into the kernels' calls, where the compiler's scheduler and `plan/hlo.py` read them."""
    from jax._src.lib.mlir import ir

    calls: list[Any] = []

    def collect(operation: Any) -> Any:
        if (
            operation.name == "stablehlo.custom_call"
            and operation.attributes["call_target_name"].value == "tpu_custom_call"
        ):
            calls.append(operation)
        return cast(Any, ir).WalkResult.ADVANCE

    module.operation.walk(collect)
    for call in calls:
        config = json.loads(call.attributes["backend_config"].value)
        cost = {"flops": flops // len(calls), "transcendentals": 0, "bytes_accessed": 0}
        config["custom_call_config"]["cost_estimate"] = cost
        call.attributes["backend_config"] = ir.StringAttr.get(json.dumps(config))
