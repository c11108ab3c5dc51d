"""Rules over several keys: the batch, the length, the optimizer, evaluations and saves. Read first: `rules.py`."""

import math

from portable_fsdp.convert.found import Found, Setting

LOGGING_STEPS = 500
"""Trainer's default of `logging_steps`, which `eval_steps` takes where it is not set."""


def combine_training(found: Found) -> None:
    """All of them."""
    _batch(found)
    _length(found)
    _warmup(found)
    _optimizer(found)
    _evaluations(found)
    _saves(found)
    _data(found)


_OF_BATCH = ("num_processes", "per_device_train_batch_size")


def _batch(found: Found) -> None:
    """global_batch = rows of a device * accumulation * devices, where the file says all three."""
    rows, times = found.said.get("train.micro_batch"), found.said.get("~accumulate")
    accumulated = found.whole("~accumulate") or 1
    source = times or rows
    if source is None or "train.global_batch" in found.overridden or (rows is None and accumulated == 1):
        return
    devices = found.numbers.get("num_processes")
    micro = found.given.get("train.micro_batch", found.value("train.micro_batch"))
    if rows is not None and found.value("~spmd"):
        _batch_of_spmd(found, rows, accumulated)
    elif isinstance(micro, int) and devices is not None:
        size = micro * accumulated * devices
        found.set("train.global_batch", size, source, f"{micro} * {accumulated} * {devices} processes")
    elif "train.global_batch" not in found.given and found.failed.isdisjoint(_OF_BATCH):
        found.problem(
            source,
            "expected the number of devices too (num_processes) and per_device_train_batch_size, which make the batch "
            "of a step.\n  Set train.global_batch: rows of a device * accumulation * devices.",
        )


def _batch_of_spmd(found: Found, rows: Setting, accumulated: int) -> None:
    """Under xla_fsdp_v2 one process feeds all devices: what Trainer calls the batch of a device is that of them all."""
    size = found.whole("train.micro_batch") or 1
    devices = found.numbers.get("num_processes")
    del found.options["train.micro_batch"]
    found.set("train.global_batch", size * accumulated, rows, "of all devices together, under xla_fsdp_v2")
    if devices and size % devices == 0:
        found.set("train.micro_batch", size // devices, rows, f"of one of {devices} devices, under xla_fsdp_v2")
    elif "train.micro_batch" not in found.given:
        text = f"under xla_fsdp_v2 these {size} rows are those of all devices together."
        found.problem(rows, f"{text}\n  Set train.micro_batch: rows of one device.")


def _length(found: Found) -> None:
    """As Trainer has it: max_steps goes first."""
    steps, epochs = found.said.get("train.steps"), found.said.get("train.epochs")
    if steps is not None and epochs is not None:
        remark = f"goes before {epochs.key}: {epochs.typed}, as in Trainer"
        found.options["train.steps"] = steps._replace(remark=remark)
        del found.options["train.epochs"]


def _warmup(found: Found) -> None:
    """As Trainer has it: below 1 it is a share of the steps; steps go before a share of them, unless they are 0.

    A constant schedule has none: `constant_with_warmup` is another one.
    """
    warmup, ratio = found.said.get("~warmup"), found.said.get("~warmup_ratio")
    steps = found.number("~warmup") or 0
    if found.value("~constant") and "optim.schedule" not in found.overridden:
        return
    if 0 < steps < 1:
        ratio, share = warmup, steps
    elif warmup is not None and (steps or ratio is None):
        return found.set("optim.warmup_steps", int(steps), warmup)
    else:
        share = found.number("~warmup_ratio") or 0
    if ratio is None or "optim.warmup_steps" in found.overridden:
        return
    total = found.given.get("train.steps", found.value("train.steps"))
    if isinstance(total, int):
        found.set("optim.warmup_steps", math.ceil(share * total), ratio, f"of {total} steps")
    elif "optim.warmup_steps" not in found.given and "max_steps" not in found.failed:
        found.problem(ratio, "a share of the steps needs their number.\n  Set optim.warmup_steps, or max_steps.")


def _optimizer(found: Found) -> None:
    first, second = found.said.get("~beta1"), found.said.get("~beta2")
    if source := first or second:
        betas = [first.value if first else 0.9, second.value if second else 0.999]
        found.set("optim.betas", betas, source, "" if first and second else "the other one: Trainer's default")


def _evaluations(found: Found) -> None:
    """As Trainer has it: eval_steps goes before logging_steps, and below 1 is a share of the steps."""
    asked, often = found.said.get("~evaluates"), found.said.get("~eval_steps")
    if asked is None:
        return _one_evaluation(found)
    if delay := found.said.get("~eval_delay"):
        found.problem(delay, "the first evaluation comes after the first eval_steps steps.\n  Set it to 0.")
    every = found.number("~eval_steps") or 0
    if often is None or every == 0:
        logged = found.whole("train.log_every") or LOGGING_STEPS
        return found.set("train.eval_every", logged, often or asked, "as logging_steps, since eval_steps isn't set")
    if every < 1:
        return _share_of_steps(found, often, every)
    if not float(every).is_integer():
        return found.problem(often, f"expected a whole number above 1, found {often.typed}.")
    return found.set("train.eval_every", int(every), often)


def _one_evaluation(found: Found) -> None:
    """Nobody asks for evaluations while training: do_eval asks for one behind it, and the best needs them."""
    steps = found.given.get("train.steps", found.value("train.steps"))
    after, best = found.said.get("~do_eval"), found.said.get("~best")
    if "train.eval_every" in found.given or "eval_strategy" in found.failed:
        return
    if after is not None and isinstance(steps, int):
        found.set("train.eval_every", steps, after, "one evaluation, after the last step")
    elif after is not None and "max_steps" not in found.failed:
        text = "an evaluation after the last step needs the number of steps."
        found.problem(after, f"{text}\n  Set eval_strategy: steps, which evaluates then too, or train.eval_every.")
    if best is not None:
        text = "evaluations tell which one is the best, and eval_strategy asks for none."
        found.problem(best, f"{text}\n  Set eval_strategy: steps, or train.eval_every.")


def _share_of_steps(found: Found, often: Setting, share: float) -> None:
    steps = found.given.get("train.steps", found.value("train.steps"))
    if isinstance(steps, int):
        found.set("train.eval_every", math.ceil(share * steps), often, f"of {steps} steps")
    elif "train.eval_every" not in found.given and "max_steps" not in found.failed:
        found.problem(often, "a share of the steps needs their number.\n  Set train.eval_every, or max_steps.")


def _saves(found: Found) -> None:
    if saves := found.said.get("~no_saves"):
        found.options.pop("checkpoint.every", None)
        found.set("checkpoint.every", None, saves)


def _data(found: Found) -> None:
    if source := found.said.get("~train_file"):
        found.set("data.source", "text", source)
        found.set("data.path", source.value, source)
