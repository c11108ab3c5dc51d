"""What a check returns, one line of the report; and the answer of a probe, which some checks get."""

import json
import signal
import textwrap
from typing import Any, Literal, NamedTuple

from portable_fsdp.runtime.child import Child

WIDTH = 120


class Finding(NamedTuple):
    """`mend` is the command or the setting that helps; empty exactly where the state is ok."""

    state: Literal["ok", "warning", "failed"]
    found: str
    mend: str = ""

    def lines(self, name: str) -> list[str]:
        """For a terminal; `name`: of the check."""
        start = f"{self.state:<8} {name:<16} "
        lines = [textwrap.fill(self.found, WIDTH, initial_indent=start, subsequent_indent=" " * 26)]
        if self.mend:
            arrow = " " * 26 + "-> "
            lines.append(textwrap.fill(self.mend, WIDTH, initial_indent=arrow, subsequent_indent=" " * 29))
        return lines


def ok(found: str) -> Finding:
    return Finding("ok", found)


def warning(found: str, mend: str) -> Finding:
    """Training works, or may; something will be slow or is about to fail."""
    return Finding("warning", found, mend)


def failed(found: str, mend: str) -> Finding:
    """A run that needs it would not start, or would end badly."""
    return Finding("failed", found, mend)


class ProbeAnswer(NamedTuple):
    """`value`: the JSON object that the probe printed; None where it failed or was late, and `problem` says how."""

    value: dict[str, Any] | None
    problem: str = ""
    is_late: bool = False


def probe_answer(child: Child, limit_s: float) -> ProbeAnswer:
    """Wait for a child of `probe.py`, until `limit_s` seconds after its start."""
    ended = child.wait(limit_s)
    if ended.how == "late":
        return ProbeAnswer(None, f"no answer within {limit_s:g} s", is_late=True)
    output, log = ([line for line in text.splitlines() if line.strip()] for text in (ended.output, ended.log))
    if ended.code == 0 and output:
        return ProbeAnswer(json.loads(output[-1]))
    if ended.code < 0:
        return ProbeAnswer(None, f"signal {signal.Signals(-ended.code).name}")
    return ProbeAnswer(None, log[-1][:300] if log and ended.code else f"exit code {ended.code}")
