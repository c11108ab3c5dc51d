"""Checks before a run starts, each once: without torch, then with the engine, then with the model.

All problems of one stage are reported together. `launch` runs the first stage before it imports torch and transformers,
which takes seconds. Each process opens files and hub repositories by itself, so they may differ between processes.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.checkpoint.manifests import committed_steps, require_checkpoint
from portable_fsdp.checkpoint.storage import locate, store_of
from portable_fsdp.config.describe import with_value
from portable_fsdp.config.schema import Config
from portable_fsdp.data.sources import EXAMPLES, files_of
from portable_fsdp.data.tokenize import require_tokenizer_folder
from portable_fsdp.models.architecture import architecture_mapping, read_architecture
from portable_fsdp.optim.optimizer import check_schedule
from portable_fsdp.runtime.collective_errors import on_each_process, on_process_0
from portable_fsdp.runtime.errors import ConfigError, PortableFSDPError
from portable_fsdp.runtime.files import require_unused
from portable_fsdp.runtime.hub import before_transformers, is_hub_id, require_folder_or_hub_id

if TYPE_CHECKING:
    from portable_fsdp.backends.contract import Backend
    from portable_fsdp.data.build import Corpus

log = logging.getLogger("portable_fsdp")


def check_config(config: Config, deployment: Deployment | None, *, writes: bool = True) -> None:
    """Check a config for a deployment, and the files that it names on this host; contacts no hub and no object store.

    `deployment`: None if it is not known yet; then only the config's own values are checked. `writes`: whether the
    command writes into the run's folders. Raises one error with all problems.
    """
    _raise_all(_checks(config, deployment, writes=writes))


def problems_of(config: Config, deployment: Deployment | None) -> list[str]:
    """Return the messages of what `check_config` would raise, one for each check."""
    return [str(error) for error in _errors(_checks(config, deployment))]


def _checks(config: Config, deployment: Deployment | None, *, writes: bool = True) -> Iterator[Callable[[], None]]:
    if deployment is not None:
        yield lambda: require_supported(config, deployment)
    if (steps := config.train.steps) is not None:  # else they follow from the data
        yield from (lambda: check_schedule(config.optim, steps), lambda: check_profile(config, steps))
    if deployment is not None:
        yield from _folders(config) if writes else ()
        yield from (lambda: _require_model(config), lambda: _require_data(config))


def check_hosts(config: Config, engine: str, device: str, hosts: tuple[int, int], host_devices: int) -> str:
    """Say which numbers of hosts, from the first to the second, can't train; empty if all can.

    Raises ConfigError, with numbers that can, if none of them can.
    """

    def errors_with(count: int) -> list[PortableFSDPError]:
        place = Deployment(engine, device, count * host_devices, count)
        return _errors([lambda: require_supported(config, place)])

    problems = {count: f"{errors[0]}" for count in range(hosts[0], hosts[1] + 1) if (errors := errors_with(count))}
    words = f"torchrun --nnodes={hosts[0]}:{hosts[1]}, {host_devices} device(s) per host"
    if len(problems) > hosts[1] - hosts[0]:
        able = [str(count) for count in range(1, 2 * hosts[1] + 1) if not errors_with(count)]
        fix = f"numbers of hosts that can: {', '.join(able)}" if able else f"no number up to {2 * hosts[1]} can"
        raise ConfigError(f"{words}: no number of hosts in it can train.\n  {problems[hosts[0]]}\n  With it, {fix}.")
    lines = [f"\n  {count}: {text.splitlines()[0]}" for count, text in problems.items()]
    return f"{words}: the run would end on these numbers of hosts:{''.join(lines)}" if lines else ""


def _raise_all(checks: Iterable[Callable[[], None]]) -> None:
    """Run all checks. Raises the error of the first that fails, with the messages of all."""
    if errors := _errors(checks):
        errors[0].args = ("\n".join(map(str, errors)),)
        raise errors[0]


def _errors(checks: Iterable[Callable[[], None]]) -> list[PortableFSDPError]:
    errors: list[PortableFSDPError] = []
    for check in checks:
        try:
            check()
        except PortableFSDPError as error:
            errors.append(error)
    return errors


def _folders(config: Config) -> Iterator[Callable[[], None]]:
    folder = Path(config.run.dir)
    yield from (lambda: _require_writable(folder), lambda: require_unused(folder))
    yield from (lambda: _require_trackers(config), lambda: _require_resume(config))


def _require_model(config: Config) -> None:
    if config.model.architecture is not None:
        architecture_mapping(config.model.architecture)
    if config.model.pretrained is not None:
        require_folder_or_hub_id("model.pretrained", config.model.pretrained)


def _require_data(config: Config) -> None:
    if config.data.tokenizer not in ("auto", "bytes") and not is_hub_id(config.data.tokenizer):
        require_tokenizer_folder(Path(config.data.tokenizer), "data.tokenizer")
    for source in config.data.mixture or (config.data,):
        if source.source in EXAMPLES:
            files_of(source)


def _require_resume(config: Config) -> None:
    """Check checkpoint.resume, unless the run has its own checkpoints: it then resumes from these."""
    if config.checkpoint.resume not in ("auto", "none"):
        own, other = checkpoint_folder(config), locate(config.checkpoint.resume)
        if store_of(own).is_local and store_of(other).is_local and not committed_steps(own):
            require_checkpoint(other)


def _require_trackers(config: Config) -> None:
    if config.observe.trackers:
        from portable_fsdp.observe.trackers import require_installed

        later = "leave it out and send the metrics later by `python -m portable_fsdp.report RUN --track=NAME`"
        require_installed(config.observe.trackers, "observe.trackers", later)


def _require_writable(folder: Path) -> None:
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        problem = "a folder without write permission" if nearest.is_dir() else "a file"
        raise ConfigError(
            f"run.dir: expected a writable or new folder: {folder}\n  found {problem}: {nearest}\n"
            "  Set run.dir to another folder."
        )


def check_profile(config: Config, steps: int, resumed_step: int = 0, *, is_new: bool = True) -> None:
    """Raise ConfigError for an observe.profile past the last step, or, if `is_new`, before the step to resume from: the
    same command must resume a run whose profile is over."""
    if config.observe.profile is None:
        return
    (begin, end), last = config.observe.profile.steps, min(steps, config.train.stop_at or steps)
    if end > last or (is_new and begin <= resumed_step):
        raise ConfigError(
            f"observe.profile.steps: expected steps from {resumed_step + 1} to {last}, found [{begin}, {end}].\n"
            "  Choose among those, or profile the next steps of a running job: touch RUN/PROFILE."
        )


def checkpoint_folder(config: Config) -> Path:
    """Return the folder of the run's checkpoints. Raises CheckpointError for a URL of an unknown store."""
    return locate(config.checkpoint.dir or Path(config.run.dir) / "checkpoints")


def check_with_engine(config: Config, backend: "Backend", *, writes: bool = True) -> None:
    """Raise on all processes for folders that aren't writable and for a wrong architecture, before minutes of
    tokenizing. *collective*"""
    if writes:
        on_process_0(backend, lambda: _raise_all(_folders(config)))
    if (architecture := config.model.architecture) is not None:
        before_transformers()
        drops = config.model.resolved_dropout != 0
        on_each_process(backend, lambda: read_architecture(architecture, config.train.task, drops=drops, logs=False))


def fit_packing(config: Config) -> tuple[Config, str]:
    """Return the config with data.packing=none, and the reason, if rows of several documents don't suit its model.

    The answer depends on the config alone, so rows are the same on every engine and after a resume. A model that can't
    be built is left to the run, which reports it with all else.
    """
    data, model = config.data, config.model
    is_text = data.factory is None and model.factory is None and config.train.task == "causal_lm"
    if not is_text or data.resolved_packing != "documents":
        return config, ""
    from portable_fsdp.models.build import documents_problem

    try:
        problem = documents_problem(model, data.seq_len)
    except ConfigError:
        problem = ""
    if not problem:
        return config, ""
    by_choice = (
        "" if model.attention == "auto" else f" (with model.attention={model.attention}; auto may keep them apart)"
    )
    return with_value(config, "data.packing", "none"), problem + by_choice


def open_data(config: Config, backend: "Backend") -> tuple[Config, "Corpus"]:
    """Open the corpus and check that it is identical on all processes; returns `fit_packing`'s config too. *collective*

    Raises DataError or ConfigError on all processes, with the index of the process if only some found the problem. The
    error also has what is wrong with the model, whose weights are not read.
    """
    from portable_fsdp.data.build import build_data

    config, problem = fit_packing(config)

    def build() -> "Corpus":
        try:
            return build_data(config.data, config.model)
        except PortableFSDPError as error:
            # Not of a hub model: its weights would be downloaded first.
            if not is_hub_id(config.model.pretrained or "") and (problem := _problem_of_model(config)):
                error.args = (f"{error}\n{problem}",)
            raise

    corpus = on_each_process(backend, build)
    rows, tokenizer = corpus.fingerprint
    held_out = corpus.eval_rows.fingerprint() if corpus.eval_rows is not None else "none"
    require_same(backend, {"data.tokenizer": tokenizer, "data": rows, "data.eval_split": held_out})
    if problem:
        from portable_fsdp.data.document_rows import padding_in_words

        padding = padding_in_words(corpus.rows, config.run.seed)
        log.info("data.packing=documents: %s. Each row holds one document: %s", problem, padding)
    return config, corpus


def _problem_of_model(config: Config) -> str:
    """Build the model on the meta device; return what doesn't fit together, or an empty string."""
    from portable_fsdp.models.build import build_model
    from portable_fsdp.models.tasks import find_task
    from portable_fsdp.models.wrap import find_units

    try:
        task, seq_len = find_task(config.train.task, eager=True), config.data.seq_len
        built = build_model(config.model, config.precision, seed=0, seq_len=seq_len, vocabulary=0, task=task)
        find_units(built.model, config.sharding)
    except Exception as error:  # an error of the model's own code: that of the data goes first
        return str(error) if isinstance(error, PortableFSDPError) else ""
    return ""


def require_same_model(backend: "Backend", config: Mapping[str, Any]) -> None:
    """Raise ConfigError on all processes if the commit of `model.pretrained`, or its config.json (`config`; empty for
    other models), differs between them. *collective*"""
    opened = Path(str(config.get("_name_or_path", "")))
    rest = {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}
    facts = {
        "model.pretrained": opened.name if opened.parent.name == "snapshots" else "no hub commit",
        "the model's config.json": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:16],
    }
    require_same(backend, facts)


def require_same(backend: "Backend", facts: Mapping[str, str]) -> None:
    """Raise ConfigError, identical on all processes, for the first key that differs from process 0. *collective*"""
    by_process = backend.gather(dict(facts))
    for key, first in by_process[0].items():
        for index, others in enumerate(by_process):
            if others[key] != first:
                raise ConfigError(
                    f"{key}: expected the same on all processes, found {first} on process 0 and {others[key]} on "
                    f"process {index}.\n  Use the same files on all hosts; for the hub name a commit "
                    "(org/name@commit), since a branch may move."
                )
