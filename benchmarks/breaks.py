"""Does the suite see mistakes? Makes each break of breaks.yaml in turn, and runs the tests for it.

python benchmarks/breaks.py [NUMBER ...]   writes results/breaks.md: which break was seen, by which test. Half an hour.

The breaks are made in a copy of the committed tree.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
HEAD = """# Deliberate breaks

`python benchmarks/breaks.py` breaks the code in one place at a time and runs the tests that should notice.

| # | break | seen | first test that failed | s |
|---|---|---|---|---|
"""


def check(number: int, entry: dict[str, Any], tree: Path) -> str:
    """A row of the table: the break is made in `tree`, tried and undone."""
    path = tree / "portable_fsdp" / entry["file"]
    text = path.read_text(encoding="utf-8")
    assert text.count(entry["old"]) == 1, (
        f"{entry['file']}: expected one {entry['old']!r}, found {text.count(entry['old'])}"
    )
    path.write_text(text.replace(entry["old"], entry["new"]), encoding="utf-8")
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-x", *shlex.split(entry["tests"])]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False
    )
    path.write_text(text, encoding="utf-8")
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    seen = (
        "yes" if done.returncode == 1 else "**no**" if done.returncode == 0 else f"pytest ended with {done.returncode}"
    )
    by = f"`{failed[0]}`" if failed else ""
    return f"| {number} | {entry['what']} | {seen} | {by} | {time.monotonic() - began:.0f} |\n"


def main(numbers: list[int]) -> None:
    breaks = yaml.safe_load((HERE / "breaks.yaml").read_text(encoding="utf-8"))
    rows = ""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "clone", "--quiet", "--shared", str(HERE.parent), str(tree)], check=True)
        for number, entry in enumerate(breaks, start=1):
            if not numbers or number in numbers:
                rows += check(number, entry, tree)
                (HERE / "results/breaks.md").write_text(HEAD + rows, encoding="utf-8")
                print(rows.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]])
