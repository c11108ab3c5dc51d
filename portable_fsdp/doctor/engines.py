"""Open each engine in a child process; under a launcher all processes open one together, as a run does.

The child: `python -m portable_fsdp.doctor.engines PARENT ENGINE DEVICE LIMIT_S`. It opens no TPU chip.
"""

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from portable_fsdp.doctor.checks import Finding, installed
from portable_fsdp.runtime.child import Child
from portable_fsdp.runtime.errors import PortableFSDPError
from portable_fsdp.runtime.launchers import Launch
from portable_fsdp.runtime.signals import end_with_parent

if TYPE_CHECKING:
    from portable_fsdp.backends.open import Package

ANSWER = "engine: "  # begins the child's answer; libraries print to stdout too
SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def start_engines(
    checks: dict[str, Callable[[], Finding]], children: ExitStack, launch: Launch, device: str, limit_s: float
) -> Finding:
    """Start a child for each installed engine. Adds to `checks` what waits for it; `children` ends it."""
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
        if launch.is_alone or options.launcher_counts_devices:  # the others are for one process a host
            child = children.enter_context(Child("portable_fsdp.doctor.engines", engine, where, str(limit_s)))
            checks[f"engine {engine}"] = partial(_wait, child, package, launch, limit_s)
    return Finding("failed" if mend else "ok", "; ".join(states), mend)


def _wait(child: Child, package: "Package", launch: Launch, limit_s: float) -> Finding:
    ended = child.wait(limit_s)
    _, has_answered, answer = ended.output.rpartition(ANSWER)
    if ended.how == "finished" and has_answered:
        return Finding("ok", answer.strip())
    unindented = [line for line in ended.log.splitlines() if line.strip() and not line.startswith(" ")]
    last = unindented[-1][:300] if unindented else "no message"
    name = package.name
    mend = (
        f"python -c 'import {name}' (on GPUs nvidia-smi) shows more; to reinstall: pip uninstall {name}. {package.fix}"
    )
    if launch.world_size > 1 or any(os.environ.get(name) for name in SOCKETS):
        names = ", ".join(name for _, name in socket.if_nameindex())
        mend = (
            "start the doctor on all hosts at once; MASTER_ADDR and MASTER_PORT must be open between them, and "
            f"{' and '.join(SOCKETS)} unset or an interface (here: {names}) that the others reach; {mend}"
        )
    if ended.how == "late":
        cause = "a process is missing, " if launch.world_size > 1 else ""
        late = f"not open after {limit_s:g} s ({cause}the machine is busy, or a driver hangs): {last}"
        return Finding("failed", late, f"--limit_s={2 * limit_s:g} waits longer; {mend}")
    if ended.code < 0:
        return Finding("failed", f"signal {signal.Signals(-ended.code).name}: {last}", mend)
    problem, _, way_out = (answer.strip() if has_answered else last).partition("\n")
    return Finding("failed", problem, f"{' '.join(way_out.split())} {mend}".strip())


def main(argv: list[str]) -> int:
    parent, engine, device, limit_s = argv
    end_with_parent(int(parent))
    try:
        answer, code = _open(engine, device, float(limit_s)), 0
    except PortableFSDPError as error:
        answer, code = str(error), 1
    except Exception as error:
        answer, code = f"{type(error).__name__}: {(str(error).strip() or '(no message)').splitlines()[0]}", 1
    print(f"\n{ANSWER}{answer}", flush=True)
    return code


def _open(engine: str, device: str, limit_s: float) -> str:
    if device == "cuda":
        import torch

        torch.cuda.init()  # raises with the reason; is_available() hides it
    from portable_fsdp.backends.open import count_devices, open_backend
    from portable_fsdp.config.load import make_config

    # The engine logs who is missing each time this has passed.
    config = make_config(run={"peer_timeout_s": max(5.0, limit_s / 4)})
    with open_backend(config, device=device, backend=engine) as backend:
        answer = f"opens on {count_devices(device)} x {backend.device_name}"
        if backend.process.count > 1:
            hosts = sorted(set(backend.gather(socket.gethostname())))
            answer += f"; {backend.process.count} processes on {len(hosts)} host(s) answer: {', '.join(hosts)}"
    return answer


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
