"""Checks whose cause can't be had here (a GPU, a chip), and what a child makes of an engine."""

import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from portable_fsdp.backends.open import spec_of
from portable_fsdp.doctor import checks
from portable_fsdp.doctor.checks import Finding, checked
from portable_fsdp.runtime.child import Child
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.host import tpu_chips
from portable_fsdp.runtime.launchers import Launch

CHIPS = [Path("/dev/accel0"), Path("/dev/accel1")]
WORKERS = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}


def tpu(chips: list[Path], **environ: str) -> Callable[[], Finding]:
    return lambda: checks.check_tpu(chips, environ)


def raises(error: Exception) -> Callable[[], Finding]:
    def check() -> Finding:
        raise error

    return check


@pytest.mark.parametrize(
    ("check", "state", "text"),
    [
        (lambda: checks.check_gpu(0, ""), "ok", "none on this host"),
        (lambda: checks.check_gpu(8, None), "ok", "8 on this host"),
        (lambda: checks.check_gpu(8, "0,1"), "ok", "8 on this host"),
        (lambda: checks.check_gpu(2, ""), "warning", "CUDA_VISIBLE_DEVICES=''"),
        (tpu([]), "ok", "none on this host"),
        (tpu([], PJRT_DEVICE="CPU"), "ok", "none on this host"),
        (tpu([], PJRT_DEVICE="TPU"), "warning", "no chip"),
        (tpu([], **WORKERS), "warning", "no chip"),
        (tpu(CHIPS, **WORKERS, TPU_LIBRARY_PATH="/lib/libtpu.so"), "ok", "2 chip(s), torch_xla, libtpu"),
        (tpu(CHIPS, **{**WORKERS, "TPU_WORKER_ID": "2"}), "failed", "TPU_WORKER_HOSTNAMES names 2 worker(s)"),
        (tpu(CHIPS, TPU_WORKER_ID="first"), "failed", "is no number"),
        (lambda: checks.check_python((3, 10, 12)), "failed", "3.10.12"),
        (lambda: checks.check_python(sys.version_info[:3]), "ok", ""),
        (lambda: checks.check_locked_memory([]), "ok", ""),
        (partial(checks.check_shared_memory, Path("/absent")), "failed", "No such file or directory: '/absent'"),
        (raises(BackendError("no chip.\n  Buy one.")), "failed", "no chip."),
        (raises(ZeroDivisionError("x")), "failed", "ZeroDivisionError: x"),
    ],
)
def test_findings(check: Callable[[], Finding], state: str, text: str) -> None:
    finding = checked(check)
    assert finding.state == state
    assert text in finding.found
    assert (finding.mend == "") == (state == "ok")


def test_a_chip_without_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "installed", lambda _: None)
    assert tpu(CHIPS)() == ("failed", "2 chip(s), and no engine", "pip install '.[tpu]'")


def test_device_files_of_chips(tmp_path: Path) -> None:
    (tmp_path / "vfio").mkdir()
    for name in ("accel0", "accel1", "accelerator", "vfio/0", "vfio/vfio", "vfio/devices"):
        (tmp_path / name).touch()
    assert [path.name for path in tpu_chips(tmp_path)] == ["accel0", "accel1", "0"]


def test_who_holds_a_chip_is_named(tmp_path: Path) -> None:
    chip, lock = tmp_path / "accel0", tmp_path / "libtpu_lockfile"
    chip.touch()
    assert checks.check_tpu_is_free([chip], lock).state == "ok"
    program = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(chip)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        finding = checks.check_tpu_is_free([chip], lock)
    assert finding.state == "failed"
    assert f"process {holder.pid} ({sys.executable}" in finding.found
    assert finding.mend.endswith(f"kill {holder.pid}")
    lock.touch()
    assert checks.check_tpu_is_free([chip], lock).mend == f"rm {lock}"
    assert checks.check_tpu_is_free([], lock).state == "ok"


def test_our_own_requirements_are_read() -> None:
    always = {requirement.name: requirement for requirement in checks.requirements(checks.OURS)}
    assert str(always["torch"]) == "torch>=2.9"
    assert always["transformers"].specifier == "<6,>=5.23"
    for extra, names in {"xla": {"jax", "flax", "torch_xla"}, "plan": {"jax", "matplotlib", "libtpu"}}.items():
        of_extra = {requirement.name for requirement in checks.requirements(checks.OURS, extra)}
        assert names <= of_extra
        assert not {"pydantic", "transformers"} & of_extra


def test_locked_memory() -> None:
    program = """if True:
        import resource
        from portable_fsdp.doctor.checks import check_locked_memory
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        for needed_by in (["mlx5_0"], []):
            print(*check_locked_memory(needed_by)[:2])
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["warning 0 MiB (ulimit -l), beside mlx5_0", "ok 0 MiB (ulimit -l)"]


def native(limit_s: float, **environ: str) -> Child:
    return Child("portable_fsdp.doctor.checks", "native", "cpu", str(limit_s), environment=environ)


def finding(child: Child, limit_s: float, count: int = 1) -> Finding:
    launch = Launch("variables", world_size=count)
    return checks._wait(child, spec_of("native").packages["cpu"], launch, limit_s)


@pytest.mark.parametrize(
    ("source", "limit_s", "text"),
    [
        ("raise ImportError('libcudart.so.12: cannot open\\nmore')", 60, "ImportError: libcudart.so.12: cannot open"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", 60, "signal SIGSEGV"),
        ("import os, sys\nos.write(2, b'a\\nb: lost\\n  note')\nos._exit(1)", 60, "b: lost"),
        ("import time\ntime.sleep(1000)", 0.5, "not open after 0.5 s"),
    ],
    ids=["raises", "crashes", "exits", "hangs"],
)
def test_a_torch_that_breaks_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, limit_s: float, text: str
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with native(limit_s) as child:
        broken = finding(child, limit_s)
    assert broken.state == "failed"
    assert broken.found.startswith(text)
    assert "more" not in broken.found
    assert "python -c 'import torch'" in broken.mend
    assert broken.mend.startswith("--limit_s=1 waits longer") == (limit_s == 0.5)


@pytest.mark.slow
def test_an_interface_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    with native(60) as child:
        wrong = finding(child, 60)
    assert wrong.state == "failed"
    assert "ib7" in wrong.found
    assert "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME unset or an interface (here: lo" in wrong.mend


@pytest.mark.slow
def test_a_process_that_never_comes_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        free_port = free.getsockname()[1]
    meeting = {"LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port)}
    late = waiting = Finding("ok", "")
    for limit_s in (20, 60):  # the second only where a busy machine hasn't imported torch by then
        with native(limit_s, **meeting, RANK="0") as first, native(limit_s, **meeting, RANK="2") as third:
            late, waiting = finding(first, limit_s, 3), finding(third, limit_s, 3)
        if "waiting" in late.found:
            break
    assert late.state == waiting.state == "failed"
    assert "a process is missing" in late.found
    assert "waiting for process 1, which did not join" in late.found
    assert "MASTER_ADDR and MASTER_PORT must be open" in waiting.mend
