"""The learning rate as a function of the step: no state, nothing to save."""

import math

from portable_fsdp.config.schema import Optim
from portable_fsdp.runtime.errors import ConfigError


def check_schedule(optim: Optim, total_steps: int) -> None:
    """Raises ConfigError when the warmup is longer than the run."""
    if optim.warmup_steps > total_steps:
        raise ConfigError(
            f"optim.warmup_steps: expected at most the run's {total_steps} steps, found {optim.warmup_steps}.\n"
            "  Lower optim.warmup_steps, or train longer (train.steps, train.epochs). Nothing was started."
        )


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """Learning rate of `step`, counted from 1; at `total_steps` it is the floor (or lr, under constant).

    Warmup is linear: step s of w has lr * s / w. Never exactly 0: XLA treats 0 as a constant of the program, and would
    compile once more for it.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    floor = optim.lr * optim.min_lr_ratio
    return floor + (optim.lr - floor) * _share(optim, step, total_steps)


def _share(optim: Optim, step: int, total_steps: int) -> float:
    """What is left of the way from lr (1) down to the floor (0)."""
    if optim.schedule == "constant":
        return 1.0
    start = optim.warmup_steps
    if optim.schedule == "wsd":  # warmup, stable, decay (arXiv 2404.06395, section 4); the decay is linear
        start = max(start, total_steps - round(optim.decay_ratio * total_steps))
    if step <= start:
        return 1.0
    done = (step - start) / (total_steps - start)
    return (1 + math.cos(math.pi * done)) / 2 if optim.schedule == "cosine" else 1 - done
