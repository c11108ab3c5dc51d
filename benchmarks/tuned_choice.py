"""What `tune` chooses beside the best of an exhaustive run, on this machine's CPU.

    python benchmarks/tuned_choice.py native --minutes 5
    python benchmarks/tuned_choice.py xla --minutes 15

configs/quickstart.yaml on two devices: `tune`, then all 12 candidates of a grid once, and the choice and the fastest
three twice more. Compared is the processor time of process 0, the least of three medians over steps; the result goes
into results/tuned_choice.json.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import RESULTS, ROOT, machine

from portable_fsdp.config.describe import Settings, changed_values, with_settings
from portable_fsdp.convert.read import load_config
from portable_fsdp.parity.__main__ import run_place
from portable_fsdp.parity.record import Place, PlaceTask, RunTask
from portable_fsdp.tune.__main__ import STEPS, WARM_UP
from portable_fsdp.tune.__main__ import main as tune

CONFIG = ROOT / "configs/quickstart.yaml"
AXES = {
    "native": {
        "train.micro_batch": ["1", "2", "4", "12"],
        "sharding.strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"],
    },
    "xla": {
        "train.micro_batch": ["2", "4", "12"],
        "sharding.strategy": ["FULL_SHARD", "SHARD_GRAD_OP"],
        "compile.scan_layers": ["false", "true"],
    },
}
GOAL = 1.05


def main() -> None:
    parser = argparse.ArgumentParser(description="The choice of tune over the best of an exhaustive run.")
    parser.add_argument("engine", choices=AXES)
    parser.add_argument("--minutes", type=float, default=5.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path, began = Path(folder, "quickstart.yaml"), time.monotonic()
        path.write_bytes(CONFIG.read_bytes())
        words = [f"--config={path}", "--device=cpu", f"--backend={options.engine}", "--num_devices=2"]
        assert tune([*words, f"--minutes={options.minutes}"]) == 0
        took = time.monotonic() - began
        tuned = changed_values(load_config(path), load_config(path.with_suffix(".tuned.yaml")))
    axes = AXES[options.engine]
    points: list[Settings] = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    seconds = [[measured(options.engine, point)] for point in points]
    best = sorted(range(len(points)), key=lambda n: seconds[n][0])[:3]
    chosen: list[float] = []
    for again in range(3):
        chosen.append(measured(options.engine, tuned))
        for number in best if again else []:
            seconds[number].append(measured(options.engine, points[number]))
    fastest = min(best, key=lambda n: min(seconds[n]))
    ratio = min(chosen) / min(seconds[fastest])
    result: dict[str, Any] = {
        "ratio": ratio,
        "goal": GOAL,
        "minutes": took / 60,
        "chosen": {"settings": tuned, "seconds": chosen},
        "fastest": {"settings": points[fastest], "seconds": seconds[fastest]},
        "grid": [{"settings": point, "seconds": each} for point, each in zip(points, seconds, strict=True)],
    }
    print(f"{options.engine}: ratio {ratio:.2f} (goal: <= {GOAL}); tune took {took / 60:.1f} minutes")
    print(f"chosen {tuned} {chosen}; fastest {points[fastest]} {seconds[fastest]}")
    out = RESULTS / "tuned_choice.json"
    results = json.loads(out.read_text()) if out.is_file() else {}
    results |= {options.engine: result, **machine()}
    out.write_text(json.dumps(results, indent=1) + "\n")


def measured(engine: str, settings: Settings) -> float:
    """Median processor time of a step of process 0, as `tune` measures it."""
    config = with_settings(load_config(CONFIG), {"checkpoint.resume": "none", **settings})
    run = RunTask(config=config.model_dump_json(), steps=STEPS)
    place = Place(device="cpu", engine=engine, devices=2)
    (record,) = run_place(PlaceTask(place=place, runs=[run], module="portable_fsdp.parity"))
    seconds = statistics.median(record.cpu_seconds[WARM_UP:])
    print(f"{settings}: {seconds:.3f} s", flush=True)
    return seconds


if __name__ == "__main__":
    main()
