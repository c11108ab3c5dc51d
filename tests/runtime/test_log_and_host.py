"""The log of a run on stderr, and what a host has, from a kernel's files that are written here."""

import logging
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from portable_fsdp.config.load import load_config
from portable_fsdp.runtime.command import LogLines
from portable_fsdp.runtime.errors import ConfigError, without_passwords
from portable_fsdp.runtime.host import host_identity, host_memory_bytes
from portable_fsdp.train.build import saved_config

LOG = """
import logging
from portable_fsdp.runtime.command import configure_log
logging.getLogger().addHandler(logging.StreamHandler())  # as absl does
configure_log(3)  # replaced by the next call
for index in (0, 2):
    configure_log(index)
    log = logging.getLogger("portable_fsdp")
    log.debug("detail")
    log.info("step: 1")
    log.getChild("train").warning("50 % slower")
"""


def test_process_0_logs_once_and_plainly_and_the_others_only_warn() -> None:
    done = subprocess.run([sys.executable, "-c", LOG], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "step: 1\n50 % slower\n[process 2] 50 % slower\n")


ADDRESSES = {
    "s3://user:secret@bucket/run": "s3://(hidden)@bucket/run",
    "got 'https://secret@host:5000/x', 502": "got 'https://(hidden)@host:5000/x', 502",
    "HTTPS_PROXY=http://user:se@cret@proxy:3128/": "HTTPS_PROXY=http://(hidden)@proxy:3128/",
    "https://host/x?X-Amz-Signature=secret&part=1": "https://host/x?X-Amz-Signature=(hidden)&part=1",
    's3://user:secret@b: invalid name "user:secret@b"': 's3://(hidden)@b: invalid name "(hidden)@b"',
    "org/name@main of https://hub.co/a@b, 12:30, me@here": "org/name@main of https://hub.co/a@b, 12:30, me@here",
    "no address: user:name@host": "no address: user:name@host",
}


def test_no_password_of_an_address_is_printed_or_saved() -> None:
    """Messages, log lines, and the config of a checkpoint, which travels."""
    for text, shown in ADDRESSES.items():
        assert without_passwords(text) == str(ConfigError(text)) == shown
        line = logging.LogRecord("portable_fsdp", logging.INFO, "", 1, "%s", (text,), None)
        assert LogLines().format(line) == shown
    address = "s3://user:secret@bucket/step-00000004"
    quickstart = Path(__file__).parents[2] / "configs/quickstart.yaml"
    saved = saved_config(load_config(quickstart, [f"checkpoint.resume={address}"]))
    assert saved["checkpoint"]["resume"] == without_passwords(address)


GIB = 2**30
V2, V1 = "0::/slice/job\n", "3:cpu,memory:/slice/job\n1:name=systemd:/slice\n"
CASES: dict[str, tuple[str | None, dict[str, str], int]] = {
    "no cgroup": (None, {}, 32),
    "no limit": (V2, {"slice/job/memory.max": "max\n"}, 32),
    "of this process": (V2, {"slice/job/memory.max": f"{4 * GIB}\n", "slice/memory.max": "max\n"}, 4),
    "of one above": (V2, {"slice/job/memory.max": "max\n", "slice/memory.max": f"{3 * GIB}\n"}, 3),
    "of a container, whose root is its own": ("0::/\n", {"memory.max": f"{5 * GIB}\n"}, 5),
    "seen from a container": ("0::/../job\n", {"memory.max": f"{5 * GIB}\n"}, 5),
    "more than the host has": (V2, {"slice/job/memory.max": f"{99 * GIB}\n"}, 32),
    "version 1": (V1, {"memory/slice/job/memory.limit_in_bytes": f"{6 * GIB}\n"}, 6),
    "version 1, no limit": (V1, {"memory/slice/job/memory.limit_in_bytes": "9223372036854771712\n"}, 32),
}


@pytest.mark.parametrize("name", CASES)
def test_a_host_has_what_its_cgroups_leave(tmp_path: Path, name: str) -> None:
    cgroup, limits, expected_gib = CASES[name]
    (tmp_path / "proc/self").mkdir(parents=True)
    if cgroup is not None:
        (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for file, text in limits.items():
        path = tmp_path / "sys/fs/cgroup" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for swap_gib in (0, 2):
        kib = {"MemTotal": 32 * 2**20, "MemFree": 2**20, "SwapTotal": swap_gib * 2**20}
        (tmp_path / "proc/meminfo").write_text("".join(f"{key}: {value} kB\n" for key, value in kib.items()))
        assert host_memory_bytes(tmp_path) == (expected_gib + swap_gib) * GIB


def test_this_host_is_one_and_without_a_kernels_files_it_has_what_psutil_says(tmp_path: Path) -> None:
    assert host_memory_bytes(tmp_path) == psutil.virtual_memory().total
    assert host_identity() == host_identity()
    assert host_identity()[0]
    assert 2**28 < host_memory_bytes() < 2**50
