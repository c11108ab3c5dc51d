"""What each check makes of what it finds, where the finding itself can't be had here (a GPU, a chip, a wrong clock)."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from portable_fsdp.doctor import devices, host, network, packages
from portable_fsdp.doctor.finding import Finding, ProbeAnswer, probe_answer
from portable_fsdp.runtime.child import Child
from portable_fsdp.runtime.host import tpu_chips

GPU = {
    **{"torch": "2.9.0", "cuda": "12.8", "driver_cuda": 12090, "problem": "", "nccl": "2.27.5"},
    "devices": ["NVIDIA H100"] * 8,
}
NONE_SEEN = {**GPU, "devices": [], "problem": "forward compatibility was attempted"}
CHIPS = [Path("/dev/accel0"), Path("/dev/accel1")]
WORKERS = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}


def gpu(value: dict[str, Any] | None, files: int, problem: str = "", **environ: str) -> Callable[[], Finding]:
    answer = None if value is None and not problem else ProbeAnswer(value, problem)
    return lambda: devices.check_gpu(answer, files, "570.1", environ)


def nccl(value: dict[str, Any] | None, setting: str = "") -> Callable[[], Finding]:
    environ = {"NCCL_SOCKET_IFNAME": setting} if setting else {}
    answer = None if value is None else ProbeAnswer(value)
    return lambda: devices.check_nccl(answer, ["lo", "eth0"], environ)


def tpu(chips: list[Path], **environ: str) -> Callable[[], Finding]:
    return lambda: devices.check_tpu(chips, environ)


def gloo(hostname: str, several: bool, setting: str = "") -> Callable[[], Finding]:
    environ = {"GLOO_SOCKET_IFNAME": setting} if setting else {}
    return lambda: network.check_gloo(environ, ["lo", "eth0"], hostname, several)


def clocks(value: dict[str, Any] | None) -> Callable[[], Finding]:
    return lambda: network.check_clocks(ProbeAnswer(value, "no answer within 70 s"))


@pytest.mark.parametrize(
    ("check", "state", "text"),
    [
        (gpu(GPU, 8), "ok", "8 x NVIDIA H100; driver 570.1 for CUDA 12.9, torch's is 12.8"),
        (gpu(NONE_SEEN, 0), "ok", "none on this host"),
        (gpu(None, 0), "ok", "none on this host"),
        (gpu(None, 2), "warning", "torch isn't installed"),
        (gpu(None, 2, "no answer within 60 s"), "warning", "no answer within 60 s"),
        (gpu({**NONE_SEEN, "cuda": None}, 2), "failed", "torch 2.9.0 is built without CUDA"),
        (gpu(NONE_SEEN, 2, CUDA_VISIBLE_DEVICES=""), "warning", "CUDA_VISIBLE_DEVICES=''"),
        (gpu({**NONE_SEEN, "driver_cuda": 11080}, 2), "failed", "speaks CUDA 11.8, torch is built for 12.8"),
        (gpu(NONE_SEEN, 2), "failed", "forward compatibility was attempted"),
        (nccl(GPU, "eth"), "ok", "2.27.5"),
        (nccl(GPU, "eth1"), "failed", "names none of lo, eth0"),
        (nccl(GPU, "=eth0"), "ok", "2.27.5"),
        (nccl(GPU, "=eth"), "failed", "names none of"),
        (nccl(GPU, "^lo"), "ok", "2.27.5"),
        (nccl(GPU, "^eth,lo"), "failed", "names none of"),
        (nccl(GPU, "ib,lo"), "ok", "2.27.5"),
        (nccl({**GPU, "nccl": ""}), "failed", "this torch has none"),
        (nccl({**NONE_SEEN, "nccl": ""}), "ok", "only GPUs need it"),
        (nccl(None), "ok", "only GPUs need it"),
        (tpu([]), "ok", "none on this host"),
        (tpu([], PJRT_DEVICE="CPU"), "ok", "none on this host"),
        (tpu([], PJRT_DEVICE="TPU"), "warning", "no chip"),
        (tpu([], **WORKERS), "warning", "TPU_WORKER_HOSTNAMES=a,b, TPU_WORKER_ID=1"),
        (tpu(CHIPS, **WORKERS, TPU_LIBRARY_PATH="/lib/libtpu.so"), "ok", "2 chip(s)"),
        (tpu(CHIPS, **{**WORKERS, "TPU_WORKER_ID": "2"}), "failed", "TPU_WORKER_HOSTNAMES names 2 worker(s)"),
        (tpu(CHIPS, TPU_WORKER_ID="first"), "failed", "is no number"),
        (gloo("localhost", False), "ok", "enough on one host"),
        (gloo("localhost", True), "failed", "which no other host reaches"),
        (gloo("nowhere.invalid", True), "failed", "no address of this host"),
        (gloo("nowhere.invalid", False), "ok", "no address of this host"),
        (gloo("localhost", True, "eth0"), "ok", "interface eth0"),
        (gloo("localhost", False, "lo"), "ok", "interface lo"),
        (gloo("localhost", True, "lo"), "failed", "lo, on several hosts"),
        (gloo("localhost", True, "eth0,ib0"), "failed", "no interface ib0 here"),
        (clocks({"processes": 2, "offsets": {"a": 0.0, "b": 0.01}}), "ok", "all 2 on 2 host(s)"),
        (clocks({"processes": 2, "offsets": {"a": 0.0, "b": -3.0}}), "warning", "by 3.00 s (a +0.0 s, b -3.0 s"),
        (clocks({"processes": 3, "offsets": {"a": 0.0, "b": 40.0, "c": -40.0}}), "failed", "differ by 80.00 s"),
        (clocks({"missing": [2, 3], "hosts": ["a"]}), "failed", "process(es) 2, 3 never came; here are hosts a"),
        (clocks({"problem": "gloo: connection refused"}), "failed", "connection refused"),
        (clocks(None), "failed", "no answer within 70 s"),
        (lambda: packages.check_python((3, 10, 12)), "failed", "3.10.12"),
        (lambda: packages.check_python(sys.version_info[:3]), "ok", ""),
        (partial(host.check_shared_memory, Path("/absent")), "warning", "/absent: No such file"),
    ],
)
def test_findings(check: Callable[[], Finding], state: str, text: str) -> None:
    finding = check()
    assert finding.state == state
    assert text in finding.found
    assert (finding.mend == "") == (state == "ok")


def test_the_mending_names_interfaces_and_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "GLOO_SOCKET_IFNAME=ONE_OF eth0" in gloo("localhost", True)().mend
    monkeypatch.setattr(devices, "installed", lambda _: None)
    assert tpu(CHIPS)()[::2] == ("failed", "pip install '.[tpu]'")


DRIVERS = {
    "535.183.01": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n",
    "570.86.15": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n",
    "": "something else",
}


def test_device_files_and_drivers_are_read(tmp_path: Path) -> None:
    (tmp_path / "vfio").mkdir()
    nvidia = ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-modeset")
    for name in (*nvidia, "accel0", "accel1", "accelerator", "vfio/0", "vfio/vfio", "vfio/devices"):
        (tmp_path / name).touch()
    assert devices.gpu_files(tmp_path) == 3
    assert [path.name for path in tpu_chips(tmp_path)] == ["accel0", "accel1", "0"]
    assert devices.driver_version(tmp_path / "none") == ""
    for version, text in DRIVERS.items():
        (tmp_path / "version").write_text(text)
        assert devices.driver_version(tmp_path / "version") == version


def test_who_holds_a_chip_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip, lock = tmp_path / "accel0", tmp_path / "libtpu_lockfile"
    chip.touch()
    assert devices.check_tpu_is_free([chip], lock).state == "ok"
    program = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(chip)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        finding = devices.check_tpu_is_free([chip], lock)
    assert finding.state == "failed"
    assert f"process {holder.pid} ({sys.executable}" in finding.found
    assert finding.mend.endswith(f"kill {holder.pid}")
    lock.touch()
    assert devices.check_tpu_is_free([chip], lock).mend == f"rm {lock}"
    assert devices.check_tpu_is_free([], lock).state == "ok"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # libtpu's lock lies in /tmp all the same
    assert devices.check_tpu_is_free([chip]) == devices.check_tpu_is_free([chip], devices.LIBTPU_LOCK)


def test_several_hosts() -> None:
    def several(**environ: str) -> bool:
        return network.is_on_several_hosts(environ)

    assert several(WORLD_SIZE="8", LOCAL_WORLD_SIZE="4")
    assert several(SLURM_NNODES="2")
    assert not any((several(), several(WORLD_SIZE="8", LOCAL_WORLD_SIZE="8"), several(SLURM_NNODES="1")))


@pytest.mark.parametrize(
    ("version", "specifiers", "does"),
    [
        ("2.9.0+cu128", (("==", "2.9.0"),), True),
        ("2.9", (("==", "2.9.0"),), True),
        ("2.9.1", (("==", "2.9.0"),), False),
        ("2.13.0", ((">=", "2.9"),), True),
        ("5.23.0", (("<", "6"), (">=", "5.23")), True),
        ("6.0.0", (("<", "6"), (">=", "5.23")), False),
        ("5.4", ((">=", "5.23"),), False),
        ("1.0", (), True),
    ],
)
def test_versions(version: str, specifiers: tuple[tuple[str, str], ...], does: bool) -> None:
    assert packages.fits(version, specifiers) == does


def test_our_own_requirements_are_read() -> None:
    always = {requirement.name: requirement for requirement in packages.requirements(packages.OURS)}
    assert str(always["torch"]) == "torch>=2.9"
    assert always["transformers"].specifiers == (("<", "6"), (">=", "5.23"))
    for extra, names in {"xla": {"jax", "flax", "torch_xla"}, "plan": {"jax", "matplotlib"}}.items():
        assert names <= {requirement.name for requirement in packages.requirements(packages.OURS, extra)}


def test_locked_memory() -> None:
    program = """if True:
        import resource
        from portable_fsdp.doctor.host import check_locked_memory
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        for needed_by in ("InfiniBand (mlx5_0)", ""):
            print(*check_locked_memory(needed_by)[:2])
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    needed, spare = done.stdout.splitlines()
    assert needed.startswith("warning 0 MiB (ulimit -l), beside InfiniBand")
    assert spare.startswith("ok 0 MiB (ulimit -l)")


def test_a_probe_ends_with_its_block(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time\nwhile True:\n    time.sleep(1)\n")
    with Child("endless", environment={"PYTHONPATH": str(tmp_path)}) as child:
        assert child.code is None
        assert probe_answer(child, 0.2) == ProbeAnswer(None, "no answer within 0.2 s", is_late=True)
        assert child.code == -signal.SIGKILL
    with Child("endless", environment={"PYTHONPATH": str(tmp_path)}) as child:
        pass
    assert child.code == -signal.SIGKILL
