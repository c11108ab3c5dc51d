"""The doctor's report: one per host, as text or JSON."""

import json
import os
import socket
import sys
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from portable_fsdp.doctor import checks
from portable_fsdp.doctor.checks import Finding, checked
from portable_fsdp.runtime.command import CommandParser, at_least, run_command, to_stderr, to_stdout
from portable_fsdp.runtime.errors import EXIT_FAILED, EXIT_FINISHED
from portable_fsdp.runtime.host import tpu_chips
from portable_fsdp.runtime.launchers import detect_launch
from portable_fsdp.version import __version__

DESCRIPTION = """Check this host: what is installed, which devices and engines work, what is wrong, and how to fix it.
Under torchrun all processes open an engine together, to test that the hosts reach each other."""
EXIT_CODES = "exit code: 0 nothing failed (there may be warnings), 1 something failed, 2 usage error"
WIDTH = 120


def _parser() -> CommandParser:
    parser = CommandParser("doctor", DESCRIPTION, epilog=EXIT_CODES)
    help = "timeout in seconds for opening an engine, and for the other hosts"
    parser.add_argument("--limit_s", type=at_least(1, float), default=60.0, help=help)
    parser.switch("--json", "print one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Print the report; return the exit code. `argv`: the arguments after the program's name."""
    return run_command(_parser(), argv, lambda options: _examine(options.limit_s, options.json))


def _examine(limit_s: float, as_json: bool) -> int:
    """Print one report per host. A host's other processes only take part in opening the engine."""
    findings = {"launcher": checked(lambda: checks.check_launcher(os.environ))}
    launch = detect_launch(os.environ) if findings["launcher"].state == "ok" else None
    engines: dict[str, Callable[[], Finding]] = {}
    gpus, visible = len([*Path("/dev").glob("nvidia[0-9]*")]), os.environ.get("CUDA_VISIBLE_DEVICES")
    with ExitStack() as children:  # child processes open engines during the other checks
        if launch is not None:
            device = "cuda" if gpus and visible not in checks.NO_GPU else "cpu"
            findings["engines"] = checked(partial(checks.start_engines, engines, children, launch, device, limit_s))
        host = {} if launch and launch.local_rank else _host_checks(gpus, visible)
        findings |= {name: checked(check) for name, check in (host | engines).items()}
    if not (launch and launch.local_rank):
        return _print(findings, as_json)
    for name, finding in findings.items():
        if finding.state == "failed":
            to_stderr(f"process {launch.rank}: {name}: {finding.found}")
    return EXIT_FINISHED  # with another code the launcher would end the process that reports


def _host_checks(gpus: int, visible: str | None) -> dict[str, Callable[[], Finding]]:
    chips = tpu_chips()
    return {
        "python": lambda: checks.check_python(sys.version_info[:3]),
        "packages": checks.check_packages,
        "extras": checks.check_extras,
        "gpu": lambda: checks.check_gpu(gpus, visible),
        "tpu": lambda: checks.check_tpu(chips, os.environ),
        "tpu in use": lambda: checks.check_tpu_is_free(chips),
    }


def _print(findings: dict[str, Finding], as_json: bool) -> int:
    states = [finding.state for finding in findings.values()]
    code = EXIT_FAILED if "failed" in states else EXIT_FINISHED
    host = socket.gethostname()
    if as_json:
        lines = [{"name": name, **finding._asdict()} for name, finding in findings.items()]
        to_stdout(json.dumps({"host": host, "version": __version__, "exit_code": code, "checks": lines}))
        return code
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("ok", "warning", "failed"))
    lines = [f"portable_fsdp {__version__} on host {host}"]
    for name, (state, found, mend) in findings.items():
        lines += textwrap.wrap(f"{state:<8} {name:<16} {found}", WIDTH, subsequent_indent=" " * 26)
        lines += textwrap.wrap(f"-> {mend}" if mend else "", WIDTH, initial_indent=" " * 26, subsequent_indent=" " * 29)
    to_stdout("\n".join([*lines, counts]))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
