"""Check this host: `python -m portable_fsdp.doctor` reports what it has, what is wrong, and how to fix it.

Each check returns a `Finding`, or raises an error that `checked` turns into one. Child processes with a timeout open
the engines, so a hanging driver is one line of the report; under a launcher all processes open an engine together, as a
run does. They open no TPU chip. This module imports only the standard library and `runtime`, so it can report missing
packages.
"""

import json
import os
import platform
import signal
import socket
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from portable_fsdp import __version__
from portable_fsdp.runtime.child import Worker, WorkerFailedError
from portable_fsdp.runtime.command import CommandParser, at_least, run_command, to_stderr, to_stdout
from portable_fsdp.runtime.errors import EXIT_FAILED, EXIT_FINISHED, BackendError, PortableFSDPError
from portable_fsdp.runtime.host import installed, pip_install, tpu_chips
from portable_fsdp.runtime.launchers import Launch, detect_launch, problem_of_tpu_worker

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from portable_fsdp.backends.open import Package

DESCRIPTION = """Check this host: what is installed, which devices and engines work, what is wrong, and how to fix it.
Under torchrun all processes open an engine together, to test that the hosts reach each other."""
EXIT_CODES = "exit code: 0 nothing failed (there may be warnings), 1 something failed, 2 usage error"
WIDTH = 120
OURS = "portable-fsdp"
NO_GPU = ("", "-1")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs
SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LIBTPU_LOCK = Path("/tmp/libtpu_lockfile")  # libtpu ignores TMPDIR


class Finding(NamedTuple):
    """Result of a check. `warning`: training works, but something is slow or may fail. `mend`: the fix; empty if ok."""

    state: Literal["ok", "warning", "failed"]
    found: str
    mend: str = ""


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
    findings = {"launcher": checked(lambda: check_launcher(os.environ))}
    launch = detect_launch(os.environ) if findings["launcher"].state == "ok" else None
    engines: dict[str, Callable[[], Finding]] = {}
    gpus, visible = len([*Path("/dev").glob("nvidia[0-9]*")]), os.environ.get("CUDA_VISIBLE_DEVICES")
    with ExitStack() as children:  # child processes open engines during the other checks
        if launch is not None:
            device = "cuda" if gpus and visible not in NO_GPU else "cpu"
            findings["engines"] = checked(partial(start_engines, engines, children, launch, device, limit_s))
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
        "python": lambda: check_python(sys.version_info[:3]),
        "packages": check_packages,
        "extras": check_extras,
        "gpu": lambda: check_gpu(gpus, visible),
        "tpu": lambda: check_tpu(chips, os.environ),
        "tpu in use": lambda: check_tpu_is_free(chips),
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


def checked(check: Callable[[], Finding]) -> Finding:
    """Run a check; turn its errors into a finding."""
    try:
        return check()
    except PortableFSDPError as error:
        problem, _, mend = str(error).partition("\n")
        return Finding("failed", problem, mend.strip() or "fix the cause named here")
    except metadata.PackageNotFoundError as error:
        return Finding("warning", f"{error.name} is not installed: can't compare versions", pip_install())
    except ModuleNotFoundError as error:
        return Finding("failed", f"{error.name} is not installed", pip_install())
    except Exception as error:  # a host without /proc
        return Finding("failed", f"couldn't check: {type(error).__name__}: {error}", "fix the cause of this error")


def check_launcher(environ: Mapping[str, str]) -> Finding:
    launch = detect_launch(environ)
    rank = "" if launch.is_alone else f"; this is process {launch.rank}"
    return Finding("ok", f"started by {launch.description}{rank}")


def requirements(package: str, extra: str = "") -> "list[Requirement]":
    """List an installed package's requirements on this machine: always, or only for `extra` (and extras it names)."""
    from packaging.requirements import Requirement

    required: list[Requirement] = []
    for requirement in map(Requirement, metadata.requires(package) or []):
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if always is (extra == "") and (marker is None or marker.evaluate({"extra": extra})):
            required.append(requirement)
            for inner in requirement.extras if installed(requirement.name) else ():
                required += requirements(requirement.name, inner)
    return required


def unmet(required: "Sequence[Requirement]") -> tuple[list[str], list[str]]:
    """List the missing packages, and those of a wrong version, with the needed one."""
    missing, wrong = dict[str, None](), dict[str, None]()  # ordered sets
    for requirement in required:
        version = installed(requirement.name)
        if version is None:
            missing[requirement.name] = None
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong[f"{requirement.name} {version} (needs {requirement.specifier})"] = None
    return list(missing), list(wrong)


def check_python(version: tuple[int, ...]) -> Finding:
    here = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if version < (3, 11):
        return Finding("failed", here, f"python3.11 -m venv .venv, or newer; then {pip_install()} in it")
    return Finding("ok", here)


def check_packages() -> Finding:
    """Check the packages that every run needs."""
    required = requirements(OURS)
    missing, wrong = unmet(required)
    if missing or wrong:
        return Finding("failed", "; ".join([*(f"{name} missing" for name in missing), *wrong]), pip_install())
    return Finding("ok", ", ".join(f"{requirement.name} {installed(requirement.name)}" for requirement in required))


def check_extras() -> Finding:
    """Check extras. Warn only if all packages of one are there in wrong versions; each engine needs its own torch."""
    states: list[str] = []
    mend = ""
    for extra in metadata.metadata(OURS).get_all("Provides-Extra") or []:
        required = requirements(OURS, extra)
        missing, wrong = unmet(required)
        if not required:
            states.append(f"{extra} not for this machine")
        elif missing:
            states.append(f"{extra} lacks {', '.join(missing)}")
        elif wrong:
            states.append(f"{extra} has {', '.join(wrong)}")
            mend = mend or pip_install(extra)
        else:
            states.append(f"{extra} complete")
    return Finding("warning" if mend else "ok", "; ".join(states), mend)


def check_gpu(files: int, visible: str | None) -> Finding:
    """Check that GPUs are visible; engine checks show if torch can use them. `visible`: CUDA_VISIBLE_DEVICES."""
    if files and visible in NO_GPU:
        return Finding("warning", f"{files}, hidden by CUDA_VISIBLE_DEVICES={visible!r}", "unset CUDA_VISIBLE_DEVICES")
    return Finding("ok", f"{files or 'none'} on this host")


def check_tpu(chips: Sequence[Path], environ: Mapping[str, str]) -> Finding:
    """Check that a host with chips has an engine's package and libtpu, and that its variables are consistent."""
    from portable_fsdp.backends.open import engines_on, spec_of

    if problem := problem_of_tpu_worker(environ):
        return Finding("failed", problem, "unset the TPU_* variables, or set them as the TPU VM does")
    packages = [spec_of(engine).packages["tpu"] for engine in engines_on("tpu")]
    present = {package.name: package for package in packages if installed(package.name)}
    for package in present.values():
        package.check()
    if not chips and (environ.get("PJRT_DEVICE") == "TPU" or any(name.startswith("TPU_") for name in environ)):
        mend = "in a container: --privileged --net=host; elsewhere unset PJRT_DEVICE and TPU_*"
        return Finding("warning", "no chip (/dev/accel*, /dev/vfio/*), although PJRT_DEVICE or TPU_* is set", mend)
    if not chips:
        return Finding("ok", "none on this host")
    libtpu = installed("libtpu") or environ.get("TPU_LIBRARY_PATH")
    if not (present and libtpu):
        absent = "libtpu" if present else "engine"
        return Finding("failed", f"{len(chips)} chip(s), but no {absent}", pip_install("tpu"))
    return Finding("ok", f"{len(chips)} chip(s), {', '.join(present)}, libtpu {libtpu}")


def check_tpu_is_free(chips: Sequence[Path], lock: Path = LIBTPU_LOCK) -> Finding:
    """List processes that hold a chip or libtpu's lock file. A chip serves one process; the doctor never ends one."""
    names = {str(path) for path in [*chips, lock]}
    holders: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) in names for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                holders[int(process.name)] = command.strip()[:80]
        except OSError:  # the process has ended, or is another user's
            continue
    if holders:
        found = "by " + ", ".join(f"process {pid} ({command})" for pid, command in holders.items())
        return Finding("failed", found, f"to end that run, if it is yours: kill {' '.join(map(str, holders))}")
    if chips and lock.exists():
        return Finding("warning", f"a killed run left {lock} behind", f"rm {lock}")
    return Finding("ok", "no")


# ------------------------------------------------------------------------------------------------------------ engines


def start_engines(
    checks: dict[str, Callable[[], Finding]], children: ExitStack, launch: Launch, device: str, limit_s: float
) -> Finding:
    """Start a child for each installed engine. Adds to `checks` the function that waits for it; `children` ends it."""
    from portable_fsdp.backends.open import ENGINES, engine_made_for, spec_of

    states: list[str] = []
    mend = ""
    for engine in ENGINES:
        options = spec_of(engine)
        where = device if device in options.packages else "cpu"
        package = options.packages[where]
        if installed(package.name) is None:
            states.append(f"{engine} lacks {package.name}")
            mend = package.fix if engine == engine_made_for(where) else mend
            continue
        states.append(f"{engine} on {where}")
        if launch.is_alone or options.launcher_counts_devices:  # other engines need one process per host
            worker = children.enter_context(Worker(limit_s))
            worker.begin("portable_fsdp.doctor:open_engine", engine, where, limit_s)
            checks[f"engine {engine}"] = partial(_wait, worker, package, launch, limit_s)
    return Finding("failed" if mend else "ok", "; ".join(states), mend)


def _wait(worker: Worker, package: "Package", launch: Launch, limit_s: float) -> Finding:
    name = package.name
    mend = (
        f"python -c 'import {name}' (on GPUs nvidia-smi) shows more; to reinstall: pip uninstall {name}. {package.fix}"
    )
    if launch.world_size > 1 or any(os.environ.get(name) for name in SOCKETS):
        names = ", ".join(name for _, name in socket.if_nameindex())
        mend = (
            "start the doctor on all hosts at once; MASTER_ADDR and MASTER_PORT must be open between them, and "
            f"{' and '.join(SOCKETS)} unset or an interface (here: {names}) that the other hosts reach; {mend}"
        )
    try:
        return Finding("ok", worker.result())
    except PortableFSDPError as error:
        problem, _, fix = str(error).partition("\n")
        return Finding("failed", problem, f"{' '.join(fix.split())} {mend}".strip())
    except WorkerFailedError as failure:
        ended = failure.ended
    unindented = [line for line in ended.log.splitlines() if line.strip() and not line.startswith(" ")]
    last = unindented[-1][:300] if unindented else "no message"
    if ended.how == "late":
        cause = "a process is missing, " if launch.world_size > 1 else ""
        late = f"not open after {limit_s:g} s ({cause}the machine is busy, or a driver hangs): {last}"
        return Finding("failed", late, f"--limit_s={2 * limit_s:g} waits longer; {mend}")
    return Finding("failed", f"signal {signal.Signals(-ended.code).name}: {last}" if ended.code < 0 else last, mend)


def open_engine(engine: str, device: str, limit_s: float) -> str:
    """Open an engine and close it, in a child process; return what it runs on. Raises PortableFSDPError."""
    try:
        return _open(engine, device, limit_s)
    except PortableFSDPError:
        raise
    except Exception as error:
        message = (str(error).strip() or "(no message)").splitlines()[0]
        raise BackendError(f"{type(error).__name__}: {message}") from None


def _open(engine: str, device: str, limit_s: float) -> str:
    if device == "cuda":
        import torch

        torch.cuda.init()  # raises with the reason; is_available() hides it
    from portable_fsdp.backends.open import count_devices, open_backend
    from portable_fsdp.config.load import make_config

    # The engine logs the missing processes each time this timeout has passed.
    config = make_config(run={"peer_timeout_s": max(5.0, limit_s / 4)})
    with open_backend(config, device=device, backend=engine) as backend:
        answer = f"opens on {count_devices(device)} x {backend.device_name}"
        if backend.process.count > 1:
            hosts = sorted(set(backend.gather(socket.gethostname())))
            answer += f"; {backend.process.count} processes on {len(hosts)} host(s) answer: {', '.join(hosts)}"
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
