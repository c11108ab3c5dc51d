"""Parameter groups, the config's optimizer, and the learning rate of each step. Imports no torch.

A backend builds the optimizer once its parameters are sharded, by the function that `make_optimizer` returns. The loop
sets the numbers of each step (`counting.step_numbers`, `set_step_numbers`): a compiled step takes them as inputs.
"""

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from portable_fsdp.config.describe import matching
from portable_fsdp.config.schema import Optim, OptimGroup
from portable_fsdp.runtime.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from portable_fsdp.optim.counting import MakeOptimizer


def parameter_groups(
    named_shapes: Mapping[str, tuple[int, ...]],
    optim: Optim,
    *,
    ties: Mapping[str, str] | None = None,
    frozen: Collection[str] = (),
    tables: Collection[str] = (),
) -> list[dict[str, Any]]:
    """Group the parameters that train by the settings of their update; no group is empty.

    A group's `params` are FQNs in the order of `named_shapes`. The first matching one of `optim.groups` sets
    `weight_decay` and `lr_share` (its learning rate as a share of the schedule's). By default tensors of two or more
    dimensions decay, embedding tables included; biases and norm weights don't. `ties`: further FQN of a tied weight ->
    its first; any of them may match. `frozen`: FQNs of weights that don't train. With optim.name=muon, `is_hidden`
    marks the groups of matrices that aren't `tables` (embeddings and the head). Raises ConfigError for a group of
    `optim.groups` that gets no parameter.
    """
    first = {fqn: fqn for fqn in (*named_shapes, *frozen)} | dict(ties or {})
    own = _own_group(first, named_shapes.keys(), optim)
    grouped: dict[tuple[float, float, bool], list[str]] = {}
    for fqn, shape in named_shapes.items():
        group = own.get(fqn, OptimGroup(match=fqn))
        default = optim.weight_decay if len(shape) >= 2 else 0.0
        decay = default if group.weight_decay is None else group.weight_decay
        share = 1.0 if group.lr is None else group.lr / optim.lr
        is_hidden = optim.name == "muon" and len(shape) == 2 and fqn not in tables
        grouped.setdefault((decay, share, is_hidden), []).append(fqn)
    return [
        {"params": fqns, "weight_decay": decay, "lr_share": share} | ({"is_hidden": True} if is_hidden else {})
        for (decay, share, is_hidden), fqns in grouped.items()
    ]


def _own_group(first: Mapping[str, str], trained: Collection[str], optim: Optim) -> dict[str, OptimGroup]:
    """Trained FQN -> the first of `optim.groups` that matches it; `first`: FQN -> first FQN of its weight."""
    own: dict[str, OptimGroup] = {}
    for index, group in enumerate(optim.groups):
        key = f"optim.groups[{index}].match"
        names = list(dict.fromkeys(first[fqn] for fqn in matching(key, group.match, first)))
        trains = [fqn for fqn in names if fqn in trained]
        if not trains:
            raise ConfigError(
                f"{key}: {group.match!r} matches only frozen parameters (model.freeze, model.train_only): "
                f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}.\n  Leave the group out, or freeze less."
            )
        if own.keys() >= set(trains):
            raise ConfigError(
                f"{key}: {group.match!r} matches only parameters of earlier groups.\n"
                "  The first group that matches applies: put this one before."
            )
        own = dict.fromkeys(trains, group) | own
    return own


def make_optimizer(optim: Optim, compute: "torch.dtype | None" = None) -> "MakeOptimizer":
    """Return `make(groups, compiled)`, which builds the config's optimizer from parameter groups.

    A compiled step may hold no number that changes with the step: lr is then a float32 tensor, and AdamW that of
    own.py, whose state has the names, shapes and dtypes of torch's. `compute`: the dtype of Muon's iteration;
    None: float32. Raises ConfigError for a missing package, and for a factory that can't be used.
    """
    if optim.factory is not None or optim.name == "adamw8bit":
        from portable_fsdp.optim.own import from_bitsandbytes, from_factory

        return from_bitsandbytes(optim) if optim.factory is None else from_factory(optim, optim.factory)

    def make(groups: list[dict[str, Any]], compiled: bool) -> "torch.optim.Optimizer":
        import torch

        devices = {parameter.device.type for group in groups for parameter in group["params"]}
        if optim.name in ("adamw", "adam") and not compiled and "tpu" not in devices:
            torchs = torch.optim.AdamW if optim.name == "adamw" else torch.optim.Adam
            has_fused = devices in ({"cuda"}, {"cpu"})
            # fused=None: torch's default, which refuses no device. Only a fused optimizer can skip a step.
            return torchs(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True if has_fused else None)
        from portable_fsdp.optim import own

        lr = torch.tensor(optim.lr) if compiled else optim.lr
        adamw: dict[str, Any] = {"lr": lr, "betas": optim.betas, "eps": optim.eps}
        match optim.name:
            case "sgd":
                return own.SGD(groups, lr=lr, momentum=optim.momentum)
            case "lion":
                return own.Lion(groups, lr=lr, betas=optim.betas)
            case "adafactor":
                return own.Adafactor(groups, lr=lr)
            case "muon":
                return own.Muon(groups, **adamw, momentum=optim.momentum, compute=compute or torch.float32)
            case _:
                return own.AdamW(groups, **adamw, decoupled=optim.name == "adamw")

    return make


# -------------------------------------------------------------------------------------------------- the learning rate

# Linear warmup, then constant, linear, cosine or wsd (warmup, stable, decay). It is never 0: XLA compiles a separate
# program for an exact 0, so warmup begins at lr / warmup_steps and decay ends at min_lr_ratio * lr. wsd is that of
# MiniCPM (arXiv 2404.06395, section 4) with a linear decay.


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """Return the learning rate of `step`, counted from 1; the schedule spans `total_steps`, then stays at its end.

    Step s of w warmup steps takes lr * s / w; step `total_steps` takes min_lr_ratio * lr, unless constant.
    """
    warmup = in_steps(optim.warmup_steps, total_steps)
    if step <= warmup:
        return optim.lr * step / warmup
    if optim.schedule == "constant":
        return optim.lr
    wsd = optim.schedule == "wsd"
    decay = _wsd_decay_steps(optim, total_steps) if wsd else max(1, total_steps - warmup)
    left = min(1.0, max(0, total_steps - step) / decay)  # remaining share of the decay
    if optim.schedule == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * left)


def in_steps(value: int | str, total_steps: int) -> int:
    """Steps of a setting; a share (`3%`) is rounded up, as the Trainer's ratios are."""
    return value if isinstance(value, int) else math.ceil(float(value.removesuffix("%")) * total_steps / 100)


def check_schedule(optim: Optim, total_steps: int) -> None:
    """Raise ConfigError if the parts of the schedule don't fit into `total_steps`."""
    warmup = in_steps(optim.warmup_steps, total_steps)
    if warmup > total_steps:
        raise ConfigError(
            f"optim.warmup_steps: expected at most {total_steps} (the steps of the run), found {warmup}.\n"
            "  Lower optim.warmup_steps, or train longer."
        )
    decay = _wsd_decay_steps(optim, total_steps)
    if optim.schedule == "wsd" and warmup + decay > total_steps:
        raise ConfigError(
            f"optim.decay_ratio: expected warmup and decay to fit into {total_steps} steps, found {warmup} "
            f"steps of warmup and {decay} of decay (decay_ratio {optim.decay_ratio}).\n"
            "  Lower optim.decay_ratio or optim.warmup_steps."
        )


def _wsd_decay_steps(optim: Optim, total_steps: int) -> int:
    return max(1, round(optim.decay_ratio * total_steps))
