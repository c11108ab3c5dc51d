"""Whether torch compiles the layers of a model, each to one program without a break.

The trainer's own model runs forward on meta; torch traces its compiled layers as in a run, and generates no code.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from portable_fsdp.backends.contract import Fill, ShardPolicy
from portable_fsdp.backends.native.engine import NativeBackend
from portable_fsdp.backends.native.units import prepare_layers
from portable_fsdp.backends.native.unsharded import view_tables
from portable_fsdp.config.describe import with_settings, with_value
from portable_fsdp.config.schema import Config, Memory, Sharding
from portable_fsdp.plan.fake_step import empty_batch, ranks, rows_of
from portable_fsdp.runtime.errors import PortableFSDPError
from portable_fsdp.train.build import build_training
from portable_fsdp.train.preflight import fit_packing

MOST_PROGRAMS = 4
"""Most kinds of layers that are compiled: torch compiles 8 programs of one function, training and evaluation."""


def count_programs(config: Config) -> int | str:
    """Return the number of programs into which the layers compile, or in words why they don't."""
    plain = {
        "memory.gradient_checkpointing": "none",
        "memory.offload": "none",
        "train.micro_batch": "1",
        "precision.products": "auto",
    }
    config = with_settings(fit_packing(config)[0], plain)
    if config.model.attention == "flex":
        config = with_value(config, "model.attention", "auto")
    settings = config.compile.model_copy(update={"enabled": True, "backend": "eager", "cache_dir": None})
    of_units = {key: value for key, value in config.sharding.model_dump().items() if key.startswith(("wrap", "min_"))}
    one_device = Sharding.model_validate({**of_units, "strategy": "NO_SHARD"})
    config = config.model_copy(update={"compile": settings, "sharding": one_device, "memory": Memory()})
    programs = list[object]()

    def count(graph: Any, _: object) -> Any:
        programs.append(graph)
        return graph.forward

    def shard_on_meta(model: nn.Module, policy: ShardPolicy, _: Fill | None) -> nn.Module:
        """Prepare the layers for one device, without FSDP2: the model stays on meta."""
        if policy.tables:
            view_tables(model, policy)
        policy = replace(policy, compile_backend=cast(str, count))
        prepare_layers(model, policy, (*policy.units, *policy.modules))
        return model.to("meta")

    nothing_steps = torch.optim.SGD([torch.empty(0)])
    with (
        ranks(1, 1),
        NativeBackend("cpu", config, None) as engine,
        patch.multiple(engine, shard_model=shard_on_meta, build_optimizer=lambda *_: nothing_steps),
    ):
        try:
            training = build_training(config, engine, 1, fill=False, rows=rows_of(config))
            batch = empty_batch(config, training, training.rows, "meta")
            with training.step.drawing() as run:
                run(partial(training.task.scores, training.model), batch)
        except (PortableFSDPError, TorchDynamoException) as error:
            of_user = re.findall(r'File "([^"]+)", line (\d+)', f"{error}".partition("from user code:")[2])
            where = f" ({Path(of_user[-1][0]).name}:{of_user[-1][1]})" if of_user else ""
            return f"{error}".strip().partition("\n")[0] + where
    kinds = len(programs)
    return kinds if 0 < kinds <= MOST_PROGRAMS else f"its layers are {kinds} programs, expected 1 to {MOST_PROGRAMS}"
