"""One line of a report: what was asked, how it stands, what was found, and what mends it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """`mend` is the command or the setting that helps; empty exactly where the state is ok."""

    name: str
    state: Literal["ok", "warning", "failed"]
    found: str
    mend: str = ""


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warning(name: str, found: str, mend: str) -> Finding:
    """Training works, or may; something will be slow or is about to fail."""
    return Finding(name, "warning", found, mend)


def failed(name: str, found: str, mend: str) -> Finding:
    """A run with what this concerns would not start, or not end well."""
    return Finding(name, "failed", found, mend)
