"""Masks by keys: against their definition in Python's numbers, over any split, and as random numbers."""

import numpy as np
import pytest
import torch
from plain_dropout import is_kept, mask, row_key
from torch import Tensor, nn
from torch.nn import functional as F

from portable_fsdp.models.dropout import BATCH_KEY, Draws, RowKeys, intercept

SEED = 3
KEYS = RowKeys(SEED, ("", "layer"))


class Sites(nn.Module):
    """Three sites of one scope."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [F.dropout(x, rate, self.training) for rate in (0.1, 0.5, 0.9)]


def masks(keys: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    model = Sites()
    with intercept():
        return [out != 0 for out in Draws(model, SEED).run(lambda _: model(torch.ones(shape)), {BATCH_KEY: keys})]


def test_a_mask_is_what_its_definition_says() -> None:
    first, places = 2**33 + 5, np.array([0, 3, 4])
    keys = [row_key(SEED, "", first, first + int(place)) for place in places]
    for shape in [(3,), (3, 7), (3, 5, 7), (3, 2, 5, 7), (6, 5, 7)]:
        for site, (rate, found) in enumerate(zip((0.1, 0.5, 0.9), masks(KEYS(first, places), shape), strict=True)):
            whole = (*shape, 1) if len(shape) == 1 else shape
            assert torch.equal(found.view(whole), mask(keys, site, whole, rate))
            for at in np.ndindex(whole):
                outer = at[0] % (whole[0] // 3) if whole[0] > 3 else at[1] if len(whole) == 4 else 0
                place = (outer << 20) + (at[-2] if len(whole) > 2 else 0)
                row = at[0] // (whole[0] // 3)
                assert bool(found.view(whole)[at]) == is_kept(keys[row], site, place, at[-1], rate)


def test_rows_flattened_with_positions_have_the_same_mask() -> None:
    keys = KEYS(12, np.arange(4))
    for whole, flat in zip(masks(keys, (4, 5, 7)), masks(keys, (20, 7)), strict=True):
        assert torch.equal(whole.view(20, 7), flat)
    shared = masks(keys, (1, 5, 7))
    assert all(torch.equal(a, b) for a, b in zip(shared, masks(KEYS(12, np.array([1, 3])), (1, 5, 7)), strict=True))
    with pytest.raises(ValueError, match=r"dropout of a tensor \[3, 5\]: expected the batch's 4 rows"):
        masks(keys, (3, 5))
