"""A question that may hang or crash (a driver, an import), asked in a child process with a time limit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """`value`: what the child printed as JSON; None where it failed or was late, and `problem` says how."""

    value: dict[str, Any] | None
    problem: str = ""
    is_late: bool = False


class Question:
    """`python -m MODULE PARENT ARGUMENTS`, which prints one JSON object as its last line; runs from the start on.

    The child is to call `runtime.process.end_with_parent(PARENT)` first. Close it, or leave the `with` block: it ends.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._began = time.monotonic()
        # Files, no pipes: a child that the kernel doesn't let go would keep a reader waiting.
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._child = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    def __enter__(self) -> "Question":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, limit_s: float) -> Answer:
        """Wait for it, until `limit_s` seconds after the question was asked."""
        try:
            code = self._child.wait(max(0.0, self._began + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._kill()
            return Answer(None, f"no answer within {limit_s:g} s", is_late=True)
        said = _lines(self._out)
        if code == 0 and said:
            return Answer(json.loads(said[-1]))
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = _lines(self._err)
        return Answer(None, last[-1][:300] if last and code > 0 else how)

    def close(self) -> None:
        self._kill()
        self._out.close()
        self._err.close()

    def _kill(self) -> None:
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in a driver: nobody can end it
                self._child.wait(5)


def _lines(file: Any) -> list[str]:
    file.seek(0)
    return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
