"""Evaluate a model: `python -m portable_fsdp.evaluate runs/mine`, or on other data and another engine:
`torchrun --nproc_per_node=8 -m portable_fsdp.evaluate FOLDER data.source=jsonl data.path=test.jsonl data.format=chat`.

SOURCE is a run (its best checkpoint), a checkpoint, an exported folder or a hub model. Every row of the data that
`data.source`, `data.path` and so on name is evaluated; without these it is the run's validation set. Writes no files.
"""

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_fsdp.runtime.command import (
    CommandParser,
    KeptOutput,
    number_of,
    run_command,
    say_once_per_host,
    to_stderr,
    to_stdout,
)
from portable_fsdp.runtime.errors import EXIT_FINISHED, ConfigError
from portable_fsdp.runtime.failures import unfinished
from portable_fsdp.runtime.files import require_unused
from portable_fsdp.runtime.launchers import detect_launch
from portable_fsdp.runtime.signals import end_with_agent

if TYPE_CHECKING:
    from portable_fsdp.backends.contract import Backend
    from portable_fsdp.config.schema import Config

EXIT_CODES = "exit code: 0, 2 usage or config error, 130 Ctrl-C, 1 anything else"
FLAGS = {
    "device": "auto | cpu | cuda | tpu",
    "backend": "auto | native | xla | xla_fsdp1",
    "num_devices": "auto | N: devices of this host, as for launch",
}

_READ = ("data.", "model.", "precision.", "sharding.", "memory.", "compile.", "train.task", "train.micro_batch")
_OF_ROWS = ("tokenizer", "seq_len", "long_rows", "chat_template", "end", "chat_template_kwargs")
_NAME_DATA = {"data.source", "data.path", "data.split", "data.mixture", "data.factory", "data.eval_split"}


def _parser() -> CommandParser:
    parser = CommandParser("evaluate", __doc__ or "", epilog=EXIT_CODES)
    parser.add_argument("source", metavar="SOURCE", help="a run, checkpoint or exported folder, or org/name of the hub")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="data.path=test.jsonl, train.micro_batch=4")
    parser.auto_flags(FLAGS)
    parser.switch("--json", "one JSON object")
    return parser


def main(argv: list[str]) -> int:
    """Evaluate with the arguments after the program's name; returns the exit code."""
    with KeptOutput() as output:
        return run_command(_parser(), argv, lambda options: _evaluate(options, argv, output), say=say_once_per_host)


def _evaluate(options: argparse.Namespace, argv: list[str], output: KeptOutput) -> int:
    from portable_fsdp.backends.open import local_processes, open_backend, resolve, run_in_processes
    from portable_fsdp.backends.refusals import Deployment
    from portable_fsdp.train.preflight import check_config

    end_with_agent(os.environ)
    checkpoint, config, is_validation = _read(options.source, options.overrides)
    num_devices, launch = number_of("num_devices", options.num_devices), detect_launch(os.environ)
    device, backend = resolve(options.device, options.backend)
    processes = local_processes(device, backend, num_devices) if launch.is_alone else 1
    check_config(config, Deployment(backend, device), writes=False)
    code = run_in_processes(processes, launch, device, backend, "portable_fsdp.evaluate", argv)
    if code is not None:
        return code
    os.environ.update(launch.variables)
    output.hold_stdout()  # gloo's lines
    with open_backend(config, device=device, backend=backend, num_devices=num_devices) as engine:
        if engine.process.index == 0 and (sentence := unfinished(Path(options.source))):
            with suppress(ConfigError):  # still running
                require_unused(Path(options.source))
                to_stderr(sentence)
        result = _result(config, engine, checkpoint, is_validation)
        if engine.process.index == 0:
            where = {"backend": engine.name, "device": device, "devices": engine.devices}
            result = {"source": str(checkpoint or options.source), **result, **where}
            to_stdout(json.dumps(result) if options.json else _text(result))
    return EXIT_FINISHED


def _read(source: str, overrides: list[str]) -> "tuple[Path | None, Config, bool]":
    """Return the checkpoint (None: a model folder), the config, and whether to evaluate its validation set."""
    from portable_fsdp.checkpoint.__main__ import resolve
    from portable_fsdp.checkpoint.manifests import MANIFEST, best_checkpoint, checkpoints_below, read_manifest
    from portable_fsdp.checkpoint.storage import exists, locate
    from portable_fsdp.config.load import LayeredValues, loaded

    names = [text.partition("=")[0] for text in overrides]
    if others := [name for name in names if not name.startswith(_READ)]:
        raise ConfigError(f"{others[0]}: evaluate doesn't read this key.\n  It reads those of {', '.join(_READ)}.")
    is_named = not _NAME_DATA.isdisjoint(names)
    path, layers, checkpoint = locate(source), LayeredValues(Path(source)), None
    if exists(path / MANIFEST) or checkpoints_below(path):
        newest = resolve(path)
        is_run = newest != path.resolve()
        checkpoint, _ = best_checkpoint(newest, read_manifest(newest).evaluation if is_run else None)
        saved: Mapping[str, Any] = read_manifest(checkpoint).config
        if not saved:
            raise ConfigError(f"{source}: an imported checkpoint has no config.\n  Export it, and evaluate the export.")
        data = saved.get("data", {})
        if {"data.source", "data.mixture", "data.factory"} & {*names}:  # other data: only how rows are made stays
            data = {key: data[key] for key in _OF_ROWS if key in data}
        elif is_named:
            data = {**data, "eval_split": None}
        layers.values = {**saved, "data": data, "observe": {}, "optim": {"name": "sgd"}}  # sgd has no state
    else:
        _require_model_folder(source, path)
        if not is_named:
            what = "a model" if path.is_dir() else "no such folder, and a model of the hub"
            raise ConfigError(f"{source}: {what} has no validation set.\n  Name data: data.source=text data.path=FILE.")
        layers.values = {"model": {"pretrained": source}}
    train: Mapping[str, Any] = layers.values.get("train", {})
    kept = {key: value for key, value in train.items() if key in ("task", "micro_batch") and value != "auto"}
    layers.values |= {"checkpoint": {}, "train": {"steps": 1, **kept}}
    for text in overrides:
        layers.override(text)
    config = loaded(layers).config
    if not is_named and config.data.eval_split is None:
        words = f"{'' if config.data.path else 'data.source=text '}data.path=FILE"
        raise ConfigError(f"{source}: the run has no validation set.\n  Name data: {words}.")
    config = config.model_copy(update={"train": config.train.model_copy(update={"global_batch": 0})})
    return checkpoint, config, config.data.eval_split is not None


def _require_model_folder(source: str, path: Path) -> None:
    """Raise ConfigError for a source that is neither a model folder nor a hub id."""
    from portable_fsdp.checkpoint.manifests import checkpoints_below
    from portable_fsdp.runtime.hub import is_hub_id

    if not path.is_dir() and not is_hub_id(source):
        others = checkpoints_below(path.parent)
        fix = f"The newest checkpoint there is {others[0]}" if others else "Name a run, a checkpoint or a model folder"
        problem = "a file, not a folder" if path.is_file() else "no such folder"
        raise ConfigError(f"{source}: {problem}.\n  {fix}.")
    if (path / "events.jsonl").is_file():
        raise ConfigError(f"{source}: a run without a checkpoint.\n  Name a run with a checkpoint, or a model.")
    if path.is_dir() and not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
        raise ConfigError(
            f"{source}: neither a run, nor a checkpoint, nor a model: it has no config.json and no GGUF file.\n"
            "  Name one of these."
        )


def _result(config: "Config", engine: "Backend", checkpoint: Path | None, is_validation: bool) -> dict[str, Any]:
    from portable_fsdp.checkpoint.resume import ResumePoint
    from portable_fsdp.runtime.command import configure_log
    from portable_fsdp.train.build import build_training, open_checkpoints
    from portable_fsdp.train.evaluate import Evaluator
    from portable_fsdp.train.preflight import check_with_engine, open_data

    configure_log(engine.process.index)
    logging.getLogger("portable_fsdp").setLevel(logging.WARNING)
    check_with_engine(config, engine, writes=False)
    config, corpus = open_data(config, engine)
    rows = corpus.eval_rows if is_validation and corpus.eval_rows is not None else corpus.rows
    training = build_training(config, engine, corpus.tokenizer, rows=rows)
    if checkpoint is not None:
        with open_checkpoints(config, engine, training, corpus) as checkpoints:
            point = ResumePoint(checkpoint, (), is_own=False, weights_only=True)
            checkpoints.load(point, training.model, training.optimizer)
    evaluation = Evaluator(engine, training.model, rows, config.train, training.task)()
    if evaluation is None or evaluation.tokens == 0:
        raise ConfigError("data: nothing counts in these rows: all labels are -100.")
    data = config.data.factory or config.data.path or config.data.source
    figures = {"loss": evaluation.loss, "perplexity": evaluation.perplexity, **evaluation.metrics}
    return {**figures, "counted": evaluation.tokens, "rows": len(rows), "data": data}


def _text(result: Mapping[str, Any]) -> str:
    figures = "  ".join(f"{name}: {value:.4f}" for name, value in result.items() if isinstance(value, float))
    over = f"{result['counted']:,} labels in {result['rows']:,} rows of {result['data']}"
    return f"{figures}  ({over}; {result['source']}; {result['backend']} on {result['devices']} x {result['device']})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
