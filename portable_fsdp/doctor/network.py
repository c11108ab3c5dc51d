"""Between hosts: the launcher's variables, the interface that gloo takes, and clocks (by the probe `processes`)."""

import socket
from collections.abc import Mapping, Sequence

from portable_fsdp.doctor.finding import Finding, ProbeAnswer, failed, ok, warning
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.process import Launch, detect_launch

LARGE_SKEW_S = 1.0  # saves by minutes and the times in events.jsonl are those of process 0
TOO_LARGE_SKEW_S = 60.0  # object stores refuse signatures, and locks on shared disks age wrongly


def launch_of(environ: Mapping[str, str]) -> tuple[Launch | None, Finding]:
    """Who started this process; None where its variables contradict each other."""
    try:
        launch = detect_launch(environ)
    except ConfigError as error:
        problem, _, mend = str(error).partition("\n")
        return None, failed(problem, mend.strip() or "unset that variable")
    rank = "" if launch.is_alone else f"; this is process {launch.rank}"
    return launch, ok(f"started by {launch.description}{rank}")


def is_on_several_hosts(environ: Mapping[str, str]) -> bool:
    """As far as the launcher's variables say it."""
    total, local = environ.get("WORLD_SIZE", "1"), environ.get("LOCAL_WORLD_SIZE", "")
    if total.isdecimal() and local.isdecimal():
        return int(total) > int(local)
    return environ.get("SLURM_NNODES", "1") != "1"


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def own_address(hostname: str) -> str | None:
    """What gloo takes where no interface is named: the first address of the host's name that a socket can have.

    None where there is none; gloo then takes the loopback address.
    """
    try:
        addresses = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return str(address[0])
    return None


def check_gloo(environ: Mapping[str, str], names: Sequence[str], hostname: str, several: bool) -> Finding:
    """`names`: interfaces of this host; `several`: the run has more than one host."""
    chosen = [name for name in environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    mend = f"export GLOO_SOCKET_IFNAME=ONE_OF {' '.join(name for name in names if name != 'lo')} (the others reach it)"
    missing = [name for name in chosen if name not in names]
    if missing:
        return failed(f"GLOO_SOCKET_IFNAME={','.join(chosen)}: no interface {', '.join(missing)} here", mend)
    if chosen == ["lo"] and several:
        return failed("GLOO_SOCKET_IFNAME=lo, on several hosts", mend)
    if chosen:
        return ok(f"interface {', '.join(chosen)} (GLOO_SOCKET_IFNAME)")
    address = own_address(hostname)
    resolved = f"host name {hostname} is {address or 'no address of this host: gloo takes loopback'}"
    if address is not None and not (address.startswith("127.") or address == "::1"):
        return ok(resolved)
    if several:
        return failed(f"{resolved}, which no other host reaches", mend)
    return ok(f"{resolved}: enough on one host; on several set GLOO_SOCKET_IFNAME")


def check_clocks(answer: ProbeAnswer) -> Finding:
    """`answer`: of the probe `processes`, the same for every process."""
    if answer.value is None:
        mend = "start the doctor on all hosts at once; MASTER_ADDR and MASTER_PORT must be reached from each"
        return failed(answer.problem, mend)
    if "missing" in answer.value:
        missing, here = (", ".join(map(str, answer.value[key])) for key in ("missing", "hosts"))
        problem = f"process(es) {missing} never came; here are hosts {here or 'none'}"
        return failed(problem, "start it on the other hosts too, and read what it prints there")
    if "problem" in answer.value:
        return failed(answer.value["problem"], "export GLOO_SOCKET_IFNAME=INTERFACE; open ports between hosts")
    offsets: dict[str, float] = answer.value["offsets"]
    skew = max(offsets.values()) - min(offsets.values())
    summary = f"all {answer.value['processes']} on {len(offsets)} host(s) answer; clocks differ by {skew:.2f} s"
    if skew <= LARGE_SKEW_S:
        return ok(summary)
    each = ", ".join(f"{host} {offset:+.1f} s" for host, offset in offsets.items())
    make = failed if skew > TOO_LARGE_SKEW_S else warning
    return make(f"{summary} ({each} against process 0)", "chronyc makestep, or timedatectl set-ntp true, on those")
