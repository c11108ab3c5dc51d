"""Show what each engine does with each option: `python -m portable_fsdp.explain --config=run.yaml --device=tpu`.

Without a config it prints the whole table: each option, and when it is honoured, delegated or refused. It reads
config/schema.py, backends/refusals.py and backends/<engine>/options.py, without importing torch or opening a device.
Only `--rows` imports torch and reads the data.
"""

import argparse
import json
import math
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from portable_fsdp.backends.open import ENGINES, engines_on, require_names, spec_of, usual_engine
from portable_fsdp.backends.refusals import Deployment, Verdict, lines_of, require_supported, verdicts
from portable_fsdp.config.describe import (
    description_of,
    expected,
    fields,
    key_name,
    nearest,
    option_names,
    shortened,
    value_of,
    yaml_value,
)
from portable_fsdp.config.load import Loaded
from portable_fsdp.config.schema import Config
from portable_fsdp.convert.facts import Import
from portable_fsdp.convert.read import read_config
from portable_fsdp.convert.table import flag_hint
from portable_fsdp.layout import describe_mesh, mesh_axes
from portable_fsdp.optim.optimizer import check_schedule
from portable_fsdp.runtime.command import CommandParser, at_least, configure_log, number_of, run_command, to_stdout
from portable_fsdp.runtime.errors import EXIT_FINISHED, ConfigError

DESCRIPTION = """Show what each engine does with each option of a config: honoured; delegated (it affects only speed,
and the engine decides); or refused, with the reason and a fix. Without --config: all options, all cases.
"""
EXIT_CODES = (
    "exit code: 0, or 2 for a usage or config error; a refused option is an answer, but an error under --strict"
)
FLAGS = {
    "device": "auto | cpu | cuda | tpu (default auto: cuda for native, tpu for the others)",
    "backend": "auto | native | xla | xla_fsdp1 (default auto: all engines of the device; --strict: the default one)",
    "num_devices": "auto | N: devices per host (default auto: unknown)",
    "num_hosts": "auto | N (default auto: 1 with --num_devices, else unknown)",
}
STRICT = "fail if launch would refuse the config before reading data, model and folders; needs --device, --config"
WIDTH = 120
NOT_OF_ROWS = ("data.cache_dir", "data.workers")

Answers = dict[str, dict[Verdict, list[str]]]
"""Option -> verdict -> the engines with this verdict."""


def _parser() -> CommandParser:
    parser = CommandParser("explain", DESCRIPTION, epilog=EXIT_CODES)
    parser.foreign_hint = flag_hint
    add = parser.add_argument
    words = "a key (optim.lr) or section (optim) to explain, or an override"
    add("words", nargs="*", metavar="KEY|key=value", help=words)
    parser.config_flags("YAML file, as for launch; an accelerate or Trainer config too")
    add("--write", metavar="FILE", help="save the result as our YAML, with the source of each key")
    add("--rows", type=at_least(1, int), metavar="N", help="print the first N rows as they are trained; reads the data")
    parser.auto_flags(FLAGS)
    parser.switch("--all", "print all options; default: those of the config that are set or refused")
    parser.switch("--strict", STRICT)
    parser.switch("--json", "print one JSON object")
    parser.switch("--schema", "print only the JSON schema of a config, for editors")
    return parser


def main(argv: list[str]) -> int:
    """Run `explain` with the arguments after the program's name; returns the exit code."""

    def explain(options: argparse.Namespace) -> int:
        to_stdout(_explain(options))
        return EXIT_FINISHED

    return run_command(_parser(), argv, explain)


def _explain(options: argparse.Namespace) -> str:
    if options.schema:
        dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}  # pydantic's dialect
        return json.dumps({**dialect, **Config.model_json_schema()}, indent=2)
    deployments = _deployments(options)
    if options.rows:
        return _rows(options)
    overrides = [word for word in options.words if "=" in word]
    requested = tuple(option for word in options.words if "=" not in word for option in _options_of(word))
    if options.strict:
        deployments = [_sole_deployment(options, deployments)]
    files: list[str] = [*filter(None, [options.config]), *options.imports]
    devices = number_of("num_devices", options.num_devices)
    loaded = read_config(files[0], overrides, files[1:], os.environ, devices=devices) if files else None
    if loaded is None and overrides:
        raise ConfigError(f"override '{overrides[0]}': needs --config.")
    if options.write == "":
        raise ConfigError("--write=: empty; name a new YAML file.")
    if loaded is None and options.write is not None:
        raise ConfigError(f"--write={options.write}: needs --config or --import.")
    if loaded is not None and options.strict:
        _require_accepted(loaded, deployments[0])
    if loaded is not None and options.write is not None:
        _write(Path(options.write), translation(loaded))
    answers = _answers(requested or option_names(), deployments, loaded)
    if options.json:
        return json.dumps(_json(answers, deployments, loaded), indent=2, default=lambda part: part.model_dump())
    if loaded is None:
        return "\n".join(_text(answers, deployments, bool(requested), None))
    where = ", ".join(f"{d.engine} on {d.device}" for d in deployments) + _counts(deployments[0], loaded)
    shown = answers if requested or options.all else _set_or_refused(answers, loaded)
    lines = _text(shown, deployments, bool(requested), loaded)
    summary = [] if requested else [_summary(answers, shown, loaded)]
    also = [line for imported in loaded.imports for line in ("", *unsaid(imported))]
    return "\n".join([where, *summary, "", *lines, *also])


def _rows(options: argparse.Namespace) -> str:
    """The first rows of the run that --config describes. Reads and tokenizes its data, as a run does."""
    from portable_fsdp.data.build import CONTEXT, COUNTS, build_data, rows_in_text
    from portable_fsdp.data.document_rows import padding_in_words
    from portable_fsdp.train.preflight import fit_packing

    if options.config is None or options.json or options.strict or options.write:
        raise ConfigError("--rows: needs --config, and no --json, --strict or --write.")
    configure_log(0)  # the log names columns that are left out
    devices = number_of("num_devices", options.num_devices) or 1  # rows don't depend on them
    loaded = read_config(options.config, options.words, options.imports, os.environ, devices=devices)
    config, problem = fit_packing(loaded.config)
    corpus = build_data(config.data, config.model)
    keys = [line for option in _keys_of_rows(loaded) for line in _value_and_origin(option, loaded)]
    legend = f"Tokens that count in the loss follow `{COUNTS}`, all others `{CONTEXT}`."
    if problem:
        keys += ["", f"{problem}. Each row holds one document: {padding_in_words(corpus.rows, config.run.seed)}."]
    return "\n".join([*keys, "", legend, *rows_in_text(corpus, config.run.seed, options.rows)])


def _keys_of_rows(loaded: Loaded) -> Iterator[str]:
    """Yield the options that shape the rows: those that are set, and those that always do."""
    data, always = loaded.config.data, ["data.seq_len", "data.packing", "data.tokenizer"]
    always += [] if data.mixture else ["data.source", "data.format"]
    of_tokenizer = ("model.pretrained", "model.gguf_file") if data.tokenizer == "auto" else ()
    for option in option_names():
        is_of_rows = option in (*of_tokenizer, "run.seed") or option.startswith("data.")
        is_set = option in loaded.origins and is_of_rows and option not in NOT_OF_ROWS
        if is_set or (option in always and not data.factory):
            yield option


def _answers(options: tuple[str, ...], deployments: Sequence[Deployment], loaded: Loaded | None) -> Answers:
    answers: Answers = {option: {} for option in options}
    for place in deployments:
        table = (line for option in options for line in lines_of(place.engine, option))
        for line in table if loaded is None else verdicts(loaded.config, place):
            if line.option in answers:
                answers[line.option].setdefault(line, []).append(place.engine)
    return answers


def _options_of(word: str) -> tuple[str, ...]:
    """Return the options that a word names: one key, or all keys of a section. Raises ConfigError if unknown."""
    inside = {key_name(key): key_name(key[:2]) for key, _ in fields() if len(key) > 2}  # keys inside mappings
    word = inside.get(word, word)
    options = tuple(option for option in option_names() if option == word or option.startswith(f"{word}."))
    if not options:
        raise ConfigError(f"{word}: unknown key; {nearest(tuple(word.split('.')))}.")
    return options


def _documentation(option: str) -> Iterator[str]:
    """Yield meaning, values and default of a key, and of the keys of mappings inside it."""
    for key, field in fields():
        if len(key) > 1 and key_name(key[:2]) == option:
            values = expected(field)
            if not field.is_required():
                values += f"; default {yaml_value(field.get_default(call_default_factory=True))}"
            text = f"{key_name(key[2:])}: " * (len(key) > 2) + f"{field.description} ({values})"
            yield textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _write(path: Path, text: str) -> None:
    """Write a new file. Raises ConfigError if it exists or can't be written."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"--write={path}: the file exists; name a new one, or remove it.") from None
    except OSError as error:
        raise ConfigError(f"--write={path}: can't be written: {error.strerror}.") from None


# ----------------------------------------------------------------------------------------------------- deployments


def _deployments(options: argparse.Namespace) -> list[Deployment]:
    """Return one deployment per engine that the flags select. Raises ConfigError if they select none."""
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
    device_of = {e: spec_of(e).example_device if options.device == "auto" else options.device for e in chosen}
    return [Deployment(engine, device_of[engine], devices, hosts) for engine in chosen]


def _sole_deployment(options: argparse.Namespace, deployments: list[Deployment]) -> Deployment:
    """Return the deployment of `launch` with these flags. Raises ConfigError if it depends on the host's devices."""
    if options.device == "auto":
        raise ConfigError("--strict: needs --device=cpu, cuda or tpu: auto depends on the host of the run.")
    if options.config is None:
        raise ConfigError("--strict: needs --config, as portable_fsdp.launch does.")
    engine = usual_engine(options.device) if options.backend == "auto" else options.backend
    return next(d for d in deployments if d.engine == engine)


def _require_accepted(loaded: Loaded, deployment: Deployment) -> None:
    """Raise the errors that a run on this deployment would raise about its config alone."""
    if loaded.config.train.steps is not None:  # else the steps follow from the data
        check_schedule(loaded.config.optim, loaded.config.train.steps)
    require_supported(loaded.config, deployment)


# --------------------------------------------------------------------------------------------------------- answers


def _text(answers: Answers, deployments: list[Deployment], documented: bool, loaded: Loaded | None) -> Iterator[str]:
    """Yield the lines of each option, refusals last; with its value if a config is `loaded`."""
    for option, lines in answers.items():
        yield from [option] if loaded is None else _value_and_origin(option, loaded)
        if documented:
            yield from _documentation(option)
        for line, engines in sorted(lines.items(), key=lambda item: item[0].kind == "refused"):
            who = "all engines" if len(engines) == len(deployments) > 1 else ", ".join(engines)
            text = "" if documented and line.text == description_of(option) else line.text
            words = f"{who:<18} {line.kind:<10} {f'{line.case}: ' * bool(line.case)}{text}"
            yield textwrap.fill(words, WIDTH, initial_indent="  ", subsequent_indent=" " * 32)


def _set_or_refused(answers: Answers, loaded: Loaded) -> Answers:
    """The options that somebody set, and those that an engine refuses; the refused ones first."""
    refused, is_set = _with_verdict(answers, "refused"), [option for option in answers if option in loaded.origins]
    return {option: answers[option] for option in dict.fromkeys([*refused, *is_set])}


def _with_verdict(answers: Answers, kind: str) -> list[str]:
    return [option for option, lines in answers.items() if any(line.kind == kind for line in lines)]


def _summary(answers: Answers, shown: Answers, loaded: Loaded) -> str:
    counts = {"set": [option for option in answers if option in loaded.origins]}
    counts |= {kind: _with_verdict(answers, kind) for kind in ("refused", "delegated")}
    text = ", ".join(f"{len(options)} {kind}" for kind, options in counts.items())
    hidden = len(answers) - len(shown)
    return f"{len(answers)} options: {text}" + (f"; --all prints the {hidden} other defaults too" if hidden else "")


def _value_and_origin(option: str, loaded: Loaded) -> list[str]:
    value, where = yaml_value(value_of(loaded.config, option)), origin(loaded, option)
    line = f"{option} = {shortened(value, WIDTH - len(option) - 3)}"
    if len(line) + len(where) + 4 <= WIDTH:
        return [f"{line}  # {where}"]
    return [line, textwrap.fill(where, WIDTH, initial_indent="  # ", subsequent_indent="  #   ")]


def _counts(deployment: Deployment, loaded: Loaded) -> str:
    if deployment.devices is None:
        return "; rules about the number of devices don't apply without --num_devices"
    hosts = deployment.hosts or 1
    axes = mesh_axes(loaded.config, deployment.devices, hosts)
    mesh = f": {describe_mesh(axes, hosts)}" if math.prod(axes.values()) == deployment.devices else ""  # else refused
    return f"; {deployment.devices} device(s) of {hosts} host(s){mesh}"


def _json(answers: Answers, deployments: list[Deployment], loaded: Loaded | None) -> dict[str, object]:
    if loaded is None:
        rows = {
            option: [
                {"engines": engines, "kind": line.kind, "case": line.case, "text": line.text}
                for line, engines in lines.items()
            ]
            for option, lines in answers.items()
        }
        return {"options": rows}
    options = {
        option: {
            "value": value_of(loaded.config, option),
            "origin": origin(loaded, option),
            "engines": {
                d.engine: {"verdict": line.kind, "text": line.text}
                for d in deployments
                for line, engines in lines.items()
                if d.engine in engines
            },
        }
        for option, lines in answers.items()
    }
    places = [{"engine": d.engine, "device": d.device, "devices": d.devices, "hosts": d.hosts} for d in deployments]
    return {"places": places, "options": options}


# ------------------------------------------------------------------------------------------------------- imports


def translation(loaded: Loaded) -> str:
    """Format every option that is set as YAML; `load_config` reads it back to an equal Config.

    A comment above each key gives its origin; comments at the end list the imported keys that set no option.
    """
    lines: list[str] = []
    set_options = (option for option in option_names() if option in loaded.origins)
    for section, options in groupby(set_options, lambda option: option.partition(".")[0]):
        lines += ["", f"{section}:"]
        for option in options:
            lines += [f"  # {line}" for line in origin(loaded, option).splitlines()]
            lines.append(f"  {option.partition('.')[2]}: {yaml_value(value_of(loaded.config, option))}")
    for imported in loaded.imports:
        lines += ["", *(f"# {line}" for line in unsaid(imported))]
    return "\n".join(lines).lstrip("\n") + "\n"


def origin(loaded: Loaded, option: str) -> str:
    """Return `accelerate.yaml:12: mixed_precision: bf16 (why)`, or just file:line, or the override."""
    where = loaded.origins.get(option, "default")
    for imported in loaded.imports:
        setting = imported.settings.get(option)
        if setting is not None and setting.origin == where:
            return setting.quote + (f" ({setting.remark})" if setting.remark else "")
    return where


def unsaid(imported: Import) -> Iterator[str]:
    """Yield a line for each imported key that sets no option: the launcher decides it, or it isn't needed."""
    for title, keys in (("the launcher decides", imported.launcher), ("sets nothing", imported.not_needed)):
        if keys:
            yield f"{imported.path}: {title}:"
        for note in keys:
            line = f"{note.where.rpartition(':')[2]}: " if note.where != str(imported.path) else ""
            yield f"  {line}{note.key}: {' '.join(note.text.split())}: {note.remark}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
