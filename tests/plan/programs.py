"""Train steps compiled for TPU slices.

`python tests/plan/programs.py` compiles all of CASES, writes benchmarks/results/tpu_programs.json, and prints the table
that docs/tpu_programs.md shows. It needs the extra `tpu`, and no TPU.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from portable_fsdp.config.schema import Config
from portable_fsdp.plan.tpu import compile_for, trace_apart
from portable_fsdp.plan.tpu_program import Program as TracedProgram
from portable_fsdp.plan.tpu_read import Compiled

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "tpu_programs.json"
DEVICES = {"v6e:2x4": 8, "v5p:2x2x4": 16, "v5e:4x4": 16, "v4:2x2x4": 16, "v6e:4x4": 16}  # of a slice
GIBIBYTE = 2**30

SMALL = {
    **{"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
LLAMA_2B = {
    **{"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4},
    **{"num_attention_heads": 16, "num_key_value_heads": 16},
}
LLAMA_8B = {
    **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8},
}
LLAMA_70B = {
    **{"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
    **{"num_attention_heads": 64, "num_key_value_heads": 8},
}
QWEN3_8B = {
    **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
}
GEMMA3_4B = {  # every sixth layer sees all tokens, the others a window
    **{"vocab_size": 262208, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024},
}
MIXTRAL_8X7B = {
    **{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
}
WIDE = {  # little to compile, and most of its memory logits
    **{"vocab_size": 131072, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}
SIZES = {
    **{"small": SMALL, "2b": LLAMA_2B, "8b": LLAMA_8B, "70b": LLAMA_70B, "wide": WIDE},
    **{"qwen3": QWEN3_8B, "gemma3_text": GEMMA3_4B, "mixtral": MIXTRAL_8X7B},
}


@dataclass(frozen=True)
class Program:
    """One step. A row of 1536 tokens is no multiple of the flash kernel's blocks: its attention is torch's formula."""

    size: str
    slice: str
    seq_len: int = 1024
    layers: int | None = None
    strategy: str = "FULL_SHARD"
    replicas: int | None = None
    checkpointing: str = "none"
    scan: bool = False
    modules: tuple[str, ...] = ()  # in float32
    reduce: str = "auto"
    accumulation: int = 1
    optimizer: str = "adamw"
    slices: int = 1
    packing: str = "stream"

    @property
    def devices(self) -> int:
        return self.slices * DEVICES[self.slice]

    @property
    def config(self) -> Config:
        devices = self.devices
        kind = self.size if self.size in ("qwen3", "gemma3_text", "mixtral") else "llama"
        architecture: dict[str, Any] = {"model_type": kind, "max_position_embeddings": 8192, **SIZES[self.size]}
        if self.layers is not None:
            architecture["num_hidden_layers"] = self.layers
        return Config.model_validate(
            {
                "model": {"architecture": architecture},
                "data": {"seq_len": self.seq_len, "packing": self.packing},
                "train": {"steps": 10, "global_batch": devices * self.accumulation},
                "optim": {"name": self.optimizer},
                "sharding": {"strategy": self.strategy, "replicas": self.replicas},
                "precision": {
                    "compute": "bfloat16",
                    "reduce": self.reduce,
                    "modules": dict.fromkeys(self.modules, "float32"),
                },
                "memory": {
                    "gradient_checkpointing": self.checkpointing,
                    "every": 2 if self.checkpointing == "selective" else None,
                },
                "compile": {"scan_layers": self.scan},
            }
        )

    @property
    def words(self) -> str:
        """For a table: what differs from a plain step."""
        layers = self.layers or SIZES[self.size]["num_hidden_layers"]
        words = [f"{self.size} {layers}x{self.seq_len}", *[self.strategy] * (self.strategy != "FULL_SHARD")]
        words += [f"recomputed={self.checkpointing}"] * (self.checkpointing != "none")
        words += [self.optimizer] * (self.optimizer != "adamw")
        words += [f"reduce={self.reduce}"] * (self.reduce != "auto")
        words += ["documents"] * (self.packing == "documents")
        words += ["scanned"] * self.scan + [f"float32={'+'.join(self.modules)}"] * bool(self.modules)
        return ", ".join(words)

    @property
    def parameters(self) -> int:
        model = SIZES[self.size]
        hidden, layers = model["hidden_size"], self.layers or model["num_hidden_layers"]
        grouped = hidden * model["num_key_value_heads"] // model["num_attention_heads"]
        layer = 2 * hidden * (hidden + grouped) + 3 * hidden * model["intermediate_size"] + 2 * hidden
        return layers * layer + 2 * model["vocab_size"] * hidden + hidden


STRATEGIES = [
    Program("small", "v6e:2x4"),
    Program("small", "v6e:2x4", checkpointing="full"),
    Program("small", "v6e:2x4", strategy="SHARD_GRAD_OP"),
    Program("small", "v6e:2x4", strategy="NO_SHARD"),
    Program("small", "v6e:2x4", strategy="HYBRID_SHARD", replicas=2),
]
FLOAT32 = Program("small", "v6e:2x4", modules=("*norm*", "lm_head"))
SUMMED = Program("small", "v6e:2x4", modules=("*norm*",), reduce="float32")
SUMMED_2B = [
    Program("2b", slice_, 1536, checkpointing="full", modules=("*norm*",), reduce="float32")
    for slice_ in ("v6e:2x4", "v5p:2x2x4")
]
PLAIN = [Program("2b", "v5p:2x2x4", 1536, checkpointing=how) for how in ("none", "full")]
PLAIN_V6E = [Program("2b", "v6e:2x4", 1536, checkpointing=how) for how in ("none", "full")]
FLASH = [Program("8b", "v5p:2x2x4", 4096, checkpointing=how) for how in ("none", "full")]
SHALLOW = [Program("8b", "v5p:2x2x4", 4096, layers=layers, checkpointing="full") for layers in (4, 8)]
SCAN = [Program("8b", "v5p:2x2x4", 4096, layers=layers, checkpointing="full", scan=True) for layers in (4, 32)]
SLICES = [
    *(Program("small", slice_) for slice_ in DEVICES),
    Program("small", "v5e:4x4", slices=2),
    Program("small", "v5e:4x4", slices=2, strategy="HYBRID_SHARD", replicas=2),
]
RECOMPUTED = [
    [Program("2b", slice_, 1536, checkpointing=how) for how in ("none", "full")]
    for slice_ in ("v5e:4x4", "v4:2x2x4", "v6e:4x4")
]
SHAPES = [
    *(
        Program(size, "v6e:2x4", 1024, layers=2, checkpointing=how, scan=scan)
        for size in ("8b", "70b", "qwen3", "mixtral")
        for how, scan in (("none", False), ("selective", False), ("full", True))
    ),
    *(Program("gemma3_text", "v6e:2x4", 2048, layers=6, checkpointing=how) for how in ("none", "selective", "full")),
]
PACKED = [
    Program("small", "v6e:2x4", packing="documents"),
    Program("small", "v6e:2x4", checkpointing="full", scan=True, packing="documents"),
    Program("small", "v6e:2x4", 1536, packing="documents"),
]
SCAN_SGD = [replace(program, optimizer="sgd") for program in SCAN]
CASES = [*STRATEGIES, FLOAT32, SUMMED, *SUMMED_2B, *PLAIN, *PLAIN_V6E, *FLASH, *SHALLOW, *SCAN, *SCAN_SGD]


def traced(program: Program) -> dict[str, TracedProgram]:
    return _traced(program.config.model_dump_json(), program.devices)


@lru_cache(maxsize=4)  # a trace is of a number of devices, whatever they are
def _traced(config: str, devices: int) -> dict[str, TracedProgram]:
    return trace_apart(Config.model_validate_json(config), devices).programs


def compiled(program: Program, *, generate_code: bool = False) -> Compiled:
    """What the TPU compiler makes of a step that is one program."""
    step = traced(program)["train_step"]
    return compile_for(step, program.slice, slices=program.slices, generate_code=generate_code)


FIGURES = ("argument_bytes", "temporary_bytes", "output_bytes", "collectives", "matmul_flops", "rematerialised")


def figures(found: Compiled) -> dict[str, Any]:
    return {key: value for key, value in asdict(found).items() if key in (*FIGURES, "slice", "compile_s")}


def table(rows: list[dict[str, Any]]) -> str:
    """The results as docs/tpu_programs.md shows them; traffic in units of the weights' bytes in bfloat16."""
    columns = [
        "step",
        "slice",
        "arguments",
        "temporaries",
        "gathered",
        "all-reduced",
        "reduce-scattered",
        "products",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        fields: dict[str, Any] = {**row["program"], "modules": tuple(row["program"]["modules"])}
        program, found = Program(**fields), row["is"]
        moved = [sum_of(found["collectives"], kind) for kind in ("all_gather", "all_reduce", "reduce_scatter")]
        cells = [program.words, program.slice]
        cells += [f"{found[key] / GIBIBYTE:.3f}" for key in ("argument_bytes", "temporary_bytes")]
        cells += [f"{bytes_ / (2 * program.parameters):.2f}" for bytes_ in moved]
        cells.append(f"{sum(found['matmul_flops'].values()) / 1e12:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def sum_of(collectives: dict[str, Any], kind: str) -> int:
    return sum(moved["bytes"] for key, moved in collectives.items() if key.startswith(kind))


def main() -> None:
    rows: list[dict[str, Any]] = []
    for program in CASES:
        rows.append({"program": asdict(program), "parameters": program.parameters, "is": figures(compiled(program))})
        found = rows[-1]["is"]
        print(program, f"{found['temporary_bytes'] / GIBIBYTE:.3f} GiB of temporaries", file=sys.stderr, flush=True)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
