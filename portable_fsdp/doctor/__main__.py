"""The doctor's report; under a launcher also which processes of the run are there, and how their clocks differ."""

import json
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from portable_fsdp.doctor import devices, host, network, packages
from portable_fsdp.doctor.finding import Finding, ProbeAnswer, failed, ok, probe_answer
from portable_fsdp.runtime.child import Child
from portable_fsdp.runtime.command import CommandParser, at_least, run_command, to_stdout
from portable_fsdp.runtime.errors import EXIT_FAILED, EXIT_FINISHED
from portable_fsdp.runtime.host import tpu_chips
from portable_fsdp.runtime.process import Launch
from portable_fsdp.version import __version__

DESCRIPTION = """Check this host: what is installed, which devices are there, what is wrong, and how to mend it.
Under torchrun it asks all hosts: who is there, and whether their clocks agree."""
EXIT_CODES = "exit code: 0 nothing failed (there may be warnings), 1 something failed, 2 usage error"

LEAVE_S = 10.0  # after the limit, for a probe to say which processes are missing


def _parser() -> CommandParser:
    parser = CommandParser("doctor", DESCRIPTION, epilog=EXIT_CODES)
    parser.add_argument(
        "--run_dir", type=Path, default=Path("runs"), metavar="FOLDER", help="a run's folder: is there room?"
    )
    parser.add_argument(
        "--limit_s", type=at_least(1, float), default=60.0, help="seconds to wait for torch, a driver, another host"
    )
    parser.switch("--json", "one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Print the report; returns the exit code. `argv`: the arguments after the program's name."""
    return run_command(_parser(), argv, lambda options: _report(options.run_dir, options.limit_s, options.json))


def _report(run_dir: Path, limit_s: float, as_json: bool) -> int:
    """Each host prints one report; its other processes only answer those that ask who is there."""
    launch, launcher = network.launch_of(os.environ)
    with ExitStack() as probes:  # before the other checks, which take seconds
        several = launch is not None and launch.world_size > 1
        processes = _probe(probes, "torch", "processes", str(limit_s)) if several else None
        findings: dict[str, Finding] = {}
        if launch is None or launch.local_rank == 0:
            findings = _check_host(run_dir, limit_s, launch) | {"launcher": launcher}
        if processes is not None:
            findings["other processes"] = network.check_clocks(probe_answer(processes, limit_s + LEAVE_S))
    if launch is not None and launch.local_rank != 0:
        return EXIT_FINISHED  # at another code the launcher would end the process that reports
    states = [finding.state for finding in findings.values()]
    code = EXIT_FAILED if "failed" in states else EXIT_FINISHED
    if as_json:
        checks = [{"name": name, **finding._asdict()} for name, finding in findings.items()]
        report = {"host": socket.gethostname(), "version": __version__, "exit_code": code, "checks": checks}
        to_stdout(json.dumps(report))
        return code
    lines = [f"portable_fsdp {__version__} on host {socket.gethostname()}"]
    lines += [line for name, finding in findings.items() for line in finding.lines(name)]
    lines.append(", ".join(f"{states.count(state)} {state}" for state in ("ok", "warning", "failed")))
    to_stdout("\n".join(lines))
    return code


def _probe(probes: ExitStack, package: str, *arguments: str, **environment: str) -> Child | None:
    """Start a probe that needs a package; None where that isn't installed."""
    if packages.installed(package) is None:
        return None
    return probes.enter_context(Child("portable_fsdp.doctor.probe", *arguments, environment=environment))


def _check_host(run_dir: Path, limit_s: float, launch: Launch | None) -> dict[str, Finding]:
    """`launch`: None where nobody knows."""
    chips = tpu_chips()
    processes = launch.world_size if launch is not None else 1
    environ = {**os.environ, **(launch.variables if launch is not None else {})}
    several, hostname = network.is_on_several_hosts(environ), socket.gethostname()
    with ExitStack() as probes:  # all at once
        children = {
            "torch": _probe(probes, "torch", "torch"),
            # With PJRT_DEVICE=CPU it takes no chip.
            "torch_xla": _probe(probes, "torch_xla", "import", "torch_xla", PJRT_DEVICE="CPU"),
        }
        checks: dict[str, Callable[[], Finding]] = {
            "python": lambda: packages.check_python(sys.version_info[:3]),
            "torch": lambda: packages.check_package("torch"),
            "torch_xla": lambda: packages.check_torch_xla(len(chips)),
            "torch_tpu": lambda: packages.check_torch_tpu(len(chips)),
            "transformers": lambda: packages.check_package("transformers"),
            "packages": lambda: packages.check_others(shown=("torch", "transformers")),
            "extras": packages.check_extras,
            "shared memory": host.check_shared_memory,
            "run folder": lambda: host.check_disk(run_dir, "set run.dir to another disk's folder"),
            "temporary files": host.check_temporary,
            "open files": lambda: host.check_open_files(processes),
            "locked memory": lambda: host.check_locked_memory(host.memory_registering_hardware(len(chips))),
            "tpu": lambda: devices.check_tpu(chips, os.environ),
            "tpu in use": lambda: devices.check_tpu_is_free(chips),
            "gloo": lambda: network.check_gloo(environ, network.interfaces(), hostname, several),
        }
        findings = {name: _checked(check) for name, check in checks.items()}
        answers = {name: probe_answer(child, limit_s) for name, child in children.items() if child is not None}
    findings |= {f"import {package}": _check_import(package, answer, limit_s) for package, answer in answers.items()}
    gpus, torch = (devices.gpu_files(), devices.driver_version()), answers.get("torch")
    findings["gpu"] = _checked(lambda: devices.check_gpu(torch, *gpus, os.environ))
    findings["nccl"] = _checked(lambda: devices.check_nccl(torch, network.interfaces(), os.environ))
    return findings


def _checked(check: Callable[[], Finding]) -> Finding:
    """What it finds; a host that is ill enough can break a check itself (no /proc), which is a line as well."""
    try:
        return check()
    except Exception as error:
        return failed(f"couldn't be asked: {type(error).__name__}: {error}", "mend what this error names")


def _check_import(package: str, answer: ProbeAnswer, limit_s: float) -> Finding:
    """Whether what is installed can be imported too."""
    name = f"import {package}"
    if answer.is_late:
        problem = f"took longer than {limit_s:g} s: this machine is busy, its disk is slow, or a driver hangs"
        return failed(problem, f"time python -c '{name}' shows how long; --limit_s={2 * limit_s:g} waits longer")
    if answer.problem:
        extra = "[xla]" if package == "torch_xla" else ""
        return failed(answer.problem, f"python -c '{name}' shows all; pip install --force-reinstall '.{extra}'")
    return ok("works")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
