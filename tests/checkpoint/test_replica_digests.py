"""A save compares what several processes hold. tests/backends/test_engine_checkpoints.py does it on the engines."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_backend import PlainBackend, checkpoints, in_processes, load, named_tensors, save_once, small_model, snapshot

from portable_fsdp.backends.contract import Piece, TensorState
from portable_fsdp.checkpoint.snapshot import sum_of_bits
from portable_fsdp.runtime.errors import CheckpointError


def save_unequal(folder: Path, changes: dict[int, tuple[str, ...]], count: int, settings: dict[str, Any]) -> list[Any]:
    """Step 6 of `count` processes that hold all of each tensor, of which some have one other number in some tensors;
    then step 7, of equal ones. Process 0 writes."""

    def work(backend: PlainBackend) -> Any:
        model, optimizer = small_model(seed=2)
        live = named_tensors(model, optimizer)

        def replicate(state: dict[str, TensorState]) -> None:
            for key, tensor in live.items():
                piece = Piece((0,) * tensor.dim(), tensor, backend.process.index)
                state[key] = replace(state[key], pieces=lambda piece=piece: [piece])

        backend.change = replicate
        opened = checkpoints(folder, backend, settings)
        before = {key: tensor.clone() for key, tensor in live.items()}
        for key in changes.get(backend.process.index, ()):
            live[key].view(-1)[-1] += 0.5
        try:
            opened.save(6, model, optimizer, (1, 20))
            for tensor in live.values():
                tensor += 1  # the next step: a background save must not see it
            opened.wait()
        finally:
            for key, tensor in live.items():
                tensor.copy_(before[key])
            opened.save(7, model, optimizer, (1, 20))
            opened.wait()

    return in_processes(count, work)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("changes", "count", "lines"),
    [
        ({}, 3, []),
        ({1: ("0.weight",)}, 2, ["    0.weight  process 0 | process 1", "step-00000005. If it happens again, test"]),
        (
            {2: ("0.weight", "exp_avg/gate")},
            3,
            [
                "found 2 that differ:",
                "    0.weight      process 0, process 1 | process 2",
                "    exp_avg/gate  process 0, process 1 | process 2",
            ],
        ),
        ({0: ("step/0.bias",)}, 3, ["    step/0.bias  process 0 | process 1, process 2"]),
        ({1: ("gate",), 2: ("gate", "gate")}, 3, ["    gate  process 0 | process 1 | process 2"]),
    ],
    ids=["equal", "one_of_two", "two_tensors", "the_writer", "all"],
)
def test_replicas_that_differ_are_refused_by_name_on_all_processes(
    tmp_path: Path, changes: dict[int, tuple[str, ...]], count: int, lines: list[str], is_async: bool
) -> None:
    save_once(tmp_path, step=5)
    results = save_unequal(tmp_path, changes, count, {"async_save": is_async})
    assert {type(result) for result in results} == {CheckpointError if changes else type(None)}, results
    assert len({str(result) for result in results}) == 1
    for line in lines:
        assert line in str(results[0])
    steps = ["step-00000005", "step-00000006", "step-00000007"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [one for one in steps if one[-1] != "6" or not changes]


def test_replicas_that_differ_are_saved_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert save_unequal(tmp_path, {1: ("0.weight",)}, 2, {"allow": ["replicas"]}) == [None, None]
    assert "step-00000006: replicas differ in 1 places; saving the first:\n" in caplog.text
    assert "0.weight  process 0 | process 1" in caplog.text
    model, optimizer = small_model(seed=9)
    load(checkpoints(tmp_path / "another", PlainBackend()), model, optimizer, str(tmp_path / "step-00000006"))
    assert snapshot(model, optimizer) == snapshot(*small_model(seed=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("count", [1, 3, 4, 1000, pytest.param((1 << 22) + 7, marks=pytest.mark.slow)])
def test_a_sum_of_bits_tells_any_bit_and_any_place(dtype: torch.dtype, count: int) -> None:
    """What digests of tensors on a device are made of."""
    generator = torch.Generator().manual_seed(count)
    tensor = torch.randint(0, 2, (count,), generator=generator).to(dtype)
    sums = {int(sum_of_bits(tensor))}
    assert sums == {int(sum_of_bits(torch.cat([tensor[:1], tensor])[1:]))}, "wherever it lies"
    bits = tensor.view(torch.uint8)
    places = {0, len(bits) - 1, *torch.randint(0, len(bits), (3,), generator=generator).tolist()}
    for place in places:
        bits[place] ^= 1
        sums.add(int(sum_of_bits(tensor)))
        bits[place] ^= 1
    assert len(sums) == 1 + len(places)
    if count == 1000:
        assert int(sum_of_bits(tensor.flip(0))) not in sums
