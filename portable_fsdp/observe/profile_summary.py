"""What a profile shows: shares of the wall time, and sums over operations, modules and collectives."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from portable_fsdp.backends.contract import Operation

_MOST_ROWS, _WIDTH = 15, 56


class Total(NamedTuple):
    """Sums over all operations of one name, or of one module."""

    name: str
    calls: int
    seconds: float
    bytes: int


class ProfileSummary(NamedTuple):
    """Seconds, averaged over the devices of process 0. Times of operations and modules exclude nested ones."""

    wall: float
    busy: float
    compute: float
    communication: float
    exposed: float  # exposed communication: no computation at the same time
    longest_gap: float  # between two operations of one device
    operations: Sequence[Total]  # longest first
    modules: Sequence[Total]
    collectives: Sequence[Total]


def summarize(operations: "Sequence[Operation]", wall: float) -> ProfileSummary:
    """Summarize the operations of `wall` seconds."""
    own_seconds, devices = [0.0] * len(operations), defaultdict[str, list[tuple[float, int, str]]](list)
    for index, begin, end in _own_times(operations):
        own_seconds[index] += end - begin
        device, kind = operations[index].device, operations[index].kind
        devices[device] += [(begin, 1, kind), (end, -1, kind)]
    times = [_times_of(sorted(edges)) for edges in devices.values()]
    busy, compute, communication, exposed = (sum(time[at] for time in times) / max(1, len(times)) for at in range(4))
    own = list(zip(operations, own_seconds, strict=True))
    return ProfileSummary(
        wall,
        busy,
        compute,
        communication,
        exposed,
        max((time[4] for time in times), default=0.0),
        _totals((each.name, seconds, each.bytes) for each, seconds in own),
        _totals((each.module, seconds, 0) for each, seconds in own if each.module),
        _totals((each.name, each.seconds, each.bytes) for each in operations if each.kind == "communication"),
    )


def _own_times(operations: "Sequence[Operation]") -> Iterator[tuple[int, float, float]]:
    """Yield (index, begin, end) of the times in which an operation runs without a nested one."""
    streams = defaultdict[tuple[str, str], list[tuple[float, float, int]]](list)
    for index, each in enumerate(operations):
        streams[each.device, each.stream].append((each.start, -each.seconds, index))
    for stream in streams.values():
        now, running = 0.0, list[tuple[float, int]]()  # (end, index), the innermost last
        for start, minus_seconds, index in [*sorted(stream), (inf, 0.0, -1)]:
            while running and running[-1][0] <= start:
                end, ended = running.pop()
                if end > now:
                    yield ended, now, end
                    now = end
            if running and start > now:
                yield running[-1][1], now, start
            now = max(now, start)
            running.append((start - minus_seconds, index))


def _times_of(edges: Sequence[tuple[float, int, str]]) -> tuple[float, float, float, float, float]:
    """Return (busy, compute, communication, exposed communication, longest gap) of one device, in seconds."""
    running = Counter[str]()
    busy = compute = communication = exposed = longest_gap = 0.0
    for (begin, change, kind), (until, _, _) in pairwise(edges):
        running[kind] += change
        span, computes, communicates = until - begin, running["compute"] > 0, running["communication"] > 0
        if any(running.values()):
            busy += span
            compute += span * computes
            communication += span * communicates
            exposed += span * (communicates and not computes)
        else:
            longest_gap = max(longest_gap, span)
    return busy, compute, communication, exposed, longest_gap


def _totals(rows: Iterable[tuple[str, float, int]]) -> list[Total]:
    totals: dict[str, Total] = {}
    for name, seconds, size in rows:
        _, calls, before, moved = totals.get(name, Total(name, 0, 0.0, 0))
        totals[name] = Total(name, calls + 1, before + seconds, moved + size)
    return sorted(totals.values(), key=lambda total: -total.seconds)


def summary_text(summary: ProfileSummary, title: str) -> str:
    """Format shares of the wall time, then tables of operations, modules and collectives."""
    shares = (
        ("device busy", summary.busy, ""),
        ("  compute", summary.compute, ""),
        ("  communication", summary.communication, ""),
        ("    exposed", summary.exposed, "without computation at the same time"),
        ("host gaps", max(0.0, summary.wall - summary.busy), f"the longest {1e3 * summary.longest_gap:.2f} ms"),
    )
    lines = [f"{name:<18}{time:>10.4f} s {time / summary.wall:>7.1%}  {note}".rstrip() for name, time, note in shares]
    for heading, totals in (("operation", summary.operations), ("module", summary.modules)):
        everything = sum(total.seconds for total in totals)
        lines += ["", f"{heading:<{_WIDTH}}{'calls':>8}{'seconds':>12}{'share':>9}"] if totals else []
        for name, calls, seconds, _ in totals[:_MOST_ROWS]:
            lines.append(f"{name[: _WIDTH - 1]:<{_WIDTH}}{calls:>8}{seconds:>12.4f}{seconds / everything:>9.1%}")
    if summary.collectives:
        lines += ["", f"{'collective':<24}{'calls':>8}{'seconds':>12}{'MB':>12}{'GB/s':>12}"]
    for name, calls, seconds, size in summary.collectives:
        moved = f"{size / 1e6:>12.3f}{size / 1e9 / seconds:>12.3f}" if size and seconds else f"{'-':>12}{'-':>12}"
        lines.append(f"{name[:23]:<24}{calls:>8}{seconds:>12.4f}{moved}")
    return "\n".join([title, "", *lines, ""])
