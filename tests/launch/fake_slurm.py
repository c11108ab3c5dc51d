"""Slurm on one machine, for tests: sbatch, srun and scontrol that refuse options that they don't know.

sbatch waits for its job, unlike the real one. Its nodes are $NODES names of this machine, with a task on each; the
job's number is $JOB. In the folder $CLOUD lie `batch.pid`, the process that `--signal=B:...` means, and `requeued`.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

CLOUD = Path(os.environ["CLOUD"])
NODES = int(os.environ.get("NODES", "2"))
JOB = os.environ.get("JOB", "4711")
# slurm.schedmd.com/sbatch.html, srun.html: those that the template may want
SBATCH = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "requeue"),
    *("open-mode", "output", "error", "partition", "account", "qos", "mem", "exclusive", "constraint"),
}
SRUN = {"kill-on-bad-exit", "nodes", "ntasks-per-node", "label", "wait", "cpu-bind", "export"}


def options(words: list[str], known: set[str]) -> list[str]:
    """The words after the options, all of which are known."""
    while words and words[0].startswith("--"):
        name = words.pop(0).removeprefix("--").partition("=")[0]
        if name not in known:
            sys.exit(f"{os.environ['FAKE']}: unrecognized option '--{name}'")
    return words


def sbatch(words: list[str]) -> int:
    script, *arguments = options(words, SBATCH)
    text = Path(script).read_text()
    options(re.findall(r"^#SBATCH (.*)", text, re.MULTILINE), SBATCH)
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


def srun(words: list[str]) -> int:
    command = options(words, SRUN)
    tasks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, forward)
    for node in range(NODES):
        ours = {"STEP_ID": "0", "NTASKS": str(NODES), "PROCID": str(node), "LOCALID": "0", "NODEID": str(node)}
        ours["TASKS_PER_NODE"] = f"1(x{NODES})"
        environment = {**os.environ, **{f"SLURM_{name}": value for name, value in ours.items()}}
        tasks.append(subprocess.Popen(command, env=environment))
    return max(abs(task.wait()) for task in tasks)


def scontrol(words: list[str]) -> int:
    if words == ["requeue", JOB]:
        (CLOUD / "requeued").touch()
    elif words[:2] == ["show", "hostnames"]:
        print("\n".join(["localhost", *(f"node{number}" for number in range(1, NODES))][:NODES]))
    else:
        sys.exit(f"scontrol: invalid keyword: {words}")
    return 0


if __name__ == "__main__":
    name = os.environ["FAKE"]
    with Path(os.environ["RECORD"]).open("a") as record:
        record.write(json.dumps([name, *sys.argv[1:]]) + "\n")
    sys.exit({"sbatch": sbatch, "srun": srun, "scontrol": scontrol}[name](sys.argv[1:]))
