"""How far lower bounds of a step's time are below speeds that others published, and how near expected times are.

    python benchmarks/time_bounds.py              # everything: minutes, and the extra `tpu`
    python benchmarks/time_bounds.py --plans=no   # the textbook alone: a second; the plans' rows stay as they were

Two bounds of each run of published_runs.yaml: the textbook's (textbook.py), of every run; and the planner's own
(`plan.planner.make_plan`, what `python -m portable_fsdp.plan` prints), of those runs that a config can express. Both,
and the textbook's of collectives alone, go through `plan.time.bound` and the same figures of hardware.

The expected time is the planner's alone. It is made of shares of the peak that were fitted to these runs, but for every
third one (`held_out`): of those it must be within TOLERANCE of what was measured.

Prints and writes to results/time_bounds.json and results/time_bounds.md the bound, what was measured and their ratio,
and by what factor each figure of the hardware could be too low before one of them showed it. Ends with 1 where a bound
is above a measured time: then a figure of the hardware, of the run, or the arithmetic is wrong; and where the expected
time of a run that was held out is further off. Nothing is timed.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from textbook import Step, model_flops, work_of

from portable_fsdp.config.schema import Config
from portable_fsdp.plan.planner import make_plan
from portable_fsdp.plan.result import Time, Work
from portable_fsdp.plan.target import Target, parse_target
from portable_fsdp.plan.time import bound, over_links
from portable_fsdp.runtime.child import Worker

HERE = Path(__file__).parent
GIGA, TERA = 1e9, 1e12
TOLERANCE = 0.25  # of the expected time of a run that was held out
HEAD_DIM = 128  # of all models that are planned; FLOPs and traffic of weights are the same with any


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
    experts: int = 1
    active_experts: int = 1
    window: int | None = None
    windowed_layers: int = 0

    def layer(self, experts: int) -> int:
        feed_forward = (3 if self.gated else 2) * self.width * self.ffn
        return self.width * (2 * self.attention + 2 * self.kv) + experts * feed_forward + 2 * self.width

    def counted(self, *, active: bool = False) -> int:
        """Parameters, or those that a token meets."""
        tables = self.vocab * self.width * (1 if self.tied else 2) + self.positions * self.width
        return self.layers * self.layer(self.active_experts if active else self.experts) + tables + self.width

    def keys_per_token(self, seq_len: int) -> float:
        windowed = min(self.window or seq_len, seq_len)
        inside = windowed * (1 - windowed / (2 * seq_len))  # the first tokens see fewer than the window
        return (inside * self.windowed_layers + seq_len / 2 * (self.layers - self.windowed_layers)) / self.layers


class Measured(_Entry):
    """One of the three."""

    step_seconds: float | None = Field(default=None, gt=0)
    tokens_per_second_per_device: float | None = Field(default=None, gt=0)
    model_tflops_per_device: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one(self) -> "Measured":
        if len(self.model_fields_set) != 1:
            raise ValueError("expected one unit")
        return self


class Run(_Entry):
    name: str
    model: str
    hardware: str
    seq_len: int
    sequences: int
    accumulation: int = 1
    strategy: Literal["FULL_SHARD", "other"]
    gradient_checkpointing: Literal["none", "full", "selective"] = "none"
    reduce: Literal["float32", "bfloat16"] = "bfloat16"
    state_bytes: float = 6
    compiled: bool = False  # its layers, on GPUs
    measured: Measured
    source: str = Field(min_length=20)


class Collective(_Entry):
    """Measured alone, for a tensor so large that its size doesn't matter."""

    hardware: str
    kind: Literal["all_gather", "all_reduce"]
    members: int
    sent_gb_per_s: float = Field(gt=0)
    source: str = Field(min_length=20)


class Published(_Entry):
    models: dict[str, Shape]
    runs: tuple[Run, ...]
    collectives: tuple[Collective, ...]


def read_published(path: Path = HERE / "published_runs.yaml") -> Published:
    return Published.model_validate(yaml.safe_load(path.read_text()))


def step_of(run: Run, shape: Shape) -> Step:
    return Step(
        parameters=shape.counted(),
        embedding_parameters=(0 if shape.tied else shape.vocab * shape.width) + shape.positions * shape.width,
        layer_parameters=shape.layers * shape.layer(shape.experts),
        layers=shape.layers,
        hidden=shape.attention,
        seq_len=run.seq_len,
        sequences=run.sequences,
        strategy=run.strategy,
        accumulation=run.accumulation,
        gradient_checkpointing=run.gradient_checkpointing,
        reduce=run.reduce,
        state_bytes=run.state_bytes,
        vector_parameters=(2 * shape.layers + 1) * shape.width,
        active_parameters=shape.counted(active=True) if shape.experts > 1 else None,
        keys_per_token=shape.keys_per_token(run.seq_len),
    )


def bound_of(run: Run, shape: Shape, target: Target) -> Time:
    step = step_of(run, shape)
    return bound(
        work_of(step, target),
        target,
        tokens_per_step=run.sequences * run.seq_len,
        model_flops_per_device=model_flops(step) / target.devices,
    )


def measured_seconds(run: Run, time: Time, target: Target) -> float:
    """Of a step; where chips are published (TPUs), a device may be half of one."""
    measured, parts = run.measured, target.chips
    if measured.step_seconds is not None:
        return measured.step_seconds
    if measured.tokens_per_second_per_device is not None:
        return time.tokens_per_step / parts / measured.tokens_per_second_per_device
    assert measured.model_tflops_per_device is not None
    assert time.model_flops_per_device is not None
    return time.model_flops_per_device * time.devices / parts / (measured.model_tflops_per_device * TERA)


def _what(run: Run) -> str:
    return f"{run.model}, {run.sequences} x {run.seq_len}"


def compare_run(run: Run, shape: Shape) -> dict[str, Any]:
    target = parse_target(run.hardware)
    time = bound_of(run, shape, target)
    return {
        "name": run.name,
        "what": _what(run),
        **_beside(time, measured_seconds(run, time, target), target),
        "source": run.source,
    }


def compare_collective(collective: Collective) -> dict[str, Any]:
    """Of a tensor of 1 GB."""
    target = parse_target(collective.hardware)
    times = 2 if collective.kind == "all_reduce" else 1
    sent = over_links(target.levels, times * GIGA, members=collective.members)
    work = Work(matmul_flops={}, memory_bytes=0, collectives={}, sent_bytes=sent)
    time = bound(work, target, tokens_per_step=0, model_flops_per_device=0)
    ring = times * (1 - 1 / collective.members)
    return {
        "name": collective.kind,
        "what": f"1 GB, {collective.members} devices",
        **_beside(time, ring / collective.sent_gb_per_s, target),
        "source": collective.source,
    }


def _beside(time: Time, measured: float, target: Target) -> dict[str, Any]:
    assert time.seconds, f"{target.text}: nothing is known of this hardware"
    return {
        "hardware": target.text,
        "bounds_s": {name: seconds for name, seconds in time.bounds.items() if seconds},
        "bound_s": time.seconds,
        "binds": time.binds,
        "measured_s": measured,
        "ratio": measured / time.seconds,
    }


def compare_all(published: Published) -> list[dict[str, Any]]:
    """One entry a run and a collective, in the file's order."""
    runs = [compare_run(run, published.models[run.model]) for run in published.runs]
    return [*runs, *(compare_collective(collective) for collective in published.collectives)]


# ------------------------------------------------------------------------------------------------ the planner's bounds


def is_expressible(run: Run, shape: Shape) -> bool:
    """Whether a config's step computes no more than the run must have, so that its bound holds for the run too.

    No tensor or pipeline parallelism. No experts: which of them a token meets costs our step more. On TPUs selective
    checkpointing of others keeps what ours recomputes; on GPUs `memory.save_ops` keeps all matrix products. What our
    step sends may be more than the run's: it reduces gradients in each micro batch, and XLA decides for itself.
    """
    is_tpu = parse_target(run.hardware).hardware.kind == "tpu"
    return run.strategy == "FULL_SHARD" and shape.experts == 1 and not (is_tpu and run.gradient_checkpointing != "full")


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
    """The run as a config of ours; weights rest in bfloat16 where the source doesn't say float32."""
    rows = run.sequences // (target.devices * run.accumulation)
    how = run.gradient_checkpointing
    return Config.model_validate(
        {
            "model": {"architecture": architecture_of(shape, run.seq_len)},
            "data": {"seq_len": run.seq_len},
            "train": {"steps": 1, "global_batch": run.sequences, "micro_batch": rows},
            "sharding": {"strategy": run.strategy},
            "precision": {
                "compute": "bfloat16",
                "reduce": run.reduce,
                "master": "float32" if run.state_bytes == 12 else "bfloat16",
            },
            "memory": {
                "gradient_checkpointing": how,
                "save_ops": ("matmul", "attention") if how == "selective" else (),
            },
            "compile": {"scan_layers": target.hardware.kind == "tpu", "enabled": run.compiled},
        }
    )


def plan_run(run: Run, shape: Shape, worker: Worker, *, is_held_out: bool) -> dict[str, Any]:
    """The planner's bounds beside what was measured, and beside the textbook's bound."""
    target = parse_target(run.hardware)
    textbook = bound_of(run, shape, target)
    plan = make_plan(config_of(run, shape, target), target, worker)
    assert plan.expected is not None, f"{target.text}: nothing is known of what runs reach"
    measured = measured_seconds(run, textbook, target)
    return {
        "name": run.name,
        "what": _what(run),
        **_beside(plan.time, measured, target),
        "textbook_s": textbook.seconds,
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
    """One entry for each run that a config can express, in the file's order; minutes."""
    rows: list[dict[str, Any]] = []
    runs = [run for run in published.runs if is_expressible(run, published.models[run.model])]
    with Worker() as worker:
        for number, run in enumerate(runs):
            rows.append(plan_run(run, published.models[run.model], worker, is_held_out=number % 3 == 2))
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    """Of a table: a bound by each figure, the expected time, and how long the run took."""
    bounds = row["bounds_s"]
    link = max((seconds for name, seconds in bounds.items() if name not in ("compute", "memory")), default=0.0)
    seconds = (bounds["compute"], bounds["memory"], link, row["textbook_s"], row["expected_s"], row["measured_s"])
    words = [row["name"], row["what"], row["hardware"], row["binds"], *(f"{one:.4g} s" for one in seconds)]
    held_out = "held out" if row["held_out"] else ""
    return f"| {' | '.join(words)} | {row['ratio']:.2f} | {row['expected_ratio']:.2f} | {held_out} |"


def plans_table(rows: list[dict[str, Any]]) -> str:
    """The closest first; sources are those of the same runs in the other table."""
    titles = "measured | what | hardware | binds | compute | memory | slowest link | textbook | expected | took"
    titles += " | took / bound | expected / took | of the fit"
    lines = [f"| {titles} |", "|---" * 13 + "|"]
    return "\n".join([*lines, *(_line(row) for row in sorted(rows, key=lambda row: row["ratio"]))])


# ----------------------------------------------------------------------------------------------------------- results


def margins(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Hardware -> figure -> factor by which it could be too low, before its bound is above a measurement."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        figures = found.setdefault(parse_target(row["hardware"]).hardware.name, {})
        for figure, seconds in row["bounds_s"].items():
            figures[figure] = min(figures.get(figure, math.inf), row["measured_s"] / seconds)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The closest first."""
    lines = ["| measured | what | hardware | bound | binds | took | took / bound | source |", "|---" * 8 + "|"]
    lines += [
        f"| {row['name']} | {row['what']} | {row['hardware']} | {row['bound_s']:.4g} s | {row['binds']} "
        f"| {row['measured_s']:.4g} s | {row['ratio']:.2f} | {row['source']} |"
        for row in sorted(rows, key=lambda row: row["ratio"])
    ]
    return "\n".join(lines)


def margins_table(found: dict[str, dict[str, float]]) -> str:
    names = sorted({figure for figures in found.values() for figure in figures})
    lines = [f"| hardware | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for hardware, figures in found.items():
        cells = [f"{figures[name]:.1f}" if name in figures else "" for name in names]
        lines.append(f"| {hardware} | {' | '.join(cells)} |")
    return "\n".join(lines)


QUESTION = """By what factor could a figure of the hardware be too low, or a bound too high, before one of these showed
it? The smaller, the better it is held; empty: by nothing."""


def page(rows: list[dict[str, Any]], plans: list[dict[str, Any]]) -> str:
    parts = [
        "# Expected times and lower bounds beside published measurements",
        "Written by `python benchmarks/time_bounds.py`.",
        "## The planner's bounds",
        "What `python -m portable_fsdp.plan` says of each run that a config can express. The longest bound binds. The "
        "expected time is made of shares of the peak that were fitted to the runs that weren't held out.",
        *(plans_table(plans), QUESTION, margins_table(margins(plans))),
        "## The textbook's bounds",
        "Of all runs, by the formulas of `benchmarks/textbook.py`, and of collectives alone.",
        *(table(rows), QUESTION, margins_table(margins(rows))),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plans", choices=("yes", "no"), default="yes", help="no: keep the rows written before")
    asked, published, results = parser.parse_args(), read_published(), HERE / "results" / "time_bounds.json"
    plans = plan_all(published) if asked.plans == "yes" else json.loads(results.read_text())["plans"]
    rows = compare_all(published)
    found = {"rows": rows, "margins": margins(rows), "plans": plans, "plans_margins": margins(plans)}
    results.write_text(json.dumps(found, indent=1) + "\n")
    results.with_suffix(".md").write_text(page(rows, plans))
    print(page(rows, plans))
    violations = [row for row in [*rows, *plans] if row["ratio"] < 1]
    print(
        f"{len(rows)} of the textbook's bounds and {len(plans)} plans, {len(violations)} longer than what was measured"
    )
    far = [row for row in plans if row["held_out"] and abs(row["expected_ratio"] - 1) > TOLERANCE]
    print(f"{len(far)} of the held-out runs are more than {TOLERANCE:.0%} from what was expected")
    return 1 if violations or far else 0


if __name__ == "__main__":
    sys.exit(main())
