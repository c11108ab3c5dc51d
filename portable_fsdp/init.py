"""Write a first config by six questions: `python -m portable_fsdp.init --model=FOLDER --data=chats.jsonl`.

It reads the model's config and tokenizer, not its weights, and the first rows of the data; it plans as `auto` does.
"""

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from portable_fsdp.backends.open import count_devices, resolve
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.config.data import Data
from portable_fsdp.config.describe import Settings, option_names, yaml_value
from portable_fsdp.config.load import make_config
from portable_fsdp.config.schema import Config, Model
from portable_fsdp.config.yaml_text import parse
from portable_fsdp.convert.read import load_config
from portable_fsdp.data.examples import Broken, Example
from portable_fsdp.data.records import first_rows_of_hub
from portable_fsdp.data.sources import EXAMPLES, open_source
from portable_fsdp.optim.optimizer import check_schedule
from portable_fsdp.plan import planner, result
from portable_fsdp.plan.result import Plan, Tried
from portable_fsdp.plan.target import Target, parse_target, with_memory
from portable_fsdp.runtime.child import Worker
from portable_fsdp.runtime.command import CommandParser, run_command, to_stderr, to_stdout
from portable_fsdp.runtime.errors import EXIT_FINISHED, ConfigError, DataError, PortableFSDPError, UsageError
from portable_fsdp.runtime.host import host_memory_bytes
from portable_fsdp.runtime.hub import CONFIG_FILES, TOKENIZER_FILES, is_hub_id, local_folder
from portable_fsdp.runtime.signals import exit_on_signals

if TYPE_CHECKING:
    from portable_fsdp.data.tokenize import Tokenizer

DESCRIPTION = """Write a first config that fits: six answers, as flags or on a terminal.

On a terminal it asks for each answer that no flag gives. Without one, --model and --data are required, else the exit
code is 2; the other answers have defaults. It downloads configs, tokenizers and first rows only, after a yes."""
EXIT_CODES = "exit code: 0; 2 usage error, rows or a model that can't train, or nothing fits; 130 for Ctrl-C"
QUESTIONS = {
    "model": "the model: a Hugging Face folder, or a hub name (org/name)",
    "data": "the data: a file or glob (.jsonl, .json, .parquet, .txt), a folder of them, or a hub data set (org/name)",
    "train": "what trains: all, lora (adapters) or qlora (adapters over a base in 4 bits)",
    "devices": "where: here, or as for plan --on: cpu:2, h100:8, v6e-8",
    "length": "tokens of a row",
    "for": "how long, as in '3 epochs' or '500 steps'",
}

FIRST, TEXT, SHOWN = 256, 2**20, 24
"""Rows that it reads, bytes of a text, and lines of a row that it prints."""

PAIRS = ("prompt_completion", {"prompt": "chosen", "completion": "rejected"})
FORMS = (
    PAIRS,
    ("chat", {}),
    ("prompt_completion", {}),
    ("instruction", {}),
    ("instruction", {"input": "context", "output": "response"}),
    ("instruction", {"output": "response"}),
    ("instruction", {"instruction": "prompt", "output": "response"}),
    ("instruction", {"instruction": "question", "output": "answer"}),
    ("text", {}),
)
"""Formats, and columns with another name in the file. The first that fits the first row counts."""

Answer = TypeVar("Answer")
Entries = dict[str, tuple[Any, str]]
"""`section.key` -> its value, and the comment beside it."""


def _parser() -> CommandParser:
    parser = CommandParser("init", DESCRIPTION, epilog=EXIT_CODES)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="sets a key of the config, as in data.split=test")
    for name, about in QUESTIONS.items():
        add(f"--{name}", metavar=name.upper(), help=about)
    add("--out", type=Path, default=Path("run.yaml"), metavar="FILE", help="a new file (default run.yaml)")
    parser.switch("--yes", "download what is needed, and take defaults instead of asking")
    return parser


def main(argv: list[str]) -> int:
    """Run the command with the arguments after the program's name; return the exit code."""

    def init(options: argparse.Namespace) -> int:
        with Worker() as worker, tempfile.TemporaryDirectory(prefix="portable_fsdp_init") as scratch:
            _init(options, worker, Path(scratch))
        return EXIT_FINISHED

    return run_command(_parser(), argv, init)


@dataclass(frozen=True)
class Base:
    """The model to start from."""

    name: str
    folder: Path  # of the hub's cache: without weights
    positions: int  # most tokens of a row
    scheme: str | None  # how its weights are quantised
    tokenizer: "Tokenizer"


@dataclass(frozen=True)
class Sample:
    """The first rows of the data."""

    keys: dict[str, Any]  # of the config's section `data`
    data: Data  # reads the sample alone
    examples: list[Example]
    times: float | None  # all rows / these; None: unknown

    @property
    def is_text(self) -> bool:
        return self.data.format == "text"


def _init(options: argparse.Namespace, worker: Worker, scratch: Path) -> None:
    out: Path = options.out
    if out.exists() or not out.parent.is_dir():
        problem = "the file exists; name a new one" if out.exists() else f"no such folder: {out.parent}"
        raise UsageError(f"--out={out}: {problem}.")
    own = _own_values(options.overrides)
    base = _answer(options, "model", None, lambda name: _base(options, name))
    sample = _answer(options, "data", None, lambda path: _sample(options, path, own, base, scratch))
    trains = _answer(options, "train", "qlora" if base.scheme else "all", lambda word: _trains(word, base))
    target = _answer(options, "devices", "here", _target)
    advised, why = _advised_length(sample, base)
    length = _answer(options, "length", str(advised), lambda text: _length(text, base))
    is_small = not sample.is_text and (sample.times or math.inf) * len(sample.examples) < 10_000
    span = _answer(options, "for", "3 epochs" if is_small else "1 epoch", _span)
    rows = _rows(sample, base, length, scratch)
    why = why if length == advised else "as answered"
    entries = _entries(out, base, sample, trains, target, (length, why), span, rows)
    entries |= {option: (value, "as given") for option, value in own.items()}
    config, plan, entries = _fitted(entries, own, base, target, worker, scratch)
    with out.open("x", encoding="utf-8") as file:
        file.write(_text(entries))
    to_stdout("\n".join(["", *_summary(out, config, plan, target, rows)]))


def _own_values(words: list[str]) -> dict[str, Any]:
    """Parse `section.key=value` words. Raises ConfigError for an unknown key or a wrong value."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in option_names():
            raise UsageError(f"{word}: expected section.key=value; the answers are flags, as --model={word}.")
        values[name] = parse(text)[1]
    make_config(**_sections(values))
    return values


def _sections(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    groups = groupby(sorted(values), lambda option: option.partition(".")[0])
    return {section: {name.partition(".")[2]: values[name] for name in names} for section, names in groups}


# -------------------------------------------------------------------------------------------------------- questions


def _answer(options: argparse.Namespace, name: str, default: str | None, take: Callable[[str], Answer]) -> Answer:
    """Return what `take` makes of the flag, or else of answers on the terminal until it raises nothing."""
    given: str | None = getattr(options, name)
    if given is None and default is None and not sys.stdin.isatty():
        raise UsageError(f"--{name}: missing; name {QUESTIONS[name]}.")
    if given is not None or not sys.stdin.isatty() or (options.yes and default):
        return take(given or default or "")
    while True:
        try:
            return take(_line(f"{QUESTIONS[name]}{f' [{default}]' if default else ''}: ") or default or "")
        except PortableFSDPError as error:
            to_stderr(str(error))


def _line(prompt: str) -> str:
    try:
        return input(prompt).strip()
    except EOFError:
        to_stderr("\nno answer")
        raise SystemExit(UsageError.exit_code) from None


def _allow(options: argparse.Namespace, flag: str, what: str) -> None:
    """Ask for a download, unless --yes allows it. Raises UsageError without a yes."""
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{flag}: not on this host; pass --yes to download {what}.")
    if _line(f"download {what}? [Y/n]: ").lower() not in ("", "y", "yes"):
        raise UsageError(f"{flag}: not on this host, and not downloaded; name a local folder.")


def _base(options: argparse.Namespace, name: str) -> Base:
    from portable_fsdp.data.tokenize import load_tokenizer
    from portable_fsdp.models.architecture import architecture_mapping, read_architecture
    from portable_fsdp.models.pretrained import open_pretrained

    scheme = None
    if is_hub := is_hub_id(name):
        _allow(options, f"--model={name}", "its config and tokenizer, without weights")
    folder = local_folder("--model", name, (*CONFIG_FILES, *TOKENIZER_FILES))
    if not is_hub:
        scheme = open_pretrained(Model(pretrained=name))[1].scheme
    elif architecture_mapping(str(folder)).get("quantization_config"):
        raise UsageError(f"--model={name}: its weights are quantised; name the unquantised model, or a local folder.")
    config = read_architecture(str(folder), logs=False)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 2**20
    return Base(name, folder, positions, scheme, load_tokenizer("auto", str(folder)))


def _sample(options: argparse.Namespace, path: str, own: dict[str, Any], base: Base, scratch: Path) -> Sample:
    """Open the data, find the form of its rows, and read the first ones."""
    from portable_fsdp.data.templates import adapt

    own = _sections(own).get("data", {})
    keys = {**_source(path), **own}
    reads, count = keys, None
    if keys["source"] == "huggingface" and not Path(path).is_dir():
        _allow(options, f"--data={path}", f"its first {FIRST} rows")
        rows, count = first_rows_of_hub(_data(keys), FIRST)
        _write_rows(scratch / "hub.jsonl", rows)
        reads = {**keys, "source": "jsonl", "path": str(scratch / "hub.jsonl"), "split": None}
    form = {name: own[name] for name in ("format", "columns") if name in own} or _form(path, reads)
    needs_template = form["format"] == "chat"
    if form["format"] == "instruction" and "prompt" not in own:
        form["prompt"] = "alpaca"
    elif needs_template and base.tokenizer.chat_template is None and "chat_template" not in own:
        is_chatml = "<|im_end|>" in base.tokenizer.ids
        form |= {"chat_template": "chatml", "end": "<|im_end|>"} if is_chatml else {"chat_template": "alpaca"}
    data = _data({**reads, **form})
    adapt(base.tokenizer, data.end, data.chat_template)
    examples, times = _first(data)
    times = count and count / max(1, len(examples)) if reads is not keys else times
    _write_rows(scratch / "rows.jsonl", [example.fields for example in examples])
    here = {"source": "jsonl", "path": str(scratch / "rows.jsonl"), "columns": {}, "cache_dir": str(scratch)}
    return Sample({**keys, **form}, _data({**reads, **form, "eval_split": None, **here}), examples, times)


def _data(keys: dict[str, Any]) -> Data:
    return make_config(data={key: value for key, value in keys.items() if value is not None}).data


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")


def _source(path: str) -> dict[str, Any]:
    """Return `source` and `path` of the config's data. Raises UsageError."""
    place = Path(path)
    if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
        return {"source": "huggingface", "path": path}
    if place.is_dir():
        for source, pattern in reversed(EXAMPLES.items()):
            if next(place.glob(pattern), None):
                return {"source": source, "path": str(place / pattern)}
        raise UsageError(f"--data={path}: no .jsonl, .parquet or .txt file in this folder.")
    kinds = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".txt": "text"}
    if kind := kinds.get(Path(re.sub(r"\.(gz|zst)$", "", path)).suffix):
        return {"source": kind, "path": path}
    if place.exists() or not is_hub_id(re.sub(":[^@]+", "", path)):
        raise UsageError(f"--data={path}: expected {QUESTIONS['data'].removeprefix('the data: ')}.")
    return {"source": "huggingface", "path": path}


def _form(path: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Return format and columns of the first row. Raises DataError."""
    problem = ""
    for form, columns in FORMS if keys["source"] != "text" else FORMS[-1:]:
        try:
            first = next(iter(open_source(_data({**keys, "format": form, "columns": columns})).read()), None)
        except DataError as error:
            problem = str(error)
            continue
        if isinstance(first, Broken):
            problem = f"{first.place}: {first.problem}"
        elif first is not None and columns.keys() <= first.fields.keys():
            if (form, columns) == PAIRS:
                fix = "launch trains no preferences.\n  TRL's DPOTrainer does, sharded (docs/trainers.md)."
                raise DataError(f"--data={path}: pairs of chosen and rejected answers: {fix}")
            return {"format": form, **({"columns": columns} if columns else {})}
    raise DataError(
        f"--data={path}: the first row has no known form: {problem or 'there is none.'}\n"
        "  Known: text; messages; prompt and completion; instruction and output. Or name the columns:\n"
        "  data.format=instruction data.columns='{instruction: NAME, output: NAME}'."
    )


def _first(data: Data) -> tuple[list[Example], float | None]:
    """Read the first rows; also return how many times as many there are in all."""
    source, examples, size = open_source(data), list[Example](), 0
    for example in islice(source.read(), FIRST):
        if isinstance(example, Broken):
            if data.on_error == "stop":
                raise DataError(f"{example.place}: {example.problem}")
            continue
        if data.format == "text":
            text = str(example.fields["text"])
            example = replace(example, size=min(example.size, TEXT), fields={**example.fields, "text": text[:TEXT]})
        examples.append(example)
        size += example.size
    if len(examples) < FIRST and data.source != "text":
        return examples, 1.0
    return examples, source.total / size if source.total and size else None


def _trains(word: str, base: Base) -> str:
    if word not in ("all", "lora", "qlora"):
        raise UsageError(f"--train={word}: expected all, lora or qlora.")
    if base.scheme and word != "qlora":
        raise UsageError(f"--train={word}: the weights of {base.name} are quantised ({base.scheme}); answer qlora.")
    return word


def _target(text: str) -> Target:
    if text in ("here", "auto"):
        kind, _ = resolve("auto", "auto")
        if kind == "tpu":
            raise UsageError(f"--devices={text}: name the slice, such as v6e-8: this host doesn't know all of it.")
        text = "cpu:1" if kind == "cpu" else f"{_gpu()}:{count_devices(kind)}"
    try:
        target = parse_target(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--on=", "--devices=")) from None
    is_cpu = target.hardware.kind == "cpu"
    return with_memory(target, host_memory_bytes() / target.devices / 2**30) if is_cpu else target


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def _length(text: str, base: Base) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= base.positions:
        raise UsageError(f"--length={text}: expected 2 to {base.positions} tokens (the model's positions).")
    return int(text)


def _span(text: str) -> Settings:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(epoch|step)s?", text)
    if match is None or not float(match[1]) or ("." in match[1] and match[2] == "step"):
        raise UsageError(f"--for={text}: expected epochs or steps, as in --for='3 epochs' or --for=500steps.")
    return {f"train.{match[2]}s": match[1]}


# ------------------------------------------------------------------------------------------------------------ rows


def _advised_length(sample: Sample, base: Base) -> tuple[int, str]:
    """Return a length for these rows, and the reason. Raises DataError for a row that can't be rendered."""
    from portable_fsdp.data.build import renderer

    lengths: list[int] = []
    for item in renderer(sample.data, base.tokenizer, stream=False)(sample.examples):
        if isinstance(item, Broken):
            raise DataError(f"{item.place}: {item.problem}")
        lengths.append(len(item.ids))
    if not lengths:
        raise DataError("data: no row to train.")
    if sample.is_text:
        total = int(sum(lengths) * (sample.times or 1))
        size = 2 ** int(math.log2(min(1024, max(total / 64, 16))))
        return min(size, base.positions), f"about {total:,} tokens in all" if sample.times else "a usual length"
    most = sorted(lengths)[math.ceil(0.99 * len(lengths)) - 1]
    size = max(16, 2 ** math.ceil(math.log2(most))) if most <= 128 else math.ceil(most / 128) * 128
    return min(size, base.positions), f"99% of the first {len(lengths)} rows have at most {most} tokens"


def _rows(sample: Sample, base: Base, length: int, scratch: Path) -> float | None:
    """Print a row as it would be trained; return the number of all rows (None: unknown)."""
    from portable_fsdp.data.build import CONTEXT, COUNTS, build_data, rows_in_text

    model = Model(pretrained=str(base.folder))
    keys = {"seq_len": length, "long_rows": "skip"}
    one = sample.data.model_copy(update={**keys, "packing": "stream" if sample.is_text else "none"})
    lines = list(rows_in_text(build_data(one, model), 0, 1))
    more = [f"  ({len(lines) - SHOWN} more lines)"] if len(lines) > SHOWN else []
    legend = f"a row as it is trained; tokens that count in the loss follow `{COUNTS}`, all others `{CONTEXT}`:"
    to_stdout("\n".join([legend, *lines[:SHOWN], *more]))
    rows = len(build_data(sample.data.model_copy(update=keys), model).rows)
    return rows * sample.times if sample.times else None


# ---------------------------------------------------------------------------------------------------------- config


def _entries(
    out: Path,
    base: Base,
    sample: Sample,
    trains: str,
    target: Target,
    length: tuple[int, str],
    span: Settings,
    rows: float | None,
) -> Entries:
    kind, adapts, devices = target.hardware.kind, trains != "all", target.devices
    share = min(64, max(8, 2 ** int(math.log2(max(1, (rows or 10_000) / 50)))))
    on = f"{devices} device{'s' * (devices > 1)}"
    entries: Entries = {
        "run.dir": (f"runs/{out.stem}", "all output; start again with the same one to resume"),
        "model.pretrained": (base.name, "as answered"),
        "data.seq_len": length,
        "train.global_batch": (math.ceil(share / devices) * devices, f"rows of a step, equal on {on}"),
        "train.micro_batch": ("auto", ""),
        "optim.lr": (2e-4 if adapts else 1e-5, "usual for adapters" if adapts else "usual to fine-tune all weights"),
        "optim.weight_decay": (0.0, "usual for fine-tuning"),
        "optim.warmup_steps": ("5%", "of all steps"),
        "sharding.strategy": ("FULL_SHARD" if devices > 1 else "NO_SHARD", f"on {on}"),
        "precision.compute": ("float32", "bfloat16 is slow on CPUs")
        if kind == "cpu"
        else ("bfloat16", "fast on this hardware; weights that train stay float32"),
        "memory.gradient_checkpointing": ("auto", ""),
        "checkpoint.every": ("25%", "of all steps"),
        "checkpoint.keep": (2, "the newest, and the best"),
        "checkpoint.export": (True, "at the end, to runs/NAME/export, for from_pretrained"),
    }
    entries |= {name: (parse(value)[1], "as answered") for name, value in span.items()}
    why = {"chat_template": "the tokenizer has none", "prompt": "Alpaca's text around each row"}
    why |= {"format": "found in the first row", "end": "ends a turn of this template"}
    entries |= {f"data.{key}": (value, why.get(key, "as answered")) for key, value in sample.keys.items()}
    if not sample.is_text:
        entries["data.long_rows"] = ("skip", "leaves out rows longer than seq_len; or: cut, stop")
        entries["data.packing"] = ("documents", "several chats or answers share a row, and none sees another")
    if adapts:
        lora = {"r": 16, "alpha": 32, "dropout": 0.05, "targets": ["all-linear"]}
        entries["model.lora"] = (lora, "only adapters of all linear layers train")
    if trains == "qlora":
        entries["precision.frozen"] = (base.scheme or "nf4", "the base rests in this form, and is frozen")
    elif adapts and kind != "cpu":
        entries["precision.frozen"] = ("bfloat16", "the base; adapters stay float32")
    if rows and rows >= 200 and sample.times and sample.times * len(sample.examples) >= 200:
        entries["data.eval_split"] = ("5%" if rows < 20_000 else "1%", "of the data, held out")
        entries["train.eval_every"] = ("25%", "of all steps")
    return entries | ({"compile.enabled": ("auto", "")} if kind == "cuda" else {})


def _text(entries: Entries) -> str:
    lines = ["# Written by portable-fsdp init; docs/configuration.md has all keys."]
    for section in Config.model_fields:
        keys = {name.partition(".")[2]: entry for name, entry in entries.items() if name.startswith(f"{section}.")}
        lines += ["", f"{section}:"] if keys else []
        lines += [f"  {key}: {yaml_value(value)}{f'  # {why}' if why else ''}" for key, (value, why) in keys.items()]
    return "\n".join(lines) + "\n"


def _fitted(
    entries: Entries, own: Collection[str], base: Base, target: Target, worker: Worker, scratch: Path
) -> tuple[Config, Plan, Entries]:
    """Return the config, its plan, and the entries without `auto`. Raises ConfigError if nothing fits."""
    path = scratch / "run.yaml"
    bare = ["model.pretrained=null", f"model.architecture={yaml_value(str(base.folder))}", "checkpoint.export=false"]
    bare += ["model.dropout=published"] * ("model.dropout" not in own)  # plans need no weights

    def config_of(settings: Settings) -> Config:
        return load_config(path, [*bare, *(f"{key}={value}" for key, value in settings.items())])

    def plan_of(settings: Settings) -> Plan:
        return planner.make_plan(config_of(settings), target, worker, to_stderr)

    errors: list[UsageError] = []
    for more in _alternatives(target):
        tries = entries | {key: entry for key, entry in more.items() if key not in own}
        path.write_text(_text(tries), encoding="utf-8")
        try:
            tried = planner.fastest_that_fits(config_of({}), target, plan_of, worker, to_stderr)
            break
        except UsageError as error:
            errors.append(error)
    else:
        raise errors[0]
    plan = cast(Plan, tried.plan)
    if not tried.fits:
        raise _too_large(plan, tried, config_of, plan_of, target)
    memory = f"{plan.memory.peak_bytes / 2**30:.2f} of {(plan.memory.limit_bytes or 0) / 2**30:.2f} GiB"
    chosen = {
        key: (parse(value)[1], f"the fastest that fits by plan: {memory}") for key, value in tried.settings.items()
    }
    path.write_text(_text(tries | chosen), encoding="utf-8")
    config, hardware = load_config(path), target.hardware
    if config.train.steps is not None:
        check_schedule(config.optim, config.train.steps)
    generation = hardware.name if hardware.kind == "tpu" else ""
    require_supported(config, Deployment(plan.backend, hardware.kind, target.devices, target.hosts, generation))
    return config, plan, tries | chosen


def _alternatives(target: Target) -> Iterator[Entries]:
    """Yield entries to try, the usual first: not all models keep packed rows apart, or have layers that scan."""
    apart: Entries = {"data.packing": ("none", "this model can't keep several in a row apart")}
    scan: Entries = {"compile.scan_layers": (True, "compiles one layer instead of all")}
    for more in [scan, {}] if target.hardware.kind == "tpu" else [{}]:
        yield from (more, more | apart)


def _too_large(
    plan: Plan,
    tried: Tried,
    config_of: Callable[[Settings], Config],
    plan_of: Callable[[Settings], Plan],
    target: Target,
) -> ConfigError:
    """Return the error that says what comes nearest to fitting."""
    least, is_gpu = config_of(tried.settings), target.hardware.kind == "cuda"
    measures = list(planner.nearest_that_fits(least, lambda more: plan_of(tried.settings | more), offload=is_gpu))
    nearest = result.measures_text(measures) if measures else f"The least: {tried.line}."
    return ConfigError(
        f"nothing fits on {plan.hardware}.\n  {nearest}\n  Answer more devices, a shorter --length, --train=lora or "
        "qlora; or give the keys above."
    )


def _summary(out: Path, config: Config, plan: Plan, target: Target, rows: float | None) -> Iterator[str]:
    memory, train, seconds = plan.memory, config.train, plan.expected and plan.expected.seconds
    steps = train.steps or (rows and math.ceil((train.epochs or 0) * rows / train.global_batch))
    yield f"wrote {out}, planned for {plan.hardware}"
    yield f"memory of a device: {memory.peak_bytes / 2**30:.2f} of {(memory.limit_bytes or 0) / 2**30:.2f} GiB"
    length = f"{'' if train.steps else 'about '}{steps:,} steps" if steps else "an unknown number of steps"
    if seconds is None:
        yield f"time: unknown for {length}: {plan.expected_note}"
    else:
        total = f", {seconds * steps / 60:,.1f} minutes in all" if steps else ""
        yield f"time: {seconds:.3g} s a step by plan, {length}{total}"
    kind, each = target.hardware.kind, target.devices_per_host
    flags = f"--device={kind} --config={out}"
    torchrun = (
        f"torchrun --nnodes={target.hosts} --nproc_per_node={each} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
    )
    where = f" on each of {target.hosts} hosts" if target.hosts > 1 else ""
    yield f"start it{where}:"
    if kind == "cuda" and target.devices > 1:
        torchrun = torchrun if target.hosts > 1 else f"torchrun --standalone --nproc_per_node={each}"
        yield f"  {torchrun} -m portable_fsdp.launch {flags}"
    else:
        yield f"  portable-fsdp launch {flags}" + (
            f" --num_devices={each}" if kind == "cuda" or (kind == "cpu" and each > 1) else ""
        )


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
