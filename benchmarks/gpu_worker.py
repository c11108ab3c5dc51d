"""One process of `gpu.py`: runs the job in a file and writes its answer to another. Not started by hand.

    python benchmarks/gpu_worker.py JOB.json ANSWER.json

A job is `{"kind": "checks" | "speed", ...}`. The answer is whole whenever it is there: written beside, then renamed.
"""

import json
import os
import platform
import sys
import traceback
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
import torch.cuda.nccl as nccl
from gpu_checks import Check, run_checks
from gpu_speed import Job, run_job

PACKAGES = ("torch", "transformers", "accelerate", "triton", "numpy", "pydantic", "safetensors")


def environment(device: str) -> dict[str, Any]:
    """Device and versions, as this process sees them."""
    on_cuda = device == "cuda"
    properties = torch.cuda.get_device_properties(0) if on_cuda else None
    return {
        "device": properties.name if properties else "cpu",
        "device_memory_bytes": properties.total_memory if properties else None,
        "compute_capability": f"{properties.major}.{properties.minor}" if properties else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_cuda else None,
        "nccl": ".".join(map(str, cast(Any, nccl).version())) if on_cuda else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in PACKAGES if find_spec(name)},
    }


def write(path: Path, answer: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(answer))
    os.replace(part, path)


def checks(job: dict[str, Any], path: Path) -> None:
    def report(answers: list[Check]) -> None:
        write(path, {"environment": machine, "checks": [answer._asdict() for answer in answers]})

    machine = environment(job["device"])
    run_checks(job["device"], tiny=job["tiny"], seconds=job["seconds"], report=report)


def speed(job: dict[str, Any], path: Path) -> None:
    machine = environment(job["device"])
    try:
        answer = {"status": "finished", **run_job(Job(**job))}
    except torch.OutOfMemoryError as error:
        answer = {"status": "out of memory", "error": str(error).splitlines()[0]}
    except Exception as error:  # of any of three libraries; it is this run's result, and the others go on
        answer = {"status": "failed", "error": "".join(traceback.format_exception(error))[-3000:]}
    write(path, {"environment": machine, "result": answer})


if __name__ == "__main__":
    asked = json.loads(Path(sys.argv[1]).read_text())
    {"checks": checks, "speed": speed}[asked.pop("kind")](asked, Path(sys.argv[2]))
