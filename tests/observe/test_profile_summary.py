"""The summary of a profile: shares, pauses and tables that a person can work out by hand."""

import pytest

from portable_fsdp.backends.contract import Operation
from portable_fsdp.observe.profiles import summarize, summary_text

OPERATIONS = [
    Operation("matmul", "compute", 1.0, 4.0, "main", module="layers.0"),  # 1 to 5, of which the copy takes 2 to 3
    Operation("copy_", "compute", 2.0, 1.0, "main", module="layers.0"),
    Operation("matmul", "compute", 6.0, 1.0, "main", module="layers.1"),
    Operation("all_gather", "communication", 4.0, 4.0, "network", bytes=2_000_000_000),  # alone from 5 to 6 and 7 to 8
    Operation("memcpy", "copy", 9.5, 0.5, "main"),
]


def test_shares_of_one_device() -> None:
    summary = summarize(OPERATIONS, 12.0)
    times = (summary.busy, summary.compute, summary.communication, summary.exposed, summary.longest_gap)
    assert times == pytest.approx((7.5, 5.0, 4.0, 2.0, 1.5))


def test_time_inside_an_operation_is_not_counted_twice() -> None:
    summary = summarize(OPERATIONS, 12.0)
    seconds = {name: (calls, seconds) for name, calls, seconds, _ in summary.operations}
    assert seconds == {"all_gather": (1, 4.0), "matmul": (2, 4.0), "copy_": (1, 1.0), "memcpy": (1, 0.5)}
    assert [(total.name, total.seconds) for total in summary.modules] == [("layers.0", 4.0), ("layers.1", 1.0)]


def test_several_devices_are_averaged_and_pauses_are_of_one() -> None:
    first = Operation("dot", "compute", 0.0, 2.0, "ops", "tpu:0")
    others = [first._replace(device="tpu:1", start=start) for start in (0.0, 5.0)]
    summary = summarize([first, *others], 10.0)
    assert (summary.busy, summary.longest_gap) == (3.0, 3.0)


def test_the_text_says_what_was_reached() -> None:
    lines = summary_text(summarize(OPERATIONS, 12.0), "steps 1 to 2").splitlines()
    assert lines[0] == "steps 1 to 2"
    assert "host gaps             4.5000 s   37.5%  the longest 1500.00 ms" in lines
    assert lines[-1].split() == ["all_gather", "1", "4.0000", "2000.000", "0.500"]


def test_an_empty_trace_is_no_error() -> None:
    summary = summarize([], 1.0)
    assert (summary.busy, summary.longest_gap, summary.operations) == (0.0, 0.0, [])
    assert "host gaps             1.0000 s  100.0%" in summary_text(summary, "nothing")
