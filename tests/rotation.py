"""`--proofs-of=COMMIT`: proofs for about three minutes, other ones for each commit.

Proofs take hours together, so no commit waits for all. Their hashes and the commit's lie on one ring; those that
follow the commit's run until the time is over, and so each proof runs again and again. Only `make proof` runs those
with a time limit of their own, of ten minutes and more.
"""

import hashlib
import time

import pytest

STARTS_UNTIL_S = 120
"""No proof starts later; one takes a minute at most, as a rule."""


LONG_S = 600


def _limit_s(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0] if mark.args else mark.kwargs["timeout"]) if mark else 0.0


def _place(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Rotation:
    def __init__(self, commit: str) -> None:
        self._start, self._until = _place(commit), float("inf")
        self._chosen, self._run, self._failed = 0, 0, list[str]()

    @pytest.hookimpl(trylast=True)  # after `-m` has selected
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if _limit_s(item) < LONG_S]
        places = {item: _place(item.nodeid) for item in items}
        items.sort(key=lambda item: (places[item] < self._start, places[item]))
        self._chosen, self._until = len(items), time.monotonic() + STARTS_UNTIL_S

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        if time.monotonic() > self._until:
            return True  # as if it had run: nothing is reported
        self._run += 1
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"{self._run} of {self._chosen} proofs ran")
        for name in dict.fromkeys(self._failed):
            terminalreporter.write_line(f"to run it alone: .venv/bin/python -m pytest -m proof '{name}'")
