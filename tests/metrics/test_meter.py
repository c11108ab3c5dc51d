"""How evenly processes are loaded."""

from portable_fsdp.metrics.meter import processes_row


def test_imbalance_is_the_greatest_over_the_median() -> None:
    nan = float("nan")
    assert processes_row([2.0, 3.0, 1.0], [nan, 5.0, 5.0]) == {
        "seconds": [2.0, 3.0, 1.0],
        "memory_bytes": [None, 5.0, 5.0],
        "seconds_imbalance": 1.5,
        "memory_imbalance": None,
    }
    assert processes_row([4.0, 4.0], [1.0, 3.0])["memory_imbalance"] == 1.5
