"""What a step is expected to take, holds and sends, for shapes that people train: a table to measure changes by.

    python benchmarks/step_time.py            # prints the table beside the one checked in, and ends with 1 for a loss
    python benchmarks/step_time.py --write    # replaces it

Plans each of CASES (`plan.planner.make_plan`: TPUs by the compiler's own program up to the assignment of buffers, GPUs
by the recorded step) and writes results/step_time.json and results/step_time.md. A row that takes, holds or sends
LOSS more than before is a loss; so is a collective for which compute newly waits. Nothing is timed. Minutes.
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from portable_fsdp.config.schema import Config
from portable_fsdp.plan.planner import make_plan
from portable_fsdp.plan.result import Plan
from portable_fsdp.plan.target import parse_target
from portable_fsdp.runtime.child import Worker

RESULTS = Path(__file__).parent / "results" / "step_time.json"
LOSS = 0.03
GIB = 2**30
FIGURES = ("expected_s", "peak_gib", "sent_gib")

LLAMA_8B = {
    **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
}
LLAMA_1B = {
    **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64},
    **{"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
    "tie_word_embeddings": True,
}
MIXTURE = {  # Qwen3 30B A3B's layers, 8 of its 48
    **{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144},
    **{"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 8},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 8192},
}


@dataclass(frozen=True)
class Case:
    """bfloat16 over float32 weights, AdamW, layers recomputed."""

    name: str
    on: str
    architecture: dict[str, Any]
    seq_len: int
    rows: int  # a device
    more: dict[str, Any] = field(default_factory=lambda: {})

    @property
    def config(self) -> Config:
        batch = {"global_batch": self.rows * parse_target(self.on).devices, "micro_batch": self.rows}
        return Config.model_validate(
            {
                **{"model": {"architecture": self.architecture}, "data": {"seq_len": self.seq_len}},
                **{"train": {"steps": 10, **batch}, "precision": {"compute": "bfloat16"}},
                **{"memory": {"gradient_checkpointing": "full"}, **self.more},
            }
        )


CASES = (
    Case("8B", "v6e:4x4", LLAMA_8B, 8192, 1),
    Case("8B, scanned", "v6e:4x4", LLAMA_8B, 8192, 3, {"compile": {"scan_layers": True}}),
    Case("8B", "v5p:2x2x4", LLAMA_8B, 8192, 1),
    Case("8B", "h100:8", LLAMA_8B, 8192, 2),
    Case("1B", "v6e:2x4", LLAMA_1B, 8192, 2),
    Case("1B", "h100:1", LLAMA_1B, 8192, 2),
    Case("mixture of experts", "h100:8", MIXTURE, 4096, 2),
)


def figures_of(plan: Plan) -> dict[str, Any]:
    assert plan.expected is not None
    return {
        "expected_s": plan.expected.seconds,
        "parts_s": plan.expected.parts,
        "peak_gib": plan.memory.peak_bytes / GIB,
        "sent_gib": sum(plan.work.sent_bytes.values()) / GIB,
        "waited_gib": {kind: size / GIB for kind, size in plan.expected.synchronous_bytes.items()},
        "mfu": plan.expected_mfu,
    }


def plan_all() -> dict[str, dict[str, Any]]:
    """`8B on v6e:4x4` -> its figures."""
    rows: dict[str, dict[str, Any]] = {}
    with Worker() as worker:
        for case in CASES:
            rows[f"{case.name} on {case.on}"] = figures_of(make_plan(case.config, parse_target(case.on), worker))
            print(f"{case.name} on {case.on}", file=sys.stderr, flush=True)
    return rows


def losses(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]]) -> list[str]:
    """What is worse than in the table checked in, in words."""
    found: list[str] = []
    for name, row in now.items():
        old = before.get(name)
        if old is None:
            continue
        for figure in FIGURES:
            if row[figure] > old[figure] * (1 + LOSS):
                found.append(f"{name}: {figure} {row[figure]:.3f}, was {old[figure]:.3f}")
        found += [f"{name}: compute waits for {kind}" for kind in row["waited_gib"].keys() - old["waited_gib"].keys()]
    return found


def page(rows: dict[str, dict[str, Any]]) -> str:
    parts = ("products", "attention", "elementwise", "copies", "exposed communication")
    titles = ("shape", "expected", *parts, "mfu", "peak GiB", "sent GiB", "sent while compute waits, GiB")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for name, row in rows.items():
        seconds = [row["expected_s"], *(row["parts_s"].get(part, 0.0) for part in parts)]
        waited = ", ".join(f"{kind} {size:.2f}" for kind, size in row["waited_gib"].items()) or "none"
        cells = [name, *(f"{one * 1e3:,.0f} ms" for one in seconds), "" if row["mfu"] is None else f"{row['mfu']:.0%}"]
        cells += [f"{row['peak_gib']:.2f}", f"{row['sent_gib']:.2f}", waited]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            *("# What a step is expected to take", "", "Written by `python benchmarks/step_time.py --write`.", ""),
            "Plans at the speeds that published runs reach (expected_times.md). To compare versions; nothing is timed.",
            *("", *lines, ""),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the table that is checked in")
    asked, rows = parser.parse_args(), plan_all()
    worse = losses(json.loads(RESULTS.read_text()), rows) if RESULTS.is_file() else []
    print(page(rows))
    print("\n".join(worse) or "nothing is worse than in the table checked in")
    if asked.write:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(page(rows))
    return 0 if asked.write or not worse else 1


if __name__ == "__main__":
    sys.exit(main())
