"""How near the expected time of a step is to speeds that others published.

    python benchmarks/expected_times.py    # minutes, and the extra `tpu`

Plans each run of published_runs.yaml (`plan.planner.make_plan`, what `python -m portable_fsdp.plan` prints). The
expected time is made of shares of the peak that were fitted to these runs, but for every third one (`held_out`): of
those it must be within TOLERANCE of what was measured.

Prints and writes to results/expected_times.json and results/expected_times.md the expected time, what was measured and
their ratio. Ends with 1 where the expected time of a run that was held out is further off. Nothing is timed.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat

from portable_fsdp.config.schema import Config
from portable_fsdp.models.flops import model_flops_per_token
from portable_fsdp.plan.planner import make_plan
from portable_fsdp.plan.result import Moved, Work
from portable_fsdp.plan.target import Target, parse_target
from portable_fsdp.plan.time import over_links
from portable_fsdp.runtime.child import Worker

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "expected_times.json"
TERA = 1e12
TOLERANCE = 0.25  # of the expected time of a run that was held out
HEAD_DIM = 128  # of all models that are planned; FLOPs and traffic of weights are the same with any


Unit = Literal["step_seconds", "tokens_per_second_per_device", "model_tflops_per_device"]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Shape(_Entry):
    """A model's matrices: all that FLOPs and traffic are counted from. Biases and a router aren't counted."""

    parameters: float  # that the source names
    layers: int
    width: int
    attention: int  # heads * head_dim
    kv: int  # heads of keys * head_dim
    ffn: int
    vocab: int
    gated: bool = True  # three matrices a feed-forward, else two
    tied: bool = False
    positions: int = 0  # learned

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        feed_forward = (3 if self.gated else 2) * self.width * self.ffn
        return self.width * (2 * self.attention + 2 * self.kv) + feed_forward + 2 * self.width

    @property
    def counted(self) -> int:
        """Parameters."""
        tables = self.vocab * self.width * (1 if self.tied else 2) + self.positions * self.width
        return self.layers * self.layer + tables + self.width


class Run(_Entry):
    name: str
    model: str
    hardware: str
    seq_len: int
    sequences: int
    accumulation: int = 1
    gradient_checkpointing: Literal["none", "full", "selective"] = "none"
    reduce: Literal["float32", "bfloat16"] = "bfloat16"
    master: Literal["float32", "bfloat16"] = "bfloat16"
    compiled: bool = False  # its layers, on GPUs
    measured: dict[Unit, PositiveFloat] = Field(min_length=1, max_length=1)
    source: str = Field(min_length=20)


class Published(_Entry):
    models: dict[str, Shape]
    runs: tuple[Run, ...]


def read_published(path: Path = HERE / "published_runs.yaml") -> Published:
    return Published.model_validate(yaml.safe_load(path.read_text()))


# ---------------------------------------------------------------------------------------------------- the textbook
# What a train step must at least do, from the numbers of a model: nothing is traced. Plans, which come from the
# trainer's own step, are checked by it, also in tests/plan/test_expected_times.py.

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}

Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]


@dataclass(frozen=True)
class Step:
    """What a step does, in numbers from which `work_of` counts it."""

    parameters: int  # all of them, a tied weight once
    embedding_parameters: int  # of tables that are only looked up
    layer_parameters: int  # of the layers alone: neither embeddings nor head nor last norm
    layers: int
    hidden: int  # attention heads * head_dim
    seq_len: int  # tokens
    sequences: int  # of the global batch
    strategy: Strategy = "FULL_SHARD"  # other: tensor or pipeline parallelism too; what it moves isn't counted
    replicas: int = 1  # of HYBRID_SHARD*
    accumulation: int = 1  # micro batches
    gradient_checkpointing: Literal["none", "full", "selective"] = "none"
    compute: str = "bfloat16"  # as `models.flops.peak_flops` names dtypes
    reduce: str = "float32"  # dtype in which gradients cross
    vector_parameters: int = 0  # norms and biases, which are factors of no matrix product
    keys_per_token: float | None = None  # that attention takes, in the mean over tokens and layers; None: causal, T/2


def model_flops(step: Step) -> float:
    """FLOPs of a whole step on all devices, as the trainer counts them for MFU."""
    numbers = (step.parameters, step.embedding_parameters, step.layers, step.hidden, step.seq_len)
    return step.sequences * step.seq_len * model_flops_per_token(*numbers)


def work_of(step: Step, target: Target) -> Work:
    """What each device of `target` must at least do in `step`, by formula: nothing is traced.

    - FLOPs: 2 for a weight, 4 more in backward; attention with half of all keys (causal).
      Full gradient checkpointing computes a layer's forward again, but for its last product, whose result nobody
      needs: at least half of its weights. Selective: nothing is added. All devices get the same share.
    - Collectives: the strategy's textbook, of the layers alone, because an engine may use tables of the vocabulary
      where they lie. FULL_SHARD gathers in every micro batch, on GPUs in backward again, all but the last layer
      (XLA may keep what it gathered); SHARD_GRAD_OP once a step; both reduce and scatter gradients once a step.

    Raises ValueError where the replicas don't divide the devices.
    """
    tokens = step.sequences * step.seq_len
    if step.replicas < 1 or target.devices % step.replicas:
        raise ValueError(f"{step.replicas} replicas don't divide {target.devices} devices")
    collectives, sent = _collectives(step, target)
    return Work(
        matmul_flops={step.compute: tokens * _flops_per_token(step) / target.devices},
        collectives=collectives,
        sent_bytes=sent,
    )


def _flops_per_token(step: Step) -> float:
    met = step.parameters - step.embedding_parameters - step.vector_parameters
    keys = step.seq_len / 2 if step.keys_per_token is None else step.keys_per_token
    attention = 4 * step.layers * step.hidden * keys
    again = step.layer_parameters - step.vector_parameters if step.gradient_checkpointing == "full" else 0
    return 6 * met + 3 * attention + again


def _collectives(step: Step, target: Target) -> tuple[dict[str, Moved], dict[str, float]]:
    """Bytes that a step gathers and reduces by kind and dtype, and bytes that one device sends by link."""
    replicas = target.devices if step.strategy == "NO_SHARD" else step.replicas
    shards = target.devices // replicas
    if target.devices == 1:
        return {}, {}
    weights = step.layer_parameters * _ITEM_BYTES[step.compute]
    gradients = step.layer_parameters * _ITEM_BYTES[step.reduce]
    gathers = 1.0
    if step.strategy in ("FULL_SHARD", "HYBRID_SHARD"):
        again = 0 if target.hardware.kind == "tpu" else (step.layers - 1) / step.layers
        gathers = step.accumulation * (1 + again)
    parts: list[tuple[str, float, float, int, int]] = []  # name, full bytes, how often they are sent, members, stride
    if shards > 1:
        parts.append((f"all_gather {step.compute}", gathers * weights, 1, shards, 1))
        parts.append((f"reduce_scatter {step.reduce}", gradients, 1, shards, 1))
    if replicas > 1:
        parts.append((f"all_reduce {step.reduce}", gradients / shards, 2, replicas, shards))
    collectives: dict[str, Moved] = {}
    links: dict[str, float] = {}
    for name, full, times, members, stride in parts:
        calls = step.layers * (round(gathers) if name.startswith("all_gather") else 1)
        ring = times * full * (members - 1) / members
        collectives[name] = Moved(calls, int(full), int(ring))
        for link, sent in over_links(target.levels, full, members=members, stride=stride).items():
            links[link] = links.get(link, 0) + times * sent
    return collectives, links


# ------------------------------------------------------------------------------------------------------- the plans


def step_of(run: Run, shape: Shape) -> Step:
    return Step(
        parameters=shape.counted,
        embedding_parameters=(0 if shape.tied else shape.vocab * shape.width) + shape.positions * shape.width,
        layer_parameters=shape.layers * shape.layer,
        layers=shape.layers,
        hidden=shape.attention,
        seq_len=run.seq_len,
        sequences=run.sequences,
        accumulation=run.accumulation,
        gradient_checkpointing=run.gradient_checkpointing,
        reduce=run.reduce,
        vector_parameters=(2 * shape.layers + 1) * shape.width,
    )


def measured_seconds(run: Run, shape: Shape, target: Target) -> float:
    """Return the measured seconds of a step."""
    [(unit, measured)] = run.measured.items()
    if unit == "step_seconds":
        return measured
    if unit == "tokens_per_second_per_device":
        return run.sequences * run.seq_len / target.devices / measured
    return model_flops(step_of(run, shape)) / target.devices / (measured * TERA)


def architecture_of(shape: Shape, seq_len: int) -> dict[str, Any]:
    """A model of transformers with the shape's matrices: Llama; OPT where a feed-forward has two of them."""
    heads = {"num_attention_heads": shape.attention // HEAD_DIM, "num_hidden_layers": shape.layers}
    sizes = {"vocab_size": shape.vocab, "hidden_size": shape.width, **heads, "tie_word_embeddings": shape.tied}
    if shape.gated:
        grouped = {"num_key_value_heads": shape.kv // HEAD_DIM, "head_dim": HEAD_DIM}
        return {
            **{"model_type": "llama", **sizes, **grouped},
            **{"intermediate_size": shape.ffn, "max_position_embeddings": seq_len},
        }
    return {
        **{"model_type": "opt", **sizes, "ffn_dim": shape.ffn, "max_position_embeddings": shape.positions},
        **{"word_embed_proj_dim": shape.width, "enable_bias": False, "activation_function": "gelu"},
    }


def config_of(run: Run, shape: Shape, target: Target) -> Config:
    """Return our config of the published run; weights are stored in bfloat16 unless the source says float32."""
    rows = run.sequences // (target.devices * run.accumulation)
    how = run.gradient_checkpointing
    return Config.model_validate(
        {
            "model": {"architecture": architecture_of(shape, run.seq_len)},
            "data": {"seq_len": run.seq_len},
            "train": {"steps": 1, "global_batch": run.sequences, "micro_batch": rows},
            "precision": {"compute": "bfloat16", "reduce": run.reduce, "master": run.master},
            "memory": {
                "gradient_checkpointing": how,
                "save_ops": ("matmul", "attention") if how == "selective" else (),
            },
            "compile": {"scan_layers": target.hardware.kind == "tpu", "enabled": run.compiled},
        }
    )


def plan_run(run: Run, shape: Shape, worker: Worker, *, is_held_out: bool) -> dict[str, Any]:
    """The expected time beside what was measured, and the plan's FLOPs beside the textbook's."""
    target = parse_target(run.hardware)
    plan = make_plan(config_of(run, shape, target), target, worker)
    assert plan.expected is not None, f"{target.text}: nothing is known of what runs reach"
    measured, textbook = measured_seconds(run, shape, target), work_of(step_of(run, shape), target)
    return {
        "name": run.name,
        "what": f"{run.model}, {run.sequences} x {run.seq_len}",
        "hardware": target.text,
        "measured_s": measured,
        "flops_over_textbook": sum(plan.work.matmul_flops.values()) / sum(textbook.matmul_flops.values()),
        "expected_s": plan.expected.seconds,
        "expected_parts_s": plan.expected.parts,
        "expected_ratio": plan.expected.seconds / measured,
        "held_out": is_held_out,
        "settings": plan.settings,
        "parameters": plan.parameters,
        "verdict": plan.memory.verdict,
        "method": plan.method,
        "source": run.source,
    }


def plan_all(published: Published) -> list[dict[str, Any]]:
    """One entry for each run, in the file's order; minutes."""
    rows: list[dict[str, Any]] = []
    with Worker() as worker:
        for number, run in enumerate(published.runs):
            rows.append(plan_run(run, published.models[run.model], worker, is_held_out=number % 3 == 2))
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    """A row of the table: the expected time, and the measured time."""
    words = [row["name"], row["what"], row["hardware"], f"{row['expected_s']:.4g} s", f"{row['measured_s']:.4g} s"]
    held_out = "held out" if row["held_out"] else ""
    return f"| {' | '.join(words)} | {row['expected_ratio']:.2f} | {held_out} | {row['source']} |"


def page(rows: list[dict[str, Any]]) -> str:
    titles = "measured | what | hardware | expected | took | expected / took | of the fit | source"
    parts = [
        "# Expected times beside published measurements",
        "Written by `python benchmarks/expected_times.py`.",
        "What `python -m portable_fsdp.plan` expects of each run. The expected time is made of shares of the peak that "
        "were fitted to the runs that weren't held out.",
        "\n".join([f"| {titles} |", "|---" * 8 + "|", *map(_line, rows)]),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    rows = plan_all(read_published())
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    RESULTS.with_suffix(".md").write_text(page(rows))
    print(page(rows))
    far = [row for row in rows if row["held_out"] and abs(row["expected_ratio"] - 1) > TOLERANCE]
    print(f"{len(far)} of the held-out runs are more than {TOLERANCE:.0%} from what was expected")
    return 1 if far else 0


if __name__ == "__main__":
    sys.exit(main())
