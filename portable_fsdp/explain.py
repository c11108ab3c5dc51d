"""What each engine does with each option: `python -m portable_fsdp.explain --config=run.yaml --device=tpu`.

Without a config it prints the whole table: each option, and when it is honoured, delegated or refused. It reads
backends/<engine>/options.py and config/rules.py, imports no torch and looks at no device.
"""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from portable_fsdp.backends.open import ENGINES, engines_on, options_of, require_names, usual_engine
from portable_fsdp.backends.support import require_supported, rules_of
from portable_fsdp.backends.verdicts import Verdict, effects_of, verdicts
from portable_fsdp.config.describe import expected, fields, key_name, nearest, option_names, shortened, yaml_value
from portable_fsdp.config.load import Loaded, read_config
from portable_fsdp.config.rules import Deployment, Effect, Rule
from portable_fsdp.config.schema import Config
from portable_fsdp.convert.facts import KeyEntry
from portable_fsdp.convert.launcher import check_launcher_facts
from portable_fsdp.convert.translation import origin, translation, unsaid
from portable_fsdp.optim.schedule import check_schedule
from portable_fsdp.runtime.command import IMPORT_HELP, CommandParser, Once, number_of, run_command, to_stdout
from portable_fsdp.runtime.errors import EXIT_FINISHED, ConfigError

DESCRIPTION = """What each engine does with each option of a config: honoured; delegated (it concerns speed alone, and
the engine decides); or refused, with the reason and the way out. Without --config: all options, all cases.
"""
EXIT_CODES = (
    "exit code: 0, or 2 for a usage or config error; a refused option is an answer, but an error under --strict"
)

WIDTH = 120


class Line(NamedTuple):
    """What engines do with an option: with any value, or in the case of `case`."""

    engines: tuple[str, ...]
    kind: str
    case: str
    text: str


def _parser() -> CommandParser:
    parser = CommandParser("explain", DESCRIPTION, epilog=EXIT_CODES)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="KEY|key=value",
        help="a key (optim.lr) or section (optim) to explain, or an override",
    )
    parser.add_argument(
        "--config", action=Once, metavar="FILE", help="YAML file, as for launch; an accelerate or Trainer config too"
    )
    parser.add_argument("--import", action="append", default=[], dest="imports", metavar="FILE", help=IMPORT_HELP)
    parser.add_argument("--write", metavar="FILE", help="save the result as our YAML, with the source of each key")
    parser.add_argument(
        "--device", default="auto", help="auto | cpu | cuda | tpu (default auto: cuda for native, tpu for the others)"
    )
    parser.add_argument(
        "--backend",
        default="auto",
        help="auto | native | xla | xla_fsdp1 (default auto: all engines of the device; under --strict its usual one)",
    )
    parser.add_argument("--num_devices", default="auto", help="auto | N: devices of each host (default auto: unknown)")
    parser.add_argument(
        "--num_hosts", default="auto", help="auto | N (default auto: 1 with --num_devices, else unknown)"
    )
    parser.switch(
        "--strict", "fail as launch would before it reads data, model and folders; needs --device and --config"
    )
    parser.switch("--json", "one JSON object")
    parser.switch("--schema", "the JSON schema of a config alone, for editors")
    return parser


def main(argv: list[str]) -> int:
    """Print the answer to the arguments after the program's name; returns the exit code."""

    def explain(options: argparse.Namespace) -> int:
        to_stdout(_schema_text() if options.schema else _explain(options))
        return EXIT_FINISHED

    return run_command(_parser(), argv, explain)


def _schema_text() -> str:
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}  # which pydantic writes
    return json.dumps({**dialect, **Config.model_json_schema()}, indent=2)


def _explain(options: argparse.Namespace) -> str:
    deployments = _deployments(options)
    if options.write == "":
        raise ConfigError("--write=: expected the name of a new YAML file, found none.")
    imports: list[str] = options.imports
    overrides = [word for word in options.words if "=" in word]
    requested = tuple(option for word in options.words if "=" not in word for option in _options_of(word))
    if options.strict:
        deployments = [_sole_deployment(options, deployments)]
    if options.config is None and not imports:
        if overrides:
            raise ConfigError(f"override '{overrides[0]}': expected --config too.")
        if options.write:
            raise ConfigError(f"--write={options.write}: expected --config or --import too.")
        table = {option: list(_lines_of(option, deployments)) for option in requested or option_names()}
        return _json_of_table(table) if options.json else _text_of_table(table, documented=bool(requested))
    loaded = read_config(
        options.config or imports[0], overrides, imports if options.config else imports[1:], os.environ
    )
    if options.strict:
        _require_accepted(loaded, deployments[0])
    if options.write:
        _write(Path(options.write), translation(loaded))
    shown = requested or option_names()
    judged = {d: [v for v in verdicts(loaded.config, d) if v.option in shown] for d in deployments}
    return _json_of_config(judged, loaded) if options.json else _text_of_config(judged, loaded, bool(requested))


def _options_of(word: str) -> tuple[str, ...]:
    """The options that a word names: one key, or all keys of a section. Raises ConfigError for an unknown one."""
    inside = {key_name(key): key_name(key[:2]) for key, _ in fields() if len(key) > 2}  # of a key that is a mapping
    word = inside.get(word, word)
    options = tuple(option for option in option_names() if option == word or option.startswith(f"{word}."))
    if not options:
        raise ConfigError(f"{word}: unknown key; {nearest(tuple(word.split('.')))}.")
    return options


def _documentation(option: str) -> str:
    """Meaning, values and default of a key, and of the keys of mappings inside it."""
    lines: list[str] = []
    for key, field in fields():
        if len(key) > 1 and key_name(key[:2]) == option:
            values = expected(field)
            if not field.is_required():
                values += f"; default {yaml_value(field.get_default(call_default_factory=True))}"
            text = f"{key_name(key[2:])}: " * (len(key) > 2) + f"{field.description} ({values})"
            lines.append(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(lines)


def _write(path: Path, text: str) -> None:
    """Raises ConfigError where the file exists, or can't be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--write={path}: expected a new file, found one.\n  Name another, or remove it.") from None
    except OSError as error:
        raise ConfigError(f"--write={path}: can't be written: {error.strerror}.") from None


# ----------------------------------------------------------------------------------------------------- deployments


def _deployments(options: argparse.Namespace) -> list[Deployment]:
    """One per engine that the flags select. Raises ConfigError where they select none."""
    require_names(options.device, options.backend)
    engines = tuple(ENGINES) if options.device == "auto" else engines_on(options.device)
    if options.backend != "auto" and options.backend not in engines:
        raise ConfigError(
            f"backend {options.backend} on {options.device}: expected an engine of that device: {', '.join(engines)}."
        )
    per_host, hosts = number_of("num_devices", options.num_devices), number_of("num_hosts", options.num_hosts)
    hosts = hosts or (1 if per_host else None)
    devices = per_host * hosts if per_host and hosts else None
    chosen = [engine for engine in engines if options.backend in ("auto", engine)]
    device_of = {e: options_of(e).example_device if options.device == "auto" else options.device for e in chosen}
    return [Deployment(engine, device_of[engine], devices, hosts) for engine in chosen]


def _sole_deployment(options: argparse.Namespace, deployments: list[Deployment]) -> Deployment:
    """Where launch would run with these flags. Raises ConfigError where that depends on the devices of a host."""
    if options.device == "auto":
        raise ConfigError("--strict: expected --device=cpu, cuda or tpu: auto depends on the host of the run.")
    if options.config is None:
        raise ConfigError("--strict: expected --config too, as portable_fsdp.launch does.")
    engine = usual_engine(options.device) if options.backend == "auto" else options.backend
    return next(d for d in deployments if d.engine == engine)


def _require_accepted(loaded: Loaded, deployment: Deployment) -> None:
    """Raises what a run there would raise about its config alone."""
    if loaded.config.train.steps is not None:  # else the steps follow from the data
        check_schedule(loaded.config.optim, loaded.config.train.steps)
    # As torchrun sets it in the run's environment; on a slice an accelerate file doesn't count the hosts.
    hosts = {"GROUP_WORLD_SIZE": str(deployment.hosts)} if deployment.hosts and deployment.device != "tpu" else {}
    environ = {**os.environ, **hosts}
    check_launcher_facts(loaded.imports, processes=deployment.devices, environ=environ, device=deployment.device)
    require_supported(loaded.config, deployment)


# ------------------------------------------------------------------------------------------------------- a config


def _text_of_config(judged: dict[Deployment, list[Verdict]], loaded: Loaded, documented: bool) -> str:
    deployments = list(judged)
    lines = [", ".join(f"{d.engine} on {d.device}" for d in deployments) + _counts(deployments[0]), ""]
    for row in zip(*judged.values(), strict=True):
        lines += _value_and_origin(row[0].option, row[0].value, origin(loaded, row[0].option))
        if documented:
            lines.append(_documentation(row[0].option))
        same: dict[tuple[str, str], list[str]] = {}
        for deployment, verdict in zip(deployments, row, strict=True):
            same.setdefault((verdict.kind, verdict.text), []).append(deployment.engine)
        for (kind, text), engines in same.items():
            lines.append(_entry(tuple(engines), kind, text, len(deployments)))
    for imported in loaded.imports:
        lines += ["", *unsaid(imported)]
    return "\n".join(lines)


def _value_and_origin(option: str, value: object, where: str) -> list[str]:
    line = f"{option} = {shortened(yaml_value(value), WIDTH - len(option) - 3)}"
    if len(line) + len(where) + 4 <= WIDTH:
        return [f"{line}  # {where}"]
    return [line, textwrap.fill(where, WIDTH, initial_indent="  # ", subsequent_indent="  #   ")]


def _counts(deployment: Deployment) -> str:
    if deployment.devices is None:
        return "; rules about the number of devices don't apply without --num_devices"
    return f"; {deployment.devices} device(s) of {deployment.hosts} host(s)"


def _entry(engines: tuple[str, ...], kind: str, text: str, shown: int) -> str:
    who = "all engines" if len(engines) == shown > 1 else ", ".join(engines)
    return textwrap.fill(f"{who:<18} {kind:<10} {text}", WIDTH, initial_indent="  ", subsequent_indent=" " * 32)


def _json_of_config(judged: dict[Deployment, list[Verdict]], loaded: Loaded) -> str:
    options = {
        row[0].option: {
            "value": row[0].value,
            "origin": origin(loaded, row[0].option),
            "engines": {
                d.engine: {"verdict": verdict.kind, "text": verdict.text}
                for d, verdict in zip(judged, row, strict=True)
            },
        }
        for row in zip(*judged.values(), strict=True)
    }
    imports = [
        {
            "path": str(imported.path),
            "launcher": [_json_of_key(entry) for entry in imported.launcher],
            "not_needed": [_json_of_key(entry) for entry in imported.not_needed],
        }
        for imported in loaded.imports
    ]
    places = [{"engine": d.engine, "device": d.device, "devices": d.devices, "hosts": d.hosts} for d in judged]
    return json.dumps({"places": places, "options": options, "imports": imports}, indent=2)


def _json_of_key(entry: KeyEntry) -> dict[str, str]:
    values = (entry.key, entry.text, entry.where, entry.remark, entry.fact)
    return dict(zip(("key", "typed", "where", "reason", "fact"), values, strict=True))


# ------------------------------------------------------------------------------------------------------ the table


def _lines_of(option: str, deployments: list[Deployment]) -> Iterator[Line]:
    """The effects and rules of an option on these engines; one line where engines share it."""
    engines_of: dict[Effect | Rule, list[str]] = {}
    for tables in (effects_of, rules_of):
        for deployment in deployments:
            for row in tables(deployment.engine):
                engines_of.setdefault(row, []).append(deployment.engine)
    for row, engines in engines_of.items():
        if isinstance(row, Rule):
            if row.option == option:
                when = "" if row.when else " (checked when the model is built)"
                yield Line(tuple(engines), "refused", row.case, row.reason + when)
        elif cases := [name.partition("=")[2] for name in row.options if name.partition("=")[0] == option]:
            yield Line(tuple(engines), row.kind, ", ".join(case for case in cases if case), row.what)


def _text_of_table(table: dict[str, list[Line]], *, documented: bool) -> str:
    shown = len({engine for lines in table.values() for line in lines for engine in line.engines})
    text: list[str] = []
    for option, lines in table.items():
        text.append(option)
        text += [_documentation(option)] if documented else []
        text += [
            _entry(line.engines, line.kind, f"{line.case}: {line.text}" if line.case else line.text, shown)
            for line in lines
        ]
    return "\n".join(text)


def _json_of_table(table: dict[str, list[Line]]) -> str:
    return json.dumps(
        {"options": {option: [line._asdict() for line in lines] for option, lines in table.items()}}, indent=2
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
