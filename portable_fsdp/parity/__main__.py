"""Compare a run across places: `python -m portable_fsdp.parity --config=run.yaml --on=native:2,xla:4 --steps=20`."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pydantic import ValidationError

from portable_fsdp.backends.open import count_devices, local_processes, resolve, run_in_processes
from portable_fsdp.backends.refusals import Deployment
from portable_fsdp.config.describe import with_value, without_plan
from portable_fsdp.config.schema import Config
from portable_fsdp.convert.read import read_config
from portable_fsdp.parity.record import (
    Certificate,
    Deviation,
    Place,
    PlaceRecord,
    PlaceTask,
    RunTask,
    bounds,
    deviation,
    find_culprit,
    without_side_effects,
)
from portable_fsdp.runtime.child import Child
from portable_fsdp.runtime.command import CommandParser, at_least, run_command, to_stderr, to_stdout
from portable_fsdp.runtime.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_USAGE,
    PortableFSDPError,
    TrainingError,
    UsageError,
)
from portable_fsdp.runtime.files import write_text_atomically
from portable_fsdp.runtime.launchers import detect_launch
from portable_fsdp.runtime.signals import end_with_agent, end_with_parent
from portable_fsdp.train.preflight import check_config

if TYPE_CHECKING:
    from portable_fsdp.train.build import Training

DESCRIPTION = """Run the first steps of a config on several engines or numbers of devices; compare them step by step.

Writes certificate.md and certificate.json. If one layer computes something else, names that layer."""
EXIT_CODES = "exit code: 0 equal within the bounds, 1 different, or a place failed, 2 usage or config error, 130 Ctrl-C"

ROUNDING = "the difference grows gradually, as rounding does"
COMPILER = "a compiler causes it: it disappears when layers are recorded, without compile.enabled and scan_layers"

_LIMIT_S = 24 * 3600.0
_WORKER = "portable_fsdp.parity"


def _parser() -> CommandParser:
    parser = CommandParser("parity", DESCRIPTION, epilog=EXIT_CODES)
    add = parser.add_argument
    add("words", nargs="*", metavar="CONFIG key=value", help="the config, like --config, and overrides of its keys")
    parser.config_flags("YAML file, as for portable_fsdp.launch")
    add("--on", metavar="PLACES", help="ENGINE:DEVICES,... as in native:2,xla:4; each is compared with the first")
    add("--device", default="auto", help="auto | cpu | cuda | tpu, for all places (default auto, as for launch)")
    add("--steps", type=at_least(1, int), default=20, metavar="N", help="number of steps (default 20)")
    add("--out", type=Path, metavar="FOLDER", help="folder of the certificate (default: RUN-parity next to run.dir)")
    add("--compare", nargs=2, type=Path, metavar="JSON", help="compare two certificates from different environments")
    return parser


def main(argv: list[str], worker: str = _WORKER) -> int:
    """Run with the arguments after the program's name; return the exit code. `worker`: the module of each place."""

    def parity(options: argparse.Namespace) -> int:
        certificate, folder = _compared(options) if options.compare else _made(options, worker)
        text = _markdown(certificate)
        if folder is not None:
            write_text_atomically(folder / "certificate.json", certificate.model_dump_json(indent=1))
            write_text_atomically(folder / "certificate.md", text)
        to_stdout(text)
        return EXIT_FAILED if certificate.verdict == "differs" else EXIT_FINISHED

    return run_command(_parser(), argv, parity)


def _made(options: argparse.Namespace, worker: str) -> tuple[Certificate, Path]:
    overrides = [word for word in options.words if "=" in word]
    files = [*(word for word in options.words if "=" not in word), *filter(None, [options.config])]
    if len(files) != 1 or options.on is None:
        raise UsageError("parity: expected one CONFIG and --on=PLACES, as in run.yaml --on=native:2,xla:4.")
    if not detect_launch(os.environ).is_alone:
        raise UsageError("parity: a launcher started this process; start parity directly: it starts all processes.")
    config = read_config(files[0], overrides, options.imports, os.environ).config
    config = without_plan(without_side_effects(config))
    places = _places(options.on, options.device, config)
    if options.steps > bounds(config).steps:
        raise UsageError(f"--steps: expected at most {bounds(config).steps} (docs/parity.md), found {options.steps}.")
    folder = _folder(options.out or Path(f"{Path(config.run.dir)}-parity"))
    return certify(config, places, options.steps, worker), folder


def _places(text: str, device: str, config: Config) -> list[Place]:
    """Parse places. Raises UsageError for places that can't run the config, before any starts."""
    places: list[Place] = []
    for name in text.split(","):
        engine, _, number = name.partition(":")
        if not engine or not number.isdecimal() or int(number) < 1:
            raise UsageError(f"--on={text}: expected ENGINE:DEVICES,..., as in native:2,xla:4, found {name!r}.")
        where, engine = resolve(device, engine)
        if where != "cpu" and int(number) > (count := count_devices(where)):
            raise UsageError(f"--on={text}: expected at most the {count} devices of this host, found {name!r}.")
        check_config(config, Deployment(engine, where, int(number), 1))
        places.append(Place(device=where, engine=engine, devices=int(number)))
    return places


def _folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out: {path}: the folder can't be created: {error.strerror}.") from None
    return path


def certify(config: Config, places: Sequence[Place], steps: int, worker: str = _WORKER) -> Certificate:
    """Run the first steps of a config on each place, and compare with the first place.

    Then run step 1 again with each module recorded: a wrong layer may change no loss by more than the bound. If no
    layer is found, record all steps up to the first that differs. While recording, torch.compile and scan are off,
    since they run many modules as one. Below float32 single layers differ by rounding, so none is searched for while
    losses agree.
    """
    apart = config.without_compiler().model_dump_json()
    runs = [RunTask(config=config.model_dump_json(), steps=steps), RunTask(config=apart, steps=1, records=True)]

    def run(place: Place, runs: list[RunTask]) -> list[PlaceRecord]:
        recorded = max((run.steps for run in runs if run.records), default=0)
        to_stderr(f"{place} on {place.device}: {runs[0].steps} step(s), {recorded} with modules recorded")
        return run_place(PlaceTask(place=place, runs=runs, module=worker))

    ran: list[list[PlaceRecord]] = []
    for place in places:
        try:
            ran.append(run(place, runs if len(places) > 1 else runs[:1]))
        except UsageError as error:
            error.run_has_started = bool(ran)
            raise
    records, bound = [record for record, *_ in ran], bounds(config).loss
    deviations = [deviation(config, records[0], record) for record in records[1:]]
    for item, (_, recorded) in zip(deviations, ran[1:], strict=True):
        if item.first_step is not None or config.precision.compute == "float32":
            item.culprit = find_culprit(ran[0][1], recorded, bound)
        if item.culprit is None and item.first_step is not None:
            again = [RunTask(config=apart, steps=item.first_step, records=True)]
            [[reference], [other]] = (run(place, again) for place in (places[0], item.place))
            item.culprit = find_culprit(reference, other, bound)
            is_gone = deviation(config, reference, other).first_step is None
            item.remark = "" if item.culprit else f"no layer stands out: {COMPILER if is_gone else ROUNDING}"
    return _certificate(config, records, deviations)


def run_place(
    task: PlaceTask,
    limit_s: float = _LIMIT_S,
    environment: Mapping[str, str] | None = None,
    others_failed: Callable[[], bool] = lambda: False,
) -> list[PlaceRecord]:
    """Run a place in separate processes, or this process's part of it if a launcher started several; `environment` is
    added to theirs. Raises UsageError if it refuses the config, TrainingError if it fails, takes longer than `limit_s`,
    or `others_failed()`."""
    with TemporaryDirectory(prefix="portable_fsdp_place_") as folder:
        path, out, refusal = (Path(folder, name) for name in ("task", _record_name(), "error"))
        path.write_text(task.model_dump_json())
        # Its temporary files go there too: a killed launcher leaves some.
        with Child(task.module, str(path), environment={**(environment or {}), "TMPDIR": folder}) as child:
            ended = child.wait(limit_s, others_failed)
        if ended.how == "finished" and out.is_file():
            return [PlaceRecord.model_validate_json(line) for line in out.read_text().splitlines()]
        if refusal.is_file():
            raise (UsageError if ended.code == EXIT_USAGE else TrainingError)(f"{task.place}: {refusal.read_text()}")
    # Not our error, whatever the exit code: MKL exits with 2.
    how = {"late": f"not finished after {limit_s:.0f} s", "enough": "another process failed"}
    raise TrainingError(f"{task.place}: {how.get(ended.how, f'exit code {ended.code}')}\n{ended.last_lines}")


def _record_name() -> str:
    """Return the name of this process's file of records, beside that of its task."""
    return f"record.{detect_launch(os.environ).rank}"


def work(argv: list[str], prepare: Callable[["Training"], None] = lambda training: None) -> int:
    """Train in one place, in a process of its own, and write records. `argv`: the parent's pid, the file of a
    `PlaceTask`.

    Saves nothing, and leaves run.dir alone. Records and our errors go into files beside the task. `prepare` is called
    with the training before its first step. Returns the exit code.
    """
    parent, path = argv[0], Path(argv[1])
    task, launch = PlaceTask.model_validate_json(path.read_bytes()), detect_launch(os.environ)
    place = task.place
    if launch.is_alone:
        end_with_parent(int(parent))
        processes = local_processes(place.device, place.engine, place.devices)
        code = run_in_processes(processes, launch, place.device, place.engine, task.module, argv)
        if code is not None:
            return code
    elif os.getppid() == int(parent):
        end_with_parent(int(parent))
    end_with_agent(os.environ)
    from portable_fsdp.parity.recorder import run

    try:
        records = [run(place, each, prepare) for each in task.runs]
    except PortableFSDPError as error:
        write_text_atomically(path.with_name("error"), str(error))
        return error.exit_code
    write_text_atomically(path.with_name(_record_name()), "\n".join(record.model_dump_json() for record in records))
    return EXIT_FINISHED


def _certificate(config: Config, records: list[PlaceRecord], deviations: list[Deviation]) -> Certificate:
    differs = any(item.first_step is not None for item in deviations)
    verdict = "differs" if differs else "equal" if deviations else "not compared"
    return Certificate(verdict=verdict, config=config.model_dump_json(), records=records, deviations=deviations)


def _compared(options: argparse.Namespace) -> tuple[Certificate, Path | None]:
    """Compare the first place of one certificate with each place of the other."""
    if options.on or options.config or options.words:
        raise UsageError("--compare: it runs nothing; leave out --on, the config and overrides.")
    try:
        first, other = (Certificate.model_validate_json(path.read_bytes()) for path in options.compare)
        configs = [Config.model_validate_json(certificate.config) for certificate in (first, other)]
    except (OSError, ValidationError) as error:
        raise UsageError(f"--compare: expected two certificate.json files of parity: {error}") from None
    values = [with_value(with_value(config, "run.dir", ""), "run.name", None).model_dump() for config in configs]
    differing = [name for name in Config.model_fields if values[0][name] != values[1][name]]
    if differing or len(first.records[0].losses) != len(other.records[0].losses):
        actual = f"other {', '.join(differing)}" if differing else "another number of steps"
        raise UsageError(f"--compare: expected the same steps of one config, found {actual} in {options.compare[1]}.")
    deviations = [deviation(configs[0], first.records[0], record) for record in other.records]
    records = [first.records[0], *other.records]
    return _certificate(configs[0], records, deviations), _folder(options.out) if options.out else None


def _markdown(certificate: Certificate) -> str:
    """Format the certificate: the verdict, then each place, then the steps."""
    config = Config.model_validate_json(certificate.config)
    records, deviations = certificate.records, certificate.deviations
    limit, steps = bounds(config), len(records[0].losses)
    loss_bound = limit.loss if steps <= 20 else limit.loss_after_20
    names = [str(record.place) for record in records]
    compute = config.precision.compute
    within = f" within {compute}" if certificate.verdict == "equal" and compute != "float32" else ""
    lines = [
        f"# Parity: {certificate.verdict}{within}",
        "",
        f"{steps} steps, seed {config.run.seed}, {config.precision.compute}. Relative bounds: {loss_bound:g} "
        f"for losses, {limit.norm:g} for gradient norms.",
        "",
        "| place | device | versions |",
        "|---|---|---|",
        *(
            f"| {name} | {record.device_name} | {', '.join(map(' '.join, record.versions.items()))} |"
            for name, record in zip(names, records, strict=True)
        ),
        *(line for item in deviations for line in ("", f"## {item.place} vs. {names[0]}", "", *_findings(item))),
        "",
        f"| step | {' | '.join(f'loss, {name} | gradient norm, {name}' for name in names)} | loss differs by |",
        "|---" * (2 + 2 * len(names)) + "|",
    ]
    for at in range(steps):
        cells = [f"{record.losses[at]:.7f} | {record.grad_norms[at]:.6f}" for record in records]
        worst = max((item.losses[at] for item in deviations), default=0.0)
        lines.append(f"| {at + 1} | {' | '.join(cells)} | {worst:.1e} |")
    return "\n".join(lines) + "\n"


def _findings(item: Deviation) -> list[str]:
    loss, norm = (f"{max(each):.1e} (step {each.index(max(each)) + 1})" for each in (item.losses, item.grad_norms))
    lines = [f"- largest relative difference: {loss} of a loss, {norm} of a gradient norm"]
    lines.append(f"- first step beyond a bound: {item.first_step or 'none'}")
    if culprit := item.culprit:
        size = f"{culprit.kind}: {culprit.relative:.1e}, at most {culprit.before:.1e} before it"
        lines.append(f"- **{culprit.what}** (step {culprit.step}, {size})")
        lines.append(f"- the parameter whose update in that step differs most: {culprit.parameter}")
    return [*lines, f"- {item.remark}"] if item.remark else lines


if __name__ == "__main__":
    is_place = sys.argv[1:2] and sys.argv[1].isdecimal()
    sys.exit((work if is_place else main)(sys.argv[1:]))
