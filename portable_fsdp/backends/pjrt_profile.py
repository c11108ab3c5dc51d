"""A trace by torch_xla's profiler, and the operations in it."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from portable_fsdp.metrics.profile import Operation

_COLLECTIVE = re.compile(r"%?(all-gather|all-reduce|reduce-scatter|all-to-all|collective-[a-z]+)\b")


def start_trace(folder: Path) -> Callable[[], Callable[[], list[Operation]]]:
    """Record this process and its devices, as base.Backend.start_trace says; the trace is for xprof."""
    import torch_xla.debug.profiler as profiler

    cast(Any, profiler).start_trace(str(folder))

    def stop() -> Callable[[], list[Operation]]:
        cast(Any, profiler).stop_trace()
        return lambda: [operation for path in folder.rglob("*.xplane.pb") for operation in operations(path)]

    return stop


def operations(path: Path) -> Iterator[Operation]:
    """Those of compiled programs. PJRT's CPU devices share their threads, and so count as one device."""
    from jax.profiler import ProfileData

    for plane in cast(Any, ProfileData).from_file(str(path)).planes:
        is_device = plane.name.startswith("/device:")
        # A device's other lines hold its steps and programs, over the same times.
        for line in (line for line in plane.lines if not is_device or line.name.endswith("XLA Ops")):
            for event in line.events:
                stats, collective = dict(event.stats), _COLLECTIVE.match(event.name)
                if is_device or "hlo_op" in stats:
                    yield Operation(
                        collective[1].replace("-", "_") if collective else event.name,
                        "communication" if collective else "compute",
                        event.start_ns / 1e9,
                        event.duration_ns / 1e9,
                        line.name,
                        plane.name if is_device else "cpu",
                        str(stats.get("hlo_module", "")),
                    )
