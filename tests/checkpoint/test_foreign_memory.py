"""Conversions hold one tensor: anonymous memory grows by the largest one and a constant, whatever the model's size."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from memory import RETURN_FREED_MEMORY

pytestmark = pytest.mark.slow

MIB = 2**20
COUNT, ROWS = 3, 12 * MIB  # three tensors of 48 MiB: two are more than the bound
LARGEST = 4 * ROWS
SLACK = 32 * MIB

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from memory import Peak
from torch.distributed import checkpoint as dcp
from portable_fsdp.formats.base import ExportOptions
from portable_fsdp.formats.exporting import export_checkpoint
from portable_fsdp.formats.importing import import_checkpoint

COUNT, ROWS, source, format, folder = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
folder = Path(folder)
torch.set_num_threads(1)


def write_source(path, count, rows):
    from safetensors.torch import save_file

    if source == "huggingface":
        path.mkdir()
        path = path / "model.safetensors"
    tensors = {f"layers.{i}.weight": torch.randn(rows) for i in range(count)}
    if source == "dcp":
        dcp.save({"model": tensors}, checkpoint_id=path, no_dist=True)
    else:
        torch.save(tensors, path) if source == "torch" else save_file(tensors, path)


def both_ways(name, count, rows):
    write_source(folder / f"{name}.source", count, rows)
    with Peak() as importing:
        path = import_checkpoint(folder / f"{name}.source", folder / name, source, trust_metadata=True)
    with Peak() as exporting:
        options = ExportOptions(dtype=None if format == "dcp" else "bfloat16")
        export_checkpoint(path, format, folder / f"{name}.out", options)
    return [importing.grown, exporting.grown]


both_ways("warm", 2, 10)  # what libraries take when they are imported
print(json.dumps(both_ways("large", COUNT, ROWS)))
"""


PROOFS = [pytest.param(*pair, marks=pytest.mark.proof) for pair in (("dcp", "dcp"), ("torch", "safetensors"))]


@pytest.mark.parametrize(("source", "kind"), [("huggingface", "safetensors"), *PROOFS])
def test_one_tensor_is_held_at_a_time(tmp_path: Path, source: str, kind: str) -> None:
    program = [sys.executable, "-c", PROGRAM, str(COUNT), str(ROWS), source, kind, str(tmp_path)]
    folders = [Path(__file__).parents[2], Path(__file__).parent]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), **RETURN_FREED_MEMORY}
    done = subprocess.run(program, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    importing, exporting = json.loads(done.stdout)
    assert LARGEST / 2 < importing < LARGEST + SLACK, importing / MIB
    assert LARGEST / 2 < exporting < LARGEST + SLACK, exporting / MIB
