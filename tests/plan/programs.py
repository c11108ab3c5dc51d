"""Train steps compiled for TPU slices.

`python tests/plan/programs.py` compiles all of CASES, writes benchmarks/results/tpu_programs.json, and prints the table
of benchmarks/results/tpu_programs.md. It needs the extra `tpu`, and no TPU.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from portable_fsdp.config.schema import Config
from portable_fsdp.plan.target import parse_target
from portable_fsdp.plan.tpu_compiler import compile_for, trace_apart
from portable_fsdp.plan.tpu_program import Compiled
from portable_fsdp.plan.tpu_program import Program as TracedProgram

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "tpu_programs.json"
GIBIBYTE = 2**30


def _sizes(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, key_heads: int, **more: int
) -> dict[str, int]:
    return {
        **{"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": key_heads, **more},
    }


LLAMA_8B = _sizes(128256, 4096, 14336, 32, 32, 8)
SIZES = {
    "small": _sizes(1024, 256, 512, 3, 4, 2),
    "2b": _sizes(32000, 2048, 8192, 4, 16, 16),
    "8b": LLAMA_8B,
    "70b": _sizes(128256, 8192, 28672, 80, 64, 8),
    "wide": _sizes(131072, 256, 512, 1, 4, 2),  # little to compile, and most of its memory logits
    "qwen3": _sizes(151936, 4096, 12288, 36, 32, 8, head_dim=128),
    # Every sixth layer sees all tokens, the others a window.
    "gemma3_text": _sizes(262208, 2560, 10240, 34, 8, 4, head_dim=256, sliding_window=1024),
    # Windows in one layer of two, softcaps in both; or sinks.
    "gemma2": _sizes(1024, 512, 512, 2, 4, 2, head_dim=256, sliding_window=512),
    "gpt_oss": _sizes(1024, 512, 512, 2, 4, 2, head_dim=64, sliding_window=128, num_local_experts=4),
    "mixtral": _sizes(32000, 4096, 14336, 32, 32, 8, num_local_experts=8, num_experts_per_tok=2),
}


@dataclass(frozen=True)
class Program:
    """One step. A row of 1600 tokens doesn't fit the attention kernel's blocks: attention is torch's formula."""

    size: str
    slice: str
    seq_len: int = 1024
    layers: int | None = None
    strategy: str = "FULL_SHARD"
    replicas: int | None = None
    checkpointing: str = "none"  # or `matmul`: all but products
    scan: bool = False
    modules: tuple[str, ...] = ()  # in float32
    reduce: str = "auto"
    accumulation: int = 1
    optimizer: str = "adamw"
    slices: int = 1
    packing: str = "stream"
    offload: str = "none"

    @property
    def devices(self) -> int:
        return self.slices * parse_target(self.slice).devices

    @property
    def torus(self) -> tuple[int, ...]:
        return replace(parse_target(self.slice), slices=self.slices).torus

    @property
    def config(self) -> Config:
        kind = self.size if self.size in ("qwen3", "gemma3_text", "mixtral", "gemma2", "gpt_oss") else "llama"
        architecture: dict[str, Any] = {"model_type": kind, "max_position_embeddings": 8192, **SIZES[self.size]}
        if self.layers is not None:
            architecture["num_hidden_layers"] = self.layers
        return Config.model_validate(
            {
                "model": {"architecture": architecture},
                "data": {"seq_len": self.seq_len, "packing": self.packing},
                "train": {"steps": 10, "global_batch": self.devices * self.accumulation},
                "optim": {"name": self.optimizer},
                "sharding": {"strategy": self.strategy, "replicas": self.replicas},
                "precision": {
                    **{"compute": "bfloat16", "reduce": self.reduce},
                    "modules": dict.fromkeys(self.modules, "float32"),
                },
                "memory": {
                    "gradient_checkpointing": "selective" if self.checkpointing == "matmul" else self.checkpointing,
                    "save_ops": ["matmul"] * (self.checkpointing == "matmul"),
                    "every": 2 if self.checkpointing == "selective" else None,
                    "offload": self.offload,
                },
                "compile": {"scan_layers": self.scan},
            }
        )

    @property
    def words(self) -> str:
        """The differences from a plain step, for a table."""
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
    Program("2b", slice_, 1600, checkpointing="full", modules=("*norm*",), reduce="float32")
    for slice_ in ("v6e:2x4", "v5p:2x2x4")
]
PLAIN = [Program("2b", "v5p:2x2x4", 1600, checkpointing=how) for how in ("none", "full")]
PLAIN_V6E = [Program("2b", "v6e:2x4", 1600, checkpointing=how) for how in ("none", "full")]
FLASH = [Program("8b", "v5p:2x2x4", 4096, checkpointing=how) for how in ("none", "full")]
SHALLOW = [Program("8b", "v5p:2x2x4", 4096, layers=layers, checkpointing="full") for layers in (4, 8)]
SCAN = [Program("8b", "v5p:2x2x4", 4096, layers=layers, checkpointing="full", scan=True) for layers in (4, 32)]
SLICES = [
    *(Program("small", slice_) for slice_ in ("v6e:2x4", "v5p:2x2x4", "v5e:4x4", "v4:2x2x4", "v6e:4x4")),
    Program("small", "v5e:4x4", slices=2),
    Program("small", "v5e:4x4", slices=2, strategy="HYBRID_SHARD", replicas=2),
]
RECOMPUTED = [
    [Program("2b", slice_, 1600, checkpointing=how) for how in ("none", "full")]
    for slice_ in ("v5e:4x4", "v4:2x2x4", "v6e:4x4")
]
KEPT = [
    Program("8b", "v6e:4x4", 8192, layers=2, checkpointing=how, scan=scan)
    for scan in (False, True)
    for how in ("none", "matmul", "full")
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
    Program("small", "v6e:2x4", 1600, packing="documents"),
]
OFFLOADED = Program("8b", "v6e:4x4", 8192, layers=4, checkpointing="full", scan=True, offload="activations")
KERNELS = [
    *(Program("8b", slice_, 4096, layers=1) for slice_ in ("v6e:2x4", "v5p:2x2x4", "v5e:2x4")),
    *(  # in blocks of 1024, 768 and 384 tokens
        Program("gemma2", slice_, seq_len, checkpointing="full", packing="documents")
        for slice_, seq_len in (("v6e:2x4", 2048), ("v5p:2x2x1", 1536), ("v5e:2x4", 1152))
    ),
    Program("gpt_oss", "v6e:2x4", 1024, checkpointing="full"),
]
SCAN_SGD = [replace(program, optimizer="sgd") for program in SCAN]
CASES = [*STRATEGIES, FLOAT32, SUMMED, *SUMMED_2B, *PLAIN, *PLAIN_V6E, *FLASH, *SHALLOW, *SCAN, *SCAN_SGD]


def traced(program: Program) -> dict[str, TracedProgram]:
    return _traced(program.config.model_dump_json(), program.devices, program.torus)


@lru_cache(maxsize=4)
def _traced(config: str, devices: int, torus: tuple[int, ...]) -> dict[str, TracedProgram]:
    return trace_apart(Config.model_validate_json(config), devices, torus=torus).programs


def compiled(program: Program, *, generate_code: bool = False) -> Compiled:
    """Compile a step that is one program with the TPU compiler."""
    step = traced(program)["train_step"]
    return compile_for(step, program.slice, slices=program.slices, generate_code=generate_code)


FIGURES = ("argument_bytes", "temporary_bytes", "output_bytes", "collectives", "matmul_flops", "rematerialised")


def figures(step: Compiled) -> dict[str, Any]:
    return {key: value for key, value in asdict(step).items() if key in (*FIGURES, "compile_s")}


def table(rows: list[dict[str, Any]]) -> str:
    """The results as a table; traffic in units of the weights' bytes in bfloat16."""
    columns = "step | slice | arguments | temporaries | gathered | all-reduced | reduce-scattered | products"
    lines = [f"| {columns} |", "|---" * 8 + "|"]
    for row in rows:
        program, compiled_step = program_of(row), row["is"]
        collectives = compiled_step["collectives"].items()
        moved = [
            sum(moved["bytes"] for key, moved in collectives if key.startswith(kind))
            for kind in ("all_gather", "all_reduce", "reduce_scatter")
        ]
        cells = [program.words, program.slice]
        cells += [f"{compiled_step[key] / GIBIBYTE:.3f}" for key in ("argument_bytes", "temporary_bytes")]
        cells += [f"{bytes_ / (2 * program.parameters):.2f}" for bytes_ in moved]
        cells.append(f"{sum(compiled_step['matmul_flops'].values()) / 1e12:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def program_of(row: dict[str, Any]) -> Program:
    """Return the program of a row of RESULTS."""
    fields: dict[str, Any] = {**row["program"], "modules": tuple(row["program"]["modules"])}
    return Program(**fields)


def main() -> None:
    rows: list[dict[str, Any]] = []
    for program in CASES:
        rows.append({"program": asdict(program), "parameters": program.parameters, "is": figures(compiled(program))})
        temporary_bytes = rows[-1]["is"]["temporary_bytes"]
        print(program, f"{temporary_bytes / GIBIBYTE:.3f} GiB of temporaries", file=sys.stderr, flush=True)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
