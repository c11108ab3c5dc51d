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

import packaging
import pytest

from portable_fsdp.doctor import __main__ as doctor
from portable_fsdp.runtime.launchers import LAUNCH_VARIABLES

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


def test_without_packages(site: Path) -> None:
    """The doctor itself needs none, and imports no torch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, lines = examine(site=site)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert code == 1
    missing = {"name": "packages", "state": "failed", "found": "packaging is not installed", "mend": "pip install '.'"}
    assert lines["packages"] == missing
    assert lines["extras"]["state"] == "warning"
    assert lines["engines"]["state"] == "failed"
    assert lines["engines"]["found"].endswith("is not installed")
    assert after.ru_utime - before.ru_utime < 1


NEEDS = (
    *(
        "torch>=2.9",
        "transformers<6,>=5.23",
        "numpy>=1.26",
        "jax==0.7.1; extra == 'xla'",
        "torch==2.9.0; extra == 'xla'",
    ),
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
    _, lines = examine(site=site)
    assert (lines["packages"]["found"], lines["extras"]["found"]) == (packages, extras)
    is_wrong = case == "wrong"
    assert lines["packages"]["state"] == ("failed" if is_wrong else "ok")
    assert (lines["extras"]["state"], lines["extras"]["mend"]) == (
        ("warning", "pip install '.[xla]'") if is_wrong else ("ok", "")
    )


@pytest.mark.parametrize(("limit", "state"), [(100, "failed"), (512, "warning"), (1024, "ok")])
def test_open_files(site: Path, limit: int, state: str) -> None:
    command = ["bash", "-c", f'ulimit -n {limit} && exec "$@"', "bash", *COMMAND]
    _, lines = examine(site=site, command=command)
    assert lines["open files"]["state"] == state
    assert lines["open files"]["found"].startswith(f"{limit} (ulimit -n)")
    assert ("ulimit -n 1024, after raising nofile" in lines["open files"]["mend"]) == (state != "ok")


MOUNT = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'  # as docker does
UNSHARED = ["unshare", "--mount", "--propagation=private", "sh", "-c", MOUNT, "sh"]


def test_little_shared_memory(site: Path) -> None:
    code, lines = examine(site=site, command=[*UNSHARED, *COMMAND])
    assert code == 1  # of packages, which aren't there
    assert lines["shared memory"]["state"] == "warning"
    assert "0.06 GiB free" in lines["shared memory"]["found"]
    assert "--shm-size" in lines["shared memory"]["mend"]


def test_folders_and_variables_that_are_wrong(site: Path, tmp_path: Path) -> None:
    _, lines = examine("--run_dir=/proc/runs", site=site, RANK="1")
    assert {lines[name]["state"] for name in ("run folder", "launcher")} == {"failed"}
    assert "/proc: can't be written to" in lines["run folder"]["found"]
    assert "run.dir" in lines["run folder"]["mend"]
    assert "RANK=1 without" in lines["launcher"]["found"]
    (tmp_path / "file").touch()
    _, lines = examine(f"--run_dir={tmp_path / 'file' / 'run'}", site=site)
    assert lines["run folder"]["found"] == f"{tmp_path / 'file'}: can't be written to: Not a directory"


def test_no_programs_on_path(site: Path) -> None:
    _, lines = examine(site=site, PATH="")
    assert {name for name, line in lines.items() if line["state"] == "failed"} == {"packages", "engines", "tpu"}


def test_the_report_in_words(site: Path) -> None:
    done = subprocess.run(COMMAND, env=environment(site), cwd=site, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"on host {socket.gethostname()}")
    at = next(number for number, line in enumerate(lines) if line.split()[:2] == ["failed", "packages"])
    assert lines[at + 1].strip() == "-> pip install '.'"
    assert lines[-1].endswith("3 failed")
    assert all(len(line) <= 120 for line in lines)


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
    assert f"torch {metadata.version('torch')}" in lines["packages"]["found"]
    assert lines["packages"]["state"] == "ok"
    assert lines["launcher"]["found"].startswith("started by torchrun: 2 process(es)")
    host = socket.gethostname()
    answer = {"state": "ok", "found": f"opens on 1 x cpu; 2 processes on 1 host(s) answer: {host}", "mend": ""}
    assert lines["engine native"] == {"name": "engine native", **answer}
    assert code == int(any(line["state"] == "failed" for line in lines.values()))
