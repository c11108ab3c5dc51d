"""Memory and time on absent hardware: `python -m portable_fsdp.plan --config=run.yaml --on=v5p:2x2x4`."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from portable_fsdp.config.describe import Settings, autos, with_value
from portable_fsdp.config.schema import Config
from portable_fsdp.convert.read import read_config
from portable_fsdp.convert.table import flag_hint
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.plan import planner, result
from portable_fsdp.plan.planner import PlanOf
from portable_fsdp.plan.result import Plan, Tried
from portable_fsdp.plan.target import Target, parse_target, with_memory
from portable_fsdp.plan.time import compare
from portable_fsdp.runtime.child import Worker
from portable_fsdp.runtime.command import CommandParser, at_least, run_command, to_stderr, to_stdout
from portable_fsdp.runtime.errors import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    ConfigError,
    UsageError,
)
from portable_fsdp.runtime.signals import end_with_parent, exit_on_signals

DESCRIPTION = """Plan a run on hardware that you don't have: whether it fits, memory by part, step time."""
EXIT_CODES = """exit code: 0 for a plan, whether it fits or not; 2 usage or config error, every plan of --over refused,
or no micro batch fits; 1 any other error; 130 for Ctrl-C"""


def _parser() -> CommandParser:
    parser = CommandParser("plan", DESCRIPTION, epilog=EXIT_CODES)
    parser.foreign_hint = flag_hint
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="overrides a key of the config")
    parser.config_flags("YAML file, as for portable_fsdp.launch")
    slices, gpus = "TPU slices: v5p:2x2x4, v6e-16, v5litepod-256, 2*v6e-256", "GPUs: h100:8, a100-40gb:16"
    add("--on", metavar="WHERE", help=f"{slices}; {gpus}; cpu:2")
    engines = "on TPUs xla (auto), or native: TorchTPU, a lower bound"
    add("--backend", default="auto", metavar="ENGINE", help=engines)
    memory = "memory of a device; overrides the known figure"
    add("--memory", metavar="GiB", type=at_least(0, float), help=memory)
    axis = "plan each of a key's values, as in --over=train.micro_batch=1,2,4; several keys: all combinations"
    add("--over", action="append", default=[], metavar="key=value,...", help=axis)
    add("--compare", metavar="RUN", help="a run's folder: print its measured figures beside the planned ones")
    parser.switch("--json", "one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Run the command with the arguments after the program's name; return the exit code."""

    def plan(options: argparse.Namespace) -> int:
        with Worker() as worker:
            return _plan(options, worker)

    return run_command(_parser(), argv, plan)


def _plan(options: argparse.Namespace, worker: Worker) -> int:
    if options.config is None or options.on is None:
        raise ConfigError("plan: --config=FILE and --on=WHERE are required, as in --on=v5p:2x2x4 or --on=h100:8.")
    if options.over and options.compare is not None:
        raise UsageError("--compare: needs a single plan.\n  Leave out --over.")
    target = parse_target(options.on)
    if options.memory is not None:
        target = with_memory(target, options.memory)

    def config_of(settings: Settings) -> Config:
        swept = [f"{key}={value}" for key, value in settings.items()]
        return read_config(options.config, [*options.overrides, *swept], options.imports, devices=target.devices).config

    def plan_of(settings: Settings) -> Plan:
        return planner.make_plan(config_of(settings), target, worker, to_stderr, backend=options.backend)

    def best(settings: Settings) -> Tried:
        """Plan a point of the grid, with the values that `auto` takes there."""
        config = config_of(settings)
        found = planner.fastest_that_fits(config, target, lambda more: plan_of(settings | more), worker, to_stderr)
        return Tried(settings=settings | found.settings, plan=found.plan)

    if not options.over:
        return _one(options, config_of({}), target, best, plan_of)
    points = planner.grid(_axes(options.over))
    for settings in points:
        config_of(settings)  # raises for an unknown key before the first plan
    return _sweep(points, best, as_json=options.json)


def _one(
    options: argparse.Namespace, config: Config, target: Target, best: Callable[[Settings], Tried], plan_of: PlanOf
) -> int:
    rows = _rows(Path(options.compare)) if options.compare else []
    comparison = None
    if options.compare and not config.data.factory:  # before a long plan: another run is refused
        comparison = compare(rows, config.train.global_batch * config.data.seq_len)
    tried, is_search = best({}), bool(autos(config))
    plan, is_chosen = cast(Plan, tried.plan), is_search and tried.fits
    if options.compare and config.data.factory:  # only the plan knows the tokens
        comparison = compare(rows, plan.tokens_per_step)
    if not options.json:
        to_stdout(f"auto chooses {tried.words}\n\n{result.text(plan)}" if is_chosen else result.text(plan))
    measures: list[Tried] = []
    if plan.memory.verdict == "does not fit" and not plan.memory.is_least:  # a lower bound can't show that a plan fits
        planned = config
        for key in ("train.micro_batch", "memory.gradient_checkpointing"):
            planned = with_value(planned, key, plan.settings[key])
        is_gpu = target.hardware.kind == "cuda"
        measures = list(planner.nearest_that_fits(planned, lambda more: plan_of(tried.settings | more), offload=is_gpu))
    if options.json:
        rest = {
            "measures": [measure.model_dump(mode="json") for measure in measures],
            "measured": None if comparison is None else comparison.model_dump(mode="json"),
            "chosen": tried.settings if is_chosen else None,
        }
        to_stdout(json.dumps(plan.model_dump(mode="json") | rest))
    elif comparison is not None:
        to_stdout(result.comparison_text(plan, comparison))
    if measures:
        (to_stderr if options.json else to_stdout)(result.measures_text(measures))
    return EXIT_USAGE if is_search and not tried.fits else EXIT_FINISHED


def _sweep(points: list[Settings], best: Callable[[Settings], Tried], *, as_json: bool) -> int:
    left_out, results = list(points), list[Tried]()
    is_complete = True
    try:
        for settings, tried in planner.sweep(points, best):
            left_out.remove(settings)
            results.append(tried)
            to_stderr(f"{len(results)} of at most {len(points)}: {tried.line}")
    except KeyboardInterrupt:
        to_stderr("interrupted: the plans so far")
        is_complete = False
    keys = list(dict.fromkeys(key for tried in results for key in tried.settings))
    planned = sorted(((tried, tried.plan) for tried in results if tried.plan), key=lambda pair: _rank(pair[1]))
    if as_json:
        plans = [tried.model_dump(mode="json") for tried in results]
        to_stdout(json.dumps({"schema_version": 1, "complete": is_complete, "plans": plans, "left_out": left_out}))
    else:
        to_stdout(result.sweep_text([tried for tried, _ in planned], keys))
        if left_out and is_complete:
            to_stdout(f"left out: {len(left_out)} with a larger train.micro_batch than one that does not fit")
        for reason in sorted({tried.refusal for tried in results if tried.refusal is not None}):
            group = [f"  {tried.words}" for tried in results if tried.refusal == reason]
            to_stdout("\n".join(["refused:", *group, reason]))
    if not is_complete:
        return EXIT_INTERRUPTED
    return EXIT_FINISHED if planned else EXIT_USAGE


def _rank(plan: Plan) -> tuple[bool, float, int]:
    """Sort key: plans that fit first, then the fastest, then the smallest memory."""
    rate = plan.expected_tokens_per_second_per_device or 0.0
    return plan.memory.verdict == "does not fit", -rate, plan.memory.peak_bytes


def _axes(texts: Sequence[str]) -> dict[str, list[str]]:
    axes: dict[str, list[str]] = {}
    for word in texts:
        key, equals, values = word.partition("=")
        if key in axes:
            raise ConfigError(f"--over={word}: {key} has values already; name all in one --over.")
        split = re.split(r",(?![^\[{]*[\]}])", values)  # but not at commas inside a list or a mapping
        axes[key] = [*dict.fromkeys(split)]
        if not equals or "." not in key or not all(split):
            raise ConfigError(f"--over={word}: expected a key with values, as in --over=train.micro_batch=1,2,4.")
    return axes


def _rows(folder: Path) -> list[dict[str, Any]]:
    """Read the rows of a run's metrics.jsonl."""
    if not (folder / "metrics.jsonl").is_file():
        raise UsageError(f"--compare={folder}: no metrics.jsonl in this folder; name a run's folder.")
    try:
        return read_jsonl(folder / "metrics.jsonl", folder)
    except OSError as error:
        raise UsageError(f"--compare={folder}: metrics.jsonl can't be read: {error.strerror}.") from None


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].isdecimal():  # child process of a run, see runtime/child.py
        end_with_parent(int(sys.argv.pop(1)))
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
