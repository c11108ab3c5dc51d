"""Which part of a tensor each device of a mesh holds."""

import itertools
import math

import torch

from portable_fsdp.layout import Spec, batch_spec, coordinates, count_row_shards, region, weight_spec

SHAPES = [(8, 6), (7, 5), (3, 2), (1, 4), (0, 3)]
SPECS: list[Spec] = [weight_spec(2), batch_spec(2), ((), ("shard",)), (("tensor", "shard"), ("replicate",)), ((), ())]


def test_regions_are_what_chunk_gives_for_tensor_and_then_for_all_other_axes_as_one() -> None:
    """Protects weights, checkpoints and plans from parts that overlap, leave a gap, or differ from FSDP2's."""
    axes = {"replicate": 2, "shard": 3, "context": 2, "tensor": 2}
    for shape, spec, device in itertools.product(SHAPES, SPECS, range(math.prod(axes.values()))):
        whole = torch.arange(math.prod(shape)).view(shape)
        place = coordinates(axes, device)
        expected = whole
        for dim, cuts in enumerate(spec):
            for group in ([axis for axis in cuts if axis == "tensor"], [axis for axis in cuts if axis != "tensor"]):
                at, count = 0, 1
                for axis in group:
                    at, count = at * axes.get(axis, 1) + place.get(axis, 0), count * axes.get(axis, 1)
                parts = expected.chunk(count, dim) if expected.shape[dim] else ()
                is_there = at < len(parts)
                expected = parts[at] if is_there else expected.narrow(dim, 0, 0)
        assert torch.equal(whole[region(shape, spec, axes, place)], expected), (shape, spec, place)
    # The last axis counts fastest, and only row axes cut a batch.
    axes = {"replicate": 2, "shard": 4, "tensor": 2}
    assert coordinates(axes, 11) == {"replicate": 1, "shard": 1, "tensor": 1}
    assert count_row_shards(axes) == 8
