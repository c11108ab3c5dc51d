"""Run by a Python with torch_xla: xla writes a checkpoint, reads those of others, and leaves what it held as files.

    python travel.py FOLDER_TO_WRITE OUT NAME=FOLDER ...

OUT/xla.safetensors is the state that xla saved, OUT/NAME.safetensors what it holds after loading FOLDER.
"""

import sys
from pathlib import Path

import jobs
from cases import Case, assemble
from safetensors.torch import save_file
from workers import Group, Workers

TRAVELS = Case(model="llama_tied", steps=8)
AT = 4


def main(folder: str, out: str, *others: str) -> None:
    workers = Workers(Group("xla", 3))
    try:
        states = {"xla": workers.run(jobs.write, case=TRAVELS, folder=folder, at=AT)}
        answers = workers.run(jobs.read, case=TRAVELS, folders=dict(other.split("=", 1) for other in others), at=AT)
        states |= {name: [answer[name] for answer in answers] for name in answers[0] if name != "compilations"}
    finally:
        workers.close()
    for name, state in states.items():
        whole = assemble([answer["state"] for answer in state])
        save_file({key: tensor.contiguous() for key, tensor in whole.items()}, Path(out) / f"{name}.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
