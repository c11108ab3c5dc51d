"""Write a first config by six questions: `python -m portable_fsdp.init --model=FOLDER --data=chats.jsonl`.

It reads the model's config and tokenizer, not its weights, and the first rows of the data; it plans as `auto` does.
"""

import argparse
import json
import math
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from glob import glob
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from portable_fsdp.backends.open import count_devices, resolve
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.config.data import Data
from portable_fsdp.config.describe import Settings, nearest, option_names, yaml_value
from portable_fsdp.config.load import make_config
from portable_fsdp.config.schema import Config, Model
from portable_fsdp.config.yaml_text import parse
from portable_fsdp.convert.read import load_config
from portable_fsdp.data.examples import Broken, Example, Rendered
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
from portable_fsdp.runtime.hub import CONFIG_FILES, TOKENIZER_FILES, before_transformers, is_hub_id, local_folder
from portable_fsdp.runtime.signals import exit_on_signals

if TYPE_CHECKING:
    from portable_fsdp.data.tokenize import Tokenizer

DESCRIPTION = """Write a first config that fits: six answers, as flags or on a terminal.

On a terminal it asks for each answer that no flag gives. Without one, --model and --data are required, else the exit
code is 2; the other answers have defaults. It downloads configs, tokenizers and first rows only, after a yes."""
ANSWERS = {
    **{"model.pretrained": "model", "data.path": "data", "data.seq_len": "length"},
    **{"train.epochs": "for", "train.steps": "for"},
}
"""Keys that an answer sets."""
EXIT_CODES = "exit code: 0; 2 usage error, rows or a model that can't train, or nothing fits; 130 for Ctrl-C"
QUESTIONS = {
    "model": "the model: a Hugging Face folder, or a hub name (org/name)",
    "data": "the data: a file or glob (.jsonl, .json, .parquet, .txt), a folder of them, or a hub data set (org/name)",
    "train": "what trains: all, lora (adapters) or qlora (adapters over a base in 4 bits)",
    "devices": "where: here, or as for plan --on: cpu:2, h100:8, v6e-8",
    "length": "tokens of a row",
    "for": "how long, as in '3 epochs' or '500 steps'",
}

FIRST, TEXT, SHOWN, LONGEST = 256, 2**20, 24, 4096
"""Rows that it reads, bytes of a text, lines of a row that it prints, and tokens of a row that it advises at most."""

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


class OpenedModel(NamedTuple):
    """The model to start from."""

    name: str
    folder: Path  # of the hub's cache: without weights
    positions: int  # most tokens of a row
    scheme: str | None  # how its weights are quantised
    mixes: bool  # several documents in a row affect each other
    tokenizer: "Tokenizer"


class Sample(NamedTuple):
    """The first rows of the data."""

    keys: dict[str, Any]  # of the config's section `data`
    data: Data  # reads these rows alone
    lengths: list[int]  # tokens of each
    times: float | None  # all rows are this many times as many; None: unknown

    @property
    def is_text(self) -> bool:
        return self.data.format == "text"


class Choices(NamedTuple):
    """The answers, and what follows from them."""

    base: OpenedModel
    sample: Sample
    train: str
    target: Target
    length: int
    why: str  # the length
    span: Settings
    rows: float | None  # all of the run; None: unknown


def _init(options: argparse.Namespace, worker: Worker, scratch: Path) -> None:
    out: Path = options.out
    if out.exists() or not out.parent.is_dir():
        problem = "the file exists; name a new one" if out.exists() else f"no such folder: {out.parent}"
        raise UsageError(f"--out={out}: {problem}.")
    own = _own_values(options.overrides)
    base = _answer(options, "model", None, lambda name: _base(options, name))
    sample = _answer(options, "data", None, lambda path: _sample(options, path, own.get("data", {}), base, scratch))
    train = _answer(options, "train", "qlora" if base.scheme else "all", lambda word: _train(word, base))
    target = _answer(options, "devices", "here", _target)
    advised, why = _advised_length(sample, base)
    length = _answer(options, "length", str(advised), lambda text: _length(text, base, sample))
    is_small = not sample.is_text and (sample.times or math.inf) * len(sample.lengths) < 10_000
    span = _answer(options, "for", "3 epochs" if is_small else "1 epoch", _span)
    rows = _rows(sample, base, length)
    answers = Choices(base, sample, train, target, length, why if length == advised else "--length", span, rows)
    given: Entries = {f"{name}.{key}": (value, "as given") for name in own for key, value in own[name].items()}
    try:
        config, plan, entries = _fitted(_entries(answers, out), given, answers, worker, scratch / out.name)
    except ConfigError as error:
        raise ConfigError(str(error).replace(f"{scratch}/", "")) from None
    with out.open("x", encoding="utf-8") as file:
        file.write(_text(entries))
    to_stdout("\n".join(_summary(out, config, plan, answers)))


def _own_values(words: list[str]) -> dict[str, dict[str, Any]]:
    """Parse `section.key=value` words. Raises UsageError for an unknown key; the whole config is checked later."""
    values: dict[str, dict[str, Any]] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UsageError(f"{word}: expected section.key=value; answers are flags, as --model={word}.")
        if flag := ANSWERS.get(name):
            raise UsageError(f"{word}: --{flag} sets this key; answer there.")
        if name.count(".") > 1:
            raise UsageError(f"{word}: name the whole mapping, as in 'model.lora={{r: 8, alpha: 16}}'.")
        if name not in option_names():
            raise UsageError(f"{word}: unknown key; {nearest(tuple(name.split('.')))}.")
        section, _, key = name.partition(".")
        values.setdefault(section, {})[key] = parse(text)[1]
    return values


# -------------------------------------------------------------------------------------------------------- questions


def _answer(options: argparse.Namespace, name: str, default: str | None, take: Callable[[str], Answer]) -> Answer:
    """Return what `take` makes of the flag, or else of answers on the terminal until it raises nothing."""
    given: str | None = getattr(options, name)
    if given == "":
        raise UsageError(f"--{name}=: empty; name {QUESTIONS[name]}.")
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
    if not options.yes and not sys.stdin.isatty():
        raise UsageError(f"{flag}: not on this host; pass --yes to download {what}.")
    if not options.yes and _line(f"download {what}? [Y/n]: ").lower() not in ("", "y", "yes"):
        raise UsageError(f"{flag}: not on this host, and not downloaded; name a local folder.")


def _base(options: argparse.Namespace, name: str) -> OpenedModel:
    before_transformers()
    from portable_fsdp.data.tokenize import load_tokenizer
    from portable_fsdp.models.architecture import architecture_mapping, read_architecture
    from portable_fsdp.models.build import documents_problem
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
    section = Model(architecture=str(folder), dropout="published")
    mixes = bool(documents_problem(section, min(positions, 128)))
    return OpenedModel(name, folder, positions, scheme, mixes, load_tokenizer("auto", str(folder)))


def _sample(options: argparse.Namespace, path: str, own: dict[str, Any], base: OpenedModel, scratch: Path) -> Sample:
    """Open the data, find the form of its rows, and tokenize the first ones. `own`: the user's keys of the section."""
    from portable_fsdp.data.build import renderer
    from portable_fsdp.data.templates import adapt

    reads = keys = {**_source(path), **own}
    count = None
    if is_hub := keys["source"] == "huggingface" and not Path(path).is_dir():
        _allow(options, f"--data={path}", f"its first {FIRST} rows")
        rows, count = first_rows_of_hub(_data(keys), FIRST)
        reads = {**keys, "source": "jsonl", "path": _write_rows(scratch / "hub.jsonl", rows), "split": None}
    form = {} if "format" in own else _form(path, reads)
    examples, times = _first(_data(reads | form))
    if not examples:
        raise DataError(f"--data={path}: no rows.")
    keys, tokenizer = keys | form, base.tokenizer
    has_chats = keys["format"] == "chat" or isinstance(examples[0].fields.get("prompt"), list)
    if keys["format"] == "instruction":
        keys = {"prompt": "alpaca"} | keys
    elif has_chats and tokenizer.chat_template is None and "chat_template" not in own:
        is_chatml = "<|im_end|>" in tokenizer.ids
        keys |= {"chat_template": "chatml", "end": "<|im_end|>"} if is_chatml else {"chat_template": "alpaca"}
    here = {"source": "jsonl", "path": _write_rows(scratch / "rows.jsonl", [each.fields for each in examples])}
    here |= {"columns": {}, "split": None, "eval_split": None, "cache_dir": str(scratch), "long_rows": "skip"}
    data = _data(keys | here)
    adapt(tokenizer, data.end, data.chat_template)
    items = renderer(data, tokenizer, stream=False)(examples)
    if broken := next((item for item in items if isinstance(item, Broken)), None):
        raise DataError(f"{broken.place}: {broken.problem}")
    lengths = [len(cast(Rendered, item).ids) for item in items]
    return Sample(keys, data, lengths, count and count / len(examples) if is_hub else times)


def _data(keys: dict[str, Any]) -> Data:
    return make_config(data={key: value for key, value in keys.items() if value is not None}).data


def _write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _source(path: str) -> dict[str, Any]:
    """Return `source` and `path` of the config's data. Raises UsageError."""
    place, kinds = Path(path), {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".txt": "text"}
    is_saved = (place / "state.json").is_file() or (place / "dataset_dict.json").is_file()
    if place.is_dir() and not is_saved:
        for source, pattern in reversed(EXAMPLES.items()):
            if glob(str(place / pattern), recursive=True):
                return {"source": source, "path": str(place / pattern)}
        raise UsageError(f"--data={path}: no .jsonl, .parquet or .txt file in this folder.")
    if kind := kinds.get(Path(re.sub(r"\.(gz|zst)$", "", path)).suffix):
        return {"source": kind, "path": path}
    if is_saved or (not place.exists() and is_hub_id(re.sub(":[^@]+", "", path))):
        return {"source": "huggingface", "path": path}
    raise UsageError(f"--data={path}: expected {QUESTIONS['data'].removeprefix('the data: ')}.")


def _form(path: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Return format and columns of the first row. Raises DataError."""
    problems, is_empty = list[str](), False
    for form, columns in FORMS if keys["source"] != "text" else FORMS[-1:]:
        try:
            first = next(iter(open_source(_data(keys | {"format": form, "columns": columns})).read()), None)
        except DataError as error:
            problems.append(str(error))
            continue
        is_empty |= first is None
        if isinstance(first, Broken):
            problems.append(f"{first.place}: {first.problem}")
        elif first is not None and columns.keys() <= first.fields.keys():
            if (form, columns) == PAIRS:
                fix = "launch trains no preferences.\n  TRL's DPOTrainer does, sharded (docs/trainers.md)."
                raise DataError(f"--data={path}: pairs of chosen and rejected answers: {fix}")
            return {"format": form} | ({"columns": columns} if columns else {})
    if is_empty or len({*problems}) == 1:  # of the file, not of a form
        raise DataError(f"--data={path}: {'no rows' if is_empty else problems[0]}")
    raise DataError(
        f"--data={path}: the first row has no known form: {problems[-1].partition(chr(10))[0]}\n"
        "  Known: text; messages; prompt and completion; instruction and output. Or name the columns:\n"
        "  data.format=instruction data.columns='{instruction: NAME, output: NAME}'."
    )


def _first(data: Data) -> tuple[list[Example], float | None]:
    """Read the first rows; also return how many times as many there are in all (None: unknown)."""
    source, examples, size = open_source(data), list[Example](), 0
    for example in islice(source.read(), FIRST):
        if isinstance(example, Broken):
            if data.on_error == "stop":
                raise DataError(f"{example.place}: {example.problem}")
            continue
        text = example.fields.get("text")
        if data.format == "text" and isinstance(text, str):  # else the renderer names it
            example = replace(example, size=min(example.size, TEXT), fields={**example.fields, "text": text[:TEXT]})
        examples.append(example)
        size += example.size
    is_all = len(examples) < FIRST and data.format != "text"
    return examples, 1.0 if is_all else source.total / size if source.total and size else None


def _train(word: str, base: OpenedModel) -> str:
    if word not in ("all", "lora", "qlora"):
        raise UsageError(f"--train={word}: expected all, lora or qlora.")
    if base.scheme and word != "qlora":
        raise UsageError(f"--train={word}: the weights of {base.name} are quantised ({base.scheme}); answer qlora.")
    return word


def _target(text: str) -> Target:
    if text in ("here", "auto"):
        kind, _ = resolve("auto", "auto")
        if kind == "tpu":
            raise UsageError(f"--devices={text}: name the slice, as in v6e-8: a TPU VM may be a part of one.")
        text = "cpu:1"
        if kind == "cuda":
            import torch

            text = f"{torch.cuda.get_device_name()}:{count_devices(kind)}"
    try:
        target = parse_target(text)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--on=", "--devices=")) from None
    is_cpu = target.hardware.kind == "cpu"
    return with_memory(target, host_memory_bytes() / target.devices / 2**30) if is_cpu else target


def _length(text: str, base: OpenedModel, sample: Sample) -> int:
    least, most = _limits(sample, base)
    if least > most:
        what = "the text has too few tokens" if sample.is_text else f"the shortest row has {least:,} tokens"
        raise DataError(f"--data: {what}, and a row can have at most {most:,}: name other data, or another model.")
    if not text.isdecimal() or not least <= int(text) <= most:
        limits = "tokens of the shortest row, and positions of the model or tokens of the text"
        raise UsageError(f"--length={text}: expected {least} to {most} ({limits}).")
    return int(text)


def _limits(sample: Sample, base: OpenedModel) -> tuple[int, int]:
    """Return the least and the most tokens that a row may have."""
    if sample.is_text:
        return 2, min(base.positions, sum(sample.lengths) - 1)
    return min(sample.lengths), base.positions


def _span(text: str) -> Settings:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(epoch|step)s?", text)
    if match is None or not float(match[1]) or ("." in match[1] and match[2] == "step"):
        raise UsageError(f"--for={text}: expected epochs or steps, as in --for='3 epochs' or --for=500steps.")
    return {f"train.{match[2]}s": match[1]}


def _advised_length(sample: Sample, base: OpenedModel) -> tuple[int, str]:
    """Return a length for these rows, and the reason."""
    lengths, (least, most_of_row) = sorted(sample.lengths), _limits(sample, base)
    if sample.is_text:
        total = int(sum(lengths) * (sample.times or 1))
        size = 2 ** int(math.log2(min(1024, max(total / 64, 16))))
        return min(size, most_of_row), f"{total:,} tokens in all" if sample.times else "usual"
    most = lengths[int(0.99 * (len(lengths) - 1))]
    size = max(16, 2 ** math.ceil(math.log2(most))) if most <= 128 else math.ceil(most / 128) * 128
    size = math.ceil(most / 8) * 8 if base.mixes else size  # one document per row: all else is padding
    why = f"99% of the first {len(lengths)} rows have at most {most:,} tokens"
    limit = min(most_of_row, max(least, LONGEST))
    return (size, why) if size <= limit else (limit, f"{why}; longer ones are left out")


def _rows(sample: Sample, base: OpenedModel, length: int) -> float | None:
    """Print a row as it would be trained; return the number of all rows (None: unknown)."""
    from portable_fsdp.data.build import CONTEXT, COUNTS, build_data, rows_in_text

    model, data = Model(pretrained=str(base.folder)), sample.data.model_copy(update={"seq_len": length})
    unpacked = data if sample.is_text else data.model_copy(update={"packing": "none"})
    corpus = build_data(unpacked, model)
    lines = list(rows_in_text(corpus, 0, 1))
    lines[SHOWN:] = [f"  ({len(lines) - SHOWN} more lines)"] if len(lines) > SHOWN else []
    legend = f"a row as it is trained; tokens that count in the loss follow `{COUNTS}`, all others `{CONTEXT}`:"
    to_stdout("\n".join([legend, *lines, ""]))
    return sample.times and len((corpus if base.mixes else build_data(data, model)).rows) * sample.times


# ---------------------------------------------------------------------------------------------------------- config


def _entries(answers: Choices, out: Path) -> Entries:
    base, sample, train, target, length, why, span, rows = answers
    kind, adapts, devices = target.hardware.kind, train != "all", target.devices
    share = min(64, max(8, 2 ** int(math.log2(max(1, (rows or 10_000) / 50)))))
    holds_out = bool(rows and sample.times and min(rows, sample.times * len(sample.lengths)) >= 200)
    batch = math.ceil(share / devices) * devices
    if rows and "train.epochs" in span:  # each process has rows in each step
        batch = min(batch, int(float(span["train.epochs"]) * rows * (0.95 if holds_out else 1)) // devices * devices)
    if not batch:
        raise DataError(
            f"--data: {rows or 0:,.0f} rows are too few for a step on {target.text}.\n  Add rows, or epochs."
        )
    names = (out.stem, *(f"{out.stem}-{number}" for number in range(2, 1000)))
    run = next(name for name in names if not Path("runs", name).exists())
    reasons = {"prompt": "Alpaca's text around each row", "chat_template": "the tokenizer has none"}
    reasons |= {"format": "found in the first row", "columns": "found there", "end": "ends a turn of this template"}
    entries: Entries = {
        "run.dir": (f"runs/{run}", "all output; a start with the same one resumes"),
        "model.pretrained": (base.name, "--model"),
        **{f"data.{key}": (value, reasons.get(key, "--data")) for key, value in sample.keys.items()},
        "data.seq_len": (length, why),
        **{name: (parse(value)[1], "--for") for name, value in span.items()},
        "train.global_batch": (batch, f"rows of a step, over {target.text}"),
        "train.micro_batch": ("auto", ""),
        "optim.lr": (2e-4 if adapts else 1e-5, "usual for adapters" if adapts else "usual for all weights"),
        "optim.weight_decay": (0.0, "usual for fine-tuning"),
        "optim.warmup_steps": ("5%", "of all steps"),
        "sharding.strategy": ("FULL_SHARD", "the least memory") if devices > 1 else ("NO_SHARD", "one device"),
        "precision.compute": ("bfloat16", "fast here; weights that train stay float32"),
        "memory.gradient_checkpointing": ("auto", ""),
        "checkpoint.every": ("25%", "of all steps"),
        "checkpoint.keep": (2, "the newest"),
        "checkpoint.export": (True, "to export in run.dir, for from_pretrained"),
    }
    if not sample.is_text:
        alone = ("none", "one document per row: this model can't keep several apart")
        several = ("documents", "several share a row, and none sees another")
        entries["data.packing"] = alone if base.mixes else several
        entries["data.long_rows"] = ("skip", "leaves out what is longer than seq_len; or cut, stop")
    if adapts:
        lora = {"r": 16, "alpha": 32, "dropout": 0.05, "targets": ["all-linear"]}
        entries["model.lora"] = (lora, f"--train={train}: adapters of all linear layers")
        entries["precision.frozen"] = ("bfloat16", "the base; adapters stay float32")
    if train == "qlora":
        entries["precision.frozen"] = (base.scheme or "nf4", "the base; adapters stay float32")
    if kind == "cpu":
        entries["precision.compute"] = ("float32", "bfloat16 is slow on CPUs")
        entries |= {"precision.frozen": ("float32", "as compute")} if train == "lora" else {}
    if rows and holds_out:
        entries["data.eval_split"] = ("5%" if rows < 20_000 else "1%", "held out")
        entries["train.eval_every"] = ("25%", "of all steps")
    return entries | ({"compile.enabled": ("auto", "")} if kind == "cuda" else {})


def _text(entries: Entries) -> str:
    lines = ["# Written by portable-fsdp init. All keys: docs/configuration.md"]
    for section in Config.model_fields:
        keys = {name.partition(".")[2]: entry for name, entry in entries.items() if name.startswith(f"{section}.")}
        lines += ["", f"{section}:"] * bool(keys)
        lines += [f"  {key}: {yaml_value(value)}{f'  # {why}' if why else ''}" for key, (value, why) in keys.items()]
    return "\n".join(lines) + "\n"


def _fitted(
    entries: Entries, given: Entries, answers: Choices, worker: Worker, path: Path
) -> tuple[Config, Plan, Entries]:
    """Return the config, its plan, and the entries without `auto`; `path`: of a scratch file. Raises ConfigError."""
    target, is_gpu = answers.target, answers.target.hardware.kind == "cuda"
    bare = {"model.pretrained": "null", "model.architecture": yaml_value(str(answers.base.folder))}  # without weights
    bare |= {"checkpoint.export": "false"} | ({} if "model.dropout" in given else {"model.dropout": "published"})

    def config_of(settings: Settings) -> Config:
        return load_config(path, [f"{key}={value}" for key, value in (bare | settings).items()])

    def plan_of(settings: Settings) -> Plan:
        return planner.make_plan(config_of(settings), target, worker, to_stderr)

    def search(more: Entries) -> Tried:
        path.write_text(_text(entries | more | given), encoding="utf-8")
        return planner.fastest_that_fits(config_of({}), target, plan_of, worker, to_stderr)

    is_tpu = target.hardware.kind == "tpu"
    more: Entries = {"compile.scan_layers": (True, "compiles one layer instead of all")} if is_tpu else {}
    try:
        tried = search(more)
    except UsageError:
        if not more:
            raise
        more = {}  # not all models have layers that scan
        tried = search(more)
    if not tried.fits:
        least = config_of(tried.settings)
        measures = planner.nearest_that_fits(least, lambda more: plan_of(tried.settings | more), offload=is_gpu)
        nearest = result.measures_text([tried, *measures])
        raise ConfigError(
            f"nothing fits on {target.in_words}.\n  {nearest}\n  Answer more devices, a shorter --length, --train=lora "
            "or qlora, or add the keys that fit to the command."
        )
    plan, hardware = cast(Plan, tried.plan), target.hardware
    why = f"the fastest that fits, by plan: {_memory(plan)}"
    chosen = {key: (parse(value)[1], why) for key, value in tried.settings.items()}
    entries = entries | more | given | chosen
    path.write_text(_text(entries), encoding="utf-8")
    config = load_config(path)
    if config.train.steps is not None:
        check_schedule(config.optim, config.train.steps)
    generation = hardware.name if hardware.kind == "tpu" else ""
    require_supported(config, Deployment(plan.backend, hardware.kind, target.devices, target.hosts, generation))
    return config, plan, entries


def _memory(plan: Plan) -> str:
    return f"{plan.memory.peak_bytes / 2**30:.2f} of {(plan.memory.limit_bytes or 0) / 2**30:.2f} GiB"


def _summary(out: Path, config: Config, plan: Plan, answers: Choices) -> Iterator[str]:
    train, target, kind = config.train, answers.target, answers.target.hardware.kind
    steps = train.steps or (answers.rows and int((train.epochs or 0) * answers.rows / train.global_batch))
    count = f"{'' if train.steps else 'about '}{steps:,} steps" if steps else "an unknown number of steps"
    yield f"wrote {out} for {target.in_words}"
    yield f"memory of a device, by plan: {_memory(plan)}"
    if plan.expected is None:
        yield f"time: unknown for {count}: {plan.expected_note}"
    else:
        minutes = plan.expected.seconds * (steps or 0) / 60
        total = f"{minutes / 60:,.1f} hours" if minutes > 120 else f"{minutes:,.1f} minutes"
        yield f"time, by plan: {plan.expected.seconds:.3g} s a step, {count}{f', {total}' * bool(steps)}"
    yield "start it:" if target.hosts == 1 else f"start it on each of the {target.hosts} hosts:"
    flags, each = f"--device={kind} --config={shlex.quote(str(out))}", target.devices_per_host
    if kind == "cuda" and target.devices > 1:
        meet = f"--nnodes={target.hosts} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
        words = f"{'--standalone' if target.hosts == 1 else meet} --nproc_per_node={each}"
        yield f"  torchrun {words} -m portable_fsdp.launch {flags}"
    else:
        yield f"  portable-fsdp launch {flags}{f' --num_devices={each}' * (kind != 'tpu')}"


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
