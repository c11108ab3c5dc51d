"""How long `portable_fsdp.report` takes for a long run, and how large its page is.

python benchmarks/report_time.py [STEPS]   adds a row to results/report_time.md; 100,000 steps without a number.
"""

import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from invented_run import write_run

RESULTS = Path(__file__).parent / "results/report_time.md"
HEAD = """# Reports of long runs

`python benchmarks/report_time.py` writes the files of an invented run with rows like those of a trainer's, and times
the command from start to end, imports included.

| date | machine | steps | metrics.jsonl | wall | processor | report.html |
|---|---|---|---|---|---|---|
"""


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = write_run(Path(folder, "run"), steps)
        began, before = time.perf_counter(), os.times()
        subprocess.run([sys.executable, "-m", "portable_fsdp.report", str(run)], check=True)
        wall, after = time.perf_counter() - began, os.times()
        processor = after.children_user - before.children_user + after.children_system - before.children_system
        sizes = [(run / name).stat().st_size / 1e6 for name in ("metrics.jsonl", "report.html")]
    day, machine = datetime.now(UTC).date(), f"{os.cpu_count()} cores, no GPU"
    times = f"{wall:.1f} s | {processor:.1f} s"
    row = f"| {day} | {machine} | {steps:,} | {sizes[0]:.0f} MB | {times} | {sizes[1]:.1f} MB |\n"
    RESULTS.write_text((RESULTS.read_text() if RESULTS.exists() else HEAD) + row, encoding="utf-8")
    print(row, end="")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
