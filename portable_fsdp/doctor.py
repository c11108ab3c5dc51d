"""What is installed here, which devices are seen, what is wrong, and what mends it: `python -m portable_fsdp.doctor`.

Under a launcher it asks the run's other processes too: who is there, and whether the hosts' clocks agree. Imports no
torch; what needs torch is asked in child processes with a time limit.
"""

import dataclasses
import json
import os
import socket
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from absl import flags

from portable_fsdp.runtime.checks import devices, host, network, packages
from portable_fsdp.runtime.checks.child import Question
from portable_fsdp.runtime.checks.finding import Finding, failed, ok
from portable_fsdp.runtime.chips import tpu_chips
from portable_fsdp.runtime.command import run_command, to_stdout
from portable_fsdp.runtime.errors import EXIT_FAILED, EXIT_FINISHED
from portable_fsdp.runtime.process import Launch
from portable_fsdp.version import __version__

USAGE = """What is installed here, which devices are seen, what is wrong, and the command or setting that mends it.

  python -m portable_fsdp.doctor [--run_dir=FOLDER] [--limit_s=SECONDS] [--json]
  torchrun ... -m portable_fsdp.doctor     asks all hosts: who is there, and whether their clocks agree

  --run_dir  where a run would write: is there room? (default runs)
  --limit_s  how long to wait for torch, a driver, another host (default 60)
  --json     one JSON object

exit code: 0 nothing failed (there may be warnings), 1 something failed, 2 usage error"""

WIDTH = 120
MODULES = "portable_fsdp.runtime.checks"
LEAVE_S = 10.0  # for the child to say who is missing, after it has waited


def _define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("run_dir", "runs", "where a run would write", flag_values=values)
    flags.DEFINE_float("limit_s", 60.0, "seconds to wait for an answer", lower_bound=1.0, flag_values=values)
    flags.DEFINE_boolean("json", False, "one JSON object", flag_values=values)
    return values


def main(argv: list[str]) -> int:
    """Print the report asked for by the arguments after the program's name; returns the exit code."""
    values = _define_flags()

    def report(rest: list[str]) -> int:
        if rest:
            raise flags.Error(f"expected flags alone, found {rest[0]!r}")
        return _report(Path(values.run_dir), values.limit_s, values.json)

    return run_command("doctor", USAGE, values, argv, report)


def _report(run_dir: Path, limit_s: float, as_json: bool) -> int:
    """One report a host: its other processes only answer those that ask who is there."""
    launch, launcher = network.launch_of(os.environ)
    with ExitStack() as asking:  # before the rest, which takes seconds
        several = launch is not None and launch.world_size > 1 and packages.installed("torch") is not None
        others = asking.enter_context(Question(f"{MODULES}.ask_clocks", str(limit_s))) if several else None
        findings: list[Finding] = []
        if launch is None or launch.local_rank == 0:
            findings += _of_this_host(run_dir, limit_s, launch)
            findings.append(launcher)
        if others is not None:
            findings.append(network.check_clocks(others.answer(limit_s + LEAVE_S)))
    if launch is not None and launch.local_rank != 0:
        return EXIT_FINISHED  # another code would end, by its launcher, the process that reports
    code = EXIT_FAILED if any(finding.state == "failed" for finding in findings) else EXIT_FINISHED
    to_stdout(_json(findings, code) if as_json else _text(findings))
    return code


def _of_this_host(run_dir: Path, limit_s: float, launch: Launch | None) -> Iterator[Finding]:
    """`launch`: None where nobody knows."""
    chips = tpu_chips()
    processes = launch.world_size if launch is not None else 1
    environ = {**os.environ, **(launch.variables if launch is not None else {})}
    with ExitStack() as asking:  # both at once
        torch = _asked(asking, "torch", "ask_torch")
        # With PJRT_DEVICE=CPU it takes no chip.
        torch_xla = _asked(asking, "torch_xla", "ask_import", "torch_xla", PJRT_DEVICE="CPU")
        yield from _of_packages(len(chips))
        yield from _of_resources(run_dir, processes, len(chips))
        yield _safely("tpu", lambda: devices.check_tpu(chips, os.environ))
        yield _safely("tpu in use", lambda: devices.check_tpu_is_free(chips))
        yield _safely("gloo", lambda: _gloo(environ))
        yield from _imported(limit_s, torch=torch, torch_xla=torch_xla)
        answer = torch.answer(limit_s) if torch is not None else None
        found = devices.gpu_files(), devices.driver_version()
        yield _safely("gpu", lambda: devices.check_gpu(answer, *found, os.environ))
        yield _safely("nccl", lambda: devices.check_nccl(answer, network.interfaces(), os.environ))


def _asked(asking: ExitStack, package: str, module: str, *arguments: str, **environment: str) -> Question | None:
    """A child process that imports an installed package, on its way; None for one that isn't installed."""
    if packages.installed(package) is None:
        return None
    return asking.enter_context(Question(f"{MODULES}.{module}", *arguments, environment=environment))


def _of_packages(chips: int) -> Iterator[Finding]:
    yield packages.check_python(sys.version_info[:3])
    yield _safely("torch", lambda: packages.check_package("torch"))
    yield _safely("torch_xla", lambda: packages.check_torch_xla(chips))
    yield _safely("transformers", lambda: packages.check_package("transformers"))
    yield _safely("packages", lambda: packages.check_others(shown=("torch", "transformers")))
    yield _safely("extras", packages.check_extras)


def _of_resources(run_dir: Path, processes: int, chips: int) -> Iterator[Finding]:
    yield _safely("shared memory", host.check_shared_memory)
    yield _safely("run folder", lambda: host.check_disk("run folder", run_dir, "set run.dir to another disk's folder"))
    yield _safely("temporary files", host.check_temporary)
    yield _safely("open files", lambda: host.check_open_files(processes))
    yield _safely("locked memory", lambda: host.check_locked_memory(host.memory_registering_hardware(chips)))


def _gloo(environ: Mapping[str, str]) -> Finding:
    several = network.is_on_several_hosts(environ)
    return network.check_gloo(environ, network.interfaces(), socket.gethostname(), several)


def _imported(limit_s: float, **questions: Question | None) -> Iterator[Finding]:
    """Whether what is installed can be imported too."""
    for package, question in questions.items():
        if question is None:
            continue
        answer = question.answer(limit_s)
        if answer.is_late:
            found = f"took longer than {limit_s:g} s: this machine is busy, its disk is slow, or a driver hangs"
            mend = f"time python -c 'import {package}' shows how long; --limit_s={2 * limit_s:g} waits longer"
            yield failed(f"import {package}", found, mend)
        elif answer.problem:
            extra = "[xla]" if package == "torch_xla" else ""
            mend = f"python -c 'import {package}' shows all; pip install --force-reinstall '.{extra}'"
            yield failed(f"import {package}", answer.problem, mend)
        else:
            yield ok(f"import {package}", "works")


def _safely(name: str, check: Callable[[], Finding]) -> Finding:
    """A host that is ill enough can break a check (no /proc, metadata that can't be read): that is a line as well."""
    try:
        return check()
    except Exception as error:
        return failed(name, f"couldn't be asked: {type(error).__name__}: {error}", "mend what this error names")


# ------------------------------------------------------------------------------------------------------- the report


def _text(findings: list[Finding]) -> str:
    lines = [f"portable_fsdp {__version__} on host {socket.gethostname()}"]
    for finding in findings:
        start = f"{finding.state:<8} {finding.name:<16} "
        lines.append(textwrap.fill(finding.found, WIDTH, initial_indent=start, subsequent_indent=" " * 26))
        if finding.mend:
            lines.append(
                textwrap.fill(finding.mend, WIDTH, initial_indent=" " * 26 + "-> ", subsequent_indent=" " * 29)
            )
    counts = {state: sum(finding.state == state for finding in findings) for state in ("ok", "warning", "failed")}
    lines.append(", ".join(f"{number} {state}" for state, number in counts.items()))
    return "\n".join(lines)


def _json(findings: list[Finding], code: int) -> str:
    checks = [dataclasses.asdict(finding) for finding in findings]
    return json.dumps({"host": socket.gethostname(), "version": __version__, "exit_code": code, "checks": checks})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
