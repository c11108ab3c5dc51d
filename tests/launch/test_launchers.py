"""Runs of two processes under launchers that are not torchrun: fakes that set what they set."""

import json
import re
import sys
from pathlib import Path

import pytest
from cli import PROGRAMS, PYTHON, committed, free_port, launch, losses, started, tiny_config
from fake_launchers import MPIRUN, TASKS, srun

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("launcher", ["srun", pytest.param("mpirun", marks=pytest.mark.proof)])
def test_a_run_of_two_tasks(launcher: str, tmp_path: Path) -> None:
    variables = srun() if launcher == "srun" else {**MPIRUN, "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", TASKS, *PYTHON, "--device=cpu", f"--config={tiny_config(tmp_path)}"]
    with started(command, tmp_path, TASK_VARIABLES=json.dumps(variables)) as run:
        code = run.wait()
    assert code == 0, run.err
    assert run.err.count(f"started by {launcher}: 2 process(es), 2 of them on this host\n") == 1, run.err
    assert "Traceback" not in run.err
    assert committed(tmp_path / "run") == [4, 6]
    alone = tmp_path / "alone"
    assert launch("--device=cpu", f"--config={tiny_config(tmp_path)}", f"run.dir={alone}") == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(alone), rel=1e-5)


LOOP = """
import sys
from portable_fsdp import load_config, open_backend
with open_backend(load_config(sys.argv[1]), device="cpu") as engine:
    print(f"process {engine.process.index} of {engine.process.count}")
"""


@pytest.mark.proof
def test_a_loop_of_ones_own_under_srun(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TASKS, sys.executable, "-c", LOOP, tiny_config(tmp_path)]
    with started(command, tmp_path, TASK_VARIABLES=json.dumps(srun())) as run:
        assert run.wait() == 0, run.err
    lines = re.findall(r"process \d of 2", run.out)  # two that write at once may share a line
    assert sorted(lines) == ["process 0 of 2", "process 1 of 2"]


def test_tasks_whose_variables_contradict_each_other_end_before_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TASKS, *PYTHON, "--device=cpu", f"--config={tiny_config(tmp_path)}"]
    with started(command, tmp_path, TASK_VARIABLES=json.dumps({**srun(), "WORLD_SIZE": "4"})) as run:
        code = run.wait()
    assert code == 2
    assert "two launchers: WORLD_SIZE=4, but by srun's variables it is 2" in run.err
    assert not (tmp_path / "run").exists()


@pytest.mark.proof
def test_the_doctor_asks_all_tasks(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TASKS, sys.executable, "-m", "portable_fsdp.doctor", f"--run_dir={tmp_path}"]
    with started(command, tmp_path, TASK_VARIABLES=json.dumps(srun())) as run:
        run.wait()
    assert run.out.count("on host") == 1
    assert "srun: 2 process(es), 2 of them on this host; this is process 0\n" in run.out
    assert "all 2 on 1 host(s) answer; clocks differ by 0." in run.out


def test_torchrun_with_a_number_of_hosts_that_changes_is_refused(tmp_path: Path) -> None:
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-conf=last_call_timeout=1"]
    command = [str(PROGRAMS / "torchrun"), "--nnodes=1:2", *meeting, "-m", "portable_fsdp.launch"]
    with started([*command, "--device=cpu", f"--config={tiny_config(tmp_path)}"], tmp_path) as run:
        assert run.wait() == 1
    assert "expected a fixed number of hosts, found --nnodes=1:2" in run.err
    assert "exitcode  : 2" in run.err
    assert not (tmp_path / "run").exists()
