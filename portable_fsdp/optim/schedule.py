"""The learning rate of each step: linear warmup, then constant, linear, cosine or wsd (warmup, stable, decay).

It is never 0: XLA compiles a program of its own for an exact 0, so warmup begins at lr / warmup_steps and decay ends at
min_lr_ratio * lr. wsd is that of MiniCPM (arXiv 2404.06395, section 4) with a linear decay.
"""

import math

from portable_fsdp.config.schema import Optim
from portable_fsdp.runtime.errors import ConfigError


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """The learning rate of `step`, which counts from 1; the schedule spans `total_steps`, and stays at its end after.

    Step s of w warmup steps takes lr * s / w; step `total_steps` takes min_lr_ratio * lr, unless constant.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    if optim.schedule == "constant":
        return optim.lr
    wsd = optim.schedule == "wsd"
    decay = _wsd_decay_steps(optim, total_steps) if wsd else max(1, total_steps - optim.warmup_steps)
    left = min(1.0, max(0, total_steps - step) / decay)  # share of the decay that is still to come
    if optim.schedule == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left)


def check_schedule(optim: Optim, total_steps: int) -> None:
    """Raise ConfigError if the parts of the schedule don't fit into `total_steps`."""
    if optim.warmup_steps > total_steps:
        raise ConfigError(
            f"optim.warmup_steps: expected at most {total_steps} (the steps of the run), found {optim.warmup_steps}.\n"
            "  Lower optim.warmup_steps, or train longer."
        )
    decay = _wsd_decay_steps(optim, total_steps)
    if optim.schedule == "wsd" and optim.warmup_steps + decay > total_steps:
        raise ConfigError(
            f"optim.decay_ratio: expected warmup and decay to fit into {total_steps} steps, found {optim.warmup_steps} "
            f"steps of warmup and {decay} of decay (decay_ratio {optim.decay_ratio}).\n"
            "  Lower optim.decay_ratio or optim.warmup_steps."
        )


def _wsd_decay_steps(optim: Optim, total_steps: int) -> int:
    return max(1, round(optim.decay_ratio * total_steps))
