"""Global tensors from the pieces that the processes of a group would write."""

from typing import Any

import torch


def assemble(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Each tensor put together; fails unless the pieces of all processes tile it exactly once (C4)."""
    keys = {tuple(state) for state in states}
    assert len(keys) == 1, "processes name different tensors"
    whole: dict[str, torch.Tensor] = {}
    for key in states[0]:
        kinds = {(tuple(state[key][0]), state[key][1]) for state in states}
        assert len(kinds) == 1, f"{key}: processes disagree: {kinds}"
        shape, dtype = kinds.pop()
        tensor = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        written = torch.zeros(shape, dtype=torch.int32)
        for state in states:
            for offset, data in state[key][2]:
                assert data.dtype == tensor.dtype, f"{key}: piece is {data.dtype}"
                where = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
                tensor[where] = data
                written[where] += 1
        assert bool((written == 1).all()), f"{key}: written {written.min()} to {written.max()} times"
        whole[key] = tensor
    return whole


def assert_equal_states(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, keys and dtypes included."""
    assert actual.keys() == expected.keys()
    differ = [k for k in expected if actual[k].dtype != expected[k].dtype or not torch.equal(actual[k], expected[k])]
    assert not differ, f"{len(differ)} of {len(expected)} tensors differ: {differ[:3]}"
