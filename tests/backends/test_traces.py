"""What is observed of real runs: traces of each engine, which change neither losses nor programs, and stragglers."""

import socket
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from cases import TINY, Case
from jobs import running
from test_contract import ADAMW
from torch.nn.modules.module import register_module_forward_pre_hook
from workers import GetWorkers, Group, Run

from portable_fsdp.backends.native.profile import operations
from portable_fsdp.config.schema import Config
from portable_fsdp.data.batches import Batches
from portable_fsdp.observe.profile_summary import summarize
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.train.loop import train

STEPS = 3  # recorded ones


def traced(case: Case, first: int, last: int, folder: str) -> dict[str, Any]:
    """A run until step `last`, of which process 0 records the steps from `first` on."""
    with running(case) as run:
        before = run.backend.compilations
        metrics = run.train(1, first - 1)
        stop = run.backend.start_trace(Path(folder)) if run.backend.process.index == 0 else lambda: list
        metrics += run.train(first, last)
        return {
            "metrics": metrics,
            "operations": stop()(),
            "compilations": run.backend.compilations - before,
            "expected_compilations": run.backend.expected_compilations,
            "collectives": run.backend.collectives,
        }


def test_a_trace_changes_neither_losses_nor_programs(
    group: Group, workers: GetWorkers, run: Run, tmp_path: Path
) -> None:
    losses = [step["loss"] for step in run(group, ADAMW)[0]["metrics"]]
    answers = workers(group).run(traced, case=ADAMW, first=3, last=2 + STEPS, folder=str(tmp_path))
    for answer in answers:
        assert [step["loss"] for step in answer["metrics"]] == losses[: 2 + STEPS]
        assert answer["compilations"] <= answer["expected_compilations"]  # fewer: programs of an earlier job
    summary = summarize(answers[0]["operations"], 100.0)
    modules = {total.name.rpartition(".")[0] or total.name for total in summary.modules}
    if group.engine.compiles:
        assert "train_step" in modules
        assert {"all_gather", "all_reduce"} <= {total.name for total in summary.collectives} or group.devices == 1
        assert list(tmp_path.rglob("*.xplane.pb"))
    elif answers[0]["collectives"] is not None:
        assert {"model.layers", "(root)", "(optimizer)"} <= modules
        counted = {kind: (STEPS * calls, STEPS * size) for kind, (calls, size) in answers[0]["collectives"].items()}
        assert {kind: (calls, size) for kind, calls, _, size in summary.collectives} == counted
        assert (tmp_path / "memory.csv").read_text().count("\n") > 100
    if answers[0]["operations"] and group.devices > 1:  # the toy records nothing
        assert 0 < summary.exposed <= summary.communication < summary.busy < 100


def kernel(name: str, start: float, correlation: int, stream: int, **more: Any) -> dict[str, Any]:
    args = {"device": 0, "stream": stream, "correlation": correlation, **more}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": 10.0, "tid": stream, "args": args}


def on_host(name: str, start: float, category: str, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": 1.0, "tid": 77, "args": args}


def test_kernels_of_a_gpu_belong_to_the_unit_that_launched_them() -> None:
    """Written by hand after traces of torch 2.9: no test has a GPU."""
    gather = {"Collective name": "_allgather_base", "In msg nelems": 100, "Out msg nelems": 800, "dtype": "BFloat16"}
    events = [
        on_host("FSDP::pre_forward (layers.3)", 0.0, "user_annotation"),
        on_host("aten::mm", 5.0, "cpu_op"),
        on_host("cudaLaunchKernel", 5.5, "cuda_runtime", correlation=1),
        on_host("FSDP::post_forward (layers.3)", 9.0, "user_annotation"),
        on_host("cudaLaunchKernel", 12.0, "cuda_runtime", correlation=2),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20.0, 2, 31, **gather),
        kernel("nvjet_tst_128x256", 30.0, 1, 7),
    ]
    collective, product = operations(events)
    assert (collective.name, collective.kind, collective.bytes) == ("all_gather", "communication", 1600)
    assert (product.kind, product.module, product.stream, product.device) == ("compute", "layers.3", "7", "cuda:0")
    assert product.seconds == pytest.approx(1e-5)


# ------------------------------------------------------------ processes that the others wait for

THREE = Group("gloo", 3)


def train_with_a_slow_process(config: Config, slow: int | None, place: str, seconds: float) -> None:
    """A whole run. Process `slow` sleeps in each step: in its layers' forward, or as it waits for rows."""

    def sleep(module: Any, _: Any) -> None:
        if place == "forward" and type(module).__name__ == "LlamaMLP" and dist.get_rank() == slow:
            time.sleep(seconds)

    def late(batches: Batches) -> Any:
        time.sleep(seconds)
        return following(batches)

    following, hook = Batches.__next__, register_module_forward_pre_hook(sleep)
    is_late = place == "rows" and dist.get_rank() == slow
    try:
        with patch.object(Batches, "__next__", late) if is_late else nullcontext():
            assert train(config, device="cpu", backend="native") == 0
    finally:
        hook.remove()


@pytest.mark.parametrize(("slow", "place"), [(2, "forward"), (0, "rows"), (None, "nowhere")])
def test_a_slow_process_is_named_once_within_10_steps(
    slow: int | None, place: str, workers: GetWorkers, tmp_path: Path
) -> None:
    own = {"run": {"dir": str(tmp_path / "run")}, "train": {"steps": 12, "global_batch": 3, "log_every": 6}}
    config = Config.model_validate(TINY | own)
    workers(THREE).run(train_with_a_slow_process, config=config, slow=slow, place=place, seconds=0.1)
    named = [event for event in read_jsonl(tmp_path / "run/events.jsonl") if event["event"] == "straggler"]
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    loads = rows[-1]["processes"]
    assert rows[0]["imbalance"] is None  # no step had ended
    if slow is None:
        assert named == []
        return
    (event,) = named
    assert (event["process"], event["host"], event["slow"]) == (slow, socket.gethostname(), 9)
    assert event["step"] <= 10
    assert event["ratio"] > 2
    assert loads["own_seconds"][slow] == max(loads["own_seconds"]) >= 0.1
    assert rows[-1]["imbalance"] == pytest.approx(max(loads["own_seconds"]) / sorted(loads["own_seconds"])[1])
    assert (loads["data_seconds"][slow] > 0.1) == (place == "rows")
    assert loads["seconds_imbalance"] < 1.5  # wall time tells nothing
