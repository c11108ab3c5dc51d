"""What each check makes of what it finds, where the finding itself can't be had here (a GPU, a chip, a wrong clock)."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from portable_fsdp.doctor import devices, host, network, packages
from portable_fsdp.doctor.finding import Finding, ProbeAnswer, probe_answer
from portable_fsdp.runtime.child import Child
from portable_fsdp.runtime.host import tpu_chips

GPU = {
    "torch": "2.9.0",
    "cuda": "12.8",
    "driver_cuda": 12090,
    "devices": ["NVIDIA H100"] * 8,
    "problem": "",
    "nccl": "2.27.5",
}
NONE_SEEN = {**GPU, "devices": [], "problem": "forward compatibility was attempted"}


def states(finding: Finding) -> str:
    assert (finding.mend == "") == (finding.state == "ok")
    return finding.state


@pytest.mark.parametrize(
    ("answer", "files", "environ", "state", "said"),
    [
        (ProbeAnswer(GPU), 8, {}, "ok", "8 x NVIDIA H100; driver 570.1 for CUDA 12.9, torch's is 12.8"),
        (ProbeAnswer(NONE_SEEN), 0, {}, "ok", "none on this host"),
        (None, 0, {}, "ok", "none on this host"),
        (None, 2, {}, "warning", "torch isn't installed"),
        (ProbeAnswer(None, "no answer within 60 s"), 2, {}, "warning", "no answer within 60 s"),
        (ProbeAnswer({**NONE_SEEN, "cuda": None}), 2, {}, "failed", "torch 2.9.0 is built without CUDA"),
        (ProbeAnswer(NONE_SEEN), 2, {"CUDA_VISIBLE_DEVICES": ""}, "warning", "CUDA_VISIBLE_DEVICES=''"),
        (
            ProbeAnswer({**NONE_SEEN, "driver_cuda": 11080}),
            2,
            {},
            "failed",
            "speaks CUDA 11.8, torch is built for 12.8",
        ),
        (ProbeAnswer(NONE_SEEN), 2, {}, "failed", "forward compatibility was attempted"),
    ],
)
def test_gpu(answer: ProbeAnswer | None, files: int, environ: dict[str, str], state: str, said: str) -> None:
    finding = devices.check_gpu(answer, files, "570.1", environ)
    assert states(finding) == state
    assert said in finding.found


def test_gpu_files_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert devices.gpu_files(tmp_path) == 3


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n", "535.183.01"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U16)\n",
            "570.86.15",
        ),
        ("something else", ""),
    ],
)
def test_driver_version(tmp_path: Path, text: str, version: str) -> None:
    (tmp_path / "version").write_text(text)
    assert devices.driver_version(tmp_path / "version") == version
    assert devices.driver_version(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("asked", "is_there"),
    [
        ("eth", True),
        ("eth1", False),
        ("=eth0", True),
        ("=eth", False),
        ("^lo", True),
        ("^eth,lo", False),
        ("ib,lo", True),
    ],
)
def test_nccl_interface(asked: str, is_there: bool) -> None:
    finding = devices.check_nccl(ProbeAnswer(GPU), ["lo", "eth0"], {"NCCL_SOCKET_IFNAME": asked})
    assert states(finding) == ("ok" if is_there else "failed")


def test_nccl_that_is_missing() -> None:
    assert states(devices.check_nccl(ProbeAnswer({**GPU, "nccl": ""}), ["lo"], {})) == "failed"
    assert states(devices.check_nccl(ProbeAnswer({**NONE_SEEN, "nccl": ""}), ["lo"], {})) == "ok"
    assert states(devices.check_nccl(None, ["lo"], {})) == "ok"


CHIPS = [Path("/dev/accel0"), Path("/dev/accel1")]
WORKERS = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b"}


@pytest.mark.parametrize(
    ("chips", "environ", "state", "said"),
    [
        ([], {}, "ok", "none on this host"),
        ([], {"PJRT_DEVICE": "CPU"}, "ok", "none on this host"),
        ([], {"PJRT_DEVICE": "TPU"}, "warning", "no chip"),
        ([], WORKERS, "warning", "TPU_WORKER_HOSTNAMES=a,b, TPU_WORKER_ID=1"),
        (CHIPS, {**WORKERS, "TPU_LIBRARY_PATH": "/lib/libtpu.so"}, "ok", "2 chip(s)"),
        (CHIPS, {**WORKERS, "TPU_WORKER_ID": "2"}, "failed", "TPU_WORKER_HOSTNAMES names 2 worker(s)"),
        (CHIPS, {"TPU_WORKER_ID": "first"}, "failed", "is no number"),
    ],
)
def test_tpu(chips: list[Path], environ: dict[str, str], state: str, said: str) -> None:
    finding = devices.check_tpu(chips, environ)
    assert states(finding) == state
    assert said in finding.found


def test_a_chip_without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "installed", lambda _: None)
    finding = devices.check_tpu(CHIPS, {})
    assert (states(finding), finding.mend) == ("failed", "pip install '.[tpu]'")


def test_chips_are_device_files(tmp_path: Path) -> None:
    (tmp_path / "vfio").mkdir()
    for name in ("accel0", "accel1", "accelerator", "vfio/0", "vfio/vfio", "vfio/devices"):
        (tmp_path / name).touch()
    assert [path.name for path in tpu_chips(tmp_path)] == ["accel0", "accel1", "0"]


def test_who_holds_a_chip_is_named(tmp_path: Path) -> None:
    chip, lock = tmp_path / "accel0", tmp_path / "libtpu_lockfile"
    chip.touch()
    assert states(devices.check_tpu_is_free([chip], lock)) == "ok"
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
    assert states(devices.check_tpu_is_free([], lock)) == "ok"


def test_libtpus_lock_lies_in_tmp_wherever_temporary_files_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chip = tmp_path / "accel0"
    (tmp_path / "libtpu_lockfile").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert devices.check_tpu_is_free([chip]) == devices.check_tpu_is_free([chip], devices.LIBTPU_LOCK)


@pytest.mark.parametrize(
    ("hostname", "several", "state", "said"),
    [
        ("localhost", False, "ok", "enough on one host"),
        ("localhost", True, "failed", "which no other host reaches"),
        ("nowhere.invalid", True, "failed", "no address of this host"),
        ("nowhere.invalid", False, "ok", "no address of this host"),
    ],
)
def test_gloo_without_a_named_interface(hostname: str, several: bool, state: str, said: str) -> None:
    finding = network.check_gloo({}, ["lo", "eth0"], hostname, several)
    assert states(finding) == state
    assert said in finding.found
    assert ("GLOO_SOCKET_IFNAME=ONE_OF eth0" in finding.mend) == (state == "failed")


@pytest.mark.parametrize(
    ("named", "several", "state"),
    [("eth0", True, "ok"), ("lo", False, "ok"), ("lo", True, "failed"), ("eth0,ib0", True, "failed")],
)
def test_gloo_with_a_named_interface(named: str, several: bool, state: str) -> None:
    finding = network.check_gloo({"GLOO_SOCKET_IFNAME": named}, ["lo", "eth0"], "localhost", several)
    assert states(finding) == state


@pytest.mark.parametrize(
    ("environ", "several"),
    [
        ({}, False),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, False),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, True),
        ({"SLURM_NNODES": "2"}, True),
        ({"SLURM_NNODES": "1"}, False),
    ],
)
def test_several_hosts(environ: dict[str, str], several: bool) -> None:
    assert network.is_on_several_hosts(environ) == several


@pytest.mark.parametrize(
    ("value", "state", "said"),
    [
        ({"processes": 2, "offsets": {"a": 0.0, "b": 0.01}}, "ok", "all 2 on 2 host(s)"),
        ({"processes": 2, "offsets": {"a": 0.0, "b": -3.0}}, "warning", "differ by 3.00 s (a +0.0 s, b -3.0 s"),
        ({"processes": 3, "offsets": {"a": 0.0, "b": 40.0, "c": -40.0}}, "failed", "differ by 80.00 s"),
        ({"missing": [2, 3], "hosts": ["a"]}, "failed", "process(es) 2, 3 never came; here are hosts a"),
        ({"problem": "gloo: connection refused"}, "failed", "connection refused"),
        (None, "failed", "no answer within 70 s"),
    ],
)
def test_clocks(value: dict[str, Any] | None, state: str, said: str) -> None:
    finding = network.check_clocks(ProbeAnswer(value, "no answer within 70 s"))
    assert states(finding) == state
    assert said in finding.found


def test_python_that_is_too_old() -> None:
    assert states(packages.check_python((3, 10, 12))) == "failed"
    assert states(packages.check_python(sys.version_info[:3])) == "ok"


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
    always = {wanted.name: wanted for wanted in packages.requirements(packages.OURS)}
    assert str(always["torch"]) == "torch>=2.9"
    assert always["transformers"].specifiers == (("<", "6"), (">=", "5.23"))
    assert {"jax", "flax", "torch_xla"} <= {wanted.name for wanted in packages.requirements(packages.OURS, "xla")}
    assert {"jax", "matplotlib"} <= {wanted.name for wanted in packages.requirements(packages.OURS, "plan")}


@pytest.mark.parametrize(("needed_by", "state"), [("InfiniBand (mlx5_0)", "warning"), ("", "ok")])
def test_locked_memory(needed_by: str, state: str) -> None:
    program = f"""if True:
        import resource
        from portable_fsdp.doctor.host import check_locked_memory
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        limited = check_locked_memory({needed_by!r})
        print(limited.state, limited.found)
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{state} 0 MiB (ulimit -l)")


def test_shared_memory_that_is_not_there(tmp_path: Path) -> None:
    assert states(host.check_shared_memory(tmp_path / "none")) == "warning"


def test_a_probe_ends_with_its_block(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time\nwhile True:\n    time.sleep(1)\n")
    with Child("endless", environment={"PYTHONPATH": str(tmp_path)}) as child:
        assert child.code is None
        assert probe_answer(child, 0.2) == ProbeAnswer(None, "no answer within 0.2 s", is_late=True)
        assert child.code == -signal.SIGKILL
    with Child("endless", environment={"PYTHONPATH": str(tmp_path)}) as child:
        pass
    assert child.code == -signal.SIGKILL
