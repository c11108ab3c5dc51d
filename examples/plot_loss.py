"""Draw a run's loss, coloured by the backend that ran each step: `python examples/plot_loss.py runs/demo`.

Reads metrics.jsonl and events.jsonl of the run's folder and writes loss.png beside them. Needs matplotlib.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from portable_fsdp.observe.run_files import read_jsonl

Row = dict[str, Any]


def label(start: Row) -> str:
    """`native, 2 x cpu` for a row of events.jsonl that says a run started."""
    return f"{start['backend']}, {start['devices']} x {start['device']}"


def stretches(rows: list[Row], events: list[Row]) -> list[tuple[str, list[Row]]]:
    """Steps in a row that one start ran, with its label. A resumed run repeats what came after its checkpoint."""
    starts = [event for event in events if event["event"] == "start"]
    found: list[tuple[int, list[Row]]] = []
    for row in rows:
        number = max((i for i, start in enumerate(starts) if start["step"] < row["step"]), default=0)
        if not found or found[-1][0] != number:
            found.append((number, []))
        found[-1][1].append(row)
    return [(label(starts[number]), part) for number, part in found]


def plot(folder: Path, output: Path) -> None:
    """Write the picture of the run in `folder` to `output`."""
    mpl.use("Agg")  # a file, no screen
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    colours: dict[str, str] = {}
    before: Row | None = None
    for name, rows in stretches(read_jsonl(folder / "metrics.jsonl"), read_jsonl(folder / "events.jsonl")):
        is_new = name not in colours
        colour = colours.setdefault(name, f"C{len(colours)}")
        if before is not None:
            axes.axvline(before["step"], color="0.8", linewidth=1, zorder=0)
        line = rows if before is None else [before, *rows]  # no gap where one run hands over to the next
        values = [float("nan") if row["loss"] is None else row["loss"] for row in line]
        axes.plot([row["step"] for row in line], values, color=colour, label=name if is_new else None)
        before = rows[-1]
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(output, dpi=150)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a run's folder")
    parser.add_argument("--output", type=Path, help="the picture (default: loss.png in the run's folder)")
    chosen = parser.parse_args()
    missing = [name for name in ("metrics.jsonl", "events.jsonl") if not (chosen.folder / name).is_file()]
    if missing:
        print(f"{chosen.folder}: expected a run's folder, found no {' and no '.join(missing)}.", file=sys.stderr)
        return 2
    output = chosen.output or chosen.folder / "loss.png"
    plot(chosen.folder, output)
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
