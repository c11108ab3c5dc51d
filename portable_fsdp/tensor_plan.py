"""The split of a model over the mesh axis `tensor`, and the regions of its weights that a device holds.

`models/parallel.py` makes a `TensorPlan`; engines carry it out. Runs without the axis don't import this.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portable_fsdp.config.schema import TensorWord
from portable_fsdp.layout import Region, Spec, full_region, region, rows_of_shard

if TYPE_CHECKING:  # commands read their arguments without torch
    from torch import Tensor

COLWISE, PACKED, ROWWISE = "colwise", "packed_colwise", "rowwise"
GATHERED, SPLIT_INPUT = "colwise_gather_output", "rowwise_split_input"
SUMMED, EXPERTS, WHOLE = "replicated_with_grad_allreduce", "moe_tp_experts", "replicated"
WORDS: dict[TensorWord, str] = {
    COLWISE: "split the output; the weight by its outputs",
    PACKED: "the same for several matrices in one weight (q, k and v, or gate and up): each is split",
    ROWWISE: "split the input; the weight by its inputs; sum the outputs",
    GATHERED: "as colwise, then gather the output",
    SPLIT_INPUT: "split the input first, then as rowwise",
    SUMMED: "whole weights that each device uses for a part of the heads",
    EXPERTS: "experts of a mixture: each expert is split by its width",
    WHOLE: "not split",
}
"""Words of a plan -> meaning."""


@dataclass(frozen=True)
class Part:
    """A split weight: the dimension, and the lengths of the matrices that are packed along it, each split evenly."""

    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class TensorPlan:
    """What each device along the axis `tensor` of `size` devices holds and does."""

    size: int
    words: Mapping[str, str]  # module -> word
    parts: Mapping[str, Part]  # FQN of a split weight -> its part; all others are whole
    summed: frozenset[str]  # FQNs of whole weights of which each device computes a part of the gradient
    blocks: tuple[str, ...]  # attention, MLPs and experts: hold split weights, take and return whole hidden states
    attributes: Mapping[str, Mapping[str, Any]]  # block -> attribute -> its value on each device, such as heads
    whole_heads: Mapping[str, tuple[int, int]] = field(default_factory=lambda: {})
    """Key and value projections with fewer heads than devices: each device computes all; (heads, width of a head)."""
    embedding: str = ""  # FQN of the embedding and the head that are split over the vocabulary; empty: they are whole
    head: str = ""
    layers: tuple[str, ...] = ()
    whole_blocks: tuple[str, ...] = ()  # attention inside layers that the plan leaves whole
    splits_rows: bool = False
    """sharding.sequence_parallel: between blocks each device holds a part of the tokens of each row"""

    def part_of(self, fqn: str, whole: "Tensor", index: int) -> "Tensor":
        """Return what device `index` holds of a weight, or of its gradient: all of one that isn't split."""
        import torch

        part = self.parts.get(fqn)
        if part is None:
            return whole
        rows = [slice(None)] * part.dim
        return torch.cat([whole[(*rows, own)] for own in split_ranges(part.sizes, index, self.size)], part.dim)

    def layout(self, fqn: str, spec: Spec) -> Spec:
        """Return the spec of a weight: the dimension of its part over `tensor`, then as `spec` says."""
        part = self.parts.get(fqn)
        if part is None:
            return spec
        return tuple(("tensor", *axes) if dim == part.dim else axes for dim, axes in enumerate(spec))


def split_ranges(sizes: Sequence[int], index: int, count: int) -> list[slice]:
    """Return the rows of each matrix packed along a dimension, `sizes` long, that device `index` of `count` holds."""
    starts = itertools.accumulate(sizes, initial=0)
    parts = [rows_of_shard(size, index, count) for size in sizes]
    return [slice(start + part.start, start + part.stop) for start, part in zip(starts, parts, strict=False)]


def packed_regions(
    shape: Sequence[int], spec: Spec, axes: Mapping[str, int], place: Mapping[str, int], sizes: Sequence[int]
) -> Iterator[tuple[Region, Region]]:
    """Yield the regions of a tensor that the device at `place` holds, each with its region in the device's part.

    `tensor` splits each of the matrices that are packed along its dimension, `sizes` long; see `region`.
    """
    dim = next(at for at, cuts in enumerate(spec) if "tensor" in cuts)
    own = split_ranges(sizes, place["tensor"], axes["tensor"])
    packed = tuple(sum(part.stop - part.start for part in own) if at == dim else size for at, size in enumerate(shape))
    inside = region(packed, tuple(tuple(a for a in cuts if a != "tensor") for cuts in spec), axes, place)
    start = 0
    for part in own:
        rows = slice(max(inside[dim].start, start), min(inside[dim].stop, start + part.stop - part.start))
        if rows.start < rows.stop:
            of_all = slice(part.start + rows.start - start, part.start + rows.stop - start)
            of_part = slice(rows.start - inside[dim].start, rows.stop - inside[dim].start)
            local = full_region([cut.stop - cut.start for cut in inside])
            yield (*inside[:dim], of_all, *inside[dim + 1 :]), (*local[:dim], of_part, *local[dim + 1 :])
        start += part.stop - part.start
