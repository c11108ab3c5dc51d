"""The configs of configs/ for their tests: what makes each small, and what its head comment says of its plans.

`python tests/launch/gallery.py [NAME ...]` plans anew and rewrites those lines: minutes for each config.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cli import ROOT, SMALL_LLAMA

from portable_fsdp.config.schema import Config
from portable_fsdp.convert.read import load_config
from portable_fsdp.plan.planner import fastest_that_fits, make_plan
from portable_fsdp.plan.result import Plan, Settings, Tried
from portable_fsdp.plan.target import Target, parse_target
from portable_fsdp.runtime.child import Worker

CONFIGS = ROOT / "configs"
GALLERY = sorted(CONFIGS.glob("*.yaml"))

FEW_ROWS = ["train.global_batch=4", "train.micro_batch=1"]
WITHOUT_PLAN = ["memory.gradient_checkpointing=full", "compile.enabled=false"]
MIXTURE = [
    *("model.architecture.num_experts=4", "model.architecture.num_experts_per_tok=2"),
    "model.architecture.moe_intermediate_size=32",
]
CHATS = ["data.source=jsonl", "data.path=chats.jsonl", "data.split=null", "data.eval_split=20%", "data.seq_len=32"]
OF_PRETRAINED = ["model.pretrained=model", *CHATS, *FEW_ROWS, "train.eval_every=2", "optim.warmup_steps=1"]

SMALL: dict[str, list[str]] = {
    "quickstart": ["train.global_batch=2", "data.seq_len=64"],
    "llama_1b": SMALL_LLAMA,
    "llama_8b": SMALL_LLAMA,
    "llama_8b_128k": [*SMALL_LLAMA, "sharding.context=1"],
    "llama_70b": SMALL_LLAMA,
    "qwen3_8b": SMALL_LLAMA,
    "qwen3_30b_a3b": [*SMALL_LLAMA, *MIXTURE],
    "qwen3_235b_a22b": [*SMALL_LLAMA, *MIXTURE, "sharding.expert=1", "sharding.expert_capacity=null"],
    "gemma3_4b": [*SMALL_LLAMA, "model.architecture.sliding_window=16"],
    "finetune_smollm2": ["model.pretrained=model", "model.gguf_file=null", "data.seq_len=32", "train.eval_every=2"],
    "sft_llama_8b": OF_PRETRAINED,
    "lora_llama_8b": OF_PRETRAINED,
    "qlora_llama_8b": OF_PRETRAINED,
    "qlora_llama_70b": OF_PRETRAINED,
    "vit_large": [
        *("model.architecture.hidden_size=32", "model.architecture.intermediate_size=64", *FEW_ROWS),
        *("model.architecture.num_hidden_layers=2", "model.architecture.num_attention_heads=2", "train.eval_every=2"),
    ],
    "t5_large": ["model.pretrained=t5", *FEW_ROWS, "train.eval_every=2", "train.eval_batches=2"],
}
"""Overrides that shrink each config; all else is unchanged."""


class Stated(NamedTuple):
    """`# plan h100:8 train.micro_batch=2: fits, 61.2 of 78.6 GiB, 8.60 s`: a target, overrides, and what a plan says;
    in a second line, what `auto` takes there.

    The seconds are the expected time of a step; None where it is unknown.
    """

    on: str
    overrides: tuple[str, ...]
    verdict: str
    gib: float
    limit_gib: float
    seconds: float | None
    chosen: str = ""

    def __str__(self) -> str:
        where = " ".join([self.on, *self.overrides])
        line = f"# plan {where}: {self.verdict}, {self.gib:.2f} of {self.limit_gib:.2f} GiB"
        line += "" if self.seconds is None else f", {self.seconds:.3g} s"
        return f"{line}\n#   auto: {self.chosen}" if self.chosen else line


def stated_plans(config: Path) -> dict[str, Stated]:
    """Parse the plans in a config's head comment, by line; fails for a plan line of another form."""
    plans: dict[str, Stated] = {}
    for lines in re.findall(r"^# plan .*(?:\n#   auto: .*)?", config.read_text(encoding="utf-8"), re.MULTILINE):
        form = r"# plan (\S+)((?: \S+=\S+)*): (fits|fits by recomputing), ([\d.]+) of ([\d.]+) GiB(?:, ([\d.]+) s)?"
        match = re.fullmatch(form + r"(?:\n#   auto: (.*))?", lines)
        assert match, f"{config.name}: {lines}"
        on, words, verdict, gib, limit_gib, seconds, chosen = match.groups(default="")
        figures = float(gib), float(limit_gib), float(seconds) if seconds else None
        plans[lines] = Stated(on, tuple(words.split()), verdict, *figures, chosen=chosen)
    return plans


PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-70B-Instruct": {
        **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672},
        **{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    },
    "meta-llama/Llama-3.1-8B-Instruct": {
        **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"max_position_embeddings": 131072, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    },
    "google-t5/t5-large": {
        **{"model_type": "t5", "vocab_size": 32128, "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16},
        **{"num_layers": 24, "num_decoder_layers": 24, "decoder_start_token_id": 0, "pad_token_id": 0},
    },
}
"""The shapes of the models that configs load from the hub: a plan depends on nothing else."""


def override_words(settings: Settings) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


class Planner(NamedTuple):
    """A config's own planner of one target."""

    config: Config
    target: Target
    plan_of: Callable[[Settings], Plan]
    worker: Worker


def planner_of(config: Path, stated: Stated, worker: Worker) -> Planner:
    """Return the planner of a stated target with its overrides; a hub model is planned by its shapes."""
    overrides = list(stated.overrides)
    if architecture := PUBLISHED.get(str(load_config(config).model.pretrained)):
        overrides += ["model.pretrained=null", f"model.architecture={json.dumps(architecture)}"]
        overrides += ["checkpoint.export=false"]  # adapters alone, which others couldn't open without their base
    loaded, target = load_config(config, overrides), parse_target(stated.on)

    def plan_of(settings: Settings) -> Plan:
        return make_plan(load_config(config, [*overrides, *override_words(settings)]), target, worker)

    return Planner(loaded, target, plan_of, worker)


def plan_again(config: Path, stated: Stated) -> Tried:
    """Plan the same target and overrides again."""
    with Worker() as worker:
        return fastest_that_fits(*planner_of(config, stated, worker), lambda line: None)


def as_stated(tried: Tried, overrides: tuple[str, ...]) -> Stated:
    plan = tried.plan
    assert plan is not None
    memory, seconds = plan.memory, plan.expected and plan.expected.seconds
    gib, limit_gib = memory.peak_bytes / 2**30, (memory.limit_bytes or 0) / 2**30
    chosen = " ".join(override_words(tried.settings))
    return Stated(plan.on, overrides, memory.verdict, gib, limit_gib, seconds, chosen)


def main(names: list[str]) -> None:
    for config in (path for path in GALLERY if path.stem in (names or SMALL)):
        for line, stated in stated_plans(config).items():
            again = str(as_stated(plan_again(config, stated), stated.overrides))
            print(f"{config.stem}: {again}", flush=True)
            config.write_text(config.read_text(encoding="utf-8").replace(line, again), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
