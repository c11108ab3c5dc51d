"""Steps cover the order without gap or overlap, whatever the shards; the thread ahead fails and ends as it should."""

import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from portable_fsdp.data.batches import STEPS_AHEAD, Batches
from portable_fsdp.data.packing import IGNORED, Rows, StepRows, count_labels, count_values, sample_indices
from portable_fsdp.runtime.errors import ConfigError

SEQ_LEN = 6


class NumberedRows(Rows):
    """Row r holds r everywhere, and r % (SEQ_LEN + 1) of its labels count. `fails_at`: the call that can't be read."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count = count
        self.fails_at = fails_at
        self.calls = 0

    def __len__(self) -> int:
        return self.count

    def rows(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError("the disk is gone")
        numbers = torch.tensor(indices)[:, None].expand(-1, SEQ_LEN)
        counted = torch.arange(SEQ_LEN) < numbers % (SEQ_LEN + 1)
        return {"input_ids": numbers.clone(), "labels": torch.where(counted, numbers, IGNORED)}

    def fingerprint(self) -> str:
        return str(self.count)


def batches(rows: NumberedRows | None = None, **keys: Any) -> Batches:
    given: dict[str, Any] = {"seed": 7, "global_batch": 12, "shard": (0, 1), "accumulation": 1, "start": 0, **keys}
    return Batches(rows or NumberedRows(50), **given)


def numbers(step: StepRows) -> list[int]:
    return [number for micro in step.micro_batches for number in micro["input_ids"][:, 0].tolist()]


def our_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("portable_fsdp")]


@pytest.mark.parametrize(("count", "accumulation"), [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (4, 1), (4, 3)])
def test_the_shards_of_a_step_are_the_global_batch_in_order(count: int, accumulation: int) -> None:
    """Also across the end of the epoch, which lies inside the fifth step."""
    drawn: list[int] = []
    shards = [batches(shard=(index, count), accumulation=accumulation) for index in range(count)]
    for _ in range(6):
        for shard in shards:
            drawn += numbers(next(shard))
    for shard in shards:
        shard.close()
    assert drawn == sample_indices(7, np.arange(72), 50).tolist()
    assert Counter(drawn[:50]) == Counter(range(50))


def test_a_run_that_starts_later_goes_on_where_the_other_was() -> None:
    with batches() as whole:
        assert (whole.consumed, whole.position) == (0, (0, 0))
        steps = [numbers(next(whole)) for _ in range(6)]
        assert (whole.consumed, whole.position) == (72, (1, 22))
    with batches(start=36, shard=(1, 2), accumulation=2) as resumed:
        assert resumed.consumed == 36
        assert [numbers(next(resumed)) for _ in range(3)] == [step[6:] for step in steps[3:]]
        assert resumed.consumed == 72  # the whole global batches, not this shard's rows


def test_an_error_in_the_thread_comes_where_its_step_is_asked_for() -> None:
    with batches(NumberedRows(50, fails_at=3)) as feed:
        next(feed)
        next(feed)
        for _ in range(2):  # asked again, it doesn't wait for a step that never comes
            with pytest.raises(OSError, match="the disk is gone"):
                next(feed)
        assert feed.consumed == 24


def test_the_thread_makes_some_steps_ahead_and_no_more_and_closing_ends_it() -> None:
    rows = NumberedRows(50)
    feed, deadline = batches(rows), time.monotonic() + 5
    while rows.calls < STEPS_AHEAD:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.05)
    assert (rows.calls, feed.consumed, len(our_threads())) == (STEPS_AHEAD, 0, 1)
    next(feed)
    assert feed.consumed == 12
    feed.close()
    feed.close()
    assert our_threads() == []
    with pytest.raises(ValueError, match="closed"):
        next(feed)


@pytest.mark.parametrize(("count", "accumulation"), [(5, 1), (1, 5), (4, 2)])
def test_a_global_batch_that_cannot_be_cut_is_refused_where_padding_would_count(count: int, accumulation: int) -> None:
    with pytest.raises(ConfigError, match=rf"train\.global_batch: .* multiple of {count * accumulation} .* found 12"):
        batches(shard=(0, count), accumulation=accumulation, count_losses=None)
    assert our_threads() == []


@pytest.mark.parametrize(
    ("count", "parts", "accumulation"),
    [(5, 1, 1), (1, 5, 1), (4, 1, 2), (1, 1, 5), (3, 3, 1), (1, 1, 1), (1, 1, 4), (2, 1, 3)],  # three without padding
)
@pytest.mark.parametrize("numbers_count", [False, True])
def test_padding_fills_up_a_step_and_counts_nothing(
    count: int, parts: int, accumulation: int, numbers_count: bool
) -> None:
    """Labels that are numbers become NaN there."""
    counting = count_values if numbers_count else count_labels
    keys: dict[str, Any] = {"parts": parts, "accumulation": accumulation, "count_losses": counting}
    shards = [batches(shard=(index, count), **keys) for index in range(count)]
    for first in (0, 12, 24):
        steps = [next(shard) for shard in shards]
        micro_batches = [micro for step in steps for micro in step.micro_batches]
        assert len(micro_batches) == count * accumulation
        [size] = {len(micro["labels"]) for micro in micro_batches}
        assert size % parts == 0
        assert size * len(micro_batches) < 12 + count * parts * accumulation
        labels = torch.cat([micro["labels"] for micro in micro_batches])
        expected = NumberedRows(50).rows(sample_indices(7, np.arange(first, first + 12), 50))["labels"]
        assert torch.equal(labels[:12], expected.to(labels.dtype))
        assert (labels[12:].isnan() if numbers_count else labels[12:] == IGNORED).all()
        assert sum(step.count for step in steps) == counting({"labels": expected})
    for shard in shards:
        assert shard.consumed == 36
        shard.close()
