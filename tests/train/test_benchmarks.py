"""The benchmarks start and write what they say; nothing here is timed."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_loop_overhead_writes_its_table(tmp_path: Path) -> None:
    out = tmp_path / "loop_overhead.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    finished = subprocess.run(
        [*torchrun, str(ROOT / "benchmarks" / "loop_overhead.py"), "--pairs=2", f"--out={out}"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert finished.returncode == 0, finished.stderr
    result = json.loads(out.read_text())
    assert result["pairs"] == 2
    assert result["config"]["processes"] == 2
    assert 3.5e6 < result["config"]["parameters"] < 4.5e6
    ratio = result["ratio"]
    assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert "ratio " in finished.stdout
