"""Device rules for a step on fake tensors: matrix products, kernel workspaces, the attention kernel that a GPU or a TPU
would run, a TPU's tiles, and the memory that torch's caching allocator reserves from a GPU's driver.

The fake tensors of a GPU's plan are CPU tensors to torch, so it would pick CPU kernels.
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

# cuBLAS workspace per handle and stream: at::cuda's default for compute capability 9.0; 8.1 MiB for older ones.
CUBLAS_WORKSPACE_BYTES = 32 * 2**20
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256  # the largest
_FLASH_ROWS = 128  # flash attention's backward rounds the sequence length up to a multiple

# A TPU lays memory out in tiles.
_LANES = 128  # elements in a tile's row
_ROWS = 8  # largest number of rows in a tile
_WORD_BYTES = 4  # narrower elements of neighbouring rows share a word
_FLAT_ELEMENTS = 1024  # elements in a vector's tile

_aten = torch.ops.aten


def matrix_products(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[torch.dtype, float] | None:
    """Return dtype of the factors and FLOPs of an operator's matrix products; a multiply-add counts two.

    Uses the formulas of torch.utils.flop_counter, but counts half of causal attention, as the kernels compute it, and
    allows grouped heads. None for an operator without products.
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
    """Count two products, scores and scores times values; backward recomputes scores and adds a gradient per factor."""
    is_backward = func._overloadpacket.__name__.endswith("_backward")
    query, key, value = tensors[1:4] if is_backward else tensors[:3]
    batch, heads, length, width = query.shape
    widths = 3 * width + 2 * value.shape[-1] if is_backward else width + value.shape[-1]
    count = 2.0 * batch * heads * length * key.shape[-2] * widths
    named_args = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    # Queries of the last positions see all keys before them.
    return query.dtype, count * (1 - length / key.shape[-2] / 2) if named_args.get("is_causal") else count


def workspace_bytes(func: Any, args: tuple[Any, ...]) -> int:
    """Return the bytes that a CUDA kernel takes from the caching allocator while it runs.

    Flash attention's backward: dq in float32 and one float32 per row, rows rounded up; with grouped heads also dk and
    dv of all heads (torch 2.9, aten/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd). The memory-efficient
    backward: one float32 per row, and float32 gradients if their dtype is another (attention_backward.cu).
    """
    packet, efficient = func._overloadpacket, _aten._scaled_dot_product_efficient_attention_backward
    if packet not in (_aten._scaled_dot_product_flash_attention_backward, efficient):
        return 0
    query, key, value = cast(tuple[Tensor, Tensor, Tensor], args[1:4])
    batch, heads, length, width = query.shape
    if packet is efficient:
        accumulated = 0 if query.dtype == torch.float32 else query.numel() + key.numel() + value.numel()
        return 4 * (batch * heads * length + accumulated)
    rounded = _up(length, _FLASH_ROWS)
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
    """Run torch's scaled_dot_product_attention with the kernel that torch chooses on a GPU.

    query `[batch, heads, seq, width]`, key and value with their own heads and seq; the result has the query's shape.
    Chooses flash attention for 16-bit factors without a mask; the memory-efficient kernel with a mask or for float32,
    but not for grouped heads; else the formula, with its scores in memory (sdp_utils.cpp of torch 2.9,
    use_flash_attention and use_mem_efficient_attention). Where torch prefers cuDNN's kernel, that one saves as many
    bytes as flash attention.
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
    """Run torch's scaled_dot_product_attention with the memory of TorchTPU's splash kernel, which saves no scores.

    It saves factors, result and one float32 per row, as flash attention does (torch_tpu 0.2.0,
    _internal/ops/splash_attention.py), in every dtype. How TorchTPU handles a mask is unknown: the mask's own bytes
    count, scores don't.
    """
    return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]


def gpu_flex(query: Tensor, key: Tensor, value: Tensor, *, scale: float | None, return_aux: Any, **_: Any) -> Any:
    """Run torch's flex_attention, whose kernel saves the same as flash attention: factors, result, one float32 per row.

    Counts the products of causal attention over whole rows, since document lengths are unknown here.
    """
    out, lse = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal=True, scale=scale)[:2]
    return out if return_aux is None else (out, AuxOutput(lse=lse))


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask as additive bias per head (a view), its rows padded to a multiple of 16."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    if over := -mask.shape[-1] % 16:
        mask = F.pad(mask, (0, over))[..., : key.shape[-2]]
    return mask.expand(query.shape[0], query.shape[1], query.shape[-2], key.shape[-2])


def tiled_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of a tensor with elements of `itemsize` bytes, as libtpu lays out arguments and results.

    libtpu puts the two dimensions last that need least padding. The last is padded to 128, the one before to 8 or, if
    smaller, to a power of two. A vector is padded to 1024, a short one to a power of two of at least 128. Elements of
    less than 4 bytes share words: at least 2 or 4 rows. Source: sizes of arguments in programs that libtpu 0.0.21
    compiles (tests/plan/test_device_rules.py); 0.0.52 has the same layouts on v6e and tpu7x. 8-bit tensors may take
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
    """Round up to a multiple of `step`."""
    return -(-size // step) * step


def _power(size: int) -> int:
    """Round up to a power of two."""
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
    """One expandable segment, which grows by pages at its end."""

    page: int
    end: int = 0
    free: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])  # begin and end, in address order

    @property
    def spare(self) -> int:
        """Free bytes at the end of the segment."""
        begin, end = self.free[-1] if self.free else (0, 0)
        return end - begin if end == self.end else 0

    def missing(self, size: int) -> int:
        return _up(size - self.spare, self.page)

    def resize(self, change: int) -> None:
        """Map pages after the end, or unmap free pages before it."""
        begin = self.end - self.spare
        if self.spare:
            self.free.pop()
        self.end += change
        if self.end > begin:
            self.free.append((begin, self.end))


class CachingAllocator:
    """Simulation of torch's caching allocator: the memory that it reserves for a sequence of allocations.

    `torch.cuda.max_memory_reserved` isn't the sum of live tensors: sizes are rounded, each stream has its own pools for
    small and large blocks, and a free block serves only what fits into it. A pool has one expandable segment, which
    grows by pages at its end (expandable_segments:True, the default of a run).

    `capacity`: bytes that the driver has. If they run out, the allocator first unmaps the free pages at the end of each
    segment (torch also those in the middle). Then it exceeds the capacity, so the caller sees it.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._pools: dict[tuple[Hashable, bool], _Pool] = {}  # by stream, and whether its blocks are small
        self._in_use: dict[Hashable, tuple[_Pool, int, int]] = {}
        self.reserved = self.peak_reserved = 0

    def malloc(self, key: Hashable, needed: int, stream: Hashable) -> None:
        """Allocate a block; `free` with the same key returns it to the stream's pool."""
        size = max(ROUND_BYTES, _up(needed, ROUND_BYTES))
        is_small = size <= SMALL_BYTES
        page = SMALL_PAGE_BYTES if is_small else LARGE_PAGE_BYTES
        pool = self._pools.setdefault((stream, is_small), _Pool(page))
        fitting = [(end - begin, begin, end) for begin, end in pool.free if end - begin >= size]
        if not fitting:
            self._grow(pool, size)
        _, begin, end = min(fitting, default=(0, *pool.free[-1]))
        at = pool.free.index((begin, end))
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
        """Map pages after the last block and merge them with it if it is free (`try_allocate_expandable_block`)."""
        if self._capacity is not None and self.reserved + pool.missing(size) > self._capacity:
            for other in self._pools.values():
                unmapped = other.spare // other.page * other.page
                other.resize(-unmapped)
                self.reserved -= unmapped
        taken = pool.missing(size)  # the end may be shorter now
        pool.resize(taken)
        self.reserved += taken
        self.peak_reserved = max(self.peak_reserved, self.reserved)
