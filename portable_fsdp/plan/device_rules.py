"""What devices add to a step on fake tensors: matrix products, kernels' workspaces, the attention that a GPU or a TPU
would run, a TPU's tiles, and the memory that torch's caching allocator takes from a GPU's driver.

Torch takes the fake tensors of a plan for a GPU for the CPU's.
"""

import math
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxOutput
from torch.utils.flop_counter import flop_registry

# cuBLAS's workspace of one handle and stream, at::cuda's default for compute capability 9.0; before it 8.1 MiB.
CUBLAS_WORKSPACE_BYTES = 32 * 2**20
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256  # the largest
_FLASH_ROWS = 128  # that flash attention's backward rounds a row up to

# A TPU lays memory out in tiles.
_LANES = 128  # of a tile's row
_ROWS = 8  # of a tile, at most
_WORD_BYTES = 4  # narrower elements of neighbouring rows share one
_FLAT_ELEMENTS = 1024  # of a tile of a vector

_aten = torch.ops.aten


def matrix_products(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[torch.dtype, float] | None:
    """Dtype of the factors and operations of an operator's matrix products; a multiply and an add are two.

    By the formulas of torch.utils.flop_counter, but causal attention counts by half, as the kernels do it, and heads
    may be grouped. None for an operator without products.
    """
    packet = func._overloadpacket
    tensors = [argument for argument in args if isinstance(argument, Tensor)]
    if "_scaled_dot_product_" in packet.__name__:
        return _attention(func, args, tensors)
    if packet is _aten._grouped_mm:
        rows, weights = tensors[0], tensors[1]
        return rows.dtype, 2.0 * math.prod(rows.shape) * weights.shape[-1]
    formula = flop_registry.get(packet)
    if formula is None or not tensors:
        return None
    return tensors[-1].dtype, float(formula(*args, **kwargs, out_val=out))


def _attention(func: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> tuple[torch.dtype, float]:
    """Two products: scores, and values by them; backward computes scores again, and a gradient of each factor."""
    is_backward = func._overloadpacket.__name__.endswith("_backward")
    query, key, value = tensors[1:4] if is_backward else tensors[:3]
    batch, heads, length, width = query.shape
    widths = 3 * width + 2 * value.shape[-1] if is_backward else width + value.shape[-1]
    count = 2.0 * batch * heads * length * key.shape[-2] * widths
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    return query.dtype, count / 2 if given.get("is_causal") else count


def workspace_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """The memory that a CUDA kernel takes from the caching allocator while it runs.

    Backward of flash attention: dq in float32 and a number a row, rows rounded up, and with grouped heads dk and dv of
    all heads (torch 2.9, aten/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd); the memory-efficient one a
    number a row, and gradients in float32 where they are to be in another dtype (attention_backward.cu).
    """
    packet = func._overloadpacket
    if packet not in (
        _aten._scaled_dot_product_flash_attention_backward,
        _aten._scaled_dot_product_efficient_attention_backward,
    ):
        return 0
    query, key, value = cast(tuple[Tensor, Tensor, Tensor], args[1:4])
    batch, heads, length, width = query.shape
    if packet is _aten._scaled_dot_product_efficient_attention_backward:
        accumulated = 0 if query.dtype == torch.float32 else query.numel() + key.numel() + value.numel()
        return 4 * (batch * heads * length + accumulated)
    rounded = -(-length // _FLASH_ROWS) * _FLASH_ROWS
    expanded = batch * heads * key.shape[-2] * 2 * width if key.shape[1] != heads else 0
    return 4 * batch * heads * rounded * (width + 1) + expanded * query.element_size()


def gpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's scaled_dot_product_attention, by the kernel that torch chooses on a GPU.

    query [batch, heads, seq, width], key and value with their own heads and seq; the result is as the query.
    Flash attention for 16-bit factors without a mask; the memory-efficient kernel with one, or for float32, but not for
    grouped heads; else the formula, with its scores in memory (sdp_utils.cpp of torch 2.9, use_flash_attention and
    use_mem_efficient_attention). What cuDNN's kernel keeps, where torch prefers it, has the size of flash attention's.
    """
    width, is_grouped = query.shape[-1], query.shape[1] != key.shape[1]
    is_plain = query.dim() == 4 and width == value.shape[-1]
    scale = scale if scale is not None else width**-0.5
    if is_plain and attn_mask is None and query.dtype in FLASH_DTYPES and width <= FLASH_HEAD_DIM:
        over = -width % 8
        query, key, value = (F.pad(tensor, (0, over)) if over else tensor for tensor in (query, key, value))
        out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :width]
    if query.dim() == 4 and not is_grouped and width % (16 // query.element_size()) == 0:
        bias = None if attn_mask is None else _bias(attn_mask, query, key)
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def tpu_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    **_: Any,
) -> Tensor:
    """torch's scaled_dot_product_attention, as TorchTPU's splash kernel holds memory: it keeps no scores.

    It keeps factors, result and a float32 number a row, as flash attention does (torch_tpu 0.2.0,
    _internal/ops/splash_attention.py), in every dtype. What TorchTPU does with a mask isn't known: a mask's own bytes
    count, scores don't.
    """
    return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]


def gpu_flex(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, return_aux: Any, **_: Any) -> Any:
    """torch's flex_attention, whose kernel keeps what flash attention's does: factors, result and a number a row.

    Counts the products of causal attention over whole rows, since the lengths of documents aren't known here.
    """
    out, lse = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal=True, scale=scale)[:2]
    return out if return_aux is None else (out, AuxOutput(lse=lse))


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask as numbers, for each head (a view), in rows of a multiple of 16."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    over = -mask.shape[-1] % 16
    if over:
        mask = F.pad(mask, (0, over))[..., : key.shape[-2]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])


def tiled_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of a tensor with elements of `itemsize` bytes, as libtpu lays out a program's arguments and results.

    libtpu puts those two dimensions last that pad least. The last is padded to 128, the one before to 8 or, if it is
    smaller, to a power of two. A vector is padded to 1024, a short one to a power of two from 128 on. Elements of less
    than 4 bytes fill words: 2 or 4 rows at least. Source: sizes of arguments in programs that libtpu 0.0.21 compiles
    (tests/plan/test_device_rules.py); 0.0.52 has the same layouts on v6e and tpu7x. 8-bit tensors may take
    more: some have tiles of 32 rows.
    """
    elements = math.prod(shape)
    packed = max(1, _WORD_BYTES // itemsize)
    if elements == 0:
        return 0
    if len(shape) < 2:
        return itemsize * _up(elements, min(_FLAT_ELEMENTS, max(_LANES * packed, _power(elements))))
    return itemsize * min(
        _up(shape[last], _LANES)
        * _up(shape[before], min(_ROWS, max(packed, _power(shape[before]))))
        * (elements // (shape[last] * shape[before]))
        for last, before in permutations(range(len(shape)), 2)
    )


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _power(size: int) -> int:
    """The least power of two that isn't below."""
    return 1 << (size - 1).bit_length()


# ------------------------------------------------------------------------------------------------ caching allocator

MEBIBYTE = 2**20
# c10/cuda/CUDACachingAllocator.h (torch 2.9): kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, by their values.
ROUND_BYTES = 512
SMALL_BYTES = MEBIBYTE
SMALL_PAGE_BYTES = 2 * MEBIBYTE
LARGE_PAGE_BYTES = 20 * MEBIBYTE


@dataclass
class _Pool:
    """One expandable segment: it grows by pages at its end."""

    page: int
    end: int = 0
    free: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # begin and end, in address order

    @property
    def spare(self) -> int:
        """Free bytes at the end of the segment."""
        begin, end = self.free[-1] if self.free else (0, 0)
        return end - begin if end == self.end else 0

    def missing(self, size: int) -> int:
        return -(-(size - self.spare) // self.page) * self.page

    def resize(self, change: int) -> None:
        """Map pages behind the end, or unmap free ones in front of it."""
        begin = self.end - self.spare
        if self.spare:
            self.free.pop()
        self.end += change
        if self.end > begin:
            self.free.append((begin, self.end))


class CachingAllocator:
    """What torch's caching allocator takes from the driver for a sequence of allocations, by its own rules.

    `torch.cuda.max_memory_reserved` isn't the sum of what lives: sizes are rounded, each stream has its own pools for
    small and for large pieces, and a free piece serves only what fits into it. A pool has one expandable segment, which
    grows by pages at its end (expandable_segments:True, the default of a run). All of this is deterministic.

    `reserved` is in bytes, as torch.cuda.memory_stats has it.

    `capacity`: bytes that the driver can give. Where they run out, the allocator first gives back the free pages at the
    end of each segment (torch also those in the middle); then it takes the missing bytes all the same, for the caller
    to see.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._pools: dict[tuple[Hashable, bool], _Pool] = {}  # by stream, and whether it has small pieces
        self._in_use: dict[Hashable, tuple[_Pool, int, int]] = {}
        self.reserved = self.peak_reserved = 0

    def malloc(self, key: Hashable, bytes: int, stream: Hashable) -> None:
        """Allocate a storage, of which `free` is given the same key; it goes back to the stream's pool."""
        size = max(ROUND_BYTES, -(-bytes // ROUND_BYTES) * ROUND_BYTES)
        is_small = size <= SMALL_BYTES
        page = SMALL_PAGE_BYTES if is_small else LARGE_PAGE_BYTES
        pool = self._pools.setdefault((stream, is_small), _Pool(page))
        fitting = [(end - begin, begin, end) for begin, end in pool.free if end - begin >= size]
        if not fitting:
            self._grow(pool, size)
        _, begin, end = min(fitting, default=(0, *pool.free[-1]))
        at = bisect_left(pool.free, (begin, end))
        pool.free[at : at + 1] = [(begin + size, end)] if end - begin > size else []
        self._in_use[key] = pool, begin, begin + size

    def free(self, key: Hashable) -> None:
        pool, begin, end = self._in_use.pop(key)
        at = bisect_left(pool.free, (begin, end))
        if at < len(pool.free) and pool.free[at][0] == end:
            end = pool.free.pop(at)[1]
        if at and pool.free[at - 1][1] == begin:
            at -= 1
            begin = pool.free.pop(at)[0]
        pool.free.insert(at, (begin, end))

    def _grow(self, pool: _Pool, size: int) -> None:
        """`try_allocate_expandable_block`: pages are mapped behind the last piece, and join it where it is free."""
        if self._capacity is not None and self.reserved + pool.missing(size) > self._capacity:
            for other in self._pools.values():
                unmapped = other.spare // other.page * other.page
                other.resize(-unmapped)
                self.reserved -= unmapped
        taken = pool.missing(size)  # the end may be shorter now
        pool.resize(taken)
        self.reserved += taken
        self.peak_reserved = max(self.peak_reserved, self.reserved)
