"""srun and mpirun of two tasks on this machine: a program that sets the variables that they set."""

from cli import free_port

from portable_fsdp.runtime.tasks import PORTS

TASKS = """
import json, os, subprocess, sys

def values(task):
    return {name: str(value).format(task=task) for name, value in json.loads(os.environ["TASK_VARIABLES"]).items()}

tasks = [subprocess.Popen(sys.argv[1:], env={**os.environ, **values(task)}) for task in range(2)]
sys.exit(max(task.wait() for task in tasks))
"""
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "{task}",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{task}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def srun() -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(free_port() - PORTS[0]),
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_TASKS_PER_NODE": "2",
        "SLURM_PROCID": "{task}",
        "SLURM_LOCALID": "{task}",
    }
