"""Memory and time on hardware that isn't here: `python -m portable_fsdp.plan --config=run.yaml --on=v5p:2x2x4`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from portable_fsdp.config.load import load_config
from portable_fsdp.config.schema import Config
from portable_fsdp.metrics.sinks import read_jsonl
from portable_fsdp.plan import report
from portable_fsdp.plan.hardware import Target, parse_target
from portable_fsdp.plan.planner import make_plan
from portable_fsdp.plan.result import Plan
from portable_fsdp.plan.sweep import PlanOf, Settings, Tried, nearest_that_fits, sweep, usual_axes
from portable_fsdp.plan.time import compare
from portable_fsdp.runtime.errors import EXIT_FINISHED, EXIT_USAGE, ConfigError, PortableFSDPError, UsageError

USAGE = """Does it fit, how many bytes on a device, how long at best: on hardware that you don't have.

  python -m portable_fsdp.plan --config=FILE --on=WHERE [key=value ...]

  --config  YAML file, as for portable_fsdp.launch
  --on      TPU slices: v5p:2x2x4, v6e-16, v5litepod-256, 2*v6e-256; GPUs: h100:8, a100-40gb:16; cpu:2
  --sweep   plan other settings too, and say which fit and which is fastest at best
  --over    a key to sweep with its values, as --over=train.micro_batch=1,2,4; may be given several times
  --compare a run's folder: what it took beside the bound
  --save    draw the plan, or the sweep, to a file (plan.png)
  --json    one JSON object
  section.key=value  overrides a key of the config

exit code: 0 for a plan, that of one that doesn't fit too; 2 usage or config error; 1 anything else; 130 for Ctrl-C"""

_EXIT_INTERRUPTED = 130  # 128 + SIGINT


def _define_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "YAML file", flag_values=values)
    flags.DEFINE_string("on", None, "hardware", flag_values=values)
    flags.DEFINE_boolean("sweep", False, "plan other settings too", flag_values=values)
    flags.DEFINE_multi_string("over", [], "key=value,value", flag_values=values)
    flags.DEFINE_string("compare", None, "a run's folder", flag_values=values)
    flags.DEFINE_string("save", None, "picture", flag_values=values)
    flags.DEFINE_boolean("json", False, "one JSON object", flag_values=values)
    return values


def main(argv: list[str]) -> int:
    """Plan what is asked for by the arguments after the program's name; returns the exit code."""
    if any(argument in ("--help", "-help", "-h", "--h") for argument in argv):
        print(USAGE)
        return EXIT_FINISHED
    values = _define_flags()
    try:
        overrides = values(["plan", *argv])[1:]
        _plan(values, overrides)
    except flags.Error as error:
        print(f"{error}\n\n{USAGE}", file=sys.stderr)
        return EXIT_USAGE
    except PortableFSDPError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return EXIT_FINISHED


def _plan(values: flags.FlagValues, overrides: list[str]) -> None:
    if values.config is None or values.on is None:
        raise ConfigError("plan: expected --config=FILE and --on=WHERE, as --on=v5p:2x2x4 or --on=h100:8.")
    target = parse_target(values.on)
    config = load_config(values.config, overrides)
    picture = None if values.save is None else _picture(values.save)
    measured = None if values.compare is None else _rows(Path(values.compare))

    def plan_of(settings: Settings) -> Plan:
        laid_over = [*overrides, *(f"{key}={value}" for key, value in settings.items())]
        return make_plan(load_config(values.config, laid_over), target, _say)

    if values.sweep or values.over:
        axes = _axes(values.over) or usual_axes(config, target.devices, scan=target.hardware.kind == "tpu")
        _sweep(axes, plan_of, as_json=values.json, picture=picture)
        return
    plan = plan_of({})
    comparison = None if measured is None else compare(plan.time, measured)
    if values.json:
        found: dict[str, Any] = plan.model_dump(mode="json")
        print(json.dumps(found | ({} if comparison is None else {"measured": comparison.model_dump(mode="json")})))
    else:
        print(report.text(plan))
        if comparison is not None:
            print(report.comparison_text(comparison))
        if plan.memory.verdict == "does not fit":
            print(_what_would_fit(config, target, plan_of))
    if picture is not None:
        report.draw([plan], [plan.on], picture)


def _sweep(axes: dict[str, list[str]], plan_of: PlanOf, *, as_json: bool, picture: Path | None) -> None:
    found: list[Tried] = []
    try:
        for tried in sweep(axes, plan_of):
            found.append(tried)
            _say(f"{len(found)}: " + " ".join(f"{key}={value}" for key, value in tried.settings.items()))
    except KeyboardInterrupt:
        _say("interrupted: what was planned until now")
    ranked = sorted((one for one in found if one.plan is not None), key=_rank)
    keys = [key for key, values in axes.items() if len(values) > 1] or list(axes)
    if as_json:
        print(json.dumps([_json_of(one) for one in found]))
    else:
        print(report.sweep_text(ranked, keys))
        for one in found:
            if one.plan is None:
                print(f"refused: {' '.join(f'{key}={one.settings[key]}' for key in keys)}: {one.refusal}")
    if picture is not None and ranked:
        labels = [", ".join(one.settings[key] for key in keys) for one in ranked]
        report.draw([one.plan for one in ranked if one.plan is not None], labels, picture)


def _rank(one: Tried) -> tuple[bool, float]:
    """What fits first, and of these what may be fastest."""
    plan = one.plan
    assert plan is not None
    return plan.memory.verdict == "does not fit", -(plan.time.tokens_per_second or 0.0)


def _json_of(one: Tried) -> dict[str, Any]:
    plan = None if one.plan is None else one.plan.model_dump(mode="json")
    return {"settings": one.settings, "plan": plan, "refusal": one.refusal or None}


def _what_would_fit(config: Config, target: Target, plan_of: PlanOf) -> str:
    """The nearest setting that does, found by planning it."""
    found = nearest_that_fits(config, plan_of, offload=target.hardware.kind == "cuda")
    if found is None or found.plan is None:
        return "None of gradient_checkpointing=full, micro_batch=1 and FULL_SHARD makes it fit: it takes more devices."
    changes = " ".join(f"{key}={value}" for key, value in found.settings.items())
    return f"It fits with {changes}: {found.plan.memory.peak_bytes / 2**30:.2f} GiB."


def _axes(texts: Sequence[str]) -> dict[str, list[str]]:
    axes: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or "." not in key or not values:
            raise ConfigError(f"--over={text}: expected a key with values, as --over=train.micro_batch=1,2,4.")
        axes[key] = values.split(",")
    return axes


def _picture(name: str) -> Path:
    """Refuse before minutes of planning what can't be drawn after them."""
    path = Path(name)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"--save={name}: expected a file that ends in .png, .pdf or .svg.")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--save={name}: expected a folder that exists, found none: {path.absolute().parent}")
    report.require_matplotlib()
    return path


def _rows(folder: Path) -> list[dict[str, Any]]:
    if not (folder / "metrics.jsonl").is_file():
        raise UsageError(f"--compare={folder}: expected a run's folder, found no metrics.jsonl in it.")
    return read_jsonl(folder / "metrics.jsonl")


def _say(stage: str) -> None:
    print(stage, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
