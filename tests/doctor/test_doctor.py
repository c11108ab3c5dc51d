"""The doctor on hosts that lack something: a process of its own each, with the packages, limits and mounts of one."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path

import packaging
import pytest

from portable_fsdp import doctor
from portable_fsdp.backends.open import spec_of
from portable_fsdp.doctor import Finding, checked
from portable_fsdp.runtime.child import Worker
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.host import tpu_chips
from portable_fsdp.runtime.launchers import LAUNCH_VARIABLES, Launch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-S", "-m", "portable_fsdp.doctor"]  # -S: what is installed is what a test puts there
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Installed packages: ours without metadata, and nothing else."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "portable_fsdp").symlink_to(ROOT / "portable_fsdp")  # the checkout itself may hold an .egg-info
    return folder


def install(site: Path, name: str, version: str, requires: tuple[str, ...] = (), extras: tuple[str, ...] = ()) -> None:
    """The metadata of a package, as pip leaves it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = [f"Requires-Dist: {line}\n" for line in requires] + [f"Provides-Extra: {extra}\n" for extra in extras]
    (info / "METADATA").write_text(METADATA.format(name=name, version=version) + "".join(lines))


def environment(site: Path | None, **variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    return {**clean, "PYTHONPATH": str(site or ROOT), **variables}


def examine(site: Path | None, command: list[str] = COMMAND, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the lines by name."""
    env = environment(site, **variables)
    done = subprocess.run([*command, "--json"], env=env, cwd=site, capture_output=True, text=True, timeout=200)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    for line in report["checks"]:
        assert (line["mend"] == "") == (line["state"] == "ok"), line
    return done.returncode, {line["name"]: line for line in report["checks"]}


def test_without_packages(site: Path) -> None:
    """The doctor itself needs none, and imports no torch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, lines = examine(site)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert code == 1
    packages = {"state": "failed", "found": "packaging is not installed", "mend": "pip install 'portable-fsdp'"}
    assert lines["packages"] == {"name": "packages", **packages}
    assert lines["extras"]["state"] == "warning"
    assert lines["engines"]["state"] == "failed"
    assert lines["engines"]["found"].endswith("is not installed")
    assert after.ru_utime - before.ru_utime < 1


NEEDS = (
    *("torch>=2.9", "transformers<6,>=5.23", "numpy>=1.26", "jax==0.7.1; extra == 'xla'"),
    "torch==2.9.0; extra == 'xla'",
    *("portable-fsdp[xla]; extra == 'plan'", "torch_tpu==0.2.0; extra == 'torchtpu'", "tqdm; extra == 'mac'"),
    *("tqdm; extra == 'mac' and platform_system == 'Darwin'", "tqdm; platform_system == 'Darwin'"),
)
EXTRAS = ("xla", "plan", "torchtpu", "mac", "none")
OF_XLA = "jax 0.9.2 (needs ==0.7.1), torch 2.8.1+cu128 (needs ==2.9.0)"
LACKING = "torchtpu lacks torch_tpu; mac lacks tqdm; none not for this machine"
VERSIONS = {
    "wrong": (
        {"torch": "2.8.1+cu128", "transformers": "6.0.0", "jax": "0.9.2"},
        "numpy missing; torch 2.8.1+cu128 (needs >=2.9); transformers 6.0.0 (needs <6,>=5.23)",
        f"xla has {OF_XLA}; plan has {OF_XLA}; {LACKING}",
    ),
    "pre-releases, and builds for one CUDA": (
        {"torch": "2.9.0+cu128", "transformers": "5.24.0rc1", "numpy": "2", "jax": "0.7.1"},
        "torch 2.9.0+cu128, transformers 5.24.0rc1, numpy 2",
        f"xla complete; plan complete; {LACKING}",
    ),
    # Of an extra with torch_xla pip would replace TorchTPU's torch. jax may be there for other reasons.
    "torch_tpu": (
        {"torch": "2.13.0", "transformers": "5.24", "numpy": "2", "torch_tpu": "0.2.0", "jax": "0.9.2"},
        "torch 2.13.0, transformers 5.24, numpy 2",
        "xla lacks torch_xla; plan lacks torch_xla; torchtpu complete; mac lacks tqdm; none not for this machine",
    ),
}


@pytest.mark.parametrize("case", VERSIONS)
def test_versions(site: Path, case: str) -> None:
    versions, packages, extras = VERSIONS[case]
    (site / "packaging").symlink_to(Path(packaging.__file__).parent)
    more = ("torch_xla==2.9.0; extra == 'xla'",) * ("torch_tpu" in versions)
    install(site, "portable-fsdp", "0.1.0", (*NEEDS, *more), EXTRAS)
    for name, version in versions.items():
        install(site, name, version)
    _, lines = examine(site)
    assert (lines["packages"]["found"], lines["extras"]["found"]) == (packages, extras)
    wrong = ("failed", "warning", "pip install 'portable-fsdp[xla]'")
    states = (lines["packages"]["state"], lines["extras"]["state"], lines["extras"]["mend"])
    assert states == (wrong if case == "wrong" else ("ok", "ok", ""))


def test_the_report_in_words(site: Path) -> None:
    """The launcher's variables are wrong too."""
    variables = environment(site, RANK="1")
    done = subprocess.run(COMMAND, env=variables, cwd=site, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"on host {socket.gethostname()}")
    assert lines[1].startswith("failed   launcher         environment: expected all or none of")
    assert "found RANK=1 without" in " ".join(done.stdout.split())
    at = next(number for number, line in enumerate(lines) if line.split()[:2] == ["failed", "packages"])
    assert lines[at + 1].strip() == "-> pip install 'portable-fsdp'"
    assert lines[-1].endswith("3 failed")
    assert all(len(line) <= 120 for line in lines)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert [doctor.main([argument]) for argument in ("--jason", "--limit_s=0", "host", "--help")] == [2, 2, 2, 0]
    printed = capsys.readouterr()
    assert printed.err.count("usage: python -m portable_fsdp.doctor") == 3
    assert "exit code: 0 nothing failed" in printed.out


def test_processes_of_a_launch_meet_in_this_environment() -> None:
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "-m", "portable_fsdp.doctor"]
    code, lines = examine(None, command, OMP_NUM_THREADS="1")
    assert f"torch {metadata.version('torch')}" in lines["packages"]["found"]
    assert lines["packages"]["state"] == "ok"
    assert lines["launcher"]["found"].startswith("started by torchrun: 2 process(es)")
    host = socket.gethostname()
    answer = {"state": "ok", "found": f"opens on 1 x cpu; 2 processes on 1 host(s) answer: {host}", "mend": ""}
    assert lines["engine native"] == {"name": "engine native", **answer}
    assert code == int(any(line["state"] == "failed" for line in lines.values()))


# Causes that can't be had here (a GPU, a chip).
CHIPS = [Path("/dev/accel0"), Path("/dev/accel1")]
WORKERS = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}


def tpu(chips: list[Path], **environ: str) -> Callable[[], Finding]:
    return lambda: doctor.check_tpu(chips, environ)


def raises(error: Exception) -> Callable[[], Finding]:
    def check() -> Finding:
        raise error

    return check


FINDINGS: list[tuple[Callable[[], Finding], str, str]] = [
    (lambda: doctor.check_gpu(0, ""), "ok", "none on this host"),
    (lambda: doctor.check_gpu(8, None), "ok", "8 on this host"),
    (lambda: doctor.check_gpu(8, "0,1"), "ok", "8 on this host"),
    (lambda: doctor.check_gpu(2, ""), "warning", "CUDA_VISIBLE_DEVICES=''"),
    (tpu([]), "ok", "none on this host"),
    (tpu([], PJRT_DEVICE="CPU"), "ok", "none on this host"),
    (tpu([], PJRT_DEVICE="TPU"), "warning", "no chip"),
    (tpu([], **WORKERS), "warning", "no chip"),
    (tpu(CHIPS, **WORKERS, TPU_LIBRARY_PATH="/lib/libtpu.so"), "ok", "2 chip(s), torch_xla, libtpu"),
    (tpu(CHIPS, **{**WORKERS, "TPU_WORKER_ID": "2"}), "failed", "TPU_WORKER_HOSTNAMES names 2 worker(s)"),
    (tpu(CHIPS, TPU_WORKER_ID="first"), "failed", "is not a number"),
    (lambda: doctor.check_python((3, 10, 12)), "failed", "3.10.12"),
    (lambda: doctor.check_python(sys.version_info[:3]), "ok", ""),
    (raises(BackendError("no chip.\n  Buy one.")), "failed", "no chip."),
    (raises(ZeroDivisionError("x")), "failed", "ZeroDivisionError: x"),
]


def test_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for check, state, text in FINDINGS:
        finding = checked(check)
        assert (finding.state, finding.mend == "") == (state, state == "ok"), finding
        assert text in finding.found
    monkeypatch.setattr(doctor, "installed", lambda _: None)
    assert tpu(CHIPS)() == ("failed", "2 chip(s), but no engine", "pip install '.[tpu]'")
    (tmp_path / "vfio").mkdir()
    for name in ("accel0", "accel1", "accelerator", "vfio/0", "vfio/vfio", "vfio/devices"):
        (tmp_path / name).touch()
    assert [path.name for path in tpu_chips(tmp_path)] == ["accel0", "accel1", "0"]


def test_who_holds_a_chip_is_named(tmp_path: Path) -> None:
    chip, lock = tmp_path / "accel0", tmp_path / "libtpu_lockfile"
    chip.touch()
    assert doctor.check_tpu_is_free([chip], lock).state == "ok"
    program = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    command, pipe = [sys.executable, "-c", program, str(chip)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        finding = doctor.check_tpu_is_free([chip], lock)
    assert finding.state == "failed"
    assert f"process {holder.pid} ({sys.executable}" in finding.found
    assert finding.mend.endswith(f"kill {holder.pid}")
    lock.touch()
    assert doctor.check_tpu_is_free([chip], lock).mend == f"rm {lock}"
    assert doctor.check_tpu_is_free([], lock).state == "ok"


def began(limit_s: float) -> Worker:
    """A process that opens the engine native."""
    worker = Worker(limit_s)
    worker.begin("portable_fsdp.doctor:open_engine", "native", "cpu", limit_s)
    return worker


def finding(worker: Worker, limit_s: float, count: int = 1) -> Finding:
    return doctor._wait(worker, spec_of("native").packages["cpu"], Launch("variables", world_size=count), limit_s)


BROKEN = {
    "ImportError: libcudart.so.12: cannot open": "raise ImportError('libcudart.so.12: cannot open\\nmore')",
    "signal SIGSEGV": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
    "b: lost": "import os, sys\nos.write(2, b'a\\nb: lost\\n  note')\nos._exit(1)",
    "not open after 0.5 s": "import time\ntime.sleep(1000)",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_torch_that_breaks_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    source, limit_s = BROKEN[text], 0.5 if "0.5" in text else 60
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with began(limit_s) as worker:
        broken = finding(worker, limit_s)
    assert broken.state == "failed"
    assert broken.found.startswith(text)
    assert "more" not in broken.found
    assert "python -c 'import torch'" in broken.mend
    assert broken.mend.startswith("--limit_s=1 waits longer") == (limit_s == 0.5)


def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    with began(60) as worker:
        wrong = finding(worker, 60)
    assert (wrong.state, "ib7" in wrong.found) == ("failed", True), wrong
    assert "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME unset or an interface (here: lo" in wrong.mend


@pytest.mark.proof
def test_a_process_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        free_port = free.getsockname()[1]
    meeting = {"LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    for name, value in meeting.items():
        monkeypatch.setenv(name, value)
    late = waiting = Finding("ok", "")
    for limit_s in (20, 60):  # the second only where a busy machine hasn't imported torch by then
        with ExitStack() as workers:
            opened: list[Worker] = []
            for rank in ("0", "2"):
                monkeypatch.setenv("RANK", rank)
                opened.append(workers.enter_context(began(limit_s)))
            late, waiting = (finding(worker, limit_s, 3) for worker in opened)
        if "waiting" in late.found:
            break
    assert late.state == waiting.state == "failed"
    assert "a process is missing" in late.found
    assert "waiting for process 1, which did not join" in late.found
    assert "MASTER_ADDR and MASTER_PORT must be open" in waiting.mend
