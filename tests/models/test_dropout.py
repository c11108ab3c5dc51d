"""Masks by keys: against their definition in Python's numbers, over any split, and as random numbers."""

import itertools
from collections.abc import Iterator
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from plain_dropout import is_kept, mask, row_key
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import dropout as imported_dropout

from portable_fsdp.models import dropout
from portable_fsdp.models.dropout import BATCH_KEY, Draws, RowKeys, intercept

SEED = 3
RATES = 0.1, 0.5, 0.9
KEYS = RowKeys(SEED, ("", "layer"))


class Sites(nn.Module):
    """Three sites of one scope."""

    def __init__(self, *rates: float) -> None:
        super().__init__()
        self.rates = rates or RATES

    def forward(self, x: Tensor) -> list[Tensor]:
        return [F.dropout(x, rate, self.training) for rate in self.rates]


def masks(keys: Tensor, shape: tuple[int, ...], rate: float | None = None) -> list[Tensor]:
    model = Sites(*[rate] * 3 if rate else RATES)
    with intercept():
        return [out != 0 for out in Draws(model, SEED).run(lambda _: model(torch.ones(shape)), {BATCH_KEY: keys})]


def test_a_mask_is_what_its_definition_says() -> None:
    first, places = 2**33 + 5, np.array([0, 3, 4])
    keys = [row_key(SEED, "", first, first + int(place)) for place in places]
    for shape in [(3,), (3, 7), (3, 5, 7), (3, 2, 5, 7), (6, 5, 7)]:
        for site, (rate, found) in enumerate(zip(RATES, masks(KEYS(first, places), shape), strict=True)):
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


def spread(rows: Tensor) -> float:
    """How far the squared sums of rows are from those of independent numbers, in standard deviations (chi-squared)."""
    squares = rows.sum(dim=1).square() / rows.shape[1]
    return float(squares.sum() - len(rows)) / (2 * len(rows)) ** 0.5


def deviations(seeds: int) -> Iterator[float]:
    """Yield deviations, in standard deviations: of shares, and of products of two masks or two neighbours in one."""
    rate, (rows, tokens, features) = 0.1, (2, 96, 320)
    for seed in range(seeds):
        drawn: list[Tensor] = []
        for first in (0, 2):
            keys = RowKeys(seed, ("",))(first, np.arange(rows))
            drawn += [each for mask in masks(keys, (rows, tokens, features), rate) for each in mask]
        centred = [(each.float() - (1 - rate)) / (rate * (1 - rate)) ** 0.5 for each in drawn]
        for one in centred:
            yield float(one.sum()) / one.numel() ** 0.5
            yield spread(one)
            for ahead in (1, 2, 3, 7, 16):
                yield spread(one[:, ahead:] * one[:, :-ahead])
                for dim in (0, 1):
                    near = one.narrow(dim, 0, one.shape[dim] - ahead) * one.narrow(dim, ahead, one.shape[dim] - ahead)
                    yield float(near.sum()) / near.numel() ** 0.5
        for one, other in itertools.combinations(centred, 2):
            yield float((one * other).sum()) / one.numel() ** 0.5
            for ahead in (1, 8):
                near = one[:, ahead:] * other[:, :-ahead]
                yield float(near.sum()) / near.numel() ** 0.5


def are_random(found: list[float]) -> bool:
    """At a level of 1 %, of all of them together (Bonferroni)."""
    return max(map(abs, found)) < NormalDist().inv_cdf(1 - 0.01 / 2 / len(found))


def test_masks_of_sites_rows_and_steps_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert are_random([*deviations(20)])
    weyl = ("_feature_keys", lambda indices: indices * -1028477379)  # 0xC2B2AE3D without mixing
    for name, worse in (("_OF_FACTOR", 0), weyl, ("_mixed", lambda x: x & -65536)):
        with monkeypatch.context() as patched:
            patched.setattr(dropout, name, worse)
            assert not are_random([*deviations(2)]), name


def test_backward_keeps_no_mask() -> None:
    """And gives the gradient of the mask of the forward."""
    x, saved = torch.randn(4, 32, 64, requires_grad=True), list[Tensor]()
    keys = KEYS(0, np.arange(4))
    with intercept(), torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        outs = Draws(model := Sites(), SEED).run(lambda _: model(x), {BATCH_KEY: keys})
    assert saved
    assert max(tensor.numel() for tensor in saved) <= 4 * 32
    for out, rate in zip(outs, RATES, strict=True):
        (gradient,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        torch.testing.assert_close(gradient, (out != 0) / (1 - rate))


@pytest.mark.parametrize("kind", ["causal", "bias", "bool"])
def test_attention_drops_weights_by_the_masks(kind: str) -> None:
    """torch's function, with grouped heads, against the formula, site by site."""
    query, key, value = torch.randn(4, 4, 6, 8), torch.randn(4, 2, 6, 8), torch.randn(4, 2, 6, 8)
    keep = torch.ones(6, 6, dtype=torch.bool).tril()
    bias = torch.zeros(6, 6).masked_fill(~keep, -torch.inf)
    given: Any = {"causal": {"is_causal": True}, "bias": {"attn_mask": bias}, "bool": {"attn_mask": keep}}[kind]
    keys = KEYS(0, np.arange(4))
    with intercept():
        out = Draws(nn.Module(), SEED).run(
            lambda _: F.scaled_dot_product_attention(query, key, value, dropout_p=0.3, enable_gqa=True, **given),
            {BATCH_KEY: keys},
        )
    scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2) / 8**0.5 + bias
    rows = [row_key(SEED, "", 0, row) for row in range(4)]
    weights = scores.softmax(-1) * mask(rows, 0, (4, 4, 6, 6), 0.3) / 0.7
    torch.testing.assert_close(out, weights @ value.repeat_interleave(2, 1))


def test_functions_that_a_source_imports_by_name_draw_the_same_masks() -> None:
    class ByName(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return imported_dropout(x, 0.5)

    before, keys = imported_dropout, KEYS(0, np.arange(4))
    with Draws(ByName(), SEED).drawing() as run:
        out = run(lambda _: ByName()(torch.ones(4, 64)), {BATCH_KEY: keys})
    assert torch.equal(out != 0, mask([row_key(SEED, "", 0, row) for row in range(4)], 0, (4, 64), 0.5))
    assert imported_dropout is before


def test_a_second_call_of_a_layer_and_of_the_model_draws_others_and_torch_is_itself_again() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Identity(), nn.Dropout(0.5))])

        def forward(self, x: Tensor) -> list[Tensor]:
            return [self.layers[0](x), self.layers[0](x)]

    plain, model, x = F.dropout, Twice(), torch.ones(4, 64)
    draws = Draws(model, SEED)
    draws.attach()
    keys = draws.keys[1](0, np.arange(4))
    with intercept():
        first, again = (draws.run(lambda _: model(x) + model(x), {BATCH_KEY: keys}) for _ in range(2))
        assert F.dropout is not plain
    assert F.dropout is plain
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(first, 2))
    names = [row_key(SEED, "layers.0", 0, row, call=3) for row in range(4)]
    assert torch.equal(first[3] != 0, mask(names, 0, (4, 64), 0.5))
