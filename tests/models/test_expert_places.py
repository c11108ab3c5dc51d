"""The places of tokens in the buffers that devices of the axis `expert` exchange."""

import pytest
import torch

from portable_fsdp.models import experts


@pytest.mark.parametrize("capacity", [None, 1.0, 0.5])
@pytest.mark.parametrize(("divisions", "held"), [(2, 2), (4, 4), (1, 4)])
def test_each_choice_has_a_place_among_its_experts_and_the_largest_lose_first(
    divisions: int, held: int, capacity: float | None
) -> None:
    generator, tokens, top_k = torch.Generator().manual_seed(0), 64, 2
    weights = torch.rand(tokens, divisions * held, generator=generator) * torch.arange(1, divisions * held + 1)
    chosen = weights.topk(top_k).indices.flatten().int()
    choices, room = tokens * top_k, tokens * min(top_k, held)
    if capacity is not None:
        room = int(choices / divisions * capacity)
    places = experts._places(divisions, held, room, capacity is not None, chosen)  # pyright: ignore[reportPrivateUsage]
    slot, choice, ends = places.split([choices, divisions * room, divisions * held])
    ends = ends.view(divisions, held)
    for device in range(divisions):
        for place in range(room):
            own = int(choice[device * room + place])
            if own < choices:
                expert = int(chosen[own])
                start = int(ends[device, expert % held - 1]) if expert % held else 0
                assert slot[own] == device * room + place
                assert expert // held == device
                assert start <= place < ends[device, expert % held]
    is_kept = slot < divisions * room
    assert int((choice < choices).sum()) == int(is_kept.sum())
    sizes, kept = (torch.bincount(ids.long(), minlength=divisions * held) for ids in (chosen, chosen[is_kept]))
    assert capacity is not None or torch.equal(sizes, kept)
    for of_all, left in zip(sizes.view(divisions, held), kept.view(divisions, held), strict=True):
        assert int(left.sum()) == min(int(of_all.sum()), room)
        lost = left < of_all
        assert not lost.any() or left[lost].min() >= left.max() - 1
