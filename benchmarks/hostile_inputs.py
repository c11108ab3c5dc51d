"""Reads 2,000 seeded hostile inputs of each family (tests/hostile/), under the bounds of the tests.

python benchmarks/hostile_inputs.py [--count=2000] [--only=pickles,yamls]

Prints one row a family: how many were refused and accepted, the slowest and the largest. Each input that leaves the
bounds is printed with its seed, and the script ends with 1.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / name) for name in ("hostile", "checkpoint", "backends")]

from harness import FAMILIES, Outcome, attempt  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--only", default=",".join(FAMILIES))
    options = parser.parse_args()
    print("| family | inputs | refused | accepted | out of bounds | slowest | most memory |")
    print("|---|---|---|---|---|---|---|", flush=True)
    return int(sum(run(family, options.count) for family in options.only.split(",")) > 0)


def run(family: str, count: int) -> int:
    """Print the family's row; returns how many inputs left the bounds."""
    outcomes: list[Outcome] = []
    for seed in range(count):
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcomes.append(attempt(FAMILIES[family](seed, Path(folder)), Path(folder)))
            except AssertionError as error:
                print(f"{family}, seed {seed}: {error}", file=sys.stderr)
    refused = sum(outcome.message is not None for outcome in outcomes)
    slowest = max((outcome.seconds for outcome in outcomes), default=0)
    largest = max((outcome.peak_bytes for outcome in outcomes), default=0)
    print(
        f"| {family} | {count} | {refused} | {len(outcomes) - refused} | {count - len(outcomes)} | "
        f"{slowest:.2f} s | {largest / 2**20:.0f} MiB |",
        flush=True,
    )
    return count - len(outcomes)


if __name__ == "__main__":
    sys.exit(main())
