"""Slurm and Open MPI on one machine, for tests: sbatch, srun, scontrol and mpirun that refuse options they don't know.

The first argument is the name of the program. sbatch waits for its job, unlike the real one. Its nodes are $NODES names
of this machine, with $TASKS tasks on each; the job's number is $JOB. In the folder $CLOUD lie `batch.pid`, the process
that `--signal=B:...` means, and `requeued`; $RECORD gets a line for each call.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

CLOUD = Path(os.environ.get("CLOUD", "."))
NODES, TASKS = int(os.environ.get("NODES", "2")), int(os.environ.get("TASKS", "1"))
JOB = os.environ.get("JOB", "4711")
# slurm.schedmd.com/sbatch.html, srun.html: those that the template may want
SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "requeue"),
    *("open-mode", "output", "error", "partition", "account", "qos", "mem", "exclusive", "constraint"),
}
SRUN = {"kill-on-bad-exit", "nodes", "ntasks-per-node", "label", "wait", "cpu-bind", "export"}


def options(program: str, words: list[str], known: set[str]) -> list[str]:
    """The words after the options, all of which are known."""
    while words and words[0].startswith("--"):
        name = words.pop(0).removeprefix("--").partition("=")[0]
        if name not in known:
            sys.exit(f"{program}: unrecognized option '--{name}'")
    return words


def sbatch(words: list[str]) -> int:
    script, *arguments = options("sbatch", words, SBATCH)
    text = Path(script).read_text()
    options("sbatch", re.findall(r"^#SBATCH (.*)", text, re.MULTILINE), SBATCH)
    spooled = CLOUD / "slurm_script"  # the job runs a copy, which has no neighbours
    spooled.write_text(text)
    job = {"SLURM_JOB_ID": JOB, "SLURM_JOB_NAME": "train", "SLURM_JOB_NODELIST": "nodes", "SLURM_NNODES": str(NODES)}
    for attempt in range(10):
        (CLOUD / "requeued").unlink(missing_ok=True)
        environment = {**os.environ, **job, **({"SLURM_RESTART_COUNT": str(attempt)} if attempt else {})}
        process = subprocess.Popen(["bash", spooled, *arguments], env=environment)
        (CLOUD / "batch.pid").write_text(str(process.pid))
        code = process.wait()
        if not (CLOUD / "requeued").exists():
            return code
    return 1


def run_tasks(command: list[str], variables: dict[str, str]) -> int:
    """A process for each task; in the values, {task} stands for its number, {node} for its node's, {local} for its
    number there. SIGTERM and SIGUSR1 reach all of them."""
    tasks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, forward)
    for task in range(NODES * TASKS):
        place = {"task": task, "node": task // TASKS, "local": task % TASKS}
        values = {name: value.format(**place) for name, value in variables.items()}
        tasks.append(subprocess.Popen(command, env={**os.environ, **values}))
    return max(abs(task.wait()) for task in tasks)


def srun(words: list[str]) -> int:
    variables = {
        **{"JOB_ID": JOB, "JOB_NAME": "train", "NNODES": str(NODES), "NTASKS": str(NODES * TASKS)},
        **{"STEP_ID": "0", "STEP_NODELIST": "localhost", "TASKS_PER_NODE": f"{TASKS}(x{NODES})"},
        **{"PROCID": "{task}", "NODEID": "{node}", "LOCALID": "{local}"},
    }
    return run_tasks(options("srun", words, SRUN), {f"SLURM_{name}": value for name, value in variables.items()})


def mpirun(words: list[str]) -> int:
    variables = {"RANK": "{task}", "LOCAL_RANK": "{local}", "SIZE": str(NODES * TASKS), "LOCAL_SIZE": str(TASKS)}
    return run_tasks(options("mpirun", words, set()), {f"OMPI_COMM_WORLD_{n}": value for n, value in variables.items()})


def scontrol(words: list[str]) -> int:
    if words == ["requeue", JOB]:
        (CLOUD / "requeued").touch()
    elif words[:2] == ["show", "hostnames"]:
        print("\n".join(["localhost", *(f"node{number}" for number in range(1, NODES))][:NODES]))
    else:
        sys.exit(f"scontrol: invalid keyword: {words}")
    return 0


if __name__ == "__main__":
    if "RECORD" in os.environ:
        with Path(os.environ["RECORD"]).open("a") as record:
            record.write(json.dumps(sys.argv[1:]) + "\n")
    programs = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "mpirun": mpirun}
    sys.exit(programs[sys.argv[1]](sys.argv[2:]))
