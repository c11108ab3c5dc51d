"""The doctor on hosts that lack something: a process of its own each, with the packages, limits and mounts of one."""

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from portable_fsdp.doctor import __main__ as doctor
from portable_fsdp.doctor.finding import WIDTH
from portable_fsdp.runtime.process import LAUNCH_VARIABLES

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


def install(site: Path, name: str, version: str, source: str = "", requires: tuple[str, ...] = ()) -> None:
    """A package as pip leaves it: metadata, and a module."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = "".join(f"Requires-Dist: {line}\n" for line in requires)
    (info / "METADATA").write_text(METADATA.format(name=name, version=version) + lines)
    if source:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text(source)


def environment(site: Path | None, **variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    return {**clean, "PYTHONPATH": str(site or ROOT), **variables}


def examine(
    *arguments: str, site: Path | None, command: list[str] = COMMAND, **variables: str
) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code, and the lines by name."""
    whole = [*command, "--json", *arguments]
    done = subprocess.run(
        whole, env=environment(site, **variables), cwd=site, capture_output=True, text=True, timeout=200
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return done.returncode, by_name(report)


def by_name(report: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    lines = {line["name"]: line for line in report["checks"]}
    for line in lines.values():
        assert (line["mend"] == "") == (line["state"] == "ok"), line
    return lines


def test_without_torch(site: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, lines = examine(site=site)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert code == 1
    assert lines["torch"] == {"name": "torch", "state": "failed", "found": "not installed", "mend": "pip install '.'"}
    assert lines["torch_xla"]["state"] == "ok"
    assert "import torch" not in lines
    assert after.ru_utime - before.ru_utime < 1


@pytest.mark.parametrize(
    ("source", "text", "mend"),
    [
        (
            "raise ImportError('libcudart.so.12: cannot open shared object file')",
            "libcudart.so.12",
            "--force-reinstall",
        ),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "signal SIGSEGV", "--force-reinstall"),
        pytest.param(
            "import time\ntime.sleep(1000)",
            "took longer than 3 s: this machine is busy",
            "time python -c 'import torch' shows how long; --limit_s=6 waits longer",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["raises", "crashes", "hangs"],
)
def test_torch_that_cannot_be_imported(site: Path, source: str, text: str, mend: str) -> None:
    install(site, "torch", "2.9.0", source)
    code, lines = examine("--limit_s=3", site=site)
    assert code == 1
    assert lines["torch"]["state"] == "ok"
    assert lines["import torch"]["state"] == "failed"
    assert text in lines["import torch"]["found"]
    assert mend in lines["import torch"]["mend"]
    assert lines["gpu"]["state"] in ("ok", "warning")


def test_versions_that_do_not_fit(site: Path) -> None:
    needs = ("torch>=2.9", "transformers<6,>=5.23", "numpy>=1.26", 'jax==0.7.1; extra == "xla"')
    install(site, "portable-fsdp", "0.1.0", requires=needs)
    install(site, "torch", "2.8.1+cu128", "raise ImportError")
    install(site, "torch_xla", "2.9.0", "raise ImportError")
    install(site, "transformers", "6.0.0")
    install(site, "jax", "0.9.2")
    code, lines = examine(site=site)
    assert code == 1
    assert lines["torch"]["found"] == "torch 2.8.1+cu128 (expected torch>=2.9)"
    assert lines["transformers"]["found"] == "transformers 6.0.0 (expected transformers<6,>=5.23)"
    assert lines["packages"]["found"] == "numpy missing"
    assert lines["torch_xla"]["found"] == "2.9.0, built for another torch than 2.8.1+cu128"
    assert lines["torch_xla"]["mend"] == "pip install '.[xla]'"
    assert lines["extras"]["state"] == "warning"
    assert "xla: jax 0.9.2 (expected jax==0.7.1)" in lines["extras"]["found"]


def test_torch_xla_and_torch_tpu_cannot_share(site: Path) -> None:
    install(site, "torch_xla", "2.9.0", "raise ImportError")
    install(site, "torch_tpu", "0.2.0")
    _, lines = examine(site=site)
    assert lines["torch_xla"]["state"] == "failed"
    assert "beside torch_tpu 0.2.0" in lines["torch_xla"]["found"]


def test_beside_torch_tpu_no_extra_with_torch_xla_is_advised(site: Path) -> None:
    """jax, which plans need, may be there for other reasons."""
    needs = ("torch>=2.9", 'jax==0.7.1; extra == "xla"', 'torch_tpu==0.2.0; extra == "torchtpu"')
    install(site, "portable-fsdp", "0.1.0", requires=needs)
    install(site, "torch", "2.13.0", "raise ImportError")
    install(site, "torch_tpu", "0.2.0")
    install(site, "jax", "0.9.2")
    _, lines = examine(site=site)
    assert lines["extras"]["state"] == "ok"
    others = ", ".join(f"{extra} not for this environment" for extra in ("xla", "tpu"))
    assert lines["extras"]["found"] == f"{others}, torchtpu complete, plan not for this environment"
    assert "[xla]" not in json.dumps(lines)


@pytest.mark.parametrize(("limit", "state"), [(100, "failed"), (512, "warning"), (1024, "ok")])
def test_open_files(site: Path, limit: int, state: str) -> None:
    command = ["bash", "-c", f'ulimit -n {limit} && exec "$@"', "bash", *COMMAND]
    _, lines = examine(site=site, command=command)
    assert lines["open files"]["state"] == state
    assert lines["open files"]["found"].startswith(f"{limit} (ulimit -n)")
    assert ("ulimit -n 1024, after raising nofile" in lines["open files"]["mend"]) == (state != "ok")


def test_open_files_of_a_large_run(site: Path) -> None:
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "512", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    command = ["bash", "-c", 'ulimit -S -n 1024 && exec "$@"', "bash", *COMMAND]
    _, lines = examine(site=site, command=command, **launched)
    assert lines["launcher"]["found"].endswith("512 process(es); this is process 0")
    assert lines["open files"]["state"] == "warning"


MOUNT = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'  # as docker does
UNSHARED = ["unshare", "--mount", "--propagation=private", "sh", "-c", MOUNT, "sh"]


def test_little_shared_memory(site: Path) -> None:
    code, lines = examine(site=site, command=[*UNSHARED, *COMMAND])
    assert code == 1  # of torch, which isn't there
    assert lines["shared memory"]["state"] == "warning"
    assert "0.06 GiB free" in lines["shared memory"]["found"]
    assert "--shm-size" in lines["shared memory"]["mend"]


def test_folders_variables_and_interfaces_that_are_wrong(site: Path, tmp_path: Path) -> None:
    sockets: dict[str, Any] = {"GLOO_SOCKET_IFNAME": "ib7", "NCCL_SOCKET_IFNAME": "=ib7"}
    _, lines = examine("--run_dir=/proc/runs", site=site, TMPDIR="/nowhere", RANK="1", **sockets)
    expected = {
        "run folder": "/proc: can't be written to",
        "temporary files": "TMPDIR=/nowhere is no folder",
        "gloo": "GLOO_SOCKET_IFNAME=ib7: no interface ib7 here",
        "nccl": "NCCL_SOCKET_IFNAME==ib7 names none of ",
        "launcher": "RANK=1 without",
    }
    for name, text in expected.items():
        assert lines[name]["state"] == "failed"
        assert text in lines[name]["found"]
    assert "run.dir" in lines["run folder"]["mend"]
    (tmp_path / "file").touch()
    _, lines = examine(f"--run_dir={tmp_path / 'file' / 'run'}", site=site)
    assert lines["run folder"]["found"] == f"{tmp_path / 'file'} is a file"


def test_no_programs_on_path(site: Path) -> None:
    _, lines = examine(site=site, PATH="")
    assert {name for name, line in lines.items() if line["state"] == "failed"} == {"torch", "transformers"}


def test_the_report_in_words(site: Path) -> None:
    done = subprocess.run(COMMAND, env=environment(site), cwd=site, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"on host {socket.gethostname()}")
    at = next(number for number, line in enumerate(lines) if line.split()[:2] == ["failed", "torch"])
    assert lines[at + 1].strip() == "-> pip install '.'"
    assert lines[-1].endswith("2 failed")
    assert all(len(line) <= WIDTH for line in lines)


@pytest.mark.parametrize(("argument", "code"), [("--jason", 2), ("--limit_s=0", 2), ("host", 2), ("--help", 0)])
def test_usage(argument: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([argument]) == code
    printed = capsys.readouterr()
    if code:
        assert "usage: python -m portable_fsdp.doctor" in printed.err
    else:
        assert "exit code: 0 nothing failed" in printed.out


@pytest.mark.slow
def test_processes_of_a_launch_meet_in_this_environment() -> None:
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "-m", "portable_fsdp.doctor"]
    code, lines = examine(site=None, command=command, OMP_NUM_THREADS="1")
    assert lines["torch"]["found"] == metadata.version("torch")
    assert lines["import torch"]["state"] == lines["packages"]["state"] == "ok"
    assert lines["launcher"]["found"].startswith("started by torchrun: 2 process(es)")
    assert lines["other processes"]["state"] == "ok", lines["other processes"]
    assert lines["other processes"]["found"].startswith("all 2 on 1 host(s) answer; clocks differ by 0.")
    assert code == int(any(line["state"] == "failed" for line in lines.values()))


@pytest.mark.slow
def test_a_process_that_never_comes_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    launched = {"LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "portable_fsdp.doctor", "--limit_s=20", "--json"]
    second = subprocess.Popen([*command], env=environment(None, **launched, RANK="2"), stdout=subprocess.PIPE)
    try:
        code, lines = examine("--limit_s=20", site=None, command=command[:3], **launched, RANK="0")
    finally:
        out, _ = second.communicate(timeout=100)
    assert code == second.returncode == 1
    for line in (lines["other processes"], by_name(json.loads(out))["other processes"]):
        assert line["state"] == "failed"
        assert line["found"].startswith("process(es) 1 never came")
