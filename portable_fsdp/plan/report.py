"""A plan on a terminal, and as a picture."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from portable_fsdp.config.describe import yaml_value
from portable_fsdp.plan.planner import Settings, Tried
from portable_fsdp.plan.result import Comparison, DeviceMemory, Plan, Time
from portable_fsdp.runtime.errors import UsageError, table

_BAR = 40  # characters
_MOST_BUFFERS = 5
_GIB = 2**30


def text(plan: Plan) -> str:
    """All of a plan, for people."""
    settings = ", ".join(f"{key}={yaml_value(value)}" for key, value in plan.settings.items())
    lines = [f"{plan.on}: {plan.hardware}, backend {plan.backend}", f"{_count(plan.parameters)} parameters; {settings}"]
    lines += [
        "",
        *_memory_lines(plan.memory),
        "",
        *_expected_lines(plan),
        *_time_lines(plan.time),
        "",
        *(f"note: {n}" for n in plan.notes),
    ]
    return "\n".join([*lines, f"{plan.method} Planned in {plan.planned_in_s:.0f} s."])


def keys_that_differ(points: Sequence[Settings]) -> list[str]:
    """Keys that settings of a sweep give different values, or that some leave out; all, where none does."""
    keys = list(dict.fromkeys(key for settings in points for key in settings))
    return [key for key in keys if len({settings.get(key) for settings in points}) > 1] or keys


def words(tried: Tried, keys: Sequence[str]) -> str:
    """Its settings, as the command line takes them."""
    return " ".join(f"{key}={tried.settings[key]}" for key in keys if key in tried.settings)


def line(tried: Tried, keys: Sequence[str]) -> str:
    """A setting of a sweep and its result."""
    if tried.plan is None:
        reason = (tried.refusal or "").partition("\n")[0]
        return f"{words(tried, keys)}: refused: {reason}"
    memory = tried.plan.memory
    return f"{words(tried, keys)}: {memory.peak_bytes / _GIB:.2f} GiB, {memory.verdict}"


def sweep_text(tried: Sequence[Tried], keys: Sequence[str]) -> str:
    """A row for each plan, in their order; `keys` are the settings that differ."""
    is_expected = all(each.plan is None or each.plan.expected for each in tried)
    rate_title = "tokens/s a device, " + ("expected" if is_expected else "at most")
    rows = [(*keys, "GiB", "verdict", rate_title, "bound by")]
    for setting in tried:
        if plan := setting.plan:
            rate = plan.expected_tokens_per_second_per_device if is_expected else plan.time.tokens_per_second_per_device
            memory = (f"{plan.memory.peak_bytes / _GIB:.2f}", plan.memory.verdict)
            time = ("unknown" if rate is None else f"{rate:,.0f}", plan.time.binds or "unknown")
            rows.append((*(setting.settings.get(key, "-") for key in keys), *memory, *time))
    return table(rows, right=(len(keys), len(keys) + 2))


def measures_text(tried: Sequence[Tried]) -> str:
    """What makes it fit, and what was tried before; the last of `tried` fits, or nothing does."""
    *before, last = tried
    lines = [f"  {line(each, list(each.settings))}" for each in tried]
    if not last.fits:
        return "\n".join(["None of these makes it fit:", *lines])
    assert last.plan is not None
    nearest = f"It fits with {words(last, list(last.settings))}: {last.plan.memory.peak_bytes / _GIB:.2f} GiB."
    return "\n".join([nearest, *(["Before that was tried:", *lines[:-1]] if before else [])])


def comparison_text(run: Comparison) -> str:
    """What a run took, beside what its plan says."""
    expected = "" if run.expected_ratio is None else f", {run.expected_ratio:.2f} times the expected time"
    ratio = "" if run.ratio is None else f", {run.ratio:.2f} times the bound"
    mfu = "" if run.mfu is None else f", mfu {run.mfu:.1%}"
    return (
        f"measured over {run.steps} steps: {_seconds(run.seconds)} a step{expected}{ratio}; "
        f"{run.tokens_per_second:,.0f} tokens a second in all{mfu}"
    )


def _memory_lines(memory: DeviceMemory) -> list[str]:
    limit = memory.limit_bytes
    least = "at least " if memory.is_least else ""
    of = "" if limit is None else f" of {limit / _GIB:.2f}"
    share = "" if limit is None else f" ({memory.peak_bytes / limit:.0%})"
    most = max(limit or 0, memory.peak_bytes)
    rows = [(name, f"{size / _GIB:.3f}", _bar(size, most)) for name, size in memory.parts.items() if size]
    lines = [f"memory of the fullest device: {least}{memory.peak_bytes / _GIB:.2f}{of} GiB{share}: {memory.verdict}"]
    lines.append(table(rows, right=(1,), indent="  "))
    if memory.host_bytes:
        lines.append(f"  offloaded to the host, for each device: {memory.host_bytes / _GIB:.2f} GiB")
    if memory.at:
        lines.append(f"  the peak is in {memory.at}")
    if memory.rematerialised:
        lines.append(f"  the compiler repeats {memory.rematerialised} instructions by itself, because memory is short")
    if memory.biggest:
        lines.append("  largest there:")
        shown = [(f"{b.bytes / _GIB:.3f}", b.name, b.where) for b in memory.biggest[:_MOST_BUFFERS]]
        lines.append(table(shown, right=(0,), indent="    "))
    return lines


def _expected_lines(plan: Plan) -> list[str]:
    expected, each = plan.expected, plan.expected_tokens_per_second_per_device
    if expected is None or each is None:
        return []
    spent = sorted(expected.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in spent)
    mfu = "" if plan.expected_mfu is None else f"; mfu {plan.expected_mfu:.0%}"
    lines = [f"time of a step, expected: {_seconds(expected.seconds)}", f"  {parts}"]
    shown = {kind: size for kind, size in expected.synchronous_bytes.items() if size >= 0.005 * _GIB}
    if shown:
        sent = ", ".join(f"{kind} {size / _GIB:.2f} GiB" for kind, size in shown.items())
        lines.append(f"  sent while compute waits: {sent}")
    return [*lines, f"  {each:,.0f} tokens a second on a device, {each * plan.devices:,.0f} in all{mfu}"]


def _time_lines(time: Time) -> list[str]:
    rate, each = time.tokens_per_second, time.tokens_per_second_per_device
    if time.seconds is None or rate is None or each is None:
        return ["time of a step: no bound, since no peak and no bandwidth of this device is known"]
    mfu = "" if time.mfu is None else f"; mfu at most {time.mfu:.0%}"
    lines = [f"time of a step, at least: {_seconds(time.seconds)}, bound by {time.binds}"]
    lines.append("  " + ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in time.bounds.items()))
    lines.append(f"  at most {each:,.0f} tokens a second on a device, {rate:,.0f} in all{mfu}")
    return lines


def _bar(size: int, most: int) -> str:
    """Its share of the widest, in eighths of a character."""
    eighths = round(size / most * _BAR * 8) if most else 0
    full, rest = divmod(eighths, 8)
    return "█" * full + ("" if not rest else chr(0x2588 + 8 - rest))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def require_matplotlib() -> None:
    """Raises UsageError where it isn't installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            "--save: expected the package matplotlib, found none installed.\n"
            "  In a checkout of portable_fsdp: pip install '.[plan]'"
        )


def draw(plans: Sequence[Plan], labels: Sequence[str], path: Path) -> None:
    """Memory by part of each plan as stacked bars, with the devices' limit, and the tokens a second at most.

    The suffix of `path` is the picture's format. Raises ValueError for one that matplotlib doesn't know,
    and UsageError where it can't be written.
    """
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.use("Agg")  # a file, no screen
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 1.5 + 0.45 * len(plans)), sharey=True, layout="constrained")
    parts = list(dict.fromkeys(part for plan in plans for part in plan.memory.parts))
    ends = [0.0] * len(plans)
    for part in parts:
        sizes = [plan.memory.parts.get(part, 0) / _GIB for plan in plans]
        left.barh(labels, sizes, left=ends, label=part)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    for limit in {plan.memory.limit_bytes for plan in plans} - {None}:
        left.axvline((limit or 0) / _GIB, color="0.3", linestyle="--", linewidth=1)
    left.invert_yaxis()
    left.set(xlabel="GiB of the fullest device (dashed: what a program may have)")
    left.legend(frameon=False, fontsize="small")
    at_most = [plan.time.tokens_per_second_per_device or 0.0 for plan in plans]
    right.barh(labels, at_most, color="0.85", label="at most")
    if expected := [plan.expected_tokens_per_second_per_device or 0.0 for plan in plans if plan.expected]:
        right.barh(
            [label for label, plan in zip(labels, plans, strict=True) if plan.expected],
            expected,
            color="0.5",
            label="expected",
        )
    right.legend(frameon=False, fontsize="small")
    right.set(xlabel="tokens a second on a device")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"--save={path}: expected to be able to write there, found: {error}") from None
    finally:
        plt.close(figure)
