"""What dropout by keys costs beside torch's own: steps of the quickstart with dropout 0.1, interleaved in one process.

    python benchmarks/dropout_overhead.py

The steps are the trainer's, of one native process. The second one gets batches without keys, so that torch draws from
its generator; all else is equal. Two models: the quickstart's Llama, which has dropout in attention alone, and a GPT-2
of its size, which has it at all sites.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any, cast

from loop_overhead import RESULTS, cpu_model, median_ratio

from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.open import open_backend
from portable_fsdp.convert.read import load_config
from portable_fsdp.data.build import build_data
from portable_fsdp.data.packing import StepRows
from portable_fsdp.models.dropout import BATCH_KEY
from portable_fsdp.train.build import Training, build_training, open_batches

ROOT = Path(__file__).parents[1]
SITES = ("model.dropout=0.1", "model.attention=static", "train.global_batch=2")
GPT2 = (
    "model.architecture={model_type: gpt2, vocab_size: 256, n_embd: 192, n_layer: 4, n_head: 4, n_positions: 512, "
    "bos_token_id: 0, eos_token_id: 0}"
)
MODELS: dict[str, tuple[str, ...]] = {"llama": (), "gpt2": (GPT2,)}
GOAL, WARM_UP_STEPS = 1.15, 3


def step(backend: Backend, training: Training, rows: StepRows, *, by_keys: bool) -> tuple[float, float]:
    """Run a step; returns wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    batches = [{n: t for n, t in batch.items() if by_keys or n != BATCH_KEY} for batch in rows.micro_batches]
    metrics = training.step([backend.place(batch) for batch in batches], 1e-3, [rows.count])
    backend.fetch(metrics).result()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(settings: tuple[str, ...], pairs: int) -> dict[str, Any]:
    """Medians of both steps, and of their ratios pair by pair; the order turns from pair to pair."""
    config = load_config(ROOT / "configs" / "quickstart.yaml", [*SITES, *settings])
    with open_backend(config, device="cpu", backend="native") as backend:
        corpus = build_data(config.data)
        training = build_training(config, backend, corpus.tokenizer)
        times: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        with open_batches(config, backend, training, corpus) as batches:
            for pair in range(-WARM_UP_STEPS, pairs):
                for by_keys in (True, False) if pair % 2 else (False, True):
                    seconds = step(backend, training, next(batches), by_keys=by_keys)
                    times[by_keys] += [seconds] if pair >= 0 else []
    result: dict[str, Any] = {"pairs": pairs}
    for at, clock in enumerate(("wall", "cpu")):
        ours, torchs = ([each[at] for each in times[by_keys]] for by_keys in (True, False))
        result[clock] = {
            "by_keys_s": statistics.median(ours),
            "torch_s": statistics.median(torchs),
            "ratio": median_ratio(list(zip(ours, torchs, strict=True)))._asdict(),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a step with dropout by keys over one with torch's dropout.")
    parser.add_argument("--pairs", type=int, default=300, help="pairs of steps that are timed, at least 2")
    parser.add_argument("--out", type=Path, default=RESULTS / "dropout_overhead.json", help="the JSON file to write")
    arguments = parser.parse_args()
    models = {name: measure(settings, arguments.pairs) for name, settings in MODELS.items()}
    result = {"models": models, "goal": GOAL, "machine": {"cpu": cpu_model()}}
    for name, figures in models.items():
        for clock in ("wall", "cpu"):
            of = cast(dict[str, Any], figures[clock])
            low, high = of["ratio"]["low"], of["ratio"]["high"]
            print(
                f"{name:6} {clock:4} by keys {of['by_keys_s']:.4f} s, torch {of['torch_s']:.4f} s, "
                f"ratio {of['ratio']['median']:.3f} ({low:.3f} to {high:.3f}; goal <= {GOAL})"
            )
    cast(Path, arguments.out).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
