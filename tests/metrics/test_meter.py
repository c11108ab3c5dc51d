import pytest

from portable_fsdp.metrics.meter import Meter, MetricsRow, processes_row

VALUES = {"loss": 2.3125, "grad_norm": 0.9, "lr": 3e-4, "stop": 0.0}
METER = Meter(devices=4, peak_flops=100e12, flops_per_token=1e10)


def row_of(meter: Meter) -> MetricsRow:
    return meter.row(step=10, values=VALUES, tokens=6200, seconds=2.0, data_seconds=0.25, memory_bytes=3 * 2**29)


def test_a_row_has_exactly_these_keys_in_this_order() -> None:
    assert row_of(METER) == {
        "step": 10,
        "loss": 2.3125,
        "grad_norm": 0.9,
        "lr": 3e-4,
        "tokens": 6200,
        "tokens_per_second": 3100.0,
        "mfu": pytest.approx(3100 * 1e10 / 4 / 100e12),
        "memory_bytes": 3 * 2**29,
        "seconds": 2.0,
        "data_seconds": 0.25,
    }
    assert (
        " ".join(row_of(METER))
        == "step loss grad_norm lr tokens tokens_per_second mfu memory_bytes seconds data_seconds"
    )


@pytest.mark.parametrize("meter", [Meter(4, None, 1e10), Meter(4, 100e12, None), Meter(4, None, None)])
def test_mfu_is_null_where_peak_or_flops_are_unknown(meter: Meter) -> None:
    assert row_of(meter)["mfu"] is None


def test_the_whole_console_line() -> None:
    assert METER.console_line(row_of(METER), memory_limit=15 * 2**30) == (
        "step: 10  loss: 2.3125  grad_norm: 0.9000  memory: 1.50GiB(10%)  tps: 3,100  tflops: 7.75  mfu: 7.8%"
    )


def test_the_console_line_leaves_out_what_is_unknown() -> None:
    meter = Meter(devices=4, peak_flops=None, flops_per_token=None)
    assert meter.console_line(row_of(meter), memory_limit=None) == (
        "step: 10  loss: 2.3125  grad_norm: 0.9000  memory: 1.50GiB  tps: 3,100"
    )
    meter = Meter(devices=4, peak_flops=None, flops_per_token=1e10)
    assert meter.console_line(row_of(meter), memory_limit=None).endswith("tps: 3,100  tflops: 7.75")


def test_unknown_memory_is_null_and_not_on_the_console() -> None:
    row = METER.row(step=1, values=VALUES, tokens=10, seconds=1.0, data_seconds=0.0, memory_bytes=None)
    assert row["memory_bytes"] is None
    assert "memory" not in METER.console_line(row, memory_limit=None)


def test_imbalance_is_the_greatest_over_the_median() -> None:
    nan = float("nan")
    assert processes_row([2.0, 3.0, 1.0], [nan, 5.0, 5.0]) == {
        "seconds": [2.0, 3.0, 1.0],
        "memory_bytes": [None, 5.0, 5.0],
        "seconds_imbalance": 1.5,
        "memory_imbalance": None,
    }
    assert processes_row([4.0, 4.0], [1.0, 3.0])["memory_imbalance"] == 1.5
