"""Trace this process by torch.profiler, and read the operations from the trace.

A GPU's operations are its kernels and copies; on CPU they are torch's own, and the work of gloo's threads.
"""

import csv
import gzip
import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

from portable_fsdp.backends.contract import Operation
from portable_fsdp.backends.native.units import COLLECTIVES

TraceEvent = Mapping[str, Any]
"""An event of a Chrome trace; `ts` and `dur` are in microseconds."""

_ITEM_BYTES = {"float": 4, "double": 8, "half": 2, "bfloat16": 2, "int": 4, "long": 8, "long int": 8}
"""Bytes per element, by torch's name of a dtype in a trace, in lower case; 1 for others (float8, int8, bool)."""

_LAUNCHES = ("cuda_runtime", "cuda_driver")
_MARK = re.compile(r"FSDP::(pre_forward|post_forward|pre_backward|post_backward_accumulate)(?: \((.*)\))?")


def start_trace(folder: Path) -> Callable[[], Callable[[], list[Operation]]]:
    """Implement `Backend.start_trace`: record this process for trace.json.gz and memory.csv."""
    older = torch.empty(1)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    profiler = cast(Any, profile)(activities=activities, record_shapes=True, profile_memory=True)
    profiler.start()
    del older  # torch logs once that it doesn't know the size of such a tensor: here, and not during the steps
    path = folder / "trace.json"

    def stop() -> Callable[[], list[Operation]]:
        profiler.stop()
        profiler.export_chrome_trace(str(path))
        return read

    def read() -> list[Operation]:
        content = path.read_bytes()
        with gzip.open(folder / "trace.json.gz", "wb", compresslevel=1) as file:  # torch's level takes 20 times as long
            file.write(content)
        path.unlink()
        events: list[TraceEvent] = sorted(json.loads(content)["traceEvents"], key=lambda event: event["ts"])
        _write_memory(folder / "memory.csv", [event for event in events if event["name"] == "[memory]"])
        return list(operations(events))

    return stop


def _write_memory(path: Path, changes: Sequence[TraceEvent]) -> None:
    """Write the bytes that torch's allocator holds after each change."""
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["seconds", "device", "bytes"])
        for change in changes:
            device = change["args"]["Device Id"]
            place = "cpu" if device < 0 else f"cuda:{device}"
            rows.writerow([(change["ts"] - changes[0]["ts"]) / 1e6, place, change["args"]["Total Allocated"]])


def operations(events: Iterable[TraceEvent]) -> Iterator[Operation]:
    """Yield the operations of the GPU if the trace has any, else those of the CPU. `events`: sorted by time."""
    spans = [event for event in events if event["ph"] == "X"]
    module_at = _modules(spans)
    of_gpu = [event for event in spans if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not of_gpu:
        yield from _of_cpu(spans, module_at)
    launches = {event["args"].get("correlation"): event for event in spans if event.get("cat") in _LAUNCHES}
    for event in of_gpu:
        name, args, kind, size = event["name"], event["args"], "copy", 0
        if event["cat"] == "kernel":
            kind = "communication" if name.startswith("ncclDevKernel") else "compute"
        if collective := args.get("Collective name"):
            name = COLLECTIVES.get(f"c10d::{collective}_", collective)
            size = max(args["In msg nelems"], args["Out msg nelems"]) * _item_bytes(args["dtype"])
        launch = launches.get(args["correlation"])
        place = str(args["stream"]), f"cuda:{args['device']}"
        yield Operation(name, kind, *_time(event), *place, module_at(launch) if launch else "", size)


def _of_cpu(spans: Sequence[TraceEvent], module_at: Callable[[TraceEvent], str]) -> Iterator[Operation]:
    threads_of_gloo = {event["tid"] for event in spans if event["name"].startswith("gloo:")}
    started = [event for event in spans if event["name"] in COLLECTIVES]
    for event in spans:
        name, stream = event["name"], str(event["tid"])
        if name.startswith("gloo:"):
            kind, size = _pop_collective(started, event)
            yield Operation(kind, "communication", *_time(event), stream, bytes=size)
        elif event["cat"] == "cpu_op" and _computes(name) and event["tid"] not in threads_of_gloo:
            yield Operation(name, "compute", *_time(event), stream, module=module_at(event))


def _computes(name: str) -> bool:
    """Whether `name` is an operator that neither starts others nor waits for them."""
    return "::" in name and not name.startswith(("c10d::", "autograd::", "torch::autograd::"))


def _pop_collective(started: list[TraceEvent], event: TraceEvent) -> tuple[str, int]:
    """Return kind and bytes of the collective behind gloo's `event`: the earliest left in `started` with a tensor of
    that size. (gloo's reduce_scatter is called all_reduce.)"""
    numel, item_bytes = max(_sizes(event), default=0), _item_bytes(str(event["args"].get("Input type", [""])[0]))
    for index, call in enumerate(started):
        if numel in (sizes := _sizes(call)):
            return COLLECTIVES[started.pop(index)["name"]], max(sizes) * item_bytes
    return event["name"].removeprefix("gloo:"), numel * item_bytes


def _sizes(event: TraceEvent) -> list[int]:
    """Number of elements of each tensor, and of each list of tensors, of an event."""
    args = event["args"]
    inputs = zip(args.get("Input type", []), args.get("Input Dims", []), strict=True)
    tensors: list[tuple[str, list[Any]]] = [(kind, shape) for kind, shape in inputs if kind not in ("", "Scalar")]
    return [sum(map(math.prod, shape)) if kind == "TensorList" else math.prod(shape) for kind, shape in tensors]


def _item_bytes(dtype: str) -> int:
    return _ITEM_BYTES.get(dtype.rpartition("::")[2].lower(), 1)


def _time(event: TraceEvent) -> tuple[float, float]:
    """Start and duration in seconds."""
    return event["ts"] / 1e6, event["dur"] / 1e6


def _modules(spans: Iterable[TraceEvent]) -> Callable[[TraceEvent], str]:
    """Return event -> the FSDP unit whose forward or backward runs in the event's thread, by FSDP2's marks."""
    edges: list[tuple[float, int, bool, str]] = []
    for event in spans:
        begin, end = event["ts"], event["ts"] + event["dur"]
        if mark := _MARK.fullmatch(event["name"]):
            enters = mark[1].startswith("pre_")
            edges.append((end if enters else begin, event["tid"], enters, mark[2] or "(root)"))
        elif event["name"].startswith("Optimizer.step#"):
            edges += [(begin, event["tid"], True, "(optimizer)"), (end, event["tid"], False, "(optimizer)")]
    changes, units = defaultdict[int, list[tuple[float, str]]](list), defaultdict[int, list[str]](list)
    for time, thread, enters, unit in sorted(edges):
        if enters:
            units[thread].append(unit)
        elif unit in units[thread]:
            units[thread].remove(unit)
        changes[thread].append((time, units[thread][-1] if units[thread] else ""))

    def module_at(event: TraceEvent) -> str:
        known = changes[event["tid"]]
        index = bisect_right(known, event["ts"], key=lambda change: change[0])
        return known[index - 1][1] if index else ""

    return module_at
