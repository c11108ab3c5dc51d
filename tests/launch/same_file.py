"""Script of test_accelerate_launch.py: train from one accelerate config, by accelerate (`theirs`) and by us.

Run by `accelerate launch --config_file FILE same_file.py theirs|ours REPORT ARGUMENTS`. What each of them asks of FSDP2
is recorded as it is called: which modules are one unit, in which dtypes.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.nn import functional as F

from portable_fsdp.config.schema import Config
from portable_fsdp.convert.read import load_config
from portable_fsdp.data.batches import Batches
from portable_fsdp.data.build import build_data
from portable_fsdp.launch import main


class RecordedCalls:
    """Stands in for `fully_shard`: notes each call, and makes it."""

    def __init__(self) -> None:
        self._fully_shard = fsdp.fully_shard
        self._calls: list[tuple[list[nn.Module], dict[str, Any]]] = []
        fsdp.fully_shard = self

    def __call__(self, module: Any, **options: Any) -> Any:
        self._calls.append((module if isinstance(module, list) else [module], options))
        return self._fully_shard(module, **options)

    def units(self) -> dict[str, dict[str, object]]:
        """Names of the modules of a unit (the root's is empty) -> what was asked for it."""
        model = self._calls[-1][0][0]
        names = {module: name.replace("._checkpoint_wrapped_module", "") for name, module in model.named_modules()}
        return {
            " ".join(sorted(names[module] for module in modules)): {
                "param_dtype": str(options["mp_policy"].param_dtype),
                "reduce_dtype": str(options["mp_policy"].reduce_dtype),
                "reshard_after_forward": options.get("reshard_after_forward"),
            }
            for modules, options in self._calls
        }


def theirs(config: Config) -> list[float]:
    """accelerate's own way: Accelerator, prepare, a plain loop over our batches. The losses of the steps."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from transformers import AutoModelForCausalLM

    accelerator = Accelerator(cpu=True)
    # accelerate makes an FSDP run only where it finds an accelerator: what it does there, on its CPU processes.
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    plugin = FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}

    model = AutoModelForCausalLM.from_pretrained(str(config.model.pretrained), dtype=torch.float32)
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": decayed, "weight_decay": config.optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.optim.lr, betas=config.optim.betas, eps=config.optim.eps)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()

    shard = (accelerator.process_index, accelerator.num_processes)
    rows, size = build_data(config.data).rows, config.train.global_batch
    losses: list[float] = []
    with Batches(rows, seed=config.run.seed, global_batch=size, shard=shard, accumulation=1) as batches:
        for _, step in zip(range(config.train.steps or 0), batches, strict=False):
            [batch] = step.micro_batches
            logits = model(input_ids=batch["input_ids"]).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), config.train.max_grad_norm or 0.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(cast(torch.Tensor, accelerator.reduce(loss.detach(), "mean")).item())
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    way, report, *arguments = sys.argv[1:]
    calls = RecordedCalls()
    if way == "ours":
        code, losses = main(arguments), []
    else:
        path, *overrides = arguments
        code, losses = 0, theirs(load_config(path.removeprefix("--config="), overrides))
    if os.environ["RANK"] == "0":
        Path(report).write_text(json.dumps({"units": calls.units(), "losses": losses}))
    sys.exit(code)
