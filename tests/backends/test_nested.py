"""The walk through what modules take and return: its price, its depth, and what it finds."""

import sys
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from portable_fsdp.backends.nested import Replacement, tensors_in

N = 30_000
TABLES: dict[str, Any] = {
    "list": list(range(N)),
    "tuple": tuple(range(N)),
    "set": set(range(N)),
    "deque": deque(range(N)),
    "dict": dict.fromkeys(range(N), 0.5),
    "numbers of NumPy": list(np.arange(float(N))),
    "array": np.arange(N),
    "rows": [("a", [number]) for number in range(N)],
    "records": [{"id": number, "kinds": ["a"]} for number in range(N)],
    "object": SimpleNamespace(words=["a"] * N),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_large_table_beside_a_tensor_costs_no_python_call_for_each_element(name: str) -> None:
    """Several walks for each block and step: they made steps a hundred times slower."""
    calls, state = 0, {"x": torch.ones(2), "table": TABLES[name]}

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        replacement = Replacement(lambda tensor: tensor + 1)
        changed = replacement(state)
        changed["new"] = 1
        replacement.write_back()
    finally:
        sys.setprofile(None)
    assert calls < 1000
    assert changed["table"] is state["table"]
    assert changed["x"].tolist() == [2, 2]
    assert (state["x"].tolist(), state["new"]) == ([1, 1], 1)


@pytest.mark.parametrize("depth", [3, 20_000])
def test_tensors_are_found_and_replaced_at_any_depth(depth: int) -> None:
    """A chain of objects may be longer than Python's stack."""
    inner: Any = {"rows": [[1, 2], [3, (torch.ones(1), 4)]], "plain": [[5]]}
    chain: Any = inner
    for _ in range(depth):
        chain = SimpleNamespace(next=chain)
    assert len(tensors_in(chain)) == 1
    new = Replacement(lambda tensor: tensor * 7)(chain)
    for _ in range(depth):
        new = new.next
    assert new["rows"][1][1][0].item() == 7
    assert new["plain"] is inner["plain"]
    assert inner["rows"][1][1][0].item() == 1


def test_a_cycle_of_lists_ends() -> None:
    cycle: list[Any] = [1]
    cycle.append([cycle, [torch.ones(1)]])
    assert len(tensors_in(cycle)) == 1
    plain: list[Any] = [1]
    plain.append((plain, [plain]))
    assert tensors_in(plain) == []


class OneSlot:
    __slots__ = "loss"


def test_a_slot_is_found_by_whatever_its_class_writes() -> None:
    value = OneSlot()
    value.loss = torch.ones(1)
    assert len(tensors_in([value])) == 1
