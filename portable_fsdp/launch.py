"""Start a training run: `python -m portable_fsdp.launch --device=tpu --config=run.yaml optim.lr=3e-4`.

Under torchrun (or a launcher that sets the same variables) this is one process of the run. Without a launcher and with
several native devices, it starts one process per device through torch's elastic launcher.
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from portable_fsdp.runtime.command import (
    CommandParser,
    KeptOutput,
    configure_log,
    number_of,
    run_command,
    say_once_per_host,
    to_stderr,
)
from portable_fsdp.runtime.errors import EXIT_FAILED, EXIT_STOPPED, ConfigError, PortableFSDPError
from portable_fsdp.runtime.failures import announce, how_ended, is_supervised, last_step, record_failure, supervise
from portable_fsdp.runtime.launchers import OUR_RUNS, Launch, detect_launch, elastic_hosts, hosts_of, is_by_accelerate
from portable_fsdp.runtime.signals import Stopped, early_stop, end_with_agent

if TYPE_CHECKING:
    from portable_fsdp.backends.refusals import Deployment
    from portable_fsdp.config.load import Loaded, ProblemsOf
    from portable_fsdp.config.schema import Config

log = logging.getLogger("portable_fsdp")

DESCRIPTION = """Train any model that the config names. With one process per GPU of this host:

  torchrun --nproc_per_node=8 -m portable_fsdp.launch --device=cuda --config=FILE"""
EXIT_CODES = "exit code: 0 finished, 2 usage or config error, 143 stopped after a committed save, 1 anything else"
FLAGS = {
    "device": "auto | cpu | cuda | tpu (default auto: cuda, else tpu, else cpu)",
    "backend": "auto | native | xla | xla_fsdp1 (default auto: native on cpu, cuda; on tpu the installed one)",
    "num_devices": "auto | N: devices of this host (default auto: all GPUs or TPU chips; one CPU device)",
}


def _parser() -> CommandParser:
    parser = CommandParser("launch", DESCRIPTION, epilog=EXIT_CODES)
    parser.foreign_hint = _foreign_hint
    overrides_help = "override a key of the config: optim.lr=3e-4"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides_help)
    parser.config_flags("YAML file; examples are in configs/")
    parser.switch("--verbose", "print when each part of the start ends, up to step 1")
    parser.auto_flags(FLAGS)
    return parser


def _foreign_hint(flag: str, value: str) -> str:
    from portable_fsdp.convert.table import flag_hint

    return flag_hint(flag, value)


def main(argv: list[str]) -> int:
    """Run `launch` with the arguments after the program's name; returns the exit code."""
    try:
        with early_stop(), KeptOutput() as output:
            body = partial(_launch, argv=argv, output=output)
            return run_command(_parser(), argv, body, say=say_once_per_host, starts_a_run=True)
    except Stopped as request:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            to_stderr(f"stopped before the run began ({request}): nothing was saved")
    return EXIT_FAILED


def _launch(options: argparse.Namespace, argv: list[str], output: KeptOutput) -> int:
    from portable_fsdp.backends.open import resolve, run_in_processes, spec_of
    from portable_fsdp.train.preflight import check_config, problems_of

    end_with_agent(os.environ)
    num_devices, launch = number_of("num_devices", options.num_devices), detect_launch(os.environ)

    def problems_beside(config: "Config") -> list[str]:
        try:
            return problems_of(config, _deployment(launch, *resolve(options.device, options.backend), num_devices))
        except PortableFSDPError as error:  # no such device here
            return [str(error), *problems_of(config, None)]

    loaded = _read(options, problems_beside, num_devices if launch.is_alone else launch.world_size)
    device, backend = resolve(options.device, options.backend)
    processes = _processes(launch, device, backend, num_devices)
    place = _deployment(launch, device, backend, num_devices)
    check_config(loaded.config, place)
    config = _config_of_start(loaded.config, launch)
    if hosts := elastic_hosts(os.environ):
        _check_elastic(config, launch, device, backend, hosts)
    announce(config.run.dir, config.run.max_restarts)
    if processes > 1:
        to_stderr(f"starting {processes} processes")
    since, folder = time.time(), Path(config.run.dir)
    note = partial(_note_failure, folder, since)
    code = run_in_processes(processes, launch, device, backend, "portable_fsdp.launch", argv, note)
    if code is not None:
        return _checked(code, folder, since)

    os.environ.update(launch.variables)
    if options.verbose:
        configure_log(launch.rank, verbose=True)
    log.debug("config read")
    if launch.rank == 0:
        loading = f"loading torch{' and torch_xla' * backend.startswith('xla')}"
        devices = launch.world_size if spec_of(backend).launcher_counts_devices else place and place.devices
        warnings = [text for imported in loaded.imports for text in imported.warnings(loaded.config, devices)]
        settings = [*_settings_of_environment(loaded), *_removed_keys(loaded)]
        to_stderr("\n".join([f"started by {launch.description}", *settings, *warnings, loading]))
    from portable_fsdp.train.loop import train

    log.debug("torch imported")
    exporter = None
    if config.checkpoint.export:
        from portable_fsdp.formats import exporting as exporter

    output.hold_stdout()
    return train(
        config,
        device=device,
        backend=backend,
        num_devices=num_devices,
        keep_output=output.begin,
        exporter=exporter,
    )


def _config_of_start(config: "Config", launch: Launch) -> "Config":
    """Return the config of this start: one after a failure resumes from the run's own checkpoints.

    Raises ConfigError for a run.max_restarts that nobody would honour.
    """
    is_ours = os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(OUR_RUNS)
    if config.run.max_restarts != type(config.run)().max_restarts and not (is_ours or is_supervised(os.environ)):
        fix = "; torchrun restarts: pass it --max-restarts" if launch.kind == "torchrun" else ""
        raise ConfigError(
            f"run.max_restarts={config.run.max_restarts}: only a run that is started by hand, on one Linux host, "
            f"restarts itself.\n  Leave it out{fix}."
        )
    if launch.restarts and config.checkpoint.resume == "none":
        return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "auto"})})
    return config


def _check_elastic(config: "Config", launch: Launch, device: str, backend: str, hosts: tuple[int, int]) -> None:
    """Raise ConfigError for a `torchrun --nnodes=MIN:MAX` that could not go on when a host is lost or joins."""
    from portable_fsdp.train.preflight import check_hosts

    nnodes = f"torchrun --nnodes={hosts[0]}:{hosts[1]}"
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") != "1":
        raise ConfigError(
            f"{nnodes}: restarted processes would wait for the store of a host that is lost.\n"
            "  Run export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every host before torchrun."
        )
    if config.checkpoint.resume == "none":
        raise ConfigError(
            f"checkpoint.resume=none: {nnodes} restarts a run whenever a host joins, and it would begin again.\n"
            "  Set checkpoint.resume=auto, and run.dir to a new folder for a new run."
        )
    limits = check_hosts(config, backend, device, hosts, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if limits and launch.rank == 0:
        to_stderr(limits)


def _processes(launch: Launch, device: str, backend: str, num_devices: int | None) -> int:
    """Return the number of processes to start on this host; 1 if a launcher started this one."""
    from portable_fsdp.backends.open import local_processes

    return local_processes(device, backend, num_devices) if launch.is_alone and not launch.by_accelerate else 1


def _deployment(launch: Launch, device: str, backend: str, num_devices: int | None) -> "Deployment | None":
    """Return where the run will be; None if only the engine knows: under a launcher, or on a slice under PJRT."""
    from portable_fsdp.backends.open import spec_of
    from portable_fsdp.backends.refusals import Deployment

    is_counted = spec_of(backend).launcher_counts_devices
    if not launch.is_alone or (device == "tpu" and not is_counted):
        return None
    hosts = hosts_of(device, os.environ)
    devices = _processes(launch, device, backend, num_devices) * hosts if is_counted else num_devices
    return Deployment(backend, device, devices, hosts)


def _read(options: argparse.Namespace, problems_of: "ProblemsOf", devices: int | None) -> "Loaded":
    """Read the config that the flags name; an error about its keys also has the problems of the rest. `devices`: as far
    as flags and launcher say it."""
    if options.config is None:
        files = [word for word in options.overrides if word.endswith((".yaml", ".yml", ".json")) and "=" not in word]
        example = files[0] if files else "configs/quickstart.yaml"
        raise ConfigError(f"--config: missing; name a YAML file, such as --config={example}.")
    if not (options.imports or is_by_accelerate(os.environ)):  # no other tool takes part
        from portable_fsdp.config.load import read_file

        with suppress(ConfigError):  # `convert` may explain it better
            return read_file(options.config, options.overrides)
    from portable_fsdp.convert.read import read_config

    return read_config(options.config, options.overrides, options.imports, os.environ, problems_of, devices)


def _note_failure(folder: Path, since: float, codes: Mapping[int, int]) -> None:
    """Record the end of a process that had no time to record its cause, from exit codes by rank."""
    silent = {rank: code for rank, code in codes.items() if code != EXIT_FAILED}
    rank, code = next(iter((silent or codes).items()))
    cause = f"process {rank} {how_ended(code)}"
    record_failure(folder, last_step(folder), cause, since, is_consequence=not silent, process=rank)


def _checked(code: int, run_dir: Path, since: float) -> int:
    """Return the exit code of processes that began at `since`: not that of a stop that was killed before its save."""
    stopped = run_dir / "STOPPED"
    if code != EXIT_STOPPED or (stopped.is_file() and stopped.stat().st_mtime >= since):
        return code
    metrics = run_dir / "metrics.jsonl"
    if metrics.is_file() and metrics.stat().st_mtime >= since:
        say_once_per_host(
            "killed before the save finished: torch's launcher kills processes 30 s after the stop request.\n"
            "  Rerun the same command to resume from the newest checkpoint, if there is one."
        )
    else:
        say_once_per_host("stopped before the first step of this start ended: it saved nothing")
    return EXIT_FAILED


def _settings_of_environment(loaded: "Loaded") -> Iterator[str]:
    """Yield a line about the options that come from the launcher's environment, which no file or flag shows."""
    for imported in loaded.imports:
        names = [name for name, setting in imported.settings.items() if loaded.origins.get(name) == setting.origin]
        if imported.kind == "environment" and names:
            settings = (f"{name}={imported.settings[name].value} ({imported.settings[name].key})" for name in names)
            yield f"from {imported.path}: {', '.join(settings)}"


def _removed_keys(loaded: "Loaded") -> Iterator[str]:
    """Yield a line about each key of a file that this release no longer has."""
    from portable_fsdp.config.schema import REMOVED

    yield from (f"{loaded.origins[key]}: {key}: {text}" for key, text in REMOVED.items() if key in loaded.origins)


if __name__ == "__main__":
    run = partial(main, sys.argv[1:])
    sys.exit(supervise(run) if is_supervised(os.environ) else run())
