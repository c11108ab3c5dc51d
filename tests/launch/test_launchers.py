"""Runs of two processes under launchers that are not torchrun: fakes that set what they set."""

import re
import sys
from pathlib import Path

import pytest
from cli import FAKE_LAUNCHERS, committed, finish, require_curve, tiny_config, two_tasks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("launcher", ["srun", pytest.param("mpirun", marks=pytest.mark.proof)])
def test_a_run_of_two_tasks(launcher: str, tmp_path: Path) -> None:
    arguments = ["--device=cpu", f"--config={tiny_config(tmp_path)}"]
    start = [*FAKE_LAUNCHERS, launcher, sys.executable, "-m", "portable_fsdp.launch"]
    run = finish([*start, *arguments], tmp_path, **two_tasks(launcher))
    assert run.err.count(f"started by {launcher}: 2 process(es), 2 of them on this host\n") == 1, run.err
    assert committed(tmp_path / "run") == [4, 6]
    require_curve(tmp_path, *arguments, rel=1e-5)


LOOP = """
import sys
from portable_fsdp import load_config, open_backend
with open_backend(load_config(sys.argv[1]), device="cpu") as engine:
    print(f"process {engine.process.index} of {engine.process.count}")
"""


@pytest.mark.proof
def test_a_loop_of_ones_own_under_srun(tmp_path: Path) -> None:
    srun = [*FAKE_LAUNCHERS, "srun", sys.executable]
    loop = finish([*srun, "-c", LOOP, tiny_config(tmp_path)], tmp_path, **two_tasks("srun"))
    lines = re.findall(r"process \d of 2", loop.out)  # two that write at once may share a line
    assert sorted(lines) == ["process 0 of 2", "process 1 of 2"]
