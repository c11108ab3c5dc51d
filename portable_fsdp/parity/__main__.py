"""Is it the same run there? `python -m portable_fsdp.parity --config=run.yaml --on=native:2,xla:4 --steps=20`."""

import argparse
import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from portable_fsdp.backends.open import count_devices, local_processes, resolve
from portable_fsdp.backends.support import require_supported
from portable_fsdp.config.load import read_config
from portable_fsdp.config.schema import Config
from portable_fsdp.parity.certificate import markdown
from portable_fsdp.parity.culprit import find_culprit
from portable_fsdp.parity.record import (
    EXACT_STEPS,
    LAST_STEP,
    Certificate,
    Deviation,
    Place,
    PlaceTask,
    RunRecord,
    deviation,
    is_float32,
    loss_bound,
)
from portable_fsdp.runtime.child import Child
from portable_fsdp.runtime.command import IMPORT_HELP, CommandParser, Once, at_least, run_command, to_stderr, to_stdout
from portable_fsdp.runtime.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_USAGE,
    BackendError,
    ConfigError,
    TrainingError,
    UsageError,
)
from portable_fsdp.runtime.files import write_text_atomically
from portable_fsdp.runtime.process import detect_launch
from portable_fsdp.train.early_checks import check_paths

DESCRIPTION = """Run the first steps of a config on several engines or numbers of devices and compare them step by step.

Writes certificate.md and certificate.json; where losses part, names the layer at fault."""
EXIT_CODES = """exit code: 0 equal within the bounds, 1 different (or a place failed), 2 usage or config error, 130 for
Ctrl-C"""

_EXIT_INTERRUPTED = 130  # 128 + SIGINT
_LIMIT_S = 24 * 3600.0
_WORKER = "portable_fsdp.parity.worker"


def _parser() -> CommandParser:
    parser = CommandParser("parity", DESCRIPTION, epilog=EXIT_CODES)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides a key of the config; or CONFIG")
    parser.add_argument("--config", action=Once, metavar="FILE", help="YAML file, as for portable_fsdp.launch")
    parser.add_argument("--import", action="append", default=[], dest="imports", metavar="FILE", help=IMPORT_HELP)
    parser.add_argument("--on", metavar="PLACES", help="ENGINE:DEVICES,...: native:2,xla:4; the first is the reference")
    parser.add_argument("--device", default="auto", help="auto | cpu | cuda | tpu, of all places (default auto)")
    parser.add_argument("--steps", type=at_least(1, int), default=20, metavar="N", help=f"at most {LAST_STEP}")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the certificate (default: run.dir-parity)")
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar="JSON", help="two certificates, of environments that can't be one"
    )
    return parser


def main(argv: list[str], worker: str = _WORKER) -> int:
    """Run with the arguments after the program's name; returns the exit code. `worker`: the module of each place."""
    try:
        return run_command(_parser(), argv, lambda options: _parity(options, worker))
    except KeyboardInterrupt:
        to_stderr("interrupted")
        return _EXIT_INTERRUPTED


def _parity(options: argparse.Namespace, worker: str) -> int:
    if options.compare:
        if options.on or options.config or options.overrides:
            raise UsageError("--compare: expected two certificates and nothing to run, found --on or a config too.")
        certificate = _compared(*(_read(path) for path in options.compare))
        return _finish(certificate, options.out)
    files = [word for word in options.overrides if "=" not in word] + [options.config] * (options.config is not None)
    if len(files) != 1 or options.on is None:
        raise ConfigError(
            "parity: expected one CONFIG and --on=PLACES, as in configs/quickstart.yaml --on=native:2,xla:4."
        )
    overrides = [word for word in options.overrides if "=" in word]
    config = _first_steps(read_config(files[0], overrides, options.imports, os.environ).config)
    places = _places(options.on, options.device, config)
    if options.steps > (last := LAST_STEP if is_float32(config) else EXACT_STEPS):
        raise UsageError(f"--steps: expected at most {last} (docs/parity.md), found {options.steps}.")
    check_paths(config)
    folder = _folder(options.out or Path(f"{config.run.dir}-parity"))
    certificate = certify(config, places, options.steps, worker)
    return _finish(certificate, folder)


def _first_steps(config: Config) -> Config:
    """Without what the first steps don't need: nothing of another run is read, and nothing but the record written."""
    return _with(
        config,
        train={"eval_every": None, "sample_every": None, "eval_on_start": False},
        checkpoint={"resume": "none", "export": False},
        observe={"trackers": (), "profile": None},
    )


def _with(config: Config, **sections: dict[str, Any]) -> Config:
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    )


def _places(text: str, device: str, config: Config) -> list[Place]:
    """Raises BackendError or ConfigError for places that can't run the config, before one is started."""
    if not detect_launch(os.environ).is_alone:
        raise UsageError(
            "parity: expected a plain start, found a launcher: it starts the processes of each place itself."
        )
    places: list[Place] = []
    for name in text.split(","):
        engine, _, number = name.strip().partition(":")
        if not number.isdecimal() or int(number) < 1:
            raise ConfigError(f"--on={text}: expected ENGINE:DEVICES,..., as native:2,xla:4, found {name!r}.")
        where, engine = resolve(device, engine)
        devices = int(number)
        if where != "cpu" and devices > count_devices(where):
            raise BackendError(
                f"--on={name}: expected at most {count_devices(where)} devices of this host, found {devices}."
            )
        require_supported(config, engine=engine, device=where, devices=devices, hosts=1)
        places.append(Place(device=where, engine=engine, devices=devices))
    return places


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {path} can't be made: {error.strerror}.") from None
    return path


def certify(config: Config, places: list[Place], steps: int, worker: str = _WORKER) -> Certificate:
    """Run the first `steps` of the config on each place and compare them with the first one."""
    with TemporaryDirectory(prefix="portable_fsdp_parity_") as folder:

        def run(place: Place, config: Config, steps: int, *, records: bool) -> RunRecord:
            to_stderr(f"{place} on {place.device}: {steps} steps{', each module recorded' if records else ''}")
            return _run(place, config, steps, Path(folder), worker, records=records)

        records: list[RunRecord] = []
        for place in places:
            try:
                records.append(run(place, config, steps, records=False))
            except UsageError as error:
                error.run_has_started = bool(records)
                raise
        deviations = [deviation(config, records[0], record) for record in records[1:]]
        parted = [item for item in deviations if item.first_step is not None]
        if parted:
            # torch.compile and scan run many modules as one.
            open_config = _with(config, compile={"enabled": False, "scan_layers": False})
            last = max(item.first_step or 0 for item in parted)
            reference = run(places[0], open_config, last, records=True)
            for item in parted:
                _explain(item, config, reference, run(item.place, open_config, last, records=True))
    return _certificate(config, records, deviations)


def _explain(item: Deviation, config: Config, reference: RunRecord, recorded: RunRecord) -> None:
    item.culprit = find_culprit(reference, recorded, loss_bound(config, 1))
    if item.culprit is not None:
        return
    again = deviation(config, reference, recorded)
    options = [f"compile.{name}" for name in ("enabled", "scan_layers") if getattr(config.compile, name)]
    item.remark = (
        "no module stands out: the difference grows little by little, as rounding does"
        if again.first_step is not None
        else f"the difference is gone without {' and '.join(options)}"
        if options
        else "the difference is gone when each module's tensors leave the step: the compiler, or chance"
    )


def _run(place: Place, config: Config, steps: int, folder: Path, worker: str, *, records: bool) -> RunRecord:
    out, task = folder / "record.json", folder / "task.json"
    error = out.with_name(f"{out.name}.error")
    out.unlink(missing_ok=True)
    processes = local_processes(place.device, place.engine, place.devices)
    text = PlaceTask(
        place=place,
        config=config.model_dump_json(),
        steps=steps,
        records=records,
        processes=processes,
        module=worker,
        out=str(out),
    ).model_dump_json()
    task.write_text(text)
    with Child(worker, str(task)) as child:
        ended = child.wait(_LIMIT_S)
    if ended.how == "finished" and out.is_file():
        return RunRecord.model_validate_json(out.read_bytes())
    reason = error.read_text() if error.is_file() else f"failed with exit code {ended.code}:\n{ended.last_lines}"
    raise (UsageError if ended.code == EXIT_USAGE else TrainingError)(f"{place}: {reason}")


def _certificate(config: Config, records: list[RunRecord], deviations: list[Deviation]) -> Certificate:
    differs = any(item.first_step is not None for item in deviations)
    verdict = "differs" if differs else "equal" if deviations else "not compared"
    return Certificate(verdict=verdict, config=config.model_dump(mode="json"), records=records, deviations=deviations)


def _read(path: Path) -> Certificate:
    try:
        return Certificate.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"--compare: {path}: expected a certificate.json of parity, found: {error}") from None


def _compared(first: Certificate, other: Certificate) -> Certificate:
    """The first place of one certificate with each place of the other."""
    config = Config.model_validate_json(json.dumps(first.config))
    curve = ("model", "data", "train", "optim", "precision")
    differing = [name for name in curve if first.config[name] != other.config[name]]
    steps = [len(certificate.records[0].losses) for certificate in (first, other)]
    if differing or steps[0] != steps[1] or first.config["run"]["seed"] != other.config["run"]["seed"]:
        raise UsageError(
            "--compare: expected two certificates of the same steps of one config, found other "
            f"{', '.join(differing) or 'seeds or numbers of steps'}."
        )
    records = [first.records[0], *other.records]
    return _certificate(config, records, [deviation(config, first.records[0], record) for record in other.records])


def _finish(certificate: Certificate, folder: Path | None) -> int:
    text = markdown(certificate)
    if folder is not None:
        try:
            write_text_atomically(_folder(folder) / "certificate.md", text)
            write_text_atomically(folder / "certificate.json", certificate.model_dump_json(indent=1))
        except OSError as error:
            raise UsageError(f"--out: {folder} can't be written: {error.strerror}.") from None
    to_stdout(text.rstrip())
    return EXIT_FAILED if certificate.verdict == "differs" else EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
