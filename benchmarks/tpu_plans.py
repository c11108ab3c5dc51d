"""Plans of whole models for TPU slices: how long they take, how much memory, and how exact their arguments are.

`python benchmarks/tpu_plans.py` plans each of CASES in a process of its own with an empty cache, and writes
benchmarks/results/tpu_plans.json. It needs the extra `tpu`, and no TPU.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from portable_fsdp.config.schema import Config
from portable_fsdp.plan.target import parse_target
from portable_fsdp.plan.tpu_compiler import compiler_version, plan_compiled

RESULTS = Path(__file__).parent / "results" / "tpu_plans.json"
SIZES = {
    "llama_8b": {
        **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8},
    },
    "llama_70b": {
        **{"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8},
    },
}


@dataclass(frozen=True)
class Case:
    """One row a device, layers recomputed, bfloat16 over float32 weights, AdamW."""

    size: str
    slice: str
    seq_len: int
    scan: bool = False

    @property
    def config(self) -> Config:
        architecture: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 8192, **SIZES[self.size]}
        return Config.model_validate(
            {
                "model": {"architecture": architecture},
                "data": {"seq_len": self.seq_len},
                "train": {"steps": 10, "global_batch": parse_target(self.slice).devices},
                "precision": {"compute": "bfloat16"},
                "memory": {"gradient_checkpointing": "full"},
                "compile": {"scan_layers": self.scan},
            }
        )

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of all weights; a norm's is a row for each element, since dimension 0 is what is split."""
        size = SIZES[self.size]
        hidden, inner, layers = size["hidden_size"], size["intermediate_size"], size["num_hidden_layers"]
        grouped = hidden * size["num_key_value_heads"] // size["num_attention_heads"]
        layer = [(hidden, hidden)] * 2 + [(grouped, hidden)] * 2 + [(inner, hidden)] * 2 + [(hidden, inner)]
        ends = [(size["vocab_size"], hidden)] * 2 + [(hidden, 1)]
        return [*(layer + [(hidden, 1)] * 2) * layers, *ends]


def padded(rows: int, width: int, devices: int) -> int:
    """Elements that a device holds of a weight: its rows, rounded up as the compiler lays float32 out in tiles.

    Tiles of 8 rows by 128; of 4, 2 or 1 where there are no more rows; a vector's of 128.
    """
    each = -(-rows // devices)
    if width == 1:
        return -(-each // 128) * 128
    tile = min(8, 1 << (each - 1).bit_length())
    return -(-each // tile) * tile * width


CASES = [
    Case("llama_8b", "v5p:2x2x4", 4096),
    Case("llama_8b", "v6e:4x4", 4096),
    Case("llama_8b", "v6e:16x16", 4096),
    Case("llama_8b", "v5p:2x2x4", 4096, scan=True),
    Case("llama_70b", "v6e:16x16", 4096, scan=True),
    Case("llama_70b", "v5p:8x8x8", 4096, scan=True),
]


def measure(case: Case) -> dict[str, Any]:
    """Plan a case in this process; times are of a machine that may have been busy, processor times are not."""
    began, first = time.perf_counter(), 0.0
    stages: dict[str, float] = {}

    def progress(stage: str) -> None:
        nonlocal first
        first = first or time.perf_counter() - began
        stages[stage] = time.perf_counter() - began

    target = parse_target(case.slice)
    plan = plan_compiled(case.config, target, progress)
    wall = time.perf_counter() - began
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    parameters = sum(rows * width for rows, width in case.shapes)
    held = sum(padded(rows, width, target.devices) for rows, width in case.shapes)
    parts = plan.memory.parts
    state = parts["weights"] + parts["optimizer"]
    return {
        "case": asdict(case),
        "parameters": parameters,
        "parts": parts,
        "state_by_12_bytes_a_parameter": round(state / (12 * parameters / target.devices), 6),
        "that_with_padding_of_rows_and_tiles": round(state / (12 * held), 6),
        "wall_s": round(wall, 1),
        "stages_s": {stage: round(seconds, 1) for stage, seconds in stages.items()},
        "cpu_s": round(sum(used.ru_utime + used.ru_stime for used in (own, children)), 1),
        "peak_gib": round((own.ru_maxrss + children.ru_maxrss) / 2**20, 2),  # of this process and the largest child
        "rematerialised": plan.memory.rematerialised,
        "notes": plan.notes,
        "compiler": compiler_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", help="one case, as JSON, in this process")
    one = parser.parse_args().case
    if one is not None:
        print(json.dumps(measure(Case(**json.loads(one)))))
        return
    rows: list[dict[str, Any]] = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, f"--case={json.dumps(asdict(case))}"]
            environment = {**os.environ, "XDG_CACHE_HOME": cache}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        rows.append({**json.loads(done.stdout), "load_after": round(os.getloadavg()[0], 1)})
        print(rows[-1], file=sys.stderr, flush=True)
        RESULTS.write_text(json.dumps({"cpus": os.cpu_count(), "plans": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
