"""srun and mpirun on one machine, for tests: two tasks, with the variables that these launchers set.

`fake_launchers.py srun|mpirun [OPTIONS] COMMAND`; the job's number is $JOB.
"""

import os
import subprocess
import sys

TASKS = 2
JOB = os.environ.get("JOB", "4711")
VARIABLES = {
    "srun": f"SLURM_JOB_ID={JOB} SLURM_JOB_NAME=train SLURM_NNODES=1 SLURM_NTASKS={TASKS} SLURM_STEP_ID=0 "
    f"SLURM_STEP_NODELIST=localhost SLURM_TASKS_PER_NODE={TASKS}(x1) SLURM_PROCID=@ SLURM_NODEID=0 SLURM_LOCALID=@",
    "mpirun": f"OMPI_COMM_WORLD_RANK=@ OMPI_COMM_WORLD_LOCAL_RANK=@ OMPI_COMM_WORLD_SIZE={TASKS} "
    f"OMPI_COMM_WORLD_LOCAL_SIZE={TASKS}",
}
"""The number of the task stands for @."""

if __name__ == "__main__":
    launcher, *command = sys.argv[1:]
    while command[0].startswith("-"):
        command.pop(0)
    tasks: list[subprocess.Popen[bytes]] = []
    for number in range(TASKS):
        variables = dict(word.split("=", 1) for word in VARIABLES[launcher].replace("@", str(number)).split())
        tasks.append(subprocess.Popen(command, env=os.environ | variables))
    sys.exit(max(abs(task.wait()) for task in tasks))
