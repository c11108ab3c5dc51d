"""Rules over several keys: the batch, the length, the optimizer, evaluations and saves. Read first: `rules.py`."""

import math

from portable_fsdp.convert.facts import ForeignFacts, KeyEntry

LOGGING_STEPS = 500
"""Trainer's default of `logging_steps`, which `eval_steps` takes where it is not set."""


def _batch(facts: ForeignFacts) -> None:
    """global_batch = rows of a device * accumulation * devices, where the file sets all three."""
    rows, times = facts.keys.get("train.micro_batch"), facts.keys.get("~accumulate")
    accumulated = facts.integer("~accumulate") or 1
    source = times or rows
    if source is None or "train.global_batch" in facts.overridden or (rows is None and accumulated == 1):
        return
    devices = facts.numbers.get("num_processes")
    micro = facts.given.get("train.micro_batch", facts.value("train.micro_batch"))
    if rows is not None and facts.value("~spmd"):
        _batch_of_spmd(facts, rows, accumulated)
    elif isinstance(micro, int) and devices is not None:
        size = micro * accumulated * devices
        facts.set("train.global_batch", size, source, f"{micro} * {accumulated} * {devices} processes")
    elif "train.global_batch" not in facts.given and facts.can_read("num_processes", "per_device_train_batch_size"):
        text = "expected the number of devices too (num_processes) and per_device_train_batch_size.\n"
        facts.result.add_problem(source, f"{text}  Set train.global_batch: rows of a device * accumulation * devices.")


def _batch_of_spmd(facts: ForeignFacts, rows: KeyEntry, accumulated: int) -> None:
    """Under xla_fsdp_v2 one process feeds all devices: what Trainer calls the batch of a device is that of them all."""
    size = facts.integer("train.micro_batch") or 1
    devices = facts.numbers.get("num_processes")
    del facts.options["train.micro_batch"]
    facts.set("train.global_batch", size * accumulated, rows, "of all devices together, under xla_fsdp_v2")
    if devices and size % devices == 0:
        facts.set("train.micro_batch", size // devices, rows, f"of one of {devices} devices, under xla_fsdp_v2")
    elif "train.micro_batch" not in facts.given:
        text = f"under xla_fsdp_v2 these {size} rows are those of all devices together."
        facts.result.add_problem(rows, f"{text}\n  Set train.micro_batch: rows of one device.")


def _length(facts: ForeignFacts) -> None:
    """As in Trainer: max_steps takes precedence."""
    steps, epochs = facts.keys.get("train.steps"), facts.keys.get("train.epochs")
    if steps is not None and epochs is not None:
        remark = f"takes precedence over {epochs.key}: {epochs.text}, as in Trainer"
        facts.options["train.steps"] = steps._replace(remark=remark)
        del facts.options["train.epochs"]


def _warmup(facts: ForeignFacts) -> None:
    """As in Trainer: below 1 it is a share of the steps; steps take precedence over a share, unless they are 0.

    A constant schedule has none: `constant_with_warmup` has one.
    """
    warmup, ratio = facts.keys.get("~warmup"), facts.keys.get("~warmup_ratio")
    steps = facts.number("~warmup") or 0
    if facts.value("~constant") and "optim.schedule" not in facts.overridden:
        return
    if warmup is not None and 0 < steps < 1:
        _share_of_steps(facts, "optim.warmup_steps", steps, warmup)
    elif warmup is not None and (steps or ratio is None):
        facts.set("optim.warmup_steps", int(steps), warmup)
    elif ratio is not None:
        _share_of_steps(facts, "optim.warmup_steps", facts.number("~warmup_ratio") or 0, ratio)


def _share_of_steps(facts: ForeignFacts, option: str, share: float, source: KeyEntry) -> None:
    if option in facts.overridden:
        return
    if isinstance(facts.steps, int):
        facts.set(option, math.ceil(share * facts.steps), source, f"of {facts.steps} steps")
    elif option not in facts.given and facts.can_read("max_steps"):
        facts.result.add_problem(source, f"a share of the steps needs their number.\n  Set {option}, or max_steps.")


def _optimizer(facts: ForeignFacts) -> None:
    first, second = facts.keys.get("~beta1"), facts.keys.get("~beta2")
    if source := first or second:
        betas = [first.value if first else 0.9, second.value if second else 0.999]
        facts.set("optim.betas", betas, source, "" if first and second else "the other beta is Trainer's default")


def _evaluations(facts: ForeignFacts) -> None:
    """As in Trainer: eval_steps takes precedence over logging_steps, and below 1 is a share of the steps."""
    strategy, interval = facts.keys.get("~evaluates"), facts.keys.get("~eval_steps")
    if strategy is None:
        return _evaluation_at_the_end(facts)
    if delay := facts.keys.get("~eval_delay"):
        facts.result.add_problem(delay, "the first evaluation comes after the first eval_steps steps.\n  Set it to 0.")
    every = facts.number("~eval_steps") or 0
    if interval is None or every == 0:
        steps = facts.integer("train.log_every") or LOGGING_STEPS
        return facts.set(
            "train.eval_every", steps, interval or strategy, "as logging_steps, since eval_steps isn't set"
        )
    if every < 1:
        return _share_of_steps(facts, "train.eval_every", every, interval)
    if not float(every).is_integer():
        return facts.result.add_problem(interval, f"expected a whole number above 1, found {interval.text}.")
    return facts.set("train.eval_every", int(every), interval)


def _evaluation_at_the_end(facts: ForeignFacts) -> None:
    """Without eval_strategy: do_eval evaluates after the last step, and the best checkpoint needs an evaluation."""
    after, best = facts.keys.get("~do_eval"), facts.keys.get("~best")
    if "train.eval_every" in facts.given or not facts.can_read("eval_strategy"):
        return
    if after is not None and isinstance(facts.steps, int):
        facts.set("train.eval_every", facts.steps, after, "one evaluation, after the last step")
    elif after is not None and facts.can_read("max_steps"):
        text = "an evaluation after the last step needs the number of steps."
        facts.result.add_problem(
            after, f"{text}\n  Set eval_strategy: steps, which evaluates then too, or train.eval_every."
        )
    if best is not None:
        text = "the best checkpoint needs evaluations, which eval_strategy turns off."
        facts.result.add_problem(best, f"{text}\n  Set eval_strategy: steps, or train.eval_every.")


def _saves(facts: ForeignFacts) -> None:
    if saves := facts.keys.get("~no_saves"):
        facts.options.pop("checkpoint.every", None)
        facts.set("checkpoint.every", None, saves)


def _data(facts: ForeignFacts) -> None:
    if source := facts.keys.get("~train_file"):
        facts.set("data.source", "text", source)
        facts.set("data.path", source.value, source)


TRAINING = (_batch, _length, _warmup, _optimizer, _evaluations, _saves, _data)
